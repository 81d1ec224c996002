/* engine/run.c - executes a plan: which nodes are done, which may start, what the application waits
 * for.
 *
 * Owns the run (struct eng_run). Runs on the engine lane, except run_alloc, run_free, run_start and
 * run_wait (application's thread, while the lane is idle or by events). Must not know what a node
 * does: engine/issue.c starts it, and its completion comes back here through run_complete.
 *
 * A node is READY when every dependency is met, ISSUED when it was started, DONE at its completion.
 * Ready nodes wait in one heap a resource, ordered by rank, which is program order for most. An edge
 * between two visits is met when the first is handed out (one stream runs them in order); every
 * other edge at completion. */
#include "engine/durable.h"
#include "engine/save.h"
#include "engine/spec.h"
#include "base/sys.h"
#include <string.h>

/* An entry: rank above, node below. */
static void heap_push(struct eng_run *r, uint32_t res, uint32_t node)
{
    uint64_t *h = r->heap[res], key = (uint64_t)r->plan->nodes[node].rank << 32 | node;
    uint32_t i = r->heap_n[res]++;
    r->ready_bytes[res] += r->plan->nodes[node].bytes;
    while (i > 0 && h[(i - 1) / 2] > key) {
        h[i] = h[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h[i] = key;
}

static void heap_pop(struct eng_run *r, uint32_t res)
{
    uint64_t *h = r->heap[res], last = h[r->heap_n[res] - 1];
    uint32_t n = --r->heap_n[res], i = 0;
    r->ready_bytes[res] -= r->plan->nodes[(uint32_t)h[0]].bytes;
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c >= n) break;
        if (c + 1 < n && h[c + 1] < h[c]) c++;
        if (h[c] >= last) break;
        h[i] = h[c];
        i = c;
    }
    h[i] = last;
}

stk_status run_alloc(stk_engine *e, uint32_t n_nodes_max)
{
    struct eng_run *r = &e->run;
    r->deps_left = sys_calloc(n_nodes_max, sizeof *r->deps_left);
    r->node_state = sys_calloc(n_nodes_max, 1);
    r->end_ns = sys_calloc(n_nodes_max, sizeof *r->end_ns);
    bool ok = r->deps_left && r->node_state && r->end_ns;
    for (uint32_t k = 0; k < PLAN_RESOURCE_N; k++) {
        r->heap[k] = sys_calloc(n_nodes_max, sizeof *r->heap[k]);
        ok = ok && r->heap[k];
        struct run_pool *pool = &r->pool[k];
        memset(pool, 0, sizeof *pool);
        pool->limit = RUN_OPS_PER_RESOURCE;
        for (uint32_t i = 0; i < RUN_OPS_PER_RESOURCE; i++) {
            pool->op[i].e = e;
            pool->op[i].next_free = pool->free;
            pool->free = &pool->op[i];
        }
    }
    /* Two updates at a time keep a team busy; more would only spread over more memory. */
    r->pool[PLAN_UPDATE_TEAM].limit = 2 * e->cores.n_teams;
    /* A copy that a visit waits for goes soon; those queued on a stream cannot be passed. */
    r->pool[PLAN_COPY_IN_LINK].limit = r->pool[PLAN_COPY_OUT_LINK].limit = PACE_COPIES_IN_FLIGHT;
    r->pool[PLAN_UPDATE_STREAM].limit = TWIN_IN_FLIGHT;
    if (!ok)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0,
                             "no memory for the run of a plan with %u nodes", n_nodes_max);
    return STK_OK;
}

void run_free(stk_engine *e)
{
    sys_free(e->run.deps_left);
    sys_free(e->run.node_state);
    sys_free(e->run.end_ns);
    for (uint32_t k = 0; k < PLAN_RESOURCE_N; k++) sys_free(e->run.heap[k]);
}

struct pace_now run_pace(const stk_engine *e)
{
    const struct eng_run *r = &e->run;
    return (struct pace_now){ .plan = r->plan,
                              .node_state = r->node_state,
                              .next_visit = r->next_visit,
                              .visits_in_flight = r->visits_in_flight,
                              .updates_in_flight = r->pool[PLAN_UPDATE_TEAM].in_flight,
                              .ready_bytes = { r->ready_bytes[PLAN_COPY_IN_LINK],
                                               r->ready_bytes[PLAN_COPY_OUT_LINK] } };
}

struct run_op *run_op_take(stk_engine *e, uint32_t resource, uint32_t node)
{
    struct run_pool *p = &e->run.pool[resource];
    if (!p->free || p->in_flight >= p->limit) return NULL;
    struct run_op *op = p->free;
    p->free = op->next_free;
    p->in_flight++;
    op->node = node;
    op->begin_ns = exec_now_ns(e->ex);
    return op;
}

void run_op_give(stk_engine *e, uint32_t resource, struct run_op *op)
{
    struct run_pool *p = &e->run.pool[resource];
    op->next_free = p->free;
    p->free = op;
    p->in_flight--;
}

/* A node whose dependencies are met joins its resource's heap; visits wait to be asked for
 * instead. What will only pass stands behind nobody: in a full resource's heap it would hold up those
 * that depend on it, until all before it have begun. */
static void node_ready(stk_engine *e, uint32_t node)
{
    struct eng_run *r = &e->run;
    STK_ASSERT(r->node_state[node] == RUN_WAITING);
    r->node_state[node] = RUN_READY;
    const struct plan_node *n = &r->plan->nodes[node];
    if (n->kind == PLAN_VISIT) return;
    heap_push(r, issue_passes(e, node) ? PLAN_NONE : n->resource, node);
}

static void meet(stk_engine *e, uint32_t succ)
{
    struct eng_run *r = &e->run;
    if (r->node_state[succ] == RUN_DONE) return; /* of a part that does not run */
    STK_ASSERT(r->deps_left[succ] > 0);
    if (--r->deps_left[succ] == 0) node_ready(e, succ);
}

/* An edge visit -> visit is met at hand-out, all others at completion. */
static void meet_successors(stk_engine *e, uint32_t node, bool at_hand_out)
{
    const struct plan *p = e->run.plan;
    const struct plan_node *n = &p->nodes[node];
    bool visit = n->kind == PLAN_VISIT;
    for (uint32_t i = 0; i < n->n_succ; i++) {
        uint32_t s = p->succs[n->first_succ + i];
        bool stream_edge = visit && p->nodes[s].kind == PLAN_VISIT;
        if (stream_edge == at_hand_out) meet(e, s);
    }
}

void run_complete(stk_engine *e, uint32_t node)
{
    struct eng_run *r = &e->run;
    if (!r->active) return; /* the run failed meanwhile: nothing follows from this completion */
    const struct plan_node *n = &r->plan->nodes[node];
    STK_ASSERT(r->node_state[node] == RUN_ISSUED);
    r->node_state[node] = RUN_DONE;
    if (e->spec) spec_completed(e, node); /* nodes that will not be made pass now, before this one
                                           * counts: the run is not over meanwhile */
    r->last_node = node;
    r->end_ns[node] = (double)exec_now_ns(e->ex);
    trace_node_end(e, node);
    atomic_fetch_add_explicit(&e->progress, 1, memory_order_relaxed);
    meet_successors(e, node, false);
    save_node_done(e, n);
    r->nodes_left--;
    if (n->part == PLAN_RUN_UPDATE && --r->update_left == 0) {
        durable_begin(e); /* the state is that of one step until the next update */
        exec_event_set(&e->update_event);
    }
    if (n->kind == PLAN_VISIT) r->last_visit_done_ns = exec_now_ns(e->ex);
    if (r->nodes_left == 0) {
        r->active = false;
        exec_event_set(&e->run_event);
    }
}

void run_pass_early(stk_engine *e, uint32_t node)
{
    struct eng_run *r = &e->run;
    if (!r->active || r->node_state[node] != RUN_WAITING) return; /* ready: passes when its turn comes */
    const struct plan_node *n = &r->plan->nodes[node];
    STK_ASSERT(plan_passable(n) || (n->spec && !e->spec->tried));
    r->node_state[node] = RUN_ISSUED;
    trace_node_begin(e, node);
    run_complete(e, node);
}

void run_fail(stk_engine *e, const struct stk_error *err)
{
    if (atomic_load(&e->failed)) return;
    e->fail = *err;
    e->run.active = false;
    atomic_store(&e->failed, true);
    exec_event_set(&e->visit_event);
    exec_event_set(&e->update_event);
    exec_event_set(&e->run_event);
}

static bool hand_out_visit(stk_engine *e)
{
    struct eng_run *r = &e->run;
    if (!r->active) return false; /* the last node completed just now; the rest is the
                                   * application's */
    if (r->next_visit >= atomic_load(&e->want) || r->next_visit >= r->plan->n_visits) return false;
    uint32_t node = r->plan->visits[r->next_visit].node;
    if (r->node_state[node] != RUN_READY) return false;
    if (r->visits_in_flight >= (e->own ? e->cfg.own_held_max + 1 : ENG_VISITS_IN_FLIGHT)) {
        e->visit_cause = PLAN_VISIT;
        return false;
    }
    e->visit_cause = plan_visit_waits(r->plan, node, r->end_ns, (double)atomic_load(&e->asked_ns),
                                      e->visit_cause);
    r->node_state[node] = RUN_ISSUED;
    trace_node_begin(e, node);
    r->visits_in_flight++;
    r->next_visit++;
    meet_successors(e, node, true);
    exec_event_set(&e->visit_event);
    return true;
}

void run_abandon(stk_engine *e, uint32_t from)
{
    struct eng_run *r = &e->run;
    /* handed out, but the client had turned away */
    for (uint32_t i = from; r->active && i < r->next_visit; i++) {
        r->visits_in_flight--;
        if (i != r->hold_visit) run_complete(e, r->plan->visits[i].node);
    }
    for (; r->active && r->next_visit < r->plan->n_visits; r->next_visit++) {
        uint32_t node = r->plan->visits[r->next_visit].node;
        r->node_state[node] = RUN_ISSUED;
        trace_node_begin(e, node);
        meet_successors(e, node, true);
        if (r->next_visit != r->hold_visit) run_complete(e, node);
    }
}

void run_release_hold(stk_engine *e)
{
    struct eng_run *r = &e->run;
    if (r->hold_visit == PLAN_NO) return;
    uint32_t node = r->plan->visits[r->hold_visit].node;
    r->hold_visit = PLAN_NO;
    run_complete(e, node);
}

/* Own order: nothing moves and nothing can, but a visit is wanted: it needs the room of one that
 * the client holds. */
static void notice_stuck(stk_engine *e)
{
    struct eng_run *r = &e->run;
    if (!r->active || !e->own || r->visits_in_flight == 0 || r->next_visit >= atomic_load(&e->want))
        return;
    /* `want` may have been raised since hand_out_visit looked: then another pump is on its way. And
     * what the client released ends by itself. */
    if (r->node_state[r->plan->visits[r->next_visit].node] == RUN_READY ||
        r->visits_in_flight > atomic_load(&e->held_visits))
        return;
    for (uint32_t k = 0; k < PLAN_RESOURCE_N; k++)
        if (r->pool[k].in_flight || r->heap_n[k]) return;
    atomic_store(&e->stuck, true);
    exec_event_set(&e->visit_event);
}

/* True if something began. */
static bool issue_ready(stk_engine *e)
{
    struct eng_run *r = &e->run;
    bool any = false;
    for (uint32_t res = 0; res < PLAN_RESOURCE_N; res++)
        while (r->active && r->heap_n[res] > 0) {
            uint32_t node = (uint32_t)r->heap[res][0];
            /* popped before issuing: a node that completes at once may push others of the same
             * resource */
            heap_pop(r, res);
            r->node_state[node] = RUN_ISSUED;
            trace_node_begin(e, node);
            if (res == PLAN_NONE && r->plan->nodes[node].resource != PLAN_NONE) {
                run_complete(e, node); /* decided when it became ready */
                any = true;
                continue;
            }
            if (!issue_node(e, node)) {
                r->node_state[node] = RUN_READY;
                heap_push(r, res, node);
                break;
            }
            any = true;
        }
    return any;
}

void run_pump(void *engine)
{
    stk_engine *e = engine;
    for (bool moved = true; moved && e->run.active;) {
        moved = issue_ready(e);
        if (hand_out_visit(e)) moved = true;
    }
    notice_stuck(e);
}

static void count_deps(stk_engine *e)
{
    struct eng_run *r = &e->run;
    const struct plan *p = r->plan;
    r->nodes_left = r->update_left = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        const struct plan_node *n = &p->nodes[i];
        bool runs = (n->part & r->parts) != 0;
        r->node_state[i] = runs ? RUN_WAITING : RUN_DONE;
        r->nodes_left += runs;
        r->update_left += runs && n->part == PLAN_RUN_UPDATE;
        r->deps_left[i] = 0;
        for (uint32_t d = 0; runs && d < n->n_deps; d++)
            r->deps_left[i] += (p->nodes[p->deps[n->first_dep + d]].part & r->parts) != 0;
    }
}

/* First task of a run on the lane. */
static void run_begin(void *engine)
{
    stk_engine *e = engine;
    struct eng_run *r = &e->run;
    save_run_begin(e);
    if (r->nodes_left == 0) {
        r->active = false;
        exec_event_set(&e->run_event);
    }
    if (r->update_left == 0) exec_event_set(&e->update_event);
    if (e->spec && r->active) spec_run_begin(e); /* first: node_ready asks who passes */
    for (uint32_t i = 0; i < r->plan->n_nodes && r->active; i++)
        if (r->node_state[i] == RUN_WAITING && r->deps_left[i] == 0) node_ready(e, i);
    run_pump(e);
}

void run_start(stk_engine *e, const struct plan *p, uint32_t parts, uint32_t hold_visit)
{
    struct eng_run *r = &e->run;
    STK_ASSERT(!r->active && r->visits_in_flight == 0);
    r->plan = p;
    r->parts = parts;
    r->hold_visit = hold_visit;
    r->next_visit = 0;
    r->last_node = PLAN_NO;
    memset(r->end_ns, 0, p->n_nodes * sizeof *r->end_ns);
    r->last_visit_done_ns = 0;
    atomic_store(&e->want, 0);
    for (uint32_t k = 0; k < PLAN_RESOURCE_N; k++) r->heap_n[k] = 0;
    memset(r->ready_bytes, 0, sizeof r->ready_bytes);
    count_deps(e);
    exec_event_reset(&e->visit_event);
    exec_event_reset(&e->run_event);
    exec_event_reset(&e->update_event);
    r->active = true;
    exec_task_init(&e->begin_task, run_begin, e);
    exec_post(e->lane, &e->begin_task);
}

/* Engine lane: the oldest thing in flight, in words: what a stalled run waits for. */
static void find_wait(const stk_engine *e, char *buf, size_t size)
{
    const struct eng_run *r = &e->run;
    for (uint32_t i = 0; i < r->plan->n_nodes; i++) {
        if (r->node_state[i] != RUN_ISSUED) continue;
        const struct plan_node *n = &r->plan->nodes[i];
        snprintf(buf, size, "%s of block %d, chunk %d has been in flight since",
                 plan_kind_name(n->kind), (int)n->block, (int)n->chunk);
        return;
    }
    if (e->save.gated != PLAN_NO)
        snprintf(buf, size, "an update waits for chunk %u to be in the checkpoint", e->save.gated);
    else
        snprintf(buf, size, "nothing is in flight and nothing can start");
}

static void describe_on_lane(void *engine)
{
    stk_engine *e = engine;
    find_wait(e, e->wait_text, sizeof e->wait_text);
    exec_event_set(&e->wait_event);
}

/* Application's thread: the lane owns the run, so it is asked. */
static const char *describe_wait(stk_engine *e)
{
    exec_event_reset(&e->wait_event);
    exec_task_init(&e->wait_task, describe_on_lane, e);
    exec_post(e->lane, &e->wait_task);
    if (exec_event_wait(&e->wait_event, exec_now_ns(e->ex) + 5000000000u, NULL) != STK_OK)
        return "the engine lane does not answer";
    return e->wait_text;
}

stk_status run_wait(stk_engine *e, struct exec_event *ev)
{
    uint64_t stall_ns = e->cfg.stall_ns ? e->cfg.stall_ns : 120ull * 1000000000u;
    for (;;) {
        uint64_t seen = atomic_load(&e->progress), deadline = exec_now_ns(e->ex) + stall_ns;
        struct stk_error err = { 0 };
        /* the run may have failed before the caller reset the event, and sets it no more */
        stk_status st = STK_OK;
        if (!atomic_load(&e->failed)) st = exec_event_wait_running(ev, stall_ns, &err);
        if (atomic_load(&e->failed)) {
            e->state = ENG_FAILED;
            return stk_error_forward(&e->err, &e->fail);
        }
        if (st == STK_OK) return STK_OK;
        if (exec_now_ns(e->ex) >= deadline && atomic_load(&e->progress) != seen) continue;
        const char *what = describe_wait(e);
        e->state = ENG_FAILED;
        return stk_error_set(&e->err, STK_ERR_STALLED, 0,
                             "the step stopped moving: %s (%s); resume from the last checkpoint",
                             what, err.text);
    }
}
