/* tests/base/exec_world.h - what the tests of base/exec share: one of either kind, a lane, one body for both. */
#ifndef TESTS_BASE_EXEC_WORLD_H
#define TESTS_BASE_EXEC_WORLD_H

#include "base/exec_priv.h"
#include "tests/test.h"

static inline struct exec *open_kind(enum exec_kind kind, uint64_t seed)
{
    struct exec *ex = NULL;
    struct stk_error err = { 0 };
    stk_status s =
        kind == EXEC_THREADS ? exec_open_threads(&ex, &err) : exec_open_sim(seed, &ex, &err);
    STK_ASSERT(s == STK_OK);
    return ex;
}

static inline struct exec_lane *open_lane(struct exec *ex, const char *name)
{
    struct exec_lane *lane = NULL;
    STK_ASSERT(exec_lane_open(ex, name, &lane, NULL) == STK_OK);
    return lane;
}

#define BOTH(name_) \
    static void body_##name_(enum exec_kind kind); \
    TEST(exec_threads_##name_) { body_##name_(EXEC_THREADS); } \
    TEST(exec_sim_##name_) { body_##name_(EXEC_SIM); } \
    static void body_##name_(enum exec_kind kind)

#endif
