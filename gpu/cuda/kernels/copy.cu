/* gpu/cuda/kernels/copy.cu - a copy over the link at a given rate.
 *
 * Owns: cuda_copy_paced. The copy engines go as fast as the link does and cannot be slowed; cut into pieces with
 * pauses between them they still take all of the host's memory while they run. So a few blocks read one side and
 * write the other, and each begins a piece of PIECE_BYTES only when the time for those before it is over: what is
 * moved in any few microseconds is what the rate allows. Must not know why a copy is slow. */
#include "gpu/cuda/kernels/kern.cuh"

enum { COPY_BLOCKS = 4, COPY_THREADS = 256, COPY_VECTORS = 2 };
#define PIECE_BYTES ((uint64_t)COPY_THREADS * COPY_VECTORS * sizeof(uint4))

/* The card's clock. The executor of the tests has none: nothing waits there. */
KERN_DEVICE uint64_t clock_ns(void)
{
    uint64_t now_ns = 0;
#ifdef __CUDA_ARCH__
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns));
#endif
    return now_ns;
}
KERN_DEVICE void wait_until(uint64_t begin_ns, uint64_t wait_ns)
{
#ifdef __CUDA_ARCH__
    while (clock_ns() - begin_ns < wait_ns) {}
#else
    (void)begin_ns, (void)wait_ns;
#endif
}

static __global__ void __launch_bounds__(COPY_THREADS)
    paced_kernel(uint64_t vectors, const uint4 *src, uint4 *dst, double piece_ns)
{
    const uint64_t begin_ns = clock_ns(), piece = COPY_THREADS * COPY_VECTORS;
    const uint64_t step = (uint64_t)gridDim.x * piece;
    uint64_t done = 0;
    for (uint64_t at = blockIdx.x * piece; at < vectors; at += step, done++) {
        wait_until(begin_ns, (uint64_t)((double)done * piece_ns));
        uint4 v[COPY_VECTORS];
        KERN_UNROLL
        for (int k = 0; k < COPY_VECTORS; k++) {
            const uint64_t i = at + (uint64_t)k * COPY_THREADS + threadIdx.x;
            if (i < vectors) v[k] = src[i];
        }
        KERN_UNROLL
        for (int k = 0; k < COPY_VECTORS; k++) {
            const uint64_t i = at + (uint64_t)k * COPY_THREADS + threadIdx.x;
            if (i < vectors) dst[i] = v[k];
        }
    }
}

cudaError_t cuda_copy_paced(cudaStream_t s, void *dst, const void *src, uint64_t bytes, double bytes_per_s)
{
    const uint64_t vectors = bytes / sizeof(uint4), pieces = kern_div_up(bytes, PIECE_BYTES);
    const uint64_t most = COPY_BLOCKS, blocks = pieces < most ? pieces : most;
    return kern_launch(s, blocks, COPY_THREADS, paced_kernel, vectors, (const uint4 *)src, (uint4 *)dst,
                       (double)blocks * (double)PIECE_BYTES / bytes_per_s * 1e9);
}
