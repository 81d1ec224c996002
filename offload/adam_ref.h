/* offload/adam_ref.h - how the scalar kernels read, write and multiply: one element, base
 * instruction set. Internal to adam_ref.c and adam_undo_ref.c (and the test that compares the
 * software fma with the instruction).
 *
 * Must not use fmaf(): without the instruction the C library computes it in software with
 * integers, where the thread's flush-to-zero mode has no effect. */
#ifndef OFFLOAD_ADAM_REF_H
#define OFFLOAD_ADAM_REF_H

#include "base/numeric.h"
#include "offload/adam_variants.h"

#include <math.h>

/* a * b + c rounded once. The product of two floats is exact in double; the sum is rounded to odd
 * there (Boldo & Melquiond, "Emulation of a FMA and correctly rounded sums", 2008: 53 >= 24 + 2
 * bits make the second rounding harmless). The conversions honour the thread's mode: subnormal
 * inputs count as zero, a subnormal result becomes zero, as the fma instruction does it. Nothing
 * here is subnormal in double. */
static inline float adam_fma(float a, float b, float c)
{
    double x = (double)a * (double)b, y = (double)c;
    double s = x + y;
    if (isfinite(s)) {
        double yy = s - x;
        double rest = (x - (s - yy)) + (y - yy); /* TwoSum: s + rest is exactly x + y */
        uint64_t bits;
        memcpy(&bits, &s, 8);
        if (rest != 0.0 && !(bits & 1)) {
            bits = (rest > 0.0) == (s > 0.0) ? bits + 1 : bits - 1;
            memcpy(&s, &bits, 8);
        }
    }
    return (float)s;
}

/* Floats may be 2-byte aligned in the public call, so they are read and written by memcpy. */
static inline float load_f32(const void *base, uint64_t i)
{
    float x;
    memcpy(&x, (const char *)base + i * 4, 4);
    return x;
}

static inline void store_f32(void *base, uint64_t i, float x)
{
    memcpy((char *)base + i * 4, &x, 4);
}

ADAM_INLINE float load_grad(const struct adam_span *s, uint64_t i, enum adam_layout layout)
{
    if (layout == ADAM_F32) return load_f32(s->grad, i);
    uint16_t g = ((const uint16_t *)s->grad)[i];
    return layout == ADAM_FP16 ? stk_fp16_to_f32(g) : stk_bf16_to_f32(g);
}

ADAM_INLINE float load_param(const struct adam_span *s, uint64_t i, enum adam_layout layout)
{
    if (layout == ADAM_F32) return load_f32(s->param, i);
    if (layout == ADAM_FP16) return load_f32(s->low_or_master, i);
    return stk_join(((const uint16_t *)s->param)[i], ((const int16_t *)s->low_or_master)[i]);
}

ADAM_INLINE void store_param(const struct adam_span *s, uint64_t i, enum adam_layout layout,
                             float p)
{
    void *out = s->param_out ? s->param_out : s->param;
    if (layout == ADAM_F32) {
        store_f32(out, i, p);
    } else if (layout == ADAM_FP16) {
        store_f32(s->low_or_master, i, p);
        ((uint16_t *)out)[i] = stk_f32_to_fp16(p);
    } else {
        stk_split(p, (uint16_t *)out + i, (int16_t *)s->low_or_master + i);
    }
}

#endif
