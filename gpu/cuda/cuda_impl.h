/* gpu/cuda/cuda_impl.h - private to gpu/cuda: the device's records, its products and the pieces of
 * its operations.
 *
 * Files: cuda_dev.c device, memory, sticky error; cuda_stream.c streams, notifications, marks;
 * cuda_clock.c busy times by events; cuda_run.c what a command launches; cuda_matmul.c products
 * (cuBLASLt); cuda_lt.c where cuBLASLt's functions come from; cuda_linear.c, cuda_head.c operations
 * built on products; cuda_attention.c which attention; cuda_dnn*.c (or cuda_dnn_none.c) cuDNN's;
 * kernels/ our own kernels (kernels.h).
 *
 * EVERY CALL OF CUDA that this folder makes outside of kernels/ (CUDA Runtime API reference, 13.0):
 *   cudaDriverGetVersion cudaRuntimeGetVersion cudaGetDeviceCount cudaSetDevice
 *   cudaGetDeviceProperties (name, major, minor) cudaMemGetInfo
 *   cudaMalloc cudaFree cudaHostRegister cudaHostUnregister cudaHostAlloc cudaFreeHost
 *   cudaHostGetDevicePointer
 *   cudaStreamCreateWithFlags cudaStreamDestroy cudaStreamSynchronize (closing only)
 *   cudaStreamAddCallback cudaStreamWaitEvent
 *   cudaEventCreateWithFlags cudaEventDestroy cudaEventRecord cudaEventQuery (busy times)
 *   cudaEventElapsedTime (busy times) cudaEventSynchronize (measuring before a step)
 *   cudaMemcpyAsync cudaMemsetAsync cudaGetLastError cudaGetErrorName cudaGetErrorString
 * and of cuBLASLt what struct cuda_lt lists, of cuDNN what DNN_MAP in cuda_dnn.h does. There is no synchronisation of the device and, after
 * the arena is reserved, no allocation.
 *
 * THREADS. Commands are launched by whoever queues them (one producer at a time per stream).
 * Callbacks run on a thread of CUDA's and call nothing of CUDA. What they share with producers is
 * under the stream's lock. */
#ifndef GPU_CUDA_IMPL_H
#define GPU_CUDA_IMPL_H

#include "gpu/cuda/kernels.h"
#include "gpu/device_impl.h"
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

#define CUDA_ALIGN_BYTES 256
/* Of the tile rules of cuda_linear.c and cuda_head.c: in the numerics key. */
#define CUDA_TILES_VERSION 1
#define CUDA_STREAMS_MAX 16 /* most open at once; each has own memory behind the arena */
/* Own memory of a stream, for operations that have no scratch in gpu/ops.h (embedding backward: 16
 * bytes a token; gradient cast), unless prepare mode saw more. */
#ifndef CUDA_OWN_BYTES
#define CUDA_OWN_BYTES ((uint64_t)1 << 20)
#endif
/* Most workspace that a product may use (NVIDIA's advice for cards from 9.0 on); it is a part of
 * the operation's scratch, so of the arena. Fixed, as the choice of an algorithm depends on it. */
#ifndef CUDA_WORKSPACE_BYTES
#define CUDA_WORKSPACE_BYTES ((uint64_t)32 << 20)
#endif
#define CUDA_REGIONS_MAX 512 /* of registered host memory */

/* --- cuBLASLt's functions (cuda_lt.c) --------------------------------------------------------- */

/* The library is opened when a device is, so that the program starts where it is not installed. The
 * tests' stand-in brings a cuda_lt_table of its own instead of cuda_lt.c. */
#define CUDA_LT_MAP(X)                                                       \
    X(cublasLtCreate) X(cublasLtDestroy) X(cublasLtGetVersion)               \
    X(cublasLtMatmul) X(cublasLtMatmulDescCreate)                            \
    X(cublasLtMatmulDescDestroy) X(cublasLtMatmulDescSetAttribute)           \
    X(cublasLtMatrixLayoutCreate) X(cublasLtMatrixLayoutDestroy)             \
    X(cublasLtMatmulPreferenceCreate) X(cublasLtMatmulPreferenceDestroy)     \
    X(cublasLtMatmulPreferenceSetAttribute) X(cublasLtMatmulAlgoGetHeuristic) \
    X(cublasLtMatmulAlgoConfigGetAttribute)
struct cuda_lt {
#define CUDA_LT_MEMBER(name) __typeof__(&name) name;
    CUDA_LT_MAP(CUDA_LT_MEMBER)
#undef CUDA_LT_MEMBER
    void *library; /* private to cuda_lt.c */
};
/* Application's thread. STK_ERR_UNSUPPORTED: what is missing and what to install. */
stk_status cuda_lt_table(struct cuda_lt *out, struct stk_error *err);
void cuda_lt_free(struct cuda_lt *lt);

/* --- the device (cuda_dev.c) ------------------------------------------------------------------ */

struct cuda_matmul;
struct cuda_dnn;

enum { CUDA_WORK_PRODUCT = DEV_CMD_N, CUDA_WORK_PAGEABLE, CUDA_WORK_N };

struct cuda_region { /* registered host memory */
    uint8_t *base;
    uint64_t size_bytes;
};

/* MEMORY ON THE CARD, all inside the cap:
 *   taken   by CUDA itself: context, libraries, streams, kernels. CUDA tells only what is free on
 *           the whole card: when the device is opened, total - free is taken if that can be a
 *           context alone (1 GiB at most), else somebody else is there too and 512 MiB are assumed.
 *           What is less free later (kernels are loaded when they are first used, in prepare mode)
 *           is added.
 *   own     CUDA_STREAMS_MAX pieces behind the arena
 *   arena   the rest: caps.memory_bytes. Both are one cudaMalloc. */
struct cuda_dev {
    struct dev base;
    struct cuda_lt lt;
    struct cuda_matmul *matmul;
    struct cuda_dnn *dnn; /* NULL: attention by own tiles */
    bool bf16_products, fp16_products; /* else f32 */
    int cc_major, cc_minor, runtime_version;
    char card[64];
    uint64_t total_bytes, cap_bytes; /* cap 0: what is free */
    uint64_t first_taken_bytes, first_free_bytes;
    uint8_t *arena; /* NULL until dev_reserve */
    uint64_t arena_bytes;
    uint64_t own_bytes; /* of one stream */
    uint8_t *own;
    uint32_t streams_used; /* bits: pieces of own memory given to streams */
    bool measure;          /* time by kind of work; changed while no work is queued */
    struct dev_tally work[CUDA_WORK_N];
    /* Protects the sticky error, marks, registered regions, streams_used. */
    pthread_mutex_t lock;
    struct stk_error error;
    atomic_bool failed;
    struct cuda_region region[CUDA_REGIONS_MAX];
    uint32_t n_regions;
};

static inline struct cuda_dev *cuda_of(struct dev *d) { return (struct cuda_dev *)d; }

/* Keeps the first error of queued work. Any thread. */
void cuda_fail(struct cuda_dev *h, const struct stk_error *e);
/* STK_OK, or a sentence about the call of CUDA that failed; `where` says for what ("stream compute:
 * linear_forward of 4096 x 512 to 1536"). */
stk_status cuda_check(cudaError_t e, const char *call, const char *where, struct stk_error *err);
/* Arena that the cap, or what is free now, leaves; writes caps.memory_bytes. Application's
 * thread. */
stk_status cuda_memory_look(struct cuda_dev *h, struct stk_error *err);
/* Is it pinned? Any thread. */
bool cuda_registered(struct cuda_dev *h, const void *p, uint64_t size_bytes);
void cuda_numerics_write(struct cuda_dev *h);

/* --- streams (cuda_stream.c) ------------------------------------------------------------------ */

/* What is told when a command is done. */
enum cuda_slot_kind { CUDA_SLOT_PLAIN, CUDA_SLOT_NOTIFY, CUDA_SLOT_LOSS, CUDA_SLOT_SUM };
struct cuda_slot {
    enum cuda_slot_kind kind;
    union {
        struct dev_cmd_notify notify;
        double *loss_sum;        /* += result */
        struct convert_sum *sum; /* = result */
    } u;
    uint64_t upto; /* of a callback: all commands before this number are done */
    struct cuda_stream *stream;
};
/* Written by a kernel, in pinned host memory. */
union cuda_result {
    double loss;
    struct convert_sum sum;
};

#define CUDA_CLOCK_N 128
struct cuda_span_time {
    cudaEvent_t begin, end;
    uint32_t row;   /* of the device's work */
    uint32_t minus; /* and the row that this time is not of; CUDA_WORK_N: none */
    bool open, busy;
};
/* Busy times by pairs of events in a ring (cuda_clock.c); under its own lock. */
struct cuda_clock {
    pthread_mutex_t lock;
    struct cuda_span_time span[CUDA_CLOCK_N];
    uint64_t head, tail; /* recorded, read */
    uint64_t dropped;
    struct cuda_span_time *command, *product; /* open ones, NULL: none */
    bool made;
};

struct cuda_stream {
    struct dev_stream base;
    cudaStream_t queue;
    struct cuda_slot *ring;
    union cuda_result *result, *result_dev; /* one a slot; the same memory as the card sees it */
    uint32_t depth, every;                  /* a callback at least each `every` commands */
    uint32_t since;                         /* commands since the last callback */
    uint32_t own_index;
    _Atomic uint64_t head, tail; /* queued, told to be done */
    atomic_bool room_wanted;
    struct exec_event room;
    pthread_t application; /* who opened it: the thread that may wait */
    /* Protects slots between head and tail, and `dead`. */
    pthread_mutex_t lock;
    bool dead; /* CUDA takes no callbacks any more: we tell */
    struct cuda_clock clock;
    _Atomic uint64_t busy_ns;
};

static inline struct cuda_stream *cuda_stream_of(struct dev_stream *s)
{
    return (struct cuda_stream *)s;
}
static inline struct cuda_dev *cuda_stream_dev(struct cuda_stream *s)
{
    return cuda_of(s->base.dev);
}

stk_status cuda_stream_open(struct dev *d, const char *name, uint32_t depth,
                            struct dev_stream **out, struct stk_error *err);
void cuda_stream_close(struct dev_stream *s);
stk_status cuda_stream_enqueue(struct dev_stream *s, const struct dev_cmd *cmd,
                               struct stk_error *err);
stk_status cuda_mark_init(struct dev *d, struct dev_mark *m, struct stk_error *err);
void cuda_mark_free(struct dev_mark *m);

/* --- busy times (cuda_clock.c) ---------------------------------------------------------------- */

/* A span of work begins (if none is open) and ends on the stream. Without measuring a span is what
 * lies between two notifications or marks, so that a step costs few records; with it, a command,
 * and the products inside are spans of their own. Failures are no errors: the span is not counted.
 * Producer. */
stk_status cuda_clock_open(struct cuda_stream *s, struct stk_error *err);
void cuda_clock_close(struct cuda_stream *s);
void cuda_clock_begin(struct cuda_stream *s, uint32_t row);
void cuda_clock_end(struct cuda_stream *s);
void cuda_clock_product_begin(struct cuda_stream *s, uint32_t row);
void cuda_clock_product_end(struct cuda_stream *s);
/* Adds up spans that are over. Any thread. */
uint64_t cuda_stream_busy_ns(const struct dev_stream *s);

/* --- commands (cuda_run.c) -------------------------------------------------------------------- */

/* Launches a copy, a zero or an operation. `slot` becomes a result's where there is one. */
stk_status cuda_run(struct cuda_stream *s, const struct dev_cmd *cmd, struct cuda_slot *slot,
                    union cuda_result *result_dev, struct stk_error *err);
stk_status cuda_prepare(struct dev *d, const struct dev_cmd *cmd, uint64_t *scratch_bytes,
                        struct stk_error *err);
void cuda_count(struct cuda_dev *h, uint32_t row, double flops, double bytes);
uint32_t cuda_work_read(const struct dev *d, struct dev_work out[DEV_WORK_MAX]);
/* "linear_forward of 4096 x 512 to 1536". */
#define CUDA_WHERE_BYTES 192
const char *cuda_cmd_text(const struct dev_cmd *cmd, char out[CUDA_WHERE_BYTES]);

/* --- one operation in progress: dry (prepare) or real ----------------------------------------- */

struct cuda_job {
    struct cuda_dev *h;
    struct cuda_stream *s; /* NULL when dry */
    bool dry;              /* measure scratch and choose algorithms; launch nothing */
    bool untuned;          /* dry: take the library's first algorithm, measure nothing */
    struct ops_scratch scratch;
    uint64_t used_bytes; /* taken so far */
    uint64_t pad_bytes;  /* dry: most workspace that a product wants besides */
    stk_status st;       /* first error; later steps do nothing */
    struct stk_error *err;
    const struct dev_cmd *cmd;
};
/* Scratch in use before the first piece: room to round its start up to CUDA_ALIGN_BYTES. */
#define CUDA_JOB_FIRST_BYTES CUDA_ALIGN_BYTES
/* Aligned piece of the scratch, NULL when dry or short of room (st is set). All pieces are taken
 * before the first product: the rest of the scratch is the product's workspace. */
void *cuda_take(struct cuda_job *j, uint64_t size_bytes);
/* Keeps the failure of one of our launches. */
void cuda_job_check(struct cuda_job *j, cudaError_t e, const char *call);
void cuda_job_cast(struct cuda_job *j, const struct cuda_cast *c);

/* --- products (cuda_matmul.c) ----------------------------------------------------------------- */

/* d[m, n] = op(A) op(B) + beta c (+ bias[m]) as cuBLAS has it: COLUMN-major; A is [m, k], or [k, m]
 * with ta; B is [k, n], or [n, k] with tb. Our row-major y[r, o] is d[o, r]. f32 sums. Members are
 * the key of the shape, so 0 where unused. */
struct cuda_product {
    uint64_t m, n, k, lda, ldb, ldd; /* c lies as d does */
    uint32_t ta, tb;                 /* 0 or 1 */
    uint32_t src, dst;               /* enum ops_dtype: of a and b; of c, d and bias */
    uint32_t bias;                   /* 0 or 1 */
    uint32_t pad;
};
struct cuda_operands {
    const void *a, *b, *c; /* c NULL: beta is 0 */
    const void *bias;
    void *d;
};
stk_status cuda_matmul_open(struct cuda_dev *h, struct cuda_matmul **out, struct stk_error *err);
void cuda_matmul_close(struct cuda_dev *h);
/* Of the job: dry: chooses the algorithm (measured, if the product is large enough to matter and
 * the memory for operands is free) and adds to pad_bytes; real: launches it. */
void cuda_job_product(struct cuda_job *j, const struct cuda_product *p,
                      const struct cuda_operands *o);
stk_status cuda_matmul_rate(struct dev *d, struct stk_error *err);
/* Over all chosen algorithms, in any order of preparing. */
uint32_t cuda_matmul_hash(struct cuda_dev *h);
/* Tests: products made in prepare mode and outside of it. */
void cuda_matmul_counts(const struct dev *d, uint64_t *made, uint64_t *late);

/* Rows at once, so that `row_bytes` of each fit `limit_bytes`: even tiles, multiples of 128. */
uint64_t cuda_tile(uint64_t total, uint64_t row_bytes, uint64_t limit_bytes);
/* Type of a product's operands for parameters of this type. */
enum ops_dtype cuda_product_type(const struct cuda_dev *h, enum ops_dtype pt);

static inline const void *cuda_at(const void *p, enum ops_dtype t, uint64_t i)
{
    return p ? (const uint8_t *)p + i * ops_dtype_bytes(t) : NULL;
}
static inline void *cuda_at_mut(void *p, enum ops_dtype t, uint64_t i)
{
    return p ? (uint8_t *)p + i * ops_dtype_bytes(t) : NULL;
}

void cuda_linear_forward(struct cuda_job *j, const struct ops_linear *a);
void cuda_linear_backward_data(struct cuda_job *j, const struct ops_linear *a);
void cuda_linear_backward_weight(struct cuda_job *j, const struct ops_linear *a);
/* loss: on the card's side of the result's slot. */
void cuda_head(struct cuda_job *j, const struct ops_head *a, bool train, double *loss);

/* --- attention (cuda_attention.c) ------------------------------------------------------------- */

enum cuda_attention_way { CUDA_ATTENTION_TILES, CUDA_ATTENTION_DNN };
/* By shape and card alone: every visit of one shape is computed the same way. A dry job makes the
 * plan, a real one finds it. */
enum cuda_attention_way cuda_attention_choose(struct cuda_job *j, const struct ops_attention *a,
                                              bool backward);
void cuda_attention(struct cuda_job *j, const struct ops_attention *a, bool backward);

/* --- cuDNN's attention (cuda_dnn.c; cuda_dnn_none.c in a build without its headers) ----------- */

/* Writes h->dnn: NULL where the library is not there or too old, or the card is before 8.0. */
void cuda_dnn_open(struct cuda_dev *h);
void cuda_dnn_close(struct cuda_dev *h);
/* Does cuDNN compute this? bf16, heads of a multiple of 8 elements, a plan it can have here, and in
 * backward a deterministic one. */
bool cuda_dnn_takes(struct cuda_job *j, const struct ops_attention *a, bool backward);
/* What cuda_dnn_takes is true for. */
void cuda_dnn_attention(struct cuda_job *j, const struct ops_attention *a, bool backward);
#define CUDA_DNN_TEXT_BYTES 160
/* "cuDNN 9.19.0", or "no cuDNN (why)": for describe. A context is there. */
void cuda_dnn_describe(char text[CUDA_DNN_TEXT_BYTES]);
/* "tiles", or "cudnn91900-" and a hash over all plans: part of the numerics key. Behind it the call
 * that failed, if one did: ",cudnnCreate:1001". */
void cuda_dnn_numerics(const struct cuda_dev *h, char text[CUDA_DNN_TEXT_BYTES]);

#endif
