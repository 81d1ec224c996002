/* stoker.h - train models larger than the accelerator. This header is the manual; it is the only
 * installed one.
 *
 * WHAT IT DOES. You describe your model as BLOCKS of tensors and the order in which they are used.
 * stoker keeps the 16-bit parameters and the fp32 state of Adam where you say (device cache, host
 * memory, NVMe), brings each block to you just before you compute with it (a VISIT), takes your
 * gradients, clips by global norm, updates, and checkpoints. You do the math. Results do not depend
 * on where anything is kept.
 *
 * A RUN
 *     stk_config c;  stk_config_init(&c, sizeof c);  c.nvme[0] = "/mnt/fast"; ...        configure
 *     stk_open(&c, &e);
 *     stk_block(e, "layer.0", tensors, n, &id); ...                                       describe
 *     stk_order(e, places, n_places);
 *     stk_reserve(e, STK_ON_DEVICE, "inputs", bytes, &h);                                 your own
 *             memory, counted with ours
 *     stk_seal(e);                        everything is reserved here, or refused with numbers and
 *             the option that would help
 *     stk_tensor_write(e, tensor, ...);   fill parameters   (or stk_restore)
 *     for each step:
 *         stk_step_begin(e, &step);
 *         while (stk_next(e, &v) == STK_OK) { ... queue or do your math with v's pointers ...;
 *                 stk_done(e, &v); }
 *         stk_step_end(e, &stats);        norm known; the update runs now (serial) or under the
 *                 next step's forward (chase)
 *     stk_save(e, dir, ...);  stk_flush(e);  stk_close(e);
 *
 * A client that keeps its own order (config.own_order) calls stk_acquire / stk_release between
 * step_begin and step_end instead. The order is recorded in the first step and planned from the
 * second on; a departure is served on demand, counted, reported, never wrong.
 *
 * ERRORS. Every call returns a stk_status; stk_error_text(e) is one sentence: what, where, what was
 * expected, what to do. The library never prints, exits or aborts for an operating error. After
 * STK_ERR_IO, _CORRUPT, _DEVICE or _STALLED in a step the engine is FAILED: only stk_close and the
 * reading calls of stats are allowed; resume from a checkpoint. After a refused call (_CONFIG,
 * _STATE, _NOMEM before seal) everything is as before it.
 *
 * THREADS. One engine belongs to one application thread. Several engines may live in one process.
 * Calls that wait are marked [waits].
 * UNITS. Bytes unless a name says otherwise; lengths of tensors in elements. Pointers given to the
 * library are borrowed until the call returns unless marked. */
#ifndef STOKER_H
#define STOKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STK_VERSION_MAJOR 0
#define STK_VERSION_MINOR 1
const char *stk_version(void); /* "0.1.0": of the library that is linked */

#ifndef STK_STATUS_TYPE
#define STK_STATUS_TYPE
typedef enum stk_status {
    STK_OK = 0,
    STK_ERR_NOMEM = -1,       /* memory, or a fixed budget, is exhausted */
    STK_ERR_IO = -2,          /* a storage or file operation failed */
    STK_ERR_CORRUPT = -3,     /* stored bytes do not match their checksum or format */
    STK_ERR_DEVICE = -4,      /* a device or driver call failed */
    STK_ERR_CONFIG = -5,      /* an option or configuration value is wrong, or values contradict */
    STK_ERR_STATE = -6,       /* the call is not allowed now */
    STK_ERR_FORMAT = -7,      /* a file is not what it should be */
    STK_ERR_NOSPACE = -8,     /* too little room on a disk */
    STK_ERR_UNSUPPORTED = -9, /* this machine or build cannot do it */
    STK_ERR_STALLED = -10,    /* nothing can make progress */
    STK_ERR_NONFINITE = -11,  /* too many steps in a row had a non-finite gradient */
    STK_ERR_INTERRUPTED = -12,/* asked to stop */
    STK_BUSY = 1,             /* no room now */
    STK_END = 2,              /* nothing more in this step */
    STK_STATUS_FORCE_INT = 0x7fffffff
} stk_status;
#endif

typedef struct stk_engine stk_engine;
struct dev;        /* gpu/device.h, for clients built with stoker that use its operations */
struct dev_stream;

/* --- configuration ---------------------------------------------------------------------------- */

typedef enum { STK_TIER_AUTO, STK_TIER_DEVICE, STK_TIER_HOST, STK_TIER_NVME } stk_tier;
/* What becomes of a block's activations between its forward and its backward visit: kept on the device,
 * made again from the boundary, moved to host memory (a device that computes there: kept), or moved to
 * NVMe (folders are needed; not in own order). AUTO: kept if they fit; else the last blocks' are kept, as
 * many as fit, and the others recomputed or offloaded, by the rates of the machine where they are known. */
typedef enum {
    STK_ACT_AUTO,
    STK_ACT_KEEP,
    STK_ACT_RECOMPUTE,
    STK_ACT_HOST,
    STK_ACT_NVME,
    STK_ACT_N
} stk_act;
typedef enum { STK_ACCUMULATE_LAYER, STK_ACCUMULATE_MICRO } stk_accumulate;
typedef enum {
    STK_UPDATE_AUTO,      /* where the machine is known before memory is placed (`machine`, or a simulated
                           * one): what is predicted to be clearly faster than chase, if anything. Else
                           * chase; optimizer state on NVMe, clipping off, room there for two versions:
                           * speculate */
    STK_UPDATE_SERIAL,    /* the step's update, then the next step */
    STK_UPDATE_CHASE,     /* under the next step's forward */
    STK_UPDATE_SPLIT,     /* chase, but the forward waits for the new parameters only; a second buffer of
                           * them in host memory. Blocks with state on NVMe or frozen parts: chase */
    STK_UPDATE_SPECULATE  /* in backward, before the norm is known; taken back to the bit if the norm
                           * binds. Needs a record in host memory (about 1.3 bytes a parameter, 2 where
                           * only the optimizer state is on NVMe), or room for one more version on the
                           * drives. Own order: chase */
} stk_update;
typedef enum { STK_BF16, STK_FP16, STK_F32 } stk_dtype;
typedef enum { STK_ADAMW, STK_ADAM /* L2 */ } stk_optimizer;
typedef enum {
    STK_MOMENTS_F32,      /* exact: 8 bytes a parameter for both moments */
    STK_MOMENTS_BF16,     /* inexact: bf16, rounded stochastically: 4 bytes */
    STK_MOMENTS_8BIT      /* inexact: 8-bit codes with an fp32 scale for each 64 elements: 2.125 bytes.
                           * Blocks with a tensor marked `embedding` keep fp32 */
} stk_moments;
typedef enum {
    STK_DEVICE_HOST,
    STK_DEVICE_HOST_DISCRETE,
    STK_DEVICE_SIM,
    STK_DEVICE_CUDA      /* of a build with CUDA; stk_open says why it cannot be used. Not with simulate */
} stk_device_kind;
typedef enum { STK_MATMUL_AUTO, STK_MATMUL_F32, STK_MATMUL_BF16 } stk_matmul;
typedef enum {
    STK_STORAGE_AUTO,
    STK_STORAGE_URING,
    STK_STORAGE_POSIX,
    STK_STORAGE_SIM
} stk_storage;

#define STK_NVME_MAX 16
#define STK_ON_DEVICE_AUTO (-1.0) /* of stk_config.optimizer_on_device */

struct stk_machine; /* below: prediction */

typedef struct stk_config {
    size_t size;                  /* set by stk_config_init; lets later versions add fields */
    stk_device_kind device;
    uint64_t device_memory;       /* cap; 0: what is free (host in place: none) */
    uint64_t host_memory;         /* cap on everything this process holds in host memory; 0: the
                                   * smaller of cgroup limit and free memory */
    const char *nvme[STK_NVME_MAX]; /* folders for swapped state; NULL ends. Borrowed until stk_open
                                     * returns */
    stk_tier params;              /* AUTO, DEVICE (host home, all cached on the device), HOST,
                                   * NVME */
    stk_tier optimizer_state;     /* AUTO, HOST, NVME */
    stk_tier grads;               /* AUTO, HOST, NVME */
    stk_act activations;
    stk_accumulate accumulate;
    stk_update update;
    stk_dtype dtype;              /* BF16 or FP16: of parameters and gradients */
    stk_optimizer optimizer;
    double beta1, beta2, eps, weight_decay;
    double clip;                  /* global norm limit; 0: off */
    uint32_t micro_batches;       /* of every step */
    uint32_t prefetch;            /* block uses ahead; UINT32_MAX: auto */
    uint32_t compute_threads, update_threads; /* 0: from the machine */
    stk_matmul matmul;
    stk_storage storage;
    bool simulate;                /* execution: one thread, seeded order, virtual clock */
    uint64_t seed;                /* of the simulation */
    const void *sim_disk;         /* struct io_sim_cfg (nvme/io_sim.h) with STK_STORAGE_SIM;
                                   * borrowed until stk_close */
    const void *sim_model;        /* struct dev_model (gpu/device.h) with STK_DEVICE_SIM, or NULL */
    uint32_t chunk_elems;         /* 0: 524288. A multiple of 2048. Part of the numerics (order of the
                                   * norm's sums) */
    double loss_scale;            /* fp16: first value; 0: 65536 */
    uint32_t loss_scale_window;   /* fp16: steps without overflow before it doubles; 0: 1000 */
    uint32_t skip_limit;          /* stop after so many skipped steps in a row; 0: 50 */
    const char *client_numerics;  /* what of the client's arithmetic belongs to the numerics key
                                   * ("act=bf16;..."); copied */
    bool own_order;
    uint32_t own_visits_max, own_held_max; /* own order: most visits in a step, most blocks held at
                                            * once */
    bool poison;                  /* tests: fresh device memory is NaN */
    uint64_t stall_ns;            /* longest wait without any progress before STK_ERR_STALLED; 0:
                                   * 120 s. Simulation: virtual time */
    /* drives */
    double nvme_weights[STK_NVME_MAX]; /* share of each folder; all 0: measured when there are
                                        * several */
    uint64_t measure_ns;          /* time given to measuring each drive at seal; 0: a second when
                                   * there are several folders or a step moves more than 4 GiB, else
                                   * none; UINT64_MAX: never. Not in a dry seal, not in simulation */
    uint64_t nvme_buffer;         /* host memory for state between NVMe and the update: what is read
                                   * ahead while backward runs and written behind while the next
                                   * forward runs. 0: eight chunks (speculate: twelve) and three
                                   * quarters of the state of the first block visited, or twice
                                   * what activations take, less where the run would take more than
                                   * a sixth of the free memory; with a given host_memory that state
                                   * is kept there for good or, with `durable`, the buffer takes all
                                   * that is left. More than all state is of no use */
    /* durable steps (below) */
    bool durable;                 /* reserve room for them: the parameters and the optimizer state
                                   * must lie on NVMe (`auto` then does), twice */
    char run_id[17];              /* names the run's folders on the drives: 16 of 0-9a-f; "": random.
                                   * A later process finds the run's durable steps by it */
    bool adopt;                   /* take over what a dead process of this run_id left; see
                                   * stk_resume_durable. Needs `durable`; chunk_elems and the set of
                                   * folders (in any order) must be as they were, grads too unless
                                   * AUTO; with activations on NVMe their policies (unless AUTO), sizes
                                   * and micro_batches as well */
    uint64_t trace_bytes;         /* host memory for what happened last (40 bytes a node of the plan),
                                   * for stk_trace_write; 0: nothing is kept */
    const struct stk_machine *machine; /* plan for this machine instead of the one at hand: its
                                   * memories are the budgets (device_memory and host_memory make them
                                   * smaller), its drives the folders unless some are named. `device`
                                   * is then taken as sim, and only a dry seal is possible. Borrowed
                                   * until stk_close; NULL: this machine */
    stk_moments moments;          /* of Adam (offload/adam_narrow.h in the sources has the formulas). What
                                   * is not F32 is inexact, and part of the numerics key: the numbers
                                   * are another run's, but still the same for any placement. Speculation
                                   * is then only for optimizer state on NVMe */
    uint64_t moments_seed;        /* BF16: of the rounding */
    uint32_t activations_last[STK_ACT_N]; /* a mix, from the end of the order: the last so many blocks
                                   * [KEEP] keep, so many of those before them [RECOMPUTE], evenly, are
                                   * recomputed, then [HOST], then [NVME]; all others as `activations`
                                   * says, which is then no policy that stands before one of these. Only positions
                                   * count that leave a full set and are not fused. All 0: no mix */
    uint32_t split_blocks;        /* split, and speculate on a device with memory of its own: of so many
                                   * blocks, the first of the order, the parameters are made before the
                                   * state. UINT32_MAX: as many as are predicted to pay; where nothing can
                                   * be predicted, with split all, with speculate none */
    bool overwrite_grads;         /* this client looks at stk_visit.overwrite: accumulators are not zeroed
                                   * for it. Own order: not used */
    double optimizer_on_device;   /* optimizer state, parameters and gradients of whole blocks, the first of the
                                   * order, in the device's memory, updated there with the same bits: of at
                                   * most so much of the trainable parameters, 0 (none) to 1; where that does
                                   * not fit, stk_seal refuses it. STK_ON_DEVICE_AUTO: as much as device_memory
                                   * leaves beside everything else that makes steps faster, on a card. None
                                   * where the device has no memory of its own, in own order, with moments that
                                   * are not F32, or where state is on NVMe: a note says so */
} stk_config;

/* Fills defaults: host, auto everywhere, adamw 0.9 0.999 1e-8 0.01, clip 1.0, one micro-batch,
 * bf16. `size`: sizeof(stk_config) of the caller. */
void stk_config_init(stk_config *c, size_t size);

/* Opens the device and reads the machine; reserves nothing large. On error *out still is an engine
 * that holds the sentence (stk_error_text, then stk_close) unless memory for it was missing
 * (NULL). */
stk_status stk_open(const stk_config *c, stk_engine **out);
/* [waits] Ends work in flight, removes the run's swap files unless a durable step is on them, frees.
 * A pending update is NOT run (stk_flush does), a durable step that waits for it is not made. NULL
 * allowed. In a child of fork: does nothing, and every other call is refused (STK_ERR_STATE). */
void stk_close(stk_engine *e);
/* The same. STK_ERR_IO: swap files that should be gone are still there; STK_ERR_STATE: their folder is
 * not where it was. *left (may be NULL; stk_free): the sentence that names them, why, and what to do;
 * else NULL. */
stk_status stk_close_left(stk_engine *e, char **left);
const char *stk_error_text(const stk_engine *e); /* of the last failed call; "" if none; valid until
                                                  * the next call */
const char *stk_status_name(stk_status s);

/* --- description, before stk_seal ------------------------------------------------------------- */

typedef struct stk_tensor_desc {
    const char *name;             /* unique; copied */
    uint64_t n_elems;
    bool frozen;                  /* 2 bytes/param, no gradient, no state */
    bool no_decay;                /* weight decay does not apply */
    bool embedding;               /* rows that few steps touch: STK_MOMENTS_8BIT keeps the moments of its
                                   * block in fp32 */
} stk_tensor_desc;

/* A block: tensors used together. Their ids are dense over the engine in order of description:
 * *first_tensor, +1, ... */
stk_status stk_block(stk_engine *e, const char *name, const stk_tensor_desc *tensors, uint32_t n,
                     uint32_t *block, uint32_t *first_tensor);

/* One position of the forward order. A block may stand at two (tied embedding and head): its
 * gradient is final after the backward visits of its first position, which run after those of all
 * later positions for all micro-batches, in both accumulation orders. */
typedef struct stk_place {
    uint32_t block;
    bool fused;                   /* training has no forward visit here: the backward visit does
                                   * both (loss) */
    uint64_t in_bytes;            /* boundary activation this position reads, per micro-batch (0:
                                   * none). It is the output of the position before */
    uint64_t full_bytes;          /* what a forward visit leaves for its backward, beside the
                                   * boundary */
    double flops;                 /* of a forward visit */
    uint64_t flow_bytes;          /* gradient of that boundary, per micro-batch (0: in_bytes): it
                                   * may have a wider dtype, because it is never stored */
} stk_place;
stk_status stk_order(stk_engine *e, const stk_place *places, uint32_t n);

/* Scratch that one visit at a time may use on the compute stream. */
stk_status stk_workspace(stk_engine *e, uint64_t size_bytes);
typedef enum { STK_ON_DEVICE, STK_ON_HOST } stk_where;
/* The client's own memory, reserved at seal and counted under `owner`. */
stk_status stk_reserve(stk_engine *e, stk_where where, const char *owner, uint64_t size_bytes,
                       uint32_t *handle);
void *stk_reserved(stk_engine *e, uint32_t handle); /* after seal */

/* Plans, checks the plan, checks every budget and disk, reserves everything. [waits] `dry`: reserve
 * nothing, only plan and fill the table. Refusals within a second or two, before anything is
 * written: STK_ERR_NOMEM or _NOSPACE with the numbers, the largest owner and the option that
 * shrinks it. */
stk_status stk_seal(stk_engine *e, bool dry);

/* The table of bytes by tier and owner. tier: "host", "device", "nvme". False: no row i. */
bool stk_table(const stk_engine *e, uint32_t i, const char **tier, const char **owner,
               uint64_t *size_bytes);
/* One line each: device, storage, tiers chosen by auto and why, numerics, leftovers removed. False:
 * no line i. */
bool stk_note(const stk_engine *e, uint32_t i, const char **line);
/* The numerics key: runs with the same key and inputs give the same bits on any placement. Valid
 * until stk_close. */
const char *stk_numerics(const stk_engine *e);
/* Plan of a training step as text or as a Chrome/Perfetto trace, to a file. */
stk_status stk_plan_write(stk_engine *e, const char *path, bool trace);
/* Between steps: what happened last, as far back as config.trace_bytes reach, as a Chrome/Perfetto
 * trace: each node of the plan on its resource from start to completion, the caller's exposed waits by
 * cause, the steps. STK_ERR_STATE: trace_bytes is 0. STK_ERR_IO: the file; the engine is as it was. */
stk_status stk_trace_write(stk_engine *e, const char *path);

/* --- parameters and state --------------------------------------------------------------------- */

typedef enum {
    STK_READ_PARAM /* the 16-bit value */,
    STK_READ_MASTER,
    STK_READ_EXP_AVG,
    STK_READ_EXP_AVG_SQ,
    STK_READ_GRAD /* of the step that just ended, before its
               update; without the loss scale, before clipping */
} stk_what;
/* [waits] Sets n elements of a parameter's master from `data` of dtype; moments become zero.
 * Between steps only. Fast when called in ascending order. */
stk_status stk_tensor_write(stk_engine *e, uint32_t tensor, uint64_t first, uint64_t n,
                            const void *data, stk_dtype dtype);
/* [waits] Reads n elements as dtype `dtype` (exact: PARAM as the 16-bit dtype or F32, the others as
 * F32). Runs a pending update first, except for GRAD. */
stk_status stk_tensor_read(stk_engine *e, uint32_t tensor, stk_what what, uint64_t first,
                           uint64_t n, void *data, stk_dtype dtype);

/* --- steps ------------------------------------------------------------------------------------ */

typedef enum { STK_FORWARD, STK_BACKWARD } stk_dir;

typedef struct stk_visit {
    uint32_t index, place, block, micro;
    stk_dir dir;
    bool eval;                    /* no backward will follow */
    bool recompute;               /* backward: fill `full` from `in` first */
    bool first_of_block, last_of_block; /* of this pass and direction */
    bool overwrite;               /* backward, config.overwrite_grads only: `grad` holds anything; this
                                   * visit must write every element of every trainable tensor in it
                                   * (what has no gradient: 0) instead of adding */
    const void *param;            /* the block's 16-bit vector; tensor k begins at stk_tensor_offset
                                   * elements */
    float *grad;                  /* backward: fp32 accumulator, same offsets; add to it (`overwrite`:
                                   * write it). NULL:
                                   * nothing trainable */
    const void *in;               /* boundary activation, NULL at a position without */
    void *out;                    /* forward: the next position's boundary; NULL at the last */
    void *full;                   /* forward: write; backward: read (or recompute) */
    void *flow;                   /* backward: in: gradient of the output; out: gradient of the
                                   * input, same place. At the last position: only out */
    void *workspace;
    uint64_t workspace_bytes;
    struct dev_stream *stream;    /* queue your operations here */
    double loss_scale;            /* multiply the loss's gradient by it */
    uint64_t priv[4];
} stk_visit;

/* Elements from the start of its block's vector to this tensor. Trainable tensors come first, so
 * for them it is the offset in `grad` too. */
uint64_t stk_tensor_offset(const stk_engine *e, uint32_t tensor);

typedef struct stk_step { double lr; } stk_step; /* lr: of this step's update */

typedef struct stk_exposed {
    uint64_t nvme_ns, copy_ns, update_ns, gather_ns,
        queue_ns /* the compute stream's queue was full */;
} stk_exposed;
typedef struct stk_step_stats {
    uint64_t step;                /* steps begun so far, 1 for the first */
    uint64_t updates;             /* steps that were (or will be) applied: skipped ones do not
                                   * count */
    double grad_norm;             /* global, before clipping, without the loss scale. NaN or
                                   * infinite: the step was skipped */
    double clip_factor;           /* in (0, 1] */
    double loss_scale;            /* used in this step */
    bool skipped;
    uint64_t skipped_total, skipped_in_a_row;
    uint64_t step_ns, compute_ns;
    stk_exposed exposed;          /* time the caller waited in stk_next or stk_step_end, by cause */
    uint64_t nvme_read_bytes, nvme_write_bytes, copy_in_bytes, copy_out_bytes;
    uint64_t param_fetch_bytes;   /* parameters brought to cache or device */
    uint64_t departures;          /* own order: visits served on demand in this step */
    uint64_t spec_chunks, spec_undone; /* speculate: chunks updated before the norm was known; of these
                                   * (and of those whose record had no room), taken back */
    uint64_t durable_step;        /* newest step that a crash cannot take; 0: none */
    uint64_t nvme_read_p99_ns;    /* latency of reads from NVMe in this step, from the request to
                                   * checked bytes, the wait for their turn included; 0: none */
    uint64_t nvme_read_alone_p99_ns;  /* of those with no write beside them; 0: none */
    uint64_t nvme_read_beside_p99_ns; /* of the others; 0: none */
    uint64_t nvme_busy_ns;        /* time in this step with NVMe work under way: reading, writing, and
                                   * the checksums of both */
    uint64_t nvme_drive_ns;       /* of it, with a transfer at the drives. Counted when they fall
                                   * idle, so it may appear a step later */
    uint64_t nvme_short;          /* since stk_seal: transfers that moved less than asked for and
                                   * were continued */
    uint64_t nvme_retries;        /* since stk_seal: parts of transfers given again, those and what
                                   * the kernel had no room for (EAGAIN) */
    /* stk_save_begin */
    bool saving;                  /* a checkpoint is under way */
    uint64_t save_wait_ns;        /* in this step updates waited so long for it: what it held up */
    uint64_t saved_step;          /* newest one that is complete; 0: none */
    /* [0] with no write beside them, [1] the others; 0: none */
    uint64_t nvme_demand_p99_ns[2]; /* latency of those reads that a visit or the update waits for */
    uint64_t nvme_drive_p99_ns[2];  /* time of reads at the drive alone */
    uint64_t nvme_full_ns, nvme_full_bytes; /* time with more asked of a drive than is given to it at
                                     * once, over all drives, and what arrived in it: their ratio is a
                                     * drive's own rate in this run. Counted when that ends */
} stk_step_stats;

stk_status stk_step_begin(stk_engine *e, const stk_step *s);
/* [waits] The next visit, when its parameters and activations are there. STK_END after the last. */
stk_status stk_next(stk_engine *e, stk_visit *v);
/* All work of the visit is queued on v->stream (or done). */
stk_status stk_done(stk_engine *e, const stk_visit *v);
/* [waits] Backward ends, the norm is known; decides clip factor or skip. STK_ERR_NONFINITE after
 * skip_limit skips in a row (state intact). stats may be NULL. */
stk_status stk_step_end(stk_engine *e, stk_step_stats *stats);
/* [waits] Runs the pending update completely. No effect without one. */
stk_status stk_flush(stk_engine *e);
/* An evaluation pass over config.micro_batches micro-batches: flush, then forward visits by
 * stk_next/stk_done, then stk_eval_end [waits]. */
stk_status stk_eval_begin(stk_engine *e);
stk_status stk_eval_end(stk_engine *e);

/* Own order. [waits] `micro`: which micro-batch. At most own_held_max at once (STK_ERR_STATE
 * beyond, state intact). Host devices without stream work: data is there on return. */
stk_status stk_acquire(stk_engine *e, uint32_t block, stk_dir dir, uint32_t micro, stk_visit *v);
stk_status stk_release(stk_engine *e, const stk_visit *v);
/* acc += n elements at `first` of the tensor's gradient, for clients that own their gradients.
 * Between step_begin and step_end. The pointer is host memory. */
stk_status stk_grad_add(stk_engine *e, uint32_t tensor, uint64_t first, uint64_t n,
                        const void *data, stk_dtype dtype);

/* --- checkpoints ------------------------------------------------------------------------------ */

/* [waits] Complete copy in `dir`/step-<steps begun, padded to 8; skipped ones count>:
 * formats/manifest.h. Written beside, then renamed; what was there before stays valid on any
 * error, and the engine goes on
 * (STK_ERR_NOSPACE, _IO). `client_json`: an object kept in the manifest (may be NULL). `keep`:
 * newest so many are kept, 0: all. */
stk_status stk_save(stk_engine *e, const char *dir, const char *client_json, uint32_t keep);
/* The same checkpoint, to the byte, while the steps go on. Takes the counters now and returns; each
 * chunk is written after its due update and before its next one, from where it lies (state on NVMe is
 * read back). An update that comes to a chunk not written yet waits for it, which then goes first:
 * nothing is copied, so a checkpoint that takes longer than a step holds up the next ones by what it
 * is longer. Everything between steps may be called meanwhile: evaluation, stk_flush and
 * stk_tensor_read see the newest state, stk_tensor_write, stk_save and a second stk_save_begin wait
 * for the end. STK_ERR_CONFIG, _IO, _NOSPACE: refused, nothing was begun. A failure after that (disk
 * full ...) is reported once, as STK_ERR_IO or _NOSPACE, by the next stk_step_end (which has filled
 * its stats: stats->step is not 0), stk_save_begin (whose own request is then not taken: call it
 * again) or stk_save_wait; the engine is between steps, the run may go on, the checkpoint before
 * stays. stk_close gives an unfinished one up and removes its folder; what a kill leaves of it, the
 * next checkpoint in `dir` removes. */
stk_status stk_save_begin(stk_engine *e, const char *dir, const char *client_json, uint32_t keep);
/* [waits] Until none is under way; runs the pending update if that is what it waits for. Also after
 * a step that failed: if that step's state is whole, the checkpoint is completed. */
stk_status stk_save_wait(stk_engine *e);
/* The newest one that stk_save_begin began and that is complete: its step, the time from the call to
 * the end, and how long updates waited for it. False: none. */
bool stk_saved(const stk_engine *e, uint64_t *step, uint64_t *took_ns, uint64_t *waited_ns);
/* Bytes one checkpoint takes. */
uint64_t stk_save_bytes(const stk_engine *e);
/* [waits] After seal, instead of filling. `path`: one checkpoint folder. Tensor names, sizes, dtype
 * and numerics key must agree (STK_ERR_CONFIG names the difference; `any_numerics` goes on with
 * another key). *client_json: allocated, free with stk_free. On error nothing of the engine's state
 * is to be used: close it. */
stk_status stk_restore(stk_engine *e, const char *path, bool any_numerics, char **client_json);
/* Newest complete checkpoint in dir: allocated path, or STK_END. Needs no engine. */
stk_status stk_newest_checkpoint(const char *dir, char **path, uint64_t *step);
void stk_free(void *p);

/* --- durable steps: config.durable ------------------------------------------------------------- */

/* Between steps: the step that just ended shall survive a crash. Its counters and `client_json` are
 * taken now; the state follows when that step's update has been written (chase: under the next
 * step's forward) and flushed, without stopping the run; the slots of the durable step before stay
 * until then. A second call before that happened waits for the first. STK_ERR_STATE: not configured,
 * or no step has ended yet. STK_ERR_CONFIG: client_json has more than 256 KiB.
 * A failure (drive full cannot be: everything is reserved) is reported once, as STK_ERR_IO, by the
 * next stk_step_end (which has filled its stats: stats->step is not 0), stk_durable (whose own
 * request is then not taken: call it again) or stk_durable_wait. The engine is between steps and the
 * run may go on, with the older durable step. */
stk_status stk_durable(stk_engine *e, const char *client_json);
/* [waits] Until the durable step asked for last is on the drives (flushes a pending update). */
stk_status stk_durable_wait(stk_engine *e);
/* Durable steps that a dead process left on these folders: *step, *client_json (stk_free; may be
 * NULL), *where: a sentence for a person (stk_free; may be NULL). run_id "": any run, the newest.
 * Needs no engine, changes nothing. STK_END: none. STK_ERR_STATE: its run is alive. STK_ERR_CORRUPT:
 * something is there, and damaged. STK_ERR_CONFIG: a part of it lies on a folder that was not given.
 * The text is in *where. */
stk_status stk_find_durable(const char *const *nvme, uint32_t n, const char *run_id, uint64_t *step,
                            char **client_json, char **where);
/* Removes them (a person's decision); with a run_id also what is damaged or only a part. *where as
 * above on errors. */
stk_status stk_discard_found(const char *const *nvme, uint32_t n, const char *run_id, char **where);
/* [waits] After a seal with config.adopt: goes on from the durable step; errors and client_json as
 * stk_restore. A client that restores a newer checkpoint instead calls stk_restore: the durable step
 * stays until the next one is complete. */
stk_status stk_resume_durable(stk_engine *e, bool any_numerics, char **client_json);
/* stk_close removes the run's folders even if they hold a durable step. For the end of a run whose
 * result lies elsewhere. */
void stk_discard_durable(stk_engine *e);

/* --- drives ------------------------------------------------------------------------------------ */

typedef struct stk_drive {
    const char *path, *device, *model;      /* "" unknown; valid until stk_close */
    double weight;                          /* share of the bytes, 0..1 */
    double read_bytes_per_s, write_bytes_per_s, both_bytes_per_s; /* measured at seal; 0: not */
    uint64_t read_p99_ns, mixed_read_p99_ns;
    uint64_t step_read_bytes, step_write_bytes; /* planned, of one step */
    uint64_t read_bytes, write_bytes;       /* moved since seal, fills and checkpoints included */
    uint32_t first_of_drive;                /* lowest index of a folder on the same drive: equal for
                                             * folders that share one. Rates, SMART are the drive's */
    double written_bytes, endurance_bytes;  /* of its life so far, and the estimate of all of it; 0:
                                             * unknown */
    uint32_t percentage_used;               /* UINT32_MAX: unknown */
    int temperature_c;                      /* INT32_MIN: unknown */
    double cores_busy;                      /* cores that moving bytes took while it was measured */
} stk_drive;
/* After seal. False: no folder i. */
bool stk_drive_info(const stk_engine *e, uint32_t i, stk_drive *out);

/* --- prediction --------------------------------------------------------------------------------
 * How long a step will take, before it runs: the plan is run on a machine's figures by the rules of
 * the executor (engine/predict.h). A machine is read from a file, taken from the simulation, or
 * measured here:
 *     stk_machine_measure(e, &m);       before stk_seal: a second or two; stk_seal then measures drives too
 *     stk_seal(e, dry);
 *     while (stk_trial_next(e, &v) == STK_OK) { ... queue your math ...; stk_trial_done(e, &v); }
 *     stk_predict(e, &m, &p);
 */

typedef struct stk_machine_drive {
    double read_bytes_per_s, write_bytes_per_s;
    double both_bytes_per_s;      /* reads and writes at once, their sum; 0: independent */
    double cores_busy;            /* cores that moving bytes at this rate takes */
    uint64_t latency_ns;          /* of a transfer, beside its bytes */
} stk_machine_drive;

/* Rates are what one piece of hardware does alone, in bytes (or FLOP) a second; 0: not known, which
 * stk_predict refuses by name where the plan needs it, unless said otherwise. */
typedef struct stk_machine {
    size_t size;                  /* set by stk_machine_init */
    char name[64], text[256];     /* the second: what it is, for a person */
    bool on_host;                 /* operations, copies and casts of the device run on the host's
                                   * cores and share them with the update */
    uint64_t device_memory, host_memory; /* usable; 0: not said */
    uint32_t cores;
    double flops_per_s;           /* matrix products */
    double device_bytes_per_s;    /* memory that operations work in */
    uint64_t launch_ns;           /* of an operation or copy, beside its work */
    double copy_in_bytes_per_s, copy_out_bytes_per_s;
    double copy_both_bytes_per_s; /* both directions at once, their sum; 0: independent */
    double cast_bytes_per_s;      /* 16-bit gradients made, of one stream */
    double dram_bytes_per_s;      /* host memory, reads and writes together; 0: never short */
    double update_bytes_per_s;    /* Adam, all cores: bytes read and written; 0: takes no time */
    double checksum_bytes_per_s;  /* one core; 0: takes no time */
    double gather_bytes_per_s;
    uint64_t hop_ns;              /* from the end of one thing to the begin of what waited for it */
    uint32_t n_drives;
    stk_machine_drive drives[STK_NVME_MAX];
} stk_machine;
void stk_machine_init(stk_machine *m, size_t size);
/* A machine file (share/machines/README.md). What is wrong, as a sentence, in `why` (may be NULL). */
stk_status stk_machine_read(const char *path, stk_machine *out, char *why, size_t why_bytes);
/* [waits] Before stk_seal: this machine's figures but its drives' (stk_seal measures those whose rates
 * matter, in a dry seal too, unless measure_ns says never). Nothing of it stays allocated.
 * STK_ERR_STATE in simulation, where there is nothing to measure: stk_predict knows its figures. */
stk_status stk_machine_measure(stk_engine *e, stk_machine *out);

/* What the visits of one place take, if it is known otherwise than by a trial: of the compute
 * stream, alone, per micro-batch; recompute_ns: what it adds to a backward visit. Before
 * stk_predict. */
typedef struct stk_visit_cost { double forward_ns, backward_ns, recompute_ns; } stk_visit_cost;
stk_status stk_place_cost(stk_engine *e, uint32_t place, const stk_visit_cost *cost);
/* [waits] After stk_seal (dry too) and before anything is filled, or STK_ERR_STATE: a visit to be queued
 * as in a step, its time taken and thrown away. In the plan's order, some of each kind, all as of micro-batch
 * 0, pass after pass while `STK_TRIAL_NS` last; after the first pass stk_trial_done does not wait. After a dry seal memory for one visit is reserved, of
 * the device and for stk_reserved, as far as it fits. STK_END: no more, or none is possible here. A client
 * may break trials off: the first call for a tensor or a step ends them. */
#define STK_TRIAL_NS 4000000000u
stk_status stk_trial_next(stk_engine *e, stk_visit *v);
stk_status stk_trial_done(stk_engine *e, const stk_visit *v);

#define STK_PREDICT_RESOURCES 16
typedef struct stk_prediction {
    size_t size;                  /* set by the caller: sizeof(stk_prediction) */
    double step_s, compute_s;     /* of a step in steady state: every step but the first */
    struct { double nvme, copy, update, gather, other; } exposed_s; /* as stk_exposed */
    /* What each piece of hardware does: time it is busy, and time it would be busy if it shared
     * nothing: what its bytes (or FLOPs) take at its own rate. No step is faster than the busiest. */
    struct { char name[16]; double busy_s, alone_s; } resource[STK_PREDICT_RESOURCES];
    uint32_t n_resources, busiest; /* busiest: the largest alone_s */
    uint64_t host_bytes, device_bytes, nvme_bytes; /* at most, by tier */
    uint64_t nvme_read_bytes, nvme_write_bytes, copy_in_bytes, copy_out_bytes; /* of a step */
    bool costs_known;             /* visits by trial or stk_place_cost, not by FLOPs alone */
    /* The same times where the norm of every step binds: with clipping `speculate` then takes back what it
     * made. Above they are for norms that never do; in other modes both are one. */
    struct {
        double step_s, compute_s;
        struct { double nvme, copy, update, gather, other; } exposed_s;
    } bound;
} stk_prediction;
/* After stk_seal (dry too). `m`: whose figures; its drives may be none: then those that stk_seal
 * measured. NULL: config.machine, or what is simulated. STK_ERR_CONFIG: a figure is missing.
 * STK_ERR_STATE: nothing is trained, or own order (its visits are known after the first step
 * only). */
stk_status stk_predict(stk_engine *e, const stk_machine *m, stk_prediction *out);

/* --- the extent store alone: swap your own buffers ------------------------------------------------
 * Items of fixed sizes that do not fit memory lie on one or several drives, striped, with checksum
 * and version; transfers run beside your computation. One application thread per store.
 *
 * MEMORY. buffer_bytes is divided into buffers as large as the largest item (rounded to 4096); each
 * holds one item, so items of like sizes use it best: split a large one. Beside them: tables of
 * about 150 bytes an item, 2 KiB a transfer (128 at most) and the threads' stacks. Nothing more is
 * taken after open.
 * ERRORS. Every call returns a status; stk_store_error is the sentence. A wait in which nothing is
 * finished for 120 s ends as STK_ERR_STALLED. After that, and after a put that could not be written,
 * the store is FAILED: the next call says so with the cause, later ones with STK_ERR_STATE. A get
 * that fails (_IO, _CORRUPT) leaves the store as it was: ask again, or put the item anew.
 * FORK. The store belongs to the process that opened it. In a child every call is refused
 * (STK_ERR_STATE), stk_store_close does nothing, and the buffers are not mapped. A child that
 * outlives the parent keeps the folders' locks: they look alive until it ends or calls exec. */

typedef struct stk_store stk_store;
typedef struct stk_store_config {
    size_t size;                    /* set by stk_store_config_init */
    const char *nvme[STK_NVME_MAX]; /* folders; NULL ends */
    double nvme_weights[STK_NVME_MAX]; /* all 0: equal */
    uint32_t n_items;
    const uint64_t *item_bytes;     /* borrowed until stk_store_open returns */
    uint64_t buffer_bytes;          /* host memory for writes behind and reads ahead; at least twice
                                     * the largest item (rounded to 4096; STK_ERR_CONFIG with the
                                     * numbers). 0: eight times. No more than all items need is taken */
    stk_storage storage;
    bool no_checksums;
    bool durable;                   /* stk_store_commit may be called: twice the room on the drives */
    char run_id[17];                /* as in stk_config */
    bool adopt;                     /* go on from the durable step that run_id left; open returns
                                     * STK_END when there is none */
    uint64_t payload_max_bytes;     /* durable: most bytes of a commit's payload; 0: 4096 */
    const void *sim_disk;           /* struct io_sim_cfg with STK_STORAGE_SIM; borrowed until
                                     * stk_store_close */
    bool simulate;
    uint64_t seed;
} stk_store_config;
void stk_store_config_init(stk_store_config *c, size_t size);

/* [waits] Reserves all memory and disk space, or refuses with the numbers. On error *out still holds
 * the sentence unless memory for it was missing (NULL). */
stk_status stk_store_open(const stk_store_config *c, stk_store **out);
const char *stk_store_error(const stk_store *s);
/* Copies the item's bytes and returns; [waits] only for room in the buffers, or for the write or
 * read-ahead of this item that is under way. The write runs behind. An error of an earlier write is
 * reported by the next call, names the item, and the store is FAILED: only close is allowed. */
stk_status stk_store_put(stk_store *s, uint32_t item, const void *data);
/* [waits] The item's newest bytes: from a buffer if they are there (prefetched, got or put lately),
 * else from its drive; verified. Without a copy when `data` is aligned to 4096 and the item's size is
 * a multiple of it: they are then not kept in a buffer. On an error what `data` holds is undefined;
 * after STK_ERR_STALLED it must stay allocated until stk_store_close. STK_ERR_STATE: never put. */
stk_status stk_store_get(stk_store *s, uint32_t item, void *data);
/* Begins to read ahead; never waits. STK_BUSY: no buffer free now (nothing happens; the sentence is
 * empty): three quarters of the buffers may hold what was prefetched and not used yet; what is not
 * asked for over many gets and puts is given up. An error of the read is returned by the item's
 * get. */
stk_status stk_store_prefetch(stk_store *s, uint32_t item);
/* [waits] Every put is on its drive, flushed. */
stk_status stk_store_flush(stk_store *s);
/* [waits] Everything put so far, with `payload`, is what a later process finds after a crash. After
 * an error the durable step before still counts, and the store can be used unless it is FAILED.
 * STK_ERR_STATE: opened without `durable`. */
stk_status stk_store_commit(stk_store *s, uint64_t step, const void *payload,
                            uint64_t payload_bytes);
/* After an open with `adopt`, or after a commit: the durable step and its payload (valid until the
 * next commit or close). STK_END: none. */
stk_status stk_store_durable(const stk_store *s, uint64_t *step, const void **payload,
                             uint64_t *payload_bytes);
typedef struct stk_store_stats {
    uint64_t put_bytes, get_bytes;      /* handed over by the calls */
    uint64_t read_bytes, write_bytes;   /* moved from and to the drives: rounded to 4096 */
    uint64_t hits, misses;              /* gets that found a buffer (read, or being read), or none */
    uint64_t waits, wait_ns;            /* times a call had to wait, and how long in all */
} stk_store_stats;
void stk_store_stats_read(const stk_store *s, stk_store_stats *out);
/* Backend, store, buffers, and what was found in the folders; one line, valid until close. */
const char *stk_store_describe(const stk_store *s);
/* [waits] for what is in flight. Removes the files unless a durable step is on them and `discard` is
 * false. NULL allowed. */
void stk_store_close(stk_store *s, bool discard);

/* --- for clients that use stoker's operations ------------------------------------------------- */
struct dev *stk_device(stk_engine *e);
struct dev_stream *stk_compute_stream(stk_engine *e);
/* Simulation: hash of everything that happened so far; equal for equal seeds. */
uint64_t stk_trace_hash(const stk_engine *e);
uint64_t stk_now_ns(const stk_engine *e); /* the engine's clock: real, or virtual in simulation */

/* --- Adam alone: no engine -------------------------------------------------------------------- */
/* One step over caller's fp32 buffers, OpenMP threads (0: all); t: 1 for the first step. lr etc. in
 * double. Bit-equal on every machine and thread count. */
stk_status stk_adam_f32(float *param, float *exp_avg, float *exp_avg_sq, const float *grad,
                        uint64_t n, stk_optimizer kind, double lr, double beta1, double beta2,
                        double eps, double weight_decay, double grad_scale, uint64_t t,
                        uint32_t threads);
/* The same with the split master: param bf16 and low int16 together are the fp32 master; grad bf16.
 * 26 bytes of traffic per parameter. */
stk_status stk_adam_bf16(uint16_t *param, int16_t *low, float *exp_avg, float *exp_avg_sq,
                         const uint16_t *grad, uint64_t n, stk_optimizer kind, double lr,
                         double beta1, double beta2, double eps, double weight_decay,
                         double grad_scale, uint64_t t, uint32_t threads);

#ifdef __cplusplus
}
#endif
#endif
