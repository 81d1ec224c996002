/* tests/nvme/test_io_order.c - what may overtake what, on the simulated disk in virtual time:
 * reads keep their latency beside write-back, writes get through beside reads without end, and a
 * buffer is the consumer's until the consumer gives it back. */
#include "tests/nvme/io_batch.h"
#include "nvme/io_impl.h"

#define MIB (1024u * 1024u)

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* --- reads that never end --------------------------------------------------------------------- */

enum { READERS = 64, WRITES = 20, READS_MAX = 20000 };

struct crowd {
    struct world *w;
    struct io_req reads[READERS], writes[WRITES];
    uint32_t reads_done, writes_done;
    struct exec_event end;
};

static void crowd_read_done(struct io_req *req)
{
    struct crowd *c = req->owner;
    struct stk_error err = { 0 };
    c->reads_done++;
    if (c->writes_done < WRITES && c->reads_done < READS_MAX)
        CHECK(io_submit(c->w->io, req, &err) == STK_OK);
}

static void crowd_write_done(struct io_req *req)
{
    struct crowd *c = req->owner;
    if (++c->writes_done == WRITES) exec_event_set(&c->end);
}

static void crowd_start(void *arg)
{
    struct crowd *c = arg;
    struct stk_error err = { 0 };
    for (uint32_t i = 0; i < READERS; i++)
        CHECK(io_submit(c->w->io, &c->reads[i], &err) == STK_OK);
    for (uint32_t i = 0; i < WRITES; i++)
        CHECK(io_submit(c->w->io, &c->writes[i], &err) == STK_OK);
}

static void steady_reads(enum io_class cls, uint32_t depth)
{
    struct world w = { .cfg = { .depth = depth }, .sim = { .latency_ns = 1000 } };
    struct stk_error err = { 0 };
    uint32_t file;
    CHECK_OK(world_open(&w, IO_SIM, EXEC_SIM, test_seed(), &err), &err);
    CHECK_OK(world_file(&w, "a", MIB, 0, &file, &err), &err);
    uint8_t *buf = sys_mmap(MIB, false);
    struct crowd *c = calloc(1, sizeof *c);
    c->w = &w;
    exec_event_init(w.ex, &c->end);
    for (uint32_t i = 0; i < READERS + WRITES; i++) {
        bool write = i >= READERS;
        struct io_req *req = write ? &c->writes[i - READERS] : &c->reads[i];
        *req = (struct io_req){ .op = write ? IO_WRITE : IO_READ,
                                .cls = write ? IO_WRITE_BACK : cls,
                                .file = file,
                                .buf = buf + (uint64_t)i * 4096,
                                .offset_bytes = (uint64_t)i * 4096,
                                .size_bytes = 4096,
                                .done = write ? crowd_write_done : crowd_read_done,
                                .owner = c };
    }
    world_run(&w, crowd_start, c);
    CHECK_OK(io_drain(w.io, UINT64_MAX, &err), &err);
    printf("# class %d, depth %u: %u writes got through beside %u reads\n", cls, depth,
           c->writes_done, c->reads_done);
    CHECK(c->writes_done == WRITES);
    /* and the reads are not held up for them: at least so many passed */
    CHECK(c->reads_done <= (WRITES + 2) * (IO_READS_PER_WRITE + 1) + 2 * READERS);
    CHECK(c->reads_done >= (WRITES - 1) * IO_READS_PER_WRITE);
    free(c);
    world_close(&w);
    sys_munmap(buf, MIB);
}

TEST(io_steady_reads_do_not_starve_writes)
{
    for (uint32_t depth = 1; depth <= 16; depth *= 4) {
        steady_reads(IO_PREFETCH, depth);
        steady_reads(IO_DEMAND, depth);
    }
}

/* --- what a drive gives while it is asked for more than it takes at once ---------------------- */

enum { FULL_READS = 200, FULL_BYTES = 65536 };

static void full_reads(struct world *w, uint8_t *buf, uint32_t file, uint32_t n)
{
    static struct io_req reqs[FULL_READS];
    struct stk_error err = { 0 };
    memset(reqs, 0, sizeof reqs);
    for (uint32_t i = 0; i < n; i++)
        reqs[i] = (struct io_req){ .op = i % 2 ? IO_WRITE : IO_READ, .cls = IO_PREFETCH, .file = file,
                                   .buf = buf + i * FULL_BYTES, .offset_bytes = (uint64_t)i * FULL_BYTES,
                                   .size_bytes = FULL_BYTES };
    CHECK_OK(run_batch(w, reqs, n, &err), &err);
}

/* The rate with the queue full is the drive's; a drive that always has room is not counted, however
 * long something is there. */
TEST(io_rate_with_the_queue_full)
{
    struct world w = { .cfg = { .depth = 8, .write_depth = 4 },
                       .sim = { .latency_ns = 20000, .read_bytes_per_s = 1e9,
                                .write_bytes_per_s = 1e9, .shared_rate = true } };
    struct stk_error err = { 0 };
    struct io_stats s;
    uint32_t file;
    CHECK_OK(world_open(&w, IO_SIM, EXEC_SIM, test_seed(), &err), &err);
    CHECK_OK(world_file(&w, "a", FULL_READS * FULL_BYTES, 0, &file, &err), &err);
    uint8_t *buf = sys_mmap(FULL_READS * FULL_BYTES, false);
    for (int i = 0; i < 20; i++) full_reads(&w, buf, file, 4);
    io_stats_read(w.io, &s);
    CHECK(s.full_ns == 0 && s.full_bytes == 0 && s.busy_ns > 0);
    full_reads(&w, buf, file, FULL_READS);
    io_stats_read(w.io, &s);
    double rate = (double)s.full_bytes / (double)s.full_ns;
    printf("# with the queue full: %.3f GB/s of 1 over %" PRIu64 " ns\n", rate, s.full_ns);
    CHECK(rate > 0.93 && rate < 1.07 && s.full_bytes > FULL_READS * FULL_BYTES / 4 * 3);
    world_close(&w);
    sys_munmap(buf, FULL_READS * FULL_BYTES);
}

/* --- reads beside a flood of write-back ------------------------------------------------------- */

/* One demand read at a time, a while after the one before it; as many writes as the io takes. The
 * disk serves one byte after the other at 1 GB/s: a write of 1 MiB takes 1.05 ms. */
enum { SAMPLES = 300, FLOOD = 64 };

struct flood {
    struct world *w;
    struct io_req read, writes[FLOOD];
    struct exec_task again;
    struct exec_event end;
    struct rng rng;
    uint64_t latency_ns[SAMPLES], gap_ns;
    uint32_t n, left;
    uint64_t written_bytes;
};

static void flood_read(void *arg)
{
    struct flood *f = arg;
    struct stk_error err = { 0 };
    CHECK(io_submit(f->w->io, &f->read, &err) == STK_OK);
}

static void flood_read_done(struct io_req *req)
{
    struct flood *f = req->owner;
    f->latency_ns[f->n++] = req->done_ns - req->submit_ns;
    if (f->n == SAMPLES) {
        if (f->left == 0) exec_event_set(&f->end);
        return;
    }
    exec_post_at(f->w->lane, &f->again,
                 exec_now_ns(f->w->ex) + rng_below(&f->rng, f->gap_ns + 1));
}

static void flood_write_done(struct io_req *req)
{
    struct flood *f = req->owner;
    struct stk_error err = { 0 };
    f->written_bytes += req->moved_bytes;
    if (f->n < SAMPLES) CHECK(io_submit(f->w->io, req, &err) == STK_OK);
    else if (--f->left == 0) exec_event_set(&f->end);
}

static void flood_start(void *arg)
{
    struct flood *f = arg;
    struct stk_error err = { 0 };
    for (uint32_t i = 0; i < f->left; i++)
        CHECK(io_submit(f->w->io, &f->writes[i], &err) == STK_OK);
    exec_post(f->w->lane, &f->again);
}

struct flood_result { uint64_t p50_ns, p99_ns; double write_bytes_per_s, bytes_per_s; };

static struct flood_result flood(uint32_t writes, uint32_t write_depth, uint64_t gap_ns)
{
    struct world w = { .cfg = { .depth = 32, .write_depth = write_depth },
                       .sim = { .latency_ns = 10000,
                                .read_bytes_per_s = 1e9,
                                .write_bytes_per_s = 1e9,
                                .shared_rate = true } };
    struct stk_error err = { 0 };
    struct flood_result out = { 0 };
    uint32_t file;
    struct flood *f = calloc(1, sizeof *f);
    uint8_t *buf = sys_mmap(2 * MIB, false);
    bool open = world_open(&w, IO_SIM, EXEC_SIM, test_seed(), &err) == STK_OK &&
                world_file(&w, "a", 2 * MIB, 0, &file, &err) == STK_OK;
    CHECK(open);
    if (!open) return out;
    f->w = &w;
    f->gap_ns = gap_ns;
    f->left = writes;
    rng_seed(&f->rng, test_seed());
    exec_event_init(w.ex, &f->end);
    exec_task_init(&f->again, flood_read, f);
    f->read = (struct io_req){ .op = IO_READ,
                               .file = file,
                               .buf = buf,
                               .size_bytes = MIB,
                               .done = flood_read_done,
                               .owner = f };
    for (uint32_t i = 0; i < writes; i++)
        f->writes[i] = (struct io_req){ .op = IO_WRITE,
                                        .cls = IO_WRITE_BACK,
                                        .file = file,
                                        .buf = buf + MIB,
                                        .offset_bytes = MIB,
                                        .size_bytes = MIB,
                                        .done = flood_write_done,
                                        .owner = f };
    world_run(&w, flood_start, f);
    exec_event_wait(&f->end, UINT64_MAX, NULL);
    CHECK(io_drain(w.io, UINT64_MAX, &err) == STK_OK);
    qsort(f->latency_ns, SAMPLES, sizeof *f->latency_ns, by_value);
    out.p50_ns = f->latency_ns[SAMPLES / 2];
    out.p99_ns = f->latency_ns[SAMPLES * 99 / 100];
    out.write_bytes_per_s = (double)f->written_bytes / (double)exec_now_ns(w.ex) * 1e9;
    out.bytes_per_s =
        ((double)f->written_bytes + SAMPLES * (double)MIB) / (double)exec_now_ns(w.ex) * 1e9;
    world_close(&w);
    sys_munmap(buf, 2 * MIB);
    free(f);
    return out;
}

TEST(io_reads_keep_their_latency_beside_write_back)
{
    static const uint64_t gaps_ns[] = { 0, 2000000, 20000000 };
    uint64_t part_ns = (uint64_t)(MIB / 1e9 * 1e9);
    for (size_t i = 0; i < sizeof gaps_ns / sizeof *gaps_ns; i++) {
        struct flood_result alone = flood(0, 32, gaps_ns[i]);
        struct flood_result free_for_all = flood(FLOOD, 32, gaps_ns[i]);
        struct flood_result usual = flood(FLOOD, 0, gaps_ns[i]), four = flood(FLOOD, 4, gaps_ns[i]);
        printf("# gap to %.0f ms: read p50/p99 alone %.1f/%.1f ms, write depth 32 %.1f/%.1f, 16 "
               "(default) %.1f/%.1f, 4 %.1f/%.1f; writes %.0f, %.0f, %.0f MB/s\n",
               (double)gaps_ns[i] / 1e6, (double)alone.p50_ns / 1e6, (double)alone.p99_ns / 1e6,
               (double)free_for_all.p50_ns / 1e6, (double)free_for_all.p99_ns / 1e6,
               (double)usual.p50_ns / 1e6, (double)usual.p99_ns / 1e6, (double)four.p50_ns / 1e6,
               (double)four.p99_ns / 1e6, free_for_all.write_bytes_per_s / 1e6,
               usual.write_bytes_per_s / 1e6, four.write_bytes_per_s / 1e6);
        /* a read finds at most write_depth writes in front of it */
        CHECK(four.p99_ns <= alone.p99_ns + 4 * part_ns + 100000);
        CHECK(usual.p99_ns <= alone.p99_ns + 16 * part_ns + 100000);
        CHECK(free_for_all.p99_ns > alone.p99_ns + 24 * part_ns); /* the measure measures */
        /* and the drive is as busy as before */
        CHECK(four.bytes_per_s >= 0.98 * free_for_all.bytes_per_s);
    }
}

/* --- NVM-38: a buffer belongs to its consumer until it gives it back -------------------------- */

enum { SLOTS = 8, TENSORS = 2000, TENSOR_BYTES = 8192 };

struct loader;
struct slot {
    struct loader *l;
    struct io_req req;
    struct exec_task consume;
    uint32_t tensor;
};
struct loader {
    struct world *w;
    struct slot slots[SLOTS];
    uint8_t *buf;
    struct rng rng;
    uint32_t next, consumed, wrong;
    struct exec_event end;
};

static void slot_fetch(struct slot *s)
{
    struct loader *l = s->l;
    struct stk_error err = { 0 };
    if (l->next == TENSORS) return;
    s->tensor = l->next++;
    s->req.offset_bytes = (uint64_t)s->tensor * TENSOR_BYTES;
    CHECK(io_submit(l->w->io, &s->req, &err) == STK_OK);
}

/* A slow consumer: looks at the bytes at the end of its time, then gives the slot back. */
static void slot_consume(void *arg)
{
    struct slot *s = arg;
    struct loader *l = s->l;
    if (s->req.status != STK_OK || !filled(s->req.buf, TENSOR_BYTES, (uint64_t)s->tensor * 7919))
        l->wrong++;
    if (++l->consumed == TENSORS) exec_event_set(&l->end);
    slot_fetch(s);
}

static void slot_arrived(struct io_req *req)
{
    struct slot *s = req->owner;
    exec_post_at(s->l->w->lane, &s->consume,
                 exec_now_ns(s->l->w->ex) + rng_below(&s->l->rng, 50000001));
}

static void loader_start(void *arg)
{
    struct loader *l = arg;
    for (uint32_t i = 0; i < SLOTS; i++) slot_fetch(&l->slots[i]);
}

TEST(io_nvm_38_buffers_stay_with_their_consumer)
{
    FOR_COMBOS(c)
    {
        if (c->ex != EXEC_SIM) continue; /* delays of virtual time */
        struct world w = { .sim = { .latency_ns = 20000, .read_bytes_per_s = 1e9 } };
        struct stk_error err = { 0 };
        uint32_t file;
        uint64_t size = (uint64_t)TENSORS * TENSOR_BYTES;
        CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
        CHECK_OK(world_file(&w, "a", size, 0, &file, &err), &err);
        uint8_t *all = sys_mmap(size, false), *buf = sys_mmap(SLOTS * TENSOR_BYTES, false);
        for (uint32_t i = 0; i < TENSORS; i++)
            fill(all + (uint64_t)i * TENSOR_BYTES, TENSOR_BYTES, (uint64_t)i * 7919);
        struct io_req wr = { .op = IO_WRITE, .file = file, .buf = all, .size_bytes = size };
        CHECK_OK(one(&w, &wr, &err), &err);
        io_buffer_register(w.io, buf, SLOTS * TENSOR_BYTES);
        struct loader *l = calloc(1, sizeof *l);
        l->w = &w;
        rng_seed(&l->rng, test_seed());
        exec_event_init(w.ex, &l->end);
        for (uint32_t i = 0; i < SLOTS; i++) {
            struct slot *s = &l->slots[i];
            s->l = l;
            exec_task_init(&s->consume, slot_consume, s);
            s->req = (struct io_req){ .op = IO_READ,
                                      .cls = IO_PREFETCH,
                                      .file = file,
                                      .buf = buf + i * TENSOR_BYTES,
                                      .size_bytes = TENSOR_BYTES,
                                      .done = slot_arrived,
                                      .owner = s };
        }
        world_run(&w, loader_start, l);
        CHECK_OK(exec_event_wait(&l->end, UINT64_MAX, &err), &err);
        CHECK(l->wrong == 0 && l->consumed == TENSORS && io_in_flight(w.io) == 0);
        free(l);
        world_close(&w);
        sys_munmap(all, size);
        sys_munmap(buf, SLOTS * TENSOR_BYTES);
    }
}

/* --- a device whose directions share ---------------------------------------------------------- */

enum { SHARE_DRIVES = 10, SHARE_DEPTH = 32 };

static void share_requests(const uint32_t *file, uint8_t *buf, struct io_req *reqs)
{
    for (uint32_t i = 0; i < SHARE_DRIVES * SHARE_DEPTH; i++)
        reqs[i] = (struct io_req){ .op = i % 8 ? IO_READ : IO_WRITE,
                                   .file = file[i % SHARE_DRIVES],
                                   .buf = buf + (uint64_t)i * 4096,
                                   .offset_bytes = (uint64_t)(i / SHARE_DRIVES) * 4096,
                                   .size_bytes = 4096 };
}

/* As many parts as all drives take at once; then a close that finds both directions busy: nothing of
 * the io may run after it. */
TEST(io_directions_that_share_take_all_and_leave_nothing)
{
    struct io_req *reqs = calloc(SHARE_DRIVES * SHARE_DEPTH, sizeof *reqs);
    uint8_t *buf = sys_mmap(SHARE_DRIVES * SHARE_DEPTH * 4096, false);
    for (int drained = 1; drained >= 0; drained--) {
        struct world w = { .cfg = { .depth = SHARE_DEPTH },
                           .sim = { .read_bytes_per_s = 2e6, .write_bytes_per_s = 1e6,
                                    .both_bytes_per_s = 2e6 } };
        struct stk_error err = { 0 };
        uint32_t file[SHARE_DRIVES];
        char name[2] = "a";
        CHECK_OK(world_open(&w, IO_SIM, EXEC_SIM, test_seed(), &err), &err);
        for (uint32_t i = 0; i < SHARE_DRIVES; i++, name[0]++)
            CHECK_OK(world_file(&w, name, SHARE_DEPTH * 4096, i, &file[i], &err), &err);
        share_requests(file, buf, reqs);
        struct batch b = { .w = &w, .reqs = reqs, .n = SHARE_DRIVES * SHARE_DEPTH };
        world_run(&w, batch_submit, &b);
        CHECK(b.refused == STK_OK);
        if (drained) CHECK_OK(io_drain(w.io, UINT64_MAX, &err), &err);
        CHECK(drained ? b.done == b.n : b.done < b.n);
        world_close(&w);
    }
    free(reqs);
    sys_munmap(buf, SHARE_DRIVES * SHARE_DEPTH * 4096);
}

TEST_MAIN()
