/* gpu/coll.h - collectives over ranks: a status per call, a deadline, the same order on all ranks.
 * Backends: local (one rank), mpi and nccl (with the ZeRO issue). Each is a second .c file behind
 * this header.
 *
 * Host buffers here; device buffers where the backend says so. Blocking; called from a lane that
 * may block (a gather lane of the engine) or the application's thread at start. `deadline_ns`: from
 * the call; STK_ERR_STALLED names the missing ranks. Reductions add in rank order with fp32
 * accumulation, so the result does not depend on the backend. */
#ifndef GPU_COLL_H
#define GPU_COLL_H

#include "base/status.h"

struct coll;
enum coll_dtype { COLL_BYTES, COLL_F32, COLL_F64, COLL_BF16, COLL_U64 };

/* RANK and WORLD_SIZE 1 or unset: local. More ranks: STK_ERR_UNSUPPORTED with a sentence until the
 * backends exist. */
stk_status coll_open(struct coll **out, struct stk_error *err);
void coll_close(struct coll *c);
uint32_t coll_rank(const struct coll *c);
uint32_t coll_size(const struct coll *c);
/* counts[r]: elements that rank r contributes (uneven shards); recv holds all, in rank order. send
 * may be recv's own place. */
stk_status coll_all_gather(struct coll *c, const void *send, void *recv, const uint64_t *counts,
                           enum coll_dtype t, uint64_t deadline_ns, struct stk_error *err);
stk_status coll_reduce_scatter(struct coll *c, const void *send, void *recv, const uint64_t *counts,
                               enum coll_dtype t, uint64_t deadline_ns, struct stk_error *err);
stk_status coll_all_reduce(struct coll *c, void *buf, uint64_t count, enum coll_dtype t,
                           uint64_t deadline_ns, struct stk_error *err);
stk_status coll_broadcast(struct coll *c, void *buf, uint64_t size_bytes, uint32_t root,
                          uint64_t deadline_ns, struct stk_error *err);
stk_status coll_barrier(struct coll *c, uint64_t deadline_ns, struct stk_error *err);

#endif
