/* bench/pairs.h - a measured function beside its limit, in turn, until the median of their ratios
 * is known well enough (design section 12), and what is told of it.
 *
 * Pure but for pairs_run's calls. Application's thread. */
#ifndef BENCH_PAIRS_H
#define BENCH_PAIRS_H

#include "bench/nvme_impl.h"

#include <jansson.h>
#include <stdatomic.h>

struct pairs_rule {
    uint32_t min, max;      /* pairs */
    double width;           /* stop when the 95 % interval is within this share of the median */
    double seconds;         /* or after so many (0: no limit), when `min` is reached */
    const _Atomic bool *stop;
};

struct pairs {
    uint32_t n;
    double ours_s[NVME_PAIRS_MAX], limit_s[NVME_PAIRS_MAX];
    double ours_bytes, limit_bytes; /* of one pass each */
    /* made by pairs_finish */
    double median_s, low_s, high_s, p25_s, p75_s; /* low, high: 95 % interval of the median */
    double bytes_per_s, limit_bytes_per_s, share, share_low, share_high;
};

/* Calls ours(arg) and limit(arg), which return seconds, in turn; each pair the other one first. One
 * of each before, not counted. limit NULL: ours alone, `max` times or for `seconds`. */
void pairs_run(struct pairs *p, const struct pairs_rule *rule, double (*ours)(void *arg),
               double (*limit)(void *arg), void *arg);
/* Fills the figures from the pairs. */
void pairs_finish(struct pairs *p);
/* median_s, p25_s, p75_s, low_s, high_s, bytes_per_s, limit_bytes_per_s, share_of_limit,
 * share_low, share_high, pairs; null where there was no limit. */
void pairs_json(const struct pairs *p, json_t *to);
/* Writes the list into the file and releases it. */
stk_status pairs_write(json_t *list, const char *file, struct stk_error *err);

#endif
