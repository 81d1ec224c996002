/* base/convert_avx512.c - the gradient cast to bf16 with AVX-512; the last elements as
 * convert_scalar.c does them.
 *
 * Owns this one operation: with AVX2 its rounding and its sums take longer than its memory (18 cycles
 * for 16 elements; the casts run beside a step's products, on their cores). The other conversions wait
 * for memory with AVX2 already. Compiled with flags of its own (meson.build): called only after the
 * dispatch in convert.c has asked the processor. Any thread. */
#include "base/convert_variants.h"

#include <immintrin.h>

enum { AHEAD = 512, FP_CLASS_NOT_FINITE = 0x99 /* quiet and signalling NaN, both infinities */ };

static inline void fetch(const void *base, uint64_t i, uint64_t width_bytes)
{
    __builtin_prefetch((const void *)((uintptr_t)base + (uintptr_t)((i + AHEAD) * width_bytes)));
}

/* In the low half of each 32-bit lane. */
static inline __m512i bf16_from_f32(__m512 x)
{
    const __m512i u = _mm512_castps_si512(x), high = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i even = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    return _mm512_mask_or_epi32(even, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), high,
                                _mm512_set1_epi32(0x40));
}

void convert_grad_bf16__avx512(const float *acc, uint16_t *out, uint64_t n, float scale,
                               struct convert_sum *sum)
{
    const __m512 factor = _mm512_set1_ps(scale);
    __m512d low = _mm512_setzero_pd(), high = low;
    uint64_t i = 0, nonfinite = 0;
    for (; i + CONVERT_LANES <= n; i += CONVERT_LANES) {
        fetch(acc, i, 4);
        fetch(out, i, 2);
        const __m512i half = bf16_from_f32(_mm512_mul_ps(_mm512_loadu_ps(acc + i), factor));
        _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm512_cvtepi32_epi16(half));
        __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(half, 16));
        const __mmask16 bad = _mm512_fpclass_ps_mask(x, FP_CLASS_NOT_FINITE);
        if (bad) {
            x = _mm512_mask_mov_ps(x, bad, _mm512_setzero_ps());
            nonfinite += (uint64_t)__builtin_popcount(bad);
        }
        /* A square is exact in double: one rounding, fused or not. */
        const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x)),
                      b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        low = _mm512_fmadd_pd(a, a, low);
        high = _mm512_fmadd_pd(b, b, high);
    }
    double lanes[CONVERT_LANES];
    _mm512_storeu_pd(lanes, low);
    _mm512_storeu_pd(lanes + 8, high);
    nonfinite += convert_grad_bf16_some(acc, out, i, n, scale, lanes);
    convert_sum_fold(lanes, nonfinite, sum);
}
