/* tests/engine/test_matrix.c - promise 2: placement never changes the numbers. Masters and moments
 * after 5 steps, bit for bit, over every value of every option: first a list in which each value of
 * each option appears beside the reference, then a seeded random sample of all combinations
 * (STK_SOAK=1: a hundred times as many; STK_BRIEF=1: a quarter). Where a combination asks for it, a
 * checkpoint is written beside steps 3 to 5 and must have the bytes of the one that the reference
 * wrote between them. */
#include "tests/engine/save_world.h"
#include "tests/engine/toy.h"
#include "tests/test.h"
#include "nvme/io_sim.h"
#include <unistd.h>

static char dir[64];

struct combo {
    stk_tier params, opt, grads;
    stk_act act; /* 5 + k: a mix, mixes[k] */
    stk_update update;
    uint32_t update_threads, prefetch;
    stk_accumulate accumulate;
    stk_device_kind device;
    stk_storage storage;
    bool simulate, tight;
    uint64_t nvme_buffer;
    enum { SAVE_NONE, SAVE_BESIDE, SAVE_BETWEEN } save; /* a checkpoint of step 2 */
    uint32_t on_device; /* tenths of the parameters whose state is on the device, if it can be there */
};

static const struct combo reference = { STK_TIER_HOST,
                                        STK_TIER_HOST,
                                        STK_TIER_HOST,
                                        STK_ACT_KEEP,
                                        STK_UPDATE_SERIAL,
                                        1,
                                        0,
                                        STK_ACCUMULATE_LAYER,
                                        STK_DEVICE_HOST,
                                        STK_STORAGE_AUTO,
                                        false,
                                        false,
                                        0,
                                        SAVE_BETWEEN,
                                        0 };
enum { MIXES = 4 };
static const struct { uint32_t last[STK_ACT_N]; stk_act rest; } mixes[MIXES] = {
    { { 0, 1 }, STK_ACT_RECOMPUTE },
    { { 0, 1 }, STK_ACT_NVME },
    { { 0, 0, 1, 1 }, STK_ACT_NVME },
    { { 0, 1, 0, 0, 1 }, STK_ACT_NVME },
};
static char saved_between[256], saved_beside[256];

struct world {
    uint32_t layers, micros;
    bool tied, freeze;
    stk_dtype dtype;
    uint64_t tight_device;
    stk_moments moments;
};

static void apply(struct toy *t, const struct combo *c, const struct io_sim_cfg *sim)
{
    t->cfg.params = c->params;
    t->cfg.optimizer_state = c->opt;
    t->cfg.grads = c->grads;
    t->cfg.activations = c->act;
    if (c->act >= STK_ACT_N) {
        t->cfg.activations = mixes[c->act - STK_ACT_N].rest;
        memcpy(t->cfg.activations_last, mixes[c->act - STK_ACT_N].last, sizeof t->cfg.activations_last);
    }
    t->cfg.update = c->update;
    t->cfg.update_threads = c->update_threads;
    t->cfg.optimizer_on_device = c->on_device / 10.0;
    t->cfg.prefetch = c->prefetch;
    t->cfg.nvme_buffer = c->nvme_buffer;
    t->cfg.accumulate = c->accumulate;
    t->cfg.device = c->device;
    t->cfg.storage = c->storage;
    t->cfg.simulate = c->simulate || c->device == STK_DEVICE_SIM;
    t->cfg.seed = test_seed();
    t->cfg.nvme[0] = c->storage == STK_STORAGE_SIM ? "disk" : dir;
    if (c->storage == STK_STORAGE_SIM) t->cfg.sim_disk = sim;
}

/* A step, and after the second a checkpoint. */
static stk_status step(struct toy *t, const struct combo *c, int i)
{
    STK_TRY(toy_step(t, 1e-3, NULL));
    if (i != 1 || c->save == SAVE_NONE) return STK_OK;
    if (c->save == SAVE_BETWEEN)
        return stk_save(t->e, save_dir("between", saved_between), NULL, 0);
    return stk_save_begin(t->e, save_dir("beside", saved_beside), NULL, 0);
}

/* Runs 5 steps, with an evaluation pass after the second, and hashes. False: refused or failed
 * (printed). */
static bool run(const struct world *w, const struct combo *c, uint64_t *hash, uint64_t *device_used)
{
    struct toy t;
    struct io_sim_disk *disk = NULL;
    struct stk_error err = { 0 };
    toy_init(&t, w->layers, w->micros);
    t.tied = w->tied;
    t.freeze_first = w->freeze;
    t.cfg.dtype = w->dtype;
    t.cfg.moments = w->moments;
    t.cfg.moments_seed = 11;
    if (c->storage == STK_STORAGE_SIM && io_sim_disk_new(1u << 30, &disk, &err) != STK_OK)
        return false;
    struct io_sim_cfg sim = { .disk = disk,
                              .seed = test_seed(),
                              .latency_ns = 20000,
                              .read_bytes_per_s = 1e9,
                              .write_bytes_per_s = 1e9 };
    apply(&t, c, &sim);
    if (c->tight && c->device != STK_DEVICE_HOST) t.cfg.device_memory = w->tight_device;
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    for (int i = 0; st == STK_OK && i < 5; i++) st = step(&t, c, i);
    if (st == STK_OK) st = toy_hash(&t, hash);
    if (st == STK_OK) st = stk_save_wait(t.e);
    if (st != STK_OK) printf("# %s: %s\n", stk_status_name(st), t.e ? stk_error_text(t.e) : "?");
    const char *tier, *owner;
    uint64_t bytes;
    if (device_used) *device_used = 0;
    for (uint32_t i = 0; device_used && t.e && stk_table(t.e, i, &tier, &owner, &bytes); i++)
        if (!strcmp(tier, "device")) *device_used += bytes;
    stk_close(t.e);
    io_sim_disk_free(disk);
    if (st == STK_OK && c->save == SAVE_BESIDE && !save_same(saved_between, saved_beside, 2)) {
        printf("# the checkpoint written beside the steps is another\n");
        return false;
    }
    return st == STK_OK;
}

static void describe(const struct combo *c)
{
    printf("# params %d opt %d grads %d act %d update %d threads %u prefetch %u accumulate %d "
           "device %d storage %d simulate %d tight %d buffer %" PRIu64 " save %d on device %u\n",
           c->params, c->opt, c->grads, c->act, c->update, c->update_threads, c->prefetch,
           c->accumulate, c->device, c->storage, c->simulate, c->tight, c->nvme_buffer, c->save, c->on_device);
}

static uint32_t combinations;

static void compare(const struct world *w, const struct combo *c, uint64_t want)
{
    uint64_t got = 0;
    struct combo asked = *c;
    combinations++;
    /* no undo record of narrow moments: refused (test_moments.c) */
    if (w->moments && asked.opt != STK_TIER_NVME && asked.update == STK_UPDATE_SPECULATE)
        asked.update = STK_UPDATE_SPLIT;
    if (run(w, &asked, &got, NULL) && got == want) return;
    describe(&asked);
    printf("# world: layers %u micros %u tied %d freeze %d dtype %d moments %d: hash %016" PRIx64
           ", reference %016" PRIx64 "\n",
           w->layers, w->micros, w->tied, w->freeze, w->dtype, w->moments, got, want);
    test_fail(__FILE__, __LINE__, "placement changed the numbers");
}

/* The least device memory that works: what a budget of nothing is refused with is not parsed; the
 * planner is asked with growing caps. */
static uint64_t tight_device(const struct world *w)
{
    struct combo c = reference;
    uint64_t hash, used;
    c.device = STK_DEVICE_HOST_DISCRETE;
    c.act = STK_ACT_RECOMPUTE;
    if (!run(w, &c, &hash, &used)) return 0;
    for (uint64_t cap = 8u << 20; cap < used; cap += 64u << 10) {
        struct toy t;
        toy_init(&t, w->layers, w->micros);
        t.tied = w->tied;
        t.freeze_first = w->freeze;
        t.cfg.dtype = w->dtype;
        apply(&t, &c, NULL);
        t.cfg.device_memory = cap;
        stk_status st = stk_open(&t.cfg, &t.e);
        if (st == STK_OK) st = toy_describe(&t);
        if (st == STK_OK) st = stk_seal(t.e, true);
        stk_close(t.e);
        if (st == STK_OK) return cap;
    }
    return used;
}

static void every_value(const struct world *w, uint64_t want)
{
    static const struct combo list[] = {
        { 2, 2, 2, 1, 1, 2, 2, 0, 0, 0, 0, 0 }, { 2, 2, 2, 2, 2, 1, 1, 0, 0, 0, 0, 0 },
        { 2, 2, 2, 3, 2, 3, 2, 1, 0, 0, 0, 0 }, { 3, 2, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0 },
        { 3, 3, 2, 1, 2, 2, 2, 0, 0, 2, 0, 0 }, { 3, 3, 3, 2, 2, 2, 4, 1, 0, 3, 0, 0 },
        { 2, 3, 2, 1, 2, 1, 2, 0, 0, 1, 0, 0 }, { 2, 3, 3, 2, 2, 2, 1, 1, 0, 2, 0, 0 },
        { 2, 2, 3, 1, 1, 1, 3, 0, 0, 3, 0, 0 }, { 1, 2, 2, 1, 2, 2, 2, 0, 0, 0, 0, 0 },
        { 1, 2, 2, 1, 2, 2, 2, 0, 1, 0, 0, 0 }, { 1, 3, 3, 2, 2, 1, 2, 1, 1, 1, 0, 0 },
        { 2, 2, 2, 1, 1, 1, 0, 0, 1, 0, 0, 0 }, { 2, 2, 2, 2, 2, 2, 2, 0, 1, 0, 0, 1 },
        { 2, 2, 2, 3, 2, 3, 1, 1, 1, 0, 0, 0 }, { 3, 3, 3, 3, 2, 2, 2, 0, 1, 1, 0, 0 },
        { 3, 3, 3, 2, 1, 1, 0, 0, 1, 2, 0, 1 }, { 3, 3, 3, 1, 2, 2, 3, 1, 1, 3, 0, 0 },
        { 2, 3, 2, 3, 2, 2, 2, 0, 1, 0, 0, 0 }, { 2, 2, 3, 2, 2, 2, 2, 1, 1, 1, 0, 1 },
        { 3, 2, 2, 1, 2, 2, 2, 0, 1, 2, 0, 0 }, { 2, 2, 2, 1, 2, 2, 2, 0, 0, 0, 1, 0 },
        { 3, 3, 3, 2, 2, 3, 2, 1, 0, 3, 1, 0 }, { 3, 3, 3, 3, 2, 2, 2, 0, 1, 3, 1, 0 },
        { 2, 2, 2, 1, 2, 2, 2, 0, 2, 0, 1, 0 }, { 3, 3, 3, 2, 2, 2, 2, 0, 2, 3, 1, 1 },
        { 3, 3, 2, 3, 1, 1, 4, 1, 2, 3, 1, 0 }, { 3, 3, 3, 1, 2, 2, 2, 0, 1, 1, 1, 0 },
        { 2, 2, 2, 1, 3, 2, 2, 0, 0, 0, 0, 0 }, { 2, 2, 2, 2, 3, 1, 2, 1, 1, 0, 0, 0 },
        { 2, 2, 3, 1, 3, 3, 0, 0, 1, 1, 1, 0 }, { 2, 2, 2, 1, 4, 2, 2, 0, 0, 0, 0, 0 },
        { 2, 2, 2, 3, 4, 3, 1, 1, 1, 0, 0, 0 }, { 3, 3, 3, 1, 4, 2, 2, 0, 1, 1, 0, 0 },
        { 2, 3, 3, 2, 4, 1, 2, 0, 0, 3, 1, 0 }, { 3, 3, 3, 2, 4, 2, 2, 1, 2, 3, 1, 1 },
        { 3, 3, 3, 1, 2, 2, 2, 0, 0, 2, 1, 0 }, { 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0 },
        { 2, 2, 2, 4, 2, 2, 2, 0, 0, 1, 0, 0 }, { 2, 2, 2, 4, 2, 2, 2, 0, 1, 2, 0, 1 },
        { 3, 3, 3, 4, 2, 1, 0, 1, 1, 1, 0, 0 }, { 3, 3, 3, 4, 1, 2, 4, 0, 0, 3, 1, 0 },
        { 3, 3, 3, 4, 4, 2, 2, 0, 2, 3, 1, 0 }, { 2, 3, 3, 4, 4, 2, 1, 1, 0, 2, 0, 0 },
        { 2, 2, 2, 4, 3, 2, 2, 0, 1, 1, 0, 0 }, { 2, 2, 2, 5, 2, 2, 2, 0, 0, 0, 0, 0 },
        { 3, 3, 3, 5, 2, 2, 2, 1, 1, 1, 0, 0 }, { 2, 2, 2, 6, 2, 2, 2, 0, 0, 2, 0, 0 },
        { 2, 2, 2, 7, 2, 2, 1, 0, 1, 1, 0, 0 }, { 3, 3, 3, 8, 4, 2, 2, 1, 1, 3, 1, 0 },
        { 2, 2, 2, 8, 2, 2, 2, 0, 0, 3, 1, 0 }, { 3, 2, 2, 6, 1, 1, 3, 1, 2, 3, 1, 0 },
        { 2, 2, 2, 1, 2, 2, 2, 0, 1, 0, 0, 0, 0, 0, 3 }, { 2, 2, 2, 2, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 10 },
        { 2, 2, 2, 3, 4, 2, 2, 1, 1, 0, 0, 0, 0, 0, 3 }, { 1, 2, 2, 1, 3, 2, 1, 0, 1, 0, 0, 0, 0, 0, 6 },
        { 2, 2, 2, 4, 4, 1, 2, 0, 2, 3, 1, 0, 0, 0, 3 }, { 0, 0, 0, 0, 0, 0, 2, 1, 2, 0, 1, 0, 0, 0, 10 },
    };
    static size_t worlds; /* STK_BRIEF: the whole list in the first, a third in each other */
    size_t by = test_brief() && worlds > 0 ? 3 : 1;
    for (size_t i = worlds++ % by; i < sizeof list / sizeof *list; i += by) {
        struct combo c = list[i];
        c.save = i % 2 ? SAVE_BESIDE : SAVE_NONE;
        compare(w, &c, want);
    }
}

static void random_sample(const struct world *w, uint64_t want, uint32_t n)
{
    struct rng r;
    rng_seed(&r, test_seed());
    for (uint32_t i = 0; i < n; i++) {
        uint64_t buffer = rng_below(&r, 3) << (10 + rng_below(&r, 30));
        struct combo c = { .params = (stk_tier)(1 + rng_below(&r, 3)),
                           .opt = (stk_tier)(2 + rng_below(&r, 2)),
                           .grads = (stk_tier)(2 + rng_below(&r, 2)),
                           .act = (stk_act)(1 + rng_below(&r, STK_ACT_N - 1 + MIXES)),
                           .update = (stk_update)(1 + rng_below(&r, 4)),
                           .update_threads = (uint32_t)(1 + rng_below(&r, 3)),
                           .prefetch = (uint32_t)rng_below(&r, 5),
                           .accumulate = (stk_accumulate)rng_below(&r, 2),
                           .device = (stk_device_kind)rng_below(&r, 3),
                           .storage = (stk_storage)(1 + rng_below(&r, 3)),
                           .simulate = rng_below(&r, 3) == 0,
                           .tight = false,
                           .nvme_buffer = buffer,
                           .save = rng_below(&r, 2) ? SAVE_BESIDE : SAVE_NONE,
                           .on_device = rng_below(&r, 2) ? 0 : rng_below(&r, 2) ? 3 : 10 };
        compare(w, &c, want);
    }
}

static void matrix(struct world w, uint32_t samples)
{
    if (getenv("STK_SOAK")) samples *= 100;
    uint64_t want;
    if (!dir[0]) {
        snprintf(dir, sizeof dir, "/tmp/stoker-matrix-XXXXXX");
        REQUIRE(mkdtemp(dir) != NULL);
    }
    w.tight_device = tight_device(&w);
    REQUIRE(w.tight_device > 0);
    REQUIRE(run(&w, &reference, &want, NULL));
    combinations = 0;
    every_value(&w, want);
    random_sample(&w, want, (uint32_t)test_share(samples));
    printf("# %u combinations equal the reference\n", combinations);
}

TEST(matrix_untied_three_micro_batches)
{
    matrix((struct world){ 3, 3, false, false, STK_BF16, 0 }, 24);
}
TEST(matrix_tied) { matrix((struct world){ 3, 2, true, false, STK_BF16, 0 }, 8); }
TEST(matrix_frozen_first_block) { matrix((struct world){ 4, 2, false, true, STK_BF16, 0 }, 8); }
TEST(matrix_fp16) { matrix((struct world){ 2, 1, false, false, STK_FP16, 0 }, 8); }
TEST(matrix_bf16_moments)
{
    matrix((struct world){ 3, 2, false, false, STK_BF16, 0, STK_MOMENTS_BF16 }, 8);
}
TEST(matrix_8bit_moments)
{
    matrix((struct world){ 3, 2, true, false, STK_BF16, 0, STK_MOMENTS_8BIT }, 4);
    matrix((struct world){ 2, 1, false, true, STK_FP16, 0, STK_MOMENTS_8BIT }, 4);
}
/* last: removes the folder; nothing may be left in it */
TEST(matrix_leaves_nothing_behind) { CHECK(dir[0] && rmdir(dir) == 0); }

TEST_MAIN()
