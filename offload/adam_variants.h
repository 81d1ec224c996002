/* offload/adam_variants.h - what the files of the Adam variants share: declarations of all kernels,
 * and the macro that makes a variant's three kernels out of its one span function. Internal to
 * offload/adam*.c. */
#ifndef OFFLOAD_ADAM_VARIANTS_H
#define OFFLOAD_ADAM_VARIANTS_H

#include "offload/adam_narrow.h"
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
    ADAM_DECLARE_UNDO(adam_undo_fp16__##suffix)           \
    extern const struct adam_narrow_fns adam_narrow__##suffix;
#include "offload/adam_kernels.inc"
#undef ADAM_KERNEL

#define ADAM_INLINE static inline __attribute__((always_inline))

/* The SIMD loops go by this many elements, whole cache lines of each array, and fetch so many
 * ahead unless the span says otherwise: the hardware's own prefetching does not keep five streams
 * going that are also written (measured: 12-18 % where DRAM is shared, 10 % from cache, with 512
 * ahead; a quarter or half of it gains a little less). */
enum { ADAM_STRIDE = 32, ADAM_AHEAD = 512 };

/* The lines of elements from `at` on. May point past the end of the arrays: a prefetch reads
 * nothing that the program sees. Integers, since such a pointer may not even be computed. */
ADAM_INLINE void adam_fetch_lines(const void *base, uint64_t at, uint64_t width_bytes)
{
    uintptr_t line = (uintptr_t)base + (uintptr_t)(at * width_bytes);
    __builtin_prefetch((const void *)line);
    if (width_bytes == 4) __builtin_prefetch((const void *)(line + 64));
}

ADAM_INLINE void adam_fetch_at(const struct adam_span *s, uint64_t at, enum adam_layout layout)
{
    adam_fetch_lines(s->exp_avg, at, 4);
    adam_fetch_lines(s->exp_avg_sq, at, 4);
    adam_fetch_lines(s->grad, at, layout == ADAM_F32 ? 4 : 2);
    if (layout != ADAM_FP16) adam_fetch_lines(s->param, at, layout == ADAM_F32 ? 4 : 2);
    if (layout != ADAM_F32) adam_fetch_lines(s->low_or_master, at, layout == ADAM_FP16 ? 4 : 2);
}

ADAM_INLINE uint64_t adam_ahead(const struct adam_span *s)
{
    return s->way.ahead_elems ? s->way.ahead_elems : ADAM_AHEAD;
}

/* Non-temporal stores are asked for, and every array that is written lies on whole cache lines. */
ADAM_INLINE bool adam_streams(const struct adam_span *s, enum adam_layout layout)
{
    uintptr_t all = (uintptr_t)s->exp_avg | (uintptr_t)s->exp_avg_sq |
                    (uintptr_t)(s->param_out ? s->param_out : s->param);
    if (layout != ADAM_F32) all |= (uintptr_t)s->low_or_master;
    return s->way.stream && all % 64 == 0;
}

/* `span_fn(s, c, layout, l2, stream)` must be ADAM_INLINE: layout, l2 and stream are constants
 * here, so that the loops have no branches. */
#define ADAM_DEFINE_WALKED(name, layout, span_fn)                   \
    void name(const struct adam_span *s, const struct adam_coef *c) \
    {                                                               \
        bool stream = adam_streams(s, layout);                      \
        if (c->l2 != 0.0f && stream)                                \
            span_fn(s, c, layout, true, true);                      \
        else if (c->l2 != 0.0f)                                     \
            span_fn(s, c, layout, true, false);                     \
        else if (stream)                                            \
            span_fn(s, c, layout, false, true);                     \
        else                                                        \
            span_fn(s, c, layout, false, false);                    \
    }
#define ADAM_DEFINE(suffix, span_fn)                                        \
    ADAM_DEFINE_WALKED(adam_bf16_split__##suffix, ADAM_BF16_SPLIT, span_fn) \
    ADAM_DEFINE_WALKED(adam_fp16__##suffix, ADAM_FP16, span_fn)             \
    ADAM_DEFINE_WALKED(adam_f32__##suffix, ADAM_F32, span_fn)

/* `span_fn(s, c, layout, l2)`: ordinary stores. */
#define ADAM_DEFINE_ONE(name, layout, span_fn)                      \
    void name(const struct adam_span *s, const struct adam_coef *c) \
    {                                                               \
        if (c->l2 != 0.0f)                                          \
            span_fn(s, c, layout, true);                            \
        else                                                        \
            span_fn(s, c, layout, false);                           \
    }

#endif
