/* gpu/cuda/kernels.h - our own CUDA kernels, as plain functions that launch them: what no library of
 * NVIDIA's does, or does not fuse.
 *
 * A LAUNCHER queues one or several kernels on `s` and returns cudaGetLastError()'s answer for them; it
 * never waits, allocates, or reads device memory. Shapes were checked by gpu/ops.c (which the contract of
 * every operation comes from: gpu/ops.h); pointers are device pointers unless said otherwise. Rows may be
 * unaligned for vectors: a kernel takes the vector path only where pointer and stride allow it, with the same
 * bits. Grids are a function of the shape alone, never of the card (its number of multiprocessors), so that
 * sums have one order on every card; anything summed over rows is summed in two fixed stages, never by
 * atomics. Index arithmetic is 64-bit. Threads of one launch write disjoint memory.
 *
 * SCRATCH. `*_scratch` gives the bytes that a call needs in a->scratch.
 *
 * The .cu files use nothing of CUDA beyond: __global__, __device__, static __shared__ arrays, threadIdx /
 * blockIdx / blockDim / gridDim, __syncthreads, __syncwarp, __shfl_xor_sync, __shfl_down_sync, the
 * conversions of cuda_fp16.h, the clock (PTX), logf and log, explicit rounding intrinsics (__fmaf_rn, __fdiv_rn,
 * __fsqrt_rn, __fadd_rn, __fmul_rn, __dadd_rn ...) and launches by cudaLaunchKernelEx: tests/gpu/simt compiles
 * them as C++. No inline PTX outside `#ifdef __CUDA_ARCH__`, which has an equal second path.
 *
 * Any thread may call, one at a time per stream. */
#ifndef GPU_CUDA_KERNELS_H
#define GPU_CUDA_KERNELS_H

#include "base/convert.h"
#include "gpu/ops.h"
#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

cudaError_t cuda_embed_forward(cudaStream_t s, const struct ops_embed *a);
/* Rows of one id are added in token order: sorted by (id, token) in scratch first. */
uint64_t cuda_embed_backward_scratch(const struct ops_embed *a);
cudaError_t cuda_embed_backward(cudaStream_t s, const struct ops_embed *a, const struct ops_scratch *scratch);

uint64_t cuda_rmsnorm_scratch(const struct ops_rmsnorm *a, bool backward);
cudaError_t cuda_rmsnorm_forward(cudaStream_t s, const struct ops_rmsnorm *a);
cudaError_t cuda_rmsnorm_backward(cudaStream_t s, const struct ops_rmsnorm *a);

cudaError_t cuda_rope(cudaStream_t s, const struct ops_rope *a);

/* Attention by own tiles, for what cuDNN does not have: any head_dim up to 256, any type. */
uint64_t cuda_attention_scratch(const struct ops_attention *a, bool backward);
cudaError_t cuda_attention_forward(cudaStream_t s, const struct ops_attention *a);
cudaError_t cuda_attention_backward(cudaStream_t s, const struct ops_attention *a);

/* For the library's attention. end[i] of key j: the first query t > j of its sequence with
 * first_key[t] > j, seq where there is none. */
cudaError_t cuda_attention_ends(cudaStream_t s, uint64_t n_seq, uint64_t seq, const int32_t *first_key, int32_t *end);
/* Log-sum-exp of some heads from [n_seq][seq][token_heads] (gpu/ops.h; the pointer is at the first of
 * them) to [n_seq][heads][seq] with by_head, else back. */
struct cuda_attention_stats {
    uint64_t n_seq, seq, heads, token_heads;
    bool by_head;
    const float *src;
    float *dst;
};
cudaError_t cuda_attention_stats(cudaStream_t s, const struct cuda_attention_stats *a);

cudaError_t cuda_swiglu_forward(cudaStream_t s, const struct ops_swiglu *a);
cudaError_t cuda_swiglu_backward(cudaStream_t s, const struct ops_swiglu *a);

/* Between the card's memory and registered host memory, by device pointers, at bytes_per_s (> 0) by the card's
 * clock, evenly. Both 16-aligned, bytes a multiple of 16, not 0. Takes four blocks of 256 threads meanwhile. */
cudaError_t cuda_copy_paced(cudaStream_t s, void *dst, const void *src, uint64_t bytes, double bytes_per_s);

cudaError_t cuda_add(cudaStream_t s, enum ops_dtype at, uint64_t n, const void *a, const void *b, void *y);
cudaError_t cuda_acc_add(cudaStream_t s, uint64_t n, float *acc, const void *src, enum ops_dtype st);

/* dst[r][c] = src[r][c] in another type, both row-major with their own leading dimension (elements). */
struct cuda_cast {
    uint64_t rows, cols, src_ld, dst_ld;
    enum ops_dtype from, to;
    const void *src;
    void *dst;
};
cudaError_t cuda_cast(cudaStream_t s, const struct cuda_cast *a);

/* dst[c] (+)= sum over rows of src[r][c], fp32 in two fixed stages (gradient of a bias). */
struct cuda_column_sum {
    uint64_t rows, cols, ld;
    enum ops_dtype from;
    const void *src;
    float *dst;
    bool overwrite;
    struct ops_scratch scratch;
};
uint64_t cuda_column_sum_scratch(const struct cuda_column_sum *a);
cudaError_t cuda_column_sum(cudaStream_t s, const struct cuda_column_sum *a);

/* A tile of the head: logits f32 [rows, vocab] of tokens with these targets.
 * A target beyond the vocabulary makes that loss NaN and is treated as none in dlogits.
 * loss[r] (device, fp64) = logsumexp(logits[r]) - logits[r][target], 0 where target < 0.
 * dlogits (of `at`, may be NULL) = d_scale * (softmax - onehot), a row of zeros where target < 0. It may lie
 * on the logits (row r of it beginning where row r of them does; ld in elements of its own type). */
struct cuda_head_tile {
    uint64_t rows, vocab, logits_ld, dlogits_ld;
    enum ops_dtype at;
    const float *logits;
    const int32_t *targets;
    double d_scale;
    double *loss;
    void *dlogits;
};
cudaError_t cuda_head_tile(cudaStream_t s, const struct cuda_head_tile *a);
/* *sum (one fp64 in device or mapped host memory) = values[0] + values[1] + ..., in that order. */
cudaError_t cuda_sum_f64(cudaStream_t s, const double *values, uint64_t n, double *sum);

/* fp32 accumulator times `scale` to 16 bits of type gt; rounding, infinities and the flush of fp32's subnormals
 * as in base/convert.h, bit for bit. The sum of squares (fp64, of the rounded values) has an order of its own, a
 * function of n alone, as 16 sequential lanes would take longer than the gradients' way to the host; so it
 * is the host's only to rounding. `sum` in device or mapped host memory. */
uint64_t cuda_grad_cast_scratch(uint64_t n);
cudaError_t cuda_grad_cast(cudaStream_t s, const struct ops_grad_cast *a, struct convert_sum *sum,
                           const struct ops_scratch *scratch);

/* Adam on optimizer state that is kept on the device: offload/adam.h's formulas, order and bits (explicit
 * fma, division and root correctly rounded, subnormals flushed), whatever the card. One span of one set of
 * coefficients; arrays as in struct adam_span, coefficients as in struct adam_coef, member by member. */
enum cuda_adam_layout {
    CUDA_ADAM_BF16_SPLIT, /* param bf16, low int16, grad bf16 */
    CUDA_ADAM_FP16,       /* param fp16 (written only), master float, grad fp16 */
    CUDA_ADAM_F32         /* param float in place, grad float; low_or_master NULL */
};
struct cuda_adam_coef {
    float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_bc2,
        decay, l2;
};
struct cuda_adam {
    uint64_t n;
    enum cuda_adam_layout layout;
    struct cuda_adam_coef coef;
    void *param, *low_or_master;
    float *exp_avg, *exp_avg_sq;
    const void *grad;
    void *param_out; /* NULL: in place; may not overlap partly */
};
cudaError_t cuda_adam(cudaStream_t s, const struct cuda_adam *a);

#ifdef __cplusplus
}
#endif

#endif
