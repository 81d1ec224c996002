/* trainer/signals.h - SIGINT and SIGTERM: the first asks the run to stop after its step, the second
 * ends the process at once (exit code 130). The one process-wide state of the command: a signal
 * handler can reach nothing else. */
#ifndef TRAINER_SIGNALS_H
#define TRAINER_SIGNALS_H

#include <stdbool.h>

void signals_install(void);
bool signals_stop(void); /* a signal has come */

#endif
