/* nvme/io_sim.c - the simulated backend: when a part completes and what goes wrong with it. The
 * fault model is in io_sim.h.
 *
 * Runs on the io's lane only. All chances are drawn in `start`, in the order in which parts are
 * started, so a run is a function of its seed. Bytes move when the part completes, not when it
 * starts: whoever touches a buffer under way gets caught. With exec simulation each part is a timer
 * of the lane on the virtual clock; with threads it completes within `start`. */
#include "nvme/io_impl.h"
#include "nvme/io_sim_disk.h"
#include "base/rng.h"
#include "base/sys.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define SIM_ALIGN 4096u
_Static_assert(IO_SIM_DRIVES_MAX == IO_DRIVES_MAX, "every drive may have its own speed");

struct sim_way { /* one direction of a device that shares: of all drives */
    struct io *io;
    struct exec_lane *lane;
    struct exec_task task;
    struct io_part *now, *first, *last; /* that moves; that wait, by `next` */
};

struct sim {
    const struct io_sim_cfg *cfg;
    struct rng rng;
    struct sim_way way[2]; /* reads, writes */
    /* when the disk has moved all bytes it was given: reads, writes; then drives of their own
     * speed */
    uint64_t free_ns[1 + IO_SIM_DRIVES_MAX][2];
};

/* What `start` decided, in part->word[0]; word[1] seeds the details. */
enum { DO_NOTHING_WRONG = SIM_FAULT_N };

/* --- a device that shares: reads and writes on lanes of their own ------------------------------- */

static bool sim_shares(const struct io *io)
{
    const struct io_sim_cfg *c = io->cfg.sim;
    return (c->both_bytes_per_s > 0 || c->dram_bytes_per_s > 0) && c->read_bytes_per_s > 0 &&
           c->write_bytes_per_s > 0 && exec_kind_of(io->cfg.ex) == EXEC_SIM;
}

static uint64_t draw_delay(struct sim *s);

/* The part that moved is done after the latency; the next one moves. */
static void sim_way_run(void *arg)
{
    struct sim_way *y = arg;
    struct sim *s = y->io->impl;
    const struct io_sim_cfg *c = s->cfg;
    if (y->now)
        exec_post_at(y->io->cfg.lane, &y->now->task,
                     exec_now_ns(y->io->cfg.ex) + c->latency_ns + draw_delay(s));
    y->now = y->first;
    if (!y->now) return;
    y->first = y->now->next;
    y->now->next = NULL;
    double rate = y == &s->way[0] ? c->read_bytes_per_s : c->write_bytes_per_s,
           both = c->both_bytes_per_s > 0
                      ? c->both_bytes_per_s / (2 * c->read_bytes_per_s) +
                            c->both_bytes_per_s / (2 * c->write_bytes_per_s)
                      : 2;
    struct exec_need need = { { 0 } };
    need.part[EXEC_SHARE_DRIVE] = 1 / (both < 1 ? 1 : both > 2 ? 2 : both);
    need.weight = c->both_bytes_per_s / (2 * rate); /* equal bytes each way */
    if (c->dram_bytes_per_s > 0) need.part[EXEC_SHARE_DRAM] = rate / c->dram_bytes_per_s;
    exec_lane_busy_sharing(y->lane, (uint64_t)((double)y->now->size_bytes / rate * 1e9), &need);
    exec_post(y->lane, &y->task);
}

/* Closing a lane runs what is queued, on other lanes, too: nothing of either way may be left by then. */
static void sim_ways_close(struct sim *s)
{
    for (int k = 0; k < 2; k++)
        if (s->way[k].lane) exec_cancel(&s->way[k].task);
    for (int k = 0; k < 2; k++) exec_lane_close(s->way[k].lane);
}

static stk_status sim_open(struct io *io, struct stk_error *err)
{
    struct sim *s = sys_calloc(1, sizeof *s);
    if (!s) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the simulated disk's state");
    s->cfg = io->cfg.sim;
    rng_seed(&s->rng, s->cfg->seed);
    stk_status status = STK_OK;
    for (int k = 0; status == STK_OK && sim_shares(io) && k < 2; k++) {
        s->way[k].io = io;
        exec_task_init(&s->way[k].task, sim_way_run, &s->way[k]);
        status = exec_lane_open(io->cfg.ex, k ? "disk writes" : "disk reads", &s->way[k].lane, err);
    }
    if (status == STK_OK) {
        io->impl = s;
        return STK_OK;
    }
    sim_ways_close(s);
    sys_free(s);
    return status;
}

static void sim_close(struct io *io) {}

static void sim_quiesce(struct io *io)
{
    for (uint32_t i = 0; i < IO_DRIVES_MAX; i++)
        for (uint32_t k = 0; io->drives[i].parts && k < io->cfg.depth; k++)
            exec_cancel(&io->drives[i].parts[k].task);
    if (io->impl) sim_ways_close(io->impl);
    sys_free(io->impl);
    io->impl = NULL;
}

static stk_status sim_file_open(struct io *io, struct io_file *f, struct stk_error *err)
{
    f->impl = sim_file_find(io->cfg.sim->disk, f->path);
    if (!f->impl)
        return stk_error_set(err, STK_ERR_IO, ENOENT, "%s: no such file on the simulated disk",
                             f->path);
    f->direct = !io->cfg.buffered;
    f->align = f->direct ? SIM_ALIGN : 512;
    f->retry_align = f->direct ? SIM_ALIGN : 1;
    return STK_OK;
}

static void sim_file_close(struct io *io, struct io_file *f) { f->impl = NULL; }

/* --- what goes wrong -------------------------------------------------------------------------- */

static bool chance(struct sim *s, uint32_t ppm) { return ppm && rng_below(&s->rng, 1000000) < ppm; }

static uint64_t draw_fault(struct sim *s, const struct io_part *p)
{
    const struct io_sim_faults *f = &s->cfg->faults;
    if (s->cfg->disk->requests <= f->first_request) return DO_NOTHING_WRONG;
    if (chance(s, f->lost_completion_ppm)) return SIM_LOST_COMPLETION;
    if (p->op == IO_FLUSH)
        return chance(s, f->write_error_ppm) ? SIM_WRITE_ERROR : DO_NOTHING_WRONG;
    if (p->size_bytes > 512 && chance(s, f->short_ppm)) return SIM_SHORT;
    if (p->op == IO_READ) {
        if (chance(s, f->read_error_ppm)) return SIM_READ_ERROR;
        return chance(s, f->flip_bit_ppm) ? SIM_FLIP_BIT : DO_NOTHING_WRONG;
    }
    if (chance(s, f->write_error_ppm)) return SIM_WRITE_ERROR;
    if (chance(s, f->no_space_ppm)) return SIM_NO_SPACE;
    if (chance(s, f->rot_bit_ppm)) return SIM_ROT_BIT;
    if (chance(s, f->misdirect_ppm)) return SIM_MISDIRECT;
    return chance(s, f->lost_write_ppm) ? SIM_LOST_WRITE : DO_NOTHING_WRONG;
}

static uint64_t draw_delay(struct sim *s)
{
    const struct io_sim_faults *f = &s->cfg->faults;
    uint64_t delay = 0;
    if (s->cfg->disk->requests <= f->first_request) return 0;
    if (chance(s, f->late_ppm)) {
        s->cfg->disk->faults[SIM_LATE]++;
        delay += rng_below(&s->rng, f->late_ns + 1);
    }
    if (chance(s, f->reorder_ppm)) {
        s->cfg->disk->faults[SIM_REORDER]++;
        delay += rng_below(&s->rng, 8 * s->cfg->latency_ns + 1000);
    }
    return delay;
}

/* When the part is done: the disk moves bytes one part after another at its rate, then the latency
 * passes. */
static uint64_t due_ns(struct io *io, struct sim *s, const struct io_part *p)
{
    const struct io_sim_drive *own = &s->cfg->drives[p->drive->index];
    bool alone = own->read_bytes_per_s > 0 || own->write_bytes_per_s > 0, read = p->op == IO_READ;
    double rate = read ? s->cfg->read_bytes_per_s : s->cfg->write_bytes_per_s;
    double own_rate = read ? own->read_bytes_per_s : own->write_bytes_per_s;
    if (own_rate > 0) rate = own_rate;
    uint64_t now = exec_now_ns(io->cfg.ex),
             *at = &s->free_ns[alone ? 1 + p->drive->index : 0][s->cfg->shared_rate ? 0 : !read];
    if (*at < now) *at = now;
    if (rate > 0) *at += (uint64_t)((double)p->size_bytes / rate * 1e9);
    return *at + s->cfg->latency_ns + draw_delay(s);
}

/* --- moving bytes ----------------------------------------------------------------------------- */

static int64_t written(bool ok, uint64_t n) { return ok ? (int64_t)n : -ENOMEM; }

/* A write that failed may have changed any part of its range: each sector has the new bytes or the
 * old ones. */
static int64_t write_torn(struct sim_file *f, const struct io_part *p, struct rng *r)
{
    for (uint64_t at = 0; at < p->size_bytes; at += 512)
        if ((rng_next(r) & 1) && !sim_write(f, p->offset_bytes + at, p->buf + at, 512, SIM_BOTH))
            return -ENOMEM;
    return -EIO;
}

static int64_t write_elsewhere(struct sim_file *f, const struct io_part *p, struct rng *r)
{
    uint64_t places = (f->size_bytes - p->size_bytes) / SIM_PAGE_BYTES + 1;
    uint64_t place = rng_below(r, places) * SIM_PAGE_BYTES;
    bool ok = sim_write(f, p->offset_bytes, p->buf, p->size_bytes, SIM_PRISTINE);
    if (place != p->offset_bytes) ok = ok && sim_write(f, place, p->buf, p->size_bytes, SIM_MEDIUM);
    return written(ok, p->size_bytes);
}

static int64_t do_write(struct sim_file *f, const struct io_part *p, uint64_t fault, struct rng *r)
{
    uint64_t n = p->size_bytes;
    if (p->offset_bytes > f->size_bytes || n > f->size_bytes - p->offset_bytes) return -ENOSPC;
    switch (fault) {
    case SIM_WRITE_ERROR: return write_torn(f, p, r);
    case SIM_NO_SPACE: return -ENOSPC;
    case SIM_MISDIRECT: return write_elsewhere(f, p, r);
    case SIM_LOST_WRITE: return written(sim_write(f, p->offset_bytes, p->buf, n, SIM_PRISTINE), n);
    case SIM_SHORT: n = 512 * (1 + rng_below(r, n / 512 - 1)); break;
    default: break;
    }
    bool ok = sim_write(f, p->offset_bytes, p->buf, n, SIM_BOTH);
    if (fault == SIM_ROT_BIT)
        ok = ok && sim_flip_bit(f, p->offset_bytes + rng_below(r, n), (uint32_t)rng_below(r, 8));
    return written(ok, n);
}

static int64_t do_read(const struct sim_file *f, const struct io_part *p, uint64_t fault,
                       struct rng *r)
{
    uint64_t n = p->size_bytes;
    if (p->offset_bytes >= f->size_bytes) return 0;
    if (n > f->size_bytes - p->offset_bytes) n = f->size_bytes - p->offset_bytes;
    if (fault == SIM_SHORT && n > 512) n = 512 * (1 + rng_below(r, n / 512 - 1));
    if (fault == SIM_READ_ERROR) {
        /* the buffer of a failed read holds anything */
        memset(p->buf, (int)(rng_next(r) & 255), rng_below(r, n + 1));
        return -EIO;
    }
    sim_read(f, p->offset_bytes, p->buf, n);
    if (fault == SIM_FLIP_BIT) p->buf[rng_below(r, n)] ^= (uint8_t)(1u << rng_below(r, 8));
    return (int64_t)n;
}

static void sim_complete(void *arg)
{
    struct io_part *p = arg;
    struct rng r;
    rng_seed(&r, p->word[1]);
    struct sim_file *f = p->file->impl;
    if (p->op == IO_READ) p->result = do_read(f, p, p->word[0], &r);
    else if (p->op == IO_WRITE) p->result = do_write(f, p, p->word[0], &r);
    else p->result = p->word[0] == SIM_WRITE_ERROR ? -EIO : 0;
    if (p->op == IO_FLUSH && p->result == 0) sim_flush(f);
    io_part_done(p);
}

static void sim_start(struct io *io, struct io_part *p)
{
    struct sim *s = io->impl;
    s->cfg->disk->requests++;
    p->word[0] = draw_fault(s, p);
    p->word[1] = rng_next(&s->rng);
    uint64_t due = sim_shares(io) ? 0 : due_ns(io, s, p);
    if (p->word[0] < SIM_FAULT_N) s->cfg->disk->faults[p->word[0]]++;
    if (p->word[0] == SIM_LOST_COMPLETION) return;
    if (exec_kind_of(io->cfg.ex) == EXEC_THREADS) {
        sim_complete(p);
        return;
    }
    p->task.fn = sim_complete;
    p->task.arg = p;
    if (!sim_shares(io)) {
        exec_post_at(io->cfg.lane, &p->task, due);
        return;
    }
    struct sim_way *y = &s->way[p->op != IO_READ];
    p->next = NULL;
    if (y->first) y->last->next = p;
    else y->first = p;
    y->last = p;
    exec_post(y->lane, &y->task);
}

static void sim_describe(const struct io *io, char *buf, size_t size_bytes)
{
    snprintf(buf, size_bytes, "simulated disk, seed %llu", (unsigned long long)io->cfg.sim->seed);
}

static stk_status sim_drive_open(struct io *io, struct io_drive *d, struct io_file *first,
                                 struct stk_error *err)
{
    return STK_OK;
}
static void sim_drive_close(struct io *io, struct io_drive *d) {}
static void sim_region_add(struct io *io, const struct io_region *r) {}
static void sim_kick(struct io *io, struct io_drive *d) {}

const struct io_backend io_backend_sim = {
    .name = "sim",
    .open = sim_open,
    .close = sim_close,
    .drive_open = sim_drive_open,
    .drive_close = sim_drive_close,
    .file_open = sim_file_open,
    .file_close = sim_file_close,
    .region_add = sim_region_add,
    .describe = sim_describe,
    .start = sim_start,
    .kick = sim_kick,
    .quiesce = sim_quiesce,
};
