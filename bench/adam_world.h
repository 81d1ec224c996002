/* bench/adam_world.h - the memory of a model's state, walked by Adam in the ways that training
 * walks it, and by loops that compute nothing.
 *
 * Application's thread. One mapping holds everything, in large pages where the system gives them,
 * so that Adam and the loops beside it see the same pages. */
#ifndef BENCH_ADAM_WORLD_H
#define BENCH_ADAM_WORLD_H

#include "bench/limit.h"
#include "offload/adam_chunk.h"
#include "offload/adam_narrow.h"

enum adam_path {
    ADAM_ARRAYS, /* each thread one part of the five arrays: `stk_adam_bf16` on large tensors */
    ADAM_CHUNKS, /* chunk by chunk on the update team: what the engine does */
    ADAM_SMALL,  /* the same, all tensors of ADAM_SMALL_ELEMS */
    ADAM_CACHED, /* each thread again and again over what its cache holds: the arithmetic alone */
    ADAM_PATH_N
};
enum { ADAM_SMALL_ELEMS = 64, ADAM_CACHED_ELEMS = 8192 };
const char *adam_path_name(enum adam_path p);

struct adam_world;
/* `params` is rounded up to a multiple of 64. Without `chunks`: no ADAM_CHUNKS and ADAM_SMALL.
 * Errors: memory. */
stk_status adam_world_open(uint64_t params, uint32_t threads, bool chunks, struct adam_world **out,
                           struct stk_error *err);
void adam_world_close(struct adam_world *w);
uint64_t adam_world_params(const struct adam_world *w);
uint64_t adam_world_small_tensors(const struct adam_world *w);

/* State zero, gradients of either sign about 0.1. Before the first run of a layout, and between
 * arrays and chunks. `moments`, until the next call: of ADAM_CHUNKS and ADAM_SMALL; fp32 for all else. */
void adam_world_fill(struct adam_world *w, enum adam_layout layout, enum chunk_moments moments);
/* Seconds of one step over all parameters. ADAM_CHUNKS and ADAM_SMALL: not ADAM_F32. */
double adam_world_run(struct adam_world *w, enum adam_path path, enum adam_layout layout,
                      const struct adam_kernel *k, struct adam_way way);
/* The loops that could be the limit of what was filled in, over the same memory. */
void adam_world_limits(struct adam_world *w, enum adam_layout layout, struct limit_set *set);
/* Bytes of the mapping that lie in large pages; 0: none, or not known. */
uint64_t adam_world_large_page_bytes(const struct adam_world *w);

#endif
