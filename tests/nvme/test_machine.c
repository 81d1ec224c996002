/* tests/nvme/test_machine.c - what a machine may refuse: io_uring itself, locked memory, full
 * transfers. Short results on real files come from wrapped pread and pwrite (the linker's --wrap,
 * see meson.build); refusals from limits and filters set in a child. */
#include "tests/nvme/store_world.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

#define MIB (1024u * 1024u)

/* --- scripted results of pread and pwrite, and of the self-test's plain read ------------------ */

int64_t __real_sys_read_some(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int64_t __real_sys_write_some(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int64_t __real_sys_read_full(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int64_t __wrap_sys_read_some(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int64_t __wrap_sys_write_some(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int64_t __wrap_sys_read_full(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes);

static struct {
    uint64_t most[8];
    uint32_t n, at;
    bool again;
    uint64_t largest, unaligned;
    bool damage_full_read;
} script;

static uint64_t scripted(uint64_t size_bytes, uint64_t offset_bytes)
{
    if (size_bytes > script.largest) script.largest = size_bytes;
    if ((size_bytes | offset_bytes) & 511) script.unaligned++;
    uint64_t most = script.at < script.n ? script.most[script.at++] : UINT64_MAX;
    return most < size_bytes ? most : size_bytes;
}

int64_t __wrap_sys_read_some(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes)
{
    uint64_t n = scripted(size_bytes, offset_bytes);
    if (n == 0 && script.again) {
        errno = EAGAIN;
        return -1;
    }
    int64_t got = __real_sys_read_some(fd, buf, size_bytes, offset_bytes);
    return got > (int64_t)n ? (int64_t)n : got;
}

int64_t __wrap_sys_write_some(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes)
{
    uint64_t n = scripted(size_bytes, offset_bytes);
    int64_t put =
        __real_sys_write_some(fd, buf, n & ~511ull ? n & ~511ull : size_bytes, offset_bytes);
    return put > (int64_t)n ? (int64_t)n : put;
}

int64_t __wrap_sys_read_full(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes)
{
    int64_t n = __real_sys_read_full(fd, buf, size_bytes, offset_bytes);
    if (script.damage_full_read && n > 5000) ((uint8_t *)buf)[5000] ^= 1;
    return n;
}

/* What the file system says it is; 0: the truth. */
static long file_system_type;
int __real_fstatfs64(int fd, struct statfs *fs);
int __wrap_fstatfs64(int fd, struct statfs *fs);

int __wrap_fstatfs64(int fd, struct statfs *fs)
{
    int rc = __real_fstatfs64(fd, fs);
    if (file_system_type) fs->f_type = file_system_type;
    return rc;
}

/* One extent is put and got; results are cut as scripted from the transfer's first call on. */
static void scripted_trip(enum exec_kind ex, bool put, const uint64_t *most, uint32_t n, bool again,
                          bool buffered, stk_status want)
{
    struct world w = { .cfg = { .workers = 1, .buffered = buffered } };
    struct stk_error err = { 0 };
    struct store *s;
    uint64_t bytes[1] = { MIB };
    struct store_cfg cfg = { .n_extents = 1, .extent_bytes = bytes };
    struct store_op op;
    CHECK_OK(world_open(&w, IO_POSIX, ex, 1, &err), &err);
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    uint8_t *buf = sys_mmap(MIB, false);
    fill(buf, MIB, 3);
    memset(&script, 0, sizeof script);
    script.again = again;
    memcpy(script.most, most, n * sizeof *most);
    script.n = put ? n : 0;
    stk_status status = put_one(&w, s, 0, buf, 1, &op);
    if (put) CHECK(status == want);
    script.at = 0;
    script.n = put ? 0 : n;
    memset(buf, 0, MIB);
    status = get_one(&w, s, 0, buf, 1, &op);
    if (!put) CHECK(status == want);
    if (status == STK_OK) CHECK(filled(buf, MIB, 3));
    if (!buffered) CHECK(script.unaligned == 0);
    struct io_stats st;
    io_stats_read(w.io, &st);
    CHECK(st.retries > 0);
    memset(&script, 0, sizeof script);
    store_close(s);
    world_close(&w);
    sys_munmap(buf, MIB);
}

TEST(io_nvm_16_17_19_short_results_on_files)
{
    static const uint64_t a[] = { 494700 }, b[] = { 512, 4096, 600000 }, one[] = { 1, 1, 1 },
                          none[] = { 0, 0, 0, 0, 0, 0 }, stuck[] = { 100, 100, 100, 100, 100, 100 },
                          eagain[] = { 0, 0 };
    for (int ex = 0; ex < 2; ex++) {
        enum exec_kind kind = ex ? EXEC_SIM : EXEC_THREADS;
        for (int put = 0; put < 2; put++) {
            scripted_trip(kind, put, a, 1, false, false, STK_OK);
            scripted_trip(kind, put, b, 3, false, false, STK_OK);
            scripted_trip(kind, put, one, 3, false, false, STK_OK);
            scripted_trip(kind, put, one, 3, false, true, STK_OK);
            /* no progress again and again: an error, not a loop */
            scripted_trip(kind, put, stuck, 6, false, false, STK_ERR_IO);
        }
        scripted_trip(kind, false, none, 6, false, false, STK_ERR_IO);
        scripted_trip(kind, false, eagain, 2, true, false, STK_OK);
        scripted_trip(kind, false, none, 6, true, false, STK_ERR_IO);
    }
}

/* NVM-14: no call above the limit. */
TEST(io_nvm_14_no_call_above_the_limit)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct store *s;
    uint64_t bytes[1] = { 40ull * MIB + 77 };
    struct store_cfg cfg = { .n_extents = 1, .extent_bytes = bytes };
    struct store_op op;
    CHECK_OK(world_open(&w, IO_POSIX, EXEC_SIM, 1, &err), &err);
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    uint8_t *buf = sys_mmap(41 * MIB, false);
    memset(&script, 0, sizeof script);
    fill(buf, bytes[0], 8);
    CHECK(put_one(&w, s, 0, buf, 1, &op) == STK_OK && get_one(&w, s, 0, buf, 1, &op) == STK_OK &&
          filled(buf, bytes[0], 8));
    CHECK(script.largest == IO_TRANSFER_MAX);
    store_close(s);
    world_close(&w);
    sys_munmap(buf, 41 * MIB);
}

/* NVM-37: Btrfs may turn direct writes into buffered ones; the run's header says so. */
TEST(io_nvm_37_btrfs_is_named)
{
    for (int kind = 0; kind < 2; kind++) {
        struct world w = { 0 };
        struct stk_error err = { 0 };
        uint32_t file;
        CHECK_OK(world_open(&w, kind ? IO_AUTO : IO_POSIX, EXEC_THREADS, 1, &err), &err);
        CHECK_OK(world_file(&w, "a", MIB, 0, &file, &err), &err);
        CHECK(!strstr(io_describe(w.io), "Btrfs"));
        file_system_type = 0x9123683e;
        CHECK_OK(world_file(&w, "b", MIB, 0, &file, &err), &err);
        file_system_type = 0;
        CHECK(strstr(io_describe(w.io), "Btrfs may buffer direct writes"));
        world_close(&w);
    }
}

/* --- in a child ------------------------------------------------------------------------------- */

/* A put and a get through an io of this kind; its description goes to `text`. */
static bool trip(enum io_kind kind, bool registered, char text[2048])
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct store *s;
    uint64_t bytes[2] = { 100000, 100000 };
    struct store_cfg cfg = { .n_extents = 2, .extent_bytes = bytes };
    struct store_op op;
    snprintf(text, 2048, "%s", "not open");
    bool ok = world_open(&w, kind, EXEC_THREADS, 1, &err) == STK_OK;
    if (!ok) snprintf(text, 2048, "%s", err.text);
    ok = ok && store_world_open(&w, &cfg, &s, &err) == STK_OK;
    if (ok) {
        uint8_t *buf = sys_mmap(8 * MIB, true);
        if (registered) io_buffer_register(w.io, buf, 8 * MIB);
        fill(buf, 100000, 3);
        ok = put_one(&w, s, 1, buf, 1, &op) == STK_OK && get_one(&w, s, 1, buf, 1, &op) == STK_OK &&
             filled(buf, 100000, 3);
        snprintf(text, 2048, "%s", io_describe(w.io));
        store_close(s);
        sys_munmap(buf, 8 * MIB);
    }
    world_close(&w);
    return ok;
}

static int deny(uint32_t call, uint32_t result)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | result),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog prog = { sizeof code / sizeof *code, code };
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) == 0;
}

static int refused_with(uint32_t call, uint32_t os_errno, const char *name)
{
    char text[2048];
    if (!deny(call, os_errno)) return 77;
    if (!trip(IO_AUTO, true, text) || !strstr(text, "posix") || !strstr(text, name) ||
        (os_errno == EPERM && !strstr(text, "kernel.io_uring_disabled"))) {
        printf("# %s\n", text);
        return 1;
    }
    if (trip(IO_URING, false, text) || !strstr(text, name)) {
        printf("# %s\n", text);
        return 1;
    }
    printf("# %s\n", text);
    fflush(stdout);
    return 0;
}
static int refused_eperm(void) { return refused_with(SYS_io_uring_setup, EPERM, "EPERM"); }
static int refused_enosys(void) { return refused_with(SYS_io_uring_setup, ENOSYS, "ENOSYS"); }
static int refused_enter(void) { return refused_with(SYS_io_uring_enter, EPERM, "EPERM"); }

static int refused_enomem(void)
{
    return refused_with(SYS_io_uring_setup, ENOMEM, "RLIMIT_MEMLOCK");
}

/* Without the library there is no backend for the machine to refuse; it says so. */
static bool built_without_uring(void)
{
    char text[2048];
    return !trip(IO_URING, false, text) && strstr(text, "is not in this build") && trip(IO_AUTO, false, text) &&
           strstr(text, "posix") && strstr(text, "is not in this build");
}

TEST(io_nvm_29_io_uring_refused)
{
    if (built_without_uring()) SKIP("built without liburing");
    int rc = in_child(refused_eperm);
    if (rc == 77) SKIP("no seccomp here");
    CHECK(rc == 0);
    CHECK(in_child(refused_enosys) == 0);
    CHECK(in_child(refused_enter) == 0);
}

/* NVM-28: kernels before 5.12 count rings on the locked memory of the user. */
TEST(io_nvm_28_no_memory_for_a_ring)
{
    if (built_without_uring()) SKIP("built without liburing");
    int rc = in_child(refused_enomem);
    if (rc == 77) SKIP("no seccomp here");
    CHECK(rc == 0);
}

/* NVM-31: a kernel that refuses to register anything (but answers which operations it knows, opcode
 * 8): nothing is registered, and transfers work. */
static int no_registering(void)
{
    char text[2048];
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_register, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 8, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog prog = { sizeof code / sizeof *code, code };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) != 0)
        return 77;
    bool ok = trip(IO_URING, true, text) && strstr(text, "nothing registered") &&
              strstr(text, "buffers are not registered: Invalid argument") &&
              strstr(text, "files are not registered: Invalid argument");
    printf("# %s\n", text);
    fflush(stdout);
    return ok ? 0 : 1;
}

TEST(io_nvm_31_nothing_can_be_registered)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    int rc = in_child(no_registering);
    if (rc == 77) SKIP("no seccomp here");
    CHECK(rc == 0);
}

/* As an ordinary user whose locked memory is small. */
static int little_memlock(void)
{
    struct rlimit lim = { 64 << 10, 64 << 10 };
    char text[2048];
    if (setrlimit(RLIMIT_MEMLOCK, &lim) != 0) return 77;
    if (!become_user((uint32_t)getpid())) return 77;
    if (trip(IO_URING, true, text) && strstr(text, "io_uring") && strstr(text, "8192 KiB") &&
        strstr(text, "64 KiB") &&
        (strstr(text, "nothing registered") || strstr(text, "registered files"))) {
        printf("# %s\n", text);
        fflush(stdout);
        return 0;
    }
    printf("# %s\n", text);
    fflush(stdout);
    return 1;
}

TEST(io_nvm_26_memlock)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    int rc = in_child(little_memlock);
    if (rc == 77) SKIP("the limit cannot be set");
    CHECK(rc == 0);
}

/* NVM-28: as many ranks of one user, each with its ring at the same time. Kernels that count
 * rings on the user's locked memory have too little for all: the rest goes on without, and says
 * why. */
static int rank(uint32_t user)
{
    struct rlimit lim = { 64 << 10, 64 << 10 };
    char text[2048];
    if (setrlimit(RLIMIT_MEMLOCK, &lim) != 0 || !become_user(user)) return 77;
    bool ok = trip(IO_AUTO, true, text) &&
              (strstr(text, "posix") ? strstr(text, "RLIMIT_MEMLOCK is 64 KiB") != NULL
                                     : strstr(text, "io_uring") != NULL);
    printf("# %s\n", text);
    fflush(stdout);
    return ok ? 0 : 1;
}

TEST(io_nvm_28_eight_ranks_of_one_user)
{
    enum { RANKS = 8 };
    pid_t pids[RANKS];
    int st, gate[2];
    if (!uring_allowed()) SKIP("no io_uring here");
    REQUIRE(pipe(gate) == 0);
    fflush(stdout);
    for (int i = 0; i < RANKS; i++) {
        pids[i] = fork();
        if (pids[i] != 0) continue;
        char go;
        close(gate[1]);
        _exit(read(gate[0], &go, 1) == 0 ? rank((uint32_t)getppid()) : 1);
    }
    close(gate[0]);
    close(gate[1]); /* all go */
    for (int i = 0; i < RANKS; i++)
        CHECK(waitpid(pids[i], &st, 0) == pids[i] && WIFEXITED(st) &&
              (WEXITSTATUS(st) == 0 || WEXITSTATUS(st) == 77));
}

/* NVM-25: registered reads that give other bytes than plain ones switch registration off, with one
 * note. */
TEST(io_nvm_25_self_test)
{
    char text[2048];
    if (!uring_allowed()) SKIP("no io_uring here");
    memset(&script, 0, sizeof script);
    CHECK(trip(IO_URING, true, text) && strstr(text, "registered buffers and files") &&
          !strstr(text, "are off"));
    script.damage_full_read = true;
    CHECK(trip(IO_URING, true, text) && strstr(text, "registered buffers are off"));
    script.damage_full_read = false;
    printf("# %s\n", text);
}

/* NVM-26: regions above 1 GiB are registered in pieces; memory that was never touched is enough to
 * try. */
TEST(io_nvm_26_large_region_in_pieces)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    uint32_t file;
    if (!uring_allowed()) SKIP("no io_uring here");
    struct rlimit lim;
    getrlimit(RLIMIT_MEMLOCK, &lim);
    if (geteuid() != 0) SKIP("needs locked memory");
    CHECK_OK(world_open(&w, IO_URING, EXEC_THREADS, 1, &err), &err);
    CHECK_OK(world_file(&w, "a", MIB, 0, &file, &err), &err);
    uint64_t size = (1ull << 30) + 2 * MIB; /* pinning touches it: 1 GiB for a moment */
    uint8_t *buf = sys_mmap(size, false);
    REQUIRE(buf);
    io_buffer_register(w.io, buf, size);
    CHECK(strstr(io_describe(w.io), "registered buffers and files"));
    CHECK(!strstr(io_describe(w.io), "not registered"));
    world_close(&w);
    sys_munmap(buf, size);
}

/* NVM-35: a child made by fork after set-up leaves the parent's ring alone. */
TEST(io_nvm_35_fork)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct store *s;
    uint64_t bytes[1] = { 100000 };
    struct store_cfg cfg = { .n_extents = 1, .extent_bytes = bytes };
    struct store_op op;
    int st;
    CHECK_OK(world_open(&w, IO_AUTO, EXEC_THREADS, 1, &err), &err);
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    uint8_t *buf = sys_mmap(MIB, true);
    io_buffer_register(w.io, buf, MIB);
    for (int i = 0; i < 5; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            struct io_req req = { .op = IO_READ };
            _exit(io_submit(w.io, &req, NULL) == STK_ERR_STATE ? 0 : 1);
        }
        fill(buf, 100000, (uint64_t)i);
        CHECK(put_one(&w, s, 0, buf, 1, &op) == STK_OK);
        memset(buf, 0, 100000);
        CHECK(get_one(&w, s, 0, buf, 1, &op) == STK_OK && filled(buf, 100000, (uint64_t)i));
        CHECK(waitpid(pid, &st, 0) == pid && WIFEXITED(st) && WEXITSTATUS(st) == 0);
    }
    store_close(s);
    world_close(&w);
    sys_munmap(buf, MIB);
}

TEST_MAIN()
