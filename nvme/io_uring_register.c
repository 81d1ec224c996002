/* nvme/io_uring_register.c - registering buffers and files with a ring, and finding out whether
 * that works here.
 *
 * Application's thread, before the lane submits. Nothing here is an error to the caller: what
 * cannot be registered is used unregistered, with one note that says why. The self-test exists
 * because a kernel was seen to fail registered reads at an offset inside the buffer when several
 * were submitted together (cases.md NVM-25). */
#include "nvme/io_uring_impl.h"
#include "base/rng.h"
#include "base/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { TEST_BLOCKS = 64, TEST_BATCH = 8, TEST_BLOCK_BYTES = 4096 };
#define TEST_BYTES ((uint64_t)TEST_BLOCKS * TEST_BLOCK_BYTES)

static void note_refusal(struct ring *r, int os_errno, uint64_t size_bytes)
{
    static const char refused[] = "buffers are not registered: locking ";
    struct rlimit lim = { 0 };
    getrlimit(RLIMIT_MEMLOCK, &lim);
    r->refused_bytes += size_bytes;
    if (os_errno == ENOMEM) { /* one line, with the sum, however many there are */
        io_note_drop(r->io, refused);
        io_note(r->io,
                "%s%llu KiB was refused, RLIMIT_MEMLOCK is %llu KiB (raise it with ulimit -l to "
                "that sum at least)",
                refused, (unsigned long long)(r->refused_bytes + 1023) / 1024,
                (unsigned long long)lim.rlim_cur / 1024);
    } else {
        io_note(r->io, "buffers are not registered: %s", strerror(os_errno));
    }
}

/* --- the self-test ---------------------------------------------------------------------------- */

/* A nameless file beside `path`, filled with numbers that differ from block to block; -1 where the
 * file system has none. */
static int test_file(const char *path, uint8_t *buf, bool direct)
{
    char dir[4096];
    snprintf(dir, sizeof dir, "%s", path);
    char *slash = strrchr(dir, '/');
    if (!slash) return -1;
    *slash = '\0';
    int fd = sys_open(slash == dir ? "/" : dir, O_TMPFILE | O_RDWR | (direct ? O_DIRECT : 0), 0600);
    if (fd < 0) return -1;
    struct rng rng;
    rng_seed(&rng, 1);
    for (uint64_t i = 0; i < TEST_BYTES; i += 8) {
        uint64_t x = rng_next(&rng);
        memcpy(buf + i, &x, 8);
    }
    if (sys_write_full(fd, buf, TEST_BYTES, 0) == (int64_t)TEST_BYTES) return fd;
    sys_close(fd);
    return -1;
}

/* One batch of registered reads, then their results. 0, or an errno value. */
static int read_batch(struct ring *r, int fd, uint8_t *into, uint32_t first, uint32_t n)
{
    for (uint32_t i = first; i < first + n; i++) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&r->uring);
        if (!sqe) return EBUSY;
        uint64_t at = (uint64_t)i * TEST_BLOCK_BYTES;
        io_uring_prep_read_fixed(sqe, fd, into + at, TEST_BLOCK_BYTES, at, 0);
        io_uring_sqe_set_data64(sqe, i + 1);
    }
    int rc = io_uring_submit(&r->uring), failed = rc == (int)n ? 0 : rc < 0 ? -rc : EIO;
    for (int i = 0; i < rc; i++) {
        struct io_uring_cqe *cqe;
        struct __kernel_timespec limit = { .tv_sec = 10 };
        int waited = io_uring_wait_cqe_timeout(&r->uring, &cqe, &limit);
        if (waited == -EINTR) {
            i--;
            continue;
        }
        if (waited < 0) return -waited;
        if (cqe->res != TEST_BLOCK_BYTES && !failed) failed = cqe->res < 0 ? -cqe->res : EIO;
        io_uring_cqe_seen(&r->uring, cqe);
    }
    return failed;
}

/* NULL: registered reads give what plain reads give. Otherwise what went wrong. `memory` has one
 * block more than twice the test's bytes; the first half (with the extra block, so that no target
 * is at its start) is registered as buffer 0. */
static const char *self_test(struct ring *r, const struct io_file *f, uint8_t *memory)
{
    uint8_t *registered = memory + TEST_BLOCK_BYTES, *plain = registered + TEST_BYTES;
    int own = test_file(f->path, plain, f->direct), fd = own >= 0 ? own : f->fd;
    const char *wrong = NULL;
    int64_t got = sys_read_full(fd, plain, TEST_BYTES, 0);
    uint32_t blocks = got > 0 ? (uint32_t)(got / TEST_BLOCK_BYTES) : 0;
    uint32_t batch = r->io->cfg.depth < TEST_BATCH ? r->io->cfg.depth : TEST_BATCH;
    /* so that a read that moved nothing shows even on a file of zeros */
    memset(registered, 0xa5, TEST_BYTES);
    for (uint32_t i = 0; i < blocks && !wrong; i += batch) {
        int rc = read_batch(r, fd, registered, i, blocks - i < batch ? blocks - i : batch);
        if (rc) wrong = strerror(rc);
    }
    if (!wrong && memcmp(registered, plain, (uint64_t)blocks * TEST_BLOCK_BYTES) != 0)
        wrong = "other bytes than a plain read gave";
    if (own >= 0) sys_close(own);
    return wrong;
}

static int put_buffer(struct ring *r, uint32_t index, void *base, uint64_t size_bytes)
{
    struct iovec v = { base, size_bytes };
    __u64 tag = 0;
    int rc = io_uring_register_buffers_update_tag(&r->uring, index, &v, &tag, 1);
    return rc < 0 ? -rc : 0;
}

static void setup_buffers(struct ring *r, const struct io_file *f)
{
    int rc = io_uring_register_buffers_sparse(&r->uring, RING_BUFFERS_MAX);
    if (rc < 0) {
        note_refusal(r, -rc, TEST_BYTES);
        return;
    }
    uint64_t size = TEST_BLOCK_BYTES + 2 * TEST_BYTES;
    uint8_t *memory = sys_mmap(size, true);
    if (!memory) {
        io_note(r->io, "buffers are not registered: no memory for their self-test");
        return;
    }
    rc = put_buffer(r, 0, memory, TEST_BLOCK_BYTES + TEST_BYTES);
    if (rc == ENOMEM) {
        r->lock_refused = true;
    } else if (rc) {
        note_refusal(r, rc, TEST_BLOCK_BYTES + TEST_BYTES);
    } else {
        const char *wrong = self_test(r, f, memory);
        r->fixed_buffers = wrong == NULL;
        if (wrong)
            io_note(r->io,
                    "registered buffers are off: the self-test's reads into them failed (%s)",
                    wrong);
        put_buffer(r, 0, NULL, 0);
    }
    sys_munmap(memory, size);
}

/* --- registering ------------------------------------------------------------------------------ */

void ring_register_setup(struct ring *r, const struct io_file *f)
{
    setup_buffers(r, f);
    int rc = io_uring_register_files_sparse(&r->uring, IO_FILES_MAX);
    r->fixed_files = rc >= 0;
    if (rc < 0) io_note(r->io, "files are not registered: %s", strerror(-rc));
}

void ring_register_region(struct ring *r, const struct io_region *region)
{
    uint8_t *base = region->base;
    uint64_t left = region->size_bytes;
    if (r->lock_refused) note_refusal(r, ENOMEM, region->size_bytes);
    while (r->fixed_buffers && left > 0) {
        uint64_t n = left < RING_BUFFER_BYTES_MAX ? left : RING_BUFFER_BYTES_MAX;
        if (r->n_buffers == RING_BUFFERS_MAX) {
            io_note(r->io, "only the first %d pieces of the buffers are registered",
                    RING_BUFFERS_MAX);
            return;
        }
        int rc = put_buffer(r, r->n_buffers, base, n);
        if (rc) {
            note_refusal(r, rc, region->size_bytes);
            if (r->n_buffers == 0) r->fixed_buffers = false;
            return;
        }
        r->buffers[r->n_buffers++] = (struct ring_buffer){ base, n };
        base += n;
        left -= n;
    }
}

void ring_register_file(struct ring *r, uint32_t index, int fd)
{
    if (!r->fixed_files) return;
    int rc = io_uring_register_files_update(&r->uring, index, &fd, 1);
    if (rc == 1 || fd < 0) return;
    r->fixed_files = false;
    io_note(r->io, "files are not registered: %s", strerror(rc < 0 ? -rc : EIO));
}

int ring_buffer_find(const struct ring *r, const uint8_t *buf, uint64_t size_bytes)
{
    for (uint32_t i = 0; i < r->n_buffers; i++) {
        const struct ring_buffer *b = &r->buffers[i];
        if (buf >= b->base && size_bytes <= b->size_bytes &&
            (uint64_t)(buf - b->base) <= b->size_bytes - size_bytes)
            return (int)i;
    }
    return -1;
}
