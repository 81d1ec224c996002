/* offload/adam_undo_avx2.c - the Adam step that records how to take itself back, with AVX2, FMA
 * and F16C; the last elements through a padded temporary.
 *
 * Same operations as adam_undo_ref.c, which explains them. Compiled with flags of its own
 * (meson.build): called only after the dispatch in adam.c has asked the processor. Any thread,
 * under cpu_ftz_enter. */
#include "offload/adam_avx2.h"
#include "offload/adam_undo_impl.h"

struct inverse256 {
    __m256 beta1, beta2, decay;
};

ADAM_INLINE void inverse_load(struct inverse256 *k, const struct adam_inverse *inv)
{
    k->beta1 = _mm256_set1_ps(inv->beta1);
    k->beta2 = _mm256_set1_ps(inv->beta2);
    k->decay = _mm256_set1_ps(inv->decay);
}

ADAM_INLINE __m256i distance(__m256 old, __m256 inverse)
{
    return _mm256_sub_epi32(_mm256_castps_si256(old), _mm256_castps_si256(inverse));
}

ADAM_INLINE __m256 moved(__m256 inverse, __m256i by)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(inverse), by));
}

struct state256 {
    __m256 p, m, v;
};

/* m / d of the new moments: the step's direction, the same going back. */
ADAM_INLINE __m256 direction(__m256 m, __m256 v, const struct coef256 *k)
{
    return _mm256_div_ps(m, _mm256_fmadd_ps(_mm256_sqrt_ps(v), k->inv_sqrt_bc2, k->eps));
}

ADAM_INLINE __m256 invert_param(__m256 p, __m256 q, const struct coef256 *k,
                                const struct inverse256 *inv, bool l2)
{
    p = _mm256_fmadd_ps(k->step_size, q, p);
    return l2 ? p : _mm256_fmadd_ps(inv->decay, p, p);
}

ADAM_INLINE __m256 invert_exp_avg(__m256 m, __m256 gm, const struct inverse256 *inv)
{
    __m256 x = _mm256_sub_ps(m, gm);
    return _mm256_fmadd_ps(inv->beta1, x, x);
}

ADAM_INLINE __m256 invert_exp_avg_sq(__m256 v, __m256 gv, const struct inverse256 *inv)
{
    __m256 x = _mm256_sub_ps(v, gv);
    return _mm256_fmadd_ps(inv->beta2, x, x);
}

/* The low bytes of 8 words. */
ADAM_INLINE uint64_t narrow(__m256i x)
{
    __m128i w = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    return (uint64_t)_mm_cvtsi128_si64(_mm_packus_epi16(w, w));
}

/* Codes of the elements that do not fit are 0, and `bad` has their bits. */
ADAM_INLINE uint64_t encode(const struct state256 *old, const struct state256 *back, uint32_t *bad)
{
    __m256i dm = _mm256_add_epi32(distance(old->m, back->m), _mm256_set1_epi32(ADAM_EXP_AVG_BIAS)),
            dv = _mm256_add_epi32(distance(old->v, back->v),
                                  _mm256_set1_epi32(ADAM_EXP_AVG_SQ_BIAS)),
            dp = _mm256_add_epi32(distance(old->p, back->p), _mm256_set1_epi32(ADAM_PARAM_BIAS));
    __m256i high = _mm256_or_si256(
        _mm256_srli_epi32(dm, ADAM_EXP_AVG_BITS), /* the fields of v and p are of one width */
        _mm256_srli_epi32(_mm256_or_si256(dv, dp), ADAM_PARAM_BITS));
    __m256 numbers = _mm256_and_ps(_mm256_cmp_ps(back->m, back->v, _CMP_ORD_Q),
                                   _mm256_cmp_ps(back->p, back->p, _CMP_ORD_Q));
    __m256i fits = _mm256_and_si256(_mm256_cmpeq_epi32(high, _mm256_setzero_si256()),
                                    _mm256_castps_si256(numbers));
    *bad = 0xffu & ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(fits));
    __m256i code = _mm256_or_si256(dm, _mm256_slli_epi32(dv, ADAM_EXP_AVG_SQ_SHIFT));
    code = _mm256_or_si256(code, _mm256_slli_epi32(dp, ADAM_PARAM_SHIFT));
    return narrow(_mm256_and_si256(code, fits));
}

/* 8 elements at i, number j... of the group. */
ADAM_INLINE void record_block(const struct adam_span *s, const struct coef256 *k,
                              const struct inverse256 *inv, struct adam_group *group, uint64_t i,
                              uint64_t j, enum adam_layout layout, bool l2)
{
    __m256 g = _mm256_mul_ps(load_grad(s, i, layout), k->grad_scale);
    struct state256 old = { load_param(s, i, layout), load_f32(s->exp_avg, i),
                            load_f32(s->exp_avg_sq, i) };
    struct state256 new = old;
    if (l2)
        g = _mm256_fmadd_ps(k->l2, new.p, g);
    else
        new.p = _mm256_fmadd_ps(k->decay, new.p, new.p);
    __m256 gm = _mm256_mul_ps(k->one_minus_beta1, g),
           gv = _mm256_mul_ps(_mm256_mul_ps(k->one_minus_beta2, g), g);
    new.m = _mm256_fmadd_ps(k->beta1, new.m, gm);
    new.v = _mm256_fmadd_ps(k->beta2, new.v, gv);
    __m256 q = direction(new.m, new.v, k);
    new.p = _mm256_fnmadd_ps(k->step_size, q, new.p);
    struct state256 back = { invert_param(new.p, q, k, inv, l2), invert_exp_avg(new.m, gm, inv),
                             invert_exp_avg_sq(new.v, gv, inv) };
    uint32_t bad;
    uint64_t codes = encode(&old, &back, &bad);
    memcpy(group->code + j, &codes, LANES);
    group->bad[j / LANES] = (uint8_t)bad;
    store_f32(group->p, j, old.p);
    store_f32(group->m, j, old.m);
    store_f32(group->v, j, old.v);
    store_f32(s->exp_avg, i, new.m);
    store_f32(s->exp_avg_sq, i, new.v);
    store_param(s, s->param, i, layout, new.p);
}

/* Past the caches where whole lines can be written: nobody reads the record soon, and most likely
 * nobody ever does. */
ADAM_INLINE void codes_out(uint8_t *to, const struct adam_group *group, uint64_t n)
{
    if (n % 64 || (uintptr_t)to % 64) {
        memcpy(to, group->code, n);
        return;
    }
    for (uint64_t j = 0; j < n; j += 32)
        _mm256_stream_si256((__m256i *)(to + j),
                            _mm256_load_si256((const __m256i *)(group->code + j)));
}

ADAM_INLINE void undo_block(const struct adam_span *s, const struct coef256 *k,
                            const struct inverse256 *inv, const uint8_t *code, uint64_t i,
                            enum adam_layout layout, bool l2)
{
    __m256 g = _mm256_mul_ps(load_grad(s, i, layout), k->grad_scale);
    struct state256 new = { load_param(s, i, layout), load_f32(s->exp_avg, i),
                            load_f32(s->exp_avg_sq, i) };
    __m256i by = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)code));
    __m256i dm = _mm256_sub_epi32(
                _mm256_and_si256(by, _mm256_set1_epi32((1 << ADAM_EXP_AVG_BITS) - 1)),
                _mm256_set1_epi32(ADAM_EXP_AVG_BIAS)),
            dv = _mm256_sub_epi32(
                _mm256_and_si256(_mm256_srli_epi32(by, ADAM_EXP_AVG_SQ_SHIFT),
                                 _mm256_set1_epi32((1 << ADAM_EXP_AVG_SQ_BITS) - 1)),
                _mm256_set1_epi32(ADAM_EXP_AVG_SQ_BIAS)),
            dp = _mm256_sub_epi32(_mm256_srli_epi32(by, ADAM_PARAM_SHIFT),
                                  _mm256_set1_epi32(ADAM_PARAM_BIAS));
    __m256 q = direction(new.m, new.v, k);
    __m256 p = moved(invert_param(new.p, q, k, inv, l2), dp);
    if (l2) g = _mm256_fmadd_ps(k->l2, p, g);
    __m256 gm = _mm256_mul_ps(k->one_minus_beta1, g),
           gv = _mm256_mul_ps(_mm256_mul_ps(k->one_minus_beta2, g), g);
    store_f32(s->exp_avg, i, moved(invert_exp_avg(new.m, gm, inv), dm));
    store_f32(s->exp_avg_sq, i, moved(invert_exp_avg_sq(new.v, gv, inv), dv));
    store_param(s, s->param, i, layout, p);
}

ADAM_INLINE void param_block(const struct adam_span *s, void *out, const struct coef256 *k,
                             uint64_t i, enum adam_layout layout, bool l2)
{
    __m256 g = _mm256_mul_ps(load_grad(s, i, layout), k->grad_scale);
    __m256 p = load_param(s, i, layout);
    if (l2)
        g = _mm256_fmadd_ps(k->l2, p, g);
    else
        p = _mm256_fmadd_ps(k->decay, p, p);
    __m256 m = load_f32(s->exp_avg, i), v = load_f32(s->exp_avg_sq, i);
    m = _mm256_fmadd_ps(k->beta1, m, _mm256_mul_ps(k->one_minus_beta1, g));
    v = _mm256_fmadd_ps(k->beta2, v, _mm256_mul_ps(_mm256_mul_ps(k->one_minus_beta2, g), g));
    p = _mm256_fnmadd_ps(k->step_size, direction(m, v, k), p);
    if (layout == ADAM_FP16) {
        store_u16(out, i, _mm256_cvtps_ph(p, _MM_FROUND_TO_NEAREST_INT));
    } else {
        __m256i u = _mm256_add_epi32(_mm256_castps_si256(p), _mm256_set1_epi32(0x8000));
        u = _mm256_srli_epi32(u, 16);
        store_u16(out, i,
                  _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1)));
    }
}

/* The last n < 8 elements, copied into padded arrays and back. */
struct tail {
    uint16_t param[LANES], grad[LANES];
    uint32_t other[LANES]; /* low or master */
    float exp_avg[LANES], exp_avg_sq[LANES];
    uint8_t code[LANES];
    uint64_t n, other_bytes;
    struct adam_span span; /* of these arrays */
};

ADAM_INLINE void tail_open(struct tail *t, const struct adam_span *s, uint64_t i,
                           enum adam_layout layout)
{
    memset(t, 0, sizeof *t);
    t->n = s->n - i;
    t->other_bytes = layout == ADAM_FP16 ? 4 : 2;
    memcpy(t->param, (const char *)s->param + i * 2, t->n * 2);
    memcpy(t->grad, (const char *)s->grad + i * 2, t->n * 2);
    memcpy(t->other, (const char *)s->low_or_master + i * t->other_bytes, t->n * t->other_bytes);
    memcpy(t->exp_avg, s->exp_avg + i, t->n * 4);
    memcpy(t->exp_avg_sq, s->exp_avg_sq + i, t->n * 4);
    t->span = (struct adam_span){ .n = LANES,
                                  .param = t->param,
                                  .low_or_master = t->other,
                                  .exp_avg = t->exp_avg,
                                  .exp_avg_sq = t->exp_avg_sq,
                                  .grad = t->grad };
}

ADAM_INLINE void tail_close(const struct tail *t, const struct adam_span *s, uint64_t i)
{
    memcpy((char *)s->param + i * 2, t->param, t->n * 2);
    memcpy((char *)s->low_or_master + i * t->other_bytes, t->other, t->n * t->other_bytes);
    memcpy(s->exp_avg + i, t->exp_avg, t->n * 4);
    memcpy(s->exp_avg_sq + i, t->exp_avg_sq, t->n * 4);
}

ADAM_INLINE uint64_t record_avx2(const struct adam_span *span, const struct adam_coef *c,
                                 const struct adam_inverse *inverse, struct adam_record *record,
                                 enum adam_layout layout, bool l2)
{
    struct coef256 k;
    struct inverse256 inv;
    coef_load(&k, c);
    inverse_load(&inv, inverse);
    struct adam_span s = *span; /* copies that no store can alias: their fields stay in registers */
    struct adam_record r = *record;
    struct adam_group group;
    uint64_t i = 0, ahead = adam_ahead(&s);
    while (i < s.n) {
        uint64_t n = s.n - i < ADAM_GROUP ? s.n - i : ADAM_GROUP, j = 0;
        if (n < ADAM_GROUP) memset(group.bad, 0, sizeof group.bad);
        for (; j + LANES <= n; j += LANES) {
            if (j % ADAM_STRIDE == 0) adam_fetch_at(&s, i + j + ahead, layout);
            record_block(&s, &k, &inv, &group, i + j, j, layout, l2);
        }
        if (j < n) {
            struct tail t;
            tail_open(&t, &s, i + j, layout);
            record_block(&t.span, &k, &inv, &group, 0, j, layout, l2);
            group.bad[j / LANES] &= (uint8_t)((1u << t.n) - 1u);
            tail_close(&t, &s, i + j);
        }
        if (!adam_group_list(&group, &s, i, n, &r, layout)) break;
        codes_out(r.code + i, &group, n);
        i += n;
    }
    record->side_n = r.side_n;
    return i;
}

ADAM_INLINE void undo_avx2(const struct adam_span *span, const struct adam_coef *c,
                           const struct adam_inverse *inverse, const uint8_t *code,
                           enum adam_layout layout, bool l2)
{
    struct coef256 k;
    struct inverse256 inv;
    coef_load(&k, c);
    inverse_load(&inv, inverse);
    struct adam_span s = *span;
    uint64_t i = 0, ahead = adam_ahead(&s);
    for (; i + LANES <= s.n; i += LANES) {
        if (i % ADAM_STRIDE == 0) adam_fetch_at(&s, i + ahead, layout);
        undo_block(&s, &k, &inv, code + i, i, layout, l2);
    }
    if (i < s.n) {
        struct tail t;
        tail_open(&t, &s, i, layout);
        memcpy(t.code, code + i, t.n);
        undo_block(&t.span, &k, &inv, t.code, 0, layout, l2);
        tail_close(&t, &s, i);
    }
}

ADAM_INLINE void param_avx2(const struct adam_span *span, const struct adam_coef *c,
                            enum adam_layout layout, bool l2)
{
    struct coef256 k;
    coef_load(&k, c);
    struct adam_span s = *span;
    uint64_t i = 0, ahead = adam_ahead(&s);
    for (; i + LANES <= s.n; i += LANES) {
        if (i % ADAM_STRIDE == 0) adam_fetch_at(&s, i + ahead, layout);
        param_block(&s, s.param_out, &k, i, layout, l2);
    }
    if (i < s.n) {
        struct tail t;
        tail_open(&t, &s, i, layout);
        param_block(&t.span, t.param, &k, 0, layout, l2);
        memcpy((char *)s.param_out + i * 2, t.param, t.n * 2);
    }
}

ADAM_DEFINE_UNDO(avx2, record_avx2, undo_avx2, param_avx2)
