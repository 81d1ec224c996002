/* tests/gpu/simt/include/simt_math.h - CUDA's arithmetic by name (CUDA Math API reference). Compiled with
 * -ffp-contract=off and no flush of subnormals, + - * / fma and sqrt are the correctly rounded ones. */
#ifndef SIMT_MATH_H
#define SIMT_MATH_H

#include "cuda_runtime_api.h"
#include <cmath>
#include <cstdint>

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

/* Not correctly rounded on a card either. */
inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
inline double rsqrt(double a) { return 1.0 / __builtin_sqrt(a); }

template <typename To, typename From> inline To simt_cast(From from)
{
    static_assert(sizeof(To) == sizeof(From), "a cast of bits");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
inline int __float_as_int(float a) { return simt_cast<int>(a); }
inline unsigned __float_as_uint(float a) { return simt_cast<unsigned>(a); }
inline float __int_as_float(int a) { return simt_cast<float>(a); }
inline float __uint_as_float(unsigned a) { return simt_cast<float>(a); }
inline long long __double_as_longlong(double a) { return simt_cast<long long>(a); }
inline double __longlong_as_double(long long a) { return simt_cast<double>(a); }

inline float __double2float_rn(double a) { return (float)a; }
inline float __int2float_rn(int a) { return (float)a; }
inline float __uint2float_rn(unsigned a) { return (float)a; }
inline double __int2double_rn(int a) { return a; }
inline float __ll2float_rn(long long a) { return (float)a; }
inline float __ull2float_rn(unsigned long long a) { return (float)a; }
inline double __ll2double_rn(long long a) { return (double)a; }
inline double __ull2double_rn(unsigned long long a) { return (double)a; }

inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __clz(int a) { return a ? __builtin_clz((unsigned)a) : 32; }
inline int __ffs(int a) { return __builtin_ffs(a); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
inline unsigned long max(unsigned long a, unsigned long b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }

#define SIMT_MAKE(t, name)                                                                         \
    inline name##1 make_##name##1(t x) { return { x }; }                                           \
    inline name##2 make_##name##2(t x, t y) { return { x, y }; }                                   \
    inline name##3 make_##name##3(t x, t y, t z) { return { x, y, z }; }                           \
    inline name##4 make_##name##4(t x, t y, t z, t w) { return { x, y, z, w }; }
SIMT_MAKE(signed char, char)
SIMT_MAKE(unsigned char, uchar)
SIMT_MAKE(short, short)
SIMT_MAKE(unsigned short, ushort)
SIMT_MAKE(int, int)
SIMT_MAKE(unsigned int, uint)
SIMT_MAKE(long long, longlong)
SIMT_MAKE(unsigned long long, ulonglong)
SIMT_MAKE(float, float)
SIMT_MAKE(double, double)

#endif
