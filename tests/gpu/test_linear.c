/* tests/gpu/test_linear.c - linear layers through a stream against fp64, for every mix of types and
 * shapes that are not round; same bits for any address; nothing made after prepare mode; gradients
 * written over anything. */
#include "tests/test.h"
#include "tests/gpu/kern_test.h"
#include "tests/gpu/dev_test.h"

TEST_MAIN()

struct lin_case {
    uint64_t rows, in, out;
    enum ops_dtype at, pt;
    bool bias, add;
};

struct lin {
    struct lin_case c;
    struct ops_linear a;
    void *y0, *dx0;
    float *dw0, *db0;
};

static void lin_open(struct lin *l, const struct lin_case *c)
{
    uint64_t x = c->rows * c->in, y = c->rows * c->out, w = c->out * c->in;
    *l = (struct lin){ .c = *c };
    kt_reseed(c->rows * 7919 + c->in * 31 + c->out);
    l->y0 = kt_random(c->at, y, 1);
    l->dx0 = kt_random(c->at, x, 1);
    l->dw0 = kt_random(OPS_F32, w, 1);
    l->db0 = kt_random(OPS_F32, c->out, 1);
    l->a = (struct ops_linear){ .rows = c->rows,
                                .in = c->in,
                                .out = c->out,
                                .at = c->at,
                                .pt = c->pt,
                                .add = c->add,
                                .x = kt_random(c->at, x, 1),
                                .w = kt_random(c->pt, w, 0.5),
                                .bias = c->bias ? kt_random(c->pt, c->out, 1) : NULL,
                                .dy = kt_random(c->at, y, 1) };
    l->a.y = kt_copy(l->y0, y * ops_dtype_bytes(c->at));
    l->a.dx = kt_copy(l->dx0, x * ops_dtype_bytes(c->at));
    l->a.dw = kt_copy(l->dw0, w * 4);
    l->a.dbias = kt_copy(l->db0, c->out * 4);
}

static void lin_close(struct lin *l)
{
    void *all[] = { (void *)(uintptr_t)l->a.x,
                    (void *)(uintptr_t)l->a.w,
                    (void *)(uintptr_t)l->a.bias,
                    (void *)(uintptr_t)l->a.dy,
                    l->a.y,
                    l->a.dx,
                    l->a.dw,
                    l->a.dbias,
                    l->y0,
                    l->dx0,
                    l->dw0,
                    l->db0 };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static stk_status lin_ops(struct rig *r, const struct ops_linear *a)
{
    STK_TRY(ops_linear_forward(r->s, a, &r->err));
    STK_TRY(ops_linear_backward_data(r->s, a, &r->err));
    return ops_linear_backward_weight(r->s, a, &r->err);
}

/* Prepares with NULL pointers, then runs all three with exactly the scratch that was reported. */
static void lin_run(struct rig *r, struct lin *l, uint64_t shift)
{
    struct ops_linear blank = { .rows = l->a.rows,
                                .in = l->a.in,
                                .out = l->a.out,
                                .at = l->a.at,
                                .pt = l->a.pt,
                                .add = l->a.add };
    uint64_t need = 0;
    dev_prepare_begin(r->d);
    CHECK_OK(lin_ops(r, &blank), &r->err);
    CHECK_OK(dev_prepare_end(r->d, &need, &r->err), &r->err);
    uint8_t *memory = kt_alloc(need + shift);
    l->a.scratch = (struct ops_scratch){ memory + shift, need };
    CHECK_OK(lin_ops(r, &l->a), &r->err);
    CHECK_OK(dev_sync(r->s, &r->err), &r->err);
    free(memory);
}

/* Sum of products over k and of their absolute values, which bounds the error of any order of
 * summation. */
struct dot {
    double sum, size;
};
static void dot_add(struct dot *d, double a, double b)
{
    d->sum += a * b;
    d->size += fabs(a * b);
}

/* k roundings in fp32 at worst (2^-24 each), f32 operands rounded to bf16 in bf16 products (2^-8
 * each), then rounding on store. */
static double dot_bound(const struct lin_case *c, bool bf16, struct dot d, uint64_t k, double extra,
                        enum ops_dtype store)
{
    bool rounded = bf16 && c->at == OPS_F32 && c->pt == OPS_BF16;
    double sum = d.size * ((double)k + 4) * 0x1p-24 + (rounded ? d.size * 2.01 * 0x1p-8 : 0);
    double whole = fabs(d.sum) + fabs(extra) + sum;
    return sum + whole * (kt_half_ulp(store) + 2 * 0x1p-24);
}

static void check_forward(const struct lin *l, bool bf16)
{
    const struct ops_linear *a = &l->a;
    for (uint64_t r = 0; r < a->rows; r++)
        for (uint64_t o = 0; o < a->out; o++) {
            struct dot d = { 0 };
            for (uint64_t i = 0; i < a->in; i++)
                dot_add(&d, kt_get(a->at, a->x, r * a->in + i), kt_get(a->pt, a->w, o * a->in + i));
            double extra = (a->bias ? kt_get(a->pt, a->bias, o) : 0) +
                           (a->add ? kt_get(a->at, l->y0, r * a->out + o) : 0);
            CHECK(kt_near(kt_get(a->at, a->y, r * a->out + o), d.sum + extra,
                          dot_bound(&l->c, bf16, d, a->in, extra, a->at)));
        }
}

static void check_data(const struct lin *l, bool bf16)
{
    const struct ops_linear *a = &l->a;
    for (uint64_t r = 0; r < a->rows; r++)
        for (uint64_t i = 0; i < a->in; i++) {
            struct dot d = { 0 };
            for (uint64_t o = 0; o < a->out; o++)
                dot_add(&d, kt_get(a->at, a->dy, r * a->out + o),
                        kt_get(a->pt, a->w, o * a->in + i));
            double extra = a->add ? kt_get(a->at, l->dx0, r * a->in + i) : 0;
            CHECK(kt_near(kt_get(a->at, a->dx, r * a->in + i), d.sum + extra,
                          dot_bound(&l->c, bf16, d, a->out, extra, a->at)));
        }
}

static void check_weight(const struct lin *l, bool bf16)
{
    const struct ops_linear *a = &l->a;
    for (uint64_t o = 0; o < a->out; o++) {
        struct dot b = { 0 };
        for (uint64_t r = 0; r < a->rows; r++) dot_add(&b, kt_get(a->at, a->dy, r * a->out + o), 1);
        CHECK(
            kt_near(a->dbias[o], b.sum + l->db0[o], (fabs(b.sum) + fabs(l->db0[o]) + 1) * 0x1p-22));
        for (uint64_t i = 0; i < a->in; i++) {
            struct dot d = { 0 };
            for (uint64_t r = 0; r < a->rows; r++)
                dot_add(&d, kt_get(a->at, a->dy, r * a->out + o),
                        kt_get(a->at, a->x, r * a->in + i));
            double extra = l->dw0[o * a->in + i];
            CHECK(kt_near(a->dw[o * a->in + i], d.sum + extra,
                          dot_bound(&l->c, bf16, d, a->rows, extra, OPS_F32)));
        }
    }
}

static void check_case(struct rig *r, const struct lin_case *c, bool bf16)
{
    struct lin l;
    lin_open(&l, c);
    lin_run(r, &l, 0);
    check_forward(&l, bf16);
    check_data(&l, bf16);
    check_weight(&l, bf16);
    if (test_failures)
        printf("# case rows %llu in %llu out %llu at %d pt %d bias %d add %d\n",
               (unsigned long long)c->rows, (unsigned long long)c->in, (unsigned long long)c->out,
               (int)c->at, (int)c->pt, c->bias, c->add);
    lin_close(&l);
}

static void check_all(bool bf16)
{
    static const uint64_t shapes[][3] = { { 1, 1, 1 },    { 3, 17, 1 },    { 1, 64, 37 },
                                          { 17, 3, 101 }, { 37, 101, 67 }, { 130, 67, 257 },
                                          { 96, 64, 160 } }; /* the last: on tiles, if any */
    struct rig r;
    struct dev_cfg cfg = { .kind = DEV_HOST, .matmul = bf16 ? DEV_MATMUL_BF16 : DEV_MATMUL_F32 };
    CHECK_OK(rig_open(&r, EXEC_THREADS, cfg), &r.err);
    kt_worst = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (unsigned mix = 0; mix < 16 && !test_failures; mix++) {
            struct lin_case c = { shapes[i][0],
                                  shapes[i][1],
                                  shapes[i][2],
                                  mix & 1 ? OPS_BF16 : OPS_F32,
                                  mix & 2 ? OPS_FP16 : OPS_BF16,
                                  (mix & 4) != 0,
                                  (mix & 8) != 0 };
            check_case(&r, &c, bf16);
        }
    printf("# worst share of the bound %.3f\n", kt_worst);
    uint64_t made, late;
    host_matmul_counts(r.d, &made, &late);
    CHECK(made > 0 && late <= 1); /* the one of the measurement at open */
    rig_close(&r);
}

TEST(linear_f32_products_match_fp64) { check_all(false); }

TEST(linear_bf16_products_match_fp64)
{
    if (!rig_bf16_possible()) SKIP("oneDNN has no bf16 products on this processor");
    check_all(true);
}

/* `overwrite`: what lies in dw and dbias does not matter, not even NaN; the values are those of
 * adding to zeros. Prepare mode made the products of both. */
static void check_overwrite(bool bf16)
{
    static const uint64_t shapes[][3] = { { 1, 1, 1 }, { 37, 101, 67 }, { 96, 64, 160 } };
    struct rig r;
    struct dev_cfg cfg = { .kind = DEV_HOST, .matmul = bf16 ? DEV_MATMUL_BF16 : DEV_MATMUL_F32 };
    CHECK_OK(rig_open(&r, EXEC_THREADS, cfg), &r.err);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const uint64_t *s = shapes[i];
        struct lin_case c = { s[0], s[1], s[2], OPS_BF16, OPS_BF16, true, false };
        struct lin add, write;
        lin_open(&add, &c);
        lin_open(&write, &c);
        memset(add.a.dw, 0, c.out * c.in * 4);
        memset(add.a.dbias, 0, c.out * 4);
        memset(write.a.dw, 0xff, c.out * c.in * 4);
        memset(write.a.dbias, 0xff, c.out * 4);
        write.a.overwrite = true;
        lin_run(&r, &add, 0);
        lin_run(&r, &write, 0);
        for (uint64_t k = 0; k < c.out * c.in; k++) CHECK(add.a.dw[k] == write.a.dw[k]);
        for (uint64_t k = 0; k < c.out; k++) CHECK(add.a.dbias[k] == write.a.dbias[k]);
        lin_close(&add);
        lin_close(&write);
    }
    uint64_t made, late;
    host_matmul_counts(r.d, &made, &late);
    CHECK(late <= 1); /* the one of the measurement at open */
    rig_close(&r);
}

TEST(linear_overwrite_is_adding_to_zeros)
{
    check_overwrite(false);
    if (rig_bf16_possible()) check_overwrite(true);
}

/* Large enough for several slices of weights, rows and dW: sampled elements against fp64, bit-equal
 * between two runs with scratch at different addresses. */
static void check_sliced(bool bf16, enum ops_dtype at, enum ops_dtype pt)
{
    struct lin_case c = { 9001, 1031, 1025, at, pt, true, true };
    struct rig r;
    struct lin one, two;
    CHECK_OK(rig_open(&r, EXEC_THREADS,
                      (struct dev_cfg){ .kind = DEV_HOST,
                                        .matmul = bf16 ? DEV_MATMUL_BF16 : DEV_MATMUL_F32 }),
             &r.err);
    lin_open(&one, &c);
    lin_open(&two, &c);
    lin_run(&r, &one, 0);
    lin_run(&r, &two, 64 * 7);
    uint64_t e = ops_dtype_bytes(at);
    CHECK(memcmp(one.a.y, two.a.y, c.rows * c.out * e) == 0);
    CHECK(memcmp(one.a.dx, two.a.dx, c.rows * c.in * e) == 0);
    CHECK(memcmp(one.a.dw, two.a.dw, c.out * c.in * 4) == 0);
    CHECK(memcmp(one.a.dbias, two.a.dbias, c.out * 4) == 0);
    for (int sample = 0; sample < 300; sample++) {
        uint64_t row = kt_below(c.rows), o = kt_below(c.out), in = kt_below(c.in);
        struct dot y = { 0 }, dx = { 0 }, dw = { 0 };
        for (uint64_t i = 0; i < c.in; i++)
            dot_add(&y, kt_get(at, one.a.x, row * c.in + i), kt_get(pt, one.a.w, o * c.in + i));
        for (uint64_t i = 0; i < c.out; i++)
            dot_add(&dx, kt_get(at, one.a.dy, row * c.out + i), kt_get(pt, one.a.w, i * c.in + in));
        for (uint64_t i = 0; i < c.rows; i++)
            dot_add(&dw, kt_get(at, one.a.dy, i * c.out + o), kt_get(at, one.a.x, i * c.in + in));
        double ey = kt_get(pt, one.a.bias, o) + kt_get(at, one.y0, row * c.out + o),
               ex = kt_get(at, one.dx0, row * c.in + in);
        double ew = one.dw0[o * c.in + in];
        CHECK(kt_near(kt_get(at, one.a.y, row * c.out + o), y.sum + ey,
                      dot_bound(&c, bf16, y, c.in, ey, at)));
        CHECK(kt_near(kt_get(at, one.a.dx, row * c.in + in), dx.sum + ex,
                      dot_bound(&c, bf16, dx, c.out, ex, at)));
        CHECK(kt_near(one.a.dw[o * c.in + in], dw.sum + ew,
                      dot_bound(&c, bf16, dw, c.rows, ew, OPS_F32)));
    }
    lin_close(&one);
    lin_close(&two);
    rig_close(&r);
}

TEST(linear_sliced_f32_products_same_bits_at_any_address)
{
    check_sliced(false, OPS_BF16, OPS_BF16);
}
TEST(linear_sliced_fp16_parameters) { check_sliced(false, OPS_F32, OPS_FP16); }
TEST(linear_sliced_bf16_products_same_bits_at_any_address)
{
    if (!rig_bf16_possible()) SKIP("oneDNN has no bf16 products on this processor");
    check_sliced(true, OPS_F32, OPS_BF16);
}

/* Weights of 33 M elements are two slices of 32 MiB and more in f32: the scratch stays bounded. */
TEST(linear_scratch_is_bounded)
{
    struct rig r;
    uint64_t need = 0;
    CHECK_OK(
        rig_open(&r, EXEC_THREADS, (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_F32 }),
        &r.err);
    struct ops_linear a = {
        .rows = 4096, .in = 4096, .out = 14336, .at = OPS_BF16, .pt = OPS_BF16, .add = true
    };
    dev_prepare_begin(r.d);
    CHECK_OK(lin_ops(&r, &a), &r.err);
    CHECK_OK(dev_prepare_end(r.d, &need, &r.err), &r.err);
    printf("# 4096 x 4096 x 14336: scratch %.1f MiB\n", (double)need / 1048576);
    CHECK(need > 0 && need <= (uint64_t)160 << 20);
    rig_close(&r);
}

TEST(linear_unprepared_shape_is_made_and_counted)
{
    struct rig r;
    struct lin l;
    struct lin_case c = { 5, 7, 11, OPS_F32, OPS_BF16, false, false };
    uint64_t made, late, late_before;
    CHECK_OK(
        rig_open(&r, EXEC_THREADS, (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_F32 }),
        &r.err);
    host_matmul_counts(r.d, &made, &late_before);
    lin_open(&l, &c);
    l.a.scratch = (struct ops_scratch){ kt_alloc(1 << 20), 1 << 20 };
    CHECK_OK(lin_ops(&r, &l.a), &r.err);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    host_matmul_counts(r.d, &made, &late);
    CHECK(late == late_before + 3);
    free(l.a.scratch.base);
    lin_close(&l);
    rig_close(&r);
}

TEST(linear_too_little_scratch_is_an_error)
{
    struct rig r;
    struct lin l;
    struct lin_case c = { 64, 64, 64, OPS_BF16, OPS_BF16, true, false };
    CHECK_OK(
        rig_open(&r, EXEC_THREADS, (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_F32 }),
        &r.err);
    lin_open(&l, &c);
    l.a.scratch = (struct ops_scratch){ kt_alloc(1024), 1024 };
    CHECK_OK(ops_linear_forward(r.s, &l.a, &r.err), &r.err);
    CHECK(dev_sync(r.s, &r.err) == STK_ERR_DEVICE);
    CHECK(strstr(r.err.text, "linear_forward") && strstr(r.err.text, "scratch"));
    free(l.a.scratch.base);
    lin_close(&l);
    rig_close(&r);
}

TEST(linear_refuses_impossible_shapes)
{
    struct rig r;
    CHECK_OK(
        rig_open(&r, EXEC_THREADS, (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_F32 }),
        &r.err);
    float x[4] = { 0 };
    struct ops_linear good = {
        .rows = 1, .in = 1, .out = 1, .at = OPS_F32, .pt = OPS_BF16, .x = x, .w = x, .y = x
    };
    struct ops_linear bad[] = { good, good, good, good, good };
    bad[0].rows = 0;
    bad[1].in = UINT64_MAX;
    bad[2].at = OPS_FP16;
    bad[3].pt = OPS_F32;
    bad[4].w = NULL;
    for (int i = 0; i < 5; i++) {
        stk_error_clear(&r.err);
        CHECK(ops_linear_forward(r.s, &bad[i], &r.err) == STK_ERR_CONFIG);
        CHECK(strncmp(r.err.text, "linear_forward: ", 16) == 0);
    }
    rig_close(&r);
}
