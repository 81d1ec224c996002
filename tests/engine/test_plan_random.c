/* tests/engine/test_plan_random.c - any input gives a plan that the checker accepts, in any arena
 * that plan_needs calls enough. */
#include "tests/engine/plan_models.h"

#define SEEDS 1500

static void fail_with(uint64_t seed, const struct stk_error *err, const char *what)
{
    printf("# model %" PRIu64 ": %s: %s\n", seed, what, err->text);
    test_fail(__FILE__, __LINE__, what);
}

static void build_and_check(const struct model *m, uint64_t seed, const char *what)
{
    struct stk_error err = { 0 };
    struct plan *p;
    if (plan_build(&m->in, &p, NULL, &err) != STK_OK) {
        fail_with(seed, &err, what);
        return;
    }
    if (plan_check(&m->in, p, &err) != STK_OK) {
        fail_with(seed, &err, what);
        if (getenv("PLAN_SHOW")) plan_print(p, stdout);
    }
    plan_free(p);
}

static void try_model(uint64_t seed)
{
    struct rng r;
    struct model m;
    struct stk_error err = { 0 };
    uint64_t least[PLAN_ARENA_N], useful[PLAN_ARENA_N];
    rng_seed_stream(&r, test_seed(), seed);
    random_model(&m, &r);
    build_and_check(&m, seed, "without limits");
    if (plan_needs(&m.in, least, useful, &err) != STK_OK) {
        fail_with(seed, &err, "needs");
        return;
    }
    for (int a = 0; a < PLAN_ARENA_N; a++) CHECK(least[a] <= useful[a] && least[a] % 4096 == 0);
    memcpy(m.in.arena_bytes, least, sizeof least);
    build_and_check(&m, seed, "at least");
    memcpy(m.in.arena_bytes, useful, sizeof useful);
    build_and_check(&m, seed, "at useful");
    for (int i = 0; i < 3; i++) { /* anything in between, page by page or not */
        random_arenas(&m, &r, least, useful);
        build_and_check(&m, seed, "in between");
    }
    memcpy(m.in.arena_bytes, least, sizeof least); /* one arena ample, the others least: placements
                                                      must not depend on each other */
    m.in.arena_bytes[rng_below(&r, PLAN_ARENA_N)] = UINT64_MAX;
    build_and_check(&m, seed, "one ample");
    model_free(&m);
}

TEST(plan_random_inputs_build_and_check)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) try_model(seed);
}

TEST(plan_below_least_is_refused_with_numbers)
{
    uint32_t refused = 0;
    for (uint64_t seed = 0; seed < 300; seed++) {
        struct rng r;
        struct model m;
        struct stk_error err = { 0 };
        struct plan *p = NULL;
        uint64_t least[PLAN_ARENA_N], useful[PLAN_ARENA_N];
        rng_seed_stream(&r, test_seed(), seed);
        random_model(&m, &r);
        CHECK_OK(plan_needs(&m.in, least, useful, &err), &err);
        for (int a = 0; a < PLAN_ARENA_N; a++) {
            enum plan_arena where = PLAN_ARENA_N;
            memcpy(m.in.arena_bytes, least, sizeof least);
            /* Own order: room for departures is in `least`. Micro-major: accumulators may fit after
             * all, then nothing is saved. */
            if (least[a] == 0 || m.in.own ||
                (a == PLAN_ARENA_SAVE && m.in.accumulate == PLAN_MICRO_MAJOR))
                continue;
            m.in.arena_bytes[a] = 0;
            stk_error_clear(&err);
            stk_status st = plan_build(&m.in, &p, &where, &err);
            if (st == STK_OK && a == PLAN_ARENA_GRAD) { /* every gradient stayed in its update slot */
                CHECK_OK(plan_check(&m.in, p, &err), &err);
                plan_free(p);
                continue;
            }
            CHECK(st == STK_ERR_NOMEM && where == (enum plan_arena)a && p == NULL);
            CHECK(strstr(err.text, plan_arena_name((enum plan_arena)a)) &&
                  strstr(err.text, "bytes") && strstr(err.text, "block"));
            refused++;
        }
        model_free(&m);
    }
    CHECK(refused > 300);
}

TEST(plan_same_input_same_plan)
{
    for (uint64_t seed = 0; seed < 100; seed++) {
        struct rng r;
        struct model m[2];
        char *text[2];
        for (int i = 0; i < 2; i++) {
            struct plan *p;
            struct stk_error err = { 0 };
            rng_seed_stream(&r, test_seed(), seed);
            random_model(&m[i], &r);
            CHECK_OK(plan_build(&m[i].in, &p, NULL, &err), &err);
            text[i] = plan_text(p);
            plan_free(p);
        }
        CHECK(strcmp(text[0], text[1]) == 0);
        for (int i = 0; i < 2; i++) {
            free(text[i]);
            model_free(&m[i]);
        }
    }
}

TEST_MAIN()
