/* trainer/options_impl.h - what options.c and options_check.c share. */
#ifndef TRAINER_OPTIONS_IMPL_H
#define TRAINER_OPTIONS_IMPL_H

#include "trainer/options.h"

stk_status options_check(const struct run_opts *o, uint32_t verb, struct stk_error *err);

#endif
