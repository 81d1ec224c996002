/* bench/nvme_sweep.c - which block size and depth are measured next, and when that is enough.
 *
 * Owns: the rule. Must not know: how a point is measured; pure. Any thread. The presets are what a
 * trainer moves (a quarter of a MiB to 8 MiB): benchmarks of tiny blocks say nothing about it
 * (BEN-07). */
#include "bench/nvme_impl.h"

#include <string.h>

static const uint64_t blocks[] = { 256ull << 10, 1ull << 20, 4ull << 20, 8ull << 20 };
static const uint32_t depths[] = { 1, 4, 8, 16, 32 };
enum { BLOCK_N = sizeof blocks / sizeof blocks[0], DEPTH_N = sizeof depths / sizeof depths[0] };

void sweep_init(struct sweep *s, uint64_t in_flight_max, uint64_t block_max)
{
    memset(s, 0, sizeof *s);
    for (int i = 0; i < BLOCK_N; i++)
        if (blocks[i] <= block_max && blocks[i] <= in_flight_max)
            s->block[s->n_blocks++] = blocks[i];
    for (int i = 0; i < DEPTH_N; i++) s->depth[s->n_depths++] = depths[i];
    s->gain = 0.03;
    s->in_flight_max = in_flight_max;
    s->over = s->n_blocks == 0;
}

bool sweep_next(const struct sweep *s, uint64_t *block_bytes, uint32_t *depth)
{
    if (s->over) return false;
    *block_bytes = s->block[s->at_block];
    *depth = s->depth[s->at_depth];
    return true;
}

static double best_of(const struct sweep *s, uint32_t block)
{
    double best = 0;
    for (uint32_t d = 0; d < s->n_depths; d++)
        if (s->rate[block][d] > best) best = s->rate[block][d];
    return best;
}

static void end_block(struct sweep *s)
{
    double smaller = 0;
    for (uint32_t b = 0; b < s->at_block; b++)
        if (best_of(s, b) > smaller) smaller = best_of(s, b);
    bool poor = s->at_block > 0 && best_of(s, s->at_block) < smaller * (1 + s->gain);
    s->poor_blocks = poor ? s->poor_blocks + 1 : 0;
    s->at_depth = 0;
    s->poor_depths = 0;
    s->over = ++s->at_block == s->n_blocks || s->poor_blocks == 2;
}

void sweep_put(struct sweep *s, double bytes_per_s)
{
    uint32_t b = s->at_block, d = s->at_depth;
    STK_ASSERT(!s->over);
    double before = best_of(s, b);
    s->rate[b][d] = bytes_per_s;
    bool gained = d == 0 || bytes_per_s >= before * (1 + s->gain);
    s->poor_depths = gained ? 0 : s->poor_depths + 1;
    bool room = d + 1 < s->n_depths && s->block[b] * s->depth[d + 1] <= s->in_flight_max;
    if (s->poor_depths < 2 && room)
        s->at_depth++;
    else
        end_block(s);
}

bool sweep_choose(const struct sweep *s, uint64_t *block_bytes, uint32_t *depth, double *rate)
{
    double best = 0;
    uint64_t least = UINT64_MAX;
    for (uint32_t b = 0; b < s->n_blocks; b++)
        if (best_of(s, b) > best) best = best_of(s, b);
    for (uint32_t b = 0; b < s->n_blocks; b++)
        for (uint32_t d = 0; d < s->n_depths; d++) {
            uint64_t bytes = s->block[b] * s->depth[d];
            if (s->rate[b][d] <= 0 || s->rate[b][d] < best * 0.97 || bytes >= least) continue;
            least = bytes;
            *block_bytes = s->block[b];
            *depth = s->depth[d];
            *rate = s->rate[b][d];
        }
    return least != UINT64_MAX;
}
