/* engine/adam_api.c - Adam alone, on the caller's buffers: no engine, no state. Caller's thread;
 * OpenMP inside. Elementwise, so any split gives the same bits. */
#include "engine/stoker.h"
#include "base/cpu.h"
#include "offload/adam.h"

#define SLICE_ELEMS                                                                                \
    65536u /* of one thread at a time: whole vectors, so that an element always meets the same arithmetic */

static stk_status run(enum adam_layout layout, const struct adam_span *all,
                      const struct adam_hyper *h, double grad_scale, uint64_t t, uint32_t threads)
{
    const struct adam_kernel *k = adam_pick(NULL);
    struct adam_coef c;
    if (t == 0 || !(grad_scale > 0)) return STK_ERR_CONFIG;
    adam_coef_make(h, t, grad_scale, &c);
    uint64_t slices = (all->n + SLICE_ELEMS - 1) / SLICE_ELEMS;
    uint64_t wide = layout == ADAM_F32 ? 4 : 2;
    if (slices <= 1) { /* small tensors come by the thousand: no team, and no look at the machine */
        adam_run(k, layout, all, &c);
        return STK_OK;
    }
    uint32_t n_threads = threads ? threads : cpu_count("");
#pragma omp parallel for num_threads(n_threads) schedule(static)
    for (uint64_t i = 0; i < slices; i++) {
        uint64_t at = i * SLICE_ELEMS, left = all->n - at;
        struct adam_span s = { .n = left < SLICE_ELEMS ? left : SLICE_ELEMS,
                               .param = (uint8_t *)all->param + at * wide,
                               .low_or_master = all->low_or_master
                                                    ? (uint8_t *)all->low_or_master + at * 2
                                                    : NULL,
                               .exp_avg = all->exp_avg + at,
                               .exp_avg_sq = all->exp_avg_sq + at,
                               .grad = (const uint8_t *)all->grad + at * wide };
        adam_run(k, layout, &s, &c);
    }
    return STK_OK;
}

stk_status stk_adam_f32(float *param, float *exp_avg, float *exp_avg_sq, const float *grad,
                        uint64_t n, stk_optimizer kind, double lr, double beta1, double beta2,
                        double eps, double weight_decay, double grad_scale, uint64_t t,
                        uint32_t threads)
{
    struct adam_hyper h = { lr,  beta1,        beta2,
                            eps, weight_decay, kind == STK_ADAM ? ADAM_L2 : ADAM_ADAMW };
    struct adam_span s = {
        .n = n, .param = param, .exp_avg = exp_avg, .exp_avg_sq = exp_avg_sq, .grad = grad
    };
    return run(ADAM_F32, &s, &h, grad_scale, t, threads);
}

stk_status stk_adam_bf16(uint16_t *param, int16_t *low, float *exp_avg, float *exp_avg_sq,
                         const uint16_t *grad, uint64_t n, stk_optimizer kind, double lr,
                         double beta1, double beta2, double eps, double weight_decay,
                         double grad_scale, uint64_t t, uint32_t threads)
{
    struct adam_hyper h = { lr,  beta1,        beta2,
                            eps, weight_decay, kind == STK_ADAM ? ADAM_L2 : ADAM_ADAMW };
    struct adam_span s = { .n = n,
                           .param = param,
                           .low_or_master = low,
                           .exp_avg = exp_avg,
                           .exp_avg_sq = exp_avg_sq,
                           .grad = grad };
    return run(ADAM_BF16_SPLIT, &s, &h, grad_scale, t, threads);
}
