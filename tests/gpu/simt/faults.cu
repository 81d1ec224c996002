/* tests/gpu/simt/faults.cu */
#include "tests/gpu/simt/faults.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

template <typename T> __device__ inline T warp_sum(T v)
{
    for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

template <typename T> __global__ void __launch_bounds__(128) block_sum(const T *__restrict__ x, T *__restrict__ sums)
{
    __shared__ T part[4];
    T v = warp_sum(x[(uint64_t)blockIdx.x * blockDim.x + threadIdx.x]);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) sums[blockIdx.x] = part[0] + part[1] + part[2] + part[3];
}

cudaLaunchConfig_t shape(uint64_t blocks, unsigned threads)
{
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)blocks);
    c.blockDim = dim3(threads);
    return c;
}

} // namespace

extern "C" void faults_block_sum(const float *x, float *sums, uint64_t blocks)
{
    cudaLaunchConfig_t c = shape(blocks, 128);
    cudaLaunchKernelEx(&c, block_sum<float>, x, sums);
}
