/* gpu/host/kernels/kernels.c - picks the kernels of an instruction set, and says what scratch they
 * need.
 *
 * Owns the table of tables. A kernel is one source (`*_isa.c`) compiled once per instruction set;
 * ctx->isa names a row here. Knows no stream and no device; runs on whichever thread calls. */
#include "gpu/host/kernels/kern.h"

#define KERN_TABLE(isa)                                                                            \
    {                                                                                              \
        kern_attention_forward_##isa, kern_attention_backward_##isa, kern_rmsnorm_forward_##isa,   \
            kern_rmsnorm_backward_##isa, kern_rope_##isa, kern_swiglu_forward_##isa,               \
            kern_swiglu_backward_##isa, kern_add_##isa, kern_acc_add_##isa,                        \
            kern_pack_##isa, kern_transpose_##isa, kern_embed_forward_##isa,                       \
            kern_embed_backward_##isa                                    \
    }

static const struct kern_table tables[] = {
    [CPU_SCALAR] = KERN_TABLE(scalar),
#ifdef __x86_64__
    [CPU_AVX2] = KERN_TABLE(avx2),
    [CPU_AVX512] = KERN_TABLE(avx512),
#endif
};

static const struct kern_table *table_of(const struct host_ctx *c)
{
    STK_ASSERT(c->threads >= 1);
    STK_ASSERT((size_t)c->isa < sizeof tables / sizeof tables[0]);
    return &tables[c->isa];
}

void host_pack(const struct host_ctx *c, const struct host_pack *a)
{
    table_of(c)->pack(c, a);
}
void host_transpose(const struct host_ctx *c, const struct host_transpose *a)
{
    table_of(c)->transpose(c, a);
}

void host_gemm(const struct host_ctx *c, const struct host_gemm *g)
{
    STK_ASSERT(host_gemm_fits(c, g->k) && (!g->add || g->ct == OPS_F32) &&
               (!g->base || !g->add));
    kern_gemm_amx(c, g);
}

void host_embed_forward(const struct host_ctx *c, const struct ops_embed *a)
{
    table_of(c)->embed_forward(c, a);
}
void host_embed_backward(const struct host_ctx *c, const struct ops_embed *a)
{
    table_of(c)->embed_backward(c, a);
}

uint64_t host_rmsnorm_scratch(const struct host_ctx *c, const struct ops_rmsnorm *a, bool backward)
{
    uint64_t ld = kern_round16(a->cols), rows = kern_norm_part_rows(a->rows),
             parts = (a->rows + rows - 1) / rows;
    return ld * sizeof(float) * (backward && a->dw ? 1 + parts : 1) + 64;
}
void host_rmsnorm_forward(const struct host_ctx *c, const struct ops_rmsnorm *a)
{
    STK_ASSERT(a->group >= 1);
    STK_ASSERT(a->scratch.size_bytes >= host_rmsnorm_scratch(c, a, false));
    table_of(c)->rmsnorm_forward(c, a);
}
void host_rmsnorm_backward(const struct host_ctx *c, const struct ops_rmsnorm *a)
{
    STK_ASSERT(a->group >= 1);
    STK_ASSERT(a->scratch.size_bytes >= host_rmsnorm_scratch(c, a, true));
    table_of(c)->rmsnorm_backward(c, a);
}

void host_rope(const struct host_ctx *c, const struct ops_rope *a)
{
    STK_ASSERT(a->head_dim % 2 == 0);
    table_of(c)->rope(c, a);
}

bool host_attention_amx_possible(void) { return kern_amx_built && cpu_amx_enable(); }

/* From types and shape only. Words are pairs of elements, so strides must be even. */
static bool amx_fits(const struct host_ctx *c, const struct ops_attention *a)
{
    return c->amx && a->at == OPS_BF16 && !a->grad_wide && a->head_dim % 32 == 0 &&
           (a->q_stride | a->k_stride | a->v_stride | a->o_stride) % 2 == 0;
}

uint64_t host_attention_scratch(const struct host_ctx *c, const struct ops_attention *a,
                                bool backward)
{
    if (amx_fits(c, a))
        return (kern_amx_floats(a, backward) * c->threads +
                (backward ? 0 : kern_amx_shared_floats(a))) * sizeof(float) + 64;
    return kern_att_floats(a, backward) * sizeof(float) * c->threads + 64;
}
void host_attention_forward(const struct host_ctx *c, const struct ops_attention *a)
{
    STK_ASSERT(a->kv_heads >= 1 && a->heads % a->kv_heads == 0);
    STK_ASSERT(a->scratch.size_bytes >= host_attention_scratch(c, a, false));
    if (amx_fits(c, a)) kern_attention_forward_amx(c, a);
    else table_of(c)->attention_forward(c, a);
}
void host_attention_backward(const struct host_ctx *c, const struct ops_attention *a)
{
    STK_ASSERT(a->kv_heads >= 1 && a->heads % a->kv_heads == 0);
    STK_ASSERT(a->scratch.size_bytes >= host_attention_scratch(c, a, true));
    if (amx_fits(c, a)) kern_attention_backward_amx(c, a);
    else table_of(c)->attention_backward(c, a);
}

void host_swiglu_forward(const struct host_ctx *c, const struct ops_swiglu *a)
{
    table_of(c)->swiglu_forward(c, a);
}
void host_swiglu_backward(const struct host_ctx *c, const struct ops_swiglu *a)
{
    table_of(c)->swiglu_backward(c, a);
}
void host_add(const struct host_ctx *c, enum ops_dtype at, uint64_t n, const void *x, const void *y,
              void *out)
{
    table_of(c)->add(c, at, n, x, y, out);
}
void host_acc_add(const struct host_ctx *c, uint64_t n, float *acc, const void *src,
                  enum ops_dtype st)
{
    table_of(c)->acc_add(c, n, acc, src, st);
}
