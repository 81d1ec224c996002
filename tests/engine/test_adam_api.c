/* tests/engine/test_adam_api.c - stk_adam_bf16 and stk_adam_f32 as a library user has them: any
 * size from one element up, any number of threads, the same bits, and beyond element 2^32. */
#include "engine/stoker.h"
#include "offload/adam.h"
#include "tests/offload/far_world.h"

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#ifndef UNDER_TSAN
#define UNDER_TSAN 0
#endif

enum { N_MAX = 200000 };

struct state {
    uint16_t param[N_MAX], grad[N_MAX];
    int16_t low[N_MAX];
    float exp_avg[N_MAX], exp_avg_sq[N_MAX];
};
static struct state before, expected, got;

static void fill(struct state *s)
{
    struct rng r;
    rng_seed(&r, test_seed());
    for (uint32_t i = 0; i < N_MAX; i++) {
        s->param[i] = (uint16_t)(0x3f80 + (rng_next(&r) & 0x803f));
        s->grad[i] = (uint16_t)(0x3d80 + (rng_next(&r) & 0x80ff));
        s->low[i] = (int16_t)rng_next(&r);
        s->exp_avg[i] = (float)(0.1 * rng_normal(&r));
        s->exp_avg_sq[i] = (float)(0.01 * rng_uniform(&r));
    }
}

static stk_status step_of(struct state *s, uint64_t n, uint32_t threads)
{
    return stk_adam_bf16(s->param, s->low, s->exp_avg, s->exp_avg_sq, s->grad, n, STK_ADAMW, 1e-3,
                         0.9, 0.999, 1e-8, 0.01, 1.0, 3, threads);
}

/* Sizes around a vector, a cache line, a thread's slice; what lies behind is left alone. */
TEST(adam_api_sizes_from_one_element_up)
{
    static const uint64_t sizes[] = { 0,   1,   2,    15,    16,    17,     31,     33,    63,
                                      64,  65,  1000, 65535, 65536, 65537, 131072, 131073, 199999 };
    struct adam_hyper h = { 1e-3, 0.9, 0.999, 1e-8, 0.01, ADAM_ADAMW };
    struct adam_coef c;
    adam_coef_make(&h, 3, 1.0, &c);
    fill(&before);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (uint32_t threads = 0; threads < 4; threads++) {
            expected = got = before;
            struct adam_span s = { .n = sizes[i], .param = expected.param,
                                   .low_or_master = expected.low, .exp_avg = expected.exp_avg,
                                   .exp_avg_sq = expected.exp_avg_sq, .grad = expected.grad };
            adam_run(adam_pick("scalar"), ADAM_BF16_SPLIT, &s, &c);
            CHECK(step_of(&got, sizes[i], threads) == STK_OK);
            CHECK(memcmp(&got, &expected, sizeof got) == 0);
        }
}

static void far_step(void *arg, uint8_t *const *arrays, uint64_t n, uint64_t times)
{
    (void)arg;
    for (uint64_t t = 0; t < times; t++)
        CHECK(stk_adam_bf16((uint16_t *)(void *)arrays[FAR_PARAM],
                            (int16_t *)(void *)arrays[FAR_LOW],
                            (float *)(void *)arrays[FAR_EXP_AVG],
                            (float *)(void *)arrays[FAR_EXP_AVG_SQ],
                            (const uint16_t *)(const void *)arrays[FAR_GRAD], n, STK_ADAMW, 1e-3,
                            0.9, 0.999, 1e-8, 0.01, 1.0, 3, 1) == STK_OK);
}

/* One thread: the pages of the array lie in it again and again, and two would meet on one. */
TEST(adam_api_beyond_two_to_the_32)
{
    static struct far_world w;
    if (UNDER_TSAN) SKIP("the sanitizer's shadow of such an array would need real memory");
    if (adam_pick(NULL)->isa == CPU_SCALAR) SKIP("only the scalar kernel, which takes minutes");
    REQUIRE(far_open(&w, test_seed()));
    far_step(NULL, w.at, FAR_N, 1);
    CHECK(far_differences(&w, far_step, NULL) == 0);
    far_unmap(&w);
}

TEST_MAIN()
