/* bench/nvme_fio.c - fio beside our own measurement: same files, mode, block, depth.
 *
 * Owns: the command line given to fio, the child, reading its JSON. Must not know: what the figures
 * are compared with. Application's thread. fio opens our unnamed files through /proc, so nothing of
 * its own is left on the disk. A stop ends the child, by its own id. */
#include "bench/nvme_impl.h"
#include "base/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { ARGS_MAX = 32 + 3 * NVME_PATHS_MAX, OUTPUT_MAX = 4 << 20 };

struct child {
    pid_t pid;
    int out; /* its stdout and stderr */
};

/* Our buffers lie in large pages (nvme/io_file.c), which alone changes the rate by up to 2 where a
 * drive's request holds few pieces of memory; so that transfers are compared and not pages, fio's
 * malloc asks for them too. A setting of the user's stays. NULL without memory. */
static char **child_environment(void)
{
    static char large_pages[] = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1";
    size_t n = 0;
    while (environ[n]) n++;
    char **env = sys_calloc(n + 2, sizeof *env);
    if (!env) return NULL;
    memcpy(env, environ, n * sizeof *env);
    if (!getenv("GLIBC_TUNABLES")) env[n] = large_pages;
    return env;
}

static int child_start(struct child *c, char *const *argv)
{
    int pipe_fd[2];
    posix_spawn_file_actions_t actions;
    char **env = child_environment();
    if (!env) return ENOMEM;
    if (pipe2(pipe_fd, O_CLOEXEC) != 0) {
        int cause = errno;
        sys_free(env);
        return cause;
    }
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, pipe_fd[1], 1);
    posix_spawn_file_actions_adddup2(&actions, pipe_fd[1], 2);
    int rc = posix_spawnp(&c->pid, argv[0], &actions, NULL, argv, env);
    posix_spawn_file_actions_destroy(&actions);
    sys_free(env);
    close(pipe_fd[1]);
    if (rc != 0)
        close(pipe_fd[0]);
    else
        c->out = pipe_fd[0];
    return rc;
}

/* Reads all it prints; NULL without memory. `stop` ends it. Closes and waits for it. */
static char *child_finish(struct child *c, const _Atomic bool *stop, int *status)
{
    char *text = sys_calloc(1, OUTPUT_MAX);
    size_t at = 0;
    bool asked = false;
    for (;;) {
        struct pollfd p = { .fd = c->out, .events = POLLIN };
        int ready = poll(&p, 1, 100);
        if (!asked && ((stop && atomic_load(stop)) || !text)) {
            kill(c->pid, SIGTERM);
            asked = true;
        }
        if (ready <= 0) continue;
        char drain[4096];
        bool keep = text && at + sizeof drain < OUTPUT_MAX;
        ssize_t n = read(c->out, keep ? text + at : drain, sizeof drain);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        if (keep) at += (size_t)n;
    }
    close(c->out);
    while (waitpid(c->pid, status, 0) < 0 && errno == EINTR) {}
    return text;
}

void nvme_fio_find(struct nvme_fio *f)
{
    static char name[] = "fio", version[] = "--version";
    char *argv[] = { name, version, NULL };
    struct child c;
    int status = 0, rc = child_start(&c, argv);
    memset(f, 0, sizeof *f);
    if (rc != 0) {
        snprintf(f->why, sizeof f->why, "fio is not installed (%s): no comparison", strerror(rc));
        return;
    }
    char *text = child_finish(&c, NULL, &status);
    f->usable = text && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (f->usable)
        snprintf(f->version, sizeof f->version, "%.*s", (int)strcspn(text, "\n"), text);
    else
        snprintf(f->why, sizeof f->why, "fio is not installed: no comparison");
    sys_free(text);
}

/* --- its output ------------------------------------------------------------------------------- */

static double number_at(const json_t *j, const char *key)
{
    return json_number_value(json_object_get(j, key));
}

static uint64_t percentile(const json_t *direction, const char *which)
{
    const json_t *p = json_object_get(json_object_get(direction, "clat_ns"), "percentile");
    return (uint64_t)number_at(p, which);
}

static bool add_job(const json_t *job, struct nvme_fio_rates *out)
{
    static const char *const directions[] = { "read", "write" };
    if (json_integer_value(json_object_get(job, "error")) != 0) return false;
    for (int d = 0; d < 2; d++) {
        const json_t *x = json_object_get(job, directions[d]);
        if (number_at(x, "io_bytes") <= 0) continue;
        out->bytes_per_s += number_at(x, "bw_bytes");
        if (d == 1) out->write_bytes += number_at(x, "io_bytes");
        uint64_t p50 = percentile(x, "50.000000"), p99 = percentile(x, "99.000000");
        if (p50 > out->p50_ns) out->p50_ns = p50;
        if (p99 > out->p99_ns) out->p99_ns = p99;
    }
    return true;
}

bool nvme_fio_parse(const char *text, struct nvme_fio_rates *out)
{
    const char *begin = text[0] == '{' ? text : strstr(text, "\n{");
    memset(out, 0, sizeof *out);
    if (!begin) return false;
    json_t *j = json_loads(begin, JSON_DISABLE_EOF_CHECK, NULL);
    const json_t *jobs = json_object_get(j, "jobs");
    bool good = json_array_size(jobs) > 0;
    for (size_t i = 0; i < json_array_size(jobs); i++)
        good = add_job(json_array_get(jobs, i), out) && good;
    json_decref(j);
    return good && out->bytes_per_s > 0;
}

/* --- its command line ------------------------------------------------------------------------- */

struct args {
    char *v[ARGS_MAX];
    uint32_t n;
    bool full;
};

static __attribute__((format(printf, 2, 3))) void arg(struct args *a, const char *fmt, ...)
{
    char text[4096];
    va_list list;
    va_start(list, fmt);
    vsnprintf(text, sizeof text, fmt, list);
    va_end(list);
    char *copy = a->n + 1 < ARGS_MAX ? sys_strdup(text) : NULL;
    if (copy)
        a->v[a->n++] = copy;
    else
        a->full = true;
}

/* The optimizer's pattern is none of fio's; a sequential half-and-half mix is the nearest. */
static const char *pattern_of(const struct nvme_fio_job *job)
{
    switch (job->mode) {
    case MEASURE_READ: return job->random ? "randread" : "read";
    case MEASURE_WRITE: return job->random ? "randwrite" : "write";
    default: return job->random ? "randrw" : "rw";
    }
}

/* fio separates files with colons. */
static void escape(const char *name, char *buf, size_t bytes)
{
    size_t at = 0;
    for (; *name && at + 3 < bytes; name++) {
        if (*name == ':' || *name == '\\') buf[at++] = '\\';
        buf[at++] = *name;
    }
    buf[at] = 0;
}

static void build_args(struct args *a, const struct nvme_fio_job *job)
{
    arg(a, "fio");
    arg(a, "--output-format=json");
    arg(a, "--direct=1");
    arg(a, "--allow_file_create=0");
    arg(a, "--norandommap");
    arg(a, "--ioengine=%s", job->uring ? "io_uring" : "libaio");
    if (job->uring) arg(a, "--fixedbufs=1");
    if (job->uring) arg(a, "--registerfiles=1");
    arg(a, "--rw=%s", pattern_of(job));
    arg(a, "--bs=%llu", (unsigned long long)job->block_bytes);
    arg(a, "--iodepth=%u", job->depth);
    arg(a, "--size=%llu", (unsigned long long)job->file_bytes);
    arg(a, "--time_based");
    arg(a, "--ramp_time=%.0fms", job->ramp_s * 1000);
    arg(a, "--runtime=%.0fms", job->run_s * 1000);
    if (job->mode != MEASURE_READ) arg(a, "--end_fsync=1");
    for (uint32_t i = 0; i < job->n_files; i++) {
        arg(a, "--name=path%u", i);
        char name[512];
        escape(job->files[i], name, sizeof name);
        arg(a, "--filename=%s", name);
    }
}

static void last_line(const char *text, char *why, size_t why_bytes)
{
    size_t end = text ? strcspn(text, "{") : 0; /* what it says before the JSON */
    while (end > 0 && text[end - 1] == '\n') end--;
    size_t begin = end;
    while (begin > 0 && text[begin - 1] != '\n') begin--;
    if (end > begin)
        snprintf(why, why_bytes, "fio failed: %.*s", (int)(end - begin), text + begin);
    else
        snprintf(why, why_bytes, "fio failed and said nothing");
}

bool nvme_fio_run(const struct nvme_fio_job *job, const _Atomic bool *stop,
                  struct nvme_fio_rates *out, char *why, size_t why_bytes)
{
    struct args a = { .n = 0 };
    struct child c;
    int status = 0;
    char *text = NULL;
    why[0] = 0;
    memset(out, 0, sizeof *out);
    build_args(&a, job);
    int rc = a.full ? ENOMEM : child_start(&c, a.v);
    if (rc == 0) text = child_finish(&c, stop, &status);
    bool good = text && WIFEXITED(status) && WEXITSTATUS(status) == 0 && nvme_fio_parse(text, out);
    if (!good && rc != 0)
        snprintf(why, why_bytes, "fio cannot be started: %s", strerror(rc));
    else if (!good)
        last_line(text, why, why_bytes);
    for (uint32_t i = 0; i < a.n; i++) sys_free(a.v[i]);
    sys_free(text);
    return good;
}
