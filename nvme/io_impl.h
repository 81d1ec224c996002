/* nvme/io_impl.h - what nvme/io*.c share: requests are cut into PARTS (one kernel request each),
 * and a backend moves parts.
 *
 * io.c owns queues, order, splitting, the reading of results and statistics; all of that is touched
 * by the io's lane only. A backend is a table of functions; it gets parts through `start`, and
 * gives each back exactly once through io_part_done, from any thread. Parts travel back on a
 * lock-free list (`finished_parts`), which the lane empties in io_reap. */
#ifndef NVME_IO_IMPL_H
#define NVME_IO_IMPL_H

#include "nvme/io.h"

#include <stdatomic.h>

#define IO_FILES_MAX 64
#define IO_DRIVES_MAX 16
#define IO_REGIONS_MAX 64
#define IO_DEPTH_DEFAULT 32
#define IO_DEPTH_MAX 1024
#define IO_WORKERS_DEFAULT 16
#define IO_FRUITLESS_MAX 4 /* tries in a row without progress before a transfer counts as failed */
/* Where reads and writes of a drive both wait without end, one part in so many is a write: reads
 * keep their latency, and the write-back that would free their buffers still gets through. */
#define IO_READS_PER_WRITE 8
#define IO_NOTES_MAX 8
#define IO_NOTE_TEXT_MAX 320

struct io_file {
    bool used, direct;
    bool in_memory;       /* on tmpfs: there is no drive */
    int fd;               /* real files; -1 on the simulated disk */
    uint32_t index, drive, align;
    /* a short transfer goes on from a multiple of this: align, or 1 where there is no O_DIRECT */
    uint32_t retry_align;
    void *impl;           /* backend's */
    char *path;
};

struct io_part {
    struct io *io;
    struct io_drive *drive;
    struct io_req *req;
    struct io_file *file;
    enum io_op op;
    uint8_t *buf;           /* what remains of it */
    uint64_t offset_bytes, size_bytes;
    uint64_t flight_bytes;  /* what it counts among the drive's bytes in flight */
    int64_t result;         /* bytes, or -errno; written by the backend before io_part_done */
    uint32_t fruitless;     /* tries in a row that moved nothing */
    uint32_t index;         /* in drive->parts */
    uint32_t generation;    /* counts the starts of this slot: completions carry it (NVM-34) */
    bool started;
    struct io_part *next;   /* free list, or finished list */
    struct exec_task task;  /* backend's */
    uint64_t word[2];       /* backend's */
};

struct io_queue { struct io_req *head, *tail; };

struct io_drive {
    bool open;
    /* the io's, or posix where io_uring was the io's choice and gives this drive no ring */
    const struct io_backend *backend;
    uint32_t index, depth, write_depth;
    struct io_part *parts;   /* depth of them */
    struct io_part *free_parts;
    uint32_t reads_in_flight, writes_in_flight; /* parts */
    uint64_t bytes_in_flight[2]; /* reads, writes */
    uint32_t reads_ahead;    /* read parts started since the last write part while one waited */
    uint32_t reads_recent;   /* write parts to go until the last read is forgotten */
    struct io_queue waiting[IO_CLASS_N][2]; /* reads; writes and flushes */
    bool kick;               /* parts were started since the last kick */
    bool full;               /* since full_since_ns: something waits for a place */
    uint64_t full_since_ns;
    void *impl;              /* backend's */
};

struct io_region { void *base; uint64_t size_bytes; };

struct io_backend {
    const char *name;
    /* Application's thread. A failure leaves nothing behind. */
    stk_status (*open)(struct io *io, struct stk_error *err);
    void (*close)(struct io *io); /* no io_part_done after it returns */
    /* the most parts under way that are of use; may be NULL */
    uint32_t (*depth_max)(const struct io *io);
    stk_status (*drive_open)(struct io *io, struct io_drive *d, struct io_file *first,
                             struct stk_error *err);
    void (*drive_close)(struct io *io, struct io_drive *d);
    stk_status (*file_open)(struct io *io, struct io_file *f, struct stk_error *err);
    void (*file_close)(struct io *io, struct io_file *f);
    /* its drive is open now; may be NULL */
    void (*file_join)(struct io *io, struct io_drive *d, struct io_file *f);
    void (*region_add)(struct io *io, const struct io_region *r);
    void (*describe)(const struct io *io, char *buf, size_t size_bytes);
    /* Lane. */
    void (*start)(struct io *io, struct io_part *p); /* takes it; may hold it back until kick */
    void (*kick)(struct io *io, struct io_drive *d); /* hands what was started to the kernel */
    /* before close: takes tasks off the lane; may be NULL */
    void (*quiesce)(struct io *io);
};

extern const struct io_backend io_backend_uring, io_backend_posix, io_backend_sim;

struct io_counters { /* written by the lane, readable anywhere */
    _Atomic uint64_t read_bytes, write_bytes, reads, writes, flushes;
    _Atomic uint64_t short_transfers, retries, cancelled, errors, busy_ns, in_flight_max;
    _Atomic uint64_t full_ns, full_bytes;
};

struct io {
    struct io_cfg cfg; /* defaults filled in */
    const struct io_backend *backend;
    void *impl;
    enum io_kind kind;
    uint32_t align;
    /* A page with a 1 that children of fork see as 0, so that asking costs no system call; NULL on
     * kernels without it (before 4.14) */
    const uint8_t *owner_mark;
    int owner_pid;
    bool closing;            /* lane: nothing is started any more */
    bool stopped;            /* application's thread: the backends have ended */
    struct io_file files[IO_FILES_MAX];
    struct io_drive drives[IO_DRIVES_MAX];
    struct io_region regions[IO_REGIONS_MAX];
    uint32_t n_regions;
    char notes[IO_NOTES_MAX][IO_NOTE_TEXT_MAX];
    uint32_t n_notes;
    char description[256 + IO_NOTES_MAX * (IO_NOTE_TEXT_MAX + 2)];
    /* lane */
    /* starts what waits; coalesces the submits of one task into one batch */
    struct exec_task pump;
    struct io_queue issued;     /* all parts with the backend */
    struct io_queue finished;   /* done not called yet */
    uint64_t busy_since_ns;
    struct io_counters count;
    /* shared */
    _Atomic(struct io_part *) finished_parts;
    _Atomic uint64_t in_flight;
    struct exec_event drained, answered;
    struct exec_task ask;       /* lane task of io_drain and io_close */
    char oldest[320];           /* answer of `ask` */
};

/* io.c: STK_ERR_STATE in a child of fork. */
stk_status io_check_owner(const struct io *io, struct stk_error *err);
/* io.c: sets up the task that starts what waits. */
void io_pump_init(struct io *io);
/* Any thread: p->result is set; the part goes back to the lane and the owner is notified. */
void io_part_done(struct io_part *p);
/* Application's thread: one sentence for io_describe; repeated ones are dropped. */
void io_note(struct io *io, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void io_note_drop(struct io *io, const char *begin); /* those that begin so */
/* io_file.c: opens a real file (O_DIRECT if it can be), finds its alignment. */
stk_status io_file_open_real(struct io *io, struct io_file *f, struct stk_error *err);
void io_file_close_real(struct io *io, struct io_file *f);
/* io_file.c: asks for large pages under a region of buffers, and that children of fork do not
 * get it; content stays. `io_region_release`: children get it again. */
void io_region_prepare(const struct io_region *r);
void io_region_release(const struct io_region *r);
/* "O_DIRECT", "buffered" or "O_DIRECT and buffered" over the open files. */
const char *io_direct_text(const struct io *io);

#endif
