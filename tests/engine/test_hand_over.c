/* tests/engine/test_hand_over.c - a new parameter on NVMe goes to its first visit in memory
 * (engine/plan.h, HAND-OVER): where a plan does it and where not, what a step then reads, and that the
 * bits stay, whichever parts of a period run. */
#include "engine/engine.h"
#include "tests/engine/plan_models.h"
#include "tests/engine/world.h"

/* --- plans --- */

static struct plan *checked(const struct model *m)
{
    struct stk_error err = { 0 };
    struct plan *p = NULL;
    if (plan_build(&m->in, &p, NULL, &err) != STK_OK || plan_check(&m->in, p, &err) != STK_OK) {
        printf("# %s\n", err.text);
        test_fail(__FILE__, __LINE__, "a plan is built and checked");
    }
    return p;
}

/* Chunks that are handed over, and the bytes of it. */
static uint32_t handed(const struct plan *p, uint64_t *bytes)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        n += p->nodes[i].kind == PLAN_HAND_OVER;
        *bytes += p->nodes[i].kind == PLAN_HAND_OVER ? p->nodes[i].bytes : 0;
    }
    return n;
}

static uint32_t handed_of(const struct model *m)
{
    uint64_t bytes = 0;
    struct plan *p = checked(m);
    uint32_t n = p ? handed(p, &bytes) : PLAN_NO;
    plan_free(p);
    return n;
}

static void nvme_model(struct model *m, uint32_t blocks, uint32_t chunks)
{
    model_make(m, blocks, chunks, 2048); /* a chunk's parameter is a page, its state seven */
    m->in.in_place = true;
    for (int s = 0; s < CHUNK_STATE_N; s++) model_home(m, (enum chunk_state)s, CHUNK_NVME);
}

/* With so many blocks in the PARAM arena and so many chunks in the UPDATE arena: those blocks, and what
 * of the others the last updates leave. */
TEST(hand_over_of_what_has_room)
{
    for (uint32_t params = 1; params <= 6; params++)
        for (uint32_t updates = 1; updates <= 12; updates++)
            for (int in_place = 0; in_place < 2; in_place++) {
                struct model m;
                nvme_model(&m, 6, 2);
                m.in.in_place = in_place;
                m.in.arena_bytes[PLAN_ARENA_PARAM] = params * 2 * 4096;
                m.in.arena_bytes[PLAN_ARENA_UPDATE] = updates * 7 * 4096;
                uint32_t last = updates, rest = 12 - 2 * params;
                CHECK(handed_of(&m) == 2 * params + (last < rest ? last : rest));
                model_free(&m);
            }
}

TEST(hand_over_never_waits_for_visits_while_updates_follow)
{
    uint32_t any = 0;
    for (uint64_t seed = 0; seed < 400; seed++) {
        struct rng r;
        struct model m;
        struct stk_error err = { 0 };
        uint64_t least[PLAN_ARENA_N], useful[PLAN_ARENA_N];
        rng_seed_stream(&r, test_seed(), seed);
        random_model(&m, &r);
        CHECK_OK(plan_needs(&m.in, least, useful, &err), &err);
        random_arenas(&m, &r, least, useful);
        struct plan *p = checked(&m);
        REQUIRE(p);
        for (uint32_t i = 0; i < p->n_nodes; i++) {
            const struct plan_node *x = &p->nodes[i];
            if (x->kind != PLAN_HAND_OVER) continue;
            const struct plan_chunk_in *c = &m.chunks[x->chunk];
            bool visit = false, followed = false;
            any++;
            CHECK(!c->frozen && c->home[CHUNK_PARAM] == CHUNK_NVME && !m.in.own &&
                  m.in.update != PLAN_SERIAL && m.in.mode == PLAN_TRAIN);
            for (uint32_t e = 0; e < x->n_deps; e++)
                visit |= p->nodes[p->deps[x->first_dep + e]].kind == PLAN_VISIT;
            for (uint32_t e = 0; e < x->n_succ; e++)
                followed |= p->nodes[p->succs[x->first_succ + e]].part == PLAN_RUN_UPDATE;
            CHECK(!visit || !followed);
        }
        plan_free(p);
        model_free(&m);
    }
    printf("# %u chunks handed over\n", any);
    CHECK(any > 400);
}

TEST(hand_over_not_with_serial_frozen_or_evaluation)
{
    struct model m;
    nvme_model(&m, 3, 2);
    m.in.update = PLAN_SERIAL;
    CHECK(handed_of(&m) == 0);
    m.in.update = PLAN_CHASE;
    m.in.mode = PLAN_EVAL;
    CHECK(handed_of(&m) == 0);
    m.in.mode = PLAN_TRAIN;
    CHECK(handed_of(&m) == 6);
    m.chunks[1].frozen = true; /* the second half of the first block */
    m.blocks[0].n_chunks_trainable = 1;
    CHECK(handed_of(&m) == 5);
    m.in.update = PLAN_SPECULATE; /* what may be made ahead of the norm is not */
    m.chunks[2].spec = m.chunks[5].spec = true;
    m.in.arena_bytes[PLAN_ARENA_UPDATE] = 7 * 4096;
    CHECK(handed_of(&m) <= 4);
    model_free(&m);
}

/* What a period reads is less by what is handed over, and the parameters that arrive are as many. */
TEST(hand_over_is_not_read)
{
    for (int in_place = 0; in_place < 2; in_place++) {
        struct model m;
        uint64_t bytes = 0;
        nvme_model(&m, 6, 2);
        m.in.in_place = in_place;
        m.in.arena_bytes[PLAN_ARENA_PARAM] = 2 * 2 * 4096;
        m.in.arena_bytes[PLAN_ARENA_UPDATE] = 3 * 7 * 4096;
        struct plan *p = checked(&m);
        REQUIRE(p);
        CHECK(handed(p, &bytes) == 7);
        uint64_t all = 0, plain = plan_moved(p, PLAN_NVME_READ), arrives = p->param_fetch_bytes,
                 link = plan_moved(p, PLAN_COPY_IN_LINK);
        for (uint32_t i = 0; i < p->n_nodes; i++)
            if (p->nodes[i].resource == PLAN_NVME_READ) all += p->nodes[i].bytes;
        CHECK(all == plain + bytes);
        CHECK(link == (in_place ? 0 : arrives));
        plan_free(p);
        model_free(&m);
    }
}

/* --- runs --- */

static void hand_toy(struct toy *t, bool nvme, stk_device_kind device, stk_update update)
{
    toy_init(t, 3, 2);
    t->rows = 2;
    t->cfg.update = update;
    t->cfg.device = device;
    t->cfg.nvme[0] = world_dir("nvme");
    t->cfg.params = t->cfg.optimizer_state = t->cfg.grads = nvme ? STK_TIER_NVME : STK_TIER_HOST;
}

static uint64_t handed_bytes(const stk_engine *e)
{
    uint64_t bytes = 0;
    handed(e->plan_train, &bytes);
    return bytes;
}

/* What the update of a period reads in that period. */
static uint64_t update_reads(const stk_engine *e)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < e->plan_train->n_nodes; i++) {
        const struct plan_node *x = &e->plan_train->nodes[i];
        if (x->kind == PLAN_FETCH && x->part == PLAN_RUN_UPDATE) bytes += x->bytes;
    }
    return bytes;
}

/* The first step and one after a flush have no update beside them: they read what else is handed over.
 * A skipped step makes no update due: so does the one behind it. */
TEST(hand_over_happens_where_update_and_visits_run_together)
{
    static const stk_device_kind devices[] = { STK_DEVICE_HOST, STK_DEVICE_HOST_DISCRETE };
    static const stk_update updates[] = { STK_UPDATE_CHASE, STK_UPDATE_SPLIT, STK_UPDATE_SPECULATE };
    for (int u = 0; u < 3; u++)
        for (int d = 0; d < 2; d++) {
            uint64_t want = 0, got = 1, alone = 0, together = 0, bytes = 0, arrives = 0, update = 0;
            for (int nvme = 0; nvme < 2; nvme++) {
                struct toy t;
                hand_toy(&t, nvme != 0, devices[d], nvme ? updates[u] : STK_UPDATE_SERIAL);
                t.poison_loss_at = 6;
                RUN(&t, toy_open(&t));
                RUN(&t, toy_fill(&t));
                if (nvme) bytes = handed_bytes(t.e);
                if (nvme) update = update_reads(t.e);
                for (int i = 1; i <= 8; i++) {
                    stk_step_stats s = { 0 };
                    RUN(&t, toy_step(&t, 1e-3, &s));
                    CHECK(s.skipped == (i == 6));
                    if (i == 3) RUN(&t, stk_flush(t.e));
                    if (!nvme) continue;
                    if (i == 1) arrives = s.param_fetch_bytes;
                    CHECK(s.param_fetch_bytes == arrives);
                    if (updates[u] == STK_UPDATE_SPECULATE) continue;
                    if (i == 2) together = s.nvme_read_bytes;
                    if (i == 4) alone = s.nvme_read_bytes;
                    if (i == 3 || i == 5 || i == 6 || i == 8) CHECK(s.nvme_read_bytes == together);
                    if (i == 7) CHECK(s.nvme_read_bytes == alone);
                }
                RUN(&t, toy_hash(&t, nvme ? &got : &want));
                stk_close(t.e);
            }
            CHECK(got == want);
            if (updates[u] == STK_UPDATE_SPECULATE) continue;
            CHECK(bytes > 0 && alone + update == together + bytes);
        }
}

TEST_MAIN()
