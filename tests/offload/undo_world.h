/* tests/offload/undo_world.h - inputs and buffers of the tests of offload/adam_undo.h: a span
 * with sentinels around it, filled with one kind of numbers, and coefficients from ordinary to
 * absurd. */
#ifndef TESTS_OFFLOAD_UNDO_WORLD_H
#define TESTS_OFFLOAD_UNDO_WORLD_H

#include "base/numeric.h"
#include "base/rng.h"
#include "offload/adam_undo.h"
#include "tests/test.h"

#include <math.h>

enum { N_MAX = 4200, GUARD = 44, SENTINEL = 0xa5 }; /* a buffer is whole cache lines */
enum { PARAM, LOW, EXP_AVG, EXP_AVG_SQ, GRAD, OUT, BUFFERS };
enum input { ORDINARY, COLD, HEAVY, SUBNORMAL, EDGE, ZERO, HUGE_VALUES, FINITE, ANY_BITS, INPUTS };

struct world { /* data begins GUARD + offset elements in */
    uint8_t buf[BUFFERS][(N_MAX + 2 * GUARD) * 4];
} __attribute__((aligned(64)));

/* A record with sentinels behind both of its parts. The codes begin `code_offset` bytes in: whole
 * cache lines are written in another way. */
struct recorded {
    uint8_t code_buf[N_MAX + GUARD + 64];
    uint8_t *code;
    struct adam_side side[N_MAX + GUARD];
    struct adam_record r;
} __attribute__((aligned(64)));
static uint32_t code_offset;

static uint32_t width_of(int which, enum adam_layout layout)
{
    if (which == EXP_AVG || which == EXP_AVG_SQ) return 4;
    return which == LOW && layout == ADAM_FP16 ? 4 : 2;
}

static float random_exponent(struct rng *r, uint32_t lowest, uint32_t highest)
{
    uint32_t exponent = lowest + (uint32_t)rng_below(r, highest - lowest + 1);
    return stk_bits_f32((uint32_t)(rng_next(r) & 0x807fffffu) | exponent << 23);
}

static float random_value(struct rng *r, enum input kind, double typical)
{
    switch (kind) {
    case ORDINARY: return (float)(rng_normal(r) * typical);
    case COLD: return 0.0f;
    case HEAVY: return (float)(rng_normal(r) * typical * exp(6.0 * rng_normal(r)));
    case SUBNORMAL: return random_exponent(r, 0, 1);
    case EDGE: return random_exponent(r, 0, 70);
    case ZERO: return rng_next(r) & 1 ? 0.0f : -0.0f;
    case HUGE_VALUES: return random_exponent(r, 180, 254);
    case FINITE: return random_exponent(r, 0, 254);
    default: return random_exponent(r, 0, 255);
    }
}

static void put_u32(void *base, uint64_t i, uint32_t u) { memcpy((char *)base + i * 4, &u, 4); }
static void put_u16(void *base, uint64_t i, uint16_t u) { memcpy((char *)base + i * 2, &u, 2); }

static uint16_t random_grad(struct rng *r, enum adam_layout layout, enum input kind)
{
    if (kind == ANY_BITS) return (uint16_t)rng_next(r);
    float g = random_value(r, kind == COLD ? ORDINARY : kind, 1e-2);
    if (layout == ADAM_FP16) {
        uint16_t h = stk_f32_to_fp16(g);
        return (h & 0x7c00) == 0x7c00 ? (uint16_t)(h - 0x400) : h;
    }
    uint16_t b = stk_f32_to_bf16(g);
    return (b & 0x7f80) == 0x7f80 ? (uint16_t)(b - 0x80) : b;
}

/* Kinds are mixed in one span now and then: elements must not influence each other. NaNs are
 * mixed in only where the kind is any bits. */
static void fill(struct world *w, enum adam_layout layout, enum input kind, struct rng *r)
{
    memset(w, SENTINEL, sizeof *w);
    for (uint32_t i = 0; i < N_MAX + GUARD; i++) {
        uint64_t others = kind < ANY_BITS ? ANY_BITS : INPUTS;
        enum input k = rng_below(r, 8) ? kind : (enum input)rng_below(r, others);
        float m = random_value(r, k, 1e-3), v = random_value(r, k, 1e-3);
        float p = random_value(r, k == COLD ? ORDINARY : k, 0.02);
        if (k < FINITE) v = fabsf(v);
        put_u32(w->buf[EXP_AVG], i, stk_f32_bits(m));
        put_u32(w->buf[EXP_AVG_SQ], i, stk_f32_bits(v));
        put_u16(w->buf[GRAD], i, random_grad(r, layout, k));
        if (layout == ADAM_FP16) { /* the parameter is the master's rounding, always */
            put_u32(w->buf[LOW], i, stk_f32_bits(p));
            put_u16(w->buf[PARAM], i, stk_f32_to_fp16(p));
        } else {
            uint16_t high;
            int16_t low;
            stk_split(p, &high, &low);
            put_u16(w->buf[PARAM], i, high);
            put_u16(w->buf[LOW], i, (uint16_t)low);
        }
    }
}

static struct adam_span span_of(struct world *w, enum adam_layout layout, uint64_t begin,
                                uint64_t n, bool out)
{
    uint8_t *at[BUFFERS];
    for (int b = 0; b < BUFFERS; b++) at[b] = w->buf[b] + begin * width_of(b, layout);
    return (struct adam_span){ .n = n,
                               .param = at[PARAM],
                               .low_or_master = at[LOW],
                               .exp_avg = (float *)(void *)at[EXP_AVG],
                               .exp_avg_sq = (float *)(void *)at[EXP_AVG_SQ],
                               .grad = at[GRAD],
                               .param_out = out ? at[OUT] : NULL };
}

static void ordinary_coef(struct rng *r, enum adam_kind kind, struct adam_coef *c)
{
    static const double decays[] = { 0.0, 0.01, 0.1 };
    struct adam_hyper h = { .lr = rng_below(r, 16) ? pow(10.0, -1.0 - 5.0 * rng_uniform(r)) : 0.0,
                            .beta1 = 0.8 + 0.19 * rng_uniform(r),
                            .beta2 = 0.95 + 0.049 * rng_uniform(r),
                            .eps = rng_below(r, 4) ? 1e-8 : 0.0,
                            .weight_decay = decays[rng_below(r, 3)],
                            .kind = kind };
    adam_coef_make(&h, 1 + rng_below(r, 2000), rng_below(r, 2) ? 1.0 : rng_uniform(r), c);
}

/* One or a few coefficients are what nobody would choose: a step size of infinity, a decay of -1 or
 * below, any bits. */
static void absurd_coef(struct rng *r, enum adam_kind kind, struct adam_coef *c)
{
    static const float odd[] = { 0.0f, -0.0f, 1.0f, -1.0f, -2.0f, -1.5f, 1e30f, -1e30f,
                                 1e-30f, 1e-42f, 3.4e38f, (float)INFINITY, -(float)INFINITY,
                                 (float)NAN };
    ordinary_coef(r, kind, c);
    float *field[] = { &c->grad_scale, &c->beta1, &c->one_minus_beta1, &c->beta2,
                       &c->one_minus_beta2, &c->eps, &c->step_size, &c->inv_sqrt_bc2, &c->decay };
    uint64_t fields = sizeof field / sizeof field[0];
    for (uint64_t changes = 1 + rng_below(r, 3); changes > 0; changes--) {
        uint64_t f = rng_below(r, 3) ? 5 + rng_below(r, fields - 5) : rng_below(r, fields);
        *field[f] = rng_below(r, 4) ? odd[rng_below(r, sizeof odd / sizeof odd[0])]
                                    : random_exponent(r, 0, 255);
    }
    if (kind == ADAM_L2 && rng_below(r, 2)) c->l2 = odd[rng_below(r, sizeof odd / sizeof odd[0])];
}

static bool usable(const struct adam_kernel *k) { return k->isa <= cpu_isa_best(); }

static void recorded_reset(struct recorded *rec, uint32_t side_cap)
{
    memset(rec->code_buf, SENTINEL, sizeof rec->code_buf);
    rec->code = rec->code_buf + code_offset;
    memset(rec->side, SENTINEL, sizeof rec->side);
    rec->r = (struct adam_record){ .code = rec->code, .side = rec->side, .side_cap = side_cap };
}

static bool all_sentinels(const void *from, const void *to)
{
    for (const uint8_t *p = from; p < (const uint8_t *)to; p++)
        if (*p != SENTINEL) return false;
    return true;
}

/* Nothing behind the code's n bytes or the list's side_cap entries was touched. */
static bool recorded_within(const struct recorded *rec, uint64_t n)
{
    return all_sentinels(rec->code_buf, rec->code) &&
           all_sentinels(rec->code + n, rec->code_buf + sizeof rec->code_buf) &&
           all_sentinels(rec->side + rec->r.side_cap, rec->side + N_MAX + GUARD);
}

static bool recorded_equal(const struct recorded *a, const struct recorded *b, uint64_t n)
{
    return a->r.side_n == b->r.side_n && memcmp(a->code, b->code, n) == 0 &&
           memcmp(a->side, b->side, a->r.side_n * sizeof a->side[0]) == 0;
}

#endif
