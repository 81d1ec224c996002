/* tests/formats/test_fuzz.c - seeded mutations of headers, configurations, indices, manifests and
 * token files. Whatever the bytes, a reader answers with a status, leaks nothing, and what it
 * accepts can be read to the last byte (CKP-23). Meant to run under the address and
 * undefined-behaviour sanitizers. */
#include "tests/test.h"

#include "base/rng.h"
#include "formats/manifest.h"
#include "formats/model_config.h"
#include "formats/safetensors.h"
#include "formats/tokens.h"
#include "tests/formats/temp.h"

enum { ROUNDS = 2000, ROOM = 4096 };

/* Pieces that parsers stumble over. */
static const char *const pieces[] = {
    "-1",
    "0",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "1e308",
    "-0.0",
    "4294967296",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    ",",
    ":",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\\u0000",
    "\\ud800",
    "\xff\xfe",
    "[0,0]",
    "\"F99\"",
    "\"BF16\"",
    "data_offsets",
    "shape",
    "[[[[[[[[[[",
    "NaN",
    "Infinity",
    "1",
    "8",
    "..",
    "\"__metadata__\":{}",
    "\"rope_scaling\":{\"type\":\"llama3\"}",
    "\"layer_types\":[1]",
    "\"head_dim\":2",
    "  ",
};

/* One to four changes of a text of *n bytes in a buffer of ROOM. */
static void mutate(struct rng *r, char *text, size_t *n)
{
    for (uint64_t changes = 1 + rng_below(r, 4); changes > 0; changes--) {
        size_t at = *n ? (size_t)rng_below(r, *n) : 0, len;
        switch (rng_below(r, 7)) {
        case 0: /* a bit */
            if (*n) text[at] = (char)(text[at] ^ (1 << rng_below(r, 8)));
            break;
        case 1: /* a byte */
            if (*n) text[at] = (char)rng_below(r, 256);
            break;
        case 2: /* a digit */
            for (size_t i = 0; i < *n; i++) {
                size_t k = (at + i) % *n;
                if (text[k] < '0' || text[k] > '9') continue;
                text[k] = (char)('0' + rng_below(r, 10));
                break;
            }
            break;
        case 3: /* cut out */
            len = (size_t)rng_below(r, 20);
            if (len > *n - at) len = *n - at;
            memmove(text + at, text + at + len, *n - at - len);
            *n -= len;
            break;
        case 4: { /* put in */
            const char *piece = pieces[rng_below(r, sizeof pieces / sizeof *pieces)];
            len = strlen(piece);
            if (*n + len > ROOM) break;
            memmove(text + at + len, text + at, *n - at);
            memcpy(text + at, piece, len);
            *n += len;
            break;
        }
        case 5: { /* repeat a part elsewhere */
            char part[64];
            len = (size_t)rng_below(r, sizeof part);
            size_t from = *n ? (size_t)rng_below(r, *n) : 0;
            if (len > *n - from) len = *n - from;
            if (*n + len > ROOM) break;
            memcpy(part, text + from, len);
            memmove(text + at + len, text + at, *n - at);
            memcpy(text + at, part, len);
            *n += len;
            break;
        }
        default: /* cut off */
            if (rng_below(r, 4) == 0) *n = at;
        }
    }
}

static const char safetensors_text[] =
    "{\"__metadata__\":{\"format\":\"pt\"},\"model.a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_"
    "offsets\":[0,24]},"
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[5],\"data_offsets\":[24,34]},\"c\":{\"dtype\":\"U8\","
    "\"shape\":[],\"data_offsets\":[34,35]},"
    "\"d\":{\"dtype\":\"I64\",\"shape\":[0,7],\"data_offsets\":[35,35]}}";

/* Every byte of every tensor, and one more. */
static void read_all(struct st_file *f)
{
    for (uint32_t i = 0; i < st_count(f); i++) {
        const struct st_tensor *t = st_at(f, i);
        REQUIRE(t->size_bytes <= ROOM);
        char *buf = malloc(t->size_bytes + 1);
        CHECK(st_read(f, t, 0, t->size_bytes, buf, NULL) == STK_OK);
        CHECK(st_read(f, t, 0, t->size_bytes + 1, buf, NULL) == STK_ERR_STATE);
        CHECK(st_find(f, t->name) == t);
        free(buf);
    }
}

TEST(fuzz_safetensors_ckp_23_header)
{
    struct rng r;
    rng_seed_stream(&r, test_seed(), 1);
    const char *path = temp_path("fuzz.safetensors");
    uint64_t alive = sys_alloc_bytes(), accepted = 0;
    for (int i = 0; i < ROUNDS; i++) {
        char bytes[8 + ROOM + 64];
        size_t n = sizeof safetensors_text - 1;
        memcpy(bytes + 8, safetensors_text, n);
        if (i > 0) mutate(&r, bytes + 8, &n);
        uint64_t length = rng_below(&r, 20) || i == 0 ? n : rng_next(&r) >> rng_below(&r, 64);
        for (int b = 0; b < 8; b++) bytes[b] = (char)(length >> (8 * b));
        size_t data = rng_below(&r, 10) || i == 0 ? 35 : (size_t)rng_below(&r, 64);
        memset(bytes + 8 + n, 1, data);
        temp_write(path, bytes, 8 + n + data);
        struct st_file *f;
        struct stk_error err = { 0 };
        stk_status status = st_open(path, &f, &err);
        CHECK(status == STK_OK || (err.code == status && strlen(err.text) > 20));
        if (status == STK_OK) read_all(f);
        accepted += status == STK_OK;
        CHECK(i > 0 || status == STK_OK);
        st_close(f);
    }
    CHECK(accepted > 0 && accepted < ROUNDS && sys_alloc_bytes() == alive);
    printf("# %" PRIu64 " of %d accepted\n", accepted, ROUNDS);
}

static const char config_text[] =
    "{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\",\"vocab_size\":64,\"hidden_"
    "size\":32,\"intermediate_size\":48,\"num_hidden_layers\":3,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":16,\"rms_norm_eps\":1e-06,"
    "\"attention_dropout\":0.0,\"dtype\":\"bfloat16\","
    "\"use_sliding_window\":true,\"sliding_window\":8,\"max_window_layers\":1,\"layer_types\":["
    "\"full_attention\",\"sliding_attention\",\"sliding_attention\"],"
    "\"rope_parameters\":{\"rope_type\":\"llama3\",\"rope_theta\":1000000.0,\"factor\":8.0,\"low_"
    "freq_factor\":1.0,\"high_freq_factor\":4.0,"
    "\"original_max_position_embeddings\":512},\"rope_scaling\":{\"type\":\"llama3\"},\"tie_word_"
    "embeddings\":true}";

TEST(fuzz_model_config)
{
    struct rng r;
    rng_seed_stream(&r, test_seed(), 2);
    const char *path = temp_path("fuzz.json");
    uint64_t alive = sys_alloc_bytes(), accepted = 0;
    for (int i = 0; i < ROUNDS; i++) {
        char text[ROOM];
        size_t n = sizeof config_text - 1;
        memcpy(text, config_text, n);
        if (i > 0) mutate(&r, text, &n);
        temp_write(path, text, n);
        struct model_config c;
        struct stk_error err = { 0 };
        stk_status status = model_config_read(path, &c, &err);
        CHECK(status == STK_OK || (err.code == status && strlen(err.text) > 20));
        CHECK(i > 0 || status == STK_OK);
        if (status != STK_OK) continue;
        accepted++;
        CHECK(model_tensors(&c, NULL) > 0 && model_param_count(&c) > 0);
        float *freq = malloc(c.head_dim / 2 * sizeof *freq);
        model_inv_freq(&c, freq);
        free(freq);
        CHECK(model_config_write(&c, temp_path("fuzz.out.json"),
                                 rng_below(&r, 2) ? "float16" : NULL, NULL) == STK_OK);
        model_config_free(&c);
    }
    CHECK(accepted > 0 && accepted < ROUNDS && sys_alloc_bytes() == alive);
    printf("# %" PRIu64 " of %d accepted\n", accepted, ROUNDS);
}

TEST(fuzz_manifest)
{
    struct rng r;
    rng_seed_stream(&r, test_seed(), 3);
    struct stk_error err = { 0 };
    char *partial, dir[300], path[400];
    snprintf(dir, sizeof dir, "%s", temp_path("checkpoints"));
    CHECK_OK(manifest_begin(dir, 3, &partial, &err), &err);
    snprintf(path, sizeof path, "%s/state", partial);
    temp_text(path, "the state");
    json_t *doc = json_pack("{s:i, s:[i,i]}", "seed", 1, "steps", 2, 3);
    CHECK_OK(manifest_commit(dir, 3, partial, doc, &err), &err);
    json_decref(doc);
    sys_free(partial);
    char folder[320];
    snprintf(folder, sizeof folder, "%s/step-00000003", dir);
    snprintf(path, sizeof path, "%s/manifest.json", folder);
    size_t size;
    char *good = temp_read(path, &size);
    REQUIRE(size < ROOM / 2);
    uint64_t alive = sys_alloc_bytes(), accepted = 0;
    for (int i = 0; i < ROUNDS; i++) {
        char text[ROOM];
        size_t n = size;
        memcpy(text, good, n);
        if (i > 0) mutate(&r, text, &n);
        temp_write(path, text, n);
        stk_error_clear(&err);
        stk_status status = manifest_read(folder, true, &doc, &err);
        CHECK(status == STK_OK || (err.code == status && strlen(err.text) > 20));
        CHECK(i > 0 || status == STK_OK);
        /* What is accepted says what was saved: only white space, or the spelling of a number,
         * changed. */
        if (status == STK_OK)
            CHECK(json_integer_value(json_object_get(doc, "step")) == 3 &&
                  json_object_size(json_object_get(doc, "files")) == 1);
        accepted += status == STK_OK;
        json_decref(doc);
    }
    free(good);
    CHECK(accepted > 0 && accepted < ROUNDS / 4 && sys_alloc_bytes() == alive);
    printf("# %" PRIu64 " of %d accepted\n", accepted, ROUNDS);
}

TEST(fuzz_index)
{
    struct rng r;
    rng_seed_stream(&r, test_seed(), 4);
    char folder[300], path[400];
    snprintf(folder, sizeof folder, "%s", temp_path("shards"));
    STK_ASSERT(sys_mkdirs(folder) == 0);
    for (int i = 1; i <= 2; i++) {
        char header[200];
        snprintf(header, sizeof header,
                 "{\"t%d\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", i);
        snprintf(path, sizeof path, "%s/model-%d.safetensors", folder, i);
        temp_safetensors(path, header, 4);
    }
    static const char index[] = "{\"metadata\":{\"total_size\":8},\"weight_map\":{\"t1\":\"model-1."
                                "safetensors\",\"t2\":\"model-2.safetensors\"}}";
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    uint64_t alive = sys_alloc_bytes(), accepted = 0;
    for (int i = 0; i < ROUNDS; i++) {
        char text[ROOM];
        size_t n = sizeof index - 1;
        memcpy(text, index, n);
        if (i > 0) mutate(&r, text, &n);
        temp_write(path, text, n);
        struct st_set *s;
        struct stk_error err = { 0 };
        stk_status status = st_set_open(folder, &s, &err);
        CHECK(status == STK_OK || (err.code == status && strlen(err.text) > 20));
        if (status == STK_OK) CHECK(st_set_count(s) == 2);
        accepted += status == STK_OK;
        st_set_close(s);
    }
    CHECK(accepted > 0 && accepted < ROUNDS && sys_alloc_bytes() == alive);
}

static const char tokens_text[] =
    "{\"input_ids\":{\"dtype\":\"U16\",\"shape\":[40],\"data_offsets\":[0,80]},\"loss_mask\":{"
    "\"dtype\":\"U8\",\"shape\":[40],"
    "\"data_offsets\":[80,120]},\"document_offsets\":{\"dtype\":\"I64\",\"shape\":[3],\"data_"
    "offsets\":[120,144]}}";

TEST(fuzz_tokens)
{
    struct rng r;
    rng_seed_stream(&r, test_seed(), 5);
    const char *path = temp_path("fuzz.tokens");
    uint64_t alive = sys_alloc_bytes(), accepted = 0;
    for (int i = 0; i < ROUNDS; i++) {
        char bytes[8 + ROOM + 200] = { 0 };
        size_t n = sizeof tokens_text - 1;
        memcpy(bytes + 8, tokens_text, n);
        if (i > 0 && rng_below(&r, 2)) mutate(&r, bytes + 8, &n);
        for (int b = 0; b < 8; b++) bytes[b] = (char)((uint64_t)n >> (8 * b));
        char *data = bytes + 8 + n;
        memset(data, 0, 144);
        for (int k = 0; k < 120; k++) data[k] = (char)(k & 1);
        data[128] = 5, data[136] = 11; /* documents at 0, 5, 11 */
        if (i > 0) data[rng_below(&r, 144)] = (char)rng_below(&r, 256);
        temp_write(path, bytes, 8 + n + 144);
        struct tokens *t;
        struct stk_error err = { 0 };
        stk_status status = tokens_open(path, 300, &t, &err);
        CHECK(status == STK_OK || (err.code == status && strlen(err.text) > 20));
        if (status != STK_OK) continue;
        accepted++;
        int32_t v[4][8];
        for (uint64_t w = 0; w < tokens_windows(t, 8); w++) {
            CHECK_OK(tokens_window(t, 8, w, v[0], v[1], v[2], v[3], NULL, &err), &err);
            for (int k = 0; k < 8; k++)
                CHECK(v[0][k] >= 0 && v[0][k] < 300 && v[3][k] >= 0 && v[3][k] <= k);
        }
        tokens_close(t);
    }
    CHECK(accepted > 0 && accepted < ROUNDS && sys_alloc_bytes() == alive);
    printf("# %" PRIu64 " of %d accepted\n", accepted, ROUNDS);
}

TEST_MAIN()
