/* engine/trace.c - what happened in the last steps, as a Chrome/Perfetto trace.
 *
 * Owns the two rings of events (engine/trace.h says who fills which). Must not know: why a node is in
 * the plan. The format is that of the "Trace Event Format" document of the Chromium project: complete
 * events ("ph":"X") in microseconds. Such events of one row must not overlap, so each resource gets as
 * many rows as it had things in flight. A node's time is from its start by the engine lane to its
 * completion there: for transfers the time in the queues before and at the drive; a visit begins when
 * the visit before it has ended, because one stream runs them in order. */
#include "engine/trace.h"
#include "base/sys.h"
#include "engine/engine.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define APP_SHARE 8u /* one event in so many is the application's */
#define ROWS_MAX 64u /* of a resource; what does not fit overlaps in the last */

stk_status trace_alloc(stk_engine *e, uint32_t n_nodes_max)
{
    struct eng_trace *t = &e->trace;
    uint64_t n = e->cfg.trace_bytes / sizeof(struct trace_event);
    if (n == 0) return STK_OK;
    if (!t->lane.events) {
        t->app.cap = n / APP_SHARE + 1;
        t->lane.cap = n - n / APP_SHARE;
        t->lane.events = sys_calloc(t->lane.cap, sizeof *t->lane.events);
        t->app.events = sys_calloc(t->app.cap, sizeof *t->app.events);
    }
    sys_free(t->begin_ns);
    t->begin_ns = sys_calloc((uint64_t)n_nodes_max + 1, sizeof *t->begin_ns);
    if (t->lane.events && t->app.events && t->begin_ns) return STK_OK;
    return stk_error_set(&e->err, STK_ERR_NOMEM, 0,
                         "no memory for a trace of %" PRIu64 " bytes: give config.trace_bytes less",
                         e->cfg.trace_bytes);
}

void trace_free(stk_engine *e)
{
    sys_free(e->trace.lane.events);
    sys_free(e->trace.app.events);
    sys_free(e->trace.begin_ns);
    memset(&e->trace, 0, sizeof e->trace);
}

static void add(struct trace_ring *r, struct trace_event x)
{
    if (r->cap > 0) r->events[r->n++ % r->cap] = x;
}

void trace_node_begin(stk_engine *e, uint32_t node)
{
    if (e->trace.begin_ns) e->trace.begin_ns[node] = exec_now_ns(e->ex);
}

void trace_node_end(stk_engine *e, uint32_t node)
{
    if (!e->trace.begin_ns) return;
    add(&e->trace.lane, (struct trace_event){ .begin_ns = e->trace.begin_ns[node],
                                              .end_ns = exec_now_ns(e->ex),
                                              .plan = e->run.plan,
                                              .id = node,
                                              .what = TRACE_NODE });
}

void trace_wait(stk_engine *e, uint32_t visit, uint8_t kind, uint64_t from_ns, uint64_t to_ns)
{
    add(&e->trace.app, (struct trace_event){ .begin_ns = from_ns,
                                             .end_ns = to_ns,
                                             .id = visit,
                                             .what = TRACE_WAIT,
                                             .kind = kind });
}

void trace_step(stk_engine *e, uint64_t from_ns, uint64_t to_ns)
{
    add(&e->trace.app, (struct trace_event){ .begin_ns = from_ns,
                                             .end_ns = to_ns,
                                             .id = (uint32_t)e->begun,
                                             .what = TRACE_STEP });
}

/* --- writing ---------------------------------------------------------------------------------- */

struct writer {
    FILE *to;
    uint64_t origin_ns;
    uint64_t row_end_ns[PLAN_RESOURCE_N][ROWS_MAX];
    uint32_t rows[PLAN_RESOURCE_N];
    uint64_t visit_end_ns; /* of the visit before */
    bool any;
};

enum { TID_STEPS = 1, TID_WAITS = 2, TID_RESOURCES = 1000 };

static uint32_t row_of(struct writer *w, uint32_t resource, uint64_t begin_ns, uint64_t end_ns)
{
    uint64_t *end = w->row_end_ns[resource];
    uint32_t row = 0;
    while (row < w->rows[resource] && end[row] > begin_ns) row++;
    if (row == ROWS_MAX) row--;
    if (row == w->rows[resource]) w->rows[resource]++;
    end[row] = end_ns;
    return row;
}

static void event(struct writer *w, const char *name, uint32_t tid, uint64_t begin_ns,
                  uint64_t end_ns)
{
    fprintf(w->to, "%s{\"name\":\"%s\",\"ph\":\"X\",\"pid\":1,\"tid\":%u,\"ts\":%.3f,\"dur\":%.3f",
            w->any ? ",\n" : "", name, tid, (double)(begin_ns - w->origin_ns) / 1e3,
            (double)(end_ns - begin_ns) / 1e3);
    w->any = true;
}

static void write_node(struct writer *w, const struct trace_event *x)
{
    const struct plan_node *n = &x->plan->nodes[x->id];
    if (n->resource == PLAN_NONE) return; /* joins and norms take no time */
    uint64_t begin = x->begin_ns;
    if (n->kind == PLAN_VISIT) {
        if (begin < w->visit_end_ns) begin = w->visit_end_ns;
        if (begin > x->end_ns) begin = x->end_ns;
        w->visit_end_ns = x->end_ns;
    }
    uint32_t row = row_of(w, n->resource, begin, x->end_ns);
    char name[96];
    plan_node_name(x->plan, x->id, name, sizeof name);
    event(w, name, TID_RESOURCES * (1 + n->resource) + row, begin, x->end_ns);
    fprintf(w->to, ",\"args\":{\"node\":%u,\"bytes\":%" PRIu64, x->id, n->bytes);
    if (n->block != PLAN_NO) fprintf(w->to, ",\"block\":%u", n->block);
    fputs("}}", w->to);
}

static void write_wait(struct writer *w, const struct trace_event *x)
{
    char name[64];
    if (x->what == TRACE_STEP)
        snprintf(name, sizeof name, "step %u", x->id);
    else
        snprintf(name, sizeof name, "waits for %s", plan_kind_name((enum plan_kind)x->kind));
    event(w, name, x->what == TRACE_STEP ? TID_STEPS : TID_WAITS, x->begin_ns, x->end_ns);
    if (x->what == TRACE_WAIT && x->id != PLAN_NO)
        fprintf(w->to, ",\"args\":{\"visit\":%u}", x->id);
    fputs("}", w->to);
}

static int by_begin(const void *a, const void *b)
{
    const struct trace_event *x = a, *y = b;
    if (x->begin_ns != y->begin_ns) return x->begin_ns < y->begin_ns ? -1 : 1;
    return (x->end_ns > y->end_ns) - (x->end_ns < y->end_ns);
}

static void row_name(struct writer *w, uint32_t tid, const char *name, uint32_t row)
{
    fprintf(w->to,
            "%s{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":%u,\"args\":{\"name\":\"%s",
            w->any ? ",\n" : "", tid, name);
    if (row) fprintf(w->to, " (%u)", row + 1);
    fputs("\"}}", w->to);
    w->any = true;
}

static void write_names(struct writer *w)
{
    row_name(w, TID_STEPS, "steps", 0);
    row_name(w, TID_WAITS, "exposed waits", 0);
    for (uint32_t r = 0; r < PLAN_RESOURCE_N; r++)
        for (uint32_t k = 0; k < w->rows[r]; k++)
            row_name(w, TID_RESOURCES * (1 + r) + k, plan_resource_name((enum plan_resource)r), k);
}

/* The kept events in order of their begin: rings start over, so the array is sorted in place; its
 * order means nothing to who fills it, once it is full or not yet. */
static uint64_t sort(struct trace_ring *r)
{
    uint64_t n = r->n < r->cap ? r->n : r->cap;
    if (n > 0) qsort(r->events, n, sizeof *r->events, by_begin);
    r->n = n; /* the oldest lies first: it goes first when the ring is full */
    return n;
}

static void write_rings(struct writer *w, struct eng_trace *t)
{
    uint64_t n = sort(&t->lane), m = sort(&t->app);
    w->origin_ns = n > 0 ? t->lane.events[0].begin_ns : 0;
    if (m > 0 && (n == 0 || t->app.events[0].begin_ns < w->origin_ns))
        w->origin_ns = t->app.events[0].begin_ns;
    for (uint64_t i = 0; i < n; i++) write_node(w, &t->lane.events[i]);
    for (uint64_t i = 0; i < m; i++) write_wait(w, &t->app.events[i]);
}

stk_status stk_trace_write(stk_engine *e, const char *path)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_READY) return eng_refuse_state(e, "stk_trace_write", "between steps");
    if (!e->trace.begin_ns)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "stk_trace_write: nothing was kept: set config.trace_bytes");
    struct writer *w = sys_calloc(1, sizeof *w);
    if (!w) return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory to write a trace");
    w->to = fopen(path, "we");
    if (!w->to) {
        sys_free(w);
        return stk_error_set(&e->err, STK_ERR_IO, errno, "%s: cannot be written: %s", path,
                             strerror(errno));
    }
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", w->to);
    write_rings(w, &e->trace);
    write_names(w);
    fputs("\n]}\n", w->to);
    bool bad = ferror(w->to) != 0;
    bad |= fclose(w->to) != 0;
    sys_free(w);
    return bad ? stk_error_set(&e->err, STK_ERR_IO, errno, "%s: writing the trace failed", path)
               : STK_OK;
}
