/* gpu/cuda/kernels/norm.cuh - how rows of a norm lie on threads: what forward and backward share.
 *
 * `lanes` threads share a row, each holding up to `held` groups of eight columns (group g of thread
 * l: columns (g * lanes + l) * 8 on) in registers, so that a row is read once. Short rows: several
 * a warp; rows beyond 8192 columns are read twice (held = 0). Sums: a thread's eight columns in
 * order, group after group, then the tree of lanes, then the warps in order. Only .cu files of this
 * folder include it. */
#ifndef GPU_CUDA_KERNELS_NORM_CUH
#define GPU_CUDA_KERNELS_NORM_CUH

#include "gpu/cuda/kernels/kern.cuh"

template <int lanes_, int held_>
struct norm_shape {
    static constexpr int lanes = lanes_, held = held_;
    static constexpr int rows = KERN_BLOCK / lanes; /* of a block at once */
};

/* Calls f(norm_shape) for rows of so many columns. */
template <typename F>
static inline cudaError_t norm_with_shape(uint64_t cols, F f)
{
    if (cols <= 16 * KERN_EIGHT) return f(norm_shape<16, 1>());
    if (cols <= 32 * KERN_EIGHT * 4) return f(norm_shape<32, 4>());
    if (cols <= KERN_BLOCK * KERN_EIGHT * 2) return f(norm_shape<KERN_BLOCK, 2>());
    if (cols <= KERN_BLOCK * KERN_EIGHT * 4) return f(norm_shape<KERN_BLOCK, 4>());
    return f(norm_shape<KERN_BLOCK, 0>());
}
static inline unsigned norm_rows_at_once(uint64_t cols)
{
    unsigned rows = 0;
    norm_with_shape(cols, [&](auto shape) {
        rows = (unsigned)decltype(shape)::rows;
        return cudaSuccess;
    });
    return rows;
}

KERN_DEVICE uint64_t norm_row_at(const struct ops_rmsnorm &a, uint64_t row, uint64_t stride)
{
    if (a.group == 1) return row * stride;
    const uint64_t token = row / a.group;
    return token * stride + (row - token * a.group) * a.cols;
}

/* Sum over the threads of a row. All threads of the block call; `sums` is the block's own, used
 * where a row is the block's, and free again after the next barrier. */
template <int lanes>
KERN_DEVICE float norm_row_sum(float x, float *sums)
{
    if constexpr (lanes <= KERN_WARP) {
        (void)sums;
        return kern_lanes_sum<lanes>(x);
    } else {
        x = kern_lanes_sum<KERN_WARP>(x);
        __syncthreads();
        if (threadIdx.x % KERN_WARP == 0) sums[threadIdx.x / KERN_WARP] = x;
        __syncthreads();
        float sum = sums[0];
        KERN_UNROLL
        for (int w = 1; w < KERN_BLOCK / KERN_WARP; w++) sum = sum + sums[w];
        return sum;
    }
}

#endif
