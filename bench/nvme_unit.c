/* bench/nvme_unit.c - all that is measured of one unit, in the time it was given.
 *
 * Owns: the order and the shares of the time. Must not know: how a point is measured, how results
 * are shown. Application's thread. A unit's time: file 10 %, sweep 30 %, points with fio beside
 * them 38 %, random places 5 %, writes past the cache 15 %, the first point once more 2 %. The
 * three points that the seconds per step are made of are measured three times. What the time does
 * not suffice for is left out, never hurried. Of the bytes that may be written (64 GiB without
 * another wish) a point of the sweep gets 1/64 and a pattern with fio beside it 1/8, so that fast
 * drives are not worn for nothing and something is left for every phase. */
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

enum { DECIDING_RUNS = 3 };

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
                                          .pairs = (uint32_t)b->o.pairs, .runs = 1 };
            if (!one_point(b) && (optimizer || (i == 0 && modes[k] != MEASURE_MIXED)))
                p[n - 1].runs = DECIDING_RUNS;
        }
    return n;
}

static void show(const struct nvme_bench *b, const struct nvme_result *r)
{
    nvme_table_row(b, r);
    fflush(stdout);
}

/* Runs of a point, ours and fio's. */
static double runs_of(const struct nvme_bench *b, const struct nvme_point *p)
{
    uint32_t ours = p->runs > p->pairs ? p->runs : p->pairs;
    return ours + (b->fio.usable ? p->pairs : 0);
}

/* Seconds of one run when all points together get `budget_s`, less what fio needs to begin and to
 * end. Too short for several runs of a point: one of each. */
static double seconds_each(const struct nvme_bench *b, struct nvme_point *p, uint32_t n,
                           double budget_s)
{
    const double fio_s = b->fio.usable ? 0.5 : 0, shortest = 0.3;
    double runs = 0, each = 0;
    for (int pass = 0; pass < 2 && n > 0 && each < shortest; pass++) {
        runs = 0;
        for (uint32_t i = 0; i < n; i++) {
            if (pass) p[i].runs = 1;
            runs += runs_of(b, &p[i]);
        }
        each = (budget_s - n * (double)b->o.pairs * fio_s) / runs;
    }
    return clamp(each, 0.15, one_point(b) ? 1e6 : 3.0);
}

/* Seconds of one run, so that a point with all its runs stays within its bytes. */
static double run_seconds(const struct nvme_bench *b, uint32_t unit, const struct nvme_point *p,
                          double run_s)
{
    double rate = 0;
    double part = p->mode == MEASURE_READ ? 0 : p->mode == MEASURE_WRITE ? 1 : 0.5;
    for (uint32_t i = 0; i <= unit; i++)
        if (b->unit[i].best_rate[1] > rate) rate = b->unit[i].best_rate[1];
    double most = write_share(b) / 8 / runs_of(b, p);
    if (one_point(b) || rate * part * run_s <= most) return run_s;
    return most / (rate * part);
}

static stk_status run_points(struct nvme_bench *b, uint32_t unit, struct measure *m,
                             double budget_s, struct stk_error *err)
{
    struct nvme_point p[2 * NVME_MODES];
    struct nvme_result *r;
    uint32_t n = list_points(b, unit, p);
    double each = seconds_each(b, p, n, budget_s);
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
        if (fio_writes) {
            p[i].runs = p[i].runs > p[i].pairs ? p[i].runs : p[i].pairs;
            p[i].pairs = 0;
        }
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

/* The first point once more: whether the drive is still the one that the run began with. */
static stk_status run_again(struct nvme_bench *b, uint32_t unit, struct measure *m,
                            double budget_s, struct stk_error *err)
{
    const struct nvme_result *first = NULL;
    for (uint32_t i = 0; i < b->n_results && !first; i++)
        if (b->result[i].unit == unit && b->result[i].step == NVME_POINT) first = &b->result[i];
    if (!first) return STK_OK;
    double each = clamp(budget_s, 0.15, 2.0);
    struct nvme_point p = { .step = NVME_AGAIN, .mode = first->mode,
                            .block_bytes = first->block_bytes, .depth = first->depth,
                            .ramp_s = each / 5, .run_s = each * 4 / 5,
                            .bytes_max = (uint64_t)(write_share(b) / 64) };
    struct nvme_result *r;
    STK_TRY(nvme_point_run(b, unit, m, &p, &r, err));
    if (r) show(b, r);
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
    bool reads = !b->mode[MEASURE_WRITE] && b->mode[MEASURE_READ] && b->o.sustained;
    u->steady_mode = reads ? MEASURE_READ : MEASURE_WRITE;
    struct nvme_point p = { .step = NVME_STEADY, .mode = u->steady_mode, .block_bytes = MIB,
                            .depth = d,
                            .run_s = clamp(budget_s / 24, 0.1, 1.0 + budget_s / STEADY_MAX * 1.2) };
    double begin = bench_now_s();
    bool more = true;
    if (!b->mode[u->steady_mode] || budget_s < 1) return STK_OK;
    while (more && bench_now_s() - begin < budget_s &&
           !steady_enough(b, &u->series, bench_now_s() - begin, budget_s))
        STK_TRY(sample(b, unit, m, &p, begin, &more, &last, err));
    if (u->series.n == 0) return STK_OK;
    u->workers = last.workers;
    steady_summarise(&u->series, &steady_default, &u->steady);
    struct nvme_result *r = &b->result[b->n_results++]; /* the room of the last sample */
    *r = last;
    r->bytes_per_s = *(reads ? &r->read_bytes_per_s : &r->write_bytes_per_s) =
        u->steady.sustained;
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
    STK_TRY(run_points(b, unit, m, budget_s * (together ? 0.58 : 0.38), err));
    STK_TRY(run_random(b, unit, m, budget_s * 0.05, err));
    STK_TRY(run_steady(b, unit, m, steady_s, err));
    return run_again(b, unit, m, budget_s * 0.02, err);
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
