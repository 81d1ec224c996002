/* gpu/host/host_run.c - what a command does on the host: copies, and the way from a command to its
 * kernel.
 *
 * Owns nothing. Must not know streams or marks. host_run: on the stream's lane. host_prepare: on
 * the application's thread. */
#include "gpu/host/host_impl.h"

#include <string.h>

static stk_status run_grad_cast(const struct ops_grad_cast *a)
{
    if (a->gt == OPS_BF16)
        convert_grad_bf16(a->acc, a->out, a->n, a->scale, a->sum);
    else
        convert_grad_fp16(a->acc, a->out, a->n, a->scale, a->sum);
    return STK_OK;
}

/* By threads of the operations, in whole cache lines of every array: the bits do not depend on it. */
static stk_status run_adam(const struct host_dev *h, const struct ops_adam *a, struct stk_error *err)
{
    const uint64_t piece = 16384, pieces = (a->n + piece - 1) / piece;
    const uint32_t threads = pieces < h->ctx.threads ? (uint32_t)pieces : h->ctx.threads;
    dev_adam_fn *fn = h->adam;
    if (!fn)
        return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                             "adam: device %s was opened without the function that computes it "
                             "(dev_cfg.adam)",
                             h->base.caps.name);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (uint64_t i = 0; i < pieces; i++) fn(a, i * piece, i + 1 < pieces ? (i + 1) * piece : a->n);
    return STK_OK;
}

/* Linear layers and the head: the operations whose products need primitives. */
static stk_status run_products(struct host_job *j, const struct dev_cmd *cmd)
{
    switch (cmd->kind) {
    case DEV_CMD_LINEAR_FORWARD: host_linear_forward(j, &cmd->u.linear); break;
    case DEV_CMD_LINEAR_BACKWARD_DATA: host_linear_backward_data(j, &cmd->u.linear); break;
    case DEV_CMD_LINEAR_BACKWARD_WEIGHT: host_linear_backward_weight(j, &cmd->u.linear); break;
    case DEV_CMD_HEAD_FORWARD: host_head(j, &cmd->u.head, false); break;
    case DEV_CMD_HEAD_TRAIN: host_head(j, &cmd->u.head, true); break;
    default: STK_ASSERT(!"not a command with products");
    }
    return j->st;
}

static bool has_products(enum dev_cmd_kind kind)
{
    return kind == DEV_CMD_LINEAR_FORWARD || kind == DEV_CMD_LINEAR_BACKWARD_DATA ||
           kind == DEV_CMD_LINEAR_BACKWARD_WEIGHT || kind == DEV_CMD_HEAD_FORWARD ||
           kind == DEV_CMD_HEAD_TRAIN;
}

static struct ops_scratch cmd_scratch(const struct dev_cmd *cmd)
{
    switch (cmd->kind) {
    case DEV_CMD_LINEAR_FORWARD:
    case DEV_CMD_LINEAR_BACKWARD_DATA:
    case DEV_CMD_LINEAR_BACKWARD_WEIGHT: return cmd->u.linear.scratch;
    case DEV_CMD_RMSNORM_FORWARD:
    case DEV_CMD_RMSNORM_BACKWARD: return cmd->u.rmsnorm.scratch;
    case DEV_CMD_ATTENTION_FORWARD:
    case DEV_CMD_ATTENTION_BACKWARD: return cmd->u.attention.scratch;
    case DEV_CMD_HEAD_FORWARD:
    case DEV_CMD_HEAD_TRAIN: return cmd->u.head.scratch;
    default: return (struct ops_scratch){ 0 };
    }
}

/* Scratch of the operations without products; 0: none. */
static uint64_t kernel_scratch(const struct host_dev *h, const struct dev_cmd *cmd)
{
    switch (cmd->kind) {
    case DEV_CMD_RMSNORM_FORWARD: return host_rmsnorm_scratch(&h->ctx, &cmd->u.rmsnorm, false);
    case DEV_CMD_RMSNORM_BACKWARD: return host_rmsnorm_scratch(&h->ctx, &cmd->u.rmsnorm, true);
    case DEV_CMD_ATTENTION_FORWARD:
        return host_attention_scratch(&h->ctx, &cmd->u.attention, false);
    case DEV_CMD_ATTENTION_BACKWARD:
        return host_attention_scratch(&h->ctx, &cmd->u.attention, true);
    default: return 0;
    }
}

/* Accumulators are large: a memset on one core would take as long as the operations around it. */
static void zero(const struct host_ctx *c, void *dst, uint64_t size_bytes)
{
    const uint64_t piece = 1u << 20;
    uint64_t pieces = (size_bytes + piece - 1) / piece;
    if (pieces < 4) {
        memset(dst, 0, size_bytes);
        return;
    }
#pragma omp parallel for num_threads(c->threads) schedule(static)
    for (uint64_t i = 0; i < pieces; i++) {
        uint64_t at = i * piece;
        memset((uint8_t *)dst + at, 0, size_bytes - at < piece ? size_bytes - at : piece);
    }
}

static stk_status run_kernel(const struct host_ctx *c, const struct dev_cmd *cmd)
{
    switch (cmd->kind) {
    case DEV_CMD_EMBED_FORWARD: host_embed_forward(c, &cmd->u.embed); break;
    case DEV_CMD_EMBED_BACKWARD: host_embed_backward(c, &cmd->u.embed); break;
    case DEV_CMD_RMSNORM_FORWARD: host_rmsnorm_forward(c, &cmd->u.rmsnorm); break;
    case DEV_CMD_RMSNORM_BACKWARD: host_rmsnorm_backward(c, &cmd->u.rmsnorm); break;
    case DEV_CMD_ROPE: host_rope(c, &cmd->u.rope); break;
    case DEV_CMD_ATTENTION_FORWARD: host_attention_forward(c, &cmd->u.attention); break;
    case DEV_CMD_ATTENTION_BACKWARD: host_attention_backward(c, &cmd->u.attention); break;
    case DEV_CMD_SWIGLU_FORWARD: host_swiglu_forward(c, &cmd->u.swiglu); break;
    case DEV_CMD_SWIGLU_BACKWARD: host_swiglu_backward(c, &cmd->u.swiglu); break;
    case DEV_CMD_ADD:
        host_add(c, cmd->u.add.at, cmd->u.add.n, cmd->u.add.a, cmd->u.add.b, cmd->u.add.y);
        break;
    case DEV_CMD_ACC_ADD:
        host_acc_add(c, cmd->u.acc_add.n, cmd->u.acc_add.acc, cmd->u.acc_add.src,
                     cmd->u.acc_add.st);
        break;
    case DEV_CMD_GRAD_CAST: return run_grad_cast(&cmd->u.grad_cast);
    case DEV_CMD_COPY: memmove(cmd->u.copy.dst, cmd->u.copy.src, cmd->u.copy.size_bytes); break;
    case DEV_CMD_ZERO: zero(c, cmd->u.zero.dst, cmd->u.zero.size_bytes); break;
    default: STK_ASSERT(!"not a command that computes");
    }
    return STK_OK;
}

static stk_status run_cmd(struct host_job *j, const struct dev_cmd *cmd)
{
    if (has_products(cmd->kind)) return run_products(j, cmd);
    if (cmd->kind == DEV_CMD_ADAM) return run_adam(j->h, &cmd->u.adam, j->err);
    uint64_t need = kernel_scratch(j->h, cmd);
    if (need > j->scratch.size_bytes || (need && !j->scratch.base))
        return stk_error_set(
            j->err, STK_ERR_DEVICE, 0,
            "%s: needs %llu bytes of scratch, has %llu; declare what prepare mode reports", j->op,
            (unsigned long long)need,
            (unsigned long long)(j->scratch.base ? j->scratch.size_bytes : 0));
    return run_kernel(&j->h->ctx, cmd);
}

/* --- counting --------------------------------------------------------------------------------- */

void host_count(struct host_dev *h, uint32_t row, uint64_t ns, double flops, double bytes)
{
    dev_tally_add(&h->work[row], ns, flops, bytes);
}

uint32_t host_work_read(const struct dev *d, struct dev_work out[DEV_WORK_MAX])
{
    const struct host_dev *h = (const struct host_dev *)d;
    uint32_t n = 0;
    _Static_assert(HOST_WORK_N <= DEV_WORK_MAX, "every kind has a row");
    n += dev_tally_row(&h->work[HOST_WORK_PRODUCT], "product", &out[n]);
    for (uint32_t k = 0; k < DEV_CMD_N; k++)
        n += dev_tally_row(&h->work[k], dev_cmd_name((enum dev_cmd_kind)k), &out[n]);
    return n;
}

stk_status host_run(struct host_dev *h, const struct dev_cmd *cmd, struct stk_error *err)
{
    struct host_job j = {
        .h = h, .scratch = cmd_scratch(cmd), .err = err, .op = dev_cmd_name(cmd->kind)
    };
    uint64_t start_ns = exec_now_ns(h->base.ex);
    stk_status st = run_cmd(&j, cmd);
    uint64_t ns = exec_now_ns(h->base.ex) - start_ns - j.product_ns;
    /* The FLOPs of products are in their own row. */
    host_count(h, cmd->kind, ns, has_products(cmd->kind) ? 0 : dev_cmd_flops(cmd),
               dev_cmd_bytes(cmd));
    return st;
}

stk_status host_prepare(struct dev *d, const struct dev_cmd *cmd, uint64_t *scratch_bytes,
                        struct stk_error *err)
{
    struct host_dev *h = host_of(d);
    if (!has_products(cmd->kind)) {
        *scratch_bytes = kernel_scratch(h, cmd);
        return STK_OK;
    }
    struct host_job j = { .h = h, .dry = true, .err = err, .op = dev_cmd_name(cmd->kind) };
    stk_status st = run_products(&j, cmd);
    /* for another machine: what this processor's library cannot do is no obstacle; its own scratch
     * is then not counted */
    if (st != STK_OK && !(h->plan_only && st == STK_ERR_DEVICE)) return st;
    *scratch_bytes = j.used_bytes + j.pad_bytes;
    d->caps.library_bytes = host_matmul_library_bytes(h->matmul);
    return STK_OK;
}
