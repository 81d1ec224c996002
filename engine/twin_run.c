/* engine/twin_run.c - the update of a chunk that lies on the device (engine/twin.h).
 *
 * Engine lane. Queues one operation and asks to be told; the device computes. Must not know which blocks
 * lie there, nor why. */
#include "engine/twin.h"
#include "gpu/ops.h"
#include "offload/adam_device.h"

static void finish(struct run_op *op)
{
    stk_engine *e = op->e;
    e->twin.busy[op->set] = false;
    run_op_give(e, PLAN_UPDATE_STREAM, op);
}

static void updated(void *arg)
{
    struct run_op *op = arg;
    stk_engine *e = op->e;
    const uint32_t node = op->node;
    struct stk_error err = { 0 };
    if (dev_status(e->dev, &err) != STK_OK) run_fail(e, &err);
    e->layout->chunks[e->run.plan->nodes[node].chunk].version = e->update_version;
    finish(op);
    run_complete(e, node);
    exec_post(e->lane, &e->pump_task);
}

bool twin_issue_update(stk_engine *e, uint32_t node)
{
    struct eng_twin *t = &e->twin;
    struct run_op *op = run_op_take(e, PLAN_UPDATE_STREAM, node);
    if (!op) return false;
    const struct stk_chunk *c = &e->layout->chunks[e->run.plan->nodes[node].chunk];
    struct ops_adam a;
    struct stk_error err = { 0 };
    for (op->set = 0; t->busy[op->set]; op->set++) STK_ASSERT(op->set + 1 < TWIN_IN_FLIGHT);
    t->busy[op->set] = true;
    adam_device_chunk(e->layout, c, &e->coef, c->device[CHUNK_PARAM], c->device[CHUNK_OPT],
                      c->device[CHUNK_GRAD], t->spans + (uint64_t)op->set * t->spans_max, &a);
    stk_status st = ops_adam(e->update, &a, &err);
    exec_task_init(&op->task, updated, op);
    if (st == STK_BUSY) { /* nothing is queued: the node is issued again */
        finish(op);
        return false;
    }
    if (st == STK_OK) st = dev_notify(e->update, e->lane, &op->task, NULL, &err);
    if (st == STK_OK) return true;
    finish(op); /* also where only the notification found no room: another update would be one too many */
    run_fail(e, &err);
    return true;
}
