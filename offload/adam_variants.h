/* offload/adam_variants.h - what the files of the Adam variants share: declarations of all kernels,
 * and the macro that makes a variant's three kernels out of its one span function. Internal to
 * offload/adam*.c. */
#ifndef OFFLOAD_ADAM_VARIANTS_H
#define OFFLOAD_ADAM_VARIANTS_H

#include "offload/adam_undo.h"

/* Declares the functions of one of the three types of adam.h. */
#define ADAM_DECLARE_RUN(name) void name(const struct adam_span *s, const struct adam_coef *c);
#define ADAM_DECLARE_RECORD(name)                                       \
    uint64_t name(const struct adam_span *s, const struct adam_coef *c, \
                  const struct adam_inverse *inv, struct adam_record *r);
#define ADAM_DECLARE_UNDO(name)                                     \
    void name(const struct adam_span *s, const struct adam_coef *c, \
              const struct adam_inverse *inv, const uint8_t *code);
#define ADAM_KERNEL(suffix, isa_)                         \
    ADAM_DECLARE_RUN(adam_bf16_split__##suffix)           \
    ADAM_DECLARE_RUN(adam_fp16__##suffix)                 \
    ADAM_DECLARE_RUN(adam_f32__##suffix)                  \
    ADAM_DECLARE_RUN(adam_param_bf16_split__##suffix)     \
    ADAM_DECLARE_RUN(adam_param_fp16__##suffix)           \
    ADAM_DECLARE_RECORD(adam_record_bf16_split__##suffix) \
    ADAM_DECLARE_RECORD(adam_record_fp16__##suffix)       \
    ADAM_DECLARE_UNDO(adam_undo_bf16_split__##suffix)     \
    ADAM_DECLARE_UNDO(adam_undo_fp16__##suffix)
#include "offload/adam_kernels.inc"
#undef ADAM_KERNEL

#define ADAM_INLINE static inline __attribute__((always_inline))

/* The SIMD loops go by this many elements, whole cache lines of each array, and fetch so many
 * ahead: the hardware's own prefetching does not keep five streams going that are also written
 * (measured: 12-18 % where DRAM is shared, 10 % from cache, with 512 ahead; a quarter or half of it
 * gains a little less). */
enum { ADAM_STRIDE = 32, ADAM_AHEAD = 512 };

/* May point past the end of the arrays: a prefetch reads nothing that the program sees. Integers,
 * since such a pointer may not even be computed. */
ADAM_INLINE void adam_fetch_lines(const void *base, uint64_t i, uint64_t width_bytes)
{
    uintptr_t at = (uintptr_t)base + (uintptr_t)((i + ADAM_AHEAD) * width_bytes);
    __builtin_prefetch((const void *)at);
    if (width_bytes == 4) __builtin_prefetch((const void *)(at + 64));
}

ADAM_INLINE void adam_fetch(const struct adam_span *s, uint64_t i, enum adam_layout layout)
{
    adam_fetch_lines(s->exp_avg, i, 4);
    adam_fetch_lines(s->exp_avg_sq, i, 4);
    adam_fetch_lines(s->grad, i, layout == ADAM_F32 ? 4 : 2);
    if (layout != ADAM_FP16) adam_fetch_lines(s->param, i, layout == ADAM_F32 ? 4 : 2);
    if (layout != ADAM_F32) adam_fetch_lines(s->low_or_master, i, layout == ADAM_FP16 ? 4 : 2);
}

/* `span_fn(s, c, layout, l2)` must be ADAM_INLINE: layout and l2 are constants here, so that the
 * loops have no branches. */
#define ADAM_DEFINE_ONE(name, layout, span_fn)                      \
    void name(const struct adam_span *s, const struct adam_coef *c) \
    {                                                               \
        if (c->l2 != 0.0f)                                          \
            span_fn(s, c, layout, true);                            \
        else                                                        \
            span_fn(s, c, layout, false);                           \
    }
#define ADAM_DEFINE(suffix, span_fn)                                     \
    ADAM_DEFINE_ONE(adam_bf16_split__##suffix, ADAM_BF16_SPLIT, span_fn) \
    ADAM_DEFINE_ONE(adam_fp16__##suffix, ADAM_FP16, span_fn)             \
    ADAM_DEFINE_ONE(adam_f32__##suffix, ADAM_F32, span_fn)

#endif
