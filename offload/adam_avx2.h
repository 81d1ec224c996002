/* offload/adam_avx2.h - how the AVX2 kernels read and write 8 elements: coefficients and the three
 * layouts. Internal to adam_avx2.c and adam_undo_avx2.c, which are compiled with flags of their
 * own. */
#ifndef OFFLOAD_ADAM_AVX2_H
#define OFFLOAD_ADAM_AVX2_H

#include "offload/adam_variants.h"

#include <immintrin.h>

#define LANES 8

struct coef256 {
    __m256 grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_bc2,
        decay, l2;
};

ADAM_INLINE void coef_load(struct coef256 *k, const struct adam_coef *c)
{
    k->grad_scale = _mm256_set1_ps(c->grad_scale);
    k->beta1 = _mm256_set1_ps(c->beta1);
    k->one_minus_beta1 = _mm256_set1_ps(c->one_minus_beta1);
    k->beta2 = _mm256_set1_ps(c->beta2);
    k->one_minus_beta2 = _mm256_set1_ps(c->one_minus_beta2);
    k->eps = _mm256_set1_ps(c->eps);
    k->step_size = _mm256_set1_ps(c->step_size);
    k->inv_sqrt_bc2 = _mm256_set1_ps(c->inv_sqrt_bc2);
    k->decay = _mm256_set1_ps(c->decay);
    k->l2 = _mm256_set1_ps(c->l2);
}

ADAM_INLINE __m256 load_f32(const void *base, uint64_t i)
{
    return _mm256_loadu_ps((const float *)base + i);
}

ADAM_INLINE void store_f32(void *base, uint64_t i, __m256 x)
{
    _mm256_storeu_ps((float *)base + i, x);
}

ADAM_INLINE __m128i load_u16(const void *base, uint64_t i)
{
    return _mm_loadu_si128((const __m128i *)((const char *)base + i * 2));
}

ADAM_INLINE void store_u16(void *base, uint64_t i, __m128i x)
{
    _mm_storeu_si128((__m128i *)((char *)base + i * 2), x);
}

ADAM_INLINE __m256 load_grad(const struct adam_span *s, uint64_t i, enum adam_layout layout)
{
    if (layout == ADAM_F32) return load_f32(s->grad, i);
    __m128i g = load_u16(s->grad, i);
    if (layout == ADAM_FP16) return _mm256_cvtph_ps(g);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(g), 16));
}

ADAM_INLINE __m256 load_param(const struct adam_span *s, uint64_t i, enum adam_layout layout)
{
    if (layout == ADAM_F32) return load_f32(s->param, i);
    if (layout == ADAM_FP16) return load_f32(s->low_or_master, i);
    __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_u16(s->param, i)), 16);
    __m256i low = _mm256_cvtepi16_epi32(load_u16(s->low_or_master, i));
    return _mm256_castsi256_ps(_mm256_add_epi32(high, low));
}

ADAM_INLINE void store_param(const struct adam_span *s, void *out, uint64_t i,
                             enum adam_layout layout, __m256 p)
{
    if (layout == ADAM_F32) {
        store_f32(out, i, p);
    } else if (layout == ADAM_FP16) {
        store_f32(s->low_or_master, i, p);
        store_u16(out, i, _mm256_cvtps_ph(p, _MM_FROUND_TO_NEAREST_INT));
    } else {
        __m256i u = _mm256_castps_si256(p);
        __m256i high = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), 16);
        __m256i low = _mm256_sub_epi32(
            u, _mm256_slli_epi32(high, 16)); /* in [-32768, 32767]: packs without saturating */
        store_u16(
            out, i,
            _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
        store_u16(s->low_or_master, i,
                  _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
    }
}

/* The step itself (adam.h) on 8 elements: the new parameter; the moments in place. */
ADAM_INLINE __m256 adam_math(const struct coef256 *k, __m256 g, __m256 p, __m256 *m, __m256 *v, bool l2)
{
    g = _mm256_mul_ps(g, k->grad_scale);
    if (l2)
        g = _mm256_fmadd_ps(k->l2, p, g);
    else
        p = _mm256_fmadd_ps(k->decay, p, p);
    *m = _mm256_fmadd_ps(k->beta1, *m, _mm256_mul_ps(k->one_minus_beta1, g));
    *v = _mm256_fmadd_ps(k->beta2, *v, _mm256_mul_ps(_mm256_mul_ps(k->one_minus_beta2, g), g));
    __m256 d = _mm256_fmadd_ps(_mm256_sqrt_ps(*v), k->inv_sqrt_bc2, k->eps);
    return _mm256_fnmadd_ps(k->step_size, _mm256_div_ps(*m, d), p);
}

#endif
