/* offload/adam_tune.c - how Adam walks its arrays, chosen by a short measurement on the memory that
 * training will use.
 *
 * Owns: the ways that are tried. Must not know what the memory is for; it holds zeros, and zeros
 * they stay. Caller's thread, before training; OpenMP threads inside. */
#include "base/exec.h"
#include "offload/adam_chunk.h"

#include <stdio.h>

enum { WAYS = 6, ROUNDS_MAX = 9 };

/* Where DRAM is far, more must be in flight; a processor with good prefetching of its own wants
 * less; where stores of a line that was just read do not fetch it again, streaming saves cache. */
const struct adam_way adam_ways[WAYS] = {
    { 0, false }, { 128, false }, { 256, false }, { 1024, false }, { 2048, false }, { 512, true },
};
const uint32_t adam_ways_n = WAYS;

const char *adam_way_text(struct adam_way way, char *buf, size_t size_bytes)
{
    snprintf(buf, size_bytes, "%u ahead, %s stores", way.ahead_elems ? way.ahead_elems : 512u,
             way.stream ? "non-temporal" : "ordinary");
    return buf;
}

/* One thread's part of span `all`: whole cache lines of every array. */
static struct adam_span part_of(const struct adam_span *all, enum adam_layout layout, uint64_t from,
                                uint64_t to)
{
    uint64_t wide = layout == ADAM_F32 ? 4 : 2, other = layout == ADAM_FP16 ? 4 : 2;
    struct adam_span s = *all;
    s.n = to - from;
    s.param = (uint8_t *)s.param + from * wide;
    if (s.low_or_master) s.low_or_master = (uint8_t *)s.low_or_master + from * other;
    s.exp_avg += from;
    s.exp_avg_sq += from;
    s.grad = (const uint8_t *)s.grad + from * wide;
    if (s.param_out) s.param_out = (uint8_t *)s.param_out + from * wide;
    return s;
}

static uint64_t run_once(const struct exec *ex, const struct adam_kernel *k,
                         enum adam_layout layout, const struct adam_span *spans, uint32_t n_spans,
                         uint32_t threads, struct adam_way way, const struct adam_coef *c)
{
    uint64_t begin = exec_now_ns(ex);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (uint32_t part = 0; part < threads; part++)
        for (uint32_t i = 0; i < n_spans; i++) {
            uint64_t groups = spans[i].n / CHUNK_ALIGN_ELEMS;
            struct adam_span s = part_of(&spans[i], layout, groups * part / threads * 64,
                                         groups * (part + 1) / threads * 64);
            s.way = way;
            adam_run(k, layout, &s, c);
        }
    return exec_now_ns(ex) - begin;
}

static uint64_t median_of(uint64_t *v, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t j = i; j > 0 && v[j - 1] > v[j]; j--) {
            uint64_t x = v[j];
            v[j] = v[j - 1];
            v[j - 1] = x;
        }
    return v[n / 2];
}

struct adam_way adam_way_measure(const struct exec *ex, const struct adam_kernel *k,
                                 enum adam_layout layout, const struct adam_span *spans,
                                 uint32_t n_spans, uint32_t threads)
{
    uint64_t took[WAYS][ROUNDS_MAX], begin = exec_now_ns(ex);
    struct adam_coef c;
    struct adam_hyper h = { 1e-4, 0.9, 0.999, 1e-8, 0.0, ADAM_ADAMW };
    uint32_t rounds = 0, best = 0;
    if (exec_kind_of(ex) != EXEC_THREADS || n_spans == 0 || k->isa == CPU_SCALAR)
        return adam_ways[0];
    adam_coef_make(&h, 1, 1.0, &c);
    (void)run_once(ex, k, layout, spans, n_spans, threads, adam_ways[0], &c);
    while (rounds < ROUNDS_MAX && (rounds < 3 || exec_now_ns(ex) - begin < ADAM_MEASURE_NS)) {
        for (uint32_t w = 0; w < WAYS; w++)
            took[w][rounds] =
                run_once(ex, k, layout, spans, n_spans, threads, adam_ways[w], &c);
        rounds++;
    }
    uint64_t median[WAYS];
    for (uint32_t w = 0; w < WAYS; w++) {
        median[w] = median_of(took[w], rounds);
        if (median[w] < median[best]) best = w;
    }
    /* noise must not choose: a run's numbers are the same, its speed should be, too */
    return median[best] * 100 < median[0] * 97 ? adam_ways[best] : adam_ways[0];
}
