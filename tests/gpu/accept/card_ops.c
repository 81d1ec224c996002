/* tests/gpu/accept/card_ops.c - operations of the CUDA device on a real card against the host device: the same calls on
 * arenas of the same bytes, every output element by element within a bound, and the same bits from the card twice.
 *
 * Shapes: one that fits nothing (odd, prime) and one of a layer as it is trained. Types: f32 activations with f32
 * products, bf16 activations with bf16 products. Bounds are units of the output's type at the size of its largest
 * element, because sums have another order there (gpu/cuda/kernels.h). Skipped where there is no card.
 *
 * A table of operations, each with its buffers: what is not named as an output must come back unchanged. */
#include "tests/test.h"
#include "tests/gpu/kern_test.h"

#include "base/convert.h"
#include "base/exec.h"
#include "gpu/ops.h"

TEST_MAIN()

struct shape {
    const char *name;
    uint64_t tokens, seq, hidden, inter, heads, kv, dim, vocab, head_tokens;
};
static const struct shape shapes[] = {
    { "odd", 3 * 67, 67, 136, 264, 4, 2, 40, 1003, 3 * 67 },
    { "layer", 2048, 1024, 2048, 5632, 32, 4, 64, 16000, 512 },
};

/* at, pt: types of activations and parameters; 0x40: f32, ids, first keys, inverse frequencies. */
enum kind { AT, PT, F32, IDS, KEYS, FREQ };
enum { BUFFERS = 12 };
struct buffer {
    enum kind kind;
    uint64_t n, at_bytes;
    double ulps; /* of an output; 0: an input, which stays as it is */
    double size; /* of the random numbers in it */
};

struct stage {
    const struct shape *shape;
    enum ops_dtype at, pt;
    struct buffer b[BUFFERS];
    int n;
    uint64_t image_bytes; /* scratch is behind it */
    struct ops_scratch scratch;
    struct dev_stream *s;
    uint8_t *arena; /* NULL in prepare mode */
    double loss;
    struct convert_sum sum;
    struct stk_error err;
};

static enum ops_dtype type_of(const struct stage *g, enum kind k)
{
    return k == AT ? g->at : k == PT ? g->pt : k == F32 || k == FREQ ? OPS_F32 : OPS_I32;
}
/* Declares a buffer; returns its number. */
static int has(struct stage *g, enum kind k, uint64_t n, double ulps, double size)
{
    STK_ASSERT(g->n < BUFFERS);
    struct buffer *b = &g->b[g->n];
    *b = (struct buffer){ k, n, g->image_bytes, ulps, size };
    g->image_bytes += (n * ops_dtype_bytes(type_of(g, k)) + 255) / 256 * 256;
    return g->n++;
}
static void *at(const struct stage *g, int i) { return g->arena ? g->arena + g->b[i].at_bytes : NULL; }

/* --- operations: with `lay` they declare their buffers, else they run on them */

static stk_status linear(struct stage *g, bool lay)
{
    const struct shape *p = g->shape;
    enum { X, W, BIAS, Y, DY, DX, DW, DBIAS };
    if (lay) {
        has(g, AT, p->tokens * p->hidden, 0, 0.5), has(g, PT, p->hidden * p->inter, 0, 0.1), has(g, PT, p->inter, 0, 0.5);
        has(g, AT, p->tokens * p->inter, 2, 1), has(g, AT, p->tokens * p->inter, 0, 0.5);
        has(g, AT, p->tokens * p->hidden, 2, 1), has(g, F32, p->hidden * p->inter, 4, 1), has(g, F32, p->inter, 4, 1);
        return STK_OK;
    }
    struct ops_linear a = { .rows = p->tokens, .in = p->hidden, .out = p->inter, .at = g->at, .pt = g->pt };
    a.x = at(g, X), a.w = at(g, W), a.bias = at(g, BIAS), a.y = at(g, Y), a.dy = at(g, DY), a.dx = at(g, DX);
    a.dw = at(g, DW), a.dbias = at(g, DBIAS), a.scratch = g->scratch;
    STK_TRY(ops_linear_forward(g->s, &a, &g->err));
    STK_TRY(ops_linear_backward_data(g->s, &a, &g->err));
    return ops_linear_backward_weight(g->s, &a, &g->err);
}

static stk_status head(struct stage *g, bool lay)
{
    const struct shape *p = g->shape;
    enum { X, W, TARGETS, DX, DW };
    if (lay) {
        has(g, AT, p->head_tokens * p->hidden, 0, 0.5), has(g, PT, p->vocab * p->hidden, 0, 0.1);
        has(g, IDS, p->head_tokens, 0, (double)p->vocab), has(g, AT, p->head_tokens * p->hidden, 4, 1);
        has(g, F32, p->vocab * p->hidden, 4, 1);
        return STK_OK;
    }
    struct ops_head a = { .tokens = p->head_tokens, .hidden = p->hidden, .vocab = p->vocab, .at = g->at, .pt = g->pt,
                          .d_scale = 0.125 };
    a.x = at(g, X), a.w = at(g, W), a.targets = at(g, TARGETS), a.dx = at(g, DX), a.dw = at(g, DW);
    a.loss_sum = &g->loss, a.scratch = g->scratch;
    return ops_head_train(g->s, &a, &g->err);
}

static stk_status attention(struct stage *g, bool lay)
{
    const struct shape *p = g->shape;
    const uint64_t q = p->heads * p->dim, k = p->kv * p->dim;
    enum { Q, K, V, O, LSE, DO, DQ, DK, DV, FIRST };
    if (lay) {
        has(g, AT, p->tokens * q, 0, 1), has(g, AT, p->tokens * k, 0, 1), has(g, AT, p->tokens * k, 0, 1);
        has(g, AT, p->tokens * q, 4, 1), has(g, F32, p->tokens * p->heads, 16, 1), has(g, AT, p->tokens * q, 0, 0.5);
        has(g, AT, p->tokens * q, 4, 1), has(g, AT, p->tokens * k, 4, 1), has(g, AT, p->tokens * k, 4, 1);
        has(g, KEYS, p->tokens, 0, 1);
        return STK_OK;
    }
    struct ops_attention a = { .n_seq = p->tokens / p->seq, .seq = p->seq, .heads = p->heads, .kv_heads = p->kv,
                               .head_dim = p->dim, .at = g->at, .q_stride = q, .k_stride = k, .v_stride = k, .o_stride = q,
                               .scale = (float)(1 / sqrt((double)p->dim)) };
    a.q = at(g, Q), a.k = at(g, K), a.v = at(g, V), a.o = at(g, O), a.lse = at(g, LSE), a.d_o = at(g, DO);
    a.dq = at(g, DQ), a.dk = at(g, DK), a.dv = at(g, DV), a.first_key = at(g, FIRST), a.scratch = g->scratch;
    STK_TRY(ops_attention_forward(g->s, &a, &g->err));
    return ops_attention_backward(g->s, &a, &g->err);
}

static stk_status rmsnorm(struct stage *g, bool lay)
{
    const struct shape *p = g->shape;
    enum { X, W, Y, RSTD, DY, DX, DW };
    const uint64_t n = p->tokens * p->hidden;
    if (lay) {
        has(g, AT, n, 0, 1), has(g, PT, p->hidden, 0, 1), has(g, AT, n, 4, 1), has(g, F32, p->tokens, 4, 1);
        has(g, AT, n, 0, 0.5), has(g, AT, n, 4, 1), has(g, F32, p->hidden, 8, 1);
        return STK_OK;
    }
    struct ops_rmsnorm a = { .rows = p->tokens, .cols = p->hidden, .group = 1, .x_stride = p->hidden, .y_stride = p->hidden,
                             .at = g->at, .pt = g->pt, .eps = 1e-6 };
    a.x = at(g, X), a.w = at(g, W), a.y = at(g, Y), a.rstd = at(g, RSTD), a.dy = at(g, DY), a.dx = at(g, DX);
    a.dw = at(g, DW), a.scratch = g->scratch;
    STK_TRY(ops_rmsnorm_forward(g->s, &a, &g->err));
    return ops_rmsnorm_backward(g->s, &a, &g->err);
}

static stk_status rope(struct stage *g, bool lay)
{
    const struct shape *p = g->shape;
    enum { Q, K, POS, INV };
    if (lay) {
        has(g, AT, p->tokens * p->heads * p->dim, 2, 1), has(g, AT, p->tokens * p->kv * p->dim, 2, 1);
        has(g, IDS, p->tokens, 0, (double)p->seq), has(g, FREQ, p->dim / 2, 0, 1);
        return STK_OK;
    }
    struct ops_rope a = { .tokens = p->tokens, .heads = p->heads, .kv_heads = p->kv, .head_dim = p->dim,
                          .q_stride = p->heads * p->dim, .k_stride = p->kv * p->dim, .at = g->at, .attention_factor = 1 };
    a.q = at(g, Q), a.k = at(g, K), a.pos = at(g, POS), a.inv_freq = at(g, INV);
    return ops_rope(g->s, &a, &g->err);
}

static stk_status swiglu(struct stage *g, bool lay)
{
    const struct shape *p = g->shape;
    enum { GATE, UP, Y, DY, DGATE, DUP };
    const uint64_t n = p->tokens * p->inter;
    if (lay) {
        has(g, AT, n, 0, 2), has(g, AT, n, 0, 1), has(g, AT, n, 2, 1), has(g, AT, n, 0, 1), has(g, AT, n, 2, 1);
        has(g, AT, n, 2, 1);
        return STK_OK;
    }
    struct ops_swiglu a = { .rows = p->tokens, .cols = p->inter, .g_stride = p->inter, .u_stride = p->inter,
                            .y_stride = p->inter, .at = g->at };
    a.gate = at(g, GATE), a.up = at(g, UP), a.y = at(g, Y), a.dy = at(g, DY), a.dgate = at(g, DGATE), a.dup = at(g, DUP);
    STK_TRY(ops_swiglu_forward(g->s, &a, &g->err));
    return ops_swiglu_backward(g->s, &a, &g->err);
}

static stk_status embed(struct stage *g, bool lay)
{
    const struct shape *p = g->shape;
    enum { IDS_, TABLE, Y, DY, DTABLE };
    if (lay) {
        has(g, IDS, p->tokens, 0, (double)p->vocab / 3), has(g, PT, p->vocab * p->hidden, 0, 1);
        has(g, AT, p->tokens * p->hidden, 1, 1), has(g, AT, p->tokens * p->hidden, 0, 1), has(g, F32, p->vocab * p->hidden, 2, 1);
        return STK_OK;
    }
    struct ops_embed a = { .tokens = p->tokens, .vocab = p->vocab, .hidden = p->hidden, .at = g->at, .pt = g->pt };
    a.ids = at(g, IDS_), a.table = at(g, TABLE), a.y = at(g, Y), a.dy = at(g, DY), a.dtable = at(g, DTABLE);
    STK_TRY(ops_embed_forward(g->s, &a, &g->err));
    return ops_embed_backward(g->s, &a, &g->err);
}

static stk_status grad_cast(struct stage *g, bool lay)
{
    const struct shape *p = g->shape;
    enum { ACC, SRC, OUT, SUM };
    const uint64_t n = p->tokens * p->hidden;
    if (lay) {
        has(g, F32, n, 1, 1), has(g, AT, n, 0, 1), has(g, PT, n, 1, 1), has(g, AT, n, 1, 1);
        return STK_OK;
    }
    struct ops_grad_cast a = { .n = n, .gt = g->pt, .scale = 0.5f };
    a.acc = at(g, ACC), a.out = at(g, OUT), a.sum = &g->sum;
    STK_TRY(ops_acc_add(g->s, n, at(g, ACC), at(g, SRC), g->at, &g->err));
    STK_TRY(ops_add(g->s, g->at, n, at(g, SRC), at(g, SRC), at(g, SUM), &g->err));
    return ops_grad_cast(g->s, &a, &g->err);
}

static const struct operation {
    const char *name;
    stk_status (*run)(struct stage *g, bool lay);
} operations[] = { { "linear", linear }, { "head", head },     { "attention", attention }, { "rmsnorm", rmsnorm },
                   { "rope", rope },     { "swiglu", swiglu }, { "embed", embed },         { "grad_cast", grad_cast } };
enum { OPERATIONS = sizeof operations / sizeof operations[0] };

/* --- running */

static void fill(const struct stage *g, uint8_t *image)
{
    kt_reseed(17);
    for (int i = 0; i < g->n; i++) {
        const struct buffer *b = &g->b[i];
        const enum ops_dtype t = type_of(g, b->kind);
        void *p = image + b->at_bytes;
        for (uint64_t k = 0; k < b->n; k++) {
            if (b->kind == IDS) ((int32_t *)p)[k] = (int32_t)(k * 2654435761u % (uint64_t)b->size);
            else if (b->kind == KEYS) /* three documents a sequence */
                ((int32_t *)p)[k] = (int32_t)(k % g->shape->seq * 3 / g->shape->seq * g->shape->seq / 3);
            else if (b->kind == FREQ) ((float *)p)[k] = (float)pow(10000, -2.0 * (double)k / (double)g->shape->dim);
            else kt_put(t, p, k, b->size * kt_uniform());
        }
    }
}

struct side {
    struct exec *ex;
    struct dev *d;
    struct dev_stream *s;
    uint8_t *arena;
    uint64_t arena_bytes;
};

/* Prepare mode says what each operation wants; the arena holds the largest. */
static stk_status side_open(struct side *w, enum dev_kind kind, enum dev_matmul matmul, const struct shape *p,
                            enum ops_dtype at_type, struct stk_error *err)
{
    void *arena = NULL;
    struct dev_cfg cfg = { .kind = kind, .matmul = matmul };
    if (kind != DEV_CUDA) cfg.memory_bytes = UINT64_MAX / 4; /* 0 is what is free on a card */
    STK_TRY(exec_open_threads(&w->ex, err));
    cfg.ex = w->ex;
    STK_TRY(dev_open(&cfg, &w->d, err));
    STK_TRY(dev_stream_open(w->d, "operations", 0, &w->s, err));
    for (int k = 0; k < OPERATIONS; k++) {
        struct stage g = { .shape = p, .at = at_type, .pt = OPS_BF16, .s = w->s };
        uint64_t scratch = 0;
        STK_TRY(operations[k].run(&g, true));
        dev_prepare_begin(w->d);
        stk_status st = operations[k].run(&g, false);
        stk_status end = dev_prepare_end(w->d, &scratch, err);
        if (st != STK_OK) *err = g.err;
        if (st != STK_OK || end != STK_OK) return st != STK_OK ? st : end;
        if (g.image_bytes + scratch > w->arena_bytes) w->arena_bytes = g.image_bytes + scratch;
    }
    STK_TRY(dev_reserve(w->d, w->arena_bytes, &arena, err));
    w->arena = arena;
    return STK_OK;
}

static void side_close(struct side *w)
{
    if (w->s) dev_stream_close(w->s);
    dev_close(w->d);
    if (w->ex) exec_close(w->ex);
}

/* `image` holds the inputs, then what came back. */
static stk_status run_on(struct side *w, const struct operation *o, struct stage *g, uint8_t *image)
{
    g->s = w->s;
    g->arena = w->arena;
    g->scratch = (struct ops_scratch){ w->arena + g->image_bytes, w->arena_bytes - g->image_bytes };
    g->loss = 0;
    STK_TRY(dev_copy(w->s, w->arena, image, g->image_bytes, DEV_TO_DEVICE, &g->err));
    STK_TRY(o->run(g, false));
    STK_TRY(dev_copy(w->s, image, w->arena, g->image_bytes, DEV_TO_HOST, &g->err));
    return dev_sync(w->s, &g->err);
}

static bool near_host(const struct operation *o, const struct stage *g, const uint8_t *got, const uint8_t *want)
{
    for (int i = 0; i < g->n; i++) {
        const struct buffer *b = &g->b[i];
        const enum ops_dtype t = type_of(g, b->kind);
        const void *a = got + b->at_bytes, *h = want + b->at_bytes;
        /* f32 sums of bf16 products; of f32 ones, with a longer sum's errors */
        const double unit = t == OPS_F32 ? (g->at == OPS_F32 ? 0x1p-18 : 0x1p-8) : 0x1p-8;
        double size = 0;
        if (memcmp(a, h, b->n * ops_dtype_bytes(t)) == 0) continue;
        for (uint64_t k = 0; t != OPS_I32 && k < b->n; k++)
            if (fabs(kt_get(t, h, k)) > size) size = fabs(kt_get(t, h, k));
        for (uint64_t k = 0; k < b->n; k++) {
            if (t != OPS_I32 && kt_near(kt_get(t, a, k), kt_get(t, h, k), b->ulps * unit * size)) continue;
            printf("# %s: element %" PRIu64 " of buffer %d is %.9g, not %.9g\n", o->name, k, i, t == OPS_I32 ? 0 : kt_get(t, a, k),
                   t == OPS_I32 ? 0 : kt_get(t, h, k));
            return false;
        }
    }
    return true;
}

static bool compare(struct side *host, struct side *card, const struct operation *o, const struct shape *p, enum ops_dtype type)
{
    struct stage g = { .shape = p, .at = type, .pt = OPS_BF16 }, again;
    bool good = false;
    uint8_t *image[3] = { NULL };
    double loss = 0;
    (void)o->run(&g, true);
    for (int i = 0; i < 3; i++) fill(&g, image[i] = kt_alloc(g.image_bytes));
    again = g;
    stk_status st = run_on(host, o, &g, image[0]);
    loss = g.loss;
    const struct convert_sum sum = g.sum;
    if (st == STK_OK) st = run_on(card, o, &g, image[1]);
    if (st == STK_OK) st = run_on(card, o, &again, image[2]);
    if (st != STK_OK) {
        printf("# %s: %s\n", o->name, g.err.text[0] ? g.err.text : again.err.text);
    } else {
        kt_worst = 0;
        good = near_host(o, &g, image[1], image[0]) && fabs(g.loss - loss) <= 1e-3 * fabs(loss) &&
               fabs(g.sum.sum_sq - sum.sum_sq) <= 1e-6 * sum.sum_sq && g.sum.nonfinite == sum.nonfinite;
        const bool same = memcmp(image[1], image[2], g.image_bytes) == 0 && g.loss == again.loss;
        printf("# operation %s, %s, %s: %.2f of the bound%s\n", o->name, p->name, type == OPS_F32 ? "f32" : "bf16", kt_worst,
               same ? "" : ", and other bits the second time");
        good = good && same;
    }
    for (int i = 0; i < 3; i++) free(image[i]);
    return good;
}

static bool usable(enum dev_kind kind)
{
    struct stk_error err = { 0 };
    char text[256];
    if (kind == DEV_HOST_DISCRETE || dev_describe(kind, text, sizeof text, &err) == STK_OK) return true;
    printf("# %s\n", err.text);
    return false;
}

static void compare_all(enum dev_kind kind, const struct shape *p, enum ops_dtype type)
{
    struct side host = { 0 }, card = { 0 };
    struct stk_error err = { 0 };
    if (!usable(kind)) SKIP("there is no card");
    const enum dev_matmul matmul = type == OPS_F32 ? DEV_MATMUL_F32 : DEV_MATMUL_BF16;
    stk_status st = side_open(&host, DEV_HOST_DISCRETE, DEV_MATMUL_F32, p, type, &err);
    if (st == STK_OK) st = side_open(&card, kind, matmul, p, type, &err);
    if (st != STK_OK) printf("# %s\n", err.text);
    CHECK(st == STK_OK);
    for (int k = 0; st == STK_OK && k < OPERATIONS; k++) CHECK(compare(&host, &card, &operations[k], p, type));
    side_close(&card);
    side_close(&host);
}

TEST(card_odd_shapes_f32) { compare_all(DEV_CUDA, &shapes[0], OPS_F32); }
TEST(card_odd_shapes_bf16) { compare_all(DEV_CUDA, &shapes[0], OPS_BF16); }
TEST(card_layer_f32) { compare_all(DEV_CUDA, &shapes[1], OPS_F32); }
TEST(card_layer_bf16) { compare_all(DEV_CUDA, &shapes[1], OPS_BF16); }
/* This program itself, where there is no card: the host's bf16 products against its f32 ones. */
TEST(card_table_on_the_host) { compare_all(DEV_HOST_DISCRETE, &shapes[0], OPS_BF16); }

/* The card's matrix rate as the device measures it, for the share that a step reaches. */
TEST(card_matrix_rate)
{
    struct exec *ex = NULL;
    struct dev *d = NULL;
    struct stk_error err = { 0 };
    struct dev_caps caps;
    if (!usable(DEV_CUDA)) SKIP("there is no card");
    CHECK_OK(exec_open_threads(&ex, &err), &err);
    struct dev_cfg cfg = { .kind = DEV_CUDA, .ex = ex };
    CHECK_OK(dev_open(&cfg, &d, &err), &err);
    CHECK_OK(dev_matmul_rate(d, &err), &err);
    dev_caps_read(d, &caps);
    printf("# matrix_rate %.6g\n# numerics %s\n", caps.matmul_flops_per_s, caps.numerics);
    CHECK(caps.matmul_flops_per_s > 0);
    dev_close(d);
    exec_close(ex);
}
