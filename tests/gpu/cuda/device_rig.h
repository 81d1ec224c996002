/* tests/gpu/cuda/device_rig.h - the product's CUDA device on the stand-in, by threads or in simulation. Needs
 * tests/test.h before it. */
#ifndef TESTS_GPU_CUDA_DEVICE_RIG_H
#define TESTS_GPU_CUDA_DEVICE_RIG_H

#include "gpu/cuda/cuda_impl.h"
#include "tests/gpu/standin/standin.h"

struct rig {
    enum exec_kind kind;
    bool planted; /* a mistake that must be found: not shown again */
    struct exec *ex;
    struct dev *d;
    struct dev_stream *s;
    uint8_t *arena;
    struct stk_error err;
};

#define EACH_EXEC(k_) \
    for (enum exec_kind k_ = EXEC_THREADS; k_ <= EXEC_SIM; k_ = (enum exec_kind)(k_ + 1))

static inline void rig_world(struct rig *r, enum exec_kind kind, uint64_t seed, struct standin_cfg cfg)
{
    *r = (struct rig){ .kind = kind };
    cfg.seed = seed;
    cfg.mode = kind == EXEC_SIM ? STANDIN_SIM : STANDIN_THREAD;
    if ((kind == EXEC_SIM ? exec_open_sim(seed, &r->ex, &r->err) : exec_open_threads(&r->ex, &r->err)) != STK_OK) abort();
    if (kind == EXEC_THREADS) standin_open(&cfg);
    else if (!standin_open_sim(&cfg, r->ex)) abort();
}

/* The device, a stream and, where arena_bytes are given, the arena. */
static inline stk_status rig_device(struct rig *r, enum dev_matmul matmul, uint64_t arena_bytes)
{
    struct dev_cfg cfg = { .kind = DEV_CUDA, .ex = r->ex, .matmul = matmul };
    void *p = NULL;
    STK_TRY(dev_open(&cfg, &r->d, &r->err));
    if (arena_bytes) STK_TRY(dev_reserve(r->d, arena_bytes, &p, &r->err));
    r->arena = p;
    return dev_stream_open(r->d, "compute", 0, &r->s, &r->err);
}

static inline stk_status rig_open(struct rig *r, enum exec_kind kind, uint64_t seed, uint64_t arena_bytes)
{
    rig_world(r, kind, seed, (struct standin_cfg){ 0 });
    return rig_device(r, DEV_MATMUL_F32, arena_bytes);
}

static inline void rig_show(void)
{
    for (uint64_t i = 0; standin_finding(i); i++) printf("# %s\n", standin_finding(i));
}

/* Closes; true: nothing was found and nothing is left. */
static inline bool rig_close_clean(struct rig *r)
{
    struct standin_counts c;
    dev_stream_close(r->s);
    dev_close(r->d);
    standin_counts_read(&c);
    bool clean = standin_found_any() == 0 && c.live_allocations + c.live_streams + c.live_events + c.live_registrations +
                                                     c.live_descriptors == 0;
    if (!clean && !r->planted) {
        rig_show();
        printf("# left: %d allocations, %d streams, %d events, %d registrations, %d descriptors\n", (int)c.live_allocations,
               (int)c.live_streams, (int)c.live_events, (int)c.live_registrations, (int)c.live_descriptors);
    }
    if (r->kind == EXEC_SIM) standin_close_sim();
    else standin_close();
    exec_close(r->ex);
    return clean;
}
#define RIG_CLOSE(r_) CHECK(rig_close_clean(r_))

#endif
