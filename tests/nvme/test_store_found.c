/* tests/nvme/test_store_found.c - finding and adopting what dead runs left: sets of paths, geometry
 * that differs, damaged tables, foreign files, live and killed runs. */
#include "tests/nvme/durable_world.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

/* --- sets of paths ---------------------------------------------------------------------------- */

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

/* --- cut short, replaced ---------------------------------------------------------------------- */

static void table_cut(struct dur *d, uint32_t path, const char *id, uint64_t bytes)
{
    char name[1024];
    snprintf(name, sizeof name, "%s/stoker-run-%s/table.bin", d->dirs[path], id);
    CHECK(truncate(name, (off_t)bytes) == 0);
}

/* Whichever path's table was cut, and wherever: the sentence names that file, its size and the one
 * expected, and neither another file nor the configuration. */
TEST(store_found_table_cut_short_is_named)
{
    for (uint32_t cut = 0; cut < 2; cut++) {
        for (uint64_t part = 0; part < 4; part++) {
            struct dur d = { 0 };
            char id[STORE_RUN_ID_MAX], want[700];
            REQUIRE(committed(&d, IO_POSIX, 2, id));
            uint64_t all = 2 * store_half_bytes(&d.cfg), left = all * part / 4 + (part ? 0 : 100);
            table_cut(&d, cut, id, left);
            memcpy(d.cfg.run_id, id, sizeof id);
            d.cfg.adopt = true;
            CHECK(dur_open(&d) == STK_ERR_CORRUPT);
            snprintf(want, sizeof want, "%s/stoker-run-%s/table.bin: has %llu bytes, %llu are "
                     "expected: the file was cut short", d.dirs[cut], id,
                     (unsigned long long)left, (unsigned long long)all);
            CHECK(strstr(d.err.text, want) != NULL);
            if (!strstr(d.err.text, want)) printf("# %s\n", d.err.text);
            dur_end(&d);
        }
    }
}

/* The only one: no other says how large it was, the configuration does. */
TEST(store_found_the_only_table_cut_short)
{
    struct dur d = { 0 };
    char id[STORE_RUN_ID_MAX];
    REQUIRE(committed(&d, IO_POSIX, 1, id));
    uint64_t all = 2 * store_half_bytes(&d.cfg);
    memcpy(d.cfg.run_id, id, sizeof id);
    d.cfg.adopt = true;
    table_cut(&d, 0, id, all - 1024);
    CHECK(dur_open(&d) != STK_OK && strstr(d.err.text, "table.bin"));
    CHECK(strstr(d.err.text, "cut short") != NULL);
    printf("# %s\n", d.err.text);
    table_cut(&d, 0, id, 600);
    CHECK(dur_open(&d) == STK_ERR_CORRUPT && strstr(d.err.text, "cut short"));
    printf("# %s\n", d.err.text);
    dur_end(&d);
}

/* No run holds a folder where its lock should be: what is there can be removed. */
TEST(store_found_a_lock_that_is_a_folder)
{
    struct dur d = { 0 };
    char id[STORE_RUN_ID_MAX], name[1024];
    struct store_found *f;
    REQUIRE(committed(&d, IO_POSIX, 2, id));
    snprintf(name, sizeof name, "%s/stoker-run-%s/lock", d.dirs[1], id);
    CHECK(unlink(name) == 0 && mkdir(name, 0700) == 0);
    CHECK_OK(dur_find(&d, id, &f), &d.err);
    CHECK_OK(store_found_discard(f, NULL, &d.err), &d.err);
    store_found_free(f);
    CHECK(entries_in(d.dirs[0]) == 0 && entries_in(d.dirs[1]) == 0);
    dur_end(&d);
}

/* --- kill -9 ---------------------------------------------------------------------------------- */

/* A child commits step after step, with puts of the next step on their way meanwhile, and tells the
 * parent of each that is complete. It goes on from whatever is there. */
struct worker {
    struct dur d;
    struct commit_call call;
    struct store_op ops[N];
    uint8_t *bufs;
    uint64_t step;
    uint32_t done;
    bool commit;
};

static void worker_put_done(struct store_op *op)
{
    if (op->status != STK_OK) _exit(5);
    ((struct worker *)op->owner)->done++;
}

static void worker_step(void *arg)
{
    struct worker *k = arg;
    struct stk_error err = { 0 };
    k->call = (struct commit_call){ .s = k->d.s, .c = { .step = k->step } };
    if (k->commit) commit_start(&k->call);
    for (uint32_t i = 0; i < N; i++) {
        k->ops[i] = (struct store_op){ .extent = i, .buf = k->bufs + i * ROOM_BYTES,
                                       .version = (k->step + 1) * 10 + i, .owner = k,
                                       .done = worker_put_done };
        fill(k->ops[i].buf, sizes[i], content(i, k->ops[i].version));
        if (store_put(k->d.s, &k->ops[i], &err) != STK_OK) _exit(6);
    }
}

static void work_until_killed(struct dur *parent, const char *id, int pipe_fd)
{
    struct worker *k = calloc(1, sizeof *k);
    snprintf(k->d.w.dir, sizeof k->d.w.dir, "%s", parent->w.dir);
    k->d.cfg = parent->cfg;
    k->bufs = sys_mmap(N * ROOM_BYTES, false);
    if (world_open(&k->d.w, IO_AUTO, EXEC_THREADS, 1, &k->d.err) != STK_OK) _exit(1);
    memcpy(k->d.cfg.run_id, id, STORE_RUN_ID_MAX);
    k->d.cfg.adopt = store_find(k->d.cfg.paths, k->d.cfg.n_paths, id, NULL,
                                &(struct store_found *){ NULL }, &k->d.err) == STK_OK;
    if (dur_open(&k->d) != STK_OK) _exit(2);
    store_durable(k->d.s, &k->step);
    for (;; k->step++) {
        world_run(&k->d.w, worker_step, k);
        if (store_drain(k->d.s, UINT64_MAX, &k->d.err) != STK_OK) _exit(3);
        if (k->commit && (k->call.refused != STK_OK || k->call.c.status != STK_OK)) _exit(4);
        if (k->commit && write(pipe_fd, &k->step, sizeof k->step) != sizeof k->step) _exit(7);
        k->commit = true;
    }
}

/* Killed at any moment, the run goes on from the last step that it called complete, or from the one
 * that was being committed: all extents of one step, byte for byte. The same store lives through
 * all kills. */
TEST(store_durable_kill_9_at_any_moment)
{
    static const char id[STORE_RUN_ID_MAX] = "00112233aabbccdd";
    struct dur d = { 0 };
    struct rng r;
    uint64_t last = 0, in_flight = 0;
    rng_seed(&r, test_seed());
    REQUIRE(dur_world(&d, IO_POSIX, EXEC_SIM, 2));
    for (int round = 0; round < 25; round++) {
        int fds[2], st;
        uint64_t told = 0, want = rng_below(&r, 4);
        struct timespec until = { .tv_nsec = (long)rng_below(&r, 3000000) };
        REQUIRE(pipe(fds) == 0);
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) work_until_killed(&d, id, fds[1]);
        close(fds[1]);
        for (uint64_t k = 0; k <= want && read(fds[0], &told, sizeof told) == sizeof told; k++) {}
        nanosleep(&until, NULL); /* the moment of the kill is drawn; any will do */
        kill(pid, SIGKILL);
        CHECK(waitpid(pid, &st, 0) == pid && WIFSIGNALED(st));
        while (read(fds[0], &told, sizeof told) == sizeof told) {}
        close(fds[0]);
        CHECK(told > last || told == 0);
        if (told) last = told;
        memcpy(d.cfg.run_id, id, sizeof id);
        d.cfg.adopt = true;
        CHECK_OK(dur_open(&d), &d.err);
        uint64_t step = 0;
        CHECK(store_durable(d.s, &step) && (step == last || step == last + 1));
        in_flight += step != last;
        for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, step * 10 + i));
        last = step;
        dur_close(&d);
    }
    printf("# %" PRIu64 " steps, 25 kills, %" PRIu64 " of them found the one in flight\n", last,
           in_flight);
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

/* --- transfers that outlive their process ------------------------------------------------------- */

struct late_write {
    struct dur *d;
    const char *id;
    uint64_t bytes;
    uint8_t *table;
    int fd; /* what a transfer under way holds */
};

/* The drive ends the dead run's last write, and with it goes the file's lock. */
static void *write_lands(void *arg)
{
    struct late_write *w = arg;
    nanosleep(&(struct timespec){ .tv_nsec = 30000000 }, NULL);
    table_write(w->d, 0, w->id, w->table, w->bytes);
    close(w->fd);
    return NULL;
}

/* A table that a killed process was writing lands after its death, and after the next run has begun to look:
 * it waits. Right at any speed of either. */
TEST(store_found_a_write_that_outlives_its_process)
{
    for (int adopt = 0; adopt < 2; adopt++) {
        struct dur d = { 0 };
        struct store_found *f = NULL;
        char id[STORE_RUN_ID_MAX], name[STORE_PATH_TEXT_MAX];
        pthread_t thread;
        REQUIRE(committed(&d, IO_POSIX, 1, id));
        struct late_write w = { .d = &d, .id = id, .bytes = 2 * store_half_bytes(&d.cfg) };
        w.table = malloc(w.bytes);
        uint8_t *none = calloc(1, w.bytes);
        REQUIRE(w.table && none);
        table_read(&d, 0, id, w.table, w.bytes);
        table_write(&d, 0, id, none, w.bytes);
        snprintf(name, sizeof name, "%s/stoker-run-%s/table.bin", d.dirs[0], id);
        w.fd = open(name, O_RDWR | O_CLOEXEC);
        REQUIRE(w.fd >= 0 && flock(w.fd, LOCK_SH) == 0);
        REQUIRE(pthread_create(&thread, NULL, write_lands, &w) == 0);
        if (adopt) {
            memcpy(d.cfg.run_id, id, sizeof id);
            d.cfg.adopt = true;
            CHECK_OK(dur_open(&d), &d.err);
        } else {
            CHECK_OK(dur_find(&d, NULL, &f), &d.err);
            CHECK(f && f->step == 2);
        }
        pthread_join(thread, NULL);
        if (adopt) {
            for (uint32_t i = 0; i < N; i++) CHECK(dur_holds(&d, i, 20 + i));
            dur_close(&d);
        }
        store_found_free(f);
        free(w.table);
        free(none);
        dur_end(&d);
    }
}

TEST_MAIN()
