/* base/opts_value.c - one value: text to field with its checks, and field to text.
 *
 * Owns: what counts as a number, a size, a choice, and the sentences when a value is none. Must not
 * know: argv, files.
 * Thread: any, on a target of its own. */
#include "base/mem.h"
#include "base/opts_priv.h"
#include "base/sys.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *field_of(const struct opt_row *row, void *target)
{
    return (char *)target + row->offset;
}

void opts_reset(const struct opt_row *row, void *target)
{
    void *field = field_of(row, target);
    switch (row->type) {
    case OPT_FLAG: *(bool *)field = false; break;
    case OPT_U64:
    case OPT_SIZE: *(uint64_t *)field = 0; break;
    case OPT_DOUBLE: *(double *)field = 0; break;
    case OPT_CHOICE: *(int *)field = 0; break;
    case OPT_STRING:
        sys_free((void *)*(char **)field);
        *(char **)field = NULL;
        break;
    case OPT_LIST: {
        struct opt_list *list = field;
        for (uint32_t i = 0; i < list->n; i++) sys_free((void *)list->item[i]);
        *list = (struct opt_list){ .n = 0 };
        break;
    }
    }
}

/* --- ranges ----------------------------------------------------------------------------------- */

static void bound_text(const struct opt_row *row, double bound, char *buf, size_t size_bytes)
{
    if (row->type == OPT_SIZE && bound < 0x1p64) mem_size_format((uint64_t)bound, buf);
    else if (row->type == OPT_DOUBLE) snprintf(buf, size_bytes, "%.10g", bound);
    else snprintf(buf, size_bytes, "%.0f", bound);
}

void opts_range_text(const struct opt_row *row, char *buf, size_t size_bytes)
{
    char low[340], high[340];
    buf[0] = '\0';
    if (row->min == row->max || row->type > OPT_SIZE || row->type == OPT_FLAG) return;
    bound_text(row, row->min, low, sizeof low);
    /* a bound that no value can pass is not worth a word */
    if (row->max >= (row->type == OPT_DOUBLE ? 1e300 : 0x1p63)) {
        snprintf(buf, size_bytes, "at least %s", low);
        return;
    }
    bound_text(row, row->max, high, sizeof high);
    snprintf(buf, size_bytes, "%s to %s", low, high);
}

static stk_status check_range(const struct opt_row *row, double value, const char *text,
                              struct opts_where where, struct stk_error *err)
{
    if (row->min == row->max || (value >= row->min && value <= row->max)) return STK_OK;
    char range[700];
    opts_range_text(row, range, sizeof range);
    return stk_error_set(err, STK_ERR_CONFIG, 0, "%s%s: %s is out of range, expected %.500s",
                         where.prefix, where.name, text, range);
}

/* --- text to field ---------------------------------------------------------------------------- */

static stk_status refuse(const char *what, const char *text, struct opts_where where,
                         struct stk_error *err)
{
    return stk_error_set(err, STK_ERR_CONFIG, 0, "%s%s: \"%s\" is not %s", where.prefix, where.name,
                         text, what);
}

static stk_status set_flag(bool *field, const char *text, struct opts_where where,
                           struct stk_error *err)
{
    static const char *const yes[] = { "true", "yes", "on", "1" }, *const no[] = { "false", "no",
                                                                                   "off", "0" };
    for (int i = 0; i < 4; i++) {
        if (strcmp(text, yes[i]) == 0) return *field = true, STK_OK;
        if (strcmp(text, no[i]) == 0) return *field = false, STK_OK;
    }
    return refuse("true or false", text, where, err);
}

static stk_status set_u64(const struct opt_row *row, uint64_t *field, const char *text,
                          struct opts_where where, struct stk_error *err)
{
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || text[digits] != '\0') return refuse("a whole number", text, where, err);
    errno = 0;
    unsigned long long value = strtoull(text, NULL, 10);
    if (errno == ERANGE) return refuse("below 2^64", text, where, err);
    STK_TRY(check_range(row, (double)value, text, where, err));
    *field = value;
    return STK_OK;
}

static stk_status set_double(const struct opt_row *row, double *field, const char *text,
                             struct opts_where where, struct stk_error *err)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(value))
        return refuse("a number", text, where, err);
    STK_TRY(check_range(row, value, text, where, err));
    *field = value;
    return STK_OK;
}

static stk_status set_size(const struct opt_row *row, uint64_t *field, const char *text,
                           struct opts_where where, struct stk_error *err)
{
    uint64_t value;
    if (!mem_size_parse(text, &value))
        return refuse("a size such as 24GiB, 512MiB or 4096", text, where, err);
    STK_TRY(check_range(row, (double)value, text, where, err));
    *field = value;
    return STK_OK;
}

static stk_status set_choice(const struct opt_row *row, int *field, const char *text,
                             struct opts_where where, struct stk_error *err)
{
    char list[400] = "";
    size_t at = 0;
    for (int i = 0; row->choices[i]; i++) {
        if (strcmp(row->choices[i], text) == 0) return *field = i, STK_OK;
        if (at < sizeof list)
            at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", i ? ", " : "",
                                   row->choices[i]);
    }
    return stk_error_set(err, STK_ERR_CONFIG, 0, "%s%s: \"%s\" is not one of %s", where.prefix,
                         where.name, text, list);
}

static stk_status copy_text(const char *text, size_t n, const char **out, struct opts_where where,
                            struct stk_error *err)
{
    char *copy = sys_calloc(1, n + 1);
    if (!copy)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "%s%s: no memory for %zu bytes",
                             where.prefix, where.name, n);
    memcpy(copy, text, n);
    *out = copy;
    return STK_OK;
}

static stk_status add_items(struct opt_list *list, const char *text, struct opts_where where,
                            struct stk_error *err)
{
    for (const char *at = text;; at++) {
        size_t n = strcspn(at, ",");
        if (n == 0) return refuse("a list: an item is empty", text, where, err);
        if (list->n == OPT_LIST_MAX)
            return stk_error_set(err, STK_ERR_CONFIG, 0, "%s%s: more than %d items", where.prefix,
                                 where.name, OPT_LIST_MAX);
        STK_TRY(copy_text(at, n, &list->item[list->n], where, err));
        list->n++;
        at += n;
        if (*at == '\0') return STK_OK;
    }
}

stk_status opts_set(const struct opt_row *row, void *target, const char *text,
                    struct opts_where where, struct stk_error *err)
{
    void *field = field_of(row, target);
    switch (row->type) {
    case OPT_FLAG: return set_flag(field, text, where, err);
    case OPT_U64: return set_u64(row, field, text, where, err);
    case OPT_DOUBLE: return set_double(row, field, text, where, err);
    case OPT_SIZE: return set_size(row, field, text, where, err);
    case OPT_CHOICE: return set_choice(row, field, text, where, err);
    case OPT_LIST: return add_items(field, text, where, err);
    case OPT_STRING:
        opts_reset(row, target);
        return copy_text(text, strlen(text), field, where, err);
    }
    STK_ASSERT(!"a row has a type that does not exist");
    return STK_ERR_CONFIG;
}

/* --- field to text ---------------------------------------------------------------------------- */

/* The shortest digits that read back as the same number. */
static void double_text(double value, char *buf, size_t size_bytes)
{
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(buf, size_bytes, "%.*g", digits, value);
        if (strtod(buf, NULL) == value) return;
    }
}

/* In the largest unit of which it is a whole number. */
static void size_text(uint64_t value, char *buf, size_t size_bytes)
{
    static const char *const units[] = { "", "KiB", "MiB", "GiB", "TiB" };
    int u = 0;
    for (; u < 4 && value != 0 && value % 1024 == 0; u++) value /= 1024;
    snprintf(buf, size_bytes, "%" PRIu64 "%s", value, units[u]);
}

void opts_value_text(const struct opt_row *row, const void *target, char *buf, size_t size_bytes)
{
    const void *field = (const char *)target + row->offset;
    STK_ASSERT(size_bytes > 0);
    buf[0] = '\0';
    switch (row->type) {
    case OPT_FLAG: snprintf(buf, size_bytes, "%s", *(const bool *)field ? "true" : "false"); break;
    case OPT_U64: snprintf(buf, size_bytes, "%" PRIu64, *(const uint64_t *)field); break;
    case OPT_DOUBLE: double_text(*(const double *)field, buf, size_bytes); break;
    case OPT_SIZE: size_text(*(const uint64_t *)field, buf, size_bytes); break;
    case OPT_CHOICE: snprintf(buf, size_bytes, "%s", row->choices[*(const int *)field]); break;
    case OPT_STRING: {
        const char *text = *(const char *const *)field;
        snprintf(buf, size_bytes, "%s", text ? text : "");
        break;
    }
    case OPT_LIST: {
        const struct opt_list *list = field;
        size_t at = 0;
        for (uint32_t i = 0; i < list->n && at < size_bytes; i++)
            at += (size_t)snprintf(buf + at, size_bytes - at, "%s%s", i ? "," : "", list->item[i]);
        break;
    }
    }
}
