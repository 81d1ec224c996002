/* tests/gpu/cuda/engine_rig.h - the engine on the CUDA device on the stand-in, as the toy client of the engine's tests
 * uses it; linked with --wrap for the names below.
 *
 * The engine refuses `cuda` in simulation, as a card keeps its own time; the stand-in's does not. So host:discrete
 * is asked for, and dev_open, wrapped, opens the card on a simulated exec instead; its time is the stand-in's, and the
 * update's what rig_card.update_bytes_per_s says. With threads `cuda` itself is asked for. */
#ifndef TESTS_GPU_CUDA_ENGINE_RIG_H
#define TESTS_GPU_CUDA_ENGINE_RIG_H

#include "engine/engine.h"
#include "nvme/io_sim.h"
#include "tests/engine/world.h"
#include "tests/gpu/cuda/device_rig.h"

/* Of the next card; a test sets what it needs and rig_card_new resets the rest. */
static struct rig_card {
    struct standin_cfg cfg;
    double update_bytes_per_s;
    enum standin_plant plant;
    uint64_t plant_at;              /* 0: nothing */
    uint64_t fail_at, fail_kernel_at; /* calls and kernels from the opening on; 0: none */
    void (*closing)(void);          /* the trace is still there */
} rig_card;

/* Of the last card that was closed. */
static struct rig_seen {
    uint64_t hash, found, kinds[STANDIN_FOUND_N], left, calls, places[STANDIN_PLANTS];
    struct standin_counts counts;
    char finding[512], failed_call[64];
} rig_seen;

static inline void rig_card_new(uint64_t seed, bool plain)
{
    rig_card = (struct rig_card){ .update_bytes_per_s = 10e9,
                                  .cfg = { .mode = STANDIN_SIM, .seed = seed, .context_bytes = 1 << 20, .plain = plain, .unordered = plain,
                                           .copy_in_bytes_per_s = 2e9, .copy_out_bytes_per_s = 2e9 } };
}

stk_status __real_dev_open(const struct dev_cfg *cfg, struct dev **out, struct stk_error *err);
stk_status __wrap_dev_open(const struct dev_cfg *cfg, struct dev **out, struct stk_error *err);
void __real_dev_close(struct dev *d);
void __wrap_dev_close(struct dev *d);
void __wrap_dev_model_read(const struct dev *d, struct dev_model *out);

void __wrap_dev_model_read(const struct dev *d, struct dev_model *out)
{
    const struct standin_cfg *c = &rig_card.cfg;
    *out = (struct dev_model){ .flops_per_s = 40e12, .copy_in_bytes_per_s = c->copy_in_bytes_per_s,
                               .copy_out_bytes_per_s = c->copy_out_bytes_per_s, .memory_bytes_per_s = 400e9,
                               .launch_ns = 3000, .update_bytes_per_s = rig_card.update_bytes_per_s };
    (void)d;
}

static void rig_look(void)
{
    standin_counts_read(&rig_seen.counts);
    const struct standin_counts *c = &rig_seen.counts;
    rig_seen.hash = standin_trace_hash();
    rig_seen.found = standin_found_any();
    for (int k = 0; k < STANDIN_FOUND_N; k++) rig_seen.kinds[k] = standin_found((enum standin_found)k);
    for (int k = 0; k < STANDIN_PLANTS; k++) rig_seen.places[k] = standin_plant_places((enum standin_plant)k);
    rig_seen.left = c->live_allocations + c->live_streams + c->live_events + c->live_registrations + c->live_descriptors;
    const char *f = standin_finding(0), *call = standin_failed_call();
    snprintf(rig_seen.finding, sizeof rig_seen.finding, "%s", f ? f : "");
    snprintf(rig_seen.failed_call, sizeof rig_seen.failed_call, "%s", call ? call : "");
    if (rig_seen.found && !rig_card.plant_at) rig_show();
    if (rig_card.cfg.mode == STANDIN_SIM) standin_close_sim();
    else standin_close();
}

stk_status __wrap_dev_open(const struct dev_cfg *cfg, struct dev **out, struct stk_error *err)
{
    struct dev_cfg c = *cfg;
    memset(&rig_seen, 0, sizeof rig_seen);
    if (rig_card.cfg.mode == STANDIN_THREAD) standin_open(&rig_card.cfg);
    else if (!standin_open_sim(&rig_card.cfg, cfg->ex)) abort();
    c.kind = DEV_CUDA;
    if (rig_card.plant_at) standin_plant(rig_card.plant, rig_card.plant_at);
    if (rig_card.fail_at) standin_fail(NULL, rig_card.fail_at, cudaErrorUnknown);
    if (rig_card.fail_kernel_at) standin_fail_kernel(rig_card.fail_kernel_at, cudaErrorLaunchFailure);
    stk_status st = __real_dev_open(&c, out, err);
    if (st != STK_OK) rig_look();
    else if (rig_card.cfg.mode == STANDIN_SIM) (*out)->caps.modelled_time = true;
    return st;
}

void __wrap_dev_close(struct dev *d)
{
    if (!d) return;
    if (rig_card.closing) rig_card.closing();
    __real_dev_close(d);
    rig_look();
}

/* --- a toy on a placement ---------------------------------------------------------------------- */

struct placing {
    stk_tier params, opt, grads;
    stk_act act;
    stk_update update;
    stk_accumulate accumulate;
    uint32_t prefetch;
    bool tight;             /* of device memory: no block stays on the card */
    double on_device;       /* part of the parameters whose state is on the card */
};
#define RIG_PLACING_HOST { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, STK_ACT_KEEP, STK_UPDATE_SERIAL, STK_ACCUMULATE_LAYER, 2, false, 0 }

static inline void rig_placing_print(const struct placing *p)
{
    printf("# params %d opt %d grads %d act %d update %d accumulate %d prefetch %u tight %d on device %g\n", p->params, p->opt, p->grads,
           p->act, p->update, p->accumulate, p->prefetch, p->tight, p->on_device);
}

/* The simulated disk of a run; `disk` is the caller's to free. */
static inline struct io_sim_cfg rig_disk(uint64_t seed)
{
    struct io_sim_cfg sim = { .seed = seed, .latency_ns = 20000, .read_bytes_per_s = 1e9, .write_bytes_per_s = 1e9 };
    struct stk_error err = { 0 };
    if (io_sim_disk_new(64u << 20, &sim.disk, &err) != STK_OK) abort();
    return sim;
}

static inline void rig_toy(struct toy *t, const struct placing *p, uint64_t seed, const struct io_sim_cfg *disk)
{
    toy_init(t, 2, 2);
    t->rows = 8;
    t->cfg.poison = false; /* the card's memory is, by the stand-in */
    t->cfg.params = p->params;
    t->cfg.optimizer_state = p->opt;
    t->cfg.grads = p->grads;
    t->cfg.activations = p->act;
    t->cfg.update = p->update;
    t->cfg.accumulate = p->accumulate;
    t->cfg.prefetch = p->prefetch;
    t->cfg.optimizer_on_device = p->on_device;
    t->cfg.device = rig_card.cfg.mode == STANDIN_SIM ? STK_DEVICE_HOST_DISCRETE : STK_DEVICE_CUDA;
    t->cfg.simulate = rig_card.cfg.mode == STANDIN_SIM;
    t->cfg.seed = seed;
    t->cfg.nvme[0] = "disk";
    t->cfg.storage = STK_STORAGE_SIM;
    t->cfg.sim_disk = disk;
    if (rig_card.cfg.mode == STANDIN_SIM) return;
    t->cfg.storage = STK_STORAGE_POSIX;
    t->cfg.nvme[0] = world_dir("nvme");
}

/* What the card must have for this placing, and no more: the least --device-memory that is not refused; 0: none is enough. */
static inline uint64_t rig_tight(const struct placing *p, uint32_t layers)
{
    struct io_sim_cfg disk = rig_disk(1);
    uint64_t refused = 64u << 20, taken = 0;
    for (uint64_t cap = 256u << 20; cap - refused > (16u << 10); cap = (refused + (taken ? taken : cap)) / 2) {
        struct toy t;
        rig_card_new(1, true);
        rig_toy(&t, p, 1, &disk);
        t.layers = layers;
        t.cfg.device_memory = cap;
        stk_status st = stk_open(&t.cfg, &t.e);
        if (st == STK_OK) st = toy_describe(&t);
        if (st == STK_OK) st = stk_seal(t.e, true);
        stk_close(t.e);
        if (st == STK_OK) taken = cap;
        else refused = cap;
        if (!taken) break;
    }
    io_sim_disk_free(disk.disk);
    return taken;
}

#endif
