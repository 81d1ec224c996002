/* tests/engine/test_real.c - what can befall a training run's drives for real, through the engine:
 * a disk that fills, files cut, damaged, removed, out of reach; tmpfs, 4 KiB sectors; limits on
 * locked memory, descriptors, file sizes; io_uring denied; fork of the host process.
 *
 * Each ends in the reference's bits or in a sentence that names the place. Every run lives in a
 * child of its own, because limits, filters, users and mounts stay with a process; mounts are made
 * in a namespace of that child. The parent opens nothing. */
#include "engine/engine.h"
#include "tests/engine/durable_world.h"
#include "tests/nvme/netfs.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { STEPS = 4, SKIPPED = 77 };

static char skip_why[160];

#define CHILD_SKIP(why)                                                                            \
    do {                                                                                           \
        snprintf(skip_why, sizeof skip_why, "%s", why);                                            \
        return;                                                                                    \
    } while (0)

/* Runs `fn` in a child: its checks are the test's. */
static int in_child(void (*fn)(void))
{
    int st;
    world_dir(NULL); /* removed by the parent, at exit */
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(200);
        fn();
        if (skip_why[0]) printf("# skipped: %s\n", skip_why);
        fflush(stdout);
        _exit(test_failures ? 1 : skip_why[0] ? SKIPPED : 0);
    }
    if (waitpid(pid, &st, 0) != pid || !WIFEXITED(st)) return 1;
    return WEXITSTATUS(st);
}

#define IN_CHILD(fn, why)                                                                          \
    do {                                                                                           \
        int rc_ = in_child(fn);                                                                    \
        if (rc_ == SKIPPED) SKIP(why);                                                             \
        CHECK(rc_ == 0);                                                                           \
    } while (0)

/* --- runs ------------------------------------------------------------------------------------- */

static const stk_storage kinds[] = { STK_STORAGE_AUTO, STK_STORAGE_POSIX };

static stk_status start(struct toy *t, const char *folder, stk_storage kind)
{
    toy_init(t, 2, 2);
    t->rows = 2;
    t->cfg.poison = false;
    t->cfg.storage = kind;
    t->cfg.nvme[0] = folder;
    t->cfg.params = t->cfg.optimizer_state = t->cfg.grads =
        folder ? STK_TIER_NVME : STK_TIER_HOST;
    stk_status st = toy_open(t);
    return st == STK_OK ? toy_fill(t) : st;
}

/* Masters and moments after that many steps, without any drive; 0: it failed. */
static uint64_t reference(int steps)
{
    struct toy t;
    uint64_t hash = 0;
    stk_status st = start(&t, NULL, STK_STORAGE_AUTO);
    if (st == STK_OK) st = world_steps(&t, steps, 1e-3);
    if (st != STK_OK || toy_hash(&t, &hash) != STK_OK) printf("# %s\n", stk_error_text(t.e));
    stk_close(t.e);
    return hash;
}

/* The rest of the steps, and the same bits as without a drive. */
static void ends_right(struct toy *t, int done)
{
    uint64_t hash = 0;
    RUN(t, world_steps(t, STEPS - done, 1e-3));
    RUN(t, toy_hash(t, &hash));
    CHECK(hash == reference(STEPS));
}

static void whole_run(const char *folder, stk_storage kind)
{
    struct toy t;
    RUN(&t, start(&t, folder, kind));
    ends_right(&t, 0);
    stk_close(t.e);
}

static uint32_t noted(const stk_engine *e, const char *words)
{
    const char *line;
    uint32_t n = 0;
    for (uint32_t i = 0; stk_note(e, i, &line); i++)
        for (const char *p = line; (p = strstr(p, words)); p++) n++;
    return n;
}

static uint32_t entries_in(const char *dir)
{
    uint32_t n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *x = d ? readdir(d) : NULL; x; x = readdir(d)) n += x->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

/* Where a state of the first chunk lies on the drive, nothing being in flight. */
static bool first_chunk(struct toy *t, int state, const char **file, uint64_t *at)
{
    return stk_flush(t->e) == STK_OK &&
           store_locate(t->e->store, t->e->layout->chunks[0].extent[state], file, at) == STK_OK;
}

static bool uring_there(void)
{
    struct toy t;
    bool there = start(&t, world_dir("probe"), STK_STORAGE_AUTO) == STK_OK &&
                 noted(t.e, "io_uring") > 0 && noted(t.e, "posix threads") == 0;
    stk_close(t.e);
    return there;
}

/* An ordinary user, that may do everything in the scratch folder. */
static bool become_user(void)
{
    uint32_t id = 20000 + (uint32_t)getpid() % 30000;
    if (geteuid() != 0) return true;
    return chown(world_dir(NULL), id, id) == 0 && setgid(id) == 0 && setuid(id) == 0 &&
           access(world_dir(NULL), W_OK | X_OK) == 0; /* TMPDIR may be closed to others */
}

/* A file system of the shell's words on `sub`/m, in a namespace of this process. */
static const char *mounted(const char *sub, const char *words)
{
    char cmd[1600], point[64];
    const char *dir = world_dir(sub);
    if (geteuid() != 0 || unshare(CLONE_NEWNS) != 0 ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        return NULL;
    snprintf(cmd, sizeof cmd, "cd %s && mkdir -p m && ( %s ) > /dev/null 2>&1", dir, words);
    if (system(cmd) != 0) return NULL;
    snprintf(point, sizeof point, "%s/m", sub);
    return world_dir(point);
}

static void unmounted(const char *folder)
{
    if (umount2(folder, 0) != 0) test_fail(__FILE__, __LINE__, "nothing holds the mount");
}

/* Writes until there is no room at all. */
static void fill_disk(const char *folder)
{
    static const char zeros[4096];
    char path[700];
    snprintf(path, sizeof path, "%s/filler", folder);
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    while (write(fd, zeros, sizeof zeros) > 0) {}
    CHECK(fd >= 0 && errno == ENOSPC);
    close(fd);
}

/* --- no room ---------------------------------------------------------------------------------- */

#define EXT4_24M "truncate -s 24M img && mkfs.ext4 -q -m 0 img && mount -o loop img m"

/* NVM-02: the disk fills beside the run. The run's files are preallocated: it goes on. A save that
 * finds no room is refused, and the run goes on after that too. */
static void filled_during_a_run(void)
{
    const char *folder = mounted("full", EXT4_24M);
    if (!folder) CHILD_SKIP("no loop file system");
    for (int k = 0; k < 2; k++) {
        struct toy t;
        char filler[700], save[700];
        snprintf(filler, sizeof filler, "%s/filler", folder);
        snprintf(save, sizeof save, "%s/save", folder);
        RUN(&t, start(&t, folder, kinds[k]));
        RUN(&t, world_steps(&t, 1, 1e-3));
        fill_disk(folder);
        RUN(&t, world_steps(&t, 1, 1e-3));
        stk_status st = stk_save(t.e, save, NULL, 1);
        CHECK(REFUSED(st, STK_ERR_NOSPACE, t.e, save, "free"));
        RUN(&t, world_steps(&t, 1, 1e-3));
        CHECK(unlink(filler) == 0);
        RUN(&t, stk_save(t.e, save, NULL, 1));
        ends_right(&t, 3);
        stk_close(t.e);
        CHECK(sys_remove_tree(save) == 0 && entries_in(folder) == 1); /* lost+found */
    }
    unmounted(folder);
}

TEST(real_nvm_02_disk_filled_during_a_run)
{
    IN_CHILD(filled_during_a_run, "needs root and loop devices");
}

/* NVM-02: no room where preallocation did not help (a thin volume, a quota, copy on write): the
 * step is not applied, the sentence names chunk, file, place and bytes, and what was durable
 * before is still there, bit for bit. */
static void write_without_room(void)
{
    const char *folder = world_dir("noroom");
    for (uint64_t n = 1; n < 40; n += 7) {
        struct toy t;
        uint64_t hash = 0;
        toy_init(&t, 2, 2);
        t.rows = 2;
        t.cfg.storage = STK_STORAGE_POSIX;
        durable_config(&t.cfg, folder, false);
        RUN(&t, toy_open(&t));
        RUN(&t, toy_fill(&t));
        for (int i = 0; i < 3; i++) {
            RUN(&t, toy_step(&t, 1e-3, NULL));
            RUN(&t, stk_durable(t.e, NULL));
        }
        RUN(&t, stk_durable_wait(t.e));
        sys_fault_arm(SYS_WRITE, n, UINT64_MAX, ENOSPC);
        stk_status st = world_steps(&t, 2, 1e-3);
        sys_fault_arm(SYS_WRITE, 0, 0, 0);
        CHECK(st == STK_ERR_NOSPACE || st == STK_ERR_IO);
        CHECK(REFUSED(st, st, t.e, "chunk", folder, "extents-", "at byte", "No space left",
                      "free space"));
        if (n == 1) printf("# %s\n", stk_error_text(t.e));
        stk_close(t.e);
        toy_init(&t, 2, 2);
        t.rows = 2;
        durable_config(&t.cfg, folder, true);
        RUN(&t, toy_open(&t));
        RUN(&t, stk_resume_durable(t.e, false, NULL));
        CHECK(t.e->begun == 3);
        RUN(&t, toy_hash(&t, &hash));
        CHECK(hash == reference(3));
        stk_discard_durable(t.e);
        stk_close(t.e);
    }
    CHECK(entries_in(folder) == 0);
}

TEST(real_nvm_02_a_write_without_room_does_not_apply_the_step)
{
    IN_CHILD(write_without_room, "-");
}

/* --- files under a run ------------------------------------------------------------------------ */

/* One byte of the medium, in parameters or optimizer state: found, and named. */
static void flipped_byte(void)
{
    for (int k = 0; k < 2; k++)
        for (int s = 0; s < 2; s++) {
            struct toy t;
            const char *file;
            char where[64];
            uint64_t at;
            uint8_t x;
            RUN(&t, start(&t, world_dir("flip"), kinds[k]));
            RUN(&t, world_steps(&t, 1, 1e-3));
            REQUIRE(first_chunk(&t, s ? CHUNK_OPT : CHUNK_PARAM, &file, &at));
            int fd = sys_open(file, O_RDWR, 0);
            CHECK(sys_read_full(fd, &x, 1, at + 999) == 1);
            x ^= 0x10;
            CHECK(sys_write_full(fd, &x, 1, at + 999) == 1 && sys_fsync(fd) == 0);
            sys_close(fd);
            stk_status st = world_steps(&t, 2, 1e-3);
            if (st == STK_OK) st = stk_flush(t.e);
            snprintf(where, sizeof where, "byte %" PRIu64, at);
            CHECK(REFUSED(st, STK_ERR_CORRUPT, t.e, "chunk 0", file, where, "checksum"));
            stk_close(t.e);
        }
    CHECK(entries_in(world_dir("flip")) == 0);
}

TEST(real_a_byte_flipped_under_a_run_is_named) { IN_CHILD(flipped_byte, "-"); }

static void file_cut(void)
{
    for (int k = 0; k < 2; k++) {
        struct toy t;
        const char *file;
        uint64_t at;
        RUN(&t, start(&t, world_dir("cut"), kinds[k]));
        RUN(&t, world_steps(&t, 1, 1e-3));
        REQUIRE(first_chunk(&t, CHUNK_OPT, &file, &at));
        CHECK(truncate(file, (off_t)at + 512) == 0);
        stk_status st = world_steps(&t, 2, 1e-3);
        if (st == STK_OK) st = stk_flush(t.e);
        CHECK(st == STK_ERR_IO || st == STK_ERR_CORRUPT);
        CHECK(REFUSED(st, st, t.e, "extent", file));
        stk_close(t.e);
    }
}

TEST(real_a_file_truncated_under_a_run_is_named) { IN_CHILD(file_cut, "-"); }

/* The whole folder goes, with everything in it: open files stay, and so does the run. */
static void folder_removed(void)
{
    for (int k = 0; k < 2; k++) {
        struct toy t;
        const char *folder = world_dir("gone");
        RUN(&t, start(&t, folder, kinds[k]));
        RUN(&t, world_steps(&t, 2, 1e-3));
        CHECK(sys_remove_tree(folder) == 0 && access(folder, F_OK) != 0);
        ends_right(&t, 2);
        stk_close(t.e);
        CHECK(access(folder, F_OK) != 0);
        /* and a new one says what is missing */
        stk_status st = start(&t, folder, kinds[k]);
        CHECK(REFUSED(st, STK_ERR_IO, t.e, folder));
        stk_close(t.e);
    }
}

TEST(real_the_folder_is_removed_under_a_run) { IN_CHILD(folder_removed, "-"); }

/* Permission is asked when files are opened: the run goes on; a new one is refused by name, and
 * cleans up once it may. */
static void out_of_reach(void)
{
    if (!become_user()) CHILD_SKIP("cannot become another user");
    for (int k = 0; k < 2; k++) {
        struct toy t, other;
        const char *folder = world_dir("locked"), *file;
        uint64_t at;
        RUN(&t, start(&t, folder, kinds[k]));
        RUN(&t, world_steps(&t, 2, 1e-3));
        REQUIRE(first_chunk(&t, CHUNK_OPT, &file, &at));
        CHECK(chmod(file, 0) == 0 && chmod(folder, 0) == 0);
        stk_status st = start(&other, folder, kinds[k]);
        CHECK(REFUSED(st, STK_ERR_IO, other.e, folder));
        stk_close(other.e);
        ends_right(&t, 2);
        stk_close(t.e);
        CHECK(chmod(folder, 0700) == 0);
        whole_run(folder, kinds[k]);
        CHECK(entries_in(folder) == 0);
    }
}

TEST(real_permission_withdrawn_under_a_run)
{
    IN_CHILD(out_of_reach, "cannot become another user");
}

/* --- file systems ----------------------------------------------------------------------------- */

static void on_tmpfs(void)
{
    const char *folder = mounted("mem", "mount -t tmpfs -o size=32m none m");
    if (!folder) CHILD_SKIP("no mounts");
    for (int k = 0; k < 2; k++) {
        struct toy t;
        RUN(&t, start(&t, folder, kinds[k]));
        CHECK(noted(t.e, "tmpfs") == 1);
        ends_right(&t, 0);
        stk_close(t.e);
    }
    unmounted(folder);
}

TEST(real_nvm_22_tmpfs_is_noted_once) { IN_CHILD(on_tmpfs, "needs root"); }

/* One line of warning, the same bits, and nothing is left. */
static void on_network(void)
{
    const char *folder = world_dir("net");
    if (geteuid() != 0 || unshare(CLONE_NEWNS) != 0 ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        CHILD_SKIP("no mounts");
    pid_t server = netfs_start(folder);
    if (server < 0) CHILD_SKIP("no FUSE");
    for (int k = 0; k < 2; k++) {
        struct toy t;
        RUN(&t, start(&t, folder, kinds[k]));
        CHECK(noted(t.e, "O_DIRECT") == 1 && noted(t.e, "buffered") > 0);
        ends_right(&t, 0);
        stk_close(t.e);
        CHECK(entries_in(folder) == 0);
    }
    CHECK(netfs_end(folder, server) == 0);
}

TEST(real_nvm_22_a_network_file_system_is_noted_once) { IN_CHILD(on_network, "needs root and FUSE"); }

/* More than there is on a small one: refused with numbers before anything is made. */
static void tmpfs_too_small(void)
{
    struct toy t;
    const char *folder = mounted("small", "mount -t tmpfs -o size=256k none m");
    if (!folder) CHILD_SKIP("no mounts");
    for (int k = 0; k < 2; k++) {
        stk_status st = start(&t, folder, kinds[k]);
        CHECK(REFUSED(st, STK_ERR_NOSPACE, t.e, folder, "free"));
        stk_close(t.e);
        CHECK(entries_in(folder) == 0);
    }
    unmounted(folder);
}

TEST(real_nvm_02_tmpfs_too_small_is_refused) { IN_CHILD(tmpfs_too_small, "needs root"); }

static void large_sectors(void)
{
    const char *folder = mounted("sectors",
                                 "truncate -s 32M img && l=$(losetup -b 4096 -f --show img) && "
                                 "mkfs.ext4 -q -b 4096 -m 0 $l && mount $l m; s=$?; "
                                 "losetup -d $l; exit $s");
    if (!folder) CHILD_SKIP("no loop device with 4 KiB sectors");
    for (int k = 0; k < 2; k++) whole_run(folder, kinds[k]);
    unmounted(folder);
}

TEST(real_loop_device_with_4_kib_sectors)
{
    IN_CHILD(large_sectors, "needs root and losetup -b 4096");
}

/* --- limits ----------------------------------------------------------------------------------- */

/* NVM-26: nothing can be registered: one note with the value that is needed, the same bits. */
static void little_memlock(void)
{
    struct toy t;
    struct rlimit lim = { 64 << 10, 64 << 10 };
    if (!uring_there()) CHILD_SKIP("no io_uring");
    if (setrlimit(RLIMIT_MEMLOCK, &lim) != 0 || !become_user()) CHILD_SKIP("limit cannot be set");
    RUN(&t, start(&t, world_dir("memlock"), STK_STORAGE_AUTO));
    CHECK(noted(t.e, "RLIMIT_MEMLOCK is 64 KiB") == 1 && noted(t.e, "KiB was refused") == 1);
    ends_right(&t, 0);
    stk_close(t.e);
}

TEST(real_nvm_26_memlock_of_64_kib) { IN_CHILD(little_memlock, "needs io_uring and another user"); }

/* NVM-29: a container's filter: posix threads instead, the reason once, the same bits. */
static void no_io_uring(void)
{
    struct toy t;
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog prog = { sizeof code / sizeof *code, code };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) != 0)
        CHILD_SKIP("no seccomp");
    RUN(&t, start(&t, world_dir("denied"), STK_STORAGE_AUTO));
    CHECK(noted(t.e, "posix threads") == 1 && noted(t.e, "EPERM") == 1);
    ends_right(&t, 0);
    stk_close(t.e);
    stk_status st = start(&t, world_dir("denied"), STK_STORAGE_URING);
    CHECK(REFUSED(st, STK_ERR_UNSUPPORTED, t.e, "EPERM") || st != STK_OK);
    stk_close(t.e);
}

TEST(real_nvm_29_io_uring_denied_by_seccomp) { IN_CHILD(no_io_uring, "no seccomp"); }

static uint32_t descriptors(void)
{
    uint32_t n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* Descriptors run out at each place in turn, until there are enough: a sentence that says what to
 * raise, or the right bits; none stays open. */
static void few_descriptors(void)
{
    struct rlimit old;
    uint32_t refused = 0, right = 0;
    uint64_t want = reference(2); /* what is opened once, is */
    REQUIRE(getrlimit(RLIMIT_NOFILE, &old) == 0);
    whole_run(world_dir("few"), STK_STORAGE_AUTO);
    uint32_t before = descriptors();
    int next = dup(0); /* the lowest that is free */
    close(next);
    for (uint32_t spare = 0; spare < 40 && right < 2; spare++) {
        struct toy t;
        uint64_t hash = 0;
        struct rlimit lim = { (rlim_t)next + spare, old.rlim_max };
        setrlimit(RLIMIT_NOFILE, &lim);
        stk_status st = start(&t, world_dir("few"), kinds[spare % 2]);
        if (st == STK_OK) st = world_steps(&t, 2, 1e-3);
        if (st == STK_OK) st = toy_hash(&t, &hash);
        if (st == STK_OK) CHECK(hash == want);
        else CHECK(REFUSED(st, st, t.e, "ulimit -n"));
        right += st == STK_OK;
        refused += st != STK_OK;
        stk_close(t.e);
        setrlimit(RLIMIT_NOFILE, &old);
        CHECK(descriptors() == before && entries_in(world_dir("few")) == 0);
    }
    printf("# refused %u times\n", refused);
    CHECK(refused > 0 && right > 0);
}

TEST(real_few_descriptors) { IN_CHILD(few_descriptors, "-"); }

/* `ulimit -f`: refused at preallocation; and where the limit comes later, the write that is beyond
 * it is an error of that step, not a SIGXFSZ. */
static void small_files(void)
{
    struct rlimit lim = { 64 << 10, RLIM_INFINITY }, old;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
    for (int k = 0; k < 2; k++) {
        struct toy t;
        CHECK(setrlimit(RLIMIT_FSIZE, &lim) == 0);
        stk_status st = start(&t, world_dir("fsize"), kinds[k]);
        CHECK(REFUSED(st, STK_ERR_IO, t.e, "fsize", "ulimit -f"));
        stk_close(t.e);
        setrlimit(RLIMIT_FSIZE, &old);
        CHECK(entries_in(world_dir("fsize")) == 0);
        RUN(&t, start(&t, world_dir("fsize"), kinds[k]));
        RUN(&t, world_steps(&t, 1, 1e-3));
        CHECK(setrlimit(RLIMIT_FSIZE, &lim) == 0);
        st = world_steps(&t, 2, 1e-3);
        if (st == STK_OK) st = stk_flush(t.e);
        CHECK(REFUSED(st, STK_ERR_IO, t.e, "chunk", "extents-", "File too large", "ulimit -f"));
        stk_close(t.e);
        setrlimit(RLIMIT_FSIZE, &old);
        CHECK(entries_in(world_dir("fsize")) == 0);
    }
}

TEST(real_small_file_size_limit) { IN_CHILD(small_files, "-"); }

/* --- fork ------------------------------------------------------------------------------------- */

/* What a data loader's child may do with an engine it inherited: be refused, close it, leave. */
static int loader(struct toy *t)
{
    stk_step s = { 1e-3 };
    stk_visit v;
    float x;
    alarm(60);
    if (stk_step_begin(t->e, &s) != STK_ERR_STATE || !strstr(stk_error_text(t->e), "fork"))
        return 1;
    if (stk_next(t->e, &v) != STK_ERR_STATE || stk_step_end(t->e, NULL) != STK_ERR_STATE) return 2;
    if (stk_tensor_read(t->e, 0, STK_READ_MASTER, 0, 1, &x, STK_F32) != STK_ERR_STATE) return 3;
    if (stk_flush(t->e) != STK_ERR_STATE || stk_durable(t->e, NULL) != STK_ERR_STATE) return 4;
    if (stk_save(t->e, world_dir("loader"), NULL, 0) != STK_ERR_STATE) return 5;
    stk_close(t->e);
    return 0;
}

static pid_t loaders[64];
static int n_loaders;

static void fork_in_a_visit(struct toy *t, const stk_visit *v)
{
    if (n_loaders == 64 || v->micro != 0) return;
    pid_t pid = fork();
    if (pid == 0) _exit(loader(t));
    loaders[n_loaders++] = pid;
}

/* NVM-35: children between steps, in steps with transfers in flight, and alive to the end. */
static void forked(void)
{
    for (int k = 0; k < 2; k++) {
        struct toy t;
        int hold[2], st, done = 0;
        char end;
        n_loaders = 0;
        RUN(&t, start(&t, world_dir("fork"), kinds[k]));
        RUN(&t, world_steps(&t, 1, 1e-3));
        REQUIRE(pipe(hold) == 0);
        pid_t stays = fork();
        if (stays == 0) {
            close(hold[1]);
            int rc = loader(&t);
            _exit(read(hold[0], &end, 1) == 0 ? rc : 9); /* until the parent is through */
        }
        close(hold[0]);
        t.hook = fork_in_a_visit;
        ends_right(&t, 1);
        t.hook = NULL;
        stk_close(t.e);
        CHECK(entries_in(world_dir("fork")) == 0);
        close(hold[1]);
        CHECK(waitpid(stays, &st, 0) == stays && WIFEXITED(st) && WEXITSTATUS(st) == 0);
        for (int i = 0; i < n_loaders; i++)
            done += waitpid(loaders[i], &st, 0) == loaders[i] && WIFEXITED(st) &&
                    WEXITSTATUS(st) == 0;
        CHECK(done == n_loaders && n_loaders > 10);
    }
}

TEST(real_nvm_35_fork_of_the_host_process) { IN_CHILD(forked, "-"); }

TEST_MAIN()
