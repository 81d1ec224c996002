/* tests/nvme/test_uring.c - what only the io_uring backend has: refused submissions, foreign
 * completions. io_uring_submit is wrapped (the linker's --wrap, see meson.build), so that its
 * answers can be scripted. Built only with liburing. */
#include "tests/nvme/world.h"
#include "nvme/io_uring_impl.h"

#include <errno.h>

enum { N = 40, SIZE = 8192 };

int __real_io_uring_submit(struct io_uring *ring);
int __wrap_io_uring_submit(struct io_uring *ring);

static struct { int answers[8]; uint32_t n, at; } script;

int __wrap_io_uring_submit(struct io_uring *ring)
{
    if (script.at < script.n) return script.answers[script.at++];
    return __real_io_uring_submit(ring);
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

TEST_MAIN()
