/* base/exec_threads.c - execution by OS threads: a lane is a thread, time is CLOCK_MONOTONIC.
 *
 * Owns: the threads, each lane's mutex and the one mutex and condition of all events.
 * Must not know: what tasks do. A lane's queue is touched under its mutex only; no code here takes
 * two mutexes, and none is called back under one (a team's mutex is taken before a lane's or the
 * events', never after).
 * Thread: posts and event sets from any; lanes are opened and closed, sources added and removed
 * by the application's. */
#include "base/exec_priv.h"
#include "base/sys.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

struct thread_world {
    struct exec base;
    pthread_mutex_t mutex; /* every event's `set` becomes 1 under it */
    pthread_cond_t set;
};

struct thread_lane {
    struct exec_lane base;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t wake; /* the lane's thread waits: work, an earlier timer, the end */
    pthread_cond_t idle; /* who closes waits: nothing runnable, nothing running */
    bool sleeping, running, ending;
    uint32_t idle_waiters;
};

struct thread_source {
    struct exec_source *src;
    char name[EXEC_NAME_MAX];
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t left;
    bool stop, ended;
};

static uint64_t clock_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

static void cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t when_ns)
{
    struct timespec ts = { (time_t)(when_ns / 1000000000u), (long)(when_ns % 1000000000u) };
    if (when_ns == UINT64_MAX) pthread_cond_wait(cond, mutex);
    else pthread_cond_timedwait(cond, mutex, &ts);
}

static uint64_t threads_now_ns(const struct exec *ex)
{
    (void)ex;
    return clock_ns();
}

/* --- lanes ------------------------------------------------------------------------------------ */

static void *lane_main(void *arg)
{
    struct thread_lane *lane = arg;
    struct exec_queue *q = &lane->base.queue;
    pthread_setname_np(pthread_self(), lane->base.name);
    pthread_mutex_lock(&lane->mutex);
    for (;;) {
        if (q->due) exec_queue_promote(q, clock_ns());
        struct exec_task *task = exec_queue_pop(q);
        if (task) {
            __atomic_store_n(&lane->base.ran, lane->base.ran + 1, __ATOMIC_RELAXED);
            lane->running = true;
            pthread_mutex_unlock(&lane->mutex);
            exec_task_run(task);
            pthread_mutex_lock(&lane->mutex);
            lane->running = false;
            continue;
        }
        if (lane->idle_waiters) pthread_cond_broadcast(&lane->idle);
        if (lane->ending) break;
        lane->sleeping = true;
        cond_wait_until(&lane->wake, &lane->mutex, q->due ? q->due->due_ns : UINT64_MAX);
        lane->sleeping = false;
    }
    pthread_mutex_unlock(&lane->mutex);
    return NULL;
}

static void lane_free(struct thread_lane *lane)
{
    pthread_cond_destroy(&lane->idle);
    pthread_cond_destroy(&lane->wake);
    pthread_mutex_destroy(&lane->mutex);
    sys_free(lane);
}

static stk_status threads_lane_open(struct exec *ex, struct exec_lane **out, struct stk_error *err)
{
    struct thread_lane *lane = sys_calloc(1, sizeof *lane);
    if (!lane)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "a lane: no memory for %zu bytes",
                             sizeof *lane);
    pthread_mutex_init(&lane->mutex, NULL);
    cond_init(&lane->wake);
    cond_init(&lane->idle);
    *out = &lane->base;
    return STK_OK;
}

static stk_status threads_lane_start(struct exec_lane *base, struct stk_error *err)
{
    struct thread_lane *lane = (struct thread_lane *)base;
    int rc = sys_thread_start(&lane->thread, lane_main, lane);
    if (rc == 0) return STK_OK;
    stk_error_set(err, STK_ERR_NOMEM, rc,
                  "lane %s: the system starts no more threads: %s; see `ulimit -u` and the "
                  "cgroup's pids.max",
                  base->name, strerror(rc));
    lane_free(lane);
    return STK_ERR_NOMEM;
}

static void threads_push(struct exec_lane *base, struct exec_task *task, bool timed)
{
    struct thread_lane *lane = (struct thread_lane *)base;
    struct exec_queue *q = &base->queue;
    pthread_mutex_lock(&lane->mutex);
    bool wake;
    if (timed) {
        exec_queue_push_due(q, task);
        exec_queue_promote(q, clock_ns());
        wake = q->first || q->due == task;
        if (base->no_timers) exec_queue_drop_due(q);
    } else {
        exec_queue_push(q, task);
        wake = true;
    }
    if (wake && lane->sleeping) pthread_cond_signal(&lane->wake);
    pthread_mutex_unlock(&lane->mutex);
}

static bool threads_remove(struct exec_lane *base, struct exec_task *task)
{
    struct thread_lane *lane = (struct thread_lane *)base;
    pthread_mutex_lock(&lane->mutex);
    bool found = exec_queue_remove(&base->queue, task);
    pthread_mutex_unlock(&lane->mutex);
    return found;
}

static bool threads_on_lane(const struct exec_lane *base)
{
    return pthread_equal(pthread_self(), ((const struct thread_lane *)base)->thread) != 0;
}

static void lane_drop_timers(struct thread_lane *lane)
{
    pthread_mutex_lock(&lane->mutex);
    lane->base.no_timers = true;
    exec_queue_drop_due(&lane->base.queue);
    pthread_mutex_unlock(&lane->mutex);
}

/* Waits until the lane has nothing to run; returns how many tasks it was ever given. */
static uint64_t lane_wait_idle(struct thread_lane *lane)
{
    pthread_mutex_lock(&lane->mutex);
    lane->idle_waiters++;
    while (lane->base.queue.first || lane->running) pthread_cond_wait(&lane->idle, &lane->mutex);
    lane->idle_waiters--;
    uint64_t pushed = lane->base.queue.pushed;
    pthread_mutex_unlock(&lane->mutex);
    return pushed;
}

static void threads_lane_close(struct exec_lane *base)
{
    struct thread_lane *lane = (struct thread_lane *)base;
    lane_drop_timers(lane);
    lane_wait_idle(lane);
    pthread_mutex_lock(&lane->mutex);
    lane->ending = true;
    pthread_cond_signal(&lane->wake);
    pthread_mutex_unlock(&lane->mutex);
    pthread_join(lane->thread, NULL);
    struct exec_lane **at = &base->ex->lanes;
    while (*at != base) at = &(*at)->next;
    *at = base->next;
    lane_free(lane);
}

/* --- events ----------------------------------------------------------------------------------- */

static void threads_event_set(struct exec_event *ev)
{
    /* the event may be gone as soon as its waiter sees it set: afterwards only the world is
     * touched */
    struct thread_world *world = (struct thread_world *)ev->ex;
    pthread_mutex_lock(&world->mutex);
    __atomic_store_n(&ev->set, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&world->set);
    pthread_mutex_unlock(&world->mutex);
}

static stk_status threads_event_wait(struct exec_event *ev, uint64_t deadline_ns,
                                     struct stk_error *err)
{
    struct thread_world *world = (struct thread_world *)ev->ex;
    pthread_mutex_lock(&world->mutex);
    bool late = false;
    while (!exec_event_is_set(ev) && !late) {
        cond_wait_until(&world->set, &world->mutex, deadline_ns);
        late = clock_ns() >= deadline_ns;
    }
    bool set = exec_event_is_set(ev);
    pthread_mutex_unlock(&world->mutex);
    if (set) return STK_OK;
    char lanes[512];
    exec_describe_lanes(&world->base, lanes, sizeof lanes);
    return stk_error_set(err, STK_ERR_STALLED, 0,
                         "what is waited for did not happen before the deadline; lanes: %s", lanes);
}

/* --- sources ---------------------------------------------------------------------------------- */

static bool source_stopping(struct thread_source *s)
{
    pthread_mutex_lock(&s->mutex);
    bool stop = s->stop;
    pthread_mutex_unlock(&s->mutex);
    return stop;
}

static void *source_main(void *arg)
{
    struct thread_source *s = arg;
    pthread_setname_np(pthread_self(), s->name);
    while (!source_stopping(s)) s->src->poll(s->src->arg, true);
    pthread_mutex_lock(&s->mutex);
    s->ended = true;
    pthread_cond_signal(&s->left);
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

static void source_free(struct thread_source *s)
{
    pthread_cond_destroy(&s->left);
    pthread_mutex_destroy(&s->mutex);
    sys_free(s);
}

static stk_status threads_source_add(struct exec *ex, const char *name, struct exec_source *src,
                                     struct stk_error *err)
{
    (void)ex;
    struct thread_source *s = sys_calloc(1, sizeof *s);
    if (!s)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "source %s: no memory for %zu bytes", name,
                             sizeof *s);
    s->src = src;
    strncpy(s->name, name, sizeof s->name - 1);
    pthread_mutex_init(&s->mutex, NULL);
    cond_init(&s->left);
    src->priv = s;
    int rc = sys_thread_start(&s->thread, source_main, s);
    if (rc == 0) return STK_OK;
    src->priv = NULL;
    source_free(s);
    return stk_error_set(err, STK_ERR_NOMEM, rc, "source %s: the system starts no more threads: %s",
                         name, strerror(rc));
}

static void threads_source_remove(struct exec *ex, struct exec_source *src)
{
    (void)ex;
    struct thread_source *s = src->priv;
    pthread_mutex_lock(&s->mutex);
    s->stop = true;
    while (!s->ended) {
        pthread_mutex_unlock(&s->mutex);
        src->wake(src->arg);
        pthread_mutex_lock(&s->mutex);
        /* a wake that came just before poll began to wait may be lost: it is repeated until the
         * thread has left */
        if (!s->ended) cond_wait_until(&s->left, &s->mutex, clock_ns() + 10000000u);
    }
    pthread_mutex_unlock(&s->mutex);
    pthread_join(s->thread, NULL);
    src->priv = NULL;
    source_free(s);
}

/* --- the world -------------------------------------------------------------------------------- */

/* Lanes post to each other, so none may end before all are idle at one instant: that is so when
 * a whole round finds each idle and none was given a task since the round before. */
static void threads_close(struct exec *ex)
{
    struct thread_world *world = (struct thread_world *)ex;
    for (struct exec_lane *l = ex->lanes; l; l = l->next) lane_drop_timers((struct thread_lane *)l);
    uint64_t before, sum = 0;
    do {
        before = sum;
        sum = 0;
        for (struct exec_lane *l = ex->lanes; l; l = l->next)
            sum += lane_wait_idle((struct thread_lane *)l);
    } while (sum != before);
    while (ex->lanes) threads_lane_close(ex->lanes);
    pthread_cond_destroy(&world->set);
    pthread_mutex_destroy(&world->mutex);
    sys_free(world);
}

static const struct exec_ops threads_ops = {
    .kind = EXEC_THREADS,
    .close = threads_close,
    .now_ns = threads_now_ns,
    .lane_open = threads_lane_open,
    .lane_start = threads_lane_start,
    .lane_close = threads_lane_close,
    .push = threads_push,
    .remove = threads_remove,
    .on_lane = threads_on_lane,
    .event_set = threads_event_set,
    .event_wait = threads_event_wait,
    .source_add = threads_source_add,
    .source_remove = threads_source_remove,
};

stk_status exec_open_threads(struct exec **out, struct stk_error *err)
{
    struct thread_world *world = sys_calloc(1, sizeof *world);
    *out = NULL;
    if (!world)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "execution: no memory for %zu bytes",
                             sizeof *world);
    world->base.ops = &threads_ops;
    pthread_mutex_init(&world->mutex, NULL);
    cond_init(&world->set);
    *out = &world->base;
    return STK_OK;
}
