/* tests/gpu/standin/card.h - private to tests/gpu/standin: the card's record, operations, streams, events.
 *   card.cpp    queues, the choice of who runs, time, modes
 *   order.cpp   which operation is before which, and what memory they touched
 *   memory.cpp  device memory, pinned memory, copies
 *   calls.cpp   CUDA's functions for streams, events, the card
 *   lt.cpp      cuBLASLt
 *   dnn.cpp     cuDNN's descriptors and plans; dnn_run.cpp what they compute
 *   trace.cpp   what was run, counts, findings
 *   sim.c       the lane of a simulated exec
 * All under card_lock, except callbacks, which run without it. */
#ifndef TESTS_STANDIN_CARD_H
#define TESTS_STANDIN_CARD_H

#include "standin.h"
#include <cublasLt.h>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

/* --- order.cpp */
typedef std::vector<uint32_t> order_clock; /* of each stream: operations that are before */
void order_join(order_clock &into, const order_clock &from);

struct card_record { /* of an event */
    bool done = false;
    uint64_t at_ns = 0;
    order_clock vc;
};

struct card_op {
    struct standin_op t = {};
    CUstream_st *stream = nullptr;
    std::string name;
    order_clock vc;
    uint64_t duration_ns = 0;
    std::function<void(card_op &)> effect;  /* none: no work */
    std::shared_ptr<card_record> wait, record;
    cudaStreamCallback_t callback = nullptr;
    cudaHostFn_t host_fn = nullptr;
    void *arg = nullptr;
    bool running = false, late = false, effected = false;
};

struct CUstream_st {
    uint32_t index = 0;
    order_clock vc;                     /* of the next operation */
    order_clock done_vc;                /* of the last one that ran */
    std::deque<std::unique_ptr<card_op>> queue;
    uint64_t free_ns = 0;
    uint64_t done = 0, queued = 0;
    bool destroyed = false;             /* goes when it is empty */
};
struct CUevent_st {
    unsigned flags = 0;
    std::shared_ptr<card_record> last;  /* none: never recorded */
};

struct card_block {                     /* device memory, or pinned memory that we allocated */
    uint64_t size_bytes;
    std::string name;
    bool host;
};
struct card_pinned { uint64_t size_bytes; };

struct card_state {
    standin_cfg cfg = {};
    bool open = false;
    std::vector<CUstream_st *> streams; /* [0]: the default stream */
    std::vector<CUevent_st *> events;
    std::map<uintptr_t, card_block> blocks;
    std::map<uintptr_t, card_pinned> pinned;
    order_clock host_vc;                /* what the host knows to be done */
    uint64_t host_ns = 0;               /* when it learnt the last of it */
    uint64_t now_ns = 0;
    uint64_t engine_free_ns[STANDIN_ENGINES] = {};
    bool engine_busy[STANDIN_ENGINES] = {}; /* SIM */
    uint64_t numbers = 0;
    uint64_t random = 0;
    cudaError_t sticky = cudaSuccess;
    uint64_t kernel_countdown = 0;
    cudaError_t kernel_error = cudaSuccess;
    standin_counts counts = {};
    uint64_t plant_left[STANDIN_PLANTS] = {}, plant_places[STANDIN_PLANTS] = {};
};
extern card_state card;
extern std::recursive_mutex card_lock;
extern thread_local bool card_in_callback;
extern thread_local cudaError_t card_last_error;

/* --- one call of CUDA: takes the lock; `failed` says what it returns at once */
struct card_call {
    std::unique_lock<std::recursive_mutex> lock;
    cudaError_t failed = cudaSuccess;   /* planned, sticky, or not allowed here */
    bool planned = false;
    /* always: it is told the sticky error, but does its work (what frees) */
    explicit card_call(const char *name, bool sticky_matters = true);
    cudaError_t end(cudaError_t e);     /* remembers it as this thread's last error */
};

uint64_t card_random(uint64_t below);
CUstream_st *card_stream_of(cudaStream_t s);    /* NULL: none such (a finding) */
card_op *card_add(CUstream_st *s, enum standin_kind kind, enum standin_engine engine, uint64_t bytes);
/* After the last change of a queued operation: somebody may run it. */
void card_submitted(void);
uint64_t card_time_of(uint64_t bytes, double rate);
/* Runs, or waits for who runs, until `done`. Counted by the caller. false: nothing is left to run. */
bool card_wait(std::unique_lock<std::recursive_mutex> &lock, const std::function<bool()> &done);
void card_stick(cudaError_t e);
bool card_planted(enum standin_plant what); /* counts the place; true: here */
void card_learn(const order_clock &vc, uint64_t at_ns); /* the host knows */

/* --- order.cpp */
void order_begin(card_op &op);
void order_touch(card_op &op, const void *p, uint64_t size_bytes, bool write);
void order_end(card_op &op);
void order_watch_begin(void); /* a kernel's accesses, until order_end */
void order_forget(const void *p, uint64_t size_bytes);
void order_reset(void);

/* --- memory.cpp */
/* Is [p, p + size) in one block of device memory (or pinned memory that kernels see, with host)? */
bool memory_on_device(const void *p, uint64_t size_bytes);
bool memory_touches_device(const void *p, uint64_t size_bytes);
/* Before an operation reads or writes device memory, in its effect: false: a finding and a sticky error. */
bool memory_use(card_op &op, const char *what, const void *p, uint64_t size_bytes, bool write);
void memory_free_largest(void);
void memory_reset(void);

/* --- trace.cpp */
__attribute__((format(printf, 2, 3))) void trace_found(enum standin_found kind, const char *fmt, ...);
void trace_add(const card_op &op);
std::string trace_name(uint64_t number); /* "kernel x on stream 2 (operation 17)" */
std::string trace_describe(const card_op &op);
void trace_hash_bytes(const void *p, uint64_t size_bytes);
void trace_reset(void);
bool trace_plan_hit(const char *name, int *error); /* counts the call */

/* --- lt.cpp */
uint64_t lt_live(void);

/* --- sim.c */
#endif
