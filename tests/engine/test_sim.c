/* tests/engine/test_sim.c - whole training runs under simulated execution, disk and device: replay,
 * and storage faults.
 *
 * A run with faults must end with the reference's bits or with a clean error. A seed decides the
 * order of everything, the faults (read and write errors, short transfers, flipped and rotten bits,
 * misdirected and lost writes, lost and late completions, reordering, full disk), and the variant:
 * device, prefetch, order of accumulation, update mode, one to four drives of their own speed and
 * weight, whether activations go to NVMe (of all layers, or of all but the last), whether every step
 * is made durable, and whether a checkpoint is written beside steps 2 and
 * 3, which then must be the reference's to the byte or fail by itself. The norm of the last step binds,
 * and only just, so that what was speculated in its backward is taken back. A failing seed prints a line
 * that runs it alone:
 *     STK_SEED=17 build/tests/engine/engine_test_sim one
 * The canary proves that the harness would notice: the medium is damaged where no checksum looks,
 * and the run must come out wrong. STK_SOAK=1: 20,000 seeds; STK_BRIEF=1: a
 * quarter of the thousand. */
#include "engine/engine.h"
#include "nvme/io_sim.h"
#include "nvme/store_impl.h"
#include "tests/engine/durable_world.h"
#include "tests/engine/save_world.h"

struct result { stk_status status; uint64_t hash, trace; char text[640]; };

enum { SIM_STEPS = 3 };

static void sim_config(stk_config *c, uint64_t seed, const struct io_sim_cfg *sim)
{
    c->simulate = true;
    c->seed = seed;
    c->storage = STK_STORAGE_SIM;
    c->sim_disk = sim;
    c->nvme[0] = "disk";
    c->params = c->optimizer_state = c->grads = STK_TIER_NVME;
    c->stall_ns = 20ull * 1000000000u;
}

static struct io_sim_cfg sim_disk(uint64_t seed)
{
    struct io_sim_cfg sim = {
        .seed = seed, .latency_ns = 20000, .read_bytes_per_s = 1e9, .write_bytes_per_s = 5e8
    };
    struct stk_error err = { 0 };
    if (io_sim_disk_new(256u << 20, &sim.disk, &err) != STK_OK) abort();
    return sim;
}

static void keep(struct result *r, stk_status st, const stk_engine *e)
{
    r->status = st;
    r->trace = e ? stk_trace_hash(e) : 0;
    snprintf(r->text, sizeof r->text, "%s", e ? stk_error_text(e) : "no engine");
    /* the run's folder has a random name (nvme/store.h) */
    char *name = strstr(r->text, "stoker-run-");
    for (char *p = name ? name + strlen("stoker-run-") : ""; *p && strchr("0123456789abcdef", *p);
         p++)
        *p = '0';
}

/* What a seed varies beside faults and order: a seed that is larger by VARIANTS has the same. */
enum { VARIANTS = 512 };

static uint32_t seed_drives(uint64_t seed) { return 1 + (uint32_t)(seed / 16 % 4); }
static bool seed_durable(uint64_t seed) { return seed / 64 % 2 == 1; }
static bool seed_saves(uint64_t seed) { return seed / 128 % 2 == 1; }

static uint32_t saves_failed, saves_gated, saves_wrong;
static char save_want[256], save_got[256];

/* After step 1. The run of seed 1 without faults is the reference. */
static stk_status sim_save(struct toy *t, bool reference)
{
    if (t->step != 1) return STK_OK;
    if (reference) return stk_save(t->e, save_dir("want", save_want), NULL, 0);
    return stk_save_begin(t->e, save_dir("got", save_got), NULL, 0);
}

/* The checkpoint's own failure is none of the run's. */
static stk_status sim_save_end(struct toy *t)
{
    uint64_t step, took, held;
    stk_status st = stk_save_wait(t->e);
    bool own = st != STK_OK && t->e->state == ENG_READY && strstr(stk_error_text(t->e), "checkpoint");
    saves_failed += own;
    saves_gated += t->e->save.n_gated > 0;
    if (stk_saved(t->e, &step, &took, &held)) saves_wrong += !save_same(save_want, save_got, 1);
    return own ? STK_OK : st;
}

static void seed_variant(stk_config *c, struct io_sim_cfg *sim, uint64_t seed)
{
    static const char *const names[4] = { "disk", "disk-b", "disk-c", "disk-d" };
    uint32_t n = seed_drives(seed);
    c->prefetch = (uint32_t)(seed % 4);
    c->accumulate = (stk_accumulate)(seed / 4 % 2);
    c->update = (stk_update)(1 + seed / 8 % 2 + 2 * (seed / 256 % 2));
    c->activations = seed / 2 % 3 == 0 ? STK_ACT_NVME : STK_ACT_AUTO;
    c->activations_last[STK_ACT_KEEP] = seed / 2 % 3 == 0 && seed % 2;
    for (uint32_t i = 0; i < n; i++) {
        c->nvme[i] = names[i];
        c->nvme_weights[i] = n > 1 ? (double)(1 + (seed + i) % 3) : 0;
        if (n > 1) sim->drives[i] = (struct io_sim_drive){ 3e8 * (i + 1), 2e8 * (i + 1) };
    }
    if (seed_durable(seed)) durable_config(c, NULL, false);
}

static uint64_t speculated, taken_back;
static double last_norm;

/* Steps, each made durable where the variant says so. A commit or a checkpoint that fails is an error
 * of that durable step or checkpoint, which names the place; the run goes on without it. */
static stk_status sim_steps(struct toy *t, bool durable, uint32_t *commits_failed)
{
    stk_status st = STK_OK;
    for (int i = 0; st == STK_OK && i < SIM_STEPS; i++) {
        stk_step_stats s = { 0 };
        st = toy_step(t, 1e-3, &s);
        if (st != STK_OK && t->e->state == ENG_READY && s.step > 0 &&
            strstr(stk_error_text(t->e), "the checkpoint of step")) {
            saves_failed++;
            st = STK_OK;
        }
        if (st == STK_OK && (seed_saves(t->cfg.seed) || t->cfg.seed == 1))
            st = sim_save(t, !seed_saves(t->cfg.seed));
        speculated += s.spec_chunks;
        taken_back += s.spec_undone;
        last_norm = s.grad_norm;
        for (int tries = 0; durable && tries < 2; tries++) {
            if (st != STK_OK && t->e->state == ENG_READY && s.step > 0) {
                *commits_failed += 1;
                if (!strstr(stk_error_text(t->e), "durable")) return st;
                st = STK_OK;
            }
            if (st == STK_OK && tries == 0) st = stk_durable(t->e, NULL);
        }
    }
    return st;
}

/* One run: fill, steps, hash. */
static bool checks_off; /* the canary: the store compares no checksums */
static uint32_t commits_failed;

static void sim_toy(struct toy *t, double clip)
{
    toy_init(t, 2, 2);
    t->rows = 2;
    t->boost_at = SIM_STEPS;
    t->cfg.clip = clip;
    t->cfg.poison = false;
}

/* Just below the norm of the last step, far above the others. */
static double sim_clip(void)
{
    static double clip;
    struct toy t;
    uint32_t none = 0;
    if (clip > 0) return clip;
    sim_toy(&t, 0);
    if (toy_open(&t) != STK_OK || toy_fill(&t) != STK_OK || sim_steps(&t, false, &none) != STK_OK)
        abort();
    stk_close(t.e);
    return clip = 0.98 * last_norm;
}

static struct result sim_run(uint64_t seed, const struct io_sim_faults *faults,
                             stk_device_kind device, uint64_t *damage)
{
    struct result r = { 0 };
    struct toy t;
    struct io_sim_cfg sim = sim_disk(seed);
    if (faults) sim.faults = *faults;
    sim_toy(&t, sim_clip());
    t.cfg.device = device;
    sim_config(&t.cfg, seed, &sim);
    seed_variant(&t.cfg, &sim, seed);
    stk_status st = toy_open(&t);
    if (st == STK_OK && checks_off) t.e->store->checksums = false;
    if (st == STK_OK) st = toy_fill(&t);
    if (st == STK_OK) st = sim_steps(&t, seed_durable(seed), &commits_failed);
    if (st == STK_OK && seed_saves(seed)) st = sim_save_end(&t);
    if (st == STK_OK) st = toy_hash(&t, &r.hash);
    keep(&r, st, t.e);
    stk_close(t.e);
    uint64_t kinds[11];
    if (damage) *damage = io_sim_faults_done(sim.disk, kinds);
    io_sim_disk_free(sim.disk);
    return r;
}

static const stk_device_kind devices[] = { STK_DEVICE_SIM, STK_DEVICE_HOST,
                                           STK_DEVICE_HOST_DISCRETE };

TEST(sim_same_seed_same_trace_and_bits_other_seed_same_bits)
{
    for (int d = 0; d < 3; d++) {
        struct result first = sim_run(test_seed(), NULL, devices[d], NULL),
                      again = sim_run(test_seed(), NULL, devices[d], NULL);
        CHECK(first.status == STK_OK && again.status == STK_OK);
        if (first.status != STK_OK) printf("# %s\n", first.text);
        CHECK(first.hash == again.hash && first.trace == again.trace && first.trace != 0);
        uint32_t same = 0;
        for (uint64_t k = 1; k <= 6; k++) {
            struct result other = sim_run(test_seed() + VARIANTS * k, NULL, devices[d], NULL);
            CHECK(other.status == STK_OK && other.hash == first.hash);
            same += other.trace == first.trace;
        }
        CHECK(same == 0);
    }
}

/* The same with faults: an error is replayed too, word for word. */
TEST(sim_faults_replay_from_the_seed)
{
    struct io_sim_faults f = { .read_error_ppm = 2000,
                               .flip_bit_ppm = 2000,
                               .lost_completion_ppm = 1000,
                               .short_ppm = 100000 };
    uint32_t errors = 0;
    for (uint64_t k = 0; k < 10; k++) {
        struct result a = sim_run(test_seed() + k, &f, devices[k % 3], NULL),
                      b = sim_run(test_seed() + k, &f, devices[k % 3], NULL);
        bool same = a.status == b.status && a.hash == b.hash && a.trace == b.trace &&
                    !strcmp(a.text, b.text);
        if (!same)
            printf("# trace %016" PRIx64 ": %s\n# trace %016" PRIx64 ": %s\n", a.trace, a.text,
                   b.trace, b.text);
        CHECK(same);
        errors += a.status != STK_OK;
    }
    CHECK(errors > 0);
}

/* --- a thousand seeds ------------------------------------------------------------------------- */

/* Rates of a seed: some of the kinds, none so often that every run dies. */
static struct io_sim_faults seed_faults(uint64_t seed)
{
    struct rng r;
    struct io_sim_faults f = { 0 };
    uint32_t *rates[] = { &f.read_error_ppm, &f.write_error_ppm,    &f.no_space_ppm,
                          &f.flip_bit_ppm,   &f.rot_bit_ppm,        &f.misdirect_ppm,
                          &f.lost_write_ppm, &f.lost_completion_ppm };
    rng_seed(&r, seed);
    uint32_t kinds = 1 + (uint32_t)rng_below(&r, 3);
    for (uint32_t i = 0; i < kinds; i++)
        *rates[rng_below(&r, 8)] = 200 + (uint32_t)rng_below(&r, 2500) / kinds;
    f.short_ppm = (uint32_t)rng_below(&r, 100000);
    f.late_ppm = (uint32_t)rng_below(&r, 50000);
    f.late_ns = 3000000;
    f.reorder_ppm = (uint32_t)rng_below(&r, 200000);
    return f;
}

/* A clean error: one of four kinds, with a sentence that says where. */
static bool clean(const struct result *r)
{
    static const char *const where[] = { "chunk", "file", "extent", "offset", "byte" };
    bool kind = r->status == STK_ERR_IO || r->status == STK_ERR_CORRUPT ||
                r->status == STK_ERR_NOSPACE || r->status == STK_ERR_STALLED;
    for (size_t i = 0; kind && i < sizeof where / sizeof *where; i++)
        if (strstr(r->text, where[i])) return true;
    return false;
}

/* False: neither right nor a clean error. *bad counts errors, *hit runs in which a fault was
 * injected. */
static bool sim_one(uint64_t seed, uint64_t want, uint32_t *errors, uint32_t *hit)
{
    struct io_sim_faults f = seed_faults(seed);
    uint64_t damage = 0;
    struct result r = sim_run(seed, &f, devices[seed % 3], &damage);
    *errors += r.status != STK_OK;
    *hit += damage > 0;
    if (r.status == STK_OK ? r.hash == want : clean(&r)) return true;
    printf("# seed %" PRIu64 ": %s: %s; hash %016" PRIx64 ", wanted %016" PRIx64
           "\n",
           seed, stk_status_name(r.status), r.text, r.hash, want);
    test_replay(seed, "one");
    return false;
}

TEST(sim_a_thousand_seeds_with_storage_faults)
{
    bool soak = getenv("STK_SOAK") != NULL;
    uint64_t n = soak ? 20000 : test_share(1000);
    uint32_t errors = 0, hit = 0, failed = 0, durable = 0, drives[5] = { 0 };
    struct result ref = sim_run(1, NULL, STK_DEVICE_HOST, NULL);
    REQUIRE(ref.status == STK_OK);
    commits_failed = saves_failed = saves_gated = saves_wrong = 0;
    speculated = taken_back = 0;
    for (uint64_t k = 0; k < n && failed < 5; k++) {
        failed += !sim_one(test_seed() + k, ref.hash, &errors, &hit);
        durable += seed_durable(test_seed() + k);
        drives[seed_drives(test_seed() + k)]++;
    }
    printf(
        "# %" PRIu64
        " seeds: %u with a fault, %u ended in a clean error, the others in the reference's bits\n",
        n, hit, errors);
    printf("# %u with durable steps (%u commits failed and were survived or named); drives: 1: %u, "
           "2: %u, 3: %u, 4: %u\n",
           durable, commits_failed, drives[1], drives[2], drives[3], drives[4]);
    printf("# checkpoints beside the steps: %u failed by themselves, %u held an update, %u wrong\n",
           saves_failed, saves_gated, saves_wrong);
    CHECK(saves_wrong == 0 && saves_gated > n / 20);
    printf("# %" PRIu64 " chunks speculated, %" PRIu64 " taken back\n", speculated, taken_back);
    CHECK(failed == 0 && speculated > 0 && taken_back > 0);
    CHECK(durable > n / 3 && durable < n * 2 / 3);
    for (int i = 1; i <= 4; i++) CHECK(drives[i] > n / 6);
    CHECK(errors > n / 5 && errors < n * 4 / 5);
    CHECK(hit > errors);
}

/* Seeds that once ended otherwise. 916466: a commit fails, its table cannot be taken back, and the
 * write after it is refused: with the commit's class and cause. */
TEST(sim_seeds_that_once_failed)
{
    static const uint64_t once[] = { 916466 };
    struct result ref = sim_run(1, NULL, STK_DEVICE_HOST, NULL);
    for (size_t i = 0; i < sizeof once / sizeof *once; i++) {
        uint32_t errors = 0, hit = 0;
        CHECK(sim_one(once[i], ref.hash, &errors, &hit));
    }
}

/* A commit that fails while nothing else does, in every variant and for any seed: an error that names
 * the durable step; the one before stays, the next one counts, and the bits are the reference's. */
TEST(sim_a_commit_that_fails_is_survived)
{
    struct result ref = sim_run(1, NULL, STK_DEVICE_HOST, NULL);
    /* 5 and VARIANTS have no common factor: every value of every option comes */
    for (uint64_t k = 0; k < 2 * VARIANTS; k += test_brief() ? 5 : 1) {
        uint64_t seed = test_seed() + k, hash = 0;
        struct toy t;
        struct io_sim_cfg sim = sim_disk(seed);
        if (!seed_durable(seed)) {
            io_sim_disk_free(sim.disk);
            continue;
        }
        sim_toy(&t, sim_clip());
        t.cfg.device = devices[seed % 3];
        sim_config(&t.cfg, seed, &sim);
        seed_variant(&t.cfg, &sim, seed);
        RUN(&t, toy_open(&t));
        RUN(&t, toy_fill(&t));
        for (int i = 0; i < SIM_STEPS; i++) {
            RUN(&t, toy_step(&t, 1e-3, NULL));
            RUN(&t, stk_flush(t.e));
            if (i == 1) { /* only the commit writes now */
                sim.faults.write_error_ppm = 1000000;
                stk_status st = stk_durable(t.e, NULL);
                if (st == STK_OK) st = stk_durable_wait(t.e);
                CHECK(REFUSED(st, STK_ERR_IO, t.e, "durable step 2", "extents"));
                CHECK(atomic_load(&t.e->durable.newest_step) == 1);
                sim.faults.write_error_ppm = 0;
            } else {
                RUN(&t, stk_durable(t.e, NULL));
                RUN(&t, stk_durable_wait(t.e));
            }
        }
        CHECK(atomic_load(&t.e->durable.newest_step) == SIM_STEPS);
        RUN(&t, toy_hash(&t, &hash));
        CHECK(hash == ref.hash);
        stk_close(t.e);
        io_sim_disk_free(sim.disk);
    }
}

/* --- own order, and the way back after an error ----------------------------------------------- */

TEST(sim_own_order_with_storage_faults)
{
    uint64_t want = 0, got = 0, n = test_share(60);
    uint32_t errors = 0;
    for (uint64_t k = 0; k < n; k++) {
        struct mlp m;
        struct io_sim_cfg sim = sim_disk(k);
        struct result r = { 0 };
        if (k) sim.faults = seed_faults(test_seed() + k);
        mlp_init(&m, WORLD_NVME);
        sim_config(&m.cfg, k, &sim);
        m.cfg.poison = false;
        m.cfg.own_held_max = 1 + (uint32_t)(k % 3);
        m.skip_layer = true;
        stk_status st = mlp_open(&m);
        for (int i = 0; st == STK_OK && i < 3; i++) st = mlp_step(&m, NULL);
        if (st == STK_OK) st = mlp_hash(&m, k ? &got : &want);
        keep(&r, st, m.e);
        bool right = st == STK_OK ? k == 0 || got == want : clean(&r);
        if (!right)
            printf("# seed %" PRIu64 ": %s: %s\n", test_seed() + k, stk_status_name(st), r.text);
        CHECK(right);
        errors += st != STK_OK;
        if (st != STK_OK) { /* a failed engine says so and can only be closed */
            stk_step s = { 0 };
            CHECK(stk_step_begin(m.e, &s) == STK_ERR_STATE && stk_flush(m.e) == STK_ERR_STATE &&
                  stk_save(m.e, world_dir("x"), NULL, 0) == STK_ERR_STATE);
        }
        stk_close(m.e);
        io_sim_disk_free(sim.disk);
    }
    CHECK(errors > 0 && errors < n * 55 / 60);
}

/* --- the canary ------------------------------------------------------------------------------- */

/* A fault that the store's checksums cannot see: after the fill, one bit of a parameter in host
 * memory flips. sim_one's comparison must notice. */
TEST(sim_canary_a_planted_fault_is_found)
{
    struct result ref = sim_run(1, NULL, STK_DEVICE_HOST, NULL);
    struct toy t;
    uint64_t hash = 0;
    struct io_sim_cfg sim = sim_disk(1);
    sim_toy(&t, sim_clip());
    sim_config(&t.cfg, 1, &sim);
    t.cfg.params = STK_TIER_HOST;
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    struct stk_chunk *c = &t.e->layout->chunks[0];
    REQUIRE(c->host[CHUNK_PARAM] != NULL);
    *(uint16_t *)c->host[CHUNK_PARAM] ^= 0x40;
    for (int i = 0; i < SIM_STEPS; i++) RUN(&t, toy_step(&t, 1e-3, NULL));
    RUN(&t, toy_hash(&t, &hash));
    CHECK(hash != ref.hash);
    stk_close(t.e);
    io_sim_disk_free(sim.disk);
    /* and one that they can: a bit of the medium, in each state of the first chunk, is an error
     * that names the chunk */
    for (int s = 0; s < 2; s++) {
        const char *file;
        uint64_t at;
        sim = sim_disk(2);
        toy_init(&t, 2, 2);
        t.rows = 2;
        sim_config(&t.cfg, 2, &sim);
        RUN(&t, toy_open(&t));
        RUN(&t, toy_fill(&t));
        RUN(&t, toy_step(&t, 1e-3, NULL));
        RUN(&t, stk_flush(t.e));
        REQUIRE(store_locate(t.e->store, t.e->layout->chunks[0].extent[s], &file, &at) == STK_OK);
        CHECK(io_sim_flip(sim.disk, file, at + 100, 3));
        stk_status st = STK_OK;
        for (int i = 0; st == STK_OK && i < 2; i++) st = toy_step(&t, 1e-3, NULL);
        if (st == STK_OK) st = stk_flush(t.e);
        CHECK(REFUSED(st, STK_ERR_CORRUPT, t.e, "chunk 0", "checksum"));
        stk_close(t.e);
        io_sim_disk_free(sim.disk);
    }
}

/* The harness itself: with the store's checks taken out, the same thousand seeds must not pass. */
TEST(sim_canary_without_checksums_the_harness_fails)
{
    uint32_t errors = 0, hit = 0, found = 0, seeds = 0;
    struct result ref = sim_run(1, NULL, STK_DEVICE_HOST, NULL);
    checks_off = true;
    fflush(stdout);
    for (; seeds < 100 && found < 3; seeds++) {
        struct io_sim_faults f = seed_faults(test_seed() + seeds);
        struct result r = sim_run(test_seed() + seeds, &f, devices[seeds % 3], NULL);
        hit += r.status == STK_OK;
        errors += r.status != STK_OK;
        found += r.status == STK_OK ? r.hash != ref.hash : !clean(&r);
    }
    checks_off = false;
    printf(
        "# without checksums: wrong bits in %u of %u runs that ended well, %u ended in an error\n",
        found, hit, errors);
    CHECK(found == 3);
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "one")) {
        uint32_t errors = 0, hit = 0;
        struct result ref = sim_run(1, NULL, STK_DEVICE_HOST, NULL);
        bool ok = sim_one(test_seed(), ref.hash, &errors, &hit);
        printf("# seed %" PRIu64 ": %s\n", test_seed(),
               !ok      ? "wrong"
               : errors ? "a clean error"
                        : "right");
        return ok ? 0 : 1;
    }
    return test_run_all(argc, argv);
}
