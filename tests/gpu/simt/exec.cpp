/* tests/gpu/simt/exec.cpp - launches, blocks and threads; barriers and warp operations.
 *
 * Owns the threads of the one running block, the choice of who runs next, and the first fault. What memory means
 * is memory.cpp's. A thread is begun on the stack of the one that ended before it: a block in which nobody
 * waits is a loop. One that waits keeps its stack, and the next one gets another.
 *
 * One OS thread. All functions called simt_* here run on a fiber, when a kernel calls them. */
#include "simt_impl.h"
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct simt_where simt_here;
struct simt_stats exec_stats;
/* What kernels read (cuda_runtime.h). */
extern "C" {
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
}

namespace {

enum state : uint8_t { UNSTARTED, READY, RUNNING, AT_BARRIER, AT_WARP, ENDED };

struct cuda_thread {
    struct fiber *fiber;            /* while it runs or waits */
    uint3 index;
    enum state state;
    uint32_t clock;                 /* simt_where.clock while another runs */
    /* AT_WARP: */
    enum simt_warp_kind kind;
    unsigned mask;
    int arg, width;
    uint64_t value, result;
    const void *pc;
};

constexpr uint32_t SERIAL_TURN = 1u << 31; /* no launch has as many blocks and barriers as are left then */

struct block_start { uint32_t serial; uint3 index; };

/* The launch that runs, and its current block. */
cuda_thread threads[SIMT_BLOCK_MAX];
uint32_t knows[SIMT_BLOCK_MAX][32]; /* of each thread: simt_where.knows */
/* Lanes of a warp that wait in one operation; mixed: lanes of this block's warp wait in several, all are looked at. */
struct warp_wait { enum simt_warp_kind kind; unsigned mask, came; bool mixed; };
warp_wait warps[SIMT_BLOCK_MAX / 32];
uint32_t thread_count, ended_count, at_barrier;
uint32_t ready[SIMT_BLOCK_MAX], ready_count;
cuda_thread *current;
const char *barrier_path, *barrier_file; /* the latter: its last component */
int barrier_line;
bool abandoned;                     /* a fault ended this launch */
std::vector<block_start> &block_starts = *new std::vector<block_start>(); /* of this launch */

std::vector<fiber *> &idle_fibers = *new std::vector<fiber *>();
std::vector<fiber *> &all_fibers = *new std::vector<fiber *>();
fiber *current_fiber;
uint32_t serial_next = 1;
uint64_t seed, random_state;

char error_text[1024];
enum simt_fault error_kind;

void thread_loop(fiber *self);

/* ------------------------------------------------------------------------------------------- who runs next */

void make_ready(uint32_t t)
{
    threads[t].state = READY;
    ready[ready_count++] = t;
}

/* Any of the ready ones; seed 0: the last in the list, where the lowest is. NULL: none. */
cuda_thread *take_ready(void)
{
    if (ready_count == 0) return nullptr;
    uint32_t i = ready_count - 1;
    if (seed && ready_count > 1) i = (uint32_t)(((exec_random() >> 32) * ready_count) >> 32);
    uint32_t t = ready[i];
    ready[i] = ready[--ready_count];
    return &threads[t];
}

void become(cuda_thread *t, fiber *f)
{
    current = t;
    current_fiber = f;
    t->fiber = f;
    t->state = RUNNING;
    threadIdx = t->index;
    simt_here.running = true;
    simt_here.thread = (uint32_t)(t - threads);
    simt_here.clock = t->clock;
    simt_here.knows = knows[simt_here.thread];
    simt_here.stack_low = fiber_stack_low(f);
    simt_here.stack_size = fiber_stack_high(f) - simt_here.stack_low;
}

fiber *fiber_take(void)
{
    if (idle_fibers.empty()) {
        all_fibers.push_back(fiber_new(thread_loop));
        return all_fibers.back();
    }
    fiber *f = idle_fibers.back();
    idle_fibers.pop_back();
    return f;
}

/* From the fiber `from` (NULL: the OS thread) to another thread, or to the OS thread when t is NULL. */
void go(fiber *from, cuda_thread *t)
{
    fiber *to = nullptr;
    if (t) {
        to = t->fiber ? t->fiber : fiber_take();
        become(t, to);
    } else {
        current = nullptr;
        current_fiber = nullptr;
        simt_here.running = false;
    }
    if (to == from) return;
    exec_stats.switches++;
    fiber_switch(from, to);
}

/* The running thread waits, its state says for what. Comes back when it runs again. */
void wait_here(void)
{
    current->clock = simt_here.clock;
    go(current_fiber, take_ready());
}

void thread_ended(void)
{
    current->state = ENDED;
    current->fiber = nullptr;
    ended_count++;
    if (at_barrier > 0)
        exec_fail(SIMT_BARRIER, nullptr, "ends, while %u of the block's %u threads wait at __syncthreads in %s:%d",
                  at_barrier, thread_count, barrier_file, barrier_line);
}

/* A fiber's life: threads, one after another; idle when the next one to run has a stack of its own. */
void thread_loop(fiber *self)
{
    for (;;) {
        simt_here.launch->call(simt_here.launch);
        thread_ended();
        cuda_thread *t = take_ready();
        if (t && !t->fiber) {
            become(t, self);
            continue;
        }
        idle_fibers.push_back(self);
        go(self, t);
    }
}

/* ------------------------------------------------------------------------------------------- blocks, launches */

const char *const warp_names[] = { "__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                   "__shfl_xor_sync", "__ballot_sync" };
const char *warp_name(enum simt_warp_kind k) { return warp_names[k]; }

/* Nobody can run and not all have ended: some wait in a warp operation for lanes that do not come. (Where all that
 * have not ended wait at the barrier, the last one to come or to end has said so.) */
void name_deadlock(void)
{
    uint32_t t = 0, lane = 0;
    while (t < thread_count && threads[t].state != AT_WARP) t++;
    const cuda_thread *warp = &threads[t & ~31u];
    while (lane < 31 && (!(threads[t].mask >> lane & 1) || warp[lane].state == AT_WARP)) lane++;
    char text[128];
    exec_name_thread(simt_here.serial, t, text, sizeof text);
    if (warp[lane].state == AT_BARRIER)
        exec_fail(SIMT_WARP, threads[t].pc, "%s waits in %s with mask 0x%08x, and lane %u of it at __syncthreads in %s:%d", text,
                  warp_name(threads[t].kind), threads[t].mask, lane, barrier_file, barrier_line);
    else
        exec_fail(SIMT_WARP, threads[t].pc, "%s waits in %s with mask 0x%08x, and lane %u of it has ended", text,
                  warp_name(threads[t].kind), threads[t].mask, lane);
}

uint3 unfold(uint64_t i, dim3 d)
{
    uint3 r;
    r.x = (unsigned)(i % d.x);
    r.y = (unsigned)(i / d.x % d.y);
    r.z = (unsigned)(i / d.x / d.y);
    return r;
}

void run_block(uint64_t index)
{
    blockIdx = unfold(index, gridDim);
    simt_here.serial = simt_here.block_first = serial_next++;
    block_starts.push_back({ simt_here.serial, blockIdx });
    ended_count = at_barrier = ready_count = 0;
    for (uint32_t t = 0; t < thread_count; t++) {
        threads[t].fiber = nullptr;
        threads[t].clock = 1;
    }
    if (memory_checked()) memset(knows, 0, thread_count * sizeof knows[0]);
    memset(warps, 0, sizeof warps);
    for (uint32_t t = thread_count; t-- > 0;) make_ready(t);
    memory_block_begin();
    go(nullptr, take_ready());
    if (!abandoned && ended_count < thread_count) name_deadlock();
    memory_block_end();
    exec_stats.blocks++;
    exec_stats.threads += thread_count;
}

/* After a fault: threads that will never end leave their stacks. */
void collect_fibers(void)
{
    idle_fibers = all_fibers;
    for (fiber *f : all_fibers) fiber_restart(f);
}

bool shape_ok(const cudaLaunchConfig_t &c)
{
    const dim3 &g = c.gridDim, &b = c.blockDim;
    if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535 || b.x == 0 ||
        b.y == 0 || b.z == 0 || b.x > 1024 || b.y > 1024 || b.z > 64 || (uint64_t)b.x * b.y * b.z > SIMT_BLOCK_MAX) {
        exec_fail(SIMT_LAUNCH, nullptr, "a grid of (%u,%u,%u) blocks of (%u,%u,%u) threads is none that a card takes "
                  "(blocks: at most 2147483647, 65535, 65535; threads: 1024, 1024, 64, together 1024; none 0)",
                  g.x, g.y, g.z, b.x, b.y, b.z);
        return false;
    }
    if (c.dynamicSmemBytes || c.numAttrs) {
        exec_fail(SIMT_LAUNCH, nullptr, "dynamic shared memory and launch attributes are not known here");
        return false;
    }
    return true;
}

uint64_t gcd(uint64_t a, uint64_t b) { return b ? gcd(b, a % b) : a; }

void run_blocks(void)
{
    uint64_t n = (uint64_t)gridDim.x * gridDim.y * gridDim.z, step = 1, at = 0;
    if (seed && n > 1) {
        /* All of them once, for a step that has no divisor in common with n. */
        at = exec_random() % n;
        do step = 1 + exec_random() % n;
        while (gcd(step, n) != 1);
    }
    for (uint64_t i = 0; i < n && !abandoned; i++) {
        run_block(at);
        at = (at + step) % n;
    }
}

} // namespace

extern "C" void simt_launch_run(const struct simt_launch *l)
{
    if (error_kind != SIMT_NONE) return;
    abandoned = false;
    if (serial_next > SERIAL_TURN) {
        memory_forget_order();
        serial_next = 1;
    }
    simt_here.launch = l;
    simt_here.os_thread = exec_os_thread();
    simt_here.launch_first = serial_next;
    simt_here.countdown = seed ? 1 + (exec_random() & 1023) : UINT64_MAX;
    block_starts.clear();
    blockDim = l->config.blockDim;
    gridDim = l->config.gridDim;
    if (shape_ok(l->config)) {
        thread_count = blockDim.x * blockDim.y * blockDim.z;
        for (uint32_t t = 0; t < thread_count; t++) threads[t].index = unfold(t, blockDim);
        run_blocks();
    }
    if (abandoned) collect_fibers();
    simt_here.launch = nullptr;
    exec_stats.launches++;
}

extern "C" void simt_launch_free(struct simt_launch *l)
{
    if (l) l->destroy(l);
}

extern "C" void *simt_launch_stream(const struct simt_launch *l) { return l->config.stream; }

extern "C" const char *simt_launch_name(const struct simt_launch *l) { return symbols_function(l->function); }

/* ------------------------------------------------------------------------------------------- what kernels call */

extern "C" void simt_syncthreads(const char *file, int line)
{
    if (ended_count > 0)
        exec_fail(SIMT_BARRIER, __builtin_return_address(0), "waits at __syncthreads, and %u of the block's %u threads "
                  "have ended and will not come", ended_count, thread_count);
    if (at_barrier == 0) {
        const char *slash = strrchr(file, '/');
        barrier_path = file;
        barrier_file = slash ? slash + 1 : file;
        barrier_line = line;
    } else if (line != barrier_line || strcmp(file, barrier_path) != 0) {
        exec_fail(SIMT_BARRIER, __builtin_return_address(0), "waits at __syncthreads, and %u other threads of the block "
                  "at another one, in %s:%d", at_barrier, barrier_file, barrier_line);
    }
    current->state = AT_BARRIER;
    if (++at_barrier == thread_count) {
        at_barrier = 0;
        simt_here.serial = serial_next++;
        exec_stats.barriers++;
        for (uint32_t t = thread_count; t-- > 0;) make_ready(t);
    }
    wait_here();
}

namespace {

/* The lane whose value lane `i` gets (PTX ISA, shfl: the segment of `width` lanes bounds it). */
int source_lane(const cuda_thread &t, int i)
{
    int first = i & ~(t.width - 1), last = first + t.width - 1, j = i;
    switch (t.kind) {
    case SIMT_SHFL: j = first + (t.arg & (t.width - 1)); break;
    case SIMT_SHFL_UP: j = i - t.arg; break;
    case SIMT_SHFL_DOWN: j = i + t.arg; break;
    case SIMT_SHFL_XOR: j = i ^ t.arg; break;
    default: break;
    }
    if (t.kind == SIMT_SHFL_UP && j < first) j = i;
    if (t.kind != SIMT_SHFL_UP && j > last) j = i;
    return j;
}

/* What every lane of the mask knows now, all others of it know too. */
void join_clocks(uint32_t warp_first, unsigned mask)
{
    uint32_t joined[32] = { 0 };
    for (uint32_t i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        for (uint32_t j = 0; j < 32; j++)
            if (knows[warp_first + i][j] > joined[j]) joined[j] = knows[warp_first + i][j];
    }
    for (uint32_t i = 0; i < 32; i++)
        if (mask >> i & 1) joined[i] = threads[warp_first + i].clock++;
    if (current->clock >> 21) exec_fail(SIMT_LAUNCH, nullptr, "calls __syncwarp more often than is counted here");
    for (uint32_t i = 0; i < 32; i++)
        if (mask >> i & 1) memcpy(knows[warp_first + i], joined, sizeof joined);
}

/* True when all lanes of the running thread's mask are in the same operation. */
bool all_came(uint32_t warp_first)
{
    uint32_t lanes = thread_count - warp_first < 32 ? thread_count - warp_first : 32;
    bool all = true;
    for (uint32_t i = 0; i < 32; i++) {
        if (!(current->mask >> i & 1)) continue;
        if (i >= lanes)
            exec_fail(SIMT_WARP, current->pc, "calls %s with mask 0x%08x, which names lane %u; the block has only %u lanes "
                      "of this warp", warp_name(current->kind), current->mask, i, lanes);
        const cuda_thread &t = threads[warp_first + i];
        if (t.state == ENDED)
            exec_fail(SIMT_WARP, current->pc, "calls %s with mask 0x%08x, which names lane %u; that one has ended and will "
                      "not come", warp_name(current->kind), current->mask, i);
        if (t.state == AT_WARP && (t.mask != current->mask || t.kind != current->kind))
            exec_fail(SIMT_WARP, current->pc, "calls %s with mask 0x%08x, which names lane %u; that one waits in %s with "
                      "mask 0x%08x", warp_name(current->kind), current->mask, i, warp_name(t.kind), t.mask);
        all &= t.state == AT_WARP;
    }
    return all;
}

/* The same, and counted where all wait in one operation; the first one's look finds what can never be. */
bool last_to_come(uint32_t warp_first)
{
    warp_wait &w = warps[warp_first / 32];
    if (w.came == 0) w.kind = current->kind, w.mask = current->mask;
    w.mixed |= w.kind != current->kind || w.mask != current->mask;
    if (w.mixed) return all_came(warp_first);
    bool all = w.came++ == 0 ? all_came(warp_first) : w.came == (unsigned)__builtin_popcount(w.mask);
    if (all) w.came = 0;
    return all;
}

void exchange(uint32_t warp_first, unsigned mask)
{
    uint64_t ballot = 0;
    for (uint32_t i = 0; i < 32; i++)
        if (mask >> i & 1) ballot |= (uint64_t)(threads[warp_first + i].value & 1) << i;
    for (uint32_t i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        cuda_thread &t = threads[warp_first + i];
        int j = source_lane(t, (int)i);
        if (j < 0 || j > 31 || !(mask >> j & 1))
            exec_fail(SIMT_WARP, t.pc, "in %s with mask 0x%08x lane %u reads from lane %d, which the mask does not "
                      "name", warp_name(t.kind), mask, i, j);
        t.result = t.kind == SIMT_BALLOT ? ballot : threads[warp_first + (uint32_t)j].value;
    }
}

} // namespace

extern "C" uint64_t simt_warp(enum simt_warp_kind kind, unsigned mask, uint64_t value, int arg, int width)
{
    uint32_t me = simt_here.thread, warp_first = me & ~31u;
    current->pc = __builtin_return_address(0);
    current->kind = kind;
    current->mask = mask;
    current->value = value;
    current->arg = arg;
    current->width = width;
    current->clock = simt_here.clock;
    if (!(mask >> (me & 31) & 1))
        exec_fail(SIMT_WARP, current->pc, "calls %s with mask 0x%08x, which does not name its own lane %u", warp_name(kind),
                  mask, me & 31);
    if (width < 1 || width > 32 || (width & (width - 1)))
        exec_fail(SIMT_WARP, current->pc, "calls %s with width %d; a power of two up to 32 is one", warp_name(kind), width);
    current->state = AT_WARP;
    if (last_to_come(warp_first)) {
        exec_stats.warp_ops++;
        exchange(warp_first, mask);
        if (kind == SIMT_SYNCWARP) join_clocks(warp_first, mask);
        simt_here.clock = current->clock;
        for (uint32_t i = 32; i-- > 0;)
            if (mask >> i & 1) make_ready(warp_first + i);
    }
    wait_here();
    return current->result;
}

void exec_preempt(void)
{
    if (seed == 0) {
        simt_here.countdown = UINT64_MAX;
        return;
    }
    simt_here.countdown = 1 + (exec_random() & 4095);
    if (ready_count == 0) return;
    make_ready(simt_here.thread);
    wait_here();
}


bool exec_on_stack(uintptr_t p)
{
    for (const fiber *f : all_fibers)
        if (p >= fiber_stack_low(f) && p < fiber_stack_high(f)) return true;
    return false;
}

bool exec_is_builtin(uintptr_t p)
{
    auto in = [p](const void *object, size_t size) { return p - reinterpret_cast<uintptr_t>(object) < size; };
    return in(&blockDim, sizeof blockDim) || in(&gridDim, sizeof gridDim) || in(&threadIdx, sizeof threadIdx) ||
           in(&blockIdx, sizeof blockIdx);
}

uint64_t exec_random(void)
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u; /* splitmix64 (Steele, Lea, Flood 2014) */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* ------------------------------------------------------------------------------------------- faults */

void exec_name_thread(uint32_t serial, uint32_t thread, char *out, size_t size)
{
    uint3 b = blockIdx, t = unfold(thread, blockDim);
    auto after = std::upper_bound(block_starts.begin(), block_starts.end(), serial,
                                  [](uint32_t v, const block_start &x) { return v < x.serial; });
    if (after != block_starts.begin()) b = (after - 1)->index;
    snprintf(out, size, "block (%u,%u,%u), thread (%u,%u,%u)", b.x, b.y, b.z, t.x, t.y, t.z);
}

void exec_fail(enum simt_fault kind, const void *pc, const char *fmt, ...)
{
    bool inside = simt_here.running;
    simt_here.running = false;
    if (error_kind == SIMT_NONE) {
        error_kind = kind;
        const char *line = symbols_line(pc);
        size_t n = 0, size = sizeof error_text;
        if (simt_here.launch)
            n += (size_t)snprintf(error_text, size, "kernel %s", simt_launch_name(simt_here.launch));
        if (line[0] && n < size) n += (size_t)snprintf(error_text + n, size - n, " (%s)", line);
        if (inside && n < size) {
            char who[128];
            exec_name_thread(simt_here.serial, simt_here.thread, who, sizeof who);
            n += (size_t)snprintf(error_text + n, size - n, ", %s", who);
        }
        if (n && n < size) n += (size_t)snprintf(error_text + n, size - n, "%s", inside ? " " : ": ");
        va_list args;
        va_start(args, fmt);
        if (n < size) vsnprintf(error_text + n, size - n, fmt, args);
        va_end(args);
    }
    abandoned = true;
    if (!inside) return;
    fiber *from = current_fiber;
    current = nullptr;
    current_fiber = nullptr;
    fiber_switch(from, nullptr);
    abort(); /* this stack is begun anew, never gone on with */
}

extern "C" const char *simt_error(void) { return error_kind == SIMT_NONE ? nullptr : error_text; }
extern "C" enum simt_fault simt_error_kind(void) { return error_kind; }
extern "C" void simt_reset_error(void) { error_kind = SIMT_NONE; }

extern "C" void simt_seed(uint64_t s)
{
    seed = s;
    random_state = s;
}

extern "C" void simt_stats_read(struct simt_stats *out) { *out = exec_stats; }
