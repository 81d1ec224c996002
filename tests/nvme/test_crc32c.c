/* tests/nvme/test_crc32c.c - CRC32C: the RFC's vectors, variants against the table, chaining. */
#include "tests/test.h"
#include "base/cpu.h"
#include "base/rng.h"
#include "nvme/crc32c.h"
#include "nvme/crc32c_impl.h"

static const struct crc32c_kernel *table_kernel(void)
{
    const struct crc32c_kernel *k = crc32c_kernels;
    while (strcmp(k->name, "table") != 0) k++;
    return k;
}

TEST(crc32c_rfc3720_vectors)
{
    uint8_t b[48] = { 0 };
    for (const struct crc32c_kernel *k = crc32c_kernels; k->name; k++) {
        if (!k->usable()) continue;
        memset(b, 0, 32);
        CHECK(k->fn(0, b, 32) == 0x8a9136aau);
        memset(b, 0xff, 32);
        CHECK(k->fn(0, b, 32) == 0x62a8ab43u);
        for (int i = 0; i < 32; i++) b[i] = (uint8_t)i;
        CHECK(k->fn(0, b, 32) == 0x46dd794eu);
        for (int i = 0; i < 32; i++) b[i] = (uint8_t)(31 - i);
        CHECK(k->fn(0, b, 32) == 0x113fdb5cu);
        CHECK(k->fn(0, "123456789", 9) == 0xe3069283u);
        CHECK(k->fn(77, b, 0) == 77);
    }
}

TEST(crc32c_variants_agree)
{
    enum { N = 200000 };
    uint8_t *b = malloc(N);
    struct rng r;
    rng_seed(&r, test_seed());
    for (int i = 0; i < N; i++) b[i] = (uint8_t)rng_next(&r);
    for (const struct crc32c_kernel *k = crc32c_kernels; k->name; k++) {
        if (!k->usable()) continue;
        for (int i = 0; i < 600; i++) {
            uint64_t n = i < 300 ? (uint64_t)i * 7 : rng_below(&r, N - 64), at = rng_below(&r, 64);
            uint32_t start = (uint32_t)rng_next(&r);
            CHECK(k->fn(start, b + at, n) == table_kernel()->fn(start, b + at, n));
        }
    }
    free(b);
}

static uint8_t *random_bytes(struct rng *r, uint64_t size_bytes)
{
    uint8_t *b = malloc(size_bytes);
    STK_ASSERT(b);
    for (uint64_t i = 0; i < size_bytes; i++) b[i] = (uint8_t)rng_next(r);
    return b;
}

/* Bit by bit, nothing but the definition: knows no table and no folding. */
static uint32_t crc_by_bits(uint32_t crc, const uint8_t *p, uint64_t n)
{
    crc = ~crc;
    for (uint64_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

TEST(crc32c_table_is_the_definition)
{
    struct rng r;
    rng_seed(&r, test_seed());
    uint8_t *b = random_bytes(&r, 4096);
    for (uint64_t n = 0; n <= 4096; n = n < 80 ? n + 1 : n * 2 - n / 2)
        CHECK(table_kernel()->fn((uint32_t)n * 77, b, n) == crc_by_bits((uint32_t)n * 77, b, n));
    free(b);
}

/* Every length up to 4096 at a few offsets, every offset up to 64 at lengths around a kernel's
 * borders. The bytes end where the buffer does, so a sanitizer sees a read past them. */
TEST(crc32c_lengths_and_offsets)
{
    enum { LENGTHS = 4096, OFFSETS = 64 };
    struct rng r;
    rng_seed(&r, test_seed());
    uint8_t *b = random_bytes(&r, LENGTHS + OFFSETS);
    for (const struct crc32c_kernel *k = crc32c_kernels; k->name; k++) {
        if (!k->usable()) continue;
        for (uint64_t n = 0; n <= LENGTHS; n++) {
            uint64_t at = n % (OFFSETS + 1), last = LENGTHS + OFFSETS - n;
            uint32_t start = (uint32_t)rng_next(&r);
            CHECK(k->fn(start, b + at, n) == table_kernel()->fn(start, b + at, n));
            CHECK(k->fn(start, b + last, n) == table_kernel()->fn(start, b + last, n));
        }
        for (uint64_t at = 0; at <= OFFSETS; at++)
            for (uint64_t n = 448; n <= 1152; n++)
                CHECK(k->fn(0, b + at, n) == table_kernel()->fn(0, b + at, n));
    }
    free(b);
}

TEST(crc32c_large_buffers)
{
    enum { N = 9 << 20 };
    struct rng r;
    rng_seed(&r, test_seed());
    uint8_t *b = random_bytes(&r, N);
    for (const struct crc32c_kernel *k = crc32c_kernels; k->name; k++) {
        if (!k->usable()) continue;
        for (int i = 0; i < 6; i++) {
            uint64_t n = i < 3 ? 1ull << (20 + i) : rng_below(&r, N - 64), at = rng_below(&r, 65);
            uint64_t cut = rng_below(&r, n);
            uint32_t whole = table_kernel()->fn((uint32_t)i, b + at, n);
            CHECK(k->fn((uint32_t)i, b + at, n) == whole);
            CHECK(k->fn(k->fn((uint32_t)i, b + at, cut), b + at + cut, n - cut) == whole);
        }
    }
    free(b);
}

/* Any bit of a buffer counts, wherever it lies: a fold that loses one would pass on zeros. */
TEST(crc32c_every_bit_counts)
{
    enum { N = 1600 };
    uint8_t b[N] = { 0 };
    for (const struct crc32c_kernel *k = crc32c_kernels; k->name; k++) {
        if (!k->usable()) continue;
        for (int bit = 0; bit < N * 8; bit += 1 + (bit > 80 * 8) * 6) {
            b[bit / 8] = (uint8_t)(1u << bit % 8);
            CHECK(k->fn(~0u, b, N) == table_kernel()->fn(~0u, b, N));
            b[bit / 8] = 0;
        }
    }
}

#if defined(__x86_64__)
/* x^n mod P, reflected: bit i is x^(31-i), a factor x moves towards bit 0 and P is taken off what
 * would be x^32. */
static uint32_t power_of_x(uint32_t n)
{
    uint32_t v = 0x80000000u;
    while (n-- > 0) v = v >> 1 ^ (v & 1 ? 0x82f63b78u : 0);
    return v;
}

TEST(crc32c_fold_constants)
{
    CHECK(power_of_x(0) == 0x80000000u && power_of_x(31) == 1 && power_of_x(32) == 0x82f63b78u);
    for (uint32_t i = 0; i < sizeof crc32c_folds / sizeof crc32c_folds[0]; i++) {
        const struct crc32c_fold *f = &crc32c_folds[i];
        CHECK(f->bits % 512 == 0 && f->bits > 0);
        CHECK(f->first == power_of_x(f->bits + 31));
        CHECK(f->second == power_of_x(f->bits - 33));
    }
}

TEST(crc32c_follows_the_processor)
{
    const char *const levels[] = { "scalar", "avx2", "avx512" };
    const char *old = getenv("STOKER_MAX_ISA");
    char *kept = old ? strdup(old) : NULL;
    for (int i = 0; i < 3; i++) {
        setenv("STOKER_MAX_ISA", levels[i], 1);
        CHECK((strcmp(crc32c_variant(), "avx512") == 0) == cpu_has_vpclmulqdq());
        CHECK(i == 2 || !cpu_has_vpclmulqdq());
        CHECK(crc32c(0, "123456789", 9) == 0xe3069283u);
    }
    if (kept) setenv("STOKER_MAX_ISA", kept, 1);
    else unsetenv("STOKER_MAX_ISA");
    free(kept);
}
#endif

TEST(crc32c_chains)
{
    uint8_t b[5000];
    struct rng r;
    rng_seed(&r, test_seed());
    for (size_t i = 0; i < sizeof b; i++) b[i] = (uint8_t)rng_next(&r);
    uint32_t whole = crc32c(0, b, sizeof b);
    for (uint64_t cut = 0; cut <= sizeof b; cut += 13)
        CHECK(crc32c(crc32c(0, b, cut), b + cut, sizeof b - cut) == whole);
    CHECK(strlen(crc32c_variant()) > 0);
}

/* Parts in any order, empty ones among them, and zeros that are nobody's part. */
TEST(crc32c_of_parts)
{
    static uint8_t b[20000];
    struct rng r;
    rng_seed(&r, test_seed());
    for (int round = 0; round < 200; round++) {
        uint64_t n = rng_next(&r) % sizeof b + 1, cut[7] = { 0, 0, 0, 0, 0, 0, n };
        for (uint64_t i = 0; i < n; i++) b[i] = (uint8_t)rng_next(&r);
        for (int k = 1; k < 6; k++)
            cut[k] = cut[k - 1] + rng_next(&r) % (n - cut[k - 1] + 1);
        int zeros = round % 2 ? (int)(rng_next(&r) % 6) : 6;
        uint32_t parts = 0;
        for (int k = 0; k < 6; k++) {
            int at = (k + round) % 6;
            uint64_t len = cut[at + 1] - cut[at];
            if (at == zeros) memset(b + cut[at], 0, len);
            else parts ^= crc32c_part(b + cut[at], len, n - cut[at + 1]);
        }
        CHECK(crc32c_whole(parts, n) == crc32c(0, b, n));
        b[rng_next(&r) % n] ^= (uint8_t)(1u << rng_next(&r) % 8);
        CHECK(crc32c_whole(parts, n) != crc32c(0, b, n));
    }
    CHECK(crc32c_whole(0, 0) == 0);
}

/* Distances that no test has memory for: a part that far from the end is as far as two times half. */
TEST(crc32c_of_far_parts)
{
    static const uint8_t word[] = "a part";
    static uint8_t far[1 << 20];
    uint32_t near = crc32c_part(word, sizeof word, 0);
    for (uint64_t bytes = 1; bytes < sizeof far - sizeof word; bytes = bytes * 3 + 1) {
        memcpy(far, word, sizeof word);
        CHECK(crc32c_part(far, sizeof word + bytes, 0) == crc32c_part(word, sizeof word, bytes));
        memset(far, 0, sizeof word);
    }
    /* x has the order 2^31 - 1, and 2^3 bits are a byte: so many bytes are none */
    CHECK(crc32c_part(word, sizeof word, (1ull << 31) - 1) == near);
    CHECK(crc32c_part(word, sizeof word, (1ull << 31) + 76) == crc32c_part(word, sizeof word, 77));
}

TEST_MAIN()
