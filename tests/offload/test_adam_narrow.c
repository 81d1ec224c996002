/* tests/offload/test_adam_narrow.c - moments in bf16 and in 8 bits: the same bits in every variant, for
 * any cut; rounding without bias; the dynamic tree against its definition in double. */
#include "offload/adam_narrow.h"
#include "base/numeric.h"
#include "base/rng.h"
#include "tests/test.h"

#include <math.h>

enum { N = 4096, GUARD = 64 };

struct state { /* one chunk's; bytes behind its state must stay */
    uint16_t param[N], out[N], grad[N];
    uint8_t opt[12 * N + GUARD];
};
static struct state before, expected, got;

static struct stk_block block = { .name = (char *)"b" };
static struct stk_chunk chunk = { .n_elems = N };
static struct stk_layout layout = { .dtype = CHUNK_BF16, .n_blocks = 1, .blocks = &block };

static float any_float(struct rng *r, uint32_t lowest, uint32_t highest)
{
    uint32_t exponent = lowest + (uint32_t)rng_below(r, highest - lowest + 1);
    return stk_bits_f32((uint32_t)(rng_next(r) & 0x807fffffu) | exponent << 23);
}

static float value(struct rng *r, int kind, double typical)
{
    switch (kind) {
    case 0: return (float)(rng_normal(r) * typical);
    case 1: return (float)(rng_normal(r) * typical * exp(6.0 * rng_normal(r)));
    case 2: return any_float(r, 0, 3);
    case 3: return any_float(r, 200, 254);
    case 4: return rng_next(r) & 1 ? 0.0f : -0.0f;
    default: return any_float(r, 0, 254);
    }
}

static void fill(struct state *s, enum adam_layout l, enum chunk_moments kind, int values, struct rng *r)
{
    struct adam_moments m;
    float *tmp = malloc(N * sizeof *tmp);
    memset(s, 0xa5, sizeof *s);
    layout.dtype = l == ADAM_FP16 ? CHUNK_FP16 : CHUNK_BF16;
    block.moments = kind;
    chunk.first_elem = rng_below(r, 1u << 20) * 64;
    adam_moments_at(&layout, &chunk, s->opt, &m);
    for (int w = 0; w < 2; w++) {
        for (int i = 0; i < N; i++)
            tmp[i] = w ? fabsf(value(r, values, 1e-6)) : value(r, values, 1e-3);
        adam_moments_write(&m, w, 0, N, tmp);
    }
    for (int i = 0; i < N; i++) {
        float p = value(r, values, 0.02), g = value(r, values, 1e-2);
        s->grad[i] = l == ADAM_FP16 ? stk_f32_to_fp16((float)rng_normal(r)) : stk_f32_to_bf16(g);
        if (l == ADAM_BF16_SPLIT && (s->grad[i] & 0x7f80) == 0x7f80) s->grad[i] = 0xff7f;
        if (l == ADAM_FP16) memcpy(s->opt + 4 * i, &p, 4), s->param[i] = stk_f32_to_fp16(p);
        else stk_split(p, &s->param[i], (int16_t *)(void *)s->opt + i);
    }
    free(tmp);
}

/* Elements [from, to) as one call. */
static void run(struct state *s, const struct adam_kernel *k, enum adam_layout l, uint64_t from,
                uint64_t to, const struct adam_dither *d, const struct adam_coef *c, bool param_only)
{
    struct adam_moments m;
    adam_moments_at(&layout, &chunk, s->opt, &m);
    struct adam_span span = { .n = to - from,
                              .param = s->param + from,
                              .low_or_master = s->opt + (l == ADAM_FP16 ? 4 : 2) * from,
                              .grad = s->grad + from,
                              .param_out = param_only ? s->out + from : NULL };
    adam_narrow_run(k, l, &span, &m, from, d, c, param_only);
}

static void coefficients(struct adam_coef *c, int kind)
{
    struct adam_hyper h = { 1e-3, 0.9, 0.99, 1e-8, 0.01, kind ? ADAM_L2 : ADAM_ADAMW };
    adam_coef_make(&h, 3, 0.5, c);
}

/* Every variant, cut in any way at multiples of 64, equals the reference in one piece. */
TEST(narrow_variants_and_cuts_give_the_same_bits)
{
    struct rng r;
    rng_seed(&r, test_seed());
    const struct adam_kernel *scalar = adam_pick("scalar");
    uint32_t compared = 0;
    for (int round = 0; round < 96; round++) {
        enum chunk_moments kind = round % 2 ? CHUNK_MOMENTS_8BIT : CHUNK_MOMENTS_BF16;
        enum adam_layout l = round / 2 % 2 ? ADAM_FP16 : ADAM_BF16_SPLIT;
        struct adam_coef c;
        coefficients(&c, round / 4 % 2);
        fill(&before, l, kind, round / 8 % 6, &r);
        struct adam_dither d = { rng_next(&r), 7, 3, chunk.first_elem };
        expected = before;
        run(&expected, scalar, l, 0, N, &d, &c, false);
        for (const struct adam_kernel *k = adam_kernels; k->name; k++) {
            if (k->isa > cpu_isa_best()) continue;
            got = before;
            run(&got, k, l, 0, N, &d, &c, true);
            CHECK(memcmp(got.opt, before.opt, sizeof got.opt) == 0 &&
                  memcmp(got.param, before.param, sizeof got.param) == 0);
            CHECK(memcmp(got.out, expected.param, sizeof got.out) == 0);
            got = before;
            for (uint64_t at = 0, n; at < N; at += n) {
                n = 64 * (1 + rng_below(&r, 24));
                if (n > N - at) n = N - at;
                run(&got, k, l, at, at + n, &d, &c, false);
            }
            CHECK(memcmp(&got, &expected, sizeof got) == 0);
            compared++;
        }
    }
    printf("# %u comparisons\n", compared);
}

/* A span that ends inside a group: its padding holds zeros and keeps them. */
TEST(narrow_padding_stays_zero)
{
    for (int kind = CHUNK_MOMENTS_BF16; kind <= CHUNK_MOMENTS_8BIT; kind++) {
        struct rng r;
        struct adam_coef c;
        struct adam_moments m;
        float v[64];
        rng_seed(&r, test_seed());
        coefficients(&c, 0);
        fill(&before, ADAM_BF16_SPLIT, (enum chunk_moments)kind, 0, &r);
        adam_moments_at(&layout, &chunk, before.opt, &m);
        adam_moments_zero(&m, 130, 62);
        struct adam_dither d = { 1, 2, 3, chunk.first_elem };
        run(&before, adam_pick(NULL), ADAM_BF16_SPLIT, 128, 130, &d, &c, false);
        for (int w = 0; w < 2; w++) {
            adam_moments_read(&m, w, 128, 64, v);
            CHECK(v[0] != 0 && v[1] != 0);
            for (int i = 2; i < 64; i++) CHECK(v[i] == 0);
        }
    }
}

/* The mean of many roundings of one value is the value: within five standard deviations. The two
 * moments' roundings are not correlated, nor are neighbours' or steps'. */
TEST(narrow_bf16_rounding_has_no_bias)
{
    const struct adam_kernel *k = adam_pick(NULL);
    static float in[N];
    static uint16_t m[N], v[N];
    const float x = 1.0f + 0.3f / 128; /* 0.3 of the way to the next bf16 */
    double sum_m = 0, sum_v = 0, both = 0, next = 0, same = 0, n = 0;
    uint16_t before_m[N] = { 0 };
    for (int i = 0; i < N; i++) in[i] = x;
    for (uint64_t update = 1; update <= 64; update++) {
        struct adam_dither d = { test_seed(), update, 1, 0 };
        uint32_t key[2];
        adam_dither_key(&d, 0, key);
        k->narrow->round_bf16(in, in, N, 0, key, m, v);
        for (int i = 0; i < N; i++) {
            double a = (stk_bf16_to_f32(m[i]) - 1.0) * 128, b = (stk_bf16_to_f32(v[i]) - 1.0) * 128;
            CHECK((a == 0 || a == 1) && (b == 0 || b == 1));
            sum_m += a, sum_v += b, both += a * b, n++;
            if (i) next += a * ((stk_bf16_to_f32(m[i - 1]) - 1.0) * 128);
            same += a * before_m[i];
            before_m[i] = (uint16_t)a;
        }
    }
    double p = ((double)x - 1.0) * 128, sd = sqrt(p * (1 - p) / n), q = p * p,
           sd2 = sqrt(q * (1 - q) / n);
    printf("# p %.6f, means %.6f %.6f; products %.6f %.6f %.6f, expected %.6f; sd %.6f\n", p,
           sum_m / n, sum_v / n, both / n, next / n, same / n * 64 / 63, q, sd);
    CHECK(fabs(sum_m / n - p) < 5 * sd && fabs(sum_v / n - p) < 5 * sd);
    CHECK(fabs(both / n - q) < 5 * sd2 && fabs(next / n * 4096 / 4095 - q) < 6 * sd2 &&
          fabs(same / n * 64 / 63 - q) < 6 * sd2);
}

/* What has no rest is kept, infinities are never made of finite numbers, NaNs stay. */
TEST(narrow_bf16_ends_of_the_range)
{
    static const uint32_t bits[] = { 0, 0x80000000, 0x3f800000, 0x7f7fffff, 0xff7fffff,
                                     0x7f800000, 0xff800000, 0x7f800001, 0x00800000, 0x7f7f0000 };
    static const uint16_t low[] = { 0, 0x8000, 0x3f80, 0x7f7f, 0xff7f,
                                    0x7f80, 0xff80, 0x7fc0, 0x0080, 0x7f7f };
    for (const struct adam_kernel *k = adam_kernels; k->name; k++)
        for (uint32_t i = 0; k->isa <= cpu_isa_best() && i < sizeof low / sizeof *low; i++) {
            float in[64];
            uint16_t m[64], v[64];
            uint32_t key[2] = { i, 77 };
            for (int j = 0; j < 64; j++) in[j] = stk_bits_f32(bits[i]);
            k->narrow->round_bf16(in, in, 64, 0, key, m, v);
            for (int j = 0; j < 64; j++) CHECK(m[j] == low[i] && v[j] == low[i]);
        }
}

/* The paper's map, in double, as an ordered list. */
static int tree(bool sign, double *out)
{
    int n = 0;
    out[n++] = 0;
    for (int d = 0; d < 7; d++) {
        int parts = 1 << (d + !sign);
        for (int j = 0; j < parts; j++)
            out[n++] = pow(10, d - 6) * (0.1 + 0.9 * (j + 0.5) / parts);
    }
    out[n++] = 1;
    return n;
}

/* The value of the part that y > 0 lies in; no -1, no zero for squares. */
static double part_of(bool sign, bool negative, double y)
{
    double end = 1e-6, width;
    int d = 0;
    if (y >= 1 - 3e-6 && !negative) return 1;
    if (y < 0.275e-6 && sign) return 0; /* halfway to the first value */
    for (; d < 6 && y >= end; d++) end *= 10;
    int parts = 1 << (d + !sign), part = (int)floor((y / end - 0.1) / 0.9 * parts);
    if (part < 0) part = 0;
    if (part >= parts) part = parts - 1;
    width = 0.9 / parts;
    return end * (0.1 + width * (part + 0.5));
}

static void tree_decodes(const struct adam_kernel *k, bool sign)
{
    double map[256];
    int n = tree(sign, map), found = 0;
    CHECK(n == (sign ? 129 : 256));
    uint8_t code[256];
    float absmax[4] = { 1, 1, 1, 1 }, out[256];
    for (int i = 0; i < 256; i++) code[i] = (uint8_t)i;
    k->narrow->decode(code, absmax, 256, sign, out);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < 256; j++)
            if (fabs((double)out[j] - map[i]) <= map[i] * 1e-6) { found++; break; }
    CHECK(found == n);
    for (int j = 129; sign && j < 256; j++) CHECK(out[j] == -out[j - 128]);
}

/* All 256 codes decode to the map's values; each value of many is coded by the part it lies in, and so
 * without bias where values are even within a part. */
TEST(narrow_8bit_is_the_dynamic_tree_and_finds_the_part)
{
    struct rng r;
    for (const struct adam_kernel *k = adam_kernels; k->name; k++)
        for (int sign = 0; k->isa <= cpu_isa_best() && sign < 2; sign++) {
            rng_seed(&r, test_seed());
            tree_decodes(k, sign);
            uint8_t code[64];
            float absmax[1], in[64], out[64];
            double worst = 0, error = 0, sum = 0, largest = 1;
            for (int round = 0; round < 2000; round++) {
                largest = round % 2 ? 1 : exp2(-20.3 + 0.07 * (round % 500));
                in[0] = (float)largest;
                for (int i = 1; i < 64; i++) {
                    in[i] = (float)(largest * pow(10, -7.5 * rng_uniform(&r)));
                    if (round % 4 < 2) in[i] = (float)(largest * rng_uniform(&r));
                    if (sign && rng_below(&r, 2)) in[i] = -in[i];
                }
                k->narrow->encode(in, 64, sign, code, absmax);
                k->narrow->decode(code, absmax, 64, sign, out);
                CHECK(absmax[0] == in[0] && out[0] == in[0]);
                for (int i = 1; i < 64; i++) {
                    double y = fabs((double)in[i]) / largest, is = fabs((double)out[i]) / largest;
                    /* at a border, either side's; those of the uppermost decade lie 2e-6 low */
                    double near = y < 0.1 ? y * 2e-6 : 2.5e-6;
                    bool found = false;
                    for (int j = -1; j < 2; j++)
                        found |= fabs(is - part_of(sign, in[i] < 0, y + j * near)) <= is * 1.5e-6;
                    CHECK(found && (is == 0 || (in[i] < 0) == (out[i] < 0)));
                    if (y > 1e-5 && fabs(is - y) / y > worst) worst = fabs(is - y) / y;
                    if (round % 4 < 2) error += is - y, sum += y;
                }
            }
            printf("# %s %s: worst relative error above 1e-5 of the largest: %.3f; bias %.6f\n", k->name,
                   sign ? "signed" : "unsigned", worst, error / sum);
            CHECK(fabs(error / sum) < 2e-4);
        }
}

/* exp_avg has no -1: the largest, if negative, becomes the last part. Ends of the range of fp32. */
TEST(narrow_8bit_ends_of_the_range)
{
    static const float most[] = { 1, 0x1p-126f, 0x1.8p-126f, 0x1p126f, 3.4e38f };
    for (const struct adam_kernel *k = adam_kernels; k->name; k++)
        for (uint32_t i = 0; k->isa <= cpu_isa_best() && i < sizeof most / sizeof *most; i++) {
            float in[64] = { most[i], -most[i], most[i] / 2, 0.0f, -0.0f }, absmax;
            uint8_t code[64];
            uint32_t saved = adam_begin();
            k->narrow->encode(in, 64, true, code, &absmax);
            CHECK(absmax == most[i] && code[0] == 0x80 && code[1] == 0xff && code[3] == 0 && code[4] == 0);
            CHECK(i == 1 || i == 2 || code[2] == 64 + 28);
            in[1] = 0;
            k->narrow->encode(in, 64, false, code, &absmax);
            CHECK(absmax == most[i] && code[0] == 1 && code[1] == 0 && code[63] == 0);
            CHECK(i == 1 || i == 2 || code[2] == 128 + 56);
            adam_end(saved);
        }
}

/* What is read is what was written, if the format can hold it; zero state is zero bytes. */
TEST(narrow_write_read_and_zero)
{
    for (int kind = CHUNK_MOMENTS_F32; kind <= CHUNK_MOMENTS_8BIT; kind++) {
        static uint8_t opt[12 * N], again[12 * N], blank[12 * N];
        static float a[N], b[N];
        struct adam_moments m;
        block.moments = (enum chunk_moments)kind;
        layout.dtype = CHUNK_BF16;
        struct rng r;
        rng_seed(&r, test_seed());
        memset(opt, 0, sizeof opt);
        adam_moments_at(&layout, &chunk, opt, &m);
        CHECK((uint64_t)((uint8_t *)m.at[0] - opt) == 2 * N);
        for (int w = 0; w < 2; w++) {
            adam_moments_read(&m, w, 0, N, a);
            for (int i = 0; i < N; i++) CHECK(a[i] == 0);
            for (int i = 0; i < N; i++) a[i] = w ? fabsf((float)rng_normal(&r)) : (float)rng_normal(&r);
            adam_moments_write(&m, w, 0, N, a);
            adam_moments_read(&m, w, 0, N, b);
            memcpy(again, opt, sizeof opt);
            adam_moments_write(&m, w, 0, N, b); /* a fixed point, but where the largest is negative */
            CHECK((kind == CHUNK_MOMENTS_8BIT && w == 0) || memcmp(again, opt, sizeof opt) == 0);
            memcpy(opt, again, sizeof opt);
            adam_moments_read(&m, w, 77, 999, a);
            CHECK(memcmp(a, b + 77, 999 * sizeof *a) == 0);
            if (kind == CHUNK_MOMENTS_F32) continue;
            for (int i = 0; i < N; i++) CHECK(isfinite(b[i]));
        }
        for (int w = 0; w < 2 && m.absmax[w]; w++) /* moments that had left the range */
            m.absmax[w][3] = w ? INFINITY : NAN;
        adam_moments_zero(&m, 0, 200);
        adam_moments_zero(&m, 200, N - 200);
        CHECK(memcmp(opt, blank, sizeof opt) == 0);
        CHECK(chunk_bytes(&layout, &chunk, CHUNK_OPT) ==
              (kind == CHUNK_MOMENTS_F32 ? 10u : kind == CHUNK_MOMENTS_BF16 ? 6u : 4u) * N +
                  (kind == CHUNK_MOMENTS_8BIT ? N / 8 : 0));
    }
}

/* Beyond 2^32 elements of a block the place's upper half counts. */
TEST(narrow_places_beyond_32_bits)
{
    struct adam_dither d = { 5, 6, 7, 0 };
    uint32_t a[2], b[2], c[2];
    adam_dither_key(&d, 64, a);
    adam_dither_key(&d, 64 + (1ull << 32), b);
    d.update = 7;
    adam_dither_key(&d, 64, c);
    CHECK(memcmp(a, b, sizeof a) && memcmp(a, c, sizeof a) && memcmp(b, c, sizeof b));
}

/* Many steps of noise: bf16 moments follow the fp32 ones on average, 8-bit ones within the map's error. */
TEST(narrow_moments_follow_the_exact_ones)
{
    static struct state s[3];
    struct rng r;
    struct adam_coef c;
    static float v[3][N], m[3][N];
    struct adam_hyper h = { 1e-4, 0.9, 0.999, 1e-8, 0.0, ADAM_ADAMW };
    rng_seed(&r, test_seed());
    memset(s, 0, sizeof s);
    layout.dtype = CHUNK_BF16;
    chunk.first_elem = 0;
    for (uint64_t t = 1; t <= 400; t++) {
        adam_coef_make(&h, t, 1.0, &c);
        for (int i = 0; i < N; i++) {
            uint16_t g = stk_f32_to_bf16((float)(1e-3 * (0.3 + rng_normal(&r))));
            for (int k = 0; k < 3; k++) s[k].grad[i] = g;
        }
        struct adam_dither d = { 1, t, 0, 0 };
        for (int k = 0; k < 3; k++) {
            block.moments = (enum chunk_moments)k;
            run(&s[k], adam_pick(NULL), ADAM_BF16_SPLIT, 0, N, &d, &c, false);
        }
    }
    double sum[3] = { 0 }, sum_sq[3] = { 0 }, far = 0;
    for (int k = 0; k < 3; k++) {
        struct adam_moments at;
        block.moments = (enum chunk_moments)k;
        adam_moments_at(&layout, &chunk, s[k].opt, &at);
        adam_moments_read(&at, 0, 0, N, m[k]);
        adam_moments_read(&at, 1, 0, N, v[k]);
        for (int i = 0; i < N; i++) sum[k] += m[k][i], sum_sq[k] += v[k][i];
    }
    for (int i = 0; i < N; i++)
        if (fabs(v[1][i] / v[0][i] - 1.0) > far) far = fabs(v[1][i] / v[0][i] - 1.0);
    printf("# sums of exp_avg beside fp32: bf16 %.5f, 8bit %.5f; exp_avg_sq %.5f, %.5f; worst bf16 %.3f\n",
           sum[1] / sum[0], sum[2] / sum[0], sum_sq[1] / sum_sq[0], sum_sq[2] / sum_sq[0], far);
    CHECK(fabs(sum[1] / sum[0] - 1) < 2e-3 && fabs(sum_sq[1] / sum_sq[0] - 1) < 2e-3);
    CHECK(fabs(sum[2] / sum[0] - 1) < 2e-2 && fabs(sum_sq[2] / sum_sq[0] - 1) < 2e-2);
}

TEST_MAIN()
