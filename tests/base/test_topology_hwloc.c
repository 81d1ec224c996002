/* tests/base/test_topology_hwloc.c - machines that hwloc makes up; only in builds with hwloc. */
#include "base/sys.h"
#include "base/topology.h"
#include "tests/base/tree.h"

#include <sched.h>
#include <stdlib.h>

static struct topology *open_given(const char *given)
{
    struct topology *t = NULL;
    struct stk_error err = { 0 };
    if (topology_open(given, &t, &err) != STK_OK) printf("# %s\n", err.text);
    CHECK(t);
    return t;
}

TEST(topology_hwloc_two_sockets_two_nodes)
{
    struct topology *t = open_given("synthetic:pack:2 [numa(memory=32GB)] core:8 pu:2");
    REQUIRE(t);
    CHECK(strcmp(t->source, "hwloc") == 0 && !t->here && t->quota == TOPOLOGY_NO_QUOTA);
    CHECK(t->n_cpus == 32 && t->n_cores == 16 && t->n_nodes == 2 && topology_threads(t) == 16);
    for (uint32_t k = 0; k < t->n_nodes; k++)
        CHECK(t->node[k].os == k && t->node[k].n_cores == 8 && t->node[k].n_cpus == 16 &&
              t->node[k].memory_bytes == 32000000000ull);
    topology_close(t);
}

/* Linux's numbering: the second hardware thread of each core comes after all first ones. */
TEST(topology_hwloc_siblings_far_apart)
{
    struct topology *t = open_given("synthetic:pack:2 [numa] core:4 pu:2(indexes=0,8,1,9,2,10,3,11,4,12,5,13,6,14,7,15)");
    REQUIRE(t);
    CHECK(t->n_cores == 8 && t->n_nodes == 2 && t->cpu[0].cpu == 0 && t->cpu[1].cpu == 8);
    CHECK(t->cpu[0].core == 0 && t->cpu[1].core == 0 && t->cpu[8].cpu == 4 && t->cpu[8].node == 1);
    topology_close(t);
}

TEST(topology_hwloc_four_nodes_a_socket_and_one_node)
{
    struct topology *t = open_given("synthetic:pack:2 group:4 [numa] core:3 pu:1");
    CHECK(t && t->n_nodes == 8 && t->n_cores == 24 && t->node[7].n_cores == 3 && t->node[7].os == 7);
    topology_close(t);
    t = open_given("synthetic:core:6 pu:2");
    CHECK(t && t->n_nodes == 1 && t->n_cores == 6 && t->n_cpus == 12);
    topology_close(t);
}

TEST(topology_hwloc_reads_xml)
{
    static const char xml[] =
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><!DOCTYPE topology SYSTEM \"hwloc2.dtd\">"
        "<topology version=\"2.0\"><object type=\"Machine\" os_index=\"0\" cpuset=\"0xf\" complete_cpuset=\"0xf\""
        " allowed_cpuset=\"0xf\" nodeset=\"0x5\" complete_nodeset=\"0x5\" allowed_nodeset=\"0x5\" gp_index=\"1\">"
        "<object type=\"Package\" os_index=\"0\" cpuset=\"0x3\" complete_cpuset=\"0x3\" nodeset=\"0x1\""
        " complete_nodeset=\"0x1\" gp_index=\"2\"><object type=\"NUMANode\" os_index=\"0\" cpuset=\"0x3\""
        " complete_cpuset=\"0x3\" nodeset=\"0x1\" complete_nodeset=\"0x1\" gp_index=\"3\" local_memory=\"4096\"/>"
        "<object type=\"Core\" os_index=\"0\" cpuset=\"0x3\" complete_cpuset=\"0x3\" nodeset=\"0x1\""
        " complete_nodeset=\"0x1\" gp_index=\"4\"><object type=\"PU\" os_index=\"0\" cpuset=\"0x1\""
        " complete_cpuset=\"0x1\" nodeset=\"0x1\" complete_nodeset=\"0x1\" gp_index=\"5\"/>"
        "<object type=\"PU\" os_index=\"1\" cpuset=\"0x2\" complete_cpuset=\"0x2\" nodeset=\"0x1\""
        " complete_nodeset=\"0x1\" gp_index=\"6\"/></object></object>"
        "<object type=\"Package\" os_index=\"1\" cpuset=\"0xc\" complete_cpuset=\"0xc\" nodeset=\"0x4\""
        " complete_nodeset=\"0x4\" gp_index=\"7\"><object type=\"NUMANode\" os_index=\"2\" cpuset=\"0xc\""
        " complete_cpuset=\"0xc\" nodeset=\"0x4\" complete_nodeset=\"0x4\" gp_index=\"8\" local_memory=\"8192\"/>"
        "<object type=\"Core\" os_index=\"1\" cpuset=\"0xc\" complete_cpuset=\"0xc\" nodeset=\"0x4\""
        " complete_nodeset=\"0x4\" gp_index=\"9\"><object type=\"PU\" os_index=\"2\" cpuset=\"0x4\""
        " complete_cpuset=\"0x4\" nodeset=\"0x4\" complete_nodeset=\"0x4\" gp_index=\"10\"/>"
        "<object type=\"PU\" os_index=\"3\" cpuset=\"0x8\" complete_cpuset=\"0x8\" nodeset=\"0x4\""
        " complete_nodeset=\"0x4\" gp_index=\"11\"/></object></object></object></topology>";
    struct tree tree;
    char path[300];
    REQUIRE(tree_new(&tree));
    tree_put(&tree, "m.xml", xml);
    snprintf(path, sizeof path, "%s/m.xml", tree.root);
    struct topology *t = open_given(path);
    CHECK(t && t->n_nodes == 2 && t->n_cores == 2 && t->n_cpus == 4);
    CHECK(t && t->n_nodes == 2 && t->node[1].os == 2 && t->node[1].memory_bytes == 8192); /* numbers may have gaps */
    topology_close(t);
    tree_end(&tree);
}

/* A batch job's environment may tell hwloc of another machine: its processors are not ours, and ours are
 * none of its. */
TEST(topology_hwloc_of_another_machine_in_the_environment)
{
    cpu_set_t all;
    struct topology *t = NULL;
    struct stk_error err = { 0 };
    REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
    setenv("HWLOC_SYNTHETIC", "core:3 pu:1(indexes=900,901,902)", 1);
    CHECK_OK(topology_open("", &t, &err), &err);
    unsetenv("HWLOC_SYNTHETIC");
    REQUIRE(t);
    CHECK(t->n_cpus == (uint32_t)CPU_COUNT(&all) && t->n_cores == t->n_cpus && t->n_nodes == 1 && !t->here);
    for (uint32_t i = 0; i < t->n_cpus; i++) CHECK(CPU_ISSET(t->cpu[i].cpu, &all));
    topology_close(t);
}

TEST(topology_hwloc_refuses_nonsense)
{
    static const char *const given[] = { "synthetic:socks:2", "nowhere.xml", "folder" };
    for (int i = 0; i < 3; i++) {
        struct topology *t = NULL;
        struct stk_error err = { 0 };
        CHECK(topology_open(given[i], &t, &err) == STK_ERR_CONFIG && !t && strstr(err.text, given[i]));
    }
}

TEST_MAIN()
