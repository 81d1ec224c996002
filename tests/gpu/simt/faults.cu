/* tests/gpu/simt/faults.cu - the kernels of faults.h. Every one is a template with its fault as a parameter,
 * so that the right and the wrong version differ in nothing else. Compiled by the executor's rules and by nvcc.
 *
 * Knows nothing of the executor. */
#include "tests/gpu/simt/faults.h"
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

constexpr unsigned THREADS = 64;
constexpr unsigned ALL = 0xffffffffu;

__device__ inline uint64_t element() { return (uint64_t)blockIdx.x * THREADS + threadIdx.x; }
__device__ inline float load(const faults_args &a, uint64_t i) { return i < a.n ? a.x[i] : 0.0f; }

template <bool WRONG> __global__ void __launch_bounds__(64) tree_sum(faults_args a)
{
    __shared__ float part[THREADS];
    unsigned t = threadIdx.x;
    part[t] = load(a, element());
    __syncthreads();
    for (unsigned d = THREADS / 2; d > 0; d /= 2) {
        if (t < d) part[t] = __fadd_rn(part[t], part[t + d]);
        if (!WRONG) __syncthreads();
    }
    if (t == 0) a.y[blockIdx.x] = part[0];
}

template <bool WRONG> __global__ void neighbour(faults_args a)
{
    __shared__ float tile[THREADS];
    tile[threadIdx.x] = load(a, element());
    if (!WRONG) __syncthreads();
    if (element() < a.n) a.y[element()] = tile[(threadIdx.x + 1) % THREADS];
}

template <bool WRONG> __global__ void reuse(faults_args a)
{
    __shared__ float tile[THREADS];
    float sum = 0.0f;
    for (int pass = 0; pass < 3; pass++) {
        tile[threadIdx.x] = load(a, element() + (unsigned)pass);
        __syncthreads();
        sum += tile[THREADS - 1 - threadIdx.x];
        if (!WRONG) __syncthreads();
    }
    if (element() < a.n) a.y[element()] = sum;
}

template <bool WRONG> __global__ void counter(faults_args a)
{
    __shared__ float total;
    if (threadIdx.x == 0) total = 0.0f;
    __syncthreads();
    if (WRONG) total += load(a, element());
    else atomicAdd(&total, load(a, element()));
    __syncthreads();
    if (threadIdx.x == 0) a.y[blockIdx.x] = total;
}

template <bool WRONG> __global__ void counter_start(faults_args a)
{
    if (threadIdx.x == 0) a.y[blockIdx.x] = 0.0f;
    if (!WRONG) __syncthreads();
    if (WRONG && threadIdx.x == 0) atomicAdd(&a.y[blockIdx.x], 0.0f); /* its own: no fault, and hides none */
    if (threadIdx.x == 0 || a.y[blockIdx.x] >= 0.0f || true) atomicAdd(&a.y[blockIdx.x], load(a, element()));
}

template <bool WRONG> __global__ void after_end(faults_args a)
{
    uint64_t i = element();
    if (i < a.n + WRONG) a.y[i] = a.x[i];
}

template <bool WRONG> __global__ void before_start(faults_args a)
{
    uint64_t i = element();
    if (i < a.n && (WRONG || i > 0)) a.y[i] = a.x[i - 1];
}

struct SIMT_THREE { float v[3]; };
template <bool WRONG> __global__ void struct_end(faults_args a)
{
    uint64_t i = element() * 3;
    if (WRONG ? i < a.n : i + 3 <= a.n) reinterpret_cast<SIMT_THREE *>(a.y)[element()] = SIMT_THREE{ { 1.0f, 2.0f, 3.0f } };
}

template <bool WRONG> __global__ void tile_index(faults_args a)
{
    __shared__ float tile[THREADS], other[THREADS];
    other[threadIdx.x] = 1.0f;
    tile[threadIdx.x] = load(a, element());
    __syncthreads();
    if (element() < a.n) a.y[element()] = tile[threadIdx.x + WRONG] + other[threadIdx.x];
}

template <bool WRONG> __global__ void unwritten_tile(faults_args a)
{
    __shared__ float tile[THREADS];
    if (!WRONG || threadIdx.x != 7) tile[threadIdx.x] = load(a, element());
    __syncthreads();
    if (element() < a.n) a.y[element()] = tile[THREADS - 1 - threadIdx.x];
}

template <bool WRONG> __global__ void unwritten_input(faults_args a)
{
    uint64_t i = element() + (WRONG ? 1 : 0); /* x[n] is there and not written */
    if (element() < a.n) a.y[element()] = a.x[i];
}

template <bool WRONG> __global__ void two_blocks(faults_args a)
{
    if (threadIdx.x == 0) a.y[WRONG ? blockIdx.x / 2 : blockIdx.x] = load(a, element());
}

template <bool WRONG> __global__ void divergent(faults_args a)
{
    __shared__ float tile[THREADS];
    tile[threadIdx.x] = load(a, element());
    if (WRONG) {
        if (threadIdx.x < 32) __syncthreads();
    }
    __syncthreads();
    if (element() < a.n) a.y[element()] = tile[THREADS - 1 - threadIdx.x];
}

template <bool WRONG> __global__ void early_end(faults_args a)
{
    __shared__ float tile[THREADS];
    if (WRONG && element() >= a.n) return;
    tile[threadIdx.x] = load(a, element());
    __syncthreads();
    if (element() < a.n) a.y[element()] = tile[threadIdx.x ^ 1];
}

template <bool WRONG> __global__ void absent_lane(faults_args a)
{
    float v = load(a, element());
    if (threadIdx.x % 32 < 16) v += __shfl_xor_sync(WRONG ? ALL : 0xffffu, v, 8);
    if (element() < a.n) a.y[element()] = v;
}

template <bool WRONG> __global__ void other_mask(faults_args a)
{
    float v = load(a, element());
    v += __shfl_xor_sync(WRONG && threadIdx.x % 2 ? 0xfffffffeu : ALL, v, 2);
    if (element() < a.n) a.y[element()] = v;
}

template <bool WRONG> __global__ void foreign_lane(faults_args a)
{
    float v = load(a, element());
    if (threadIdx.x % 32 < 16) v += __shfl_xor_sync(0xffffu, v, WRONG ? 16 : 8);
    if (element() < a.n) a.y[element()] = v;
}

template <bool WRONG> __global__ void warp_pass(faults_args a)
{
    __shared__ float tile[THREADS];
    unsigned warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    for (unsigned step = 0; step < 4; step++) {
        tile[warp + lane] = load(a, element() + step);
        if (!WRONG) __syncwarp();
        float v = tile[warp + (lane + step) % 32];
        __syncwarp();
        if (step == 3 && element() < a.n) a.y[element()] = v;
    }
}

template <bool WRONG> __global__ void copy(faults_args a)
{
    if (element() < a.n) a.y[element()] = a.x[element()];
}

template <bool WRONG> __global__ void misaligned(faults_args a)
{
    uint64_t i = element() * 4;
    if (i + 4 < a.n) {
        float4 v = *reinterpret_cast<const float4 *>(a.x + i + WRONG);
        v.x += v.w;
        *reinterpret_cast<float4 *>(a.y + i) = v;
    }
}

template <bool WRONG> __global__ void copy_end(faults_args a)
{
    if (element() == 0) memcpy(a.y, a.x, (a.n + WRONG) * sizeof *a.x);
}

template <bool WRONG> __global__ void constant(faults_args a)
{
    uint64_t i = element();
    if (i < a.n) (WRONG ? const_cast<float *>(a.x) : a.y)[i] = 1.0f;
}

template <bool WRONG> __global__ void local_memory(faults_args a)
{
    __shared__ const float *from;
    float mine[2] = { load(a, element()), 1.0f };
    if (threadIdx.x == 0) from = WRONG ? mine : a.x;
    __syncthreads();
    if (element() < a.n) a.y[element()] = *from + mine[threadIdx.x & 1];
    __syncthreads();
}

template <bool WRONG> __global__ void overflow(faults_args a)
{
    int large = 0x7fffffff - 40 - (WRONG ? 0 : 100), i = (int)threadIdx.x;
    if (element() < a.n) a.y[element()] = (float)(large + i);
}

/* ptxas refuses the wrong version by itself. */
#ifdef __CUDACC__
constexpr unsigned TOO_MANY = 12288;
#else
constexpr unsigned TOO_MANY = 12289;
#endif
template <bool WRONG> __global__ void large_shared(faults_args a)
{
    constexpr unsigned count = WRONG ? TOO_MANY : 12288; /* 48 KiB */
    __shared__ float tile[count];
    for (unsigned i = threadIdx.x; i < count; i += THREADS) tile[i] = load(a, i % THREADS);
    __syncthreads();
    if (element() < a.n) a.y[element()] = tile[count - 1 - threadIdx.x];
}

/* Neighbours in one word: no fault of the right version. */
template <bool WRONG> __global__ void halves(faults_args a)
{
    uint64_t i = element();
    __nv_bfloat16 *y = reinterpret_cast<__nv_bfloat16 *>(a.y);
    if (i < a.n) y[WRONG && i == 9 ? 8 : i] = __float2bfloat16(a.x[i]);
    unsigned char *bytes = reinterpret_cast<unsigned char *>(a.y + a.n) - 1;
    if (threadIdx.x < 3 && blockIdx.x == 0) bytes[-(int)threadIdx.x] = (unsigned char)threadIdx.x;
}

template <typename K> int launch(K kernel, const faults_args &a, unsigned threads)
{
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)((a.n + THREADS - 1) / THREADS));
    c.blockDim = dim3(threads);
    return cudaLaunchKernelEx(&c, kernel, a);
}

template <bool WRONG> int launch_one(enum faults_kernel which, const faults_args &a)
{
    switch (which) {
    case FAULTS_host_pointer:
    case FAULTS_freed: return launch(copy<WRONG>, a, THREADS);
    case FAULTS_large_block: return launch(copy<WRONG>, a, WRONG ? 1056 : THREADS);
#define ONE(name)                                                                                  \
    case FAULTS_##name: return launch(name<WRONG>, a, THREADS);
    ONE(tree_sum) ONE(neighbour) ONE(reuse) ONE(counter) ONE(counter_start) ONE(after_end) ONE(before_start)
    ONE(struct_end) ONE(tile_index) ONE(unwritten_tile) ONE(unwritten_input) ONE(two_blocks) ONE(divergent)
    ONE(early_end) ONE(absent_lane) ONE(other_mask) ONE(foreign_lane) ONE(warp_pass) ONE(misaligned) ONE(copy_end)
    ONE(constant) ONE(local_memory) ONE(overflow) ONE(halves) ONE(large_shared)
    default: return cudaErrorInvalidValue;
    }
}

} // namespace

extern "C" int faults_launch(enum faults_kernel which, bool wrong, const struct faults_args *a)
{
    return wrong ? launch_one<true>(which, *a) : launch_one<false>(which, *a);
}
