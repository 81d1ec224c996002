/* engine/plan_wait.c - what a wait was for: the longest part of the chain of nodes that led to its end.
 *
 * Pure; any thread. Owns nothing. run.c asks for waits that happened, predict_run.c for those that it
 * foresees. A copy of new parameters that follows their update ends last, and takes a hundredth of what
 * the update took: the wait was for the update. */
#include "engine/plan.h"

#define CHAIN_MOST 256

/* The dependency that ended last; PLAN_NO: none has ended. */
static uint32_t last_of(const struct plan *p, uint32_t node, const double *end_ns)
{
    const struct plan_node *n = &p->nodes[node];
    uint32_t last = PLAN_NO;
    for (uint32_t i = 0; i < n->n_deps; i++) {
        uint32_t d = p->deps[n->first_dep + i];
        if (end_ns[d] > 0 && (last == PLAN_NO || end_ns[d] > end_ns[last])) last = d;
    }
    return last;
}

uint8_t plan_wait_kind(const struct plan *p, uint32_t node, const double *end_ns, double since_ns,
                       uint8_t otherwise)
{
    double sum[PLAN_KIND_N] = { 0 };
    uint8_t most = PLAN_KIND_N; /* none: `otherwise` may be a kind of the chain, too */
    for (int k = 0; k < CHAIN_MOST && node != PLAN_NO && end_ns[node] > since_ns; k++) {
        uint8_t kind = p->nodes[node].kind;
        if (kind == PLAN_VISIT) break;
        uint32_t before = last_of(p, node, end_ns);
        double from = before != PLAN_NO && end_ns[before] > since_ns ? end_ns[before] : since_ns;
        sum[kind] += end_ns[node] - from;
        if (kind != PLAN_NORM && (most == PLAN_KIND_N || sum[kind] > sum[most])) most = kind;
        node = before;
    }
    return most == PLAN_KIND_N ? otherwise : most;
}

uint8_t plan_visit_waits(const struct plan *p, uint32_t visit_node, const double *end_ns,
                         double since_ns, uint8_t otherwise)
{
    return plan_wait_kind(p, last_of(p, visit_node, end_ns), end_ns, since_ns, otherwise);
}
