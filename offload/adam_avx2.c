/* offload/adam_avx2.c - Adam with AVX2, FMA and F16C, 8 elements at a time; the last ones through a
 * padded temporary.
 *
 * Same operations in the same order as adam_ref.c, which explains them. Compiled with flags of its
 * own (meson.build): called only after the dispatch in adam.c has asked the processor. Any thread,
 * under cpu_ftz_enter. */
#include "offload/adam_avx2.h"

#include <string.h>

ADAM_INLINE void adam_block(const struct adam_span *s, void *out, const struct coef256 *k,
                            uint64_t i, enum adam_layout layout, bool l2)
{
    __m256 g = _mm256_mul_ps(load_grad(s, i, layout), k->grad_scale);
    __m256 p = load_param(s, i, layout);
    if (l2)
        g = _mm256_fmadd_ps(k->l2, p, g);
    else
        p = _mm256_fmadd_ps(k->decay, p, p);
    __m256 m = load_f32(s->exp_avg, i), v = load_f32(s->exp_avg_sq, i);
    m = _mm256_fmadd_ps(k->beta1, m, _mm256_mul_ps(k->one_minus_beta1, g));
    v = _mm256_fmadd_ps(k->beta2, v, _mm256_mul_ps(_mm256_mul_ps(k->one_minus_beta2, g), g));
    __m256 d = _mm256_fmadd_ps(_mm256_sqrt_ps(v), k->inv_sqrt_bc2, k->eps);
    p = _mm256_fnmadd_ps(k->step_size, _mm256_div_ps(m, d), p);
    store_f32(s->exp_avg, i, m);
    store_f32(s->exp_avg_sq, i, v);
    store_param(s, out, i, layout, p);
}

/* The last n < 8 elements: copied into padded arrays, computed by the same block, copied back. */
ADAM_INLINE void adam_tail(const struct adam_span *s, void *out, const struct coef256 *k,
                           uint64_t i, enum adam_layout layout, bool l2)
{
    float param[LANES] = { 0 }, master[LANES] = { 0 }, m[LANES] = { 0 }, v[LANES] = { 0 },
          grad[LANES] = { 0 };
    uint64_t n = s->n - i, width = layout == ADAM_F32 ? 4 : 2; /* of param and grad */
    uint64_t other = layout == ADAM_F32 ? 0 : layout == ADAM_FP16 ? 4 : 2;
    char *const low_or_master = other ? (char *)s->low_or_master + i * other : NULL;
    struct adam_span t = { LANES, param, master, m, v, grad, NULL };
    memcpy(param, (const char *)s->param + i * width, n * width);
    memcpy(grad, (const char *)s->grad + i * width, n * width);
    memcpy(m, s->exp_avg + i, n * 4);
    memcpy(v, s->exp_avg_sq + i, n * 4);
    if (other) memcpy(master, low_or_master, n * other);
    adam_block(&t, param, k, 0, layout, l2);
    memcpy((char *)out + i * width, param, n * width);
    memcpy(s->exp_avg + i, m, n * 4);
    memcpy(s->exp_avg_sq + i, v, n * 4);
    if (other) memcpy(low_or_master, master, n * other);
}

ADAM_INLINE void adam_span_avx2(const struct adam_span *span, const struct adam_coef *c,
                                enum adam_layout layout, bool l2)
{
    struct coef256 k;
    coef_load(&k, c);
    struct adam_span s = *span; /* a copy that no store can alias: its pointers stay in registers */
    void *out = s.param_out ? s.param_out : s.param;
    uint64_t i = 0;
    for (; i + ADAM_STRIDE <= s.n; i += ADAM_STRIDE) {
        adam_fetch(&s, i, layout);
        for (uint64_t j = 0; j < ADAM_STRIDE; j += LANES)
            adam_block(&s, out, &k, i + j, layout, l2);
    }
    for (; i + LANES <= s.n; i += LANES) adam_block(&s, out, &k, i, layout, l2);
    if (i < s.n) adam_tail(&s, out, &k, i, layout, l2);
}

ADAM_DEFINE(avx2, adam_span_avx2)
