/* tests/nvme/test_kernels.c - io_uring as kernels before this one have it.
 *
 * What a kernel cannot register is refused by a filter on the operation's number, which is what the
 * kernel would answer; what it does not say it has is taken out of the ring's features (the linker's
 * --wrap), so that liburing takes the ways it keeps for that. Memory of rings that is counted on the
 * user (up to 5.11) is counted by a supervisor of the test's, who is asked before each ring
 * (seccomp's user notifications). All of it lives in children. */
#include "tests/nvme/store_world.h"

#include <errno.h>
#include <liburing.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define MIB (1024u * 1024u)
enum { OPCODES = 32 };

static uint32_t features_missing;

int __real_io_uring_queue_init(unsigned n, struct io_uring *ring, unsigned flags);
int __wrap_io_uring_queue_init(unsigned n, struct io_uring *ring, unsigned flags);

int __wrap_io_uring_queue_init(unsigned n, struct io_uring *ring, unsigned flags)
{
    int rc = __real_io_uring_queue_init(n, ring, flags);
    if (rc == 0) ring->features &= ~features_missing;
    return rc;
}

/* --- what can be registered (NVM-31) ---------------------------------------------------------- */

/* Eight extents at once, there and back; io's description goes to `text`. */
static bool trip(char text[2048])
{
    enum { N = 8, BYTES = 100000 };
    struct world w = { .cfg = { .depth = 4 } };
    struct stk_error err = { 0 };
    struct store *s;
    struct store_op ops[N];
    uint64_t bytes[N];
    for (int i = 0; i < N; i++) bytes[i] = BYTES;
    struct store_cfg cfg = { .n_extents = N, .extent_bytes = bytes };
    bool ok = world_open(&w, IO_AUTO, EXEC_THREADS, 1, &err) == STK_OK &&
              store_world_open(&w, &cfg, &s, &err) == STK_OK;
    snprintf(text, 2048, "%s", err.text);
    if (ok) {
        uint8_t *buf = sys_mmap(MIB, true);
        io_buffer_register(w.io, buf, MIB);
        for (int put = 1; put >= 0; put--) {
            for (uint32_t i = 0; i < N; i++) {
                ops[i] = (struct store_op){ .extent = i, .buf = buf + i * 131072, .version = 1 };
                if (put) fill(buf + i * 131072, BYTES, i);
            }
            ok = ok && ops_run(&w, s, ops, N, put) == STK_OK;
            for (uint32_t i = 0; i < N; i++)
                ok = ok && ops[i].status == STK_OK && filled(buf + i * 131072, BYTES, i);
            if (put) memset(buf, 0, MIB);
        }
        snprintf(text, 2048, "%s", io_describe(w.io));
        store_close(s);
        sys_munmap(buf, MIB);
    }
    world_close(&w);
    return ok;
}

/* io_uring_register answers EINVAL to the operations of `refused` and to all above them. */
static bool refuse(uint32_t refused)
{
    struct sock_filter code[8 + 2 * OPCODES] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_register, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
    };
    unsigned short n = 4;
    for (uint32_t i = 0; i < OPCODES; i++) {
        if (!(refused >> i & 1)) continue;
        code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, i, 0, 1);
        code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL);
    }
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog prog = { n, code };
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) == 0;
}

#define BIT(n) (1u << (n))
#define ABOVE(n) (~0u << ((n) + 1))
#define FILES (BIT(IORING_REGISTER_FILES2) | BIT(IORING_REGISTER_FILES_UPDATE))
#define BUFFERS (BIT(IORING_REGISTER_BUFFERS2) | BIT(IORING_REGISTER_BUFFERS_UPDATE))

static uint32_t missing; /* of the child that tries it */

/* Right bytes, and the description says what was not registered, and nothing else. */
static int tried(void)
{
    char text[2048];
    bool files = !(missing & FILES), buffers = !(missing & BUFFERS);
    if (!refuse(missing)) return 77;
    bool ok = trip(text);
    if (missing & BIT(IORING_REGISTER_PROBE)) {
        ok = ok && strstr(text, "posix") && strstr(text, "too old");
    } else {
        ok = ok && strstr(text, "io_uring") == text;
        ok = ok && !files == (strstr(text, "files are not registered: Invalid argument") != NULL);
        ok = ok && !buffers == (strstr(text, "buffers are not registered: Invalid argument") != NULL);
        ok = ok && strstr(text, files && buffers ? "registered buffers and files"
                                : files          ? "registered files"
                                : buffers        ? "registered buffers"
                                                 : "nothing registered");
    }
    if (!ok) printf("# without %#x, features %#x: %s\n", missing, features_missing, text);
    fflush(stdout);
    return ok ? 0 : 1;
}

TEST(kernels_nvm_31_each_registration_missing_alone)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    for (uint32_t i = 0; i < OPCODES; i++) {
        missing = BIT(i);
        int rc = in_child(tried);
        if (rc == 77) SKIP("no seccomp here");
        CHECK(rc == 0);
    }
}

TEST(kernels_nvm_31_each_feature_missing_alone)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    missing = 0;
    for (uint32_t i = 0; i < 16; i++) {
        features_missing = BIT(i);
        int rc = in_child(tried);
        features_missing = 0;
        if (rc == 77) SKIP("no seccomp here");
        CHECK(rc == 0);
    }
}

/* What each kernel can register and says it has (include/uapi/linux/io_uring.h of its release). Tables
 * without content (13, 15 with a flag) came with 5.19: without them nothing is registered. */
TEST(kernels_nvm_31_as_releases_have_it)
{
    static const struct { const char *name; uint32_t missing, features; } kernels[] = {
        { "5.6", ABOVE(IORING_UNREGISTER_PERSONALITY), ABOVE(4) },
        { "5.10", ABOVE(IORING_REGISTER_ENABLE_RINGS), ABOVE(6) },
        { "5.15", ABOVE(IORING_REGISTER_IOWQ_MAX_WORKERS) | BIT(IORING_REGISTER_FILES2) |
                      BIT(IORING_REGISTER_BUFFERS2), ABOVE(10) },
        { "6.1", ABOVE(IORING_REGISTER_FILE_ALLOC_RANGE), ABOVE(12) },
        { "6.8", ABOVE(26), ABOVE(13) },
    };
    if (!uring_allowed()) SKIP("no io_uring here");
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        missing = kernels[i].missing;
        features_missing = kernels[i].features;
        int rc = in_child(tried);
        features_missing = 0;
        if (rc == 77) SKIP("no seccomp here");
        if (rc) printf("# as on Linux %s\n", kernels[i].name);
        CHECK(rc == 0);
    }
}

/* --- rings on the user's locked memory (NVM-28) ----------------------------------------------- */

enum { RANKS = 8, LIMIT_BYTES = 64 << 10 };
enum { RANK_RING = 10, RANK_POSIX, RANK_WRONG };

static struct { uint32_t depth; int up[2], go[2]; uint32_t rings, posix; } ranks;

/* Opens, says so, and goes on when all others have opened: RANK_... */
static int rank(void)
{
    struct world w = { .cfg = { .depth = ranks.depth } };
    struct stk_error err = { 0 };
    struct store *s;
    struct store_op op;
    uint64_t bytes[2] = { 100000, 100000 };
    struct store_cfg cfg = { .n_extents = 2, .extent_bytes = bytes };
    struct rlimit lim = { LIMIT_BYTES, LIMIT_BYTES };
    char c = 'u';
    bool ok = setrlimit(RLIMIT_MEMLOCK, &lim) == 0 &&
              world_open(&w, IO_AUTO, EXEC_THREADS, 1, &err) == STK_OK &&
              store_world_open(&w, &cfg, &s, &err) == STK_OK;
    if (write(ranks.up[1], &c, 1) != 1 || read(ranks.go[0], &c, 1) != 1 || !ok) {
        printf("# %s\n", err.text);
        fflush(stdout);
        return RANK_WRONG;
    }
    uint8_t *buf = sys_mmap(MIB, true);
    fill(buf, 100000, 3);
    ok = put_one(&w, s, 1, buf, 1, &op) == STK_OK;
    memset(buf, 0, 100000);
    ok = ok && get_one(&w, s, 1, buf, 1, &op) == STK_OK && filled(buf, 100000, 3);
    const char *text = io_describe(w.io);
    bool ring = strstr(text, "io_uring") == text;
    ok = ok && (ring || (strstr(text, "posix") == text && strstr(text, "ENOMEM") &&
                         strstr(text, "RLIMIT_MEMLOCK is 64 KiB")));
    if (!ok) printf("# %s\n", text);
    fflush(stdout);
    store_close(s);
    world_close(&w);
    return !ok ? RANK_WRONG : ring ? RANK_RING : RANK_POSIX;
}

/* Who makes a ring or closes anything waits for the answer of whoever reads this descriptor. */
static int listen_to_rings(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_close, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
    };
    struct sock_fprog prog = { sizeof code / sizeof *code, code };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return -1;
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &prog);
}

static uint64_t pages_of(uint64_t bytes)
{
    uint64_t pages = 1;
    while (pages * 4096 < bytes) pages *= 2;
    return pages;
}

/* fs/io_uring.c of 5.10, ring_pages(): heads and tails, both queues, the entries. */
static uint64_t ring_bytes(uint64_t entries)
{
    uint64_t sq = 1;
    while (sq < entries) sq *= 2;
    return (pages_of(320 + 2 * sq * 16 + sq * 4) + pages_of(sq * 64)) * 4096;
}

struct count { uint64_t locked_bytes, most_bytes, one_bytes; uint32_t refused; };

static bool is_ring(const struct seccomp_notif *n)
{
    char path[64], target[64];
    snprintf(path, sizeof path, "/proc/%u/fd/%d", n->pid, (int)n->data.args[0]);
    ssize_t got = readlink(path, target, sizeof target - 1);
    target[got > 0 ? got : 0] = '\0';
    return strcmp(target, "anon_inode:[io_uring]") == 0;
}

/* One question: a ring is refused when the user has no room for it. Rings are all of one size here. */
static void answer_one(int listener, struct count *c)
{
    struct seccomp_notif n;
    memset(&n, 0, sizeof n);
    if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &n) != 0) return;
    struct seccomp_notif_resp r = { .id = n.id, .flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE };
    if (n.data.nr == SYS_io_uring_setup) {
        c->one_bytes = ring_bytes(n.data.args[0]);
        if (c->locked_bytes + c->one_bytes > LIMIT_BYTES) {
            r.flags = 0;
            r.error = -ENOMEM;
            c->refused++;
        } else {
            c->locked_bytes += c->one_bytes;
        }
        if (c->locked_bytes > c->most_bytes) c->most_bytes = c->locked_bytes;
    } else if (is_ring(&n)) {
        c->locked_bytes -= c->one_bytes;
    }
    (void)ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &r);
}

/* Runs the ranks under the count. This process is under the filter, too: it must close nothing. */
static int supervise(void)
{
    struct count c = { 0 };
    pid_t pids[RANKS];
    uint32_t up = 0, left = RANKS, ended[3] = { 0 };
    int st, listener = listen_to_rings();
    char text[RANKS] = "";
    if (listener < 0) return 77;
    for (int i = 0; i < RANKS; i++)
        if ((pids[i] = fork()) == 0) _exit(rank());
    while (left > 0) {
        struct pollfd fds[2] = { { .fd = listener, .events = POLLIN },
                                 { .fd = ranks.up[0], .events = POLLIN } };
        (void)poll(fds, 2, 20);
        if (fds[0].revents & POLLIN) answer_one(listener, &c);
        if (fds[1].revents & POLLIN) {
            ssize_t n = read(ranks.up[0], text, sizeof text);
            up += n > 0 ? (uint32_t)n : 0;
            if (up == RANKS && write(ranks.go[1], text, RANKS) != RANKS) return 1;
        }
        for (int i = 0; i < RANKS; i++) {
            if (pids[i] == 0 || waitpid(pids[i], &st, WNOHANG) != pids[i]) continue;
            pids[i] = 0;
            left--;
            int code = WIFEXITED(st) ? WEXITSTATUS(st) - RANK_RING : 2;
            ended[code >= 0 && code < 2 ? code : 2]++;
        }
    }
    printf("# depth %u: %u ranks with a ring of %u KiB, %u without; %u rings refused, at most %u KiB\n",
           ranks.depth, ended[0], (unsigned)(c.one_bytes >> 10), ended[1], c.refused,
           (unsigned)(c.most_bytes >> 10));
    fflush(stdout);
    bool all = c.one_bytes * RANKS <= LIMIT_BYTES;
    bool ok = ended[2] == 0 && c.locked_bytes == 0 && (ended[1] == 0) == (c.refused == 0);
    ok = ok && (all ? ended[0] == RANKS : ended[0] >= 1 && ended[0] * c.one_bytes <= LIMIT_BYTES);
    return ok ? 0 : 1;
}

static void ranks_at_depth(uint32_t depth)
{
    ranks.depth = depth;
    REQUIRE(pipe2(ranks.up, O_CLOEXEC) == 0 && pipe2(ranks.go, O_CLOEXEC) == 0);
    int rc = in_child(supervise);
    for (int i = 0; i < 2; i++) close(ranks.up[i]), close(ranks.go[i]);
    if (rc == 77) SKIP("no seccomp notifications here");
    CHECK(rc == 0);
}

/* Eight ranks of one user with 64 KiB of locked memory between them, as kernels up to 5.11 count it, and
 * all open at once. Rings of 8 KiB: one each. */
TEST(kernels_nvm_28_a_small_ring_for_each_of_eight_ranks)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    ranks_at_depth(32);
}

/* Rings of 32 KiB: who comes late goes on without one, and says why. */
TEST(kernels_nvm_28_large_rings_for_some_of_eight_ranks)
{
    if (!uring_allowed()) SKIP("no io_uring here");
    ranks_at_depth(256);
}

TEST_MAIN()
