/* base/opts_file.c - the config file: one JSON object whose keys are the options' names.
 *
 * Owns: nothing after it returns. Must not know: the command line. Every value is turned into the
 * text that one would give on the command line, so that both have the same checks. Source: RFC
 * 8259; parser jansson 2.14.
 * Thread: the one that starts the program. */
#include "base/opts_priv.h"
#include "base/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { CONFIG_MAX_BYTES = 1 << 20 };

static stk_status refuse_file(const char *path, const char *doing, struct stk_error *err)
{
    int why = errno;
    return stk_error_set(err, STK_ERR_CONFIG, why, "%s: cannot %s the config file: %s", path, doing,
                         strerror(why));
}

static stk_status read_text(const char *path, char **out, uint64_t *out_bytes,
                            struct stk_error *err)
{
    int fd = sys_open(path, O_RDONLY | O_NONBLOCK, 0); /* a pipe must not block */
    if (fd < 0) return refuse_file(path, "open", err);
    char *text = sys_calloc(1, CONFIG_MAX_BYTES);
    if (!text) {
        sys_close(fd);
        return stk_error_set(err, STK_ERR_NOMEM, errno, "%s: no memory to read the config file",
                             path);
    }
    int64_t got = sys_read_full(fd, text, CONFIG_MAX_BYTES, 0);
    stk_status status = STK_OK;
    if (got < 0) status = refuse_file(path, "read", err);
    else if (got == CONFIG_MAX_BYTES)
        status = stk_error_set(err, STK_ERR_CONFIG, 0,
                               "%s: a config file of a MiB or more is not one of ours", path);
    sys_close(fd);
    if (status != STK_OK) {
        sys_free(text);
        return status;
    }
    *out = text;
    *out_bytes = (uint64_t)got;
    return STK_OK;
}

static stk_status set_scalar(struct opts_parse *p, const struct opt_row *row, const json_t *value,
                             struct opts_where where, struct stk_error *err)
{
    char number[64];
    const char *text = number;
    if (json_is_string(value)) text = json_string_value(value);
    else if (json_is_boolean(value)) text = json_is_true(value) ? "true" : "false";
    else if (json_is_integer(value))
        snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
    else if (json_is_real(value)) snprintf(number, sizeof number, "%.17g", json_real_value(value));
    else
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s%s: expected a string, a number, true or false%s", where.prefix,
                             where.name, row->type == OPT_LIST ? ", or an array of strings" : "");
    return opts_set(row, p->target, text, where, err);
}

static stk_status set_key(struct opts_parse *p, const char *key, const json_t *value,
                          const char *prefix, struct stk_error *err)
{
    struct opts_where where = { prefix, key };
    uint32_t i = opts_find(p, key);
    if (i == p->n_rows) return opts_refuse_unknown(p, where, err);
    const struct opt_row *row = &p->rows[i];
    if (strcmp(key, "config") == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "%s%s: a config file cannot name another one",
                             prefix, key);
    opts_reset(row, p->target);
    p->from[i] |= OPTS_FROM_FILE;
    if (row->type != OPT_LIST || !json_is_array(value))
        return set_scalar(p, row, value, where, err);
    for (size_t k = 0; k < json_array_size(value); k++)
        STK_TRY(set_scalar(p, row, json_array_get(value, k), where, err));
    return STK_OK;
}

static stk_status set_all(struct opts_parse *p, const char *path, json_t *root,
                          struct stk_error *err)
{
    if (!json_is_object(root))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s: expected one JSON object with options as keys", path);
    char *prefix = sys_format("%s: ", path);
    if (!prefix)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "%s: no memory to read the config file",
                             path);
    stk_status status = STK_OK;
    const char *key;
    json_t *value;
    json_object_foreach (root, key, value) {
        status = set_key(p, key, value, prefix, err);
        if (status != STK_OK) break;
    }
    sys_free(prefix);
    return status;
}

stk_status opts_load_file(struct opts_parse *p, const char *path, struct stk_error *err)
{
    char *text = NULL;
    uint64_t text_bytes = 0;
    STK_TRY(read_text(path, &text, &text_bytes, err));
    json_error_t why;
    json_t *root = json_loadb(text, text_bytes, JSON_REJECT_DUPLICATES, &why);
    sys_free(text);
    if (!root)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "%s, line %d, column %d: not JSON: %s", path,
                             why.line, why.column, why.text);
    stk_status status = set_all(p, path, root, err);
    json_decref(root);
    return status;
}
