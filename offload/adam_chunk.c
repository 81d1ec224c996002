/* offload/adam_chunk.c - Adam over the tensors of a chunk.
 *
 * Owns: which elements of a chunk belong to which coefficients. Must not know where the states come
 * from, why a step is taken, or how many members share a chunk. Pure; run by the members of the
 * update team. */
#include "offload/adam_chunk.h"
#include "base/sys.h"

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

/* The last tensor of the block that begins at or before element `elem` of its vector. */
static uint32_t tensor_at(const struct stk_layout *l, const struct stk_block *b, uint64_t elem)
{
    uint32_t low = b->first_tensor, high = low + b->n_tensors;
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        if (l->tensor_first[mid] <= elem) low = mid;
        else high = mid;
    }
    return low;
}

/* What is known of so many tensors is copied at once. Read line by line between the arrays of the state, each line
 * of the tables was waited for: the processor's own fetching ahead loses them there, and prefetches of ours held up
 * the state's. */
enum { STAGED = 1024 };

struct staged { /* n tensors, and the one behind them; none: ADAM_COEF_NONE */
    uint32_t n, of[STAGED + 1];
    uint64_t first[STAGED + 1];
};

static void stage(const struct stk_layout *l, const struct adam_coefs *coefs, uint32_t at, uint32_t past,
                  struct staged *s)
{
    s->n = past - at < STAGED ? past - at : STAGED;
    memcpy(s->first, l->tensor_first + at, s->n * sizeof *s->first);
    memcpy(s->of, coefs->of + at, s->n * sizeof *s->of);
    bool more = at + s->n < past;
    s->first[s->n] = more ? l->tensor_first[at + s->n] : 0;
    s->of[s->n] = more ? coefs->of[at + s->n] : ADAM_COEF_NONE;
}

void adam_pieces(const struct stk_layout *l, const struct stk_chunk *c, uint32_t begin,
                 uint32_t end, const struct adam_coefs *coefs,
                 void (*fn)(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                            uint32_t n),
                 void *arg)
{
    const struct stk_block *b = &l->blocks[c->block];
    const uint64_t from = c->first_elem + begin, to = c->first_elem + end;
    const uint32_t past = b->first_tensor + b->n_tensors;
    struct staged s;
    if (b->n_tensors == 0) return;
    uint32_t saved = adam_begin();
    for (uint32_t t = tensor_at(l, b, from); t < past && l->tensor_first[t] < to; t += s.n) {
        stage(l, coefs, t, past, &s);
        for (uint32_t i = 0; i < s.n && s.first[i] < to; i++) {
            uint32_t run = i, set = s.of[i];
            if (set == ADAM_COEF_NONE) continue;
            bool joins = coefs->set[set].eps > 0.0f;
            uint64_t lo = s.first[i] > from ? s.first[i] : from;
            while (joins && i + 1 < s.n && s.of[i + 1] == set && s.first[i + 1] < to) i++;
            /* with the padding if another step follows it: l->tensors is not looked at then */
            bool padded = joins && s.of[i + 1] != ADAM_COEF_NONE;
            uint64_t hi = padded ? s.first[i + 1] : s.first[i] + l->tensors[t + i].n_elems;
            if (hi > to) hi = to;
            if (hi <= lo) continue;
            fn(arg, t + run, lo - s.first[run], (uint32_t)(lo - c->first_elem), (uint32_t)(hi - lo));
        }
    }
    adam_end(saved);
}

bool adam_coefs_alloc(struct adam_coefs *c, uint32_t n_tensors)
{
    uint64_t n = n_tensors ? n_tensors : 1;
    *c = (struct adam_coefs){ .set = sys_calloc(n, sizeof *c->set),
                              .of = sys_calloc(n, sizeof *c->of) };
    if (c->of) memset(c->of, 0xff, n * sizeof *c->of);
    return c->set && c->of;
}

void adam_coefs_free(struct adam_coefs *c)
{
    sys_free(c->set);
    sys_free(c->of);
    *c = (struct adam_coefs){ 0 };
}

struct chunk_step {
    const struct adam_kernel *k;
    struct adam_way way;
    enum chunk_dtype dtype;
    const struct stk_chunk *c;
    const struct adam_chunk *at;
    const struct adam_coefs *coefs;
};

static void step_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                       uint32_t n)
{
    const struct chunk_step *x = arg;
    struct adam_span s = adam_chunk_span(x->dtype, x->c, x->at, chunk_elem, chunk_elem + n);
    (void)tensor_elem;
    s.way = x->way;
    adam_run(x->k, x->dtype == CHUNK_BF16 ? ADAM_BF16_SPLIT : ADAM_FP16, &s, adam_coef_of(x->coefs, tensor));
}

void adam_chunk_run(const struct adam_kernel *k, struct adam_way way, const struct stk_layout *l,
                    const struct stk_chunk *c, const struct adam_chunk *at,
                    const struct adam_coefs *coefs, uint32_t begin, uint32_t end)
{
    struct chunk_step x = { k, way, l->dtype, c, at, coefs };
    adam_pieces(l, c, begin, end, coefs, step_piece, &x);
}
