/* tests/nvme/test_measure.c - measured rates: the arithmetic on a simulated disk, and the same runs
 * on real files. */
#include "tests/nvme/measure_world.h"
#include "nvme/io_sim_disk.h"
#include "nvme/measure_impl.h"

#include <errno.h>

/* --- the histogram ---------------------------------------------------------------------------- */

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void against_sort(struct rng *rng, uint32_t n, int shape)
{
    static const double qs[] = { 0.0001, 0.25, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 1 };
    struct measure_histogram *h = calloc(1, sizeof *h);
    uint64_t *v = calloc(n, sizeof *v);
    for (uint32_t i = 0; i < n; i++) {
        if (shape == 0) v[i] = rng_below(rng, 1000);
        else if (shape == 1) v[i] = rng_next(rng) >> (28 + rng_below(rng, 36));
        else v[i] = 100000 + rng_below(rng, 50000) + (rng_below(rng, 100) == 0) * 9000000;
        measure_histogram_add(h, v[i]);
    }
    qsort(v, n, sizeof *v, compare_u64);
    CHECK(h->n == n && h->max_ns == v[n - 1] && measure_percentile(h, 1) == v[n - 1]);
    uint64_t before = 0;
    for (size_t k = 0; k < sizeof qs / sizeof *qs; k++) {
        double exact_rank = qs[k] * n;
        uint64_t rank = (uint64_t)exact_rank;
        rank += (double)rank < exact_rank;
        uint64_t exact = v[rank ? rank - 1 : 0], got = measure_percentile(h, qs[k]);
        uint64_t off = got > exact ? got - exact : exact - got;
        CHECK((double)off <= 0.03125 * (double)exact);
        CHECK(got >= before);
        before = got;
    }
    free(v);
    free(h);
}

TEST(measure_percentiles_against_sort)
{
    struct rng rng;
    rng_seed(&rng, test_seed());
    for (int shape = 0; shape < 3; shape++)
        for (uint32_t n = 1; n < 100000; n = n * 3 + 1) against_sort(&rng, n, shape);
    struct measure_histogram *h = calloc(1, sizeof *h);
    CHECK(measure_percentile(h, 0.5) == 0);
    for (int i = 0; i < 7; i++) measure_histogram_add(h, 123457); /* constant: exact */
    CHECK(measure_percentile(h, 0.01) == 123457 && measure_percentile(h, 0.5) == 123457);
    measure_histogram_add(h, UINT64_MAX);
    CHECK(measure_percentile(h, 1) == UINT64_MAX);
    free(h);
}

/* --- rates and latencies on the simulated disk ------------------------------------------------ */

static void run_sim(struct mworld *w, enum measure_mode mode)
{
    struct measure *m;
    w->cfg.mode = mode;
    CHECK_OK(measure_open(&w->cfg, &m, &w->err), &w->err);
    CHECK_OK(measure_run(m, &w->cfg, &w->r, &w->err), &w->err);
    measure_close(m);
    CHECK(w->r.verify_failures == 0 && w->r.direct);
    CHECK(w->r.read.n + w->r.write.n == w->r.requests);
    CHECK(w->r.bytes == w->r.requests * w->cfg.block_bytes);
}

TEST(measure_sim_reads_and_writes)
{
    for (int random = 0; random < 2; random++) {
        struct mworld w;
        REQUIRE(mworld_sim(&w));
        w.cfg.random = random;
        run_sim(&w, MEASURE_READ);
        CHECK(near(w.r.bytes_per_s, 1e9, 0.02) && near(w.r.read_bytes_per_s, 1e9, 0.02));
        CHECK(w.r.write_bytes_per_s == 0 && w.r.write.n == 0);
        CHECK(near(w.r.path_bytes_per_s[0], w.r.bytes_per_s, 1e-9));
        /* eight in flight, one after another through the disk: each waits eight transfers */
        CHECK(near((double)measure_percentile(&w.r.read, 0.5), 8 * 65536, 0.0001));
        CHECK(near((double)measure_percentile(&w.r.read, 0.999), 8 * 65536, 0.0001));
        run_sim(&w, MEASURE_WRITE);
        CHECK(near(w.r.bytes_per_s, 5e8, 0.02) && near(w.r.write_bytes_per_s, 5e8, 0.02));
        CHECK(w.r.read_bytes_per_s == 0 && w.r.read.n == 0);
        w.cfg.depth = 1; /* the latency is not hidden any more */
        run_sim(&w, MEASURE_READ);
        CHECK(measure_percentile(&w.r.read, 0.5) == 165536 && w.r.read.max_ns == 165536);
        CHECK(near(w.r.bytes_per_s, 65536 / 165536e-9, 0.001));
        mworld_close(&w);
    }
}

TEST(measure_sim_mixed)
{
    for (int shared = 0; shared < 2; shared++) {
        struct mworld w;
        REQUIRE(mworld_sim(&w));
        w.sim.shared_rate = shared;
        if (shared) w.sim.write_bytes_per_s = 1e9;
        run_sim(&w, MEASURE_MIXED);
        CHECK(near(w.r.bytes_per_s, shared ? 1e9 : 1.5e9, 0.02));
        CHECK(near(w.r.read_bytes_per_s, shared ? 5e8 : 1e9, 0.02));
        CHECK(near(w.r.write_bytes_per_s, 5e8, 0.02));
        w.cfg.depth = 1; /* in turn */
        run_sim(&w, MEASURE_MIXED);
        CHECK(w.r.read.n + 1 >= w.r.write.n && w.r.write.n + 1 >= w.r.read.n);
        w.cfg.depth = 5;
        run_sim(&w, MEASURE_MIXED);
        mworld_close(&w);
    }
}

TEST(measure_sim_optimizer)
{
    for (int shared = 0; shared < 2; shared++) {
        struct mworld w;
        REQUIRE(mworld_sim(&w));
        w.sim.shared_rate = shared;
        if (shared) w.sim.write_bytes_per_s = 1e9;
        run_sim(&w, MEASURE_OPTIMIZER);
        CHECK(near(w.r.bytes_per_s, 1e9, 0.02));
        CHECK(near(w.r.read_bytes_per_s, 5e8, 0.03) && near(w.r.write_bytes_per_s, 5e8, 0.03));
        mworld_close(&w);
    }
}

TEST(measure_sim_is_a_function_of_its_seed)
{
    struct measure_result *r[2] = { calloc(1, sizeof **r), calloc(1, sizeof **r) };
    uint64_t hash[2];
    for (int k = 0; k < 2; k++) {
        struct mworld w;
        REQUIRE(mworld_sim(&w));
        w.cfg.random = true;
        w.sim.faults.reorder_ppm = 300000;
        run_sim(&w, MEASURE_MIXED);
        *r[k] = w.r;
        hash[k] = exec_trace_hash(w.ex);
        mworld_close(&w);
    }
    CHECK(hash[0] == hash[1] && memcmp(r[0], r[1], sizeof *r[0]) == 0);
    free(r[0]);
    free(r[1]);
}

TEST(measure_paths_and_balance)
{
    struct mworld w;
    REQUIRE(mworld_sim(&w));
    w.cfg.n_paths = 3;
    w.cfg.paths[1] = "/sim/b";
    w.cfg.paths[2] = "/c";
    for (int mode = MEASURE_READ; mode <= MEASURE_OPTIMIZER; mode++) {
        run_sim(&w, (enum measure_mode)mode);
        double sum = 0;
        for (int i = 0; i < 16; i++) {
            sum += w.r.path_bytes_per_s[i];
            CHECK((w.r.path_bytes_per_s[i] > 0) == (i < 3));
        }
        CHECK(near(sum, w.r.bytes_per_s, 1e-6));
        CHECK(near(w.r.path_bytes_per_s[1], sum / 3, 0.1));
    }
    mworld_close(&w);
}

/* --- what counts ------------------------------------------------------------------------------ */

/* BEN-10: what is moved in the ramp is not in the figures. */
TEST(measure_ben_10_ramp_is_not_counted)
{
    struct mworld w;
    struct measure *m;
    REQUIRE(mworld_sim(&w));
    w.cfg.ramp_ns = 300 * MS;
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    uint64_t before = w.disk->requests;
    CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
    uint64_t moved = w.disk->requests - before;
    CHECK(near((double)w.r.ns, 100.0 * MS, 0.02));
    CHECK(near((double)w.r.requests, 1e8 / 65536, 0.02) && w.r.read.n == w.r.requests);
    CHECK(near((double)moved, 4e8 / 65536, 0.02));
    measure_close(m);
    mworld_close(&w);
}

/* BEN-04: the flush belongs to the writes, and only to them. */
TEST(measure_ben_04_flush_is_counted)
{
    static const struct { enum measure_mode mode; uint64_t latencies; } rows[] = {
        { MEASURE_READ, 1 }, { MEASURE_WRITE, 2 }, { MEASURE_MIXED, 2 }
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct mworld w;
        struct measure *m;
        REQUIRE(mworld_sim(&w));
        w.sim.read_bytes_per_s = w.sim.write_bytes_per_s = 0;
        w.sim.latency_ns = 1000 * MS;
        w.cfg.mode = rows[i].mode;
        w.cfg.ramp_ns = 0;
        w.cfg.bytes_max = 8 * w.cfg.block_bytes; /* all at once */
        CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
        CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
        CHECK(w.r.requests == 8 && w.r.ns == rows[i].latencies * 1000 * MS);
        CHECK(w.r.write.max_ns <= 1000 * MS); /* a request's latency has no flush in it */
        measure_close(m);
        mworld_close(&w);
    }
}

TEST(measure_bytes_max_ends_it)
{
    for (int mode = MEASURE_READ; mode <= MEASURE_OPTIMIZER; mode++) {
        struct mworld w;
        struct measure *m;
        REQUIRE(mworld_sim(&w));
        w.cfg.mode = (enum measure_mode)mode;
        w.cfg.run_ns = 0;
        w.cfg.ramp_ns = 1ull << 60; /* the ramp ends with half of the bytes at the latest */
        w.cfg.bytes_max = 100 * w.cfg.block_bytes + 4096;
        CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
        uint64_t before = w.disk->requests;
        CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
        uint64_t moved = w.disk->requests - before - (mode != MEASURE_READ);
        CHECK(moved <= 100 && moved >= 92);
        CHECK(w.r.requests >= 30 && w.r.requests <= 51 && w.r.bytes_per_s > 0);
        measure_close(m);
        mworld_close(&w);
    }
}

static void set_stop(void *arg) { atomic_store((_Atomic bool *)arg, true); }

TEST(measure_stop_flag)
{
    struct mworld w;
    struct measure *m;
    struct exec_lane *lane;
    struct exec_task task;
    _Atomic bool stop = false;
    REQUIRE(mworld_sim(&w));
    w.cfg.stop = &stop;
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    CHECK_OK(exec_lane_open(w.ex, "stop", &lane, &w.err), &w.err);
    exec_task_init(&task, set_stop, &stop);
    exec_post_at(lane, &task, exec_now_ns(w.ex) + 60 * MS);
    CHECK(measure_run(m, &w.cfg, &w.r, &w.err) == STK_ERR_INTERRUPTED);
    /* what was measured until then is there */
    CHECK(near((double)w.r.ns, 50.0 * MS, 0.03) && near(w.r.bytes_per_s, 1e9, 0.02));
    stk_error_clear(&w.err);
    CHECK(measure_run(m, &w.cfg, &w.r, &w.err) == STK_ERR_INTERRUPTED && w.r.bytes == 0);
    measure_close(m);
    stk_error_clear(&w.err);
    CHECK(measure_open(&w.cfg, &m, &w.err) == STK_ERR_INTERRUPTED && !m);
    exec_lane_close(lane);
    mworld_close(&w);
}

/* --- refusals --------------------------------------------------------------------------------- */

TEST(measure_refuses_what_cannot_be)
{
    struct mworld w;
    REQUIRE(mworld_sim(&w));
    struct measure *m, *own;
    struct measure_cfg bad[9];
    CHECK_OK(measure_open(&w.cfg, &own, &w.err), &w.err);
    for (int i = 0; i < 9; i++) bad[i] = w.cfg;
    bad[0].n_paths = 0;
    bad[1].n_paths = 17;
    bad[2].block_bytes = 0;
    bad[3].block_bytes = 5000;
    bad[4].depth = 0;
    bad[5].depth = 129; /* more than there are blocks */
    bad[6].run_ns = 0;
    bad[7].file_bytes = 5000;
    bad[8].depth = 100000;
    for (int i = 0; i < 9; i++) {
        struct stk_error err = { 0 };
        CHECK(measure_open(&bad[i], &m, &err) == STK_ERR_CONFIG && !m && err.text[0]);
        stk_error_clear(&err);
        CHECK(measure_run(own, &bad[i], &w.r, &err) == STK_ERR_CONFIG && err.text[0]);
    }
    bad[0] = w.cfg;
    bad[0].file_bytes *= 2;
    CHECK(measure_run(own, &bad[0], &w.r, &w.err) == STK_ERR_CONFIG);
    measure_close(own);
    measure_close(NULL);
    mworld_close(&w);
}

TEST(measure_no_folder_no_room)
{
    struct mworld w;
    struct measure *m;
    REQUIRE(mworld_real(&w, IO_POSIX));
    w.cfg.paths[0] = "/no/such/folder";
    CHECK(measure_open(&w.cfg, &m, &w.err) == STK_ERR_IO && strstr(w.err.text, "/no/such/folder"));
    w.cfg.paths[0] = w.dir;
    w.cfg.file_bytes = (uint64_t)sys_disk_free(w.dir) / (64 * KIB) * (128 * KIB);
    stk_error_clear(&w.err);
    CHECK(measure_open(&w.cfg, &m, &w.err) == STK_ERR_NOSPACE && strstr(w.err.text, w.dir));
    CHECK(entries_of(w.dir) == 0);
    printf("# %s\n", w.err.text);
    /* full between the question and the allocation */
    w.cfg.file_bytes = 8 * MIB;
    stk_error_clear(&w.err);
    sys_fault_arm(SYS_ALLOCATE, 1, 1, ENOSPC);
    CHECK(measure_open(&w.cfg, &m, &w.err) == STK_ERR_NOSPACE);
    sys_fault_arm(SYS_ALLOCATE, 0, 0, 0);
    CHECK(entries_of(w.dir) == 0);
    printf("# %s\n", w.err.text);
    mworld_close(&w);
}

/* Every allocation fails once: a sentence, and nothing is left. */
TEST(measure_out_of_memory)
{
    struct mworld w;
    REQUIRE(mworld_sim(&w));
    w.cfg.file_bytes = 256 * KIB;
    w.cfg.depth = 2;
    w.cfg.run_ns = MS;
    w.cfg.ramp_ns = 0;
    w.cfg.random = true;
    w.cfg.mode = MEASURE_READ;
    bool done = false;
    for (uint64_t k = 1; k < 300 && !done; k++) {
        struct measure *m = NULL;
        struct stk_error err = { 0 };
        sys_fault_arm(SYS_ALLOC, k, 1, ENOMEM);
        stk_status status = measure_open(&w.cfg, &m, &err);
        if (status == STK_OK) status = measure_run(m, &w.cfg, &w.r, &err);
        sys_fault_arm(SYS_ALLOC, 0, 0, 0);
        /* a failure inside the simulated disk is an error of a write */
        if (status != STK_OK)
            CHECK((status == STK_ERR_NOMEM || status == STK_ERR_IO) && err.text[0]);
        done = status == STK_OK;
        measure_close(m);
        CHECK(io_sim_free_bytes(w.disk) == 1ull << 40);
    }
    CHECK(done);
    mworld_close(&w);
}

/* --- what a plan must know -------------------------------------------------------------------- */

TEST(measure_rates_of_a_simulated_drive)
{
    struct mworld w;
    struct measure_rates rates;
    REQUIRE(mworld_sim(&w));
    CHECK_OK(measure_rates_with(&w.cfg, NULL, 1000 * MS, 0, &rates, &w.err), &w.err);
    CHECK(near(rates.read_bytes_per_s, 1e9, 0.02) && near(rates.write_bytes_per_s, 5e8, 0.02));
    CHECK(near(rates.both_bytes_per_s, 1.5e9, 0.02) && rates.direct);
    CHECK(near((double)rates.read_p50_ns, 16e6 * 1.048576, 0.01));
    CHECK(near((double)rates.read_p99_ns, 16e6 * 1.048576, 0.01));
    CHECK(near((double)rates.mixed_read_p50_ns, 8e6 * 1.048576, 0.01));
    CHECK(exec_now_ns(w.ex) < 1100ull * MS);
    mworld_close(&w);
}

/* What a run will have in flight is what is in flight; with too little to write it is as usual. */
TEST(measure_rates_at_a_load)
{
    struct mworld w;
    struct measure_rates rates;
    const struct measure_load load = { .block_bytes = 5 * MIB, .depth = 3, .buffer_bytes = 64 * MIB };
    REQUIRE(mworld_sim(&w));
    CHECK_OK(measure_rates_with(&w.cfg, &load, 1000 * MS, 0, &rates, &w.err), &w.err);
    CHECK(near(rates.read_bytes_per_s, 1e9, 0.02) && near(rates.write_bytes_per_s, 5e8, 0.05));
    CHECK(near((double)rates.read_p50_ns, 15e6 * 1.048576, 0.03));
    CHECK_OK(measure_rates_with(&w.cfg, &load, 1000 * MS, 96 * MIB, &rates, &w.err), &w.err);
    const struct measure_load large = { .block_bytes = 8 * MIB, .depth = 8 };
    CHECK_OK(measure_rates_with(&w.cfg, &large, 1000 * MS, 96 * MIB, &rates, &w.err), &w.err);
    CHECK(near((double)rates.read_p50_ns, 16e6 * 1.048576, 0.03));
    mworld_close(&w);
}

/* No more is written than allowed, whatever the time; a slow drive does not take longer. */
TEST(measure_rates_keeps_to_its_limits)
{
    struct mworld w;
    struct measure_rates rates;
    struct stk_error err = { 0 };
    REQUIRE(mworld_sim(&w));
    CHECK(measure_rates_with(&w.cfg, NULL, 0, 0, &rates, &err) == STK_ERR_CONFIG);
    stk_error_clear(&err);
    CHECK(measure_rates_with(&w.cfg, NULL, MS, MIB, &rates, &err) == STK_ERR_CONFIG);
    w.sim.read_bytes_per_s = w.sim.write_bytes_per_s = 0;
    w.sim.latency_ns = 5 * MS;
    uint64_t before = exec_now_ns(w.ex);
    CHECK_OK(measure_rates_with(&w.cfg, NULL, 2000 * MS, 96 * MIB, &rates, &w.err), &w.err);
    CHECK(exec_now_ns(w.ex) - before > 500 * MS); /* reads had their third */
    CHECK(rates.read_bytes_per_s > 0 && rates.write_bytes_per_s > 0 && rates.both_bytes_per_s > 0);
    w.sim.read_bytes_per_s = w.sim.write_bytes_per_s = 5e7; /* 50 MB/s */
    before = exec_now_ns(w.ex);
    CHECK_OK(measure_rates_with(&w.cfg, NULL, 4000ull * MS, 0, &rates, &w.err), &w.err);
    CHECK(near(rates.read_bytes_per_s, 5e7, 0.02) && near(rates.write_bytes_per_s, 5e7, 0.02));
    CHECK(exec_now_ns(w.ex) - before < 6500ull * MS);
    mworld_close(&w);
}

/* --- real files ------------------------------------------------------------------------------- */

static void all_modes(enum io_kind kind, bool random, bool verify)
{
    struct mworld w;
    struct measure *m;
    REQUIRE(mworld_real(&w, kind));
    w.cfg.random = random;
    w.cfg.verify = verify;
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    CHECK(entries_of(w.dir) <= 1);
    for (int mode = MEASURE_READ; mode <= MEASURE_OPTIMIZER; mode++) {
        w.cfg.mode = (enum measure_mode)mode;
        w.cfg.depth = mode == MEASURE_WRITE ? 3 : 8;
        w.cfg.block_bytes = mode == MEASURE_MIXED ? 4096 : 64 * KIB;
        CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
        CHECK(w.r.bytes_per_s > 0 && w.r.bytes == 16 * MIB && w.r.verify_failures == 0);
        CHECK((w.r.read_bytes_per_s > 0) == (mode != MEASURE_WRITE));
        CHECK((w.r.write_bytes_per_s > 0) == (mode != MEASURE_READ));
    }
    if (!random && !verify) printf("# %s\n", w.r.backend);
    measure_close(m);
    mworld_close(&w);
}

TEST(measure_real_files)
{
    for (int k = 0; k < 4; k++) {
        all_modes(IO_POSIX, k & 1, k & 2);
        all_modes(IO_AUTO, k & 1, k & 2);
    }
}

/* A run that does not verify may overwrite the marks: the next one that does writes them anew. */
TEST(measure_verify_after_plain_writes)
{
    struct mworld w;
    struct measure *m;
    REQUIRE(mworld_real(&w, IO_AUTO));
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    for (int k = 0; k < 2; k++) {
        w.cfg.verify = false;
        w.cfg.mode = k ? MEASURE_MIXED : MEASURE_WRITE;
        CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
        w.cfg.verify = true;
        w.cfg.mode = MEASURE_READ;
        CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
        CHECK(w.r.verify_failures == 0);
    }
    measure_close(m);
    mworld_close(&w);
}

/* BEN-01, NVM-22: what comes from memory is marked. */
TEST(measure_ben_01_nvm_22_page_cache_is_marked)
{
    struct mworld w;
    struct measure *m;
    REQUIRE(mworld_real(&w, IO_POSIX));
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    w.cfg.buffered = true;
    CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
    CHECK(!w.r.direct && strstr(w.r.backend, "buffered"));
    measure_close(m);
    mworld_close(&w);

    char shm[] = "/dev/shm/stoker-test-XXXXXX";
    if (!mkdtemp(shm)) SKIP("no /dev/shm");
    REQUIRE(mworld_real(&w, IO_AUTO));
    w.cfg.paths[0] = shm;
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
    CHECK(!w.r.direct && strstr(w.r.backend, "tmpfs"));
    measure_close(m);
    CHECK(entries_of(shm) == 0);
    sys_remove_tree(shm);
    mworld_close(&w);

    REQUIRE(mworld_sim(&w));
    w.cfg.buffered = true;
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
    CHECK(!w.r.direct);
    measure_close(m);
    mworld_close(&w);
}

TEST(measure_rates_of_a_real_drive)
{
    struct mworld w;
    struct measure_rates rates;
    REQUIRE(mworld_real(&w, IO_AUTO));
    CHECK_OK(measure_rates(w.dir, NULL, 300 * MS, 96 * MIB, &rates, &w.err), &w.err);
    CHECK(rates.read_bytes_per_s > 0 && rates.write_bytes_per_s > 0 && rates.both_bytes_per_s > 0);
    CHECK(rates.read_p50_ns > 0 && rates.read_p99_ns >= rates.read_p50_ns);
    CHECK(rates.mixed_read_p99_ns >= rates.mixed_read_p50_ns && rates.mixed_read_p50_ns > 0);
    mworld_close(&w);
}

TEST_MAIN()
