/* tests/nvme/test_store_durable.c - durable steps: commit, crash, find, adopt, discard; on every
 * backend, over several paths, and with everything wrong that may lie in the folders. Power cuts
 * are in test_store_power.c. */
#include "tests/nvme/store_world.h"
#include "nvme/store_impl.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <sys/stat.h>

enum { N = 9, ROOM_BYTES = 81920, PAYLOAD = 300 };

static const uint64_t sizes[N] = { 1, 511, 4096, 4097, 20000, 65536, 70001, 81920, 12288 };
static const uint8_t classes[N] = { 0, 1, 2, 0, 1, 0, 1, 2, 0 };

/* A store with its model: which version each extent's newest put carried. */
struct dur {
    struct world w;
    struct store_cfg cfg;
    struct store *s;
    char dirs[3][600];
    uint8_t *buf;
    uint64_t newest[N];
    struct stk_error err;
};

static uint64_t content(uint32_t extent, uint64_t version) { return extent * 100000 + version; }

static bool dur_world(struct dur *d, enum io_kind io, enum exec_kind ex, uint32_t n_paths)
{
    if (world_open(&d->w, io, ex, test_seed(), &d->err) != STK_OK) return false;
    d->cfg = (struct store_cfg){ .n_extents = N, .extent_bytes = sizes, .extent_class = classes,
                                 .n_paths = n_paths, .room = 2, .payload_max_bytes = PAYLOAD,
                                 .weights = { 2, 1, 1 } };
    for (uint32_t k = 0; k < n_paths; k++) {
        snprintf(d->dirs[k], sizeof d->dirs[k], "%s/p%u", d->w.dir, k);
        d->cfg.paths[k] = d->dirs[k];
        if (!d->w.disk) sys_mkdirs(d->dirs[k]);
    }
    d->buf = sys_mmap(ROOM_BYTES, false);
    for (uint32_t i = 0; i < N; i++) d->newest[i] = UINT64_MAX;
    return d->buf != NULL;
}

static void dur_end(struct dur *d)
{
    store_close(d->s);
    sys_munmap(d->buf, ROOM_BYTES);
    world_close(&d->w);
}

static stk_status dur_open(struct dur *d)
{
    stk_error_clear(&d->err);
    return store_world_open(&d->w, &d->cfg, &d->s, &d->err);
}

static void dur_close(struct dur *d)
{
    store_close(d->s);
    d->s = NULL;
}

static stk_status dur_put(struct dur *d, uint32_t i, uint64_t version)
{
    struct store_op op;
    fill(d->buf, sizes[i], content(i, version));
    stk_status status = put_one(&d->w, d->s, i, d->buf, version, &op);
    if (status == STK_OK) d->newest[i] = version;
    return status;
}

static void dur_put_all(struct dur *d, uint64_t version)
{
    for (uint32_t i = 0; i < N; i++) CHECK(dur_put(d, i, version + i) == STK_OK);
}

static bool dur_holds(struct dur *d, uint32_t i, uint64_t version)
{
    struct store_op op;
    memset(d->buf, 0x77, sizes[i]);
    return store_version(d->s, i) == version &&
           get_one(&d->w, d->s, i, d->buf, version, &op) == STK_OK &&
           filled(d->buf, sizes[i], content(i, version));
}

static stk_status dur_commit(struct dur *d, uint64_t step, struct commit_call *call)
{
    uint8_t payload[PAYLOAD];
    fill(payload, step % PAYLOAD, step);
    stk_status status = commit_one(&d->w, d->s, step, payload, step % PAYLOAD, call);
    if (status != STK_OK) stk_error_forward(&d->err, &call->err);
    return status;
}

static stk_status dur_find(struct dur *d, const char *run_id, struct store_found **out)
{
    stk_error_clear(&d->err);
    return store_find(d->cfg.paths, d->cfg.n_paths, run_id, d->w.disk, out, &d->err);
}

/* Finds the one durable store, expects this step, and adopts it. */
static bool dur_adopt(struct dur *d, uint64_t step)
{
    struct store_found *f;
    uint8_t payload[PAYLOAD];
    uint64_t at;
    stk_status status = dur_find(d, NULL, &f);
    if (status != STK_OK) printf("# %s\n", d->err.text);
    if (status != STK_OK) return false;
    fill(payload, step % PAYLOAD, step);
    bool ok = f->step == step && f->n_extents == N && f->n_paths == d->cfg.n_paths &&
              f->room == d->cfg.room && f->volatile_classes == d->cfg.volatile_classes &&
              memcmp(f->extent_bytes, sizes, sizeof sizes) == 0 &&
              memcmp(f->extent_class, classes, sizeof classes) == 0 &&
              f->payload_bytes == step % PAYLOAD &&
              memcmp(f->payload, payload, f->payload_bytes) == 0;
    uint64_t need = 0;
    for (uint32_t k = 0; k < d->cfg.n_paths; k++) need += store_need_bytes(&d->cfg, k);
    ok = ok && f->size_bytes == need;
    memcpy(d->cfg.run_id, f->run_id, sizeof d->cfg.run_id);
    store_found_free(f);
    d->cfg.adopt = true;
    status = dur_open(d);
    d->cfg.adopt = false;
    memset(d->cfg.run_id, 0, sizeof d->cfg.run_id);
    if (status != STK_OK) printf("# %s\n", d->err.text);
    return ok && status == STK_OK && store_durable(d->s, &at) && at == step;
}

static uint32_t entries_in(const char *dir)
{
    uint32_t n = 0;
    DIR *dp = opendir(dir);
    struct dirent *e;
    while (dp && (e = readdir(dp))) n += e->d_name[0] != '.';
    if (dp) closedir(dp);
    return n;
}

/* Nothing of any run is left on any path. */
static bool nothing_left(const struct dur *d)
{
    if (d->w.disk) return io_sim_free_bytes(d->w.disk) == 1ull << 40;
    for (uint32_t k = 0; k < d->cfg.n_paths; k++)
        if (entries_in(d->dirs[k]) != 0) return false;
    return true;
}

/* --- the life of a durable store -------------------------------------------------------------- */

/* What was committed comes back, however much was put after it; then go on, commit, come back. */
static void life(const struct combo *c, uint32_t n_paths, uint32_t room)
{
    struct dur d = { 0 };
    struct commit_call call;
    uint64_t step;
    REQUIRE(dur_world(&d, c->io, c->ex, n_paths));
    d.cfg.room = room;
    CHECK_OK(dur_open(&d), &d.err);
    CHECK(!store_durable(d.s, &step));
    dur_put_all(&d, 10);
    dur_put_all(&d, 20);
    CHECK_OK(dur_commit(&d, 2, &call), &d.err);
    CHECK(store_durable(d.s, &step) && step == 2);
    for (uint32_t v = 30; v < 60; v += 10)
        for (uint32_t i = 0; i < 6; i++) CHECK(dur_put(&d, i, v + i) == STK_OK);
    for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, d.newest[i]));
    dur_close(&d);
    for (int again = 0; again < 2; again++) { /* an adoption without a commit changes nothing */
        CHECK(dur_adopt(&d, 2));
        for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 20 + i));
        dur_put_all(&d, 70);
        dur_close(&d);
    }
    CHECK(dur_adopt(&d, 2));
    for (uint64_t k = 3; k < 8; k++) {
        dur_put_all(&d, 100 * k);
        CHECK_OK(dur_commit(&d, k, &call), &d.err);
        dur_put_all(&d, 100 * k + 50);
    }
    dur_close(&d);
    CHECK(dur_adopt(&d, 7));
    for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 700 + i));
    store_discard(d.s);
    dur_close(&d);
    CHECK(nothing_left(&d));
    struct store_found *f;
    CHECK(dur_find(&d, NULL, &f) == STK_END && !f && dur_find(&d, "0123456789abcdef", &f) == STK_END);
    dur_end(&d);
}

TEST(store_durable_life)
{
    FOR_COMBOS(c)
    {
        life(c, 1, 2);
        life(c, 3, 3);
        if (c->ex == EXEC_SIM) life(c, 2, 2);
    }
}

/* Room 1 has no durable steps; with them announced it is refused. Classes that live within a step
 * have one slot and are not in the table. */
TEST(store_durable_rooms_and_classes)
{
    struct dur d = { 0 };
    struct commit_call call;
    REQUIRE(dur_world(&d, IO_SIM, EXEC_SIM, 2));
    d.cfg.room = 1;
    CHECK(dur_open(&d) == STK_ERR_CONFIG && strstr(d.err.text, "2 or 3"));
    d.cfg.payload_max_bytes = 0;
    CHECK_OK(dur_open(&d), &d.err);
    dur_put_all(&d, 1);
    CHECK(dur_commit(&d, 1, &call) == STK_ERR_CONFIG && strstr(call.err.text, "without durable"));
    dur_close(&d);
    d.cfg.payload_max_bytes = PAYLOAD;
    d.cfg.room = 3;
    d.cfg.volatile_classes = 1u << 2;
    CHECK_OK(dur_open(&d), &d.err);
    CHECK(d.s->extents[2].room == 1 && d.s->extents[3].room == 3);
    dur_put_all(&d, 5);
    uint8_t large[PAYLOAD + 1] = { 0 };
    CHECK(commit_one(&d.w, d.s, 1, large, PAYLOAD + 1, &call) == STK_ERR_CONFIG &&
          strstr(call.err.text, "301"));
    CHECK_OK(dur_commit(&d, 1, &call), &d.err);
    dur_put_all(&d, 50);
    dur_close(&d);
    CHECK(dur_adopt(&d, 1));
    for (uint32_t i = 0; i < N; i++)
        CHECK(classes[i] == 2 ? store_version(d.s, i) == UINT64_MAX : dur_holds(&d, i, 5 + i));
    dur_end(&d);
}

/* --- puts during a commit --------------------------------------------------------------------- */

struct overlap {
    struct dur *d;
    struct commit_call call;
    struct store_op ops[2 * N];
    uint8_t *bufs;
    uint32_t n, done, order[2 * N];
    bool commit_was_done[2 * N];
};

static void overlap_done(struct store_op *op)
{
    struct overlap *o = op->owner;
    o->commit_was_done[op - o->ops] = o->call.done;
    o->order[o->done++] = (uint32_t)(op - o->ops);
}

/* A commit and, in the same task, a put of every extent. */
static void overlap_start(void *arg)
{
    struct overlap *o = arg;
    struct stk_error err = { 0 };
    commit_start(&o->call);
    for (uint32_t i = 0; i < N; i++) {
        struct store_op *op = &o->ops[o->n++];
        *op = (struct store_op){ .extent = i, .buf = o->bufs + i * ROOM_BYTES, .version = 200 + i,
                                 .done = overlap_done, .owner = o };
        fill(op->buf, sizes[i], content(i, 200 + i));
        CHECK(store_put(o->d->s, op, &err) == STK_OK);
    }
}

/* Room 2: the puts wait for the commit, when both slots are taken by tables, and follow in order.
 * Room 3: none waits. Volatile ones never wait. */
TEST(store_durable_puts_meet_a_commit)
{
    for (uint32_t room = 2; room <= 3; room++) {
        struct dur d = { 0 };
        struct overlap o = { .d = &d };
        struct store_stats st;
        REQUIRE(dur_world(&d, IO_SIM, EXEC_SIM, 2));
        d.cfg.room = room;
        d.cfg.volatile_classes = 1u << 1;
        CHECK_OK(dur_open(&d), &d.err);
        o.bufs = sys_mmap(N * ROOM_BYTES, false);
        dur_put_all(&d, 10);
        CHECK_OK(dur_commit(&d, 1, &o.call), &d.err);
        dur_put_all(&d, 100);
        o.call = (struct commit_call){ .s = d.s, .c = { .step = 2 } };
        world_run(&d.w, overlap_start, &o);
        CHECK(store_drain(d.s, UINT64_MAX, &d.err) == STK_OK && o.call.done && o.done == N);
        CHECK(o.call.c.status == STK_OK);
        for (uint32_t i = 0; i < N; i++) {
            bool waited = room == 2 && classes[i] != 1;
            CHECK(o.ops[i].status == STK_OK && (!waited || o.commit_was_done[i]));
            CHECK(dur_holds(&d, i, 200 + i));
        }
        store_stats_read(d.s, &st);
        CHECK(st.puts_waited == (room == 2 ? 6 : 0) && st.commits == 2);
        dur_close(&d);
        CHECK(dur_adopt(&d, 2) == false); /* the payload of step 2 was left out: only that differs */
        for (uint32_t i = 0; i < N; i++) if (classes[i] != 1) CHECK(dur_holds(&d, i, 100 + i));
        sys_munmap(o.bufs, N * ROOM_BYTES);
        dur_end(&d);
    }
}

TEST_MAIN()
