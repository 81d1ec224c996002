/* engine/update.h - one chunk's update cut into slices of the update team and spans of one tensor: what
 * issue.c and spec_run.c share. Slices run on the team; they touch only bytes that the node names. */
#ifndef ENGINE_UPDATE_H
#define ENGINE_UPDATE_H

#include "engine/engine.h"
#include "offload/adam_undo.h"

struct update_slice {
    const stk_engine *e;
    enum adam_layout layout;
    const struct adam_coefs *coef;
    uint8_t *param, *opt, *grad;
    struct adam_moments moments;
    struct adam_dither dither;
    uint8_t *param_out; /* not NULL: make only the parameter, there */
    uint32_t begin, end, n_elems; /* elements of the chunk; n_elems: of the whole chunk */
};

void update_slice_fill(stk_engine *e, const struct plan_node *n, uint32_t slice, uint32_t n_slices,
                       struct update_slice *u);
/* The part of a tensor's piece that lies in the slice, as a span from element *at of the chunk on.
 * False: none. */
bool update_span(const struct update_slice *u, uint32_t tensor, uint32_t chunk_elem, uint32_t n,
                 struct adam_span *s, uint32_t *at);
/* Does this period's UPDATE of the chunk make only the parameter, in its second buffer? */
bool update_splits(const stk_engine *e, uint32_t chunk);
/* For chunk_pieces; arg: a struct update_slice. */
void update_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                  uint32_t n);
/* Device sim: the time that a slice of so many bytes takes. Update team, at the slice's end. */
void update_model_team(const stk_engine *e, uint64_t bytes);
/* Engine lane: runs `slice` with the op over the team, so many slices a member, then `done` on the lane. */
void update_job(struct run_op *op, uint32_t each, void (*slice)(void *, uint32_t, uint32_t), void (*done)(void *));

#endif
