/* engine/plan_params.c - bringing a block's 16-bit parameters to where visits read them.
 *
 * Owns: which block lies in which PARAM slot. Must not know: activations, gradients. Thread: the
 * one that builds. The cache drops the block whose next use is farthest (Belady, "A study of
 * replacement algorithms for a virtual-storage computer", 1966), which is possible because the plan
 * knows all uses. */
#include "engine/plan_impl.h"

/* The node after which a chunk's parameter of this period may be read at its home. */
uint32_t plan_param_ready(const struct plan_builder *b, uint32_t chunk)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    if (b->join != PLAN_NO) return b->join;
    return c->home[CHUNK_PARAM] == CHUNK_NVME ? b->write_param[chunk] : b->update_node[chunk];
}

/* `speculate`: the update of this period must not meet those who read what is at home now. */
static void note_reader(struct plan_builder *b, uint32_t chunk, uint32_t node)
{
    if (b->spec_way[chunk] != PLAN_SPEC_NONE) plan_list_add(b, &b->param_readers[chunk], node);
}

/* --- hand-over: the new parameter to its first visit without the drive (engine/plan.h) --- */

/* Not with a join: visits wait for all updates, and what waits for a visit cannot be updated. Not what may
 * have been made, or may be taken back, ahead of the norm. */
static bool may_hand_over(const struct plan_builder *b, uint32_t chunk)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    return b->in->mode == PLAN_TRAIN && b->in->update != PLAN_SERIAL && !b->in->own && !c->frozen &&
           c->home[CHUNK_PARAM] == CHUNK_NVME && b->spec_way[chunk] == PLAN_SPEC_NONE;
}

/* A slot of the UPDATE arena that waits for a PARAM slot would hold up later updates, which else run far
 * ahead of the visits. So only those are handed over that never wait, or that hold up nothing: blocks
 * whose PARAM slots nobody had before them; and what lies in the UPDATE arena when all is updated. */
void plan_hand_begin(struct plan_builder *b)
{
    bool any = false;
    for (uint32_t i = 0; i < b->n_order; i++) any |= may_hand_over(b, b->order[i]);
    for (uint32_t u = 0; any && u < b->n_uses && b->status == STK_OK; u++) {
        uint32_t block = b->uses[u].block;
        const struct plan_block_in *x = &b->in->blocks[block];
        if (!b->block_staged[block] || b->block_slot[block] != PLAN_NO) continue;
        b->block_slot[block] = plan_slot_new(b, PLAN_ARENA_PARAM, x->param_bytes, block, PLAN_NO);
        if (b->block_slot[block] == PLAN_NO) return; /* those behind it come in their order */
        for (uint32_t k = 0; k < x->n_chunks; k++)
            if (may_hand_over(b, x->first_chunk + k)) b->hand_way[x->first_chunk + k] = PLAN_HAND_NOW;
    }
}

static void hand_over(struct plan_builder *b, uint32_t chunk, uint32_t slot, uint32_t visit)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    uint32_t update = b->update_node[chunk], from = b->p->nodes[update].slot;
    struct plan_node *x =
        plan_node_begin_state(b, PLAN_HAND_OVER, PLAN_RUN_VISITS, chunk, CHUNK_PARAM);
    if (!b->in->in_place) x->resource = PLAN_COPY_IN_LINK;
    x->visit = visit;
    x->slot = slot;
    x->slot_offset_bytes = c->offset_bytes;
    x->src_slot = from;
    x->src_offset_bytes = plan_update_offset(c, CHUNK_PARAM);
    x->rank = update;
    plan_node_dep(b, update);
    plan_node_deps(b, b->slot_state[slot].before);
    uint32_t node = b->hand_node[chunk] = plan_node_end(b);
    plan_slot_use(b, from, node, false);
    plan_slot_use(b, slot, node, false);
}

void plan_hand_now(struct plan_builder *b, uint32_t chunk)
{
    uint32_t block = b->in->chunks[chunk].block;
    if (b->hand_way[chunk] != PLAN_HAND_NOW || b->status != STK_OK) return;
    hand_over(b, chunk, b->block_slot[block], b->uses[b->block_next_use[block]].first);
}

void plan_hand_end(struct plan_builder *b)
{
    for (uint32_t i = 0; i < b->n_order && b->status == STK_OK; i++) {
        uint32_t chunk = b->order[i];
        if (b->hand_way[chunk] == PLAN_HAND_NONE && may_hand_over(b, chunk) &&
            plan_slot_intact(b, b->p->nodes[b->update_node[chunk]].slot))
            b->hand_way[chunk] = PLAN_HAND_LATE;
    }
}

/* --- a chunk's way to its PARAM slot --- */

/* Nothing hides the update of the block that the first visit reads: copies of parameters that a later one
 * wants (ready long since, if they were updated ahead of the norm) would take DRAM's time from it. But for
 * the second's, which is wanted at once. PLAN_NO: nothing to wait for. */
static uint32_t first_block_updated(const struct plan_builder *b, uint32_t visit)
{
    const struct plan_block_in *x = &b->in->blocks[b->uses[0].block];
    bool later = b->use_of[visit] >= 2 && b->p->visits[visit].dir == PLAN_FORWARD;
    if (!later || b->in->update != PLAN_SPECULATE || x->n_chunks_trainable == 0 ||
        plan_on_device(b->in, b->uses[0].block)) /* takes nothing of DRAM's time */
        return PLAN_NO;
    return b->update_node[x->first_chunk + x->n_chunks_trainable - 1];
}

static void bring_chunk(struct plan_builder *b, uint32_t chunk, uint32_t slot, uint32_t visit,
                        bool demand)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    bool nvme = c->home[CHUNK_PARAM] == CHUNK_NVME, in_place = b->in->in_place;
    bool handed = b->hand_way[chunk] != PLAN_HAND_NONE;
    uint32_t source = plan_param_ready(b, chunk), bounce = PLAN_NO;
    if (nvme && !in_place)
        bounce = plan_slot_must(b, PLAN_ARENA_BOUNCE, c->bytes[CHUNK_PARAM], c->block, PLAN_NO);
    if (b->status != STK_OK) return;
    b->p->param_fetch_bytes += c->bytes[CHUNK_PARAM];
    if (b->hand_way[chunk] == PLAN_HAND_LATE) hand_over(b, chunk, slot, visit);
    b->hand_way[chunk] = PLAN_HAND_NONE; /* the period's first visit only */
    if (handed) source = b->hand_node[chunk];
    if (nvme) {
        uint32_t to = in_place ? slot : bounce;
        struct plan_node *x =
            plan_node_begin_state(b, PLAN_FETCH, PLAN_RUN_VISITS, chunk, CHUNK_PARAM);
        x->visit = visit;
        x->demand = demand;
        x->optional = handed;
        x->slot = to;
        x->slot_offset_bytes = in_place ? c->offset_bytes : 0;
        if (handed) x->rank = b->update_node[chunk];
        else if (source != PLAN_NO && b->p->visits[visit].dir == PLAN_FORWARD) x->rank = source;
        plan_node_dep(b, source);
        if (!handed || !in_place) plan_node_deps(b, b->slot_state[to].before);
        source = plan_node_end(b);
        note_reader(b, chunk, source);
        plan_slot_use(b, to, source, false);
        if (in_place) return;
    }
    struct plan_node *x =
        plan_node_begin_state(b, PLAN_COPY_IN, PLAN_RUN_VISITS, chunk, CHUNK_PARAM);
    x->visit = visit;
    x->optional = handed;
    x->slot = slot;
    x->slot_offset_bytes = c->offset_bytes;
    x->src_slot = bounce;
    plan_node_dep(b, source);
    if (!nvme) plan_node_dep(b, first_block_updated(b, visit));
    if (!handed) plan_node_deps(b, b->slot_state[slot].before);
    uint32_t node = plan_node_end(b);
    if (!nvme) note_reader(b, chunk, node);
    plan_slot_use(b, slot, node, false);
    plan_slot_use(b, bounce, node, true);
    plan_slot_retire(b, bounce);
}

bool plan_ensure_params(struct plan_builder *b, uint32_t use, bool must)
{
    uint32_t block = b->uses[use].block, slot = b->block_slot[block];
    const struct plan_block_in *x = &b->in->blocks[block];
    if (!b->block_staged[block] || (slot != PLAN_NO && b->slot_state[slot].brought)) return true;
    if (slot == PLAN_NO)
        slot = must ? plan_slot_must(b, PLAN_ARENA_PARAM, x->param_bytes, block, use)
                    : plan_slot_new(b, PLAN_ARENA_PARAM, x->param_bytes, block, use);
    if (slot == PLAN_NO || b->status != STK_OK) return false;
    b->block_slot[block] = slot;
    b->slot_state[slot].brought = true;
    for (uint32_t k = 0; k < x->n_chunks && b->status == STK_OK; k++)
        bring_chunk(b, x->first_chunk + k, slot, b->uses[use].first, must);
    return true;
}
