/* bench/nvme_stats.c - median and its interval.
 *
 * Owns: nothing; pure. Must not know: what the numbers are. Any thread. */
#include "bench/nvme_impl.h"

#include <stdlib.h>
#include <string.h>

enum { RESAMPLES = 2000 };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double middle(double *v, uint32_t n) /* sorts v */
{
    qsort(v, n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

double nvme_median(const double *v, uint32_t n)
{
    double copy[NVME_PAIRS_MAX];
    STK_ASSERT(n <= NVME_PAIRS_MAX);
    if (n == 0) return 0;
    memcpy(copy, v, n * sizeof *v);
    return middle(copy, n);
}

void nvme_median_interval(const double *v, uint32_t n, uint64_t seed, double *low, double *high)
{
    double median[RESAMPLES], draw[NVME_PAIRS_MAX];
    struct rng rng;
    STK_ASSERT(n <= NVME_PAIRS_MAX);
    *low = *high = 0;
    if (n == 0) return;
    rng_seed(&rng, seed);
    for (int k = 0; k < RESAMPLES; k++) {
        for (uint32_t i = 0; i < n; i++) draw[i] = v[rng_below(&rng, n)];
        median[k] = middle(draw, n);
    }
    qsort(median, RESAMPLES, sizeof *median, by_value);
    *low = median[RESAMPLES * 25 / 1000];
    *high = median[RESAMPLES * 975 / 1000 - 1];
}
