/* tests/nvme/store_world.h - a store on a world, and puts and gets one at a time. */
#ifndef TESTS_NVME_STORE_WORLD_H
#define TESTS_NVME_STORE_WORLD_H

#include "tests/nvme/world.h"

static inline stk_status store_world_open(struct world *w, struct store_cfg *cfg,
                                          struct store **out, struct stk_error *err)
{
    cfg->io = w->io;
    cfg->ex = w->ex;
    cfg->lane = w->lane;
    cfg->sim_disk = w->disk;
    if (cfg->n_paths == 0) cfg->n_paths = 1;
    if (!cfg->paths[0]) cfg->paths[0] = w->dir;
    if (cfg->room == 0) cfg->room = 1;
    return store_open(cfg, out, err);
}

struct op_call {
    struct store *s;
    struct store_op *ops;
    uint32_t n;
    bool put;
    uint32_t done;
    stk_status refused;
};

static inline void op_done(struct store_op *op) { ((struct op_call *)op->owner)->done++; }

static inline void op_start(void *arg)
{
    struct op_call *c = arg;
    for (uint32_t i = 0; i < c->n; i++) {
        c->ops[i].done = op_done;
        c->ops[i].owner = c;
        stk_status s = c->put ? store_put(c->s, &c->ops[i], &c->ops[i].error)
                              : store_get(c->s, &c->ops[i], &c->ops[i].error);
        if (s != STK_OK) {
            c->refused = s;
            c->ops[i].status = s;
        }
    }
}

/* STK_OK: all were accepted and have ended; each has its own status. */
static inline stk_status ops_run(struct world *w, struct store *s, struct store_op *ops, uint32_t n,
                                 bool put)
{
    struct op_call c = { .s = s, .ops = ops, .n = n, .put = put };
    struct stk_error err = { 0 };
    world_run(w, op_start, &c);
    if (c.refused != STK_OK) return c.refused;
    stk_status status = store_drain(s, UINT64_MAX, &err);
    if (status != STK_OK) {
        for (uint32_t i = 0; i < n; i++) stk_error_forward(&ops[i].error, &err);
        return status;
    }
    return c.done == n ? STK_OK : STK_ERR_STATE;
}

static inline stk_status put_one(struct world *w, struct store *s, uint32_t extent, void *buf,
                                 uint64_t version, struct store_op *op)
{
    *op =
        (struct store_op){ .extent = extent, .buf = buf, .version = version, .cls = IO_WRITE_BACK };
    stk_status status = ops_run(w, s, op, 1, true);
    return status != STK_OK ? status : op->status;
}

static inline stk_status get_one(struct world *w, struct store *s, uint32_t extent, void *buf,
                                 uint64_t version, struct store_op *op)
{
    *op = (struct store_op){ .extent = extent, .buf = buf, .version = version, .cls = IO_DEMAND };
    stk_status status = ops_run(w, s, op, 1, false);
    return status != STK_OK ? status : op->status;
}

/* --- commits ---------------------------------------------------------------------------------- */

struct commit_call {
    struct store *s;
    struct store_commit c;
    stk_status refused;
    struct stk_error err;
    bool done;
};

static inline void commit_done(struct store_commit *c)
{
    ((struct commit_call *)c->owner)->done = true;
}

static inline void commit_start(void *arg)
{
    struct commit_call *call = arg;
    call->c.done = commit_done;
    call->c.owner = call;
    call->refused = store_commit_submit(call->s, &call->c, &call->err);
}

/* Submits and waits. What was refused, or how it ended; the sentence is in call->err. */
static inline stk_status commit_one(struct world *w, struct store *s, uint64_t step,
                                    const void *payload, uint64_t payload_bytes,
                                    struct commit_call *call)
{
    *call = (struct commit_call){
        .s = s, .c = { .step = step, .payload = payload, .payload_bytes = payload_bytes }
    };
    world_run(w, commit_start, call);
    if (call->refused != STK_OK) return call->refused;
    stk_status status = store_drain(s, UINT64_MAX, &call->err);
    if (status != STK_OK) return status;
    if (!call->done) return STK_ERR_STATE;
    stk_error_forward(&call->err, &call->c.error);
    return call->c.status;
}

#endif
