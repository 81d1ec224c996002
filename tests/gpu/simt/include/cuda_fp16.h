/* tests/gpu/simt/include/cuda_fp16.h - half and its conversions (CUDA Math API reference). Rounding to
 * nearest even; too large becomes infinite; every NaN becomes 0x7fff, as by the card's instruction. */
#ifndef CUDA_FP16_H
#define CUDA_FP16_H

#include "cuda_runtime.h"

struct __half_raw { unsigned short x; };
struct __half {
    unsigned short bits;
    __half() = default;
    inline __half(float f);
    __half(__half_raw r) : bits(r.x) {}
    inline operator float() const;
};
struct SIMT_ALIGN(4) __half2 { __half x, y; };
typedef __half half;
typedef __half2 half2;

inline __half __ushort_as_half(unsigned short bits)
{
    __half r;
    r.bits = bits;
    return r;
}
inline unsigned short __half_as_ushort(__half a) { return a.bits; }

inline float __half2float(__half a)
{
    unsigned sign = (unsigned)(a.bits & 0x8000u) << 16, e = (a.bits >> 10) & 31u, m = a.bits & 0x3ffu;
    if (e == 31) return __uint_as_float(m ? 0x7fffffffu : sign | 0x7f800000u);
    if (e) return __uint_as_float(sign | ((e + 112u) << 23) | (m << 13));
    float v = (float)m * 0x1p-24f; /* exact: a subnormal half is a normal float */
    return sign ? -v : v;
}
inline __half __float2half_rn(float f)
{
    unsigned u = __float_as_uint(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return __ushort_as_half(0x7fff);
    if (a >= 0x477ff000u) return __ushort_as_half((unsigned short)(sign | 0x7c00u)); /* from 65520 on */
    if (a >= 0x38800000u) { /* a normal half: rebias, round 13 bits away; a carry moves the exponent */
        unsigned r = a - 0x38000000u;
        return __ushort_as_half((unsigned short)(sign | ((r + 0xfffu + ((r >> 13) & 1u)) >> 13)));
    }
    /* Subnormal: adding 0.5 leaves units of 2^-24 in the last place, rounded to nearest even. */
    float shifted = __uint_as_float(a) + 0.5f;
    return __ushort_as_half((unsigned short)(sign | (__float_as_uint(shifted) - 0x3f000000u)));
}
inline __half __float2half(float f) { return __float2half_rn(f); }
inline __half2 __floats2half2_rn(float a, float b) { return { __float2half_rn(a), __float2half_rn(b) }; }
inline __half2 __halves2half2(__half a, __half b) { return { a, b }; }
inline float2 __half22float2(__half2 a) { return { __half2float(a.x), __half2float(a.y) }; }
inline float __low2float(__half2 a) { return __half2float(a.x); }
inline float __high2float(__half2 a) { return __half2float(a.y); }

inline __half::__half(float f) : bits(__float2half_rn(f).bits) {}
inline __half::operator float() const { return __half2float(*this); }

#endif
