/* nvme/io_uring.c - the io_uring backend: one ring per drive, submitted in batches, completed
 * through an exec source.
 *
 * Owns the rings. `start` writes a submission entry, `kick` hands all of them over with one
 * system call (large ones by twos: APART_BYTES). There are never more parts under way than `depth` (io.c), the submission queue
 * has at least that many places and the completion queue twice as many, so neither can overflow.
 * A completion carries slot and generation of its part: an unknown one is a programmer error.
 *
 * OPTIONS OF THE RING: none of these. The lane submits, a thread of its own waits, and requests are
 * large: a 1 MiB read costs 6 us of CPU time in all, so there is little to save. Tried with this
 * structure on a busy virtual disk at depth 32:
 *   COOP_TASKRUN   4 KiB: 0.84 of the rate (median of 12 alternating pairs, which scatter from 0.3
 *                  to 1.7) and 1.08 of the CPU time per request; 1 MiB: no difference. Completions
 *                  then wait until the lane next enters the kernel, behind a long task perhaps.
 *   SINGLE_ISSUER, DEFER_TASKRUN   one thread must register, submit and reap; here these are three
 *                  (the application's, the lane, the source's): EEXIST.
 *   SQPOLL         a kernel thread spins on a core that compute needs (2.4 ms of CPU time per 1 MiB
 *                  request instead of 0.1), to save one system call per batch of about 20.
 *   IOPOLL         EOPNOTSUPP unless the driver was loaded with polling queues; never for buffered
 *                  files; and it refuses fsync, which durable steps need.
 * A registered ring descriptor is one thread's as well, and would save 50 ns a batch. */
#include "nvme/io_uring_impl.h"
#include "base/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#define RETRY_NS 1000000u
/* The kernel joins neighbouring requests of one submission of more than two into requests of up to
 * max_sectors_kb. Small ones gain by that (16 KiB: 1.26 times the rate); of parts from this size on
 * the drive would see a few huge requests where `depth` were asked for: 16 x 1 MiB became 4 x 4, at
 * 0.8 of the rate, and how many were joined depended on how completions came together. So such
 * parts are submitted by twos; a system call costs nothing beside them. */
#define APART_BYTES (128u << 10)
#define APART_BELOW_BYTES (4u << 20) /* the kernel's largest request as it is set by default: nothing is joined to it */
#define APART_PARTS 2u

/* --- is it allowed here? ---------------------------------------------------------------------- */

static int sysctl_disabled(void)
{
    char text[8] = "";
    int fd = sys_open("/proc/sys/kernel/io_uring_disabled", O_RDONLY, 0);
    if (fd < 0) return -1;
    int64_t n = sys_read_full(fd, text, sizeof text - 1, 0);
    sys_close(fd);
    return n > 0 && text[0] >= '0' && text[0] <= '9' ? text[0] - '0' : -1;
}

static stk_status refuse(struct stk_error *err, int os_errno)
{
    struct rlimit lim = { 0 };
    switch (os_errno) {
    case EPERM: case EACCES:
        return stk_error_set(err, STK_ERR_UNSUPPORTED, os_errno,
                             "io_uring refused: EPERM (seccomp, as in containers, or the sysctl "
                             "kernel.io_uring_disabled, now %d); "
                             "allow the io_uring system calls or set the sysctl to 0",
                             sysctl_disabled());
    case ENOSYS:
        return stk_error_set(err, STK_ERR_UNSUPPORTED, os_errno,
                             "io_uring refused: ENOSYS (the kernel, or a sandbox in front of it, "
                             "has no io_uring); "
                             "run on Linux 5.6 or newer");
    case ENOMEM:
        getrlimit(RLIMIT_MEMLOCK, &lim);
        return stk_error_set(err, STK_ERR_UNSUPPORTED, os_errno,
                             "io_uring refused: ENOMEM (RLIMIT_MEMLOCK is %llu KiB, and many "
                             "kernels count the rings of all processes of a user on it); raise it "
                             "with ulimit -l, to 64 KiB for each ring at least",
                             (unsigned long long)lim.rlim_cur / 1024);
    case EMFILE: case ENFILE:
        getrlimit(RLIMIT_NOFILE, &lim);
        return stk_error_set(err, STK_ERR_UNSUPPORTED, os_errno,
                             "io_uring refused: too many open files (RLIMIT_NOFILE is %llu); raise "
                             "it with ulimit -n",
                             (unsigned long long)lim.rlim_cur);
    default:
        return stk_error_set(err, STK_ERR_UNSUPPORTED, os_errno, "io_uring refused: %s",
                             strerror(os_errno));
    }
}

/* A ring may be allowed and every use of it denied (a seccomp list that lacks io_uring_enter).
 * 0, or an errno value. */
static int try_nop(struct io_uring *ring)
{
    struct io_uring_cqe *cqe;
    struct __kernel_timespec limit = { .tv_sec = 10 };
    io_uring_prep_nop(io_uring_get_sqe(ring));
    int rc = io_uring_submit(ring);
    if (rc < 0) return -rc;
    do rc = io_uring_wait_cqe_timeout(ring, &cqe, &limit);
    while (rc == -EINTR);
    if (rc < 0) return -rc;
    io_uring_cqe_seen(ring, cqe);
    return 0;
}

static stk_status ring_init(const struct io *io, struct io_uring *ring, struct stk_error *err)
{
    int rc = io_uring_queue_init(io->cfg.depth, ring, IORING_SETUP_CLAMP);
    if (rc < 0) return refuse(err, -rc);
    rc = try_nop(ring);
    if (rc != 0) {
        io_uring_queue_exit(ring);
        return refuse(err, rc);
    }
    if (ring->sq.ring_entries >= io->cfg.depth && ring->cq.ring_entries >= 2 * io->cfg.depth)
        return STK_OK;
    io_uring_queue_exit(ring);
    return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                         "io_uring gives no ring for %u transfers; ask for a smaller depth",
                         io->cfg.depth);
}

static stk_status uring_open(struct io *io, struct stk_error *err)
{
    static const int needed[] = { IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED,
                                  IORING_OP_WRITE_FIXED, IORING_OP_FSYNC };
    struct io_uring ring;
    STK_TRY(ring_init(io, &ring, err));
    struct io_uring_probe *probe = io_uring_get_probe_ring(&ring);
    bool all = probe != NULL;
    for (size_t i = 0; all && i < sizeof needed / sizeof *needed; i++)
        all = io_uring_opcode_supported(probe, needed[i]);
    if (probe) io_uring_free_probe(probe);
    io_uring_queue_exit(&ring);
    if (all) return STK_OK;
    return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                         "io_uring refused: the kernel's is too old (plain reads and writes are "
                         "missing); run on Linux 5.6 or newer");
}

static void uring_close(struct io *io) {}

/* --- completions (the source) ----------------------------------------------------------------- */

static uint32_t harvest(struct ring *r)
{
    struct io_uring_cqe *cqe;
    uint32_t n = 0;
    /* The entry is given back before its part is: the lane may start the next one at once, and
     * entries kept until the end of the loop would let the kernel's ring overflow (NVM-32). Peeking
     * also fetches what did overflow. */
    while (io_uring_peek_cqe(&r->uring, &cqe) == 0 && cqe) {
        (void)atomic_load_explicit(&r->starts, memory_order_acquire);
        /* slots count from 1: no tag at all is an unknown tag */
        uint64_t tag = cqe->user_data, slot = tag & UINT32_MAX;
        STK_ASSERT(slot >= 1 && slot <= r->io->cfg.depth);
        struct io_part *p = &r->drive->parts[slot - 1];
        STK_ASSERT(p->generation == tag >> 32);
        p->result = cqe->res;
        io_uring_cqe_seen(&r->uring, cqe);
        atomic_fetch_sub_explicit(&r->outstanding, 1, memory_order_release);
        io_part_done(p);
        n++;
    }
    return n;
}

static uint32_t source_poll(void *arg, bool block)
{
    struct ring *r = arg;
    uint32_t n = harvest(r);
    if (n || !block) return n;
    struct pollfd fds[2] = { { .fd = r->uring.ring_fd, .events = POLLIN },
                             { .fd = r->wake_fd, .events = POLLIN } };
    if (poll(fds, 2, -1) > 0 && (fds[1].revents & POLLIN)) {
        uint64_t count;
        /* an eventfd's counter; nothing to learn from it */
        (void)!read(r->wake_fd, &count, sizeof count);
    }
    return harvest(r);
}

static void source_wake(void *arg)
{
    struct ring *r = arg;
    uint64_t one = 1;
    /* fails only when the counter is full: then it is awake */
    (void)!write(r->wake_fd, &one, sizeof one);
}

static bool source_idle(void *arg)
{
    struct ring *r = arg;
    return atomic_load_explicit(&r->outstanding, memory_order_acquire) == 0;
}

/* --- drives and files ------------------------------------------------------------------------- */

/* NULL: none, or the drive is served by another backend. */
static struct ring *ring_of(const struct io_drive *d)
{
    return d->backend == &io_backend_uring ? d->impl : NULL;
}

static void ring_free(struct ring *r)
{
    if (r->wake_fd >= 0) sys_close(r->wake_fd);
    sys_free(r->prepared);
    sys_free(r);
}

static void uring_drive_close(struct io *io, struct io_drive *d)
{
    struct ring *r = d->impl;
    if (!r) return;
    exec_source_remove(io->cfg.ex, &r->source);
    /* Forked children hold the ring's descriptor, and with it what is registered: the arenas would
     * stay pinned until the last of them ends. With transfers under way it would wait for these. */
    if (atomic_load_explicit(&r->outstanding, memory_order_acquire) == 0) {
        (void)io_uring_unregister_buffers(&r->uring);
        (void)io_uring_unregister_files(&r->uring);
    }
    io_uring_queue_exit(&r->uring);
    ring_free(r);
    d->impl = NULL;
}

static stk_status uring_drive_open(struct io *io, struct io_drive *d, struct io_file *first,
                                   struct stk_error *err)
{
    struct ring *r = sys_calloc(1, sizeof *r);
    if (!r) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for an io_uring's state");
    r->io = io;
    r->drive = d;
    r->prepared = sys_calloc(io->cfg.depth, sizeof *r->prepared);
    r->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    stk_status status = STK_OK;
    if (!r->prepared)
        status = stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for an io_uring's state");
    else if (r->wake_fd < 0) status = refuse(err, errno);
    else status = ring_init(io, &r->uring, err);
    if (status != STK_OK) {
        ring_free(r);
        return status;
    }
    /* a child of fork that wrote to the ring's memory would be the end of it (NVM-35) */
    (void)io_uring_ring_dontfork(&r->uring);
    if (!io->cfg.no_registration) ring_register_setup(r, first);
    for (uint32_t i = 0; i < io->n_regions; i++) ring_register_region(r, &io->regions[i]);
    r->source = (struct exec_source){
        .poll = source_poll, .wake = source_wake, .idle = source_idle, .arg = r
    };
    char name[16];
    snprintf(name, sizeof name, "ring-%u", d->index);
    status = exec_source_add(io->cfg.ex, name, &r->source, err);
    if (status != STK_OK) {
        io_uring_queue_exit(&r->uring);
        ring_free(r);
        return status;
    }
    d->impl = r;
    return STK_OK;
}

static void uring_file_join(struct io *io, struct io_drive *d, struct io_file *f)
{
    if (ring_of(d)) ring_register_file(ring_of(d), f->index, f->fd);
}

static void uring_file_close(struct io *io, struct io_file *f)
{
    struct ring *r = ring_of(&io->drives[f->drive]);
    if (r && f->used) ring_register_file(r, f->index, -1);
    io_file_close_real(io, f);
}

static void uring_region_add(struct io *io, const struct io_region *region)
{
    for (uint32_t i = 0; i < IO_DRIVES_MAX; i++)
        if (ring_of(&io->drives[i])) ring_register_region(ring_of(&io->drives[i]), region);
}

/* --- parts (lane) ----------------------------------------------------------------------------- */

static void fail_part(struct io_part *p, int os_errno)
{
    p->result = -(int64_t)os_errno;
    io_part_done(p);
}

static void prepare(struct ring *r, struct io_uring_sqe *sqe, const struct io_part *p)
{
    int fd = r->fixed_files ? (int)p->file->index : p->file->fd;
    int buffer = p->op == IO_FLUSH ? -1 : ring_buffer_find(r, p->buf, p->size_bytes);
    unsigned size = (unsigned)p->size_bytes;
    if (p->op == IO_FLUSH) io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
    else if (p->op == IO_READ && buffer >= 0)
        io_uring_prep_read_fixed(sqe, fd, p->buf, size, p->offset_bytes, buffer);
    else if (p->op == IO_READ) io_uring_prep_read(sqe, fd, p->buf, size, p->offset_bytes);
    else if (buffer >= 0) io_uring_prep_write_fixed(sqe, fd, p->buf, size, p->offset_bytes, buffer);
    else io_uring_prep_write(sqe, fd, p->buf, size, p->offset_bytes);
    if (r->fixed_files) sqe->flags |= IOSQE_FIXED_FILE;
    /* after the prepare call, which clears it */
    io_uring_sqe_set_data64(sqe, (uint64_t)p->generation << 32 | (p->index + 1));
}

static void uring_kick(struct io *io, struct io_drive *d);

static void uring_start(struct io *io, struct io_part *p)
{
    struct ring *r = p->drive->impl;
    if (r->broken_errno) {
        fail_part(p, r->broken_errno);
        return;
    }
    struct io_uring_sqe *sqe = io_uring_get_sqe(&r->uring);
    STK_ASSERT(sqe && r->n_prepared < io->cfg.depth);
    prepare(r, sqe, p);
    r->prepared[r->n_prepared++] = p;
    if (r->n_prepared == APART_PARTS && p->size_bytes >= APART_BYTES && p->size_bytes < APART_BELOW_BYTES)
        uring_kick(io, p->drive);
}

/* The kernel took the `n` oldest prepared entries. */
static void taken(struct ring *r, uint32_t n)
{
    r->n_prepared -= n;
    memmove(r->prepared, r->prepared + n, r->n_prepared * sizeof *r->prepared);
}

/* A ring that refuses entries for a reason that will not pass: it is never submitted to again. */
static void give_up(struct ring *r, int os_errno)
{
    r->broken_errno = os_errno;
    uint32_t n = r->n_prepared;
    r->n_prepared = 0;
    atomic_fetch_sub_explicit(&r->outstanding, n, memory_order_release);
    for (uint32_t i = 0; i < n; i++) fail_part(r->prepared[i], os_errno);
}

static void uring_kick(struct io *io, struct io_drive *d)
{
    struct ring *r = d->impl;
    /* Counted before the kernel knows: a completion may be there before io_uring_submit returns. */
    uint32_t counted = r->n_prepared;
    atomic_fetch_add_explicit(&r->outstanding, counted, memory_order_relaxed);
    atomic_fetch_add_explicit(&r->starts, 1, memory_order_release);
    while (r->n_prepared > 0) {
        int rc = io_uring_submit(&r->uring);
        if (rc == -EINTR) continue;
        if (rc > 0) {
            taken(r, (uint32_t)rc);
            continue;
        }
        /* short of kernel memory: again a little later */
        if (rc == 0 || rc == -EAGAIN || rc == -EBUSY) break;
        give_up(r, -rc);
        return;
    }
    if (r->n_prepared == 0) return;
    atomic_fetch_sub_explicit(&r->outstanding, r->n_prepared, memory_order_release);
    d->kick = true;
    exec_post_at(io->cfg.lane, &io->pump, exec_now_ns(io->cfg.ex) + RETRY_NS);
}

static void uring_describe(const struct io *io, char *buf, size_t size_bytes)
{
    bool rings = false, files = true, buffers = true;
    for (uint32_t i = 0; i < IO_DRIVES_MAX; i++) {
        const struct ring *r = ring_of(&io->drives[i]);
        if (!r) continue;
        rings = true;
        files &= r->fixed_files;
        buffers &= r->fixed_buffers && r->n_buffers > 0;
    }
    files &= rings;
    buffers &= rings;
    snprintf(buf, size_bytes, "io_uring (by interrupt: polling costs a core), %s, %s",
             io_direct_text(io),
             files && buffers ? "registered buffers and files"
             : files          ? "registered files"
             : buffers        ? "registered buffers"
                              : "nothing registered");
}

const struct io_backend io_backend_uring = {
    .name = "io_uring",
    .open = uring_open,
    .close = uring_close,
    .drive_open = uring_drive_open,
    .drive_close = uring_drive_close,
    .file_open = io_file_open_real,
    .file_close = uring_file_close,
    .file_join = uring_file_join,
    .region_add = uring_region_add,
    .describe = uring_describe,
    .start = uring_start,
    .kick = uring_kick,
};
