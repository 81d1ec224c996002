/* tests/gpu/test_product.c - products on AMX tiles (host_gemm) against fp64, and the same bits for any
 * number of threads; rows of odd numbers, columns that end inside a panel, an inner dimension of
 * several passes; nothing outside C is written. And the deal of their items over threads. */
#include "tests/test.h"
#include "base/rng.h"
#include "gpu/host/kernels/deal.h"
#include "tests/gpu/kern_test.h"

#include <omp.h>

TEST_MAIN()

struct product_case { uint64_t m, n, k, gap; };
static const struct product_case cases[] = {
    { 1, 1, 32, 0 },     { 31, 33, 64, 3 },  { 32, 32, 32, 0 },    { 65, 17, 96, 1 },
    { 200, 130, 512, 0 }, { 48, 64, 1056, 0 }, { 600, 40, 2080, 5 }, { 17, 300, 1024, 2 },
};

static struct host_gemm gemm_of(const struct product_case *p, const void *a, const void *b, void *c,
                                enum ops_dtype ct, bool add)
{
    return (struct host_gemm){ p->m, p->n, p->k, p->k, p->n + p->gap, a, b, c, ct, add, false,
                               NULL, OPS_F32 };
}

static void check_product(const struct product_case *p, enum ops_dtype ct, bool add)
{
    struct host_ctx ctx = { .threads = 1, .isa = cpu_isa_best(), .bf16_products = true, .amx = true };
    const uint64_t ld = p->n + p->gap, c_bytes = p->m * ld * ops_dtype_bytes(ct);
    uint16_t *a = kt_random(OPS_BF16, p->m * p->k, 1), *b = kt_random(OPS_BF16, p->k * p->n, 1);
    void *packed = kt_alloc(host_layout_elems(HOST_GEMM_LAYOUT, p->k, p->n) * 2);
    void *first = kt_random(ct, p->m * ld, 1), *c[3];
    const struct host_pack pack = { p->k, p->n, p->n, OPS_BF16, OPS_BF16, false, HOST_GEMM_LAYOUT,
                                    b, packed };
    host_pack(&ctx, &pack);
    for (uint32_t t = 0; t < 3; t++) {
        ctx.threads = t + 1;
        c[t] = kt_copy(first, c_bytes);
        struct host_gemm g = gemm_of(p, a, packed, c[t], ct, add);
        host_gemm(&ctx, &g);
        CHECK(memcmp(c[t], c[0], c_bytes) == 0);
    }
    kt_worst = 0;
    for (uint64_t i = 0; i < p->m; i++)
        for (uint64_t j = 0; j < ld; j++) {
            double want = add ? kt_get(ct, first, i * ld + j) : 0, size = fabs(want);
            double got = kt_get(ct, c[0], i * ld + j);
            if (j >= p->n) {
                CHECK(got == kt_get(ct, first, i * ld + j));
                continue;
            }
            for (uint64_t k = 0; k < p->k; k++) {
                double x = kt_get(OPS_BF16, a, i * p->k + k) * kt_get(OPS_BF16, b, k * p->n + j);
                want += x;
                size += fabs(x);
            }
            double bound = size * 0x1p-24 * (double)(p->k / 2 + 4) + fabs(want) * kt_half_ulp(ct) * 1.01;
            CHECK(kt_near(got, want, bound));
        }
    for (uint32_t t = 0; t < 3; t++) free(c[t]);
    free(a);
    free(b);
    free(packed);
    free(first);
}

TEST(product_amx_against_fp64)
{
    if (!host_attention_amx_possible()) SKIP("no AMX on this processor");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kt_reseed(i);
        check_product(&cases[i], OPS_F32, false);
        check_product(&cases[i], OPS_F32, true);
        check_product(&cases[i], OPS_BF16, false);
    }
}

/* C as the transpose of B^T A^T, A^T packed: the same chains of sums, so the same bits, and nothing
 * else is written; with a base, by threads. */
static void check_turned(const struct product_case *p, enum ops_dtype ct, bool add, bool based)
{
    struct host_ctx ctx = { .threads = 2, .isa = cpu_isa_best(), .bf16_products = true, .amx = true };
    const uint64_t ld = p->n + p->gap, c_bytes = p->m * ld * ops_dtype_bytes(ct);
    uint16_t *a = kt_random(OPS_BF16, p->m * p->k, 1), *b = kt_random(OPS_BF16, p->n * p->k, 1);
    void *right = kt_alloc(host_layout_elems(HOST_GEMM_LAYOUT, p->k, p->n) * 2);
    void *left = kt_alloc(host_layout_elems(HOST_GEMM_LAYOUT, p->k, p->m) * 2);
    void *first = kt_random(ct, p->m * ld, 1), *x = kt_copy(first, c_bytes), *y = NULL;
    float *base = kt_random(OPS_F32, p->m * ld, 1);
    const struct host_pack pack_b = { p->k, p->n, p->k, OPS_BF16, OPS_BF16, true, HOST_GEMM_LAYOUT,
                                      b, right },
                           pack_a = { p->k, p->m, p->k, OPS_BF16, OPS_BF16, true, HOST_GEMM_LAYOUT,
                                      a, left };
    host_pack(&ctx, &pack_b);
    host_pack(&ctx, &pack_a);
    struct host_gemm g = gemm_of(p, a, right, x, ct, add);
    if (based) g.base = base;
    host_gemm(&ctx, &g);
    g.m = p->n, g.n = p->m, g.a = b, g.b = left, g.turned = true;
    for (ctx.threads = 1; ctx.threads <= 3; ctx.threads++) {
        y = kt_copy(first, c_bytes);
        g.c = y;
        host_gemm(&ctx, &g);
        CHECK(memcmp(x, y, c_bytes) == 0);
        free(y);
    }
    free(a), free(b), free(left), free(right), free(first), free(x), free(base);
}

TEST(product_amx_turned_same_bits)
{
    if (!host_attention_amx_possible()) SKIP("no AMX on this processor");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kt_reseed(300 + i);
        check_turned(&cases[i], OPS_F32, false, false);
        check_turned(&cases[i], OPS_F32, true, false);
        check_turned(&cases[i], OPS_F32, false, true);
        check_turned(&cases[i], OPS_BF16, false, false);
        check_turned(&cases[i], OPS_BF16, false, true);
    }
}

/* A base is added to the whole sum, once: as an addition after the product; of bf16, in place too. */
TEST(product_amx_onto_a_base)
{
    if (!host_attention_amx_possible()) SKIP("no AMX on this processor");
    struct host_ctx ctx = { .threads = 2, .isa = cpu_isa_best(), .bf16_products = true, .amx = true };
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        const struct product_case *p = &cases[n];
        const uint64_t ld = p->n + p->gap;
        kt_reseed(500 + n);
        uint16_t *a = kt_random(OPS_BF16, p->m * p->k, 1), *b = kt_random(OPS_BF16, p->k * p->n, 1);
        void *packed = kt_alloc(host_layout_elems(HOST_GEMM_LAYOUT, p->k, p->n) * 2);
        const struct host_pack pack = { p->k, p->n, p->n, OPS_BF16, OPS_BF16, false,
                                        HOST_GEMM_LAYOUT, b, packed };
        host_pack(&ctx, &pack);
        uint16_t *half = kt_random(OPS_BF16, p->m * ld, 1), *z = kt_copy(half, p->m * ld * 2);
        float *base = kt_random(OPS_F32, p->m * ld, 1), *x = kt_random(OPS_F32, p->m * ld, 1);
        float *y = kt_copy(x, p->m * ld * 4), *was = kt_copy(x, p->m * ld * 4);
        struct host_gemm alone = gemm_of(p, a, packed, x, OPS_F32, false),
                         onto = gemm_of(p, a, packed, y, OPS_F32, false);
        onto.base = base;
        host_gemm(&ctx, &alone);
        host_gemm(&ctx, &onto);
        struct host_gemm place = gemm_of(p, a, packed, z, OPS_BF16, false);
        place.base = z;
        place.base_t = OPS_BF16;
        host_gemm(&ctx, &place);
        for (uint64_t i = 0; i < p->m; i++)
            for (uint64_t j = 0; j < ld; j++) {
                const uint64_t at = i * ld + j;
                CHECK(j < p->n ? y[at] == x[at] + base[at] : y[at] == was[at]);
                if (j >= p->n) {
                    CHECK(z[at] == half[at]);
                    continue;
                }
                /* x is summed in passes, z in one: half a step of bf16, and that of the sums */
                const double want = (double)x[at] + kt_get(OPS_BF16, half, at);
                CHECK(kt_near(kt_get(OPS_BF16, z, at), want,
                              fabs(want) * kt_half_ulp(OPS_BF16) * 1.01 +
                                  (double)p->k * 0x1p-22));
            }
        free(a);
        free(b);
        free(packed);
        free(half);
        free(z);
        free(base);
        free(x);
        free(y);
        free(was);
    }
}

/* What the header says of `overwrite` in gpu/ops.h holds of products: 0 + AB is AB. */
TEST(product_amx_adds_to_zeros_as_it_writes)
{
    if (!host_attention_amx_possible()) SKIP("no AMX on this processor");
    const struct product_case p = { 70, 90, 1056, 0 };
    struct host_ctx ctx = { .threads = 2, .isa = cpu_isa_best(), .bf16_products = true, .amx = true };
    kt_reseed(99);
    uint16_t *a = kt_random(OPS_BF16, p.m * p.k, 1), *b = kt_random(OPS_BF16, p.k * p.n, 1);
    void *packed = kt_alloc(host_layout_elems(HOST_GEMM_LAYOUT, p.k, p.n) * 2);
    const struct host_pack pack = { p.k, p.n, p.n, OPS_BF16, OPS_BF16, false, HOST_GEMM_LAYOUT, b,
                                    packed };
    float *x = kt_alloc(p.m * p.n * 4), *y = kt_alloc(p.m * p.n * 4);
    host_pack(&ctx, &pack);
    memset(y, 0, p.m * p.n * 4);
    struct host_gemm write = gemm_of(&p, a, packed, x, OPS_F32, false),
                     add = gemm_of(&p, a, packed, y, OPS_F32, true);
    host_gemm(&ctx, &write);
    host_gemm(&ctx, &add);
    for (uint64_t i = 0; i < p.m * p.n; i++) CHECK(x[i] == y[i]);
    free(a);
    free(b);
    free(packed);
    free(x);
    free(y);
}

/* Each item once, whoever takes it; a thread's own ones first and in order. `idle` threads have lost
 * their core: they take nothing. */
static void deal_all(uint32_t threads, uint32_t idle, const uint64_t *items)
{
    static _Atomic uint32_t taken[8][2000];
    static struct deal d;
    uint32_t in_order = 1;
    memset(taken, 0, sizeof taken);
    deal_open(&d, threads);
    for (uint32_t i = 0; i < d.n; i++) deal_set(&d, i, items[i]);
#pragma omp parallel num_threads((int)threads) reduction(&& : in_order)
    {
        uint64_t self = (uint64_t)omp_get_thread_num(), share, item, next = 0;
        while (self >= idle && deal_take(&d, self, &share, &item)) {
            atomic_fetch_add(&taken[share][item], 1);
            if (share != self) continue;
            in_order = in_order && item == next;
            next++;
        }
    }
    CHECK(in_order);
    for (uint32_t i = 0; i < d.n; i++)
        for (uint64_t k = 0; k < 2000; k++) CHECK(atomic_load(&taken[i][k]) == (k < items[i]));
}

TEST(product_deal_gives_each_item_once)
{
    struct rng r;
    rng_seed(&r, test_seed());
    for (int round = 0; round < 60; round++) {
        const uint32_t threads = (uint32_t)(rng_next(&r) % 8 + 1);
        uint64_t items[8];
        for (uint32_t i = 0; i < threads; i++) items[i] = rng_next(&r) % (round % 3 ? 2000 : 4);
        deal_all(threads, round % 2 ? (uint32_t)(rng_next(&r) % threads) : 0, items);
    }
}
