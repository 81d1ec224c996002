/* gpu/cuda/kernels/math.cuh - functions with the bits of the host's kernels.
 *
 * Multiplications and additions in the order of gpu/host/kernels/vec.h, never contracted. Only .cu
 * files of this folder include it. */
#ifndef GPU_CUDA_KERNELS_MATH_CUH
#define GPU_CUDA_KERNELS_MATH_CUH

#include "gpu/cuda/kernels/kern.cuh"

/* exp(x) = 2^n e^r, r = x - n ln 2 in two pieces (Cody & Waite 1980); e^r = 1 + r + r^2 P(r) with
 * the coefficients of vec_exp_parts. Adding 1.5 * 2^23 rounds to an integer, in the low bits. */
KERN_DEVICE float kern_exp_parts(float x, int32_t *n)
{
    const float magic = 12582912.0f;
    float t = x * 0x1.715476p+0f + magic;
    *n = (int32_t)(kern_bits(t) - 0x4b400000u);
    t = t - magic;
    float r = x - t * 0.693359375f;
    r = r - t * -2.12194440e-4f;
    float p = r * 0x1.6d113cp-10f + 0x1.120ba2p-7f;
    p = p * r + 0x1.55551ap-5f;
    p = p * r + 0x1.5554dcp-3f;
    p = p * r + 0.5f;
    return (p * (r * r) + r) + 1.0f;
}

/* Any x: 0 and infinity at the ends. Two factors, because 2^128 is not a float. */
KERN_DEVICE float kern_exp(float x)
{
    int32_t n;
    x = x < -110.0f ? -110.0f : x;
    x = x > 100.0f ? 100.0f : x;
    const float y = kern_exp_parts(x, &n);
    const int32_t half = n >> 1;
    return y * kern_float((uint32_t)(half + 127) << 23) *
           kern_float((uint32_t)(n - half + 127) << 23);
}

/* For softmax: x <= 88. Below -80 it is 0. NaN stays NaN. The same function as above with fused
 * steps: what uses it is compared within a bound. */
KERN_DEVICE float kern_exp_softmax(float x)
{
    const float magic = 12582912.0f;
    const bool small = x < -80.0f;
    const float y = small ? 0.0f : x;
    const float t = __fmaf_rn(y, 0x1.715476p+0f, magic), n = t - magic;
    float r = __fmaf_rn(n, -0.693359375f, y);
    r = __fmaf_rn(n, 2.12194440e-4f, r);
    float p = __fmaf_rn(r, 0x1.6d113cp-10f, 0x1.120ba2p-7f);
    p = __fmaf_rn(p, r, 0x1.55551ap-5f);
    p = __fmaf_rn(p, r, 0x1.5554dcp-3f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r * r, r) + 1.0f;
    const float e = p * kern_float((kern_bits(t) - 0x4b400000u + 127u) << 23);
    return small ? 0.0f : e;
}

#endif
