/* engine/counters.c - what a checkpoint and a durable step both carry beside the tensors: counters,
 * steps of each tensor, loss scale, numerics key, dtype, the client's own object; and whether such
 * a document agrees with this engine.
 *
 * Application's thread, between steps. Must not know where tensors lie or how a document is
 * stored. */
#include "engine/counters.h"
#include "base/sys.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const moments_names[] = { "fp32", "bf16", "8bit" };
static const char *moments_name(const stk_engine *e) { return moments_names[e->cfg.moments]; }

json_t *counters_document(stk_engine *e, const char *client_json)
{
    json_t *tensors = json_array(),
           *client = client_json ? json_loads(client_json, 0, NULL) : json_object();
    for (uint32_t i = 0; i < e->layout->n_tensors; i++) {
        const struct stk_tensor *t = &e->layout->tensors[i];
        json_array_append_new(tensors, json_pack("{s:s, s:I, s:b, s:I}", "name", t->name,
                                                 "elements", (json_int_t)t->n_elems, "frozen",
                                                 (int)t->frozen, "steps", (json_int_t)t->steps));
    }
    if (!client) client = json_object();
    return json_pack("{s:i, s:I, s:I, s:I, s:I, s:f, s:I, s:s, s:s, s:s, s:o, s:o}", "format",
                     MANIFEST_VERSION, "step", (json_int_t)e->begun, "updates",
                     (json_int_t)e->updates, "skipped_total", (json_int_t)e->skipped_total,
                     "skipped_in_a_row", (json_int_t)e->skipped_row, "loss_scale", e->loss_scale,
                     "scale_good", (json_int_t)e->scale_good, "numerics", e->numerics, "dtype",
                     e->cfg.dtype == STK_FP16 ? "fp16" : "bf16", "moments", moments_name(e), "tensors",
                     tensors, "client", client);
}

stk_status counters_check_client(stk_engine *e, const char *call, const char *client_json)
{
    json_error_t why;
    json_t *doc = client_json ? json_loads(client_json, 0, &why) : json_object();
    bool object = json_is_object(doc);
    if (!object)
        stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                      "%s: client_json must be one JSON object: %s", call,
                      doc ? "it is another kind of value" : why.text);
    json_decref(doc);
    return object ? STK_OK : STK_ERR_CONFIG;
}

/* The parts of a numerics key ("name=value;...") that are not in another one, as a list for a
 * sentence. */
static void parts_without(const char *key, const char *other, char *buf, size_t size)
{
    size_t n = 0;
    buf[0] = '\0';
    while (*key) {
        size_t len = strcspn(key, ";");
        bool found = false;
        for (const char *at = other; *at && !found; at += strcspn(at, ";"), at += *at == ';')
            found = strcspn(at, ";") == len && strncmp(at, key, len) == 0;
        if (!found && len > 0 && n + len + 3 < size)
            n += (size_t)snprintf(buf + n, size - n, "%s%.*s", n ? ", " : "", (int)len, key);
        key += len;
        key += *key == ';';
    }
    if (n == 0) snprintf(buf, size, "nothing");
}

/* Of this model, whatever the arithmetic. */
stk_status counters_agree_model(stk_engine *e, const char *path, const json_t *doc)
{
    const json_t *tensors = json_object_get(doc, "tensors");
    if (json_array_size(tensors) != e->layout->n_tensors)
        return stk_error_set(
            &e->err, STK_ERR_CONFIG, 0,
            "%s: holds %zu tensors, the model has %u: it is of another model", path,
            json_array_size(tensors), e->layout->n_tensors);
    for (uint32_t i = 0; i < e->layout->n_tensors; i++) {
        const struct stk_tensor *t = &e->layout->tensors[i];
        const json_t *j = json_array_get(tensors, i);
        const char *name = json_string_value(json_object_get(j, "name"));
        if (!name || strcmp(name, t->name) ||
            json_integer_value(json_object_get(j, "elements")) != (json_int_t)t->n_elems ||
            json_is_true(json_object_get(j, "frozen")) != t->frozen)
            return stk_error_set(
                &e->err, STK_ERR_CONFIG, 0,
                "%s: tensor %u is %s there and %s (%llu elements%s) in this model: it is "
                "of another model or of other --freeze patterns",
                path, i, name ? name : "unnamed", t->name, (unsigned long long)t->n_elems,
                t->frozen ? ", frozen" : "");
    }
    /* whatever the key: frozen tensors are stored as they are, and bf16 bits read as fp16 would be
     * nonsense */
    const char *dtype = json_string_value(json_object_get(doc, "dtype")),
               *own = e->cfg.dtype == STK_FP16 ? "fp16" : "bf16";
    if (!dtype || strcmp(dtype, own))
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "%s: was written with dtype %s, this run has %s: give --dtype %s",
                             path, dtype ? dtype : "unknown", own, dtype ? dtype : "bf16");
    return STK_OK;
}

stk_status counters_agree_moments(stk_engine *e, const char *path, const json_t *doc, bool any)
{
    const char *there = json_string_value(json_object_get(doc, "moments"));
    bool known = false;
    for (int i = 0; there && i < 3; i++) known |= strcmp(there, moments_names[i]) == 0;
    if (known && (any || strcmp(there, moments_name(e)) == 0)) return STK_OK;
    if (!known)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "%s: its moments are %s, this run keeps %s: resume from another "
                             "checkpoint",
                             path, there ? there : "of unknown dtype", moments_name(e));
    return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                         "%s: its moments are %s, this run keeps %s: give --moments %s (a checkpoint, "
                         "not a durable step, is converted with --any-numerics)",
                         path, there, moments_name(e), there);
}

/* The checkpoint must be of this model and of this arithmetic; the first difference is named. */
stk_status counters_agree(stk_engine *e, const char *path, const json_t *doc, bool any_numerics)
{
    STK_TRY(counters_agree_model(e, path, doc));
    STK_TRY(counters_agree_moments(e, path, doc, any_numerics));
    const char *key = json_string_value(json_object_get(doc, "numerics"));
    if (any_numerics || (key && strcmp(key, e->numerics) == 0)) return STK_OK;
    char there[256], here[256];
    parts_without(key ? key : "", e->numerics, there, sizeof there);
    parts_without(e->numerics, key ? key : "", here, sizeof here);
    return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                         "%s: its numerics key has %s where this run has %s: give the options of "
                         "the first run, or --any-numerics to go on with other bits",
                         path, there, here);
}

void counters_take(stk_engine *e, const json_t *doc)
{
    const json_t *tensors = json_object_get(doc, "tensors");
    e->begun = (uint64_t)json_integer_value(json_object_get(doc, "step"));
    e->updates = (uint64_t)json_integer_value(json_object_get(doc, "updates"));
    e->update_version = e->updates;
    e->skipped_total = (uint64_t)json_integer_value(json_object_get(doc, "skipped_total"));
    e->skipped_row = (uint64_t)json_integer_value(json_object_get(doc, "skipped_in_a_row"));
    e->scale_good = (uint32_t)json_integer_value(json_object_get(doc, "scale_good"));
    double scale = json_number_value(json_object_get(doc, "loss_scale"));
    if (isfinite(scale) && scale > 0) e->loss_scale = scale;
    for (uint32_t i = 0; i < e->layout->n_tensors; i++)
        e->layout->tensors[i].steps =
            (uint64_t)json_integer_value(json_object_get(json_array_get(tensors, i), "steps"));
}

char *counters_client(const json_t *doc)
{
    char *text = json_dumps(json_object_get(doc, "client"), JSON_COMPACT);
    char *copy = text ? sys_strdup(text) : NULL;
    free(text);
    return copy;
}
