/* offload/adam_undo_avx512.c - the Adam step that records how to take itself back, with AVX-512; the
 * last elements under a mask.
 *
 * Same operations as adam_undo_ref.c, which explains them. Compiled with flags of its own
 * (meson.build): called only after the dispatch in adam.c has asked the processor. Recording costs
 * no division and no square root more than the plain step, and hides behind theirs. Any thread, under
 * cpu_ftz_enter. */
#include "offload/adam_avx512.h"

#include <math.h>

struct inverse512 {
    __m512 beta1, beta2, decay;
};

ADAM_INLINE void inverse_load(struct inverse512 *k, const struct adam_inverse *inv)
{
    k->beta1 = _mm512_set1_ps(inv->beta1);
    k->beta2 = _mm512_set1_ps(inv->beta2);
    k->decay = _mm512_set1_ps(inv->decay);
}

/* A NaN becomes -infinity: the second operand's place. */
ADAM_INLINE __m512i bits_of(__m512 x)
{
    return _mm512_castps_si512(_mm512_max_ps(x, _mm512_set1_ps(-INFINITY)));
}

ADAM_INLINE __m512i order_of(__m512i bits)
{
    return _mm512_ternarylogic_epi32(bits, _mm512_srai_epi32(bits, 31),
                                     _mm512_set1_epi32(0x7fffffff), 0x78); /* a ^ (b & c) */
}

ADAM_INLINE __m512i distance(__m512 old, __m512i inverse)
{
    return _mm512_sub_epi32(order_of(_mm512_castps_si512(old)), order_of(inverse));
}

ADAM_INLINE __m512 moved(__m512i inverse, __m512i by)
{
    return _mm512_castsi512_ps(order_of(_mm512_add_epi32(order_of(inverse), by)));
}

struct state512 {
    __m512 p, m, v;
};

/* m / d of the new moments: the step's direction, the same going back. */
ADAM_INLINE __m512 direction(__m512 m, __m512 v, const struct coef512 *k)
{
    return _mm512_div_ps(m, _mm512_fmadd_ps(_mm512_sqrt_ps(v), k->inv_sqrt_bc2, k->eps));
}

ADAM_INLINE __m512i invert_param(__m512 p, __m512 q, const struct coef512 *k,
                                 const struct inverse512 *inv, bool l2)
{
    p = _mm512_fmadd_ps(k->step_size, q, p);
    return bits_of(l2 ? p : _mm512_fmadd_ps(inv->decay, p, p));
}

ADAM_INLINE __m512i invert_exp_avg(__m512 m, __m512 gm, const struct inverse512 *inv)
{
    __m512 x = _mm512_sub_ps(m, gm);
    return bits_of(_mm512_fmadd_ps(inv->beta1, x, x));
}

ADAM_INLINE __m512i invert_exp_avg_sq(__m512 v, __m512 gv, const struct inverse512 *inv)
{
    __m512 x = _mm512_sub_ps(v, gv);
    return bits_of(_mm512_fmadd_ps(inv->beta2, x, x));
}

/* Up to 16 entries: each column closed up, then columns turned into rows of four words. False: no
 * room. */
ADAM_INLINE bool side_append(struct adam_record *r, __mmask16 bad, uint64_t i,
                             const struct state512 *old, enum adam_layout layout)
{
    uint32_t n = (uint32_t)__builtin_popcount(bad);
    if (n > r->side_cap - r->side_n) return false;
    __m512i elem = _mm512_add_epi32(
        _mm512_set1_epi32((int)(uint32_t)i),
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    __m512i p = _mm512_castps_si512(old->p);
    if (layout == ADAM_BF16_SPLIT) { /* param in the lower half, low in the upper one */
        __m512i high = _mm512_srli_epi32(_mm512_add_epi32(p, _mm512_set1_epi32(0x8000)), 16);
        p = _mm512_or_si512(high, _mm512_slli_epi32(p, 16));
    }
    elem = _mm512_maskz_compress_epi32(bad, elem);
    p = _mm512_maskz_compress_epi32(bad, p);
    __m512i m = _mm512_maskz_compress_epi32(bad, _mm512_castps_si512(old->m)),
            v = _mm512_maskz_compress_epi32(bad, _mm512_castps_si512(old->v));
    __m512i a = _mm512_unpacklo_epi32(elem, p), b = _mm512_unpacklo_epi32(m, v),
            c = _mm512_unpackhi_epi32(elem, p), d = _mm512_unpackhi_epi32(m, v);
    /* row[j]: entries j, 4 + j, 8 + j, 12 + j */
    __m512i row[4] = { _mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b),
                       _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d) };
    __m512i even01 = _mm512_shuffle_i32x4(row[0], row[1], 0x88),
            even23 = _mm512_shuffle_i32x4(row[2], row[3], 0x88),
            odd01 = _mm512_shuffle_i32x4(row[0], row[1], 0xdd),
            odd23 = _mm512_shuffle_i32x4(row[2], row[3], 0xdd);
    __m512i four[4] = { _mm512_shuffle_i32x4(even01, even23, 0x88),
                        _mm512_shuffle_i32x4(odd01, odd23, 0x88),
                        _mm512_shuffle_i32x4(even01, even23, 0xdd),
                        _mm512_shuffle_i32x4(odd01, odd23, 0xdd) };
    struct adam_side *to = r->side + r->side_n;
    for (uint32_t j = 0; j < 4; j++) {
        if (n <= 4 * j) break;
        uint32_t words = n - 4 * j >= 4 ? 16 : 4 * (n - 4 * j);
        _mm512_mask_storeu_epi32(to + 4 * j, (__mmask16)((1u << words) - 1u), four[j]);
    }
    r->side_n += n;
    return true;
}

/* Codes of the elements that do not fit are 0, and `bad` has their bits. */
ADAM_INLINE __m128i encode(__m512i dm, __m512i dv, __m512i dp, __mmask16 *bad)
{
    dm = _mm512_add_epi32(dm, _mm512_set1_epi32(ADAM_EXP_AVG_BIAS));
    dv = _mm512_add_epi32(dv, _mm512_set1_epi32(ADAM_EXP_AVG_SQ_BIAS));
    dp = _mm512_add_epi32(dp, _mm512_set1_epi32(ADAM_PARAM_BIAS));
    /* (dv | dp) & ~3, then | (dm & ~15): the fields of v and p are of one width */
    __m512i high = _mm512_ternarylogic_epi32(
        dv, dp, _mm512_set1_epi32((1 << ADAM_PARAM_BITS) - 1), 0x54);
    high = _mm512_ternarylogic_epi32(high, dm, _mm512_set1_epi32((1 << ADAM_EXP_AVG_BITS) - 1),
                                     0xf4);
    *bad = _mm512_test_epi32_mask(high, high);
    __m512i code = _mm512_ternarylogic_epi32(dm, _mm512_slli_epi32(dv, ADAM_EXP_AVG_SQ_SHIFT),
                                             _mm512_slli_epi32(dp, ADAM_PARAM_SHIFT), 0xfe);
    return _mm512_maskz_cvtepi32_epi8((__mmask16)~*bad, code);
}

ADAM_INLINE bool record_block(const struct adam_span *s, const struct coef512 *k,
                              const struct inverse512 *inv, struct adam_record *r, uint64_t i,
                              __mmask16 mask, enum adam_layout layout, bool l2)
{
    __m512 g = _mm512_mul_ps(load_grad(s, i, mask, layout), k->grad_scale);
    struct state512 old = { load_param(s, i, mask, layout), load_f32(s->exp_avg, i, mask),
                            load_f32(s->exp_avg_sq, i, mask) };
    struct state512 new = old;
    if (l2)
        g = _mm512_fmadd_ps(k->l2, new.p, g);
    else
        new.p = _mm512_fmadd_ps(k->decay, new.p, new.p);
    __m512 gm = _mm512_mul_ps(k->one_minus_beta1, g),
           gv = _mm512_mul_ps(_mm512_mul_ps(k->one_minus_beta2, g), g);
    new.m = _mm512_fmadd_ps(k->beta1, new.m, gm);
    new.v = _mm512_fmadd_ps(k->beta2, new.v, gv);
    __m512 q = direction(new.m, new.v, k);
    new.p = _mm512_fnmadd_ps(k->step_size, q, new.p);
    __mmask16 bad;
    __m128i code = encode(distance(old.m, invert_exp_avg(new.m, gm, inv)),
                          distance(old.v, invert_exp_avg_sq(new.v, gv, inv)),
                          distance(old.p, invert_param(new.p, q, k, inv, l2)), &bad);
    bad &= mask;
    if (__builtin_expect(bad != 0, 0) && !side_append(r, bad, i, &old, layout)) return false;
    _mm_mask_storeu_epi8(r->code + i, mask, code);
    store_f32(s->exp_avg, i, mask, new.m);
    store_f32(s->exp_avg_sq, i, mask, new.v);
    store_param(s, s->param, i, mask, layout, new.p);
    return true;
}

ADAM_INLINE __mmask16 mask_of_last(uint64_t n) { return (__mmask16)((1u << n) - 1u); }

ADAM_INLINE uint64_t record_avx512(const struct adam_span *span, const struct adam_coef *c,
                                   const struct adam_inverse *inverse, struct adam_record *record,
                                   enum adam_layout layout, bool l2)
{
    struct coef512 k;
    struct inverse512 inv;
    coef_load(&k, c);
    inverse_load(&inv, inverse);
    struct adam_span s = *span; /* copies that no store can alias: their fields stay in registers */
    struct adam_record r = *record;
    uint64_t i = 0;
    bool room = true;
    while (room && i + ADAM_STRIDE <= s.n) {
        adam_fetch(&s, i, layout);
        for (uint64_t end = i + ADAM_STRIDE; room && i < end;)
            if ((room = record_block(&s, &k, &inv, &r, i, 0xffff, layout, l2))) i += LANES;
    }
    while (room && i + LANES <= s.n)
        if ((room = record_block(&s, &k, &inv, &r, i, 0xffff, layout, l2))) i += LANES;
    if (room && i < s.n && record_block(&s, &k, &inv, &r, i, mask_of_last(s.n - i), layout, l2))
        i = s.n;
    record->side_n = r.side_n;
    return i;
}

ADAM_INLINE void undo_block(const struct adam_span *s, const struct coef512 *k,
                            const struct inverse512 *inv, const uint8_t *code, uint64_t i,
                            __mmask16 mask, enum adam_layout layout, bool l2)
{
    __m512 g = _mm512_mul_ps(load_grad(s, i, mask, layout), k->grad_scale);
    struct state512 new = { load_param(s, i, mask, layout), load_f32(s->exp_avg, i, mask),
                            load_f32(s->exp_avg_sq, i, mask) };
    __m512i by = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, code + i));
    __m512i dm = _mm512_sub_epi32(
                _mm512_and_si512(by, _mm512_set1_epi32((1 << ADAM_EXP_AVG_BITS) - 1)),
                _mm512_set1_epi32(ADAM_EXP_AVG_BIAS)),
            dv = _mm512_sub_epi32(
                _mm512_and_si512(_mm512_srli_epi32(by, ADAM_EXP_AVG_SQ_SHIFT),
                                 _mm512_set1_epi32((1 << ADAM_EXP_AVG_SQ_BITS) - 1)),
                _mm512_set1_epi32(ADAM_EXP_AVG_SQ_BIAS)),
            dp = _mm512_sub_epi32(_mm512_srli_epi32(by, ADAM_PARAM_SHIFT),
                                  _mm512_set1_epi32(ADAM_PARAM_BIAS));
    __m512 q = direction(new.m, new.v, k);
    __m512 p = moved(invert_param(new.p, q, k, inv, l2), dp);
    if (l2) g = _mm512_fmadd_ps(k->l2, p, g);
    __m512 gm = _mm512_mul_ps(k->one_minus_beta1, g),
           gv = _mm512_mul_ps(_mm512_mul_ps(k->one_minus_beta2, g), g);
    store_f32(s->exp_avg, i, mask, moved(invert_exp_avg(new.m, gm, inv), dm));
    store_f32(s->exp_avg_sq, i, mask, moved(invert_exp_avg_sq(new.v, gv, inv), dv));
    store_param(s, s->param, i, mask, layout, p);
}

ADAM_INLINE void undo_avx512(const struct adam_span *span, const struct adam_coef *c,
                             const struct adam_inverse *inverse, const uint8_t *code,
                             enum adam_layout layout, bool l2)
{
    struct coef512 k;
    struct inverse512 inv;
    coef_load(&k, c);
    inverse_load(&inv, inverse);
    struct adam_span s = *span;
    uint64_t i = 0;
    for (; i + ADAM_STRIDE <= s.n; i += ADAM_STRIDE) {
        adam_fetch(&s, i, layout);
        for (uint64_t j = 0; j < ADAM_STRIDE; j += LANES)
            undo_block(&s, &k, &inv, code, i + j, 0xffff, layout, l2);
    }
    for (; i + LANES <= s.n; i += LANES) undo_block(&s, &k, &inv, code, i, 0xffff, layout, l2);
    if (i < s.n) undo_block(&s, &k, &inv, code, i, mask_of_last(s.n - i), layout, l2);
}

ADAM_INLINE void param_block(const struct adam_span *s, const struct coef512 *k, uint64_t i,
                             __mmask16 mask, enum adam_layout layout, bool l2)
{
    __m512 g = _mm512_mul_ps(load_grad(s, i, mask, layout), k->grad_scale);
    __m512 p = load_param(s, i, mask, layout);
    if (l2)
        g = _mm512_fmadd_ps(k->l2, p, g);
    else
        p = _mm512_fmadd_ps(k->decay, p, p);
    __m512 m = load_f32(s->exp_avg, i, mask), v = load_f32(s->exp_avg_sq, i, mask);
    m = _mm512_fmadd_ps(k->beta1, m, _mm512_mul_ps(k->one_minus_beta1, g));
    v = _mm512_fmadd_ps(k->beta2, v, _mm512_mul_ps(_mm512_mul_ps(k->one_minus_beta2, g), g));
    p = _mm512_fnmadd_ps(k->step_size, direction(m, v, k), p);
    __m256i out;
    if (layout == ADAM_FP16)
        out = _mm512_cvtps_ph(p, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    else
        out = _mm512_cvtepi32_epi16(_mm512_srli_epi32(
            _mm512_add_epi32(_mm512_castps_si512(p), _mm512_set1_epi32(0x8000)), 16));
    store_u16(s->param_out, i, mask, out);
}

ADAM_INLINE void param_avx512(const struct adam_span *span, const struct adam_coef *c,
                              enum adam_layout layout, bool l2)
{
    struct coef512 k;
    coef_load(&k, c);
    struct adam_span s = *span;
    uint64_t i = 0;
    for (; i + ADAM_STRIDE <= s.n; i += ADAM_STRIDE) {
        adam_fetch(&s, i, layout);
        for (uint64_t j = 0; j < ADAM_STRIDE; j += LANES)
            param_block(&s, &k, i + j, 0xffff, layout, l2);
    }
    for (; i + LANES <= s.n; i += LANES) param_block(&s, &k, i, 0xffff, layout, l2);
    if (i < s.n) param_block(&s, &k, i, mask_of_last(s.n - i), layout, l2);
}

ADAM_DEFINE_UNDO(avx512, record_avx512, undo_avx512, param_avx512)
