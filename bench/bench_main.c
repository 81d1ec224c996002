/* bench/bench_main.c - `stoker bench`: finds the measurement and hands over; what all of them
 * share.
 *
 * Owns: the list of measurements, the form of an error line. Must not know: what is measured.
 * Application's thread. */
#include "bench/bench.h"
#include "base/sys.h"
#include "bench/bench_impl.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static const struct bench {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} benches[] = {
    { "nvme", bench_nvme, "what drives can do for training: rates, latencies, limits" },
    { "adam", bench_adam, "the optimizer's step beside what memory allows" },
    { "copy", bench_copy, "copies, gradient casts and checksums beside what memory allows" },
};
enum { BENCH_N = sizeof benches / sizeof benches[0] };

static void print_usage(FILE *to)
{
    fputs("usage: stoker bench WHAT [options]; stoker bench WHAT --help lists them\n\n", to);
    for (int i = 0; i < BENCH_N; i++) fprintf(to, "  %-8s  %s\n", benches[i].name, benches[i].help);
}

static const _Atomic bool *stop_flag; /* as process-wide as the signals that set it */

const _Atomic bool *bench_signals(void) { return stop_flag; }

int bench_main(int argc, char **argv, const _Atomic bool *stop)
{
    stop_flag = stop;
    if (argc < 1) {
        print_usage(stderr);
        return BENCH_USE;
    }
    for (int i = 0; i < BENCH_N; i++)
        if (strcmp(argv[0], benches[i].name) == 0) return benches[i].run(argc - 1, argv + 1);
    if (strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0) {
        print_usage(stdout);
        return BENCH_DONE;
    }
    const char *near = opts_nearest(argv[0], &benches[0].name, sizeof benches[0], BENCH_N);
    fprintf(stderr, "stoker: bench %s: there is no such measurement; %s%s\n", argv[0],
            near ? "did you mean " : "see stoker bench --help", near ? near : "");
    return BENCH_USE;
}

int bench_fail(const struct stk_error *err, int code)
{
    fflush(stdout);
    fprintf(stderr, "stoker: %s\n", err->text[0] ? err->text : stk_status_text(err->code));
    return code;
}

bool bench_help(int argc, char **argv, const char *usage, const struct opt_row *rows,
                uint32_t n_rows, const char *more)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") != 0 && strcmp(argv[i], "-h") != 0) continue;
        char *table = opts_help(rows, n_rows);
        printf("%s\n\n%s%s", usage, table ? table : "", more);
        sys_free(table);
        return true;
    }
    return false;
}

double bench_now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
