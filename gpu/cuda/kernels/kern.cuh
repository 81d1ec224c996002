/* gpu/cuda/kernels/kern.cuh - what every kernel of this folder uses: element types, groups of eight
 * elements, sums over lanes, launches.
 *
 * EIGHT. A thread reads and writes eight neighbouring elements at a time (16 bytes of 16-bit types,
 * 32 of fp32): by vectors where the address is a multiple of 16 and all eight exist, one by one
 * else. Which thread has which elements depends on the shape alone, so both ways give the same
 * bits.
 *
 * BITS. Rounding and widening are integer operations, those of base/numeric.h, on every
 * architecture; the processor's own conversion is taken only where it gives the same (fp16 of
 * numbers). Sums over lanes have one tree. Nothing contracts to an fma unless it says fmaf (nvcc
 * -fmad=false).
 *
 * Only .cu files of this folder include it. */
#ifndef GPU_CUDA_KERNELS_KERN_CUH
#define GPU_CUDA_KERNELS_KERN_CUH

#include <cuda_runtime.h>
#ifdef __CUDA_ARCH__
#include <cuda_fp16.h>
#endif

/* base/exec.h fills a struct from a part of its members, and functions are named like their
 * structs, as in C. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#include "gpu/cuda/kernels.h"
#pragma GCC diagnostic pop

#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>

#define KERN_DEVICE static __device__ __forceinline__
#ifdef __CUDACC__
#define KERN_UNROLL _Pragma("unroll")
#define KERN_UNROLL_8 _Pragma("unroll 8")
#else
#define KERN_UNROLL
#define KERN_UNROLL_8
#endif

enum { KERN_WARP = 32, KERN_BLOCK = 256, KERN_EIGHT = 8 };
#define KERN_ALL_LANES 0xffffffffu

/* --- element types --- */

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

KERN_DEVICE uint32_t kern_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
KERN_DEVICE float kern_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

KERN_DEVICE float kern_widen(float x) { return x; }
KERN_DEVICE float kern_widen(bf16 x) { return kern_float((uint32_t)x.bits << 16); }
/* Subnormals through an integer: count x 2^-24 is exact. */
KERN_DEVICE float kern_widen(fp16 x)
{
    const uint32_t sign = (uint32_t)(x.bits & 0x8000u) << 16, body = x.bits & 0x7fffu;
    if (body < 0x400u) return kern_float(kern_bits((float)body * 0x1p-24f) | sign);
    if (body < 0x7c00u) return kern_float(sign | ((body << 13) + (112u << 23)));
    const uint32_t quiet = body > 0x7c00u ? 0x400000u : 0;
    return kern_float(sign | 0x7f800000u | ((body & 0x3ffu) << 13) | quiet);
}

KERN_DEVICE void kern_round(float x, float *out) { *out = x; }
KERN_DEVICE void kern_round(float x, bf16 *out)
{
    const uint32_t u = kern_bits(x);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    out->bits = (uint16_t)(nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* value >> shift to nearest, ties to even; shift in [1, 31]. */
KERN_DEVICE uint32_t kern_shift_nearest(uint32_t value, uint32_t shift)
{
    const uint32_t kept = value >> shift, rest = value & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1u);
    return kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u);
}
/* A number's magnitude (no NaN) as fp16. */
KERN_DEVICE uint32_t kern_fp16_magnitude(uint32_t magnitude)
{
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(kern_float(magnitude)));
#else
    if (magnitude >= 0x47800000u) return 0x7c00u; /* 65536 and more, infinity */
    if (magnitude >= 0x38800000u) return kern_shift_nearest(magnitude - (112u << 23), 13);
    const uint32_t exponent = magnitude >> 23;
    if (exponent < 102) return 0; /* at most 2^-25, half of the smallest subnormal */
    return kern_shift_nearest((magnitude & 0x7fffffu) | 0x800000u, 126u - exponent);
#endif
}
KERN_DEVICE void kern_round(float x, fp16 *out)
{
    const uint32_t u = kern_bits(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    out->bits = (uint16_t)(sign | (magnitude > 0x7f800000u ? nan : kern_fp16_magnitude(magnitude)));
}

KERN_DEVICE uint64_t kern_least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* --- eight elements --- */

KERN_DEVICE bool kern_vector_at(const void *p) { return ((uintptr_t)p & 15u) == 0; }

KERN_DEVICE void kern_load_whole(const float *p, float (&v)[8])
{
    const float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
template <typename T>
KERN_DEVICE void kern_load_whole(const T *p, float (&v)[8])
{
    const uint4 a = *(const uint4 *)p;
    const uint32_t w[4] = { a.x, a.y, a.z, a.w };
    KERN_UNROLL
    for (int i = 0; i < 4; i++) {
        v[2 * i] = kern_widen(T{ (uint16_t)(w[i] & 0xffffu) });
        v[2 * i + 1] = kern_widen(T{ (uint16_t)(w[i] >> 16) });
    }
}
KERN_DEVICE void kern_store_whole(float *p, const float (&v)[8])
{
    ((float4 *)p)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4 *)p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
template <typename T>
KERN_DEVICE void kern_store_whole(T *p, const float (&v)[8])
{
    uint32_t w[4];
    KERN_UNROLL
    for (int i = 0; i < 4; i++) {
        T low, high;
        kern_round(v[2 * i], &low);
        kern_round(v[2 * i + 1], &high);
        w[i] = (uint32_t)low.bits | (uint32_t)high.bits << 16;
    }
    *(uint4 *)p = make_uint4(w[0], w[1], w[2], w[3]);
}

/* n >= 1 elements are left from p on; those that are not there read as zero. */
template <typename T>
KERN_DEVICE void kern_load8(const T *p, uint64_t n, float (&v)[8])
{
    if (n >= KERN_EIGHT && kern_vector_at(p)) {
        kern_load_whole(p, v);
        return;
    }
    KERN_UNROLL
    for (int i = 0; i < 8; i++) v[i] = (uint64_t)i < n ? kern_widen(p[i]) : 0.0f;
}
/* Rounds to T once. */
template <typename T>
KERN_DEVICE void kern_store8(T *p, uint64_t n, const float (&v)[8])
{
    if (n >= KERN_EIGHT && kern_vector_at(p)) {
        kern_store_whole(p, v);
        return;
    }
    KERN_UNROLL
    for (int i = 0; i < 8; i++)
        if ((uint64_t)i < n) kern_round(v[i], &p[i]);
}
/* The same for parameters, whose type is known at the launch only: the branch is the same for all
 * threads. */
KERN_DEVICE void kern_load8_param(enum ops_dtype pt, const void *p, uint64_t at, uint64_t n,
                                  float (&v)[8])
{
    if (pt == OPS_BF16) kern_load8((const bf16 *)p + at, n, v);
    else if (pt == OPS_FP16) kern_load8((const fp16 *)p + at, n, v);
    else kern_load8((const float *)p + at, n, v);
}

/* --- lanes and threads --- */

/* Over `lanes` neighbours (a power of two up to a warp); every lane of the warp must call, and all
 * get the result. */
template <int lanes>
KERN_DEVICE float kern_lanes_sum(float x)
{
    KERN_UNROLL
    for (int d = lanes / 2; d > 0; d /= 2) x = x + __shfl_xor_sync(KERN_ALL_LANES, x, d);
    return x;
}
template <int lanes>
KERN_DEVICE float kern_lanes_max(float x)
{
    KERN_UNROLL
    for (int d = lanes / 2; d > 0; d /= 2) {
        const float y = __shfl_xor_sync(KERN_ALL_LANES, x, d);
        x = y > x ? y : x;
    }
    return x;
}
KERN_DEVICE double kern_warp_sum_f64(double x)
{
    KERN_UNROLL
    for (int d = KERN_WARP / 2; d > 0; d /= 2) x = x + __shfl_xor_sync(KERN_ALL_LANES, x, d);
    return x;
}

/* --- launches --- */

/* Blocks of a grid for `units` of work: kernels go on by gridDim.x, so any number gives the same
 * bits (tests take few). */
#ifndef KERN_GRID_MOST
#define KERN_GRID_MOST (1u << 30)
#endif
static inline unsigned kern_grid(uint64_t units)
{
    return (unsigned)(units < KERN_GRID_MOST ? units : KERN_GRID_MOST);
}

/* Queues one kernel of `threads` threads a block. */
template <typename... P, typename... A>
static inline cudaError_t kern_launch(cudaStream_t s, uint64_t blocks, unsigned threads,
                                      void (*kernel)(P...), A... args)
{
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(kern_grid(blocks));
    c.blockDim = dim3(threads);
    c.stream = s;
    const cudaError_t e = cudaLaunchKernelEx(&c, kernel, static_cast<P>(args)...);
    const cudaError_t last = cudaGetLastError();
    return e != cudaSuccess ? e : last;
}

/* Calls f with a null pointer of the element type. */
template <typename F>
static inline cudaError_t kern_with_activation(enum ops_dtype t, F f)
{
    return t == OPS_F32 ? f((float *)nullptr) : f((bf16 *)nullptr);
}
template <typename F>
static inline cudaError_t kern_with_any(enum ops_dtype t, F f)
{
    return t == OPS_F32    ? f((float *)nullptr)
           : t == OPS_BF16 ? f((bf16 *)nullptr)
                           : f((fp16 *)nullptr);
}
template <typename F>
static inline cudaError_t kern_with_half(enum ops_dtype t, F f)
{
    return t == OPS_BF16 ? f((bf16 *)nullptr) : f((fp16 *)nullptr);
}

static inline uint64_t kern_div_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
static inline uint64_t kern_round_up(uint64_t a, uint64_t b) { return kern_div_up(a, b) * b; }

/* Rows of columns cut for blocks of 256 threads: `across` (a power of two) threads take eight
 * columns each, side by side, the others the next rows. */
struct kern_tiles {
    uint64_t rows, cols, col_tiles, row_tiles;
    unsigned across;
};
static inline kern_tiles kern_tiles_of(uint64_t rows, uint64_t cols)
{
    kern_tiles t = { rows, cols, 0, 0, 1 };
    while (t.across < KERN_BLOCK && (uint64_t)t.across * KERN_EIGHT < cols) t.across *= 2;
    t.col_tiles = kern_div_up(cols, (uint64_t)t.across * KERN_EIGHT);
    t.row_tiles = kern_div_up(rows, KERN_BLOCK / t.across);
    return t;
}
/* Calls f(row, col) for this thread's groups of eight. */
template <typename F>
KERN_DEVICE void kern_tiles_each(const kern_tiles &t, F f)
{
    const uint64_t tiles = t.col_tiles * t.row_tiles;
    const unsigned down = KERN_BLOCK / t.across;
    const unsigned tx = threadIdx.x & (t.across - 1u), ty = threadIdx.x / t.across;
    for (uint64_t b = blockIdx.x; b < tiles; b += gridDim.x) {
        const uint64_t tile_row = b / t.col_tiles;
        const uint64_t row = tile_row * down + ty;
        const uint64_t col = ((b - tile_row * t.col_tiles) * t.across + tx) * KERN_EIGHT;
        if (row < t.rows && col < t.cols) f(row, col);
    }
}

#endif
