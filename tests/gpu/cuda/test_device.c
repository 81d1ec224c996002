/* tests/gpu/cuda/test_device.c - the CUDA device on the stand-in: opening and its refusals, memory, streams, marks,
 * notifications, full queues, the sticky error; by threads and in simulation over seeds. What tests/gpu/test_device*.c
 * ask of the host device, where it is a contract of every device. */
#include "tests/test.h"
#include "tests/gpu/cuda/device_rig.h"

#include <math.h>

TEST_MAIN()

#define KIB(n) ((uint64_t)(n) << 10)
#define MIB(n) ((uint64_t)(n) << 20)

TEST(cuda_device_caps_and_numerics_key)
{
    struct rig r;
    struct dev_caps c;
    char text[256];
    rig_world(&r, EXEC_THREADS, 1, (struct standin_cfg){ .memory_bytes = MIB(1024), .context_bytes = MIB(100) });
    CHECK_OK(rig_device(&r, DEV_MATMUL_AUTO, 0), &r.err);
    dev_caps_read(r.d, &c);
    printf("# %s\n", c.numerics);
    CHECK(c.kind == DEV_CUDA && !c.host_in_place && !c.modelled_time && strcmp(c.name, "cuda") == 0);
    CHECK(c.align_bytes == 256 && c.matmul == DEV_MATMUL_BF16 && strstr(c.numerics, "cc=8.9") && strstr(c.numerics, "matmul=bf16"));
    CHECK(c.memory_bytes > MIB(800) && c.memory_bytes < MIB(924));
    CHECK_OK(dev_describe(DEV_CUDA, text, sizeof text, &r.err), &r.err);
    CHECK(strstr(text, "stand-in") && strstr(text, "8.9"));
    RIG_CLOSE(&r);
}

TEST(cuda_device_refusals)
{
    static const struct refusal {
        struct standin_cfg cfg;
        const char *says;
        const char *fails; /* this call, with this error */
        int error;
    } refusals[] = {
        { { .driver_version = -1 }, "no NVIDIA driver", NULL, 0 },
        { { .driver_version = 12040 }, "driver is too old", NULL, 0 },
        { { .devices = -1 }, "no card", NULL, 0 },
        { { .cc_major = 7, .cc_minor = 0 }, "compute capability 7.0", NULL, 0 },
        { { 0 }, "no memory left for a context", "cudaSetDevice", cudaErrorMemoryAllocation },
        { { 0 }, "in use by another process", "cudaSetDevice", cudaErrorDevicesUnavailable },
        { { 0 }, "cudaMemGetInfo", "cudaMemGetInfo", cudaErrorUnknown },
    };
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        struct rig r;
        rig_world(&r, EXEC_THREADS, 1, refusals[i].cfg);
        if (refusals[i].fails) standin_fail(refusals[i].fails, 1, refusals[i].error);
        struct dev_cfg cfg = { .kind = DEV_CUDA, .ex = r.ex };
        CHECK(dev_open(&cfg, &r.d, &r.err) != STK_OK && !r.d);
        CHECK(strstr(r.err.text, refusals[i].says));
        if (!strstr(r.err.text, refusals[i].says)) printf("# %s\n", r.err.text);
        RIG_CLOSE(&r);
    }
}

TEST(cuda_device_arena_is_capped)
{
    struct rig r;
    void *p = NULL;
    struct dev_caps c;
    rig_world(&r, EXEC_THREADS, 1, (struct standin_cfg){ 0 });
    struct dev_cfg cfg = { .kind = DEV_CUDA, .ex = r.ex, .memory_bytes = MIB(400) };
    CHECK_OK(dev_open(&cfg, &r.d, &r.err), &r.err);
    dev_caps_read(r.d, &c);
    CHECK(c.memory_bytes < MIB(400 - 256) && c.memory_bytes > MIB(10));
    CHECK(dev_reserve(r.d, c.memory_bytes + 1, &p, &r.err) == STK_ERR_NOMEM && !p);
    stk_error_clear(&r.err);
    CHECK_OK(dev_reserve(r.d, MIB(1), &p, &r.err), &r.err);
    CHECK(dev_reserve(r.d, 1, &p, &r.err) == STK_ERR_STATE);
    struct standin_counts counts;
    standin_counts_read(&counts);
    CHECK(counts.device_bytes_peak + MIB(256) <= MIB(400));
    RIG_CLOSE(&r);
}

/* --- operands on the wrong side --- */

static uint8_t far[4096];

static const char *misuse(struct rig *r, int n)
{
    switch (n) {
    case 0: dev_copy(r->s, far, far + 512, 16, DEV_TO_DEVICE, NULL); return "copy: operand dest";
    case 1: dev_copy(r->s, r->arena, r->arena + 512, 16, DEV_TO_DEVICE, NULL); return "copy: operand source";
    case 2: dev_copy(r->s, r->arena + 64, r->arena, 16, DEV_TO_HOST, NULL); return "copy: operand dest";
    case 3: dev_copy(r->s, r->arena + KIB(64) - 8, far, 16, DEV_TO_DEVICE, NULL); return "copy: operand dest";
    case 4: dev_zero(r->s, far, 16, NULL); return "zero: operand dest";
    default: return NULL;
    }
}

TEST(cuda_device_checks_operands)
{
    const char *named = "";
    for (int n = 0; named; n++) {
        struct rig r;
        CHECK_OK(rig_open(&r, EXEC_THREADS, 1, KIB(64)), &r.err);
        CHECK_OK(dev_host_register(r.d, far, sizeof far, &r.err), &r.err);
        far[7] = 5;
        CHECK_OK(dev_copy(r.s, r.arena, far, 1024, DEV_TO_DEVICE, &r.err), &r.err);
        CHECK_OK(dev_copy(r.s, r.arena + 4096, r.arena, 1024, DEV_ON_DEVICE, &r.err), &r.err);
        CHECK_OK(dev_copy(r.s, far + 2048, r.arena + 4096, 1024, DEV_TO_HOST, &r.err), &r.err);
        CHECK_OK(dev_sync(r.s, &r.err), &r.err);
        CHECK(far[2048 + 7] == 5);
        named = misuse(&r, n);
        if (named) {
            CHECK(dev_sync(r.s, &r.err) == STK_ERR_DEVICE && strstr(r.err.text, named));
            struct stk_error later = { 0 };
            far[2048] = 77;
            CHECK(dev_copy(r.s, far + 2048, r.arena, 1024, DEV_TO_HOST, &later) == STK_OK);
            CHECK(dev_sync(r.s, &later) == STK_ERR_DEVICE && strcmp(later.text, r.err.text) == 0 && far[2048] == 77);
        }
        CHECK(standin_found_any() == 0 && standin_found(STANDIN_PAGEABLE) == 0);
        RIG_CLOSE(&r);
    }
}

TEST(cuda_device_counts_pageable_copies)
{
    struct rig r;
    struct dev_work w[DEV_WORK_MAX];
    CHECK_OK(rig_open(&r, EXEC_THREADS, 1, KIB(64)), &r.err);
    CHECK_OK(dev_copy(r.s, r.arena, far, 1024, DEV_TO_DEVICE, &r.err), &r.err);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    uint32_t n = dev_work_read(r.d, w);
    CHECK(n > 0 && strcmp(w[n - 1].what, "copy_pageable") == 0 && w[n - 1].calls == 1 && w[n - 1].bytes == 1024);
    CHECK(standin_found(STANDIN_PAGEABLE) == 1);
    RIG_CLOSE(&r);
}

/* Where a kernel cannot reach the host's side (not registered, of an odd size, or, as here, not mapped by the
 * stand-in) a paced copy is CUDA's own: it arrives, and no error stays. tests/gpu/cuda has the kernel's test. */
TEST(cuda_device_paced_copies_arrive)
{
    static _Alignas(4096) uint8_t from[4096], to[4096]; /* whole pages */
    static const uint64_t sizes[] = { 16, 100, 4096 };
    struct rig r;
    struct dev_caps c;
    CHECK_OK(rig_open(&r, EXEC_THREADS, 1, KIB(64)), &r.err);
    dev_caps_read(r.d, &c);
    CHECK(c.copy_paced);
    for (int pinned = 0; pinned < 2; pinned++)
        for (int k = 0; k < 3; k++) {
            for (uint64_t i = 0; i < sizeof from; i++) from[i] = (uint8_t)(i * 7 + (uint64_t)k), to[i] = 0;
            if (pinned) CHECK_OK(dev_host_register(r.d, from, sizeof from, &r.err), &r.err);
            if (pinned) CHECK_OK(dev_host_register(r.d, to, sizeof to, &r.err), &r.err);
            CHECK_OK(dev_copy_paced(r.s, r.arena, from, sizes[k], DEV_TO_DEVICE, 7e9, &r.err), &r.err);
            CHECK_OK(dev_copy_paced(r.s, to, r.arena, sizes[k], DEV_TO_HOST, 7e9, &r.err), &r.err);
            CHECK_OK(dev_sync(r.s, &r.err), &r.err);
            CHECK(memcmp(from, to, sizes[k]) == 0 && (sizes[k] == sizeof to || to[sizes[k]] == 0));
            if (pinned) dev_host_unregister(r.d, from), dev_host_unregister(r.d, to);
        }
    CHECK(standin_found(STANDIN_PAGEABLE) == 6);
    RIG_CLOSE(&r);
}

/* --- streams --- */

static uint64_t *cells(struct rig *r) { return (uint64_t *)(void *)r->arena; }
static uint64_t host_cell[2]; /* pinned by who uses it */

static void read_cell(struct rig *r, struct dev_stream *s, uint64_t i)
{
    CHECK_OK(dev_copy(s, &host_cell[1], cells(r) + i, 8, DEV_TO_HOST, &r->err), &r->err);
    CHECK_OK(dev_sync(s, &r->err), &r->err);
}

static void open_cells(struct rig *r, enum exec_kind k, uint64_t seed, uint64_t value)
{
    CHECK_OK(rig_open(r, k, seed, KIB(64)), &r->err);
    CHECK_OK(dev_host_register(r->d, host_cell, sizeof host_cell, &r->err), &r->err);
    host_cell[0] = value;
    host_cell[1] = 0;
    CHECK_OK(dev_copy(r->s, cells(r), host_cell, 8, DEV_TO_DEVICE, &r->err), &r->err);
}

TEST(cuda_stream_runs_in_order)
{
    EACH_EXEC(k) {
        struct rig r;
        open_cells(&r, k, test_seed(), 77);
        for (uint64_t i = 0; i < 1000; i++)
            CHECK_OK(dev_copy(r.s, cells(&r) + i + 1, cells(&r) + i, 8, DEV_ON_DEVICE, &r.err), &r.err);
        read_cell(&r, r.s, 1000);
        CHECK(host_cell[1] == 77 && dev_of(r.s) == r.d && strcmp(r.s->name, "compute") == 0);
        CHECK(dev_stream_busy_ns(r.s) > 0);
        RIG_CLOSE(&r);
    }
}

/* A chain over two streams that take turns. `skip`: this round's wait is left out, which the stand-in must find. */
static void ping_pong(enum exec_kind k, uint64_t seed, int skip, uint64_t *found)
{
    enum { ROUNDS = 100 };
    struct rig r;
    struct dev_stream *s[2];
    struct dev_mark m[2];
    open_cells(&r, k, seed, seed + 17);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(dev_stream_open(r.d, i ? "b" : "a", 16, &s[i], &r.err), &r.err);
        CHECK_OK(dev_mark_init(r.d, &m[i], &r.err), &r.err);
    }
    for (int i = 0; i < ROUNDS; i++) {
        if (i && i != skip) CHECK_OK(dev_mark_wait(s[i % 2], &m[(i + 1) % 2], &r.err), &r.err);
        CHECK_OK(dev_copy(s[i % 2], cells(&r) + i + 1, cells(&r) + i, 8, DEV_ON_DEVICE, &r.err), &r.err);
        CHECK_OK(dev_mark_record(s[i % 2], &m[i % 2], &r.err), &r.err);
    }
    CHECK_OK(dev_sync(s[0], &r.err), &r.err);
    CHECK_OK(dev_sync(s[1], &r.err), &r.err);
    read_cell(&r, r.s, ROUNDS);
    CHECK(skip || host_cell[1] == seed + 17);
    *found = standin_found(STANDIN_RACE);
    for (int i = 0; i < 2; i++) {
        dev_mark_free(&m[i]);
        dev_stream_close(s[i]);
    }
    r.planted = skip > 0;
    if (!skip) RIG_CLOSE(&r);
    else (void)rig_close_clean(&r);
}

TEST(cuda_stream_marks_order_two_streams)
{
    uint64_t found;
    ping_pong(EXEC_THREADS, test_seed(), 0, &found);
    for (uint64_t i = 0; i < test_share(100); i++) ping_pong(EXEC_SIM, test_seed() + i, 0, &found);
}

TEST(cuda_stream_a_removed_wait_is_found)
{
    for (uint64_t i = 0; i < 10; i++) {
        uint64_t found = 0;
        ping_pong(EXEC_SIM, test_seed() + i, 3 + (int)i, &found);
        CHECK(found > 0);
    }
}

TEST(cuda_stream_mark_with_several_waiters)
{
    EACH_EXEC(k) {
        struct rig r;
        struct dev_stream *s[3];
        struct dev_mark m, never;
        open_cells(&r, k, test_seed(), 5);
        CHECK_OK(dev_mark_init(r.d, &m, &r.err), &r.err);
        CHECK_OK(dev_mark_init(r.d, &never, &r.err), &r.err);
        for (int i = 0; i < 50; i++) CHECK_OK(dev_zero(r.s, r.arena + KIB(32), KIB(32), &r.err), &r.err);
        CHECK_OK(dev_mark_record(r.s, &m, &r.err), &r.err);
        for (uint64_t i = 0; i < 3; i++) {
            CHECK_OK(dev_stream_open(r.d, "w", 4, &s[i], &r.err), &r.err);
            CHECK_OK(dev_mark_wait(s[i], &never, &r.err), &r.err);
            CHECK_OK(dev_mark_wait(s[i], &m, &r.err), &r.err);
            CHECK_OK(dev_copy(s[i], cells(&r) + 64 * (i + 1), cells(&r), 8, DEV_ON_DEVICE, &r.err), &r.err);
        }
        for (uint64_t i = 0; i < 3; i++) {
            read_cell(&r, s[i], 64 * (i + 1));
            CHECK(host_cell[1] == 5);
            host_cell[1] = 0;
            dev_stream_close(s[i]);
        }
        dev_mark_free(&m);
        dev_mark_free(&never);
        RIG_CLOSE(&r);
    }
}

TEST(cuda_stream_full_queue_application_waits)
{
    EACH_EXEC(k) {
        struct rig r;
        struct dev_stream *s;
        CHECK_OK(rig_open(&r, k, test_seed(), KIB(64)), &r.err);
        CHECK(dev_stream_open(r.d, "deep", UINT32_MAX, &s, &r.err) == STK_ERR_CONFIG);
        stk_error_clear(&r.err);
        CHECK_OK(dev_stream_open(r.d, "short", 2, &s, &r.err), &r.err);
        for (int i = 0; i < 2000; i++) CHECK_OK(dev_zero(s, r.arena, 64, &r.err), &r.err);
        CHECK_OK(dev_sync(s, &r.err), &r.err);
        dev_stream_close(s);
        RIG_CLOSE(&r);
    }
}

struct producer {
    struct rig *r;
    struct dev_stream *s;
    struct exec_lane *lane;
    struct exec_task task;
    struct exec_event full, done;
    int queued, busy;
    stk_status other;
};

static void produce(void *arg)
{
    struct producer *p = arg;
    while (p->queued < 40) {
        stk_status st = dev_copy(p->s, cells(p->r) + 64, cells(p->r), 8, DEV_ON_DEVICE, NULL);
        if (st == STK_OK) p->queued++;
        else if (st != STK_BUSY) p->other = st;
        if (st == STK_OK) continue;
        p->busy++;
        exec_event_set(&p->full);
        return;
    }
    exec_event_set(&p->done);
}

TEST(cuda_stream_full_queue_lane_gets_busy)
{
    struct rig r;
    struct producer p = { .r = &r };
    open_cells(&r, EXEC_SIM, test_seed(), 3);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    CHECK_OK(dev_stream_open(r.d, "short", 4, &p.s, &r.err), &r.err);
    CHECK_OK(exec_lane_open(r.ex, "producer", &p.lane, &r.err), &r.err);
    exec_task_init(&p.task, produce, &p);
    exec_event_init(r.ex, &p.full);
    exec_event_init(r.ex, &p.done);
    while (!exec_event_is_set(&p.done)) {
        struct exec_event tick;
        exec_event_reset(&p.full);
        exec_event_init(r.ex, &tick);
        exec_post(p.lane, &p.task);
        CHECK_OK(dev_notify(r.s, NULL, NULL, &tick, &r.err), &r.err);
        CHECK_OK(exec_event_wait(&tick, UINT64_MAX, &r.err), &r.err);
    }
    CHECK(p.queued == 40 && p.other == STK_OK && p.busy > 0);
    exec_lane_close(p.lane);
    CHECK_OK(dev_sync(p.s, &r.err), &r.err);
    dev_stream_close(p.s);
    RIG_CLOSE(&r);
}

struct noted {
    struct exec_event ev;
    uint64_t seen;
};
static void note(void *arg)
{
    struct noted *n = arg;
    n->seen = host_cell[1];
    exec_event_set(&n->ev);
}

TEST(cuda_stream_notifies_a_lane_after_the_work)
{
    EACH_EXEC(k) {
        struct rig r;
        struct exec_lane *lane;
        struct exec_task task;
        struct noted n = { .seen = 0 };
        open_cells(&r, k, test_seed(), 42);
        CHECK_OK(exec_lane_open(r.ex, "engine", &lane, &r.err), &r.err);
        exec_event_init(r.ex, &n.ev);
        exec_task_init(&task, note, &n);
        CHECK_OK(dev_copy(r.s, &host_cell[1], cells(&r), 8, DEV_TO_HOST, &r.err), &r.err);
        CHECK_OK(dev_notify(r.s, lane, &task, NULL, &r.err), &r.err);
        CHECK_OK(exec_event_wait(&n.ev, UINT64_MAX, &r.err), &r.err);
        CHECK(n.seen == 42);
        exec_lane_close(lane);
        RIG_CLOSE(&r);
    }
}

TEST(cuda_stream_close_finishes_what_is_queued)
{
    EACH_EXEC(k) {
        struct rig r;
        open_cells(&r, k, test_seed(), 9);
        for (uint64_t i = 0; i < 100; i++)
            CHECK_OK(dev_copy(r.s, cells(&r) + i + 1, cells(&r) + i, 8, DEV_ON_DEVICE, &r.err), &r.err);
        CHECK_OK(dev_copy(r.s, &host_cell[1], cells(&r) + 100, 8, DEV_TO_HOST, &r.err), &r.err);
        dev_stream_close(r.s);
        r.s = NULL;
        CHECK(host_cell[1] == 9);
        RIG_CLOSE(&r);
    }
}

/* The card fails: later work is skipped, marks pass, everybody is told, the first error stays. */
TEST(cuda_stream_error_is_sticky_and_nobody_hangs)
{
    EACH_EXEC(k)
        for (uint64_t nth = 1; nth <= 4; nth++) {
            struct rig r;
            struct dev_stream *other;
            struct dev_mark m;
            open_cells(&r, k, test_seed() + nth, 1);
            CHECK_OK(dev_stream_open(r.d, "other", 0, &other, &r.err), &r.err);
            CHECK_OK(dev_mark_init(r.d, &m, &r.err), &r.err);
            CHECK_OK(dev_copy(r.s, cells(&r) + 1, cells(&r), 8, DEV_ON_DEVICE, &r.err), &r.err);
            CHECK_OK(dev_sync(r.s, &r.err), &r.err);
            standin_fail_kernel(nth, cudaErrorIllegalAddress);
            for (int i = 0; i < 4; i++)
                CHECK_OK(ops_add(r.s, OPS_F32, 2, cells(&r), cells(&r) + 1, cells(&r) + 64, &r.err), &r.err);
            CHECK_OK(dev_mark_record(r.s, &m, &r.err), &r.err);
            CHECK_OK(dev_mark_wait(other, &m, &r.err), &r.err);
            CHECK_OK(dev_copy(other, &host_cell[1], cells(&r), 8, DEV_TO_HOST, &r.err), &r.err);
            CHECK(dev_sync(other, &r.err) == STK_ERR_DEVICE && strstr(r.err.text, "cudaErrorIllegalAddress"));
            CHECK(host_cell[1] == 0 && dev_status(r.d, NULL) == STK_ERR_DEVICE);
            struct stk_error later = { 0 };
            CHECK(dev_sync(r.s, &later) == STK_ERR_DEVICE && strcmp(later.text, r.err.text) == 0);
            dev_mark_free(&m);
            dev_stream_close(other);
            RIG_CLOSE(&r);
        }
}
