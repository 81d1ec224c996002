/* engine/cores.h - who computes on which cores: how many threads each group gets, and on a machine of
 * several NUMA nodes which chunk's state lies and is updated on which.
 *
 * THE DIVISION. Groups that compute: the device where it computes on the host's cores, the update's
 * team, and lanes that work now and then (checksums, casts, a checkpoint; they are asleep else).
 *   compute  one thread a core. Never fewer for what runs beside it: results may depend on the number
 *            (gpu/ops.h), and must not depend on where states lie or on the mode of the update.
 *   update   one thread a core, too, where the device computes on the host: in `serial` the two take
 *            turns, in the other modes they share the cores as far as the update lies under forward
 *            and backward. Dividing the cores for good would leave some idle whenever only one of the
 *            two has work; bench/cores.py measures one thread fewer (slower) and one more (not
 *            faster beyond its noise; bench/results/cores.json, two cores). Where the device has processors of its own
 *            and state on NVMe keeps lanes at work, a machine of many cores leaves one to them: a
 *            chunk's update ends with its slowest slice, and memory is busy with fewer threads than all.
 * A number that the client gives wins.
 *
 * NODES. With several nodes each has an update team, bound to its processors, of its part of the
 * threads. cores_deal gives each chunk a team, neighbours in the order of the update to different ones,
 * in proportion to the threads; a chunk's optimizer state and gradient lie on its team's node (seal.c),
 * whole chunks and not slices of them, so that large pages stay whole. What several nodes read
 * (parameters, arenas) is interleaved. Bits do not depend on any of it. With one node, or fewer threads
 * than nodes, there is one team, unbound, and memory is left alone.
 *
 * Pure, but for cores_open. Application's thread. */
#ifndef ENGINE_CORES_H
#define ENGINE_CORES_H

#include "base/topology.h"

enum { CORES_TEAMS_MAX = 16 };

struct cores_ask {
    uint32_t compute, update; /* the client's; 0: not given */
    bool on_host;             /* the device computes on the host's cores */
    bool nvme;                /* there are folders for state */
};

struct cores {
    uint32_t compute, update;   /* threads */
    uint32_t all, cpus, quota;  /* cores and processors that may be used */
    uint32_t n_nodes, n_teams;
    uint32_t members[CORES_TEAMS_MAX]; /* of each team; team k is on node k where there are several */
};

void cores_divide(const struct topology *t, const struct cores_ask *ask, struct cores *out);
/* The line that says what was chosen and why. */
void cores_text(const struct cores *c, const struct cores_ask *ask, const struct topology *t, char *buf,
                size_t size_bytes);
/* team_of[i] of `n` chunks in the order of the update. */
void cores_deal(const struct cores *c, const uint64_t *size_bytes, uint32_t n, uint8_t *team_of);

#endif
