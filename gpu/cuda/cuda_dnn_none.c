/* gpu/cuda/cuda_dnn_none.c - in place of cuda_dnn*.c in a build without cuDNN's headers: attention
 * is computed by own tiles. Any thread. */
#include "gpu/cuda/cuda_impl.h"

#include <stdio.h>

void cuda_dnn_open(struct cuda_dev *h) { h->dnn = NULL; }
void cuda_dnn_close(struct cuda_dev *h) { (void)h; }

void cuda_dnn_describe(char text[CUDA_DNN_TEXT_BYTES])
{
    snprintf(text, CUDA_DNN_TEXT_BYTES, "no cuDNN (not in this build)");
}

void cuda_dnn_numerics(const struct cuda_dev *h, char text[CUDA_DNN_TEXT_BYTES])
{
    (void)h;
    snprintf(text, CUDA_DNN_TEXT_BYTES, "tiles");
}

bool cuda_dnn_takes(struct cuda_job *j, const struct ops_attention *a, bool backward)
{
    (void)j;
    (void)a;
    (void)backward;
    return false;
}

void cuda_dnn_attention(struct cuda_job *j, const struct ops_attention *a, bool backward)
{
    (void)j;
    (void)a;
    (void)backward;
    STK_ASSERT(false); /* cuda_dnn_takes never is true */
}
