/* offload/shard.c - which rank holds which part of a block's flat vector, and which tensors lie in
 * a chunk.
 *
 * Owns: nothing; pure functions over offload/chunk.h. Must not know: who communicates, where bytes
 * are, what a tensor means. Any thread. Boundaries are multiples of 64 elements, so that every
 * shard begins at a full SIMD group and at an aligned file offset on every rank; a vector of fewer
 * groups than ranks leaves some ranks with nothing (ZR3-17). */
#include "offload/chunk.h"

#include <math.h>

void shard_boundaries(uint64_t elems, uint32_t ranks, const double *weights, uint64_t *boundary)
{
    STK_ASSERT(elems % CHUNK_ALIGN_ELEMS == 0 && ranks > 0);
    uint64_t groups = elems / CHUNK_ALIGN_ELEMS, prefix = 0;
    double total = 0, sum = 0;
    for (uint32_t r = 0; weights && r < ranks; r++) {
        STK_ASSERT(weights[r] > 0 && isfinite(weights[r]));
        total += weights[r];
    }
    boundary[0] = 0;
    for (uint32_t r = 0; r < ranks; r++) {
        if (weights) {
            sum += weights[r];
            double at = nearbyint((double)groups * (sum / total));
            uint64_t next = at >= (double)groups ? groups : (uint64_t)at;
            prefix = next > prefix ? next : prefix; /* rounding must not run backwards */
        } else {
            prefix += groups / ranks + (r < groups % ranks); /* no product that could overflow */
        }
        boundary[r + 1] = (r + 1 == ranks ? groups : prefix) * CHUNK_ALIGN_ELEMS;
    }
}

void chunk_pieces(const struct stk_layout *l, const struct stk_chunk *c,
                  void (*fn)(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                             uint32_t n),
                  void *arg)
{
    const struct stk_block *b = &l->blocks[c->block];
    uint64_t begin = c->first_elem, end = begin + c->n_elems;
    uint32_t low = b->first_tensor, high = b->first_tensor + b->n_tensors;
    while (low < high) { /* the first tensor that ends behind the chunk's beginning */
        uint32_t mid = low + (high - low) / 2;
        if (l->tensors[mid].first_elem + l->tensors[mid].n_elems <= begin)
            low = mid + 1;
        else
            high = mid;
    }
    for (uint32_t t = low; t < b->first_tensor + b->n_tensors && l->tensors[t].first_elem < end;
         t++) {
        const struct stk_tensor *x = &l->tensors[t];
        uint64_t from = x->first_elem > begin ? x->first_elem : begin;
        uint64_t to = x->first_elem + x->n_elems < end ? x->first_elem + x->n_elems : end;
        if (from < to)
            fn(arg, t, from - x->first_elem, (uint32_t)(from - begin), (uint32_t)(to - from));
    }
}
