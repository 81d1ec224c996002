/* offload/adam_avx512.c - Adam with AVX-512 (F, BW, DQ, VL), 16 elements at a time; the last ones
 * under a mask.
 *
 * Same operations in the same order as adam_ref.c, which explains them. Compiled with flags of its
 * own (meson.build): called only after the dispatch in adam.c has asked the processor. Any thread,
 * under cpu_ftz_enter. */
#include "offload/adam_avx512.h"

/* A block's results past the cache: whole lines, since adam_streams has looked at the addresses. */
ADAM_INLINE void stream_block(const struct adam_span *s, void *out, uint64_t i,
                              enum adam_layout layout, __m512 m, __m512 v, __m512 p)
{
    char *low = (char *)s->low_or_master, *to = out;
    _mm512_stream_ps(s->exp_avg + i, m);
    _mm512_stream_ps(s->exp_avg_sq + i, v);
    if (layout == ADAM_F32) {
        _mm512_stream_ps((float *)out + i, p);
        return;
    }
    __m256i half, *at = (__m256i *)(void *)(to + i * 2);
    if (layout == ADAM_FP16) {
        half = _mm512_cvtps_ph(p, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm512_stream_ps((float *)(void *)(low + i * 4), p);
    } else {
        __m512i u = _mm512_castps_si512(p);
        half = _mm512_cvtepi32_epi16(
            _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16));
        _mm256_stream_si256((__m256i *)(void *)(low + i * 2), _mm512_cvtepi32_epi16(u));
    }
    _mm256_stream_si256(at, half);
}

ADAM_INLINE void adam_block(const struct adam_span *s, void *out, const struct coef512 *k,
                            uint64_t i, __mmask16 mask, enum adam_layout layout, bool l2,
                            bool stream)
{
    __m512 m = load_f32(s->exp_avg, i, mask), v = load_f32(s->exp_avg_sq, i, mask);
    __m512 p = adam_math(k, load_grad(s, i, mask, layout), load_param(s, i, mask, layout), &m, &v, l2);
    if (stream) {
        stream_block(s, out, i, layout, m, v, p);
        return;
    }
    store_f32(s->exp_avg, i, mask, m);
    store_f32(s->exp_avg_sq, i, mask, v);
    store_param(s, out, i, mask, layout, p);
}

ADAM_INLINE void adam_span_avx512(const struct adam_span *span, const struct adam_coef *c,
                                  enum adam_layout layout, bool l2, bool stream)
{
    struct coef512 k;
    coef_load(&k, c);
    struct adam_span s = *span; /* a copy that no store can alias: its pointers stay in registers */
    void *out = s.param_out ? s.param_out : s.param;
    uint64_t i = 0, ahead = adam_ahead(&s);
    for (; i + ADAM_STRIDE <= s.n; i += ADAM_STRIDE) {
        adam_fetch_at(&s, i + ahead, layout);
        for (uint64_t j = 0; j < ADAM_STRIDE; j += LANES)
            adam_block(&s, out, &k, i + j, 0xffff, layout, l2, stream);
    }
    for (; i + LANES <= s.n; i += LANES) adam_block(&s, out, &k, i, 0xffff, layout, l2, false);
    if (i < s.n)
        adam_block(&s, out, &k, i, (__mmask16)((1u << (s.n - i)) - 1u), layout, l2, false);
}

ADAM_DEFINE(avx512, adam_span_avx512)
