/* gpu/cuda/kernels/adam.cu - Adam on optimizer state that is kept on the device, with the
 * processor's bits.
 *
 * Owns: cuda_adam. Kingma & Ba 2015, algorithm 1; decoupled decay: Loshchilov & Hutter 2019. The
 * formulas, their order and every rounding are those of offload/adam.h; subnormals are flushed
 * (flush.cuh) as its kernels do by the processor's mode. One pass over memory. Must not know
 * tensors, clipping or step counts: coefficients come made. */
#include "gpu/cuda/kernels/flush.cuh"

/* 16-bit words as they are. */
KERN_DEVICE void words_load(const uint16_t *p, uint64_t n, uint32_t (&w)[8])
{
    if (n >= KERN_EIGHT && kern_vector_at(p)) {
        const uint4 a = *(const uint4 *)p;
        const uint32_t pair[4] = { a.x, a.y, a.z, a.w };
        KERN_UNROLL
        for (int i = 0; i < 4; i++) w[2 * i] = pair[i] & 0xffffu, w[2 * i + 1] = pair[i] >> 16;
        return;
    }
    KERN_UNROLL
    for (int i = 0; i < 8; i++) w[i] = (uint64_t)i < n ? p[i] : 0u;
}
KERN_DEVICE void words_store(uint16_t *p, uint64_t n, const uint32_t (&w)[8])
{
    if (n >= KERN_EIGHT && kern_vector_at(p)) {
        *(uint4 *)p =
            make_uint4(w[0] | w[1] << 16, w[2] | w[3] << 16, w[4] | w[5] << 16, w[6] | w[7] << 16);
        return;
    }
    KERN_UNROLL
    for (int i = 0; i < 8; i++)
        if ((uint64_t)i < n) p[i] = (uint16_t)w[i];
}

/* The master in its parts (base/numeric.h: bits = (param << 16) + low, ties of the split away from
 * zero). */
KERN_DEVICE void split_load(const struct cuda_adam &a, uint64_t i, uint64_t n, float (&p)[8])
{
    uint32_t param[8], low[8];
    words_load((const uint16_t *)a.param + i, n, param);
    words_load((const uint16_t *)a.low_or_master + i, n, low);
    KERN_UNROLL
    for (int e = 0; e < 8; e++)
        p[e] = kern_float((param[e] << 16) + (uint32_t)(int32_t)(int16_t)(uint16_t)low[e]);
}
KERN_DEVICE void split_store(const struct cuda_adam &a, uint64_t i, uint64_t n, const float (&p)[8])
{
    uint32_t param[8], low[8];
    KERN_UNROLL
    for (int e = 0; e < 8; e++) {
        const uint32_t u = kern_bits(p[e]);
        param[e] = ((u + 0x8000u) >> 16) & 0xffffu;
        low[e] = (u - (param[e] << 16)) & 0xffffu;
    }
    words_store((uint16_t *)(a.param_out ? a.param_out : a.param) + i, n, param);
    words_store((uint16_t *)a.low_or_master + i, n, low);
}

template <bool l2>
KERN_DEVICE void adam_element(const struct cuda_adam_coef &c, float g, float *p, float *m, float *v)
{
    g = kern_mul_flush(g, c.grad_scale);
    if (l2) g = kern_fma_flush(c.l2, *p, g);
    else *p = kern_fma_flush(c.decay, *p, *p);
    *m = kern_fma_flush(c.beta1, *m, kern_mul_flush(c.one_minus_beta1, g));
    *v = kern_fma_flush(c.beta2, *v, kern_mul_flush(kern_mul_flush(c.one_minus_beta2, g), g));
    const float d = kern_fma_flush(__fsqrt_rn(*v), c.inv_sqrt_bc2, c.eps);
    *p = kern_fma_flush(-c.step_size, kern_div_flush(*m, d), *p);
}

template <enum cuda_adam_layout layout, bool l2>
static __global__ void __launch_bounds__(KERN_BLOCK) adam_kernel(struct cuda_adam a)
{
    const uint64_t groups = (a.n + KERN_EIGHT - 1) / KERN_EIGHT;
    const uint64_t step = (uint64_t)gridDim.x * KERN_BLOCK;
    for (uint64_t k = (uint64_t)blockIdx.x * KERN_BLOCK + threadIdx.x; k < groups; k += step) {
        const uint64_t i = k * KERN_EIGHT, n = a.n - i;
        float p[8], m[8], v[8], g[8];
        if (layout == CUDA_ADAM_BF16_SPLIT) {
            split_load(a, i, n, p);
            kern_load8((const bf16 *)a.grad + i, n, g);
        } else if (layout == CUDA_ADAM_FP16) {
            kern_load8((const float *)a.low_or_master + i, n, p);
            kern_load8((const fp16 *)a.grad + i, n, g);
        } else {
            kern_load8((const float *)a.param + i, n, p);
            kern_load8((const float *)a.grad + i, n, g);
        }
        kern_load8(a.exp_avg + i, n, m);
        kern_load8(a.exp_avg_sq + i, n, v);
        KERN_UNROLL
        for (int e = 0; e < 8; e++) adam_element<l2>(a.coef, g[e], &p[e], &m[e], &v[e]);
        kern_store8(a.exp_avg + i, n, m);
        kern_store8(a.exp_avg_sq + i, n, v);
        void *out = a.param_out ? a.param_out : a.param;
        if (layout == CUDA_ADAM_BF16_SPLIT) {
            split_store(a, i, n, p);
        } else if (layout == CUDA_ADAM_FP16) {
            kern_store8((float *)a.low_or_master + i, n, p);
            kern_store8((fp16 *)out + i, n, p);
        } else {
            kern_store8((float *)out + i, n, p);
        }
    }
}

template <enum cuda_adam_layout layout>
static cudaError_t adam_launch(cudaStream_t s, const struct cuda_adam *a)
{
    const uint64_t blocks = kern_div_up(a->n, (uint64_t)KERN_BLOCK * KERN_EIGHT);
    if (a->coef.l2 != 0.0f)
        return kern_launch(s, blocks, KERN_BLOCK, adam_kernel<layout, true>, *a);
    return kern_launch(s, blocks, KERN_BLOCK, adam_kernel<layout, false>, *a);
}

cudaError_t cuda_adam(cudaStream_t s, const struct cuda_adam *a)
{
    switch (a->layout) {
    case CUDA_ADAM_BF16_SPLIT: return adam_launch<CUDA_ADAM_BF16_SPLIT>(s, a);
    case CUDA_ADAM_FP16: return adam_launch<CUDA_ADAM_FP16>(s, a);
    default: return adam_launch<CUDA_ADAM_F32>(s, a);
    }
}
