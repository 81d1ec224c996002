/* offload/adam_narrow_avx2.c - narrow moments with AVX2, 8 elements at a time: the operations of
 * adam_narrow_ref.c. Compiled with flags of its own. Any thread, under cpu_ftz_enter. */
#include "offload/adam_narrow_impl.h"
#include <immintrin.h>
#include <string.h>

ADAM_INLINE __m256i mix(__m256i h)
{
    h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
    h = _mm256_mullo_epi32(h, _mm256_set1_epi32((int)0x85ebca6bu));
    h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 13));
    h = _mm256_mullo_epi32(h, _mm256_set1_epi32((int)0xc2b2ae35u));
    return _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
}

/* Values in [0, 65535]. */
ADAM_INLINE void store_u16(uint16_t *out, __m256i x)
{
    __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storeu_si128((__m128i *)(void *)out, half);
}

ADAM_INLINE __m256i round_up_by(__m256 x, __m256i r)
{
    __m256i bits = _mm256_castps_si256(x), exponent = _mm256_set1_epi32(0x7f80);
    __m256i up = _mm256_srli_epi32(_mm256_add_epi32(bits, r), 16), cut = _mm256_srli_epi32(bits, 16);
    __m256i over = _mm256_cmpeq_epi32(_mm256_and_si256(up, exponent), exponent),
            nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    up = _mm256_blendv_epi8(up, cut, over);
    return _mm256_blendv_epi8(up, _mm256_or_si256(cut, _mm256_set1_epi32(0x40)), nan);
}

static void widen_bf16(const uint16_t *in, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i += 8) {
        __m128i x = _mm_loadu_si128((const __m128i *)(const void *)(in + i));
        _mm256_storeu_si256((__m256i *)(void *)(out + i),
                            _mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
    }
}

static void round_bf16(const float *m, const float *v, uint64_t n, uint32_t first,
                       const uint32_t key[2], uint16_t *m_out, uint16_t *v_out)
{
    const __m256i k0 = _mm256_set1_epi32((int)key[0]), k1 = _mm256_set1_epi32((int)key[1]),
                  half = _mm256_set1_epi32(0xffff), step = _mm256_set1_epi32(8);
    __m256i at = _mm256_add_epi32(_mm256_set1_epi32((int)first),
                                  _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    for (uint64_t i = 0; i < n; i += 8, at = _mm256_add_epi32(at, step)) {
        __m256i r = mix(_mm256_add_epi32(mix(_mm256_xor_si256(at, k0)), k1));
        store_u16(m_out + i, round_up_by(_mm256_loadu_ps(m + i), _mm256_and_si256(r, half)));
        store_u16(v_out + i, round_up_by(_mm256_loadu_ps(v + i), _mm256_srli_epi32(r, 16)));
    }
}

ADAM_INLINE __m256i look_i(const int32_t *t, __m256i d)
{
    return _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)(const void *)t), d);
}
ADAM_INLINE __m256 look(const float *t, __m256i d)
{
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(t), d);
}

ADAM_INLINE void decode_as(const uint8_t *code, const float *absmax, uint64_t n, bool sign, float *out)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    const __m256i low = _mm256_set1_epi32(sign ? 0x7f : 0xff),
                  bias = _mm256_set1_epi32(sign ? 127 : 128), zero = _mm256_setzero_si256(),
                  one_code = _mm256_set1_epi32(sign ? NARROW_ONE_SIGNED : NARROW_ONE_UNSIGNED);
    for (uint64_t i = 0; i < n; i += 8) {
        __m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(code + i)));
        __m256i at = _mm256_and_si256(c, low);
        __m256 f = _mm256_cvtepi32_ps(at);
        __m256i bits = _mm256_castps_si256(f);
        __m256i d = _mm256_sub_epi32(_mm256_srli_epi32(bits, 23), bias);
        __m256 part = _mm256_sub_ps(
            f, _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000))));
        __m256 x = _mm256_fmadd_ps(part, look(t->width, d), look(t->first, d));
        x = _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(at, zero)), x);
        if (sign) {
            __m256i s = _mm256_slli_epi32(_mm256_srli_epi32(c, 7), 31);
            x = _mm256_xor_ps(x, _mm256_castsi256_ps(s));
        }
        x = _mm256_blendv_ps(x, _mm256_set1_ps(1.0f),
                             _mm256_castsi256_ps(_mm256_cmpeq_epi32(c, one_code)));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(x, _mm256_set1_ps(absmax[i / 64])));
    }
}

static void decode(const uint8_t *code, const float *absmax, uint64_t n, bool sign, float *out)
{
    if (sign) decode_as(code, absmax, n, true, out);
    else decode_as(code, absmax, n, false, out);
}

ADAM_INLINE void encode_block(__m256 x, __m256 max, const struct narrow_tree *t, bool sign,
                              uint8_t *code)
{
    const __m256i zero = _mm256_setzero_si256();
    __m256i bits = _mm256_castps_si256(x), d = _mm256_set1_epi32(-1);
    __m256 y = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    y = _mm256_div_ps(y, max);
    for (int k = 0; k < 7; k++)
        d = _mm256_sub_epi32(d, _mm256_castps_si256(_mm256_cmp_ps(
                                    y, _mm256_set1_ps(t->least[k]), _CMP_GE_OQ)));
    __m256i none = _mm256_cmpgt_epi32(zero, d);
    __m256i negative = sign ? _mm256_srai_epi32(bits, 31) : zero;
    __m256i one = _mm256_andnot_si256(negative, _mm256_castps_si256(_mm256_cmp_ps(
                                                    y, _mm256_set1_ps(t->least[7]), _CMP_GE_OQ)));
    d = _mm256_max_epi32(d, zero);
    __m256i part = _mm256_cvttps_epi32(_mm256_fmadd_ps(y, look(t->scale, d), look(t->shift, d)));
    part = _mm256_min_epi32(_mm256_max_epi32(part, zero), look_i(t->last, d));
    __m256i c = _mm256_add_epi32(part, look_i(t->base, d));
    if (sign) {
        c = _mm256_or_si256(c, _mm256_and_si256(negative, _mm256_set1_epi32(0x80)));
        c = _mm256_andnot_si256(none, c);
    } else {
        __m256i positive = _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ));
        c = _mm256_blendv_epi8(c, _mm256_and_si256(positive, _mm256_set1_epi32(t->base[0])), none);
    }
    c = _mm256_blendv_epi8(
        c, _mm256_set1_epi32(sign ? NARROW_ONE_SIGNED : NARROW_ONE_UNSIGNED), one);
    __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
    _mm_storel_epi64((__m128i *)(void *)code, _mm_packus_epi16(half, half));
}

static void encode(const float *in, uint64_t n, bool sign, uint8_t *code, float *absmax)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    for (uint64_t i = 0; i < n; i += 64) {
        __m256i most = _mm256_setzero_si256();
        for (uint64_t j = i; j < i + 64; j += 8)
            most = _mm256_max_epi32(
                most, _mm256_and_si256(
                          _mm256_loadu_si256((const __m256i *)(const void *)(in + j)), magnitude));
        __m128i h = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
        h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
        int32_t bits = _mm_cvtsi128_si32(h);
        memcpy(&absmax[i / 64], &bits, 4);
        __m256 max = _mm256_castsi256_ps(_mm256_set1_epi32(bits));
        for (uint64_t j = i; j < i + 64; j += 8) {
            __m256 x = _mm256_loadu_ps(in + j);
            if (sign) encode_block(x, max, t, true, code + j);
            else encode_block(x, max, t, false, code + j);
        }
    }
}

const struct adam_narrow_fns adam_narrow__avx2 = { widen_bf16, round_bf16, decode, encode };
