/* gpu/cuda/kernels/attention_backward.cu - causal attention by own tiles, backward.
 *
 * Owns: cuda_attention_backward, its scratch. FlashAttention (Dao 2022, algorithm 4) in three
 * kernels without atomics: delta = sum over d of d_o * o; dq by tiles of queries, over keys
 * ascending; dk and dv by tiles of keys, over heads of the group, then queries, ascending. Scores
 * are computed once more in each: that costs 7 products where atomics would need 5, and keeps one
 * order. fp32 inside, rounded on store. */
#include "gpu/cuda/kernels/attention.cuh"

/* dk and dv of so many dimensions stay in registers; wider heads are split between blocks. */
enum { BACK_PIECES = 2, BACK_DIMS = BACK_PIECES * ATT_COLS };

/* A warp takes a token's head. */
template <typename T, typename G>
static __global__ void __launch_bounds__(KERN_BLOCK)
    attention_delta_kernel(struct ops_attention a, float *delta)
{
    const uint64_t warps = KERN_BLOCK / KERN_WARP, rows = a.n_seq * a.seq * a.heads;
    const unsigned lane = threadIdx.x % KERN_WARP;
    for (uint64_t u = (uint64_t)blockIdx.x * warps + threadIdx.x / KERN_WARP; u < rows;
         u += (uint64_t)gridDim.x * warps) {
        const uint64_t at = u / a.heads * a.o_stride + u % a.heads * a.head_dim;
        float sum = 0;
        for (uint64_t d = lane * KERN_EIGHT; d < a.head_dim; d += KERN_WARP * KERN_EIGHT) {
            float o[8], g[8];
            kern_load8((const T *)a.o + at + d, a.head_dim - d, o);
            kern_load8((const G *)a.d_o + at + d, a.head_dim - d, g);
            KERN_UNROLL
            for (int e = 0; e < 8; e++) sum = __fmaf_rn(g[e], o[e], sum);
        }
        sum = kern_lanes_sum<KERN_WARP>(sum);
        if (lane == 0) delta[u] = sum;
    }
}

/* A tile of queries of one head against one of keys. */
struct back_tile {
    uint64_t t0, key;         /* first of each, inside the sequence */
    att_rows q, o, k, v;      /* rows of q; of o and d_o; of k; of v */
    const float *lse, *delta; /* of row 0; rows are `heads` apart */
    uint64_t heads;
};

KERN_DEVICE back_tile back_open(const struct ops_attention &a, uint64_t seq, uint64_t head,
                                uint64_t t0, uint64_t key, const float *delta)
{
    const uint64_t row = seq * a.seq + t0, at = seq * a.seq + key;
    const uint64_t kv = head / (a.heads / a.kv_heads) * a.head_dim;
    const unsigned nq = (unsigned)kern_least(a.seq - t0, ATT_TILE);
    const unsigned nk = (unsigned)kern_least(a.seq - key, ATT_TILE);
    back_tile b;
    b.t0 = t0, b.key = key, b.heads = a.heads;
    b.q = att_rows{ row * a.q_stride + head * a.head_dim, a.q_stride, nq };
    b.o = att_rows{ row * a.o_stride + head * a.head_dim, a.o_stride, nq };
    b.k = att_rows{ at * a.k_stride + kv, a.k_stride, nk };
    b.v = att_rows{ at * a.v_stride + kv, a.v_stride, nk };
    b.lse = a.lse + row * a.heads + head;
    b.delta = delta + row * a.heads + head;
    return b;
}

/* p = exp(s - lse) where the key is seen, ds = p (dp - delta), of elements [4 ty + i] (query) [4 tx
 * + j] (key). */
template <typename T, typename G>
KERN_DEVICE void back_scores(const struct ops_attention &a, const back_tile &b, att_thread me,
                             const int32_t *first, float (*stage)[ATT_LD], float (&p)[4][4],
                             float (&ds)[4][4])
{
    att_scores((const T *)a.q, b.q, (const T *)a.k, b.k, a.head_dim, a.scale, me, stage, p);
    att_scores((const G *)a.d_o, b.o, (const T *)a.v, b.v, a.head_dim, 1.0f, me, stage, ds);
    KERN_UNROLL
    for (int i = 0; i < 4; i++) {
        const unsigned row = 4 * me.ty + i;
        const bool real = row < b.q.rows;
        const float lse = real ? b.lse[row * b.heads] : 0.0f;
        const float delta = real ? b.delta[row * b.heads] : 0.0f;
        const int64_t t = (int64_t)(b.t0 + row), from = first[row];
        KERN_UNROLL
        for (int j = 0; j < 4; j++) {
            const int64_t key = (int64_t)(b.key + 4 * me.tx + j);
            const bool seen = from <= key && key <= t;
            p[i][j] = seen ? kern_exp_softmax(p[i][j] - lse) : 0.0f;
            ds[i][j] = p[i][j] * (ds[i][j] - delta);
        }
    }
}

template <typename T, typename G, int pieces>
static __global__ void __launch_bounds__(KERN_BLOCK)
    attention_dq_kernel(struct ops_attention a, const float *delta)
{
    __shared__ __align__(16) float stage[ATT_TILE][ATT_LD];
    __shared__ __align__(16) float grads[ATT_TILE][ATT_LD]; /* dS^T: [key][query] */
    __shared__ int32_t first[ATT_TILE];
    const att_thread me = att_me();
    const uint64_t tiles = (a.seq + ATT_TILE - 1) / ATT_TILE, per = a.n_seq * a.heads;
    for (uint64_t u = blockIdx.x; u < tiles * per; u += gridDim.x) {
        const uint64_t t0 = (tiles - 1 - u / per) * ATT_TILE, which = u % per;
        const uint64_t seq = which / a.heads, head = which % a.heads, row = seq * a.seq + t0;
        const unsigned nq = (unsigned)kern_least(a.seq - t0, ATT_TILE);
        const int32_t low = att_first_keys(a.first_key + row, nq, first);
        float dq[pieces][4][4] = { { { 0 } } };
        for (uint64_t key = (uint64_t)low / ATT_TILE * ATT_TILE; key < t0 + nq; key += ATT_TILE) {
            const back_tile b = back_open(a, seq, head, t0, key, delta);
            float p[4][4], ds[4][4];
            back_scores<T, G>(a, b, me, first, stage, p, ds);
            KERN_UNROLL
            for (int j = 0; j < 4; j++)
                *(float4 *)&grads[4 * me.tx + j][4 * me.ty] =
                    make_float4(ds[0][j], ds[1][j], ds[2][j], ds[3][j]);
            KERN_UNROLL
            for (int c = 0; c < pieces; c++) {
                if ((uint64_t)c * ATT_COLS >= a.head_dim) continue;
                __syncthreads();
                att_stage_rows((const T *)a.k, b.k, (uint64_t)c * ATT_COLS, a.head_dim, stage);
                __syncthreads();
                att_product<ATT_TILE>(grads, stage, me, dq[c]);
            }
        }
        const att_rows out = { row * a.q_stride + head * a.head_dim, a.q_stride, nq };
        const float factor[4] = { a.scale, a.scale, a.scale, a.scale };
        KERN_UNROLL
        for (int c = 0; c < pieces; c++)
            att_store_tile((G *)a.dq, out, (uint64_t)c * ATT_COLS, a.head_dim, me, dq[c], factor);
        __syncthreads();
    }
}

/* dk and dv of a tile of keys from one tile of queries; dims from dim0 on. `tile`: P, then dS, as
 * [query][key]. */
template <typename T, typename G, int pieces>
KERN_DEVICE void back_add_keys(const struct ops_attention &a, const back_tile &b, uint64_t dim0,
                               const int32_t *first, float (*stage)[ATT_LD], float (*tile)[ATT_LD],
                               float (&dk)[pieces][4][4], float (&dv)[pieces][4][4])
{
    const att_thread me = att_me();
    float p[4][4], ds[4][4];
    back_scores<T, G>(a, b, me, first, stage, p, ds);
    KERN_UNROLL
    for (int i = 0; i < 4; i++)
        *(float4 *)&tile[4 * me.ty + i][4 * me.tx] =
            make_float4(p[i][0], p[i][1], p[i][2], p[i][3]);
    KERN_UNROLL
    for (int c = 0; c < pieces; c++) {
        const uint64_t dim = dim0 + (uint64_t)c * ATT_COLS;
        if (dim >= a.head_dim) continue;
        __syncthreads();
        att_stage_rows((const G *)a.d_o, b.o, dim, a.head_dim, stage);
        __syncthreads();
        att_product<ATT_TILE>(tile, stage, me, dv[c]);
    }
    __syncthreads();
    KERN_UNROLL
    for (int i = 0; i < 4; i++)
        *(float4 *)&tile[4 * me.ty + i][4 * me.tx] =
            make_float4(ds[i][0], ds[i][1], ds[i][2], ds[i][3]);
    KERN_UNROLL
    for (int c = 0; c < pieces; c++) {
        const uint64_t dim = dim0 + (uint64_t)c * ATT_COLS;
        if (dim >= a.head_dim) continue;
        __syncthreads();
        att_stage_rows((const T *)a.q, b.q, dim, a.head_dim, stage);
        __syncthreads();
        att_product<ATT_TILE>(tile, stage, me, dk[c]);
    }
}

template <typename T, typename G, int pieces>
static __global__ void __launch_bounds__(KERN_BLOCK)
    attention_dkv_kernel(struct ops_attention a, const float *delta)
{
    __shared__ __align__(16) float stage[ATT_TILE][ATT_LD];
    __shared__ __align__(16) float tile[ATT_TILE][ATT_LD];
    __shared__ int32_t first[ATT_TILE];
    const att_thread me = att_me();
    const uint64_t tiles = (a.seq + ATT_TILE - 1) / ATT_TILE, group = a.heads / a.kv_heads;
    const uint64_t splits = (a.head_dim + BACK_DIMS - 1) / BACK_DIMS,
                   per = a.n_seq * a.kv_heads * splits;
    for (uint64_t u = blockIdx.x; u < tiles * per; u += gridDim.x) {
        /* Early keys are seen by most queries: they come first. */
        const uint64_t key = u / per * ATT_TILE, which = u % per, dim0 = which % splits * BACK_DIMS;
        const uint64_t kv = which / splits % a.kv_heads, seq = which / splits / a.kv_heads;
        float dk[pieces][4][4] = { { { 0 } } }, dv[pieces][4][4] = { { { 0 } } };
        for (uint64_t h = kv * group; h < (kv + 1) * group; h++)
            for (uint64_t t0 = key; t0 < a.seq; t0 += ATT_TILE) {
                const back_tile b = back_open(a, seq, h, t0, key, delta);
                __syncthreads();
                const int32_t low = att_first_keys(a.first_key + seq * a.seq + t0, b.q.rows, first);
                if ((uint64_t)low >= key + ATT_TILE) continue;
                back_add_keys<T, G, pieces>(a, b, dim0, first, stage, tile, dk, dv);
            }
        const uint64_t at = seq * a.seq + key, col = kv * a.head_dim;
        const unsigned nk = (unsigned)kern_least(a.seq - key, ATT_TILE);
        const att_rows k = { at * a.k_stride + col, a.k_stride, nk };
        const att_rows v = { at * a.v_stride + col, a.v_stride, nk };
        const float scale[4] = { a.scale, a.scale, a.scale, a.scale }, one[4] = { 1, 1, 1, 1 };
        KERN_UNROLL
        for (int c = 0; c < pieces; c++) {
            const uint64_t dim = dim0 + (uint64_t)c * ATT_COLS;
            att_store_tile((G *)a.dk, k, dim, a.head_dim, me, dk[c], scale);
            att_store_tile((G *)a.dv, v, dim, a.head_dim, me, dv[c], one);
        }
    }
}

/* delta: one float a row and head. */
uint64_t cuda_attention_scratch(const struct ops_attention *a, bool backward)
{
    return backward ? a->n_seq * a->seq * a->heads * sizeof(float) : 0;
}

cudaError_t cuda_attention_backward(cudaStream_t s, const struct ops_attention *a)
{
    if (a->head_dim > ATT_DIM_MAX) return cudaErrorInvalidValue;
    float *delta = (float *)a->scratch.base;
    const uint64_t rows = a->n_seq * a->seq * a->heads, tiles = kern_div_up(a->seq, ATT_TILE);
    const uint64_t splits = kern_div_up(a->head_dim, BACK_DIMS);
    return att_with_types(a, [&](auto *t, auto *g) {
        using T = std::remove_pointer_t<decltype(t)>;
        using G = std::remove_pointer_t<decltype(g)>;
        cudaError_t e = kern_launch(s, kern_div_up(rows, KERN_BLOCK / KERN_WARP), KERN_BLOCK,
                                    attention_delta_kernel<T, G>, *a, delta);
        if (e != cudaSuccess) return e;
        return att_with_pieces(a->head_dim, [&](auto pieces) {
            constexpr int n = decltype(pieces)::value, part = n < BACK_PIECES ? n : BACK_PIECES;
            e = kern_launch(s, tiles * a->n_seq * a->heads, KERN_BLOCK,
                            attention_dq_kernel<T, G, n>, *a, (const float *)delta);
            if (e != cudaSuccess) return e;
            return kern_launch(s, tiles * a->n_seq * a->kv_heads * splits, KERN_BLOCK,
                               attention_dkv_kernel<T, G, part>, *a, (const float *)delta);
        });
    });
}
