/* engine/norm.c - the global gradient norm, clipping, the skip of non-finite steps, the loss scale,
 * and the coefficients of the due update.
 *
 * norm_collect runs on the engine lane (PLAN_NORM: every cast is complete); the rest on the
 * application's thread at step end, when the run is over. */
#include "engine/engine.h"
#include <float.h>
#include <math.h>

/* fp64 sums of squares of the 16-bit values, chunk by chunk in global order: the same for every
 * placement. */
void norm_collect(stk_engine *e)
{
    double sum = 0.0;
    uint64_t bad = 0;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        const struct stk_chunk *c = &e->layout->chunks[i];
        if (c->frozen) continue;
        sum += c->sum.sum_sq;
        bad += c->sum.nonfinite;
    }
    e->norm_sq = sum;
    e->nonfinite = bad;
}

/* As torch.nn.utils.clip_grad_norm_: limit / (norm + 1e-6), at most 1. Never negative, never NaN: a
 * norm that is not a finite number never gets here (MPX-08). */
double norm_clip_factor(double norm, double clip)
{
    /* not a norm: the step is skipped, nothing is scaled */
    if (!(clip > 0.0) || !(norm >= 0.0) || !isfinite(norm)) return 1.0;
    double f = clip / (norm + 1e-6);
    if (f < DBL_MIN) return DBL_MIN; /* 0 would turn an update into none */
    return f < 1.0 ? f : 1.0;
}

static void scale_after_good(stk_engine *e)
{
    uint32_t window = e->cfg.loss_scale_window ? e->cfg.loss_scale_window : 1000;
    if (++e->scale_good < window) return;
    e->scale_good = 0;
    if (e->loss_scale < 16777216.0) e->loss_scale *= 2.0;
}

static void scale_after_overflow(stk_engine *e)
{
    e->scale_good = 0;
    if (e->loss_scale > 1.0) e->loss_scale *= 0.5;
}

void norm_coefficients(const stk_engine *e, double grad_scale, uint64_t more, struct adam_coefs *out)
{
    struct adam_hyper h = { .lr = e->lr,
                            .beta1 = e->cfg.beta1,
                            .beta2 = e->cfg.beta2,
                            .eps = e->cfg.eps,
                            .kind = e->cfg.optimizer == STK_ADAM ? ADAM_L2 : ADAM_ADAMW };
    uint32_t n_sets = 0, last[2] = { 0, 0 }; /* made of this step, without and with decay */
    uint64_t last_steps[2] = { UINT64_MAX, UINT64_MAX };
    for (uint32_t i = 0; i < e->layout->n_tensors; i++) {
        const struct stk_tensor *t = &e->layout->tensors[i];
        out->of[i] = ADAM_COEF_NONE;
        if (t->frozen || !t->touched) continue;
        h.weight_decay = t->decay ? e->cfg.weight_decay : 0.0;
        bool decay = h.weight_decay != 0.0;
        uint64_t steps = t->steps + more;
        if (last_steps[decay] != steps) { /* powers cost; a model may have a million tensors */
            last[decay] = n_sets;
            last_steps[decay] = steps;
            adam_coef_make(&h, steps, grad_scale, &out->set[n_sets++]);
        }
        out->of[i] = last[decay];
    }
}

static void count_steps(stk_engine *e)
{
    for (uint32_t i = 0; i < e->layout->n_tensors; i++) {
        struct stk_tensor *t = &e->layout->tensors[i];
        if (!t->frozen && t->touched) t->steps++;
    }
}

bool norm_decide(stk_engine *e)
{
    double scale = e->grad_loss_scale = e->loss_scale;
    e->norm = sqrt(e->norm_sq) / scale;
    if (e->nonfinite > 0 || !isfinite(e->norm)) {
        if (e->nonfinite > 0) e->norm = NAN;
        e->clip_factor = 1.0;
        e->skipped_total++;
        e->skipped_row++;
        if (e->cfg.dtype == STK_FP16) scale_after_overflow(e);
        return false;
    }
    e->skipped_row = 0;
    e->clip_factor = norm_clip_factor(e->norm, e->cfg.clip);
    count_steps(e);
    norm_coefficients(e, e->clip_factor / scale, 0, &e->coef);
    if (e->cfg.dtype == STK_FP16) scale_after_good(e);
    e->updates++;
    e->update_version = e->updates;
    return true;
}
