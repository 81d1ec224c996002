/* tests/base/test_numeric.c - 16-bit formats, the split of the master, random numbers. */
#include "base/numeric.h"
#include "base/rng.h"
#include "tests/test.h"

#include <math.h>

static bool split_is_exact(uint32_t bits)
{
    uint16_t param;
    int16_t low;
    stk_split(stk_bits_f32(bits), &param, &low);
    return stk_f32_bits(stk_join(param, low)) == bits
           && ((uint32_t)param << 16) + (uint32_t)(int32_t)low == bits;
}

TEST(numeric_split_join_exact)
{
    static const uint16_t highs[] = { 0x0000, 0x0001, 0x007f, 0x0080, 0x3f7f, 0x3f80, 0x3fff,
                                      0x4000, 0x7f00, 0x7f7f, 0x7f80, 0x7f81, 0x7fbf, 0x7fc0,
                                      0x7fff, 0x8000, 0x8001, 0x807f, 0x8080, 0xbf80, 0xff7f,
                                      0xff80, 0xff81, 0xffc0, 0xffff };
    uint32_t bad = 0;
    for (size_t h = 0; h < sizeof highs / sizeof highs[0]; h++)
        for (uint32_t low = 0; low < 65536; low++)
            bad += !split_is_exact(((uint32_t)highs[h] << 16) | low);
    /* a stride that is coprime to 2^32 visits the rest of the space evenly */
    for (uint32_t i = 0, bits = 0; i < 4000000; i++, bits += 2654435761u)
        bad += !split_is_exact(bits);
    CHECK(bad == 0);
}

TEST(numeric_split_rounds_ties_away)
{
    uint16_t p;
    int16_t low;
    stk_split(stk_bits_f32(0x3f808000u), &p, &low);
    CHECK(p == 0x3f81 && low == -32768);
    stk_split(stk_bits_f32(0xbf808000u), &p, &low);
    CHECK(p == 0xbf81 && low == -32768);
    stk_split(stk_bits_f32(0x3f807fffu), &p, &low);
    CHECK(p == 0x3f80 && low == 32767);
}

TEST(numeric_bf16_nearest_even)
{
    CHECK(stk_f32_to_bf16(1.0f) == 0x3f80);
    CHECK(stk_f32_to_bf16(stk_bits_f32(0x3f808000u)) == 0x3f80); /* tie to even, below */
    CHECK(stk_f32_to_bf16(stk_bits_f32(0x3f818000u)) == 0x3f82); /* tie to even, above */
    CHECK(stk_f32_to_bf16(stk_bits_f32(0x3f808001u)) == 0x3f81);
    CHECK(stk_f32_to_bf16(stk_bits_f32(0x7f7fffffu)) == 0x7f80); /* overflow */
    CHECK(stk_f32_to_bf16(stk_bits_f32(0x7f800001u)) == 0x7fc0); /* NaN stays NaN */
    CHECK(stk_f32_to_bf16(stk_bits_f32(0xffffffffu)) == 0xffff);
    for (uint32_t b = 0; b < 65536; b++) {
        float x = stk_bf16_to_f32((uint16_t)b);
        if (!isnan(x)) CHECK(stk_f32_to_bf16(x) == b);
    }
}

/* What an fp16 means, in double arithmetic. */
static double fp16_value(uint16_t h)
{
    int exponent = (h >> 10) & 31, fraction = h & 1023;
    double m = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return h & 0x8000 ? -m : m;
}

TEST(numeric_fp16_every_value)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float x = stk_fp16_to_f32((uint16_t)h);
        if (((h >> 10) & 31) == 31) {
            CHECK((h & 1023) ? isnan(x) : isinf(x) && !signbit(x) == !(h >> 15));
            uint16_t back = stk_f32_to_fp16(x);
            CHECK(back == ((h & 1023) ? (h | 0x200) : h));
        } else {
            CHECK((double)x == fp16_value((uint16_t)h));
            CHECK(stk_f32_to_fp16(x) == h);
        }
    }
}

/* Between each two neighbours: the middle goes to the even one, one ulp of fp32 off it to the
 * nearer one. */
TEST(numeric_fp16_nearest_even)
{
    for (uint32_t sign = 0; sign < 2; sign++)
        for (uint32_t h = 0; h < 0x7c00; h++) {
            double a = fp16_value((uint16_t)h),
                   b = h == 0x7bff ? 65536.0 : fp16_value((uint16_t)(h + 1));
            float middle = (float)((a + b) / 2);
            uint32_t even = h & 1 ? h + 1 : h, flip = sign << 15;
            float s = sign ? -1.0f : 1.0f;
            CHECK(stk_f32_to_fp16(s * middle) == (even | flip));
            CHECK(stk_f32_to_fp16(s * nextafterf(middle, 0.0f)) == (h | flip));
            CHECK(stk_f32_to_fp16(s * nextafterf(middle, INFINITY)) == ((h + 1) | flip));
        }
    CHECK(stk_f32_to_fp16(65519.996f) == 0x7bff);
    CHECK(stk_f32_to_fp16(65520.0f) == 0x7c00);
    CHECK(stk_f32_to_fp16(-1e30f) == 0xfc00);
    CHECK(stk_f32_to_fp16(1e-30f) == 0 && stk_f32_to_fp16(-1e-40f) == 0x8000);
}

/* --- random numbers --------------------------------------------------------------------------- */

TEST(rng_reference_values)
{
    /* splitmix64 of seed 0, and xoshiro256** of the state {1, 2, 3, 4}: the values other
     * implementations publish */
    struct rng r;
    rng_seed(&r, 0);
    CHECK(r.s[0] == 0xe220a8397b1dcdafu && r.s[1] == 0x6e789e6aa1b965f4u);
    r = (struct rng){ { 1, 2, 3, 4 } };
    CHECK(rng_next(&r) == 11520u);
    CHECK(rng_next(&r) == 0u);
    CHECK(rng_next(&r) == 1509978240u);
    CHECK(rng_next(&r) == 1215971899390074240u);
}

TEST(rng_same_seed_same_numbers_streams_differ)
{
    struct rng a, b, c;
    rng_seed_stream(&a, 7, 1);
    rng_seed_stream(&b, 7, 1);
    rng_seed_stream(&c, 7, 2);
    uint32_t equal = 0;
    for (int i = 0; i < 1000; i++) {
        uint64_t x = rng_next(&a);
        CHECK(x == rng_next(&b));
        equal += x == rng_next(&c);
    }
    CHECK(equal == 0);
    rng_seed_stream(&a, 1, 2);
    rng_seed_stream(&b, 2, 1);
    CHECK(rng_next(&a) != rng_next(&b));
}

TEST(rng_below_is_uniform)
{
    struct rng r;
    rng_seed(&r, test_seed());
    uint32_t count[7] = { 0 };
    for (int i = 0; i < 70000; i++) {
        uint64_t x = rng_below(&r, 7);
        REQUIRE(x < 7);
        count[x]++;
    }
    for (int i = 0; i < 7; i++)
        CHECK(count[i] > 9500 && count[i] < 10500); /* 5 standard deviations */
    for (int i = 0; i < 100; i++) CHECK(rng_below(&r, 1) == 0);
    /* n just above 2^63: a modulo would give the lower half twice as often */
    uint32_t lower = 0;
    for (int i = 0; i < 10000; i++) lower += rng_below(&r, 3ull << 62) < (1ull << 62);
    CHECK(lower > 3000 && lower < 3667);
}

TEST(rng_normal_moments)
{
    struct rng r;
    rng_seed(&r, test_seed());
    double sum = 0, squares = 0;
    int n = 200000;
    for (int i = 0; i < n; i++) {
        double x = rng_normal(&r), u = rng_uniform(&r);
        REQUIRE(isfinite(x) && u >= 0 && u < 1);
        sum += x;
        squares += x * x;
    }
    CHECK(fabs(sum / n) < 0.012);
    CHECK(fabs(squares / n - 1) < 0.016);
}

TEST(rng_shuffle_is_a_permutation)
{
    struct rng r;
    rng_seed(&r, test_seed());
    uint32_t v[100], seen[100] = { 0 }, moved = 0;
    for (uint32_t i = 0; i < 100; i++) v[i] = i;
    rng_shuffle_u32(&r, v, 100);
    for (uint32_t i = 0; i < 100; i++) {
        REQUIRE(v[i] < 100);
        seen[v[i]]++;
        moved += v[i] != i;
    }
    for (uint32_t i = 0; i < 100; i++) CHECK(seen[i] == 1);
    CHECK(moved > 50);
    rng_shuffle_u32(&r, v, 0);
    rng_shuffle_u32(&r, v, 1);
}

TEST_MAIN()
