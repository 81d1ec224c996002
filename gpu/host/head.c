/* gpu/host/head.c - the language head and its loss by token tiles: logits, log-sum-exp, their
 * gradient, products of it.
 *
 * Owns the tile rules of the head (from vocabulary and width only). The logits of one tile live in
 * scratch, never all; the weights become operands slice by slice of the vocabulary. Must not know
 * streams. Runs on a stream's lane; OpenMP inside over rows. The loss is summed in fp64 in token
 * order. */
#include "gpu/host/host_impl.h"

#include <math.h>
#include <string.h>

#define HEAD_LOGITS_BYTES ((uint64_t)64 << 20)
#define HEAD_SLICE_BYTES ((uint64_t)16 << 20)
#define HEAD_TILE_MIN 16
#define HEAD_TILE_MAX 512
#define HEAD_PIECE 1024

struct head_run {
    const struct ops_head *a;
    bool train, with_dw;
    enum ops_dtype prod;
    bool x_converted;
    uint64_t tile, slice;
    void *x_buf, *w_buf, *x_right, *g_left; /* products' operands: x, a slice of the weights, x as the
                                             * right one, a slice of the gradient transposed */
    float *logits; /* [tile, vocab]; becomes the gradient: f32, or bf16 in the first half of each row */
    float *dx_sum; /* [tile, hidden] */
    struct host_right x_made; /* what x_right holds, and where it is */
    const void *x_at;
    double *loss;  /* [tile] */
    int32_t *bad;  /* [tile]: 1 where a target is outside the vocabulary */
};

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t head_tile(uint64_t vocab)
{
    uint64_t t = HEAD_LOGITS_BYTES / 4 / vocab / HEAD_TILE_MIN * HEAD_TILE_MIN;
    return t < HEAD_TILE_MIN ? HEAD_TILE_MIN : t > HEAD_TILE_MAX ? HEAD_TILE_MAX : t;
}

/* Rows v0.. of the table as B: transposed for the logits, as they lie for dx. */
static struct host_right head_right(const struct head_run *r, uint64_t rows, bool transposed)
{
    const struct ops_head *a = r->a;
    return (struct host_right){ .k = transposed ? a->hidden : rows,
                                .n = transposed ? rows : a->hidden,
                                .ld = a->hidden,
                                .from = a->pt,
                                .to = r->prod,
                                .transposed = transposed };
}

/* Elements from row to row of the gradient. */
static uint64_t head_gradient_ld(const struct head_run *r)
{
    return r->prod == OPS_BF16 ? 2 * r->a->vocab : r->a->vocab;
}

static void head_plan(struct host_job *j, struct head_run *r)
{
    const struct ops_head *a = r->a;
    r->prod = j->h->ctx.bf16_products && a->pt == OPS_BF16 ? OPS_BF16 : OPS_F32;
    uint64_t prod_bytes = ops_dtype_bytes(r->prod);
    r->x_converted = a->at != r->prod;
    r->tile = min_u64(head_tile(a->vocab), a->tokens);
    r->slice = host_tile(a->vocab, a->hidden * prod_bytes, HEAD_SLICE_BYTES);
    struct host_right logits = head_right(r, r->slice, true), dx = head_right(r, r->slice, false),
                      x = { .k = r->tile, .n = a->hidden, .to = r->prod };
    uint64_t room = host_right_room(&logits), other = host_right_room(&dx);
    r->x_buf = r->x_converted ? host_take(j, r->tile * a->hidden * prod_bytes) : NULL;
    r->w_buf = host_take(j, r->train && other > room ? other : room);
    r->logits = host_take(j, r->tile * a->vocab * 4);
    r->loss = host_take(j, r->tile * sizeof *r->loss);
    r->bad = host_take(j, r->tile * sizeof *r->bad);
    if (!r->train) return;
    r->dx_sum = host_take(j, r->tile * a->hidden * 4);
    r->x_right = host_take(j, host_right_room(&x));
    r->g_left = host_take(j, r->slice * host_left_ld(r->tile, r->prod) * prod_bytes);
}

static void head_logits(struct host_job *j, struct head_run *r, const void *x, float *logits,
                        uint64_t tokens)
{
    const struct ops_head *a = r->a;
    for (uint64_t v0 = 0; v0 < a->vocab; v0 += r->slice) {
        struct host_right right = head_right(r, min_u64(r->slice, a->vocab - v0), true);
        struct host_product p = {
            .m = tokens, .lda = a->hidden, .ldc = a->vocab, .src = r->prod, .dst = OPS_F32
        };
        host_right_plan(j, &right, &p);
        const void *w = host_right_make(j, &right, host_at(a->w, a->pt, v0 * a->hidden), r->w_buf);
        host_job_product(j, &p, x, w, j->dry ? NULL : logits + v0);
    }
}

/* Rounds a row of the gradient to `at`, into the operand of the products: f32 in place, or bf16 in
 * the first half of the row. Pieces, because the two overlap. */
static void head_store_gradient(const struct head_run *r, float *row)
{
    uint16_t half[HEAD_PIECE];
    uint64_t vocab = r->a->vocab;
    const bool bf16 = r->prod == OPS_BF16; /* also for f32 activations: operands are bf16 */
    if (!bf16 && r->a->at == OPS_F32) return;
    for (uint64_t i = 0; i < vocab; i += HEAD_PIECE) {
        uint64_t n = min_u64(HEAD_PIECE, vocab - i);
        convert_f32_to_bf16(row + i, half, n);
        if (bf16) memcpy((uint16_t *)(void *)row + i, half, n * sizeof *half);
        else convert_bf16_to_f32(half, row + i, n);
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
            head_store_gradient(r, row);
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
    head_store_gradient(r, row);
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

/* dx: adds up over slices of the vocabulary, in order. dw rows v0.. += gradient[:, v0..]^T x. */
static void head_slice(struct host_job *j, struct head_run *r, const void *x, uint64_t tokens,
                       uint64_t v0, uint64_t rows)
{
    const struct ops_head *a = r->a;
    const uint64_t ld = head_gradient_ld(r), lda = host_left_ld(tokens, r->prod);
    struct host_right right = head_right(r, rows, false);
    struct host_product p = { .m = tokens,
                              .lda = ld,
                              .ldc = a->hidden,
                              .src = r->prod,
                              .dst = OPS_F32,
                              .add = v0 > 0 };
    host_right_plan(j, &right, &p);
    const void *w = host_right_make(j, &right, host_at(a->w, a->pt, v0 * a->hidden), r->w_buf),
               *g = host_at(r->logits, r->prod, v0);
    host_job_product(j, &p, g, w, r->dx_sum);
    if (!r->with_dw) return;
    struct host_product dw = {
        .m = rows, .lda = lda, .ldc = a->hidden, .src = r->prod, .dst = OPS_F32, .add = 1
    };
    right = (struct host_right){
        .k = tokens, .n = a->hidden, .ld = a->hidden, .from = r->prod, .to = r->prod
    };
    host_right_plan(j, &right, &dw);
    if (v0 == 0 || memcmp(&right.layout, &r->x_made.layout, sizeof right.layout) != 0) {
        r->x_at = host_right_make(j, &right, x, r->x_right);
        r->x_made = right;
    }
    host_left_transpose(j, g, r->prod, ld, tokens, rows, r->g_left, r->prod);
    host_job_product(j, &dw, r->g_left, r->x_at, j->dry ? NULL : a->dw + v0 * a->hidden);
}

static void head_backward(struct host_job *j, struct head_run *r, const void *x, uint64_t t0,
                          uint64_t tokens)
{
    const struct ops_head *a = r->a;
    for (uint64_t v0 = 0; v0 < a->vocab; v0 += r->slice)
        head_slice(j, r, x, tokens, v0, min_u64(r->slice, a->vocab - v0));
    enum ops_dtype dt = ops_wide(a->at, a->dx_wide);
    host_convert(j, r->dx_sum, OPS_F32, a->hidden, host_at_mut(a->dx, dt, t0 * a->hidden), dt,
                 a->hidden, tokens, a->hidden);
}

void host_head(struct host_job *j, const struct ops_head *a, bool train)
{
    struct head_run r = { .a = a, .train = train, .with_dw = train && (a->dw || j->dry) };
    double loss_sum = 0;
    head_plan(j, &r);
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
