/* offload/adam.h - Adam on the CPU, one arithmetic in every variant, bit-equal among them (design
 * section 4).
 *
 * Kingma & Ba, "Adam: a method for stochastic optimization" (2015), algorithm 1; decoupled weight
 * decay after Loshchilov & Hutter, "Decoupled weight decay regularization" (2019). Per element, in
 * this order, every operation rounded to fp32, `fma` where written:
 *
 *     g  = grad * grad_scale                              (16-bit grad widened exactly; grad_scale
 *             folds clip factor and 1/loss scale)
 *     L2 (Adam):     g = fma(weight_decay, p, g)
 *     decoupled:     p = fma(decay, p, p)                 decay = (float)-(lr * weight_decay): not
 *             1 - lr * weight_decay, which
 *                                                         fp32 holds so coarsely that lr 1e-5 with
 *                                                                 0.01 would decay 19 % too much
 *     m  = fma(beta1, m, one_minus_beta1 * g)
 *     v  = fma(beta2, v, (one_minus_beta2 * g) * g)
 *     d  = sqrt(v) * inv_sqrt_bc2 + eps                   (as: fma(sqrt(v), inv_sqrt_bc2, eps)) 
 *             sqrt correctly rounded
 *     p  = p - step_size * (m / d)                        (as: fma(-step_size, m / d, p))       
 *             division correctly rounded
 *
 *     The L2 line is used when coef.l2 != 0, the decoupled one otherwise (decay = 0 when there is
 *             none).
 *     step_size = lr / (1 - beta1^t), inv_sqrt_bc2 = 1 / sqrt(1 - beta2^t): computed in double from
 *             the tensor's own step count t >= 1,
 *     then rounded to fp32 once. beta is the fp32-rounded beta everywhere, so that the bias
 *             corrections fit the moments.
 *     Subnormal inputs and results are zero (FTZ and DAZ on the thread, in every variant; the
 *             scalar reference runs under the same mode). A NaN or infinite gradient never gets
 *             here: the norm found it.
 *
 * bf16 mode: the fp32 master is split in (param bf16, low int16), base/numeric.h. fp16 mode: fp32
 * master beside an fp16 param (param = nearest-even of the master). Any n >= 0, any alignment of at
 * least 2 (param, low, grad) and 4 (moments) bytes. Index arithmetic is 64-bit. Pure functions; any
 * thread; nothing is allocated. */
#ifndef OFFLOAD_ADAM_H
#define OFFLOAD_ADAM_H

#include "base/cpu.h"
#include "base/status.h"

enum adam_kind { ADAM_ADAMW, ADAM_L2 };
enum adam_layout {
    ADAM_BF16_SPLIT, /* param: uint16 bf16; low: int16; grad: bf16 */
    ADAM_FP16,       /* param: uint16 fp16 (written only); master: float; grad: fp16 */
    ADAM_F32,        /* param: float in place; grad: float (the public stk_adam on plain fp32
                      * buffers) */
    ADAM_LAYOUT_N
};

struct adam_hyper { /* of one tensor group at one step */
    double lr, beta1, beta2, eps, weight_decay;
    enum adam_kind kind;
};

struct adam_coef { /* what the kernels take: all fp32, made by adam_coef_make */
    float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_bc2,
        decay, l2;
};
/* t: the tensor's step count after this step (first step: 1). grad_scale in (0, 1] x
 * 1/loss_scale. */
void adam_coef_make(const struct adam_hyper *h, uint64_t t, double grad_scale,
                    struct adam_coef *out);

/* How the arrays are walked: speed only, never the bits. All zero: what was fastest where it was
 * measured. adam_tune.h chooses by measuring. */
struct adam_way {
    uint16_t ahead_elems;   /* lines are fetched so far ahead; 0: ADAM_AHEAD */
    bool stream;            /* non-temporal stores, where every written array lies on whole cache
                             * lines (else ordinary ones) */
};

struct adam_span {          /* n elements of one tensor (or part of it) */
    uint64_t n;
    void *param;            /* 16-bit, or float for ADAM_F32 */
    void *low_or_master;    /* int16 low (BF16_SPLIT), float master (FP16), NULL (F32) */
    float *exp_avg, *exp_avg_sq;
    const void *grad;
    void *param_out;        /* where the new 16-bit parameter goes; NULL: in place (`param`). May
                             * not overlap partly */
    struct adam_way way;
};

typedef void (*adam_fn)(const struct adam_span *s, const struct adam_coef *c);
struct adam_inverse; /* of adam_undo.h, as the two functions */
struct adam_record;
struct adam_narrow_fns; /* of adam_narrow.h */
typedef uint64_t (*adam_record_fn)(const struct adam_span *s, const struct adam_coef *c,
                                   const struct adam_inverse *inv, struct adam_record *r);
typedef void (*adam_undo_fn)(const struct adam_span *s, const struct adam_coef *c,
                             const struct adam_inverse *inv, const uint8_t *code);

struct adam_kernel {
    const char *name;       /* "avx512": the suffix of its functions, adam_bf16_split__avx512 and so
                             * on */
    enum cpu_isa isa;
    adam_fn fn[ADAM_LAYOUT_N];
    adam_record_fn record[ADAM_F32]; /* the 16-bit layouts; called by adam_undo.c */
    adam_undo_fn undo[ADAM_F32];
    adam_fn param_only[ADAM_F32];
    const struct adam_narrow_fns *narrow; /* moments in fewer bits: called by adam_narrow.c */
};
/* Best first, scalar reference last; name NULL ends. One list (adam_kernels.inc) makes
 * declarations, dispatch, tests and bench. */
extern const struct adam_kernel adam_kernels[];
/* The best one this processor (and STOKER_MAX_ISA) allows, or the one named (`name` NULL: best).
 * NULL: no such kernel or not usable here. */
const struct adam_kernel *adam_pick(const char *name);

/* What kernels run under, and who calls many sets once around them: the thread's floating point mode.
 * _end makes non-temporal stores visible to whoever waits for this thread. Pairs nest, the outer one counts. */
uint32_t adam_begin(void);
void adam_end(uint32_t saved);

/* Runs one span between adam_begin and adam_end. */
void adam_run(const struct adam_kernel *k, enum adam_layout layout, const struct adam_span *s,
              const struct adam_coef *c);

#endif
