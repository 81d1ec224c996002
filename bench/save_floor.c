/* bench/save_floor.c - the least processor time that a checkpoint of some bytes can cost: to read them
 * from memory once (whoever sums them up must) and to hand them to the drive past the page cache in
 * large requests. One thread. Reading: the fastest of several loops, by the clock on the wall, so
 * other work beside it makes the least too large; writing: processor time of the thread.
 *
 *     save_floor --dir DIR [--size 512MiB] [--rounds 5] [--request 8MiB]
 *
 * Prints one JSON line. bench/save_stall.py reads it. Own process; a file of that size in DIR, without
 * a name while it is there. */
#include "base/opts.h"
#include "base/sys.h"
#include "bench/bench_impl.h"
#include "bench/limit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct floor_args {
    const char *dir;
    uint64_t size, rounds, request;
};

static const struct opt_row rows[] = {
    { "dir", OPT_STRING, offsetof(struct floor_args, dir), .required = true },
    { "size", OPT_SIZE, offsetof(struct floor_args, size), "512MiB", 1 << 24, 1e11 },
    { "rounds", OPT_U64, offsetof(struct floor_args, rounds), "5", 1, 16 },
    { "request", OPT_SIZE, offsetof(struct floor_args, request), "8MiB", 4096, 1 << 30 },
};
enum { ROW_N = sizeof rows / sizeof rows[0] };

static double cpu_now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double read_s(const struct floor_args *a, uint8_t *base)
{
    struct limit_set set = { .n = 0 };
    struct limit_job job = { .base = { base }, .groups = a->size / 4 / LIMIT_GROUP };
    limit_add(&set, LIMIT_READ, &job);
    limit_try(&set, (uint32_t)a->rounds, 1);
    return set.loop[set.best].best_s;
}

/* Medians of the processor's and the clock's seconds for the whole size. */
static stk_status write_s(const struct floor_args *a, int fd, const uint8_t *base, double *cpu_s,
                          double *wall_s, struct stk_error *err)
{
    double cpu[16], wall[16];
    for (uint64_t r = 0; r < a->rounds; r++) {
        cpu[r] = cpu_now_s();
        wall[r] = bench_now_s();
        for (uint64_t at = 0; at < a->size; at += a->request) {
            uint64_t n = a->size - at < a->request ? a->size - at : a->request;
            if (sys_write_full(fd, base + at, n, at) == (int64_t)n) continue;
            return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot write: %s", a->dir,
                                 strerror(errno));
        }
        cpu[r] = cpu_now_s() - cpu[r];
        wall[r] = bench_now_s() - wall[r];
    }
    qsort(cpu, a->rounds, sizeof *cpu, by_value);
    qsort(wall, a->rounds, sizeof *wall, by_value);
    *cpu_s = cpu[a->rounds / 2];
    *wall_s = wall[a->rounds / 2];
    return STK_OK;
}

static stk_status measure(const struct floor_args *a, struct stk_error *err)
{
    char *path = sys_format("%s/save-floor.tmp", a->dir);
    uint8_t *base = sys_mmap(a->size, true);
    if (!path || !base)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "no memory for %llu bytes",
                             (unsigned long long)a->size);
    memset(base, 1, a->size);
    bool direct = true;
    int fd = sys_open(path, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
    if (fd < 0) direct = false, fd = sys_open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot make a file: %s", a->dir,
                             strerror(errno));
    (void)unlink(path);
    int os_errno = sys_fallocate(fd, a->size);
    if (os_errno)
        return stk_error_set(err, STK_ERR_IO, os_errno, "%s: no room for the file: %s", a->dir,
                             strerror(os_errno));
    double cpu_s = 0, wall_s = 0, read = read_s(a, base), bytes = (double)a->size;
    STK_TRY(write_s(a, fd, base, &cpu_s, &wall_s, err));
    printf("{\"direct\": %s, \"read_bytes_per_s\": %.0f, \"write_bytes_per_s\": %.0f, "
           "\"write_cpu_s_per_GB\": %.5f, \"cpu_s_per_GB\": %.5f}\n",
           direct ? "true" : "false", bytes / read, bytes / wall_s, cpu_s / bytes * 1e9,
           (cpu_s + read) / bytes * 1e9);
    sys_close(fd);
    sys_munmap(base, a->size);
    sys_free(path);
    return STK_OK;
}

int main(int argc, char **argv)
{
    struct floor_args a;
    struct stk_error err = { 0 };
    stk_status st = opts_parse(rows, ROW_N, argc - 1, argv + 1, &a, NULL, NULL, &err);
    if (st == STK_OK) {
        a.size -= a.size % (4 * LIMIT_GROUP * 4096);
        st = measure(&a, &err);
        opts_free(rows, ROW_N, &a);
    }
    if (st == STK_OK) return 0;
    fprintf(stderr, "save_floor: %s\n", err.text);
    return 1;
}
