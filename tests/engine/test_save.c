/* tests/engine/test_save.c - checkpoints under way: the same bytes as a stk_save of that step, on
 * every placement and whatever happens between the steps; nothing changed in what is trained; drives
 * slower than a step; errors; close.
 *
 * st_writer_add is given to this file by the linker (--wrap), so that the checkpoint's drive can be
 * slow. `test_save --die DIR US` is a child that dies inside a checkpoint. */
#include "engine/save.h"
#include "formats/safetensors.h"
#include "nvme/io_sim.h"
#include "tests/engine/durable_world.h"
#include "tests/engine/save_world.h"
#include <stdatomic.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>

static const char *self;
static _Atomic long slow_ns; /* of each write */

stk_status __real_st_writer_add(struct st_writer *w, uint32_t index, uint64_t offset_bytes,
                                  const void *buf, uint64_t size_bytes, struct stk_error *err);
stk_status __wrap_st_writer_add(struct st_writer *w, uint32_t index, uint64_t offset_bytes,
                                  const void *buf, uint64_t size_bytes, struct stk_error *err);
stk_status __wrap_st_writer_add(struct st_writer *w, uint32_t index, uint64_t offset_bytes,
                                  const void *buf, uint64_t size_bytes, struct stk_error *err)
{
    long ns = atomic_load(&slow_ns);
    if (ns) nanosleep(&(struct timespec){ .tv_nsec = ns }, NULL);
    return __real_st_writer_add(w, index, offset_bytes, buf, size_bytes, err);
}

/* --- the same bytes --------------------------------------------------------------------------- */

struct look {
    enum world_place place;
    stk_update update;
    stk_dtype dtype;
    bool freeze, tied;
    double skip;      /* the step that is skipped */
    int at, steps;    /* checkpoint after step `at` */
    uint64_t file_bytes;
    void (*between)(struct toy *t);
};

static void look_toy(struct toy *t, const struct look *k)
{
    toy_init(t, 3, 2);
    t->freeze_first = k->freeze;
    t->tied = k->tied;
    t->poison_loss_at = k->skip;
    t->cfg.update = k->update;
    t->cfg.dtype = k->dtype;
}

/* The reference: a stk_save, and the end of the run. */
static bool reference(const struct look *k, const char *dir, uint64_t *hash)
{
    struct toy t;
    look_toy(&t, k);
    stk_status st = world_start(&t, k->place);
    if (st == STK_OK) t.e->save.file_bytes_max = k->file_bytes;
    for (int i = 0; st == STK_OK && i <= k->steps; i++) {
        if (i > 0) st = toy_step(&t, 1e-3, NULL);
        if (st == STK_OK && i == k->at) st = stk_save(t.e, dir, "{\"at\":1}", 0);
    }
    if (st == STK_OK) st = toy_hash(&t, hash);
    if (st != STK_OK) printf("# reference: %s\n", stk_error_text(t.e));
    stk_close(t.e);
    return st == STK_OK;
}

static void same_as_saved(const struct look *k)
{
    char a[256], b[256];
    uint64_t want = 0, got = 1, step, took, held;
    struct toy t;
    REQUIRE(reference(k, save_dir("a", a), &want));
    save_dir("b", b);
    look_toy(&t, k);
    RUN(&t, world_start(&t, k->place));
    t.e->save.file_bytes_max = k->file_bytes;
    for (int i = 0; i <= k->steps; i++) {
        if (i > 0) RUN(&t, toy_step(&t, 1e-3, NULL));
        if (i != k->at) continue;
        CHECK(!stk_saved(t.e, &step, &took, &held));
        RUN(&t, stk_save_begin(t.e, b, "{\"at\":1}", 0));
        if (k->between) k->between(&t);
    }
    RUN(&t, stk_save_wait(t.e));
    RUN(&t, toy_hash(&t, &got));
    CHECK(got == want);
    if (k->at) CHECK(stk_saved(t.e, &step, &took, &held) && step == (uint64_t)k->at);
    stk_close(t.e);
    CHECK(save_same(a, b, (uint64_t)k->at));
    CHECK(save_count(b, true) == 0);
}

TEST(save_under_way_equals_a_save_on_every_placement)
{
    for (int p = 0; p < WORLD_PLACE_N; p++)
        for (int u = STK_UPDATE_SERIAL; u <= STK_UPDATE_CHASE; u++)
            for (int w = 0; w < 3; w++)
                same_as_saved(&(struct look){ .place = (enum world_place)p,
                                              .update = (stk_update)u,
                                              .freeze = w == 1,
                                              .tied = w == 2,
                                              .at = 2,
                                              .steps = 4 });
}
TEST(save_under_way_fp16)
{
    for (int p = 0; p < WORLD_PLACE_N; p++)
        same_as_saved(&(struct look){
            .place = (enum world_place)p, .dtype = STK_FP16, .freeze = p == 1, .at = 2, .steps = 4 });
}
TEST(save_under_way_when_no_update_is_due)
{
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        same_as_saved(
            &(struct look){ .place = (enum world_place)p, .skip = 2, .at = 2, .steps = 4 });
        same_as_saved(&(struct look){ .place = (enum world_place)p, .at = 0, .steps = 2 });
    }
}
TEST(save_under_way_of_the_last_step)
{
    same_as_saved(&(struct look){ .place = WORLD_NVME, .at = 3, .steps = 3 });
}
TEST(save_under_way_in_several_files)
{
    for (int p = 0; p < WORLD_PLACE_N; p++)
        same_as_saved(&(struct look){ .place = (enum world_place)p,
                                      .freeze = p == 0,
                                      .at = 1,
                                      .steps = 3,
                                      .file_bytes = 100000 });
}

/* --- between the steps ------------------------------------------------------------------------ */

static void evaluate(struct toy *t)
{
    stk_visit v;
    struct stk_error err = { 0 };
    uint64_t step = t->step;
    RUN(t, stk_eval_begin(t->e));
    CHECK(toy_inputs(t, 77, &err) == STK_OK);
    while (stk_next(t->e, &v) == STK_OK) {
        CHECK(toy_visit(t, &v, &err) == STK_OK);
        CHECK(stk_done(t->e, &v) == STK_OK);
    }
    RUN(t, stk_eval_end(t->e));
    t->step = step;
}

static void read_all(struct toy *t)
{
    uint64_t h;
    RUN(t, toy_hash(t, &h));
}

static void flush(struct toy *t) { RUN(t, stk_flush(t->e)); }

static void same_values_written(struct toy *t)
{
    float *v = world_read(t, t->tensor_w[0], STK_READ_MASTER);
    REQUIRE(v != NULL);
    CHECK(atomic_load(&t->e->save.under_way));
    /* moments become zero: a write, and both runs do it */
    RUN(t, stk_tensor_write(t->e, t->tensor_w[0], 0, 1, v, STK_F32));
    CHECK(!atomic_load(&t->e->save.under_way)); /* it has waited */
    free(v);
}

TEST(save_under_way_and_evaluation_reads_flush)
{
    static void (*const calls[])(struct toy *) = { evaluate, read_all, flush };
    for (int p = 0; p < WORLD_PLACE_N; p++)
        for (size_t c = 0; c < sizeof calls / sizeof *calls; c++)
            same_as_saved(&(struct look){ .place = (enum world_place)p,
                                          .at = 2,
                                          .steps = 4,
                                          .freeze = c == 1,
                                          .between = calls[c] });
}

TEST(save_under_way_a_write_waits_for_it)
{
    char a[256], b[256];
    uint64_t ignored;
    struct look k = { .place = WORLD_MIXED, .at = 2, .steps = 2 };
    struct toy t;
    REQUIRE(reference(&k, save_dir("a", a), &ignored));
    look_toy(&t, &k);
    RUN(&t, world_start(&t, k.place));
    RUN(&t, world_steps(&t, 2, 1e-3));
    atomic_store(&slow_ns, 200000);
    RUN(&t, stk_save_begin(t.e, save_dir("b", b), "{\"at\":1}", 0));
    same_values_written(&t);
    atomic_store(&slow_ns, 0);
    CHECK(save_same(a, b, 2));
    stk_close(t.e);
}

TEST(save_under_way_a_second_one_and_a_save_wait)
{
    char a[256], b[256];
    struct toy t;
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        toy_init(&t, 3, 2);
        RUN(&t, world_start(&t, (enum world_place)p));
        save_dir("a", a);
        save_dir("b", b);
        RUN(&t, world_steps(&t, 1, 1e-3));
        RUN(&t, stk_save_begin(t.e, a, NULL, 0));
        RUN(&t, stk_save_begin(t.e, b, NULL, 0)); /* the same step again, elsewhere */
        RUN(&t, world_steps(&t, 1, 1e-3));
        RUN(&t, stk_save_begin(t.e, a, NULL, 0));
        RUN(&t, stk_save(t.e, b, NULL, 0));
        CHECK(save_same(a, b, 1) && save_same(a, b, 2));
        for (int i = 3; i < 7; i++) {
            RUN(&t, world_steps(&t, 1, 1e-3));
            RUN(&t, stk_save_begin(t.e, a, NULL, 2));
        }
        RUN(&t, stk_save_wait(t.e));
        CHECK(save_count(a, false) == 2 && save_count(a, true) == 0);
        stk_close(t.e);
    }
}

TEST(save_under_way_beside_durable_steps)
{
    char a[256], b[256];
    uint64_t hash[2] = { 0, 1 };
    for (int r = 0; r < 2; r++) {
        struct toy t;
        toy_init(&t, 2, 2);
        durable_config(&t.cfg, world_dir(r ? "durable-1" : "durable-0"), false);
        RUN(&t, toy_open(&t));
        RUN(&t, toy_fill(&t));
        for (int i = 1; i <= 5; i++) {
            RUN(&t, toy_step(&t, 1e-3, NULL));
            if (i % 2 == 0 && !r) RUN(&t, stk_save(t.e, i == 2 ? save_dir("a", a) : a, NULL, 0));
            if (i % 2 == 0 && r)
                RUN(&t, stk_save_begin(t.e, i == 2 ? save_dir("b", b) : b, NULL, 0));
            RUN(&t, stk_durable(t.e, NULL));
        }
        RUN(&t, stk_save_wait(t.e));
        RUN(&t, stk_durable_wait(t.e));
        RUN(&t, toy_hash(&t, &hash[r]));
        stk_discard_durable(t.e);
        stk_close(t.e);
    }
    CHECK(hash[0] == hash[1]);
    CHECK(save_same(a, b, 2) && save_same(a, b, 4));
}

TEST(save_under_way_own_order)
{
    char a[256], b[256];
    for (int p = 0; p < 2; p++) {
        uint64_t hash[2] = { 0, 1 };
        for (int r = 0; r < 2; r++) {
            struct mlp m;
            mlp_init(&m, p ? WORLD_NVME : WORLD_HOST);
            m.skip_layer = true;
            RUN(&m, mlp_open(&m));
            save_dir(r ? "b" : "a", r ? b : a);
            atomic_store(&slow_ns, r ? 100000 : 0);
            for (int i = 1; i <= 6; i++) {
                RUN(&m, mlp_step(&m, NULL));
                if (i > 4) continue;
                RUN(&m, r ? stk_save_begin(m.e, b, NULL, 0) : stk_save(m.e, a, NULL, 0));
            }
            RUN(&m, stk_save_wait(m.e));
            atomic_store(&slow_ns, 0);
            RUN(&m, mlp_hash(&m, &hash[r]));
            stk_close(m.e);
        }
        CHECK(hash[0] == hash[1]);
        for (uint64_t s = 1; s <= 4; s++) CHECK(save_same(a, b, s));
    }
}

/* --- a drive slower than a step --------------------------------------------------------------- */

TEST(save_slower_than_a_step_holds_the_update_and_keeps_the_bits)
{
    char a[256], b[256];
    for (int p = 0; p < WORLD_PLACE_N; p++)
        for (int u = STK_UPDATE_SERIAL; u <= STK_UPDATE_CHASE; u++) {
            struct look k = { .place = (enum world_place)p, .update = (stk_update)u, .at = 2,
                              .steps = 5 };
            uint64_t want = 0, got = 1, held = 0, step, took, all;
            struct toy t;
            REQUIRE(reference(&k, save_dir("a", a), &want));
            look_toy(&t, &k);
            RUN(&t, world_start(&t, k.place));
            RUN(&t, world_steps(&t, 2, 1e-3));
            atomic_store(&slow_ns, 400000);
            RUN(&t, stk_save_begin(t.e, save_dir("b", b), "{\"at\":1}", 0));
            for (int i = 0; i < 3; i++) {
                stk_step_stats s;
                RUN(&t, toy_step(&t, 1e-3, &s));
                held += s.save_wait_ns;
            }
            RUN(&t, stk_save_wait(t.e));
            atomic_store(&slow_ns, 0);
            CHECK(t.e->save.n_gated > 0 && held > 0);
            CHECK(stk_saved(t.e, &step, &took, &all) && all == held && took > held);
            RUN(&t, toy_hash(&t, &got));
            CHECK(got == want);
            stk_close(t.e);
            CHECK(save_same(a, b, 2));
        }
}

/* The canary: without the gate the checkpoint must come out wrong. */
TEST(save_canary_without_the_gate_the_checkpoint_is_wrong)
{
    char a[256], b[256];
    struct look k = { .place = WORLD_HOST, .at = 2, .steps = 5 };
    uint64_t want = 0;
    struct toy t;
    REQUIRE(reference(&k, save_dir("a", a), &want));
    look_toy(&t, &k);
    t.cfg.simulate = true; /* one thread: nothing is read while it is written */
    RUN(&t, world_start(&t, k.place));
    RUN(&t, world_steps(&t, 2, 1e-3));
    t.e->save.no_gate = true;
    RUN(&t, stk_save_begin(t.e, save_dir("b", b), "{\"at\":1}", 0));
    RUN(&t, world_steps(&t, 3, 1e-3));
    RUN(&t, stk_save_wait(t.e));
    stk_close(t.e);
    CHECK(!save_same(a, b, 2));
}

/* INV-S1 for every kind and part, also those that this build's plans do not have. */
TEST(save_gate_keeps_every_node_that_changes_the_chunk)
{
    static const uint8_t kinds[] = { PLAN_UPDATE, PLAN_COMMIT, PLAN_UNDO, PLAN_DEVICE_UPDATE };
    char dir[256];
    struct toy t;
    toy_init(&t, 1, 1);
    t.cfg.simulate = true; /* nothing moves until somebody waits */
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 1, 1e-3));
    RUN(&t, stk_flush(t.e));
    RUN(&t, stk_save_begin(t.e, save_dir("g", dir), NULL, 0));
    t.e->save.active = true;
    for (int part = PLAN_RUN_UPDATE; part <= PLAN_RUN_VISITS; part++)
        for (size_t i = 0; i < sizeof kinds; i++) {
            struct plan_node n = { .kind = kinds[i], .part = (uint8_t)part, .chunk = 1 };
            CHECK(save_gates(t.e, &n));
        }
    struct plan_node other = { .kind = PLAN_GRAD_CAST, .part = PLAN_RUN_VISITS, .chunk = 1 },
                     join = { .kind = PLAN_JOIN, .chunk = PLAN_NO };
    CHECK(!save_gates(t.e, &other) && !save_gates(t.e, &join));
    t.e->save.gated = PLAN_NO;
    t.e->save.active = false;
    RUN(&t, stk_save_wait(t.e));
    CHECK(save_count(dir, false) == 1);
    stk_close(t.e);
}

TEST(save_under_way_simulated_with_a_slow_disk)
{
    char a[256], b[256];
    /* 24 seeds: each variant once */
    uint64_t gated = 0, n = test_brief() ? 24 : 60;
    for (uint64_t seed = 0; seed < n; seed++) {
        struct toy t;
        struct stk_error err = { 0 };
        uint64_t hash[2] = { 0, 1 };
        for (int r = 0; r < 2; r++) {
            struct io_sim_cfg sim = { .seed = seed,
                                      .latency_ns = 20000,
                                      .read_bytes_per_s = 1e9,
                                      .write_bytes_per_s = seed % 2 ? 2e7 : 1e9 };
            REQUIRE(io_sim_disk_new(64u << 20, &sim.disk, &err) == STK_OK);
            toy_init(&t, 2, 2);
            t.rows = 2;
            t.cfg.poison = false;
            t.cfg.simulate = true;
            t.cfg.seed = test_seed() + seed;
            t.cfg.storage = STK_STORAGE_SIM;
            t.cfg.sim_disk = &sim;
            t.cfg.nvme[0] = "disk";
            t.cfg.update = (stk_update)(1 + seed / 2 % 2);
            t.cfg.device = (stk_device_kind)(seed / 4 % 3);
            t.cfg.optimizer_state = t.cfg.grads = STK_TIER_NVME;
            t.cfg.params = seed / 12 % 2 ? STK_TIER_NVME : STK_TIER_HOST;
            RUN(&t, toy_open(&t));
            RUN(&t, toy_fill(&t));
            RUN(&t, world_steps(&t, 2, 1e-3));
            if (r) RUN(&t, stk_save_begin(t.e, save_dir("b", b), NULL, 0));
            else RUN(&t, stk_save(t.e, save_dir("a", a), NULL, 0));
            RUN(&t, world_steps(&t, 3, 1e-3));
            RUN(&t, stk_save_wait(t.e));
            RUN(&t, toy_hash(&t, &hash[r]));
            gated += t.e->save.n_gated;
            stk_close(t.e);
            io_sim_disk_free(sim.disk);
        }
        CHECK(hash[0] == hash[1] && save_same(a, b, 2));
    }
    printf("# updates waited %" PRIu64 " times in %" PRIu64 " runs\n", gated, n);
    CHECK(gated > n / 2);
}

/* --- errors ----------------------------------------------------------------------------------- */

/* Begins, makes a step, waits: every failure is said once, by one of the calls. */
static stk_status try_save(struct toy *t, const char *dir, uint32_t *said, bool *begun)
{
    stk_step_stats s = { 0 };
    stk_status first = stk_save_begin(t->e, dir, NULL, 0), st;
    *begun = first == STK_OK;
    *said = first != STK_OK;
    st = toy_step(t, 1e-3, &s);
    if (st != STK_OK && s.step == 0) return st; /* the step itself */
    *said += st != STK_OK;
    first = first ? first : st;
    st = stk_save_wait(t->e);
    *said += st != STK_OK;
    return first ? first : st;
}

TEST(ckp_16_save_under_way_every_call_that_fails_leaves_the_previous)
{
    static const struct { enum sys_call call; int os_errno;
    } kinds[] = {
        { SYS_WRITE, ENOSPC }, { SYS_WRITE, EFBIG },  { SYS_FSYNC, EIO },
        { SYS_RENAME, EIO },   { SYS_OPEN, ENOSPC },  { SYS_ALLOCATE, ENOSPC },
        { SYS_ALLOC, ENOMEM },
    };
    char dir[256], other[256];
    struct toy t;
    uint32_t points = 0, late = 0;
    toy_init(&t, 1, 2);
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 2, 1e-3));
    RUN(&t, stk_save(t.e, save_dir("e", dir), NULL, 0));
    for (size_t c = 0; c < sizeof kinds / sizeof *kinds; c++)
        for (uint64_t k = 1;; k += k > 8 ? k / 4 : 1) {
            uint32_t said;
            bool begun;
            uint64_t at = 0;
            char *path = NULL;
            sys_fault_arm(kinds[c].call, k, UINT64_MAX, kinds[c].os_errno);
            stk_status st = try_save(&t, dir, &said, &begun);
            bool hit = sys_fault_seen(kinds[c].call) >= k;
            sys_fault_arm(kinds[c].call, 0, 0, 0);
            REQUIRE(t.e->state == ENG_READY);
            CHECK(said == (st != STK_OK));
            CHECK(stk_newest_checkpoint(dir, &path, &at) == STK_OK && at >= 2);
            stk_free(path);
            if (!hit) {
                CHECK(st == STK_OK);
                break;
            }
            points++;
            late += begun && said;
            CHECK(st == STK_OK || st == STK_ERR_IO || st == STK_ERR_NOSPACE || st == STK_ERR_NOMEM);
            if (begun && kinds[c].call == SYS_WRITE && kinds[c].os_errno == ENOSPC)
                CHECK(st == STK_ERR_NOSPACE);
        }
    printf("# %u points of failure, %u of them while it was under way\n", points, late);
    CHECK(points > 20 && late > 10);
    RUN(&t, stk_save_begin(t.e, dir, NULL, 1));
    RUN(&t, stk_save_wait(t.e));
    RUN(&t, stk_save(t.e, save_dir("f", other), NULL, 1));
    CHECK(save_same(other, dir, t.step) && save_count(dir, true) == 0);
    stk_close(t.e);
}

TEST(save_begin_refusals)
{
    char dir[256];
    struct toy t;
    toy_init(&t, 1, 1);
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 1, 1e-3));
    save_dir("r", dir);
    CHECK(REFUSED(stk_save_begin(t.e, dir, "{not", 0), STK_ERR_CONFIG, t.e, "client_json"));
    CHECK(REFUSED(stk_save_begin(t.e, "/proc/stoker", NULL, 0), STK_ERR_IO, t.e, "/proc/stoker"));
    RUN(&t, stk_save_wait(t.e)); /* nothing to wait for */
    stk_step s = { 1e-3 };
    RUN(&t, stk_step_begin(t.e, &s));
    CHECK(REFUSED(stk_save_begin(t.e, dir, NULL, 0), STK_ERR_STATE, t.e, "between steps"));
    CHECK(REFUSED(stk_save_wait(t.e), STK_ERR_STATE, t.e, "between steps"));
    stk_close(t.e);
}

/* State on NVMe that is damaged when it is read back: the checkpoint fails and says so. */
TEST(save_under_way_reads_back_damage)
{
    char dir[256];
    struct toy t;
    struct stk_error err = { 0 };
    struct io_sim_cfg sim = { .seed = 1, .read_bytes_per_s = 1e9, .write_bytes_per_s = 1e9 };
    REQUIRE(io_sim_disk_new(64u << 20, &sim.disk, &err) == STK_OK);
    toy_init(&t, 2, 2);
    t.cfg.simulate = true;
    t.cfg.storage = STK_STORAGE_SIM;
    t.cfg.sim_disk = &sim;
    t.cfg.nvme[0] = "disk";
    t.cfg.optimizer_state = t.cfg.grads = t.cfg.params = STK_TIER_NVME;
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    RUN(&t, world_steps(&t, 1, 1e-3));
    RUN(&t, stk_flush(t.e));
    const char *file;
    uint64_t at;
    REQUIRE(store_locate(t.e->store, t.e->layout->chunks[0].extent[CHUNK_OPT], &file, &at) ==
            STK_OK);
    CHECK(io_sim_flip(sim.disk, file, at + 100, 3));
    RUN(&t, stk_save_begin(t.e, save_dir("d", dir), NULL, 0));
    CHECK(REFUSED(stk_save_wait(t.e), STK_ERR_IO, t.e, "chunk 0", "checksum", "step 1"));
    RUN(&t, stk_save_wait(t.e)); /* said once */
    CHECK(save_count(dir, false) == 0 && save_count(dir, true) == 0);
    stk_close(t.e);
    io_sim_disk_free(sim.disk);
}

/* A step fails after the checkpoint's own step is whole: it is completed all the same. */
TEST(save_wait_after_a_failed_step)
{
    char a[256], b[256];
    for (int whole = 0; whole < 2; whole++) {
        struct toy t;
        struct stk_error err = { 0 };
        stk_step s = { 1e-3 };
        toy_init(&t, 2, 2);
        RUN(&t, world_start(&t, WORLD_HOST));
        RUN(&t, world_steps(&t, 2, 1e-3));
        RUN(&t, stk_save(t.e, save_dir("a", a), NULL, 0));
        RUN(&t, world_steps(&t, whole ? 0 : 1, 1e-3));
        RUN(&t, stk_save_begin(t.e, save_dir("b", b), NULL, 0));
        RUN(&t, stk_step_begin(t.e, &s));
        stk_error_set(&err, STK_ERR_DEVICE, 0, "a test");
        if (whole) RUN(&t, run_wait(t.e, &t.e->update_event));
        t.e->fail = err; /* as run_fail does on the lane */
        t.e->state = ENG_FAILED;
        stk_status st = stk_save_wait(t.e);
        if (whole) CHECK(st == STK_OK && save_same(a, b, 2));
        else CHECK(st == STK_OK || st == STK_ERR_IO);
        CHECK(save_count(b, true) == 0);
        stk_close(t.e);
    }
}

/* --- the end ---------------------------------------------------------------------------------- */

TEST(save_close_gives_up_and_leaves_no_folder)
{
    for (int p = 0; p < WORLD_PLACE_N; p++)
        for (int k = 0; k < 3; k++) {
            char dir[256];
            struct toy t;
            toy_init(&t, 3, 2);
            RUN(&t, world_start(&t, (enum world_place)p));
            RUN(&t, world_steps(&t, 1, 1e-3));
            RUN(&t, stk_save(t.e, save_dir("c", dir), NULL, 0));
            RUN(&t, world_steps(&t, 1, 1e-3));
            atomic_store(&slow_ns, 300000);
            RUN(&t, stk_save_begin(t.e, dir, NULL, 0));
            if (k == 1) RUN(&t, world_steps(&t, 1, 1e-3));
            stk_step s = { 1e-3 };
            stk_visit v;
            if (k == 2) RUN(&t, stk_step_begin(t.e, &s));
            if (k == 2) RUN(&t, stk_next(t.e, &v)); /* left in the middle of a step */
            stk_close(t.e);
            atomic_store(&slow_ns, 0);
            CHECK(save_count(dir, true) == 0);
            CHECK(save_count(dir, false) >= 1);
        }
}

static int die_in_save(const char *dir, long us)
{
    struct toy t;
    toy_init(&t, 3, 2);
    if (world_start(&t, WORLD_NVME) != STK_OK || world_steps(&t, 2, 1e-3) != STK_OK) return 3;
    uint64_t at;
    char *path = NULL;
    if (stk_newest_checkpoint(dir, &path, &at) != STK_OK && stk_save(t.e, dir, NULL, 0) != STK_OK)
        return 3;
    stk_free(path);
    if (world_steps(&t, 1, 1e-3) != STK_OK) return 3;
    atomic_store(&slow_ns, 100000);
    struct itimerval tv = { .it_value = { us / 1000000, us % 1000000 } };
    setitimer(ITIMER_REAL, &tv, NULL); /* SIGALRM's default: the process ends there */
    stk_status st = stk_save_begin(t.e, dir, NULL, 0);
    if (st == STK_OK) st = world_steps(&t, 2, 1e-3);
    if (st == STK_OK) st = stk_save_wait(t.e);
    setitimer(ITIMER_REAL, &(struct itimerval){ 0 }, NULL);
    stk_close(t.e);
    return st == STK_OK ? 0 : 3;
}

TEST(ckp_16_killed_under_way_the_previous_loads_and_the_next_cleans_up)
{
    char dir[256], arg[32];
    int killed = 0;
    world_dir(NULL);
    save_dir("kill", dir);
    for (int i = 0; i < 8; i++) {
        snprintf(arg, sizeof arg, "%d", 300 + 2500 * i);
        pid_t pid = fork();
        if (pid == 0) {
            setenv("TMPDIR", world_path, 1);
            execl(self, self, "--die", dir, arg, (char *)NULL);
            _exit(127);
        }
        int status = 0;
        waitpid(pid, &status, 0);
        killed += WIFSIGNALED(status);
        CHECK(WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
        uint64_t at = 0;
        char *path = NULL;
        struct toy t;
        CHECK(stk_newest_checkpoint(dir, &path, &at) == STK_OK && (at == 2 || at == 3));
        toy_init(&t, 3, 2);
        world_place(&t, WORLD_HOST);
        RUN(&t, toy_open(&t));
        RUN(&t, stk_restore(t.e, path, false, NULL));
        stk_free(path);
        t.step = at;
        RUN(&t, world_steps(&t, 1, 1e-3));
        RUN(&t, stk_save_begin(t.e, dir, NULL, 0));
        RUN(&t, stk_save_wait(t.e));
        CHECK(save_count(dir, true) == 0);
        stk_close(t.e);
        save_dir("kill", dir);
    }
    printf("# %d of 8 killed while it was under way\n", killed);
    CHECK(killed > 0);
}

int main(int argc, char **argv)
{
    self = argv[0][0] == '/' ? argv[0] : "/proc/self/exe";
    if (argc == 4 && !strcmp(argv[1], "--die")) return die_in_save(argv[2], atol(argv[3]));
    return test_run_all(argc, argv);
}
