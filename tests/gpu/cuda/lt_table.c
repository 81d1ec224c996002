/* tests/gpu/cuda/lt_table.c - cuBLASLt's functions for the device on the stand-in: those that are linked, in place of
 * gpu/cuda/cuda_lt.c, which opens a library. */
#include "gpu/cuda/cuda_impl.h"

stk_status cuda_lt_table(struct cuda_lt *out, struct stk_error *err)
{
    (void)err;
    *out = (struct cuda_lt){ 0 };
#define LT_LINKED(name) out->name = name;
    CUDA_LT_MAP(LT_LINKED)
#undef LT_LINKED
    return STK_OK;
}

void cuda_lt_free(struct cuda_lt *lt) { *lt = (struct cuda_lt){ 0 }; }
