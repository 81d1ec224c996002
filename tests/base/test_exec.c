/* tests/base/test_exec.c - execution: what holds for both backends is tested by one body each;
 * then what only the simulation promises. Nothing here depends on how fast a thread is. */
#include "base/rng.h"
#include "base/sys.h"
#include "tests/base/exec_world.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

/* --- lanes, tasks ----------------------------------------------------------------------------- */

enum { MANY = 500 };

struct order {
    struct exec_lane *lane;
    uint32_t n, seen[MANY];
    bool on_lane;
    struct exec_event done;
};
struct numbered {
    struct order *order;
    uint32_t number;
    struct exec_task task;
};

static void note_number(void *arg)
{
    struct numbered *t = arg;
    struct order *o = t->order;
    o->on_lane &= exec_on_lane(o->lane);
    o->seen[o->n++] = t->number; /* no lock: tasks of a lane never overlap */
    if (o->n == MANY) exec_event_set(&o->done);
}

BOTH(lane_is_fifo)
{
    struct exec *ex = open_kind(kind, test_seed());
    static struct numbered t[MANY];
    struct order o = { .lane = open_lane(ex, "a lane with a long name"), .on_lane = true };
    struct stk_error err = { 0 };
    exec_event_init(ex, &o.done);
    for (uint32_t i = 0; i < MANY; i++) {
        t[i] = (struct numbered){ .order = &o, .number = i };
        exec_task_init(&t[i].task, note_number, &t[i]);
        CHECK(exec_post(o.lane, &t[i].task));
    }
    CHECK(!exec_on_lane(o.lane));
    CHECK(exec_of(o.lane) == ex && exec_kind_of(ex) == kind);
    CHECK_OK(exec_event_wait(&o.done, UINT64_MAX, &err), &err);
    for (uint32_t i = 0; i < MANY; i++) CHECK(o.seen[i] == i);
    CHECK(o.on_lane);
    exec_close(ex);
}

struct wakeup {
    struct exec_lane *lane;
    struct exec_task task, gate_task;
    struct exec_event gate_entered, done;
    uint32_t runs, reposts_left;
    uint64_t wanted, looked; /* wanted: atomic */
    bool gate;
};

static void enter_gate(void *arg)
{
    struct wakeup *w = arg;
    exec_event_set(&w->gate_entered);
    if (exec_kind_of(exec_of(w->lane)) != EXEC_THREADS) return;
    while (!__atomic_load_n(&w->gate, __ATOMIC_ACQUIRE)) usleep(100);
}

static void look(void *arg)
{
    struct wakeup *w = arg;
    w->runs++;
    if (w->reposts_left > 0) {
        w->reposts_left--;
        STK_ASSERT(exec_post(w->lane, &w->task));  /* from inside its own fn */
        STK_ASSERT(!exec_post(w->lane, &w->task)); /* and only once */
        return;
    }
    exec_event_set(&w->done);
}

BOTH(queued_task_is_not_queued_twice)
{
    struct exec *ex = open_kind(kind, test_seed());
    struct wakeup w = { .lane = open_lane(ex, "wake"), .reposts_left = 3 };
    struct stk_error err = { 0 };
    exec_event_init(ex, &w.done);
    exec_event_init(ex, &w.gate_entered);
    exec_task_init(&w.task, look, &w);
    exec_task_init(&w.gate_task, enter_gate, &w);
    CHECK(exec_post(w.lane, &w.gate_task));
    CHECK(exec_post(w.lane, &w.task)); /* behind the gate: it cannot have begun */
    CHECK(!exec_post(w.lane, &w.task));
    CHECK(!exec_post_at(w.lane, &w.task, 5));
    __atomic_store_n(&w.gate, true, __ATOMIC_RELEASE);
    CHECK_OK(exec_event_wait(&w.done, UINT64_MAX, &err), &err);
    CHECK(w.runs == 4);
    exec_event_reset(&w.done);
    CHECK(!exec_event_is_set(&w.done));
    CHECK(exec_post(w.lane, &w.task)); /* it may be posted again after it ran */
    CHECK_OK(exec_event_wait(&w.done, UINT64_MAX, &err), &err);
    CHECK(w.runs == 5);
    exec_close(ex);
}

static void look_and_compare(void *arg)
{
    struct wakeup *w = arg;
    w->runs++;
    w->looked = __atomic_load_n(&w->wanted, __ATOMIC_RELAXED);
    if (w->looked == 4 * 20000) exec_event_set(&w->done);
}

static void *want_more(void *arg)
{
    struct wakeup *w = arg;
    for (int i = 0; i < 20000; i++) {
        __atomic_fetch_add(&w->wanted, 1, __ATOMIC_RELAXED);
        exec_post(w->lane, &w->task);
    }
    return NULL;
}

/* Four threads write, then post; most posts coalesce. The last write must be seen by the last
 * run, or this waits for ever (the deadline turns that into a failure). */
TEST(exec_threads_coalesced_post_loses_nothing)
{
    struct exec *ex = open_kind(EXEC_THREADS, 0);
    struct wakeup w = { .lane = open_lane(ex, "look") };
    struct stk_error err = { 0 };
    exec_event_init(ex, &w.done);
    exec_task_init(&w.task, look_and_compare, &w);
    pthread_t t[4];
    for (int i = 0; i < 4; i++) REQUIRE(pthread_create(&t[i], NULL, want_more, &w) == 0);
    CHECK_OK(exec_event_wait(&w.done, exec_now_ns(ex) + 60000000000u, &err), &err);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    exec_close(ex);
    CHECK(w.runs >= 1 && w.runs <= 4 * 20000 && w.looked == 4 * 20000);
}

/* --- timers ----------------------------------------------------------------------------------- */

enum { TIMERS = 60 };
struct timers {
    struct exec_lane *lane;
    struct exec_event done;
    uint32_t n, seen[TIMERS];
    bool early;
};
struct timer {
    struct timers *all;
    struct exec_task task;
    uint32_t number;
    uint64_t due_ns;
};

static void timer_fires(void *arg)
{
    struct timer *t = arg;
    t->all->early |= exec_now_ns(exec_of(t->all->lane)) < t->due_ns;
    t->all->seen[t->all->n++] = t->number;
    if (t->all->n == TIMERS) exec_event_set(&t->all->done);
}

BOTH(timers_in_order_of_due_then_posting)
{
    struct exec *ex = open_kind(kind, test_seed());
    struct timers all = { .lane = open_lane(ex, "timer") };
    static struct timer t[TIMERS];
    struct stk_error err = { 0 };
    struct rng r;
    rng_seed(&r, test_seed());
    exec_event_init(ex, &all.done);
    uint64_t start = exec_now_ns(ex) + 50000000;
    for (uint32_t i = 0; i < TIMERS; i++) {
        t[i] = (struct timer){ .all = &all,
                               .number = i,
                               .due_ns = start + 1000000 * rng_below(&r, 10) };
        exec_task_init(&t[i].task, timer_fires, &t[i]);
        CHECK(exec_post_at(all.lane, &t[i].task, t[i].due_ns));
    }
    CHECK_OK(exec_event_wait(&all.done, UINT64_MAX, &err), &err);
    CHECK(!all.early);
    for (uint32_t i = 1; i < TIMERS; i++) {
        const struct timer *a = &t[all.seen[i - 1]], *b = &t[all.seen[i]];
        CHECK(a->due_ns < b->due_ns || (a->due_ns == b->due_ns && a->number < b->number));
    }
    if (kind == EXEC_SIM) CHECK(exec_now_ns(ex) == t[all.seen[TIMERS - 1]].due_ns);
    exec_close(ex);
}

static void never(void *arg) { *(bool *)arg = true; }

BOTH(cancel_and_close_drop_timers)
{
    struct exec *ex = open_kind(kind, test_seed());
    struct exec_lane *lane = open_lane(ex, "cancel"), *other = open_lane(ex, "other");
    bool ran = false;
    struct exec_task a, b, c;
    exec_task_init(&a, never, &ran);
    exec_task_init(&b, never, &ran);
    exec_task_init(&c, never, &ran);
    CHECK(!exec_cancel(&a));
    uint64_t far = exec_now_ns(ex) + 3600ull * 1000000000u;
    CHECK(exec_post_at(lane, &a, far));
    CHECK(exec_post_at(lane, &b, far));
    CHECK(exec_cancel(&a));
    CHECK(!exec_cancel(&a));
    CHECK(exec_post_at(other, &c, far));
    exec_lane_close(lane);               /* does not wait an hour */
    CHECK(exec_post_at(other, &b, far)); /* dropped means that it may be posted again */
    exec_close(ex);
    CHECK(!ran);
}

/* --- closing ---------------------------------------------------------------------------------- */

struct chain {
    struct exec_lane *lane[3];
    struct exec_task task;
    uint32_t hops;
};

static void hop(void *arg)
{
    struct chain *c = arg;
    if (++c->hops < 1000) exec_post(c->lane[c->hops % 3], &c->task);
}

BOTH(close_drains_work_that_moves_between_lanes)
{
    struct exec *ex = open_kind(kind, test_seed());
    struct chain c = { .hops = 0 };
    for (int i = 0; i < 3; i++) c.lane[i] = open_lane(ex, "hop");
    exec_task_init(&c.task, hop, &c);
    exec_post(c.lane[0], &c.task);
    exec_close(ex);
    CHECK(c.hops == 1000);
    exec_close(NULL);
}

BOTH(lane_close_runs_what_is_queued)
{
    struct exec *ex = open_kind(kind, test_seed());
    static struct numbered t[MANY - 1];
    struct order o = { .lane = open_lane(ex, "short") };
    exec_event_init(ex, &o.done);
    for (uint32_t i = 0; i < MANY - 1; i++) {
        t[i] = (struct numbered){ .order = &o, .number = i };
        exec_task_init(&t[i].task, note_number, &t[i]);
        exec_post(o.lane, &t[i].task);
    }
    exec_lane_close(o.lane);
    CHECK(o.n == MANY - 1);
    exec_close(ex);
}

BOTH(deadline_is_an_error_that_names_lanes)
{
    struct exec *ex = open_kind(kind, test_seed());
    struct exec_lane *lane = open_lane(ex, "sleepy");
    struct exec_event ev;
    struct stk_error err = { 0 };
    bool ran = false;
    struct exec_task t;
    exec_event_init(ex, &ev);
    exec_task_init(&t, never, &ran);
    uint64_t now = exec_now_ns(ex);
    exec_post_at(lane, &t, now + 3600ull * 1000000000u);
    CHECK(exec_event_wait(&ev, now + 2000000, &err) == STK_ERR_STALLED);
    CHECK(strstr(err.text, "sleepy") != NULL && strstr(err.text, "deadline") != NULL);
    CHECK(exec_now_ns(ex) >= now + 2000000);
    if (kind == EXEC_SIM) CHECK(exec_now_ns(ex) == now + 2000000);
    exec_event_set(&ev);
    CHECK(exec_event_wait(&ev, 0, &err) == STK_OK); /* set already: no matter how late */
    exec_close(ex);
}

/* --- teams ------------------------------------------------------------------------------------ */

enum { JOBS = 20, SLICES = 17 };
struct team_test {
    struct exec_team_job job[JOBS];
    struct exec_task done[JOBS];
    uint32_t count[JOBS][SLICES]; /* atomic */
    uint32_t left[JOBS];          /* slices not yet returned; atomic */
    uint32_t overlaps;            /* atomic */
    uint32_t n_done, order_wrong, incomplete;
    struct exec_event all_done;
};
struct job_arg {
    struct team_test *t;
    uint32_t job;
};

/* Jobs 0 and 5 have no slices (done follows all the same), job 7 one. */
static uint32_t job_slices(uint32_t job)
{
    return job == 0 || job == 5 ? 0 : job == 7 ? 1 : SLICES;
}

static void team_slice(void *arg, uint32_t slice, uint32_t n)
{
    struct job_arg *a = arg;
    struct team_test *t = a->t;
    if (a->job > 0 && __atomic_load_n(&t->left[a->job - 1], __ATOMIC_ACQUIRE) != 0)
        __atomic_fetch_add(&t->overlaps, 1, __ATOMIC_RELAXED);
    uint32_t right = n == job_slices(a->job) ? 1 : 1000;
    __atomic_fetch_add(&t->count[a->job][slice], right, __ATOMIC_RELAXED);
    __atomic_fetch_sub(&t->left[a->job], 1, __ATOMIC_ACQ_REL);
}

static void team_done(void *arg)
{
    struct job_arg *a = arg;
    struct team_test *t = a->t;
    t->order_wrong += t->n_done != a->job;
    t->incomplete += __atomic_load_n(&t->left[a->job], __ATOMIC_ACQUIRE) != 0;
    if (++t->n_done == JOBS) exec_event_set(&t->all_done);
}

/* JOBS jobs on a team: each slice once, done in order. `beside`: some, as they come, are beside the ones
 * before; NULL: none is, and none overlaps another. */
static void run_jobs(enum exec_kind kind, uint64_t seed, uint32_t members, struct rng *beside)
{
    struct exec *ex = open_kind(kind, seed);
    struct exec_lane *lane = open_lane(ex, "engine");
    struct exec_team *team = NULL;
    struct stk_error err = { 0 };
    static struct team_test t;
    struct job_arg arg[JOBS];
    memset(&t, 0, sizeof t);
    exec_event_init(ex, &t.all_done);
    CHECK_OK(exec_team_open(ex, "update", members, &team, &err), &err);
    CHECK(exec_team_members(team) == members);
    for (uint32_t j = 0; j < JOBS; j++) {
        arg[j] = (struct job_arg){ &t, j };
        t.left[j] = job_slices(j);
        exec_task_init(&t.done[j], team_done, &arg[j]);
        t.job[j] = (struct exec_team_job){ .fn = team_slice,
                                           .arg = &arg[j],
                                           .n_slices = t.left[j],
                                           .beside = beside && rng_below(beside, 2),
                                           .done_lane = lane,
                                           .done = &t.done[j] };
    }
    for (uint32_t j = 0; j < JOBS; j++) exec_team_run(team, &t.job[j]);
    CHECK_OK(exec_event_wait(&t.all_done, UINT64_MAX, &err), &err);
    for (uint32_t j = 0; j < JOBS; j++)
        for (uint32_t s = 0; s < SLICES; s++) CHECK(t.count[j][s] == (s < job_slices(j)));
    CHECK((beside || t.overlaps == 0) && t.order_wrong == 0 && t.incomplete == 0);
    exec_team_close(team);
    exec_close(ex);
}

BOTH(team_runs_each_slice_once)
{
    for (uint32_t members = 1; members <= 4; members++)
        run_jobs(kind, test_seed() + members, members, NULL);
}

/* A job that is `beside` takes the members that the first slice of the job before it leaves: that slice
 * waits for all of it. The job after it, which is not, waits for both. */
struct beside_test {
    struct exec *ex;
    struct exec_event arrived;
    uint32_t slices, early; /* atomic */
};

static void slice_beside(void *arg, uint32_t slice, uint32_t n)
{
    struct beside_test *b = arg;
    (void)slice;
    if (__atomic_add_fetch(&b->slices, 1, __ATOMIC_SEQ_CST) == n) exec_event_set(&b->arrived);
}

static void slice_before(void *arg, uint32_t slice, uint32_t n)
{
    struct beside_test *b = arg;
    struct stk_error err = { 0 };
    (void)n;
    if (slice > 0) return;
    if (exec_event_wait(&b->arrived, exec_now_ns(b->ex) + 10000000000u, &err) != STK_OK)
        __atomic_fetch_add(&b->early, 100, __ATOMIC_SEQ_CST);
}

static void slice_after(void *arg, uint32_t slice, uint32_t n)
{
    struct beside_test *b = arg;
    (void)slice;
    (void)n;
    if (__atomic_load_n(&b->slices, __ATOMIC_SEQ_CST) != 5)
        __atomic_fetch_add(&b->early, 1, __ATOMIC_SEQ_CST);
}

TEST(exec_threads_team_job_beside_does_not_wait)
{
    for (uint32_t members = 2; members <= 4; members++)
        for (uint32_t before = 1; before <= 3; before++) {
            struct exec *ex = open_kind(EXEC_THREADS, test_seed());
            struct exec_team *team = NULL;
            struct stk_error err = { 0 };
            struct beside_test b = { .ex = ex };
            exec_event_init(ex, &b.arrived);
            CHECK_OK(exec_team_open(ex, "update", members, &team, &err), &err);
            struct exec_team_job jobs[3] = {
                { .fn = slice_before, .arg = &b, .n_slices = before },
                { .fn = slice_beside, .arg = &b, .n_slices = 5, .beside = true },
                { .fn = slice_after, .arg = &b, .n_slices = 7 },
            };
            for (int j = 0; j < 3; j++) exec_team_run(team, &jobs[j]);
            exec_team_close(team);
            CHECK(b.slices == 5 && b.early == 0);
            exec_close(ex);
        }
}

BOTH(team_mixed_jobs_run_each_slice_once)
{
    struct rng r;
    rng_seed(&r, test_seed());
    for (uint32_t round = 0; round < 40; round++)
        run_jobs(kind, test_seed() + round, 1 + round % 4, &r);
}

struct begin_test { uint32_t begun, early; }; /* atomic: members begin, slices run before that */

static void member_begins(void *arg)
{
    __atomic_fetch_add(&((struct begin_test *)arg)->begun, 1, __ATOMIC_SEQ_CST);
}

/* With one member every slice follows its beginning. */
static void slice_after_begin(void *arg, uint32_t slice, uint32_t n)
{
    struct begin_test *b = arg;
    (void)slice;
    (void)n;
    if (__atomic_load_n(&b->begun, __ATOMIC_SEQ_CST) == 0) __atomic_fetch_add(&b->early, 1, __ATOMIC_SEQ_CST);
}

BOTH(team_members_begin_once_before_slices)
{
    for (uint32_t members = 1; members <= 4; members++) {
        struct exec *ex = open_kind(kind, test_seed() + members);
        struct exec_team *team = NULL;
        struct stk_error err = { 0 };
        struct begin_test b = { 0 };
        CHECK_OK(exec_team_open(ex, "update", members, &team, &err), &err);
        exec_team_begin(team, member_begins, &b);
        struct exec_team_job job = { .fn = slice_after_begin, .arg = &b, .n_slices = 50 };
        exec_team_run(team, &job);
        exec_team_close(team);
        CHECK(b.begun == members && b.early == 0);
        exec_close(ex);
    }
}

BOTH(team_close_finishes_jobs)
{
    struct exec *ex = open_kind(kind, test_seed());
    struct exec_team *team = NULL;
    struct stk_error err = { 0 };
    static struct team_test t;
    memset(&t, 0, sizeof t);
    struct job_arg arg = { &t, 1 };
    CHECK_OK(exec_team_open(ex, "update", 3, &team, &err), &err);
    t.left[1] = SLICES;
    t.job[0] = (struct exec_team_job){ .fn = team_slice, .arg = &arg, .n_slices = SLICES };
    exec_team_run(team, &t.job[0]);
    exec_team_close(team);
    for (uint32_t s = 0; s < SLICES; s++) CHECK(t.count[1][s] == 1);
    exec_team_close(NULL);
    CHECK(exec_team_open(ex, "none", 0, &team, &err) == STK_ERR_CONFIG && !team);
    exec_close(ex);
}

/* --- sources ---------------------------------------------------------------------------------- */

/* A pipe: what is written to it arrives later; a second pipe wakes a blocked poll. */
struct pipe_source {
    struct exec_source src;
    struct exec_lane *lane;
    struct exec_task arrived;
    struct exec_event done;
    int data[2];
    uint32_t owed; /* atomic: bytes written and not taken; a wake counts as one */
    uint32_t taken, ran;
};

static uint32_t pipe_poll(void *arg, bool block)
{
    struct pipe_source *p = arg;
    char c = 0;
    if (!block && __atomic_load_n(&p->owed, __ATOMIC_ACQUIRE) == 0) return 0;
    if (read(p->data[0], &c, 1) != 1 || c == 'w') return 0;
    __atomic_fetch_sub(&p->owed, 1, __ATOMIC_ACQ_REL);
    p->taken++;
    exec_post(p->lane, &p->arrived);
    return 1;
}

static void pipe_wake(void *arg)
{
    struct pipe_source *p = arg;
    STK_ASSERT(write(p->data[1], "w", 1) == 1);
}

static bool pipe_idle(void *arg)
{
    struct pipe_source *p = arg;
    return __atomic_load_n(&p->owed, __ATOMIC_ACQUIRE) == 0;
}

static void pipe_arrived(void *arg)
{
    struct pipe_source *p = arg;
    if (++p->ran == 3) exec_event_set(&p->done);
    else {
        __atomic_fetch_add(&p->owed, 1, __ATOMIC_ACQ_REL);
        STK_ASSERT(write(p->data[1], "d", 1) == 1);
    }
}

BOTH(source_brings_completions)
{
    struct exec *ex = open_kind(kind, test_seed());
    struct pipe_source p = { .lane = open_lane(ex, "pipe") };
    struct stk_error err = { 0 };
    exec_event_init(ex, &p.done);
    exec_task_init(&p.arrived, pipe_arrived, &p);
    REQUIRE(pipe(p.data) == 0);
    p.src =
        (struct exec_source){ .poll = pipe_poll, .wake = pipe_wake, .idle = pipe_idle, .arg = &p };
    CHECK_OK(exec_source_add(ex, "pipe", &p.src, &err), &err);
    __atomic_fetch_add(&p.owed, 1, __ATOMIC_ACQ_REL);
    REQUIRE(write(p.data[1], "d", 1) == 1);
    CHECK_OK(exec_event_wait(&p.done, UINT64_MAX, &err), &err);
    exec_source_remove(ex, &p.src);
    CHECK(p.ran == 3 && p.taken == 3);
    exec_close(ex);
    close(p.data[0]);
    close(p.data[1]);
}

/* --- the simulation alone --------------------------------------------------------------------- */

enum { SIM_LANES = 4, SIM_TASKS = 200 };
struct mesh {
    struct exec_lane *lane[SIM_LANES];
    struct exec_task task[SIM_LANES];
    struct rng rng[SIM_LANES];
    uint32_t left;
    uint64_t trace[SIM_TASKS];
    struct exec_event done;
};
struct mesh_arg {
    struct mesh *m;
    uint32_t lane;
};

static void mesh_task(void *arg)
{
    struct mesh_arg *a = arg;
    struct mesh *m = a->m;
    struct exec *ex = exec_of(m->lane[a->lane]);
    if (m->left == 0) return;
    m->trace[--m->left] = exec_trace_hash(ex);
    if (m->left == 0) exec_event_set(&m->done);
    STK_ASSERT(exec_lane_current(ex) == m->lane[a->lane]);
    exec_lane_busy(m->lane[a->lane], rng_below(&m->rng[a->lane], 3));
    exec_post_at(m->lane[a->lane], &m->task[a->lane],
                 exec_now_ns(ex) + rng_below(&m->rng[a->lane], 4));
}

static uint64_t run_mesh(uint64_t seed, struct mesh *m)
{
    struct exec *ex = open_kind(EXEC_SIM, seed);
    struct mesh_arg arg[SIM_LANES];
    struct stk_error err = { 0 };
    *m = (struct mesh){ .left = SIM_TASKS };
    exec_event_init(ex, &m->done);
    for (uint32_t i = 0; i < SIM_LANES; i++) {
        m->lane[i] = open_lane(ex, "mesh");
        arg[i] = (struct mesh_arg){ m, i };
        rng_seed(&m->rng[i], i);
        exec_task_init(&m->task[i], mesh_task, &arg[i]);
        exec_post(m->lane[i], &m->task[i]);
    }
    STK_ASSERT(exec_event_wait(&m->done, UINT64_MAX, &err) == STK_OK);
    uint64_t trace = exec_trace_hash(ex);
    exec_close(ex);
    return trace;
}

TEST(exec_sim_same_seed_same_trace)
{
    static struct mesh a, b;
    uint32_t distinct = 0;
    for (uint64_t seed = test_seed(); seed < test_seed() + 20; seed++) {
        uint64_t first = run_mesh(seed, &a), again = run_mesh(seed, &b);
        CHECK(first == again);
        CHECK(memcmp(a.trace, b.trace, sizeof a.trace) == 0); /* equal after every step */
        distinct += run_mesh(seed + 1, &b) != first;
    }
    CHECK(distinct == 20);
    struct exec *ex = open_kind(EXEC_THREADS, 0);
    CHECK(exec_trace_hash(ex) == 0 && exec_lane_current(ex) == NULL);
    exec_close(ex);
}

TEST(exec_sim_lost_completion_is_found)
{
    struct exec *ex = open_kind(EXEC_SIM, test_seed());
    open_lane(ex, "engine");
    open_lane(ex, "disk");
    struct exec_event ev;
    struct stk_error err = { 0 };
    exec_event_init(ex, &ev);
    CHECK(exec_event_wait(&ev, UINT64_MAX, &err) == STK_ERR_STALLED);
    CHECK(strstr(err.text, "engine") && strstr(err.text, "disk") && strstr(err.text, "seed"));
    exec_close(ex);
}

static void busy_task(void *arg)
{
    struct numbered *t = arg;
    struct exec *ex = exec_of(t->order->lane);
    t->order->seen[t->order->n++] = (uint32_t)exec_now_ns(ex);
    exec_lane_busy(t->order->lane, t->number);
}

TEST(exec_sim_busy_lane_waits)
{
    struct exec *ex = open_kind(EXEC_SIM, test_seed());
    struct order o = { .lane = open_lane(ex, "busy") };
    struct numbered t[3] = { { .order = &o, .number = 100 },
                             { .order = &o, .number = 50 },
                             { .order = &o } };
    CHECK(exec_now_ns(ex) == 0);
    for (int i = 0; i < 3; i++) {
        exec_task_init(&t[i].task, busy_task, &t[i]);
        exec_post(o.lane, &t[i].task);
    }
    exec_close(ex);
    CHECK(o.seen[0] == 0 && o.seen[1] == 100 && o.seen[2] == 150);
}

struct busy_team {
    struct exec *ex;
    struct exec_event done;
    uint64_t done_ns;
};

static void busy_slice(void *arg, uint32_t slice, uint32_t n)
{
    struct busy_team *b = arg;
    (void)slice;
    (void)n;
    exec_lane_busy(exec_lane_current(b->ex), 1000);
}

static void busy_done(void *arg)
{
    struct busy_team *b = arg;
    b->done_ns = exec_now_ns(b->ex);
    exec_event_set(&b->done);
}

/* 6 slices of 1000 ns on 3 members take 2000 ns, and `done` comes when that time is over. */
TEST(exec_sim_team_takes_its_time)
{
    struct busy_team b = { .ex = open_kind(EXEC_SIM, test_seed()) };
    struct exec_team *team = NULL;
    struct stk_error err = { 0 };
    struct exec_task done;
    exec_event_init(b.ex, &b.done);
    exec_task_init(&done, busy_done, &b);
    CHECK_OK(exec_team_open(b.ex, "t", 3, &team, &err), &err);
    struct exec_team_job job = {
        .fn = busy_slice, .arg = &b, .n_slices = 6, .done_lane = open_lane(b.ex, "e"), .done = &done
    };
    exec_team_run(team, &job);
    CHECK_OK(exec_event_wait(&b.done, UINT64_MAX, &err), &err);
    CHECK(b.done_ns == 2000);
    exec_team_close(team);
    exec_close(b.ex);
}

struct sharer {
    struct exec *ex;
    struct exec_lane *lane;
    struct exec_task begin, end;
    uint32_t *begun;
    struct exec_event *both;
    struct exec_event over;
    uint64_t end_ns;
};

static void sharer_end(void *arg)
{
    struct sharer *s = arg;
    s->end_ns = exec_now_ns(s->ex);
    exec_event_set(&s->over);
}

static void sharer_begin(void *arg)
{
    struct sharer *s = arg;
    exec_lane_busy_sharing(s->lane, 1000, &(struct exec_need){ .part[EXEC_SHARE_DRAM] = 1 });
    if (s->end.fn) exec_post(s->lane, &s->end);
    if (++*s->begun == 2) exec_event_set(s->both);
}

/* Two want all of one thing: half the speed each. If one's lane is closed, the other has all of it. */
TEST(exec_sim_sharing_and_a_lane_that_closes)
{
    for (int closes = 0; closes < 2; closes++) {
        struct sharer s[2] = { { 0 } };
        struct exec_event both;
        struct stk_error err = { 0 };
        struct exec *ex = NULL;
        uint32_t begun = 0;
        REQUIRE(exec_open_sim(test_seed(), &ex, &err) == STK_OK);
        exec_event_init(ex, &both);
        for (int k = 0; k < 2; k++) {
            s[k] = (struct sharer){ .ex = ex, .begun = &begun, .both = &both };
            REQUIRE(exec_lane_open(ex, k ? "stays" : "goes", &s[k].lane, &err) == STK_OK);
            exec_event_init(ex, &s[k].over);
            exec_task_init(&s[k].begin, sharer_begin, &s[k]);
            if (k) exec_task_init(&s[k].end, sharer_end, &s[k]);
            exec_post(s[k].lane, &s[k].begin);
        }
        CHECK_OK(exec_event_wait(&both, UINT64_MAX, &err), &err);
        if (closes) exec_lane_close(s[0].lane);
        CHECK_OK(exec_event_wait(&s[1].over, UINT64_MAX, &err), &err);
        CHECK(s[1].end_ns == (closes ? 1000 : 2000));
        exec_close(ex);
    }
}

TEST_MAIN()
