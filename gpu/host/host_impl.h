/* gpu/host/host_impl.h - private to gpu/host: the host device's own records, its products and the
 * pieces of its operations.
 *
 * Files: host_dev.c device and memory; host_stream.c streams and marks; host_run.c what a command
 * does; host_model.c how long it would take; matmul.c products (oneDNN); linear.c, head.c,
 * head_rows.c operations built on products. */
#ifndef GPU_HOST_IMPL_H
#define GPU_HOST_IMPL_H

#include "gpu/device_impl.h"
#include "gpu/host/kernels.h"
#include <pthread.h>
#include <stdatomic.h>

#define HOST_ALIGN_BYTES 64
#define HOST_TILES_VERSION \
    2 /* of the tile rules in linear.c and head.c: part of the numerics key */

struct host_matmul;

/* Rows of work: products have one of their own after the commands. */
enum { HOST_WORK_PRODUCT = DEV_CMD_N, HOST_WORK_N };

struct host_dev {
    struct dev base;
    struct host_ctx ctx;
    bool discrete;          /* operands must lie in the arena */
    struct dev_model model; /* used where base.caps.modelled_time */
    uint64_t memory_bytes;  /* cap of the arena */
    uint8_t *arena;         /* NULL until dev_reserve */
    uint64_t arena_bytes;
    bool poison;
    bool plan_only; /* products are asked about, and never run */
    uint64_t seed;
    struct host_matmul *matmul;
    dev_adam_fn *adam;
    struct dev_tally work[HOST_WORK_N];
    uint32_t streams_open;
    /* Protects the sticky error, all marks of this device and who is parked on them. Held for a few
     * instructions only. */
    pthread_mutex_t lock;
    struct stk_error error;
    atomic_bool failed;
};

static inline struct host_dev *host_of(struct dev *d) { return (struct host_dev *)d; }

/* Keeps the first error of queued work. Any thread. */
void host_fail(struct host_dev *h, const struct stk_error *e);

/* --- streams (host_stream.c) ------------------------------------------------------------------ */
stk_status host_stream_open(struct dev *d, const char *name, uint32_t depth,
                            struct dev_stream **out, struct stk_error *err);
void host_stream_close(struct dev_stream *s);
uint64_t host_stream_busy_ns(const struct dev_stream *s);
stk_status host_stream_enqueue(struct dev_stream *s, const struct dev_cmd *cmd,
                               struct stk_error *err);
stk_status host_mark_init(struct dev *d, struct dev_mark *m, struct stk_error *err);
void host_mark_free(struct dev_mark *m);

/* --- commands (host_run.c, host_model.c) ------------------------------------------------------ */
/* Runs a copy, a zero or an operation now, on the calling lane, and counts it. */
stk_status host_run(struct host_dev *h, const struct dev_cmd *cmd, struct stk_error *err);
void host_count(struct host_dev *h, uint32_t row, uint64_t ns, double flops, double bytes);
uint32_t host_work_read(const struct dev *d, struct dev_work out[DEV_WORK_MAX]);
stk_status host_prepare(struct dev *d, const struct dev_cmd *cmd, uint64_t *scratch_bytes,
                        struct stk_error *err);

/* DEV_SIM: modelled nanoseconds of a command. */
uint64_t host_model_ns(const struct host_dev *h, const struct dev_cmd *cmd);
/* And what it takes meanwhile of what the machine has only once. */
struct exec_need host_model_need(const struct host_dev *h, const struct dev_cmd *cmd);

/* --- products (matmul.c) ---------------------------------------------------------------------- */
/* c[m,n] = A B in f32 arithmetic or bf16 x bf16 with f32 sums; A(i,p) = ta ? a[p * lda + i] : a[i *
 * lda + p]; B(p,j) likewise. */
struct host_product {
    uint64_t m, n, k, lda, ldb, ldc;
    uint32_t ta, tb;   /* 0 or 1 */
    uint32_t src, dst; /* enum ops_dtype: F32 or BF16; dst BF16 only with src BF16 */
    uint32_t packed;   /* 0 or 1: b is in the layout that host_matmul_layout says; ldb and tb are 0 */
    uint32_t add;      /* 0 or 1: c = c + A B (dst F32 only) */
    uint32_t own;      /* 0 or 1: by host_gemm, not by the library; packed in its layout */
    uint32_t turned;   /* own only: 0 or 1: c is stored as its transpose */
    const void *base;  /* own only, no part of the shape: c = A B + base, as host_gemm says */
    uint32_t base_t;
};
stk_status host_matmul_open(uint32_t threads, struct host_matmul **out, struct stk_error *err);
void host_matmul_close(struct host_matmul *mm);
/* Makes the primitive of this shape if there is none; *pad_bytes: scratch a run of it needs. */
stk_status host_matmul_prepare(struct host_matmul *mm, const struct host_product *p,
                               uint64_t *pad_bytes, struct stk_error *err);
/* The layout of b with which the library multiplies this shape (packed, so ldb and tb are 0) fastest;
 * k_block 0: none that we can make, give b as it lies. */
stk_status host_matmul_layout(struct host_matmul *mm, const struct host_product *p,
                              struct host_layout *out, struct stk_error *err);
/* Runs it; a shape that was not prepared is made now and counted as late. */
stk_status host_matmul_run(struct host_matmul *mm, const struct host_product *p, const void *a,
                           const void *b, void *c, void *pad, uint64_t pad_size_bytes,
                           struct stk_error *err);
/* Tests: primitives made so far, and those made outside of prepare. */
uint64_t host_matmul_library_bytes(struct host_matmul *mm);
void host_matmul_counts(const struct dev *d, uint64_t *made, uint64_t *late);
const char *host_matmul_isa(void);

/* --- one operation in progress: dry (prepare) or real ----------------------------------------- */
struct host_job {
    struct host_dev *h;
    bool dry; /* measure scratch and make primitives, touch no memory */
    struct ops_scratch scratch;
    uint64_t used_bytes; /* taken so far */
    uint64_t pad_bytes;  /* dry: most that a product wants besides */
    uint64_t product_ns; /* spent in products, which are counted apart */
    stk_status st;       /* first error; later steps do nothing */
    struct stk_error *err;
    const char *op;
};
/* 64-byte aligned piece of the scratch, NULL when dry or short of room (st is set). All pieces are
 * taken before the first product: the rest of the scratch is the product's. */
void *host_take(struct host_job *j, uint64_t size_bytes);
void host_job_product(struct host_job *j, const struct host_product *p, const void *a,
                      const void *b, void *c);
/* Copies a [rows, cols] window from one type to another (f32, bf16, and fp16 to f32); threads share
 * the rows. */
void host_convert(struct host_job *j, const void *src, enum ops_dtype from, uint64_t src_ld,
                  void *dst, enum ops_dtype to, uint64_t dst_ld, uint64_t rows, uint64_t cols);
/* acc[r, c] += t[r, c] in f32. */
void host_accumulate(struct host_job *j, float *acc, uint64_t acc_ld, const float *t, uint64_t t_ld,
                     uint64_t rows, uint64_t cols);

/* --- operands of products (operand.c) --------------------------------------------------------- */
/* The right operand B[k][n] of type `to`, from rows of k, or (transposed) rows of n, of type `from`. */
struct host_right {
    uint64_t k, n, ld;
    enum ops_dtype from, to;
    bool transposed;
    /* decided by host_right_plan */
    struct host_layout layout; /* k_block 0: not packed */
    bool in_place;
};
/* Bytes of a buffer that holds it whatever is decided. */
uint64_t host_right_room(const struct host_right *r);
/* Decides, and completes the product: n, k, packed, ldb, tb (m, lda, ldc, src, dst, add are given). */
void host_right_plan(struct host_job *j, struct host_right *r, struct host_product *p);
/* The operand: src itself, or made in buf. */
const void *host_right_make(struct host_job *j, const struct host_right *r, const void *src,
                            void *buf);
/* dst[col][row] = src[row][col], rows of dst close together: a left operand for a product that sums
 * over src's rows. */
void host_left_transpose(struct host_job *j, const void *src, enum ops_dtype from, uint64_t ld,
                         uint64_t rows, uint64_t cols, void *dst, enum ops_dtype to);

/* How many of `total` rows of `row_bytes` fit `limit_bytes` (at least 64), evened out over the
 * tiles and a multiple of 64, at most `total`. */
uint64_t host_tile(uint64_t total, uint64_t row_bytes, uint64_t limit_bytes);

static inline const void *host_at(const void *p, enum ops_dtype t, uint64_t i)
{
    return p ? (const uint8_t *)p + i * ops_dtype_bytes(t) : NULL;
}
static inline void *host_at_mut(void *p, enum ops_dtype t, uint64_t i)
{
    return p ? (uint8_t *)p + i * ops_dtype_bytes(t) : NULL;
}

void host_linear_forward(struct host_job *j, const struct ops_linear *a);
void host_linear_backward_data(struct host_job *j, const struct ops_linear *a);
void host_linear_backward_weight(struct host_job *j, const struct ops_linear *a);
void host_head(struct host_job *j, const struct ops_head *a, bool train);

/* --- rows of the head (head_rows.c): the same bits for every instruction set ------------------ */
float host_row_max(enum cpu_isa isa, const float *x, uint64_t n);
/* x[i] = exp(x[i] - max); returns the sum in fp64 (fixed order). */
double host_row_exp(enum cpu_isa isa, float *x, uint64_t n, float max);
/* The log-sum-exp part alone: the sum of exp(x[i] - max), x unchanged. */
double host_row_exp_sum(enum cpu_isa isa, const float *x, uint64_t n, float max);
void host_row_scale(enum cpu_isa isa, float *x, uint64_t n, float factor);
/* out = x * factor, rounded to bf16. */
void host_row_scale_bf16(enum cpu_isa isa, const float *x, uint64_t n, float factor, uint16_t *out);

#endif
