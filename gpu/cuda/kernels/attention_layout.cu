/* gpu/cuda/kernels/attention_layout.cu - what the library's attention wants in another form.
 *
 * Owns: cuda_attention_ends, cuda_attention_stats. Must not know the library. Nothing is computed:
 * the same bits on every card. */
#include "gpu/cuda/kernels/kern.cuh"

enum { LAYOUT_TILE = 32, LAYOUT_WARPS = KERN_BLOCK / KERN_WARP };

/* first_key never falls, so that the first query above a key that does not see it is found by
 * halving. */
static __global__ void __launch_bounds__(KERN_BLOCK)
    attention_ends_kernel(uint64_t n, uint64_t seq, const int32_t *first_key, int32_t *end)
{
    const uint64_t step = (uint64_t)gridDim.x * KERN_BLOCK;
    for (uint64_t i = (uint64_t)blockIdx.x * KERN_BLOCK + threadIdx.x; i < n; i += step) {
        const uint64_t key = i % seq;
        const int32_t *first = first_key + (i - key);
        uint64_t low = key + 1, high = seq;
        while (low < high) {
            const uint64_t t = low + (high - low) / 2;
            if (first[t] > (int64_t)key) high = t;
            else low = t + 1;
        }
        end[i] = (int32_t)low;
    }
}

cudaError_t cuda_attention_ends(cudaStream_t s, uint64_t n_seq, uint64_t seq,
                                const int32_t *first_key, int32_t *end)
{
    const uint64_t n = n_seq * seq;
    return kern_launch(s, kern_div_up(n, KERN_BLOCK), KERN_BLOCK, attention_ends_kernel, n, seq,
                       first_key, end);
}

/* n matrices [rows][cols] to [cols][rows], by tiles of 32 x 32 through shared memory. */
static __global__ void __launch_bounds__(KERN_BLOCK)
    attention_turn_kernel(uint64_t n, uint64_t rows, uint64_t cols, const float *src, float *dst)
{
    __shared__ float tile[LAYOUT_TILE][LAYOUT_TILE + 1];
    const unsigned lane = threadIdx.x % KERN_WARP, warp = threadIdx.x / KERN_WARP;
    const uint64_t down = (rows + LAYOUT_TILE - 1) / LAYOUT_TILE,
                   across = (cols + LAYOUT_TILE - 1) / LAYOUT_TILE;
    for (uint64_t u = blockIdx.x; u < n * down * across; u += gridDim.x) {
        const uint64_t base = u / (down * across) * rows * cols;
        const uint64_t row = u / across % down * LAYOUT_TILE, col = u % across * LAYOUT_TILE;
        for (unsigned i = warp; i < LAYOUT_TILE; i += LAYOUT_WARPS)
            if (row + i < rows && col + lane < cols)
                tile[i][lane] = src[base + (row + i) * cols + col + lane];
        __syncthreads();
        for (unsigned i = warp; i < LAYOUT_TILE; i += LAYOUT_WARPS)
            if (col + i < cols && row + lane < rows)
                dst[base + (col + i) * rows + row + lane] = tile[lane][i];
        __syncthreads();
    }
}

cudaError_t cuda_attention_stats(cudaStream_t s, const struct cuda_attention_stats *a)
{
    const uint64_t rows = a->by_head ? a->seq : a->heads, cols = a->by_head ? a->heads : a->seq;
    const uint64_t tiles = kern_div_up(rows, LAYOUT_TILE) * kern_div_up(cols, LAYOUT_TILE);
    return kern_launch(s, a->n_seq * tiles, KERN_BLOCK, attention_turn_kernel, a->n_seq, rows, cols,
                       a->src, a->dst);
}
