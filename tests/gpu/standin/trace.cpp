/* tests/gpu/standin/trace.cpp - what was run, what was found, how often each call was made, and which of them is to
 * fail.
 *
 * Under card_lock. */
#include "dnn.h"
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <set>
#include <unordered_map>

namespace {

struct plan { std::string call; uint64_t left; int error; }; /* call "": any */

constexpr size_t FINDINGS_MAX = 64;
std::vector<std::string> findings;
uint64_t found[STANDIN_FOUND_N];
std::vector<standin_op> ops;
std::unordered_map<uint64_t, std::string> names; /* of operations that ran, by number */
std::set<std::string> kernel_names;
std::map<std::string, uint64_t> calls;
std::vector<plan> plans;
std::string hit;
uint64_t hash;

const char *const kind_names[] = { "copy in", "copy out", "copy on the device", "copy on the host", "zero", "kernel",
                                   "product", "record", "wait", "callback", "host function" };

uint64_t mix(uint64_t h, const void *p, size_t n) /* FNV-1a */
{
    for (size_t i = 0; i < n; i++) h = (h ^ static_cast<const unsigned char *>(p)[i]) * UINT64_C(1099511628211);
    return h;
}

} // namespace

void trace_found(enum standin_found kind, const char *fmt, ...)
{
    char text[1024];
    found[kind]++;
    if (findings.size() >= FINDINGS_MAX) return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    findings.push_back(text);
}

std::string trace_describe(const card_op &op)
{
    char text[512];
    snprintf(text, sizeof text, "%s%s%s of stream %u (operation %llu, %llu bytes)", kind_names[op.t.kind],
             op.name.empty() ? "" : " ", op.name.c_str(), op.t.stream, (unsigned long long)op.t.number,
             (unsigned long long)op.t.bytes);
    return text;
}

std::string trace_name(uint64_t number)
{
    auto i = names.find(number);
    if (i != names.end()) return i->second;
    for (const CUstream_st *s : card.streams)
        if (s && !s->queue.empty() && s->queue.front()->t.number == number) return trace_describe(*s->queue.front());
    return "operation " + std::to_string(number);
}

void trace_add(const card_op &op)
{
    standin_op t = op.t;
    t.name = op.name.empty() ? "" : kernel_names.insert(op.name).first->c_str();
    ops.push_back(t);
    if (op.effect) names[op.t.number] = trace_describe(op);
    uint64_t numbers[] = { t.number, t.stream, (uint64_t)t.kind, t.bytes, t.begin_ns, t.end_ns };
    hash = mix(hash, numbers, sizeof numbers);
}

void trace_hash_bytes(const void *p, uint64_t n) { hash = mix(hash, p, n); }

void trace_reset(void)
{
    dnn_reset();
    findings.clear();
    memset(found, 0, sizeof found);
    ops.clear();
    names.clear();
    calls.clear();
    plans.clear();
    hit.clear();
    hash = UINT64_C(1469598103934665603);
}

bool trace_plan_hit(const char *name, int *error)
{
    bool fails = false;
    calls[name]++;
    card.counts.calls++;
    for (plan &p : plans) {
        if (p.left == 0 || (!p.call.empty() && p.call != name) || --p.left > 0) continue;
        *error = !p.call.empty() ? p.error
                 : strncmp(name, "cublas", 6) == 0 ? (int)CUBLAS_STATUS_EXECUTION_FAILED
                 : strncmp(name, "cudnn", 5) == 0  ? (int)CUDNN_STATUS_EXECUTION_FAILED
                                                   : p.error;
        hit = name;
        fails = true;
    }
    return fails;
}

extern "C" {

uint64_t standin_found(enum standin_found kind) { return found[kind]; }

uint64_t standin_found_any(void)
{
    uint64_t n = 0;
    for (int k = 0; k < STANDIN_FOUND_N; k++)
        if (k != STANDIN_PAGEABLE) n += found[k];
    return n;
}

const char *standin_finding(uint64_t i) { return i < findings.size() ? findings[i].c_str() : nullptr; }

void standin_fail(const char *call, uint64_t n, int error)
{
    std::unique_lock<std::recursive_mutex> lock(card_lock);
    plans.push_back({ call ? call : "", n, error });
}

void standin_fail_kernel(uint64_t n, int error)
{
    std::unique_lock<std::recursive_mutex> lock(card_lock);
    card.kernel_countdown = n;
    card.kernel_error = static_cast<cudaError_t>(error);
}

const char *standin_failed_call(void) { return hit.empty() ? nullptr : hit.c_str(); }

void standin_counts_read(struct standin_counts *out)
{
    std::unique_lock<std::recursive_mutex> lock(card_lock);
    *out = card.counts;
    out->queued = card.numbers;
    out->live_allocations = card.blocks.size();
    out->live_registrations = card.pinned.size();
    out->live_descriptors = lt_live() + dnn_live();
}

uint64_t standin_calls_of(const char *call)
{
    std::unique_lock<std::recursive_mutex> lock(card_lock);
    auto i = calls.find(call);
    return i == calls.end() ? 0 : i->second;
}

uint64_t standin_trace(const struct standin_op **out)
{
    *out = ops.data();
    return ops.size();
}

uint64_t standin_trace_hash(void) { return hash; }

uint64_t standin_busy_ns(enum standin_engine e)
{
    uint64_t sum = 0;
    for (const standin_op &o : ops)
        if (o.engine == e) sum += o.end_ns - o.begin_ns;
    return sum;
}

/* One engine's operations do not overlap each other. */
uint64_t standin_overlap_ns(enum standin_engine a, enum standin_engine b)
{
    std::vector<std::pair<uint64_t, uint64_t>> of[2];
    for (const standin_op &o : ops)
        for (int i = 0; i < 2; i++)
            if (o.engine == (i ? b : a) && o.end_ns > o.begin_ns) of[i].push_back({ o.begin_ns, o.end_ns });
    uint64_t sum = 0;
    for (auto &v : of) std::sort(v.begin(), v.end());
    for (size_t i = 0, j = 0; i < of[0].size() && j < of[1].size();) {
        uint64_t from = std::max(of[0][i].first, of[1][j].first), to = std::min(of[0][i].second, of[1][j].second);
        if (to > from) sum += to - from;
        if (of[0][i].second < of[1][j].second) i++;
        else j++;
    }
    return sum;
}

bool standin_trace_write(const char *path)
{
    FILE *f = fopen(path, "w");
    if (!f) return false;
    const char *comma = "";
    fprintf(f, "{\"traceEvents\":[");
    for (const standin_op &o : ops) {
        std::string name = o.name;
        std::replace(name.begin(), name.end(), '"', '\'');
        fprintf(f, "%s\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%u,\"ts\":%.3f,\"dur\":%.3f,\"name\":\"%s %s\",\"args\":{\"bytes\":%llu,"
                "\"number\":%llu}}", comma, (int)o.engine, o.stream, (double)o.begin_ns / 1e3,
                (double)(o.end_ns - o.begin_ns) / 1e3, kind_names[o.kind], name.c_str(), (unsigned long long)o.bytes,
                (unsigned long long)o.number);
        comma = ",";
    }
    fprintf(f, "\n]}\n");
    return fclose(f) == 0;
}
}
