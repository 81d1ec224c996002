/* gpu/cuda/kernels/swiglu.cu - SwiGLU (Shazeer 2020): y = silu(gate) * up.
 *
 * Owns: cuda_swiglu_forward and _backward. One pass over memory; fp32 inside, the host's operations
 * in the host's order (gpu/host/kernels/elementwise_isa.c), so its bits. */
#include "gpu/cuda/kernels/math.cuh"

template <typename T, typename Y>
static __global__ void __launch_bounds__(KERN_BLOCK)
    swiglu_forward_kernel(struct ops_swiglu a, kern_tiles t)
{
    kern_tiles_each(t, [&](uint64_t row, uint64_t col) {
        const uint64_t n = a.cols - col;
        float g[8], u[8];
        kern_load8((const T *)a.gate + row * a.g_stride + col, n, g);
        kern_load8((const T *)a.up + row * a.u_stride + col, n, u);
        KERN_UNROLL
        for (int e = 0; e < 8; e++) g[e] = __fdiv_rn(g[e], kern_exp(-g[e]) + 1.0f) * u[e];
        kern_store8((Y *)a.y + row * a.y_stride + col, n, g);
    });
}

/* s = sigmoid(g):  d_up = dy * g * s;  d_gate = dy * up * s * (1 + g (1 - s)); y as the forward has
 * it, where it is asked for. All is read before any is written. e stays finite, so that 1 - s = e s
 * is 1 at its end. */
template <typename T, typename Y>
static __global__ void __launch_bounds__(KERN_BLOCK)
    swiglu_backward_kernel(struct ops_swiglu a, kern_tiles t)
{
    kern_tiles_each(t, [&](uint64_t row, uint64_t col) {
        const uint64_t n = a.cols - col, gi = row * a.g_stride + col, ui = row * a.u_stride + col;
        float g[8], u[8], dy[8], y[8];
        kern_load8((const T *)a.gate + gi, n, g);
        kern_load8((const T *)a.up + ui, n, u);
        kern_load8((const Y *)a.dy + row * a.y_stride + col, n, dy);
        KERN_UNROLL
        for (int i = 0; i < 8; i++) {
            float e = kern_exp(-g[i]);
            y[i] = __fdiv_rn(g[i], e + 1.0f) * u[i];
            e = e > 3.0e38f ? 3.0e38f : e;
            const float s = __fdiv_rn(1.0f, e + 1.0f), rest = e * s, act = g[i] * s;
            const float dgate = dy[i] * u[i] * (s * (g[i] * rest + 1.0f));
            u[i] = dy[i] * act;
            g[i] = dgate;
        }
        kern_store8((T *)a.dup + ui, n, u);
        kern_store8((T *)a.dgate + gi, n, g);
        if (a.y) kern_store8((Y *)a.y + row * a.y_stride + col, n, y);
    });
}

template <typename F>
static cudaError_t with_types(const struct ops_swiglu *a, F f)
{
    return kern_with_activation(a->at, [&](auto *t) {
        return kern_with_activation(ops_wide(a->at, a->y_wide), [&](auto *y) { return f(t, y); });
    });
}

cudaError_t cuda_swiglu_forward(cudaStream_t s, const struct ops_swiglu *a)
{
    const kern_tiles t = kern_tiles_of(a->rows, a->cols);
    return with_types(a, [&](auto *x, auto *y) {
        using T = std::remove_pointer_t<decltype(x)>;
        using Y = std::remove_pointer_t<decltype(y)>;
        return kern_launch(s, t.row_tiles * t.col_tiles, KERN_BLOCK, swiglu_forward_kernel<T, Y>,
                           *a, t);
    });
}

cudaError_t cuda_swiglu_backward(cudaStream_t s, const struct ops_swiglu *a)
{
    const kern_tiles t = kern_tiles_of(a->rows, a->cols);
    return with_types(a, [&](auto *x, auto *y) {
        using T = std::remove_pointer_t<decltype(x)>;
        using Y = std::remove_pointer_t<decltype(y)>;
        return kern_launch(s, t.row_tiles * t.col_tiles, KERN_BLOCK, swiglu_backward_kernel<T, Y>,
                           *a, t);
    });
}
