/* engine/plan_check_spec.c - what the update modes add: speculative updates with their way back
 * (`speculate`), parameters before state (`split`).
 *
 * Owns: nothing but a table of last visits. Must not know: how a plan was built, nor which nodes will
 * pass when it runs: whatever passes, what is left must be in order. Any thread. */
#include "base/sys.h"
#include "engine/plan_check_impl.h"

#include <string.h>

static uint32_t of(const uint32_t *table, uint32_t chunk, enum chunk_state s)
{
    return table[chunk * CHUNK_STATE_N + s];
}

static bool depends(const struct plan *p, uint32_t node, uint32_t on)
{
    for (uint32_t e = 0; e < p->nodes[node].n_deps; e++)
        if (p->deps[p->nodes[node].first_dep + e] == on) return true;
    return false;
}

static bool in_update_slot(const struct checker *k, uint32_t slot, uint64_t bytes)
{
    return slot != PLAN_NO && k->p->slots[slot].arena == PLAN_ARENA_UPDATE &&
           k->p->slots[slot].size_bytes >= bytes;
}

/* One state of a speculated chunk on NVMe: what is at home arrives, what was made leaves, and can be
 * fetched again after an undo. */
static stk_status check_staged(struct checker *k, uint32_t chunk, enum chunk_state s)
{
    const struct plan_chunk_in *c = &k->in->chunks[chunk];
    const struct plan *p = k->p;
    uint32_t spec = k->spec[chunk], f = of(k->spec_fetch, chunk, s), w = of(k->spec_write, chunk, s),
             next = of(k->fetch_next, chunk, s), again = of(k->fetch, chunk, s);
    if (c->home[s] == CHUNK_HOST)
        return f == PLAN_NO && w == PLAN_NO
                   ? STK_OK
                   : check_fail(k, spec, "moves state whose home is host memory");
    uint32_t slot = p->nodes[spec].slot;
    uint64_t offset = plan_update_offset(c, s);
    if (!in_update_slot(k, slot, plan_update_offset(c, CHUNK_GRAD)))
        return check_fail(k, spec, "has no slot for its state");
    if (f == PLAN_NO || !depends(p, spec, f) || p->nodes[f].slot != slot ||
        p->nodes[f].slot_offset_bytes != offset)
        return check_fail(k, spec, "does not follow the fetch of its state into its slot");
    if (!check_before(k, of(k->write_back, chunk, s), f))
        return check_fail(k, f, "fetches what has not been written back");
    if (w == PLAN_NO || !depends(p, w, spec) || p->nodes[w].src_slot != slot ||
        p->nodes[w].src_offset_bytes != offset)
        return check_fail(k, spec, "what it makes is never written back");
    if (next != PLAN_NO && (!check_before(k, spec, next) || !check_before(k, w, next)))
        return check_fail(k, next, "may fetch what is being replaced");
    return check_before(k, k->undo[chunk], again)
               ? STK_OK
               : check_fail(k, again, "may fetch what is yet to be taken back");
}

static stk_status check_gradient(struct checker *k, uint32_t chunk)
{
    const struct plan_chunk_in *c = &k->in->chunks[chunk];
    const struct plan *p = k->p;
    uint32_t spec = k->spec[chunk], undo = k->undo[chunk],
             last = k->in->in_place ? k->cast[chunk] : k->out[chunk];
    if (!check_before(k, last, spec)) return check_fail(k, spec, "does not follow its gradient");
    if (p->nodes[spec].src_slot != p->nodes[last].slot)
        return check_fail(k, spec, "reads another gradient");
    if (c->home[CHUNK_OPT] != CHUNK_HOST) return STK_OK;
    if (c->home[CHUNK_GRAD] == CHUNK_HOST)
        return p->nodes[undo].slot == PLAN_NO ? STK_OK
                                              : check_fail(k, undo, "reads another gradient");
    uint32_t f = of(k->fetch, chunk, CHUNK_GRAD);
    return p->nodes[undo].slot == p->nodes[k->update[chunk]].slot && check_before(k, f, undo)
               ? STK_OK
               : check_fail(k, undo, "does not follow the fetch of its gradient");
}

static stk_status check_speculated(struct checker *k, uint32_t chunk, const uint32_t *last_visit)
{
    const struct plan_chunk_in *c = &k->in->chunks[chunk];
    uint32_t spec = k->spec[chunk], undo = k->undo[chunk], update = k->update[chunk];
    if (k->in->update != PLAN_SPECULATE || !c->spec || k->p->nodes[spec].prefetched)
        return check_fail(k, spec, "speculates where it may not");
    if (!check_before(k, undo, update))
        return check_fail(k, update, "does not follow the undo of its chunk");
    if (!check_before(k, update, spec))
        return check_fail(k, spec, "does not follow the update of the step before");
    if (k->commit[chunk] != PLAN_NO && !check_before(k, k->commit[chunk], spec))
        return check_fail(k, spec, "does not follow the commit of the step before");
    uint32_t v = last_visit[c->block];
    if (v != PLAN_NO && !check_before(k, k->p->visits[v].node, spec))
        return check_fail(k, spec, "a visit may still read what it changes");
    STK_TRY(check_gradient(k, chunk));
    STK_TRY(check_staged(k, chunk, CHUNK_PARAM));
    return check_staged(k, chunk, CHUNK_OPT);
}

/* Copies and fetches for visits read a parameter before the speculative update changes it. */
static stk_status check_readers(struct checker *k)
{
    for (uint32_t i = 0; i < k->p->n_nodes; i++) {
        const struct plan_node *x = &k->p->nodes[i];
        bool fetch = x->kind == PLAN_FETCH && x->part == PLAN_RUN_VISITS && !x->for_next && !x->spec;
        bool copy = x->kind == PLAN_COPY_IN && x->src_slot == PLAN_NO;
        if ((!fetch && !copy) || k->spec[x->chunk] == PLAN_NO) continue;
        if (!check_before(k, i, k->spec[x->chunk]))
            return check_fail(k, i, "reads a parameter that is being changed");
    }
    return STK_OK;
}

static stk_status check_chunk(struct checker *k, uint32_t i, const uint32_t *last_visit)
{
    bool splits = check_trains(k) && plan_splits(k->in, i);
    if (splits != (k->commit[i] != PLAN_NO))
        return check_fail(k, k->update[i], "state is committed in vain, or never");
    if (splits && !check_before(k, k->update[i], k->commit[i]))
        return check_fail(k, k->commit[i], "does not follow the update of its parameter");
    if (k->spec[i] != PLAN_NO) return check_speculated(k, i, last_visit);
    bool any = k->undo[i] != PLAN_NO;
    for (int s = 0; s < CHUNK_STATE_N; s++)
        any |= of(k->spec_fetch, i, (enum chunk_state)s) != PLAN_NO ||
               of(k->spec_write, i, (enum chunk_state)s) != PLAN_NO;
    return any ? check_fail(k, k->update[i], "belongs to no speculative update") : STK_OK;
}

stk_status check_modes(struct checker *k)
{
    uint32_t *last = sys_calloc((size_t)k->in->n_blocks + 1, sizeof *last);
    if (!last) return stk_error_set(k->err, STK_ERR_NOMEM, 0, "no memory for checking a plan");
    memset(last, 0xff, (size_t)k->in->n_blocks * sizeof *last);
    for (uint32_t i = 0; i < k->p->n_visits; i++) last[k->p->visits[i].block] = i;
    stk_status st = STK_OK;
    for (uint32_t i = 0; i < k->in->n_chunks && st == STK_OK; i++) st = check_chunk(k, i, last);
    sys_free(last);
    return st == STK_OK ? check_readers(k) : st;
}
