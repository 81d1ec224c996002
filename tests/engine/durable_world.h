/* tests/engine/durable_world.h - what the tests of durable steps share: a toy whose state lies on
 * NVMe twice, on a real folder or on the simulated disk, and the way back to it. */
#ifndef TESTS_ENGINE_DURABLE_WORLD_H
#define TESTS_ENGINE_DURABLE_WORLD_H

#include "engine/engine.h"
#include "nvme/io_sim.h"
#include "tests/engine/mlp.h"

#define RUN_ID "00000000000000a1"

/* `folder` NULL: the simulated disk of cfg.sim_disk. */
static inline void durable_config(stk_config *c, const char *folder, bool adopt)
{
    c->durable = true;
    c->adopt = adopt;
    memcpy(c->run_id, RUN_ID, sizeof RUN_ID);
    c->params = c->optimizer_state = STK_TIER_AUTO;
    c->grads = STK_TIER_NVME;
    if (folder) c->nvme[0] = folder;
}

/* What a run looks like; everything that durable steps must not depend on. */
struct variant {
    stk_update update;
    stk_device_kind device;
    stk_dtype dtype;
    bool tied, freeze;
    int skip; /* the step whose gradient is infinite; 0: none */
};

static inline void variant_toy(struct toy *t, const struct variant *v)
{
    toy_init(t, 2, 2);
    t->rows = 2;
    t->tied = v->tied;
    t->freeze_first = v->freeze;
    t->poison_loss_at = v->skip;
    t->cfg.update = v->update;
    t->cfg.device = v->device;
    t->cfg.dtype = v->dtype;
    t->cfg.poison = false;
}

#endif
