/* nvme/io_posix.c - the backend for machines that refuse io_uring: lanes that call pread and
 * pwrite.
 *
 * Each part becomes a task of the worker with the fewest parts. `busy` of a worker is counted by
 * the io's lane when it starts a part and by the worker when it ends it. With simulated execution
 * the workers are simulated lanes and the calls are real. */
#include "nvme/io_impl.h"
#include "base/sys.h"

#include <errno.h>
#include <stdio.h>

#define WORKERS_MAX 64

struct worker { struct exec_lane *lane; _Atomic uint32_t busy; };
struct posix { uint32_t n; struct worker workers[WORKERS_MAX]; };

static void posix_close(struct io *io)
{
    struct posix *px = io->impl;
    for (uint32_t i = 0; i < px->n; i++) exec_lane_close(px->workers[i].lane);
    sys_free(px);
    io->impl = NULL;
}

static stk_status posix_open(struct io *io, struct stk_error *err)
{
    if (io->cfg.workers > WORKERS_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%u worker threads for transfers were asked for; at most %d are "
                             "supported",
                             io->cfg.workers, WORKERS_MAX);
    struct posix *px = sys_calloc(1, sizeof *px);
    if (!px)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the transfer threads' table");
    io->impl = px;
    for (; px->n < io->cfg.workers; px->n++) {
        char name[16];
        snprintf(name, sizeof name, "io-%u", px->n);
        stk_status status = exec_lane_open(io->cfg.ex, name, &px->workers[px->n].lane, err);
        if (status != STK_OK) {
            posix_close(io);
            return status;
        }
    }
    return STK_OK;
}

/* On a worker. */
static void transfer(void *arg)
{
    struct io_part *p = arg;
    struct worker *w = &((struct posix *)p->io->impl)->workers[p->word[0]];
    int64_t n = 0;
    if (p->op == IO_READ) n = sys_read_some(p->file->fd, p->buf, p->size_bytes, p->offset_bytes);
    else if (p->op == IO_WRITE)
        n = sys_write_some(p->file->fd, p->buf, p->size_bytes, p->offset_bytes);
    else n = sys_fsync(p->file->fd);
    p->result = n < 0 ? -(int64_t)errno : n;
    atomic_fetch_sub_explicit(&w->busy, 1, memory_order_relaxed);
    io_part_done(p);
}

static void posix_start(struct io *io, struct io_part *p)
{
    struct posix *px = io->impl;
    uint32_t best = 0, least = UINT32_MAX;
    for (uint32_t i = 0; i < px->n; i++) {
        uint32_t busy = atomic_load_explicit(&px->workers[i].busy, memory_order_relaxed);
        if (busy < least) {
            least = busy;
            best = i;
        }
    }
    p->word[0] = best;
    atomic_fetch_add_explicit(&px->workers[best].busy, 1, memory_order_relaxed);
    p->task.fn = transfer;
    p->task.arg = p;
    exec_post(px->workers[best].lane, &p->task);
}

static void posix_describe(const struct io *io, char *buf, size_t size_bytes)
{
    snprintf(buf, size_bytes, "posix threads (%u), %s", io->cfg.workers, io_direct_text(io));
}

static stk_status posix_drive_open(struct io *io, struct io_drive *d, struct io_file *first,
                                   struct stk_error *err)
{
    return STK_OK;
}
static void posix_drive_close(struct io *io, struct io_drive *d) {}
static void posix_region_add(struct io *io, const struct io_region *r) {}
static void posix_kick(struct io *io, struct io_drive *d) {}

const struct io_backend io_backend_posix = {
    .name = "posix",
    .open = posix_open,
    .close = posix_close,
    .drive_open = posix_drive_open,
    .drive_close = posix_drive_close,
    .file_open = io_file_open_real,
    .file_close = io_file_close_real,
    .region_add = posix_region_add,
    .describe = posix_describe,
    .start = posix_start,
    .kick = posix_kick,
};
