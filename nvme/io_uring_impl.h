/* nvme/io_uring_impl.h - one ring per drive; shared by io_uring.c (moving parts) and
 * io_uring_register.c (buffers and files).
 *
 * A ring's submission side belongs to the io's lane, its completion side to the source (a thread of
 * exec's, or the simulation's loop). Set-up and registration happen on the application's thread,
 * before the lane submits. */
#ifndef NVME_IO_URING_IMPL_H
#define NVME_IO_URING_IMPL_H

#include "nvme/io_impl.h"

#include <liburing.h>

#define RING_BUFFERS_MAX 512
#define RING_BUFFER_BYTES_MAX (1ull << 30) /* the kernel's limit for one registered buffer */

struct ring_buffer { uint8_t *base; uint64_t size_bytes; };

struct ring {
    struct io *io;
    struct io_drive *drive;
    struct io_uring uring;
    struct exec_source source;
    int wake_fd;
    bool fixed_files, fixed_buffers;
    /* not even the self-test's buffer could be locked: said when there is a region to speak of */
    bool lock_refused;
    uint64_t refused_bytes; /* of regions that could not be registered */
    uint32_t n_buffers; /* index in the kernel's table = index here */
    struct ring_buffer buffers[RING_BUFFERS_MAX];
    /* lane */
    /* in the submission queue, not yet taken by the kernel; oldest first */
    struct io_part **prepared;
    uint32_t n_prepared;
    int broken_errno;
    /* lane and source */
    _Atomic uint32_t outstanding;
    /* orders the lane's writes to a part before the source's reads; the kernel does too, unseen by
     * C11 */
    _Atomic uint64_t starts;
};

/* Registers what can be registered with a new ring; what cannot be is noted. `f` is a file of its
 * drive, for the self-test. */
void ring_register_setup(struct ring *r, const struct io_file *f);
void ring_register_region(struct ring *r, const struct io_region *region);
void ring_register_file(struct ring *r, uint32_t index, int fd); /* fd -1: empties the place */
/* The registered buffer that holds all of [buf, buf + size), or -1. */
int ring_buffer_find(const struct ring *r, const uint8_t *buf, uint64_t size_bytes);

#endif
