/* base/topology.h - cores, NUMA nodes and what lies near what.
 *
 * Two ways to find out, one of them in a build, chosen by meson (-Dhwloc): base/topology_hwloc.c asks
 * hwloc, base/topology_sysfs.c reads /sys itself. Nodes and processors bear the kernel's numbers, so that
 * they can be compared with .../numa_node and taskset. What cannot be found is one node that has
 * everything, each processor a core of its own: never an error.
 *
 * Threads: a topology is read-only once open, any thread may ask it. Opening blocks for some
 * milliseconds. No global state. */
#ifndef BASE_TOPOLOGY_H
#define BASE_TOPOLOGY_H

#include "base/status.h"

#define TOPOLOGY_NO_QUOTA UINT32_MAX

enum { TOPOLOGY_OS_MAX = 1024 }; /* nodes: CONFIG_NODES_SHIFT is at most 10 */

struct topology_cpu { /* a processor that this process may use */
    uint32_t cpu;
    uint32_t core; /* the lowest processor of its core, be it ours or not: equal for hardware threads */
    uint32_t node; /* index in topology.node */
};

struct topology_node { /* a NUMA node on which we may use a processor */
    uint32_t os;            /* the kernel's number */
    uint32_t n_cores;       /* cores of it that we may use */
    uint32_t first, n_cpus; /* of topology.cpu */
    uint64_t memory_bytes;  /* 0: unknown */
};

struct topology {
    char source[16]; /* "hwloc", "/sys" */
    uint32_t n_cpus, n_cores, n_nodes;
    uint32_t quota; /* whole cores that the cgroups allow; TOPOLOGY_NO_QUOTA: as many as there are */
    bool here;      /* this machine: its threads and memory may be bound */
    struct topology_cpu *cpu; /* sorted by node, core, cpu; */
    struct topology_node *node; /* sorted by os */
};

/* This machine, as this thread may use it now: its affinity mask and the cgroups' quota (MEM-26).
 * `given` for tests, else "": the root of a captured tree (without hwloc; as in mem_limits_read), or
 * "synthetic:" and a line of hwloc's synthetic format, or a path that ends in ".xml" (with hwloc; see
 * lstopo(1)). STK_ERR_NOMEM; STK_ERR_CONFIG: this build does not know how to read what is given. */
stk_status topology_open(const char *given, struct topology **out, struct stk_error *err);
void topology_close(struct topology *t); /* NULL allowed */

/* Threads that computing should have: one a core, never two on the hardware threads of one, which
 * share its units and caches, and no more than the quota: the thread beyond would be stopped in every
 * period, and a team waits for its slowest. At least 1. */
uint32_t topology_threads(const struct topology *t);
/* The same of this machine, for who asks nothing else. 1 where memory is exhausted. */
uint32_t topology_threads_here(void);

/* --- near and far ------------------------------------------------------------------------------ */
/* Hints: a system that refuses (a container without the right, a kernel without NUMA) leaves threads and
 * memory as they were, which costs time and nothing else; hence bool. Node indices of an open topology
 * that is `here`; source: mbind(2), get_mempolicy(2), sched_setaffinity(2). */

/* The calling thread runs on the node's processors from now on. */
bool topology_bind_thread(const struct topology *t, uint32_t node);
/* Whole pages of mapped memory that were not touched yet come from this node (elsewhere only when it
 * has none left), or in turn from all nodes of the topology. Pages there are already stay. */
bool topology_bind_memory(const struct topology *t, void *at, uint64_t size_bytes, uint32_t node);
bool topology_interleave_memory(const struct topology *t, void *at, uint64_t size_bytes);
/* The kernel's number of the node on which a touched page lies; -1: unknown. */
int topology_node_of_memory(const void *at);
/* The kernel's number of the node to which a device is attached: the first `numa_node` that
 * knows, from this folder of sysfs upwards (a resolved path, such as .../block/nvme0n1); -1: unknown, or `sysfs` ("/sys", or a
 * test's tree) has one node only. */
int topology_node_of_device(const char *sysfs, const char *folder);

/* --- for the two ways to find out ---------------------------------------------------------------- */

/* What a backend fills: `n` processors, in any order, and for each the kernel's number of its node.
 * Allocated with sys_calloc; the caller frees. n = 0: nothing could be found. */
struct topology_found {
    char source[16];
    uint32_t n, quota;
    bool here;
    struct topology_cpu *cpu; /* node: the kernel's number, below TOPOLOGY_OS_MAX */
    uint64_t memory_bytes[TOPOLOGY_OS_MAX]; /* by the kernel's number of the node; 0: unknown */
};
stk_status topology_find(const char *given, struct topology_found *out, struct stk_error *err);
/* topology_open without the machine: tests. */
stk_status topology_make(const struct topology_found *f, struct topology **out, struct stk_error *err);

#endif
