/* bench/bench.h - `stoker bench WHAT ...`: measurements of this machine with the code that training
 * uses. The only header of this room that others may include.
 *
 * Prints to stdout, errors as one sentence to stderr. Application's thread; blocks until done or
 * until *stop (SIGINT and SIGTERM set it). */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include <stdatomic.h>
#include <stdbool.h>

/* argv without the program and the verb. Exit code: 0 done, 1 operating error, 2 bad use, 130
 * stopped by a signal (what was measured until then has been printed and written). */
int bench_main(int argc, char **argv, const _Atomic bool *stop);

#endif
