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

/* The coefficients of a step, of all tensors of a layout. Few are different, and 4 bytes a tensor are read
 * in time where 40 are not: neighbours of one tensor of 64 elements are 1.6 KB of state. */
#define ADAM_COEF_NONE UINT32_MAX
struct adam_coefs {
    struct adam_coef *set;  /* the different ones; room for one a tensor */
    uint32_t *of;           /* of each tensor: number of its set; ADAM_COEF_NONE: no step is taken */
};
/* All ADAM_COEF_NONE. False: no memory; adam_coefs_free all the same. */
bool adam_coefs_alloc(struct adam_coefs *c, uint32_t n_tensors);
void adam_coefs_free(struct adam_coefs *c);
static inline const struct adam_coef *adam_coef_of(const struct adam_coefs *c, uint32_t tensor)
{
    return &c->set[c->of[tensor]];
}

/* As chunk_pieces (chunk.h) for elements [begin, end) of chunk c, both multiples of 64, but only tensors
 * with coefficients, and neighbours with the same set in one call, which names the first of them. The
 * padding between two tensors with coefficients is in it: it holds zeros and they stay zero, and so a tensor
 * of a hundred elements costs hardly more per byte than one of a billion. Not with eps = 0, where 0 / 0 would
 * leave NaNs there. fn runs between adam_begin and adam_end. */
void adam_pieces(const struct stk_layout *l, const struct stk_chunk *c, uint32_t begin,
                 uint32_t end, const struct adam_coefs *coefs,
                 void (*fn)(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                            uint32_t n),
                 void *arg);

/* Slices of a chunk for each member of the update team. With one the members go the same distance apart
 * through the same arrays, and whoever is held up holds up the chunk: 8 % slower, measured. */
enum { ADAM_MEMBER_SLICES = 4 };

/* The step over these pieces. */
void adam_chunk_run(const struct adam_kernel *k, struct adam_way way, const struct stk_layout *l,
                    const struct stk_chunk *c, const struct adam_chunk *at,
                    const struct adam_coefs *coefs, uint32_t begin, uint32_t end);

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
