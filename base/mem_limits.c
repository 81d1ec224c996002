/* base/mem_limits.c - what the machine and the cgroups leave to this process, and sizes as text.
 *
 * Owns: nothing; reads /proc and the cgroup files anew at each call. Must not know: who needs the
 * memory.
 * Sources: proc(5) meminfo and status; the kernel's cgroup-v1/memory and cgroup-v2 documents.
 * Thread: any; reads small files. */
#include "base/cgroup.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

__extension__ typedef unsigned __int128 mem_u128;

static uint64_t read_status_kib(const char *key)
{
    char text[CGROUP_FILE_MAX];
    uint64_t kib;
    if (!cgroup_read_text("", "/proc/self/status", text) || !cgroup_find_number(text, key, &kib))
        return 0;
    return kib << 10;
}

uint64_t mem_resident_bytes(void) { return read_status_kib("VmRSS:"); }
uint64_t mem_peak_bytes(void) { return read_status_kib("VmHWM:"); }

/* File pages of this folder and all below it: the kernel takes them back before it refuses
 * memory. */
static uint64_t reclaimable_bytes(const char *root, const char *dir, bool v2)
{
    char path[4096], text[CGROUP_FILE_MAX];
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    if (!cgroup_read_text(root, path, text)) return 0;
    uint64_t inactive = 0, active = 0;
    (void)cgroup_find_number(text, v2 ? "inactive_file" : "total_inactive_file", &inactive);
    (void)cgroup_find_number(text, v2 ? "active_file" : "total_active_file", &active);
    return inactive + active;
}

static void visit_limit(const char *root, const char *dir, bool v2, void *arg)
{
    struct mem_limits *out = arg;
    uint64_t limit, high, use;
    const char *file = v2 ? "memory.max" : "memory.limit_in_bytes";
    if (!cgroup_read_number(root, dir, file, &limit)) return;
    /* from memory.high on, version 2 slows the process down until it hardly runs: a limit for us */
    if (v2 && cgroup_read_number(root, dir, "memory.high", &high) && high < limit) {
        limit = high;
        file = "memory.high";
    }
    if (limit >= (1ull << 62))
        return; /* version 1 writes "none" as the largest page-aligned number */
    if (!cgroup_read_number(root, dir, v2 ? "memory.current" : "memory.usage_in_bytes", &use))
        return;
    uint64_t cache = reclaimable_bytes(root, dir, v2);
    use = use > cache ? use - cache : 0;
    uint64_t room = limit > use ? limit - use : 0;
    if (limit < out->cgroup_limit_bytes) out->cgroup_limit_bytes = limit;
    if (room >= out->available_bytes) return;
    out->available_bytes = room;
    snprintf(out->why, sizeof out->why, "%s of cgroup %.60s", file, dir);
}

void mem_limits_read(const char *root, struct mem_limits *out)
{
    char text[CGROUP_FILE_MAX];
    *out = (struct mem_limits){ .cgroup_limit_bytes = UINT64_MAX };
    uint64_t total = 0, available = 0;
    bool known = cgroup_read_text(root, "/proc/meminfo", text)
                 && cgroup_find_number(text, "MemTotal:", &total)
                 && cgroup_find_number(text, "MemAvailable:", &available);
    out->total_bytes = total << 10;
    out->available_bytes = known ? available << 10 : UINT64_MAX;
    snprintf(out->why, sizeof out->why, "%s",
             known ? "MemAvailable of /proc/meminfo" : "nothing known: no /proc/meminfo");
    cgroup_walk(root, "memory", visit_limit, out);
}

/* --- sizes as text ---------------------------------------------------------------------------- */

/* Bytes in one unit; a lone letter is binary. 0: no such unit. */
static uint64_t unit_bytes(const char *unit)
{
    static const char letters[] = "KMGTP";
    if (*unit == '\0' || strcasecmp(unit, "B") == 0) return 1;
    uint64_t binary = 1, decimal = 1;
    for (const char *l = letters; *l; l++) {
        binary <<= 10;
        decimal *= 1000;
        if (strncasecmp(unit, l, 1) != 0) continue;
        if (unit[1] == '\0' || strcasecmp(unit + 1, "iB") == 0) return binary;
        return strcasecmp(unit + 1, "B") == 0 ? decimal : 0;
    }
    return 0;
}

bool mem_size_parse(const char *text, uint64_t *out_bytes)
{
    uint64_t whole = 0, fraction = 0, scale = 1;
    const char *at = text;
    if (*at < '0' || *at > '9') return false;
    for (; *at >= '0' && *at <= '9'; at++)
        if (__builtin_mul_overflow(whole, 10u, &whole)
            || __builtin_add_overflow(whole, (uint64_t)(*at - '0'), &whole))
            return false;
    bool fractional = *at == '.';
    if (fractional) {
        if (at[1] < '0' || at[1] > '9') return false;
        for (at++; *at >= '0' && *at <= '9'; at++) {
            if (scale >= 1000000000000000000u)
                continue; /* beyond 18 digits nothing changes a byte */
            fraction = fraction * 10 + (uint64_t)(*at - '0');
            scale *= 10;
        }
    }
    at += strspn(at, " ");
    uint64_t unit = unit_bytes(at);
    if (unit == 0 || (fractional && unit == 1)) return false;
    mem_u128 bytes = (mem_u128)whole * unit + (mem_u128)fraction * unit / scale;
    if (bytes > UINT64_MAX) return false;
    *out_bytes = (uint64_t)bytes;
    return true;
}

char *mem_size_format(uint64_t size_bytes, char *buf)
{
    enum { ROOM = 24 };
    if (size_bytes >= 1u << 30) snprintf(buf, ROOM, "%.2f GiB", (double)size_bytes * 0x1p-30);
    else if (size_bytes >= 1u << 20) snprintf(buf, ROOM, "%.2f MiB", (double)size_bytes * 0x1p-20);
    else if (size_bytes >= 1u << 10) snprintf(buf, ROOM, "%.2f KiB", (double)size_bytes * 0x1p-10);
    else snprintf(buf, ROOM, "%u B", (unsigned)size_bytes);
    return buf;
}
