/* tests/gpu/cuda/dnn_table.c - cuDNN's functions for the device on the stand-in: those that are linked, in place of
 * gpu/cuda/cuda_dnn_table.c, which opens a library. */
#include "tests/gpu/cuda/dnn_table.h"

#include "gpu/cuda/cuda_dnn.h"

static bool hidden;

void dnn_table_hide(bool hide) { hidden = hide; }

stk_status dnn_table_open(struct dnn_table *out, struct stk_error *err)
{
    *out = (struct dnn_table){ 0 };
    if (hidden) return stk_error_set(err, STK_ERR_UNSUPPORTED, 0, "hidden by a test");
#define DNN_LINKED(name) out->name = name;
    DNN_MAP(DNN_LINKED)
#undef DNN_LINKED
    return STK_OK;
}

void dnn_table_close(struct dnn_table *t) { *t = (struct dnn_table){ 0 }; }
