/* tests/gpu/standin/card.cpp - the card: queues of streams, the seeded choice of what runs, virtual time, modes.
 *
 * Owns card, and the thread of STANDIN_THREAD. What an operation does is its closure's. The test's thread, the
 * product's threads and the card's own call this, one at a time under card_lock; callbacks run without it. */
#include "card.h"
#include "../simt/simt.h"
#include "standin_sim.h"
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <thread>

card_state card;
std::recursive_mutex card_lock;
thread_local bool card_in_callback;
thread_local cudaError_t card_last_error;

namespace {

std::condition_variable_any changed;
std::thread runner;
bool stop;
uint64_t (*sim_now)(void *);
void (*sim_kick)(void *);
void *sim_arg;
std::vector<card_op *> running; /* SIM: begun, not ended */

typedef std::unique_lock<std::recursive_mutex> held;

uint64_t time_now(void)
{
    if (card.cfg.mode == STANDIN_SIM) card.now_ns = std::max(card.now_ns, sim_now(sim_arg));
    return card.now_ns;
}

/* The first operation of the stream may begin, its engine aside. */
bool may_begin(const CUstream_st *s)
{
    if (s->queue.empty() || s->queue.front()->running) return false;
    const card_op &op = *s->queue.front();
    return !op.wait || op.wait->done;
}

/* A sticky error takes effect; a planned one is made. */
void kernel_counts(card_op &op)
{
    if (op.t.kind != STANDIN_LAUNCH && op.t.kind != STANDIN_PRODUCT) return;
    if (op.t.kind == STANDIN_LAUNCH) card.counts.kernels++;
    else card.counts.products++;
    if (card.kernel_countdown && --card.kernel_countdown == 0) card_stick(card.kernel_error);
}

void effect(card_op &op)
{
    op.effected = true;
    if (card.sticky == cudaSuccess) kernel_counts(op);
    if (card.sticky != cudaSuccess) {
        op.t.skipped = true;
        return;
    }
    if (!op.effect) return;
    order_begin(op);
    op.effect(op);
    order_end(op);
}

void call_back(card_op &op, held &lock)
{
    if (!op.callback && !op.host_fn) return;
    cudaError_t status = card.sticky;
    card.counts.callbacks++;
    if (status != cudaSuccess) card.counts.callbacks_failed++;
    card_learn(op.vc, op.t.end_ns);
    if (op.host_fn && status != cudaSuccess) {
        op.t.skipped = true; /* cudaLaunchHostFunc: "will not be called in the event of an error" */
        return;
    }
    bool outer = card_in_callback;
    lock.unlock();
    card_in_callback = true;
    if (op.callback) op.callback(op.stream, status, op.arg);
    else op.host_fn(op.arg);
    card_in_callback = outer;
    lock.lock();
}

void stream_free(CUstream_st *s)
{
    card.streams[s->index] = nullptr;
    delete s;
}

/* The first operation of its stream is over. */
void finish(card_op *op, held &lock)
{
    if (!op->effected) effect(*op);
    call_back(*op, lock);
    CUstream_st *s = op->stream;
    if (op->record) {
        op->record->done = true;
        op->record->at_ns = op->t.end_ns;
        op->record->vc = op->vc;
    }
    trace_add(*op);
    s->free_ns = op->t.end_ns;
    s->done_vc = op->vc;
    s->done++;
    s->queue.pop_front();
    if (s->destroyed && s->queue.empty()) stream_free(s);
    changed.notify_all();
}

void begin(card_op *op, uint64_t at_ns)
{
    op->running = true;
    op->t.begin_ns = at_ns;
    if (card.sticky != cudaSuccess) op->duration_ns = 0;
    op->t.end_ns = at_ns + op->duration_ns;
}

/* MANUAL, THREAD: one operation from begin to end. */
bool run_one(held &lock)
{
    std::vector<CUstream_st *> ready;
    for (CUstream_st *s : card.streams)
        if (s && may_begin(s)) ready.push_back(s);
    if (ready.empty()) return false;
    CUstream_st *s = ready[0];
    if (card.cfg.seed) s = ready[card_random(ready.size())];
    else
        for (CUstream_st *other : ready)
            if (other->queue.front()->t.number < s->queue.front()->t.number) s = other;
    card_op *op = s->queue.front().get();
    uint64_t at = std::max(s->free_ns, op->t.queued_ns);
    if (op->wait) at = std::max(at, op->wait->at_ns);
    if (op->t.engine) at = std::max(at, card.engine_free_ns[op->t.engine]);
    begin(op, at);
    if (op->t.engine) card.engine_free_ns[op->t.engine] = op->t.end_ns;
    finish(op, lock);
    return true;
}

/* SIM: everything that begins or ends at this instant, one after the other as the seed says. */
bool step_at(uint64_t now, held &lock)
{
    std::vector<card_op *> can;
    for (card_op *op : running)
        if (op->t.end_ns <= now) can.push_back(op);
    for (CUstream_st *s : card.streams) {
        if (!s || !may_begin(s)) continue;
        card_op *op = s->queue.front().get();
        if (!op->t.engine || !card.engine_busy[op->t.engine]) can.push_back(op);
    }
    if (can.empty()) return false;
    card_op *op = can[card_random(can.size())];
    if (!op->running) {
        begin(op, now);
        if (op->t.engine) card.engine_busy[op->t.engine] = true;
        if (!op->late) effect(*op);
        running.push_back(op);
    } else {
        running.erase(std::find(running.begin(), running.end(), op));
        if (op->t.engine) card.engine_busy[op->t.engine] = false;
        finish(op, lock);
    }
    return true;
}

uint64_t next_end(void)
{
    uint64_t next = UINT64_MAX;
    for (const card_op *op : running) next = std::min(next, op->t.end_ns);
    return next;
}

void thread_main(void)
{
    held lock(card_lock);
    while (!stop) {
        if (!run_one(lock)) {
            changed.wait(lock);
            continue;
        }
        lock.unlock(); /* who queues comes in between */
        std::this_thread::yield();
        lock.lock();
    }
}

void set_defaults(standin_cfg &c)
{
    auto standard = [](auto &v, auto value) { if (v == 0) v = value; };
    standard(c.devices, 1);
    standard(c.driver_version, 13000);
    standard(c.runtime_version, 13000);
    if (c.cc_major == 0) c.cc_major = 8, c.cc_minor = 9;
    standard(c.memory_bytes, (uint64_t)24 << 30);
    standard(c.context_bytes, (uint64_t)256 << 20);
    standard(c.pinned_limit_bytes, UINT64_MAX);
    standard(c.copy_in_bytes_per_s, 16e9);
    standard(c.copy_out_bytes_per_s, 16e9);
    standard(c.memory_bytes_per_s, 400e9);
    standard(c.flops_per_s, 40e12);
    standard(c.kernel_threads_per_s, 20e9);
    standard(c.launch_ns, (uint64_t)3000);
}

CUstream_st *stream_new(void)
{
    CUstream_st *s = new CUstream_st();
    s->index = (uint32_t)card.streams.size();
    card.streams.push_back(s);
    return s;
}

} // namespace

uint64_t card_random(uint64_t below)
{
    uint64_t z = card.random += 0x9e3779b97f4a7c15u; /* splitmix64 (Steele, Lea, Flood 2014) */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return below ? (z ^ (z >> 31)) % below : 0;
}

uint64_t card_time_of(uint64_t bytes, double rate)
{
    return card.cfg.launch_ns + (uint64_t)((double)bytes / rate * 1e9);
}

void card_stick(cudaError_t e)
{
    if (card.sticky == cudaSuccess) card.sticky = e;
}

bool card_planted(enum standin_plant what)
{
    card.plant_places[what]++;
    return card.plant_left[what] && --card.plant_left[what] == 0;
}

void card_learn(const order_clock &vc, uint64_t at_ns)
{
    order_join(card.host_vc, vc);
    card.host_ns = std::max(card.host_ns, at_ns);
}

CUstream_st *card_stream_of(cudaStream_t s)
{
    if (!s) {
        trace_found(STANDIN_DEFAULT_STREAM, "work is queued on the default stream");
        return card.streams[0];
    }
    for (CUstream_st *known : card.streams)
        if (known == s && !known->destroyed) return known;
    trace_found(STANDIN_HANDLE, "a stream is used that is not there, or was destroyed");
    return nullptr;
}

card_op *card_add(CUstream_st *s, enum standin_kind kind, enum standin_engine engine, uint64_t bytes)
{
    std::unique_ptr<card_op> op(new card_op());
    if (card_planted(STANDIN_PLANT_FREE)) memory_free_largest();
    order_join(s->vc, card.host_vc);
    if (s->vc.size() <= s->index) s->vc.resize(s->index + 1);
    s->vc[s->index]++;
    op->vc = s->vc;
    op->stream = s;
    op->t.number = ++card.numbers;
    op->t.stream = s->index;
    op->t.kind = kind;
    op->t.engine = engine;
    op->t.bytes = bytes;
    op->t.queued_ns = card.cfg.mode == STANDIN_SIM ? time_now() : card.host_ns;
    op->late = card.cfg.seed && card_random(2);
    if (engine) op->duration_ns = card.cfg.launch_ns;
    s->queued++;
    s->queue.push_back(std::move(op));
    return s->queue.back().get();
}

void card_submitted(void)
{
    if (card.cfg.mode == STANDIN_SIM) sim_kick(sim_arg);
    else changed.notify_all();
}

bool card_wait(held &lock, const std::function<bool()> &done)
{
    while (!done()) {
        if (card.cfg.mode == STANDIN_THREAD) {
            changed.wait(lock);
        } else if (card.cfg.mode == STANDIN_MANUAL) {
            if (!run_one(lock)) return false;
        } else if (!step_at(time_now(), lock)) {
            uint64_t next = next_end();
            if (next == UINT64_MAX) return false;
            card.now_ns = std::max(card.now_ns, next);
        }
    }
    return true;
}

/* --- a session */

extern "C" void standin_open(const struct standin_cfg *cfg)
{
    held lock(card_lock);
    if (card.open) abort();
    card = card_state();
    card.cfg = *cfg;
    set_defaults(card.cfg);
    card.open = true;
    card.random = cfg->seed;
    card_last_error = cudaSuccess;
    stream_new();
    simt_reset_error();
    simt_seed(cfg->plain ? 0 : cfg->seed); /* without checks, threads of kernels in order: faster */
    simt_checks(cfg->plain ? 0 : SIMT_CHECK_ALL);
    trace_reset();
    order_reset();
    stop = false;
    if (cfg->mode == STANDIN_THREAD) runner = std::thread(thread_main);
}

extern "C" void standin_close(void)
{
    if (runner.joinable()) {
        {
            held lock(card_lock);
            stop = true;
            changed.notify_all();
        }
        runner.join();
    }
    held lock(card_lock);
    running.clear();
    for (CUstream_st *s : card.streams) delete s;
    for (CUevent_st *e : card.events) delete e;
    card.streams.clear();
    card.events.clear();
    memory_reset();
    order_reset();
    card.open = false;
}

extern "C" uint64_t standin_run(uint64_t n)
{
    held lock(card_lock);
    uint64_t ran = 0;
    if (card.cfg.mode != STANDIN_MANUAL) return 0;
    while (ran < n && run_one(lock)) ran++;
    return ran;
}

/* --- for sim.c */

extern "C" void standin_sim_attach(uint64_t (*now)(void *), void (*kick)(void *), void *arg)
{
    sim_now = now;
    sim_kick = kick;
    sim_arg = arg;
}

extern "C" uint64_t standin_sim_advance(void)
{
    held lock(card_lock);
    while (step_at(time_now(), lock)) {}
    return next_end();
}

extern "C" void standin_plant(enum standin_plant what, uint64_t n)
{
    held lock(card_lock);
    card.plant_left[what] = n;
}

extern "C" uint64_t standin_plant_places(enum standin_plant what) { return card.plant_places[what]; }

extern "C" int standin_sticky(void) { return card.sticky; }

/* --- streams, for calls.cpp */
CUstream_st *card_stream_new(void) { return stream_new(); }
void card_stream_free(CUstream_st *s) { stream_free(s); }
