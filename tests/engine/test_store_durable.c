/* tests/engine/test_store_durable.c - durable steps of the extent store alone: commit, adopt, power
 * cut on the simulated disk, kill -9 of a process on a real one. */
#include "tests/engine/swap_world.h"
#include "engine/store_api.h"

#include <signal.h>

#define RUN "0123456789abcdef"
enum { N = 24 };
static uint64_t sizes[N];

static void durable_init(struct swap_world *w, const struct swap_kind *k)
{
    for (uint32_t i = 0; i < N; i++) sizes[i] = 1 + rng_hash64(i) % 20000;
    sizes[5] = 8192;
    swap_world_init(w, k, sizes, N);
    w->c.durable = true;
    w->c.buffer_bytes = 6 * 20480;
    strcpy(w->c.run_id, RUN);
}

static bool all_are(struct swap_world *w, uint64_t gen)
{
    for (uint32_t i = 0; i < N; i++)
        if (stk_store_get(w->s, i, w->work) != STK_OK ||
            !content_is(w->work, sizes[i], i, gen + (i % 3 == 0))) {
            printf("# item %u of step %llu: %s\n", i, (unsigned long long)gen,
                   stk_store_error(w->s));
            return false;
        }
    return true;
}

/* Step gen: two thirds of the items are at gen, the others one ahead. */
static stk_status put_all(struct swap_world *w, uint64_t gen)
{
    for (uint32_t i = 0; i < N; i++) {
        content(w->work, sizes[i], i, gen + (i % 3 == 0));
        stk_status st = stk_store_put(w->s, i, w->work);
        if (st != STK_OK) return st;
    }
    return STK_OK;
}

static stk_status reopen(struct swap_world *w, bool adopt)
{
    w->c.adopt = adopt;
    stk_status st = stk_store_open(&w->c, &w->s);
    if (st < STK_OK) printf("# %s\n", stk_store_error(w->s));
    return st;
}

static void close_and_keep(struct swap_world *w)
{
    stk_store_close(w->s, false);
    w->s = NULL;
}

TEST(store_durable_a_later_process_finds_the_last_commit)
{
    FOR_KINDS(k)
    {
        struct swap_world w;
        durable_init(&w, k);
        CHECK(reopen(&w, true) == STK_END); /* nothing there yet */
        CHECK(strstr(stk_store_error(w.s), RUN) != NULL);
        close_and_keep(&w);
        CHECK(reopen(&w, false) == STK_OK);
        uint64_t step, bytes;
        const void *payload;
        CHECK(stk_store_durable(w.s, &step, &payload, &bytes) == STK_END);
        for (uint64_t gen = 1; gen <= 3; gen++) {
            OK(&w, put_all(&w, gen));
            char text[32];
            int n = snprintf(text, sizeof text, "after %d", (int)gen);
            OK(&w, stk_store_commit(w.s, gen, text, (uint64_t)n));
            CHECK(stk_store_durable(w.s, &step, &payload, &bytes) == STK_OK && step == gen);
        }
        OK(&w, put_all(&w, 9)); /* never committed */
        close_and_keep(&w);
        for (int round = 0; round < 2; round++) {
            OK(&w, reopen(&w, true));
            CHECK(stk_store_durable(w.s, &step, &payload, &bytes) == STK_OK);
            CHECK(step == 3 && bytes == 7 && memcmp(payload, "after 3", 7) == 0);
            CHECK(all_are(&w, 3));
            OK(&w, put_all(&w, 7 + (uint64_t)round)); /* again lost */
            close_and_keep(&w);
        }
        OK(&w, reopen(&w, true));
        OK(&w, put_all(&w, 4));
        OK(&w, stk_store_commit(w.s, 4, NULL, 0));
        stk_store_close(w.s, true); /* discarded: nothing is left */
        w.s = NULL;
        if (!w.disk) CHECK(folder_is_empty(w.dir));
        CHECK(reopen(&w, true) == STK_END);
        swap_world_close(&w);
    }
}

TEST(store_durable_refusals)
{
    struct swap_world w;
    durable_init(&w, &swap_kinds[N_KINDS - 1]);
    OK(&w, reopen(&w, false));
    OK(&w, put_all(&w, 1));
    static uint8_t big[5000];
    CHECK(stk_store_commit(w.s, 1, big, sizeof big) == STK_ERR_CONFIG); /* 4096 unless said */
    CHECK(strstr(stk_store_error(w.s), "4096") != NULL);
    CHECK(stk_store_commit(w.s, 1, NULL, 5) == STK_ERR_CONFIG);
    OK(&w, stk_store_commit(w.s, 1, big, 4096));
    struct swap_world other = w; /* the run is alive: neither adopted nor made again */
    CHECK(reopen(&other, true) < STK_OK);
    close_and_keep(&other);
    CHECK(reopen(&other, false) < STK_OK);
    close_and_keep(&other);
    CHECK(all_are(&w, 1));
    close_and_keep(&w);
    sizes[2]++; /* other items */
    CHECK(reopen(&w, true) == STK_ERR_CONFIG);
    close_and_keep(&w);
    sizes[2]--;
    w.c.payload_max_bytes = 10;
    CHECK(reopen(&w, true) == STK_ERR_CONFIG);
    close_and_keep(&w);
    w.c.payload_max_bytes = 0;
    OK(&w, reopen(&w, true)); /* refusals changed nothing */
    CHECK(all_are(&w, 1));
    swap_world_close(&w);
}

/* Power cuts at any moment: what was committed last is there, whole. */
TEST(store_durable_power_cuts_lose_nothing_that_was_committed)
{
    uint32_t n = getenv("STK_SOAK") ? 5000 : 120;
    for (uint32_t seed = 0; seed < n; seed++) {
        struct swap_world w;
        durable_init(&w, &swap_kinds[0]);
        w.c.seed = w.sim.seed = test_seed() + seed;
        w.sim.latency_ns = 20000;
        w.sim.faults = (struct io_sim_faults){ .late_ppm = 100000, .late_ns = 2000000 };
        OK(&w, reopen(&w, false));
        struct rng r;
        rng_seed(&r, test_seed() + seed);
        uint64_t last = 0;
        for (int life = 0; life < 4; life++) {
            for (uint64_t more = rng_below(&r, 3); more; more--) {
                OK(&w, put_all(&w, last + 1));
                OK(&w, stk_store_commit(w.s, last + 1, &last, sizeof last));
                last++;
            }
            for (uint64_t k = rng_below(&r, N); k; k--) {
                uint32_t item = (uint32_t)rng_below(&r, N);
                PUT(&w, item, 1000 + k);
            }
            close_and_keep(&w);
            io_sim_power_cut(w.disk, rng_next(&r));
            if (last == 0) {
                CHECK(reopen(&w, true) == STK_END);
                close_and_keep(&w);
                OK(&w, reopen(&w, false));
                continue;
            }
            OK(&w, reopen(&w, true));
            uint64_t step = 0;
            CHECK(stk_store_durable(w.s, &step, NULL, NULL) == STK_OK && step == last);
            CHECK(all_are(&w, last));
        }
        swap_world_close(&w);
        if (test_failures) {
            printf("# seed %u\n", seed);
            return;
        }
    }
}

/* In the child: commits steps from `first` on and says so, until it is killed. */
static void live(struct swap_world *w, int out, uint64_t first)
{
    stk_status st = STK_OK;
    for (uint64_t gen = first; st == STK_OK; gen++) {
        st = put_all(w, gen);
        if (st == STK_OK) st = stk_store_commit(w->s, gen, &gen, sizeof gen);
        if (st == STK_OK && write(out, &gen, sizeof gen) != sizeof gen) break;
    }
    printf("# the child ended: %s\n", stk_store_error(w->s));
    fflush(stdout);
    _exit(1);
}

TEST(store_durable_kill_9_at_any_moment)
{
    for (size_t kind = 3; kind < N_KINDS; kind += 2) {
        struct swap_world w;
        durable_init(&w, &swap_kinds[kind]);
        uint64_t last = 0;
        struct rng r;
        rng_seed(&r, test_seed() + kind);
        for (int life = 0; life < (getenv("STK_SOAK") ? 300 : 12); life++) {
            int pipe_fd[2];
            REQUIRE(pipe(pipe_fd) == 0);
            fflush(stdout);
            pid_t child = fork();
            if (child == 0) {
                close(pipe_fd[0]);
                stk_status st = reopen(&w, last > 0);
                if (st != STK_OK) _exit(2);
                live(&w, pipe_fd[1], last + 1);
            }
            close(pipe_fd[1]);
            uint64_t wanted = last + 1 + rng_below(&r, 3), said = last;
            while (said < wanted && read(pipe_fd[0], &said, sizeof said) == sizeof said) {}
            for (uint64_t spin = rng_below(&r, 20000); spin; spin--) (void)getppid();
            kill(child, SIGKILL);
            int status = 0;
            CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
            uint64_t word; /* what it said before it died counts too */
            while (read(pipe_fd[0], &word, sizeof word) == sizeof word) said = word;
            close(pipe_fd[0]);
            OK(&w, reopen(&w, true));
            uint64_t step = 0, bytes = 0;
            const void *payload = NULL;
            CHECK(stk_store_durable(w.s, &step, &payload, &bytes) == STK_OK);
            CHECK(step == said || step == said + 1); /* committed, and killed before it said so */
            CHECK(bytes == sizeof step && memcmp(payload, &step, sizeof step) == 0);
            CHECK(all_are(&w, step));
            close_and_keep(&w);
            last = step;
        }
        CHECK(last > 12);
        OK(&w, reopen(&w, true));
        stk_store_close(w.s, true);
        w.s = NULL;
        CHECK(folder_is_empty(w.dir));
        swap_world_close(&w);
    }
}

/* A commit that fails leaves the step before, and the store in use. */
TEST(store_durable_a_commit_that_fails_is_not_the_end)
{
    struct swap_world w;
    durable_init(&w, &swap_kinds[0]);
    OK(&w, reopen(&w, false));
    OK(&w, put_all(&w, 1));
    OK(&w, stk_store_commit(w.s, 1, "one", 3));
    OK(&w, put_all(&w, 2));
    OK(&w, stk_store_flush(w.s));
    w.sim.faults.write_error_ppm = 1000000;
    CHECK(stk_store_commit(w.s, 2, "two", 3) < STK_OK);
    CHECK(stk_store_error(w.s)[0]);
    w.sim.faults.write_error_ppm = 0;
    uint64_t step, bytes;
    const void *payload;
    CHECK(stk_store_durable(w.s, &step, &payload, &bytes) == STK_OK && step == 1 && bytes == 3);
    CHECK(all_are(&w, 2));
    OK(&w, stk_store_commit(w.s, 3, "three", 5));
    close_and_keep(&w);
    OK(&w, reopen(&w, true));
    CHECK(stk_store_durable(w.s, &step, &payload, &bytes) == STK_OK && step == 3);
    CHECK(all_are(&w, 2));
    swap_world_close(&w);
}

TEST_MAIN()
