/* tests/formats/test_model_config.c - config.json in both spellings, the tensors of a model,
 * rotary frequencies (CKP-07, 25, 31, 32, 34, 35). */
#include "tests/test.h"

#include "formats/model_config.h"
#include "formats/model_config_keys.h"
#include "formats/safetensors.h"
#include "tests/formats/temp.h"

#include <jansson.h>
#include <math.h>

/* A small model of each family in the old spelling; `more` is put before the closing brace. */
#define SIZES                                                                                      \
    "\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":48,\"num_hidden_layers\":4,\"num_" \
    "attention_heads\":4,\"num_key_value_heads\":2"

static const char *config(const char *family, const char *more)
{
    char text[2000];
    snprintf(text, sizeof text, "{\"model_type\":\"%s\"," SIZES "%s%s}", family, *more ? "," : "",
             more);
    return temp_text(temp_path("config.json"), text);
}

static bool reads(const char *path, struct model_config *c)
{
    struct stk_error err = { 0 };
    if (model_config_read(path, c, &err) == STK_OK) return true;
    printf("# %s\n", err.text);
    return false;
}

static bool refused(const char *path, const char *part)
{
    struct model_config c;
    struct stk_error err = { 0 };
    stk_status status = model_config_read(path, &c, &err);
    bool good = status != STK_OK && c.document == NULL && c.window == NULL &&
                strstr(err.text, part) && strstr(err.text, path);
    if (!good) printf("# expected \"%s\", got %s: %s\n", part, stk_status_name(status), err.text);
    if (status == STK_OK) model_config_free(&c);
    return good;
}

static bool same_model(const struct model_config *a, const struct model_config *b)
{
    return a->family == b->family && a->vocab == b->vocab && a->hidden == b->hidden &&
           a->intermediate == b->intermediate && a->layers == b->layers && a->heads == b->heads &&
           a->kv_heads == b->kv_heads && a->head_dim == b->head_dim &&
           a->max_positions == b->max_positions && a->rms_eps == b->rms_eps &&
           a->initializer_range == b->initializer_range && a->tied == b->tied &&
           a->attention_bias == b->attention_bias && a->o_bias == b->o_bias &&
           a->mlp_bias == b->mlp_bias && a->qk_norm == b->qk_norm &&
           a->rope_theta == b->rope_theta && a->rope == b->rope &&
           a->rope_factor == b->rope_factor && a->rope_low_freq_factor == b->rope_low_freq_factor &&
           a->rope_high_freq_factor == b->rope_high_freq_factor &&
           a->rope_original_max_positions == b->rope_original_max_positions &&
           strcmp(a->dtype, b->dtype) == 0 &&
           memcmp(a->window, b->window, a->layers * sizeof *a->window) == 0;
}

static bool same(const char *one, const char *other)
{
    struct model_config a, b;
    if (!reads(one, &a)) return false;
    bool equal = false;
    if (reads(other, &b)) {
        equal = same_model(&a, &b);
        model_config_free(&b);
    }
    model_config_free(&a);
    return equal;
}

TEST(model_config_defaults_per_family)
{
    struct model_config c;
    REQUIRE(reads(config("llama", ""), &c));
    CHECK(c.head_dim == 8 && c.kv_heads == 2 && c.max_positions == 2048 && !c.tied &&
          !c.attention_bias && !c.o_bias && !c.mlp_bias && !c.qk_norm);
    CHECK(c.rms_eps == 1e-6 && c.initializer_range == 0.02 && c.rope_theta == 10000 &&
          c.rope == ROPE_DEFAULT && c.window[0] == 0);
    model_config_free(&c);
    REQUIRE(reads(config("mistral", ""), &c));
    CHECK(c.window[0] == 4096 && c.window[3] == 4096 && c.max_positions == 131072 &&
          !c.attention_bias);
    model_config_free(&c);
    REQUIRE(reads(config("mistral", "\"sliding_window\":null"), &c));
    CHECK(c.window[0] == 0);
    model_config_free(&c);
    REQUIRE(reads(config("qwen2", ""), &c));
    CHECK(c.attention_bias && !c.o_bias && c.window[3] == 0 && c.max_positions == 32768 &&
          c.head_dim == 8);
    model_config_free(&c);
    REQUIRE(reads(config("qwen3", ""), &c));
    CHECK(c.qk_norm && c.head_dim == 128 && !c.attention_bias && !c.o_bias);
    model_config_free(&c);
    REQUIRE(reads(config("qwen3", "\"attention_bias\":true"), &c));
    CHECK(c.attention_bias && c.o_bias);
    model_config_free(&c);
    REQUIRE(reads(config("llama", "\"attention_bias\":true,\"mlp_bias\":true,\"head_dim\":10,\"tie_"
                                  "word_embeddings\":true"),
                  &c));
    CHECK(c.attention_bias && c.o_bias && c.mlp_bias && c.head_dim == 10 && c.tied);
    model_config_free(&c);
}

TEST(model_config_windows)
{
    struct model_config c;
    REQUIRE(
        reads(config("qwen2",
                     "\"use_sliding_window\":true,\"sliding_window\":16,\"max_window_layers\":3"),
              &c));
    CHECK(c.window[2] == 0 && c.window[3] == 16);
    model_config_free(&c);
    REQUIRE(reads(config("qwen3", "\"use_sliding_window\":true,\"sliding_window\":16"), &c));
    CHECK(c.window[3] == 0); /* from layer 28 on */
    model_config_free(&c);
#define FULL "\"full_attention\""
#define SLIDES "\"sliding_attention\""
    REQUIRE(reads(
        config("qwen3", "\"use_sliding_window\":true,\"sliding_window\":16,\"layer_types\":[" SLIDES
                        "," FULL "," SLIDES "," FULL "]"),
        &c));
    CHECK(c.window[0] == 16 && c.window[1] == 0 && c.window[2] == 16 && c.window[3] == 0);
    model_config_free(&c);
    CHECK(refused(config("qwen3", "\"sliding_window\":16,\"layer_types\":[" SLIDES "," FULL "," FULL
                                  "," FULL "]"),
                  "no sliding window in use"));
    CHECK(refused(config("qwen2", "\"layer_types\":[" FULL "]"), "it has 1"));
    CHECK(refused(
        config("qwen2", "\"layer_types\":[" FULL "," FULL ",\"linear_attention\"," FULL "]"),
        "layer_types[2] is \"linear_attention\""));
    CHECK(refused(config("llama", "\"layer_types\":[" SLIDES "," FULL "," FULL "," FULL "]"),
                  "no sliding window in use"));
    CHECK(refused(config("mistral", "\"sliding_window\":8,\"layer_types\":[" FULL "," FULL "," FULL
                                    "," FULL "]"),
                  "mistral slides in every layer"));
    CHECK(refused(config("llama", "\"sliding_window\":8"),
                  "\"sliding_window\": 8 is not supported for llama"));
    CHECK(refused(config("qwen2", "\"max_window_layers\":-1"), "max_window_layers"));
}

TEST(model_config_ckp_34_both_spellings)
{
    const char *scaling = "\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
                          "\"original_max_position_embeddings\":512}";
    char old[600], new[600], type[600];
    snprintf(old, sizeof old,
             "\"torch_dtype\":\"bfloat16\",\"rope_theta\":500000.0,\"rope_scaling\":{\"rope_type\":"
             "\"llama3\",%s",
             scaling);
    snprintf(type, sizeof type,
             "\"torch_dtype\":\"bfloat16\",\"rope_theta\":500000,\"rope_scaling\":{\"type\":"
             "\"llama3\",%s",
             scaling);
    snprintf(new, sizeof new,
             "\"dtype\":\"bfloat16\",\"rope_parameters\":{\"rope_theta\":500000.0,\"rope_type\":"
             "\"llama3\",%s",
             scaling);
    char a[400], b[400], text[1200];
    snprintf(a, sizeof a, "%s", temp_path("a.json"));
    snprintf(b, sizeof b, "%s", temp_path("b.json"));
    CHECK(rename(config("llama", old), a) == 0);
    CHECK(rename(config("llama", new), b) == 0);
    CHECK(same(a, b) && same(a, config("llama", type)));
    snprintf(text, sizeof text, "%s,%s", old, new);
    CHECK(same(a, config("llama", text))); /* both at once, in agreement */
    struct model_config c;
    REQUIRE(reads(a, &c));
    CHECK(!c.new_spelling && c.rope == ROPE_LLAMA3 && c.rope_factor == 8 &&
          c.rope_original_max_positions == 512 && c.rope_theta == 500000);
    model_config_free(&c);
    REQUIRE(reads(b, &c));
    CHECK(c.new_spelling);
    model_config_free(&c);
    REQUIRE(reads(config("llama", "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.5}"), &c));
    CHECK(c.rope == ROPE_LINEAR && c.rope_factor == 2.5);
    model_config_free(&c);
}

TEST(model_config_ckp_34_contradictions)
{
#define NEW(x) "\"rope_parameters\":{" x "}"
    CHECK(refused(config("llama", "\"rope_theta\":10000.0," NEW("\"rope_theta\":500000.0")),
                  "contradict each other in rope_theta"));
    CHECK(refused(
        config("llama", "\"rope_scaling\":null," NEW("\"rope_type\":\"linear\",\"factor\":2")),
        "contradict each other in rope_type"));
    CHECK(refused(config("llama", "\"rope_scaling\":{\"type\":\"linear\",\"factor\":4}," NEW(
                                      "\"rope_type\":\"linear\",\"factor\":2")),
                  "contradict each other in factor"));
    CHECK(refused(
        config("llama",
               "\"rope_scaling\":{\"type\":\"linear\",\"rope_type\":\"llama3\",\"factor\":4}"),
        "\"type\" and \"rope_type\""));
    CHECK(refused(config("llama", "\"dtype\":\"float16\",\"torch_dtype\":\"bfloat16\""),
                  "contradict each other"));
    CHECK(refused(config("llama", "\"dtype\":\"float8_e4m3\""), "float8_e4m3"));
    CHECK(refused(config("llama", "\"torch_dtype\":3"), "is not supported"));
}

TEST(model_config_ckp_34_unknown_or_active_keys)
{
    CHECK(refused(config("llama", "\"layer_scale\":0.1"), "the key \"layer_scale\" is not known"));
    CHECK(refused(config("llama", "\"Hidden_size\":32"), "the key \"Hidden_size\" is not known"));
    CHECK(refused(config("llama", "\"quantization_config\":{\"quant_method\":\"gptq\"}"),
                  "quantization_config"));
    CHECK(refused(config("llama", "\"attention_dropout\":0.1"), "attention_dropout"));
    CHECK(refused(config("llama", "\"partial_rotary_factor\":0.5"), "partial_rotary_factor"));
    CHECK(refused(
        config("llama",
               "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2,\"partial_rotary_factor\":0.5}"),
        "partial_rotary_factor"));
    CHECK(refused(config("llama", "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2}"),
                  "\"yarn\" is not supported"));
    CHECK(refused(config("llama", "\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}"),
                  "\"dynamic\" is not supported"));
    CHECK(refused(config("llama", "\"rope_scaling\":{\"factor\":2}"), "has no \"rope_type\""));
    CHECK(refused(config("llama", "\"rope_scaling\":{\"type\":\"linear\"}"), "no \"factor\""));
    CHECK(refused(config("llama", "\"rope_scaling\":{\"type\":\"llama3\",\"factor\":2}"),
                  "needs low_freq_factor"));
    CHECK(refused(config("llama", "\"rope_scaling\":[1]"), "must be an object"));
    CHECK(
        refused(config("qwen3", NEW("\"full_attention\":{\"rope_theta\":1.0}")), "full_attention"));
    CHECK(refused(config("llama", "\"hidden_act\":\"gelu\""), "hidden_act \"gelu\""));
    CHECK(refused(config("llama", "\"pretraining_tp\":2"), "pretraining_tp"));
    CHECK(refused(config("llama", "\"architectures\":[\"LlamaForSequenceClassification\"]"),
                  "LlamaForSequenceClassification"));
    CHECK(refused(config("mistral", "\"mlp_bias\":true"), "mlp_bias"));
    CHECK(refused(config("mistral", "\"attention_bias\":true"), "attention_bias"));
    CHECK(refused(config("qwen2", "\"attention_bias\":false"), "always has biases"));
    CHECK(refused(config("llama", "\"auto_map\":{\"AutoModel\":\"x.y\"}"), "auto_map"));
    struct model_config c;
    REQUIRE(reads(config("llama", "\"attention_dropout\":0.0,\"pretraining_tp\":1,\"hidden_act\":"
                                  "\"silu\",\"quantization_config\":null,\"use_cache\":false,"
                                  "\"transformers_version\":\"4.40.0\",\"eos_token_id\":[1,2],"
                                  "\"architectures\":[\"LlamaForCausalLM\"],\"rope_scaling\":null"),
                  &c));
    model_config_free(&c);
}

TEST(model_config_ckp_35_unknown_family)
{
    CHECK(refused(
        config("gemma", ""),
        "model_type \"gemma\" is not supported; supported are llama, mistral, qwen2, qwen3"));
    CHECK(refused(config("qwen3_moe", ""), "qwen3_moe"));
    CHECK(refused(temp_text(temp_path("c.json"), "{" SIZES "}"), "\"model_type\" is missing"));
    CHECK(refused(temp_text(temp_path("c.json"), "{\"model_type\":7," SIZES "}"),
                  "\"model_type\" is missing"));
}

TEST(model_config_bad_values)
{
    static const struct {
        const char *text, *part;
    } bad[] = {
        { "", "is empty" },
        { "[]", "no object" },
        { "{\"model_type\":\"llama\"", "not valid JSON" },
        { "<html>", "HTML page" },
        { "version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer" },
        { "{\"model_type\":\"llama\",\"vocab_size\":64}", "\"hidden_size\" is missing" },
        { "{\"model_type\":\"llama\",\"model_type\":\"qwen2\"," SIZES "}", "duplicate" },
        { "{\"model_type\":\"llama\",\"rms_norm_eps\":NaN," SIZES "}", "not valid JSON" },
        { "{\"model_type\":\"llama\",\"rms_norm_eps\":1e999," SIZES "}", "not valid JSON" },
        { "{\"model_type\":\"llama\",\"rms_norm_eps\":-1e-6," SIZES "}", "rms_norm_eps" },
        { "{\"model_type\":\"llama\",\"rms_norm_eps\":\"x\"," SIZES "}", "rms_norm_eps" },
        { "{\"model_type\":\"llama\",\"max_position_embeddings\":0," SIZES "}",
          "max_position_embeddings" },
        { "{\"model_type\":\"llama\",\"max_position_embeddings\":2048.5," SIZES "}",
          "max_position_embeddings" },
        { "{\"model_type\":\"llama\",\"tie_word_embeddings\":1," SIZES "}", "tie_word_embeddings" },
        { "{\"model_type\":\"llama\",\"head_dim\":7," SIZES "}", "head_dim 7 is odd" },
        { "{\"model_type\":\"llama\",\"rope_theta\":0," SIZES "}", "rope_theta" },
        { "{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":4,"
          "\"num_hidden_layers\":1,\"num_attention_heads\":3}",
          "not a multiple of num_attention_heads" },
        { "{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":4,"
          "\"num_hidden_layers\":1,\"num_attention_heads\":4,"
          "\"num_key_value_heads\":3}",
          "not a multiple of num_key_value_heads" },
        { "{\"model_type\":\"llama\",\"vocab_size\":99999999999,\"hidden_size\":32}",
          "vocab_size" },
        { "{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":4,"
          "\"num_hidden_layers\":100000}",
          "num_hidden_layers" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(refused(temp_text(temp_path("c.json"), bad[i].text), bad[i].part));
    char deep[300] = "";
    for (int i = 0; i < 100; i++) deep[i] = '[';
    CHECK(refused(temp_text(temp_path("c.json"), deep), "nested deeper"));
    CHECK(refused(temp_path("absent.json"), "cannot open"));
    CHECK(refused(temp_dir, "not a regular file"));
}

TEST(model_config_write_keeps_the_spelling)
{
    struct model_config c;
    struct stk_error err = { 0 };
    static const char *const more[] = {
        "\"torch_dtype\":\"bfloat16\",\"rope_theta\":10000.0,\"rms_norm_eps\":1e-05",
        "\"dtype\":\"bfloat16\",\"rms_norm_eps\":1e-05", "\"rms_norm_eps\":1.0000000000000002e-05"
    };
    for (int i = 0; i < 3; i++) {
        char source[400];
        snprintf(source, sizeof source, "%s", config("llama", more[i]));
        REQUIRE(reads(source, &c));
        const char *out = temp_path("out.json");
        CHECK_OK(model_config_write(&c, out, NULL, &err), &err);
        json_t *a = json_load_file(source, 0, NULL), *b = json_load_file(out, 0, NULL);
        CHECK(a && b && json_equal(a, b));
        json_decref(a);
        json_decref(b);
        size_t n;
        char *text = temp_read(out, &n);
        CHECK((strstr(text, "1e-5") != NULL) == (i < 2));
        CHECK(strstr(text, "model_type") < strstr(text, "vocab_size")); /* order kept */
        free(text);
        CHECK_OK(model_config_write(&c, out, "float32", &err), &err);
        text = temp_read(out, &n);
        CHECK((strstr(text, "\"torch_dtype\": \"float32\"") != NULL) == (i != 1));
        CHECK(strstr(text, "\"dtype\": \"float32\"") != NULL || i != 1);
        CHECK(strstr(text, "bfloat16") == NULL);
        free(text);
        CHECK(model_config_write(&c, out, "int8", NULL) == STK_ERR_CONFIG);
        model_config_free(&c);
    }
}

/* --- frequencies: values from transformers 5.24 with torch 2.15 (scalar code path), fp32 ------ */

static const struct frequency {
    uint32_t at;
    float value;
} llama3[] = {
    { 0, 0x1.0p+0f },        { 1, 0x1.a11582p-1f },   { 17, 0x1.f5ea7ep-6f },
    { 28, 0x1.a4ee4p-9f },   { 29, 0x1.15a9fp-9f },   { 30, 0x1.524f36p-10f },
    { 31, 0x1.8fca8ep-11f }, { 32, 0x1.c26c4p-12f },  { 33, 0x1.d32b32p-13f },
    { 34, 0x1.9731eep-14f }, { 35, 0x1.90d10cp-16f }, { 36, 0x1.46831ap-16f },
    { 63, 0x1.4985fep-24f },
};
static const struct frequency linear[] = { { 0, 0x1.555556p-2f },
                                           { 1, 0x1.ffed82p-3f },
                                           { 5, 0x1.43c584p-4f },
                                           { 17, 0x1.47a24p-9f },
                                           { 31, 0x1.74e13p-15f } };
static const struct frequency plain[] = { { 0, 0x1.0p+0f },
                                          { 1, 0x1.9c975ap-1f },
                                          { 2, 0x1.4c7bcp-1f },
                                          { 37, 0x1.6453f4p-12f },
                                          { 63, 0x1.4d1c98p-20f } };

static void check_frequencies(const struct model_config *c, const struct frequency *want, size_t n)
{
    float got[256];
    model_inv_freq(c, got);
    for (size_t i = 0; i < n; i++) {
        if (got[want[i].at] != want[i].value)
            printf("# %u: %a, expected %a\n", want[i].at, (double)got[want[i].at],
                   (double)want[i].value);
        CHECK(got[want[i].at] == want[i].value);
    }
}

TEST(model_inv_freq_ckp_34_equals_transformers)
{
    struct model_config c = { .head_dim = 128,
                              .rope = ROPE_LLAMA3,
                              .rope_theta = 500000,
                              .rope_factor = 32,
                              .rope_low_freq_factor = 1,
                              .rope_high_freq_factor = 4,
                              .rope_original_max_positions = 8192 };
    check_frequencies(&c, llama3, sizeof llama3 / sizeof *llama3);
    c = (struct model_config){
        .head_dim = 64, .rope = ROPE_LINEAR, .rope_theta = 10000, .rope_factor = 3
    };
    check_frequencies(&c, linear, sizeof linear / sizeof *linear);
    c = (struct model_config){
        .head_dim = 128, .rope = ROPE_DEFAULT, .rope_theta = 1e6, .rope_factor = 1
    };
    check_frequencies(&c, plain, sizeof plain / sizeof *plain);
}

/* --- tensors ---------------------------------------------------------------------------------- */

TEST(model_tensors_of_each_family)
{
    static const struct {
        const char *family, *more;
        uint32_t n;
        uint64_t params;
    } want[] = {
        { "llama", "", 3 + 4 * 9,
          2 * 64 * 32 + 32 + 4 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 64) },
        { "llama", "\"tie_word_embeddings\":true", 2 + 4 * 9,
          64 * 32 + 32 + 4 * (32 * 96 + 3 * 32 * 48 + 64) },
        { "llama", "\"attention_bias\":true,\"mlp_bias\":true", 3 + 4 * 16,
          2 * 64 * 32 + 32 + 4 * (32 * 96 + 96 + 3 * 32 * 48 + 48 + 48 + 32 + 64) },
        { "qwen2", "", 3 + 4 * 12, 2 * 64 * 32 + 32 + 4 * (32 * 96 + 64 + 3 * 32 * 48 + 64) },
        { "qwen3", "\"head_dim\":16", 3 + 4 * 11,
          2 * 64 * 32 + 32 + 4 * (32 * (64 + 32 + 32 + 64) + 32 + 3 * 32 * 48 + 64) },
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        struct model_config c;
        REQUIRE(reads(config(want[i].family, want[i].more), &c));
        uint32_t n = model_tensors(&c, NULL);
        CHECK(n == want[i].n);
        struct model_tensor *t = calloc(n, sizeof *t);
        CHECK(model_tensors(&c, t) == n);
        uint64_t sum = 0;
        for (uint32_t k = 0; k < n; k++) {
            sum += t[k].shape[0] * (t[k].rank == 2 ? t[k].shape[1] : 1);
            CHECK(k == 0 || t[k].layer > t[k - 1].layer || t[k].role > t[k - 1].role);
        }
        CHECK(sum == want[i].params && model_param_count(&c) == sum);
        CHECK(strcmp(t[0].name, "model.embed_tokens.weight") == 0 &&
              strcmp(t[1].name, "model.layers.0.input_layernorm.weight") == 0);
        free(t);
        model_config_free(&c);
    }
}

enum spoil {
    NONE,
    NO_EMBED,
    HEAD_TOO,
    HEAD_DIFFERS,
    HEAD_OTHER_DTYPE,
    EXTRA,
    BUFFER,
    SHAPE,
    RANK,
    DTYPE,
    MISSING
};

static stk_status write_folder(const struct model_config *c, const char *folder, enum spoil spoil,
                               struct stk_error *err)
{
    struct model_tensor t[80];
    uint32_t n = model_tensors(c, t), at[90], k = 0;
    STK_ASSERT(n <= 80 && sys_mkdirs(folder) == 0);
    char path[500];
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    struct st_writer *w;
    STK_TRY(st_writer_new(path, NULL, &w, err));
    for (uint32_t i = 0; i < n; i++) {
        enum st_dtype dtype = spoil == DTYPE && i == 5 ? ST_I16
                              : i % 3 == 0             ? ST_F32
                              : i % 3 == 1             ? ST_F16
                                                       : ST_BF16;
        if (spoil == MISSING && i == 7) continue;
        if (spoil == SHAPE && i == 4) t[i].shape[1] = 31;
        if (spoil == RANK && i == 1) t[i].rank = 2, t[i].shape[1] = 1;
        if (spoil == NO_EMBED && i == 0) snprintf(t[i].name, sizeof t[i].name, "lm_head.weight");
        STK_TRY(st_writer_declare(w, t[i].name, dtype, t[i].rank, t[i].shape, &at[k], err));
        k++;
    }
    uint64_t head[2] = { c->vocab, c->hidden };
    if (spoil >= HEAD_TOO && spoil <= HEAD_OTHER_DTYPE)
        STK_TRY(st_writer_declare(w, "lm_head.weight", spoil == HEAD_OTHER_DTYPE ? ST_BF16 : ST_F32,
                                  2, head, &at[k++], err));
    if (spoil == EXTRA)
        STK_TRY(st_writer_declare(w, "model.layers.4.input_layernorm.weight", ST_F32, 1, head + 1,
                                  &at[k++], err));
    if (spoil == BUFFER)
        STK_TRY(st_writer_declare(w, "model.layers.0.self_attn.rotary_emb.inv_freq", ST_F32, 1,
                                  head + 1, &at[k++], err));
    STK_TRY(st_writer_begin(w, err));
    static unsigned char bytes[64 * 1024];
    for (uint32_t i = 0; i < k; i++) {
        /* Zeros until the tensor is full and refuses. */
        for (uint64_t done = 0; st_writer_write(w, at[i], done, bytes, 2, NULL) == STK_OK;
             done += 2)
            continue;
    }
    if (spoil == HEAD_DIFFERS)
        STK_TRY(st_writer_write(w, at[k - 1], 64 * 32 * 4 - 1, "\1", 1, err));
    return st_writer_finish(w, err);
}

static stk_status check_folder(const char *more, enum spoil spoil, bool *head_only,
                               struct stk_error *err)
{
    struct model_config c;
    char folder[400];
    snprintf(folder, sizeof folder, "%s", temp_path("model"));
    (void)sys_remove_tree(folder);
    STK_ASSERT(reads(config("qwen2", more), &c));
    stk_status status = write_folder(&c, folder, spoil, err);
    struct st_set *s = NULL;
    if (status == STK_OK) status = st_set_open(folder, &s, err);
    if (status == STK_OK) status = model_check_tensors(&c, s, head_only, err);
    st_set_close(s);
    model_config_free(&c);
    return status;
}

static bool folder_refused(const char *more, enum spoil spoil, const char *part)
{
    bool head_only;
    struct stk_error err = { 0 };
    stk_status status = check_folder(more, spoil, &head_only, &err);
    bool good =
        status == STK_ERR_FORMAT && strstr(err.text, part) && strstr(err.text, "model.safetensors");
    if (!good) printf("# expected \"%s\", got %s: %s\n", part, stk_status_name(status), err.text);
    return good;
}

TEST(model_check_tensors_ckp_07_contradicting_folder)
{
    bool head_only;
    struct stk_error err = { 0 };
    CHECK_OK(check_folder("", NONE, &head_only, &err), &err);
    CHECK(!head_only);
    CHECK_OK(check_folder("", BUFFER, &head_only, &err), &err);
    CHECK(folder_refused("", MISSING,
                         "model.layers.0.self_attn.k_proj.bias is missing (1 of 51 are)"));
    CHECK(folder_refused(
        "", EXTRA, "model.layers.4.input_layernorm.weight is not part of a qwen2 of 4 layers"));
    CHECK(folder_refused("", SHAPE,
                         "v_proj.weight has shape [16, 31], the configuration expects [16, 32]"));
    CHECK(folder_refused("", RANK, "has shape [32, 1], the configuration expects [32]"));
    CHECK(folder_refused("", DTYPE, "has dtype I16; BF16, F16 or F32 was expected"));
}

TEST(model_check_tensors_ckp_31_head_only)
{
    bool head_only;
    struct stk_error err = { 0 };
    CHECK_OK(check_folder("\"tie_word_embeddings\":true", NO_EMBED, &head_only, &err), &err);
    CHECK(head_only);
    CHECK_OK(check_folder("\"tie_word_embeddings\":true", NONE, &head_only, &err), &err);
    CHECK(!head_only);
    CHECK(folder_refused("\"tie_word_embeddings\":true", MISSING, "is missing"));
}

TEST(model_check_tensors_ckp_32_second_copy)
{
    bool head_only;
    struct stk_error err = { 0 };
    CHECK_OK(check_folder("\"tie_word_embeddings\":true", HEAD_TOO, &head_only, &err), &err);
    CHECK(!head_only);
    CHECK(folder_refused("\"tie_word_embeddings\":true", HEAD_DIFFERS,
                         "model.embed_tokens.weight and lm_head.weight differ"));
    CHECK(folder_refused("\"tie_word_embeddings\":true", HEAD_OTHER_DTYPE, "is BF16"));
}

/* --- the golden models: both spellings, their tensors ----------------------------------------- */

TEST(model_config_ckp_34_golden_models)
{
    static const char *const cases[] = { "llama_docs_mask_old",  "llama_docs_midwindow_new",
                                         "llama_gqa_old",        "llama_head_dim_new",
                                         "llama_rope3_tied_new", "mistral_window_docs_mask_new",
                                         "mistral_window_new",   "mistral_window_old",
                                         "qwen2_tied_old",       "qwen2_window_layers_new",
                                         "qwen3_tied_old",       "qwen3_untied_sharded_new" };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char folder[400], a[500], b[500];
        snprintf(folder, sizeof folder, "%s/tests/golden/%s", SOURCE_ROOT, cases[i]);
        snprintf(a, sizeof a, "%s/config.json", folder);
        snprintf(b, sizeof b, "%s/config.other.json", folder);
        CHECK(same(a, b));
        struct model_config c;
        struct stk_error err = { 0 };
        REQUIRE(reads(a, &c));
        CHECK(c.new_spelling == (strstr(cases[i], "_new") != NULL));
        CHECK(strcmp(c.dtype, "bfloat16") == 0);
        struct st_set *s;
        bool head_only;
        CHECK_OK(st_set_open(folder, &s, &err), &err);
        CHECK_OK(model_check_tensors(&c, s, &head_only, &err), &err);
        st_set_close(s);
        model_config_free(&c);
    }
}

TEST_MAIN()
