/* offload/adam_avx2.c - Adam with AVX2, FMA and F16C, 8 elements at a time; the last ones through a
 * padded temporary.
 *
 * Same operations in the same order as adam_ref.c, which explains them. Compiled with flags of its
 * own (meson.build): called only after the dispatch in adam.c has asked the processor. Any thread,
 * under cpu_ftz_enter. */
#include "offload/adam_avx2.h"

#include <string.h>

/* A block's results past the cache: whole lines, since adam_streams has looked at the addresses. */
ADAM_INLINE void stream_block(const struct adam_span *s, void *out, uint64_t i,
                              enum adam_layout layout, __m256 m, __m256 v, __m256 p)
{
    char *low = (char *)s->low_or_master, *to = out;
    _mm256_stream_ps(s->exp_avg + i, m);
    _mm256_stream_ps(s->exp_avg_sq + i, v);
    if (layout == ADAM_F32) {
        _mm256_stream_ps((float *)out + i, p);
        return;
    }
    __m128i half, *at = (__m128i *)(void *)(to + i * 2);
    if (layout == ADAM_FP16) {
        half = _mm256_cvtps_ph(p, _MM_FROUND_TO_NEAREST_INT);
        _mm256_stream_ps((float *)(void *)(low + i * 4), p);
    } else {
        uint16_t high[LANES];
        int16_t rest[LANES];
        struct adam_span t = { .low_or_master = rest };
        store_param(&t, high, 0, layout, p);
        half = load_u16(high, 0);
        _mm_stream_si128((__m128i *)(void *)(low + i * 2), load_u16(rest, 0));
    }
    _mm_stream_si128(at, half);
}

ADAM_INLINE void adam_block(const struct adam_span *s, void *out, const struct coef256 *k,
                            uint64_t i, enum adam_layout layout, bool l2, bool stream)
{
    __m256 m = load_f32(s->exp_avg, i), v = load_f32(s->exp_avg_sq, i);
    __m256 p = adam_math(k, load_grad(s, i, layout), load_param(s, i, layout), &m, &v, l2);
    if (stream) {
        stream_block(s, out, i, layout, m, v, p);
        return;
    }
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
    struct adam_span t = { LANES, param, master, m, v, grad, NULL, { 0 } };
    memcpy(param, (const char *)s->param + i * width, n * width);
    memcpy(grad, (const char *)s->grad + i * width, n * width);
    memcpy(m, s->exp_avg + i, n * 4);
    memcpy(v, s->exp_avg_sq + i, n * 4);
    if (other) memcpy(master, low_or_master, n * other);
    adam_block(&t, param, k, 0, layout, l2, false);
    memcpy((char *)out + i * width, param, n * width);
    memcpy(s->exp_avg + i, m, n * 4);
    memcpy(s->exp_avg_sq + i, v, n * 4);
    if (other) memcpy(low_or_master, master, n * other);
}

ADAM_INLINE void adam_span_avx2(const struct adam_span *span, const struct adam_coef *c,
                                enum adam_layout layout, bool l2, bool stream)
{
    struct coef256 k;
    coef_load(&k, c);
    struct adam_span s = *span; /* a copy that no store can alias: its pointers stay in registers */
    void *out = s.param_out ? s.param_out : s.param;
    uint64_t i = 0, ahead = adam_ahead(&s);
    for (; i + ADAM_STRIDE <= s.n; i += ADAM_STRIDE) {
        adam_fetch_at(&s, i + ahead, layout);
        for (uint64_t j = 0; j < ADAM_STRIDE; j += LANES)
            adam_block(&s, out, &k, i + j, layout, l2, stream);
    }
    for (; i + LANES <= s.n; i += LANES) adam_block(&s, out, &k, i, layout, l2, false);
    if (i < s.n) adam_tail(&s, out, &k, i, layout, l2);
}

ADAM_DEFINE(avx2, adam_span_avx2)
