/* base/topology.c - the machine's cores by node, and threads and memory near each other.
 *
 * Owns: the sorted table; the system calls that bind. Must not know: how the machine is found out
 * (topology_hwloc.c or topology_sysfs.c), what the threads compute.
 * Binding is by the kernel's node numbers and a few system calls, which need no library.
 * Thread: any; topology_bind_thread binds its caller. */
#include "base/topology.h"
#include "base/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* --- the table --------------------------------------------------------------------------------- */

static int by_node_core_cpu(const void *a, const void *b)
{
    const struct topology_cpu *x = a, *y = b;
    if (x->node != y->node) return x->node < y->node ? -1 : 1;
    if (x->core != y->core) return x->core < y->core ? -1 : 1;
    return x->cpu < y->cpu ? -1 : x->cpu > y->cpu;
}

/* The processors are sorted by the kernel's node numbers: these become indices. */
static void number_nodes(struct topology *t, const uint64_t *memory_bytes)
{
    uint32_t os = UINT32_MAX, core = UINT32_MAX;
    for (uint32_t i = 0; i < t->n_cpus; i++) {
        struct topology_cpu *c = &t->cpu[i];
        if (t->n_nodes == 0 || c->node != os) {
            os = c->node;
            core = UINT32_MAX;
            t->node[t->n_nodes++] = (struct topology_node){
                .os = os, .first = i, .memory_bytes = memory_bytes[os]
            };
        }
        struct topology_node *n = &t->node[t->n_nodes - 1];
        c->node = t->n_nodes - 1;
        n->n_cpus++;
        if (c->core == core) continue;
        core = c->core;
        n->n_cores++;
        t->n_cores++;
    }
}

stk_status topology_make(const struct topology_found *f, struct topology **out, struct stk_error *err)
{
    static const struct topology_cpu alone = { 0, 0, 0 };
    uint32_t n = f->n ? f->n : 1;
    struct topology *t = *out = sys_calloc(1, sizeof *t);
    if (t) t->cpu = sys_calloc(n, sizeof *t->cpu);
    if (t) t->node = sys_calloc(n, sizeof *t->node); /* no more of them than processors */
    if (!t || !t->cpu || !t->node) {
        topology_close(t);
        *out = NULL;
        return stk_error_set(err, STK_ERR_NOMEM, errno, "the machine's topology: no memory");
    }
    memcpy(t->source, f->source, sizeof t->source);
    t->n_cpus = n;
    t->quota = f->quota ? f->quota : 1;
    t->here = f->here && f->n;
    memcpy(t->cpu, f->n ? f->cpu : &alone, n * sizeof *t->cpu);
    for (uint32_t i = 0; i < n; i++) STK_ASSERT(t->cpu[i].node < TOPOLOGY_OS_MAX);
    qsort(t->cpu, n, sizeof *t->cpu, by_node_core_cpu);
    number_nodes(t, f->memory_bytes);
    return STK_OK;
}

stk_status topology_open(const char *given, struct topology **out, struct stk_error *err)
{
    *out = NULL;
    struct topology_found *f = sys_calloc(1, sizeof *f);
    if (!f) return stk_error_set(err, STK_ERR_NOMEM, errno, "the machine's topology: no memory");
    f->quota = TOPOLOGY_NO_QUOTA;
    stk_status st = topology_find(given ? given : "", f, err);
    if (st == STK_OK) st = topology_make(f, out, err);
    sys_free(f->cpu);
    sys_free(f);
    return st;
}

void topology_close(struct topology *t)
{
    if (!t) return;
    sys_free(t->cpu);
    sys_free(t->node);
    sys_free(t);
}

uint32_t topology_threads(const struct topology *t)
{
    return t->n_cores < t->quota ? t->n_cores : t->quota;
}

uint32_t topology_threads_here(void)
{
    struct topology *t;
    if (topology_open("", &t, NULL) != STK_OK) return 1;
    uint32_t n = topology_threads(t);
    topology_close(t);
    return n;
}

/* --- binding ----------------------------------------------------------------------------------- */

bool topology_bind_thread(const struct topology *t, uint32_t node)
{
    STK_ASSERT(node < t->n_nodes);
    const struct topology_node *n = &t->node[node];
    if (!t->here) return false;
    uint32_t most = 0;
    for (uint32_t i = 0; i < n->n_cpus; i++)
        if (t->cpu[n->first + i].cpu > most) most = t->cpu[n->first + i].cpu;
    size_t size = CPU_ALLOC_SIZE(most + 1);
    cpu_set_t *set = sys_calloc(1, size);
    if (!set) return false;
    for (uint32_t i = 0; i < n->n_cpus; i++) CPU_SET_S(t->cpu[n->first + i].cpu, size, set);
    bool bound = sched_setaffinity(0, size, set) == 0;
    sys_free(set);
    return bound;
}

enum { POLICY_PREFERRED = 1, POLICY_INTERLEAVE = 3, POLICY_NODE = 1, POLICY_ADDR = 2 }; /* linux/mempolicy.h */
enum { MASK_BITS = 8 * sizeof(unsigned long) };

struct node_mask { unsigned long bits[TOPOLOGY_OS_MAX / MASK_BITS]; };

static void mask_add(struct node_mask *m, uint32_t os)
{
    m->bits[os / MASK_BITS] |= 1ul << (os % MASK_BITS);
}

/* Pages that lie in part outside are left alone. PREFERRED and not BIND: a node that is full is no
 * reason to be killed. */
static bool set_policy(void *at, uint64_t size_bytes, int policy, const struct node_mask *m)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)at + page - 1) / page * page, to = ((uintptr_t)at + size_bytes) / page * page;
    if (from >= to) return true;
    /* the kernel takes one bit less than it is told */
    return syscall(SYS_mbind, from, (unsigned long)(to - from), policy, m->bits,
                   (unsigned long)TOPOLOGY_OS_MAX + 1, 0u) == 0;
}

bool topology_bind_memory(const struct topology *t, void *at, uint64_t size_bytes, uint32_t node)
{
    STK_ASSERT(node < t->n_nodes);
    struct node_mask m = { { 0 } };
    mask_add(&m, t->node[node].os);
    return t->here && set_policy(at, size_bytes, POLICY_PREFERRED, &m);
}

bool topology_interleave_memory(const struct topology *t, void *at, uint64_t size_bytes)
{
    struct node_mask m = { { 0 } };
    for (uint32_t i = 0; i < t->n_nodes; i++) mask_add(&m, t->node[i].os);
    return t->here && set_policy(at, size_bytes, POLICY_INTERLEAVE, &m);
}

/* --- asking ------------------------------------------------------------------------------------ */

int topology_node_of_memory(const void *at)
{
    int node = -1;
    long rc = syscall(SYS_get_mempolicy, &node, NULL, 0ul, at, (unsigned long)(POLICY_NODE | POLICY_ADDR));
    return rc == 0 ? node : -1;
}

/* One line of a small file; false: unreadable. */
static bool read_line(const char *folder, const char *name, char *buf, size_t size_bytes)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return false;
    int fd = sys_open(path, O_RDONLY, 0);
    if (fd < 0) return false;
    int64_t n = sys_read_some(fd, buf, size_bytes - 1, 0);
    sys_close(fd);
    if (n <= 0) return false;
    buf[n] = '\0';
    buf[strcspn(buf, "\n")] = '\0';
    return true;
}

int topology_node_of_device(const char *sysfs, const char *folder)
{
    char at[PATH_MAX], text[64];
    if (!read_line(sysfs, "devices/system/node/online", text, sizeof text) || !strpbrk(text, "-,")) return -1;
    if (snprintf(at, sizeof at, "%s", folder) >= (int)sizeof at) return -1;
    for (int level = 0; level < 16; level++) {
        long node = read_line(at, "numa_node", text, sizeof text) ? strtol(text, NULL, 10) : -1;
        if (node >= 0) return (int)node;
        char *slash = strrchr(at, '/');
        if (!slash || slash == at) return -1;
        *slash = '\0';
    }
    return -1;
}
