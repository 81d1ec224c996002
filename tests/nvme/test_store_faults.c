/* tests/nvme/test_store_faults.c - the store on a simulated disk that does everything wrong: right
 * bytes or a clean error, for every seed. The canary runs the same harness without checksums: it
 * must find silent damage, or the harness proves nothing. */
#include "tests/nvme/store_world.h"

enum { EXTENTS = 12, ROUNDS = 12, ROOM_BYTES = 24576 };

struct outcome { uint64_t good, errors, silent, stalled, by_kind[11], trace; };

/* One seed's run: extents of different sizes are put and got in drawn order; the model knows what
 * each should hold. */
struct fault_run {
    uint64_t seed;
    struct world w;
    struct store *s;
    struct rng r;
    uint32_t room;
    uint64_t bytes[EXTENTS], holds[EXTENTS], version[EXTENTS];
    uint8_t *buf;
    struct store_op ops[EXTENTS];
};

static const struct io_sim_faults every_fault = {
    .read_error_ppm = 10000, .write_error_ppm = 10000, .short_ppm = 50000, .no_space_ppm = 10000,
    .flip_bit_ppm = 15000, .rot_bit_ppm = 15000, .misdirect_ppm = 15000, .lost_write_ppm = 15000,
    .late_ppm = 50000, .reorder_ppm = 100000, .late_ns = 50000, .first_request = 4,
};

static uint8_t *buf_of(struct fault_run *f, uint32_t i) { return f->buf + i * ROOM_BYTES; }

/* Prepares the operations of a round; returns how many. */
static uint32_t draw_round(struct fault_run *f, uint64_t round, bool put)
{
    uint32_t n = 0, ids[EXTENTS];
    for (uint32_t i = 0; i < EXTENTS; i++) ids[i] = i;
    rng_shuffle_u32(&f->r, ids, EXTENTS);
    for (uint32_t k = 0; k < EXTENTS; k++) {
        uint32_t i = ids[k];
        if (put ? rng_below(&f->r, 4) == 0 : f->version[i] == UINT64_MAX) continue;
        f->ops[n++] = (struct store_op){ .extent = i, .buf = buf_of(f, i),
                                         .version = put ? round : f->version[i] };
        if (put) fill(buf_of(f, i), f->bytes[i], f->seed * 1000 + round * 100 + i);
        else memset(buf_of(f, i), 0x5a, f->bytes[i]);
    }
    return n;
}

static void judge(struct fault_run *f, const struct store_op *op, uint64_t round, bool put,
                  struct outcome *out)
{
    uint32_t i = op->extent;
    if (op->status != STK_OK) {
        out->errors++;
        CHECK(op->error.code == op->status && strstr(op->error.text, "extent "));
        if (put && f->room == 1) f->version[i] = UINT64_MAX; /* overwritten in place, and failed */
        CHECK(!put || store_version(f->s, i) == f->version[i]);
    } else if (put) {
        f->version[i] = round;
        f->holds[i] = f->seed * 1000 + round * 100 + i;
    } else if (filled(buf_of(f, i), f->bytes[i], f->holds[i])) {
        out->good++;
    } else {
        out->silent++;
    }
}

static stk_status run_open(struct fault_run *f, enum exec_kind ex, bool no_checksums,
                           struct stk_error *err)
{
    f->w = (struct world){ .cfg = { .depth = 4 } };
    f->w.sim = (struct io_sim_cfg){ .latency_ns = 1000, .read_bytes_per_s = 2e9,
                                    .write_bytes_per_s = 1e9, .faults = every_fault };
    f->w.sim.faults.lost_completion_ppm = f->seed % 4 ? 0 : 2000;
    rng_seed_stream(&f->r, f->seed, 1);
    for (uint32_t i = 0; i < EXTENTS; i++) {
        f->bytes[i] = 1 + rng_below(&f->r, ROOM_BYTES);
        f->version[i] = UINT64_MAX;
    }
    f->room = 1 + (uint32_t)(f->seed % 3);
    struct store_cfg cfg = { .n_extents = EXTENTS, .extent_bytes = f->bytes, .room = f->room,
                             .no_checksums = no_checksums };
    STK_TRY(world_open(&f->w, IO_SIM, ex, f->seed, err));
    STK_TRY(store_world_open(&f->w, &cfg, &f->s, err));
    f->buf = sys_mmap(EXTENTS * ROOM_BYTES, false);
    return f->buf ? STK_OK : STK_ERR_NOMEM;
}

static void one_run(uint64_t seed, enum exec_kind ex, bool no_checksums, struct outcome *out)
{
    struct fault_run *f = calloc(1, sizeof *f);
    struct stk_error err = { 0 };
    f->seed = seed;
    CHECK_OK(run_open(f, ex, no_checksums, &err), &err);
    bool stalled = false;
    for (uint64_t round = 0; round < ROUNDS && !stalled; round++) {
        bool put = round % 2 == 0;
        uint32_t n = draw_round(f, round, put);
        stalled = ops_run(&f->w, f->s, f->ops, n, put) != STK_OK;
        for (uint32_t k = 0; k < n && !stalled; k++) judge(f, &f->ops[k], round, put, out);
    }
    const char *text = f->ops[0].error.text;
    if (stalled) CHECK(strstr(text, "not completed") && strstr(text, "extents-0.bin"));
    out->stalled += stalled;
    uint64_t kinds[11];
    io_sim_faults_done(f->w.disk, kinds);
    for (int k = 0; k < 11; k++) out->by_kind[k] += kinds[k];
    out->trace = rng_hash64(out->trace ^ exec_trace_hash(f->w.ex));
    store_close(f->s);
    world_close(&f->w);
    sys_munmap(f->buf, EXTENTS * ROOM_BYTES);
    free(f);
}

TEST(store_survives_every_fault)
{
    struct outcome o = { 0 };
    for (uint64_t k = 0; k < 400; k++) one_run(test_seed() + k, EXEC_SIM, false, &o);
    for (uint64_t k = 0; k < 40; k++) one_run((test_seed() + k) | 1, EXEC_THREADS, false, &o);
    printf("# %" PRIu64 " right, %" PRIu64 " errors, %" PRIu64 " stalls, %" PRIu64 " silent\n",
           o.good, o.errors, o.stalled, o.silent);
    CHECK(o.silent == 0 && o.good > 1000 && o.errors > 100 && o.stalled > 5);
    for (int k = 0; k < 11; k++) CHECK(o.by_kind[k] > 0);
}

TEST(store_run_repeats_from_its_seed)
{
    struct outcome a = { 0 }, b = { 0 };
    for (uint64_t k = 0; k < 10; k++) one_run(test_seed() + k, EXEC_SIM, false, &a);
    for (uint64_t k = 0; k < 10; k++) one_run(test_seed() + k, EXEC_SIM, false, &b);
    CHECK(memcmp(&a, &b, sizeof a) == 0 && a.trace != 0);
}

TEST(store_canary_without_checksums_damage_is_silent)
{
    struct outcome o = { 0 };
    for (uint64_t k = 0; k < 40; k++) one_run(test_seed() + k, EXEC_SIM, true, &o);
    printf("# %" PRIu64 " right, %" PRIu64 " errors, %" PRIu64 " silent\n", o.good, o.errors,
           o.silent);
    CHECK(o.silent > 20);
}

struct write_call { struct world *w; struct io_req req; };

static void write_done(struct io_req *req) { CHECK(req->status == STK_OK); }

static void write_start(void *arg)
{
    struct write_call *c = arg;
    struct stk_error err = { 0 };
    c->req.done = write_done;
    CHECK(io_submit(c->w->io, &c->req, &err) == STK_OK);
}

static void do_req(struct world *w, enum io_op op, uint32_t file, uint8_t *buf, uint64_t at)
{
    struct stk_error err = { 0 };
    struct write_call c = {
        .w = w,
        .req = { .op = op, .file = file, .buf = buf, .offset_bytes = at, .size_bytes = 8192 }
    };
    world_run(w, write_start, &c);
    CHECK(io_drain(w->io, UINT64_MAX, &err) == STK_OK);
}

/* The disk outlives its io; a power cut takes what was not flushed, wholly (seed 0) or by sectors.
 */
TEST(sim_power_cut_loses_what_was_not_flushed)
{
    for (uint64_t seed = 0; seed < 4; seed++) {
        struct stk_error err = { 0 };
        struct world w = { 0 };
        uint32_t file;
        CHECK_OK(world_open(&w, IO_SIM, EXEC_SIM, 1, &err), &err);
        CHECK_OK(world_file(&w, "a", 65536, 0, &file, &err), &err);
        uint8_t *buf = sys_mmap(16384, false);
        fill(buf, 8192, 1);
        do_req(&w, IO_WRITE, file, buf, 4096);
        do_req(&w, IO_FLUSH, file, NULL, 0);
        fill(buf, 8192, 2);
        do_req(&w, IO_WRITE, file, buf, 4096);
        do_req(&w, IO_WRITE, file, buf, 32768);
        io_close(w.io);
        io_sim_power_cut(w.disk, seed);
        CHECK_OK(io_open(&w.cfg, &w.io, &err), &err);
        CHECK_OK(io_file_add(w.io, "/sim/a", 0, &file, &err), &err);
        do_req(&w, IO_READ, file, buf, 4096);
        fill(buf + 8192, 8192, 1);
        uint32_t old = 0, fresh = 0;
        for (int k = 0; k < 16; k++) old += memcmp(buf + k * 512, buf + 8192 + k * 512, 512) == 0;
        fill(buf + 8192, 8192, 2);
        for (int k = 0; k < 16; k++) fresh += memcmp(buf + k * 512, buf + 8192 + k * 512, 512) == 0;
        CHECK(old + fresh == 16 && (seed == 0 ? old == 16 : old > 0 && fresh > 0));
        world_close(&w);
        sys_munmap(buf, 16384);
    }
}

TEST_MAIN()
