/* gpu/device.h - what the engine and the trainer may ask of a device: memory, streams, copies,
 * completion. gpu/ops.h has the operations.
 *
 * BACKENDS
 *   host           always built: operations run on this machine's cores (oneDNN, OpenMP); reads
 *                  host memory in place
 *   host:discrete  the same, but with a memory of its own (a capped arena): operands of operations
 *                  must lie in it (checked), copies are real. What a GPU has, on a laptop: the
 *                          tests and the demo run so
 *   sim            host:discrete's numerics with modelled time (needs the simulation backend of
 *                  base/exec.h)
 *   cuda           an NVIDIA card, compute capability 7.5 and later (meson option `cuda`): CUDA's
 *                  runtime, cuBLASLt, own kernels. The first card that CUDA shows
 *                  (CUDA_VISIBLE_DEVICES chooses); needs exec's threads: a card keeps its own time
 *
 * STREAMS. A stream runs what is queued in order, LATER: a call returns when the work is queued,
 * never when it is done. Streams are lanes of base/exec.h. Each has a bounded queue: when it is
 * full the application's thread waits for room, a lane gets STK_BUSY (lanes queue only on streams
 * of their own, whose depth they account for).
 *
 * ERRORS of queued work are sticky: the first one is kept on the device (dev_status), later work of
 * every stream is skipped, but notifications still fire, so nobody waits for ever.
 *
 * POINTERS. Device memory is addressed by plain `void *` that only device operations may follow (on
 * the host device they happen to be ordinary pointers; code that follows one fails on
 * host:discrete's checks or on a GPU).
 *
 * PREPARE MODE. Between dev_prepare_begin and dev_prepare_end, operations queue nothing: they check
 * shapes, make what they need (oneDNN primitives, tuned choices) and report scratch. The client
 * runs its visits once in this mode with NULL pointers, so that after `seal` nothing is allocated,
 * and the workspace it must declare is measured by the code that will use it. */
#ifndef GPU_DEVICE_H
#define GPU_DEVICE_H

#include "base/exec.h"
#include "base/status.h"

struct dev;
struct dev_stream;

enum dev_kind { DEV_HOST, DEV_HOST_DISCRETE, DEV_SIM, DEV_CUDA };
enum dev_matmul {
    DEV_MATMUL_AUTO, /* bf16 where the processor has AMX, else measured once at dev_open; DEV_CUDA: bf16
                      * where the card has it (8.0) */
    DEV_MATMUL_F32,
    DEV_MATMUL_BF16
};
enum dev_dir { DEV_TO_DEVICE, DEV_TO_HOST, DEV_ON_DEVICE };

struct ops_adam; /* gpu/ops.h */
/* Takes the step of Adam over elements [begin, end) of the arrays, where spans cover them. Pure; called on
 * several threads at once for parts that do not meet. */
typedef void dev_adam_fn(const struct ops_adam *a, uint64_t begin, uint64_t end);

struct dev_model { /* of DEV_SIM: rates of the machine one does not own */
    double flops_per_s, copy_in_bytes_per_s, copy_out_bytes_per_s, memory_bytes_per_s;
    uint64_t launch_ns;
    double update_bytes_per_s;  /* of the host's update team, which the engine models; 0: it takes no
                                 * time */
    double dram_bytes_per_s;    /* of the host's memory, which copies and the update share; 0: no limit */
    double copy_both_bytes_per_s; /* both directions together; 0: each as if alone */
};

struct dev_cfg {
    enum dev_kind kind;
    struct exec *ex;            /* borrowed until dev_close */
    uint64_t memory_bytes;      /* cap of the device's own memory; 0 for DEV_HOST without a cap.
                                 * DEV_CUDA: of all that this process takes on the card, what CUDA
                                 * and its libraries take included; 0: what is free there */
    uint32_t compute_threads;   /* host kinds: OpenMP threads of operations; 0: topology_threads */
    enum dev_matmul matmul;
    uint64_t seed;              /* discrete: poison pattern of fresh memory (NaNs) */
    bool poison;                /* fill the arena with NaN patterns at start (tests; on for discrete
                                 * in debug) */
    const struct dev_model *model; /* DEV_SIM; NULL: a default */
    dev_adam_fn *adam;          /* host kinds: what ops_adam calls, because its arithmetic, the one that all
                                 * variants share bit for bit, is offload/'s, which this room may not
                                 * see; NULL: ops_adam is refused. DEV_CUDA has a kernel: not used */
    bool plan_only;             /* DEV_SIM: nothing will run here, so the arithmetic asked for need not
                                 * be possible on this processor */
};

struct dev_caps {
    enum dev_kind kind;
    const char *name;           /* "host", "host:discrete", ... */
    bool host_in_place;         /* operations may read and write ordinary host memory: no copies
                                 * needed */
    bool modelled_time;
    bool copy_paced;            /* dev_copy_paced has an effect */
    uint64_t memory_bytes;      /* capacity of the device's own memory, UINT64_MAX: the host's */
    uint32_t align_bytes;       /* of buffers: 64 on the host, 256 elsewhere */
    enum dev_matmul matmul;     /* what was chosen: F32 or BF16 */
    double matmul_flops_per_s;  /* of the chosen arithmetic: measured at open where measuring
                                 * chose it (auto), else 0 before dev_matmul_rate */
    uint32_t compute_threads;
    uint64_t library_bytes; /* host memory that the device's libraries take by themselves while
                             * operations run, beyond scratch; an estimate from the shapes seen in
                             * prepare mode, 0 before */
    char numerics[160];         /* the device's part of the numerics key:
                                 * "host;isa=avx512;matmul=bf16;threads=2;onednn=2.6.3;tiles=1" */
};

stk_status dev_open(const struct dev_cfg *cfg, struct dev **out, struct stk_error *err);
/* One line on what a device of this kind would be on this machine, for `stoker doctor`; an error: why it
 * cannot be used, and what to do. Opens no device. DEV_CUDA: takes as long as its driver needs to start,
 * and leaves its context to the end of the process. */
stk_status dev_describe(enum dev_kind kind, char *text, size_t text_bytes, struct stk_error *err);
void dev_close(struct dev *d); /* streams must be closed; NULL allowed */
void dev_caps_read(const struct dev *d, struct dev_caps *out);
/* Measures caps.matmul_flops_per_s where it is 0 (a tenth of a second; nothing where time is
 * modelled). Application's thread, no work queued. STK_ERR_NOMEM, STK_ERR_DEVICE: it stays 0. */
stk_status dev_matmul_rate(struct dev *d, struct stk_error *err);

/* The device's one arena: reserved once (the engine carves it). DEV_HOST in place: ordinary
 * page-aligned host memory. STK_ERR_NOMEM with the numbers when above memory_bytes. */
stk_status dev_reserve(struct dev *d, uint64_t size_bytes, void **out, struct stk_error *err);
/* Host memory that copies will touch: registered (pinned) where the device wants it. No effect on
 * host kinds. DEV_CUDA: whole pages; STK_ERR_NOMEM names the bytes and the limit to raise: nothing of
 * the piece is pinned then, and the caller may go on and say so. Copies of memory that is not registered are
 * right, but wait for each other and for the caller: they are counted apart (dev_work_read,
 * "copy_pageable"). dev_close forgets what is still registered; the memory
 * must be there until then. */
stk_status dev_host_register(struct dev *d, void *base, uint64_t size_bytes, struct stk_error *err);
void dev_host_unregister(struct dev *d, void *base);

/* First error of queued work, or STK_OK. Any thread. */
stk_status dev_status(const struct dev *d, struct stk_error *err);

/* depth: most queued commands; 0: 512. Application's thread. Close waits until the queue is
 * empty. */
stk_status dev_stream_open(struct dev *d, const char *name, uint32_t depth, struct dev_stream **out,
                           struct stk_error *err);
void dev_stream_close(struct dev_stream *s);
struct dev *dev_of(const struct dev_stream *s);
/* Nanoseconds this stream spent executing (not waiting) since open. */
uint64_t dev_stream_busy_ns(const struct dev_stream *s);

/* One producer at a time per stream. */
stk_status dev_copy(struct dev_stream *s, void *dst, const void *src, uint64_t size_bytes,
                    enum dev_dir dir, struct stk_error *err);
/* The same, but at most so many bytes a second (0: as fast as it goes), evenly: what shares host memory with it
 * keeps the rest. Only where caps.copy_paced; other devices copy as fast as they can. */
stk_status dev_copy_paced(struct dev_stream *s, void *dst, const void *src, uint64_t size_bytes, enum dev_dir dir,
                          double bytes_per_s, struct stk_error *err);
stk_status dev_zero(struct dev_stream *s, void *dst, uint64_t size_bytes, struct stk_error *err);
/* Posts `task` to `lane` (or sets `ev` if given) when everything queued before is done. The caller
 * keeps task/event until then. */
stk_status dev_notify(struct dev_stream *s, struct exec_lane *lane, struct exec_task *task,
                      struct exec_event *ev, struct stk_error *err);

/* Stream-to-stream order: `mark` is a caller-owned record; dev_mark_record queues it on one stream,
 * dev_mark_wait makes another stream wait for the latest record. A mark may be recorded again when
 * its last waiters have passed. */
struct dev_mark { struct dev *dev; uint64_t recorded, passed; void *priv; };
stk_status dev_mark_init(struct dev *d, struct dev_mark *m, struct stk_error *err);
void dev_mark_free(struct dev_mark *m);
stk_status dev_mark_record(struct dev_stream *s, struct dev_mark *m, struct stk_error *err);
stk_status dev_mark_wait(struct dev_stream *s, struct dev_mark *m, struct stk_error *err);

/* Application's thread: waits until the stream is empty; then dev_status. */
stk_status dev_sync(struct dev_stream *s, struct stk_error *err);

/* The figures that time is modelled by; all 0 for a device whose time is real. */
void dev_model_read(const struct dev *d, struct dev_model *out);

/* What was done since open, by kind of work; for measurements. Kinds that were never run are left
 * out. `what` lives as long as the program. The first row is "product": calls of the matrix library;
 * operations that contain products have the rest of their time under their own name. FLOPs are those
 * of products and attention (0: bound by memory), bytes those of the operands, each once. Any
 * thread; figures of work that is running now are not in it. */
#define DEV_WORK_MAX 32
struct dev_work {
    const char *what;
    uint64_t calls, ns;
    double flops, bytes;
};
uint32_t dev_work_read(const struct dev *d, struct dev_work out[DEV_WORK_MAX]);
/* DEV_CUDA measures the time of each kind only while this is on, as it costs two records a command; the
 * other figures are always there. No effect on other kinds, which always measure. Application's thread,
 * no work queued. */
void dev_work_measure(struct dev *d, bool on);

void dev_prepare_begin(struct dev *d);
/* Modelled time of everything that was asked for since begin, in nanoseconds: what it would take the
 * device (0 where time is real). Before dev_prepare_end. */
uint64_t dev_prepare_ns(const struct dev *d);
/* Largest scratch any operation asked for since begin, in bytes. */
stk_status dev_prepare_end(struct dev *d, uint64_t *scratch_bytes, struct stk_error *err);
bool dev_preparing(const struct dev *d);

#endif
