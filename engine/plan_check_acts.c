/* engine/plan_check_acts.c - a value that leaves its slot on the device and comes back: over host memory,
 * over NVMe, or over both.
 *
 * Owns: the tables of activations on NVMe. Must not know: how a plan was built. Any thread. The way of a
 * value is followed node by node, from the slot that is read back to the slot that was written. */
#include "engine/plan_check_impl.h"

static bool writes(const struct plan_node *x, uint32_t slot)
{
    return (x->kind == PLAN_SAVE || x->kind == PLAN_LOAD || x->kind == PLAN_ACT_IN) && x->slot == slot;
}

/* The node of a kind that writes a slot, from `src` where that is a slot; PLAN_NO: none. */
static uint32_t writer_of(const struct checker *k, uint32_t slot, enum plan_kind kind, uint32_t src)
{
    const struct check_slot *s = &k->slots[slot];
    uint32_t found = PLAN_NO;
    for (uint32_t u = 0; u < s->n_users; u++) {
        uint32_t node = k->users[s->first_user + u];
        const struct plan_node *x = &k->p->nodes[node];
        if (x->kind == kind && writes(x, slot) && (src == PLAN_NO || x->src_slot == src)) found = node;
    }
    return found;
}

/* From its write until it is read, nobody else writes the slot. */
static stk_status untouched(struct checker *k, uint32_t slot, uint32_t write, uint32_t read)
{
    const struct check_slot *s = &k->slots[slot];
    if (!check_before(k, write, read)) return check_fail(k, read, "save and load are out of order");
    for (uint32_t u = 0; u < s->n_users; u++) {
        uint32_t other = k->users[s->first_user + u];
        if (other == write || !writes(&k->p->nodes[other], slot)) continue;
        if (!check_before(k, other, write) && !check_before(k, read, other))
            return check_fail(k, other, "overwrites what is saved");
    }
    return STK_OK;
}

/* The node that took the value out of `from`, for `out`, which may be that node itself. */
static stk_status follow_out(struct checker *k, uint32_t from, uint32_t out, uint32_t *taken)
{
    uint32_t bounce = k->p->nodes[out].src_slot;
    *taken = out;
    if (bounce == from) return STK_OK;
    *taken = writer_of(k, bounce, PLAN_SAVE, from);
    if (*taken == PLAN_NO) return check_fail(k, out, "writes to NVMe what was not saved");
    return untouched(k, bounce, *taken, out);
}

/* `in` brought the value from NVMe. */
static stk_status follow_nvme(struct checker *k, uint32_t act, uint32_t from, uint32_t in,
                              uint32_t *taken)
{
    if (act == PLAN_NO || k->p->nodes[in].act != act)
        return check_fail(k, in, "reads another activation from NVMe");
    return follow_out(k, from, k->act_out[act], taken);
}

stk_status check_follow(struct checker *k, uint32_t act, uint32_t from, uint32_t to, uint32_t writer,
                        uint32_t reader, uint64_t bytes)
{
    const struct plan *p = k->p;
    if (from == PLAN_NO || to == PLAN_NO)
        return check_fail(k, reader, "has no slot for what it needs");
    if (from == to) return STK_OK;
    uint32_t load = writer_of(k, to, PLAN_LOAD, PLAN_NO), in = writer_of(k, to, PLAN_ACT_IN, PLAN_NO);
    uint32_t last = load != PLAN_NO ? load : in, taken = PLAN_NO;
    if (last == PLAN_NO || (load != PLAN_NO && in != PLAN_NO))
        return check_fail(k, reader, "reads a slot that nobody loaded, or two did");
    if (load != PLAN_NO) {
        uint32_t bounce = p->nodes[load].src_slot;
        if (bounce == PLAN_NO) return check_fail(k, load, "loads what was not saved");
        taken = writer_of(k, bounce, PLAN_SAVE, from);
        in = taken == PLAN_NO ? writer_of(k, bounce, PLAN_ACT_IN, PLAN_NO) : PLAN_NO;
        if (taken == PLAN_NO && in == PLAN_NO) return check_fail(k, load, "loads what was not saved");
        STK_TRY(untouched(k, bounce, taken != PLAN_NO ? taken : in, load));
    }
    if (in != PLAN_NO) STK_TRY(follow_nvme(k, act, from, in, &taken));
    if (p->nodes[taken].bytes != bytes || p->nodes[last].bytes != bytes)
        return check_fail(k, last, "moves another number of bytes");
    if (!check_before(k, writer, taken) || !check_before(k, last, reader))
        return check_fail(k, last, "save and load are out of order");
    return STK_OK;
}

static stk_status enter(struct checker *k, uint32_t i)
{
    const struct plan_node *x = &k->p->nodes[i];
    bool out = x->kind == PLAN_ACT_OUT;
    uint32_t slot = out ? x->src_slot : x->slot, other = out ? x->slot : x->src_slot;
    if (x->act >= plan_act_count(k->in)) return check_fail(k, i, "unknown activation");
    uint64_t bytes = plan_act_bytes(k->in, x->act);
    if (bytes == 0) return check_fail(k, i, "moves an activation that does not go to NVMe");
    if (x->bytes != bytes || x->block != k->in->places[plan_act_place(k->in, x->act)].block)
        return check_fail(k, i, "moves another number of bytes, or of another block");
    enum plan_arena arena = k->in->in_place ? PLAN_ARENA_ACT : PLAN_ARENA_SAVE;
    if (slot == PLAN_NO || other != PLAN_NO || k->p->slots[slot].arena != arena)
        return check_fail(k, i, "moves an activation where drives do not reach");
    uint32_t *entry = &(out ? k->act_out : k->act_in)[x->act];
    if (*entry != PLAN_NO) return check_fail(k, i, "the same work is planned twice");
    *entry = i;
    return STK_OK;
}

stk_status check_acts(struct checker *k)
{
    for (uint32_t i = 0; i < k->p->n_nodes; i++)
        if (k->p->nodes[i].kind == PLAN_ACT_OUT || k->p->nodes[i].kind == PLAN_ACT_IN)
            STK_TRY(enter(k, i));
    for (uint32_t a = 0; a < plan_act_count(k->in); a++) {
        uint32_t out = k->act_out[a], in = k->act_in[a];
        if (plan_act_bytes(k->in, a) == 0) continue;
        if (out == PLAN_NO || in == PLAN_NO)
            return check_fail(k, out, "an activation is never written to NVMe or never read back");
        if (!check_before(k, out, in))
            return check_fail(k, in, "reads an activation that has not been written");
    }
    return STK_OK;
}
