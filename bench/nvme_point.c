/* bench/nvme_point.c - the files of a unit, and one point of measurement: ours, fio's beside it in
 * random order, and whether the figure may be believed.
 *
 * Owns: how many bytes have been written, what makes a result invalid (BEN-01: the page cache, more
 * than the link carries). Must not know: which points are wanted. Application's thread. */
#include "bench/nvme_impl.h"
#include "base/cpu.h"
#include "base/sys.h"
#include "bench/bench_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define MIB (1ull << 20)

/* --- a unit's files --------------------------------------------------------------------------- */

static void fill_cfg(const struct nvme_bench *b, const struct nvme_unit *u, struct measure_cfg *cfg)
{
    memset(cfg, 0, sizeof *cfg);
    for (uint32_t i = 0; i < u->n_paths; i++) cfg->paths[i] = b->path[u->path[i]];
    cfg->n_paths = u->n_paths;
    cfg->file_bytes = u->file_bytes;
    cfg->kind = b->o.kind == 1 ? IO_URING : b->o.kind == 2 ? IO_POSIX : IO_AUTO;
    cfg->seed = b->o.seed;
    cfg->verify = b->o.verify;
    cfg->stop = b->stop;
    cfg->block_bytes = MIB;
    cfg->depth = 16;
    cfg->run_ns = 1000000000u;
}

static uint64_t round_file(const struct nvme_bench *b, uint64_t bytes)
{
    uint64_t unit = b->o.block_bytes ? b->o.block_bytes : bytes >= 64 * MIB ? 8 * MIB : MIB;
    return bytes / unit * unit;
}

/* The largest file that leaves room: a quarter of what is free, shared by the paths of one file
 * system. Of memory (tmpfs) only a little is taken. */
static uint64_t file_limit(const struct nvme_bench *b, const struct nvme_unit *u)
{
    uint64_t limit = 4096 * MIB;
    for (uint32_t i = 0; i < u->n_paths; i++) {
        uint32_t p = u->path[i], sharing = 0;
        for (uint32_t k = 0; k < u->n_paths; k++)
            sharing += b->drive[u->path[k]].device_id == b->drive[p].device_id;
        uint64_t share = b->free_bytes[p] / 4 / sharing;
        if (share < limit) limit = share;
        if (!b->drive[p].device[0] && limit > 256 * MIB) limit = 256 * MIB;
    }
    return limit;
}

static stk_status open_files(struct nvme_bench *b, struct nvme_unit *u, struct measure **out,
                             struct stk_error *err)
{
    struct measure_cfg cfg;
    fill_cfg(b, u, &cfg);
    cfg.depth = 1;
    if (b->o.block_bytes) cfg.block_bytes = b->o.block_bytes;
    for (uint32_t i = 0; i < u->n_paths; i++) b->written[u->path[i]] += u->file_bytes;
    return measure_open(&cfg, out, err);
}

/* How large a file the time allows: a small one says how fast it is written. On a slow drive that
 * one stays (*out), else it is closed. */
static stk_status probe_size(struct nvme_bench *b, struct nvme_unit *u, double budget_s,
                             struct measure **out, struct stk_error *err)
{
    struct measure *m = NULL;
    uint64_t limit = file_limit(b, u), want;
    u->file_bytes = round_file(b, 16 * MIB < limit ? 16 * MIB : limit);
    if (u->file_bytes == 0) u->file_bytes = b->o.block_bytes ? b->o.block_bytes : MIB;
    double begin = bench_now_s();
    STK_TRY(open_files(b, u, &m, err));
    double s = bench_now_s() - begin;
    want = (uint64_t)((double)u->file_bytes / (s > 1e-4 ? s : 1e-4) * 0.08 * budget_s);
    want = round_file(b, want < limit ? want : limit);
    if (want > u->file_bytes) {
        measure_close(m);
        m = NULL;
        u->file_bytes = want;
    }
    *out = m;
    return STK_OK;
}

stk_status nvme_unit_open(struct nvme_bench *b, uint32_t unit, double budget_s,
                          struct measure **out, struct stk_error *err)
{
    struct nvme_unit *u = &b->unit[unit];
    *out = NULL;
    if (b->o.size_bytes) {
        u->file_bytes = round_file(b, b->o.size_bytes);
    } else if (unit > 0 && unit + 1 == b->n_units) { /* together: the smallest of those alone */
        u->file_bytes = round_file(b, file_limit(b, u));
        for (uint32_t i = 0; i < unit; i++)
            if (b->unit[i].file_bytes < u->file_bytes) u->file_bytes = b->unit[i].file_bytes;
    } else {
        STK_TRY(probe_size(b, u, budget_s, out, err));
        if (*out) return STK_OK;
    }
    return open_files(b, u, out, err);
}

uint64_t nvme_write_left(const struct nvme_bench *b, uint32_t unit)
{
    const struct nvme_unit *u = &b->unit[unit];
    uint64_t left = UINT64_MAX;
    for (uint32_t i = 0; i < u->n_paths; i++) {
        uint64_t done = b->written[u->path[i]];
        uint64_t x = done < b->o.write_max_bytes ? b->o.write_max_bytes - done : 0;
        if (x < left) left = x;
    }
    return left;
}

/* --- may it be believed ----------------------------------------------------------------------- */

static uint64_t storage_read_bytes(void) /* what this process had from storage, not from memory */
{
    char text[512];
    int fd = sys_open("/proc/self/io", 0, 0);
    if (fd < 0) return 0;
    int64_t n = sys_read_some(fd, text, sizeof text - 1, 0);
    sys_close(fd);
    text[n > 0 ? n : 0] = 0;
    const char *at = strstr(text, "\nread_bytes: ");
    return at ? strtoull(at + 13, NULL, 10) : 0;
}

static double link_of(const struct nvme_bench *b, const struct nvme_unit *u)
{
    double sum = 0;
    for (uint32_t i = 0; i < u->n_paths; i++) {
        const struct drive_facts *d = &b->drive[u->path[i]];
        bool seen = false;
        if (!(d->link_bytes_per_s > 0)) return 0;
        for (uint32_t k = 0; k < i; k++)
            seen = seen || strcmp(b->drive[u->path[k]].under, d->under) == 0;
        if (!seen) sum += d->link_bytes_per_s;
    }
    return sum;
}

static const char *memory_path(const struct nvme_bench *b, const struct nvme_unit *u)
{
    for (uint32_t i = 0; i < u->n_paths; i++) {
        const char *fs = b->drive[u->path[i]].file_system;
        if (strcmp(fs, "tmpfs") == 0 || strcmp(fs, "ramfs") == 0) return b->path[u->path[i]];
    }
    return NULL;
}

/* Its own O_DIRECT ends at the loop device. Reads come from memory, and so does the end of a
 * write: /proc/self/io counts both as the device's. */
static uint32_t cached_loop(const struct nvme_bench *b, const struct nvme_unit *u)
{
    for (uint32_t i = 0; i < u->n_paths; i++)
        if (b->loop_cached[u->path[i]]) return u->path[i];
    return NVME_PATHS_MAX;
}

void nvme_point_judge(const struct nvme_bench *b, struct nvme_result *r, double from_storage)
{
    const struct nvme_unit *u = &b->unit[r->unit];
    const char *in_memory = memory_path(b, u);
    uint32_t loop = cached_loop(b, u);
    double link = link_of(b, u), fastest = r->bytes_per_s;
    if (r->read_bytes_per_s > 0 && r->write_bytes_per_s > 0) /* a link carries both at once */
        fastest = r->read_bytes_per_s > r->write_bytes_per_s ? r->read_bytes_per_s
                                                             : r->write_bytes_per_s;
    r->valid = false;
    if (r->verify_failures)
        snprintf(r->why, sizeof r->why, "%" PRIu64 " blocks were not what had been written",
                 r->verify_failures);
    else if (in_memory)
        snprintf(r->why, sizeof r->why, "%s is %s: this is memory, not a drive", in_memory,
                 "tmpfs or ramfs");
    else if (loop < NVME_PATHS_MAX)
        snprintf(r->why, sizeof r->why,
                 "%.120s: %s keeps its file in the page cache, which answered for the drive; "
                 "`losetup --direct-io=on /dev/%s` ends that",
                 b->path[loop], b->drive[loop].device, b->drive[loop].device);
    else if (!r->direct)
        snprintf(r->why, sizeof r->why,
                 "the file system refuses O_DIRECT: the page cache was between");
    else if (link > 0 && fastest > 1.02 * link)
        snprintf(r->why, sizeof r->why,
                 "%.2f GB/s is more than the link carries (%.2f): a cache answered", fastest / 1e9,
                 link / 1e9);
    else if (from_storage < 0.9)
        snprintf(r->why, sizeof r->why, "%.0f %% of what was read came from the page cache",
                 100 * (1 - from_storage));
    else if (r->bytes == 0 || !(r->bytes_per_s > 0))
        snprintf(r->why, sizeof r->why, "nothing was moved in the time given");
    else
        r->valid = true;
}

/* --- one point -------------------------------------------------------------------------------- */

struct sums {
    struct measure_histogram all, read, write;
    double read_bps, write_bps, path_bps[NVME_PATHS_MAX], cpu_s, wall_s, from_storage;
};

static void add_histogram(struct measure_histogram *to, const struct measure_histogram *from)
{
    to->n += from->n;
    if (from->max_ns > to->max_ns) to->max_ns = from->max_ns;
    for (int i = 0; i < MEASURE_BUCKETS; i++) to->bucket[i] += from->bucket[i];
}

static struct nvme_latency latency_of(const struct measure_histogram *h)
{
    return (struct nvme_latency){ measure_percentile(h, 0.5), measure_percentile(h, 0.95),
                                  measure_percentile(h, 0.99), measure_percentile(h, 0.999),
                                  h->max_ns };
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static double write_part(const struct measure_result *m)
{
    return m->bytes ? 1 - (double)m->read_bytes / (double)m->bytes : 0;
}

static void add_run(struct nvme_bench *b, struct nvme_result *r, struct sums *s,
                    const struct measure_result *m)
{
    struct nvme_unit *u = &b->unit[r->unit];
    double written = write_part(m);
    r->ours[r->n_pairs] = m->bytes_per_s;
    r->bytes += m->bytes;
    r->ns += m->ns;
    r->requests += m->requests;
    r->direct = m->direct;
    r->workers = (struct nvme_workers){ m->threads, m->kernel_workers };
    r->verify_failures += m->verify_failures;
    if (m->verify_failures && !r->failure[0])
        snprintf(r->failure, sizeof r->failure, "%s", m->first_failure);
    snprintf(u->backend, sizeof u->backend, "%s", m->backend);
    s->read_bps += m->read_bytes_per_s;
    s->write_bps += m->write_bytes_per_s;
    for (uint32_t i = 0; i < u->n_paths; i++) {
        s->path_bps[i] += m->path_bytes_per_s[i];
        double share = m->bytes_per_s > 0 ? m->path_bytes_per_s[i] / m->bytes_per_s : 0;
        b->written[u->path[i]] += (uint64_t)((double)m->bytes * written * share);
    }
    add_histogram(&s->read, &m->read);
    add_histogram(&s->write, &m->write);
}

/* What the ramp moved without counting is no less written. */
static void count_ramp(struct nvme_bench *b, const struct nvme_unit *u,
                       const struct measure_cfg *cfg, const struct measure_result *m)
{
    double bytes = (double)cfg->ramp_ns / 1e9 * m->bytes_per_s;
    double most = (double)cfg->bytes_max - (double)m->bytes;
    if (cfg->bytes_max && bytes > most) bytes = most > 0 ? most : 0;
    for (uint32_t i = 0; i < u->n_paths && m->bytes_per_s > 0; i++)
        b->written[u->path[i]] +=
            (uint64_t)(bytes * write_part(m) * m->path_bytes_per_s[i] / m->bytes_per_s);
}

static stk_status run_ours(struct nvme_bench *b, struct measure *m, const struct nvme_point *p,
                           struct nvme_result *r, struct sums *s, struct stk_error *err)
{
    struct nvme_unit *u = &b->unit[r->unit];
    struct measure_result *res = sys_calloc(1, sizeof *res);
    struct measure_cfg cfg;
    if (!res) return stk_error_set(err, STK_ERR_NOMEM, errno, "no memory for a result");
    fill_cfg(b, u, &cfg);
    cfg.mode = p->mode;
    cfg.random = p->random;
    cfg.block_bytes = p->block_bytes;
    cfg.depth = p->depth;
    cfg.seed = rng_next(&b->rng);
    cfg.ramp_ns = (uint64_t)(p->ramp_s * 1e9);
    cfg.run_ns = (uint64_t)(p->run_s * 1e9);
    if (p->mode != MEASURE_READ) {
        uint64_t left = nvme_write_left(b, r->unit);
        if (p->bytes_max && p->bytes_max < left) left = p->bytes_max;
        cfg.bytes_max = left * u->n_paths;
    }
    uint64_t before = storage_read_bytes();
    double cpu = cpu_seconds(), wall = bench_now_s();
    stk_status st = measure_run(m, &cfg, res, err);
    s->cpu_s += cpu_seconds() - cpu;
    s->wall_s += bench_now_s() - wall;
    if (st == STK_OK) {
        double read = (double)res->read_bytes;
        double seen = (double)(storage_read_bytes() - before);
        bool drive = b->drive[u->path[0]].device[0] && before > 0;
        if (drive && read > 0 && seen / read < s->from_storage) s->from_storage = seen / read;
        add_run(b, r, s, res);
        count_ramp(b, u, &cfg, res);
    }
    sys_free(res);
    return st;
}

static bool run_fio(struct nvme_bench *b, struct measure *m, const struct nvme_point *p,
                    struct nvme_result *r)
{
    struct nvme_unit *u = &b->unit[r->unit];
    struct nvme_fio_rates rates;
    char why[512], name[NVME_PATHS_MAX][256];
    struct nvme_fio_job job = { .n_files = u->n_paths, .mode = p->mode, .random = p->random,
                                .uring = strncmp(u->backend, "posix", 5) != 0,
                                .block_bytes = p->block_bytes, .file_bytes = u->file_bytes,
                                .depth = p->depth, .ramp_s = p->ramp_s, .run_s = p->run_s };
    for (uint32_t i = 0; i < u->n_paths; i++) {
        if (!measure_file_name(m, i, name[i], sizeof name[i])) return false;
        job.files[i] = name[i];
    }
    if (!nvme_fio_run(&job, b->stop, &rates, why, sizeof why)) {
        if (!nvme_stopped(b)) {
            b->fio.usable = false;
            nvme_note(b, "%s: no comparison from here on", why);
        }
        return false;
    }
    for (uint32_t i = 0; i < u->n_paths; i++)
        b->written[u->path[i]] += (uint64_t)(rates.write_bytes / u->n_paths);
    r->fio[r->n_pairs] = rates.bytes_per_s;
    if (rates.p50_ns > r->fio_p50_ns) r->fio_p50_ns = rates.p50_ns;
    if (rates.p99_ns > r->fio_p99_ns) r->fio_p99_ns = rates.p99_ns;
    return true;
}

static void finish(struct nvme_bench *b, struct nvme_result *r, struct sums *s, uint32_t n,
                   uint32_t n_fio)
{
    double ratio[NVME_PAIRS_MAX], mean = 0;
    for (uint32_t i = 0; i < n; i++) mean += r->ours[i] / n;
    r->n_runs = n;
    r->bytes_per_s = nvme_median(r->ours, n);
    double scale = mean > 0 ? r->bytes_per_s / mean / n : 0; /* parts add up to the median */
    r->read_bytes_per_s = s->read_bps * scale;
    r->write_bytes_per_s = s->write_bps * scale;
    for (int i = 0; i < NVME_PATHS_MAX; i++) r->path_bytes_per_s[i] = s->path_bps[i] * scale;
    add_histogram(&s->all, &s->read);
    add_histogram(&s->all, &s->write);
    r->all = latency_of(&s->all);
    r->read = latency_of(&s->read);
    r->write = latency_of(&s->write);
    r->cpu_share = s->wall_s > 0 ? s->cpu_s / s->wall_s / cpu_count("") : 0;
    for (uint32_t i = 0; i < n_fio; i++) ratio[i] = r->fio[i] > 0 ? r->ours[i] / r->fio[i] : 0;
    r->fio_bytes_per_s = nvme_median(r->fio, n_fio);
    r->share_of_fio = nvme_median(ratio, n_fio);
    nvme_median_interval(ratio, n_fio, b->o.seed, &r->share_low, &r->share_high);
    nvme_point_judge(b, r, s->from_storage);
}

static struct nvme_result *new_result(struct nvme_bench *b, uint32_t unit,
                                      const struct nvme_point *p)
{
    if (b->n_results == b->cap_results) {
        uint32_t cap = b->cap_results ? 2 * b->cap_results : 64;
        struct nvme_result *more = sys_realloc(b->result, cap * sizeof *more);
        if (!more) return NULL;
        b->result = more;
        b->cap_results = cap;
    }
    struct nvme_result *r = &b->result[b->n_results];
    memset(r, 0, sizeof *r);
    r->step = p->step;
    r->unit = unit;
    r->mode = p->mode;
    r->random = p->random;
    r->block_bytes = p->block_bytes;
    r->depth = p->depth;
    return r;
}

stk_status nvme_point_run(struct nvme_bench *b, uint32_t unit, struct measure *m,
                          const struct nvme_point *p, struct nvme_result **out,
                          struct stk_error *err)
{
    *out = NULL;
    if (nvme_stopped(b)) return STK_OK;
    if (p->mode != MEASURE_READ && nvme_write_left(b, unit) < 2 * p->block_bytes * p->depth)
        return STK_OK;
    struct nvme_result *r = new_result(b, unit, p);
    struct sums *s = sys_calloc(1, sizeof *s);
    stk_status st = STK_OK;
    uint32_t want = p->pairs ? p->pairs : 1, n = 0, n_fio = 0;
    if (p->runs > want) want = p->runs;
    STK_ASSERT(want <= NVME_PAIRS_MAX);
    if (!r || !s) {
        sys_free(s);
        return stk_error_set(err, STK_ERR_NOMEM, errno, "no memory for a result");
    }
    s->from_storage = 1;
    for (; n < want && st == STK_OK; n++) {
        bool beside = n < p->pairs && b->fio.usable && n_fio == n, fio_done = false;
        bool fio_first = beside && b->unit[unit].backend[0] && rng_below(&b->rng, 2);
        r->n_pairs = n;
        if (fio_first) fio_done = run_fio(b, m, p, r);
        if (nvme_stopped(b)) break;
        st = run_ours(b, m, p, r, s, err);
        if (nvme_stopped(b)) break;
        if (st == STK_OK && beside && !fio_first) fio_done = run_fio(b, m, p, r);
        n_fio += fio_done;
    }
    if (nvme_stopped(b) && st == STK_ERR_INTERRUPTED) {
        stk_error_clear(err);
        st = STK_OK;
    }
    r->n_pairs = n < n_fio ? n : n_fio;
    if (st != STK_OK) { /* a flush or a transfer failed: what was measured until then is no rate */
        r->n_pairs = 0;
        snprintf(r->why, sizeof r->why, "%.300s", err->text);
        b->n_results++;
    } else if (n > 0) {
        finish(b, r, s, n, r->n_pairs);
        b->n_results++;
        *out = r;
    }
    sys_free(s);
    return st;
}
