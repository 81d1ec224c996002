/* nvme/store.h - the extent store: what lies where on the drives, which version, with which
 * checksum.
 *
 * An EXTENT is a fixed-size piece named by a dense id (the caller maps chunk and state to it). Its
 * bytes have a VERSION (the step that wrote them) and a CRC32C, both kept in memory and, for
 * durable steps, in a table on disk. Every get verifies length, version and checksum; a mismatch is
 * STK_ERR_CORRUPT and names extent, file and offset. The store does not know what bytes mean.
 *
 * FILES. In each given path the store makes `stoker-run-<random>/` holding `lock` (an open file
 * lock; content: host, pid, start time) and `extents-<k>.bin`, preallocated in full before step 1,
 * so ENOSPC comes early. Two runs on one path never meet. At open, run folders of dead runs (lock
 * free) that hold no durable table are removed and named in `store_notes`; those of live runs are
 * left alone. store_close removes the run's folder unless it is durable.
 *
 * VERSIONS OF ROOM: `room` slots per extent. 1: a put overwrites in place (nothing durable). 2, 3:
 * a put goes to a free slot and the old slot is freed when the put is complete and no durable table
 * refers to it.
 *
 * THREADS. store_get/put/... are called on the lane of its `io`; `done` runs on that lane.
 * Checksums are computed on lanes of the store's own (`checksum_lanes`), so the engine lane only
 * moves pointers. Several gets and puts of different extents may be in flight; of one extent:
 * either any number of gets or one put (STK_ASSERT; the plan proves it). */
#ifndef NVME_STORE_H
#define NVME_STORE_H

#include "nvme/io.h"

#define STORE_PATHS_MAX 16
#define STORE_ALIGN 4096u /* every extent starts here and its room is rounded up to it */

struct store;

struct store_cfg {
    struct io *io;                    /* borrowed until store_close; the store adds its files to
                                       * it */
    struct exec *ex;
    struct exec_lane *lane;           /* the io's lane */
    const char *paths[STORE_PATHS_MAX];
    double weights[STORE_PATHS_MAX];  /* relative speed of each drive; all 0: equal */
    uint32_t n_paths;
    uint32_t n_extents;
    const uint64_t *extent_bytes;     /* payload of each; copied */
    uint32_t room;                    /* 1..3 */
    uint32_t checksum_lanes;          /* 0: 1 */
    bool no_checksums;                /* measured comparisons only; reported by store_describe */
    struct io_sim_disk *sim_disk;     /* with IO_SIM: where files are made; NULL otherwise */
};

/* One transfer of one extent. Caller-owned until done. */
struct store_op {
    uint32_t extent;
    enum io_class cls;
    void *buf;              /* aligned to STORE_ALIGN; room for the extent's bytes rounded up to
                             * STORE_ALIGN */
    uint64_t version;       /* put: the new version. get: the version expected (UINT64_MAX: whatever
                             * is newest) */
    void (*done)(struct store_op *op);
    void *owner;
    /* results */
    stk_status status;
    struct stk_error error; /* sentence with extent, path, offset when status != STK_OK */
    uint64_t submit_ns, done_ns;
    /* private */
    struct io_req req[2];
    struct exec_task task;
    struct store *store;
    struct store_op *next;
    uint32_t crc, slot, state;
};

/* Bytes on each path that store_open will need (rounded, all versions), for the memory table and
 * the refusal before anything is written. */
uint64_t store_need_bytes(const struct store_cfg *cfg, uint32_t path);
/* Checks room on every path (free space against need: STK_ERR_NOSPACE with the numbers), then makes
 * folder, lock and files. Nothing is left behind on error. */
stk_status store_open(const struct store_cfg *cfg, struct store **out, struct stk_error *err);
/* Nothing in flight. Closes files, removes the run folder. NULL allowed. */
void store_close(struct store *s);
const char *store_describe(const struct store *s); /* "1 path, 12.3 GiB, room 1, crc32c sse4.2" */
/* What was found and removed at open: one sentence each. */
uint32_t store_notes(const struct store *s, const char *const **out);

/* Lane only. Never block. STK_OK: op->done will be called once. */
stk_status store_put(struct store *s, struct store_op *op, struct stk_error *err);
stk_status store_get(struct store *s, struct store_op *op, struct stk_error *err);
/* Newest complete version of an extent; UINT64_MAX: never written. */
uint64_t store_version(const struct store *s, uint32_t extent);
/* Application's thread: waits until no op is in flight. */
stk_status store_drain(struct store *s, uint64_t deadline_ns, struct stk_error *err);

struct store_stats { uint64_t get_bytes, put_bytes, gets, puts, verify_failures; };
void store_stats_read(const struct store *s, struct store_stats *out);

/* Where an extent's newest bytes lie (tests, inspect, error sentences). */
stk_status store_locate(const struct store *s, uint32_t extent, const char **out_path,
                        uint64_t *out_offset_bytes);

#endif
