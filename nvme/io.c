/* nvme/io.c - the queue in front of every backend: order by class, splitting, results, statistics,
 * drain.
 *
 * Owns requests from io_submit to `done`. Knows no system call and no disk: a backend (io_impl.h)
 * moves one part at a time. Runs on the io's lane, except what io.h gives to the application's
 * thread; the two meet in atomics, in the list of finished parts, and in the tasks by which the
 * application's thread asks the lane.
 *
 * A request is in exactly one list: its drive's `waiting[class]` while parts of it are still to be
 * started, `issued` while all its parts are with the backend, `finished` until done is called. */
#include "nvme/io_impl.h"
#include "base/sys.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { REQ_IDLE, REQ_WAITING, REQ_ISSUED, REQ_FINISHED };

static const char *const op_name[] = { "read", "write", "flush" };

/* --- lists ------------------------------------------------------------------------------------ */

static void queue_push(struct io_queue *q, struct io_req *req)
{
    req->next = NULL;
    req->prev = q->tail;
    if (q->tail) q->tail->next = req;
    else q->head = req;
    q->tail = req;
}

static void queue_remove(struct io_queue *q, struct io_req *req)
{
    if (req->prev) req->prev->next = req->next;
    else q->head = req->next;
    if (req->next) req->next->prev = req->prev;
    else q->tail = req->prev;
    req->next = req->prev = NULL;
}

static void count_add(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static struct io_queue *waiting_queue(struct io *io, const struct io_req *req)
{
    return &io->drives[io->files[req->file].drive].waiting[req->cls][req->op != IO_READ];
}

/* --- finishing -------------------------------------------------------------------------------- */

/* io_cfg.protect_writes: the whole pages of a write's buffer cannot be written to on its way. */
static void set_writable(const struct io *io, const struct io_req *req, bool writable)
{
    if (!io->cfg.protect_writes || req->op != IO_WRITE) return;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)req->buf + page - 1;
    uintptr_t to = (uintptr_t)req->buf + req->size_bytes;
    from -= from % page;
    to -= to % page;
    if (to > from)
        (void)mprotect((void *)from, to - from, PROT_READ | (writable ? PROT_WRITE : 0));
}

static void finish(struct io *io, struct io_req *req)
{
    req->state = REQ_FINISHED;
    queue_push(&io->finished, req);
    set_writable(io, req, true);
    struct io_counters *c = &io->count;
    if (req->status == STK_ERR_INTERRUPTED) count_add(&c->cancelled, 1);
    else if (req->status != STK_OK) count_add(&c->errors, 1);
    else if (req->op == IO_READ) count_add(&c->reads, 1);
    else if (req->op == IO_WRITE) count_add(&c->writes, 1);
    else count_add(&c->flushes, 1);
    count_add(req->op == IO_READ ? &c->read_bytes : &c->write_bytes, req->moved_bytes);
}

/* No further part of this request is started; it is finished when those under way have come back.
 */
static void stop(struct io *io, struct io_req *req, stk_status status, int os_errno)
{
    if (req->status == STK_OK) {
        req->status = status;
        req->os_errno = os_errno;
    }
    if (req->state != REQ_WAITING) return;
    queue_remove(waiting_queue(io, req), req);
    if (req->parts_in_flight == 0) {
        finish(io, req);
    } else {
        req->state = REQ_ISSUED;
        queue_push(&io->issued, req);
    }
}

/* --- starting parts --------------------------------------------------------------------------- */

static void part_start(struct io *io, struct io_part *p)
{
    STK_ASSERT(!p->started);
    p->started = true;
    p->generation++;
    p->drive->kick = true;
    p->drive->backend->start(io, p);
}

/* The most urgent class that waits; IO_CLASS_N: none. */
static int first_class(const struct io_drive *d, int writes)
{
    int c = 0;
    while (c < IO_CLASS_N && !d->waiting[c][writes].head) c++;
    return c;
}

static void count_start(struct io_drive *d, enum io_op op)
{
    if (op == IO_READ) {
        d->reads_in_flight++;
        d->reads_ahead = first_class(d, 1) < IO_CLASS_N ? d->reads_ahead + 1 : 0;
        d->reads_recent = d->depth;
    } else {
        d->writes_in_flight++;
        d->reads_ahead = 0;
        if (d->reads_recent > 0 && d->reads_in_flight == 0) d->reads_recent--;
    }
}

static uint64_t next_part_bytes(const struct io_req *req)
{
    uint64_t left = req->size_bytes - req->issued_bytes;
    return left < IO_TRANSFER_MAX ? left : IO_TRANSFER_MAX;
}

static void issue_one(struct io *io, struct io_drive *d, struct io_req *req)
{
    struct io_part *p = d->free_parts;
    d->free_parts = p->next;
    p->next = NULL;
    p->req = req;
    p->file = &io->files[req->file];
    p->op = req->op;
    p->size_bytes = p->flight_bytes = next_part_bytes(req);
    p->offset_bytes = req->offset_bytes + req->issued_bytes;
    p->buf = req->buf ? (uint8_t *)req->buf + req->issued_bytes : NULL;
    p->fruitless = 0;
    if (req->issued_bytes == 0) req->start_ns = exec_now_ns(io->cfg.ex);
    d->bytes_in_flight[p->op != IO_READ] += p->flight_bytes;
    req->issued_bytes += p->size_bytes;
    req->parts_in_flight++;
    count_start(d, p->op);
    if (req->issued_bytes == req->size_bytes) {
        queue_remove(waiting_queue(io, req), req);
        req->state = REQ_ISSUED;
        queue_push(&io->issued, req);
    }
    part_start(io, p);
}

/* Whether a part more may be in flight; the first one always may. */
static bool fits(uint64_t in_flight, const struct io_req *req, uint64_t limit)
{
    return limit == 0 || in_flight == 0 || in_flight + next_part_bytes(req) <= limit;
}

/* The request whose part goes next: the most urgent class, reads before writes within one. Two
 * rules stand beside that. Writes keep to write_depth as long as reads are on this drive, or
 * were not long ago: a burst of write-back must not fill every place just before a read that a
 * visit waits for. And reads that never end pass a waiting write only IO_READS_PER_WRITE times. */
static struct io_req *choose(const struct io *io, const struct io_drive *d)
{
    int r = first_class(d, 0), w = first_class(d, 1);
    bool reads = r < IO_CLASS_N || d->reads_in_flight > 0 || d->reads_recent > 0;
    bool write = w < IO_CLASS_N &&
                 (!reads || (d->writes_in_flight < d->write_depth &&
                             fits(d->bytes_in_flight[1], d->waiting[w][1].head,
                                  io->cfg.depth_bytes / 2)));
    if (write && (w < r || d->reads_ahead >= IO_READS_PER_WRITE)) return d->waiting[w][1].head;
    return r < IO_CLASS_N ? d->waiting[r][0].head : NULL;
}

static void note_full(struct io *io, struct io_drive *d, bool full)
{
    if (full == d->full) return;
    uint64_t now_ns = exec_now_ns(io->cfg.ex);
    if (full) d->full_since_ns = now_ns;
    else count_add(&io->count.full_ns, now_ns - d->full_since_ns);
    d->full = full;
}

static void issue_all(struct io *io)
{
    if (io->closing) return;
    for (uint32_t i = 0; i < IO_DRIVES_MAX; i++) {
        struct io_drive *d = &io->drives[i];
        if (!d->open) continue;
        struct io_req *req;
        while ((req = choose(io, d)) && d->free_parts &&
               fits(d->bytes_in_flight[0] + d->bytes_in_flight[1], req, io->cfg.depth_bytes))
            issue_one(io, d, req);
        note_full(io, d, req != NULL);
        if (d->kick) {
            d->kick = false;
            d->backend->kick(io, d);
        }
    }
}

static void pump_run(void *arg) { issue_all(arg); }

void io_pump_init(struct io *io) { exec_task_init(&io->pump, pump_run, io); }

/* --- results ---------------------------------------------------------------------------------- */

static void part_free(struct io *io, struct io_part *p, stk_status status, int os_errno)
{
    struct io_req *req = p->req;
    struct io_drive *d = p->drive;
    if (p->op == IO_READ) d->reads_in_flight--;
    else d->writes_in_flight--;
    d->bytes_in_flight[p->op != IO_READ] -= p->flight_bytes;
    p->req = NULL;
    p->file = NULL;
    p->next = d->free_parts;
    d->free_parts = p;
    STK_ASSERT(req->parts_in_flight > 0);
    req->parts_in_flight--;
    if (status != STK_OK) stop(io, req, status, os_errno); /* may finish it, if it was waiting */
    if (req->state == REQ_ISSUED && req->parts_in_flight == 0) {
        queue_remove(&io->issued, req);
        finish(io, req);
    }
}

/* Error, short and complete are three branches. */
static void part_result(struct io *io, struct io_part *p)
{
    struct io_req *req = p->req;
    int64_t result = p->result;
    STK_ASSERT(p->started && req && req->state != REQ_IDLE && req->state != REQ_FINISHED);
    p->started = false;
    uint64_t progress = 0;
    if (result == -EINTR || result == -EAGAIN) {
        count_add(&io->count.retries, 1);
    } else if (result < 0) {
        part_free(io, p, STK_ERR_IO, (int)-result);
        return;
    } else if (p->op == IO_FLUSH || (uint64_t)result == p->size_bytes) {
        req->moved_bytes += p->size_bytes;
        if (p->drive->full) count_add(&io->count.full_bytes, p->size_bytes);
        part_free(io, p, STK_OK, 0);
        return;
    } else {
        STK_ASSERT((uint64_t)result < p->size_bytes);
        /* What lies beyond the last aligned place is moved again: an unaligned retry would be
         * refused (NVM-19). */
        progress = (uint64_t)result & ~(uint64_t)(p->file->retry_align - 1);
        count_add(&io->count.short_transfers, 1);
        count_add(&io->count.retries, 1);
    }
    p->fruitless = progress ? 0 : p->fruitless + 1;
    req->moved_bytes += progress;
    if (p->drive->full) count_add(&io->count.full_bytes, progress);
    /* a part of a stopped request, or of a stopped io, is not tried again */
    if (req->status != STK_OK || io->closing || p->fruitless >= IO_FRUITLESS_MAX) {
        part_free(io, p, STK_ERR_IO, result < 0 ? (int)-result : 0);
        return;
    }
    req->retries++;
    p->buf += progress;
    p->offset_bytes += progress;
    p->size_bytes -= progress;
    part_start(io, p);
}

void io_part_done(struct io_part *p)
{
    struct io *io = p->io;
    struct io_part *head = atomic_load_explicit(&io->finished_parts, memory_order_relaxed);
    do p->next = head;
    while (!atomic_compare_exchange_weak_explicit(&io->finished_parts, &head, p,
                                                  memory_order_acq_rel, memory_order_relaxed));
    exec_post(io->cfg.lane, io->cfg.notify);
}

static void take_parts(struct io *io)
{
    struct io_part *p = atomic_exchange_explicit(&io->finished_parts, NULL, memory_order_acq_rel),
                   *in_order = NULL;
    while (p) { /* the list is newest first */
        struct io_part *next = p->next;
        p->next = in_order;
        in_order = p;
        p = next;
    }
    while (in_order) {
        p = in_order;
        in_order = p->next;
        p->next = NULL;
        part_result(io, p);
    }
}

uint32_t io_reap(struct io *io, uint32_t max)
{
    STK_ASSERT(exec_on_lane(io->cfg.lane));
    take_parts(io);
    issue_all(io);
    uint32_t n = 0;
    for (; n < max && io->finished.head; n++) {
        struct io_req *req = io->finished.head;
        queue_remove(&io->finished, req);
        req->state = REQ_IDLE;
        req->done_ns = exec_now_ns(io->cfg.ex);
        /* from here on the request is the caller's again: it may be submitted anew or gone */
        req->done(req);
        if (atomic_fetch_sub_explicit(&io->in_flight, 1, memory_order_acq_rel) == 1) {
            count_add(&io->count.busy_ns, exec_now_ns(io->cfg.ex) - io->busy_since_ns);
            exec_event_set(&io->drained);
        }
    }
    if (io->finished.head) exec_post(io->cfg.lane, io->cfg.notify);
    return n;
}

/* --- submit, cancel --------------------------------------------------------------------------- */

stk_status io_check_owner(const struct io *io, struct stk_error *err)
{
    if (io->owner_mark ? *io->owner_mark : getpid() == io->owner_pid) return STK_OK;
    return stk_error_set(err, STK_ERR_STATE, 0,
                         "transfers were set up by process %d, and this is a child that it forked: "
                         "open anew here, or leave them to the parent",
                         io->owner_pid);
}

static stk_status check_request(const struct io *io, const struct io_req *req,
                                struct stk_error *err)
{
    if (io->closing)
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "a transfer was submitted while its io is being closed");
    if (req->file >= IO_FILES_MAX || !io->files[req->file].used)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "a %s names file number %u, which is not open",
                             op_name[req->op], req->file);
    if (req->op == IO_FLUSH) return STK_OK;
    uint64_t mask = io->align - 1;
    if (req->size_bytes == 0 || !req->buf ||
        (((uintptr_t)req->buf | req->offset_bytes | req->size_bytes) & mask))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s: a %s of %llu bytes at byte %llu with its buffer at %p: all three "
                             "must be multiples of %u and "
                             "the size above 0",
                             io->files[req->file].path, op_name[req->op],
                             (unsigned long long)req->size_bytes,
                             (unsigned long long)req->offset_bytes, req->buf, io->align);
    return STK_OK;
}

stk_status io_submit(struct io *io, struct io_req *req, struct stk_error *err)
{
    STK_TRY(io_check_owner(io, err));
    STK_ASSERT(exec_on_lane(io->cfg.lane));
    STK_ASSERT(req->state == REQ_IDLE && req->cls < IO_CLASS_N && req->done);
    STK_TRY(check_request(io, req, err));
    if (req->op == IO_FLUSH) {
        req->buf = NULL;
        req->size_bytes = 0;
    }
    req->status = STK_OK;
    req->os_errno = 0;
    req->moved_bytes = req->issued_bytes = 0;
    req->start_ns = 0;
    req->parts_in_flight = req->retries = 0;
    req->submit_ns = exec_now_ns(io->cfg.ex);
    req->state = REQ_WAITING;
    queue_push(waiting_queue(io, req), req);
    set_writable(io, req, false);
    uint64_t now = atomic_fetch_add_explicit(&io->in_flight, 1, memory_order_relaxed) + 1;
    if (now == 1) io->busy_since_ns = req->submit_ns;
    if (now > atomic_load_explicit(&io->count.in_flight_max, memory_order_relaxed))
        atomic_store_explicit(&io->count.in_flight_max, now, memory_order_relaxed);
    exec_post(io->cfg.lane, &io->pump);
    return STK_OK;
}

void io_cancel(struct io *io, struct io_req *req)
{
    STK_ASSERT(exec_on_lane(io->cfg.lane));
    if (req->state != REQ_WAITING) return;
    stop(io, req, STK_ERR_INTERRUPTED, 0);
    if (req->state == REQ_FINISHED) exec_post(io->cfg.lane, io->cfg.notify);
}

uint64_t io_in_flight(const struct io *io)
{
    return atomic_load_explicit(&io->in_flight, memory_order_acquire);
}

/* --- drain ------------------------------------------------------------------------------------ */

static const struct io_req *older(const struct io_req *a, const struct io_req *b)
{
    for (; b; b = b->next)
        if (!a || b->submit_ns < a->submit_ns) a = b;
    return a;
}

/* On the lane: puts the oldest request into words. */
static void describe_oldest(void *arg)
{
    struct io *io = arg;
    const struct io_req *r = older(NULL, io->issued.head);
    for (uint32_t i = 0; i < IO_DRIVES_MAX; i++)
        for (int c = 0; c < IO_CLASS_N; c++)
            for (int w = 0; w < 2; w++) r = older(r, io->drives[i].waiting[c][w].head);
    r = older(r, io->finished.head);
    if (r)
        snprintf(io->oldest, sizeof io->oldest,
                 "the oldest is a %s of %llu bytes at byte %llu of %.200s, %s", op_name[r->op],
                 (unsigned long long)r->size_bytes, (unsigned long long)r->offset_bytes,
                 io->files[r->file].path,
                 r->state == REQ_WAITING  ? "not yet with the kernel"
                 : r->state == REQ_ISSUED ? "with the kernel"
                                          : "not reaped");
    else
        snprintf(io->oldest, sizeof io->oldest, "none is left now");
    exec_event_set(&io->answered);
}

stk_status io_drain(struct io *io, uint64_t deadline_ns, struct stk_error *err)
{
    STK_TRY(io_check_owner(io, err));
    stk_status status = STK_OK;
    for (;;) {
        exec_event_reset(&io->drained);
        if (io_in_flight(io) == 0) return STK_OK;
        status = exec_event_wait(&io->drained, deadline_ns, NULL);
        if (status != STK_OK) break;
    }
    if (status != STK_ERR_STALLED)
        return stk_error_set(err, status, 0, "waiting for transfers failed");
    uint64_t left = io_in_flight(io);
    if (left == 0) return STK_OK;
    exec_event_reset(&io->answered);
    exec_task_init(&io->ask, describe_oldest, io);
    exec_post(io->cfg.lane, &io->ask);
    exec_event_wait(&io->answered, UINT64_MAX, NULL); /* the lane only moves pointers: it answers */
    return stk_error_set(err, STK_ERR_STALLED, 0,
                         "%llu transfers have not completed in time; %s; the drive or its driver "
                         "may be stuck (see the kernel log)",
                         (unsigned long long)left, io->oldest);
}

void io_stats_read(const struct io *io, struct io_stats *out)
{
    /* atomic loads want a non-const pointer in C11 */
    struct io_counters *c = (struct io_counters *)(uintptr_t)&io->count;
#define READ(field) out->field = atomic_load_explicit(&c->field, memory_order_relaxed)
    READ(read_bytes); READ(write_bytes); READ(reads); READ(writes); READ(flushes);
    READ(short_transfers);
    READ(retries);
    READ(cancelled);
    READ(errors);
    READ(busy_ns);
    READ(full_ns);
    READ(full_bytes);
    READ(in_flight_max);
#undef READ
}
