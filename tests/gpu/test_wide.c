/* tests/gpu/test_wide.c - the `..._wide` flags of gpu/ops.h. A wide buffer holds the values of its
 * narrow twin in f32: what an operation computes from it is the same, so a narrow result must be
 * the same to the bit, and a wide result must round to it. And: a discrete device counts the wider
 * bytes. */
#include "tests/test.h"
#include "tests/gpu/kern_test.h"
#include "tests/gpu/dev_test.h"

TEST_MAIN()

enum { ROWS = 37, IN = 70, OUT = 53 };

static float *widen(const void *bf16, uint64_t n)
{
    float *wide = kt_alloc(n * 4);
    for (uint64_t i = 0; i < n; i++) wide[i] = (float)kt_get(OPS_BF16, bf16, i);
    return wide;
}

/* `wide` rounds to `narrow`; with `more` somewhere it holds more than that. */
static void check_rounds(const void *narrow, const float *wide, uint64_t n, bool more)
{
    uint64_t finer = 0;
    for (uint64_t i = 0; i < n; i++) {
        double want = kt_get(OPS_BF16, narrow, i);
        CHECK(want == kt_as(OPS_BF16, (double)wide[i]));
        finer += (double)wide[i] != want;
    }
    CHECK(!more || finer > n / 2);
}

static void scratch_take(struct ops_scratch *s, uint64_t bytes)
{
    *s = (struct ops_scratch){ kt_alloc(bytes), bytes };
}

/* --- linear: every mix of the three flags ----------------------------------------------------- */

struct lin {
    void *x, *y, *base_y, *base_x, *w, *bias; /* y: also dy */
    float *x_wide, *y_wide, *base_y_wide, *base_x_wide, *dw0, *db0;
    struct ops_scratch scratch;
};

static void lin_open(struct lin *l)
{
    kt_reseed(1);
    l->x = kt_random(OPS_BF16, ROWS * IN, 1), l->y = kt_random(OPS_BF16, ROWS * OUT, 1);
    l->base_y = kt_random(OPS_BF16, ROWS * OUT, 4), l->base_x = kt_random(OPS_BF16, ROWS * IN, 4);
    l->w = kt_random(OPS_BF16, OUT * IN, 0.5), l->bias = kt_random(OPS_BF16, OUT, 1);
    l->x_wide = widen(l->x, ROWS * IN), l->y_wide = widen(l->y, ROWS * OUT);
    l->base_y_wide = widen(l->base_y, ROWS * OUT), l->base_x_wide = widen(l->base_x, ROWS * IN);
    l->dw0 = kt_random(OPS_F32, OUT * IN, 1), l->db0 = kt_random(OPS_F32, OUT, 1);
    scratch_take(&l->scratch, 4u << 20);
}

static void lin_close(struct lin *l)
{
    void *all[] = { l->x,      l->y,      l->base_y,      l->base_x,      l->w,   l->bias,
                    l->x_wide, l->y_wide, l->base_y_wide, l->base_x_wide, l->dw0, l->db0,
                    l->scratch.base };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

struct lin_out {
    void *y, *dx;
    float *dw, *dbias;
};

/* All three operations; flags: bit 0 x, bit 1 y, bit 2 base; base: NULL is the result itself. */
static void lin_run(struct rig *r, const struct lin *l, unsigned flags, bool own_base,
                    struct lin_out *o)
{
    const bool xw = flags & 1, yw = flags & 2, bw = flags & 4;
    struct ops_linear a = { .rows = ROWS,
                            .in = IN,
                            .out = OUT,
                            .at = OPS_BF16,
                            .pt = OPS_BF16,
                            .x_wide = xw,
                            .y_wide = yw,
                            .base_wide = bw,
                            .add = true,
                            .x = xw ? (void *)l->x_wide : l->x,
                            .dy = yw ? (void *)l->y_wide : l->y,
                            .w = l->w,
                            .bias = l->bias,
                            .scratch = l->scratch };
    *o = (struct lin_out){ .dw = kt_copy(l->dw0, OUT * IN * 4), .dbias = kt_copy(l->db0, OUT * 4) };
    const void *base_y = (own_base ? yw : bw) ? (void *)l->base_y_wide : l->base_y,
               *base_x = (own_base ? xw : bw) ? (void *)l->base_x_wide : l->base_x;
    o->y = own_base ? kt_copy(base_y, ROWS * OUT * (yw ? 4 : 2)) : kt_alloc(ROWS * OUT * 4);
    o->dx = own_base ? kt_copy(base_x, ROWS * IN * (xw ? 4 : 2)) : kt_alloc(ROWS * IN * 4);
    a.y = o->y, a.dx = o->dx, a.dw = o->dw, a.dbias = o->dbias;
    a.base = own_base ? NULL : base_y;
    CHECK_OK(ops_linear_forward(r->s, &a, &r->err), &r->err);
    a.base = own_base ? NULL : base_x;
    CHECK_OK(ops_linear_backward_data(r->s, &a, &r->err), &r->err);
    CHECK_OK(ops_linear_backward_weight(r->s, &a, &r->err), &r->err);
    CHECK_OK(dev_sync(r->s, &r->err), &r->err);
}

static void lin_out_free(struct lin_out *o) { free(o->y), free(o->dx), free(o->dw), free(o->dbias); }

static void check_linear(bool bf16_products)
{
    struct rig r;
    struct lin l;
    CHECK_OK(rig_open(&r, EXEC_THREADS,
                      (struct dev_cfg){ .kind = DEV_HOST,
                                        .matmul = bf16_products ? DEV_MATMUL_BF16
                                                                : DEV_MATMUL_F32 }),
             &r.err);
    lin_open(&l);
    struct lin_out want, o;
    lin_run(&r, &l, 0, true, &want);
    for (unsigned flags = 0; flags < 16; flags++) {
        lin_run(&r, &l, flags, flags & 8, &o);
        if (flags & 2) check_rounds(want.y, o.y, ROWS * OUT, true);
        else CHECK(memcmp(want.y, o.y, ROWS * OUT * 2) == 0);
        if (flags & 1) check_rounds(want.dx, o.dx, ROWS * IN, true);
        else CHECK(memcmp(want.dx, o.dx, ROWS * IN * 2) == 0);
        CHECK(memcmp(want.dw, o.dw, OUT * IN * 4) == 0);
        CHECK(memcmp(want.dbias, o.dbias, OUT * 4) == 0);
        lin_out_free(&o);
    }
    lin_out_free(&want);
    lin_close(&l);
    rig_close(&r);
}

TEST(wide_linear_f32_products) { check_linear(false); }
TEST(wide_linear_bf16_products)
{
    if (!rig_bf16_possible()) SKIP("oneDNN has no bf16 products on this processor");
    check_linear(true);
}

/* --- kernels ---------------------------------------------------------------------------------- */

TEST(wide_norm)
{
    enum { N = ROWS * IN };
    kt_reseed(2);
    void *x = kt_random(OPS_BF16, N, 3), *dy = kt_random(OPS_BF16, N, 1),
         *dx0 = kt_random(OPS_BF16, N, 1), *w = kt_random(OPS_BF16, IN, 2);
    float *x_wide = widen(x, N), *dy_wide = widen(dy, N);
    KT_EACH_ISA (c) {
        void *y[8], *dx[8];
        float dw[8][IN], rstd[ROWS];
        for (unsigned f = 0; f < 8; f++) {
            struct ops_rmsnorm a = { .rows = ROWS,
                                     .cols = IN,
                                     .group = 1,
                                     .x_stride = IN,
                                     .y_stride = IN,
                                     .at = OPS_BF16,
                                     .pt = OPS_BF16,
                                     .x_wide = f & 1,
                                     .y_wide = f & 2,
                                     .dx_wide = f & 4,
                                     .eps = 1e-5,
                                     .add = true,
                                     .w = w,
                                     .rstd = rstd,
                                     .dw = dw[f] };
            memset(dw[f], 0, sizeof dw[f]);
            a.x = f & 1 ? (void *)x_wide : x, a.dy = f & 2 ? (void *)dy_wide : dy;
            a.y = y[f] = kt_alloc(N * 4);
            a.dx = dx[f] = f & 4 ? (void *)widen(dx0, N) : kt_copy(dx0, N * 2);
            scratch_take(&a.scratch, host_rmsnorm_scratch(&c, &a, true));
            host_rmsnorm_forward(&c, &a);
            host_rmsnorm_backward(&c, &a);
            free(a.scratch.base);
            if (f & 2) check_rounds(y[0], y[f], N, true);
            else CHECK(memcmp(y[0], y[f], N * 2) == 0);
            if (f & 4) check_rounds(dx[0], dx[f], N, true);
            else CHECK(memcmp(dx[0], dx[f], N * 2) == 0);
            CHECK(memcmp(dw[0], dw[f], sizeof dw[f]) == 0);
        }
        for (unsigned f = 0; f < 8; f++) free(y[f]), free(dx[f]);
    }
    free(x), free(dy), free(dx0), free(w), free(x_wide), free(dy_wide);
}

/* Out of place from f32, into bf16: what in place gives, both ways. */
TEST(wide_rope)
{
    enum { TOKENS = 19, HEADS = 4, KV = 2, DIM = 14, Q = TOKENS * HEADS * DIM, K = TOKENS * KV * DIM };
    int32_t pos[TOKENS];
    float freq[DIM / 2];
    kt_reseed(3);
    for (int t = 0; t < TOKENS; t++) pos[t] = t * 3;
    for (int i = 0; i < DIM / 2; i++) freq[i] = powf(100.0f, -(float)i / 7);
    void *q0 = kt_random(OPS_BF16, Q, 2), *k0 = kt_random(OPS_BF16, K, 2);
    float *q_wide = widen(q0, Q), *k_wide = widen(k0, K);
    KT_EACH_ISA (c)
        for (int inverse = 0; inverse < 2; inverse++) {
            struct ops_rope a = { .tokens = TOKENS,
                                  .heads = HEADS,
                                  .kv_heads = KV,
                                  .head_dim = DIM,
                                  .q_stride = HEADS * DIM,
                                  .k_stride = KV * DIM,
                                  .at = OPS_BF16,
                                  .q = kt_copy(q0, Q * 2),
                                  .k = kt_copy(k0, K * 2),
                                  .pos = pos,
                                  .inv_freq = freq,
                                  .attention_factor = 1,
                                  .inverse = inverse };
            struct ops_rope b = a;
            host_rope(&c, &a);
            for (int wide = 0; wide < 2; wide++) {
                b.q = kt_alloc(Q * 2), b.k = kt_alloc(K * 2);
                b.q_in = wide ? (void *)q_wide : q0, b.k_in = wide ? (void *)k_wide : k0;
                b.in_wide = wide;
                host_rope(&c, &b);
                CHECK(memcmp(a.q, b.q, Q * 2) == 0 && memcmp(a.k, b.k, K * 2) == 0);
                free(b.q), free(b.k);
            }
            free(a.q), free(a.k);
        }
    free(q0), free(k0), free(q_wide), free(k_wide);
}

TEST(wide_swiglu)
{
    enum { N = ROWS * IN };
    kt_reseed(4);
    void *gate = kt_random(OPS_BF16, N, 4), *up = kt_random(OPS_BF16, N, 2),
         *dy = kt_random(OPS_BF16, N, 1);
    float *dy_wide = widen(dy, N);
    KT_EACH_ISA (c) {
        void *y[2], *dgate[2], *dup[2];
        for (int wide = 0; wide < 2; wide++) {
            struct ops_swiglu a = { .rows = ROWS,
                                    .cols = IN,
                                    .g_stride = IN,
                                    .u_stride = IN,
                                    .y_stride = IN,
                                    .at = OPS_BF16,
                                    .y_wide = wide,
                                    .gate = gate,
                                    .up = up,
                                    .dy = wide ? (void *)dy_wide : dy };
            a.y = y[wide] = kt_alloc(N * 4);
            a.dgate = dgate[wide] = kt_alloc(N * 2), a.dup = dup[wide] = kt_alloc(N * 2);
            host_swiglu_forward(&c, &a);
            host_swiglu_backward(&c, &a);
        }
        check_rounds(y[0], y[1], N, true);
        CHECK(memcmp(dgate[0], dgate[1], N * 2) == 0 && memcmp(dup[0], dup[1], N * 2) == 0);
        for (int i = 0; i < 2; i++) free(y[i]), free(dgate[i]), free(dup[i]);
    }
    free(gate), free(up), free(dy), free(dy_wide);
}

TEST(wide_attention_gradients)
{
    enum { SEQ = 70, HEADS = 4, KV = 2, DIM = 12, Q = SEQ * HEADS * DIM, K = SEQ * KV * DIM };
    kt_reseed(5);
    int32_t first[SEQ] = { 0 };
    void *q = kt_random(OPS_BF16, Q, 2), *k = kt_random(OPS_BF16, K, 2),
         *v = kt_random(OPS_BF16, K, 1), *d_o = kt_random(OPS_BF16, Q, 1), *o = kt_alloc(Q * 2);
    float *d_o_wide = widen(d_o, Q), *lse = kt_alloc(SEQ * HEADS * 4);
    KT_EACH_ISA (c) {
        void *dq[2], *dk[2], *dv[2];
        for (int wide = 0; wide < 2; wide++) {
            struct ops_attention a = { .n_seq = 1,
                                       .seq = SEQ,
                                       .heads = HEADS,
                                       .kv_heads = KV,
                                       .head_dim = DIM,
                                       .q_stride = HEADS * DIM,
                                       .k_stride = KV * DIM,
                                       .v_stride = KV * DIM,
                                       .o_stride = HEADS * DIM,
                                       .at = OPS_BF16,
                                       .grad_wide = wide,
                                       .scale = 0.3f,
                                       .first_key = first,
                                       .q = q,
                                       .k = k,
                                       .v = v,
                                       .o = o,
                                       .lse = lse,
                                       .d_o = wide ? (void *)d_o_wide : d_o };
            a.dq = dq[wide] = kt_alloc(Q * 4);
            a.dk = dk[wide] = kt_alloc(K * 4), a.dv = dv[wide] = kt_alloc(K * 4);
            scratch_take(&a.scratch, host_attention_scratch(&c, &a, true));
            host_attention_forward(&c, &a);
            host_attention_backward(&c, &a);
            free(a.scratch.base);
        }
        check_rounds(dq[0], dq[1], Q, true);
        check_rounds(dk[0], dk[1], K, true);
        check_rounds(dv[0], dv[1], K, true);
        for (int i = 0; i < 2; i++) free(dq[i]), free(dk[i]), free(dv[i]);
    }
    free(q), free(k), free(v), free(d_o), free(o), free(d_o_wide), free(lse);
}

TEST(wide_head_gradient)
{
    enum { VOCAB = 97 };
    struct rig r;
    CHECK_OK(
        rig_open(&r, EXEC_THREADS, (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_F32 }),
        &r.err);
    kt_reseed(6);
    int32_t targets[ROWS];
    for (int t = 0; t < ROWS; t++) targets[t] = (int32_t)kt_below(VOCAB);
    void *x = kt_random(OPS_BF16, ROWS * IN, 2), *w = kt_random(OPS_BF16, VOCAB * IN, 1);
    void *dx[2] = { kt_alloc(ROWS * IN * 4), kt_alloc(ROWS * IN * 4) };
    double loss = 0;
    struct ops_head a = { .tokens = ROWS,
                          .hidden = IN,
                          .vocab = VOCAB,
                          .at = OPS_BF16,
                          .pt = OPS_BF16,
                          .x = x,
                          .w = w,
                          .targets = targets,
                          .loss_sum = &loss,
                          .d_scale = 0.1 };
    scratch_take(&a.scratch, 4u << 20);
    for (int wide = 0; wide < 2; wide++) {
        a.dx = dx[wide];
        a.dx_wide = wide;
        CHECK_OK(ops_head_train(r.s, &a, &r.err), &r.err);
        CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    }
    check_rounds(dx[0], dx[1], ROWS * IN, true);
    free(x), free(w), free(dx[0]), free(dx[1]), free(a.scratch.base);
    rig_close(&r);
}

/* --- a memory of its own ----------------------------------------------------------------------- */

/* Each wide operand is put where its narrow form would just fit the arena's end. */
TEST(wide_operands_beyond_the_arena_are_refused)
{
    static const char *const wrong[] = { "x", "y", "base" };
    for (unsigned i = 0; i < 3; i++) {
        struct rig r;
        void *p;
        CHECK_OK(rig_open(&r, EXEC_THREADS,
                          (struct dev_cfg){ .kind = DEV_HOST_DISCRETE, .memory_bytes = 1 << 16 }),
                 &r.err);
        CHECK_OK(dev_reserve(r.d, 1 << 16, &p, &r.err), &r.err);
        uint8_t *arena = p, *end = arena + (1 << 16) - 8 * 8 * 2;
        struct ops_linear a = { .rows = 8,
                                .in = 8,
                                .out = 8,
                                .at = OPS_BF16,
                                .pt = OPS_BF16,
                                .x_wide = i == 0,
                                .y_wide = i == 1,
                                .base_wide = i == 2,
                                .add = true,
                                .w = arena,
                                .x = i == 0 ? end : arena + 1024,
                                .y = i == 1 ? end : arena + 2048,
                                .base = i == 2 ? end : arena + 3072,
                                .scratch = { arena + 4096, 49152 } };
        char text[64];
        snprintf(text, sizeof text, "linear_forward: operand %s ", wrong[i]);
        CHECK_OK(dev_zero(r.s, arena, 1 << 16, &r.err), &r.err);
        CHECK_OK(ops_linear_forward(r.s, &a, &r.err), &r.err);
        CHECK(dev_sync(r.s, &r.err) == STK_ERR_DEVICE);
        CHECK(strncmp(r.err.text, text, strlen(text)) == 0);
        rig_close(&r);
    }
}
