/* tests/nvme/test_io_faults.c - what can befall files under an io, for real: cut short, removed,
 * out of reach, too large, no room, odd sectors; and buffers that are touched, missing or
 * forked. Each ends in the right bytes or in an error of that one request, and the io goes on.
 * Limits and mounts are made in a child, mounts in a namespace of its own. */
#include "tests/nvme/io_batch.h"

#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define KIB 1024u
#define MIB (1024u * 1024u)

/* --- an io with one file ---------------------------------------------------------------------- */

struct bed {
    struct world w;
    struct stk_error err;
    uint32_t file;
    uint8_t *buf; /* 2 MiB */
    char path[600];
};

static bool bed_open(struct bed *b, enum io_kind io, enum exec_kind ex, uint64_t size_bytes)
{
    b->buf = sys_mmap(2 * MIB, true);
    bool ok = b->buf && world_open(&b->w, io, ex, test_seed(), &b->err) == STK_OK &&
              world_file(&b->w, "a", size_bytes, 0, &b->file, &b->err) == STK_OK;
    snprintf(b->path, sizeof b->path, "%s/a", b->w.dir);
    if (!ok) printf("# %s\n", b->err.text);
    return ok;
}

static void bed_close(struct bed *b)
{
    world_close(&b->w);
    sys_munmap(b->buf, 2 * MIB);
}

/* One transfer at this place of file and buffer; `req` holds what became of it. */
static bool bed_move(struct bed *b, enum io_op op, uint64_t offset_bytes, uint64_t size_bytes,
                     struct io_req *req)
{
    stk_error_clear(&b->err);
    *req = (struct io_req){ .op = op,
                            .file = b->file,
                            .buf = b->buf,
                            .offset_bytes = offset_bytes,
                            .size_bytes = size_bytes };
    bool ok = one(&b->w, req, &b->err) == STK_OK;
    if (!ok) printf("# %s\n", b->err.text);
    return ok;
}

/* Writes and reads back; true: the same bytes. */
static bool bed_trip(struct bed *b, uint64_t size_bytes, uint64_t seed)
{
    struct io_req req;
    fill(b->buf, size_bytes, seed);
    if (!bed_move(b, IO_WRITE, 0, size_bytes, &req) || req.status != STK_OK) return false;
    memset(b->buf, 0, size_bytes);
    return bed_move(b, IO_READ, 0, size_bytes, &req) && req.status == STK_OK &&
           filled(b->buf, size_bytes, seed);
}

#define FOR_REAL(c) \
    FOR_COMBOS(c) \
        if (c->io == IO_SIM) continue; \
        else

/* --- files ------------------------------------------------------------------------------------ */

/* Shorter than it was: the read stays short, which is an error and no loop; a write makes the file
 * longer again, and nobody reads what lies between as if it had been written. */
TEST(io_file_truncated_under_us)
{
    FOR_REAL(c)
    {
        struct bed b = { 0 };
        struct io_req req;
        REQUIRE(bed_open(&b, c->io, c->ex, MIB));
        CHECK(bed_trip(&b, MIB, 1));
        CHECK(truncate(b.path, 12288) == 0);
        memset(b.buf, 0, MIB);
        CHECK(bed_move(&b, IO_READ, 0, MIB, &req));
        CHECK(req.status == STK_ERR_IO && req.os_errno == 0 && req.moved_bytes == 12288);
        CHECK(filled(b.buf, 12288, 1));
        CHECK(bed_move(&b, IO_READ, 524288, 4096, &req));
        CHECK(req.status == STK_ERR_IO && req.os_errno == 0 && req.moved_bytes == 0);
        CHECK(bed_trip(&b, MIB, 2));
        bed_close(&b);
    }
}

TEST(io_file_removed_and_folder_gone)
{
    FOR_REAL(c)
    {
        struct bed b = { 0 };
        struct io_req req;
        uint32_t file;
        REQUIRE(bed_open(&b, c->io, c->ex, MIB));
        CHECK(unlink(b.path) == 0 && rmdir(b.w.dir) == 0);
        CHECK(bed_trip(&b, MIB, 3));
        CHECK(bed_move(&b, IO_FLUSH, 0, 0, &req) && req.status == STK_OK);
        CHECK(io_file_add(b.w.io, b.path, 0, &file, &b.err) == STK_ERR_IO &&
              strstr(b.err.text, b.path) && strstr(b.err.text, "No such file"));
        bed_close(&b);
    }
}

/* As an ordinary user: permission is asked at open only. */
static int permission_withdrawn(void)
{
    if (!become_user((uint32_t)getpid())) return 77;
    int rc = 0;
    for (int k = 0; k < 2; k++) {
        struct bed b = { 0 };
        uint32_t file;
        if (k == 1 && !uring_allowed()) break;
        if (!bed_open(&b, k ? IO_URING : IO_POSIX, EXEC_THREADS, MIB)) return 1;
        if (chmod(b.path, 0) != 0 || !bed_trip(&b, MIB, 4)) rc = 1;
        if (io_file_add(b.w.io, b.path, 0, &file, &b.err) != STK_ERR_IO ||
            !strstr(b.err.text, "Permission denied"))
            rc = 1;
        chmod(b.w.dir, 0);
        if (!bed_trip(&b, MIB, 5)) rc = 1;
        chmod(b.w.dir, 0700);
        bed_close(&b);
    }
    return rc;
}

TEST(io_permission_withdrawn)
{
    int rc = in_child(permission_withdrawn);
    if (rc == 77) SKIP("cannot become another user, or TMPDIR is not open to it");
    CHECK(rc == 0);
}

/* --- limits ----------------------------------------------------------------------------------- */

/* A small file-size limit and SIGXFSZ at its default, which would kill. (io_uring on the
 * application's thread has to be told; see io.h.) */
static int small_file_size(enum io_kind io, enum exec_kind ex)
{
    struct bed b = { 0 };
    struct io_req req;
    struct io_stats st;
    struct rlimit lim = { 64 * KIB, 64 * KIB };
    signal(SIGXFSZ, ex == EXEC_SIM && io == IO_URING ? SIG_IGN : SIG_DFL);
    if (!bed_open(&b, io, ex, MIB)) return 1;
    if (setrlimit(RLIMIT_FSIZE, &lim) != 0) return 77;
    fill(b.buf, MIB, 6);
    if (!bed_move(&b, IO_WRITE, 0, 128 * KIB, &req)) return 2;
    if (req.status != STK_ERR_IO || req.os_errno != EFBIG || req.moved_bytes != 64 * KIB) return 3;
    if (!bed_move(&b, IO_WRITE, 128 * KIB, 4 * KIB, &req) || req.os_errno != EFBIG) return 4;
    io_stats_read(b.w.io, &st);
    if (st.short_transfers != 1 || st.errors != 2) return 5;
    if (!bed_trip(&b, 64 * KIB, 7)) return 6; /* what is allowed goes on */
    int fd = sys_open(b.path, O_RDWR, 0);
    if (sys_fallocate(fd, 2 * MIB) != EFBIG) return 7;
    sys_close(fd);
    bed_close(&b);
    return 0;
}
static int fsize_posix(void) { return small_file_size(IO_POSIX, EXEC_THREADS); }
static int fsize_uring(void) { return small_file_size(IO_URING, EXEC_THREADS); }
static int fsize_posix_sim(void) { return small_file_size(IO_POSIX, EXEC_SIM); }
static int fsize_uring_sim(void) { return small_file_size(IO_URING, EXEC_SIM); }

TEST(io_file_size_limit)
{
    CHECK(in_child(fsize_posix) == 0);
    CHECK(in_child(fsize_posix_sim) == 0);
    if (!uring_allowed()) SKIP("no io_uring here");
    CHECK(in_child(fsize_uring) == 0);
    CHECK(in_child(fsize_uring_sim) == 0);
}

static uint32_t open_files(void)
{
    uint32_t n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* Descriptors run out at each place in turn; every refusal says so, and leaves none open. */
static int few_descriptors(void)
{
    struct rlimit lim, old;
    char dir[512];
    uint32_t before = open_files(), opened = 0;
    if (!world_dir(dir, sizeof dir) || getrlimit(RLIMIT_NOFILE, &old) != 0) return 77;
    for (uint32_t spare = 0; spare < 12; spare++) {
        struct bed b = { 0 };
        uint32_t file;
        snprintf(b.path, sizeof b.path, "%s/a", dir);
        int fd = sys_open(b.path, O_RDWR | O_CREAT, 0600);
        if (fd < 0 || ftruncate(fd, MIB) != 0) return 1;
        sys_close(fd);
        snprintf(b.w.dir, sizeof b.w.dir, "%s", dir);
        if (world_open_exec(&b.w, EXEC_THREADS, 1, &b.err) != STK_OK) return 2;
        b.w.cfg.kind = spare % 2 ? IO_URING : IO_AUTO;
        lim = (struct rlimit){ 3 + spare, old.rlim_max };
        setrlimit(RLIMIT_NOFILE, &lim);
        stk_status status = io_open(&b.w.cfg, &b.w.io, &b.err);
        if (status == STK_OK) status = io_file_add(b.w.io, b.path, 0, &file, &b.err);
        if (status == STK_OK) opened++;
        else if (!strstr(b.err.text, "ulimit -n")) {
            printf("# %u: %s\n", spare, b.err.text);
            return 3;
        }
        io_close(b.w.io);
        b.w.io = NULL;
        setrlimit(RLIMIT_NOFILE, &old);
        exec_lane_close(b.w.lane);
        exec_close(b.w.ex);
        if (open_files() != before) return 4;
    }
    sys_remove_tree(dir);
    return opened > 0 ? 0 : 5;
}

TEST(io_few_descriptors)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    CHECK(in_child(few_descriptors) == 0);
}

/* --- file systems of our own ------------------------------------------------------------------ */

static bool own_mounts(void)
{
    return geteuid() == 0 && unshare(CLONE_NEWNS) == 0 &&
           mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

/* More is asked for than there is: the write that finds no room says so, what was written is
 * there. */
static int no_room(struct world *w, enum io_kind io)
{
    struct bed b = { .w = *w };
    struct io_req req;
    uint64_t done = 0;
    bool full = false;
    if (!bed_open(&b, io, EXEC_THREADS, 64 * MIB)) return 1; /* sparse: no room is taken yet */
    for (; !full && done < 64 * MIB; done += MIB) {
        fill(b.buf, MIB, done);
        if (!bed_move(&b, IO_WRITE, done, MIB, &req)) return 2;
        full = req.status != STK_OK;
    }
    if (!full || req.status != STK_ERR_IO || req.os_errno != ENOSPC || done < 2 * MIB) return 3;
    if (!bed_move(&b, IO_READ, 0, MIB, &req) || req.status != STK_OK || !filled(b.buf, MIB, 0))
        return 4;
    printf("# no room after %llu MiB; %s\n", (unsigned long long)done / MIB - 1,
           io_describe(b.w.io));
    fflush(stdout);
    io_close(b.w.io);
    b.w.io = NULL;
    unlink(b.path);
    exec_lane_close(b.w.lane);
    exec_close(b.w.ex);
    return 0;
}

/* mounts `dir`/m by the shell's words; 0, 77 */
static int mounted(char *dir, size_t size_bytes, const char *words)
{
    char cmd[1200];
    if (!own_mounts() || !world_dir(dir, size_bytes)) return 77;
    snprintf(cmd, sizeof cmd, "cd %s && mkdir m && ( %s ) 2>/dev/null", dir, words);
    if (system(cmd) == 0) return 0;
    sys_remove_tree(dir);
    return 77;
}

static void unmounted(const char *dir)
{
    char path[600];
    snprintf(path, sizeof path, "%s/m", dir);
    if (umount2(path, 0) != 0) printf("# %s: cannot unmount: %s\n", path, strerror(errno));
    fflush(stdout);
    sys_remove_tree(dir);
}

static int full_on(const char *words)
{
    char dir[256];
    int rc = mounted(dir, sizeof dir, words);
    for (int k = 0; k < 2 && rc == 0; k++) {
        struct world w = { 0 };
        if (k == 1 && !uring_allowed()) break;
        snprintf(w.dir, sizeof w.dir, "%s/m", dir);
        rc = no_room(&w, k ? IO_URING : IO_POSIX);
    }
    if (rc != 77) unmounted(dir);
    return rc;
}
static int full_ext4(void)
{
    return full_on("truncate -s 24M img && mkfs.ext4 -q -m 0 img && mount -o loop img m");
}
static int full_tmpfs(void) { return full_on("mount -t tmpfs -o size=4m none m"); }

TEST(io_full_disk_under_a_sparse_file)
{
    int rc = in_child(full_ext4);
    if (rc == 77) SKIP("needs root and loop devices");
    CHECK(rc == 0);
}

/* NVM-17: short writes on a file system in memory (the last one before it is full). */
TEST(io_nvm_17_tmpfs)
{
    int rc = in_child(full_tmpfs);
    if (rc == 77) SKIP("needs root");
    CHECK(rc == 0);
}

static int large_sectors(void)
{
    char dir[256];
    int rc = mounted(dir, sizeof dir,
                     "truncate -s 32M img && l=$(losetup -b 4096 -f --show img) && "
                     "mkfs.ext4 -q -b 4096 -m 0 $l && mount $l m; s=$?; losetup -d $l; exit $s");
    for (int k = 0; k < 2 && rc == 0; k++) {
        struct bed b = { 0 };
        struct io_req req;
        if (k == 1 && !uring_allowed()) break;
        snprintf(b.w.dir, sizeof b.w.dir, "%s/m", dir);
        if (!bed_open(&b, k ? IO_URING : IO_POSIX, EXEC_THREADS, 2 * MIB)) return 1;
        if (io_align(b.w.io) != 4096 || !bed_trip(&b, MIB, 8)) rc = 2;
        /* half a sector is refused before it is tried, and in words */
        req = (struct io_req){
            .op = IO_READ, .file = b.file, .buf = b.buf, .offset_bytes = 512, .size_bytes = 4096
        };
        stk_error_clear(&b.err);
        if (one(&b.w, &req, &b.err) != STK_ERR_CONFIG || !strstr(b.err.text, "4096")) rc = 3;
        printf("# %s\n", io_describe(b.w.io));
        fflush(stdout);
        io_close(b.w.io);
        unlink(b.path);
        exec_lane_close(b.w.lane);
        exec_close(b.w.ex);
    }
    if (rc != 77) unmounted(dir);
    return rc;
}

TEST(io_loop_device_with_4_kib_sectors)
{
    int rc = in_child(large_sectors);
    if (rc == 77) SKIP("needs root and losetup -b 4096");
    CHECK(rc == 0);
}

/* --- buffers ---------------------------------------------------------------------------------- */

TEST(io_buffer_that_is_not_there)
{
    FOR_REAL(c)
    {
        struct bed b = { 0 };
        struct io_req req;
        REQUIRE(bed_open(&b, c->io, c->ex, MIB));
        CHECK(bed_trip(&b, MIB, 9));
        CHECK(mprotect(b.buf, MIB, PROT_NONE) == 0);
        CHECK(bed_move(&b, IO_READ, 0, 64 * KIB, &req));
        CHECK(req.status == STK_ERR_IO && req.os_errno == EFAULT);
        CHECK(mprotect(b.buf, MIB, PROT_READ | PROT_WRITE) == 0);
        CHECK(bed_trip(&b, MIB, 10));
        bed_close(&b);
    }
}

struct touch { struct bed *b; struct io_req req; bool write; uint32_t done; };

static void touch_done(struct io_req *req)
{
    struct touch *t = req->owner;
    t->done++;
    /* the caller's again: writing is allowed from here on */
    memset(t->b->buf, 1, MIB);
}

static void touch_start(void *arg)
{
    struct touch *t = arg;
    struct stk_error err = { 0 };
    t->req = (struct io_req){ .op = IO_WRITE,
                              .file = t->b->file,
                              .buf = t->b->buf,
                              .size_bytes = MIB,
                              .done = touch_done,
                              .owner = t };
    CHECK(io_submit(t->b->w.io, &t->req, &err) == STK_OK);
    volatile uint8_t *p = t->b->buf + 5000;
    if (t->write) *p = 1;
    else CHECK(*p != 0 || *p == 0); /* looking is allowed */
}

static bool touched(enum io_kind io, enum exec_kind ex, bool write)
{
    struct bed b = { .w = { .cfg = { .protect_writes = true } } };
    struct touch t = { .b = &b, .write = write };
    if (!bed_open(&b, io, ex, MIB)) return false;
    io_buffer_register(b.w.io, b.buf, 2 * MIB);
    if (write) sys_remove_tree(b.w.dir);
    world_run(&b.w, touch_start, &t);
    bool ok = io_drain(b.w.io, UINT64_MAX, &b.err) == STK_OK && t.done == 1 &&
              t.req.status == STK_OK && bed_trip(&b, MIB, 11);
    bed_close(&b);
    return ok;
}

/* NVM-37: whoever writes to a buffer while it is being written out is caught in the act. */
TEST(io_nvm_37_write_to_a_buffer_on_its_way_faults)
{
    FOR_COMBOS(c)
    {
        CHECK(touched(c->io, c->ex, false));
        if (c->ex != EXEC_THREADS || c->io == IO_SIM) continue;
        int st;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) _exit(touched(c->io, c->ex, true) ? 0 : 1);
        /* on the lane, where the signal is blocked and so cannot be handled by anyone */
        CHECK(waitpid(pid, &st, 0) == pid && WIFSIGNALED(st) && WTERMSIG(st) == SIGSEGV);
    }
}

/* --- fork ------------------------------------------------------------------------------------- */

static void never_done(struct io_req *req) { _exit(50); }

/* In the child: every call answers, none waits, and the arena is not there. */
static int forked_child(struct bed *b)
{
    struct io_req req = {
        .op = IO_READ, .file = b->file, .buf = b->buf, .size_bytes = 4096, .done = never_done
    };
    uint32_t file;
    if (io_submit(b->w.io, &req, &b->err) != STK_ERR_STATE || !strstr(b->err.text, "forked"))
        return 1;
    stk_error_clear(&b->err);
    if (io_drain(b->w.io, UINT64_MAX, &b->err) != STK_ERR_STATE) return 2;
    if (io_file_add(b->w.io, b->path, 0, &file, NULL) != STK_ERR_STATE) return 3;
    io_buffer_register(b->w.io, b->buf, MIB);
    io_file_remove(b->w.io, b->file);
    io_stop(b->w.io);
    io_close(b->w.io);
    /* not mapped */
    if (msync(b->buf, 2 * MIB, MS_ASYNC) != -1 || errno != ENOMEM) return 4;
    return 0;
}

TEST(io_nvm_35_fork)
{
    FOR_REAL(c)
    {
        struct bed b = { 0 };
        int st, hold[2];
        char end;
        REQUIRE(bed_open(&b, c->io, c->ex, MIB));
        io_buffer_register(b.w.io, b.buf, 2 * MIB);
        CHECK(bed_trip(&b, MIB, 12) && pipe(hold) == 0);
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            int rc = forked_child(&b);
            close(hold[1]);
            if (read(hold[0], &end, 1) != 0) rc = 5; /* alive until the parent is through */
            _exit(rc);
        }
        close(hold[0]);
        for (uint64_t i = 0; i < 8; i++) CHECK(bed_trip(&b, MIB, 13 + i));
        bed_close(&b); /* with the child still there */
        close(hold[1]);
        CHECK(waitpid(pid, &st, 0) == pid && WIFEXITED(st) && WEXITSTATUS(st) == 0);
    }
}

/* After io_close children get the memory again. */
TEST(io_memory_is_inherited_again_after_close)
{
    struct bed b = { 0 };
    int st;
    REQUIRE(bed_open(&b, IO_AUTO, EXEC_THREADS, MIB));
    io_buffer_register(b.w.io, b.buf, 2 * MIB);
    world_close(&b.w);
    fill(b.buf, MIB, 30);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) _exit(msync(b.buf, 2 * MIB, MS_ASYNC) == 0 && filled(b.buf, MIB, 30) ? 0 : 1);
    CHECK(waitpid(pid, &st, 0) == pid && WIFEXITED(st) && WEXITSTATUS(st) == 0);
    sys_munmap(b.buf, 2 * MIB);
}

TEST_MAIN()
