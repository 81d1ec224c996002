/* tests/gpu/cuda/test_engine.c - the engine on the CUDA device on the stand-in: steps of the toy client have the same
 * bits under every order of streams that the stand-in chooses and every placement; nothing is found (races, freed or
 * unwritten memory), no copy is pageable, no call waits for the card in a step; copies and compute overlap in virtual
 * time. A planted mistake is found.
 *
 * The engine refuses `cuda` in simulation, as a card keeps its own time; the stand-in's does not. So it is asked for
 * host:discrete, and dev_open, wrapped, opens the card instead. */
#include "tests/engine/world.h"
#include "tests/gpu/cuda/device_rig.h"

TEST_MAIN()

static struct { uint64_t seed; bool unordered; } card_cfg;

stk_status __real_dev_open(const struct dev_cfg *cfg, struct dev **out, struct stk_error *err);
stk_status __wrap_dev_open(const struct dev_cfg *cfg, struct dev **out, struct stk_error *err);
void __real_dev_close(struct dev *d);
void __wrap_dev_close(struct dev *d);

stk_status __wrap_dev_open(const struct dev_cfg *cfg, struct dev **out, struct stk_error *err)
{
    struct dev_cfg c = *cfg;
    const struct standin_cfg s = { .mode = STANDIN_SIM, .seed = card_cfg.seed, .unordered = card_cfg.unordered,
                                   .copy_in_bytes_per_s = 2e9, .copy_out_bytes_per_s = 2e9 };
    c.kind = DEV_CUDA;
    c.memory_bytes = 0;
    if (!standin_open_sim(&s, cfg->ex)) abort();
    return __real_dev_open(&c, out, err);
}

static struct seen {
    uint64_t hash, found, pageable, overlap_in, overlap_out, left;
} seen; /* of the last card that was closed */

void __wrap_dev_close(struct dev *d)
{
    struct standin_counts c;
    if (!d) return;
    __real_dev_close(d);
    standin_counts_read(&c);
    seen = (struct seen){ .hash = standin_trace_hash(),
                          .found = standin_found_any(),
                          .pageable = c.copies_pageable,
                          .overlap_in = standin_overlap_ns(STANDIN_LINK_IN, STANDIN_COMPUTE),
                          .overlap_out = standin_overlap_ns(STANDIN_LINK_OUT, STANDIN_COMPUTE),
                          .left = c.live_allocations + c.live_streams + c.live_events + c.live_registrations };
    if (seen.found || seen.pageable) rig_show();
    standin_close_sim();
}

struct variant {
    const char *name;
    stk_tier params, state, grads;
    stk_act act;
    stk_update update;
    double on_device; /* part of the parameters whose state is on the card */
};
static const struct variant variants[] = {
    { "host memory", STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, STK_ACT_KEEP, STK_UPDATE_SERIAL },
    { "update under the forward", STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, STK_ACT_RECOMPUTE, STK_UPDATE_CHASE },
    { "state on NVMe", STK_TIER_HOST, STK_TIER_NVME, STK_TIER_NVME, STK_ACT_HOST, STK_UPDATE_SPLIT },
    { "all on NVMe", STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_ACT_RECOMPUTE, STK_UPDATE_CHASE },
    { "half of the state on the card", STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, STK_ACT_HOST, STK_UPDATE_CHASE, 0.5 },
    { "a layer's on the card", STK_TIER_AUTO, STK_TIER_AUTO, STK_TIER_AUTO, STK_ACT_KEEP, STK_UPDATE_SPECULATE, 0.15 },
    { "as much as the card has room for", STK_TIER_AUTO, STK_TIER_AUTO, STK_TIER_AUTO, STK_ACT_RECOMPUTE, STK_UPDATE_SPLIT,
      STK_ON_DEVICE_AUTO },
};
enum { VARIANTS = sizeof variants / sizeof variants[0], STEPS = 3 };

static void train(const struct variant *v, uint64_t seed, uint64_t *hash, double *loss)
{
    struct toy t;
    struct standin_counts before, after;
    toy_init(&t, 2, 2);
    t.rows = 8;
    t.cfg.params = v->params;
    t.cfg.optimizer_state = v->state;
    t.cfg.grads = v->grads;
    t.cfg.activations = v->act;
    t.cfg.update = v->update;
    t.cfg.optimizer_on_device = v->on_device;
    t.cfg.device = STK_DEVICE_HOST_DISCRETE;
    t.cfg.simulate = true;
    t.cfg.seed = seed;
    t.cfg.nvme[0] = world_dir("nvme");
    card_cfg.seed = seed;
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    CHECK((world_table(t.e, "device", "optimizer state on the device") > 0) == (v->on_device != 0));
    for (int i = 0; i < STEPS; i++) {
        if (i == 1 && v->on_device != 0) /* beside the next steps: of what is on the card, too */
            RUN(&t, stk_save_begin(t.e, world_dir("checkpoints"), NULL, 1));
        standin_counts_read(&before);
        RUN(&t, toy_step(&t, 1e-3, NULL));
        standin_counts_read(&after);
        CHECK(after.synchronisations == before.synchronisations && after.allocations == before.allocations &&
              after.registrations == before.registrations && after.device_synchronisations == 0);
    }
    RUN(&t, stk_save_wait(t.e));
    *loss = t.last_loss;
    RUN(&t, toy_hash(&t, hash));
    stk_close(t.e);
    CHECK(seen.found == 0 && seen.pageable == 0 && seen.left == 0);
}

TEST(cuda_engine_same_bits_over_orders_and_placements)
{
    uint64_t first = 0, orders = 0, last = 0;
    double loss = 0, first_loss = 0;
    for (int v = 0; v < VARIANTS; v++)
        for (uint64_t i = 0; i < test_share(6); i++) {
            uint64_t hash = 0;
            train(&variants[v], test_seed() + i * 7 + (uint64_t)v, &hash, &loss);
            if (!first) first = hash, first_loss = loss;
            CHECK(hash == first && loss == first_loss);
            orders += seen.hash != last;
            last = seen.hash;
            if (i == 0)
                printf("# %s: loss %.6f, compute beside copies in %.0f us, out %.0f us\n", variants[v].name, loss,
                       (double)seen.overlap_in / 1e3, (double)seen.overlap_out / 1e3);
        }
    CHECK(first != 0 && orders > 2 && isfinite(loss));
}
