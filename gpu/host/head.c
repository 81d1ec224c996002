/* gpu/host/head.c - the language head and its loss by token tiles: logits, log-sum-exp, their
 * gradient, products of it.
 *
 * Owns the tile rules of the head (from vocabulary and width only). The logits of one tile live in
 * scratch, never all; the weights become operands slice by slice of the vocabulary. Must not know
 * streams. Runs on a stream's lane; OpenMP inside over rows. The loss is summed in fp64 in token
 * order. */
#include "gpu/host/host_impl.h"

#include "base/numeric.h"
#include <math.h>
#include <string.h>

#define HEAD_LOGITS_BYTES ((uint64_t)64 << 20)
#define HEAD_SLICE_BYTES ((uint64_t)16 << 20)
#define HEAD_TILE_MIN 16
#define HEAD_TILE_MAX 512
#define HEAD_PIECE 1024

struct head_run {
    const struct ops_head *a;
    bool train, with_dw, overwrite;
    enum ops_dtype prod;
    bool x_converted;
    bool turned; /* logits: the weights as they lie by x, packed */
    uint64_t tile, slice;
    /* products' operands: x, a slice of the weights (turned: x first), x as the right one, a slice of the gradient
     * transposed */
    void *x_buf, *w_buf, *x_right, *g_left;
    /* Slice after slice of the vocabulary, each [tokens of the tile, rows of the slice]: operands of
     * products without gaps. Logits become the gradient; bf16 products take it from g_buf. */
    float *logits;
    uint16_t *g_buf;
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
    struct host_right turned = { .k = a->hidden, .n = r->tile, .to = r->prod };
    uint64_t room = host_right_room(&logits), other = host_right_room(&dx);
    r->turned = r->prod == OPS_BF16 && host_gemm_fits(&j->h->ctx, a->hidden);
    if (r->turned) room = host_right_room(&turned);
    r->x_buf = r->x_converted ? host_take(j, r->tile * a->hidden * prod_bytes) : NULL;
    r->w_buf = host_take(j, r->train && other > room ? other : room);
    r->logits = host_take(j, r->tile * a->vocab * 4);
    r->loss = host_take(j, r->tile * sizeof *r->loss);
    r->bad = host_take(j, r->tile * sizeof *r->bad);
    if (!r->train) return;
    r->dx_sum = host_take(j, r->tile * a->hidden * 4);
    r->x_right = host_take(j, host_right_room(&x));
    r->g_left = host_take(j, r->slice * r->tile * prod_bytes);
    r->g_buf = r->prod == OPS_BF16 ? host_take(j, r->tile * a->vocab * 2) : NULL;
}

/* Element (t, v0) of a tile; v0 is where a slice begins. */
static uint64_t head_at(const struct head_run *r, uint64_t tokens, uint64_t t, uint64_t v0)
{
    return v0 * tokens + t * min_u64(r->slice, r->a->vocab - v0);
}

/* The logits' transpose by our own product, stored as they are wanted. */
static void head_logits_turned(struct host_job *j, struct head_run *r, const void *x, float *logits,
                               uint64_t tokens)
{
    const struct ops_head *a = r->a;
    const struct host_right right = { .k = a->hidden, .n = tokens, .ld = a->hidden,
                                      .from = OPS_BF16, .to = OPS_BF16, .transposed = true,
                                      .layout = HOST_GEMM_LAYOUT };
    const void *b = host_right_make(j, &right, x, r->w_buf);
    for (uint64_t v0 = 0; v0 < a->vocab; v0 += r->slice) {
        const uint64_t rows = min_u64(r->slice, a->vocab - v0);
        const struct host_product p = { .m = rows, .n = tokens, .k = a->hidden, .lda = a->hidden,
                                        .ldc = rows, .src = OPS_BF16, .dst = OPS_F32, .packed = 1,
                                        .own = 1, .turned = 1 };
        host_job_product(j, &p, host_at(a->w, a->pt, v0 * a->hidden), b,
                         j->dry ? NULL : logits + head_at(r, tokens, 0, v0));
    }
}

static void head_logits(struct host_job *j, struct head_run *r, const void *x, float *logits,
                        uint64_t tokens)
{
    const struct ops_head *a = r->a;
    for (uint64_t v0 = 0; v0 < a->vocab; v0 += r->slice) {
        const uint64_t rows = min_u64(r->slice, a->vocab - v0);
        struct host_right right = head_right(r, rows, true);
        struct host_product p = { .m = tokens,
                                  .lda = a->hidden,
                                  .ldc = rows,
                                  .src = r->prod,
                                  .dst = OPS_F32 };
        host_right_plan(j, &right, &p);
        const void *w = host_right_make(j, &right, host_at(a->w, a->pt, v0 * a->hidden), r->w_buf);
        host_job_product(j, &p, x, w,
                         j->dry ? NULL : logits + head_at(r, tokens, 0, v0));
    }
}

/* Logits that were asked for, row by row. */
static void head_logits_out(struct host_job *j, const struct head_run *r, uint64_t t0,
                            uint64_t tokens)
{
    const uint64_t vocab = r->a->vocab;
    if (j->dry || j->st != STK_OK) return;
#pragma omp parallel for num_threads(j->h->ctx.threads) schedule(static)
    for (uint64_t t = 0; t < tokens; t++)
        for (uint64_t v0 = 0; v0 < vocab; v0 += r->slice)
            memcpy(r->a->logits + (t0 + t) * vocab + v0, r->logits + head_at(r, tokens, t, v0),
                   min_u64(r->slice, vocab - v0) * sizeof(float));
}

/* Rounds a part of the gradient to `at`, in place. */
static void head_round(const struct head_run *r, float *row, uint64_t n)
{
    uint16_t half[HEAD_PIECE];
    if (r->a->at == OPS_F32) return;
    for (uint64_t i = 0; i < n; i += HEAD_PIECE) {
        uint64_t len = min_u64(HEAD_PIECE, n - i);
        convert_f32_to_bf16(row + i, half, len);
        convert_bf16_to_f32(half, row + i, len);
    }
}

/* A part of a row as the operand of bf16 products (also for f32 activations: operands are bf16). */
static void head_half(const struct host_job *j, const struct head_run *r, const float *row,
                      uint64_t at, uint64_t n, double factor)
{
    if (factor == 0) memset(r->g_buf + at, 0, n * sizeof *r->g_buf);
    else host_row_scale_bf16(j->h->ctx.isa, row, n, (float)factor, r->g_buf + at);
}

/* A token's row of the gradient: factor * exponentials, less at the target; factor 0: all zero. */
static void head_gradient(const struct host_job *j, const struct head_run *r, float *logits,
                          uint64_t tokens, uint64_t t, double factor, int32_t target,
                          double at_target)
{
    const uint64_t vocab = r->a->vocab;
    for (uint64_t v0 = 0; v0 < vocab; v0 += r->slice) {
        const uint64_t n = min_u64(r->slice, vocab - v0), at = head_at(r, tokens, t, v0);
        const bool here = target >= 0 && (uint64_t)target >= v0 && (uint64_t)target - v0 < n;
        const uint64_t own = here ? at + (uint64_t)target - v0 : 0;
        if (r->prod == OPS_BF16) {
            head_half(j, r, logits + at, at, n, factor);
            if (here) r->g_buf[own] = stk_f32_to_bf16((float)at_target);
            continue;
        }
        if (factor == 0) memset(logits + at, 0, n * sizeof *logits);
        else host_row_scale(j->h->ctx.isa, logits + at, n, (float)factor);
        if (here) logits[own] = (float)at_target;
        head_round(r, logits + at, n);
    }
}

/* Loss of one token and, in training, its row of the gradient: d_scale * (softmax - onehot). A
 * masked row is zero. */
static void head_row(const struct host_job *j, struct head_run *r, float *logits, uint64_t tokens,
                     int32_t target, uint64_t t)
{
    const enum cpu_isa isa = j->h->ctx.isa;
    const uint64_t vocab = r->a->vocab;
    r->loss[t] = 0;
    r->bad[t] = target >= 0 && (uint64_t)target >= vocab;
    if (target < 0 || r->bad[t]) {
        if (r->train) head_gradient(j, r, logits, tokens, t, 0, -1, 0);
        return;
    }
    float max = -INFINITY;
    double sum = 0;
    for (uint64_t v0 = 0; v0 < vocab; v0 += r->slice) {
        float m = host_row_max(isa, logits + head_at(r, tokens, t, v0),
                               min_u64(r->slice, vocab - v0));
        if (!(m <= max)) max = m; /* NaN too */
    }
    const uint64_t own = (uint64_t)target / r->slice * r->slice;
    float *at = logits + head_at(r, tokens, t, own) + ((uint64_t)target - own);
    const double wanted = *at;
    for (uint64_t v0 = 0; v0 < vocab; v0 += r->slice) {
        float *part = logits + head_at(r, tokens, t, v0);
        const uint64_t n = min_u64(r->slice, vocab - v0);
        sum += r->train ? host_row_exp(isa, part, n, max) : host_row_exp_sum(isa, part, n, max);
    }
    r->loss[t] = ((double)max + log(sum)) - wanted;
    if (!r->train) return;
    const double at_target = ((double)*at / sum - 1.0) * r->a->d_scale;
    head_gradient(j, r, logits, tokens, t, r->a->d_scale / sum, target, at_target);
}

static void head_rows(struct host_job *j, struct head_run *r, float *logits, uint64_t t0,
                      uint64_t tokens, double *loss_sum)
{
    if (j->dry || j->st != STK_OK) return;
    const int32_t *targets = r->a->targets + t0;
#pragma omp parallel for num_threads(j->h->ctx.threads) schedule(static)
    for (uint64_t t = 0; t < tokens; t++) head_row(j, r, logits, tokens, targets[t], t);
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
static void head_slice(struct host_job *j, struct head_run *r, const void *x, uint64_t t0,
                       uint64_t tokens, uint64_t v0, uint64_t rows)
{
    const struct ops_head *a = r->a;
    struct host_right right = head_right(r, rows, false);
    struct host_product p = { .m = tokens,
                              .lda = rows,
                              .ldc = a->hidden,
                              .src = r->prod,
                              .dst = OPS_F32,
                              .add = v0 > 0 };
    host_right_plan(j, &right, &p);
    const void *w = host_right_make(j, &right, host_at(a->w, a->pt, v0 * a->hidden), r->w_buf),
               *g = r->prod == OPS_BF16 ? (const void *)r->g_buf : (const void *)r->logits;
    g = host_at(g, r->prod, head_at(r, tokens, 0, v0));
    host_job_product(j, &p, g, w, r->dx_sum);
    if (!r->with_dw) return;
    struct host_product dw = {
        .m = rows, .lda = tokens, .ldc = a->hidden, .src = r->prod, .dst = OPS_F32,
        .add = !r->overwrite || t0 > 0
    };
    right = (struct host_right){
        .k = tokens, .n = a->hidden, .ld = a->hidden, .from = r->prod, .to = r->prod
    };
    host_right_plan(j, &right, &dw);
    if (v0 == 0 || memcmp(&right.layout, &r->x_made.layout, sizeof right.layout) != 0) {
        r->x_at = host_right_make(j, &right, x, r->x_right);
        r->x_made = right;
    }
    host_left_transpose(j, g, r->prod, rows, tokens, rows, r->g_left, r->prod);
    host_job_product(j, &dw, r->g_left, r->x_at, j->dry ? NULL : a->dw + v0 * a->hidden);
}

static void head_backward(struct host_job *j, struct head_run *r, const void *x, uint64_t t0,
                          uint64_t tokens)
{
    const struct ops_head *a = r->a;
    for (uint64_t v0 = 0; v0 < a->vocab; v0 += r->slice)
        head_slice(j, r, x, t0, tokens, v0, min_u64(r->slice, a->vocab - v0));
    enum ops_dtype dt = ops_wide(a->at, a->dx_wide);
    host_convert(j, r->dx_sum, OPS_F32, a->hidden, host_at_mut(a->dx, dt, t0 * a->hidden), dt,
                 a->hidden, tokens, a->hidden);
}

static void head_run(struct host_job *j, const struct ops_head *a, bool train, bool overwrite)
{
    struct head_run r = { .a = a, .train = train, .with_dw = train && (a->dw || j->dry),
                          .overwrite = overwrite };
    double loss_sum = 0;
    head_plan(j, &r);
    for (uint64_t t0 = 0; t0 < a->tokens; t0 += r.tile) {
        uint64_t tokens = min_u64(r.tile, a->tokens - t0);
        const void *x = host_at(a->x, a->at, t0 * a->hidden);
        if (r.x_converted) {
            host_convert(j, x, a->at, a->hidden, r.x_buf, r.prod, a->hidden, tokens, a->hidden);
            x = r.x_buf;
        }
        if (r.turned) head_logits_turned(j, &r, x, r.logits, tokens);
        else head_logits(j, &r, x, r.logits, tokens);
        if (!train && a->logits) head_logits_out(j, &r, t0, tokens);
        head_rows(j, &r, r.logits, t0, tokens, &loss_sum);
        if (train) head_backward(j, &r, x, t0, tokens);
    }
    if (!j->dry && j->st == STK_OK) *a->loss_sum += loss_sum;
}

/* Prepare mode: other visits of the block add, or write. */
void host_head(struct host_job *j, const struct ops_head *a, bool train)
{
    head_run(j, a, train, a->overwrite);
    if (!j->dry || !train) return;
    j->used_bytes = 0;
    head_run(j, a, train, !a->overwrite);
}
