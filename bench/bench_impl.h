/* bench/bench_impl.h - what the measurements share: exit codes, sentences, the flag of signals. */
#ifndef BENCH_BENCH_IMPL_H
#define BENCH_BENCH_IMPL_H

#include "base/opts.h"
#include "base/status.h"
#include <stdatomic.h>

enum { BENCH_DONE = 0, BENCH_FAILED = 1, BENCH_USE = 2, BENCH_STOPPED = 130 };

int bench_nvme(int argc, char **argv);
int bench_adam(int argc, char **argv);
int bench_copy(int argc, char **argv);

/* Prints err's sentence; returns `code`. */
int bench_fail(const struct stk_error *err, int code);
/* True if --help or -h is among the arguments before a "--": prints usage, table and `more`. */
bool bench_help(int argc, char **argv, const char *usage, const struct opt_row *rows,
                uint32_t n_rows, const char *more);
/* The flag that SIGINT and SIGTERM set. The second signal ends the process at once. */
const _Atomic bool *bench_signals(void);
/* Seconds on a monotonic clock. */
double bench_now_s(void);

#endif
