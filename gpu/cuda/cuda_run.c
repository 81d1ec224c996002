/* gpu/cuda/cuda_run.c - what a command launches on the card, what it needs, and how it is named and
 * counted.
 *
 * Owns nothing. Must not know how streams tell, nor marks. cuda_run: in the stream's producer.
 * cuda_prepare: on the application's thread. */
#include "gpu/cuda/cuda_impl.h"

#include "base/mem.h"
#include <inttypes.h>
#include <stdio.h>

/* --- names ------------------------------------------------------------------------------------ */

static int text_linear(const struct ops_linear *a, char *out, size_t n)
{
    return snprintf(out, n, "%" PRIu64 " rows, %" PRIu64 " in, %" PRIu64 " out", a->rows, a->in,
                    a->out);
}

static int text_shape(const struct dev_cmd *c, char *out, size_t n)
{
    const struct ops_attention *t = &c->u.attention;
    static const char *const way[] = { "to the device", "to the host", "on the device" };
    switch (c->kind) {
    case DEV_CMD_COPY:
        return snprintf(out, n, "%" PRIu64 " bytes %s", c->u.copy.size_bytes, way[c->u.copy.dir]);
    case DEV_CMD_ZERO: return snprintf(out, n, "%" PRIu64 " bytes", c->u.zero.size_bytes);
    case DEV_CMD_LINEAR_FORWARD:
    case DEV_CMD_LINEAR_BACKWARD_DATA:
    case DEV_CMD_LINEAR_BACKWARD_WEIGHT: return text_linear(&c->u.linear, out, n);
    case DEV_CMD_EMBED_FORWARD:
    case DEV_CMD_EMBED_BACKWARD:
        return snprintf(out, n, "%" PRIu64 " tokens, %" PRIu64 " x %" PRIu64, c->u.embed.tokens,
                        c->u.embed.vocab, c->u.embed.hidden);
    case DEV_CMD_RMSNORM_FORWARD:
    case DEV_CMD_RMSNORM_BACKWARD:
        return snprintf(out, n, "%" PRIu64 " x %" PRIu64, c->u.rmsnorm.rows, c->u.rmsnorm.cols);
    case DEV_CMD_ROPE:
        return snprintf(out, n, "%" PRIu64 " tokens, %" PRIu64 " x %" PRIu64, c->u.rope.tokens,
                        c->u.rope.heads, c->u.rope.head_dim);
    case DEV_CMD_ATTENTION_FORWARD:
    case DEV_CMD_ATTENTION_BACKWARD:
        return snprintf(
            out, n, "%" PRIu64 " x %" PRIu64 " tokens, %" PRIu64 "/%" PRIu64 " heads of %" PRIu64,
            t->n_seq, t->seq, t->heads, t->kv_heads, t->head_dim);
    case DEV_CMD_SWIGLU_FORWARD:
    case DEV_CMD_SWIGLU_BACKWARD:
        return snprintf(out, n, "%" PRIu64 " x %" PRIu64, c->u.swiglu.rows, c->u.swiglu.cols);
    case DEV_CMD_HEAD_FORWARD:
    case DEV_CMD_HEAD_TRAIN:
        return snprintf(out, n, "%" PRIu64 " tokens, %" PRIu64 " x %" PRIu64, c->u.head.tokens,
                        c->u.head.vocab, c->u.head.hidden);
    case DEV_CMD_ADD: return snprintf(out, n, "%" PRIu64, c->u.add.n);
    case DEV_CMD_ACC_ADD: return snprintf(out, n, "%" PRIu64, c->u.acc_add.n);
    case DEV_CMD_GRAD_CAST: return snprintf(out, n, "%" PRIu64, c->u.grad_cast.n);
    case DEV_CMD_ADAM:
        return snprintf(out, n, "%" PRIu64 " in %u spans", c->u.adam.n, c->u.adam.n_spans);
    default: return snprintf(out, n, "-");
    }
}

const char *cuda_cmd_text(const struct dev_cmd *cmd, char out[CUDA_WHERE_BYTES])
{
    int n = snprintf(out, CUDA_WHERE_BYTES, "%s of ", dev_cmd_name(cmd->kind));
    (void)text_shape(cmd, out + n, CUDA_WHERE_BYTES - (size_t)n);
    return out;
}

/* --- scratch ---------------------------------------------------------------------------------- */

static struct ops_scratch cmd_scratch(const struct dev_cmd *cmd)
{
    switch (cmd->kind) {
    case DEV_CMD_LINEAR_FORWARD:
    case DEV_CMD_LINEAR_BACKWARD_DATA:
    case DEV_CMD_LINEAR_BACKWARD_WEIGHT: return cmd->u.linear.scratch;
    case DEV_CMD_RMSNORM_FORWARD:
    case DEV_CMD_RMSNORM_BACKWARD: return cmd->u.rmsnorm.scratch;
    case DEV_CMD_ATTENTION_FORWARD:
    case DEV_CMD_ATTENTION_BACKWARD: return cmd->u.attention.scratch;
    case DEV_CMD_HEAD_FORWARD:
    case DEV_CMD_HEAD_TRAIN: return cmd->u.head.scratch;
    default: return (struct ops_scratch){ 0 };
    }
}

/* Memory of the stream's own that operations without scratch in gpu/ops.h need; 0: none. */
static uint64_t own_need(const struct dev_cmd *cmd)
{
    switch (cmd->kind) {
    case DEV_CMD_EMBED_BACKWARD: return cuda_embed_backward_scratch(&cmd->u.embed);
    case DEV_CMD_GRAD_CAST: return cuda_grad_cast_scratch(cmd->u.grad_cast.n);
    default: return 0;
    }
}

static struct ops_scratch own_scratch(struct cuda_job *j)
{
    const struct cuda_dev *h = j->h;
    const uint64_t need = own_need(j->cmd);
    if (h->own && need <= h->own_bytes)
        return (struct ops_scratch){ h->own + j->s->own_index * h->own_bytes, h->own_bytes };
    j->st = stk_error_set(j->err, STK_ERR_DEVICE, 0,
                          "%s: needs %" PRIu64 " bytes of the stream's own memory, has %" PRIu64
                          "; run it in prepare mode before the arena is reserved",
                          dev_cmd_name(j->cmd->kind), need, h->own ? h->own_bytes : 0);
    return (struct ops_scratch){ 0 };
}

void *cuda_take(struct cuda_job *j, uint64_t size_bytes)
{
    const uint64_t start = j->used_bytes;
    j->used_bytes += (size_bytes + CUDA_ALIGN_BYTES - 1) / CUDA_ALIGN_BYTES * CUDA_ALIGN_BYTES;
    if (j->dry || j->st != STK_OK) return NULL;
    if (!j->scratch.base || j->used_bytes > j->scratch.size_bytes) {
        j->st = stk_error_set(
            j->err, STK_ERR_DEVICE, 0,
            "%s: needs %" PRIu64 " bytes of scratch and more for products, has %" PRIu64
            "; declare what prepare mode reports",
            dev_cmd_name(j->cmd->kind), j->used_bytes, j->scratch.base ? j->scratch.size_bytes : 0);
        return NULL;
    }
    const uint64_t skew = (uintptr_t)j->scratch.base % CUDA_ALIGN_BYTES;
    return (uint8_t *)j->scratch.base + start - skew;
}

void cuda_job_check(struct cuda_job *j, cudaError_t e, const char *call)
{
    char where[CUDA_WHERE_BYTES + 32], text[CUDA_WHERE_BYTES];
    if (e == cudaSuccess || j->st != STK_OK) return;
    snprintf(where, sizeof where, "stream %s: %s", j->s ? j->s->base.name : "-",
             cuda_cmd_text(j->cmd, text));
    j->st = cuda_check(e, call, where, j->err);
}

void cuda_job_cast(struct cuda_job *j, const struct cuda_cast *c)
{
    if (j->dry || j->st != STK_OK) return;
    cuda_job_check(j, cuda_cast(j->s->queue, c), "kernel launch of a cast");
}

/* --- launching -------------------------------------------------------------------------------- */

static bool has_products(enum dev_cmd_kind kind)
{
    return kind == DEV_CMD_LINEAR_FORWARD || kind == DEV_CMD_LINEAR_BACKWARD_DATA ||
           kind == DEV_CMD_LINEAR_BACKWARD_WEIGHT || kind == DEV_CMD_HEAD_FORWARD ||
           kind == DEV_CMD_HEAD_TRAIN;
}

static void run_products(struct cuda_job *j, double *loss)
{
    const struct dev_cmd *cmd = j->cmd;
    switch (cmd->kind) {
    case DEV_CMD_LINEAR_FORWARD: cuda_linear_forward(j, &cmd->u.linear); break;
    case DEV_CMD_LINEAR_BACKWARD_DATA: cuda_linear_backward_data(j, &cmd->u.linear); break;
    case DEV_CMD_LINEAR_BACKWARD_WEIGHT: cuda_linear_backward_weight(j, &cmd->u.linear); break;
    case DEV_CMD_HEAD_FORWARD: cuda_head(j, &cmd->u.head, false, loss); break;
    case DEV_CMD_HEAD_TRAIN: cuda_head(j, &cmd->u.head, true, loss); break;
    default: STK_ASSERT(!"not a command with products");
    }
}

/* By a kernel, which can go slowly; the copy engines cannot. False: not possible here, so as fast as it goes. */
static bool run_paced(struct cuda_job *j, const struct dev_cmd_copy *c, cudaError_t *e)
{
    const bool in = c->dir == DEV_TO_DEVICE;
    void *host = in ? (void *)(uintptr_t)c->src : c->dst, *mapped = NULL;
    uintptr_t all = (uintptr_t)c->dst | (uintptr_t)c->src | (uintptr_t)c->size_bytes;
    if (!(c->bytes_per_s > 0) || c->dir == DEV_ON_DEVICE || (all & 15u) || c->size_bytes == 0 ||
        !cuda_registered(j->h, host, c->size_bytes))
        return false;
    if (cudaHostGetDevicePointer(&mapped, host, 0) != cudaSuccess) {
        (void)cudaGetLastError(); /* registered without a mapping: not an error of the copy's */
        return false;
    }
    *e = cuda_copy_paced(j->s->queue, in ? c->dst : mapped, in ? mapped : c->src, c->size_bytes, c->bytes_per_s);
    return true;
}

static cudaError_t run_copy(struct cuda_job *j, const struct dev_cmd_copy *c)
{
    static const enum cudaMemcpyKind kind[] = { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost,
                                                cudaMemcpyDeviceToDevice };
    const void *host = c->dir == DEV_TO_HOST ? c->dst : c->src;
    cudaError_t e;
    if (run_paced(j, c, &e)) return e;
    if (c->dir != DEV_ON_DEVICE && !cuda_registered(j->h, host, c->size_bytes))
        cuda_count(j->h, CUDA_WORK_PAGEABLE, 0, (double)c->size_bytes);
    return cudaMemcpyAsync(c->dst, c->src, c->size_bytes, kind[c->dir], j->s->queue);
}

static cudaError_t run_own(struct cuda_job *j, union cuda_result *result)
{
    const struct ops_scratch own = own_scratch(j);
    if (j->st != STK_OK) return cudaSuccess;
    return j->cmd->kind == DEV_CMD_GRAD_CAST
               ? cuda_grad_cast(j->s->queue, &j->cmd->u.grad_cast, &result->sum, &own)
               : cuda_embed_backward(j->s->queue, &j->cmd->u.embed, &own);
}

static void *bytes_on(void *p, uint64_t bytes) { return p ? (uint8_t *)p + bytes : NULL; }

/* A launch a span: neighbouring tensors with equal coefficients are one, so there are few. */
static cudaError_t run_adam(cudaStream_t q, const struct ops_adam *a)
{
    static const enum cuda_adam_layout layout[OPS_ADAM_LAYOUT_N] = { CUDA_ADAM_BF16_SPLIT,
                                                                    CUDA_ADAM_FP16, CUDA_ADAM_F32 };
    const uint64_t word = ops_adam_word_bytes(a->layout), first = a->layout == OPS_ADAM_FP16 ? 4 : 2;
    cudaError_t e = cudaSuccess;
    for (uint32_t i = 0; e == cudaSuccess && i < a->n_spans; i++) {
        const struct ops_adam_span *x = &a->spans[i];
        const struct ops_adam_coef *f = &x->coef;
        const struct cuda_adam k = {
            .n = x->n,
            .layout = layout[a->layout],
            .coef = { f->grad_scale, f->beta1, f->one_minus_beta1, f->beta2, f->one_minus_beta2,
                      f->eps, f->step_size, f->inv_sqrt_bc2, f->decay, f->l2 },
            .param = bytes_on(a->param, word * x->first),
            .low_or_master = bytes_on(a->low_or_master, first * x->first),
            .exp_avg = a->exp_avg + x->first,
            .exp_avg_sq = a->exp_avg_sq + x->first,
            .grad = (const uint8_t *)a->grad + word * x->first,
        };
        e = cuda_adam(q, &k);
    }
    return e;
}

static cudaError_t run_kernel(struct cuda_job *j, union cuda_result *result)
{
    const struct dev_cmd *c = j->cmd;
    cudaStream_t q = j->s->queue;
    switch (c->kind) {
    case DEV_CMD_COPY: return run_copy(j, &c->u.copy);
    case DEV_CMD_ZERO: return cudaMemsetAsync(c->u.zero.dst, 0, c->u.zero.size_bytes, q);
    case DEV_CMD_EMBED_FORWARD: return cuda_embed_forward(q, &c->u.embed);
    case DEV_CMD_EMBED_BACKWARD:
    case DEV_CMD_GRAD_CAST: return run_own(j, result);
    case DEV_CMD_RMSNORM_FORWARD: return cuda_rmsnorm_forward(q, &c->u.rmsnorm);
    case DEV_CMD_RMSNORM_BACKWARD: return cuda_rmsnorm_backward(q, &c->u.rmsnorm);
    case DEV_CMD_ROPE: return cuda_rope(q, &c->u.rope);
    case DEV_CMD_SWIGLU_FORWARD: return cuda_swiglu_forward(q, &c->u.swiglu);
    case DEV_CMD_SWIGLU_BACKWARD: return cuda_swiglu_backward(q, &c->u.swiglu);
    case DEV_CMD_ADAM: return run_adam(q, &c->u.adam);
    case DEV_CMD_ADD:
        return cuda_add(q, c->u.add.at, c->u.add.n, c->u.add.a, c->u.add.b, c->u.add.y);
    case DEV_CMD_ACC_ADD:
        return cuda_acc_add(q, c->u.acc_add.n, c->u.acc_add.acc, c->u.acc_add.src, c->u.acc_add.st);
    default: STK_ASSERT(!"not a command that computes");
    }
    return cudaSuccess;
}

static bool is_attention(enum dev_cmd_kind kind)
{
    return kind == DEV_CMD_ATTENTION_FORWARD || kind == DEV_CMD_ATTENTION_BACKWARD;
}

/* Scratch of norms, which take it as it is. */
static uint64_t norm_need(const struct dev_cmd *cmd)
{
    if (cmd->kind != DEV_CMD_RMSNORM_FORWARD && cmd->kind != DEV_CMD_RMSNORM_BACKWARD) return 0;
    return cuda_rmsnorm_scratch(&cmd->u.rmsnorm, cmd->kind == DEV_CMD_RMSNORM_BACKWARD);
}

static void run_cmd(struct cuda_job *j, union cuda_result *result)
{
    const struct dev_cmd *cmd = j->cmd;
    const uint64_t need = norm_need(cmd);
    if (has_products(cmd->kind)) {
        run_products(j, result ? &result->loss : NULL);
    } else if (is_attention(cmd->kind)) {
        cuda_attention(j, &cmd->u.attention, cmd->kind == DEV_CMD_ATTENTION_BACKWARD);
    } else if (need > j->scratch.size_bytes || (need && !j->scratch.base)) {
        j->used_bytes = 0;
        (void)cuda_take(j, need); /* says how much is missing */
    } else {
        cuda_job_check(j, run_kernel(j, result),
                       cmd->kind == DEV_CMD_COPY   ? "cudaMemcpyAsync"
                       : cmd->kind == DEV_CMD_ZERO ? "cudaMemsetAsync"
                                                   : "kernel launch");
    }
}

/* Who gets the result when the command is done. */
static void slot_fill(struct cuda_slot *slot, const struct dev_cmd *cmd)
{
    if (cmd->kind == DEV_CMD_HEAD_FORWARD || cmd->kind == DEV_CMD_HEAD_TRAIN) {
        slot->kind = CUDA_SLOT_LOSS;
        slot->u.loss_sum = cmd->u.head.loss_sum;
    } else if (cmd->kind == DEV_CMD_GRAD_CAST) {
        slot->kind = CUDA_SLOT_SUM;
        slot->u.sum = cmd->u.grad_cast.sum;
    }
}

stk_status cuda_run(struct cuda_stream *s, const struct dev_cmd *cmd, struct cuda_slot *slot,
                    union cuda_result *result_dev, struct stk_error *err)
{
    struct cuda_dev *h = cuda_stream_dev(s);
    struct cuda_job j = { .h = h,
                          .s = s,
                          .scratch = cmd_scratch(cmd),
                          .err = err,
                          .cmd = cmd,
                          .used_bytes = CUDA_JOB_FIRST_BYTES };
    run_cmd(&j, result_dev);
    if (j.st != STK_OK) return j.st;
    slot_fill(slot, cmd);
    /* The FLOPs of products are in their own row. */
    cuda_count(h, cmd->kind, has_products(cmd->kind) ? 0 : dev_cmd_flops(cmd), dev_cmd_bytes(cmd));
    return STK_OK;
}

/* --- preparing -------------------------------------------------------------------------------- */

static stk_status prepare_own(struct cuda_dev *h, const struct dev_cmd *cmd, struct stk_error *err)
{
    const uint64_t need = own_need(cmd);
    if (need <= h->own_bytes) return STK_OK;
    if (h->arena)
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "%s: needs %" PRIu64
                             " bytes of the stream's own memory, which is reserved "
                             "with the arena: prepare it before",
                             dev_cmd_name(cmd->kind), need);
    h->own_bytes = (need + CUDA_ALIGN_BYTES - 1) / CUDA_ALIGN_BYTES * CUDA_ALIGN_BYTES;
    return cuda_memory_look(h, err);
}

stk_status cuda_prepare(struct dev *d, const struct dev_cmd *cmd, uint64_t *scratch_bytes,
                        struct stk_error *err)
{
    struct cuda_dev *h = cuda_of(d);
    struct cuda_job j = {
        .h = h, .dry = true, .err = err, .cmd = cmd, .used_bytes = CUDA_JOB_FIRST_BYTES
    };
    *scratch_bytes = norm_need(cmd);
    STK_TRY(prepare_own(h, cmd, err));
    if (!has_products(cmd->kind) && !is_attention(cmd->kind)) return STK_OK;
    run_cmd(&j, NULL);
    *scratch_bytes = j.used_bytes + j.pad_bytes;
    STK_TRY(j.st);
    STK_TRY(cuda_memory_look(h, err));
    cuda_numerics_write(h);
    return STK_OK;
}

/* --- counting --------------------------------------------------------------------------------- */

/* Times come later, from events (cuda_clock.c). */
void cuda_count(struct cuda_dev *h, uint32_t row, double flops, double bytes)
{
    dev_tally_add(&h->work[row], 0, flops, bytes);
}

uint32_t cuda_work_read(const struct dev *d, struct dev_work out[DEV_WORK_MAX])
{
    const struct cuda_dev *h = (const struct cuda_dev *)d;
    uint32_t n = 0;
    _Static_assert(CUDA_WORK_N <= DEV_WORK_MAX, "every kind has a row");
    n += dev_tally_row(&h->work[CUDA_WORK_PRODUCT], "product", &out[n]);
    for (uint32_t k = 0; k < DEV_CMD_N; k++)
        n += dev_tally_row(&h->work[k], dev_cmd_name((enum dev_cmd_kind)k), &out[n]);
    n += dev_tally_row(&h->work[CUDA_WORK_PAGEABLE], "copy_pageable", &out[n]);
    return n;
}
