/* engine/plan.h - the motion of data around all visits, as data.
 *
 * A plan covers one PERIOD, from norm to norm: first the update of the previous step (phase U),
 * then the visits of this step's forward and backward, then the norm. A period can be run in parts:
 * `PLAN_RUN_UPDATE` (epilogue: last step, before checkpoint or evaluation), `PLAN_RUN_VISITS`
 * (prologue: the first step has nothing to update), or both. Nodes of a part that does not run
 * count as complete. Both outcomes of the norm are in it: update nodes of a skipped step pass
 * without touching state. Everything is back in one canonical state at a period's end: device
 * copies are stale, because the update will change every parameter; so a period starts with empty
 * caches.
 *
 * A plan is a pure function of its input: no clocks, no pointers, no allocation order. It is
 * printable and diffable.
 *
 * NODES are in program order, which is, but for `rank`, the order of priority on each resource. A node's
 * dependencies are earlier nodes. An edge between two VISIT nodes is met as soon as the earlier is
 * queued (one compute stream runs them in order); every other edge is met at completion.
 *
 * SLOTS. Every node that writes memory names its slot: a range of an ARENA, from the node that
 * first writes it to the nodes that last use it. Reusing bytes is a dependency edge (the first
 * writer of the new slot depends on the last users of every slot it overlaps), so the peak does not
 * depend on how nodes interleave.
 *
 * HAND-OVER. A parameter on NVMe whose UPDATE runs in a period goes to the period's first visit in memory:
 * HAND_OVER copies it from the chunk's UPDATE slot to its PARAM slot. The FETCH behind it (and on a
 * discrete device the COPY_IN) is `optional`: it PASSES, that is, completes and does nothing, where the
 * HAND_OVER ran, and brings the parameter where no update ran in this period; there the HAND_OVER
 * passes. The write-back stays: later visits and periods read it.
 *
 * ON THE DEVICE. A block whose chunks all have homes CHUNK_DEVICE stays there: visits read its parameters
 * where they are (no PARAM slot, no COPY_IN), GRAD_CAST leaves its gradient at home (no GRAD_OUT), and
 * DEVICE_UPDATE runs on a stream of the device. That update waits for nothing but the norm, whatever the
 * mode: it is not split and not speculated. Not in place, not in own order.
 *
 * SPECULATION (PLAN_SPECULATE). A chunk with `spec` has, after its gradient's cast, a second UPDATE, of
 * part VISITS, as if the norm were going to be fine; in the part UPDATE of the next period stands its
 * UNDO, before the UPDATE that waited for the norm. What happens is decided as the plan runs
 * (engine/spec.h): nodes of either way PASS, that is, complete at once and do nothing. All pass in
 * order but for the speculative UPDATE and its WRITE_BACKs, which may pass before what they depend on
 * (PASSABLE): nothing may be concluded from a path through them, and plan_check does not. State on
 * NVMe goes through the UPDATE arena behind what the first `keep` chunks of the order take; those are
 * fetched for the next period as in `chase` and not speculated. In a period that is UNTRIED as a whole
 * all nodes with `spec` pass as it begins, whatever they wait for: what is fetched for the next period then
 * waits, as in `chase`, for who had its bytes before them. So plan_check proves a plan twice: as it is,
 * and as if there were no such nodes. */
#ifndef ENGINE_PLAN_H
#define ENGINE_PLAN_H

#include "base/status.h"
#include "offload/chunk.h"
#include <stdio.h>

enum plan_kind {
    PLAN_FETCH,      /* NVMe -> host slot: one state of one chunk (state in `state`) */
    PLAN_COPY_IN,    /* host (home or slot `src_slot`) -> device parameter slot `slot`: one chunk */
    PLAN_GATHER,     /* all-gather of a block's shards (several ranks; absent with one) */
    PLAN_VISIT,
    PLAN_REDUCE,     /* reduce-scatter of a block's accumulator (several ranks; absent with one) */
    PLAN_GRAD_CAST,  /* accumulator -> 16-bit gradient of one chunk, sum of squares; into `slot` or,
                      * slot = NONE, into the chunk's host home */
    PLAN_GRAD_OUT,   /* discrete device: 16-bit gradient device `src_slot` -> host home or slot
                      * `slot` */
    PLAN_NORM,
    PLAN_UPDATE,     /* one chunk. State that is not at a host home is in `slot` (see
                      * plan_update_offset). `split`, where the chunk has a COMMIT: only the new
                      * parameter, into the block's second buffer */
    PLAN_WRITE_BACK, /* host `src_slot` -> NVMe: one state of one chunk */
    PLAN_SAVE,       /* device `src_slot` -> host slot `slot`: activations, or an accumulator
                      * between micro-batches */
    PLAN_LOAD,       /* host `src_slot` -> device slot `slot`: the way back */
    PLAN_JOIN,       /* nothing: an edge from many to many (serial update) */
    PLAN_COMMIT,     /* `split`: the state that belongs to the new parameter */
    PLAN_UNDO,       /* `speculate`: takes a speculative update back. Gradient on NVMe: in `slot` */
    PLAN_ACT_OUT,    /* slot `src_slot` (ACT where the device is in place, else SAVE) -> NVMe: activation
                      * `act` */
    PLAN_ACT_IN,     /* the way back, into `slot` */
    PLAN_HAND_OVER,  /* UPDATE slot `src_slot` -> parameter slot `slot`: one chunk's new parameter (see
                      * HAND-OVER). By the update team; on a discrete device over the link */
    PLAN_DEVICE_UPDATE, /* one chunk whose homes are in the device's memory */
    PLAN_KIND_N
};

enum plan_resource {
    PLAN_COMPUTE,
    PLAN_COPY_IN_LINK,
    PLAN_COPY_OUT_LINK,
    PLAN_GATHER_LINK,
    PLAN_NVME_READ,
    PLAN_NVME_WRITE,
    PLAN_UPDATE_TEAM,
    PLAN_CAST /* the
                     gradient stream */
    ,
    PLAN_UPDATE_STREAM, /* of the device: updates of what lies there */
    PLAN_NONE,
    PLAN_RESOURCE_N
};

enum plan_arena {
    PLAN_ARENA_PARAM,      /* blocks cached for visits: on the device; in place: in host memory
                            * (only NVMe homes need it then) */
    PLAN_ARENA_ACC,        /* fp32 accumulators */
    PLAN_ARENA_ACT,        /* boundaries, full sets, gradient flow */
    PLAN_ARENA_CAST,       /* discrete: 16-bit gradients on the device, chunk by chunk */
    PLAN_ARENA_BOUNCE,     /* host: NVMe parameters on their way to a discrete device, chunk by
                            * chunk */
    PLAN_ARENA_UPDATE,     /* host: staged state of chunks under update, and of those fetched ahead for the
                            * next one their gradients */
    PLAN_ARENA_GRAD,       /* host: 16-bit gradients on their way to NVMe */
    PLAN_ARENA_SAVE,       /* host: offloaded activations and accumulators; activations on their way
                            * between a discrete device and NVMe */
    PLAN_ARENA_N
};
const char *plan_kind_name(enum plan_kind k);
const char *plan_resource_name(enum plan_resource r);
const char *plan_arena_name(enum plan_arena a);
/* True when the arena lies in device memory for a discrete device. */
bool plan_arena_on_device(enum plan_arena a);

#define PLAN_NO UINT32_MAX
#define PLAN_RANK_LATER (1u << 30) /* added to the rank of what nothing waits for but its slot */
enum { PLAN_RUN_UPDATE = 1, PLAN_RUN_VISITS = 2 };
enum plan_dir { PLAN_FORWARD, PLAN_BACKWARD };
enum plan_mode { PLAN_TRAIN, PLAN_EVAL /* forward visits of all blocks, no gradient, no update */ };
enum plan_update { PLAN_SERIAL, PLAN_CHASE, PLAN_SPLIT, PLAN_SPECULATE };
enum plan_accumulate { PLAN_LAYER_MAJOR, PLAN_MICRO_MAJOR };
enum plan_act { PLAN_ACT_KEEP, PLAN_ACT_RECOMPUTE, PLAN_ACT_HOST, PLAN_ACT_NVME, PLAN_ACT_N };

struct plan_block_in {          /* one block as the plan sees it */
    uint32_t first_chunk, n_chunks, n_chunks_trainable;
    uint64_t param_bytes;       /* of the flat vector, 16-bit, unpadded */
    uint64_t acc_bytes;         /* fp32 accumulator of the trainable part; 0: frozen */
    bool split;                 /* `split` and `speculate`: its parameters before its state, where that
                                 * is possible (plan_splits) */
    bool split_tried;           /* `speculate`: in a period whose step is tried, too */
    bool split_tried_only;      /* and in no other */
};
struct plan_chunk_in {
    uint32_t block;
    uint64_t offset_bytes;      /* of its 16-bit parameter inside the block's vector */
    uint64_t acc_offset_bytes;  /* of its fp32 gradient inside the block's accumulator */
    uint64_t bytes[CHUNK_STATE_N];
    uint8_t home[CHUNK_STATE_N];
    bool frozen;
    bool spec;                  /* PLAN_SPECULATE: may be updated before the norm is known: its undo
                                 * record has room, or needs none (state on NVMe) */
};
struct plan_place_in {          /* one position of the forward order: a block may stand at several
                                 * (tied embedding and head) */
    uint32_t block;
    bool fused;                 /* training: no forward visit; the backward visit does both (head
                                 * and loss) */
    bool no_input;              /* reads no boundary (embedding) */
    uint64_t in_bytes;          /* boundary activation it reads, per micro-batch; equals the
                                 * out_bytes of the position before */
    uint64_t full_bytes;        /* full set, per micro-batch */
    double flops;               /* of a forward visit, per micro-batch */
    uint8_t act;                /* enum plan_act */
    uint64_t flow_bytes;        /* gradient of that boundary, per micro-batch (0: in_bytes) */
};

struct plan_input {
    enum plan_mode mode;
    enum plan_update update;
    enum plan_accumulate accumulate;
    bool in_place;              /* the device reads host memory: host homes need no copy */
    uint32_t n_micro;
    uint32_t prefetch;          /* visits ahead (block uses ahead); 0: on demand */
    uint32_t n_blocks, n_chunks, n_places;
    const struct plan_block_in *blocks;
    const struct plan_chunk_in *chunks;
    const struct plan_place_in *places;
    uint64_t arena_bytes[PLAN_ARENA_N]; /* capacity of each arena; UINT64_MAX: as much as it takes
                                         * (then plan->peak says how much) */
    /* Own order: the recorded visits replace the order above (places still give sizes; `place` of
     * each visit names one). Gradients are final at the end. */
    const struct plan_own_visit { uint32_t place; uint8_t dir; uint32_t micro; } *own;
    uint32_t n_own;
};

struct plan_slot {
    uint8_t arena;
    uint64_t offset_bytes, size_bytes;  /* offsets are multiples of 4096 */
    uint32_t first, last;               /* program order of the node that first writes and of the
                                         * last one that uses it */
};

struct plan_node {
    uint8_t kind, resource, state /* enum chunk_state, FETCH and WRITE_BACK */;
    uint8_t part;               /* PLAN_RUN_UPDATE or PLAN_RUN_VISITS */
    bool prefetched;            /* UPDATE: its state arrived by FETCH nodes at the END of the
                                 * previous period (see `for_next`) */
    bool for_next;              /* FETCH at the end of a period, for the UPDATE of the next one */
    bool demand;                /* FETCH that a visit waits for (not far ahead): higher I/O class */
    bool spec;                  /* UPDATE in part VISITS, as if the norm were fine, and the FETCH and
                                 * WRITE_BACK beside it: see SPECULATION */
    bool optional;              /* FETCH for_next that may pass: the next period has a FETCH too, which
                                 * passes where this one ran. FETCH and COPY_IN of a parameter behind a
                                 * HAND_OVER: pass where that ran */
    uint32_t block, chunk;      /* PLAN_NO: none */
    uint32_t visit;             /* VISIT: index in visits; FETCH/COPY_IN/HAND_OVER of parameters: the first
                                 * visit they serve; else PLAN_NO */
    uint32_t slot, src_slot;    /* PLAN_NO: none / host home */
    uint32_t act;               /* ACT_OUT, ACT_IN: which activation (plan_act_number); else PLAN_NO */
    uint64_t slot_offset_bytes; /* where inside `slot` (a chunk inside its block's slot; a state
                                 * inside an update slot) */
    uint64_t src_offset_bytes;  /* the same inside src_slot (or inside the accumulator slot for
                                 * GRAD_CAST) */
    uint64_t bytes;             /* moved */
    uint32_t rank;              /* priority on its resource, lower first; then program order. Its own
                                 * number, but for a parameter that a forward visit reads: the
                                 * number of what it waits for, so that it does not stand behind the
                                 * transfers of all later updates; for optimizer state on its way
                                 * home, which lets all other writes pass; and for commits and
                                 * speculative updates at home, the last of which goes first */
    uint32_t first_dep, n_deps; /* into plan->deps */
    uint32_t first_succ, n_succ;/* into plan->succs */
};

struct plan_visit {
    uint32_t place, block, micro;
    uint8_t dir, act;
    bool first_of_block, last_of_block; /* backward: first finds the accumulator zeroed, or writes it
                                         * (stk_visit.overwrite); after the last the gradient is final */
    bool recompute;             /* backward: the full set must be recomputed from the boundary */
    uint32_t node;
    uint32_t param_slot;        /* PLAN_NO: in place at the host home */
    uint32_t acc_slot;          /* backward; PLAN_NO: frozen */
    uint32_t in_slot, out_slot; /* boundary read / boundary written (forward) */
    uint32_t full_slot;
    uint32_t flow_slot;         /* backward: gradient of the boundary, in: of the output, out: of
                                 * the input, same place. Boundaries differ in size: the largest */
    double flops;
};

struct plan {
    struct plan_node *nodes; uint32_t n_nodes;
    struct plan_slot *slots; uint32_t n_slots;
    struct plan_visit *visits; uint32_t n_visits, n_micro;
    uint32_t *deps; uint32_t n_deps;
    uint32_t *succs;
    uint64_t peak_bytes[PLAN_ARENA_N];         /* highest end of any slot: what the arena must
                                                * hold */
    uint64_t bytes[PLAN_RESOURCE_N];           /* moved per period */
    uint64_t param_fetch_bytes;                /* parameters brought to the device or the cache per
                                                * period */
    double flops;
};

/* Bytes that a period moves over a resource: of two ways that a plan has, one. */
static inline uint64_t plan_moved(const struct plan *p, enum plan_resource r)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++)
        if (p->nodes[i].resource == r && !p->nodes[i].spec && !p->nodes[i].optional)
            sum += p->nodes[i].bytes;
    return sum;
}

/* May complete before its dependencies are met (in an untried period all with `spec` do). */
static inline bool plan_passable(const struct plan_node *x)
{
    return x->spec && (x->kind == PLAN_UPDATE || x->kind == PLAN_WRITE_BACK);
}
/* The chunk has an UPDATE that makes the parameter and a COMMIT: its block is to be split, all its state
 * is in host memory, and it has no frozen part, which would have to be in both buffers. A device that
 * reads host memory in place wants a block's chunks in one buffer: what is speculated, and so made
 * where it lies, is not split there. */
static inline bool plan_splits(const struct plan_input *in, uint32_t chunk)
{
    const struct plan_chunk_in *c = &in->chunks[chunk];
    const struct plan_block_in *b = &in->blocks[c->block];
    bool mode = in->update == PLAN_SPLIT || (in->update == PLAN_SPECULATE && !in->in_place);
    if (!mode || !b->split || in->own || c->frozen || b->n_chunks != b->n_chunks_trainable)
        return false;
    for (uint32_t k = 0; k < b->n_chunks; k++)
        for (int s = 0; s < CHUNK_STATE_N; s++)
            if (in->chunks[b->first_chunk + k].home[s] != CHUNK_HOST) return false;
    return true;
}

/* The block lies on the device (plan.h, ON THE DEVICE). */
static inline bool plan_on_device(const struct plan_input *in, uint32_t block)
{
    const struct plan_block_in *b = &in->blocks[block];
    return b->n_chunks > 0 && in->chunks[b->first_chunk].home[CHUNK_PARAM] == CHUNK_DEVICE;
}

/* Activations that may go to NVMe have a number: two for each position and micro-batch, the boundary it
 * reads and its full set. */
static inline uint32_t plan_act_number(const struct plan_input *in, uint32_t place, uint32_t micro,
                                       bool full)
{
    return (place * in->n_micro + micro) * 2 + full;
}
static inline uint32_t plan_act_count(const struct plan_input *in)
{
    return in->n_places * in->n_micro * 2;
}
static inline uint32_t plan_act_place(const struct plan_input *in, uint32_t act)
{
    return act / 2 / in->n_micro;
}
/* What of it goes to NVMe in training, in the planner's own order; 0: nothing. Of a fused position only
 * the boundary lives from forward to backward. */
static inline uint64_t plan_act_bytes(const struct plan_input *in, uint32_t act)
{
    uint32_t place = plan_act_place(in, act);
    const struct plan_place_in *x = &in->places[place];
    if (x->act != PLAN_ACT_NVME || in->own || in->mode != PLAN_TRAIN) return 0;
    if (act & 1) return x->fused ? 0 : x->full_bytes;
    return place > 0 && !x->no_input ? x->in_bytes : 0;
}

/* Are the checksums of what an UPDATE makes for NVMe made by its slices, which have it in their caches? A
 * pass of their own over the state reads all of it from memory again. Not where something else may still
 * write to it on its way home. */
static inline bool plan_sums(const struct plan_input *in)
{
    return in->update != PLAN_SPLIT && in->update != PLAN_SPECULATE;
}

/* `speculate`: which of what the plan splits is split depends on whether the period's step is tried; the other
 * UPDATEs make everything and their COMMITs pass. In a tried step few are: their commits take the time in
 * which backward speculates, and what it does not speculate would have to be committed again in the next
 * period, and so on. */
static inline bool plan_splits_now(const struct plan_input *in, uint32_t chunk, bool tried)
{
    const struct plan_block_in *b = &in->blocks[in->chunks[chunk].block];
    return tried ? b->split_tried : !b->split_tried_only;
}

/* Inside an update slot: PARAM at 0, then OPT, then GRAD, each padded to 4096; a state whose home
 * is not NVMe takes no room. */
uint64_t plan_update_offset(const struct plan_chunk_in *c, enum chunk_state s);
uint64_t plan_update_bytes(const struct plan_chunk_in *c);

/* Builds. STK_ERR_NOMEM: an arena is too small: the sentence names arena, block and the bytes it
 * lacks; *short_arena (may be NULL) says which. Whatever cannot be prefetched as early as asked is
 * fetched later; only what cannot be placed at all is an error. */
stk_status plan_build(const struct plan_input *in, struct plan **out, enum plan_arena *short_arena,
                      struct stk_error *err);
void plan_free(struct plan *p);
/* The least bytes each arena needs for a plan to exist (prefetch 0, no caching), and what is useful
 * at most (beyond it nothing gets better). */
stk_status plan_needs(const struct plan_input *in, uint64_t least[PLAN_ARENA_N],
                      uint64_t useful[PLAN_ARENA_N], struct stk_error *err);

/* Proves, from the input and the nodes alone (not from how they were built): dependencies point
 * backwards; every visit's parameters, boundary, full set and accumulator were written by a node it
 * depends on (transitively) and not overwritten since; every version of every state moves from home
 * to use to home, none lost, no two writers without order; slots that share bytes are ordered;
 * slots lie inside the arenas; the norm follows every cast; every trainable chunk is updated
 * exactly once; fetch of a parameter follows its write-back; an activation on NVMe is written once and
 * read once after that; what is handed over is the newest parameter, in a slot nobody has taken since;
 * bytes per resource add up.
 * STK_ERR_STATE names the node. */
stk_status plan_check(const struct plan_input *in, const struct plan *p, struct stk_error *err);

/* plan_wait.c: what somebody waited for from since_ns until `node` ended: the kind that most of the
 * chain of last dependencies is made of. end_ns: of each node, 0: has not ended. `otherwise`: where the
 * chain has nothing to say (it ended before, or is a visit). The second: of a visit's dependencies. */
uint8_t plan_wait_kind(const struct plan *p, uint32_t node, const double *end_ns, double since_ns,
                       uint8_t otherwise);
uint8_t plan_visit_waits(const struct plan *p, uint32_t visit_node, const double *end_ns,
                         double since_ns, uint8_t otherwise);

/* "fetch opt 12", "visit forward 3.0": what a trace calls a node. */
void plan_node_name(const struct plan *p, uint32_t node, char *buf, size_t size);
/* One line a node, stable: for diffs. */
void plan_print(const struct plan *p, FILE *to);
/* Chrome/Perfetto trace JSON of program order (unit durations): `stoker plan --trace`. */
void plan_trace(const struct plan *p, FILE *to);

#endif
