/* tests/nvme/test_store_power.c - durable steps against power cuts and against a disk that fails,
 * on the simulated disk.
 *
 * A run puts and commits in drawn order; at a drawn moment a copy of the disk is taken and loses
 * its power: of what was not flushed each sector is there or not. What the copy holds must be the
 * last complete commit or, if one was under way, that one or the one before: every byte of every
 * extent, and never a mix.
 *
 * Canaries: the linker puts a wrapper before io_submit, by which a test turns flushes of the
 * extents, or of the tables, into flushes of another file; a third forgets which slots the table on
 * disk refers to. The same harness must find them. */
#include "tests/nvme/store_world.h"
#include "nvme/store_impl.h"

enum { N = 6, ROOM_BYTES = 16384, PAYLOAD = 64, MODELS = 64, STEPS = 12 };

/* --- planted faults --------------------------------------------------------------------------- */

enum plant { PLANT_NOTHING, PLANT_NO_DATA_FLUSH, PLANT_NO_TABLE_FLUSH, PLANT_NO_PROTECTION };
static struct { enum plant what; const struct store *s; } plant;

/* The n-th request of a commit fails: flushes and writes of tables count. 0: none. */
static struct { uint64_t at, seen, times; } fail;
static const struct store *watched;

stk_status __real_io_submit(struct io *io, struct io_req *req, struct stk_error *err);
stk_status __wrap_io_submit(struct io *io, struct io_req *req, struct stk_error *err);

static bool file_is(const struct store *s, uint32_t file, bool table, uint32_t *path)
{
    for (*path = 0; s && *path < s->n_paths; (*path)++)
        if ((table ? s->paths[*path].io_table : s->paths[*path].io_file) == file) return true;
    return false;
}

stk_status __wrap_io_submit(struct io *io, struct io_req *req, struct stk_error *err)
{
    uint32_t k;
    bool of_commit = watched && (req->op == IO_FLUSH || file_is(watched, req->file, true, &k));
    if (of_commit) {
        fail.seen++;
        if (fail.at && fail.seen >= fail.at && fail.seen - fail.at < fail.times)
            return stk_error_set(err, STK_ERR_IO, 0, "refused by the test");
    }
    if (plant.s && req->op == IO_FLUSH) {
        if (plant.what == PLANT_NO_DATA_FLUSH && file_is(plant.s, req->file, false, &k))
            req->file = plant.s->paths[k].io_table;
        else if (plant.what == PLANT_NO_TABLE_FLUSH && file_is(plant.s, req->file, true, &k))
            req->file = plant.s->paths[k].io_file;
    }
    return __real_io_submit(io, req, err);
}

/* --- one run ---------------------------------------------------------------------------------- */

/* What one commit held. */
struct model { uint64_t step, version[N]; };

struct run {
    uint64_t seed;
    struct world w;
    struct store_cfg cfg;
    struct store *s;
    struct rng r;
    uint64_t bytes[N], next_version;
    uint8_t classes[N];
    struct model now, models[MODELS]; /* models[k]: of step k + 1 */
    uint64_t tried, counted;          /* steps of commits submitted, and of the last that counts */
    uint8_t *buf;
    struct exec_task cut;
    struct io_sim_disk *left;         /* the disk at the moment of the cut */
    uint64_t left_tried, left_counted;
    struct commit_call call;
    char names[4][16];
};

static uint64_t content(const struct run *r, uint32_t i, uint64_t version)
{
    return r->seed * 7919 + i * 131 + version * 1009;
}

static void cut_now(void *arg)
{
    struct run *r = arg;
    struct stk_error err = { 0 };
    CHECK(io_sim_disk_copy(r->w.disk, &r->left, &err) == STK_OK);
    r->left_tried = r->tried;
    r->left_counted = r->counted;
}

/* `cut_ns`: when the power goes, on the virtual clock. */
static bool run_open(struct run *r, uint64_t seed, uint64_t cut_ns, bool faults)
{
    struct stk_error err = { 0 };
    r->seed = seed;
    rng_seed_stream(&r->r, seed, 5);
    r->cfg = (struct store_cfg){ .n_extents = N, .extent_bytes = r->bytes,
                                 .extent_class = r->classes, .room = 2 + (uint32_t)(seed % 2),
                                 .payload_max_bytes = PAYLOAD, .n_paths = 1 + (uint32_t)(seed % 3),
                                 .volatile_classes = seed % 5 == 0 ? 2 : 0 };
    for (uint32_t i = 0; i < N; i++) {
        r->bytes[i] = 1 + rng_below(&r->r, ROOM_BYTES);
        r->classes[i] = (uint8_t)rng_below(&r->r, 2);
        r->now.version[i] = UINT64_MAX;
    }
    r->w.cfg.depth = 4;
    if (faults)
        r->w.sim.faults = (struct io_sim_faults){ .write_error_ppm = 30000, .short_ppm = 30000,
                                                  .no_space_ppm = 5000, .late_ppm = 50000,
                                                  .reorder_ppm = 50000, .late_ns = 100000 };
    r->w.sim.latency_ns = 1000 + rng_below(&r->r, 20000);
    for (uint32_t k = 0; k < r->cfg.n_paths; k++) {
        snprintf(r->names[k], sizeof r->names[k], "/p%u", k);
        r->cfg.paths[k] = r->names[k];
        double rate = 1e8 + (double)rng_below(&r->r, 4000000000u);
        r->w.sim.drives[k] = (struct io_sim_drive){ rate, rate / 2 };
    }
    r->buf = sys_mmap(2 * N * ROOM_BYTES, false);
    bool ok = world_open(&r->w, IO_SIM, EXEC_SIM, seed, &err) == STK_OK &&
              store_world_open(&r->w, &r->cfg, &r->s, &err) == STK_OK;
    if (!ok) printf("# %s\n", err.text);
    if (!ok) return false;
    plant.s = watched = r->s;
    exec_task_init(&r->cut, cut_now, r);
    exec_post_at(r->w.lane, &r->cut, cut_ns);
    return true;
}

static void run_close(struct run *r)
{
    struct stk_error err = { 0 };
    if (r->s) store_drain(r->s, UINT64_MAX, &err);
    store_close(r->s);
    plant.s = watched = NULL;
    r->w.fn = NULL;
    world_close(&r->w);
    sys_munmap(r->buf, 2 * N * ROOM_BYTES);
}

/* A drawn set of puts; some of them follow a commit in the same task. */
struct burst {
    struct run *r;
    struct store_op ops[N];
    uint32_t n, done, failed;
    bool commit;
    struct stk_error why; /* of the first that failed */
};

static void burst_done(struct store_op *op)
{
    struct burst *b = op->owner;
    b->done++;
    if (op->status == STK_OK) b->r->now.version[op->extent] = op->version;
    else if (b->failed++ == 0) b->why = op->error;
}

static void counted_done(struct store_commit *c)
{
    struct commit_call *call = c->owner;
    struct run *r = (struct run *)((char *)call - offsetof(struct run, call));
    call->done = true;
    if (c->status == STK_OK) r->counted = c->step;
    for (uint32_t i = 0; i < N && plant.what == PLANT_NO_PROTECTION; i++)
        r->s->extents[i].durable = STORE_ROOM_MAX;
}

static void run_commit(struct run *r)
{
    uint8_t payload[PAYLOAD];
    r->now.step = r->tried + 1;
    r->models[r->tried] = r->now;
    r->call = (struct commit_call){ .s = r->s };
    fill(payload, PAYLOAD, r->seed + r->now.step);
    r->call.c = (struct store_commit){ .step = r->now.step, .payload = payload,
                                       .payload_bytes = r->now.step % PAYLOAD,
                                       .done = counted_done, .owner = &r->call };
    r->call.refused = store_commit_submit(r->s, &r->call.c, &r->call.err);
    if (r->call.refused == STK_OK) r->tried++;
}

static void burst_start(void *arg)
{
    struct burst *b = arg;
    struct run *r = b->r;
    struct stk_error err = { 0 };
    if (b->commit) run_commit(r);
    for (uint32_t i = 0; i < N; i++) {
        if (rng_below(&r->r, 3) == 0) continue;
        struct store_op *op = &b->ops[b->n++];
        *op = (struct store_op){ .extent = i, .buf = r->buf + i * ROOM_BYTES,
                                 .version = ++r->next_version, .done = burst_done, .owner = b };
        fill(op->buf, r->bytes[i], content(r, i, op->version));
        CHECK(store_put(r->s, op, &err) == STK_OK);
    }
}

/* Runs STEPS bursts, most with a commit. The cut falls in between, or never. */
static void run_steps(struct run *r)
{
    struct stk_error err = { 0 };
    for (int k = 0; k < STEPS; k++) {
        struct burst b = { .r = r, .commit = k > 0 && rng_below(&r->r, 4) > 0 };
        world_run(&r->w, burst_start, &b);
        CHECK(store_drain(r->s, UINT64_MAX, &err) == STK_OK && b.done == b.n);
    }
    if (!r->left) { /* it is due after the end */
        exec_cancel(&r->cut);
        cut_now(r);
    }
}

/* --- what is left ----------------------------------------------------------------------------- */

enum verdict { RIGHT_LAST, RIGHT_IN_FLIGHT, RIGHT_NONE, WRONG };

static bool same_as_model(struct run *r, struct world *w, struct store *s, const struct model *m)
{
    for (uint32_t i = 0; i < N; i++) {
        struct store_op op;
        bool fleeting = r->cfg.volatile_classes >> r->classes[i] & 1;
        uint64_t version = fleeting ? UINT64_MAX : m->version[i];
        if (store_version(s, i) != version) return false;
        if (version == UINT64_MAX) continue;
        if (get_one(w, s, i, r->buf, version, &op) != STK_OK ||
            !filled(r->buf, r->bytes[i], content(r, i, version)))
            return false;
    }
    return true;
}

static enum verdict adopt_left(struct run *r, struct store_found *f)
{
    struct world w = { .disk = r->left };
    struct stk_error err = { 0 };
    struct store *s = NULL;
    struct store_cfg cfg = r->cfg;
    uint8_t payload[PAYLOAD];
    enum verdict v = WRONG;
    fill(payload, PAYLOAD, r->seed + f->step);
    memcpy(cfg.run_id, f->run_id, sizeof cfg.run_id);
    cfg.adopt = true;
    if (world_open(&w, IO_SIM, EXEC_SIM, r->seed, &err) == STK_OK &&
        store_world_open(&w, &cfg, &s, &err) == STK_OK && f->step >= 1 &&
        f->step <= r->left_tried && f->payload_bytes == f->step % PAYLOAD &&
        memcmp(f->payload, payload, f->payload_bytes) == 0 &&
        same_as_model(r, &w, s, &r->models[f->step - 1])) {
        if (f->step == r->left_counted) v = RIGHT_LAST;
        else if (f->step > r->left_counted) v = RIGHT_IN_FLIGHT;
    }
    store_close(s);
    w.disk = NULL; /* the caller's */
    world_close(&w);
    return v;
}

static enum verdict judge(struct run *r)
{
    struct stk_error err = { 0 };
    struct store_found *f;
    io_sim_power_cut(r->left, r->seed % 7 == 0 ? 0 : r->seed + 1);
    stk_status status = store_find(r->cfg.paths, r->cfg.n_paths, NULL, r->left, &f, &err);
    enum verdict v = WRONG;
    if (status == STK_OK) v = adopt_left(r, f);
    else if ((status == STK_END || status == STK_ERR_CORRUPT) && r->left_counted == 0)
        v = RIGHT_NONE;
    store_found_free(f);
    return v;
}

static uint64_t length_ns(uint64_t seed, bool faults)
{
    struct run *r = calloc(1, sizeof *r);
    uint64_t end = 0;
    if (run_open(r, seed, UINT64_MAX, faults)) {
        run_steps(r);
        end = exec_now_ns(r->w.ex);
        io_sim_disk_free(r->left);
        run_close(r);
    }
    free(r);
    return end;
}

static void one(uint64_t seed, bool faults, uint32_t count[4])
{
    struct run *r = calloc(1, sizeof *r);
    struct rng when;
    rng_seed_stream(&when, seed, 6);
    if (run_open(r, seed, rng_below(&when, length_ns(seed, faults) + 1), faults)) {
        run_steps(r);
        run_close(r);
        r->buf = sys_mmap(2 * N * ROOM_BYTES, false);
        enum verdict v = judge(r);
        count[v]++;
        if (v == WRONG && plant.what == PLANT_NOTHING) {
            test_replay(seed, "one_seed");
            CHECK(v != WRONG);
        }
        sys_munmap(r->buf, 2 * N * ROOM_BYTES);
        io_sim_disk_free(r->left);
    }
    free(r);
}

static void seeds(uint32_t n, enum plant what, bool faults, uint32_t count[4])
{
    memset(count, 0, 4 * sizeof *count);
    plant.what = what;
    for (uint32_t k = 0; k < n; k++) one(test_seed() + k, faults, count);
    plant.what = PLANT_NOTHING;
    printf("# %u cuts: last commit %u, one in flight or failed %u, none yet %u, WRONG %u\n", n,
           count[RIGHT_LAST], count[RIGHT_IN_FLIGHT], count[RIGHT_NONE], count[WRONG]);
}

TEST(store_power_one_seed)
{
    uint32_t count[4];
    seeds(1, PLANT_NOTHING, false, count);
    seeds(1, PLANT_NOTHING, true, count);
}

/* STK_SOAK: 20,000. */
static uint32_t n_seeds(uint32_t n) { return getenv("STK_SOAK") ? 20 * n : n; }

TEST(store_power_cut_at_any_moment)
{
    uint32_t count[4], n = n_seeds(1000);
    seeds(n, PLANT_NOTHING, false, count);
    CHECK(count[WRONG] == 0 && count[RIGHT_LAST] > n / 4 && count[RIGHT_IN_FLIGHT] > n / 50 &&
          count[RIGHT_NONE] > n / 100);
}

/* The same on a disk whose writes and flushes fail now and then, half done: of a commit that failed
 * nothing is left, or, where taking it back failed too, all of it. */
TEST(store_power_cut_with_failing_writes)
{
    uint32_t count[4], n = n_seeds(500);
    seeds(n, PLANT_NOTHING, true, count);
    CHECK(count[WRONG] == 0 && count[RIGHT_LAST] > n / 5 * 2);
}

TEST(store_power_canary_data_not_flushed)
{
    uint32_t count[4];
    seeds(100, PLANT_NO_DATA_FLUSH, false, count);
    CHECK(count[WRONG] > 20);
}

TEST(store_power_canary_table_not_flushed)
{
    uint32_t count[4];
    seeds(100, PLANT_NO_TABLE_FLUSH, false, count);
    CHECK(count[WRONG] > 20);
}

TEST(store_power_canary_slots_not_protected)
{
    uint32_t count[4];
    seeds(100, PLANT_NO_PROTECTION, false, count);
    CHECK(count[WRONG] > 10);
}

/* --- errors in a commit ----------------------------------------------------------------------- */

static void put_all(struct run *r)
{
    for (uint32_t i = 0; i < N; i++) {
        struct store_op op;
        fill(r->buf, r->bytes[i], content(r, i, ++r->next_version));
        CHECK(put_one(&r->w, r->s, i, r->buf, r->next_version, &op) == STK_OK);
        r->now.version[i] = r->next_version;
    }
}

/* A commit and puts that meet it; how many of these failed, and the first one's error. */
static uint32_t commit_and_puts_why(struct run *r, struct stk_error *why)
{
    struct stk_error err = { 0 };
    struct burst b = { .r = r, .commit = true };
    world_run(&r->w, burst_start, &b);
    CHECK(store_drain(r->s, UINT64_MAX, &err) == STK_OK && b.done == b.n);
    CHECK(r->call.refused != STK_OK || r->call.done);
    *why = b.why;
    return b.failed;
}

static uint32_t commit_and_puts(struct run *r)
{
    struct stk_error why;
    return commit_and_puts_why(r, &why);
}

static enum verdict cut_and_judge(struct run *r)
{
    cut_now(r);
    enum verdict v = judge(r);
    io_sim_disk_free(r->left);
    r->left = NULL;
    return v;
}

/* Every request of the second commit fails in turn, alone or with all that follow: the first one
 * counts (or, where taking the second back failed too, a later process may find it, whole). Then
 * puts and a third commit work, except that with room 2 and a failed table that could not be taken
 * back no slot is left. */
static void failing_commit(uint32_t n_paths, uint32_t room, uint64_t at, uint64_t times,
                           bool *was_hit)
{
    struct run *r = calloc(1, sizeof *r);
    uint64_t step;
    /* seeds divide by 6 into rooms and numbers of paths */
    uint64_t seed = 60 * at;
    while (2 + seed % 2 != room || 1 + seed % 3 != n_paths || seed % 5 == 0) seed++;
    REQUIRE(run_open(r, seed, UINT64_MAX, false));
    put_all(r);
    commit_and_puts(r);
    CHECK(r->call.c.status == STK_OK && store_durable(r->s, &step) && step == 1);
    put_all(r);
    fail.seen = 0;
    fail.at = at;
    fail.times = times;
    struct stk_error why = { 0 };
    uint32_t stuck = commit_and_puts_why(r, &why);
    *was_hit = fail.seen >= at;
    fail.at = 0;
    bool second = r->call.c.status == STK_OK;
    CHECK(second == !*was_hit && store_durable(r->s, &step) && step == (second ? 2 : 1));
    if (!second)
        CHECK(strstr(r->call.c.error.text, "/p") && strstr(r->call.c.error.text, "step 2"));
    enum verdict v = cut_and_judge(r);
    CHECK(v == RIGHT_LAST || (v == RIGHT_IN_FLIGHT && times > 1));
    CHECK(stuck == 0 || (room == 2 && times > 1 && at > n_paths));
    CHECK(r->call.c.doubt == (!second && times > 1 && at > n_paths));
    /* refused because of that failure, and says so: its class, file and cause, and its own place */
    if (stuck)
        CHECK(why.code == STK_ERR_IO && strstr(why.text, "at byte") && strstr(why.text, "/table.bin") &&
              strstr(why.text, "step 2 failed: refused by the test"));
    commit_and_puts(r);
    if (stuck) {
        CHECK(r->call.refused == STK_ERR_STATE && strstr(r->call.err.text, "put of extent"));
    } else {
        CHECK(r->call.refused == STK_OK && r->call.c.status == STK_OK);
        CHECK(cut_and_judge(r) == RIGHT_LAST);
    }
    exec_cancel(&r->cut);
    run_close(r);
    free(r);
}

TEST(store_commit_fails_at_every_request)
{
    for (uint32_t room = 3; room >= 2; room--) {
        for (uint32_t n_paths = 1; n_paths <= 3; n_paths++) {
            for (int all = 0; all < 2; all++) {
                bool hit = true;
                uint64_t at = 1;
                for (; hit; at++) failing_commit(n_paths, room, at, all ? 1000 : 1, &hit);
                CHECK(at == 3 * n_paths + 2);
            }
        }
    }
}

TEST_MAIN()
