/* trainer/cmd.h - the verbs of the command and what they share: sentences on stderr, exit codes,
 * help.
 *
 * Exit codes: 0 done, 1 operating error, 2 bad use (an unknown, missing or contradicting option).
 * Every error is one line "stoker: <sentence>" on stderr. */
#ifndef TRAINER_CMD_H
#define TRAINER_CMD_H

#include "base/opts.h"
#include "base/status.h"

enum { EXIT_DONE = 0, EXIT_OPERATING = 1, EXIT_USE = 2 };

/* argv without the program and the verb. */
int cmd_init(int argc, char **argv);
int cmd_train(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_export(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_prepare(int argc, char **argv);
int cmd_bench(int argc, char **argv);
/* bench_step.c: `stoker bench step`, argv without "step". */
int bench_step(int argc, char **argv);

/* Prints err's sentence; returns EXIT_OPERATING. */
int cmd_fail(const struct stk_error *err);
int cmd_fail_use(const struct stk_error *err);
/* True if --help or -h is among the arguments before a "--": prints `usage`, then the table (may be
 * NULL). */
bool cmd_help(int argc, char **argv, const char *usage, const struct opt_row *rows,
              uint32_t n_rows);

#endif
