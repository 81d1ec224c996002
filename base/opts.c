/* base/opts.c - reads the command line into a caller's struct by a table.
 *
 * Owns: the order of things: defaults, then the config file (opts_file.c), then argv. Must not
 * know: what an option means. One value is checked and written by opts_value.c. Thread: the one
 * that starts the program. */
#include "base/opts_priv.h"
#include "base/sys.h"

#include <errno.h>
#include <string.h>

uint32_t opts_find(const struct opts_parse *p, const char *name)
{
    uint32_t i = 0;
    while (i < p->n_rows && strcmp(p->rows[i].name, name) != 0) i++;
    return i;
}

stk_status opts_refuse_unknown(const struct opts_parse *p, struct opts_where where,
                               struct stk_error *err)
{
    const char *near = opts_nearest(where.name, &p->rows[0].name, sizeof p->rows[0], p->n_rows);
    if (near)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s%s: there is no such option; did you mean %s%s?", where.prefix,
                             where.name, strcmp(where.prefix, "--") == 0 ? "--" : "", near);
    return stk_error_set(err, STK_ERR_CONFIG, 0, "%s%s: there is no such option; see --help",
                         where.prefix, where.name);
}

/* One `--name[=value] [value]` of argv. */
struct arg {
    char name[64];
    uint32_t row;
    const char *value; /* NULL: a flag without one */
    int next;          /* index of the argument that follows */
};

static stk_status take_arg(const struct opts_parse *p, int argc, char **argv, int i, struct arg *a,
                           struct stk_error *err)
{
    const char *text = argv[i] + 2, *equals = strchr(text, '=');
    size_t n = equals ? (size_t)(equals - text) : strlen(text);
    if (n >= sizeof a->name) n = sizeof a->name - 1;
    memcpy(a->name, text, n);
    a->name[n] = '\0';
    a->row = opts_find(p, a->name);
    a->value = equals ? equals + 1 : NULL;
    a->next = i + 1;
    if (a->row == p->n_rows)
        return opts_refuse_unknown(p, (struct opts_where){ "--", a->name }, err);
    const struct opt_row *row = &p->rows[a->row];
    if (a->value || row->type == OPT_FLAG) return STK_OK;
    if (i + 1 >= argc || strncmp(argv[i + 1], "--", 2) == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "--%s needs a value: --%s %s", row->name,
                             row->name, row->arg ? row->arg : "VALUE");
    a->value = argv[i + 1];
    a->next = i + 2;
    return STK_OK;
}

static bool is_option(const char *arg) { return strncmp(arg, "--", 2) == 0 && arg[2] != '\0'; }

/* The file's name is needed before anything else is read, wherever it stands. */
static stk_status read_config(struct opts_parse *p, int argc, char **argv, struct stk_error *err)
{
    uint32_t config = opts_find(p, "config");
    if (config == p->n_rows || p->rows[config].type != OPT_STRING) return STK_OK;
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0;) {
        struct arg a = { .next = i + 1 };
        if (is_option(argv[i])) {
            STK_TRY(take_arg(p, argc, argv, i, &a, err));
            if (a.row == config) return opts_load_file(p, a.value, err);
        }
        i = a.next;
    }
    return STK_OK;
}

static stk_status apply_arg(struct opts_parse *p, const struct arg *a, struct stk_error *err)
{
    const struct opt_row *row = &p->rows[a->row];
    if (row->type != OPT_LIST && (p->from[a->row] & OPTS_FROM_ARGV))
        return stk_error_set(err, STK_ERR_CONFIG, 0, "--%s is given twice: give it once",
                             row->name);
    /* the first occurrence replaces what the default or the file said; a list then grows */
    if (!(p->from[a->row] & OPTS_FROM_ARGV)) opts_reset(row, p->target);
    p->from[a->row] |= OPTS_FROM_ARGV;
    return opts_set(row, p->target, a->value ? a->value : "true",
                    (struct opts_where){ "--", row->name }, err);
}

static stk_status add_rest(struct opt_list *rest, const char *arg, struct stk_error *err)
{
    if (!rest)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s: only options are expected here; see --help", arg);
    if (rest->n == OPT_LIST_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "%s: more than %d arguments", arg,
                             OPT_LIST_MAX);
    rest->item[rest->n++] = arg;
    return STK_OK;
}

static stk_status read_argv(struct opts_parse *p, int argc, char **argv, struct opt_list *rest,
                            struct stk_error *err)
{
    bool options = true;
    for (int i = 0; i < argc;) {
        struct arg a = { .next = i + 1 };
        if (options && strcmp(argv[i], "--") == 0) {
            options = false;
        } else if (options && is_option(argv[i])) {
            STK_TRY(take_arg(p, argc, argv, i, &a, err));
            STK_TRY(apply_arg(p, &a, err));
        } else if (options && argv[i][0] == '-' && argv[i][1] != '\0') {
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "%s: there is no such option; options begin with \"--\"", argv[i]);
        } else {
            STK_TRY(add_rest(rest, argv[i], err));
        }
        i = a.next;
    }
    return STK_OK;
}

static stk_status parse_all(struct opts_parse *p, int argc, char **argv, struct opt_list *rest,
                            struct stk_error *err)
{
    for (uint32_t i = 0; i < p->n_rows; i++) {
        const struct opt_row *row = &p->rows[i];
        if (row->def)
            STK_TRY(opts_set(row, p->target, row->def,
                             (struct opts_where){ "default of --", row->name }, err));
    }
    STK_TRY(read_config(p, argc, argv, err));
    STK_TRY(read_argv(p, argc, argv, rest, err));
    for (uint32_t i = 0; i < p->n_rows; i++) {
        const struct opt_row *row = &p->rows[i];
        if (row->required && !p->from[i])
            return stk_error_set(err, STK_ERR_CONFIG, 0, "--%s %s is required: %s", row->name,
                                 row->arg ? row->arg : "VALUE", row->help ? row->help : "");
    }
    return STK_OK;
}

stk_status opts_parse(const struct opt_row *rows, uint32_t n_rows, int argc, char **argv,
                      void *target, bool *given, struct opt_list *rest, struct stk_error *err)
{
    struct opts_parse p = { .rows = rows, .n_rows = n_rows, .target = target };
    /* the fields may hold anything so far: nothing in them is ours to release */
    static const size_t field_bytes[] = {
        [OPT_FLAG] = sizeof(bool),           [OPT_U64] = 8,
        [OPT_DOUBLE] = sizeof(double),       [OPT_SIZE] = 8,
        [OPT_STRING] = sizeof(char *),       [OPT_CHOICE] = sizeof(int),
        [OPT_LIST] = sizeof(struct opt_list)
    };
    for (uint32_t i = 0; i < n_rows; i++)
        memset((char *)target + rows[i].offset, 0, field_bytes[rows[i].type]);
    if (rest) *rest = (struct opt_list){ .n = 0 };
    p.from = sys_calloc(n_rows ? n_rows : 1, 1);
    if (!p.from)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "options: no memory for %u rows", n_rows);
    stk_status status = parse_all(&p, argc, argv, rest, err);
    for (uint32_t i = 0; given && i < n_rows; i++) given[i] = p.from[i] != 0;
    sys_free(p.from);
    if (status != STK_OK) opts_free(rows, n_rows, target);
    return status;
}

void opts_free(const struct opt_row *rows, uint32_t n_rows, void *target)
{
    for (uint32_t i = 0; i < n_rows; i++)
        if (rows[i].type == OPT_STRING || rows[i].type == OPT_LIST) opts_reset(&rows[i], target);
}
