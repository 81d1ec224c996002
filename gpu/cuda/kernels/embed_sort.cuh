/* gpu/cuda/kernels/embed_sort.cuh - tokens by (id, token). Only embed.cu and embed_sort.cu include
 * it. */
#ifndef GPU_CUDA_KERNELS_EMBED_SORT_CUH
#define GPU_CUDA_KERNELS_EMBED_SORT_CUH

#include "gpu/cuda/kernels/kern.cuh"

/* A pair is id << 32 | token: all are different, so they have one order. */
KERN_DEVICE uint64_t embed_pair_id(uint64_t pair) { return pair >> 32; }
KERN_DEVICE uint64_t embed_pair_token(uint64_t pair) { return pair & 0xffffffffu; }

/* Two arrays of pairs. */
uint64_t embed_sort_scratch(uint64_t tokens);
/* Queues the sort; *pairs (in scratch) are then sorted. tokens below 2^31. */
cudaError_t embed_sort(cudaStream_t s, const int32_t *ids, uint64_t tokens,
                       const struct ops_scratch *scratch, const uint64_t **pairs);

#endif
