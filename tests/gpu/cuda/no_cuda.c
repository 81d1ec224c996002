/* tests/gpu/cuda/no_cuda.c - in a build with CUDA the kernels' tests run on the SIMT executor, whose runtime
 * and kernels have the names of the real ones: the product's device is left out of their programs. */
#include "gpu/device_impl.h"

const struct dev_ops cuda_dev_ops = { .version = DEV_OPS_VERSION, .name = "cuda" };
