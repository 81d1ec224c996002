/* base/convert_avx2.c - the conversions with AVX2 and F16C; the last elements as convert_scalar.c
 * does them.
 *
 * Compiled with flags of its own (meson.build): called only after the dispatch in convert.c has
 * asked the processor. Integer arithmetic but for the scaling and the sums of the gradient casts.
 * Any thread. */
#include "base/convert_variants.h"

#include <immintrin.h>

/* A line of what will be read or written so many elements on. With tens of instructions a line the
 * processor looks only a few lines ahead by itself: 1.1 GB/s from memory instead of 16 was measured,
 * in a machine whose own prefetching is weak. May point past the end: integers, nothing is read. */
enum { AHEAD = 512 };

static inline void fetch(const void *base, uint64_t i, uint64_t width_bytes)
{
    __builtin_prefetch((const void *)((uintptr_t)base + (uintptr_t)((i + AHEAD) * width_bytes)));
}

static inline __m256i bf16_from_f32(__m256 x) /* in the low half of each 32-bit lane */
{
    __m256i u = _mm256_castps_si256(x);
    __m256i magnitude = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
    __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    __m256i high = _mm256_srli_epi32(u, 16), odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i even = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    return _mm256_blendv_epi8(even, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}

static inline __m128i narrow_u16(__m256i x) /* lanes in [0, 65535] */
{
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

static inline __m128i load_u16(const void *p) { return _mm_loadu_si128(p); }

static inline __m256 f32_from_bf16(__m256i x) /* from the low half of each 32-bit lane */
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}

/* Adds the squares of 8 elements to 8 lanes, non-finite ones as zero; returns their number. */
static inline uint64_t sum_squares(__m256 x, __m256d *low, __m256d *high)
{
    __m256i exponent = _mm256_set1_epi32(0x7f800000), u = _mm256_castps_si256(x);
    __m256 bad = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(u, exponent), exponent));
    __m256 good = _mm256_andnot_ps(bad, x);
    __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(good)),
            b = _mm256_cvtps_pd(_mm256_extractf128_ps(good, 1));
    *low = _mm256_add_pd(*low, _mm256_mul_pd(a, a));
    *high = _mm256_add_pd(*high, _mm256_mul_pd(b, b));
    return (uint64_t)__builtin_popcount((unsigned)_mm256_movemask_ps(bad));
}

static inline __attribute__((always_inline)) void grad_cast(const float *acc, uint16_t *out,
                                                            uint64_t n, float scale,
                                                            struct convert_sum *sum, bool fp16)
{
    __m256d s0 = _mm256_setzero_pd(), s1 = s0, s2 = s0, s3 = s0;
    __m256 factor = _mm256_set1_ps(scale);
    uint64_t i = 0, nonfinite = 0;
    for (; i + CONVERT_LANES <= n; i += CONVERT_LANES) {
        fetch(acc, i, 4);
        fetch(out, i, 2);
        __m256 x = _mm256_mul_ps(_mm256_loadu_ps(acc + i), factor);
        __m256 y = _mm256_mul_ps(_mm256_loadu_ps(acc + i + 8), factor);
        __m128i p, q;
        if (fp16) {
            p = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
            q = _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT);
            x = _mm256_cvtph_ps(p);
            y = _mm256_cvtph_ps(q);
        } else {
            __m256i a = bf16_from_f32(x), b = bf16_from_f32(y);
            p = narrow_u16(a);
            q = narrow_u16(b);
            x = f32_from_bf16(a);
            y = f32_from_bf16(b);
        }
        _mm_storeu_si128((__m128i *)(void *)(out + i), p);
        _mm_storeu_si128((__m128i *)(void *)(out + i + 8), q);
        nonfinite += sum_squares(x, &s0, &s1) + sum_squares(y, &s2, &s3);
    }
    double lanes[CONVERT_LANES];
    _mm256_storeu_pd(lanes, s0);
    _mm256_storeu_pd(lanes + 4, s1);
    _mm256_storeu_pd(lanes + 8, s2);
    _mm256_storeu_pd(lanes + 12, s3);
    convert_tail_fn tail = fp16 ? convert_grad_fp16_some : convert_grad_bf16_some;
    nonfinite += tail(acc, out, i, n, scale, lanes);
    convert_sum_fold(lanes, nonfinite, sum);
}

void convert_grad_bf16__avx2(const float *acc, uint16_t *out, uint64_t n, float scale,
                             struct convert_sum *sum)
{
    grad_cast(acc, out, n, scale, sum, false);
}

void convert_grad_fp16__avx2(const float *acc, uint16_t *out, uint64_t n, float scale,
                             struct convert_sum *sum)
{
    grad_cast(acc, out, n, scale, sum, true);
}

void convert_split__avx2(const float *master, uint16_t *param, int16_t *low, uint64_t n)
{
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        fetch(master, i, 4);
        fetch(param, i, 2);
        fetch(low, i, 2);
        __m256i u = _mm256_castps_si256(_mm256_loadu_ps(master + i));
        __m256i high = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), 16);
        __m256i rest = _mm256_sub_epi32(u, _mm256_slli_epi32(high, 16)); /* in [-32768, 32767] */
        __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(rest),
                                         _mm256_extracti128_si256(rest, 1));
        _mm_storeu_si128((__m128i *)(void *)(param + i), narrow_u16(high));
        _mm_storeu_si128((__m128i *)(void *)(low + i), packed);
    }
    convert_split__scalar(master + i, param + i, low + i, n - i);
}

void convert_join__avx2(const uint16_t *param, const int16_t *low, float *master, uint64_t n)
{
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        fetch(param, i, 2);
        fetch(low, i, 2);
        fetch(master, i, 4);
        __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_u16(param + i)), 16);
        __m256i u = _mm256_add_epi32(high, _mm256_cvtepi16_epi32(load_u16(low + i)));
        _mm256_storeu_ps(master + i, _mm256_castsi256_ps(u));
    }
    convert_join__scalar(param + i, low + i, master + i, n - i);
}

void convert_bf16_to_f32__avx2(const uint16_t *in, float *out, uint64_t n)
{
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        fetch(in, i, 2);
        fetch(out, i, 4);
        _mm256_storeu_ps(out + i, f32_from_bf16(_mm256_cvtepu16_epi32(load_u16(in + i))));
    }
    convert_bf16_to_f32__scalar(in + i, out + i, n - i);
}

void convert_fp16_to_f32__avx2(const uint16_t *in, float *out, uint64_t n)
{
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        fetch(in, i, 2);
        fetch(out, i, 4);
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(load_u16(in + i)));
    }
    convert_fp16_to_f32__scalar(in + i, out + i, n - i);
}

void convert_f32_to_bf16__avx2(const float *in, uint16_t *out, uint64_t n)
{
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        fetch(in, i, 4);
        fetch(out, i, 2);
        _mm_storeu_si128((__m128i *)(void *)(out + i),
                         narrow_u16(bf16_from_f32(_mm256_loadu_ps(in + i))));
    }
    convert_f32_to_bf16__scalar(in + i, out + i, n - i);
}

void convert_f32_to_fp16__avx2(const float *in, uint16_t *out, uint64_t n)
{
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        fetch(in, i, 4);
        fetch(out, i, 2);
        _mm_storeu_si128((__m128i *)(void *)(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
    }
    convert_f32_to_fp16__scalar(in + i, out + i, n - i);
}
