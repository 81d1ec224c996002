/* formats/model_config_keys.c - every key that a config.json may have: used, inert, or refused
 * unless neutral.
 *
 * Owns: the table. Must not know: how used keys are read (model_config.c).
 * A key that nobody here knows could change what the model computes, silently (CKP-34): it is
 * refused. To add a key, find out what transformers does with it for each family, then add one
 * row. Sources: the configuration classes and modelling files of transformers 5.24 for llama,
 * mistral, qwen2, qwen3, its base configuration, and keys seen in published files of these
 * families.
 * Thread: any. */
#include "formats/model_config_keys.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LLAMA (1u << MODEL_LLAMA)
#define MISTRAL (1u << MODEL_MISTRAL)
#define QWEN2 (1u << MODEL_QWEN2)
#define QWEN3 (1u << MODEL_QWEN3)
#define ALL (LLAMA | MISTRAL | QWEN2 | QWEN3)
#define USED(name, families) { name, families, KEY_ANY, NULL }
#define INERT(name) { name, 0, KEY_ANY, NULL }

static const struct model_key keys[] = {
    /* The model's shape and arithmetic. */
    USED("model_type", ALL), USED("vocab_size", ALL), USED("hidden_size", ALL),
    USED("intermediate_size", ALL), USED("num_hidden_layers", ALL),
    USED("num_attention_heads", ALL), USED("num_key_value_heads", ALL), USED("head_dim", ALL),
    USED("max_position_embeddings", ALL), USED("rms_norm_eps", ALL),
    USED("initializer_range", ALL), USED("tie_word_embeddings", ALL), USED("rope_theta", ALL),
    USED("rope_scaling", ALL), USED("rope_parameters", ALL), USED("dtype", ALL),
    USED("torch_dtype", ALL), USED("hidden_act", ALL), USED("layer_types", ALL),
    USED("architectures", ALL),
    { "attention_bias", LLAMA | QWEN2 | QWEN3, KEY_FALSE,
      "it would add biases to the attention's projections" },
    { "mlp_bias", LLAMA, KEY_FALSE, "it would add biases to the feed-forward projections" },
    { "sliding_window", MISTRAL | QWEN2 | QWEN3, KEY_EMPTY,
      "it would limit how far attention looks back" },
    { "use_sliding_window", QWEN2 | QWEN3, KEY_FALSE,
      "it would limit how far attention looks back" },
    { "max_window_layers", QWEN2 | QWEN3, KEY_ANY, NULL },

    /* Known to change the model: only the value that changes nothing is let pass. */
    { "quantization_config", 0, KEY_EMPTY,
      "the weights are quantised; give the unquantised model" },
    { "compression_config", 0, KEY_EMPTY, "the weights are quantised; give the unquantised model" },
    { "partial_rotary_factor", 0, KEY_ONE, "only a part of each head would be rotated" },
    { "rotary_pct", 0, KEY_ONE, "only a part of each head would be rotated" },
    { "rope_interleaved", 0, KEY_FALSE, "rotary pairs would be neighbours instead of halves" },
    { "no_rope_layers", 0, KEY_EMPTY, "some layers would have no positions" },
    { "no_rope_layer_interval", 0, KEY_EMPTY, "some layers would have no positions" },
    { "use_mrope", 0, KEY_FALSE, "positions would have several dimensions" },
    { "original_max_position_embeddings", 0, KEY_EMPTY,
      "it would change the rotary scaling; it belongs into rope_scaling or rope_parameters" },
    { "attention_dropout", 0, KEY_ZERO, "attention weights would be dropped while training" },
    { "hidden_dropout", 0, KEY_ZERO, "activations would be dropped while training" },
    { "hidden_dropout_prob", 0, KEY_ZERO, "activations would be dropped while training" },
    { "resid_pdrop", 0, KEY_ZERO, "activations would be dropped while training" },
    { "embd_pdrop", 0, KEY_ZERO, "embeddings would be dropped while training" },
    { "pretraining_tp", 0, KEY_ONE, "products would be split and rounded differently" },
    { "qk_norm", 0, KEY_FALSE, "queries and keys would be normalised" },
    { "use_qk_norm", 0, KEY_FALSE, "queries and keys would be normalised" },
    { "qkv_bias", 0, KEY_FALSE, "it would add biases to the attention's projections" },
    { "clip_qkv", 0, KEY_EMPTY, "queries, keys and values would be clipped" },
    { "attn_logit_softcapping", 0, KEY_EMPTY, "attention logits would be capped" },
    { "final_logit_softcapping", 0, KEY_EMPTY, "logits would be capped" },
    { "query_pre_attn_scalar", 0, KEY_EMPTY, "attention would be scaled differently" },
    { "attention_multiplier", 0, KEY_EMPTY, "attention would be scaled differently" },
    { "embedding_multiplier", 0, KEY_ONE, "embeddings would be scaled" },
    { "residual_multiplier", 0, KEY_ONE, "residual branches would be scaled" },
    { "logits_scaling", 0, KEY_ONE, "logits would be scaled" },
    { "logit_scale", 0, KEY_ONE, "logits would be scaled" },
    { "scale_attn_weights", 0, KEY_TRUE, "attention would not be scaled" },
    { "attention_chunk_size", 0, KEY_EMPTY, "attention would not cross chunks" },
    { "attn_temperature_tuning", 0, KEY_FALSE, "attention would be scaled by position" },
    { "num_experts", 0, KEY_EMPTY, "the feed-forward part would be a mixture of experts" },
    { "num_local_experts", 0, KEY_EMPTY, "the feed-forward part would be a mixture of experts" },
    { "num_experts_per_tok", 0, KEY_EMPTY, "the feed-forward part would be a mixture of experts" },
    { "num_nextn_predict_layers", 0, KEY_ZERO, "there would be further prediction layers" },
    { "is_encoder_decoder", 0, KEY_FALSE, "there would be an encoder" },
    { "add_cross_attention", 0, KEY_FALSE, "there would be cross-attention" },
    { "cross_attention_hidden_size", 0, KEY_EMPTY, "there would be cross-attention" },
    { "tie_encoder_decoder", 0, KEY_FALSE, "there would be an encoder" },
    { "tie_last_hidden_states", 0, KEY_EMPTY, "another hidden state would be returned" },
    { "chunk_size_feed_forward", 0, KEY_ZERO, "the feed-forward part would be computed in chunks" },
    { "pruned_heads", 0, KEY_EMPTY, "heads would be missing" },
    { "per_layer_config", 0, KEY_EMPTY, "layers would differ in shape" },
    { "auto_map", 0, KEY_EMPTY, "the model would run code of its own" },
    { "use_bfloat16", 0, KEY_FALSE, "activations would be rounded" },
    { "is_decoder", 0, KEY_ANY, NULL },

    /* Documentation, provenance, run-time choices without an effect on weights or losses. */
    INERT("transformers_version"), INERT("_name_or_path"), INERT("name_or_path"),
    INERT("_commit_hash"), INERT("model_name"), INERT("transformers.js_config"),
    INERT("unsloth_version"), INERT("unsloth_fixed"), INERT("unsloth_training_completed"),
    INERT("use_cache"), INERT("is_llama_config"), INERT("tokenizer_class"),
    INERT("attn_implementation"), INERT("_attn_implementation"),
    INERT("_attn_implementation_autoset"), INERT("_attn_implementation_internal"),
    INERT("_flash_attn_2_enabled"), INERT("experts_implementation"),
    INERT("_experts_implementation_internal"), INERT("gradient_checkpointing"),
    INERT("torchscript"), INERT("output_hidden_states"), INERT("output_attentions"),
    INERT("return_dict"), INERT("problem_type"), INERT("finetuning_task"),
    INERT("task_specific_params"), INERT("id2label"), INERT("label2id"), INERT("num_labels"),
    INERT("classifier_dropout"), INERT("classifier_dropout_prob"),
    INERT("tokenizer_model_max_length"), INERT("model_max_length"),

    /* Generation: read by generate(), not by training. */
    INERT("bos_token_id"), INERT("eos_token_id"), INERT("pad_token_id"), INERT("sep_token_id"),
    INERT("decoder_start_token_id"), INERT("unk_token_id"), INERT("prefix"), INERT("max_length"),
    INERT("max_new_tokens"), INERT("min_length"), INERT("do_sample"), INERT("early_stopping"),
    INERT("num_beams"), INERT("num_beam_groups"), INERT("diversity_penalty"),
    INERT("temperature"), INERT("top_k"), INERT("top_p"), INERT("min_p"), INERT("typical_p"),
    INERT("repetition_penalty"), INERT("length_penalty"), INERT("no_repeat_ngram_size"),
    INERT("encoder_no_repeat_ngram_size"), INERT("bad_words_ids"), INERT("num_return_sequences"),
    INERT("output_scores"), INERT("return_dict_in_generate"), INERT("forced_bos_token_id"),
    INERT("forced_eos_token_id"), INERT("remove_invalid_values"),
    INERT("exponential_decay_length_penalty"), INERT("suppress_tokens"),
    INERT("begin_suppress_tokens"), INERT("tf_legacy_loss"), INERT("cache_implementation"),
};

const struct model_key *model_key_find(const char *name)
{
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strcmp(keys[i].name, name) == 0) return &keys[i];
    return NULL;
}

static bool is_empty(const json_t *v)
{
    if (json_is_null(v)) return true;
    return (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0);
}

static bool is_neutral(const json_t *v, enum key_neutral neutral)
{
    switch (neutral) {
    case KEY_ANY: return true;
    case KEY_FALSE: return json_is_false(v) || json_is_null(v);
    case KEY_TRUE: return json_is_true(v) || json_is_null(v);
    case KEY_ZERO:
        return json_is_null(v) || (json_is_number(v) && fabs(json_number_value(v)) == 0.0);
    case KEY_ONE: return json_is_null(v) || (json_is_number(v) && json_number_value(v) == 1.0);
    case KEY_EMPTY: return is_empty(v);
    }
    return false;
}

stk_status model_keys_check(const char *where, json_t *doc, enum model_family family,
                            struct stk_error *err)
{
    const char *name;
    json_t *value;
    json_object_foreach(doc, name, value)
    {
        const struct model_key *k = model_key_find(name);
        if (!k)
            return stk_error_set(err, STK_ERR_FORMAT, 0,
                                 "%s: the key \"%.80s\" is not known; it may change what the model "
                                 "computes. Remove it if it does not",
                                 where, name);
        if (k->used_by & (1u << family) || is_neutral(value, k->neutral)) continue;
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
        stk_status status = stk_error_set(
            err, STK_ERR_UNSUPPORTED, 0, "%s: \"%s\": %.60s is not supported for %s: %s", where,
            name, text ? text : "?", model_family_name(family), k->changes);
        free(text);
        return status;
    }
    return STK_OK;
}
