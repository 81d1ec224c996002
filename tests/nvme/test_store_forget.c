/* tests/nvme/test_store_forget.c - a put that can be taken back (store_forget): what it needs of slots,
 * with and without durable steps, and a long seeded history against a model. */
#include "tests/nvme/durable_world.h"

struct forget_call {
    struct store *s;
    uint32_t extent;
    uint64_t version;
    stk_status status;
    struct stk_error err;
};

static void forget_start(void *arg)
{
    struct forget_call *c = arg;
    c->status = store_forget(c->s, c->extent, c->version, &c->err);
}

static stk_status forget(struct dur *d, uint32_t extent, uint64_t version, const char *word)
{
    struct forget_call c = { .s = d->s, .extent = extent, .version = version };
    world_run(&d->w, forget_start, &c);
    if (word && !strstr(c.err.text, word)) {
        printf("# \"%s\" has no \"%s\"\n", c.err.text, word);
        test_fail(__FILE__, __LINE__, "the sentence says why");
    }
    return c.status;
}

static stk_status put_kept(struct dur *d, uint32_t i, uint64_t version, struct store_op *op)
{
    fill(d->buf, d->cfg.extent_bytes[i], content(i, version));
    *op = (struct store_op){
        .extent = i, .buf = d->buf, .version = version, .cls = IO_WRITE_BACK, .keep = true
    };
    stk_status status = ops_run(&d->w, d->s, op, 1, true);
    return status != STK_OK ? status : op->status;
}

TEST(store_forget_the_version_before_counts_again)
{
    FOR_COMBOS(c)
    {
        struct dur d = { 0 };
        struct store_op op;
        REQUIRE(dur_world(&d, c->io, c->ex, 1));
        d.cfg.payload_max_bytes = 0;
        d.cfg.room = 2;
        CHECK_OK(dur_open(&d), &d.err);
        CHECK(put_kept(&d, 1, 4, &op) == STK_OK); /* the first of all: there is none before it */
        CHECK(forget(&d, 1, 4, "not there") == STK_ERR_STATE && dur_holds(&d, 1, 4));
        for (uint64_t v = 5; v < 20; v += 3) {
            CHECK(put_kept(&d, 1, v, &op) == STK_OK && dur_holds(&d, 1, v));
            CHECK(forget(&d, 1, v + 1, "newest") == STK_ERR_STATE && dur_holds(&d, 1, v));
            CHECK(forget(&d, 1, v, NULL) == STK_OK && dur_holds(&d, 1, v == 5 ? 4 : v - 2));
            CHECK(store_version(d.s, 1) == (v == 5 ? 4 : v - 2));
            CHECK(forget(&d, 1, v, "newest") == STK_ERR_STATE);
            CHECK(get_one(&d.w, d.s, 1, d.buf, v, &op) == STK_ERR_CORRUPT); /* it is gone */
            CHECK(forget(&d, 1, v == 5 ? 4 : v - 2, "not there") == STK_ERR_STATE);
            CHECK(dur_put(&d, 1, v + 1) == STK_OK && dur_holds(&d, 1, v + 1));
        }
        store_discard(d.s);
        dur_close(&d);
        dur_end(&d);
    }
}

/* A put without room for a second version: refused by name with `keep`, and not to be taken back. */
TEST(store_forget_needs_room)
{
    struct dur d = { 0 };
    struct store_op op;
    REQUIRE(dur_world(&d, IO_SIM, EXEC_SIM, 1));
    d.cfg.payload_max_bytes = 0;
    d.cfg.room = 1;
    CHECK_OK(dur_open(&d), &d.err);
    CHECK(put_kept(&d, 0, 1, &op) == STK_OK);
    CHECK(put_kept(&d, 0, 2, &op) == STK_ERR_STATE && strstr(op.error.text, "one more version"));
    CHECK(dur_holds(&d, 0, 1));
    CHECK(dur_put(&d, 0, 2) == STK_OK && forget(&d, 0, 2, "not there") == STK_ERR_STATE);
    store_discard(d.s);
    dur_close(&d);
    dur_end(&d);
}

/* Room 3: the durable version, the newest, and one that may go; a commit in flight holds a slot and the
 * put waits for it. What a table refers to cannot be taken back. */
TEST(store_forget_beside_durable_steps)
{
    struct dur d = { 0 };
    struct commit_call call;
    struct store_op op;
    REQUIRE(dur_world(&d, IO_SIM, EXEC_SIM, 2));
    d.cfg.room = 3;
    CHECK_OK(dur_open(&d), &d.err);
    dur_put_all(&d, 10);
    CHECK_OK(dur_commit(&d, 1, &call), &d.err);
    CHECK(forget(&d, 0, 10, "not there") == STK_ERR_STATE);
    dur_put_all(&d, 100);
    for (uint32_t i = 0; i < N; i++) {
        CHECK(put_kept(&d, i, 200 + i, &op) == STK_OK && dur_holds(&d, i, 200 + i));
        if (i % 2) CHECK(forget(&d, i, 200 + i, NULL) == STK_OK && dur_holds(&d, i, 100 + i));
    }
    dur_close(&d);
    CHECK(dur_adopt(&d, 1));
    for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 10 + i));
    dur_put_all(&d, 100);
    CHECK(put_kept(&d, 0, 200, &op) == STK_OK);
    CHECK_OK(dur_commit(&d, 2, &call), &d.err);
    CHECK(forget(&d, 0, 200, "durable table") == STK_ERR_STATE && dur_holds(&d, 0, 200));
    store_discard(d.s);
    dur_close(&d);
    dur_end(&d);
}

/* Any history of puts, kept puts, forgets and commits: the newest is what a model says. */
TEST(store_forget_random_history)
{
    uint32_t taken_back = 0, refused = 0;
    for (uint64_t seed = 0; seed < 30; seed++) {
        struct dur d = { 0 };
        struct rng r;
        struct commit_call call;
        struct store_op op;
        uint64_t now[N], before[N], version = 1000;
        bool kept[N] = { 0 };
        rng_seed_stream(&r, test_seed(), seed);
        REQUIRE(dur_world(&d, IO_SIM, EXEC_SIM, 1 + (uint32_t)rng_below(&r, 3)));
        d.cfg.room = 3;
        CHECK_OK(dur_open(&d), &d.err);
        dur_put_all(&d, 10);
        for (uint32_t i = 0; i < N; i++) now[i] = 10 + i, before[i] = UINT64_MAX;
        for (int k = 0; k < 200; k++) {
            uint32_t i = (uint32_t)rng_below(&r, N), what = (uint32_t)rng_below(&r, 8);
            if (what < 3) {
                CHECK(dur_put(&d, i, ++version) == STK_OK);
                now[i] = version;
                kept[i] = false;
            } else if (what < 6) {
                CHECK(put_kept(&d, i, ++version, &op) == STK_OK);
                before[i] = now[i];
                now[i] = version;
                kept[i] = true;
            } else if (what < 7 && kept[i]) {
                if (forget(&d, i, now[i], NULL) == STK_OK) {
                    now[i] = before[i];
                    taken_back++;
                } else {
                    refused++; /* committed since */
                }
                kept[i] = false;
            } else if (rng_below(&r, 4) == 0) {
                CHECK_OK(dur_commit(&d, (uint64_t)k + 1, &call), &d.err);
            }
            CHECK(store_version(d.s, i) == now[i] && dur_holds(&d, i, now[i]));
        }
        store_discard(d.s);
        dur_close(&d);
        dur_end(&d);
    }
    printf("# %u taken back, %u refused because a table refers to them\n", taken_back, refused);
    CHECK(taken_back > 100 && refused > 10);
}

TEST_MAIN()
