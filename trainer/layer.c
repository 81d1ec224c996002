/* trainer/layer.c - the visits of a decoder layer, forward and backward, one code for all families.
 *
 * Owns: the layout of a layer's full set and of its temporaries. Must not know: placements,
 * activation policies (a visit says `recompute`), families (a tensor is there or not).
 * Application's thread; work is queued on v->stream, nothing is kept from one visit to the next.
 *
 * FORWARD (transformers, modeling_llama.py LlamaDecoderLayer; Qwen3Attention for q/k norms)
 *     n1 = norm(in);  q, k, v = n1 Wq^T + bq, ...;  [q, k = norm per head];  rotary
 *     a = attention(q, k, v);  h = in + a Wo^T
 *     n2 = norm(h);  s = silu(n2 Wg^T) * (n2 Wu^T);  out = h + s Wd^T
 *
 * FULL SET, what a forward visit leaves for its backward. A: activation dtype. Each piece is
 * aligned to 256 bytes. In bytes a token, bf16, without q/k norms:
 *     4 heads*head_dim + 4 kv_heads*head_dim + 2 hidden + 4 intermediate + 4 heads + 8
 *
 *     name    rows x columns               dtype
 *     q       tokens x heads*head_dim      A    after rotary; with q/k norms: before the norm
 *     k       tokens x kv_heads*head_dim   A    likewise
 *     v       tokens x kv_heads*head_dim   A
 *     attn    tokens x heads*head_dim      A    output of attention
 *     h       tokens x hidden              A    residual stream after attention
 *     gate    tokens x intermediate        A    backward overwrites it with its gradient
 *     up      tokens x intermediate        A    likewise
 *     rstd1   tokens x 1                   f32  of the first norm
 *     rstd2   tokens x 1                   f32  of the second norm
 *     lse     tokens x heads               f32  of attention
 *     q_rstd  tokens x heads               f32  only with q/k norms
 *     k_rstd  tokens x kv_heads            f32  only with q/k norms
 *
 * REMADE SET, in the workspace: elementwise functions of the full set and `in` that a backward
 * needs as operands (n1, n2, s; with q/k norms also q and k as attention saw them). A forward
 * visit writes them on its way. A backward that recomputes runs that same forward, so they are
 * there; one that kept runs only their operations again. The same operations on the same stored
 * values: the same bits.
 *
 * LIFETIMES in the workspace of a backward: s, then in its place d(s), d(attn), and the gradients
 * of q and k before their norms; n2 and n1 until the gradients of the weights they feed; d(n2),
 * then in its place d(n1); d(q), d(k), d(v). */
#include "trainer/model_impl.h"

#include <math.h>

struct layer_bufs {
    /* full set */
    void *q, *k, *v, *attn, *h, *gate, *up;
    float *rstd1, *rstd2, *lse, *q_rstd, *k_rstd;
    /* remade set */
    void *n1, *n2, *s;
    void *q_rot, *k_rot; /* what attention reads: q and k themselves without q/k norms */
    /* gradients */
    void *d_attn, *d_q_raw, *d_k_raw; /* share the place of s */
    void *d_n;                        /* of n2, later of n1 */
    void *d_q, *d_k, *d_v;
    struct ops_scratch scratch;
};

static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* The two carvings below are the layout; with any base they also give its size. */
static uint64_t take_full(const struct model *m, uintptr_t base, struct layer_bufs *b)
{
    struct model_arena a = { base, 0 };
    const uint64_t q = model_act_bytes(m, model_q_cols(m)),
                   kv = model_act_bytes(m, model_kv_cols(m));
    const uint64_t inter = model_act_bytes(m, m->cfg.intermediate), row = m->tokens * sizeof(float);
    b->q = model_take(&a, q);
    b->k = model_take(&a, kv);
    b->v = model_take(&a, kv);
    b->attn = model_take(&a, q);
    b->h = model_take(&a, m->boundary_bytes);
    b->gate = model_take(&a, inter);
    b->up = model_take(&a, inter);
    b->rstd1 = model_take(&a, row);
    b->rstd2 = model_take(&a, row);
    b->lse = model_take(&a, row * m->cfg.heads);
    if (m->cfg.qk_norm) {
        b->q_rstd = model_take(&a, row * m->cfg.heads);
        b->k_rstd = model_take(&a, row * m->cfg.kv_heads);
    }
    return a.used_bytes;
}

static struct model_arena take_temps(const struct model *m, uintptr_t base, struct layer_bufs *b)
{
    struct model_arena a = { base, 0 };
    const uint64_t q = model_act_bytes(m, model_q_cols(m)),
                   kv = model_act_bytes(m, model_kv_cols(m));
    struct model_arena raw = { 0, 0 };
    model_take(&raw, q);
    model_take(&raw, kv);
    b->n1 = model_take(&a, m->boundary_bytes);
    b->n2 = model_take(&a, m->boundary_bytes);
    b->s = model_take(
        &a, max_u64(model_act_bytes(m, m->cfg.intermediate), m->cfg.qk_norm ? raw.used_bytes : q));
    b->d_attn = b->s;
    raw = (struct model_arena){ (uintptr_t)b->s, 0 };
    b->d_q_raw = model_take(&raw, q);
    b->d_k_raw = model_take(&raw, kv);
    b->q_rot = m->cfg.qk_norm ? model_take(&a, q) : b->q;
    b->k_rot = m->cfg.qk_norm ? model_take(&a, kv) : b->k;
    if (m->opts.eval_only) return a;
    b->d_n = model_take(&a, m->boundary_bytes);
    b->d_q = model_take(&a, q);
    b->d_k = model_take(&a, kv);
    b->d_v = model_take(&a, kv);
    return a;
}

uint64_t layer_full_bytes(const struct model *m)
{
    struct layer_bufs b;
    return take_full(m, MODEL_PREPARE_BASE, &b);
}

uint64_t layer_temps_bytes(const struct model *m)
{
    struct layer_bufs b = { 0 };
    return take_temps(m, MODEL_PREPARE_BASE, &b).used_bytes;
}

/* --- one operation each, with what this model fills in --------------------------------------- */

struct layer_run {
    const struct model *m;
    const stk_visit *v;
    struct layer_bufs b;
    struct stk_error *err;
};

static struct ops_linear linear_of(const struct layer_run *r, enum model_role weight,
                                   enum model_role bias)
{
    const struct model_tensor_info *t = &r->m->info[r->m->tensor[r->v->place][weight]];
    return (struct ops_linear){
        .rows = r->m->tokens,
        .in = t->shape[1],
        .out = t->shape[0],
        .at = r->m->opts.act,
        .pt = r->m->opts.param,
        .w = model_param(r->m, r->v, weight),
        .bias = model_param(r->m, r->v, bias),
        .dw = model_grad(r->m, r->v, weight),
        .dbias = model_grad(r->m, r->v, bias),
        .scratch = r->b.scratch,
    };
}

static stk_status linear(const struct layer_run *r, enum model_role weight, enum model_role bias,
                         const void *x, void *y)
{
    struct ops_linear a = linear_of(r, weight, bias);
    a.x = x;
    a.y = y;
    return ops_linear_forward(r->v->stream, &a, r->err);
}

/* dw += dy^T x, db += sum of dy, then dx = dy W (or dx += dy W). */
static stk_status linear_backward(const struct layer_run *r, enum model_role weight,
                                  enum model_role bias, const void *x, const void *dy, void *dx,
                                  bool add)
{
    struct ops_linear a = linear_of(r, weight, bias);
    a.x = x;
    a.dy = dy;
    if (a.dw || a.dbias) STK_TRY(ops_linear_backward_weight(r->v->stream, &a, r->err));
    a.dx = dx;
    a.add = add;
    return ops_linear_backward_data(r->v->stream, &a, r->err);
}

static struct ops_rmsnorm norm_of(const struct layer_run *r, enum model_role weight, uint32_t heads,
                                  const void *x, float *rstd)
{
    uint64_t cols = r->m->info[r->m->tensor[r->v->place][weight]].n_elems;
    return (struct ops_rmsnorm){
        .rows = r->m->tokens * heads,
        .cols = cols,
        .group = heads,
        .x_stride = cols * heads,
        .y_stride = cols * heads,
        .at = r->m->opts.act,
        .pt = r->m->opts.param,
        .eps = r->m->cfg.rms_eps,
        .x = x,
        .rstd = rstd,
        .w = model_param(r->m, r->v, weight),
        .dw = model_grad(r->m, r->v, weight),
        .scratch = r->b.scratch,
    };
}

/* `heads` rows a token: 1 for the norms of the residual stream. */
static stk_status norm(const struct layer_run *r, enum model_role weight, uint32_t heads,
                       const void *x, float *rstd, void *y)
{
    struct ops_rmsnorm a = norm_of(r, weight, heads, x, rstd);
    a.y = y;
    return ops_rmsnorm_forward(r->v->stream, &a, r->err);
}

static stk_status norm_backward(const struct layer_run *r, enum model_role weight, uint32_t heads,
                                const void *x, float *rstd, const void *dy, void *dx, bool add)
{
    struct ops_rmsnorm a = norm_of(r, weight, heads, x, rstd);
    a.dy = dy;
    a.dx = dx;
    a.add = add;
    return ops_rmsnorm_backward(r->v->stream, &a, r->err);
}

static stk_status rotate(const struct layer_run *r, void *q, void *k, bool inverse)
{
    const struct model *m = r->m;
    struct ops_rope a = {
        .tokens = m->tokens,
        .heads = m->cfg.heads,
        .kv_heads = m->cfg.kv_heads,
        .head_dim = m->cfg.head_dim,
        .q_stride = model_q_cols(m),
        .k_stride = model_kv_cols(m),
        .at = m->opts.act,
        .q = q,
        .k = k,
        .pos = model_positions(m, r->v->micro),
        .inv_freq = m->inv_freq,
        .attention_factor = 1.0f,
        .inverse = inverse,
    };
    return ops_rope(r->v->stream, &a, r->err);
}

static struct ops_attention attention_of(const struct layer_run *r)
{
    const struct model *m = r->m;
    const struct layer_bufs *b = &r->b;
    return (struct ops_attention){
        .n_seq = m->opts.sequences,
        .seq = m->opts.seq,
        .heads = m->cfg.heads,
        .kv_heads = m->cfg.kv_heads,
        .head_dim = m->cfg.head_dim,
        .q_stride = model_q_cols(m),
        .k_stride = model_kv_cols(m),
        .v_stride = model_kv_cols(m),
        .o_stride = model_q_cols(m),
        .at = m->opts.act,
        .scale = (float)(1.0 / sqrt((double)m->cfg.head_dim)),
        .first_key = model_first_key(m, r->v->micro, m->layer_window[r->v->place - 1]),
        .q = b->q_rot,
        .k = b->k_rot,
        .v = b->v,
        .o = b->attn,
        .lse = b->lse,
        .scratch = b->scratch,
    };
}

static struct ops_swiglu swiglu_of(const struct layer_run *r)
{
    const uint64_t cols = r->m->cfg.intermediate;
    return (struct ops_swiglu){
        .rows = r->m->tokens,
        .cols = cols,
        .g_stride = cols,
        .u_stride = cols,
        .y_stride = cols,
        .at = r->m->opts.act,
        .gate = r->b.gate,
        .up = r->b.up,
    };
}

static stk_status swiglu(const struct layer_run *r)
{
    struct ops_swiglu a = swiglu_of(r);
    a.y = r->b.s;
    return ops_swiglu_forward(r->v->stream, &a, r->err);
}

static stk_status residual_linear(const struct layer_run *r, enum model_role weight,
                                  enum model_role bias, const void *residual, const void *x,
                                  void *y)
{
    struct ops_linear a = linear_of(r, weight, bias);
    a.x = x;
    a.y = y;
    a.add = true;
    if (!dev_preparing(dev_of(r->v->stream)))
        STK_TRY(dev_copy(r->v->stream, y, residual, r->m->boundary_bytes, DEV_ON_DEVICE, r->err));
    return ops_linear_forward(r->v->stream, &a, r->err);
}

/* --- forward --------------------------------------------------------------------------------- */

/* q/k norms and the rotary embedding after them, for models that have the norms: out of place, so
 * that the norms' input is kept. */
static stk_status norm_and_rotate(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    STK_TRY(norm(r, ROLE_Q_NORM, r->m->cfg.heads, b->q, b->q_rstd, b->q_rot));
    STK_TRY(norm(r, ROLE_K_NORM, r->m->cfg.kv_heads, b->k, b->k_rstd, b->k_rot));
    return rotate(r, b->q_rot, b->k_rot, false);
}

static stk_status attention_forward(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    STK_TRY(norm(r, ROLE_IN_NORM, 1, r->v->in, b->rstd1, b->n1));
    STK_TRY(linear(r, ROLE_Q, ROLE_Q_BIAS, b->n1, b->q));
    STK_TRY(linear(r, ROLE_K, ROLE_K_BIAS, b->n1, b->k));
    STK_TRY(linear(r, ROLE_V, ROLE_V_BIAS, b->n1, b->v));
    STK_TRY(r->m->cfg.qk_norm ? norm_and_rotate(r) : rotate(r, b->q, b->k, false));
    struct ops_attention a = attention_of(r);
    STK_TRY(ops_attention_forward(r->v->stream, &a, r->err));
    return residual_linear(r, ROLE_O, ROLE_O_BIAS, r->v->in, b->attn, b->h);
}

/* Writes the full set and the remade set. */
static stk_status fill_sets(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    STK_TRY(attention_forward(r));
    STK_TRY(norm(r, ROLE_POST_NORM, 1, b->h, b->rstd2, b->n2));
    STK_TRY(linear(r, ROLE_GATE, ROLE_GATE_BIAS, b->n2, b->gate));
    STK_TRY(linear(r, ROLE_UP, ROLE_UP_BIAS, b->n2, b->up));
    return swiglu(r);
}

static stk_status layer_forward(const struct layer_run *r)
{
    STK_TRY(fill_sets(r));
    return residual_linear(r, ROLE_DOWN, ROLE_DOWN_BIAS, r->b.h, r->b.s, r->v->out);
}

/* --- backward -------------------------------------------------------------------------------- */

static stk_status remake(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    STK_TRY(norm(r, ROLE_IN_NORM, 1, r->v->in, b->rstd1, b->n1));
    if (r->m->cfg.qk_norm) STK_TRY(norm_and_rotate(r));
    STK_TRY(norm(r, ROLE_POST_NORM, 1, b->h, b->rstd2, b->n2));
    return swiglu(r);
}

/* flow: d(out) -> d(h). */
static stk_status mlp_backward(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    void *flow = r->v->flow, *d_s = b->s;
    STK_TRY(linear_backward(r, ROLE_DOWN, ROLE_DOWN_BIAS, b->s, flow, d_s, false));
    struct ops_swiglu a = swiglu_of(r);
    a.dy = d_s;
    a.dgate = b->gate;
    a.dup = b->up;
    STK_TRY(ops_swiglu_backward(r->v->stream, &a, r->err));
    STK_TRY(linear_backward(r, ROLE_GATE, ROLE_GATE_BIAS, b->n2, b->gate, b->d_n, false));
    STK_TRY(linear_backward(r, ROLE_UP, ROLE_UP_BIAS, b->n2, b->up, b->d_n, true));
    return norm_backward(r, ROLE_POST_NORM, 1, b->h, b->rstd2, b->d_n, flow, true);
}

/* flow: d(h) -> d(in). */
static stk_status attention_backward(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    void *flow = r->v->flow, *d_q = b->d_q, *d_k = b->d_k;
    STK_TRY(linear_backward(r, ROLE_O, ROLE_O_BIAS, b->attn, flow, b->d_attn, false));
    struct ops_attention a = attention_of(r);
    a.d_o = b->d_attn;
    a.dq = d_q;
    a.dk = d_k;
    a.dv = b->d_v;
    STK_TRY(ops_attention_backward(r->v->stream, &a, r->err));
    STK_TRY(rotate(r, d_q, d_k, true));
    if (r->m->cfg.qk_norm) {
        STK_TRY(norm_backward(r, ROLE_Q_NORM, r->m->cfg.heads, b->q, b->q_rstd, d_q, b->d_q_raw,
                              false));
        STK_TRY(norm_backward(r, ROLE_K_NORM, r->m->cfg.kv_heads, b->k, b->k_rstd, d_k, b->d_k_raw,
                              false));
        d_q = b->d_q_raw;
        d_k = b->d_k_raw;
    }
    STK_TRY(linear_backward(r, ROLE_Q, ROLE_Q_BIAS, b->n1, d_q, b->d_n, false));
    STK_TRY(linear_backward(r, ROLE_K, ROLE_K_BIAS, b->n1, d_k, b->d_n, true));
    STK_TRY(linear_backward(r, ROLE_V, ROLE_V_BIAS, b->n1, b->d_v, b->d_n, true));
    return norm_backward(r, ROLE_IN_NORM, 1, r->v->in, b->rstd1, b->d_n, flow, true);
}

static stk_status layer_backward(const struct layer_run *r)
{
    STK_TRY(r->v->recompute ? fill_sets(r) : remake(r));
    STK_TRY(mlp_backward(r));
    return attention_backward(r);
}

stk_status layer_visit(const struct model *m, const stk_visit *v, struct stk_error *err)
{
    STK_ASSERT(v->full && v->in);
    struct layer_run r = { .m = m, .v = v, .err = err };
    take_full(m, (uintptr_t)v->full, &r.b);
    struct model_arena ws = take_temps(m, (uintptr_t)v->workspace, &r.b);
    r.b.scratch = model_scratch(&ws, v);
    return v->dir == STK_FORWARD ? layer_forward(&r) : layer_backward(&r);
}
