/* engine/state.h - the staged chunk, shared by state.c and checkpoint.c. Application's thread,
 * between runs. */
#ifndef ENGINE_STATE_H
#define ENGINE_STATE_H

#include "engine/engine.h"

struct state_io {
    uint8_t *param, *opt, *grad;    /* staging of one chunk's states */
    float *work;                    /* chunk_elems floats */
    uint8_t *scratch;               /* of ckpt_files.c; a checkpoint under way has it */
    uint32_t chunk;                 /* what is staged; PLAN_NO: nothing */
    uint32_t loaded;                /* its states that are at hand: STATE_ bits */
    bool dirty, filled;
    bool written;                   /* a client has put something into a tensor */
    uint32_t moving, left;          /* the transfer under way: states, completions missing */
    bool put;
    struct store_op op[CHUNK_STATE_N];
    struct exec_task task;
    struct exec_event event;
};

enum {
    STATE_PARAM = 1u << CHUNK_PARAM,
    STATE_OPT = 1u << CHUNK_OPT,
    STATE_GRAD = 1u << CHUNK_GRAD
};
/* [waits] Brings the states of `want` of a chunk into reach: *v is valid until the next state_ call. */
stk_status state_stage(stk_engine *e, uint32_t chunk, uint32_t want, struct state_view *v);
stk_status state_stage_fresh(stk_engine *e, uint32_t chunk, struct state_view *v);
/* [waits] Reads a chunk's 16-bit parameter (NVMe home) into `buf` (room rounded up to 4096). */
stk_status state_fetch_param(stk_engine *e, uint32_t chunk, void *buf);
void state_touch(stk_engine *e);          /* the staged chunk was changed */
stk_status state_unstage(stk_engine *e);  /* [waits] writes it home if changed, forgets it */
/* fp32 master of elements [at, at + n) of the chunk. */
void state_master_get(const stk_engine *e, const struct state_view *v, uint32_t at, uint32_t n,
                      float *out);
void state_master_set(const stk_engine *e, const struct state_view *v, uint32_t at, uint32_t n,
                      const float *in);

#endif
