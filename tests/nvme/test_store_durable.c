/* tests/nvme/test_store_durable.c - durable steps: the life of a store over commits and adoptions,
 * on every backend; puts that meet a commit; full disks; every system call failing once. What lies in
 * the folders is test_store_found.c's, power cuts are test_store_power.c's. */
#include "tests/nvme/durable_world.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

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
    CHECK(dur_find(&d, NULL, &f) == STK_END && !f);
    CHECK(dur_find(&d, "0123456789abcdef", &f) == STK_END);
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

/* A name that does not lead to the open file any more: the commit says so, and which name. When it
 * leads there again, commits count again. */
static void away(const char *which, const char *words)
{
    struct dur d = { 0 };
    struct commit_call call;
    char name[800], aside[840], folder[700];
    struct stat st;
    REQUIRE(dur_world(&d, IO_POSIX, EXEC_THREADS, 2));
    CHECK_OK(dur_open(&d), &d.err);
    dur_put_all(&d, 10);
    CHECK_OK(dur_commit(&d, 2, &call), &d.err);
    snprintf(folder, sizeof folder, "%s", d.s->paths[1].folder);
    if (which[0]) snprintf(name, sizeof name, "%s/%s", folder, which);
    else snprintf(name, sizeof name, "%s", d.dirs[1]);
    snprintf(aside, sizeof aside, "%s.aside", name);
    REQUIRE(rename(name, aside) == 0);
    dur_put_all(&d, 20);
    CHECK(dur_commit(&d, 3, &call) == STK_ERR_IO && call.c.lost);
    CHECK(strstr(d.err.text, d.dirs[1]) && strstr(d.err.text, words));
    if (which[0]) { /* another file of that name is not it */
        FILE *f = fopen(name, "w");
        REQUIRE(f);
        fclose(f);
        stk_error_clear(&d.err);
        CHECK(dur_commit(&d, 4, &call) == STK_ERR_IO && strstr(d.err.text, "another file"));
    }
    REQUIRE(rename(aside, name) == 0 && stat(name, &st) == 0);
    stk_error_clear(&d.err);
    CHECK_OK(dur_commit(&d, 5, &call), &d.err);
    CHECK(!call.c.lost);
    dur_close(&d);
    CHECK(dur_adopt(&d, 5));
    for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 20 + i));
    if (strstr(which, "extents")) { /* cut short under the store */
        REQUIRE(truncate(name, 4096) == 0);
        stk_error_clear(&d.err);
        CHECK(dur_commit(&d, 6, &call) == STK_ERR_IO && strstr(d.err.text, "cut short"));
    }
    store_discard(d.s);
    if (!which[0]) { /* gone for good: what cannot be removed is named */
        REQUIRE(rename(name, aside) == 0);
        stk_error_clear(&d.err);
        CHECK(store_close_left(d.s, &d.err) == STK_ERR_STATE && strstr(d.err.text, d.dirs[1]));
        REQUIRE(rename(aside, name) == 0);
        struct store_found *f;
        CHECK(dur_find(&d, NULL, &f) != STK_OK || f->step == 5);
        store_found_free(f);
        d.s = NULL;
    }
    dur_end(&d);
}

TEST(store_durable_names_that_lead_elsewhere)
{
    away("", "removed or moved away");
    away("extents-1.bin", "removed or moved away");
    away("table.bin", "removed or moved away");
    away("lock", "removed or moved away");
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
        /* the payload of step 2 was left out: only that differs */
        CHECK(dur_adopt(&d, 2) == false);
        for (uint32_t i = 0; i < N; i++) if (classes[i] != 1) CHECK(dur_holds(&d, i, 100 + i));
        sys_munmap(o.bufs, N * ROOM_BYTES);
        dur_end(&d);
    }
}

/* --- room ----------------------------------------------------------------------------------- */

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
