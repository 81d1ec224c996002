/* tests/gpu/simt/include/cuda_bf16.h - bfloat16 and its conversions (CUDA Math API reference). Rounding to
 * nearest even; every NaN becomes 0x7fff, as by the card's instruction. */
#ifndef CUDA_BF16_H
#define CUDA_BF16_H

#include "cuda_runtime.h"

struct __nv_bfloat16_raw { unsigned short x; };
struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    inline __nv_bfloat16(float f);
    __nv_bfloat16(__nv_bfloat16_raw r) : bits(r.x) {}
    inline operator float() const;
};
struct SIMT_ALIGN(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits)
{
    __nv_bfloat16 r;
    r.bits = bits;
    return r;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }
inline float __bfloat162float(__nv_bfloat16 a) { return __uint_as_float((unsigned)a.bits << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float f)
{
    unsigned u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return __ushort_as_bfloat16(0x7fff);
    return __ushort_as_bfloat16((unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16));
}
inline __nv_bfloat16 __float2bfloat16(float f) { return __float2bfloat16_rn(f); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b)
{
    return { __float2bfloat16_rn(a), __float2bfloat16_rn(b) };
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return { a, b }; }
inline float2 __bfloat1622float2(__nv_bfloat162 a)
{
    return { __bfloat162float(a.x), __bfloat162float(a.y) };
}
inline float __low2float(__nv_bfloat162 a) { return __bfloat162float(a.x); }
inline float __high2float(__nv_bfloat162 a) { return __bfloat162float(a.y); }

inline __nv_bfloat16::__nv_bfloat16(float f) : bits(__float2bfloat16_rn(f).bits) {}
inline __nv_bfloat16::operator float() const { return __bfloat162float(*this); }

#endif
