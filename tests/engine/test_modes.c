/* tests/engine/test_modes.c - the update modes are bit-equal to `serial`: clipping off, never binding,
 * binding always, binding once after quiet steps, a gradient that is not finite; any placement, device,
 * order of accumulation and number of update threads; evaluation, checkpoint, reads and flushes in
 * between. Faults planted in the way back (an undo forgotten, an update kept that must not be) change
 * the numbers: the comparison would notice. STK_SOAK=1: a hundred times as many random combinations. */
#include "engine/spec.h"
#include "nvme/io_sim.h"
#include "tests/engine/durable_world.h"

enum scene { CLIP_OFF, CLIP_LOOSE, CLIP_TIGHT, CLIP_ONCE, NOT_FINITE, NOT_FINITE_LATE, SCENE_N };
static const char *const scene_names[SCENE_N] = { "clip off", "clip loose", "clip tight",
                                                  "clip binds once", "not finite once",
                                                  "not finite, late" };
enum { STEPS = 8, AT = 5 };

struct mix {
    enum scene scene;
    double clip; /* CLIP_ONCE: just below the norm of step AT, so that the last of backward bind */
    stk_update update;
    stk_tier params, opt, grads;
    stk_device_kind device;
    uint32_t threads, micros, prefetch;
    stk_accumulate accumulate;
    stk_dtype dtype;
    stk_optimizer optimizer;
    bool tied, freeze, events, simulate, short_memory; /* the last: DEV_SIM, see engine/pace.h */
    uint64_t nvme_buffer;
    stk_act act;
    uint32_t keep; /* of the last layers */
};

struct outcome { uint64_t hash, spec, undone, paced; double loss, clip_least, norm_at; };

/* The update wants 0.9 of the host's memory, copies a third each. */
static const struct dev_model short_model = { .flops_per_s = 4e9,
                                              .copy_in_bytes_per_s = 110e6,
                                              .copy_out_bytes_per_s = 110e6,
                                              .memory_bytes_per_s = 9e9,
                                              .launch_ns = 100,
                                              .update_bytes_per_s = 300e6,
                                              .dram_bytes_per_s = 333e6 };

static void mix_config(struct toy *t, const struct mix *m, const struct io_sim_cfg *sim)
{
    toy_init(t, 3, m->micros);
    t->rows = 4;
    t->tied = m->tied;
    t->freeze_first = m->freeze;
    t->cfg.clip = m->scene == CLIP_OFF ? 0 : m->scene == CLIP_TIGHT ? 1e-3 : m->clip > 0 ? m->clip : 1e9;
    if (m->scene == CLIP_ONCE) t->boost_at = AT;
    if (m->scene == NOT_FINITE) t->poison_loss_at = AT;
    if (m->scene == NOT_FINITE_LATE) t->poison_embed_at = AT;
    t->cfg.update = m->update;
    t->cfg.params = m->params;
    t->cfg.optimizer_state = m->opt;
    t->cfg.grads = m->grads;
    t->cfg.device = m->device;
    if (m->short_memory && m->device == STK_DEVICE_SIM) t->cfg.sim_model = &short_model;
    t->cfg.update_threads = m->threads;
    t->cfg.prefetch = m->prefetch;
    t->cfg.accumulate = m->accumulate;
    t->cfg.dtype = m->dtype;
    t->cfg.loss_scale = 1024;
    t->cfg.optimizer = m->optimizer;
    t->cfg.nvme_buffer = m->nvme_buffer;
    t->cfg.activations = m->act;
    t->cfg.activations_last[STK_ACT_KEEP] = m->act == STK_ACT_AUTO ? 0 : m->keep;
    t->cfg.poison = false;
    t->cfg.nvme[0] = m->simulate ? "disk" : world_dir("modes");
    t->cfg.simulate = m->simulate || m->device == STK_DEVICE_SIM;
    t->cfg.seed = test_seed();
    if (m->simulate) t->cfg.storage = STK_STORAGE_SIM;
    if (m->simulate) t->cfg.sim_disk = sim;
}

static stk_status eval_pass(struct toy *t)
{
    struct stk_error err = { 0 };
    stk_visit v;
    stk_status st;
    STK_TRY(stk_eval_begin(t->e));
    STK_TRY(toy_inputs(t, 77, &err));
    while ((st = stk_next(t->e, &v)) == STK_OK) {
        STK_TRY(toy_visit(t, &v, &err));
        STK_TRY(stk_done(t->e, &v));
    }
    return st == STK_END ? stk_eval_end(t->e) : st;
}

/* What may come between two steps; all of it sees the state after the step before. */
static stk_status between(struct toy *t, int step)
{
    float v[8];
    switch (step) {
    case 2: return eval_pass(t);
    case 3: return stk_flush(t->e);
    case AT: return stk_tensor_read(t->e, t->tensor_head, STK_READ_MASTER, 3, 8, v, STK_F32);
    case AT + 1: return stk_save(t->e, world_dir("modes-save"), NULL, 1);
    default: return STK_OK;
    }
}

static stk_status mix_steps(struct toy *t, const struct mix *m, struct outcome *o)
{
    for (int i = 1; i <= STEPS; i++) {
        stk_step_stats s = { 0 };
        STK_TRY(toy_step(t, 1e-3, &s));
        o->spec += s.spec_chunks;
        o->undone += s.spec_undone;
        o->paced += t->e->counts.paced;
        o->loss += t->last_loss * i;
        if (i == AT) o->norm_at = s.grad_norm;
        if (s.clip_factor < o->clip_least) o->clip_least = s.clip_factor;
        if (m->events) STK_TRY(between(t, i));
    }
    return toy_hash(t, &o->hash);
}

static bool mix_run(const struct mix *m, struct outcome *o)
{
    struct toy t;
    struct stk_error err = { 0 };
    struct io_sim_cfg sim = {
        .seed = test_seed(), .latency_ns = 2000, .read_bytes_per_s = 4e9, .write_bytes_per_s = 4e9
    };
    *o = (struct outcome){ .clip_least = 1 };
    if (m->simulate && io_sim_disk_new(1u << 30, &sim.disk, &err) != STK_OK) return false;
    mix_config(&t, m, &sim);
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    if (st == STK_OK) st = mix_steps(&t, m, o);
    if (st != STK_OK) printf("# %s: %s\n", stk_status_name(st), t.e ? stk_error_text(t.e) : "?");
    stk_close(t.e);
    io_sim_disk_free(sim.disk);
    return st == STK_OK;
}

/* The same without offload, update modes, threads. Many mixes have the same one: it is run once. */
static bool reference(struct mix *m, struct outcome *o)
{
    static struct { struct mix asked; double clip; struct outcome got; } known[64];
    static uint32_t n_known;
    const uint32_t room = sizeof known / sizeof *known;
    struct mix r;
    memset(&r, 0, sizeof r); /* compared byte by byte */
    r.scene = m->scene;
    r.update = STK_UPDATE_SERIAL;
    r.params = r.opt = r.grads = STK_TIER_HOST;
    r.device = STK_DEVICE_HOST;
    r.threads = 1;
    r.micros = m->micros;
    r.accumulate = STK_ACCUMULATE_LAYER;
    r.dtype = m->dtype;
    r.optimizer = m->optimizer;
    r.tied = m->tied;
    r.freeze = m->freeze;
    r.act = STK_ACT_KEEP;
    for (uint32_t i = 0; i < n_known && i < room; i++)
        if (!memcmp(&known[i].asked, &r, sizeof r)) {
            m->clip = known[i].clip;
            *o = known[i].got;
            return true;
        }
    uint32_t at = n_known % room; /* the oldest goes */
    memcpy(&known[at].asked, &r, sizeof r);
    bool ok = mix_run(&r, o) && o->hash != 0;
    if (ok && m->scene == CLIP_ONCE) {
        r.clip = m->clip = isfinite(o->norm_at) ? 0.98 * o->norm_at : 1e9;
        ok = mix_run(&r, o);
    }
    if (!ok) return false;
    known[at].clip = m->clip;
    known[at].got = *o;
    n_known++;
    return true;
}

static void describe(const struct mix *m, const struct outcome *o, const struct outcome *want)
{
    printf("# %s: update %d params %d opt %d grads %d device %d threads %u micros %u prefetch %u "
           "accumulate %d dtype %d optimizer %d tied %d freeze %d events %d simulate %d buffer "
           "%" PRIu64 " act %d keep %u\n",
           scene_names[m->scene], m->update, m->params, m->opt, m->grads, m->device, m->threads,
           m->micros, m->prefetch, m->accumulate, m->dtype, m->optimizer, m->tied, m->freeze,
           m->events, m->simulate, m->nvme_buffer, m->act, m->keep);
    printf("# hash %016" PRIx64 ", serial %016" PRIx64 "; loss %.17g, serial %.17g; %" PRIu64
           " speculated, %" PRIu64 " undone\n",
           o->hash, want->hash, o->loss, want->loss, o->spec, o->undone);
}

static bool equal(struct mix *m, struct outcome *o)
{
    struct outcome want = { 0 };
    bool ok = reference(m, &want) && mix_run(m, o) && o->hash == want.hash && o->loss == want.loss;
    if (!ok) describe(m, o, &want);
    return ok;
}

static const struct { stk_tier params, opt, grads; const char *name; } homes[] = {
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, "host" },
    { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, "nvme" },
    { STK_TIER_HOST, STK_TIER_NVME, STK_TIER_NVME, "parameters host" },
    { STK_TIER_HOST, STK_TIER_NVME, STK_TIER_HOST, "state nvme" },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_NVME, "gradients nvme" },
    { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_HOST, "gradients host" },
    { STK_TIER_NVME, STK_TIER_HOST, STK_TIER_HOST, "parameters nvme" },
};
enum { HOMES_N = sizeof homes / sizeof *homes };

/* Every mode in every scene on every placement, with simulated time: speculation happens where it can,
 * is taken back where it must be, and is not tried where it always would be. */
TEST(modes_every_scene_and_placement)
{
    uint64_t spec[HOMES_N][SCENE_N] = { { 0 } }, undone[HOMES_N][SCENE_N] = { { 0 } };
    for (int sc = 0; sc < SCENE_N; sc++)
        for (int h = 0; h < HOMES_N; h++)
            for (int u = STK_UPDATE_CHASE; u <= STK_UPDATE_SPECULATE; u++) {
                struct mix m = { .scene = (enum scene)sc,
                                 .update = (stk_update)u,
                                 .params = homes[h].params,
                                 .opt = homes[h].opt,
                                 .grads = homes[h].grads,
                                 .device = h % 2 || h == 2 ? STK_DEVICE_SIM : STK_DEVICE_HOST_DISCRETE,
                                 .threads = 1 + (uint32_t)(h + sc) % 3,
                                 .micros = 1 + (uint32_t)(h + sc) % 2,
                                 .prefetch = 2,
                                 .events = (h + u) % 2,
                                 .simulate = true };
                struct outcome o = { 0 };
                CHECK(equal(&m, &o));
                CHECK(u == STK_UPDATE_SPECULATE || (o.spec == 0 && o.undone == 0));
                if (u != STK_UPDATE_SPECULATE) continue;
                spec[h][sc] = o.spec;
                undone[h][sc] = o.undone;
            }
    for (int h = 0; h < HOMES_N; h++) {
        bool can = homes[h].params == STK_TIER_HOST || homes[h].opt == STK_TIER_NVME;
        printf("# %-16s speculated/undone: off %" PRIu64 "/%" PRIu64 ", loose %" PRIu64 "/%" PRIu64
               ", tight %" PRIu64 "/%" PRIu64 ", once %" PRIu64 "/%" PRIu64 ", not finite %" PRIu64
               "/%" PRIu64 ", late %" PRIu64 "/%" PRIu64 "\n",
               homes[h].name, spec[h][0], undone[h][0], spec[h][1], undone[h][1], spec[h][2],
               undone[h][2], spec[h][3], undone[h][3], spec[h][4], undone[h][4], spec[h][5],
               undone[h][5]);
        if (can) CHECK(spec[h][CLIP_OFF] > 0 && spec[h][CLIP_LOOSE] > 0);
        if (can) CHECK(undone[h][CLIP_ONCE] > 0 && undone[h][NOT_FINITE_LATE] > 0);
        CHECK(spec[h][CLIP_TIGHT] == 0 && undone[h][CLIP_OFF] == 0);
        if (!can) CHECK(spec[h][CLIP_OFF] == 0);
    }
}

/* Copies that are slowed and updates that wait are in another order, and change nothing. */
TEST(modes_yield_where_memory_is_short)
{
    uint64_t paced = 0;
    for (int i = 0; i < SCENE_N * 3 * 2; i++) {
        struct mix m = { .scene = (enum scene)(i % SCENE_N),
                         .update = (stk_update)(STK_UPDATE_CHASE + i / SCENE_N % 3),
                         .params = STK_TIER_HOST, .opt = STK_TIER_HOST, .grads = STK_TIER_HOST,
                         .device = STK_DEVICE_SIM, .threads = 2, .micros = 2, .prefetch = 2,
                         .simulate = true, .short_memory = true, .events = i % 2,
                         .act = i < SCENE_N * 3 ? STK_ACT_HOST : STK_ACT_RECOMPUTE, .keep = 1 };
        struct outcome o = { 0 };
        CHECK(equal(&m, &o));
        CHECK(o.paced > 0);
        paced += o.paced;
    }
    printf("# %" PRIu64 " copies were paced\n", paced);
}

TEST(modes_random_combinations)
{
    struct rng r;
    uint32_t n = getenv("STK_SOAK") ? 5000 : (uint32_t)test_share(40), failed = 0;
    uint64_t spec = 0, undone = 0;
    rng_seed(&r, test_seed());
    for (uint32_t i = 0; i < n && failed < 5; i++) {
        uint32_t h = (uint32_t)rng_below(&r, HOMES_N);
        struct mix m = { .scene = (enum scene)rng_below(&r, SCENE_N),
                         .update = (stk_update)(STK_UPDATE_CHASE + rng_below(&r, 3)),
                         .params = homes[h].params,
                         .opt = homes[h].opt,
                         .grads = homes[h].grads,
                         .device = (stk_device_kind)rng_below(&r, 3),
                         .threads = 1 + (uint32_t)rng_below(&r, 3),
                         .micros = 1 + (uint32_t)rng_below(&r, 3),
                         .prefetch = (uint32_t)rng_below(&r, 4),
                         .accumulate = (stk_accumulate)rng_below(&r, 2),
                         .dtype = (stk_dtype)rng_below(&r, 2),
                         .optimizer = (stk_optimizer)rng_below(&r, 2),
                         .tied = rng_below(&r, 3) == 0,
                         .freeze = rng_below(&r, 4) == 0,
                         .events = rng_below(&r, 2),
                         .simulate = rng_below(&r, 2),
                         .short_memory = rng_below(&r, 2),
                         .act = (stk_act)rng_below(&r, STK_ACT_N),
                         .keep = (uint32_t)rng_below(&r, 3),
                         .nvme_buffer = rng_below(&r, 2) ? 1u << (14 + rng_below(&r, 8)) : 0 };
        if (i < HOMES_N) { /* for any seed: something is taken back, on every home */
            m.update = STK_UPDATE_SPECULATE;
            m.scene = CLIP_ONCE;
            m.params = homes[i].params;
            m.opt = homes[i].opt;
            m.grads = homes[i].grads;
        }
        struct outcome o = { 0 };
        failed += !equal(&m, &o);
        spec += o.spec;
        undone += o.undone;
    }
    printf("# %u combinations equal serial; %" PRIu64 " chunks speculated, %" PRIu64
           " taken back\n",
           n, spec, undone);
    CHECK(failed == 0 && spec > 0 && undone > 0);
}

/* --- planted faults --------------------------------------------------------------------------- */

static enum { NOTHING, UNDO_FORGOTTEN, KEPT_THOUGH_IT_BINDS } planted;
static uint32_t struck;

bool __real_spec_issue_undo(stk_engine *e, uint32_t node);
bool __wrap_spec_issue_undo(stk_engine *e, uint32_t node);
bool __wrap_spec_issue_undo(stk_engine *e, uint32_t node)
{
    if (planted != UNDO_FORGOTTEN) return __real_spec_issue_undo(e, node);
    struct spec_chunk *c = &e->spec->chunk[e->run.plan->nodes[node].chunk];
    c->done = false;
    struck++;
    run_complete(e, node);
    return true;
}

bool __real_spec_decided(stk_engine *e, bool applied);
bool __wrap_spec_decided(stk_engine *e, bool applied);
bool __wrap_spec_decided(stk_engine *e, bool applied)
{
    bool undo = __real_spec_decided(e, applied);
    if (planted != KEPT_THOUGH_IT_BINDS || !undo) return undo;
    e->spec->accept = true;
    struck++;
    return false;
}

TEST(modes_canary_a_wrong_way_back_is_found)
{
    for (int fault = UNDO_FORGOTTEN; fault <= KEPT_THOUGH_IT_BINDS; fault++)
        for (int h = 0; h < 3; h++) {
            struct mix m = { .scene = CLIP_ONCE,
                             .update = STK_UPDATE_SPECULATE,
                             .params = homes[h].params,
                             .opt = homes[h].opt,
                             .grads = homes[h].grads,
                             .device = h == 2 ? STK_DEVICE_SIM : STK_DEVICE_HOST_DISCRETE,
                             .threads = 1,
                             .micros = 1,
                             .prefetch = 2,
                             .simulate = true };
            struct outcome want, o;
            struck = 0;
            CHECK(reference(&m, &want) && want.clip_least < 1);
            planted = fault;
            bool ended = mix_run(&m, &o);
            planted = NOTHING;
            CHECK(struck > 0);
            CHECK(!ended || o.hash != want.hash);
        }
}

/* --- durable steps ---------------------------------------------------------------------------- */

/* Speculation beside durable steps: room for three versions, the same numbers, and a crash finds one
 * decided step: what a process that goes on from it computes is what serial computes. */
TEST(modes_speculate_beside_durable_steps)
{
    for (int sc = CLIP_OFF; sc < SCENE_N; sc++) {
        struct mix m = { .scene = (enum scene)sc,
                         .update = STK_UPDATE_SPECULATE,
                         .device = sc % 2 ? STK_DEVICE_SIM : STK_DEVICE_HOST_DISCRETE,
                         .threads = 2,
                         .micros = 1,
                         .prefetch = 2,
                         .simulate = true };
        struct outcome want, o = { 0 };
        struct io_sim_cfg sim = {
            .seed = 9, .latency_ns = 2000, .read_bytes_per_s = 4e9, .write_bytes_per_s = 4e9
        };
        struct stk_error err = { 0 };
        struct toy t;
        CHECK(reference(&m, &want));
        REQUIRE(io_sim_disk_new(1u << 30, &sim.disk, &err) == STK_OK);
        for (int life = 0; life < 2; life++) {
            mix_config(&t, &m, &sim);
            durable_config(&t.cfg, NULL, life == 1);
            RUN(&t, toy_open(&t));
            CHECK(place_store_room(t.e, &t.e->place) == 3);
            if (life == 0) RUN(&t, toy_fill(&t));
            else RUN(&t, stk_resume_durable(t.e, false, NULL));
            for (t.step = t.e->begun; t.step < (life ? STEPS : AT);) {
                stk_step_stats s;
                RUN(&t, toy_step(&t, 1e-3, &s));
                o.spec += s.spec_chunks;
                o.undone += s.spec_undone;
                RUN(&t, stk_durable(t.e, NULL));
            }
            RUN(&t, stk_durable_wait(t.e));
            if (life) RUN(&t, toy_hash(&t, &o.hash));
            stk_close(t.e);
        }
        printf("# %s: %" PRIu64 " speculated, %" PRIu64 " undone\n", scene_names[sc], o.spec,
               o.undone);
        CHECK(o.hash == want.hash);
        CHECK((o.spec > 0) == (sc != CLIP_TIGHT));
        io_sim_disk_free(sim.disk);
    }
}

TEST_MAIN()
