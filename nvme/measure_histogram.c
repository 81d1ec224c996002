/* nvme/measure_histogram.c - latencies in buckets whose width is 1/32 of the power of two below.
 *
 * Below 32 ns a bucket is one nanosecond. Bucket 32 g + s (g >= 1) begins at (32 + s) << (g - 1).
 * The last bucket takes everything from 68 seconds on. Pure; any thread. */
#include "nvme/measure.h"

#define SUB 32u
#define SUB_BITS 5u

static uint32_t bucket_of(uint64_t ns)
{
    if (ns < SUB) return (uint32_t)ns;
    uint32_t top = 63u - (uint32_t)__builtin_clzll(ns), group = top - SUB_BITS + 1;
    uint32_t i = group * SUB + (uint32_t)((ns >> (top - SUB_BITS)) & (SUB - 1));
    return i < MEASURE_BUCKETS ? i : MEASURE_BUCKETS - 1;
}

/* The middle of a bucket. */
static uint64_t value_of(uint32_t i)
{
    if (i < SUB) return i;
    uint32_t shift = i / SUB - 1;
    uint64_t width = 1ull << shift;
    return ((uint64_t)(SUB + i % SUB) << shift) + (width - 1) / 2;
}

void measure_histogram_add(struct measure_histogram *h, uint64_t ns)
{
    h->n++;
    if (ns > h->max_ns) h->max_ns = ns;
    h->bucket[bucket_of(ns)]++;
}

uint64_t measure_percentile(const struct measure_histogram *h, double q)
{
    if (h->n == 0) return 0;
    double exact = q * (double)h->n;
    uint64_t rank = (uint64_t)exact, seen = 0;
    if ((double)rank < exact) rank++;
    if (rank < 1) rank = 1;
    if (rank > h->n) rank = h->n;
    uint32_t last = bucket_of(h->max_ns);
    for (uint32_t i = 0; i < last; i++) {
        seen += h->bucket[i];
        if (seen >= rank) return value_of(i);
    }
    return h->max_ns; /* the bucket of the largest: known exactly */
}
