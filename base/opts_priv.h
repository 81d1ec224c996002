/* base/opts_priv.h - private to base/opts*.c: one value of one row, and the config file. */
#ifndef BASE_OPTS_PRIV_H
#define BASE_OPTS_PRIV_H

#include "base/opts.h"

/* What is being read: the table, and per row where its value came from. */
enum { OPTS_FROM_FILE = 1, OPTS_FROM_ARGV = 2 };
struct opts_parse {
    const struct opt_row *rows;
    uint32_t n_rows;
    void *target;
    uint8_t *from; /* n_rows */
};

/* Where a value was found, for the start of a sentence: "--steps", "run.json: steps". */
struct opts_where {
    const char *prefix, *name;
};

/* Writes `text` into the row's field; a LIST appends each comma-separated item. */
stk_status opts_set(const struct opt_row *row, void *target, const char *text,
                    struct opts_where where, struct stk_error *err);
/* Empties the row's field, releasing copies. */
void opts_reset(const struct opt_row *row, void *target);
/* Row of that name, or n_rows. */
uint32_t opts_find(const struct opts_parse *p, const char *name);
stk_status opts_refuse_unknown(const struct opts_parse *p, struct opts_where where,
                               struct stk_error *err);

/* "1 to 8", "at least 1", or "" without a range: for errors and for the help. */
void opts_range_text(const struct opt_row *row, char *buf, size_t size_bytes);

stk_status opts_load_file(struct opts_parse *p, const char *path, struct stk_error *err);

#endif
