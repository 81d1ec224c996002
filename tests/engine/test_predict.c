/* tests/engine/test_predict.c - predictions: tiny plans against times computed by hand, relations that
 * hold for any plan, the simulated device in virtual time (which runs the real executor), machine
 * files, and trials, which must leave no trace in the weights. */
#include "engine/machine.h"
#include "engine/predict.h"
#include "nvme/io_sim.h"
#include "tests/engine/plan_models.h"
#include "tests/engine/world.h"

/* --- by hand ---------------------------------------------------------------------------------- */

/* Two blocks of one chunk: visits forward 0 (1 s), backward 1 (fused, 3 s), backward 0 (2 s); an
 * update of a chunk takes 1 s, a cast 0.5 s. */
static struct plan *two_blocks(struct model *m, enum plan_update update)
{
    struct stk_error err = { 0 };
    struct plan *p = NULL;
    model_make(m, 2, 1, 1024);
    m->in.in_place = true;
    m->in.update = update;
    if (plan_build(&m->in, &p, NULL, &err) != STK_OK) printf("# %s\n", err.text);
    return p;
}

static stk_machine by_hand(void)
{
    stk_machine m;
    stk_machine_init(&m, sizeof m);
    snprintf(m.name, sizeof m.name, "by hand");
    m.cores = 2;
    m.flops_per_s = 1;
    m.update_bytes_per_s = 26 * 1024;
    m.cast_bytes_per_s = 2 * 2 * 1024;
    return m;
}

static stk_prediction predict(const struct plan *p, const struct plan_input *in,
                              const stk_machine *m)
{
    struct stk_error err = { 0 };
    stk_prediction out = { .size = sizeof out };
    struct predict_in x = { .plan = p,
                            .input = in,
                            .machine = m,
                            .parts = PLAN_RUN_UPDATE | PLAN_RUN_VISITS };
    if (predict_run(&x, NULL, NULL, &out, &err) != STK_OK) {
        printf("# %s\n", err.text);
        out.step_s = -1;
    }
    return out;
}

static bool near(double a, double b, double tolerance)
{
    bool ok = fabs(a - b) <= tolerance * fabs(b) + 1e-9;
    if (!ok) printf("# %.6f is not %.6f within %.4f\n", a, b, tolerance);
    return ok;
}

static double sum_of(const stk_prediction *p)
{
    return p->compute_s + p->exposed_s.nvme + p->exposed_s.copy + p->exposed_s.update +
           p->exposed_s.gather + p->exposed_s.other;
}

TEST(predict_serial_by_hand)
{
    struct model m;
    struct plan *p = two_blocks(&m, PLAN_SERIAL);
    stk_machine x = by_hand();
    REQUIRE(p != NULL);
    stk_prediction o = predict(p, &m.in, &x);
    CHECK(near(o.step_s, 2 + 1 + 3 + 2 + 0.5, 1e-9));
    CHECK(near(o.compute_s, 6, 1e-9) && near(o.exposed_s.update, 2, 1e-9));
    CHECK(near(o.exposed_s.copy, 0.5, 1e-9) && near(sum_of(&o), o.step_s, 1e-9));
    CHECK(!strcmp(o.resource[o.busiest].name, "compute"));
    plan_free(p);
    model_free(&m);
}

/* A machine that says nothing of arithmetic serves a plan that has none; its table of drives has an end. */
TEST(predict_refuses_what_a_machine_cannot_be)
{
    struct model m;
    struct plan *p = two_blocks(&m, PLAN_SERIAL);
    stk_machine x = by_hand();
    REQUIRE(p != NULL);
    x.flops_per_s = 0;
    CHECK(predict(p, &m.in, &x).step_s == -1);
    for (uint32_t i = 0; i < p->n_visits; i++) p->visits[i].flops = 0;
    CHECK(near(predict(p, &m.in, &x).step_s, 2 + 0.5, 1e-9));
    x.n_drives = STK_NVME_MAX + 1;
    CHECK(predict(p, &m.in, &x).step_s == -1);
    plan_free(p);
    model_free(&m);
}

TEST(predict_chase_by_hand)
{
    struct model m;
    struct plan *p = two_blocks(&m, PLAN_CHASE);
    stk_machine x = by_hand();
    REQUIRE(p != NULL);
    stk_prediction o = predict(p, &m.in, &x);
    /* the update of block 1 lies under the forward visit of block 0 */
    CHECK(near(o.step_s, 1 + 1 + 3 + 2 + 0.5, 1e-9) && near(o.exposed_s.update, 1, 1e-9));
    /* a hop of a tenth after everything that is waited for: the first update; the queue of visits
     * does not wait; the last visit's and the last cast's completion */
    x.hop_ns = 100000000;
    o = predict(p, &m.in, &x);
    CHECK(near(o.step_s, 7.5 + 0.3, 1e-9));
    plan_free(p);
    model_free(&m);
}

TEST(predict_cores_are_shared_on_the_host)
{
    struct model m;
    struct plan *p = two_blocks(&m, PLAN_CHASE);
    stk_machine x = by_hand();
    REQUIRE(p != NULL);
    x.on_host = true;
    stk_prediction o = predict(p, &m.in, &x);
    /* update 0 until 1; update 1 and forward 0 share the cores until 3; backward 1 until 6; the cast
     * of block 1 wants one core of two, by which operations lose 1.3, and backward 0 both, so each goes
     * at 1/1.65 until 6.825; backward 0 until 8.325; its cast */
    CHECK(near(o.step_s, 8.825, 1e-6));
    CHECK(near(sum_of(&o), o.step_s, 1e-9));
    /* cores: 6 s of visits, 2 s of updates, two casts of 0.5 s that lose 0.65 of them */
    double cores = 0;
    for (uint32_t i = 0; i < o.n_resources; i++)
        if (!strcmp(o.resource[i].name, "cores")) cores = o.resource[i].alone_s;
    CHECK(near(cores, 8.65, 1e-6));
    plan_free(p);
    model_free(&m);
}

TEST(predict_a_shared_drive_by_hand)
{
    /* one block at one fused place, opt on NVMe: fetched at the end of the period before, written back
     * after the update, fetched again; the drive moves both at once at the rate of one */
    struct model m;
    struct stk_error err = { 0 };
    struct plan *p = NULL;
    model_make(&m, 1, 1, 1024);
    m.in.in_place = true;
    m.places[0].fused = false;
    model_home(&m, CHUNK_OPT, CHUNK_NVME);
    REQUIRE(plan_build(&m.in, &p, NULL, &err) == STK_OK);
    stk_machine x = by_hand();
    x.n_drives = 1;
    x.drives[0] = (stk_machine_drive){ .read_bytes_per_s = 10240, .write_bytes_per_s = 5120,
                                       .both_bytes_per_s = 5000, .latency_ns = 250000000 };
    stk_prediction o = predict(p, &m.in, &x);
    /* 10240 bytes are 12288 on the drive: update until 1; write until 3.4, latency until 3.65; fetch for
     * the next period until 4.85, latency until 5.1. Forward 1 to 2, backward 2 to 4, cast until 4.5 */
    CHECK(near(o.step_s, 5.1, 1e-6));
    CHECK(o.compute_s == 3 || near(o.compute_s, 3, 1e-9));
    x.checksum_bytes_per_s = 10240; /* one second after the read; what is written the update has summed */
    o = predict(p, &m.in, &x);
    CHECK(near(o.step_s, 6.1, 1e-6) && o.exposed_s.nvme > 0.5);
    plan_free(p);
    model_free(&m);
}

TEST(predict_names_the_figure_that_is_missing)
{
    struct model m;
    struct plan *p = two_blocks(&m, PLAN_CHASE);
    stk_machine x = by_hand();
    struct stk_error err = { 0 };
    stk_prediction out = { .size = sizeof out };
    struct predict_in in = { .plan = p, .input = &m.in, .machine = &x, .parts = 3 };
    REQUIRE(p != NULL);
    x.cast_bytes_per_s = 0;
    CHECK(predict_run(&in, NULL, NULL, &out, &err) == STK_ERR_CONFIG);
    CHECK(strstr(err.text, "cast_bytes_per_s") != NULL);
    plan_free(p);
    model_free(&m);
}

/* --- any plan --------------------------------------------------------------------------------- */

static stk_machine some_machine(struct rng *r)
{
    stk_machine m = by_hand();
    m.cores = 1 + pick(r, 8);
    m.on_host = pick(r, 2);
    m.flops_per_s = 1000;
    m.device_bytes_per_s = 1e8;
    m.launch_ns = pick(r, 2) * 1000;
    m.hop_ns = pick(r, 2) * 20000;
    m.copy_in_bytes_per_s = m.copy_out_bytes_per_s = 5e6;
    m.copy_both_bytes_per_s = pick(r, 2) ? 6e6 : 0;
    m.cast_bytes_per_s = 1e7;
    m.dram_bytes_per_s = pick(r, 2) ? 4e7 : 0;
    m.update_bytes_per_s = 3e7;
    m.checksum_bytes_per_s = pick(r, 2) ? 1e7 : 0;
    m.n_drives = 1;
    m.drives[0] = (stk_machine_drive){ .read_bytes_per_s = 4e6, .write_bytes_per_s = 2e6,
                                       .both_bytes_per_s = pick(r, 2) ? 3e6 : 0,
                                       .latency_ns = 100000 };
    return m;
}

static void faster_drive(stk_machine *m)
{
    m->drives[0].read_bytes_per_s *= 2;
    m->drives[0].write_bytes_per_s *= 2;
    m->drives[0].both_bytes_per_s *= 2;
}

/* Relations over random plans: nothing ends before its busiest resource, times add up, and a machine
 * whose drive is twice as fast is not slower (but for the anomalies of list scheduling, Graham 1969,
 * which are small and rare). */
TEST(predict_relations_over_random_plans)
{
    struct rng r;
    uint32_t slower = 0, n = 300, built = 0;
    rng_seed(&r, test_seed());
    for (uint32_t k = 0; k < n; k++) {
        struct model m;
        struct plan *p = NULL;
        struct stk_error err = { 0 };
        random_model(&m, &r);
        stk_machine x = some_machine(&r), y = x;
        if (m.in.own || plan_build(&m.in, &p, NULL, &err) != STK_OK) {
            model_free(&m);
            continue;
        }
        built++;
        faster_drive(&y);
        stk_prediction a = predict(p, &m.in, &x), b = predict(p, &m.in, &y);
        bool ok = a.step_s >= 0 && near(sum_of(&a), a.step_s, 1e-6);
        for (uint32_t i = 0; i < a.n_resources; i++)
            ok = ok && a.resource[i].alone_s <= a.step_s * (1 + 1e-6) + 1e-9 &&
                 a.resource[i].alone_s <= a.resource[i].busy_s * (1 + 1e-6) + 1e-9;
        ok = ok && b.step_s <= a.step_s * 1.05 + 1e-6;
        slower += b.step_s > a.step_s * 1.001;
        if (!ok) printf("# plan %u: %.6f s, sum %.6f s, faster drive %.6f s\n", k, a.step_s,
                        sum_of(&a), b.step_s);
        CHECK(ok);
        plan_free(p);
        model_free(&m);
    }
    printf("# %u plans; with a faster drive %u were slower by more than 0.1 %%\n", built, slower);
    CHECK(built > n / 2 && slower <= built / 20);
}

/* What every step must move and compute, whatever the period before left undone: each state on NVMe is
 * read and written once for its update, each chunk updated once. */
static double work_of_a_step(const struct plan_input *in, const stk_machine *x)
{
    const stk_machine_drive *d = &x->drives[0];
    double moved = 0, updated = 0;
    for (uint32_t i = 0; i < in->n_chunks; i++) {
        const struct plan_chunk_in *c = &in->chunks[i];
        if (c->frozen) continue;
        for (int s = CHUNK_PARAM; s <= CHUNK_OPT; s++)
            if (c->home[s] == CHUNK_NVME) moved += (double)((c->bytes[s] + 4095) / 4096 * 4096);
        if (c->home[CHUNK_OPT] != CHUNK_DEVICE) updated += (double)(2 * (c->bytes[CHUNK_PARAM] + c->bytes[CHUNK_OPT]) + c->bytes[CHUNK_GRAD]);
    }
    double alone = moved / d->read_bytes_per_s + moved / d->write_bytes_per_s;
    double both = d->both_bytes_per_s > 0 ? d->both_bytes_per_s / 2 / d->read_bytes_per_s +
                                                d->both_bytes_per_s / 2 / d->write_bytes_per_s
                                          : 2;
    double drive = alone / (both < 1 ? 1 : both > 2 ? 2 : both), team = updated / x->update_bytes_per_s;
    return drive > team ? drive : team;
}

/* A speculating period leaves work to the next one; a step is still not shorter than its share of it. */
TEST(predict_a_step_is_never_below_its_own_work)
{
    struct rng r;
    uint32_t built = 0, bound = 0;
    rng_seed(&r, test_seed() + 1);
    for (uint32_t k = 0; k < 800; k++) {
        struct model m;
        struct plan *p = NULL;
        struct stk_error err = { 0 };
        uint64_t least[PLAN_ARENA_N], useful[PLAN_ARENA_N];
        random_model(&m, &r);
        stk_machine x = some_machine(&r);
        double slower = 1 << pick(&r, 8); /* from everything ahead of the norm to nothing */
        x.drives[0].read_bytes_per_s /= slower;
        x.drives[0].write_bytes_per_s /= slower;
        x.drives[0].both_bytes_per_s /= slower;
        x.update_bytes_per_s /= 1 << pick(&r, 6);
        x.flops_per_s *= 100;
        if (m.in.own || m.in.mode != PLAN_TRAIN || m.in.update != PLAN_SPECULATE ||
            plan_needs(&m.in, least, useful, &err) != STK_OK) {
            model_free(&m);
            continue;
        }
        random_arenas(&m, &r, least, useful);
        if (plan_build(&m.in, &p, NULL, &err) == STK_OK) {
            stk_prediction o = predict(p, &m.in, &x);
            double own = work_of_a_step(&m.in, &x);
            built++;
            bound += o.step_s < 1.2 * own;
            if (o.step_s < own * (1 - 1e-6)) printf("# plan %u: %.6f s, its work takes %.6f s\n", k, o.step_s, own);
            CHECK(o.step_s >= own * (1 - 1e-6));
            CHECK(near(sum_of(&o), o.step_s, 1e-6));
            for (uint32_t i = 0; i < o.n_resources; i++)
                CHECK(o.resource[i].alone_s <= o.step_s * (1 + 1e-6) + 1e-9);
        }
        plan_free(p);
        model_free(&m);
    }
    printf("# %u plans, %u within a fifth of their work\n", built, bound);
    CHECK(built > 50 && bound > 3);
}

/* --- the simulated device --------------------------------------------------------------------- */

static const struct dev_model slow = { .flops_per_s = 4e9,
                                       .copy_in_bytes_per_s = 60e6,
                                       .copy_out_bytes_per_s = 50e6,
                                       .memory_bytes_per_s = 900e6,
                                       .launch_ns = 3000,
                                       .update_bytes_per_s = 300e6 };

/* Of memory that update and copies share there is too little: copies are paced, updates yield. */
static const struct dev_model short_of_memory = { .flops_per_s = 4e9,
                                                  .copy_in_bytes_per_s = 60e6,
                                                  .copy_out_bytes_per_s = 50e6,
                                                  .memory_bytes_per_s = 900e6,
                                                  .launch_ns = 3000,
                                                  .update_bytes_per_s = 140e6,
                                                  .dram_bytes_per_s = 155e6,
                                                  .copy_both_bytes_per_s = 80e6 };

/* What a place's visits take: the client's operations, in prepare mode. */
static uint64_t prepare_ns(struct toy *t, uint32_t place, stk_dir dir, bool recompute)
{
    struct dev *d = stk_device(t->e);
    struct stk_error err = { 0 };
    void *base = (void *)(uintptr_t)(1u << 20);
    stk_visit v = { .place = place, .dir = dir, .recompute = recompute, .param = base, .grad = base,
                    .in = base, .out = base, .full = base, .flow = base, .workspace = base,
                    .workspace_bytes = 8u << 20, .stream = stk_compute_stream(t->e),
                    .loss_scale = 1 };
    dev_prepare_begin(d);
    stk_status st = toy_visit(t, &v, &err);
    uint64_t ns = dev_prepare_ns(d);
    dev_prepare_end(d, NULL, &err);
    return st == STK_OK ? ns : 0;
}

static void tell_costs(struct toy *t)
{
    for (uint32_t p = 0; p < t->layers + 2; p++) {
        stk_visit_cost c = { .forward_ns = (double)prepare_ns(t, p, STK_FORWARD, false),
                             .backward_ns = (double)prepare_ns(t, p, STK_BACKWARD, false) };
        c.recompute_ns = (double)prepare_ns(t, p, STK_BACKWARD, true) - c.backward_ns;
        CHECK(c.backward_ns > 0 && stk_place_cost(t->e, p, &c) == STK_OK);
    }
}

struct variant { stk_tier params, opt, grads; uint32_t micros, prefetch; stk_update update;
    stk_accumulate accumulate; bool shared; uint64_t device_memory; stk_act act; uint32_t keep;
    bool short_of_memory; double on_device;
};

static const struct variant variants[] = {
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 1, 2, STK_UPDATE_SERIAL, 0, false, 0 },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 1, 2, STK_UPDATE_CHASE, 0, false, 0 },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 3, 1, STK_UPDATE_CHASE, 0, false, 0 },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 3, 0, STK_UPDATE_CHASE, STK_ACCUMULATE_MICRO,
      false, 0 },
    { STK_TIER_HOST, STK_TIER_NVME, STK_TIER_HOST, 2, 2, STK_UPDATE_CHASE, 0, false, 0 },
    { STK_TIER_HOST, STK_TIER_NVME, STK_TIER_NVME, 2, 2, STK_UPDATE_SERIAL, 0, true, 0 },
    { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, 2, 2, STK_UPDATE_CHASE, 0, false, 0 },
    { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, 1, 0, STK_UPDATE_CHASE, 0, true, 0 },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 3, 2, STK_UPDATE_CHASE, 0, false, 0, STK_ACT_NVME, 0 },
    { STK_TIER_NVME, STK_TIER_NVME, STK_TIER_NVME, 2, 1, STK_UPDATE_CHASE, 0, true, 0, STK_ACT_NVME, 2 },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 3, 2, STK_UPDATE_CHASE, 0, false, 0, STK_ACT_HOST, 1 },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 3, 2, STK_UPDATE_CHASE, 0, false, 0,
      STK_ACT_RECOMPUTE, 3 },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 1, 2, STK_UPDATE_CHASE, 0, false, 0, STK_ACT_KEEP, 0, true },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 3, 2, STK_UPDATE_CHASE, 0, false, 0, STK_ACT_HOST, 1, true },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 2, 2, STK_UPDATE_SPLIT, 0, false, 0, STK_ACT_HOST, 0, true },
    { STK_TIER_HOST, STK_TIER_NVME, STK_TIER_NVME, 2, 2, STK_UPDATE_CHASE, 0, false, 0, STK_ACT_HOST, 1, true },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 3, 2, STK_UPDATE_CHASE, 0, false, 0, 0, 0, false, 0.45 },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 2, 1, STK_UPDATE_SERIAL, 0, false, 0, 0, 0, false, 1 },
    { STK_TIER_HOST, STK_TIER_HOST, STK_TIER_HOST, 3, 0, STK_UPDATE_SPLIT, STK_ACCUMULATE_MICRO, false, 0, 0, 0, false,
      0.3 },
};

static void against_sim(const struct variant *v, uint32_t index)
{
    struct toy t;
    struct stk_error err = { 0 };
    struct io_sim_cfg sim = { .latency_ns = 60000, .read_bytes_per_s = 90e6,
                              .write_bytes_per_s = 60e6, .shared_rate = v->shared,
                              .dram_bytes_per_s = v->short_of_memory ? short_of_memory.dram_bytes_per_s : 0 };
    REQUIRE(io_sim_disk_new(256u << 20, &sim.disk, &err) == STK_OK);
    toy_init(&t, 5, v->micros);
    t.cfg.device = STK_DEVICE_SIM;
    t.cfg.simulate = true;
    t.cfg.seed = test_seed() + index;
    t.cfg.sim_model = v->short_of_memory ? &short_of_memory : &slow;
    t.cfg.storage = STK_STORAGE_SIM;
    t.cfg.sim_disk = &sim;
    t.cfg.nvme[0] = "disk";
    t.cfg.poison = false;
    t.cfg.params = v->params;
    t.cfg.optimizer_on_device = v->on_device;
    t.cfg.optimizer_state = v->opt;
    t.cfg.grads = v->grads;
    t.cfg.prefetch = v->prefetch;
    t.cfg.update = v->update;
    t.cfg.accumulate = v->accumulate;
    t.cfg.activations = v->act;
    t.cfg.activations_last[STK_ACT_KEEP] = v->keep;
    t.cfg.stall_ns = 20ull * 1000000000u;
    RUN(&t, toy_open(&t));
    tell_costs(&t);
    stk_prediction p = { .size = sizeof p };
    RUN(&t, stk_predict(t.e, NULL, &p));
    RUN(&t, toy_fill(&t));
    stk_step_stats s = { 0 };
    for (int i = 0; i < 3; i++) RUN(&t, toy_step(&t, 1e-3, &s));
    double step = (double)s.step_ns / 1e9, compute = (double)s.compute_ns / 1e9;
    printf("# %u: predicted %.6f s, simulated %.6f s (%+.2f %%); compute %.6f %.6f; update %.6f %.6f; "
           "nvme %.6f %.6f; copy %.6f %.6f\n",
           index, p.step_s, step, 100 * (p.step_s / step - 1), p.compute_s, compute,
           p.exposed_s.update, (double)s.exposed.update_ns / 1e9, p.exposed_s.nvme,
           (double)s.exposed.nvme_ns / 1e9, p.exposed_s.copy, (double)s.exposed.copy_ns / 1e9);
    CHECK(near(p.step_s, step, 0.01));
    CHECK(near(p.compute_s, compute, 0.01));
    CHECK(p.costs_known);
    stk_close(t.e);
    io_sim_disk_free(sim.disk);
}

TEST(predict_equals_the_simulated_device)
{
    for (uint32_t i = 0; i < sizeof variants / sizeof variants[0]; i++)
        against_sim(&variants[i], i);
}

/* --- machines --------------------------------------------------------------------------------- */

TEST(predict_machine_files)
{
    static const char *const names[] = { "rtx4090", "rtx4090-2nvme", "server8" };
    const char *folder = getenv("STK_MACHINES");
    char path[1024], why[512];
    for (size_t i = 0; folder && i < 3; i++) {
        stk_machine m;
        snprintf(path, sizeof path, "%s/%s.json", folder, names[i]);
        stk_status st = stk_machine_read(path, &m, why, sizeof why);
        if (st != STK_OK) printf("# %s\n", why);
        CHECK(st == STK_OK && !strcmp(m.name, names[i]) && !m.on_host);
        CHECK(m.n_drives == (i ? 2u : 1u) && m.flops_per_s > 1e13 && m.dram_bytes_per_s > 1e10);
    }
    static const struct { const char *text, *words; } bad[] = {
        { "{\"format\": 2, \"name\": \"x\"}", "format" },
        { "{\"format\": 1}", "name" },
        { "{\"format\": 1, \"name\": \"x\", \"figures\": {\"flops_per_s\": {\"value\": 1}}}", "source" },
        { "{\"format\": 1, \"name\": \"x\", \"figures\": {\"flops_per_s\": {\"value\": -1, \"source\": "
          "\"s\"}}}", "flops_per_s" },
        { "{\"format\": 1, \"name\": \"x\", \"figures\": {\"flop_per_s\": {\"value\": 1, \"source\": "
          "\"s\"}}}", "not a figure" },
        { "{\"format\": 1, \"name\": \"x\", \"drives\": [{}]}", "read_bytes_per_s" },
        { "{\"format\": 1, \"name\": \"x\", \"speed\": 3}", "speed" },
        { "[", "" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        stk_machine m;
        snprintf(path, sizeof path, "%s/machine.json", world_dir(NULL));
        FILE *f = fopen(path, "w");
        REQUIRE(f != NULL);
        fputs(bad[i].text, f);
        fclose(f);
        why[0] = '\0';
        CHECK(stk_machine_read(path, &m, why, sizeof why) != STK_OK);
        CHECK(strstr(why, bad[i].words) != NULL && why[0]);
    }
}

/* Another machine: planned, predicted, never run. */
TEST(predict_for_another_machine)
{
    struct toy t;
    stk_machine m;
    const char *folder = getenv("STK_MACHINES");
    char path[1024], why[512];
    if (!folder) return;
    snprintf(path, sizeof path, "%s/rtx4090-2nvme.json", folder);
    REQUIRE(stk_machine_read(path, &m, why, sizeof why) == STK_OK);
    toy_init(&t, 4, 2);
    t.cfg.machine = &m;
    t.cfg.params = t.cfg.optimizer_state = STK_TIER_NVME;
    RUN(&t, stk_open(&t.cfg, &t.e));
    RUN(&t, toy_describe(&t));
    CHECK(REFUSED(stk_seal(t.e, false), STK_ERR_CONFIG, t.e, "rtx4090-2nvme", "dry"));
    RUN(&t, stk_seal(t.e, true));
    stk_prediction p = { .size = sizeof p };
    RUN(&t, stk_predict(t.e, NULL, &p));
    CHECK(p.step_s > 0 && p.nvme_bytes > 0 && !p.costs_known && p.nvme_read_bytes > 0);
    CHECK(world_table(t.e, "device", NULL) == p.device_bytes && p.device_bytes > 0);
    stk_close(t.e);
}

/* --- transfers in flight ---------------------------------------------------------------------- */

static void put_transfer(struct predict_world *w, bool write, uint64_t bytes)
{
    struct predict_work work = { .ns = 1e6, .bytes = bytes };
    predict_io_put(w, 0, write ? IO_WRITE_BACK : IO_DEMAND, write, &work);
}

/* As nvme/io.c: at most so many bytes, writes beside reads half of them, and one of any size always. */
TEST(predict_bytes_in_flight)
{
    struct stk_error err = { 0 };
    struct predict_world *w;
    struct predict_drive *d;
    CHECK_OK(predict_world_new(&w, &err), &err);
    d = &w->drive[0];
    d->limit_bytes = 16 << 20;
    for (int i = 0; i < 4; i++) put_transfer(w, false, 5 << 20);
    CHECK(d->in_flight[0] == 3 && d->bytes[0] == 15 << 20);
    put_transfer(w, true, 5 << 20);
    predict_io_done(w, 0, false, 5 << 20);
    CHECK(d->in_flight[0] == 3 && d->in_flight[1] == 0); /* the fourth read went first */
    predict_io_done(w, 0, false, 5 << 20);
    put_transfer(w, true, 5 << 20);
    CHECK(d->in_flight[0] == 2 && d->in_flight[1] == 1); /* a second write would be beyond the half */
    predict_io_done(w, 0, false, 5 << 20);
    CHECK(d->in_flight[1] == 1);
    predict_io_done(w, 0, false, 5 << 20);
    predict_io_done(w, 0, true, 5 << 20);
    CHECK(d->in_flight[1] == 1 && d->bytes[0] == 0);
    predict_io_done(w, 0, true, 5 << 20);
    put_transfer(w, false, 64 << 20);
    CHECK(d->in_flight[0] == 1);
    predict_world_free(w);
}

/* --- trials ----------------------------------------------------------------------------------- */

static stk_status try_all(struct toy *t, uint32_t *n)
{
    struct stk_error err = { 0 };
    stk_status st;
    stk_visit v;
    bool inputs = false;
    uint32_t passes = 1, before = 0;
    for (*n = 0; (st = stk_trial_next(t->e, &v)) == STK_OK; ++*n) {
        passes += *n > 0 && v.index <= before; /* each in the plan's order */
        before = v.index;
        if (!inputs) STK_TRY(toy_inputs(t, 1, &err));
        inputs = true;
        CHECK(v.micro == 0 && v.param && (v.dir == STK_FORWARD || v.grad || t->freeze_first));
        STK_TRY(toy_visit(t, &v, &err));
        STK_TRY(stk_trial_done(t->e, &v));
    }
    CHECK(st != STK_END || passes >= 2);
    return st == STK_END ? STK_OK : st;
}

static uint64_t trained(const struct variant *x, stk_device_kind device, bool dry, bool trial,
                        bool *ok)
{
    struct toy t;
    uint64_t hash = 0;
    uint32_t n = 0;
    stk_machine m;
    stk_prediction p = { .size = sizeof p };
    toy_init(&t, 3, 2);
    t.cfg.device = device;
    t.cfg.device_memory = device == STK_DEVICE_HOST ? 0 : 64u << 20;
    t.cfg.params = x->params;
    t.cfg.optimizer_state = x->opt;
    t.cfg.grads = x->grads;
    t.cfg.nvme[0] = world_dir("nvme");
    stk_status st = stk_open(&t.cfg, &t.e);
    if (st == STK_OK) st = toy_describe(&t);
    if (st == STK_OK && trial) st = stk_machine_measure(t.e, &m);
    if (st == STK_OK) st = stk_seal(t.e, dry);
    if (st == STK_OK && trial) st = try_all(&t, &n);
    if (st == STK_OK && trial && x->opt == STK_TIER_HOST) st = stk_predict(t.e, &m, &p);
    if (trial && x->opt == STK_TIER_HOST) *ok = st == STK_OK && p.costs_known && p.step_s > 0;
    if (trial && n == 0) *ok = false;
    if (st == STK_OK && !dry) st = toy_fill(&t);
    for (int i = 0; st == STK_OK && !dry && i < 3; i++) st = toy_step(&t, 1e-3, NULL);
    if (st == STK_OK && !dry) st = toy_hash(&t, &hash);
    if (st != STK_OK) {
        printf("# %s: %s\n", stk_status_name(st), t.e ? stk_error_text(t.e) : "?");
        *ok = false;
    }
    stk_close(t.e);
    return hash;
}

TEST(predict_trials_leave_the_weights_alone)
{
    static const stk_device_kind devices[] = { STK_DEVICE_HOST, STK_DEVICE_HOST_DISCRETE };
    for (int d = 0; d < 2; d++)
        for (uint32_t i = 1; i < 7; i += 5) {
            bool ok = true;
            uint64_t plain = trained(&variants[i], devices[d], false, false, &ok);
            uint64_t tried = trained(&variants[i], devices[d], false, true, &ok);
            CHECK(ok && plain == tried && plain != 0);
            trained(&variants[i], devices[d], true, true, &ok);
            CHECK(ok);
        }
}

static bool params_are_zero(const stk_engine *e)
{
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        const struct stk_chunk *c = &e->layout->chunks[i];
        const uint8_t *p = c->host[CHUNK_PARAM];
        for (uint64_t k = 0; p && k < chunk_bytes(e->layout, c, CHUNK_PARAM); k++)
            if (p[k]) return false;
    }
    return true;
}

/* A client whose own work fails goes on without a prediction: what it does not fill is zero all the
 * same, and a place of which half was tried is not known. */
TEST(predict_trials_broken_off)
{
    for (int done = 0; done < 2; done++) {
        struct toy t;
        stk_prediction p = { .size = sizeof p };
        stk_machine m = by_hand();
        stk_visit v;
        float x = 1;
        toy_init(&t, 2, 1);
        RUN(&t, toy_open(&t));
        for (int i = 0; i < 3; i++) {
            RUN(&t, stk_trial_next(t.e, &v));
            if (i < 2 || done) RUN(&t, stk_trial_done(t.e, &v));
        }
        CHECK(!params_are_zero(t.e));
        RUN(&t, stk_tensor_read(t.e, 0, STK_READ_PARAM, 0, 1, &x, STK_F32));
        CHECK(x == 0 && params_are_zero(t.e));
        RUN(&t, stk_predict(t.e, &m, &p));
        CHECK(!p.costs_known);
        CHECK(stk_trial_next(t.e, &v) == STK_END && params_are_zero(t.e));
        stk_close(t.e);
    }
}

/* A trial's numbers would lie in the weights, and then zeros. */
TEST(predict_no_trial_after_weights_are_there)
{
    struct toy t;
    stk_visit v;
    uint64_t before = 0, after = 1;
    toy_init(&t, 2, 1);
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    RUN(&t, toy_hash(&t, &before));
    CHECK(REFUSED(stk_trial_next(t.e, &v), STK_ERR_STATE, t.e, "before anything is filled"));
    RUN(&t, toy_hash(&t, &after));
    CHECK(before == after);
    stk_close(t.e);
}

/* After a dry seal visits that are alike in all but the boundary they write have room for theirs. */
TEST(predict_trials_dry_have_room_for_every_boundary)
{
    struct toy t;
    stk_visit v;
    uint32_t first, wide = 0;
    enum { IN = 4096, OUT = 65536 };
    toy_init(&t, 2, 1);
    RUN(&t, stk_open(&t.cfg, &t.e));
    stk_place places[4] = { { .flops = 1 },
                            { .in_bytes = IN, .full_bytes = IN, .flops = 5 },
                            { .in_bytes = IN, .full_bytes = IN, .flops = 5 },
                            { .in_bytes = OUT, .full_bytes = IN, .flops = 7, .fused = true } };
    for (uint32_t i = 0; i < 4; i++) {
        char name[16];
        snprintf(name, sizeof name, "block %u", i);
        stk_tensor_desc d = { .name = name, .n_elems = 4096 };
        RUN(&t, stk_block(t.e, name, &d, 1, &places[i].block, &first));
    }
    RUN(&t, stk_order(t.e, places, 4));
    RUN(&t, stk_seal(t.e, true));
    stk_status st;
    while ((st = stk_trial_next(t.e, &v)) == STK_OK) {
        const uint8_t *out = v.out, *full = v.full;
        if (v.place == 2 && v.dir == STK_FORWARD) {
            wide++;
            CHECK(out && full && full >= out + OUT);
        }
        RUN(&t, stk_trial_done(t.e, &v));
    }
    CHECK(st == STK_END && wide > 0);
    stk_close(t.e);
}

/* What stk_seal would refuse is refused before seconds are spent on measuring. */
TEST(predict_missing_folder_is_refused_before_measuring)
{
    struct toy t;
    stk_machine m;
    char folder[600];
    toy_init(&t, 2, 1);
    snprintf(folder, sizeof folder, "%s/missing", world_dir("nvme"));
    t.cfg.nvme[0] = folder;
    RUN(&t, stk_open(&t.cfg, &t.e));
    RUN(&t, toy_describe(&t));
    CHECK(REFUSED(stk_machine_measure(t.e, &m), STK_ERR_IO, t.e, "make the folder first"));
    CHECK(REFUSED(stk_seal(t.e, true), STK_ERR_IO, t.e, "make the folder first"));
    stk_close(t.e);
}

TEST(predict_is_refused_where_it_means_nothing)
{
    struct toy t;
    stk_prediction p = { .size = sizeof p };
    stk_machine m = by_hand();
    stk_visit v = { 0 };
    toy_init(&t, 2, 1);
    RUN(&t, stk_open(&t.cfg, &t.e));
    CHECK(REFUSED(stk_predict(t.e, &m, &p), STK_ERR_STATE, t.e, "stk_predict"));
    CHECK(REFUSED(stk_trial_next(t.e, &v), STK_ERR_STATE, t.e, "stk_trial_next"));
    RUN(&t, toy_describe(&t));
    RUN(&t, stk_seal(t.e, false));
    CHECK(REFUSED(stk_machine_measure(t.e, &m), STK_ERR_STATE, t.e, "stk_machine_measure"));
    CHECK(REFUSED(stk_predict(t.e, NULL, &p), STK_ERR_CONFIG, t.e, "no machine"));
    RUN(&t, toy_fill(&t));
    RUN(&t, toy_step(&t, 1e-3, NULL));
    CHECK(REFUSED(stk_trial_next(t.e, &v), STK_ERR_STATE, t.e, "before the first step"));
    stk_close(t.e);
}

int main(int argc, char **argv) { return test_run_all(argc, argv); }
