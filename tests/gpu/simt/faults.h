/* tests/gpu/simt/faults.h - small kernels, each in a right version and in one with a planted fault, for the
 * tests of the executor itself. */
#ifndef TESTS_SIMT_FAULTS_H
#define TESTS_SIMT_FAULTS_H

#include <stdbool.h>
#include <stdint.h>

/* X(name, what is wrong in the wrong version) */
#define FAULTS_MAP(X)                                                                              \
    X(tree_sum, "no barrier between the stages of a reduction")                                    \
    X(neighbour, "no barrier after a tile was loaded")                                             \
    X(reuse, "no barrier before a tile is loaded again")                                           \
    X(counter, "all threads add to one shared number, not atomically")                             \
    X(counter_start, "no barrier between setting a number to 0 and adding to it")                  \
    X(after_end, "one element too many")                                                           \
    X(before_start, "one element too early")                                                       \
    X(struct_end, "an object reaches beyond the end")                                              \
    X(tile_index, "an index beyond a shared array")                                                \
    X(unwritten_tile, "a part of a shared array is not written")                                   \
    X(unwritten_input, "the input is not written")                                                 \
    X(two_blocks, "two blocks write one element")                                                  \
    X(divergent, "a barrier in a branch that not all threads take")                                \
    X(early_end, "threads end before the barrier")                                                 \
    X(absent_lane, "a shuffle names lanes that take another branch")                               \
    X(other_mask, "lanes of one shuffle have different masks")                                     \
    X(foreign_lane, "a lane reads from one that the mask does not name")                           \
    X(warp_pass, "no __syncwarp between a lane's write and another's read")                        \
    X(host_pointer, "a pointer to host memory")                                                    \
    X(freed, "a buffer that was freed")                                                            \
    X(misaligned, "a vector at an address that is no multiple of its size")                        \
    X(copy_end, "memcpy beyond the end")                                                           \
    X(constant, "the input is written")                                                            \
    X(local_memory, "a pointer to another thread's variable")                                      \
    X(overflow, "a signed sum that overflows")                                                     \
    X(large_block, "more threads than a block can have")                                           \
    X(large_shared, "more shared memory than a block has")                                         \
    X(halves, "two threads write one 16-bit element")

enum faults_kernel {
#define FAULTS_ENUM(name, what) FAULTS_##name,
    FAULTS_MAP(FAULTS_ENUM)
#undef FAULTS_ENUM
    FAULTS_N
};

struct faults_args {
    const float *x; /* [n + 1], device */
    float *y;       /* [n], device */
    uint64_t n;     /* a multiple of 64 only for some kernels */
};

#ifdef __cplusplus
extern "C"
#endif
/* Launches one kernel over n elements, in blocks of 64 threads. cudaError_t of the launch. */
int faults_launch(enum faults_kernel which, bool wrong, const struct faults_args *a);

#endif
