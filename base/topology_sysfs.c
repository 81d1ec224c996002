/* base/topology_sysfs.c - the machine as /sys shows it, for builds without hwloc.
 *
 * Owns: nothing. Must not know: what the cores are for. Reads, below the root of a captured tree in
 * tests: the siblings of each processor that this process may use (devices/system/cpu/cpu<N>/topology),
 * its node (cpu<N>/node<M>), and the node's memory (devices/system/node/node<M>/meminfo).
 * Sources: the kernel's admin-guide/cputopology and ABI/stable/sysfs-devices-node.
 * Thread: any; a few small files a processor. */
#include "base/cgroup.h"
#include "base/cpu.h"
#include "base/sys.h"
#include "base/topology.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Lowest processor on the same core: hardware threads share it. */
static uint32_t core_of(const char *root, uint32_t cpu)
{
    static const char *const files[] = { "core_cpus_list", "thread_siblings_list" };
    char path[128], text[CGROUP_FILE_MAX];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%u/topology/%s", cpu, files[i]);
        if (!cgroup_read_text(root, path, text)) continue;
        char *end;
        unsigned long first = strtoul(text, &end, 10);
        if (end != text && first <= cpu) return (uint32_t)first;
    }
    return cpu;
}

static bool list_has(const char *list, uint32_t number)
{
    for (const char *at = list; *at >= '0' && *at <= '9';) { /* "0-3,8,10-11" */
        char *end;
        unsigned long from = strtoul(at, &end, 10), to = from;
        if (*end == '-') to = strtoul(end + 1, &end, 10);
        if (number >= from && number <= to) return true;
        if (*end != ',') return false;
        at = end + 1;
    }
    return false;
}

/* Node `os`: whether it is there, with its processors as text. */
static bool node_cpus(const char *root, uint32_t os, char text[CGROUP_FILE_MAX])
{
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/node/node%u/cpulist", os);
    return cgroup_read_text(root, path, text);
}

static uint64_t node_memory(const char *root, uint32_t os)
{
    char path[96], text[CGROUP_FILE_MAX];
    uint64_t kib = 0;
    snprintf(path, sizeof path, "/sys/devices/system/node/node%u/meminfo", os);
    if (!cgroup_read_text(root, path, text)) return 0;
    const char *at = strstr(text, "MemTotal:"); /* "Node 0 MemTotal:   123 kB" */
    return at && cgroup_find_number(at, "MemTotal:", &kib) ? kib * 1024 : 0;
}

/* Nodes that are online, as "0-1"; without the file there is one. */
static void find_nodes(const char *root, struct topology_found *out)
{
    char online[CGROUP_FILE_MAX], cpus[CGROUP_FILE_MAX];
    if (!cgroup_read_text(root, "/sys/devices/system/node/online", online)) return;
    for (uint32_t os = 0; os < TOPOLOGY_OS_MAX; os++) {
        if (!list_has(online, os) || !node_cpus(root, os, cpus)) continue;
        out->memory_bytes[os] = node_memory(root, os);
        for (uint32_t i = 0; i < out->n; i++)
            if (list_has(cpus, out->cpu[i].cpu)) out->cpu[i].node = os;
    }
}

stk_status topology_find(const char *given, struct topology_found *out, struct stk_error *err)
{
    struct stat st;
    if (*given && (stat(given, &st) != 0 || !S_ISDIR(st.st_mode)))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "topology '%s': no folder, and this build has no hwloc that could read it", given);
    snprintf(out->source, sizeof out->source, "/sys");
    uint32_t *list = NULL, n = cpu_list(given, &list);
    out->here = !*given;
    out->quota = cpu_quota(given);
    out->cpu = n ? sys_calloc(n, sizeof *out->cpu) : NULL;
    for (uint32_t i = 0; out->cpu && i < n; i++)
        out->cpu[out->n++] = (struct topology_cpu){ .cpu = list[i], .core = core_of(given, list[i]) };
    sys_free(list);
    if (n && !out->cpu) return stk_error_set(err, STK_ERR_NOMEM, errno, "the machine's topology: no memory");
    find_nodes(given, out);
    return STK_OK;
}
