/* bench/pairs.c - alternating pairs and their figures.
 *
 * Owns: the order within a pair and when there are enough. Must not know what is measured.
 * Application's thread. */
#include "bench/pairs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(const double *v, uint32_t n, double q)
{
    double s[NVME_PAIRS_MAX];
    if (n == 0) return 0;
    memcpy(s, v, n * sizeof *v);
    qsort(s, n, sizeof *s, by_value);
    double at = q * (n - 1);
    uint32_t i = (uint32_t)at;
    return i + 1 < n ? s[i] + (at - i) * (s[i + 1] - s[i]) : s[i];
}

static void shares_of(const struct pairs *p, double *share)
{
    for (uint32_t i = 0; i < p->n; i++)
        share[i] = p->limit_s[i] > 0
                       ? p->ours_bytes / p->ours_s[i] / (p->limit_bytes / p->limit_s[i]) : 1;
}

static bool enough(const struct pairs *p, const struct pairs_rule *rule, double since_s)
{
    double share[NVME_PAIRS_MAX], low, high;
    if (*rule->stop || p->n >= rule->max || p->n >= NVME_PAIRS_MAX) return true;
    if (p->n < rule->min) return false;
    if (rule->seconds > 0 && since_s > rule->seconds) return true;
    if (p->limit_s[0] <= 0) return false; /* no ratio whose interval could be narrow */
    shares_of(p, share);
    double median = nvme_median(share, p->n);
    nvme_median_interval(share, p->n, 1, &low, &high);
    return fmax(high - median, median - low) <= rule->width * median;
}

void pairs_run(struct pairs *p, const struct pairs_rule *rule, double (*ours)(void *arg),
               double (*limit)(void *arg), void *arg)
{
    double spent = 0;
    p->n = 0;
    if (limit) (void)limit(arg);
    (void)ours(arg);
    while (!enough(p, rule, spent)) {
        if (limit && p->n & 1) p->limit_s[p->n] = limit(arg);
        p->ours_s[p->n] = ours(arg);
        if (limit && !(p->n & 1)) p->limit_s[p->n] = limit(arg);
        spent += p->ours_s[p->n] + p->limit_s[p->n];
        p->n++;
    }
    pairs_finish(p);
}

void pairs_finish(struct pairs *p)
{
    double share[NVME_PAIRS_MAX];
    if (p->n == 0) return;
    shares_of(p, share);
    p->share = nvme_median(share, p->n);
    nvme_median_interval(share, p->n, 1, &p->share_low, &p->share_high);
    p->median_s = nvme_median(p->ours_s, p->n);
    nvme_median_interval(p->ours_s, p->n, 1, &p->low_s, &p->high_s);
    p->p25_s = quantile(p->ours_s, p->n, 0.25);
    p->p75_s = quantile(p->ours_s, p->n, 0.75);
    p->bytes_per_s = p->ours_bytes / p->median_s;
    double limit_s = nvme_median(p->limit_s, p->n);
    p->limit_bytes_per_s = limit_s > 0 ? p->limit_bytes / limit_s : 0;
}

void pairs_json(const struct pairs *p, json_t *to)
{
    enum { LIMIT_AT = 6 };
    bool known = p->limit_bytes_per_s > 0;
    const struct {
        const char *key;
        double value;
    } figures[] = { /* from LIMIT_AT on: known only beside a limit */
        { "median_s", p->median_s },
        { "p25_s", p->p25_s },
        { "p75_s", p->p75_s },
        { "low_s", p->low_s },
        { "high_s", p->high_s },
        { "bytes_per_s", p->bytes_per_s },
        { "limit_bytes_per_s", p->limit_bytes_per_s },
        { "share_of_limit", p->share },
        { "share_low", p->share_low },
        { "share_high", p->share_high },
    };
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++)
        json_object_set_new(to, figures[i].key,
                            known || i < LIMIT_AT ? json_real(figures[i].value) : json_null());
    json_object_set_new(to, "pairs", json_integer(p->n));
}

stk_status pairs_write(json_t *list, const char *file, struct stk_error *err)
{
    char *text = json_dumps(list, JSON_INDENT(1) | JSON_REAL_PRECISION(12));
    json_decref(list);
    if (!text) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the text of %s", file);
    stk_status st = nvme_text_write(file, text, err);
    free(text);
    return st;
}
