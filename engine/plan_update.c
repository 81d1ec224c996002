/* engine/plan_update.c - the optimizer's side of a period: phase U, gradients on their way home,
 * the norm, state fetched for the next period.
 *
 * Owns: which chunk is updated when. Must not know: visits, activations. Thread: the one that
 * builds. Phase U takes the UPDATE arena as a ring from an empty start, so the offset of each
 * chunk's slot is the same in every period; what fits before the ring first wraps can be fetched at
 * the end of the period before, at those offsets. */
#include "engine/plan_impl.h"

static uint32_t begin_fetch(struct plan_builder *b, uint32_t chunk, enum chunk_state s,
                            uint32_t slot, uint8_t part)
{
    struct plan_node *x = plan_node_begin_state(b, PLAN_FETCH, part, chunk, s);
    x->slot = slot;
    x->slot_offset_bytes = plan_update_offset(&b->in->chunks[chunk], s);
    plan_node_deps(b, b->slot_state[slot].before);
    return b->p->n_nodes;
}

static uint32_t write_back(struct plan_builder *b, uint32_t chunk, enum chunk_state s,
                           uint32_t slot, uint64_t offset, uint32_t after, uint8_t part)
{
    struct plan_node *x = plan_node_begin_state(b, PLAN_WRITE_BACK, part, chunk, s);
    x->src_slot = slot;
    x->src_offset_bytes = offset;
    if (s == CHUNK_OPT) x->rank += PLAN_RANK_LATER;
    plan_node_dep(b, after);
    if (s == CHUNK_GRAD)
        plan_node_dep(b, b->fetch_grad[chunk]); /* INV-6: the old one has been read */
    return plan_node_end(b);
}

/* `split`: the state of a chunk whose parameter has been made. Nothing waits for it but the chunk's
 * next gradient. */
static void commit_chunk(struct plan_builder *b, uint32_t chunk)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    struct plan_node *x = plan_node_begin(b, PLAN_COMMIT, PLAN_RUN_UPDATE);
    x->block = c->block;
    x->chunk = chunk;
    x->bytes = 2 * (c->bytes[CHUNK_PARAM] + c->bytes[CHUNK_OPT]) + c->bytes[CHUNK_GRAD];
    /* the last first: its gradient is the first to come */
    x->rank = PLAN_RANK_LATER + PLAN_RANK_LATER / 2 - x->rank;
    plan_node_dep(b, b->update_node[chunk]);
    b->commit[chunk] = plan_node_end(b);
}

/* Fetches what is on NVMe into the slot; `prefetched`: only a gradient that was not cast there. */
static uint32_t fetch_states(struct plan_builder *b, uint32_t chunk, uint32_t slot, bool prefetched,
                             uint32_t fetched[CHUNK_STATE_N])
{
    static const uint8_t order[CHUNK_STATE_N] = { CHUNK_PARAM, CHUNK_OPT, CHUNK_GRAD },
                         grad_first[CHUNK_STATE_N] = { CHUNK_GRAD, CHUNK_PARAM, CHUNK_OPT };
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    bool spec = b->spec_way[chunk] != PLAN_SPEC_NONE;
    uint32_t n = 0, undo = PLAN_NO;
    for (int k = 0; k < CHUNK_STATE_N; k++) {
        uint8_t s = spec ? grad_first[k] : order[k];
        bool there = prefetched && (s != CHUNK_GRAD || b->grad_stays[chunk]);
        bool nvme = c->home[s] == CHUNK_NVME && !there;
        if (nvme) {
            fetched[n] = begin_fetch(b, chunk, (enum chunk_state)s, slot, PLAN_RUN_UPDATE);
            plan_node_dep(b, undo); /* what it would read must not count any more */
            plan_node_end(b);
            plan_slot_use(b, slot, fetched[n], false);
            if (s == CHUNK_GRAD) b->fetch_grad[chunk] = fetched[n];
            n++;
        }
        if (!spec || s != CHUNK_GRAD) continue;
        plan_spec_undo(b, chunk, slot, nvme ? b->fetch_grad[chunk] : PLAN_NO);
        undo = b->undo_node[chunk];
    }
    return n;
}

/* All of it lies on the device: nothing moves. */
static void update_on_device(struct plan_builder *b, uint32_t chunk)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    struct plan_node *x = plan_node_begin(b, PLAN_DEVICE_UPDATE, PLAN_RUN_UPDATE);
    x->block = c->block;
    x->chunk = chunk;
    x->bytes = 2 * (c->bytes[CHUNK_PARAM] + c->bytes[CHUNK_OPT]) + c->bytes[CHUNK_GRAD];
    b->update_node[chunk] = plan_node_end(b);
}

static void update_chunk(struct plan_builder *b, uint32_t chunk, bool prefetched)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    if (c->home[CHUNK_OPT] == CHUNK_DEVICE) {
        update_on_device(b, chunk);
        return;
    }
    uint64_t bytes = plan_update_bytes(c);
    uint32_t slot =
        bytes ? plan_slot_must(b, PLAN_ARENA_UPDATE, bytes, c->block, PLAN_NO) : PLAN_NO;
    uint32_t fetched[CHUNK_STATE_N], n_fetched;
    if (b->status != STK_OK) return;
    n_fetched = fetch_states(b, chunk, slot, prefetched, fetched);
    bool split = plan_splits(b->in, chunk);
    struct plan_node *x = plan_node_begin(b, PLAN_UPDATE, PLAN_RUN_UPDATE);
    x->block = c->block;
    x->chunk = chunk;
    x->slot = slot;
    x->prefetched = prefetched && slot != PLAN_NO &&
                    (c->home[CHUNK_PARAM] == CHUNK_NVME || c->home[CHUNK_OPT] == CHUNK_NVME);
    x->bytes = 2 * (c->bytes[CHUNK_PARAM] + c->bytes[CHUNK_OPT]) +
               c->bytes[CHUNK_GRAD]; /* read and written */
    if (split) x->bytes -= c->bytes[CHUNK_OPT];
    plan_node_dep(b, b->undo_node[chunk]);
    for (uint32_t k = 0; k < n_fetched; k++) plan_node_dep(b, fetched[k]);
    if (slot != PLAN_NO && n_fetched == 0) plan_node_deps(b, b->slot_state[slot].before);
    uint32_t update = b->update_node[chunk] = plan_node_end(b);
    plan_slot_use(b, slot, update, true);
    bool first = true;
    for (int s = CHUNK_PARAM; s <= CHUNK_OPT; s++) {
        if (c->home[s] != CHUNK_NVME) continue;
        uint32_t w =
            write_back(b, chunk, (enum chunk_state)s, slot,
                       plan_update_offset(c, (enum chunk_state)s), update, PLAN_RUN_UPDATE);
        *(s == CHUNK_PARAM ? &b->write_param[chunk] : &b->write_opt[chunk]) = w;
        plan_slot_use(b, slot, w, first);
        first = false;
    }
    plan_hand_now(b, chunk);
    plan_slot_retire(b, slot);
    if (split) commit_chunk(b, chunk);
}

static void order_block(struct plan_builder *b, uint32_t block, bool *seen)
{
    const struct plan_block_in *x = &b->in->blocks[block];
    if (seen[block]) return;
    seen[block] = true;
    for (uint32_t k = 0; k < x->n_chunks_trainable; k++)
        b->order[b->n_order++] = x->first_chunk + k;
}

/* How many chunks of the order are fetched ahead: those that lie in the UPDATE arena before it
 * wraps. */
static uint32_t count_ahead(const struct plan_builder *b)
{
    uint64_t left = b->arena[PLAN_ARENA_UPDATE].capacity;
    uint32_t n = 0;
    for (; n < b->n_order; n++) {
        uint64_t bytes = plan_update_bytes(&b->in->chunks[b->order[n]]);
        if (bytes > left) break;
        left -= left == UINT64_MAX ? 0 : bytes;
    }
    return n;
}

/* Gradients of the chunks that are fetched ahead are cast to where the update will read them: they are
 * the last of backward and the first that the update wants, and would go to NVMe only to come back at
 * once. Not those of chunks that may be speculated; and not in an arena without limit, in which a plan
 * is measured: a real one holds fewer ahead. */
static void choose_stays(struct plan_builder *b)
{
    uint32_t n = b->n_ahead;
    if (b->arena[PLAN_ARENA_UPDATE].capacity == UINT64_MAX) return;
    if (b->in->update == PLAN_SPECULATE && n > b->n_keep) n = b->n_keep;
    for (uint32_t i = 0; i < n; i++) {
        const struct plan_chunk_in *c = &b->in->chunks[b->order[i]];
        bool staged = c->home[CHUNK_PARAM] == CHUNK_NVME || c->home[CHUNK_OPT] == CHUNK_NVME;
        b->grad_stays[b->order[i]] = staged && c->home[CHUNK_GRAD] == CHUNK_NVME &&
                                     b->spec_way[b->order[i]] == PLAN_SPEC_NONE;
    }
}

/* The slots of the next period's first chunks, at the same offsets as in this one. Gradients that stay
 * need theirs before the period's end. */
static void take_next_slot(struct plan_builder *b, uint32_t i)
{
    uint32_t chunk = b->order[i];
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    uint64_t bytes = plan_update_bytes(c);
    if (b->next_slot[chunk] != PLAN_NO) return;
    b->arena[PLAN_ARENA_UPDATE].cursor = b->next_cursor;
    b->next_cursor += bytes; /* without state to fetch its place stays empty, so that the others keep theirs */
    if (c->home[CHUNK_PARAM] == CHUNK_NVME || c->home[CHUNK_OPT] == CHUNK_NVME)
        b->next_slot[chunk] = plan_slot_must(b, PLAN_ARENA_UPDATE, bytes, c->block, PLAN_NO);
    plan_slot_follow(b, b->next_slot[chunk], &b->untried);
}

/* Before the first cast, not sooner: what is handed over late is read from slots that lie there. */
static void take_stays(struct plan_builder *b)
{
    uint32_t n = 0;
    b->stays_taken = true;
    for (uint32_t i = 0; i < b->n_ahead; i++)
        if (b->grad_stays[b->order[i]]) n = i + 1;
    b->arena[PLAN_ARENA_UPDATE].begin = 0;
    for (b->n_next = 0; b->n_next < n && b->status == STK_OK; b->n_next++) take_next_slot(b, b->n_next);
}

void plan_emit_update_phase(struct plan_builder *b)
{
    bool *seen = b->block_waited; /* borrowed: all false before and after */
    for (uint32_t i = 0; i < b->in->n_places; i++) order_block(b, b->in->places[i].block, seen);
    for (uint32_t i = 0; i < b->in->n_blocks; i++) order_block(b, i, seen);
    for (uint32_t i = 0; i < b->in->n_blocks; i++) seen[i] = false;
    b->n_ahead = count_ahead(b);
    plan_spec_begin(b);
    choose_stays(b);
    plan_hand_begin(b);
    for (uint32_t i = 0; i < b->n_order && b->status == STK_OK; i++)
        update_chunk(b, b->order[i],
                     i < b->n_ahead && b->spec_way[b->order[i]] != PLAN_SPEC_STAGED);
    plan_hand_end(b);
    if (b->in->update != PLAN_SERIAL || b->n_order == 0 || b->status != STK_OK) return;
    plan_node_begin(b, PLAN_JOIN, PLAN_RUN_UPDATE);
    for (uint32_t i = 0; i < b->n_order; i++) {
        plan_node_dep(b, b->update_node[b->order[i]]);
        plan_node_dep(b, b->write_param[b->order[i]]);
        plan_node_dep(b, b->write_opt[b->order[i]]);
    }
    b->join = plan_node_end(b);
}

void plan_emit_for_next(struct plan_builder *b)
{
    b->arena[PLAN_ARENA_UPDATE].begin = 0;
    for (uint32_t i = 0; i < b->n_ahead && b->status == STK_OK; i++) {
        uint32_t chunk = b->order[i];
        const struct plan_chunk_in *c = &b->in->chunks[chunk];
        if (i >= b->n_next) take_next_slot(b, i);
        uint32_t slot = b->next_slot[chunk];
        for (int s = CHUNK_PARAM; slot != PLAN_NO && s <= CHUNK_OPT && b->status == STK_OK; s++) {
            if (c->home[s] != CHUNK_NVME) continue;
            uint32_t f = begin_fetch(b, chunk, (enum chunk_state)s, slot, PLAN_RUN_VISITS);
            b->p->nodes[f].for_next = true;
            b->p->nodes[f].optional = b->spec_way[chunk] == PLAN_SPEC_STAGED;
            plan_node_dep(b, s == CHUNK_PARAM ? b->write_param[chunk] : b->write_opt[chunk]);
            plan_node_dep(b, b->spec_node[chunk]); /* what it made is not needed in a slot */
            plan_node_dep(b, s == CHUNK_PARAM ? b->spec_write_param[chunk]
                                              : b->spec_write_opt[chunk]);
            plan_node_end(b);
            plan_slot_use(b, slot, f, false);
        }
        plan_slot_retire(b, slot);
    }
}

/* Gradient of one chunk: accumulator -> 16 bit -> home. `acc` is the block's accumulator, final
 * after node `after`. */
static void cast_chunk(struct plan_builder *b, uint32_t chunk, uint32_t acc, uint32_t after)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    bool stays = b->grad_stays[chunk], nvme = c->home[CHUNK_GRAD] == CHUNK_NVME && !stays,
         in_place = b->in->in_place || c->home[CHUNK_GRAD] == CHUNK_DEVICE; /* no way out */
    uint64_t bytes = c->bytes[CHUNK_GRAD], offset = stays ? plan_update_offset(c, CHUNK_GRAD) : 0;
    uint32_t cast_slot =
        in_place ? PLAN_NO : plan_slot_must(b, PLAN_ARENA_CAST, bytes, c->block, PLAN_NO);
    uint32_t home_slot = nvme    ? plan_slot_must(b, PLAN_ARENA_GRAD, bytes, c->block, PLAN_NO)
                         : stays ? b->next_slot[chunk]
                                 : PLAN_NO;
    /* the home still holds the gradient that the update reads */
    uint32_t old_read = nvme || stays                ? PLAN_NO
                        : b->commit[chunk] != PLAN_NO ? b->commit[chunk]
                                                      : b->update_node[chunk];
    uint32_t to = in_place ? home_slot : cast_slot;
    if (b->status != STK_OK) return;
    struct plan_node *x = plan_node_begin(b, PLAN_GRAD_CAST, PLAN_RUN_VISITS);
    x->block = c->block;
    x->chunk = chunk;
    x->slot = to;
    x->slot_offset_bytes = in_place ? offset : 0;
    x->src_slot = acc;
    x->src_offset_bytes = c->acc_offset_bytes;
    x->bytes = bytes;
    plan_node_dep(b, after);
    if (in_place) plan_node_dep(b, old_read);
    if (to != PLAN_NO) plan_node_deps(b, b->slot_state[to].before);
    uint32_t last = b->casts[b->n_casts++] = plan_node_end(b);
    plan_slot_use(b, acc, last, false);
    plan_slot_use(b, to, last, !(in_place && stays));
    if (!in_place) {
        x = plan_node_begin(b, PLAN_GRAD_OUT, PLAN_RUN_VISITS);
        x->block = c->block;
        x->chunk = chunk;
        x->slot = home_slot;
        x->slot_offset_bytes = offset;
        x->src_slot = cast_slot;
        x->bytes = bytes;
        plan_node_dep(b, last);
        plan_node_dep(b, old_read);
        if (home_slot != PLAN_NO) plan_node_deps(b, b->slot_state[home_slot].before);
        last = plan_node_end(b);
        plan_slot_use(b, home_slot, last, !stays);
        plan_slot_use(b, cast_slot, last, true);
        plan_slot_retire(b, cast_slot);
    }
    if (nvme) {
        uint32_t w = write_back(b, chunk, CHUNK_GRAD, home_slot, 0, last, PLAN_RUN_VISITS);
        plan_slot_use(b, home_slot, w, true);
    }
    plan_spec_update(b, chunk, last, home_slot);
    if (nvme) plan_slot_retire(b, home_slot);
}

void plan_emit_casts(struct plan_builder *b, uint32_t block, uint32_t after)
{
    const struct plan_block_in *x = &b->in->blocks[block];
    if (!b->stays_taken) take_stays(b);
    for (uint32_t k = 0; k < x->n_chunks_trainable && b->status == STK_OK; k++)
        cast_chunk(b, x->first_chunk + k, b->acc_slot[block], after);
    plan_slot_retire(b, b->acc_slot[block]);
    b->acc_slot[block] = PLAN_NO;
}

void plan_emit_norm(struct plan_builder *b)
{
    plan_node_begin(b, PLAN_NORM, PLAN_RUN_VISITS);
    plan_node_dep(b, b->last_visit_node != PLAN_NO ? b->last_visit_node : b->join);
    for (uint32_t i = 0; i < b->n_casts; i++) plan_node_dep(b, b->casts[i]);
    plan_node_end(b);
}
