/* tests/gpu/kern_test.h - what the tests of the host kernels share: seeded numbers, arrays of an
 * activation dtype, contexts, a bound. Needs tests/test.h before it. Memory is exact (malloc), so
 * that AddressSanitizer sees a byte too far. */
#ifndef TESTS_GPU_KERN_TEST_H
#define TESTS_GPU_KERN_TEST_H

#include "base/numeric.h"
#include "gpu/host/kernels.h"

#include <math.h>

static uint64_t kt_state;
static inline void kt_reseed(uint64_t salt) { kt_state = test_seed() * 0x9e3779b97f4a7c15u + salt; }
static inline double kt_uniform(void) /* [-1, 1) */
{
    kt_state ^= kt_state >> 12, kt_state ^= kt_state << 25, kt_state ^= kt_state >> 27;
    return (double)((kt_state * 0x2545f4914f6cdd1du) >> 11) / 4503599627370496.0 - 1.0;
}
static inline uint64_t kt_below(uint64_t n)
{
    return (uint64_t)((kt_uniform() + 1) / 2 * (double)n);
}

static inline void *kt_alloc(uint64_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 1)) abort();
    memset(p, 0xff, bytes); /* NaN in every format: what is not written shows */
    return p;
}
static inline double kt_get(enum ops_dtype t, const void *p, uint64_t i)
{
    if (t == OPS_F32) return (double)((const float *)p)[i];
    uint16_t h = ((const uint16_t *)p)[i];
    return (double)(t == OPS_BF16 ? stk_bf16_to_f32(h) : stk_fp16_to_f32(h));
}
static inline void kt_put(enum ops_dtype t, void *p, uint64_t i, double x)
{
    if (t == OPS_F32) ((float *)p)[i] = (float)x;
    else ((uint16_t *)p)[i] = t == OPS_BF16 ? stk_f32_to_bf16((float)x) : stk_f32_to_fp16((float)x);
}
static inline void *kt_random(enum ops_dtype t, uint64_t n, double size)
{
    void *p = kt_alloc(n * ops_dtype_bytes(t));
    for (uint64_t i = 0; i < n; i++) kt_put(t, p, i, size * kt_uniform());
    return p;
}
static inline void *kt_copy(const void *p, uint64_t bytes)
{
    void *q = kt_alloc(bytes);
    memcpy(q, p, bytes);
    return q;
}
/* Half a unit in the last place of `at`, relative. */
static inline double kt_half_ulp(enum ops_dtype at) { return at == OPS_F32 ? 0x1p-24 : 0x1p-8; }
static inline double kt_as(enum ops_dtype at, double x)
{
    return at == OPS_F32 ? (double)(float)x : (double)stk_bf16_to_f32(stk_f32_to_bf16((float)x));
}

/* |got - want| <= bound, NaN fails; the worst share of the bound is kept for the report. */
static double kt_worst;
static inline bool kt_near(double got, double want, double bound)
{
    double share = fabs(got - want) / (bound > 0 ? bound : 1e-300);
    if (got == want) share = 0;
    if (!(share <= kt_worst)) kt_worst = share;
    return share <= 1;
}

#define KT_EACH_ISA(c_)                                                                            \
    for (struct host_ctx c_ = { 2, CPU_SCALAR, false }; c_.isa <= cpu_isa_best();                  \
         c_.isa = (enum cpu_isa)(c_.isa + 1))

/* Every instruction set and, where this processor has them, tiles. */
static inline bool kt_attention_ctx(int i, struct host_ctx *c)
{
    const int best = (int)cpu_isa_best();
    *c = (struct host_ctx){ .threads = 2, .isa = (enum cpu_isa)(i < best ? i : best) };
    c->amx = c->bf16_products = i == best + 1;
    return i <= best || (c->amx && host_attention_amx_possible());
}
#define KT_EACH_ATTENTION(c_)                                                                      \
    for (int kt_once = 1; kt_once; kt_once = 0)                                                    \
        for (struct host_ctx c_; kt_once; kt_once = 0)                                             \
            for (int kt_i = 0; kt_attention_ctx(kt_i, &c_); kt_i++)

#endif
