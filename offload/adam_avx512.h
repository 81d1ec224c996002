/* offload/adam_avx512.h - how the AVX-512 kernels read and write 16 elements: coefficients, the
 * three layouts, the last elements under a mask. Internal to adam_avx512.c and
 * adam_undo_avx512.c, which are compiled with flags of their own. */
#ifndef OFFLOAD_ADAM_AVX512_H
#define OFFLOAD_ADAM_AVX512_H

#include "offload/adam_variants.h"

#include <immintrin.h>

#define LANES 16

struct coef512 {
    __m512 grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_bc2,
        decay, l2;
};

ADAM_INLINE void coef_load(struct coef512 *k, const struct adam_coef *c)
{
    k->grad_scale = _mm512_set1_ps(c->grad_scale);
    k->beta1 = _mm512_set1_ps(c->beta1);
    k->one_minus_beta1 = _mm512_set1_ps(c->one_minus_beta1);
    k->beta2 = _mm512_set1_ps(c->beta2);
    k->one_minus_beta2 = _mm512_set1_ps(c->one_minus_beta2);
    k->eps = _mm512_set1_ps(c->eps);
    k->step_size = _mm512_set1_ps(c->step_size);
    k->inv_sqrt_bc2 = _mm512_set1_ps(c->inv_sqrt_bc2);
    k->decay = _mm512_set1_ps(c->decay);
    k->l2 = _mm512_set1_ps(c->l2);
}

/* `mask` is all ones, known to the compiler, in the main loop: it makes plain loads and stores of
 * these then. */
ADAM_INLINE __m512 load_f32(const void *base, uint64_t i, __mmask16 mask)
{
    return _mm512_maskz_loadu_ps(mask, (const char *)base + i * 4);
}

ADAM_INLINE void store_f32(void *base, uint64_t i, __mmask16 mask, __m512 x)
{
    _mm512_mask_storeu_ps((char *)base + i * 4, mask, x);
}

ADAM_INLINE __m256i load_u16(const void *base, uint64_t i, __mmask16 mask)
{
    return _mm256_maskz_loadu_epi16(mask, (const char *)base + i * 2);
}

ADAM_INLINE void store_u16(void *base, uint64_t i, __mmask16 mask, __m256i x)
{
    _mm256_mask_storeu_epi16((char *)base + i * 2, mask, x);
}

ADAM_INLINE __m512 load_grad(const struct adam_span *s, uint64_t i, __mmask16 mask,
                             enum adam_layout layout)
{
    if (layout == ADAM_F32) return load_f32(s->grad, i, mask);
    __m256i g = load_u16(s->grad, i, mask);
    if (layout == ADAM_FP16) return _mm512_cvtph_ps(g);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(g), 16));
}

ADAM_INLINE __m512 load_param(const struct adam_span *s, uint64_t i, __mmask16 mask,
                              enum adam_layout layout)
{
    if (layout == ADAM_F32) return load_f32(s->param, i, mask);
    if (layout == ADAM_FP16) return load_f32(s->low_or_master, i, mask);
    __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_u16(s->param, i, mask)), 16);
    __m512i low = _mm512_cvtepi16_epi32(load_u16(s->low_or_master, i, mask));
    return _mm512_castsi512_ps(_mm512_add_epi32(high, low));
}

ADAM_INLINE void store_param(const struct adam_span *s, void *out, uint64_t i, __mmask16 mask,
                             enum adam_layout layout, __m512 p)
{
    if (layout == ADAM_F32) {
        store_f32(out, i, mask, p);
    } else if (layout == ADAM_FP16) {
        store_f32(s->low_or_master, i, mask, p);
        store_u16(out, i, mask, _mm512_cvtps_ph(p, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
        __m512i u = _mm512_castps_si512(p);
        __m512i high = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16);
        /* The low half of u is already the rest: subtracting a multiple of 65536 does not change
         * it. */
        store_u16(out, i, mask, _mm512_cvtepi32_epi16(high));
        store_u16(s->low_or_master, i, mask, _mm512_cvtepi32_epi16(u));
    }
}

/* The step itself (adam.h) on 16 elements: the new parameter; the moments in place. */
ADAM_INLINE __m512 adam_math(const struct coef512 *k, __m512 g, __m512 p, __m512 *m, __m512 *v, bool l2)
{
    g = _mm512_mul_ps(g, k->grad_scale);
    if (l2)
        g = _mm512_fmadd_ps(k->l2, p, g);
    else
        p = _mm512_fmadd_ps(k->decay, p, p);
    *m = _mm512_fmadd_ps(k->beta1, *m, _mm512_mul_ps(k->one_minus_beta1, g));
    *v = _mm512_fmadd_ps(k->beta2, *v, _mm512_mul_ps(_mm512_mul_ps(k->one_minus_beta2, g), g));
    __m512 d = _mm512_fmadd_ps(_mm512_sqrt_ps(*v), k->inv_sqrt_bc2, k->eps);
    return _mm512_fnmadd_ps(k->step_size, _mm512_div_ps(*m, d), p);
}

#endif
