/* offload/adam_narrow_avx512.c - narrow moments with AVX-512, 16 elements at a time: the operations of
 * adam_narrow_ref.c, and the whole step in one pass, so that the dividing unit works beside all else.
 * Compiled with flags of its own. Any thread, under cpu_ftz_enter. */
#include "offload/adam_avx512.h"
#include "offload/adam_narrow_impl.h"

#include <string.h>

ADAM_INLINE __m512i splat(uint32_t x) { return _mm512_set1_epi32((int)x); }

ADAM_INLINE __m512i dither(__m512i x, __m512i key)
{
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, splat(NARROW_MIX1));
    x = _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, 15), key, 0x96); /* xor of three */
    x = _mm512_mullo_epi32(x, splat(NARROW_MIX2));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
}

/* The counters of the first sixteen elements. */
ADAM_INLINE __m512i counters(uint32_t first)
{
    return _mm512_add_epi32(splat(first),
                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

/* The new bits lie in the upper halves. */
ADAM_INLINE __m512i round_any(__m512 x, __m512i r)
{
    __m512i bits = _mm512_castps_si512(x), exponent = splat(0x7f800000u);
    __m512i up = _mm512_add_epi32(bits, r);
    __mmask16 over = _mm512_cmpeq_epi32_mask(_mm512_and_si512(up, exponent), exponent),
              nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    up = _mm512_mask_mov_epi32(up, over, bits);
    return _mm512_mask_or_epi32(up, nan, bits, splat(0x400000u));
}

/* Upper halves of 32 elements. */
ADAM_INLINE __m512i pack_upper(__m512i a, __m512i b)
{
    __m512i both = _mm512_packus_epi32(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16));
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), both);
}

/* 32 elements of both moments. What may carry to infinity or be none is far beyond any real moment; the
 * test takes the two bits by bits together, and so finds too many rather than too few. */
ADAM_INLINE void round_block(const __m512 m[2], const __m512 v[2], __m512i at, __m512i key,
                             uint16_t *m_out, uint16_t *v_out)
{
    __m512i up[2][2], most = _mm512_setzero_si512(), r[2];
    for (int j = 0; j < 2; j++) {
        r[j] = dither(_mm512_add_epi32(at, splat(16 * (uint32_t)j)), key);
        __m512i a = _mm512_castps_si512(m[j]), b = _mm512_castps_si512(v[j]);
        most = _mm512_ternarylogic_epi32(most, a, b, 0xfe); /* or of three */
        up[0][j] = _mm512_add_epi32(a, _mm512_and_si512(r[j], splat(0xffff)));
        up[1][j] = _mm512_add_epi32(b, _mm512_srli_epi32(r[j], 16));
    }
    most = _mm512_and_si512(most, splat(0x7fffffff));
    if (__builtin_expect(_mm512_cmpge_epi32_mask(most, splat(0x7f7f0000)) != 0, 0))
        for (int j = 0; j < 2; j++) {
            up[0][j] = round_any(m[j], _mm512_and_si512(r[j], splat(0xffff)));
            up[1][j] = round_any(v[j], _mm512_srli_epi32(r[j], 16));
        }
    _mm512_storeu_si512(m_out, pack_upper(up[0][0], up[0][1]));
    _mm512_storeu_si512(v_out, pack_upper(up[1][0], up[1][1]));
}

ADAM_INLINE __m512 widen16(const uint16_t *in)
{
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)in);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

static void widen_bf16(const uint16_t *in, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i += 16) _mm512_storeu_ps(out + i, widen16(in + i));
}

static void round_bf16(const float *m, const float *v, uint64_t n, uint32_t first,
                       const uint32_t key[2], uint16_t *m_out, uint16_t *v_out)
{
    __m512i at = counters(first + key[0]), key1 = splat(key[1]);
    for (uint64_t i = 0; i < n; i += 32, at = _mm512_add_epi32(at, splat(32))) {
        __m512 a[2] = { _mm512_loadu_ps(m + i), _mm512_loadu_ps(m + i + 16) },
               b[2] = { _mm512_loadu_ps(v + i), _mm512_loadu_ps(v + i + 16) };
        round_block(a, b, at, key1, m_out + i, v_out + i);
    }
}

ADAM_INLINE __m512 look(const float *table, __m512i i)
{
    return _mm512_permutexvar_ps(i, _mm512_loadu_ps(table)); /* by the lowest four bits */
}

/* 16 codes, each times 256; `sign`: and once more in the uppermost byte, where its sign is the float's. */
ADAM_INLINE __m512i load_codes(const uint8_t *code, bool sign)
{
    __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)code));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i from = sign ? _mm512_add_epi32(splat(0x00800080u), _mm512_mullo_epi32(lane, splat(0x01000100u)))
                              : _mm512_add_epi32(splat(0x80800080u), _mm512_slli_epi32(lane, 8));
    return _mm512_shuffle_epi8(all, from);
}

ADAM_INLINE __m512 decode16(const uint8_t *code, __m512 max, bool sign)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    __m512i c = load_codes(code, sign);
    __m512 f = _mm512_cvtepi32_ps(sign ? _mm512_and_si512(c, splat(0x7f00)) : c);
    __m512i i = _mm512_srli_epi32(_mm512_castps_si512(f), 23);
    if (!sign)
        return _mm512_mul_ps(_mm512_fmadd_ps(f, look(t->width, i), look(t->offset, i)), max);
    __m512 x = _mm512_maskz_fmadd_ps(_mm512_test_epi32_mask(c, c), f, look(t->width, i), look(t->offset, i));
    x = _mm512_castsi512_ps( /* x ^ (c & sign) */
        _mm512_ternarylogic_epi32(_mm512_castps_si512(x), c, splat(0x80000000u), 0x78));
    return _mm512_mul_ps(x, max);
}

static void decode(const uint8_t *code, const float *absmax, uint64_t n, bool sign, float *out)
{
    for (uint64_t i = 0; i < n; i += 16) {
        __m512 max = _mm512_set1_ps(absmax[i / 64]);
        _mm512_storeu_ps(out + i, sign ? decode16(code + i, max, true) : decode16(code + i, max, false));
    }
}

/* The numbers of adam_narrow_impl.h; unsigned: 0 for what is not above zero. */
ADAM_INLINE __m512i number16(__m512 x, __m512 inv, bool sign)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    __m512 z = sign ? _mm512_abs_ps(x) : x;
    z = _mm512_max_ps(_mm512_mul_ps(z, inv), _mm512_set1_ps(NARROW_LEAST));
    __m512i i = _mm512_srli_epi32(_mm512_castps_si512(z), 24);
    __m512 u = _mm512_fmadd_ps(z, look(t->slope, i), look(t->start, i));
    u = _mm512_min_ps(u, _mm512_fmadd_ps(u, _mm512_set1_ps(NARROW_FIFTH), look(t->rest, i)));
    if (sign) return _mm512_cvttps_epi32(u);
    return _mm512_maskz_cvttps_epi32(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ), u);
}

/* 64 codes of x[0..3]. The packs work in quarters of a register, four elements of each x: put in order
 * at the end. */
ADAM_INLINE void store_codes(const __m512 x[4], __m512 inv, bool sign, uint8_t *out)
{
    __m512i n[4];
    for (int j = 0; j < 4; j++) n[j] = number16(x[j], inv, sign);
    __m512i c = _mm512_packus_epi16(_mm512_packus_epi32(n[0], n[1]), _mm512_packus_epi32(n[2], n[3]));
    if (sign) { /* signed saturation keeps the signs */
        __m512i s = _mm512_packs_epi16(
            _mm512_packs_epi32(_mm512_castps_si512(x[0]), _mm512_castps_si512(x[1])),
            _mm512_packs_epi32(_mm512_castps_si512(x[2]), _mm512_castps_si512(x[3])));
        __mmask64 negative = _mm512_mask_test_epi8_mask(_mm512_movepi8_mask(s), c, c);
        c = _mm512_mask_min_epu8(c, negative, c, _mm512_set1_epi8(127));
        c = _mm512_mask_add_epi8(c, negative, c, _mm512_set1_epi8((char)0x80));
    } else { /* 0 stays, 255 becomes 1, others one more */
        const __m512i one = _mm512_set1_epi8(1);
        __mmask64 some = _mm512_test_epi8_mask(c, c);
        c = _mm512_maskz_max_epu8(some, _mm512_add_epi8(c, one), one);
    }
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, c));
}

ADAM_INLINE void encode_group(const float *in, bool sign, uint8_t *code, float *absmax)
{
    const __m512i magnitude = splat(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    __m512 x[4];
    for (int j = 0; j < 4; j++) {
        x[j] = _mm512_loadu_ps(in + 16 * j);
        most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(x[j]), magnitude));
    }
    __m128 max = _mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(most)));
    _mm_store_ss(absmax, max);
    __m128 inv = _mm_min_ss(_mm_set_ss(FLT_MAX), _mm_div_ss(_mm_set_ss(4.0f), max)); /* a NaN stays */
    store_codes(x, _mm512_broadcastss_ps(inv), sign, code);
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
    struct coef512 k;
    coef_load(&k, c);
    const struct adam_span s = *span;
    void *out = s.param_out ? s.param_out : s.param;
    uint16_t *m_at = (uint16_t *)(void *)part->at[0], *v_at = (uint16_t *)(void *)part->at[1];
    __m512i at = counters(part->first + part->key[0]), key = splat(part->key[1]);
    uint64_t ahead = adam_ahead(&s);
    for (uint64_t i = 0; i < s.n; i += 32, at = _mm512_add_epi32(at, splat(32))) {
        __m512 m[2], v[2];
        fetch_others(&s, i + ahead, layout);
        adam_fetch_lines(m_at, i + ahead, 2);
        adam_fetch_lines(v_at, i + ahead, 2);
        for (uint64_t j = 0; j < 2; j++) {
            uint64_t e = i + 16 * j;
            m[j] = widen16(m_at + e);
            v[j] = widen16(v_at + e);
            __m512 p = adam_math(&k, load_grad(&s, e, 0xffff, layout),
                                 load_param(&s, e, 0xffff, layout), &m[j], &v[j], l2);
            store_param(&s, out, e, 0xffff, layout, p);
        }
        round_block(m, v, at, key, m_at + i, v_at + i);
    }
}

/* Largest of lanes, of two and of two pairs at once: lanes of a and b take turns, then pairs of lanes. */
ADAM_INLINE __m512i most32(__m512i a, __m512i b)
{
    return _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
ADAM_INLINE __m512i most64(__m512i a, __m512i b)
{
    return _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

/* Of four groups' lanes of both moments: absmax of the first `groups`, and what to multiply by in
 * inv[moment][group]. */
ADAM_INLINE void find_absmax(__m512i most[2][4], uint64_t groups, float *const absmax[2], float inv[2][4])
{
    __m512i m = most64(most32(most[0][0], most[0][1]), most32(most[0][2], most[0][3])),
            v = most64(most32(most[1][0], most[1][1]), most32(most[1][2], most[1][3]));
    m = _mm512_max_epi32(_mm512_shuffle_i64x2(m, v, 0x44), _mm512_shuffle_i64x2(m, v, 0xee));
    m = _mm512_max_epi32(m, _mm512_shuffle_i64x2(m, m, 0xb1)); /* quarters: m, m, v, v */
    for (int w = 0; w < 2; w++) {
        __m128 max = _mm_castsi128_ps(w ? _mm512_extracti32x4_epi32(m, 2) : _mm512_castsi512_si128(m));
        _mm_mask_storeu_ps(absmax[w], (__mmask8)((1u << groups) - 1), max);
        /* a NaN stays */
        _mm_store_ps(inv[w], _mm_min_ps(_mm_set1_ps(FLT_MAX), _mm_div_ps(_mm_set1_ps(4.0f), max)));
    }
}

enum { STEP_PART = 256 }; /* elements between decoding and encoding: four groups, in the first cache */

/* One group: moments widened and stepped, into `made` as fp32; `most`: its largest bit patterns by lanes. */
ADAM_INLINE void step_group(const struct adam_span *s, void *out, const struct coef512 *k,
                            const struct adam_part *x, uint64_t i, enum adam_layout layout, bool l2,
                            float *made[2], __m512i most[2][4], uint64_t group)
{
    const __m512i magnitude = splat(0x7fffffff);
    __m512 max[2] = { _mm512_set1_ps(x->absmax[0][i / 64]), _mm512_set1_ps(x->absmax[1][i / 64]) };
    __m512i top[2] = { _mm512_setzero_si512(), _mm512_setzero_si512() };
    for (uint64_t j = 0; j < 64; j += 16) {
        uint64_t e = i + j;
        __m512 m = decode16(x->at[0] + e, max[0], true), v = decode16(x->at[1] + e, max[1], false);
        __m512 p = adam_math(k, load_grad(s, e, 0xffff, layout), load_param(s, e, 0xffff, layout), &m, &v, l2);
        store_param(s, out, e, 0xffff, layout, p);
        _mm512_store_ps(made[0] + j, m);
        _mm512_store_ps(made[1] + j, v);
        top[0] = _mm512_max_epi32(top[0], _mm512_and_si512(_mm512_castps_si512(m), magnitude));
        top[1] = _mm512_max_epi32(top[1], _mm512_and_si512(_mm512_castps_si512(v), magnitude));
    }
    most[0][group] = top[0];
    most[1][group] = top[1];
}

ADAM_INLINE void step_8bit(const struct adam_span *span, const struct adam_coef *c,
                           const struct adam_part *part, enum adam_layout layout, bool l2)
{
    _Alignas(64) float made[2][STEP_PART], inv[2][4];
    __m512i most[2][4];
    struct coef512 k;
    coef_load(&k, c);
    const struct adam_span s = *span;
    const struct adam_part x = *part;
    void *out = s.param_out ? s.param_out : s.param;
    uint64_t ahead = adam_ahead(&s);
    memset(most, 0, sizeof most);
    for (uint64_t from = 0, n; from < s.n; from += n) {
        n = s.n - from < STEP_PART ? s.n - from : STEP_PART;
        for (uint64_t i = 0; i < n; i += 64) {
            fetch_others(&s, from + i + ahead, layout);
            fetch_others(&s, from + i + 32 + ahead, layout);
            adam_fetch_lines(x.at[0], from + i + ahead, 1);
            adam_fetch_lines(x.at[1], from + i + ahead, 1);
            step_group(&s, out, &k, &x, from + i, layout, l2, (float *[2]){ made[0] + i, made[1] + i },
                       most, i / 64);
        }
        find_absmax(most, n / 64, (float *const[2]){ x.absmax[0] + from / 64, x.absmax[1] + from / 64 }, inv);
        for (uint64_t i = 0; i < 2 * n; i += 64) { /* first one moment, then the other */
            uint64_t w = i >= n, at = i - w * n;
            __m512 y[4], by = _mm512_set1_ps(inv[w][at / 64]);
            for (uint64_t j = 0; j < 4; j++) y[j] = _mm512_load_ps(made[w] + at + 16 * j);
            if (w) store_codes(y, by, false, x.at[1] + from + at);
            else store_codes(y, by, true, x.at[0] + from + at);
        }
    }
}

ADAM_DEFINE_STEP(step_bf16_split, step_bf16, ADAM_BF16_SPLIT)
ADAM_DEFINE_STEP(step_bf16_fp16, step_bf16, ADAM_FP16)
ADAM_DEFINE_STEP(step_8bit_split, step_8bit, ADAM_BF16_SPLIT)
ADAM_DEFINE_STEP(step_8bit_fp16, step_8bit, ADAM_FP16)

const struct adam_narrow_fns adam_narrow__avx512 = {
    .widen_bf16 = widen_bf16,
    .round_bf16 = round_bf16,
    .decode = decode,
    .encode = encode,
    .step_bf16 = { [ADAM_BF16_SPLIT] = step_bf16_split, [ADAM_FP16] = step_bf16_fp16 },
    .step_8bit = { [ADAM_BF16_SPLIT] = step_8bit_split, [ADAM_FP16] = step_8bit_fp16 },
};
