/* gpu/cuda/kernels/rope.cu - rotary position embedding (Su et al. 2021), half-split pairs as in
 * transformers' Llama.
 *
 * Owns: cuda_rope. A block takes a few tokens: first cos and sin of their angles, once for all
 * heads, then the pairs. The angle is a product of two fp32 and its functions are computed in fp64
 * as on the host (gpu/host/kernels/elementwise_isa.c: the reduction and the series, and why), so
 * the bits are the host's but for positions from ROPE_FAR on, where the host asks the C library and
 * this reduces with fused steps. */
#include "gpu/cuda/kernels/kern.cuh"

enum { ROPE_ANGLES = 256, ROPE_FAR = 1 << 19 };

/* x = q pi/2 + r, |r| <= pi/4; series of sin r to r^11 and of cos r to r^12. far: q may have 31
 * bits. */
KERN_DEVICE void rope_cos_sin(float angle, bool far, float *cos_out, float *sin_out)
{
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer */
    const double x = (double)angle, t = x * 0x1.45f306dc9c883p-1 + magic;
    const double q = t - magic;
    double r = (x - q * 0x1.921fb544p+0) - q * 0x1.0b4611a626331p-34;
    if (far) r = __fma_rn(-q, 0x1.1a62633145c07p-54, __fma_rn(-q, 0x1.921fb54442d18p+0, x));
    const double z = r * r;
    double s = z * (-1.0 / 39916800) + 1.0 / 362880, c = z * (1.0 / 479001600) - 1.0 / 3628800;
    s = z * s - 1.0 / 5040;
    s = z * s + 1.0 / 120;
    s = z * s - 1.0 / 6;
    s = r + r * (z * s);
    c = z * c + 1.0 / 40320;
    c = z * c - 1.0 / 720;
    c = z * c + 1.0 / 24;
    c = z * c - 0.5;
    c = z * c + 1.0;
    /* Quarter q mod 4: 0, 1, 2, 3 or -1. */
    const double half = q * 0.5, near = (half + magic) - magic, odd = half - near;
    const double turns = (near * 0.5 + magic) - magic, flip = near - 2 * turns;
    const bool swap = odd != 0;
    const double sin_x = swap ? c * (2 * odd) : s, cos_x = swap ? -s * (2 * odd) : c;
    const double turn = 1.0 - 2.0 * flip * flip;
    *sin_out = (float)(sin_x * turn);
    *cos_out = (float)(cos_x * turn);
}

KERN_DEVICE void rope_angle(const struct ops_rope &a, uint64_t token, uint64_t pair, float *cs,
                            float *sn)
{
    const int32_t pos = a.pos[token];
    const float angle = (float)pos * a.inv_freq[pair];
    float c, s;
    rope_cos_sin(angle, pos >= ROPE_FAR, &c, &s);
    *cs = c * a.attention_factor;
    *sn = s * a.attention_factor * (a.inverse ? -1.0f : 1.0f);
}

/* Eight pairs at x[i], x[half + i]; y may be x. */
template <typename X, typename T>
KERN_DEVICE void rope_pairs(const X *x, T *y, uint64_t half, uint64_t n, const float *cs,
                            const float *sn)
{
    float lo[8], hi[8];
    kern_load8(x, n, lo);
    kern_load8(x + half, n, hi);
    KERN_UNROLL
    for (int e = 0; e < 8; e++) {
        const float l = lo[e], h = hi[e];
        lo[e] = l * cs[e] - h * sn[e];
        hi[e] = h * cs[e] + l * sn[e];
    }
    kern_store8(y, n, lo);
    kern_store8(y + half, n, hi);
}

/* V of a block's tokens: rounded only. */
template <typename V, typename T>
KERN_DEVICE void rope_values(const struct ops_rope &a, uint64_t token, uint64_t end)
{
    for (; token < end; token++)
        for (uint64_t i = threadIdx.x * KERN_EIGHT; i < a.v_cols; i += KERN_BLOCK * KERN_EIGHT) {
            float v[8];
            kern_load8((const V *)a.v_in + token * a.v_stride + i, a.v_cols - i, v);
            kern_store8((T *)a.v + token * a.v_stride + i, a.v_cols - i, v);
        }
}

/* Q, K, V: types of what is read. `per` tokens a block. */
template <typename T, typename Q, typename K, typename V>
static __global__ void __launch_bounds__(KERN_BLOCK) rope_kernel(struct ops_rope a, uint64_t per)
{
    __shared__ float cs[ROPE_ANGLES + KERN_EIGHT], sn[ROPE_ANGLES + KERN_EIGHT];
    const uint64_t half = a.head_dim / 2, heads = a.heads + a.kv_heads;
    for (uint64_t t0 = (uint64_t)blockIdx.x * per; t0 < a.tokens; t0 += (uint64_t)gridDim.x * per) {
        const uint64_t tokens = kern_least(a.tokens - t0, per);
        if (a.v) rope_values<V, T>(a, t0, t0 + tokens);
        for (uint64_t i0 = 0; i0 < half; i0 += ROPE_ANGLES) {
            const uint64_t n = kern_least(half - i0, ROPE_ANGLES);
            const uint64_t groups = (n + KERN_EIGHT - 1) / KERN_EIGHT;
            __syncthreads();
            if (threadIdx.x < tokens * n)
                rope_angle(a, t0 + threadIdx.x / n, i0 + threadIdx.x % n, &cs[threadIdx.x],
                           &sn[threadIdx.x]);
            if (threadIdx.x < KERN_EIGHT)
                cs[tokens * n + threadIdx.x] = sn[tokens * n + threadIdx.x] = 0;
            __syncthreads();
            for (uint64_t u = threadIdx.x; u < tokens * heads * groups; u += KERN_BLOCK) {
                const uint64_t row = u / groups, i = (u - row * groups) * KERN_EIGHT;
                const uint64_t token = row / heads, h = row - token * heads;
                const float *c = cs + token * n + i, *s = sn + token * n + i;
                const uint64_t qi = (t0 + token) * a.q_stride + h * a.head_dim + i0 + i;
                const uint64_t ki = (t0 + token) * a.k_stride + (h - a.heads) * a.head_dim + i0 + i;
                if (h < a.heads)
                    rope_pairs((const Q *)(a.q_in ? a.q_in : a.q) + qi, (T *)a.q + qi, half, n - i,
                               c, s);
                else
                    rope_pairs((const K *)(a.k_in ? a.k_in : a.k) + ki, (T *)a.k + ki, half, n - i,
                               c, s);
            }
        }
    }
}

cudaError_t cuda_rope(cudaStream_t s, const struct ops_rope *a)
{
    const uint64_t half = a->head_dim / 2, per = half < ROPE_ANGLES ? ROPE_ANGLES / half : 1;
    const uint64_t blocks = kern_div_up(a->tokens, per);
    const enum ops_dtype wide = ops_wide(a->at, a->in_wide);
    return kern_with_activation(a->at, [&](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        return kern_with_activation(a->q_in ? wide : a->at, [&](auto *q) {
            using Q = std::remove_pointer_t<decltype(q)>;
            return kern_with_activation(a->k_in ? wide : a->at, [&](auto *k) {
                using K = std::remove_pointer_t<decltype(k)>;
                return kern_with_activation(wide, [&](auto *v) {
                    using V = std::remove_pointer_t<decltype(v)>;
                    return kern_launch(s, blocks, KERN_BLOCK, rope_kernel<T, Q, K, V>, *a, per);
                });
            });
        });
    });
}
