/* gpu/cuda/kernels/column_sum.cu - sums over rows, column by column, in two fixed stages.
 *
 * Owns: cuda_column_sum (gradient of a bias) and the second stage, which the norm's weight gradient
 * shares (parts.cuh). First stage: a block takes a part of the rows of 256 columns, its eight warps
 * every eighth row; the warps' sums are added in order. Second stage: 8 threads a column take every
 * eighth part and are added in order. Everything fp32, as gpu/ops.h says. */
#include "gpu/cuda/kernels/parts.cuh"

enum { WARPS = KERN_BLOCK / KERN_WARP, SPAN = KERN_WARP * KERN_EIGHT };

template <typename T>
static __global__ void __launch_bounds__(KERN_BLOCK)
    column_sum_kernel(struct cuda_column_sum a, uint64_t part_rows, uint64_t parts, float *out)
{
    __shared__ float sums[WARPS][SPAN];
    const unsigned lane = threadIdx.x % KERN_WARP, warp = threadIdx.x / KERN_WARP;
    const uint64_t spans = (a.cols + SPAN - 1) / SPAN;
    for (uint64_t b = blockIdx.x; b < spans * parts; b += gridDim.x) {
        const uint64_t part = b / spans, first = (b - part * spans) * SPAN;
        const uint64_t col = first + lane * KERN_EIGHT;
        const uint64_t end = kern_least((part + 1) * part_rows, a.rows);
        float sum[8] = { 0 };
        for (uint64_t r = part * part_rows + warp; r < end && col < a.cols; r += WARPS) {
            float v[8];
            kern_load8((const T *)a.src + r * a.ld + col, a.cols - col, v);
            KERN_UNROLL
            for (int e = 0; e < 8; e++) sum[e] = sum[e] + v[e];
        }
        KERN_UNROLL
        for (int e = 0; e < 8; e++) sums[warp][lane * KERN_EIGHT + e] = sum[e];
        __syncthreads();
        if (first + threadIdx.x < a.cols) {
            float x = sums[0][threadIdx.x];
            KERN_UNROLL
            for (int w = 1; w < WARPS; w++) x = x + sums[w][threadIdx.x];
            out[part * a.cols + first + threadIdx.x] = x;
        }
        __syncthreads();
    }
}

static __global__ void __launch_bounds__(KERN_BLOCK)
    parts_sum_kernel(const float *part, uint64_t parts, uint64_t cols, float *dst, bool overwrite)
{
    __shared__ float sums[WARPS][KERN_WARP];
    const unsigned lane = threadIdx.x % KERN_WARP, warp = threadIdx.x / KERN_WARP;
    const uint64_t spans = (cols + KERN_WARP - 1) / KERN_WARP;
    for (uint64_t b = blockIdx.x; b < spans; b += gridDim.x) {
        const uint64_t col = b * KERN_WARP + lane;
        float sum = 0;
        if (col < cols) {
            KERN_UNROLL_8
            for (uint64_t p = warp; p < parts; p += WARPS) sum = sum + part[p * cols + col];
        }
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && col < cols) {
            float x = sums[0][lane];
            KERN_UNROLL
            for (int w = 1; w < WARPS; w++) x = x + sums[w][lane];
            dst[col] = overwrite ? x : dst[col] + x;
        }
        __syncthreads();
    }
}

cudaError_t kern_parts_sum(cudaStream_t s, const float *part, uint64_t parts, uint64_t cols,
                           float *dst, bool overwrite)
{
    return kern_launch(s, kern_div_up(cols, KERN_WARP), KERN_BLOCK, parts_sum_kernel, part, parts,
                       cols, dst, overwrite);
}

uint64_t cuda_column_sum_scratch(const struct cuda_column_sum *a)
{
    return kern_parts_of(a->rows, WARPS) * a->cols * sizeof(float);
}

cudaError_t cuda_column_sum(cudaStream_t s, const struct cuda_column_sum *a)
{
    const uint64_t part_rows = kern_part_rows(a->rows, WARPS),
                   parts = kern_parts_of(a->rows, WARPS), spans = kern_div_up(a->cols, SPAN);
    float *part = (float *)a->scratch.base;
    const cudaError_t e = kern_with_any(a->from, [&](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        return kern_launch(s, spans * parts, KERN_BLOCK, column_sum_kernel<T>, *a, part_rows, parts,
                           part);
    });
    return e != cudaSuccess ? e : kern_parts_sum(s, part, parts, a->cols, a->dst, a->overwrite);
}
