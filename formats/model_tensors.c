/* formats/model_tensors.c - the tensors of a model by configuration, the check of a folder
 * against them, and the rotary frequencies.
 *
 * Owns: nothing. Must not know: how configurations are spelled, tiers.
 * Names are those of transformers' LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and
 * Qwen3ForCausalLM.
 * Thread: any; model_check_tensors blocks and uses the set. */
#include "formats/model_config.h"

#include "base/sys.h"
#include "formats/files.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- the list --------------------------------------------------------------------------------- */

struct list {
    struct model_tensor *out;
    uint32_t n;
};

static void add(struct list *l, enum model_role role, int32_t layer, const char *name,
                uint64_t rows, uint64_t columns)
{
    if (l->out) {
        struct model_tensor *t = &l->out[l->n];
        *t = (struct model_tensor){
            .role = role, .layer = layer, .rank = columns ? 2 : 1, .shape = { rows, columns }
        };
        if (layer >= 0) snprintf(t->name, sizeof t->name, "model.layers.%d.%s", layer, name);
        else snprintf(t->name, sizeof t->name, "%s", name);
    }
    l->n++;
}

static void add_layer(struct list *l, const struct model_config *c, int32_t i)
{
    uint64_t q = (uint64_t)c->heads * c->head_dim, kv = (uint64_t)c->kv_heads * c->head_dim;
    add(l, ROLE_IN_NORM, i, "input_layernorm.weight", c->hidden, 0);
    add(l, ROLE_Q, i, "self_attn.q_proj.weight", q, c->hidden);
    add(l, ROLE_K, i, "self_attn.k_proj.weight", kv, c->hidden);
    add(l, ROLE_V, i, "self_attn.v_proj.weight", kv, c->hidden);
    add(l, ROLE_O, i, "self_attn.o_proj.weight", c->hidden, q);
    if (c->attention_bias) {
        add(l, ROLE_Q_BIAS, i, "self_attn.q_proj.bias", q, 0);
        add(l, ROLE_K_BIAS, i, "self_attn.k_proj.bias", kv, 0);
        add(l, ROLE_V_BIAS, i, "self_attn.v_proj.bias", kv, 0);
    }
    if (c->o_bias) add(l, ROLE_O_BIAS, i, "self_attn.o_proj.bias", c->hidden, 0);
    if (c->qk_norm) {
        add(l, ROLE_Q_NORM, i, "self_attn.q_norm.weight", c->head_dim, 0);
        add(l, ROLE_K_NORM, i, "self_attn.k_norm.weight", c->head_dim, 0);
    }
    add(l, ROLE_POST_NORM, i, "post_attention_layernorm.weight", c->hidden, 0);
    add(l, ROLE_GATE, i, "mlp.gate_proj.weight", c->intermediate, c->hidden);
    add(l, ROLE_UP, i, "mlp.up_proj.weight", c->intermediate, c->hidden);
    add(l, ROLE_DOWN, i, "mlp.down_proj.weight", c->hidden, c->intermediate);
    if (c->mlp_bias) {
        add(l, ROLE_GATE_BIAS, i, "mlp.gate_proj.bias", c->intermediate, 0);
        add(l, ROLE_UP_BIAS, i, "mlp.up_proj.bias", c->intermediate, 0);
        add(l, ROLE_DOWN_BIAS, i, "mlp.down_proj.bias", c->hidden, 0);
    }
}

uint32_t model_tensors(const struct model_config *c, struct model_tensor *out)
{
    struct list l = { out, 0 };
    add(&l, ROLE_EMBED, -1, "model.embed_tokens.weight", c->vocab, c->hidden);
    for (uint32_t i = 0; i < c->layers; i++) add_layer(&l, c, (int32_t)i);
    add(&l, ROLE_FINAL_NORM, -1, "model.norm.weight", c->hidden, 0);
    if (!c->tied) add(&l, ROLE_HEAD, -1, "lm_head.weight", c->vocab, c->hidden);
    return l.n;
}

uint64_t model_param_count(const struct model_config *c)
{
    struct model_tensor t[ROLE_N]; /* one layer has fewer than ROLE_N tensors */
    struct list l = { t, 0 };
    add_layer(&l, c, 0);
    uint64_t layer = 0;
    for (uint32_t i = 0; i < l.n; i++)
        layer += t[i].shape[0] * (t[i].rank == 2 ? t[i].shape[1] : 1);
    return layer * c->layers + c->hidden + (uint64_t)c->vocab * c->hidden * (c->tied ? 1 : 2);
}

/* --- a folder against the list ---------------------------------------------------------------- */

static const char embed_name[] = "model.embed_tokens.weight", head_name[] = "lm_head.weight";

static int by_name(const void *a, const void *b)
{
    const struct model_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static void print_shape(char *out, size_t size, uint32_t rank, const uint64_t *shape)
{
    size_t used = (size_t)snprintf(out, size, "[");
    for (uint32_t i = 0; i < rank && used + 24 < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%" PRIu64, i ? ", " : "", shape[i]);
    snprintf(out + used, size - used, "]");
}

static stk_status check_one(struct st_set *s, const struct st_tensor *t, uint32_t rank,
                            const uint64_t *shape, struct stk_error *err)
{
    if (t->dtype != ST_BF16 && t->dtype != ST_F16 && t->dtype != ST_F32)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: tensor %.100s has dtype %s; BF16, F16 or F32 was expected",
                             st_set_path(s, t->file), t->name, st_dtype_name(t->dtype));
    if (t->rank == rank && memcmp(t->shape, shape, rank * sizeof *shape) == 0) return STK_OK;
    char want[64], have[208];
    print_shape(want, sizeof want, rank, shape);
    print_shape(have, sizeof have, t->rank, t->shape);
    return stk_error_set(err, STK_ERR_FORMAT, 0,
                         "%s: tensor %.100s has shape %s, the configuration expects %s: "
                         "config.json is of another model",
                         st_set_path(s, t->file), t->name, have, want);
}

/* Buffers that old writers saved and that follow from the configuration. */
static bool is_inert_buffer(const char *name)
{
    static const char *const ends[] = { ".rotary_emb.inv_freq", ".self_attn.bias",
                                        ".self_attn.masked_bias" };
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        size_t k = strlen(ends[i]);
        if (n > k && strcmp(name + n - k, ends[i]) == 0) return true;
    }
    return false;
}

/* Two copies of a tied tensor: equal bytes or refused, never merged silently (CKP-32). */
static stk_status check_equal(struct st_set *s, const struct st_tensor *a,
                              const struct st_tensor *b, struct stk_error *err)
{
    if (a->dtype != b->dtype)
        return stk_error_set(
            err, STK_ERR_FORMAT, 0,
            "%s: tie_word_embeddings is true, but %s is %s and %s is %s; remove one",
            st_set_path(s, b->file), a->name, st_dtype_name(a->dtype), b->name,
            st_dtype_name(b->dtype));
    enum { PIECE = 1 << 20 };
    unsigned char *x = sys_calloc(2, PIECE);
    if (!x) return files_no_memory(err, st_set_path(s, a->file));
    stk_status status = STK_OK;
    for (uint64_t at = 0; at < a->size_bytes && status == STK_OK; at += PIECE) {
        uint64_t n = a->size_bytes - at < PIECE ? a->size_bytes - at : PIECE;
        status = st_set_read(s, a, at, n, x, err);
        if (status == STK_OK) status = st_set_read(s, b, at, n, x + PIECE, err);
        if (status == STK_OK && memcmp(x, x + PIECE, (size_t)n) != 0)
            status = stk_error_set(err, STK_ERR_FORMAT, 0,
                                   "%s: tie_word_embeddings is true, but %s and %s differ; set it "
                                   "to false, or remove one of them",
                                   st_set_path(s, b->file), a->name, b->name);
    }
    sys_free(x);
    return status;
}

static stk_status check_missing(const struct model_config *c, struct st_set *s,
                                const struct model_tensor *want, uint32_t n, bool head_only,
                                struct stk_error *err)
{
    const char *first = NULL;
    uint32_t missing = 0;
    for (uint32_t i = 0; i < n; i++) {
        const char *name = head_only && want[i].role == ROLE_EMBED ? head_name : want[i].name;
        const struct st_tensor *t = st_set_find(s, name);
        if (t) STK_TRY(check_one(s, t, want[i].rank, want[i].shape, err));
        else if (missing++ == 0) first = name;
    }
    if (missing == 0) return STK_OK;
    return stk_error_set(
        err, STK_ERR_FORMAT, 0,
        "%s: tensor %.100s is missing (%u of %u are); a %s of %u layers was expected",
        st_set_files(s) ? st_set_path(s, 0) : "model", first, missing, n,
        model_family_name(c->family), c->layers);
}

static stk_status check_extra(const struct model_config *c, struct st_set *s,
                              const struct model_tensor *sorted, uint32_t n, struct stk_error *err)
{
    for (uint32_t i = 0; i < st_set_count(s); i++) {
        const struct st_tensor *t = st_set_at(s, i);
        struct model_tensor key;
        bool fits = strlen(t->name) < sizeof key.name;
        if (fits) memcpy(key.name, t->name, strlen(t->name) + 1);
        if (fits && bsearch(&key, sorted, n, sizeof key, by_name)) continue;
        if (is_inert_buffer(t->name) || (c->tied && strcmp(t->name, head_name) == 0)) continue;
        return stk_error_set(
            err, STK_ERR_FORMAT, 0,
            "%s: tensor %.100s is not part of a %s of %u layers as config.json describes it",
            st_set_path(s, t->file), t->name, model_family_name(c->family), c->layers);
    }
    return STK_OK;
}

stk_status model_check_tensors(const struct model_config *c, struct st_set *s, bool *head_only,
                               struct stk_error *err)
{
    const struct st_tensor *embed = st_set_find(s, embed_name), *head = st_set_find(s, head_name);
    *head_only = c->tied && !embed && head;
    uint32_t n = model_tensors(c, NULL);
    struct model_tensor *want = sys_calloc(n, sizeof *want);
    if (!want) return files_no_memory(err, "list of tensors");
    (void)model_tensors(c, want);
    stk_status status = check_missing(c, s, want, n, *head_only, err);
    qsort(want, n, sizeof *want, by_name);
    if (status == STK_OK) status = check_extra(c, s, want, n, err);
    sys_free(want);
    if (status == STK_OK && c->tied && embed && head) {
        status = check_one(s, head, 2, (uint64_t[]){ c->vocab, c->hidden }, err);
        if (status == STK_OK) status = check_equal(s, embed, head, err);
    }
    return status;
}

/* --- rotary frequencies ----------------------------------------------------------------------- */

/* As transformers' modeling_rope_utils computes them with torch in fp32: a number divided by a
 * tensor is the tensor's reciprocal times the number, numbers enter as fp32. The power is rounded
 * from double, which equals torch's scalar path; its vector path is up to one unit in the last
 * place off in 0.7 % of entries, depending on the machine. */
void model_inv_freq(const struct model_config *c, float *out)
{
    float dim = (float)c->head_dim, factor = (float)c->rope_factor;
    double base = (float)c->rope_theta;
    for (uint32_t i = 0; i < c->head_dim / 2; i++) {
        float exponent = (float)(2 * i) / dim;
        float power = (float)pow(base, (double)exponent);
        float freq = 1.0f / power;
        if (c->rope == ROPE_LINEAR) freq = freq / factor;
        if (c->rope == ROPE_LLAMA3) {
            double original = c->rope_original_max_positions;
            float low_wave = (float)(original / c->rope_low_freq_factor),
                  high_wave = (float)(original / c->rope_high_freq_factor);
            float wave = (1.0f / freq) * (float)(2 * M_PI);
            float turns = (1.0f / wave) * (float)original;
            float smooth = (turns - (float)c->rope_low_freq_factor) /
                           (float)(c->rope_high_freq_factor - c->rope_low_freq_factor);
            if (wave > low_wave) freq = freq / factor;
            else if (!(wave < high_wave)) freq = (1.0f - smooth) * freq / factor + smooth * freq;
        }
        out[i] = freq;
    }
}
