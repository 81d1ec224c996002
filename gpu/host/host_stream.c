/* gpu/host/host_stream.c - streams and marks of the host device.
 *
 * A stream is a lane and a ring of commands. One task of the lane runs one command, so that the
 * simulation can interleave streams after every command; the task queues itself again while
 * commands are left. Nothing blocks inside a lane: a stream whose next command waits for a mark
 * parks itself on the mark and is posted when the mark passes.
 *
 * INVARIANTS
 *  1. head counts commands queued (written by the producer only), tail commands finished (written
 * by the lane only).
 *  2. Whoever makes the next command runnable posts the task: enqueue, the task itself, a mark's
 * record.
 *  3. A stream is on at most one mark's list, and only while its next command is a MARK_WAIT for
 * that mark.
 *  4. A mark's record passes, and notifications fire, also after an error: nobody waits for ever.
 *
 * Must not know what operations compute. Producer: the application's thread or one lane; commands
 * run on the stream's lane. */
#include "gpu/host/host_impl.h"

#include "base/sys.h"
#include <stdio.h>
#include <string.h>

struct host_stream {
    struct dev_stream base;
    struct exec_lane *lane;
    struct exec_task task;
    struct dev_cmd *ring;
    uint32_t depth;
    _Atomic uint64_t head, tail;
    atomic_bool room_wanted; /* the producer waits in `room` */
    struct exec_event room;
    _Atomic uint64_t busy_ns;
    pthread_t application; /* who opened it: the thread that may wait */
    /* under the device's lock */
    struct dev_mark *parked_on;
    struct host_stream *next_parked;
};

static struct host_stream *stream_of(struct dev_stream *s) { return (struct host_stream *)s; }
static struct host_dev *stream_dev(struct host_stream *s) { return host_of(s->base.dev); }

/* --- marks: m->priv is the list of parked streams --------------------------------------------- */

stk_status host_mark_init(struct dev *d, struct dev_mark *m, struct stk_error *err)
{
    (void)d;
    (void)err;
    m->priv = NULL;
    return STK_OK;
}

void host_mark_free(struct dev_mark *m)
{
    struct host_dev *h = host_of(m->dev);
    pthread_mutex_lock(&h->lock);
    STK_ASSERT(!m->priv); /* a stream still waits for it */
    pthread_mutex_unlock(&h->lock);
}

/* Passes the record and posts whoever waited; the ones that wait for a later record park again. */
static void mark_pass(struct host_dev *h, const struct dev_cmd_mark *c)
{
    pthread_mutex_lock(&h->lock);
    if (c->value > c->mark->passed) c->mark->passed = c->value;
    struct host_stream *s = c->mark->priv;
    c->mark->priv = NULL;
    while (s) {
        struct host_stream *next = s->next_parked;
        s->parked_on = NULL;
        s->next_parked = NULL;
        exec_post(s->lane, &s->task);
        s = next;
    }
    pthread_mutex_unlock(&h->lock);
}

/* True: the record has passed. Otherwise the stream is parked. */
static bool mark_passed_or_park(struct host_stream *s, const struct dev_cmd_mark *c)
{
    struct host_dev *h = stream_dev(s);
    pthread_mutex_lock(&h->lock);
    bool passed = c->mark->passed >= c->value;
    if (!passed && !s->parked_on) {
        s->parked_on = c->mark;
        s->next_parked = c->mark->priv;
        c->mark->priv = s;
    }
    pthread_mutex_unlock(&h->lock);
    return passed;
}

static void mark_unpark(struct host_stream *s)
{
    struct host_dev *h = stream_dev(s);
    pthread_mutex_lock(&h->lock);
    if (s->parked_on) {
        struct host_stream *first = s->parked_on->priv;
        if (first == s) {
            s->parked_on->priv = s->next_parked;
        } else {
            while (first->next_parked != s) first = first->next_parked;
            first->next_parked = s->next_parked;
        }
        s->parked_on = NULL;
    }
    pthread_mutex_unlock(&h->lock);
}

/* --- running ---------------------------------------------------------------------------------- */

static void stream_work(struct host_stream *s, const struct dev_cmd *cmd)
{
    struct host_dev *h = stream_dev(s);
    if (atomic_load(&h->failed)) return;
    struct stk_error e = { 0 };
    uint64_t start_ns = exec_now_ns(h->base.ex);
    stk_status st = h->discrete ? dev_check_spans(h->arena, h->arena_bytes, cmd, &e) : STK_OK;
    if (st == STK_OK) st = host_run(h, cmd, &e);
    if (st != STK_OK) host_fail(h, &e);
    uint64_t ns = exec_now_ns(h->base.ex) - start_ns;
    if (h->base.caps.modelled_time) {
        ns = host_model_ns(h, cmd);
        struct exec_need need = host_model_need(h, cmd);
        if (need.part[EXEC_SHARE_LINK] > 0) exec_lane_busy_sharing(s->lane, ns, &need);
        else exec_lane_busy(s->lane, ns);
    }
    atomic_fetch_add(&s->busy_ns, ns);
}

/* False: it waits for a mark. */
static bool stream_step(struct host_stream *s, const struct dev_cmd *cmd)
{
    switch (cmd->kind) {
    case DEV_CMD_NOTIFY:
        if (cmd->u.notify.ev) exec_event_set(cmd->u.notify.ev);
        if (cmd->u.notify.task) exec_post(cmd->u.notify.lane, cmd->u.notify.task);
        return true;
    case DEV_CMD_MARK_RECORD: mark_pass(stream_dev(s), &cmd->u.mark); return true;
    case DEV_CMD_MARK_WAIT: return mark_passed_or_park(s, &cmd->u.mark);
    default: stream_work(s, cmd); return true;
    }
}

/* The producer is woken when half of the ring is free, not for each command. Stores and loads are
 * sequentially consistent: either the producer sees the new tail, or we see that it wants room. */
static void stream_tell_room(struct host_stream *s, uint64_t tail)
{
    if (atomic_load(&s->room_wanted) && atomic_load(&s->head) - tail <= s->depth / 2 &&
        atomic_exchange(&s->room_wanted, false))
        exec_event_set(&s->room);
}

static void stream_run(void *arg)
{
    struct host_stream *s = arg;
    uint64_t tail = atomic_load(&s->tail);
    if (tail == atomic_load(&s->head)) return;
    if (!stream_step(s, &s->ring[tail % s->depth])) return;
    atomic_store(&s->tail, ++tail);
    stream_tell_room(s, tail);
    if (tail != atomic_load(&s->head)) exec_post(s->lane, &s->task);
}

/* --- queueing --------------------------------------------------------------------------------- */

static bool stream_full(struct host_stream *s)
{
    return atomic_load(&s->head) - atomic_load(&s->tail) >= s->depth;
}

static bool stream_may_wait(const struct host_stream *s)
{
    return !exec_lane_current(s->base.dev->ex) && pthread_equal(pthread_self(), s->application);
}

static stk_status stream_wait_room(struct host_stream *s, struct stk_error *err)
{
    while (stream_full(s)) {
        if (!stream_may_wait(s)) return STK_BUSY;
        exec_event_reset(&s->room);
        atomic_store(&s->room_wanted, true);
        if (!stream_full(s) && atomic_exchange(&s->room_wanted, false)) break;
        STK_TRY(exec_event_wait(&s->room, UINT64_MAX, err));
    }
    return STK_OK;
}

stk_status host_stream_enqueue(struct dev_stream *base, const struct dev_cmd *cmd,
                               struct stk_error *err)
{
    struct host_stream *s = stream_of(base);
    STK_TRY(stream_wait_room(s, err));
    uint64_t head = atomic_load(&s->head);
    struct dev_cmd *slot = &s->ring[head % s->depth];
    *slot = *cmd;
    if (cmd->kind == DEV_CMD_MARK_RECORD || cmd->kind == DEV_CMD_MARK_WAIT) {
        struct host_dev *h = stream_dev(s);
        pthread_mutex_lock(&h->lock);
        struct dev_mark *m = cmd->u.mark.mark;
        slot->u.mark.value = cmd->kind == DEV_CMD_MARK_RECORD ? ++m->recorded : m->recorded;
        pthread_mutex_unlock(&h->lock);
    }
    atomic_store(&s->head, head + 1);
    exec_post(s->lane, &s->task);
    return STK_OK;
}

/* --- opening ---------------------------------------------------------------------------------- */

stk_status host_stream_open(struct dev *d, const char *name, uint32_t depth,
                            struct dev_stream **out, struct stk_error *err)
{
    struct host_stream *s = sys_calloc(1, sizeof *s);
    struct dev_cmd *ring = sys_calloc(depth, sizeof *ring);
    if (!s || !ring) {
        sys_free(s);
        sys_free(ring);
        return stk_error_set(err, STK_ERR_NOMEM, 0,
                             "stream %s: no memory for a queue of %u commands", name, depth);
    }
    s->base.dev = d;
    snprintf(s->base.name, sizeof s->base.name, "%s", name);
    s->ring = ring;
    s->depth = depth;
    s->application = pthread_self();
    exec_task_init(&s->task, stream_run, s);
    exec_event_init(d->ex, &s->room);
    stk_status st = exec_lane_open(d->ex, name, &s->lane, err);
    if (st != STK_OK) {
        sys_free(ring);
        sys_free(s);
        return st;
    }
    host_of(d)->streams_open++;
    *out = &s->base;
    return STK_OK;
}

/* The wait can only fail in the simulation, when the stream waits for a mark that nobody records
 * any more: it is then closed as it is. */
void host_stream_close(struct dev_stream *base)
{
    struct host_stream *s = stream_of(base);
    struct exec_event empty;
    exec_event_init(base->dev->ex, &empty);
    if (dev_notify(base, NULL, NULL, &empty, NULL) == STK_OK)
        (void)exec_event_wait(&empty, UINT64_MAX, NULL);
    mark_unpark(s);
    exec_lane_close(s->lane);
    host_of(base->dev)->streams_open--;
    sys_free(s->ring);
    sys_free(s);
}

uint64_t host_stream_busy_ns(const struct dev_stream *s)
{
    return atomic_load(&((struct host_stream *)(uintptr_t)s)->busy_ns);
}
