/* bench/limit.h - what memory allows: loops that walk the same arrays in the same way as a measured
 * function and compute nothing.
 *
 * A group is 64 elements of every array. Values do not change: what is written is what was read, or
 * (write-only) what the neighbouring array holds. Compiled once per instruction set
 * (limit_isa.c). Application's thread; OpenMP threads inside. */
#ifndef BENCH_LIMIT_H
#define BENCH_LIMIT_H

#include "base/cpu.h"

enum { LIMIT_ARRAYS = 5, LIMIT_GROUP = 64, LIMIT_ISAS = 3 };

struct limit_job {
    uint8_t *base[LIMIT_ARRAYS]; /* on whole cache lines */
    uint64_t groups;
    uint64_t zero;               /* 0, unknown to the compiler: written = read ^ zero */
    uint32_t ahead;              /* groups; lines are fetched so far ahead; 0: not at all */
    bool stream;                 /* non-temporal stores */
};

/* Groups [from, to); returns a mix of what was read, so that reads are not left out. */
typedef uint64_t (*limit_fn)(const struct limit_job *j, uint64_t from, uint64_t to);

enum limit_shape {
    LIMIT_BF16_SPLIT, /* as Adam's: read and write 2 + 2 + 4 + 4 bytes, read 2 */
    LIMIT_FP16,       /* write 2; read and write 4 + 4 + 4; read 2 */
    LIMIT_F32,        /* read and write 4 + 4 + 4, read 4: three arrays from four */
    LIMIT_MOMENTS_BF16, /* read and write 2 + 2 + 2 + 2, read 2 */
    LIMIT_MOMENTS_8BIT, /* read and write 2 + 2 + 1 + 1, read 2 */
    LIMIT_ONE,        /* read and write one array of 4 */
    LIMIT_READ,       /* read 4 */
    LIMIT_COPY,       /* read 4, write 4 */
    LIMIT_CAST,       /* read 4, write 2 */
    LIMIT_SHAPE_N
};
const char *limit_name(enum limit_shape s);
/* Bytes that an element moves between memory and processor, counted as peers count: what is read
 * and what is written. */
uint64_t limit_bytes(enum limit_shape s);
/* Seconds of one pass with that many threads, each over one contiguous part. */
double limit_run(enum limit_shape s, const struct limit_job *j, uint32_t threads);

/* Several loops over the same memory; the fastest in bytes per second is the limit. */
enum { LIMIT_LOOPS_MAX = 24 };
struct limit_loop {
    enum limit_shape shape;
    struct limit_job job;
    double bytes, best_s; /* best_s: of the trial */
};
struct limit_set {
    uint32_t n, best;
    struct limit_loop loop[LIMIT_LOOPS_MAX];
};
/* Adds the shape with and without fetching ahead, with ordinary and with non-temporal stores. */
void limit_add(struct limit_set *set, enum limit_shape shape, const struct limit_job *job);
/* Runs every loop `rounds` times in turn and finds the one with the best median. */
void limit_try(struct limit_set *set, uint32_t rounds, uint32_t threads);
/* "4 arrays rmw, 1 read; fetched ahead; ordinary stores" into buf; returns buf. */
const char *limit_loop_text(const struct limit_loop *l, char *buf, size_t size_bytes);

#endif
