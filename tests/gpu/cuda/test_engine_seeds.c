/* tests/gpu/cuda/test_engine_seeds.c - promise 2 on the card: 20 steps of the toy client, on a placement and an order of
 * streams that a seed chooses, have the bits of the reference, and nothing is found. Kernels run without checks of each
 * access (those are test_engine.c's); unwritten memory is NaN. STK_SOAK=1: 2,000 seeds, STK_SEEDS=n: n; STK_BRIEF=1: a quarter. */
#define TOY_TINY
#include "tests/gpu/cuda/engine_rig.h"

TEST_MAIN()

enum { STEPS = 20 };

static uint64_t tight_bytes;
static uint32_t refused;

struct result { uint64_t weights, losses, spec, undone, skipped; };

/* What the norm does: never binds; binds once, when much was updated ahead of it, and is infinite once; binds often. */
struct norm { double clip; uint64_t boost_at, poison_at; };
static const struct norm norms[] = { { 1e9, 0, 0 }, { 50, 9, 15 }, { 1.1, 0, 0 } };
enum { NORMS = sizeof norms / sizeof norms[0] };

/* False: failed, which is printed. */
static bool train(const struct placing *p, const struct norm *w, uint64_t seed, struct result *out)
{
    struct toy t;
    struct io_sim_cfg disk = rig_disk(seed);
    rig_card_new(seed, true);
    rig_toy(&t, p, seed, &disk);
    if (p->tight) t.cfg.device_memory = tight_bytes;
    stk_step_stats s = { 0 };
    *out = (struct result){ .losses = 14695981039346656037ull };
    t.cfg.clip = w->clip;
    t.boost_at = w->boost_at;
    t.poison_loss_at = (double)w->poison_at;
    stk_status st = toy_open(&t);
    if (st == STK_ERR_NOMEM && p->tight) { /* this placing needs more of the card */
        refused++;
        stk_close(t.e);
        t.e = NULL;
        t.cfg.device_memory = 0;
        st = toy_open(&t);
    }
    if (st == STK_OK) st = toy_fill(&t);
    for (int i = 0; st == STK_OK && i < STEPS; i++) {
        uint64_t bits;
        st = toy_step(&t, 1e-3, &s);
        out->spec += s.spec_chunks;
        out->undone += s.spec_undone;
        out->skipped = s.skipped_total;
        memcpy(&bits, &t.last_loss, sizeof bits);
        out->losses = (out->losses ^ bits) * 1099511628211ull;
    }
    if (st == STK_OK) st = toy_hash(&t, &out->weights);
    if (st != STK_OK) printf("# %s: %s\n", stk_status_name(st), t.e ? stk_error_text(t.e) : "?");
    stk_close(t.e);
    io_sim_disk_free(disk.disk);
    return st == STK_OK && rig_seen.found == 0 && rig_seen.counts.copies_pageable == 0 && rig_seen.left == 0;
}

static struct placing draw(uint64_t seed)
{
    struct rng r;
    rng_seed(&r, seed);
    struct placing p = { .params = (stk_tier)(2 + rng_below(&r, 2)),
                         .opt = (stk_tier)(2 + rng_below(&r, 2)),
                         .grads = (stk_tier)(2 + rng_below(&r, 2)),
                         .act = (stk_act)(1 + rng_below(&r, STK_ACT_N - 1)),
                         .update = (stk_update)(1 + rng_below(&r, 4)),
                         .accumulate = (stk_accumulate)rng_below(&r, 2),
                         .prefetch = (uint32_t)rng_below(&r, 4) };
    p.tight = rng_below(&r, 2) == 0;
    const double part[] = { 0, 0.3, 1, STK_ON_DEVICE_AUTO };
    uint64_t which = rng_below(&r, 4);
    if (p.params == STK_TIER_HOST && p.opt == STK_TIER_HOST && p.grads == STK_TIER_HOST) p.on_device = part[which];
    return p;
}

static uint64_t index_of(const struct placing *p) /* without prefetch and memory */
{
    return ((((uint64_t)p->params * 4 + (uint64_t)p->opt) * 4 + (uint64_t)p->grads) * 8 + (uint64_t)p->act) * 16 +
           (uint64_t)p->update * 2 + (uint64_t)p->accumulate;
}

TEST(cuda_engine_seeds)
{
    static const struct placing reference = RIG_PLACING_HOST,
                                frugal = { 2, 2, 2, STK_ACT_RECOMPUTE, STK_UPDATE_CHASE, 0, 1, true, 0 };
    static bool placed[8192];
    struct result want[NORMS], got;
    const char *asked = getenv("STK_SEEDS");
    const uint64_t n = asked ? strtoull(asked, NULL, 0) : getenv("STK_SOAK") ? 2000 : test_share(24);
    uint64_t bad = 0, placings = 0, products = 0, kernels = 0, spec = 0, undone = 0, skipped = 0;
    tight_bytes = rig_tight(&frugal, 2);
    REQUIRE(tight_bytes > 0);
    for (int w = 0; w < NORMS; w++) REQUIRE(train(&reference, &norms[w], 0, &want[w]));
    for (uint64_t i = 0; i < n && bad < 5; i++) {
        const uint64_t seed = test_seed() + i, w = seed % NORMS;
        const struct placing p = draw(seed);
        bool good = train(&p, &norms[w], seed, &got);
        products += rig_seen.counts.products;
        kernels += rig_seen.counts.kernels;
        spec += got.spec;
        undone += got.undone;
        skipped += got.skipped;
        placings += !placed[index_of(&p) % 8192];
        placed[index_of(&p) % 8192] = true;
        if (good && got.weights == want[w].weights && got.losses == want[w].losses && got.skipped == want[w].skipped) continue;
        bad++;
        rig_placing_print(&p);
        printf("# weights %016" PRIx64 " of %016" PRIx64 ", losses %016" PRIx64 " of %016" PRIx64 "\n", got.weights, want[w].weights,
               got.losses, want[w].losses);
        test_replay(seed, "cuda_engine_seeds");
    }
    printf("# %" PRIu64 " seeds from %" PRIu64 " on, of %d steps, %" PRIu64 " placings, %" PRIu64 " kernels and %" PRIu64
           " products run; %" PRIu64 " chunks updated ahead of the norm, %" PRIu64 " taken back; %" PRIu64 " steps skipped\n", n, test_seed(),
           STEPS, placings, kernels, products, spec, undone, skipped);
    printf("# %u times more of the card was needed than %d KiB\n", refused, (int)(tight_bytes >> 10));
    CHECK(bad == 0);
}
