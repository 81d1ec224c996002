/* tests/engine/test_rows.c - rows of the field cases about swapped state that belong to the engine
 * as a whole and to no file of it: a tensor larger than any buffer, pools of every size, evaluation
 * and recomputation between steps. Each is compared with the same run in host memory. */
#include "engine/engine.h"
#include "tests/engine/mlp.h"

static void rows_toy(struct toy *t, bool nvme)
{
    toy_init(t, 2, 2);
    t->rows = 2;
    t->cfg.nvme[0] = world_dir("nvme");
    t->cfg.params = t->cfg.optimizer_state = t->cfg.grads = nvme ? STK_TIER_NVME : STK_TIER_HOST;
}

/* --- NVM-07 ----------------------------------------------------------------------------------- */

/* The largest tensor has seven chunks, a part of one, and some between: the engine splits it;
 * nothing is to be set. Compared with host memory at the same chunk size, which belongs to the
 * numerics. (One of 733 chunks: abuse_two_thousand_blocks_and_one_huge.) */
TEST(rows_nvm_07_a_tensor_many_times_the_staging_chunk)
{
    static const uint32_t chunks[] = { 2048, 4096, 8192, 65536 };
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        uint64_t hash[2] = { 0, 1 };
        double loss[2] = { 0, 1 };
        for (int nvme = 0; nvme < 2; nvme++) {
            struct toy t;
            rows_toy(&t, nvme != 0);
            t.cfg.chunk_elems = chunks[i];
            RUN(&t, toy_open(&t));
            RUN(&t, toy_fill(&t));
            if (i == 0) CHECK(t.e->layout->n_chunks > 14);
            RUN(&t, world_steps(&t, 3, 1e-3));
            RUN(&t, toy_hash(&t, &hash[nvme]));
            loss[nvme] = t.last_loss;
            stk_close(t.e);
        }
        CHECK(hash[0] == hash[1] && loss[0] == loss[1]);
    }
}

/* --- NVM-08 ----------------------------------------------------------------------------------- */

/* Memory between NVMe and the update, from nothing to more than all state, with every prefetch, and
 * host budgets from far too little on: the same bits, or a refusal at seal (before any weight is
 * read) that says how much is the least. */
TEST(rows_nvm_08_pools_of_every_size_progress_or_are_refused)
{
    uint64_t want = 0, refusals = 0, runs = 0;
    struct toy t;
    rows_toy(&t, false);
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    RUN(&t, world_steps(&t, 2, 1e-3));
    RUN(&t, toy_hash(&t, &want));
    stk_close(t.e);
    for (uint64_t chunks = 0; chunks <= 9; chunks++)
        for (uint32_t k = 0; k < 4; k++) {
            uint64_t hash = 0;
            rows_toy(&t, true);
            t.cfg.nvme_buffer = chunks == 0 ? 1 : chunks * 2048 * 14;
            t.cfg.prefetch = k % 2 ? 3 : 0;
            t.cfg.update = k / 2 ? STK_UPDATE_CHASE : STK_UPDATE_SERIAL;
            t.cfg.stall_ns = 20ull * 1000000000u;
            stk_status st = toy_open(&t);
            refusals += st != STK_OK;
            if (st != STK_OK) CHECK(REFUSED(st, STK_ERR_NOMEM, t.e, "needed"));
            if (st == STK_OK) {
                RUN(&t, toy_fill(&t));
                RUN(&t, world_steps(&t, 2, 1e-3));
                RUN(&t, toy_hash(&t, &hash));
                CHECK(hash == want);
                runs++;
            }
            stk_close(t.e);
        }
    CHECK(runs > 0);
    printf("# %" PRIu64 " pools ran, %" PRIu64 " were refused\n", runs, refusals);
    for (uint64_t kib = 64; kib <= 64 << 10; kib *= 2) {
        uint64_t hash = 0;
        rows_toy(&t, true);
        t.cfg.host_memory = kib << 10;
        stk_status st = stk_open(&t.cfg, &t.e);
        if (st == STK_OK) t.e->baseline_bytes = 32 << 10; /* of this process: by hand */
        if (st == STK_OK) st = toy_describe(&t);
        if (st == STK_OK) st = stk_seal(t.e, false);
        if (st != STK_OK) {
            CHECK(REFUSED(st, STK_ERR_NOMEM, t.e, "--host-memory", "needed"));
            CHECK(rmdir(t.cfg.nvme[0]) == 0 && mkdir(t.cfg.nvme[0], 0700) == 0); /* nothing made */
        } else {
            RUN(&t, toy_fill(&t));
            RUN(&t, world_steps(&t, 2, 1e-3));
            RUN(&t, toy_hash(&t, &hash));
            CHECK(hash == want);
        }
        refusals += st != STK_OK;
        stk_close(t.e);
    }
    CHECK(refusals > 0);
}

/* --- NVM-10 ----------------------------------------------------------------------------------- */

static stk_status evaluate(struct toy *t)
{
    struct stk_error err = { 0 };
    stk_visit v;
    stk_status st;
    STK_TRY(stk_eval_begin(t->e));
    while ((st = stk_next(t->e, &v)) == STK_OK) {
        STK_TRY(toy_visit(t, &v, &err));
        STK_TRY(stk_done(t->e, &v));
    }
    return st == STK_END ? stk_eval_end(t->e) : st;
}

/* Parameters on NVMe, activations recomputed, an evaluation between all steps: each step fetches
 * the same bytes as the one before (none twice), nothing is in flight when all is flushed, no
 * memory grows, and the bits are those of host memory without evaluations. */
TEST(rows_nvm_10_recompute_and_evaluation_between_steps)
{
    static const stk_device_kind devices[] = { STK_DEVICE_HOST, STK_DEVICE_HOST_DISCRETE };
    uint64_t want = 0, hash = 0;
    struct toy t;
    rows_toy(&t, false);
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    RUN(&t, world_steps(&t, 5, 1e-3));
    RUN(&t, toy_hash(&t, &want));
    stk_close(t.e);
    for (int d = 0; d < 2; d++) {
        uint64_t fetched[6] = { 0 }, alive = 0;
        rows_toy(&t, true);
        t.cfg.device = devices[d];
        t.cfg.activations = STK_ACT_RECOMPUTE;
        t.cfg.poison = false;
        RUN(&t, toy_open(&t));
        RUN(&t, toy_fill(&t));
        for (int i = 1; i <= 5; i++) {
            stk_step_stats s = { 0 };
            RUN(&t, toy_step(&t, 1e-3, &s));
            RUN(&t, evaluate(&t));
            fetched[i] = s.param_fetch_bytes;
            RUN(&t, stk_flush(t.e));
            CHECK(io_in_flight(t.e->io) == 0 && t.e->run.visits_in_flight == 0);
            if (i == 2) alive = sys_alloc_bytes();
            if (i > 2) CHECK(fetched[i] == fetched[2] && sys_alloc_bytes() == alive);
        }
        RUN(&t, toy_hash(&t, &hash));
        CHECK(hash == want && fetched[2] > 0);
        stk_close(t.e);
    }
    CHECK(rmdir(world_dir("nvme")) == 0);
}

TEST_MAIN()
