/* offload/adam_undo_impl.h - what the variants of the step that can be taken back share: the
 * coefficients of the inverse, the code's fields, the group of elements that SIMD variants record
 * before they look which of them need the side list. Internal to offload/adam_undo*.c. */
#ifndef OFFLOAD_ADAM_UNDO_IMPL_H
#define OFFLOAD_ADAM_UNDO_IMPL_H

#include "base/numeric.h"
#include "offload/adam_variants.h"

#include <string.h>

/* What taking back needs beside the coefficients (adam_undo.c makes it): 1 / x - 1 of both betas
 * and of 1 + decay, from double. y / beta is computed as fma(beta1, y, y): as near to the
 * quotient as a division, and no division. */
struct adam_inverse {
    float beta1, beta2, decay;
};

/* The record (one byte an element): what is added to the inverse's bits, biased, in three
 * fields. */
enum { ADAM_EXP_AVG_BITS = 4, ADAM_EXP_AVG_SQ_BITS = 2, ADAM_PARAM_BITS = 2 };
enum { ADAM_EXP_AVG_BIAS = 8, ADAM_EXP_AVG_SQ_BIAS = 1, ADAM_PARAM_BIAS = 1 };
enum { ADAM_EXP_AVG_SQ_SHIFT = 4, ADAM_PARAM_SHIFT = 6 };

/* As ADAM_DEFINE, for adam_undo.h: `record_fn(s, c, inv, r, layout, l2)` returns the elements done,
 * fewer than s->n when the side list is full; `undo_fn(s, c, inv, code, layout, l2)`;
 * `param_fn(s, c, layout, l2)`. */
#define ADAM_DEFINE_UNDO_ONE(record, undo, param, layout, record_fn, undo_fn, param_fn) \
    uint64_t record(const struct adam_span *s, const struct adam_coef *c,               \
                    const struct adam_inverse *inv, struct adam_record *r)              \
    {                                                                                   \
        return c->l2 != 0.0f ? record_fn(s, c, inv, r, layout, true)                    \
                             : record_fn(s, c, inv, r, layout, false);                  \
    }                                                                                   \
    void undo(const struct adam_span *s, const struct adam_coef *c,                     \
              const struct adam_inverse *inv, const uint8_t *code)                      \
    {                                                                                   \
        if (c->l2 != 0.0f)                                                              \
            undo_fn(s, c, inv, code, layout, true);                                     \
        else                                                                            \
            undo_fn(s, c, inv, code, layout, false);                                    \
    }                                                                                   \
    ADAM_DEFINE_ONE(param, layout, param_fn)
#define ADAM_DEFINE_UNDO(suffix, record_fn, undo_fn, param_fn)                             \
    ADAM_DEFINE_UNDO_ONE(adam_record_bf16_split__##suffix, adam_undo_bf16_split__##suffix, \
                         adam_param_bf16_split__##suffix, ADAM_BF16_SPLIT, record_fn,      \
                         undo_fn, param_fn)                                                \
    ADAM_DEFINE_UNDO_ONE(adam_record_fp16__##suffix, adam_undo_fp16__##suffix,             \
                         adam_param_fp16__##suffix, ADAM_FP16, record_fn, undo_fn, param_fn)

/* A SIMD variant records so many elements without a branch: whether an element fits is known
 * only after a square root and a division, and a branch on that, wrong in one vector of seven,
 * threw away what the processor had begun of the next ones (a third of the time). Their old
 * values wait here, in L1; then the list takes what did not fit. */
enum { ADAM_GROUP = 512 };
struct adam_group {
    uint32_t p[ADAM_GROUP], m[ADAM_GROUP], v[ADAM_GROUP]; /* old bits */
    uint8_t code[ADAM_GROUP];
    uint8_t bad[ADAM_GROUP / 8]; /* a bit each, lowest first */
} __attribute__((aligned(64)));

ADAM_INLINE struct adam_side adam_side_of(enum adam_layout layout, uint32_t elem, uint32_t p,
                                          uint32_t m, uint32_t v)
{
    struct adam_side e = { .elem = elem, .exp_avg = m, .exp_avg_sq = v };
    if (layout == ADAM_FP16)
        e.master = p;
    else
        stk_split(stk_bits_f32(p), &e.split.param, &e.split.low);
    return e;
}

/* The old values of an element, back into the span. */
ADAM_INLINE void adam_put_back(const struct adam_span *s, enum adam_layout layout,
                               const struct adam_side *e)
{
    uint64_t i = e->elem;
    memcpy(s->exp_avg + i, &e->exp_avg, 4);
    memcpy(s->exp_avg_sq + i, &e->exp_avg_sq, 4);
    if (layout == ADAM_FP16) {
        uint16_t param = stk_f32_to_fp16(stk_bits_f32(e->master));
        memcpy((char *)s->low_or_master + i * 4, &e->master, 4);
        memcpy((char *)s->param + i * 2, &param, 2);
    } else {
        memcpy((char *)s->low_or_master + i * 2, &e->split.low, 2);
        memcpy((char *)s->param + i * 2, &e->split.param, 2);
    }
}

/* The first n elements of the group are elements at... of the span: those that do not fit go on the
 * list. No room: all n get their old values back, false. */
ADAM_INLINE bool adam_group_list(const struct adam_group *g, const struct adam_span *s, uint64_t at,
                                 uint64_t n, struct adam_record *r, enum adam_layout layout)
{
    uint32_t bad_n = 0;
    uint64_t bad[ADAM_GROUP / 64];
    memcpy(bad, g->bad, sizeof bad);
    for (uint32_t w = 0; w < ADAM_GROUP / 64; w++) bad_n += (uint32_t)__builtin_popcountll(bad[w]);
    if (bad_n > r->side_cap - r->side_n) {
        for (uint32_t j = 0; j < n; j++) {
            struct adam_side e =
                adam_side_of(layout, (uint32_t)at + j, g->p[j], g->m[j], g->v[j]);
            adam_put_back(s, layout, &e);
        }
        return false;
    }
    struct adam_side *to = r->side + r->side_n;
    bool spare = r->side_cap - r->side_n - bad_n >= 2;
    __builtin_prefetch(to + 32, 1);
    r->side_n += bad_n;
    for (uint32_t w = 0; w < ADAM_GROUP / 64; w++) {
        uint64_t b = bad[w];
        uint32_t at_w = (uint32_t)at + w * 64, n_w = (uint32_t)__builtin_popcountll(b);
        struct adam_side *end = to + n_w;
        if (spare) { /* none, one or two of 64 is the rule: written without asking which */
            for (int twice = 0; twice < 2; twice++, b &= b - 1) {
                uint32_t j = (uint32_t)__builtin_ctzll(b | 1ull << 63), e = w * 64 + j;
                *to++ = adam_side_of(layout, at_w + j, g->p[e], g->m[e], g->v[e]);
            }
        }
        for (; b; b &= b - 1) {
            uint32_t j = (uint32_t)__builtin_ctzll(b), e = w * 64 + j;
            *to++ = adam_side_of(layout, at_w + j, g->p[e], g->m[e], g->v[e]);
        }
        to = end;
    }
    return true;
}

#endif
