/* gpu/host/kernels/kern.h - the kernels of one instruction set as a table. Each *_isa.c is compiled
 * once per instruction set (meson.build) with KERN_ISA set to its name; kernels.c picks the table.
 * Only files of this folder include it. */
#ifndef GPU_HOST_KERNELS_KERN_H
#define GPU_HOST_KERNELS_KERN_H

#include "gpu/host/kernels.h"

struct kern_table {
    void (*attention_forward)(const struct host_ctx *c, const struct ops_attention *a);
    void (*attention_backward)(const struct host_ctx *c, const struct ops_attention *a);
    void (*rmsnorm_forward)(const struct host_ctx *c, const struct ops_rmsnorm *a);
    void (*rmsnorm_backward)(const struct host_ctx *c, const struct ops_rmsnorm *a);
    void (*rope)(const struct host_ctx *c, const struct ops_rope *a);
    void (*swiglu_forward)(const struct host_ctx *c, const struct ops_swiglu *a);
    void (*swiglu_backward)(const struct host_ctx *c, const struct ops_swiglu *a);
    void (*add)(const struct host_ctx *c, enum ops_dtype at, uint64_t n, const void *x,
                const void *y, void *out);
    void (*acc_add)(const struct host_ctx *c, uint64_t n, float *acc, const void *src,
                    enum ops_dtype st);
    void (*pack)(const struct host_ctx *c, const struct host_pack *a);
    void (*transpose)(const struct host_ctx *c, const struct host_transpose *a);
    void (*embed_forward)(const struct host_ctx *c, const struct ops_embed *a);
    void (*embed_backward)(const struct host_ctx *c, const struct ops_embed *a);
};

#define KERN_GLUE2(a, b) a##_##b
#define KERN_GLUE(a, b) KERN_GLUE2(a, b)
#define KERN_NAME(base) KERN_GLUE(base, KERN_ISA)

#define KERN_DECLARE(isa)                                                                          \
    void kern_attention_forward_##isa(const struct host_ctx *c, const struct ops_attention *a);    \
    void kern_attention_backward_##isa(const struct host_ctx *c, const struct ops_attention *a);   \
    void kern_rmsnorm_forward_##isa(const struct host_ctx *c, const struct ops_rmsnorm *a);        \
    void kern_rmsnorm_backward_##isa(const struct host_ctx *c, const struct ops_rmsnorm *a);       \
    void kern_rope_##isa(const struct host_ctx *c, const struct ops_rope *a);                      \
    void kern_swiglu_forward_##isa(const struct host_ctx *c, const struct ops_swiglu *a);          \
    void kern_swiglu_backward_##isa(const struct host_ctx *c, const struct ops_swiglu *a);         \
    void kern_add_##isa(const struct host_ctx *c, enum ops_dtype at, uint64_t n, const void *x,    \
                        const void *y, void *out);                                                 \
    void kern_acc_add_##isa(const struct host_ctx *c, uint64_t n, float *acc, const void *src,     \
                            enum ops_dtype st);                                                    \
    void kern_pack_##isa(const struct host_ctx *c, const struct host_pack *a);                     \
    void kern_transpose_##isa(const struct host_ctx *c, const struct host_transpose *a);           \
    void kern_embed_forward_##isa(const struct host_ctx *c, const struct ops_embed *a);            \
    void kern_embed_backward_##isa(const struct host_ctx *c, const struct ops_embed *a);

/* attention_amx.c: bf16 activations, head dimensions that are multiples of 32. Scratch of one thread,
 * in floats. */
uint64_t kern_amx_floats(const struct ops_attention *a, bool backward);
uint64_t kern_amx_shared_floats(const struct ops_attention *a); /* of a forward, besides */
void kern_attention_forward_amx(const struct host_ctx *c, const struct ops_attention *a);
void kern_attention_backward_amx(const struct host_ctx *c, const struct ops_attention *a);
void kern_gemm_amx(const struct host_ctx *c, const struct host_gemm *g); /* product_amx.c */
extern const bool kern_amx_built; /* this compiler knows AMX */

KERN_DECLARE(scalar)
KERN_DECLARE(avx2)
KERN_DECLARE(avx512)

/* Scratch of attention, for one thread, in floats: tiles first, then (backward) the accumulators of
 * one kv head's dk and dv. */
enum { KERN_ATT_BQ = 64, KERN_ATT_BK = 64 };
static inline uint64_t kern_att_dim(const struct ops_attention *a)
{
    return (a->head_dim + 15) & ~(uint64_t)15;
}
/* Row length of packed keys and values: one line more than a power of two, so that columns do not
 * share cache sets. */
static inline uint64_t kern_att_kld(const struct ops_attention *a) { return kern_att_dim(a) + 16; }
static inline uint64_t kern_att_floats(const struct ops_attention *a, bool backward)
{
    uint64_t dim = kern_att_dim(a), q = KERN_ATT_BQ * dim, k = KERN_ATT_BK * kern_att_kld(a);
    uint64_t s = KERN_ATT_BQ * KERN_ATT_BK, lanes = 4 * KERN_ATT_BQ;
    if (!backward) return 3 * q + 2 * k + s + lanes;
    return 5 * q + 2 * k + 2 * s + lanes + 2 * a->seq * dim;
}

/* Norm backward: rows are cut in at most KERN_NORM_PARTS parts, by shape only; each sums its share
 * of dw in row order, then the parts are summed in order. */
enum { KERN_NORM_PARTS = 64, KERN_NORM_ROWS_MIN = 32 };
static inline uint64_t kern_norm_part_rows(uint64_t rows)
{
    uint64_t n = (rows + KERN_NORM_PARTS - 1) / KERN_NORM_PARTS;
    return n < KERN_NORM_ROWS_MIN ? KERN_NORM_ROWS_MIN : n;
}
static inline uint64_t kern_round16(uint64_t x) { return (x + 15) & ~(uint64_t)15; }
/* Threads for elementwise work of n elements: a team costs more than it brings below some
 * thousands. */
static inline int kern_team(const struct host_ctx *c, uint64_t n)
{
    return n < 16384 ? 1 : (int)c->threads;
}
/* Of n equal pieces of work, those that a thread takes at a time: in eighths of its share, because a
 * thread that loses its core for a while would hold up the others with all of what is left of it. */
static inline uint64_t kern_few(const struct host_ctx *c, uint64_t n)
{
    return n / (8 * (uint64_t)c->threads) + 1;
}
static inline uint64_t kern_round64(uint64_t x) { return (x + 63) & ~(uint64_t)63; }
/* Start of the usable scratch: a cache line. Sizes have 64 bytes of room for it. */
static inline float *kern_scratch(const struct ops_scratch *s)
{
    return (float *)(void *)((char *)s->base +
                             (kern_round64((uintptr_t)s->base) - (uintptr_t)s->base));
}

#endif
