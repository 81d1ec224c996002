/* gpu/cuda/kernels/head.cu - softmax and loss of a tile of logits, and the sum of losses.
 *
 * Owns: cuda_head_tile, cuda_sum_f64. A block takes a row and reads it once for maximum and sum
 * together (online softmax: Milakov & Gimelshein 2018), once more for the gradient. Exponentials
 * are fp32, their sum is fp64: eight at a time, thread by thread, then a tree. A target beyond the
 * vocabulary makes the loss NaN (and the gradient zero), since a kernel has no other way to say so.
 */
#include "gpu/cuda/kernels/math.cuh"

enum { HEAD_BLOCK = 512, HEAD_WARPS = HEAD_BLOCK / KERN_WARP, SUM_PIECE = 2048 };

/* Maximum and sum of exp(x - maximum) over what this thread sees. */
struct head_part {
    float max;
    double sum;
};

KERN_DEVICE head_part head_read(const float *row, uint64_t vocab)
{
    head_part p = { -FLT_MAX, 0 };
    for (uint64_t c = threadIdx.x * KERN_EIGHT; c < vocab; c += HEAD_BLOCK * KERN_EIGHT) {
        const uint64_t n = vocab - c;
        float v[8], max = p.max, sum = 0;
        kern_load8(row + c, n, v);
        KERN_UNROLL
        for (int e = 0; e < 8; e++)
            if ((uint64_t)e < n && v[e] > max) max = v[e];
        if (max > p.max) {
            p.sum *= (double)kern_exp_softmax(p.max - max);
            p.max = max;
        }
        KERN_UNROLL
        for (int e = 0; e < 8; e++)
            if ((uint64_t)e < n) sum = sum + kern_exp_softmax(v[e] - max);
        p.sum += (double)sum;
    }
    return p;
}

/* Of the whole block, the same for every thread. Calls may follow one another: maxima are read
 * before the second barrier, sums are written after the first. */
KERN_DEVICE head_part head_fold(head_part p, float *maxima, double *sums)
{
    const unsigned lane = threadIdx.x % KERN_WARP, warp = threadIdx.x / KERN_WARP;
    const float mine = p.max;
    p.max = kern_lanes_max<KERN_WARP>(p.max);
    if (lane == 0) maxima[warp] = p.max;
    __syncthreads();
    p.max = maxima[0];
    KERN_UNROLL
    for (int w = 1; w < HEAD_WARPS; w++) p.max = maxima[w] > p.max ? maxima[w] : p.max;
    p.sum = kern_warp_sum_f64(p.sum * (double)kern_exp_softmax(mine - p.max));
    if (lane == 0) sums[warp] = p.sum;
    __syncthreads();
    p.sum = sums[0];
    KERN_UNROLL
    for (int w = 1; w < HEAD_WARPS; w++) p.sum = p.sum + sums[w];
    return p;
}

/* The gradient may lie on the logits, its row's start on theirs: what one round writes was read by
 * all before its barrier, since an element of the gradient is no larger than a logit. */
template <typename T>
KERN_DEVICE void head_gradient(const float *row, T *out, uint64_t vocab, float max, float factor,
                               uint64_t target, float at_target)
{
    const uint64_t step = HEAD_BLOCK * KERN_EIGHT;
    for (uint64_t c0 = 0; c0 < vocab; c0 += step) {
        const uint64_t c = c0 + threadIdx.x * KERN_EIGHT;
        float v[8];
        if (c < vocab) kern_load8(row + c, vocab - c, v);
        __syncthreads();
        if (c >= vocab) continue;
        KERN_UNROLL
        for (int e = 0; e < 8; e++)
            v[e] = c + (uint64_t)e == target ? at_target : kern_exp_softmax(v[e] - max) * factor;
        kern_store8(out + c, vocab - c, v);
    }
}

template <typename T>
KERN_DEVICE void head_zero(T *out, uint64_t vocab)
{
    const float zero[8] = { 0 };
    for (uint64_t c = threadIdx.x * KERN_EIGHT; c < vocab; c += HEAD_BLOCK * KERN_EIGHT)
        kern_store8(out + c, vocab - c, zero);
}

template <typename T>
static __global__ void __launch_bounds__(HEAD_BLOCK) head_tile_kernel(struct cuda_head_tile a)
{
    __shared__ float maxima[HEAD_WARPS];
    __shared__ double sums[HEAD_WARPS];
    for (uint64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const float *row = a.logits + r * a.logits_ld;
        T *out = a.dlogits ? (T *)a.dlogits + r * a.dlogits_ld : (T *)nullptr;
        const int64_t target = a.targets[r];
        if (target < 0 || (uint64_t)target >= a.vocab) {
            if (threadIdx.x == 0) a.loss[r] = target < 0 ? 0.0 : (double)NAN;
            if (out) head_zero(out, a.vocab);
            continue;
        }
        const head_part p = head_fold(head_read(row, a.vocab), maxima, sums);
        const float wanted = row[target];
        if (threadIdx.x == 0) a.loss[r] = ((double)p.max + log(p.sum)) - (double)wanted;
        if (out) {
            const double own = (double)kern_exp_softmax(wanted - p.max);
            head_gradient(row, out, a.vocab, p.max, (float)(a.d_scale / p.sum), (uint64_t)target,
                          (float)((own / p.sum - 1.0) * a.d_scale));
        }
    }
}

cudaError_t cuda_head_tile(cudaStream_t s, const struct cuda_head_tile *a)
{
    return kern_with_activation(a->at, [&](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        return kern_launch(s, a->rows, HEAD_BLOCK, head_tile_kernel<T>, *a);
    });
}

/* One order, whatever n: one thread adds what the block brings. */
static __global__ void __launch_bounds__(KERN_BLOCK)
    sum_f64_kernel(const double *values, uint64_t n, double *sum)
{
    __shared__ double piece[SUM_PIECE];
    double total = 0;
    for (uint64_t from = 0; from < n; from += SUM_PIECE) {
        const unsigned len = (unsigned)kern_least(n - from, SUM_PIECE);
        for (unsigned i = threadIdx.x; i < len; i += KERN_BLOCK) piece[i] = values[from + i];
        __syncthreads();
        if (threadIdx.x == 0) {
            KERN_UNROLL_8
            for (unsigned i = 0; i < len; i++) total = total + piece[i];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) *sum = total;
}

cudaError_t cuda_sum_f64(cudaStream_t s, const double *values, uint64_t n, double *sum)
{
    return kern_launch(s, 1, KERN_BLOCK, sum_f64_kernel, values, n, sum);
}
