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

struct turn {
    uint64_t n, rows, cols;
    uint64_t src_ld, src_step, dst_ld, dst_step; /* from row to row, from matrix to matrix */
    const float *src;
    float *dst;
};

/* n matrices [rows][cols] to [cols][rows], by tiles of 32 x 32 through shared memory. */
static __global__ void __launch_bounds__(KERN_BLOCK) attention_turn_kernel(turn a)
{
    __shared__ float tile[LAYOUT_TILE][LAYOUT_TILE + 1];
    const unsigned lane = threadIdx.x % KERN_WARP, warp = threadIdx.x / KERN_WARP;
    const uint64_t down = (a.rows + LAYOUT_TILE - 1) / LAYOUT_TILE,
                   across = (a.cols + LAYOUT_TILE - 1) / LAYOUT_TILE;
    for (uint64_t u = blockIdx.x; u < a.n * down * across; u += gridDim.x) {
        const uint64_t which = u / (down * across);
        const float *src = a.src + which * a.src_step;
        float *dst = a.dst + which * a.dst_step;
        const uint64_t row = u / across % down * LAYOUT_TILE, col = u % across * LAYOUT_TILE;
        for (unsigned i = warp; i < LAYOUT_TILE; i += LAYOUT_WARPS)
            if (row + i < a.rows && col + lane < a.cols)
                tile[i][lane] = src[(row + i) * a.src_ld + col + lane];
        __syncthreads();
        for (unsigned i = warp; i < LAYOUT_TILE; i += LAYOUT_WARPS)
            if (col + i < a.cols && row + lane < a.rows)
                dst[(col + i) * a.dst_ld + row + lane] = tile[lane][i];
        __syncthreads();
    }
}

cudaError_t cuda_attention_stats(cudaStream_t s, const struct cuda_attention_stats *a)
{
    const uint64_t by_token = a->seq * a->token_heads, by_head = a->heads * a->seq;
    const turn to_heads = { a->n_seq, a->seq, a->heads, a->token_heads, by_token,
                            a->seq,   by_head, a->src,   a->dst };
    const turn to_tokens = { a->n_seq,       a->heads, a->seq, a->seq, by_head,
                             a->token_heads, by_token, a->src, a->dst };
    const uint64_t tiles = kern_div_up(a->heads, LAYOUT_TILE) * kern_div_up(a->seq, LAYOUT_TILE);
    return kern_launch(s, a->n_seq * tiles, KERN_BLOCK, attention_turn_kernel,
                       a->by_head ? to_heads : to_tokens);
}
