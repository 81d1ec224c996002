/* bench/bench.h - `stoker bench WHAT ...`: measurements of this machine with the code that training
 * uses. The only header of this room that others may include.
 *
 * Prints to stdout, errors as one sentence to stderr. Application's thread; blocks until done or
 * until *stop (SIGINT and SIGTERM set it). */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include "base/status.h"
#include <stdatomic.h>

/* A measurement that a room above brings (it needs a model); run gets argv without its name. */
struct bench_entry {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
};

/* argv without the program and the verb. Exit code: 0 done, 1 operating error, 2 bad use, 130
 * stopped by a signal (what was measured until then has been printed and written). */
int bench_main(int argc, char **argv, const _Atomic bool *stop, const struct bench_entry *more,
               uint32_t n_more);

/* --- limits of this machine, beside a step (step_limit.c) --------------------------------------
 * A step's products by the matrix library alone, shape by shape, and memory read and written back.
 * Measured in rounds, so that the caller can alternate them with steps: a busy machine slows both. */

/* c[m, n] = a[m, k] b[k, n], `count` times in a step; wide: c is f32 where a and b are bf16. */
struct bench_product {
    uint64_t m, n, k;
    bool wide;
    double count;
};
struct bench_limits;
/* products: copied; equal shapes are measured once. */
stk_status bench_limits_open(uint32_t threads, const struct bench_product *products, uint32_t n,
                             uint32_t rounds_max, struct bench_limits **out, struct stk_error *err);
stk_status bench_limits_round(struct bench_limits *l, struct stk_error *err);
void bench_limits_close(struct bench_limits *l); /* NULL allowed */

/* From the medians over the rounds so far (the first is left out when there are more). */
struct bench_rates {
    double flops_per_s; /* all products of the step, each shape by its fastest way */
    double way_flops_per_s[5]; /* all by one way, as rate_way_name orders them; 0: not possible */
    double bytes_per_s; /* read and written back */
};
void bench_limits_rates(const struct bench_limits *l, struct bench_rates *out);

/* --- what a step consists of (step_report.c) ------------------------------------------------- */
struct bench_part {
    const char *what;
    double seconds, flops, bytes; /* of one step; flops 0: judged by its bytes */
    uint64_t calls;
    bool overlapped; /* not part of the step's time: it ran beside it */
};
void bench_step_print(const struct bench_part *parts, uint32_t n, const struct bench_rates *rates);
/* A list of {what, seconds, flops, bytes, rate, limit, share, calls, overlapped}; rates in FLOP/s or
 * bytes/s. */
stk_status bench_step_json(const char *file, const struct bench_part *parts, uint32_t n,
                           const struct bench_rates *rates, struct stk_error *err);

#endif
