/* gpu/cuda/kernels/norm_backward.cu - RMS norm (Zhang & Sennrich 2019), backward.
 *
 * Owns: cuda_rmsnorm_backward, its scratch. With n = x * rstd and dn = dy * w: dx = rstd * (dn - n
 * * mean(dn
 * * n)); dw = sum over rows of dy * n. A block takes a part of the rows and keeps its share of dw
 * in registers (rows beyond 8192 columns: in scratch); the block's rows at once are added in order,
 * then the parts by parts.cuh. */
#include "gpu/cuda/kernels/norm.cuh"
#include "gpu/cuda/kernels/parts.cuh"

/* dx of eight columns at `at`, `left` of which exist. The branches on the type are the same for all
 * threads; a template over it would double what is compiled. */
KERN_DEVICE void norm_store_dx(const struct ops_rmsnorm &a, uint64_t at, uint64_t left,
                               const float (&n)[8], const float (&dy)[8], const float (&w)[8],
                               float mean, float rstd)
{
    const enum ops_dtype dt = a.dx_wide ? OPS_F32 : a.at;
    float v[8], old[8] = { 0 };
    if (a.add) kern_load8_param(dt, a.dx, at, left, old);
    KERN_UNROLL
    for (int e = 0; e < 8; e++) {
        v[e] = (dy[e] * w[e] - n[e] * mean) * rstd;
        if (a.add) v[e] = old[e] + v[e];
    }
    if (dt == OPS_F32) kern_store8((float *)a.dx + at, left, v);
    else kern_store8((bf16 *)a.dx + at, left, v);
}

/* Adds sum[g][e] of the block's rows at once, in order, into out[cols]. room: one float a column of
 * all slots. All threads call. */
template <typename S>
KERN_DEVICE void norm_fold_slots(const float (&sum)[8], uint64_t base, uint64_t cols, float *room,
                                 float *out)
{
    constexpr unsigned span = S::lanes * KERN_EIGHT;
    __syncthreads();
    KERN_UNROLL
    for (int e = 0; e < 8; e++) room[threadIdx.x * KERN_EIGHT + e] = sum[e];
    __syncthreads();
    for (unsigned c = threadIdx.x; c < span && base + c < cols; c += KERN_BLOCK) {
        float x = room[c];
        for (unsigned s = 1; s < S::rows; s++) x = x + room[s * span + c];
        out[base + c] = x;
    }
}

/* One row in registers. `dw` grows by the row's share; threads without a row only take part in the
 * sum. */
template <typename X, typename Y, typename S>
KERN_DEVICE void norm_backward_row(const struct ops_rmsnorm &a, uint64_t r, bool real, float *sums,
                                   float (&dw)[S::held][8])
{
    const uint64_t at = threadIdx.x % S::lanes * KERN_EIGHT, cols = a.cols;
    const uint64_t xi = real ? norm_row_at(a, r, a.x_stride) : 0;
    const X *x = (const X *)a.x + xi;
    const Y *dy = (const Y *)a.dy + (real ? norm_row_at(a, r, a.y_stride) : 0);
    const float rstd = real ? a.rstd[r] : 0.0f;
    float n[S::held][8], g[S::held][8], sum = 0;
    KERN_UNROLL
    for (int k = 0; k < S::held; k++) {
        const uint64_t c = at + (uint64_t)k * S::lanes * KERN_EIGHT;
        if (!real || c >= cols) continue;
        float w[8];
        kern_load8(x + c, cols - c, n[k]);
        kern_load8(dy + c, cols - c, g[k]);
        kern_load8_param(a.pt, a.w, c, cols - c, w);
        KERN_UNROLL
        for (int e = 0; e < 8; e++) {
            n[k][e] = n[k][e] * rstd;
            sum = sum + g[k][e] * w[e] * n[k][e];
            dw[k][e] = dw[k][e] + g[k][e] * n[k][e];
        }
    }
    const float mean = __fdiv_rn(norm_row_sum<S::lanes>(sum, sums), (float)cols);
    KERN_UNROLL
    for (int k = 0; k < S::held; k++) {
        const uint64_t c = at + (uint64_t)k * S::lanes * KERN_EIGHT;
        if (!real || c >= cols) continue;
        float w[8];
        kern_load8_param(a.pt, a.w, c, cols - c, w);
        norm_store_dx(a, xi + c, cols - c, n[k], g[k], w, mean, rstd);
    }
}

template <typename X, typename Y, typename S>
static __global__ void __launch_bounds__(KERN_BLOCK)
    norm_backward_kernel(struct ops_rmsnorm a, uint64_t part_rows, uint64_t parts, float *out)
{
    __shared__ float sums[KERN_BLOCK / KERN_WARP];
    __shared__ float room[S::rows > 1 ? KERN_BLOCK * KERN_EIGHT : 1];
    const uint64_t slot = threadIdx.x / S::lanes;
    for (uint64_t p = blockIdx.x; p < parts; p += gridDim.x) {
        const uint64_t end = kern_least((p + 1) * part_rows, a.rows);
        float dw[S::held][8] = { { 0 } };
        for (uint64_t r = p * part_rows; r < end; r += S::rows)
            norm_backward_row<X, Y, S>(a, r + slot, r + slot < end, sums, dw);
        if (!a.dw) continue;
        KERN_UNROLL
        for (int k = 0; k < S::held; k++) {
            const uint64_t base = (uint64_t)k * S::lanes * KERN_EIGHT;
            if (S::rows > 1) {
                norm_fold_slots<S>(dw[k], base, a.cols, room, out + p * a.cols);
            } else {
                const uint64_t c = base + threadIdx.x * KERN_EIGHT;
                if (c < a.cols) kern_store8(out + p * a.cols + c, a.cols - c, dw[k]);
            }
        }
    }
}

/* Rows of any length: read twice, dw in the part's own memory. */
template <typename X, typename Y>
static __global__ void __launch_bounds__(KERN_BLOCK)
    norm_backward_long_kernel(struct ops_rmsnorm a, uint64_t part_rows, uint64_t parts, float *out)
{
    __shared__ float sums[KERN_BLOCK / KERN_WARP];
    const uint64_t at = threadIdx.x * KERN_EIGHT, step = KERN_BLOCK * KERN_EIGHT, cols = a.cols;
    for (uint64_t p = blockIdx.x; p < parts; p += gridDim.x) {
        const uint64_t end = kern_least((p + 1) * part_rows, a.rows);
        for (uint64_t r = p * part_rows; r < end; r++) {
            const uint64_t xi = norm_row_at(a, r, a.x_stride);
            const X *x = (const X *)a.x + xi;
            const Y *dy = (const Y *)a.dy + norm_row_at(a, r, a.y_stride);
            const float rstd = a.rstd[r];
            float n[8], g[8], w[8], sum = 0;
            for (uint64_t c = at; c < cols; c += step) {
                float dw[8] = { 0 }, *mine = out + p * cols + c;
                kern_load8(x + c, cols - c, n);
                kern_load8(dy + c, cols - c, g);
                kern_load8_param(a.pt, a.w, c, cols - c, w);
                if (a.dw && r > p * part_rows) kern_load8(mine, cols - c, dw);
                KERN_UNROLL
                for (int e = 0; e < 8; e++) {
                    n[e] = n[e] * rstd;
                    sum = sum + g[e] * w[e] * n[e];
                    dw[e] = dw[e] + g[e] * n[e];
                }
                if (a.dw) kern_store8(mine, cols - c, dw);
            }
            const float mean = __fdiv_rn(norm_row_sum<KERN_BLOCK>(sum, sums), (float)cols);
            for (uint64_t c = at; c < cols; c += step) {
                kern_load8(x + c, cols - c, n);
                kern_load8(dy + c, cols - c, g);
                kern_load8_param(a.pt, a.w, c, cols - c, w);
                KERN_UNROLL
                for (int e = 0; e < 8; e++) n[e] = n[e] * rstd;
                norm_store_dx(a, xi + c, cols - c, n, g, w, mean, rstd);
            }
        }
    }
}

uint64_t cuda_rmsnorm_scratch(const struct ops_rmsnorm *a, bool backward)
{
    if (!backward) return 0;
    return kern_parts_of(a->rows, norm_rows_at_once(a->cols)) * a->cols * sizeof(float);
}

template <typename X, typename Y>
static cudaError_t norm_backward(cudaStream_t s, const struct ops_rmsnorm *a)
{
    const unsigned step = norm_rows_at_once(a->cols);
    const uint64_t part_rows = kern_part_rows(a->rows, step), parts = kern_parts_of(a->rows, step);
    float *part = (float *)a->scratch.base;
    const cudaError_t e = norm_with_shape(a->cols, [&](auto shape) {
        using S = decltype(shape);
        if constexpr (S::held == 0)
            return kern_launch(s, parts, KERN_BLOCK, norm_backward_long_kernel<X, Y>, *a, part_rows,
                               parts, part);
        else
            return kern_launch(s, parts, KERN_BLOCK, norm_backward_kernel<X, Y, S>, *a, part_rows,
                               parts, part);
    });
    if (e != cudaSuccess || !a->dw) return e;
    return kern_parts_sum(s, part, parts, a->cols, a->dw, a->overwrite);
}

cudaError_t cuda_rmsnorm_backward(cudaStream_t s, const struct ops_rmsnorm *a)
{
    return kern_with_activation(ops_wide(a->at, a->x_wide), [&](auto *x) {
        using X = std::remove_pointer_t<decltype(x)>;
        return kern_with_activation(ops_wide(a->at, a->y_wide), [&](auto *y) {
            using Y = std::remove_pointer_t<decltype(y)>;
            return norm_backward<X, Y>(s, a);
        });
    });
}
