/* trainer/signals.h - SIGINT and SIGTERM: the first asks the run to stop when it can, the second
 * ends the process at once (exit code 130). The one process-wide state of the command: a signal
 * handler can reach nothing else. */
#ifndef TRAINER_SIGNALS_H
#define TRAINER_SIGNALS_H

#include <stdatomic.h>
#include <stdbool.h>

/* `doing` is said at the first signal ("stopping after this step"); kept. Returns the flag that it
 * sets. */
const _Atomic bool *signals_install(const char *doing);
void signals_doing(const char *doing); /* from now on; kept */
bool signals_stop(void); /* a signal has come */

#endif
