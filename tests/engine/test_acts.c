/* tests/engine/test_acts.c - activations on NVMe and in mixes: what is moved and counted, what is kept
 * under a budget, what is said of damage, what is refused. That numbers do not change is the matrix's
 * (test_matrix.c, test_modes.c, test_sim.c); here it is asked again where a test runs steps anyway. */
#include "tests/engine/durable_world.h"

enum { LAYERS = 6, MICROS = 2, ACT_BYTES = TOY_ROWS * TOY_HIDDEN * 4, ACT_ROOM = 8192 };

static void acts_toy(struct toy *t, stk_device_kind device)
{
    toy_init(t, LAYERS, MICROS);
    t->cfg.device = device;
    t->cfg.params = t->cfg.optimizer_state = t->cfg.grads = STK_TIER_HOST;
}

static bool note_with(const stk_engine *e, const char *a, const char *b)
{
    const char *line;
    for (uint32_t i = 0; stk_note(e, i, &line); i++)
        if (strstr(line, a) && strstr(line, b)) return true;
    return false;
}

/* Fills, takes two steps, closes. */
static bool two_steps(struct toy *t, uint64_t *hash)
{
    bool ok = toy_fill(t) == STK_OK && world_steps(t, 2, 1e-3) == STK_OK && toy_hash(t, hash) == STK_OK;
    if (!ok) printf("# %s\n", stk_error_text(t->e));
    stk_close(t->e);
    return ok;
}

/* Boundary and full set of each layer, and the head's boundary; what a mix leaves out of it. */
TEST(acts_bytes_on_nvme_are_counted)
{
    uint64_t want_hash = 0;
    for (int d = 0; d < 2; d++)
        for (uint32_t keep = 0; keep < 3; keep++) {
            struct toy t;
            stk_step_stats s = { 0 };
            stk_drive drive;
            uint64_t n = (uint64_t)MICROS * (2 * (LAYERS - keep) + !keep), all = n * ACT_BYTES;
            uint64_t hash = 0;
            acts_toy(&t, d ? STK_DEVICE_HOST_DISCRETE : STK_DEVICE_HOST);
            t.cfg.nvme[0] = world_dir("acts");
            t.cfg.activations = STK_ACT_NVME;
            t.cfg.activations_last[STK_ACT_KEEP] = keep;
            RUN(&t, toy_open(&t));
            RUN(&t, toy_fill(&t));
            for (int i = 0; i < 4; i++) {
                RUN(&t, toy_step(&t, 1e-3, &s));
                CHECK(s.nvme_read_bytes == all && s.nvme_write_bytes == all);
            }
            CHECK(world_table(t.e, "nvme", "activations") == n * ACT_ROOM);
            CHECK(stk_drive_info(t.e, 0, &drive) && drive.step_write_bytes == all &&
                  drive.write_bytes == 4 * n * ACT_ROOM);
            CHECK(note_with(t.e, "a step writes to NVMe", "activations"));
            CHECK(note_with(t.e, "placement", keep > 1    ? "2 last blocks kept, the others offloaded to nvme"
                                           : keep == 1 ? "1 last block kept, the others offloaded to nvme"
                                                   : "activations offloaded to nvme"));
            RUN(&t, toy_hash(&t, &hash));
            if (!want_hash) want_hash = hash;
            CHECK(hash == want_hash);
            stk_close(t.e);
        }
}

/* What a budget of device memory holds is kept, from the end of the model; more memory keeps no less. */
static uint32_t kept(const stk_engine *e)
{
    const struct plan *p = e->plan_train;
    uint32_t n = 0;
    bool gone = false;
    for (uint32_t i = e->n_places; i-- > 0;) {
        bool keeps = e->pplaces[i].act == PLAN_ACT_KEEP;
        if (e->places[i].fused || e->places[i].full_bytes == 0) continue;
        CHECK(!(gone && keeps));
        gone |= !keeps;
        n += keeps;
    }
    for (uint32_t i = 0; i < p->n_visits; i++)
        CHECK(!p->visits[i].recompute || e->pplaces[p->visits[i].place].act == PLAN_ACT_RECOMPUTE);
    return n;
}

TEST(acts_auto_keeps_the_last_blocks_that_fit)
{
    uint64_t device[2] = { 0 }, want = 0, hash = 0;
    uint32_t before = 0, between = 0;
    for (int i = 0; i < 2; i++) { /* what recomputing all, and keeping all, takes */
        struct toy t;
        acts_toy(&t, STK_DEVICE_HOST_DISCRETE);
        t.cfg.prefetch = 0;
        t.cfg.activations = i ? STK_ACT_KEEP : STK_ACT_RECOMPUTE;
        RUN(&t, toy_open(&t));
        device[i] = world_table(t.e, "device", NULL);
        CHECK(two_steps(&t, &hash));
        if (i == 0) want = hash;
        CHECK(hash == want);
    }
    CHECK(device[0] < device[1]);
    for (uint64_t cap = device[0]; cap <= device[1] + ACT_BYTES; cap += ACT_BYTES / 2) {
        struct toy t;
        acts_toy(&t, STK_DEVICE_HOST_DISCRETE);
        t.cfg.prefetch = 0;
        t.cfg.device_memory = cap;
        RUN(&t, toy_open(&t));
        uint32_t n = kept(t.e);
        CHECK(n >= before && world_table(t.e, "device", NULL) <= cap);
        between += n > 0 && n < LAYERS;
        before = n;
        RUN(&t, toy_fill(&t));
        RUN(&t, world_steps(&t, 2, 1e-3));
        RUN(&t, toy_hash(&t, &hash));
        CHECK(hash == want);
        stk_close(t.e);
    }
    printf("# %u budgets of a mix; at last %u blocks of %u keep\n", between, before, LAYERS);
    CHECK(before == LAYERS && between >= 4);
}

/* A flipped bit, a lost write, a write elsewhere: the run ends with the place and the micro-batch. */
TEST(acts_damage_is_found_and_named)
{
    for (int kind = 0; kind < 4; kind++)
        for (int d = 0; d < 2; d++) {
            struct toy t;
            struct stk_error err = { 0 };
            struct io_sim_cfg sim = { .seed = test_seed(), .latency_ns = 20000,
                                      .read_bytes_per_s = 1e9, .write_bytes_per_s = 1e9 };
            sim.faults.first_request = 60; /* in the second step: the first one's bytes are there */
            *(kind == 0   ? &sim.faults.flip_bit_ppm
              : kind == 1 ? &sim.faults.rot_bit_ppm
              : kind == 2 ? &sim.faults.lost_write_ppm
                          : &sim.faults.misdirect_ppm) = 1000000;
            CHECK_OK(io_sim_disk_new(64u << 20, &sim.disk, &err), &err);
            acts_toy(&t, d ? STK_DEVICE_SIM : STK_DEVICE_HOST);
            t.cfg.simulate = true;
            t.cfg.storage = STK_STORAGE_SIM;
            t.cfg.sim_disk = &sim;
            t.cfg.nvme[0] = "disk";
            t.cfg.activations = STK_ACT_NVME;
            RUN(&t, toy_open(&t));
            RUN(&t, toy_fill(&t));
            stk_status st = world_steps(&t, 5, 1e-3);
            CHECK(REFUSED(st, STK_ERR_CORRUPT, t.e, "activations of block layer.", "(place ",
                          "micro-batch ", "extent"));
            printf("# %s\n", stk_error_text(t.e));
            CHECK(t.step >= 2);
            stk_close(t.e);
            io_sim_disk_free(sim.disk);
        }
}

static void refused(struct toy *t, const char *a, const char *b)
{
    stk_status st = toy_open(t);
    CHECK(REFUSED(st, STK_ERR_CONFIG, t->e, a, b));
    stk_close(t->e);
}

TEST(acts_refusals)
{
    struct toy t;
    acts_toy(&t, STK_DEVICE_HOST);
    t.cfg.activations = STK_ACT_NVME;
    refused(&t, "activations", "--nvme DIR");
    t.cfg.nvme[0] = world_dir("acts");
    t.cfg.own_order = true;
    t.cfg.own_visits_max = 20;
    t.cfg.own_held_max = 2;
    refused(&t, "own_order", "keep or recompute");
    acts_toy(&t, STK_DEVICE_HOST);
    t.cfg.activations = STK_ACT_KEEP;
    t.cfg.activations_last[STK_ACT_RECOMPUTE] = 2;
    refused(&t, "the last 2 blocks recompute", "keep");
    t.cfg.activations_last[STK_ACT_RECOMPUTE] = 0;
    t.cfg.activations_last[STK_ACT_AUTO] = 1;
    refused(&t, "auto", "mix");
    t.cfg.activations_last[STK_ACT_AUTO] = 0;
    t.cfg.activations = (stk_act)STK_ACT_N;
    refused(&t, "activations", "5");
}

/* A device that computes in host memory keeps what is to go there, and auto the others beside it: no
 * folder is asked for, none that is given is used. */
TEST(acts_host_in_a_mix_is_kept_in_place)
{
    uint64_t want = 0, hash = 0;
    for (int i = 0; i < 3; i++) {
        struct toy t;
        acts_toy(&t, STK_DEVICE_HOST);
        if (i > 0) t.cfg.activations_last[STK_ACT_HOST] = 2;
        if (i == 2) t.cfg.nvme[0] = world_dir("acts");
        RUN(&t, toy_open(&t));
        CHECK(world_table(t.e, "nvme", NULL) == 0);
        if (i > 0) CHECK(note_with(t.e, "2 last blocks offloaded to host", "the others offloaded to host"));
        CHECK(two_steps(&t, &hash));
        if (i == 0) want = hash;
        CHECK(hash == want);
    }
}

/* Nothing else fits: auto sends boundaries to NVMe, too, rather than give up. What the process holds before
 * a seal is in the budget, and grows a little with each engine: rows enough for a budget far from both. */
TEST(acts_auto_takes_nvme_at_last)
{
    struct toy t;
    uint64_t least = 0, want = 0, base = 0, hash;
    if (TEST_SANITIZED) SKIP("a budget for the process is not for a sanitizer's memory");
    for (int i = 0; i < 3; i++) {
        acts_toy(&t, STK_DEVICE_HOST);
        t.cfg.micro_batches = t.micros = 8;
        t.cfg.prefetch = 0;
        t.rows = 10 * TOY_ROWS;
        t.cfg.host_memory = i < 2 ? 0 : base + least;
        t.cfg.activations = i == 0 ? STK_ACT_NVME : i == 1 ? STK_ACT_RECOMPUTE : STK_ACT_AUTO;
        if (i != 1) t.cfg.nvme[0] = world_dir("acts");
        RUN(&t, toy_open(&t));
        uint64_t acts = world_table(t.e, "host", "activations");
        base = world_table(t.e, "host", "program and libraries");
        uint64_t all = world_table(t.e, "host", NULL) - base;
        if (i == 0) least = all;
        if (i == 1) CHECK(all > least + (3u << 19));
        if (i == 1) least = (least + all) / 2;
        if (i == 2) CHECK(world_table(t.e, "nvme", "activations") > 0);
        printf("# host %" PRIu64 " and %" PRIu64 " before, of it activations %" PRIu64 "\n", all, base, acts);
        CHECK(two_steps(&t, &hash));
        if (i == 0) want = hash;
        CHECK(hash == want);
    }
}

/* Durable steps hold no activations; a store that is taken over has their extents all the same. */
TEST(acts_beside_durable_steps)
{
    struct toy t;
    char *client = NULL;
    uint64_t want, hash = 0;
    for (int i = 0; i < 4; i++) {
        toy_init(&t, LAYERS, MICROS);
        t.cfg.update = i % 2 ? STK_UPDATE_CHASE : STK_UPDATE_SPECULATE;
        durable_config(&t.cfg, world_dir("acts-durable"), i > 0);
        if (i < 2) t.cfg.activations = i ? STK_ACT_KEEP : STK_ACT_NVME;
        if (i == 0) t.cfg.activations_last[STK_ACT_KEEP] = 2;
        if (i == 1) {
            refused(&t, "activations", "--activations");
            t.cfg.activations = STK_ACT_AUTO;
            t.cfg.micro_batches = t.micros = MICROS + 1;
            refused(&t, "2 micro-batches on NVMe, this run has 3", "--discard");
            continue;
        }
        RUN(&t, toy_open(&t));
        if (i == 0) RUN(&t, toy_fill(&t));
        if (i > 0) RUN(&t, stk_resume_durable(t.e, false, &client));
        stk_free(client);
        client = NULL;
        if (i > 0) t.step = 2 * (uint64_t)(i - 1);
        CHECK(world_table(t.e, "nvme", "activations") ==
              (uint64_t)MICROS * ACT_ROOM * 2 * (LAYERS - 2));
        RUN(&t, world_steps(&t, 2, 1e-3));
        RUN(&t, stk_durable(t.e, NULL));
        RUN(&t, stk_durable_wait(t.e));
        RUN(&t, toy_hash(&t, &hash));
        if (i == 3) stk_discard_durable(t.e);
        stk_close(t.e);
    }
    toy_init(&t, LAYERS, MICROS);
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    RUN(&t, world_steps(&t, 6, 1e-3));
    RUN(&t, toy_hash(&t, &want));
    stk_close(t.e);
    CHECK(hash == want);
}

TEST_MAIN()
