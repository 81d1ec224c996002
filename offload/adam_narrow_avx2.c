/* offload/adam_narrow_avx2.c - narrow moments with AVX2, 8 elements at a time: the operations of
 * adam_narrow_ref.c, and the whole step in one pass, so that the dividing unit works beside all else.
 * Compiled with flags of its own. Any thread, under cpu_ftz_enter. */
#include "offload/adam_avx2.h"
#include "offload/adam_narrow_impl.h"

#include <string.h>

ADAM_INLINE __m256i splat(uint32_t x) { return _mm256_set1_epi32((int)x); }

ADAM_INLINE __m256i dither(__m256i x, __m256i key)
{
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_mullo_epi32(x, splat(NARROW_MIX1));
    x = _mm256_xor_si256(_mm256_xor_si256(x, key), _mm256_srli_epi32(x, 15));
    x = _mm256_mullo_epi32(x, splat(NARROW_MIX2));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
}

/* The counters of the first eight elements. */
ADAM_INLINE __m256i counters(uint32_t first)
{
    return _mm256_add_epi32(splat(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The new bits lie in the upper halves. */
ADAM_INLINE __m256i round_any(__m256 x, __m256i r)
{
    __m256i bits = _mm256_castps_si256(x), exponent = splat(0x7f800000u);
    __m256i up = _mm256_add_epi32(bits, r);
    __m256i over = _mm256_cmpeq_epi32(_mm256_and_si256(up, exponent), exponent),
            nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    up = _mm256_blendv_epi8(up, bits, over);
    return _mm256_blendv_epi8(up, _mm256_or_si256(bits, splat(0x400000u)), nan);
}

/* Upper halves of 16 elements. */
ADAM_INLINE void store_upper(uint16_t *out, __m256i a, __m256i b)
{
    __m256i both = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
    _mm256_storeu_si256((__m256i *)(void *)out, _mm256_permute4x64_epi64(both, 0xd8));
}

/* 16 elements of both moments. What may carry to infinity or be none is far beyond any real moment; the
 * test takes the two bits by bits together, and so finds too many rather than too few. */
ADAM_INLINE void round_block(const __m256 m[2], const __m256 v[2], __m256i at, __m256i key,
                             uint16_t *m_out, uint16_t *v_out)
{
    __m256i up[2][2], most = _mm256_setzero_si256(), r[2];
    for (int j = 0; j < 2; j++) {
        r[j] = dither(_mm256_add_epi32(at, splat(8 * (uint32_t)j)), key);
        __m256i a = _mm256_castps_si256(m[j]), b = _mm256_castps_si256(v[j]);
        most = _mm256_or_si256(most, _mm256_or_si256(a, b));
        up[0][j] = _mm256_add_epi32(a, _mm256_and_si256(r[j], splat(0xffff)));
        up[1][j] = _mm256_add_epi32(b, _mm256_srli_epi32(r[j], 16));
    }
    most = _mm256_cmpgt_epi32(_mm256_and_si256(most, splat(0x7fffffff)), splat(0x7f7effff));
    if (__builtin_expect(!_mm256_testz_si256(most, most), 0))
        for (int j = 0; j < 2; j++) {
            up[0][j] = round_any(m[j], _mm256_and_si256(r[j], splat(0xffff)));
            up[1][j] = round_any(v[j], _mm256_srli_epi32(r[j], 16));
        }
    store_upper(m_out, up[0][0], up[0][1]);
    store_upper(v_out, up[1][0], up[1][1]);
}

ADAM_INLINE __m256 widen8(const uint16_t *in)
{
    __m128i x = _mm_loadu_si128((const __m128i *)(const void *)in);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

static void widen_bf16(const uint16_t *in, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i += 8) _mm256_storeu_ps(out + i, widen8(in + i));
}

static void round_bf16(const float *m, const float *v, uint64_t n, uint32_t first,
                       const uint32_t key[2], uint16_t *m_out, uint16_t *v_out)
{
    __m256i at = counters(first + key[0]), key1 = splat(key[1]);
    for (uint64_t i = 0; i < n; i += 16, at = _mm256_add_epi32(at, splat(16))) {
        __m256 a[2] = { _mm256_loadu_ps(m + i), _mm256_loadu_ps(m + i + 8) },
               b[2] = { _mm256_loadu_ps(v + i), _mm256_loadu_ps(v + i + 8) };
        round_block(a, b, at, key1, m_out + i, v_out + i);
    }
}

/* By the lowest three bits. */
ADAM_INLINE __m256 look8(const float *table, __m256i i)
{
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), i);
}

/* By the lowest four; `upper`: the fourth as the sign. */
ADAM_INLINE __m256 look16(const float *table, __m256i i, __m256 upper)
{
    return _mm256_blendv_ps(look8(table, i), look8(table + 8, i), upper);
}

ADAM_INLINE __m256 decode8(const uint8_t *code, __m256 max, bool sign)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    __m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)code)), at = c;
    if (sign) {
        __m256i one = _mm256_cmpeq_epi32(c, splat(NARROW_ONE_SIGNED));
        at = _mm256_and_si256(c, _mm256_or_si256(one, splat(0x7f)));
    }
    __m256 f = _mm256_cvtepi32_ps(_mm256_slli_epi32(at, 8));
    __m256i i = _mm256_srli_epi32(_mm256_castps_si256(f), 23);
    __m256 x = _mm256_fmadd_ps(f, look8(t->width + 8, i), look8(t->offset + 8, i));
    x = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(at, _mm256_setzero_si256())));
    if (sign)
        x = _mm256_xor_ps(x, _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(c, 24),
                                                                  splat(0x80000000u))));
    return _mm256_mul_ps(x, max);
}

static void decode(const uint8_t *code, const float *absmax, uint64_t n, bool sign, float *out)
{
    for (uint64_t i = 0; i < n; i += 8) {
        __m256 max = _mm256_set1_ps(absmax[i / 64]);
        _mm256_storeu_ps(out + i, sign ? decode8(code + i, max, true) : decode8(code + i, max, false));
    }
}

/* The numbers of adam_narrow_impl.h; unsigned: 0 for what is not above zero. */
ADAM_INLINE __m256i number8(__m256 x, __m256 inv, bool sign)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    __m256 z = sign ? _mm256_and_ps(x, _mm256_castsi256_ps(splat(0x7fffffff))) : x;
    z = _mm256_max_ps(_mm256_mul_ps(z, inv), _mm256_set1_ps(NARROW_LEAST));
    __m256i i = _mm256_srli_epi32(_mm256_castps_si256(z), 24);
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));
    __m256 u = _mm256_fmadd_ps(z, look16(t->slope, i, upper), look16(t->start, i, upper));
    u = _mm256_min_ps(u, _mm256_fmadd_ps(u, _mm256_set1_ps(NARROW_FIFTH), look16(t->rest, i, upper)));
    if (!sign) u = _mm256_and_ps(u, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ));
    return _mm256_cvttps_epi32(u);
}

/* 32 codes of x[0..3]. The packs work in halves of a register, four elements of each x: put in order at
 * the end. */
ADAM_INLINE void store_codes(const __m256 x[4], __m256 inv, bool sign, uint8_t *out)
{
    __m256i n[4], c, zero = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) n[j] = number8(x[j], inv, sign);
    c = _mm256_packus_epi16(_mm256_packus_epi32(n[0], n[1]), _mm256_packus_epi32(n[2], n[3]));
    __m256i none = _mm256_cmpeq_epi8(c, zero);
    if (sign) { /* signed saturation keeps the signs */
        __m256i s = _mm256_packs_epi16(
            _mm256_packs_epi32(_mm256_castps_si256(x[0]), _mm256_castps_si256(x[1])),
            _mm256_packs_epi32(_mm256_castps_si256(x[2]), _mm256_castps_si256(x[3])));
        __m256i negative = _mm256_andnot_si256(none, _mm256_cmpgt_epi8(zero, s));
        __m256i most = _mm256_sub_epi8(_mm256_set1_epi8((char)0x80),
                                       _mm256_and_si256(negative, _mm256_set1_epi8(1)));
        c = _mm256_or_si256(_mm256_min_epu8(c, most),
                            _mm256_and_si256(negative, _mm256_set1_epi8((char)0x80)));
    } else { /* 0 stays, 255 becomes 1, others one more */
        const __m256i one = _mm256_set1_epi8(1);
        c = _mm256_andnot_si256(none, _mm256_max_epu8(_mm256_add_epi8(c, one), one));
    }
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)(void *)out, _mm256_permutevar8x32_epi32(c, order));
}

ADAM_INLINE void encode_group(const float *in, bool sign, uint8_t *code, float *absmax)
{
    const __m256i magnitude = splat(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (int j = 0; j < 64; j += 8)
        most = _mm256_max_epi32(
            most, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(in + j)), magnitude));
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
    __m128 max = _mm_castsi128_ps(h);
    _mm_store_ss(absmax, max);
    __m256 inv = _mm256_broadcastss_ps(_mm_min_ss(_mm_set_ss(FLT_MAX), _mm_div_ss(_mm_set_ss(4.0f), max)));
    for (int j = 0; j < 64; j += 32) { /* a NaN stayed in inv */
        __m256 x[4];
        for (int i = 0; i < 4; i++) x[i] = _mm256_loadu_ps(in + j + 8 * i);
        store_codes(x, inv, sign, code + j);
    }
}

static void encode(const float *in, uint64_t n, bool sign, uint8_t *code, float *absmax)
{
    for (uint64_t i = 0; i < n; i += 64)
        if (sign) encode_group(in + i, true, code + i, absmax + i / 64);
        else encode_group(in + i, false, code + i, absmax + i / 64);
}

/* Parameter, its rest and gradient of the 32 elements from `at` on. */
ADAM_INLINE void fetch_others(const struct adam_span *s, uint64_t at, enum adam_layout layout)
{
    adam_fetch_lines(s->grad, at, 2);
    if (layout != ADAM_FP16) adam_fetch_lines(s->param, at, 2);
    adam_fetch_lines(s->low_or_master, at, layout == ADAM_FP16 ? 4 : 2);
}

ADAM_INLINE void step_bf16(const struct adam_span *span, const struct adam_coef *c,
                           const struct adam_part *part, enum adam_layout layout, bool l2)
{
    struct coef256 k;
    coef_load(&k, c);
    const struct adam_span s = *span;
    void *out = s.param_out ? s.param_out : s.param;
    uint16_t *m_at = (uint16_t *)(void *)part->at[0], *v_at = (uint16_t *)(void *)part->at[1];
    __m256i at = counters(part->first + part->key[0]), key = splat(part->key[1]);
    uint64_t ahead = adam_ahead(&s);
    for (uint64_t i = 0; i < s.n; i += 16, at = _mm256_add_epi32(at, splat(16))) {
        __m256 m[2], v[2];
        if (i % 32 == 0) {
            fetch_others(&s, i + ahead, layout);
            adam_fetch_lines(m_at, i + ahead, 2);
            adam_fetch_lines(v_at, i + ahead, 2);
        }
        for (uint64_t j = 0; j < 2; j++) {
            uint64_t e = i + 8 * j;
            m[j] = widen8(m_at + e);
            v[j] = widen8(v_at + e);
            __m256 p = adam_math(&k, load_grad(&s, e, layout), load_param(&s, e, layout), &m[j], &v[j], l2);
            store_param(&s, out, e, layout, p);
        }
        round_block(m, v, at, key, m_at + i, v_at + i);
    }
}

enum { STEP_PART = 256 }; /* elements between decoding and encoding: four small arrays in the first cache */

ADAM_INLINE void step_8bit(const struct adam_span *span, const struct adam_coef *c,
                           const struct adam_part *part, enum adam_layout layout, bool l2)
{
    _Alignas(64) float made[2][STEP_PART];
    struct coef256 k;
    coef_load(&k, c);
    const struct adam_span s = *span;
    const struct adam_part x = *part;
    void *out = s.param_out ? s.param_out : s.param;
    uint64_t ahead = adam_ahead(&s);
    for (uint64_t from = 0, n; from < s.n; from += n) {
        n = s.n - from < STEP_PART ? s.n - from : STEP_PART;
        for (uint64_t i = from; i < from + n; i += 8) {
            if (i % 32 == 0) fetch_others(&s, i + ahead, layout);
            if (i % 64 == 0) adam_fetch_lines(x.at[0], i + ahead, 1);
            if (i % 64 == 0) adam_fetch_lines(x.at[1], i + ahead, 1);
            __m256 m = decode8(x.at[0] + i, _mm256_set1_ps(x.absmax[0][i / 64]), true),
                   v = decode8(x.at[1] + i, _mm256_set1_ps(x.absmax[1][i / 64]), false);
            __m256 p = adam_math(&k, load_grad(&s, i, layout), load_param(&s, i, layout), &m, &v, l2);
            store_param(&s, out, i, layout, p);
            _mm256_store_ps(made[0] + (i - from), m);
            _mm256_store_ps(made[1] + (i - from), v);
        }
        for (uint64_t i = 0; i < n; i += 64)
            for (int w = 0; w < 2; w++)
                encode_group(made[w] + i, w == 0, x.at[w] + from + i, x.absmax[w] + (from + i) / 64);
    }
}

ADAM_DEFINE_STEP(step_bf16_split, step_bf16, ADAM_BF16_SPLIT)
ADAM_DEFINE_STEP(step_bf16_fp16, step_bf16, ADAM_FP16)
ADAM_DEFINE_STEP(step_8bit_split, step_8bit, ADAM_BF16_SPLIT)
ADAM_DEFINE_STEP(step_8bit_fp16, step_8bit, ADAM_FP16)

const struct adam_narrow_fns adam_narrow__avx2 = {
    .widen_bf16 = widen_bf16,
    .round_bf16 = round_bf16,
    .decode = decode,
    .encode = encode,
    .step_bf16 = { [ADAM_BF16_SPLIT] = step_bf16_split, [ADAM_FP16] = step_bf16_fp16 },
    .step_8bit = { [ADAM_BF16_SPLIT] = step_8bit_split, [ADAM_FP16] = step_8bit_fp16 },
};
