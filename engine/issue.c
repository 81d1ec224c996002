/* engine/issue.c - starts one node of a plan: a transfer, a copy, a cast, an update; its completion
 * goes back to run.c.
 *
 * Runs on the engine lane; only moves pointers: checksums, copies and arithmetic happen on the
 * store's lanes, streams and the update team. Must not know why a node is in the plan. Every
 * completion checks its status: an error ends the run with a sentence (run_fail). */
#include "engine/save.h"
#include "engine/spec.h"
#include "engine/twin.h"
#include "engine/update.h"
#include "gpu/ops.h"
#include <string.h>

static const struct plan_node *node_of(const stk_engine *e, uint32_t node)
{
    return &e->run.plan->nodes[node];
}

/* --- NVMe ------------------------------------------------------------------------------------- */

static const char *const state_name[CHUNK_STATE_N] = { "parameters", "optimizer state",
                                                       "gradient" };

static void store_done(struct store_op *s)
{
    struct run_op *op = s->owner;
    stk_engine *e = op->e;
    const struct plan_node *n = node_of(e, op->node);
    nvme_stats_end(e, s, n->kind == PLAN_FETCH, n->demand);
    if (s->status != STK_OK) {
        struct stk_error err = { 0 };
        const struct stk_block *b = &e->layout->blocks[n->block];
        stk_error_set(&err, s->status, s->error.os_errno, "%s of block %s, chunk %u: %s",
                      state_name[n->state], b->name, n->chunk, s->error.text);
        run_fail(e, &err);
    } else if (n->kind == PLAN_FETCH) {
        e->counts.nvme_read += n->bytes;
        if (n->state == CHUNK_PARAM && n->part == PLAN_RUN_VISITS && !n->for_next && !n->spec)
            e->counts.param_fetch += n->bytes;
        if (e->spec) spec_fetched(e, n);
    } else {
        e->counts.nvme_write += n->bytes;
    }
    uint32_t node = op->node, resource = n->resource;
    run_op_give(e, resource, op);
    run_complete(e, node);
    exec_post(e->lane, &e->pump_task);
}

static bool issue_store(stk_engine *e, uint32_t node, bool put)
{
    const struct plan_node *n = node_of(e, node);
    const struct run_pool *pool = &e->run.pool[n->resource];
    /* such writes may wait long for the drive; the others still find a place */
    if (put && n->rank >= PLAN_RANK_LATER && pool->in_flight + RUN_OPS_KEPT > pool->limit)
        return false;
    struct run_op *op = run_op_take(e, n->resource, node);
    if (!op) return false;
    struct stk_chunk *c = &e->layout->chunks[n->chunk];
    struct store_op *s = &op->store;
    s->extent = c->extent[n->state];
    s->done = store_done;
    s->owner = op;
    struct stk_error err = { 0 };
    stk_status st;
    if (put) {
        /* a forward visit will read the new parameters; gradients free what backward fills next */
        s->cls = n->state == CHUNK_OPT || n->spec ? IO_WRITE_BACK : IO_DEMAND;
        s->buf = eng_slot(e, e->run.plan, n->src_slot, n->src_offset_bytes);
        s->version = n->state == CHUNK_GRAD ? e->begun : c->version;
        s->keep = n->spec;
        s->summed = c->summed >> n->state & 1;
        if (s->summed) s->sum = c->checksum[n->state];
        c->summed &= (uint8_t)~(1u << n->state);
        if (n->state == CHUNK_GRAD) c->grad_version = e->begun;
        st = store_put(e->store, s, &err);
    } else {
        s->cls = n->demand ? IO_DEMAND : IO_PREFETCH;
        s->buf = eng_slot(e, e->run.plan, n->slot, n->slot_offset_bytes);
        s->version = n->state == CHUNK_GRAD ? c->grad_version : c->version;
        st = store_get(e->store, s, &err);
    }
    if (st != STK_OK) {
        run_op_give(e, n->resource, op);
        run_fail(e, &err);
    } else {
        nvme_stats_begin(e, n->kind == PLAN_FETCH);
    }
    return true;
}

/* --- activations on NVMe ---------------------------------------------------------------------- */

static void act_done(struct store_op *s)
{
    struct run_op *op = s->owner;
    stk_engine *e = op->e;
    const struct plan_node *n = node_of(e, op->node);
    bool in = n->kind == PLAN_ACT_IN;
    nvme_stats_end(e, s, in, n->demand);
    if (s->status != STK_OK) {
        struct stk_error err = { 0 };
        stk_error_set(&err, s->status, s->error.os_errno,
                      "activations of block %s (place %u), micro-batch %u, %s: %s",
                      e->layout->blocks[n->block].name, plan_act_place(&e->pin, n->act),
                      n->act / 2 % e->pin.n_micro, n->act & 1 ? "full set" : "boundary",
                      s->error.text);
        run_fail(e, &err);
    } else {
        *(in ? &e->counts.nvme_read : &e->counts.nvme_write) += n->bytes;
    }
    uint32_t node = op->node, resource = n->resource;
    run_op_give(e, resource, op);
    run_complete(e, node);
    exec_post(e->lane, &e->pump_task);
}

/* A fresh version each step: what a step before left, or nothing at all, is not taken for this one's.
 * Writes go before those that nothing waits for: they free what visits need. */
static bool issue_act(stk_engine *e, uint32_t node)
{
    const struct plan_node *n = node_of(e, node);
    struct run_op *op = run_op_take(e, n->resource, node);
    if (!op) return false;
    bool in = n->kind == PLAN_ACT_IN;
    struct store_op *s = &op->store;
    s->extent = e->act_extent[n->act];
    s->cls = in && !n->demand ? IO_PREFETCH : IO_DEMAND;
    s->buf = eng_slot(e, e->run.plan, in ? n->slot : n->src_slot, 0);
    s->version = e->begun;
    s->keep = s->summed = false;
    s->done = act_done;
    s->owner = op;
    struct stk_error err = { 0 };
    stk_status st = in ? store_get(e->store, s, &err) : store_put(e->store, s, &err);
    if (st != STK_OK) {
        run_op_give(e, n->resource, op);
        run_fail(e, &err);
    } else {
        nvme_stats_begin(e, in);
    }
    return true;
}

/* --- copies and casts on streams -------------------------------------------------------------- */

static void stream_done(void *arg)
{
    struct run_op *op = arg;
    stk_engine *e = op->e;
    const struct plan_node *n = node_of(e, op->node);
    struct stk_error err = { 0 };
    if (dev_status(e->dev, &err) != STK_OK) run_fail(e, &err);
    if (n->kind == PLAN_COPY_IN || n->kind == PLAN_HAND_OVER) {
        e->counts.copy_in += n->bytes;
        /* counted once: a parameter that came from NVMe was counted by its FETCH */
        if (n->src_slot == PLAN_NO || n->kind == PLAN_HAND_OVER) e->counts.param_fetch += n->bytes;
    } else if (n->kind == PLAN_LOAD) {
        e->counts.copy_in += n->bytes;
    } else if (n->kind == PLAN_GRAD_OUT || n->kind == PLAN_SAVE) {
        e->counts.copy_out += n->bytes;
    }
    uint32_t node = op->node, resource = n->resource;
    run_op_give(e, resource, op);
    run_complete(e, node);
    exec_post(e->lane, &e->pump_task);
}

/* After the work was queued with status st: asks to be told, or fails the run. */
static bool stream_finish(stk_engine *e, struct run_op *op, struct dev_stream *s, stk_status st,
                          struct stk_error *err)
{
    uint32_t resource = node_of(e, op->node)->resource;
    if (st == STK_OK) {
        exec_task_init(&op->task, stream_done, op);
        st = dev_notify(s, e->lane, &op->task, NULL, err);
    }
    if (st == STK_OK) return true;
    run_op_give(e, resource, op);
    if (st == STK_BUSY) return false;
    run_fail(e, err);
    return true;
}

static void *home_or_slot(stk_engine *e, uint32_t slot, uint64_t offset, uint32_t chunk,
                          enum chunk_state state)
{
    if (slot != PLAN_NO) return eng_slot(e, e->run.plan, slot, offset);
    const struct stk_chunk *c = &e->layout->chunks[chunk];
    void *home = c->home[state] == CHUNK_DEVICE ? c->device[state] : c->host[state];
    STK_ASSERT(home != NULL);
    return home;
}

/* A gradient that does not go to NVMe because the next update reads it where it was put. */
static void note_gradient(stk_engine *e, const struct plan_node *n, void *at)
{
    if (n->slot != PLAN_NO && e->run.plan->slots[n->slot].arena == PLAN_ARENA_UPDATE)
        e->layout->chunks[n->chunk].grad_at = at;
}

static bool issue_copy(stk_engine *e, uint32_t node)
{
    const struct plan_node *n = node_of(e, node);
    const struct pace_now now = run_pace(e);
    double paced = pace_copy(&e->pace, &now, n);
    if (paced > 0 && e->run.pool[n->resource].in_flight >= PACE_IN_FLIGHT) return false;
    struct run_op *op = run_op_take(e, n->resource, node);
    if (!op) return false;
    bool in = n->resource == PLAN_COPY_IN_LINK;
    bool activation = n->kind == PLAN_SAVE || n->kind == PLAN_LOAD;
    enum chunk_state state = n->kind == PLAN_GRAD_OUT ? CHUNK_GRAD : CHUNK_PARAM;
    void *src = activation ? eng_slot(e, e->run.plan, n->src_slot, n->src_offset_bytes)
                           : home_or_slot(e, n->src_slot, n->src_offset_bytes, n->chunk, state);
    void *dst = activation ? eng_slot(e, e->run.plan, n->slot, n->slot_offset_bytes)
                           : home_or_slot(e, n->slot, n->slot_offset_bytes, n->chunk, state);
    struct dev_stream *s = in ? e->copy_in : e->copy_out;
    if (n->kind == PLAN_GRAD_OUT) note_gradient(e, n, dst);
    struct stk_error err = { 0 };
    stk_status st = dev_copy_paced(s, dst, src, n->bytes, in ? DEV_TO_DEVICE : DEV_TO_HOST, paced, &err);
    e->counts.paced += paced > 0;
    return stream_finish(e, op, s, st, &err);
}

static bool issue_cast(stk_engine *e, uint32_t node)
{
    const struct plan_node *n = node_of(e, node);
    struct run_op *op = run_op_take(e, n->resource, node);
    if (!op) return false;
    struct stk_chunk *c = &e->layout->chunks[n->chunk];
    const uint8_t *acc = (const uint8_t *)own_accumulator(e, n->block);
    acc = acc ? acc + n->src_offset_bytes
              : eng_slot(e, e->run.plan, n->src_slot, n->src_offset_bytes);
    struct ops_grad_cast a = {
        .n = c->n_elems,
        .gt = e->cfg.dtype == STK_FP16 ? OPS_FP16 : OPS_BF16,
        .acc = (const float *)(const void *)acc,
        .out = home_or_slot(e, n->slot, n->slot_offset_bytes, n->chunk, CHUNK_GRAD),
        .scale = 1.0f,
        .sum = &c->sum,
    };
    struct stk_error err = { 0 };
    struct dev_stream *s = e->cast[n->chunk % ENG_CASTS];
    note_gradient(e, n, a.out);
    stk_status st = ops_grad_cast(s, &a, &err);
    return stream_finish(e, op, s, st, &err);
}

/* --- a parameter handed over -------------------------------------------------------------------- */

/* Of two ways to a parameter slot one is taken: from the UPDATE slot where the chunk was updated in this
 * run, else from its home. */
static bool hand_over_passes(const stk_engine *e, const struct plan_node *n)
{
    bool either = n->optional && !n->for_next;
    if (n->kind != PLAN_HAND_OVER && !either) return false;
    bool updated = (e->run.parts & PLAN_RUN_UPDATE) && (!e->spec || e->spec->chunk[n->chunk].fresh);
    return (n->kind == PLAN_HAND_OVER) != updated;
}

static void hand_over_slice(void *arg, uint32_t slice, uint32_t n_slices)
{
    struct run_op *op = arg;
    stk_engine *e = op->e;
    const struct plan_node *n = node_of(e, op->node);
    uint64_t pages = (n->bytes + 4095) / 4096, from = pages * slice / n_slices * 4096,
             to = pages * (slice + 1) / n_slices * 4096;
    if (to > n->bytes) to = n->bytes;
    memcpy(eng_slot(e, e->run.plan, n->slot, n->slot_offset_bytes + from),
           eng_slot(e, e->run.plan, n->src_slot, n->src_offset_bytes + from), to - from);
    update_model_team(e, 2 * n->bytes / n_slices); /* read and written */
}

static void hand_over_done(void *arg)
{
    struct run_op *op = arg;
    stk_engine *e = op->e;
    const struct plan_node *n = node_of(e, op->node);
    uint32_t node = op->node, resource = n->resource;
    e->counts.param_fetch += n->bytes;
    run_op_give(e, resource, op);
    run_complete(e, node);
    exec_post(e->lane, &e->pump_task);
}

/* A device that does not read host memory copies it over the link. */
static bool issue_hand_over(stk_engine *e, uint32_t node)
{
    const struct plan_node *n = node_of(e, node);
    if (n->resource == PLAN_COPY_IN_LINK) return issue_copy(e, node);
    struct run_op *op = run_op_take(e, n->resource, node);
    if (op) update_job(op, 1, hand_over_slice, hand_over_done);
    return op != NULL;
}

/* --- the update ------------------------------------------------------------------------------- */

bool update_span(const struct update_slice *u, uint32_t tensor, uint32_t chunk_elem, uint32_t n,
                 struct adam_span *s, uint32_t *at)
{
    uint32_t from = chunk_elem > u->begin ? chunk_elem : u->begin;
    uint32_t to = chunk_elem + n < u->end ? chunk_elem + n : u->end;
    if (from >= to) return false;
    uint64_t first = u->e->layout->dtype == CHUNK_BF16 ? 2 : 4; /* bytes of low or master */
    bool wide = u->moments.kind == CHUNK_MOMENTS_F32; /* else they are only in u->moments */
    *at = from;
    *s = (struct adam_span){
        .n = to - from,
        .param = u->param + 2ull * from,
        .low_or_master = u->opt + first * from,
        .exp_avg = wide ? (float *)(void *)u->moments.at[0] + from : NULL,
        .exp_avg_sq = wide ? (float *)(void *)u->moments.at[1] + from : NULL,
        .grad = u->grad + 2ull * from,
        .way = u->e->way,
    };
    return true;
}

static uint8_t *update_state(stk_engine *e, const struct plan_node *n, enum chunk_state s)
{
    const struct stk_chunk *c = &e->layout->chunks[n->chunk];
    if (c->home[s] == CHUNK_HOST) return c->host[s];
    /* a speculative update finds the gradient where its cast left it */
    if (s == CHUNK_GRAD && n->spec) return eng_slot(e, e->run.plan, n->src_slot, 0);
    if (n->slot == PLAN_NO) return NULL; /* UNDO: state that it does not touch */
    return eng_slot(e, e->run.plan, n->slot,
                    n->slot_offset_bytes + plan_update_offset(&e->pchunks[n->chunk], s));
}

/* Device sim: what a slice of so many bytes takes its member of the team. The whole team has the
 * rate, so each member has its part of it. */
void update_model_team(const stk_engine *e, uint64_t bytes)
{
    struct dev_model m;
    if (!e->caps.modelled_time) return;
    dev_model_read(e->dev, &m);
    if (!(m.update_bytes_per_s > 0)) return;
    double rate = m.update_bytes_per_s / e->cores.update;
    uint64_t ns = (uint64_t)((double)bytes / rate * 1e9);
    struct exec_need need = { { 0 } };
    if (m.dram_bytes_per_s > 0) need.part[EXEC_SHARE_DRAM] = rate / m.dram_bytes_per_s;
    exec_lane_busy_sharing(exec_lane_current(e->ex), ns, &need);
}

void update_slice_fill(stk_engine *e, const struct plan_node *n, uint32_t slice, uint32_t n_slices,
                       struct update_slice *u)
{
    const struct stk_chunk *c = &e->layout->chunks[n->chunk];
    /* whole cache lines of every array to each member */
    uint64_t groups = c->n_elems / CHUNK_ALIGN_ELEMS;
    *u = (struct update_slice){
        .e = e,
        .layout = e->layout->dtype == CHUNK_BF16 ? ADAM_BF16_SPLIT : ADAM_FP16,
        .coef = &e->coef,
        .param = update_state(e, n, CHUNK_PARAM),
        .opt = update_state(e, n, CHUNK_OPT),
        .grad = update_state(e, n, CHUNK_GRAD),
        .begin = (uint32_t)(groups * slice / n_slices) * CHUNK_ALIGN_ELEMS,
        .end = (uint32_t)(groups * (slice + 1) / n_slices) * CHUNK_ALIGN_ELEMS,
        .n_elems = c->n_elems,
        .dither = { e->cfg.moments_seed, n->spec ? e->updates + 1 : e->update_version, c->block,
                    c->first_elem },
    };
    if (u->opt) adam_moments_at(e->layout, c, u->opt, &u->moments);
}

void update_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem, uint32_t n)
{
    const struct update_slice *u = arg;
    struct adam_span s;
    uint32_t at;
    (void)tensor_elem;
    if (!update_span(u, tensor, chunk_elem, n, &s, &at)) return;
    if (u->param_out) s.param_out = u->param_out + 2ull * at;
    adam_narrow_run(u->e->adam, u->layout, &s, &u->moments, at, &u->dither, adam_coef_of(u->coef, tensor),
                    u->param_out != NULL);
}

bool update_splits(const stk_engine *e, uint32_t chunk)
{
    if (!e->second || !e->second[chunk]) return false;
    return !e->spec || plan_splits_now(&e->pin, chunk, e->spec->tried);
}

/* Its part of the checksums of what goes to NVMe. */
static void slice_sum(struct run_op *op, const struct plan_node *n, const struct update_slice *u)
{
    const stk_engine *e = op->e;
    const struct stk_chunk *c = &e->layout->chunks[n->chunk];
    uint32_t opt[CHUNK_OPT_ARRAYS_MAX], param = 2 * CHUNK_ALIGN_ELEMS;
    const uint32_t n_opt =
        chunk_opt_arrays(e->layout->dtype, e->layout->blocks[c->block].moments, opt);
    const uint64_t from = u->begin / CHUNK_ALIGN_ELEMS, to = u->end / CHUNK_ALIGN_ELEMS;
    for (enum chunk_state s = CHUNK_PARAM; s <= CHUNK_OPT; s++) {
        if (c->home[s] != CHUNK_NVME) continue;
        const uint8_t *base = s == CHUNK_PARAM ? u->param : u->opt;
        const uint32_t *array = s == CHUNK_PARAM ? &param : opt;
        const uint64_t bytes = chunk_bytes(e->layout, c, s);
        uint64_t at = 0;
        uint32_t parts = 0;
        for (uint32_t k = 0; k < (s == CHUNK_PARAM ? 1 : n_opt); k++) {
            const uint64_t offset = at + from * array[k];
            parts ^= store_sum_part(base + offset, (to - from) * array[k], offset, bytes);
            at += c->n_elems / CHUNK_ALIGN_ELEMS * array[k];
        }
        STK_ASSERT(at == bytes);
        atomic_fetch_xor_explicit(&op->parts[s], parts, memory_order_relaxed);
    }
}

/* `split`: UPDATE makes the new parameter in the block's second buffer, which becomes the first;
 * COMMIT makes the state, and the same parameter where the old one was. */
static void update_slice_run(void *arg, uint32_t slice, uint32_t n_slices)
{
    struct run_op *op = arg;
    stk_engine *e = op->e;
    const struct plan_node *n = node_of(e, op->node);
    struct update_slice u;
    update_slice_fill(e, n, slice, n_slices, &u);
    bool splits = update_splits(e, n->chunk);
    if (splits) {
        if (n->kind == PLAN_COMMIT) u.param = e->second[n->chunk];
        else u.param_out = e->second[n->chunk];
    }
    adam_pieces(e->layout, &e->layout->chunks[n->chunk], u.begin, u.end, u.coef, update_piece, &u);
    if (plan_sums(&e->pin)) slice_sum(op, n, &u);
    uint64_t rest = e->second && e->second[n->chunk] && !splits ? e->pchunks[n->chunk].bytes[CHUNK_OPT] : 0;
    update_model_team(e, (n->bytes + rest) / n_slices);
}

static void update_done(void *arg)
{
    struct run_op *op = arg;
    stk_engine *e = op->e;
    const struct plan_node *n = node_of(e, op->node);
    struct stk_chunk *c = &e->layout->chunks[n->chunk];
    c->version = e->update_version;
    c->grad_at = NULL; /* its slot is another chunk's next */
    c->summed = 0;
    for (enum chunk_state s = CHUNK_PARAM; plan_sums(&e->pin) && s <= CHUNK_OPT; s++) {
        if (c->home[s] != CHUNK_NVME) continue;
        c->summed |= (uint8_t)(1u << s);
        c->checksum[s] = store_sum(atomic_load_explicit(&op->parts[s], memory_order_relaxed),
                                   chunk_bytes(e->layout, c, s));
    }
    if (e->spec) spec_updated(e, n);
    if (n->kind == PLAN_UPDATE && update_splits(e, n->chunk)) {
        uint8_t *made = e->second[n->chunk];
        e->second[n->chunk] = c->host[CHUNK_PARAM];
        c->host[CHUNK_PARAM] = made;
    }
    uint32_t node = op->node, resource = n->resource;
    run_op_give(e, resource, op);
    run_complete(e, node);
    exec_post(e->lane, &e->pump_task);
}

static struct exec_team *team_of_node(const stk_engine *e, uint32_t node)
{
    return e->team[e->team_of ? e->team_of[node_of(e, node)->chunk] : 0];
}

static uint32_t team_members(const stk_engine *e, uint32_t node)
{
    return exec_team_members(team_of_node(e, node));
}

static void update_job_slices(struct run_op *op, uint32_t slices, void (*slice)(void *, uint32_t, uint32_t),
                              void (*done)(void *))
{
    stk_engine *e = op->e;
    exec_task_init(&op->task, done, op);
    op->job.fn = slice;
    op->job.arg = op;
    op->job.n_slices = slices;
    op->job.beside = true; /* what it depends on is complete, or it would not have been ready */
    op->job.done_lane = e->lane;
    op->job.done = &op->task;
    exec_team_run(team_of_node(e, op->node), &op->job);
}

void update_job(struct run_op *op, uint32_t each, void (*slice)(void *, uint32_t, uint32_t), void (*done)(void *))
{
    update_job_slices(op, each * team_members(op->e, op->node), slice, done);
}

static bool issue_update(stk_engine *e, uint32_t node)
{
    const struct pace_now now = run_pace(e);
    const uint32_t members = team_members(e, node), most = pace_team(&e->pace, &now, node_of(e, node), members);
    if (most < members && e->run.pool[PLAN_UPDATE_TEAM].in_flight >= e->cores.n_teams) return false;
    struct run_op *op = run_op_take(e, node_of(e, node)->resource, node);
    /* the simulation's time does not depend on it */
    uint32_t each = exec_kind_of(e->ex) == EXEC_THREADS ? ADAM_MEMBER_SLICES : 1;
    if (!op) return false;
    for (uint32_t s = 0; s < CHUNK_GRAD; s++) atomic_init(&op->parts[s], 0);
    update_job_slices(op, most < members ? most : each * members, update_slice_run, update_done);
    return true;
}

bool issue_passes(stk_engine *e, uint32_t node)
{
    return hand_over_passes(e, node_of(e, node)) || (e->spec && spec_passes(e, node));
}

bool issue_node(stk_engine *e, uint32_t node)
{
    if (issue_passes(e, node)) {
        run_complete(e, node);
        return true;
    }
    if (save_gates(e, node_of(e, node))) return false;
    switch ((enum plan_kind)node_of(e, node)->kind) {
    case PLAN_FETCH: return issue_store(e, node, false);
    case PLAN_WRITE_BACK: return issue_store(e, node, true);
    case PLAN_ACT_OUT:
    case PLAN_ACT_IN: return issue_act(e, node);
    case PLAN_HAND_OVER: return issue_hand_over(e, node);
    case PLAN_COPY_IN:
    case PLAN_GRAD_OUT:
    case PLAN_SAVE:
    case PLAN_LOAD: return issue_copy(e, node);
    case PLAN_GRAD_CAST: return issue_cast(e, node);
    case PLAN_UPDATE:
        return node_of(e, node)->spec ? spec_issue_update(e, node) : issue_update(e, node);
    case PLAN_COMMIT: return issue_update(e, node);
    case PLAN_DEVICE_UPDATE: return twin_issue_update(e, node);
    case PLAN_UNDO: return spec_issue_undo(e, node);
    case PLAN_NORM: norm_collect(e); run_complete(e, node); return true;
    case PLAN_JOIN: run_complete(e, node); return true;
    default: break;
    }
    /* GATHER and REDUCE need several ranks: plan_build does not emit them yet */
    STK_ASSERT(!"a node that this build cannot run");
    return true;
}
