/* tests/gpu/simt/basics.h - launchers of basics.cu: what CUDA's documentation says of shuffles, conversions and
 * indices, written down by kernels for the test to compare. */
#ifndef TESTS_SIMT_BASICS_H
#define TESTS_SIMT_BASICS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { BASICS_SHUFFLES = 8, BASICS_LANES = 64 };
/* out[k * 64 + t]: what thread t of one block of 64 gets from shuffle k of its own number (basics.cu lists them). */
cudaError_t basics_shuffles(int *out);
/* bf16 and fp16 of x[i], and back. */
cudaError_t basics_convert(const float *x, uint16_t *bf16, uint16_t *fp16, float *from_bf16, float *from_fp16, uint64_t n);
/* Every thread of a grid of (2,3,2) blocks of (4,2,3) threads takes a number from *next (starts at 0) and writes who it
 * is to order[number]: linear block * 24 + linear thread. */
cudaError_t basics_order(unsigned *next, int *order);
/* y[i] = 2 x[i], `stream` as the launch has it. */
cudaError_t basics_double(cudaStream_t stream, const float *x, float *y, uint64_t n);
/* *sum = steps, counted over that many barriers of 1024 threads, each with some KiB on its stack. steps < 1023. */
cudaError_t basics_deep(int steps, int *sum);

#ifdef __cplusplus
}
#endif

#endif
