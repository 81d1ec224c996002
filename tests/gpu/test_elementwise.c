/* tests/gpu/test_elementwise.c - rotary, SwiGLU, embedding and additions against fp64, element by
 * element, rounded once, on store; same bits for any threads and instruction set. */
#include "tests/test.h"
#include "tests/gpu/kern_test.h"

TEST_MAIN()

static const enum ops_dtype ats[2] = { OPS_F32, OPS_BF16 };

/* --- exp, through SwiGLU: y = g / (1 + exp(-g)) for up = 1 --- */

TEST(swiglu_silu_ulps_over_the_range)
{
    enum { N = 1 << 16 };
    float *g = kt_alloc(N * 4), *up = kt_alloc(N * 4), *y = kt_alloc(N * 4);
    for (int i = 0; i < N; i++) g[i] = -88.0f + 176.0f * (float)i / N, up[i] = 1;
    KT_EACH_ISA (c) {
        struct ops_swiglu a = { .rows = 1,
                                .cols = N,
                                .g_stride = N,
                                .u_stride = N,
                                .y_stride = N,
                                .at = OPS_F32,
                                .gate = g,
                                .up = up,
                                .y = y };
        host_swiglu_forward(&c, &a);
        kt_worst = 0;
        for (int i = 0; i < N; i++) {
            double want = (double)g[i] / (1 + exp(-(double)g[i]));
            CHECK(kt_near((double)y[i], want, 4 * 0x1p-24 * fabs(want)));
        }
        printf("# %s: %.2f half ulps\n", cpu_isa_name(c.isa), kt_worst * 4);
    }
    float end[4] = { -1e30f, -300, 300, 1e30f }, out[4] = { 0 };
    struct ops_swiglu a = { .rows = 1,
                            .cols = 4,
                            .g_stride = 4,
                            .u_stride = 4,
                            .y_stride = 4,
                            .at = OPS_F32,
                            .gate = end,
                            .up = up,
                            .y = out };
    struct host_ctx c = { 1, cpu_isa_best(), false };
    host_swiglu_forward(&c, &a);
    CHECK(fabsf(out[1]) == 0 && out[2] == 300 && out[3] == 1e30f);
    CHECK(fabsf(out[0]) == 0);
    end[2] = NAN;
    host_swiglu_forward(&c, &a);
    CHECK(isnan(out[2]) && !isnan(out[3]));
    free(g), free(up), free(y);
}

struct glu {
    struct ops_swiglu a;
    uint64_t gn, yn;
};

static void glu_open(struct glu *s, enum ops_dtype at, uint64_t rows, uint64_t cols, uint64_t pad)
{
    /* gate and up are halves of one buffer, as after a fused product; gradients in place of another
     * such buffer */
    s->a = (struct ops_swiglu){ .rows = rows,
                                .cols = cols,
                                .g_stride = 2 * cols + pad,
                                .u_stride = 2 * cols + pad,
                                .y_stride = cols + 2 * pad,
                                .at = at };
    s->gn = rows * s->a.g_stride, s->yn = rows * s->a.y_stride;
    kt_reseed(rows * 7 + cols);
    uint64_t size = ops_dtype_bytes(at);
    char *gu = kt_random(at, s->gn, 6), *d = kt_alloc(s->gn * size);
    s->a.gate = gu, s->a.up = gu + cols * size, s->a.dgate = d, s->a.dup = d + cols * size;
    s->a.y = kt_alloc(s->yn * size);
    s->a.dy = kt_random(at, s->yn, 1);
}
static void glu_close(struct glu *s)
{
    free((void *)(uintptr_t)s->a.gate), free(s->a.dgate), free(s->a.y),
        free((void *)(uintptr_t)s->a.dy);
}

static void glu_check(const struct ops_swiglu *a)
{
    const double rel = 8 * 0x1p-24, ulp = kt_half_ulp(a->at);
    for (uint64_t r = 0; r < a->rows; r++)
        for (uint64_t i = 0; i < a->cols; i++) {
            double g = kt_get(a->at, a->gate, r * a->g_stride + i),
                   u = kt_get(a->at, a->up, r * a->u_stride + i);
            double dy = kt_get(a->at, a->dy, r * a->y_stride + i), s = 1 / (1 + exp(-g)),
                   act = g * s;
            double dg = dy * u * s * (1 + g * (1 - s)),
                   big = fabs(dy * u) * s * (1 + fabs(g) * (1 - s));
            CHECK(kt_near(kt_get(a->at, a->y, r * a->y_stride + i), act * u,
                          (rel + 1.01 * ulp) * fabs(act * u)));
            CHECK(kt_near(kt_get(a->at, a->dup, r * a->u_stride + i), act * dy,
                          (rel + 1.01 * ulp) * fabs(act * dy)));
            CHECK(kt_near(kt_get(a->at, a->dgate, r * a->g_stride + i), dg,
                          rel * big + 1.01 * ulp * fabs(dg)));
        }
}

TEST(swiglu_matches_fp64)
{
    static const uint64_t shape[][3] = {
        { 1, 1, 0 }, { 3, 17, 1 }, { 131, 257, 0 }, { 5, 4096, 8 }
    };
    for (int t = 0; t < 2; t++)
        for (size_t k = 0; k < 4; k++)
            KT_EACH_ISA (c) {
                struct glu s;
                glu_open(&s, ats[t], shape[k][0], shape[k][1], shape[k][2]);
                host_swiglu_forward(&c, &s.a);
                host_swiglu_backward(&c, &s.a);
                glu_check(&s.a);
                glu_close(&s);
            }
}

/* Threads, instruction sets and writing over the inputs do not change a bit. */
TEST(swiglu_same_bits)
{
    for (int t = 0; t < 2; t++) {
        struct glu p;
        glu_open(&p, ats[t], 131, 257, 3);
        struct host_ctx one = { 1, CPU_SCALAR, false };
        host_swiglu_forward(&one, &p.a);
        host_swiglu_backward(&one, &p.a);
        KT_EACH_ISA (c)
            for (c.threads = 1; c.threads <= 3; c.threads++) {
                struct glu q;
                glu_open(&q, ats[t], 131, 257, 3);
                host_swiglu_forward(&c, &q.a);
                struct ops_swiglu a = q.a;
                a.dgate = (void *)(uintptr_t)a.gate, a.dup = (void *)(uintptr_t)a.up;
                a.y = (void *)(uintptr_t)a.dy; /* backward makes y again, here over dy */
                host_swiglu_backward(&c, &a);
                for (uint64_t r = 0; r < 131; r++)
                    CHECK(memcmp((char *)p.a.y + r * p.a.y_stride * ops_dtype_bytes(ats[t]),
                                 (char *)a.y + r * p.a.y_stride * ops_dtype_bytes(ats[t]),
                                 257 * ops_dtype_bytes(ats[t])) == 0);
                CHECK(memcmp(p.a.y, q.a.y, p.yn * ops_dtype_bytes(ats[t])) == 0);
                for (uint64_t r = 0; r < 131; r++)
                    CHECK(memcmp((char *)p.a.dgate + r * p.a.g_stride * ops_dtype_bytes(ats[t]),
                                 (const char *)a.gate + r * p.a.g_stride * ops_dtype_bytes(ats[t]),
                                 514 * ops_dtype_bytes(ats[t])) == 0);
                glu_close(&q);
            }
        glu_close(&p);
    }
}

TEST(swiglu_finite_differences)
{
    struct glu s;
    glu_open(&s, OPS_F32, 3, 11, 0);
    struct host_ctx c = { 1, cpu_isa_best(), false };
    host_swiglu_backward(&c, &s.a);
    for (uint64_t r = 0; r < 3; r++)
        for (uint64_t i = 0; i < 11; i++) {
            double g = kt_get(OPS_F32, s.a.gate, r * 22 + i),
                   u = kt_get(OPS_F32, s.a.up, r * 22 + i);
            double dy = kt_get(OPS_F32, s.a.dy, r * 11 + i), h = 1e-4;
            double slope =
                ((g + h) / (1 + exp(-g - h)) - (g - h) / (1 + exp(-g + h))) / (2 * h) * u * dy;
            CHECK(kt_near(kt_get(OPS_F32, s.a.dgate, r * 22 + i), slope, 1e-5));
            CHECK(kt_near(kt_get(OPS_F32, s.a.dup, r * 22 + i), g / (1 + exp(-g)) * dy, 1e-5));
        }
    glu_close(&s);
}

/* --- rotary --- */

struct rot {
    struct ops_rope a;
    uint64_t qn, kn;
    void *q0, *k0;
};

static void rot_open(struct rot *s, enum ops_dtype at, uint64_t tokens, uint64_t heads, uint64_t kv,
                     uint64_t dim, float factor)
{
    s->a = (struct ops_rope){ .tokens = tokens,
                              .heads = heads,
                              .kv_heads = kv,
                              .head_dim = dim,
                              .q_stride = heads * dim + 3,
                              .k_stride = (kv + 1) * dim,
                              .at = at,
                              .attention_factor = factor };
    s->qn = tokens * s->a.q_stride, s->kn = tokens * s->a.k_stride;
    kt_reseed(tokens + dim);
    s->q0 = kt_random(at, s->qn, 2), s->k0 = kt_random(at, s->kn, 2);
    s->a.q = kt_copy(s->q0, s->qn * ops_dtype_bytes(at)),
    s->a.k = kt_copy(s->k0, s->kn * ops_dtype_bytes(at));
    int32_t *pos = kt_alloc(tokens * 4);
    float *freq = kt_alloc(dim / 2 * 4);
    for (uint64_t t = 0; t < tokens; t++)
        pos[t] = t < 3 ? 131072 - (int32_t)t : (int32_t)kt_below(131073);
    for (uint64_t i = 0; i < dim / 2; i++)
        freq[i] = 1.0f / powf(10000.0f, 2 * (float)i / (float)dim);
    s->a.pos = pos, s->a.inv_freq = freq;
}
static void rot_close(struct rot *s)
{
    free(s->q0), free(s->k0), free(s->a.q), free(s->a.k);
    free((void *)(uintptr_t)s->a.pos), free((void *)(uintptr_t)s->a.inv_freq);
}

static void rot_check(const struct ops_rope *a, const void *before, const void *after,
                      uint64_t heads, uint64_t stride)
{
    const uint64_t half = a->head_dim / 2;
    const double ulp = kt_half_ulp(a->at);
    for (uint64_t t = 0; t < a->tokens; t++)
        for (uint64_t e = 0; e < stride; e++) {
            uint64_t h = e / a->head_dim, i = e % a->head_dim % half,
                     lo = t * stride + h * a->head_dim + i;
            if (h >= heads) {
                CHECK(kt_get(a->at, before, t * stride + e) ==
                      kt_get(a->at, after, t * stride + e));
                continue;
            }
            double angle = (double)((float)a->pos[t] * a->inv_freq[i]),
                   f = (double)a->attention_factor;
            double c = cos(angle) * f, s = sin(angle) * f * (a->inverse ? -1 : 1);
            double x = kt_get(a->at, before, lo), y = kt_get(a->at, before, lo + half);
            double want = e % a->head_dim < half ? x * c - y * s : y * c + x * s;
            CHECK(kt_near(kt_get(a->at, after, t * stride + e), want,
                          4 * 0x1p-24 * (fabs(x) + fabs(y)) * f + 1.01 * ulp * fabs(want)));
        }
}

TEST(rope_matches_transformers_angles)
{
    static const uint64_t shape[][4] = {
        { 1, 1, 1, 2 }, { 7, 3, 1, 12 }, { 33, 8, 2, 64 }, { 9, 2, 2, 36 }, { 5, 2, 1, 300 }
    };
    for (int t = 0; t < 2; t++)
        for (size_t k = 0; k < 5; k++)
            KT_EACH_ISA (c) {
                struct rot s;
                rot_open(&s, ats[t], shape[k][0], shape[k][1], shape[k][2], shape[k][3],
                         k == 2 ? 1.25f : 1.0f);
                s.a.inverse = k == 3;
                host_rope(&c, &s.a);
                rot_check(&s.a, s.q0, s.a.q, s.a.heads, s.a.q_stride);
                rot_check(&s.a, s.k0, s.a.k, s.a.kv_heads, s.a.k_stride);
                rot_close(&s);
            }
}

TEST(rope_inverse_and_same_bits)
{
    struct rot p;
    rot_open(&p, OPS_F32, 61, 8, 2, 64, 1.0f);
    struct host_ctx one = { 1, CPU_SCALAR, false };
    host_rope(&one, &p.a);
    KT_EACH_ISA (c)
        for (c.threads = 1; c.threads <= 3; c.threads++) {
            struct rot q;
            rot_open(&q, OPS_F32, 61, 8, 2, 64, 1.0f);
            host_rope(&c, &q.a);
            CHECK(memcmp(p.a.q, q.a.q, p.qn * 4) == 0);
            CHECK(memcmp(p.a.k, q.a.k, p.kn * 4) == 0);
            q.a.inverse = true;
            host_rope(&c, &q.a);
            for (uint64_t i = 0; i < q.qn; i++)
                CHECK(kt_near(kt_get(OPS_F32, q.a.q, i), kt_get(OPS_F32, q.q0, i), 2e-6));
            rot_close(&q);
        }
    rot_close(&p);
}

/* --- embedding --- */

TEST(embed_forward_converts_rows)
{
    static const enum ops_dtype pts[2] = { OPS_BF16, OPS_FP16 };
    for (int t = 0; t < 4; t++)
        KT_EACH_ISA (c) {
            enum { TOKENS = 51, VOCAB = 13, HIDDEN = 83 };
            int32_t ids[TOKENS];
            kt_reseed(5);
            for (int i = 0; i < TOKENS; i++) ids[i] = (int32_t)kt_below(VOCAB);
            struct ops_embed a = { .tokens = TOKENS,
                                   .vocab = VOCAB,
                                   .hidden = HIDDEN,
                                   .at = ats[t % 2],
                                   .pt = pts[t / 2],
                                   .ids = ids };
            uint16_t *table = kt_random(a.pt, VOCAB * HIDDEN, 1);
            for (int i = 0; i < 40; i++)
                table[i * 16] = (uint16_t)(i * 27 & 0x83ff); /* subnormals */
            table[2] = 0x7c00, table[3] = 0x8000;
            a.table = table;
            a.y = kt_alloc(TOKENS * HIDDEN * ops_dtype_bytes(a.at));
            host_embed_forward(&c, &a);
            for (uint64_t i = 0; i < TOKENS * HIDDEN; i++) {
                uint64_t from = (uint64_t)ids[i / HIDDEN] * HIDDEN + i % HIDDEN;
                CHECK(kt_get(a.at, a.y, i) == kt_as(a.at, kt_get(a.pt, table, from)));
            }
            free(table), free(a.y);
        }
}

/* Exactly the fp32 sums in token order, from any team. */
TEST(embed_backward_token_order)
{
    enum { TOKENS = 301, VOCAB = 7, HIDDEN = 83 };
    for (int t = 0; t < 2; t++)
        KT_EACH_ISA (c)
            for (c.threads = 1; c.threads <= 3; c.threads++) {
                int32_t ids[TOKENS];
                kt_reseed(6);
                for (int i = 0; i < TOKENS; i++) ids[i] = (int32_t)kt_below(VOCAB);
                struct ops_embed a = {
                    .tokens = TOKENS, .vocab = VOCAB, .hidden = HIDDEN, .at = ats[t], .ids = ids
                };
                a.dy = kt_random(a.at, TOKENS * HIDDEN, 1);
                float *want = kt_random(OPS_F32, VOCAB * HIDDEN, 1);
                a.dtable = kt_copy(want, VOCAB * HIDDEN * 4);
                for (uint64_t i = 0; i < TOKENS * HIDDEN; i++)
                    want[(uint64_t)ids[i / HIDDEN] * HIDDEN + i % HIDDEN] +=
                        (float)kt_get(a.at, a.dy, i);
                host_embed_backward(&c, &a);
                CHECK(memcmp(want, a.dtable, VOCAB * HIDDEN * 4) == 0);
                free((void *)(uintptr_t)a.dy), free(want), free(a.dtable);
            }
}

/* --- additions --- */

TEST(add_exact)
{
    static const uint64_t sizes[] = { 1, 15, 16, 4097, 50003 };
    for (int t = 0; t < 2; t++)
        for (size_t k = 0; k < 5; k++)
            KT_EACH_ISA (c) {
                uint64_t n = sizes[k], size = ops_dtype_bytes(ats[t]);
                kt_reseed(n);
                void *x = kt_random(ats[t], n, 2), *y = kt_random(ats[t], n, 2),
                     *out = kt_alloc(n * size), *x0 = kt_copy(x, n * size);
                kt_put(ats[t], x0, n / 2, INFINITY), kt_put(ats[t], x, n / 2, INFINITY);
                host_add(&c, ats[t], n, x, y, out);
                for (uint64_t i = 0; i < n; i++)
                    CHECK(kt_get(ats[t], out, i) ==
                          kt_as(ats[t], (double)((float)kt_get(ats[t], x0, i) +
                                                 (float)kt_get(ats[t], y, i))));
                host_add(&c, ats[t], n, x, y, x);
                CHECK(memcmp(x, out, n * size) == 0);
                free(x), free(y), free(out), free(x0);
            }
}

TEST(acc_add_exact)
{
    static const enum ops_dtype sts[3] = { OPS_F32, OPS_BF16, OPS_FP16 };
    for (int t = 0; t < 3; t++)
        KT_EACH_ISA (c) {
            uint64_t n = 20011;
            kt_reseed(n + (uint64_t)t);
            float *acc = kt_random(OPS_F32, n, 1), *want = kt_copy(acc, n * 4);
            void *src = kt_random(sts[t], n, 1);
            for (uint64_t i = 0; i < n; i++) want[i] += (float)kt_get(sts[t], src, i);
            host_acc_add(&c, n, acc, src, sts[t]);
            CHECK(memcmp(acc, want, n * 4) == 0);
            free(acc), free(want), free(src);
        }
}
