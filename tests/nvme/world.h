/* tests/nvme/world.h - what the tests of nvme/ share: an execution world with an io, over every
 * backend, and a folder that goes. */
#ifndef TESTS_NVME_WORLD_H
#define TESTS_NVME_WORLD_H

#include "tests/test.h"
#include "base/exec.h"
#include "base/rng.h"
#include "base/sys.h"
#include "nvme/io.h"
#include "nvme/io_sim.h"
#include "nvme/store.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

struct world {
    struct exec *ex;
    struct exec_lane *lane;
    struct io *io;
    struct io_sim_disk *disk;
    struct io_sim_cfg sim;
    struct io_cfg cfg;
    struct exec_task notify, call;
    struct exec_event called;
    void (*fn)(void *);
    void *arg;
    char dir[512];
    uint32_t reap_max;
};

static inline void world_notify(void *arg)
{
    struct world *w = arg;
    if (w->io) io_reap(w->io, w->reap_max);
}

static inline void world_call(void *arg)
{
    struct world *w = arg;
    w->fn(w->arg);
    exec_event_set(&w->called);
}

/* Runs fn(arg) on the lane and waits for its end. */
static inline void world_run(struct world *w, void (*fn)(void *), void *arg)
{
    w->fn = fn;
    w->arg = arg;
    exec_event_reset(&w->called);
    exec_task_init(&w->call, world_call, w);
    exec_post(w->lane, &w->call);
    exec_event_wait(&w->called, UINT64_MAX, NULL);
}

static inline bool world_dir(char *buf, size_t size_bytes)
{
    const char *base = getenv("TMPDIR");
    snprintf(buf, size_bytes, "%s/stoker-test-XXXXXX", base ? base : "/tmp");
    return mkdtemp(buf) != NULL;
}

static inline stk_status world_open_exec(struct world *w, enum exec_kind kind, uint64_t seed,
                                         struct stk_error *err)
{
    STK_TRY(kind == EXEC_SIM ? exec_open_sim(seed, &w->ex, err) : exec_open_threads(&w->ex, err));
    STK_TRY(exec_lane_open(w->ex, "engine", &w->lane, err));
    exec_event_init(w->ex, &w->called);
    exec_task_init(&w->notify, world_notify, w);
    if (w->reap_max == 0) w->reap_max = 64;
    w->cfg.ex = w->ex;
    w->cfg.lane = w->lane;
    w->cfg.notify = &w->notify;
    return STK_OK;
}

/* What the test set in w->cfg, w->sim and w->disk before is kept. */
static inline stk_status world_open(struct world *w, enum io_kind io, enum exec_kind ex,
                                    uint64_t seed, struct stk_error *err)
{
    STK_TRY(world_open_exec(w, ex, seed, err));
    w->cfg.kind = io;
    if (io == IO_SIM) {
        if (!w->disk) STK_TRY(io_sim_disk_new(1ull << 40, &w->disk, err));
        w->sim.disk = w->disk;
        w->sim.seed = seed;
        w->cfg.sim = &w->sim;
        snprintf(w->dir, sizeof w->dir, "/sim");
    } else if (!w->dir[0] && !world_dir(w->dir, sizeof w->dir)) {
        return stk_error_set(err, STK_ERR_IO, 0, "no folder for the test");
    }
    return io_open(&w->cfg, &w->io, err);
}

static inline void world_close(struct world *w)
{
    io_close(w->io);
    w->io = NULL;
    if (w->lane) exec_lane_close(w->lane);
    exec_close(w->ex);
    io_sim_disk_free(w->disk);
    if (w->cfg.kind != IO_SIM && w->dir[0]) sys_remove_tree(w->dir);
}

/* Makes a file of this size, real or simulated, and adds it. */
static inline stk_status world_file(struct world *w, const char *name, uint64_t size_bytes,
                                    uint32_t drive, uint32_t *out, struct stk_error *err)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", w->dir, name);
    if (w->disk) {
        STK_TRY(io_sim_file_create(w->disk, path, size_bytes, err));
    } else {
        int fd = sys_open(path, O_RDWR | O_CREAT, 0600);
        if (fd < 0 || ftruncate(fd, (off_t)size_bytes) != 0)
            return stk_error_set(err, STK_ERR_IO, 0, "%s", path);
        sys_close(fd);
    }
    return io_file_add(w->io, path, drive, out, err);
}

/* Every combination; uring only where it is allowed. `fn` gets a world that is not open yet. */
struct combo { enum io_kind io; enum exec_kind ex; const char *name; };
static const struct combo combos[] = {
    { IO_SIM, EXEC_SIM, "sim, simulation" }, { IO_SIM, EXEC_THREADS, "sim, threads" },
    { IO_POSIX, EXEC_SIM, "posix, simulation" }, { IO_POSIX, EXEC_THREADS, "posix, threads" },
    { IO_URING, EXEC_SIM, "uring, simulation" }, { IO_URING, EXEC_THREADS, "uring, threads" },
};
#define N_COMBOS (sizeof combos / sizeof *combos)

static inline bool uring_allowed(void)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    bool ok = world_open(&w, IO_URING, EXEC_THREADS, 1, &err) == STK_OK;
    if (!ok) printf("# %s\n", err.text);
    world_close(&w);
    return ok;
}

#define FOR_COMBOS(c) \
    for (const struct combo *c = combos; c < combos + N_COMBOS; c++) \
        if (c->io == IO_URING && !uring_allowed()) \
            continue; \
        else

/* 0: passed, 1: failed, 77: cannot be tried here. */
static inline int in_child(int (*fn)(void))
{
    int st;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) _exit(fn());
    return waitpid(pid, &st, 0) == pid && WIFEXITED(st) ? WEXITSTATUS(st) : 1;
}

/* An ordinary user with this number (any), so that tests that run beside this one do not share its
 * limits. */
static inline bool become_user(uint32_t number)
{
    uint32_t id = 20000 + number % 30000;
    if (geteuid() != 0) return true;
    if (setgid(id) != 0 || setuid(id) != 0) return false;
    const char *tmp = getenv("TMPDIR");
    if (access(tmp && *tmp ? tmp : "/tmp", W_OK | X_OK) == 0) return true;
    printf("# TMPDIR is not open to other users\n");
    fflush(stdout); /* a child that leaves by _exit */
    return false;
}

static inline void fill(uint8_t *buf, uint64_t size_bytes, uint64_t seed)
{
    uint64_t i = 0;
    for (; i + 8 <= size_bytes; i += 8) {
        uint64_t x = rng_hash64(seed + i);
        memcpy(buf + i, &x, 8);
    }
    for (; i < size_bytes; i++) buf[i] = (uint8_t)(rng_hash64(seed + i) & 255);
}

static inline bool filled(const uint8_t *buf, uint64_t size_bytes, uint64_t seed)
{
    uint64_t i = 0;
    for (; i + 8 <= size_bytes; i += 8) {
        uint64_t x = rng_hash64(seed + i);
        if (memcmp(buf + i, &x, 8) != 0) return false;
    }
    for (; i < size_bytes; i++)
        if (buf[i] != (uint8_t)(rng_hash64(seed + i) & 255)) return false;
    return true;
}

#endif
