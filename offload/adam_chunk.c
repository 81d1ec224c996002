/* offload/adam_chunk.c - Adam over the tensors of a chunk.
 *
 * Owns: which elements of a chunk belong to which coefficients. Must not know where the states come
 * from, why a step is taken, or how many members share a chunk. Pure; run by the members of the
 * update team. */
#include "offload/adam_chunk.h"

#include <string.h>

struct adam_span adam_chunk_span(enum chunk_dtype dtype, const struct stk_chunk *c,
                                 const struct adam_chunk *at, uint32_t from, uint32_t to)
{
    uint64_t all = c->n_elems, first = dtype == CHUNK_BF16 ? 2 : 4; /* bytes of low or master */
    return (struct adam_span){
        .n = to - from,
        .param = at->param + 2ull * from,
        .low_or_master = at->opt + first * from,
        .exp_avg = (float *)(void *)(at->opt + first * all) + from,
        .exp_avg_sq = (float *)(void *)(at->opt + (first + 4) * all) + from,
        .grad = at->grad + 2ull * from,
        .param_out = at->param_out ? at->param_out + 2ull * from : NULL,
    };
}

/* The first tensor of the block that ends behind element `elem` of its vector. */
static uint32_t first_tensor(const struct stk_layout *l, const struct stk_block *b, uint64_t elem)
{
    uint32_t low = b->first_tensor, high = low + b->n_tensors;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (l->tensors[mid].first_elem + l->tensors[mid].n_elems <= elem) low = mid + 1;
        else high = mid;
    }
    return low;
}

/* Tensor t + 1 may be run together with those from `first` to t. */
static bool joins(const struct stk_layout *l, const struct adam_coef *coef, uint32_t first,
                  uint32_t t)
{
    const struct stk_tensor *next = &l->tensors[t + 1];
    return next->touched && !next->frozen && coef[first].eps > 0.0f &&
           memcmp(&coef[first], &coef[t + 1], sizeof *coef) == 0;
}

/* Neighbours are joined up to about so many elements, and what is known of a tensor is fetched so many
 * tensors ahead: the tables of small tensors, 80 bytes each, then come beside the arithmetic, not before it
 * (a third of the time, measured). */
enum { JOINED_ELEMS = 1024, TABLES_AHEAD = 24 };

/* May point past the tables' ends: a prefetch reads nothing that the program sees. */
static inline void fetch_tables(const struct stk_layout *l, const struct adam_coef *coef, uint32_t t)
{
    uint64_t at = (uint64_t)t + TABLES_AHEAD;
    __builtin_prefetch((const void *)((uintptr_t)l->tensors + at * sizeof *l->tensors));
    __builtin_prefetch((const void *)((uintptr_t)coef + at * sizeof *coef));
}

void adam_pieces(const struct stk_layout *l, const struct stk_chunk *c, uint32_t begin,
                 uint32_t end, const struct adam_coef *coef,
                 void (*fn)(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                            uint32_t n),
                 void *arg)
{
    const struct stk_block *b = &l->blocks[c->block];
    uint64_t from = c->first_elem + begin, to = c->first_elem + end;
    uint32_t past = b->first_tensor + b->n_tensors, saved = adam_begin();
    for (uint32_t t = first_tensor(l, b, from); t < past && l->tensors[t].first_elem < to; t++) {
        const struct stk_tensor *x = &l->tensors[t];
        uint32_t first = t;
        uint64_t lo = x->first_elem > from ? x->first_elem : from;
        uint64_t hi = x->first_elem + x->n_elems;
        fetch_tables(l, coef, t);
        if (!x->touched || hi <= lo) continue;
        for (; hi < to && hi - lo < JOINED_ELEMS && t + 1 < past && joins(l, coef, first, t); t++) {
            fetch_tables(l, coef, t + 1);
            hi = l->tensors[t + 1].first_elem + l->tensors[t + 1].n_elems;
        }
        if (hi > to) hi = to;
        fn(arg, first, lo - x->first_elem, (uint32_t)(lo - c->first_elem), (uint32_t)(hi - lo));
    }
    adam_end(saved);
}

struct chunk_step {
    const struct adam_kernel *k;
    struct adam_way way;
    enum chunk_dtype dtype;
    const struct stk_chunk *c;
    const struct adam_chunk *at;
    const struct adam_coef *coef;
};

static void step_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                       uint32_t n)
{
    const struct chunk_step *x = arg;
    struct adam_span s = adam_chunk_span(x->dtype, x->c, x->at, chunk_elem, chunk_elem + n);
    (void)tensor_elem;
    s.way = x->way;
    adam_run(x->k, x->dtype == CHUNK_BF16 ? ADAM_BF16_SPLIT : ADAM_FP16, &s, &x->coef[tensor]);
}

void adam_chunk_run(const struct adam_kernel *k, struct adam_way way, const struct stk_layout *l,
                    const struct stk_chunk *c, const struct adam_chunk *at,
                    const struct adam_coef *coef, uint32_t begin, uint32_t end)
{
    struct chunk_step x = { k, way, l->dtype, c, at, coef };
    adam_pieces(l, c, begin, end, coef, step_piece, &x);
}
