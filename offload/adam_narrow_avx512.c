/* offload/adam_narrow_avx512.c - narrow moments with AVX-512, 16 elements at a time: the operations of
 * adam_narrow_ref.c. Compiled with flags of its own. Any thread, under cpu_ftz_enter. */
#include "offload/adam_narrow_impl.h"
#include <immintrin.h>
#include <string.h>

ADAM_INLINE __m512i mix(__m512i h)
{
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32((int)0x85ebca6bu));
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 13));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32((int)0xc2b2ae35u));
    return _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
}

ADAM_INLINE __m256i round_up_by(__m512 x, __m512i r)
{
    __m512i bits = _mm512_castps_si512(x), exponent = _mm512_set1_epi32(0x7f80);
    __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, r), 16), cut = _mm512_srli_epi32(bits, 16);
    __mmask16 over = _mm512_cmpeq_epi32_mask(_mm512_and_si512(up, exponent), exponent),
              nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    up = _mm512_mask_mov_epi32(up, over, cut);
    up = _mm512_mask_or_epi32(up, nan, cut, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(up);
}

static void widen_bf16(const uint16_t *in, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i += 16) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(in + i));
        _mm512_storeu_si512(out + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    }
}

static void round_bf16(const float *m, const float *v, uint64_t n, uint32_t first,
                       const uint32_t key[2], uint16_t *m_out, uint16_t *v_out)
{
    const __m512i k0 = _mm512_set1_epi32((int)key[0]), k1 = _mm512_set1_epi32((int)key[1]),
                  half = _mm512_set1_epi32(0xffff), step = _mm512_set1_epi32(16);
    __m512i at = _mm512_add_epi32(
        _mm512_set1_epi32((int)first),
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (uint64_t i = 0; i < n; i += 16, at = _mm512_add_epi32(at, step)) {
        __m512i r = mix(_mm512_add_epi32(mix(_mm512_xor_si512(at, k0)), k1));
        _mm256_storeu_si256((__m256i *)(void *)(m_out + i),
                            round_up_by(_mm512_loadu_ps(m + i), _mm512_and_si512(r, half)));
        _mm256_storeu_si256((__m256i *)(void *)(v_out + i),
                            round_up_by(_mm512_loadu_ps(v + i), _mm512_srli_epi32(r, 16)));
    }
}

/* Sixteen lanes of a table of eight; indices are below 8. */
ADAM_INLINE __m512 table(const float *t)
{
    return _mm512_zextps256_ps512(_mm256_loadu_ps(t));
}
ADAM_INLINE __m512i table_i(const int32_t *t)
{
    return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)t));
}

ADAM_INLINE void decode_as(const uint8_t *code, const float *absmax, uint64_t n, bool sign, float *out)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    const __m512 width = table(t->width), first = table(t->first), one = _mm512_set1_ps(1.0f);
    const __m512i low = _mm512_set1_epi32(sign ? 0x7f : 0xff),
                  bias = _mm512_set1_epi32(sign ? 127 : 128),
                  one_code = _mm512_set1_epi32(sign ? NARROW_ONE_SIGNED : NARROW_ONE_UNSIGNED);
    for (uint64_t i = 0; i < n; i += 16) {
        __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(code + i)));
        __m512i at = _mm512_and_si512(c, low);
        __m512 f = _mm512_cvtepi32_ps(at);
        __m512i bits = _mm512_castps_si512(f);
        __m512i d = _mm512_sub_epi32(_mm512_srli_epi32(bits, 23), bias);
        __m512 part = _mm512_sub_ps(
            f, _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0x7f800000))));
        __m512 x = _mm512_fmadd_ps(part, _mm512_permutexvar_ps(d, width),
                                   _mm512_permutexvar_ps(d, first));
        x = _mm512_maskz_mov_ps(_mm512_test_epi32_mask(at, at), x);
        if (sign) {
            __m512i s = _mm512_slli_epi32(_mm512_srli_epi32(c, 7), 31);
            x = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), s));
        }
        x = _mm512_mask_mov_ps(x, _mm512_cmpeq_epi32_mask(c, one_code), one);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(x, _mm512_set1_ps(absmax[i / 64])));
    }
}

static void decode(const uint8_t *code, const float *absmax, uint64_t n, bool sign, float *out)
{
    if (sign) decode_as(code, absmax, n, true, out);
    else decode_as(code, absmax, n, false, out);
}

ADAM_INLINE __m128i encode_block(__m512 x, __m512 max, const struct narrow_tree *t, bool sign)
{
    const __m512i zero = _mm512_setzero_si512();
    __m512i bits = _mm512_castps_si512(x), d = _mm512_set1_epi32(-1);
    __m512 y = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    y = _mm512_div_ps(y, max);
    for (int k = 0; k < 7; k++)
        d = _mm512_mask_add_epi32(
            d, _mm512_cmp_ps_mask(y, _mm512_set1_ps(t->least[k]), _CMP_GE_OQ), d,
            _mm512_set1_epi32(1));
    __mmask16 some = _mm512_cmpge_epi32_mask(d, zero);
    __mmask16 negative = sign ? _mm512_movepi32_mask(bits) : 0;
    __mmask16 one = _mm512_cmp_ps_mask(y, _mm512_set1_ps(t->least[7]), _CMP_GE_OQ) & ~negative;
    d = _mm512_max_epi32(d, zero);
    __m512i part = _mm512_cvttps_epi32(_mm512_fmadd_ps(y, _mm512_permutexvar_ps(d, table(t->scale)),
                                                       _mm512_permutexvar_ps(d, table(t->shift))));
    part = _mm512_min_epi32(_mm512_max_epi32(part, zero),
                            _mm512_permutexvar_epi32(d, table_i(t->last)));
    __m512i c = _mm512_add_epi32(part, _mm512_permutexvar_epi32(d, table_i(t->base)));
    if (sign) {
        c = _mm512_mask_or_epi32(c, negative, c, _mm512_set1_epi32(0x80));
        c = _mm512_maskz_mov_epi32(some, c);
    } else {
        __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
        c = _mm512_mask_mov_epi32(_mm512_maskz_set1_epi32(positive, t->base[0]), some, c);
    }
    c = _mm512_mask_mov_epi32(
        c, one, _mm512_set1_epi32(sign ? NARROW_ONE_SIGNED : NARROW_ONE_UNSIGNED));
    return _mm512_cvtepi32_epi8(c);
}

static void encode(const float *in, uint64_t n, bool sign, uint8_t *code, float *absmax)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (uint64_t i = 0; i < n; i += 64) {
        __m512i most = _mm512_setzero_si512();
        for (uint64_t j = i; j < i + 64; j += 16)
            most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_loadu_si512(in + j), magnitude));
        int32_t bits = _mm512_reduce_max_epi32(most);
        memcpy(&absmax[i / 64], &bits, 4);
        __m512 max = _mm512_castsi512_ps(_mm512_set1_epi32(bits));
        for (uint64_t j = i; j < i + 64; j += 16) {
            __m512 x = _mm512_loadu_ps(in + j);
            __m128i c = sign ? encode_block(x, max, t, true) : encode_block(x, max, t, false);
            _mm_storeu_si128((__m128i *)(void *)(code + j), c);
        }
    }
}

const struct adam_narrow_fns adam_narrow__avx512 = { widen_bf16, round_bf16, decode, encode };
