/* engine/spec_run.c - `speculate` while a plan runs: which nodes pass, the speculative update, the undo
 * (engine/spec.h).
 *
 * Engine lane, but for the two functions that the update team runs. Owns, during a run, struct
 * eng_spec. Must not know how the norm decides; between backward and the update it only takes what
 * spec_decided left. */
#include "engine/durable.h"
#include "engine/save.h"
#include "engine/spec.h"
#include "engine/update.h"
#include <math.h>
#include <string.h>

static const struct plan_node *node_of(const stk_engine *e, uint32_t node)
{
    return &e->run.plan->nodes[node];
}

static bool at_home(const stk_engine *e, uint32_t chunk)
{
    return e->layout->chunks[chunk].home[CHUNK_OPT] == CHUNK_HOST;
}

/* --- begin and end of a step's speculation ---------------------------------------------------- */

/* Nothing begins from here on: what waits passes, whatever it waits for. */
static void close_step(stk_engine *e)
{
    struct eng_spec *s = e->spec;
    if (s->closed) return;
    s->closed = true;
    for (uint32_t i = 0; i < s->n_order; i++) run_pass_early(e, s->chunk[s->order[i]].node);
}

/* An untried period: its FETCHes, too, so that nothing waits through them for the write-backs that they
 * would have followed. */
static void pass_all(stk_engine *e)
{
    const struct plan *p = e->run.plan;
    close_step(e);
    for (uint32_t i = 0; i < p->n_nodes; i++)
        if (p->nodes[i].spec && p->nodes[i].kind == PLAN_FETCH) run_pass_early(e, i);
}

static void find_nodes(stk_engine *e)
{
    struct eng_spec *s = e->spec;
    const struct plan *p = e->run.plan;
    s->n_order = s->final_left = 0;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        s->chunk[i].node = PLAN_NO;
        s->chunk[i].made = false;
    }
    if (!(e->run.parts & PLAN_RUN_VISITS)) return;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        const struct plan_node *n = &p->nodes[i];
        s->final_left += n->kind == PLAN_VISIT || n->kind == PLAN_GRAD_CAST;
        if (n->kind != PLAN_UPDATE || !n->spec) continue;
        s->chunk[n->chunk].node = i;
        s->order[s->n_order++] = n->chunk;
    }
}

void spec_run_begin(stk_engine *e)
{
    struct eng_spec *s = e->spec;
    uint64_t grad = 2ull * e->cfg.chunk_elems;
    find_nodes(e);
    s->closed = false;
    s->casts_done = 0;
    s->sum_sq = 0;
    /* so many later gradients may lie in the GRAD arena while one waits for its state */
    s->patience = (uint32_t)(e->place.arena_bytes[PLAN_ARENA_GRAD] / ((grad + 4095) / 4096 * 4096)) / 2;
    for (uint32_t i = 0; !(e->run.parts & PLAN_RUN_UPDATE) && i < e->layout->n_chunks; i++)
        s->chunk[i].ahead = 0; /* nobody came for it */
    if (s->n_order == 0) return;
    if (!s->tried) pass_all(e);
    for (uint32_t i = 0; i < s->n_order; i++)
        if (s->chunk[s->order[i]].rest > 0) run_pass_early(e, s->chunk[s->order[i]].node);
}

/* Its state is not even on its way. */
static bool far_off(const stk_engine *e, uint32_t node)
{
    const struct plan *p = e->run.plan;
    const struct plan_node *n = &p->nodes[node];
    for (uint32_t d = 0; d < n->n_deps; d++) {
        uint32_t f = p->deps[n->first_dep + d];
        uint8_t state = e->run.node_state[f];
        if (p->nodes[f].kind == PLAN_FETCH && p->nodes[f].spec &&
            (state == RUN_WAITING || state == RUN_READY))
            return true;
    }
    return false;
}

/* One more gradient is at home. It may need the room of an earlier one, whose update waits. */
static void gradient_landed(stk_engine *e)
{
    struct eng_spec *s = e->spec;
    if (s->casts_done++ < s->patience || s->closed) return;
    uint32_t at = s->casts_done - 1 - s->patience;
    if (at >= s->n_order) return;
    uint32_t chunk = s->order[at], node = s->chunk[chunk].node;
    if (e->layout->chunks[chunk].home[CHUNK_GRAD] == CHUNK_NVME && far_off(e, node))
        run_pass_early(e, node);
}

/* The sum only grows: once it makes the clip factor less than 1, it stays so. */
static void gradient_summed(stk_engine *e, const struct plan_node *n)
{
    struct eng_spec *s = e->spec;
    const struct convert_sum *sum = &e->layout->chunks[n->chunk].sum;
    s->sum_sq += sum->sum_sq;
    double norm = sqrt(s->sum_sq) / e->loss_scale;
    if (sum->nonfinite > 0 || !isfinite(norm) || norm_clip_factor(norm, e->cfg.clip) < 1.0)
        close_step(e);
}

void spec_completed(stk_engine *e, uint32_t node)
{
    struct eng_spec *s = e->spec;
    const struct plan_node *n = node_of(e, node);
    if (s->n_order == 0) return;
    if (n->kind == PLAN_GRAD_CAST) gradient_summed(e, n);
    if (n->kind == (e->caps.host_in_place ? PLAN_GRAD_CAST : PLAN_GRAD_OUT) &&
        s->chunk[n->chunk].node != PLAN_NO)
        gradient_landed(e);
    if (n->kind != PLAN_VISIT && n->kind != PLAN_GRAD_CAST) return;
    if (--s->final_left == 0) close_step(e);
}

/* --- which nodes pass ------------------------------------------------------------------------- */

static bool commit_waits(stk_engine *e)
{
    return e->cfg.durable && durable_armed(e);
}

static bool visits_part_passes(stk_engine *e, const struct plan_node *n)
{
    struct eng_spec *s = e->spec;
    const struct spec_chunk *c = &s->chunk[n->chunk];
    if (n->for_next && n->optional) return c->made || (s->tried && s->final_left == 0);
    if (!n->spec) return false;
    switch ((enum plan_kind)n->kind) {
    case PLAN_FETCH: return e->run.node_state[c->node] == RUN_DONE || s->closed;
    case PLAN_WRITE_BACK: return !c->made;
    default: return s->closed || c->rest > 0 || commit_waits(e) || save_holds(e, n);
    }
}

/* The outcome of the step before, chunk by chunk. */
static bool update_part_passes(stk_engine *e, const struct plan_node *n)
{
    struct eng_spec *s = e->spec;
    struct spec_chunk *c = &s->chunk[n->chunk];
    bool undo = c->done && !s->accept;
    switch ((enum plan_kind)n->kind) {
    case PLAN_FETCH:
        if (n->state == CHUNK_GRAD) return !(s->apply && !(c->done && s->accept)) &&
                                           !(undo && at_home(e, n->chunk));
        if (!s->apply || c->done) return true;
        if (!(c->ahead & 1u << n->state)) return false;
        c->ahead = (uint8_t)(c->ahead & ~(1u << n->state));
        return true;
    case PLAN_UNDO: return !undo;
    case PLAN_UPDATE:
        c->fresh = false;
        if (s->apply && !c->done) return false;
        c->done = false; /* accepted */
        return true;
    case PLAN_DEVICE_UPDATE: return !s->apply; /* waited for the norm in any case */
    case PLAN_COMMIT: return !c->fresh || !update_splits(e, n->chunk);
    case PLAN_WRITE_BACK: return !c->fresh;
    default: return false;
    }
}

bool spec_passes(stk_engine *e, uint32_t node)
{
    const struct plan_node *n = node_of(e, node);
    if (n->chunk == PLAN_NO || e->run.plan != e->plan_train) return false;
    return n->part == PLAN_RUN_UPDATE ? update_part_passes(e, n) : visits_part_passes(e, n);
}

void spec_fetched(stk_engine *e, const struct plan_node *n)
{
    struct spec_chunk *c = &e->spec->chunk[n->chunk];
    if (n->for_next && n->optional) c->ahead = (uint8_t)(c->ahead | 1u << n->state);
}

void spec_updated(stk_engine *e, const struct plan_node *n)
{
    e->spec->chunk[n->chunk].fresh = true;
}

/* --- the speculative update ------------------------------------------------------------------- */

struct spec_walk { /* one slice */
    struct update_slice u;
    struct spec_slice *at;
    uint8_t *codes;
    struct adam_side *side;
    uint32_t side_cap, pieces; /* undo: pieces taken back so far */
};

static void walk_begin(stk_engine *e, const struct plan_node *n, uint32_t slice, uint32_t n_slices,
                       struct spec_walk *w)
{
    struct spec_chunk *c = &e->spec->chunk[n->chunk];
    uint32_t from = (uint32_t)((uint64_t)c->side_cap * slice / n_slices),
             to = (uint32_t)((uint64_t)c->side_cap * (slice + 1) / n_slices);
    memset(w, 0, sizeof *w);
    update_slice_fill(e, n, slice, n_slices, &w->u);
    w->codes = c->codes;
    if (!c->slices) return; /* state on NVMe: no list */
    w->at = &c->slices[slice];
    w->side = c->side + from;
    w->side_cap = to - from;
}

/* The list of a slice: for each piece an entry that says how many follow, and those. */
static void record_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                         uint32_t n)
{
    struct spec_walk *w = arg;
    struct adam_span s;
    uint32_t at;
    (void)tensor_elem;
    if (w->at->overflow || !update_span(&w->u, tensor, chunk_elem, n, &s, &at)) return;
    w->at->overflow = true;
    if (w->at->side_n == w->side_cap) return;
    struct adam_side *head = &w->side[w->at->side_n];
    struct adam_record r = { .code = w->codes + at,
                             .side = head + 1,
                             .side_cap = w->side_cap - w->at->side_n - 1 };
    if (!adam_step_recorded(w->u.e->adam, w->u.layout, &s, adam_coef_of(w->u.coef, tensor), &r)) return;
    w->at->overflow = false;
    w->at->pieces++;
    w->at->side_n += 1 + r.side_n;
    *head = (struct adam_side){ .elem = r.side_n };
}

static void undo_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                       uint32_t n)
{
    struct spec_walk *w = arg;
    struct adam_span s;
    uint32_t at;
    (void)tensor_elem;
    if (w->pieces == w->at->pieces || !update_span(&w->u, tensor, chunk_elem, n, &s, &at)) return;
    struct adam_record r = { .code = w->codes + at,
                             .side = w->side + 1,
                             .side_cap = w->side->elem,
                             .side_n = w->side->elem };
    adam_undo(w->u.e->adam, w->u.layout, &s, adam_coef_of(w->u.coef, tensor), &r);
    w->side += 1 + r.side_n;
    w->pieces++;
}

/* Update team. */
static void record_slice(void *arg, uint32_t slice, uint32_t n_slices)
{
    struct run_op *op = arg;
    stk_engine *e = op->e;
    const struct plan_node *n = node_of(e, op->node);
    const struct stk_chunk *c = &e->layout->chunks[n->chunk];
    struct spec_walk w;
    walk_begin(e, n, slice, n_slices, &w);
    w.u.coef = &e->spec->coef;
    if (c->home[CHUNK_OPT] == CHUNK_HOST) {
        *w.at = (struct spec_slice){ 0 };
        adam_pieces(e->layout, c, w.u.begin, w.u.end, w.u.coef, record_piece, &w);
    } else {
        if (c->home[CHUNK_PARAM] == CHUNK_HOST)
            memcpy(w.codes + 2ull * w.u.begin, w.u.param + 2ull * w.u.begin,
                   2ull * (w.u.end - w.u.begin));
        adam_pieces(e->layout, c, w.u.begin, w.u.end, w.u.coef, update_piece, &w.u);
    }
    update_model_team(e, n->bytes / n_slices);
}

/* Update team. */
static void undo_slice(void *arg, uint32_t slice, uint32_t n_slices)
{
    struct run_op *op = arg;
    stk_engine *e = op->e;
    const struct plan_node *n = node_of(e, op->node);
    const struct stk_chunk *c = &e->layout->chunks[n->chunk];
    struct spec_walk w;
    walk_begin(e, n, slice, n_slices, &w);
    w.u.coef = n->kind == PLAN_UNDO ? &e->spec->coef_made : &e->spec->coef;
    if (c->home[CHUNK_OPT] == CHUNK_HOST)
        adam_pieces(e->layout, c, w.u.begin, w.u.end, w.u.coef, undo_piece, &w);
    else
        memcpy(w.u.param + 2ull * w.u.begin, w.codes + 2ull * w.u.begin,
               2ull * (w.u.end - w.u.begin));
    update_model_team(e, n->bytes / n_slices);
}

static void finish(struct run_op *op)
{
    stk_engine *e = op->e;
    uint32_t node = op->node;
    run_op_give(e, PLAN_UPDATE_TEAM, op);
    run_complete(e, node);
    exec_post(e->lane, &e->pump_task);
}

/* A part of its list was too short: as it was, and left alone for some steps. */
static void overflow_undone(void *arg)
{
    struct run_op *op = arg;
    struct spec_chunk *c = &op->e->spec->chunk[node_of(op->e, op->node)->chunk];
    c->rest_next = c->rest_next == 0 ? 1 : c->rest_next * 2 < 64 ? c->rest_next * 2 : 64;
    c->rest = c->rest_next + 1; /* this step's end counts, too */
    op->e->spec->n_undone++;
    finish(op);
}

static void recorded(void *arg)
{
    struct run_op *op = arg;
    stk_engine *e = op->e;
    struct eng_spec *s = e->spec;
    const struct plan_node *n = node_of(e, op->node);
    struct spec_chunk *c = &s->chunk[n->chunk];
    struct stk_chunk *chunk = &e->layout->chunks[n->chunk];
    bool overflow = false;
    for (uint32_t i = 0; at_home(e, n->chunk) && i < op->job.n_slices; i++)
        overflow |= c->slices[i].overflow;
    if (overflow) {
        update_job(op, 1, undo_slice, overflow_undone);
        return;
    }
    c->rest_next /= 2;
    c->done = c->made = true;
    c->version_before = chunk->version;
    chunk->version = e->updates + 1;
    s->n_done++;
    finish(op);
}

bool spec_issue_update(stk_engine *e, uint32_t node)
{
    struct run_op *op = run_op_take(e, PLAN_UPDATE_TEAM, node);
    if (op) update_job(op, 1, record_slice, recorded);
    return op != NULL;
}

/* --- taking back ------------------------------------------------------------------------------ */

/* What was written of it is forgotten. False: the run has failed. */
static bool forget(stk_engine *e, uint32_t chunk)
{
    struct stk_chunk *c = &e->layout->chunks[chunk];
    struct spec_chunk *sc = &e->spec->chunk[chunk];
    struct stk_error err = { 0 };
    for (int s = CHUNK_PARAM; s <= CHUNK_OPT; s++) {
        if (c->extent[s] == CHUNK_NO_EXTENT) continue;
        if (store_forget(e->store, c->extent[s], c->version, &err) == STK_OK) continue;
        run_fail(e, &err);
        return false;
    }
    c->version = sc->version_before;
    sc->done = false;
    return true;
}

static void undone(void *arg)
{
    struct run_op *op = arg;
    forget(op->e, node_of(op->e, op->node)->chunk);
    finish(op);
}

bool spec_issue_undo(stk_engine *e, uint32_t node)
{
    const struct plan_node *n = node_of(e, node);
    if (e->layout->chunks[n->chunk].home[CHUNK_PARAM] == CHUNK_NVME) { /* nothing to compute */
        if (forget(e, n->chunk)) run_complete(e, node);
        return true;
    }
    struct run_op *op = run_op_take(e, PLAN_UPDATE_TEAM, node);
    if (op) update_job(op, 1, undo_slice, undone);
    return op != NULL;
}
