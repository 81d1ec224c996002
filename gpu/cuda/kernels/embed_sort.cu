/* gpu/cuda/kernels/embed_sort.cu - sorts tokens by (id, token).
 *
 * Owns: embed_sort. Pieces of 2048 pairs are sorted in shared memory by a bitonic network (Batcher
 * 1968); then runs are merged two by two, each element finding its place by its rank in the other
 * run (binary search), until one is left: O(n log^2 n), no counters that threads share. Pairs all
 * differ, so that the result is one whatever the order of execution. */
#include "gpu/cuda/kernels/embed_sort.cuh"

enum { SORT_PIECE = 2048 };

static __global__ void __launch_bounds__(KERN_BLOCK)
    sort_pieces_kernel(const int32_t *ids, uint64_t tokens, uint64_t *out)
{
    __shared__ uint64_t piece[SORT_PIECE];
    const uint64_t pieces = (tokens + SORT_PIECE - 1) / SORT_PIECE;
    for (uint64_t b = blockIdx.x; b < pieces; b += gridDim.x) {
        const uint64_t first = b * SORT_PIECE;
        for (unsigned i = threadIdx.x; i < SORT_PIECE; i += KERN_BLOCK) {
            const uint64_t t = first + i;
            piece[i] = t < tokens ? (uint64_t)(uint32_t)ids[t] << 32 | t : ~(uint64_t)0;
        }
        __syncthreads();
        for (unsigned size = 2; size <= SORT_PIECE; size *= 2)
            for (unsigned gap = size / 2; gap > 0; gap /= 2) {
                for (unsigned k = threadIdx.x; k < SORT_PIECE / 2; k += KERN_BLOCK) {
                    const unsigned low = k / gap * (2 * gap) + k % gap, high = low + gap;
                    const uint64_t x = piece[low], y = piece[high];
                    const bool up = (low & size) == 0;
                    if ((x > y) == up) piece[low] = y, piece[high] = x;
                }
                __syncthreads();
            }
        for (unsigned i = threadIdx.x; i < SORT_PIECE && first + i < tokens; i += KERN_BLOCK)
            out[first + i] = piece[i];
        __syncthreads();
    }
}

/* Runs of `width` sorted pairs (the last shorter) become runs of twice that. */
static __global__ void __launch_bounds__(KERN_BLOCK)
    sort_merge_kernel(const uint64_t *in, uint64_t tokens, uint64_t width, uint64_t *out)
{
    const uint64_t step = (uint64_t)gridDim.x * KERN_BLOCK;
    for (uint64_t i = (uint64_t)blockIdx.x * KERN_BLOCK + threadIdx.x; i < tokens; i += step) {
        const uint64_t run = i / width, both = (run & ~(uint64_t)1) * width;
        const uint64_t other = (run ^ 1) * width, pair = in[i];
        uint64_t low = other < tokens ? other : tokens;
        const uint64_t start = low, end = tokens - low < width ? tokens : low + width;
        for (uint64_t high = end; low < high;) {
            const uint64_t middle = low + (high - low) / 2;
            if (in[middle] < pair) low = middle + 1;
            else high = middle;
        }
        out[both + (i - run * width) + (low - start)] = pair;
    }
}

uint64_t embed_sort_scratch(uint64_t tokens) { return 2 * tokens * sizeof(uint64_t); }

cudaError_t embed_sort(cudaStream_t s, const int32_t *ids, uint64_t tokens,
                       const struct ops_scratch *scratch, const uint64_t **pairs)
{
    uint64_t *from = (uint64_t *)scratch->base, *to = from + tokens;
    cudaError_t e = kern_launch(s, kern_div_up(tokens, SORT_PIECE), KERN_BLOCK, sort_pieces_kernel,
                                ids, tokens, from);
    for (uint64_t width = SORT_PIECE; e == cudaSuccess && width < tokens; width *= 2) {
        e = kern_launch(s, kern_div_up(tokens, KERN_BLOCK), KERN_BLOCK, sort_merge_kernel,
                        (const uint64_t *)from, tokens, width, to);
        uint64_t *t = from;
        from = to;
        to = t;
    }
    *pairs = from;
    return e;
}
