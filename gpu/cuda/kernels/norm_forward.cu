/* gpu/cuda/kernels/norm_forward.cu - RMS norm (Zhang & Sennrich 2019), forward.
 *
 * Owns: cuda_rmsnorm_forward. With n = x * rstd: y = n * w, rstd = 1 / sqrt(mean(x^2) + eps); fp32
 * inside, rounded on store (gpu/ops.h). */
#include "gpu/cuda/kernels/norm.cuh"

template <typename X, typename Y, typename S>
static __global__ void __launch_bounds__(KERN_BLOCK)
    norm_forward_kernel(struct ops_rmsnorm a, float eps)
{
    constexpr int lanes = S::lanes, held = S::held > 0 ? S::held : 1;
    __shared__ float sums[KERN_BLOCK / KERN_WARP];
    const uint64_t lane = threadIdx.x % lanes, slot = threadIdx.x / lanes, cols = a.cols;
    const uint64_t round = (uint64_t)lanes * KERN_EIGHT, at = lane * KERN_EIGHT;
    for (uint64_t r0 = (uint64_t)blockIdx.x * S::rows; r0 < a.rows;
         r0 += (uint64_t)gridDim.x * S::rows) {
        const uint64_t r = r0 + slot;
        const bool real = r < a.rows;
        const X *x = (const X *)a.x + (real ? norm_row_at(a, r, a.x_stride) : 0);
        Y *y = (Y *)a.y + (real ? norm_row_at(a, r, a.y_stride) : 0);
        float v[held][8], sum = 0;
        if (S::held > 0) {
            KERN_UNROLL
            for (int g = 0; g < held; g++) {
                const uint64_t c = at + (uint64_t)g * round;
                if (!real || c >= cols) continue;
                kern_load8(x + c, cols - c, v[g]);
                KERN_UNROLL
                for (int e = 0; e < 8; e++) sum = sum + v[g][e] * v[g][e];
            }
        } else {
            for (uint64_t c = at; c < cols; c += round) {
                kern_load8(x + c, cols - c, v[0]);
                KERN_UNROLL
                for (int e = 0; e < 8; e++) sum = sum + v[0][e] * v[0][e];
            }
        }
        sum = norm_row_sum<lanes>(sum, sums);
        const float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(sum, (float)cols) + eps));
        if (!real) continue;
        if (lane == 0) a.rstd[r] = rstd;
        if (S::held > 0) {
            KERN_UNROLL
            for (int g = 0; g < held; g++) {
                const uint64_t c = at + (uint64_t)g * round;
                if (c >= cols) continue;
                float w[8];
                kern_load8_param(a.pt, a.w, c, cols - c, w);
                KERN_UNROLL
                for (int e = 0; e < 8; e++) w[e] = v[g][e] * rstd * w[e];
                kern_store8(y + c, cols - c, w);
            }
        } else {
            for (uint64_t c = at; c < cols; c += round) {
                float w[8];
                kern_load8(x + c, cols - c, v[0]);
                kern_load8_param(a.pt, a.w, c, cols - c, w);
                KERN_UNROLL
                for (int e = 0; e < 8; e++) w[e] = v[0][e] * rstd * w[e];
                kern_store8(y + c, cols - c, w);
            }
        }
    }
}

cudaError_t cuda_rmsnorm_forward(cudaStream_t s, const struct ops_rmsnorm *a)
{
    const uint64_t blocks = kern_div_up(a->rows, norm_rows_at_once(a->cols));
    return kern_with_activation(ops_wide(a->at, a->x_wide), [&](auto *x) {
        using X = std::remove_pointer_t<decltype(x)>;
        return kern_with_activation(ops_wide(a->at, a->y_wide), [&](auto *y) {
            using Y = std::remove_pointer_t<decltype(y)>;
            return norm_with_shape(a->cols, [&](auto shape) {
                return kern_launch(s, blocks, KERN_BLOCK,
                                   norm_forward_kernel<X, Y, decltype(shape)>, *a, (float)a->eps);
            });
        });
    });
}
