/* base/topology_hwloc.c - the machine as hwloc (2.x) sees it.
 *
 * Owns: nothing; a topology of hwloc lives inside topology_find. Must not know: what the cores are for.
 * hwloc leaves out processors that are offline or that a cpuset forbids; the affinity mask and the quota
 * are taken from base/cpu.h. No caches and no devices are asked for, and no CPUID on each
 * processor in turn (component x86), which would move this thread about and say the same.
 * Thread: any; some milliseconds. */
#include "base/cpu.h"
#include "base/sys.h"
#include "base/topology.h"

#include <hwloc.h>
#include <stdio.h>
#include <string.h>

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), k = strlen(end);
    return n >= k && strcmp(text + n - k, end) == 0;
}

static stk_status load(const char *given, hwloc_topology_t *out, struct stk_error *err)
{
    static const char synthetic[] = "synthetic:";
    bool made = strncmp(given, synthetic, sizeof synthetic - 1) == 0, xml = ends_with(given, ".xml");
    hwloc_topology_t h = NULL;
    if (*given && !made && !xml)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "topology '%s': this build asks hwloc, which reads synthetic:... and *.xml", given);
    if (hwloc_topology_init(&h) != 0)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "the machine's topology: hwloc has no memory");
    int rc = 0;
    if (made) rc = hwloc_topology_set_synthetic(h, given + sizeof synthetic - 1);
    else if (xml) rc = hwloc_topology_set_xml(h, given);
    else (void)hwloc_topology_set_components(h, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "x86");
    /* not packages and groups: nodes hang on them, and would come near all processors without */
    (void)hwloc_topology_set_cache_types_filter(h, HWLOC_TYPE_FILTER_KEEP_NONE);
    (void)hwloc_topology_set_type_filter(h, HWLOC_OBJ_CORE, HWLOC_TYPE_FILTER_KEEP_ALL);
    if (rc == 0) rc = hwloc_topology_load(h);
    if (rc == 0) {
        *out = h;
        return STK_OK;
    }
    hwloc_topology_destroy(h);
    return stk_error_set(err, STK_ERR_CONFIG, 0, "topology '%s': hwloc cannot read it", given);
}

/* NULL: all of the topology. */
static bool ours(const uint32_t *list, uint32_t n, uint32_t cpu)
{
    for (uint32_t i = 0; i < n; i++)
        if (list[i] == cpu) return true;
    return !list;
}

/* What hwloc does not name, because it could not look or was told of another machine (HWLOC_XMLFILE in
 * the environment of a batch job), are cores of their own. */
static void take_rest(const uint32_t *list, uint32_t n, struct topology_found *out)
{
    for (uint32_t i = 0, named = out->n; list && i < n; i++) {
        uint32_t k = 0;
        while (k < named && out->cpu[k].cpu != list[i]) k++;
        if (k == named) out->cpu[out->n++] = (struct topology_cpu){ .cpu = list[i], .core = list[i] };
    }
}

static void take(hwloc_topology_t h, const uint32_t *list, uint32_t n, struct topology_found *out)
{
    hwloc_obj_t pu = NULL;
    while ((pu = hwloc_get_next_obj_by_type(h, HWLOC_OBJ_PU, pu)) != NULL) {
        if (!ours(list, n, pu->os_index)) continue;
        hwloc_obj_t core = hwloc_get_ancestor_obj_by_type(h, HWLOC_OBJ_CORE, pu);
        int lowest = core ? hwloc_bitmap_first(core->complete_cpuset) : -1;
        int node = pu->nodeset ? hwloc_bitmap_first(pu->nodeset) : -1;
        out->cpu[out->n++] = (struct topology_cpu){
            .cpu = pu->os_index,
            .core = lowest >= 0 ? (uint32_t)lowest : pu->os_index,
            .node = node >= 0 && node < TOPOLOGY_OS_MAX ? (uint32_t)node : 0,
        };
    }
    hwloc_obj_t at = NULL;
    while ((at = hwloc_get_next_obj_by_type(h, HWLOC_OBJ_NUMANODE, at)) != NULL)
        if (at->os_index < TOPOLOGY_OS_MAX) out->memory_bytes[at->os_index] = at->attr->numanode.local_memory;
}

stk_status topology_find(const char *given, struct topology_found *out, struct stk_error *err)
{
    hwloc_topology_t h = NULL;
    snprintf(out->source, sizeof out->source, "hwloc");
    stk_status st = load(given, &h, *given ? err : NULL);
    if (*given && st != STK_OK) return st;
    uint32_t *list = NULL, n = *given ? 0 : cpu_list("", &list);
    int named = h ? hwloc_get_nbobjs_by_type(h, HWLOC_OBJ_PU) : 0;
    size_t most = n + (named > 0 ? (size_t)named : 0);
    if (!*given) out->quota = cpu_quota("");
    out->here = !*given && (!h || hwloc_topology_is_thissystem(h));
    out->cpu = most ? sys_calloc(most, sizeof *out->cpu) : NULL;
    if (out->cpu && h) take(h, list, n, out);
    if (out->cpu) take_rest(list, n, out);
    sys_free(list);
    if (h) hwloc_topology_destroy(h);
    if (most && !out->cpu) return stk_error_set(err, STK_ERR_NOMEM, 0, "the machine's topology: no memory");
    return STK_OK;
}
