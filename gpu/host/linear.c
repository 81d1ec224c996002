/* gpu/host/linear.c - linear layers on the host: products by matmul.c, in slices where operands
 * must change their type.
 *
 * Owns the tile rules (from shapes and types only, so that bits do not depend on budgets) and the
 * pieces of an operation that head.c shares: scratch, conversion, accumulation. Must not know
 * streams. Runs on a stream's lane; OpenMP inside.
 *
 * Right operands (weights; x for the gradient of weights) are packed slice by slice in scratch
 * (operand.c), left ones whose type differs from the product's converted; weights are sliced along
 * the output so that every product sums its whole inner dimension. Where our own product takes a
 * forward, its weights are the left operand as they lie, and x is the packed one. */
#include "gpu/host/host_impl.h"

#include "base/numeric.h"
#include <string.h>

#define LINEAR_SLICE_BYTES ((uint64_t)32 << 20)
#define LINEAR_DW_TILE_BYTES ((uint64_t)8 << 20) /* of the transposed gradient */
#define CONVERT_PIECE 4096                       /* elements a thread converts at a time */
#define STORE_PIECE 1024                         /* elements on a thread's stack */
#define TILE_QUANTUM 64

uint64_t host_tile(uint64_t total, uint64_t row_bytes, uint64_t limit_bytes)
{
    uint64_t most = limit_bytes / row_bytes;
    if (most < TILE_QUANTUM) most = TILE_QUANTUM;
    if (total <= most) return total;
    most -= most % TILE_QUANTUM;
    uint64_t tiles = (total + most - 1) / most, even = (total + tiles - 1) / tiles;
    return (even + TILE_QUANTUM - 1) / TILE_QUANTUM * TILE_QUANTUM;
}

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

void *host_take(struct host_job *j, uint64_t size_bytes)
{
    uint64_t rounded = (size_bytes + HOST_ALIGN_BYTES - 1) / HOST_ALIGN_BYTES * HOST_ALIGN_BYTES;
    uint64_t start = j->used_bytes;
    j->used_bytes += rounded;
    if (j->dry || j->st != STK_OK) return NULL;
    if (!j->scratch.base || (uintptr_t)j->scratch.base % HOST_ALIGN_BYTES ||
        j->used_bytes > j->scratch.size_bytes) {
        j->st = stk_error_set(j->err, STK_ERR_DEVICE, 0,
                              "%s: needs %llu bytes of 64-byte aligned scratch and more for "
                              "products, has %llu at %p; declare what "
                              "prepare mode reports",
                              j->op, (unsigned long long)j->used_bytes,
                              (unsigned long long)j->scratch.size_bytes, j->scratch.base);
        return NULL;
    }
    return (uint8_t *)j->scratch.base + start;
}

static stk_status job_product_run(struct host_job *j, const struct host_product *p, const void *a,
                                  const void *b, void *c)
{
    if (p->own) {
        const struct host_gemm g = {
            .m = p->m, .n = p->n, .k = p->k, .lda = p->lda, .ldc = p->ldc,
            .a = a, .b = b, .c = c, .ct = (enum ops_dtype)p->dst, .add = p->add, .turned = p->turned,
            .base = p->base, .base_t = (enum ops_dtype)p->base_t
        };
        host_gemm(&j->h->ctx, &g);
        return STK_OK;
    }
    uint8_t *pad = j->scratch.base ? (uint8_t *)j->scratch.base + j->used_bytes : NULL;
    uint64_t left = j->scratch.base && j->scratch.size_bytes > j->used_bytes
                        ? j->scratch.size_bytes - j->used_bytes
                        : 0;
    return host_matmul_run(j->h->matmul, p, a, b, c, pad, left, j->err);
}

void host_job_product(struct host_job *j, const struct host_product *p, const void *a,
                      const void *b, void *c)
{
    if (j->st != STK_OK || (j->dry && p->own)) return;
    if (j->dry) {
        uint64_t pad = 0;
        j->st = host_matmul_prepare(j->h->matmul, p, &pad, j->err);
        if (pad > j->pad_bytes) j->pad_bytes = pad;
        return;
    }
    uint64_t start_ns = exec_now_ns(j->h->base.ex);
    j->st = job_product_run(j, p, a, b, c);
    uint64_t ns = exec_now_ns(j->h->base.ex) - start_ns;
    j->product_ns += ns;
    host_count(j->h, HOST_WORK_PRODUCT, ns, 2.0 * (double)p->m * (double)p->n * (double)p->k,
               (double)((p->m + p->n) * p->k * ops_dtype_bytes(p->src) +
                        p->m * p->n * ops_dtype_bytes(p->dst)));
}

static void convert_piece(const void *src, enum ops_dtype from, void *dst, enum ops_dtype to,
                          uint64_t n)
{
    if (from == to)
        memcpy(dst, src, n * ops_dtype_bytes(to));
    else if (from == OPS_BF16)
        convert_bf16_to_f32(src, dst, n);
    else if (from == OPS_FP16)
        convert_fp16_to_f32(src, dst, n);
    else
        convert_f32_to_bf16(src, dst, n);
}

void host_convert(struct host_job *j, const void *src, enum ops_dtype from, uint64_t src_ld,
                  void *dst, enum ops_dtype to, uint64_t dst_ld, uint64_t rows, uint64_t cols)
{
    if (j->dry || j->st != STK_OK) return;
    STK_ASSERT(from == to || to == OPS_F32 || (to == OPS_BF16 && from == OPS_F32));
    if (src_ld == cols && dst_ld == cols) { /* one long row: pieces of equal size for all threads */
        cols *= rows;
        rows = 1;
        src_ld = dst_ld = cols;
    }
    uint64_t pieces = (cols + CONVERT_PIECE - 1) / CONVERT_PIECE;
#pragma omp parallel for num_threads(j->h->ctx.threads) \
    schedule(static) if (rows * cols > 4 * CONVERT_PIECE)
    for (uint64_t i = 0; i < rows * pieces; i++) {
        uint64_t r = i / pieces, c = i % pieces * CONVERT_PIECE;
        convert_piece(host_at(src, from, r * src_ld + c), from,
                      host_at_mut(dst, to, r * dst_ld + c), to, min_u64(CONVERT_PIECE, cols - c));
    }
}

void host_accumulate(struct host_job *j, float *acc, uint64_t acc_ld, const float *t, uint64_t t_ld,
                     uint64_t rows, uint64_t cols)
{
    if (j->dry || j->st != STK_OK) return;
#pragma omp parallel for num_threads(j->h->ctx.threads) \
    schedule(static) if (rows * cols > 4 * CONVERT_PIECE)
    for (uint64_t r = 0; r < rows; r++) {
        float *to = acc + r * acc_ld;
        const float *from = t + r * t_ld;
#pragma omp simd
        for (uint64_t c = 0; c < cols; c++) to[c] += from[c];
    }
}

/* --- y = x W^T and dx = dy W ------------------------------------------------------------------ */

/* Both are dst[rows, n] = src[rows, k] B with B = W^T (forward) or W (backward data). */
struct linear_run {
    uint64_t rows, k, n;
    enum ops_dtype src_t, dst_t, base_t, pt, prod; /* prod: type of the product's operands */
    bool w_transposed, add;
    const void *src, *w, *bias, *base;
    bool with_bias, other_base; /* a base that is not the result itself */
    void *dst;
    /* decided by linear_plan */
    bool src_converted;
    bool staged; /* f32 product to scratch, then stored with bias, residual and rounding */
    bool added;  /* the product adds to an f32 result itself */
    bool based;  /* or adds the base on its way to the result */
    bool turned; /* the product is of the weights as they lie and src packed */
    uint64_t n_tile, row_tile;
    void *src_buf, *w_buf;
    float *stage;
};

static enum ops_dtype linear_product_type(const struct host_job *j, enum ops_dtype pt)
{
    return j->h->ctx.bf16_products && pt == OPS_BF16 ? OPS_BF16 : OPS_F32;
}

static struct host_product linear_product(const struct linear_run *l, uint64_t rows, uint64_t n)
{
    return (struct host_product){ .m = rows,
                                  .n = n,
                                  .k = l->k,
                                  .lda = l->k,
                                  .ldc = l->staged ? n : l->n,
                                  .src = l->prod,
                                  .dst = l->staged ? OPS_F32 : l->dst_t,
                                  .add = l->added };
}

/* Columns n0.. of B: rows n0.. of W [n, k] forward, columns n0.. of W [k, n] backward. */
static struct host_right linear_right(const struct linear_run *l, uint64_t n)
{
    return (struct host_right){ .k = l->k,
                                .n = n,
                                .ld = l->w_transposed ? l->k : l->n,
                                .from = l->pt,
                                .to = l->prod,
                                .transposed = l->w_transposed };
}

/* Weights W [n, k] in place, src^T packed: W src^T is the result's transpose. */
static void linear_turned(struct host_job *j, const struct linear_run *l)
{
    const uint64_t tile = host_tile(l->rows, l->k * 2, LINEAR_SLICE_BYTES);
    struct host_right right = { .k = l->k, .n = tile, .ld = l->k, .from = l->src_t,
                                .to = OPS_BF16, .transposed = true, .layout = HOST_GEMM_LAYOUT };
    void *buf = host_take(j, host_right_room(&right));
    for (uint64_t r0 = 0; r0 < l->rows; r0 += tile) {
        const uint64_t at = r0 * l->n;
        right.n = min_u64(tile, l->rows - r0);
        const struct host_product p = {
            .m = l->n, .n = right.n, .k = l->k, .lda = l->k, .ldc = l->n,
            .src = OPS_BF16, .dst = l->dst_t, .packed = 1, .add = l->added, .own = 1, .turned = 1,
            .base = l->based ? host_at(l->base, l->base_t, at) : NULL, .base_t = l->base_t
        };
        const void *x = host_right_make(j, &right, host_at(l->src, l->src_t, r0 * l->k), buf);
        host_job_product(j, &p, l->w, x, host_at_mut(l->dst, l->dst_t, at));
    }
}

/* How the result is written. */
static void linear_plan_way(struct host_job *j, struct linear_run *l)
{
    const bool own = l->prod == OPS_BF16 && host_gemm_fits(&j->h->ctx, l->k);
    l->added = l->add && !l->with_bias && !l->other_base && l->dst_t == OPS_F32;
    l->based = l->add && !l->added && !l->with_bias && own;
    l->staged = !l->added && !l->based &&
                (l->with_bias || l->add || (l->dst_t == OPS_BF16 && l->prod == OPS_F32));
    l->turned = own && !l->staged && l->w_transposed;
}

static void linear_plan(struct host_job *j, struct linear_run *l)
{
    uint64_t prod_bytes = ops_dtype_bytes(l->prod);
    l->src_converted = l->src_t != l->prod;
    l->n_tile = host_tile(l->n, l->k * prod_bytes, LINEAR_SLICE_BYTES);
    l->row_tile = l->rows;
    if (l->src_converted) l->row_tile = host_tile(l->rows, l->k * prod_bytes, LINEAR_SLICE_BYTES);
    if (l->staged)
        l->row_tile = min_u64(l->row_tile, host_tile(l->rows, l->n_tile * 4, LINEAR_SLICE_BYTES));
    struct host_product p = linear_product(l, l->row_tile, l->n_tile);
    struct host_right right = linear_right(l, l->n_tile);
    host_right_plan(j, &right, &p);
    l->w_buf = right.in_place ? NULL : host_take(j, host_right_room(&right));
    l->src_buf = l->src_converted ? host_take(j, l->row_tile * l->k * prod_bytes) : NULL;
    l->stage = l->staged ? host_take(j, l->row_tile * l->n_tile * 4) : NULL;
}

/* One row of a staged tile, from element `at` of the result on: (product + bias) + base, in f32,
 * rounded once. */
static void linear_store_row(const struct linear_run *l, const float *sum, uint64_t at, uint64_t n0,
                             uint64_t n)
{
    float out[STORE_PIECE], other[STORE_PIECE];
    for (uint64_t c = 0; c < n; c += STORE_PIECE) {
        uint64_t len = min_u64(STORE_PIECE, n - c);
        memcpy(out, sum + c, len * 4);
        if (l->with_bias) {
            convert_piece(host_at(l->bias, l->pt, n0 + c), l->pt, other, OPS_F32, len);
            for (uint64_t i = 0; i < len; i++) out[i] += other[i];
        }
        if (l->add) {
            convert_piece(host_at(l->base, l->base_t, at + c), l->base_t, other, OPS_F32, len);
            for (uint64_t i = 0; i < len; i++) out[i] += other[i];
        }
        convert_piece(out, OPS_F32, host_at_mut(l->dst, l->dst_t, at + c), l->dst_t, len);
    }
}

static void linear_store(struct host_job *j, const struct linear_run *l, uint64_t r0, uint64_t rows,
                         uint64_t n0, uint64_t n)
{
    if (j->dry || j->st != STK_OK) return;
#pragma omp parallel for num_threads(j->h->ctx.threads) \
    schedule(static) if (rows * n > 4 * CONVERT_PIECE)
    for (uint64_t r = 0; r < rows; r++)
        linear_store_row(l, l->stage + r * n, (r0 + r) * l->n + n0, n0, n);
}

/* `made`: the layout that w_buf holds now; another number of rows may want another. */
static void linear_tile(struct host_job *j, const struct linear_run *l, struct host_right *made,
                        const void **w, uint64_t r0, uint64_t rows, uint64_t n0, uint64_t n)
{
    const void *src = l->src_converted ? l->src_buf : host_at(l->src, l->src_t, r0 * l->k);
    struct host_product p = linear_product(l, rows, n);
    struct host_right right = linear_right(l, n);
    host_right_plan(j, &right, &p);
    if (r0 == 0 || memcmp(&right.layout, &made->layout, sizeof right.layout) != 0) {
        const void *from = host_at(l->w, l->pt, l->w_transposed ? n0 * l->k : n0);
        *w = host_right_make(j, &right, from, l->w_buf);
        *made = right;
    }
    if (l->based) p.base = host_at(l->base, l->base_t, r0 * l->n + n0), p.base_t = l->base_t;
    void *c = l->staged ? (void *)l->stage : host_at_mut(l->dst, l->dst_t, r0 * l->n + n0);
    host_job_product(j, &p, src, *w, c);
    if (l->staged) linear_store(j, l, r0, rows, n0, n);
}

static void linear_run(struct host_job *j, struct linear_run *l)
{
    linear_plan_way(j, l);
    if (l->turned) {
        linear_turned(j, l);
        return;
    }
    linear_plan(j, l);
    for (uint64_t n0 = 0; n0 < l->n; n0 += l->n_tile) {
        uint64_t n = min_u64(l->n_tile, l->n - n0);
        struct host_right made = { 0 };
        const void *w = NULL;
        for (uint64_t r0 = 0; r0 < l->rows; r0 += l->row_tile) {
            uint64_t rows = min_u64(l->row_tile, l->rows - r0);
            if (l->src_converted && (n0 == 0 || l->row_tile < l->rows))
                host_convert(j, host_at(l->src, l->src_t, r0 * l->k), l->src_t, l->k, l->src_buf,
                             l->prod, l->k, rows, l->k);
            linear_tile(j, l, &made, &w, r0, rows, n0, n);
        }
    }
}

/* Prepare mode does not know whether there is a bias or another base (its pointers are NULL): all
 * ways are prepared. */
static void linear_ways(struct host_job *j, struct linear_run *l)
{
    uint64_t most = 0;
    for (int way = 0; way < 4 && j->dry; way++) {
        struct linear_run other = *l;
        other.with_bias = way & 1;
        other.other_base = way & 2;
        j->used_bytes = 0;
        linear_run(j, &other);
        if (j->used_bytes > most) most = j->used_bytes;
    }
    if (j->dry) j->used_bytes = most;
    else linear_run(j, l);
}

void host_linear_forward(struct host_job *j, const struct ops_linear *a)
{
    struct linear_run l = { .rows = a->rows,
                            .k = a->in,
                            .n = a->out,
                            .src_t = ops_wide(a->at, a->x_wide),
                            .dst_t = ops_wide(a->at, a->y_wide),
                            .base_t = ops_wide(a->at, a->base ? a->base_wide : a->y_wide),
                            .pt = a->pt,
                            .prod = linear_product_type(j, a->pt),
                            .w_transposed = true,
                            .add = a->add,
                            .base = a->base ? a->base : a->y,
                            .other_base = a->base && a->base != a->y,
                            .src = a->x,
                            .w = a->w,
                            .bias = a->bias,
                            .with_bias = a->bias != NULL,
                            .dst = a->y };
    linear_ways(j, &l);
}

void host_linear_backward_data(struct host_job *j, const struct ops_linear *a)
{
    struct linear_run l = { .rows = a->rows,
                            .k = a->out,
                            .n = a->in,
                            .src_t = ops_wide(a->at, a->y_wide),
                            .dst_t = ops_wide(a->at, a->x_wide),
                            .base_t = ops_wide(a->at, a->base ? a->base_wide : a->x_wide),
                            .pt = a->pt,
                            .prod = linear_product_type(j, a->pt),
                            .add = a->add,
                            .base = a->base ? a->base : a->dx,
                            .other_base = a->base && a->base != a->dx,
                            .src = a->dy,
                            .w = a->w,
                            .dst = a->dx };
    linear_ways(j, &l);
}

/* --- dW += dy^T x ----------------------------------------------------------------------------- */

/* A = dy^T, transposed tile by tile of its rows; B = x. The product adds to the accumulator itself. */
static void linear_dw(struct host_job *j, const struct ops_linear *a)
{
    const enum ops_dtype prod = linear_product_type(j, a->pt), xt = ops_wide(a->at, a->x_wide),
                         yt = ops_wide(a->at, a->y_wide);
    const uint64_t prod_bytes = ops_dtype_bytes(prod), row_bytes = a->rows * prod_bytes;
    const uint64_t in_tile = host_tile(a->in, row_bytes, LINEAR_SLICE_BYTES);
    const uint64_t out_tile = host_tile(a->out, row_bytes, LINEAR_DW_TILE_BYTES);
    struct host_right room = { .k = a->rows, .n = in_tile, .to = prod };
    void *x_buf = host_take(j, host_right_room(&room));
    void *dy_buf = host_take(j, out_tile * row_bytes);
    for (uint64_t i0 = 0; i0 < a->in; i0 += in_tile) {
        struct host_right made = { 0 };
        const void *x = NULL;
        for (uint64_t o0 = 0; o0 < a->out; o0 += out_tile) {
            uint64_t out = min_u64(out_tile, a->out - o0);
            struct host_product p = {
                .m = out, .lda = a->rows, .ldc = a->in, .src = prod, .dst = OPS_F32,
                .add = !a->overwrite
            };
            struct host_right right = { .k = a->rows,
                                        .n = min_u64(in_tile, a->in - i0),
                                        .ld = a->in,
                                        .from = xt,
                                        .to = prod };
            host_right_plan(j, &right, &p);
            if (o0 == 0 || memcmp(&right.layout, &made.layout, sizeof right.layout) != 0) {
                x = host_right_make(j, &right, host_at(a->x, xt, i0), x_buf);
                made = right;
            }
            if (i0 == 0 || out_tile < a->out)
                host_left_transpose(j, host_at(a->dy, yt, o0), yt, a->out, a->rows, out, dy_buf,
                                    prod);
            host_job_product(j, &p, dy_buf, x, j->dry ? NULL : a->dw + o0 * a->in + i0);
        }
    }
}

/* Column sums over rows in row order, fp64 inside: the same for any number of threads. */
static void linear_dbias(struct host_job *j, const struct ops_linear *a)
{
    if (j->dry || j->st != STK_OK) return;
    const enum ops_dtype yt = ops_wide(a->at, a->y_wide);
    uint64_t blocks = (a->out + TILE_QUANTUM - 1) / TILE_QUANTUM;
#pragma omp parallel for num_threads(j->h->ctx.threads) schedule(static)
    for (uint64_t b = 0; b < blocks; b++) {
        double sum[TILE_QUANTUM] = { 0 };
        uint64_t c0 = b * TILE_QUANTUM, n = min_u64(TILE_QUANTUM, a->out - c0);
        for (uint64_t r = 0; r < a->rows; r++) {
            const void *row = host_at(a->dy, yt, r * a->out + c0);
            for (uint64_t c = 0; c < n; c++)
                sum[c] += yt == OPS_F32 ? ((const float *)row)[c]
                                        : stk_bf16_to_f32(((const uint16_t *)row)[c]);
        }
        for (uint64_t c = 0; c < n; c++)
            a->dbias[c0 + c] = (a->overwrite ? 0 : a->dbias[c0 + c]) + (float)sum[c];
    }
}

void host_linear_backward_weight(struct host_job *j, const struct ops_linear *a)
{
    if (a->dw || j->dry) linear_dw(j, a);
    if (j->dry) { /* other visits of the block add, or write */
        struct ops_linear other = *a;
        other.overwrite = !a->overwrite;
        j->used_bytes = 0;
        linear_dw(j, &other);
    }
    if (a->dbias) linear_dbias(j, a);
}
