/* engine/save.h - a checkpoint under way inside the engine: called by run.c, issue.c, step.c, state.c,
 * checkpoint.c, seal.c, place.c and api.c. The public calls are in stoker.h.
 *
 * A CHUNK'S WAY, from stk_save_begin to the end of the checkpoint:
 *
 *     LATER --its due update is complete and written back--> READY --taken--> BUSY --written--> DONE
 *     READY at once: frozen chunks, and all when no update is due
 *
 * INV-S1  A chunk that is READY or BUSY is not updated: save_gates keeps every node that would, of
 *         whatever part of the plan.
 * INV-S2  What is READY needs nothing of the plan to become DONE: a gate cannot wait in a circle.
 * INV-S3  The lane `save` touches what the one job it has names, and nothing else of the engine. */
#ifndef ENGINE_SAVE_H
#define ENGINE_SAVE_H

#include "engine/engine.h"

/* --- application's thread --------------------------------------------------------------------- */

/* Memory beside state.c's staging: one chunk on its way from NVMe. e->pchunks has the homes. */
uint64_t save_bytes(const stk_engine *e);
stk_status save_alloc(stk_engine *e);
void save_free(stk_engine *e);          /* after save_quiesce and the end of the lanes */
/* [waits] Until no checkpoint is under way, running the update that it waits for. An error is one of
 * the engine (a stall, a failed run): that of the checkpoint stays for save_report. */
stk_status save_settle(stk_engine *e);
/* The failure of the last one, once; the run may go on. */
stk_status save_report(stk_engine *e);
/* [waits] The engine is closed: gives it up and removes its folder. */
void save_quiesce(stk_engine *e, uint64_t deadline_ns);
void save_stats_reset(stk_engine *e);   /* between runs */
void save_stats_fill(const stk_engine *e, stk_step_stats *s);

/* --- engine lane: the hooks of a run ---------------------------------------------------------- */

void save_run_begin(stk_engine *e);     /* before any node of the run is ready */
/* This node would change a chunk that is not written yet. */
bool save_holds(const stk_engine *e, const struct plan_node *n);
/* True: this node would change a chunk that is not written yet. The pump is posted when it is. */
bool save_gates(stk_engine *e, const struct plan_node *n);
void save_node_done(stk_engine *e, const struct plan_node *n);

/* checkpoint.c, for save.c: the folder to write in and the manifest without its files. */
stk_status checkpoint_begin(stk_engine *e, const char *dir, const char *client_json,
                            char **partial, struct json_t **doc);

#endif
