/* tests/engine/test_durable.c - durable steps: asked for, made under the next step, found after a
 * death, taken over; on real folders with threads and on the simulated disk.
 *
 * A dead process is an engine that was closed in the middle: its folder stays because a table was
 * committed. Real deaths are in tests/trainer/test_durable.py, power cuts in test_durable_cut.c. */
#include "tests/engine/durable_world.h"
#include "base/sys.h"
#include <dirent.h>
#include <errno.h>
#include <ftw.h>

enum { STEPS = 6 };

struct place {
    const char *folder;         /* NULL: simulated */
    struct io_sim_cfg sim;
};

static struct io_sim_cfg sim_new(uint64_t seed)
{
    struct io_sim_cfg sim = {
        .seed = seed, .latency_ns = 20000, .read_bytes_per_s = 1e9, .write_bytes_per_s = 5e8
    };
    struct stk_error err = { 0 };
    if (io_sim_disk_new(256u << 20, &sim.disk, &err) != STK_OK) abort();
    return sim;
}

static void place_new(struct place *p, bool simulated, const char *name)
{
    *p = (struct place){ .folder = simulated ? NULL : world_dir(name) };
    if (simulated) p->sim = sim_new(test_seed());
}

static void place_free(struct place *p) { io_sim_disk_free(p->sim.disk); }

static void place_config(struct toy *t, const struct place *p, bool adopt)
{
    durable_config(&t->cfg, p->folder, adopt);
    if (p->folder) {
        t->cfg.storage = STK_STORAGE_POSIX;
        return;
    }
    t->cfg.nvme[0] = "disk";
    t->cfg.simulate = true;
    t->cfg.seed = test_seed();
    t->cfg.storage = STK_STORAGE_SIM;
    t->cfg.sim_disk = &p->sim;
}

static stk_status begin(struct toy *t, const struct variant *v, const struct place *p)
{
    variant_toy(t, v);
    place_config(t, p, false);
    STK_TRY(toy_open(t));
    return toy_fill(t);
}

/* Takes over; *client (may be NULL) is the step's own object. */
static stk_status take_over(struct toy *t, const struct variant *v, const struct place *p,
                            char **client)
{
    variant_toy(t, v);
    place_config(t, p, true);
    STK_TRY(toy_open(t));
    STK_TRY(stk_resume_durable(t->e, false, client));
    t->step = t->e->begun;
    return STK_OK;
}

/* The step that is on the drives; UINT64_MAX: none, or an error (printed). */
static uint64_t found(const struct place *p, char **client)
{
    const char *const paths[] = { p->folder ? p->folder : "disk" };
    uint64_t step = UINT64_MAX;
    char *where = NULL;
    if (p->folder) {
        stk_status st = stk_find_durable(paths, 1, RUN_ID, &step, client, &where);
        if (st != STK_OK && st != STK_END) printf("# %s\n", where ? where : "?");
        if (st == STK_OK) CHECK(where && strstr(where, RUN_ID) && strstr(where, p->folder));
        stk_free(where);
        return st == STK_OK ? step : UINT64_MAX;
    }
    struct store_found *f;
    struct stk_error err = { 0 };
    stk_status st = store_find(paths, 1, RUN_ID, p->sim.disk, &f, &err);
    if (st != STK_OK && st != STK_END) printf("# %s\n", err.text);
    if (st == STK_OK) step = f->step;
    store_found_free(f);
    return st == STK_OK ? step : UINT64_MAX;
}

static bool is_empty(const char *folder)
{
    DIR *d = opendir(folder);
    bool empty = d != NULL;
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;)
        if (e->d_name[0] != '.') empty = false;
    if (d) closedir(d);
    return empty;
}

/* Hashes after steps 0 to STEPS of a run in host memory that nothing interrupts. */
static bool reference(const struct variant *v, uint64_t hash[STEPS + 1])
{
    struct toy t;
    variant_toy(&t, v);
    t.cfg.params = t.cfg.optimizer_state = t.cfg.grads = STK_TIER_HOST;
    t.cfg.device = STK_DEVICE_HOST;
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    if (st == STK_OK) st = toy_hash(&t, &hash[0]);
    for (int i = 1; st == STK_OK && i <= STEPS; i++) {
        st = toy_step(&t, 1e-3, NULL);
        if (st == STK_OK) st = toy_hash(&t, &hash[i]);
    }
    if (st != STK_OK) printf("# reference: %s\n", t.e ? stk_error_text(t.e) : "?");
    stk_close(t.e);
    return st == STK_OK;
}

/* --- every step of every kind of run ---------------------------------------------------------- */

/* Dies after `last` steps, durable steps every `every`; goes on and ends as if nothing had
 * happened. */
static void die_and_go_on(const struct variant *v, bool simulated, uint64_t last, uint64_t every,
                          bool wait, const uint64_t *want)
{
    struct place p;
    struct toy t, u;
    uint64_t hash = 0, at = 0;
    stk_step_stats s;
    place_new(&p, simulated, "every");
    RUN(&t, begin(&t, v, &p));
    for (uint64_t i = 1; i <= last; i++) {
        char client[32];
        RUN(&t, toy_step(&t, 1e-3, &s));
        CHECK(s.step == i && s.durable_step < i);
        snprintf(client, sizeof client, "{\"at\":%" PRIu64 "}", i);
        if (i % every == 0) {
            RUN(&t, stk_durable(t.e, client));
            at = i;
        }
    }
    if (wait) RUN(&t, stk_durable_wait(t.e));
    else if (at == last && v->skip != (int)last) at -= every; /* its update never ran */
    stk_close(t.e);
    char *client = NULL, object[32];
    CHECK(found(&p, NULL) == (at ? at : UINT64_MAX));
    if (at) {
        RUN(&u, take_over(&u, v, &p, &client));
        snprintf(object, sizeof object, "{\"at\":%" PRIu64 "}", at);
        CHECK(u.step == at && client && !strcmp(client, object));
        RUN(&u, toy_hash(&u, &hash));
        CHECK(hash == want[at]);
        for (uint64_t i = at + 1; i <= STEPS; i++) {
            RUN(&u, toy_step(&u, 1e-3, &s));
            CHECK(s.step == i && s.durable_step >= at);
            if (i % every == 0) RUN(&u, stk_durable(u.e, NULL));
        }
        RUN(&u, stk_durable_wait(u.e));
        RUN(&u, toy_hash(&u, &hash));
        CHECK(hash == want[STEPS]);
        stk_discard_durable(u.e);
        stk_close(u.e);
        stk_free(client);
    }
    CHECK(found(&p, NULL) == UINT64_MAX);
    if (!simulated) CHECK(is_empty(p.folder));
    place_free(&p);
}

/* Real flushes take their time: on a real folder two moments, on the simulated disk all. */
static void every_kind(struct variant v, bool real)
{
    uint64_t want[STEPS + 1];
    if (v.device != STK_DEVICE_HOST && v.dtype == STK_FP16) v.device = STK_DEVICE_HOST;
    REQUIRE(reference(&v, want));
    for (int simulated = !real; simulated < 2; simulated++)
        for (int update = 0; update < 2; update++) {
            v.update = update ? STK_UPDATE_CHASE : STK_UPDATE_SERIAL;
            for (uint64_t last = simulated ? 1 : 2; last < STEPS; last += simulated ? 1 : 3) {
                die_and_go_on(&v, simulated, last, 1, true, want);
                die_and_go_on(&v, simulated, last, 2, last % 2, want);
            }
        }
}

TEST(durable_resume_is_bit_equal_after_every_step) { every_kind((struct variant){ 0 }, true); }
TEST(durable_on_a_device_of_its_own)
{
    every_kind((struct variant){ .device = STK_DEVICE_HOST_DISCRETE }, false);
}
TEST(durable_skipped_step) { every_kind((struct variant){ .skip = 3 }, false); }
TEST(durable_first_step_skipped) { every_kind((struct variant){ .skip = 1 }, false); }
TEST(durable_fp16_with_its_loss_scale)
{
    every_kind((struct variant){ .dtype = STK_FP16, .skip = 2 }, true);
}
TEST(durable_tied_blocks) { every_kind((struct variant){ .tied = true }, false); }
TEST(durable_frozen_tensors) { every_kind((struct variant){ .freeze = true }, false); }

/* --- own order -------------------------------------------------------------------------------- */

TEST(durable_own_order)
{
    uint64_t want[STEPS + 1], got;
    struct mlp m;
    mlp_init(&m, WORLD_HOST);
    m.skip_layer = true;
    RUN(&m, mlp_open(&m));
    for (int i = 1; i <= STEPS; i++) {
        RUN(&m, mlp_step(&m, NULL));
        RUN(&m, mlp_hash(&m, &want[i]));
    }
    stk_close(m.e);
    for (uint64_t last = 1; last < STEPS; last++) {
        const char *folder = world_dir("own-durable");
        stk_step_stats s;
        mlp_init(&m, WORLD_NVME);
        m.skip_layer = true; /* a layer without gradients: its tensors are left alone */
        durable_config(&m.cfg, folder, false);
        RUN(&m, mlp_open(&m));
        for (uint64_t i = 1; i <= last; i++) {
            RUN(&m, mlp_step(&m, &s));
            RUN(&m, stk_durable(m.e, NULL));
        }
        RUN(&m, stk_durable_wait(m.e));
        stk_close(m.e);
        mlp_init(&m, WORLD_NVME);
        m.skip_layer = true;
        durable_config(&m.cfg, folder, true);
        RUN(&m, mlp_seal(&m));
        RUN(&m, stk_resume_durable(m.e, false, NULL));
        m.step = last;
        RUN(&m, mlp_hash(&m, &got));
        CHECK(got == want[last]);
        for (uint64_t i = last + 1; i <= STEPS; i++) {
            RUN(&m, mlp_step(&m, &s));
            CHECK(s.step == i && s.durable_step >= last);
            if (i % 2) RUN(&m, stk_durable(m.e, NULL));
        }
        RUN(&m, mlp_hash(&m, &got));
        CHECK(got == want[STEPS]);
        stk_discard_durable(m.e);
        stk_close(m.e);
        CHECK(is_empty(folder));
    }
}

/* --- what else may be called meanwhile -------------------------------------------------------- */

TEST(durable_with_flush_save_evaluation_and_reads_pending)
{
    for (int kind = 0; kind < 6; kind++) {
        uint64_t want[STEPS + 1], hash;
        struct variant v = { .update = kind % 2 ? STK_UPDATE_CHASE : STK_UPDATE_SERIAL };
        struct place p;
        struct toy t, u;
        float x[4];
        stk_visit visit;
        REQUIRE(reference(&v, want));
        place_new(&p, kind >= 3, "pending");
        RUN(&t, begin(&t, &v, &p));
        RUN(&t, world_steps(&t, 2, 1e-3));
        RUN(&t, stk_durable(t.e, "{}"));
        if (kind % 3 == 0) RUN(&t, stk_flush(t.e));
        if (kind % 3 == 1) RUN(&t, stk_save(t.e, world_dir("pending-save"), NULL, 1));
        if (kind % 3 == 2) {
            RUN(&t, stk_eval_begin(t.e));
            struct stk_error err = { 0 };
            stk_status st;
            while ((st = stk_next(t.e, &visit)) == STK_OK) {
                CHECK_OK(toy_visit(&t, &visit, &err), &err);
                RUN(&t, stk_done(t.e, &visit));
            }
            RUN(&t, stk_eval_end(t.e));
        }
        RUN(&t, stk_tensor_read(t.e, 0, STK_READ_MASTER, 0, 4, x, STK_F32));
        /* a change of the state after the request is not in the durable step */
        RUN(&t, stk_tensor_write(t.e, t.tensor_w[0], 0, 4, x, STK_F32));
        RUN(&t, world_steps(&t, 1, 1e-3));
        stk_close(t.e);
        CHECK(found(&p, NULL) == 2);
        RUN(&u, take_over(&u, &v, &p, NULL));
        RUN(&u, toy_hash(&u, &hash));
        CHECK(hash == want[2]);
        stk_discard_durable(u.e);
        stk_close(u.e);
        place_free(&p);
    }
}

TEST(durable_asked_twice_waits_for_the_first)
{
    struct variant v = { 0 };
    struct place p;
    struct toy t;
    place_new(&p, false, "twice");
    RUN(&t, begin(&t, &v, &p));
    RUN(&t, world_steps(&t, 1, 1e-3));
    RUN(&t, stk_durable(t.e, "{\"n\":1}"));
    RUN(&t, stk_durable(t.e, "{\"n\":2}"));
    RUN(&t, stk_durable_wait(t.e));
    char *client = NULL;
    stk_close(t.e);
    CHECK(found(&p, &client) == 1 && client && !strcmp(client, "{\"n\":2}"));
    stk_free(client);
    char *where = NULL;
    CHECK(stk_discard_found((const char *const[]){ p.folder }, 1, RUN_ID, &where) == STK_OK);
    stk_free(where);
    CHECK(is_empty(p.folder));
}

static uint64_t file_bytes;

static int add_file(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)at;
    if (type == FTW_F && strstr(path, ".bin")) file_bytes += (uint64_t)st->st_size;
    return 0;
}

/* What the table of memory says of the drives is what the store takes of them: extents and durable table. */
TEST(durable_room_is_counted_in_full)
{
    for (int k = 0; k < 2; k++) {
        struct place p;
        struct toy t;
        place_new(&p, false, k ? "room of activations" : "room");
        variant_toy(&t, &(struct variant){ 0 });
        place_config(&t, &p, false);
        t.cfg.chunk_elems = 1u << 16;
        if (k) {
            t.cfg.activations = STK_ACT_NVME;
            t.cfg.micro_batches = t.micros = 100;
        }
        RUN(&t, toy_open(&t));
        file_bytes = 0;
        CHECK(nftw(p.folder, add_file, 8, FTW_PHYS) == 0 && file_bytes > 0);
        uint64_t said = world_table(t.e, "nvme", NULL);
        printf("# %llu bytes on the drive, %llu in the table\n", (unsigned long long)file_bytes,
               (unsigned long long)said);
        CHECK(said >= file_bytes && said - file_bytes <= 65536);
        stk_discard_durable(t.e);
        stk_close(t.e);
        place_free(&p);
    }
}

/* Asked for when no update is pending: it begins at once, and closing waits for it. */
TEST(durable_asked_without_a_pending_update_then_closed)
{
    struct variant v = { 0 };
    for (int simulated = 0; simulated < 2; simulated++) {
        struct place p;
        struct toy t;
        char *client = NULL;
        place_new(&p, simulated, "closed");
        RUN(&t, begin(&t, &v, &p));
        RUN(&t, world_steps(&t, 1, 1e-3));
        RUN(&t, stk_flush(t.e));
        RUN(&t, stk_durable(t.e, NULL));
        stk_close(t.e);
        CHECK(found(&p, NULL) == 1);
        RUN(&t, take_over(&t, &v, &p, NULL)); /* and before any step of this engine */
        RUN(&t, stk_durable(t.e, "{\"again\":1}"));
        stk_close(t.e);
        RUN(&t, take_over(&t, &v, &p, &client));
        CHECK(client && !strcmp(client, "{\"again\":1}"));
        stk_free(client);
        stk_discard_durable(t.e);
        stk_close(t.e);
        place_free(&p);
    }
}

/* A newer checkpoint over an adopted store: the durable step stays until the next one. */
TEST(durable_newer_checkpoint_over_an_adopted_store)
{
    struct variant v = { .update = STK_UPDATE_CHASE };
    for (int simulated = 0; simulated < 2; simulated++)
        for (int commit = 0; commit < 2; commit++) {
            uint64_t want[STEPS + 1], hash;
            const char *dir = world_dir("newer");
            struct place p;
            struct toy t;
            char *path = NULL;
            stk_step_stats s;
            REQUIRE(reference(&v, want));
            place_new(&p, simulated, "newer-nvme");
            RUN(&t, begin(&t, &v, &p));
            RUN(&t, world_steps(&t, 2, 1e-3));
            RUN(&t, stk_durable(t.e, NULL));
            RUN(&t, world_steps(&t, 2, 1e-3));
            RUN(&t, stk_save(t.e, dir, NULL, 1));
            stk_close(t.e);
            variant_toy(&t, &v);
            place_config(&t, &p, true);
            RUN(&t, toy_open(&t));
            REQUIRE(stk_newest_checkpoint(dir, &path, &t.step) == STK_OK && t.step == 4);
            RUN(&t, stk_restore(t.e, path, false, NULL));
            stk_free(path);
            RUN(&t, toy_step(&t, 1e-3, &s));
            CHECK(s.step == 5 && s.durable_step == 2);
            RUN(&t, toy_hash(&t, &hash));
            CHECK(hash == want[5]);
            if (commit) {
                RUN(&t, stk_durable(t.e, NULL));
                RUN(&t, stk_durable_wait(t.e));
            }
            stk_close(t.e);
            CHECK(found(&p, NULL) == (commit ? 5 : 2));
            RUN(&t, take_over(&t, &v, &p, NULL));
            RUN(&t, toy_hash(&t, &hash));
            CHECK(hash == want[commit ? 5 : 2]);
            stk_discard_durable(t.e);
            stk_close(t.e);
            place_free(&p);
        }
}

/* --- failures --------------------------------------------------------------------------------- */

/* Every flush fails: reported once, by the next call that may; the run goes on; the older durable
 * step stays, and a later one succeeds. */
TEST(durable_a_failed_commit_is_reported_once_and_the_run_goes_on)
{
    uint64_t want[STEPS + 1], hash;
    struct variant v = { .update = STK_UPDATE_CHASE };
    REQUIRE(reference(&v, want));
    for (int way = 0; way < 3; way++) {
        struct place p;
        struct toy t, u;
        stk_step_stats s;
        place_new(&p, false, "failed");
        RUN(&t, begin(&t, &v, &p));
        RUN(&t, world_steps(&t, 1, 1e-3));
        RUN(&t, stk_durable(t.e, NULL));
        RUN(&t, stk_durable_wait(t.e));
        RUN(&t, toy_step(&t, 1e-3, NULL));
        sys_fault_arm(SYS_FSYNC, 1, UINT64_MAX, EIO);
        RUN(&t, stk_durable(t.e, NULL));
        stk_status st = STK_OK;
        if (way == 0) {
            st = stk_durable_wait(t.e);
            CHECK(REFUSED(st, STK_ERR_IO, t.e, "durable step 2", "step 1"));
        } else {
            for (int i = 0; i < 2 && st == STK_OK; i++) st = toy_step(&t, 1e-3, &s);
            if (way == 2 && st == STK_OK) st = stk_durable(t.e, NULL);
            CHECK(REFUSED(st, STK_ERR_IO, t.e, "durable step 2", "step 1"));
            CHECK(s.step == t.e->begun && s.durable_step == 1);
        }
        sys_fault_arm(SYS_FSYNC, 0, 0, 0);
        CHECK(found(&p, NULL) == UINT64_MAX); /* the run is alive */
        while (t.step < 5) RUN(&t, toy_step(&t, 1e-3, &s));
        RUN(&t, toy_hash(&t, &hash));
        CHECK(hash == want[5] && s.durable_step == 1);
        if (way) {
            RUN(&t, stk_durable(t.e, NULL));
            RUN(&t, stk_durable_wait(t.e));
        }
        stk_close(t.e);
        CHECK(found(&p, NULL) == (way ? 5 : 1));
        RUN(&u, take_over(&u, &v, &p, NULL));
        RUN(&u, toy_hash(&u, &hash));
        CHECK(hash == want[way ? 5 : 1]);
        stk_discard_durable(u.e);
        stk_close(u.e);
    }
}

/* --- refusals --------------------------------------------------------------------------------- */

TEST(durable_refusals_of_configurations)
{
    static const struct { stk_tier params, opt; const char *word; } homes[] = {
        { STK_TIER_HOST, STK_TIER_AUTO, "params" },
        { STK_TIER_DEVICE, STK_TIER_NVME, "params" },
        { STK_TIER_NVME, STK_TIER_HOST, "optimizer-state" },
    };
    struct variant v = { 0 };
    struct toy t;
    for (int i = 0; i < 3; i++) {
        variant_toy(&t, &v);
        durable_config(&t.cfg, world_dir("refused"), false);
        t.cfg.params = homes[i].params;
        t.cfg.optimizer_state = homes[i].opt;
        stk_status st = stk_open(&t.cfg, &t.e);
        CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, homes[i].word, "NVMe"));
        stk_close(t.e);
    }
    static const struct { const char *id; bool adopt, folder, durable; const char *word; } bad[] = {
        { RUN_ID, false, false, true, "folder" },
        { "zzzzzzzzzzzzzzzz", false, true, true, "0-9a-f" },
        { "12", false, true, true, "run_id" },
        { "", true, true, true, "run_id" },
        { RUN_ID, true, true, false, "durable" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        variant_toy(&t, &v);
        durable_config(&t.cfg, bad[i].folder ? world_dir("refused") : NULL, bad[i].adopt);
        t.cfg.durable = bad[i].durable;
        memset(t.cfg.run_id, 0, sizeof t.cfg.run_id);
        snprintf(t.cfg.run_id, sizeof t.cfg.run_id, "%s", bad[i].id);
        stk_status st = stk_open(&t.cfg, &t.e);
        CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, bad[i].word));
        stk_close(t.e);
    }
    /* nothing to take over */
    variant_toy(&t, &v);
    durable_config(&t.cfg, world_dir("refused"), true);
    stk_status none = toy_open(&t);
    CHECK(REFUSED(none, STK_ERR_STATE, t.e, "no durable step", RUN_ID));
    stk_close(t.e);
    CHECK(is_empty(world_dir("refused")));
}

TEST(durable_refusals_of_calls)
{
    struct variant v = { 0 };
    struct place p;
    struct toy t;
    stk_step step = { 1e-3 };
    RUN(&t, (toy_init(&t, 2, 2), world_start(&t, WORLD_HOST)));
    RUN(&t, world_steps(&t, 1, 1e-3));
    CHECK(REFUSED(stk_durable(t.e, NULL), STK_ERR_STATE, t.e, "durable"));
    CHECK(stk_durable_wait(t.e) == STK_OK);
    CHECK(REFUSED(stk_resume_durable(t.e, false, NULL), STK_ERR_STATE, t.e, "before the first"));
    stk_close(t.e);
    place_new(&p, false, "calls");
    RUN(&t, begin(&t, &v, &p));
    CHECK(REFUSED(stk_durable(t.e, NULL), STK_ERR_STATE, t.e, "no step"));
    CHECK(REFUSED(stk_resume_durable(t.e, false, NULL), STK_ERR_STATE, t.e, "adopt"));
    RUN(&t, world_steps(&t, 1, 1e-3));
    CHECK(REFUSED(stk_durable(t.e, "[1]"), STK_ERR_CONFIG, t.e, "object"));
    char *large = malloc(300001);
    REQUIRE(large);
    memset(large, 'x', 300000);
    memcpy(large, "{\"a\":\"", 6);
    memcpy(large + 299998, "\"}", 3);
    CHECK(REFUSED(stk_durable(t.e, large), STK_ERR_CONFIG, t.e, "300000 bytes"));
    /* the largest that is allowed */
    memcpy(large + (256 << 10) - 2, "\"}", 3);
    RUN(&t, stk_durable(t.e, large));
    RUN(&t, stk_durable_wait(t.e));
    free(large);
    RUN(&t, stk_step_begin(t.e, &step));
    CHECK(REFUSED(stk_durable(t.e, NULL), STK_ERR_STATE, t.e, "inside a step"));
    stk_close(t.e); /* in the middle of a step */
    CHECK(found(&p, NULL) == 1);
    char *where = NULL;
    CHECK(stk_discard_found((const char *const[]){ p.folder }, 1, "", &where) == STK_OK);
    stk_free(where);
}

/* One sentence that says what to give; the durable step is as it was. */
TEST(durable_refusals_of_another_geometry)
{
    struct variant v = { 0 }, w;
    struct place p;
    struct toy t;
    const char *const paths[] = { world_dir("geometry") };
    char *where = NULL;
    place_new(&p, false, "geometry");
    RUN(&t, begin(&t, &v, &p));
    RUN(&t, world_steps(&t, 2, 1e-3));
    RUN(&t, stk_durable(t.e, NULL));
    RUN(&t, stk_durable_wait(t.e));
    /* alive */
    CHECK(stk_find_durable(paths, 1, RUN_ID, NULL, NULL, &where) == STK_ERR_STATE && where);
    stk_free(where);
    struct toy u;
    variant_toy(&u, &v);
    place_config(&u, &p, true);
    stk_status live = toy_open(&u);
    CHECK(REFUSED(live, STK_ERR_STATE, u.e, RUN_ID));
    stk_close(u.e);
    stk_close(t.e);
    for (int i = 0; i < 6; i++) {
        static const char *const words[] = { "--chunk 2048", "--grads nvme", "another model",
                                             "--freeze", "--dtype bf16", "--nvme" };
        w = v;
        if (i == 3) w.freeze = true;
        if (i == 4) w.dtype = STK_FP16;
        variant_toy(&t, &w);
        place_config(&t, &p, true);
        if (i == 0) t.cfg.chunk_elems = 4096;
        if (i == 1) t.cfg.grads = STK_TIER_HOST;
        if (i == 2) t.layers = 3;
        if (i == 5) t.cfg.nvme[1] = world_dir("geometry-b");
        stk_status st = toy_open(&t);
        CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, words[i]));
        stk_close(t.e);
        CHECK(found(&p, NULL) == 2);
    }
    /* another arithmetic: only with the word for it */
    for (int any = 0; any < 2; any++) {
        variant_toy(&t, &v);
        place_config(&t, &p, true);
        t.cfg.grads = STK_TIER_AUTO; /* as it was */
        t.cfg.client_numerics = "toy2";
        RUN(&t, toy_open(&t));
        stk_status st = stk_resume_durable(t.e, any, NULL);
        CHECK(any ? st == STK_OK : REFUSED(st, STK_ERR_CONFIG, t.e, "toy2", "--any-numerics"));
        stk_close(t.e);
        CHECK(found(&p, NULL) == 2);
    }
    /* the same name without taking over */
    variant_toy(&t, &v);
    place_config(&t, &p, false);
    stk_status st = toy_open(&t);
    CHECK(st != STK_OK && strstr(stk_error_text(t.e), RUN_ID));
    stk_close(t.e);
    CHECK(found(&p, NULL) == 2);
    CHECK(stk_discard_found(paths, 1, RUN_ID, &where) == STK_OK);
    stk_free(where);
    CHECK(is_empty(p.folder));
}

TEST(durable_room_is_in_the_table)
{
    struct variant v = { 0 };
    struct place p;
    struct toy t;
    uint64_t plain, twice;
    for (int durable = 0; durable < 2; durable++) {
        place_new(&p, false, "table");
        variant_toy(&t, &v);
        place_config(&t, &p, false);
        t.cfg.durable = durable;
        t.cfg.params = t.cfg.optimizer_state = STK_TIER_NVME;
        RUN(&t, toy_open(&t));
        *(durable ? &twice : &plain) = world_table(t.e, "nvme", NULL);
        uint64_t state = world_table(t.e, "nvme", "parameters (16-bit)") +
                         world_table(t.e, "nvme", "optimizer state");
        uint64_t more = world_table(t.e, "nvme", "second versions for durable steps");
        CHECK(durable ? more >= state : more == 0);
        CHECK((world_table(t.e, "host", "description of durable steps") > 0) == durable);
        stk_close(t.e);
        CHECK(is_empty(p.folder)); /* nothing was committed */
    }
    CHECK(twice > plain);
}

/* Several folders, taken over in another order. */
TEST(durable_over_several_folders)
{
    struct variant v = { .update = STK_UPDATE_CHASE };
    uint64_t want[STEPS + 1], hash;
    static const char *const names[] = { "several-a", "several-b", "several-c" };
    struct place p;
    struct toy t;
    REQUIRE(reference(&v, want));
    place_new(&p, false, names[0]);
    for (int round = 0; round < 3; round++) {
        variant_toy(&t, &v);
        place_config(&t, &p, round > 0);
        for (int i = 0; i < 3; i++) t.cfg.nvme[i] = world_dir(names[(i + round) % 3]);
        RUN(&t, toy_open(&t));
        if (round == 0) {
            RUN(&t, toy_fill(&t));
        } else {
            RUN(&t, stk_resume_durable(t.e, false, NULL));
            t.step = t.e->begun;
            CHECK(t.step == 2ull * (uint64_t)round);
            RUN(&t, toy_hash(&t, &hash));
            CHECK(hash == want[t.step]);
        }
        RUN(&t, world_steps(&t, 2, 1e-3));
        RUN(&t, stk_durable(t.e, NULL));
        RUN(&t, stk_durable_wait(t.e));
        if (round == 2) stk_discard_durable(t.e);
        stk_close(t.e);
    }
    for (int i = 0; i < 3; i++) CHECK(is_empty(world_dir(names[i])));
}

TEST_MAIN()
