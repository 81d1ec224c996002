/* tests/nvme/test_store.c - the extent store on a good disk, its folders and locks, and damage done
 * from outside. */
#include "tests/nvme/store_world.h"
#include "nvme/store_impl.h"

#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>

#define MIB (1024u * 1024u)

static uint32_t entries_in(const char *dir)
{
    uint32_t n = 0;
    DIR *d = opendir(dir);
    struct dirent *e;
    while (d && (e = readdir(d))) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

static const uint64_t sizes[] = { 1,
                                  511,
                                  512,
                                  513,
                                  4095,
                                  4096,
                                  4097,
                                  8191,
                                  8193,
                                  MIB - 1,
                                  MIB,
                                  MIB + 1,
                                  28824000,
                                  IO_TRANSFER_MAX - 1,
                                  IO_TRANSFER_MAX + 1 };
#define N_SIZES (sizeof sizes / sizeof *sizes)

/* NVM-01: every size comes back, in several rooms; the last partial block too. */
static void all_sizes(const struct combo *c, uint32_t room, uint32_t lanes)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct store *s;
    struct store_cfg cfg = {
        .n_extents = N_SIZES, .extent_bytes = sizes, .room = room, .checksum_lanes = lanes
    };
    CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    uint64_t most = 28824000 + 4096, n_versions = room > 1 ? 4 : 2;
    uint8_t *buf = sys_mmap(most, false);
    for (uint64_t v = 1; v <= n_versions; v++) {
        for (uint32_t i = 0; i < N_SIZES; i++) {
            struct store_op op;
            fill(buf, sizes[i], v * 1000 + i);
            CHECK(put_one(&w, s, i, buf, v, &op) == STK_OK);
            CHECK(store_version(s, i) == v);
            memset(buf, 0xee, sizes[i]);
            CHECK(get_one(&w, s, i, buf, v, &op) == STK_OK);
            CHECK(filled(buf, sizes[i], v * 1000 + i));
        }
    }
    struct store_stats st;
    store_stats_read(s, &st);
    CHECK(st.puts == N_SIZES * n_versions && st.gets == st.puts && st.verify_failures == 0);
    if (room > 1) { /* the version before is still there, the one before that is not always */
        struct store_op op;
        CHECK(get_one(&w, s, 3, buf, n_versions - 1, &op) == STK_OK &&
              filled(buf, sizes[3], (n_versions - 1) * 1000 + 3));
    }
    store_close(s);
    if (c->io != IO_SIM) CHECK(entries_in(w.dir) == 0);
    else CHECK(io_sim_free_bytes(w.disk) == 1ull << 40);
    world_close(&w);
    sys_munmap(buf, most);
}

TEST(store_nvm_01_sizes)
{
    FOR_COMBOS(c)
    {
        all_sizes(c, 1, 1);
        if (c->ex == EXEC_SIM) all_sizes(c, 3, 2);
    }
}

/* Many at once over two paths with weights; gets of one extent may overlap each other. */
TEST(store_many_at_once)
{
    FOR_COMBOS(c)
    {
        enum { N = 60, SIZE = 70000, ROOM = 73728 };
        struct world w = { .cfg = { .depth = 8 } };
        struct stk_error err = { 0 };
        struct store *s;
        uint64_t bytes[N];
        char second[600];
        for (int i = 0; i < N; i++) bytes[i] = SIZE;
        CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
        snprintf(second, sizeof second, "%s/second", w.dir);
        if (!w.disk) sys_mkdirs(second);
        struct store_cfg cfg = { .n_extents = N,
                                 .extent_bytes = bytes,
                                 .n_paths = 2,
                                 .paths = { w.dir, second },
                                 .weights = { 3, 1 },
                                 .checksum_lanes = 2 };
        CHECK(store_need_bytes(&cfg, 0) == 0); /* room is not set yet */
        cfg.room = 1;
        CHECK(store_need_bytes(&cfg, 0) == 45 * ROOM && store_need_bytes(&cfg, 1) == 15 * ROOM);
        CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
        uint8_t *buf = sys_mmap((uint64_t)N * ROOM, false);
        io_buffer_register(w.io, buf, (uint64_t)N * ROOM);
        struct store_op *ops = calloc(N, sizeof *ops);
        for (int round = 0; round < 3; round++) {
            for (uint32_t i = 0; i < N; i++) {
                ops[i] = (struct store_op){ .extent = i,
                                            .buf = buf + i * ROOM,
                                            .version = (uint64_t)round };
                fill(buf + i * ROOM, SIZE, i + 100 * (uint64_t)round);
            }
            CHECK(ops_run(&w, s, ops, N, true) == STK_OK);
            for (uint32_t i = 0; i < N; i++) {
                CHECK(ops[i].status == STK_OK);
                ops[i] = (struct store_op){ .extent = i / 2,
                                            .buf = buf + i * ROOM,
                                            .version = UINT64_MAX };
            }
            CHECK(ops_run(&w, s, ops, N, false) == STK_OK);
            for (uint32_t i = 0; i < N; i++)
                CHECK(ops[i].status == STK_OK &&
                      filled(buf + i * ROOM, SIZE, i / 2 + 100 * (uint64_t)round));
        }
        free(ops);
        store_close(s);
        world_close(&w);
        sys_munmap(buf, (uint64_t)N * ROOM);
    }
}

TEST(store_version_mismatch_is_named)
{
    FOR_COMBOS(c)
    {
        struct world w = { 0 };
        struct stk_error err = { 0 };
        struct store *s;
        uint64_t bytes[2] = { 5000, 5000 };
        struct store_cfg cfg = { .n_extents = 2, .extent_bytes = bytes };
        struct store_op op;
        CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
        CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
        uint8_t *buf = sys_mmap(8192, false);
        CHECK(get_one(&w, s, 1, buf, UINT64_MAX, &op) == STK_ERR_CORRUPT);
        CHECK(put_one(&w, s, 1, buf, 12, &op) == STK_OK);
        CHECK(get_one(&w, s, 1, buf, 13, &op) == STK_ERR_CORRUPT);
        CHECK(strstr(op.error.text, "extent 1") && strstr(op.error.text, "version 13") &&
              strstr(op.error.text, "version 12"));
        CHECK(get_one(&w, s, 7, buf, 13, &op) == STK_ERR_CONFIG);
        store_close(s);
        world_close(&w);
        sys_munmap(buf, 8192);
    }
}

/* The recorded checksum differs between extents and versions that hold the same bytes: a stale or
 * misplaced copy of them is told apart. */
TEST(store_checksum_covers_extent_and_version)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct store *s;
    uint64_t bytes[2] = { 5000, 5000 };
    struct store_cfg cfg = { .n_extents = 2, .extent_bytes = bytes, .room = 2 };
    struct store_op op;
    CHECK_OK(world_open(&w, IO_SIM, EXEC_SIM, test_seed(), &err), &err);
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    uint8_t *buf = sys_mmap(8192, false);
    CHECK(put_one(&w, s, 0, buf, 1, &op) == STK_OK && put_one(&w, s, 0, buf, 2, &op) == STK_OK);
    CHECK(put_one(&w, s, 1, buf, 1, &op) == STK_OK);
    CHECK(s->extents[0].slots[0].crc != s->extents[0].slots[1].crc);
    CHECK(s->extents[0].slots[0].crc != s->extents[1].slots[0].crc);
    store_close(s);
    world_close(&w);
    sys_munmap(buf, 8192);
}

/* A put whose checksum the caller brings, made in parts: as any other, and a wrong one is found. */
TEST(store_sum_of_the_callers)
{
    FOR_COMBOS(c)
    {
        struct world w = { 0 };
        struct stk_error err = { 0 };
        struct store *s;
        uint64_t bytes[1] = { 5000 };
        struct store_cfg cfg = { .n_extents = 1, .extent_bytes = bytes };
        CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
        CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
        uint8_t *buf = sys_mmap(8192, false);
        for (uint32_t wrong = 0; wrong < 2; wrong++) {
            for (int i = 0; i < 8192; i++) buf[i] = (uint8_t)(i * 7 + i / 256);
            uint32_t parts = store_sum_part(buf + 1000, 4000, 1000, 5000);
            parts ^= store_sum_part(buf, 1000, 0, 5000);
            struct store_op op = { .buf = buf, .version = 3 + wrong, .cls = IO_WRITE_BACK,
                                   .summed = true, .sum = store_sum(parts, 5000) ^ wrong << 9 };
            CHECK(ops_run(&w, s, &op, 1, true) == STK_OK && op.status == STK_OK);
            for (int i = 5000; i < 8192; i++) CHECK(buf[i] == 0);
            memset(buf, 0, 8192);
            stk_status got = get_one(&w, s, 0, buf, 3 + wrong, &op);
            CHECK(got == (wrong ? STK_ERR_CORRUPT : STK_OK));
            for (int i = 0; i < 5000; i++) CHECK(buf[i] == (uint8_t)(i * 7 + i / 256));
        }
        store_close(s);
        world_close(&w);
        sys_munmap(buf, 8192);
    }
}

/* The newest version survives a put of any other version, and a failed put leaves no version that
 * could be got; the padding that goes to disk is zero. */
TEST(store_rooms_and_failed_puts)
{
    for (uint32_t room = 1; room <= 3; room++) {
        struct world w = { 0 };
        struct stk_error err = { 0 };
        struct store *s;
        uint64_t bytes[1] = { 5000 };
        struct store_cfg cfg = { .n_extents = 1, .extent_bytes = bytes, .room = room };
        struct store_op op;
        CHECK_OK(world_open(&w, IO_POSIX, EXEC_SIM, test_seed(), &err), &err);
        CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
        uint8_t *buf = sys_mmap(8192, false);
        memset(buf, 0xee, 8192);
        CHECK(put_one(&w, s, 0, buf, 5, &op) == STK_OK && buf[4999] == 0xee);
        for (int i = 5000; i < 8192; i++) CHECK(buf[i] == 0);
        CHECK(put_one(&w, s, 0, buf, 3, &op) == STK_OK && put_one(&w, s, 0, buf, 4, &op) == STK_OK);
        if (room > 1) CHECK(get_one(&w, s, 0, buf, 3, &op) == STK_OK);
        sys_fault_arm(SYS_WRITE, 1, 1, EIO);
        CHECK(put_one(&w, s, 0, buf, 6, &op) == STK_ERR_IO && op.error.os_errno == EIO);
        sys_fault_arm(SYS_WRITE, 0, 0, 0);
        CHECK(store_version(s, 0) == (room > 1 ? 4 : UINT64_MAX));
        CHECK((get_one(&w, s, 0, buf, UINT64_MAX, &op) == STK_OK) == (room > 1));
        if (room == 1) CHECK(strstr(op.error.text, "none that is complete"));
        if (room == 2) { /* version 3 was in the slot that the failed put destroyed */
            CHECK(get_one(&w, s, 0, buf, 3, &op) == STK_ERR_CORRUPT);
            CHECK(strstr(op.error.text, "version 3 was expected"));
        }
        store_close(s);
        world_close(&w);
        sys_munmap(buf, 8192);
    }
}

/* NVM-04: two stores on one path at once have folders of their own. */
TEST(store_nvm_04_two_stores_one_path)
{
    struct world a = { 0 }, b = { 0 };
    struct stk_error err = { 0 };
    struct store *sa, *sb;
    uint64_t bytes[1] = { 10000 };
    struct store_cfg ca = { .n_extents = 1, .extent_bytes = bytes }, cb = ca;
    struct store_op op;
    CHECK_OK(world_open(&a, IO_POSIX, EXEC_THREADS, 1, &err), &err);
    snprintf(b.dir, sizeof b.dir, "%s", a.dir);
    CHECK_OK(world_open(&b, IO_AUTO, EXEC_THREADS, 1, &err), &err);
    CHECK_OK(store_world_open(&a, &ca, &sa, &err), &err);
    CHECK_OK(store_world_open(&b, &cb, &sb, &err), &err);
    const char *const *notes;
    CHECK(store_notes(sb, &notes) == 0 && entries_in(a.dir) == 2);
    uint8_t *buf = sys_mmap(16384, false);
    fill(buf, 10000, 1);
    CHECK(put_one(&a, sa, 0, buf, 1, &op) == STK_OK);
    fill(buf, 10000, 2);
    CHECK(put_one(&b, sb, 0, buf, 1, &op) == STK_OK);
    CHECK(get_one(&a, sa, 0, buf, 1, &op) == STK_OK && filled(buf, 10000, 1));
    CHECK(get_one(&b, sb, 0, buf, 1, &op) == STK_OK && filled(buf, 10000, 2));
    store_close(sa);
    CHECK(entries_in(a.dir) == 1);
    CHECK(get_one(&b, sb, 0, buf, 1, &op) == STK_OK && filled(buf, 10000, 2));
    store_close(sb);
    CHECK(entries_in(a.dir) == 0);
    world_close(&b);
    a.cfg.kind = IO_SIM; /* the folder is gone already */
    world_close(&a);
    sys_munmap(buf, 16384);
}

/* A child opens a store and is killed. */
static void die_with_store(const char *dir)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct store *s;
    uint64_t bytes[1] = { 3 * MIB };
    struct store_cfg cfg = { .n_extents = 1, .extent_bytes = bytes };
    snprintf(w.dir, sizeof w.dir, "%s", dir);
    if (world_open(&w, IO_POSIX, EXEC_SIM, 1, &err) == STK_OK &&
        store_world_open(&w, &cfg, &s, &err) == STK_OK)
        raise(SIGKILL);
    _exit(1);
}

/* NVM-05: what a killed run left is removed and named; what has another name, or a durable table,
 * is not touched. */
TEST(store_nvm_05_dead_runs)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct store *s;
    uint64_t bytes[1] = { 10000 };
    struct store_cfg cfg = { .n_extents = 1, .extent_bytes = bytes };
    char name[700];
    int st;
    CHECK_OK(world_open(&w, IO_POSIX, EXEC_THREADS, 1, &err), &err);
    pid_t pid = fork();
    if (pid == 0) die_with_store(w.dir);
    CHECK(waitpid(pid, &st, 0) == pid && WIFSIGNALED(st) && entries_in(w.dir) == 1);
    snprintf(name, sizeof name, "%s/stoker-run-mine", w.dir);
    sys_mkdirs(name);
    /* died before its lock was made */
    snprintf(name, sizeof name, "%s/stoker-run-0123456789abcdef", w.dir);
    sys_mkdirs(name);
    snprintf(name, sizeof name, "%s/stoker-run-0000000000000000/table.bin", w.dir); /* durable */
    sys_mkdirs(name);
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    const char *const *notes;
    uint32_t n = store_notes(s, &notes), removed = 0, kept = 0, with_pid = 0;
    snprintf(name, sizeof name, "pid %d", (int)pid);
    for (uint32_t i = 0; i < n; i++) {
        removed += strstr(notes[i], "removed") != NULL;
        kept += strstr(notes[i], "is kept") != NULL;
        with_pid += strstr(notes[i], name) != NULL;
    }
    CHECK(n == 3 && removed == 2 && kept == 1 && with_pid == 1);
    CHECK(entries_in(w.dir) == 3); /* mine, the durable one, the new one */
    store_close(s);
    CHECK(entries_in(w.dir) == 2);
    world_close(&w);
}

/* A bit flipped on the medium is found, and named with extent, file and place. */
TEST(store_flipped_bit_is_named)
{
    FOR_COMBOS(c)
    {
        struct world w = { 0 };
        struct stk_error err = { 0 };
        struct store *s;
        uint64_t bytes[3] = { 5000, 70001, 5000 }, at;
        struct store_cfg cfg = { .n_extents = 3, .extent_bytes = bytes };
        struct store_op op;
        const char *path;
        char want[64];
        CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
        CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
        uint8_t *buf = sys_mmap(MIB, false);
        fill(buf, 70001, 9);
        CHECK(put_one(&w, s, 1, buf, 4, &op) == STK_OK);
        CHECK(store_locate(s, 1, &path, &at) == STK_OK && at == 8192);
        if (w.disk) {
            CHECK(io_sim_flip(w.disk, path, at + 70000, 3) &&
                  io_sim_damaged(w.disk, path, at, 70001));
            CHECK(!io_sim_damaged(w.disk, path, 0, 8192));
        } else {
            int fd = sys_open(path, O_RDWR, 0);
            uint8_t x;
            CHECK(sys_read_full(fd, &x, 1, at + 70000) == 1);
            x ^= 8;
            CHECK(sys_write_full(fd, &x, 1, at + 70000) == 1 && sys_fsync(fd) == 0);
            sys_close(fd);
        }
        CHECK(get_one(&w, s, 1, buf, 4, &op) == STK_ERR_CORRUPT);
        snprintf(want, sizeof want, "extents-0.bin at byte %llu)", (unsigned long long)at);
        CHECK(strstr(op.error.text, "extent 1 (") && strstr(op.error.text, want) &&
              strstr(op.error.text, path));
        CHECK(strstr(op.error.text, "version 4"));
        if (c == combos) printf("# %s\n", op.error.text);
        struct store_stats st;
        store_stats_read(s, &st);
        CHECK(st.verify_failures == 1);
        CHECK(put_one(&w, s, 1, buf, 5, &op) == STK_OK && get_one(&w, s, 1, buf, 5, &op) == STK_OK);
        store_close(s);
        world_close(&w);
        sys_munmap(buf, MIB);
    }
}

TEST(store_truncated_file_is_a_clean_error)
{
    FOR_COMBOS(c)
    {
        if (c->io == IO_SIM) continue;
        struct world w = { 0 };
        struct stk_error err = { 0 };
        struct store *s;
        uint64_t bytes[2] = { 50000, 50000 }, at;
        struct store_cfg cfg = { .n_extents = 2, .extent_bytes = bytes };
        struct store_op op;
        const char *path;
        CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
        CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
        uint8_t *buf = sys_mmap(MIB, false);
        for (uint32_t i = 0; i < 2; i++) CHECK(put_one(&w, s, i, buf, 4, &op) == STK_OK);
        store_locate(s, 1, &path, &at);
        CHECK(truncate(path, (off_t)at + 5000) == 0);
        CHECK(get_one(&w, s, 0, buf, 4, &op) == STK_OK);
        CHECK(get_one(&w, s, 1, buf, 4, &op) == STK_ERR_IO && strstr(op.error.text, "extent 1 ("));
        CHECK(strstr(op.error.text, "cut short"));
        store_close(s);
        world_close(&w);
        sys_munmap(buf, MIB);
    }
}

/* Opening fails at every system call in turn: a sentence, and nothing stays behind. */
TEST(store_open_fails_half_way)
{
    static const enum sys_call kinds[] = { SYS_ALLOC, SYS_OPEN, SYS_WRITE, SYS_ALLOCATE,
                                           SYS_THREAD };
    struct world w = { 0 };
    struct stk_error err = { 0 };
    uint64_t bytes[2] = { 10000, 10000 };
    char second[600];
    CHECK_OK(world_open(&w, IO_POSIX, EXEC_THREADS, 1, &err), &err);
    snprintf(second, sizeof second, "%s/second", w.dir);
    sys_mkdirs(second);
    struct store_cfg warm = {
        .n_extents = 2, .extent_bytes = bytes, .n_paths = 2, .paths = { w.dir, second }
    };
    struct store *first;
    /* the io keeps a drive once it is opened */
    CHECK_OK(store_world_open(&w, &warm, &first, &err), &err);
    store_close(first);
    uint64_t alive = sys_alloc_bytes();
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        uint32_t failed = 0;
        for (uint64_t k = 1; k < 60; k++) {
            struct store_cfg cfg = {
                .n_extents = 2, .extent_bytes = bytes, .n_paths = 2, .paths = { w.dir, second }
            };
            struct store *s = NULL;
            stk_error_clear(&err);
            sys_fault_arm(kinds[i], k, 1, kinds[i] == SYS_ALLOC ? ENOMEM : ENOSPC);
            stk_status status = store_world_open(&w, &cfg, &s, &err);
            sys_fault_arm(kinds[i], 0, 0, 0);
            if (status != STK_OK) {
                failed++;
                CHECK(!s && strlen(err.text) > 10 && err.code == status);
            } else {
                store_close(s);
            }
            CHECK(entries_in(w.dir) == 1 && entries_in(second) == 0);
            CHECK(sys_alloc_bytes() == alive);
        }
        CHECK(failed >= 1);
    }
    world_close(&w);
}

TEST(store_too_little_room)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct store *s;
    uint64_t bytes[1] = { 1ull << 50 };
    struct store_cfg cfg = { .n_extents = 1, .extent_bytes = bytes };
    CHECK_OK(world_open(&w, IO_POSIX, EXEC_SIM, 1, &err), &err);
    CHECK(store_world_open(&w, &cfg, &s, &err) == STK_ERR_NOSPACE && strstr(err.text, "112589990684"
                                                                                      "2624 "
                                                                                      "bytes"));
    CHECK(entries_in(w.dir) == 0);
    cfg.paths[0] = "/nonexistent/swap";
    stk_error_clear(&err);
    bytes[0] = 4096;
    CHECK(store_world_open(&w, &cfg, &s, &err) == STK_ERR_IO && strstr(err.text, "/nonexistent/"
                                                                                 "swap"));
    world_close(&w);
    struct world v = { 0 };
    stk_error_clear(&err);
    CHECK_OK(io_sim_disk_new(8192, &v.disk, &err), &err);
    CHECK_OK(world_open(&v, IO_SIM, EXEC_SIM, 1, &err), &err);
    cfg.paths[0] = NULL;
    bytes[0] = 8193;
    CHECK(store_world_open(&v, &cfg, &s, &err) == STK_ERR_NOSPACE);
    world_close(&v);
}

/* NVM-02: a small full file system. Preallocation fails at open with the numbers; nothing stays. */
TEST(store_nvm_02_full_disk)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct store *s;
    char dir[256], cmd[1200];
    if (geteuid() != 0 || !world_dir(dir, sizeof dir)) SKIP("needs root");
    snprintf(cmd, sizeof cmd,
             "cd %s && truncate -s 24M img && mkfs.ext4 -q -m 0 img && mkdir m && mount -o loop "
             "img m 2>/dev/null",
             dir);
    if (system(cmd) != 0) {
        sys_remove_tree(dir);
        SKIP("no loop file system here");
    }
    snprintf(w.dir, sizeof w.dir, "%s/m", dir);
    CHECK_OK(world_open(&w, IO_POSIX, EXEC_THREADS, 1, &err), &err);
    int64_t have = sys_disk_free(w.dir);
    uint64_t bytes[1] = { (uint64_t)have + 4096 };
    struct store_cfg cfg = { .n_extents = 1, .extent_bytes = bytes };
    CHECK(store_world_open(&w, &cfg, &s, &err) == STK_ERR_NOSPACE && strstr(err.text, "are free"));
    stk_error_clear(&err);
    /* nearly all of it: what is preallocated can be written on a full disk */
    bytes[0] = (uint64_t)(have - have / 16) & ~4095ull;
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    snprintf(cmd, sizeof cmd, "dd if=/dev/zero of=%s/filler bs=64k 2>/dev/null", w.dir);
    CHECK(system(cmd) != 0 && sys_disk_free(w.dir) < 65536);
    uint8_t *buf = sys_mmap(bytes[0], false);
    struct store_op op;
    fill(buf, bytes[0], 6);
    CHECK(put_one(&w, s, 0, buf, 1, &op) == STK_OK);
    memset(buf, 0, bytes[0]);
    CHECK(get_one(&w, s, 0, buf, 1, &op) == STK_OK && filled(buf, bytes[0], 6));
    sys_munmap(buf, bytes[0]);
    store_close(s);
    /* lost+found and the filler */
    CHECK(entries_in(w.dir) == 2 && sys_disk_free(w.dir) > have / 2);
    w.cfg.kind = IO_SIM; /* keeps world_close from removing the mount point */
    world_close(&w);
    snprintf(cmd, sizeof cmd, "umount %s/m", dir);
    CHECK(system(cmd) == 0);
    sys_remove_tree(dir);
}

/* NVM-22: a file system in memory: one note, and it works. */
TEST(store_nvm_22_tmpfs)
{
    FOR_COMBOS(c)
    {
        if (c->io == IO_SIM) continue;
        struct world w = { 0 };
        struct stk_error err = { 0 };
        struct store *s;
        uint64_t bytes[2] = { 50001, 20 };
        struct store_cfg cfg = { .n_extents = 2, .extent_bytes = bytes };
        struct store_op op;
        if (access("/dev/shm", W_OK) != 0) SKIP("no tmpfs");
        snprintf(w.dir, sizeof w.dir, "/dev/shm/stoker-test-XXXXXX");
        REQUIRE(mkdtemp(w.dir));
        CHECK_OK(world_open(&w, c->io, c->ex, test_seed(), &err), &err);
        CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
        CHECK(strstr(io_describe(w.io), "tmpfs"));
        uint8_t *buf = sys_mmap(MIB, false);
        fill(buf, 50001, 3);
        CHECK(put_one(&w, s, 0, buf, 4, &op) == STK_OK);
        memset(buf, 0, 50001);
        CHECK(get_one(&w, s, 0, buf, 4, &op) == STK_OK && filled(buf, 50001, 3));
        store_close(s);
        world_close(&w);
        sys_munmap(buf, MIB);
    }
}

TEST_MAIN()
