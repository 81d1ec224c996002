/* gpu/host/host_model.c - how long a command takes on the machine that DEV_SIM models, and what it
 * takes meanwhile of what the machine has only once.
 *
 * Pure. Runs on stream lanes. */
#include "gpu/host/host_impl.h"

static double copy_rate(const struct dev_model *m, const struct dev_cmd_copy *c)
{
    double rate = c->dir == DEV_TO_DEVICE ? m->copy_in_bytes_per_s : m->copy_out_bytes_per_s;
    return c->bytes_per_s > 0 && c->bytes_per_s < rate ? c->bytes_per_s : rate;
}

uint64_t host_model_ns(const struct host_dev *h, const struct dev_cmd *cmd)
{
    const struct dev_model *m = &h->model;
    if (cmd->kind == DEV_CMD_COPY && cmd->u.copy.dir != DEV_ON_DEVICE) {
        return m->launch_ns + (uint64_t)((double)cmd->u.copy.size_bytes / copy_rate(m, &cmd->u.copy) * 1e9);
    }
    double bytes = dev_cmd_bytes(cmd);
    if (cmd->kind == DEV_CMD_ADAM) /* all but the gradient is read and written */
        bytes = 2 * bytes - (double)(cmd->u.adam.n * ops_adam_word_bytes(cmd->u.adam.layout));
    double compute_s = dev_cmd_flops(cmd) / m->flops_per_s, memory_s = bytes / m->memory_bytes_per_s;
    return m->launch_ns + (uint64_t)((compute_s > memory_s ? compute_s : memory_s) * 1e9);
}

/* How often both directions at once hold the bytes of one: 1 shared, 2 independent. */
static double link_width(const struct dev_model *m)
{
    double sum = m->copy_both_bytes_per_s;
    double k = sum > 0 ? sum / (2 * m->copy_in_bytes_per_s) + sum / (2 * m->copy_out_bytes_per_s) : 2;
    return k < 1 ? 1 : k > 2 ? 2 : k;
}

struct exec_need host_model_need(const struct host_dev *h, const struct dev_cmd *cmd)
{
    const struct dev_model *m = &h->model;
    struct exec_need need = { { 0 } };
    if (cmd->kind != DEV_CMD_COPY || cmd->u.copy.dir == DEV_ON_DEVICE) return need;
    double rate = copy_rate(m, &cmd->u.copy),
           full = cmd->u.copy.dir == DEV_TO_DEVICE ? m->copy_in_bytes_per_s : m->copy_out_bytes_per_s;
    if (m->dram_bytes_per_s > 0) need.part[EXEC_SHARE_DRAM] = rate / m->dram_bytes_per_s;
    need.part[EXEC_SHARE_LINK] = rate / full / link_width(m);
    return need;
}
