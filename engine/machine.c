/* engine/machine.c - the machine at hand, measured in a second or two, and the simulated one.
 *
 * Application's thread, before and after stk_seal. Owns buffers for the time of a measurement only.
 * Must not know plans. Figures are medians of a few runs over as many bytes as the model moves, at
 * most BUFFER_ELEMS parameters, that no cache holds: a step touches each state once or twice, and what
 * a drive brought is in no cache. (Checksums of 14 MB in a cache go at 28 GB/s, of what a run reads at
 * 10.) */
#include "engine/machine.h"
#include "base/convert.h"
#include "base/cpu.h"
#include "base/sys.h"
#include "nvme/io_sim.h"

#include <stdlib.h>
#include <string.h>

#define BUFFER_ELEMS (64ull << 20) /* 8 to 14 bytes each: more than caches hold */
#define NVME_ELEMS (4ull << 20)    /* where the state lies on NVMe, little is in memory */
#define LEAST_ELEMS 65536ull
#define RUNS 5
#define CHECKSUM_BYTES (224ull << 20)
#define FLUSH_BYTES (2048ull << 20)
#define HOPS 64
#define JOBS 32
#define DRIVE_LATENCY_NS 100000u /* of a drive that is not simulated: of the order of a flash read */

/* --- measuring -------------------------------------------------------------------------------- */

struct bench {
    stk_engine *e;
    uint8_t *memory;
    uint64_t n, size_bytes;     /* elements */
    struct exec_team *team;
    uint32_t threads;
    uint32_t sink;
};
typedef void bench_fn(struct bench *b);

/* The update as the engine runs it: chunk after chunk, each one a job of a team, so that what the
 * members wait for each other is in it. */
struct adam_job { struct exec_team_job job; struct bench *b; uint64_t first, n; };

static void adam_slice(void *arg, uint32_t slice, uint32_t n_slices)
{
    const struct adam_job *j = arg;
    const struct bench *b = j->b;
    uint64_t from = j->first + j->n / 64 * slice / n_slices * 64,
             to = j->first + j->n / 64 * (slice + 1) / n_slices * 64;
    enum chunk_moments kind = (enum chunk_moments)b->e->cfg.moments;
    uint64_t width = kind == CHUNK_MOMENTS_F32 ? 4 : kind == CHUNK_MOMENTS_BF16 ? 2 : 1;
    struct adam_moments at = { .kind = kind, .at = { b->memory, b->memory + width * b->n } };
    at.absmax[0] = (float *)(void *)(b->memory + 2 * b->n);
    at.absmax[1] = at.absmax[0] + b->n / ADAM_QUANT_ELEMS;
    uint16_t *param = (uint16_t *)(void *)(b->memory + chunk_moment_bytes(kind, b->n)) + from;
    struct adam_span s = { .n = to - from, .param = param, .low_or_master = param + b->n,
                           .grad = param + 2 * b->n };
    struct adam_hyper h = { 1e-5, 0.9, 0.999, 1e-8, 0.01, ADAM_ADAMW };
    struct adam_dither d = { .update = 7 };
    struct adam_coef c;
    adam_coef_make(&h, 7, 1.0, &c);
    adam_narrow_run(b->e->adam, ADAM_BF16_SPLIT, &s, &at, from, &d, &c, false);
}

/* Bytes that the update reads and writes, a parameter. */
static double update_bytes(const stk_engine *e)
{
    double moments = (double)chunk_moment_bytes((enum chunk_moments)e->cfg.moments, 64) / 64;
    return 10 + 2 * moments;
}

static void set_wait_event(void *engine)
{
    exec_event_set(&((stk_engine *)engine)->wait_event);
}

/* Queues the jobs and waits for the last. */
static void run_jobs(struct bench *b, struct adam_job *jobs, uint32_t n)
{
    stk_engine *e = b->e;
    exec_event_reset(&e->wait_event);
    exec_task_init(&e->wait_task, set_wait_event, e);
    for (uint32_t i = 0; i < n; i++) {
        jobs[i].job.arg = &jobs[i];
        jobs[i].job.n_slices = jobs[i].job.fn == adam_slice ? ADAM_MEMBER_SLICES * exec_team_members(b->team)
                                                            : exec_team_members(b->team);
        jobs[i].job.beside = true;
        jobs[i].job.done_lane = i + 1 == n ? e->lane : NULL;
        jobs[i].job.done = i + 1 == n ? &e->wait_task : NULL;
        exec_team_run(b->team, &jobs[i].job);
    }
    if (n > 0) (void)exec_event_wait(&e->wait_event, UINT64_MAX, NULL);
}

static void run_adam(struct bench *b)
{
    struct adam_job jobs[JOBS];
    uint64_t chunk = b->e->cfg.chunk_elems, at = 0;
    while (at < b->n) {
        uint32_t n = 0;
        for (; n < JOBS && at < b->n; n++, at += chunk)
            jobs[n] = (struct adam_job){ .job.fn = adam_slice,
                                         .b = b,
                                         .first = at,
                                         .n = b->n - at < chunk ? b->n - at : chunk };
        run_jobs(b, jobs, n);
    }
}

/* Both cast streams at once: a half each. */
static void cast_half(void *arg, uint32_t slice, uint32_t n_slices)
{
    const struct adam_job *j = arg;
    const struct bench *b = j->b;
    uint64_t n = b->n / 2 / 64 * 64, first = slice * n, chunk = b->e->cfg.chunk_elems;
    struct convert_sum sum;
    for (uint64_t at = 0; slice < ENG_CASTS && at < n; at += chunk)
        convert_grad_bf16((const float *)(const void *)b->memory + first + at,
                          (uint16_t *)(void *)(b->memory + 4 * b->n) + first + at,
                          n - at < chunk ? n - at : chunk, 1.0f, &sum);
}

static void run_cast(struct bench *b)
{
    struct adam_job j = { .job.fn = cast_half, .b = b };
    run_jobs(b, &j, 1);
}

static void run_copy(struct bench *b)
{
    memcpy(b->memory + b->size_bytes / 2, b->memory, b->size_bytes / 2);
}

static void run_zero(struct bench *b)
{
    const uint64_t piece = 1u << 20, pieces = b->size_bytes / piece;
#pragma omp parallel for num_threads(b->threads) schedule(static)
    for (uint64_t i = 0; i < pieces; i++) memset(b->memory + i * piece, 0, piece);
}

static uint64_t checksum_bytes(const struct bench *b)
{
    return b->size_bytes < CHECKSUM_BYTES ? b->size_bytes : CHECKSUM_BYTES;
}
static void run_checksum(struct bench *b) { b->sink ^= measure_checksum(b->memory, checksum_bytes(b)); }

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Median rate; 0: the clock does not move. */
static double rate_of(struct bench *b, bench_fn *fn, double bytes)
{
    double ns[RUNS];
    fn(b);
    for (int i = 0; i < RUNS; i++) {
        cpu_cache_flush(b->memory, b->size_bytes < FLUSH_BYTES ? b->size_bytes : FLUSH_BYTES);
        uint64_t t0 = exec_now_ns(b->e->ex);
        fn(b);
        ns[i] = (double)(exec_now_ns(b->e->ex) - t0);
    }
    qsort(ns, RUNS, sizeof ns[0], by_value);
    return ns[RUNS / 2] > 0 ? bytes / ns[RUNS / 2] * 1e9 : 0;
}

/* There and back between two threads: what a completion takes through the engine lane. */
static uint64_t hop_ns(stk_engine *e)
{
    double ns[HOPS];
    for (int i = 0; i < HOPS; i++) {
        uint64_t t0 = exec_now_ns(e->ex);
        exec_event_reset(&e->wait_event);
        exec_task_init(&e->wait_task, set_wait_event, e);
        exec_post(e->lane, &e->wait_task);
        if (exec_event_wait(&e->wait_event, t0 + 1000000000u, NULL) != STK_OK) return 0;
        ns[i] = (double)(exec_now_ns(e->ex) - t0);
    }
    qsort(ns, HOPS, sizeof ns[0], by_value);
    return (uint64_t)ns[HOPS / 2];
}

static uint64_t model_elems(const stk_engine *e)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < e->n_blocks; i++)
        for (uint32_t k = 0; k < e->blocks[i].n_tensors; k++) n += e->blocks[i].tensors[k].n_elems;
    if (n > BUFFER_ELEMS) n = BUFFER_ELEMS;
    /* Little is held yet, but the peak of the process counts: never more than the run will hold. */
    if (e->cfg.params == STK_TIER_NVME || e->cfg.grads == STK_TIER_NVME) n = n / 14 * 10;
    if (e->cfg.optimizer_state == STK_TIER_NVME && n > NVME_ELEMS) n = NVME_ELEMS;
    if (e->cfg.host_memory && n > e->cfg.host_memory / 56) n = e->cfg.host_memory / 56;
    n = n / 64 * 64;
    return n < LEAST_ELEMS ? LEAST_ELEMS : n;
}

static void measure_rates_of_host(struct bench *b, stk_machine *m)
{
    double n = (double)b->n, size = (double)b->size_bytes, widest;
    m->update_bytes_per_s = rate_of(b, run_adam, update_bytes(b->e) * n);
    /* of one stream; a team of one casts a half */
    m->cast_bytes_per_s = rate_of(b, run_cast, n);
    m->copy_in_bytes_per_s = m->copy_out_bytes_per_s = rate_of(b, run_copy, size / 2);
    m->checksum_bytes_per_s = rate_of(b, run_checksum, (double)checksum_bytes(b));
    b->threads = m->cores;
    m->device_bytes_per_s = rate_of(b, run_zero, (double)(b->size_bytes >> 20 << 20));
    widest = m->update_bytes_per_s > m->device_bytes_per_s ? m->update_bytes_per_s
                                                           : m->device_bytes_per_s;
    m->dram_bytes_per_s = widest > 2 * m->copy_in_bytes_per_s ? widest : 2 * m->copy_in_bytes_per_s;
}

stk_status stk_machine_measure(stk_engine *e, stk_machine *out)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_DESCRIBE || exec_kind_of(e->ex) == EXEC_SIM)
        return eng_refuse_state(e, "stk_machine_measure", "before stk_seal, not in simulation");
    STK_TRY(drives_check_folders(e)); /* the seal would refuse them, seconds later */
    STK_TRY(dev_matmul_rate(e->dev, &e->err));
    dev_caps_read(e->dev, &e->caps);
    struct bench b = { .e = e, .n = model_elems(e) };
    b.size_bytes = 6 * b.n + chunk_moment_bytes((enum chunk_moments)e->cfg.moments, b.n);
    b.memory = sys_mmap(b.size_bytes, true);
    if (!b.memory)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory to measure this machine");
    memset(b.memory, 0, b.size_bytes);
    stk_machine_init(out, sizeof *out);
    snprintf(out->name, sizeof out->name, "this machine");
    cpu_name(out->text, sizeof out->text);
    out->on_host = true;
    out->cores = topology_threads(e->topology);
    out->flops_per_s = e->caps.matmul_flops_per_s;
    b.threads = e->cores.update;
    stk_status st = exec_team_open(e->ex, "measure", b.threads, &b.team, &e->err);
    if (st == STK_OK) measure_rates_of_host(&b, out);
    if (st == STK_OK) exec_team_close(b.team);
    sys_munmap(b.memory, b.size_bytes);
    out->hop_ns = hop_ns(e);
    e->predicting = st == STK_OK;
    e->measured = *out;
    return st;
}

/* --- drives ----------------------------------------------------------------------------------- */

bool machine_drives(const stk_engine *e, stk_machine *m, uint8_t drive_of_path[STK_NVME_MAX])
{
    uint8_t of_first[STK_NVME_MAX] = { 0 };
    m->n_drives = 0;
    for (uint32_t i = 0; i < e->n_paths; i++) {
        stk_drive d;
        if (!stk_drive_info(e, i, &d) || !(d.both_bytes_per_s > 0)) return false;
        if (d.first_of_drive == i) {
            of_first[i] = (uint8_t)m->n_drives;
            m->drives[m->n_drives++] =
                (stk_machine_drive){ .read_bytes_per_s = d.read_bytes_per_s,
                                     .write_bytes_per_s = d.write_bytes_per_s,
                                     .both_bytes_per_s = d.both_bytes_per_s,
                                     .cores_busy = d.cores_busy,
                                     .latency_ns = DRIVE_LATENCY_NS };
        }
        drive_of_path[i] = of_first[d.first_of_drive];
    }
    return true;
}

/* --- pacing ----------------------------------------------------------------------------------- */

void machine_pace(const stk_engine *e, struct pace *out)
{
    stk_machine m;
    *out = (struct pace){ 0 };
    if (machine_simulated(e, &m)) {
        pace_of_machine(&m, out);
    } else if (e->predicting && e->caps.copy_paced) {
        m = e->measured;
        m.on_host = false;
        m.copy_in_bytes_per_s = m.copy_out_bytes_per_s = 0; /* the processor's, not the link's */
        pace_of_machine(&m, out);
    }
}

/* --- simulated -------------------------------------------------------------------------------- */

struct dev_model machine_model(const stk_machine *m)
{
    return (struct dev_model){ .flops_per_s = m->flops_per_s,
                               .copy_in_bytes_per_s = m->copy_in_bytes_per_s,
                               .copy_out_bytes_per_s = m->copy_out_bytes_per_s,
                               .memory_bytes_per_s = m->device_bytes_per_s,
                               .launch_ns = m->launch_ns,
                               .update_bytes_per_s = m->update_bytes_per_s,
                               .dram_bytes_per_s = m->dram_bytes_per_s,
                               .copy_both_bytes_per_s = m->copy_both_bytes_per_s };
}

static void simulated_drives(const stk_engine *e, stk_machine *m)
{
    const struct io_sim_cfg *c = e->cfg.sim_disk;
    if (!c || e->cfg.storage != STK_STORAGE_SIM) return;
    m->n_drives = e->n_paths > 1 ? e->n_paths : 1;
    for (uint32_t i = 0; i < m->n_drives; i++) {
        double r = c->drives[i].read_bytes_per_s, w = c->drives[i].write_bytes_per_s;
        stk_machine_drive *d = &m->drives[i];
        d->read_bytes_per_s = r > 0 ? r : c->read_bytes_per_s;
        d->write_bytes_per_s = w > 0 ? w : c->write_bytes_per_s;
        /* so that halves of the time for each direction are all there is */
        if (c->shared_rate)
            d->both_bytes_per_s = 2 * d->read_bytes_per_s * d->write_bytes_per_s /
                                  (d->read_bytes_per_s + d->write_bytes_per_s);
        if (c->both_bytes_per_s > 0) d->both_bytes_per_s = c->both_bytes_per_s;
        d->latency_ns = c->latency_ns;
    }
}

/* Each stream, the team and each drive has a clock of its own (gpu/host/host_model.c, nvme/io_sim.c,
 * engine/issue.c); the host's memory, the link and a drive are shared as far as they have figures. */
bool machine_simulated(const stk_engine *e, stk_machine *out)
{
    struct dev_model d;
    if (!e->caps.modelled_time) return false;
    stk_machine_init(out, sizeof *out);
    snprintf(out->name, sizeof out->name, "the simulated machine");
    dev_model_read(e->dev, &d);
    out->cores = 1;
    out->flops_per_s = d.flops_per_s;
    out->device_bytes_per_s = d.memory_bytes_per_s;
    out->launch_ns = d.launch_ns;
    out->copy_in_bytes_per_s = d.copy_in_bytes_per_s;
    out->copy_out_bytes_per_s = d.copy_out_bytes_per_s;
    out->cast_bytes_per_s = d.memory_bytes_per_s / 3; /* 4 read and 2 written for 2 made */
    out->update_bytes_per_s = d.update_bytes_per_s;
    out->dram_bytes_per_s = d.dram_bytes_per_s;
    out->copy_both_bytes_per_s = d.copy_both_bytes_per_s;
    simulated_drives(e, out);
    return true;
}
