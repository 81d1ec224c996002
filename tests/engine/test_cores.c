/* tests/engine/test_cores.c - the division of cores and the teams of several NUMA nodes. The machine that
 * tests run on may have one node: machines of more are made up, and a training run is told that its two
 * processors are two nodes. What that cannot show is time. */
#include "engine/engine.h"
#include "base/sys.h"
#include "tests/engine/toy.h"
#include "tests/test.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>

/* --- the division: pure ------------------------------------------------------------------------ */

/* `nodes` with these cores, two hardware threads each. */
static struct topology *machine(const uint32_t *cores, uint32_t nodes, uint32_t quota)
{
    static struct topology_found f;
    static struct topology_cpu cpu[512];
    struct topology *t = NULL;
    uint32_t all = 0, n = 0;
    for (uint32_t k = 0; k < nodes; k++) all += cores[k];
    for (uint32_t k = 0, core = 0; k < nodes; k++)
        for (uint32_t i = 0; i < cores[k]; i++, core++)
            for (uint32_t h = 0; h < 2; h++) cpu[n++] = (struct topology_cpu){ core + h * all, core, k };
    f = (struct topology_found){ .source = "made", .n = n, .quota = quota, .cpu = cpu };
    CHECK(topology_make(&f, &t, NULL) == STK_OK);
    return t;
}

static struct cores divide(const uint32_t *cores, uint32_t nodes, uint32_t quota, struct cores_ask ask,
                           char *text)
{
    struct topology *t = machine(cores, nodes, quota);
    struct cores c;
    cores_divide(t, &ask, &c);
    if (text) {
        cores_text(&c, &ask, t, text, 320);
        printf("# cores: %s\n", text);
    }
    topology_close(t);
    return c;
}

TEST(cores_mem_26_one_thread_a_core_within_the_quota)
{
    char text[320];
    uint32_t n[] = { 8 };
    struct cores_ask host = { .on_host = true, .nvme = true };
    struct cores c = divide(n, 1, TOPOLOGY_NO_QUOTA, host, text);
    CHECK(c.compute == 8 && c.update == 8 && c.all == 8 && c.cpus == 16 && c.n_teams == 1);
    CHECK(strstr(text, "8 for compute, 8 for the update, of 8 (16 processors)") == text);
    CHECK(strstr(text, "one thread a core") && strstr(text, "shared by"));
    c = divide(n, 1, 2, host, text);
    CHECK(c.compute == 2 && c.update == 2 && strstr(text, "quota is 2"));
}

TEST(cores_of_the_client_win)
{
    char text[320];
    uint32_t n[] = { 8, 8 };
    struct cores_ask ask = { .compute = 3, .update = 5, .on_host = true };
    struct cores c = divide(n, 2, TOPOLOGY_NO_QUOTA, ask, text);
    CHECK(c.compute == 3 && c.update == 5 && c.n_teams == 2 && strstr(text, "as asked"));
    CHECK(c.members[0] + c.members[1] == 5);
    ask.update = 1; /* fewer than nodes: one team */
    c = divide(n, 2, TOPOLOGY_NO_QUOTA, ask, text);
    CHECK(c.update == 1 && c.n_teams == 1 && c.members[0] == 1 && strstr(text, "interleaved"));
    ask = (struct cores_ask){ .update = 9, .nvme = true }; /* nothing is taken off for lanes */
    c = divide(n, 1, TOPOLOGY_NO_QUOTA, ask, text);
    CHECK(c.update == 9 && c.compute == 8 && strstr(text, "the update as asked"));
}

/* Compute never depends on where states lie, or bits would. */
TEST(cores_compute_is_the_same_for_any_placement)
{
    char text[320];
    uint32_t n[] = { 16 };
    uint32_t update[2][2];
    for (int host = 0; host < 2; host++)
        for (int nvme = 0; nvme < 2; nvme++) {
            struct cores_ask ask = { .on_host = host, .nvme = nvme };
            struct cores c = divide(n, 1, TOPOLOGY_NO_QUOTA, ask, text);
            CHECK(c.compute == 16);
            update[host][nvme] = c.update;
        }
    CHECK(update[1][0] == 16 && update[1][1] == 16 && update[0][0] == 16 && update[0][1] == 15);
    n[0] = 7; /* too few to leave one */
    struct cores c = divide(n, 1, TOPOLOGY_NO_QUOTA, (struct cores_ask){ .nvme = true }, text);
    CHECK(c.update == 7);
}

TEST(cores_mem_28_members_follow_the_nodes)
{
    char text[320];
    uint32_t even[] = { 8, 8 }, odd[] = { 2, 6 }, tiny[] = { 1, 1, 30 };
    struct cores_ask ask = { .on_host = true };
    struct cores c = divide(even, 2, TOPOLOGY_NO_QUOTA, ask, text);
    CHECK(c.n_teams == 2 && c.members[0] == 8 && c.members[1] == 8);
    CHECK(strstr(text, "the update: 8 on node 0, 8 on node 1"));
    c = divide(odd, 2, TOPOLOGY_NO_QUOTA, ask, text);
    CHECK(c.members[0] == 2 && c.members[1] == 6);
    c = divide(odd, 2, 4, ask, text);
    CHECK(c.members[0] == 1 && c.members[1] == 3);
    c = divide(tiny, 3, 3, ask, text);
    CHECK(c.members[0] == 1 && c.members[1] == 1 && c.members[2] == 1);
    for (uint32_t update = 3; update < 70; update++) {
        ask.update = update;
        c = divide(tiny, 3, TOPOLOGY_NO_QUOTA, ask, NULL);
        uint32_t sum = 0;
        for (uint32_t k = 0; k < 3; k++) {
            sum += c.members[k];
            CHECK(c.members[k] >= 1);
        }
        CHECK(sum == update && c.n_teams == 3);
    }
}

TEST(cores_deal_alternates_and_balances)
{
    enum { N = 4000 };
    static uint64_t bytes[N];
    static uint8_t team[N];
    struct cores c = { .n_teams = 2, .members = { 8, 8 } };
    for (uint32_t i = 0; i < N; i++) bytes[i] = 5242880;
    cores_deal(&c, bytes, N, team);
    for (uint32_t i = 0; i < N; i++) CHECK(team[i] == i % 2); /* both nodes work all the time */
    c = (struct cores){ .n_teams = 3, .members = { 2, 6, 4 } };
    uint64_t sum[3] = { 0 }, all = 0, most = 0;
    srand((unsigned)test_seed());
    for (uint32_t i = 0; i < N; i++) {
        bytes[i] = 1u + (uint32_t)rand() % 5242880u;
        all += bytes[i];
        if (bytes[i] > most) most = bytes[i];
    }
    cores_deal(&c, bytes, N, team);
    for (uint32_t i = 0; i < N; i++) sum[team[i]] += bytes[i];
    for (uint32_t k = 0; k < 3; k++) {
        double part = (double)all * c.members[k] / 12;
        CHECK((double)sum[k] > part - 3.0 * (double)most && (double)sum[k] < part + 3.0 * (double)most);
    }
    cores_deal(&c, bytes, 0, team);
}

/* hwloc's own two-socket machine, where this build has it. */
TEST(cores_mem_28_two_sockets_of_hwloc)
{
    struct topology *t = NULL;
    struct stk_error err = { 0 };
    if (topology_open("synthetic:pack:2 [numa] core:12 pu:2", &t, &err) != STK_OK) SKIP("a build without hwloc");
    struct cores_ask ask = { .on_host = true };
    struct cores c;
    cores_divide(t, &ask, &c);
    CHECK(c.compute == 24 && c.update == 24 && c.n_teams == 2 && c.members[0] == 12 && c.members[1] == 12);
    topology_close(t);
}

static bool noted(const stk_engine *e, const char *words)
{
    const char *line;
    for (uint32_t i = 0; stk_note(e, i, &line); i++)
        if (strstr(line, words)) return true;
    return false;
}

/* A device of the host's in memory of its own computes on the same cores. */
TEST(cores_of_a_discrete_host_device_are_shared)
{
    static const stk_device_kind devices[] = { STK_DEVICE_HOST, STK_DEVICE_HOST_DISCRETE };
    for (int k = 0; k < 2; k++) {
        struct toy t;
        toy_init(&t, 1, 1);
        t.cfg.compute_threads = t.cfg.update_threads = 0;
        t.cfg.device = devices[k];
        t.cfg.device_memory = k ? 64u << 20 : 0;
        CHECK(stk_open(&t.cfg, &t.e) == STK_OK && noted(t.e, "shared by compute and update"));
        stk_close(t.e);
    }
}

/* hwloc is told of two nodes: they are nothing to a run in simulation, and not to be bound to. */
TEST(cores_simulation_and_another_machine_bind_nothing)
{
    setenv("HWLOC_SYNTHETIC", "pack:2 [numa] core:1 pu:1", 1);
    for (int simulate = 0; simulate < 2; simulate++) {
        struct toy t;
        toy_init(&t, 2, 1);
        t.cfg.simulate = simulate;
        t.cfg.compute_threads = 1;
        t.cfg.update_threads = simulate ? 0 : 2;
        CHECK(stk_open(&t.cfg, &t.e) == STK_OK && toy_describe(&t) == STK_OK);
        CHECK(!simulate || (t.e->cores.n_nodes == 1 && t.e->cores.n_teams == 1));
        CHECK(stk_seal(t.e, false) == STK_OK && !noted(t.e, "refuses to place"));
        stk_close(t.e);
    }
    unsetenv("HWLOC_SYNTHETIC");
}

/* --- training on two teams --------------------------------------------------------------------- */

enum { ONE_TEAM, TWO_TEAMS, TWO_NODES };

/* Two of our processors as two nodes. Both lie on the machine's first node in truth. */
static struct topology *two_nodes(void)
{
    struct topology *here = NULL, *t = NULL;
    if (topology_open("", &here, NULL) != STK_OK) return NULL;
    if (here->n_cpus >= 2) {
        struct topology_cpu cpu[2] = { here->cpu[0], here->cpu[1] };
        uint32_t os = here->node[0].os;
        static struct topology_found f;
        cpu[0].node = 0;
        cpu[1].node = 1;
        cpu[1].core = cpu[0].core + 1;
        f = (struct topology_found){ .source = "made", .n = 2, .quota = 2, .here = true, .cpu = cpu };
        if (topology_make(&f, &t, NULL) == STK_OK) t->node[0].os = t->node[1].os = os;
    }
    topology_close(here);
    return t;
}

/* linux/mempolicy.h: MPOL_PREFERRED 1, MPOL_INTERLEAVE 3, MPOL_F_ADDR 2. -1: none of this page is ours
 * alone, or the system does not say. */
static int policy_of(const uint8_t *at, uint64_t size_bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)at + page - 1) / page * page;
    int mode = -1;
    if (from + page > (uintptr_t)at + size_bytes) return -1;
    return syscall(SYS_get_mempolicy, &mode, NULL, 0ul, from, 2ul) == 0 ? mode : -1;
}

static void check_policies(const stk_engine *e)
{
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        const struct stk_chunk *c = &e->layout->chunks[i];
        static const int wanted[CHUNK_STATE_N] = { [CHUNK_PARAM] = 3, [CHUNK_OPT] = 1, [CHUNK_GRAD] = 1 };
        for (int s = 0; s < CHUNK_STATE_N; s++) {
            if (c->home[s] != CHUNK_HOST || !c->host[s]) continue;
            int mode = policy_of(c->host[s], chunk_bytes(e->layout, c, (enum chunk_state)s));
            CHECK(mode == -1 || mode == wanted[s]);
        }
    }
}

struct run_of { int how; stk_update update; stk_tier opt; bool frozen; };

/* Hash after three steps; 0: failed (printed). *teams_used: bit k: team k has a chunk. */
static uint64_t train(const struct run_of *r, const char *dir, uint32_t *teams_used)
{
    struct toy t;
    toy_init(&t, 3, 2);
    t.freeze_first = r->frozen;
    t.cfg.update_threads = 2;
    t.cfg.update = r->update;
    t.cfg.clip = 1.0;
    t.cfg.optimizer_state = r->opt;
    t.cfg.grads = r->opt;
    t.cfg.nvme[0] = r->opt == STK_TIER_NVME ? dir : NULL;
    stk_status st = stk_open(&t.cfg, &t.e);
    if (st == STK_OK && r->how != ONE_TEAM) {
        t.e->cores.n_teams = 2;
        t.e->cores.members[0] = t.e->cores.members[1] = 1;
    }
    if (st == STK_OK && r->how == TWO_NODES) {
        topology_close(t.e->topology);
        t.e->topology = two_nodes();
        t.e->cores.n_nodes = 2;
        STK_ASSERT(t.e->topology);
    }
    if (st == STK_OK) st = toy_describe(&t);
    if (st == STK_OK) st = stk_seal(t.e, false);
    if (st == STK_OK && r->how == TWO_NODES && !t.e->near_refused) check_policies(t.e);
    if (st == STK_OK) st = toy_fill(&t);
    for (int i = 0; i < 3 && st == STK_OK; i++) st = toy_step(&t, 1e-3, NULL);
    if (st == STK_OK) st = stk_flush(t.e);
    uint64_t h = 0;
    *teams_used = 0;
    if (st == STK_OK) st = toy_hash(&t, &h);
    if (st == STK_OK) {
        for (uint32_t i = 0; i < t.e->n_use_chunks; i++)
            *teams_used |= 1u << (t.e->team_of ? t.e->team_of[t.e->use_chunks[i]] : 0);
    } else {
        printf("# %s\n", stk_error_text(t.e));
    }
    CHECK(!t.e->near_refused || r->how == TWO_NODES);
    stk_close(t.e);
    return h;
}

TEST(cores_mem_23_28_bits_do_not_depend_on_teams_and_nodes)
{
    static const stk_update modes[] = { STK_UPDATE_SERIAL, STK_UPDATE_CHASE, STK_UPDATE_SPLIT, STK_UPDATE_SPECULATE };
    char dir[] = "/tmp/stoker-cores-XXXXXX";
    cpu_set_t all;
    REQUIRE(mkdtemp(dir));
    REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
    for (uint32_t k = 0; k < 16; k++) {
        struct run_of r = { ONE_TEAM, modes[k % 4], k & 4 ? STK_TIER_NVME : STK_TIER_HOST, k & 8 };
        uint32_t teams;
        uint64_t one = train(&r, dir, &teams);
        CHECK(one && teams == 1);
        for (r.how = TWO_TEAMS; r.how <= (CPU_COUNT(&all) > 1 ? TWO_NODES : TWO_TEAMS); r.how++) {
            CHECK(train(&r, dir, &teams) == one);
            CHECK(teams == 3);
        }
    }
    sys_remove_tree(dir);
}

TEST_MAIN()
