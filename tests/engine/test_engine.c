/* tests/engine/test_engine.c - the engine driven by a small real client (toy.h): steps, placements,
 * checkpoints, refusals. */
#include "tests/engine/toy.h"
#include "tests/test.h"
#include "base/sys.h"
#include "nvme/io_sim.h"
#include <unistd.h>

static char dir[64];
static const char *scratch_dir(void)
{
    if (!dir[0]) {
        snprintf(dir, sizeof dir, "/tmp/stoker-test-XXXXXX");
        if (!mkdtemp(dir)) abort();
    }
    return dir;
}

#define RUN(t, expr)                                                                               \
    do {                                                                                           \
        stk_status st_ = (expr);                                                                   \
        if (st_ != STK_OK) {                                                                       \
            printf("# %s: %s\n", stk_status_name(st_), (t)->e ? stk_error_text((t)->e) : "?");     \
            test_fail(__FILE__, __LINE__, #expr);                                                  \
            stk_close((t)->e);                                                                     \
            return;                                                                                \
        }                                                                                          \
    } while (0)

TEST(engine_loss_falls_in_place)
{
    struct toy t;
    toy_init(&t, 3, 2);
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    double first = 0;
    for (int i = 0; i < 60; i++) {
        stk_step_stats s;
        RUN(&t, toy_step(&t, 3e-3, &s));
        if (i == 0) first = t.last_loss;
        /* there is none to wait for: what no node explains is nobody's */
        if (i == 0) CHECK(s.exposed.update_ns == 0);
        CHECK(isfinite(s.grad_norm) && s.grad_norm > 0);
    }
    printf("# loss %.4f -> %.4f\n", first, t.last_loss);
    CHECK(t.last_loss < first - 0.5);
    stk_close(t.e);
}

TEST(engine_nvme_equals_host)
{
    uint64_t hash[2];
    for (int k = 0; k < 2; k++) {
        struct toy t;
        toy_init(&t, 3, 2);
        if (k) {
            t.cfg.nvme[0] = scratch_dir();
            t.cfg.params = t.cfg.optimizer_state = t.cfg.grads = STK_TIER_NVME;
            t.cfg.device = STK_DEVICE_HOST_DISCRETE;
        }
        RUN(&t, toy_open(&t));
        RUN(&t, toy_fill(&t));
        for (int i = 0; i < 5; i++) RUN(&t, toy_step(&t, 1e-3, NULL));
        RUN(&t, toy_hash(&t, &hash[k]));
        stk_close(t.e);
    }
    CHECK(hash[0] == hash[1]);
}

TEST_MAIN()
