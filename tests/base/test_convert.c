/* tests/base/test_convert.c - the conversions: exact where they must be, the same bits in every
 * variant, and a norm that is right over ten million elements. */
#include "base/convert_variants.h"
#include "base/numeric.h"
#include "base/rng.h"
#include "tests/test.h"

#include <math.h>

enum { N_MAX = 300, GUARD = 24 };

static bool usable(const struct convert_kernel *k) { return k->isa <= cpu_isa_best(); }

/* Any bits, NaNs and subnormals included, or (now and then) values of an ordinary size. */
static float any_float(struct rng *r)
{
    if (rng_next(r) & 1) return stk_bits_f32((uint32_t)rng_next(r));
    return (float)(rng_normal(r) * pow(10.0, (double)rng_below(r, 12) - 9.0));
}

struct buffers {
    float f[N_MAX + 2 * GUARD];
    uint16_t h[N_MAX + 2 * GUARD];
    int16_t low[N_MAX + 2 * GUARD];
    struct convert_sum sum;
};
static struct buffers input, expected, got;

enum { GRAD_BF16, GRAD_FP16, SPLIT, JOIN, FROM_BF16, FROM_FP16, TO_BF16, TO_FP16, OPERATIONS };

static void apply(const struct convert_kernel *k, int operation, struct buffers *b, uint64_t at,
                  uint64_t n, float scale)
{
    switch (operation) {
    case GRAD_BF16: k->grad_bf16(b->f + at, b->h + at, n, scale, &b->sum); break;
    case GRAD_FP16: k->grad_fp16(b->f + at, b->h + at, n, scale, &b->sum); break;
    case SPLIT: k->split(b->f + at, b->h + at, b->low + at, n); break;
    case JOIN: k->join(b->h + at, b->low + at, b->f + at, n); break;
    case FROM_BF16: k->bf16_to_f32(b->h + at, b->f + at, n); break;
    case FROM_FP16: k->fp16_to_f32(b->h + at, b->f + at, n); break;
    case TO_BF16: k->f32_to_bf16(b->f + at, b->h + at, n); break;
    default: k->f32_to_fp16(b->f + at, b->h + at, n); break;
    }
}

static void fill(struct buffers *b, struct rng *r, bool finite)
{
    memset(b, 0, sizeof *b);
    for (int i = 0; i < N_MAX + 2 * GUARD; i++) {
        do b->f[i] = any_float(r);
        while (finite && !(fabsf(b->f[i]) < 60000.0f));
        b->h[i] = (uint16_t)rng_next(r);
        b->low[i] = (int16_t)rng_next(r);
    }
}

/* Whole buffers are compared: what lies before and after the span is the same in both. */
TEST(convert_variants_are_bit_equal)
{
    const struct convert_kernel *scalar = convert_kernels;
    while (scalar->isa != CPU_SCALAR) scalar++;
    struct rng r;
    rng_seed(&r, test_seed());
    for (int operation = 0; operation < OPERATIONS; operation++)
        for (uint64_t n = 0; n <= 200; n++) {
            fill(&input, &r, n % 2);
            uint64_t at = rng_below(&r, GUARD);
            float scale = n % 3 ? 1.0f : 1024.0f;
            expected = input;
            uint32_t saved = cpu_ftz_enter();
            apply(scalar, operation, &expected, at, n, scale);
            for (const struct convert_kernel *k = convert_kernels; k->name; k++) {
                if (!usable(k)) continue;
                got = input;
                apply(k, operation, &got, at, n, scale);
                CHECK(memcmp(&got, &expected, sizeof got) == 0);
            }
            cpu_ftz_leave(saved);
            CHECK(at == 0 || memcmp(expected.h, input.h, at * 2) == 0);
            CHECK(memcmp(expected.h + at + n, input.h + at + n, 2) == 0);
            CHECK(memcmp(expected.f + at + n, input.f + at + n, 4) == 0);
        }
}

TEST(convert_every_16_bit_pattern_comes_back)
{
    static uint16_t all[65536], back[65536];
    static float wide[65536];
    for (uint32_t i = 0; i < 65536; i++) all[i] = (uint16_t)i;
    convert_bf16_to_f32(all, wide, 65536);
    convert_f32_to_bf16(wide, back, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
        bool nan = (i & 0x7fff) > 0x7f80;
        CHECK(stk_f32_bits(wide[i]) == i << 16);
        CHECK(back[i] == (nan ? (i | 0x40) : i));
    }
    convert_fp16_to_f32(all, wide, 65536);
    convert_f32_to_fp16(wide, back, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
        bool nan = (i & 0x7fff) > 0x7c00;
        CHECK(stk_f32_bits(wide[i]) == stk_f32_bits(stk_fp16_to_f32((uint16_t)i)));
        CHECK(back[i] == (nan ? (i | 0x200) : i));
    }
}

/* Exact for every fp32: all low halves under chosen high halves (zeros, subnormals, the last finite
 * ones, infinities, NaNs) and at random. */
TEST(convert_split_and_join_are_exact)
{
    static const uint32_t highs[] = { 0x0000, 0x8000, 0x0001, 0x007f, 0x0080, 0x3f80, 0xbf80,
                                      0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fff, 0xffff };
    static float master[65536], back[65536];
    static uint16_t param[65536];
    static int16_t low[65536];
    struct rng r;
    rng_seed(&r, test_seed());
    for (int j = 0; j < 20; j++) {
        for (uint32_t i = 0; i < 65536; i++) {
            uint32_t u = j < 13 ? highs[j] << 16 | i : (uint32_t)rng_next(&r);
            memcpy(&master[i], &u, 4);
        }
        convert_split(master, param, low, 65536);
        convert_join(param, low, back, 65536);
        CHECK(memcmp(master, back, sizeof master) == 0);
    }
}

/* The sum's definition, written out: lanes by i % 16, folded 8+8, 4+4, 2+2, 1+1. */
TEST(convert_grad_sum_has_its_order)
{
    static float acc[1000];
    static uint16_t out[1000];
    struct rng r;
    rng_seed(&r, test_seed());
    for (int fp16 = 0; fp16 < 2; fp16++)
        for (uint64_t n = 0; n <= 1000; n += 37) {
            double lane[16] = { 0 };
            struct convert_sum sum;
            for (uint64_t i = 0; i < n; i++)
                acc[i] = (float)(rng_normal(&r) * pow(10.0, (double)rng_below(&r, 6) - 3.0));
            (fp16 ? convert_grad_fp16 : convert_grad_bf16)(acc, out, n, fp16 ? 8.0f : 1.0f, &sum);
            for (uint64_t i = 0; i < n; i++) {
                CHECK(out[i] == (fp16 ? stk_f32_to_fp16(acc[i] * 8.0f) : stk_f32_to_bf16(acc[i])));
                double x = fp16 ? stk_fp16_to_f32(out[i]) : stk_bf16_to_f32(out[i]);
                lane[i % 16] += x * x;
            }
            for (int half = 8; half; half /= 2)
                for (int j = 0; j < half; j++) lane[j] = lane[j] + lane[j + half];
            CHECK(sum.sum_sq == lane[0] && sum.nonfinite == 0);
        }
}

/* One bad element anywhere is counted and the sum is infinite, so a norm made of it cannot look
 * healthy. A finite value that rounds to infinity counts too. */
TEST(convert_mpx_02_nonfinite_is_counted)
{
    static const float bad[] = { INFINITY, -INFINITY, NAN, 3.4e38f };
    static float acc[77];
    static uint16_t out[77];
    for (int j = 0; j < 4; j++)
        for (int at = 0; at < 77; at++) {
            struct convert_sum sum;
            for (int i = 0; i < 77; i++) acc[i] = 1.0f;
            acc[at] = bad[j];
            acc[(at + 5) % 77] = bad[(j + 1) % 4];
            convert_grad_bf16(acc, out, 77, 1.0f, &sum);
            CHECK(sum.nonfinite == 2 && isinf(sum.sum_sq) && sum.sum_sq > 0.0);
            convert_grad_fp16(acc, out, 77, 1.0f, &sum);
            CHECK(sum.nonfinite == 2 && isinf(sum.sum_sq) && sum.sum_sq > 0.0);
        }
}

/* 2 billion elements of 1e-3 and 1e3, scaled to 1e7; the exact sum is a count times the square of
 * the rounded value. */
TEST(convert_mpx_13_norm_of_ten_million)
{
    const uint64_t n = 10000000;
    float *acc = malloc(n * sizeof *acc);
    uint16_t *out = malloc(n * sizeof *out);
    REQUIRE(acc && out);
    static const float values[][2] = { { 1e-3f, 1e-3f }, { 1e3f, 1e3f }, { 1e-3f, 1e3f } };
    for (int j = 0; j < 3; j++) {
        struct convert_sum sum;
        for (uint64_t i = 0; i < n; i++) acc[i] = values[j][i % 2];
        convert_grad_bf16(acc, out, n, 1.0f, &sum);
        double a = stk_bf16_to_f32(stk_f32_to_bf16(values[j][0])),
               b = stk_bf16_to_f32(stk_f32_to_bf16(values[j][1]));
        double exact = (double)n / 2 * (a * a) + (double)n / 2 * (b * b);
        CHECK(fabs(sqrt(sum.sum_sq) - sqrt(exact)) <= 1e-9 * sqrt(exact));
        CHECK(fabs(sqrt(sum.sum_sq / ((double)n / 2 *
                                      ((double)values[j][0] * values[j][0] +
                                       (double)values[j][1] * values[j][1]))) -
                   1.0) < 4e-3);
    }
    free(acc);
    free(out);
}

TEST_MAIN()
