/* engine/plan_spec.c - the nodes of `speculate`: the update of a chunk before the norm is known, and
 * the way back (engine/plan.h, SPECULATION).
 *
 * Owns: which chunks are speculated, and where their state is staged. Must not know: what decides
 * whether a node passes. Thread: the one that builds. State on NVMe is staged in the UPDATE arena
 * behind the slots of the first chunks of the order: these are the last of backward, which leaves no
 * time for them, and the first of the next update, for which they are fetched as in `chase`. */
#include "engine/plan_impl.h"

/* What a speculative update stages: the gradient is read where the cast left it. */
static uint64_t staged_bytes(const struct plan_chunk_in *c)
{
    return plan_update_offset(c, CHUNK_GRAD);
}

#define SPEC_RING 12u /* chunks on their way through a speculative update */

/* Slots of the first `n_keep` chunks of the order: at most a quarter of the chunks, and of the arena
 * what a ring for the others leaves, or a quarter. */
static uint64_t choose_keep(struct plan_builder *b)
{
    uint64_t capacity = b->arena[PLAN_ARENA_UPDATE].capacity, most = 0, end = 0;
    for (uint32_t i = 0; i < b->n_order; i++) {
        uint64_t bytes = staged_bytes(&b->in->chunks[b->order[i]]);
        if (bytes > most) most = bytes;
    }
    uint64_t room = capacity / 4;
    if (capacity != UINT64_MAX && capacity > SPEC_RING * most + room) room = capacity - SPEC_RING * most;
    for (b->n_keep = 0; b->n_keep < b->n_order / 4 && b->n_keep < b->n_ahead; b->n_keep++) {
        uint64_t next = end + plan_update_bytes(&b->in->chunks[b->order[b->n_keep]]);
        if (next > room || next > capacity - most) break;
        end = next;
    }
    return end;
}

void plan_spec_begin(struct plan_builder *b)
{
    if (b->in->update != PLAN_SPECULATE || b->in->mode != PLAN_TRAIN || b->in->own) return;
    uint64_t keep_bytes = choose_keep(b);
    for (uint32_t i = 0; i < b->n_order; i++) {
        const struct plan_chunk_in *c = &b->in->chunks[b->order[i]];
        if (!c->spec) continue;
        if (staged_bytes(c) == 0) b->spec_way[b->order[i]] = PLAN_SPEC_AT_HOME;
        else if (i >= b->n_keep) b->spec_way[b->order[i]] = PLAN_SPEC_STAGED;
    }
    b->spec_begin_bytes = keep_bytes;
}

void plan_spec_undo(struct plan_builder *b, uint32_t chunk, uint32_t slot, uint32_t grad)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    bool reads = c->home[CHUNK_OPT] == CHUNK_HOST && grad != PLAN_NO;
    struct plan_node *x = plan_node_begin(b, PLAN_UNDO, PLAN_RUN_UPDATE);
    x->block = c->block;
    x->chunk = chunk;
    x->slot = reads ? slot : PLAN_NO;
    if (c->home[CHUNK_OPT] == CHUNK_HOST)
        x->bytes = 2 * (c->bytes[CHUNK_PARAM] + c->bytes[CHUNK_OPT]) + c->bytes[CHUNK_GRAD];
    else if (c->home[CHUNK_PARAM] == CHUNK_HOST)
        x->bytes = 2 * c->bytes[CHUNK_PARAM];
    if (reads) plan_node_dep(b, grad);
    uint32_t node = b->undo_node[chunk] = plan_node_end(b);
    if (reads) plan_slot_use(b, slot, node, false);
}

/* State of a chunk into its slot, as early as the slot is free. */
static uint32_t fetch(struct plan_builder *b, uint32_t chunk, enum chunk_state s, uint32_t slot)
{
    struct plan_node *x = plan_node_begin_state(b, PLAN_FETCH, PLAN_RUN_VISITS, chunk, s);
    x->slot = slot;
    x->slot_offset_bytes = plan_update_offset(&b->in->chunks[chunk], s);
    x->spec = true;
    plan_node_deps(b, b->slot_state[slot].before);
    plan_node_dep(b, s == CHUNK_PARAM ? b->write_param[chunk] : b->write_opt[chunk]);
    plan_node_dep(b, b->update_node[chunk]);
    uint32_t node = plan_node_end(b);
    plan_slot_use(b, slot, node, false);
    return node;
}

static uint32_t write_back(struct plan_builder *b, uint32_t chunk, enum chunk_state s,
                           uint32_t slot, uint32_t update)
{
    struct plan_node *x = plan_node_begin_state(b, PLAN_WRITE_BACK, PLAN_RUN_VISITS, chunk, s);
    x->src_slot = slot;
    x->src_offset_bytes = plan_update_offset(&b->in->chunks[chunk], s);
    x->spec = true;
    x->rank += PLAN_RANK_LATER;
    plan_node_dep(b, update);
    uint32_t node = plan_node_end(b);
    plan_slot_use(b, slot, node, false);
    return node;
}

void plan_spec_update(struct plan_builder *b, uint32_t chunk, uint32_t cast, uint32_t grad_slot)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    uint32_t slot = PLAN_NO, fetched[2] = { PLAN_NO, PLAN_NO };
    if (b->spec_way[chunk] == PLAN_SPEC_NONE || b->status != STK_OK) return;
    if (b->spec_way[chunk] == PLAN_SPEC_STAGED) {
        struct plan_timeline *t = &b->arena[PLAN_ARENA_UPDATE];
        if (!b->untried.segs) plan_arena_keep(b, PLAN_ARENA_UPDATE, &b->untried);
        if (t->begin != b->spec_begin_bytes) t->begin = t->cursor = b->spec_begin_bytes;
        if (t->cursor < t->begin) t->cursor = t->begin;
        slot = plan_slot_must(b, PLAN_ARENA_UPDATE, staged_bytes(c), c->block, PLAN_NO);
        if (b->status != STK_OK) return;
        for (int s = CHUNK_PARAM; s <= CHUNK_OPT; s++)
            if (c->home[s] == CHUNK_NVME)
                fetched[s] = fetch(b, chunk, (enum chunk_state)s, slot);
    }
    struct plan_node *x = plan_node_begin(b, PLAN_UPDATE, PLAN_RUN_VISITS);
    x->block = c->block;
    x->chunk = chunk;
    x->slot = slot;
    x->src_slot = grad_slot;
    x->spec = true;
    /* the last first: what backward leaves no time for are then the chunks that the next forward needs
     * last, and not those it would wait for at once */
    if (slot == PLAN_NO) x->rank = 2 * PLAN_RANK_LATER - x->rank;
    x->bytes = 2 * (c->bytes[CHUNK_PARAM] + c->bytes[CHUNK_OPT]) + c->bytes[CHUNK_GRAD];
    plan_node_dep(b, cast);
    for (int k = 0; k < 2; k++) plan_node_dep(b, fetched[k]);
    plan_node_dep(b, b->update_node[chunk]);
    plan_node_deps(b, b->param_readers[chunk]);
    uint32_t update = b->spec_node[chunk] = plan_node_end(b);
    /* every user stays in the slot's list: this one says nothing of those before it */
    plan_slot_use(b, slot, update, false);
    plan_slot_use(b, grad_slot, update, false);
    if (slot == PLAN_NO) return;
    if (c->home[CHUNK_PARAM] == CHUNK_NVME)
        b->spec_write_param[chunk] = write_back(b, chunk, CHUNK_PARAM, slot, update);
    b->spec_write_opt[chunk] = write_back(b, chunk, CHUNK_OPT, slot, update);
    plan_slot_retire(b, slot);
}
