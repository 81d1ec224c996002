/* gpu/spans.c - where the operands of a command lie, what follows for a device with a memory of its
 * own, and what a command costs.
 *
 * Owns the list of operands per command (the only place that knows it beside the kernels
 * themselves), the check against an arena's bounds, FLOPs and bytes of a command. Pure. For every
 * backend; must not know any of them. Runs wherever a backend does: on stream lanes (host), in the
 * caller of an operation (cuda). */
#include "gpu/device_impl.h"

struct span_list {
    struct dev_span *out;
    uint32_t n;
};

static void span_put(struct span_list *l, const char *name, const void *p, uint64_t size_bytes,
                     enum dev_side side)
{
    if (!p || size_bytes == 0) return;
    STK_ASSERT(l->n < DEV_SPANS_MAX);
    l->out[l->n++] = (struct dev_span){ name, p, size_bytes, side };
}

static void span_dev(struct span_list *l, const char *name, const void *p, uint64_t size_bytes)
{
    span_put(l, name, p, size_bytes, DEV_SIDE_DEVICE);
}

static void span_scratch(struct span_list *l, struct ops_scratch s)
{
    span_put(l, "scratch", s.base, s.size_bytes, DEV_SIDE_SCRATCH);
}

/* Bytes of `rows` rows of `cols` elements, `stride` apart. */
static uint64_t strided(uint64_t rows, uint64_t stride, uint64_t cols, enum ops_dtype t)
{
    return ((rows - 1) * stride + cols) * ops_dtype_bytes(t);
}

static void spans_linear(struct span_list *l, enum dev_cmd_kind kind, const struct ops_linear *a)
{
    uint64_t x = a->rows * a->in * ops_dtype_bytes(ops_wide(a->at, a->x_wide)),
             y = a->rows * a->out * ops_dtype_bytes(ops_wide(a->at, a->y_wide));
    uint64_t base_elem = a->add ? ops_dtype_bytes(ops_wide(a->at, a->base_wide)) : 0;
    uint64_t w = a->out * a->in * ops_dtype_bytes(a->pt);
    switch (kind) {
    case DEV_CMD_LINEAR_FORWARD:
        span_dev(l, "x", a->x, x);
        span_dev(l, "w", a->w, w);
        span_dev(l, "bias", a->bias, a->out * ops_dtype_bytes(a->pt));
        span_dev(l, "base", a->base, a->rows * a->out * base_elem);
        span_dev(l, "y", a->y, y);
        break;
    case DEV_CMD_LINEAR_BACKWARD_DATA:
        span_dev(l, "dy", a->dy, y);
        span_dev(l, "w", a->w, w);
        span_dev(l, "base", a->base, a->rows * a->in * base_elem);
        span_dev(l, "dx", a->dx, x);
        break;
    default:
        span_dev(l, "dy", a->dy, y);
        if (a->dw) span_dev(l, "x", a->x, x);
        span_dev(l, "dw", a->dw, a->out * a->in * 4);
        span_dev(l, "dbias", a->dbias, a->out * 4);
    }
    span_scratch(l, a->scratch);
}

static void spans_embed(struct span_list *l, enum dev_cmd_kind kind, const struct ops_embed *a)
{
    uint64_t y = a->tokens * a->hidden * ops_dtype_bytes(a->at);
    span_dev(l, "ids", a->ids, a->tokens * 4);
    if (kind == DEV_CMD_EMBED_FORWARD) {
        span_dev(l, "table", a->table, a->vocab * a->hidden * ops_dtype_bytes(a->pt));
        span_dev(l, "y", a->y, y);
    } else {
        span_dev(l, "dy", a->dy, y);
        span_dev(l, "dtable", a->dtable, a->vocab * a->hidden * 4);
    }
}

static void spans_rmsnorm(struct span_list *l, enum dev_cmd_kind kind, const struct ops_rmsnorm *a)
{
    uint64_t groups = a->rows / a->group, cols = a->group * a->cols;
    uint64_t x = strided(groups, a->x_stride, cols, ops_wide(a->at, a->x_wide)),
             dx = strided(groups, a->x_stride, cols, ops_wide(a->at, a->dx_wide)),
             y = strided(groups, a->y_stride, cols, ops_wide(a->at, a->y_wide));
    span_dev(l, "x", a->x, x);
    span_dev(l, "w", a->w, a->cols * ops_dtype_bytes(a->pt));
    span_dev(l, "rstd", a->rstd, a->rows * 4);
    if (kind == DEV_CMD_RMSNORM_FORWARD) {
        span_dev(l, "y", a->y, y);
    } else {
        span_dev(l, "dy", a->dy, y);
        span_dev(l, "dx", a->dx, dx);
        span_dev(l, "dw", a->dw, a->cols * 4);
    }
    span_scratch(l, a->scratch);
}

static void spans_rope(struct span_list *l, const struct ops_rope *a)
{
    const enum ops_dtype in = ops_wide(a->at, a->in_wide);
    span_dev(l, "q", a->q, strided(a->tokens, a->q_stride, a->heads * a->head_dim, a->at));
    span_dev(l, "k", a->k, strided(a->tokens, a->k_stride, a->kv_heads * a->head_dim, a->at));
    span_dev(l, "q_in", a->q_in, strided(a->tokens, a->q_stride, a->heads * a->head_dim, in));
    span_dev(l, "k_in", a->k_in, strided(a->tokens, a->k_stride, a->kv_heads * a->head_dim, in));
    if (a->v) {
        span_dev(l, "v", a->v, strided(a->tokens, a->v_stride, a->v_cols, a->at));
        span_dev(l, "v_in", a->v_in, strided(a->tokens, a->v_stride, a->v_cols, in));
    }
    span_dev(l, "pos", a->pos, a->tokens * 4);
    span_dev(l, "inv_freq", a->inv_freq, a->head_dim / 2 * 4);
}

static void spans_attention(struct span_list *l, enum dev_cmd_kind kind,
                            const struct ops_attention *a)
{
    uint64_t tokens = a->n_seq * a->seq;
    uint64_t q = strided(tokens, a->q_stride, a->heads * a->head_dim, a->at);
    uint64_t k = strided(tokens, a->k_stride, a->kv_heads * a->head_dim, a->at);
    uint64_t v = strided(tokens, a->v_stride, a->kv_heads * a->head_dim, a->at);
    uint64_t o = strided(tokens, a->o_stride, a->heads * a->head_dim, a->at);
    span_dev(l, "first_key", a->first_key, tokens * 4);
    span_dev(l, "q", a->q, q);
    span_dev(l, "k", a->k, k);
    span_dev(l, "v", a->v, v);
    span_dev(l, "o", a->o, o);
    span_dev(l, "lse", a->lse, tokens * a->heads * 4);
    if (kind == DEV_CMD_ATTENTION_BACKWARD) {
        const uint64_t times =
            ops_dtype_bytes(ops_wide(a->at, a->grad_wide)) / ops_dtype_bytes(a->at);
        span_dev(l, "d_o", a->d_o, o * times);
        span_dev(l, "dq", a->dq, q * times);
        span_dev(l, "dk", a->dk, k * times);
        span_dev(l, "dv", a->dv, v * times);
    }
    span_scratch(l, a->scratch);
}

static void spans_swiglu(struct span_list *l, enum dev_cmd_kind kind, const struct ops_swiglu *a)
{
    uint64_t g = strided(a->rows, a->g_stride, a->cols, a->at),
             u = strided(a->rows, a->u_stride, a->cols, a->at);
    uint64_t y = strided(a->rows, a->y_stride, a->cols, ops_wide(a->at, a->y_wide));
    span_dev(l, "gate", a->gate, g);
    span_dev(l, "up", a->up, u);
    if (kind == DEV_CMD_SWIGLU_FORWARD || a->y) span_dev(l, "y", a->y, y);
    if (kind != DEV_CMD_SWIGLU_FORWARD) {
        span_dev(l, "dy", a->dy, y);
        span_dev(l, "dgate", a->dgate, g);
        span_dev(l, "dup", a->dup, u);
    }
}

static void spans_head(struct span_list *l, enum dev_cmd_kind kind, const struct ops_head *a)
{
    uint64_t x = a->tokens * a->hidden * ops_dtype_bytes(a->at);
    span_dev(l, "x", a->x, x);
    span_dev(l, "w", a->w, a->vocab * a->hidden * ops_dtype_bytes(a->pt));
    span_dev(l, "targets", a->targets, a->tokens * 4);
    span_put(l, "loss_sum", a->loss_sum, sizeof *a->loss_sum, DEV_SIDE_HOST);
    if (kind == DEV_CMD_HEAD_FORWARD) {
        span_dev(l, "logits", a->logits, a->tokens * a->vocab * 4);
    } else {
        span_dev(l, "dx", a->dx,
                 a->tokens * a->hidden * ops_dtype_bytes(ops_wide(a->at, a->dx_wide)));
        span_dev(l, "dw", a->dw, a->vocab * a->hidden * 4);
    }
    span_scratch(l, a->scratch);
}

static void spans_copy(struct span_list *l, const struct dev_cmd_copy *c)
{
    span_put(l, "destination", c->dst, c->size_bytes,
             c->dir == DEV_TO_HOST ? DEV_SIDE_HOST : DEV_SIDE_DEVICE);
    span_put(l, "source", c->src, c->size_bytes,
             c->dir == DEV_TO_DEVICE ? DEV_SIDE_HOST : DEV_SIDE_DEVICE);
}

static void spans_add(struct span_list *l, const struct dev_cmd_add *a)
{
    uint64_t size_bytes = a->n * ops_dtype_bytes(a->at);
    span_dev(l, "a", a->a, size_bytes);
    span_dev(l, "b", a->b, size_bytes);
    span_dev(l, "y", a->y, size_bytes);
}

static void spans_grad_cast(struct span_list *l, const struct ops_grad_cast *a)
{
    span_dev(l, "acc", a->acc, a->n * 4);
    span_dev(l, "out", a->out, a->n * 2);
    span_put(l, "sum", a->sum, sizeof *a->sum, DEV_SIDE_HOST);
}

static void spans_adam(struct span_list *l, const struct ops_adam *a)
{
    const uint64_t word = ops_adam_word_bytes(a->layout);
    span_dev(l, "param", a->param, a->n * word);
    if (a->layout != OPS_ADAM_F32)
        span_dev(l, "low_or_master", a->low_or_master, a->n * (a->layout == OPS_ADAM_FP16 ? 4 : 2));
    span_dev(l, "exp_avg", a->exp_avg, a->n * 4);
    span_dev(l, "exp_avg_sq", a->exp_avg_sq, a->n * 4);
    span_dev(l, "grad", a->grad, a->n * word);
    span_put(l, "spans", a->spans, a->n_spans * sizeof *a->spans, DEV_SIDE_HOST);
}

uint32_t dev_spans(const struct dev_cmd *cmd, struct dev_span *out)
{
    struct span_list l = { out, 0 };
    switch (cmd->kind) {
    case DEV_CMD_COPY: spans_copy(&l, &cmd->u.copy); break;
    case DEV_CMD_ZERO: span_dev(&l, "destination", cmd->u.zero.dst, cmd->u.zero.size_bytes); break;
    case DEV_CMD_LINEAR_FORWARD:
    case DEV_CMD_LINEAR_BACKWARD_DATA:
    case DEV_CMD_LINEAR_BACKWARD_WEIGHT: spans_linear(&l, cmd->kind, &cmd->u.linear); break;
    case DEV_CMD_EMBED_FORWARD:
    case DEV_CMD_EMBED_BACKWARD: spans_embed(&l, cmd->kind, &cmd->u.embed); break;
    case DEV_CMD_RMSNORM_FORWARD:
    case DEV_CMD_RMSNORM_BACKWARD: spans_rmsnorm(&l, cmd->kind, &cmd->u.rmsnorm); break;
    case DEV_CMD_ROPE: spans_rope(&l, &cmd->u.rope); break;
    case DEV_CMD_ATTENTION_FORWARD:
    case DEV_CMD_ATTENTION_BACKWARD: spans_attention(&l, cmd->kind, &cmd->u.attention); break;
    case DEV_CMD_SWIGLU_FORWARD:
    case DEV_CMD_SWIGLU_BACKWARD: spans_swiglu(&l, cmd->kind, &cmd->u.swiglu); break;
    case DEV_CMD_HEAD_FORWARD:
    case DEV_CMD_HEAD_TRAIN: spans_head(&l, cmd->kind, &cmd->u.head); break;
    case DEV_CMD_ADD: spans_add(&l, &cmd->u.add); break;
    case DEV_CMD_GRAD_CAST: spans_grad_cast(&l, &cmd->u.grad_cast); break;
    case DEV_CMD_ADAM: spans_adam(&l, &cmd->u.adam); break;
    case DEV_CMD_ACC_ADD:
        span_dev(&l, "acc", cmd->u.acc_add.acc, cmd->u.acc_add.n * 4);
        span_dev(&l, "src", cmd->u.acc_add.src,
                 cmd->u.acc_add.n * ops_dtype_bytes(cmd->u.acc_add.st));
        break;
    default: break; /* notifications and marks touch no buffer */
    }
    return l.n;
}

/* --- a memory of its own ---------------------------------------------------------------------- */

stk_status dev_check_spans(const void *arena, uint64_t arena_bytes, const struct dev_cmd *cmd,
                           struct stk_error *err)
{
    struct dev_span spans[DEV_SPANS_MAX];
    uint32_t n = dev_spans(cmd, spans);
    uintptr_t begin = (uintptr_t)arena, end = begin + arena_bytes;
    for (uint32_t i = 0; i < n; i++) {
        uintptr_t at = (uintptr_t)spans[i].p;
        bool inside = at >= begin && at < end && spans[i].size_bytes <= end - at;
        bool outside = at >= end || (at < begin && spans[i].size_bytes <= begin - at);
        bool right = spans[i].side == DEV_SIDE_HOST ? outside : inside;
        if (right) continue;
        return stk_error_set(
            err, STK_ERR_DEVICE, 0,
            "%s: operand %s (%llu bytes at %p) %s the device's arena (%llu bytes at %p); %s",
            dev_cmd_name(cmd->kind), spans[i].name, (unsigned long long)spans[i].size_bytes,
            spans[i].p,
            spans[i].side == DEV_SIDE_HOST ? "must lie outside of" : "does not lie inside",
            (unsigned long long)arena_bytes, arena,
            spans[i].side == DEV_SIDE_HOST ? "give host memory" : "copy it to the device first");
    }
    return STK_OK;
}

/* --- what a command costs --------------------------------------------------------------------- */

static double flops_attention(const struct ops_attention *a)
{
    /* Two products of [seq, head_dim] x [head_dim, seq] per head, half of it masked; the backward
     * has five. */
    return 2.0 * (double)a->n_seq * (double)a->heads * (double)a->seq * (double)a->seq *
           (double)a->head_dim / 2;
}

double dev_cmd_flops(const struct dev_cmd *cmd)
{
    const struct ops_linear *l = &cmd->u.linear;
    const struct ops_head *h = &cmd->u.head;
    switch (cmd->kind) {
    case DEV_CMD_LINEAR_FORWARD:
    case DEV_CMD_LINEAR_BACKWARD_DATA:
    case DEV_CMD_LINEAR_BACKWARD_WEIGHT:
        return 2.0 * (double)l->rows * (double)l->in * (double)l->out;
    case DEV_CMD_ATTENTION_FORWARD: return 2 * flops_attention(&cmd->u.attention);
    case DEV_CMD_ATTENTION_BACKWARD: return 5 * flops_attention(&cmd->u.attention);
    case DEV_CMD_HEAD_FORWARD:
        return 2.0 * (double)h->tokens * (double)h->hidden * (double)h->vocab;
    case DEV_CMD_HEAD_TRAIN: return 6.0 * (double)h->tokens * (double)h->hidden * (double)h->vocab;
    default: return 0; /* bound by memory */
    }
}

double dev_cmd_bytes(const struct dev_cmd *cmd)
{
    if (cmd->kind == DEV_CMD_EMBED_FORWARD || cmd->kind == DEV_CMD_EMBED_BACKWARD)
        return 8.0 * (double)cmd->u.embed.tokens *
               (double)cmd->u.embed.hidden; /* touches few rows of its table */
    struct dev_span spans[DEV_SPANS_MAX];
    uint32_t n = dev_spans(cmd, spans);
    double bytes = 0;
    for (uint32_t i = 0; i < n; i++)
        if (spans[i].side == DEV_SIDE_DEVICE) bytes += (double)spans[i].size_bytes;
    return bytes;
}
