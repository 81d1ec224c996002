/* nvme/io_posix.c - the backend for machines that refuse io_uring: lanes that call pread and
 * pwrite.
 *
 * Each drive has workers of its own, so that a slow drive does not keep those of a fast one.
 * They share the drive's queue of started parts: the io's lane is its one writer, and whoever is
 * free takes the oldest, so no part waits behind a long one while a worker rests. A worker moves
 * one part in one task. Sixteen of them by default: a thread has one request on the drive, and a
 * drive wants many (measured on a busy virtual disk against io_uring at depth 32, requests of 1
 * and 4 MiB: 4 workers moved 0.3 to 0.5 of its bytes, 8 0.5 to 0.9, 16 0.7 to 0.9). With
 * simulated execution the workers are simulated lanes and the calls are real.
 *
 * How a worker goes to rest without missing a part: it says so (`resting`), then looks at the
 * queue once more; the lane puts the part in, then looks for who rests. Both orders are
 * sequentially consistent, so at least one of the two sees the other. */
#include "nvme/io_impl.h"
#include "base/sys.h"

#include <errno.h>
#include <stdio.h>

#define WORKERS_MAX 64
#define PARTS_PER_WORKER 2 /* one under way, one that follows without the lane's help */

struct pool;
struct worker {
    struct pool *pool;
    struct exec_lane *lane;
    struct exec_task work;
    _Atomic bool resting;
};
/* Of one drive. */
struct pool {
    struct worker workers[WORKERS_MAX];
    uint32_t n, room;                 /* room: a power of two, at least the drive's parts */
    _Atomic(struct io_part *) *queue; /* places first..last, counted without end */
    _Atomic uint64_t first, last;
};

static stk_status posix_open(struct io *io, struct stk_error *err)
{
    if (io->cfg.workers > WORKERS_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%u worker threads for transfers were asked for; at most %d are "
                             "supported",
                             io->cfg.workers, WORKERS_MAX);
    return STK_OK;
}

/* What is started can be overtaken no more, so little is: the rest waits in order of class. */
static uint32_t posix_depth_max(const struct io *io) { return PARTS_PER_WORKER * io->cfg.workers; }

static void posix_close(struct io *io) {}

/* --- workers ---------------------------------------------------------------------------------- */

static struct io_part *take(struct pool *pool)
{
    uint64_t at = atomic_load(&pool->first);
    for (;;) {
        if (at == atomic_load(&pool->last)) return NULL;
        /* whoever moves `first` owns what it read: the lane fills a place anew only after that */
        struct io_part *p = atomic_load(&pool->queue[at & (pool->room - 1)]);
        if (atomic_compare_exchange_weak(&pool->first, &at, at + 1)) return p;
    }
}

static void transfer(struct io_part *p)
{
    int64_t n = 0;
    if (p->op == IO_READ) n = sys_read_some(p->file->fd, p->buf, p->size_bytes, p->offset_bytes);
    else if (p->op == IO_WRITE)
        n = sys_write_some(p->file->fd, p->buf, p->size_bytes, p->offset_bytes);
    else n = sys_fsync(p->file->fd);
    p->result = n < 0 ? -(int64_t)errno : n;
    io_part_done(p);
}

static void worker_run(void *arg)
{
    struct worker *w = arg;
    struct io_part *p = take(w->pool);
    if (p) {
        transfer(p);
        exec_post(w->lane, &w->work);
        return;
    }
    atomic_store(&w->resting, true);
    if (atomic_load(&w->pool->first) == atomic_load(&w->pool->last)) return;
    if (atomic_exchange(&w->resting, false)) exec_post(w->lane, &w->work);
}

static void posix_start(struct io *io, struct io_part *p)
{
    struct pool *pool = p->drive->impl;
    uint64_t last = atomic_load(&pool->last);
    STK_ASSERT(last - atomic_load(&pool->first) < pool->room);
    atomic_store(&pool->queue[last & (pool->room - 1)], p);
    atomic_store(&pool->last, last + 1);
    for (uint32_t i = 0; i < pool->n; i++)
        if (atomic_exchange(&pool->workers[i].resting, false)) {
            exec_post(pool->workers[i].lane, &pool->workers[i].work);
            return;
        }
}

static void posix_kick(struct io *io, struct io_drive *d) {}

/* --- drives ----------------------------------------------------------------------------------- */

static void posix_drive_close(struct io *io, struct io_drive *d)
{
    struct pool *pool = d->impl;
    if (!pool) return;
    /* closing a lane runs what it has to do, and a worker rests only when the queue is empty */
    for (uint32_t i = 0; i < pool->n; i++) exec_lane_close(pool->workers[i].lane);
    sys_free(pool->queue);
    sys_free(pool);
    d->impl = NULL;
}

static stk_status posix_drive_open(struct io *io, struct io_drive *d, struct io_file *first,
                                   struct stk_error *err)
{
    struct pool *pool = sys_calloc(1, sizeof *pool);
    if (!pool)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the transfer threads' table");
    d->impl = pool;
    for (pool->room = 1; pool->room < d->depth;) pool->room *= 2;
    pool->queue = sys_calloc(pool->room, sizeof *pool->queue);
    stk_status status = STK_OK;
    if (!pool->queue)
        status = stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the transfer threads' queue");
    while (status == STK_OK && pool->n < io->cfg.workers) {
        struct worker *w = &pool->workers[pool->n];
        char name[16];
        snprintf(name, sizeof name, "io-%u-%u", d->index % 16, pool->n % 100);
        status = exec_lane_open(io->cfg.ex, name, &w->lane, err);
        if (status != STK_OK) break;
        w->pool = pool;
        exec_task_init(&w->work, worker_run, w);
        atomic_init(&w->resting, true);
        pool->n++;
    }
    if (status != STK_OK) posix_drive_close(io, d);
    return status;
}

static void posix_region_add(struct io *io, const struct io_region *r) {}

static void posix_describe(const struct io *io, char *buf, size_t size_bytes)
{
    snprintf(buf, size_bytes, "posix threads (%u), %s", io->cfg.workers, io_direct_text(io));
}

const struct io_backend io_backend_posix = {
    .name = "posix",
    .open = posix_open,
    .close = posix_close,
    .depth_max = posix_depth_max,
    .drive_open = posix_drive_open,
    .drive_close = posix_drive_close,
    .file_open = io_file_open_real,
    .file_close = io_file_close_real,
    .region_add = posix_region_add,
    .describe = posix_describe,
    .start = posix_start,
    .kick = posix_kick,
};
