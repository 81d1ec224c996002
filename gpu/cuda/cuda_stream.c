/* gpu/cuda/cuda_stream.c - streams, notifications and marks of a card.
 *
 * A stream is one of CUDA's and a ring with a slot for each command that is queued and not yet told
 * to be done. A command is launched by the call that queues it. What is to be told (a notification,
 * a sum that lies in pinned memory) waits in its slot until a callback of CUDA's says that all
 * before it is done; the callback does the telling, in order. A callback holds up its stream for
 * some microseconds, so only notifications have one, and every `every` commands one without a
 * message, which gives the slots back.
 *
 * INVARIANTS
 *  1. head counts commands queued (written by the producer only), tail commands told to be done.
 *  2. Slots from tail to head are not written by the producer. A callback for commands before
 *     `upto` tells of tail..upto in order, under the lock, and then tail = upto.
 *  3. A full ring has a callback under way, since `every` is at most a quarter of its depth: who
 *     waits for room is woken.
 *  4. Notifications fire whatever happened. CUDA runs callbacks after an error too, with its code
 *     (cudaStreamAddCallback, other than cudaLaunchHostFunc); when it takes no more of them, the
 *     stream is dead, and the producer tells of all that is queued, at once.
 *  5. A callback calls nothing of CUDA's.
 *
 * Must not know what operations launch. Producer: the application's thread or one lane. */
#include "gpu/cuda/cuda_impl.h"

#include "base/sys.h"
#include <stdio.h>
#include <string.h>

/* --- telling ---------------------------------------------------------------------------------- */

static void slot_tell(const struct cuda_slot *slot, const union cuda_result *result, bool good)
{
    switch (slot->kind) {
    case CUDA_SLOT_PLAIN: break;
    case CUDA_SLOT_NOTIFY:
        if (slot->u.notify.ev) exec_event_set(slot->u.notify.ev);
        if (slot->u.notify.task) exec_post(slot->u.notify.lane, slot->u.notify.task);
        break;
    case CUDA_SLOT_LOSS:
        if (good) *slot->u.loss_sum += result->loss;
        break;
    case CUDA_SLOT_SUM:
        if (good) *slot->u.sum = result->sum;
        break;
    }
}

/* The producer is woken when half of the ring is free, as on the host (gpu/host/host_stream.c). */
static void stream_tell_room(struct cuda_stream *s, uint64_t tail)
{
    if (atomic_load(&s->room_wanted) && atomic_load(&s->head) - tail <= s->depth / 2 &&
        atomic_exchange(&s->room_wanted, false))
        exec_event_set(&s->room);
}

/* Under the lock. A slot is free before its message goes out: who gets it may queue at once. */
static void stream_tell(struct cuda_stream *s, uint64_t upto, bool good)
{
    uint64_t tail = atomic_load(&s->tail);
    while (tail < upto) {
        const struct cuda_slot slot = s->ring[tail % s->depth];
        const union cuda_result result = s->result[tail % s->depth];
        atomic_store(&s->tail, ++tail);
        slot_tell(&slot, &result, good);
    }
    stream_tell_room(s, tail);
}

/* On a thread of CUDA's. */
static void CUDART_CB stream_called(cudaStream_t queue, cudaError_t status, void *arg)
{
    const struct cuda_slot *slot = arg;
    struct cuda_stream *s = slot->stream;
    (void)queue;
    if (status != cudaSuccess) {
        struct stk_error e = { 0 };
        char where[CUDA_WHERE_BYTES];
        snprintf(where, sizeof where, "stream %s: work queued before a notification", s->base.name);
        (void)cuda_check(status, "a kernel or copy", where, &e);
        cuda_fail(cuda_stream_dev(s), &e);
    }
    pthread_mutex_lock(&s->lock);
    stream_tell(s, slot->upto, status == cudaSuccess);
    pthread_mutex_unlock(&s->lock);
}

/* Everything that is queued is told to be done: the card does nothing any more. Callbacks that come
 * after all find nothing to tell. */
static void stream_die(struct cuda_stream *s)
{
    pthread_mutex_lock(&s->lock);
    s->dead = true;
    stream_tell(s, atomic_load(&s->head), false);
    pthread_mutex_unlock(&s->lock);
}

/* A callback behind the command of `slot`, the last one queued. */
static void stream_call(struct cuda_stream *s, struct cuda_slot *slot)
{
    struct stk_error e = { 0 };
    char where[CUDA_WHERE_BYTES];
    s->since = 0;
    if (!s->dead) {
        cudaError_t r = cudaStreamAddCallback(s->queue, stream_called, slot, 0);
        if (r == cudaSuccess) return;
        snprintf(where, sizeof where, "stream %s: notify", s->base.name);
        (void)cuda_check(r, "cudaStreamAddCallback", where, &e);
        cuda_fail(cuda_stream_dev(s), &e);
    }
    stream_die(s);
}

/* --- queueing --------------------------------------------------------------------------------- */

static bool stream_full(struct cuda_stream *s)
{
    return atomic_load(&s->head) - atomic_load(&s->tail) >= s->depth;
}

static bool stream_may_wait(const struct cuda_stream *s)
{
    return !exec_lane_current(s->base.dev->ex) && pthread_equal(pthread_self(), s->application);
}

static stk_status stream_wait_room(struct cuda_stream *s, struct stk_error *err)
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

static void stream_failed(struct cuda_stream *s, const struct stk_error *e)
{
    cuda_fail(cuda_stream_dev(s), e);
}

/* Marks work on after an error, as long as CUDA takes them: later streams still come after earlier
 * ones. */
static void stream_mark(struct cuda_stream *s, const struct dev_cmd *cmd)
{
    struct cuda_dev *h = cuda_stream_dev(s);
    struct dev_mark *m = cmd->u.mark.mark;
    const bool record = cmd->kind == DEV_CMD_MARK_RECORD;
    struct stk_error e = { 0 };
    char where[CUDA_WHERE_BYTES];
    cuda_clock_end(s);
    if (s->dead) return;
    if (record) {
        pthread_mutex_lock(&h->lock);
        m->recorded++;
        pthread_mutex_unlock(&h->lock);
    }
    cudaError_t r = record ? cudaEventRecord(m->priv, s->queue)
                           : cudaStreamWaitEvent(s->queue, m->priv, cudaEventWaitDefault);
    if (r == cudaSuccess) return;
    snprintf(where, sizeof where, "stream %s: %s", s->base.name, dev_cmd_name(cmd->kind));
    (void)cuda_check(r, record ? "cudaEventRecord" : "cudaStreamWaitEvent", where, &e);
    stream_failed(s, &e);
}

static void stream_work(struct cuda_stream *s, const struct dev_cmd *cmd, struct cuda_slot *slot)
{
    struct cuda_dev *h = cuda_stream_dev(s);
    if (atomic_load(&h->failed)) return;
    struct stk_error e = { 0 };
    stk_status st = dev_check_spans(h->arena, h->arena_bytes, cmd, &e);
    if (st == STK_OK) {
        cuda_clock_begin(s, h->measure ? (uint32_t)cmd->kind : CUDA_WORK_N);
        st = cuda_run(s, cmd, slot, &s->result_dev[slot - s->ring], &e);
        if (h->measure) cuda_clock_end(s);
    }
    if (st == STK_OK) return;
    slot->kind = CUDA_SLOT_PLAIN;
    stream_failed(s, &e);
}

stk_status cuda_stream_enqueue(struct dev_stream *base, const struct dev_cmd *cmd,
                               struct stk_error *err)
{
    struct cuda_stream *s = cuda_stream_of(base);
    STK_TRY(stream_wait_room(s, err));
    const uint64_t head = atomic_load(&s->head);
    struct cuda_slot *slot = &s->ring[head % s->depth];
    *slot = (struct cuda_slot){ .kind = CUDA_SLOT_PLAIN, .upto = head + 1, .stream = s };
    switch (cmd->kind) {
    case DEV_CMD_NOTIFY:
        slot->kind = CUDA_SLOT_NOTIFY;
        slot->u.notify = cmd->u.notify;
        cuda_clock_end(s);
        break;
    case DEV_CMD_MARK_RECORD:
    case DEV_CMD_MARK_WAIT: stream_mark(s, cmd); break;
    default: stream_work(s, cmd, slot);
    }
    atomic_store(&s->head, head + 1);
    if (cmd->kind == DEV_CMD_NOTIFY || ++s->since >= s->every || s->dead) stream_call(s, slot);
    return STK_OK;
}

/* --- marks: m->priv is an event of CUDA's ------------------------------------------------------
 */

stk_status cuda_mark_init(struct dev *d, struct dev_mark *m, struct stk_error *err)
{
    cudaEvent_t e = NULL;
    (void)d;
    STK_TRY(cuda_check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming),
                       "cudaEventCreateWithFlags", "a mark", err));
    m->priv = e;
    return STK_OK;
}

void cuda_mark_free(struct dev_mark *m)
{
    if (m->priv) (void)cudaEventDestroy(m->priv);
    m->priv = NULL;
}

/* --- opening ---------------------------------------------------------------------------------- */

static stk_status own_take(struct cuda_stream *s, struct stk_error *err)
{
    struct cuda_dev *h = cuda_stream_dev(s);
    uint32_t i = 0;
    pthread_mutex_lock(&h->lock);
    while (i < CUDA_STREAMS_MAX && (h->streams_used >> i & 1u)) i++;
    if (i < CUDA_STREAMS_MAX) h->streams_used |= 1u << i;
    pthread_mutex_unlock(&h->lock);
    s->own_index = i;
    return i < CUDA_STREAMS_MAX ? STK_OK
                                : stk_error_set(err, STK_ERR_CONFIG, 0,
                                                "stream %s: %d streams are open, which is all that "
                                                "device cuda has",
                                                s->base.name, CUDA_STREAMS_MAX);
}

/* A call of closing that fails, which has nobody to return it to, is the device's error. */
static void stream_closing(struct cuda_stream *s, cudaError_t r, const char *call)
{
    struct stk_error e = { 0 };
    char where[CUDA_WHERE_BYTES];
    if (r == cudaSuccess) return;
    snprintf(where, sizeof where, "stream %s: closing", s->base.name);
    (void)cuda_check(r, call, where, &e);
    cuda_fail(cuda_stream_dev(s), &e);
}

static void stream_free(struct cuda_stream *s)
{
    struct cuda_dev *h = cuda_stream_dev(s);
    cuda_clock_close(s);
    if (s->queue) stream_closing(s, cudaStreamDestroy(s->queue), "cudaStreamDestroy");
    if (s->result) stream_closing(s, cudaFreeHost(s->result), "cudaFreeHost");
    pthread_mutex_lock(&h->lock);
    if (s->own_index < CUDA_STREAMS_MAX) h->streams_used &= ~(1u << s->own_index);
    pthread_mutex_unlock(&h->lock);
    pthread_mutex_destroy(&s->lock);
    sys_free(s->ring);
    sys_free(s);
}

static stk_status stream_make(struct cuda_stream *s, struct stk_error *err)
{
    const char *name = s->base.name;
    const uint64_t size_bytes = s->depth * sizeof *s->result;
    void *p = NULL;
    STK_TRY(own_take(s, err));
    s->ring = sys_calloc(s->depth, sizeof *s->ring);
    if (!s->ring)
        return stk_error_set(err, STK_ERR_NOMEM, 0,
                             "stream %s: no memory for a queue of %u commands", name, s->depth);
    STK_TRY(cuda_check(cudaHostAlloc(&p, size_bytes, cudaHostAllocMapped | cudaHostAllocPortable),
                       "cudaHostAlloc", name, err));
    s->result = p;
    memset(s->result, 0, size_bytes);
    STK_TRY(cuda_check(cudaHostGetDevicePointer(&p, s->result, 0), "cudaHostGetDevicePointer", name,
                       err));
    s->result_dev = p;
    STK_TRY(cuda_check(cudaStreamCreateWithFlags(&s->queue, cudaStreamNonBlocking),
                       "cudaStreamCreateWithFlags", name, err));
    return cuda_clock_open(s, err);
}

stk_status cuda_stream_open(struct dev *d, const char *name, uint32_t depth,
                            struct dev_stream **out, struct stk_error *err)
{
    struct cuda_stream *s = sys_calloc(1, sizeof *s);
    if (!s) return stk_error_set(err, STK_ERR_NOMEM, 0, "stream %s: no memory", name);
    s->base.dev = d;
    snprintf(s->base.name, sizeof s->base.name, "%s", name);
    s->depth = depth;
    s->every = depth / 4 ? depth / 4 : 1;
    s->own_index = CUDA_STREAMS_MAX;
    s->application = pthread_self();
    pthread_mutex_init(&s->lock, NULL);
    exec_event_init(d->ex, &s->room);
    stk_status st = stream_make(s, err);
    if (st != STK_OK) {
        stream_free(s);
        return st;
    }
    *out = &s->base;
    return STK_OK;
}

/* Behind the notification a callback may still be on its way out of the slot: the stream is waited
 * for, too. */
void cuda_stream_close(struct dev_stream *base)
{
    struct cuda_stream *s = cuda_stream_of(base);
    struct exec_event empty;
    exec_event_init(base->dev->ex, &empty);
    if (dev_notify(base, NULL, NULL, &empty, NULL) == STK_OK)
        (void)exec_event_wait(&empty, UINT64_MAX, NULL);
    stream_closing(s, cudaStreamSynchronize(s->queue), "cudaStreamSynchronize");
    pthread_mutex_lock(&s->lock);
    pthread_mutex_unlock(&s->lock);
    stream_free(s);
}
