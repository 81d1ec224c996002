/* tests/gpu/standin/memory.cpp - device memory, pinned host memory, copies and zeros.
 *
 * Owns what is allocated and registered. Device memory is simt_alloc's: guarded, poisoned with NaN patterns,
 * and which bytes were written is known. Freeing waits for nothing, unlike a card's, so that work that is still
 * queued finds its memory gone. Memory that kernels may touch is what was allocated here (cudaHostRegister
 * gives the link's copies access, not kernels). Under card_lock. */
#include "../simt/simt.h"
#include "card.h"
#include <cstring>

namespace {

const card_block *block_of(const void *p, uintptr_t *base)
{
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    auto i = card.blocks.upper_bound(at);
    if (i == card.blocks.begin()) return nullptr;
    --i;
    if (at - i->first >= i->second.size_bytes) return nullptr;
    *base = i->first;
    return &i->second;
}

bool inside(const void *p, uint64_t n, bool host)
{
    uintptr_t base;
    const card_block *b = block_of(p, &base);
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    return b && b->host == host && n <= b->size_bytes - (at - base);
}

bool is_pinned(const void *p, uint64_t n)
{
    if (inside(p, n, true)) return true;
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    auto i = card.pinned.upper_bound(at);
    if (i == card.pinned.begin()) return false;
    --i;
    return at - i->first < i->second.size_bytes && n <= i->second.size_bytes - (at - i->first);
}

void *allocate(size_t n, bool host)
{
    char name[64];
    snprintf(name, sizeof name, "%s #%llu", host ? "cudaHostAlloc" : "cudaMalloc",
             (unsigned long long)++card.counts.allocations);
    void *p = simt_alloc(n, name);
    if (host) {
        memset(p, 0, n);
        simt_written(p, n);
    }
    card.blocks[reinterpret_cast<uintptr_t>(p)] = { n, name, host };
    if (!host) {
        card.counts.device_bytes += n;
        card.counts.device_bytes_peak = std::max(card.counts.device_bytes_peak, card.counts.device_bytes);
    }
    return p;
}

bool release(void *p, bool host)
{
    auto i = card.blocks.find(reinterpret_cast<uintptr_t>(p));
    if (i == card.blocks.end() || i->second.host != host) return false;
    if (!host) card.counts.device_bytes -= i->second.size_bytes;
    memset(p, 0xff, i->second.size_bytes);
    order_forget(p, i->second.size_bytes);
    simt_free(p);
    if (simt_error()) {
        trace_found(STANDIN_FOREIGN, "%s", simt_error());
        simt_reset_error();
    }
    card.blocks.erase(i);
    return true;
}

cudaError_t give_back(const char *name, void *p, bool host)
{
    card_call call(name, false);
    cudaError_t e = cudaSuccess;
    if (p && !release(p, host)) {
        trace_found(STANDIN_FOREIGN, "%s of memory that it did not give, or has taken back", name);
        e = cudaErrorInvalidValue;
    }
    return call.end(e != cudaSuccess ? e : call.failed);
}

struct copy_request {
    void *dst;
    const void *src;
    uint64_t n;
    enum cudaMemcpyKind kind;
    std::shared_ptr<std::vector<char>> staged; /* of pageable memory to the device */
    bool dst_pinned, src_pinned;
};

/* Still pinned, if it was when the copy was queued? */
bool host_side(card_op &op, const void *p, uint64_t n, bool was_pinned)
{
    if (!was_pinned || is_pinned(p, n)) return true;
    trace_found(STANDIN_UNPINNED, "%s needs host memory that was unpinned or freed before it ran",
                trace_describe(op).c_str());
    card_stick(cudaErrorIllegalAddress);
    return false;
}

void copy_effect(card_op &op, const copy_request &c)
{
    bool in = c.kind == cudaMemcpyHostToDevice, out = c.kind == cudaMemcpyDeviceToHost,
         host = c.kind == cudaMemcpyHostToHost;
    if ((in || host) && !host_side(op, c.src, c.n, c.src_pinned)) return;
    if ((out || host) && !host_side(op, c.dst, c.n, c.dst_pinned)) return;
    if (!in && !host && !memory_use(op, "source", c.src, c.n, false)) return;
    if (!out && !host && !memory_use(op, "destination", c.dst, c.n, true)) return;
    if ((in || host) && !c.staged) order_touch(op, c.src, c.n, false);
    if (out || host) order_touch(op, c.dst, c.n, true);
    memmove(c.dst, c.staged ? c.staged->data() : c.src, c.n);
    if (out) trace_hash_bytes(c.dst, c.n);
}

enum cudaMemcpyKind kind_of(const void *dst, const void *src, uint64_t n)
{
    bool d = memory_touches_device(dst, n), s = memory_touches_device(src, n);
    return d && s ? cudaMemcpyDeviceToDevice : d ? cudaMemcpyHostToDevice : s ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
}

/* A finding, where an operand is on the wrong side or goes over an end. */
bool side_good(const char *what, const void *p, uint64_t n, bool device)
{
    if (device ? memory_on_device(p, n) && !inside(p, n, true) : !memory_touches_device(p, n)) return true;
    trace_found(STANDIN_FOREIGN, "a copy of %llu bytes has its %s at %p, which is not %s", (unsigned long long)n, what, p,
                device ? "in one piece of the device's memory" : "host memory");
    return false;
}

cudaError_t copy_queue(card_call &call, copy_request c, cudaStream_t stream, bool wait)
{
    static const enum standin_kind kinds[] = { STANDIN_COPY_HOST, STANDIN_COPY_IN, STANDIN_COPY_OUT, STANDIN_COPY_ON };
    static const enum standin_engine engines[] = { STANDIN_COMPUTE, STANDIN_LINK_IN, STANDIN_LINK_OUT, STANDIN_COMPUTE };
    const double rates[] = { card.cfg.memory_bytes_per_s, card.cfg.copy_in_bytes_per_s, card.cfg.copy_out_bytes_per_s,
                             card.cfg.memory_bytes_per_s };
    CUstream_st *s = card_stream_of(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (c.kind == cudaMemcpyDefault) c.kind = kind_of(c.dst, c.src, c.n);
    if (c.kind < 0 || c.kind > cudaMemcpyDeviceToDevice) return cudaErrorInvalidMemcpyDirection;
    if (c.n == 0) return cudaSuccess;
    bool dst_device = c.kind == cudaMemcpyHostToDevice || c.kind == cudaMemcpyDeviceToDevice;
    bool src_device = c.kind == cudaMemcpyDeviceToHost || c.kind == cudaMemcpyDeviceToDevice;
    if (!side_good("destination", c.dst, c.n, dst_device) || !side_good("source", c.src, c.n, src_device))
        return cudaErrorInvalidValue;
    c.dst_pinned = !dst_device && is_pinned(c.dst, c.n);
    c.src_pinned = !src_device && is_pinned(c.src, c.n);
    bool pageable = (!dst_device && !c.dst_pinned) || (!src_device && !c.src_pinned);
    card_op *op = card_add(s, kinds[c.kind], engines[c.kind], c.n);
    op->duration_ns = card_time_of(c.n, rates[c.kind]);
    op->t.to = c.dst;
    op->t.from = c.src;
    card.counts.copied_bytes[c.kind] += c.n;
    if (pageable) {
        card.counts.copies_pageable++;
        trace_found(STANDIN_PAGEABLE, "%s has pageable host memory", trace_describe(*op).c_str());
        wait = true;
        if (c.kind == cudaMemcpyHostToDevice) {
            const char *from = static_cast<const char *>(c.src);
            c.staged = std::make_shared<std::vector<char>>(from, from + c.n);
            wait = false; /* back when it is staged; a card may wait for the stream even so */
        }
        card.counts.synchronisations++;
    }
    op->effect = [c](card_op &o) { copy_effect(o, c); };
    uint64_t upto = s->queued;
    card_submitted();
    if (wait) {
        order_clock vc = op->vc;
        card_wait(call.lock, [s, upto] { return s->done >= upto; });
        card_learn(vc, s->free_ns);
    }
    return wait ? card.sticky : cudaSuccess;
}

} // namespace

bool memory_on_device(const void *p, uint64_t n) { return inside(p, n, false) || inside(p, n, true); }

bool memory_touches_device(const void *p, uint64_t n)
{
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    for (auto i = card.blocks.upper_bound(at + n - 1); i != card.blocks.begin();) {
        --i;
        if (i->first + i->second.size_bytes <= at) return false;
        if (!i->second.host) return true;
    }
    return false;
}

bool memory_use(card_op &op, const char *what, const void *p, uint64_t n, bool write)
{
    if (n == 0) return true;
    if (!memory_on_device(p, n)) {
        std::string who = trace_describe(op) + ": its " + what;
        simt_access(who.c_str(), p, n, write);
        enum standin_found kind = simt_error_kind() == SIMT_FREED ? STANDIN_FREED : STANDIN_FOREIGN;
        trace_found(kind, "%s", simt_error() ? simt_error() : who.c_str());
        simt_reset_error();
        card_stick(cudaErrorIllegalAddress);
        return false;
    }
    if (write) simt_written(p, n);
    else if (uint64_t missing = card.cfg.plain || (card.cfg.gaps && op.t.kind == STANDIN_COPY_OUT) ? 0 : simt_unwritten_bytes(p, n))
        trace_found(STANDIN_UNWRITTEN, "%s: of its %s, %llu of %llu bytes were never written", trace_describe(op).c_str(),
                    what, (unsigned long long)missing, (unsigned long long)n);
    order_touch(op, p, n, write);
    return true;
}

void memory_free_largest(void)
{
    auto largest = card.blocks.end();
    for (auto i = card.blocks.begin(); i != card.blocks.end(); ++i)
        if (!i->second.host && (largest == card.blocks.end() || i->second.size_bytes > largest->second.size_bytes)) largest = i;
    if (largest != card.blocks.end()) release(reinterpret_cast<void *>(largest->first), false);
}

void memory_reset(void)
{
    while (!card.blocks.empty()) {
        auto i = card.blocks.begin();
        release(reinterpret_cast<void *>(i->first), i->second.host);
    }
    card.pinned.clear();
}

extern "C" {

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    card_call call("cudaMemGetInfo");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    *total_bytes = card.cfg.memory_bytes;
    *free_bytes = card.cfg.memory_bytes - card.cfg.context_bytes - card.counts.device_bytes;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t n)
{
    card_call call("cudaMalloc");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    *p = nullptr;
    if (n > card.cfg.memory_bytes - card.cfg.context_bytes - card.counts.device_bytes)
        return call.end(cudaErrorMemoryAllocation);
    if (n) *p = allocate(n, false);
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) { return give_back("cudaFree", p, false); }

cudaError_t cudaHostAlloc(void **p, size_t n, unsigned int flags)
{
    card_call call("cudaHostAlloc");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    if (flags > 7 || n == 0) return call.end(cudaErrorInvalidValue);
    *p = allocate(n, true);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *p) { return give_back("cudaFreeHost", p, true); }

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags)
{
    card_call call("cudaHostGetDevicePointer");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    if (flags || !inside(host, 1, true)) return call.end(cudaErrorInvalidValue);
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *p, size_t n, unsigned int flags)
{
    card_call call("cudaHostRegister");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    if (!p || n == 0 || flags > 15) return call.end(cudaErrorInvalidValue);
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    uint64_t sum = n;
    for (const auto &r : card.pinned) {
        if (r.first < at + n && at < r.first + r.second.size_bytes) return call.end(cudaErrorHostMemoryAlreadyRegistered);
        sum += r.second.size_bytes;
    }
    if (sum > card.cfg.pinned_limit_bytes) return call.end(cudaErrorMemoryAllocation);
    card.counts.registrations++;
    card.pinned[at] = { card_planted(STANDIN_PLANT_UNPINNED) ? 0 : n };
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *p)
{
    card_call call("cudaHostUnregister", false);
    bool known = card.pinned.erase(reinterpret_cast<uintptr_t>(p)) > 0;
    return call.end(call.failed != cudaSuccess ? call.failed : known ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    card_call call("cudaMemcpyAsync");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    return call.end(copy_queue(call, { dst, src, n, kind, nullptr, false, false }, stream, false));
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind)
{
    card_call call("cudaMemcpy");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    card.counts.synchronisations++;
    return call.end(copy_queue(call, { dst, src, n, kind, nullptr, false, false }, nullptr, true));
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t stream)
{
    card_call call("cudaMemsetAsync");
    if (call.failed != cudaSuccess) return call.end(call.failed);
    CUstream_st *s = card_stream_of(stream);
    if (!s) return call.end(cudaErrorInvalidResourceHandle);
    if (n == 0) return cudaSuccess;
    if (!side_good("destination", p, n, true)) return call.end(cudaErrorInvalidValue);
    card_op *op = card_add(s, STANDIN_ZERO, STANDIN_COMPUTE, n);
    op->duration_ns = card_time_of(n, card.cfg.memory_bytes_per_s);
    op->effect = [p, value, n](card_op &o) {
        if (memory_use(o, "destination", p, n, true)) memset(p, value, n);
    };
    card_submitted();
    return cudaSuccess;
}
}
