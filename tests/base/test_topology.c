/* tests/base/test_topology.c - the table of cores and nodes, this machine through the way that this
 * build has, threads and memory bound to nodes. */
#include "base/cpu.h"
#include "base/sys.h"
#include "base/topology.h"
#include "tests/base/tree.h"

#include <errno.h>
#include <sched.h>

/* Two sockets of two cores with two hardware threads, as Linux numbers them: siblings far apart. */
static struct topology_cpu two_sockets[] = { { 7, 3, 1 }, { 0, 0, 0 }, { 4, 0, 0 }, { 2, 2, 1 },
                                             { 1, 1, 0 }, { 5, 1, 0 }, { 6, 2, 1 }, { 3, 3, 1 } };

static struct topology *make(struct topology_cpu *cpu, uint32_t n, uint32_t quota)
{
    static struct topology_found f;
    struct topology *t = NULL;
    struct stk_error err = { 0 };
    memset(&f, 0, sizeof f);
    f.n = n;
    f.cpu = cpu;
    f.quota = quota;
    f.memory_bytes[1] = 77;
    CHECK(topology_make(&f, &t, &err) == STK_OK);
    return t;
}

TEST(topology_hardware_threads_are_one_core)
{
    struct topology *t = make(two_sockets, 8, TOPOLOGY_NO_QUOTA);
    REQUIRE(t);
    CHECK(t->n_cpus == 8 && t->n_cores == 4 && t->n_nodes == 2 && topology_threads(t) == 4);
    for (uint32_t k = 0; k < 2; k++) {
        const struct topology_node *n = &t->node[k];
        CHECK(n->os == k && n->n_cores == 2 && n->first == 4 * k && n->n_cpus == 4);
        for (uint32_t i = 0; i < n->n_cpus; i++) CHECK(t->cpu[n->first + i].node == k);
    }
    CHECK(t->node[0].memory_bytes == 0 && t->node[1].memory_bytes == 77);
    CHECK(t->cpu[0].cpu == 0 && t->cpu[1].cpu == 4 && t->cpu[2].cpu == 1 && t->cpu[7].cpu == 7);
    CHECK(!topology_bind_thread(t, 1)); /* not this machine */
    topology_close(t);
}

TEST(topology_mem_26_quota_and_mask)
{
    struct topology *t = make(two_sockets, 8, 3);
    CHECK(t && topology_threads(t) == 3 && t->n_cores == 4);
    topology_close(t);
    t = make(two_sockets, 8, 0); /* half a core */
    CHECK(t && topology_threads(t) == 1);
    topology_close(t);
    struct topology_cpu some[] = { { 9, 5, 3 }, { 8, 4, 3 }, { 12, 4, 3 } }; /* one node, and not the first */
    t = make(some, 3, TOPOLOGY_NO_QUOTA);
    CHECK(t && t->n_nodes == 1 && t->node[0].os == 3 && topology_threads(t) == 2);
    topology_close(t);
    t = make(NULL, 0, TOPOLOGY_NO_QUOTA); /* nothing could be found */
    CHECK(t && t->n_cpus == 1 && t->n_nodes == 1 && topology_threads(t) == 1 && !t->here);
    topology_close(t);
    topology_close(NULL);
}

TEST(topology_of_this_machine)
{
    struct topology *t = NULL;
    struct stk_error err = { 0 };
    uint64_t before = sys_alloc_bytes();
    CHECK_OK(topology_open("", &t, &err), &err);
    REQUIRE(t);
    printf("# %s: %u processors, %u cores, %u nodes; %u threads\n", t->source, t->n_cpus, t->n_cores,
           t->n_nodes, topology_threads(t));
    CHECK(t->here && t->n_cores <= t->n_cpus && t->n_nodes <= t->n_cores);
    CHECK(topology_threads(t) == topology_threads_here() && topology_threads(t) <= cpu_count(""));
    uint32_t cores = 0;
    for (uint32_t i = 0; i < t->n_nodes; i++) cores += t->node[i].n_cores;
    CHECK(cores == t->n_cores);
    topology_close(t);
    CHECK(sys_alloc_bytes() == before);
}

TEST(topology_mem_26_follows_the_affinity_mask)
{
    cpu_set_t all, one;
    REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
    CPU_ZERO(&one);
    for (int i = CPU_SETSIZE - 1; i >= 0 && CPU_COUNT(&one) == 0; i--)
        if (CPU_ISSET(i, &all)) CPU_SET(i, &one);
    REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
    struct topology *t = NULL;
    struct stk_error err = { 0 };
    CHECK_OK(topology_open("", &t, &err), &err);
    CHECK(t && t->n_cpus == 1 && t->n_cores == 1 && t->n_nodes == 1 && CPU_ISSET(t->cpu[0].cpu, &one));
    CHECK(topology_threads_here() == 1);
    topology_close(t);
    CHECK(sched_setaffinity(0, sizeof all, &all) == 0);
}

TEST(topology_binds_threads_and_memory)
{
    struct topology *t = NULL;
    struct stk_error err = { 0 };
    enum { SIZE = 1 << 20 };
    cpu_set_t all, bound;
    REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
    CHECK_OK(topology_open("", &t, &err), &err);
    uint8_t *p = sys_mmap(2 * SIZE, false);
    REQUIRE(t && p);
    uint32_t last = t->n_nodes - 1;
    CHECK(topology_bind_thread(t, last));
    CHECK(sched_getaffinity(0, sizeof bound, &bound) == 0 &&
          (uint32_t)CPU_COUNT(&bound) == t->node[last].n_cpus);
    CHECK(sched_setaffinity(0, sizeof all, &all) == 0);
    bool memory = topology_bind_memory(t, p, SIZE, last) && topology_interleave_memory(t, p + SIZE, SIZE);
    CHECK(topology_bind_memory(t, p + 10, 100, 0)); /* no whole page: nothing to do */
    memset(p, 1, 2 * SIZE);
    int node = topology_node_of_memory(p), other = topology_node_of_memory(p + SIZE);
    printf("# memory on nodes %d and %d\n", node, other);
    CHECK(!memory || node == -1 || node == (int)t->node[last].os);
    sys_munmap(p, 2 * SIZE);
    topology_close(t);
    if (!memory || node == -1) SKIP("the system does not let memory be bound");
}

TEST(topology_out_of_memory_leaves_nothing)
{
    uint64_t before = sys_alloc_bytes();
    struct stk_error err = { 0 };
    bool done = false;
    for (uint64_t k = 1; k < 200 && !done; k++) {
        struct topology *t = NULL;
        sys_fault_arm(SYS_ALLOC, k, 1, ENOMEM);
        stk_status st = topology_open("", &t, &err);
        done = sys_fault_seen(SYS_ALLOC) < k;
        sys_fault_arm(SYS_ALLOC, 0, 0, 0);
        CHECK(st == STK_OK ? t != NULL : st == STK_ERR_NOMEM && t == NULL);
        topology_close(t);
        stk_error_clear(&err);
    }
    CHECK(done && sys_alloc_bytes() == before);
}

TEST(topology_node_of_a_device)
{
    struct tree t;
    char at[300];
    REQUIRE(tree_new(&t));
    tree_put(&t, "devices/pci0/0000:01:00.0/numa_node", "1\n");
    tree_put(&t, "devices/pci0/0000:01:00.0/nvme/nvme0/numa_node", "-1\n");
    snprintf(at, sizeof at, "%s/devices/pci0/0000:01:00.0/nvme/nvme0", t.root);
    CHECK(topology_node_of_device(t.root, at) == -1); /* nothing known of nodes */
    tree_put(&t, "devices/system/node/online", "0\n");
    CHECK(topology_node_of_device(t.root, at) == -1); /* one */
    tree_put(&t, "devices/system/node/online", "0-1\n");
    CHECK(topology_node_of_device(t.root, at) == 1);
    CHECK(topology_node_of_device(t.root, t.root) == -1 && topology_node_of_device(t.root, "x") == -1);
    tree_end(&t);
}

TEST_MAIN()
