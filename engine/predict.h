/* engine/predict.h - how long a plan takes on a machine: a discrete-event run of its nodes.
 *
 * Pure: no clock, no device, no files. It is the same machine as engine/run.c in another form, node
 * by node: ready nodes wait in one heap a resource by rank, so many are in flight at once, visits are
 * handed out in order with at most ENG_VISITS_IN_FLIGHT queued, an edge between two visits is met
 * when the earlier is handed out and every other one at completion. Whoever changes those rules
 * changes predict_run.c too (tests/engine/test_predict.c compares both in virtual time).
 *
 * WHAT TAKES TIME is engine/predict.c's: SERVERS that each do one thing at a time (compute stream,
 * two copy streams, cast streams, update team, checksum lane, the engine's lane, and reads and writes of each drive),
 * each with a queue by class, then by arrival. A thing at a server has a time that it takes alone and
 * SHARES of what the hardware has only once: cores, DRAM, the link's two directions together, a
 * drive's two directions together. While the shares of what runs add up to more than there is,
 * everything that uses the short one slows down alike (max-min fair); but a drive's two directions move
 * equal bytes then, which is how the rate of both at once was measured.
 *
 * Times are double, in nanoseconds. Sizes of public figures: engine/stoker.h, stk_machine. */
#ifndef ENGINE_PREDICT_H
#define ENGINE_PREDICT_H

#include "engine/plan.h"
#include "engine/stoker.h"

/* What a place's visits take of the compute stream, alone, in ns, per micro-batch; `known` false:
 * from the plan's FLOPs and the machine's rate. Fused: backward_ns is the whole visit. */
struct predict_cost {
    bool known;
    double forward_ns, backward_ns; /* backward without recomputation */
    double recompute_ns;            /* what it costs on top */
    double forward_again_ns, backward_again_ns; /* that follow another visit of the place at once, and
                                                 * find in caches what it left */
};

struct predict_in {
    const struct plan *plan;
    const struct plan_input *input;
    const stk_machine *machine;
    const struct predict_cost *cost; /* of each place; NULL: none known */
    uint32_t parts;                  /* PLAN_RUN_UPDATE, PLAN_RUN_VISITS or both: a step in steady
                                      * state */
    bool norm_fails;                 /* speculate: the norm binds in every step, so that nothing is
                                      * tried; else it never does */
    bool overwrite_grads;            /* of the engine's configuration */
    uint32_t compute_threads, update_threads; /* 0: all cores */
    uint64_t drive_bytes;            /* most in flight per drive (io_cfg.depth_bytes); 0: no limit */
    const uint8_t *drive_of;         /* drive of each chunk and state, chunk * CHUNK_STATE_N + state,
                                      * then of each activation (plan_act_number); NULL: all on the first */
};

/* What the trace of a prediction needs; called at each node's completion, begin <= end. */
typedef void predict_node_fn(void *arg, uint32_t node, double begin_ns, double end_ns);

/* Runs one period from rest to rest, which every period is; `speculate`: periods until one begins as
 * another did, and the mean of those between (predict_periods.c), `each` for the last. STK_ERR_CONFIG: a
 * figure that the plan needs is missing (named). STK_ERR_STATE: the plan stops (it would in run.c, too). */
stk_status predict_run(const struct predict_in *in, predict_node_fn *each, void *arg,
                       stk_prediction *out, struct stk_error *err);

/* --- predict_run.c: one period ----------------------------------------------------------------- */

/* What a period leaves to the next, of each chunk: its speculative update was made; 1 << state: was fetched
 * ahead. */
#define PREDICT_MADE 0x80u
/* before, now: bytes of all chunks. before: what the period before left (not speculate: zeros). */
stk_status predict_period(const struct predict_in *in, predict_node_fn *each, void *arg, uint8_t *before,
                          uint8_t *now, stk_prediction *out, struct stk_error *err);
/* STK_ERR_CONFIG as of predict_run. */
stk_status predict_check(const struct predict_in *in, struct stk_error *err);

/* --- predict.c: servers and what they share --------------------------------------------------- */

#define PREDICT_DRIVES 16
enum predict_server {
    PREDICT_COMPUTE,
    PREDICT_COPY_IN,
    PREDICT_COPY_OUT,
    PREDICT_CAST0,
    PREDICT_CAST1,
    PREDICT_GATHER,
    PREDICT_TEAM,
    PREDICT_UPDATE_STREAM,      /* of the device */
    PREDICT_CHECKSUM,
    PREDICT_ENGINE,             /* on the host: its thread, between the end of one thing and the next */
    PREDICT_READ0,
    PREDICT_WRITE0 = PREDICT_READ0 + PREDICT_DRIVES,
    PREDICT_SERVERS = PREDICT_WRITE0 + PREDICT_DRIVES
};
enum predict_share {
    PREDICT_CORES,
    PREDICT_DRAM,
    PREDICT_LINK,
    PREDICT_DRIVE0,
    PREDICT_SHARES = PREDICT_DRIVE0 + PREDICT_DRIVES
};
#define PREDICT_SHARES_OF_ONE 3

/* A thing to do: alone it takes ns and so much of each share (1: all of it). */
struct predict_work {
    uint32_t node, stage;
    double ns;
    uint64_t bytes;             /* of a transfer on a drive */
    struct { uint8_t share; float part; } use[PREDICT_SHARES_OF_ONE];
    uint32_t n_uses;
    double weight;              /* of a transfer while its drive moves the other direction, too: its part
                                 * of the speed; 0: 1 */
};

#define PREDICT_QUEUE 320 /* at the engine all that is in flight */
struct predict_queued { uint64_t key; struct predict_work work; };
struct predict_one {            /* one server */
    struct predict_queued queue[PREDICT_QUEUE];
    uint32_t n;                 /* waiting */
    bool active;
    struct predict_work now;
    double left_ns;             /* alone */
    double speed;               /* 0..1 */
    double begin_ns;
};
struct predict_timer { double at_ns; uint64_t order; uint32_t node, stage; };

#define PREDICT_FIFO 32 /* of one direction are in the engine's hands at once (RUN_OPS_PER_RESOURCE) */
enum { PREDICT_IO_CLASSES = 3 };
struct predict_fifo { struct predict_work work[PREDICT_FIFO]; uint32_t first, n; };
struct predict_drive {          /* predict_io.c */
    struct predict_fifo waiting[PREDICT_IO_CLASSES][2];
    uint32_t in_flight[2], reads_ahead, reads_recent;
    uint64_t bytes[2], limit_bytes; /* in flight, and at most; 0: no limit */
    bool one_server;            /* both directions share it fully */
};

struct predict_world {
    double now_ns;
    struct predict_one one[PREDICT_SERVERS];
    double capacity[PREDICT_SHARES];
    struct predict_timer *timers; uint32_t n_timers, cap_timers;
    struct predict_drive drive[PREDICT_DRIVES];
    uint64_t order;             /* of arrival */
    double busy_ns[PREDICT_SERVERS], alone_ns[PREDICT_SERVERS];
    double used_ns[PREDICT_SHARES]; /* share x time */
    bool dirty;                 /* speeds are to be found again */
};

stk_status predict_world_new(struct predict_world **out, struct stk_error *err);
void predict_world_free(struct predict_world *w);
/* Joins a server's queue; lower class first, then arrival. */
void predict_put(struct predict_world *w, uint32_t server, uint32_t cls,
                 const struct predict_work *work);
/* False: no memory. */
bool predict_wait(struct predict_world *w, double ns, uint32_t node, uint32_t stage);
/* Moves to the next instant at which something ends; node and stage of one such thing, and when it
 * began. False: nothing is under way. Call again for others of the same instant. */
bool predict_next(struct predict_world *w, uint32_t *node, uint32_t *stage);

/* --- predict_io.c: which transfer goes to a drive next ------------------------------------------ */
/* cls: enum io_class. */
void predict_io_put(struct predict_world *w, uint32_t drive, uint32_t cls, bool write,
                    const struct predict_work *work);
void predict_io_done(struct predict_world *w, uint32_t drive, bool write, uint64_t bytes); /* latency
                                                                 * passed, too */

#endif
