/* offload/adam_variants.h - what the files of the Adam variants share: declarations of all kernels, and the macro that makes
 * a variant's three kernels out of its one span function. Internal to offload/adam*.c. */
#ifndef OFFLOAD_ADAM_VARIANTS_H
#define OFFLOAD_ADAM_VARIANTS_H

#include "offload/adam.h"

#define ADAM_KERNEL(suffix, isa_)                                                                   \
    void adam_bf16_split__##suffix(const struct adam_span *s, const struct adam_coef *c);           \
    void adam_fp16__##suffix(const struct adam_span *s, const struct adam_coef *c);                 \
    void adam_f32__##suffix(const struct adam_span *s, const struct adam_coef *c);
#include "offload/adam_kernels.inc"
#undef ADAM_KERNEL

#define ADAM_INLINE static inline __attribute__((always_inline))

/* `span_fn(s, c, layout, l2)` must be ADAM_INLINE: layout and l2 are constants here, so that the loops have no branches. */
#define ADAM_DEFINE_ONE(name, layout, span_fn)                                                      \
    void name(const struct adam_span *s, const struct adam_coef *c)                                 \
    {                                                                                               \
        if (c->l2 != 0.0f)                                                                          \
            span_fn(s, c, layout, true);                                                            \
        else                                                                                        \
            span_fn(s, c, layout, false);                                                           \
    }
#define ADAM_DEFINE(suffix, span_fn)                                                                \
    ADAM_DEFINE_ONE(adam_bf16_split__##suffix, ADAM_BF16_SPLIT, span_fn)                            \
    ADAM_DEFINE_ONE(adam_fp16__##suffix, ADAM_FP16, span_fn)                                        \
    ADAM_DEFINE_ONE(adam_f32__##suffix, ADAM_F32, span_fn)

#endif
