/* engine/pace.c - when copies, updates and commits hold back (engine/pace.h).
 *
 * Owns nothing, knows no clock and no device. Engine lane, and whoever predicts. */
#include "engine/pace.h"
#include "engine/engine.h"

void pace_of_machine(const stk_machine *m, struct pace *out)
{
    double all = m->dram_bytes_per_s, update = m->update_bytes_per_s;
    *out = (struct pace){ 0 };
    if (m->on_host || !(all > 0) || !(update > 0)) return;
    out->least_bytes_per_s = all - update > all / 16 ? all - update : all / 16;
    out->shared_bytes_per_s = all - update;
    out->in_bytes_per_s = m->copy_in_bytes_per_s;
    out->out_bytes_per_s = m->copy_out_bytes_per_s;
    double left = all - m->copy_out_bytes_per_s - out->least_bytes_per_s;
    out->team_part = left > update / 4 ? left / update : 0.25;
}

/* The next visit's parameters are not made yet: no copy that could go faster is what it waits for. The chunks of
 * a block are updated in order, so the last tells first. */
static bool waits_for_update(const struct pace_now *w, uint32_t visit)
{
    const struct plan *p = w->plan;
    const struct plan_node *v = &p->nodes[p->visits[visit].node];
    for (uint32_t i = v->n_deps; i-- > 0;) {
        uint32_t c = p->deps[v->first_dep + i];
        const struct plan_node *copy = &p->nodes[c];
        if (copy->kind != PLAN_COPY_IN || w->node_state[c] != RUN_WAITING) continue;
        for (uint32_t k = 0; k < copy->n_deps; k++) {
            uint32_t u = p->deps[copy->first_dep + k];
            if (p->nodes[u].kind == PLAN_UPDATE && w->node_state[u] != RUN_DONE) return true;
        }
    }
    return false;
}

static bool compute_is_fed(const struct pace_now *w)
{
    if (w->visits_in_flight >= 2) return true;
    return w->next_visit < w->plan->n_visits && waits_for_update(w, w->next_visit);
}

double pace_copy(const struct pace *p, const struct pace_now *now, const struct plan_node *n)
{
    bool in = n->resource == PLAN_COPY_IN_LINK;
    double full = in ? p->in_bytes_per_s : p->out_bytes_per_s;
    if (!(p->least_bytes_per_s > 0) || now->updates_in_flight == 0) return 0;
    if (full > 0 && full <= p->shared_bytes_per_s) return 0;
    double drain = (double)now->ready_bytes[!in] / PACE_DRAIN_S;
    double rate = drain > p->least_bytes_per_s ? drain : p->least_bytes_per_s;
    if (full > 0 && rate >= full) return 0;
    return compute_is_fed(now) ? rate : 0;
}

/* The parameters of the next visit's block and of the two blocks behind it are made. */
static bool updates_are_ahead(const struct pace_now *w)
{
    const struct plan *p = w->plan;
    uint32_t blocks = 0;
    for (uint32_t v = w->next_visit; v < p->n_visits && p->visits[v].dir == PLAN_FORWARD; v++) {
        if (v > w->next_visit && p->visits[v].block == p->visits[v - 1].block) continue;
        if (waits_for_update(w, v)) return false;
        if (++blocks > PACE_BLOCKS_AHEAD) break;
    }
    return true;
}

uint32_t pace_team(const struct pace *p, const struct pace_now *now, const struct plan_node *n, uint32_t members)
{
    bool commit = n->kind == PLAN_COMMIT, update = n->kind == PLAN_UPDATE && n->part == PLAN_RUN_UPDATE;
    if ((!commit && !update) || !(p->least_bytes_per_s > 0) || now->ready_bytes[1] == 0) return members;
    if (now->next_visit >= now->plan->n_visits || now->plan->visits[now->next_visit].dir != PLAN_FORWARD)
        return members;
    if (update && !updates_are_ahead(now)) return members;
    uint32_t most = (uint32_t)(p->team_part * members + 0.5);
    return most > members ? members : most > 0 ? most : 1;
}
