/* tests/gpu/cuda/test_kernels_attention.c - attention by own tiles against the host's blocked one.
 *
 * BOUNDS. Sums of up to head_dim and seq products in other orders, exponentials within 4 units of
 * fp32: 2^-24 (64 + 2 head_dim + seq / 4) of the largest magnitude of the result's tensor (2^6 more
 * for gradients, whose terms cancel), and one unit of the stored type. */
#include "tests/test.h"
#include "tests/gpu/cuda/cuda_test.h"

TEST_MAIN()

struct att_case {
    uint64_t n_seq, seq, heads, kv_heads, dim, pad;
    enum ops_dtype at;
    bool grad_wide;
    uint64_t window, doc; /* 0: none */
    uint64_t off;
};
/* Pieces of 64 dimensions: 1, 2 and 4; queries in one tile, one more than it, several. */
static const struct att_case cases[] = {
    { 1, 1, 1, 1, 1, 0, OPS_F32, false, 0, 0, 0 },
    { 2, 7, 3, 1, 5, 3, OPS_BF16, false, 3, 0, 2 },
    { 1, 65, 2, 2, 64, 0, OPS_BF16, false, 0, 0, 0 },
    { 1, 131, 4, 2, 36, 4, OPS_F32, false, 0, 40, 4 },
    { 2, 67, 2, 1, 80, 1, OPS_BF16, true, 0, 9, 4 },
    { 1, 193, 2, 1, 16, 0, OPS_BF16, true, 50, 0, 0 },
    { 1, 70, 1, 1, 128, 8, OPS_BF16, false, 0, 0, 0 },
    { 1, 66, 2, 1, 200, 0, OPS_F32, false, 0, 0, 0 },
    { 1, 17, 1, 1, 256, 0, OPS_BF16, true, 0, 0, 0 },
};
enum { CASES = sizeof cases / sizeof cases[0] };

enum { Q, K, V, O, LSE, D_O, DQ, DK, DV, BUFFERS };

struct problem {
    const struct att_case *s;
    struct ops_attention h; /* the host's, with its results */
    uint64_t rows;
    struct ct_rows shape[BUFFERS];
    enum ops_dtype type[BUFFERS];
};

static uint64_t elems(const struct problem *p, int b) { return p->shape[b].rows * p->shape[b].ld; }
static uint64_t bytes(const struct problem *p, int b)
{
    return elems(p, b) * ops_dtype_bytes(p->type[b]);
}
static const void *at(const struct ops_attention *a, int b)
{
    const void *all[BUFFERS] = { a->q, a->k, a->v, a->o, a->lse, a->d_o, a->dq, a->dk, a->dv };
    return all[b];
}

/* Rows without any key among them, where documents are cut; and the first of two sequences, all of
 * it. */
static int32_t *first_keys(const struct att_case *s)
{
    int32_t *first = kt_alloc(s->n_seq * s->seq * sizeof *first);
    for (uint64_t n = 0; n < s->n_seq; n++) {
        uint64_t doc = 0;
        for (uint64_t t = 0; t < s->seq; t++) {
            if (s->doc && t > 0 && kt_below(s->doc) == 0) doc = t;
            const uint64_t w = s->window && t >= s->window ? t - s->window + 1 : 0;
            first[n * s->seq + t] = (int32_t)(w > doc ? w : doc);
            if (s->doc && t % 29 == 28) first[n * s->seq + t] = (int32_t)t + 1;
            if (s->doc && s->n_seq > 1 && n == 0) first[t] = (int32_t)s->seq + 64;
        }
    }
    return first;
}

static void host_run(struct ops_attention *h)
{
    const struct host_ctx c = ct_host();
    for (int backward = 0; backward < 2; backward++) {
        const uint64_t size = host_attention_scratch(&c, h, backward);
        void *base = kt_alloc(size);
        h->scratch = (struct ops_scratch){ base, size };
        if (backward) host_attention_backward(&c, h);
        else host_attention_forward(&c, h);
        free(base);
    }
}

static void problem_open(struct problem *p, const struct att_case *s)
{
    const uint64_t q = s->heads * s->dim, k = s->kv_heads * s->dim, n = s->n_seq * s->seq;
    const enum ops_dtype t = s->at, g = ops_wide(t, s->grad_wide);
    *p = (struct problem){ .s = s, .rows = n };
    struct ops_attention *h = &p->h;
    *h = (struct ops_attention){ .n_seq = s->n_seq,
                                 .seq = s->seq,
                                 .heads = s->heads,
                                 .kv_heads = s->kv_heads,
                                 .head_dim = s->dim,
                                 .q_stride = q + s->pad,
                                 .k_stride = k + s->pad,
                                 .v_stride = k + 2 * s->pad,
                                 .o_stride = q + 3 * s->pad,
                                 .at = t,
                                 .grad_wide = s->grad_wide,
                                 .scale = 1.0f / sqrtf((float)s->dim) };
    const struct ct_rows qr = { n, q, h->q_stride }, kr = { n, k, h->k_stride },
                         vr = { n, k, h->v_stride }, or = { n, q, h->o_stride },
                         lr = { n, s->heads, s->heads };
    const struct ct_rows shapes[BUFFERS] = { qr, kr, vr, or, lr, or, qr, kr, vr };
    const enum ops_dtype types[BUFFERS] = { t, t, t, t, OPS_F32, g, g, g, g };
    memcpy(p->shape, shapes, sizeof shapes);
    memcpy(p->type, types, sizeof types);
    kt_reseed(s->seq * 31 + s->dim);
    h->first_key = first_keys(s);
    h->q = kt_random(t, elems(p, Q), 2), h->k = kt_random(t, elems(p, K), 2);
    h->v = kt_random(t, elems(p, V), 1), h->d_o = kt_random(g, elems(p, D_O), 1);
    h->o = kt_alloc(bytes(p, O)), h->lse = kt_alloc(bytes(p, LSE)), h->dq = kt_alloc(bytes(p, DQ));
    h->dk = kt_alloc(bytes(p, DK)), h->dv = kt_alloc(bytes(p, DV));
    host_run(h);
}

static void problem_close(struct problem *p)
{
    for (int b = 0; b < BUFFERS; b++) free((void *)(uintptr_t)at(&p->h, b));
    free((void *)(uintptr_t)p->h.first_key);
}

static struct ops_attention device_args(const struct problem *p)
{
    const uint64_t off = p->s->off;
    struct ops_attention a = p->h;
    a.first_key = ct_const(p->h.first_key, p->rows * 4, 4, "first_key");
    a.q = ct_const(p->h.q, bytes(p, Q), off, "q"), a.k = ct_const(p->h.k, bytes(p, K), 0, "k");
    a.v = ct_const(p->h.v, bytes(p, V), off, "v"),
    a.d_o = ct_const(p->h.d_o, bytes(p, D_O), 0, "d_o");
    a.o = ct_out(bytes(p, O), off, "o"), a.lse = ct_out(bytes(p, LSE), 0, "lse");
    a.dq = ct_out(bytes(p, DQ), 2 * off, "dq"), a.dk = ct_out(bytes(p, DK), 0, "dk");
    a.dv = ct_out(bytes(p, DV), 2 * off, "dv");
    a.scratch = ct_scratch(cuda_attention_scratch(&a, true));
    return a;
}

static void check(const struct problem *p, const struct ops_attention *a, int b, double rel,
                  const char *what)
{
    const double size = ct_size(p->type[b], at(&p->h, b), p->shape[b]);
    CHECK(ct_close(p->type[b], at(a, b), at(&p->h, b), p->shape[b], 1.01, rel * size, what));
    CHECK(ct_filled(p->type[b], at(a, b), p->shape[b], elems(p, b)));
}

/* lse of rows without keys is -infinity on both. */
static void lse_check(const struct problem *p, const struct ops_attention *a, double rel)
{
    for (uint64_t i = 0; i < elems(p, LSE); i++) {
        const double want = (double)p->h.lse[i];
        CHECK(kt_near((double)a->lse[i], want, rel * (fabs(want) + 8)));
    }
}

TEST(attention_is_the_hosts)
{
    for (int k = 0; k < CASES; k++) {
        struct problem p;
        struct ct_keep keep[BUFFERS] = { { 0 } };
        problem_open(&p, &cases[k]);
        const double rel = 0x1p-24 * (64 + 2 * (double)p.s->dim + (double)p.s->seq / 4);
        kt_worst = 0;
        /* many tiles take long: two orders of those */
        for (int o = 0; o < (k < 5 ? CT_ORDERS : 2); o++) {
            ct_order(o);
            struct ops_attention a = device_args(&p);
            CHECK(ct_ran(cuda_attention_forward(NULL, &a)));
            CHECK(ct_again(&keep[O], o, a.o, bytes(&p, O)));
            CHECK(ct_again(&keep[LSE], o, a.lse, bytes(&p, LSE)));
            if (o == 0) check(&p, &a, O, rel, "o"), lse_check(&p, &a, rel);
            /* the host's, so that what follows is compared alone */
            memcpy(a.o, p.h.o, bytes(&p, O)), memcpy(a.lse, p.h.lse, bytes(&p, LSE));
            simt_written(a.o, bytes(&p, O));
            CHECK(ct_ran(cuda_attention_backward(NULL, &a)));
            for (int b = DQ; b <= DV; b++) {
                static const char *const names[] = { "dq", "dk", "dv" };
                CHECK(ct_again(&keep[b], o, at(&a, b), bytes(&p, b)));
                if (o == 0) check(&p, &a, b, 64 * rel, names[b - DQ]);
            }
            ct_free();
        }
        printf("# seq %d heads %d of %d: worst %.2f of the bound\n", (int)p.s->seq, (int)p.s->heads,
               (int)p.s->dim, kt_worst);
        ct_keep_free(keep, BUFFERS);
        problem_close(&p);
    }
}

/* What the library's attention is given: compared with plain loops. */
TEST(attention_layouts_are_turned)
{
    static const uint64_t shapes[][4] = { { 1, 1, 1, 1 }, { 2, 33, 3, 7 }, { 1, 100, 40, 40 }, { 3, 257, 2, 5 } };
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++) {
        const uint64_t n = shapes[k][0], seq = shapes[k][1], heads = shapes[k][2], all = shapes[k][3], rows = n * seq;
        int32_t *first = kt_alloc(rows * 4);
        for (uint64_t i = 0; i < rows; i++) first[i] = (int32_t)(i % seq < 5 ? 0 : i % seq / 5 * 5 - i % seq / 50);
        float *lse = kt_random(OPS_F32, rows * all, 1);
        for (int o = 0; o < CT_ORDERS; o++) {
            ct_order(o);
            const int32_t *from = ct_const(first, rows * 4, 4, "first_key");
            int32_t *end = ct_out(rows * 4, 0, "end");
            const float *src = ct_const(lse, rows * all * 4, 0, "lse");
            float *turned = ct_out(rows * heads * 4, 0, "turned"), *back = ct_out(rows * all * 4, 0, "back");
            struct cuda_attention_stats a = { n, seq, heads, all, true, src + (all - heads), turned };
            CHECK(ct_ran(cuda_attention_ends(NULL, n, seq, from, end)));
            CHECK(ct_ran(cuda_attention_stats(NULL, &a)));
            a.by_head = false, a.src = turned, a.dst = back + (all - heads);
            CHECK(ct_ran(cuda_attention_stats(NULL, &a)));
            for (uint64_t i = 0; i < rows; i++) {
                const uint64_t s = i / seq, key = i % seq;
                uint64_t t = key + 1;
                while (t < seq && first[s * seq + t] <= (int32_t)key) t++;
                CHECK(end[i] == (int32_t)t);
                for (uint64_t h = 0; h < heads; h++) {
                    const float x = lse[i * all + all - heads + h];
                    CHECK(turned[(s * heads + h) * seq + key] == x && back[i * all + all - heads + h] == x);
                }
            }
            ct_free();
        }
        free(first);
        free(lse);
    }
}

TEST(attention_refuses_wide_heads)
{
    struct ops_attention a = {
        .n_seq = 1, .seq = 1, .heads = 1, .kv_heads = 1, .head_dim = 257, .at = OPS_F32
    };
    CHECK(cuda_attention_forward(NULL, &a) == cudaErrorInvalidValue);
    CHECK(cuda_attention_backward(NULL, &a) == cudaErrorInvalidValue);
}
