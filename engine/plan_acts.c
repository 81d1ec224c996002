/* engine/plan_acts.c - slots of one visit beside its parameters: boundaries, full sets, gradient
 * flow, accumulator.
 *
 * Owns: which activation of which micro-batch lies where. Must not know: parameters, the update.
 * Thread: the one that builds. Three calls around each visit: before (everything it needs gets a
 * slot, what was offloaded is loaded), ahead (loads for later visits where there is room), after
 * (what it leaves is offloaded, dropped or cast). */
#include "engine/plan_impl.h"

static uint32_t cell(const struct plan_builder *b, uint32_t place, uint32_t micro)
{
    return place * b->in->n_micro + micro;
}

/* HOST means something only where the device has memory of its own, and only for what a backward
 * visit will read. In an own order the same position may be visited again at any time: HOST is KEEP
 * there. */
static bool offloads(const struct plan_builder *b, uint32_t place)
{
    return !b->in->in_place && !b->in->own && b->in->mode == PLAN_TRAIN &&
           place < b->in->n_places && b->in->places[place].act == PLAN_ACT_HOST;
}

static uint32_t act_slot(struct plan_builder *b, uint32_t block, uint64_t bytes)
{
    return plan_slot_must(b, PLAN_ARENA_ACT, bytes, block, PLAN_NO);
}

static uint32_t move(struct plan_builder *b, enum plan_kind kind, uint32_t block, uint32_t from,
                     uint32_t to, uint64_t bytes)
{
    struct plan_node *x = plan_node_begin(b, kind, PLAN_RUN_VISITS);
    x->block = block;
    x->slot = to;
    x->src_slot = from;
    x->bytes = bytes;
    plan_node_deps(b, b->slot_state[from].users);
    plan_node_deps(b, b->slot_state[to].before);
    plan_node_deps(b, b->slot_state[to].users);
    uint32_t node = plan_node_end(b);
    plan_slot_use(b, from, node, true);
    plan_slot_use(b, to, node, true);
    return node;
}

/* Device slot -> SAVE arena; the device slot is free then. `saved` may hold a slot from an earlier
 * round. */
static void save(struct plan_builder *b, uint32_t block, uint32_t *slot, uint32_t *saved,
                 uint64_t bytes)
{
    if (*slot == PLAN_NO) return;
    if (*saved == PLAN_NO) *saved = plan_slot_must(b, PLAN_ARENA_SAVE, bytes, block, PLAN_NO);
    if (b->status != STK_OK) return;
    move(b, PLAN_SAVE, block, *slot, *saved, bytes);
    plan_slot_retire(b, *slot);
    *slot = PLAN_NO;
}

/* The way back. False: no room (and not must). */
static bool load(struct plan_builder *b, uint32_t block, uint32_t *slot, uint32_t *saved,
                 uint64_t bytes, bool must)
{
    if (*saved == PLAN_NO || *slot != PLAN_NO) return true;
    *slot = must ? act_slot(b, block, bytes)
                 : plan_slot_new(b, PLAN_ARENA_ACT, bytes, PLAN_NO, PLAN_NO);
    if (*slot == PLAN_NO) return false;
    move(b, PLAN_LOAD, block, *saved, *slot, bytes);
    plan_slot_retire(b, *saved);
    *saved = PLAN_NO;
    return true;
}

static bool load_visit(struct plan_builder *b, const struct plan_visit *v, bool must)
{
    const struct plan_place_in *x = &b->in->places[v->place];
    uint32_t c = cell(b, v->place, v->micro);
    return load(b, v->block, &b->bound[c], &b->bound_saved[c], x->in_bytes, must) &&
           load(b, v->block, &b->full[c], &b->full_saved[c], x->full_bytes, must);
}

static void accumulator_before(struct plan_builder *b, struct plan_visit *v)
{
    uint64_t bytes = b->in->blocks[v->block].acc_bytes;
    uint32_t *slot = &b->acc_slot[v->block], *saved = &b->acc_saved[v->block];
    if (bytes == 0) return;
    if (*slot == PLAN_NO) {
        *slot = plan_slot_must(b, PLAN_ARENA_ACC, bytes, v->block, PLAN_NO);
        if (*saved != PLAN_NO && b->status == STK_OK)
            move(b, PLAN_LOAD, v->block, *saved, *slot, bytes);
    }
    v->acc_slot = *slot;
}

void plan_acts_before(struct plan_builder *b, uint32_t visit)
{
    struct plan_visit *v = &b->p->visits[visit];
    const struct plan_place_in *x = &b->in->places[v->place], *next = x + 1;
    uint32_t c = cell(b, v->place, v->micro), out = cell(b, v->place + 1, v->micro);
    if (v->dir == PLAN_BACKWARD) {
        load_visit(b, v, true);
        accumulator_before(b, v);
        if (b->flow_bytes && b->flow[v->micro] == PLAN_NO)
            b->flow[v->micro] = act_slot(b, v->block, b->flow_bytes);
        v->flow_slot = b->flow[v->micro];
    } else if (plan_has_input(b->in, v->place + 1)) {
        if (b->bound[out] == PLAN_NO) b->bound[out] = act_slot(b, v->block, next->in_bytes);
        v->out_slot = b->bound[out];
    }
    if (plan_has_input(b->in, v->place)) v->in_slot = b->bound[c];
    if (x->full_bytes && b->full[c] == PLAN_NO) b->full[c] = act_slot(b, v->block, x->full_bytes);
    v->full_slot = b->full[c];
}

void plan_acts_ahead(struct plan_builder *b, uint32_t visit)
{
    uint32_t last = b->use + b->tuning.load_ahead;
    for (uint32_t i = visit + 1; i < b->p->n_visits && b->use_of[i] <= last; i++) {
        const struct plan_visit *v = &b->p->visits[i];
        bool fused = b->in->places[v->place].fused;
        if (v->dir == PLAN_FORWARD || !offloads(b, v->place)) continue;
        if (!b->forward_done[cell(b, v->place - (fused && v->place), v->micro)])
            return; /* not even written yet */
        if (!load_visit(b, v, false)) return;
    }
}

static void retire(struct plan_builder *b, uint32_t *slot)
{
    plan_slot_retire(b, *slot);
    *slot = PLAN_NO;
}

static void forward_after(struct plan_builder *b, const struct plan_visit *v)
{
    const struct plan_place_in *x = &b->in->places[v->place];
    uint32_t c = cell(b, v->place, v->micro), out = cell(b, v->place + 1, v->micro);
    b->forward_done[c] = true;
    if (b->in->mode == PLAN_EVAL) {
        retire(b, &b->bound[c]);
        retire(b, &b->full[c]);
        return;
    }
    if (x->act == PLAN_ACT_RECOMPUTE) retire(b, &b->full[c]);
    if (offloads(b, v->place)) {
        save(b, v->block, &b->bound[c], &b->bound_saved[c], x->in_bytes);
        save(b, v->block, &b->full[c], &b->full_saved[c], x->full_bytes);
    }
    if (offloads(b, v->place + 1) && x[1].fused &&
        plan_has_input(b->in, v->place + 1)) /* nobody reads it before backward */
        save(b, x[1].block, &b->bound[out], &b->bound_saved[out], x[1].in_bytes);
}

static void backward_after(struct plan_builder *b, const struct plan_visit *v)
{
    uint32_t c = cell(b, v->place, v->micro);
    retire(b, &b->bound[c]);
    retire(b, &b->full[c]);
    if (--b->flow_left[v->micro] == 0) retire(b, &b->flow[v->micro]);
    if (v->last_of_block && !b->in->own && v->acc_slot != PLAN_NO) {
        retire(b, &b->acc_saved[v->block]);
        plan_emit_casts(b, v->block, v->node);
    }
}

void plan_acts_after(struct plan_builder *b, uint32_t visit)
{
    const struct plan_visit *v = &b->p->visits[visit];
    uint32_t block = v->block;
    if (v->dir == PLAN_FORWARD)
        forward_after(b, v);
    else
        backward_after(b, v);
    bool run_ends = visit + 1 == b->p->n_visits || b->p->visits[visit + 1].block != block;
    if (b->swap_acc && run_ends)
        save(b, block, &b->acc_slot[block], &b->acc_saved[block], b->in->blocks[block].acc_bytes);
}
