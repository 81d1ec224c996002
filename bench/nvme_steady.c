/* bench/nvme_steady.c - burst and sustained apart: when a series of rates is steady, and what it
 * says.
 *
 * Owns: the rule. Must not know: how a sample is measured; pure. Any thread. A drive answers first
 * from a fast cache; what training gets is what remains when that is full. So a series alone that
 * is steady does not prove anything: it also says whether a drop was seen, and how much was written
 * until then. */
#include "bench/nvme_impl.h"

#include <math.h>
#include <string.h>

const struct steady_rule steady_default = { .window = 10, .deviation = 0.10, .drift = 0.10 };

enum { BURST_SAMPLES = 3 };

static double mean_of(const double *v, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += v[i];
    return n ? sum / n : 0;
}

/* Rise of the least-squares line from the first to the last of n equally spaced values. */
static double line_rise(const double *v, uint32_t n)
{
    double mid = (n - 1) / 2.0, mean = mean_of(v, n), xy = 0, xx = 0;
    for (uint32_t i = 0; i < n; i++) {
        xy += (i - mid) * (v[i] - mean);
        xx += (i - mid) * (i - mid);
    }
    return xx > 0 ? xy / xx * (n - 1) : 0;
}

bool steady_reached(const double *rate, uint32_t n, const struct steady_rule *rule)
{
    if (n < rule->window || rule->window < 2) return false;
    const double *v = rate + (n - rule->window);
    double mean = mean_of(v, rule->window);
    if (!(mean > 0) || fabs(line_rise(v, rule->window)) > rule->drift * mean) return false;
    for (uint32_t i = 0; i < rule->window; i++)
        if (fabs(v[i] - mean) > rule->deviation * mean) return false;
    return true;
}

/* Bytes until the rate went under `level` for good. */
static double bytes_above(const struct steady_series *s, double level)
{
    uint32_t last = 0;
    double sum = 0;
    for (uint32_t i = 0; i < s->n; i++)
        if (s->rate[i] >= level) last = i + 1;
    for (uint32_t i = 0; i < last; i++) sum += s->bytes[i];
    return sum;
}

static double mean_between(const struct steady_series *s, double from, double to)
{
    double sum = 0, end = s->at_s[s->n - 1];
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n; i++)
        if (s->at_s[i] > from * end && s->at_s[i] <= to * end) {
            sum += s->rate[i];
            n++;
        }
    return n ? sum / n : 0;
}

void steady_summarise(const struct steady_series *s, const struct steady_rule *rule,
                      struct steady_summary *out)
{
    memset(out, 0, sizeof *out);
    if (s->n == 0) return;
    uint32_t head = s->n < BURST_SAMPLES ? s->n : BURST_SAMPLES,
             tail = s->n < rule->window ? s->n : rule->window;
    out->reached = steady_reached(s->rate, s->n, rule);
    out->burst = mean_of(s->rate, head);
    out->sustained = mean_of(s->rate + (s->n - tail), tail);
    out->dropped = s->n > head && out->sustained < 0.9 * out->burst;
    if (out->dropped) out->cache_bytes = bytes_above(s, (out->burst + out->sustained) / 2);
    if (s->n >= 20) {
        double early = mean_between(s, 0.1, 0.2);
        out->late_over_early = early > 0 ? mean_between(s, 0.9, 1.0) / early : 0;
    }
}
