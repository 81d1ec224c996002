/* tests/engine/test_durable_cut.c - the power fails at a seeded moment of a whole training run with
 * durable steps, on the simulated disk.
 *
 * The disk is copied before the n-th change of its medium (a write, or a flush that has just
 * ended), with what was not flushed; in the copy each unflushed sector is lost or kept by chance.
 * Then a new engine takes over the copy: there is a durable step at least as new as what the run
 * had been told (or none, if it had been told of none), and its weights are those of the
 * uninterrupted run at the same step. And the same after storage faults, which may end in a clean
 * error. A failing seed prints a line that runs it alone:
 *     STK_SEED=17 build/tests/engine/engine_test_durable_cut one
 * STK_SOAK=1: 20,000 seeds; STK_BRIEF=1: a quarter. Linked with --wrap=sim_write and
 * --wrap=sim_flush. */
#include "tests/engine/durable_world.h"
#include "base/sys.h"
#include "nvme/io_sim_disk.h"

enum { CUT_STEPS = 4, VARIANTS = 8 };

/* --- a copy of the disk at a moment ----------------------------------------------------------- */

static struct cut {
    struct io_sim_disk *of, *copy;
    const stk_engine *e;
    uint64_t at, seen;  /* changes of the medium */
    uint64_t newest;    /* what the run had been told by then */
} cut;

static uint8_t *copy_bytes(const uint8_t *from)
{
    uint8_t *to = from ? sys_calloc(1, SIM_PAGE_BYTES) : NULL;
    if (to) memcpy(to, from, SIM_PAGE_BYTES);
    return to;
}

static struct io_sim_disk *copy_disk(const struct io_sim_disk *d)
{
    struct io_sim_disk *c;
    struct stk_error err = { 0 };
    if (io_sim_disk_new(d->capacity_bytes, &c, &err) != STK_OK) abort();
    for (const struct sim_file *f = d->files; f; f = f->next) {
        if (io_sim_file_create(c, f->path, f->size_bytes, &err) != STK_OK) abort();
        struct sim_file *g = sim_file_find(c, f->path);
        for (uint64_t i = 0; i < f->n_pages; i++) {
            g->pages[i].medium = copy_bytes(f->pages[i].medium);
            g->pages[i].durable = copy_bytes(f->pages[i].durable);
            g->pages[i].dirty = f->pages[i].dirty;
        }
    }
    return c;
}

static void look(void)
{
    if (cut.seen++ != cut.at || cut.copy || !cut.of) return;
    cut.copy = copy_disk(cut.of);
    cut.newest = cut.e ? atomic_load(&cut.e->durable.newest_step) : 0;
}

bool __real_sim_write(struct sim_file *f, uint64_t offset_bytes, const uint8_t *buf,
                      uint64_t size_bytes, enum sim_copy copy);
bool __wrap_sim_write(struct sim_file *f, uint64_t offset_bytes, const uint8_t *buf,
                      uint64_t size_bytes, enum sim_copy copy);
bool __wrap_sim_write(struct sim_file *f, uint64_t offset_bytes, const uint8_t *buf,
                      uint64_t size_bytes, enum sim_copy copy)
{
    look();
    return __real_sim_write(f, offset_bytes, buf, size_bytes, copy);
}
void __real_sim_flush(struct sim_file *f);
void __wrap_sim_flush(struct sim_file *f);
void __wrap_sim_flush(struct sim_file *f)
{
    __real_sim_flush(f);
    look();
}

/* --- a run ------------------------------------------------------------------------------------ */

static struct variant variant_of(uint64_t seed)
{
    uint64_t k = seed % VARIANTS;
    return (struct variant){ .update = k & 1 ? STK_UPDATE_CHASE : STK_UPDATE_SERIAL,
                             .device = k & 2 ? STK_DEVICE_SIM : STK_DEVICE_HOST,
                             .skip = k & 4 ? 2 : 0 };
}

static void cut_config(struct toy *t, uint64_t seed, const struct io_sim_cfg *sim, bool adopt)
{
    struct variant v = variant_of(seed);
    variant_toy(t, &v);
    durable_config(&t->cfg, NULL, adopt);
    t->cfg.nvme[0] = "a";
    if (seed / VARIANTS % 2) t->cfg.nvme[1] = "b";
    t->cfg.simulate = true;
    t->cfg.seed = seed;
    t->cfg.storage = STK_STORAGE_SIM;
    t->cfg.sim_disk = sim;
    t->cfg.prefetch = (uint32_t)(seed / 3 % 3);
    t->cfg.stall_ns = 20ull * 1000000000u;
}

static struct io_sim_cfg cut_sim(uint64_t seed)
{
    struct io_sim_cfg sim = {
        .seed = seed, .latency_ns = 20000, .read_bytes_per_s = 1e9, .write_bytes_per_s = 5e8
    };
    struct stk_error err = { 0 };
    if (io_sim_disk_new(256u << 20, &sim.disk, &err) != STK_OK) abort();
    /* slow and out of order at times: commits end at other moments of the next step */
    sim.faults = (struct io_sim_faults){ .late_ppm = seed % 3 * 100000,
                                         .late_ns = 3000000,
                                         .reorder_ppm = 200000 };
    return sim;
}

static uint64_t every(uint64_t seed) { return 1 + seed / 16 % 2; }

/* Hashes of the uninterrupted run, by (skip, step). */
static uint64_t want[2][CUT_STEPS + 1];
static uint64_t changes[VARIANTS]; /* of the medium, in a whole run */

/* The run until the cut (or its end); false: it failed by itself. */
static bool run_until_cut(uint64_t seed, struct io_sim_cfg *sim)
{
    struct toy t;
    cut_config(&t, seed, sim, false);
    stk_status st = toy_open(&t);
    cut.e = t.e;
    if (st == STK_OK) st = toy_fill(&t);
    for (uint64_t i = 1; st == STK_OK && i <= CUT_STEPS && !cut.copy; i++) {
        st = toy_step(&t, 1e-3, NULL);
        if (st == STK_OK && i % every(seed) == 0) st = stk_durable(t.e, NULL);
    }
    if (st == STK_OK && !cut.copy) st = stk_durable_wait(t.e);
    if (st != STK_OK) printf("# seed %" PRIu64 ": %s\n", seed, t.e ? stk_error_text(t.e) : "?");
    if (cut.of) cut.of = cut.copy ? NULL : cut.of;
    cut.e = NULL;
    stk_close(t.e);
    return st == STK_OK;
}

/* The way back from the copy: false and a sentence if it is not what was promised. */
static bool come_back(uint64_t seed, struct io_sim_cfg *sim, bool to_the_end, uint64_t *at)
{
    const char *const paths[] = { "a", "b" };
    struct store_found *f = NULL;
    struct stk_error err = { 0 };
    uint64_t hash = 0;
    int skip = variant_of(seed).skip > 0;
    stk_status st = store_find(paths, seed / VARIANTS % 2 ? 2 : 1, RUN_ID, sim->disk, &f, &err);
    *at = st == STK_OK ? f->step : 0;
    store_found_free(f);
    /* a first table that was never whole is no durable step */
    if (st == STK_END || st == STK_ERR_CORRUPT) {
        if (cut.newest == 0) return true;
        printf("# seed %" PRIu64 ": durable step %" PRIu64 " was told of and is gone: %s\n", seed,
               cut.newest, err.text);
        return false;
    }
    struct toy t;
    cut_config(&t, seed, sim, true);
    if (st == STK_OK) st = toy_open(&t);
    if (st == STK_OK) st = stk_resume_durable(t.e, false, NULL);
    bool ok = st == STK_OK && t.e->begun == *at && *at >= cut.newest && *at <= CUT_STEPS;
    if (ok) st = toy_hash(&t, &hash);
    ok = ok && st == STK_OK && hash == want[skip][*at];
    t.step = *at;
    if (ok && to_the_end) {
        while (st == STK_OK && t.step < CUT_STEPS) {
            st = toy_step(&t, 1e-3, NULL);
            if (st == STK_OK) st = stk_durable(t.e, NULL);
        }
        if (st == STK_OK) st = toy_hash(&t, &hash);
        ok = st == STK_OK && hash == want[skip][CUT_STEPS];
    }
    if (!ok)
        printf("# seed %" PRIu64 ": told of step %" PRIu64 ", found %" PRIu64 ", at %" PRIu64
               ": %s\n",
               seed, cut.newest, *at, t.step, t.e ? stk_error_text(t.e) : err.text);
    stk_close(t.e);
    return ok;
}

static bool cut_one(uint64_t seed, uint64_t counts[CUT_STEPS + 1])
{
    struct io_sim_cfg sim = cut_sim(seed), back;
    struct rng r;
    uint64_t at = 0;
    rng_seed(&r, seed);
    cut = (struct cut){ .of = sim.disk, .at = rng_below(&r, changes[seed % VARIANTS]) };
    bool ok = run_until_cut(seed, &sim);
    if (ok && cut.copy) {
        struct io_sim_disk *copy = cut.copy;
        cut.of = NULL;
        io_sim_power_cut(copy, seed % 5 == 0 ? 0 : seed); /* 0: all of it is lost */
        back = cut_sim(seed + 1);
        io_sim_disk_free(back.disk);
        back.disk = copy;
        ok = come_back(seed, &back, seed % 4 == 0, &at);
        counts[at]++;
    }
    io_sim_disk_free(cut.copy);
    io_sim_disk_free(sim.disk);
    if (!ok) test_replay(seed, "one");
    return ok;
}

/* --- storage faults --------------------------------------------------------------------------- */

/* A run on a disk that errs; what is found after it, read without errors, is right or refused with a
 * sentence that names the place: never other weights. */
static bool faults_one(uint64_t seed, uint32_t *errors, uint32_t *refused, uint32_t *right)
{
    static const char *const where[] = { "chunk", "extent", "file", "bin" };
    struct io_sim_cfg sim = cut_sim(seed);
    struct rng r;
    uint64_t hash = 0;
    struct toy t;
    bool named = false;
    rng_seed_stream(&r, seed, 1);
    uint32_t *rates[] = { &sim.faults.read_error_ppm, &sim.faults.write_error_ppm,
                          &sim.faults.flip_bit_ppm,   &sim.faults.rot_bit_ppm,
                          &sim.faults.misdirect_ppm,  &sim.faults.lost_write_ppm };
    for (int i = 0; i < 2; i++) *rates[rng_below(&r, 6)] = 200 + (uint32_t)rng_below(&r, 1500);
    sim.faults.short_ppm = (uint32_t)rng_below(&r, 100000);
    cut = (struct cut){ .at = UINT64_MAX };
    cut_config(&t, seed, &sim, false);
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    for (int i = 0; st == STK_OK && i < CUT_STEPS; i++) {
        stk_step_stats s = { 0 };
        st = toy_step(&t, 1e-3, &s);
        if (st == STK_ERR_IO && s.step > 0) st = STK_OK; /* a commit failed; the run goes on */
        if (st == STK_OK) st = stk_durable(t.e, NULL);
        if (st == STK_ERR_IO && t.e->state == ENG_READY) st = STK_OK;
    }
    *errors += st != STK_OK;
    stk_close(t.e);
    memset(&sim.faults, 0, sizeof sim.faults);
    cut_config(&t, seed, &sim, true);
    st = toy_open(&t);
    if (st == STK_OK) st = stk_resume_durable(t.e, false, NULL);
    if (st == STK_OK) st = toy_hash(&t, &hash);
    const char *text = stk_error_text(t.e);
    for (int i = 0; i < 4; i++) named |= strstr(text, where[i]) != NULL;
    bool none = st == STK_ERR_STATE && strstr(text, "no durable step");
    bool ok = st == STK_OK ? hash == want[variant_of(seed).skip > 0][t.e->begun]
                           : none || (st == STK_ERR_CORRUPT && named);
    *refused += st == STK_ERR_CORRUPT;
    *right += st == STK_OK;
    if (!ok) {
        printf("# seed %" PRIu64 ": step %" PRIu64 ": %s: %s\n", seed, t.e->begun,
               stk_status_name(st), text);
        test_replay(seed, "faults");
    }
    stk_close(t.e);
    io_sim_disk_free(sim.disk);
    return ok;
}

/* The hashes to compare with, and how long runs are. */
static bool prepare(void)
{
    for (int skip = 0; skip < 2; skip++) {
        struct variant v = { .skip = skip ? 2 : 0 };
        struct toy t;
        variant_toy(&t, &v);
        t.cfg.params = t.cfg.optimizer_state = t.cfg.grads = STK_TIER_HOST;
        stk_status st = toy_open(&t);
        if (st == STK_OK) st = toy_fill(&t);
        for (int i = 1; st == STK_OK && i <= CUT_STEPS; i++) {
            st = toy_step(&t, 1e-3, NULL);
            if (st == STK_OK) st = toy_hash(&t, &want[skip][i]);
        }
        if (st != STK_OK) printf("# reference: %s\n", t.e ? stk_error_text(t.e) : "?");
        stk_close(t.e);
        if (st != STK_OK) return false;
    }
    for (uint64_t k = 0; k < VARIANTS; k++) {
        struct io_sim_cfg sim = cut_sim(k);
        cut = (struct cut){ .at = UINT64_MAX };
        bool ok = run_until_cut(k, &sim);
        changes[k] = cut.seen;
        io_sim_disk_free(sim.disk);
        if (!ok || cut.seen == 0) return false;
    }
    return true;
}

TEST(durable_power_cut_at_a_seeded_moment)
{
    uint64_t n = getenv("STK_SOAK") ? 20000 : test_share(1000), counts[CUT_STEPS + 1] = { 0 };
    uint32_t failed = 0;
    REQUIRE(prepare());
    for (uint64_t k = 0; k < n && failed < 5; k++) failed += !cut_one(test_seed() + k, counts);
    printf("# %" PRIu64 " power cuts; found none %" PRIu64, n, counts[0]);
    for (int i = 1; i <= CUT_STEPS; i++) printf(", step %d %" PRIu64, i, counts[i]);
    printf("\n");
    CHECK(failed == 0);
    for (int i = 0; i <= CUT_STEPS; i++) CHECK(counts[i] > 0);
}

TEST(durable_after_storage_faults)
{
    uint64_t n = getenv("STK_SOAK") ? 5000 : test_share(250);
    uint32_t errors = 0, refused = 0, right = 0, failed = 0;
    REQUIRE(prepare());
    for (uint64_t k = 0; k < n && failed < 5; k++)
        failed += !faults_one(test_seed() + k, &errors, &refused, &right);
    printf("# %" PRIu64 " runs with faults: %u ended in an error; then %u right, %u refused\n", n,
           errors, right, refused);
    CHECK(failed == 0);
    CHECK(errors > 0 && right > n / 4 && refused > 0);
}

/* The harness itself: with a disk that keeps back what it was told to flush, it must not pass. */
TEST(durable_power_cut_canary)
{
    uint64_t counts[CUT_STEPS + 1] = { 0 };
    uint32_t lost = 0;
    REQUIRE(prepare());
    fflush(stdout);
    for (uint64_t k = 0; k < 40; k++) {
        struct io_sim_cfg sim = cut_sim(k);
        struct rng r;
        uint64_t at = 0;
        rng_seed(&r, k);
        cut = (struct cut){ .of = sim.disk, .at = rng_below(&r, changes[k % VARIANTS]) };
        if (run_until_cut(k, &sim) && cut.copy && cut.newest > 0) {
            struct io_sim_disk *copy = cut.copy;
            for (struct sim_file *f = copy->files; f; f = f->next)
                for (uint64_t i = 0; i < f->n_pages; i++) {
                    sys_free(f->pages[i].durable);
                    f->pages[i].durable = NULL;
                    f->pages[i].dirty = f->pages[i].medium != NULL;
                }
            io_sim_power_cut(copy, 0);
            struct io_sim_cfg back = { .disk = copy, .seed = 1 };
            lost += !come_back(k, &back, false, &at);
            counts[at]++;
        }
        io_sim_disk_free(cut.copy);
        io_sim_disk_free(sim.disk);
    }
    CHECK(lost > 10 && counts[CUT_STEPS] == 0);
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "one")) {
        uint64_t counts[CUT_STEPS + 1];
        bool ok = prepare() && cut_one(test_seed(), counts);
        printf("# seed %" PRIu64 ": %s\n", test_seed(), ok ? "right" : "wrong");
        return ok ? 0 : 1;
    }
    if (argc == 2 && !strcmp(argv[1], "faults")) {
        uint32_t n[3] = { 0 };
        return prepare() && faults_one(test_seed(), &n[0], &n[1], &n[2]) ? 0 : 1;
    }
    return test_run_all(argc, argv);
}
