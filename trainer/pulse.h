/* trainer/pulse.h - the heartbeat (USE-07): while something takes long, a line every 10 s says
 * what, how far and for how long.
 *
 * One thread of its own that only prints. The application's thread names the phase; a phase without
 * a name prints nothing. */
#ifndef TRAINER_PULSE_H
#define TRAINER_PULSE_H

#include "base/status.h"

struct pulse;
/* NULL: no thread could be started; every call below accepts NULL. */
struct pulse *pulse_open(void);
void pulse_close(struct pulse *p);
/* As pulse_phase, counting `unit`s ("windows") instead of bytes; both strings are borrowed. */
void pulse_count(struct pulse *p, const char *what, uint64_t total, const char *unit);
/* `what` is borrowed until the next call; NULL: nothing runs. total_bytes 0: no share is known.
 * Starts the phase's clock. */
void pulse_phase(struct pulse *p, const char *what, uint64_t total_bytes);
void pulse_done(struct pulse *p, uint64_t done_bytes);

#endif
