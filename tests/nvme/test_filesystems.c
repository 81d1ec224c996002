/* tests/nvme/test_filesystems.c - the extent store on file systems that are not the usual one:
 * overlay, Btrfs, a compressed block device in memory, one that refuses what network file systems
 * refuse; and what preallocation promises (NVM-40).
 *
 * Mounts are made in a child, in a namespace of its own; what this machine has not is skipped with
 * the reason. */
#include "tests/nvme/store_world.h"
#include "nvme/measure.h"
#include "nvme/store_impl.h"
#include "tests/nvme/netfs.h"

#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

#define MIB (1024u * 1024u)
enum { EXTENTS = 24, ROUNDS = 3 };

/* Puts and gets over every real backend; the description goes to `text`. */
static int trips(const char *folder, char *text, size_t text_bytes)
{
    for (int k = 0; k < 2; k++) {
        struct world w = { .cfg = { .depth = 8 } };
        struct stk_error err = { 0 };
        struct store *s;
        uint64_t bytes[EXTENTS];
        bool ok = true;
        for (uint32_t i = 0; i < EXTENTS; i++) bytes[i] = 200000 + i * 4099;
        struct store_cfg cfg = { .n_extents = EXTENTS, .extent_bytes = bytes };
        if (k == 1 && !uring_allowed()) break;
        snprintf(w.dir, sizeof w.dir, "%s", folder);
        if (world_open(&w, k ? IO_URING : IO_POSIX, EXEC_THREADS, test_seed(), &err) != STK_OK ||
            store_world_open(&w, &cfg, &s, &err) != STK_OK) {
            printf("# %s\n", err.text);
            return 1;
        }
        uint8_t *buf = sys_mmap(MIB, false);
        io_buffer_register(w.io, buf, MIB);
        for (uint64_t v = 1; v <= ROUNDS; v++)
            for (uint32_t i = 0; i < EXTENTS; i++) {
                struct store_op op;
                fill(buf, bytes[i], v * 100 + i);
                ok = ok && put_one(&w, s, i, buf, v, &op) == STK_OK;
                memset(buf, 0xee, bytes[i]);
                ok = ok && get_one(&w, s, i, buf, v, &op) == STK_OK &&
                     filled(buf, bytes[i], v * 100 + i);
            }
        snprintf(text, text_bytes, "%s", io_describe(w.io));
        struct io_stats st;
        io_stats_read(w.io, &st);
        printf("# %s; %llu short transfers, all completed\n", text,
               (unsigned long long)st.short_transfers);
        ok = ok && st.retries == st.short_transfers;
        sys_munmap(buf, MIB);
        store_close(s);
        w.cfg.kind = IO_SIM; /* the folder is the mount point */
        world_close(&w);
        if (!ok) return 2;
    }
    return 0;
}

/* 0, 1.. or 77: the words of the shell make `dir`/m. */
static int on(const char *words, const char *named, bool cleanup_zram)
{
    char dir[256], cmd[1600], folder[300], text[2048] = "";
    if (geteuid() != 0 || unshare(CLONE_NEWNS) != 0 ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || !world_dir(dir, sizeof dir))
        return 77;
    snprintf(cmd, sizeof cmd, "cd %s && mkdir m && ( %s ) > /dev/null 2>&1", dir, words);
    int rc = system(cmd) == 0 ? 0 : 77;
    snprintf(folder, sizeof folder, "%s/m", dir);
    if (rc == 0) {
        rc = trips(folder, text, sizeof text);
        if (rc == 0 && named && !strstr(text, named)) rc = 3;
        if (umount2(folder, 0) != 0) rc = 4;
    }
    if (cleanup_zram) {
        snprintf(cmd, sizeof cmd,
                 "cd %s && n=$(cat zram 2> /dev/null) && "
                 "echo $n > /sys/class/zram-control/hot_remove",
                 dir);
        if (system(cmd) != 0) printf("# no zram device to remove\n");
    }
    fflush(stdout);
    sys_remove_tree(dir);
    return rc;
}

static int overlay(void)
{
    return on("mkdir base && mount -t tmpfs -o size=64m none base && mkdir base/l base/u base/w && "
              "mount -t overlay overlay -o lowerdir=base/l,upperdir=base/u,workdir=base/w m",
              NULL, false);
}
static int overlay_on_disk(void)
{
    return on("mkdir l u w && mount -t overlay overlay -o lowerdir=l,upperdir=u,workdir=w m", NULL,
              false);
}
static int btrfs(void)
{
    return on("command -v mkfs.btrfs && truncate -s 256M img && mkfs.btrfs -q img && "
              "mount -t btrfs -o loop img m",
              "Btrfs may buffer direct writes", false);
}
/* A device of our own, so that nobody else's is touched. */
static int zram(void)
{
    return on("n=$(cat /sys/class/zram-control/hot_add) && echo $n > zram && "
              "echo 96M > /sys/block/zram$n/disksize && "
              "( test -b /dev/zram$n || mknod dev b $(tr : ' ' < /sys/block/zram$n/dev) ) && "
              "d=/dev/zram$n && { test -b $d || d=dev; } && mkfs.ext4 -q -m 0 $d && mount $d m",
              NULL, true);
}

/* NVM-22: a container's usual root. */
TEST(fs_nvm_22_overlay)
{
    int rc = in_child(overlay);
    if (rc == 77) SKIP("no overlay mounts here");
    CHECK(rc == 0);
    CHECK((rc = in_child(overlay_on_disk)) == 0 || rc == 77);
}

static uint32_t entries_in(const char *folder)
{
    uint32_t n = 0;
    DIR *d = opendir(folder);
    for (struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d))
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    if (d) closedir(d);
    return n;
}

/* What is measured there is marked, and nothing is left. */
static bool measured(const char *folder)
{
    struct measure *m;
    struct measure_result r;
    struct stk_error err = { 0 };
    struct measure_cfg cfg = { .paths = { folder },
                               .n_paths = 1,
                               .file_bytes = 2 * MIB,
                               .block_bytes = 64 << 10,
                               .depth = 4,
                               .seed = test_seed(),
                               .run_ns = 10000000000u,
                               .bytes_max = 4 * MIB,
                               .verify = true };
    bool ok = measure_open(&cfg, &m, &err) == STK_OK;
    ok = ok && measure_run(m, &cfg, &r, &err) == STK_OK;
    measure_close(m);
    if (!ok) printf("# %s\n", err.text);
    else printf("# measured: %s\n", r.backend);
    return ok && !r.direct && strstr(r.backend, "page cache") && r.bytes > 0 && r.verify_failures == 0;
}

/* A run that ends without closing anything: its folder is there, locked by nobody. Or one that closes. */
static int short_run(const char *folder, bool closes)
{
    struct world w = { .cfg = { .depth = 8 } };
    struct stk_error err = { 0 };
    struct store *s;
    uint64_t bytes[1] = { 100000 };
    struct store_cfg cfg = { .n_extents = 1, .extent_bytes = bytes };
    snprintf(w.dir, sizeof w.dir, "%s", folder);
    if (world_open(&w, IO_POSIX, EXEC_THREADS, test_seed(), &err) != STK_OK ||
        store_world_open(&w, &cfg, &s, &err) != STK_OK)
        return 1;
    if (entries_in(folder) != 1) return 2; /* the dead one's is gone */
    if (closes) store_close(s);
    return entries_in(folder) == (closes ? 0 : 1) ? 0 : 3;
}

static bool short_runs(const char *folder)
{
    int st;
    for (int closes = 0; closes < 2; closes++) {
        pid_t pid = fork();
        if (pid == 0) _exit(short_run(folder, closes));
        if (waitpid(pid, &st, 0) != pid || !WIFEXITED(st) || WEXITSTATUS(st) != 0) return false;
    }
    return true;
}

static int network(void)
{
    static const char words[] = "no O_DIRECT on a swap path";
    char dir[256], text[2048] = "";
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        !world_dir(dir, sizeof dir))
        return 77;
    pid_t server = netfs_start(dir);
    int rc = server < 0 ? 77 : short_runs(dir) ? 0 : 7;
    if (rc == 0) rc = trips(dir, text, sizeof text);
    const char *noted = strstr(text, words);
    if (rc == 0 && (!noted || strstr(noted + 1, words) || !strstr(text, ", buffered"))) rc = 3;
    if (rc == 0 && !measured(dir)) rc = 4;
    if (rc == 0 && entries_in(dir) > 0) rc = 5;
    if (server > 0 && netfs_end(dir, server) != 0 && rc == 0) rc = 6;
    rmdir(dir);
    fflush(stdout);
    return rc;
}

/* NVM-22: one note, buffered transfers, and the folders of this run and of a dead one go although what
 * is removed while it is open stays there for a while. */
TEST(fs_nvm_22_a_network_file_system)
{
    int rc = in_child(network);
    if (rc == 77) SKIP("no FUSE or no mounts here");
    if (rc) printf("# %d\n", rc);
    CHECK(rc == 0);
}

/* NVM-37: for real; a write-protected buffer on its way is io_nvm_37_... in test_io_faults.c. */
TEST(fs_nvm_37_btrfs)
{
    int rc = in_child(btrfs);
    if (rc == 77) SKIP("no Btrfs or no mkfs.btrfs (btrfs-progs) here");
    CHECK(rc == 0);
}

/* NVM-17: where short writes were seen. */
TEST(fs_nvm_17_zram)
{
    int rc = in_child(zram);
    if (rc == 77) SKIP("no zram device can be made here");
    CHECK(rc == 0);
}

/* --- NVM-40: files that do not grow ----------------------------------------------------------- */

/* After open every byte of the files has its place, and no write changes size or place count: an
 * appending write's inode lock is never taken. The two passes' rates are printed, not judged: this
 * machine's drive varies more than the 10 % of the row. */
TEST(fs_nvm_40_preallocated_in_full)
{
    enum { N = 16, ROOM = 4 << 20 };
    struct world w = { .cfg = { .depth = 8 } };
    struct stk_error err = { 0 };
    struct store *s;
    struct stat at_open, after;
    uint64_t bytes[N], took[2];
    for (int i = 0; i < N; i++) bytes[i] = ROOM;
    struct store_cfg cfg = { .n_extents = N, .extent_bytes = bytes };
    CHECK_OK(world_open(&w, IO_AUTO, EXEC_THREADS, test_seed(), &err), &err);
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    const char *path = s->paths[0].file;
    uint8_t *buf = sys_mmap((uint64_t)N * ROOM, false);
    struct store_op *ops = calloc(N, sizeof *ops);
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < N; i++) {
            fill(buf + (uint64_t)i * ROOM, 4096, i + 1);
            ops[i] = (struct store_op){ .extent = i,
                                        .buf = buf + (uint64_t)i * ROOM,
                                        .version = (uint64_t)pass + 1 };
        }
        if (pass == 0) CHECK(stat(path, &at_open) == 0);
        uint64_t begin = exec_now_ns(w.ex);
        CHECK(ops_run(&w, s, ops, N, true) == STK_OK);
        took[pass] = exec_now_ns(w.ex) - begin;
        CHECK(stat(path, &after) == 0);
        CHECK((uint64_t)at_open.st_size >= (uint64_t)N * ROOM);
        CHECK((uint64_t)at_open.st_blocks * 512 >= (uint64_t)at_open.st_size);
        CHECK(after.st_size == at_open.st_size && after.st_ino == at_open.st_ino);
    }
    printf("# first pass %.2f GB/s, second %.2f GB/s\n", (double)N * ROOM / (double)took[0],
           (double)N * ROOM / (double)took[1]);
    free(ops);
    store_close(s);
    world_close(&w);
    sys_munmap(buf, (uint64_t)N * ROOM);
}

TEST_MAIN()
