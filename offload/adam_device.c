/* offload/adam_device.c - Adam's step on state in the device's memory.
 *
 * Owns: the translation of coefficients and spans into gpu/ops.h's words. Must not know which blocks lie
 * there, nor how the device runs it. The walk over spans: threads of the host device; the rest: who issues
 * the update (in training the engine lane). */
#include "offload/adam_device.h"

#include <string.h>

_Static_assert(sizeof(struct ops_adam_coef) == sizeof(struct adam_coef), "member by member");

void adam_device_run(const struct ops_adam *a, uint64_t begin, uint64_t end)
{
    static const enum adam_layout layout[OPS_ADAM_LAYOUT_N] = { ADAM_BF16_SPLIT, ADAM_FP16,
                                                                ADAM_F32 };
    const uint64_t word = ops_adam_word_bytes(a->layout), first = a->layout == OPS_ADAM_FP16 ? 4 : 2;
    const struct adam_kernel *k = adam_pick(NULL);
    uint32_t saved = adam_begin();
    for (uint32_t i = 0; i < a->n_spans && a->spans[i].first < end; i++) {
        const struct ops_adam_span *x = &a->spans[i];
        uint64_t from = x->first > begin ? x->first : begin, past = x->first + x->n;
        if (past > end) past = end;
        if (from >= past) continue;
        struct adam_span s = {
            .n = past - from,
            .param = (uint8_t *)a->param + word * from,
            .low_or_master = a->low_or_master ? (uint8_t *)a->low_or_master + first * from : NULL,
            .exp_avg = a->exp_avg + from,
            .exp_avg_sq = a->exp_avg_sq + from,
            .grad = (const uint8_t *)a->grad + word * from,
        };
        struct adam_coef c;
        memcpy(&c, &x->coef, sizeof c);
        adam_run(k, layout[a->layout], &s, &c);
    }
    adam_end(saved);
}

static void count_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem, uint32_t n)
{
    (void)tensor;
    (void)tensor_elem;
    (void)chunk_elem;
    *(uint32_t *)arg += n > 0;
}

uint32_t adam_device_spans_max(const struct stk_layout *l, const struct stk_chunk *c)
{
    uint32_t n = 0;
    chunk_pieces(l, c, count_piece, &n);
    return n;
}

struct span_list {
    const struct adam_coefs *coefs;
    struct ops_adam_span *spans;
    uint32_t n;
};

static void add_span(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem, uint32_t n)
{
    struct span_list *l = arg;
    struct ops_adam_span *x = &l->spans[l->n++];
    (void)tensor_elem;
    *x = (struct ops_adam_span){ .first = chunk_elem, .n = n };
    memcpy(&x->coef, adam_coef_of(l->coefs, tensor), sizeof x->coef);
}

void adam_device_chunk(const struct stk_layout *l, const struct stk_chunk *c,
                       const struct adam_coefs *coefs, void *param, void *opt, const void *grad,
                       struct ops_adam_span *spans, struct ops_adam *out)
{
    struct span_list list = { coefs, spans, 0 };
    const uint64_t n = c->n_elems, first = l->dtype == CHUNK_BF16 ? 2 : 4;
    adam_pieces(l, c, 0, c->n_elems, coefs, add_span, &list);
    *out = (struct ops_adam){
        .n = n,
        .layout = l->dtype == CHUNK_BF16 ? OPS_ADAM_BF16_SPLIT : OPS_ADAM_FP16,
        .param = param,
        .low_or_master = opt,
        .exp_avg = (float *)(void *)((uint8_t *)opt + first * n),
        .exp_avg_sq = (float *)(void *)((uint8_t *)opt + (first + 4) * n),
        .grad = grad,
        .spans = spans,
        .n_spans = list.n,
    };
}
