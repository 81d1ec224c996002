/* gpu/cuda/cuda_dnn_run.c - one attention by a plan of cuDNN's: its scratch, pieces, launches.
 *
 * Owns nothing. Must not know which shapes have plans. Under cuda_dnn.c's lock: in prepare mode on
 * the application's thread, else in the stream's producer.
 *
 * WHAT IS CONVERTED. cuDNN's log-sum-exp lies head by head ([n_seq][heads][seq]; other layouts are
 * wrong before 9.26), that of gpu/ops.h token by token: a kernel of ours turns it. And for each key
 * it is told the first query that sees it no more, which another kernel finds from first_key. */
#include "gpu/cuda/cuda_dnn.h"

#include <math.h>

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
        if ((uintptr_t)p[i] % (DNN_VECTOR_ELEMENTS * DNN_BF16_BYTES)) return false;
    return true;
}

static void *past(const void *p, int64_t elements)
{
    return (uint8_t *)(uintptr_t)p + elements * DNN_BF16_BYTES;
}

/* Where a piece begins. */
struct dnn_begin {
    int64_t token, head, kv_head;
};

static void run_plan(struct cuda_job *j, const struct dnn_entry *e, cudnnHandle_t handle,
                     const struct ops_attention *a, const struct dnn_scratch *c,
                     const struct dnn_begin *b)
{
    const struct dnn_table *t = e->plan.g.t;
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
    cudnnStatus_t st = t->cudnnSetStream(handle, j->s->queue);
    if (st == CUDNN_STATUS_SUCCESS)
        st = dnn_plan_run(&e->plan, handle, memory, c->workspace, &call);
    if (st == CUDNN_STATUS_SUCCESS) return;
    char text[CUDA_WHERE_BYTES];
    j->st = stk_error_set(j->err, STK_ERR_DEVICE, 0,
                          "device cuda: %s failed with status %d (%s) (stream %s: %s); it may be "
                          "the first to tell of work queued earlier",
                          call, (int)st, t->cudnnGetErrorString(st), j->s->base.name,
                          cuda_cmd_text(j->cmd, text));
}

/* The piece that begins with a sequence and a key head; those of one sequence follow one another,
 * and have the same ends. */
static void run_piece(struct cuda_job *j, const struct dnn_entry *e, cudnnHandle_t handle,
                      const struct ops_attention *a, const struct dnn_scratch *c, int64_t seq,
                      int64_t kv_head)
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
    if (j->st == STK_OK) run_plan(j, e, handle, a, c, &b);
    if (!s->backward && j->st == STK_OK)
        cuda_job_check(j, cuda_attention_stats(j->s->queue, &stats), "kernel launch");
}

void dnn_run(struct cuda_job *j, const struct dnn_entry *e, cudnnHandle_t handle,
             const struct ops_attention *a)
{
    const struct dnn_shape *s = &e->key, *p = &e->piece;
    const struct dnn_scratch c = take(j, e);
    if (j->dry) return;
    if (j->st == STK_OK && !aligned(a, s->backward))
        j->st = stk_error_set(j->err, STK_ERR_DEVICE, 0,
                              "%s: q, k, v, o and their gradients must begin at multiples of 16 "
                              "bytes",
                              dev_cmd_name(j->cmd->kind));
    for (int64_t seq = 0; seq < s->n_seq; seq += p->n_seq)
        for (int64_t kv = 0; kv < s->kv_heads && j->st == STK_OK; kv += p->kv_heads)
            run_piece(j, e, handle, a, &c, seq, kv);
}
