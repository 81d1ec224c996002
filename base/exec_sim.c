/* base/exec_sim.c - execution in simulation: one OS thread, a virtual clock, and choices drawn from
 * a seed.
 *
 * Owns: the virtual clock, the random numbers, the hash over every decision. The next thing to
 * happen is, in this order: a task of a lane that may run now (drawn), what a source has ready, the
 * next instant at which a lane may run, what a source still owes. If there is none of these,
 * nothing can happen any more.
 * Must not know: what tasks do, real time.
 * Thread: the application's, for everything. */
#include "base/exec_priv.h"
#include "base/rng.h"
#include "base/sys.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

struct sim_source {
    struct exec_source *src;
    struct sim_source *next;
};

struct sim_world {
    struct exec base;
    uint64_t now_ns, trace, seed;
    struct rng rng;
    struct exec_lane *current; /* whose task runs; NULL between tasks */
    struct sim_source *sources;
    uint32_t on_drive;          /* lanes that share the drive now */
    uint64_t settled_ns;        /* up to here `left_ns` of sharing lanes is right */
    double used_ns[EXEC_SHARES];
};

struct sim_lane {
    struct exec_lane base;
    uint64_t busy_until_ns;
    /* work that shares: busy_until_ns is then where it ends if nothing else begins or ends */
    bool sharing, open;
    struct exec_need need;
    double left_ns, speed;
};

enum sim_step { SIM_RAN, SIM_MOVED, SIM_LIMIT, SIM_NOTHING };

/* A lane that queues itself for ever without time passing would never let a wait end. */
static const uint64_t tasks_at_one_instant = 50000000;

static struct sim_world *world_of(const struct exec *ex)
{
    STK_ASSERT(ex->ops->kind == EXEC_SIM);
    return (struct sim_world *)ex;
}

/* --- work that shares ------------------------------------------------------------------------- */

static struct sim_lane *sim_of(struct exec_lane *l) { return (struct sim_lane *)l; }

static double weight_of(const struct sim_world *w, const struct sim_lane *s)
{
    return s->need.weight > 0 && w->on_drive > 1 ? s->need.weight : 1;
}

/* The share that allows the lowest speed, of one of weight 1, to those whose speed is open (progressive
 * filling: Bertsekas & Gallager, "Data Networks", 1992, section 6.5.2). */
static double tightest(struct sim_world *w, uint32_t *which)
{
    double asked[EXEC_SHARES] = { 0 }, left[EXEC_SHARES], lowest = INFINITY;
    for (uint32_t k = 0; k < EXEC_SHARES; k++) left[k] = 1;
    for (struct exec_lane *l = w->base.lanes; l; l = l->next) {
        const struct sim_lane *s = sim_of(l);
        for (uint32_t k = 0; s->sharing && k < EXEC_SHARES; k++) {
            if (s->open) asked[k] += s->need.part[k] * weight_of(w, s);
            else left[k] -= s->need.part[k] * s->speed;
        }
    }
    for (uint32_t k = 0; k < EXEC_SHARES; k++) {
        if (!(asked[k] > 0)) continue;
        double speed = left[k] > 0 ? left[k] / asked[k] : 0;
        if (speed >= lowest) continue;
        lowest = speed;
        *which = k;
    }
    return lowest;
}

static void find_speeds(struct sim_world *w)
{
    w->on_drive = 0;
    for (struct exec_lane *l = w->base.lanes; l; l = l->next) {
        sim_of(l)->open = sim_of(l)->sharing;
        sim_of(l)->speed = 1;
        w->on_drive += sim_of(l)->sharing && sim_of(l)->need.part[EXEC_SHARE_DRIVE] > 0;
    }
    for (;;) {
        uint32_t which = EXEC_SHARES;
        double speed = tightest(w, &which), full = INFINITY;
        for (struct exec_lane *l = w->base.lanes; l; l = l->next)
            if (sim_of(l)->open && 1 / weight_of(w, sim_of(l)) < full) full = 1 / weight_of(w, sim_of(l));
        if (full == INFINITY) break;
        for (struct exec_lane *l = w->base.lanes; l; l = l->next) { /* full speed first, or held back */
            struct sim_lane *s = sim_of(l);
            double weight = weight_of(w, s), at = full <= speed ? 1 : speed * weight;
            if (!s->open || (full <= speed ? 1 / weight > full : !(s->need.part[which] > 0))) continue;
            s->speed = at > 1e-6 ? at : 1e-6; /* rounding must not stop the clock */
            s->open = false;
        }
    }
    for (struct exec_lane *l = w->base.lanes; l; l = l->next)
        if (sim_of(l)->sharing)
            sim_of(l)->busy_until_ns = w->now_ns + (uint64_t)(sim_of(l)->left_ns / sim_of(l)->speed + 0.999);
}

/* Counts what was done since the last time. True: some work has ended. */
static bool settle(struct sim_world *w)
{
    double ns = (double)(w->now_ns - w->settled_ns);
    bool ended = false;
    w->settled_ns = w->now_ns;
    for (struct exec_lane *l = w->base.lanes; l; l = l->next) {
        struct sim_lane *s = sim_of(l);
        if (!s->sharing) continue;
        double done = ns * s->speed < s->left_ns ? ns * s->speed : s->left_ns;
        s->left_ns -= done;
        for (uint32_t k = 0; k < EXEC_SHARES; k++) w->used_ns[k] += done * s->need.part[k];
        if (s->busy_until_ns > w->now_ns) continue;
        s->sharing = false;
        ended = true;
    }
    return ended;
}

/* --- one step --------------------------------------------------------------------------------- */

static bool runnable(struct sim_world *w, struct exec_lane *lane)
{
    exec_queue_promote(&lane->queue, w->now_ns);
    return lane->queue.first && ((struct sim_lane *)lane)->busy_until_ns <= w->now_ns;
}

static void run_one(struct sim_world *w, struct exec_lane *lane)
{
    struct exec_task *task = exec_queue_pop(&lane->queue);
    lane->ran++;
    w->trace = rng_hash64(w->trace ^ rng_hash64(((uint64_t)lane->index << 32) + 1)
                          ^ rng_hash64(w->now_ns + 2));
    w->current = lane;
    exec_task_run(task);
    w->current = NULL;
}

static bool run_any(struct sim_world *w)
{
    uint32_t n = 0;
    for (struct exec_lane *l = w->base.lanes; l; l = l->next) n += runnable(w, l);
    if (n == 0) return false;
    uint64_t chosen = rng_below(&w->rng, n);
    for (struct exec_lane *l = w->base.lanes; l; l = l->next) {
        if (!runnable(w, l) || chosen-- > 0) continue;
        run_one(w, l);
        return true;
    }
    STK_ASSERT(!"a runnable lane was counted");
    return false;
}

/* Asks the sources that owe something; with `block`, waits on the first of them. */
static bool poll_sources(struct sim_world *w, bool block)
{
    uint32_t took = 0;
    bool waited = false;
    for (struct sim_source *s = w->sources; s && !waited; s = s->next) {
        if (s->src->idle(s->src->arg)) continue;
        took += s->src->poll(s->src->arg, block);
        waited = block;
    }
    return took > 0 || waited;
}

/* The next instant at which some lane may run; UINT64_MAX: never. */
static uint64_t next_instant(const struct sim_world *w)
{
    uint64_t next = UINT64_MAX;
    for (struct exec_lane *l = w->base.lanes; l; l = l->next) {
        uint64_t busy = ((struct sim_lane *)l)->busy_until_ns, at = UINT64_MAX;
        if (l->queue.first || ((struct sim_lane *)l)->sharing) at = busy;
        else if (l->queue.due) at = l->queue.due->due_ns > busy ? l->queue.due->due_ns : busy;
        if (at < next) next = at;
    }
    return next;
}

static enum sim_step step(struct sim_world *w, uint64_t limit_ns)
{
    STK_ASSERT(!w->current);
    if (run_any(w) || poll_sources(w, false)) return SIM_RAN;
    uint64_t next = next_instant(w);
    if (next != UINT64_MAX) {
        bool beyond = next > limit_ns;
        uint64_t to = beyond ? limit_ns : next;
        if (to > w->now_ns) w->now_ns = to;
        if (settle(w)) find_speeds(w);
        return beyond ? SIM_LIMIT : SIM_MOVED;
    }
    return poll_sources(w, true) ? SIM_RAN : SIM_NOTHING;
}

/* --- lanes ------------------------------------------------------------------------------------ */

static uint64_t sim_now_ns(const struct exec *ex) { return world_of(ex)->now_ns; }

static stk_status sim_lane_open(struct exec *ex, struct exec_lane **out, struct stk_error *err)
{
    (void)ex;
    struct sim_lane *lane = sys_calloc(1, sizeof *lane);
    if (!lane)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "a lane: no memory for %zu bytes",
                             sizeof *lane);
    *out = &lane->base;
    return STK_OK;
}

/* There is no thread that could fail to start. */
static stk_status sim_lane_start(struct exec_lane *lane, struct stk_error *err)
{
    (void)lane;
    (void)err;
    return STK_OK;
}

static void sim_push(struct exec_lane *lane, struct exec_task *task, bool timed)
{
    struct sim_world *w = world_of(lane->ex);
    if (!timed) {
        exec_queue_push(&lane->queue, task);
        return;
    }
    exec_queue_push_due(&lane->queue, task);
    exec_queue_promote(&lane->queue, w->now_ns);
    if (lane->no_timers) exec_queue_drop_due(&lane->queue);
}

static bool sim_remove(struct exec_lane *lane, struct exec_task *task)
{
    return exec_queue_remove(&lane->queue, task);
}

static bool sim_on_lane(const struct exec_lane *lane)
{
    return world_of(lane->ex)->current == lane;
}

static void sim_lane_close(struct exec_lane *lane)
{
    struct sim_world *w = world_of(lane->ex);
    lane->no_timers = true;
    exec_queue_drop_due(&lane->queue);
    while (lane->queue.first) (void)step(w, UINT64_MAX);
    settle(w); /* what it shared is the others' from here on */
    struct exec_lane **at = &w->base.lanes;
    while (*at != lane) at = &(*at)->next;
    *at = lane->next;
    sys_free(lane);
    find_speeds(w);
}

void exec_lane_busy(struct exec_lane *lane, uint64_t busy_ns)
{
    if (exec_kind_of(lane->ex) != EXEC_SIM) return;
    struct sim_world *w = world_of(lane->ex);
    STK_ASSERT(w->current == lane);
    struct sim_lane *sim = (struct sim_lane *)lane;
    uint64_t until = w->now_ns + busy_ns;
    if (until > sim->busy_until_ns) sim->busy_until_ns = until;
}

void exec_lane_busy_sharing(struct exec_lane *lane, uint64_t busy_ns, const struct exec_need *need)
{
    if (exec_kind_of(lane->ex) != EXEC_SIM) return;
    struct sim_world *w = world_of(lane->ex);
    struct sim_lane *sim = sim_of(lane);
    STK_ASSERT(w->current == lane && !sim->sharing);
    if (busy_ns == 0) return;
    settle(w);
    sim->sharing = true;
    sim->need = *need;
    sim->left_ns = (double)busy_ns;
    find_speeds(w);
}

uint64_t exec_share_used_ns(const struct exec *ex, enum exec_share share)
{
    return exec_kind_of(ex) == EXEC_SIM ? (uint64_t)world_of(ex)->used_ns[share] : 0;
}

struct exec_lane *exec_lane_current(const struct exec *ex)
{
    return exec_kind_of(ex) == EXEC_SIM ? world_of(ex)->current : NULL;
}

/* --- events ----------------------------------------------------------------------------------- */

static void sim_event_set(struct exec_event *ev)
{
    __atomic_store_n(&ev->set, 1, __ATOMIC_RELEASE);
}

static stk_status report_stall(const struct sim_world *w, const char *why, struct stk_error *err)
{
    char lanes[512];
    exec_describe_lanes(&w->base, lanes, sizeof lanes);
    return stk_error_set(err, STK_ERR_STALLED, 0,
                         "%s at %" PRIu64 " ns (simulation, seed %" PRIu64 "); lanes: %s", why,
                         w->now_ns, w->seed, lanes);
}

static stk_status sim_event_wait(struct exec_event *ev, uint64_t deadline_ns, struct stk_error *err)
{
    struct sim_world *w = world_of(ev->ex);
    uint64_t ran = 0;
    while (!exec_event_is_set(ev)) {
        enum sim_step did = w->now_ns > deadline_ns ? SIM_LIMIT : step(w, deadline_ns);
        if (did == SIM_LIMIT)
            return report_stall(w, "what is waited for did not happen before the deadline", err);
        if (did == SIM_NOTHING)
            return report_stall(w,
                                "nothing can happen any more: no lane has work, no timer is set, "
                                "no source owes anything",
                                err);
        ran = did == SIM_MOVED ? 0 : ran + 1;
        if (ran > tasks_at_one_instant)
            return report_stall(w, "tasks run without end and without time passing", err);
    }
    return STK_OK;
}

/* --- sources and the world -------------------------------------------------------------------- */

static stk_status sim_source_add(struct exec *ex, const char *name, struct exec_source *src,
                                 struct stk_error *err)
{
    struct sim_world *w = world_of(ex);
    struct sim_source *s = sys_calloc(1, sizeof *s);
    if (!s)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "source %s: no memory for %zu bytes", name,
                             sizeof *s);
    s->src = src;
    src->priv = s;
    struct sim_source **at = &w->sources;
    while (*at) at = &(*at)->next;
    *at = s;
    return STK_OK;
}

static void sim_source_remove(struct exec *ex, struct exec_source *src)
{
    struct sim_source **at = &world_of(ex)->sources;
    while ((*at)->src != src) at = &(*at)->next;
    struct sim_source *s = *at;
    *at = s->next;
    src->priv = NULL;
    sys_free(s);
}

static bool any_queued(const struct sim_world *w)
{
    for (struct exec_lane *l = w->base.lanes; l; l = l->next)
        if (l->queue.first) return true;
    return false;
}

static void sim_close(struct exec *ex)
{
    struct sim_world *w = world_of(ex);
    STK_ASSERT(!w->current && !w->sources);
    for (struct exec_lane *l = ex->lanes; l; l = l->next) {
        l->no_timers = true;
        exec_queue_drop_due(&l->queue);
    }
    while (any_queued(w)) (void)step(w, UINT64_MAX);
    while (ex->lanes) sim_lane_close(ex->lanes);
    sys_free(w);
}

uint64_t exec_trace_hash(const struct exec *ex)
{
    return exec_kind_of(ex) == EXEC_SIM ? world_of(ex)->trace : 0;
}

static const struct exec_ops sim_ops = {
    .kind = EXEC_SIM,
    .close = sim_close,
    .now_ns = sim_now_ns,
    .lane_open = sim_lane_open,
    .lane_start = sim_lane_start,
    .lane_close = sim_lane_close,
    .push = sim_push,
    .remove = sim_remove,
    .on_lane = sim_on_lane,
    .event_set = sim_event_set,
    .event_wait = sim_event_wait,
    .source_add = sim_source_add,
    .source_remove = sim_source_remove,
};

stk_status exec_open_sim(uint64_t seed, struct exec **out, struct stk_error *err)
{
    struct sim_world *w = sys_calloc(1, sizeof *w);
    *out = NULL;
    if (!w)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "execution: no memory for %zu bytes",
                             sizeof *w);
    w->base.ops = &sim_ops;
    w->seed = seed;
    rng_seed(&w->rng, seed);
    *out = &w->base;
    return STK_OK;
}
