/* engine/durable.h - durable steps inside the engine: called by seal.c, place.c, run.c, step.c and
 * api.c. The public calls are in stoker.h. Application's thread unless marked. */
#ifndef ENGINE_DURABLE_H
#define ENGINE_DURABLE_H

#include "engine/engine.h"

/* The store's table (nvme/store_table.c, FORMAT 1): its head, the name of a path, the row of an extent. */
enum { DURABLE_HEAD_BYTES = 256, DURABLE_PATH_BYTES = 512, DURABLE_ROW_BYTES = 32 };

/* Most bytes of what a commit carries beside the extents. After the layout is known. */
uint64_t durable_payload_max(const stk_engine *e);
/* Folders as the store is given them; returns how many. Borrowed from the engine. */
uint32_t durable_paths(const stk_engine *e, const char *paths[STK_NVME_MAX]);
/* config.adopt, before placement: finds the durable step, refuses another geometry by what to give,
 * and lets `auto` be what it was. Reads only. */
stk_status durable_look(stk_engine *e);
stk_status durable_alloc(stk_engine *e);
void durable_free(stk_engine *e);
/* After store_open: the chunks are as old as the adopted store says. */
stk_status durable_adopted(stk_engine *e);
/* A commit waits for the end of the update: until then nothing but that update may be written. */
bool durable_armed(const stk_engine *e);
/* Engine lane: every put of the step asked for is complete. Submits what is armed; else nothing. */
void durable_begin(void *engine);
/* The failure of the last commit, once: STK_ERR_IO with its sentence. */
stk_status durable_report(stk_engine *e);
/* [waits] For a commit in flight: its buffers are about to go. */
void durable_quiesce(stk_engine *e, uint64_t deadline_ns);

#endif
