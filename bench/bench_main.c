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

static const struct bench_entry benches[] = {
    { "nvme", bench_nvme, "what drives can do for training: rates, latencies, limits" },
    { "adam", bench_adam, "the optimizer's step beside what memory allows" },
    { "copy", bench_copy, "copies, gradient casts and checksums beside what memory allows" },
};
enum { BENCH_N = sizeof benches / sizeof benches[0] };

enum { BENCH_MORE_MAX = 8 };

/* Ours, then those of the room above. */
static const struct bench_entry *entry_at(const struct bench_entry *more, uint32_t i)
{
    return i < BENCH_N ? &benches[i] : &more[i - BENCH_N];
}

static const _Atomic bool *stop_flag; /* as process-wide as the signals that set it */

const _Atomic bool *bench_signals(void) { return stop_flag; }

static void print_usage(FILE *to, const struct bench_entry *more, uint32_t n)
{
    fputs("usage: stoker bench WHAT [options]; stoker bench WHAT --help lists them\n\n", to);
    for (uint32_t i = 0; i < n; i++)
        fprintf(to, "  %-8s  %s\n", entry_at(more, i)->name, entry_at(more, i)->help);
}

int bench_main(int argc, char **argv, const _Atomic bool *stop, const struct bench_entry *more,
               uint32_t n_more)
{
    stop_flag = stop;
    STK_ASSERT(n_more <= BENCH_MORE_MAX);
    const uint32_t n = BENCH_N + n_more;
    if (argc < 1) {
        print_usage(stderr, more, n);
        return BENCH_USE;
    }
    for (uint32_t i = 0; i < n; i++)
        if (strcmp(argv[0], entry_at(more, i)->name) == 0)
            return entry_at(more, i)->run(argc - 1, argv + 1);
    if (strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0) {
        print_usage(stdout, more, n);
        return BENCH_DONE;
    }
    const char *names[BENCH_N + BENCH_MORE_MAX];
    for (uint32_t i = 0; i < n; i++) names[i] = entry_at(more, i)->name;
    const char *near = opts_nearest(argv[0], names, sizeof names[0], n);
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
