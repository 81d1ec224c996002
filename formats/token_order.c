/* formats/token_order.c - the seeded order of windows, epoch after epoch.
 *
 * Owns: the shuffle of one epoch, made again when another epoch is asked for. Must not know: token
 * files.
 * Position p is epoch p / n, place p % n; the shuffle of epoch e is a function of (seed, e, n)
 * alone, so a resumed run needs no state.
 * Thread: one at a time per object (a question may reshuffle). */
#include "formats/tokens.h"

#include "base/rng.h"
#include "base/sys.h"
#include "formats/files.h"

#include <inttypes.h>

struct token_order {
    uint64_t seed, epoch; /* epoch: the one in order[] */
    uint32_t n;
    uint32_t order[];
};

static void shuffle(struct token_order *o, uint64_t epoch)
{
    struct rng r;
    for (uint32_t i = 0; i < o->n; i++) o->order[i] = i;
    rng_seed_stream(&r, o->seed, epoch);
    rng_shuffle_u32(&r, o->order, o->n);
    o->epoch = epoch;
}

stk_status token_order_new(uint64_t n_windows, uint64_t seed, struct token_order **out,
                           struct stk_error *err)
{
    *out = NULL;
    if (n_windows == 0 || n_windows > UINT32_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%" PRIu64
                             " windows of training data cannot be ordered; from 1 to 2^32 - 1 can",
                             n_windows);
    struct token_order *o = sys_calloc(1, sizeof *o + (size_t)n_windows * sizeof *o->order);
    if (!o) return files_no_memory(err, "order of the training windows");
    o->seed = seed;
    o->n = (uint32_t)n_windows;
    shuffle(o, 0);
    *out = o;
    return STK_OK;
}

void token_order_free(struct token_order *o) { sys_free(o); }

uint64_t token_order_at(struct token_order *o, uint64_t p)
{
    if (p / o->n != o->epoch) shuffle(o, p / o->n);
    return o->order[p % o->n];
}
