/* engine/plan_check_data.c - every version of every chunk's state moves from home to use to home,
 * and none is lost.
 *
 * Owns: the tables per chunk. Must not know: how a plan was built. Any thread. "Home" is in the
 * input; who must come before whom follows from what a node reads and writes, not from what the
 * builder meant. */
#include "engine/plan_check_impl.h"

static uint32_t *state_entry(uint32_t *table, uint32_t chunk, uint8_t state)
{
    return &table[chunk * CHUNK_STATE_N + state];
}

static stk_status enter(const struct checker *k, uint32_t *entry, uint32_t node)
{
    if (*entry != PLAN_NO) return check_fail(k, node, "the same work is planned twice");
    *entry = node;
    return STK_OK;
}

/* Where a node belongs in the tables; NULL: nowhere (parameters for visits may come many times). */
static stk_status enter_node(struct checker *k, uint32_t i)
{
    const struct plan_node *x = &k->p->nodes[i];
    bool update_part = (x->kind == PLAN_UPDATE && !x->spec) || x->kind == PLAN_DEVICE_UPDATE || x->kind == PLAN_JOIN ||
                       x->kind == PLAN_COMMIT || x->kind == PLAN_UNDO;
    if (x->spec && x->part != PLAN_RUN_VISITS) return check_fail(k, i, "in the wrong part");
    switch ((enum plan_kind)x->kind) {
    case PLAN_FETCH:
        if (x->spec)
            return x->for_next ? check_fail(k, i, "speculative and for the next period")
                               : enter(k, state_entry(k->spec_fetch, x->chunk, x->state), i);
        if (x->for_next)
            return x->part == PLAN_RUN_VISITS
                       ? enter(k, state_entry(k->fetch_next, x->chunk, x->state), i)
                       : check_fail(k, i, "in the wrong part");
        if (x->part == PLAN_RUN_UPDATE)
            return enter(k, state_entry(k->fetch, x->chunk, x->state), i);
        return x->state == CHUNK_PARAM ? STK_OK : check_fail(k, i, "state that no visit reads");
    case PLAN_WRITE_BACK:
        if (x->spec) return enter(k, state_entry(k->spec_write, x->chunk, x->state), i);
        if ((x->part == PLAN_RUN_UPDATE) != (x->state != CHUNK_GRAD))
            return check_fail(k, i, "in the wrong part");
        return enter(k, state_entry(k->write_back, x->chunk, x->state), i);
    case PLAN_UPDATE: STK_TRY(enter(k, &(x->spec ? k->spec : k->update)[x->chunk], i)); break;
    case PLAN_DEVICE_UPDATE: STK_TRY(enter(k, &k->update[x->chunk], i)); break;
    case PLAN_COMMIT: STK_TRY(enter(k, &k->commit[x->chunk], i)); break;
    case PLAN_UNDO: STK_TRY(enter(k, &k->undo[x->chunk], i)); break;
    case PLAN_HAND_OVER: STK_TRY(enter(k, &k->hand[x->chunk], i)); break;
    case PLAN_GRAD_CAST: STK_TRY(enter(k, &k->cast[x->chunk], i)); break;
    case PLAN_GRAD_OUT: STK_TRY(enter(k, &k->out[x->chunk], i)); break;
    case PLAN_GATHER:
    case PLAN_REDUCE: return check_fail(k, i, "a kind that this planner does not make");
    default: break;
    }
    return x->part == (update_part ? PLAN_RUN_UPDATE : PLAN_RUN_VISITS)
               ? STK_OK
               : check_fail(k, i, "in the wrong part");
}

static const uint8_t resource_of[PLAN_KIND_N] = {
    [PLAN_FETCH] = PLAN_NVME_READ,
    [PLAN_COPY_IN] = PLAN_COPY_IN_LINK,
    [PLAN_VISIT] = PLAN_COMPUTE,
    [PLAN_GRAD_CAST] = PLAN_CAST,
    [PLAN_GRAD_OUT] = PLAN_COPY_OUT_LINK,
    [PLAN_NORM] = PLAN_NONE,
    [PLAN_UPDATE] = PLAN_UPDATE_TEAM,
    [PLAN_WRITE_BACK] = PLAN_NVME_WRITE,
    [PLAN_SAVE] = PLAN_COPY_OUT_LINK,
    [PLAN_LOAD] = PLAN_COPY_IN_LINK,
    [PLAN_JOIN] = PLAN_NONE,
    [PLAN_COMMIT] = PLAN_UPDATE_TEAM,
    [PLAN_UNDO] = PLAN_UPDATE_TEAM,
    [PLAN_ACT_OUT] = PLAN_NVME_WRITE,
    [PLAN_ACT_IN] = PLAN_NVME_READ,
    [PLAN_DEVICE_UPDATE] = PLAN_UPDATE_STREAM,
    [PLAN_HAND_OVER] = PLAN_UPDATE_TEAM, /* a discrete device: the link */
};

static bool names_chunk(uint8_t kind)
{
    return kind == PLAN_FETCH || kind == PLAN_COPY_IN || kind == PLAN_GRAD_CAST ||
           kind == PLAN_GRAD_OUT || kind == PLAN_UPDATE || kind == PLAN_WRITE_BACK ||
           kind == PLAN_COMMIT || kind == PLAN_UNDO || kind == PLAN_HAND_OVER ||
           kind == PLAN_DEVICE_UPDATE;
}

static bool moves(uint8_t kind)
{
    return kind != PLAN_UPDATE && kind != PLAN_COMMIT && kind != PLAN_UNDO && kind != PLAN_DEVICE_UPDATE;
}

static stk_status enter_all(struct checker *k)
{
    uint64_t bytes[PLAN_RESOURCE_N] = { 0 };
    for (uint32_t i = 0; i < k->p->n_nodes; i++) {
        const struct plan_node *x = &k->p->nodes[i];
        bytes[x->resource] += x->bytes;
        if (names_chunk(x->kind)) {
            if (x->chunk >= k->in->n_chunks || x->state >= CHUNK_STATE_N)
                return check_fail(k, i, "unknown chunk or state");
            const struct plan_chunk_in *c = &k->in->chunks[x->chunk];
            enum chunk_state s = x->kind == PLAN_GRAD_CAST || x->kind == PLAN_GRAD_OUT
                                     ? CHUNK_GRAD
                                     : (enum chunk_state)x->state;
            if (x->block != c->block)
                return check_fail(k, i, "names a block that is not its chunk's");
            if (moves(x->kind) && x->bytes != c->bytes[s])
                return check_fail(k, i, "moves another number of bytes");
        }
        STK_TRY(enter_node(k, i));
        bool over_link = x->kind == PLAN_HAND_OVER && !k->in->in_place;
        if (x->resource != (over_link ? PLAN_COPY_IN_LINK : resource_of[x->kind]))
            return check_fail(k, i, "on the wrong resource");
    }
    for (int r = 0; r < PLAN_RESOURCE_N; r++)
        if (bytes[r] != k->p->bytes[r])
            return check_fail(k, PLAN_NO, "bytes per resource do not add up");
    return STK_OK;
}

static bool in_arena(const struct checker *k, uint32_t slot, enum plan_arena a)
{
    return slot != PLAN_NO && k->p->slots[slot].arena == a;
}

/* Its gradient is cast where its home is. */
static bool cast_at_home(const struct checker *k, uint32_t chunk)
{
    return k->in->in_place || k->in->chunks[chunk].home[CHUNK_GRAD] == CHUNK_DEVICE;
}

/* The node that brings a chunk's new gradient to its home, or to where the update will read it. */
static uint32_t gradient_arrives(const struct checker *k, uint32_t chunk)
{
    return cast_at_home(k, chunk) ? k->cast[chunk] : k->out[chunk];
}

/* A gradient whose home is NVMe does not go there if it is left in the slot of the next update. */
static bool gradient_stays(const struct checker *k, uint32_t chunk)
{
    uint32_t last = gradient_arrives(k, chunk);
    return last != PLAN_NO && k->in->chunks[chunk].home[CHUNK_GRAD] == CHUNK_NVME &&
           in_arena(k, k->p->nodes[last].slot, PLAN_ARENA_UPDATE);
}

static bool same_place(const struct plan *p, uint32_t slot, uint32_t other)
{
    return p->slots[slot].offset_bytes == p->slots[other].offset_bytes &&
           p->slots[slot].size_bytes == p->slots[other].size_bytes;
}

/* What no fetch and no write-back moves: it must lie where the update of every period looks, in a slot
 * that the period's end leaves alone (check_overlaps). */
static stk_status check_staying(struct checker *k, uint32_t chunk)
{
    const struct plan *p = k->p;
    uint32_t u = k->update[chunk], last = gradient_arrives(k, chunk);
    if (!p->nodes[u].prefetched || k->spec[chunk] != PLAN_NO)
        return check_fail(k, u, "does not look for a gradient that was left in its slot");
    if (*state_entry(k->fetch, chunk, CHUNK_GRAD) != PLAN_NO ||
        *state_entry(k->write_back, chunk, CHUNK_GRAD) != PLAN_NO)
        return check_fail(k, last, "leaves a gradient where another will lie");
    return same_place(p, p->nodes[last].slot, p->nodes[u].slot) &&
                   p->nodes[last].slot_offset_bytes ==
                       plan_update_offset(&k->in->chunks[chunk], CHUNK_GRAD)
               ? STK_OK
               : check_fail(k, last, "leaves a gradient where the next update does not look");
}

/* One state of a chunk under update: arrives by one fetch (of this period or the one before) and
 * leaves by one write-back. */
static stk_status check_staged(struct checker *k, uint32_t chunk, enum chunk_state s)
{
    const struct plan_chunk_in *c = &k->in->chunks[chunk];
    const struct plan *p = k->p;
    uint32_t u = k->update[chunk], f = *state_entry(k->fetch, chunk, s),
             next = *state_entry(k->fetch_next, chunk, s);
    uint32_t w = *state_entry(k->write_back, chunk, s);
    if (c->home[s] != CHUNK_NVME) {
        if (f != PLAN_NO || next != PLAN_NO || w != PLAN_NO)
            return check_fail(k, u, "moves state whose home is memory");
        return STK_OK;
    }
    uint64_t offset = plan_update_offset(c, s);
    bool ahead = p->nodes[u].prefetched && s != CHUNK_GRAD;
    if (s == CHUNK_GRAD && gradient_stays(k, chunk)) return check_staying(k, chunk);
    bool either = k->spec[chunk] != PLAN_NO && s != CHUNK_GRAD; /* fetched here unless it was ahead */
    if (!in_arena(k, p->nodes[u].slot, PLAN_ARENA_UPDATE) ||
        p->slots[p->nodes[u].slot].size_bytes < plan_update_bytes(c))
        return check_fail(k, u, "has no slot for its state");
    if (ahead != (f == PLAN_NO) || (!either && ahead != (next != PLAN_NO)) || (ahead && either))
        return check_fail(k, u, "its state is fetched never or twice");
    if (!ahead && (!check_before(k, f, u) || p->nodes[f].slot != p->nodes[u].slot ||
                   p->nodes[f].slot_offset_bytes != offset))
        return check_fail(k, u, "does not follow the fetch of its state into its slot");
    if (w == PLAN_NO) return check_fail(k, u, "a version is never written back");
    if (s == CHUNK_GRAD)
        return check_before(k, f, w)
                   ? STK_OK
                   : check_fail(k, w, "overwrites a gradient that has not been read");
    if (!check_before(k, u, w) || p->nodes[w].src_slot != p->nodes[u].slot ||
        p->nodes[w].src_offset_bytes != offset)
        return check_fail(k, w, "does not write back what its update made");
    if (next == PLAN_NO) return STK_OK;
    if (p->nodes[next].optional != either)
        return check_fail(k, next, "passes where the next update has no other fetch, or may not");
    if (!in_arena(k, p->nodes[next].slot, PLAN_ARENA_UPDATE) ||
        !same_place(p, p->nodes[next].slot, p->nodes[u].slot) ||
        p->nodes[next].slot_offset_bytes != offset)
        return check_fail(k, next, "fetches to where the next update does not look");
    return check_before(k, w, next) ? STK_OK
                                    : check_fail(k, next, "fetches what has not been written back");
}

/* A parameter that goes to its first visit in memory: what its UPDATE of this period made, where it made
 * it. That the slot is still its own when it is read follows from check_overlaps; nobody else writes
 * into it (check_staged: all fetches come before the update). Not what may have been made in the period
 * before: that update passes, and what lies in the slot is another chunk's. */
static stk_status check_hand_over(struct checker *k, uint32_t chunk)
{
    const struct plan *p = k->p;
    uint32_t h = k->hand[chunk], u = k->update[chunk];
    if (h == PLAN_NO) return STK_OK;
    if (k->in->chunks[chunk].home[CHUNK_PARAM] != CHUNK_NVME || k->spec[chunk] != PLAN_NO ||
        p->nodes[h].state != CHUNK_PARAM)
        return check_fail(k, h, "hands over what is at home, or what may not be the newest");
    if (!check_before(k, u, h) || p->nodes[h].src_slot != p->nodes[u].slot ||
        p->nodes[h].src_offset_bytes !=
            plan_update_offset(&k->in->chunks[chunk], CHUNK_PARAM) ||
        !in_arena(k, p->nodes[h].slot, PLAN_ARENA_PARAM))
        return check_fail(k, h, "does not hand over what its update made");
    for (uint8_t s = CHUNK_PARAM; s <= CHUNK_OPT; s++) {
        uint32_t next = *state_entry(k->fetch_next, chunk, s);
        if (next != PLAN_NO && !check_before(k, h, next))
            return check_fail(k, next, "overwrites what is yet to be handed over");
    }
    return STK_OK;
}

/* The new 16-bit gradient: accumulator -> (device) -> home; a home in host memory still holds the
 * old one until the update has read it. */
static stk_status check_gradient(struct checker *k, uint32_t chunk)
{
    const struct plan_chunk_in *c = &k->in->chunks[chunk];
    const struct plan *p = k->p;
    uint32_t last = k->cast[chunk], w = *state_entry(k->write_back, chunk, CHUNK_GRAD);
    bool nvme = c->home[CHUNK_GRAD] == CHUNK_NVME;
    if (last == PLAN_NO) return check_fail(k, k->update[chunk], "its new gradient is never cast");
    if (!in_arena(k, p->nodes[last].src_slot, PLAN_ARENA_ACC) ||
        p->nodes[last].src_offset_bytes != c->acc_offset_bytes)
        return check_fail(k, last, "does not read its accumulator");
    if (k->norm == PLAN_NO || !check_before(k, last, k->norm))
        return check_fail(k, last, "the norm does not wait for it");
    if (cast_at_home(k, chunk) != (k->out[chunk] == PLAN_NO))
        return check_fail(k, last, "gradient leaves a device never or in vain");
    if (!cast_at_home(k, chunk)) {
        uint32_t out = k->out[chunk];
        if (!in_arena(k, p->nodes[last].slot, PLAN_ARENA_CAST) ||
            p->nodes[out].src_slot != p->nodes[last].slot || !check_before(k, last, out))
            return check_fail(k, out, "does not take the gradient that was cast");
        last = out;
    }
    if (!nvme) {
        if (p->nodes[last].slot != PLAN_NO)
            return check_fail(k, last, "does not bring the gradient home");
        return check_before(k, k->update[chunk], last) &&
                       (k->commit[chunk] == PLAN_NO || check_before(k, k->commit[chunk], last))
                   ? STK_OK
                   : check_fail(k, last, "overwrites a gradient before its update");
    }
    if (gradient_stays(k, chunk)) return STK_OK; /* check_staged has looked */
    if (w == PLAN_NO || !in_arena(k, p->nodes[last].slot, PLAN_ARENA_GRAD) ||
        p->nodes[w].src_slot != p->nodes[last].slot ||
        p->nodes[w].src_offset_bytes != p->nodes[last].slot_offset_bytes ||
        !check_before(k, last, w))
        return check_fail(k, w, "does not write the gradient that was cast");
    return STK_OK;
}

static stk_status check_serial(struct checker *k)
{
    if (!check_trains(k) || k->in->update != PLAN_SERIAL) return STK_OK;
    bool any = false;
    for (uint32_t i = 0; i < k->p->n_nodes; i++) {
        const struct plan_node *x = &k->p->nodes[i];
        any |= x->kind == PLAN_UPDATE || x->kind == PLAN_DEVICE_UPDATE;
        if (x->part == PLAN_RUN_UPDATE && x->kind != PLAN_JOIN && x->kind != PLAN_FETCH &&
            !check_before(k, i, k->join))
            return check_fail(k, i, "the join does not wait for it");
        bool entry = x->kind == PLAN_VISIT || x->kind == PLAN_FETCH || x->kind == PLAN_COPY_IN ||
                     x->kind == PLAN_HAND_OVER;
        if (any && x->part == PLAN_RUN_VISITS && entry && !x->for_next &&
            !check_before(k, k->join, i))
            return check_fail(k, i, "does not wait for the join");
    }
    return STK_OK;
}

stk_status check_chunks(struct checker *k)
{
    STK_TRY(enter_all(k));
    for (uint32_t i = 0; i < k->in->n_chunks; i++) {
        const struct plan_chunk_in *c = &k->in->chunks[i];
        uint32_t u = k->update[i];
        if (c->frozen || !check_trains(k)) {
            bool any = u != PLAN_NO || k->cast[i] != PLAN_NO || k->out[i] != PLAN_NO ||
                       k->spec[i] != PLAN_NO || k->undo[i] != PLAN_NO || k->commit[i] != PLAN_NO ||
                       k->hand[i] != PLAN_NO;
            for (uint8_t s = 0; s < CHUNK_STATE_N; s++)
                any |= *state_entry(k->fetch, i, s) != PLAN_NO ||
                       *state_entry(k->fetch_next, i, s) != PLAN_NO ||
                       *state_entry(k->write_back, i, s) != PLAN_NO;
            if (any) return check_fail(k, u, "changes a chunk that must stay as it is");
            continue;
        }
        if (u == PLAN_NO) return check_fail(k, PLAN_NO, "a trainable chunk is never updated");
        if ((k->p->nodes[u].kind == PLAN_DEVICE_UPDATE) != (c->home[CHUNK_OPT] == CHUNK_DEVICE))
            return check_fail(k, u, "updates what it cannot reach");
        for (int s = 0; s < CHUNK_STATE_N; s++)
            if ((c->home[s] == CHUNK_DEVICE) != plan_on_device(k->in, c->block))
                return check_fail(k, u, "a block that lies on the device in part");
        bool staged = c->home[CHUNK_PARAM] == CHUNK_NVME || c->home[CHUNK_OPT] == CHUNK_NVME;
        if (k->p->nodes[u].prefetched && !staged)
            return check_fail(k, u, "prefetched without state to fetch");
        for (int s = 0; s < CHUNK_STATE_N; s++) STK_TRY(check_staged(k, i, (enum chunk_state)s));
        STK_TRY(check_hand_over(k, i));
        STK_TRY(check_gradient(k, i));
    }
    if (check_trains(k) != (k->norm != PLAN_NO))
        return check_fail(k, k->norm, "exactly one norm in training, none in evaluation");
    return check_serial(k);
}

/* --- parameters for visits --- */

/* The node must see this period's version at the chunk's home. */
static bool sees_new_version(struct checker *k, uint32_t chunk, uint32_t node)
{
    const struct plan_chunk_in *c = &k->in->chunks[chunk];
    if (c->frozen || !check_trains(k)) return true;
    uint32_t made = c->home[CHUNK_PARAM] == CHUNK_NVME
                        ? *state_entry(k->write_back, chunk, CHUNK_PARAM)
                        : k->update[chunk];
    return check_before(k, made, node);
}

static stk_status check_copy_in(struct checker *k, uint32_t node)
{
    const struct plan_node *x = &k->p->nodes[node];
    const struct plan_chunk_in *c = &k->in->chunks[x->chunk];
    if (c->home[CHUNK_PARAM] == CHUNK_HOST) {
        if (x->src_slot != PLAN_NO) return check_fail(k, node, "does not copy from its home");
        return sees_new_version(k, x->chunk, node)
                   ? STK_OK
                   : check_fail(k, node, "copies a parameter before its update");
    }
    if (c->home[CHUNK_PARAM] == CHUNK_DEVICE) return check_fail(k, node, "copies in what is there");
    if (k->in->in_place || !in_arena(k, x->src_slot, PLAN_ARENA_BOUNCE))
        return check_fail(k, node, "does not copy from a bounce slot");
    const struct check_slot *s = &k->slots[x->src_slot];
    uint32_t from = k->users[s->first_user];
    const struct plan_node *f = &k->p->nodes[from];
    if (s->n_users != 2 || f->kind != PLAN_FETCH || f->slot != x->src_slot ||
        f->chunk != x->chunk || f->slot_offset_bytes != x->src_offset_bytes ||
        f->optional != x->optional || !check_before(k, from, node))
        return check_fail(k, node, "its bounce slot does not hold its chunk");
    return STK_OK;
}

static stk_status check_param_fetch(struct checker *k, uint32_t node)
{
    const struct plan_node *x = &k->p->nodes[node];
    if (k->in->chunks[x->chunk].home[CHUNK_PARAM] != CHUNK_NVME)
        return check_fail(k, node, "fetches what is not on NVMe");
    if (!in_arena(k, x->slot, k->in->in_place ? PLAN_ARENA_PARAM : PLAN_ARENA_BOUNCE))
        return check_fail(k, node, "fetches to the wrong arena");
    /* it passes unless the update does: then what is at home is the newest */
    if (x->optional)
        return check_before(k, k->hand[x->chunk], node)
                   ? STK_OK
                   : check_fail(k, node, "may pass though nothing was handed over");
    return sees_new_version(k, x->chunk, node)
               ? STK_OK
               : check_fail(k, node, "fetches a parameter before its write-back");
}

/* A PARAM slot holds one whole block before the first visit that reads it. */
static stk_status check_param_slot(struct checker *k, uint32_t slot)
{
    const struct check_slot *s = &k->slots[slot];
    uint32_t block = k->p->nodes[k->users[s->first_user]].block, n = 0, arrived = 0;
    if (block >= k->in->n_blocks)
        return check_fail(k, k->users[s->first_user], "has no business in a parameter slot");
    const struct plan_block_in *b = &k->in->blocks[block];
    if (k->p->slots[slot].size_bytes < b->param_bytes)
        return check_fail(k, k->users[s->first_user], "the block is larger than its slot");
    for (uint32_t u = 0; u < s->n_users; u++) {
        uint32_t node = k->users[s->first_user + u];
        const struct plan_node *x = &k->p->nodes[node];
        if (x->block != block) return check_fail(k, node, "another block's slot");
        if (x->kind == PLAN_VISIT) {
            if (k->p->visits[x->visit].param_slot != slot)
                return check_fail(k, node, "uses parameters as something else");
            if (n != b->n_chunks || arrived > k->chain_before[node])
                return check_fail(k, node, "does not wait for its parameters");
            continue;
        }
        bool hand = x->kind == PLAN_HAND_OVER;
        if ((x->kind != PLAN_FETCH && x->kind != PLAN_COPY_IN && !hand) || x->slot != slot ||
            k->seen_in[x->chunk] == slot + 1 ||
            x->slot_offset_bytes != k->in->chunks[x->chunk].offset_bytes)
            return check_fail(k, node, "writes a wrong piece of a parameter slot");
        if (s->chain_user_min && k->next_chain[node] > s->chain_user_min)
            return check_fail(k, node, "a visit does not wait for it");
        if (hand) continue; /* counted with what comes in its place where no update ran */
        uint32_t h = k->hand[x->chunk];
        bool handed = h != PLAN_NO && k->p->nodes[h].slot == slot;
        if (handed != x->optional || (handed && !check_before(k, h, node)))
            return check_fail(k, node, "comes beside what was handed over, or in nobody's place");
        k->seen_in[x->chunk] = slot + 1;
        if (k->next_chain[node] > arrived) arrived = k->next_chain[node];
        n++;
    }
    return STK_OK;
}

stk_status check_params(struct checker *k)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < k->p->n_nodes; i++) {
        const struct plan_node *x = &k->p->nodes[i];
        bool fetch =
            x->kind == PLAN_FETCH && x->part == PLAN_RUN_VISITS && !x->for_next && !x->spec;
        if (fetch) STK_TRY(check_param_fetch(k, i));
        if (x->kind == PLAN_COPY_IN) STK_TRY(check_copy_in(k, i));
        if ((fetch || x->kind == PLAN_COPY_IN) && in_arena(k, x->slot, PLAN_ARENA_PARAM))
            bytes += x->bytes;
        if (x->kind == PLAN_COPY_IN && !in_arena(k, x->slot, PLAN_ARENA_PARAM))
            return check_fail(k, i, "copies to the wrong arena");
    }
    if (bytes != k->p->param_fetch_bytes)
        return check_fail(k, PLAN_NO, "bytes of parameters do not add up");
    for (uint32_t s = 0; s < k->p->n_slots; s++)
        if (k->p->slots[s].arena == PLAN_ARENA_PARAM) STK_TRY(check_param_slot(k, s));
    /* Those without a slot read the home in place. */
    for (uint32_t i = 0; i < k->p->n_visits; i++) {
        const struct plan_visit *v = &k->p->visits[i];
        const struct plan_block_in *b = &k->in->blocks[v->block];
        const bool there = plan_on_device(k->in, v->block);
        if (v->param_slot != PLAN_NO) {
            if (!in_arena(k, v->param_slot, PLAN_ARENA_PARAM) || there)
                return check_fail(k, v->node, "reads parameters from the wrong arena");
            continue;
        }
        if (b->param_bytes && !k->in->in_place && !there)
            return check_fail(k, v->node, "has no parameters");
        for (uint32_t c = b->first_chunk; c < b->first_chunk + b->n_chunks; c++)
            if (k->in->chunks[c].home[CHUNK_PARAM] != (there ? CHUNK_DEVICE : CHUNK_HOST) ||
                !sees_new_version(k, c, v->node))
                return check_fail(k, v->node,
                                  "reads parameters before their update, or where they are not");
    }
    return STK_OK;
}
