/* gpu/cuda/cuda_dnn.c - attention by cuDNN: which shapes, their plans, their scratch, their launch.
 *
 * Owns cuDNN's handle and the table of plans. Must not know what graphs look like
 * (cuda_dnn_graph.c) nor how an engine is chosen (cuda_dnn_plan.c). Plans are made on the
 * application's thread in prepare mode and never later: a shape that was not prepared is computed
 * by own tiles. Launched by streams' producers, under a lock, as a handle has one stream at a time.
 *
 * PIECES. Backward's workspace holds two bytes for each score, so it is run for as many sequences,
 * or key heads of one sequence, at a time as keep that below CUDA_DNN_PIECE_BYTES. Which is a
 * function of the shape alone.
 *
 * FAILURES. A library that is not there, or has nothing for a shape, is none: own tiles do it. A
 * call that fails while opening or preparing is named in the numerics key, and own tiles do it,
 * too; one that fails at a launch ends the run.
 *
 * WHAT IS CONVERTED. cuDNN's log-sum-exp lies head by head ([n_seq][heads][seq]; other layouts are
 * wrong before 9.26), that of gpu/ops.h token by token: a kernel of ours turns it. And for each key
 * it is told the first query that sees it no more, which another kernel finds from first_key. */
#include "gpu/cuda/cuda_dnn.h"

#include "base/sys.h"
#include <math.h>
#include <stdio.h>

#define PLANS_N 64 /* shapes and directions; a model has some few */
#ifndef CUDA_DNN_PIECE_BYTES
#define CUDA_DNN_PIECE_BYTES ((uint64_t)256 << 20)
#endif
#define PIECE_MOST_BYTES ((uint64_t)2 << 30) /* of the smallest possible piece: else own tiles */
#define SCORES_TILE 128
#define BF16_BYTES 2
#define VECTOR_ELEMENTS 8 /* heads and strides are multiples of it: 16 bytes */
#define HEAD_DIM_MOST 256 /* whether more than 128 can be had the library says */

#define FAILED_BYTES 48

struct dnn_entry {
    struct dnn_shape key; /* whole */
    struct dnn_shape piece;
    struct dnn_plan plan;
};

struct cuda_dnn {
    struct dnn_table t;
    cudnnHandle_t handle; /* NULL: none could be made */
    size_t version;
    pthread_mutex_t lock;
    char failed[FAILED_BYTES];
    uint32_t n;
    struct dnn_entry entry[PLANS_N];
};

/* --- opening ---------------------------------------------------------------------------------- */

/* The first failure, as "call:status". */
static void keep_failure(char failed[FAILED_BYTES], const char *call, cudnnStatus_t st)
{
    if (!failed[0]) snprintf(failed, FAILED_BYTES, "%s:%d", call, (int)st);
}

void cuda_dnn_open(struct cuda_dev *h)
{
    struct cuda_dnn *d = h->cc_major < 8 ? NULL : sys_calloc(1, sizeof *d);
    if (!d) return;
    if (dnn_table_open(&d->t, NULL) != STK_OK) {
        sys_free(d);
        return;
    }
    pthread_mutex_init(&d->lock, NULL);
    d->version = d->t.cudnnGetVersion();
    const cudnnStatus_t st = d->t.cudnnCreate(&d->handle);
    if (st != CUDNN_STATUS_SUCCESS) {
        keep_failure(d->failed, "cudnnCreate", st);
        d->handle = NULL;
    }
    h->dnn = d;
}

void cuda_dnn_close(struct cuda_dev *h)
{
    struct cuda_dnn *d = h->dnn;
    if (!d) return;
    for (uint32_t i = 0; i < d->n; i++)
        if (d->entry[i].plan.plan) dnn_plan_free(&d->entry[i].plan);
    if (d->handle) d->t.cudnnDestroy(d->handle);
    dnn_table_close(&d->t);
    pthread_mutex_destroy(&d->lock);
    sys_free(d);
    h->dnn = NULL;
}

void cuda_dnn_describe(char text[CUDA_DNN_TEXT_BYTES])
{
    struct dnn_table t;
    struct stk_error err = { 0 };
    cudnnHandle_t handle = NULL;
    if (dnn_table_open(&t, &err) != STK_OK) {
        snprintf(text, CUDA_DNN_TEXT_BYTES, "no cuDNN (%.100s)", err.text);
        return;
    }
    const size_t v = t.cudnnGetVersion(); /* 91900: 9.19.0 */
    const cudnnStatus_t st = t.cudnnCreate(&handle);
    if (st == CUDNN_STATUS_SUCCESS) {
        snprintf(text, CUDA_DNN_TEXT_BYTES, "cuDNN %zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
        t.cudnnDestroy(handle);
    } else {
        snprintf(text, CUDA_DNN_TEXT_BYTES, "no cuDNN (cudnnCreate failed with status %d, %.60s)",
                 (int)st, t.cudnnGetErrorString(st));
    }
    dnn_table_close(&t);
}

void cuda_dnn_numerics(const struct cuda_dev *h, char text[CUDA_DNN_TEXT_BYTES])
{
    struct cuda_dnn *d = h->dnn;
    uint32_t sum = 0, plans = 0;
    snprintf(text, CUDA_DNN_TEXT_BYTES, "tiles");
    if (!d) return;
    pthread_mutex_lock(&d->lock);
    for (uint32_t i = 0; i < d->n; i++) {
        if (!d->entry[i].plan.plan) continue;
        sum += d->entry[i].plan.hash;
        plans++;
    }
    const char *const comma = d->failed[0] ? "," : "";
    if (plans)
        snprintf(text, CUDA_DNN_TEXT_BYTES, "cudnn%zu-%08x%s%s", d->version, sum, comma, d->failed);
    else snprintf(text, CUDA_DNN_TEXT_BYTES, "tiles%s%s", comma, d->failed);
    pthread_mutex_unlock(&d->lock);
}

/* --- shapes ---------------------------------------------------------------------------------- */

static bool multiple(uint64_t x, uint64_t of) { return x % of == 0; }

/* By arguments and card alone, before the library is asked. Where gradients are wide, products in
 * f32 were asked for: own tiles have that. Of a single token there is no backward. */
static bool possible(const struct cuda_dev *h, const struct ops_attention *a)
{
    return h->bf16_products && a->at == OPS_BF16 && !a->grad_wide && a->seq > 1 &&
           a->seq <= INT32_MAX && a->head_dim <= HEAD_DIM_MOST &&
           multiple(a->head_dim, VECTOR_ELEMENTS) && multiple(a->q_stride, VECTOR_ELEMENTS) &&
           multiple(a->k_stride, VECTOR_ELEMENTS) && multiple(a->v_stride, VECTOR_ELEMENTS) &&
           multiple(a->o_stride, VECTOR_ELEMENTS);
}

static struct dnn_shape shape_of(const struct ops_attention *a, bool backward)
{
    return (struct dnn_shape){
        .n_seq = (int64_t)a->n_seq,
        .seq = (int64_t)a->seq,
        .heads = (int64_t)a->heads,
        .kv_heads = (int64_t)a->kv_heads,
        .head_dim = (int64_t)a->head_dim,
        .q_stride = (int64_t)a->q_stride,
        .k_stride = (int64_t)a->k_stride,
        .v_stride = (int64_t)a->v_stride,
        .o_stride = (int64_t)a->o_stride,
        .backward = backward,
    };
}

/* Largest divisor of n of which `each` bytes fit; 1 at least. */
static int64_t fitting(int64_t n, uint64_t each, uint64_t limit)
{
    for (int64_t k = n; k > 1; k--)
        if (n % k == 0 && (uint64_t)k * each <= limit) return k;
    return 1;
}

/* false: even the smallest one is too large. */
static bool piece_of(const struct dnn_shape *s, struct dnn_shape *piece)
{
    const uint64_t side = ((uint64_t)s->seq + SCORES_TILE - 1) / SCORES_TILE * SCORES_TILE,
                   head = side * side * BF16_BYTES, group = (uint64_t)(s->heads / s->kv_heads);
    *piece = *s;
    if (!s->backward) return true;
    piece->n_seq = fitting(s->n_seq, head * (uint64_t)s->heads, CUDA_DNN_PIECE_BYTES);
    if (piece->n_seq > 1 || head * (uint64_t)s->heads <= CUDA_DNN_PIECE_BYTES) return true;
    piece->kv_heads = fitting(s->kv_heads, head * group, CUDA_DNN_PIECE_BYTES);
    piece->heads = piece->kv_heads * (int64_t)group;
    return head * group <= PIECE_MOST_BYTES;
}

/* Under the lock. NULL: not prepared. */
static struct dnn_entry *find(struct cuda_dnn *d, const struct dnn_shape *s)
{
    for (uint32_t i = 0; i < d->n; i++)
        if (dnn_same_shape(&d->entry[i].key, s)) return &d->entry[i];
    return NULL;
}

/* Under the lock. A full table: own tiles for what comes later. */
static struct dnn_entry *prepare(struct cuda_dnn *d, const struct dnn_shape *s)
{
    const struct dnn_card card = { .handle = d->handle };
    struct dnn_entry *e = find(d, s);
    if (e || d->n == PLANS_N) return e;
    e = &d->entry[d->n++];
    e->key = *s;
    if (!piece_of(s, &e->piece)) return e;
    dnn_plan_make(&e->plan, &d->t, &card, &e->piece);
    if (e->plan.g.st != CUDNN_STATUS_SUCCESS)
        keep_failure(d->failed, e->plan.g.call, e->plan.g.st);
    if (!e->plan.plan) dnn_plan_free(&e->plan);
    return e;
}

bool cuda_dnn_takes(struct cuda_job *j, const struct ops_attention *a, bool backward)
{
    struct cuda_dnn *d = j->h->dnn;
    if (!d || !d->handle || !possible(j->h, a)) return false;
    const struct dnn_shape s = shape_of(a, backward);
    pthread_mutex_lock(&d->lock);
    const struct dnn_entry *e = j->dry ? prepare(d, &s) : find(d, &s);
    const bool takes = e && e->plan.plan;
    pthread_mutex_unlock(&d->lock);
    return takes;
}

/* --- launching -------------------------------------------------------------------------------- */

/* Scratch of one piece. */
struct dnn_scratch {
    float *stats, *sum;
    int32_t *end;
    void *workspace;
};

static struct dnn_scratch take(struct cuda_job *j, const struct dnn_entry *e)
{
    const struct dnn_shape *p = &e->piece;
    const uint64_t tokens = (uint64_t)(p->n_seq * p->seq), rows = tokens * (uint64_t)p->heads;
    struct dnn_scratch c = { .stats = NULL };
    c.stats = cuda_take(j, rows * sizeof(float));
    c.end = cuda_take(j, tokens * sizeof(int32_t));
    if (p->backward) c.sum = cuda_take(j, rows * sizeof(float));
    if (e->plan.workspace_bytes) c.workspace = cuda_take(j, e->plan.workspace_bytes);
    return c;
}

static bool aligned(const struct ops_attention *a, bool backward)
{
    const void *const p[] = { a->q, a->k, a->v, a->o, backward ? a->d_o : NULL,
                              backward ? a->dq : NULL, backward ? a->dk : NULL,
                              backward ? a->dv : NULL };
    for (size_t i = 0; i < sizeof p / sizeof p[0]; i++)
        if ((uintptr_t)p[i] % (VECTOR_ELEMENTS * BF16_BYTES)) return false;
    return true;
}

static void *past(const void *p, int64_t elements)
{
    return (uint8_t *)(uintptr_t)p + elements * BF16_BYTES;
}

/* Where a piece begins. */
struct dnn_begin {
    int64_t token, head, kv_head;
};

static void run_plan(struct cuda_job *j, const struct dnn_entry *e, const struct ops_attention *a,
                     const struct dnn_scratch *c, const struct dnn_begin *b)
{
    struct cuda_dnn *d = j->h->dnn;
    const struct dnn_shape *s = &e->key;
    const int64_t q = b->token * s->q_stride + b->head * s->head_dim,
                  k = b->token * s->k_stride + b->kv_head * s->head_dim,
                  v = b->token * s->v_stride + b->kv_head * s->head_dim,
                  o = b->token * s->o_stride + b->head * s->head_dim;
    float scale = a->scale, masked = -INFINITY, one = 1;
    const char *call = "cudnnSetStream";
    void *memory[DNN_UIDS] = { NULL };
    memory[DNN_Q] = past(a->q, q);
    memory[DNN_K] = past(a->k, k);
    memory[DNN_V] = past(a->v, v);
    memory[DNN_O] = past(a->o, o);
    memory[DNN_STATS] = c->stats;
    memory[DNN_END] = c->end;
    memory[DNN_SCALE] = &scale;
    memory[DNN_MASKED] = &masked;
    if (s->backward) {
        memory[DNN_DO] = past(a->d_o, o);
        memory[DNN_DQ] = past(a->dq, q);
        memory[DNN_DK] = past(a->dk, k);
        memory[DNN_DV] = past(a->dv, v);
        memory[DNN_SUM] = c->sum;
        memory[DNN_ONE] = &one;
    }
    cudnnStatus_t st = d->t.cudnnSetStream(d->handle, j->s->queue);
    if (st == CUDNN_STATUS_SUCCESS)
        st = dnn_plan_run(&e->plan, d->handle, memory, c->workspace, &call);
    if (st == CUDNN_STATUS_SUCCESS) return;
    char text[CUDA_WHERE_BYTES];
    j->st = stk_error_set(j->err, STK_ERR_DEVICE, 0,
                          "device cuda: %s failed with status %d (%s) (stream %s: %s); it may be "
                          "the first to tell of work queued earlier",
                          call, (int)st, d->t.cudnnGetErrorString(st), j->s->base.name,
                          cuda_cmd_text(j->cmd, text));
}

/* The piece that begins with a sequence and a key head; those of one sequence follow one another,
 * and have the same ends. */
static void run_piece(struct cuda_job *j, const struct dnn_entry *e, const struct ops_attention *a,
                      const struct dnn_scratch *c, int64_t seq, int64_t kv_head)
{
    const struct dnn_shape *s = &e->key, *p = &e->piece;
    const struct dnn_begin b = { seq * s->seq, kv_head * (s->heads / s->kv_heads), kv_head };
    float *lse = a->lse + b.token * s->heads + b.head;
    struct cuda_attention_stats stats = { .n_seq = (uint64_t)p->n_seq,
                                          .seq = a->seq,
                                          .heads = (uint64_t)p->heads,
                                          .token_heads = a->heads,
                                          .by_head = s->backward,
                                          .src = s->backward ? lse : c->stats,
                                          .dst = s->backward ? c->stats : lse };
    if (kv_head == 0)
        cuda_job_check(j,
                       cuda_attention_ends(j->s->queue, (uint64_t)p->n_seq, a->seq,
                                           a->first_key + b.token, c->end),
                       "kernel launch");
    if (s->backward && j->st == STK_OK)
        cuda_job_check(j, cuda_attention_stats(j->s->queue, &stats), "kernel launch");
    if (j->st == STK_OK) run_plan(j, e, a, c, &b);
    if (!s->backward && j->st == STK_OK)
        cuda_job_check(j, cuda_attention_stats(j->s->queue, &stats), "kernel launch");
}

void cuda_dnn_attention(struct cuda_job *j, const struct ops_attention *a, bool backward)
{
    struct cuda_dnn *d = j->h->dnn;
    const struct dnn_shape s = shape_of(a, backward);
    pthread_mutex_lock(&d->lock);
    const struct dnn_entry *e = find(d, &s);
    const struct dnn_scratch c = take(j, e);
    if (!j->dry && j->st == STK_OK && !aligned(a, backward))
        j->st = stk_error_set(j->err, STK_ERR_DEVICE, 0,
                              "%s: q, k, v, o and their gradients must begin at multiples of 16 "
                              "bytes",
                              dev_cmd_name(j->cmd->kind));
    if (!j->dry)
        for (int64_t seq = 0; seq < s.n_seq; seq += e->piece.n_seq)
            for (int64_t kv = 0; kv < s.kv_heads && j->st == STK_OK; kv += e->piece.kv_heads)
                run_piece(j, e, a, &c, seq, kv);
    pthread_mutex_unlock(&d->lock);
}
