/* gpu/cuda/kernels/elementwise.cu - additions and casts.
 *
 * Owns: cuda_add, cuda_acc_add, cuda_cast. A sum is one fp32 addition, rounded on store
 * (gpu/ops.h), so results have the host's bits. Must not know what is added. */
#include "gpu/cuda/kernels/kern.cuh"

/* y may be a or b: an element is read and written by one thread. */
template <typename A, typename B, typename Y>
static __global__ void __launch_bounds__(KERN_BLOCK)
    add_kernel(uint64_t n, const A *a, const B *b, Y *y)
{
    const uint64_t groups = (n + KERN_EIGHT - 1) / KERN_EIGHT;
    const uint64_t step = (uint64_t)gridDim.x * KERN_BLOCK;
    for (uint64_t g = (uint64_t)blockIdx.x * KERN_BLOCK + threadIdx.x; g < groups; g += step) {
        const uint64_t i = g * KERN_EIGHT;
        float u[8], v[8];
        kern_load8(a + i, n - i, u);
        kern_load8(b + i, n - i, v);
        KERN_UNROLL
        for (int e = 0; e < 8; e++) u[e] = u[e] + v[e];
        kern_store8(y + i, n - i, u);
    }
}

static uint64_t blocks_of(uint64_t n) { return kern_div_up(n, (uint64_t)KERN_BLOCK * KERN_EIGHT); }

cudaError_t cuda_add(cudaStream_t s, enum ops_dtype at, uint64_t n, const void *a, const void *b,
                     void *y)
{
    return kern_with_activation(at, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        return kern_launch(s, blocks_of(n), KERN_BLOCK, add_kernel<T, T, T>, n, (const T *)a,
                           (const T *)b, (T *)y);
    });
}

cudaError_t cuda_acc_add(cudaStream_t s, uint64_t n, float *acc, const void *src, enum ops_dtype st)
{
    return kern_with_any(st, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        return kern_launch(s, blocks_of(n), KERN_BLOCK, add_kernel<float, T, float>, n,
                           (const float *)acc, (const T *)src, acc);
    });
}

template <typename From, typename To>
static __global__ void __launch_bounds__(KERN_BLOCK) cast_kernel(struct cuda_cast a, kern_tiles t)
{
    kern_tiles_each(t, [&](uint64_t row, uint64_t col) {
        float v[8];
        kern_load8((const From *)a.src + row * a.src_ld + col, a.cols - col, v);
        kern_store8((To *)a.dst + row * a.dst_ld + col, a.cols - col, v);
    });
}

cudaError_t cuda_cast(cudaStream_t s, const struct cuda_cast *a)
{
    /* Rows that follow one another are one row. */
    struct cuda_cast c = *a;
    if (c.src_ld == c.cols && c.dst_ld == c.cols) {
        c.src_ld = c.dst_ld = c.cols = c.rows * c.cols;
        c.rows = 1;
    }
    const kern_tiles t = kern_tiles_of(c.rows, c.cols);
    return kern_with_any(c.from, [&](auto *from) {
        using From = std::remove_pointer_t<decltype(from)>;
        return kern_with_any(c.to, [&](auto *to) {
            using To = std::remove_pointer_t<decltype(to)>;
            return kern_launch(s, t.row_tiles * t.col_tiles, KERN_BLOCK, cast_kernel<From, To>, c,
                               t);
        });
    });
}
