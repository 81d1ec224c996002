/* bench/bench_adam.c - speed of every Adam variant beside this machine's read-modify-write
 * bandwidth.
 *
 * The limit is a loop that reads and writes back the same memory (x = x + 1 over one array as large
 * as the state), measured in turn with each variant, so that a noisy machine slows both. Prints a
 * JSON list on stdout. bytes_per_s counts the traffic that must be: 26 bytes per parameter in split
 * mode (reads 2+2+4+4+2, writes 2+2+4+4), 28 in f32 and fp16 mode, 8 per float for the limit. Own
 * process; OpenMP threads. */
#include "base/opts.h"
#include "base/rng.h"
#include "base/sys.h"
#include "offload/adam.h"

#include <inttypes.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct bench_args {
    uint64_t params, rounds, threads;
    int layout;
    const char *kernel;
};

static const char *const layout_names[] = { "bf16_split", "fp16", "f32", NULL };
static const uint64_t layout_bytes[] = { 26, 28, 28 };

static const struct opt_row rows[] = {
    { "params", OPT_U64, offsetof(struct bench_args, params), "67108864", 1024, 4294967296.0, NULL,
      "N", "parameters", false },
    { "rounds", OPT_U64, offsetof(struct bench_args, rounds), "11", 1, 1000, NULL, "N",
      "measurements of each", false },
    { "threads", OPT_U64, offsetof(struct bench_args, threads), "2", 1, 1024, NULL, "N",
      "OpenMP threads", false },
    { "layout", OPT_CHOICE, offsetof(struct bench_args, layout), "bf16_split", 0, 0, layout_names,
      "NAME", "state layout", false },
    { "kernel", OPT_STRING, offsetof(struct bench_args, kernel), NULL, 0, 0, NULL, "NAME",
      "only this variant", false },
};
enum { ROWS = sizeof rows / sizeof rows[0] };

struct bench {
    struct bench_args args;
    struct adam_span span;
    struct adam_coef coef;
    float *limit; /* the array of the limit loop */
    uint64_t limit_floats;
    double *kernel_s, *limit_s;
};

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, uint64_t n)
{
    qsort(v, n, sizeof *v, compare_doubles);
    return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

/* Fetches ahead as the kernels do: without it the loop is slower than they are, and no limit. */
static double run_limit(struct bench *b)
{
    double begin = omp_get_wtime();
#pragma omp parallel for schedule(static)
    for (uint64_t i = 0; i < b->limit_floats / 16; i++) {
        float *line = b->limit + i * 16;
        __builtin_prefetch((const void *)((uintptr_t)line + 2048));
        for (uint64_t j = 0; j < 16; j++) line[j] += 1.0f;
    }
    return omp_get_wtime() - begin;
}

/* Each thread takes one contiguous part, as a member of the update team does. */
static double run_kernel(struct bench *b, const struct adam_kernel *k)
{
    enum adam_layout layout = (enum adam_layout)b->args.layout;
    uint64_t n = b->span.n, w = layout == ADAM_F32 ? 4 : 2, other = layout == ADAM_FP16 ? 4 : 2;
    double begin = omp_get_wtime();
#pragma omp parallel
    {
        uint64_t parts = (uint64_t)omp_get_num_threads(), part = (uint64_t)omp_get_thread_num();
        uint64_t at = n / parts * part, end = part + 1 == parts ? n : n / parts * (part + 1);
        struct adam_span s = b->span;
        s.n = end - at;
        s.param = (char *)s.param + at * w;
        s.low_or_master = s.low_or_master ? (char *)s.low_or_master + at * other : NULL;
        s.exp_avg += at;
        s.exp_avg_sq += at;
        s.grad = (const char *)s.grad + at * w;
        adam_run(k, layout, &s, &b->coef);
    }
    return omp_get_wtime() - begin;
}

static bool bench_open(struct bench *b)
{
    enum adam_layout layout = (enum adam_layout)b->args.layout;
    uint64_t n = b->args.params, w = layout == ADAM_F32 ? 4 : 2,
             other = layout == ADAM_FP16 ? 4 : 2;
    b->limit_floats = n * layout_bytes[layout] / 8;
    void *grad = sys_mmap(n * w, true);
    b->span = (struct adam_span){ .n = n,
                                  .param = sys_mmap(n * w, true),
                                  .low_or_master = layout == ADAM_F32 ? NULL
                                                                      : sys_mmap(n * other, true),
                                  .exp_avg = sys_mmap(n * 4, true),
                                  .exp_avg_sq = sys_mmap(n * 4, true),
                                  .grad = grad };
    b->limit = sys_mmap(b->limit_floats * 4, true);
    b->kernel_s = sys_calloc(b->args.rounds, sizeof(double));
    b->limit_s = sys_calloc(b->args.rounds, sizeof(double));
    if (!grad || !b->span.param || (!b->span.low_or_master && layout != ADAM_F32) ||
        !b->span.exp_avg || !b->span.exp_avg_sq || !b->limit || !b->kernel_s || !b->limit_s)
        return false;
    struct adam_hyper h = {
        .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01
    };
    adam_coef_make(&h, 10, 1.0, &b->coef);
    struct rng r;
    rng_seed(&r, 1);
    for (uint64_t i = 0; i < n;
         i++) { /* gradients of either sign in [2^-4, 2^-2), whichever the format */
        uint16_t top = (uint16_t)(0x3d80 + (rng_next(&r) & 0x80ff));
        if (layout == ADAM_F32)
            ((uint32_t *)grad)[i] = (uint32_t)top << 16;
        else
            ((uint16_t *)grad)[i] = layout == ADAM_FP16 ? (uint16_t)(0x2c00 + (top & 0x83ff)) : top;
    }
    return true;
}

static void bench_variant(struct bench *b, const struct adam_kernel *k, bool first)
{
    uint64_t rounds = b->args.rounds;
    run_limit(b);
    run_kernel(b, k);
    for (uint64_t i = 0; i < rounds; i++) {
        b->limit_s[i] = run_limit(b);
        b->kernel_s[i] = run_kernel(b, k);
    }
    double limit_bytes = (double)b->limit_floats * 8,
           bytes = (double)(b->span.n * layout_bytes[b->args.layout]);
    double kernel_s = median(b->kernel_s, rounds),
           limit_rate = limit_bytes / median(b->limit_s, rounds);
    printf("%s  {\"variant\": \"%s/%s\", \"params\": %" PRIu64 ", \"threads\": %" PRIu64
           ", \"median_s\": %.6f, "
           "\"bytes_per_s\": %.4g, \"limit_bytes_per_s\": %.4g, \"share_of_limit\": %.3f}",
           first ? "" : ",\n", layout_names[b->args.layout], k->name, b->span.n, b->args.threads,
           kernel_s, bytes / kernel_s, limit_rate, bytes / kernel_s / limit_rate);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct bench b = { 0 };
    struct stk_error err = { 0 };
    if (opts_parse(rows, ROWS, argc - 1, argv + 1, &b.args, NULL, NULL, &err) != STK_OK) {
        char *help = opts_help(rows, ROWS);
        fprintf(stderr, "bench_adam: %s\n%s", err.text, help ? help : "");
        sys_free(help);
        return 2;
    }
    if (b.args.kernel && !adam_pick(b.args.kernel)) {
        fprintf(stderr, "bench_adam: --kernel %s: no such variant, or this processor lacks it\n",
                b.args.kernel);
        return 2;
    }
    omp_set_num_threads((int)b.args.threads);
    if (!bench_open(&b)) {
        fprintf(stderr,
                "bench_adam: not enough memory for %" PRIu64 " parameters: lower --params\n",
                b.args.params);
        return 1;
    }
    bool first = true;
    printf("[\n");
    for (const struct adam_kernel *k = adam_kernels; k->name; k++) {
        if (k->isa > cpu_isa_best() || (b.args.kernel && strcmp(k->name, b.args.kernel) != 0))
            continue;
        bench_variant(&b, k, first);
        first = false;
    }
    printf("\n]\n");
    return 0;
}
