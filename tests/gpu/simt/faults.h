/* tests/gpu/simt/faults.h - launchers of faults.cu: small kernels, right ones and each with one planted fault. */
#ifndef TESTS_SIMT_FAULTS_H
#define TESTS_SIMT_FAULTS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* sums[b] = x[128 b] + ... + x[128 b + 127], for blocks of 128 threads. */
void faults_block_sum(const float *x, float *sums, uint64_t blocks);
void faults_warp_sum(const float *x, float *sums, uint64_t warps);

#ifdef __cplusplus
}
#endif

#endif
