/* tests/nvme/test_crc32c.c - CRC32C: the RFC's vectors, variants against the table, chaining. */
#include "tests/test.h"
#include "base/rng.h"
#include "nvme/crc32c.h"

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

TEST_MAIN()
