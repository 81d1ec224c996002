/* trainer/wear.h - what a run says of its drives: bytes of a step, wear, the busiest resource.
 * Application's thread, between steps. */
#ifndef TRAINER_WEAR_H
#define TRAINER_WEAR_H

#include "engine/stoker.h"
#include <jansson.h>

struct wear { /* sums over this process's steps */
    uint64_t steps;
    double step_s, compute_s, busy_s, drive_s;
    double full_s, full_bytes;                      /* with a drive's queue full */
    double step_read, step_write;                   /* by the steps themselves */
    /* p99 of reads in the worst step, [0] with no write beside them: of all, of those that something
     * waits for, at the drive alone */
    uint64_t whole_ns[2], demand_ns[2], at_drive_ns[2];
    uint64_t short_transfers, retries;    /* as stk_step_stats has them: totals */
    double read[STK_NVME_MAX], write[STK_NVME_MAX]; /* of each folder */
    uint64_t seen_read[STK_NVME_MAX], seen_write[STK_NVME_MAX];
};

/* After seal, dry too: bytes of a step on each drive, a day's at most, what the drive bears. */
void wear_start(const stk_engine *e);
/* Planned bytes of a step, over all drives. */
void wear_step_bytes(const stk_engine *e, double *read, double *write);
/* Before the first step: what fills moved does not count. */
void wear_begin(struct wear *v, const stk_engine *e);
/* Adds a step; what moved on each folder since the last call: [{path, read, write}], the caller's. */
json_t *wear_step(struct wear *v, const stk_engine *e, const stk_step_stats *s, double step_s);
/* After the last update has been written: writes per step and day as measured, days that drives
 * last, which resource bound the steps. visits_alone_s: what a step's visits take where they share
 * their cores with nothing; 0: not known, or they share none. */
void wear_end(struct wear *v, const stk_engine *e, double visits_alone_s);

#endif
