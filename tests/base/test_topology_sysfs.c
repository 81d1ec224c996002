/* tests/base/test_topology_sysfs.c - the way without hwloc, in every build: its .c file is part of this
 * program, so topology_open asks it and not the build's own. */
#include "base/topology_sysfs.c"
#include "tests/base/tree.h"

static struct topology *open_tree(const struct tree *t)
{
    struct topology *out = NULL;
    struct stk_error err = { 0 };
    CHECK(topology_open(t->root, &out, &err) == STK_OK);
    return out;
}

static uint32_t cores_of(const struct tree *tree)
{
    struct topology *t = open_tree(tree);
    uint32_t n = t ? topology_threads(t) : 0;
    topology_close(t);
    return n;
}

static void put_siblings(const struct tree *t, int cpu, const char *list)
{
    char path[96];
    snprintf(path, sizeof path, "sys/devices/system/cpu/cpu%d/topology/%s", cpu,
             cpu % 2 ? "core_cpus_list" : "thread_siblings_list");
    tree_put(t, path, list);
}

/* Hardware threads of a core count once, also when the lowest of them is not ours. */
TEST(topology_sysfs_mem_26_hardware_threads)
{
    static const char *const list[] = { "0,4\n", "1,5\n", "2,6\n", "3,7\n" };
    struct tree t;
    REQUIRE(tree_new(&t));
    tree_put(&t, "proc/self/status", "Name:\tx\nCpus_allowed:\t00ff\n");
    CHECK(cores_of(&t) == 8); /* nothing known of cores */
    for (int i = 0; i < 8; i++) put_siblings(&t, i, list[i % 4]);
    CHECK(cores_of(&t) == 4);
    tree_put(&t, "proc/self/status", "Name:\tx\nCpus_allowed:\t0072\n"); /* 1, 4, 5, 6 */
    CHECK(cores_of(&t) == 3);
    tree_put(&t, "proc/self/cgroup", "0::/run.scope\n");
    tree_put(&t, "sys/fs/cgroup/run.scope/cpu.max", "200000 100000\n");
    CHECK(cores_of(&t) == 2);
    tree_end(&t);
}

/* Two sockets of eight cores, two hardware threads each; the cpuset leaves half of the second. */
TEST(topology_sysfs_two_sockets)
{
    struct tree tree;
    char list[32];
    REQUIRE(tree_new(&tree));
    tree_put(&tree, "proc/self/status", "Cpus_allowed:\t0fff0fff\n");
    for (int i = 0; i < 32; i++) {
        snprintf(list, sizeof list, "%d,%d\n", i % 16, i % 16 + 16);
        put_siblings(&tree, i, list);
    }
    tree_put(&tree, "sys/devices/system/node/online", "0-1\n");
    tree_put(&tree, "sys/devices/system/node/node0/cpulist", "0-7,16-23\n");
    tree_put(&tree, "sys/devices/system/node/node1/cpulist", "8-15,24-31\n");
    tree_put(&tree, "sys/devices/system/node/node1/meminfo",
             "Node 1 MemTotal:       1048576 kB\nNode 1 MemFree:  3 kB\n");
    struct topology *t = open_tree(&tree);
    REQUIRE(t);
    CHECK(t->n_cpus == 24 && t->n_cores == 12 && t->n_nodes == 2 && topology_threads(t) == 12 && !t->here);
    CHECK(t->node[0].n_cores == 8 && t->node[0].n_cpus == 16 && t->node[0].memory_bytes == 0);
    CHECK(t->node[1].n_cores == 4 && t->node[1].n_cpus == 8 && t->node[1].memory_bytes == 1ull << 30);
    CHECK(t->cpu[t->node[1].first].cpu == 8 && t->cpu[t->node[1].first + 1].cpu == 24);
    topology_close(t);
    tree_end(&tree);
}

TEST(topology_sysfs_refuses_what_it_cannot_read)
{
    struct topology *t = NULL;
    struct stk_error err = { 0 };
    CHECK(topology_open("synthetic:core:2", &t, &err) == STK_ERR_CONFIG && !t && strstr(err.text, "hwloc"));
}

TEST(topology_sysfs_of_this_machine)
{
    struct topology *t = NULL;
    struct stk_error err = { 0 };
    CHECK_OK(topology_open("", &t, &err), &err);
    REQUIRE(t);
    printf("# %s: %u processors, %u cores, %u nodes\n", t->source, t->n_cpus, t->n_cores, t->n_nodes);
    CHECK(t->here && t->n_cores >= 1 && t->n_nodes >= 1);
    topology_close(t);
}

TEST_MAIN()
