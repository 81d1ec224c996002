/* trainer/schedule.c - see the header for the formula. Pure; any thread. */
#include "trainer/schedule.h"

#include <math.h>

double schedule_lr(enum schedule_kind kind, double peak, uint64_t warmup, uint64_t total,
                   uint64_t updates_done)
{
    if (updates_done < warmup) return peak * (double)(updates_done + 1) / (double)warmup;
    double length = total > warmup ? (double)(total - warmup) : 1;
    double p = (double)(updates_done - warmup) / length;
    if (p > 1) p = 1;
    if (kind == SCHEDULE_LINEAR) return peak * (1 - p);
    if (kind == SCHEDULE_COSINE) return peak * (1 + cos(3.14159265358979323846 * p)) / 2;
    return peak;
}
