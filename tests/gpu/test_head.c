/* tests/gpu/test_head.c - head and loss by tiles against fp64: masked targets, several tiles,
 * slices of the vocabulary; same bits for any address; bounded scratch for a large vocabulary; the
 * row kernels the same for every instruction set. */
#include "tests/test.h"
#include "tests/gpu/kern_test.h"
#include "tests/gpu/dev_test.h"

TEST_MAIN()

struct head_case {
    uint64_t tokens, hidden, vocab;
    enum ops_dtype at, pt;
};
struct head {
    struct head_case c;
    struct ops_head a;
    float *dw0;
    int32_t *targets;
    double loss;
};

static void head_open(struct head *h, const struct head_case *c)
{
    *h = (struct head){ .c = *c };
    kt_reseed(c->tokens * 7919 + c->vocab);
    h->targets = kt_alloc(c->tokens * 4);
    for (uint64_t t = 0; t < c->tokens; t++)
        h->targets[t] = t % 3 == 1 ? -1 : (int32_t)kt_below(c->vocab);
    h->dw0 = kt_random(OPS_F32, c->vocab * c->hidden, 0.01);
    h->a = (struct ops_head){ .tokens = c->tokens,
                              .hidden = c->hidden,
                              .vocab = c->vocab,
                              .at = c->at,
                              .pt = c->pt,
                              .x = kt_random(c->at, c->tokens * c->hidden, 2),
                              .w = kt_random(c->pt, c->vocab * c->hidden, 1),
                              .targets = h->targets,
                              .loss_sum = &h->loss,
                              .d_scale = 0.37,
                              .logits = kt_alloc(c->tokens * c->vocab * 4),
                              .dx = kt_alloc(c->tokens * c->hidden * ops_dtype_bytes(c->at)) };
    h->a.dw = kt_copy(h->dw0, c->vocab * c->hidden * 4);
}

static void head_close(struct head *h)
{
    void *all[] = { (void *)(uintptr_t)h->a.x,
                    (void *)(uintptr_t)h->a.w,
                    h->targets,
                    h->dw0,
                    h->a.logits,
                    h->a.dx,
                    h->a.dw };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static void head_run(struct rig *r, struct head *h, bool train, uint64_t shift)
{
    struct ops_head blank = { .tokens = h->c.tokens,
                              .hidden = h->c.hidden,
                              .vocab = h->c.vocab,
                              .at = h->c.at,
                              .pt = h->c.pt };
    uint64_t need = 0, made, late, made_after;
    dev_prepare_begin(r->d);
    CHECK_OK(train ? ops_head_train(r->s, &blank, &r->err)
                   : ops_head_forward(r->s, &blank, &r->err),
             &r->err);
    CHECK_OK(dev_prepare_end(r->d, &need, &r->err), &r->err);
    host_matmul_counts(r->d, &made, &late);
    uint8_t *memory = kt_alloc(need + shift);
    h->a.scratch = (struct ops_scratch){ memory + shift, need };
    CHECK_OK(train ? ops_head_train(r->s, &h->a, &r->err) : ops_head_forward(r->s, &h->a, &r->err),
             &r->err);
    CHECK_OK(dev_sync(r->s, &r->err), &r->err);
    host_matmul_counts(r->d, &made_after, &late);
    CHECK(made == made_after);
    free(memory);
}

/* Logits of token t, their maximum and log-sum-exp in fp64, from operands as the products see them.
 */
static double head_row_ref(const struct head *h, uint64_t t, bool bf16, double *logits)
{
    double max = -INFINITY, sum = 0;
    for (uint64_t v = 0; v < h->c.vocab; v++) {
        logits[v] = 0;
        for (uint64_t i = 0; i < h->c.hidden; i++) {
            double x = kt_get(h->c.at, h->a.x, t * h->c.hidden + i);
            logits[v] +=
                (bf16 ? kt_as(OPS_BF16, x) : x) * kt_get(h->c.pt, h->a.w, v * h->c.hidden + i);
        }
        if (logits[v] > max) max = logits[v];
    }
    for (uint64_t v = 0; v < h->c.vocab; v++) sum += exp(logits[v] - max);
    return max + log(sum);
}

/* Errors of logits are below hidden * 2^-24 * |x||w| <= 1e-3 here; a gradient element carries the
 * rounding of `at` (or of bf16 products). */
static void head_check(const struct head *h, bool bf16)
{
    const struct head_case *c = &h->c;
    double *logits = malloc(c->vocab * 8), *dx = malloc(c->hidden * 8),
           *dw = calloc(c->vocab * c->hidden, 8);
    double *dx_size = malloc(c->hidden * 8),
           *dw_size = calloc(c->vocab * c->hidden, 8); /* sums of absolute values */
    double loss = 0, eps = c->at == OPS_BF16 || bf16 ? 0x1p-8 : 2e-5, dx_scale = 0;
    for (uint64_t t = 0; t < c->tokens; t++) {
        double lse = head_row_ref(h, t, bf16, logits);
        for (uint64_t v = 0; v < c->vocab; v++)
            CHECK(
                kt_near(h->a.logits[t * c->vocab + v], logits[v], (double)c->hidden * 2 * 0x1p-22));
        memset(dx, 0, c->hidden * 8);
        memset(dx_size, 0, c->hidden * 8);
        if (h->targets[t] >= 0) loss += lse - logits[h->targets[t]];
        for (uint64_t v = 0; v < c->vocab && h->targets[t] >= 0; v++) {
            double g = (exp(logits[v] - lse) - (v == (uint64_t)h->targets[t])) * h->a.d_scale;
            for (uint64_t i = 0; i < c->hidden; i++) {
                double to_x = g * kt_get(c->pt, h->a.w, v * c->hidden + i),
                       to_w = g * kt_get(c->at, h->a.x, t * c->hidden + i);
                dx[i] += to_x;
                dx_size[i] += fabs(to_x);
                dw[v * c->hidden + i] += to_w;
                dw_size[v * c->hidden + i] += fabs(to_w);
            }
        }
        for (uint64_t i = 0; i < c->hidden; i++) {
            dx_scale = fabs(dx[i]) > dx_scale ? fabs(dx[i]) : dx_scale;
            double got = kt_get(c->at, h->a.dx, t * c->hidden + i);
            if (h->targets[t] < 0)
                CHECK(got == 0);
            else
                CHECK(kt_near(got, dx[i],
                              eps * (fabs(dx[i]) + dx_size[i]) + 1e-5 * dx_size[i] + 1e-9));
        }
    }
    for (uint64_t i = 0; i < c->vocab * c->hidden; i++)
        CHECK(kt_near(h->a.dw[i], h->dw0[i] + dw[i],
                      2 * eps * dw_size[i] + 1e-5 * dw_size[i] + 1e-8));
    CHECK(dx_scale > 0.01); /* the check can fail */
    CHECK(kt_near(h->loss, 2 * loss, 1e-5 * (2 * loss + 1)));
    free(logits);
    free(dx);
    free(dw);
    free(dx_size);
    free(dw_size);
}

static void head_all(bool bf16)
{
    static const struct head_case cases[] = {
        { 1, 1, 2, OPS_F32, OPS_BF16 },       { 3, 17, 101, OPS_BF16, OPS_BF16 },
        { 17, 33, 1009, OPS_F32, OPS_FP16 },  { 37, 16, 1000, OPS_BF16, OPS_FP16 },
        { 531, 24, 127, OPS_BF16, OPS_BF16 }, { 515, 5, 257, OPS_F32, OPS_BF16 },
    };
    struct rig r;
    CHECK_OK(rig_open(&r, EXEC_THREADS,
                      (struct dev_cfg){ .kind = DEV_HOST,
                                        .matmul = bf16 ? DEV_MATMUL_BF16 : DEV_MATMUL_F32 }),
             &r.err);
    kt_worst = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct head h;
        head_open(&h, &cases[i]);
        head_run(&r, &h, false, 0);
        double forward = h.loss;
        head_run(&r, &h, true, 64); /* adds the same loss again */
        CHECK(h.loss == forward + forward);
        head_check(&h, bf16 && cases[i].pt == OPS_BF16);
        if (test_failures) printf("# case %zu\n", i);
        head_close(&h);
    }
    printf("# worst share of the bound %.3f\n", kt_worst);
    rig_close(&r);
}

TEST(head_f32_products_match_fp64) { head_all(false); }
TEST(head_bf16_products_match_fp64)
{
    if (!rig_bf16_possible()) SKIP("oneDNN has no bf16 products on this processor");
    head_all(true);
}

/* `overwrite`: what lies in dw does not matter, not even NaN; the values are those of adding to
 * zeros, over two tiles of tokens, of which the second adds. */
TEST(head_overwrite_is_adding_to_zeros)
{
    static const struct head_case c = { 531, 32, 127, OPS_BF16, OPS_BF16 };
    for (int bf16 = 0; bf16 < 2 && (!bf16 || rig_bf16_possible()); bf16++) {
        struct rig r;
        struct head add, write;
        CHECK_OK(rig_open(&r, EXEC_THREADS,
                          (struct dev_cfg){ .kind = DEV_HOST,
                                            .matmul = bf16 ? DEV_MATMUL_BF16 : DEV_MATMUL_F32 }),
                 &r.err);
        head_open(&add, &c);
        head_open(&write, &c);
        memset(add.a.dw, 0, c.vocab * c.hidden * 4);
        memset(write.a.dw, 0xff, c.vocab * c.hidden * 4);
        write.a.overwrite = true;
        head_run(&r, &add, true, 0);
        head_run(&r, &write, true, 0);
        for (uint64_t i = 0; i < c.vocab * c.hidden; i++) CHECK(add.a.dw[i] == write.a.dw[i]);
        head_close(&add);
        head_close(&write);
        rig_close(&r);
    }
}

/* A table above the size that is converted at once: slices of the vocabulary, several token tiles;
 * equal bits at another address. */
TEST(head_sliced_vocabulary_same_bits_and_right_sums)
{
    struct head_case c = { 300, 511, 40009, OPS_BF16, OPS_BF16 };
    struct rig r;
    struct head one, two;
    CHECK_OK(
        rig_open(&r, EXEC_THREADS, (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_F32 }),
        &r.err);
    head_open(&one, &c);
    head_open(&two, &c);
    head_run(&r, &one, true, 0);
    head_run(&r, &two, true, 64 * 5);
    CHECK(one.loss == two.loss && one.loss > 0);
    CHECK(memcmp(one.a.dx, two.a.dx, c.tokens * c.hidden * 2) == 0);
    CHECK(memcmp(one.a.dw, two.a.dw, c.vocab * c.hidden * 4) == 0);
    double forward = one.loss;
    one.loss = 0;
    head_run(&r, &one, false, 0);
    CHECK(one.loss == forward);
    double *logits = malloc(c.vocab * 8);
    for (uint64_t t = 0; t < c.tokens; t += 97) { /* dx of a few tokens, all slices in it */
        if (one.targets[t] < 0) continue;
        double lse = head_row_ref(&one, t, false, logits);
        for (uint64_t i = 0; i < c.hidden; i += 53) {
            double dx = 0;
            for (uint64_t v = 0; v < c.vocab; v++)
                dx += (exp(logits[v] - lse) - (v == (uint64_t)one.targets[t])) * one.a.d_scale *
                      kt_get(c.pt, one.a.w, v * c.hidden + i);
            CHECK(kt_near(kt_get(c.at, one.a.dx, t * c.hidden + i), dx,
                          0x1p-7 * (fabs(dx) + one.a.d_scale)));
        }
    }
    free(logits);
    head_close(&one);
    head_close(&two);
    rig_close(&r);
}

TEST(head_scratch_of_a_large_vocabulary_is_bounded)
{
    struct rig r;
    uint64_t need = 0;
    CHECK_OK(
        rig_open(&r, EXEC_THREADS, (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_F32 }),
        &r.err);
    struct ops_head a = {
        .tokens = 8192, .hidden = 3072, .vocab = 128256, .at = OPS_BF16, .pt = OPS_BF16
    };
    dev_prepare_begin(r.d);
    CHECK_OK(ops_head_train(r.s, &a, &r.err), &r.err);
    CHECK_OK(dev_prepare_end(r.d, &need, &r.err), &r.err);
    printf("# 128256 x 3072: scratch %.1f MiB\n", (double)need / 1048576);
    CHECK(need > 0 && need <= (uint64_t)128 << 20);
    rig_close(&r);
}

TEST(head_target_outside_the_vocabulary_is_an_error)
{
    struct rig r;
    struct head h;
    struct head_case c = { 4, 8, 16, OPS_F32, OPS_BF16 };
    CHECK_OK(
        rig_open(&r, EXEC_THREADS, (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_F32 }),
        &r.err);
    head_open(&h, &c);
    h.targets[2] = 16;
    h.a.scratch = (struct ops_scratch){ kt_alloc(1 << 20), 1 << 20 };
    CHECK_OK(ops_head_train(r.s, &h.a, &r.err), &r.err);
    CHECK(dev_sync(r.s, &r.err) == STK_ERR_DEVICE);
    CHECK(strstr(r.err.text, "target 16 of token 2"));
    CHECK(h.loss == 0);
    free(h.a.scratch.base);
    head_close(&h);
    rig_close(&r);
}

TEST(head_rows_same_bits_on_every_isa)
{
    uint64_t n = 5003;
    float *x = kt_random(OPS_F32, n, 90), *want = NULL, max = host_row_max(CPU_SCALAR, x, n);
    double sum = 0;
    KT_EACH_ISA(c) {
        float *y = kt_copy(x, n * 4);
        CHECK(host_row_max(c.isa, y, n) == max);
        double s = host_row_exp_sum(c.isa, y, n, max);
        CHECK(memcmp(x, y, n * 4) == 0);
        CHECK(host_row_exp(c.isa, y, n, max) == s);
        host_row_scale(c.isa, y, n, 0.3f);
        if (want)
            CHECK(memcmp(want, y, n * 4) == 0 && s == sum);
        else {
            want = y;
            sum = s;
            for (uint64_t i = 0; i < n; i++) {
                double e = 0.3 * exp((double)fmaxf(
                                     x[i] - max, -87)); /* the argument is rounded to fp32 before */
                CHECK(kt_near(y[i], e, 3e-7 * e + 1e-38));
            }
            continue;
        }
        free(y);
    }
    float bad[20] = { [7] = NAN };
    CHECK(isnan(host_row_exp(cpu_isa_best(), bad, 20, 0)));
    free(want);
    free(x);
}
