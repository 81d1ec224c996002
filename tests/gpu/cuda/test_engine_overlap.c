/* tests/gpu/cuda/test_engine_overlap.c - what the engine has done on the card at the same time, from the stand-in's
 * trace and the engine's, in one virtual time.
 *
 * WHAT IT PROVES. An operation of the card begins when its stream, its events and its engine (compute, link in, link
 * out) are ready, takes the time that its bytes or FLOPs take, and an engine does one thing at a time; the engine's own
 * lanes and the update team run in the same virtual time. So intervals that overlap were run at once by this schedule:
 * nothing forbade it and nobody was late. Blocks are known by addresses: a copy-in by the home it reads, a copy-out by the
 * home it writes. */
#include "tests/gpu/cuda/engine_rig.h"

TEST_MAIN()

enum { LAYERS = 6, VISITS_MAX = 64, STEPS = 8 };

static struct visit { uint32_t place; stk_dir dir; uint64_t first, last; } visits[VISITS_MAX];
static uint32_t n_visits;

static void queued(struct toy *t, const stk_visit *v)
{
    struct standin_counts c;
    standin_counts_read(&c);
    (void)t;
    if (n_visits == VISITS_MAX) return;
    uint64_t first = n_visits ? visits[n_visits - 1].last + 1 : 1;
    visits[n_visits++] = (struct visit){ v->place, v->dir, first, c.queued };
}

/* Calls that wait for the card or change what it has, so far. */
static uint64_t forbidden_calls(void)
{
    static const char *const names[] = { "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy",
                                         "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaHostRegister",
                                         "cudaHostUnregister", "cudaStreamCreateWithFlags", "cudaStreamDestroy",
                                         "cudaEventCreateWithFlags", "cudaEventDestroy" };
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) sum += standin_calls_of(names[i]);
    struct standin_counts c;
    standin_counts_read(&c);
    return sum + c.synchronisations;
}

/* --- bytes of a step --------------------------------------------------------------------------- */

struct moved { uint64_t in, out; };

static struct moved moved_now(void)
{
    struct standin_counts c;
    standin_counts_read(&c);
    return (struct moved){ c.copied_bytes[cudaMemcpyHostToDevice], c.copied_bytes[cudaMemcpyDeviceToHost] };
}

static void bytes_of(const char *name, const struct placing *p, uint64_t tight)
{
    struct toy t;
    struct io_sim_cfg disk = rig_disk(test_seed());
    stk_prediction plan = { .size = sizeof plan };
    stk_step_stats s = { 0 };
    rig_card_new(test_seed(), true);
    rig_toy(&t, p, test_seed(), &disk);
    if (p->tight) t.cfg.device_memory = tight;
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    RUN(&t, stk_predict(t.e, NULL, &plan));
    const uint64_t inputs = t.micros * toy_rows(&t) * 8; /* the client's own copy */
    for (int i = 0; i < STEPS; i++) {
        struct moved before = moved_now();
        uint64_t calls = forbidden_calls();
        RUN(&t, toy_step(&t, 1e-3, &s));
        struct moved after = moved_now();
        CHECK(forbidden_calls() == calls);
        if (i == 0) continue; /* without an update */
        CHECK(after.in - before.in - inputs == plan.copy_in_bytes && after.out - before.out == plan.copy_out_bytes);
        CHECK(s.copy_in_bytes == plan.copy_in_bytes && s.copy_out_bytes == plan.copy_out_bytes);
        if (i == STEPS - 1)
            printf("# %-28s plan %8" PRIu64 " in, %8" PRIu64 " out; over the link %8" PRIu64 ", %8" PRIu64 "; engine's count %8" PRIu64
                   ", %8" PRIu64 "\n", name, plan.copy_in_bytes, plan.copy_out_bytes, after.in - before.in - inputs,
                   after.out - before.out, s.copy_in_bytes, s.copy_out_bytes);
    }
    stk_close(t.e);
    io_sim_disk_free(disk.disk);
    CHECK(rig_seen.found == 0);
}

TEST(cuda_engine_bytes_over_the_link_are_the_plans)
{
    static const struct { const char *name; struct placing p; } list[] = {
        { "host, serial, keep", RIG_PLACING_HOST },
        { "host, chase, recompute, tight", { 2, 2, 2, STK_ACT_RECOMPUTE, STK_UPDATE_CHASE, 0, 1, true, 0 } },
        { "host, chase, micro-major", { 2, 2, 2, STK_ACT_RECOMPUTE, STK_UPDATE_CHASE, 1, 2, true, 0 } },
        { "host, split, host", { 2, 2, 2, STK_ACT_HOST, STK_UPDATE_SPLIT, 0, 2, false, 0 } },
        { "state on NVMe, chase, host", { 2, 3, 3, STK_ACT_HOST, STK_UPDATE_CHASE, 0, 2, true, 0 } },
        { "NVMe, serial, keep", { 3, 3, 3, STK_ACT_KEEP, STK_UPDATE_SERIAL, 0, 2, false, 0 } },
        { "NVMe, chase, NVMe", { 3, 3, 3, STK_ACT_NVME, STK_UPDATE_CHASE, 0, 2, false, 0 } },
    };
    uint64_t tight = rig_tight(&list[1].p, 2);
    REQUIRE(tight > 0);
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) bytes_of(list[i].name, &list[i].p, tight + (256u << 10));
}

/* --- at the same time -------------------------------------------------------------------------- */

struct span { uint64_t begin, end; };

static struct span both(struct span a, struct span b)
{
    struct span r = { a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end };
    if (r.end < r.begin) r.end = r.begin;
    return r;
}

static uint64_t length(struct span s) { return s.end - s.begin; }

/* The block whose home of this state holds the address; UINT32_MAX: none. */
static uint32_t block_at(const struct toy *t, enum chunk_state s, const void *p)
{
    const struct stk_layout *l = t->e->layout;
    for (uint32_t i = 0; i < l->n_chunks; i++) {
        const uint8_t *home = l->chunks[i].host[s];
        if (home && (const uint8_t *)p >= home && (const uint8_t *)p < home + t->e->pchunks[i].bytes[s]) return t->e->pchunks[i].block;
    }
    return UINT32_MAX;
}

/* Updates in the order of their ends: one member, so each begins when the one before has ended. */
static uint32_t updates(const struct toy *t, struct span *out, uint32_t most)
{
    const struct trace_ring *r = &t->e->trace.lane;
    uint32_t n = 0;
    uint64_t last = 0;
    for (uint64_t i = r->n > r->cap ? r->n - r->cap : 0; i < r->n && n < most; i++) {
        const struct trace_event *x = &r->events[i % r->cap];
        if (x->what != TRACE_NODE || x->plan->nodes[x->id].kind != PLAN_UPDATE) continue;
        struct span s = { x->begin_ns > last ? x->begin_ns : last, x->end_ns };
        last = x->end_ns;
        if (s.end > s.begin) out[n++] = s;
    }
    return n;
}

struct at_once { uint64_t ns, visits, three[3]; };

/* Time in which a backward visit computes, its successor's parameters come, its predecessor's gradients go, and
 * something is updated; and with one of the last three left out. */
static struct at_once look(const struct toy *t)
{
    static struct span update[4096];
    const struct standin_op *op;
    const uint64_t n = standin_trace(&op);
    const uint32_t n_update = updates(t, update, 4096);
    struct at_once r = { 0 };
    for (uint32_t v = 0; v < n_visits; v++) {
        if (visits[v].dir != STK_BACKWARD || visits[v].place == 0) continue;
        const uint32_t next = t->e->pplaces[visits[v].place - 1].block,
                       before = visits[v].place < LAYERS + 1 ? t->e->pplaces[visits[v].place + 1].block : UINT32_MAX - 1;
        uint64_t sum = 0;
        for (uint64_t c = 0; c < n; c++) {
            if (op[c].engine != STANDIN_COMPUTE || op[c].number < visits[v].first || op[c].number > visits[v].last) continue;
            struct span compute = { op[c].begin_ns, op[c].end_ns };
            for (uint64_t i = 0; i < n; i++) {
                struct span copy = both(compute, (struct span){ op[i].begin_ns, op[i].end_ns });
                if (length(copy) == 0) continue;
                bool in = op[i].kind == STANDIN_COPY_IN && block_at(t, CHUNK_PARAM, op[i].from) == next;
                bool out = op[i].kind == STANDIN_COPY_OUT && block_at(t, CHUNK_GRAD, op[i].to) == before;
                for (uint32_t u = 0; (in || out) && u < n_update; u++) r.three[in ? 1 : 0] += length(both(copy, update[u]));
                for (uint64_t o = 0; in && o < n; o++) {
                    if (op[o].kind != STANDIN_COPY_OUT || block_at(t, CHUNK_GRAD, op[o].to) != before) continue;
                    struct span all = both(copy, (struct span){ op[o].begin_ns, op[o].end_ns });
                    r.three[2] += length(all);
                    for (uint32_t u = 0; length(all) > 0 && u < n_update; u++) sum += length(both(all, update[u]));
                }
            }
        }
        r.ns += sum;
        r.visits += sum > 0;
    }
    return r;
}

static struct at_once at_once(uint64_t memory, double link_bytes_per_s, double update_bytes_per_s)
{
    static const struct placing p = { 2, 2, 2, STK_ACT_KEEP, STK_UPDATE_SPECULATE, 0, 1, true, 0 };
    struct toy t;
    struct at_once r = { 0 };
    struct io_sim_cfg disk = rig_disk(test_seed());
    uint64_t from = 0, to = 0, calls = 0;
    stk_step_stats s = { 0 };
    rig_card_new(test_seed(), true);
    rig_card.cfg.copy_in_bytes_per_s = rig_card.cfg.copy_out_bytes_per_s = link_bytes_per_s;
    rig_card.update_bytes_per_s = update_bytes_per_s;
    rig_toy(&t, &p, test_seed(), &disk);
    t.layers = LAYERS;
    t.cfg.device_memory = memory;
    t.cfg.trace_bytes = 1u << 20;
    t.cfg.clip = 1e9; /* never binds */
    t.hook = queued;
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    for (int i = 0; st == STK_OK && i < STEPS; i++) {
        struct standin_counts c;
        n_visits = 0;
        calls = forbidden_calls();
        standin_counts_read(&c);
        from = stk_now_ns(t.e);
        st = toy_step(&t, 1e-3, &s);
        to = stk_now_ns(t.e);
        visits[0].first = c.queued + 1;
        CHECK(forbidden_calls() == calls);
    }
    if (st == STK_OK) r = look(&t);
    else printf("# %s\n", stk_error_text(t.e));
    CHECK(st == STK_OK);
    printf("# %d KiB, link %.1f, update %.1f GB/s: step %.0f us, %d chunks updated ahead of the norm; compute, the next block's copy-in, "
           "the last one's copy-out and an update at once: %.1f us in %d of %d visits (without in %.1f, out %.1f, update %.1f us)\n",
           (int)(memory >> 10), link_bytes_per_s / 1e9, update_bytes_per_s / 1e9, (double)(to - from) / 1e3, (int)s.spec_chunks,
           (double)r.ns / 1e3, (int)r.visits, (int)n_visits, (double)r.three[0] / 1e3, (double)r.three[1] / 1e3, (double)r.three[2] / 1e3);
    stk_close(t.e);
    io_sim_disk_free(disk.disk);
    CHECK(rig_seen.found == 0);
    return r;
}

/* Rates that take about as long for a block's bytes as its visits do, so that each has the others beside it. */
TEST(cuda_engine_copies_compute_and_update_at_once)
{
    static const double link[] = { 0.2e9, 0.4e9, 0.8e9 };
    uint64_t tight = rig_tight(&(struct placing){ 2, 2, 2, STK_ACT_KEEP, STK_UPDATE_SPECULATE, 0, 1, true, 0 }, LAYERS), visits_n = 0;
    REQUIRE(tight > 0);
    for (int k = 0; k < 3; k++)
        for (int u = 0; u < 2; u++) {
            struct at_once r = at_once(tight, link[k], u ? 5e9 : 2.5e9);
            CHECK(k > 1 || r.ns > 0);
            visits_n += r.visits;
        }
    CHECK(visits_n >= 8);
}
