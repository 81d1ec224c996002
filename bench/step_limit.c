/* bench/step_limit.c - what this machine allows a step: products alone, by the library or on tiles,
 * memory read and written back.
 *
 * Owns: the list of distinct shapes, times of each round, medians. Must not know: models, devices.
 * Application's thread; teams inside. */
#include "base/sys.h"
#include "bench/bench.h"
#include "bench/bench_impl.h"
#include "gpu/rate.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY_BYTES (256ull << 20)

struct limit_row {
    struct bench_product p;
    double *seconds[RATE_WAYS]; /* [rounds_max] */
};

struct bench_limits {
    struct rate *limit;
    struct limit_row *row;
    uint32_t n, rounds, rounds_max, threads;
    double *times; /* all rows' and the memory's */
    double *memory_s;
    float *memory;
};

static bool same_shape(const struct bench_product *a, const struct bench_product *b)
{
    return a->m == b->m && a->n == b->n && a->k == b->k && a->wide == b->wide;
}

static stk_status rows_make(struct bench_limits *l, const struct bench_product *products,
                            uint32_t n, struct stk_error *err)
{
    struct rate_shape *shapes = sys_calloc(n, sizeof *shapes);
    l->row = sys_calloc(n, sizeof *l->row);
    l->times = sys_calloc(((uint64_t)n * RATE_WAYS + 1) * l->rounds_max, sizeof(double));
    stk_status st = shapes && l->row && l->times
                        ? STK_OK
                        : stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to measure limits");
    for (uint32_t i = 0; i < n && st == STK_OK; i++) {
        uint32_t k = 0;
        while (k < l->n && !same_shape(&l->row[k].p, &products[i])) k++;
        if (k < l->n) {
            l->row[k].p.count += products[i].count;
            continue;
        }
        l->row[l->n].p = products[i];
        for (uint32_t w = 0; w < RATE_WAYS; w++)
            l->row[l->n].seconds[w] = l->times + ((uint64_t)l->n * RATE_WAYS + w) * l->rounds_max;
        shapes[l->n] = (struct rate_shape){ products[i].m, products[i].n, products[i].k,
                                             products[i].wide };
        l->n++;
    }
    if (st == STK_OK) {
        l->memory_s = l->times + (uint64_t)n * RATE_WAYS * l->rounds_max;
        st = rate_open(l->threads, shapes, l->n, &l->limit, err);
    }
    sys_free(shapes);
    return st;
}

stk_status bench_limits_open(uint32_t threads, const struct bench_product *products, uint32_t n,
                             uint32_t rounds_max, struct bench_limits **out, struct stk_error *err)
{
    *out = NULL;
    struct bench_limits *l = sys_calloc(1, sizeof *l);
    if (!l) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to measure limits");
    l->threads = threads;
    l->rounds_max = rounds_max;
    stk_status st = rows_make(l, products, n, err);
    if (st == STK_OK) {
        l->memory = sys_mmap(MEMORY_BYTES, true);
        if (!l->memory) st = stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to measure its rate");
    }
    if (st != STK_OK) {
        bench_limits_close(l);
        return st;
    }
    *out = l;
    return STK_OK;
}

void bench_limits_close(struct bench_limits *l)
{
    if (!l) return;
    rate_close(l->limit);
    if (l->memory) sys_munmap(l->memory, MEMORY_BYTES);
    sys_free(l->row);
    sys_free(l->times);
    sys_free(l);
}

/* Fetches ahead as kernels do. */
static double memory_run(struct bench_limits *l)
{
    double begin = omp_get_wtime();
#pragma omp parallel for num_threads((int)l->threads) schedule(static)
    for (uint64_t i = 0; i < MEMORY_BYTES / 64; i++) {
        float *line = l->memory + i * 16;
        __builtin_prefetch((const void *)((uintptr_t)line + 2048));
        for (uint64_t j = 0; j < 16; j++) line[j] += 1.0f;
    }
    return omp_get_wtime() - begin;
}

stk_status bench_limits_round(struct bench_limits *l, struct stk_error *err)
{
    if (l->rounds == l->rounds_max)
        return stk_error_set(err, STK_ERR_STATE, 0, "limits: more than %u rounds", l->rounds_max);
    for (uint32_t i = 0; i < l->n; i++)
        for (int w = 0; w < RATE_WAYS; w++)
            STK_TRY(rate_run(l->limit, i, (enum rate_way)w, &l->row[i].seconds[w][l->rounds],
                              err));
    l->memory_s[l->rounds] = memory_run(l);
    l->rounds++;
    return STK_OK;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(const struct bench_limits *l, const double *v)
{
    double sorted[64];
    uint32_t first = l->rounds > 1 ? 1 : 0, n = l->rounds - first;
    if (n > 64) n = 64;
    memcpy(sorted, v + first, n * sizeof *v);
    qsort(sorted, n, sizeof *sorted, compare);
    return n % 2 ? sorted[n / 2] : 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]);
}

void bench_limits_rates(const struct bench_limits *l, struct bench_rates *out)
{
    _Static_assert(RATE_WAYS == sizeof out->way_flops_per_s / sizeof out->way_flops_per_s[0],
                   "a place for each way");
    double flops = 0, best_s = 0, way_s[RATE_WAYS] = { 0 };
    *out = (struct bench_rates){ 0 };
    if (l->rounds == 0) return;
    for (uint32_t i = 0; i < l->n; i++) {
        const struct bench_product *p = &l->row[i].p;
        double best = INFINITY;
        flops += 2.0 * (double)p->m * (double)p->n * (double)p->k * p->count;
        for (int w = 0; w < RATE_WAYS; w++) {
            double s = median_of(l, l->row[i].seconds[w]);
            way_s[w] += s > 0 ? s * p->count : INFINITY;
            if (s > 0 && s < best) best = s;
        }
        best_s += best * p->count;
    }
    out->flops_per_s = flops / best_s;
    for (int w = 0; w < RATE_WAYS; w++)
        out->way_flops_per_s[w] = isfinite(way_s[w]) ? flops / way_s[w] : 0;
    out->bytes_per_s = 2.0 * (double)MEMORY_BYTES / median_of(l, l->memory_s);
}
