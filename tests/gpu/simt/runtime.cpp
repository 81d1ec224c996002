/* tests/gpu/simt/runtime.cpp - of CUDA's runtime, what a launch alone needs: it runs at once, and its
 * status is read. A larger stand-in has a file of its own in place of this one, and sets simt_submit.
 *
 * One OS thread. */
#include "simt_impl.h"

static cudaError_t last_error = cudaSuccess;

extern "C" {
static int run_now(simt_launch *l)
{
    simt_launch_run(l);
    simt_launch_free(l);
    switch (simt_error_kind()) {
    case SIMT_NONE: return cudaSuccess;
    case SIMT_LAUNCH: last_error = cudaErrorInvalidConfiguration; break;
    case SIMT_MISALIGNED: last_error = cudaErrorMisalignedAddress; break;
    default: last_error = cudaErrorIllegalAddress; break;
    }
    return last_error;
}

int (*simt_submit)(simt_launch *) = run_now;

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(cudaError_t e) { return e == cudaSuccess ? "cudaSuccess" : "cudaError"; }
const char *cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "see simt_error()"; }
}
