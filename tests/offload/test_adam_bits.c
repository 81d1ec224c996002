/* tests/offload/test_adam_bits.c - every Adam variant gives the scalar reference's bits, and
 * touches nothing else.
 *
 * Whole buffers with sentinels around the span are compared, NaN patterns included. Includes
 * adam_ref.c to compare its software fma with the instruction. */
#include "offload/adam_ref.c"

#include "base/rng.h"
#include "tests/test.h"

#include <immintrin.h>

enum { N_MAX = 1024, GUARD = 40, SENTINEL = 0xa5 };
enum { PARAM, LOW, EXP_AVG, EXP_AVG_SQ, GRAD, OUT, BUFFERS };
enum input { ORDINARY, HEAVY, SUBNORMAL, EDGE, ZERO, HUGE_VALUES, ANY, INPUTS };

struct world { /* the buffers of one span; on whole cache lines from element 32 on */
    uint8_t buf[BUFFERS][(N_MAX + 2 * GUARD) * 4] __attribute__((aligned(64)));
};
static struct world before, expected, got;

static uint32_t width_of(int which, enum adam_layout layout)
{
    if (which == EXP_AVG || which == EXP_AVG_SQ || layout == ADAM_F32) return 4;
    return which == LOW && layout == ADAM_FP16 ? 4 : 2;
}

static float random_exponent(struct rng *r, uint32_t lowest, uint32_t highest)
{
    uint32_t exponent = lowest + (uint32_t)rng_below(r, highest - lowest + 1);
    return stk_bits_f32((uint32_t)(rng_next(r) & 0x807fffffu) | exponent << 23);
}

static float random_value(struct rng *r, enum input kind, double typical)
{
    switch (kind) {
    case ORDINARY: return (float)(rng_normal(r) * typical);
    case HEAVY: return (float)(rng_normal(r) * typical * exp(6.0 * rng_normal(r)));
    case SUBNORMAL: return random_exponent(r, 0, 1);
    case EDGE: return random_exponent(r, 0, 70);
    case ZERO: return rng_next(r) & 1 ? 0.0f : -0.0f;
    case HUGE_VALUES: return random_exponent(r, 180, 254);
    default: { /* any bits but a NaN */
        float x = random_exponent(r, 0, 255);
        return isnan(x) ? (float)INFINITY : x;
    }
    }
}

/* Kinds of input are mixed in one span now and then: lanes must not influence each other. */
static void fill(struct world *w, enum adam_layout layout, enum input kind, struct rng *r)
{
    memset(w, SENTINEL, sizeof *w);
    for (uint32_t i = 0; i < N_MAX + GUARD; i++) {
        enum input k = rng_below(r, 8) ? kind : (enum input)rng_below(r, INPUTS);
        float p = random_value(r, k, 0.02), m = random_value(r, k, 1e-3),
              v = random_value(r, k, 1e-3);
        float g = random_value(r, k, 1e-2);
        if (k != ANY) v = fabsf(v);
        if (!isfinite(g)) g = 1.0f; /* a non-finite gradient never gets here */
        store_f32(w->buf[EXP_AVG], i, m);
        store_f32(w->buf[EXP_AVG_SQ], i, v);
        if (layout == ADAM_F32) {
            store_f32(w->buf[PARAM], i, p);
            store_f32(w->buf[GRAD], i, g);
        } else if (layout == ADAM_FP16) {
            uint16_t h = (uint16_t)rng_next(r);
            if (k == ORDINARY || (h & 0x7c00) == 0x7c00) h = stk_f32_to_fp16((float)rng_normal(r));
            ((uint16_t *)w->buf[GRAD])[i] = h;
            store_f32(w->buf[LOW], i, p);
        } else {
            uint16_t b = stk_f32_to_bf16(g);
            ((uint16_t *)w->buf[GRAD])[i] = (b & 0x7f80) == 0x7f80 ? 0xff7f : b;
            stk_split(p, (uint16_t *)w->buf[PARAM] + i, (int16_t *)w->buf[LOW] + i);
        }
    }
}

static struct adam_span span_of(struct world *w, enum adam_layout layout, uint64_t begin,
                                uint64_t n, bool out)
{
    uint8_t *at[BUFFERS];
    for (int b = 0; b < BUFFERS; b++) at[b] = w->buf[b] + begin * width_of(b, layout);
    return (struct adam_span){ .n = n,
                               .param = at[PARAM],
                               .low_or_master = layout == ADAM_F32 ? NULL : at[LOW],
                               .exp_avg = (float *)(void *)at[EXP_AVG],
                               .exp_avg_sq = (float *)(void *)at[EXP_AVG_SQ],
                               .grad = at[GRAD],
                               .param_out = out ? at[OUT] : NULL };
}

static void random_coef(struct rng *r, enum adam_kind kind, struct adam_coef *c)
{
    static const double decays[] = { 0.0, 0.01, 0.1 };
    struct adam_hyper h = { .lr = pow(10.0, -1.0 - 5.0 * rng_uniform(r)),
                            .beta1 = 0.8 + 0.19 * rng_uniform(r),
                            .beta2 = 0.95 + 0.049 * rng_uniform(r),
                            .eps = rng_below(r, 4) ? 1e-8 : 0.0,
                            .weight_decay = decays[rng_below(r, 3)],
                            .kind = kind };
    adam_coef_make(&h, 1 + rng_below(r, 2000), rng_below(r, 2) ? 1.0 : rng_uniform(r), c);
}

/* Elements outside [begin, begin + n) of every buffer are as they were. */
static bool outside_untouched(const struct world *a, const struct world *b, enum adam_layout layout,
                              uint64_t begin, uint64_t n)
{
    for (int i = 0; i < BUFFERS; i++) {
        uint64_t w = width_of(i, layout), from = begin * w, to = (begin + n) * w;
        if (memcmp(a->buf[i], b->buf[i], from) != 0) return false;
        if (memcmp(a->buf[i] + to, b->buf[i] + to, sizeof a->buf[i] - to) != 0) return false;
    }
    return true;
}

static bool usable(const struct adam_kernel *k) { return k->isa <= cpu_isa_best(); }

static const struct adam_kernel *scalar_kernel(void) { return adam_pick("scalar"); }

/* Scalar first, then each other variant from the same bytes, a few steps in a row, however the
 * arrays are walked (streaming takes effect where begin is 32). */
static void compare_variants(enum adam_layout layout, uint64_t begin, uint64_t n, bool out,
                             int steps, const struct adam_coef *c)
{
    expected = before;
    struct adam_span s = span_of(&expected, layout, begin, n, out);
    for (int t = 0; t < steps; t++) adam_run(scalar_kernel(), layout, &s, c);
    CHECK(outside_untouched(&before, &expected, layout, begin, n));
    for (const struct adam_kernel *k = adam_kernels; k->name; k++) {
        if (!usable(k) || k->isa == CPU_SCALAR) continue;
        for (int way = 0; way < 2; way++) {
            got = before;
            s = span_of(&got, layout, begin, n, out);
            if (way) s.way = (struct adam_way){ .ahead_elems = (uint16_t)(1 + n), .stream = true };
            for (int t = 0; t < steps; t++) adam_run(k, layout, &s, c);
            if (memcmp(&got, &expected, sizeof got) == 0) continue;
            printf("# %s layout %d begin %" PRIu64 " n %" PRIu64 " out %d way %d\n", k->name,
                   (int)layout, begin, n, out, way);
            CHECK(!"the variant equals the scalar reference bit for bit");
        }
    }
}

static void compare_sizes(enum input kind)
{
    struct rng r;
    rng_seed_stream(&r, test_seed(), (uint64_t)kind);
    for (int layout = 0; layout < ADAM_LAYOUT_N; layout++)
        for (int l2 = 0; l2 < 2; l2++) {
            fill(&before, (enum adam_layout)layout, kind, &r);
            for (uint64_t n = 0; n <= 200; n++) {
                struct adam_coef c;
                random_coef(&r, l2 ? ADAM_L2 : ADAM_ADAMW, &c);
                uint64_t begin = n & 1 ? 32 : GUARD / 2 + rng_below(&r, 16);
                compare_variants((enum adam_layout)layout, begin, n, n % 3 == 0, 1 + (int)(n % 3),
                                 &c);
            }
        }
}

TEST(adam_bits_ordinary) { compare_sizes(ORDINARY); }
TEST(adam_bits_heavy_tails) { compare_sizes(HEAVY); }
TEST(adam_bits_subnormal) { compare_sizes(SUBNORMAL); }
TEST(adam_bits_edge_of_subnormal) { compare_sizes(EDGE); }
TEST(adam_bits_zero_of_both_signs) { compare_sizes(ZERO); }
TEST(adam_bits_huge) { compare_sizes(HUGE_VALUES); }
TEST(adam_bits_any_pattern) { compare_sizes(ANY); }

/* Cutting a tensor at any element, as shards and chunks do, changes no bit. */
TEST(adam_bits_spans_cut_anywhere)
{
    struct rng r;
    rng_seed_stream(&r, test_seed(), 100);
    for (int layout = 0; layout < ADAM_LAYOUT_N; layout++)
        for (int round = 0; round < 40; round++) {
            enum adam_layout l = (enum adam_layout)layout;
            struct adam_coef c;
            random_coef(&r, round % 2 ? ADAM_L2 : ADAM_ADAMW, &c);
            fill(&before, l, (enum input)rng_below(&r, INPUTS), &r);
            expected = before;
            struct adam_span s = span_of(&expected, l, GUARD, N_MAX - GUARD, false);
            adam_run(scalar_kernel(), l, &s, &c);
            for (const struct adam_kernel *k = adam_kernels; k->name; k++) {
                if (!usable(k)) continue;
                got = before;
                for (uint64_t at = GUARD, n; at < N_MAX; at += n) {
                    n = rng_below(&r, 120);
                    if (n > N_MAX - at) n = N_MAX - at;
                    s = span_of(&got, l, at, n, false);
                    adam_run(k, l, &s, &c);
                }
                CHECK(memcmp(&got, &expected, sizeof got) == 0);
            }
        }
}

/* The count is the product of all dimensions; every element changes, the one after the last does
 * not. */
TEST(adam_adm_04_every_element_of_any_shape)
{
    static const uint64_t shapes[][3] = { { 1, 1, 1 },   { 7, 1, 1 },  { 8, 1, 1 },  { 9, 1, 1 },
                                          { 31, 1, 1 },  { 33, 1, 1 }, { 2, 16, 1 }, { 3, 17, 1 },
                                          { 7, 33, 1 },  { 64, 8, 1 }, { 3, 5, 17 }, { 2, 3, 127 },
                                          { 4, 16, 15 }, { 2, 2, 255 } };
    struct adam_hyper h = {
        .lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .kind = ADAM_ADAMW
    };
    struct adam_coef c;
    adam_coef_make(&h, 1, 1.0, &c);
    for (const struct adam_kernel *k = adam_kernels; k->name; k++)
        for (size_t j = 0; j < sizeof shapes / sizeof shapes[0] && usable(k); j++)
            for (int layout = 0; layout < ADAM_LAYOUT_N; layout++) {
                enum adam_layout l = (enum adam_layout)layout;
                uint64_t n = shapes[j][0] * shapes[j][1] * shapes[j][2];
                memset(&before, 0, sizeof before);
                memset(before.buf[OUT], SENTINEL, sizeof before.buf[OUT]);
                for (uint64_t i = 0; i < N_MAX + GUARD; i++) {
                    if (l == ADAM_F32)
                        store_f32(before.buf[GRAD], i, 1.0f);
                    else
                        ((uint16_t *)before.buf[GRAD])[i] = l == ADAM_FP16 ? 0x3c00 : 0x3f80;
                }
                got = before;
                struct adam_span s = span_of(&got, l, GUARD / 2, n, false);
                adam_run(k, l, &s, &c);
                uint64_t changed = 0;
                for (uint64_t i = 0; i < n; i++)
                    changed += load_param(&s, i, l) < -0.05f && s.exp_avg[i] > 0.05f &&
                               s.exp_avg_sq[i] > 0.0005f;
                CHECK(changed == n);
                CHECK(outside_untouched(&before, &got, l, GUARD / 2, n));
            }
}

/* Subnormals really are flushed, and the caller's mode comes back. */
TEST(adam_subnormals_are_zero_and_the_mode_is_restored)
{
    struct adam_hyper h = {
        .lr = 0.1, .beta1 = 0.5, .beta2 = 0.5, .eps = 1e-8, .kind = ADAM_ADAMW
    };
    struct adam_coef c;
    adam_coef_make(&h, 1, 1.0, &c);
    for (const struct adam_kernel *k = adam_kernels; k->name; k++) {
        if (!usable(k)) continue;
        float p[17], m[17], v[17], g[17];
        for (int i = 0; i < 17; i++) {
            p[i] = i & 1 ? -1e-40f : 1e-40f;
            m[i] = 1.5e-38f; /* normal, half of it is not */
            v[i] = 1e-40f;
            g[i] = 0.0f;
        }
        struct adam_span s = { .n = 17, .param = p, .exp_avg = m, .exp_avg_sq = v, .grad = g };
        uint32_t mode = _mm_getcsr() & 0x8040u;
        adam_run(k, ADAM_F32, &s, &c);
        CHECK((_mm_getcsr() & 0x8040u) == mode);
        for (int i = 0; i < 17; i++) {
            CHECK((stk_f32_bits(p[i]) & 0x7fffffffu) == 0);
            CHECK((stk_f32_bits(m[i]) & 0x7fffffffu) == 0);
            CHECK((stk_f32_bits(v[i]) & 0x7fffffffu) == 0);
        }
    }
}

__attribute__((target("fma"))) static float fma_instruction(float a, float b, float c)
{
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}

/* The reference's fma against the instruction, under flush-to-zero: exponents near each other
 * (cancellation, ties) and at both ends of the range. */
TEST(adam_reference_fma_is_the_instruction)
{
    if (cpu_isa_best() < CPU_AVX2) SKIP("no fma instruction");
    struct rng r;
    rng_seed_stream(&r, test_seed(), 102);
    uint64_t differ = 0;
    uint32_t saved = cpu_ftz_enter();
    for (int i = 0; i < 3000000; i++) {
        uint32_t ea = (uint32_t)rng_below(&r, 255), eb = (uint32_t)rng_below(&r, 255);
        int near = (int)(ea + eb) - 127 + (int)rng_below(&r, 60) - 30;
        uint32_t ec = i % 4 == 0 ? (uint32_t)rng_below(&r, 256)
                                 : (uint32_t)(near < 0     ? 0
                                              : near > 255 ? 255
                                                           : near);
        float a = random_exponent(&r, ea, ea), b = random_exponent(&r, eb, eb),
              c = random_exponent(&r, ec, ec);
        if (i % 3 == 0) { /* few significant bits: exact ties are common */
            a = stk_bits_f32(stk_f32_bits(a) & 0xfff80000u);
            b = stk_bits_f32(stk_f32_bits(b) & 0xfffff000u);
            c = stk_bits_f32(stk_f32_bits(c) & 0xfffffff8u);
        } else if (
            i % 3 ==
            1) { /* the product is a tie of 25 bits and c, below double's last bit, decides it */
            a = stk_bits_f32((stk_f32_bits(a) & 0xfffff800u) | 0x800u);
            b = stk_bits_f32((stk_f32_bits(b) & 0xfffff000u) | 0x1000u);
            int far = (int)(ea + eb) - 127 - 52 - (int)rng_below(&r, 20);
            uint32_t exponent = far < 0 ? 0 : far > 254 ? 254 : (uint32_t)far;
            c = random_exponent(&r, exponent, exponent);
        }
        if (isnan(c)) continue;
        float x = adam_fma(a, b, c), y = fma_instruction(a, b, c);
        differ += stk_f32_bits(x) != stk_f32_bits(y);
    }
    cpu_ftz_leave(saved);
    CHECK(differ == 0);
}

TEST(adam_pick_follows_the_processor_and_the_limit)
{
    const char *old = getenv("STOKER_MAX_ISA");
    char *keep = old ? strdup(old) : NULL;
    REQUIRE(adam_pick(NULL) != NULL);
    CHECK(adam_pick(NULL)->isa == cpu_isa_best());
    CHECK(adam_pick("no such kernel") == NULL);
    setenv("STOKER_MAX_ISA", "scalar", 1);
    CHECK(strcmp(adam_pick(NULL)->name, "scalar") == 0);
    CHECK(adam_pick("avx2") == NULL && adam_pick("avx512") == NULL);
    setenv("STOKER_MAX_ISA", "avx2", 1);
    CHECK(adam_pick("avx512") == NULL);
    if (keep)
        setenv("STOKER_MAX_ISA", keep, 1);
    else
        unsetenv("STOKER_MAX_ISA");
    free(keep);
}

TEST_MAIN()
