/* tests/nvme/io_batch.h - requests submitted in one task of the lane, and waited for. */
#ifndef TESTS_NVME_IO_BATCH_H
#define TESTS_NVME_IO_BATCH_H

#include "tests/nvme/world.h"

/* A list of requests submitted in one task. */
struct batch {
    struct world *w;
    struct io_req *reqs;
    uint32_t n, done, order[512];
    stk_status refused;
    struct stk_error err;
};

static inline void batch_done(struct io_req *req)
{
    struct batch *b = req->owner;
    if (b->done < 512) b->order[b->done] = (uint32_t)(req - b->reqs);
    b->done++;
}

static inline void batch_submit(void *arg)
{
    struct batch *b = arg;
    for (uint32_t i = 0; i < b->n; i++) {
        b->reqs[i].done = batch_done;
        b->reqs[i].owner = b;
        stk_status s = io_submit(b->w->io, &b->reqs[i], &b->err);
        if (s != STK_OK) b->refused = s;
    }
    /* done must not run from io_submit */
    if (io_in_flight(b->w->io) > 0 && b->done) b->refused = STK_ERR_STATE;
}

static inline stk_status run_batch(struct world *w, struct io_req *reqs, uint32_t n,
                                   struct stk_error *err)
{
    struct batch b = { .w = w, .reqs = reqs, .n = n };
    world_run(w, batch_submit, &b);
    if (b.refused != STK_OK) return stk_error_forward(err, &b.err);
    STK_TRY(io_drain(w->io, UINT64_MAX, err));
    return b.done == n
               ? STK_OK
               : stk_error_set(err, STK_ERR_STATE, 0, "%u of %u requests called done", b.done, n);
}

static inline stk_status one(struct world *w, struct io_req *req, struct stk_error *err)
{
    req->next = req->prev = NULL;
    req->state = 0;
    return run_batch(w, req, 1, err);
}

#endif
