/* gpu/cuda/cuda_linear.c - linear layers on the card: products with bias and residual in the
 * library's epilogue, casts around them where types differ.
 *
 * Owns the tile rules (from shapes and types only, so that bits do not depend on budgets) and the
 * casts' buffers. Must not know streams. In the stream's producer.
 *
 * Row-major y[rows, out] = x[rows, in] W[out, in]^T is column-major y^T[out, rows] = W x^T for
 * cuBLAS: its A is our right operand. The product's operands have one type (cuda_product_type);
 * what has another one is cast into scratch, rows in tiles so that scratch stays bounded. The
 * result is written by the product itself where cuBLASLt can (f32, or the operands' type); else it
 * is staged in f32 and rounded once. */
#include "gpu/cuda/cuda_impl.h"

#define LINEAR_TILE_BYTES ((uint64_t)128 << 20) /* of buffers for a tile of rows */
#define TILE_QUANTUM 128

uint64_t cuda_tile(uint64_t total, uint64_t row_bytes, uint64_t limit_bytes)
{
    uint64_t most = row_bytes ? limit_bytes / row_bytes : total;
    if (most < TILE_QUANTUM) most = TILE_QUANTUM;
    if (total <= most) return total;
    most -= most % TILE_QUANTUM;
    uint64_t tiles = (total + most - 1) / most, even = (total + tiles - 1) / tiles;
    return (even + TILE_QUANTUM - 1) / TILE_QUANTUM * TILE_QUANTUM;
}

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* --- y = x W^T and dx = dy W ------------------------------------------------------------------ */

/* Both are dst[rows, n] = src[rows, k] B with B = W^T (forward) or W (backward data). */
struct linear_run {
    uint64_t rows, k, n;
    enum ops_dtype src_t, dst_t, base_t, pt, prod,
        out_t; /* prod: operands; out_t: the product's result */
    bool w_transposed, add, with_bias;
    const void *src, *w, *bias, *base;
    void *dst;
    /* decided by linear_plan */
    bool src_cast, w_cast, bias_cast, base_cast, staged;
    uint64_t row_tile;
    void *src_buf, *w_buf, *bias_buf, *stage;
};

/* The product adds a base of its result's type, at another place if need be; any other base is cast
 * to where the result comes first. An f32 base of a 16-bit result is added before the result is
 * rounded, so that is staged. */
static void linear_plan(struct cuda_job *j, struct linear_run *l)
{
    l->src_cast = l->src_t != l->prod;
    l->w_cast = l->pt != l->prod;
    l->staged = (l->dst_t != OPS_F32 && l->dst_t != l->prod) ||
                (l->add && l->dst_t != OPS_F32 && l->base_t != l->dst_t);
    l->out_t = l->staged ? OPS_F32 : l->dst_t;
    l->base_cast = l->add && l->base_t != l->out_t;
    l->bias_cast = l->with_bias && l->pt != l->out_t;
    const uint64_t row_bytes = (l->src_cast ? l->k * ops_dtype_bytes(l->prod) : 0) +
                               (l->staged ? l->n * ops_dtype_bytes(OPS_F32) : 0);
    l->row_tile = row_bytes ? cuda_tile(l->rows, row_bytes, LINEAR_TILE_BYTES) : l->rows;
    if (l->w_cast) l->w_buf = cuda_take(j, l->k * l->n * ops_dtype_bytes(l->prod));
    if (l->bias_cast) l->bias_buf = cuda_take(j, l->n * ops_dtype_bytes(l->out_t));
    if (l->src_cast) l->src_buf = cuda_take(j, l->row_tile * l->k * ops_dtype_bytes(l->prod));
    if (l->staged) l->stage = cuda_take(j, l->row_tile * l->n * ops_dtype_bytes(OPS_F32));
}

/* A rows x cols matrix without gaps. */
static void cast(struct cuda_job *j, const void *src, enum ops_dtype from, void *dst,
                 enum ops_dtype to, uint64_t rows, uint64_t cols)
{
    const struct cuda_cast c = { .rows = rows,
                                 .cols = cols,
                                 .src_ld = cols,
                                 .dst_ld = cols,
                                 .from = from,
                                 .to = to,
                                 .src = src,
                                 .dst = dst };
    cuda_job_cast(j, &c);
}

static void linear_tile(struct cuda_job *j, const struct linear_run *l, uint64_t r0, uint64_t rows)
{
    const struct cuda_product p = { .m = l->n,
                                    .n = rows,
                                    .k = l->k,
                                    .lda = l->w_transposed ? l->k : l->n,
                                    .ldb = l->k,
                                    .ldd = l->n,
                                    .ta = l->w_transposed,
                                    .src = l->prod,
                                    .dst = l->out_t,
                                    .bias = l->with_bias };
    const void *src = cuda_at(l->src, l->src_t, r0 * l->k),
               *base = l->add ? cuda_at(l->base, l->base_t, r0 * l->n) : NULL;
    void *dst = cuda_at_mut(l->dst, l->dst_t, r0 * l->n), *out = l->staged ? l->stage : dst;
    if (l->src_cast) cast(j, src, l->src_t, l->src_buf, l->prod, rows, l->k);
    if (l->base_cast) cast(j, base, l->base_t, out, l->out_t, rows, l->n);
    const struct cuda_operands o = { .a = l->w_cast ? l->w_buf : l->w,
                                     .b = l->src_cast ? l->src_buf : src,
                                     .c = l->base_cast ? out : base,
                                     .bias = l->bias_cast ? l->bias_buf : l->bias,
                                     .d = out };
    cuda_job_product(j, &p, &o);
    if (l->staged) cast(j, l->stage, OPS_F32, dst, l->dst_t, rows, l->n);
}

static void linear_run(struct cuda_job *j, struct linear_run *l)
{
    linear_plan(j, l);
    if (l->w_cast) cast(j, l->w, l->pt, l->w_buf, l->prod, l->n, l->k);
    if (l->bias_cast) cast(j, l->bias, l->pt, l->bias_buf, l->out_t, 1, l->n);
    for (uint64_t r0 = 0; r0 < l->rows; r0 += l->row_tile)
        linear_tile(j, l, r0, min_u64(l->row_tile, l->rows - r0));
}

/* Prepare mode does not know whether there is a bias or another base (its pointers are NULL): all
 * ways are prepared, and only the one that the arguments show is measured. `other_t`: of a base
 * that is not the result. */
static void linear_ways(struct cuda_job *j, const struct linear_run *l, enum ops_dtype other_t,
                        bool bias_possible)
{
    uint64_t most = 0;
    for (int way = 0; j->dry && way < 4; way++) {
        struct linear_run other = *l;
        if ((way & 1 && !bias_possible) || (way & 2 && !l->add)) continue;
        other.with_bias = way & 1;
        other.base_t = way & 2 ? other_t : l->dst_t;
        j->untuned = other.with_bias != l->with_bias;
        j->used_bytes = CUDA_JOB_FIRST_BYTES;
        linear_run(j, &other);
        if (j->used_bytes > most) most = j->used_bytes;
    }
    j->untuned = false;
    struct linear_run real = *l;
    if (j->dry) j->used_bytes = most;
    else linear_run(j, &real);
}

void cuda_linear_forward(struct cuda_job *j, const struct ops_linear *a)
{
    const enum ops_dtype y = ops_wide(a->at, a->y_wide), other = ops_wide(a->at, a->base_wide);
    const struct linear_run l = { .rows = a->rows,
                                  .k = a->in,
                                  .n = a->out,
                                  .src_t = ops_wide(a->at, a->x_wide),
                                  .dst_t = y,
                                  .base_t = a->base && a->base != a->y ? other : y,
                                  .pt = a->pt,
                                  .prod = cuda_product_type(j->h, a->pt),
                                  .w_transposed = true,
                                  .add = a->add,
                                  .with_bias = a->bias != NULL,
                                  .src = a->x,
                                  .w = a->w,
                                  .bias = a->bias,
                                  .base = a->base ? a->base : a->y,
                                  .dst = a->y };
    linear_ways(j, &l, other, true);
}

void cuda_linear_backward_data(struct cuda_job *j, const struct ops_linear *a)
{
    const enum ops_dtype x = ops_wide(a->at, a->x_wide), other = ops_wide(a->at, a->base_wide);
    const struct linear_run l = { .rows = a->rows,
                                  .k = a->out,
                                  .n = a->in,
                                  .src_t = ops_wide(a->at, a->y_wide),
                                  .dst_t = x,
                                  .base_t = a->base && a->base != a->dx ? other : x,
                                  .pt = a->pt,
                                  .prod = cuda_product_type(j->h, a->pt),
                                  .add = a->add,
                                  .src = a->dy,
                                  .w = a->w,
                                  .base = a->base ? a->base : a->dx,
                                  .dst = a->dx };
    linear_ways(j, &l, other, false);
}

/* --- dW += dy^T x ----------------------------------------------------------------------------- */

/* Column-major dW^T[in, out] = x^T[in, rows] dy[rows, out]: A is x as it lies, B is dy, transposed.
 * Tiles of rows, where something is cast, add up in order. */
static void linear_dw(struct cuda_job *j, const struct ops_linear *a)
{
    const enum ops_dtype prod = cuda_product_type(j->h, a->pt), xt = ops_wide(a->at, a->x_wide),
                         yt = ops_wide(a->at, a->y_wide);
    const uint64_t bytes = ops_dtype_bytes(prod),
                   row_bytes = (xt != prod ? a->in : 0) + (yt != prod ? a->out : 0);
    const uint64_t tile =
        row_bytes ? cuda_tile(a->rows, row_bytes * bytes, LINEAR_TILE_BYTES) : a->rows;
    void *x_buf = xt != prod ? cuda_take(j, tile * a->in * bytes) : NULL;
    void *dy_buf = yt != prod ? cuda_take(j, tile * a->out * bytes) : NULL;
    for (uint64_t r0 = 0; r0 < a->rows; r0 += tile) {
        const uint64_t rows = min_u64(tile, a->rows - r0);
        const void *x = cuda_at(a->x, xt, r0 * a->in), *dy = cuda_at(a->dy, yt, r0 * a->out);
        const struct cuda_product p = { .m = a->in,
                                        .n = a->out,
                                        .k = rows,
                                        .lda = a->in,
                                        .ldb = a->out,
                                        .ldd = a->in,
                                        .tb = 1,
                                        .src = prod,
                                        .dst = OPS_F32 };
        if (x_buf) cast(j, x, xt, x_buf, prod, rows, a->in);
        if (dy_buf) cast(j, dy, yt, dy_buf, prod, rows, a->out);
        const struct cuda_operands o = { .a = x_buf ? x_buf : x,
                                         .b = dy_buf ? dy_buf : dy,
                                         .c = a->overwrite && r0 == 0 ? NULL : a->dw,
                                         .d = a->dw };
        cuda_job_product(j, &p, &o);
    }
}

static void linear_dbias(struct cuda_job *j, const struct ops_linear *a)
{
    struct cuda_column_sum c = { .rows = a->rows,
                                 .cols = a->out,
                                 .ld = a->out,
                                 .from = ops_wide(a->at, a->y_wide),
                                 .src = a->dy,
                                 .dst = a->dbias,
                                 .overwrite = a->overwrite };
    const uint64_t need = cuda_column_sum_scratch(&c);
    c.scratch.base = need ? cuda_take(j, need) : NULL;
    c.scratch.size_bytes = need;
    if (j->dry || j->st != STK_OK) return;
    cuda_job_check(j, cuda_column_sum(j->s->queue, &c), "kernel launch");
}

/* The sums of the bias use the scratch before the product's buffers do. */
void cuda_linear_backward_weight(struct cuda_job *j, const struct ops_linear *a)
{
    if (a->dbias || j->dry) linear_dbias(j, a);
    const uint64_t used = j->used_bytes;
    j->used_bytes = CUDA_JOB_FIRST_BYTES;
    if (a->dw || j->dry) linear_dw(j, a);
    if (used > j->used_bytes) j->used_bytes = used;
}
