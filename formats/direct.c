/* formats/direct.c - writing a file past the page cache.
 *
 * Owns: the second descriptor. Must not know: what is written. Thread: one at a time per object;
 * blocking. */
#include "formats/direct.h"

#include "base/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#define MEMORY_ALIGN 512u

void direct_open(struct direct *d, const char *path, void *bounce, uint64_t bounce_bytes)
{
    *d = (struct direct){ .fd = -1, .bounce = bounce, .bounce_bytes = bounce_bytes };
    if (bounce_bytes) d->fd = sys_open(path, O_WRONLY | O_DIRECT, 0);
}

void direct_close(struct direct *d)
{
    if (d->fd >= 0) sys_close(d->fd);
    d->fd = -1;
}

/* Whole blocks. What the direct descriptor does not take (a short write, an alignment that this
 * drive does not have), the ordinary one does. */
static int64_t write_blocks(struct direct *d, int fd, const unsigned char *from, uint64_t size,
                            uint64_t at)
{
    bool bounces = (uintptr_t)from % MEMORY_ALIGN != 0;
    for (uint64_t done = 0; done < size;) {
        uint64_t n = size - done, most = bounces ? d->bounce_bytes : 1u << 30;
        if (n > most) n = most;
        if (bounces) memcpy(d->bounce, from + done, n);
        int64_t put = d->fd < 0 ? 0 : sys_write_some(d->fd, bounces ? d->bounce : from + done, n,
                                                     at + done);
        if (put < 0 && errno != EINVAL && errno != EINTR && errno != EAGAIN) return -1;
        if (put < 0 && errno == EINVAL) direct_close(d);
        if (put < (int64_t)n) {
            int64_t rest = sys_write_full(fd, from + done, n, at + done);
            if (rest < (int64_t)n) return rest < 0 ? -1 : (int64_t)done + rest;
        }
        done += n;
    }
    return (int64_t)size;
}

int64_t direct_write(struct direct *d, int fd, const void *buf, uint64_t size_bytes,
                     uint64_t offset_bytes)
{
    const unsigned char *from = buf;
    uint64_t end = offset_bytes + size_bytes, first = offset_bytes,
             head = (DIRECT_ALIGN - first % DIRECT_ALIGN) % DIRECT_ALIGN;
    if (d->fd < 0 || head >= size_bytes || (size_bytes - head) < DIRECT_ALIGN)
        return sys_write_full(fd, buf, size_bytes, offset_bytes);
    uint64_t blocks = (size_bytes - head) / DIRECT_ALIGN * DIRECT_ALIGN,
             tail = end - (first + head + blocks);
    int64_t put = sys_write_full(fd, from, head, first);
    if (put < (int64_t)head) return put;
    put = write_blocks(d, fd, from + head, blocks, first + head);
    if (put < (int64_t)blocks) return put < 0 ? -1 : (int64_t)head + put;
    put = sys_write_full(fd, from + head + blocks, tail, first + head + blocks);
    return put < 0 ? -1 : (int64_t)(head + blocks) + put;
}
