/* tests/nvme/test_uring.c - what only the io_uring backend has: refused submissions, foreign
 * completions, a completion queue that overflows, system calls per request, regions and requests
 * beyond the kernel's limits. The calls into the kernel are wrapped (the linker's --wrap, see
 * meson.build), so that they are counted, looked at and answered by script. Built only with
 * liburing. */
#include "tests/nvme/io_batch.h"
#include "nvme/io_uring_impl.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>

#define MIB (1024u * 1024u)

#if defined(__SANITIZE_THREAD__)
#define THREAD_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREAD_SANITIZED 1
#endif
#endif
#ifndef THREAD_SANITIZED
#define THREAD_SANITIZED 0
#endif

enum { N = 40, SIZE = 8192 };

int __real_io_uring_submit(struct io_uring *ring);
int __wrap_io_uring_submit(struct io_uring *ring);
int __real_io_uring_queue_init(unsigned n, struct io_uring *ring, unsigned flags);
int __wrap_io_uring_queue_init(unsigned n, struct io_uring *ring, unsigned flags);
int __real_poll(struct pollfd *fds, nfds_t n, int timeout);
int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout);
int __real_io_uring_register_buffers_update_tag(struct io_uring *ring, unsigned at,
                                                const struct iovec *v, const __u64 *tags,
                                                unsigned n);
int __wrap_io_uring_register_buffers_update_tag(struct io_uring *ring, unsigned at,
                                                const struct iovec *v, const __u64 *tags,
                                                unsigned n);

static struct { int answers[8]; uint32_t n, at; } script;

/* Of the submitting lane. */
static struct {
    uint64_t enters, entries, largest_bytes;
    uint32_t outstanding_max, large_max; /* of one call: entries of 128 KiB and more */
    bool overflowed;
} seen;
static _Atomic uint64_t polls;

/* Entries of large regions are written down instead of pinned. */
static struct { bool on; uint32_t n; struct iovec v[64]; } pieces;

int __wrap_io_uring_submit(struct io_uring *ring)
{
    const struct io_uring_sq *sq = &ring->sq; /* the trial of a new ring is not ours */
    if (sq->sqe_head != sq->sqe_tail &&
        sq->sqes[sq->sqe_head & sq->ring_mask].opcode == IORING_OP_NOP)
        return __real_io_uring_submit(ring);
    if (script.at < script.n) return script.answers[script.at++];
    struct ring *r = (struct ring *)((char *)ring - offsetof(struct ring, uring));
    uint32_t large = 0;
    for (unsigned at = ring->sq.sqe_head; at != ring->sq.sqe_tail; at++) {
        uint32_t len = ring->sq.sqes[at & ring->sq.ring_mask].len;
        if (len > seen.largest_bytes) seen.largest_bytes = len;
        large += len >= 128 * 1024;
        seen.entries++;
    }
    if (large > seen.large_max) seen.large_max = large;
    seen.enters++;
    uint32_t outstanding = atomic_load(&r->outstanding);
    if (outstanding > seen.outstanding_max) seen.outstanding_max = outstanding;
    int rc = __real_io_uring_submit(ring);
    seen.overflowed |= (*ring->sq.kflags & IORING_SQ_CQ_OVERFLOW) != 0;
    return rc;
}

/* The rings from this one on are refused; 0: none. */
static struct { uint32_t from, n; } no_ring;

int __wrap_io_uring_queue_init(unsigned n, struct io_uring *ring, unsigned flags)
{
    no_ring.n++;
    if (no_ring.from && no_ring.n >= no_ring.from) return -ENOMEM;
    return __real_io_uring_queue_init(n, ring, flags);
}

int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout)
{
    atomic_fetch_add(&polls, 1);
    return __real_poll(fds, n, timeout);
}

int __wrap_io_uring_register_buffers_update_tag(struct io_uring *ring, unsigned at,
                                                const struct iovec *v, const __u64 *tags,
                                                unsigned n)
{
    if (!pieces.on || v->iov_len < 64 * MIB)
        return __real_io_uring_register_buffers_update_tag(ring, at, v, tags, n);
    if (pieces.n < 64) pieces.v[pieces.n] = *v;
    pieces.n++;
    return (int)n;
}

struct call {
    struct world *w;
    struct io_req reqs[N];
    uint32_t done, ok, failed;
    int last_errno;
};

static void call_done(struct io_req *req)
{
    struct call *c = req->owner;
    c->done++;
    if (req->status == STK_OK) c->ok++;
    else c->failed++;
    if (req->status != STK_OK) c->last_errno = req->os_errno;
}

static void call_start(void *arg)
{
    struct call *c = arg;
    struct stk_error err = { 0 };
    for (uint32_t i = 0; i < N; i++) {
        c->reqs[i].done = call_done;
        c->reqs[i].owner = c;
        CHECK(io_submit(c->w->io, &c->reqs[i], &err) == STK_OK);
    }
}

/* N writes; the first submissions get these answers. */
static void scripted(enum exec_kind ex, const int *answers, uint32_t n, struct call *c)
{
    struct world w = { .cfg = { .depth = 8 } };
    struct stk_error err = { 0 };
    uint32_t file;
    memset(&script, 0, sizeof script);
    CHECK_OK(world_open(&w, IO_URING, ex, test_seed(), &err), &err);
    CHECK_OK(world_file(&w, "a", N * SIZE, 0, &file, &err), &err);
    uint8_t *buf = sys_mmap(N * SIZE, false);
    *c = (struct call){ .w = &w };
    for (uint32_t i = 0; i < N; i++)
        c->reqs[i] = (struct io_req){ .op = IO_WRITE,
                                      .file = file,
                                      .buf = buf + i * SIZE,
                                      .offset_bytes = i * SIZE,
                                      .size_bytes = SIZE };
    memcpy(script.answers, answers, n * sizeof *answers);
    script.n = n;
    world_run(&w, call_start, c);
    CHECK_OK(io_drain(w.io, UINT64_MAX, &err), &err);
    CHECK(c->done == N && script.at == n && io_in_flight(w.io) == 0);
    world_close(&w);
    sys_munmap(buf, N * SIZE);
}

TEST(uring_submission_refused_for_a_while)
{
    static const int answers[] = { -EAGAIN, -EINTR, -EBUSY, 0, -EINTR, -EAGAIN };
    struct call c;
    if (!uring_allowed()) SKIP("no io_uring here");
    for (int ex = 0; ex < 2; ex++) {
        scripted(ex ? EXEC_SIM : EXEC_THREADS, answers, 6, &c);
        CHECK(c.ok == N);
    }
}

TEST(uring_submission_refused_for_good)
{
    static const int answers[] = { -EAGAIN, -EBADF };
    struct call c;
    if (!uring_allowed()) SKIP("no io_uring here");
    for (int ex = 0; ex < 2; ex++) {
        scripted(ex ? EXEC_SIM : EXEC_THREADS, answers, 2, &c);
        CHECK(c.failed == N && c.last_errno == EBADF); /* each hears of it, none hangs */
    }
}

/* A completion that nobody asked for: tag 0, a tag beyond all slots, a slot's old generation. */
static void foreign(uint64_t tag)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    uint32_t file;
    if (world_open(&w, IO_URING, EXEC_SIM, 1, &err) != STK_OK ||
        world_file(&w, "a", SIZE, 0, &file, &err) != STK_OK)
        _exit(1);
    sys_remove_tree(w.dir);
    struct ring *r = w.io->drives[0].impl;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&r->uring);
    io_uring_prep_nop(sqe);
    io_uring_sqe_set_data64(sqe, tag);
    if (!freopen("/dev/null", "w", stderr) || __real_io_uring_submit(&r->uring) != 1) _exit(1);
    r->source.poll(r->source.arg, true);
    _exit(0);
}

TEST(uring_nvm_34_unknown_tag_is_fatal)
{
    static const uint64_t tags[] = { 0, 1000, 7ull << 32 | 1 };
    int st;
    if (!uring_allowed()) SKIP("no io_uring here");
    for (int i = 0; i < 3; i++) {
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) foreign(tags[i]);
        CHECK(waitpid(pid, &st, 0) == pid && WIFSIGNALED(st) && WTERMSIG(st) == SIGABRT);
    }
}

/* NVM-28: io_open's trial ring is given, and then none for the first drive, the second or the
 * third: these are served by posix threads, the others keep their rings, and the reason is there
 * once. */
static void rings_run_out(uint32_t from, enum exec_kind ex)
{
    enum { DRIVES = 3 };
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct io_req reqs[2 * DRIVES];
    memset(&script, 0, sizeof script);
    no_ring.n = 0;
    no_ring.from = from;
    uint8_t *buf = sys_mmap(2 * DRIVES * MIB, false);
    CHECK_OK(world_open(&w, IO_AUTO, ex, test_seed(), &err), &err);
    io_buffer_register(w.io, buf, 2 * DRIVES * MIB);
    for (int op = 0; op < 2; op++) {
        for (uint32_t i = 0; i < 2 * DRIVES; i++) {
            uint32_t file = i % DRIVES;
            char name[2] = { (char)('a' + file), 0 };
            if (op == 0 && i < DRIVES)
                CHECK_OK(world_file(&w, name, 2 * MIB, i, &file, &err), &err);
            if (op == 0) fill(buf + i * MIB, MIB, i);
            else memset(buf + i * MIB, 0, MIB);
            reqs[i] = (struct io_req){ .op = op ? IO_READ : IO_WRITE,
                                       .file = file,
                                       .buf = buf + i * MIB,
                                       .offset_bytes = i / DRIVES * MIB,
                                       .size_bytes = MIB };
        }
        CHECK_OK(run_batch(&w, reqs, 2 * DRIVES, &err), &err);
        for (uint32_t i = 0; i < 2 * DRIVES; i++)
            CHECK(reqs[i].status == STK_OK && filled(buf + i * MIB, MIB, i) == true);
    }
    const char *text = io_describe(w.io);
    CHECK(io_kind_of(w.io) == (from <= 2 ? IO_POSIX : IO_URING));
    CHECK(strstr(text, "ENOMEM") && strstr(text, from <= 2 ? "posix threads (16)" : "drive 2 is "
                                                                                   "served"));
    printf("# %s\n", text);
    no_ring.from = 0;
    world_close(&w);
    sys_munmap(buf, 2 * DRIVES * MIB);
}

TEST(uring_nvm_28_drives_without_a_ring)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    for (uint32_t from = 1; from <= 4; from++) {
        rings_run_out(from, EXEC_THREADS);
        rings_run_out(from, EXEC_SIM);
    }
}

/* --- the completion queue --------------------------------------------------------------------- */

/* NVM-32: many small requests through a ring of 64 and a slow reaper: each completes once, and
 * what is under way never exceeds the completion queue, so that it cannot overflow. */
enum { CROWD = 512 };

struct rush {
    struct world *w;
    struct io_req reqs[CROWD];
    uint32_t submitted[CROWD], done[CROWD];
    uint64_t n, left;
    struct exec_event end;
};

static void rush_submit(struct rush *r, struct io_req *req)
{
    struct stk_error err = { 0 };
    if (r->left == 0) return;
    r->left--;
    r->submitted[req - r->reqs]++;
    CHECK(io_submit(r->w->io, req, &err) == STK_OK);
}

static void rush_done(struct io_req *req)
{
    struct rush *r = req->owner;
    r->done[req - r->reqs]++;
    CHECK(req->status == STK_OK && req->moved_bytes == 512);
    if (--r->n == 0) exec_event_set(&r->end);
    rush_submit(r, req);
}

static void rush_start(void *arg)
{
    struct rush *r = arg;
    for (uint32_t i = 0; i < CROWD; i++) rush_submit(r, &r->reqs[i]);
}

static void rush(enum exec_kind ex, bool buffered, uint64_t n)
{
    struct world w = { .cfg = { .depth = 64, .buffered = buffered }, .reap_max = 2 };
    struct stk_error err = { 0 };
    uint32_t file;
    CHECK_OK(world_open(&w, IO_URING, ex, test_seed(), &err), &err);
    CHECK_OK(world_file(&w, "a", CROWD * 512, 0, &file, &err), &err);
    uint8_t *buf = sys_mmap(CROWD * 512, true);
    struct io_req wr = { .op = IO_WRITE, .file = file, .buf = buf, .size_bytes = CROWD * 512 };
    fill(buf, CROWD * 512, 1);
    CHECK_OK(one(&w, &wr, &err), &err);
    if (io_align(w.io) > 512) SKIP("sectors are larger than 512 bytes here");
    memset(buf, 0, CROWD * 512);
    memset(&seen, 0, sizeof seen);
    struct rush *r = calloc(1, sizeof *r);
    *r = (struct rush){ .w = &w, .n = n, .left = n };
    exec_event_init(w.ex, &r->end);
    for (uint32_t i = 0; i < CROWD; i++)
        r->reqs[i] = (struct io_req){ .op = IO_READ,
                                      .file = file,
                                      .buf = buf + i * 512,
                                      .offset_bytes = i * 512,
                                      .size_bytes = 512,
                                      .done = rush_done,
                                      .owner = r };
    world_run(&w, rush_start, r);
    CHECK_OK(exec_event_wait(&r->end, UINT64_MAX, &err), &err);
    CHECK_OK(io_drain(w.io, UINT64_MAX, &err), &err);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < CROWD; i++) {
        CHECK(r->submitted[i] == r->done[i]);
        sum += r->done[i];
    }
    struct ring *ring = w.io->drives[0].impl;
    CHECK(sum == n && filled(buf, CROWD * 512, 1));
    CHECK(seen.outstanding_max <= 64 && ring->uring.cq.ring_entries >= 128);
    CHECK(!seen.overflowed && *ring->uring.cq.koverflow == 0);
    printf("# %llu requests, %u under way at most, %llu submissions\n", (unsigned long long)n,
           seen.outstanding_max, (unsigned long long)seen.enters);
    free(r);
    world_close(&w);
    sys_munmap(buf, CROWD * 512);
}

TEST(uring_nvm_32_many_small_requests)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    const char *soak = getenv("STK_SOAK");
    uint64_t n = soak && *soak && *soak != '0' ? 1000000 : 20000;
    memset(&script, 0, sizeof script);
    rush(EXEC_THREADS, false, n);
    rush(EXEC_THREADS, true, n);
    rush(EXEC_SIM, true, n);
}

/* The queue is filled behind the io's back, so that the completions of its requests overflow
 * into the kernel's list; room is made, and all of them arrive. */
enum { SMALL_DEPTH = 8 };

struct flooded { struct world *w; struct batch batch; uint32_t stuffed; bool flag; };

static void overflow_start(void *arg)
{
    struct flooded *f = arg;
    struct ring *r = f->w->io->drives[0].impl;
    struct io_uring_sqe *sqe;
    uint32_t places = r->uring.cq.ring_entries;
    while (f->stuffed < places) {
        for (; f->stuffed < places && (sqe = io_uring_get_sqe(&r->uring)); f->stuffed++) {
            io_uring_prep_nop(sqe);
            io_uring_sqe_set_data64(sqe, 0);
        }
        if (__real_io_uring_submit(&r->uring) <= 0) return;
    }
    batch_submit(&f->batch);
    io_reap(f->w->io, 0); /* starts what waits, now */
    for (int i = 0; i < 10000000 && !f->flag; i++) {
        f->flag = (*r->uring.sq.kflags & IORING_SQ_CQ_OVERFLOW) != 0;
        sched_yield();
    }
    io_uring_cq_advance(&r->uring, places);
}

TEST(uring_nvm_32_what_overflowed_is_fetched)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    for (uint32_t plain = 0; plain < 2; plain++) {
        struct world w = { .cfg = { .depth = SMALL_DEPTH, .buffered = plain != 0 } };
        struct stk_error err = { 0 };
        struct io_req reqs[3 * SMALL_DEPTH] = { 0 };
        uint32_t file;
        memset(&script, 0, sizeof script);
        CHECK_OK(world_open(&w, IO_URING, EXEC_SIM, test_seed(), &err), &err);
        CHECK_OK(world_file(&w, "a", MIB, 0, &file, &err), &err);
        uint8_t *buf = sys_mmap(MIB, false);
        for (uint32_t i = 0; i < 3 * SMALL_DEPTH; i++)
            reqs[i] = (struct io_req){ .op = IO_WRITE,
                                       .file = file,
                                       .buf = buf + i * 4096,
                                       .offset_bytes = i * 4096,
                                       .size_bytes = 4096 };
        struct flooded f = { .w = &w, .batch = { .w = &w, .reqs = reqs, .n = 3 * SMALL_DEPTH } };
        world_run(&w, overflow_start, &f);
        CHECK(f.stuffed == 2 * SMALL_DEPTH && f.flag);
        CHECK_OK(io_drain(w.io, UINT64_MAX, &err), &err);
        CHECK(f.batch.done == 3 * SMALL_DEPTH);
        for (uint32_t i = 0; i < 3 * SMALL_DEPTH; i++) CHECK(reqs[i].status == STK_OK);
        struct ring *r = w.io->drives[0].impl;
        CHECK(!(*r->uring.sq.kflags & IORING_SQ_CQ_OVERFLOW) && *r->uring.cq.koverflow == 0);
        world_close(&w);
        sys_munmap(buf, MIB);
    }
}

/* --- system calls ----------------------------------------------------------------------------- */

/* All small parts that one task submits go to the kernel in one call, and so does what one reap
 * makes room for; of large ones never more than two, which it would join, unless they are as large as its
 * largest request. Buffered reads of cached bytes complete inside the call, so the count is exact. */
TEST(uring_one_system_call_for_many_parts)
{
    enum { MANY = 512, DEPTH = 32, LARGE = 4 * IO_TRANSFER_MAX };
    if (!uring_allowed()) SKIP("no io_uring here");
    struct world w = { .cfg = { .depth = DEPTH, .buffered = true }, .reap_max = DEPTH };
    struct stk_error err = { 0 };
    uint32_t file;
    memset(&script, 0, sizeof script);
    CHECK_OK(world_open(&w, IO_URING, EXEC_SIM, test_seed(), &err), &err);
    CHECK_OK(world_file(&w, "a", LARGE, 0, &file, &err), &err);
    uint8_t *buf = sys_mmap(LARGE, false);
    struct io_req wr = { .op = IO_WRITE, .file = file, .buf = buf, .size_bytes = LARGE };
    CHECK_OK(one(&w, &wr, &err), &err);
    memset(&seen, 0, sizeof seen);
    struct io_req rd = { .op = IO_READ, .file = file, .buf = buf, .size_bytes = LARGE };
    CHECK_OK(one(&w, &rd, &err), &err);
    CHECK(seen.enters == 1 && seen.entries == 4 && seen.largest_bytes == IO_TRANSFER_MAX);
    struct io_req *reqs = calloc(MANY, sizeof *reqs);
    for (uint32_t i = 0; i < MANY; i++)
        reqs[i] = (struct io_req){ .op = IO_READ,
                                   .file = file,
                                   .buf = buf + i * 4096,
                                   .offset_bytes = i * 4096,
                                   .size_bytes = 4096 };
    memset(&seen, 0, sizeof seen);
    atomic_store(&polls, 0);
    CHECK_OK(run_batch(&w, reqs, MANY, &err), &err);
    printf("# %d requests, depth %d: %llu io_uring_enter, %llu poll\n", MANY, DEPTH,
           (unsigned long long)seen.enters, (unsigned long long)polls);
    CHECK(seen.entries == MANY);
    /* a cached page may have left in between: a little slack, far from one call each */
    CHECK(seen.enters >= MANY / DEPTH && seen.enters <= 2 * MANY / DEPTH);
    CHECK(polls <= seen.enters);
    for (uint32_t i = 0; i < DEPTH; i++)
        reqs[i] = (struct io_req){ .op = IO_READ,
                                   .file = file,
                                   .buf = buf + (uint64_t)i * LARGE / DEPTH,
                                   .offset_bytes = (uint64_t)i * LARGE / DEPTH,
                                   .size_bytes = LARGE / DEPTH };
    memset(&seen, 0, sizeof seen);
    CHECK_OK(run_batch(&w, reqs, DEPTH, &err), &err);
    CHECK(seen.entries == DEPTH && seen.enters == DEPTH / 2 && seen.large_max == 2);
    free(reqs);
    world_close(&w);
    sys_munmap(buf, LARGE);
}

/* --- beyond the kernel's limits --------------------------------------------------------------- */

/* NVM-26: 8 GiB of address space; the kernel takes at most 1 GiB in one entry. */
TEST(uring_nvm_26_eight_gib_in_pieces)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    struct world w = { 0 };
    struct stk_error err = { 0 };
    uint32_t file;
    uint64_t size = 8ull << 30, sum = 0;
    memset(&script, 0, sizeof script);
    CHECK_OK(world_open(&w, IO_URING, EXEC_THREADS, 1, &err), &err);
    CHECK_OK(world_file(&w, "a", MIB, 0, &file, &err), &err);
    uint8_t *base = mmap(NULL, size, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(base != MAP_FAILED);
    pieces.on = true;
    pieces.n = 0;
    io_buffer_register(w.io, base, size);
    pieces.on = false;
    CHECK(pieces.n == 8);
    for (uint32_t i = 0; i < pieces.n && i < 64; i++) {
        CHECK(pieces.v[i].iov_base == base + sum && pieces.v[i].iov_len <= 1ull << 30);
        CHECK(((uintptr_t)pieces.v[i].iov_base & 4095) == 0);
        sum += pieces.v[i].iov_len;
    }
    CHECK(sum == size);
    struct ring *r = w.io->drives[0].impl;
    CHECK(ring_buffer_find(r, base, 4096) == 0);
    CHECK(ring_buffer_find(r, base + size - 4096, 4096) == 7);
    /* a transfer across two entries goes without them, rather than out of bounds */
    CHECK(ring_buffer_find(r, base + (1ull << 30) - 4096, 8192) == -1);
    CHECK(ring_buffer_find(r, base + size - 4096, 8192) == -1);
    CHECK(ring_buffer_find(r, base - 4096, 4096) == -1);
    world_close(&w);
    munmap(base, size);
}

/* A buffer of any size in little memory: 8 MiB behind every place but the windows looked at. */
enum { N_WINDOWS = 5, WINDOW_BYTES = 64 << 10 };

static uint8_t *wide_buffer(uint64_t size_bytes, const uint64_t at[N_WINDOWS])
{
    int fd = memfd_create("wide", 0);
    uint8_t *base = mmap(NULL, size_bytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fd < 0 || base == MAP_FAILED || ftruncate(fd, 8 * MIB) != 0) return NULL;
    int prot = PROT_READ | PROT_WRITE;
    for (uint64_t i = 0; i < size_bytes; i += 8 * MIB) {
        uint64_t n = size_bytes - i < 8 * MIB ? size_bytes - i : 8 * MIB;
        if (mmap(base + i, n, prot, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return NULL;
    }
    close(fd);
    for (int i = 0; i < N_WINDOWS; i++)
        if (mmap(base + at[i], WINDOW_BYTES, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0)
            == MAP_FAILED)
            return NULL;
    return base;
}

/* NVM-13, NVM-14: one request, larger than the kernel moves in one call (0x7ffff000 bytes) and than
 * 32 bits count. A sparse file holds bytes where one looks: at the ends and around 1 and 2 GiB. */
static void wide(enum io_kind io, uint64_t size_bytes)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    uint32_t file;
    uint64_t tail = ((size_bytes + 4095) & ~4095ull) - WINDOW_BYTES; /* its window holds the end */
    uint64_t at[N_WINDOWS] = { 0, (1ull << 30) - 8192, (1ull << 31) - 2 * MIB,
                               size_bytes > (1ull << 31) + MIB ? (1ull << 31) - 8192 : 4 * MIB,
                               tail };
    CHECK_OK(world_open(&w, io, EXEC_THREADS, 1, &err), &err);
    CHECK_OK(world_file(&w, "a", size_bytes, 0, &file, &err), &err);
    uint8_t *buf = wide_buffer(size_bytes, at);
    REQUIRE(buf);
    /* each window is written by a request of its own, and the last one up to the file's end */
    uint64_t n[N_WINDOWS];
    for (int i = 0; i < N_WINDOWS; i++) {
        n[i] = i == N_WINDOWS - 1 ? size_bytes - tail : WINDOW_BYTES;
        fill(buf + at[i], n[i], at[i]);
        struct io_req wr = { .op = IO_WRITE,
                             .file = file,
                             .buf = buf + at[i],
                             .offset_bytes = at[i],
                             .size_bytes = n[i] };
        CHECK_OK(one(&w, &wr, &err), &err);
        CHECK(wr.status == STK_OK);
        memset(buf + at[i], 0x5a, n[i]);
    }
    memset(&seen, 0, sizeof seen);
    struct io_req rd = { .op = IO_READ, .file = file, .buf = buf, .size_bytes = size_bytes };
    CHECK_OK(one(&w, &rd, &err), &err);
    CHECK(rd.status == STK_OK && rd.moved_bytes == size_bytes);
    for (int i = 0; i < N_WINDOWS; i++) CHECK(filled(buf + at[i], n[i], at[i]));
    if (io == IO_URING)
        CHECK(seen.largest_bytes == IO_TRANSFER_MAX &&
              seen.entries >= size_bytes / IO_TRANSFER_MAX && seen.outstanding_max <= 32);
    world_close(&w);
    munmap(buf, size_bytes);
}

TEST(uring_nvm_13_14_one_request_above_two_gib)
{
    static const uint64_t sizes[] = { (2ull << 30) - 4096, 2ull << 30, (2ull << 30) + 4096,
                                      (4ull << 30) + 512 };
    memset(&script, 0, sizeof script);
    if (!uring_allowed()) SKIP("no io_uring here");
    for (int i = 0; i < 4; i++) wide(IO_URING, sizes[i]);
    /* a thread sanitizer keeps a shadow of what pread fills */
    if (!THREAD_SANITIZED) wide(IO_POSIX, sizes[2]);
}

TEST_MAIN()
