/* offload/adam.c - choosing an Adam kernel, its coefficients, and running it under the right
 * floating point mode.
 *
 * Owns the table of variants (from adam_kernels.inc) and the only place where step counts become
 * bias corrections. Must not know chunks, shards, clipping or threads: a span is a few pointers.
 * Pure functions, run by any thread (in training: the members of the update team). */
#include "offload/adam.h"

#include "offload/adam_variants.h"

#include <math.h>
#include <string.h>

#define ADAM_KERNEL(suffix, isa_)                                            \
    { .name = #suffix,                                                       \
      .isa = isa_,                                                           \
      .fn = { [ADAM_BF16_SPLIT] = adam_bf16_split__##suffix,                 \
              [ADAM_FP16] = adam_fp16__##suffix,                             \
              [ADAM_F32] = adam_f32__##suffix },                             \
      .record = { [ADAM_BF16_SPLIT] = adam_record_bf16_split__##suffix,      \
                  [ADAM_FP16] = adam_record_fp16__##suffix },                \
      .undo = { [ADAM_BF16_SPLIT] = adam_undo_bf16_split__##suffix,          \
                [ADAM_FP16] = adam_undo_fp16__##suffix },                    \
      .param_only = { [ADAM_BF16_SPLIT] = adam_param_bf16_split__##suffix,   \
                      [ADAM_FP16] = adam_param_fp16__##suffix },             \
      .narrow = &adam_narrow__##suffix },
const struct adam_kernel adam_kernels[] = {
#include "offload/adam_kernels.inc"
    { .name = NULL },
};
#undef ADAM_KERNEL

/* x^n by squaring. Not pow(): its last bits differ between C libraries, and between processors
 * within one library, and they would end up in the weights. The relative error grows as n * 2^-53,
 * but 1 - beta^n feels only n * beta^n of it. */
static double adam_power(double x, uint64_t n)
{
    double r = 1.0;
    for (; n; n >>= 1) {
        if (n & 1) r *= x;
        x *= x;
    }
    return r;
}

void adam_coef_make(const struct adam_hyper *h, uint64_t t, double grad_scale,
                    struct adam_coef *out)
{
    STK_ASSERT(t >= 1);
    /* All factors come from the betas the kernel really uses. Taking 1 - beta and beta^t from the
     * unrounded ones would make v too large or small by 1e-5 in the long run (0.999 is off by
     * 1.3e-8, over 1,000 steps of memory). */
    float beta1 = (float)h->beta1, beta2 = (float)h->beta2;
    double bc1 = 1.0 - adam_power(beta1, t), bc2 = 1.0 - adam_power(beta2, t);
    bool l2 = h->kind == ADAM_L2;
    *out = (struct adam_coef){
        .grad_scale = (float)grad_scale,
        .beta1 = beta1,
        .one_minus_beta1 = (float)(1.0 - (double)beta1),
        .beta2 = beta2,
        .one_minus_beta2 = (float)(1.0 - (double)beta2),
        .eps = (float)h->eps,
        .step_size = (float)(h->lr / bc1),
        .inv_sqrt_bc2 = (float)(1.0 / sqrt(bc2)),
        .decay = l2 ? 0.0f : (float)-(h->lr * h->weight_decay),
        .l2 = l2 ? (float)h->weight_decay : 0.0f,
    };
}

const struct adam_kernel *adam_pick(const char *name)
{
    enum cpu_isa best = cpu_isa_best();
    for (const struct adam_kernel *k = adam_kernels; k->name; k++)
        if (k->isa <= best && (!name || strcmp(name, k->name) == 0)) return k;
    return NULL;
}

uint32_t adam_begin(void) { return cpu_ftz_enter(); }

void adam_end(uint32_t saved)
{
    if (cpu_ftz_was_on(saved)) return;
    cpu_stream_fence();
    cpu_ftz_leave(saved);
}

void adam_run(const struct adam_kernel *k, enum adam_layout layout, const struct adam_span *s,
              const struct adam_coef *c)
{
    STK_ASSERT(k && layout < ADAM_LAYOUT_N);
    if (s->n == 0) return;
    STK_ASSERT(s->param && s->exp_avg && s->exp_avg_sq && s->grad);
    STK_ASSERT(s->low_or_master || layout == ADAM_F32);
    uint32_t saved = adam_begin();
    k->fn[layout](s, c);
    adam_end(saved);
}
