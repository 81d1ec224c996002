/* base/convert_avx512.c - the gradient casts with AVX-512; all other conversions wait for memory with
 * AVX2 already and are taken from there.
 *
 * Compiled with flags of its own (meson.build): called only after the dispatch in convert.c has
 * asked the processor. Sixteen elements at a time are the sixteen lanes of the sum. The square of a
 * 16-bit float is exact in double, so that a fused multiply-add gives the bits of the definition
 * (convert_scalar.c). Any thread. */
#include "base/convert_variants.h"

#include <immintrin.h>

static inline __m512i bf16_from_f32(__m512 x) /* in the low half of each 32-bit lane */
{
    __m512i u = _mm512_castps_si512(x), high = _mm512_srli_epi32(u, 16);
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i even = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(even, nan, high, _mm512_set1_epi32(0x40));
}

static inline __attribute__((always_inline)) void grad_cast(const float *acc, uint16_t *out,
                                                            uint64_t n, float scale,
                                                            struct convert_sum *sum, bool fp16)
{
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    __m512d s0 = _mm512_setzero_pd(), s1 = s0;
    uint64_t i = 0, nonfinite = 0;
    for (; i + CONVERT_LANES <= n; i += CONVERT_LANES) {
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(acc + i), factor);
        __m256i narrow;
        if (fp16) {
            narrow = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
            x = _mm512_cvtph_ps(narrow);
        } else {
            __m512i b = bf16_from_f32(x);
            narrow = _mm512_cvtepi32_epi16(b);
            x = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
        }
        _mm256_storeu_si256((__m256i *)(void *)(out + i), narrow);
        __mmask16 bad = _mm512_cmpeq_epi32_mask(
            _mm512_and_si512(_mm512_castps_si512(x), exponent), exponent);
        if (bad) {
            nonfinite += (uint64_t)__builtin_popcount(bad);
            x = _mm512_maskz_mov_ps((__mmask16)~bad, x);
        }
        __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x)),
                b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        s0 = _mm512_fmadd_pd(a, a, s0);
        s1 = _mm512_fmadd_pd(b, b, s1);
    }
    double lanes[CONVERT_LANES];
    _mm512_storeu_pd(lanes, s0);
    _mm512_storeu_pd(lanes + 8, s1);
    convert_tail_fn tail = fp16 ? convert_grad_fp16_some : convert_grad_bf16_some;
    nonfinite += tail(acc, out, i, n, scale, lanes);
    convert_sum_fold(lanes, nonfinite, sum);
}

void convert_grad_bf16__avx512(const float *acc, uint16_t *out, uint64_t n, float scale,
                               struct convert_sum *sum)
{
    grad_cast(acc, out, n, scale, sum, false);
}

void convert_grad_fp16__avx512(const float *acc, uint16_t *out, uint64_t n, float scale,
                               struct convert_sum *sum)
{
    grad_cast(acc, out, n, scale, sum, true);
}
