/* gpu/cuda/cuda_dnn.c - attention by cuDNN: which shapes, in which pieces, and their plans.
 *
 * Owns cuDNN's handle and the table of plans. Must not know what graphs look like
 * (cuda_dnn_graph.c), how an engine is chosen (cuda_dnn_plan.c) or what a launch needs
 * (cuda_dnn_run.c). Plans are made on the application's thread in prepare mode and never later: a
 * shape that was not prepared is computed by own tiles. Launched by streams' producers, under a
 * lock, as a handle has one stream at a time.
 *
 * PIECES. Backward's workspace holds two bytes for each score, so it is run for as many sequences,
 * or key heads of one sequence, at a time as keep that below CUDA_DNN_PIECE_BYTES. Which is a
 * function of the shape alone.
 *
 * CHECKED. The first plan of a kind of heads and a direction is tried on a small problem against
 * own tiles, twice (cuda_dnn_check.c): other numbers or other bits, and own tiles it is.
 *
 * FAILURES. A library that is not there, or has nothing for a shape, is none: own tiles do it. A
 * call that fails while opening or preparing, or a check, is named in the numerics key, and own
 * tiles do it, too; a call that fails at a launch ends the run. */
#include "gpu/cuda/cuda_dnn.h"

#include "base/sys.h"
#include <stdio.h>

#define PLANS_N 64 /* shapes and directions; a model has some few */
#ifndef CUDA_DNN_PIECE_BYTES
#define CUDA_DNN_PIECE_BYTES ((uint64_t)256 << 20)
#endif
#define PIECE_MOST_BYTES ((uint64_t)2 << 30) /* of the smallest possible piece: else own tiles */
#define SCORES_TILE 128
#define HEAD_DIM_MOST 256 /* whether more than 128 can be had the library says */

#define FAILED_BYTES 48

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
static void keep_failure(char failed[FAILED_BYTES], const char *call, int status)
{
    if (!failed[0]) snprintf(failed, FAILED_BYTES, "%s:%d", call, status);
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
        keep_failure(d->failed, "cudnnCreate", (int)st);
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

static bool vectors(uint64_t elements) { return elements % DNN_VECTOR_ELEMENTS == 0; }

/* By arguments and card alone, before the library is asked. Where gradients are wide, products in
 * f32 were asked for: own tiles have that. Of a single token there is no backward. */
static bool possible(const struct cuda_dev *h, const struct ops_attention *a)
{
    return h->bf16_products && a->at == OPS_BF16 && !a->grad_wide && a->seq > 1 &&
           a->seq <= INT32_MAX && a->head_dim <= HEAD_DIM_MOST &&
           vectors(a->head_dim) && vectors(a->q_stride) && vectors(a->k_stride) &&
           vectors(a->v_stride) && vectors(a->o_stride);
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
                   head = side * side * DNN_BF16_BYTES, group = (uint64_t)(s->heads / s->kv_heads);
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

/* What one check is for: engines are of a size of heads, grouped or not, and a direction. */
static bool same_kind(const struct dnn_shape *a, const struct dnn_shape *b)
{
    return a->head_dim == b->head_dim && a->backward == b->backward &&
           (a->heads == a->kv_heads) == (b->heads == b->kv_heads);
}

/* Under the lock. Keeps a failure, or that its numbers are wrong. */
static bool good(struct cuda_dev *h, struct cuda_dnn *d, struct dnn_entry *e)
{
    struct dnn_verdict v = { .call = "check" };
    for (uint32_t i = 0; i + 1 < d->n; i++)
        if (d->entry[i].checked && same_kind(&d->entry[i].key, &e->key)) return d->entry[i].good;
    e->checked = true;
    e->good = dnn_check(h, &d->t, d->handle, &e->key, &v);
    if (!e->good) keep_failure(d->failed, v.call, v.status);
    return e->good;
}

/* Under the lock. A full table: own tiles for what comes later. */
static struct dnn_entry *prepare(struct cuda_dev *h, struct cuda_dnn *d, const struct dnn_shape *s)
{
    const struct dnn_card card = { .handle = d->handle };
    struct dnn_entry *e = find(d, s);
    if (e || d->n == PLANS_N) return e;
    e = &d->entry[d->n++];
    e->key = *s;
    if (!piece_of(s, &e->piece)) return e;
    dnn_plan_make(&e->plan, &d->t, &card, &e->piece);
    if (e->plan.g.st != CUDNN_STATUS_SUCCESS)
        keep_failure(d->failed, e->plan.g.call, (int)e->plan.g.st);
    if (!e->plan.plan || !good(h, d, e)) dnn_plan_free(&e->plan);
    return e;
}

bool cuda_dnn_takes(struct cuda_job *j, const struct ops_attention *a, bool backward)
{
    struct cuda_dnn *d = j->h->dnn;
    if (!d || !d->handle || !possible(j->h, a)) return false;
    const struct dnn_shape s = shape_of(a, backward);
    pthread_mutex_lock(&d->lock);
    const struct dnn_entry *e = j->dry ? prepare(j->h, d, &s) : find(d, &s);
    const bool takes = e && e->plan.plan;
    pthread_mutex_unlock(&d->lock);
    return takes;
}

/* --- launching -------------------------------------------------------------------------------- */

void cuda_dnn_attention(struct cuda_job *j, const struct ops_attention *a, bool backward)
{
    struct cuda_dnn *d = j->h->dnn;
    const struct dnn_shape s = shape_of(a, backward);
    pthread_mutex_lock(&d->lock);
    dnn_run(j, find(d, &s), d->handle, a);
    pthread_mutex_unlock(&d->lock);
}
