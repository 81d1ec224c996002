/* trainer/options_impl.h - what options.c and options_check.c share. */
#ifndef TRAINER_OPTIONS_IMPL_H
#define TRAINER_OPTIONS_IMPL_H

#include "trainer/options.h"

/* A finite number, 0 or above. False: it is none; *out is unchanged. */
bool options_number(const char *text, double *out);
/* --measure-drives as stk_config.measure_ns has it. False: none of its values. */
bool options_measure(const struct run_opts *o, uint64_t *out_ns);
/* --optimizer-on-device as stk_config has it; eval has no such option: 0. False: none of its values. */
bool options_on_device(const struct run_opts *o, double *out);
/* --activations: a policy for all blocks, or a mix, "keep:8,recompute". False: no such value. */
bool options_activations(const char *text, stk_config *c);
stk_status options_check(const struct run_opts *o, uint32_t verb, struct stk_error *err);

#endif
