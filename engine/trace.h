/* engine/trace.h - what happened in the last steps, for stk_trace_write. Private to engine/.
 *
 * Two rings of events, reserved at seal: one is filled by the engine lane (nodes of the plan), one by
 * the application's thread (its waits, its steps). Both are read between steps only. With
 * config.trace_bytes 0 there are no rings, and every call here does nothing. */
#ifndef ENGINE_TRACE_H
#define ENGINE_TRACE_H

#include "engine/plan.h"
#include "engine/stoker.h"

enum trace_what { TRACE_NODE, TRACE_WAIT, TRACE_STEP };

struct trace_event {
    uint64_t begin_ns, end_ns;
    const struct plan *plan; /* NODE: id is a node of it */
    uint32_t id;             /* WAIT: visit, or PLAN_NO: the end of the step. STEP: number */
    uint8_t what, kind;      /* WAIT: kind of the node that was waited for */
};

struct trace_ring {
    struct trace_event *events; /* of event n: n % cap */
    uint64_t n, cap;
};

struct eng_trace {
    struct trace_ring lane, app;
    uint64_t *begin_ns; /* of each node of the run under way */
};

/* At seal, and again when a larger plan is to be run: what was kept stays. */
stk_status trace_alloc(stk_engine *e, uint32_t n_nodes_max);
void trace_free(stk_engine *e);

void trace_node_begin(stk_engine *e, uint32_t node); /* engine lane */
void trace_node_end(stk_engine *e, uint32_t node);   /* engine lane */
/* Application's thread. `to_ns`: now. */
void trace_wait(stk_engine *e, uint32_t visit, uint8_t kind, uint64_t from_ns, uint64_t to_ns);
void trace_step(stk_engine *e, uint64_t from_ns, uint64_t to_ns);

#endif
