/* engine/plan_check_graph.c - the order that a plan's edges enforce, and that slots sharing bytes
 * follow each other in it.
 *
 * Owns: the tables of a struct checker. Must not know: how a plan was built. Any thread. All pairs
 * of 100,000 nodes would be too many: nearly every path runs through a visit, and visits are in one
 * line, so two numbers per node answer most questions; the rest are short paths between copies,
 * found by a search that never passes a chain node. A node that may complete before its dependencies
 * (carries_on) can begin or end a path, never carry it on. Nor does a node of part VISITS between two of
 * part UPDATE, which may run alone: only a HAND_OVER stands there, and it waits for no visit. */
#include "base/sys.h"
#include "engine/plan_check_impl.h"

#include <stdlib.h>
#include <string.h>

stk_status check_fail(const struct checker *k, uint32_t node, const char *what)
{
    const char *kind =
        node < k->p->n_nodes ? plan_kind_name((enum plan_kind)k->p->nodes[node].kind) : "-";
    uint32_t chunk = node < k->p->n_nodes ? k->p->nodes[node].chunk : PLAN_NO;
    return stk_error_set(
        k->err, STK_ERR_STATE, 0,
        "plan: node %u (%s, chunk %d): %s: this is a fault of the planner, please report it", node,
        kind, (int)chunk, what);
}

/* A path may go through it. */
static bool carries_on(const struct checker *k, const struct plan_node *x)
{
    return k->untried ? !x->spec : !plan_passable(x);
}

static bool is_chain(const struct plan_node *x)
{
    return x->kind == PLAN_JOIN || x->kind == PLAN_VISIT || x->kind == PLAN_NORM;
}

static stk_status check_edges(struct checker *k)
{
    const struct plan *p = k->p;
    uint32_t dep = 0, succ = 0;
    /* Edges are dense, point backwards, and successors mirror them in ascending order. */
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        const struct plan_node *x = &p->nodes[i];
        if (x->kind >= PLAN_KIND_N || x->resource >= PLAN_RESOURCE_N)
            return check_fail(k, i, "unknown kind or resource");
        if (x->first_dep != dep || x->first_succ != succ || x->n_deps > p->n_deps - dep ||
            x->n_succ > p->n_deps - succ)
            return check_fail(k, i, "edges out of place");
        dep += x->n_deps;
        succ += x->n_succ;
        if ((x->slot != PLAN_NO && x->slot >= p->n_slots) ||
            (x->src_slot != PLAN_NO && x->src_slot >= p->n_slots))
            return check_fail(k, i, "unknown slot");
    }
    if (dep != p->n_deps || succ != p->n_deps)
        return check_fail(k, p->n_nodes, "edges are left over");
    for (uint32_t i = 0; i < p->n_nodes; i++)
        for (uint32_t e = 0; e < p->nodes[i].n_deps; e++) {
            uint32_t d = p->deps[p->nodes[i].first_dep + e];
            if (d >= i) return check_fail(k, i, "depends on a later node");
            const struct plan_node *y = &p->nodes[d];
            if (k->stack[d] >= y->n_succ || p->succs[y->first_succ + k->stack[d]++] != i)
                return check_fail(k, d, "its successors are not the nodes that depend on it");
        }
    return STK_OK;
}

static bool depends_directly(const struct plan *p, uint32_t node, uint32_t on)
{
    for (uint32_t e = 0; e < p->nodes[node].n_deps; e++)
        if (p->deps[p->nodes[node].first_dep + e] == on) return true;
    return false;
}

/* The edge is not there when the update runs alone. */
static bool leaves_part(const struct plan_node *x, const struct plan_node *dep)
{
    return x->part == PLAN_RUN_UPDATE && dep->part != PLAN_RUN_UPDATE;
}

static stk_status check_chain(struct checker *k)
{
    const struct plan *p = k->p;
    uint32_t last = PLAN_NO, n = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        const struct plan_node *x = &p->nodes[i];
        if (is_chain(x)) {
            if (last != PLAN_NO && !depends_directly(p, i, last))
                return check_fail(k, i, "does not depend on the visit before it");
            last = i;
            k->chain_before[i] = ++n;
            if (x->kind == PLAN_JOIN && (k->join != PLAN_NO || n > 1))
                return check_fail(k, i, "a second or late join");
            if (x->kind == PLAN_NORM && k->norm != PLAN_NO)
                return check_fail(k, i, "a second norm");
            if (x->kind == PLAN_JOIN) k->join = i;
            if (x->kind == PLAN_NORM) k->norm = i;
            continue;
        }
        for (uint32_t e = 0; e < x->n_deps; e++) {
            uint32_t d = p->deps[x->first_dep + e], before = k->chain_before[d];
            if (!carries_on(k, &p->nodes[d])) continue;
            if (leaves_part(x, &p->nodes[d]) && (p->nodes[d].kind != PLAN_HAND_OVER || before > 0))
                return check_fail(k, i, "an update waits for a visit");
            if (before > k->chain_before[i]) k->chain_before[i] = before;
        }
    }
    memset(k->next_chain, 0xff, p->n_nodes * sizeof *k->next_chain);
    for (uint32_t i = p->n_nodes; i-- > 0;) {
        const struct plan_node *x = &p->nodes[i];
        if (is_chain(x)) k->next_chain[i] = k->chain_before[i];
        if (!carries_on(k, x)) continue;
        for (uint32_t e = 0; e < x->n_deps; e++) {
            uint32_t *next = &k->next_chain[p->deps[x->first_dep + e]];
            if (k->next_chain[i] < *next) *next = k->next_chain[i];
        }
    }
    return STK_OK;
}

bool check_before(struct checker *k, uint32_t a, uint32_t b)
{
    const struct plan *p = k->p;
    if (a == PLAN_NO || b == PLAN_NO || a >= b) return false;
    if (k->next_chain[a] <= k->chain_before[b]) return true;
    if (depends_directly(p, b, a)) return true;
    if (is_chain(&p->nodes[a]) || is_chain(&p->nodes[b]))
        return false; /* the two numbers know all about these */
    uint32_t depth = 0;
    k->stack[depth++] = b;
    k->stamp[b] = ++k->stamp_now;
    while (depth) {
        const struct plan_node *x = &p->nodes[k->stack[--depth]];
        for (uint32_t e = 0; e < x->n_deps; e++) {
            uint32_t d = p->deps[x->first_dep + e];
            if (d == a) return true;
            if (d < a || k->stamp[d] == k->stamp_now || is_chain(&p->nodes[d]) ||
                !carries_on(k, &p->nodes[d]) || leaves_part(x, &p->nodes[d]))
                continue;
            k->stamp[d] = k->stamp_now;
            k->stack[depth++] = d;
        }
    }
    return false;
}

/* --- users of slots --- */

static uint32_t node_slots(const struct plan *p, uint32_t node, uint32_t out[8])
{
    const struct plan_node *x = &p->nodes[node];
    const struct plan_visit *v = x->kind == PLAN_VISIT ? &p->visits[x->visit] : NULL;
    const uint32_t all[8] = { x->slot,
                              x->src_slot,
                              v ? v->param_slot : PLAN_NO,
                              v ? v->acc_slot : PLAN_NO,
                              v ? v->in_slot : PLAN_NO,
                              v ? v->out_slot : PLAN_NO,
                              v ? v->full_slot : PLAN_NO,
                              v ? v->flow_slot : PLAN_NO };
    uint32_t n = 0;
    for (uint32_t i = 0; i < 8; i++)
        if (all[i] != PLAN_NO) out[n++] = all[i];
    return n;
}

static stk_status check_visit_numbers(struct checker *k)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < k->p->n_nodes; i++) {
        const struct plan_node *x = &k->p->nodes[i];
        if (x->kind != PLAN_VISIT) continue;
        if (x->visit != n || n >= k->p->n_visits || k->p->visits[n].node != i)
            return check_fail(k, i, "visits are not in the order of their nodes");
        const struct plan_visit *v = &k->p->visits[n++];
        const uint32_t slots[6] = { v->param_slot, v->acc_slot,  v->in_slot,
                                    v->out_slot,   v->full_slot, v->flow_slot };
        for (int s = 0; s < 6; s++)
            if (slots[s] != PLAN_NO && slots[s] >= k->p->n_slots)
                return check_fail(k, i, "unknown slot");
    }
    return n == k->p->n_visits ? STK_OK : check_fail(k, PLAN_NO, "visits without a node");
}

static void note_user(const struct checker *k, struct check_slot *s, uint32_t node)
{
    if (k->next_chain[node] > s->next_chain_max) s->next_chain_max = k->next_chain[node];
    if (k->chain_before[node] < s->chain_before_min) s->chain_before_min = k->chain_before[node];
    if (!is_chain(&k->p->nodes[node])) return;
    if (s->chain_user_min == 0) s->chain_user_min = k->chain_before[node];
    s->chain_user_max = k->chain_before[node];
}

static stk_status collect_users(struct checker *k)
{
    const struct plan *p = k->p;
    uint32_t slots[8], at = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++)
        for (uint32_t n = node_slots(p, i, slots); n-- > 0;) k->slots[slots[n]].n_users++;
    for (uint32_t s = 0; s < p->n_slots; s++) {
        struct check_slot *x = &k->slots[s];
        x->first_user = at;
        at += x->n_users;
        x->n_users = 0;
        x->chain_before_min = UINT32_MAX;
    }
    k->users = sys_calloc((size_t)at + 1, sizeof *k->users);
    if (!k->users) return stk_error_set(k->err, STK_ERR_NOMEM, 0, "no memory for checking a plan");
    for (uint32_t i = 0; i < p->n_nodes; i++)
        for (uint32_t n = node_slots(p, i, slots); n-- > 0;) {
            struct check_slot *x = &k->slots[slots[n]];
            if (x->n_users && k->users[x->first_user + x->n_users - 1] == i)
                return check_fail(k, i, "uses one slot for two things");
            k->users[x->first_user + x->n_users++] = i;
            note_user(k, x, i);
        }
    return STK_OK;
}

static stk_status check_slot_sizes(struct checker *k)
{
    const struct plan *p = k->p;
    uint64_t peak[PLAN_ARENA_N] = { 0 };
    for (uint32_t i = 0; i < p->n_slots; i++) {
        const struct plan_slot *s = &p->slots[i];
        const struct check_slot *x = &k->slots[i];
        if (s->arena >= PLAN_ARENA_N || x->n_users == 0)
            return check_fail(k, s->first, "a slot without use or arena");
        uint32_t first = k->users[x->first_user], last = k->users[x->first_user + x->n_users - 1];
        if (s->first != first || s->last != last)
            return check_fail(k, first, "first and last user of its slot are wrong");
        if (s->size_bytes == 0 || (s->offset_bytes | s->size_bytes) % 4096)
            return check_fail(k, first, "slot is not of whole pages");
        uint64_t capacity = k->in->arena_bytes[s->arena], end = s->offset_bytes + s->size_bytes;
        if (s->size_bytes > capacity || s->offset_bytes > capacity - s->size_bytes)
            return check_fail(k, first, "slot lies outside of its arena");
        if (end > peak[s->arena]) peak[s->arena] = end;
    }
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        const struct plan_node *x = &p->nodes[i];
        bool computes = x->kind == PLAN_UPDATE || x->kind == PLAN_COMMIT || x->kind == PLAN_UNDO ||
                        x->kind == PLAN_DEVICE_UPDATE;
        uint64_t bytes = computes ? 0 : x->bytes,
                 from = x->kind == PLAN_GRAD_CAST ? 2 * bytes : bytes;
        if (x->slot != PLAN_NO && (bytes > p->slots[x->slot].size_bytes ||
                                   x->slot_offset_bytes > p->slots[x->slot].size_bytes - bytes))
            return check_fail(k, i, "writes behind its slot");
        if (x->src_slot != PLAN_NO &&
            (from > p->slots[x->src_slot].size_bytes ||
             x->src_offset_bytes > p->slots[x->src_slot].size_bytes - from))
            return check_fail(k, i, "reads behind its slot");
    }
    if (memcmp(peak, p->peak_bytes, sizeof peak))
        return check_fail(k, PLAN_NO, "the peaks do not add up");
    return STK_OK;
}

stk_status check_graph(struct checker *k)
{
    STK_TRY(check_edges(k));
    STK_TRY(check_chain(k));
    STK_TRY(check_visit_numbers(k));
    STK_TRY(collect_users(k));
    return check_slot_sizes(k);
}

/* --- slots that share bytes --- */

static uint32_t dep_of(const struct plan *p, uint32_t node, uint32_t e)
{
    return p->deps[p->nodes[node].first_dep + e];
}

/* The users of a slot that no other user of it depends on. */
static uint32_t last_users(struct checker *k, const struct check_slot *s, uint32_t *out)
{
    const uint32_t *v = k->users + s->first_user;
    uint32_t member = ++k->stamp_now, covered = ++k->stamp_now, n = 0;
    for (uint32_t i = 0; i < s->n_users; i++) k->stamp[v[i]] = member;
    for (uint32_t i = 0; i < s->n_users; i++)
        for (uint32_t e = 0; e < k->p->nodes[v[i]].n_deps && carries_on(k, &k->p->nodes[v[i]]); e++)
            if (k->stamp[dep_of(k->p, v[i], e)] == member)
                k->stamp[dep_of(k->p, v[i], e)] = covered;
    for (uint32_t i = 0; i < s->n_users; i++)
        if (k->stamp[v[i]] == member) out[n++] = v[i];
    return n;
}

/* The users of a slot that depend directly on no other user of it. */
static uint32_t first_users(struct checker *k, const struct check_slot *s, uint32_t *out)
{
    const uint32_t *v = k->users + s->first_user;
    uint32_t member = ++k->stamp_now, n = 0;
    for (uint32_t i = 0; i < s->n_users; i++) {
        bool first = true;
        for (uint32_t e = 0; e < k->p->nodes[v[i]].n_deps && first; e++)
            first = k->stamp[dep_of(k->p, v[i], e)] != member;
        k->stamp[v[i]] = member;
        if (first) out[n++] = v[i];
    }
    return n;
}

/* True if every user of `old` completes before any user of `new` begins. */
static bool slot_before(struct checker *k, const struct check_slot *old,
                        const struct check_slot *new)
{
    if (old->chain_user_max && new->chain_user_min && old->chain_user_max >= new->chain_user_min)
        return false;
    if (old->next_chain_max <= new->chain_before_min) return true;
    uint32_t n_old = last_users(k, old, k->list), n_new = first_users(k, new, k->list + n_old);
    for (uint32_t i = 0; i < n_old; i++)
        for (uint32_t j = 0; j < n_new; j++)
            if (!check_before(k, k->list[i], k->list[n_old + j])) return false;
    return true;
}

struct owner {
    uint64_t begin, end;
    uint32_t slot;
};
struct owners {
    struct owner *v;
    uint32_t n;
};

/* An update whose state the period before left in its slot, or may have left. */
static bool expects_state(const struct checker *k, uint32_t node)
{
    const struct plan_node *x = &k->p->nodes[node];
    if (x->kind != PLAN_UPDATE || x->spec) return false;
    const uint32_t *next = &k->fetch_next[x->chunk * CHUNK_STATE_N];
    return x->prefetched || next[CHUNK_PARAM] != PLAN_NO || next[CHUNK_OPT] != PLAN_NO;
}

/* A slot in which something waits for the next period: fetched state, or a gradient. */
static bool holds_for_next(const struct checker *k, uint32_t slot)
{
    for (uint32_t u = 0; u < k->slots[slot].n_users; u++) {
        const struct plan_node *x = &k->p->nodes[k->users[k->slots[slot].first_user + u]];
        bool gradient = x->kind == PLAN_GRAD_CAST || x->kind == PLAN_GRAD_OUT;
        if (x->for_next) return true;
        if (gradient && x->slot == slot && k->p->slots[slot].arena == PLAN_ARENA_UPDATE) return true;
    }
    return false;
}

/* Puts a slot over what was there; every slot it covers must be over. */
static stk_status own(struct checker *k, struct owners *o, uint32_t slot)
{
    const struct plan_slot *s = &k->p->slots[slot];
    uint64_t begin = s->offset_bytes, end = begin + s->size_bytes;
    uint32_t low = 0, high = o->n, n_new = 0, covered = 0;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (o->v[mid].end <= begin)
            low = mid + 1;
        else
            high = mid;
    }
    struct owner pieces[3];
    if (low < o->n && o->v[low].begin < begin)
        pieces[n_new++] = (struct owner){ o->v[low].begin, begin, o->v[low].slot };
    pieces[n_new++] = (struct owner){ begin, end, slot };
    for (uint32_t i = low; i < o->n && o->v[i].begin < end; i++, covered++) {
        const struct plan_node *first = &k->p->nodes[k->users[k->slots[slot].first_user]];
        uint32_t node = (uint32_t)(first - k->p->nodes);
        if (holds_for_next(k, o->v[i].slot))
            return check_fail(k, node, "overwrites state fetched for the next period");
        for (uint32_t u = 0; s->arena == PLAN_ARENA_UPDATE && u < k->slots[slot].n_users; u++)
            if (expects_state(k, k->users[k->slots[slot].first_user + u]))
                return check_fail(k, node, "its prefetched state was overwritten");
        if (!slot_before(k, &k->slots[o->v[i].slot], &k->slots[slot]))
            return check_fail(k, node, "takes bytes that others may still use");
        if (o->v[i].end > end) pieces[n_new++] = (struct owner){ end, o->v[i].end, o->v[i].slot };
    }
    if (n_new != covered)
        memmove(o->v + low + n_new, o->v + low + covered, (o->n - low - covered) * sizeof *o->v);
    memcpy(o->v + low, pieces, n_new * sizeof *pieces);
    o->n += n_new - covered;
    return STK_OK;
}

/* Where nothing is speculated, nobody uses it. */
static bool unused(const struct checker *k, uint32_t slot)
{
    const struct check_slot *s = &k->slots[slot];
    for (uint32_t u = 0; u < s->n_users; u++)
        if (!k->untried || !k->p->nodes[k->users[s->first_user + u]].spec) return false;
    return true;
}

struct order {
    uint32_t first, slot;
};

static int compare_order(const void *a, const void *b)
{
    const struct order *x = a, *y = b;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return x->slot < y->slot ? -1 : 1;
}

stk_status check_overlaps(struct checker *k)
{
    uint32_t n = k->p->n_slots;
    struct order *order = sys_calloc((size_t)n + 1, sizeof *order);
    struct owner *all = sys_calloc(2 * (size_t)n + 4, sizeof *all);
    stk_status status =
        order && all ? STK_OK
                     : stk_error_set(k->err, STK_ERR_NOMEM, 0, "no memory for checking a plan");
    for (uint32_t i = 0; status == STK_OK && i < n; i++)
        order[i] = (struct order){ k->users[k->slots[i].first_user], i };
    if (status == STK_OK) qsort(order, n, sizeof *order, compare_order);
    for (int a = 0; status == STK_OK && a < PLAN_ARENA_N; a++) {
        struct owners o = { all, 0 };
        for (uint32_t i = 0; i < n && status == STK_OK; i++)
            if (k->p->slots[order[i].slot].arena == a && !unused(k, order[i].slot))
                status = own(k, &o, order[i].slot);
    }
    sys_free(all);
    sys_free(order);
    return status;
}
