/* engine/own.c - clients that keep their own order: stk_acquire, stk_release, stk_grad_add.
 *
 * Application's thread. The first step is RECORDED: each acquire is served on demand, the pending
 * update runs before it. From the second step on the recorded visits are a plan like any other and
 * are prefetched. An acquire that departs from it (other block, direction or micro-batch, too many
 * visits, or a block that could only come when a held one goes) ends the following of the plan for
 * this step: the rest is served on demand. Never wrong, counted, reported.
 *
 * Gradients: every trainable block has an accumulator of its own for the whole step (4
 * bytes/param); all are final at stk_step_end. Owns that memory and the slots for blocks served on
 * demand. Needs a device that reads host memory in place. */
#include "engine/state.h"
#include "base/sys.h"
#include "gpu/ops.h"
#include <string.h>

struct own_held {
    uint32_t block;
    bool used, planned;
    uint32_t index;
    uint8_t *slot;
    uint64_t serial;
};

struct own_order {
    float **acc;                    /* of each block; NULL: frozen */
    struct own_held *held;          /* own_held_max */
    uint8_t **demand;               /* own_held_max slots of the largest block; NULL when parameters
                                     * are at host homes */
    struct plan_own_visit *record;  /* own_visits_max */
    uint32_t n_record;
    bool following, recording;
    uint32_t at;                    /* next visit of the plan */
    uint64_t departures;
    uint64_t serial;                /* of visits: tells a released one from the one that has its
                                     * room now */
    struct run_op *ops;             /* a completion for each visit of a step */
    struct exec_task abandon_task, end_task;
};


static uint64_t largest_block(const stk_engine *e)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < e->layout->n_blocks; i++)
        if (e->layout->blocks[i].elems * 2 > most) most = e->layout->blocks[i].elems * 2;
    return round_page(most);
}

uint64_t own_bytes(const stk_engine *e, bool accumulators)
{
    uint64_t sum = 0;
    if (!e->cfg.own_order) return 0;
    if (!accumulators)
        return e->pchunks[0].home[CHUNK_PARAM] == CHUNK_NVME
                   ? e->cfg.own_held_max * largest_block(e)
                   : 0;
    for (uint32_t i = 0; i < e->layout->n_blocks; i++)
        sum += round_page(e->layout->blocks[i].elems_trainable * 4);
    return sum;
}

uint64_t own_cache_bytes(const stk_engine *e, uint32_t prefetch)
{
    return ((uint64_t)e->cfg.own_held_max + prefetch + 1) * largest_block(e);
}

stk_status own_alloc(stk_engine *e)
{
    if (!e->cfg.own_order) return STK_OK;
    struct own_order *o = e->own = sys_calloc(1, sizeof *o);
    if (!o) return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for own order");
    uint32_t held = e->cfg.own_held_max, visits = e->cfg.own_visits_max;
    o->acc = sys_calloc(e->layout->n_blocks, sizeof *o->acc);
    o->held = sys_calloc(held, sizeof *o->held);
    o->demand = sys_calloc(held, sizeof *o->demand);
    o->record = sys_calloc(visits, sizeof *o->record);
    o->ops = sys_calloc(visits, sizeof *o->ops);
    if (!o->acc || !o->held || !o->demand || !o->record || !o->ops)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for own order");
    uint8_t *p = e->own_base;
    for (uint32_t i = 0; i < e->layout->n_blocks; i++) {
        uint64_t bytes = e->layout->blocks[i].elems_trainable * 4;
        if (bytes) o->acc[i] = (float *)(void *)p;
        p += round_page(bytes);
    }
    bool nvme = own_bytes(e, false) > 0;
    for (uint32_t i = 0; nvme && i < held; i++) o->demand[i] = p + i * largest_block(e);
    o->recording = true;
    return STK_OK;
}

void own_free(stk_engine *e)
{
    struct own_order *o = e->own;
    if (!o) return;
    sys_free(o->acc);
    sys_free(o->held);
    sys_free(o->demand);
    sys_free(o->record);
    sys_free(o->ops);
    sys_free(o);
    e->own = NULL;
}

float *own_accumulator(const stk_engine *e, uint32_t block)
{
    return e->own ? e->own->acc[block] : NULL;
}
struct run_op *own_visit_op(const stk_engine *e, uint32_t index) { return &e->own->ops[index]; }
uint64_t own_departures(const stk_engine *e) { return e->own ? e->own->departures : 0; }

/* --- the recorded order becomes a plan -------------------------------------------------------- */

static stk_status adopt_plan(stk_engine *e)
{
    struct own_order *o = e->own;
    struct plan_input in = e->pin;
    in.own = o->record;
    in.n_own = o->n_record;
    STK_TRY(plan_build(&in, &e->plan_own, NULL, &e->err));
    STK_TRY(plan_check(&in, e->plan_own, &e->err));
    run_free(e);
    uint32_t n = e->plan_own->n_nodes > e->plan_train->n_nodes ? e->plan_own->n_nodes
                                                               : e->plan_train->n_nodes;
    STK_TRY(run_alloc(e, n));
    return trace_alloc(e, n);
}

static stk_status clear_accumulators(stk_engine *e)
{
    for (uint32_t i = 0; i < e->layout->n_blocks; i++)
        if (e->own->acc[i])
            STK_TRY(dev_zero(e->compute, e->own->acc[i], e->layout->blocks[i].elems_trainable * 4,
                             &e->err));
    return dev_sync(e->compute, &e->err);
}

stk_status own_step_begin(stk_engine *e)
{
    struct own_order *o = e->own;
    bool update = e->pending;
    o->departures = 0;
    o->at = 0;
    if (o->recording && o->n_record > 0 && !e->plan_own) STK_TRY(adopt_plan(e));
    o->recording = !e->plan_own;
    o->following = !o->recording;
    if (o->recording) o->n_record = 0;
    if (o->recording && update) {
        run_start(e, e->plan_train, PLAN_RUN_UPDATE, PLAN_NO);
        STK_TRY(run_wait(e, &e->run_event));
        e->pending = false;
    }
    for (uint32_t i = 0; i < e->layout->n_tensors; i++) e->layout->tensors[i].got_gradient = false;
    STK_TRY(clear_accumulators(e));
    if (o->following)
        run_start(e, e->plan_own, PLAN_RUN_VISITS | (update ? PLAN_RUN_UPDATE : 0),
                  e->plan_own->n_visits - 1);
    return STK_OK;
}

/* --- leaving the plan ------------------------------------------------------------------------- */

/* Engine lane: visits that will not come count as made; the last one is held until the step
 * ends. */
static void abandon_visits(void *engine)
{
    stk_engine *e = engine;
    run_abandon(e, e->own->at);
    run_pump(e);
}

static stk_status depart(stk_engine *e)
{
    struct own_order *o = e->own;
    o->following = false;
    /* what is served on demand must be new */
    STK_TRY(run_wait(e, &e->update_event));
    exec_task_init(&o->abandon_task, abandon_visits, e);
    exec_post(e->lane, &o->abandon_task);
    return STK_OK;
}

static stk_status serve_on_demand(stk_engine *e, uint32_t block, struct own_held *h, uint32_t slot)
{
    const struct stk_block *b = &e->layout->blocks[block];
    h->planned = false;
    h->slot = NULL;
    if (b->n_chunks == 0) return STK_OK;
    if (!e->own->demand[slot]) {
        h->slot = e->layout->chunks[b->first_chunk].host[CHUNK_PARAM];
        return STK_OK;
    }
    h->slot = e->own->demand[slot];
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        const struct stk_chunk *c = &e->layout->chunks[b->first_chunk + i];
        STK_TRY(state_fetch_param(e, c->id, h->slot + c->first_elem * 2));
    }
    return STK_OK;
}

static uint32_t place_of(const stk_engine *e, uint32_t block)
{
    for (uint32_t i = 0; i < e->n_places; i++)
        if (e->places[i].block == block) return i;
    return 0;
}

static void fill_demand_visit(stk_engine *e, uint32_t block, stk_dir dir, uint32_t micro,
                              const struct own_held *h, stk_visit *v)
{
    *v = (stk_visit){ .index = UINT32_MAX,
                      .place = place_of(e, block),
                      .block = block,
                      .micro = micro,
                      .dir = dir,
                      .param = h->slot,
                      .workspace = e->workspace,
                      .workspace_bytes = e->workspace_bytes,
                      .stream = e->compute,
                      .loss_scale = e->loss_scale };
    if (dir == STK_BACKWARD) v->grad = e->own->acc[block];
}

/* True: visit `at` of the plan is this one and was handed out. */
static stk_status follow(stk_engine *e, uint32_t block, stk_dir dir, uint32_t micro, bool *ok)
{
    struct own_order *o = e->own;
    *ok = false;
    if (!o->following) return STK_OK;
    const struct plan *p = e->plan_own;
    const struct plan_visit *pv = o->at < p->n_visits ? &p->visits[o->at] : NULL;
    bool same = pv && pv->block == block && pv->micro == micro &&
                (pv->dir == PLAN_BACKWARD) == (dir == STK_BACKWARD);
    if (same) {
        STK_TRY(step_wait_visit(e, o->at));
        if (!atomic_load(&e->stuck)) {
            o->at++;
            *ok = true;
            return STK_OK;
        }
    }
    return depart(e);
}

stk_status stk_acquire(stk_engine *e, uint32_t block, stk_dir dir, uint32_t micro, stk_visit *v)
{
    stk_error_clear(&e->err);
    struct own_order *o = e->own;
    if (!o || eng_state(e) != ENG_STEP)
        return eng_refuse_state(e, "stk_acquire", "inside a step of an engine with own_order");
    if (block >= e->layout->n_blocks)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0, "stk_acquire: block %u; there are %u",
                             block, e->layout->n_blocks);
    if (micro >= e->cfg.micro_batches)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "stk_acquire: micro-batch %u; micro_batches is %u", micro,
                             e->cfg.micro_batches);
    uint32_t slot = 0;
    while (slot < e->cfg.own_held_max && o->held[slot].used) slot++;
    if (slot == e->cfg.own_held_max)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "stk_acquire of block %s: %u blocks are held already, own_held_max "
                             "allows no more: release one first",
                             e->layout->blocks[block].name, slot);
    if (o->recording && o->n_record == e->cfg.own_visits_max)
        return stk_error_set(
            &e->err, STK_ERR_STATE, 0,
            "stk_acquire of block %s: own_visits_max (%u) visits were made in this step",
            e->layout->blocks[block].name, e->cfg.own_visits_max);
    struct own_held *h = &o->held[slot];
    bool planned;
    STK_TRY(follow(e, block, dir, micro, &planned));
    if (planned) {
        *h = (struct own_held){ .block = block, .used = true, .planned = true, .index = o->at - 1 };
        atomic_fetch_add(&e->held_visits, 1);
        step_fill_visit(e, e->plan_own, h->index, v);
    } else {
        if (!o->recording) o->departures++;
        STK_TRY(serve_on_demand(e, block, h, slot));
        h->used = true;
        h->block = block;
        fill_demand_visit(e, block, dir, micro, h, v);
    }
    v->priv[0] = slot + 1;
    v->priv[1] = h->serial = ++o->serial;
    if (o->recording)
        o->record[o->n_record++] =
            (struct plan_own_visit){ place_of(e, block),
                                     dir == STK_BACKWARD ? PLAN_BACKWARD : PLAN_FORWARD, micro };
    return STK_OK;
}

stk_status stk_release(stk_engine *e, const stk_visit *v)
{
    stk_error_clear(&e->err);
    struct own_order *o = e->own;
    uint32_t slot = (uint32_t)v->priv[0] - 1;
    if (!o || eng_state(e) != ENG_STEP || v->priv[0] == 0 || slot >= e->cfg.own_held_max ||
        !o->held[slot].used || o->held[slot].serial != v->priv[1])
        return stk_error_set(&e->err, STK_ERR_STATE, 0, "stk_release: this visit is not held");
    struct own_held *h = &o->held[slot];
    const struct stk_block *b = &e->layout->blocks[h->block];
    if (v->dir == STK_BACKWARD)
        for (uint32_t i = 0; i < b->n_tensors; i++)
            e->layout->tensors[b->first_tensor + i].got_gradient = true;
    h->used = false;
    if (!h->planned) return STK_OK;
    atomic_fetch_sub(&e->held_visits, 1);
    return step_visit_queued(e, h->index);
}

stk_status stk_grad_add(stk_engine *e, uint32_t tensor, uint64_t first, uint64_t n,
                        const void *data, stk_dtype dtype)
{
    stk_error_clear(&e->err);
    if (!e->own || eng_state(e) != ENG_STEP)
        return eng_refuse_state(e, "stk_grad_add", "inside a step of an engine with own_order");
    if (tensor >= e->n_tensors)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0, "stk_grad_add: tensor %u; there are %u",
                             tensor, e->n_tensors);
    struct stk_tensor *t = &e->layout->tensors[e->tensor_of[tensor]];
    if (t->frozen)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0, "stk_grad_add: %s is frozen", t->name);
    if (first > t->n_elems || n > t->n_elems - first)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "stk_grad_add: %llu elements from %llu of %s, which has %llu",
                             (unsigned long long)n, (unsigned long long)first, t->name,
                             (unsigned long long)t->n_elems);
    static const enum ops_dtype types[] = { OPS_BF16, OPS_FP16, OPS_F32 };
    t->got_gradient = true;
    STK_TRY(ops_acc_add(e->compute, n, e->own->acc[t->block] + t->first_elem + first, data,
                        types[dtype], &e->err));
    return dev_sync(e->compute, &e->err);
}

/* --- end of a step ---------------------------------------------------------------------------- */

static void end_hold(void *engine)
{
    stk_engine *e = engine;
    run_release_hold(e);
    run_pump(e);
}

stk_status own_step_end(stk_engine *e)
{
    struct own_order *o = e->own;
    for (uint32_t i = 0; i < e->cfg.own_held_max; i++)
        if (o->held[i].used)
            return stk_error_set(&e->err, STK_ERR_STATE, 0,
                                 "stk_step_end: block %s is still held: release it first",
                                 e->layout->blocks[o->held[i].block].name);
    STK_TRY(dev_sync(e->compute, &e->err));
    if (o->recording) {
        run_start(e, e->plan_train, PLAN_RUN_VISITS, PLAN_NO);
    } else {
        if (o->following && o->at < e->plan_own->n_visits) STK_TRY(depart(e));
        exec_task_init(&o->end_task, end_hold, e);
        exec_post(e->lane, &o->end_task);
        /* the update that ran under this step used the old marks */
        STK_TRY(run_wait(e, &e->update_event));
    }
    STK_TRY(run_wait(e, &e->run_event));
    for (uint32_t i = 0; i < e->layout->n_tensors; i++)
        e->layout->tensors[i].touched = e->layout->tensors[i].got_gradient;
    return STK_OK;
}
