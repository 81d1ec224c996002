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
#define REQUEST_BYTES_MAX (1ull << 30)

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

/* A border between two parts at which one request may go on in other memory. */
static bool joins(const struct iovec *a, const struct iovec *b, uint64_t border)
{
    return border % DIRECT_ALIGN == 0 && (uintptr_t)a->iov_base % MEMORY_ALIGN == 0 &&
           (uintptr_t)b->iov_base % MEMORY_ALIGN == 0;
}

/* What one request can take from the front: whole blocks all of it. 0: not as one request. */
static uint32_t front(const struct iovec *parts, uint32_t n, uint64_t at, uint64_t *size)
{
    uint32_t k = 1;
    *size = parts[0].iov_len;
    if (at % DIRECT_ALIGN != 0) return 0;
    for (; k < n && joins(&parts[k - 1], &parts[k], at + *size); k++) {
        if (*size + parts[k].iov_len > REQUEST_BYTES_MAX) break;
        *size += parts[k].iov_len;
    }
    while (k > 1 && (at + *size) % DIRECT_ALIGN != 0) *size -= parts[--k].iov_len;
    return k > 1 ? k : 0;
}

/* 1: all of them went. 0: they are to be written one by one (refused, or short). -1 + errno. */
static int write_together(struct direct *d, const struct iovec *parts, uint32_t n, uint64_t size,
                          uint64_t at)
{
    int64_t put = sys_write_parts(d->fd, parts, n, at);
    if (put < 0 && errno != EINVAL && errno != EINTR && errno != EAGAIN) return -1;
    if (put < 0 && errno == EINVAL) direct_close(d);
    return put == (int64_t)size;
}

int64_t direct_write_parts(struct direct *d, int fd, const struct iovec *parts, uint32_t n,
                           uint64_t offset_bytes)
{
    STK_ASSERT(n <= DIRECT_PARTS_MAX);
    uint64_t done = 0, size;
    for (uint32_t i = 0; i < n;) {
        uint32_t k = d->fd < 0 ? 0 : front(parts + i, n - i, offset_bytes + done, &size);
        int went = k ? write_together(d, parts + i, k, size, offset_bytes + done) : 0;
        if (went < 0) return -1;
        if (went) {
            done += size;
            i += k;
            continue;
        }
        for (uint32_t end = i + (k ? k : 1); i < end; i++) {
            int64_t put = direct_write(d, fd, parts[i].iov_base, parts[i].iov_len,
                                       offset_bytes + done);
            if (put < (int64_t)parts[i].iov_len) return put < 0 ? -1 : (int64_t)done + put;
            done += parts[i].iov_len;
        }
    }
    return (int64_t)done;
}
