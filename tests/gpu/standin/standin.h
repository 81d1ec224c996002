/* tests/gpu/standin/standin.h - what a test asks of the stand-in for CUDA's runtime and cuBLASLt.
 *
 * What is linked with it calls CUDA's functions (simt/include/cuda_runtime_api.h, include/cublasLt.h) and knows
 * nothing of this header. Every operation of a stream is kept until somebody runs it: then a seeded choice
 * among the streams' first operations whose events have passed runs one. Kernels run on the SIMT executor (simt.h),
 * products by a plain loop whose order of sums is the algorithm's. There is one card, device 0.
 *
 * WHO RUNS WORK (enum standin_mode)
 *   STANDIN_MANUAL  the test, by standin_run; and calls that wait, until they are satisfied
 *   STANDIN_THREAD  a thread of its own, at once; for base/exec.h's threads
 *   STANDIN_SIM     a lane of a simulated exec (standin_open_sim): one OS thread, all a function of two seeds. An
 *                   operation begins when its engine is free, takes virtual time and ends; its effect on
 *                   memory is at its begin or its end, by seed
 *
 * TIME is virtual everywhere: an operation begins when its stream, its events and its engine (compute, copies in,
 * copies out) are ready, and lasts as the rates of the configuration say. In MANUAL and THREAD time is only
 * written down; in SIM it is exec's.
 *
 * WHAT IS FOUND (enum standin_found): kept as sentences until standin_close. Findings that a card would punish
 * are a sticky error, too. RACE needs no luck: two operations touch the same bytes, one of them
 * writes, and neither stream order, events, nor the host's knowledge (a callback that ran, a call that waited) puts
 * one before the other, in whatever order they ran (vector clocks: Fidge 1988, Mattern 1989).
 *
 * One session at a time. Calls of CUDA: any thread. Calls here: the test's thread, while no work runs
 * unless said otherwise. C11 and C++17. */
#ifndef TESTS_STANDIN_H
#define TESTS_STANDIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum standin_mode { STANDIN_MANUAL, STANDIN_THREAD, STANDIN_SIM };

struct standin_cfg { /* 0: the default in brackets */
    enum standin_mode mode;
    uint64_t seed;                  /* of all choices; 0: the oldest operation first, threads of kernels in order */
    int devices;                    /* [1]; -1: a driver and no card */
    int driver_version, runtime_version; /* [13000] */
    int cc_major, cc_minor;         /* [8.9] */
    uint64_t memory_bytes;          /* of the card [24 GiB]; taken from the host only when allocated */
    uint64_t context_bytes;         /* taken at start [256 MiB] */
    uint64_t pinned_limit_bytes;    /* [no limit] */
    double copy_in_bytes_per_s, copy_out_bytes_per_s; /* [16e9] */
    double memory_bytes_per_s;      /* copies on the card, zeros [400e9] */
    double flops_per_s;             /* of products [40e12] */
    double kernel_threads_per_s;    /* threads of kernels [20e9] */
    uint64_t launch_ns;             /* least of any work [3000] */
    bool unordered;                 /* do not look for RACE: faster */
    bool gaps;                      /* copies out may take bytes that nobody has written (gaps inside what is copied whole) */
    bool plain;                     /* kernels are compiled without checks (simt.h): what they touch is not known, so neither
                                     * UNWRITTEN nor RACE with a kernel is found; unwritten memory is NaN all the same */
};

void standin_open(const struct standin_cfg *cfg); /* MANUAL, THREAD */
/* Drops what is still queued; frees what was not freed. */
void standin_close(void);

struct exec;
/* STANDIN_SIM: opens a lane "card" on `ex`, a simulation; standin_close_sim before exec_close. false: no lane. */
bool standin_open_sim(const struct standin_cfg *cfg, struct exec *ex);
void standin_close_sim(void);

/* --- MANUAL: runs up to n operations; returns how many there were to run */
uint64_t standin_run(uint64_t n);
#define STANDIN_ALL UINT64_MAX

/* --- findings */
enum standin_found {
    STANDIN_RACE,       /* two operations that nothing orders use the same memory */
    STANDIN_FREED,      /* memory that is no more */
    STANDIN_FOREIGN,    /* a host pointer where the device's is due, or the other way round; past an end */
    STANDIN_PAGEABLE,   /* a copy from or to host memory that is not pinned: right, and slow */
    STANDIN_UNPINNED,   /* host memory was unpinned, and a queued copy still needs it */
    STANDIN_UNWRITTEN,  /* reads what nobody has written */
    STANDIN_KERNEL,     /* the SIMT executor's other faults */
    STANDIN_CALLBACK,   /* a callback calls CUDA */
    STANDIN_HANDLE,     /* a stream, event or descriptor that is not there */
    STANDIN_DEFAULT_STREAM, /* work without a stream */
    STANDIN_ALIGNMENT,  /* of a product's operand: less than was promised to the heuristic */
    STANDIN_FOUND_N
};
uint64_t standin_found(enum standin_found kind);
uint64_t standin_found_any(void); /* but PAGEABLE, which is no mistake by itself */
/* The i-th of all findings, in order; NULL: there are fewer (64 are kept). */
const char *standin_finding(uint64_t i);

/* --- faults to come */
/* The n-th call of `call` from now on (1: the next one; NULL: of any call that can fail) returns `error` (a
 * cudaError_t; a cublasStatus_t or cudnnStatus_t for names that begin so; of NULL, ..._STATUS_EXECUTION_FAILED is
 * those calls' error) and does nothing, except that what frees, frees. */
void standin_fail(const char *call, uint64_t n, int error);
/* The n-th kernel or product that is run from now on fails with `error`: sticky from there. */
void standin_fail_kernel(uint64_t n, int error);
/* cuDNN's results from now on, until standin_close: right; a quarter too large; other bits at each run. */
enum standin_dnn { STANDIN_DNN_RIGHT, STANDIN_DNN_WRONG, STANDIN_DNN_LOOSE };
void standin_dnn(enum standin_dnn how);
/* The name of the call that standin_fail has hit last; NULL: none yet. */
const char *standin_failed_call(void);
int standin_sticky(void); /* the sticky cudaError_t, 0: none */

/* --- mistakes of the product, planted: the n-th (1: the next one) from now on. Each is counted, planted or not. */
enum standin_plant {
    STANDIN_PLANT_NO_WAIT,   /* a cudaStreamWaitEvent that waits for nothing, as if it had been forgotten */
    STANDIN_PLANT_EARLY,     /* a callback that is called when it is queued, before the work in front of it: whoever is
                              * told gives a buffer free too early */
    STANDIN_PLANT_FREE,      /* when an operation is queued, the largest block of the card is freed */
    STANDIN_PLANT_UNPINNED,  /* a cudaHostRegister that pins nothing: copies from there are pageable */
    STANDIN_PLANTS
};
void standin_plant(enum standin_plant what, uint64_t n);
uint64_t standin_plant_places(enum standin_plant what); /* since open: where one could have been */

/* --- figures since open */
struct standin_counts {
    uint64_t calls;             /* that can fail, of all kinds */
    uint64_t queued;            /* operations: the last one's number */
    uint64_t synchronisations;  /* cudaStreamSynchronize and its like, and what waits by itself */
    uint64_t device_synchronisations;
    uint64_t allocations;       /* cudaMalloc, cudaHostAlloc */
    uint64_t registrations;     /* cudaHostRegister */
    uint64_t kernels, products; /* run */
    uint64_t copies_pageable;
    uint64_t copied_bytes[5];   /* by cudaMemcpyKind */
    uint64_t callbacks, callbacks_failed;
    uint64_t device_bytes, device_bytes_peak; /* allocated */
    uint64_t live_allocations, live_streams, live_events, live_registrations, live_descriptors;
};
void standin_counts_read(struct standin_counts *out); /* any thread */
uint64_t standin_calls_of(const char *call);

/* --- trace: every operation that ran, in the order of its end. Valid until standin_close. */
enum standin_kind {
    STANDIN_COPY_IN, STANDIN_COPY_OUT, STANDIN_COPY_ON, STANDIN_COPY_HOST, STANDIN_ZERO, STANDIN_LAUNCH, STANDIN_PRODUCT,
    STANDIN_RECORD, STANDIN_WAIT, STANDIN_CALLED, STANDIN_HOST_FUNC
};
enum standin_engine { STANDIN_NO_ENGINE, STANDIN_COMPUTE, STANDIN_LINK_IN, STANDIN_LINK_OUT, STANDIN_ENGINES };
struct standin_op {
    uint64_t number;            /* in the order of queueing, from 1 */
    uint32_t stream;            /* in the order of making, from 1 */
    enum standin_kind kind;
    enum standin_engine engine;
    uint64_t bytes;
    uint64_t queued_ns, begin_ns, end_ns;
    const void *to, *from;      /* of copies */
    bool skipped;               /* after a sticky error */
    const char *name;           /* of a kernel; "" */
};
uint64_t standin_trace(const struct standin_op **out); /* returns how many */
/* Time in which both engines work at once. */
uint64_t standin_overlap_ns(enum standin_engine a, enum standin_engine b);
uint64_t standin_busy_ns(enum standin_engine e);
/* chrome://tracing's JSON. false: cannot be written. */
bool standin_trace_write(const char *path);
/* Over trace and memory that copies brought out: equal for equal runs. */
uint64_t standin_trace_hash(void);

#ifdef __cplusplus
}
#endif

#endif
