/* tests/engine/plan_victim.h - a plan to damage: a random one that the checker accepts, copies of it, edges taken
 * away, and a full search for paths, which knows nothing of the checker. */
#ifndef TESTS_ENGINE_PLAN_VICTIM_H
#define TESTS_ENGINE_PLAN_VICTIM_H

#include "tests/engine/plan_models.h"

struct victim {
    struct model m;
    struct plan *p;
    struct rng r;
};

static inline bool victim_make(struct victim *v, uint64_t seed)
{
    struct stk_error err = { 0 };
    uint64_t least[PLAN_ARENA_N], useful[PLAN_ARENA_N];
    rng_seed_stream(&v->r, test_seed(), seed);
    random_model(&v->m, &v->r);
    if (plan_needs(&v->m.in, least, useful, &err) != STK_OK) return false;
    for (int a = 0; a < PLAN_ARENA_N; a++) /* mostly tight: slots are reused */
        v->m.in.arena_bytes[a] =
            least[a] + rng_below(&v->r, (useful[a] - least[a]) / (1 + pick(&v->r, 4)) + 1);
    return plan_build(&v->m.in, &v->p, NULL, &err) == STK_OK &&
           plan_check(&v->m.in, v->p, &err) == STK_OK;
}

static inline bool found(struct victim *v) { return plan_check(&v->m.in, v->p, NULL) == STK_ERR_STATE; }

/* Successors from dependencies, as the builder leaves them. */
static inline void mirror(struct plan *p)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++) p->nodes[i].n_succ = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++)
        for (uint32_t e = 0; e < p->nodes[i].n_deps; e++)
            p->nodes[p->deps[p->nodes[i].first_dep + e]].n_succ++;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        p->nodes[i].first_succ = at;
        at += p->nodes[i].n_succ;
        p->nodes[i].n_succ = 0;
    }
    for (uint32_t i = 0; i < p->n_nodes; i++)
        for (uint32_t e = 0; e < p->nodes[i].n_deps; e++) {
            struct plan_node *d = &p->nodes[p->deps[p->nodes[i].first_dep + e]];
            p->succs[d->first_succ + d->n_succ++] = i;
        }
}

/* Paths through a node that may pass before its dependencies prove nothing, nor do those from the update
 * through what is no part of it, as it may run alone. `untried`: all that is speculative passes so. */
static inline bool leads(const struct plan *p, uint32_t from, uint32_t to, bool untried)
{
    bool *seen = calloc(p->n_nodes, 1), hit;
    seen[to] = true;
    for (uint32_t i = to + 1; i-- > from;)
        if (seen[i] && (i == to || !(untried ? p->nodes[i].spec : plan_passable(&p->nodes[i]))))
            for (uint32_t e = 0; e < p->nodes[i].n_deps; e++) {
                uint32_t d = p->deps[p->nodes[i].first_dep + e];
                bool leaves = p->nodes[i].part == PLAN_RUN_UPDATE &&
                              p->nodes[d].part != PLAN_RUN_UPDATE;
                if (d == from || !leaves) seen[d] = true;
            }
    hit = seen[from];
    free(seen);
    return hit;
}

/* In every period. */
static inline bool reaches(const struct plan *p, uint32_t from, uint32_t to)
{
    bool spec = p->nodes[from].spec || p->nodes[to].spec;
    return leads(p, from, to, false) && (spec || leads(p, from, to, true));
}

static inline void remove_edge(struct plan *p, uint32_t node, uint32_t edge)
{
    uint32_t at = p->nodes[node].first_dep + edge;
    memmove(p->deps + at, p->deps + at + 1, (p->n_deps - at - 1) * sizeof *p->deps);
    p->n_deps--;
    p->nodes[node].n_deps--;
    for (uint32_t i = node + 1; i < p->n_nodes; i++) p->nodes[i].first_dep--;
    mirror(p);
}

/* A copy to damage: the plan's arrays are as long as the counts, plus one element, so edges may be
 * removed in place. */
static inline struct plan *copy_plan(const struct plan *p)
{
    struct plan *c = calloc(1, sizeof *c);
    *c = *p;
#define COPY(field, n)                                                                             \
    c->field = memcpy(calloc((n) + 2u, sizeof *c->field), p->field, (n) * sizeof *c->field)
    COPY(nodes, p->n_nodes);
    if (p->n_slots)
        COPY(slots, p->n_slots);
    else
        c->slots = calloc(1, sizeof *c->slots);
    COPY(visits, p->n_visits);
    if (p->n_deps)
        COPY(deps, p->n_deps);
    else
        c->deps = calloc(1, sizeof *c->deps);
    COPY(succs, p->n_deps);
#undef COPY
    return c;
}

static inline void drop_copy(struct plan *c)
{
    free(c->nodes);
    free(c->slots);
    free(c->visits);
    free(c->deps);
    free(c->succs);
    free(c);
}

#endif
