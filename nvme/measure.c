/* nvme/measure.c - measured rates: files, the first full write, and a run from set-up to figures.
 *
 * Owns the files and the buffer of a measurement. Each run has an io and a lane of its own, so that
 * kind, depth and registration may differ from run to run; what happens on the lane is in
 * measure_lane.c. Application's thread. Knows no tables of results and no other benchmark.
 *
 * A file has no name (O_TMPFILE), or loses it once it is open, and is opened again for each run
 * through /proc/self/fd/N: nothing is left behind even by a kill. Where that does not work it keeps
 * its name until measure_close. */
#include "nvme/measure_impl.h"
#include "base/rng.h"
#include "base/sys.h"
#include "nvme/io_sim.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define FILL_BLOCK_BYTES (1u << 20)
#define FILL_DEPTH 16u
#define WORKERS_MAX 64u
#define LOOK_NS 1000000000u

typedef unsigned long long ull;

/* --- configuration ---------------------------------------------------------------------------- */

stk_status measure_check(const struct measure_cfg *cfg, struct stk_error *err)
{
    if (cfg->n_paths == 0 || cfg->n_paths > MEASURE_PATHS_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a measurement needs 1 to %d paths; %u were given", MEASURE_PATHS_MAX,
                             cfg->n_paths);
    if (cfg->block_bytes == 0 || cfg->block_bytes % MEASURE_UNIT_BYTES)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a block of %llu bytes was asked for; it must be a multiple of %u",
                             (ull)cfg->block_bytes, MEASURE_UNIT_BYTES);
    if (cfg->depth == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "a queue depth of at least 1 is needed");
    if (cfg->run_ns == 0 && cfg->bytes_max == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a measurement needs an end: a time or a number of bytes");
    uint64_t blocks = cfg->file_bytes / cfg->block_bytes;
    if (cfg->file_bytes % MEASURE_UNIT_BYTES || blocks < cfg->depth || blocks > UINT32_MAX ||
        cfg->file_bytes > INT64_MAX / MEASURE_PATHS_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a file of %llu bytes has %llu blocks of %llu: at least as many as "
                             "the depth (%u) are needed, at most 2^32 are possible, and the size "
                             "must be a multiple of %u",
                             (ull)cfg->file_bytes, (ull)blocks, (ull)cfg->block_bytes, cfg->depth,
                             MEASURE_UNIT_BYTES);
    return STK_OK;
}

struct exec *measure_exec(const struct measure *m, const struct measure_cfg *cfg)
{
    return cfg->ex ? cfg->ex : m->own_ex;
}

static stk_status copy_paths(struct measure *m, const struct measure_cfg *cfg,
                             struct stk_error *err)
{
    uint64_t units = m->file_bytes / MEASURE_UNIT_BYTES;
    for (uint32_t i = 0; i < cfg->n_paths; i++) {
        m->files[i].path = sys_strdup(cfg->paths[i]);
        m->cfg.paths[i] = m->files[i].path;
        m->files[i].pass = sys_calloc(units, sizeof *m->files[i].pass);
        if (!m->files[i].path || !m->files[i].pass)
            return stk_error_set(err, STK_ERR_NOMEM, 0,
                                 "%s: no memory for the table of what was written where",
                                 cfg->paths[i]);
    }
    return STK_OK;
}

stk_status measure_new(const struct measure_cfg *cfg, struct measure **out, struct stk_error *err)
{
    *out = NULL;
    STK_TRY(measure_check(cfg, err));
    struct measure *m = sys_calloc(1, sizeof *m);
    if (!m) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a measurement");
    m->cfg = *cfg;
    m->file_bytes = cfg->file_bytes;
    for (uint32_t i = 0; i < MEASURE_PATHS_MAX; i++) m->files[i].fd = -1;
    stk_status status = cfg->ex ? STK_OK : exec_open_threads(&m->own_ex, err);
    if (status == STK_OK) {
        /* two measurements, or two runs of the program, must tell their blocks apart */
        uint64_t id = rng_hash64(cfg->seed);
        if (cfg->kind != IO_SIM)
            id = rng_hash64(id ^ (uint64_t)getpid() << 40 ^
                            exec_now_ns(measure_exec(m, cfg)));
        measure_pattern_init(&m->pattern, id);
        status = copy_paths(m, cfg, err);
    }
    if (status != STK_OK) {
        measure_close(m);
        return status;
    }
    *out = m;
    return STK_OK;
}

/* --- files ------------------------------------------------------------------------------------ */

static struct io_sim_disk *sim_disk(const struct measure_cfg *cfg)
{
    const struct io_sim_cfg *sim = cfg->sim;
    return cfg->kind == IO_SIM && sim ? sim->disk : NULL;
}

/* A new file beside nothing of the same name; its path replaces the folder's in *path. */
static stk_status create(const char *folder, uint32_t index, char **path, int *fd,
                         struct stk_error *err)
{
    for (uint32_t k = 0;; k++) {
        char *name = sys_format("%s/stoker-measure-%u-%u.bin", folder, (unsigned)getpid(),
                                index + k * MEASURE_PATHS_MAX);
        if (!name) return stk_error_set(err, STK_ERR_NOMEM, 0, "%s: no memory for a name", folder);
        *fd = sys_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
        if (*fd >= 0) {
            sys_free(*path);
            *path = name;
            return STK_OK;
        }
        sys_free(name);
        if (errno == EEXIST && k < 1000) continue;
        return stk_error_set(err, STK_ERR_IO, errno,
                             "%s: no file to measure with can be made there: %s; name an existing "
                             "folder that may be written to",
                             folder, strerror(errno));
    }
}

/* A file that never has a name, so that a kill at any instant leaves nothing. False: not possible
 * here. */
static bool create_nameless(struct measure_file *f)
{
    int fd = sys_open(f->path, O_TMPFILE | O_RDWR, 0600);
    if (fd < 0) return false;
    snprintf(f->open_as, sizeof f->open_as, "/proc/self/fd/%d", fd);
    int again = sys_open(f->open_as, O_RDWR, 0);
    sys_close(again);
    if (again >= 0) {
        f->fd = fd;
        return true;
    }
    f->open_as[0] = '\0';
    sys_close(fd);
    return false;
}

/* Takes the file's name away if it can still be opened afterwards. */
static void make_nameless(struct measure_file *f)
{
    char as[64];
    snprintf(as, sizeof as, "/proc/self/fd/%d", f->fd);
    int again = sys_open(as, O_RDWR, 0);
    sys_close(again);
    if (again < 0 || unlink(f->path) != 0) return;
    again = sys_open(as, O_RDWR, 0);
    sys_close(again);
    if (again >= 0) {
        memcpy(f->open_as, as, sizeof as);
        f->made = false;
        return;
    }
    /* this file system forgets files without a name: the same again, with its name kept */
    sys_close(f->fd);
    f->fd = sys_open(f->path, O_RDWR | O_CREAT | O_EXCL, 0600);
    f->made = f->fd >= 0;
}

static stk_status make_file(struct measure *m, uint32_t i, struct stk_error *err)
{
    struct measure_file *f = &m->files[i];
    struct io_sim_disk *disk = sim_disk(&m->cfg);
    if (disk) {
        char *name = sys_format("%s/stoker-measure-%u.bin", f->path, i);
        if (!name) return stk_error_set(err, STK_ERR_NOMEM, 0, "%s: no memory for a name", f->path);
        sys_free(f->path);
        f->path = name;
        STK_TRY(io_sim_file_create(disk, f->path, m->file_bytes, err));
        f->made = true;
        return STK_OK;
    }
    /* asked first: an allocation that fails halfway would fill the disk for a moment */
    int64_t room = sys_disk_free(f->path);
    if (room >= 0 && (uint64_t)room < m->file_bytes)
        return stk_error_set(err, STK_ERR_NOSPACE, 0,
                             "%s: a file of %llu bytes to measure with does not fit, %llu are "
                             "free; free space there or ask for a smaller file",
                             f->path, (ull)m->file_bytes, (ull)room);
    if (!create_nameless(f)) {
        STK_TRY(create(f->path, i, &f->path, &f->fd, err));
        f->made = true;
        make_nameless(f);
    }
    int rc = f->fd < 0 ? EIO : sys_fallocate(f->fd, m->file_bytes);
    if (rc == 0) return STK_OK;
    return stk_error_set(err, rc == ENOSPC || rc == EDQUOT ? STK_ERR_NOSPACE : STK_ERR_IO, rc,
                         "%s: cannot be given its %llu bytes: %s; free space there or ask for a "
                         "smaller file",
                         f->path, (ull)m->file_bytes, strerror(rc));
}

static void drop_file(struct measure *m, struct measure_file *f)
{
    struct io_sim_disk *disk = sim_disk(&m->cfg);
    if (f->made && disk) io_sim_file_remove(disk, f->path);
    else if (f->made) (void)unlink(f->path);
    sys_close(f->fd);
    sys_free(f->pass);
    sys_free(f->path);
}

/* --- places ----------------------------------------------------------------------------------- */

static stk_status no_memory(struct stk_error *err, uint64_t blocks)
{
    return stk_error_set(err, STK_ERR_NOMEM, 0,
                         "no memory to keep track of %llu blocks; measure a smaller file",
                         (ull)blocks);
}

/* The buffer is kept: pages, once touched and gathered, serve the next run. */
static stk_status make_buffer(struct measure_run *r, struct stk_error *err)
{
    struct measure *m = r->m->lender ? r->m->lender : r->m;
    uint64_t once = r->n_slots * r->block_bytes, need;
    r->rounds = r->cfg->buffer_bytes > once ? r->cfg->buffer_bytes / once : 1;
    need = r->rounds * once;
    if (need > m->buffer_bytes) {
        sys_munmap(m->buffer, m->buffer_bytes);
        m->buffer_bytes = 0;
        m->buffer = sys_mmap(need, true);
        if (!m->buffer)
            return stk_error_set(err, STK_ERR_NOMEM, errno,
                                 "no memory for %u buffers of %llu bytes; ask for a smaller depth",
                                 r->n_slots, (ull)r->block_bytes);
        m->buffer_bytes = need;
        /* a drive must not win by compressing zeros */
        for (uint64_t at = 0; at < once; at += MEASURE_UNIT_BYTES)
            measure_pattern_fill(&m->pattern, m->buffer + at, UINT32_MAX, at, 0);
        for (uint64_t at = once; at < need; at += once) memcpy(m->buffer + at, m->buffer, once);
    }
    r->buffer = m->buffer;
    return STK_OK;
}

static void set_slot(struct measure_run *r, uint32_t i, uint32_t depth)
{
    struct measure_slot *s = &r->slots[i];
    uint32_t lane = i / r->n_targets; /* neighbours belong to different files */
    s->run = r;
    s->file = i % r->n_targets;
    s->writes = r->fill || r->cfg->mode == MEASURE_WRITE;
    if (r->cfg->mode != MEASURE_MIXED || r->fill) return;
    s->writes = lane % 2 == 1;
    s->alternates = depth == 1;
}

stk_status measure_run_places(struct measure_run *r, uint32_t n_targets, uint32_t depth,
                              struct stk_error *err)
{
    uint64_t blocks = (r->file_bytes + r->block_bytes - 1) / r->block_bytes;
    if (!r->fill) blocks = r->file_bytes / r->block_bytes;
    struct rng rng;
    rng_seed(&rng, r->cfg->seed);
    r->n_targets = n_targets;
    r->n_slots = n_targets * depth;
    r->slots = sys_calloc(r->n_slots, sizeof *r->slots);
    r->flushes = sys_calloc(MEASURE_PATHS_MAX, sizeof *r->flushes);
    if (!r->slots || !r->flushes) return no_memory(err, r->n_slots);
    if (r->cfg->random && !r->fill) {
        r->order = sys_calloc(blocks, sizeof *r->order);
        if (!r->order) return no_memory(err, blocks);
        for (uint64_t k = 0; k < blocks; k++) r->order[k] = (uint32_t)k;
        rng_shuffle_u32(&rng, r->order, (uint32_t)blocks);
    }
    for (uint32_t i = 0; i < n_targets; i++) {
        struct measure_target *t = &r->target[i];
        t->n_blocks = blocks;
        t->busy = sys_calloc(blocks, 1);
        if (!t->busy) return no_memory(err, blocks);
        /* files are not walked in step, and writes run half a file ahead of reads */
        if (r->cfg->random && !r->fill) t->reads.first = rng_below(&rng, blocks);
        t->writes.first = t->reads.first;
        if (r->cfg->mode == MEASURE_MIXED && !r->fill) t->writes.first += blocks / 2;
    }
    for (uint32_t i = 0; i < r->n_slots; i++) set_slot(r, i, depth);
    return make_buffer(r, err);
}

void measure_run_free(struct measure_run *r)
{
    for (uint32_t i = 0; i < MEASURE_PATHS_MAX; i++) sys_free(r->target[i].busy);
    sys_free(r->order);
    sys_free(r->slots);
    sys_free(r->flushes);
    sys_free(r);
}

/* --- a run ------------------------------------------------------------------------------------ */

static void run_notify(void *arg)
{
    struct measure_run *r = arg;
    if (r->io) io_reap(r->io, 64);
}

static stk_status stalled(struct measure_run *r, struct stk_error *err)
{
    stk_status status = io_drain(r->io, exec_now_ns(r->ex), err);
    if (status == STK_OK)
        status = stk_error_set(err, STK_ERR_STALLED, 0,
                               "%.400s: the measurement made no progress; the drive or its driver "
                               "may be stuck (see the kernel log)",
                               r->m->files[0].path);
    io_stop(r->io);
    return status;
}

static double cpu_ns(void)
{
    struct rusage u = { 0 };
    getrusage(RUSAGE_SELF, &u);
    return 1e9 * (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e3 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

stk_status measure_run_wait(struct measure_run *r, struct stk_error *err)
{
    double cpu = cpu_ns(), begin_ns = (double)exec_now_ns(r->ex), ns;
    exec_event_init(r->ex, &r->ended);
    exec_task_init(&r->begin, measure_lane_begin, r);
    exec_post(r->lane, &r->begin);
    uint64_t seen = 0, idle_ns = 0; /* looks without progress: a process that was stopped did not look */
    for (;;) {
        uint64_t look_ns = exec_now_ns(r->ex) + LOOK_NS;
        stk_status status = exec_event_wait(&r->ended, look_ns, NULL);
        if (status == STK_OK) break;
        uint64_t now = exec_now_ns(r->ex),
                 progress = atomic_load_explicit(&r->progress, memory_order_relaxed);
        idle_ns = progress != seen ? 0 : idle_ns + LOOK_NS;
        seen = progress;
        /* the simulation knows at once that nothing can happen any more */
        if (now < look_ns || idle_ns > MEASURE_STALL_NS) return stalled(r, err);
    }
    ns = (double)exec_now_ns(r->ex) - begin_ns;
    if (r->out && ns > 0 && exec_kind_of(r->ex) != EXEC_SIM) r->out->cores_busy = (cpu_ns() - cpu) / ns;
    STK_TRY(io_drain(r->io, UINT64_MAX, err)); /* the last `done` has returned */
    if (r->status != STK_OK) return stk_error_forward(err, &r->error);
    if (r->cfg->stop && atomic_load_explicit(r->cfg->stop, memory_order_relaxed))
        return stk_error_set(err, STK_ERR_INTERRUPTED, 0, "the measurement was asked to stop");
    return STK_OK;
}

static double rate(uint64_t bytes, uint64_t ns)
{
    return ns ? (double)bytes / (double)ns * 1e9 : 0;
}

/* Of one direction (0 reads, 1 writes) of one path, in the path's own time. */
static double path_rate(const struct measure_run *r, uint32_t i, int direction)
{
    const struct measure_path *p = &r->path[i];
    return p->bytes[direction] ? rate(p->bytes[direction], p->last_ns[direction] - r->since_ns) : 0;
}

/* Threads that the kernel makes for an io_uring are listed among the process's own. */
static void count_threads(struct measure_result *out)
{
    DIR *d = opendir("/proc/self/task");
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
        char name[300], comm[32] = "";
        if (e->d_name[0] == '.') continue;
        snprintf(name, sizeof name, "/proc/self/task/%s/comm", e->d_name);
        int fd = sys_open(name, O_RDONLY, 0);
        if (fd < 0) continue;
        (void)sys_read_some(fd, comm, sizeof comm - 1, 0);
        sys_close(fd);
        if (strncmp(comm, "iou-wrk", 7) == 0) out->kernel_workers++;
        else out->threads++;
    }
    if (d) closedir(d);
}

/* When time is up each path still has `depth` requests on their way: a slow one needs seconds for
 * them, in which the fast ones have nothing to do any more. So each path is measured in its own
 * time, and all together is the sum. Not through the store, where a slot's next extent may lie on
 * any path and the slow one holds up the others in truth. */
static void result_of_paths(const struct measure_run *r, struct measure_result *out)
{
    out->bytes_per_s = out->read_bytes_per_s = out->write_bytes_per_s = 0;
    for (uint32_t i = 0; i < r->cfg->n_paths; i++) {
        const struct measure_path *p = &r->path[i];
        double reads = path_rate(r, i, 0), writes = path_rate(r, i, 1), both = reads + writes;
        uint64_t end = p->last_ns[0] > p->last_ns[1] ? p->last_ns[0] : p->last_ns[1];
        if (r->cfg->mode != MEASURE_MIXED && end > r->since_ns)
            both = rate(p->bytes[0] + p->bytes[1], end - r->since_ns);
        out->path_bytes_per_s[i] = both;
        out->bytes_per_s += both;
        out->read_bytes_per_s += reads;
        out->write_bytes_per_s += writes;
    }
}

void measure_run_result(const struct measure_run *r)
{
    struct measure_result *out = r->out;
    out->bytes = r->read_bytes + r->write_bytes;
    out->read_bytes = r->read_bytes;
    out->ns = r->last_ns - r->since_ns;
    out->bytes_per_s = rate(out->bytes, out->ns);
    if (r->read_bytes)
        out->read_bytes_per_s = rate(r->read_bytes, r->last_read_ns - r->since_ns);
    if (r->write_bytes)
        out->write_bytes_per_s = rate(r->write_bytes, r->last_write_ns - r->since_ns);
    /* one of the two streams ends first, and the other's last requests are alone then */
    if (r->cfg->mode == MEASURE_MIXED)
        out->bytes_per_s = out->read_bytes_per_s + out->write_bytes_per_s;
    for (uint32_t i = 0; i < r->cfg->n_paths && out->bytes; i++)
        out->path_bytes_per_s[i] =
            out->bytes_per_s *
            ((double)(r->path[i].bytes[0] + r->path[i].bytes[1]) / (double)out->bytes);
    if (r->cfg->n_paths > 1 && !r->m->through) result_of_paths(r, out);
    count_threads(out);
    out->direct = io_direct(r->io);
    snprintf(out->backend, sizeof out->backend, "%s", io_describe(r->io));
}

static stk_status open_io(struct measure_run *r, struct stk_error *err)
{
    const struct measure_cfg *c = r->cfg;
    struct io_cfg ic = { .kind = c->kind,
                         .ex = r->ex,
                         .lane = r->lane,
                         .notify = &r->notify,
                         .depth = c->depth,
                         .workers = c->depth < WORKERS_MAX ? c->depth : WORKERS_MAX,
                         .buffered = c->buffered,
                         .no_registration = c->no_registration,
                         .sim = c->kind == IO_SIM ? c->sim : NULL };
    exec_task_init(&r->notify, run_notify, r);
    STK_TRY(io_open(&ic, &r->io, err));
    for (uint32_t i = 0; i < c->n_paths; i++) {
        struct measure_file *f = &r->m->files[i];
        struct stk_error why = { 0 };
        if (io_file_add(r->io, f->open_as[0] ? f->open_as : f->path, i, &r->io_file[i], &why) ==
            STK_OK)
            continue;
        return stk_error_set(err, why.code, why.os_errno, "%.300s: %.400s", f->path, why.text);
    }
    return STK_OK;
}

static stk_status run_on_lane(struct measure_run *r, struct stk_error *err)
{
    stk_status status = open_io(r, err);
    if (status == STK_OK)
        status = measure_run_places(r, r->cfg->n_paths, r->cfg->depth, err);
    if (status == STK_OK) {
        io_buffer_register(r->io, r->buffer, r->rounds * r->n_slots * r->block_bytes);
        status = measure_run_wait(r, err);
        measure_run_result(r);
    }
    return status;
}

/* `filled`: after a fill, the bytes at the start of every file that were written. */
static stk_status run_once(struct measure *m, const struct measure_cfg *cfg, uint64_t fill_least,
                           uint64_t *filled, struct measure_result *out, struct stk_error *err)
{
    struct measure_run *r = sys_calloc(1, sizeof *r);
    if (!r) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a measurement");
    memset(out, 0, sizeof *out);
    r->m = m;
    r->cfg = cfg;
    r->out = out;
    r->fill = filled != NULL;
    r->least_bytes = fill_least * cfg->n_paths;
    r->block_bytes = cfg->block_bytes;
    r->file_bytes = m->file_bytes;
    r->ex = measure_exec(m, cfg);
    stk_status status = exec_lane_open(r->ex, "measure", &r->lane, err);
    if (status == STK_OK) {
        status = run_on_lane(r, err);
        io_close(r->io);
        exec_lane_close(r->lane);
    }
    if (filled) {
        *filled = m->file_bytes;
        for (uint32_t i = 0; i < r->n_targets; i++) {
            uint64_t bytes = r->target[i].writes.next * r->block_bytes;
            if (bytes < *filled) *filled = bytes;
        }
    }
    measure_run_free(r);
    return status;
}

/* --- the first write -------------------------------------------------------------------------- */

/* Every unit gets its mark. */
static stk_status fill(struct measure *m, const struct measure_cfg *cfg, uint64_t within_ns,
                       uint64_t least_bytes, struct stk_error *err)
{
    struct measure_cfg c = *cfg;
    uint64_t filled, blocks = (m->file_bytes + FILL_BLOCK_BYTES - 1) / FILL_BLOCK_BYTES;
    struct measure_result *result = sys_calloc(1, sizeof *result);
    if (!result) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a measurement");
    c.mode = MEASURE_WRITE;
    c.block_bytes = FILL_BLOCK_BYTES;
    c.depth = blocks < FILL_DEPTH ? (uint32_t)blocks : FILL_DEPTH;
    c.ramp_ns = c.bytes_max = c.buffer_bytes = 0;
    c.run_ns = within_ns;
    m->stamped = false;
    stk_status status = run_once(m, &c, least_bytes, &filled, result, err);
    m->stamped = status == STK_OK;
    if (status == STK_OK) m->file_bytes = filled;
    sys_free(result);
    return status;
}

/* --- the public calls ------------------------------------------------------------------------- */

stk_status measure_open_within(const struct measure_cfg *cfg, uint64_t fill_ns,
                               uint64_t least_bytes, struct measure **out, struct stk_error *err)
{
    struct measure *m;
    *out = NULL;
    STK_TRY(measure_new(cfg, &m, err));
    stk_status status = STK_OK;
    for (uint32_t i = 0; status == STK_OK && i < cfg->n_paths; i++) status = make_file(m, i, err);
    if (status == STK_OK) status = fill(m, &m->cfg, fill_ns, least_bytes, err);
    if (status != STK_OK) {
        measure_close(m);
        return status;
    }
    *out = m;
    return STK_OK;
}

stk_status measure_open(const struct measure_cfg *cfg, struct measure **out, struct stk_error *err)
{
    return measure_open_within(cfg, 0, 0, out, err);
}

stk_status measure_run(struct measure *m, const struct measure_cfg *cfg, struct measure_result *out,
                       struct stk_error *err)
{
    memset(out, 0, sizeof *out);
    STK_TRY(measure_check(cfg, err));
    if (cfg->n_paths != m->cfg.n_paths || cfg->file_bytes != m->cfg.file_bytes)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a measurement was opened for %u files of %llu bytes and is asked to "
                             "run on %u of %llu",
                             m->cfg.n_paths, (ull)m->cfg.file_bytes, cfg->n_paths,
                             (ull)cfg->file_bytes);
    if (m->through) return measure_store_run(m, cfg, out, err);
    if (cfg->verify && !m->stamped) STK_TRY(fill(m, cfg, 0, 0, err));
    bool writes = cfg->mode == MEASURE_WRITE || cfg->mode == MEASURE_MIXED;
    if (writes && !cfg->verify) m->stamped = false;
    stk_status status = run_once(m, cfg, 0, NULL, out, err);
    /* what a failed write left is not known */
    if (status != STK_OK && status != STK_ERR_INTERRUPTED && cfg->mode != MEASURE_READ)
        m->stamped = false;
    return status;
}

void measure_close(struct measure *m)
{
    if (!m) return;
    if (m->through) measure_store_free(m);
    for (uint32_t i = 0; i < MEASURE_PATHS_MAX; i++) drop_file(m, &m->files[i]);
    sys_munmap(m->buffer, m->buffer_bytes);
    exec_close(m->own_ex);
    sys_free(m);
}

bool measure_file_name(const struct measure *m, uint32_t i, char *buf, size_t buf_bytes)
{
    const struct measure_file *f = &m->files[i];
    if (m->through || f->fd < 0) return false;
    int n = f->open_as[0] ? snprintf(buf, buf_bytes, "/proc/%d/fd/%d", (int)getpid(), f->fd)
                          : snprintf(buf, buf_bytes, "%s", f->path);
    return n > 0 && (size_t)n < buf_bytes;
}
