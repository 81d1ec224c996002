/* nvme/measure_impl.h - what measure*.c share. Private to nvme/measure*.c and their tests.
 *
 * measure.c        files, the first full write, a run from set-up to result (application's thread)
 * measure_lane.c   places, requests, accounting: all that runs on the lane
 * measure_pattern.c  what a block carries, and what a wrong one is called
 * measure_store.c  the same run through the extent store */
#ifndef NVME_MEASURE_IMPL_H
#define NVME_MEASURE_IMPL_H

#include "nvme/measure.h"
#include "nvme/store.h"

#define MEASURE_PATHS_MAX 16
#define MEASURE_UNIT_BYTES 4096u     /* what one mark covers */
#define MEASURE_STALL_NS 60000000000u /* without any completion: the drive is stuck */

/* --- the pattern ------------------------------------------------------------------------------ */

struct measure_mark { /* first bytes of each unit */
    uint64_t magic, id; /* id: of the measurement */
    uint32_t file, crc; /* CRC32C of the unit with this field zero */
    uint64_t offset_bytes, pass;
};

struct measure_pattern {
    uint64_t id;
    uint64_t base[MEASURE_UNIT_BYTES / 8]; /* random: the same for all units, before their key */
};

void measure_pattern_init(struct measure_pattern *p, uint64_t id);
void measure_pattern_fill(const struct measure_pattern *p, uint8_t *unit, uint32_t file,
                          uint64_t offset_bytes, uint64_t pass);
/* True: the unit is what it should be. */
bool measure_pattern_check(const struct measure_pattern *p, const uint8_t *unit, uint32_t file,
                           uint64_t offset_bytes, uint64_t pass);
/* Puts into words what a unit that failed the check is: another block, an older pass, zeros, torn,
 * flipped bits, other bytes. */
void measure_pattern_explain(const struct measure_pattern *p, const uint8_t *unit, uint32_t file,
                             uint64_t offset_bytes, uint64_t pass, char *buf, size_t size_bytes);

/* --- the object ------------------------------------------------------------------------------- */

struct measure_file {
    char *path;       /* for sentences */
    char open_as[64]; /* a nameless file: /proc/self/fd/N; "": by its name */
    int fd;           /* keeps the nameless file; -1 */
    bool made;        /* there is a name to remove */
    uint32_t *pass;   /* of each unit: how often it was written */
};

/* The extent store under a run (measure_store.c). */
struct measure_through_store {
    struct exec *ex;          /* borrowed, or the measurement's own */
    struct exec_lane *lane;
    struct exec_task notify;
    struct io *io;
    struct store *store;
    uint64_t extent_bytes, n_extents;
    uint64_t *extent_sizes;
    uint8_t *path_of;         /* of each extent */
    uint64_t version;         /* of the newest put */
    uint32_t depth;
    void *registered;         /* buffer that the io knows */
    bool broken;              /* stalled: io and store are gone */
};

struct measure_run;
struct measure {
    struct measure_cfg cfg;   /* as at open; paths copied into files */
    struct measure_file files[MEASURE_PATHS_MAX];
    uint64_t file_bytes;      /* in use */
    struct measure_pattern pattern;
    bool stamped;             /* every unit carries the mark of its pass */
    struct exec *own_ex;
    uint8_t *buffer;          /* kept from run to run */
    uint64_t buffer_bytes;
    struct measure_through_store *through;
    struct measure *lender;   /* its buffer is used; NULL: an own one */
};

/* --- a run (lane) ----------------------------------------------------------------------------- */

/* One walk over a file: its reads, or its writes. */
struct measure_stream { uint64_t next, first; };

struct measure_slot {
    struct measure_run *run;
    struct io_req req;
    struct store_op *op;      /* through the store, else NULL */
    uint8_t *buf;             /* of its `rounds` places, one after the other */
    uint64_t turn;
    uint32_t file;
    uint64_t block;
    bool writes;              /* what it does next */
    bool alternates;          /* mixed at depth 1 */
};

struct measure_target { /* a file with its places */
    uint8_t *busy;            /* of each block: a request is on its way */
    uint64_t n_blocks;
    struct measure_stream reads, writes;
};

struct measure_run {
    struct measure *m;
    const struct measure_cfg *cfg;
    bool fill;                /* each block once, in order, until all are written or time is up */
    uint64_t least_bytes;     /* fill: time is not up before */
    uint64_t block_bytes, file_bytes;
    struct exec *ex;
    struct exec_lane *lane;
    struct io *io;
    struct exec_task notify, begin, flush;
    struct exec_event ended;
    uint32_t io_file[MEASURE_PATHS_MAX];
    uint32_t n_targets;
    struct measure_target target[MEASURE_PATHS_MAX];
    uint32_t *order;          /* random: a permutation of the blocks */
    uint32_t n_slots, live;
    uint8_t *buffer;          /* rounds x n_slots x block_bytes */
    uint64_t rounds;
    struct measure_slot *slots;
    struct io_req *flushes;
    uint32_t flushes_left;
    /* accounting */
    uint64_t start_ns, since_ns, last_ns, last_read_ns, last_write_ns;
    uint64_t issued_bytes, moved_bytes, filled_blocks;
    bool counting, ending, wrote;
    uint64_t read_bytes, write_bytes;
    struct measure_path {
        uint64_t bytes[2], last_ns[2]; /* reads; writes, with their flush */
        uint32_t live;                 /* slots at work */
    } path[MEASURE_PATHS_MAX];
    struct measure_result *out;
    stk_status status;
    struct stk_error error;
    _Atomic uint64_t progress;
};

static inline uint64_t measure_block_len(const struct measure_run *r, uint64_t block)
{
    uint64_t at = block * r->block_bytes, left = r->file_bytes - at;
    return left < r->block_bytes ? left : r->block_bytes;
}

/* Task of the lane: submits the first requests. `ended` is set when the last one, and the flush
 * behind writes, has completed. */
void measure_lane_begin(void *run);
/* A completion of a slot's request, whatever moved it. */
void measure_lane_done(struct measure_slot *slot, bool read, stk_status status,
                       uint64_t submit_ns, uint64_t done_ns);
void measure_lane_error(struct measure_run *r, const struct stk_error *why);

/* measure.c */
stk_status measure_check(const struct measure_cfg *cfg, struct stk_error *err);
/* The object without files: copies of what cfg borrows, the pattern, an execution of its own where
 * cfg has none. */
stk_status measure_new(const struct measure_cfg *cfg, struct measure **out, struct stk_error *err);
struct exec *measure_exec(const struct measure *m, const struct measure_cfg *cfg);
/* Places, slots and buffers of a run whose cfg, block_bytes, file_bytes, ex, lane and m are set. */
stk_status measure_run_places(struct measure_run *r, uint32_t n_targets, uint32_t depth,
                              struct stk_error *err);
/* From the first request to the last; r->io is set. STK_ERR_STALLED: r->io has been stopped. */
stk_status measure_run_wait(struct measure_run *r, struct stk_error *err);
/* Figures of a run that has ended. */
void measure_run_result(const struct measure_run *r);
void measure_run_free(struct measure_run *r);
/* measure_open, the first write ended early after `fill_ns` (0: not; the rest of the files is then
 * not used, and at least `least_bytes` of each are written). */
stk_status measure_open_within(const struct measure_cfg *cfg, uint64_t fill_ns,
                               uint64_t least_bytes, struct measure **out, struct stk_error *err);

/* measure_rates.c: measure_rates over any backend: `base` gives kind, sim, ex. */
stk_status measure_rates_with(const struct measure_cfg *base, const struct measure_load *load,
                              uint64_t budget_ns, uint64_t write_bytes_max,
                              struct measure_rates *out, struct stk_error *err);

/* measure_store.c */
stk_status measure_store_run(struct measure *m, const struct measure_cfg *cfg,
                             struct measure_result *out, struct stk_error *err);
void measure_store_free(struct measure *m);
/* Submits a slot's get or put. */
stk_status measure_store_submit(struct measure_slot *slot, struct stk_error *err);

#endif
