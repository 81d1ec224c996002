/* offload/adam_chunk.h - Adam over a chunk of a block's vector, tensor by tensor, and the choice of
 * how its arrays are walked.
 *
 * Any thread; nothing is allocated; nobody waits. */
#ifndef OFFLOAD_ADAM_CHUNK_H
#define OFFLOAD_ADAM_CHUNK_H

#include "offload/adam.h"
#include "offload/chunk.h"

struct exec;

/* Where the three states of one chunk lie. `opt` holds n_elems of low (int16) or master (fp32),
 * then n_elems of exp_avg, then of exp_avg_sq. */
struct adam_chunk {
    uint8_t *param, *opt;
    const uint8_t *grad;
    uint8_t *param_out; /* where the new parameters go; NULL: in place */
};

/* The span of elements [from, to) of chunk c. */
struct adam_span adam_chunk_span(enum chunk_dtype dtype, const struct stk_chunk *c,
                                 const struct adam_chunk *at, uint32_t from, uint32_t to);

/* As chunk_pieces (chunk.h) for elements [begin, end) of chunk c, but only tensors with `touched`
 * set, and neighbours with equal coefficients in one call, which names the first of them. The
 * padding between them is in it: it holds zeros and they stay zero, and so a tensor of a hundred
 * elements costs no more per byte than one of a billion. Not with eps = 0, where 0 / 0 would leave
 * NaNs there. coef: of each tensor of the layout; those not touched are not read. fn runs between
 * adam_begin and adam_end. */
void adam_pieces(const struct stk_layout *l, const struct stk_chunk *c, uint32_t begin,
                 uint32_t end, const struct adam_coef *coef,
                 void (*fn)(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                            uint32_t n),
                 void *arg);

/* The step over these pieces. */
void adam_chunk_run(const struct adam_kernel *k, struct adam_way way, const struct stk_layout *l,
                    const struct stk_chunk *c, const struct adam_chunk *at,
                    const struct adam_coef *coef, uint32_t begin, uint32_t end);

/* The fastest way to walk these spans with that many threads, by a measurement of about
 * `ADAM_MEASURE_NS`; the default way where none is faster by 3 % or nothing can be measured
 * (simulation, no spans). The spans must hold zeros (parameters, moments, gradients), so that
 * running Adam over them changes nothing; large enough that no cache holds them. Blocks. */
#define ADAM_MEASURE_NS 200000000ull
struct adam_way adam_way_measure(const struct exec *ex, const struct adam_kernel *k,
                                 enum adam_layout layout, const struct adam_span *spans,
                                 uint32_t n_spans, uint32_t threads);
/* "512 ahead, ordinary stores" into buf (at least 48 bytes); returns buf. */
const char *adam_way_text(struct adam_way way, char *buf, size_t size_bytes);

/* What is tried; the first is the default. */
extern const struct adam_way adam_ways[];
extern const uint32_t adam_ways_n;

#endif
