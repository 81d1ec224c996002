/* nvme/store.h - the extent store: what lies where on the drives, which version, with which
 * checksum.
 *
 * An EXTENT is a fixed-size piece named by a dense id (the caller maps chunk and state to it). Its
 * bytes have a VERSION (the step that wrote them) and a CRC32C, both kept in memory and, for
 * durable steps, in a table on disk. Every get verifies length, version and checksum; a mismatch is
 * STK_ERR_CORRUPT and names extent, file and offset. The store does not know what bytes mean.
 *
 * FILES. In each given path the store makes `stoker-run-<run id>/` holding `lock` (an open file
 * lock; content: host, pid, start time), `extents-<k>.bin` and, where durable steps are possible,
 * `table.bin`; all preallocated in full before step 1, so ENOSPC comes early and never later. Two
 * runs on one path never meet. At open, run folders of dead runs (lock free) whose table holds
 * nothing valid are removed and named in `store_notes`; those of live runs are left alone; those
 * with a durable table are kept and named, until they are adopted or discarded. store_close
 * removes the run's folders unless a durable table was committed (see store_discard).
 *
 * STRIPING. Each extent lies whole on one path. Extents of one CLASS are spread in order of id, so
 * that any run of neighbours is shared out over the paths in proportion to their weights (a
 * smooth weighted round-robin): whatever class is streamed, all drives work. A path never gets more
 * than its limit; what no path has room for is refused with the numbers.
 *
 * VERSIONS. `room` slots per extent (1 for volatile classes). A slot is PROTECTED while a durable
 * table on disk, or one being committed, refers to it. A put goes to a slot that is not protected:
 * one that does not hold the newest version if there is one, else over that. If every slot is
 * protected, which a commit in flight brings about, the put waits for its end inside the store. (A
 * commit whose table could be neither finished nor taken back leaves its slots protected, too: puts
 * that find no slot then fail, with the class and the cause of that commit's failure, until a later
 * commit succeeds; with room 3 there is always one.)
 *   room 1: nothing durable. room 2: one durable step and the newest. room 3: a commit may be in
 *   flight while the next step writes.
 *
 * DURABLE STEPS. store_commit makes the newest versions of all extents outside volatile classes,
 * with the caller's payload, the state that a later process finds: (1) every file of extents is
 * flushed, on all drives; (2) the table (step, payload, slot, version and CRC of every extent, and
 * a CRC over all of it) is written to the older of the two halves of `table.bin` on every path;
 * (3) those are flushed; only then are the slots of the table before free. A crash at any instant
 * leaves, on every path, at least one half that is whole, and all bytes it refers to; the newest
 * whole table found on any path counts. A commit fails, with the path, when a name does not lead to
 * the open file any more: the folder was removed, moved, replaced or locked up. The halves are preallocated, so a commit needs no room and
 * no directory flush.
 *
 * THREADS. store_get/put/commit are called on the lane of its `io`; `done` runs on that lane.
 * Checksums are computed on lanes of the store's own (`checksum_lanes`), so the engine lane only
 * moves pointers. Several gets and puts of different extents may be in flight; of one extent:
 * either any number of gets or one put (STK_ASSERT; the plan proves it). store_find, store_open,
 * store_close: application's thread. */
#ifndef NVME_STORE_H
#define NVME_STORE_H

#include "nvme/io.h"

#define STORE_PATHS_MAX 16
#define STORE_CLASSES_MAX 8
#define STORE_RUN_ID_MAX 17 /* with the zero */
#define STORE_ALIGN 4096u /* every extent starts here and its room is rounded up to it */

struct store;

struct store_cfg {
    struct io *io;                    /* borrowed until store_close; the store adds its files to
                                       * it */
    struct exec *ex;
    struct exec_lane *lane;           /* the io's lane */
    const char *paths[STORE_PATHS_MAX];
    double weights[STORE_PATHS_MAX];  /* relative speed of each drive; all 0: equal; one 0 among
                                       * others: nothing goes there */
    uint64_t limits[STORE_PATHS_MAX]; /* most bytes on each path; 0: what is free there. Paths on
                                       * one file system share what is free */
    uint32_t n_paths;
    uint32_t n_extents;
    const uint64_t *extent_bytes;     /* payload of each; copied */
    const uint8_t *extent_class;      /* below STORE_CLASSES_MAX; NULL: all 0. Copied */
    uint32_t volatile_classes;        /* bit k: class k lives within a step: one slot, not in durable
                                       * tables */
    uint32_t room;                    /* 1..3, of the other classes */
    uint32_t checksum_lanes;          /* 0: 1 */
    bool no_checksums;                /* measured comparisons only; reported by store_describe */
    struct io_sim_disk *sim_disk;     /* with IO_SIM: where files are made; NULL otherwise */
    /* durable steps */
    char run_id[STORE_RUN_ID_MAX];    /* 16 of 0-9a-f; "": random. A folder of this name that is
                                       * there already: refused unless adopted */
    uint64_t payload_max_bytes;       /* > 0: store_commit may be called (room must be >= 2); most
                                       * bytes of its payload */
    bool adopt;                       /* take over the durable store `run_id` of a run that has
                                       * ended: its newest whole table says where everything lies.
                                       * Extents, classes, room and the set of paths (in any order)
                                       * must be as they were: STK_ERR_CONFIG names the difference,
                                       * and nothing is touched */
};

/* One transfer of one extent. Caller-owned until done. */
struct store_op {
    uint32_t extent;
    enum io_class cls;
    void *buf;              /* aligned to STORE_ALIGN; room for the extent's bytes rounded up to
                             * STORE_ALIGN */
    uint64_t version;       /* put: the new version. get: the version expected (UINT64_MAX: whatever
                             * is newest) */
    bool keep;              /* put: to a slot that is not the newest's, so that store_forget can take
                             * this version back. Needs room 2, with durable steps 3; where a commit
                             * in flight holds the slots the put waits for its end */
    bool summed;            /* put: `sum` is the payload's checksum, made when it was written (store_sum_part):
                             * the store reads it not once more */
    uint32_t sum;
    void (*done)(struct store_op *op);
    void *owner;
    /* results */
    stk_status status;
    struct stk_error error; /* sentence with extent, path, offset when status != STK_OK */
    uint64_t submit_ns, done_ns;
    uint64_t drive_ns;      /* of that time, at the drive: the rest waited for its turn there, or was
                             * the checksum's */
    /* private */
    struct io_req req[2];
    struct exec_task task;
    struct store *store;
    struct store_op *next;
    uint32_t crc, slot, state;
};

/* One commit. Caller-owned until done; at most one in flight (STK_ASSERT). No put outside volatile
 * classes may be in flight when it is submitted (STK_ASSERT): the state must be that of one moment.
 * Puts and gets may follow at once. */
struct store_commit {
    uint64_t step;
    const void *payload;    /* borrowed until store_commit_submit returns: it is copied */
    uint64_t payload_bytes;
    void (*done)(struct store_commit *c); /* io's lane */
    void *owner;
    /* results; on an error the table before stays what counts, and later commits may succeed */
    stk_status status;
    struct stk_error error; /* names path and what failed: flush of the extents, table write, its
                             * flush */
    bool lost;              /* the paths do not lead to the store's files any more (removed, moved,
                             * replaced, not permitted): no durable step of it can be found */
    bool doubt;             /* the failed table could not be taken back: what it refers to is not
                             * overwritten until a later commit counts, and with room 2 puts fail */
    uint64_t submit_ns, done_ns;
    /* private */
    struct io_req req[STORE_PATHS_MAX];
    struct exec_task task;
    struct store *store;
    uint32_t left, phase;
    bool failed;
};

/* Bytes on each path that store_open will need (rounded, all versions, table), for the memory table
 * and the refusal before anything is written. A pure function of the configuration (limits and
 * weights included): what is made where as much is free. Where less is free and limits are 0, the
 * store shares out by what is free instead, and says so in its notes. Limits that are too small:
 * the figures without limits. */
uint64_t store_need_bytes(const struct store_cfg *cfg, uint32_t path);
/* Host memory that the store will hold: tables of extents, names, and the commit's buffer. */
uint64_t store_memory_bytes(const struct store_cfg *cfg);
/* Checks room on every path (free space against need: STK_ERR_NOSPACE with the numbers), then makes
 * folder, lock and files, or adopts. Nothing is left behind on error; an adopted store is as it was
 * before. */
stk_status store_open(const struct store_cfg *cfg, struct store **out, struct stk_error *err);
/* Nothing in flight. Closes files; removes the run's folders unless a durable table counts there.
 * NULL allowed. */
void store_close(struct store *s);
/* The same, and an error that says what stayed: the folders that could not be removed, why, and what
 * to do (STK_ERR_STATE: they are not where they were made; STK_ERR_IO: they are there). */
stk_status store_close_left(struct store *s, struct stk_error *err);
/* The run's folders are removed at close, durable or not: what they held is not needed any more. */
void store_discard(struct store *s);

/* A durable store that lies on some paths and belongs to no live run. */
struct store_found {
    char run_id[STORE_RUN_ID_MAX];
    uint64_t step;              /* of its newest whole table */
    uint64_t size_bytes;        /* on all paths together */
    uint32_t n_paths;           /* the set it was made with: all are needed to adopt it */
    char *paths[STORE_PATHS_MAX];
    uint32_t n_extents;
    uint64_t *extent_bytes;
    uint8_t *extent_class;
    uint32_t volatile_classes, room;
    void *payload;
    uint64_t payload_bytes;
};
/* Reads tables; changes nothing. `run_id` NULL or "": any run's, the newest step. Owned by the
 * caller (store_found_free). STK_END: there is none, *out NULL. STK_ERR_STATE: the store is in use
 * by a live run (named). STK_ERR_CONFIG: a part of it lies on a path that was not given (named).
 * STK_ERR_CORRUPT: tables are there but none is whole: the sentence names each file and what is
 * wrong with it (a run that ended within its first commit looks so, too). A whole and complete
 * store is preferred to all of these. `disk`: the simulated one (which has no locks), or NULL. */
stk_status store_find(const char *const *paths, uint32_t n_paths, const char *run_id,
                      struct io_sim_disk *disk, struct store_found **out, struct stk_error *err);
void store_found_free(struct store_found *f);
/* Removes a found store's folders on all its paths. */
stk_status store_found_discard(struct store_found *f, struct io_sim_disk *disk,
                               struct stk_error *err);

/* Measured comparisons only, nothing in flight: a store made with checksums computes and checks none
 * until it is told to again. What was put meanwhile cannot be read afterwards. */
void store_checksums(struct store *s, bool on);

const char *store_describe(const struct store *s); /* "1 path, 12.3 GiB, room 1, crc32c sse4.2" */
/* What was found and removed at open: one sentence each. */
uint32_t store_notes(const struct store *s, const char *const **out);

/* A payload's checksum from parts, while they lie in a cache: by who made them, any threads, any order.
 * The xor of all parts, each with its place in the payload, is what store_sum takes; they must cover all
 * of the payload once, and it must not change any more until the put is done. Pure. */
uint32_t store_sum_part(const void *part, uint64_t size_bytes, uint64_t offset_bytes,
                        uint64_t payload_bytes);
uint32_t store_sum(uint32_t parts, uint64_t payload_bytes);

/* Lane only. Never block. STK_OK: op->done will be called once. */
stk_status store_put(struct store *s, struct store_op *op, struct stk_error *err);
stk_status store_get(struct store *s, struct store_op *op, struct stk_error *err);
/* Lane only. Never blocks. STK_OK: c->done will be called once. STK_ERR_CONFIG: the payload is
 * larger than announced, or the store was opened without durable steps. STK_ERR_STATE: the last put of an
 * extent (named) failed: put it again first. After an error in done the table before counts; if
 * taking the failed table back failed too, a later process may still find it, whole. */
stk_status store_commit_submit(struct store *s, struct store_commit *c, struct stk_error *err);
/* Lane only. Takes back the newest version of an extent, which must be `version`: the one before it
 * counts again, as if the put had not been. No get or put of the extent in flight (STK_ASSERT).
 * STK_ERR_STATE, and nothing changes: `version` is not the newest, the one before is not there any
 * more (its put had no `keep`, or it was forgotten already), or a durable table refers to it. */
stk_status store_forget(struct store *s, uint32_t extent, uint64_t version, struct stk_error *err);
/* Step of the durable table that counts; false: none. After an adoption: the one found. Lane, or
 * while nothing is in flight. */
bool store_durable(const struct store *s, uint64_t *step);
/* Newest complete version of an extent; UINT64_MAX: never written. */
uint64_t store_version(const struct store *s, uint32_t extent);
/* Application's thread: waits until no op is in flight. */
stk_status store_drain(struct store *s, uint64_t deadline_ns, struct stk_error *err);

struct store_stats {
    uint64_t get_bytes, put_bytes, gets, puts, verify_failures;
    uint64_t commits, commit_ns, puts_waited; /* puts that waited for a commit */
};
void store_stats_read(const struct store *s, struct store_stats *out);

/* What was written to and read from one path, for balance and wear. Any thread between steps. */
struct store_path_stats { uint64_t read_bytes, write_bytes, extents_bytes; };
void store_path_stats_read(const struct store *s, uint32_t path, struct store_path_stats *out);

/* io's number of the file that holds a path's extents, for a flush without a commit. False: nothing
 * lies there. */
bool store_file(const struct store *s, uint32_t path, uint32_t *out_file);

/* Where an extent's newest bytes lie (tests, inspect, error sentences). */
stk_status store_locate(const struct store *s, uint32_t extent, const char **out_path,
                        uint64_t *out_offset_bytes);

#endif
