/* tests/gpu/simt/basics.cu - the kernels of basics.h. Right ones: nothing is to be found in them.
 *
 * Knows nothing of the executor. */
#include "tests/gpu/simt/basics.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

constexpr unsigned ALL = 0xffffffffu;

__global__ void shuffles(int *out)
{
    int t = (int)threadIdx.x, lane = t % 32, k = 0;
    auto put = [&](int v) { out[k++ * BASICS_LANES + t] = v; };
    put(__shfl_sync(ALL, t, 5));
    put(__shfl_sync(ALL, t, 3, 8));
    put(__shfl_up_sync(ALL, t, 2u));
    put(__shfl_down_sync(ALL, t, 4u, 16));
    put(__shfl_xor_sync(ALL, t, 9));
    put((int)__shfl_xor_sync(ALL, (double)t, 1, 2));
    put((int)__ballot_sync(ALL, t % 3 == 0));
    put(lane % 2 ? __shfl_down_sync(0xaaaaaaaau, t, 0u) : __any_sync(0x55555555u, t == 2));
}

__global__ void convert(const float *x, uint16_t *bf16, uint16_t *fp16, float *from_bf16, float *from_fp16, uint64_t n)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    bf16[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
    fp16[i] = __half_as_ushort(__float2half_rn(x[i]));
    from_bf16[i] = __bfloat162float(__ushort_as_bfloat16(bf16[i]));
    from_fp16[i] = __half2float(__ushort_as_half(fp16[i]));
}

__global__ void order(unsigned *next, int *who)
{
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    who[atomicAdd(next, 1u)] = (int)(block * 24 + thread);
}

__global__ void twice(const float *x, float *y, uint64_t n)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
}

/* A frame that stays in use over a barrier. */
__device__ __attribute__((noinline)) int deep(int steps, int *shared)
{
    volatile int frame[1024];
    for (int i = 0; i < 1024; i++) frame[i] = i == (int)threadIdx.x;
    for (int s = 0; s < steps; s++) {
        __syncthreads();
        if ((int)threadIdx.x == s) *shared += frame[threadIdx.x];
    }
    __syncthreads();
    return frame[threadIdx.x];
}

__global__ void __launch_bounds__(1024) deep_sum(int steps, int *sum)
{
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    int mine = deep(steps, &total);
    if (threadIdx.x == 1023) *sum = total + mine;
}

cudaLaunchConfig_t shape(dim3 grid, dim3 block)
{
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = block;
    return c;
}

} // namespace

extern "C" cudaError_t basics_shuffles(int *out)
{
    cudaLaunchConfig_t c = shape(dim3(1), dim3(BASICS_LANES));
    return cudaLaunchKernelEx(&c, shuffles, out);
}

extern "C" cudaError_t basics_convert(const float *x, uint16_t *bf16, uint16_t *fp16, float *from_bf16, float *from_fp16,
                                      uint64_t n)
{
    cudaLaunchConfig_t c = shape(dim3((unsigned)((n + 127) / 128)), dim3(128));
    return cudaLaunchKernelEx(&c, convert, x, bf16, fp16, from_bf16, from_fp16, n);
}

extern "C" cudaError_t basics_order(unsigned *next, int *who)
{
    cudaLaunchConfig_t c = shape(dim3(2, 3, 2), dim3(4, 2, 3));
    return cudaLaunchKernelEx(&c, order, next, who);
}

extern "C" cudaError_t basics_double(cudaStream_t stream, const float *x, float *y, uint64_t n)
{
    cudaLaunchConfig_t c = shape(dim3((unsigned)((n + 63) / 64)), dim3(64));
    c.stream = stream;
    return cudaLaunchKernelEx(&c, twice, x, y, n);
}

extern "C" cudaError_t basics_deep(int steps, int *sum)
{
    cudaLaunchConfig_t c = shape(dim3(1), dim3(1024));
    return cudaLaunchKernelEx(&c, deep_sum, steps, sum);
}
