/* nvme/io.h - asynchronous file transfers: one table of operations, three backends.
 *
 *   uring   io_uring: O_DIRECT where the file system has it, registered files and buffers where
 *           they work, one ring per drive
 *   posix   lanes that call pread/pwrite, for machines that refuse io_uring (containers do)
 *   sim     an in-memory disk with virtual time and seeded faults (nvme/io_sim.h)
 *
 * Contract (SPDK's): a request that io_submit accepted completes exactly once; a refused one
 * never. Completions run only from io_reap, never from inside io_submit, so no caller is
 * re-entered. `req->done` may submit again.
 *
 * Thread: one lane owns an `io` (given at io_open): io_submit, io_reap, io_cancel are called on
 * it. When completions arrive the backend posts `notify` to that lane (exec_post: coalesced);
 * the notify task calls io_reap. io_open, io_file_add, io_buffer_register and io_close are
 * called by the application's thread before the lane begins to submit / after io_drain.
 *
 * Results are read in three branches: error (res < 0), short (0 <= res < want: resubmitted from
 * the last aligned offset, a bounded number of times without progress, counted in stats),
 * complete. A request above IO_TRANSFER_MAX is split here; the caller sees one completion. At
 * end of file a read that stays short is an error: files here are preallocated.
 *
 * Order: among waiting requests DEMAND reads go first, then PREFETCH, then WRITE_BACK. Writes in
 * flight are limited to `write_depth` while reads are on the drive or were among its last
 * `depth` parts, so a read finds at most that many writes in front of it; and of the parts that
 * start while both wait, one in nine is a write, so steady reads starve none.
 *
 * Fork: an `io` belongs to the process that opened it. In a child of fork, calls that can return
 * a status return STK_ERR_STATE, the others do nothing, and the regions given to
 * io_buffer_register are not there: reading them faults (they are not copied, however large they
 * are).
 *
 * Signals: a write beyond RLIMIT_FSIZE fails with EFBIG. The kernel also sends SIGXFSZ to the
 * thread that writes; lanes block every signal and sys_write_some holds it, so it kills nobody.
 * One case is left to the application: io_uring with a simulated exec submits on the
 * application's thread, which must ignore SIGXFSZ then, as the command and Python do. */
#ifndef NVME_IO_H
#define NVME_IO_H

#include "base/exec.h"
#include "base/status.h"

#define IO_TRANSFER_MAX                                                                            \
    (8u << 20) /* bytes of one kernel request; far below Linux's 0x7ffff000 cap (NVM-14) */

enum io_kind { IO_AUTO /* uring, else posix with the reason */, IO_URING, IO_POSIX, IO_SIM };
enum io_op { IO_READ, IO_WRITE, IO_FLUSH /* fdatasync of the file */ };
enum io_class { IO_DEMAND, IO_PREFETCH, IO_WRITE_BACK, IO_CLASS_N };

struct io;
struct io_sim_cfg; /* nvme/io_sim.h */

/* One transfer. Caller-owned; must stay where it is until done has been called. Zero the private
 * part once. */
struct io_req {
    /* set by the caller */
    enum io_op op;
    enum io_class cls;
    uint32_t file;         /* from io_file_add */
    void *buf;             /* borrowed until done; aligned to io_align (FLUSH: NULL) */
    uint64_t offset_bytes; /* aligned to io_align */
    uint64_t size_bytes;   /* a multiple of io_align */
    void (*done)(struct io_req *req); /* called once, from io_reap */
    void *owner;           /* the caller's */
    /* set before done */
    stk_status status;     /* STK_OK: all bytes moved. STK_ERR_IO with os_errno (0: stayed short).
                            * STK_ERR_INTERRUPTED: cancelled */
    int os_errno;
    uint64_t moved_bytes;
    uint64_t submit_ns, done_ns; /* exec clock: accepted, completion noticed */
    uint64_t start_ns;     /* its first part was given to the drive: before it waited for its turn */
    /* private */
    struct io_req *next, *prev;
    uint64_t issued_bytes;
    uint32_t parts_in_flight, retries, state, slot;
};

struct io_cfg {
    enum io_kind kind;
    struct exec *ex;
    struct exec_lane *lane;          /* owner of submit and reap */
    struct exec_task *notify;        /* posted to `lane` when there is something to reap */
    uint32_t depth;                  /* kernel requests in flight per drive; 0: 32. posix: at most
                                      * two per worker, so that the urgent overtakes the rest */
    uint32_t write_depth;            /* of these, writes beside reads; 0: depth / 2 */
    uint64_t depth_bytes;            /* most bytes in flight per drive (one part always goes), half
                                      * of them writes beside reads: what waits behind more is only
                                      * late. 0: no limit but the depths */
    uint32_t workers;                /* posix: lanes per drive; 0: 16 */
    bool buffered;                   /* never use O_DIRECT (tests, file systems without it) */
    bool no_registration;            /* never register buffers or files */
    /* debugging (NVM-37): from io_submit until `done` the whole pages of a write's buffer are
     * read-only (mprotect), so that whoever touches a buffer on its way faults at that place.
     * Buffers must be readable and writable memory, and each in one write at a time */
    bool protect_writes;
    const struct io_sim_cfg *sim;    /* IO_SIM: the disk; borrowed until io_close */
};

struct io_stats { /* since io_open; any thread may copy it between steps */
    uint64_t read_bytes, write_bytes, reads, writes, flushes;
    uint64_t short_transfers, retries, cancelled, errors;
    uint64_t busy_ns;        /* time with at least one request in flight */
    /* Over all drives: time in which a drive had as much in flight as it may have and more waited for
     * it, counted when that ends, and bytes that arrived meanwhile: their ratio is a drive's own rate,
     * by whatever mix of reads and writes it was asked for */
    uint64_t full_ns, full_bytes;
    uint64_t in_flight_max;
};

/* Opens a backend. IO_AUTO tries io_uring and falls back to posix; io_describe says which and why.
 * STK_ERR_UNSUPPORTED: the kind asked for is refused by this machine (the sentence names seccomp,
 * the sysctl kernel.io_uring_disabled or memlock and the remedy). `*out` is NULL on error. */
stk_status io_open(const struct io_cfg *cfg, struct io **out, struct stk_error *err);
/* Application's thread; for when io_drain gave up. Nothing new is started, submits are refused, and
 * the backends end: io_uring's ring is closed (the kernel keeps the pages of what it still moves),
 * the posix threads are waited for. What is done by then is reaped as ever; what is not never calls
 * done. io_close does it too. NULL allowed. */
void io_stop(struct io *io);
/* Nothing may be in flight (io_drain first, or io_stop). Closes files. NULL allowed. */
void io_close(struct io *io);
/* "io_uring, O_DIRECT, registered buffers and files" / "posix threads (io_uring refused: EPERM
 * ...)"; valid until io_close. */
const char *io_describe(const struct io *io);
enum io_kind io_kind_of(const struct io *io);
/* True: files are open and every one is on a drive and transferred around the page cache. False:
 * what is measured is memory's speed (BEN-01, NVM-22). */
bool io_direct(const struct io *io);

/* Opens an existing file for transfers (created and sized by the store). `drive` groups files that
 * share a device (one ring each). O_DIRECT is tried unless cfg.buffered; refusal falls back to
 * buffered with a note in io_describe. Alignment comes from statx(STATX_DIOALIGN), else the file
 * system's block size. */
stk_status io_file_add(struct io *io, const char *path, uint32_t drive, uint32_t *out_file,
                       struct stk_error *err);
/* Closes and forgets the files (nothing in flight). */
void io_file_remove(struct io *io, uint32_t file);
/* Alignment in bytes that memory, offset and size of every request must have: the largest over all
 * files; a power of two, at least 512. Callers plan with 4096 before files exist; io_file_add
 * refuses a file that needs more than 4096. */
uint32_t io_align(const struct io *io);

/* Announces a region that buffers will lie in (the arenas); registered with the ring where it
 * helps. Failure is not an error: counted and described, transfers work without. */
void io_buffer_register(struct io *io, void *base, uint64_t size_bytes);

/* Accepts one request (STK_OK) or refuses it (STK_ERR_CONFIG: unaligned, out of the file's bounds
 * is not checked; STK_ERR_STATE: io is closing). Never blocks; the queue is unbounded (the caller's
 * nodes are the queue). Lane only. */
stk_status io_submit(struct io *io, struct io_req *req, struct stk_error *err);
/* Runs `done` of up to `max` finished requests, in order of completion; returns how many. Lane
 * only. */
uint32_t io_reap(struct io *io, uint32_t max);
/* Tries to take back a request that is not yet with the kernel; it then completes with
 * STK_ERR_INTERRUPTED from io_reap. */
void io_cancel(struct io *io, struct io_req *req);
/* Requests accepted and not yet completed. */
uint64_t io_in_flight(const struct io *io);
/* Application's thread, while the lane is running: waits until nothing is in flight (the notify
 * task keeps reaping). Deadline on exec_now_ns's clock; STK_ERR_STALLED names the oldest request's
 * file and offset. */
stk_status io_drain(struct io *io, uint64_t deadline_ns, struct stk_error *err);
void io_stats_read(const struct io *io, struct io_stats *out);

#endif
