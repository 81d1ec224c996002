/* gpu/cuda/cuda_head.c - the language head and its loss by token tiles: logits, their gradient,
 * products of it.
 *
 * Owns the tile rule of the head (from the vocabulary only). The logits of one tile live in
 * scratch, f32, never all; the gradient is written over them where its type allows
 * (cuda_head_tile). Losses of all tokens lie in scratch and are added up at the end, in token
 * order, into the result's slot. A target outside of the vocabulary makes the loss NaN. Must not
 * know streams. In the stream's producer.
 *
 * Operand of the products of the gradient, by (activations, products):
 *   bf16, bf16   bf16 over the logits      f32, bf16   the same: rounded to the operand's type
 *   f32, f32     f32 over the logits       bf16, f32   bf16 beside them, cast back over them
 *   any, fp16    f32 over the logits, cast to fp16 beside them */
#include "gpu/cuda/cuda_impl.h"

#define HEAD_LOGITS_BYTES ((uint64_t)256 << 20)
#define HEAD_TILE_MAX 4096
#define HEAD_LD_QUANTUM 64

struct head_run {
    const struct ops_head *a;
    bool train, with_dw;
    enum ops_dtype prod, grad_t, dx_t, dx_out_t; /* grad_t: as cuda_head_tile writes it */
    bool x_cast, w_cast, apart;                  /* apart: the gradient has a buffer of its own */
    uint64_t tile, ld;                           /* of logits in scratch */
    void *w_buf, *x_buf, *g_buf, *dx_buf;
    float *logits;
    double *loss; /* [tokens] */
};

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void head_plan(struct cuda_job *j, struct head_run *r)
{
    const struct ops_head *a = r->a;
    r->prod = cuda_product_type(j->h, a->pt);
    r->x_cast = a->at != r->prod;
    r->w_cast = a->pt != r->prod;
    r->ld = (a->vocab + HEAD_LD_QUANTUM - 1) / HEAD_LD_QUANTUM * HEAD_LD_QUANTUM;
    r->tile = min_u64(cuda_tile(a->tokens, r->ld * 4, HEAD_LOGITS_BYTES), HEAD_TILE_MAX);
    r->grad_t = r->prod == OPS_FP16 ? OPS_F32 : r->prod == OPS_BF16 ? OPS_BF16 : a->at;
    r->apart = r->grad_t != r->prod;
    r->dx_t = ops_wide(a->at, a->dx_wide);
    r->dx_out_t = r->dx_t == OPS_F32 || r->dx_t == r->prod ? r->dx_t : OPS_F32;
    const uint64_t bytes = ops_dtype_bytes(r->prod);
    r->loss = cuda_take(j, a->tokens * sizeof *r->loss);
    r->logits = cuda_take(j, r->tile * r->ld * sizeof *r->logits);
    if (r->w_cast) r->w_buf = cuda_take(j, a->vocab * a->hidden * bytes);
    if (r->x_cast) r->x_buf = cuda_take(j, r->tile * a->hidden * bytes);
    if (!r->train) return;
    if (r->apart) r->g_buf = cuda_take(j, r->tile * r->ld * 2);
    if (r->dx_out_t != r->dx_t) r->dx_buf = cuda_take(j, r->tile * a->hidden * 4);
}

static void head_cast(struct cuda_job *j, const void *src, enum ops_dtype from, uint64_t src_ld,
                      void *dst, enum ops_dtype to, uint64_t dst_ld, uint64_t rows, uint64_t cols)
{
    const struct cuda_cast c = { .rows = rows,
                                 .cols = cols,
                                 .src_ld = src_ld,
                                 .dst_ld = dst_ld,
                                 .from = from,
                                 .to = to,
                                 .src = src,
                                 .dst = dst };
    cuda_job_cast(j, &c);
}

/* logits[tokens, vocab] = x W^T. */
static void head_logits(struct cuda_job *j, const struct head_run *r, const void *x, const void *w,
                        float *logits, uint64_t ld, uint64_t tokens)
{
    const struct ops_head *a = r->a;
    const struct cuda_product p = { .m = a->vocab,
                                    .n = tokens,
                                    .k = a->hidden,
                                    .lda = a->hidden,
                                    .ldb = a->hidden,
                                    .ldd = ld,
                                    .ta = 1,
                                    .src = r->prod,
                                    .dst = OPS_F32 };
    const struct cuda_operands o = { .a = w, .b = x, .d = logits };
    cuda_job_product(j, &p, &o);
}

static void head_softmax(struct cuda_job *j, const struct head_run *r, const float *logits,
                         uint64_t ld, uint64_t t0, uint64_t tokens)
{
    const bool beside = r->apart && r->grad_t != OPS_F32;
    if (j->dry || j->st != STK_OK) return;
    struct cuda_head_tile t = { .rows = tokens,
                                .vocab = r->a->vocab,
                                .logits_ld = ld,
                                .at = r->a->at,
                                .logits = logits,
                                .targets = r->a->targets + t0,
                                .d_scale = r->a->d_scale,
                                .loss = r->loss + t0 };
    if (r->train) {
        t.at = r->grad_t;
        t.dlogits = beside ? r->g_buf : r->logits;
        t.dlogits_ld = beside || r->grad_t == OPS_F32 ? ld : 2 * ld;
    }
    cuda_job_check(j, cuda_head_tile(j->s->queue, &t), "kernel launch");
}

/* The gradient as operand of products: where it is, and its leading dimension. */
static const void *head_operand(struct cuda_job *j, const struct head_run *r, uint64_t tokens,
                                uint64_t *ld)
{
    const uint64_t vocab = r->a->vocab;
    *ld = !r->apart && r->prod == OPS_BF16 ? 2 * r->ld : r->ld;
    if (!r->apart) return r->logits;
    if (r->grad_t == OPS_F32) {
        head_cast(j, r->logits, OPS_F32, r->ld, r->g_buf, r->prod, r->ld, tokens, vocab);
        return r->g_buf;
    }
    head_cast(j, r->g_buf, r->grad_t, r->ld, r->logits, OPS_F32, r->ld, tokens, vocab);
    return r->logits;
}

/* dx = g W, dw += g^T x. */
static void head_backward(struct cuda_job *j, const struct head_run *r, const void *x,
                          const void *w, uint64_t t0, uint64_t tokens)
{
    const struct ops_head *a = r->a;
    uint64_t ld;
    const void *g = head_operand(j, r, tokens, &ld);
    void *dx = cuda_at_mut(a->dx, r->dx_t, t0 * a->hidden);
    const struct cuda_product data = { .m = a->hidden,
                                       .n = tokens,
                                       .k = a->vocab,
                                       .lda = a->hidden,
                                       .ldb = ld,
                                       .ldd = a->hidden,
                                       .src = r->prod,
                                       .dst = r->dx_out_t };
    const struct cuda_operands o = { .a = w, .b = g, .d = r->dx_out_t == r->dx_t ? dx : r->dx_buf };
    cuda_job_product(j, &data, &o);
    if (r->dx_out_t != r->dx_t)
        head_cast(j, r->dx_buf, OPS_F32, a->hidden, dx, r->dx_t, a->hidden, tokens, a->hidden);
    if (!r->with_dw) return;
    const struct cuda_product weight = { .m = a->hidden,
                                         .n = a->vocab,
                                         .k = tokens,
                                         .lda = a->hidden,
                                         .ldb = ld,
                                         .ldd = a->hidden,
                                         .tb = 1,
                                         .src = r->prod,
                                         .dst = OPS_F32 };
    const struct cuda_operands q = {
        .a = x, .b = g, .c = a->overwrite && t0 == 0 ? NULL : a->dw, .d = a->dw
    };
    cuda_job_product(j, &weight, &q);
}

/* Logits that were asked for are written where they are wanted; prepare mode, which does not know,
 * prepares both leading dimensions. */
static void head_tile(struct cuda_job *j, const struct head_run *r, const void *w, uint64_t t0,
                      uint64_t tokens)
{
    const struct ops_head *a = r->a;
    const bool out = !r->train && a->logits;
    const void *x = cuda_at(a->x, a->at, t0 * a->hidden);
    float *logits = out ? a->logits + t0 * a->vocab : r->logits;
    const uint64_t ld = out ? a->vocab : r->ld;
    if (r->x_cast) {
        head_cast(j, x, a->at, a->hidden, r->x_buf, r->prod, a->hidden, tokens, a->hidden);
        x = r->x_buf;
    }
    head_logits(j, r, x, w, logits, ld, tokens);
    if (j->dry && !r->train && a->vocab != ld) head_logits(j, r, x, w, logits, a->vocab, tokens);
    head_softmax(j, r, logits, ld, t0, tokens);
    if (r->train) head_backward(j, r, x, w, t0, tokens);
}

void cuda_head(struct cuda_job *j, const struct ops_head *a, bool train, double *loss)
{
    struct head_run r = { .a = a, .train = train, .with_dw = train && (a->dw || j->dry) };
    const void *w = a->w;
    head_plan(j, &r);
    if (r.w_cast) {
        head_cast(j, a->w, a->pt, a->hidden, r.w_buf, r.prod, a->hidden, a->vocab, a->hidden);
        w = r.w_buf;
    }
    for (uint64_t t0 = 0; t0 < a->tokens; t0 += r.tile)
        head_tile(j, &r, w, t0, min_u64(r.tile, a->tokens - t0));
    if (!j->dry && j->st == STK_OK)
        cuda_job_check(j, cuda_sum_f64(j->s->queue, r.loss, a->tokens, loss), "kernel launch");
}
