/* trainer/model_visit.c - visits of embedding and head, the way to those of layers, and the
 * measuring of workspace.
 *
 * Owns: addresses of parameters and gradients inside a visit, the arena over v->workspace (a
 * visit's temporaries first, what is left is the operations' scratch). Must not know: placements;
 * no pointer of a visit is kept. Application's thread; work is queued on v->stream. */
#include "trainer/model_impl.h"

void *model_take(struct model_arena *a, uint64_t size_bytes)
{
    void *p = (void *)(a->base + a->used_bytes);
    a->used_bytes += (size_bytes + MODEL_ALIGN_BYTES - 1) / MODEL_ALIGN_BYTES * MODEL_ALIGN_BYTES;
    return p;
}

struct ops_scratch model_scratch(const struct model_arena *a, const stk_visit *v)
{
    STK_ASSERT(a->used_bytes <= v->workspace_bytes);
    return (struct ops_scratch){ (void *)(a->base + a->used_bytes),
                                 v->workspace_bytes - a->used_bytes };
}

const void *model_param(const struct model *m, const stk_visit *v, enum model_role role)
{
    uint32_t t = m->tensor[v->place][role];
    return t == MODEL_NO ? NULL
                         : (const void *)((uintptr_t)v->param +
                                          m->offset[t] * ops_dtype_bytes(m->opts.param));
}

float *model_grad(const struct model *m, const stk_visit *v, enum model_role role)
{
    uint32_t t = m->tensor[v->place][role];
    if (t == MODEL_NO || m->info[t].frozen || !v->grad) return NULL;
    return (float *)((uintptr_t)v->grad + m->offset[t] * sizeof(float));
}

/* --- embedding ------------------------------------------------------------------------------- */

static stk_status embed_visit(const struct model *m, const stk_visit *v, struct stk_error *err)
{
    struct ops_embed a = {
        .tokens = m->tokens,
        .vocab = m->cfg.vocab,
        .hidden = m->cfg.hidden,
        .at = v->dir == STK_FORWARD ? m->opts.act : OPS_F32, /* of y; of the flow */
        .pt = m->opts.param,
        .ids = model_ids(m, v->micro),
        .table = model_param(m, v, ROLE_EMBED),
        .y = v->out,
        .dy = v->flow,
        .dtable = model_grad(m, v, ROLE_EMBED),
    };
    if (v->dir == STK_FORWARD) return ops_embed_forward(v->stream, &a, err);
    if (a.dtable && v->overwrite) /* few of the rows are touched */
        STK_TRY(dev_zero(v->stream, a.dtable, a.vocab * a.hidden * sizeof(float), err));
    return a.dtable ? ops_embed_backward(v->stream, &a, err)
                    : STK_OK; /* frozen: nothing before it wants a gradient */
}

/* --- head: final norm, output projection, loss ----------------------------------------------- */

static stk_status head_forward(const struct model *m, const stk_visit *v, struct ops_head *h,
                               struct stk_error *err)
{
    if (m->opts.logits) h->logits = m->logits_device;
    STK_TRY(ops_head_forward(v->stream, h, err));
    if (!m->opts.logits || dev_preparing(dev_of(v->stream))) return STK_OK;
    uint64_t n = m->tokens * m->cfg.vocab;
    return dev_copy(v->stream, m->logits_host + v->micro * n, m->logits_device, n * sizeof(float),
                    DEV_TO_HOST, err);
}

struct head_temps {
    void *normed;
    float *d_normed, *rstd;
};

static struct model_arena take_head_temps(const struct model *m, uintptr_t workspace,
                                          struct head_temps *t)
{
    struct model_arena ws = { workspace, 0 };
    t->normed = model_take(&ws, model_work_bytes(m, m->cfg.hidden));
    t->d_normed = model_take(&ws, model_f32_bytes(m, m->cfg.hidden));
    t->rstd = model_take(&ws, m->tokens * sizeof(float));
    return ws;
}

static stk_status head_visit(const struct model *m, const stk_visit *v, struct stk_error *err)
{
    struct head_temps t;
    struct model_arena ws = take_head_temps(m, (uintptr_t)v->workspace, &t);
    struct ops_scratch scratch = model_scratch(&ws, v);
    struct ops_rmsnorm norm = {
        .rows = m->tokens,
        .cols = m->cfg.hidden,
        .group = 1,
        .x_stride = m->cfg.hidden,
        .y_stride = m->cfg.hidden,
        .at = m->opts.act,
        .pt = m->opts.param,
        .y_wide = m->wide,
        .dx_wide = true,
        .eps = m->cfg.rms_eps,
        .x = v->in,
        .w = model_param(m, v, ROLE_FINAL_NORM),
        .y = t.normed,
        .rstd = t.rstd,
        .scratch = scratch,
    };
    struct ops_head head = {
        .tokens = m->tokens,
        .hidden = m->cfg.hidden,
        .vocab = m->cfg.vocab,
        .at = ops_wide(m->opts.act, m->wide),
        .pt = m->opts.param,
        .dx_wide = true,
        .x = t.normed,
        .w = model_param(m, v, ROLE_HEAD),
        .targets = model_targets(m, v->micro),
        .loss_sum = &m->loss[v->micro],
        .scratch = scratch,
    };
    STK_TRY(ops_rmsnorm_forward(v->stream, &norm, err));
    if (v->dir == STK_FORWARD) return head_forward(m, v, &head, err);
    head.dx = t.d_normed;
    head.dw = model_grad(m, v, ROLE_HEAD);
    head.overwrite = norm.overwrite = v->overwrite;
    head.d_scale = m->targets ? v->loss_scale / (double)m->targets
                              : 0; /* a step without targets has no gradient, not NaN */
    STK_TRY(ops_head_train(v->stream, &head, err));
    norm.dy = t.d_normed;
    norm.y_wide = true;
    norm.dx = v->flow;
    norm.dw = model_grad(m, v, ROLE_FINAL_NORM);
    return ops_rmsnorm_backward(v->stream, &norm, err);
}

stk_status model_visit(struct model *m, const stk_visit *v, struct stk_error *err)
{
    STK_ASSERT(v->place < m->n_places && v->micro < m->opts.n_micro);
    if (v->place == 0) return embed_visit(m, v, err);
    if (v->place == m->n_places - 1) return head_visit(m, v, err);
    return layer_visit(m, v, err);
}

/* --- measuring ------------------------------------------------------------------------------- */

enum measured { MEASURE_EMBED, MEASURE_LAYER, MEASURE_HEAD, MEASURE_N };

static const struct measure_row {
    enum measured what;
    stk_dir dir;
    bool eval, recompute;
} measure_rows[] = {
    { MEASURE_EMBED, STK_FORWARD, true, false },  { MEASURE_EMBED, STK_BACKWARD, false, false },
    { MEASURE_LAYER, STK_FORWARD, true, false },  { MEASURE_LAYER, STK_BACKWARD, false, false },
    { MEASURE_LAYER, STK_BACKWARD, false, true }, { MEASURE_HEAD, STK_FORWARD, true, false },
    { MEASURE_HEAD, STK_BACKWARD, false, false },
};
#define MEASURE_ROWS (sizeof measure_rows / sizeof measure_rows[0])

/* Runs one visit in prepare mode. All buffers are one made-up address: only sizes matter, and what
 * is not NULL. Layers differ in data only (windows), so the first stands for all. */
static stk_status measure_visit(struct model *m, stk_engine *e, const struct measure_row *r,
                                struct stk_error *err)
{
    void *base = (void *)MODEL_PREPARE_BASE;
    uint32_t place = r->what == MEASURE_EMBED ? 0 : r->what == MEASURE_LAYER ? 1 : m->n_places - 1;
    stk_visit v = {
        .place = place,
        .block = m->blocks[m->place_block[place]].id,
        .dir = r->dir,
        .eval = r->eval,
        .recompute = r->recompute,
        .param = base,
        .grad = base,
        .in = base,
        .out = base,
        .full = base,
        .flow = base,
        .workspace = base,
        .workspace_bytes = UINT64_MAX / 2,
        .stream = stk_compute_stream(e),
        .loss_scale = 1,
    };
    return model_visit(m, &v, err);
}

static stk_status measure_scratch(struct model *m, stk_engine *e, enum measured what, uint64_t *out,
                                  uint64_t *row_ns, struct stk_error *err)
{
    struct dev *d = stk_device(e);
    stk_status st = STK_OK;
    dev_prepare_begin(d);
    for (uint32_t i = 0; i < MEASURE_ROWS && st == STK_OK; i++) {
        const struct measure_row *r = &measure_rows[i];
        uint64_t before = dev_prepare_ns(d);
        if (r->what == what && (r->dir == STK_FORWARD || !m->opts.eval_only))
            st = measure_visit(m, e, r, err);
        if (r->what == what) row_ns[i] = dev_prepare_ns(d) - before;
    }
    stk_status end = dev_prepare_end(d, out, err);
    return st != STK_OK ? st : end;
}

/* A device whose time is modelled knows what visits will take; rows as in measure_rows. */
static stk_status tell_costs(const struct model *m, stk_engine *e, const uint64_t *ns,
                             struct stk_error *err)
{
    struct dev_caps caps;
    dev_caps_read(stk_device(e), &caps);
    for (uint32_t p = 0; caps.modelled_time && p < m->n_places; p++) {
        const uint64_t *at = p == 0 ? &ns[0] : p == m->n_places - 1 ? &ns[5] : &ns[2];
        bool layer = p > 0 && p < m->n_places - 1;
        stk_visit_cost c = { .forward_ns = (double)at[0], .backward_ns = (double)at[1] };
        if (layer && at[2] > at[1]) c.recompute_ns = (double)(at[2] - at[1]);
        if (stk_place_cost(e, p, &c) != STK_OK)
            return stk_error_set(err, STK_ERR_STATE, 0, "%s", stk_error_text(e));
    }
    return STK_OK;
}

stk_status model_measure(struct model *m, stk_engine *e, struct stk_error *err)
{
    struct head_temps head;
    const uint64_t temps[MEASURE_N] = { 0, layer_temps_bytes(m),
                                        take_head_temps(m, MODEL_PREPARE_BASE, &head).used_bytes };
    uint64_t row_ns[MEASURE_ROWS] = { 0 };
    m->workspace_bytes = 0;
    for (uint32_t what = 0; what < MEASURE_N; what++) {
        uint64_t scratch = 0;
        STK_TRY(measure_scratch(m, e, what, &scratch, row_ns, err));
        if (temps[what] + scratch > m->workspace_bytes) m->workspace_bytes = temps[what] + scratch;
    }
    return tell_costs(m, e, row_ns, err);
}
