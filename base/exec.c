/* base/exec.c - the part of execution that both backends share: tasks, queues, lanes' list, events.
 *
 * Owns: the rule that a queued task is not queued twice. Must not know: threads, the virtual clock
 * (exec_threads.c, exec_sim.c), teams (exec_team.c).
 * Thread: exec_post, exec_event_set and exec_now_ns from any; the rest from the application's
 * thread. */
#include "base/exec_priv.h"

#include <stdio.h>
#include <string.h>

/* --- queues ----------------------------------------------------------------------------------- */

void exec_queue_push(struct exec_queue *q, struct exec_task *task)
{
    task->next = NULL;
    if (q->last) q->last->next = task;
    else q->first = task;
    q->last = task;
    /* a stall report reads it without the lock */
    __atomic_store_n(&q->pushed, q->pushed + 1, __ATOMIC_RELAXED);
}

void exec_queue_push_due(struct exec_queue *q, struct exec_task *task)
{
    struct exec_task **at = &q->due;
    while (*at && (*at)->due_ns <= task->due_ns) at = &(*at)->next;
    task->next = *at;
    *at = task;
}

void exec_queue_promote(struct exec_queue *q, uint64_t now_ns)
{
    while (q->due && q->due->due_ns <= now_ns) {
        struct exec_task *task = q->due;
        q->due = task->next;
        exec_queue_push(q, task);
    }
}

struct exec_task *exec_queue_pop(struct exec_queue *q)
{
    struct exec_task *task = q->first;
    if (!task) return NULL;
    q->first = task->next;
    if (!q->first) q->last = NULL;
    return task;
}

bool exec_queue_remove(struct exec_queue *q, struct exec_task *task)
{
    struct exec_task *before = NULL;
    for (struct exec_task *t = q->first; t; before = t, t = t->next) {
        if (t != task) continue;
        if (before) before->next = t->next;
        else q->first = t->next;
        if (q->last == t) q->last = before;
        return true;
    }
    for (struct exec_task **at = &q->due; *at; at = &(*at)->next) {
        if (*at != task) continue;
        *at = task->next;
        return true;
    }
    return false;
}

void exec_queue_drop_due(struct exec_queue *q)
{
    while (q->due) {
        struct exec_task *task = q->due;
        q->due = task->next;
        __atomic_store_n(&task->state, EXEC_TASK_IDLE, __ATOMIC_RELEASE);
    }
}

/* --- tasks ------------------------------------------------------------------------------------ */

/* Posting and beginning both exchange the state. So the two are ordered even when the post finds
 * the task queued: what its caller wrote before is visible to the run that is still to come. A
 * load would not give that. */
static bool claim(struct exec_lane *lane, struct exec_task *task)
{
    if (__atomic_exchange_n(&task->state, EXEC_TASK_QUEUED, __ATOMIC_ACQ_REL) != EXEC_TASK_IDLE)
        return false;
    __atomic_store_n(&task->lane, lane, __ATOMIC_RELAXED);
    return true;
}

void exec_task_run(struct exec_task *task)
{
    void (*fn)(void *) = task->fn;
    void *arg = task->arg;
    __atomic_exchange_n(&task->state, EXEC_TASK_IDLE, __ATOMIC_ACQ_REL);
    fn(arg);
}

bool exec_post(struct exec_lane *lane, struct exec_task *task)
{
    STK_ASSERT(task->fn);
    if (!claim(lane, task)) return false;
    lane->ex->ops->push(lane, task, false);
    return true;
}

bool exec_post_at(struct exec_lane *lane, struct exec_task *task, uint64_t due_ns)
{
    STK_ASSERT(task->fn);
    if (!claim(lane, task)) return false;
    task->due_ns = due_ns;
    lane->ex->ops->push(lane, task, true);
    return true;
}

bool exec_cancel(struct exec_task *task)
{
    if (__atomic_load_n(&task->state, __ATOMIC_ACQUIRE) != EXEC_TASK_QUEUED) return false;
    struct exec_lane *lane = __atomic_load_n(&task->lane, __ATOMIC_RELAXED);
    if (!lane || !lane->ex->ops->remove(lane, task)) return false;
    __atomic_store_n(&task->state, EXEC_TASK_IDLE, __ATOMIC_RELEASE);
    return true;
}

/* --- lanes ------------------------------------------------------------------------------------ */

stk_status exec_lane_open(struct exec *ex, const char *name, struct exec_lane **out,
                          struct stk_error *err)
{
    struct exec_lane *lane;
    *out = NULL;
    STK_TRY(ex->ops->lane_open(ex, &lane, err));
    lane->ex = ex;
    lane->index = ex->n_opened++;
    snprintf(lane->name, sizeof lane->name, "%s", name);
    STK_TRY(ex->ops->lane_start(lane, err)); /* frees the lane when it fails */
    struct exec_lane **at = &ex->lanes;
    while (*at) at = &(*at)->next;
    *at = lane;
    *out = lane;
    return STK_OK;
}

void exec_lane_close(struct exec_lane *lane)
{
    if (!lane) return;
    struct exec *ex = lane->ex;
    ex->ops->lane_close(lane);
}

struct exec *exec_of(const struct exec_lane *lane) { return lane->ex; }
bool exec_on_lane(const struct exec_lane *lane) { return lane->ex->ops->on_lane(lane); }

void exec_describe_lanes(const struct exec *ex, char *buf, size_t size_bytes)
{
    size_t at = 0;
    buf[0] = '\0';
    if (!ex->lanes) snprintf(buf, size_bytes, "none");
    for (const struct exec_lane *l = ex->lanes; l && at < size_bytes; l = l->next) {
        /* read without the lanes' locks: numbers for a person, each one word */
        uint64_t ran = __atomic_load_n(&l->ran, __ATOMIC_RELAXED);
        uint64_t pushed = __atomic_load_n(&l->queue.pushed, __ATOMIC_RELAXED);
        int n = snprintf(buf + at, size_bytes - at, "%s%s (ran %llu", at ? ", " : "", l->name,
                         (unsigned long long)ran);
        if (n < 0) return;
        at += (size_t)n;
        if (at < size_bytes && pushed > ran) {
            n = snprintf(buf + at, size_bytes - at, ", %llu queued",
                         (unsigned long long)(pushed - ran));
            if (n < 0) return;
            at += (size_t)n;
        }
        if (at < size_bytes) at += (size_t)snprintf(buf + at, size_bytes - at, ")");
    }
}

/* --- the world, events, sources --------------------------------------------------------------- */

void exec_close(struct exec *ex)
{
    if (ex) ex->ops->close(ex);
}

enum exec_kind exec_kind_of(const struct exec *ex) { return ex->ops->kind; }
uint64_t exec_now_ns(const struct exec *ex) { return ex->ops->now_ns(ex); }

void exec_event_init(struct exec *ex, struct exec_event *ev)
{
    *ev = (struct exec_event){ .ex = ex };
}

void exec_event_set(struct exec_event *ev) { ev->ex->ops->event_set(ev); }

void exec_event_reset(struct exec_event *ev) { __atomic_store_n(&ev->set, 0, __ATOMIC_RELAXED); }

bool exec_event_is_set(const struct exec_event *ev)
{
    return __atomic_load_n(&ev->set, __ATOMIC_ACQUIRE) != 0;
}

stk_status exec_event_wait(struct exec_event *ev, uint64_t deadline_ns, struct stk_error *err)
{
    return ev->ex->ops->event_wait(ev, deadline_ns, err);
}

stk_status exec_event_wait_running(struct exec_event *ev, uint64_t limit_ns, struct stk_error *err)
{
    const uint64_t whole_ns = limit_ns / 64 + 1; /* at most so much of a stop is counted */
    stk_status status = STK_OK;
    for (uint64_t left_ns = limit_ns;;) {
        uint64_t part_ns = left_ns < whole_ns ? left_ns : whole_ns;
        uint64_t deadline_ns = exec_now_ns(ev->ex) + part_ns;
        struct stk_error why = { 0 };
        status = exec_event_wait(ev, deadline_ns, &why);
        left_ns -= part_ns;
        /* before its time: nothing can happen any more */
        if (status != STK_OK && left_ns > 0 && exec_now_ns(ev->ex) >= deadline_ns) continue;
        return status == STK_OK ? status : stk_error_forward(err, &why);
    }
}

stk_status exec_source_add(struct exec *ex, const char *name, struct exec_source *src,
                           struct stk_error *err)
{
    STK_ASSERT(src->poll && src->wake && src->idle && !src->priv);
    return ex->ops->source_add(ex, name, src, err);
}

void exec_source_remove(struct exec *ex, struct exec_source *src)
{
    STK_ASSERT(src->priv);
    ex->ops->source_remove(ex, src);
}
