/* tests/formats/test_tokens.c - token files, windows, targets, documents, and the order of
 * windows. Against a plain model of the rules. */
#include "tests/test.h"

#include "base/rng.h"
#include "formats/safetensors.h"
#include "formats/tokens.h"
#include "tests/formats/temp.h"

#include <errno.h>

enum { MAX = 4000 };

struct sample {
    enum st_dtype dtype;
    uint64_t n, documents;
    int64_t ids[MAX];
    uint8_t mask[MAX];
    int64_t offsets[MAX];
    bool has_mask;
};

static void add_raw(unsigned char *out, uint64_t i, uint32_t width, int64_t v)
{
    for (uint32_t b = 0; b < width; b++)
        out[i * width + b] = (unsigned char)((uint64_t)v >> (8 * b));
}

static stk_status write_sample(const char *path, const struct sample *s, struct stk_error *err)
{
    static unsigned char ids[MAX * 8], offsets[MAX * 8];
    struct st_writer *w;
    uint32_t a, b, c;
    for (uint64_t i = 0; i < s->n; i++) add_raw(ids, i, st_dtype_bytes(s->dtype), s->ids[i]);
    for (uint64_t i = 0; i < s->documents; i++) add_raw(offsets, i, 8, s->offsets[i]);
    STK_TRY(st_writer_new(path, NULL, &w, err));
    STK_TRY(st_writer_declare(w, "input_ids", s->dtype, 1, &s->n, &a, err));
    if (s->has_mask) STK_TRY(st_writer_declare(w, "loss_mask", ST_U8, 1, &s->n, &b, err));
    if (s->documents)
        STK_TRY(st_writer_declare(w, "document_offsets", ST_I64, 1, &s->documents, &c, err));
    STK_TRY(st_writer_begin(w, err));
    STK_TRY(st_writer_write(w, a, 0, ids, s->n * st_dtype_bytes(s->dtype), err));
    if (s->has_mask) STK_TRY(st_writer_write(w, b, 0, s->mask, s->n, err));
    if (s->documents) STK_TRY(st_writer_write(w, c, 0, offsets, s->documents * 8, err));
    return st_writer_finish(w, err);
}

static void check_windows(struct tokens *t, const struct sample *s, uint64_t seq)
{
    static int32_t ids[MAX], targets[MAX], position[MAX], first[MAX];
    static bool begins[MAX];
    memset(begins, 0, sizeof begins);
    for (uint64_t i = 0; i < s->documents; i++) begins[s->offsets[i]] = true;
    CHECK(tokens_windows(t, seq) == s->n / seq);
    for (uint64_t w = 0; w < s->n / seq; w++) {
        struct stk_error err = { 0 };
        uint64_t n, expected = 0, start = w * seq;
        CHECK_OK(tokens_window(t, seq, w, ids, targets, position, first, &n, &err), &err);
        int32_t key = 0;
        for (uint64_t k = 0; k < seq; k++) {
            uint64_t i = start + k;
            if (begins[i]) key = (int32_t)k;
            bool target = k + 1 < seq && !begins[i + 1] && (!s->has_mask || s->mask[i + 1]);
            expected += target;
            CHECK(ids[k] == s->ids[i] && first[k] == key && position[k] == (int32_t)k - key);
            CHECK(targets[k] == (target ? s->ids[i + 1] : -1));
        }
        CHECK(n == expected);
    }
}

static struct sample sample; /* too large for a stack */

static void fill(struct rng *r, enum st_dtype dtype, uint64_t n, uint64_t document_mean, bool mask)
{
    memset(&sample, 0, sizeof sample);
    sample.dtype = dtype;
    sample.n = n;
    sample.has_mask = mask;
    for (uint64_t i = 0; i < n; i++) {
        sample.ids[i] = (int64_t)rng_below(r, 100);
        sample.mask[i] = rng_below(r, 4) != 0;
        if (document_mean && (i == 0 || rng_below(r, document_mean) == 0))
            sample.offsets[sample.documents++] = (int64_t)i;
    }
}

TEST(tokens_windows_of_every_integer_type)
{
    static const enum st_dtype types[] = { ST_U8,  ST_I8,  ST_U16, ST_I16,
                                           ST_U32, ST_I32, ST_U64, ST_I64 };
    struct rng r;
    rng_seed(&r, test_seed());
    uint64_t hash = 0;
    for (size_t i = 0; i < 8; i++) {
        struct stk_error err = { 0 };
        struct tokens *t;
        rng_seed(&r, test_seed()); /* the same ids in each type */
        fill(&r, types[i], 1003, 20, true);
        const char *path = temp_path("tokens.safetensors");
        CHECK_OK(write_sample(path, &sample, &err), &err);
        CHECK_OK(tokens_open(path, 100, &t, &err), &err);
        CHECK(tokens_count(t) == 1003 && tokens_documents(t) == sample.documents);
        CHECK(hash == 0 || tokens_hash(t) == hash);
        hash = tokens_hash(t);
        check_windows(t, &sample, 16);
        check_windows(t, &sample, 2);
        check_windows(t, &sample, 1003);
        tokens_close(t);
    }
}

TEST(tokens_masks_and_documents_of_all_densities)
{
    struct rng r;
    rng_seed(&r, test_seed());
    for (int mask = 0; mask < 2; mask++)
        for (uint64_t mean = 0; mean <= 1000; mean = mean ? mean * 10 : 1) {
            struct stk_error err = { 0 };
            struct tokens *t;
            fill(&r, ST_U16, MAX, mean, mask);
            const char *path = temp_path("tokens.safetensors");
            CHECK_OK(write_sample(path, &sample, &err), &err);
            CHECK_OK(tokens_open(path, 0, &t, &err), &err);
            check_windows(t, &sample, 37);
            check_windows(t, &sample, 512);
            tokens_close(t);
        }
}

/* Enough documents that only every second offset is kept in memory. */
TEST(tokens_many_documents)
{
    enum { N = 150000 };
    struct stk_error err = { 0 };
    struct st_writer *w;
    uint32_t a, b;
    uint64_t n = N, documents = N / 2;
    uint8_t *ids = calloc(N, 1);
    uint64_t *offsets = calloc(N / 2, 8);
    for (uint64_t i = 0; i < N; i++) ids[i] = (uint8_t)(i % 251);
    /* 0 1 4 6 7 10 ... */
    for (uint64_t i = 0; i < documents; i++) offsets[i] = 2 * i - (i % 3 == 1);
    const char *path = temp_path("many.safetensors");
    CHECK_OK(st_writer_new(path, NULL, &w, &err), &err);
    CHECK_OK(st_writer_declare(w, "input_ids", ST_U8, 1, &n, &a, &err), &err);
    CHECK_OK(st_writer_declare(w, "document_offsets", ST_I64, 1, &documents, &b, &err), &err);
    CHECK_OK(st_writer_begin(w, &err), &err);
    CHECK_OK(st_writer_write(w, a, 0, ids, N, &err), &err);
    CHECK_OK(st_writer_write(w, b, 0, offsets, documents * 8, &err), &err);
    CHECK_OK(st_writer_finish(w, &err), &err);
    struct tokens *t;
    CHECK_OK(tokens_open(path, 0, &t, &err), &err);
    bool *begins = calloc(N, 1);
    for (uint64_t i = 0; i < documents; i++) begins[offsets[i]] = true;
    int32_t v[4][100];
    for (uint64_t at = 0; at < N / 100; at++) {
        CHECK_OK(tokens_window(t, 100, at, v[0], v[1], v[2], v[3], NULL, &err), &err);
        int32_t key = 0;
        for (int32_t k = 0; k < 100; k++) {
            if (begins[at * 100 + (uint64_t)k]) key = k;
            CHECK(v[3][k] == key && v[0][k] == (int32_t)((at * 100 + (uint64_t)k) % 251));
        }
    }
    tokens_close(t);
    free(ids);
    free(offsets);
    free(begins);
}

TEST(tokens_plain_bin)
{
    struct stk_error err = { 0 };
    struct tokens *t;
    static const unsigned char bytes[] = { 1, 0, 0, 1, 255, 255, 7, 0, 9, 0 };
    const char *path = temp_write(temp_path("a.bin"), bytes, sizeof bytes);
    CHECK_OK(tokens_open(path, 65536, &t, &err), &err);
    int32_t ids[2], targets[2], position[2], first[2];
    uint64_t n;
    CHECK(tokens_count(t) == 5 && tokens_windows(t, 2) == 2);
    CHECK_OK(tokens_window(t, 2, 1, ids, targets, position, first, &n, &err), &err);
    CHECK(ids[0] == 65535 && ids[1] == 7 && targets[0] == 7 && targets[1] == -1 &&
          position[1] == 1 && first[1] == 0 && n == 1);
    CHECK_OK(tokens_check_seq(t, 5, &err), &err);
    CHECK(tokens_check_seq(t, 6, &err) == STK_ERR_CONFIG &&
          strstr(err.text, "holds 5 tokens, fewer than one sequence of 6"));
    CHECK(tokens_check_seq(t, 1, NULL) == STK_ERR_CONFIG &&
          tokens_check_seq(t, 0, NULL) == STK_ERR_CONFIG);
    CHECK(truncate(path, 4) == 0);
    stk_error_clear(&err);
    CHECK(tokens_window(t, 2, 1, ids, targets, position, first, &n, &err) == STK_ERR_CORRUPT);
    tokens_close(t);
    stk_error_clear(&err);
    CHECK(tokens_open(temp_write(temp_path("a.bin"), bytes, sizeof bytes), 65535, &t, &err) ==
          STK_ERR_FORMAT);
    CHECK(strstr(err.text, "token 2 has the id 65535; ids from 0 to 65534") != NULL);
}

static bool refused(const char *path, uint32_t vocab, const char *part)
{
    struct tokens *t;
    struct stk_error err = { 0 };
    stk_status status = tokens_open(path, vocab, &t, &err);
    if (status == STK_OK) tokens_close(t);
    bool good = status != STK_OK && t == NULL && strstr(err.text, part) && strstr(err.text, path);
    if (!good) printf("# expected \"%s\", got %s: %s\n", part, stk_status_name(status), err.text);
    return good;
}

static bool sample_refused(uint32_t vocab, const char *part)
{
    struct stk_error err = { 0 };
    const char *path = temp_path("bad.safetensors");
    STK_ASSERT(write_sample(path, &sample, &err) == STK_OK);
    return refused(path, vocab, part);
}

TEST(tokens_bad_ids)
{
    struct rng r;
    rng_seed(&r, test_seed());
    fill(&r, ST_I32, 500, 0, false);
    sample.ids[321] = 100;
    CHECK(sample_refused(
        100, "token 321 has the id 100; ids from 0 to 99 were expected (the model's vocabulary)"));
    sample.ids[321] = -1;
    CHECK(sample_refused(100, "token 321 has the id -1"));
    CHECK(sample_refused(0, "token 321 has the id -1"));
    sample.dtype = ST_I8;
    CHECK(sample_refused(0, "token 321 has the id -1"));
    sample.dtype = ST_I64;
    sample.ids[321] = 2147483648;
    CHECK(sample_refused(0, "token 321 has the id 2147483648; ids from 0 to 2147483647"));
    sample.dtype = ST_U32;
    CHECK(sample_refused(0, "token 321 has the id 2147483648"));
    sample.dtype = ST_U64;
    sample.ids[321] = -1; /* 2^64 - 1 */
    CHECK(sample_refused(0, "token 321 has the id -1"));
}

TEST(tokens_bad_structure)
{
#define TENSOR(name, dtype, n, a, b) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" n "],\"data_offsets\":[" a "," b "]}"
    const char *path = temp_path("bad.safetensors");
    CHECK(refused(temp_safetensors(path, "{" TENSOR("input_ids", "U16", "0", "0", "0") "}", 0), 0,
                  "holds no tokens"));
    CHECK(refused(temp_write(temp_path("empty.bin"), "", 0), 0, "holds no tokens"));
    CHECK(refused(temp_write(temp_path("odd.bin"), "abc", 3), 0, "an odd number"));
    CHECK(refused(temp_path("absent.bin"), 0, "cannot open"));
    CHECK(refused(temp_safetensors(path, "{}", 0), 0, "has no tensor input_ids"));
    CHECK(refused(temp_safetensors(path, "{" TENSOR("tokens", "U16", "2", "0", "4") "}", 4), 0,
                  "holds the tensor tokens"));
    CHECK(refused(temp_safetensors(path, "{" TENSOR("input_ids", "F32", "1", "0", "4") "}", 4), 0,
                  "input_ids has dtype F32"));
    CHECK(refused(temp_safetensors(path, "{" TENSOR("input_ids", "U16", "1,2", "0", "4") "}", 4), 0,
                  "2 dimensions"));
    CHECK(refused(temp_safetensors(path,
                                   "{" TENSOR("input_ids", "U16", "2", "0",
                                              "4") "," TENSOR("loss_mask", "U8", "3", "4", "7") "}",
                                   7),
                  0, "loss_mask has 3 entries, input_ids 2"));
    CHECK(refused(temp_safetensors(path,
                                   "{" TENSOR("input_ids", "U16", "2", "0", "4") "," TENSOR(
                                       "loss_mask", "U16", "2", "4", "8") "}",
                                   8),
                  0, "loss_mask has dtype U16"));
    CHECK(refused(temp_safetensors(path,
                                   "{" TENSOR("input_ids", "U16", "2", "0",
                                              "4") "," TENSOR("loss_mask", "U8", "2", "4", "6") "}",
                                   6),
                  0, "loss_mask of token 0 is 90"));
    CHECK(refused(temp_safetensors(path,
                                   "{" TENSOR("input_ids", "U16", "2", "0", "4") "," TENSOR(
                                       "document_offsets", "I32", "1", "4", "8") "}",
                                   8),
                  0, "document_offsets has dtype I32"));
    CHECK(refused(temp_safetensors(path,
                                   "{" TENSOR("input_ids", "U16", "2", "0", "4") "," TENSOR(
                                       "document_offsets", "I64", "0", "4", "4") "}",
                                   4),
                  0, "document_offsets is empty"));
    CHECK(refused(
        temp_text(temp_path("lfs.safetensors"), "version https://git-lfs.github.com/spec/v1\n"), 0,
        "Git LFS"));
}

TEST(tokens_bad_documents)
{
    struct rng r;
    rng_seed(&r, test_seed());
    fill(&r, ST_U16, 100, 0, false);
    sample.documents = 3;
    sample.offsets[0] = 0, sample.offsets[1] = 10, sample.offsets[2] = 100;
    CHECK(sample_refused(0, "document_offsets[2] is 100 after 10"));
    sample.offsets[2] = 10;
    CHECK(sample_refused(0, "document_offsets[2] is 10 after 10"));
    sample.offsets[2] = -5;
    CHECK(sample_refused(0, "document_offsets[2] is -5"));
    sample.offsets[0] = 1;
    CHECK(sample_refused(0, "begin with 1"));
}

TEST(tokens_hash_sees_every_part)
{
    struct rng r;
    rng_seed(&r, test_seed());
    fill(&r, ST_U16, 300, 10, true);
    uint64_t hash[5];
    for (int i = 0; i < 5; i++) {
        struct stk_error err = { 0 };
        struct tokens *t;
        if (i == 1) sample.ids[299] ^= 1;
        if (i == 2) sample.mask[299] ^= 1;
        if (i == 3) sample.documents--;
        if (i == 4) sample.has_mask = false;
        const char *path = temp_path("hash.safetensors");
        CHECK_OK(write_sample(path, &sample, &err), &err);
        CHECK_OK(tokens_open(path, 0, &t, &err), &err);
        hash[i] = tokens_hash(t);
        for (int j = 0; j < i; j++) CHECK(hash[i] != hash[j]);
        tokens_close(t);
    }
}

TEST(tokens_every_failing_call)
{
    static const enum sys_call kinds[] = { SYS_ALLOC, SYS_OPEN, SYS_READ };
    struct rng r;
    rng_seed(&r, test_seed());
    fill(&r, ST_U16, 1000, 10, true);
    struct stk_error err = { 0 };
    const char *path = temp_path("faults.safetensors");
    CHECK_OK(write_sample(path, &sample, &err), &err);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        bool done = false;
        for (uint64_t k = 1; !done && k < 100; k++) {
            uint64_t before = sys_alloc_bytes();
            struct tokens *t;
            int32_t v[4][50];
            stk_error_clear(&err);
            sys_fault_arm(kinds[i], k, 1, kinds[i] == SYS_ALLOC ? ENOMEM : EIO);
            stk_status status = tokens_open(path, 100, &t, &err);
            if (status == STK_OK)
                status = tokens_window(t, 50, 3, v[0], v[1], v[2], v[3], NULL, &err);
            done = sys_fault_seen(kinds[i]) < k;
            sys_fault_arm(kinds[i], 0, 0, 0);
            CHECK(done == (status == STK_OK));
            tokens_close(t);
            CHECK(sys_alloc_bytes() == before);
        }
        CHECK(done);
    }
}

/* A window is one read of ids, one of the mask, one of offsets; memory is that of one window. */
TEST(tokens_window_reads_little)
{
    struct rng r;
    rng_seed(&r, test_seed());
    fill(&r, ST_U16, MAX, 50, true);
    struct stk_error err = { 0 };
    const char *path = temp_path("reads.safetensors");
    CHECK_OK(write_sample(path, &sample, &err), &err);
    struct tokens *t;
    CHECK_OK(tokens_open(path, 100, &t, &err), &err);
    int32_t v[4][200];
    sys_fault_arm(SYS_READ, UINT64_MAX, 1, EIO); /* counts only */
    CHECK_OK(tokens_window(t, 200, 3, v[0], v[1], v[2], v[3], NULL, &err), &err);
    CHECK(sys_fault_seen(SYS_READ) <= 3);
    sys_fault_arm(SYS_READ, 0, 0, 0);
    tokens_close(t);
}

TEST(token_order_is_a_shuffle_per_epoch)
{
    struct stk_error err = { 0 };
    struct token_order *o, *other;
    enum { N = 1000 };
    CHECK_OK(token_order_new(N, 7, &o, &err), &err);
    CHECK_OK(token_order_new(N, 8, &other, &err), &err);
    uint64_t first[N], moved = 0, differ = 0;
    for (uint64_t e = 0; e < 3; e++) {
        bool seen[N] = { false };
        for (uint64_t i = 0; i < N; i++) {
            uint64_t w = token_order_at(o, e * N + i);
            REQUIRE(w < N && !seen[w]);
            seen[w] = true;
            if (e == 0) first[i] = w;
            moved += e == 1 && first[i] != w;
            differ += e == 0 && token_order_at(other, i) != w;
        }
    }
    CHECK(moved > N / 2 && differ > N / 2);
    for (uint64_t i = 0; i < N; i += 97) {
        uint64_t later = token_order_at(o, 5 * N + i); /* jumps between epochs: pure in (seed, p) */
        CHECK(token_order_at(o, i) == first[i] && token_order_at(o, 5 * N + i) == later);
    }
    token_order_free(o);
    token_order_free(other);
    CHECK(token_order_new(0, 7, &o, &err) == STK_ERR_CONFIG);
    CHECK(token_order_new(1ull << 32, 7, &o, NULL) == STK_ERR_CONFIG);
    CHECK_OK(token_order_new(1, 7, &o, &err), &err);
    CHECK(token_order_at(o, 12345) == 0);
    token_order_free(o);
}

TEST(tokens_golden_files_open)
{
    static const struct {
        const char *name;
        uint32_t vocab;
    } cases[] = { { "llama_docs_mask_old", 0 },
                  { "mistral_window_docs_mask_new", 0 },
                  { "qwen2_window_layers_new", 61 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[600];
        struct stk_error err = { 0 };
        struct tokens *t;
        snprintf(path, sizeof path, "%s/tests/golden/%s/data.safetensors", SOURCE_ROOT,
                 cases[i].name);
        CHECK_OK(tokens_open(path, cases[i].vocab, &t, &err), &err);
        CHECK(tokens_count(t) > 0);
        tokens_close(t);
    }
}

TEST_MAIN()
