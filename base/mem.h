/* base/mem.h - who owns which byte.
 *
 * A `mem` is the table of every large piece of memory (and file space) of one engine, by tier and
 * owner. Pieces are reserved while it is open, the table is printed, then mem_seal: from there on
 * nothing can be reserved (STK_ERR_STATE). Used by the thread that sets up. Sizes are exact: pages,
 * no power-of-two rounding. */
#ifndef BASE_MEM_H
#define BASE_MEM_H

#include "base/status.h"

enum mem_tier { MEM_HOST, MEM_DEVICE, MEM_NVME, MEM_TIER_N };
const char *mem_tier_name(enum mem_tier tier);

struct mem_row {
    enum mem_tier tier;
    char owner[48];        /* "optimizer state", "parameter cache", ... : what a person calls it */
    char option[64];       /* the option that shrinks it, "" if none */
    uint64_t size_bytes;
};

struct mem;
stk_status mem_open(struct mem **out, struct stk_error *err);
void mem_close(struct mem *m); /* frees every piece; NULL allowed */

/* Budget of a tier; UINT64_MAX: unlimited (initially). mem_check_budgets sums the rows and refuses
 * with the numbers, the largest owner of that tier, and the option that shrinks it or, when none
 * does, the largest owner that has one (STK_ERR_NOMEM). Options are printed as given:
 * "--host-memory", "--optimizer-state nvme". */
void mem_set_budget(struct mem *m, enum mem_tier tier, uint64_t size_bytes,
                    const char *budget_option);
uint64_t mem_budget(const struct mem *m, enum mem_tier tier);
stk_status mem_check_budgets(const struct mem *m, struct stk_error *err);

/* Adds a row without memory behind it (planning, --dry-run, device- or file-backed bytes). Equal
 * tier+owner rows add up. */
stk_status mem_note(struct mem *m, enum mem_tier tier, const char *owner, const char *option,
                    uint64_t size_bytes, struct stk_error *err);
/* Reserves page-aligned, zeroed, touched host memory and adds its row. Freed by mem_close. */
stk_status mem_reserve(struct mem *m, const char *owner, const char *option, uint64_t size_bytes,
                       void **out, struct stk_error *err);
/* The same, and `place` (NULL: none) may say where the pages are to lie before they are touched. */
typedef void (*mem_place_fn)(void *arg, void *at, uint64_t size_bytes);
stk_status mem_reserve_placed(struct mem *m, const char *owner, const char *option, uint64_t size_bytes,
                              mem_place_fn place, void *arg, void **out, struct stk_error *err);
void mem_seal(struct mem *m);
bool mem_sealed(const struct mem *m);

uint32_t mem_rows(const struct mem *m);
/* borrowed until the next mem_note/mem_reserve */
const struct mem_row *mem_row_at(const struct mem *m, uint32_t i);
uint64_t mem_total(const struct mem *m, enum mem_tier tier);

/* --- reading the machine ---------------------------------------------------------------------- */

/* Resident bytes of this process now and at its peak (VmRSS, VmHWM of /proc/self/status). 0 if
 * unreadable. */
uint64_t mem_resident_bytes(void);
uint64_t mem_peak_bytes(void);

/* What this process may still use: the smallest of free memory (MemAvailable) and each cgroup's
 * limit minus its use, with reclaimable page cache not counted as use (MEM-22). `root` is "" or the
 * root of a captured tree (tests). `why` says which limit decided. */
struct mem_limits {
    uint64_t available_bytes;
    uint64_t total_bytes;
    uint64_t cgroup_limit_bytes; /* UINT64_MAX: none */
    char why[96];
};
void mem_limits_read(const char *root, struct mem_limits *out);

/* Parses "24GiB", "1.5GB", "512MiB", "4096", "0". False: not a size, negative or overflow. */
bool mem_size_parse(const char *text, uint64_t *out_bytes);
/* "3.42 GiB" into buf (at least 24 bytes); returns buf. */
char *mem_size_format(uint64_t size_bytes, char *buf);

#endif
