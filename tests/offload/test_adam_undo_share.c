/* tests/offload/test_adam_undo_share.c - how many elements need the side list of
 * offload/adam_undo.h in training-like runs: printed as a table, and bounded where the design
 * promises it.
 *
 * A row of an embedding that is touched in few steps has cold moments and needs more. Gradients
 * are normal with a scale of their own for each element. */
#include "base/numeric.h"
#include "base/rng.h"
#include "offload/adam_undo.h"
#include "tests/test.h"

#include <math.h>

enum { N = 16384, LAST = 1000 };

struct run {
    const char *name;
    double lr, beta2, weight_decay, param_scale, touched; /* of the steps: with a gradient */
    double limit; /* of the share from step 100 on */
};

struct sim {
    uint16_t param[N], grad[N];
    int16_t low[N];
    float exp_avg[N], exp_avg_sq[N], scale[N];
    uint8_t code[N];
    struct adam_side side[N];
};
static struct sim sim;

static void sim_open(const struct run *run, struct rng *r)
{
    memset(&sim, 0, sizeof sim);
    for (uint32_t i = 0; i < N; i++) {
        stk_split((float)(rng_normal(r) * run->param_scale), &sim.param[i], &sim.low[i]);
        sim.scale[i] = (float)(1e-3 * exp(rng_normal(r)));
    }
}

static double sim_step(const struct run *run, uint64_t t, struct rng *r)
{
    for (uint32_t i = 0; i < N; i++) { /* rows of 64 elements */
        static bool touched;
        if (i % 64 == 0) touched = run->touched >= 1.0 || rng_uniform(r) < run->touched;
        sim.grad[i] = touched ? stk_f32_to_bf16((float)rng_normal(r) * sim.scale[i]) : 0;
    }
    struct adam_hyper h = { run->lr, 0.9, run->beta2, 1e-8, run->weight_decay, ADAM_ADAMW };
    struct adam_coef c;
    adam_coef_make(&h, t, 1.0, &c);
    struct adam_span s = { N, sim.param, sim.low, sim.exp_avg, sim.exp_avg_sq, sim.grad, NULL };
    struct adam_record rec = { .code = sim.code, .side = sim.side, .side_cap = N };
    CHECK(adam_step_recorded(adam_pick(NULL), ADAM_BF16_SPLIT, &s, &c, &rec));
    return (double)rec.side_n / N;
}

TEST(adam_undo_side_list_share)
{
    static const struct run runs[] = {
        { "fresh model, lr 1e-3", 1e-3, 0.999, 0.01, 0.02, 1.0, 0.02 },
        { "lr 3e-4, beta2 0.95", 3e-4, 0.95, 0.1, 0.02, 1.0, 0.02 },
        { "fine-tune, lr 1e-5", 1e-5, 0.999, 0.01, 0.02, 1.0, 0.02 },
        { "embedding, 1 in 10", 1e-3, 0.999, 0.01, 0.02, 0.1, 1.0 },
        { "embedding, 1 in 100", 1e-3, 0.999, 0.01, 0.02, 0.01, 1.0 },
    };
    static const uint64_t shown[] = { 1, 2, 3, 10, 30, 100, 300, 1000 };
    printf("# %% on the side list at step");
    for (size_t j = 0; j < sizeof shown / sizeof shown[0]; j++) printf(" %7" PRIu64, shown[j]);
    printf("   mean and max of 500..1000\n");
    for (size_t n = 0; n < sizeof runs / sizeof runs[0]; n++) {
        struct rng r;
        rng_seed_stream(&r, test_seed(), n);
        sim_open(&runs[n], &r);
        printf("# %-27s", runs[n].name);
        double worst = 0.0, sum = 0.0;
        for (uint64_t t = 1, next = 0; t <= LAST; t++) {
            double share = sim_step(&runs[n], t, &r);
            if (t == shown[next]) {
                printf(" %7.2f", 100.0 * share);
                next++;
            }
            if (t > LAST / 2) sum += share;
            if (t > LAST / 2 && share > worst) worst = share;
            if (t >= 100) CHECK(share <= runs[n].limit);
        }
        printf("  %7.3f %7.2f\n", 100.0 * sum / (LAST / 2), 100.0 * worst);
    }
}

TEST_MAIN()
