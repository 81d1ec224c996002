/* bench/nvme_evidence.c - what the results say together, for the verdict: the rates at the settings
 * of `train` with how far their samples lie apart, the fastest points, and what changed between the
 * start of the run and its end.
 *
 * Owns: which results count for what. Must not know: how a point is measured or shown; it only
 * reads results, so tests give it made-up ones. Any thread. A rate is named together with the point
 * that it was measured at, never with another one's. */
#include "bench/nvme_impl.h"

#include <stdlib.h>
#include <string.h>

#define MIB (1ull << 20)

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
    for (uint32_t i = 0; i < b->n_results; i++) {
        const struct nvme_result *r = &b->result[i];
        if (r->unit != unit || r->random) continue;
        if (!r->valid && !e->memory && !r->verify_failures) {
            e->memory = true;
            snprintf(e->memory_why, sizeof e->memory_why, "%s", r->why);
        }
        if (r->cpu_share > e->cpu_share && r->step == NVME_POINT && !b->o.verify)
            e->cpu_share = r->cpu_share;
        if (r->step == NVME_STEADY || r->mode > MEASURE_WRITE) continue;
        bool write = r->mode == MEASURE_WRITE;
        double *best = write ? &e->best_write : &e->best_read;
        if (!write && r->block_bytes == MIB && r->bytes_per_s > e->train_read)
            e->train_read = r->bytes_per_s;
        if (r->bytes_per_s <= *best) continue;
        *best = r->bytes_per_s;
        *(write ? &e->best_write_block : &e->best_block) = r->block_bytes;
        *(write ? &e->best_write_depth : &e->best_depth) = r->depth;
    }
}

/* The sweep's choice among reads: from there on more in flight gained nothing. Where it is the
 * sweep's last point nobody has tried more. */
static void collect_enough(const struct nvme_unit *u, struct nvme_evidence *e)
{
    const struct sweep *s = &u->sweep[0];
    if (!u->swept || u->best_depth[0] == 0 || u->best_rate[0] < 0.9 * e->best_read) return;
    if (u->best_depth[0] == s->depth[s->n_depths - 1] &&
        u->best_block[0] == s->block[s->n_blocks - 1])
        return;
    e->enough_read = u->best_rate[0];
    e->enough_block = u->best_block[0];
    e->enough_depth = u->best_depth[0];
    for (uint32_t b = 0; b < s->n_blocks; b++)
        for (uint32_t d = 0; d < s->n_depths && s->block[b] == e->enough_block; d++) {
            double rate = s->rate[b][d];
            if (s->depth[d] <= e->enough_depth || rate <= 0 || rate >= 0.9 * e->enough_read ||
                (e->deeper_read > 0 && rate >= e->deeper_read))
                continue;
            e->deeper_read = rate;
            e->deeper_depth = s->depth[d];
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

/* --- samples of one point --------------------------------------------------------------------- */

static void add_sample(double *v, uint32_t *n, double rate)
{
    if (*n < NVME_PAIRS_MAX && rate > 0) v[(*n)++] = rate;
}

/* All that was measured at the place of the point `p`: its own runs, the sweep's, the one at the
 * end. */
static uint32_t samples_of(const struct nvme_bench *b, const struct nvme_result *p, double *v)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n_runs; i++) add_sample(v, &n, p->ours[i]);
    if (p->n_runs == 0) add_sample(v, &n, p->bytes_per_s);
    for (uint32_t i = 0; i < b->n_results; i++) {
        const struct nvme_result *r = &b->result[i];
        if (r->unit == p->unit && (r->step == NVME_SWEEP || r->step == NVME_AGAIN) &&
            r->mode == p->mode && r->block_bytes == p->block_bytes && r->depth == p->depth)
            add_sample(v, &n, r->bytes_per_s);
    }
    return n;
}

static struct nvme_span span_of(const struct nvme_bench *b, uint32_t unit, enum measure_mode mode,
                                uint64_t block_bytes)
{
    const struct nvme_result *p = nvme_find(b, unit, NVME_POINT, mode, block_bytes);
    double v[NVME_PAIRS_MAX];
    struct nvme_span s = { 0 };
    if (!p) return s;
    s.n = samples_of(b, p, v);
    s.median = nvme_median(v, s.n);
    for (uint32_t i = 0; i < s.n; i++) {
        if (i == 0 || v[i] < s.low) s.low = v[i];
        if (v[i] > s.high) s.high = v[i];
    }
    return s;
}

/* The largest distance of samples of one point, of all points. */
static void collect_spread(const struct nvme_bench *b, uint32_t unit, struct nvme_evidence *e)
{
    for (uint32_t i = 0; i < b->n_results; i++) {
        const struct nvme_result *p = &b->result[i];
        if (p->unit != unit || p->step != NVME_POINT) continue;
        struct nvme_span s = span_of(b, unit, p->mode, p->block_bytes);
        if (s.n > 1 && s.high > 0 && 1 - s.low / s.high > e->spread)
            e->spread = 1 - s.low / s.high;
    }
}

/* The first point once more at the end, against its first run. */
static void collect_drift(const struct nvme_bench *b, uint32_t unit, struct nvme_evidence *e)
{
    for (uint32_t i = 0; i < b->n_results; i++) {
        const struct nvme_result *last = &b->result[i], *p;
        if (last->unit != unit || last->step != NVME_AGAIN) continue;
        p = nvme_find(b, unit, NVME_POINT, last->mode, last->block_bytes);
        double first = !p ? 0 : p->n_runs ? p->ours[0] : p->bytes_per_s;
        if (!(first > 0) || p->depth != last->depth) continue;
        e->drift = last->bytes_per_s / first;
        e->drift_mode = last->mode;
    }
}

/* --- several drives --------------------------------------------------------------------------- */

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
        enum measure_mode mode = (enum measure_mode)k;
        double sum = 0, together = rate_of(b, last, mode, MIB);
        for (uint32_t i = 0; i < last; i++) sum += rate_of(b, i, mode, MIB);
        if (sum <= 0 || together <= 0) continue;
        if (e->sum_share <= 0 || together / sum < e->sum_share) e->sum_share = together / sum;
    }
    for (uint32_t i = 0; i < b->n_paths; i++) {
        double r = rate_of(b, i, MEASURE_MIXED, MIB);
        e->path_rate[i] = r > 0 ? r : rate_of(b, i, MEASURE_READ, MIB);
    }
}

/* Only writes wear out a cache; a series of reads says how they last, and no more. */
static void collect_steady(const struct nvme_bench *b, const struct nvme_unit *u,
                           struct nvme_evidence *e)
{
    const struct steady_summary *s = &u->steady;
    e->late_over_early = s->late_over_early;
    e->workers = u->workers;
    if (u->steady_mode != MEASURE_WRITE) return;
    e->fell = s->dropped;
    e->burst = s->burst;
    e->sustained_known = s->reached && (s->dropped || b->o.sustained);
    if (s->reached || s->dropped) e->sustained = s->sustained;
}

void nvme_conclude(struct nvme_bench *b)
{
    struct nvme_evidence *e = &b->evidence;
    uint32_t last = b->n_units - 1;
    const struct nvme_unit *u = &b->unit[last];
    memset(e, 0, sizeof *e);
    e->n_paths = b->n_paths;
    e->pairs = (uint32_t)b->o.pairs;
    e->read = span_of(b, last, MEASURE_READ, MIB);
    e->write = span_of(b, last, MEASURE_WRITE, MIB);
    e->mixed = span_of(b, last, MEASURE_MIXED, 4 * MIB);
    e->optimizer = span_of(b, last, MEASURE_OPTIMIZER, 0);
    e->uring = strncmp(u->backend, "posix", 5) != 0;
    snprintf(e->backend, sizeof e->backend, "%s", u->backend);
    collect_best(b, last, e);
    collect_enough(u, e);
    collect_shares(b, last, e);
    collect_spread(b, last, e);
    collect_drift(b, last, e);
    collect_steady(b, u, e);
    collect_drives(b, e);
    collect_balance(b, e);
    nvme_judge(e, &b->verdict);
}
