/* tests/offload/test_adam_far.c - the kernels beyond element 2^32 (tests/offload/far_world.h has
 * the trick).
 *
 * The best kernel in bf16 mode always; with STK_SOAK every SIMD kernel. */
#include "offload/adam.h"
#include "tests/offload/far_world.h"

struct step {
    const struct adam_kernel *k;
    struct adam_coef coef;
};

static void run_step(void *arg, uint8_t *const *arrays, uint64_t n, uint64_t times)
{
    const struct step *s = arg;
    struct adam_span span = { .n = n,
                              .param = arrays[FAR_PARAM],
                              .low_or_master = arrays[FAR_LOW],
                              .exp_avg = (float *)(void *)arrays[FAR_EXP_AVG],
                              .exp_avg_sq = (float *)(void *)arrays[FAR_EXP_AVG_SQ],
                              .grad = arrays[FAR_GRAD] };
    for (uint64_t t = 0; t < times; t++) adam_run(s->k, ADAM_BF16_SPLIT, &span, &s->coef);
}

TEST(adam_far_beyond_two_to_the_32)
{
    static struct far_world w;
    struct step s;
    struct adam_hyper h = { 1e-3, 0.9, 0.999, 1e-8, 0.01, ADAM_ADAMW };
    adam_coef_make(&h, 3, 1.0, &s.coef);
    if (adam_pick(NULL)->isa == CPU_SCALAR) SKIP("only the scalar kernel, which takes minutes");
    REQUIRE(far_open(&w, test_seed()));
    bool all = getenv("STK_SOAK") != NULL;
    for (s.k = adam_pick(NULL); s.k->isa != CPU_SCALAR; s.k++) {
        far_refill(&w);
        run_step(&s, w.at, FAR_N, 1);
        CHECK(far_differences(&w, run_step, &s) == 0);
        if (!all) break;
    }
    far_unmap(&w);
}

/* The check can fail: had the last elements' indices lost their upper half, it would be found. */
TEST(adam_far_canary)
{
    static struct far_world w;
    static uint8_t keep[FAR_ARRAYS][FAR_PERIOD * 4];
    struct step s = { .k = adam_pick(NULL) };
    struct adam_hyper h = { 1e-3, 0.9, 0.999, 1e-8, 0.01, ADAM_ADAMW };
    uint64_t rest = FAR_N % FAR_OWN, lost = FAR_N - (1ull << 32);
    adam_coef_make(&h, 3, 1.0, &s.coef);
    REQUIRE(far_open(&w, test_seed()));
    memcpy(keep, w.pattern, sizeof keep);
    uint8_t *pattern[FAR_ARRAYS];
    for (int a = 0; a < FAR_ARRAYS; a++) pattern[a] = w.pattern[a];
    for (int right = 0; right < 2; right++) {
        run_step(&s, pattern, FAR_PERIOD, FAR_TIMES - 1);
        far_refill(&w);
        memcpy(w.pattern, keep, sizeof keep);
        run_step(&s, w.at, right ? rest : lost, 1);
        uint64_t differ = far_differences(&w, run_step, &s);
        CHECK(right ? differ == 0 : differ > 0);
    }
    far_unmap(&w);
}

TEST_MAIN()
