/* base/convert_scalar.c - the conversions, one element at a time: the definition of their bits.
 *
 * Reads like base/numeric.h. Owns the fixed order of the norm's sums, which the SIMD variants
 * share. Compiled for the base instruction set. Must not know chunks or the engine. Any thread; the
 * gradient casts under cpu_ftz_enter (convert.c). */
#include "base/numeric.h"
#include "base/convert_variants.h"

#include <math.h>

/* The square of a 16-bit float is exact in double, so only the additions round, and their order is
 * fixed by i. A non-finite element stays out of the lanes: convert_sum_fold makes the sum infinite,
 * whatever mix of NaN and infinities there was. */
uint64_t convert_grad_bf16_some(const float *acc, uint16_t *out, uint64_t begin, uint64_t n,
                                float scale, double lanes[CONVERT_LANES])
{
    uint64_t nonfinite = 0;
    for (uint64_t i = begin; i < n; i++) {
        uint16_t g = stk_f32_to_bf16(acc[i] * scale);
        double x = (double)stk_bf16_to_f32(g);
        out[i] = g;
        if ((g & 0x7f80) == 0x7f80)
            nonfinite++;
        else
            lanes[i % CONVERT_LANES] += x * x;
    }
    return nonfinite;
}

uint64_t convert_grad_fp16_some(const float *acc, uint16_t *out, uint64_t begin, uint64_t n,
                                float scale, double lanes[CONVERT_LANES])
{
    uint64_t nonfinite = 0;
    for (uint64_t i = begin; i < n; i++) {
        uint16_t g = stk_f32_to_fp16(acc[i] * scale);
        double x = (double)stk_fp16_to_f32(g);
        out[i] = g;
        if ((g & 0x7c00) == 0x7c00)
            nonfinite++;
        else
            lanes[i % CONVERT_LANES] += x * x;
    }
    return nonfinite;
}

void convert_sum_fold(double lanes[CONVERT_LANES], uint64_t nonfinite, struct convert_sum *sum)
{
    for (int half = CONVERT_LANES / 2; half >= 1; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
    sum->sum_sq = nonfinite ? (double)INFINITY : lanes[0];
    sum->nonfinite = nonfinite;
}

void convert_grad_bf16__scalar(const float *acc, uint16_t *out, uint64_t n, float scale,
                               struct convert_sum *sum)
{
    double lanes[CONVERT_LANES] = { 0 };
    uint64_t nonfinite = convert_grad_bf16_some(acc, out, 0, n, scale, lanes);
    convert_sum_fold(lanes, nonfinite, sum);
}

void convert_grad_fp16__scalar(const float *acc, uint16_t *out, uint64_t n, float scale,
                               struct convert_sum *sum)
{
    double lanes[CONVERT_LANES] = { 0 };
    uint64_t nonfinite = convert_grad_fp16_some(acc, out, 0, n, scale, lanes);
    convert_sum_fold(lanes, nonfinite, sum);
}

void convert_split__scalar(const float *master, uint16_t *param, int16_t *low, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) stk_split(master[i], &param[i], &low[i]);
}

void convert_join__scalar(const uint16_t *param, const int16_t *low, float *master, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) master[i] = stk_join(param[i], low[i]);
}

void convert_bf16_to_f32__scalar(const uint16_t *in, float *out, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) out[i] = stk_bf16_to_f32(in[i]);
}

void convert_fp16_to_f32__scalar(const uint16_t *in, float *out, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) out[i] = stk_fp16_to_f32(in[i]);
}

void convert_f32_to_bf16__scalar(const float *in, uint16_t *out, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) out[i] = stk_f32_to_bf16(in[i]);
}

void convert_f32_to_fp16__scalar(const float *in, uint16_t *out, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) out[i] = stk_f32_to_fp16(in[i]);
}
