/* tests/nvme/netfs.c - tests/nvme/netfs.h: the FUSE protocol (linux/fuse.h) over /dev/fuse, answered one
 * request after the other by one thread that touches nothing of the mount itself.
 *
 * Files are memory. A node's number is its place in the table and is never used again, so what the
 * kernel remembers of it (lookups, forgets) needs no count. */
#include "tests/nvme/netfs.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

enum { NODES = 4096, WRITE_MAX = 128 << 10, REQUEST_MAX = WRITE_MAX + 4096, NAME_BYTES = 128 };
#define FREE_BYTES (1ull << 30)

struct node {
    uint64_t parent; /* 0: it has no name any more */
    char name[NAME_BYTES];
    uint32_t mode, opens;
    bool hidden; /* removed while open */
    uint8_t *data;
    uint64_t size_bytes, room_bytes;
};

static struct {
    int fd;
    uint64_t n; /* nodes 1..n; 1 is the root */
    struct node node[NODES];
    union { struct fuse_in_header head; uint8_t bytes[REQUEST_MAX]; } in;
    uint8_t out[WRITE_MAX + 4096];
} fs;

/* --- nodes ------------------------------------------------------------------------------------ */

static uint64_t find(uint64_t parent, const char *name)
{
    for (uint64_t i = 2; i <= fs.n; i++)
        if (fs.node[i].parent == parent && strcmp(fs.node[i].name, name) == 0) return i;
    return 0;
}

static bool empty(uint64_t folder)
{
    for (uint64_t i = 2; i <= fs.n; i++)
        if (fs.node[i].parent == folder) return false;
    return true;
}

static uint64_t make(uint64_t parent, const char *name, uint32_t mode)
{
    if (fs.n + 1 == NODES || strlen(name) >= NAME_BYTES) return 0;
    struct node *x = &fs.node[++fs.n];
    *x = (struct node){ .parent = parent, .mode = mode };
    snprintf(x->name, sizeof x->name, "%s", name);
    return fs.n;
}

static int resize(struct node *x, uint64_t size_bytes)
{
    if (size_bytes > FREE_BYTES) return -ENOSPC;
    if (size_bytes > x->room_bytes) {
        uint64_t room = size_bytes + size_bytes / 2 + 4096;
        uint8_t *data = realloc(x->data, room);
        if (!data) return -ENOSPC;
        x->data = data;
        x->room_bytes = room;
    }
    if (size_bytes > x->size_bytes) memset(x->data + x->size_bytes, 0, size_bytes - x->size_bytes);
    x->size_bytes = size_bytes;
    return 0;
}

static void unname(struct node *x)
{
    if (x->opens > 0) {
        x->hidden = true;
        snprintf(x->name, sizeof x->name, ".netfs%06u", (unsigned)(x - fs.node));
        return;
    }
    free(x->data);
    x->data = NULL;
    x->parent = x->size_bytes = x->room_bytes = 0;
}

/* --- answers ---------------------------------------------------------------------------------- */

static void answer(int error, const void *body, size_t size_bytes)
{
    static uint8_t text[sizeof fs.out + sizeof(struct fuse_out_header)];
    struct fuse_out_header head = { .len = (uint32_t)(sizeof head + (error ? 0 : size_bytes)),
                                    .error = error,
                                    .unique = fs.in.head.unique };
    memcpy(text, &head, sizeof head);
    if (!error && size_bytes > 0) memcpy(text + sizeof head, body, size_bytes);
    /* the asker may have been interrupted: ENOENT */
    (void)!write(fs.fd, text, head.len);
}

static struct fuse_attr attributes(uint64_t id)
{
    const struct node *x = &fs.node[id];
    return (struct fuse_attr){ .ino = id,
                               .size = x->size_bytes,
                               .blocks = (x->size_bytes + 511) / 512,
                               .mode = x->mode,
                               .nlink = 1,
                               .uid = getuid(),
                               .gid = getgid(),
                               .blksize = 4096 };
}

static struct fuse_entry_out entry(uint64_t id)
{
    return (struct fuse_entry_out){
        .nodeid = id, .entry_valid = 1, .attr_valid = 1, .attr = attributes(id)
    };
}

static void answer_entry(uint64_t id, int otherwise)
{
    struct fuse_entry_out e = { 0 };
    if (id) e = entry(id);
    answer(id ? 0 : otherwise, &e, sizeof e);
}

static void answer_attributes(uint64_t id)
{
    struct fuse_attr_out a = { .attr_valid = 1, .attr = attributes(id) };
    answer(0, &a, sizeof a);
}

static void answer_init(const struct fuse_init_in *in)
{
    struct fuse_init_out o = { .major = FUSE_KERNEL_VERSION,
                               .minor = in->minor < 31 ? in->minor : 31,
                               .max_readahead = in->max_readahead,
                               .flags = in->flags & FUSE_BIG_WRITES,
                               .max_background = 16,
                               .congestion_threshold = 12,
                               .max_write = WRITE_MAX,
                               .time_gran = 1 };
    answer(0, &o, sizeof o);
}

static void open_file(uint64_t id, uint32_t flags)
{
    struct fuse_open_out o = { .fh = id };
    bool refused = (flags & O_DIRECT) != 0;
    if (!refused) fs.node[id].opens++;
    answer(refused ? -EINVAL : 0, &o, sizeof o);
}

static void create(uint64_t parent, const struct fuse_create_in *in, const char *name)
{
    struct { struct fuse_entry_out e; struct fuse_open_out o; } both = { .o.fh = 0 };
    uint64_t id = in->flags & O_DIRECT ? 0 : make(parent, name, S_IFREG | (in->mode & 07777));
    if (id) {
        fs.node[id].opens = 1;
        both.e = entry(id);
        both.o.fh = id;
    }
    answer(id ? 0 : in->flags & O_DIRECT ? -EINVAL : -ENOSPC, &both, sizeof both);
}

static void release(uint64_t id)
{
    struct node *x = &fs.node[id];
    if (--x->opens == 0 && x->hidden) unname(x);
    answer(0, NULL, 0);
}

static void read_file(uint64_t id, const struct fuse_read_in *in)
{
    const struct node *x = &fs.node[id];
    uint64_t left = in->offset < x->size_bytes ? x->size_bytes - in->offset : 0;
    answer(0, x->data ? x->data + in->offset : NULL, in->size < left ? in->size : left);
}

static void write_file(uint64_t id, const struct fuse_write_in *in)
{
    struct node *x = &fs.node[id];
    uint64_t end = in->offset + in->size;
    struct fuse_write_out o = { .size = in->size };
    int rc = end > x->size_bytes ? resize(x, end) : 0;
    if (rc == 0) memcpy(x->data + in->offset, in + 1, in->size);
    answer(rc, &o, sizeof o);
}

static void set_attributes(uint64_t id, const struct fuse_setattr_in *in)
{
    struct node *x = &fs.node[id];
    int rc = in->valid & FATTR_SIZE ? resize(x, in->size) : 0;
    if (in->valid & FATTR_MODE) x->mode = (x->mode & S_IFMT) | (in->mode & 07777);
    if (rc != 0) answer(rc, NULL, 0);
    else answer_attributes(id);
}

static void read_folder(uint64_t id, const struct fuse_read_in *in)
{
    size_t used = 0;
    for (uint64_t i = in->offset < 2 ? 2 : in->offset; i <= fs.n; i++) {
        const struct node *x = &fs.node[i];
        size_t n = strlen(x->name);
        struct fuse_dirent d = { .ino = i, .off = i + 1, .namelen = (uint32_t)n, .type = x->mode >> 12 };
        if (x->parent != id) continue;
        if (used + FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + n) > in->size) break;
        memset(fs.out + used, 0, FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + n));
        memcpy(fs.out + used, &d, FUSE_NAME_OFFSET);
        memcpy(fs.out + used + FUSE_NAME_OFFSET, x->name, n);
        used += FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + n);
    }
    answer(0, fs.out, used);
}

static void remove_name(uint64_t parent, const char *name, bool folder)
{
    uint64_t id = find(parent, name);
    bool full = id && folder && !empty(id);
    if (id && !full) unname(&fs.node[id]);
    answer(!id ? -ENOENT : full ? -ENOTEMPTY : 0, NULL, 0);
}

static void rename_to(uint64_t parent, const char *name, uint64_t to, const char *other)
{
    uint64_t id = find(parent, name), there = find(to, other);
    if (id && there && there != id) unname(&fs.node[there]);
    if (id) {
        fs.node[id].parent = to;
        snprintf(fs.node[id].name, NAME_BYTES, "%s", other);
    }
    answer(id ? 0 : -ENOENT, NULL, 0);
}

static void answer_room(void)
{
    struct fuse_statfs_out o = { .st = { .blocks = FREE_BYTES / 2048,
                                         .bfree = FREE_BYTES / 4096,
                                         .bavail = FREE_BYTES / 4096,
                                         .files = NODES,
                                         .ffree = NODES - fs.n,
                                         .bsize = 4096,
                                         .frsize = 4096,
                                         .namelen = NAME_BYTES - 1 } };
    answer(0, &o, sizeof o);
}

static void serve_one(void)
{
    const void *arg = &fs.in.head + 1;
    const char *words = arg;
    uint64_t id = fs.in.head.nodeid;
    struct fuse_open_out nothing = { 0 };
    switch (fs.in.head.opcode) {
    case FUSE_INIT: answer_init(arg); break;
    case FUSE_LOOKUP: answer_entry(find(id, words), -ENOENT); break;
    case FUSE_GETATTR: answer_attributes(id); break;
    case FUSE_SETATTR: set_attributes(id, arg); break;
    case FUSE_MKDIR:
        words += sizeof(struct fuse_mkdir_in);
        answer_entry(make(id, words, S_IFDIR | 0755), -ENOSPC);
        break;
    case FUSE_UNLINK: remove_name(id, words, false); break;
    case FUSE_RMDIR: remove_name(id, words, true); break;
    case FUSE_RENAME:
        words += sizeof(struct fuse_rename_in);
        rename_to(id, words, ((const struct fuse_rename_in *)arg)->newdir, words + strlen(words) + 1);
        break;
    case FUSE_CREATE: create(id, arg, words + sizeof(struct fuse_create_in)); break;
    case FUSE_OPEN: open_file(id, ((const struct fuse_open_in *)arg)->flags); break;
    case FUSE_RELEASE: release(id); break;
    case FUSE_READ: read_file(id, arg); break;
    case FUSE_WRITE: write_file(id, arg); break;
    case FUSE_OPENDIR: answer(0, &nothing, sizeof nothing); break;
    case FUSE_READDIR: read_folder(id, arg); break;
    case FUSE_STATFS: answer_room(); break;
    case FUSE_RELEASEDIR: case FUSE_FSYNC: case FUSE_FSYNCDIR: case FUSE_FLUSH: case FUSE_DESTROY:
        answer(0, NULL, 0);
        break;
    case FUSE_FORGET: case FUSE_BATCH_FORGET: case FUSE_INTERRUPT: break;
    default: answer(-ENOSYS, NULL, 0); break; /* fallocate, nameless files, rename with flags */
    }
}

static bool mount_on(const char *folder)
{
    char options[128];
    fs.fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=%u,group_id=%u", fs.fd,
             (unsigned)getuid(), (unsigned)getgid());
    fs.n = 1;
    fs.node[1].mode = S_IFDIR | 0755;
    return fs.fd >= 0 &&
           mount("netfs", folder, "fuse.netfs", MS_NODEV | MS_NOSUID, options) == 0;
}

/* Until it is unmounted: ENODEV. */
static int serve(void)
{
    for (;;) {
        ssize_t n = read(fs.fd, fs.in.bytes, sizeof fs.in.bytes);
        if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT)) continue;
        if (n < (ssize_t)sizeof fs.in.head) return n < 0 && errno == ENODEV ? 0 : 1;
        if ((size_t)n < sizeof fs.in.bytes) fs.in.bytes[n] = 0;
        serve_one();
    }
}

int netfs_main(const char *folder)
{
    if (!mount_on(folder)) return 77;
    printf("ready\n");
    fflush(stdout);
    return serve();
}

pid_t netfs_start(const char *folder)
{
    int ready[2];
    char c;
    if (pipe2(ready, O_CLOEXEC) != 0) return -1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        close(ready[0]);
        /* whoever waits for an answer would wait for ever if the test died and this did not */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (!mount_on(folder) || write(ready[1], "r", 1) != 1) _exit(77);
        close(ready[1]);
        _exit(serve());
    }
    close(ready[1]);
    bool up = pid > 0 && read(ready[0], &c, 1) == 1;
    close(ready[0]);
    if (up) return pid;
    if (pid > 0) waitpid(pid, NULL, 0);
    return -1;
}

int netfs_end(const char *folder, pid_t pid)
{
    int st, wrong = umount2(folder, 0) == 0 ? 0 : errno;
    if (wrong) kill(pid, SIGKILL);
    if (waitpid(pid, &st, 0) == pid && !wrong && (!WIFEXITED(st) || WEXITSTATUS(st) != 0)) wrong = EIO;
    return wrong;
}
