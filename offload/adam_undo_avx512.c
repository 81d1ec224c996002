/* offload/adam_undo_avx512.c - the Adam step that records how to take itself back, with AVX-512;
 * the last elements under a mask.
 *
 * Same operations as adam_undo_ref.c, which explains them. Compiled with flags of its own
 * (meson.build): called only after the dispatch in adam.c has asked the processor. Recording
 * costs no division and no square root more than the plain step, and hides behind theirs. Any
 * thread, under cpu_ftz_enter. */
#include "offload/adam_avx512.h"
#include "offload/adam_undo_impl.h"

struct inverse512 {
    __m512 beta1, beta2, decay;
};

ADAM_INLINE void inverse_load(struct inverse512 *k, const struct adam_inverse *inv)
{
    k->beta1 = _mm512_set1_ps(inv->beta1);
    k->beta2 = _mm512_set1_ps(inv->beta2);
    k->decay = _mm512_set1_ps(inv->decay);
}

ADAM_INLINE __m512i distance(__m512 old, __m512 inverse)
{
    return _mm512_sub_epi32(_mm512_castps_si512(old), _mm512_castps_si512(inverse));
}

ADAM_INLINE __m512 moved(__m512 inverse, __m512i by)
{
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(inverse), by));
}

struct state512 {
    __m512 p, m, v;
};

/* m / d of the new moments: the step's direction, the same going back. */
ADAM_INLINE __m512 direction(__m512 m, __m512 v, const struct coef512 *k)
{
    return _mm512_div_ps(m, _mm512_fmadd_ps(_mm512_sqrt_ps(v), k->inv_sqrt_bc2, k->eps));
}

ADAM_INLINE __m512 invert_param(__m512 p, __m512 q, const struct coef512 *k,
                                const struct inverse512 *inv, bool l2)
{
    p = _mm512_fmadd_ps(k->step_size, q, p);
    return l2 ? p : _mm512_fmadd_ps(inv->decay, p, p);
}

ADAM_INLINE __m512 invert_exp_avg(__m512 m, __m512 gm, const struct inverse512 *inv)
{
    __m512 x = _mm512_sub_ps(m, gm);
    return _mm512_fmadd_ps(inv->beta1, x, x);
}

ADAM_INLINE __m512 invert_exp_avg_sq(__m512 v, __m512 gv, const struct inverse512 *inv)
{
    __m512 x = _mm512_sub_ps(v, gv);
    return _mm512_fmadd_ps(inv->beta2, x, x);
}

/* Codes of the elements that do not fit are 0, and `bad` has their bits. */
ADAM_INLINE __m128i encode(const struct state512 *old, const struct state512 *back, __mmask16 *bad)
{
    __m512i dm = _mm512_add_epi32(distance(old->m, back->m), _mm512_set1_epi32(ADAM_EXP_AVG_BIAS)),
            dv = _mm512_add_epi32(distance(old->v, back->v),
                                  _mm512_set1_epi32(ADAM_EXP_AVG_SQ_BIAS)),
            dp = _mm512_add_epi32(distance(old->p, back->p), _mm512_set1_epi32(ADAM_PARAM_BIAS));
    /* (dv | dp) & ~3, then | (dm & ~15): the fields of v and p are of one width */
    __m512i high = _mm512_ternarylogic_epi32(
        dv, dp, _mm512_set1_epi32((1 << ADAM_PARAM_BITS) - 1), 0x54);
    high = _mm512_ternarylogic_epi32(high, dm, _mm512_set1_epi32((1 << ADAM_EXP_AVG_BITS) - 1),
                                     0xf4);
    __mmask16 numbers = _mm512_cmp_ps_mask(back->m, back->v, _CMP_ORD_Q);
    numbers = _mm512_mask_cmp_ps_mask(numbers, back->p, back->p, _CMP_ORD_Q);
    __mmask16 fits = _mm512_mask_testn_epi32_mask(numbers, high, high);
    *bad = (__mmask16)~fits;
    __m512i code = _mm512_ternarylogic_epi32(dm, _mm512_slli_epi32(dv, ADAM_EXP_AVG_SQ_SHIFT),
                                             _mm512_slli_epi32(dp, ADAM_PARAM_SHIFT), 0xfe);
    return _mm512_maskz_cvtepi32_epi8(fits, code);
}

/* 16 elements at i, number j... of the group. */
ADAM_INLINE void record_block(const struct adam_span *s, const struct coef512 *k,
                              const struct inverse512 *inv, struct adam_group *group, uint64_t i,
                              uint64_t j, __mmask16 mask, enum adam_layout layout, bool l2)
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
    struct state512 back = { invert_param(new.p, q, k, inv, l2), invert_exp_avg(new.m, gm, inv),
                             invert_exp_avg_sq(new.v, gv, inv) };
    __mmask16 bad;
    _mm_store_si128((__m128i *)(group->code + j), encode(&old, &back, &bad));
    uint16_t bits = (uint16_t)(bad & mask);
    memcpy(group->bad + j / 8, &bits, 2);
    _mm512_store_ps(group->p + j, old.p);
    _mm512_store_ps(group->m + j, old.m);
    _mm512_store_ps(group->v + j, old.v);
    store_f32(s->exp_avg, i, mask, new.m);
    store_f32(s->exp_avg_sq, i, mask, new.v);
    store_param(s, s->param, i, mask, layout, new.p);
}

/* Past the caches where whole lines can be written: nobody reads the record soon, and most likely
 * nobody ever does. */
ADAM_INLINE void codes_out(uint8_t *to, const struct adam_group *group, uint64_t n)
{
    if (n % 64 || (uintptr_t)to % 64) {
        memcpy(to, group->code, n);
        return;
    }
    for (uint64_t j = 0; j < n; j += 64)
        _mm512_stream_si512((__m512i *)(to + j), _mm512_load_si512(group->code + j));
}

ADAM_INLINE __mmask16 mask_of_first(uint64_t n)
{
    return n < LANES ? (__mmask16)((1u << n) - 1u) : 0xffff;
}

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
    struct adam_group group;
    uint64_t i = 0, ahead = adam_ahead(&s);
    while (i < s.n) {
        uint64_t n = s.n - i < ADAM_GROUP ? s.n - i : ADAM_GROUP, j = 0;
        if (n < ADAM_GROUP) memset(group.bad, 0, sizeof group.bad);
        for (; j + ADAM_STRIDE <= n; j += ADAM_STRIDE) {
            adam_fetch_at(&s, i + j + ahead, layout);
            record_block(&s, &k, &inv, &group, i + j, j, 0xffff, layout, l2);
            record_block(&s, &k, &inv, &group, i + j + LANES, j + LANES, 0xffff, layout, l2);
        }
        for (; j < n; j += LANES)
            record_block(&s, &k, &inv, &group, i + j, j, mask_of_first(n - j), layout, l2);
        if (!adam_group_list(&group, &s, i, n, &r, layout)) break;
        codes_out(r.code + i, &group, n);
        i += n;
    }
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
    uint64_t i = 0, ahead = adam_ahead(&s);
    for (; i + ADAM_STRIDE <= s.n; i += ADAM_STRIDE) {
        adam_fetch_at(&s, i + ahead, layout);
        for (uint64_t j = 0; j < ADAM_STRIDE; j += LANES)
            undo_block(&s, &k, &inv, code, i + j, 0xffff, layout, l2);
    }
    for (; i < s.n; i += LANES)
        undo_block(&s, &k, &inv, code, i, mask_of_first(s.n - i), layout, l2);
}

ADAM_INLINE void param_block(const struct adam_span *s, const struct coef512 *k, uint64_t i,
                             __mmask16 mask, bool stream, enum adam_layout layout, bool l2)
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
    if (stream)
        _mm256_stream_si256((__m256i *)((char *)s->param_out + i * 2), out);
    else
        store_u16(s->param_out, i, mask, out);
}

ADAM_INLINE void param_avx512(const struct adam_span *span, const struct adam_coef *c,
                              enum adam_layout layout, bool l2)
{
    struct coef512 k;
    coef_load(&k, c);
    struct adam_span s = *span;
    uint64_t i = 0, ahead = adam_ahead(&s);
    bool stream = (uintptr_t)s.param_out % 64 == 0; /* whole lines past the caches */
    for (; i + ADAM_STRIDE <= s.n; i += ADAM_STRIDE) {
        adam_fetch_at(&s, i + ahead, layout);
        for (uint64_t j = 0; j < ADAM_STRIDE; j += LANES)
            param_block(&s, &k, i + j, 0xffff, stream, layout, l2);
    }
    for (; i < s.n; i += LANES)
        param_block(&s, &k, i, mask_of_first(s.n - i), false, layout, l2);
}

ADAM_DEFINE_UNDO(avx512, record_avx512, undo_avx512, param_avx512)
