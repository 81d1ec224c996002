/* engine/plan_acts.c - slots of one visit beside its parameters: boundaries, full sets, gradient
 * flow, accumulator.
 *
 * Owns: which activation of which micro-batch lies where. Must not know: parameters, the update.
 * Thread: the one that builds. Three calls around each visit: before (everything it needs gets a
 * slot, what was offloaded is loaded), ahead (loads for later visits where there is room), after
 * (what it leaves is offloaded, dropped or cast). What goes to NVMe passes the SAVE arena, both ways,
 * where the device has memory of its own; in place it leaves its ACT slot itself. */
#include "engine/plan_impl.h"

static uint32_t cell(const struct plan_builder *b, uint32_t place, uint32_t micro)
{
    return place * b->in->n_micro + micro;
}

/* Where a position's activations lie between forward and backward, as far as it is elsewhere: only what a
 * backward visit will read. HOST means something only where the device has memory of its own. In an own
 * order the same position may be visited again at any time: HOST and NVME are KEEP there. */
static enum plan_act goes_to(const struct plan_builder *b, uint32_t place)
{
    if (b->in->own || b->in->mode != PLAN_TRAIN || place >= b->in->n_places) return PLAN_ACT_KEEP;
    enum plan_act act = (enum plan_act)b->in->places[place].act;
    return act == PLAN_ACT_HOST && b->in->in_place ? PLAN_ACT_KEEP : act;
}

static bool offloads(const struct plan_builder *b, uint32_t place)
{
    return goes_to(b, place) >= PLAN_ACT_HOST;
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

/* The activation of one position and micro-batch: its slot in the ACT arena, in the SAVE arena, the node
 * that wrote it to NVMe; the newest place is where it is. */
struct activation {
    uint32_t number, block;
    uint32_t *slot, *saved, *out;
    uint64_t bytes;
};

static struct activation activation(const struct plan_builder *b, uint32_t place, uint32_t micro,
                                    bool full)
{
    uint32_t c = cell(b, place, micro);
    const struct plan_place_in *x = &b->in->places[place];
    return (struct activation){ .number = plan_act_number(b->in, place, micro, full),
                                .block = x->block,
                                .slot = full ? &b->full[c] : &b->bound[c],
                                .saved = full ? &b->full_saved[c] : &b->bound_saved[c],
                                .out = full ? &b->full_out[c] : &b->bound_out[c],
                                .bytes = full ? x->full_bytes : x->in_bytes };
}

/* Slot `from` -> NVMe, or NVMe -> slot `to` after node `after`. */
static uint32_t nvme_move(struct plan_builder *b, const struct activation *a, uint32_t from, uint32_t to,
                          uint32_t after)
{
    bool out = to == PLAN_NO;
    uint32_t slot = out ? from : to;
    struct plan_node *x =
        plan_node_begin(b, out ? PLAN_ACT_OUT : PLAN_ACT_IN, PLAN_RUN_VISITS);
    x->block = a->block;
    x->act = a->number;
    x->slot = to;
    x->src_slot = from;
    x->bytes = a->bytes;
    plan_node_dep(b, after);
    plan_node_deps(b, out ? b->slot_state[slot].users : b->slot_state[slot].before);
    uint32_t node = plan_node_end(b);
    plan_slot_use(b, slot, node, true);
    return node;
}

/* Out of the ACT arena, to where the position's policy says. */
static void leave(struct plan_builder *b, uint32_t place, uint32_t micro, bool full)
{
    struct activation a = activation(b, place, micro, full);
    bool nvme = goes_to(b, place) == PLAN_ACT_NVME;
    if (*a.slot == PLAN_NO) return;
    if (!nvme || !b->in->in_place) save(b, a.block, a.slot, a.saved, a.bytes);
    if (!nvme || b->status != STK_OK) return;
    uint32_t *from = b->in->in_place ? a.slot : a.saved;
    *a.out = nvme_move(b, &a, *from, PLAN_NO, PLAN_NO);
    plan_slot_retire(b, *from);
    *from = PLAN_NO;
}

/* The way back. False: no room (and not must); what was read from NVMe waits in the SAVE arena then. */
static bool come_back(struct plan_builder *b, uint32_t place, uint32_t micro, bool full, bool must)
{
    struct activation a = activation(b, place, micro, full);
    if (*a.slot != PLAN_NO || b->status != STK_OK) return true;
    if (*a.out != PLAN_NO) {
        enum plan_arena arena = b->in->in_place ? PLAN_ARENA_ACT : PLAN_ARENA_SAVE;
        uint32_t to = must ? plan_slot_must(b, arena, a.bytes, a.block, PLAN_NO)
                           : plan_slot_new(b, arena, a.bytes, PLAN_NO, PLAN_NO);
        if (to == PLAN_NO) return false;
        uint32_t node = nvme_move(b, &a, PLAN_NO, to, *a.out);
        b->p->nodes[node].demand = must;
        *a.out = PLAN_NO;
        *(b->in->in_place ? a.slot : a.saved) = to;
    }
    if (*a.saved == PLAN_NO) return true;
    *a.slot = must ? act_slot(b, a.block, a.bytes)
                   : plan_slot_new(b, PLAN_ARENA_ACT, a.bytes, PLAN_NO, PLAN_NO);
    if (*a.slot == PLAN_NO) return false;
    move(b, PLAN_LOAD, a.block, *a.saved, *a.slot, a.bytes);
    plan_slot_retire(b, *a.saved);
    *a.saved = PLAN_NO;
    return true;
}

static bool load_visit(struct plan_builder *b, const struct plan_visit *v, bool must)
{
    return come_back(b, v->place, v->micro, false, must) &&
           come_back(b, v->place, v->micro, true, must);
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
    uint32_t c = cell(b, v->place, v->micro);
    b->forward_done[c] = true;
    if (b->in->mode == PLAN_EVAL) {
        retire(b, &b->bound[c]);
        retire(b, &b->full[c]);
        return;
    }
    if (x->act == PLAN_ACT_RECOMPUTE) retire(b, &b->full[c]);
    if (offloads(b, v->place)) {
        leave(b, v->place, v->micro, false);
        leave(b, v->place, v->micro, true);
    }
    if (offloads(b, v->place + 1) && x[1].fused &&
        plan_has_input(b->in, v->place + 1)) /* nobody reads it before backward */
        leave(b, v->place + 1, v->micro, false);
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
