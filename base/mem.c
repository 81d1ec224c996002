/* base/mem.c - the table of large memory by tier and owner.
 *
 * Owns: the rows, the budgets and every piece of host memory reserved through it (released together
 * by mem_close).
 * Must not know: what is kept in the pieces; the machine (mem_limits.c reads it).
 * Thread: the one that sets up. */
#include "base/mem.h"
#include "base/sys.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct piece {
    void *at;
    uint64_t size_bytes;
};

struct mem {
    struct mem_row *row;
    uint32_t n_rows, rows_cap;
    struct piece *piece;
    uint32_t n_pieces, pieces_cap;
    uint64_t budget_bytes[MEM_TIER_N];
    char budget_option[MEM_TIER_N][32];
    bool sealed;
};

const char *mem_tier_name(enum mem_tier tier)
{
    static const char *const names[MEM_TIER_N] = { "host", "device", "nvme" };
    return (unsigned)tier < MEM_TIER_N ? names[tier] : "?";
}

stk_status mem_open(struct mem **out, struct stk_error *err)
{
    struct mem *m = sys_calloc(1, sizeof *m);
    *out = m;
    if (!m)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "the memory table: no memory for %zu bytes",
                             sizeof *m);
    for (int t = 0; t < MEM_TIER_N; t++) m->budget_bytes[t] = UINT64_MAX;
    return STK_OK;
}

void mem_close(struct mem *m)
{
    if (!m) return;
    for (uint32_t i = 0; i < m->n_pieces; i++) sys_munmap(m->piece[i].at, m->piece[i].size_bytes);
    sys_free(m->piece);
    sys_free(m->row);
    sys_free(m);
}

/* --- budgets ---------------------------------------------------------------------------------- */

void mem_set_budget(struct mem *m, enum mem_tier tier, uint64_t size_bytes,
                    const char *budget_option)
{
    STK_ASSERT((unsigned)tier < MEM_TIER_N);
    m->budget_bytes[tier] = size_bytes;
    snprintf(m->budget_option[tier], sizeof m->budget_option[tier], "%s",
             budget_option ? budget_option : "");
}

uint64_t mem_budget(const struct mem *m, enum mem_tier tier)
{
    STK_ASSERT((unsigned)tier < MEM_TIER_N);
    return m->budget_bytes[tier];
}

static uint64_t add_capped(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

uint64_t mem_total(const struct mem *m, enum mem_tier tier)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < m->n_rows; i++)
        if (m->row[i].tier == tier) sum = add_capped(sum, m->row[i].size_bytes);
    return sum;
}

/* `option`: of those that an option shrinks, and that take anything. */
static const struct mem_row *largest_of(const struct mem *m, enum mem_tier tier, bool option)
{
    const struct mem_row *best = NULL;
    for (uint32_t i = 0; i < m->n_rows; i++) {
        const struct mem_row *r = &m->row[i];
        if (option && (!r->option[0] || r->size_bytes == 0)) continue;
        if (r->tier == tier && (!best || r->size_bytes > best->size_bytes)) best = r;
    }
    return best;
}

stk_status mem_check_budgets(const struct mem *m, struct stk_error *err)
{
    for (int t = 0; t < MEM_TIER_N; t++) {
        uint64_t need = mem_total(m, (enum mem_tier)t), budget = m->budget_bytes[t];
        if (need <= budget) continue;
        char need_text[32], budget_text[32], largest_text[24], helps_text[24];
        const struct mem_row *largest = largest_of(m, (enum mem_tier)t, false),
                             *helps = largest_of(m, (enum mem_tier)t, true);
        const char *option = m->budget_option[t];
        char advice[160] = "";
        mem_size_format(need, need_text);
        mem_size_format(budget, budget_text);
        if (strcmp(need_text, budget_text) == 0) { /* the text rounds it off */
            snprintf(need_text, sizeof need_text, "%llu", (unsigned long long)need);
            snprintf(budget_text, sizeof budget_text, "%llu bytes", (unsigned long long)budget);
        }
        if (helps == largest)
            snprintf(advice, sizeof advice, ": try %s", helps->option);
        else if (helps) /* nothing shrinks the largest: the next one that an option does */
            snprintf(advice, sizeof advice, "; %s takes %s: try %s", helps->owner,
                     mem_size_format(helps->size_bytes, helps_text), helps->option);
        return stk_error_set(
            err, STK_ERR_NOMEM, 0,
            "%s memory: %s are needed, %s allows %s; the largest owner is %s with %s%s",
            mem_tier_name((enum mem_tier)t), need_text, *option ? option : "the budget",
            budget_text, largest->owner,
            mem_size_format(largest->size_bytes, largest_text), advice);
    }
    return STK_OK;
}

/* --- rows and pieces -------------------------------------------------------------------------- */

/* The array with room for one more element; NULL when memory is exhausted (the old array stays
 * valid). */
static void *make_room(void *array, uint32_t n, uint32_t *cap, size_t each_bytes)
{
    if (n < *cap) return array;
    uint32_t want = *cap ? *cap * 2 : 16;
    void *grown = sys_realloc(array, want * each_bytes);
    if (grown) *cap = want;
    return grown;
}

static stk_status refuse_sealed(const char *owner, uint64_t size_bytes, struct stk_error *err)
{
    char text[24];
    return stk_error_set(
        err, STK_ERR_STATE, 0,
        "%s asks for %s after the memory table was sealed: everything is reserved at start", owner,
        mem_size_format(size_bytes, text));
}

static struct mem_row *find_row(struct mem *m, enum mem_tier tier, const char *owner)
{
    /* a row keeps only so much of the name */
    for (uint32_t i = 0; i < m->n_rows; i++)
        if (m->row[i].tier == tier
            && strncmp(m->row[i].owner, owner, sizeof m->row[i].owner - 1) == 0)
            return &m->row[i];
    return NULL;
}

stk_status mem_note(struct mem *m, enum mem_tier tier, const char *owner, const char *option,
                    uint64_t size_bytes, struct stk_error *err)
{
    STK_ASSERT((unsigned)tier < MEM_TIER_N);
    if (m->sealed) return refuse_sealed(owner, size_bytes, err);
    struct mem_row *row = find_row(m, tier, owner);
    if (!row) {
        struct mem_row *rows = make_room(m->row, m->n_rows, &m->rows_cap, sizeof *m->row);
        if (!rows)
            return stk_error_set(err, STK_ERR_NOMEM, errno,
                                 "the memory table: no memory for the row of %s", owner);
        m->row = rows;
        row = &m->row[m->n_rows++];
        *row = (struct mem_row){ .tier = tier };
        snprintf(row->owner, sizeof row->owner, "%s", owner);
    }
    if (option && !row->option[0]) snprintf(row->option, sizeof row->option, "%s", option);
    row->size_bytes = add_capped(row->size_bytes, size_bytes);
    return STK_OK;
}

stk_status mem_reserve(struct mem *m, const char *owner, const char *option, uint64_t size_bytes,
                       void **out, struct stk_error *err)
{
    return mem_reserve_placed(m, owner, option, size_bytes, NULL, NULL, out, err);
}

stk_status mem_reserve_placed(struct mem *m, const char *owner, const char *option, uint64_t size_bytes,
                              mem_place_fn place, void *arg, void **out, struct stk_error *err)
{
    char text[24];
    *out = NULL;
    if (m->sealed) return refuse_sealed(owner, size_bytes, err);
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t whole = size_bytes > UINT64_MAX - page ? 0 : (size_bytes + page - 1) / page * page;
    if (whole == 0)
        whole =
            size_bytes ? UINT64_MAX - page + 1 : page; /* a piece of nothing still has an address */
    struct piece *pieces = make_room(m->piece, m->n_pieces, &m->pieces_cap, sizeof *m->piece);
    if (!pieces)
        return stk_error_set(err, STK_ERR_NOMEM, errno,
                             "the memory table: no memory for the piece of %s", owner);
    m->piece = pieces;
    void *at = sys_mmap(whole, place == NULL);
    if (!at)
        return stk_error_set(err, STK_ERR_NOMEM, errno,
                             "host memory: the system refuses %s for %s: %s%s%s",
                             mem_size_format(whole, text), owner, strerror(errno),
                             option && *option ? "; try " : "", option ? option : "");
    stk_status status = mem_note(m, MEM_HOST, owner, option, whole, err);
    if (status != STK_OK) {
        sys_munmap(at, whole);
        return status;
    }
    if (place) {
        place(arg, at, whole);
        sys_touch(at, whole);
    }
    m->piece[m->n_pieces++] = (struct piece){ at, whole };
    *out = at;
    return STK_OK;
}

void mem_seal(struct mem *m) { m->sealed = true; }
bool mem_sealed(const struct mem *m) { return m->sealed; }
uint32_t mem_rows(const struct mem *m) { return m->n_rows; }

const struct mem_row *mem_row_at(const struct mem *m, uint32_t i)
{
    STK_ASSERT(i < m->n_rows);
    return &m->row[i];
}
