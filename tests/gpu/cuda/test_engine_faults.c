/* tests/gpu/cuda/test_engine_faults.c - the n-th call of CUDA or cuBLASLt, or the n-th kernel, fails in a run with durable
 * steps: the error names the call, everything is closed and nothing is left, and the last durable step is there: who takes
 * it over ends with the bits of a run that nothing interrupted. STK_SOAK=1: every call; else some of them. */
#define TOY_TINY
#include "tests/gpu/cuda/engine_rig.h"
#include "tests/engine/durable_world.h"

TEST_MAIN()

enum { STEPS = 5 };
static const struct placing placing = { STK_TIER_AUTO, STK_TIER_AUTO, 3, STK_ACT_RECOMPUTE, STK_UPDATE_CHASE, 0, 1, false };
static uint64_t want[STEPS + 1], calls_all, kernels_all;

struct fate {
    stk_status st;
    uint64_t durable; /* newest step that was said to be */
    uint64_t hash;
    char text[640];
};

/* From the beginning, or from what is on the disk; to the end, or to the first error. */
static struct fate run(const struct io_sim_cfg *disk, uint64_t seed, bool adopt, bool hashes)
{
    struct toy t;
    struct fate f = { 0 };
    stk_step_stats s = { 0 };
    rig_toy(&t, &placing, seed, disk);
    durable_config(&t.cfg, NULL, adopt);
    f.st = toy_open(&t);
    if (f.st == STK_OK) f.st = adopt ? stk_resume_durable(t.e, false, NULL) : toy_fill(&t);
    if (f.st == STK_OK && adopt) {
        t.step = t.e->begun;
        f.durable = t.step;
        f.st = toy_hash(&t, &f.hash);
        CHECK(f.st == STK_OK && f.hash == want[t.step]);
    }
    while (f.st == STK_OK && t.step < STEPS) {
        f.st = toy_step(&t, 1e-3, &s);
        if (f.st == STK_OK) f.durable = s.durable_step > f.durable ? s.durable_step : f.durable;
        if (f.st == STK_OK) f.st = stk_durable(t.e, NULL);
        if (f.st == STK_OK && hashes) f.st = toy_hash(&t, &want[t.step]);
    }
    if (f.st == STK_OK) f.st = toy_hash(&t, &f.hash);
    snprintf(f.text, sizeof f.text, "%s", t.e ? stk_error_text(t.e) : "?");
    if (adopt && f.st == STK_OK) stk_discard_durable(t.e);
    stk_close(t.e);
    return f;
}

static uint64_t on_disk(const struct io_sim_cfg *disk)
{
    const char *const paths[] = { "disk" };
    struct store_found *found;
    struct stk_error err = { 0 };
    uint64_t step = 0;
    if (store_find(paths, 1, RUN_ID, disk->disk, &found, &err) == STK_OK) {
        step = found->step;
        store_found_free(found);
    }
    return step;
}

static bool named(const struct fate *f)
{
    const char *call = rig_seen.failed_call;
    return strstr(f->text, strcmp(call, "cudaLaunchKernelEx") ? call : "kernel launch") != NULL;
}

/* Busy times are measured as far as they can be, an algorithm's name is asked for the numerics key as far as it has one:
 * these may fail. So may what closes, when the last step is done. */
static bool may_pass(const char *call)
{
    return !strncmp(call, "cudaEvent", 9) || strstr(call, "GetAttribute") || strstr(call, "Destroy") || strstr(call, "Free");
}

struct tally { uint64_t runs, ended, passed, resumed, from_start; };

static void one(uint64_t call, uint64_t kernel, uint64_t seed, struct tally *y)
{
    struct io_sim_cfg disk = rig_disk(seed);
    rig_card_new(seed, true);
    rig_card.fail_at = call;
    rig_card.fail_kernel_at = kernel;
    struct fate f = run(&disk, seed, false, false);
    y->runs++;
    bool clean = rig_seen.left == 0 && rig_seen.found == 0;
    bool said = f.st == STK_OK ? (f.hash == want[STEPS] && (kernel == 0 && may_pass(rig_seen.failed_call)))
                               : kernel ? strstr(f.text, "cudaErrorLaunchFailure") != NULL : named(&f);
    if (!clean || !said)
        printf("# call %d, kernel %d (%s): %s: %s; left %d, found %d\n", (int)call, (int)kernel, rig_seen.failed_call,
               stk_status_name(f.st), f.text, (int)rig_seen.left, (int)rig_seen.found);
    CHECK(clean && said);
    if (f.st == STK_OK) y->passed++;
    else y->ended++;
    const uint64_t step = on_disk(&disk);
    CHECK(step >= f.durable);
    if (step > 0) {
        rig_card_new(seed + 1, true);
        struct fate g = run(&disk, seed + 1, true, false);
        if (g.st != STK_OK) printf("# taking over step %d: %s\n", (int)step, g.text);
        CHECK(g.st == STK_OK && g.hash == want[STEPS] && rig_seen.found == 0);
        y->resumed++;
    } else {
        y->from_start++;
    }
    io_sim_disk_free(disk.disk);
}

TEST(cuda_engine_reference)
{
    struct io_sim_cfg disk = rig_disk(test_seed());
    rig_card_new(test_seed(), true);
    struct fate f = run(&disk, test_seed(), false, true);
    if (f.st != STK_OK) printf("# %s\n", f.text);
    CHECK(f.st == STK_OK && f.hash == want[STEPS] && rig_seen.found == 0);
    io_sim_disk_free(disk.disk);
    disk = rig_disk(test_seed());
    rig_card_new(test_seed(), true);
    f = run(&disk, test_seed(), false, false);
    CHECK(f.st == STK_OK && f.hash == want[STEPS]);
    calls_all = rig_seen.counts.calls;
    kernels_all = rig_seen.counts.kernels + rig_seen.counts.products;
    io_sim_disk_free(disk.disk);
    printf("# %d calls, %d kernels and products\n", (int)calls_all, (int)kernels_all);
}

TEST(cuda_engine_each_call_fails_once)
{
    struct tally y = { 0 };
    const uint64_t by = getenv("STK_SOAK") ? 1 : calls_all / test_share(60) + 1;
    REQUIRE(calls_all > 0);
    for (uint64_t n = 1 + test_seed() % by; n <= calls_all; n += by) one(n, 0, test_seed(), &y);
    printf("# of %d calls, every %d. failed: %d runs ended by it, %d went on; %d taken over from a durable step, %d had none yet\n",
           (int)calls_all, (int)by, (int)y.ended, (int)y.passed, (int)y.resumed, (int)y.from_start);
    CHECK(y.ended > 0 && y.resumed > 0);
}

TEST(cuda_engine_each_kernel_fails_once)
{
    struct tally y = { 0 };
    const uint64_t by = getenv("STK_SOAK") ? 1 : kernels_all / test_share(24) + 1;
    REQUIRE(kernels_all > 0);
    for (uint64_t n = 1 + test_seed() % by; n <= kernels_all; n += by) one(0, n, test_seed(), &y);
    printf("# of %d kernels and products, every %d. failed: %d runs ended by it; %d taken over from a durable step\n",
           (int)kernels_all, (int)by, (int)y.ended, (int)y.resumed);
    CHECK(y.passed == 0 && y.resumed > 0);
}
