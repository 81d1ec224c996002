/* tests/gpu/cuda/dnn_table.h - what cuDNN's library is to tests on the stand-in. */
#ifndef TESTS_GPU_CUDA_DNN_TABLE_H
#define TESTS_GPU_CUDA_DNN_TABLE_H

#include <stdbool.h>

/* As if the library were not installed, from the next open on. */
void dnn_table_hide(bool hide);

#endif
