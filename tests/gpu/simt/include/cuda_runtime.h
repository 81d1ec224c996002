/* tests/gpu/simt/include/cuda_runtime.h - the C++ side of CUDA for a .cu file that g++ or clang++ compiles:
 * words of the language, built-in variables, barriers, shuffles, atomics, arithmetic, and a launch.
 * tests/gpu/simt/simt.h runs them. nvcc includes this header by itself; the build does so here (-include).
 *
 * WHAT DIFFERS FROM A CARD. Functions like expf are those of the C library here: on a card their last bits
 * differ. What has _rn in its name, + - * / and sqrtf are correctly rounded on both (build for a card without
 * -use_fast_math and with -fmad=false). Only static __shared__ arrays exist, not `extern __shared__`. */
#ifndef CUDA_RUNTIME_H
#define CUDA_RUNTIME_H

#include "cuda_runtime_api.h"
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "simt_device.h"
#include "simt_math.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static /* found by its name: symbols.cpp */
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

/* Constants for a thread, so the compiler may keep them; the executor sets them at every switch. */
extern "C" {
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
}
constexpr int warpSize = 32;

/* Compilers copy whole objects by calls that nobody wrote; for clang that is the only sign of such an access. To
 * the assembler these names are the checked ones, in this file. SIMT_PLAIN: nothing is checked (simt.h). */
#ifndef SIMT_PLAIN
asm("memcpy = simt_memcpy\n memmove = simt_memmove\n memset = simt_memset");
#endif

#define __syncthreads() simt_syncthreads(__FILE__, __LINE__)

/* A launch as one object: simt_submit takes it, to run it at once or later (simt_device.h). */
template <typename... Params, typename... Args>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Params...),
                                      Args &&...args)
{
    static_assert((std::is_trivially_copyable_v<std::decay_t<Params>> && ...),
                  "arguments of a kernel are copied as bytes");
    struct closure : simt_launch {
        void (*kernel)(Params...);
        std::tuple<std::decay_t<Params>...> values;
        closure(void (*k)(Params...), Args &&...a) : kernel(k), values(std::forward<Args>(a)...) {}
    };
    closure *c = new closure(kernel, std::forward<Args>(args)...);
    c->config = *config;
    c->function = reinterpret_cast<const void *>(kernel);
    c->arguments = c;
    c->argument_bytes = sizeof *c;
    c->call = [](const simt_launch *l) {
        const closure *self = static_cast<const closure *>(l);
        std::apply(self->kernel, self->values);
    };
    c->destroy = [](simt_launch *l) { delete static_cast<closure *>(l); };
    return static_cast<cudaError_t>(simt_submit(c));
}

#endif
