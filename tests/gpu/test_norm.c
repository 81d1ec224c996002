/* tests/gpu/test_norm.c - RMS norm against fp64, element by element; its gradients against finite
 * differences; same bits for any threads, scratch address and instruction set. */
#include "tests/test.h"
#include "tests/gpu/kern_test.h"

TEST_MAIN()

struct shape {
    uint64_t tokens, group, cols, xpad, ypad;
    enum ops_dtype at, pt;
    bool add;
};

static const struct shape shapes[] = {
    { 1, 1, 1, 0, 0, OPS_F32, OPS_BF16, false },
    { 3, 1, 7, 0, 0, OPS_F32, OPS_FP16, true },
    { 37, 1, 130, 0, 0, OPS_F32, OPS_BF16, true },
    { 70, 5, 20, 3, 9, OPS_F32, OPS_BF16, false },
    { 1031, 2, 64, 64, 0, OPS_F32, OPS_BF16, false },
    { 5, 1, 4099, 0, 0, OPS_F32, OPS_BF16, true },
    { 67, 3, 36, 1, 0, OPS_BF16, OPS_BF16, false },
    { 300, 1, 256, 0, 0, OPS_BF16, OPS_BF16, true },
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

struct problem {
    struct ops_rmsnorm a;
    uint64_t xn, yn;
    void *dx0;
    float *dw0;
};

static void problem_open(struct problem *p, const struct shape *s)
{
    struct ops_rmsnorm *a = &p->a;
    *a = (struct ops_rmsnorm){ .rows = s->tokens * s->group,
                               .cols = s->cols,
                               .group = s->group,
                               .x_stride = s->group * s->cols + s->xpad,
                               .y_stride = s->group * s->cols + s->ypad,
                               .at = s->at,
                               .pt = s->pt,
                               .eps = 1e-5,
                               .add = s->add };
    p->xn = s->tokens * a->x_stride, p->yn = s->tokens * a->y_stride;
    kt_reseed(s->tokens * 131 + s->cols);
    a->x = kt_random(s->at, p->xn, 3);
    a->w = kt_random(s->pt, s->cols, 2);
    a->dy = kt_random(s->at, p->yn, 1);
    a->y = kt_alloc(p->yn * ops_dtype_bytes(s->at));
    a->rstd = kt_alloc(a->rows * sizeof(float));
    p->dx0 = kt_random(s->at, p->xn, 1);
    a->dx = kt_copy(p->dx0, p->xn * ops_dtype_bytes(s->at));
    p->dw0 = kt_random(OPS_F32, s->cols, 1);
    a->dw = kt_copy(p->dw0, s->cols * sizeof(float));
}

static void problem_close(struct problem *p)
{
    void *all[] = { (void *)(uintptr_t)p->a.x,
                    (void *)(uintptr_t)p->a.w,
                    (void *)(uintptr_t)p->a.dy,
                    p->a.y,
                    p->a.rstd,
                    p->a.dx,
                    p->a.dw,
                    p->dx0,
                    p->dw0 };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static void run(const struct host_ctx *c, struct ops_rmsnorm *a, uint64_t shift)
{
    for (int backward = 0; backward < 2; backward++) {
        uint64_t bytes = host_rmsnorm_scratch(c, a, backward);
        char *base = kt_alloc(bytes + shift);
        a->scratch = (struct ops_scratch){ base + shift, bytes };
        if (backward) host_rmsnorm_backward(c, a);
        else host_rmsnorm_forward(c, a);
        free(base);
    }
}

static uint64_t row_at(const struct ops_rmsnorm *a, uint64_t r, uint64_t stride)
{
    return r / a->group * stride + r % a->group * a->cols;
}

static double row_rstd(const struct ops_rmsnorm *a, uint64_t r)
{
    double sum = 0;
    for (uint64_t i = 0; i < a->cols; i++) {
        double x = kt_get(a->at, a->x, row_at(a, r, a->x_stride) + i);
        sum += x * x;
    }
    return 1 / sqrt(sum / (double)a->cols + a->eps);
}

/* Checks y, rstd and dx; adds the row's share of dw and of its magnitude. One rounding, on
 * store. */
static void check_row(const struct problem *p, uint64_t r, double *dw, double *bdw)
{
    const struct ops_rmsnorm *a = &p->a;
    const uint64_t x0 = row_at(a, r, a->x_stride), y0 = row_at(a, r, a->y_stride), C = a->cols;
    const double rstd = row_rstd(a, r), rel = 0x1p-24 * (8 + (double)C / 32),
                 ulp = kt_half_ulp(a->at);
    double dot = 0, mag = 0;
    CHECK(kt_near((double)a->rstd[r], rstd, rel * rstd));
    for (uint64_t i = 0; i < C; i++) {
        double n = kt_get(a->at, a->x, x0 + i) * rstd, w = kt_get(a->pt, a->w, i),
               dy = kt_get(a->at, a->dy, y0 + i);
        double y = n * w;
        CHECK(kt_near(kt_get(a->at, a->y, y0 + i), y, (rel + 1.01 * ulp) * fabs(y)));
        dot += dy * w * n, mag += fabs(dy * w * n);
        dw[i] += dy * n, bdw[i] += fabs(dy * n);
    }
    for (uint64_t i = 0; i < C; i++) {
        double n = kt_get(a->at, a->x, x0 + i) * rstd, w = kt_get(a->pt, a->w, i),
               dy = kt_get(a->at, a->dy, y0 + i);
        double old = a->add ? kt_get(a->at, p->dx0, x0 + i) : 0,
               dx = old + rstd * (dy * w - n * dot / (double)C);
        double big = fabs(old) + rstd * (fabs(dy * w) + fabs(n) * mag / (double)C);
        CHECK(kt_near(kt_get(a->at, a->dx, x0 + i), dx, rel * big + 1.01 * ulp * fabs(dx)));
    }
}

TEST(norm_matches_fp64)
{
    for (size_t k = 0; k < SHAPES; k++)
        KT_EACH_ISA (c) {
            struct problem p;
            problem_open(&p, &shapes[k]);
            struct ops_rmsnorm *a = &p.a;
            run(&c, a, 0);
            double *dw = calloc(a->cols, sizeof *dw), *bdw = calloc(a->cols, sizeof *bdw);
            kt_worst = 0;
            for (uint64_t r = 0; r < a->rows; r++) check_row(&p, r, dw, bdw);
            for (uint64_t i = 0; i < a->cols; i++) {
                double want = (double)p.dw0[i] + dw[i];
                double rel = 0x1p-24 * (16 + (double)a->rows / 8);
                CHECK(kt_near((double)a->dw[i], want,
                              rel * (fabs((double)p.dw0[i]) + bdw[i]) + 1e-30));
            }
            /* the gaps between tokens stay as they were */
            for (uint64_t t = 0; t < shapes[k].tokens; t++)
                for (uint64_t i = a->group * a->cols; i < a->y_stride; i++)
                    CHECK(isnan(kt_get(a->at, a->y, t * a->y_stride + i)));
            printf("# rows %d cols %d %s: worst %.2f of the bound\n", (int)a->rows, (int)a->cols,
                   cpu_isa_name(c.isa), kt_worst);
            free(dw), free(bdw);
            problem_close(&p);
        }
}

TEST(norm_frozen_weight)
{
    struct problem p, q;
    problem_open(&p, &shapes[3]);
    problem_open(&q, &shapes[3]);
    struct host_ctx c = { 2, cpu_isa_best(), false };
    run(&c, &p.a, 0);
    float *dw = q.a.dw;
    q.a.dw = NULL;
    run(&c, &q.a, 0);
    CHECK(memcmp(p.a.dx, q.a.dx, p.xn * ops_dtype_bytes(p.a.at)) == 0);
    q.a.dw = dw;
    problem_close(&p), problem_close(&q);
}

/* `overwrite`: what lies in dw does not matter, not even NaN. */
TEST(norm_overwrite_is_adding_to_zeros)
{
    for (size_t k = 0; k < SHAPES; k++)
        KT_EACH_ISA (c) {
            struct problem add, write;
            problem_open(&add, &shapes[k]);
            problem_open(&write, &shapes[k]);
            memset(add.a.dw, 0, add.a.cols * sizeof(float));
            memset(write.a.dw, 0xff, add.a.cols * sizeof(float));
            write.a.overwrite = true;
            run(&c, &add.a, 0);
            run(&c, &write.a, 0);
            for (uint64_t i = 0; i < add.a.cols; i++) CHECK(add.a.dw[i] == write.a.dw[i]);
            problem_close(&add), problem_close(&write);
        }
}

TEST(norm_same_bits_for_threads_scratch_and_isa)
{
    for (size_t k = 0; k < SHAPES; k++) {
        struct problem p;
        problem_open(&p, &shapes[k]);
        struct host_ctx one = { 1, CPU_SCALAR, false };
        run(&one, &p.a, 0);
        const uint64_t size = ops_dtype_bytes(p.a.at);
        KT_EACH_ISA (c)
            for (c.threads = 1; c.threads <= 3; c.threads++) {
                struct problem q;
                problem_open(&q, &shapes[k]);
                run(&c, &q.a, 4 * c.threads);
                CHECK(memcmp(p.a.y, q.a.y, p.yn * size) == 0);
                CHECK(memcmp(p.a.rstd, q.a.rstd, p.a.rows * 4) == 0);
                CHECK(memcmp(p.a.dx, q.a.dx, p.xn * size) == 0);
                CHECK(memcmp(p.a.dw, q.a.dw, p.a.cols * 4) == 0);
                problem_close(&q);
            }
        problem_close(&p);
    }
}

static double objective(const struct ops_rmsnorm *a)
{
    double sum = 0;
    for (uint64_t r = 0; r < a->rows; r++) {
        double rstd = row_rstd(a, r);
        for (uint64_t i = 0; i < a->cols; i++)
            sum += kt_get(a->at, a->x, row_at(a, r, a->x_stride) + i) * rstd *
                   kt_get(a->pt, a->w, i) * kt_get(a->at, a->dy, row_at(a, r, a->y_stride) + i);
    }
    return sum;
}

TEST(norm_finite_differences)
{
    static const struct shape s = { 5, 2, 19, 3, 1, OPS_F32, OPS_BF16, false };
    struct problem p;
    problem_open(&p, &s);
    struct host_ctx c = { 2, cpu_isa_best(), false };
    run(&c, &p.a, 0);
    for (uint64_t r = 0; r < p.a.rows; r++)
        for (uint64_t i = 0; i < p.a.cols; i++) {
            uint64_t at = row_at(&p.a, r, p.a.x_stride) + i;
            float *x = (float *)(uintptr_t)p.a.x + at, old = *x;
            *x = old + 0x1p-9f;
            double up = objective(&p.a), up_x = (double)*x;
            *x = old - 0x1p-9f;
            double slope = (up - objective(&p.a)) / (up_x - (double)*x);
            *x = old;
            CHECK(kt_near((double)((float *)p.a.dx)[at], slope, 3e-5));
        }
    problem_close(&p);
}
