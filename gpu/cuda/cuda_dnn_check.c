/* gpu/cuda/cuda_dnn_check.c - is cuDNN's attention right on this card? A small problem, by it and
 * by own tiles.
 *
 * Owns the memory and the stream of the check while it lasts. Must not know the table of plans.
 * Application's thread, in prepare mode.
 *
 * Versions of the library have had wrong results for some masks, lengths or cards, and a wrong
 * gradient looks like slow learning: some milliseconds before a run are little against that. The
 * problem has two sequences of a length that is no multiple of a tile, documents and a window. What
 * is right differs by the rounding of bf16 inside; what is wrong, by as much as the values. */
#include "gpu/cuda/cuda_dnn.h"

#include "base/numeric.h"
#include "base/sys.h"
#include <math.h>

#define SEQUENCES 2
#ifndef CUDA_DNN_CHECK_SEQ
#define CUDA_DNN_CHECK_SEQ 201
#endif
#define SEQ CUDA_DNN_CHECK_SEQ
#define DOCUMENT (SEQ * 2 / 5 + 1)
#define WINDOW (SEQ / 4)
#define KV_HEADS 2
#define SCALE 0.125f
#define NEAR (1.0f / 32) /* of the largest value */
#define TILES_BYTES ((uint64_t)1 << 20) /* scratch of own tiles here: 4 bytes a row and head */

/* In the card's memory, one after the other. OWN: own tiles' o, lse and gradients; FIRST_RUN and
 * SECOND_RUN: cuDNN's. Of each the part that the direction makes is compared. */
enum part { KEYS, QKV, D_O, OWN, FIRST_RUN, SECOND_RUN, SCRATCH, PARTS };

struct check {
    struct cuda_dev *h;
    struct cuda_stream s; /* its queue and its name are used */
    struct dnn_entry e;
    cudaEvent_t done;
    uint8_t *card, *host;
    uint64_t at[PARTS + 1];
    uint64_t o_bytes, lse_bytes, d_bytes;
    struct stk_error err;
    struct dnn_verdict *v;
};

static bool cuda_good(struct check *c, cudaError_t e, const char *call)
{
    if (e == cudaSuccess) return true;
    (void)cudaGetLastError(); /* said here */
    *c->v = (struct dnn_verdict){ call, (int)e };
    return false;
}

static struct dnn_shape small(const struct dnn_shape *like)
{
    const int64_t heads = like->heads == like->kv_heads ? KV_HEADS : 2 * KV_HEADS,
                  row = (heads + 2 * KV_HEADS) * like->head_dim;
    return (struct dnn_shape){
        SEQUENCES, SEQ, heads, KV_HEADS, like->head_dim, row, row, row, heads * like->head_dim,
        like->backward
    };
}

static void lay_out(struct check *c)
{
    const struct dnn_shape *s = &c->e.key;
    const uint64_t tokens = SEQUENCES * SEQ, o = tokens * (uint64_t)s->o_stride * DNN_BF16_BYTES,
                   qkv = tokens * (uint64_t)s->q_stride * DNN_BF16_BYTES,
                   lse = tokens * (uint64_t)s->heads * sizeof(float), made = o + lse + qkv;
    const uint64_t scratch = c->e.plan.workspace_bytes + 4 * lse + TILES_BYTES;
    const uint64_t size[PARTS] = { tokens * sizeof(int32_t), qkv, o, made, made, made, scratch };
    c->o_bytes = o;
    c->lse_bytes = lse;
    c->d_bytes = qkv;
    for (int i = 0; i < PARTS; i++)
        c->at[i + 1] = c->at[i] + (size[i] + 2 * CUDA_ALIGN_BYTES) / CUDA_ALIGN_BYTES *
                                      CUDA_ALIGN_BYTES;
}

static bool prepare(struct check *c)
{
    cudaStream_t *queue = &c->s.queue;
    void *card = NULL;
    lay_out(c);
    memcpy(c->s.base.name, "check", sizeof "check");
    c->host = sys_calloc(1, c->at[SCRATCH]);
    if (!c->host) {
        c->v->call = "calloc";
        return false;
    }
    if (!cuda_good(c, cudaMalloc(&card, c->at[PARTS]), "cudaMalloc")) return false;
    c->card = card;
    return cuda_good(c, cudaStreamCreateWithFlags(queue, cudaStreamNonBlocking),
                     "cudaStreamCreateWithFlags") &&
           cuda_good(c, cudaEventCreateWithFlags(&c->done, cudaEventDisableTiming),
                     "cudaEventCreateWithFlags");
}

static void give_back(struct check *c)
{
    if (c->done) (void)cudaEventDestroy(c->done);
    if (c->s.queue) (void)cudaStreamDestroy(c->s.queue);
    if (c->card) (void)cudaFree(c->card);
    sys_free(c->host);
    dnn_plan_free(&c->e.plan);
}

/* Evenly in [-1, 1): Marsaglia 2003, Xorshift RNGs. */
static void random_fill(uint16_t *p, uint64_t n, uint32_t x)
{
    for (uint64_t i = 0; i < n; i++) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        p[i] = stk_f32_to_bf16((float)(int32_t)x * 0x1p-31f);
    }
}

static bool fill(struct check *c)
{
    int32_t *first = (int32_t *)(void *)(c->host + c->at[KEYS]);
    for (int i = 0; i < SEQUENCES * SEQ; i++) {
        const int t = i % SEQ, document = t / DOCUMENT * DOCUMENT, window = t - WINDOW + 1;
        first[i] = document > window ? document : window;
    }
    random_fill((uint16_t *)(void *)(c->host + c->at[QKV]), c->d_bytes / DNN_BF16_BYTES, 1);
    random_fill((uint16_t *)(void *)(c->host + c->at[D_O]), c->o_bytes / DNN_BF16_BYTES, 2);
    return cuda_good(c,
                     cudaMemcpyAsync(c->card, c->host, c->at[OWN], cudaMemcpyHostToDevice,
                                     c->s.queue),
                     "cudaMemcpyAsync") &&
           cuda_good(c,
                     cudaMemsetAsync(c->card + c->at[OWN], 0, c->at[SCRATCH] - c->at[OWN],
                                     c->s.queue),
                     "cudaMemsetAsync");
}

/* Results into `to`; a backward reads o and lse of `from`. */
static struct ops_attention arguments(const struct check *c, enum part to, enum part from)
{
    const struct dnn_shape *s = &c->e.key;
    const uint64_t k = (uint64_t)(s->heads * s->head_dim) * DNN_BF16_BYTES,
                   v = k + (uint64_t)(s->kv_heads * s->head_dim) * DNN_BF16_BYTES;
    uint8_t *qkv = c->card + c->at[QKV], *o = c->card + c->at[from],
            *d = c->card + c->at[to] + c->o_bytes + c->lse_bytes;
    return (struct ops_attention){
        .n_seq = SEQUENCES,
        .seq = SEQ,
        .heads = (uint64_t)s->heads,
        .kv_heads = (uint64_t)s->kv_heads,
        .head_dim = (uint64_t)s->head_dim,
        .q_stride = (uint64_t)s->q_stride,
        .k_stride = (uint64_t)s->k_stride,
        .v_stride = (uint64_t)s->v_stride,
        .o_stride = (uint64_t)s->o_stride,
        .at = OPS_BF16,
        .scale = SCALE,
        .first_key = (const int32_t *)(const void *)(c->card + c->at[KEYS]),
        .q = qkv,
        .k = qkv + k,
        .v = qkv + v,
        .o = o,
        .lse = (float *)(void *)(o + c->o_bytes),
        .d_o = c->card + c->at[D_O],
        .dq = d,
        .dk = d + k,
        .dv = d + v,
        .scratch = { c->card + c->at[SCRATCH], c->at[PARTS] - c->at[SCRATCH] },
    };
}

static bool run_own(struct check *c)
{
    const struct ops_attention a = arguments(c, OWN, OWN);
    return cuda_good(c, cuda_attention_forward(c->s.queue, &a), "cuda_attention_forward") &&
           (!c->e.key.backward ||
            cuda_good(c, cuda_attention_backward(c->s.queue, &a), "cuda_attention_backward"));
}

static bool run_library(struct check *c, cudnnHandle_t handle, enum part to)
{
    const bool backward = c->e.key.backward;
    const struct dev_cmd cmd = {
        .kind = backward ? DEV_CMD_ATTENTION_BACKWARD : DEV_CMD_ATTENTION_FORWARD,
        .u.attention = arguments(c, to, backward ? OWN : to),
    };
    struct cuda_job j = { .h = c->h,
                          .s = &c->s,
                          .scratch = cmd.u.attention.scratch,
                          .err = &c->err,
                          .cmd = &cmd,
                          .used_bytes = CUDA_JOB_FIRST_BYTES };
    dnn_run(&j, &c->e, handle, &cmd.u.attention);
    if (j.st != STK_OK) *c->v = (struct dnn_verdict){ "launch", (int)j.st };
    return j.st == STK_OK;
}

static bool near_bf16(const uint16_t *got, const uint16_t *want, uint64_t n)
{
    float most = 0, worst = 0;
    for (uint64_t i = 0; i < n; i++) {
        const float x = stk_bf16_to_f32(got[i]), y = stk_bf16_to_f32(want[i]);
        if (!(fabsf(x - y) <= worst)) worst = fabsf(x - y);
        if (fabsf(y) > most) most = fabsf(y);
    }
    return worst <= NEAR * most;
}

static bool near_f32(const float *got, const float *want, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        if (!(fabsf(got[i] - want[i]) <= NEAR)) return false;
    return true;
}

static bool compare(const struct check *c)
{
    const uint8_t *own = c->host + c->at[OWN], *one = c->host + c->at[FIRST_RUN],
                  *two = c->host + c->at[SECOND_RUN];
    const uint64_t d = c->o_bytes + c->lse_bytes, made = d + c->d_bytes;
    if (memcmp(one, two, made) != 0) return false;
    if (c->e.key.backward)
        return near_bf16((const uint16_t *)(const void *)(one + d),
                         (const uint16_t *)(const void *)(own + d), c->d_bytes / DNN_BF16_BYTES);
    return near_bf16((const uint16_t *)(const void *)one, (const uint16_t *)(const void *)own,
                     c->o_bytes / DNN_BF16_BYTES) &&
           near_f32((const float *)(const void *)(one + c->o_bytes),
                    (const float *)(const void *)(own + c->o_bytes), c->lse_bytes / sizeof(float));
}

static bool run_all(struct check *c, cudnnHandle_t handle)
{
    if (!fill(c) || !run_own(c) || !run_library(c, handle, FIRST_RUN) ||
        !run_library(c, handle, SECOND_RUN))
        return false;
    return cuda_good(c,
                     cudaMemcpyAsync(c->host + c->at[OWN], c->card + c->at[OWN],
                                     c->at[SCRATCH] - c->at[OWN], cudaMemcpyDeviceToHost,
                                     c->s.queue),
                     "cudaMemcpyAsync") &&
           cuda_good(c, cudaEventRecord(c->done, c->s.queue), "cudaEventRecord") &&
           cuda_good(c, cudaEventSynchronize(c->done), "cudaEventSynchronize");
}

bool dnn_check(struct cuda_dev *h, const struct dnn_table *t, cudnnHandle_t handle,
               const struct dnn_shape *like, struct dnn_verdict *v)
{
    const struct dnn_card card = { .handle = handle };
    struct check *c = sys_calloc(1, sizeof *c);
    if (!c) {
        v->call = "calloc";
        return false;
    }
    c->h = h;
    c->v = v;
    c->e.key = c->e.piece = small(like);
    dnn_plan_make(&c->e.plan, t, &card, &c->e.key);
    if (c->e.plan.g.st != CUDNN_STATUS_SUCCESS)
        *v = (struct dnn_verdict){ c->e.plan.g.call, (int)c->e.plan.g.st };
    const bool right = c->e.plan.plan && prepare(c) && run_all(c, handle) && compare(c);
    give_back(c);
    sys_free(c);
    return right;
}
