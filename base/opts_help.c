/* base/opts_help.c - what the table says about itself: the help text, the nearest name.
 *
 * Owns: nothing. Must not know: values. Thread: any. */
#include "base/opts_priv.h"
#include "base/sys.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* --- the nearest name ------------------------------------------------------------------------- */

enum { WORD_MAX = 63 };

/* Insertions, deletions, substitutions and swaps of neighbours ("optimal string alignment"),
 * each counting one. */
static uint32_t edit_distance(const char *a, const char *b)
{
    uint32_t rows[3][WORD_MAX + 1], n = (uint32_t)strlen(a), m = (uint32_t)strlen(b);
    if (n > WORD_MAX || m > WORD_MAX) return UINT32_MAX;
    for (uint32_t j = 0; j <= m; j++) rows[0][j] = j;
    for (uint32_t i = 1; i <= n; i++) {
        uint32_t *now = rows[i % 3], *above = rows[(i + 2) % 3], *before = rows[(i + 1) % 3];
        now[0] = i;
        for (uint32_t j = 1; j <= m; j++) {
            uint32_t best = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (above[j] + 1 < best) best = above[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped && before[j - 2] + 1 < best) best = before[j - 2] + 1;
            now[j] = best;
        }
    }
    return rows[n % 3][m];
}

const char *opts_nearest(const char *word, const char *const *first, size_t stride_bytes,
                         uint32_t n)
{
    const char *best = NULL;
    uint32_t limit = (uint32_t)strlen(word) / 3, best_distance = (limit > 1 ? limit : 1) + 1;
    for (uint32_t i = 0; i < n; i++) {
        const void *at = (const char *)(const void *)first + i * stride_bytes;
        const char *name = *(const char *const *)at;
        uint32_t d = edit_distance(word, name);
        if (d >= best_distance || d >= strlen(name)) continue;
        best = name;
        best_distance = d;
    }
    return best;
}

/* --- help ------------------------------------------------------------------------------------- */

/* Text that is first measured (buf NULL), then written. */
struct text {
    char *buf;
    size_t at;
};

__attribute__((format(printf, 2, 3))) static void add(struct text *t, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    /* the measured size is exact, so the second pass always has room */
    int n = t->buf ? vsprintf(t->buf + t->at, fmt, args) : vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n > 0) t->at += (size_t)n;
}

static const char *arg_of(const struct opt_row *row)
{
    if (row->arg) return row->arg;
    static const char *const usual[] = {
        [OPT_FLAG] = "",       [OPT_U64] = "N",         [OPT_DOUBLE] = "X", [OPT_SIZE] = "SIZE",
        [OPT_STRING] = "TEXT", [OPT_CHOICE] = "CHOICE", [OPT_LIST] = "A,B"
    };
    return usual[row->type];
}

static void add_row(struct text *t, const struct opt_row *row, size_t column)
{
    size_t start = t->at;
    add(t, "  --%s%s%s", row->name, *arg_of(row) ? " " : "", arg_of(row));
    size_t pad = column - (t->at - start);
    add(t, "%*s%s", (int)pad, "", row->help ? row->help : "");
    char range[700];
    opts_range_text(row, range, sizeof range);
    const char *open = " (";
    if (row->type == OPT_CHOICE) {
        for (uint32_t i = 0; row->choices[i]; i++) add(t, "%s%s", i ? ", " : open, row->choices[i]);
        open = "; ";
    }
    if (*range) add(t, "%s%s", open, range), open = "; ";
    if (row->required) add(t, "%srequired", open), open = "; ";
    else if (row->def && *row->def && row->type != OPT_FLAG)
        add(t, "%sdefault %s", open, row->def), open = "; ";
    add(t, "%s\n", strcmp(open, "; ") == 0 ? ")" : "");
}

char *opts_help(const struct opt_row *rows, uint32_t n_rows)
{
    size_t column = 0;
    for (uint32_t i = 0; i < n_rows; i++) {
        size_t width = strlen(rows[i].name) + strlen(arg_of(&rows[i])) + 7;
        if (width > column) column = width;
    }
    struct text t = { NULL, 0 };
    for (uint32_t i = 0; i < n_rows; i++) add_row(&t, &rows[i], column);
    t.buf = sys_calloc(1, t.at + 1);
    if (!t.buf) return NULL;
    t.at = 0;
    for (uint32_t i = 0; i < n_rows; i++) add_row(&t, &rows[i], column);
    return t.buf;
}
