/* bench/nvme_unit.c - all that is measured of one unit, in the time it was given, and the evidence
 * for the verdict.
 *
 * Owns: the order and the shares of the time. Must not know: how a point is measured, how results
 * are shown. Application's thread. A unit's time: file 10 %, sweep 30 %, points with fio beside
 * them 40 %, random places 5 %, writes past the cache 15 %. What the time does not suffice for is
 * left out, never hurried. Of the bytes that may be written (64 GiB without another wish) a point
 * of the sweep gets 1/64 and a pattern with fio beside it 1/8, so that fast drives are not worn for
 * nothing and something is left for every phase. */
#include "bench/nvme_impl.h"
#include "bench/bench_impl.h"

#include <string.h>

#define MIB (1ull << 20)

static const enum measure_mode modes[NVME_MODES] = { MEASURE_READ, MEASURE_WRITE, MEASURE_MIXED,
                                                     MEASURE_OPTIMIZER };

static double clamp(double x, double low, double high)
{
    return x < low ? low : x > high ? high : x;
}

static uint64_t in_flight_max(const struct nvme_unit *u)
{
    uint64_t most = 128 * MIB;
    return u->file_bytes / 2 < most ? u->file_bytes / 2 : most;
}

static bool one_point(const struct nvme_bench *b) { return b->o.block_bytes || b->o.depth; }

/* Bytes to each path that the parts below are made of. */
static double write_share(const struct nvme_bench *b)
{
    double all = (double)b->o.write_max_bytes, most = 64.0 * 1024 * MIB;
    return (all < most ? all : most) / b->n_units;
}

/* --- sweep ------------------------------------------------------------------------------------ */

static stk_status sweep_mode(struct nvme_bench *b, uint32_t unit, struct measure *m, int which,
                             double until_s, double point_s, struct stk_error *err)
{
    struct nvme_unit *u = &b->unit[unit];
    struct sweep *s = &u->sweep[which];
    struct nvme_point p = { .step = NVME_SWEEP, .mode = which ? MEASURE_WRITE : MEASURE_READ,
                            .ramp_s = point_s / 5, .run_s = point_s * 4 / 5 };
    struct nvme_result *r;
    sweep_init(s, in_flight_max(u), u->file_bytes / 4);
    p.bytes_max = (uint64_t)(write_share(b) / 64);
    while (sweep_next(s, &p.block_bytes, &p.depth) && bench_now_s() < until_s) {
        STK_TRY(nvme_point_run(b, unit, m, &p, &r, err));
        if (!r) break;
        sweep_put(s, r->bytes_per_s);
    }
    if (!sweep_choose(s, &u->best_block[which], &u->best_depth[which], &u->best_rate[which]))
        u->best_depth[which] = 0;
    return STK_OK;
}

static stk_status run_sweep(struct nvme_bench *b, uint32_t unit, struct measure *m, double budget_s,
                            struct stk_error *err)
{
    int n = b->mode[MEASURE_READ] + b->mode[MEASURE_WRITE];
    if (n == 0) return STK_OK;
    double point_s = clamp(budget_s / n / 20, 0.1, 1.0), begin = bench_now_s();
    b->unit[unit].swept = true;
    for (int which = 0, k = 0; which < 2; which++) {
        if (!b->mode[which ? MEASURE_WRITE : MEASURE_READ]) continue;
        k++;
        STK_TRY(sweep_mode(b, unit, m, which, begin + budget_s * k / n, point_s, err));
    }
    return STK_OK;
}

/* --- points ----------------------------------------------------------------------------------- */

/* As deep as the drive gains from, within what a trainer keeps in flight. */
static uint32_t usual_depth(const struct nvme_bench *b, uint32_t unit)
{
    uint32_t depth = 0;
    if (b->o.depth) return (uint32_t)b->o.depth;
    for (uint32_t i = 0; i <= unit; i++)
        for (int which = 0; which < 2; which++)
            if (b->unit[i].best_depth[which] > depth) depth = b->unit[i].best_depth[which];
    return depth == 0 ? 16 : depth < 8 ? 8 : depth > 32 ? 32 : depth;
}

static uint32_t depth_for(const struct nvme_bench *b, uint32_t unit, uint64_t block_bytes)
{
    uint64_t most = in_flight_max(&b->unit[unit]) / block_bytes;
    uint32_t depth = usual_depth(b, unit);
    if (b->o.depth) return depth; /* asked for: a file too small for it is an error */
    return most < depth ? most > 0 ? (uint32_t)most : 1 : depth;
}

static uint32_t list_points(const struct nvme_bench *b, uint32_t unit, struct nvme_point *p)
{
    uint32_t n = 0;
    for (int i = 0; i < (b->o.block_bytes ? 1 : 2); i++) /* what matters most comes first */
        for (int k = 0; k < NVME_MODES; k++) {
            uint64_t block = b->o.block_bytes ? b->o.block_bytes : i ? 4 * MIB : MIB;
            bool optimizer = modes[k] == MEASURE_OPTIMIZER;
            if (!b->mode[modes[k]] || (i && optimizer)) continue;
            if (optimizer && !b->o.block_bytes) block = NVME_OPT_BYTES;
            if (block > b->unit[unit].file_bytes / 2 && !b->o.block_bytes) continue;
            p[n++] = (struct nvme_point){ .step = NVME_POINT, .mode = modes[k],
                                          .block_bytes = block,
                                          .depth = depth_for(b, unit, block),
                                          .pairs = (uint32_t)b->o.pairs };
        }
    return n;
}

static void show(const struct nvme_bench *b, const struct nvme_result *r)
{
    nvme_table_row(b, r);
    fflush(stdout);
}

/* Seconds of one run, so that a point with all its runs stays within its bytes. */
static double run_seconds(const struct nvme_bench *b, uint32_t unit, const struct nvme_point *p,
                          double run_s)
{
    double rate = 0, sides = b->fio.usable && p->pairs ? 2 : 1;
    double part = p->mode == MEASURE_READ ? 0 : p->mode == MEASURE_WRITE ? 1 : 0.5;
    for (uint32_t i = 0; i <= unit; i++)
        if (b->unit[i].best_rate[1] > rate) rate = b->unit[i].best_rate[1];
    double most = write_share(b) / 8 / sides / (double)b->o.pairs;
    if (one_point(b) || rate * part * run_s <= most) return run_s;
    return most / (rate * part);
}

static stk_status run_points(struct nvme_bench *b, uint32_t unit, struct measure *m,
                             double budget_s, struct stk_error *err)
{
    struct nvme_point p[2 * NVME_MODES];
    struct nvme_result *r;
    uint32_t n = list_points(b, unit, p);
    double fio_s = b->fio.usable ? 0.5 : 0; /* fio's own start and end */
    double each = n ? budget_s / n / (double)b->o.pairs : 0;
    each = clamp((each - fio_s) / (b->fio.usable ? 2 : 1), 0.15, one_point(b) ? 1e6 : 3.0);
    double until = one_point(b) ? 1e18 : bench_now_s() + 1.3 * budget_s;
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0 && bench_now_s() > until) {
            nvme_note(b, "%u of %u points were left out: the time was up (--time)", n - i, n);
            break;
        }
        p[i].ramp_s = clamp(each / 6, 0.02, 0.5);
        p[i].run_s = run_seconds(b, unit, &p[i], each - p[i].ramp_s);
        /* a block is told apart by its marks only while nobody else writes (BEN-05) */
        bool fio_writes = p[i].mode != MEASURE_READ && b->o.verify;
        if (fio_writes) p[i].pairs = 0;
        STK_TRY(nvme_point_run(b, unit, m, &p[i], &r, err));
        if (nvme_stopped(b)) return STK_OK;
        if (r) show(b, r);
        else nvme_note(b, "%s at %llu KiB was left out: --write-max is used up",
                       nvme_mode_name(p[i].mode), (unsigned long long)(p[i].block_bytes >> 10));
    }
    return STK_OK;
}

static stk_status run_random(struct nvme_bench *b, uint32_t unit, struct measure *m,
                             double budget_s, struct stk_error *err)
{
    double each = clamp(budget_s / 2, 0.15, 2.0);
    for (int which = 0; which < 2; which++) {
        struct nvme_point p = { .step = NVME_RANDOM, .random = true,
                                .mode = which ? MEASURE_WRITE : MEASURE_READ, .block_bytes = MIB,
                                .depth = depth_for(b, unit, MIB), .ramp_s = each / 5,
                                .run_s = each * 4 / 5,
                                .bytes_max = (uint64_t)(write_share(b) / 32) };
        struct nvme_result *r;
        if (!b->mode[p.mode]) continue;
        STK_TRY(nvme_point_run(b, unit, m, &p, &r, err));
        if (r) show(b, r);
    }
    return STK_OK;
}

/* --- writes past the cache -------------------------------------------------------------------- */

static bool steady_enough(const struct nvme_bench *b, const struct steady_series *s, double past_s,
                          double limit_s)
{
    struct steady_summary sum;
    if (!steady_reached(s->rate, s->n, &steady_default)) return false;
    if (b->o.sustained && b->time_given) return false; /* a decay may be slow */
    steady_summarise(s, &steady_default, &sum);
    return sum.dropped || past_s > limit_s / 2;
}

/* One result for the whole series, of its last window. */
static stk_status sample(struct nvme_bench *b, uint32_t unit, struct measure *m,
                         const struct nvme_point *p, double begin_s, bool *more,
                         struct nvme_result *keep, struct stk_error *err)
{
    struct steady_series *s = &b->unit[unit].series;
    struct nvme_result *r;
    STK_TRY(nvme_point_run(b, unit, m, p, &r, err));
    *more = r != NULL && s->n < STEADY_MAX;
    if (!r) return STK_OK;
    s->rate[s->n] = r->bytes_per_s;
    s->bytes[s->n] = (double)r->bytes;
    s->at_s[s->n++] = bench_now_s() - begin_s;
    *keep = *r;
    b->n_results--; /* the series becomes one result */
    return STK_OK;
}

static stk_status run_steady(struct nvme_bench *b, uint32_t unit, struct measure *m,
                             double budget_s, struct stk_error *err)
{
    struct nvme_unit *u = &b->unit[unit];
    struct nvme_result last = { 0 };
    uint32_t d = depth_for(b, unit, MIB);
    struct nvme_point p = { .step = NVME_STEADY, .mode = MEASURE_WRITE, .block_bytes = MIB,
                            .depth = d,
                            .run_s = clamp(budget_s / 24, 0.1, 1.0 + budget_s / STEADY_MAX * 1.2) };
    double begin = bench_now_s();
    bool more = true;
    if (!b->mode[MEASURE_WRITE] || budget_s < 1) return STK_OK;
    while (more && bench_now_s() - begin < budget_s &&
           !steady_enough(b, &u->series, bench_now_s() - begin, budget_s))
        STK_TRY(sample(b, unit, m, &p, begin, &more, &last, err));
    if (u->series.n == 0) return STK_OK;
    steady_summarise(&u->series, &steady_default, &u->steady);
    struct nvme_result *r = &b->result[b->n_results++]; /* the room of the last sample */
    *r = last;
    r->bytes_per_s = r->write_bytes_per_s = u->steady.sustained;
    r->n_pairs = 0;
    show(b, r);
    return STK_OK;
}

/* --- all of it -------------------------------------------------------------------------------- */

static stk_status measure_all(struct nvme_bench *b, uint32_t unit, struct measure *m,
                              double budget_s, double steady_s, struct stk_error *err)
{
    bool together = unit > 0 && unit + 1 == b->n_units;
    if (one_point(b)) {
        STK_TRY(run_points(b, unit, m, budget_s * 0.85, err));
        return b->o.sustained ? run_steady(b, unit, m, steady_s, err) : STK_OK;
    }
    if (!together) STK_TRY(run_sweep(b, unit, m, budget_s * 0.30, err));
    STK_TRY(run_points(b, unit, m, budget_s * (together ? 0.60 : 0.40), err));
    STK_TRY(run_random(b, unit, m, budget_s * 0.05, err));
    return run_steady(b, unit, m, steady_s, err);
}

stk_status nvme_unit_run(struct nvme_bench *b, uint32_t unit, double budget_s,
                         struct stk_error *err)
{
    struct measure *m = NULL;
    double steady_s = budget_s * 0.15;
    if (b->o.sustained) { /* 80 s for the rest, all units together */
        double rest = 80.0 / b->n_units < budget_s / 2 ? 80.0 / b->n_units : budget_s / 2;
        steady_s = budget_s - rest;
        budget_s = rest;
    }
    stk_status st = nvme_unit_open(b, unit, budget_s, &m, err);
    if (st == STK_OK) st = measure_all(b, unit, m, budget_s, steady_s, err);
    measure_close(m);
    if (st == STK_ERR_INTERRUPTED && nvme_stopped(b)) {
        stk_error_clear(err);
        return STK_OK;
    }
    return st;
}

/* --- evidence --------------------------------------------------------------------------------- */

static uint64_t distance(uint64_t a, uint64_t b) { return a > b ? a - b : b - a; }

const struct nvme_result *nvme_find(const struct nvme_bench *b, uint32_t unit,
                                    enum nvme_step step, enum measure_mode mode,
                                    uint64_t block_bytes)
{
    const struct nvme_result *found = NULL;
    for (uint32_t i = 0; i < b->n_results; i++) {
        const struct nvme_result *r = &b->result[i];
        if (r->unit != unit || r->step != step || r->mode != mode) continue;
        bool better = !found || (block_bytes ? distance(r->block_bytes, block_bytes) <
                                                   distance(found->block_bytes, block_bytes)
                                             : r->bytes_per_s > found->bytes_per_s);
        if (better) found = r;
    }
    return found;
}

static double rate_of(const struct nvme_bench *b, uint32_t unit, enum measure_mode mode,
                      uint64_t block_bytes)
{
    const struct nvme_result *r = nvme_find(b, unit, NVME_POINT, mode, block_bytes);
    return r ? r->bytes_per_s : 0;
}

static void collect_best(const struct nvme_bench *b, uint32_t unit, struct nvme_evidence *e)
{
    const struct nvme_unit *u = &b->unit[unit];
    for (uint32_t i = 0; i < b->n_results; i++) {
        const struct nvme_result *r = &b->result[i];
        if (r->unit != unit || r->random) continue;
        if (!r->valid && !e->memory && !r->verify_failures) {
            e->memory = true;
            snprintf(e->memory_why, sizeof e->memory_why, "%s", r->why);
        }
        if (r->cpu_share > e->cpu_share && r->step == NVME_POINT && !b->o.verify)
            e->cpu_share = r->cpu_share;
        if (r->mode == MEASURE_READ && r->block_bytes == MIB && r->bytes_per_s > e->train_read)
            e->train_read = r->bytes_per_s;
        if (r->mode == MEASURE_WRITE && r->step != NVME_STEADY && r->bytes_per_s > e->best_write)
            e->best_write = r->bytes_per_s;
        if (r->mode != MEASURE_READ || r->bytes_per_s <= e->best_read) continue;
        e->best_read = r->bytes_per_s;
        e->best_block = r->block_bytes;
        e->best_depth = r->depth;
    }
    if (u->best_depth[0] && u->best_rate[0] >= 0.9 * e->best_read) { /* no deeper than needed */
        e->best_block = u->best_block[0];
        e->best_depth = u->best_depth[0];
    }
}

static void collect_shares(const struct nvme_bench *b, uint32_t unit, struct nvme_evidence *e)
{
    double share[NVME_PAIRS_MAX];
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n_results && n < NVME_PAIRS_MAX; i++) {
        const struct nvme_result *r = &b->result[i];
        if (r->unit == unit && r->n_pairs && r->mode != MEASURE_OPTIMIZER)
            share[n++] = r->share_of_fio;
    }
    e->share_of_fio = nvme_median(share, n);
}

/* The sweep and the points measured some places twice: how far are they apart? */
static void collect_spread(const struct nvme_bench *b, uint32_t unit, struct nvme_evidence *e)
{
    for (uint32_t i = 0; i < b->n_results; i++)
        for (uint32_t k = 0; k < b->n_results; k++) {
            const struct nvme_result *p = &b->result[i], *s = &b->result[k];
            if (p->unit != unit || s->unit != unit || p->step != NVME_POINT ||
                s->step != NVME_SWEEP || p->mode != s->mode ||
                p->block_bytes != s->block_bytes || p->depth != s->depth)
                continue;
            double x = p->bytes_per_s, y = s->bytes_per_s;
            double apart = x > y ? (x - y) / x : y > 0 ? (y - x) / y : 0;
            if (apart > e->spread) e->spread = apart;
        }
}

static void collect_drives(const struct nvme_bench *b, struct nvme_evidence *e)
{
    bool link_known = true, left_known = true;
    for (uint32_t i = 0; i < b->n_paths; i++) {
        const struct drive_facts *d = &b->drive[i];
        bool again = false;
        for (uint32_t k = 0; k < i; k++)
            again = again || (d->under[0] && strcmp(b->drive[k].under, d->under) == 0) ||
                    b->drive[k].device_id == d->device_id;
        e->shared_drive = e->shared_drive || again;
        e->rotational = e->rotational || nvme_rotates(d);
        if (again) continue;
        link_known = link_known && d->link_bytes_per_s > 0;
        left_known = left_known && d->smart && d->endurance_bytes > d->written_bytes;
        e->link += d->link_bytes_per_s;
        e->endurance_bytes += d->endurance_bytes - d->written_bytes;
    }
    if (!link_known) e->link = 0;
    if (!left_known) e->endurance_bytes = 0;
}

/* Together over the sum of each alone: the poorest of the three patterns. */
static void collect_balance(const struct nvme_bench *b, struct nvme_evidence *e)
{
    uint32_t last = b->n_units - 1;
    for (int k = 0; k < 3 && last > 0; k++) {
        double sum = 0, together = rate_of(b, last, modes[k], MIB);
        for (uint32_t i = 0; i < last; i++) sum += rate_of(b, i, modes[k], MIB);
        if (sum <= 0 || together <= 0) continue;
        if (e->sum_share <= 0 || together / sum < e->sum_share) e->sum_share = together / sum;
    }
    for (uint32_t i = 0; i < b->n_paths; i++) {
        double r = rate_of(b, i, MEASURE_MIXED, MIB);
        e->path_rate[i] = r > 0 ? r : rate_of(b, i, MEASURE_READ, MIB);
    }
}

void nvme_conclude(struct nvme_bench *b)
{
    struct nvme_evidence *e = &b->evidence;
    uint32_t last = b->n_units - 1;
    memset(e, 0, sizeof *e);
    e->n_paths = b->n_paths;
    e->read = rate_of(b, last, MEASURE_READ, MIB);
    e->write = rate_of(b, last, MEASURE_WRITE, MIB);
    e->mixed = rate_of(b, last, MEASURE_MIXED, 4 * MIB);
    e->optimizer = rate_of(b, last, MEASURE_OPTIMIZER, 0);
    const struct steady_summary *s = &b->unit[last].steady;
    e->sustained_known = s->reached && (s->dropped || b->o.sustained);
    if (s->reached || s->dropped) e->sustained = s->sustained;
    e->uring = strncmp(b->unit[last].backend, "posix", 5) != 0;
    snprintf(e->backend, sizeof e->backend, "%s", b->unit[last].backend);
    collect_best(b, last, e);
    collect_shares(b, last, e);
    collect_spread(b, last, e);
    collect_drives(b, e);
    collect_balance(b, e);
    nvme_judge(e, &b->verdict);
}
