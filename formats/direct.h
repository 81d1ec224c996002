/* formats/direct.h - writing a file past the page cache: a large file then costs the processor no
 * copy, and leaves no burst of dirty pages to the drive that others wait for.
 *
 * Whole blocks of DIRECT_ALIGN go to a second descriptor, opened with O_DIRECT, from where they lie
 * or, if that is no multiple of 512, through the caller's bounce buffer. What is left at both ends of
 * a range goes through the ordinary descriptor: never the same page. A file system that refuses
 * is written to in the ordinary way, without a word. Parts that follow one another in the file go with
 * one request where their borders are such blocks: at 1 MiB a request the kernel's part of a write was
 * measured at 37 ms of processor time a GB, at 8 MiB at 8. One thread at a time per object;
 * blocking. */
#ifndef FORMATS_DIRECT_H
#define FORMATS_DIRECT_H

#include "base/status.h"
#include <sys/uio.h>

#define DIRECT_ALIGN 4096u

struct direct {
    int fd;                /* -1: not used */
    unsigned char *bounce; /* aligned to DIRECT_ALIGN, borrowed */
    uint64_t bounce_bytes; /* a multiple of it, not 0 */
};

/* `path` is open for writing already. */
void direct_open(struct direct *d, const char *path, void *bounce, uint64_t bounce_bytes);
void direct_close(struct direct *d);
/* As sys_write_full; `fd` is the ordinary descriptor. */
int64_t direct_write(struct direct *d, int fd, const void *buf, uint64_t size_bytes,
                     uint64_t offset_bytes);
/* The same for parts that lie one behind the other in the file, in their order; n up to
 * DIRECT_PARTS_MAX. */
#define DIRECT_PARTS_MAX 64u
int64_t direct_write_parts(struct direct *d, int fd, const struct iovec *parts, uint32_t n,
                           uint64_t offset_bytes);

#endif
