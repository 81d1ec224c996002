/* offload/adam_ref.c - Adam, one element at a time: the definition the SIMD variants must equal bit
 * for bit.
 *
 * Reads like the formulas of adam.h. Compiled for the base instruction set, so it runs on every
 * x86-64 and is what tests, old machines and a new variant's author compare with. Any thread, under
 * cpu_ftz_enter. */
#include "offload/adam_ref.h"

ADAM_INLINE void adam_span_scalar(const struct adam_span *s, const struct adam_coef *c,
                                  enum adam_layout layout, bool l2, bool stream)
{
    (void)stream; /* one element at a time is no matter of stores */
    for (uint64_t i = 0; i < s->n; i++) {
        float g = load_grad(s, i, layout) * c->grad_scale;
        float p = load_param(s, i, layout);
        if (l2)
            g = adam_fma(c->l2, p, g);
        else
            p = adam_fma(c->decay, p, p);
        float m = adam_fma(c->beta1, s->exp_avg[i], c->one_minus_beta1 * g);
        float v = adam_fma(c->beta2, s->exp_avg_sq[i], (c->one_minus_beta2 * g) * g);
        float d = adam_fma(sqrtf(v), c->inv_sqrt_bc2, c->eps);
        p = adam_fma(-c->step_size, m / d, p);
        s->exp_avg[i] = m;
        s->exp_avg_sq[i] = v;
        store_param(s, i, layout, p);
    }
}

ADAM_DEFINE(scalar, adam_span_scalar)
