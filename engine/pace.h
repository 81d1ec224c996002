/* engine/pace.h - what yields to what where the host's memory is the limit: copies to the update, and the update
 * to copies.
 *
 * WHY. The update alone does not fill host memory (say 63 of 70 GB/s); copies beside it do, and what they take at
 * the link's full rate (26) is taken from the update. A step that is short of host memory is then as long as its
 * bytes, and as what was left idle while the update ran alone. So a copy that nothing waits for goes at the rate
 * that the update leaves, and lies under all of it.
 *
 * A COPY goes at its device's full rate unless all of this holds: the update team works; update and copy together
 * want more than there is; and the compute stream has a visit queued behind the one that runs, or the next visit
 * waits for an update and so for no copy. Then it is paced: to what the update leaves of the memory, or to what
 * empties the queue behind it within PACE_DRAIN_S, if that is more. Few copies are in flight, paced or not, so that
 * the next one can be fast or another.
 *
 * THE TEAM. What leaves the device in forward is waited for by visits that want its room, and competes with the
 * update. While such copies queue, a commit (plan.h), and an update that is ahead of the visits by PACE_BLOCKS_AHEAD
 * blocks, is made by so many members of the team as leave the copy its full rate.
 *
 * Pure: one set of rules for issue.c and for the prediction. Results never depend on it. Nothing here can stop a
 * run: all that is ready goes, if slowly. */
#ifndef ENGINE_PACE_H
#define ENGINE_PACE_H

#include "engine/plan.h"
#include "engine/stoker.h"

#define PACE_IN_FLIGHT 2u        /* paced copies a direction */
#define PACE_COPIES_IN_FLIGHT 4u /* copies a direction */
#define PACE_DRAIN_S 0.02
#define PACE_BLOCKS_AHEAD 2u

/* Figures of the machine; all 0: nothing is paced. */
struct pace {
    double least_bytes_per_s;                    /* what the update leaves of the host's memory */
    double in_bytes_per_s, out_bytes_per_s;      /* of the link; 0: not known */
    double shared_bytes_per_s;                   /* of the memory beside the update, when nothing is short */
    double team_part;                            /* of the update team that leaves a copy out its full rate */
};

/* What runs, by plan resource and by node (enum run_node_state). */
struct pace_now {
    const struct plan *plan;
    const uint8_t *node_state;
    uint32_t next_visit, visits_in_flight, updates_in_flight;
    uint64_t ready_bytes[2];                     /* of copies that are ready, in and out, but this one */
};

void pace_of_machine(const stk_machine *m, struct pace *out);
/* Bytes a second that a copy node may take; 0: as many as it can. */
double pace_copy(const struct pace *p, const struct pace_now *now, const struct plan_node *n);
/* How many of the team's members may work on an UPDATE or COMMIT. Less than all: alone. */
uint32_t pace_team(const struct pace *p, const struct pace_now *now, const struct plan_node *n, uint32_t members);

#endif
