/* tests/nvme/test_measure_faults.c - what verify finds and how it says it, errors of the drive, and
 * the measurement through the store. */
#include "tests/nvme/measure_world.h"
#include "nvme/measure_impl.h"

#include <errno.h>
#include <signal.h>

#define FILE_NAME "/sim/stoker-measure-0.bin"

/* --- the pattern ------------------------------------------------------------------------------ */

static bool says(const struct measure_pattern *p, const uint8_t *unit, const char *words)
{
    char text[256];
    if (measure_pattern_check(p, unit, 2, 8192, 7)) return false;
    measure_pattern_explain(p, unit, 2, 8192, 7, text, sizeof text);
    bool ok = strstr(text, words) != NULL;
    if (!ok) printf("# \"%s\" does not say \"%s\"\n", text, words);
    return ok;
}

TEST(measure_pattern_says_what_it_found)
{
    struct measure_pattern p, other;
    _Alignas(8) uint8_t unit[MEASURE_UNIT_BYTES], old[MEASURE_UNIT_BYTES];
    measure_pattern_init(&p, 11);
    measure_pattern_init(&other, 12);
    measure_pattern_fill(&p, unit, 2, 8192, 7);
    CHECK(measure_pattern_check(&p, unit, 2, 8192, 7));
    /* every single bit of the block counts */
    for (uint32_t bit = 0; bit < 8 * MEASURE_UNIT_BYTES; bit++) {
        unit[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK(!measure_pattern_check(&p, unit, 2, 8192, 7));
        unit[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    unit[1000] ^= 4;
    CHECK(says(&p, unit, "1 flipped bit, the first in byte 9192 of the block"));
    unit[3000] ^= 0xf;
    CHECK(says(&p, unit, "5 flipped bits, the first in byte 9192"));
    measure_pattern_fill(&p, unit, 2, 4096, 3);
    CHECK(says(&p, unit, "another block's content (file 2, byte 4096, pass 3)"));
    measure_pattern_fill(&p, unit, 1, 8192, 7);
    CHECK(says(&p, unit, "another block's content (file 1, byte 8192, pass 7)"));
    measure_pattern_fill(&p, unit, 2, 8192, 6);
    CHECK(says(&p, unit, "an older pass (6)"));
    measure_pattern_fill(&p, unit, 2, 8192, 8);
    CHECK(says(&p, unit, "pass 8"));
    measure_pattern_fill(&other, unit, 2, 8192, 7);
    CHECK(says(&p, unit, "another measurement"));
    memset(unit, 0, sizeof unit);
    CHECK(says(&p, unit, "zeros"));
    memset(unit, 0xab, sizeof unit);
    CHECK(says(&p, unit, "other bytes (0xabababababababab"));
    for (uint32_t back = 1; back < 6; back += 4) {
        measure_pattern_fill(&p, unit, 2, 8192, 7);
        measure_pattern_fill(&p, old, 2, 8192, 7 - back);
        memcpy(unit + 512, old + 512, 512);
        memcpy(unit + 2048, old + 2048, 1024);
        CHECK(says(&p, unit, back == 1 ? "a torn write: 3 of its 8 sectors are of pass 6"
                                       : "a torn write: 3 of its 8 sectors are of pass 2"));
    }
}

/* --- verify ----------------------------------------------------------------------------------- */

/* One pass over the file, in order. */
static stk_status pass(struct mworld *w, struct measure *m, enum measure_mode mode)
{
    w->cfg.mode = mode;
    w->cfg.verify = true;
    w->cfg.ramp_ns = 0;
    w->cfg.run_ns = 0;
    w->cfg.bytes_max = w->cfg.file_bytes * (mode == MEASURE_OPTIMIZER ? 2 : 1);
    stk_error_clear(&w->err);
    return measure_run(m, &w->cfg, &w->r, &w->err);
}

TEST(measure_verify_finds_one_bit)
{
    struct mworld w;
    struct measure *m;
    char at[64];
    REQUIRE(mworld_sim(&w));
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    CHECK(pass(&w, m, MEASURE_READ) == STK_OK && w.r.verify_failures == 0);
    CHECK(w.r.bytes == w.cfg.file_bytes);
    struct rng rng;
    rng_seed(&rng, test_seed());
    for (int i = 0; i < 20; i++) {
        uint64_t byte = rng_below(&rng, w.cfg.file_bytes);
        uint32_t bit = (uint32_t)rng_below(&rng, 8);
        CHECK(io_sim_flip(w.disk, FILE_NAME, byte, bit));
        CHECK(pass(&w, m, MEASURE_READ) == STK_OK && w.r.verify_failures == 1);
        snprintf(at, sizeof at, " at byte %llu:", (unsigned long long)byte / 4096 * 4096);
        CHECK(strstr(w.r.first_failure, FILE_NAME) && strstr(w.r.first_failure, at));
        CHECK(strstr(w.r.first_failure, "1 flipped bit") || byte % 4096 < 40);
        CHECK(strstr(w.r.first_failure, "expected pass 1"));
        io_sim_flip(w.disk, FILE_NAME, byte, bit);
    }
    printf("# %s\n", w.r.first_failure);
    measure_close(m);
    mworld_close(&w);
}

/* The canary: each fault of the simulated disk, planted in writes, is found by the reads after
 * them and called by its name; on a good disk nothing is. */
static void canary(size_t fault, enum measure_mode mode, bool random, const char *words)
{
    struct mworld w;
    struct measure *m;
    bool all = true;
    REQUIRE(mworld_sim(&w));
    w.cfg.random = random;
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    if (fault != SIZE_MAX) *(uint32_t *)(void *)((char *)&w.sim.faults + fault) = 100000;
    CHECK(pass(&w, m, mode) == STK_OK);
    uint64_t early = w.r.verify_failures, damaged = 0;
    for (uint64_t at = 0; at < w.cfg.file_bytes; at += MEASURE_UNIT_BYTES)
        damaged += io_sim_damaged(w.disk, FILE_NAME, at, MEASURE_UNIT_BYTES);
    memset(&w.sim.faults, 0, sizeof w.sim.faults);
    CHECK(pass(&w, m, MEASURE_READ) == STK_OK && w.r.bytes == w.cfg.file_bytes);
    CHECK(w.r.verify_failures == damaged);
    if (fault == SIZE_MAX) all = early == 0 && damaged == 0 && !w.r.first_failure[0];
    else all = damaged > 0 && (strstr(w.r.first_failure, words) != NULL ||
                               strstr(w.r.first_failure, "another block's content") != NULL);
    CHECK(all);
    if (fault != SIZE_MAX) printf("# %s\n", w.r.first_failure);
    measure_close(m);
    mworld_close(&w);
}

TEST(measure_verify_canary)
{
    static const enum measure_mode modes[] = { MEASURE_WRITE, MEASURE_OPTIMIZER };
    for (int i = 0; i < 4; i++) {
        canary(SIZE_MAX, modes[i & 1], i & 2, "");
        canary(offsetof(struct io_sim_faults, rot_bit_ppm), modes[i & 1], i & 2, "1 flipped bit");
        canary(offsetof(struct io_sim_faults, lost_write_ppm), modes[i & 1], i & 2,
               "an older pass (1)");
        canary(offsetof(struct io_sim_faults, misdirect_ppm), modes[i & 1], i & 2,
               "an older pass (1)");
    }
}

/* Flips on the way to memory are found in the run itself. */
TEST(measure_verify_finds_bad_reads)
{
    struct mworld w;
    struct measure *m;
    REQUIRE(mworld_sim(&w));
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    w.sim.faults.flip_bit_ppm = 200000;
    CHECK(pass(&w, m, MEASURE_READ) == STK_OK && w.r.verify_failures > 0);
    uint64_t by_kind[11];
    io_sim_faults_done(w.disk, by_kind);
    CHECK(w.r.verify_failures == by_kind[4]);
    measure_close(m);
    mworld_close(&w);
}

/* BEN-05: reads that verify and writes at once, reordered and late, never meet: a good drive has no
 * failures. */
TEST(measure_ben_05_verify_never_meets_a_writer)
{
    for (uint64_t seed = 0; seed < 40; seed++) {
        struct mworld w;
        struct measure *m;
        REQUIRE(mworld_sim(&w));
        w.sim.seed = w.cfg.seed = test_seed() + seed;
        w.sim.faults = (struct io_sim_faults){ .late_ppm = 300000,
                                               .reorder_ppm = 500000,
                                               .short_ppm = 5000,
                                               .late_ns = 5 * MS };
        w.cfg.file_bytes = MIB + (seed % 3) * 256 * KIB;
        w.cfg.block_bytes = (seed % 2) ? 64 * KIB : 4096;
        w.cfg.depth = 1 + (uint32_t)(seed % 16);
        w.cfg.n_paths = 1 + (uint32_t)(seed % 3);
        w.cfg.paths[1] = "/sim/b";
        w.cfg.paths[2] = "/sim/c";
        w.cfg.random = seed % 4 < 2;
        w.cfg.verify = true;
        CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
        for (int k = 0; k < 3; k++) {
            w.cfg.mode = k == 1 ? MEASURE_OPTIMIZER : MEASURE_MIXED;
            w.cfg.run_ns = 30 * MS;
            CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
            CHECK(w.r.verify_failures == 0 && w.r.requests > 0);
            if (w.r.verify_failures) printf("# seed %d: %s\n", (int)seed, w.r.first_failure);
        }
        measure_close(m);
        mworld_close(&w);
    }
}

/* --- real files ------------------------------------------------------------------------------- */

static void spoil(int fd, uint64_t at, uint64_t from, uint8_t flip)
{
    uint8_t unit[MEASURE_UNIT_BYTES];
    CHECK(sys_read_full(fd, unit, sizeof unit, from) == sizeof unit);
    unit[1000] ^= flip;
    CHECK(sys_write_full(fd, unit, sizeof unit, at) == sizeof unit && sys_fsync(fd) == 0);
}

/* A byte flipped, a block put in another's place, zeros, the file cut short: under a running
 * measurement, from outside. */
static void damaged_outside(enum io_kind kind)
{
    struct mworld w;
    struct measure *m;
    uint8_t zeros[MEASURE_UNIT_BYTES] = { 0 };
    REQUIRE(mworld_real(&w, kind));
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    int fd = m->files[0].fd;
    CHECK(pass(&w, m, MEASURE_OPTIMIZER) == STK_OK && w.r.verify_failures == 0);
    spoil(fd, MIB, MIB, 0x10);
    CHECK(pass(&w, m, MEASURE_READ) == STK_OK && w.r.verify_failures == 1);
    CHECK(strstr(w.r.first_failure, "1 flipped bit, the first in byte 1049576 of the block"));
    CHECK(strstr(w.r.first_failure, w.dir) && strstr(w.r.first_failure, "expected pass 2"));
    spoil(fd, MIB, 2 * MIB, 0);
    CHECK(pass(&w, m, MEASURE_READ) == STK_OK && w.r.verify_failures == 1);
    CHECK(strstr(w.r.first_failure, "another block's content (file 0, byte 2097152, pass 2)"));
    CHECK(sys_write_full(fd, zeros, sizeof zeros, MIB) == sizeof zeros && sys_fsync(fd) == 0);
    CHECK(pass(&w, m, MEASURE_READ) == STK_OK && w.r.verify_failures == 1);
    CHECK(strstr(w.r.first_failure, "zeros"));
    CHECK(pass(&w, m, MEASURE_WRITE) == STK_OK);
    CHECK(pass(&w, m, MEASURE_READ) == STK_OK && w.r.verify_failures == 0);
    CHECK(ftruncate(fd, 3 * MIB + 4096) == 0);
    CHECK(pass(&w, m, MEASURE_READ) == STK_ERR_IO && strstr(w.err.text, "cut short"));
    printf("# %s\n", w.err.text);
    measure_close(m);
    mworld_close(&w);
}

TEST(measure_verify_damage_from_outside)
{
    damaged_outside(IO_POSIX);
    damaged_outside(IO_AUTO);
}

static void measure_for_ever(struct mworld *w, int tell)
{
    struct measure *m;
    w->cfg.mode = MEASURE_MIXED;
    w->cfg.bytes_max = 0;
    w->cfg.run_ns = 600000ull * MS;
    if (measure_open(&w->cfg, &m, &w->err) != STK_OK || write(tell, "x", 1) != 1) _exit(1);
    measure_run(m, &w->cfg, &w->r, &w->err);
    _exit(2);
}

/* Killed in the middle: no file is left, because it has no name. */
TEST(measure_leaves_nothing_when_killed)
{
    struct mworld w;
    int ends[2], status = 0;
    char told;
    REQUIRE(mworld_real(&w, IO_POSIX) && pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) measure_for_ever(&w, ends[1]);
    REQUIRE(child > 0 && read(ends[0], &told, 1) == 1);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
    close(ends[0]);
    close(ends[1]);
    mworld_close(&w); /* checks the folder */
}

/* --- errors ----------------------------------------------------------------------------------- */

static void fails(size_t fault, enum measure_mode mode, stk_status want, const char *words)
{
    struct mworld w;
    struct measure *m;
    REQUIRE(mworld_sim(&w));
    CHECK_OK(measure_open(&w.cfg, &m, &w.err), &w.err);
    *(uint32_t *)(void *)((char *)&w.sim.faults + fault) = 100000;
    w.cfg.mode = mode;
    stk_status status = measure_run(m, &w.cfg, &w.r, &w.err);
    CHECK(status == want && strstr(w.err.text, words) && strstr(w.err.text, FILE_NAME));
    printf("# %s\n", w.err.text);
    memset(&w.sim.faults, 0, sizeof w.sim.faults);
    stk_error_clear(&w.err);
    w.cfg.verify = true; /* afterwards it can be used as before */
    CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
    CHECK(w.r.verify_failures == 0);
    measure_close(m);
    mworld_close(&w);
}

TEST(measure_errors_of_the_drive)
{
    fails(offsetof(struct io_sim_faults, read_error_ppm), MEASURE_READ, STK_ERR_IO, "reading");
    fails(offsetof(struct io_sim_faults, read_error_ppm), MEASURE_MIXED, STK_ERR_IO, "reading");
    fails(offsetof(struct io_sim_faults, write_error_ppm), MEASURE_WRITE, STK_ERR_IO, "writing");
    fails(offsetof(struct io_sim_faults, no_space_ppm), MEASURE_WRITE, STK_ERR_NOSPACE, "writing");
    fails(offsetof(struct io_sim_faults, write_error_ppm), MEASURE_OPTIMIZER, STK_ERR_IO,
          "writing");
    fails(offsetof(struct io_sim_faults, lost_completion_ppm), MEASURE_OPTIMIZER, STK_ERR_STALLED,
          "not completed");
}

TEST(measure_errors_while_opening)
{
    static const size_t faults[] = { offsetof(struct io_sim_faults, write_error_ppm),
                                     offsetof(struct io_sim_faults, no_space_ppm),
                                     offsetof(struct io_sim_faults, lost_completion_ppm) };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        struct mworld w;
        struct measure *m;
        REQUIRE(mworld_sim(&w));
        *(uint32_t *)(void *)((char *)&w.sim.faults + faults[i]) = 500000;
        CHECK(measure_open(&w.cfg, &m, &w.err) != STK_OK && !m && w.err.text[0]);
        mworld_close(&w);
    }
}

/* --- through the store ------------------------------------------------------------------------ */

static void store_modes(struct mworld *w, bool no_checksums, bool sim)
{
    struct measure *m;
    struct measure_store_cfg sc = { .plain = w->cfg, .no_checksums = no_checksums };
    CHECK_OK(measure_store_open(&sc, &m, &w->err), &w->err);
    for (int mode = MEASURE_READ; mode <= MEASURE_OPTIMIZER; mode++) {
        w->cfg.mode = (enum measure_mode)mode;
        CHECK_OK(measure_run(m, &w->cfg, &w->r, &w->err), &w->err);
        CHECK(w->r.bytes_per_s > 0 && w->r.verify_failures == 0);
        double sum = 0;
        for (int i = 0; i < 16; i++) sum += w->r.path_bytes_per_s[i];
        CHECK(near(sum, w->r.bytes_per_s, 1e-6));
        if (w->cfg.n_paths == 2)
            CHECK(near(w->r.path_bytes_per_s[1], sum / 2, 0.1) || !sim);
        if (!sim) continue;
        double want = mode == MEASURE_READ ? 1e9 : mode == MEASURE_WRITE ? 5e8
                    : mode == MEASURE_MIXED ? 1.5e9 : 1e9;
        CHECK(near(w->r.bytes_per_s, want, 0.03));
    }
    CHECK(strstr(w->r.backend, no_checksums ? "no checksums" : "crc32c"));
    w->cfg.verify = true;
    CHECK(measure_run(m, &w->cfg, &w->r, &w->err) == STK_ERR_CONFIG);
    w->cfg.verify = false;
    w->cfg.depth++;
    CHECK(measure_run(m, &w->cfg, &w->r, &w->err) == STK_ERR_CONFIG);
    measure_close(m);
}

TEST(measure_store_all_modes)
{
    for (int k = 0; k < 4; k++) {
        struct mworld w;
        REQUIRE(mworld_sim(&w));
        w.cfg.random = k & 1;
        w.cfg.n_paths = 1 + (uint32_t)(k & 1);
        w.cfg.paths[1] = "/sim/b";
        store_modes(&w, k & 2, true);
        mworld_close(&w);
        REQUIRE(mworld_real(&w, k & 1 ? IO_POSIX : IO_AUTO));
        store_modes(&w, k & 2, false);
        mworld_close(&w);
    }
}

TEST(measure_store_finds_damage)
{
    struct mworld w;
    struct measure *m;
    REQUIRE(mworld_sim(&w));
    struct measure_store_cfg sc = { .plain = w.cfg };
    CHECK_OK(measure_store_open(&sc, &m, &w.err), &w.err);
    w.sim.faults.flip_bit_ppm = 100000;
    CHECK_OK(measure_run(m, &w.cfg, &w.r, &w.err), &w.err);
    CHECK(w.r.verify_failures > 0 && strstr(w.r.first_failure, "extent"));
    w.sim.faults = (struct io_sim_faults){ .read_error_ppm = 100000 };
    CHECK(measure_run(m, &w.cfg, &w.r, &w.err) == STK_ERR_IO);
    w.sim.faults = (struct io_sim_faults){ .lost_completion_ppm = 100000 };
    stk_error_clear(&w.err);
    CHECK(measure_run(m, &w.cfg, &w.r, &w.err) == STK_ERR_STALLED);
    stk_error_clear(&w.err);
    CHECK(measure_run(m, &w.cfg, &w.r, &w.err) == STK_ERR_STATE);
    measure_close(m);
    mworld_close(&w);
}

TEST(measure_store_out_of_memory)
{
    struct mworld w;
    REQUIRE(mworld_sim(&w));
    w.cfg.file_bytes = 256 * KIB;
    w.cfg.depth = 2;
    w.cfg.run_ns = MS;
    w.cfg.ramp_ns = 0;
    bool done = false;
    for (uint64_t k = 1; k < 400 && !done; k++) {
        struct measure *m = NULL;
        struct stk_error err = { 0 };
        struct measure_store_cfg sc = { .plain = w.cfg };
        sys_fault_arm(SYS_ALLOC, k, 1, ENOMEM);
        stk_status status = measure_store_open(&sc, &m, &err);
        if (status == STK_OK) status = measure_run(m, &w.cfg, &w.r, &err);
        sys_fault_arm(SYS_ALLOC, 0, 0, 0);
        if (status != STK_OK)
            CHECK((status == STK_ERR_NOMEM || status == STK_ERR_IO) && err.text[0]);
        done = status == STK_OK;
        measure_close(m);
        CHECK(io_sim_free_bytes(w.disk) == 1ull << 40);
    }
    CHECK(done);
    mworld_close(&w);
}

TEST_MAIN()
