/* trainer/forecast.h - what a step will take: printed before the first one, and beside what was
 * measured after the last.
 *
 * Order: forecast_machine, run_open, forecast_measure, run_seal, forecast_make; then forecast_step
 * after each step, forecast_end. Nothing here ends a run: what cannot be predicted is a sentence.
 * Application's thread. */
#ifndef TRAINER_FORECAST_H
#define TRAINER_FORECAST_H

#include "engine/stoker.h"
#include "trainer/run.h"
#include <jansson.h>

#define FORECAST_STEPS 255 /* the newest so many are what the prediction is compared with */
#define FORECAST_FIGURES 7 /* step, compute, waits for nvme, copy, update, gather, other */

struct forecast {
    bool wanted, measured;     /* measured: machine is the one at hand */
    bool known;                /* prediction holds */
    stk_machine machine;
    stk_prediction prediction;
    char why[800];             /* why it is not known */
    double step[FORECAST_STEPS][FORECAST_FIGURES]; /* seconds */
    uint64_t n_steps, n_bound; /* counted, the first of the process not; with a norm that bound */
    bool first_passed;
};

/* --machine NAME or FILE: reads it. share/machines beside the program's folder holds those that come
 * with stoker (docs: share/machines/README.md). */
stk_status forecast_machine(struct forecast *f, const struct run_opts *o, struct stk_error *err);
void forecast_measure(struct forecast *f, struct run *r);
void forecast_make(struct forecast *f, struct run *r);
/* `all`: every resource. */
void forecast_print(const struct forecast *f, const struct run_opts *o, bool all);
void forecast_step(struct forecast *f, const stk_step_stats *s);
/* Seconds that the visits of a step take on cores they share with nothing, as tried at the start; 0: not
 * known, or the device has processors of its own. */
double forecast_visits_alone_s(const struct forecast *f);
void forecast_end(const struct forecast *f, const struct run_opts *o);
/* The prediction as an object; NULL: no memory. */
json_t *forecast_json(const struct forecast *f, const struct run_opts *o);

#endif
