/* tests/gpu/test_device_stream.c - streams by threads and in simulation: order, marks between
 * streams, full queues, notifications, the sticky error, closing with work queued. Work is copies
 * and zeros of small buffers, whose order shows in the bytes. */
#include "tests/test.h"
#include "tests/gpu/kern_test.h"
#include "tests/gpu/dev_test.h"

TEST_MAIN()

#define EACH_EXEC(k_) \
    for (enum exec_kind k_ = EXEC_THREADS; k_ <= EXEC_SIM; k_ = (enum exec_kind)(k_ + 1))

static const struct dev_cfg in_place = { .kind = DEV_HOST,
                                         .matmul = DEV_MATMUL_F32,
                                         .compute_threads = 1 };

/* Each copy moves on what the one before has moved: any other order breaks the chain. */
TEST(stream_runs_in_order)
{
    EACH_EXEC(k) {
        struct rig r;
        static uint64_t cell[1001];
        memset(cell, 0, sizeof cell);
        cell[0] = 77;
        CHECK_OK(rig_open(&r, k, in_place), &r.err);
        for (int i = 0; i < 1000; i++)
            CHECK_OK(dev_copy(r.s, &cell[i + 1], &cell[i], 8, DEV_ON_DEVICE, &r.err), &r.err);
        CHECK_OK(dev_sync(r.s, &r.err), &r.err);
        CHECK(cell[1000] == 77);
        CHECK(strcmp(r.s->name, "compute") == 0 && dev_of(r.s) == r.d);
        rig_close(&r);
    }
}

/* The same chain over two streams that take turns: any missing wait breaks it. The simulation runs
 * many seeds. */
static void check_ping_pong(enum exec_kind k, uint64_t seed)
{
    struct rig r = { 0 };
    struct dev_stream *s[2];
    struct dev_mark m[2];
    enum { ROUNDS = 200 };
    static uint64_t cell[ROUNDS + 1];
    CHECK_OK(k == EXEC_SIM ? exec_open_sim(seed, &r.ex, &r.err) : exec_open_threads(&r.ex, &r.err),
             &r.err);
    struct dev_cfg cfg = in_place;
    cfg.ex = r.ex;
    CHECK_OK(dev_open(&cfg, &r.d, &r.err), &r.err);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(dev_stream_open(r.d, i ? "b" : "a", 16, &s[i], &r.err), &r.err);
        CHECK_OK(dev_mark_init(r.d, &m[i], &r.err), &r.err);
    }
    memset(cell, 0, sizeof cell);
    cell[0] = seed + 17;
    for (int i = 0; i < ROUNDS;
         i++) { /* stream i % 2 copies cell i to i + 1 when the other has written cell i */
        if (i) CHECK_OK(dev_mark_wait(s[i % 2], &m[(i + 1) % 2], &r.err), &r.err);
        CHECK_OK(dev_copy(s[i % 2], &cell[i + 1], &cell[i], 8, DEV_ON_DEVICE, &r.err), &r.err);
        CHECK_OK(dev_mark_record(s[i % 2], &m[i % 2], &r.err), &r.err);
    }
    CHECK_OK(dev_sync(s[0], &r.err), &r.err);
    CHECK_OK(dev_sync(s[1], &r.err), &r.err);
    CHECK(cell[ROUNDS] == seed + 17);
    for (int i = 0; i < 2; i++) {
        dev_mark_free(&m[i]);
        dev_stream_close(s[i]);
    }
    dev_close(r.d);
    exec_close(r.ex);
}

TEST(stream_marks_order_two_streams_by_threads) { check_ping_pong(EXEC_THREADS, 0); }
TEST(stream_marks_order_two_streams_in_simulation)
{
    for (uint64_t i = 0; i < 20; i++) check_ping_pong(EXEC_SIM, test_seed() + i);
}

/* Three streams wait for one mark; an unrecorded mark holds nobody. */
TEST(stream_mark_with_several_waiters)
{
    EACH_EXEC(k) {
        struct rig r;
        struct dev_stream *s[3];
        struct dev_mark m, never;
        static uint64_t src = 5, dst[4];
        CHECK_OK(rig_open(&r, k, in_place), &r.err);
        CHECK_OK(dev_mark_init(r.d, &m, &r.err), &r.err);
        CHECK_OK(dev_mark_init(r.d, &never, &r.err), &r.err);
        memset(dst, 0, sizeof dst);
        static uint8_t big[1 << 20];
        for (int i = 0; i < 50; i++) CHECK_OK(dev_zero(r.s, big, sizeof big, &r.err), &r.err);
        CHECK_OK(dev_copy(r.s, &dst[3], &src, 8, DEV_ON_DEVICE, &r.err), &r.err);
        CHECK_OK(dev_mark_record(r.s, &m, &r.err), &r.err);
        for (int i = 0; i < 3; i++) {
            CHECK_OK(dev_stream_open(r.d, "w", 4, &s[i], &r.err), &r.err);
            CHECK_OK(dev_mark_wait(s[i], &never, &r.err), &r.err);
            CHECK_OK(dev_mark_wait(s[i], &m, &r.err), &r.err);
            CHECK_OK(dev_copy(s[i], &dst[i], &dst[3], 8, DEV_ON_DEVICE, &r.err), &r.err);
        }
        for (int i = 0; i < 3; i++) {
            CHECK_OK(dev_sync(s[i], &r.err), &r.err);
            CHECK(dst[i] == 5);
            dev_stream_close(s[i]);
        }
        dev_mark_free(&m);
        dev_mark_free(&never);
        rig_close(&r);
    }
}

/* The application's thread waits for room in a queue of two. */
TEST(stream_full_queue_application_waits)
{
    EACH_EXEC(k) {
        struct rig r;
        struct dev_stream *s;
        static uint8_t page[4096];
        CHECK_OK(rig_open(&r, k, in_place), &r.err);
        CHECK(dev_stream_open(r.d, "deep", UINT32_MAX, &s, &r.err) == STK_ERR_CONFIG);
        stk_error_clear(&r.err);
        CHECK_OK(dev_stream_open(r.d, "short", 2, &s, &r.err), &r.err);
        for (int i = 0; i < 2000; i++) CHECK_OK(dev_zero(s, page, sizeof page, &r.err), &r.err);
        CHECK_OK(dev_sync(s, &r.err), &r.err);
        if (k == EXEC_THREADS) CHECK(dev_stream_busy_ns(s) > 0);
        dev_stream_close(s);
        rig_close(&r);
    }
}

/* A lane is told STK_BUSY by a full queue and goes on when it is notified. The stream is held by a
 * mark meanwhile. */
struct producer {
    struct rig *r;
    struct dev_stream *s;
    struct exec_lane *lane;
    struct exec_task task;
    struct exec_event full, done;
    int queued, busy;
    stk_status other;
};
static uint64_t producer_src = 3, producer_dst;

static void produce(void *arg)
{
    struct producer *p = arg;
    while (p->queued < 40) {
        stk_status st = dev_copy(p->s, &producer_dst, &producer_src, 8, DEV_ON_DEVICE, NULL);
        if (st == STK_OK)
            p->queued++;
        else if (st != STK_BUSY)
            p->other = st;
        if (st == STK_OK) continue;
        p->busy++;
        exec_event_set(&p->full);
        return;
    }
    exec_event_set(&p->done);
}

TEST(stream_full_queue_lane_gets_busy)
{
    EACH_EXEC(k) {
        struct rig r;
        struct producer p = { .r = &r };
        struct dev_mark gate;
        struct dev_stream *holder;
        static uint8_t big[1 << 22];
        CHECK_OK(rig_open(&r, k, in_place), &r.err);
        CHECK_OK(dev_stream_open(r.d, "short", 4, &p.s, &r.err), &r.err);
        CHECK_OK(dev_stream_open(r.d, "holder", 64, &holder, &r.err), &r.err);
        CHECK_OK(exec_lane_open(r.ex, "producer", &p.lane, &r.err), &r.err);
        CHECK_OK(dev_mark_init(r.d, &gate, &r.err), &r.err);
        exec_task_init(&p.task, produce, &p);
        exec_event_init(r.ex, &p.full);
        exec_event_init(r.ex, &p.done);
        for (int i = 0; i < 8; i++) CHECK_OK(dev_zero(holder, big, sizeof big, &r.err), &r.err);
        CHECK_OK(dev_mark_record(holder, &gate, &r.err), &r.err);
        CHECK_OK(dev_mark_wait(p.s, &gate, &r.err), &r.err);
        while (!exec_event_is_set(&p.done)) {
            exec_event_reset(&p.full);
            exec_post(p.lane, &p.task);
            /* either it filled the queue, and the stream empties, or it is done */
            while (!exec_event_is_set(&p.full) && !exec_event_is_set(&p.done)) {
                struct exec_event
                    tick; /* both events are looked at after any progress of the stream */
                exec_event_init(r.ex, &tick);
                CHECK_OK(dev_notify(holder, NULL, NULL, &tick, &r.err), &r.err);
                CHECK_OK(exec_event_wait(&tick, UINT64_MAX, &r.err), &r.err);
            }
        }
        CHECK(p.queued == 40 && p.other == STK_OK);
        CHECK(p.busy > 0); /* 40 commands, a queue of 4, and a gate before them */
        exec_lane_close(p.lane);
        CHECK_OK(dev_sync(p.s, &r.err), &r.err);
        CHECK(producer_dst == 3);
        dev_mark_free(&gate);
        dev_stream_close(holder);
        dev_stream_close(p.s);
        rig_close(&r);
    }
}

/* A task is posted to its lane after what was queued before, and not earlier. */
struct noted {
    struct exec_event ev;
    const uint64_t *at;
    uint64_t seen;
};
static void note(void *arg)
{
    struct noted *n = arg;
    n->seen = *n->at;
    exec_event_set(&n->ev);
}

TEST(stream_notifies_a_lane_after_the_work)
{
    EACH_EXEC(k) {
        struct rig r;
        struct exec_lane *lane;
        struct exec_task task;
        static uint64_t src = 42, at;
        at = 0;
        struct noted n = { .at = &at };
        CHECK_OK(rig_open(&r, k, in_place), &r.err);
        CHECK_OK(exec_lane_open(r.ex, "engine", &lane, &r.err), &r.err);
        exec_event_init(r.ex, &n.ev);
        exec_task_init(&task, note, &n);
        CHECK_OK(dev_copy(r.s, &at, &src, 8, DEV_ON_DEVICE, &r.err), &r.err);
        CHECK_OK(dev_notify(r.s, lane, &task, NULL, &r.err), &r.err);
        CHECK_OK(exec_event_wait(&n.ev, UINT64_MAX, &r.err), &r.err);
        CHECK(n.seen == 42);
        exec_lane_close(lane);
        rig_close(&r);
    }
}

/* An error on one stream skips the work of the other, but marks pass and notifications fire. */
TEST(stream_error_is_sticky_and_nobody_hangs)
{
    EACH_EXEC(k) {
        struct rig r;
        struct dev_stream *other;
        struct dev_mark m;
        void *arena;
        static uint8_t host[64];
        struct dev_cfg cfg = { .kind = DEV_HOST_DISCRETE,
                               .memory_bytes = 4096,
                               .matmul = DEV_MATMUL_F32,
                               .compute_threads = 1 };
        CHECK_OK(rig_open(&r, k, cfg), &r.err);
        CHECK_OK(dev_reserve(r.d, 4096, &arena, &r.err), &r.err);
        CHECK_OK(dev_stream_open(r.d, "other", 0, &other, &r.err), &r.err);
        CHECK_OK(dev_mark_init(r.d, &m, &r.err), &r.err);
        memset(host, 1, sizeof host);
        CHECK(dev_status(r.d, NULL) == STK_OK);
        CHECK_OK(dev_zero(r.s, host, 64, &r.err), &r.err); /* host memory: refused when it runs */
        CHECK_OK(dev_mark_record(r.s, &m, &r.err), &r.err);
        CHECK_OK(dev_mark_wait(other, &m, &r.err), &r.err);
        CHECK_OK(dev_copy(other, host, arena, 64, DEV_TO_HOST, &r.err), &r.err);
        CHECK(dev_sync(other, &r.err) == STK_ERR_DEVICE);
        CHECK(strstr(r.err.text, "zero: operand destination"));
        CHECK(host[0] == 1 && host[63] == 1);
        dev_mark_free(&m);
        dev_stream_close(other);
        rig_close(&r);
    }
}

TEST(stream_close_finishes_what_is_queued)
{
    EACH_EXEC(k) {
        struct rig r;
        static uint8_t bytes[1000];
        CHECK_OK(rig_open(&r, k, in_place), &r.err);
        memset(bytes, 1, sizeof bytes);
        for (int i = 0; i < 1000; i++) CHECK_OK(dev_zero(r.s, &bytes[i], 1, &r.err), &r.err);
        rig_close(&r);
        for (int i = 0; i < 1000; i++) CHECK(bytes[i] == 0);
    }
}

/* Nobody records: the simulation finds it at once instead of hanging, and closing still works. */
TEST(stream_lost_mark_is_found_by_the_simulation)
{
    struct rig r;
    struct dev_mark m;
    CHECK_OK(rig_open(&r, EXEC_SIM, in_place), &r.err);
    CHECK_OK(dev_mark_init(r.d, &m, &r.err), &r.err);
    m.recorded = 1; /* as if a record had been queued on a stream that is gone */
    CHECK_OK(dev_mark_wait(r.s, &m, &r.err), &r.err);
    CHECK(dev_sync(r.s, &r.err) == STK_ERR_STALLED);
    rig_close(&r);
}
