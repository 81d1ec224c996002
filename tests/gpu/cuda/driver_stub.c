/* tests/gpu/cuda/driver_stub.c - a driver that has no card, but takes what is loaded: libcuda.so.1 for test_dnn_library,
 * so that cuDNN judges graphs and compiles kernels where there is no driver. Nothing is ever run. What is asked of a
 * driver besides fails as in NVIDIA's own stub of this library (CUDA driver API reference, CUresult 34). */
#include <stddef.h>

#define NO_DRIVER 34
#define FAILS(name)       \
    int name(void);       \
    int name(void) { return NO_DRIVER; }
#define GIVES(name)       \
    int name(void **out); \
    int name(void **out)  \
    {                     \
        *out = &taken;    \
        return 0;         \
    }
#define TAKES(name)       \
    int name(void);       \
    int name(void) { return 0; }
#define ZERO(name)        \
    int name(int *out);   \
    int name(int *out)    \
    {                     \
        *out = 0;         \
        return 0;         \
    }

static char taken; /* what handles point to */

GIVES(cuLibraryLoadData) GIVES(cuLibraryGetKernel) GIVES(cuKernelGetFunction) GIVES(cuLibraryGetModule)
GIVES(cuModuleLoadData) GIVES(cuModuleLoadDataEx) GIVES(cuModuleGetFunction)
TAKES(cuLibraryUnload) TAKES(cuModuleUnload) TAKES(cuFuncSetAttribute) TAKES(cuKernelSetAttribute)
ZERO(cuFuncGetAttribute) ZERO(cuKernelGetAttribute)
FAILS(cuInit) FAILS(cuGetErrorName) FAILS(cuGetErrorString) FAILS(cuDriverGetVersion) FAILS(cuDeviceGetCount)
FAILS(cuDeviceGet) FAILS(cuDeviceGetAttribute) FAILS(cuCtxGetCurrent) FAILS(cuCtxSetCurrent) FAILS(cuCtxGetLimit)
FAILS(cuCtxGetDevice) FAILS(cuCtxPopCurrent) FAILS(cuCtxPopCurrent_v2) FAILS(cuCtxPushCurrent)
FAILS(cuCtxPushCurrent_v2) FAILS(cuStreamGetCtx) FAILS(cuLinkCreate) FAILS(cuLinkCreate_v2) FAILS(cuLinkAddData)
FAILS(cuLinkAddData_v2) FAILS(cuLinkComplete) FAILS(cuLinkDestroy) FAILS(cuLaunchKernel) FAILS(cuLaunchKernelEx)
FAILS(cuLaunchCooperativeKernel) FAILS(cuLibraryLoadFromFile) FAILS(cuOccupancyMaxPotentialClusterSize)
FAILS(cuOccupancyMaxActiveClusters) FAILS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
FAILS(cuTensorMapEncodeTiled) FAILS(cuTensorMapEncodeIm2col) FAILS(cuMemcpyHtoDAsync_v2) FAILS(cuMemsetD32Async)
FAILS(cuLibraryGetGlobal) FAILS(cuModuleGetGlobal_v2) FAILS(cuGetExportTable) FAILS(cuGetProcAddress)
FAILS(cuGetProcAddress_v2) FAILS(cuLibraryGetKernelCount) FAILS(cuLibraryEnumerateKernels)
