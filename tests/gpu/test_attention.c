/* tests/gpu/test_attention.c - blocked attention against a naive one in fp64, its gradients against
 * finite differences, and that nothing but inputs decides its bits. Bounds are element by element:
 * relative to the sum of magnitudes that makes up the element. */
#include "tests/test.h"
#include "tests/gpu/kern_test.h"

TEST_MAIN()

struct shape {
    uint64_t n_seq, seq, heads, kv_heads, dim, pad;
    enum ops_dtype at;
    int window, doc;
    double size;
};

struct problem {
    struct ops_attention a;
    uint64_t rows, qn, kn, on;      /* elements of q, of k and v, of o */
    double *o, *dq, *dk, *dv, *lse; /* reference */
    double *bo, *bdq, *bdk, *bdv;   /* sums of magnitudes */
};

static void problem_open(struct problem *p, const struct shape *s)
{
    memset(p, 0, sizeof *p);
    struct ops_attention *a = &p->a;
    *a = (struct ops_attention){ .n_seq = s->n_seq,
                                 .seq = s->seq,
                                 .heads = s->heads,
                                 .kv_heads = s->kv_heads,
                                 .head_dim = s->dim,
                                 .q_stride = s->heads * s->dim + s->pad,
                                 .k_stride = s->kv_heads * s->dim + s->pad,
                                 .v_stride = s->kv_heads * s->dim + 2 * s->pad,
                                 .o_stride = s->heads * s->dim + 3 * s->pad,
                                 .at = s->at,
                                 .scale = 1.0f / sqrtf((float)s->dim) };
    p->rows = s->n_seq * s->seq;
    kt_reseed(s->seq * 31 + s->dim + s->heads * 7 + (uint64_t)s->window);
    int32_t *first = kt_alloc(p->rows * sizeof *first);
    for (uint64_t n = 0; n < s->n_seq; n++) {
        int32_t doc = 0;
        for (uint64_t t = 0; t < s->seq; t++) {
            if (s->doc && t > 0 && kt_below((uint64_t)s->doc) == 0) doc = (int32_t)t;
            int32_t w = s->window && (int32_t)t >= s->window ? (int32_t)t - s->window + 1 : 0;
            first[n * s->seq + t] = w > doc ? w : doc;
        }
    }
    a->first_key = first;
    a->q = kt_random(s->at, p->rows * a->q_stride, s->size);
    a->k = kt_random(s->at, p->rows * a->k_stride, s->size);
    a->v = kt_random(s->at, p->rows * a->v_stride, 1);
    a->d_o = kt_random(s->at, p->rows * a->o_stride, 1);
    a->o = kt_alloc(p->rows * a->o_stride * ops_dtype_bytes(s->at));
    a->dq = kt_alloc(p->rows * a->q_stride * ops_dtype_bytes(s->at));
    a->dk = kt_alloc(p->rows * a->k_stride * ops_dtype_bytes(s->at));
    a->dv = kt_alloc(p->rows * a->v_stride * ops_dtype_bytes(s->at));
    a->lse = kt_alloc(p->rows * a->heads * sizeof(float));
}

static void problem_close(struct problem *p)
{
    struct ops_attention *a = &p->a;
    const void *all[] = { a->first_key, a->q,  a->k,   a->v,   a->d_o, a->o,  a->dq,
                          a->dk,        a->dv, a->lse, p->o,   p->dq,  p->dk, p->dv,
                          p->lse,       p->bo, p->bdq, p->bdk, p->bdv };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free((void *)(uintptr_t)all[i]);
}

static double *zeros(uint64_t n) { return calloc(n ? n : 1, sizeof(double)); }

/* One row of one head in fp64. dP - delta is taken with its own magnitude for the bounds. */
static void reference_row(struct problem *p, uint64_t n, uint64_t t, uint64_t h, double *s)
{
    const struct ops_attention *a = &p->a;
    const uint64_t D = a->head_dim, row = n * a->seq + t, kv = h / (a->heads / a->kv_heads) * D;
    const uint64_t q = row * a->q_stride + h * D, o = row * a->o_stride + h * D;
    uint64_t first = (uint64_t)a->first_key[row];
    double top = -INFINITY, sum = 0, delta = 0, big = 0;
    for (uint64_t j = first; j <= t; j++) {
        s[j] = 0;
        for (uint64_t d = 0; d < D; d++)
            s[j] += kt_get(a->at, a->q, q + d) *
                    kt_get(a->at, a->k, (n * a->seq + j) * a->k_stride + kv + d);
        s[j] *= (double)a->scale;
        if (s[j] > top) top = s[j];
    }
    for (uint64_t j = first; j <= t; j++) sum += exp(s[j] - top);
    p->lse[row * a->heads + h] = top + log(sum);
    for (uint64_t j = first; j <= t; j++) {
        s[j] = exp(s[j] - top) / sum;
        uint64_t v = (n * a->seq + j) * a->v_stride + kv;
        for (uint64_t d = 0; d < D; d++) {
            double x = kt_get(a->at, a->v, v + d), g = kt_get(a->at, a->d_o, o + d);
            p->o[o + d] += s[j] * x, p->bo[o + d] += s[j] * fabs(x);
            p->dv[v + d] += s[j] * g, p->bdv[v + d] += s[j] * fabs(g);
        }
    }
    for (uint64_t d = 0; d < D; d++) {
        delta += p->o[o + d] * kt_get(a->at, a->d_o, o + d);
        big += p->bo[o + d] * fabs(kt_get(a->at, a->d_o, o + d));
    }
    for (uint64_t j = first; j <= t; j++) {
        uint64_t k = (n * a->seq + j) * a->k_stride + kv, v = (n * a->seq + j) * a->v_stride + kv;
        double dp = 0, mag = big;
        for (uint64_t d = 0; d < D; d++) {
            dp += kt_get(a->at, a->v, v + d) * kt_get(a->at, a->d_o, o + d);
            mag += fabs(kt_get(a->at, a->v, v + d) * kt_get(a->at, a->d_o, o + d));
        }
        double ds = s[j] * (dp - delta) * (double)a->scale, bds = s[j] * mag * (double)a->scale;
        for (uint64_t d = 0; d < D; d++) {
            double x = kt_get(a->at, a->k, k + d), y = kt_get(a->at, a->q, q + d);
            p->dq[q + d] += ds * x, p->bdq[q + d] += bds * fabs(x);
            p->dk[k + d] += ds * y, p->bdk[k + d] += bds * fabs(y);
        }
    }
}

static void reference(struct problem *p)
{
    const struct ops_attention *a = &p->a;
    p->o = zeros(p->rows * a->o_stride), p->bo = zeros(p->rows * a->o_stride);
    p->dq = zeros(p->rows * a->q_stride), p->bdq = zeros(p->rows * a->q_stride);
    p->dk = zeros(p->rows * a->k_stride), p->bdk = zeros(p->rows * a->k_stride);
    p->dv = zeros(p->rows * a->v_stride), p->bdv = zeros(p->rows * a->v_stride);
    p->lse = zeros(p->rows * a->heads);
    double *s = zeros(a->seq);
    for (uint64_t n = 0; n < a->n_seq; n++)
        for (uint64_t h = 0; h < a->heads; h++)
            for (uint64_t t = 0; t < a->seq; t++) reference_row(p, n, t, h, s);
    free(s);
}

/* Runs both directions with scratch that starts `shift` bytes into its buffer. */
static void run(const struct host_ctx *c, struct ops_attention *a, uint64_t shift)
{
    for (int backward = 0; backward < 2; backward++) {
        uint64_t bytes = host_attention_scratch(c, a, backward);
        char *base = kt_alloc(bytes + shift);
        a->scratch = (struct ops_scratch){ base + shift, bytes };
        if (backward) host_attention_backward(c, a);
        else host_attention_forward(c, a);
        free(base);
    }
}

/* Elements of heads lie within `width` of each row; those beyond must not be touched (they still
 * hold 0xff). */
static void check_rows(enum ops_dtype at, const void *got, const double *want, const double *mag,
                       uint64_t rows, uint64_t stride, uint64_t width, double rel)
{
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t i = r * stride; i < (r + 1) * stride; i++) {
            if (i - r * stride < width)
                CHECK(kt_near(kt_get(at, got, i), want[i],
                              rel * mag[i] + kt_half_ulp(at) * fabs(want[i]) * 1.01 + 1e-30));
            else CHECK(isnan(kt_get(at, got, i)));
        }
}

static void check_shape(const struct shape *s)
{
    struct problem p;
    problem_open(&p, s);
    reference(&p);
    struct ops_attention *a = &p.a;
    KT_EACH_ATTENTION (c) {
        kt_worst = 0;
        run(&c, a, 0);
        /* fp32 inside: the scores' error (head_dim roundings of |q||k| scale) enters probabilities;
         * bf16: o is rounded before delta */
        double score = (double)s->dim * s->size * s->size * (double)a->scale;
        double rel = 0x1p-24 * (12 + 0.25 * (double)s->dim + 0.06 * (double)s->seq + 1.5 * score);
        double rel_ds = rel + (s->at == OPS_BF16 ? 0x1p-8 : 0);
        /* Tiles: probabilities and dS are bf16 where they are multiplied. */
        double rel_p = rel + (c.amx ? 0x1p-8 : 0);
        rel_ds += c.amx ? 0x1p-8 : 0;
        check_rows(s->at, a->o, p.o, p.bo, p.rows, a->o_stride, s->heads * s->dim, rel_p);
        check_rows(s->at, a->dv, p.dv, p.bdv, p.rows, a->v_stride, s->kv_heads * s->dim, rel_p);
        check_rows(s->at, a->dq, p.dq, p.bdq, p.rows, a->q_stride, s->heads * s->dim, rel_ds);
        check_rows(s->at, a->dk, p.dk, p.bdk, p.rows, a->k_stride, s->kv_heads * s->dim, rel_ds);
        for (uint64_t i = 0; i < p.rows * s->heads; i++)
            CHECK(kt_near((double)a->lse[i], p.lse[i], rel * (1 + fabs(p.lse[i]))));
        printf("# seq %d heads %d/%d dim %d %s: worst %.2f of the bound\n", (int)s->seq,
               (int)s->heads, (int)s->kv_heads, (int)s->dim, c.amx ? "amx" : cpu_isa_name(c.isa),
               kt_worst);
    }
    problem_close(&p);
}

TEST(attention_matches_fp64)
{
    static const struct shape shapes[] = {
        { 1, 1, 1, 1, 2, 0, OPS_F32, 0, 0, 1 },     { 3, 2, 2, 1, 12, 0, OPS_F32, 0, 0, 2 },
        { 1, 63, 3, 1, 20, 1, OPS_F32, 0, 0, 2 },   { 2, 64, 4, 4, 64, 0, OPS_F32, 0, 0, 2 },
        { 1, 65, 8, 1, 36, 4, OPS_F32, 0, 0, 3 },   { 1, 127, 6, 2, 34, 0, OPS_F32, 0, 0, 1 },
        { 2, 131, 5, 1, 96, 2, OPS_F32, 0, 0, 1 },  { 1, 257, 2, 2, 128, 0, OPS_F32, 0, 0, 4 },
        { 1, 70, 7, 1, 256, 0, OPS_F32, 0, 0, 1 },  { 1, 100, 2, 1, 250, 6, OPS_F32, 0, 0, 1 },
        { 2, 131, 4, 2, 64, 8, OPS_BF16, 0, 0, 2 }, { 1, 67, 3, 3, 18, 1, OPS_BF16, 0, 0, 1 },
        { 1, 1, 1, 1, 32, 0, OPS_BF16, 0, 0, 2 },   { 3, 64, 2, 2, 32, 2, OPS_BF16, 0, 0, 2 },
        { 2, 63, 6, 2, 96, 0, OPS_BF16, 0, 0, 1 },  { 1, 257, 4, 1, 128, 4, OPS_BF16, 0, 0, 3 },
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) check_shape(&shapes[i]);
}

TEST(attention_windows_and_documents)
{
    static const struct shape shapes[] = {
        { 1, 300, 2, 1, 32, 0, OPS_F32, 1, 0, 2 },    { 1, 300, 2, 1, 32, 0, OPS_F32, 7, 0, 2 },
        { 2, 261, 4, 2, 16, 0, OPS_F32, 64, 0, 2 },   { 1, 321, 2, 2, 16, 0, OPS_F32, 100, 0, 2 },
        { 2, 200, 2, 1, 24, 0, OPS_F32, 0, 30, 2 },   { 1, 517, 2, 1, 12, 0, OPS_F32, 90, 150, 2 },
        { 1, 200, 4, 1, 64, 0, OPS_BF16, 50, 40, 2 }, { 2, 330, 2, 1, 32, 0, OPS_BF16, 70, 0, 2 },
        { 2, 290, 2, 1, 64, 0, OPS_BF16, 0, 60, 2 },
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) check_shape(&shapes[i]);
}

/* Large scores: one key takes nearly all, others underflow. */
TEST(attention_sharp)
{
    const struct shape s = { 1, 150, 2, 1, 64, 0, OPS_F32, 0, 0, 12 };
    check_shape(&s);
}

/* A row without keys (not produced by our data path) gives zeros, not NaN; a NaN in one document's
 * queries does not reach the outputs of another. */
TEST(attention_isolates)
{
    const struct shape s = { 1, 140, 2, 1, 16, 0, OPS_F32, 0, 0, 1 };
    KT_EACH_ATTENTION (c) {
        struct problem p;
        problem_open(&p, &s);
        struct ops_attention *a = &p.a;
        int32_t *first = (int32_t *)(uintptr_t)a->first_key;
        for (int t = 70; t < 140; t++) first[t] = 70;
        first[10] = 11;
        ((float *)(uintptr_t)a->q)[100 * a->q_stride] = NAN;
        run(&c, a, 0);
        const float *o = a->o, *dq = a->dq, *dk = a->dk;
        for (uint64_t d = 0; d < a->o_stride; d++) {
            CHECK(o[10 * a->o_stride + d] == 0);
            CHECK(dq[10 * a->q_stride + d] == 0);
        }
        for (uint64_t i = 0; i < 70 * a->o_stride; i++) CHECK(isfinite(o[i]) && isfinite(dq[i]));
        CHECK(isnan(o[100 * a->o_stride]));
        CHECK(isnan(dk[80 * a->k_stride]));
        problem_close(&p);
    }
}

TEST(attention_same_bits)
{
    const struct shape shapes[] = { { 3, 150, 6, 3, 20, 2, OPS_F32, 0, 40, 2 },
                                    { 1, 200, 4, 1, 64, 0, OPS_BF16, 70, 0, 2 } };
    for (size_t k = 0; k < 2; k++)
        KT_EACH_ATTENTION (c) {
            struct problem p;
            problem_open(&p, &shapes[k]);
            struct ops_attention *a = &p.a, b = *a;
            const uint64_t size = ops_dtype_bytes(a->at), on = p.rows * a->o_stride * size;
            const uint64_t qn = p.rows * a->q_stride * size, kn = p.rows * a->k_stride * size;
            const uint64_t vn = p.rows * a->v_stride * size;
            c.threads = 1;
            run(&c, a, 0);
            b.o = kt_alloc(on), b.dq = kt_alloc(qn), b.dk = kt_alloc(kn), b.dv = kt_alloc(vn);
            for (uint32_t threads = 1; threads <= 3; threads++) {
                c.threads = threads;
                run(&c, &b, 4 * threads + (threads == 3 ? 32 : 0));
                CHECK(memcmp(a->o, b.o, on) == 0);
                CHECK(memcmp(a->dq, b.dq, qn) == 0);
                CHECK(memcmp(a->dk, b.dk, kn) == 0);
                CHECK(memcmp(a->dv, b.dv, vn) == 0);
            }
            free(b.o), free(b.dq), free(b.dk), free(b.dv);
            problem_close(&p);
        }
}

static double objective(struct problem *p)
{
    memset(p->o, 0, p->rows * p->a.o_stride * sizeof(double));
    double *s = zeros(p->a.seq), sum = 0;
    for (uint64_t h = 0; h < p->a.heads; h++)
        for (uint64_t t = 0; t < p->a.seq; t++) reference_row(p, 0, t, h, s);
    for (uint64_t i = 0; i < p->rows * p->a.o_stride; i++)
        sum += p->o[i] * kt_get(OPS_F32, p->a.d_o, i);
    free(s);
    return sum;
}

/* The kernel's gradients are slopes of the (fp64) forward: central differences. */
TEST(attention_finite_differences)
{
    const struct shape s = { 1, 70, 2, 1, 6, 0, OPS_F32, 50, 0, 1 };
    struct problem p;
    problem_open(&p, &s);
    reference(&p);
    struct host_ctx c = { 2, cpu_isa_best(), false };
    run(&c, &p.a, 0);
    const void *in[3] = { p.a.q, p.a.k, p.a.v }, *out[3] = { p.a.dq, p.a.dk, p.a.dv };
    const uint64_t n[3] = { p.rows * p.a.q_stride, p.rows * p.a.k_stride, p.rows * p.a.v_stride };
    for (int w = 0; w < 3; w++)
        for (int i = 0; i < 12; i++) {
            float *x = (float *)(uintptr_t)in[w] + kt_below(n[w]), old = *x;
            const double got = (double)((const float *)out[w])[x - (const float *)in[w]];
            *x = old + 0x1p-10f;
            double up = objective(&p), up_x = (double)*x;
            *x = old - 0x1p-10f;
            double slope = (up - objective(&p)) / (up_x - (double)*x);
            *x = old;
            CHECK(kt_near(got, slope, 2e-5));
        }
    problem_close(&p);
}
