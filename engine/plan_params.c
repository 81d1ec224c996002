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

static void bring_chunk(struct plan_builder *b, uint32_t chunk, uint32_t slot, uint32_t visit,
                        bool demand)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    bool nvme = c->home[CHUNK_PARAM] == CHUNK_NVME, in_place = b->in->in_place;
    uint32_t source = plan_param_ready(b, chunk), bounce = PLAN_NO;
    if (nvme && !in_place)
        bounce = plan_slot_must(b, PLAN_ARENA_BOUNCE, c->bytes[CHUNK_PARAM], c->block, PLAN_NO);
    if (b->status != STK_OK) return;
    b->p->param_fetch_bytes += c->bytes[CHUNK_PARAM];
    if (nvme) {
        uint32_t to = in_place ? slot : bounce;
        struct plan_node *x = plan_node_begin(b, PLAN_FETCH, PLAN_RUN_VISITS);
        x->state = CHUNK_PARAM;
        x->block = c->block;
        x->chunk = chunk;
        x->visit = visit;
        x->demand = demand;
        x->slot = to;
        x->slot_offset_bytes = in_place ? c->offset_bytes : 0;
        x->bytes = c->bytes[CHUNK_PARAM];
        if (source != PLAN_NO && b->p->visits[visit].dir == PLAN_FORWARD) x->rank = source;
        plan_node_dep(b, source);
        plan_node_deps(b, b->slot_state[to].before);
        source = plan_node_end(b);
        note_reader(b, chunk, source);
        plan_slot_use(b, to, source, false);
        if (in_place) return;
    }
    struct plan_node *x = plan_node_begin(b, PLAN_COPY_IN, PLAN_RUN_VISITS);
    x->state = CHUNK_PARAM;
    x->block = c->block;
    x->chunk = chunk;
    x->visit = visit;
    x->slot = slot;
    x->slot_offset_bytes = c->offset_bytes;
    x->src_slot = bounce;
    x->bytes = c->bytes[CHUNK_PARAM];
    plan_node_dep(b, source);
    plan_node_deps(b, b->slot_state[slot].before);
    uint32_t node = plan_node_end(b);
    if (!nvme) note_reader(b, chunk, node);
    plan_slot_use(b, slot, node, false);
    plan_slot_use(b, bounce, node, true);
    plan_slot_retire(b, bounce);
}

bool plan_ensure_params(struct plan_builder *b, uint32_t use, bool must)
{
    uint32_t block = b->uses[use].block;
    const struct plan_block_in *x = &b->in->blocks[block];
    if (!b->block_staged[block] || b->block_slot[block] != PLAN_NO) return true;
    uint32_t slot = must ? plan_slot_must(b, PLAN_ARENA_PARAM, x->param_bytes, block, use)
                         : plan_slot_new(b, PLAN_ARENA_PARAM, x->param_bytes, block, use);
    if (slot == PLAN_NO) return false;
    b->block_slot[block] = slot;
    for (uint32_t k = 0; k < x->n_chunks && b->status == STK_OK; k++)
        bring_chunk(b, x->first_chunk + k, slot, b->uses[use].first, must);
    return true;
}
