/* bench/limit.c - choosing the loops of limit_isa.c by processor, and running them.
 *
 * Owns: names and byte counts of the shapes. Must not know what is measured beside them.
 * Application's thread; OpenMP inside. */
#include "bench/limit.h"
#include "bench/bench_impl.h"

#include <stdio.h>
#include <stdlib.h>

extern const limit_fn limit_loops_scalar[LIMIT_SHAPE_N], limit_loops_avx2[LIMIT_SHAPE_N],
    limit_loops_avx512[LIMIT_SHAPE_N];

static const struct {
    const char *name;
    uint64_t bytes;
    bool writes;
} shapes[LIMIT_SHAPE_N] = {
    [LIMIT_BF16_SPLIT] = { "read-modify-write of 4 arrays from 5, as the step", 26, true },
    [LIMIT_FP16] = { "read-modify-write of 3 arrays, as the step with fp16", 28, true },
    [LIMIT_F32] = { "read-modify-write of 3 arrays from 4", 28, true },
    [LIMIT_MOMENTS_BF16] = { "read-modify-write of 4 arrays from 5, with bf16 moments", 18, true },
    [LIMIT_MOMENTS_8BIT] = { "read-modify-write of 4 arrays from 5, with 8-bit moments", 14, true },
    [LIMIT_ONE] = { "read-modify-write of one array", 8, true },
    [LIMIT_READ] = { "reading", 4, false },
    [LIMIT_COPY] = { "copying", 8, true },
    [LIMIT_CAST] = { "reading 4 bytes, writing 2", 6, true },
};

const char *limit_name(enum limit_shape s) { return shapes[s].name; }
uint64_t limit_bytes(enum limit_shape s) { return shapes[s].bytes; }

double limit_run(enum limit_shape s, const struct limit_job *j, uint32_t threads)
{
    enum cpu_isa isa = cpu_isa_best();
    limit_fn fn = isa == CPU_AVX512 ? limit_loops_avx512[s]
                : isa == CPU_AVX2   ? limit_loops_avx2[s]
                                    : limit_loops_scalar[s];
    uint64_t seen = 0;
    double begin = bench_now_s();
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : seen)
    for (uint32_t part = 0; part < threads; part++)
        seen |= fn(j, j->groups * part / threads, j->groups * (part + 1) / threads);
    double took = bench_now_s() - begin;
    return seen == 0x5eed5eed5eed5eedull ? took + 1e-9 : took; /* read, whatever it was */
}

void limit_add(struct limit_set *set, enum limit_shape shape, const struct limit_job *job)
{
    /* in groups: 256, 512 and 1024 elements ahead */
    static const uint32_t aheads[] = { 0, 4, 8, 16 };
    for (uint32_t k = 0; k < 2 * sizeof aheads / sizeof aheads[0]; k++) {
        if ((k & 1) && !shapes[shape].writes) continue;
        if ((k & 1) && aheads[k / 2] == 4) continue;
        STK_ASSERT(set->n < LIMIT_LOOPS_MAX);
        struct limit_loop *l = &set->loop[set->n++];
        *l = (struct limit_loop){ .shape = shape, .job = *job };
        l->job.ahead = aheads[k / 2];
        l->job.stream = k & 1;
        l->bytes = (double)(job->groups * LIMIT_GROUP * shapes[shape].bytes);
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void limit_try(struct limit_set *set, uint32_t rounds, uint32_t threads)
{
    enum { ROUNDS_MAX = 16 };
    double took[LIMIT_LOOPS_MAX][ROUNDS_MAX];
    if (rounds > ROUNDS_MAX) rounds = ROUNDS_MAX;
    for (uint32_t r = 0; r < rounds; r++)
        for (uint32_t i = 0; i < set->n; i++)
            took[i][r] = limit_run(set->loop[i].shape, &set->loop[i].job, threads);
    set->best = 0;
    for (uint32_t i = 0; i < set->n; i++) {
        struct limit_loop *l = &set->loop[i], *best = &set->loop[set->best];
        qsort(took[i], rounds, sizeof took[i][0], by_value);
        l->best_s = took[i][rounds / 2];
        if (l->bytes / l->best_s > best->bytes / best->best_s) set->best = i;
    }
}

const char *limit_loop_text(const struct limit_loop *l, char *buf, size_t size_bytes)
{
    char ahead[48] = "not fetched ahead";
    if (l->job.ahead)
        snprintf(ahead, sizeof ahead, "%u elements ahead", l->job.ahead * LIMIT_GROUP);
    const char *stores = l->job.stream ? ", non-temporal stores" : ", ordinary stores";
    snprintf(buf, size_bytes, "%s, %s%s", shapes[l->shape].name, ahead,
             shapes[l->shape].writes ? stores : "");
    return buf;
}
