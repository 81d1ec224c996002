/* tests/gpu/standin/sim.c - the card as a lane of a simulated exec: woken when work is queued and when some of it
 * ends in virtual time.
 *
 * Owns the lane and its two tasks. Must not know what work there is (card.cpp). Simulation's thread. */
#include "base/exec.h"
#include "standin.h"
#include "standin_sim.h"

static struct {
    struct exec *ex;
    struct exec_lane *lane;
    struct exec_task kicked, due;
} sim;

static uint64_t now(void *arg)
{
    (void)arg;
    return exec_now_ns(sim.ex);
}

static void kick(void *arg)
{
    (void)arg;
    if (sim.lane) exec_post(sim.lane, &sim.kicked);
}

static void advance(void *arg)
{
    (void)arg;
    uint64_t next = standin_sim_advance();
    (void)exec_cancel(&sim.due);
    if (next != UINT64_MAX) exec_post_at(sim.lane, &sim.due, next);
}

bool standin_open_sim(const struct standin_cfg *cfg, struct exec *ex)
{
    STK_ASSERT(cfg->mode == STANDIN_SIM && exec_kind_of(ex) == EXEC_SIM);
    sim.ex = ex;
    exec_task_init(&sim.kicked, advance, NULL);
    exec_task_init(&sim.due, advance, NULL);
    if (exec_lane_open(ex, "card", &sim.lane, NULL) != STK_OK) return false;
    standin_sim_attach(now, kick, NULL);
    standin_open(cfg);
    return true;
}

void standin_close_sim(void)
{
    exec_lane_close(sim.lane);
    sim.lane = NULL;
    standin_close();
}
