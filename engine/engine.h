/* engine/engine.h - what the files of engine/ share. Clients see only stoker.h.
 *
 * WHO RUNS WHAT. The application's thread runs api.c, seal.c, place.c, step.c, own.c, state.c,
 * checkpoint.c. The engine lane runs run.c and issue.c: it alone owns the run (which nodes are
 * done) and the chunks (INV-4). They meet in three places: `want` (the visit the application waits
 * for), `run_done`, and `failed`, each written before a post or an event and read after it. */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include "base/exec.h"
#include "base/mem.h"
#include "engine/cores.h"
#include "engine/pace.h"
#include "engine/plan.h"
#include "engine/stoker.h"
#include "engine/trace.h"
#include "gpu/device.h"
#include "nvme/io.h"
#include "nvme/measure.h"
#include "nvme/store.h"
#include "offload/adam_chunk.h"
#include "offload/adam_narrow.h"
#include "offload/chunk.h"
#include <stdatomic.h>
#include <sys/types.h>

enum eng_state { ENG_DESCRIBE, ENG_DRY, ENG_READY, ENG_STEP, ENG_EVAL, ENG_FAILED, ENG_FORKED };

struct eng_block_desc {
    char *name;
    uint32_t n_tensors;
    stk_tensor_desc *tensors;
    uint32_t first_tensor;
};
struct eng_reserve {
    stk_where where;
    char owner[48];
    uint64_t size_bytes, offset_bytes;
    void *base;
};

/* What engine/place.c decides: a pure function of description, configuration and limits. */
struct eng_placement {
    enum chunk_home param, opt, grad;
    enum plan_act act;              /* of all positions, but that of the last ones act_last[p] have policy
                                     * p (engine/acts.c) */
    uint32_t act_last[PLAN_ACT_N];
    enum plan_update update;
    uint32_t spec_chunks;           /* speculate: so many chunks, the first of backward, have room for
                                     * their undo records (engine/spec.c) */
    uint32_t split_blocks;          /* split, speculate: so many blocks, the first of the order, have
                                     * their parameters made before their state (engine/mode.c) */
    uint32_t tried_blocks, tried_late; /* speculate, in a step that is tried: so many first blocks are split,
                                     * and so many that stand right before the last one */
    uint32_t cached[CHUNK_STATE_N]; /* state on NVMe: its first so many units (PARAM: blocks, else
                                     * chunks, in the update's order) have host homes all the same
                                     * (engine/cache.c) */
    uint64_t twin_elems, twin_room; /* on the device: whole blocks of at most so many trainable elements and
                                     * so many bytes together (engine/twin.h); 0: none */
    uint64_t arena_bytes[PLAN_ARENA_N];
    uint64_t host_bytes, device_bytes, nvme_bytes; /* sums, with everything the table has */
};

/* A mode that is tried for its prediction, or was chosen by it (engine/mode_auto.c). */
struct eng_mode_try {
    bool set;
    enum plan_update update;
    uint32_t split_blocks, tried_blocks, tried_late;
};

#define ENG_VISITS_IN_FLIGHT 4
#define ENG_CASTS 2

/* --- the run: one pass over (parts of) a plan ------------------------------------------------- */

enum run_node_state { RUN_WAITING, RUN_READY, RUN_ISSUED, RUN_DONE };

/* One thing in flight on the engine lane's behalf. Pools of fixed size: nothing is allocated in a
 * step. */
struct run_op {
    struct stk_engine *e;
    uint32_t node;
    struct exec_task task;          /* device and update completions */
    struct store_op store;
    struct exec_team_job job;
    uint32_t set;                   /* DEVICE_UPDATE: of spans (engine/twin.h) */
    _Atomic uint32_t parts[CHUNK_GRAD]; /* UPDATE: of the checksums of PARAM and OPT (store_sum_part) */
    uint64_t begin_ns;
    struct run_op *next_free;
};

#define RUN_OPS_PER_RESOURCE 32
/* In flight per drive, whatever the operations' size: as much as where drives are measured
 * (engine/drives.c). More is a queue that a demand read waits behind. Where no visit reads a drive
 * there is none: what the update's ring holds may be on its way, which was 4 to 7 % of a step. */
#define ENG_DRIVE_BYTES (16ull << 20)
#define ENG_DRIVE_BYTES_FREE (64ull << 20)

#define ENG_PAGE_BYTES 4096ull
static inline uint64_t round_page(uint64_t x)
{
    return (x + ENG_PAGE_BYTES - 1) / ENG_PAGE_BYTES * ENG_PAGE_BYTES;
}
#define RUN_OPS_KEPT 8 /* of them, for writes that something waits for */
struct run_pool {
    struct run_op op[RUN_OPS_PER_RESOURCE];
    struct run_op *free;
    uint32_t in_flight, limit;
};

/* engine/twin.h */
#define TWIN_IN_FLIGHT 8u /* chunks under update on the device at once */
struct ops_adam_span;
struct eng_twin {
    struct ops_adam_span *spans;    /* TWIN_IN_FLIGHT sets of spans_max: arguments of updates in flight */
    uint32_t spans_max;
    bool busy[TWIN_IN_FLIGHT];      /* engine lane */
    bool any;                       /* some block lies on the device */
};

struct eng_drive; /* engine/drives.c */
struct eng_trial; /* engine/trial.c */
struct eng_spec; /* engine/spec.h */

/* A chunk's arrays, wherever they are (engine/state.c). */
struct state_view {
    uint32_t n;
    bool frozen;
    uint16_t *param;
    int16_t *low;                   /* bf16 */
    float *master;                  /* fp16: the same memory as low */
    struct adam_moments moments;
    uint16_t *grad;                 /* arrays of states that were not asked for are not valid */
};

struct eng_run {
    const struct plan *plan;
    uint32_t parts;
    uint32_t *deps_left;
    uint8_t *node_state;
    uint64_t *heap[PLAN_RESOURCE_N]; /* ready nodes, a binary heap by rank; capacity
                                      * n_nodes */
    uint32_t heap_n[PLAN_RESOURCE_N];
    uint64_t ready_bytes[PLAN_RESOURCE_N]; /* of the nodes in the heap */
    struct run_pool pool[PLAN_RESOURCE_N];
    uint32_t nodes_left;            /* of the parts that run */
    uint32_t update_left;           /* of part UPDATE */
    uint32_t next_visit;            /* first visit not yet handed out */
    uint32_t visits_in_flight;
    uint32_t hold_visit;            /* own order: this visit completes only at stk_step_end;
                                     * PLAN_NO: none */
    uint32_t last_node;             /* the one that completed last */
    double *end_ns;                 /* of each node: when it completed (plan_wait.c); 0: not yet */
    _Atomic bool active;            /* read by a left-over pump task while the application's thread
                                     * sets the next run up */
    uint64_t last_visit_done_ns;
};

/* Transfers of the step at hand (engine/nvme_stats.c). */
struct eng_nvme_stats {
    struct measure_histogram reads; /* latency of all */
    /* [0] while no write was under way, [1] the others: of all, of those that a visit or the update
     * waits for (demand), and of all the time at the drive alone */
    struct measure_histogram whole[2], demand[2], drive[2];
    uint32_t in_flight, writes;     /* store operations */
    uint64_t last_write_ns;         /* when the last write ended */
    uint64_t busy_since_ns, busy_ns;
    uint64_t drive_ns;              /* of io's clock of being busy, at the step's begin */
    uint64_t full_ns, full_bytes;   /* of io's, likewise */
};

/* engine/durable.c. `phase` is the meeting place: armed by the application's thread, taken by the
 * lane. */
struct eng_durable {
    char *payload;                  /* of the request under way; NULL: not configured */
    uint64_t payload_bytes, payload_max;
    uint64_t step;                  /* of that request */
    _Atomic uint32_t phase;
    _Atomic bool failed;            /* the last commit did, and nobody was told: `error` holds */
    struct stk_error error;
    _Atomic uint64_t newest_step;   /* on the drives; 0: none, or none that can be found */
    uint64_t before_step;           /* newest_step when the last request failed */
    struct store_commit commit;
    struct exec_event event;        /* set while no request is under way */
    struct exec_task task;
    struct json_t *doc;             /* config.adopt: what the found step carries */
    uint64_t found_step;
    uint32_t found_room;            /* versions that its store has room for */
};

/* engine/save.c: a checkpoint under way. The engine lane's from stk_save_begin to the end, but for
 * what is atomic; what a job needs is the lane `save`'s while it has one. */
#define SAVE_BATCH 4 /* chunks of one job: the lanes' hand-over waits for a processor each time */
struct save_job {
    uint8_t kind;
    uint32_t n, chunk[SAVE_BATCH];
    struct state_view view[SAVE_BATCH];
    stk_status status;
    struct stk_error error;
    struct exec_task run, after, done;
};
struct eng_save {
    struct exec_lane *lane;
    uint8_t *raw;                   /* one chunk read back from NVMe; NULL: nothing lies there */
    uint8_t *state, *left;          /* of each chunk; left: nodes of its due update */
    uint32_t *queue, head, tail;    /* chunks in the order in which they became ready */
    uint32_t n_done, gated;         /* gated: the chunk that an update waits for; PLAN_NO */
    uint32_t reads_left;
    uint64_t n_gated;               /* times that an update had to wait */
    uint64_t begin_ns, gated_ns, wait_ns, step_wait_ns;
    bool active, busy, broken, quiet, complete;
    struct store_op get[CHUNK_STATE_N];
    struct exec_task copied;        /* a chunk that lies on the device is in `raw` */
    struct save_job job;
    struct ckpt_files *files;
    struct json_t *doc;
    char *dir, *partial;
    uint32_t keep;
    uint64_t step;
    struct stk_error error;         /* valid once `failed` */
    struct exec_task task, ask;
    struct exec_event event;        /* set while none is under way */
    _Atomic bool under_way, working, failed;
    _Atomic uint64_t saved_step, saved_ns, saved_wait_ns;
    /* tests */
    uint64_t file_bytes_max;        /* 0: as usual */
    bool no_gate;                   /* the canary: updates do not wait */
};

/* engine/near.c */
struct near_team { const struct topology *topology; uint32_t node; };
struct near_parts { /* a piece of memory in parts, one after the other, of each team */
    stk_engine *e;
    uint64_t bytes[CORES_TEAMS_MAX];
};

struct eng_counts { uint64_t nvme_read, nvme_write, copy_in, copy_out, param_fetch, paced /* copies */; };


struct stk_engine {
    stk_config cfg;
    struct stk_error err;           /* of the application's calls */
    enum eng_state state;
    char *paths[STK_NVME_MAX];
    uint32_t n_paths;
    char *client_numerics;

    /* description */
    struct eng_block_desc *blocks; uint32_t n_blocks;
    stk_place *places; uint32_t n_places;
    uint32_t n_tensors;
    struct eng_reserve *reserves; uint32_t n_reserves;
    uint64_t workspace_bytes;
    void *workspace;
    struct topology *topology;      /* of this machine; NULL: in simulation, not asked */
    struct cores cores;             /* who computes on how many; from stk_open on */

    pid_t pid;                      /* of who opened it: a child of fork may not use it (NVM-35) */

    /* machinery */
    struct exec *ex;
    struct exec_lane *lane;
    struct exec_team *team[CORES_TEAMS_MAX]; /* of the update: cores.n_teams */
    uint8_t *team_of;               /* of each chunk; NULL: there is one team */
    struct near_team near[CORES_TEAMS_MAX];
    bool near_refused;              /* memory did not go where it was told */
    struct dev *dev;
    struct dev_caps caps;
    struct dev_stream *compute, *copy_in, *copy_out;
    struct dev_stream *update;      /* of what lies on the device; NULL: in place */
    struct dev_stream *cast[ENG_CASTS]; /* two: a cast is one thread on the host, and the last
                                         * blocks of backward have the cores to themselves */
    struct io *io;
    struct store *store;
    struct eng_drive *drives;       /* engine/drives.c: one for each folder */
    struct eng_nvme_stats nvme_stats;
    struct exec_task io_task, pump_task, begin_task, stop_task, wait_task;
    const struct adam_kernel *adam;
    struct adam_way way;            /* engine/way.c: of the update's walk */

    /* layout and memory */
    struct stk_layout *layout;
    uint32_t *tensor_of;            /* the client's tensor -> layout tensor */
    uint32_t *use_chunks, n_use_chunks; /* trainable chunks in the order of the update */
    uint32_t *use_blocks, n_use_blocks; /* blocks likewise; all of them */
    struct mem *mem;                /* the table of who owns what, as planned */
    struct mem *held;               /* the host memory behind it */
    uint8_t *own_base;              /* device memory of engine/own.c, inside the one reservation */
    struct eng_placement place;
    uint64_t device_limit;
    uint64_t unpinned_bytes;        /* of host memory that the device wanted pinned and could not */
    uint64_t baseline_bytes;        /* resident before anything of ours was reserved */
    uint8_t *arena[PLAN_ARENA_N];
    struct plan_block_in *pblocks; struct plan_chunk_in *pchunks; struct plan_place_in *pplaces;
    struct plan_input pin;
    uint32_t *act_extent;           /* of each activation (plan_act_number); CHUNK_NO_EXTENT: none */
    struct plan *plan_train, *plan_eval, *plan_own;
    char *notes[64]; uint32_t n_notes;
    char numerics[512];

    /* the step */
    struct eng_run run;
    struct pace pace;               /* of this machine; all 0: nothing is paced */
    struct adam_coefs coef;         /* for the pending update */
    bool pending;                   /* part UPDATE is to be run: an update is due, or an undo */
    struct eng_spec *spec;          /* update mode `speculate`; else NULL */
    uint8_t **second;               /* update mode `split`: the other place of each chunk's parameter,
                                     * written by the next update; NULL: not split. Engine lane */
    uint64_t begun, updates, skipped_total, skipped_row;
    double loss_scale, grad_loss_scale; uint32_t scale_good; /* grad_loss_scale: inside the
                                                              * gradients at hand */
    double lr;
    double norm_sq, norm, clip_factor; uint64_t nonfinite; /* norm_sq and nonfinite: written by NORM
                                                            * on the lane */
    uint64_t update_version;        /* version that the pending update's writes carry */
    struct eng_counts counts;       /* engine lane */
    stk_exposed exposed;
    uint64_t step_begin_ns, compute_begin_ns;
    uint32_t asked, given_back;     /* visits of this pass: by stk_next, by stk_done */

    /* meeting places */
    _Atomic uint32_t want;          /* visits the application has asked for so far in this run */
    _Atomic bool failed;
    struct stk_error fail;          /* valid once `failed` */
    struct exec_event visit_event, run_event, update_event, wait_event;
    char wait_text[160]; /* what a stalled run waits for; written on the lane, read after wait_event */
    _Atomic bool stuck;             /* own order: the wanted visit can only come when a held one
                                     * goes */
    _Atomic uint32_t held_visits;          /* own order: planned visits that the client has not
                                            * released */
    _Atomic uint8_t visit_cause;    /* plan kind that the handed-out visit waited for */
    _Atomic uint64_t asked_ns;      /* when the application asked for it */
    _Atomic uint64_t progress;      /* completions so far: tells a long wait from a stall */

    struct run_op visit_ops[ENG_VISITS_IN_FLIGHT];
    struct own_order *own;          /* engine/own.c; NULL unless cfg.own_order */
    /* prediction */
    struct eng_mode_try mode_try;
    bool predicting;                /* this machine was measured for it: seal measures drives, too */
    stk_machine measured;           /* its figures then */
    struct eng_trial *trial;        /* NULL: none */
    stk_visit_cost *costs;          /* of each place; NULL: none given. All 0: not this one */
    struct eng_durable durable;
    struct eng_trace trace;
    struct eng_save save;
    struct eng_twin twin;
    struct state_io *sio;           /* engine/state.c: the staged chunk of fills, reads,
                                     * checkpoints */
};

/* --- api.c ------------------------------------------------------------------------------------ */
/* What calls ask first; ENG_FORKED in a child of fork, which has neither the threads nor the memory
 * of the engine. */
enum eng_state eng_state(const stk_engine *e);
stk_status eng_refuse_state(stk_engine *e, const char *call, const char *expected);
void eng_note(stk_engine *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void eng_notes_cut(stk_engine *e, uint32_t n); /* forgets all but the first n */

/* --- near.c ----------------------------------------------------------------------------------- */
stk_status near_teams(stk_engine *e); /* opens them; before memory is reserved */
/* Into e->held. With several nodes: each part on its team's node; interleaved without parts (NULL). */
stk_status near_reserve(stk_engine *e, const char *owner, uint64_t size_bytes, const struct near_parts *parts,
                        void **out);
void near_note(stk_engine *e);

/* --- seal.c ----------------------------------------------------------------------------------- */
/* Pinned for the device's copies: a whole piece or nothing of it. What cannot be pinned is right, only slower to
 * copy: one line says how much that is. */
stk_status seal_pin(stk_engine *e, void *p, uint64_t size_bytes);

/* --- place_table.c: pure ---------------------------------------------------------------------- */
/* Fills e->pblocks, pchunks, pplaces from layout and places (homes from `pl`). */
void place_fill(stk_engine *e, const struct eng_placement *pl);
/* The same, and `in` of them. */
stk_status place_input(stk_engine *e, const struct eng_placement *pl, enum plan_mode mode,
                       struct plan_input *in);
/* Versions of an extent that the store has room for. */
uint32_t place_store_room(const stk_engine *e, const struct eng_placement *pl);
/* Writes the rows of the table for a placement (mem_note for what has no memory of ours). */
stk_status place_table(stk_engine *e, const struct eng_placement *pl, struct mem *m,
                       struct stk_error *err);

/* --- place.c: pure ---------------------------------------------------------------------------- */
/* Chooses tiers, activation policy and arena sizes within the limits; a refusal names numbers,
 * owner and option. */
stk_status place_choose(stk_engine *e, uint64_t host_limit, uint64_t device_limit,
                        struct eng_placement *out);
bool place_trains(const stk_engine *e);
/* `split`: the second buffer of a block's parameters; 0: it is not split. Of all blocks. */
uint64_t place_second_of(const stk_engine *e, const struct eng_placement *pl, uint32_t block);
uint64_t place_second_bytes(const stk_engine *e, const struct eng_placement *pl);
void mode_blocks(const stk_engine *e, const struct eng_placement *pl); /* into e->pblocks */
void mode_note(stk_engine *e, const struct eng_placement *pl);
/* STK_ERR_CONFIG: the mode was asked for by name and cannot be. */
stk_status mode_check(stk_engine *e, const struct eng_placement *pl);
/* place_choose with the update mode that config.update says, or the best by prediction: mode_auto.c. */
stk_status mode_place(stk_engine *e, uint64_t host_limit, uint64_t device_limit,
                      struct eng_placement *out);
/* The update mode of a placement: what the client asked for, as far as it can be done. */
enum plan_update update_mode_choose(const stk_engine *e, const struct eng_placement *pl);
/* Which blocks are split, for pl->update. */
void mode_split_set(const stk_engine *e, struct eng_placement *pl);

/* --- cache.c: pure: which of the state on NVMe is kept in memory ------------------------------ */
stk_status cache_order(stk_engine *e);          /* after the layout and the order are known */
void cache_free(stk_engine *e);
/* A budget was given, something is on NVMe, and nothing forbids to keep a part of it. */
bool cache_allowed(const stk_engine *e, const struct eng_placement *pl);
void cache_homes(const stk_engine *e, const struct eng_placement *pl); /* into e->pchunks */
/* Keeps as many more units of a state as `room_bytes` hold. True: there were some. */
bool cache_take(const stk_engine *e, struct eng_placement *pl, enum chunk_state s,
                uint64_t room_bytes);
void cache_note(stk_engine *e, const struct eng_placement *pl);

/* --- acts.c: pure: what becomes of each position's activations -------------------------------- */
stk_status acts_check(stk_engine *e);           /* what the client asks for can be meant */
void acts_fill(const stk_engine *e, const struct eng_placement *pl); /* into e->pplaces */
uint32_t acts_positions(const stk_engine *e);   /* those that have a full set to keep */
bool acts_mixed(const struct eng_placement *pl);
bool acts_on_nvme(const struct eng_placement *pl);
uint64_t acts_nvme_bytes(const stk_engine *e);  /* extents of the placement in e->pplaces */
uint32_t acts_extents(const stk_engine *e, uint32_t first); /* numbers them; how many */
/* "kept", "8 last blocks kept, the others recomputed" */
const char *acts_text(const stk_engine *e, const struct eng_placement *pl, char *buf, size_t size);
/* How many of the last positions' full sets `room` holds, beside one that is there anyway. */
uint32_t acts_estimate(const stk_engine *e, uint64_t room);

/* --- drives.c: what is known about the drives; application's thread --------------------------- */
stk_status drives_check_folders(stk_engine *e); /* they are there and may be written */
stk_status drives_find(stk_engine *e);          /* facts and given weights; also for a dry seal */
stk_status drives_check_room(stk_engine *e);    /* STK_ERR_NOSPACE with the numbers */
stk_status drives_measure(stk_engine *e);       /* [waits] as cfg.measure_ns says; weights */
uint64_t drives_depth_bytes(const stk_engine *e); /* most in flight per drive, by the plans */
void drives_configure(const stk_engine *e, struct store_cfg *sc); /* weights and limits */
void drives_note(stk_engine *e);                /* figures, shares, what a step writes */
void drives_free(stk_engine *e);

/* --- way.c: how the update walks its arrays; application's thread ------------------------------ */
void way_choose(stk_engine *e);                 /* memory is reserved and holds zeros still */

/* --- nvme_stats.c: engine lane during a run, application's thread between runs ---------------- */
void nvme_stats_reset(stk_engine *e);
void nvme_stats_begin(stk_engine *e, bool read); /* a transfer was accepted */
void nvme_stats_end(stk_engine *e, const struct store_op *op, bool read, bool demand);
void nvme_stats_fill(const stk_engine *e, stk_step_stats *s);

/* --- run.c: engine lane ----------------------------------------------------------------------- */
stk_status run_alloc(stk_engine *e, uint32_t n_nodes_max);
void run_free(stk_engine *e);
/* Application's thread, nothing running: sets the run up and lets the lane begin. */
void run_start(stk_engine *e, const struct plan *p, uint32_t parts, uint32_t hold_visit);
/* Application's thread: waits for an event with the stall deadline; STK_ERR_* of a failed run. */
stk_status run_wait(stk_engine *e, struct exec_event *ev);
/* Engine lane. */
void run_pump(void *engine);                    /* issue what is ready, hand out the wanted visit */
void run_complete(stk_engine *e, uint32_t node);
void run_abandon(stk_engine *e, uint32_t from); /* own order: visits `from`... count as made, the
                                                 * one to hold as handed out */
void run_release_hold(stk_engine *e);            /* own order: the held visit completes */
void run_pass_early(stk_engine *e, uint32_t node); /* a node with `spec` that waits completes now */
void run_fail(stk_engine *e, const struct stk_error *err);
struct pace_now run_pace(const stk_engine *e);
struct run_op *run_op_take(stk_engine *e, uint32_t resource, uint32_t node);
void run_op_give(stk_engine *e, uint32_t resource, struct run_op *op);

/* --- step.c ----------------------------------------------------------------------------------- */
void step_fill_visit(stk_engine *e, const struct plan *p, uint32_t index, stk_visit *v);
stk_status step_wait_visit(stk_engine *e, uint32_t index);    /* [waits] until visit `index` was
                                                               * handed out */
stk_status step_visit_queued(stk_engine *e, uint32_t index);  /* its work is on the compute
                                                               * stream */
stk_status step_finish(stk_engine *e, stk_step_stats *stats); /* [waits] end of the run, decision,
                                                               * statistics */

/* --- issue.c: engine lane: one function for each kind of node. False: no room now (try again after
 * a completion).  */
bool issue_node(stk_engine *e, uint32_t node);
/* Of a node whose dependencies are met: it will do nothing (plan.h, SPECULATION and HAND-OVER). Asked once
 * when it is true: an answer may count as the passing. */
bool issue_passes(stk_engine *e, uint32_t node);
/* Address of a byte of a slot. */
static inline uint8_t *eng_slot(const stk_engine *e, const struct plan *p, uint32_t slot,
                                uint64_t offset)
{
    return e->arena[p->slots[slot].arena] + p->slots[slot].offset_bytes + offset;
}

/* --- norm.c ----------------------------------------------------------------------------------- */
void norm_collect(stk_engine *e);               /* engine lane, PLAN_NORM: sums in chunk order */
/* Application's thread at step end: clip factor or skip, loss scale, coefficients. True: the update
 * is due. */
bool norm_decide(stk_engine *e);
/* Coefficients of every touched tensor for its step `steps` + `more`. */
void norm_coefficients(const stk_engine *e, double grad_scale, uint64_t more, struct adam_coefs *out);
double norm_clip_factor(double norm, double clip); /* min(1, clip / (norm + 1e-6)) as torch has it;
                                                    * 1 without clip; always in (0, 1] */

/* --- state.c: between steps ------------------------------------------------------------------- */
stk_status state_alloc(stk_engine *e);
void state_free(stk_engine *e);
uint64_t state_staging_bytes(const stk_engine *e);
/* [waits] Before an update that no step follows: gradients that only its slots hold go home, so that
 * stk_tensor_read finds them afterwards. */
stk_status state_keep_gradients(stk_engine *e);
stk_status state_flush_staged(stk_engine *e);   /* writes the staged chunk home if it was changed */

/* --- trial.c: application's thread, before the first step -------------------------------------- */
void trial_free(stk_engine *e);
void trial_end(stk_engine *e);                  /* [waits] none will follow, and what they left at homes is
                                                 * zero again, though the client broke them off */
/* This visit follows another one of its place and direction at once. */
bool trial_again(const struct plan *p, uint32_t visit);
/* What trials found of place `place`'s visits, as far as they did (backward as the plan has it). again:
 * of those that follow another one at once. */
bool trial_cost(const stk_engine *e, uint32_t place, bool again, stk_visit_cost *out);

/* --- own.c ------------------------------------------------------------------------------------ */
stk_status own_alloc(stk_engine *e);
void own_free(stk_engine *e);
uint64_t own_bytes(const stk_engine *e, bool accumulators);
stk_status own_step_begin(stk_engine *e);
stk_status own_step_end(stk_engine *e);
uint64_t own_cache_bytes(const stk_engine *e, uint32_t prefetch);
struct run_op *own_visit_op(const stk_engine *e, uint32_t index);
uint64_t own_departures(const stk_engine *e);
float *own_accumulator(const stk_engine *e, uint32_t block); /* NULL when not own order */

#endif
