/* tests/gpu/simt/include/simt_device.h - what a compiled .cu file calls in the executor (exec.cpp,
 * hooks.cpp). Included by cuda_runtime.h; kernels use CUDA's names only. */
#ifndef SIMT_DEVICE_H
#define SIMT_DEVICE_H

#include "cuda_runtime_api.h"
#include <cstdint>
#include <cstring>

struct simt_launch {
    cudaLaunchConfig_t config;
    const void *function;      /* the kernel; its name is looked up by it */
    const void *arguments;     /* inside this object: a kernel may read them */
    size_t argument_bytes;
    void (*call)(const simt_launch *); /* the kernel's body for the current thread */
    void (*destroy)(simt_launch *);
};

extern "C" {
/* Takes the launch over: runs it now or keeps it, and frees it by simt_launch_free. Set by who stands in
 * for the runtime; at start simt_run_now (runtime.cpp). */
extern int (*simt_submit)(struct simt_launch *); /* a cudaError_t */

void simt_syncthreads(const char *file, int line);

enum simt_warp_kind {
    SIMT_SYNCWARP, SIMT_SHFL, SIMT_SHFL_UP, SIMT_SHFL_DOWN, SIMT_SHFL_XOR, SIMT_BALLOT
};
/* Meets the lanes of `mask`; gives what the lane that `arg` leads to has brought as `value`. */
uint64_t simt_warp(enum simt_warp_kind kind, unsigned mask, uint64_t value, int arg, int width);

/* Before an atomic access. */
void simt_atomic_check(const void *p, size_t bytes);

void *simt_memcpy(void *dst, const void *src, size_t bytes);
void *simt_memmove(void *dst, const void *src, size_t bytes);
void *simt_memset(void *dst, int value, size_t bytes);
}

/* Calls of these are not instrumented by the compiler. */
#define memcpy(d, s, n) simt_memcpy(d, s, n)
#define memmove(d, s, n) simt_memmove(d, s, n)
#define memset(d, v, n) simt_memset(d, v, n)
namespace std {
using ::simt_memcpy;
using ::simt_memmove;
using ::simt_memset;
}

template <typename T> inline uint64_t simt_bits(T v)
{
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &v, sizeof v);
    return bits;
}
template <typename T> inline T simt_value(uint64_t bits)
{
    T v;
    __builtin_memcpy(&v, &bits, sizeof v);
    return v;
}

inline void __syncwarp(unsigned mask = 0xffffffffu) { simt_warp(SIMT_SYNCWARP, mask, 0, 0, 32); }
template <typename T> inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32)
{
    return simt_value<T>(simt_warp(SIMT_SHFL, mask, simt_bits(v), lane, width));
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32)
{
    return simt_value<T>(simt_warp(SIMT_SHFL_UP, mask, simt_bits(v), (int)delta, width));
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32)
{
    return simt_value<T>(simt_warp(SIMT_SHFL_DOWN, mask, simt_bits(v), (int)delta, width));
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32)
{
    return simt_value<T>(simt_warp(SIMT_SHFL_XOR, mask, simt_bits(v), lane_mask, width));
}
inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    return (unsigned)simt_warp(SIMT_BALLOT, mask, predicate != 0, 0, 32);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

/* One thread runs at a time and none is switched after the check, so plain arithmetic is atomic. The compiler's
 * own check of the access is left out. */
#define SIMT_ATOMIC(type, name, expression)                                                        \
    __attribute__((no_sanitize("thread"), noinline)) inline type simt_##name(type *p, type v)      \
    {                                                                                              \
        type old = *p;                                                                             \
        *p = (expression);                                                                         \
        return old;                                                                                \
    }                                                                                              \
    __attribute__((always_inline)) inline type name(type *p, type v)                               \
    {                                                                                              \
        simt_atomic_check(p, sizeof *p);                                                           \
        return simt_##name(p, v);                                                                  \
    }
#define SIMT_ATOMIC_INTEGERS(name, expression)                                                     \
    SIMT_ATOMIC(int, name, expression)                                                             \
    SIMT_ATOMIC(unsigned, name, expression)                                                        \
    SIMT_ATOMIC(unsigned long long, name, expression)
SIMT_ATOMIC_INTEGERS(atomicAdd, old + v)
SIMT_ATOMIC(float, atomicAdd, old + v)
SIMT_ATOMIC(double, atomicAdd, old + v)
SIMT_ATOMIC_INTEGERS(atomicMax, old > v ? old : v)
SIMT_ATOMIC_INTEGERS(atomicMin, old < v ? old : v)
SIMT_ATOMIC_INTEGERS(atomicExch, v)
SIMT_ATOMIC_INTEGERS(atomicOr, old | v)

#endif
