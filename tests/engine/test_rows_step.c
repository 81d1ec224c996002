/* tests/engine/test_rows_step.c - rows of the field cases about a step as a whole: what the update
 * does to a tensor wherever it lies, in which dtype state is kept, what is read how often, what runs
 * beside what. Times are virtual: those of the simulated device. */
#include "engine/engine.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "nvme/io_sim.h"
#include "tests/engine/world.h"

/* --- blocks of one tensor whose gradients the test gives -------------------------------------- */

enum { GIVEN_MAX = 9, GIVEN_ELEMS = 300 };

struct given { stk_config cfg; stk_engine *e; uint32_t n, tensor[GIVEN_MAX]; uint64_t updates; };

static stk_status given_open(struct given *g, uint32_t n, enum world_place p, double clip)
{
    *g = (struct given){ .n = n };
    stk_config_init(&g->cfg, sizeof g->cfg);
    g->cfg.chunk_elems = 2048;
    g->cfg.compute_threads = g->cfg.update_threads = 1;
    g->cfg.matmul = STK_MATMUL_F32;
    g->cfg.own_order = true;
    g->cfg.own_visits_max = 16;
    g->cfg.own_held_max = 1;
    g->cfg.clip = clip;
    g->cfg.nvme[0] = world_dir("given");
    g->cfg.params = g->cfg.optimizer_state = g->cfg.grads =
        p == WORLD_HOST ? STK_TIER_HOST : STK_TIER_NVME;
    if (p == WORLD_MIXED) g->cfg.params = STK_TIER_HOST;
    STK_TRY(stk_open(&g->cfg, &g->e));
    for (uint32_t i = 0; i < n; i++) {
        char name[16];
        uint32_t block;
        snprintf(name, sizeof name, "t%u", i);
        stk_tensor_desc d = { .name = name, .n_elems = GIVEN_ELEMS };
        STK_TRY(stk_block(g->e, name, &d, 1, &block, &g->tensor[i]));
    }
    return stk_seal(g->e, false);
}

/* What `seed` draws, scaled. */
static const float *drawn(uint64_t seed, float scale)
{
    static float v[GIVEN_ELEMS];
    struct rng r;
    rng_seed_stream(&r, test_seed(), seed);
    for (int k = 0; k < GIVEN_ELEMS; k++) v[k] = scale * (float)rng_normal(&r);
    return v;
}

static bool equal_state(struct given *g, uint32_t a, uint32_t b)
{
    static float x[GIVEN_ELEMS], y[GIVEN_ELEMS];
    bool same = true;
    for (int what = STK_READ_MASTER; what <= STK_READ_EXP_AVG_SQ; what++) {
        if (stk_tensor_read(g->e, g->tensor[a], (stk_what)what, 0, GIVEN_ELEMS, x, STK_F32) ||
            stk_tensor_read(g->e, g->tensor[b], (stk_what)what, 0, GIVEN_ELEMS, y, STK_F32))
            return false;
        same = same && !memcmp(x, y, sizeof x);
    }
    return same;
}

/* --- ADM-01 ----------------------------------------------------------------------------------- */

/* Blocks 1 and 7 begin equal and get equal gradients, but none in steps 3 and 4; block 3 gets one on
 * odd steps only, the others others. */
static stk_status places_step(struct given *g, uint64_t step)
{
    stk_step s = { 1e-3 };
    STK_TRY(stk_step_begin(g->e, &s));
    for (uint32_t i = 0; i < g->n; i++) {
        bool twin = i == 1 || i == 7;
        if ((twin && (step == 3 || step == 4)) || (i == 3 && step % 2 == 0)) continue;
        const float *v = drawn(step * 16 + (twin ? 1 : i), twin ? 1 : (float)(i + 1));
        STK_TRY(stk_grad_add(g->e, g->tensor[i], 0, GIVEN_ELEMS, v, STK_F32));
    }
    return stk_step_end(g->e, NULL);
}

static void places(enum world_place p, uint64_t steps)
{
    struct given g;
    RUN(&g, given_open(&g, GIVEN_MAX, p, 1.0));
    for (uint32_t i = 0; i < g.n; i++) {
        const float *v = drawn(i == 7 ? 1 : i, 0.1f);
        RUN(&g, stk_tensor_write(g.e, g.tensor[i], 0, GIVEN_ELEMS, v, STK_F32));
    }
    for (uint64_t k = 1; k <= steps; k++) {
        RUN(&g, places_step(&g, k));
        if (k != 1 && k != 2 && k != 5 && k != 10 && k != steps) continue;
        CHECK(equal_state(&g, 1, 7));
        CHECK(!equal_state(&g, 1, 2) && !equal_state(&g, 1, 3));
    }
    stk_close(g.e);
}

TEST(rows_adm_01_equal_tensors_stay_equal_wherever_they_lie)
{
    places(WORLD_HOST, 1000);
    places(WORLD_NVME, 40);
    places(WORLD_MIXED, 40);
}

/* --- ADM-14 ----------------------------------------------------------------------------------- */

/* Steps far below half a unit of bf16: without a master none of them would ever arrive. */
TEST(rows_adm_14_bf16_always_has_an_fp32_master)
{
    enum { STEPS = 200 };
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        struct given g;
        static float ones[GIVEN_ELEMS], master[GIVEN_ELEMS], param[GIVEN_ELEMS];
        for (int k = 0; k < GIVEN_ELEMS; k++) ones[k] = 1;
        RUN(&g, given_open(&g, 2, p, 0));
        for (uint32_t i = 0; i < 2; i++)
            RUN(&g, stk_tensor_write(g.e, g.tensor[i], 0, GIVEN_ELEMS, ones, STK_F32));
        for (int k = 1; k <= STEPS; k++) {
            stk_step s = { 1e-5 };
            RUN(&g, stk_step_begin(g.e, &s));
            for (uint32_t i = 0; i < 2; i++)
                RUN(&g, stk_grad_add(g.e, g.tensor[i], 0, GIVEN_ELEMS, ones, STK_F32));
            RUN(&g, stk_step_end(g.e, NULL));
            if (k != 1 && k != STEPS) continue;
            RUN(&g, stk_tensor_read(g.e, g.tensor[1], STK_READ_MASTER, 0, GIVEN_ELEMS, master,
                                    STK_F32));
            RUN(&g, stk_tensor_read(g.e, g.tensor[1], STK_READ_PARAM, 0, GIVEN_ELEMS, param,
                                    STK_F32));
            /* a constant gradient moves by lr a step, and decay 0.01 by a hundredth of it; each step
             * rounds by 2^-24 at most */
            double want = 1 - 1.01e-5 * k, bound = k * ldexp(1, -24) + 2e-7;
            for (int i = 0; i < GIVEN_ELEMS; i++) {
                CHECK(fabs(master[i] - want) <= bound);
                CHECK(param[i] == (k == 1 ? 1.0f : 0.99609375f)); /* the two next to it in bf16 */
            }
        }
        stk_close(g.e);
    }
}

/* --- ADM-13 ----------------------------------------------------------------------------------- */

static char *read_file(const char *path, size_t *size)
{
    FILE *f = fopen(path, "re");
    char *v = NULL;
    if (f && !fseek(f, 0, SEEK_END)) {
        *size = (size_t)ftell(f);
        rewind(f);
        v = calloc(1, *size + 1);
        if (v && fread(v, 1, *size, f) != *size) *size = 0;
    }
    if (f) fclose(f);
    return v;
}

/* A checkpoint like the one at `path` but that tensor `name` claims to be `dtype` (as long a word as
 * what was there) and the manifest claims `moments`. Its path: sys_free. */
static char *forged(const char *path, const char *name, const char *dtype, const char *moments)
{
    struct stk_error err = { 0 };
    json_t *doc = NULL;
    char *partial = NULL, *out = NULL, *note = NULL, file[1024], key[128];
    size_t size = 0;
    uint64_t step = 0;
    const char *dir = world_dir("forged");
    snprintf(file, sizeof file, "%s/state-00001.safetensors", path);
    char *raw = read_file(file, &size);
    snprintf(key, sizeof key, "\"%s\":{\"dtype\":\"", name);
    char *at = raw ? memmem(raw, size, key, strlen(key)) : NULL;
    if (at && manifest_read(path, true, &doc, &err) == STK_OK &&
        manifest_begin(dir, 2, &partial, &err) == STK_OK) {
        memcpy(at + strlen(key), dtype, strlen(dtype));
        json_object_del(doc, "files");
        json_object_set_new(doc, "moments", json_string(moments));
        snprintf(file, sizeof file, "%s/state-00001.safetensors", partial);
        FILE *f = fopen(file, "we");
        bool ok = f && fwrite(raw, 1, size, f) == size;
        if (f) fclose(f);
        if (ok && manifest_commit(dir, 2, partial, doc, &err) == STK_OK)
            manifest_newest(dir, &out, &step, &note, &err);
    }
    if (!out) printf("# forging %s: %s\n", name, err.text);
    json_decref(doc);
    sys_free(note);
    sys_free(partial);
    free(raw);
    return out;
}

/* Manifest, files, and the bytes of memory say the same. */
static void says_fp32(struct toy *t, const char *path)
{
    struct stk_error err = { 0 };
    struct st_file *f = NULL;
    json_t *doc = NULL;
    char file[1024], name[64];
    bool half = t->cfg.dtype == STK_FP16;
    snprintf(file, sizeof file, "%s/state-00001.safetensors", path);
    REQUIRE(manifest_read(path, true, &doc, &err) == STK_OK && st_open(file, &f, &err) == STK_OK);
    CHECK(!strcmp(json_string_value(json_object_get(doc, "moments")), "fp32"));
    CHECK(!strcmp(json_string_value(json_object_get(doc, "dtype")), half ? "fp16" : "bf16"));
    static const char *const suffix[] = { "", ".exp_avg", ".exp_avg_sq" };
    for (int k = 0; k < 3; k++) {
        snprintf(name, sizeof name, "layer.0.w%s", suffix[k]);
        const struct st_tensor *s = st_find(f, name);
        CHECK(s && s->dtype == ST_F32 && s->n_elements == TOY_HIDDEN * TOY_HIDDEN);
    }
    const struct st_tensor *frozen = st_find(f, "embed");
    CHECK(frozen && frozen->dtype == (half ? ST_F16 : ST_BF16) && !st_find(f, "embed.exp_avg"));
    st_close(f);
    json_decref(doc);
    uint64_t params = t->e->layout->params_trainable, pad = 64ull * t->n_tensors + 4096ull * 8,
             state = world_table(t->e, "host", "optimizer state");
    CHECK(state >= params * (half ? 12 : 10) && state <= (params + pad) * (half ? 12 : 10));
}

static void refused_state(stk_dtype dtype, const char *path, const char *name, const char *claimed,
                          const char *moments, const char *word)
{
    struct toy t;
    char *made = forged(path, name, claimed, moments);
    toy_init(&t, 3, 1);
    t.freeze_first = true;
    t.cfg.dtype = dtype;
    world_place(&t, WORLD_HOST);
    RUN(&t, toy_open(&t));
    stk_status st = made ? stk_restore(t.e, made, true, NULL) : STK_ERR_STATE;
    if (!word) CHECK(st == STK_OK);
    else CHECK(REFUSED(st, strcmp(moments, "fp32") ? STK_ERR_CONFIG : STK_ERR_FORMAT, t.e, word));
    stk_close(t.e);
    sys_free(made);
}

/* State of one dtype is never taken for state of another, whatever both sizes are. */
TEST(rows_adm_13_state_of_another_dtype_is_refused)
{
    for (int half = 0; half < 2; half++) {
        struct toy t;
        char *path = NULL;
        stk_dtype dtype = half ? STK_FP16 : STK_BF16;
        const char *dir = world_dir(half ? "adm13-fp16" : "adm13-bf16");
        toy_init(&t, 3, 1);
        t.freeze_first = true;
        t.cfg.dtype = dtype;
        RUN(&t, world_start(&t, WORLD_HOST));
        RUN(&t, world_steps(&t, 2, 1e-3));
        RUN(&t, stk_save(t.e, dir, NULL, 0));
        REQUIRE(stk_newest_checkpoint(dir, &path, NULL) == STK_OK);
        says_fp32(&t, path);
        stk_close(t.e);
        refused_state(dtype, path, "layer.0.w", "F32", "fp32", NULL); /* the forger changes no more */
        refused_state(dtype, path, "layer.0.w.exp_avg", "I32", "fp32", "layer.0.w.exp_avg is I32");
        refused_state(dtype, path, "layer.2.b", "U32", "fp32", "layer.2.b is U32");
        refused_state(dtype, path, "embed", half ? "I16" : "BF16", "fp32",
                      half ? "embed is I16" : NULL);
        refused_state(dtype, path, "layer.0.w", "F32", "int4", "moments are int4");
        stk_free(path);
    }
}

/* --- MPX-07 ----------------------------------------------------------------------------------- */

/* Whether a gradient is finite is known where it becomes 16 bits wide: one cast of each chunk, and
 * the norm, which decides, moves no byte. Nothing else reads a gradient before its update. */
TEST(rows_mpx_07_the_finite_check_is_no_pass_of_its_own)
{
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        struct toy t;
        stk_step_stats s;
        uint32_t casts = 0, norms = 0, trainable = 0;
        toy_init(&t, 3, 2);
        RUN(&t, world_start(&t, p));
        const struct plan *plan = t.e->plan_train;
        for (uint32_t i = 0; i < plan->n_nodes; i++) {
            const struct plan_node *x = &plan->nodes[i];
            casts += x->kind == PLAN_GRAD_CAST;
            if (x->kind != PLAN_NORM) continue;
            norms++;
            CHECK(x->bytes == 0 && x->resource == PLAN_NONE && x->slot == PLAN_NO &&
                  x->src_slot == PLAN_NO);
        }
        for (uint32_t i = 0; i < t.e->layout->n_chunks; i++)
            trainable += !t.e->layout->chunks[i].frozen;
        CHECK(norms == 1 && casts == trainable && casts > 0);
        RUN(&t, toy_step(&t, 1e-3, &s));
        t.poison_loss_at = 2;
        RUN(&t, toy_step(&t, 1e-3, &s));
        CHECK(s.skipped); /* and it is found by that alone */
        stk_close(t.e);
    }
}

/* --- ZR3-10 ----------------------------------------------------------------------------------- */

enum { REPEATED = 50 };

static void losses_of(uint32_t chunk_elems, enum world_place p, double loss[REPEATED])
{
    struct toy t;
    toy_init(&t, 3, 2);
    t.cfg.chunk_elems = chunk_elems;
    t.cfg.update_threads = 3;
    t.cfg.prefetch = 3;
    RUN(&t, world_start(&t, p));
    for (int i = 0; i < REPEATED; i++) {
        RUN(&t, toy_step(&t, 3e-3, NULL));
        loss[i] = t.last_loss;
    }
    stk_close(t.e);
}

/* Two runs are one run; the size of the pieces in which gradients and state travel (what others call
 * buckets) changes the order of the norm's sums and nothing that can be seen. */
TEST(rows_zr3_10_two_runs_are_equal_and_piece_sizes_do_not_matter)
{
    static const uint32_t sizes[] = { 4096, 8192, 65536 };
    double want[REPEATED] = { 0 }, got[REPEATED] = { 0 }, worst = 0;
    losses_of(2048, WORLD_NVME, want);
    CHECK(want[0] > 0 && want[REPEATED - 1] < want[0]);
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        losses_of(2048, p, got);
        CHECK(!memcmp(want, got, sizeof want));
    }
    for (int k = 0; k < 3; k++) {
        losses_of(sizes[k], WORLD_NVME, got);
        for (int i = 0; i < REPEATED; i++) worst = fmax(worst, fabs(got[i] / want[i] - 1));
    }
    printf("# largest difference of a loss among piece sizes: %.3g\n", worst);
    CHECK(worst <= 1e-6);
}

/* --- on the simulated device: ADM-11, MEM-29 -------------------------------------------------- */

struct timed { stk_update update; bool nvme; double copy_out_bytes_per_s, update_bytes_per_s; };

static bool run_timed(const struct timed *v, stk_step_stats *s, uint64_t *hash)
{
    struct toy t;
    struct stk_error err = { 0 };
    struct dev_model model = { .flops_per_s = 4e9,
                               .copy_in_bytes_per_s = 200e6,
                               .copy_out_bytes_per_s = v->copy_out_bytes_per_s,
                               .memory_bytes_per_s = 900e6,
                               .launch_ns = 3000,
                               .update_bytes_per_s = v->update_bytes_per_s };
    struct io_sim_cfg disk = { .latency_ns = 20000, .read_bytes_per_s = 1e9,
                               .write_bytes_per_s = 1e9 };
    if (io_sim_disk_new(256u << 20, &disk.disk, &err) != STK_OK) return false;
    toy_init(&t, 14, 2);
    t.cfg.device = STK_DEVICE_SIM;
    t.cfg.simulate = true;
    t.cfg.seed = test_seed();
    t.cfg.sim_model = &model;
    t.cfg.storage = STK_STORAGE_SIM;
    t.cfg.sim_disk = &disk;
    t.cfg.nvme[0] = "disk";
    t.cfg.params = t.cfg.grads = STK_TIER_HOST;
    t.cfg.optimizer_state = v->nvme ? STK_TIER_NVME : STK_TIER_HOST;
    t.cfg.update = v->update;
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    for (int i = 0; st == STK_OK && i < 4; i++) st = toy_step(&t, 1e-3, s);
    if (st == STK_OK) st = toy_hash(&t, hash);
    if (st != STK_OK) printf("# %s\n", t.e ? stk_error_text(t.e) : "?");
    stk_close(t.e);
    io_sim_disk_free(disk.disk);
    return st == STK_OK;
}

static uint64_t exposed_ns(const stk_step_stats *s)
{
    return s->exposed.nvme_ns + s->exposed.copy_ns + s->exposed.update_ns + s->exposed.gather_ns +
           s->exposed.queue_ns;
}

/* The update of a block runs beside the visits of others: what is left of it is reported (a wait is
 * counted for the last thing that it waited for: here for the copy of what was updated), and the bits
 * are those of the update that everything waits for. */
TEST(rows_adm_11_an_update_beside_the_visits_is_reported_and_keeps_the_bits)
{
    for (int nvme = 0; nvme < 2; nvme++) {
        struct timed v = { STK_UPDATE_SERIAL, nvme, 1e15, 1e9 };
        stk_step_stats serial = { 0 }, chase = { 0 };
        uint64_t want = 0, got = 1;
        REQUIRE(run_timed(&v, &serial, &want));
        v.update = STK_UPDATE_CHASE;
        REQUIRE(run_timed(&v, &chase, &got));
        uint64_t a = exposed_ns(&serial), b = exposed_ns(&chase);
        printf("# state on %s: step %.6f s serial, %.6f s chase; exposed %.6f s, %.6f s\n",
               nvme ? "NVMe" : "the host", (double)serial.step_ns * 1e-9,
               (double)chase.step_ns * 1e-9, (double)a * 1e-9, (double)b * 1e-9);
        CHECK(want == got);
        CHECK(b > 0 && 2 * b < a); /* of the first block, which is a sixth of all, nothing hides */
        CHECK(serial.step_ns - chase.step_ns > (a - b) / 10 * 9);
    }
    struct toy t;
    stk_step_stats s;
    uint64_t update_ns = 0;
    toy_init(&t, 3, 1);
    t.cfg.update = STK_UPDATE_SERIAL;
    RUN(&t, world_start(&t, WORLD_HOST));
    for (int i = 0; i < 5; i++) {
        RUN(&t, toy_step(&t, 1e-3, &s));
        update_ns += s.exposed.update_ns;
    }
    CHECK(update_ns > 0); /* without a copy between: by its name */
    stk_close(t.e);
}

/* Gradients leave the device while later visits compute: of the time their copies take, only that of
 * the last block, which is a sixth of all, can be seen. (All host memory that the device copies to is
 * registered with it at seal; the share of copies that is not, on CUDA: 0.) */
TEST(rows_mem_29_gradients_leave_beside_the_visits)
{
    struct timed v = { STK_UPDATE_SERIAL, false, 1e15, 0 };
    stk_step_stats fast = { 0 }, slow = { 0 };
    uint64_t want = 0, got = 1;
    REQUIRE(run_timed(&v, &fast, &want));
    double copies_s = 0.4e-9 * (double)fast.compute_ns;
    v.copy_out_bytes_per_s = (double)fast.copy_out_bytes / copies_s;
    REQUIRE(run_timed(&v, &slow, &got));
    double seen = ((double)slow.step_ns - (double)fast.step_ns) * 1e-9;
    printf("# %.1f KiB in %.6f s of copies beside %.6f s of visits: the step is longer by %.6f s\n",
           (double)slow.copy_out_bytes / 1024, copies_s, (double)fast.compute_ns * 1e-9, seen);
    CHECK(want == got && slow.copy_out_bytes == fast.copy_out_bytes);
    CHECK(seen < 0.35 * copies_s);
}

TEST_MAIN()
