/* gpu/host/kernels/deal.h - items of work over the threads of a team: each begins with a share of its
 * own, in order, and takes from the end of the largest other one when that is done.
 *
 * Equal shares alone end with their slowest thread, and on a machine whose cores also do checksums,
 * interrupts and other processes' work that is one that lost its core for a while: the others sleep
 * until it is back. With every thread at work all take their own shares, as if there were no deal.
 *
 * Who does an item must not matter for its result. One deal is one use: opened and set by the thread
 * that starts the team, then deal_take by all its threads. Lock-free; no memory of its own. */
#ifndef GPU_HOST_KERNELS_DEAL_H
#define GPU_HOST_KERNELS_DEAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { DEAL_SHARES_MAX = 128 }; /* threads beyond take of the others' from the beginning */

struct deal {
    uint32_t n; /* shares */
    struct {
        _Atomic uint64_t left; /* next item below, end above: 32 bits each */
        char line[56];         /* shares do not meet in a cache line */
    } share[DEAL_SHARES_MAX];
};

static inline void deal_open(struct deal *d, uint32_t threads)
{
    d->n = threads < DEAL_SHARES_MAX ? threads : DEAL_SHARES_MAX;
}

/* Share i has items 0..n-1; n below 2^32. */
static inline void deal_set(struct deal *d, uint32_t i, uint64_t n)
{
    atomic_init(&d->share[i].left, n << 32);
}

static inline uint64_t deal_count(uint64_t left) { return (left >> 32) - (left & UINT32_MAX); }

/* The next item of `thread`'s own share, else the last one of the share that has most left; false:
 * nothing is left anywhere. */
static inline bool deal_take(struct deal *d, uint64_t thread, uint64_t *share, uint64_t *item)
{
    if (thread < d->n) {
        uint64_t left = atomic_load_explicit(&d->share[thread].left, memory_order_relaxed);
        while (deal_count(left) > 0)
            if (atomic_compare_exchange_weak_explicit(&d->share[thread].left, &left, left + 1,
                                                      memory_order_relaxed, memory_order_relaxed)) {
                *share = thread;
                *item = left & UINT32_MAX;
                return true;
            }
    }
    for (;;) {
        uint64_t most = 0, at = 0;
        for (uint32_t i = 0; i < d->n; i++) {
            uint64_t left = atomic_load_explicit(&d->share[i].left, memory_order_relaxed);
            if (deal_count(left) <= deal_count(most)) continue;
            most = left;
            at = i;
        }
        if (deal_count(most) == 0) return false;
        const uint64_t less = most - (UINT64_C(1) << 32);
        if (!atomic_compare_exchange_strong_explicit(&d->share[at].left, &most, less,
                                                     memory_order_relaxed, memory_order_relaxed))
            continue;
        *share = at;
        *item = less >> 32;
        return true;
    }
}

#endif
