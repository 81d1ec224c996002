/* tests/gpu/cuda/test_kernels_norm.c - RMS norm and column sums against the host, element by
 * element.
 *
 * BOUNDS. The host sums a row in 16 lanes, the device in a tree: results differ by the roundings of
 * both, at most (cols / 16 + 48) 2^-24 of the sum of magnitudes, and by one unit of the stored
 * type. */
#include "tests/test.h"
#include "tests/gpu/cuda/cuda_test.h"

TEST_MAIN()

struct norm_case {
    uint64_t tokens, group, cols, xpad, ypad;
    enum ops_dtype at, pt;
    bool x_wide, y_wide, dx_wide, add, frozen, overwrite;
    uint64_t off;
};
/* All widths of norm.cuh (to 128, 1024, 8192 columns, and beyond), every mix of types. */
static const struct norm_case cases[] = {
    { 1, 1, 1, 0, 0, OPS_F32, OPS_BF16, false, false, false, false, false, false, 0 },
    { 3, 1, 7, 0, 0, OPS_F32, OPS_FP16, false, false, false, true, false, false, 4 },
    { 37, 5, 20, 3, 9, OPS_BF16, OPS_BF16, false, false, true, false, false, true, 2 },
    { 131, 3, 128, 0, 0, OPS_BF16, OPS_BF16, false, true, false, true, false, false, 0 },
    { 67, 1, 257, 0, 0, OPS_BF16, OPS_FP16, true, false, true, true, false, false, 4 },
    { 19, 2, 1000, 8, 16, OPS_BF16, OPS_BF16, true, true, false, false, false, false, 0 },
    { 9, 1, 1031, 1, 0, OPS_BF16, OPS_BF16, true, true, true, true, true, false, 0 },
    { 5, 1, 4096, 0, 0, OPS_BF16, OPS_BF16, false, false, false, true, false, true, 0 },
    { 3, 1, 8200, 0, 3, OPS_BF16, OPS_BF16, false, true, true, true, false, false, 0 },
    { 53, 1, 65, 0, 0, OPS_BF16, OPS_BF16, true, false, false, true, false, false, 0 },
    { 6, 1, 9001, 0, 0, OPS_F32, OPS_FP16, false, false, false, false, false, false, 0 },
};
enum { CASES = sizeof cases / sizeof cases[0] };

struct problem {
    const struct norm_case *s;
    struct ops_rmsnorm h; /* the host's, with its results */
    enum ops_dtype xt, yt, dt;
    uint64_t xn, yn, xb, yb, db; /* elements; bytes of x, y, dx */
    struct ct_rows x, y;         /* where the elements of rows are: tokens of group * cols */
    void *dx0;
    float *dw0;
    double rel;
};

static void host_run(struct ops_rmsnorm *h)
{
    const struct host_ctx c = ct_host();
    for (int backward = 0; backward < 2; backward++) {
        const uint64_t bytes = host_rmsnorm_scratch(&c, h, backward);
        void *base = kt_alloc(bytes);
        h->scratch = (struct ops_scratch){ base, bytes };
        if (backward) host_rmsnorm_backward(&c, h);
        else host_rmsnorm_forward(&c, h);
        free(base);
    }
}

static void problem_open(struct problem *p, const struct norm_case *s)
{
    const uint64_t wide = s->group * s->cols;
    *p = (struct problem){ .s = s,
                           .xt = ops_wide(s->at, s->x_wide),
                           .yt = ops_wide(s->at, s->y_wide),
                           .dt = ops_wide(s->at, s->dx_wide) };
    struct ops_rmsnorm *h = &p->h;
    *h = (struct ops_rmsnorm){ .rows = s->tokens * s->group,
                               .cols = s->cols,
                               .group = s->group,
                               .x_stride = wide + s->xpad,
                               .y_stride = wide + s->ypad,
                               .at = s->at,
                               .pt = s->pt,
                               .x_wide = s->x_wide,
                               .y_wide = s->y_wide,
                               .dx_wide = s->dx_wide,
                               .eps = 1e-5,
                               .add = s->add,
                               .overwrite = s->overwrite };
    p->x = (struct ct_rows){ s->tokens, wide, h->x_stride };
    p->y = (struct ct_rows){ s->tokens, wide, h->y_stride };
    p->xn = s->tokens * h->x_stride, p->yn = s->tokens * h->y_stride;
    p->xb = p->xn * ops_dtype_bytes(p->xt), p->yb = p->yn * ops_dtype_bytes(p->yt);
    p->db = p->xn * ops_dtype_bytes(p->dt);
    p->rel = 0x1p-24 * ((double)s->cols / 16 + 48);
    kt_reseed(s->tokens * 131 + s->cols);
    h->x = kt_random(p->xt, p->xn, 3), h->w = kt_random(s->pt, s->cols, 2);
    h->dy = kt_random(p->yt, p->yn, 1);
    h->y = kt_alloc(p->yb), h->rstd = kt_alloc(h->rows * sizeof(float));
    p->dx0 = kt_random(p->dt, p->xn, 1), h->dx = kt_copy(p->dx0, p->db);
    p->dw0 = kt_random(OPS_F32, s->cols, 1);
    h->dw = s->frozen ? NULL : kt_copy(p->dw0, s->cols * sizeof(float));
    host_run(h);
}

static void problem_close(struct problem *p)
{
    const void *all[] = { p->h.x,  p->h.w,  p->h.dy, p->h.y, p->h.rstd,
                          p->h.dx, p->h.dw, p->dx0,  p->dw0 };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free((void *)(uintptr_t)all[i]);
}

/* The device's arguments: the host's with buffers of the device. */
static struct ops_rmsnorm device_args(const struct problem *p)
{
    const uint64_t off = p->s->off;
    struct ops_rmsnorm a = p->h;
    a.x = ct_const(p->h.x, p->xb, off, "x");
    a.w = ct_const(p->h.w, a.cols * 2, off, "w");
    a.dy = ct_const(p->h.dy, p->yb, 0, "dy");
    a.y = ct_out(p->yb, off, "y");
    a.rstd = ct_out(a.rows * 4, 0, "rstd");
    a.dx = a.add ? ct_in(p->dx0, p->db, 2 * off, "dx") : ct_out(p->db, 2 * off, "dx");
    if (a.dw) a.dw = a.overwrite ? ct_out(a.cols * 4, 4, "dw") : ct_in(p->dw0, a.cols * 4, 4, "dw");
    a.scratch = ct_scratch(cuda_rmsnorm_scratch(&a, true));
    return a;
}

/* Sums of magnitudes from the host's rows: those of dx at most; of dw by column. */
static double dx_size(const struct problem *p, double *dw)
{
    const struct ops_rmsnorm *h = &p->h;
    double most = 0;
    for (uint64_t r = 0; r < h->rows; r++) {
        const uint64_t x0 = r / h->group * h->x_stride + r % h->group * h->cols;
        const uint64_t y0 = r / h->group * h->y_stride + r % h->group * h->cols;
        const double rstd = (double)h->rstd[r];
        double mean = 0, n_most = 0, dn_most = 0;
        for (uint64_t i = 0; i < h->cols; i++) {
            const double n = fabs(kt_get(p->xt, h->x, x0 + i)) * rstd;
            const double dy = fabs(kt_get(p->yt, h->dy, y0 + i));
            const double dn = dy * fabs(kt_get(h->pt, h->w, i));
            mean += dn * n / (double)h->cols;
            n_most = fmax(n_most, n), dn_most = fmax(dn_most, dn);
            dw[i] += dy * n;
        }
        most = fmax(most, rstd * (dn_most + n_most * mean));
    }
    return most + (h->add ? ct_size(p->dt, p->dx0, p->x) : 0);
}

static void problem_check(const struct problem *p, const struct ops_rmsnorm *a)
{
    const struct ops_rmsnorm *h = &p->h;
    double *dw = calloc(h->cols, sizeof *dw);
    const double size = dx_size(p, dw), y_size = ct_size(p->yt, h->y, p->y);
    CHECK(
        ct_close(OPS_F32, a->rstd, h->rstd, ct_row(h->rows), (double)h->cols / 16 + 48, 0, "rstd"));
    CHECK(ct_close(p->yt, a->y, h->y, p->y, 1.01, p->rel * y_size, "y"));
    CHECK(ct_filled(p->yt, a->y, p->y, p->yn));
    CHECK(ct_close(p->dt, a->dx, h->dx, p->x, 1.01, p->rel * size, "dx"));
    if (!a->add) CHECK(ct_filled(p->dt, a->dx, p->x, p->xn));
    for (uint64_t i = 0; a->dw && i < h->cols; i++) {
        const double rel = 0x1p-24 * (16 + (double)h->rows / 4) + p->rel;
        CHECK(kt_near((double)a->dw[i], (double)h->dw[i], rel * (dw[i] + 1)));
    }
    free(dw);
}

TEST(norm_is_the_hosts)
{
    for (int k = 0; k < CASES; k++) {
        struct problem p;
        struct ct_keep keep[4] = { { 0 } };
        problem_open(&p, &cases[k]);
        kt_worst = 0;
        for (int o = 0; o < CT_ORDERS; o++) {
            ct_order(o);
            struct ops_rmsnorm a = device_args(&p);
            CHECK(ct_ran(cuda_rmsnorm_forward(NULL, &a)));
            CHECK(ct_again(&keep[0], o, a.y, p.yb) && ct_again(&keep[1], o, a.rstd, a.rows * 4));
            /* the host's, so that what follows is compared alone */
            memcpy(a.rstd, p.h.rstd, a.rows * 4);
            CHECK(ct_ran(cuda_rmsnorm_backward(NULL, &a)));
            CHECK(ct_again(&keep[2], o, a.dx, p.db));
            if (a.dw) CHECK(ct_again(&keep[3], o, a.dw, a.cols * 4));
            if (o == 0) problem_check(&p, &a);
            ct_free();
        }
        printf("# rows %d cols %d: worst %.2f of the bound\n", (int)p.h.rows, (int)p.h.cols,
               kt_worst);
        ct_keep_free(keep, 4);
        problem_close(&p);
    }
}

/* A start that takes no vectors, and rows that do not: the same bits. */
TEST(norm_bits_do_not_depend_on_the_address)
{
    struct problem p;
    struct ct_keep keep[3] = { { 0 } };
    struct norm_case s = cases[3];
    for (int o = 0; o < 3; o++) {
        s.off = (uint64_t)o * 4;
        problem_open(&p, &s);
        ct_order(0);
        struct ops_rmsnorm a = device_args(&p);
        CHECK(ct_ran(cuda_rmsnorm_forward(NULL, &a)) && ct_ran(cuda_rmsnorm_backward(NULL, &a)));
        CHECK(ct_again(&keep[0], o, a.y, p.yb) && ct_again(&keep[1], o, a.dx, p.db));
        CHECK(ct_again(&keep[2], o, a.dw, a.cols * 4));
        ct_free();
        problem_close(&p);
    }
    ct_keep_free(keep, 3);
}

/* --- sums over rows --- */

struct column_case {
    uint64_t rows, cols, ld;
    enum ops_dtype from;
    bool overwrite;
    uint64_t off;
};
static const struct column_case columns[] = {
    { 1, 1, 1, OPS_F32, true, 0 },        { 7, 13, 15, OPS_BF16, false, 2 },
    { 131, 257, 257, OPS_BF16, true, 0 }, { 67, 1024, 1032, OPS_F32, false, 0 },
    { 20011, 3, 3, OPS_FP16, false, 0 },
};

TEST(column_sum_is_the_sum_in_fp64)
{
    for (size_t k = 0; k < sizeof columns / sizeof columns[0]; k++) {
        const struct column_case *s = &columns[k];
        const uint64_t n = s->rows * s->ld, bytes = n * ops_dtype_bytes(s->from);
        kt_reseed(k);
        void *src = kt_random(s->from, n, 1);
        float *dst = kt_random(OPS_F32, s->cols, 1);
        struct ct_keep keep = { 0 };
        for (int o = 0; o < CT_ORDERS; o++) {
            ct_order(o);
            struct cuda_column_sum a = { .rows = s->rows,
                                         .cols = s->cols,
                                         .ld = s->ld,
                                         .from = s->from,
                                         .overwrite = s->overwrite };
            a.src = ct_const(src, bytes, s->off, "src");
            a.dst =
                s->overwrite ? ct_out(s->cols * 4, 4, "dst") : ct_in(dst, s->cols * 4, 4, "dst");
            a.scratch = ct_scratch(cuda_column_sum_scratch(&a));
            CHECK(ct_ran(cuda_column_sum(NULL, &a)));
            CHECK(ct_again(&keep, o, a.dst, s->cols * 4));
            for (uint64_t c = 0; o == 0 && c < s->cols; c++) {
                double want = s->overwrite ? 0 : (double)dst[c], size = fabs(want);
                for (uint64_t r = 0; r < s->rows; r++) {
                    const double x = kt_get(s->from, src, r * s->ld + c);
                    want += x, size += fabs(x);
                }
                CHECK(
                    kt_near((double)a.dst[c], want, 0x1p-24 * (16 + (double)s->rows / 64) * size));
            }
            ct_free();
        }
        ct_keep_free(&keep, 1);
        free(src), free(dst);
    }
}
