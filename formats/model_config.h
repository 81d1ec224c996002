/* formats/model_config.h - a Hugging Face config.json in both spellings that exist (facts.md): old
 * `torch_dtype`, `rope_theta`, `rope_scaling`; new `dtype`, `rope_parameters {rope_theta,
 * rope_type, ...}`, `layer_types`. Both at once must agree, else refused. Every key must be known:
 * used, or on the list of inert keys (documentation, generation, training-time hints that are off),
 * or refused by name with what it would change (CKP-34). Unknown model_type: refused with the list
 * of families (CKP-35). Dropout other than 0, hidden_act other than silu, partial rotary, unknown
 * rope types, quantization_config: refused. Defaults per family as transformers 5 has them
 * (tie_word_embeddings: untied for llama, mistral, qwen2, qwen3 when absent).
 *
 * Keeps the document as read, so that export writes the same spelling back (model_config_write
 * changes only the dtype value if asked). */
#ifndef FORMATS_MODEL_CONFIG_H
#define FORMATS_MODEL_CONFIG_H

#include "base/status.h"
#include "formats/safetensors.h"

enum model_family { MODEL_LLAMA, MODEL_MISTRAL, MODEL_QWEN2, MODEL_QWEN3, MODEL_FAMILY_N };
enum model_rope { ROPE_DEFAULT, ROPE_LLAMA3, ROPE_LINEAR };

struct model_config {
    enum model_family family;
    uint32_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, max_positions;
    double rms_eps, initializer_range;
    bool tied;
    bool attention_bias;      /* q, k, v (and o where the family has it: see o_bias) */
    bool o_bias, mlp_bias, qk_norm;
    double rope_theta;
    enum model_rope rope;
    double rope_factor, rope_low_freq_factor, rope_high_freq_factor;
    uint32_t rope_original_max_positions;
    uint32_t *window;         /* [layers]: sliding window of each layer, 0: none (owned); query i
                               * sees keys i - window < j <= i */
    char dtype[16];           /* "bfloat16", "float16", "float32" (also when the file names none) */
    void *document;           /* json_t *, the file as read (owned) */
    bool new_spelling;
};

stk_status model_config_read(const char *path, struct model_config *out, struct stk_error *err);
/* The same from a parsed document (a json_t *, taken over, also on failure); `path` is what
 * sentences name. */
stk_status model_config_take(const char *path, void *document, struct model_config *out,
                             struct stk_error *err);
/* The first key by which the two compute something else (NULL: none). Positions, initializer_range,
 * dtype and spelling do not count. */
const char *model_config_differs(const struct model_config *a, const struct model_config *b);
void model_config_free(struct model_config *c);
stk_status model_config_write(const struct model_config *c, const char *path,
                              const char *dtype /* NULL: keep */, struct stk_error *err);
const char *model_family_name(enum model_family f);

/* The tensors that a model folder of this configuration must hold (Hugging Face names). Tied: no
 * lm_head.weight of its own. */
enum model_role {
    ROLE_EMBED,
    ROLE_IN_NORM,
    ROLE_Q,
    ROLE_K,
    ROLE_V,
    ROLE_O,
    ROLE_Q_BIAS,
    ROLE_K_BIAS,
    ROLE_V_BIAS,
    ROLE_O_BIAS,
    ROLE_Q_NORM,
    ROLE_K_NORM,
    ROLE_POST_NORM,
    ROLE_GATE,
    ROLE_UP,
    ROLE_DOWN,
    ROLE_GATE_BIAS,
    ROLE_UP_BIAS,
    ROLE_DOWN_BIAS,
    ROLE_FINAL_NORM,
    ROLE_HEAD,
    ROLE_N
};
struct model_tensor {
    char name[96];
    enum model_role role;
    int32_t layer; /* -1: none */
    uint32_t rank;
    uint64_t shape[2];
};
/* Count with out == NULL; else fills `out` in the order embedding, layers (each in role order),
 * final norm, head. */
uint32_t model_tensors(const struct model_config *c, struct model_tensor *out);
uint64_t model_param_count(const struct model_config *c);
/* Checks that the set holds exactly these tensors: missing, extra (buffers of old files such as
 * rotary_emb.inv_freq are let pass), wrong shape, dtype other than BF16, F16 or F32: STK_ERR_FORMAT
 * with a sentence that names tensor, file, expected and found. Tied: embedding, head or both may be
 * there; two copies are compared byte by byte and must be equal (reads both); *head_only: only
 * lm_head.weight is there, read the embedding from it. */
stk_status model_check_tensors(const struct model_config *c, struct st_set *s, bool *head_only,
                               struct stk_error *err);
/* Inverse frequencies [head_dim / 2] in fp32 as transformers computes them (incl. Llama-3
 * scaling). */
void model_inv_freq(const struct model_config *c, float *out);

#endif
