/* tests/gpu/simt/simt.h - what a test asks of the SIMT executor: .cu files compiled as C++, their kernels run
 * on one OS thread, every CUDA thread of a block as a fiber, with every access to memory checked.
 *
 *     simt_seed(seed);
 *     float *x = simt_alloc(n * sizeof *x, "x");       (device memory, unwritten, guarded)
 *     memcpy(x, host, n * sizeof *x); simt_written(x, n * sizeof *x);
 *     cuda_something(NULL, &args);                     (a launcher of the .cu file)
 *     CHECK(!simt_error()); ... read x ...; simt_free(x);
 *
 * WHAT IS FOUND (enum simt_fault). The first fault ends its launch; it is kept with one sentence, and later
 * launches do nothing, until simt_reset_error.
 *
 * WHAT IS TAKEN FOR ORDER. A launch comes after the launches before it. Inside a block __syncthreads orders all,
 * __syncwarp the lanes of its mask; shuffles order nothing (they move registers). Blocks of one launch are never
 * ordered. Atomics are no race among each other, and order nothing. Two accesses of the same bytes by different
 * threads, one of them a write, that are not ordered, are a race, whatever order this run took: seeds need not
 * be lucky to find it. STRICTER than a card: a thread that has ended may be waited for neither by __syncthreads
 * nor by a mask, and a mask may name only lanes that the block has.
 *
 * WHAT IS NOT FOUND. Races of launches on two streams (the stand-in of the runtime orders launches);
 * reads of unset registers and of a thread's own arrays; fences (__threadfence has no meaning here, and so is
 * not declared). With clang++ also: a misaligned copy of a whole
 * object (a float4).
 *
 * SEED. The order of blocks, and of the threads that could run, also between two accesses. Seed 0: blocks
 * and threads in ascending order.
 *
 * One thread at a time calls all of this (launchers aside, which only hand over). C11 and C++17. */
#ifndef TESTS_SIMT_H
#define TESTS_SIMT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum simt_fault {
    SIMT_NONE,
    SIMT_BOUNDS,       /* outside of every buffer: host memory, or beyond an end */
    SIMT_FREED,        /* in a buffer that is no more */
    SIMT_READ_ONLY_WRITTEN,
    SIMT_UNWRITTEN,    /* read, and nobody has written it */
    SIMT_RACE,
    SIMT_BARRIER,      /* __syncthreads that not every thread of the block reaches, or not the same one */
    SIMT_WARP,         /* a shuffle or __syncwarp whose mask names lanes that do not come */
    SIMT_MISALIGNED,
    SIMT_UNDEFINED,    /* index beyond an array's type, shift too far, signed overflow, division by zero */
    SIMT_LAUNCH        /* a grid, block or amount of shared memory that no card takes */
};

/* --- faults */
/* The first fault since the last reset: a sentence that names kernel, block, thread, address and buffer, with
 * the source line where the program has one. NULL: none. Valid until the reset. */
const char *simt_error(void);
enum simt_fault simt_error_kind(void);
void simt_reset_error(void);

/* --- order and checks */
void simt_seed(uint64_t seed);
/* Which checks are made; all at start. Without any, kernels run several times faster; what they write then counts as
 * unwritten until simt_written. */
enum { SIMT_CHECK_BOUNDS = 1, SIMT_CHECK_UNWRITTEN = 2, SIMT_CHECK_RACES = 4, SIMT_CHECK_ALL = 7 };
void simt_checks(unsigned checks);
/* KERNELS WITHOUT CHECKS: a .cu file compiled with -DSIMT_PLAIN and without -fsanitize=... (simt_cu['plain'] in
 * meson.build) makes none, whatever was asked for: its accesses are not seen, only barriers, warp operations and launches
 * are judged. For runs of many steps over many seeds. Same bits. */

/* --- device memory: what kernels may touch. Ranges do not overlap. */
enum { SIMT_WRITTEN = 1 /* all of it has been written */, SIMT_READ_ONLY = 2 };
/* `name` is copied. The bytes stay the caller's; they should be followed and preceded by some that are not
 * registered, or going over the end meets the neighbour. false: overlaps a registered range. */
bool simt_register(void *base, size_t size_bytes, const char *name, unsigned flags);
void simt_unregister(void *base);
/* Own memory, 256-byte aligned, filled with NaN patterns, unwritten, with unregistered bytes on both
 * sides. Never NULL (a test that has no memory ends). */
void *simt_alloc(size_t size_bytes, const char *name);
void simt_read_only(void *base); /* for kernels, from now on */
void simt_free(void *base); /* kept apart for a while, so that a later use is found */
/* By the host, into registered memory: now written; now unwritten (filled with NaN patterns). */
void simt_written(const void *p, size_t size_bytes);
void simt_poison(void *p, size_t size_bytes);
/* How many of these bytes nobody has written; all of them where memory is not registered. */
uint64_t simt_unwritten_bytes(const void *p, size_t size_bytes);
/* An access by something that is no kernel (a copy, a library's stand-in, `what`): checked and marked as if a
 * launch of its own did it. false: a fault, kept as above. */
bool simt_access(const char *what, const void *p, size_t size_bytes, bool write);

/* Called for each access that a kernel makes to registered memory, with its address; NULL: nobody. For who
 * orders launches (tests/gpu/standin). */
extern void (*simt_watch)(const void *p, size_t size_bytes, bool write);

/* --- launches. One is an object that can be kept and run later: its shape, stream, kernel and a copy of its
 * arguments. Whoever stands in for the runtime sets simt_submit, to which every launch is handed over: it runs
 * it by simt_launch_run when its turn comes, and frees it. At start (runtime.cpp) it runs at once, and a
 * fault gives cudaErrorIllegalAddress, cudaErrorMisalignedAddress or cudaErrorInvalidConfiguration. */
struct simt_launch; /* include/simt_device.h */
extern int (*simt_submit)(struct simt_launch *l); /* a cudaError_t */
void simt_launch_run(const struct simt_launch *l); /* all of its blocks, now; nothing while a fault is kept */
void simt_launch_free(struct simt_launch *l);
const char *simt_launch_name(const struct simt_launch *l); /* of the kernel; valid until the program ends */
void *simt_launch_stream(const struct simt_launch *l);     /* a cudaStream_t */

struct simt_stats {
    uint64_t launches, blocks, threads, accesses, barriers, warp_ops, switches;
    uint64_t shared_bytes_max; /* most shared memory that one block has touched */
};
void simt_stats_read(struct simt_stats *out); /* since the start of the program */

#ifdef __cplusplus
}
#endif

#endif
