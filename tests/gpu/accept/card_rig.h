/* tests/gpu/accept/card_rig.h - the rig of tests/gpu/cuda/device_rig.h on the first card that CUDA shows: included ahead of
 * that test (meson.build), which then compares the operations of a real card. Nothing is planted here, nothing found. */
#ifndef TESTS_GPU_CUDA_DEVICE_RIG_H
#define TESTS_GPU_CUDA_DEVICE_RIG_H

#include "base/convert.h"
#include "base/exec.h"
#include "gpu/device.h"
#include "gpu/ops.h"
#include "tests/test.h"

struct rig {
    struct exec *ex;
    struct dev *d;
    struct dev_stream *s;
    uint8_t *arena;
    struct stk_error err;
};

static inline stk_status rig_open(struct rig *r, enum exec_kind kind, uint64_t seed, uint64_t arena_bytes)
{
    void *p = NULL;
    (void)kind, (void)seed;
    *r = (struct rig){ 0 };
    STK_TRY(exec_open_threads(&r->ex, &r->err));
    struct dev_cfg cfg = { .kind = DEV_CUDA, .ex = r->ex, .matmul = DEV_MATMUL_F32 };
    STK_TRY(dev_open(&cfg, &r->d, &r->err));
    STK_TRY(dev_reserve(r->d, arena_bytes, &p, &r->err));
    r->arena = p;
    return dev_stream_open(r->d, "compute", 0, &r->s, &r->err);
}

static inline void rig_close(struct rig *r)
{
    dev_stream_close(r->s);
    dev_close(r->d);
    exec_close(r->ex);
}
#define RIG_CLOSE(r_) rig_close(r_)

#endif
