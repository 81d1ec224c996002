/* base/convert_variants.h - what the files of the conversion variants share. Internal to
 * base/convert*.c and its tests. */
#ifndef BASE_CONVERT_VARIANTS_H
#define BASE_CONVERT_VARIANTS_H

#include "base/convert.h"
#include "base/cpu.h"

#define CONVERT_LANES \
    16 /* interleaved fp64 sums of the gradient casts: part of the result's definition */

/* X(operation, parameters); convert.h describes each. */
#define CONVERT_OPERATIONS(X)                                                              \
    X(grad_bf16,                                                                           \
      (const float *acc, uint16_t *out, uint64_t n, float scale, struct convert_sum *sum)) \
    X(grad_fp16,                                                                           \
      (const float *acc, uint16_t *out, uint64_t n, float scale, struct convert_sum *sum)) \
    X(split, (const float *master, uint16_t *param, int16_t *low, uint64_t n))             \
    X(join, (const uint16_t *param, const int16_t *low, float *master, uint64_t n))        \
    X(bf16_to_f32, (const uint16_t *in, float *out, uint64_t n))                           \
    X(fp16_to_f32, (const uint16_t *in, float *out, uint64_t n))                           \
    X(f32_to_bf16, (const float *in, uint16_t *out, uint64_t n))                           \
    X(f32_to_fp16, (const float *in, uint16_t *out, uint64_t n))

struct convert_kernel {
    const char *name; /* NULL ends the list */
    enum cpu_isa isa;
#define CONVERT_MEMBER(operation, parameters) void(*operation) parameters;
    CONVERT_OPERATIONS(CONVERT_MEMBER)
#undef CONVERT_MEMBER
};
extern const struct convert_kernel convert_kernels[];

#define CONVERT_AVX2(operation, parameters) void convert_##operation##__avx2 parameters;
#define CONVERT_SCALAR(operation, parameters) void convert_##operation##__scalar parameters;
CONVERT_OPERATIONS(CONVERT_AVX2)
CONVERT_OPERATIONS(CONVERT_SCALAR)
/* AVX-512 has one of its own only. */
void convert_grad_bf16__avx512(const float *acc, uint16_t *out, uint64_t n, float scale,
                               struct convert_sum *sum);
#undef CONVERT_AVX2
#undef CONVERT_SCALAR

/* The last elements of a vectorised gradient cast, [begin, n), one by one into the lanes; returns
 * how many were not finite. */
typedef uint64_t (*convert_tail_fn)(const float *acc, uint16_t *out, uint64_t begin, uint64_t n,
                                    float scale, double lanes[CONVERT_LANES]);
uint64_t convert_grad_bf16_some(const float *acc, uint16_t *out, uint64_t begin, uint64_t n,
                                float scale, double lanes[CONVERT_LANES]);
uint64_t convert_grad_fp16_some(const float *acc, uint16_t *out, uint64_t begin, uint64_t n,
                                float scale, double lanes[CONVERT_LANES]);
/* Folds the lanes (8+8, 4+4, 2+2, 1+1) into the result. */
void convert_sum_fold(double lanes[CONVERT_LANES], uint64_t nonfinite, struct convert_sum *sum);

#endif
