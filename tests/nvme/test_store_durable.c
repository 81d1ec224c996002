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

/* --- sets of paths ---------------------------------------------------------------------------- */

/* Committed on three paths, closed; the run's id goes to `id`. */
static bool committed(struct dur *d, enum io_kind io, uint32_t n_paths, char id[STORE_RUN_ID_MAX])
{
    struct commit_call call;
    if (!dur_world(d, io, EXEC_SIM, n_paths) || dur_open(d) != STK_OK) return false;
    dur_put_all(d, 10);
    if (dur_commit(d, 1, &call) != STK_OK) return false;
    dur_put_all(d, 20);
    if (dur_commit(d, 2, &call) != STK_OK) return false;
    memcpy(id, d->s->run_id, STORE_RUN_ID_MAX);
    dur_close(d);
    return true;
}

/* Paths in any order; weights and limits may change; one missing or one too many is named, and
 * nothing is touched. */
TEST(store_durable_paths_in_another_order)
{
    for (int sim = 0; sim < 2; sim++) {
        struct dur d = { 0 };
        struct store_found *f;
        char id[STORE_RUN_ID_MAX];
        REQUIRE(committed(&d, sim ? IO_SIM : IO_POSIX, 3, id));
        const char *p[3] = { d.dirs[2], d.dirs[0], d.dirs[1] };
        memcpy(d.cfg.paths, p, sizeof p);
        d.cfg.weights[0] = 0;
        d.cfg.limits[1] = 1;
        d.cfg.n_paths = 2;
        CHECK(dur_find(&d, NULL, &f) == STK_ERR_CONFIG && strstr(d.err.text, d.dirs[1]) &&
              strstr(d.err.text, id));
        printf("# %s\n", d.err.text);
        memcpy(d.cfg.run_id, id, sizeof id);
        d.cfg.adopt = true;
        CHECK(dur_open(&d) == STK_ERR_CONFIG && strstr(d.err.text, d.dirs[1]));
        d.cfg.paths[3] = d.w.dir; /* one too many */
        d.cfg.n_paths = 4;
        CHECK(dur_open(&d) == STK_ERR_CONFIG && strstr(d.err.text, d.w.dir));
        d.cfg.n_paths = 3;
        CHECK_OK(dur_find(&d, id, &f), &d.err);
        for (uint32_t k = 0; k < 3; k++) CHECK(strcmp(f->paths[k], d.dirs[k]) == 0);
        CHECK_OK(dur_open(&d), &d.err);
        for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 20 + i));
        /* statistics go by the order that the caller knows */
        struct store_path_stats st;
        uint64_t bytes[3] = { 0 };
        for (uint32_t i = 0; i < N; i++)
            bytes[d.s->extents[i].path] += 2 * store_round(sizes[i]);
        for (uint32_t k = 0; k < 3; k++) {
            store_path_stats_read(d.s, (k + 1) % 3, &st);
            CHECK(st.extents_bytes == bytes[k] && st.read_bytes == bytes[k] / 2);
        }
        dur_close(&d);
        CHECK_OK(store_found_discard(f, d.w.disk, &d.err), &d.err);
        store_found_free(f);
        CHECK(nothing_left(&d));
        dur_end(&d);
    }
}

/* Whatever differs from how the store was made is named; the store stays as it was. */
TEST(store_durable_geometry_differs)
{
    for (int sim = 0; sim < 2; sim++) {
        struct dur d = { 0 };
        uint64_t other[N];
        uint8_t other_class[N];
        char id[STORE_RUN_ID_MAX];
        REQUIRE(committed(&d, sim ? IO_SIM : IO_POSIX, 2, id));
        const struct store_cfg good = d.cfg;
        static const char *const want[] = { "extents", "room", "volatile", "payload", "extent 4 of b",
                                            "extent 5 of class", "checksums", "paths" };
        for (uint32_t what = 0; what < 8; what++) {
            d.cfg = good;
            memcpy(d.cfg.run_id, id, sizeof id);
            d.cfg.adopt = true;
            memcpy(other, sizes, sizeof other);
            memcpy(other_class, classes, sizeof other_class);
            d.cfg.extent_bytes = other;
            d.cfg.extent_class = other_class;
            if (what == 0) d.cfg.n_extents--;
            if (what == 1) d.cfg.room = 3;
            if (what == 2) d.cfg.volatile_classes = 1;
            if (what == 3) d.cfg.payload_max_bytes += 8192;
            if (what == 4) other[4]--;
            if (what == 5) other_class[5] = 1;
            if (what == 6) d.cfg.no_checksums = true;
            if (what == 7) d.cfg.n_paths = 1;
            CHECK(dur_open(&d) == STK_ERR_CONFIG && strstr(d.err.text, want[what]));
            if (!strstr(d.err.text, want[what])) printf("# %u: %s\n", what, d.err.text);
        }
        d.cfg = good;
        memcpy(d.cfg.run_id, id, sizeof id);
        CHECK(dur_open(&d) == STK_ERR_STATE && strstr(d.err.text, "there already"));
        memset(d.cfg.run_id, 0, sizeof id);
        CHECK(dur_adopt(&d, 2));
        for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 20 + i));
        dur_end(&d);
    }
}

/* --- damage ----------------------------------------------------------------------------------- */

static void table_name(const struct dur *d, uint32_t path, const char *id, char *out, size_t n)
{
    snprintf(out, n, "%s/stoker-run-%s/table.bin", d->dirs[path], id);
}

static void table_read(struct dur *d, uint32_t path, const char *id, uint8_t *buf, uint64_t n)
{
    char name[2048];
    table_name(d, path, id, name, sizeof name);
    CHECK(store_file_read(d->w.disk, name, buf, n, 0) == (int64_t)n);
}

static void table_write(struct dur *d, uint32_t path, const char *id, const uint8_t *buf,
                        uint64_t n)
{
    char name[2048];
    table_name(d, path, id, name, sizeof name);
    CHECK(store_file_write(d->w.disk, name, buf, n, 0) == 0);
}

static uint64_t found_step(struct dur *d)
{
    struct store_found *f;
    if (dur_find(d, NULL, &f) != STK_OK) return 0;
    uint64_t step = f->step;
    store_found_free(f);
    return step;
}

/* The half being written is torn at every byte, over blank, over the older table: the other half
 * counts, and once it is whole it does. Then every byte of the newer one flipped. */
TEST(store_durable_torn_at_every_byte)
{
    struct dur d = { 0 };
    char id[STORE_RUN_ID_MAX];
    struct commit_call call;
    REQUIRE(committed(&d, IO_SIM, 1, id));
    uint64_t half = store_half_bytes(&d.cfg), size;
    uint8_t *two = calloc(2, half), *three = calloc(2, half), *mix = calloc(2, half);
    table_read(&d, 0, id, two, 2 * half);
    CHECK(dur_adopt(&d, 2));
    dur_put_all(&d, 30);
    CHECK_OK(dur_commit(&d, 3, &call), &d.err);
    dur_close(&d);
    table_read(&d, 0, id, three, 2 * half);
    size = ((const struct store_table_head *)(const void *)three)->size_bytes;
    CHECK(size == store_table_fixed_bytes(1, N) + 3 && memcmp(two + half, three + half, half) == 0);
    for (int blank = 0; blank < 2; blank++) {
        for (uint64_t n = 0; n <= size; n++) {
            memcpy(mix, two, 2 * half);
            if (blank) memset(mix, 0, half);
            memcpy(mix, three, n);
            bool whole = memcmp(mix, three, size) == 0;
            table_write(&d, 0, id, mix, 2 * half);
            uint64_t step = found_step(&d);
            CHECK(step == (whole ? 3 : 2));
        }
    }
    for (uint64_t n = 0; n < size; n++) {
        memcpy(mix, three, 2 * half);
        mix[n] ^= (uint8_t)(1u << n % 8);
        table_write(&d, 0, id, mix, 2 * half);
        CHECK(found_step(&d) == 2);
    }
    /* both damaged: an error that names the file and both halves; never nothing */
    struct store_found *f;
    mix[half + 100] ^= 1;
    table_write(&d, 0, id, mix, 2 * half);
    CHECK(dur_find(&d, NULL, &f) == STK_ERR_CORRUPT && strstr(d.err.text, "table.bin: half 0 ch") &&
          strstr(d.err.text, "half 1 checksum"));
    printf("# %s\n", d.err.text);
    memcpy(d.cfg.run_id, id, sizeof id);
    d.cfg.adopt = true;
    CHECK(dur_open(&d) == STK_ERR_CORRUPT);
    free(two);
    free(three);
    free(mix);
    dur_end(&d);
}

/* A table of any bytes is never followed: random damage with a checksum that fits. */
TEST(store_durable_table_of_any_bytes)
{
    struct dur d = { 0 };
    char id[STORE_RUN_ID_MAX], why[96];
    struct rng r;
    REQUIRE(committed(&d, IO_SIM, 2, id));
    uint64_t half = store_half_bytes(&d.cfg);
    uint8_t *two = calloc(2, half), *copy = malloc(half);
    uint32_t by_state[4] = { 0 };
    table_read(&d, 0, id, two, 2 * half);
    rng_seed(&r, test_seed());
    for (int n = 0; n < 20000; n++) {
        memcpy(copy, two, half);
        for (uint64_t k = 1 + rng_below(&r, 4); k > 0; k--) {
            uint64_t at = rng_below(&r, rng_below(&r, 2) ? 96 : half);
            copy[at] = (uint8_t)rng_next(&r);
        }
        uint64_t have = rng_below(&r, 4) ? half : rng_below(&r, half);
        uint8_t *exact = malloc(have ? have : 1); /* so that a reader beyond its end is caught */
        memcpy(exact, copy, have);
        by_state[store_table_check(exact, have, id, why, sizeof why)]++;
        free(exact);
    }
    CHECK(by_state[HALF_BROKEN] > 10000 && by_state[HALF_UNKNOWN] > 0);
    free(two);
    free(copy);
    dur_end(&d);
}

/* One path's table is older, blank or damaged: the newest whole one of any path counts, and after
 * adopting it lies on every path. */
TEST(store_durable_tables_of_different_age)
{
    for (int how = 0; how < 6; how++) {
        struct dur d = { 0 };
        char id[STORE_RUN_ID_MAX];
        struct commit_call call;
        uint32_t path = (uint32_t)how % 2;
        REQUIRE(committed(&d, how / 2 ? IO_SIM : IO_POSIX, 2, id));
        uint64_t half = store_half_bytes(&d.cfg);
        uint8_t *old = calloc(2, half), *now = calloc(2, half);
        table_read(&d, path, id, old, 2 * half);
        CHECK(dur_adopt(&d, 2));
        dur_put_all(&d, 30);
        CHECK_OK(dur_commit(&d, 3, &call), &d.err);
        dur_close(&d);
        if (how >= 4) memset(old, how == 4 ? 0 : 0x5a, 2 * half);
        table_write(&d, path, id, old, 2 * half);
        CHECK(dur_adopt(&d, 3));
        table_read(&d, 0, id, old, 2 * half);
        table_read(&d, 1, id, now, 2 * half);
        CHECK(memcmp(old, now, store_table_fixed_bytes(2, N) + 3) == 0);
        for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 30 + i));
        dur_put_all(&d, 40);
        CHECK_OK(dur_commit(&d, 4, &call), &d.err);
        dur_close(&d);
        table_write(&d, path, id, old, 2 * half); /* as if this path had lost the last one */
        CHECK(found_step(&d) == 4);
        free(old);
        free(now);
        dur_end(&d);
    }
}

/* --- folders ---------------------------------------------------------------------------------- */

/* Files that are not the store's lie in its folder: they disturb nothing, and are never removed. */
TEST(store_durable_foreign_files)
{
    struct dur d = { 0 };
    char id[STORE_RUN_ID_MAX], name[2048];
    struct store_found *f;
    REQUIRE(committed(&d, IO_POSIX, 2, id));
    for (int k = 0; k < 2; k++) {
        snprintf(name, sizeof name, "%s/stoker-run-%s/%s", d.dirs[0], id,
                 k ? "extents-0.bin.bak" : "notes.txt");
        sys_close(sys_open(name, O_CREAT | O_WRONLY, 0600));
    }
    snprintf(name, sizeof name, "%s/stoker-run-0123456789abcdef", d.dirs[0]);
    sys_close(sys_open(name, O_CREAT | O_WRONLY, 0600)); /* a file of such a name */
    snprintf(name, sizeof name, "%s/stoker-run-fedcba9876543210", d.dirs[1]);
    CHECK(symlink(d.w.dir, name) == 0);
    CHECK(dur_adopt(&d, 2));
    for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 20 + i));
    dur_close(&d);
    CHECK_OK(dur_find(&d, id, &f), &d.err);
    CHECK(store_found_discard(f, NULL, &d.err) == STK_ERR_IO && strstr(d.err.text, "folder stays"));
    store_found_free(f);
    snprintf(name, sizeof name, "%s/stoker-run-%s", d.dirs[0], id);
    CHECK(entries_in(name) == 2 && entries_in(d.dirs[0]) == 2 && entries_in(d.dirs[1]) == 1);
    dur_end(&d);
}

/* NVM-04: of a live run nothing is adopted, found or discarded; it is named. */
TEST(store_nvm_04_durable_store_of_a_live_run)
{
    struct dur d = { 0 };
    char id[STORE_RUN_ID_MAX], pid[32];
    struct store_found *f, *g;
    struct store *second;
    REQUIRE(committed(&d, IO_POSIX, 2, id));
    snprintf(pid, sizeof pid, "pid %d", (int)getpid());
    CHECK_OK(dur_find(&d, id, &f), &d.err);
    CHECK(dur_adopt(&d, 2));
    CHECK(dur_find(&d, id, &g) == STK_ERR_STATE && strstr(d.err.text, pid));
    CHECK(dur_find(&d, NULL, &g) == STK_ERR_STATE);
    stk_error_clear(&d.err);
    CHECK(store_found_discard(f, NULL, &d.err) == STK_ERR_STATE && strstr(d.err.text, pid));
    struct store_cfg cfg = d.cfg;
    memcpy(cfg.run_id, id, sizeof id);
    cfg.adopt = true;
    stk_error_clear(&d.err);
    CHECK(store_world_open(&d.w, &cfg, &second, &d.err) == STK_ERR_STATE);
    CHECK(strstr(d.err.text, pid));
    printf("# %s\n", d.err.text);
    /* another run on the same paths at the same time */
    cfg.adopt = false;
    memset(cfg.run_id, 0, sizeof cfg.run_id);
    stk_error_clear(&d.err);
    CHECK_OK(store_world_open(&d.w, &cfg, &second, &d.err), &d.err);
    const char *const *notes;
    CHECK(store_notes(second, &notes) == 0);
    store_close(second);
    for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 20 + i));
    dur_close(&d);
    stk_error_clear(&d.err);
    CHECK_OK(store_found_discard(f, NULL, &d.err), &d.err);
    store_found_free(f);
    CHECK(nothing_left(&d));
    dur_end(&d);
}

/* A child works on the store and is killed at some moment. */
static void die_durably(struct dur *d, uint64_t commits, bool torn)
{
    struct dur child = { .cfg = d->cfg };
    struct commit_call call;
    snprintf(child.w.dir, sizeof child.w.dir, "%s", d->w.dir);
    if (world_open(&child.w, IO_POSIX, EXEC_THREADS, 1, &child.err) != STK_OK) _exit(1);
    child.buf = sys_mmap(ROOM_BYTES, false);
    if (dur_open(&child) != STK_OK) _exit(2);
    for (uint64_t k = 1; k <= commits; k++) {
        dur_put_all(&child, 10 * k);
        if (dur_commit(&child, k, &call) != STK_OK) _exit(3);
    }
    if (torn) {
        char name[2048];
        snprintf(name, sizeof name, "%s", child.s->paths[0].table);
        if (store_file_write(NULL, name, "STKTABLE torn", 13, 0) != 0) _exit(4);
    }
    raise(SIGKILL);
}

/* NVM-05: three runs on three paths, each killed: before a commit, within the first one, and after
 * two. The next start removes the first two on every path, keeps the third until it is adopted, and
 * names all. */
TEST(store_nvm_05_dead_durable_runs)
{
    struct dur d = { 0 };
    REQUIRE(dur_world(&d, IO_POSIX, EXEC_SIM, 3));
    for (int run = 0; run < 3; run++) {
        int st;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) die_durably(&d, run == 2 ? 2 : 0, run == 1);
        CHECK(waitpid(pid, &st, 0) == pid && WIFSIGNALED(st));
        /* a later run removes what the earlier one left, before the torn table is made */
        for (uint32_t k = 0; k < 3; k++) CHECK(entries_in(d.dirs[k]) == 1);
    }
    CHECK_OK(dur_open(&d), &d.err);
    const char *const *notes;
    uint32_t n = store_notes(d.s, &notes);
    CHECK(n == 3);
    for (uint32_t k = 0; k < n; k++)
        CHECK(strstr(notes[k], "(step 2) is kept") && strstr(notes[k], "pid "));
    dur_close(&d);
    CHECK(dur_adopt(&d, 2));
    for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 20 + i));
    store_discard(d.s);
    dur_close(&d);
    CHECK(nothing_left(&d));
    dur_end(&d);
}

/* A table of a later program is never removed. */
TEST(store_durable_later_format_is_kept)
{
    struct dur d = { 0 };
    char id[STORE_RUN_ID_MAX];
    struct store_found *f;
    REQUIRE(committed(&d, IO_POSIX, 1, id));
    uint64_t half = store_half_bytes(&d.cfg);
    uint8_t *table = calloc(2, half);
    table_read(&d, 0, id, table, 2 * half);
    table[8] = table[half + 8] = 9;
    table_write(&d, 0, id, table, 2 * half);
    CHECK(dur_find(&d, NULL, &f) == STK_ERR_CORRUPT && strstr(d.err.text, "format 9"));
    CHECK_OK(dur_open(&d), &d.err);
    const char *const *notes;
    CHECK(store_notes(d.s, &notes) == 1 && strstr(notes[0], "is kept"));
    dur_close(&d);
    CHECK(entries_in(d.dirs[0]) == 1);
    free(table);
    dur_end(&d);
}

/* NVM-02: of two paths one is a small file system. The store shares out by what is free, says so,
 * and once it is open nothing needs room any more: puts, commits and adopting work on a full
 * disk. */
TEST(store_nvm_02_durable_on_a_full_disk)
{
    enum { EACH = 1 << 20, COUNT = 24 };
    struct dur d = { 0 };
    struct commit_call call;
    uint64_t bytes[COUNT];
    char dir[256], cmd[1500], small[512];
    const char *const *notes;
    if (geteuid() != 0 || !world_dir(dir, sizeof dir)) SKIP("needs root");
    snprintf(cmd, sizeof cmd,
             "cd %s && truncate -s 24M img && mkfs.ext4 -q -m 0 img && mkdir m && mount -o loop "
             "img m 2>/dev/null",
             dir);
    if (system(cmd) != 0) {
        sys_remove_tree(dir);
        SKIP("no loop file system here");
    }
    REQUIRE(dur_world(&d, IO_POSIX, EXEC_SIM, 2));
    snprintf(small, sizeof small, "%s/m", dir);
    snprintf(d.dirs[0], sizeof d.dirs[0], "%s", small);
    for (int i = 0; i < COUNT; i++) bytes[i] = EACH;
    d.cfg.n_extents = COUNT;
    d.cfg.extent_bytes = bytes;
    d.cfg.extent_class = NULL;
    uint64_t have = (uint64_t)sys_disk_free(small);
    CHECK(store_need_bytes(&d.cfg, 0) > have);
    CHECK_OK(dur_open(&d), &d.err);
    CHECK(store_notes(d.s, &notes) == 1 && strstr(notes[0], small) && strstr(notes[0], "short of"));
    struct store_path_stats st;
    store_path_stats_read(d.s, 0, &st);
    CHECK(st.extents_bytes <= have && st.extents_bytes > have / 2);
    snprintf(cmd, sizeof cmd, "dd if=/dev/zero of=%s/filler bs=64k 2>/dev/null", small);
    CHECK(system(cmd) != 0 && sys_disk_free(small) < 65536);
    uint8_t *buf = sys_mmap(EACH, false);
    struct store_op op;
    for (uint64_t v = 1; v <= 3; v++) {
        for (uint32_t i = 0; i < COUNT; i++) {
            fill(buf, EACH, content(i, v));
            CHECK(put_one(&d.w, d.s, i, buf, v, &op) == STK_OK);
        }
        if (v < 3) CHECK_OK(dur_commit(&d, v, &call), &d.err);
    }
    memcpy(d.cfg.run_id, d.s->run_id, sizeof d.cfg.run_id);
    dur_close(&d);
    d.cfg.adopt = true;
    CHECK_OK(dur_open(&d), &d.err);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(get_one(&d.w, d.s, i, buf, 2, &op) == STK_OK && filled(buf, EACH, content(i, 2)));
    store_discard(d.s);
    dur_close(&d);
    CHECK((uint64_t)sys_disk_free(small) > have / 2 && entries_in(d.dirs[1]) == 0);
    /* no path has room for it all: refused with the numbers, nothing stays */
    for (int i = 0; i < COUNT; i++) bytes[i] = 1ull << 40;
    memset(d.cfg.run_id, 0, sizeof d.cfg.run_id);
    d.cfg.adopt = false;
    CHECK(dur_open(&d) == STK_ERR_NOSPACE && strstr(d.err.text, "are free"));
    CHECK(entries_in(d.dirs[1]) == 0);
    sys_munmap(buf, EACH);
    dur_end(&d);
    snprintf(cmd, sizeof cmd, "umount %s", small);
    CHECK(system(cmd) == 0);
    sys_remove_tree(dir);
}

/* --- every system call fails once ------------------------------------------------------------- */

/* Adopting fails at each call in turn: a sentence, and the store is as it was. */
TEST(store_durable_adopting_fails_half_way)
{
    static const enum sys_call kinds[] = { SYS_ALLOC, SYS_OPEN, SYS_READ, SYS_WRITE, SYS_FSYNC,
                                           SYS_MMAP };
    struct dur d = { 0 };
    char id[STORE_RUN_ID_MAX];
    REQUIRE(committed(&d, IO_POSIX, 2, id));
    uint64_t half = store_half_bytes(&d.cfg);
    uint8_t *blank = calloc(2, half);
    memcpy(d.cfg.run_id, id, sizeof id);
    d.cfg.adopt = true;
    uint64_t alive = sys_alloc_bytes();
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        uint32_t failed = 0;
        for (uint64_t k = 1; k < 40; k++) {
            table_write(&d, 1, id, blank, 2 * half); /* so that adopting has to write it */
            sys_fault_arm(kinds[i], k, 1, kinds[i] == SYS_ALLOC ? ENOMEM : EIO);
            stk_status status = dur_open(&d);
            sys_fault_arm(kinds[i], 0, 0, 0);
            if (status != STK_OK) {
                failed++;
                CHECK(!d.s && strlen(d.err.text) > 10 && d.err.code == status);
            }
            dur_close(&d);
            CHECK(sys_alloc_bytes() == alive && found_step(&d) == 2);
        }
        CHECK(failed >= 1);
    }
    CHECK_OK(dur_open(&d), &d.err);
    for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 20 + i));
    free(blank);
    dur_end(&d);
}

/* Making a durable store fails at each call in turn: nothing stays on any path. */
TEST(store_durable_opening_fails_half_way)
{
    static const enum sys_call kinds[] = { SYS_ALLOC, SYS_OPEN, SYS_WRITE, SYS_FSYNC, SYS_MMAP,
                                           SYS_ALLOCATE };
    struct dur d = { 0 };
    REQUIRE(dur_world(&d, IO_POSIX, EXEC_SIM, 2));
    CHECK_OK(dur_open(&d), &d.err); /* the io keeps a drive once it is opened */
    dur_close(&d);
    uint64_t alive = sys_alloc_bytes();
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        uint32_t failed = 0;
        for (uint64_t k = 1; k < 40; k++) {
            sys_fault_arm(kinds[i], k, 1, kinds[i] == SYS_ALLOC ? ENOMEM : ENOSPC);
            failed += dur_open(&d) != STK_OK;
            sys_fault_arm(kinds[i], 0, 0, 0);
            dur_close(&d);
            CHECK(sys_alloc_bytes() == alive && nothing_left(&d));
        }
        CHECK(failed >= 1);
    }
    dur_end(&d);
}

TEST_MAIN()
