/* gpu/cuda/kernels/parts.cuh - sums over rows in two stages: rows are cut into parts by the shape
 * alone, each part is summed in row order by whoever computes the rows, then the parts by the
 * kernel of column_sum.cu. Only .cu files of this folder include it. */
#ifndef GPU_CUDA_KERNELS_PARTS_CUH
#define GPU_CUDA_KERNELS_PARTS_CUH

#include "gpu/cuda/kernels/kern.cuh"

/* Enough parts to fill any card, few enough that they are a small share of the rows. */
enum { KERN_PARTS_MAX = 512 };
/* Rows of one part, a multiple of `step` (rows that a block takes at once). */
static inline uint64_t kern_part_rows(uint64_t rows, uint64_t step)
{
    return kern_round_up(kern_div_up(rows, KERN_PARTS_MAX), step * 4);
}
static inline uint64_t kern_parts_of(uint64_t rows, uint64_t step)
{
    return kern_div_up(rows, kern_part_rows(rows, step));
}

/* dst[c] = (overwrite ? 0 : dst[c]) + sum over p of part[p * cols + c]. */
cudaError_t kern_parts_sum(cudaStream_t s, const float *part, uint64_t parts, uint64_t cols,
                           float *dst, bool overwrite);

#endif
