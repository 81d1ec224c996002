/* gpu/host/kernels.h - the host device's computations, as plain functions: they run on a stream's
 * lane, inside use OpenMP with ctx->threads, never allocate, never fail (shapes were checked by
 * gpu/ops.c). `*_scratch` gives the bytes a call needs; a call's scratch is a->scratch. Kernels
 * that depend on the instruction set are compiled per ISA and picked by ctx->isa once (same bits
 * across ISA where the header of ops.h promises it; matrix-like kernels (attention) may differ
 * between ISAs, which is part of the numerics key). */
#ifndef GPU_HOST_KERNELS_H
#define GPU_HOST_KERNELS_H

#include "base/cpu.h"
#include "gpu/ops.h"

struct host_ctx {
    uint32_t threads;
    enum cpu_isa isa;
    bool bf16_products; /* DEV_MATMUL_BF16 */
    bool amx;           /* attention and products in bf16 on AMX tiles where they fit: part of the
                         * numerics key */
};

/* How the library wants the right operand of a product: blocks of k_block rows and n_block columns
 * (kernels/pack_isa.c). k_block 0: as it lies. */
struct host_layout {
    uint32_t k_block, n_block;
};
static inline uint64_t host_layout_elems(struct host_layout l, uint64_t k, uint64_t n)
{
    return (k + l.k_block - 1) / l.k_block * l.k_block *
           ((n + l.n_block - 1) / l.n_block * l.n_block);
}
/* dst = B[k][n] in the layout, of type `to` (f32 or bf16), from src: rows of k, or (transposed) rows
 * of n; ld elements apart. */
struct host_pack {
    uint64_t k, n, ld;
    enum ops_dtype from, to;
    bool transposed;
    struct host_layout layout;
    const void *src;
    void *dst;
};
void host_pack(const struct host_ctx *c, const struct host_pack *a);
/* The layout that host_gemm takes. */
#define HOST_GEMM_LAYOUT ((struct host_layout){ 32, 32 })
/* C[m][n] = A B, of bf16 with fp32 sums on AMX tiles (kernels/product_amx.c); only with ctx->amx, k a
 * multiple of 32. The same bits for any thread count. */
struct host_gemm {
    uint64_t m, n, k, lda, ldc;
    const uint16_t *a; /* rows of k */
    const void *b;     /* packed, HOST_GEMM_LAYOUT */
    void *c;
    enum ops_dtype ct; /* f32 or bf16 */
    bool add;          /* C = C + A B (f32) */
    bool turned;       /* C is stored as its transpose, n rows of m, ldc apart (base likewise) */
    const void *base;  /* C = A B + base (not with add): of base_t, f32 or bf16, rows ldc apart, other
                        * memory than C (or C itself in bf16); added to the whole sum, then rounded.
                        * NULL: none */
    enum ops_dtype base_t;
};
static inline bool host_gemm_fits(const struct host_ctx *c, uint64_t k)
{
    return c->amx && k > 0 && k % 32 == 0;
}
void host_gemm(const struct host_ctx *c, const struct host_gemm *g);
/* dst[col][row] = src[row][col], changed to type `to` (f32 or bf16). */
struct host_transpose {
    uint64_t rows, cols, ld, dst_ld;
    enum ops_dtype from, to;
    const void *src;
    void *dst;
};
void host_transpose(const struct host_ctx *c, const struct host_transpose *a);

void host_embed_forward(const struct host_ctx *c, const struct ops_embed *a);
void host_embed_backward(const struct host_ctx *c, const struct ops_embed *a);
uint64_t host_rmsnorm_scratch(const struct host_ctx *c, const struct ops_rmsnorm *a, bool backward);
void host_rmsnorm_forward(const struct host_ctx *c, const struct ops_rmsnorm *a);
void host_rmsnorm_backward(const struct host_ctx *c, const struct ops_rmsnorm *a);
void host_rope(const struct host_ctx *c, const struct ops_rope *a);
uint64_t host_attention_scratch(const struct host_ctx *c, const struct ops_attention *a,
                                bool backward);
/* This build and this process can (asks the system for the tile state; any thread, once). */
bool host_attention_amx_possible(void);
void host_attention_forward(const struct host_ctx *c, const struct ops_attention *a);
void host_attention_backward(const struct host_ctx *c, const struct ops_attention *a);
void host_swiglu_forward(const struct host_ctx *c, const struct ops_swiglu *a);
void host_swiglu_backward(const struct host_ctx *c, const struct ops_swiglu *a);
void host_add(const struct host_ctx *c, enum ops_dtype at, uint64_t n, const void *x, const void *y,
              void *out);
void host_acc_add(const struct host_ctx *c, uint64_t n, float *acc, const void *src,
                  enum ops_dtype st);

#endif
