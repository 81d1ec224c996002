/* tests/gpu/cuda/test_engine.c - the engine on the CUDA device on the stand-in, with every access of every kernel
 * checked: steps of the toy client have the same bits under every order of streams and every placement, nothing is
 * found, no copy is pageable, no call waits for the card in a step. Planted mistakes are found: a wait for the card that is
 * missing, memory of the card freed too early, host memory that is not pinned. Thousands of
 * orders are test_engine_seeds.c's. */
#include "tests/gpu/cuda/engine_rig.h"

TEST_MAIN()

enum { STEPS = 3 };

static const struct { const char *name; struct placing p; } placings[] = {
    { "host memory", RIG_PLACING_HOST },
    { "update under the forward", { 2, 2, 2, STK_ACT_RECOMPUTE, STK_UPDATE_CHASE, 0, 2, true, 0 } },
    { "state on NVMe", { 2, 3, 3, STK_ACT_HOST, STK_UPDATE_SPLIT, 1, 1, false, 0 } },
    { "speculating", { 2, 2, 2, STK_ACT_KEEP, STK_UPDATE_SPECULATE, 0, 2, true, 0 } },
    { "all on NVMe", { 3, 3, 3, STK_ACT_RECOMPUTE, STK_UPDATE_CHASE, 0, 2, true, 0 } },
    { "half of the state on the card", { 2, 2, 2, STK_ACT_HOST, STK_UPDATE_CHASE, 0, 2, false, 0.5 } },
    { "a layer's on the card", { 0, 0, 0, STK_ACT_KEEP, STK_UPDATE_SPECULATE, 0, 2, false, 0.15 } },
    { "as much as the card has room for", { 0, 0, 0, STK_ACT_RECOMPUTE, STK_UPDATE_SPLIT, 0, 2, false, STK_ON_DEVICE_AUTO } },
};
enum { PLACINGS = sizeof placings / sizeof placings[0], PLANTED = 5 };

/* The least device memory that takes the frugal placings: found once. */
static uint64_t tight_bytes;

struct outcome {
    stk_status st;
    uint64_t hash, pinning, waits; /* calls in the steps that must not be there */
    char text[512];
};

static struct outcome train(const struct placing *p, uint64_t seed)
{
    struct toy t;
    struct outcome o = { 0 };
    struct standin_counts before, after;
    struct io_sim_cfg disk = rig_disk(seed);
    rig_card.cfg.seed = seed;
    rig_toy(&t, p, seed, &disk);
    if (p->tight) t.cfg.device_memory = tight_bytes;
    o.st = toy_open(&t);
    if (o.st == STK_OK) o.st = toy_fill(&t);
    if (o.st == STK_OK) CHECK((world_table(t.e, "device", "optimizer state on the device") > 0) == (p->on_device != 0));
    for (int i = 0; o.st == STK_OK && i < STEPS; i++) {
        if (i == 1 && p->on_device != 0) /* beside the next steps: of what is on the card, too */
            o.st = stk_save_begin(t.e, world_dir("checkpoints"), NULL, 1);
        if (o.st != STK_OK) break;
        standin_counts_read(&before);
        o.st = toy_step(&t, 1e-3, NULL);
        standin_counts_read(&after);
        o.waits += after.synchronisations - before.synchronisations + after.device_synchronisations;
        o.pinning += after.allocations + after.registrations - before.allocations - before.registrations;
    }
    if (o.st == STK_OK && p->on_device != 0) o.st = stk_save_wait(t.e);
    if (o.st == STK_OK) o.st = toy_hash(&t, &o.hash);
    snprintf(o.text, sizeof o.text, "%s", t.e ? stk_error_text(t.e) : "?");
    stk_close(t.e);
    io_sim_disk_free(disk.disk);
    return o;
}

static bool clean(const struct outcome *o)
{
    bool good = o->st == STK_OK && rig_seen.found == 0 && rig_seen.counts.copies_pageable == 0 && rig_seen.left == 0 &&
                o->waits == 0 && o->pinning == 0;
    if (!good)
        printf("# %s: %s; found %d, pageable %d, left %d, waits %d, allocations %d\n", stk_status_name(o->st), o->text,
               (int)rig_seen.found, (int)rig_seen.counts.copies_pageable, (int)rig_seen.left, (int)o->waits, (int)o->pinning);
    return good;
}

static uint64_t want; /* the hash of every run */

TEST(cuda_engine_same_bits_over_orders_and_placements)
{
    uint64_t orders = 0, last = 0;
    tight_bytes = rig_tight(&placings[3].p, 2);
    printf("# the frugal placings have %d KiB of the card\n", (int)(tight_bytes >> 10));
    REQUIRE(tight_bytes > 0);
    for (int v = 0; v < PLACINGS; v++)
        for (uint64_t i = 0; i < test_share(getenv("STK_SOAK") ? 100 : 4); i++) {
            rig_card_new(0, false);
            struct outcome o = train(&placings[v].p, test_seed() + i * 7 + (uint64_t)v);
            CHECK(clean(&o));
            if (!want) want = o.hash;
            if (o.hash != want) printf("# %s, seed %d: another hash\n", placings[v].name, (int)i);
            CHECK(o.hash == want);
            orders += rig_seen.hash != last;
            last = rig_seen.hash;
        }
    CHECK(want != 0 && orders >= PLACINGS);
}

TEST(cuda_engine_same_bits_by_threads)
{
    for (uint64_t i = 0; i < test_share(4); i++) {
        rig_card_new(0, false);
        rig_card.cfg.mode = STANDIN_THREAD;
        struct outcome o = train(&placings[i % 3].p, test_seed() + i);
        CHECK(clean(&o) && o.hash == want);
    }
}

/* --- planted ------------------------------------------------------------------------------------ */

struct tally { uint64_t places, found, same, missed; };

/* Each place (every `by`-th) of a mistake, once. Found: by a finding, or because the run failed. Missed: the bits are
 * others and nobody says so. */
static struct tally plant(enum standin_plant what, int v, uint64_t by)
{
    struct tally y = { 0 };
    rig_card_new(0, false);
    (void)train(&placings[v].p, test_seed());
    y.places = rig_seen.places[what];
    for (uint64_t n = 1; n <= y.places; n += by) {
        rig_card_new(0, false);
        rig_card.plant = what;
        rig_card.plant_at = n;
        struct outcome o = train(&placings[v].p, test_seed() + n);
        bool found = rig_seen.found || rig_seen.counts.copies_pageable || o.st != STK_OK;
        if (found && y.found++ == 0) printf("# %s\n", rig_seen.finding[0] ? rig_seen.finding : o.text);
        if (!found && o.hash == want) y.same++;
        if (!found && o.hash != want) {
            y.missed++;
            printf("# place %d: other bits, and nothing is found\n", (int)n);
        }
    }
    printf("# %s: of %d places, every %d. tried: %d found, %d without effect, %d missed\n", placings[v].name, (int)y.places,
           (int)by, (int)y.found, (int)y.same, (int)y.missed);
    return y;
}

/* The engine's waits for the card are notifications (between two visits there is stream order alone): one that comes before
 * the work in front of it is a wait that is missing, and a buffer given back too early. Notifications that only give slots of the
 * queue back, or whose work was done anyway, have no effect. Waits of events are test_device.c's. */
TEST(cuda_engine_a_removed_wait_is_found)
{
    uint64_t found = 0;
    for (int v = 1; v < PLANTED; v++) {
        struct tally y = plant(STANDIN_PLANT_EARLY, v, getenv("STK_SOAK") ? 1 : test_brief() ? 131 : 61);
        CHECK(y.places > 100 && y.missed == 0);
        found += y.found;
    }
    CHECK(found > 0);
}

TEST(cuda_engine_memory_freed_early_is_found)
{
    struct tally y = plant(STANDIN_PLANT_FREE, 1, getenv("STK_SOAK") ? 7 : test_brief() ? 599 : 399);
    CHECK(y.places > 1000 && y.found > 0 && y.missed == 0 && y.same <= 1); /* the last operation of a run may need it no more */
}

TEST(cuda_engine_pageable_memory_is_found)
{
    for (int v = 1; v < PLANTED; v++) {
        struct tally y = plant(STANDIN_PLANT_UNPINNED, v, 1);
        CHECK(y.places > 0 && y.found >= 3 && y.missed == 0); /* some arenas are for the drives alone */
    }
}
