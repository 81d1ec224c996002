/* gpu/device.c - the front of every device: finds the backend, checks arguments, queues commands.
 *
 * Owns prepare mode and the order of calls. Must not know how a backend runs anything, nor plans,
 * tiers or models. Called from the application's thread and from lanes; each call returns when the
 * work is queued. */
#include "gpu/device_impl.h"

#include <stdio.h>
#include <string.h>

const char *dev_cmd_name(enum dev_cmd_kind kind)
{
    static const char *const names[] = {
#define DEV_CMD_NAME(name, field, text) text,
        DEV_CMD_MAP(DEV_CMD_NAME)
#undef DEV_CMD_NAME
    };
    return (unsigned)kind < DEV_CMD_N ? names[kind] : "?";
}

static const struct dev_ops *dev_find(enum dev_kind kind)
{
    switch (kind) {
    case DEV_HOST:
    case DEV_HOST_DISCRETE:
    case DEV_SIM: return &host_dev_ops;
    case DEV_CUDA:
#ifdef STK_CUDA
        return &cuda_dev_ops;
#else
        break;
#endif
    }
    return NULL;
}

static stk_status dev_missing(enum dev_kind kind, struct stk_error *err)
{
    if (kind == DEV_CUDA)
        return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                             "device cuda is not in this build: build it with `./dev build --cuda`, "
                             "or use host or host:discrete");
    return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                         "device kind %d is not in this build; use host, host:discrete or sim",
                         (int)kind);
}

stk_status dev_open(const struct dev_cfg *cfg, struct dev **out, struct stk_error *err)
{
    STK_ASSERT(cfg && cfg->ex && out);
    *out = NULL;
    const struct dev_ops *ops = dev_find(cfg->kind);
    if (!ops) return dev_missing(cfg->kind, err);
    STK_ASSERT(ops->version == DEV_OPS_VERSION);
    STK_TRY(ops->open(cfg, out, err));
    (*out)->ops = ops;
    (*out)->ex = cfg->ex;
    exec_event_init(cfg->ex, &(*out)->sync);
    return STK_OK;
}

stk_status dev_describe(enum dev_kind kind, char *text, size_t text_bytes, struct stk_error *err)
{
    const struct dev_ops *ops = dev_find(kind);
    if (!ops) return dev_missing(kind, err);
    if (ops->describe) return ops->describe(text, text_bytes, err);
    snprintf(text, text_bytes, "%s", ops->name);
    return STK_OK;
}

void dev_close(struct dev *d)
{
    if (d) d->ops->close(d);
}

void dev_caps_read(const struct dev *d, struct dev_caps *out) { *out = d->caps; }

stk_status dev_matmul_rate(struct dev *d, struct stk_error *err)
{
    return d->caps.matmul_flops_per_s > 0 || !d->ops->matmul_rate ? STK_OK
                                                                  : d->ops->matmul_rate(d, err);
}

stk_status dev_reserve(struct dev *d, uint64_t size_bytes, void **out, struct stk_error *err)
{
    *out = NULL;
    if (size_bytes == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "device %s: an arena of 0 bytes was asked for",
                             d->caps.name);
    return d->ops->reserve(d, size_bytes, out, err);
}

stk_status dev_host_register(struct dev *d, void *base, uint64_t size_bytes, struct stk_error *err)
{
    STK_ASSERT(base && size_bytes);
    return d->ops->host_register(d, base, size_bytes, err);
}

void dev_host_unregister(struct dev *d, void *base) { d->ops->host_unregister(d, base); }

stk_status dev_status(const struct dev *d, struct stk_error *err)
{
    return d->ops->status_read(d, err);
}

stk_status dev_stream_open(struct dev *d, const char *name, uint32_t depth, struct dev_stream **out,
                           struct stk_error *err)
{
    *out = NULL;
    if (depth == 0) depth = DEV_STREAM_DEPTH_DEFAULT;
    if (depth > DEV_STREAM_DEPTH_MAX)
        return stk_error_set(
            err, STK_ERR_CONFIG, 0,
            "stream %s: a queue of %u commands was asked for, at most %u are possible", name, depth,
            DEV_STREAM_DEPTH_MAX);
    return d->ops->stream_open(d, name, depth, out, err);
}

void dev_stream_close(struct dev_stream *s)
{
    if (s) s->dev->ops->stream_close(s);
}

struct dev *dev_of(const struct dev_stream *s) { return s->dev; }
uint64_t dev_stream_busy_ns(const struct dev_stream *s) { return s->dev->ops->stream_busy_ns(s); }

uint32_t dev_work_read(const struct dev *d, struct dev_work out[DEV_WORK_MAX])
{
    return d->ops->work_read(d, out);
}

void dev_work_measure(struct dev *d, bool on)
{
    if (d->ops->work_measure) d->ops->work_measure(d, on);
}

void dev_tally_add(struct dev_tally *t, uint64_t ns, double flops, double bytes)
{
    atomic_fetch_add_explicit(&t->calls, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->ns, ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->flops, (uint64_t)flops, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->bytes, (uint64_t)bytes, memory_order_relaxed);
}

bool dev_tally_row(const struct dev_tally *t, const char *what, struct dev_work *out)
{
    uint64_t calls = atomic_load_explicit(&t->calls, memory_order_relaxed);
    *out = (struct dev_work){
        .what = what,
        .calls = calls,
        .ns = atomic_load_explicit(&t->ns, memory_order_relaxed),
        .flops = (double)atomic_load_explicit(&t->flops, memory_order_relaxed),
        .bytes = (double)atomic_load_explicit(&t->bytes, memory_order_relaxed),
    };
    return calls > 0;
}

static stk_status dev_enqueue(struct dev_stream *s, const struct dev_cmd *cmd,
                              struct stk_error *err)
{
    return s->dev->ops->enqueue(s, cmd, err);
}

/* Prepare mode: what the command would take. */
static void dev_count(struct dev *d, const struct dev_cmd *cmd)
{
    if (d->caps.modelled_time && d->ops->model_ns) d->prepare_ns += d->ops->model_ns(d, cmd);
}

stk_status dev_copy(struct dev_stream *s, void *dst, const void *src, uint64_t size_bytes,
                    enum dev_dir dir, struct stk_error *err)
{
    return dev_copy_paced(s, dst, src, size_bytes, dir, 0, err);
}

stk_status dev_copy_paced(struct dev_stream *s, void *dst, const void *src, uint64_t size_bytes, enum dev_dir dir,
                          double bytes_per_s, struct stk_error *err)
{
    struct dev_cmd c = { .kind = DEV_CMD_COPY, .u.copy = { dst, src, size_bytes, dir, bytes_per_s } };
    if (s->dev->preparing) dev_count(s->dev, &c);
    if (s->dev->preparing || size_bytes == 0) return STK_OK;
    if (!dst || !src)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "stream %s: a copy of %llu bytes has no %s",
                             s->name, (unsigned long long)size_bytes,
                             dst ? "source" : "destination");
    return dev_enqueue(s, &c, err);
}

stk_status dev_zero(struct dev_stream *s, void *dst, uint64_t size_bytes, struct stk_error *err)
{
    struct dev_cmd c = { .kind = DEV_CMD_ZERO, .u.zero = { dst, size_bytes } };
    if (s->dev->preparing) dev_count(s->dev, &c);
    if (s->dev->preparing || size_bytes == 0) return STK_OK;
    if (!dst)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "stream %s: %llu bytes at no address were to be zeroed", s->name,
                             (unsigned long long)size_bytes);
    return dev_enqueue(s, &c, err);
}

stk_status dev_notify(struct dev_stream *s, struct exec_lane *lane, struct exec_task *task,
                      struct exec_event *ev, struct stk_error *err)
{
    STK_ASSERT(ev || (lane && task));
    struct dev_cmd c = { .kind = DEV_CMD_NOTIFY, .u.notify = { lane, task, ev } };
    return dev_enqueue(s, &c, err);
}

stk_status dev_mark_init(struct dev *d, struct dev_mark *m, struct stk_error *err)
{
    *m = (struct dev_mark){ .dev = d };
    return d->ops->mark_init(d, m, err);
}

void dev_mark_free(struct dev_mark *m)
{
    if (!m || !m->dev) return;
    m->dev->ops->mark_free(m);
    *m = (struct dev_mark){ 0 };
}

/* The backend numbers the record while it queues it, so that a refused one (STK_BUSY) leaves no
 * number that never passes. */
stk_status dev_mark_record(struct dev_stream *s, struct dev_mark *m, struct stk_error *err)
{
    STK_ASSERT(m->dev == s->dev);
    struct dev_cmd c = { .kind = DEV_CMD_MARK_RECORD, .u.mark = { m, 0 } };
    return dev_enqueue(s, &c, err);
}

stk_status dev_mark_wait(struct dev_stream *s, struct dev_mark *m, struct stk_error *err)
{
    STK_ASSERT(m->dev == s->dev);
    struct dev_cmd c = { .kind = DEV_CMD_MARK_WAIT, .u.mark = { m, 0 } };
    return dev_enqueue(s, &c, err);
}

stk_status dev_sync(struct dev_stream *s, struct stk_error *err)
{
    struct dev *d = s->dev;
    exec_event_reset(&d->sync);
    STK_TRY(dev_notify(s, NULL, NULL, &d->sync, err));
    STK_TRY(exec_event_wait(&d->sync, UINT64_MAX, err));
    return dev_status(d, err);
}

void dev_prepare_begin(struct dev *d)
{
    STK_ASSERT(!d->preparing);
    d->preparing = true;
    d->prepare_scratch_bytes = d->prepare_ns = 0;
}

uint64_t dev_prepare_ns(const struct dev *d) { return d->prepare_ns; }

void dev_model_read(const struct dev *d, struct dev_model *out)
{
    *out = (struct dev_model){ 0 };
    if (d->caps.modelled_time && d->ops->model_read) d->ops->model_read(d, out);
}

stk_status dev_prepare_end(struct dev *d, uint64_t *scratch_bytes, struct stk_error *err)
{
    if (!d->preparing)
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "device %s: prepare mode ends, but was not begun", d->caps.name);
    d->preparing = false;
    if (scratch_bytes) *scratch_bytes = d->prepare_scratch_bytes;
    return STK_OK;
}

bool dev_preparing(const struct dev *d) { return d->preparing; }

stk_status dev_submit(struct dev_stream *s, const struct dev_cmd *cmd, struct stk_error *err)
{
    struct dev *d = s->dev;
    if (!d->preparing) return dev_enqueue(s, cmd, err);
    uint64_t scratch_bytes = 0;
    dev_count(d, cmd);
    STK_TRY(d->ops->prepare(d, cmd, &scratch_bytes, err));
    if (scratch_bytes > d->prepare_scratch_bytes) d->prepare_scratch_bytes = scratch_bytes;
    return STK_OK;
}
