/* bench/step_report.c - the parts of a step as a table and as a JSON list.
 *
 * Owns: what a part is judged by (the matrix rate where it has FLOPs, memory's rate else), names of
 * keys. Must not know: how anything was measured. Application's thread. */
#include "base/sys.h"
#include "bench/bench.h"
#include "bench/nvme_impl.h"
#include "gpu/rate.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct judged {
    bool by_flops;
    double rate, limit;
};

static struct judged judge(const struct bench_part *p, const struct bench_rates *r)
{
    struct judged j = { .by_flops = p->flops > 0 };
    double work = j.by_flops ? p->flops : p->bytes;
    j.limit = j.by_flops ? r->flops_per_s : r->bytes_per_s;
    j.rate = work > 0 && p->seconds > 0 ? work / p->seconds : 0;
    return j;
}

void bench_step_print(const struct bench_part *parts, uint32_t n, const struct bench_rates *rates)
{
    printf("%-24s %7s %10s %9s %9s %16s %6s\n", "what", "calls", "ms", "GFLOP", "GB", "rate",
           "share");
    for (uint32_t i = 0; i < n; i++) {
        const struct bench_part *p = &parts[i];
        struct judged j = judge(p, rates);
        printf("%-24s %7llu %10.2f %9.2f %9.3f ", p->what, (unsigned long long)p->calls,
               p->seconds * 1e3, p->flops / 1e9, p->bytes / 1e9);
        if (j.rate > 0)
            printf("%8.1f %-7s %6.2f", j.rate / 1e9, j.by_flops ? "GFLOP/s" : "GB/s",
                   j.rate / j.limit);
        printf("%s\n", p->overlapped ? "  beside the step" : "");
    }
    printf("limits: products of these shapes alone %.1f GFLOP/s (",
           rates->flops_per_s / 1e9);
    for (int w = 0; w < RATE_WAYS; w++)
        printf("%s%s %.1f", w ? ", " : "", rate_way_name((enum rate_way)w),
               rates->way_flops_per_s[w] / 1e9);
    printf("); memory read and written back %.1f GB/s\n", rates->bytes_per_s / 1e9);
}

static json_t *real(double x) { return x > 0 && isfinite(x) ? json_real(x) : json_null(); }

stk_status bench_step_json(const char *file, const struct bench_part *parts, uint32_t n,
                           const struct bench_rates *rates, struct stk_error *err)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < n; i++) {
        const struct bench_part *p = &parts[i];
        struct judged j = judge(p, rates);
        json_t *row = json_object();
        json_object_set_new(row, "what", json_string(p->what));
        json_object_set_new(row, "seconds", json_real(p->seconds));
        json_object_set_new(row, "flops", json_real(p->flops));
        json_object_set_new(row, "bytes", json_real(p->bytes));
        json_object_set_new(row, "rate", real(j.rate));
        json_object_set_new(row, "limit", real(j.limit));
        json_object_set_new(row, "share", j.limit > 0 ? real(j.rate / j.limit) : json_null());
        json_object_set_new(row, "calls", json_integer((json_int_t)p->calls));
        json_object_set_new(row, "overlapped", json_boolean(p->overlapped));
        json_array_append_new(list, row);
    }
    char *text = json_dumps(list, JSON_INDENT(1) | JSON_REAL_PRECISION(12));
    json_decref(list);
    if (!text) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the text of %s", file);
    stk_status st = nvme_text_write(file, text, err);
    free(text);
    return st;
}
