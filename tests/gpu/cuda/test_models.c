/* tests/gpu/cuda/test_models.c - the built-in models by the engine on the CUDA device on the stand-in: loss, logits and
 * gradients against what transformers computed (tests/golden), with every access of every kernel checked; and the same
 * weights after steps on every placement and order of streams.
 *
 * The bounds are those of tests/trainer/test_model.c; gradients are rounded to bf16 here. STK_SOAK=1: all models. */
#include "tests/gpu/cuda/engine_rig.h"
#include "tests/trainer/golden.h"

TEST_MAIN()

static const struct model_opts opts_f32 = { .act = OPS_F32, .param = OPS_BF16, .logits = true };

static stk_config config_of(const struct placing *p, uint64_t seed, const struct io_sim_cfg *disk)
{
    struct toy t;
    rig_toy(&t, p, seed, disk);
    return t.cfg;
}

static void compare(const char *name, const struct placing *p, uint64_t seed)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct golden_run r;
    struct io_sim_cfg disk = rig_disk(seed);
    rig_card_new(seed, false);
    rig_card.cfg.gaps = true; /* between the parts of a set of activations, which goes as a whole */
    CHECK_OK(golden_open_config(name, "config.json", &g, &err), &err);
    stk_status st = golden_run_open(&g, opts_f32, config_of(p, seed, &disk), 1, &r, &err);
    CHECK_OK(st, &err);
    if (st == STK_OK) CHECK_OK(golden_eval(&r, &err), &err);
    double logits = golden_logits_error(&r), eval_loss = fabs(r.loss - g.loss), worst = 0;
    CHECK_OK(golden_step(&r, &err), &err);
    double loss = fabs(r.loss - g.loss);
    for (uint32_t t = 0; t < model_tensor_count(r.m); t++) {
        double error = 0;
        CHECK_OK(golden_grad_error(&r, t, &error, NULL, &err), &err);
        if (error > 0.01) printf("# %s: gradient of %s off by %.3g\n", name, model_tensor(r.m, t)->name, error);
        CHECK(error <= 0.01);
        worst = fmax(worst, error);
    }
    printf("# %s: logits %.2e, loss %.2e (eval %.2e), gradients %.2e of the largest\n", name, logits, loss, eval_loss, worst);
    CHECK(logits <= 1e-3 && loss <= 1e-4 && eval_loss <= 1e-4);
    golden_run_close(&r);
    golden_close(&g);
    io_sim_disk_free(disk.disk);
    CHECK(rig_seen.found == 0 && rig_seen.counts.copies_pageable == 0 && rig_seen.left == 0);
}

static const struct placing placings[] = {
    RIG_PLACING_HOST,
    { 2, 3, 3, STK_ACT_HOST, STK_UPDATE_SPLIT, 1, 1, false },
    { 2, 2, 2, STK_ACT_RECOMPUTE, STK_UPDATE_SPECULATE, 0, 2, false },
    { 3, 3, 3, STK_ACT_NVME, STK_UPDATE_CHASE, 0, 2, false },
};
enum { PLACINGS = sizeof placings / sizeof placings[0] };

TEST(cuda_models_equal_transformers)
{
    for (size_t i = 0; i < GOLDEN_N; i += getenv("STK_SOAK") ? 1 : test_brief() ? 6 : 3)
        compare(golden_names[i], &placings[i % PLACINGS], test_seed() + i);
}

/* Over the masters of all tensors after three steps; 0: it failed. */
static uint64_t train(const char *name, const struct placing *p, uint64_t seed)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct golden_run r;
    struct io_sim_cfg disk = rig_disk(seed);
    uint64_t h = 14695981039346656037ull;
    rig_card_new(seed, false);
    rig_card.cfg.gaps = true; /* between the parts of a set of activations, which goes as a whole */
    stk_status st = golden_open(name, &g, &err);
    if (st == STK_OK) st = golden_run_open(&g, opts_f32, config_of(p, seed, &disk), g.windows, &r, &err);
    for (int i = 0; st == STK_OK && i < 3; i++) st = golden_step(&r, &err);
    for (uint32_t t = 0; st == STK_OK && t < model_tensor_count(r.m); t++) {
        uint64_t n = model_tensor(r.m, t)->n_elems;
        float *v = malloc(n * sizeof *v);
        st = golden_engine(&r, stk_tensor_read(r.e, t, STK_READ_MASTER, 0, n, v, STK_F32), &err);
        for (uint64_t i = 0; st == STK_OK && i < n; i++) h = (h ^ stk_f32_bits(v[i])) * 1099511628211ull;
        free(v);
    }
    if (st != STK_OK) printf("# %s\n", err.text);
    golden_run_close(&r);
    golden_close(&g);
    io_sim_disk_free(disk.disk);
    CHECK(st == STK_OK && rig_seen.found == 0 && rig_seen.counts.copies_pageable == 0 && rig_seen.left == 0);
    return st == STK_OK ? h : 0;
}

TEST(cuda_models_same_bits_over_placements)
{
    uint64_t want = 0;
    for (uint64_t i = 0; i < test_share(PLACINGS); i++) {
        uint64_t got = train("llama_gqa_old", &placings[i], test_seed() + i);
        if (i == 0) want = got;
        CHECK(got == want && got != 0);
    }
}
