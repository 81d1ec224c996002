/* gpu/host/kernels/vec.h - short vectors of fp32 for the kernels that are compiled once per
 * instruction set.
 *
 * VL is the lanes of one vector of this machine. Elementwise kernels compute each lane alone, and
 * norms sum in 16 lanes whatever VL is, so their results have one set of bits everywhere. Only
 * vec_fma differs between instruction sets (one rounding or two), and only attention uses it.
 * Loads and stores need no alignment. GCC and clang vector extensions; no intrinsics but those for
 * fma and max. */
#ifndef GPU_HOST_KERNELS_VEC_H
#define GPU_HOST_KERNELS_VEC_H

#include "base/numeric.h"
#include "gpu/ops.h"
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

#define VEC_INLINE static inline __attribute__((always_inline, unused))
#define VEC_BYTES (4 * VL)

typedef float vec_f __attribute__((vector_size(VEC_BYTES)));
typedef int32_t vec_i __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t vec_u __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t vec_h __attribute__((vector_size(VEC_BYTES / 2)));
typedef float vec_f_any __attribute__((vector_size(VEC_BYTES), aligned(4), may_alias));
typedef int32_t vec_i_any __attribute__((vector_size(VEC_BYTES), aligned(4), may_alias));
typedef uint16_t vec_h_any __attribute__((vector_size(VEC_BYTES / 2), aligned(2), may_alias));

/* Fetches the line of an element that will be wanted soon: the same place of the next row. Where
 * machines fetch little by themselves (some virtual ones) these loops are several times as fast.
 * May point past the end: nothing is read. */
VEC_INLINE void vec_fetch(enum ops_dtype t, const void *p, uint64_t i)
{
    __builtin_prefetch((const void *)((uintptr_t)p + i * ops_dtype_bytes(t)));
}

VEC_INLINE vec_f vec_load(const float *p) { return *(const vec_f_any *)p; }
VEC_INLINE void vec_store(float *p, vec_f v) { *(vec_f_any *)p = v; }
VEC_INLINE vec_i vec_load_i(const int32_t *p) { return *(const vec_i_any *)p; }
VEC_INLINE vec_f vec_set(float x) { return x - (vec_f){ 0 }; } /* x - 0 keeps the sign of zero */
VEC_INLINE vec_f vec_select(vec_i mask, vec_f yes, vec_f no)
{
    return (vec_f)((mask & (vec_i)yes) | (~mask & (vec_i)no));
}

VEC_INLINE vec_f vec_fma(vec_f a, vec_f b, vec_f c)
{
#if defined(__AVX512F__) && VL == 16
    return (vec_f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && VL == 8
    return (vec_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Larger of the two; b where either is NaN. */
VEC_INLINE vec_f vec_max(vec_f a, vec_f b)
{
#if defined(__AVX512F__) && VL == 16
    return (vec_f)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__) && VL == 8
    return (vec_f)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vec_select(a > b, a, b);
#endif
}

VEC_INLINE vec_f vec_load_bf16(const uint16_t *p)
{
    return (vec_f)(__builtin_convertvector(*(const vec_h_any *)p, vec_u) << 16);
}

/* Nearest even, NaN stays a quiet NaN: stk_f32_to_bf16 by lanes. The result is in the low halves.
 */
VEC_INLINE vec_u vec_to_bf16(vec_f v)
{
    vec_u u = (vec_u)v, nan = (vec_u)(v != v);
    vec_u r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (nan & ((u >> 16) | 0x40u)) | (~nan & r);
}
VEC_INLINE void vec_store_bf16(uint16_t *p, vec_f v)
{
    *(vec_h_any *)p = __builtin_convertvector(vec_to_bf16(v), vec_h);
}

/* IEEE binary16, exact. Subnormal ones through an integer, so that a "subnormals are zero" mode
 * does not lose them. */
VEC_INLINE vec_f vec_load_fp16(const uint16_t *p)
{
    vec_u h = __builtin_convertvector(*(const vec_h_any *)p, vec_u), body = h & 0x7fffu;
    vec_u tiny = (vec_u)(body < 0x400u), big = (vec_u)(body >= 0x7c00u);
    vec_u normal = ((body << 13) + (112u << 23)) | (big & 0x7f800000u);
    vec_u small = (vec_u)(__builtin_convertvector((vec_i)(body & tiny), vec_f) * 0x1p-24f);
    return (vec_f)((tiny & small) | (~tiny & normal) | ((h & 0x8000u) << 16));
}

/* The first n < VL elements of an array of `t` from element i on; the other lanes are zero. */
static inline __attribute__((unused)) vec_f vec_get_tail(enum ops_dtype t, const void *p,
                                                         uint64_t i, uint64_t n)
{
    uint16_t half[VL] = { 0 };
    float whole[VL] = { 0 };
    for (uint64_t l = 0; l < n; l++) {
        if (t == OPS_F32) whole[l] = ((const float *)p)[i + l];
        else half[l] = ((const uint16_t *)p)[i + l];
    }
    return t == OPS_F32    ? vec_load(whole)
           : t == OPS_BF16 ? vec_load_bf16(half)
                           : vec_load_fp16(half);
}
/* One vector (or what is left: n elements) of an array of `t` from element i on. */
VEC_INLINE vec_f vec_get(enum ops_dtype t, const void *p, uint64_t i, uint64_t n)
{
    if (n < VL) return vec_get_tail(t, p, i, n);
    if (t == OPS_F32) return vec_load((const float *)p + i);
    return t == OPS_BF16 ? vec_load_bf16((const uint16_t *)p + i)
                         : vec_load_fp16((const uint16_t *)p + i);
}
/* The first n lanes (or all) into an array of `at`: OPS_F32 or OPS_BF16. */
VEC_INLINE void vec_put(enum ops_dtype at, void *p, uint64_t i, uint64_t n, vec_f v)
{
    if (n >= VL) {
        if (at == OPS_F32) vec_store((float *)p + i, v);
        else vec_store_bf16((uint16_t *)p + i, v);
        return;
    }
    float t[VL];
    vec_store(t, v);
    for (uint64_t l = 0; l < n; l++) {
        if (at == OPS_F32) ((float *)p)[i + l] = t[l];
        else ((uint16_t *)p)[i + l] = stk_f32_to_bf16(t[l]);
    }
}

/* exp(x) = 2^n e^r with n = round(x log2 e), r = x - n ln 2 in two pieces (Cody & Waite 1980; the
 * first has 9 bits, so that n times it is exact), and e^r = 1 + r + r^2 P(r): P of degree 4
 * interpolates (e^r - 1 - r) / r^2 at the five Chebyshev nodes of |r| <= ln 2 / 2 and, with its
 * coefficients rounded to fp32, leaves 0.09 ulp; with the roundings the whole is within 2 ulp
 * (tests/gpu/test_elementwise.c measures it). Multiplications and additions only, in one order: the
 * same bits on every machine. */
VEC_INLINE vec_f vec_exp_parts(vec_f x, vec_i *n)
{
    const vec_f magic =
        vec_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
    vec_f t = x * 0x1.715476p+0f + magic;
    *n = (vec_i)t - 0x4b400000;
    t = t - magic;
    vec_f r = x - t * 0.693359375f;
    r = r - t * -2.12194440e-4f;
    vec_f p = r * 0x1.6d113cp-10f + 0x1.120ba2p-7f;
    p = p * r + 0x1.55551ap-5f;
    p = p * r + 0x1.5554dcp-3f;
    p = p * r + 0.5f;
    return (p * (r * r) + r) + 1.0f;
}

/* For softmax: x <= 88. Below -80 it is 0, which keeps later products out of the subnormals. NaN
 * stays NaN. */
VEC_INLINE vec_f vec_exp_softmax(vec_f x)
{
    vec_i n, small = x < -80.0f;
    vec_f y = vec_exp_parts(x, &n);
    y = y * (vec_f)((n + 127) << 23);
    return (vec_f)(~small & (vec_i)y);
}

/* Any x: 0 and infinity at the ends, subnormals rounded twice. Two factors, because 2^128 is not a
 * float. */
VEC_INLINE vec_f vec_exp(vec_f x)
{
    vec_i n;
    x = vec_select(x < -110.0f, vec_set(-110.0f), x);
    x = vec_select(x > 100.0f, vec_set(100.0f), x);
    vec_f y = vec_exp_parts(x, &n);
    vec_i half = n >> 1;
    return y * (vec_f)((half + 127) << 23) * (vec_f)((n - half + 127) << 23);
}

typedef float vec_quad __attribute__((vector_size(16)));
typedef float vec_quad_any __attribute__((vector_size(16), aligned(4), may_alias));

/* A square of dst[c][r] = src[r][c]. Moves words, whatever they are. */
VEC_INLINE void vec_transpose_4(const float *s, uint64_t lds, float *d, uint64_t ldd)
{
    vec_quad r0 = *(const vec_quad_any *)s, r1 = *(const vec_quad_any *)(s + lds);
    vec_quad r2 = *(const vec_quad_any *)(s + 2 * lds), r3 = *(const vec_quad_any *)(s + 3 * lds);
    vec_quad a0 = __builtin_shufflevector(r0, r1, 0, 4, 1, 5),
             a1 = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
    vec_quad a2 = __builtin_shufflevector(r2, r3, 0, 4, 1, 5),
             a3 = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
    *(vec_quad_any *)d = __builtin_shufflevector(a0, a2, 0, 1, 4, 5);
    *(vec_quad_any *)(d + ldd) = __builtin_shufflevector(a0, a2, 2, 3, 6, 7);
    *(vec_quad_any *)(d + 2 * ldd) = __builtin_shufflevector(a1, a3, 0, 1, 4, 5);
    *(vec_quad_any *)(d + 3 * ldd) = __builtin_shufflevector(a1, a3, 2, 3, 6, 7);
}

#if VL == 16
/* A square of 16: neighbours in words, in pairs of words, then of quarters of a vector. */
static inline __attribute__((unused)) void vec_transpose_16(const float *s, uint64_t lds, float *d,
                                                            uint64_t ldd)
{
    __m512 r[16], t[16];
    UNROLL
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(s + (uint64_t)i * lds);
    UNROLL
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 16; i += 4) {
        r[i] = (__m512)_mm512_unpacklo_pd((__m512d)t[i], (__m512d)t[i + 2]);
        r[i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i], (__m512d)t[i + 2]);
        r[i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
        r[i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_ps(d + (uint64_t)i * ldd, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_ps(d + (uint64_t)(i + 4) * ldd,
                         _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88));
        _mm512_storeu_ps(d + (uint64_t)(i + 8) * ldd, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd));
        _mm512_storeu_ps(d + (uint64_t)(i + 12) * ldd,
                         _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd));
    }
}
#endif

/* Whole squares of 16, if there is nothing else; false: not done. */
VEC_INLINE bool vec_transpose_squares(const float *src, uint64_t lds, uint64_t rows, uint64_t cols,
                                      float *dst, uint64_t ldd)
{
#if VL == 16
    if (rows % 16 || cols % 16) return false;
    for (uint64_t c = 0; c < cols; c += 16)
        for (uint64_t r = 0; r < rows; r += 16)
            vec_transpose_16(src + r * lds + c, lds, dst + c * ldd + r, ldd);
    return true;
#else
    (void)src, (void)lds, (void)rows, (void)cols, (void)dst, (void)ldd;
    return false;
#endif
}

/* dst[c][r] = src[r][c]; rows and cols are multiples of 4. Rows of src one after the other: for a
 * dst that lies close together. */
static inline __attribute__((unused)) void vec_transpose(const float *src, uint64_t lds,
                                                         uint64_t rows, uint64_t cols, float *dst,
                                                         uint64_t ldd)
{
    if (vec_transpose_squares(src, lds, rows, cols, dst, ldd)) return;
    for (uint64_t r = 0; r < rows; r += 4)
        for (uint64_t c = 0; c < cols; c += 4)
            vec_transpose_4(src + r * lds + c, lds, dst + c * ldd + r, ldd);
}
/* The same, rows of dst one after the other: for rows that lie far apart, which would push each other
 * out of the cache half written. */
static inline __attribute__((unused)) void vec_transpose_far(const float *src, uint64_t lds,
                                                             uint64_t rows, uint64_t cols,
                                                             float *dst, uint64_t ldd)
{
    if (vec_transpose_squares(src, lds, rows, cols, dst, ldd)) return;
    for (uint64_t c = 0; c < cols; c += 4)
        for (uint64_t r = 0; r < rows; r += 4)
            vec_transpose_4(src + r * lds + c, lds, dst + c * ldd + r, ldd);
}

#endif
