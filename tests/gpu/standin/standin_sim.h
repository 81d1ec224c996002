/* tests/gpu/standin/standin_sim.h - between the card (C++) and the lane that runs it (sim.c, which knows base/exec.h).
 * Simulation's thread. */
#ifndef TESTS_STANDIN_SIM_H
#define TESTS_STANDIN_SIM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* now: exec's time. kick: something was queued. Before standin_open. */
void standin_sim_attach(uint64_t (*now)(void *), void (*kick)(void *), void *arg);
/* Runs what begins or ends now; returns when something ends next, UINT64_MAX: nothing is running. */
uint64_t standin_sim_advance(void);

#ifdef __cplusplus
}
#endif

#endif
