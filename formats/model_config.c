/* formats/model_config.c - reads a Hugging Face config.json into facts, and writes it back in the
 * spelling it came in.
 *
 * Owns: the document as read. Must not know: tensors (model_tensors.c), which keys are harmless
 * (model_config_keys.c).
 * Defaults are those of transformers 5.24's configuration classes, but the five sizes that make a
 * model (vocabulary, hidden, intermediate, layers, heads) must be written. A key that is null
 * counts as absent, as it does there.
 * Thread: any; blocking. */
#include "formats/model_config.h"

#include "base/sys.h"
#include "formats/files.h"
#include "formats/model_config_keys.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t config_bytes_max = 16ull << 20;
enum { DEPTH_MAX = 32, LAYERS_MAX = 4096, WIDTH_MAX = 1 << 22 };

static const char *const family_names[MODEL_FAMILY_N] = { "llama", "mistral", "qwen2", "qwen3" };

const char *model_family_name(enum model_family f)
{
    STK_ASSERT((unsigned)f < MODEL_FAMILY_N);
    return family_names[f];
}

/* What one read works on. */
struct reader {
    const char *path;
    json_t *doc;
    struct model_config *c;
    struct stk_error *err;
};

#define REFUSE(r, ...) stk_error_set((r)->err, STK_ERR_FORMAT, 0, __VA_ARGS__)

/* --- single values ---------------------------------------------------------------------------- */

/* NULL: absent or null. */
static json_t *value_of(json_t *object, const char *key)
{
    json_t *v = json_object_get(object, key);
    return json_is_null(v) ? NULL : v;
}

static stk_status read_u32(struct reader *r, const char *key, uint32_t max,
                           const uint32_t *otherwise, uint32_t *out)
{
    json_t *v = value_of(r->doc, key);
    if (!v && otherwise) {
        *out = *otherwise;
        return STK_OK;
    }
    if (!v) return REFUSE(r, "%s: \"%s\" is missing", r->path, key);
    if (!json_is_integer(v) || json_integer_value(v) < 1 || json_integer_value(v) > (json_int_t)max)
        return REFUSE(r, "%s: \"%s\" must be an integer from 1 to %u", r->path, key, max);
    *out = (uint32_t)json_integer_value(v);
    return STK_OK;
}

static stk_status read_double(struct reader *r, json_t *object, const char *key, double min,
                              double max, const double *otherwise, double *out)
{
    json_t *v = value_of(object, key);
    if (!v && otherwise) {
        *out = *otherwise;
        return STK_OK;
    }
    if (!v) return REFUSE(r, "%s: \"%s\" is missing", r->path, key);
    double x = json_number_value(v);
    if (!json_is_number(v) || !(x >= min) || !(x <= max))
        return REFUSE(r, "%s: \"%s\" must be a number from %g to %g", r->path, key, min, max);
    *out = x;
    return STK_OK;
}

static stk_status read_bool(struct reader *r, const char *key, bool otherwise, bool *out)
{
    json_t *v = value_of(r->doc, key);
    *out = otherwise;
    if (!v) return STK_OK;
    if (!json_is_boolean(v)) return REFUSE(r, "%s: \"%s\" must be true or false", r->path, key);
    *out = json_is_true(v);
    return STK_OK;
}

/* --- family, sizes ---------------------------------------------------------------------------- */

static stk_status read_family(struct reader *r)
{
    json_t *v = value_of(r->doc, "model_type");
    const char *name = json_string_value(v);
    if (!name)
        return REFUSE(r,
                      "%s: \"model_type\" is missing; supported are llama, mistral, qwen2, qwen3",
                      r->path);
    for (unsigned f = 0; f < MODEL_FAMILY_N; f++)
        if (strcmp(family_names[f], name) == 0) {
            r->c->family = (enum model_family)f;
            return STK_OK;
        }
    return stk_error_set(
        r->err, STK_ERR_UNSUPPORTED, 0,
        "%s: model_type \"%.60s\" is not supported; supported are llama, mistral, qwen2, qwen3",
        r->path, name);
}

/* "LlamaForCausalLM": another head on the same body would lack lm_head or have a different loss. */
static stk_status check_architectures(struct reader *r)
{
    static const char *const causal[MODEL_FAMILY_N] = { "LlamaForCausalLM", "MistralForCausalLM",
                                                        "Qwen2ForCausalLM", "Qwen3ForCausalLM" };
    json_t *v = value_of(r->doc, "architectures");
    if (!v) return STK_OK;
    const char *name = json_string_value(json_array_get(v, 0));
    if (!json_is_array(v) || json_array_size(v) > 1 ||
        (json_array_size(v) == 1 && (!name || strcmp(name, causal[r->c->family]) != 0)))
        return stk_error_set(
            r->err, STK_ERR_UNSUPPORTED, 0,
            "%s: architectures is [%.60s], only [%s] is supported for model_type %s", r->path,
            name ? name : "?", causal[r->c->family], model_family_name(r->c->family));
    return STK_OK;
}

static stk_status read_head_dim(struct reader *r)
{
    struct model_config *c = r->c;
    if (c->heads % c->kv_heads != 0)
        return REFUSE(r, "%s: num_attention_heads %u is not a multiple of num_key_value_heads %u",
                      r->path, c->heads, c->kv_heads);
    uint32_t otherwise = 128; /* Qwen3, whatever the hidden size */
    if (c->family != MODEL_QWEN3) {
        if (!value_of(r->doc, "head_dim") && c->hidden % c->heads != 0)
            return REFUSE(r,
                          "%s: hidden_size %u is not a multiple of num_attention_heads %u, and "
                          "head_dim is not given",
                          r->path, c->hidden, c->heads);
        otherwise = c->hidden / c->heads;
    }
    STK_TRY(read_u32(r, "head_dim", 4096, otherwise ? &otherwise : NULL, &c->head_dim));
    if (c->head_dim % 2 != 0)
        return REFUSE(r, "%s: head_dim %u is odd; rotary positions need pairs", r->path,
                      c->head_dim);
    return STK_OK;
}

static stk_status read_sizes(struct reader *r)
{
    /* 0: as many as heads */
    static const uint32_t kv_default[MODEL_FAMILY_N] = { 0, 8, 32, 32 };
    static const uint32_t positions_default[MODEL_FAMILY_N] = { 2048, 131072, 32768, 32768 };
    struct model_config *c = r->c;
    STK_TRY(read_u32(r, "vocab_size", 1 << 24, NULL, &c->vocab));
    STK_TRY(read_u32(r, "hidden_size", WIDTH_MAX, NULL, &c->hidden));
    STK_TRY(read_u32(r, "intermediate_size", WIDTH_MAX, NULL, &c->intermediate));
    STK_TRY(read_u32(r, "num_hidden_layers", LAYERS_MAX, NULL, &c->layers));
    STK_TRY(read_u32(r, "num_attention_heads", 65536, NULL, &c->heads));
    /* null means as many as heads in every family; absent means the class's default. */
    bool absent = json_object_get(r->doc, "num_key_value_heads") == NULL;
    uint32_t kv = absent && kv_default[c->family] ? kv_default[c->family] : c->heads;
    STK_TRY(read_u32(r, "num_key_value_heads", c->heads, &kv, &c->kv_heads));
    STK_TRY(read_u32(r, "max_position_embeddings", 1u << 30, &positions_default[c->family],
                     &c->max_positions));
    static const double eps = 1e-6, range = 0.02;
    STK_TRY(read_double(r, r->doc, "rms_norm_eps", 1e-30, 1, &eps, &c->rms_eps));
    STK_TRY(read_double(r, r->doc, "initializer_range", 0, 1, &range, &c->initializer_range));
    STK_TRY(read_bool(r, "tie_word_embeddings", false, &c->tied));
    return read_head_dim(r);
}

static stk_status read_structure(struct reader *r)
{
    struct model_config *c = r->c;
    json_t *act = value_of(r->doc, "hidden_act");
    if (act && (!json_is_string(act) || (strcmp(json_string_value(act), "silu") != 0 &&
                                         strcmp(json_string_value(act), "swish") != 0)))
        return stk_error_set(r->err, STK_ERR_UNSUPPORTED, 0,
                             "%s: hidden_act \"%.40s\" is not supported, only \"silu\"", r->path,
                             json_is_string(act) ? json_string_value(act) : "?");
    STK_TRY(read_bool(r, "attention_bias", c->family == MODEL_QWEN2, &c->attention_bias));
    if (c->family == MODEL_QWEN2 && !c->attention_bias)
        return stk_error_set(r->err, STK_ERR_UNSUPPORTED, 0,
                             "%s: \"attention_bias\": false: qwen2 always has biases on q, k and v",
                             r->path);
    if (c->family == MODEL_MISTRAL) c->attention_bias = false;
    c->o_bias = c->attention_bias && c->family != MODEL_QWEN2;
    c->qk_norm = c->family == MODEL_QWEN3;
    if (c->family == MODEL_LLAMA) STK_TRY(read_bool(r, "mlp_bias", false, &c->mlp_bias));
    return STK_OK;
}

/* --- rotary positions ------------------------------------------------------------------------- */

/* What one spelling says; NaN and -1: nothing. */
struct rope_facts {
    double theta, factor, low, high;
    int64_t original;
    int kind; /* enum model_rope or -1 */
};
static const struct rope_facts rope_nothing = { NAN, NAN, NAN, NAN, -1, -1 };

static stk_status read_rope_kind(struct reader *r, const char *where, json_t *v,
                                 struct rope_facts *f)
{
    static const char *const names[] = { "default", "llama3", "linear" };
    const char *name = json_string_value(v);
    int kind = -1;
    for (int i = 0; name && i < 3; i++)
        if (strcmp(names[i], name) == 0) kind = i;
    if (kind < 0)
        return stk_error_set(
            r->err, STK_ERR_UNSUPPORTED, 0,
            "%s: %s: rotary type \"%.40s\" is not supported; supported are default, llama3, linear",
            r->path, where, name ? name : "?");
    if (f->kind >= 0 && f->kind != kind)
        return REFUSE(r, "%s: %s: \"type\" and \"rope_type\" contradict each other", r->path,
                      where);
    f->kind = kind;
    return STK_OK;
}

static stk_status read_rope_object(struct reader *r, const char *where, json_t *object,
                                   struct rope_facts *f)
{
    if (!json_is_object(object))
        return REFUSE(r, "%s: \"%s\" must be an object or null", r->path, where);
    const char *key;
    json_t *v;
    json_object_foreach(object, key, v)
    {
        if (json_is_null(v)) continue;
        if (strcmp(key, "type") == 0 || strcmp(key, "rope_type") == 0)
            STK_TRY(read_rope_kind(r, where, v, f));
        else if (strcmp(key, "rope_theta") == 0)
            STK_TRY(read_double(r, object, key, 1, 1e15, NULL, &f->theta));
        else if (strcmp(key, "factor") == 0)
            STK_TRY(read_double(r, object, key, 1, 1e6, NULL, &f->factor));
        else if (strcmp(key, "low_freq_factor") == 0)
            STK_TRY(read_double(r, object, key, 1e-3, 1e6, NULL, &f->low));
        else if (strcmp(key, "high_freq_factor") == 0)
            STK_TRY(read_double(r, object, key, 1e-3, 1e6, NULL, &f->high));
        else if (strcmp(key, "original_max_position_embeddings") == 0) {
            if (!json_is_integer(v) || json_integer_value(v) < 1 || json_integer_value(v) > 1 << 30)
                return REFUSE(r, "%s: %s: \"%s\" must be an integer from 1 to 2^30", r->path, where,
                              key);
            f->original = json_integer_value(v);
        } else if (strcmp(key, "partial_rotary_factor") == 0 && json_is_number(v) &&
                   json_number_value(v) == 1.0) {
            continue;
        } else {
            return stk_error_set(r->err, STK_ERR_UNSUPPORTED, 0,
                                 "%s: %s: the key \"%.60s\" is not supported; it would change the "
                                 "rotary frequencies",
                                 r->path, where, key);
        }
    }
    return STK_OK;
}

static bool differ(double a, double b) { return !isnan(a) && !isnan(b) && a != b; }

/* Both spellings at once must say the same; what only one says holds. */
static stk_status merge_rope(struct reader *r, const struct rope_facts *old, struct rope_facts *f)
{
    const char *what = NULL;
    if (differ(old->theta, f->theta)) what = "rope_theta";
    if (differ(old->factor, f->factor)) what = "factor";
    if (differ(old->low, f->low)) what = "low_freq_factor";
    if (differ(old->high, f->high)) what = "high_freq_factor";
    if (old->original >= 0 && f->original >= 0 && old->original != f->original)
        what = "original_max_position_embeddings";
    if (old->kind >= 0 && f->kind >= 0 && old->kind != f->kind) what = "rope_type";
    if (what)
        return REFUSE(r,
                      "%s: rope_parameters and the older spelling (rope_theta, rope_scaling) "
                      "contradict each other in %s; remove one",
                      r->path, what);
    if (isnan(f->theta)) f->theta = old->theta;
    if (isnan(f->factor)) f->factor = old->factor;
    if (isnan(f->low)) f->low = old->low;
    if (isnan(f->high)) f->high = old->high;
    if (f->original < 0) f->original = old->original;
    if (f->kind < 0) f->kind = old->kind;
    return STK_OK;
}

static stk_status settle_rope(struct reader *r, const struct rope_facts *f)
{
    struct model_config *c = r->c;
    c->rope_theta = isnan(f->theta) ? 10000.0 : f->theta;
    c->rope = f->kind < 0 ? ROPE_DEFAULT : (enum model_rope)f->kind;
    bool extra = !isnan(f->low) || !isnan(f->high) || f->original >= 0;
    if (c->rope == ROPE_DEFAULT && (extra || !isnan(f->factor)))
        return REFUSE(r, "%s: rotary type default has no factors; say which type is meant",
                      r->path);
    c->rope_factor = 1;
    if (c->rope == ROPE_DEFAULT) return STK_OK;
    if (isnan(f->factor)) return REFUSE(r, "%s: the rotary scaling has no \"factor\"", r->path);
    c->rope_factor = f->factor;
    if (c->rope == ROPE_LINEAR)
        return extra ? REFUSE(r, "%s: rotary type linear has only \"factor\"", r->path) : STK_OK;
    if (isnan(f->low) || isnan(f->high))
        return REFUSE(r, "%s: rotary type llama3 needs low_freq_factor and high_freq_factor",
                      r->path);
    if (f->high <= f->low)
        return REFUSE(
            r, "%s: rotary type llama3: high_freq_factor %g must be above low_freq_factor %g",
            r->path, f->high, f->low);
    c->rope_low_freq_factor = f->low;
    c->rope_high_freq_factor = f->high;
    c->rope_original_max_positions = f->original < 0 ? c->max_positions : (uint32_t)f->original;
    return STK_OK;
}

static stk_status read_rope(struct reader *r)
{
    struct rope_facts old = rope_nothing, new = rope_nothing;
    if (value_of(r->doc, "rope_theta"))
        STK_TRY(read_double(r, r->doc, "rope_theta", 1, 1e15, NULL, &old.theta));
    json_t *scaling = json_object_get(r->doc, "rope_scaling"),
           *parameters = value_of(r->doc, "rope_parameters");
    if (json_is_null(scaling)) old.kind = ROPE_DEFAULT;
    else if (scaling) STK_TRY(read_rope_object(r, "rope_scaling", scaling, &old));
    if (parameters) STK_TRY(read_rope_object(r, "rope_parameters", parameters, &new));
    if (scaling && json_is_object(scaling) && json_object_size(scaling) > 0 && old.kind < 0)
        return REFUSE(r, "%s: rope_scaling has no \"rope_type\" (or \"type\")", r->path);
    STK_TRY(merge_rope(r, &old, &new));
    return settle_rope(r, &new);
}

/* --- windows ---------------------------------------------------------------------------------- */

/* Which layers slide, before layer_types has a say. *size: their window, 0: none slides. */
static stk_status default_windows(struct reader *r, uint32_t *size, uint32_t *first)
{
    static const uint32_t window = 4096, layer = 28;
    struct model_config *c = r->c;
    *size = 0;
    *first = 0;
    if (c->family == MODEL_LLAMA) return STK_OK;
    json_t *v = json_object_get(r->doc, "sliding_window");
    uint32_t sliding = 0;
    if (!json_is_null(v)) STK_TRY(read_u32(r, "sliding_window", 1u << 30, &window, &sliding));
    if (c->family == MODEL_MISTRAL) {
        *size = sliding;
        return STK_OK;
    }
    bool use;
    STK_TRY(read_bool(r, "use_sliding_window", false, &use));
    json_t *from = value_of(r->doc, "max_window_layers");
    *first = layer;
    if (from && (!json_is_integer(from) || json_integer_value(from) < 0 ||
                 json_integer_value(from) > LAYERS_MAX))
        return REFUSE(r, "%s: \"max_window_layers\" must be an integer from 0 to %d", r->path,
                      LAYERS_MAX);
    if (from) *first = (uint32_t)json_integer_value(from);
    *size = use ? sliding : 0;
    return STK_OK;
}

/* layer_types decides for Qwen, as in transformers; for Llama and Mistral, which have one type,
 * it must agree with it. */
static stk_status read_windows(struct reader *r)
{
    struct model_config *c = r->c;
    uint32_t size, first;
    STK_TRY(default_windows(r, &size, &first));
    c->window = sys_calloc(c->layers, sizeof *c->window);
    if (!c->window) return files_no_memory(r->err, r->path);
    json_t *types = value_of(r->doc, "layer_types");
    if (types && (!json_is_array(types) || json_array_size(types) != c->layers))
        return REFUSE(
            r, "%s: layer_types must be an array of num_hidden_layers = %u entries, it has %zu",
            r->path, c->layers, json_array_size(types));
    for (uint32_t i = 0; i < c->layers; i++) {
        bool slides = size > 0 && i >= first;
        const char *type = json_string_value(json_array_get(types, i));
        if (types) {
            bool said = type && strcmp(type, "sliding_attention") == 0;
            if (!type || (!said && strcmp(type, "full_attention") != 0))
                return REFUSE(r,
                              "%s: layer_types[%u] is \"%.40s\"; full_attention or "
                              "sliding_attention was expected",
                              r->path, i, type ? type : "?");
            if (said && size == 0)
                return REFUSE(r,
                              "%s: layer_types[%u] is sliding_attention, but there is no sliding "
                              "window in use",
                              r->path, i);
            if (!said && slides && c->family == MODEL_MISTRAL)
                return REFUSE(r,
                              "%s: layer_types[%u] is full_attention, but mistral slides in every "
                              "layer with sliding_window %u",
                              r->path, i, size);
            slides = said;
        }
        c->window[i] = slides ? size : 0;
    }
    return STK_OK;
}

/* --- dtype, whole ----------------------------------------------------------------------------- */

static bool known_dtype(const char *name)
{
    return strcmp(name, "bfloat16") == 0 || strcmp(name, "float16") == 0 ||
           strcmp(name, "float32") == 0;
}

static stk_status read_dtype(struct reader *r)
{
    json_t *new = value_of(r->doc, "dtype"), *old = value_of(r->doc, "torch_dtype");
    const char *a = json_string_value(new), *b = json_string_value(old);
    if ((new && (!a || !known_dtype(a))) || (old && (!b || !known_dtype(b))))
        return stk_error_set(
            r->err, STK_ERR_UNSUPPORTED, 0,
            "%s: dtype \"%.40s\" is not supported; supported are bfloat16, float16, float32",
            r->path, new && (!a || !known_dtype(a)) ? (a ? a : "?") : (b ? b : "?"));
    if (a && b && strcmp(a, b) != 0)
        return REFUSE(r,
                      "%s: dtype \"%s\" and torch_dtype \"%s\" contradict each other; remove one",
                      r->path, a, b);
    const char *name = a ? a : b ? b : "float32";
    memcpy(r->c->dtype, name, strlen(name) + 1);
    bool is_old = json_object_get(r->doc, "torch_dtype") || json_object_get(r->doc, "rope_theta") ||
                  json_object_get(r->doc, "rope_scaling");
    r->c->new_spelling =
        !is_old && (json_object_get(r->doc, "dtype") || json_object_get(r->doc, "rope_parameters"));
    return STK_OK;
}

stk_status model_config_read(const char *path, struct model_config *out, struct stk_error *err)
{
    memset(out, 0, sizeof *out);
    json_t *doc;
    STK_TRY(files_read_json(path, config_bytes_max, DEPTH_MAX, &doc, err));
    return model_config_take(path, doc, out, err);
}

stk_status model_config_take(const char *path, void *document, struct model_config *out,
                             struct stk_error *err)
{
    json_t *doc = document;
    memset(out, 0, sizeof *out);
    out->document = doc;
    struct reader r = { path, doc, out, err };
    stk_status status = read_family(&r);
    if (status == STK_OK) status = model_keys_check(path, doc, out->family, err);
    if (status == STK_OK) status = check_architectures(&r);
    if (status == STK_OK) status = read_sizes(&r);
    if (status == STK_OK) status = read_structure(&r);
    if (status == STK_OK) status = read_rope(&r);
    if (status == STK_OK) status = read_windows(&r);
    if (status == STK_OK) status = read_dtype(&r);
    if (status != STK_OK) model_config_free(out);
    return status;
}

const char *model_config_differs(const struct model_config *a, const struct model_config *b)
{
    const struct { const char *key; bool differs;
    } checks[] = {
        { "model_type", a->family != b->family },
        { "vocab_size", a->vocab != b->vocab },
        { "hidden_size", a->hidden != b->hidden },
        { "intermediate_size", a->intermediate != b->intermediate },
        { "num_hidden_layers", a->layers != b->layers },
        { "num_attention_heads", a->heads != b->heads },
        { "num_key_value_heads", a->kv_heads != b->kv_heads },
        { "head_dim", a->head_dim != b->head_dim },
        { "rms_norm_eps", a->rms_eps != b->rms_eps },
        { "tie_word_embeddings", a->tied != b->tied },
        { "attention_bias", a->attention_bias != b->attention_bias || a->o_bias != b->o_bias },
        { "mlp_bias", a->mlp_bias != b->mlp_bias },
        { "rope_theta", a->rope_theta != b->rope_theta },
        { "rope_scaling", a->rope != b->rope || a->rope_factor != b->rope_factor ||
                              a->rope_low_freq_factor != b->rope_low_freq_factor ||
                              a->rope_high_freq_factor != b->rope_high_freq_factor ||
                              a->rope_original_max_positions != b->rope_original_max_positions },
    };
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++)
        if (checks[i].differs) return checks[i].key;
    return memcmp(a->window, b->window, a->layers * sizeof *a->window) ? "sliding_window" : NULL;
}

void model_config_free(struct model_config *c)
{
    if (!c) return;
    sys_free(c->window);
    json_decref(c->document);
    memset(c, 0, sizeof *c);
}

/* 15 digits print 1e-05 as 1e-5; 17 are needed for the rare number that 15 do not carry. */
static char *dump_numbers_short(json_t *doc)
{
    char *text = json_dumps(doc, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
    json_t *again = text ? json_loads(text, 0, NULL) : NULL;
    if (!again || !json_equal(again, doc)) {
        free(text);
        text = json_dumps(doc, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    }
    json_decref(again);
    return text;
}

stk_status model_config_write(const struct model_config *c, const char *path, const char *dtype,
                              struct stk_error *err)
{
    if (dtype && !known_dtype(dtype))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s: dtype \"%.40s\" is not one of bfloat16, float16, float32", path,
                             dtype);
    json_t *doc = json_copy(c->document); /* shallow: only top-level values are replaced */
    if (!doc) return files_no_memory(err, path);
    int bad = 0;
    if (dtype) {
        bool has_new = value_of(doc, "dtype"), has_old = value_of(doc, "torch_dtype");
        if (has_new || (!has_old && c->new_spelling))
            bad |= json_object_set_new(doc, "dtype", json_string(dtype));
        if (has_old || (!has_new && !c->new_spelling))
            bad |= json_object_set_new(doc, "torch_dtype", json_string(dtype));
    }
    char *text = bad ? NULL : dump_numbers_short(doc),
         *lines = text ? sys_format("%s\n", text) : NULL;
    stk_status status =
        lines ? files_replace(path, lines, strlen(lines), err) : files_no_memory(err, path);
    sys_free(lines);
    free(text);
    json_decref(doc);
    return status;
}
