/* engine/plan_impl.h - private to engine/plan_*.c: the builder of a plan.
 *
 * A builder walks the program once and appends nodes; memory of a slot is found in a timeline: each
 * arena is a sorted row of segments, each segment remembers the slot that used these bytes last.
 * Taking bytes whose slot is retired costs an edge from its last users. */
#ifndef ENGINE_PLAN_IMPL_H
#define ENGINE_PLAN_IMPL_H

#include "engine/plan.h"

#define PLAN_PAGE UINT64_C(4096)

struct plan_link {
    uint32_t node, next;
}; /* lists of nodes in one pool; PLAN_NO ends */
struct plan_seg {
    uint64_t begin, end;
    uint32_t slot; /* PLAN_NO: never used */
};

struct plan_timeline {
    struct plan_seg *segs; /* sorted, disjoint, cover [0, high) */
    uint32_t n, cap;
    uint64_t capacity, high;
    uint64_t cursor, begin; /* ring: where the next slot begins; where it starts over */
};

struct plan_slot_state { /* of a slot while the plan is built */
    uint32_t users; /* nodes that use it since (and with) its last visit: list */
    uint32_t before; /* what its first writers depend on: last users of overlapped slots: list */
    uint32_t block; /* PARAM: whose; else PLAN_NO */
    uint32_t retired_visit; /* visits emitted when it was retired */
    bool live;
    bool brought; /* PARAM: its block's chunks are on their way */
    bool
        slow; /* its last user is no visit: reusing it at once would make a visit wait for a copy */
};

struct plan_use {
    uint32_t block, first, n, next; /* next use of the block; PLAN_NO: none */
};

struct plan_tuning {
    bool
        tight; /* lowest offsets, accumulators always swapped: the build that plan_needs measures */
    uint32_t load_ahead; /* uses whose activations are loaded ahead */
    bool cells; /* activations: small slots do not take pieces of what large ones had */
};

struct plan_builder {
    const struct plan_input *in;
    struct plan_tuning tuning;
    struct plan *p;
    struct stk_error *err;
    stk_status status;
    enum plan_arena short_arena;
    uint32_t cap_nodes, cap_deps, cap_slots;
    uint32_t *mark; /* per node: the node being built that depends on it already, + 1 */
    struct plan_slot_state *slot_state;
    struct plan_link *links;
    uint32_t n_links, cap_links;
    struct plan_timeline arena[PLAN_ARENA_N];
    struct plan_use *uses;
    uint32_t n_uses;
    uint32_t *use_of; /* per visit */
    uint32_t use; /* the one at hand */
    uint32_t visits_emitted, last_visit_node;
    uint32_t join;
    /* per block */
    uint32_t *block_slot, *block_next_use, *acc_slot, *acc_saved;
    bool *block_staged; /* its parameters go through a PARAM slot */
    bool *block_waited; /* in place: a visit waits for its updates already */
    /* per chunk */
    uint32_t *update_node, *write_param, *write_opt, *fetch_grad;
    uint32_t *order; /* trainable chunks in the order of the update */
    uint32_t n_order, n_ahead; /* the first n_ahead are fetched at the end of the period before */
    bool *grad_stays; /* per chunk: its gradient is cast into the slot of the next update */
    uint32_t *next_slot; /* per chunk: that slot, taken for the first n_next of the order */
    uint32_t n_next;
    bool stays_taken;
    uint64_t next_cursor; /* of the UPDATE arena: where the next such slot lies */
    uint32_t *casts;
    uint32_t n_casts;
    uint32_t *commit; /* split: per chunk */
    uint8_t *hand_way; /* per chunk: enum plan_hand_way of its next way to a PARAM slot */
    uint32_t *hand_node; /* per chunk: its HAND_OVER */
    /* speculate (plan_spec.c) */
    uint64_t spec_begin_bytes; /* of the UPDATE arena: speculative slots lie behind it */
    uint32_t n_keep; /* so many of the order are fetched ahead and not speculated, if on NVMe */
    uint8_t *spec_way; /* per chunk: enum plan_spec_way */
    struct plan_timeline untried; /* who lay where in the UPDATE arena before the first of them: segs, n */
    uint32_t *spec_node, *spec_write_param, *spec_write_opt, *undo_node;
    uint32_t *param_readers; /* list: what read the home of its parameter in this period */
    /* per place and micro-batch; per micro-batch */
    uint32_t *bound, *full, *bound_saved, *full_saved, *flow, *flow_left;
    uint32_t *bound_out, *full_out; /* on NVMe: the node that wrote it; PLAN_NO: not there */
    bool *forward_done;
    uint64_t flow_bytes;
    bool swap_acc;
};

/* --- order of visits (plan_order.c) */
stk_status plan_order_check(const struct plan_input *in, struct stk_error *err);
stk_status plan_order_visits(const struct plan_input *in, struct plan_visit **out, uint32_t *n,
                             struct stk_error *err);
void plan_order_uses(struct plan_builder *b);
bool plan_has_input(const struct plan_input *in, uint32_t place);

/* --- memory (plan_arena.c) */
static inline uint64_t plan_page_up(uint64_t n)
{
    return (n + PLAN_PAGE - 1) / PLAN_PAGE * PLAN_PAGE;
}
/* Makes room for one more element. False: no memory, status is set, and the vector starts over (its
 * memory stays valid), so that the caller may go on to its next check of the status. */
bool plan_grow(struct plan_builder *b, void **base, uint32_t *n, uint32_t *cap, size_t elem_bytes);
void plan_list_add(struct plan_builder *b, uint32_t *head, uint32_t node);
bool plan_arena_is_ring(enum plan_arena a);
/* A new live slot. Non-PARAM arenas pass PLAN_NO twice; PARAM: blocks whose next use is after use
 * `upto` may be dropped. PLAN_NO: no room. */
uint32_t plan_slot_new(struct plan_builder *b, enum plan_arena a, uint64_t bytes, uint32_t block,
                       uint32_t upto);
/* The same, but no room is an error: sets the status and gives slot 0 or PLAN_NO. */
uint32_t plan_slot_must(struct plan_builder *b, enum plan_arena a, uint64_t bytes, uint32_t block,
                        uint32_t upto);
void plan_slot_retire(struct plan_builder *b, uint32_t slot);

/* Who lies where in the arena now, into segs and n of `to`. */
void plan_arena_keep(struct plan_builder *b, enum plan_arena a, struct plan_timeline *to);
/* The slot's first writers depend, too, on the last users of what had its bytes in `t`. */
void plan_slot_follow(struct plan_builder *b, uint32_t slot, const struct plan_timeline *t);

/* Nobody has taken bytes of it since. */
bool plan_slot_intact(const struct plan_builder *b, uint32_t slot);

/* --- nodes (plan_nodes.c) */
struct plan_node *plan_node_begin(struct plan_builder *b, enum plan_kind kind, uint8_t part);
/* The same for a transfer of one state of a chunk: state, block, chunk and bytes are set. */
struct plan_node *plan_node_begin_state(struct plan_builder *b, enum plan_kind kind, uint8_t part,
                                        uint32_t chunk, enum chunk_state s);
void plan_node_dep(struct plan_builder *b, uint32_t node); /* PLAN_NO: nothing */
void plan_node_deps(struct plan_builder *b, uint32_t list);
/* Ends the node; what it names in slot and src_slot is used by it (`only`: earlier users of the
 * slot are implied by this node's edges). */
uint32_t plan_node_end(struct plan_builder *b);
void plan_slot_use(struct plan_builder *b, uint32_t slot, uint32_t node, bool only);
enum plan_resource plan_kind_resource(enum plan_kind k);

/* --- the parts of a period */
void plan_emit_update_phase(struct plan_builder *b); /* plan_update.c */
void plan_emit_for_next(struct plan_builder *b);
uint32_t plan_param_ready(const struct plan_builder *b, uint32_t chunk);
void plan_emit_casts(struct plan_builder *b, uint32_t block, uint32_t after);
void plan_emit_norm(struct plan_builder *b);
bool plan_ensure_params(struct plan_builder *b, uint32_t use, bool must); /* plan_params.c */
/* Hand-over (plan_params.c). At once: the block's PARAM slot is empty when the period begins. Late: no
 * other update takes the UPDATE slot. */
enum plan_hand_way { PLAN_HAND_NONE, PLAN_HAND_NOW, PLAN_HAND_LATE };
void plan_hand_begin(struct plan_builder *b); /* before the updates: who may at once */
void plan_hand_now(struct plan_builder *b, uint32_t chunk); /* after its UPDATE */
void plan_hand_end(struct plan_builder *b); /* after the updates: who may late */
void plan_acts_before(struct plan_builder *b, uint32_t visit); /* plan_acts.c */
void plan_acts_ahead(struct plan_builder *b, uint32_t visit);
void plan_acts_after(struct plan_builder *b, uint32_t visit);


/* --- speculation (plan_spec.c) */
enum plan_spec_way { PLAN_SPEC_NONE, PLAN_SPEC_AT_HOME, PLAN_SPEC_STAGED };
void plan_spec_begin(struct plan_builder *b); /* after the order is known: who, and where */
/* The chunk's UNDO, in part UPDATE. `grad`: the FETCH of its gradient, or PLAN_NO. */
void plan_spec_undo(struct plan_builder *b, uint32_t chunk, uint32_t slot, uint32_t grad);
/* The speculative update after node `cast`, which left the gradient at home or in `grad_slot`. */
void plan_spec_update(struct plan_builder *b, uint32_t chunk, uint32_t cast, uint32_t grad_slot);

/* One attempt with given tuning. */
stk_status plan_build_once(const struct plan_input *in, struct plan_tuning t, struct plan **out,
                           enum plan_arena *short_arena, struct stk_error *err);

#endif
