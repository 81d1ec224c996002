/* tests/engine/test_memory.c - memory: the table against the process, steady over steps and saves,
 * budgets, NVMe tiers that really save memory.
 *
 * A client of some tens of MiB whose visits only touch what they are given: 6 blocks of 1.5 M
 * parameters. */
#include "base/mem.h"
#include "tests/engine/world.h"
#include <fcntl.h>

enum { BIG_BLOCKS = 6, BIG_ELEMS = 1500000, BIG_ACT = 1 << 20 };
#define MIB (1024.0 * 1024.0)

#define NEEDS_PLAIN_MEMORY()                                                                       \
    if (TEST_SANITIZED) SKIP("a sanitizer has its own use of memory")

struct big { stk_config cfg; stk_engine *e; uint32_t tensor[BIG_BLOCKS]; bool frozen; };

static void big_init(struct big *b, stk_tier params, stk_tier opt, stk_tier grads)
{
    *b = (struct big){ 0 };
    stk_config_init(&b->cfg, sizeof b->cfg);
    b->cfg.compute_threads = b->cfg.update_threads = 1;
    b->cfg.matmul = STK_MATMUL_F32;
    b->cfg.prefetch = 1;
    b->cfg.params = params;
    b->cfg.optimizer_state = opt;
    b->cfg.grads = grads;
    b->cfg.activations = STK_ACT_RECOMPUTE;
    b->cfg.chunk_elems = 65536 * 2;
    b->cfg.nvme[0] = world_dir("nvme");
}

static stk_status big_describe(struct big *b)
{
    stk_place places[BIG_BLOCKS];
    STK_TRY(stk_open(&b->cfg, &b->e));
    for (uint32_t i = 0; i < BIG_BLOCKS; i++) {
        char name[16];
        snprintf(name, sizeof name, "block.%u", i);
        stk_tensor_desc d = { .name = name, .n_elems = BIG_ELEMS, .frozen = b->frozen };
        uint32_t block;
        STK_TRY(stk_block(b->e, name, &d, 1, &block, &b->tensor[i]));
        places[i] = (stk_place){
            .block = block, .in_bytes = i ? BIG_ACT : 0, .full_bytes = BIG_ACT, .flops = 1
        };
    }
    STK_TRY(stk_workspace(b->e, 1 << 20));
    return stk_order(b->e, places, BIG_BLOCKS);
}

static stk_status big_fill(struct big *b)
{
    static float v[65536];
    for (uint32_t k = 0; k < 65536; k++) v[k] = (float)k * 1e-6f;
    for (uint32_t i = 0; i < BIG_BLOCKS; i++)
        for (uint64_t at = 0; at < BIG_ELEMS; at += 65536) {
            uint64_t n = BIG_ELEMS - at < 65536 ? BIG_ELEMS - at : 65536;
            STK_TRY(stk_tensor_write(b->e, b->tensor[i], at, n, v, STK_F32));
        }
    return STK_OK;
}

static stk_status big_visits(struct big *b)
{
    struct stk_error err = { 0 };
    stk_visit v;
    stk_status st;
    while ((st = stk_next(b->e, &v)) == STK_OK) {
        if (v.out) STK_TRY(dev_zero(v.stream, v.out, BIG_ACT, &err));
        if (v.full) STK_TRY(dev_zero(v.stream, v.full, BIG_ACT, &err));
        if (v.dir == STK_BACKWARD && v.flow) STK_TRY(dev_zero(v.stream, v.flow, BIG_ACT, &err));
        STK_TRY(dev_zero(v.stream, v.workspace, v.workspace_bytes, &err));
        STK_TRY(stk_done(b->e, &v));
    }
    return st == STK_END ? STK_OK : st;
}

static stk_status big_step(struct big *b)
{
    stk_step s = { 1e-3 };
    STK_TRY(stk_step_begin(b->e, &s));
    STK_TRY(big_visits(b));
    return stk_step_end(b->e, NULL);
}

static stk_status big_open(struct big *b)
{
    STK_TRY(big_describe(b));
    STK_TRY(stk_seal(b->e, false));
    return big_fill(b);
}

static void reset_peak(void)
{
    int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    (void)!write(fd, "5", 1);
    close(fd);
}

/* The rows of host memory (a discrete host device's too) without what was there before. */
static uint64_t planned(const stk_engine *e)
{
    return world_table(e, "host", NULL) + world_table(e, "device", NULL) -
           world_table(e, "host", "program and libraries");
}

/* --- the table -------------------------------------------------------------------------------- */

static void table_agrees(stk_tier params, stk_tier opt, stk_tier grads, stk_device_kind device,
                         stk_act act)
{
    struct big b;
    big_init(&b, params, opt, grads);
    b.cfg.device = device;
    b.cfg.activations = act;
    RUN(&b, big_describe(&b));
    reset_peak();
    uint64_t before = mem_resident_bytes();
    RUN(&b, stk_seal(b.e, false));
    RUN(&b, big_fill(&b));
    for (int i = 0; i < 3; i++) RUN(&b, big_step(&b));
    double grew = (double)(mem_peak_bytes() - before), want = (double)planned(b.e);
    printf(
        "# params %d opt %d grads %d device %d: table %.1f MiB, peak grew by %.1f MiB (%+.2f %%)\n",
        params, opt, grads, device, want / MIB, grew / MIB, 100 * (grew - want) / want);
    CHECK(fabs(grew - want) < 0.03 * want + 2 * MIB); /* stacks of threads, the plan, libraries'
                                                       * own */
    stk_close(b.e);
}

TEST(mem_13_the_table_agrees_with_the_process)
{
    NEEDS_PLAIN_MEMORY();
    table_agrees(STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, STK_DEVICE_HOST, STK_ACT_RECOMPUTE);
    table_agrees(STK_TIER_HOST, STK_TIER_NVME, STK_TIER_HOST, STK_DEVICE_HOST, STK_ACT_RECOMPUTE);
    table_agrees(STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST, STK_ACT_RECOMPUTE);
    table_agrees(STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST_DISCRETE,
                 STK_ACT_RECOMPUTE);
    table_agrees(STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, STK_DEVICE_HOST, STK_ACT_NVME);
    table_agrees(STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST_DISCRETE, STK_ACT_NVME);
}

TEST(mem_13_a_dry_seal_shows_the_same_table)
{
    struct big a, b;
    const char *t0, *o0, *t1, *o1;
    uint64_t n0, n1;
    big_init(&a, STK_TIER_NVME, STK_TIER_NVME, STK_TIER_HOST);
    big_init(&b, STK_TIER_NVME, STK_TIER_NVME, STK_TIER_HOST);
    RUN(&a, big_describe(&a));
    uint64_t before = mem_resident_bytes();
    RUN(&a, stk_seal(a.e, true));
    CHECK(mem_resident_bytes() - before < 4 << 20); /* nothing large was reserved */
    RUN(&b, big_describe(&b));
    RUN(&b, stk_seal(b.e, false));
    uint32_t i = 0;
    for (; stk_table(b.e, i, &t1, &o1, &n1); i++) {
        CHECK(stk_table(a.e, i, &t0, &o0, &n0) && !strcmp(t0, t1) && !strcmp(o0, o1));
        CHECK(n0 == n1 || !strcmp(o1, "program and libraries"));
    }
    CHECK(i > 5 && !stk_table(a.e, i, &t0, &o0, &n0));
    stk_close(a.e);
    stk_close(b.e);
}

TEST(mem_25_the_optimizer_on_nvme_leaves_host_memory)
{
    struct big a, b;
    big_init(&a, STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST);
    big_init(&b, STK_TIER_HOST, STK_TIER_NVME, STK_TIER_HOST);
    RUN(&a, big_describe(&a));
    RUN(&a, stk_seal(a.e, true));
    RUN(&b, big_describe(&b));
    RUN(&b, stk_seal(b.e, true));
    uint64_t state = world_table(a.e, "host", "optimizer state"),
             staging = world_table(b.e, "host", "update staging"),
             read_back = world_table(b.e, "host", "checkpoints under way");
    CHECK(state >= 10ull * BIG_BLOCKS * BIG_ELEMS);
    CHECK(world_table(b.e, "host", "optimizer state") == 0 &&
          world_table(b.e, "nvme", "optimizer state") >= state);
    /* a ring of chunks and what the first visit's update needs, or twice what activations take */
    uint64_t ahead = 2 * world_table(b.e, "host", "activations");
    CHECK(staging > 0 && (staging < state / 5 + 10ull * BIG_ELEMS || staging <= ahead));
    CHECK(world_table(a.e, "host", "checkpoints under way") == 0);
    CHECK(planned(a.e) - planned(b.e) ==
          state - staging - read_back + world_table(a.e, "host", "update staging"));
    stk_close(a.e);
    stk_close(b.e);
}

/* MEM-14: no device temporary as large as all parameters in fp32. */
TEST(mem_14_the_device_holds_a_cache_not_the_model)
{
    struct big b;
    big_init(&b, STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME);
    b.cfg.device = STK_DEVICE_HOST_DISCRETE;
    b.cfg.device_memory = 24 << 20;
    RUN(&b, big_open(&b));
    CHECK(world_table(b.e, "device", NULL) <= 24 << 20);
    RUN(&b, big_step(&b));
    RUN(&b, big_step(&b));
    stk_close(b.e);
}

/* MEM-11: everything frozen and evaluation only: no gradient, no state, no accumulator. */
TEST(mem_11_forward_only_holds_the_weights)
{
    for (int nvme = 0; nvme < 2; nvme++) {
        struct big b;
        big_init(&b, nvme ? STK_TIER_NVME : STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST);
        b.frozen = true;
        RUN(&b, big_open(&b));
        double weights = 2.0 * BIG_BLOCKS * BIG_ELEMS;
        RUN(&b, stk_eval_begin(b.e));
        RUN(&b, big_visits(&b));
        RUN(&b, stk_eval_end(b.e));
        CHECK(world_table(b.e, "host", "optimizer state") == 0 &&
              world_table(b.e, "host", "gradients (16-bit)") == 0);
        CHECK(world_table(b.e, "host", "gradient accumulators (fp32)") == 0 &&
              world_table(b.e, "host", "update staging") == 0);
        double rest = 1 * MIB + world_table(b.e, "host", "activations") +
                      world_table(b.e, "host", "staging of loads and checkpoints") +
                      world_table(b.e, "host", "plans, tables and threads");
        CHECK((double)planned(b.e) <= (nvme ? weights : 1.1 * weights) + rest);
        stk_close(b.e);
    }
}

/* --- steady ----------------------------------------------------------------------------------- */

static void steady(stk_tier tier)
{
    struct big b;
    uint64_t rss[21], small[21];
    big_init(&b, tier, tier, tier);
    RUN(&b, big_open(&b));
    for (int i = 1; i <= 20; i++) {
        RUN(&b, big_step(&b));
        rss[i] = mem_resident_bytes();
        small[i] = sys_alloc_bytes();
        CHECK(small[i] == small[1]); /* nothing is allocated after seal */
    }
    printf("# tier %d: step 2 %.2f MiB, step 20 %.2f MiB\n", tier, (double)rss[2] / MIB,
           (double)rss[20] / MIB);
    CHECK(fabs((double)rss[20] - (double)rss[2]) < 0.005 * (double)rss[2] + 0.25 * MIB);
    stk_close(b.e);
}

TEST(mem_17_mem_20_step_20_equals_step_2)
{
    NEEDS_PLAIN_MEMORY();
    steady(STK_TIER_HOST);
    steady(STK_TIER_NVME);
}

TEST(mem_19_thirty_saves_leave_no_trace)
{
    NEEDS_PLAIN_MEMORY();
    struct toy t;
    uint64_t rss[31], small[31];
    toy_init(&t, 3, 2);
    RUN(&t, world_start(&t, WORLD_NVME));
    for (int i = 1; i <= 30; i++) {
        RUN(&t, world_steps(&t, 1, 1e-3));
        RUN(&t, stk_save(t.e, world_dir("saves"), "{\"a\":1}", 1));
        rss[i] = mem_resident_bytes();
        small[i] = sys_alloc_bytes();
    }
    printf("# save 5: %.2f MiB, save 30: %.2f MiB\n", (double)rss[5] / MIB, (double)rss[30] / MIB);
    CHECK(small[30] == small[1]);
    CHECK((double)rss[30] <= 1.01 * (double)rss[5]);
    stk_close(t.e);
}

/* --- budgets ---------------------------------------------------------------------------------- */

/* MEM-01: optimizer state larger than the budget, tiers left to auto: it goes to NVMe, and filling
 * and stepping stay within the plan. */
TEST(mem_01_state_larger_than_the_budget)
{
    NEEDS_PLAIN_MEMORY();
    struct big b;
    big_init(&b, STK_TIER_AUTO, STK_TIER_AUTO, STK_TIER_AUTO);
    uint64_t before = mem_resident_bytes();
    b.cfg.host_memory = before + (60ull << 20); /* the state alone: 90 MB */
    RUN(&b, big_describe(&b));
    reset_peak();
    RUN(&b, stk_seal(b.e, false));
    RUN(&b, big_fill(&b));
    CHECK(world_table(b.e, "host", "optimizer state") == 0 &&
          world_table(b.e, "nvme", "optimizer state") > 0 &&
          world_table(b.e, "nvme", "optimizer state") +
                  world_table(b.e, "host", "optimizer state kept in memory") >
              85u << 20);
    for (int i = 0; i < 3; i++) RUN(&b, big_step(&b));
    RUN(&b, stk_save(b.e, world_dir("mem01"), NULL, 1));
    uint64_t peak = mem_peak_bytes(), plan = world_table(b.e, "host", NULL);
    printf("# budget %.1f MiB, plan %.1f MiB, peak %.1f MiB\n", (double)b.cfg.host_memory / MIB,
           (double)plan / MIB, (double)peak / MIB);
    CHECK(plan <= b.cfg.host_memory);
    CHECK((double)peak <= 1.05 * (double)plan);
    stk_close(b.e);
}

/* MEM-16: any part of the optimizer state may stay in memory: more of the budget, fewer bytes over
 * NVMe; the table agrees with the process all along. */
TEST(mem_16_memory_to_spare_keeps_a_part_of_the_state)
{
    NEEDS_PLAIN_MEMORY();
    struct big b;
    big_init(&b, STK_TIER_HOST, STK_TIER_NVME, STK_TIER_HOST);
    b.cfg.nvme_buffer = 4ull * 10 * 524288; /* as with a budget, which is for keeping */
    RUN(&b, big_describe(&b));
    RUN(&b, stk_seal(b.e, true));
    uint64_t need = world_table(b.e, "host", NULL), state = world_table(b.e, "nvme", NULL),
             kept_before = 0, moved_before = UINT64_MAX;
    stk_close(b.e);
    for (int r = 1; r <= 9; r += 2) {
        stk_step_stats s = { 0 };
        stk_step step = { 1e-3 };
        big_init(&b, STK_TIER_HOST, STK_TIER_NVME, STK_TIER_HOST);
        uint64_t before = mem_resident_bytes();
        b.cfg.host_memory = need + state * (uint64_t)r / 10;
        RUN(&b, big_describe(&b));
        reset_peak();
        before = mem_resident_bytes();
        RUN(&b, stk_seal(b.e, false));
        RUN(&b, big_fill(&b));
        for (int i = 0; i < 2; i++) {
            RUN(&b, stk_step_begin(b.e, &step));
            RUN(&b, big_visits(&b));
            RUN(&b, stk_step_end(b.e, &s));
        }
        uint64_t kept = world_table(b.e, "host", "optimizer state kept in memory");
        uint64_t moved = s.nvme_read_bytes + s.nvme_write_bytes;
        double grew = (double)(mem_peak_bytes() - before), want = (double)planned(b.e);
        printf("# room for 0.%d of the state: kept %.1f MiB of %.1f, a step moves %.1f MiB; table "
               "%.1f MiB, peak grew by %.1f MiB\n",
               r, (double)kept / MIB, (double)state / MIB, (double)moved / MIB, want / MIB,
               grew / MIB);
        CHECK(kept > kept_before && moved < moved_before);
        CHECK(world_table(b.e, "host", NULL) <= b.cfg.host_memory);
        CHECK(fabs(grew - want) < 0.03 * want + 2 * MIB);
        kept_before = kept;
        moved_before = moved;
        stk_close(b.e);
    }
}

/* CKP-19: resuming takes no more than starting. */
TEST(ckp_19_resume_takes_no_more_memory_than_starting)
{
    NEEDS_PLAIN_MEMORY();
    struct big b;
    char *path = NULL;
    reset_peak();
    big_init(&b, STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME);
    RUN(&b, big_open(&b));
    RUN(&b, big_step(&b));
    RUN(&b, stk_flush(b.e));
    uint64_t fresh = mem_peak_bytes();
    RUN(&b, stk_save(b.e, world_dir("ckp19"), NULL, 1));
    stk_close(b.e);
    REQUIRE(stk_newest_checkpoint(world_dir("ckp19"), &path, NULL) == STK_OK);
    reset_peak();
    big_init(&b, STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME);
    RUN(&b, big_describe(&b));
    RUN(&b, stk_seal(b.e, false));
    RUN(&b, stk_restore(b.e, path, false, NULL));
    RUN(&b, big_step(&b));
    uint64_t resumed = mem_peak_bytes();
    printf("# fresh %.1f MiB, resumed %.1f MiB\n", (double)fresh / MIB, (double)resumed / MIB);
    CHECK((double)resumed <= 1.05 * (double)fresh + 1 * MIB);
    stk_free(path);
    stk_close(b.e);
}

TEST_MAIN()
