/* tests/gpu/standin/calls.cpp - CUDA's functions for the card, streams, events, callbacks and launches.
 *
 * Each checks its handles, counts itself, gives a planned or the sticky error, and queues what it queues.
 * CUDA Runtime API reference 13.0. Any thread. */
#include "../simt/include/simt_device.h"
#include "../simt/simt.h"
#undef memcpy
#undef memmove
#undef memset
#include "card.h"
#include <algorithm>
#include <cstring>

CUstream_st *card_stream_new(void);  /* card.cpp */
void card_stream_free(CUstream_st *s);

card_call::card_call(const char *name, bool sticky_matters) : lock(card_lock)
{
    int error = 0;
    if (card_in_callback) {
        trace_found(STANDIN_CALLBACK, "%s is called in a callback", name);
        failed = cudaErrorNotPermitted;
        return;
    }
    if (trace_plan_hit(name, &error)) {
        failed = static_cast<cudaError_t>(error);
        planned = true;
    } else {
        failed = card.sticky;
    }
    (void)sticky_matters;
}

cudaError_t card_call::end(cudaError_t e)
{
    if (e != cudaSuccess) card_last_error = e;
    return e;
}

namespace {

bool event_good(cudaEvent_t e)
{
    if (std::find(card.events.begin(), card.events.end(), e) != card.events.end()) return true;
    trace_found(STANDIN_HANDLE, "an event is used that is not there, or was destroyed");
    return false;
}

enum standin_found found_of(enum simt_fault f)
{
    switch (f) {
    case SIMT_BOUNDS: return STANDIN_FOREIGN;
    case SIMT_FREED: return STANDIN_FREED;
    case SIMT_UNWRITTEN: return STANDIN_UNWRITTEN;
    default: return STANDIN_KERNEL;
    }
}

cudaError_t error_of(enum simt_fault f)
{
    return f == SIMT_LAUNCH       ? cudaErrorInvalidConfiguration
           : f == SIMT_MISALIGNED ? cudaErrorMisalignedAddress
           : f == SIMT_BARRIER || f == SIMT_WARP ? cudaErrorLaunchFailure
                                                  : cudaErrorIllegalAddress;
}

void launch_effect(card_op &op, const simt_launch *l)
{
    if (!card.cfg.plain) order_watch_begin();
    simt_launch_run(l);
    if (simt_error_kind() == SIMT_NONE) return;
    trace_found(found_of(simt_error_kind()), "%s: %s", trace_describe(op).c_str(), simt_error());
    card_stick(error_of(simt_error_kind()));
    simt_reset_error();
}

int submit(simt_launch *l)
{
    std::shared_ptr<simt_launch> owned(l, simt_launch_free);
    card_call call("cudaLaunchKernelEx");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    CUstream_st *s = card_stream_of(l->config.stream);
    if (!s) return call.end(cudaErrorInvalidResourceHandle);
    const dim3 &g = l->config.gridDim, &b = l->config.blockDim;
    uint64_t threads = (uint64_t)g.x * g.y * g.z * b.x * b.y * b.z;
    if (threads == 0 || (uint64_t)b.x * b.y * b.z > 1024) return call.end(cudaErrorInvalidConfiguration);
    card_op *op = card_add(s, STANDIN_LAUNCH, STANDIN_COMPUTE, 0);
    op->name = simt_launch_name(l);
    op->duration_ns = card_time_of(threads, card.cfg.kernel_threads_per_s);
    op->effect = [owned](card_op &o) { launch_effect(o, owned.get()); };
    card_submitted();
    return cudaSuccess;
}

cudaError_t wait_for(card_call &call, const std::function<bool()> &done)
{
    card.counts.synchronisations++;
    if (!card_wait(call.lock, done)) {
        trace_found(STANDIN_HANDLE, "a call waits for what can never be");
        return cudaErrorUnknown;
    }
    return card.sticky;
}

} // namespace

extern "C" {

int (*simt_submit)(simt_launch *) = submit;

/* --- errors */

cudaError_t cudaGetLastError(void)
{
    std::unique_lock<std::recursive_mutex> lock(card_lock);
    cudaError_t e = card.sticky != cudaSuccess ? card.sticky : card_last_error;
    card_last_error = cudaSuccess;
    return e;
}

cudaError_t cudaPeekAtLastError(void)
{
    std::unique_lock<std::recursive_mutex> lock(card_lock);
    return card.sticky != cudaSuccess ? card.sticky : card_last_error;
}

const char *cudaGetErrorName(cudaError_t e)
{
    switch (e) {
#define NAME(e_) case e_: return #e_;
    NAME(cudaSuccess) NAME(cudaErrorInvalidValue) NAME(cudaErrorMemoryAllocation) NAME(cudaErrorInitializationError)
    NAME(cudaErrorInvalidConfiguration) NAME(cudaErrorInvalidMemcpyDirection) NAME(cudaErrorInsufficientDriver)
    NAME(cudaErrorDevicesUnavailable) NAME(cudaErrorNoDevice) NAME(cudaErrorInvalidDevice) NAME(cudaErrorECCUncorrectable)
    NAME(cudaErrorInvalidResourceHandle) NAME(cudaErrorNotReady) NAME(cudaErrorIllegalAddress)
    NAME(cudaErrorLaunchOutOfResources) NAME(cudaErrorLaunchTimeout) NAME(cudaErrorHostMemoryAlreadyRegistered)
    NAME(cudaErrorHostMemoryNotRegistered) NAME(cudaErrorMisalignedAddress) NAME(cudaErrorLaunchFailure)
    NAME(cudaErrorNotPermitted) NAME(cudaErrorNotSupported) NAME(cudaErrorUnknown)
#undef NAME
    default: return "unrecognized error code";
    }
}

const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    default: return "an error of the stand-in";
    }
}

/* --- the card */

cudaError_t cudaDriverGetVersion(int *version)
{
    card_call call("cudaDriverGetVersion");
    if (call.planned) return call.end(call.failed);
    *version = card.cfg.driver_version < 0 ? 0 : card.cfg.driver_version;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    card_call call("cudaRuntimeGetVersion");
    if (call.planned) return call.end(call.failed);
    *version = card.cfg.runtime_version;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    card_call call("cudaGetDeviceCount");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    *count = card.cfg.devices < 0 ? 0 : card.cfg.devices;
    if (card.cfg.driver_version / 1000 < card.cfg.runtime_version / 1000) return call.end(cudaErrorInsufficientDriver);
    return *count ? cudaSuccess : call.end(cudaErrorNoDevice);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    card_call call("cudaGetDeviceProperties");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    if (device != 0 || card.cfg.devices < 1) return call.end(cudaErrorInvalidDevice);
    *prop = cudaDeviceProp();
    snprintf(prop->name, sizeof prop->name, "stand-in");
    prop->totalGlobalMem = card.cfg.memory_bytes;
    prop->sharedMemPerBlock = 49152;
    prop->major = card.cfg.cc_major;
    prop->minor = card.cfg.cc_minor;
    prop->multiProcessorCount = 128;
    prop->asyncEngineCount = 2;
    prop->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    card_call call("cudaDeviceGetAttribute");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    if (device != 0) return call.end(cudaErrorInvalidDevice);
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMultiProcessorCount: *value = 128; break;
    case cudaDevAttrAsyncEngineCount: *value = 2; break;
    case cudaDevAttrComputeCapabilityMajor: *value = card.cfg.cc_major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = card.cfg.cc_minor; break;
    default: return call.end(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    card_call call("cudaSetDevice");
    return call.end(call.failed != cudaSuccess ? call.failed : device != 0 ? cudaErrorInvalidDevice : cudaSuccess);
}

cudaError_t cudaGetDevice(int *device)
{
    card_call call("cudaGetDevice");
    *device = 0;
    return call.end(call.failed);
}

cudaError_t cudaDeviceSynchronize(void)
{
    card_call call("cudaDeviceSynchronize");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    card.counts.device_synchronisations++;
    cudaError_t e = wait_for(call, [] {
        return std::all_of(card.streams.begin(), card.streams.end(),
                           [](const CUstream_st *s) { return !s || s->queue.empty(); });
    });
    for (const CUstream_st *s : card.streams)
        if (s) card_learn(s->done_vc, s->free_ns);
    return call.end(e);
}

/* --- streams */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned int flags)
{
    card_call call("cudaStreamCreateWithFlags");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    if (flags > 1) return call.end(cudaErrorInvalidValue);
    *s = card_stream_new();
    card.counts.live_streams++;
    return cudaSuccess;
}

/* "The function returns at once and the resources are released when the device has completed all work". */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    card_call call("cudaStreamDestroy", false);
    CUstream_st *s = stream ? card_stream_of(stream) : nullptr;
    if (!s) return call.end(cudaErrorInvalidResourceHandle);
    card.counts.live_streams--;
    s->destroyed = true;
    if (s->queue.empty()) card_stream_free(s);
    return call.end(call.failed);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    card_call call("cudaStreamQuery");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    CUstream_st *s = card_stream_of(stream);
    if (!s) return call.end(cudaErrorInvalidResourceHandle);
    if (!s->queue.empty()) return call.end(cudaErrorNotReady);
    card_learn(s->done_vc, s->free_ns);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    card_call call("cudaStreamSynchronize");
    if (call.planned) return call.end(call.failed);
    CUstream_st *s = card_stream_of(stream);
    if (!s) return call.end(cudaErrorInvalidResourceHandle);
    uint64_t upto = s->queued;
    cudaError_t e = wait_for(call, [s, upto] { return s->done >= upto; });
    card_learn(s->done_vc, s->free_ns);
    return call.end(e);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned int flags)
{
    card_call call("cudaStreamWaitEvent");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    CUstream_st *s = card_stream_of(stream);
    if (!s || !event_good(e)) return call.end(cudaErrorInvalidResourceHandle);
    if (flags) return call.end(cudaErrorInvalidValue);
    if (!e->last || card_planted(STANDIN_PLANT_NO_WAIT)) return cudaSuccess; /* never recorded: nothing to wait for */
    order_join(s->vc, e->last->vc);
    card_op *op = card_add(s, STANDIN_WAIT, STANDIN_NO_ENGINE, 0);
    op->wait = e->last;
    card_submitted();
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t fn, void *arg, unsigned int flags)
{
    card_call call("cudaStreamAddCallback");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    CUstream_st *s = card_stream_of(stream);
    if (!s) return call.end(cudaErrorInvalidResourceHandle);
    if (!fn || flags) return call.end(cudaErrorInvalidValue);
    if (card_planted(STANDIN_PLANT_EARLY)) {
        call.lock.unlock();
        fn(stream, cudaSuccess, arg);
        call.lock.lock();
        return cudaSuccess;
    }
    card_op *op = card_add(s, STANDIN_CALLED, STANDIN_NO_ENGINE, 0);
    op->callback = fn;
    op->arg = arg;
    op->duration_ns = card.cfg.launch_ns;
    card_submitted();
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *arg)
{
    card_call call("cudaLaunchHostFunc");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    CUstream_st *s = card_stream_of(stream);
    if (!s) return call.end(cudaErrorInvalidResourceHandle);
    if (!fn) return call.end(cudaErrorInvalidValue);
    card_op *op = card_add(s, STANDIN_HOST_FUNC, STANDIN_NO_ENGINE, 0);
    op->host_fn = fn;
    op->arg = arg;
    op->duration_ns = card.cfg.launch_ns;
    card_submitted();
    return cudaSuccess;
}

/* --- events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned int flags)
{
    card_call call("cudaEventCreateWithFlags");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    if (flags > 7) return call.end(cudaErrorInvalidValue);
    *e = new CUevent_st();
    (*e)->flags = flags;
    card.events.push_back(*e);
    card.counts.live_events++;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    card_call call("cudaEventDestroy", false);
    if (!event_good(e)) return call.end(cudaErrorInvalidResourceHandle);
    card.events.erase(std::find(card.events.begin(), card.events.end(), e));
    card.counts.live_events--;
    delete e;
    return call.end(call.failed);
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream)
{
    card_call call("cudaEventRecord");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    CUstream_st *s = card_stream_of(stream);
    if (!s || !event_good(e)) return call.end(cudaErrorInvalidResourceHandle);
    card_op *op = card_add(s, STANDIN_RECORD, STANDIN_NO_ENGINE, 0);
    op->record = e->last = std::make_shared<card_record>();
    op->record->vc = op->vc;
    card_submitted();
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    card_call call("cudaEventQuery");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    if (!event_good(e)) return call.end(cudaErrorInvalidResourceHandle);
    if (!e->last) return cudaSuccess;
    if (!e->last->done) return call.end(cudaErrorNotReady);
    card_learn(e->last->vc, e->last->at_ns);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    card_call call("cudaEventSynchronize");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    if (!event_good(e)) return call.end(cudaErrorInvalidResourceHandle);
    if (!e->last) return cudaSuccess;
    std::shared_ptr<card_record> r = e->last;
    cudaError_t st = wait_for(call, [r] { return r->done; });
    card_learn(r->vc, r->at_ns);
    return call.end(st);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b)
{
    card_call call("cudaEventElapsedTime");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    if (!event_good(a) || !event_good(b)) return call.end(cudaErrorInvalidResourceHandle);
    if ((a->flags | b->flags) & cudaEventDisableTiming || !a->last || !b->last)
        return call.end(cudaErrorInvalidResourceHandle);
    if (!a->last->done || !b->last->done) return call.end(cudaErrorNotReady);
    *ms = (float)(((double)b->last->at_ns - (double)a->last->at_ns) / 1e6);
    return cudaSuccess;
}
}
