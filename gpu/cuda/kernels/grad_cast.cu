/* gpu/cuda/kernels/grad_cast.cu - fp32 accumulator to 16-bit gradient, with the sum of squares of
 * what was stored and the count of non-finite ones.
 *
 * Owns: cuda_grad_cast, its scratch. Values and rounding are those of base/convert.h bit for bit,
 * subnormals flushed as there. The sum has two stages cut by n alone: a block's piece (threads in
 * order, then a tree), then the pieces. Squares of 16-bit floats are exact in fp64. */
#include "gpu/cuda/kernels/flush.cuh"

enum {
    CAST_STEP = KERN_BLOCK * KERN_EIGHT,
    CAST_PIECES_MAX = 4096,
    CAST_WARPS = KERN_BLOCK / KERN_WARP
};

struct cast_piece {
    double sum_sq;
    uint64_t nonfinite;
};

static uint64_t piece_elems(uint64_t n)
{
    return kern_round_up(kern_div_up(n, CAST_PIECES_MAX), (uint64_t)CAST_STEP * 4);
}

/* Sum over the block's threads, in a fixed order; thread 0 has it. All threads call. */
KERN_DEVICE cast_piece piece_fold(cast_piece p, cast_piece *warps)
{
    p.sum_sq = kern_warp_sum_f64(p.sum_sq);
    /* Counts are below 2^53, so their sum is exact. */
    p.nonfinite = (uint64_t)kern_warp_sum_f64((double)p.nonfinite);
    if (threadIdx.x % KERN_WARP == 0) warps[threadIdx.x / KERN_WARP] = p;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < CAST_WARPS; w++) {
            p.sum_sq = p.sum_sq + warps[w].sum_sq;
            p.nonfinite += warps[w].nonfinite;
        }
    __syncthreads();
    return p;
}

template <typename T>
static __global__ void __launch_bounds__(KERN_BLOCK)
    grad_cast_kernel(uint64_t n, const float *acc, T *out, float scale, uint64_t piece,
                     cast_piece *pieces)
{
    __shared__ cast_piece warps[CAST_WARPS];
    const uint64_t count = (n + piece - 1) / piece;
    for (uint64_t b = blockIdx.x; b < count; b += gridDim.x) {
        const uint64_t end = kern_least((b + 1) * piece, n);
        cast_piece p = { 0, 0 };
        for (uint64_t i = b * piece + threadIdx.x * KERN_EIGHT; i < end; i += CAST_STEP) {
            float v[8];
            kern_load8(acc + i, end - i, v);
            KERN_UNROLL
            for (int e = 0; e < 8; e++) {
                T rounded;
                v[e] = kern_mul_flush(v[e], scale);
                kern_round(v[e], &rounded);
                const float stored = kern_widen(rounded);
                const bool finite = (kern_bits(stored) & 0x7f800000u) != 0x7f800000u;
                const double x = finite ? (double)stored : 0.0;
                p.sum_sq = p.sum_sq + x * x;
                p.nonfinite += !finite && (uint64_t)e < end - i ? 1u : 0u;
            }
            kern_store8(out + i, end - i, v);
        }
        p = piece_fold(p, warps);
        if (threadIdx.x == 0) pieces[b] = p;
    }
}

static __global__ void __launch_bounds__(KERN_BLOCK)
    pieces_sum_kernel(const cast_piece *pieces, uint64_t count, struct convert_sum *sum)
{
    __shared__ cast_piece warps[CAST_WARPS];
    cast_piece p = { 0, 0 };
    for (uint64_t i = threadIdx.x; i < count; i += KERN_BLOCK) {
        p.sum_sq = p.sum_sq + pieces[i].sum_sq;
        p.nonfinite += pieces[i].nonfinite;
    }
    p = piece_fold(p, warps);
    if (threadIdx.x != 0) return;
    sum->sum_sq = p.nonfinite ? (double)INFINITY : p.sum_sq;
    sum->nonfinite = p.nonfinite;
}

uint64_t cuda_grad_cast_scratch(uint64_t n)
{
    return kern_div_up(n, piece_elems(n)) * sizeof(cast_piece);
}

cudaError_t cuda_grad_cast(cudaStream_t s, const struct ops_grad_cast *a, struct convert_sum *sum,
                           const struct ops_scratch *scratch)
{
    const uint64_t piece = piece_elems(a->n), count = kern_div_up(a->n, piece);
    cast_piece *pieces = (cast_piece *)scratch->base;
    const cudaError_t e = kern_with_half(a->gt, [&](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        return kern_launch(s, count, KERN_BLOCK, grad_cast_kernel<T>, a->n, a->acc, (T *)a->out,
                           a->scale, piece, pieces);
    });
    if (e != cudaSuccess) return e;
    return kern_launch(s, 1, KERN_BLOCK, pieces_sum_kernel, pieces, count, sum);
}
