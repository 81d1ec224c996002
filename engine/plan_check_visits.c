/* engine/plan_check_visits.c - visits in an order that computes the step, with activations and
 * accumulators that arrive.
 *
 * Owns: the table of visits by place, micro-batch and direction. Must not know: how a plan was
 * built. Any thread. Visits are one chain, so "before" between them is a comparison of numbers. */
#include "base/sys.h"
#include "engine/plan_check_impl.h"

#include <string.h>

static uint32_t *at(const struct checker *k, uint32_t place, uint32_t micro, uint32_t dir)
{
    return &k->visit_at[(place * k->in->n_micro + micro) * 2 + dir];
}

static bool has_input(const struct checker *k, uint32_t place)
{
    return place > 0 && place < k->in->n_places && !k->in->places[place].no_input &&
           k->in->places[place].in_bytes > 0;
}

static stk_status check_one(struct checker *k, uint32_t i)
{
    const struct plan_visit *v = &k->p->visits[i];
    if (v->place >= k->in->n_places || v->micro >= k->in->n_micro || v->dir > PLAN_BACKWARD)
        return check_fail(k, v->node, "unknown position or micro-batch");
    const struct plan_place_in *x = &k->in->places[v->place];
    if (v->block != x->block || k->p->nodes[v->node].block != x->block || v->act != x->act)
        return check_fail(k, v->node, "visit does not agree with its position");
    bool again =
        v->dir == PLAN_BACKWARD && !x->fused && x->act == PLAN_ACT_RECOMPUTE && x->full_bytes > 0;
    if (v->recompute != again)
        return check_fail(k, v->node, "recomputing does not agree with its position");
    if (v->dir == PLAN_BACKWARD && !check_trains(k))
        return check_fail(k, v->node, "backward in evaluation");
    if ((v->acc_slot != PLAN_NO) !=
        (v->dir == PLAN_BACKWARD && k->in->blocks[v->block].acc_bytes > 0))
        return check_fail(k, v->node, "accumulator where none belongs, or none");
    if (k->in->own) {
        const struct plan_own_visit *o = &k->in->own[i];
        if (o->place != v->place || o->micro != v->micro || o->dir != v->dir)
            return check_fail(k, v->node, "not the recorded visit");
        return STK_OK;
    }
    uint32_t *entry = at(k, v->place, v->micro, v->dir);
    if (*entry != PLAN_NO) return check_fail(k, v->node, "the same visit twice");
    *entry = i;
    return STK_OK;
}

static stk_status check_order(struct checker *k)
{
    for (uint32_t p = 0; p < k->in->n_places; p++)
        for (uint32_t m = 0; m < k->in->n_micro; m++) {
            bool train = check_trains(k), fused = k->in->places[p].fused && train;
            uint32_t f = *at(k, p, m, PLAN_FORWARD), b = *at(k, p, m, PLAN_BACKWARD);
            if ((f == PLAN_NO) != fused || (b == PLAN_NO) == train)
                return check_fail(k, PLAN_NO, "a visit is missing or too many");
            if (p > 0 && !fused && f < *at(k, p - 1, m, PLAN_FORWARD))
                return check_fail(k, k->p->visits[f].node, "before its input");
            if (!train) continue;
            uint32_t input = fused ? (p ? *at(k, p - 1, m, PLAN_FORWARD) : 0) : f;
            if (b < input) return check_fail(k, k->p->visits[b].node, "backward before forward");
            if (p + 1 < k->in->n_places && b < *at(k, p + 1, m, PLAN_BACKWARD))
                return check_fail(k, k->p->visits[b].node,
                                  "backward before that of the position behind it");
        }
    return STK_OK;
}

static stk_status check_accumulators(struct checker *k)
{
    const struct plan *p = k->p;
    stk_status status = STK_OK;
    uint32_t *last = sys_calloc((size_t)k->in->n_blocks + 1, sizeof *last);
    if (!last) return stk_error_set(k->err, STK_ERR_NOMEM, 0, "no memory for checking a plan");
    memset(last, 0xff, (size_t)k->in->n_blocks * sizeof *last);
    for (uint32_t i = 0; i < p->n_visits && status == STK_OK; i++) {
        const struct plan_visit *v = &p->visits[i];
        if (v->dir == PLAN_FORWARD) continue;
        uint32_t before = last[v->block];
        last[v->block] = i;
        if (v->first_of_block != (before == PLAN_NO))
            status = check_fail(k, v->node, "first visit of its block is marked wrongly");
        if (before != PLAN_NO && p->visits[before].last_of_block)
            status = check_fail(k, v->node, "a block's last visit was before it");
        if (v->acc_slot == PLAN_NO || status != STK_OK) continue;
        if (p->slots[v->acc_slot].arena != PLAN_ARENA_ACC ||
            p->slots[v->acc_slot].size_bytes < k->in->blocks[v->block].acc_bytes)
            status = check_fail(k, v->node, "its accumulator is too small or elsewhere");
        else if (before != PLAN_NO)
            status = check_follow(k, PLAN_NO, p->visits[before].acc_slot, v->acc_slot,
                                  p->visits[before].node, v->node,
                                  k->in->blocks[v->block].acc_bytes);
        if (before == PLAN_NO || status != STK_OK || k->in->own) continue;
        const struct plan_visit *w = &p->visits[before]; /* micro-batches are added in one order,
                                                            whatever the order of visits */
        if (w->place < v->place || (w->place == v->place && w->micro >= v->micro))
            status = check_fail(k, v->node, "adds to its accumulator out of order");
    }
    for (uint32_t c = 0; c < k->in->n_chunks && status == STK_OK; c++) {
        uint32_t cast = k->cast[c], i = last[k->in->chunks[c].block];
        if (cast != PLAN_NO && k->in->own && p->n_visits &&
            !check_before(k, p->visits[p->n_visits - 1].node, cast))
            status = check_fail(k, cast, "own order: gradients are final at the end only");
        if (cast == PLAN_NO || i == PLAN_NO || status != STK_OK) continue;
        const struct plan_visit *v = &p->visits[i];
        if (!v->last_of_block || p->nodes[cast].src_slot != v->acc_slot ||
            !check_before(k, v->node, cast))
            status = check_fail(k, cast, "casts a gradient that is not final");
    }
    sys_free(last);
    return status;
}

/* What an ACT slot may hold, as a number: a boundary or a full set of one position and micro-batch,
 * or one micro-batch's flow. */
static uint64_t boundary_key(const struct checker *k, uint32_t place, uint32_t micro)
{
    return ((uint64_t)place * k->in->n_micro + micro) * 3;
}

static bool set_key(uint64_t *key, uint64_t is)
{
    if (*key != UINT64_MAX && *key != is) return false;
    *key = is;
    return true;
}

static bool visit_key(const struct checker *k, const struct plan_visit *v, uint32_t slot,
                      uint64_t *key)
{
    bool ok = true;
    if (v->in_slot == slot) ok &= set_key(key, boundary_key(k, v->place, v->micro));
    if (v->out_slot == slot) ok &= set_key(key, boundary_key(k, v->place + 1, v->micro));
    if (v->full_slot == slot) ok &= set_key(key, boundary_key(k, v->place, v->micro) + 1);
    if (v->flow_slot == slot) ok &= set_key(key, boundary_key(k, 0, v->micro) + 2);
    if (v->acc_slot == slot) ok &= set_key(key, v->block);
    return ok;
}

/* One purpose per slot; a load comes before all visits that use it, a save after all others. */
static stk_status check_purpose(struct checker *k, uint32_t slot)
{
    const struct check_slot *s = &k->slots[slot];
    enum plan_arena arena = (enum plan_arena)k->p->slots[slot].arena;
    uint64_t key = UINT64_MAX;
    uint32_t load = PLAN_NO, save = PLAN_NO, visits = 0;
    for (uint32_t u = 0; u < s->n_users; u++) {
        uint32_t node = k->users[s->first_user + u];
        const struct plan_node *x = &k->p->nodes[node];
        if (save != PLAN_NO) return check_fail(k, node, "uses a slot after it was saved");
        if (x->kind == PLAN_VISIT) {
            const struct plan_visit *v = &k->p->visits[x->visit];
            if (!visit_key(k, v, slot, &key))
                return check_fail(k, node, "uses a slot for a second purpose");
            if (load != PLAN_NO && ((v->dir == PLAN_FORWARD && arena == PLAN_ARENA_ACT) ||
                                    !check_before(k, load, node)))
                return check_fail(k, node, "does not follow the load of its slot");
            visits++;
        } else if ((x->kind == PLAN_LOAD || x->kind == PLAN_ACT_IN) && x->slot == slot) {
            if (load != PLAN_NO || visits) return check_fail(k, node, "loads into a slot in use");
            load = node;
        } else if ((x->kind == PLAN_SAVE || x->kind == PLAN_ACT_OUT) &&
                   x->src_slot == slot) {
            save = node;
            for (uint32_t w = 0; w < u; w++)
                if (!check_before(k, k->users[s->first_user + w], node))
                    return check_fail(k, node, "saves a slot in use");
        } else if (x->kind != PLAN_GRAD_CAST || arena != PLAN_ARENA_ACC) {
            return check_fail(k, node, "has no business in this slot");
        }
    }
    return STK_OK;
}

static stk_status check_sizes(struct checker *k, const struct plan_visit *v, uint64_t flow_bytes)
{
    const struct plan_place_in *x = &k->in->places[v->place];
    const struct {
        uint32_t slot;
        uint64_t bytes;
        bool must;
    } need[4] = {
        { v->in_slot, x->in_bytes, has_input(k, v->place) && !k->in->own },
        { v->out_slot, has_input(k, v->place + 1) ? x[1].in_bytes : 0,
          v->dir == PLAN_FORWARD && has_input(k, v->place + 1) },
        { v->full_slot, x->full_bytes, x->full_bytes > 0 },
        { v->flow_slot, flow_bytes, v->dir == PLAN_BACKWARD && flow_bytes > 0 },
    };
    for (int i = 0; i < 4; i++) {
        if (need[i].slot == PLAN_NO) {
            if (need[i].must)
                return check_fail(k, v->node, "lacks a boundary, a full set or its flow");
            continue;
        }
        const struct plan_slot *s = &k->p->slots[need[i].slot];
        if (s->arena != PLAN_ARENA_ACT || s->size_bytes < need[i].bytes)
            return check_fail(k, v->node, "an activation's slot is too small");
    }
    return STK_OK;
}

/* Boundaries and full sets of one position and micro-batch, from their writer to their readers. */
static stk_status check_cell(struct checker *k, uint32_t place, uint32_t micro)
{
    const struct plan *p = k->p;
    const struct plan_place_in *x = &k->in->places[place];
    uint32_t f = *at(k, place, micro, PLAN_FORWARD), b = *at(k, place, micro, PLAN_BACKWARD),
             number = plan_act_number(k->in, place, micro, false);
    if (has_input(k, place)) {
        const struct plan_visit *w = &p->visits[*at(k, place - 1, micro, PLAN_FORWARD)];
        const uint32_t readers[2] = { f, b };
        for (int i = 0; i < 2; i++)
            if (readers[i] != PLAN_NO)
                STK_TRY(check_follow(k, number, w->out_slot, p->visits[readers[i]].in_slot, w->node,
                                     p->visits[readers[i]].node, x->in_bytes));
    }
    if (f != PLAN_NO && b != PLAN_NO && x->full_bytes && x->act != PLAN_ACT_RECOMPUTE)
        STK_TRY(check_follow(k, number + 1, p->visits[f].full_slot, p->visits[b].full_slot,
                             p->visits[f].node, p->visits[b].node, x->full_bytes));
    uint32_t above =
        place + 1 < k->in->n_places ? *at(k, place + 1, micro, PLAN_BACKWARD) : PLAN_NO;
    if (b != PLAN_NO && above != PLAN_NO && p->visits[above].flow_slot != p->visits[b].flow_slot)
        return check_fail(k, p->visits[b].node, "its flow lies elsewhere");
    return STK_OK;
}

stk_status check_visits(struct checker *k)
{
    uint64_t flow_bytes = 0;
    for (uint32_t i = 0; i < k->in->n_places; i++) {
        const struct plan_place_in *x = &k->in->places[i];
        uint64_t flow = x->flow_bytes ? x->flow_bytes : x->in_bytes;
        if (has_input(k, i) && flow > flow_bytes) flow_bytes = flow;
    }
    if (k->in->own && k->p->n_visits != k->in->n_own)
        return check_fail(k, PLAN_NO, "a recorded visit is missing");
    for (uint32_t i = 0; i < k->p->n_visits; i++) {
        STK_TRY(check_one(k, i));
        STK_TRY(check_sizes(k, &k->p->visits[i], flow_bytes));
    }
    if (!k->in->own) STK_TRY(check_order(k));
    for (uint32_t s = 0; s < k->p->n_slots; s++)
        if (k->p->slots[s].arena == PLAN_ARENA_ACT || k->p->slots[s].arena == PLAN_ARENA_ACC)
            STK_TRY(check_purpose(k, s));
    STK_TRY(check_accumulators(k));
    STK_TRY(check_acts(k));
    for (uint32_t i = 0; !k->in->own && i < k->in->n_places; i++)
        for (uint32_t m = 0; m < k->in->n_micro; m++) STK_TRY(check_cell(k, i, m));
    return STK_OK;
}
