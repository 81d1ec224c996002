/* base/convert.h - conversions between fp32 and 16-bit formats over arrays, SIMD where it pays, the
 * same bits everywhere. Pure functions; any thread; nothing is allocated; any n. Rounding to
 * nearest even unless said otherwise. */
#ifndef BASE_CONVERT_H
#define BASE_CONVERT_H

#include <stdint.h>

/* fp32 gradient accumulator times `scale` (fp32, before rounding; 1.0f for bf16) to 16-bit
 * gradient, with the sum of squares of the ROUNDED values in fp64 and the number of non-finite
 * ones. The sum uses 16 interleaved fp64 lanes (element i goes to lane i % 16) folded pairwise in a
 * fixed order (8+8, 4+4, 2+2, 1+1), so it is the same for every instruction set. *sum is set, not
 * added to; with a non-finite element sum_sq is +infinity. Subnormals of fp32 are zero, whatever
 * the caller's mode. */
struct convert_sum { double sum_sq; uint64_t nonfinite; };
void convert_grad_bf16(const float *acc, uint16_t *out, uint64_t n, float scale,
                       struct convert_sum *sum);
void convert_grad_fp16(const float *acc, uint16_t *out, uint64_t n, float scale,
                       struct convert_sum *sum);
/* fp32 master into its parts (base/numeric.h) and back. */
void convert_split(const float *master, uint16_t *param, int16_t *low, uint64_t n);
void convert_join(const uint16_t *param, const int16_t *low, float *master, uint64_t n);
void convert_bf16_to_f32(const uint16_t *in, float *out, uint64_t n);
void convert_fp16_to_f32(const uint16_t *in, float *out, uint64_t n);
void convert_f32_to_bf16(const float *in, uint16_t *out, uint64_t n);
void convert_f32_to_fp16(const float *in, uint16_t *out, uint64_t n);

#endif
