/* tests/engine/test_twin.c - blocks that lie on the device (engine/twin.h): the same bits for any fraction,
 * over update modes, accumulation, activations and 16-bit types, with a norm that binds and steps that are
 * skipped; checkpoints of the same bytes, resumed with any other fraction, after a kill, too; what is read
 * and written between steps; what is refused and what is said. test_matrix.c and test_plan*.c have more of
 * it, test_predict.c times. */
#include "tests/engine/save_world.h"
#include "tests/engine/world.h"
#include "engine/twin.h"
#include "nvme/io_sim.h"
#include <signal.h>
#include <sys/wait.h>

static const char *self;
static bool as_a_card; /* auto takes host:discrete for one */

bool __real_twin_auto(const stk_engine *e, const struct eng_placement *pl);
bool __wrap_twin_auto(const stk_engine *e, const struct eng_placement *pl);
bool __wrap_twin_auto(const stk_engine *e, const struct eng_placement *pl)
{
    return as_a_card ? e->cfg.optimizer_on_device == STK_ON_DEVICE_AUTO : __real_twin_auto(e, pl);
}

struct how {
    stk_update update;
    stk_accumulate accumulate;
    stk_act act;
    stk_dtype dtype;
    bool tied, freeze;
};

static void set_up(struct toy *t, const struct how *h, stk_device_kind device, double fraction)
{
    toy_init(t, 4, 2);
    t->tied = h->tied;
    t->freeze_first = h->freeze;
    t->cfg.dtype = h->dtype;
    t->cfg.update = h->update;
    t->cfg.accumulate = h->accumulate;
    t->cfg.activations = h->act;
    t->cfg.device = device;
    t->cfg.simulate = device == STK_DEVICE_SIM;
    t->cfg.seed = test_seed();
    t->cfg.clip = 0.6; /* binds in some steps and not in others */
    t->cfg.loss_scale = 1024;
    t->cfg.optimizer_on_device = fraction;
    t->cfg.update_threads = 2;
    t->boost_at = 3;
    t->poison_loss_at = 4;
    t->poison_embed_at = 6;
}

static uint64_t there(const struct toy *t) { return world_table(t->e, "device", "optimizer state on the device"); }

/* Seven steps. False: failed (printed). */
static bool run(const struct how *h, stk_device_kind device, double fraction, uint64_t *hash,
                uint64_t *on_device, stk_step_stats *last)
{
    struct toy t;
    set_up(&t, h, device, fraction);
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    for (int i = 0; i < 7 && st == STK_OK; i++) st = toy_step(&t, 1e-3, last);
    if (st == STK_OK) st = toy_hash(&t, hash);
    if (st != STK_OK) printf("# %s: %s\n", stk_status_name(st), t.e ? stk_error_text(t.e) : "?");
    *on_device = t.e ? there(&t) : 0;
    stk_close(t.e);
    return st == STK_OK;
}

static void all_fractions(struct how h, bool brief)
{
    static const double fractions[] = { 0, 0.3, 1 };
    static const stk_device_kind devices[] = { STK_DEVICE_HOST_DISCRETE, STK_DEVICE_SIM };
    struct how plain = h;
    uint64_t want, got, bytes;
    stk_step_stats s = { 0 }, first = { 0 };
    plain.update = STK_UPDATE_SERIAL;
    plain.act = STK_ACT_KEEP;
    REQUIRE(run(&plain, STK_DEVICE_HOST, 0, &want, &bytes, &first));
    CHECK(first.skipped_total >= 2);
    for (int update = STK_UPDATE_SERIAL; update <= STK_UPDATE_SPECULATE; update++)
        for (int act = STK_ACT_KEEP; act <= STK_ACT_HOST; act++)
            for (int k = 0; k < 3; k++)
                for (int d = 0; d < (brief ? 1 : 2); d++) {
                    h.update = (stk_update)update;
                    h.act = (stk_act)act;
                    bool ok = run(&h, devices[d], fractions[k], &got, &bytes, &s) && got == want &&
                              (k > 0) == (bytes > 0) && s.skipped_total == first.skipped_total;
                    if (k == 2 && !h.freeze) /* nothing of the state moves, and no parameter */
                        ok = ok && s.param_fetch_bytes == 0 &&
                             (act == STK_ACT_HOST || h.accumulate == STK_ACCUMULATE_MICRO || s.copy_out_bytes == 0);
                    if (ok) continue;
                    printf("# update %d, activations %d, accumulate %d, dtype %d, tied %d, freeze %d, device %d, "
                           "fraction %g: %016" PRIx64 ", not %016" PRIx64 "; %" PRIu64 " bytes there\n",
                           update, act, h.accumulate, h.dtype, h.tied, h.freeze, devices[d], fractions[k], got,
                           want, bytes);
                    test_fail(__FILE__, __LINE__, "the fraction changed the numbers");
                }
}

TEST(twin_bits_bf16_layer_major) { all_fractions((struct how){ .dtype = STK_BF16 }, false); }
TEST(twin_bits_fp16_micro_major)
{
    all_fractions((struct how){ .dtype = STK_FP16, .accumulate = STK_ACCUMULATE_MICRO }, false);
}
TEST(twin_bits_tied_micro_major)
{
    all_fractions((struct how){ .dtype = STK_BF16, .accumulate = STK_ACCUMULATE_MICRO, .tied = true }, true);
}
TEST(twin_bits_frozen_parts_fp16) { all_fractions((struct how){ .dtype = STK_FP16, .freeze = true }, true); }

/* The first blocks of the order, each that still fits. */
TEST(twin_takes_the_first_blocks_that_fit)
{
    static const struct { double fraction; const char *blocks; } cases[] = {
        { 0.05, "0000000000" }, { 0.10, "0100000000" }, { 0.25, "0110000000" }, { 0.36, "1000000000" },
        { 0.45, "1100000000" }, { 1.0, "1111110000" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct toy t;
        set_up(&t, &(struct how){ STK_UPDATE_CHASE, 0, STK_ACT_KEEP, STK_BF16, false, false },
               STK_DEVICE_HOST_DISCRETE, cases[i].fraction);
        RUN(&t, toy_open(&t));
        char got[32] = "0000000000";
        for (uint32_t k = 0; k < t.e->layout->n_chunks; k++)
            if (t.e->layout->chunks[k].home[CHUNK_OPT] == CHUNK_DEVICE) got[t.e->layout->chunks[k].block] = '1';
        if (strcmp(got, cases[i].blocks)) printf("# %g: blocks %s, not %s\n", cases[i].fraction, got, cases[i].blocks);
        CHECK(!strcmp(got, cases[i].blocks));
        /* the host has so much less, and nothing twice */
        uint64_t all = world_table(t.e, "host", "optimizer state") + there(&t);
        CHECK(all >= 10ull * 5 * TOY_HIDDEN * TOY_HIDDEN && all < 10ull * 2 * (211 + 4 * 66) * TOY_HIDDEN);
        stk_close(t.e);
    }
}

/* --- between steps ----------------------------------------------------------------------------- */

/* A gradient, a parameter and a moment of a block there, and a write in the middle of the run. */
TEST(twin_reads_and_writes_between_steps)
{
    uint64_t hash[2];
    float *v[2][4];
    for (int side = 0; side < 2; side++) {
        struct toy t;
        set_up(&t, &(struct how){ STK_UPDATE_CHASE, 0, STK_ACT_KEEP, STK_BF16, false, false },
               STK_DEVICE_HOST_DISCRETE, side);
        RUN(&t, toy_open(&t));
        RUN(&t, toy_fill(&t));
        RUN(&t, world_steps(&t, 2, 1e-3));
        v[side][0] = world_read(&t, t.tensor_w[1], STK_READ_GRAD); /* before the update that is due */
        v[side][1] = world_read(&t, t.tensor_embed, STK_READ_PARAM);
        v[side][2] = world_read(&t, t.tensor_w[2], STK_READ_EXP_AVG_SQ);
        float x[100];
        for (int i = 0; i < 100; i++) x[i] = 0.01f * (float)i;
        RUN(&t, stk_tensor_write(t.e, t.tensor_w[0], 37, 100, x, STK_F32));
        RUN(&t, world_steps(&t, 3, 1e-3));
        RUN(&t, stk_flush(t.e));
        v[side][3] = world_read(&t, t.tensor_w[0], STK_READ_MASTER);
        RUN(&t, toy_hash(&t, &hash[side]));
        stk_close(t.e);
    }
    CHECK(hash[0] == hash[1]);
    const size_t n[4] = { TOY_HIDDEN * TOY_HIDDEN, TOY_VOCAB * TOY_HIDDEN, TOY_HIDDEN * TOY_HIDDEN,
                          TOY_HIDDEN * TOY_HIDDEN };
    for (int k = 0; k < 4; k++) {
        CHECK(v[0][k] && v[1][k] && !memcmp(v[0][k], v[1][k], n[k] * sizeof(float)));
        free(v[0][k]);
        free(v[1][k]);
    }
}

/* An evaluation sees what the update made, and changes nothing. */
static stk_status evaluate(struct toy *t, double *loss)
{
    struct stk_error err = { 0 };
    stk_visit v;
    stk_status st;
    STK_TRY(stk_eval_begin(t->e));
    STK_TRY(toy_inputs(t, 99, &err));
    while ((st = stk_next(t->e, &v)) == STK_OK) {
        STK_TRY(toy_visit(t, &v, &err));
        STK_TRY(stk_done(t->e, &v));
    }
    if (st != STK_END) return st;
    STK_TRY(stk_eval_end(t->e));
    *loss = t->loss[0] + t->loss[1];
    return STK_OK;
}

TEST(twin_evaluates_what_was_made)
{
    double loss[3];
    for (int side = 0; side < 3; side++) {
        struct toy t;
        set_up(&t, &(struct how){ STK_UPDATE_SPECULATE, 0, STK_ACT_KEEP, STK_BF16, false, false },
               STK_DEVICE_HOST_DISCRETE, side / 2.0);
        RUN(&t, toy_open(&t));
        RUN(&t, toy_fill(&t));
        RUN(&t, world_steps(&t, 2, 1e-2));
        RUN(&t, evaluate(&t, &loss[side]));
        stk_close(t.e);
    }
    CHECK(loss[0] == loss[1] && loss[0] == loss[2] && loss[0] > 0);
}

/* --- checkpoints -------------------------------------------------------------------------------- */

static stk_status train_and_save(const struct how *h, double fraction, bool beside, const char *dir, uint64_t *hash)
{
    struct toy t;
    set_up(&t, h, STK_DEVICE_HOST_DISCRETE, fraction);
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    if (st == STK_OK) st = world_steps(&t, 2, 1e-3);
    if (st == STK_OK) st = beside ? stk_save_begin(t.e, dir, NULL, 0) : stk_save(t.e, dir, NULL, 0);
    if (st == STK_OK) st = world_steps(&t, 3, 1e-3);
    if (st == STK_OK) st = stk_save_wait(t.e);
    if (st == STK_OK) st = toy_hash(&t, hash);
    if (st != STK_OK) printf("# %s\n", stk_error_text(t.e));
    stk_close(t.e);
    return st;
}

static void checkpoints(const struct how *h)
{
    static const double fractions[] = { 0, 0.3, 1 };
    char *dirs[6], dir[256];
    uint64_t want = 0, got;
    for (int k = 0; k < 6; k++) {
        char name[16];
        snprintf(name, sizeof name, "dir%d", k);
        dirs[k] = strdup(save_dir(name, dir));
        REQUIRE(dirs[k] != NULL);
        CHECK(train_and_save(h, fractions[k / 2], k & 1, dirs[k], &got) == STK_OK);
        if (k == 0) want = got;
        CHECK(got == want);
        CHECK(save_same(dirs[0], dirs[k], 2));
    }
    for (int from = 1; from < 6; from += 2) /* resumed by every other */
        for (int to = 0; to < 3; to++) {
            struct toy t;
            char *path = NULL;
            uint64_t at = 0;
            set_up(&t, h, STK_DEVICE_HOST_DISCRETE, fractions[to]);
            RUN(&t, toy_open(&t));
            CHECK(stk_newest_checkpoint(dirs[from], &path, &at) == STK_OK && at == 2);
            RUN(&t, stk_restore(t.e, path, false, NULL));
            stk_free(path);
            t.step = at;
            RUN(&t, world_steps(&t, 3, 1e-3));
            RUN(&t, toy_hash(&t, &got));
            CHECK(got == want);
            stk_close(t.e);
        }
    for (int k = 0; k < 6; k++) free(dirs[k]);
}

TEST(twin_checkpoints_have_the_same_bytes_and_resume_with_any_fraction)
{
    for (int update = STK_UPDATE_SERIAL; update <= STK_UPDATE_SPECULATE; update++)
        for (int dtype = STK_BF16; dtype <= STK_FP16; dtype++)
            checkpoints(&(struct how){ (stk_update)update, 0, STK_ACT_KEEP, (stk_dtype)dtype, false, dtype == STK_FP16 });
}

/* The checkpoint's drive takes longer than steps: updates there wait until the chunk is copied out, and without
 * the gate the checkpoint is another. */
static stk_status save_slowly(uint64_t seed, double fraction, bool beside, bool no_gate, const char *dir, uint64_t *gated)
{
    struct toy t;
    struct stk_error err = { 0 };
    struct io_sim_cfg sim = { .seed = seed, .latency_ns = 20000, .read_bytes_per_s = 1e9, .write_bytes_per_s = 1e7 };
    STK_TRY(io_sim_disk_new(1u << 20, &sim.disk, &err));
    set_up(&t, &(struct how){ (stk_update)(1 + seed % 4), 0, STK_ACT_KEEP, STK_BF16, false, false }, STK_DEVICE_SIM,
           fraction);
    t.boost_at = t.poison_loss_at = t.poison_embed_at = 0;
    t.cfg.seed = seed;
    t.cfg.storage = STK_STORAGE_SIM;
    t.cfg.sim_disk = &sim;
    t.cfg.nvme[0] = "disk";
    t.cfg.params = t.cfg.optimizer_state = t.cfg.grads = STK_TIER_HOST;
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    if (st == STK_OK) st = world_steps(&t, 2, 1e-3);
    if (st == STK_OK) t.e->save.no_gate = no_gate;
    if (st == STK_OK) st = beside ? stk_save_begin(t.e, dir, NULL, 0) : stk_save(t.e, dir, NULL, 0);
    if (st == STK_OK) st = world_steps(&t, 4, 1e-3);
    if (st == STK_OK) st = stk_save_wait(t.e);
    if (st != STK_OK) printf("# %s\n", stk_error_text(t.e));
    *gated += t.e->save.n_gated;
    stk_close(t.e);
    io_sim_disk_free(sim.disk);
    return st;
}

TEST(twin_a_slow_checkpoint_holds_the_update_there)
{
    char a[256], b[256];
    uint64_t gated = 0, wrong = 0, ignored = 0, n = test_share(16);
    for (uint64_t seed = 0; seed < n; seed++) {
        CHECK(save_slowly(seed, 0, false, false, save_dir("a", a), &ignored) == STK_OK);
        CHECK(save_slowly(seed, seed / 4 % 2 ? 0.45 : 1, true, false, save_dir("b", b), &gated) == STK_OK);
        CHECK(save_same(a, b, 2));
        if (seed % 4) continue;
        CHECK(save_slowly(seed, 1, true, true, save_dir("b", b), &ignored) == STK_OK);
        wrong += !save_same(a, b, 2);
    }
    printf("# updates waited %" PRIu64 " times in %" PRIu64 " runs; without the gate %" PRIu64 " were wrong\n", gated, n, wrong);
    CHECK(gated > n && wrong > 0);
}

static int die(const char *dir, double fraction)
{
    struct toy t;
    set_up(&t, &(struct how){ STK_UPDATE_CHASE, 0, STK_ACT_KEEP, STK_BF16, false, false },
           STK_DEVICE_HOST_DISCRETE, fraction);
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    for (int i = 0; i < 5 && st == STK_OK; i++) {
        st = world_steps(&t, 1, 1e-3);
        if (st == STK_OK) st = i < 3 ? stk_save_wait(t.e) : STK_OK;
        if (st == STK_OK && i < 4) st = stk_save_begin(t.e, dir, NULL, 0);
    }
    raise(SIGKILL); /* with the last checkpoint under way or just over */
    return st == STK_OK ? 0 : 3;
}

TEST(twin_killed_and_resumed_with_another_fraction)
{
    uint64_t want, got, bytes;
    stk_step_stats s;
    const struct how h = { STK_UPDATE_CHASE, 0, STK_ACT_KEEP, STK_BF16, false, false };
    REQUIRE(run(&h, STK_DEVICE_HOST, 0, &want, &bytes, &s));
    world_dir(NULL);
    for (int k = 0; k < 3; k++) {
        char dir[256], *path = NULL;
        uint64_t at = 0;
        int status = 0;
        struct toy t;
        save_dir("kill", dir);
        pid_t pid = fork();
        if (pid == 0) {
            execl(self, self, "--die", dir, k == 0 ? "1" : k == 1 ? "0.3" : "0", (char *)NULL);
            _exit(127);
        }
        waitpid(pid, &status, 0);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        CHECK(stk_newest_checkpoint(dir, &path, &at) == STK_OK && at >= 3);
        set_up(&t, &h, STK_DEVICE_HOST_DISCRETE, k == 0 ? 0.3 : 1);
        RUN(&t, toy_open(&t));
        RUN(&t, stk_restore(t.e, path, false, NULL));
        stk_free(path);
        t.step = at;
        RUN(&t, world_steps(&t, 7 - (int)at, 1e-3));
        RUN(&t, toy_hash(&t, &got));
        CHECK(got == want);
        stk_close(t.e);
    }
}

/* --- what is refused, what is said --------------------------------------------------------------- */

static bool noted(const struct toy *t, const char *what)
{
    const char *line;
    for (uint32_t i = 0; stk_note(t->e, i, &line); i++)
        if (strstr(line, what)) return true;
    printf("# no note says: %s\n", what);
    return false;
}

TEST(twin_too_much_is_refused_with_the_figures)
{
    const struct how h = { STK_UPDATE_CHASE, 0, STK_ACT_RECOMPUTE, STK_BF16, false, false };
    struct toy t;
    set_up(&t, &h, STK_DEVICE_HOST_DISCRETE, 0);
    RUN(&t, toy_open(&t));
    uint64_t least = world_table(t.e, "device", NULL);
    stk_close(t.e);
    for (int dry = 0; dry < 2; dry++) {
        set_up(&t, &h, STK_DEVICE_HOST_DISCRETE, 1);
        t.cfg.device_memory = least + (128u << 10);
        RUN(&t, stk_open(&t.cfg, &t.e));
        RUN(&t, toy_describe(&t));
        CHECK(REFUSED(stk_seal(t.e, dry), STK_ERR_NOMEM, t.e, "--optimizer-on-device 1", "6 blocks", "KiB", "at most 0.",
                      "--device-memory"));
        double most = atof(strstr(stk_error_text(t.e), "at most ") + 8);
        stk_close(t.e);
        CHECK(most > 0 && most < 1);
        set_up(&t, &h, STK_DEVICE_HOST_DISCRETE, most); /* what the sentence says can be had */
        t.cfg.device_memory = least + (128u << 10);
        RUN(&t, stk_open(&t.cfg, &t.e));
        RUN(&t, toy_describe(&t));
        RUN(&t, stk_seal(t.e, dry));
        CHECK(there(&t) > 0 && noted(&t, "optimizer state on the device: "));
        stk_close(t.e);
    }
    static const double wrong[] = { 1.5, -0.5, -2, NAN };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        set_up(&t, &h, STK_DEVICE_HOST_DISCRETE, wrong[i]);
        stk_status st = stk_open(&t.cfg, &t.e);
        CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, "optimizer_on_device", "auto"));
        stk_close(t.e);
    }
}

TEST(twin_says_why_there_is_nothing)
{
    static const struct { const char *why; stk_device_kind device; stk_moments moments; stk_tier opt; double f; }
    cases[] = {
        { "computes in host memory", STK_DEVICE_HOST, 0, STK_TIER_AUTO, 0.5 },
        { "--moments", STK_DEVICE_HOST_DISCRETE, STK_MOMENTS_BF16, STK_TIER_AUTO, 0.5 },
        { "on NVMe", STK_DEVICE_HOST_DISCRETE, 0, STK_TIER_NVME, 1 },
        { "no block is that small", STK_DEVICE_HOST_DISCRETE, 0, STK_TIER_HOST, 0.01 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct toy t;
        set_up(&t, &(struct how){ STK_UPDATE_CHASE, 0, STK_ACT_KEEP, STK_BF16, false, false }, cases[i].device,
               cases[i].f);
        t.cfg.moments = cases[i].moments;
        t.cfg.optimizer_state = cases[i].opt;
        t.cfg.nvme[0] = world_dir("nvme");
        RUN(&t, toy_open(&t));
        CHECK(noted(&t, "--optimizer-on-device") && noted(&t, cases[i].why) && there(&t) == 0);
        RUN(&t, toy_fill(&t));
        RUN(&t, world_steps(&t, 2, 1e-3));
        stk_close(t.e);
    }
}

/* Auto, as on a card: what device memory leaves, less with less of it; the budget holds; the bits stay. */
TEST(twin_auto_takes_what_is_left)
{
    uint64_t want, bytes, before = UINT64_MAX, rows = 0;
    stk_step_stats s;
    const struct how h = { STK_UPDATE_CHASE, 0, STK_ACT_KEEP, STK_BF16, false, false };
    REQUIRE(run(&h, STK_DEVICE_HOST, 0, &want, &bytes, &s));
    as_a_card = true;
    for (uint64_t memory = 10u << 20; memory >= 8u << 20; memory -= 32u << 10) {
        struct toy t;
        uint64_t got = 0, on;
        set_up(&t, &h, STK_DEVICE_HOST_DISCRETE, STK_ON_DEVICE_AUTO);
        t.cfg.device_memory = memory;
        stk_status st = toy_open(&t);
        on = st == STK_OK ? there(&t) : 0;
        if (st == STK_OK) CHECK(world_table(t.e, "device", NULL) <= memory && on <= before);
        if (st == STK_OK && on != before) {
            RUN(&t, toy_fill(&t));
            RUN(&t, world_steps(&t, 7, 1e-3));
            RUN(&t, toy_hash(&t, &got));
            CHECK(got == want);
            rows++;
            before = on;
        }
        stk_close(t.e);
        if (st != STK_OK) break;
    }
    as_a_card = false;
    printf("# %" PRIu64 " different parts, the last of %" PRIu64 " bytes\n", rows, before);
    CHECK(rows >= 4 && before == 0);
}

TEST(twin_auto_for_another_machine)
{
    const char *folder = getenv("STK_MACHINES");
    char path[1024], why[512];
    stk_machine m;
    uint64_t on[2];
    if (!folder) return;
    snprintf(path, sizeof path, "%s/rtx4090.json", folder);
    REQUIRE(stk_machine_read(path, &m, why, sizeof why) == STK_OK);
    for (int host = 0; host < 2; host++) {
        struct toy t;
        set_up(&t, &(struct how){ STK_UPDATE_AUTO, 0, STK_ACT_AUTO, STK_BF16, false, false }, STK_DEVICE_HOST,
               STK_ON_DEVICE_AUTO);
        m.on_host = host;
        t.cfg.machine = &m;
        RUN(&t, stk_open(&t.cfg, &t.e));
        RUN(&t, toy_describe(&t));
        RUN(&t, stk_seal(t.e, true));
        on[host] = there(&t);
        stk_prediction p = { .size = sizeof p };
        RUN(&t, stk_predict(t.e, NULL, &p));
        CHECK(p.step_s > 0 && (host || (p.copy_out_bytes == 0 && p.exposed_s.update > 0)));
        stk_close(t.e);
    }
    CHECK(on[0] > 0 && on[1] == 0);
}

/* Auto is for a card: where the "device" is this machine, nothing is there, and a config of zeros is off. */
TEST(twin_auto_leaves_this_machine_alone)
{
    struct toy t;
    stk_config c;
    stk_config_init(&c, sizeof c);
    CHECK(c.optimizer_on_device == STK_ON_DEVICE_AUTO);
    set_up(&t, &(struct how){ STK_UPDATE_CHASE, 0, STK_ACT_KEEP, STK_BF16, false, false }, STK_DEVICE_HOST_DISCRETE,
           STK_ON_DEVICE_AUTO);
    RUN(&t, toy_open(&t));
    CHECK(there(&t) == 0);
    stk_close(t.e);
}

int main(int argc, char **argv)
{
    self = argv[0][0] == '/' ? argv[0] : "/proc/self/exe";
    if (argc == 4 && !strcmp(argv[1], "--die")) return die(argv[2], atof(argv[3]));
    return test_run_all(argc, argv);
}
