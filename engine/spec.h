/* engine/spec.h - update mode `speculate`: chunks are updated in backward as if the norm were going to be
 * fine, and taken back if it is not (design section 6).
 *
 * WHEN. A chunk's speculative UPDATE (plan.h, SPECULATION) runs if this step is tried, its gradient is
 * finite, the squares summed so far allow a clip factor of 1, its state has arrived, and the norm is
 * not known yet; else it passes, and the chunk is updated in the next period as in `chase`. It takes the
 * coefficients that a clip factor of 1 gives.
 *
 * THEN. The step's end decides (norm.c): the factor is exactly 1 and the norm finite: what was made is
 * right; in the next period's part UPDATE all nodes of such a chunk pass. Else its UNDO restores the
 * state to the bit, and the UPDATE runs with the factor, or passes in a skipped step.
 *     state at home      adam_undo, from a record made by the step
 *     state on NVMe      store_forget: the version before counts again. PARAM in host memory beside OPT
 *                        on NVMe: a copy of the old 16-bit values
 *
 * TRIES. Only if the last `need` steps did not bind (clip off: at once); `need` doubles with each step
 * that had to be taken back and halves in quiet times. A chunk whose side list overflowed is left alone
 * for 1, 2, 4 ... steps. None of this changes a number.
 *
 * CHECKPOINTS. A chunk that one under way has yet to write passes: backward does not wait for it.
 *
 * DURABLE STEPS. While a commit waits for the end of part UPDATE nothing is speculated: the store's
 * newest versions must be of one decided step then.
 *
 * Between runs the application's thread owns all of it, during a run the engine lane. */
#ifndef ENGINE_SPEC_H
#define ENGINE_SPEC_H

#include "engine/engine.h"
#include "offload/adam_undo.h"

struct spec_slice { /* of one member of the update team */
    uint32_t pieces, side_n; /* tensors' pieces that were made; entries of its part of the list */
    bool overflow;
};

struct spec_chunk {
    uint8_t *codes;             /* record of a chunk at home: one byte an element; or the old parameters */
    struct adam_side *side;     /* its side list, a part for each slice */
    struct spec_slice *slices;
    uint32_t side_cap;
    uint32_t node;              /* its speculative UPDATE in the plan that runs; PLAN_NO: none */
    uint64_t version_before;
    uint32_t rest, rest_next;   /* steps in which it is not tried */
    bool done;                  /* the state is speculative: to be accepted or taken back */
    bool made;                  /* and it became so in the run at hand */
    bool fresh;                 /* part UPDATE: its update was made, write-backs follow */
    uint8_t ahead;              /* bits by state: the period before fetched it into its slot */
};

struct eng_spec {
    struct spec_chunk *chunk;
    uint32_t *order, n_order;   /* chunks with a speculative update, in the order of the plan */
    struct adam_coefs coef, coef_made; /* of the step at hand; of what may have to be taken back */
    bool tried;                 /* this step */
    bool closed;                /* nothing begins any more in this step */
    bool apply, accept;         /* the last decision: an update is due; what is done is right */
    uint32_t final_left;        /* visits and casts to come: none left: the norm is known */
    uint32_t casts_done, patience;
    double sum_sq;              /* of casts so far */
    uint32_t need, quiet;       /* steps without a binding norm: wanted, had */
    uint32_t n_done, n_undone;  /* of the step at hand, for its statistics */
};

/* --- spec.c: application's thread ------------------------------------------------------------- */
/* May this chunk be speculated where its homes (pchunks) are; bytes of its record. */
bool spec_possible(const stk_engine *e, uint32_t chunk);
uint64_t spec_record_bytes(const stk_engine *e, uint32_t chunk);
/* Which chunks have a record: into pchunks (place.c); bytes of all records. */
void spec_homes(const stk_engine *e, const struct eng_placement *pl);
uint64_t spec_bytes(const stk_engine *e);
/* As many chunks as `room_bytes` hold. */
void spec_take(const stk_engine *e, struct eng_placement *pl, uint64_t room_bytes);
bool spec_on_nvme(const stk_engine *e, const struct eng_placement *pl);
stk_status spec_alloc(stk_engine *e);
void spec_free(stk_engine *e);
void spec_step_begin(stk_engine *e);
/* After norm_decide. True: something has to be taken back. */
bool spec_decided(stk_engine *e, bool applied);

/* --- spec_run.c: engine lane ------------------------------------------------------------------ */
void spec_run_begin(stk_engine *e);
bool spec_passes(stk_engine *e, uint32_t node);
void spec_completed(stk_engine *e, uint32_t node);
void spec_fetched(stk_engine *e, const struct plan_node *n);
void spec_updated(stk_engine *e, const struct plan_node *n);
bool spec_issue_update(stk_engine *e, uint32_t node);
bool spec_issue_undo(stk_engine *e, uint32_t node);

#endif
