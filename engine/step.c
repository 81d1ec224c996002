/* engine/step.c - a step as the application sees it: begin, visits in the engine's order, end;
 * flush; evaluation.
 *
 * Application's thread. Hands the plan to run.c and waits for its events. Owns the accounting of a
 * step (what was waited for, by cause). Must not touch chunks while a run is active (INV-4). */
#include "engine/durable.h"
#include "engine/save.h"
#include "engine/spec.h"
#include <math.h>
#include <string.h>

static void reset_accounting(stk_engine *e)
{
    memset(&e->counts, 0, sizeof e->counts);
    memset(&e->exposed, 0, sizeof e->exposed);
    nvme_stats_reset(e);
    save_stats_reset(e);
    e->step_begin_ns = exec_now_ns(e->ex);
    e->compute_begin_ns = dev_stream_busy_ns(e->compute);
}

static uint64_t *exposed_of(stk_engine *e, uint8_t kind)
{
    switch ((enum plan_kind)kind) {
    case PLAN_FETCH:
    case PLAN_ACT_IN:
    case PLAN_ACT_OUT:
    case PLAN_WRITE_BACK: return &e->exposed.nvme_ns;
    case PLAN_COPY_IN:
    case PLAN_HAND_OVER:
    case PLAN_GRAD_CAST:
    case PLAN_GRAD_OUT:
    case PLAN_SAVE:
    case PLAN_LOAD: return &e->exposed.copy_ns;
    case PLAN_UPDATE:
    case PLAN_JOIN:
    case PLAN_COMMIT:
    case PLAN_DEVICE_UPDATE:
    case PLAN_UNDO: return &e->exposed.update_ns;
    case PLAN_GATHER:
    case PLAN_REDUCE: return &e->exposed.gather_ns;
    default: return &e->exposed.queue_ns;
    }
}

stk_status stk_step_begin(stk_engine *e, const stk_step *s)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_READY) return eng_refuse_state(e, "stk_step_begin", "between steps");
    if (!place_trains(e))
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "stk_step_begin: every tensor is frozen: there is nothing to train");
    if (!isfinite(s->lr) || s->lr < 0)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "lr %g must be a finite number, 0 or above", s->lr);
    reset_accounting(e);
    STK_TRY(state_flush_staged(e)); /* what was filled before the first step */
    e->exposed.nvme_ns = exec_now_ns(e->ex) - e->step_begin_ns;
    e->lr = s->lr;
    e->begun++;
    e->state = ENG_STEP;
    if (e->cfg.own_order) {
        stk_status st = own_step_begin(e);
        if (st != STK_OK) e->state = ENG_FAILED; /* half begun: nothing can be built on it */
        return st;
    }
    spec_step_begin(e);
    run_start(e, e->plan_train, PLAN_RUN_VISITS | (e->pending ? PLAN_RUN_UPDATE : 0), PLAN_NO);
    return STK_OK;
}

/* Everything the client needs to know of visit `index` of the running plan. */
void step_fill_visit(stk_engine *e, const struct plan *p, uint32_t index, stk_visit *v)
{
    const struct plan_visit *pv = &p->visits[index];
    const struct stk_block *b = &e->layout->blocks[pv->block];
    bool backward = pv->dir == PLAN_BACKWARD;
    *v = (stk_visit){ .index = index,
                      .place = pv->place,
                      .block = pv->block,
                      .micro = pv->micro,
                      .dir = backward ? STK_BACKWARD : STK_FORWARD,
                      .eval = e->state == ENG_EVAL,
                      .recompute = pv->recompute,
                      .first_of_block = pv->first_of_block,
                      .last_of_block = pv->last_of_block,
                      .workspace = e->workspace,
                      .workspace_bytes = e->workspace_bytes,
                      .stream = e->compute,
                      .loss_scale = e->loss_scale };
    if (pv->param_slot != PLAN_NO)
        v->param = eng_slot(e, p, pv->param_slot, 0);
    else if (b->n_chunks > 0) {
        const struct stk_chunk *c = &e->layout->chunks[b->first_chunk];
        v->param = c->home[CHUNK_PARAM] == CHUNK_DEVICE ? c->device[CHUNK_PARAM] : c->host[CHUNK_PARAM];
    }
    if (backward) v->grad = own_accumulator(e, pv->block);
    if (backward && !v->grad && pv->acc_slot != PLAN_NO)
        v->grad = (float *)(void *)eng_slot(e, p, pv->acc_slot, 0);
    v->overwrite = v->grad && v->first_of_block && e->cfg.overwrite_grads && !e->cfg.own_order;
    if (pv->in_slot != PLAN_NO) v->in = eng_slot(e, p, pv->in_slot, 0);
    if (pv->out_slot != PLAN_NO) v->out = eng_slot(e, p, pv->out_slot, 0);
    if (pv->full_slot != PLAN_NO) v->full = eng_slot(e, p, pv->full_slot, 0);
    if (pv->flow_slot != PLAN_NO) v->flow = eng_slot(e, p, pv->flow_slot, 0);
}

stk_status step_wait_visit(stk_engine *e, uint32_t index)
{
    uint64_t t0 = exec_now_ns(e->ex), busy0 = dev_stream_busy_ns(e->compute);
    exec_event_reset(&e->visit_event);
    atomic_store(&e->asked_ns, t0);
    e->visit_cause = PLAN_VISIT; /* unless a cause is found: nobody's, as what the client takes */
    atomic_store(&e->stuck, false);
    atomic_store(&e->want, index + 1);
    exec_post(e->lane, &e->pump_task);
    STK_TRY(run_wait(e, &e->visit_event));
    /* what the stream still computed meanwhile was not exposed */
    uint64_t waited = exec_now_ns(e->ex) - t0, busy = dev_stream_busy_ns(e->compute) - busy0;
    *exposed_of(e, e->visit_cause) += waited > busy ? waited - busy : 0;
    if (waited > busy) trace_wait(e, index, e->visit_cause, t0 + busy, t0 + waited);
    return STK_OK;
}

/* What no visit writes: all of the block's vector, or with `overwrite` only what lies between its
 * tensors. Casts and the update read it as a part of their chunks. */
static stk_status clear_accumulator(stk_engine *e, const stk_visit *v)
{
    const struct stk_block *b = &e->layout->blocks[v->block];
    uint64_t at = 0;
    if (!v->overwrite) return dev_zero(e->compute, v->grad, b->elems_trainable * 4, &e->err);
    for (uint32_t i = 0; i <= b->n_tensors; i++) {
        const struct stk_tensor *t = &e->layout->tensors[b->first_tensor + i];
        const bool end = i == b->n_tensors || t->frozen;
        const uint64_t next = end ? b->elems_trainable : t->first_elem;
        if (next > at) STK_TRY(dev_zero(e->compute, v->grad + at, (next - at) * 4, &e->err));
        if (end) break;
        at = t->first_elem + t->n_elems;
    }
    return STK_OK;
}

stk_status stk_next(stk_engine *e, stk_visit *v)
{
    stk_error_clear(&e->err);
    if ((eng_state(e) != ENG_STEP && eng_state(e) != ENG_EVAL) || e->cfg.own_order)
        return eng_refuse_state(e, "stk_next",
                                "inside a step or an evaluation, in the engine's order");
    uint32_t index = e->asked;
    if (e->asked != e->given_back)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "stk_next: visit %u was not given back by stk_done", e->given_back);
    if (index >= e->run.plan->n_visits) return STK_END;
    STK_TRY(step_wait_visit(e, index));
    e->asked = index + 1;
    const struct plan *p = e->run.plan;
    step_fill_visit(e, p, index, v);
    return v->grad && v->first_of_block ? clear_accumulator(e, v) : STK_OK;
}

/* Engine lane: the stream has passed the visit's end. */
static void visit_done(void *arg)
{
    struct run_op *op = arg;
    stk_engine *e = op->e;
    struct eng_run *r = &e->run;
    struct stk_error err = { 0 };
    if (dev_status(e->dev, &err) != STK_OK) run_fail(e, &err);
    r->visits_in_flight--;
    if (r->active && r->plan->nodes[op->node].visit != r->hold_visit) run_complete(e, op->node);
    run_pump(e);
}

stk_status step_visit_queued(stk_engine *e, uint32_t index)
{
    struct run_op *op =
        e->own ? own_visit_op(e, index) : &e->visit_ops[index % ENG_VISITS_IN_FLIGHT];
    op->e = e;
    op->node = e->run.plan->visits[index].node;
    exec_task_init(&op->task, visit_done, op);
    return dev_notify(e->compute, e->lane, &op->task, NULL, &e->err);
}

stk_status stk_done(stk_engine *e, const stk_visit *v)
{
    stk_error_clear(&e->err);
    if ((eng_state(e) != ENG_STEP && eng_state(e) != ENG_EVAL) || e->cfg.own_order)
        return eng_refuse_state(e, "stk_done", "after stk_next");
    if (v->index != e->given_back || e->asked != v->index + 1)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "stk_done: visit %u was not the one handed out", v->index);
    e->given_back++;
    return step_visit_queued(e, v->index);
}

/* Idle time of the compute stream, shared out by what was waited for; what nobody waited for is the
 * client's and the queue's. */
static void account(stk_engine *e, uint64_t tail_ns, uint8_t tail_kind, stk_step_stats *s)
{
    uint64_t now = exec_now_ns(e->ex);
    s->step_ns = now - e->step_begin_ns;
    s->compute_ns = dev_stream_busy_ns(e->compute) - e->compute_begin_ns;
    if (s->compute_ns > s->step_ns) s->compute_ns = s->step_ns;
    *exposed_of(e, tail_kind) += tail_ns;
    uint64_t idle = s->step_ns - s->compute_ns;
    e->exposed.queue_ns = 0; /* waiting for our own queue is compute, counted there */
    uint64_t waited =
        e->exposed.nvme_ns + e->exposed.copy_ns + e->exposed.update_ns + e->exposed.gather_ns;
    double f = waited > idle && waited > 0 ? (double)idle / (double)waited : 1.0;
    s->exposed.nvme_ns = (uint64_t)((double)e->exposed.nvme_ns * f);
    s->exposed.copy_ns = (uint64_t)((double)e->exposed.copy_ns * f);
    s->exposed.update_ns = (uint64_t)((double)e->exposed.update_ns * f);
    s->exposed.gather_ns = (uint64_t)((double)e->exposed.gather_ns * f);
    uint64_t sum =
        s->exposed.nvme_ns + s->exposed.copy_ns + s->exposed.update_ns + s->exposed.gather_ns;
    s->exposed.queue_ns = idle > sum ? idle - sum : 0;
}

static void fill_stats(stk_engine *e, double scale_used, bool applied, stk_step_stats *s)
{
    s->step = e->begun;
    s->updates = e->updates;
    s->grad_norm = e->norm;
    s->clip_factor = e->clip_factor;
    s->loss_scale = scale_used;
    s->skipped = !applied;
    s->skipped_total = e->skipped_total;
    s->skipped_in_a_row = e->skipped_row;
    s->nvme_read_bytes = e->counts.nvme_read;
    s->nvme_write_bytes = e->counts.nvme_write;
    s->copy_in_bytes = e->counts.copy_in;
    s->copy_out_bytes = e->counts.copy_out;
    s->param_fetch_bytes = e->counts.param_fetch;
    nvme_stats_fill(e, s);
    s->durable_step = atomic_load(&e->durable.newest_step);
    save_stats_fill(e, s);
    if (!e->spec) return;
    s->spec_chunks = e->spec->n_done;
    s->spec_undone = e->spec->n_undone;
}

stk_status step_finish(stk_engine *e, stk_step_stats *stats)
{
    STK_TRY(run_wait(e, &e->run_event));
    uint64_t now = exec_now_ns(e->ex), last = e->run.last_visit_done_ns;
    stk_step_stats s = { 0 };
    double scale = e->loss_scale;
    uint8_t tail = plan_wait_kind(e->run.plan, e->run.last_node, e->run.end_ns, (double)last,
                                  PLAN_GRAD_CAST);
    if (last && now > last) trace_wait(e, PLAN_NO, tail, last, now);
    trace_step(e, e->step_begin_ns, now);
    bool applied = norm_decide(e), undo = spec_decided(e, applied);
    e->pending = applied || undo;
    account(e, last && now > last ? now - last : 0, tail, &s);
    fill_stats(e, scale, applied, &s);
    e->asked = e->given_back = 0;
    e->state = ENG_READY;
    if (stats) *stats = s;
    if (!applied && e->skipped_row >= e->cfg.skip_limit)
        return stk_error_set(
            &e->err, STK_ERR_NONFINITE, 0,
            "%u steps in a row had a non-finite gradient and were skipped; the state is unchanged: "
            "lower the learning rate, look at the data, or use bf16",
            (unsigned)e->skipped_row);
    STK_TRY(durable_report(e));
    return save_report(e);
}

stk_status stk_step_end(stk_engine *e, stk_step_stats *stats)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_STEP) return eng_refuse_state(e, "stk_step_end", "inside a step");
    if (e->cfg.own_order) {
        STK_TRY(own_step_end(e));
        stk_status st = step_finish(e, stats);
        if (stats) stats->departures = own_departures(e);
        return st;
    }
    if (e->given_back < e->plan_train->n_visits)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "stk_step_end: %u of %u visits were given back", e->given_back,
                             e->plan_train->n_visits);
    return step_finish(e, stats);
}

stk_status stk_flush(stk_engine *e)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_READY) return eng_refuse_state(e, "stk_flush", "between steps");
    STK_TRY(state_flush_staged(e));
    if (!e->pending) return STK_OK;
    STK_TRY(state_keep_gradients(e));
    run_start(e, e->plan_train, PLAN_RUN_UPDATE, PLAN_NO);
    STK_TRY(run_wait(e, &e->run_event));
    e->pending = false;
    return STK_OK;
}

stk_status stk_eval_begin(stk_engine *e)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_READY) return eng_refuse_state(e, "stk_eval_begin", "between steps");
    STK_TRY(stk_flush(e));
    if (!e->plan_eval) return eng_refuse_state(e, "stk_eval_begin", "in the engine's order only");
    e->state = ENG_EVAL;
    run_start(e, e->plan_eval, PLAN_RUN_VISITS, PLAN_NO);
    return STK_OK;
}

stk_status stk_eval_end(stk_engine *e)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_EVAL) return eng_refuse_state(e, "stk_eval_end", "inside an evaluation");
    if (e->given_back < e->plan_eval->n_visits)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "stk_eval_end: %u of %u visits were given back", e->given_back,
                             e->plan_eval->n_visits);
    STK_TRY(run_wait(e, &e->run_event));
    e->asked = e->given_back = 0;
    e->state = ENG_READY;
    return STK_OK;
}
