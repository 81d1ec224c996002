/* engine/plan_check_impl.h - private to engine/plan_check*.c: what the checker knows about a plan,
 * all derived from its nodes and edges. */
#ifndef ENGINE_PLAN_CHECK_IMPL_H
#define ENGINE_PLAN_CHECK_IMPL_H

#include "engine/plan.h"

struct check_slot {
    uint32_t first_user, n_users; /* into users: node numbers, ascending */
    uint32_t next_chain_max; /* over all users: see check_graph */
    uint32_t chain_before_min;
    uint32_t chain_user_min, chain_user_max; /* users that are chain nodes themselves; 0: none */
};

struct checker {
    const struct plan_input *in;
    const struct plan *p;
    struct stk_error *err;
    bool untried; /* as if no node with `spec` ran (plan.h, SPECULATION) */
    /* The CHAIN: join, visits, norm. Each depends directly on the one before, so that they are
     * totally ordered; numbers count from 1. */
    uint32_t *chain_before; /* per node: the last chain node that precedes or is it; 0: none */
    uint32_t
        *next_chain; /* per node: the first chain node that follows or is it; UINT32_MAX: none */
    uint32_t *stamp, stamp_now; /* per node: for searches */
    uint32_t *stack; /* per node */
    uint32_t *list; /* two per node */
    uint32_t *users;
    struct check_slot *slots;
    uint32_t join, norm;
    /* per chunk (and state): node or PLAN_NO */
    uint32_t *update, *cast, *out, *fetch, *fetch_next, *write_back;
    uint32_t *spec, *undo, *commit, *spec_fetch, *spec_write;
    uint32_t *hand; /* per chunk: its HAND_OVER */
    uint32_t *seen_in; /* per chunk: slot + 1 */
    uint32_t *act_out, *act_in; /* per activation (plan_act_number) */
    uint32_t *visit_at; /* per (place, micro, dir): visit or PLAN_NO */
};

static inline bool check_trains(const struct checker *k) { return k->in->mode == PLAN_TRAIN; }

/* plan_check_graph.c */
stk_status check_fail(const struct checker *k, uint32_t node, const char *what);
stk_status check_graph(struct checker *k); /* edges, the chain, users of slots */
bool check_before(struct checker *k, uint32_t a,
                  uint32_t b); /* a completes before b begins, in every run. PLAN_NO: false */
stk_status check_overlaps(struct checker *k); /* slots that share bytes are ordered */
/* plan_check_data.c */
stk_status check_chunks(struct checker *k); /* update, write-back, gradients, next period */
stk_status check_params(struct checker *k);
/* plan_check_spec.c */
stk_status check_modes(struct checker *k); /* speculative updates, undo, commit */
/* plan_check_acts.c */
stk_status check_acts(struct checker *k); /* activations on NVMe: written, then read, once */
/* Follows a value from the visit that wrote it into slot `from` to the visit that reads slot `to`: both
 * slots are this value's only. act: its number on NVMe; PLAN_NO: it has none. After check_acts. */
stk_status check_follow(struct checker *k, uint32_t act, uint32_t from, uint32_t to, uint32_t writer,
                        uint32_t reader, uint64_t bytes);
/* plan_check_visits.c */
stk_status check_visits(struct checker *k); /* order, accumulators, activations */

#endif
