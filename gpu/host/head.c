/* gpu/host/head.c - the language head and its loss by token tiles: logits, log-sum-exp, their
 * gradient, products of it.
 *
 * Owns the tile rules of the head (from vocabulary and width only). The logits of one tile live in
 * scratch, never all; where the weights must change their type, they do slice by slice of the
 * vocabulary. Must not know streams. Runs on a stream's lane; OpenMP inside over rows. The loss is
 * summed in fp64 in token order. */
#include "gpu/host/host_impl.h"

#include <math.h>
#include <string.h>

#define HEAD_LOGITS_BYTES ((uint64_t)32 << 20)
#define HEAD_TABLE_BYTES                                                                          \
    ((uint64_t)64 << 20) /* a table up to this size is converted once per call, not once per tile \
                          */
#define HEAD_SLICE_BYTES ((uint64_t)24 << 20)
#define HEAD_DW_TILE_BYTES ((uint64_t)4 << 20)
#define HEAD_TILE_MIN 16
#define HEAD_TILE_MAX 512
#define HEAD_PIECE 1024

struct head_run {
    const struct ops_head *a;
    bool train, with_dw;
    enum ops_dtype prod;
    bool x_converted, w_converted;
    bool w_whole; /* w_buf holds the whole table */
    uint64_t tile, slice, dw_rows;
    void *x_buf, *w_buf,
        *g_buf;    /* products' operands: x, weights, gradient of the logits (bf16 products only) */
    float *logits; /* [tile, vocab]; becomes the gradient */
    float *dx_sum, *dx_part; /* [tile, hidden] */
    float *dw_tile;
    double *loss; /* [tile] */
    int32_t *bad; /* [tile]: 1 where a target is outside the vocabulary */
};

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t head_tile(uint64_t vocab)
{
    uint64_t t = HEAD_LOGITS_BYTES / 4 / vocab / HEAD_TILE_MIN * HEAD_TILE_MIN;
    return t < HEAD_TILE_MIN ? HEAD_TILE_MIN : t > HEAD_TILE_MAX ? HEAD_TILE_MAX : t;
}

static void head_plan(struct host_job *j, struct head_run *r)
{
    const struct ops_head *a = r->a;
    r->prod = j->h->ctx.bf16_products && a->pt == OPS_BF16 ? OPS_BF16 : OPS_F32;
    uint64_t prod_bytes = ops_dtype_bytes(r->prod);
    r->x_converted = a->at != r->prod;
    r->w_converted = a->pt != r->prod;
    r->w_whole = r->w_converted && a->vocab * a->hidden * prod_bytes <= HEAD_TABLE_BYTES;
    r->tile = min_u64(head_tile(a->vocab), a->tokens);
    r->slice = r->w_converted && !r->w_whole
                   ? host_tile(a->vocab, a->hidden * prod_bytes, HEAD_SLICE_BYTES)
                   : a->vocab;
    r->dw_rows = host_tile(r->slice, a->hidden * 4, HEAD_DW_TILE_BYTES);
    r->x_buf = r->x_converted ? host_take(j, r->tile * a->hidden * prod_bytes) : NULL;
    r->w_buf = r->w_converted ? host_take(j, r->slice * a->hidden * prod_bytes) : NULL;
    r->logits = host_take(j, r->tile * a->vocab * 4);
    r->loss = host_take(j, r->tile * sizeof *r->loss);
    r->bad = host_take(j, r->tile * sizeof *r->bad);
    if (!r->train) return;
    r->g_buf = r->prod == OPS_BF16 ? host_take(j, r->tile * a->vocab * 2) : NULL;
    r->dx_sum = host_take(j, r->tile * a->hidden * 4);
    r->dx_part = host_take(j, r->tile * a->hidden * 4);
    r->dw_tile = host_take(j, r->dw_rows * a->hidden * 4);
}

/* Rows v0.. of the table as a product's operand. */
static const void *head_weights(struct host_job *j, struct head_run *r, uint64_t v0, uint64_t rows)
{
    const struct ops_head *a = r->a;
    if (!r->w_converted) return host_at(a->w, a->pt, v0 * a->hidden);
    if (r->w_whole) return host_at(r->w_buf, r->prod, v0 * a->hidden);
    host_convert(j, host_at(a->w, a->pt, v0 * a->hidden), a->pt, a->hidden, r->w_buf, r->prod,
                 a->hidden, rows, a->hidden);
    return r->w_buf;
}

static void head_logits(struct host_job *j, struct head_run *r, const void *x, float *logits,
                        uint64_t tokens)
{
    const struct ops_head *a = r->a;
    for (uint64_t v0 = 0; v0 < a->vocab; v0 += r->slice) {
        uint64_t rows = min_u64(r->slice, a->vocab - v0);
        struct host_product p = { .m = tokens,
                                  .n = rows,
                                  .k = a->hidden,
                                  .lda = a->hidden,
                                  .ldb = a->hidden,
                                  .ldc = a->vocab,
                                  .tb = 1,
                                  .src = r->prod,
                                  .dst = OPS_F32 };
        const void *w = head_weights(j, r, v0, rows);
        host_job_product(j, &p, x, w, j->dry ? NULL : logits + v0);
    }
}

/* Rounds a row of the gradient to `at`, into the operand of the products: f32 in place or the bf16
 * buffer. */
static void head_store_gradient(const struct head_run *r, float *row, uint64_t t)
{
    uint16_t half[HEAD_PIECE];
    uint64_t vocab = r->a->vocab;
    if (r->prod == OPS_BF16) { /* also for f32 activations: the product's operands are bf16 */
        convert_f32_to_bf16(row, (uint16_t *)r->g_buf + t * vocab, vocab);
        return;
    }
    if (r->a->at == OPS_F32) return;
    for (uint64_t i = 0; i < vocab; i += HEAD_PIECE) {
        uint64_t n = min_u64(HEAD_PIECE, vocab - i);
        convert_f32_to_bf16(row + i, half, n);
        convert_bf16_to_f32(half, row + i, n);
    }
}

/* Loss of one token and, in training, its row of the gradient: d_scale * (softmax - onehot). A
 * masked row is zero. */
static void head_row(const struct host_job *j, struct head_run *r, float *row, int32_t target,
                     uint64_t t)
{
    enum cpu_isa isa = j->h->ctx.isa;
    uint64_t vocab = r->a->vocab;
    r->loss[t] = 0;
    r->bad[t] = target >= 0 && (uint64_t)target >= vocab;
    if (target < 0 || r->bad[t]) {
        if (r->train) {
            memset(row, 0, vocab * sizeof *row);
            head_store_gradient(r, row, t);
        }
        return;
    }
    float max = host_row_max(isa, row, vocab);
    double wanted = row[target];
    double sum =
        r->train ? host_row_exp(isa, row, vocab, max) : host_row_exp_sum(isa, row, vocab, max);
    r->loss[t] = ((double)max + log(sum)) - wanted;
    if (!r->train) return;
    double at_target = ((double)row[target] / sum - 1.0) * r->a->d_scale;
    host_row_scale(isa, row, vocab, (float)(r->a->d_scale / sum));
    row[target] = (float)at_target;
    head_store_gradient(r, row, t);
}

static void head_rows(struct host_job *j, struct head_run *r, float *logits, uint64_t t0,
                      uint64_t tokens, double *loss_sum)
{
    if (j->dry || j->st != STK_OK) return;
    const int32_t *targets = r->a->targets + t0;
#pragma omp parallel for num_threads(j->h->ctx.threads) schedule(static)
    for (uint64_t t = 0; t < tokens; t++) head_row(j, r, logits + t * r->a->vocab, targets[t], t);
    for (uint64_t t = 0; t < tokens; t++) {
        *loss_sum += r->loss[t];
        if (!r->bad[t] || j->st != STK_OK) continue;
        j->st = stk_error_set(j->err, STK_ERR_DEVICE, 0,
                              "%s: target %d of token %llu lies outside the vocabulary of %llu",
                              j->op, targets[t], (unsigned long long)(t0 + t),
                              (unsigned long long)r->a->vocab);
    }
}

/* dw rows v0.. += gradient[:, v0..]^T x, a cache-sized tile at a time. */
static void head_dw(struct host_job *j, struct head_run *r, const void *x, const void *g,
                    uint64_t tokens, uint64_t v0, uint64_t rows)
{
    const struct ops_head *a = r->a;
    for (uint64_t i = 0; i < rows; i += r->dw_rows) {
        uint64_t n = min_u64(r->dw_rows, rows - i);
        struct host_product p = { .m = n,
                                  .n = a->hidden,
                                  .k = tokens,
                                  .lda = a->vocab,
                                  .ldb = a->hidden,
                                  .ldc = a->hidden,
                                  .ta = 1,
                                  .src = r->prod,
                                  .dst = OPS_F32 };
        host_job_product(j, &p, host_at(g, r->prod, v0 + i), x, r->dw_tile);
        if (!j->dry)
            host_accumulate(j, a->dw + (v0 + i) * a->hidden, a->hidden, r->dw_tile, a->hidden, n,
                            a->hidden);
    }
}

static void head_backward(struct host_job *j, struct head_run *r, const void *x, uint64_t t0,
                          uint64_t tokens)
{
    const struct ops_head *a = r->a;
    const void *g = r->prod == OPS_BF16 ? r->g_buf : r->logits;
    for (uint64_t v0 = 0; v0 < a->vocab; v0 += r->slice) {
        uint64_t rows = min_u64(r->slice, a->vocab - v0);
        struct host_product p = { .m = tokens,
                                  .n = a->hidden,
                                  .k = rows,
                                  .lda = a->vocab,
                                  .ldb = a->hidden,
                                  .ldc = a->hidden,
                                  .src = r->prod,
                                  .dst = OPS_F32 };
        const void *w = head_weights(j, r, v0, rows);
        host_job_product(j, &p, host_at(g, r->prod, v0), w, v0 == 0 ? r->dx_sum : r->dx_part);
        if (v0 > 0)
            host_accumulate(j, r->dx_sum, a->hidden, r->dx_part, a->hidden, tokens, a->hidden);
        if (r->with_dw) head_dw(j, r, x, g, tokens, v0, rows);
    }
    enum ops_dtype dt = ops_wide(a->at, a->dx_wide);
    host_convert(j, r->dx_sum, OPS_F32, a->hidden, host_at_mut(a->dx, dt, t0 * a->hidden), dt,
                 a->hidden, tokens, a->hidden);
}

void host_head(struct host_job *j, const struct ops_head *a, bool train)
{
    struct head_run r = { .a = a, .train = train, .with_dw = train && (a->dw || j->dry) };
    double loss_sum = 0;
    head_plan(j, &r);
    if (r.w_whole)
        host_convert(j, a->w, a->pt, a->hidden, r.w_buf, r.prod, a->hidden, a->vocab, a->hidden);
    for (uint64_t t0 = 0; t0 < a->tokens; t0 += r.tile) {
        uint64_t tokens = min_u64(r.tile, a->tokens - t0);
        const void *x = host_at(a->x, a->at, t0 * a->hidden);
        if (r.x_converted) {
            host_convert(j, x, a->at, a->hidden, r.x_buf, r.prod, a->hidden, tokens, a->hidden);
            x = r.x_buf;
        }
        /* Asked-for logits go straight to their place; the training pass turns its own into the
         * gradient. */
        float *logits = !train && a->logits ? a->logits + t0 * a->vocab : r.logits;
        head_logits(j, &r, x, logits, tokens);
        head_rows(j, &r, logits, t0, tokens, &loss_sum);
        if (train) head_backward(j, &r, x, t0, tokens);
    }
    if (!j->dry && j->st == STK_OK) *a->loss_sum += loss_sum;
}
