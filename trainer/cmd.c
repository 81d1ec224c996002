/* trainer/cmd.c - what all verbs share: sentences on stderr and help; the one verb that is a room of
 * its own.
 *
 * Owns: the form of an error line. Must not know: any verb. Application's thread. */
#include "trainer/cmd.h"
#include "base/sys.h"
#include "bench/bench.h"
#include "trainer/signals.h"

#include <stdio.h>
#include <string.h>

int cmd_fail(const struct stk_error *err)
{
    fflush(stdout);
    fprintf(stderr, "stoker: %s\n", err->text[0] ? err->text : stk_status_text(err->code));
    return EXIT_OPERATING;
}

int cmd_fail_use(const struct stk_error *err)
{
    cmd_fail(err);
    return EXIT_USE;
}

bool cmd_help(int argc, char **argv, const char *usage, const struct opt_row *rows, uint32_t n_rows)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") != 0 && strcmp(argv[i], "-h") != 0) continue;
        char *table = rows ? opts_help(rows, n_rows) : NULL;
        printf("%s\n", usage);
        if (table) printf("\n%s", table);
        sys_free(table);
        return true;
    }
    return false;
}

int cmd_bench(int argc, char **argv)
{
    static const struct bench_entry more[] = {
        { "step", bench_step, "a training step by kind of work, beside this machine's rates" },
    };
    return bench_main(argc, argv, signals_install("stopping"), more,
                      sizeof more / sizeof more[0]);
}
