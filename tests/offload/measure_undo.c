/* tests/offload/measure_undo.c - speed of the recorded Adam step, its undo and the parameter-
 * only step beside the plain step and a read-modify-write loop over as many bytes. No test: run
 * by hand on a quiet machine (`measure_undo [million params] [rounds] [threads] [kernel]`).
 *
 * Each thread goes over its part in chunks, each with a record of its own, as the update team
 * does. The gradient is one random array read from a different place at every step, so that the
 * moments are a training's. Times in turn, medians; ratios within a round. */
#include "base/numeric.h"
#include "base/rng.h"
#include "base/sys.h"
#include "offload/adam_undo.h"

#include <inttypes.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 524288, SIDE_CAP = CHUNK / 16, SHIFTS = 65536, ROUNDS_MAX = 200, WARM = 20 };
enum what { LIMIT, PLAIN, RECORDED, UNDO, PARAM_ONLY, WHATS };
static const char *const names[] = { "read-modify-write", "plain step", "recorded step", "undo",
                                     "parameter only" };
static const double bytes_of[] = { 26, 26, 27.2, 27.2, 16 };

struct measure {
    uint64_t n, refused, listed;
    const struct adam_kernel *k;
    struct adam_span span; /* grad: n + SHIFTS elements */
    void *out;
    uint8_t *code;
    struct adam_side *side;
    uint32_t *side_n;
    float *limit;
    struct adam_coef coef;
    double seconds[WHATS][ROUNDS_MAX];
};

static void chunk_run(struct measure *m, enum what what, uint64_t chunk, uint64_t shift)
{
    uint64_t at = chunk * CHUNK;
    struct adam_span s = m->span;
    s.n = CHUNK;
    s.param = (uint16_t *)s.param + at;
    s.low_or_master = (int16_t *)s.low_or_master + at;
    s.exp_avg += at;
    s.exp_avg_sq += at;
    s.grad = (const uint16_t *)s.grad + at + shift;
    struct adam_record r = { m->code + at, m->side + chunk * SIDE_CAP, SIDE_CAP, m->side_n[chunk] };
    if (what == PLAIN) adam_run(m->k, ADAM_BF16_SPLIT, &s, &m->coef);
    if (what == RECORDED) {
        bool done = adam_step_recorded(m->k, ADAM_BF16_SPLIT, &s, &m->coef, &r);
        m->side_n[chunk] = done ? r.side_n : UINT32_MAX;
    }
    if (what == UNDO && r.side_n != UINT32_MAX) adam_undo(m->k, ADAM_BF16_SPLIT, &s, &m->coef, &r);
    if (what == PARAM_ONLY) {
        s.param_out = (uint16_t *)m->out + at;
        adam_param_only(m->k, ADAM_BF16_SPLIT, &s, &m->coef);
    }
}

static double run(struct measure *m, enum what what, uint64_t shift)
{
    uint64_t chunks = m->n / CHUNK, floats = m->n * 26 / 8;
    double begin = omp_get_wtime();
    if (what == LIMIT) {
#pragma omp parallel for schedule(static)
        for (uint64_t i = 0; i < floats / 16; i++) {
            float *line = m->limit + i * 16;
            __builtin_prefetch((const void *)((uintptr_t)line + 2048));
            for (uint64_t j = 0; j < 16; j++) line[j] += 1.0f;
        }
    } else {
#pragma omp parallel for schedule(static)
        for (uint64_t c = 0; c < chunks; c++) chunk_run(m, what, c, shift);
    }
    return omp_get_wtime() - begin;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *v, uint64_t n)
{
    double sorted[ROUNDS_MAX];
    memcpy(sorted, v, n * sizeof *v);
    qsort(sorted, n, sizeof *sorted, compare_doubles);
    return sorted[n / 2];
}

static void coef_of(struct measure *m, uint64_t t)
{
    struct adam_hyper h = { 1e-4, 0.9, 0.999, 1e-8, 0.01, ADAM_ADAMW };
    adam_coef_make(&h, t, 1.0, &m->coef);
}

static bool measure_open(struct measure *m)
{
    uint64_t n = m->n, chunks = n / CHUNK;
    uint16_t *grad = sys_mmap((n + SHIFTS) * 2, true);
    m->span = (struct adam_span){ .n = n,
                                  .param = sys_mmap(n * 2, true),
                                  .low_or_master = sys_mmap(n * 2, true),
                                  .exp_avg = sys_mmap(n * 4, true),
                                  .exp_avg_sq = sys_mmap(n * 4, true),
                                  .grad = grad };
    m->out = sys_mmap(n * 2, true);
    m->code = sys_mmap(n, true);
    m->side = sys_mmap(chunks * SIDE_CAP * sizeof *m->side, true);
    m->side_n = calloc(chunks, sizeof *m->side_n);
    m->limit = sys_mmap(n * 26 / 2, true);
    if (!grad || !m->span.param || !m->span.low_or_master || !m->span.exp_avg ||
        !m->span.exp_avg_sq || !m->out || !m->code || !m->side || !m->side_n || !m->limit)
        return false;
    struct rng r;
    rng_seed(&r, 1);
    enum { TABLE = 65536 };
    static uint16_t normal[TABLE];
    for (int i = 0; i < TABLE; i++) normal[i] = stk_f32_to_bf16((float)(rng_normal(&r) * 1e-3));
    for (uint64_t i = 0; i < n + SHIFTS; i++) grad[i] = normal[rng_next(&r) % TABLE];
    for (uint64_t i = 0; i < n; i++)
        ((uint16_t *)m->span.param)[i] = stk_f32_to_bf16(stk_bf16_to_f32(grad[i]) * 20.0f);
    return true;
}

int main(int argc, char **argv)
{
    static struct measure m;
    m.n = (argc > 1 ? strtoull(argv[1], NULL, 10) : 32) * 2 * CHUNK;
    uint64_t rounds = argc > 2 ? strtoull(argv[2], NULL, 10) : 11;
    omp_set_num_threads(argc > 3 ? atoi(argv[3]) : 2);
    m.k = adam_pick(argc > 4 ? argv[4] : NULL);
    if (rounds == 0 || rounds > ROUNDS_MAX || !m.k || m.n == 0 || !measure_open(&m)) {
        fprintf(stderr, "measure_undo: [million params] [rounds, 1 to 200] [threads] [kernel]\n");
        return 2;
    }
    uint64_t t = 0, chunks = m.n / CHUNK;
    for (; t < WARM; t++) {
        coef_of(&m, t + 1);
        run(&m, PLAIN, t * 4099 % SHIFTS);
    }
    for (uint64_t i = 0; i < rounds; i++, t++) {
        coef_of(&m, t + 1);
        uint64_t shift = t * 4099 % SHIFTS;
        enum what order[] = { LIMIT, PARAM_ONLY, RECORDED, UNDO, PLAIN };
        for (int j = 0; j < WHATS; j++) {
            m.seconds[order[j]][i] = run(&m, order[j], shift);
            for (uint64_t c = 0; order[j] == RECORDED && c < chunks; c++) {
                m.refused += m.side_n[c] == UINT32_MAX;
                m.listed += m.side_n[c] == UINT32_MAX ? 0 : m.side_n[c];
            }
        }
    }
    printf("%s, %" PRIu64 " parameters: %.3f %% on the side list, %" PRIu64 " chunks refused\n",
           m.k->name, m.n, 100.0 * (double)m.listed / (double)(m.n * rounds), m.refused);
    for (int w = 0; w < WHATS; w++) {
        double s = median(m.seconds[w], rounds), ratio[ROUNDS_MAX];
        for (uint64_t i = 0; i < rounds; i++) ratio[i] = m.seconds[w][i] / m.seconds[PLAIN][i];
        printf("%-18s %8.2f ms  %6.2f GB/s  %5.3f of plain\n", names[w], 1e3 * s,
               bytes_of[w] * (double)m.n / s * 1e-9, median(ratio, rounds));
    }
    return 0;
}
