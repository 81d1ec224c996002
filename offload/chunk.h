/* offload/chunk.h - the main data structure: blocks, tensors, chunks, and where their bytes are.
 * Read this file first.
 *
 * A BLOCK is used together (embedding, one decoder layer, head). Its tensors form one flat vector:
 * trainable tensors first, then frozen ones, each aligned to 64 elements, the frozen part to
 * CHUNK_FROZEN_ALIGN, the whole padded to 64. A table of boundaries gives each rank its SHARD. A
 * CHUNK is a fixed-size piece of the shard (chunk_elems elements, the last one of the trainable and
 * of the frozen part shorter): the unit of NVMe transfer and of the update. A tensor larger than
 * any buffer is just more chunks. A chunk never mixes trainable and frozen elements.
 *
 * STATES of a chunk of n elements (n is a multiple of 64):
 *     CHUNK_PARAM  2n bytes     bf16 or fp16, authoritative
 *     CHUNK_OPT    bf16: 10n    [low int16 n][exp_avg f32 n][exp_avg_sq f32 n];  fp16: 12n [master
 *             f32 n][exp_avg][exp_avg_sq]; with moments in fewer bits (stk_block.moments):
 *             [...][exp_avg bf16 n][exp_avg_sq bf16 n], or [...][exp_avg code n][exp_avg_sq code n]
 *             [absmax of exp_avg f32 n/64][of exp_avg_sq f32 n/64] (offload/adam_narrow.h)
 *     CHUNK_GRAD   2n           16-bit gradient between backward and the update
 * Frozen chunks have CHUNK_PARAM only.
 *
 * INVARIANTS (asserts and tests cite them)
 *   INV-1  between steps the newest version of each state is at its home: host memory (`host`), the
 *          device's memory (`device`) or the extent store (`extent`); but a gradient may lie in the slot of the next update
 *          (`grad_at`)
 *   INV-2  PARAM and OPT of a chunk always carry the same version (the step whose update wrote
 *          them), except between UPDATE and WRITE_BACK of that chunk
 *   INV-3  a buffer with I/O or a copy in flight belongs to that operation; nobody reads or writes
 *          it until its completion ran on the engine lane
 *   INV-4  only the engine lane changes a chunk's fields after seal; the update team and streams
 *          only touch bytes that an issued node names
 *   INV-5  GRAD is written once per step, after the block's last backward visit, and read once, by
 *          that step's update
 *   INV-6  at most one writer of an extent, and no reader with it (the plan's edges prove it)
 *
 * LIFE OF A CHUNK'S STEP (arrows are plan nodes; engine/issue.c takes them)
 *     at home --FETCH--> staged --UPDATE--> new, staged --WRITE_BACK--> at home          (NVMe
 *             homes)
 *     at home --UPDATE--> at home                                                         (host
 *             homes)
 *     at home --DEVICE_UPDATE--> at home, read there by visits                  (homes on the device)
 *     PARAM at home --FETCH/COPY_IN--> cached on device --VISIT...--> dropped (a copy; never
 *             written back)
 *     accumulator --GRAD_CAST--> 16-bit --GRAD_OUT--> host --WRITE_BACK--> GRAD at home
 *             (or, of a chunk fetched ahead for the next update: into its slot there, and no further) */
#ifndef OFFLOAD_CHUNK_H
#define OFFLOAD_CHUNK_H

#include "base/convert.h"
#include "base/status.h"

#define CHUNK_ALIGN_ELEMS 64u
#define CHUNK_FROZEN_ALIGN                                                                         \
    2048u /* where the frozen part of a block begins: 4 KiB of 16-bit parameters, what direct I/O
           * needs */
#define CHUNK_ELEMS_DEFAULT (512u * 1024u)

enum chunk_state { CHUNK_PARAM, CHUNK_OPT, CHUNK_GRAD, CHUNK_STATE_N };
enum chunk_home {
    CHUNK_HOST,
    CHUNK_NVME,
    CHUNK_DEVICE /* the device's memory: all that there is of a block, or nothing */
};
enum chunk_dtype { CHUNK_BF16, CHUNK_FP16 };
enum chunk_moments { CHUNK_MOMENTS_F32, CHUNK_MOMENTS_BF16, CHUNK_MOMENTS_8BIT };
#define CHUNK_NO_EXTENT UINT32_MAX

struct stk_tensor {
    char *name;             /* owned */
    uint32_t block;
    bool frozen;
    bool decay;             /* weight decay applies */
    bool touched;           /* the due update applies to it. Application's thread between runs */
    bool got_gradient;      /* own order: a gradient arrived in this step; becomes `touched` at its
                             * end */
    uint64_t n_elems;
    uint64_t first_elem;    /* in the block's flat vector; a multiple of 64 */
    uint64_t steps;         /* updates applied to this tensor: Adam's t. Engine lane */
};

struct stk_block {
    char *name;             /* owned */
    uint32_t first_tensor, n_tensors;
    uint32_t first_chunk, n_chunks;         /* of this rank's shard */
    uint32_t n_chunks_trainable;            /* these come first */
    uint64_t elems, elems_trainable;        /* of the flat vector, padded to 64 */
    enum chunk_moments moments;             /* how the moments of its chunks are kept. Set after
                                             * layout_build, before anything is placed */
};

struct stk_chunk {
    uint32_t id;            /* dense from 0, block after block */
    uint32_t block;
    uint64_t first_elem;    /* in the block's flat vector */
    uint32_t n_elems;       /* multiple of 64 */
    bool frozen;
    uint8_t home[CHUNK_STATE_N];            /* enum chunk_home */
    void *host[CHUNK_STATE_N];              /* home is host: where (borrowed from the engine's
                                             * arenas); else NULL */
    void *device[CHUNK_STATE_N];            /* home is the device's memory: where; only device operations
                                             * follow it; else NULL */
    uint32_t extent[CHUNK_STATE_N];         /* home is NVMe: id in the store; else
                                             * CHUNK_NO_EXTENT */
    uint64_t version;       /* step whose update wrote PARAM and OPT; 0: as filled */
    uint64_t grad_version;  /* step that wrote GRAD */
    void *grad_at;          /* home of GRAD is NVMe, but it lies in the slot of the next update: where;
                             * else NULL */
    uint8_t summed;         /* bit by state: its update made the checksum of what is now to be written
                             * home (store_sum). From UPDATE to WRITE_BACK */
    uint32_t checksum[CHUNK_GRAD];          /* of PARAM and OPT where `summed` says so */
    struct convert_sum sum; /* of this step's 16-bit gradient; valid from GRAD_CAST to NORM */
};

/* All of a model, built by engine/config.c. */
struct stk_layout {
    enum chunk_dtype dtype;
    uint32_t chunk_elems;
    uint32_t n_blocks, n_tensors, n_chunks;
    struct stk_block *blocks;
    struct stk_tensor *tensors;             /* in block order; inside a block trainable ones first
                                             * (the order of the flat vector) */
    uint64_t *tensor_first;                 /* first_elem of each, dense: an update looks at all of
                                             * them, and there may be a million */
    struct stk_chunk *chunks;
    uint64_t params, params_trainable;      /* without padding */
};

/* Of both moments of n elements (a multiple of 64). */
static inline uint64_t chunk_moment_bytes(enum chunk_moments m, uint64_t n)
{
    return m == CHUNK_MOMENTS_F32 ? 8 * n : m == CHUNK_MOMENTS_BF16 ? 4 * n : 2 * n + n / 64 * 8;
}

/* The arrays of CHUNK_OPT, one behind the other, as bytes of every 64 elements; returns how many. */
enum { CHUNK_OPT_ARRAYS_MAX = 5 };
static inline uint32_t chunk_opt_arrays(enum chunk_dtype dtype, enum chunk_moments m,
                                        uint32_t *group_bytes)
{
    const uint32_t moment = m == CHUNK_MOMENTS_F32 ? 4 : m == CHUNK_MOMENTS_BF16 ? 2 : 1;
    group_bytes[0] = (dtype == CHUNK_BF16 ? 2 : 4) * CHUNK_ALIGN_ELEMS;
    group_bytes[1] = group_bytes[2] = moment * CHUNK_ALIGN_ELEMS;
    if (m != CHUNK_MOMENTS_8BIT) return 3;
    group_bytes[3] = group_bytes[4] = 4;
    return 5;
}

static inline uint64_t chunk_bytes(const struct stk_layout *l, const struct stk_chunk *c,
                                   enum chunk_state s)
{
    if (c->frozen && s != CHUNK_PARAM) return 0;
    if (s == CHUNK_OPT)
        return (uint64_t)c->n_elems * (l->dtype == CHUNK_BF16 ? 2 : 4) +
               chunk_moment_bytes(l->blocks[c->block].moments, c->n_elems);
    return (uint64_t)c->n_elems * 2;
}

/* --- building (offload/layout.c) -------------------------------------------------------------- */

struct layout_tensor_in { const char *name; uint64_t n_elems; bool frozen, decay; };
struct layout_block_in {
    const char *name;
    uint32_t n_tensors;
    const struct layout_tensor_in *tensors;
};

/* Builds blocks, tensors and chunks for rank `rank` of `ranks`. Tensors keep the caller's order
 * among trainable and among frozen ones; `tensor_of[k]` (may be NULL) gives for the caller's k-th
 * tensor (counted over all blocks) its index in layout->tensors. Homes are all host with NULL
 * pointers until placed. Errors: no blocks, duplicate tensor names, chunk_elems not a multiple of
 * 64. 0-element tensors are allowed (ZR3-17). */
stk_status layout_build(const struct layout_block_in *blocks, uint32_t n_blocks,
                        enum chunk_dtype dtype, uint32_t chunk_elems, uint32_t rank, uint32_t ranks,
                        struct stk_layout **out, uint32_t *tensor_of, struct stk_error *err);
void layout_free(struct stk_layout *l);

/* Shard boundaries of a flat vector of `elems` (multiple of 64) elements over `ranks`: boundary[r]
 * .. boundary[r + 1] is rank r's, multiples of 64, as even as that allows (weights NULL) or
 * proportional to weights[r] > 0. boundary has ranks + 1 entries. Empty shards are legal. Pure. */
void shard_boundaries(uint64_t elems, uint32_t ranks, const double *weights, uint64_t *boundary);

/* The pieces of tensors that lie in a chunk, in order: calls fn(tensor index, first element inside
 * the tensor, offset inside the chunk, n). */
void chunk_pieces(const struct stk_layout *l, const struct stk_chunk *c,
                  void (*fn)(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                             uint32_t n),
                  void *arg);

/* The whole structure's relations (INV-1, sizes, coverage: every element of every tensor in exactly
 * one chunk). STK_ERR_STATE with a sentence. */
stk_status layout_check(const struct stk_layout *l, struct stk_error *err);

#endif
