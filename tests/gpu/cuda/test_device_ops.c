/* tests/gpu/cuda/test_device_ops.c - operations of the CUDA device on the stand-in against the host device: the same
 * calls on arenas of the same bytes, results element by element within a bound; the same bits over seeds of the
 * stand-in. Kernels alone are in test_kernels_*.c; here it is how the device puts them and products together. */
#include "tests/test.h"
#include "tests/gpu/cuda/device_rig.h"
#include "tests/gpu/kern_test.h"

TEST_MAIN()

enum { PLACE = 32768, PLACES = 16, ARENA = PLACE * (PLACES + 1) + (4 << 20) };
enum { T = 12, H = 32, V = 100, OUT = 48, HEADS = 4, KV = 2, DIM = 8 };

/* What one operation of the list does on an arena: place i is at i * PLACE. */
struct stage {
    struct dev_stream *s;
    uint8_t *arena;
    double *loss;
    struct convert_sum *sum;
    enum ops_dtype at, pt;
    struct stk_error *err;
};
static void *place(const struct stage *g, int i) { return g->arena + (uint64_t)i * PLACE; }
static struct ops_scratch scratch(const struct stage *g)
{
    return (struct ops_scratch){ place(g, PLACES), ARENA - PLACE * PLACES };
}

static struct ops_linear linear_of(const struct stage *g)
{
    struct ops_linear a = { .rows = T, .in = H, .out = OUT, .at = g->at, .pt = g->pt };
    a.x = place(g, 0), a.w = place(g, 1), a.bias = place(g, 2), a.y = place(g, 3);
    a.dy = place(g, 4), a.dx = place(g, 5), a.dw = place(g, 6), a.dbias = place(g, 7);
    a.scratch = scratch(g);
    return a;
}
static stk_status linear_forward(const struct stage *g)
{
    struct ops_linear a = linear_of(g);
    return ops_linear_forward(g->s, &a, g->err);
}
static stk_status linear_residual(const struct stage *g)
{
    struct ops_linear a = linear_of(g);
    a.add = true;
    return ops_linear_forward(g->s, &a, g->err);
}
static stk_status linear_data(const struct stage *g)
{
    struct ops_linear a = linear_of(g);
    return ops_linear_backward_data(g->s, &a, g->err);
}
static stk_status linear_weight(const struct stage *g)
{
    struct ops_linear a = linear_of(g);
    return ops_linear_backward_weight(g->s, &a, g->err);
}
static struct ops_head head_of(const struct stage *g)
{
    struct ops_head a = { .tokens = T, .hidden = H, .vocab = V, .at = g->at, .pt = g->pt, .d_scale = 0.125 };
    a.x = place(g, 0), a.w = place(g, 1), a.targets = place(g, 8), a.loss_sum = g->loss;
    a.dx = place(g, 5), a.dw = place(g, 6), a.scratch = scratch(g);
    return a;
}
static stk_status head_forward(const struct stage *g)
{
    struct ops_head a = head_of(g);
    a.logits = place(g, 6);
    return ops_head_forward(g->s, &a, g->err);
}
static stk_status head_train(const struct stage *g)
{
    struct ops_head a = head_of(g);
    return ops_head_train(g->s, &a, g->err);
}
static struct ops_attention attention_of(const struct stage *g)
{
    struct ops_attention a = { .n_seq = 2, .seq = T / 2, .heads = HEADS, .kv_heads = KV, .head_dim = DIM, .at = g->at };
    a.q_stride = a.o_stride = HEADS * DIM, a.k_stride = a.v_stride = KV * DIM, a.scale = 0.35f;
    a.first_key = place(g, 9), a.q = place(g, 0), a.k = place(g, 1), a.v = place(g, 2), a.o = place(g, 3);
    a.lse = place(g, 10), a.d_o = place(g, 4), a.dq = place(g, 5), a.dk = place(g, 6), a.dv = place(g, 7);
    a.scratch = scratch(g);
    return a;
}
static stk_status attention(const struct stage *g)
{
    struct ops_attention a = attention_of(g);
    STK_TRY(ops_attention_forward(g->s, &a, g->err));
    return ops_attention_backward(g->s, &a, g->err);
}
static stk_status rmsnorm(const struct stage *g)
{
    struct ops_rmsnorm a = { .rows = T, .cols = H, .group = 1, .x_stride = H, .y_stride = H, .at = g->at, .pt = g->pt,
                             .eps = 1e-6 };
    a.x = place(g, 0), a.w = place(g, 1), a.y = place(g, 3), a.rstd = place(g, 10), a.dy = place(g, 4);
    a.dx = place(g, 5), a.dw = place(g, 6), a.scratch = scratch(g);
    STK_TRY(ops_rmsnorm_forward(g->s, &a, g->err));
    return ops_rmsnorm_backward(g->s, &a, g->err);
}
static stk_status rope(const struct stage *g)
{
    struct ops_rope a = { .tokens = T, .heads = HEADS, .kv_heads = KV, .head_dim = DIM, .q_stride = HEADS * DIM,
                          .k_stride = KV * DIM, .at = g->at, .attention_factor = 1 };
    a.q = place(g, 3), a.k = place(g, 5), a.pos = place(g, 8), a.inv_freq = place(g, 11);
    return ops_rope(g->s, &a, g->err);
}
static stk_status swiglu(const struct stage *g)
{
    struct ops_swiglu a = { .rows = T, .cols = H, .g_stride = H, .u_stride = H, .y_stride = H, .at = g->at };
    a.gate = place(g, 0), a.up = place(g, 1), a.y = place(g, 3), a.dy = place(g, 4), a.dgate = place(g, 5), a.dup = place(g, 6);
    STK_TRY(ops_swiglu_forward(g->s, &a, g->err));
    return ops_swiglu_backward(g->s, &a, g->err);
}
static stk_status embed(const struct stage *g)
{
    struct ops_embed a = { .tokens = T, .vocab = V, .hidden = H, .at = g->at, .pt = g->pt };
    a.ids = place(g, 8), a.table = place(g, 1), a.y = place(g, 3), a.dy = place(g, 4), a.dtable = place(g, 6);
    STK_TRY(ops_embed_forward(g->s, &a, g->err));
    return ops_embed_backward(g->s, &a, g->err);
}
static stk_status grad_cast(const struct stage *g)
{
    struct ops_grad_cast a = { .n = 3000, .gt = OPS_BF16, .scale = 0.5f };
    a.acc = place(g, 6), a.out = place(g, 3), a.sum = g->sum;
    STK_TRY(ops_acc_add(g->s, 1000, place(g, 6), place(g, 0), g->at, g->err));
    STK_TRY(ops_add(g->s, g->at, T * H, place(g, 0), place(g, 1), place(g, 5), g->err));
    return ops_grad_cast(g->s, &a, g->err);
}

/* Types of places 0 to 12, so that their bytes are numbers. a: activation, p: parameter, f: f32, i: ids, k: first keys, - : f32
 * angles. */
static const struct operation {
    const char *name;
    stk_status (*run)(const struct stage *g);
    const char *types;
    double ulps; /* of the result's type, and of its largest element */
} operations[] = {
    { "linear_forward", linear_forward, "apppaaaffikff", 2 },
    { "linear_residual", linear_residual, "apppaaaffikff", 2 },
    { "linear_backward_data", linear_data, "appaaafffikff", 2 },
    { "linear_backward_weight", linear_weight, "appaaafffikff", 2 },
    { "head_forward", head_forward, "appaaafffikff", 2 },
    { "head_train", head_train, "appaaafffikff", 4 },
    { "attention", attention, "aaaaaaaaaikff", 4 },
    { "rmsnorm", rmsnorm, "appaaafffikff", 4 },
    { "rope", rope, "appaaafffikff", 2 },
    { "swiglu", swiglu, "aaaaaaaffikff", 4 },
    { "embed", embed, "appaaafffikff", 2 },
    { "grad_cast", grad_cast, "aaaaaafffikff", 2 },
};

static enum ops_dtype type_of(const struct operation *o, const struct stage *g, int i)
{
    static const char fixed[] = "ik";
    char c = i < 13 ? o->types[i] : 'f';
    if (i == 8) c = 'i';
    if (i == 9) c = 'k';
    if (i == 10 || i == 11) c = 'f';
    if (o->run == grad_cast && i == 3) return OPS_BF16;
    if ((o->run == linear_forward || o->run == linear_residual) && i == 3) return g->at;
    return strchr(fixed, c) ? OPS_I32 : c == 'a' ? g->at : c == 'p' ? g->pt : OPS_F32;
}

static void fill(const struct operation *o, const struct stage *g, uint8_t *image)
{
    kt_reseed(17);
    for (int i = 0; i < PLACES; i++) {
        enum ops_dtype t = type_of(o, g, i);
        uint64_t n = PLACE / ops_dtype_bytes(t);
        uint8_t *p = image + (uint64_t)i * PLACE;
        for (uint64_t k = 0; k < n; k++) {
            if (i == 8) ((int32_t *)(void *)p)[k] = (int32_t)((k * 37) % V);
            else if (i == 9) ((int32_t *)(void *)p)[k] = (int32_t)(k % (T / 2) / 3);
            else if (t == OPS_I32) ((int32_t *)(void *)p)[k] = 0;
            else kt_put(t, p, k, 0.5 * kt_uniform());
        }
    }
    memset(image + (uint64_t)PLACE * PLACES, 0, ARENA - PLACE * PLACES);
}

/* One operation on a device whose arena holds `image`; the arena comes back into it. */
static stk_status run_on(struct dev_stream *s, uint8_t *arena, const struct operation *o, struct stage *g,
                         uint8_t *image, struct stk_error *err)
{
    g->s = s;
    g->arena = arena;
    g->err = err;
    STK_TRY(dev_copy(s, arena, image, ARENA, DEV_TO_DEVICE, err));
    STK_TRY(o->run(g));
    STK_TRY(dev_copy(s, image, arena, ARENA, DEV_TO_HOST, err));
    return dev_sync(s, err);
}

struct result {
    uint8_t *image;
    double loss;
    struct convert_sum sum;
};

static void on_host(const struct operation *o, enum ops_dtype at, enum ops_dtype pt, struct result *r)
{
    struct exec *ex;
    struct dev *d;
    struct dev_stream *s;
    struct stk_error err = { 0 };
    void *arena;
    CHECK_OK(exec_open_threads(&ex, &err), &err);
    struct dev_cfg cfg = { .kind = DEV_HOST_DISCRETE, .ex = ex, .memory_bytes = ARENA, .matmul = DEV_MATMUL_F32,
                           .compute_threads = 1 };
    CHECK_OK(dev_open(&cfg, &d, &err), &err);
    CHECK_OK(dev_reserve(d, ARENA, &arena, &err), &err);
    CHECK_OK(dev_stream_open(d, "host", 0, &s, &err), &err);
    struct stage g = { .loss = &r->loss, .sum = &r->sum, .at = at, .pt = pt };
    fill(o, &g, r->image);
    CHECK_OK(run_on(s, arena, o, &g, r->image, &err), &err);
    dev_stream_close(s);
    dev_close(d);
    exec_close(ex);
}

static void on_card(const struct operation *o, enum ops_dtype at, enum ops_dtype pt, uint64_t seed, struct result *r)
{
    struct rig g;
    CHECK_OK(rig_open(&g, EXEC_SIM, seed, ARENA), &g.err);
    struct stage stage = { .loss = &r->loss, .sum = &r->sum, .at = at, .pt = pt };
    fill(o, &stage, r->image);
    CHECK_OK(dev_host_register(g.d, r->image, ARENA, &g.err), &g.err);
    CHECK_OK(run_on(g.s, g.arena, o, &stage, r->image, &g.err), &g.err);
    RIG_CLOSE(&g);
}

/* Largest difference in units of the bound. */
static bool near_host(const struct operation *o, const struct stage *g, const uint8_t *got, const uint8_t *want)
{
    for (int i = 0; i < 13; i++) {
        const enum ops_dtype t = type_of(o, g, i);
        const void *a = got + (uint64_t)i * PLACE, *b = want + (uint64_t)i * PLACE;
        if (t == OPS_I32 || memcmp(a, b, PLACE) == 0) continue;
        const uint64_t n = PLACE / ops_dtype_bytes(t);
        double size = 0;
        for (uint64_t k = 0; k < n; k++)
            if (fabs(kt_get(t, b, k)) > size) size = fabs(kt_get(t, b, k));
        /* sums in another order, of operands that may have been rounded to bf16 on the way */
        const double unit = t == OPS_F32 && g->at == OPS_F32 ? 0x1p-20 : t == OPS_FP16 ? 0x1p-10 : 0x1p-8;
        for (uint64_t k = 0; k < n; k++) {
            if (kt_near(kt_get(t, a, k), kt_get(t, b, k), o->ulps * unit * size)) continue;
            printf("# %s: element %d of place %d is %.9g, not %.9g\n", o->name, (int)k, i, kt_get(t, a, k), kt_get(t, b, k));
            return false;
        }
    }
    return true;
}

TEST(cuda_operations_equal_the_hosts)
{
    static const enum ops_dtype types[][2] = { { OPS_F32, OPS_BF16 }, { OPS_BF16, OPS_BF16 }, { OPS_F32, OPS_FP16 } };
    struct result host = { .image = kt_alloc(ARENA) }, card[2] = { { .image = kt_alloc(ARENA) }, { .image = kt_alloc(ARENA) } };
    for (size_t k = 0; k < sizeof operations / sizeof operations[0]; k++)
        for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
            const struct operation *o = &operations[k];
            host.loss = 0;
            on_host(o, types[t][0], types[t][1], &host);
            for (int i = 0; i < 2; i++) {
                card[i].loss = 0;
                on_card(o, types[t][0], types[t][1], test_seed() + (uint64_t)i, &card[i]);
            }
            CHECK(memcmp(card[0].image, card[1].image, (size_t)PLACE * PLACES) == 0 && card[0].loss == card[1].loss);
            struct stage g = { .at = types[t][0], .pt = types[t][1] };
            kt_worst = 0;
            CHECK(near_host(o, &g, card[0].image, host.image));
            CHECK(fabs(card[0].loss - host.loss) <= 1e-4 * fabs(host.loss));
            if (o->run == grad_cast)
                CHECK(fabs(card[0].sum.sum_sq - host.sum.sum_sq) <= 1e-9 * host.sum.sum_sq &&
                      card[0].sum.nonfinite == host.sum.nonfinite);
            printf("# %s, types %d %d: %.2f of the bound\n", o->name, (int)types[t][0], (int)types[t][1], kt_worst);
        }
    free(host.image);
    free(card[0].image);
    free(card[1].image);
}
