/* tests/nvme/test_io.c - the contract of io.h over every backend and both executions. */
#include "tests/nvme/io_batch.h"

#include <errno.h>

#define KIB 1024u
#define MIB (1024u * 1024u)

static void round_trip(const struct combo *c, uint64_t size_bytes, bool registered)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    uint32_t file;
    CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
    uint8_t *buf = sys_mmap(2 * size_bytes, false);
    REQUIRE(buf);
    if (registered) io_buffer_register(w.io, buf, 2 * size_bytes);
    CHECK_OK(world_file(&w, "a", size_bytes + 4096, 0, &file, &err), &err);
    CHECK(io_align(w.io) >= 512 && io_align(w.io) <= 4096);
    fill(buf, size_bytes, 5);
    struct io_req wr = {
        .op = IO_WRITE, .file = file, .buf = buf, .offset_bytes = 4096, .size_bytes = size_bytes
    };
    CHECK_OK(one(&w, &wr, &err), &err);
    CHECK(wr.status == STK_OK && wr.moved_bytes == size_bytes && wr.done_ns >= wr.submit_ns);
    struct io_req fl = { .op = IO_FLUSH, .file = file };
    CHECK_OK(one(&w, &fl, &err), &err);
    CHECK(fl.status == STK_OK);
    struct io_req rd = { .op = IO_READ,
                         .file = file,
                         .buf = buf + size_bytes,
                         .offset_bytes = 4096,
                         .size_bytes = size_bytes };
    CHECK_OK(one(&w, &rd, &err), &err);
    CHECK(rd.status == STK_OK && rd.moved_bytes == size_bytes);
    CHECK(filled(buf + size_bytes, size_bytes, 5));
    struct io_stats st;
    io_stats_read(w.io, &st);
    CHECK(st.reads == 1 && st.writes == 1 && st.flushes == 1 && st.read_bytes == size_bytes &&
          st.errors == 0);
    printf("# %s: %s\n", c->name, io_describe(w.io));
    world_close(&w);
    sys_munmap(buf, 2 * size_bytes);
}

TEST(io_round_trip) { FOR_COMBOS(c) round_trip(c, 64 * KIB, true); }

/* NVM-13, NVM-14: above IO_TRANSFER_MAX a request is split and the caller sees one completion. */
TEST(io_nvm_14_split)
{
    FOR_COMBOS(c)
    {
        round_trip(c, 3ull * IO_TRANSFER_MAX + 4096, c->io == IO_URING);
        round_trip(c, IO_TRANSFER_MAX, false);
        round_trip(c, IO_TRANSFER_MAX + 4096, false);
    }
}

/* Many requests, small depth, seeded order; each completes exactly once with its own bytes (NVM-34,
 * NVM-32, NVM-13). */
static void many(const struct combo *c, uint32_t depth, bool plain)
{
    enum { N = 400, SIZE = 8192 };
    struct world w = { .cfg = { .depth = depth, .no_registration = plain }, .reap_max = 3 };
    struct stk_error err = { 0 };
    uint32_t file[2];
    CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
    uint8_t *buf = sys_mmap((uint64_t)N * SIZE, false);
    REQUIRE(buf);
    for (uint32_t k = 0; k < 2; k++)
        CHECK_OK(world_file(&w, k ? "b" : "a", (uint64_t)N * SIZE, k, &file[k], &err), &err);
    io_buffer_register(w.io, buf, (uint64_t)N * SIZE / 2);
    struct io_req *reqs = calloc(N, sizeof *reqs);
    for (int pass = 0; pass < 2; pass++) {
        memset(reqs, 0, N * sizeof *reqs);
        for (uint32_t i = 0; i < N; i++) {
            if (pass == 0) fill(buf + i * SIZE, SIZE, i * 100);
            else memset(buf + i * SIZE, 0, SIZE);
            reqs[i] = (struct io_req){ .op = pass ? IO_READ : IO_WRITE,
                                       .cls = pass ? IO_DEMAND : IO_WRITE_BACK,
                                       .file = file[i % 2],
                                       .buf = buf + i * SIZE,
                                       .offset_bytes = (uint64_t)i * SIZE,
                                       .size_bytes = SIZE };
        }
        CHECK_OK(run_batch(&w, reqs, N, &err), &err);
        for (uint32_t i = 0; i < N; i++)
            CHECK(reqs[i].status == STK_OK && filled(buf + i * SIZE, SIZE, i * 100));
    }
    free(reqs);
    world_close(&w);
    sys_munmap(buf, (uint64_t)N * SIZE);
}

TEST(io_nvm_34_each_completion_once)
{
    FOR_COMBOS(c)
    {
        many(c, 1, false);
        many(c, 7, true);
        many(c, 64, false);
    }
}

TEST(io_refuses_unaligned)
{
    FOR_COMBOS(c)
    {
        struct world w = { 0 };
        struct stk_error err = { 0 };
        uint32_t file;
        CHECK_OK(world_open(&w, c->io, c->ex, 1, &err), &err);
        CHECK_OK(world_file(&w, "a", 65536, 0, &file, &err), &err);
        uint8_t *buf = sys_mmap(65536, false);
        struct io_req bad[] = {
            { .op = IO_READ, .file = file, .buf = buf + 8, .size_bytes = 4096 },
            { .op = IO_READ, .file = file, .buf = buf, .offset_bytes = 100, .size_bytes = 4096 },
            { .op = IO_READ, .file = file, .buf = buf, .size_bytes = 4095 },
            { .op = IO_READ, .file = file, .buf = buf, .size_bytes = 0 },
            { .op = IO_READ, .file = 33, .buf = buf, .size_bytes = 4096 },
        };
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            stk_error_clear(&err);
            CHECK(run_batch(&w, &bad[i], 1, &err) == STK_ERR_CONFIG && strlen(err.text) > 20);
        }
        CHECK(io_in_flight(w.io) == 0);
        world_close(&w);
        sys_munmap(buf, 65536);
    }
}

/* NVM-20: reading past the end of the file is an error with os_errno 0, found after a bounded
 * number of tries. */
TEST(io_nvm_20_end_of_file)
{
    FOR_COMBOS(c)
    {
        struct world w = { 0 };
        struct stk_error err = { 0 };
        uint32_t file;
        CHECK_OK(world_open(&w, c->io, c->ex, 1, &err), &err);
        CHECK_OK(world_file(&w, "a", 6000, 0, &file, &err), &err);
        uint8_t *buf = sys_mmap(65536, false);
        struct io_req rd = { .op = IO_READ, .file = file, .buf = buf, .size_bytes = 16384 };
        CHECK_OK(one(&w, &rd, &err), &err);
        CHECK(rd.status == STK_ERR_IO && rd.os_errno == 0 && rd.moved_bytes < 6001 &&
              rd.retries < 10);
        world_close(&w);
        sys_munmap(buf, 65536);
    }
}

/* --- order: on the simulated disk with virtual time ------------------------------------------- */

TEST(io_demand_before_prefetch_before_write_back)
{
    struct world w = { .cfg = { .depth = 1 }, .sim = { .latency_ns = 1000 } };
    struct stk_error err = { 0 };
    uint32_t file;
    CHECK_OK(world_open(&w, IO_SIM, EXEC_SIM, test_seed(), &err), &err);
    CHECK_OK(world_file(&w, "a", MIB, 0, &file, &err), &err);
    uint8_t *buf = sys_mmap(MIB, false);
    struct io_req reqs[9] = { 0 };
    for (uint32_t i = 0; i < 9; i++)
        reqs[i] = (struct io_req){ .op = i % 3 == 0 ? IO_WRITE : IO_READ,
                                   .file = file,
                                   .buf = buf + i * 4096,
                                   .offset_bytes = i * 4096,
                                   .size_bytes = 4096,
                                   .cls = i % 3 == 0   ? IO_WRITE_BACK
                                          : i % 3 == 1 ? IO_PREFETCH
                                                       : IO_DEMAND };
    struct batch b = { .w = &w, .reqs = reqs, .n = 9 };
    world_run(&w, batch_submit, &b);
    CHECK_OK(io_drain(w.io, UINT64_MAX, &err), &err);
    static const uint32_t want[9] = { 2, 5, 8, 1, 4, 7, 0, 3, 6 };
    for (int i = 0; i < 9; i++) CHECK(b.order[i] == want[i]);
    CHECK(exec_now_ns(w.ex) == 9000); /* one at a time, 1 us each */
    world_close(&w);
    sys_munmap(buf, MIB);
}

/* Writes fill at most write_depth places while reads are there, so a late read waits for no more
 * than these. */
TEST(io_writes_are_throttled_while_reads_wait)
{
    struct world w = { .cfg = { .depth = 8, .write_depth = 2 }, .sim = { .latency_ns = 1000 } };
    struct stk_error err = { 0 };
    uint32_t file;
    CHECK_OK(world_open(&w, IO_SIM, EXEC_SIM, test_seed(), &err), &err);
    CHECK_OK(world_file(&w, "a", MIB, 0, &file, &err), &err);
    uint8_t *buf = sys_mmap(MIB, false);
    struct io_req reqs[40] = { 0 };
    for (uint32_t i = 0; i < 40; i++)
        reqs[i] = (struct io_req){ .op = i < 20 ? IO_WRITE : IO_READ,
                                   .cls = i < 20 ? IO_WRITE_BACK : IO_PREFETCH,
                                   .file = file,
                                   .buf = buf + i * 4096,
                                   .offset_bytes = i * 4096,
                                   .size_bytes = 4096 };
    struct batch b = { .w = &w, .reqs = reqs, .n = 40 };
    world_run(&w, batch_submit, &b);
    CHECK_OK(io_drain(w.io, UINT64_MAX, &err), &err);
    /* 8 reads; 1 write, 7 reads; 1 read, 1 write, 4 reads and room for 1 write more, since 2 are
     * the limit; then 2 writes a time, until 8 have passed without a read; then 8 */
    for (uint32_t i = 20; i < 40; i++) CHECK(reqs[i].done_ns <= 3000);
    uint32_t early = 0;
    for (uint32_t i = 0; i < 20; i++) early += reqs[i].done_ns <= 3000;
    CHECK(early == 3);
    CHECK(exec_now_ns(w.ex) == 8000);
    world_close(&w);
    sys_munmap(buf, MIB);
}

static void cancel_all(void *arg)
{
    struct batch *b = arg;
    batch_submit(b);
    for (uint32_t i = 2; i < b->n; i++) io_cancel(b->w->io, &b->reqs[i]);
}

TEST(io_cancel_takes_back_what_waits)
{
    FOR_COMBOS(c)
    {
        struct world w = { .cfg = { .depth = 2 } };
        struct stk_error err = { 0 };
        uint32_t file;
        CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
        CHECK_OK(world_file(&w, "a", MIB, 0, &file, &err), &err);
        uint8_t *buf = sys_mmap(MIB, false);
        struct io_req reqs[6] = { 0 };
        for (uint32_t i = 0; i < 6; i++)
            reqs[i] = (struct io_req){
                .op = IO_READ, .file = file, .buf = buf + i * 4096, .size_bytes = 4096
            };
        struct batch b = { .w = &w, .reqs = reqs, .n = 6 };
        world_run(&w, cancel_all, &b);
        CHECK_OK(io_drain(w.io, UINT64_MAX, &err), &err);
        CHECK(b.done == 6);
        for (uint32_t i = 0; i < 6; i++)
            CHECK(reqs[i].status == (i < 2 ? STK_OK : STK_ERR_INTERRUPTED));
        world_close(&w);
        sys_munmap(buf, MIB);
    }
}

/* A lost completion is found by the simulation's stall, or with threads by the deadline, and named.
 */
TEST(io_lost_completion_is_named)
{
    for (int ex = 0; ex < 2; ex++) {
        struct world w = { .sim = { .latency_ns = 1000,
                                    .faults = { .lost_completion_ppm = 1000000 } } };
        struct stk_error err = { 0 };
        uint32_t file;
        CHECK_OK(world_open(&w, IO_SIM, ex ? EXEC_THREADS : EXEC_SIM, test_seed(), &err), &err);
        CHECK_OK(world_file(&w, "lost.bin", MIB, 0, &file, &err), &err);
        uint8_t *buf = sys_mmap(MIB, false);
        struct io_req rd = {
            .op = IO_READ, .file = file, .buf = buf, .offset_bytes = 8192, .size_bytes = 4096
        };
        struct batch b = { .w = &w, .reqs = &rd, .n = 1 };
        world_run(&w, batch_submit, &b);
        uint64_t deadline = ex ? exec_now_ns(w.ex) + 20000000 : UINT64_MAX;
        CHECK(io_drain(w.io, deadline, &err) == STK_ERR_STALLED);
        CHECK(strstr(err.text, "lost.bin") && strstr(err.text, "byte 8192") && b.done == 0);
        world_close(&w);
        sys_munmap(buf, MIB);
    }
}

/* NVM-23: an error on the read is an error to the caller. Real files: the fault sits in front of
 * pread. */
TEST(io_nvm_23_eio)
{
    for (int kind = 0; kind < 2; kind++) {
        struct world w = { .cfg = { .workers = 2 } };
        struct stk_error err = { 0 };
        uint32_t file;
        if (kind == 1) w.sim.faults.read_error_ppm = 1000000;
        CHECK_OK(world_open(&w, kind ? IO_SIM : IO_POSIX, EXEC_THREADS, 3, &err), &err);
        CHECK_OK(world_file(&w, "a", MIB, 0, &file, &err), &err);
        uint8_t *buf = sys_mmap(MIB, false);
        struct io_req rd = { .op = IO_READ, .file = file, .buf = buf, .size_bytes = MIB };
        if (kind == 0) sys_fault_arm(SYS_READ, 1, 1, EIO);
        CHECK_OK(one(&w, &rd, &err), &err);
        sys_fault_arm(SYS_READ, 0, 0, 0);
        CHECK(rd.status == STK_ERR_IO && rd.os_errno == EIO);
        world_close(&w);
        sys_munmap(buf, MIB);
    }
}

/* The first part of a large request fails while others are under way and others still wait. */
TEST(io_error_in_the_middle_of_a_request)
{
    for (int ex = 0; ex < 2; ex++) {
        struct world w = { .cfg = { .depth = 2 } };
        struct stk_error err = { 0 };
        uint32_t file;
        CHECK_OK(world_open(&w, IO_POSIX, ex ? EXEC_SIM : EXEC_THREADS, test_seed(), &err), &err);
        CHECK_OK(world_file(&w, "a", 40 * MIB, 0, &file, &err), &err);
        uint8_t *buf = sys_mmap(120 * MIB, false);
        struct io_req rd[3] = { 0 };
        for (int i = 0; i < 3; i++)
            rd[i] = (struct io_req){
                .op = IO_READ, .file = file, .buf = buf + i * 40 * MIB, .size_bytes = 40 * MIB
            };
        sys_fault_arm(SYS_READ, 1, 1, EIO);
        CHECK_OK(run_batch(&w, rd, 3, &err), &err);
        sys_fault_arm(SYS_READ, 0, 0, 0);
        CHECK(rd[0].status == STK_ERR_IO && rd[0].os_errno == EIO && rd[0].moved_bytes < 40 * MIB);
        CHECK(rd[1].status == STK_OK && rd[2].status == STK_OK && rd[2].moved_bytes == 40 * MIB);
        world_close(&w);
        sys_munmap(buf, 120 * MIB);
    }
}

/* NVM-16, NVM-17: short transfers are resubmitted and counted; bytes are right. */
TEST(io_nvm_16_short_results)
{
    for (int ex = 0; ex < 2; ex++) {
        struct world w = { .sim = { .faults = { .short_ppm = 400000 } } };
        struct stk_error err = { 0 };
        uint32_t file;
        CHECK_OK(world_open(&w, IO_SIM, ex ? EXEC_SIM : EXEC_THREADS, test_seed(), &err), &err);
        CHECK_OK(world_file(&w, "a", 64 * MIB, 0, &file, &err), &err);
        uint8_t *buf = sys_mmap(16 * MIB, false);
        for (int i = 0; i < 20; i++) {
            fill(buf, MIB, (uint64_t)i);
            struct io_req wr = { .op = IO_WRITE,
                                 .file = file,
                                 .buf = buf,
                                 .offset_bytes = (uint64_t)i * MIB,
                                 .size_bytes = MIB };
            CHECK_OK(one(&w, &wr, &err), &err);
            CHECK(wr.status == STK_OK);
            memset(buf, 0, MIB);
            struct io_req rd = wr;
            rd.op = IO_READ;
            CHECK_OK(one(&w, &rd, &err), &err);
            CHECK(rd.status == STK_OK && filled(buf, MIB, (uint64_t)i));
        }
        struct io_stats st;
        io_stats_read(w.io, &st);
        CHECK(st.short_transfers > 0 && st.retries == st.short_transfers);
        world_close(&w);
        sys_munmap(buf, 16 * MIB);
    }
}

/* The same seed gives the same run. */
TEST(io_sim_repeats)
{
    uint64_t hash[2], when[2];
    for (int k = 0; k < 2; k++) {
        struct world w = {
            .sim = { .latency_ns = 5000,
                     .read_bytes_per_s = 1e9,
                     .faults = { .late_ppm = 200000, .reorder_ppm = 300000, .late_ns = 100000 } }
        };
        struct stk_error err = { 0 };
        uint32_t file;
        CHECK_OK(world_open(&w, IO_SIM, EXEC_SIM, 77, &err), &err);
        CHECK_OK(world_file(&w, "a", MIB, 0, &file, &err), &err);
        uint8_t *buf = sys_mmap(MIB, false);
        struct io_req reqs[100] = { 0 };
        for (uint32_t i = 0; i < 100; i++)
            reqs[i] = (struct io_req){
                .op = IO_READ, .file = file, .buf = buf + i * 4096, .size_bytes = 4096
            };
        CHECK_OK(run_batch(&w, reqs, 100, &err), &err);
        hash[k] = exec_trace_hash(w.ex);
        when[k] = exec_now_ns(w.ex);
        world_close(&w);
        sys_munmap(buf, MIB);
    }
    CHECK(hash[0] == hash[1] && when[0] == when[1] && when[0] > 400000);
}

TEST_MAIN()
