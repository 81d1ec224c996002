/* engine/twin.h - blocks whose whole state lies in the device's memory: parameters, optimizer state and
 * gradient (design section 6; the "twin-flow ratio" of ZeRO-Offload++). Nothing of them moves in a step:
 * visits read the parameters where they are, the cast leaves the gradient there, and their update runs on
 * a stream of the device (ops_adam) with the processor's bits.
 *
 * WHERE. A device with a memory of its own; the engine's order; fp32 moments; all state that is not on the
 * device in host memory. Else no block is there, and a note says why if blocks were asked for.
 *
 * WHICH. Whole blocks, from the first of the order on, each that still fits. When the norm is known, the
 * next forward waits for the update of the first blocks at once, while that of later ones lies under it; on
 * the host it takes 26 bytes of DRAM traffic a parameter, on the device as many of a memory that is
 * twenty times as fast, and no copy comes after it. So first blocks shorten what nothing hides.
 *
 * Between steps, whoever needs the state reads or writes it through a staging buffer (state.c, on the
 * compute stream, which is the application's; save.c on the copy-out stream, which is the engine lane's). */
#ifndef ENGINE_TWIN_H
#define ENGINE_TWIN_H

#include "engine/engine.h"

/* --- twin.c: application's thread -------------------------------------------------------------- */
/* Of trainable elements so many at most, as config.optimizer_on_device asks by name; 0: none, or auto. */
uint64_t twin_asked(const stk_engine *e);
/* config.optimizer_on_device leaves it to us, and this placement can. */
bool twin_auto(const stk_engine *e, const struct eng_placement *pl);
/* Which blocks, into pchunks (place_table.c), after all other homes. */
void twin_homes(const stk_engine *e, const struct eng_placement *pl);
/* Of what lies on the device by pchunks: bytes of one state, as it is laid out; of all. */
uint64_t twin_bytes(const stk_engine *e, enum chunk_state s);
uint64_t twin_total(const stk_engine *e);
uint32_t twin_blocks(const stk_engine *e);
/* The fraction that was asked for does not fit: STK_ERR_NOMEM with the figures. */
stk_status twin_refuse(stk_engine *e, const struct eng_placement *pl, uint64_t device_limit);
void twin_note(stk_engine *e, const struct eng_placement *pl);
/* Gives chunks their places from `base` on, twin_total bytes of device memory, and makes these zero. [waits] */
stk_status twin_lay(stk_engine *e, void *base);
stk_status twin_alloc(stk_engine *e);
void twin_free(stk_engine *e);
/* [waits] Moves states of a chunk (bits by chunk_state) between their homes on the device and buf[state]. */
stk_status twin_move(stk_engine *e, const struct stk_chunk *c, uint32_t states, bool put,
                     void *const buf[CHUNK_STATE_N]);

/* --- twin_run.c: engine lane ------------------------------------------------------------------- */
bool twin_issue_update(stk_engine *e, uint32_t node);

#endif
