/* tests/gpu/cuda/test_kernels_elementwise.c - additions, casts, SwiGLU, rotary, embedding: the
 * host's bits, for any shape, start and order of threads. */
#include "tests/test.h"
#include "tests/gpu/cuda/cuda_test.h"

TEST_MAIN()

static const uint64_t counts[] = { 1, 7, 8, 257, 2048, 4099 };
enum { COUNTS = sizeof counts / sizeof counts[0] };
static const enum ops_dtype types[] = { OPS_F32, OPS_BF16, OPS_FP16 };

TEST(add_has_the_hosts_bits)
{
    const struct host_ctx host = ct_host();
    for (int k = 0; k < COUNTS * 2 * 2; k++) {
        const uint64_t n = counts[k / 4], off = k % 2 ? 4 : 0;
        const enum ops_dtype t = types[k / 2 % 2];
        const uint64_t bytes = n * ops_dtype_bytes(t);
        kt_reseed(n + off);
        void *a = kt_random(t, n, 3), *b = kt_random(t, n, 3), *want = kt_alloc(bytes);
        host_add(&host, t, n, a, b, want);
        for (int o = 0; o < CT_ORDERS; o++) {
            ct_order(o);
            const void *x = ct_const(a, bytes, off, "a");
            void *y = ct_in(b, bytes, 0, "b"), *out = ct_out(bytes, off, "y");
            CHECK(ct_ran(cuda_add(NULL, t, n, x, y, out)));
            CHECK(ct_same(t, out, want, ct_row(n), "y"));
            CHECK(ct_ran(cuda_add(NULL, t, n, x, y, y))); /* in place */
            CHECK(ct_same(t, y, want, ct_row(n), "y in place"));
            ct_free();
        }
        free(a), free(b), free(want);
    }
}

/* Every byte once, whatever the order of threads; nothing behind the end. */
TEST(paced_copy_moves_every_byte)
{
    static const uint64_t vectors[] = { 1, 3, 511, 512, 513, 2048, 2049, 10007 };
    for (size_t k = 0; k < sizeof vectors / sizeof vectors[0]; k++) {
        const uint64_t bytes = vectors[k] * 16;
        kt_reseed(bytes);
        void *src = kt_random(OPS_F32, bytes / 4, 3);
        for (int o = 0; o < CT_ORDERS; o++) {
            ct_order(o);
            const void *x = ct_const(src, bytes, 0, "src");
            void *y = ct_out(bytes, 0, "dst");
            CHECK(ct_ran(cuda_copy_paced(NULL, y, x, bytes, 7e9)));
            CHECK(memcmp(y, src, bytes) == 0);
            ct_free();
        }
        free(src);
    }
}

TEST(acc_add_has_the_hosts_bits)
{
    const struct host_ctx host = ct_host();
    for (int k = 0; k < COUNTS * 3 * 2; k++) {
        const uint64_t n = counts[k / 6], off = k % 2 ? 2 : 0;
        const enum ops_dtype t = types[k / 2 % 3];
        const uint64_t bytes = n * ops_dtype_bytes(t);
        if (t == OPS_F32 && off) continue;
        kt_reseed(n + off);
        void *src = kt_random(t, n, 3);
        float *acc = kt_random(OPS_F32, n, 3), *want = kt_copy(acc, n * 4);
        host_acc_add(&host, n, want, src, t);
        for (int o = 0; o < CT_ORDERS; o++) {
            ct_order(o);
            float *y = ct_in(acc, n * 4, 4, "acc");
            CHECK(ct_ran(cuda_acc_add(NULL, n, y, ct_const(src, bytes, off, "src"), t)));
            CHECK(ct_same(OPS_F32, y, want, ct_row(n), "acc"));
            ct_free();
        }
        free(src), free(acc), free(want);
    }
}

/* Every 16-bit word, and fp32 around every boundary of rounding. */
TEST(cast_has_the_bits_of_numeric_h)
{
    const uint64_t n = 65536;
    for (int k = 0; k < 9; k++) {
        const enum ops_dtype from = types[k / 3], to = types[k % 3];
        const uint64_t in_bytes = n * ops_dtype_bytes(from), out_bytes = n * ops_dtype_bytes(to);
        uint8_t *src = kt_alloc(in_bytes), *want = kt_alloc(out_bytes);
        kt_reseed((uint64_t)k);
        for (uint64_t i = 0; i < n; i++) {
            const int nearby = (int)kt_below(5) - 2;
            if (from != OPS_F32) ((uint16_t *)(void *)src)[i] = (uint16_t)i;
            else
                ((uint32_t *)(void *)src)[i] =
                    (uint32_t)i * 65536u + (i % 2 ? 32768u : 0u) + (uint32_t)nearby;
        }
        for (uint64_t i = 0; i < n; i++) {
            const uint16_t h = ((const uint16_t *)(const void *)src)[i];
            float x = from == OPS_BF16 ? stk_bf16_to_f32(h) : stk_fp16_to_f32(h);
            if (from == OPS_F32) memcpy(&x, src + i * 4, 4);
            if (to == OPS_F32) memcpy(want + i * 4, &x, 4);
            else
                ((uint16_t *)(void *)want)[i] =
                    to == OPS_BF16 ? stk_f32_to_bf16(x) : stk_f32_to_fp16(x);
        }
        struct cuda_cast a = {
            .rows = 256, .cols = 255, .src_ld = 256, .dst_ld = 256, .from = from, .to = to
        };
        a.src = ct_const(src, in_bytes, 0, "src");
        a.dst = ct_out(out_bytes, k % 2 ? 4 : 0, "dst");
        ct_order(k % CT_ORDERS);
        CHECK(ct_ran(cuda_cast(NULL, &a)));
        const struct ct_rows rows = { 256, 255, 256 };
        CHECK(ct_same(to, a.dst, want, rows, "dst"));
        CHECK(ct_filled(to, a.dst, rows, n));
        a.cols = 256;
        CHECK(ct_ran(cuda_cast(NULL, &a)));
        CHECK(ct_same(to, a.dst, want, ct_row(n), "dst without gaps"));
        ct_free();
        free(src), free(want);
    }
}

/* --- SwiGLU --- */

struct swiglu_case {
    uint64_t rows, cols, gpad, upad, ypad;
    enum ops_dtype at;
    bool wide;
    uint64_t off;
};
static const struct swiglu_case swiglu_cases[] = {
    { 1, 1, 0, 0, 0, OPS_F32, false, 0 },      { 3, 7, 2, 0, 1, OPS_BF16, false, 2 },
    { 13, 64, 64, 64, 0, OPS_BF16, false, 0 }, { 5, 257, 3, 5, 7, OPS_BF16, true, 4 },
    { 2, 4099, 1, 0, 0, OPS_F32, true, 4 },    { 300, 24, 8, 16, 0, OPS_BF16, true, 0 },
};

static void *swiglu_input(enum ops_dtype t, uint64_t n, double size)
{
    void *p = kt_random(t, n, size);
    const double ends[] = { 0, -0.0, 88.5, -88.5, 104, -104, 1e4, -1e4, 1e-30 };
    for (uint64_t i = 0; i < n; i++)
        if (i % 11 == 10) kt_put(t, p, i, ends[i / 11 % 9]);
    return p;
}

TEST(swiglu_has_the_hosts_bits)
{
    const struct host_ctx host = ct_host();
    for (size_t k = 0; k < sizeof swiglu_cases / sizeof swiglu_cases[0]; k++) {
        const struct swiglu_case *s = &swiglu_cases[k];
        struct ops_swiglu a = { .rows = s->rows,
                                .cols = s->cols,
                                .g_stride = s->cols + s->gpad,
                                .u_stride = s->cols + s->upad,
                                .y_stride = s->cols + s->ypad,
                                .at = s->at,
                                .y_wide = s->wide };
        const enum ops_dtype at = s->at, yt = ops_wide(at, s->wide);
        const uint64_t gn = a.rows * a.g_stride, un = a.rows * a.u_stride, yn = a.rows * a.y_stride;
        const uint64_t width = ops_dtype_bytes(at), ybytes = yn * ops_dtype_bytes(yt);
        const struct ct_rows gr = { a.rows, a.cols, a.g_stride },
                             ur = { a.rows, a.cols, a.u_stride },
                             yr = { a.rows, a.cols, a.y_stride };
        kt_reseed(k);
        void *gate = swiglu_input(at, gn, 8), *up = kt_random(at, un, 3),
             *dy = kt_random(yt, yn, 2);
        struct ops_swiglu h = a;
        h.gate = gate, h.up = up, h.dy = dy, h.y = kt_alloc(ybytes);
        h.dgate = kt_alloc(gn * width), h.dup = kt_alloc(un * width);
        host_swiglu_forward(&host, &h);
        host_swiglu_backward(&host, &h);
        for (int o = 0; o < CT_ORDERS; o++) {
            ct_order(o);
            void *g = ct_in(gate, gn * width, s->off, "gate"),
                 *u = ct_in(up, un * width, s->off, "up");
            a.gate = g, a.up = u, a.dy = ct_const(dy, ybytes, 0, "dy");
            a.y = ct_out(ybytes, s->off * 2, "y");
            a.dgate = ct_out(gn * width, s->off, "dgate"),
            a.dup = ct_out(un * width, s->off, "dup");
            CHECK(ct_ran(cuda_swiglu_forward(NULL, &a)));
            CHECK(ct_ran(cuda_swiglu_backward(NULL, &a)));
            CHECK(ct_same(yt, a.y, h.y, yr, "y") && ct_filled(yt, a.y, yr, yn));
            CHECK(ct_same(at, a.dgate, h.dgate, gr, "dgate") && ct_filled(at, a.dgate, gr, gn));
            CHECK(ct_same(at, a.dup, h.dup, ur, "dup") && ct_filled(at, a.dup, ur, un));
            a.dgate = g, a.dup = u; /* in place, y too: as a layer's backward has it */
            a.dy = a.y = ct_in(dy, ybytes, s->off * 2, "dy and y");
            CHECK(ct_ran(cuda_swiglu_backward(NULL, &a)));
            CHECK(ct_same(yt, a.y, h.y, yr, "y in place"));
            CHECK(ct_same(at, g, h.dgate, gr, "dgate in place"));
            CHECK(ct_same(at, u, h.dup, ur, "dup in place"));
            ct_free();
        }
        free(gate), free(up), free(dy), free(h.y), free(h.dgate), free(h.dup);
    }
}

/* --- rotary --- */

struct rope_case {
    uint64_t tokens, heads, kv, dim, qpad, kpad, v_cols;
    enum ops_dtype at;
    bool in, wide, inverse;
    int32_t pos_max;
    uint64_t off;
};
static const struct rope_case rope_cases[] = {
    { 1, 1, 1, 2, 0, 0, 0, OPS_F32, false, false, false, 1, 0 },
    { 7, 3, 1, 16, 0, 0, 0, OPS_BF16, false, false, true, 5000, 2 },
    { 13, 4, 2, 64, 8, 16, 128, OPS_BF16, true, true, false, 100000, 0 },
    { 5, 2, 2, 38, 3, 1, 19, OPS_BF16, true, false, true, 524287, 4 },
    { 2, 1, 1, 1030, 0, 0, 7, OPS_F32, true, true, false, 70, 4 },
    { 33, 5, 1, 128, 0, 128, 0, OPS_F32, false, false, true, 3000, 0 },
};

static void rope_compare(const struct ops_rope *a, const struct ops_rope *h, uint64_t qn,
                         uint64_t kn, double slack)
{
    const struct ct_rows qr = { a->tokens, a->heads * a->head_dim, a->q_stride },
                         kr = { a->tokens, a->kv_heads * a->head_dim, a->k_stride },
                         vr = { a->tokens, a->v_cols, a->v_stride };
    const bool out = a->q_in != NULL;
    if (slack > 0) {
        CHECK(ct_close(a->at, a->q, h->q, qr, 1.01, slack, "q"));
        CHECK(ct_close(a->at, a->k, h->k, kr, 1.01, slack, "k"));
        return;
    }
    CHECK(ct_same(a->at, a->q, h->q, qr, "q") && (!out || ct_filled(a->at, a->q, qr, qn)));
    CHECK(ct_same(a->at, a->k, h->k, kr, "k") && (!out || ct_filled(a->at, a->k, kr, kn)));
    if (a->v) CHECK(ct_same(a->at, a->v, h->v, vr, "v"));
}

/* From 2^19 on both use the machine's sine (slack: of values below 2). */
static void rope_run(const struct rope_case *s, int32_t pos_min, double slack)
{
    const struct host_ctx host = ct_host();
    struct ops_rope a = { .tokens = s->tokens,
                          .heads = s->heads,
                          .kv_heads = s->kv,
                          .head_dim = s->dim,
                          .q_stride = s->heads * s->dim + s->qpad,
                          .k_stride = s->kv * s->dim + s->kpad,
                          .at = s->at,
                          .in_wide = s->wide,
                          .v_cols = s->v_cols,
                          .v_stride = s->v_cols + 5,
                          .attention_factor = 1.1f,
                          .inverse = s->inverse };
    const enum ops_dtype it = s->in ? ops_wide(s->at, s->wide) : s->at,
                         vt = ops_wide(s->at, s->wide);
    const uint64_t qn = a.tokens * a.q_stride, kn = a.tokens * a.k_stride,
                   vn = a.tokens * a.v_stride;
    const uint64_t w = ops_dtype_bytes(s->at), iw = ops_dtype_bytes(it), vw = ops_dtype_bytes(vt);
    kt_reseed(s->tokens * 77 + s->dim);
    void *q = kt_random(it, qn, 2), *k = kt_random(it, kn, 2), *v = kt_random(vt, vn, 2);
    int32_t *pos = kt_alloc(a.tokens * 4);
    float *freq = kt_alloc(s->dim / 2 * 4);
    for (uint64_t t = 0; t < a.tokens; t++)
        pos[t] = pos_min + (int32_t)kt_below((uint64_t)s->pos_max);
    for (uint64_t i = 0; i < s->dim / 2; i++) freq[i] = powf(1e4f, -2 * (float)i / (float)s->dim);
    struct ops_rope h = a;
    h.pos = pos, h.inv_freq = freq;
    h.q = s->in ? kt_alloc(qn * w) : kt_copy(q, qn * w);
    h.k = s->in ? kt_alloc(kn * w) : kt_copy(k, kn * w);
    if (s->in) h.q_in = q, h.k_in = k;
    if (s->v_cols) h.v_in = v, h.v = kt_alloc(vn * w);
    host_rope(&host, &h);
    for (int o = 0; o < CT_ORDERS; o++) {
        ct_order(o);
        a.pos = ct_const(pos, a.tokens * 4, 0, "pos");
        a.inv_freq = ct_const(freq, s->dim / 2 * 4, 4, "inv_freq");
        a.q = s->in ? ct_out(qn * w, s->off, "q") : ct_in(q, qn * w, s->off, "q");
        a.k = s->in ? ct_out(kn * w, 0, "k") : ct_in(k, kn * w, 0, "k");
        if (s->in)
            a.q_in = ct_const(q, qn * iw, 2 * s->off, "q_in"),
            a.k_in = ct_const(k, kn * iw, 0, "k_in");
        if (s->v_cols) a.v_in = ct_const(v, vn * vw, 0, "v_in"), a.v = ct_out(vn * w, s->off, "v");
        CHECK(ct_ran(cuda_rope(NULL, &a)));
        rope_compare(&a, &h, qn, kn, slack);
        ct_free();
    }
    free(q), free(k), free(v), free(pos), free(freq), free(h.q), free(h.k), free(h.v);
}

TEST(rope_has_the_hosts_bits)
{
    for (size_t k = 0; k < sizeof rope_cases / sizeof rope_cases[0]; k++)
        rope_run(&rope_cases[k], 0, 0);
}
TEST(rope_far_positions_are_near_the_host) { rope_run(&rope_cases[5], 1 << 19, 0x1p-20); }

/* --- embedding --- */

struct embed_case {
    uint64_t tokens, vocab, hidden, ids; /* so many different ids */
    enum ops_dtype at, pt;
    uint64_t off;
};
static const struct embed_case embed_cases[] = {
    { 1, 1, 1, 1, OPS_F32, OPS_BF16, 0 },         { 37, 11, 7, 11, OPS_BF16, OPS_FP16, 2 },
    { 300, 5, 24, 2, OPS_BF16, OPS_BF16, 0 },     { 67, 32003, 257, 32003, OPS_F32, OPS_FP16, 4 },
    { 2049, 503, 8, 503, OPS_BF16, OPS_BF16, 0 }, { 6151, 97, 3, 1, OPS_F32, OPS_BF16, 0 },
};

TEST(embed_has_the_hosts_bits)
{
    const struct host_ctx host = ct_host();
    for (size_t k = 0; k < sizeof embed_cases / sizeof embed_cases[0]; k++) {
        const struct embed_case *s = &embed_cases[k];
        struct ops_embed a = {
            .tokens = s->tokens, .vocab = s->vocab, .hidden = s->hidden, .at = s->at, .pt = s->pt
        };
        const uint64_t tn = s->vocab * s->hidden, yn = s->tokens * s->hidden,
                       w = ops_dtype_bytes(s->at);
        kt_reseed(k);
        void *table = kt_random(s->pt, tn, 1), *dy = kt_random(s->at, yn, 1);
        float *dtable = kt_random(OPS_F32, tn, 1);
        int32_t *ids = kt_alloc(s->tokens * 4);
        for (uint64_t t = 0; t < s->tokens; t++)
            ids[t] = (int32_t)(s->vocab - 1 - kt_below(s->ids));
        struct ops_embed h = a;
        h.ids = ids, h.table = table, h.dy = dy, h.y = kt_alloc(yn * w),
        h.dtable = kt_copy(dtable, tn * 4);
        host_embed_forward(&host, &h);
        host_embed_backward(&host, &h);
        for (int o = 0; o < CT_ORDERS; o++) {
            ct_order(o);
            a.ids = ct_const(ids, s->tokens * 4, 0, "ids");
            a.table = ct_const(table, tn * 2, s->off, "table");
            a.dy = ct_const(dy, yn * w, s->off, "dy");
            a.y = ct_out(yn * w, s->off, "y"), a.dtable = ct_in(dtable, tn * 4, 0, "dtable");
            const struct ops_scratch scratch = ct_scratch(cuda_embed_backward_scratch(&a));
            CHECK(ct_ran(cuda_embed_forward(NULL, &a)));
            CHECK(ct_ran(cuda_embed_backward(NULL, &a, &scratch)));
            CHECK(ct_same(s->at, a.y, h.y, ct_row(yn), "y"));
            CHECK(ct_same(OPS_F32, a.dtable, h.dtable, ct_row(tn), "dtable"));
            ct_free();
        }
        free(table), free(dy), free(dtable), free(ids), free(h.y), free(h.dtable);
    }
}
