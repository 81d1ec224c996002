/* gpu/cuda/kernels/embed.cu - rows of the embedding table: read by token, and gradients added in
 * token order.
 *
 * Owns: cuda_embed_forward, cuda_embed_backward, its scratch. Backward: (id, token) pairs are
 * sorted (embed_sort.cu), so that the tokens of one id are neighbours in order; who finds the first
 * of an id adds them all, one after the other, as the host does: the same bits. Must not know how
 * the sort works. */
#include "gpu/cuda/kernels/embed_sort.cuh"

template <typename T>
static __global__ void __launch_bounds__(KERN_BLOCK)
    embed_forward_kernel(struct ops_embed a, kern_tiles t)
{
    kern_tiles_each(t, [&](uint64_t token, uint64_t col) {
        const uint64_t n = a.hidden - col;
        float v[8];
        kern_load8_param(a.pt, a.table, (uint64_t)a.ids[token] * a.hidden + col, n, v);
        kern_store8((T *)a.y + token * a.hidden + col, n, v);
    });
}

cudaError_t cuda_embed_forward(cudaStream_t s, const struct ops_embed *a)
{
    const kern_tiles t = kern_tiles_of(a->tokens, a->hidden);
    return kern_with_activation(a->at, [&](auto *y) {
        using T = std::remove_pointer_t<decltype(y)>;
        return kern_launch(s, t.row_tiles * t.col_tiles, KERN_BLOCK, embed_forward_kernel<T>, *a,
                           t);
    });
}

/* Tokens whose rows are on their way at once. */
enum { EMBED_AHEAD = 4, EMBED_SPAN = KERN_WARP * KERN_EIGHT };

/* A warp takes a position of the sorted pairs and 256 columns. */
template <typename T>
static __global__ void __launch_bounds__(KERN_BLOCK)
    embed_backward_kernel(struct ops_embed a, const uint64_t *pairs)
{
    const uint64_t warps = KERN_BLOCK / KERN_WARP, spans = (a.hidden + EMBED_SPAN - 1) / EMBED_SPAN;
    const uint64_t lane = threadIdx.x % KERN_WARP;
    for (uint64_t u = (uint64_t)blockIdx.x * warps + threadIdx.x / KERN_WARP; u < spans * a.tokens;
         u += (uint64_t)gridDim.x * warps) {
        const uint64_t pos = u / spans, col = (u - pos * spans) * EMBED_SPAN + lane * KERN_EIGHT;
        const uint64_t id = embed_pair_id(pairs[pos]);
        if ((pos > 0 && embed_pair_id(pairs[pos - 1]) == id) || col >= a.hidden) continue;
        const uint64_t n = a.hidden - col;
        float *row = a.dtable + id * a.hidden + col, sum[8];
        kern_load8(row, n, sum);
        bool more = true;
        for (uint64_t p = pos; more; p += EMBED_AHEAD) {
            float v[EMBED_AHEAD][8];
            bool in[EMBED_AHEAD];
            KERN_UNROLL
            for (int k = 0; k < EMBED_AHEAD; k++) {
                in[k] = p + k < a.tokens && embed_pair_id(pairs[p + k]) == id;
                if (in[k])
                    kern_load8((const T *)a.dy + embed_pair_token(pairs[p + k]) * a.hidden + col, n,
                               v[k]);
            }
            KERN_UNROLL
            for (int k = 0; k < EMBED_AHEAD; k++) {
                if (!in[k]) continue;
                KERN_UNROLL
                for (int e = 0; e < 8; e++) sum[e] = sum[e] + v[k][e];
            }
            more = in[EMBED_AHEAD - 1];
        }
        kern_store8(row, n, sum);
    }
}

uint64_t cuda_embed_backward_scratch(const struct ops_embed *a)
{
    return embed_sort_scratch(a->tokens);
}

cudaError_t cuda_embed_backward(cudaStream_t s, const struct ops_embed *a,
                                const struct ops_scratch *scratch)
{
    const uint64_t *pairs = nullptr;
    const cudaError_t e = embed_sort(s, a->ids, a->tokens, scratch, &pairs);
    if (e != cudaSuccess) return e;
    const uint64_t units = kern_div_up(a->hidden, EMBED_SPAN) * a->tokens;
    return kern_with_activation(a->at, [&](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        return kern_launch(s, kern_div_up(units, KERN_BLOCK / KERN_WARP), KERN_BLOCK,
                           embed_backward_kernel<T>, *a, pairs);
    });
}
