/* tests/gpu/cuda/test_kernels_head.c - the head's tile, sums of losses, and gradient casts against
 * the host.
 *
 * BOUNDS. Head: exponentials are within 4 units of fp32, their sum within 2^-20 of itself; a
 * gradient then within 2^-19 of itself and one unit of its type, a loss within 2^-19. Casts: the
 * bits of base/convert.h; the sum of squares within 2^-40 of itself. */
#include "tests/test.h"
#include "tests/gpu/cuda/cuda_test.h"
#include "base/convert.h"
#include "gpu/host/host_impl.h"

TEST_MAIN()

struct head_case {
    uint64_t rows, vocab, pad;
    enum ops_dtype at;
    bool in_place;
    double size;
};
static const struct head_case cases[] = {
    { 1, 1, 0, OPS_F32, false, 1 },    { 19, 131, 1, OPS_BF16, true, 7 },
    { 7, 11, 3, OPS_BF16, false, 20 }, { 5, 257, 0, OPS_F32, true, 5 },
    { 5, 4096, 0, OPS_BF16, true, 5 }, { 3, 10007, 1, OPS_BF16, true, 90 },
    { 4, 9001, 7, OPS_F32, false, 3 }, { 3, 12301, 0, OPS_BF16, false, 100 },
};

/* One row as gpu/host/head.c computes it: loss, and the gradient in fp32 before it is rounded. */
static double host_row(const float *logits, uint64_t vocab, int32_t target, double d_scale,
                       float *grad)
{
    const enum cpu_isa isa = cpu_isa_best();
    if (target < 0) {
        memset(grad, 0, vocab * sizeof *grad);
        return 0;
    }
    memcpy(grad, logits, vocab * sizeof *grad);
    const float max = host_row_max(isa, grad, vocab);
    const double sum = host_row_exp(isa, grad, vocab, max);
    const double own = ((double)grad[target] / sum - 1.0) * d_scale;
    host_row_scale(isa, grad, vocab, (float)(d_scale / sum));
    grad[target] = (float)own;
    return ((double)max + log(sum)) - (double)logits[target];
}

static void head_check(const struct head_case *s, const struct cuda_head_tile *a,
                       const float *logits, const int32_t *targets)
{
    float *grad = kt_alloc(s->vocab * 4);
    for (uint64_t r = 0; r < s->rows; r++) {
        const double loss =
            host_row(logits + r * a->logits_ld, s->vocab, targets[r], a->d_scale, grad);
        CHECK(kt_near(a->loss[r], loss, 0x1p-19 * (1 + fabs(loss))));
        for (uint64_t c = 0; a->dlogits && c < s->vocab; c++) {
            const double got = kt_get(s->at, a->dlogits, r * a->dlogits_ld + c),
                         want = (double)grad[c];
            const double own = c == (uint64_t)targets[r] ? a->d_scale : 0;
            CHECK(
                kt_near(got, want, 0x1p-19 * (fabs(want) + own) + ct_ulp(s->at, want) + 0x1p-110));
        }
    }
    free(grad);
}

TEST(head_tile_is_the_hosts)
{
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        const struct head_case *s = &cases[k];
        const uint64_t ld = s->vocab + s->pad, bytes = s->rows * ld * 4, w = ops_dtype_bytes(s->at);
        kt_reseed(k);
        float *logits = kt_random(OPS_F32, s->rows * ld, s->size);
        int32_t targets[32];
        for (uint64_t r = 0; r < s->rows; r++)
            targets[r] = r % 4 == 2 ? -1 : (int32_t)kt_below(s->vocab);
        targets[s->rows - 1] = (int32_t)s->vocab - 1;
        struct ct_keep keep[2] = { { 0 } };
        kt_worst = 0;
        for (int o = 0; o < CT_ORDERS; o++) {
            ct_order(o);
            struct cuda_head_tile a = {
                .rows = s->rows, .vocab = s->vocab, .logits_ld = ld, .at = s->at, .d_scale = 0.37
            };
            float *tile = ct_in(logits, bytes, 0, "logits");
            a.logits = tile;
            a.targets = ct_const(targets, s->rows * 4, 4, "targets");
            a.loss = ct_out(s->rows * 8, 0, "loss");
            CHECK(ct_ran(cuda_head_tile(NULL, &a)));
            if (o == 0) head_check(s, &a, logits, targets);
            a.dlogits_ld = s->in_place ? ld * 4 / w : ld;
            a.dlogits = s->in_place ? (void *)tile : ct_out(s->rows * ld * w, 0, "dlogits");
            CHECK(ct_ran(cuda_head_tile(NULL, &a)));
            if (o == 0) head_check(s, &a, logits, targets);
            CHECK(ct_again(&keep[0], o, a.loss, s->rows * 8));
            CHECK(ct_again(&keep[1], o, a.dlogits, s->in_place ? bytes : s->rows * ld * w));
            if (!s->in_place)
                CHECK(ct_filled(s->at, a.dlogits, (struct ct_rows){ s->rows, s->vocab, ld },
                                s->rows * ld));
            ct_free();
        }
        printf("# rows %d vocabulary %d: worst %.2f of the bound\n", (int)s->rows, (int)s->vocab,
               kt_worst);
        ct_keep_free(keep, 2);
        free(logits);
    }
}

TEST(head_tile_shows_nan_and_bad_targets)
{
    float logits[3][20];
    for (int i = 0; i < 60; i++) logits[i / 20][i % 20] = (float)(i % 7);
    logits[0][13] = NAN;
    const int32_t targets[3] = { 3, 20, 5 };
    struct cuda_head_tile a = {
        .rows = 3, .vocab = 20, .logits_ld = 20, .dlogits_ld = 20, .at = OPS_F32, .d_scale = 1
    };
    a.logits = ct_const(logits, sizeof logits, 0, "logits");
    a.targets = ct_const(targets, sizeof targets, 0, "targets");
    a.loss = ct_out(24, 0, "loss"), a.dlogits = ct_out(sizeof logits, 0, "dlogits");
    CHECK(ct_ran(cuda_head_tile(NULL, &a)));
    const float *d = a.dlogits;
    CHECK(isnan(a.loss[0]) && isnan(a.loss[1]) && isfinite(a.loss[2]));
    CHECK(isnan(d[13]) && d[20] == 0 && d[39] == 0 && isfinite(d[40]));
    ct_free();
}

TEST(sum_f64_goes_in_order)
{
    static const uint64_t counts[] = { 1, 17, 2048, 5003 };
    for (int k = 0; k < 4; k++) {
        const uint64_t n = counts[k];
        double *v = kt_alloc(n * 8), want = 0;
        kt_reseed(n);
        for (uint64_t i = 0; i < n; i++) want += v[i] = kt_uniform() * exp2(20 * kt_uniform());
        ct_order(1);
        double *sum = ct_out(8, 0, "sum");
        CHECK(ct_ran(cuda_sum_f64(NULL, ct_const(v, n * 8, 0, "values"), n, sum)));
        CHECK(*sum == want);
        ct_free();
        free(v);
    }
}

/* --- gradient casts --- */

/* Numbers of every size; around the smallest normal one, where products are flushed; NaN and
 * infinities if asked for. */
static float cast_value(uint64_t i, bool finite)
{
    static const uint32_t ends[] = { 0,           0x80000000u, 1,           0x807fffffu,
                                     0x00800000u, 0x00800001u, 0x00ffffffu, 0x01000001u,
                                     0x477fe000u, 0x477ff000u, 0x33000000u, 0x33000001u };
    static const uint32_t bad[] = { 0x7f800000u, 0xff800000u, 0x7fc00001u, 0xffa00000u };
    if (i % 13 == 5) return stk_bits_f32(ends[kt_below(sizeof ends / 4)]);
    if (!finite && i % 101 == 7) return stk_bits_f32(bad[kt_below(4)]);
    return (float)(kt_uniform() * exp2(i % 3 ? 30 * kt_uniform() - 10 : 15 * kt_uniform() - 126));
}

static void cast_compare(uint64_t n, enum ops_dtype gt, float scale, bool finite, uint64_t off)
{
    float *acc = kt_alloc(n * 4);
    uint16_t *want = kt_alloc(n * 2);
    struct convert_sum sum;
    struct ct_keep keep = { 0 };
    for (uint64_t i = 0; i < n; i++) acc[i] = cast_value(i, finite);
    if (gt == OPS_BF16) convert_grad_bf16(acc, want, n, scale, &sum);
    else convert_grad_fp16(acc, want, n, scale, &sum);
    for (int o = 0; o < CT_ORDERS; o++) {
        ct_order(o);
        struct ops_grad_cast a = { .n = n, .gt = gt, .scale = scale };
        a.acc = ct_const(acc, n * 4, 2 * off, "acc");
        a.out = ct_out(n * 2, off, "out");
        struct convert_sum *got = ct_out(sizeof *got, 0, "sum");
        const struct ops_scratch scratch = ct_scratch(cuda_grad_cast_scratch(n));
        CHECK(ct_ran(cuda_grad_cast(NULL, &a, got, &scratch)));
        CHECK(ct_same(gt, a.out, want, ct_row(n), "out"));
        CHECK(got->nonfinite == sum.nonfinite);
        CHECK(got->sum_sq == sum.sum_sq || kt_near(got->sum_sq, sum.sum_sq, 0x1p-40 * sum.sum_sq));
        CHECK(ct_again(&keep, o, got, sizeof *got));
        ct_free();
    }
    ct_keep_free(&keep, 1);
    free(acc), free(want);
}

TEST(grad_cast_has_the_bits_of_convert_h)
{
    static const uint64_t counts[] = { 1, 7, 2051, 9000, 20011 };
    static const float scales[] = { 1.0f, 0.9999999f, 65536.0f, 0x1p-3f };
    for (int k = 0; k < 5 * 4; k++) {
        kt_reseed((uint64_t)k);
        cast_compare(counts[k / 4], OPS_BF16, scales[k % 4], k % 3 != 0, k % 2 ? 2 : 0);
        cast_compare(counts[k / 4], OPS_FP16, scales[k % 4], k % 3 != 1, k % 2 ? 0 : 4);
    }
}
