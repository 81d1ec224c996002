/* gpu/cuda/cuda_clock.c - how long a stream worked: pairs of events in a ring, read when they are
 * over.
 *
 * Owns the events. Must not know what is between them. Spans begin and end in the stream's
 * producer; busy times are read by any thread, under the clock's lock. Nothing here is an error: a
 * span that cannot be measured (the ring is full, the card has failed) is left out.
 *
 * A span inside another one (a product inside a command) is recorded behind it in the ring, so that
 * time is taken from a row only after it was added. */
#include "gpu/cuda/cuda_impl.h"

static void clock_destroy(struct cuda_clock *c)
{
    for (uint32_t i = 0; i < CUDA_CLOCK_N; i++) {
        if (c->span[i].begin) (void)cudaEventDestroy(c->span[i].begin);
        if (c->span[i].end) (void)cudaEventDestroy(c->span[i].end);
    }
}

stk_status cuda_clock_open(struct cuda_stream *s, struct stk_error *err)
{
    struct cuda_clock *c = &s->clock;
    cudaError_t e = cudaSuccess;
    pthread_mutex_init(&c->lock, NULL);
    c->made = true;
    for (uint32_t i = 0; i < CUDA_CLOCK_N && e == cudaSuccess; i++) {
        e = cudaEventCreateWithFlags(&c->span[i].begin, cudaEventDefault);
        if (e == cudaSuccess) e = cudaEventCreateWithFlags(&c->span[i].end, cudaEventDefault);
    }
    return cuda_check(e, "cudaEventCreateWithFlags", s->base.name, err);
}

void cuda_clock_close(struct cuda_stream *s)
{
    if (!s->clock.made) return;
    clock_destroy(&s->clock);
    pthread_mutex_destroy(&s->clock.lock);
}

/* Under the lock: spans that are over. cudaErrorNotReady is remembered as this thread's last error
 * and must not be taken for that of a launch. */
static void clock_read(struct cuda_stream *s)
{
    struct cuda_dev *h = cuda_stream_dev(s);
    struct cuda_clock *c = &s->clock;
    for (; c->tail < c->head; c->tail++) {
        struct cuda_span_time *t = &c->span[c->tail % CUDA_CLOCK_N];
        float ms = 0;
        if (t->open) return;
        cudaError_t e = cudaEventQuery(t->end);
        if (e == cudaSuccess) e = cudaEventElapsedTime(&ms, t->begin, t->end);
        if (e != cudaSuccess) (void)cudaGetLastError();
        if (e == cudaErrorNotReady) return;
        if (e != cudaSuccess || ms < 0) continue;
        const uint64_t ns = (uint64_t)((double)ms * 1e6);
        if (t->row < CUDA_WORK_N) atomic_fetch_add(&h->work[t->row].ns, ns);
        if (t->minus < CUDA_WORK_N) atomic_fetch_sub(&h->work[t->minus].ns, ns);
        if (t->busy) atomic_fetch_add(&s->busy_ns, ns);
    }
}

static struct cuda_span_time *span_begin(struct cuda_stream *s, uint32_t row, uint32_t minus,
                                         bool busy)
{
    struct cuda_clock *c = &s->clock;
    if (c->head - c->tail == CUDA_CLOCK_N) clock_read(s);
    if (c->head - c->tail == CUDA_CLOCK_N) {
        c->dropped++;
        return NULL;
    }
    struct cuda_span_time *t = &c->span[c->head % CUDA_CLOCK_N];
    if (cudaEventRecord(t->begin, s->queue) != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    t->row = row;
    t->minus = minus;
    t->busy = busy;
    t->open = true;
    c->head++;
    return t;
}

static void span_end(struct cuda_stream *s, struct cuda_span_time *t)
{
    if (!t) return;
    if (cudaEventRecord(t->end, s->queue) != cudaSuccess) (void)cudaGetLastError();
    t->open = false;
}

void cuda_clock_begin(struct cuda_stream *s, uint32_t row)
{
    struct cuda_clock *c = &s->clock;
    if (c->command) return;
    pthread_mutex_lock(&c->lock);
    c->command = span_begin(s, row, CUDA_WORK_N, true);
    pthread_mutex_unlock(&c->lock);
}

void cuda_clock_end(struct cuda_stream *s)
{
    struct cuda_clock *c = &s->clock;
    if (!c->command) return;
    pthread_mutex_lock(&c->lock);
    span_end(s, c->command);
    c->command = NULL;
    pthread_mutex_unlock(&c->lock);
}

void cuda_clock_product_begin(struct cuda_stream *s, uint32_t row)
{
    struct cuda_clock *c = &s->clock;
    if (!cuda_stream_dev(s)->measure || !c->command) return;
    pthread_mutex_lock(&c->lock);
    c->product = span_begin(s, CUDA_WORK_PRODUCT, row, false);
    pthread_mutex_unlock(&c->lock);
}

void cuda_clock_product_end(struct cuda_stream *s)
{
    struct cuda_clock *c = &s->clock;
    if (!c->product) return;
    pthread_mutex_lock(&c->lock);
    span_end(s, c->product);
    c->product = NULL;
    pthread_mutex_unlock(&c->lock);
}

uint64_t cuda_stream_busy_ns(const struct dev_stream *base)
{
    struct cuda_stream *s =
        (struct cuda_stream *)(uintptr_t)base; /* the lock is not what is read */
    pthread_mutex_lock(&s->clock.lock);
    clock_read(s);
    pthread_mutex_unlock(&s->clock.lock);
    return atomic_load(&s->busy_ns);
}
