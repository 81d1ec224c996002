/* tests/engine/test_moments.c - narrow moments in the engine: what they change (numbers, key, bytes),
 * what they must not (anything by placement: test_matrix.c has the rest of that), checkpoints and durable
 * steps that carry them, conversion, refusals. */
#include "tests/engine/durable_world.h"
#include "tests/engine/world.h"

#define NARROW(k) for (int k = STK_MOMENTS_BF16; k <= STK_MOMENTS_8BIT; k++)

static void toy_of(struct toy *t, stk_moments m, uint64_t seed)
{
    toy_init(t, 3, 2);
    t->cfg.moments = m;
    t->cfg.moments_seed = seed;
}

static uint64_t hash_after(stk_moments m, uint64_t seed, int steps, enum world_place p, char *key)
{
    struct toy t;
    uint64_t hash = 0;
    toy_of(&t, m, seed);
    stk_status st = world_start(&t, p);
    if (st == STK_OK) st = world_steps(&t, steps, 1e-3);
    if (st == STK_OK) st = toy_hash(&t, &hash);
    if (st != STK_OK) printf("# %s\n", stk_error_text(t.e));
    if (key) snprintf(key, 512, "%s", stk_numerics(t.e));
    stk_close(t.e);
    return st == STK_OK ? hash : 0;
}

/* Three kinds, three runs; the seed belongs to bf16 alone; the key says all of it. */
TEST(moments_are_in_the_numbers_and_in_the_key)
{
    char wide[512], half[512], eight[512];
    uint64_t f = hash_after(STK_MOMENTS_F32, 1, 4, WORLD_HOST, wide),
             b = hash_after(STK_MOMENTS_BF16, 1, 4, WORLD_HOST, half),
             q = hash_after(STK_MOMENTS_8BIT, 1, 4, WORLD_HOST, eight);
    CHECK(f && b && q && f != b && f != q && b != q);
    CHECK(hash_after(STK_MOMENTS_F32, 2, 4, WORLD_NVME, NULL) == f);
    CHECK(hash_after(STK_MOMENTS_BF16, 1, 4, WORLD_MIXED, NULL) == b);
    CHECK(hash_after(STK_MOMENTS_BF16, 2, 4, WORLD_HOST, NULL) != b);
    CHECK(hash_after(STK_MOMENTS_8BIT, 2, 4, WORLD_NVME, NULL) == q);
    CHECK(!strstr(wide, "moments") && strstr(half, ";moments=bf16;rounding=1;") &&
          strstr(eight, ";moments=8bit;"));
}

static uint64_t state_bytes_of(stk_moments m, enum world_place p)
{
    struct toy t;
    toy_of(&t, m, 0);
    uint64_t bytes = world_start(&t, p) == STK_OK ? world_table(t.e, p == WORLD_HOST ? "host" : "nvme",
                                                                "optimizer state") : 0;
    stk_close(t.e);
    return bytes;
}

/* 10, 6 and 4.125 bytes a parameter; the embedding keeps its 10 beside 8-bit moments. */
TEST(moments_bytes_in_the_table)
{
    uint64_t embed = TOY_VOCAB * TOY_HIDDEN, rest = embed + 3 * (TOY_HIDDEN + 1) * TOY_HIDDEN;
    CHECK(state_bytes_of(STK_MOMENTS_F32, WORLD_HOST) == 10 * (embed + rest));
    CHECK(state_bytes_of(STK_MOMENTS_BF16, WORLD_HOST) == 6 * (embed + rest));
    CHECK(state_bytes_of(STK_MOMENTS_8BIT, WORLD_HOST) == 10 * embed + 4 * rest + rest / 8);
    uint64_t f = state_bytes_of(STK_MOMENTS_F32, WORLD_NVME),
             q = state_bytes_of(STK_MOMENTS_8BIT, WORLD_NVME);
    CHECK(q > 0 && q < f);
}

static char *saved(stk_moments m, stk_dtype dtype, const char *name, int steps, uint64_t *hash)
{
    struct toy t;
    char *path = NULL;
    toy_of(&t, m, 5);
    t.cfg.dtype = dtype;
    stk_status st = world_start(&t, WORLD_HOST);
    if (st == STK_OK) st = world_steps(&t, steps, 1e-3);
    if (st == STK_OK) st = stk_save(t.e, world_dir(name), NULL, 0);
    if (st == STK_OK) st = stk_newest_checkpoint(world_dir(name), &path, NULL);
    if (st == STK_OK) st = world_steps(&t, steps, 1e-3);
    if (st == STK_OK && hash) st = toy_hash(&t, hash);
    if (st != STK_OK) printf("# %s\n", stk_error_text(t.e));
    CHECK(st == STK_OK);
    stk_close(t.e);
    return path;
}

/* A run that was interrupted goes on with the same bits, wherever its state lies then. */
TEST(moments_resume_to_the_bit)
{
    NARROW(k) for (int half = 0; half < 2; half++)
        for (int p = 0; p < WORLD_PLACE_N; p++) {
            struct toy t;
            uint64_t want = 0, got = 1;
            stk_dtype dtype = half ? STK_FP16 : STK_BF16;
            char *path = saved((stk_moments)k, dtype, "moments-resume", 3, &want);
            REQUIRE(path != NULL);
            toy_of(&t, (stk_moments)k, 5);
            t.cfg.dtype = dtype;
            world_place(&t, (enum world_place)p);
            RUN(&t, toy_open(&t));
            RUN(&t, stk_restore(t.e, path, false, NULL));
            t.step = 3;
            RUN(&t, world_steps(&t, 3, 1e-3));
            RUN(&t, toy_hash(&t, &got));
            CHECK(got == want);
            stk_close(t.e);
            stk_free(path);
        }
}

static stk_status restored(struct toy *t, stk_moments m, uint64_t seed, const char *path, bool any)
{
    toy_of(t, m, seed);
    world_place(t, WORLD_NVME);
    STK_TRY(toy_open(t));
    return stk_restore(t->e, path, any, NULL);
}

/* ADM-13: another kind, or another seed, is another arithmetic. */
TEST(moments_of_another_kind_are_refused)
{
    static const char *const give[] = { "--moments fp32", "--moments bf16", "--moments 8bit" };
    for (int a = 0; a < 3; a++) {
        char *path = saved((stk_moments)a, STK_BF16, "moments-refuse", 2, NULL);
        REQUIRE(path != NULL);
        for (int b = 0; b < 3; b++) {
            struct toy t;
            stk_status st = restored(&t, (stk_moments)b, 5, path, false);
            if (a == b) CHECK(st == STK_OK);
            else REFUSED(st, STK_ERR_CONFIG, t.e, give[a], "--any-numerics");
            stk_close(t.e);
        }
        struct toy t;
        stk_status st = restored(&t, (stk_moments)a, 6, path, false);
        if (a == STK_MOMENTS_BF16) REFUSED(st, STK_ERR_CONFIG, t.e, "rounding=5", "rounding=6");
        else CHECK(st == STK_OK);
        stk_close(t.e);
        stk_free(path);
    }
}

/* How far a value of moment `what` may be from what it was made of: of itself, and of the largest of its
 * 64. */
static bool near(float was, float is, float most, stk_moments to, stk_what what)
{
    double far = fabs((double)was - (double)is), relative = to == STK_MOMENTS_BF16 ? 1.0 / 256 : 0.5;
    if (to == STK_MOMENTS_F32) return was == is;
    bool least = what == STK_READ_EXP_AVG_SQ; /* at least the smallest code */
    return far <= fabs((double)was) * relative + (to == STK_MOMENTS_8BIT ? (least ? 4e-7 : 1e-6) * most : 0);
}

/* ADM-13: with --any-numerics the moments are converted: to wider ones exactly. */
TEST(moments_convert_from_any_to_any)
{
    for (int a = 0; a < 3; a++) {
        char *path = saved((stk_moments)a, STK_BF16, "moments-convert", 3, NULL);
        REQUIRE(path != NULL);
        for (int b = 0; b < 3; b++) {
            struct toy from, to;
            RUN(&from, restored(&from, (stk_moments)a, 5, path, false));
            RUN(&to, restored(&to, (stk_moments)b, 5, path, true));
            uint64_t bad = 0, some = 0;
            for (uint32_t k = 0; k < from.n_tensors; k++)
                for (int what = STK_READ_MASTER; what <= STK_READ_EXP_AVG_SQ; what++) {
                    float *x = world_read(&from, k, (stk_what)what),
                          *y = world_read(&to, k, (stk_what)what), most = 0;
                    REQUIRE(x && y);
                    bool same = what == STK_READ_MASTER || a == b ||
                                (b == STK_MOMENTS_8BIT && k == to.tensor_embed);
                    for (uint64_t i = 0; i < toy_tensor_elems(&from, k); i++) {
                        for (uint64_t j = i; i % 64 == 0 && j < i + 64; j++) {
                            if (j == i) most = 0;
                            if (fabsf(x[j]) > most) most = fabsf(x[j]);
                        }
                        bad += !near(x[i], y[i], most, same ? STK_MOMENTS_F32 : (stk_moments)b,
                                     (stk_what)what);
                        some += x[i] != 0;
                    }
                    free(x);
                    free(y);
                }
            CHECK(bad == 0 && some > 1000);
            if (bad) printf("# from %d to %d: %" PRIu64 " values are too far\n", a, b, bad);
            RUN(&to, world_steps(&to, 2, 1e-3));
            stk_close(from.e);
            stk_close(to.e);
        }
        stk_free(path);
    }
}

/* What narrow moments cannot do is said; what they can on NVMe is exact within themselves. */
TEST(moments_speculation_only_where_it_is_forgetting)
{
    NARROW(k) {
        struct toy t;
        uint64_t want = 0, got = 1, tried = 0, undone = 0;
        toy_of(&t, (stk_moments)k, 1);
        t.cfg.update = STK_UPDATE_SPECULATE;
        world_place(&t, WORLD_HOST);
        stk_status st = toy_open(&t);
        REFUSED(st, STK_ERR_CONFIG, t.e, "--update speculate", "undo record",
                "--optimizer-state nvme", k == STK_MOMENTS_BF16 ? "bf16" : "8bit");
        stk_close(t.e);
        for (int p = 0; p < 3; p++) { /* serial in memory; speculate on NVMe; parameters in memory */
            toy_of(&t, (stk_moments)k, 1);
            t.cfg.update = p ? STK_UPDATE_SPECULATE : STK_UPDATE_SERIAL;
            t.cfg.clip = 0;
            t.poison_embed_at = 4; /* found at the end of backward */
            RUN(&t, world_start(&t, p == 0 ? WORLD_HOST : p == 1 ? WORLD_NVME : WORLD_MIXED));
            for (int i = 0; i < 8; i++) {
                stk_step_stats s;
                RUN(&t, toy_step(&t, 1e-3, &s));
                CHECK(s.skipped == (i == 3));
                tried += s.spec_chunks;
                undone += s.spec_undone;
            }
            RUN(&t, toy_hash(&t, p ? &got : &want));
            stk_close(t.e);
            if (p) CHECK(got == want);
        }
        printf("# %" PRIu64 " chunks speculated, %" PRIu64 " taken back\n", tried, undone);
        CHECK(tried > 0 && undone > 0);
    }
}

/* A write sets the moments of what it wrote to zero, and of nothing else. */
TEST(moments_are_zero_after_a_write)
{
    NARROW(k) {
        struct toy t;
        float w[100] = { 1 };
        toy_of(&t, (stk_moments)k, 1);
        RUN(&t, world_start(&t, WORLD_MIXED));
        RUN(&t, world_steps(&t, 2, 1e-3));
        float *before = world_read(&t, t.tensor_w[1], STK_READ_EXP_AVG);
        RUN(&t, stk_tensor_write(t.e, t.tensor_w[1], 70, 100, w, STK_F32));
        for (int what = STK_READ_EXP_AVG; what <= STK_READ_EXP_AVG_SQ; what++) {
            float *v = world_read(&t, t.tensor_w[1], (stk_what)what);
            REQUIRE(v && before);
            for (int i = 0; i < 300; i++) {
                if (i >= 70 && i < 170) CHECK(v[i] == 0);
                else if (what == STK_READ_EXP_AVG) CHECK(v[i] == before[i]);
            }
            free(v);
        }
        free(before);
        stk_close(t.e);
    }
}

/* A client that keeps its own order. */
TEST(moments_own_order_is_the_same_on_any_placement)
{
    NARROW(k) {
        uint64_t hash[WORLD_PLACE_N] = { 0 };
        for (int p = 0; p < WORLD_PLACE_N; p++) {
            static struct mlp m;
            stk_step_stats s;
            mlp_init(&m, (enum world_place)p);
            m.cfg.moments = (stk_moments)k;
            m.skip_layer = true; /* tensors without a gradient in a step are left alone */
            RUN(&m, mlp_open(&m));
            for (int i = 0; i < 5; i++) RUN(&m, mlp_step(&m, &s));
            RUN(&m, mlp_hash(&m, &hash[p]));
            stk_close(m.e);
        }
        CHECK(hash[0] && hash[0] == hash[1] && hash[0] == hash[2]);
    }
}

/* A durable step is of its kind of moments: taken over with it, refused with another. */
TEST(moments_in_durable_steps)
{
    NARROW(k) {
        struct toy t;
        uint64_t want = 0, got = 1;
        const char *folder = world_dir("moments-durable");
        for (int run = 0; run < 3; run++) {
            toy_of(&t, run == 1 ? STK_MOMENTS_F32 : (stk_moments)k, 1);
            durable_config(&t.cfg, folder, run > 0);
            stk_status st = toy_open(&t);
            if (run == 1) {
                REFUSED(st, STK_ERR_CONFIG, t.e,
                        k == STK_MOMENTS_BF16 ? "--moments bf16" : "--moments 8bit");
                stk_close(t.e);
                continue;
            }
            RUN(&t, st);
            if (run == 0) {
                RUN(&t, toy_fill(&t));
                RUN(&t, world_steps(&t, 3, 1e-3));
                RUN(&t, stk_durable(t.e, NULL));
                RUN(&t, toy_step(&t, 1e-3, NULL));
                RUN(&t, stk_durable_wait(t.e));
                stk_close(t.e);
                want = hash_after((stk_moments)k, 1, 5, WORLD_HOST, NULL);
                continue;
            }
            RUN(&t, stk_resume_durable(t.e, false, NULL));
            t.step = 3;
            RUN(&t, world_steps(&t, 2, 1e-3));
            RUN(&t, toy_hash(&t, &got));
            stk_close(t.e);
            CHECK(want && got == want);
        }
        sys_remove_tree(folder);
    }
}

TEST_MAIN()
