/* gpu/cuda/kernels/attention.cuh - tiles of 64 x 64 that attention is made of.
 *
 * A block of 256 threads, 16 x 16, computes every product in one form: thread (ty, tx) holds the 4
 * x 4 elements [4 ty + i][4 tx + j] of C and adds A[k][4 ty + i] * B[k][4 tx + j] for k ascending,
 * fp32, fused; A and B lie in shared memory with k as their row, so that four operands are one
 * 16-byte read. Operands longer than 64 (heads of more dimensions) go by pieces. Only
 * attention_*.cu include it. */
#ifndef GPU_CUDA_KERNELS_ATTENTION_CUH
#define GPU_CUDA_KERNELS_ATTENTION_CUH

#include "gpu/cuda/kernels/math.cuh"

/* Queries and keys of a tile; dimensions of a piece of heads by row; by dimension. */
enum { ATT_TILE = 64, ATT_COLS = 64, ATT_DEPTH = 32 };
/* Four floats more than a tile: rows still lie on 16 bytes, and neighbours in other banks. */
enum { ATT_LD = ATT_TILE + 4 };

struct att_rows {           /* a tile's rows of one head */
    uint64_t first, stride; /* elements */
    unsigned rows;          /* that exist */
};

struct att_thread {
    unsigned ty, tx;
};
KERN_DEVICE att_thread att_me() { return att_thread{ threadIdx.x / 16, threadIdx.x % 16 }; }

/* acc += A^T B over `depth` rows of both. */
template <int depth>
KERN_DEVICE void att_product(const float (*a)[ATT_LD], const float (*b)[ATT_LD], att_thread me,
                             float (&acc)[4][4])
{
    KERN_UNROLL_8
    for (int k = 0; k < depth; k++) {
        const float4 x = *(const float4 *)&a[k][4 * me.ty], y = *(const float4 *)&b[k][4 * me.tx];
        const float p[4] = { x.x, x.y, x.z, x.w }, q[4] = { y.x, y.y, y.z, y.w };
        KERN_UNROLL
        for (int i = 0; i < 4; i++) {
            KERN_UNROLL
            for (int j = 0; j < 4; j++) acc[i][j] = __fmaf_rn(p[i], q[j], acc[i][j]);
        }
    }
}

/* dst[d][row] = src[row][dim + d] * scale for 32 dimensions and 64 rows; zero where there is none.
 * Neighbouring threads take neighbouring rows, so that the transposed writes meet in no bank. */
template <typename T>
KERN_DEVICE void att_stage_dims(const T *src, att_rows r, uint64_t dim, uint64_t dims, float scale,
                                float (*dst)[ATT_LD])
{
    const unsigned row = threadIdx.x % ATT_TILE, d = threadIdx.x / ATT_TILE * KERN_EIGHT;
    float v[8] = { 0 };
    if (row < r.rows && dim + d < dims)
        kern_load8(src + r.first + row * r.stride + dim + d, dims - dim - d, v);
    KERN_UNROLL
    for (int e = 0; e < 8; e++) dst[d + e][row] = v[e] * scale;
}

/* dst[row][d] = src[row][dim + d] for 64 rows and 64 dimensions; zero where there is none. */
template <typename T>
KERN_DEVICE void att_stage_rows(const T *src, att_rows r, uint64_t dim, uint64_t dims,
                                float (*dst)[ATT_LD])
{
    const unsigned d = threadIdx.x % 8 * KERN_EIGHT;
    KERN_UNROLL
    for (unsigned half = 0; half < 2; half++) {
        const unsigned row = threadIdx.x / 8 + half * 32;
        float v[8] = { 0 };
        if (row < r.rows && dim + d < dims)
            kern_load8(src + r.first + row * r.stride + dim + d, dims - dim - d, v);
        *(float4 *)&dst[row][d] = make_float4(v[0], v[1], v[2], v[3]);
        *(float4 *)&dst[row][d + 4] = make_float4(v[4], v[5], v[6], v[7]);
    }
}

/* acc = sum over the head's dimensions of x[row i] * scale * y[row j]. All threads call; `stage` is
 * free for it and free again after the next barrier. */
template <typename X, typename Y>
KERN_DEVICE void att_scores(const X *x, att_rows xr, const Y *y, att_rows yr, uint64_t dims,
                            float scale, att_thread me, float (*stage)[ATT_LD], float (&acc)[4][4])
{
    KERN_UNROLL
    for (int i = 0; i < 4; i++) {
        KERN_UNROLL
        for (int j = 0; j < 4; j++) acc[i][j] = 0;
    }
    for (uint64_t dim = 0; dim < dims; dim += ATT_DEPTH) {
        __syncthreads();
        att_stage_dims(x, xr, dim, dims, scale, stage);
        att_stage_dims(y, yr, dim, dims, 1.0f, stage + ATT_DEPTH);
        __syncthreads();
        att_product<ATT_DEPTH>(stage, stage + ATT_DEPTH, me, acc);
    }
}

/* Four neighbouring elements, n >= 1 of which exist. */
template <typename T>
KERN_DEVICE void att_store4(T *p, uint64_t n, const float (&v)[4])
{
    KERN_UNROLL
    for (int j = 0; j < 4; j++)
        if ((uint64_t)j < n) kern_round(v[j], &p[j]);
}
KERN_DEVICE void att_store4_whole(float *p, const float (&v)[4])
{
    *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
}
KERN_DEVICE void att_store4_whole(bf16 *p, const float (&v)[4])
{
    bf16 h[4];
    KERN_UNROLL
    for (int j = 0; j < 4; j++) kern_round(v[j], &h[j]);
    *(uint2 *)p =
        make_uint2(h[0].bits | (uint32_t)h[1].bits << 16, h[2].bits | (uint32_t)h[3].bits << 16);
}

/* Rows 4 ty + i, dimensions dim + 4 tx + j of a head, times factor[i]. */
template <typename T>
KERN_DEVICE void att_store_tile(T *dst, att_rows r, uint64_t dim, uint64_t dims, att_thread me,
                                const float (&acc)[4][4], const float (&factor)[4])
{
    const uint64_t d = dim + 4 * me.tx;
    KERN_UNROLL
    for (int i = 0; i < 4; i++) {
        const unsigned row = 4 * me.ty + i;
        if (row >= r.rows || d >= dims) continue;
        T *p = dst + r.first + row * r.stride + d;
        float v[4];
        KERN_UNROLL
        for (int j = 0; j < 4; j++) v[j] = acc[i][j] * factor[i];
        if (dims - d >= 4 && ((uintptr_t)p & (4 * sizeof(T) - 1)) == 0) att_store4_whole(p, v);
        else att_store4(p, dims - d, v);
    }
}

/* --- which keys a tile of queries sees --- */

/* Fills first[64] of a tile (rows that do not exist see no key) and returns the smallest. All
 * threads call; first[] is ready, and the caller may not write it again before a barrier. */
KERN_DEVICE int32_t att_first_keys(const int32_t *first_key, unsigned rows, int32_t *first)
{
    if (threadIdx.x < ATT_TILE)
        first[threadIdx.x] = threadIdx.x < rows ? first_key[threadIdx.x] : INT32_MAX;
    __syncthreads();
    const unsigned lane = threadIdx.x % KERN_WARP;
    int32_t low = first[lane] < first[lane + KERN_WARP] ? first[lane] : first[lane + KERN_WARP];
    KERN_UNROLL
    for (int d = KERN_WARP / 2; d > 0; d /= 2) {
        const int32_t other = __shfl_xor_sync(KERN_ALL_LANES, low, d);
        low = other < low ? other : low;
    }
    return low < 0 ? 0 : low;
}

/* Calls f with null pointers of the types of activations and of
 * their gradients; f with the pieces of 64 dimensions that a head has. */
template <typename F>
static inline cudaError_t att_with_types(const struct ops_attention *a, F f)
{
    if (a->at == OPS_F32) return f((float *)nullptr, (float *)nullptr);
    if (a->grad_wide) return f((bf16 *)nullptr, (float *)nullptr);
    return f((bf16 *)nullptr, (bf16 *)nullptr);
}
template <typename F>
static inline cudaError_t att_with_pieces(uint64_t head_dim, F f)
{
    if (head_dim <= ATT_COLS) return f(std::integral_constant<int, 1>());
    if (head_dim <= 2 * ATT_COLS) return f(std::integral_constant<int, 2>());
    return f(std::integral_constant<int, 4>());
}
enum { ATT_DIM_MAX = 4 * ATT_COLS };

#endif
