/* gpu/cuda/kernels/flush.cuh - fp32 arithmetic as the processor does it with subnormals flushed
 * (x86: DAZ and FTZ): subnormal operands and results are zeros of their sign.
 *
 * A result is tiny there if it is below 2^-126 after rounding to 24 bits of an unbounded exponent,
 * that is below 2^-126 (1 - 2^-25); with gradual underflow, numbers from 2^-126 (1 - 2^-24) on
 * round to 2^-126. The band between is looked at in fp64. A quotient of two normal numbers is never
 * in it (1 - M / D >= 1 / D > 2^-24), a root is never small. Only .cu files of this folder include
 * it. */
#ifndef GPU_CUDA_KERNELS_FLUSH_CUH
#define GPU_CUDA_KERNELS_FLUSH_CUH

#include "gpu/cuda/kernels/kern.cuh"

#define KERN_SMALLEST_NORMAL 0x00800000u
#define KERN_NOT_TINY 0x1.ffffffp-127 /* 2^-126 (1 - 2^-25) */

KERN_DEVICE float kern_flush(float x)
{
    const uint32_t u = kern_bits(x);
    return (u & 0x7fffffffu) < KERN_SMALLEST_NORMAL ? kern_float(u & 0x80000000u) : x;
}
KERN_DEVICE bool kern_at_edge(float x)
{
    return (kern_bits(x) & 0x7fffffffu) == KERN_SMALLEST_NORMAL;
}
KERN_DEVICE float kern_signed_zero(float x) { return kern_float(kern_bits(x) & 0x80000000u); }

KERN_DEVICE float kern_mul_flush(float a, float b)
{
    a = kern_flush(a), b = kern_flush(b);
    const float r = __fmul_rn(a, b);
    if (kern_at_edge(r) && fabs((double)a * (double)b) < KERN_NOT_TINY) return kern_signed_zero(r);
    return kern_flush(r);
}

/* |a b + c| < KERN_NOT_TINY exactly: the product is exact in fp64, the sum is s + rest (TwoSum:
 * Knuth 1969). */
KERN_DEVICE bool kern_fma_tiny(float a, float b, float c)
{
    const double x = (double)a * (double)b, y = (double)c, s = x + y, yy = s - x;
    const double rest = (x - (s - yy)) + (y - yy), size = fabs(s);
    return size < KERN_NOT_TINY || (size == KERN_NOT_TINY && rest != 0 && (rest < 0) == (s > 0));
}
KERN_DEVICE float kern_fma_flush(float a, float b, float c)
{
    a = kern_flush(a), b = kern_flush(b), c = kern_flush(c);
    const float r = __fmaf_rn(a, b, c);
    if (kern_at_edge(r) && kern_fma_tiny(a, b, c)) return kern_signed_zero(r);
    return kern_flush(r);
}

/* Operands are results of the above (or flushed). */
KERN_DEVICE float kern_div_flush(float a, float b) { return kern_flush(__fdiv_rn(a, b)); }

#endif
