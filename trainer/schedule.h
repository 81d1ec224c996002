/* trainer/schedule.h - the learning rate as a pure function of the number of updates done so far.
 *
 * u = 0 for the first update, total = steps of the whole run, w = --warmup, peak = --lr:
 *     u < w:  peak * (u + 1) / w
 *     else    p = (u - w) / max(1, total - w), at most 1
 *             constant: peak     linear: peak * (1 - p)     cosine: peak * (1 + cos(pi p)) / 2
 * So the first update uses peak / w, update w - 1 the peak. A skipped step does not advance u
 * (MPX-11): the next step tries the same rate. */
#ifndef TRAINER_SCHEDULE_H
#define TRAINER_SCHEDULE_H

#include "trainer/options.h"

double schedule_lr(enum schedule_kind kind, double peak, uint64_t warmup, uint64_t total,
                   uint64_t updates_done);

#endif
