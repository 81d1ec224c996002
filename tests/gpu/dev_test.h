/* tests/gpu/dev_test.h - what the tests of the device share: a device with one stream, prepared
 * scratch, products' arithmetic. Needs tests/test.h and tests/gpu/kern_test.h before it. */
#ifndef TESTS_GPU_DEV_TEST_H
#define TESTS_GPU_DEV_TEST_H

#include "gpu/host/host_impl.h"

struct rig {
    struct exec *ex;
    struct dev *d;
    struct dev_stream *s;
    struct stk_error err;
};

static inline stk_status rig_open(struct rig *r, enum exec_kind exec, struct dev_cfg cfg)
{
    *r = (struct rig){ 0 };
    stk_status st = exec == EXEC_SIM ? exec_open_sim(test_seed(), &r->ex, &r->err)
                                     : exec_open_threads(&r->ex, &r->err);
    cfg.ex = r->ex;
    if (!cfg.compute_threads) cfg.compute_threads = 2;
    if (st == STK_OK) st = dev_open(&cfg, &r->d, &r->err);
    if (st == STK_OK) st = dev_stream_open(r->d, "compute", 0, &r->s, &r->err);
    return st;
}

static inline void rig_close(struct rig *r)
{
    dev_stream_close(r->s);
    dev_close(r->d);
    exec_close(r->ex);
}

/* oneDNN may have no bf16 products on a processor: such a test is skipped, not failed. */
static inline bool rig_bf16_possible(void)
{
    struct rig r;
    bool possible =
        rig_open(&r, EXEC_THREADS,
                 (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_BF16 }) == STK_OK;
    rig_close(&r);
    return possible;
}

#endif
