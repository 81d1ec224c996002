/* offload/adam_undo_ref.c - the Adam step that records how to take itself back, one element at a
 * time: the definition the SIMD variants must equal, state and record.
 *
 * Reads like adam_undo.h. The forward step repeats adam_ref.c (the test holds them together).
 * The inverse is one function for recording and taking back: what it gives need not be near the
 * old value for the result to be right, only the same both times. A NaN may not be the same:
 * which of two an instruction passes on depends on the order that the compiler gave them. So its
 * element goes on the list. Any thread, under cpu_ftz_enter. */
#include "offload/adam_ref.h"
#include "offload/adam_undo_impl.h"

ADAM_INLINE uint32_t load_bits(const void *base, uint64_t i)
{
    uint32_t u;
    memcpy(&u, (const char *)base + i * 4, 4);
    return u;
}

struct new_state {
    float p, m, v;
};

/* adam_ref.c's loop body. */
ADAM_INLINE struct new_state step(float p, float m, float v, float g, const struct adam_coef *c,
                                  bool l2)
{
    if (l2)
        g = adam_fma(c->l2, p, g);
    else
        p = adam_fma(c->decay, p, p);
    m = adam_fma(c->beta1, m, c->one_minus_beta1 * g);
    v = adam_fma(c->beta2, v, (c->one_minus_beta2 * g) * g);
    float d = adam_fma(sqrtf(v), c->inv_sqrt_bc2, c->eps);
    p = adam_fma(-c->step_size, m / d, p);
    return (struct new_state){ p, m, v };
}

/* The parameter that the step led away from, roughly. */
ADAM_INLINE float invert_param(struct new_state s, const struct adam_coef *c,
                               const struct adam_inverse *inv, bool l2)
{
    float d = adam_fma(sqrtf(s.v), c->inv_sqrt_bc2, c->eps);
    float p = adam_fma(c->step_size, s.m / d, s.p);
    return l2 ? p : adam_fma(inv->decay, p, p);
}

/* The moments; `g` scaled and with the L2 term, which takes the true old parameter. */
ADAM_INLINE float invert_exp_avg(float m, float g, const struct adam_coef *c,
                                 const struct adam_inverse *inv)
{
    float x = m - c->one_minus_beta1 * g;
    return adam_fma(inv->beta1, x, x);
}

ADAM_INLINE float invert_exp_avg_sq(float v, float g, const struct adam_coef *c,
                                    const struct adam_inverse *inv)
{
    float x = v - (c->one_minus_beta2 * g) * g;
    return adam_fma(inv->beta2, x, x);
}

ADAM_INLINE uint64_t record_scalar(const struct adam_span *s, const struct adam_coef *c,
                                   const struct adam_inverse *inv, struct adam_record *r,
                                   enum adam_layout layout, bool l2)
{
    for (uint64_t i = 0; i < s->n; i++) {
        float g = load_grad(s, i, layout) * c->grad_scale;
        float p = load_param(s, i, layout);
        uint32_t p_bits = stk_f32_bits(p), m_bits = load_bits(s->exp_avg, i),
                 v_bits = load_bits(s->exp_avg_sq, i);
        struct new_state new = step(p, stk_bits_f32(m_bits), stk_bits_f32(v_bits), g, c, l2);
        if (l2) g = adam_fma(c->l2, p, g);
        float p_back = invert_param(new, c, inv, l2), m_back = invert_exp_avg(new.m, g, c, inv),
              v_back = invert_exp_avg_sq(new.v, g, c, inv);
        uint32_t dp = p_bits - stk_f32_bits(p_back) + ADAM_PARAM_BIAS;
        uint32_t dm = m_bits - stk_f32_bits(m_back) + ADAM_EXP_AVG_BIAS;
        uint32_t dv = v_bits - stk_f32_bits(v_back) + ADAM_EXP_AVG_SQ_BIAS;
        bool fits = dm >> ADAM_EXP_AVG_BITS == 0 && dv >> ADAM_EXP_AVG_SQ_BITS == 0 &&
                    dp >> ADAM_PARAM_BITS == 0 && !isnan(p_back) && !isnan(m_back) &&
                    !isnan(v_back);
        if (!fits) {
            if (r->side_n == r->side_cap) return i;
            r->side[r->side_n++] = adam_side_of(layout, (uint32_t)i, p_bits, m_bits, v_bits);
        }
        uint32_t code = dm | dv << ADAM_EXP_AVG_SQ_SHIFT | dp << ADAM_PARAM_SHIFT;
        r->code[i] = fits ? (uint8_t)code : 0;
        s->exp_avg[i] = new.m;
        s->exp_avg_sq[i] = new.v;
        store_param(s, i, layout, new.p);
    }
    return s->n;
}

ADAM_INLINE void undo_scalar(const struct adam_span *s, const struct adam_coef *c,
                             const struct adam_inverse *inv, const uint8_t *code,
                             enum adam_layout layout, bool l2)
{
    for (uint64_t i = 0; i < s->n; i++) {
        float g = load_grad(s, i, layout) * c->grad_scale;
        struct new_state new = { load_param(s, i, layout), s->exp_avg[i], s->exp_avg_sq[i] };
        uint32_t dm = code[i] & ((1u << ADAM_EXP_AVG_BITS) - 1u),
                 dv = code[i] >> ADAM_EXP_AVG_SQ_SHIFT & ((1u << ADAM_EXP_AVG_SQ_BITS) - 1u),
                 dp = (uint32_t)code[i] >> ADAM_PARAM_SHIFT;
        float p = stk_bits_f32(stk_f32_bits(invert_param(new, c, inv, l2)) + dp - ADAM_PARAM_BIAS);
        if (l2) g = adam_fma(c->l2, p, g);
        uint32_t m = stk_f32_bits(invert_exp_avg(new.m, g, c, inv)) + dm - ADAM_EXP_AVG_BIAS;
        uint32_t v = stk_f32_bits(invert_exp_avg_sq(new.v, g, c, inv)) + dv - ADAM_EXP_AVG_SQ_BIAS;
        memcpy(s->exp_avg + i, &m, 4);
        memcpy(s->exp_avg_sq + i, &v, 4);
        store_param(s, i, layout, p);
    }
}

ADAM_INLINE void param_scalar(const struct adam_span *s, const struct adam_coef *c,
                              enum adam_layout layout, bool l2)
{
    for (uint64_t i = 0; i < s->n; i++) {
        struct new_state new = step(load_param(s, i, layout), s->exp_avg[i], s->exp_avg_sq[i],
                                    load_grad(s, i, layout) * c->grad_scale, c, l2);
        uint16_t out;
        int16_t low;
        if (layout == ADAM_FP16)
            out = stk_f32_to_fp16(new.p);
        else
            stk_split(new.p, &out, &low);
        ((uint16_t *)s->param_out)[i] = out;
    }
}

ADAM_DEFINE_UNDO(scalar, record_scalar, undo_scalar, param_scalar)
