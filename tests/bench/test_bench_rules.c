/* tests/bench/test_bench_rules.c - the rules of `stoker bench nvme` on made-up figures: when a
 * sweep stops, when a series is steady, what the verdict is, the interval of a median, fio's output. */
#include "base/topology.h"
#include "bench/nvme_impl.h"
#include "tests/test.h"

#include <math.h>

#define KIB 1024ull
#define MIB (1ull << 20)

/* --- median and interval ---------------------------------------------------------------------- */

TEST(stats_median)
{
    const double odd[] = { 3, 1, 2 }, even[] = { 4, 1, 2, 3 };
    CHECK(nvme_median(odd, 3) == 2);
    CHECK(nvme_median(even, 4) == 2.5);
    CHECK(nvme_median(odd, 0) == 0);
}

TEST(stats_interval_of_equal_values_is_a_point)
{
    double v[9], low, high;
    for (int i = 0; i < 9; i++) v[i] = 0.98;
    nvme_median_interval(v, 9, test_seed(), &low, &high);
    CHECK(low == 0.98 && high == 0.98);
    nvme_median_interval(v, 0, test_seed(), &low, &high);
    CHECK(low == 0 && high == 0);
}

/* 95 % of intervals hold the true median; more pairs make them narrower. */
TEST(stats_interval_covers)
{
    struct rng rng;
    double v[NVME_PAIRS_MAX], low, high, width[2] = { 0, 0 };
    int held = 0, n = 60;
    rng_seed(&rng, test_seed());
    for (int k = 0; k < n; k++) {
        for (int i = 0; i < 25; i++) v[i] = 1 + 0.1 * rng_normal(&rng);
        nvme_median_interval(v, 25, (uint64_t)k, &low, &high);
        held += low <= 1 && 1 <= high;
        width[0] += high - low;
        for (int i = 25; i < NVME_PAIRS_MAX; i++) v[i] = 1 + 0.1 * rng_normal(&rng);
        nvme_median_interval(v, NVME_PAIRS_MAX, (uint64_t)k, &low, &high);
        width[1] += high - low;
    }
    printf("# %d of %d intervals hold the median, mean widths %.3f and %.3f\n", held, n,
           width[0] / n, width[1] / n);
    CHECK(held >= n * 80 / 100);
    CHECK(width[1] < width[0]);
}

/* --- sweep ------------------------------------------------------------------------------------ */

static uint32_t run_sweep(struct sweep *s, double (*drive)(uint64_t block, uint32_t depth))
{
    uint64_t block;
    uint32_t depth, n = 0;
    while (sweep_next(s, &block, &depth) && n++ < 100) {
        CHECK(block * depth <= s->in_flight_max);
        sweep_put(s, drive(block, depth));
    }
    return n;
}

static double flat(uint64_t block, uint32_t depth)
{
    (void)block;
    (void)depth;
    return 1e9;
}

static double grows(uint64_t block, uint32_t depth) { return (double)(block * depth); }

/* Bandwidth 2 GB/s behind 200 us of latency. */
static double usual(uint64_t block, uint32_t depth)
{
    double alone = (double)block * depth / 200e-6;
    return alone < 2e9 ? alone : 2e9;
}

TEST(sweep_bench_01_stops_early_when_nothing_is_gained)
{
    struct sweep s;
    uint64_t block;
    uint32_t depth;
    double rate;
    sweep_init(&s, 128 * MIB, 16 * MIB);
    CHECK(run_sweep(&s, flat) == 9); /* three points show it, for each of three blocks */
    CHECK(s.rate[3][0] == 0);
    REQUIRE(sweep_choose(&s, &block, &depth, &rate));
    CHECK(block == 256 * KIB && depth == 1 && rate == 1e9);
}

TEST(sweep_goes_on_while_it_gains)
{
    struct sweep s;
    uint64_t block;
    uint32_t depth;
    double rate;
    sweep_init(&s, 1 << 30, 16 * MIB);
    CHECK(run_sweep(&s, grows) == s.n_blocks * s.n_depths);
    REQUIRE(sweep_choose(&s, &block, &depth, &rate));
    CHECK(block == 8 * MIB && depth == 32);
}

TEST(sweep_chooses_the_fewest_bytes_in_flight)
{
    struct sweep s;
    uint64_t block;
    uint32_t depth;
    double rate;
    sweep_init(&s, 128 * MIB, 16 * MIB);
    uint32_t n = run_sweep(&s, usual);
    CHECK(n < s.n_blocks * s.n_depths);
    REQUIRE(sweep_choose(&s, &block, &depth, &rate));
    CHECK(block * depth <= MIB && rate >= 0.97 * 2e9);
}

TEST(sweep_of_nothing)
{
    struct sweep s;
    uint64_t block;
    uint32_t depth;
    double rate;
    sweep_init(&s, 64 * KIB, 16 * MIB);
    CHECK(!sweep_next(&s, &block, &depth));
    CHECK(!sweep_choose(&s, &block, &depth, &rate));
}

/* BEN-07: what is measured is what a trainer moves. */
TEST(sweep_ben_07_presets_are_the_trainers)
{
    struct sweep s;
    sweep_init(&s, 1 << 30, 16 * MIB);
    bool one = false, four = false;
    for (uint32_t i = 0; i < s.n_blocks; i++) {
        CHECK(s.block[i] >= 256 * KIB && s.block[i] <= 16 * MIB);
        one = one || s.block[i] == MIB;
        four = four || s.block[i] == 4 * MIB;
    }
    CHECK(one && four && s.depth[s.n_depths - 1] == 32);
}

/* --- steady state ----------------------------------------------------------------------------- */

static void push(struct steady_series *s, double rate)
{
    s->rate[s->n] = rate;
    s->bytes[s->n] = rate;
    s->at_s[s->n] = s->n + 1.0;
    s->n++;
}

static struct steady_series *series(void)
{
    static struct steady_series s;
    memset(&s, 0, sizeof s);
    return &s;
}

TEST(steady_too_few_samples)
{
    struct steady_series *s = series();
    for (int i = 0; i < 9; i++) push(s, 1e9);
    CHECK(!steady_reached(s->rate, s->n, &steady_default));
    push(s, 1e9);
    CHECK(steady_reached(s->rate, s->n, &steady_default));
}

TEST(steady_is_not_a_slope)
{
    struct steady_series *s = series();
    for (int i = 0; i < 10; i++) push(s, 1e9 * (1 - 0.014 * i)); /* 12.6 % from end to end */
    CHECK(!steady_reached(s->rate, s->n, &steady_default));
    s = series();
    for (int i = 0; i < 10; i++) push(s, 1e9 * (1 - 0.009 * i)); /* 8.1 % */
    CHECK(steady_reached(s->rate, s->n, &steady_default));
}

TEST(steady_is_not_a_spike)
{
    struct steady_series *s = series();
    for (int i = 0; i < 10; i++) push(s, i == 5 ? 1.2e9 : 1e9);
    CHECK(!steady_reached(s->rate, s->n, &steady_default));
    for (int i = 0; i < 10; i++) push(s, i % 2 ? 1.05e9 : 0.95e9);
    CHECK(steady_reached(s->rate, s->n, &steady_default));
    s = series();
    for (int i = 0; i < 10; i++) push(s, 0);
    CHECK(!steady_reached(s->rate, s->n, &steady_default));
}

TEST(steady_ben_08_burst_and_sustained_apart)
{
    struct steady_series *s = series();
    struct steady_summary sum;
    for (int i = 0; i < 20; i++) push(s, 5e9);
    for (int i = 0; i < 20; i++) push(s, 1e9);
    steady_summarise(s, &steady_default, &sum);
    CHECK(sum.reached && sum.dropped);
    CHECK(sum.burst == 5e9 && sum.sustained == 1e9);
    CHECK(sum.cache_bytes == 20 * 5e9);
    CHECK(fabs(sum.late_over_early - 0.2) < 1e-9);
}

TEST(steady_ben_08_a_rate_that_holds)
{
    struct steady_series *s = series();
    struct steady_summary sum;
    for (int i = 0; i < 100; i++) push(s, 2e9 + (i % 3) * 1e7);
    steady_summarise(s, &steady_default, &sum);
    CHECK(sum.reached && !sum.dropped && sum.cache_bytes == 0);
    CHECK(sum.late_over_early >= 0.9);
    memset(s, 0, sizeof *s);
    steady_summarise(s, &steady_default, &sum);
    CHECK(!sum.reached && sum.burst == 0);
}

/* BEN-10: what begins slowly is not in the rate that lasts, and is shown apart. */
TEST(steady_ben_10_warm_up_apart)
{
    struct steady_series *s = series();
    struct steady_summary sum;
    for (int i = 0; i < 3; i++) push(s, 0.5e9);
    for (int i = 0; i < 20; i++) push(s, 2e9);
    steady_summarise(s, &steady_default, &sum);
    CHECK(sum.reached && !sum.dropped && sum.burst == 0.5e9 && sum.sustained == 2e9);
}

/* --- may a figure be believed ----------------------------------------------------------------- */

struct judged { struct nvme_bench b; struct nvme_unit unit; struct nvme_result r; };

static const char *judged(struct judged *j, double from_storage)
{
    j->b.unit = &j->unit;
    nvme_point_judge(&j->b, &j->r, from_storage);
    return j->r.valid ? "valid" : j->r.why;
}

static struct judged *good_figure(void)
{
    static struct judged j;
    memset(&j, 0, sizeof j);
    j.b.path[0] = "/drive";
    j.b.n_paths = j.unit.n_paths = 1;
    j.b.drive[0].link_bytes_per_s = 3.94e9;
    snprintf(j.b.drive[0].file_system, sizeof j.b.drive[0].file_system, "ext4");
    j.r = (struct nvme_result){ .bytes_per_s = 3.2e9, .read_bytes_per_s = 3.2e9, .bytes = 1 << 30,
                                .direct = true };
    return &j;
}

TEST(result_ben_01_more_than_the_link)
{
    struct judged *j = good_figure();
    CHECK(strcmp(judged(j, 1), "valid") == 0);
    j->r.bytes_per_s = j->r.read_bytes_per_s = 22e9; /* of a drive rated 3.2 */
    CHECK(strstr(judged(j, 1), "more than the link carries") != NULL);
    j->b.drive[0].link_bytes_per_s = 0; /* unknown: nothing to compare with */
    CHECK(strcmp(judged(j, 1), "valid") == 0);
    j = good_figure(); /* a link carries both directions at once */
    j->r.bytes_per_s = 6e9;
    j->r.read_bytes_per_s = j->r.write_bytes_per_s = 3e9;
    CHECK(strcmp(judged(j, 1), "valid") == 0);
}

TEST(result_ben_01_two_paths_of_one_drive)
{
    struct judged *j = good_figure();
    j->b.drive[1] = j->b.drive[0];
    j->b.path[1] = "/drive/b";
    j->unit.path[1] = 1;
    j->b.n_paths = j->unit.n_paths = 2;
    snprintf(j->b.drive[0].under, sizeof j->b.drive[0].under, "nvme0n1");
    snprintf(j->b.drive[1].under, sizeof j->b.drive[1].under, "nvme1n1");
    j->r.bytes_per_s = j->r.read_bytes_per_s = 7e9;
    CHECK(strcmp(judged(j, 1), "valid") == 0);
    snprintf(j->b.drive[1].under, sizeof j->b.drive[1].under, "nvme0n1");
    CHECK(strstr(judged(j, 1), "more than the link carries") != NULL);
}

TEST(result_ben_01_page_cache)
{
    struct judged *j = good_figure();
    CHECK(strstr(judged(j, 0.3), "70 %") != NULL);
    j->r.direct = false;
    CHECK(strstr(judged(j, 1), "O_DIRECT") != NULL);
    j = good_figure();
    snprintf(j->b.drive[0].file_system, sizeof j->b.drive[0].file_system, "tmpfs");
    CHECK(strstr(judged(j, 1), "memory, not a drive") != NULL);
    j = good_figure();
    j->r.bytes = 0;
    CHECK(strstr(judged(j, 1), "nothing was moved") != NULL);
    j->r.verify_failures = 3;
    CHECK(strstr(judged(j, 1), "3 blocks") != NULL);
}

TEST(result_ben_01_a_loop_device_through_the_page_cache)
{
    struct judged *j = good_figure();
    j->b.drive[0].link_bytes_per_s = 0;
    snprintf(j->b.drive[0].device, sizeof j->b.drive[0].device, "loop7");
    CHECK(strcmp(judged(j, 1), "valid") == 0);
    j->b.loop_cached[0] = true;
    CHECK(strstr(judged(j, 1), "loop7 keeps its file in the page cache") != NULL);
    CHECK(strstr(j->r.why, "losetup --direct-io=on /dev/loop7") != NULL);
    j->b.loop_cached[0] = false; /* another path's loop device says nothing about this one */
    j->b.loop_cached[1] = true;
    CHECK(strcmp(judged(j, 1), "valid") == 0);
    j->unit.path[1] = 1;
    j->unit.n_paths = 2;
    CHECK(strstr(judged(j, 1), "page cache") != NULL);
}

/* --- verdict ---------------------------------------------------------------------------------- */

static struct nvme_span span(double rate) { return (struct nvme_span){ rate, rate, rate, 3 }; }

static struct nvme_evidence drive_evidence(void)
{
    return (struct nvme_evidence){ .read = span(3e9), .write = span(2e9), .mixed = span(2.4e9),
                                   .optimizer = span(2.5e9), .best_read = 3.05e9,
                                   .train_read = 3.05e9, .best_write = 2e9, .best_block = MIB,
                                   .best_depth = 16, .best_write_block = MIB,
                                   .best_write_depth = 8, .burst = 2e9, .sustained = 1.9e9,
                                   .sustained_known = true, .pairs = 1,
                                   .link = 7.88e9, .cpu_share = 0.1, .share_of_fio = 1.0,
                                   .uring = true, .backend = "io_uring", .n_paths = 1 };
}

static bool says(const struct nvme_verdict *v, const char *word)
{
    if (strstr(v->what, word)) return true;
    for (uint32_t i = 0; i < v->n_changes; i++)
        if (strstr(v->change[i], word)) return true;
    return false;
}

TEST(verdict_ben_02_names_the_limit_and_a_command)
{
    struct nvme_verdict v;
    struct nvme_evidence e = drive_evidence();
    nvme_judge(&e, &v);
    CHECK(v.limit == LIMIT_DRIVE && v.n_changes > 0 && says(&v, "--nvme A,B"));
    e.link = 3.3e9;
    nvme_judge(&e, &v);
    CHECK(v.limit == LIMIT_LINK && says(&v, "3.30") && says(&v, "lanes"));
    e.link = 0;
    e.cpu_share = 0.97;
    nvme_judge(&e, &v);
    CHECK(v.limit == LIMIT_CPU && says(&v, "97 %"));
    e = drive_evidence();
    e.best_read = 6e9; /* with larger blocks */
    nvme_judge(&e, &v);
    CHECK(v.limit == LIMIT_SETTINGS && says(&v, "--chunk"));
    e = drive_evidence();
    e.uring = false;
    e.share_of_fio = 0.8;
    nvme_judge(&e, &v);
    CHECK(v.limit == LIMIT_SETTINGS && says(&v, "io_uring"));
}

TEST(verdict_ben_01_memory_is_no_drive)
{
    struct nvme_verdict v;
    struct nvme_evidence e = drive_evidence();
    e.memory = true;
    snprintf(e.memory_why, sizeof e.memory_why, "O_DIRECT is refused");
    nvme_judge(&e, &v);
    CHECK(v.limit == LIMIT_PAGE_CACHE && says(&v, "O_DIRECT"));
}

TEST(verdict_of_nothing)
{
    struct nvme_verdict v;
    struct nvme_evidence e = { .n_paths = 1 };
    nvme_judge(&e, &v);
    CHECK(v.limit == LIMIT_UNKNOWN && v.model[0].seconds == 0);
}

TEST(verdict_seconds_per_step)
{
    struct nvme_evidence e = drive_evidence();
    double want = 8e9 * (4 / 3e9 + 2 / 2e9 + 26 / 2.5e9);
    CHECK(fabs(nvme_step_seconds(8e9, &e) - want) < 1e-6);
    e.sustained = 0.5e9; /* 14 bytes per parameter at that rate take longer */
    CHECK(fabs(nvme_step_seconds(8e9, &e) - 8e9 * 14 / 0.5e9) < 1e-6);
    e.optimizer = e.mixed = span(0);
    e.sustained = 0;
    want = 8e9 * (4 / 3e9 + 2 / 2e9 + 13 / 3e9 + 13 / 2e9);
    CHECK(fabs(nvme_step_seconds(8e9, &e) - want) < 1e-6);
    CHECK(NVME_STEP_READ == NVME_VISIT_READ + 14 && NVME_STEP_WRITE == NVME_VISIT_WRITE + 12);
    CHECK(NVME_UPDATE_BOTH == 14 + 12);
}

TEST(verdict_several_paths)
{
    struct nvme_verdict v;
    struct nvme_evidence e = drive_evidence();
    e.n_paths = 3;
    e.sum_share = 0.6;
    e.path_rate[0] = 1e9;
    e.path_rate[1] = 2e9;
    e.path_rate[2] = 1e9;
    e.endurance_bytes = 600e12;
    nvme_judge(&e, &v);
    CHECK(says(&v, "60 %"));
    REQUIRE(v.n_settings == 2);
    CHECK(strstr(v.settings[1], "25 %, 50 %, 25 %") != NULL);
    double days = 600e12 / (8e9 * 14 * 86400 / v.model[2].seconds);
    CHECK(fabs(v.model[2].endurance_days - days) < 1e-6 * days);
}

/* --- from results to the verdict -------------------------------------------------------------- */

struct story { struct nvme_bench b; struct nvme_unit unit; struct nvme_result r[32]; };

static struct story *story(void)
{
    static struct story s;
    memset(&s, 0, sizeof s);
    s.b.path[0] = "/drive";
    s.b.n_paths = s.b.n_units = s.unit.n_paths = 1;
    s.b.o.pairs = 1;
    s.b.unit = &s.unit;
    s.b.result = s.r;
    snprintf(s.unit.backend, sizeof s.unit.backend, "io_uring");
    return &s;
}

static struct nvme_result *measured(struct story *s, enum nvme_step step, enum measure_mode mode,
                                    uint64_t block, uint32_t depth, double rate)
{
    struct nvme_result *r = &s->r[s->b.n_results++];
    *r = (struct nvme_result){ .step = step, .mode = mode, .block_bytes = block, .depth = depth,
                               .bytes_per_s = rate, .n_runs = 1, .ours = { rate }, .bytes = 1 << 30,
                               .direct = true, .valid = true };
    return r;
}

static const struct nvme_verdict *concluded(struct story *s)
{
    nvme_conclude(&s->b);
    const struct nvme_verdict *v = &s->b.verdict;
    printf("# %s\n", v->what);
    for (uint32_t i = 0; i < v->n_changes; i++) printf("#   %s\n", v->change[i]);
    return v;
}

static void wrote(struct story *s, int n, double from, double to)
{
    for (int i = 0; i < n; i++) push(&s->unit.series, from + (to - from) * i / (n - 1));
    s->unit.steady_mode = MEASURE_WRITE;
    steady_summarise(&s->unit.series, &steady_default, &s->unit.steady);
}

/* What was not measured is not in the sentence. */
TEST(verdict_of_reads_alone_says_nothing_of_writes)
{
    struct story *s = story();
    measured(s, NVME_POINT, MEASURE_READ, MIB, 8, 3e9);
    const struct nvme_verdict *v = concluded(s);
    CHECK(v->limit == LIMIT_DRIVE && strstr(v->what, "3.00 GB/s read at 1 MiB x 8"));
    CHECK(!says(v, "writ") && !says(v, "0.00") && !says(v, "burst"));
    s = story();
    measured(s, NVME_POINT, MEASURE_WRITE, MIB, 8, 2e9);
    v = concluded(s);
    CHECK(strstr(v->what, "2.00 GB/s written at 1 MiB x 8") && !strstr(v->what, "read"));
}

/* The fastest rate stands with its own point, the sweep's choice is told apart. */
TEST(verdict_names_the_point_of_each_rate)
{
    struct story *s = story();
    measured(s, NVME_SWEEP, MEASURE_READ, 256 * KIB, 4, 2.8e9);
    measured(s, NVME_SWEEP, MEASURE_READ, 4 * MIB, 16, 3.0e9);
    measured(s, NVME_POINT, MEASURE_READ, MIB, 8, 2.9e9);
    measured(s, NVME_SWEEP, MEASURE_WRITE, 2 * MIB, 2, 2.5e9);
    measured(s, NVME_POINT, MEASURE_WRITE, MIB, 8, 2e9);
    sweep_init(&s->unit.sweep[0], 128 * MIB, 16 * MIB);
    s->unit.swept = true;
    s->unit.best_block[0] = 256 * KIB;
    s->unit.best_depth[0] = 4;
    s->unit.best_rate[0] = 2.8e9;
    const struct nvme_verdict *v = concluded(s);
    CHECK(strstr(v->what, "3.00 GB/s read at 4 MiB x 16, 2.50 written at 2 MiB x 2"));
    CHECK(strstr(v->what, "nothing beyond 256 KiB x 4"));
    CHECK(!strstr(v->what, "deeper"));
    s->unit.sweep[0].rate[0][3] = 2.7e9; /* within what points differ by */
    CHECK(!strstr(concluded(s)->what, "deeper"));
    s->unit.sweep[0].rate[0][3] = 2.2e9; /* 256 KiB x 16, x 32 */
    s->unit.sweep[0].rate[0][4] = 1.9e9;
    v = concluded(s);
    CHECK(strstr(v->what, "best at 256 KiB x 4 (2.80 GB/s) and deeper ones slower (1.90 at x 32)"));
    CHECK(!strstr(v->what, "beyond"));
    s->unit.sweep[0].rate[0][3] = s->unit.sweep[0].rate[0][4] = 0;
    s->unit.swept = false; /* nobody tried more */
    CHECK(!strstr(concluded(s)->what, "beyond"));
    s->unit.swept = true; /* the last point of the sweep */
    s->unit.best_block[0] = s->unit.sweep[0].block[s->unit.sweep[0].n_blocks - 1];
    s->unit.best_depth[0] = s->unit.sweep[0].depth[s->unit.sweep[0].n_depths - 1];
    s->unit.best_rate[0] = 3e9;
    CHECK(!strstr(concluded(s)->what, "beyond"));
}

/* A rate that rises, or that was low from its first second on, has filled no cache. */
TEST(verdict_blames_a_cache_only_for_a_fall)
{
    struct story *s = story();
    measured(s, NVME_POINT, MEASURE_READ, MIB, 8, 3e9);
    measured(s, NVME_POINT, MEASURE_WRITE, MIB, 8, 2e9);
    wrote(s, 40, 0.5e9, 0.51e9);
    const struct nvme_verdict *v = concluded(s);
    CHECK(!says(v, "cache is full") && !says(v, "in a burst"));
    CHECK(says(v, "no cache filled") && says(v, "0.51"));
    s = story();
    measured(s, NVME_POINT, MEASURE_READ, MIB, 8, 3e9);
    measured(s, NVME_POINT, MEASURE_WRITE, MIB, 8, 2e9);
    wrote(s, 3, 0.4e9, 0.4e9);
    wrote(s, 20, 1.9e9, 1.9e9); /* sustained above the burst */
    v = concluded(s);
    CHECK(!says(v, "cache is full") && !says(v, "no cache filled") && !says(v, "burst,"));
    s = story();
    measured(s, NVME_POINT, MEASURE_READ, MIB, 8, 3e9);
    measured(s, NVME_POINT, MEASURE_WRITE, MIB, 8, 2e9);
    wrote(s, 10, 2e9, 2e9);
    wrote(s, 20, 0.5e9, 0.5e9);
    v = concluded(s);
    CHECK(says(v, "fall to 25 % when the drive's cache is full"));
    CHECK(strstr(v->what, "2.00 written at 1 MiB x 8 in a burst, 0.50 sustained"));
}

/* One slow sample moves the range, not the seconds. */
TEST(verdict_seconds_are_of_many_samples)
{
    struct story *s = story();
    measured(s, NVME_POINT, MEASURE_READ, MIB, 8, 3e9);
    measured(s, NVME_POINT, MEASURE_WRITE, MIB, 8, 2e9);
    struct nvme_result *o = measured(s, NVME_POINT, MEASURE_OPTIMIZER, 5 * MIB, 8, 2.5e9);
    const struct nvme_verdict *v = concluded(s);
    CHECK(v->samples == 1);
    double usual = v->model[2].seconds;
    for (uint32_t i = 0; i < 2; i++) {
        s->r[i].n_runs = 3;
        s->r[i].ours[1] = s->r[i].ours[2] = s->r[i].ours[0];
    }
    o->n_runs = 3;
    o->ours[1] = 2.5e9;
    o->ours[2] = 0.5e9;
    v = concluded(s);
    CHECK(v->samples == 3 && v->model[2].seconds == usual && v->model[2].seconds_low == usual);
    double slow = usual - 8e9 * 26 / 2.5e9 + 8e9 * 26 / 0.5e9;
    CHECK(fabs(v->model[2].seconds_high / slow - 1) < 1e-9);
    CHECK(says(v, "differ by up to 80 %"));
    s->r[0].ours[0] = 1e9; /* the sweep's and the last run's samples of the same place count too */
    s->r[0].n_runs = 1;
    measured(s, NVME_SWEEP, MEASURE_READ, MIB, 8, 3e9);
    measured(s, NVME_AGAIN, MEASURE_READ, MIB, 8, 3e9);
    measured(s, NVME_SWEEP, MEASURE_READ, MIB, 4, 9e9);
    CHECK(concluded(s)->model[2].seconds == usual);
}

TEST(verdict_warns_of_a_drift)
{
    struct story *s = story();
    measured(s, NVME_POINT, MEASURE_READ, MIB, 8, 3e9);
    struct nvme_result *again = measured(s, NVME_AGAIN, MEASURE_READ, MIB, 8, 2.8e9);
    CHECK(!says(concluded(s), "end of the run"));
    again->bytes_per_s = again->ours[0] = 1.5e9;
    CHECK(says(concluded(s), "(read), measured again at the end of the run, went at 50 %"));
    again->bytes_per_s = again->ours[0] = 6e9;
    CHECK(says(concluded(s), "went at 200 %"));
}

TEST(verdict_ben_08_a_long_series_that_decays)
{
    struct story *s = story();
    measured(s, NVME_POINT, MEASURE_WRITE, MIB, 8, 2e9);
    s->unit.workers = (struct nvme_workers){ 7, 32 };
    wrote(s, 100, 2e9, 1.85e9);
    CHECK(!says(concluded(s), "decays"));
    s = story();
    measured(s, NVME_POINT, MEASURE_READ, MIB, 8, 2e9);
    wrote(s, 100, 2e9, 1.5e9);
    s->unit.steady_mode = MEASURE_READ;
    s->unit.workers = (struct nvme_workers){ 7, 32 };
    const struct nvme_verdict *v = concluded(s);
    CHECK(says(v, "decays") && says(v, "32 workers") && !says(v, "cache"));
    CHECK(s->b.evidence.sustained == 0); /* reads say nothing of writes */
}

/* --- fio -------------------------------------------------------------------------------------- */

static const char fio_text[] =
    "fio: a warning\n{\n \"jobs\": [{\"jobname\": \"a\", \"error\": 0,"
    " \"read\": {\"io_bytes\": 100, \"bw_bytes\": 50, \"clat_ns\": {\"percentile\":"
    " {\"50.000000\": 7, \"99.000000\": 9}}},"
    " \"write\": {\"io_bytes\": 60, \"bw_bytes\": 30, \"clat_ns\": {\"percentile\":"
    " {\"50.000000\": 8, \"99.000000\": 20}}}}]}\ntail";

TEST(nvme_far_is_a_node_without_a_core_of_ours)
{
    struct topology_node node[] = { { .os = 1, .n_cores = 4 }, { .os = 3, .n_cores = 4 } };
    struct topology t = { .n_nodes = 2, .node = node };
    CHECK(nvme_far(&t, 0) && nvme_far(&t, 2));
    CHECK(!nvme_far(&t, 1) && !nvme_far(&t, 3) && !nvme_far(&t, -1));
}

TEST(fio_output)
{
    struct nvme_fio_rates r;
    REQUIRE(nvme_fio_parse(fio_text, &r));
    CHECK(r.bytes_per_s == 80 && r.write_bytes == 60);
    CHECK(r.p50_ns == 8 && r.p99_ns == 20);
}

TEST(fio_output_that_is_none)
{
    struct nvme_fio_rates r;
    const char *bad[] = { "", "fio: bad option", "{", "{}", "{\"jobs\": []}",
                          "{\"jobs\": [{\"error\": 5, \"read\": {\"io_bytes\": 1, \"bw_bytes\": 1}}]}",
                          "{\"jobs\": 3}", "{\"jobs\": [1, null]}" };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) CHECK(!nvme_fio_parse(bad[i], &r));
    char cut[sizeof fio_text];
    for (size_t n = 0; n < sizeof fio_text - 6; n++) { /* cut anywhere: refused, never a crash */
        memcpy(cut, fio_text, n);
        cut[n] = 0;
        CHECK(!nvme_fio_parse(cut, &r));
    }
}

TEST_MAIN()
