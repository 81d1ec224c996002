/* gpu/cuda/kernels/attention_forward.cu - causal attention by own tiles, forward: for shapes that
 * the library does not have.
 *
 * Owns: cuda_attention_forward. FlashAttention (Dao 2022, algorithm 1) with the online softmax of
 * Milakov & Gimelshein 2018: a block takes 64 queries of a head and goes over the keys they see by
 * 64, ascending; fp32 inside. Tiles with many keys come first in the grid. No T x T matrix, no
 * scratch, no order between blocks. */
#include "gpu/cuda/kernels/attention.cuh"

/* Scores become exp(s - m) with the new maximum m; sums grow; returns by what all before fades.
 * Rows are shared by the 16 threads of one ty. */
KERN_DEVICE void softmax_step(float (&s)[4][4], float (&m)[4], float (&l)[4], float (&fade)[4])
{
    KERN_UNROLL
    for (int i = 0; i < 4; i++) {
        float top = s[i][0];
        KERN_UNROLL
        for (int j = 1; j < 4; j++) top = s[i][j] > top ? s[i][j] : top;
        top = kern_lanes_max<16>(top);
        top = top > m[i] ? top : m[i];
        float sum = 0;
        KERN_UNROLL
        for (int j = 0; j < 4; j++) {
            s[i][j] = kern_exp_softmax(s[i][j] - top);
            sum = sum + s[i][j];
        }
        fade[i] = kern_exp_softmax(m[i] - top);
        l[i] = l[i] * fade[i] + kern_lanes_sum<16>(sum);
        m[i] = top;
    }
}

/* One tile of queries. pieces: of 64 dimensions. */
template <typename T, int pieces>
KERN_DEVICE void forward_tile(const struct ops_attention &a, uint64_t seq, uint64_t head,
                              uint64_t tile, float (*stage)[ATT_LD], float (*probs)[ATT_LD],
                              int32_t *first)
{
    const att_thread me = att_me();
    const uint64_t t0 = tile * ATT_TILE, row = seq * a.seq + t0, dims = a.head_dim;
    const unsigned nq = (unsigned)kern_least(a.seq - t0, ATT_TILE);
    const uint64_t kv = head / (a.heads / a.kv_heads) * dims, end = t0 + nq;
    const int32_t low = att_first_keys(a.first_key + row, nq, first);
    const att_rows q = { row * a.q_stride + head * dims, a.q_stride, nq };
    float o[pieces][4][4] = { { { 0 } } }, m[4], l[4] = { 0 };
    KERN_UNROLL
    for (int i = 0; i < 4; i++) m[i] = -FLT_MAX;
    for (uint64_t key = (uint64_t)low / ATT_TILE * ATT_TILE; key < end; key += ATT_TILE) {
        const unsigned nk = (unsigned)kern_least(end - key, ATT_TILE);
        const uint64_t at = seq * a.seq + key;
        const att_rows k = { at * a.k_stride + kv, a.k_stride, nk };
        const att_rows v = { at * a.v_stride + kv, a.v_stride, nk };
        float s[4][4], fade[4];
        att_scores((const T *)a.q, q, (const T *)a.k, k, dims, a.scale, me, stage, s);
        KERN_UNROLL
        for (int i = 0; i < 4; i++) {
            const int64_t t = (int64_t)(t0 + 4 * me.ty + i), from = first[4 * me.ty + i];
            KERN_UNROLL
            for (int j = 0; j < 4; j++) {
                const int64_t at_key = (int64_t)(key + 4 * me.tx + j);
                s[i][j] = from <= at_key && at_key <= t ? s[i][j] : -INFINITY;
            }
        }
        softmax_step(s, m, l, fade);
        /* Read as A by the products below: [key][query]. */
        KERN_UNROLL
        for (int j = 0; j < 4; j++)
            *(float4 *)&probs[4 * me.tx + j][4 * me.ty] =
                make_float4(s[0][j], s[1][j], s[2][j], s[3][j]);
        KERN_UNROLL
        for (int p = 0; p < pieces; p++) {
            KERN_UNROLL
            for (int i = 0; i < 4; i++) {
                KERN_UNROLL
                for (int j = 0; j < 4; j++) o[p][i][j] = o[p][i][j] * fade[i];
            }
            if ((uint64_t)p * ATT_COLS >= dims) continue;
            __syncthreads();
            att_stage_rows((const T *)a.v, v, (uint64_t)p * ATT_COLS, dims, stage);
            __syncthreads();
            att_product<ATT_TILE>(probs, stage, me, o[p]);
        }
    }
    float factor[4];
    KERN_UNROLL
    for (int i = 0; i < 4; i++) {
        const unsigned t = 4 * me.ty + i;
        factor[i] = l[i] == 0 ? 0.0f : __fdiv_rn(1.0f, l[i]);
        if (me.tx == 0 && t < nq)
            a.lse[(row + t) * a.heads + head] = l[i] == 0 ? -INFINITY : m[i] + logf(l[i]);
    }
    const att_rows out = { row * a.o_stride + head * dims, a.o_stride, nq };
    KERN_UNROLL
    for (int p = 0; p < pieces; p++)
        att_store_tile((T *)a.o, out, (uint64_t)p * ATT_COLS, dims, me, o[p], factor);
}

template <typename T, int pieces>
static __global__ void __launch_bounds__(KERN_BLOCK)
    attention_forward_kernel(struct ops_attention a)
{
    __shared__ __align__(16) float stage[ATT_TILE][ATT_LD];
    __shared__ __align__(16) float probs[ATT_TILE][ATT_LD];
    __shared__ int32_t first[ATT_TILE];
    const uint64_t tiles = (a.seq + ATT_TILE - 1) / ATT_TILE, per = a.n_seq * a.heads;
    for (uint64_t u = blockIdx.x; u < tiles * per; u += gridDim.x) {
        const uint64_t tile = tiles - 1 - u / per, which = u % per;
        forward_tile<T, pieces>(a, which / a.heads, which % a.heads, tile, stage, probs, first);
        __syncthreads();
    }
}

cudaError_t cuda_attention_forward(cudaStream_t s, const struct ops_attention *a)
{
    if (a->head_dim > ATT_DIM_MAX) return cudaErrorInvalidValue;
    const uint64_t units = kern_div_up(a->seq, ATT_TILE) * a->n_seq * a->heads;
    return kern_with_activation(a->at, [&](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        return att_with_pieces(a->head_dim, [&](auto pieces) {
            return kern_launch(s, units, KERN_BLOCK,
                               attention_forward_kernel<T, decltype(pieces)::value>, *a);
        });
    });
}
