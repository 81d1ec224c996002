/* tests/engine/test_cache.c - a part of the state on NVMe kept in memory (engine/cache.c): same bits
 * for any budget, fewer bytes over NVMe the more there is, checkpoints between budgets, the dry
 * seal's table.
 *
 * The resident baseline of the engine is set by hand, so that a budget means the same in every
 * process. */
#include "engine/engine.h"
#include "tests/engine/mlp.h"

enum { BASE = 1 << 20 };

struct kept {
    stk_tier params, opt, grads;
    stk_device_kind device;
    stk_update update;
    bool tied, freeze, fp16;
};

static void setting(struct toy *t, const struct kept *k)
{
    toy_init(t, 3, 2);
    t->cfg.nvme[0] = world_dir("nvme");
    t->cfg.params = k->params;
    t->cfg.optimizer_state = k->opt;
    t->cfg.grads = k->grads;
    t->cfg.device = k->device;
    t->cfg.update = k->update;
    t->tied = k->tied;
    t->freeze_first = k->freeze;
    t->cfg.dtype = k->fp16 ? STK_FP16 : STK_BF16;
}

static stk_status seal(struct toy *t, uint64_t budget, bool dry)
{
    t->cfg.host_memory = budget;
    STK_TRY(stk_open(&t->cfg, &t->e));
    t->e->baseline_bytes = BASE;
    STK_TRY(toy_describe(t));
    return stk_seal(t->e, dry);
}

/* Host memory that the setting takes without any budget, and the bytes it has on NVMe. */
static bool sizes(const struct kept *k, uint64_t *host, uint64_t *nvme)
{
    struct toy t;
    setting(&t, k);
    stk_status st = seal(&t, 0, true);
    if (st != STK_OK) printf("# %s\n", stk_error_text(t.e));
    *host = world_table(t.e, "host", NULL);
    *nvme = world_table(t.e, "nvme", NULL);
    stk_close(t.e);
    return st == STK_OK;
}

static uint64_t kept_bytes(const stk_engine *e)
{
    return world_table(e, "host", "parameters kept in memory") +
           world_table(e, "host", "optimizer state kept in memory") +
           world_table(e, "host", "gradients kept in memory");
}

struct outcome { uint64_t hash, moved, kept; };

static bool run(const struct kept *k, uint64_t budget, struct outcome *o)
{
    struct toy t;
    stk_step_stats s = { 0 };
    setting(&t, k);
    stk_status st = seal(&t, budget, false);
    o->kept = st == STK_OK ? kept_bytes(t.e) : 0;
    if (st == STK_OK) st = toy_fill(&t);
    for (int i = 0; st == STK_OK && i < 4; i++) st = toy_step(&t, 1e-3, &s);
    o->moved = s.nvme_read_bytes + s.nvme_write_bytes;
    if (st == STK_OK) st = toy_hash(&t, &o->hash);
    if (st != STK_OK) printf("# %s: %s\n", stk_status_name(st), stk_error_text(t.e));
    stk_close(t.e);
    return st == STK_OK;
}

/* MEM-16: every position of the budget has an effect, and none has one on the numbers. */
static void sweep(const struct kept *k)
{
    uint64_t host, nvme, first = 0;
    struct outcome o, before = { 0 };
    REQUIRE(sizes(k, &host, &nvme));
    for (uint32_t r = 0; r <= 11; r++) {
        uint64_t budget = r == 0 ? 0 : host + nvme * r / 10;
        REQUIRE(run(k, budget, &o));
        printf("# params %d opt %d grads %d device %d update %d, room for %.1f of the state: kept "
               "%" PRIu64 ", moved %" PRIu64 " bytes a step, hash %016" PRIx64 "\n",
               k->params, k->opt, k->grads, k->device, k->update, r / 10.0, o.kept, o.moved,
               o.hash);
        if (r == 0) {
            first = o.hash;
            CHECK(o.kept == 0 && o.moved > 0); /* without a budget nothing changes */
        } else {
            /* strictly, until there is nothing left to keep */
            CHECK(o.kept > before.kept || before.moved == 0);
            CHECK(o.moved < before.moved || before.moved == 0);
        }
        CHECK(o.hash == first);
        before = o;
    }
    CHECK(before.moved == 0);
}

TEST(mem_16_optimizer_state_by_any_budget)
{
    sweep(&(struct kept){ STK_TIER_HOST, STK_TIER_NVME, STK_TIER_HOST, STK_DEVICE_HOST,
                          STK_UPDATE_CHASE });
}
TEST(mem_16_everything_by_any_budget)
{
    sweep(&(struct kept){ STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST,
                          STK_UPDATE_CHASE });
}
TEST(mem_16_everything_serial)
{
    sweep(&(struct kept){ STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST,
                          STK_UPDATE_SERIAL });
}
TEST(mem_16_everything_beside_a_device)
{
    sweep(&(struct kept){ STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST_DISCRETE,
                          STK_UPDATE_CHASE });
}
TEST(mem_16_tied_blocks)
{
    sweep(&(struct kept){ STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST,
                          STK_UPDATE_CHASE, .tied = true });
}
TEST(mem_16_frozen_tensors)
{
    for (int discrete = 0; discrete < 2; discrete++)
        sweep(&(struct kept){ STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME,
                              discrete ? STK_DEVICE_HOST_DISCRETE : STK_DEVICE_HOST,
                              STK_UPDATE_CHASE, .freeze = true });
}
TEST(mem_16_fp16)
{
    sweep(&(struct kept){ STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST,
                          STK_UPDATE_CHASE, .fp16 = true });
}
TEST(mem_16_gradients_alone)
{
    sweep(&(struct kept){ STK_TIER_HOST, STK_TIER_HOST, STK_TIER_NVME, STK_DEVICE_HOST,
                          STK_UPDATE_CHASE });
}

/* A client's own order: gradients and optimizer state are kept, parameters are not (a departure may
 * ask for any block). */
TEST(cache_with_own_order)
{
    uint64_t hash[2];
    for (int k = 0; k < 2; k++) {
        struct mlp m;
        mlp_init(&m, WORLD_NVME);
        if (k) m.cfg.host_memory = 1u << 30;
        m.skip_layer = true;
        RUN(&m, mlp_open(&m));
        CHECK((world_table(m.e, "host", "optimizer state kept in memory") > 0) == k);
        CHECK(world_table(m.e, "host", "parameters kept in memory") == 0);
        for (int i = 0; i < 5; i++) RUN(&m, mlp_step(&m, NULL));
        RUN(&m, mlp_hash(&m, &hash[k]));
        stk_close(m.e);
    }
    CHECK(hash[0] == hash[1]);
}

TEST(cache_fills_the_budget_to_one_unit)
{
    const struct kept k = { STK_TIER_HOST, STK_TIER_NVME, STK_TIER_HOST, STK_DEVICE_HOST,
                            STK_UPDATE_CHASE };
    uint64_t host, nvme;
    REQUIRE(sizes(&k, &host, &nvme));
    for (uint32_t r = 1; r <= 9; r++) {
        struct toy t;
        setting(&t, &k);
        uint64_t budget = host + nvme * r / 10;
        RUN(&t, seal(&t, budget, true));
        uint64_t used = world_table(t.e, "host", NULL);
        bool all = world_table(t.e, "nvme", NULL) == 0;
        CHECK(used <= budget && (all || budget - used < 2048 * 10 + 4096));
        stk_close(t.e);
    }
}

TEST(cache_is_said_in_notes)
{
    const struct kept k = { STK_TIER_HOST, STK_TIER_NVME, STK_TIER_HOST, STK_DEVICE_HOST,
                            STK_UPDATE_CHASE };
    uint64_t host, nvme;
    struct toy t;
    const char *line;
    bool said = false;
    REQUIRE(sizes(&k, &host, &nvme));
    setting(&t, &k);
    RUN(&t, seal(&t, host + nvme / 2, true));
    for (uint32_t i = 0; stk_note(t.e, i, &line); i++)
        said |= strstr(line, "optimizer state: ") && strstr(line, "chunks (") &&
                strstr(line, "kept in memory");
    CHECK(said);
    stk_close(t.e);
}

/* A checkpoint knows no placement: written under one budget, read under another. */
TEST(cache_checkpoints_go_between_budgets)
{
    const struct kept k = { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST,
                            STK_UPDATE_CHASE };
    uint64_t host, nvme, want, got;
    REQUIRE(sizes(&k, &host, &nvme));
    const uint64_t budget[] = { 0, host + nvme / 4, host + nvme * 3 / 4, host + 2 * nvme };
    struct toy t;
    setting(&t, &k);
    RUN(&t, seal(&t, 0, false));
    RUN(&t, toy_fill(&t));
    RUN(&t, world_steps(&t, 5, 1e-3));
    RUN(&t, toy_hash(&t, &want));
    stk_close(t.e);
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++) {
            char *path = NULL;
            const char *dir = world_dir("between");
            sys_remove_tree(dir);
            setting(&t, &k);
            RUN(&t, seal(&t, budget[a], false));
            RUN(&t, toy_fill(&t));
            RUN(&t, world_steps(&t, 3, 1e-3));
            RUN(&t, stk_save(t.e, dir, NULL, 1));
            stk_close(t.e);
            REQUIRE(stk_newest_checkpoint(dir, &path, NULL) == STK_OK);
            setting(&t, &k);
            RUN(&t, seal(&t, budget[b], false));
            RUN(&t, stk_restore(t.e, path, false, NULL));
            t.step = 3;
            RUN(&t, world_steps(&t, 2, 1e-3));
            RUN(&t, toy_hash(&t, &got));
            CHECK(got == want);
            stk_close(t.e);
            stk_free(path);
        }
}

TEST(cache_dry_and_real_tables_agree)
{
    const struct kept k = { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST,
                            STK_UPDATE_CHASE };
    uint64_t host, nvme, n0, n1;
    const char *t0, *o0, *t1, *o1;
    struct toy a, b;
    REQUIRE(sizes(&k, &host, &nvme));
    setting(&a, &k);
    setting(&b, &k);
    RUN(&a, seal(&a, host + nvme / 3, true));
    RUN(&b, seal(&b, host + nvme / 3, false));
    uint32_t i = 0;
    for (; stk_table(b.e, i, &t1, &o1, &n1); i++)
        CHECK(stk_table(a.e, i, &t0, &o0, &n0) && !strcmp(t0, t1) && !strcmp(o0, o1) && n0 == n1);
    CHECK(!stk_table(a.e, i, &t0, &o0, &n0));
    stk_close(a.e);
    stk_close(b.e);
}

TEST(cache_is_off_for_durable_steps_and_says_so)
{
    const struct kept k = { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST,
                            STK_UPDATE_CHASE };
    struct toy t;
    const char *line;
    bool said = false;
    setting(&t, &k);
    t.cfg.durable = true;
    RUN(&t, seal(&t, 256 << 20, true));
    for (uint32_t i = 0; stk_note(t.e, i, &line); i++)
        said |= strstr(line, "durable steps need") != NULL;
    CHECK(said && kept_bytes(t.e) == 0);
    stk_close(t.e);
}

/* Bytes over the drives per step, as planned; UINT64_MAX: it does not fit. */
static uint64_t planned_bytes(const struct kept *k, uint64_t budget, struct toy *t)
{
    setting(t, k);
    if (seal(t, budget, true) != STK_OK) return UINT64_MAX;
    return plan_moved(t->e->plan_train, PLAN_NVME_READ) + plan_moved(t->e->plan_train, PLAN_NVME_WRITE);
}

/* Parameters that all fit need no cache of parameters: they come before any other use of the memory, and
 * a larger budget never puts them back on the drives. */
TEST(cache_keeps_all_parameters_as_soon_as_they_fit)
{
    const struct kept k = { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST,
                            STK_UPDATE_CHASE };
    uint64_t host, nvme, before = UINT64_MAX;
    uint32_t partly = 0, all = 0;
    REQUIRE(sizes(&k, &host, &nvme));
    for (uint32_t r = 0; r <= 40; r++) {
        struct toy t;
        uint64_t moved = planned_bytes(&k, host / 4 + host * r / 40, &t);
        bool open = moved != UINT64_MAX,
             whole = open && world_table(t.e, "nvme", "parameters (16-bit)") == 0,
             state = open && world_table(t.e, "nvme", "optimizer state") > 0;
        CHECK(!open || whole || all == 0);
        CHECK(!whole || world_table(t.e, "host", "parameter cache") == 0);
        CHECK(moved <= before);
        before = moved;
        all += whole && state;
        partly += open && !whole;
        stk_close(t.e);
    }
    printf("# parameters partly on NVMe %u times, all in memory while state is not %u times\n", partly, all);
    CHECK(all > 0 && partly > 0);
}

/* Gradients left to the engine lie where a step moves the fewest bytes over the drives. */
TEST(cache_gradients_go_where_fewer_bytes_move)
{
    const stk_tier tier[] = { STK_TIER_AUTO, STK_TIER_HOST, STK_TIER_NVME };
    const struct kept size = { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST,
                               STK_UPDATE_CHASE };
    uint64_t host, nvme;
    REQUIRE(sizes(&size, &host, &nvme));
    for (uint32_t r = 0; r <= 20; r++) {
        uint64_t moved[3];
        for (int i = 0; i < 3; i++) {
            struct kept k = size;
            struct toy t;
            k.grads = tier[i];
            moved[i] = planned_bytes(&k, host / 4 + host * r / 20, &t);
            stk_close(t.e);
        }
        printf("# budget %u: auto %" PRIu64 ", host %" PRIu64 ", nvme %" PRIu64 "\n", r, moved[0],
               moved[1], moved[2]);
        uint64_t least = moved[1] < moved[2] ? moved[1] : moved[2];
        CHECK(least == UINT64_MAX || moved[0] <= least + least / 40);
    }
}

/* Bytes of the update's staging, planned. */
static uint64_t staging(uint64_t buffer, bool durable, uint64_t budget)
{
    struct kept k = { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, STK_DEVICE_HOST,
                      STK_UPDATE_CHASE, false, false, false };
    struct toy t;
    setting(&t, &k);
    t.cfg.nvme_buffer = buffer;
    t.cfg.durable = durable;
    stk_status st = seal(&t, budget, true);
    if (st != STK_OK) printf("# %s\n", stk_error_text(t.e));
    CHECK(st == STK_OK);
    uint64_t bytes = world_table(t.e, "host", "update staging");
    stk_close(t.e);
    return bytes;
}

/* --nvme-buffer: what is read ahead of the update and written behind it. */
TEST(buffer_is_what_was_asked_for_up_to_all_state)
{
    uint64_t least = staging(1, false, 0), usual = staging(0, false, 0),
             all = staging(UINT64_MAX, false, 0);
    printf("# least %" PRIu64 ", usual %" PRIu64 ", all %" PRIu64 "\n", least, usual, all);
    CHECK(0 < least && least < usual && usual <= all);
    CHECK(staging(least + 4096, false, 0) == least + 4096);
    /* durable steps: memory that a given budget leaves goes there, for the state may not */
    CHECK(staging(0, true, 0) == usual);
    CHECK(staging(0, true, 1ull << 30) == all);
}

TEST_MAIN()
