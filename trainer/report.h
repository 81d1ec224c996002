/* trainer/report.h - what a run prints: the start table, a line per step, a JSON line per step.
 *
 * Stdout belongs to the application's thread and pulse.c; lines are whole. JSON lines are flushed
 * one by one; a number that is not finite is null. */
#ifndef TRAINER_REPORT_H
#define TRAINER_REPORT_H

#include "engine/stoker.h"
#include "base/status.h"
#include "trainer/options.h"
#include "trainer/wear.h"
#include <stdio.h>

struct train;

struct report {
    FILE *log;
    bool terminal;
    uint64_t begin_ns, last_line_ns; /* CLOCK_MONOTONIC */
    uint64_t first_step;             /* of this process */
    double exposed_s;                /* sums over this process's steps */
    double step_s;
    struct wear wear;
};

struct report_step {
    uint64_t step, tokens;
    double loss, lr, step_s;
    uint64_t targets;
    bool evaluated;
    double eval_loss;
    stk_step_stats stats;
};

stk_status report_open(struct report *r, const struct run_opts *o, struct stk_error *err);
void report_close(struct report *r);
/* The engine's notes, then bytes by tier and owner. */
void report_engine(const stk_engine *e);
/* Table of bytes by tier and owner, the engine's notes, optimizer and dtypes, what goes to NVMe per
 * step. */
void report_start(const struct train *t);
stk_status report_step(struct report *r, struct train *t, const struct report_step *s,
                       struct stk_error *err);
void report_end(struct report *r, const struct train *t);

#endif
