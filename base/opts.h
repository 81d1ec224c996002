/* base/opts.h - options as one table (fio's and Valkey's habit): one row drives the command line,
 * the config file, --help, range errors, the run header and the README table. A row writes into a
 * caller's struct at `offset`. */
#ifndef BASE_OPTS_H
#define BASE_OPTS_H

#include "base/status.h"

enum opt_type {
    OPT_FLAG /* bool */,
    OPT_U64,
    OPT_DOUBLE,
    OPT_SIZE /* uint64_t bytes, "24GiB" */,
    OPT_STRING /* const char*, a copy */,
    OPT_CHOICE /* int, index into choices */,
    OPT_LIST /* struct opt_list: repeated or comma separated */
};

#define OPT_LIST_MAX 64
struct opt_list { uint32_t n; const char *item[OPT_LIST_MAX]; };

struct opt_row {
    const char *name;        /* without "--" */
    enum opt_type type;
    size_t offset;           /* into the target struct */
    const char *def;         /* default, as text; NULL: none (zero) */
    double min, max;         /* U64, DOUBLE, SIZE; min == max: no range */
    const char *const *choices; /* CHOICE: NULL-terminated */
    const char *arg;         /* shown in help: "N", "SIZE", "DIR" */
    const char *help;        /* one line */
    bool required;
};

/* Fills defaults, then parses argv (without the program and verb). Accepts `--name value` and
 * `--name=value`. Positional arguments are collected in `rest` (may be NULL: then they are an
 * error). `given` (may be NULL): one bool per row, whether the user named it. `--config FILE` (JSON
 * object with the same names) is handled when a row of that name exists: file first, command line
 * wins. Errors (STK_ERR_CONFIG): unknown option names the nearest known one; duplicate option;
 * missing value; not a number; out of range (with the range); unknown choice (with the list);
 * missing required option. "--" ends the options; a flag takes a value only as `--name=false`.
 * Every STRING and item of a LIST in `target` is a copy (sys_calloc): opts_free releases them, at
 * the latest when the process ends. After an error they are released and NULL. Items of `rest` are
 * borrowed from argv. */
stk_status opts_parse(const struct opt_row *rows, uint32_t n_rows, int argc, char **argv,
                      void *target, bool *given, struct opt_list *rest, struct stk_error *err);

/* Releases the strings that opts_parse left in `target` and sets them to NULL. They must not have
 * been replaced by others. */
void opts_free(const struct opt_row *rows, uint32_t n_rows, void *target);

/* Text of one row's current value into buf: as one would give it ("24GiB", "a,b"), exact. */
void opts_value_text(const struct opt_row *row, const void *target, char *buf, size_t size_bytes);
/* Help text (allocated by sys_calloc; free with sys_free) of all rows, aligned. NULL when memory is
 * exhausted. */
char *opts_help(const struct opt_row *rows, uint32_t n_rows);
/* The nearest of `n` names to `word` (edit distance), or NULL when none is near. The names lie
 * stride_bytes apart from `first` on: in rows of a table. */
const char *opts_nearest(const char *word, const char *const *first, size_t stride_bytes,
                         uint32_t n);

#endif
