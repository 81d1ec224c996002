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
 * DTYPES (why: trainer/model.h). A: activations, what is kept and boundaries. f32: the residual
 * stream inside the layer (h), its gradient (the flow) and the sums that go into it (d(n1), d(n2));
 * what the rotary embedding reads. W: everything else that does not outlive a visit; f32 where the
 * products are f32 (model->wide), else A, since a product's operands are rounded anyway.
 *
 * FULL SET, what a forward visit leaves for its backward. Each piece is aligned to 256 bytes. In
 * bytes a token, bf16, without q/k norms:
 *     4 heads*head_dim + 4 kv_heads*head_dim + 4 hidden + 4 intermediate + 4 heads + 8
 *
 *     name    rows x columns               dtype
 *     q       tokens x heads*head_dim      A    after rotary; with q/k norms: before the norm
 *     k       tokens x kv_heads*head_dim   A    likewise
 *     v       tokens x kv_heads*head_dim   A
 *     attn    tokens x heads*head_dim      A    output of attention
 *     h       tokens x hidden              f32  residual stream after attention
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
 * values: the same bits. s comes from the backward of SwiGLU in both cases.
 *
 * JOINED. Where q, k and v (without q/k norms) lie one behind the other in the block's vector, they
 * are one product of all their rows, and their outputs are columns of one buffer: the place of q, k,
 * v in the full set then is tokens x (q | k | v) columns. Gate and up likewise. Larger products run
 * nearer to the machine's rate, and dx of the three is one sum inside a product.
 *
 * LIFETIMES in the workspace: q and k as the rotary embedding reads them, later in their place s (in
 * backward d(s) before it), then d(attn), and the gradients of q and k before their norms; n2 and n1
 * until the gradients of the weights they feed; d(n2), then in its place d(n1); d(q), d(k), d(v). */
#include "trainer/model_impl.h"

#include <math.h>

struct layer_bufs {
    /* full set */
    void *q, *k, *v, *attn, *gate, *up;
    float *h;
    float *rstd1, *rstd2, *lse, *q_rstd, *k_rstd;
    /* remade set */
    void *n1, *n2, *s;
    void *q_rot, *k_rot; /* what attention reads: q and k themselves without q/k norms */
    float *q_raw, *k_raw, *v_raw; /* what the rotary embedding reads (v: joined only); share the
                                   * place of s */
    /* gradients */
    void *d_attn, *d_q_raw, *d_k_raw; /* share the place of s */
    float *d_n;                       /* of n2, later of n1 */
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
    b->h = model_take(&a, model_f32_bytes(m, m->cfg.hidden));
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

/* Pieces at `base`, one after the other (third: may be NULL); returns their size. */
static uint64_t take_pieces(void *base, uint64_t q_bytes, uint64_t k_bytes, uint64_t v_bytes,
                            void **q, void **k, void **v)
{
    struct model_arena a = { (uintptr_t)base, 0 };
    *q = model_take(&a, q_bytes);
    *k = model_take(&a, k_bytes);
    if (v) *v = model_take(&a, v_bytes);
    return a.used_bytes;
}

static struct model_arena take_temps(const struct model *m, uintptr_t base, struct layer_bufs *b)
{
    struct model_arena a = { base, 0 };
    const uint64_t q_cols = model_q_cols(m), kv_cols = model_kv_cols(m), hidden = m->cfg.hidden;
    const uint64_t q = model_work_bytes(m, q_cols), kv = model_work_bytes(m, kv_cols);
    b->n1 = model_take(&a, model_work_bytes(m, hidden));
    b->n2 = model_take(&a, model_work_bytes(m, hidden));
    void *shared = (void *)(a.base + a.used_bytes), *q_raw, *k_raw, *v_raw = NULL;
    uint64_t raw =
        take_pieces(shared, model_f32_bytes(m, q_cols), model_f32_bytes(m, kv_cols),
                    model_f32_bytes(m, kv_cols), &q_raw, &k_raw, m->cfg.qk_norm ? NULL : &v_raw);
    b->q_raw = q_raw;
    b->k_raw = k_raw;
    b->v_raw = v_raw;
    take_pieces(shared, q, kv, 0, &b->d_q_raw, &b->d_k_raw, NULL); /* not larger than in f32 */
    b->s = b->d_attn = model_take(&a, max_u64(model_work_bytes(m, m->cfg.intermediate), raw));
    b->q_rot = m->cfg.qk_norm ? model_take(&a, model_act_bytes(m, q_cols)) : b->q;
    b->k_rot = m->cfg.qk_norm ? model_take(&a, model_act_bytes(m, kv_cols)) : b->k;
    if (m->opts.eval_only) return a;
    b->d_n = model_take(&a, model_f32_bytes(m, hidden));
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
    bool qkv, mlp;              /* joined */
    uint64_t q_stride, k_stride; /* elements from token to token, of k for v too */
    uint64_t mlp_stride;         /* of gate and up */
    struct stk_error *err;
};

static void *after(void *p, uint64_t n, uint64_t elem_bytes)
{
    return (void *)((uintptr_t)p + n * elem_bytes);
}

/* Joined buffers have the place of all their pieces, which lie one behind the other. */
static void join(struct layer_run *r)
{
    const struct model *m = r->m;
    struct layer_bufs *b = &r->b;
    const uint64_t q = model_q_cols(m), kv = model_kv_cols(m), inter = m->cfg.intermediate;
    const uint64_t act = ops_dtype_bytes(m->opts.act),
                   work = ops_dtype_bytes(ops_wide(m->opts.act, m->wide));
    const uint32_t place = r->v->place;
    const bool biased = m->tensor[place][ROLE_Q_BIAS] != MODEL_NO;
    const bool mlp_biased = m->tensor[place][ROLE_GATE_BIAS] != MODEL_NO;
    r->qkv = !m->cfg.qk_norm && model_joined(m, place, ROLE_Q, ROLE_V) &&
             (!biased || model_joined(m, place, ROLE_Q_BIAS, ROLE_V_BIAS));
    r->mlp = model_joined(m, place, ROLE_GATE, ROLE_UP) &&
             (!mlp_biased || model_joined(m, place, ROLE_GATE_BIAS, ROLE_UP_BIAS));
    r->q_stride = r->qkv ? q + 2 * kv : q;
    r->k_stride = r->qkv ? q + 2 * kv : kv;
    r->mlp_stride = r->mlp ? 2 * inter : inter;
    if (r->mlp) b->up = after(b->gate, inter, act);
    if (!r->qkv) return;
    b->k_rot = b->k = after(b->q, q, act);
    b->v = after(b->k, kv, act);
    b->k_raw = after(b->q_raw, q, sizeof(float));
    b->v_raw = after(b->k_raw, kv, sizeof(float));
    b->d_k = after(b->d_q, q, work);
    b->d_v = after(b->d_k, kv, work);
}

/* Rows of a weight, with those joined to it. */
static uint64_t rows_of(const struct layer_run *r, enum model_role weight)
{
    const struct model *m = r->m;
    if (weight == ROLE_Q && r->qkv) return model_q_cols(m) + 2 * model_kv_cols(m);
    if (weight == ROLE_GATE && r->mlp) return 2ull * m->cfg.intermediate;
    return m->info[m->tensor[r->v->place][weight]].shape[0];
}

static struct ops_linear linear_of(const struct layer_run *r, enum model_role weight,
                                   enum model_role bias)
{
    const struct model_tensor_info *t = &r->m->info[r->m->tensor[r->v->place][weight]];
    return (struct ops_linear){
        .rows = r->m->tokens,
        .in = t->shape[1],
        .out = rows_of(r, weight),
        .at = r->m->opts.act,
        .pt = r->m->opts.param,
        .w = model_param(r->m, r->v, weight),
        .bias = model_param(r->m, r->v, bias),
        .dw = model_grad(r->m, r->v, weight),
        .dbias = model_grad(r->m, r->v, bias),
        .overwrite = r->v->overwrite,
        .scratch = r->b.scratch,
    };
}

/* A buffer and whether it is f32 whatever the activations are. */
struct wide_buf {
    void *p;
    bool wide;
};
static struct wide_buf act(const void *p)
{
    return (struct wide_buf){ (void *)(uintptr_t)p, false };
}
static struct wide_buf f32(float *p) { return (struct wide_buf){ p, true }; }
static struct wide_buf work(const struct layer_run *r, void *p)
{
    return (struct wide_buf){ p, r->m->wide };
}

static stk_status linear(const struct layer_run *r, enum model_role weight, enum model_role bias,
                         struct wide_buf x, struct wide_buf y)
{
    struct ops_linear a = linear_of(r, weight, bias);
    a.x = x.p;
    a.x_wide = x.wide;
    a.y = y.p;
    a.y_wide = y.wide;
    return ops_linear_forward(r->v->stream, &a, r->err);
}

/* y = residual + x W^T + bias */
static stk_status residual_linear(const struct layer_run *r, enum model_role weight,
                                  enum model_role bias, struct wide_buf residual, struct wide_buf x,
                                  struct wide_buf y)
{
    struct ops_linear a = linear_of(r, weight, bias);
    a.x = x.p;
    a.x_wide = x.wide;
    a.y = y.p;
    a.y_wide = y.wide;
    a.add = true;
    a.base = residual.p;
    a.base_wide = residual.wide;
    return ops_linear_forward(r->v->stream, &a, r->err);
}

/* dw += dy^T x, db += sum of dy */
static stk_status linear_backward_weight(const struct layer_run *r, enum model_role weight,
                                         enum model_role bias, struct wide_buf x,
                                         struct wide_buf dy)
{
    struct ops_linear a = linear_of(r, weight, bias);
    a.x = x.p;
    a.x_wide = x.wide;
    a.dy = dy.p;
    a.y_wide = dy.wide;
    return a.dw || a.dbias ? ops_linear_backward_weight(r->v->stream, &a, r->err) : STK_OK;
}

/* dx = dy W (or dx += dy W) */
static stk_status linear_backward_data(const struct layer_run *r, enum model_role weight,
                                       enum model_role bias, struct wide_buf dy,
                                       struct wide_buf dx, bool add)
{
    struct ops_linear a = linear_of(r, weight, bias);
    a.dy = dy.p;
    a.y_wide = dy.wide;
    a.dx = dx.p;
    a.x_wide = dx.wide;
    a.add = add;
    return ops_linear_backward_data(r->v->stream, &a, r->err);
}

static struct ops_rmsnorm norm_of(const struct layer_run *r, enum model_role weight, uint32_t heads,
                                  struct wide_buf x, float *rstd)
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
        .x_wide = x.wide,
        .eps = r->m->cfg.rms_eps,
        .x = x.p,
        .rstd = rstd,
        .w = model_param(r->m, r->v, weight),
        .dw = model_grad(r->m, r->v, weight),
        .overwrite = r->v->overwrite,
        .scratch = r->b.scratch,
    };
}

static stk_status linear_backward(const struct layer_run *r, enum model_role weight,
                                  enum model_role bias, struct wide_buf x, struct wide_buf dy,
                                  struct wide_buf dx, bool add)
{
    STK_TRY(linear_backward_weight(r, weight, bias, x, dy));
    return linear_backward_data(r, weight, bias, dy, dx, add);
}

/* `heads` rows a token: 1 for the norms of the residual stream. */
static stk_status norm(const struct layer_run *r, enum model_role weight, uint32_t heads,
                       struct wide_buf x, float *rstd, struct wide_buf y)
{
    struct ops_rmsnorm a = norm_of(r, weight, heads, x, rstd);
    a.y = y.p;
    a.y_wide = y.wide;
    return ops_rmsnorm_forward(r->v->stream, &a, r->err);
}

static stk_status norm_backward(const struct layer_run *r, enum model_role weight, uint32_t heads,
                                struct wide_buf x, float *rstd, struct wide_buf dy,
                                struct wide_buf dx, bool add)
{
    struct ops_rmsnorm a = norm_of(r, weight, heads, x, rstd);
    a.dy = dy.p;
    a.y_wide = dy.wide;
    a.dx = dx.p;
    a.dx_wide = dx.wide;
    a.add = add;
    return ops_rmsnorm_backward(r->v->stream, &a, r->err);
}

static struct ops_rope rope_of(const struct layer_run *r, void *q, void *k)
{
    const struct model *m = r->m;
    return (struct ops_rope){
        .tokens = m->tokens,
        .heads = m->cfg.heads,
        .kv_heads = m->cfg.kv_heads,
        .head_dim = m->cfg.head_dim,
        .q_stride = r->q_stride,
        .k_stride = r->k_stride,
        .at = m->opts.act,
        .q = q,
        .k = k,
        .pos = model_positions(m, r->v->micro),
        .inv_freq = m->inv_freq,
        .attention_factor = 1.0f,
    };
}

/* From q_raw and k_raw, to what attention reads. */
static stk_status rotate(const struct layer_run *r)
{
    struct ops_rope a = rope_of(r, r->b.q_rot, r->b.k_rot);
    a.q_in = r->b.q_raw;
    a.k_in = r->b.k_raw;
    a.in_wide = true;
    if (r->qkv) {
        a.v = r->b.v;
        a.v_in = r->b.v_raw;
        a.v_stride = r->k_stride;
        a.v_cols = model_kv_cols(r->m);
    }
    return ops_rope(r->v->stream, &a, r->err);
}

/* Gradients, in place. */
static stk_status rotate_back(const struct layer_run *r)
{
    struct ops_rope a = rope_of(r, r->b.d_q, r->b.d_k);
    a.at = ops_wide(a.at, r->m->wide);
    a.inverse = true;
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
        .q_stride = r->q_stride,
        .k_stride = r->k_stride,
        .v_stride = r->k_stride,
        .o_stride = model_q_cols(m),
        .at = m->opts.act,
        .grad_wide = m->wide,
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
        .g_stride = r->mlp_stride,
        .u_stride = r->mlp_stride,
        .y_stride = cols,
        .at = r->m->opts.act,
        .y_wide = r->m->wide,
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

/* --- forward --------------------------------------------------------------------------------- */

static stk_status norm_q_and_k(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    STK_TRY(norm(r, ROLE_Q_NORM, r->m->cfg.heads, act(b->q), b->q_rstd, f32(b->q_raw)));
    return norm(r, ROLE_K_NORM, r->m->cfg.kv_heads, act(b->k), b->k_rstd, f32(b->k_raw));
}

static stk_status attention_forward(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    const bool norms = r->m->cfg.qk_norm;
    const struct wide_buf n1 = work(r, b->n1);
    STK_TRY(norm(r, ROLE_IN_NORM, 1, act(r->v->in), b->rstd1, n1));
    STK_TRY(linear(r, ROLE_Q, ROLE_Q_BIAS, n1, norms ? act(b->q) : f32(b->q_raw)));
    if (!r->qkv) {
        STK_TRY(linear(r, ROLE_K, ROLE_K_BIAS, n1, norms ? act(b->k) : f32(b->k_raw)));
        STK_TRY(linear(r, ROLE_V, ROLE_V_BIAS, n1, act(b->v)));
    }
    if (norms) STK_TRY(norm_q_and_k(r));
    STK_TRY(rotate(r));
    struct ops_attention a = attention_of(r);
    STK_TRY(ops_attention_forward(r->v->stream, &a, r->err));
    return residual_linear(r, ROLE_O, ROLE_O_BIAS, act(r->v->in), act(b->attn), f32(b->h));
}

/* Writes the full set and the remade set. */
static stk_status fill_sets(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    const struct wide_buf n2 = work(r, b->n2);
    STK_TRY(attention_forward(r));
    STK_TRY(norm(r, ROLE_POST_NORM, 1, f32(b->h), b->rstd2, n2));
    STK_TRY(linear(r, ROLE_GATE, ROLE_GATE_BIAS, n2, act(b->gate)));
    return r->mlp ? STK_OK : linear(r, ROLE_UP, ROLE_UP_BIAS, n2, act(b->up));
}

static stk_status layer_forward(const struct layer_run *r)
{
    STK_TRY(fill_sets(r));
    STK_TRY(swiglu(r));
    return residual_linear(r, ROLE_DOWN, ROLE_DOWN_BIAS, f32(r->b.h), work(r, r->b.s),
                           act(r->v->out));
}

/* --- backward -------------------------------------------------------------------------------- */

static stk_status remake(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    STK_TRY(norm(r, ROLE_IN_NORM, 1, act(r->v->in), b->rstd1, work(r, b->n1)));
    if (r->m->cfg.qk_norm) {
        STK_TRY(norm_q_and_k(r));
        STK_TRY(rotate(r));
    }
    return norm(r, ROLE_POST_NORM, 1, f32(b->h), b->rstd2, work(r, b->n2));
}

/* flow: d(out) -> d(h). d(s) comes before s, which is made again in its place. */
static stk_status mlp_backward(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    const struct wide_buf flow = f32(r->v->flow), s = work(r, b->s), n2 = work(r, b->n2),
                          d_n = f32(b->d_n);
    STK_TRY(linear_backward_data(r, ROLE_DOWN, ROLE_DOWN_BIAS, flow, s, false));
    struct ops_swiglu a = swiglu_of(r);
    a.dy = a.y = b->s;
    a.dgate = b->gate;
    a.dup = b->up;
    STK_TRY(ops_swiglu_backward(r->v->stream, &a, r->err));
    STK_TRY(linear_backward_weight(r, ROLE_DOWN, ROLE_DOWN_BIAS, s, flow));
    STK_TRY(linear_backward(r, ROLE_GATE, ROLE_GATE_BIAS, n2, act(b->gate), d_n, false));
    if (!r->mlp) STK_TRY(linear_backward(r, ROLE_UP, ROLE_UP_BIAS, n2, act(b->up), d_n, true));
    return norm_backward(r, ROLE_POST_NORM, 1, f32(b->h), b->rstd2, d_n, flow, true);
}

/* flow: d(h) -> d(in). */
static stk_status attention_backward(const struct layer_run *r)
{
    const struct layer_bufs *b = &r->b;
    const struct wide_buf flow = f32(r->v->flow), n1 = work(r, b->n1), d_n = f32(b->d_n);
    struct wide_buf d_q = work(r, b->d_q), d_k = work(r, b->d_k);
    STK_TRY(linear_backward(r, ROLE_O, ROLE_O_BIAS, act(b->attn), flow, work(r, b->d_attn), false));
    struct ops_attention a = attention_of(r);
    a.d_o = b->d_attn;
    a.dq = b->d_q;
    a.dk = b->d_k;
    a.dv = b->d_v;
    STK_TRY(ops_attention_backward(r->v->stream, &a, r->err));
    STK_TRY(rotate_back(r));
    if (r->m->cfg.qk_norm) {
        const struct wide_buf q = work(r, b->d_q_raw), k = work(r, b->d_k_raw);
        STK_TRY(norm_backward(r, ROLE_Q_NORM, r->m->cfg.heads, act(b->q), b->q_rstd, d_q, q,
                              false));
        STK_TRY(norm_backward(r, ROLE_K_NORM, r->m->cfg.kv_heads, act(b->k), b->k_rstd, d_k, k,
                              false));
        d_q = q;
        d_k = k;
    }
    STK_TRY(linear_backward(r, ROLE_Q, ROLE_Q_BIAS, n1, d_q, d_n, false));
    if (!r->qkv) {
        STK_TRY(linear_backward(r, ROLE_K, ROLE_K_BIAS, n1, d_k, d_n, true));
        STK_TRY(linear_backward(r, ROLE_V, ROLE_V_BIAS, n1, work(r, b->d_v), d_n, true));
    }
    return norm_backward(r, ROLE_IN_NORM, 1, act(r->v->in), b->rstd1, d_n, flow, true);
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
    join(&r);
    return v->dir == STK_FORWARD ? layer_forward(&r) : layer_backward(&r);
}
