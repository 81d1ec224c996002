/* gpu/ops.c - the front of the operations: checks shapes, types and presence of buffers, then hands
 * a copy of the arguments on.
 *
 * Owns the refusals of impossible shapes (STK_ERR_CONFIG). Must not know how an operation is
 * computed. Called from the application's thread and from lanes; never blocks but on a full queue.
 */
#include "gpu/device_impl.h"

/* Below this, products of two extents and byte counts cannot overflow 64 bits, and an extent fits
 * the libraries' integers. */
#define OPS_EXTENT_MAX ((uint64_t)1 << 31)
#define OPS_ELEMENTS_MAX ((uint64_t)1 << 48)

struct ops_check {
    const char *op;
    bool preparing;
    struct stk_error *err;
    stk_status st; /* first refusal */
};

static struct ops_check ops_check_begin(const struct dev_stream *s, enum dev_cmd_kind kind,
                                        struct stk_error *err)
{
    return (struct ops_check){ .op = dev_cmd_name(kind),
                               .preparing = dev_preparing(dev_of(s)),
                               .err = err };
}

static void ops_need_extent(struct ops_check *c, const char *what, uint64_t n)
{
    if (c->st != STK_OK || (n > 0 && n < OPS_EXTENT_MAX)) return;
    c->st = stk_error_set(c->err, STK_ERR_CONFIG, 0,
                          "%s: %s is %llu, must be at least 1 and below 2^31", c->op, what,
                          (unsigned long long)n);
}

static void ops_need_elements(struct ops_check *c, const char *what, uint64_t a, uint64_t b)
{
    if (c->st != STK_OK || a <= OPS_ELEMENTS_MAX / b) return;
    c->st =
        stk_error_set(c->err, STK_ERR_CONFIG, 0, "%s: %s has %llu x %llu elements, more than 2^48",
                      c->op, what, (unsigned long long)a, (unsigned long long)b);
}

static void ops_need(struct ops_check *c, bool cond, const char *expected)
{
    if (c->st != STK_OK || cond) return;
    c->st = stk_error_set(c->err, STK_ERR_CONFIG, 0, "%s: %s", c->op, expected);
}

static void ops_need_buffer(struct ops_check *c, const char *what, const void *p)
{
    if (c->st != STK_OK || p || c->preparing) return;
    c->st = stk_error_set(c->err, STK_ERR_CONFIG, 0,
                          "%s: buffer %s is missing (NULL is for prepare mode only)", c->op, what);
}

static void ops_need_activation(struct ops_check *c, enum ops_dtype at)
{
    ops_need(c, at == OPS_F32 || at == OPS_BF16, "activations must be f32 or bf16");
}

static void ops_need_parameter(struct ops_check *c, enum ops_dtype pt)
{
    ops_need(c, pt == OPS_BF16 || pt == OPS_FP16, "parameters must be bf16 or fp16");
}

static stk_status ops_submit(struct dev_stream *s, const struct ops_check *c,
                             const struct dev_cmd *cmd)
{
    return c->st != STK_OK ? c->st : dev_submit(s, cmd, c->err);
}

/* --- linear ----------------------------------------------------------------------------------- */

static void ops_check_linear(struct ops_check *c, const struct ops_linear *a)
{
    ops_need_extent(c, "rows", a->rows);
    ops_need_extent(c, "in", a->in);
    ops_need_extent(c, "out", a->out);
    ops_need_activation(c, a->at);
    ops_need_parameter(c, a->pt);
    if (c->st != STK_OK) return;
    ops_need_elements(c, "x", a->rows, a->in);
    ops_need_elements(c, "y", a->rows, a->out);
    ops_need_elements(c, "w", a->out, a->in);
}

stk_status ops_linear_forward(struct dev_stream *s, const struct ops_linear *a,
                              struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_LINEAR_FORWARD, .u.linear = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_linear(&c, a);
    ops_need_buffer(&c, "x", a->x);
    ops_need_buffer(&c, "w", a->w);
    ops_need_buffer(&c, "y", a->y);
    return ops_submit(s, &c, &cmd);
}

stk_status ops_linear_backward_data(struct dev_stream *s, const struct ops_linear *a,
                                    struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_LINEAR_BACKWARD_DATA, .u.linear = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_linear(&c, a);
    ops_need_buffer(&c, "dy", a->dy);
    ops_need_buffer(&c, "w", a->w);
    ops_need_buffer(&c, "dx", a->dx);
    return ops_submit(s, &c, &cmd);
}

/* With dw and dbias both NULL (all frozen) there is nothing to do; prepare mode cannot tell, since
 * its pointers may be NULL, and prepares both. */
stk_status ops_linear_backward_weight(struct dev_stream *s, const struct ops_linear *a,
                                      struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_LINEAR_BACKWARD_WEIGHT, .u.linear = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_linear(&c, a);
    ops_need_buffer(&c, "dy", a->dy);
    if (a->dw) ops_need_buffer(&c, "x", a->x);
    if (c.st == STK_OK && !c.preparing && !a->dw && !a->dbias) return STK_OK;
    return ops_submit(s, &c, &cmd);
}

/* --- embedding -------------------------------------------------------------------------------- */

static void ops_check_embed(struct ops_check *c, const struct ops_embed *a)
{
    ops_need_extent(c, "tokens", a->tokens);
    ops_need_extent(c, "vocab", a->vocab);
    ops_need_extent(c, "hidden", a->hidden);
    ops_need_activation(c, a->at);
    ops_need_buffer(c, "ids", a->ids);
}

stk_status ops_embed_forward(struct dev_stream *s, const struct ops_embed *a, struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_EMBED_FORWARD, .u.embed = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_embed(&c, a);
    ops_need_parameter(&c, a->pt);
    ops_need_buffer(&c, "table", a->table);
    ops_need_buffer(&c, "y", a->y);
    return ops_submit(s, &c, &cmd);
}

stk_status ops_embed_backward(struct dev_stream *s, const struct ops_embed *a,
                              struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_EMBED_BACKWARD, .u.embed = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_embed(&c, a);
    ops_need_buffer(&c, "dy", a->dy);
    ops_need_buffer(&c, "dtable", a->dtable);
    return ops_submit(s, &c, &cmd);
}

/* --- norm, rotary ----------------------------------------------------------------------------- */

static void ops_check_rmsnorm(struct ops_check *c, const struct ops_rmsnorm *a)
{
    ops_need_extent(c, "rows", a->rows);
    ops_need_extent(c, "cols", a->cols);
    ops_need_extent(c, "group", a->group);
    ops_need_activation(c, a->at);
    ops_need_parameter(c, a->pt);
    if (c->st != STK_OK) return;
    ops_need(c, a->rows % a->group == 0, "rows must be a multiple of group");
    ops_need(c, a->group <= a->x_stride / a->cols && a->group <= a->y_stride / a->cols,
             "x_stride and y_stride must hold group x cols elements");
    ops_need_extent(c, "x_stride", a->x_stride);
    ops_need_extent(c, "y_stride", a->y_stride);
    ops_need(c, a->eps >= 0, "eps must not be negative");
    ops_need_buffer(c, "x", a->x);
    ops_need_buffer(c, "w", a->w);
    ops_need_buffer(c, "rstd", a->rstd);
}

stk_status ops_rmsnorm_forward(struct dev_stream *s, const struct ops_rmsnorm *a,
                               struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_RMSNORM_FORWARD, .u.rmsnorm = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_rmsnorm(&c, a);
    ops_need_buffer(&c, "y", a->y);
    return ops_submit(s, &c, &cmd);
}

stk_status ops_rmsnorm_backward(struct dev_stream *s, const struct ops_rmsnorm *a,
                                struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_RMSNORM_BACKWARD, .u.rmsnorm = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_rmsnorm(&c, a);
    ops_need_buffer(&c, "dy", a->dy);
    ops_need_buffer(&c, "dx", a->dx);
    return ops_submit(s, &c, &cmd);
}

stk_status ops_rope(struct dev_stream *s, const struct ops_rope *a, struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_ROPE, .u.rope = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_need_extent(&c, "tokens", a->tokens);
    ops_need_extent(&c, "heads", a->heads);
    ops_need_extent(&c, "kv_heads", a->kv_heads);
    ops_need_extent(&c, "head_dim", a->head_dim);
    ops_need_activation(&c, a->at);
    ops_need(&c, a->head_dim % 2 == 0, "head_dim must be even");
    ops_need(&c, a->q_stride >= a->heads * a->head_dim,
             "q_stride must hold heads x head_dim elements");
    ops_need(&c, a->k_stride >= a->kv_heads * a->head_dim,
             "k_stride must hold kv_heads x head_dim elements");
    ops_need(&c, !a->v == !a->v_in && (!a->v || (a->v_cols > 0 && a->v_stride >= a->v_cols)),
             "v and v_in come together, and v_stride must hold v_cols elements");
    ops_need_extent(&c, "q_stride", a->q_stride);
    ops_need_extent(&c, "k_stride", a->k_stride);
    ops_need_buffer(&c, "q", a->q);
    ops_need_buffer(&c, "k", a->k);
    ops_need_buffer(&c, "pos", a->pos);
    ops_need_buffer(&c, "inv_freq", a->inv_freq);
    return ops_submit(s, &c, &cmd);
}

/* --- attention -------------------------------------------------------------------------------- */

static void ops_check_attention(struct ops_check *c, const struct ops_attention *a)
{
    ops_need_extent(c, "n_seq", a->n_seq);
    ops_need_extent(c, "seq", a->seq);
    ops_need_extent(c, "heads", a->heads);
    ops_need_extent(c, "kv_heads", a->kv_heads);
    ops_need_extent(c, "head_dim", a->head_dim);
    ops_need_activation(c, a->at);
    if (c->st != STK_OK) return;
    ops_need_extent(c, "n_seq x seq", a->n_seq * a->seq);
    ops_need(c, a->heads % a->kv_heads == 0, "heads must be a multiple of kv_heads");
    ops_need(c, a->q_stride >= a->heads * a->head_dim && a->o_stride >= a->heads * a->head_dim,
             "q_stride and o_stride must hold heads x head_dim elements");
    ops_need(c,
             a->k_stride >= a->kv_heads * a->head_dim && a->v_stride >= a->kv_heads * a->head_dim,
             "k_stride and v_stride must hold kv_heads x head_dim elements");
    ops_need_extent(c, "q_stride", a->q_stride);
    ops_need_extent(c, "k_stride", a->k_stride);
    ops_need_extent(c, "v_stride", a->v_stride);
    ops_need_extent(c, "o_stride", a->o_stride);
    ops_need_buffer(c, "first_key", a->first_key);
    ops_need_buffer(c, "q", a->q);
    ops_need_buffer(c, "k", a->k);
    ops_need_buffer(c, "v", a->v);
    ops_need_buffer(c, "o", a->o);
    ops_need_buffer(c, "lse", a->lse);
}

stk_status ops_attention_forward(struct dev_stream *s, const struct ops_attention *a,
                                 struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_ATTENTION_FORWARD, .u.attention = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_attention(&c, a);
    return ops_submit(s, &c, &cmd);
}

stk_status ops_attention_backward(struct dev_stream *s, const struct ops_attention *a,
                                  struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_ATTENTION_BACKWARD, .u.attention = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_attention(&c, a);
    ops_need_buffer(&c, "d_o", a->d_o);
    ops_need_buffer(&c, "dq", a->dq);
    ops_need_buffer(&c, "dk", a->dk);
    ops_need_buffer(&c, "dv", a->dv);
    return ops_submit(s, &c, &cmd);
}

/* --- elementwise ------------------------------------------------------------------------------ */

static void ops_check_swiglu(struct ops_check *c, const struct ops_swiglu *a)
{
    ops_need_extent(c, "rows", a->rows);
    ops_need_extent(c, "cols", a->cols);
    ops_need_activation(c, a->at);
    ops_need(c, a->g_stride >= a->cols && a->u_stride >= a->cols && a->y_stride >= a->cols,
             "g_stride, u_stride and y_stride must hold cols elements");
    ops_need_extent(c, "g_stride", a->g_stride);
    ops_need_extent(c, "u_stride", a->u_stride);
    ops_need_extent(c, "y_stride", a->y_stride);
    ops_need_buffer(c, "gate", a->gate);
    ops_need_buffer(c, "up", a->up);
}

stk_status ops_swiglu_forward(struct dev_stream *s, const struct ops_swiglu *a,
                              struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_SWIGLU_FORWARD, .u.swiglu = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_swiglu(&c, a);
    ops_need_buffer(&c, "y", a->y);
    return ops_submit(s, &c, &cmd);
}

stk_status ops_swiglu_backward(struct dev_stream *s, const struct ops_swiglu *a,
                               struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_SWIGLU_BACKWARD, .u.swiglu = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_swiglu(&c, a);
    ops_need_buffer(&c, "dy", a->dy);
    ops_need_buffer(&c, "dgate", a->dgate);
    ops_need_buffer(&c, "dup", a->dup);
    return ops_submit(s, &c, &cmd);
}

stk_status ops_add(struct dev_stream *s, enum ops_dtype at, uint64_t n, const void *a,
                   const void *b, void *y, struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_ADD, .u.add = { n, at, a, b, y } };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_need(&c, n > 0 && n <= OPS_ELEMENTS_MAX, "n must be at least 1 and at most 2^48");
    ops_need_activation(&c, at);
    ops_need_buffer(&c, "a", a);
    ops_need_buffer(&c, "b", b);
    ops_need_buffer(&c, "y", y);
    return ops_submit(s, &c, &cmd);
}

/* --- head, engine's own ----------------------------------------------------------------------- */

static void ops_check_head(struct ops_check *c, const struct ops_head *a)
{
    ops_need_extent(c, "tokens", a->tokens);
    ops_need_extent(c, "hidden", a->hidden);
    ops_need_extent(c, "vocab", a->vocab);
    ops_need_activation(c, a->at);
    ops_need_parameter(c, a->pt);
    ops_need_buffer(c, "x", a->x);
    ops_need_buffer(c, "w", a->w);
    ops_need_buffer(c, "targets", a->targets);
    ops_need_buffer(c, "loss_sum", a->loss_sum);
}

stk_status ops_head_forward(struct dev_stream *s, const struct ops_head *a, struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_HEAD_FORWARD, .u.head = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_head(&c, a);
    return ops_submit(s, &c, &cmd);
}

stk_status ops_head_train(struct dev_stream *s, const struct ops_head *a, struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_HEAD_TRAIN, .u.head = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_check_head(&c, a);
    ops_need_buffer(&c, "dx", a->dx);
    return ops_submit(s, &c, &cmd);
}

stk_status ops_grad_cast(struct dev_stream *s, const struct ops_grad_cast *a, struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_GRAD_CAST, .u.grad_cast = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_need(&c, a->n > 0 && a->n <= OPS_ELEMENTS_MAX, "n must be at least 1 and at most 2^48");
    ops_need(&c, a->gt == OPS_BF16 || a->gt == OPS_FP16, "gradients must be bf16 or fp16");
    ops_need_buffer(&c, "acc", a->acc);
    ops_need_buffer(&c, "out", a->out);
    ops_need_buffer(&c, "sum", a->sum);
    return ops_submit(s, &c, &cmd);
}

/* Spans ascend and lie inside: backends walk them without looking. */
static void ops_check_adam_spans(struct ops_check *c, const struct ops_adam *a)
{
    uint64_t end = 0;
    for (uint32_t i = 0; c->st == STK_OK && i < a->n_spans; i++) {
        const struct ops_adam_span *x = &a->spans[i];
        ops_need(c, x->n > 0 && x->first >= end && x->first <= a->n && x->n <= a->n - x->first,
                 "spans must ascend, not be empty, and lie inside the arrays");
        end = x->first + x->n;
    }
}

stk_status ops_adam(struct dev_stream *s, const struct ops_adam *a, struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_ADAM, .u.adam = *a };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_need(&c, a->n > 0 && a->n <= OPS_ELEMENTS_MAX, "n must be at least 1 and at most 2^48");
    ops_need(&c, (unsigned)a->layout < OPS_ADAM_LAYOUT_N, "the layout is none that there is");
    ops_need_buffer(&c, "param", a->param);
    if (a->layout != OPS_ADAM_F32) ops_need_buffer(&c, "low_or_master", a->low_or_master);
    ops_need_buffer(&c, "exp_avg", a->exp_avg);
    ops_need_buffer(&c, "exp_avg_sq", a->exp_avg_sq);
    ops_need_buffer(&c, "grad", a->grad);
    if (a->n_spans > 0) ops_need_buffer(&c, "spans", a->spans);
    if (a->spans) ops_check_adam_spans(&c, a);
    if (c.st == STK_OK && !c.preparing && a->n_spans == 0) return STK_OK;
    return ops_submit(s, &c, &cmd);
}

stk_status ops_acc_add(struct dev_stream *s, uint64_t n, float *acc, const void *src,
                       enum ops_dtype st, struct stk_error *err)
{
    struct dev_cmd cmd = { .kind = DEV_CMD_ACC_ADD, .u.acc_add = { n, acc, src, st } };
    struct ops_check c = ops_check_begin(s, cmd.kind, err);
    ops_need(&c, n > 0 && n <= OPS_ELEMENTS_MAX, "n must be at least 1 and at most 2^48");
    ops_need(&c, st == OPS_F32 || st == OPS_BF16 || st == OPS_FP16,
             "the source must be f32, bf16 or fp16");
    ops_need_buffer(&c, "acc", acc);
    ops_need_buffer(&c, "src", src);
    return ops_submit(s, &c, &cmd);
}
