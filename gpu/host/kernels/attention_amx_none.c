/* gpu/host/kernels/attention_amx_none.c - attention and products where the compiler or the processor
 * knows no AMX: nothing calls these, because c->amx is never set (kern_amx_built). */
#include "gpu/host/kernels/kern.h"

const bool kern_amx_built = false;

uint64_t kern_amx_floats(const struct ops_attention *a, bool backward) { return 0; }
uint64_t kern_amx_shared_floats(const struct ops_attention *a) { return 0; }
void kern_gemm_amx(const struct host_ctx *c, const struct host_gemm *g)
{
    STK_ASSERT(!"built without AMX");
}
void kern_attention_forward_amx(const struct host_ctx *c, const struct ops_attention *a)
{
    STK_ASSERT(!"built without AMX");
}
void kern_attention_backward_amx(const struct host_ctx *c, const struct ops_attention *a)
{
    STK_ASSERT(!"built without AMX");
}
