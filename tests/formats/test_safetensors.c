/* tests/formats/test_safetensors.c - reader, sets and writer of safetensors files (CKP-07, 16,
 * 22, 23, 25, 26, 28, 29, 37). */
#include "tests/test.h"

#include "base/rng.h"
#include "base/sys.h"
#include "formats/crc32.h"
#include "formats/files.h"
#include "formats/safetensors.h"
#include "tests/formats/temp.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* Opens and expects a refusal whose sentence holds `part`. */
static bool refused(const char *path, stk_status code, const char *part)
{
    struct st_file *f;
    struct stk_error err = { 0 };
    stk_status status = st_open(path, &f, &err);
    if (status == STK_OK) st_close(f);
    bool good = status == code && f == NULL && strstr(err.text, part) && strstr(err.text, path);
    if (!good) printf("# expected \"%s\", got %s: %s\n", part, stk_status_name(status), err.text);
    return good;
}

static bool header_refused(const char *header, size_t data_bytes, const char *part)
{
    const char *path = temp_path("bad.safetensors");
    return refused(temp_safetensors(path, header, data_bytes), STK_ERR_FORMAT, part);
}

static stk_status write_sample(const char *path, struct stk_error *err)
{
    static const char *const metadata[] = { "format", "pt", "quote\"d", "a\\b\nc", NULL };
    struct st_writer *w;
    uint32_t a, b, c, d;
    uint8_t bytes[5] = { 1, 2, 3, 4, 5 };
    uint16_t halves[6] = { 10, 11, 12, 13, 14, 15 };
    float floats[4] = { 1.5f, -2.5f, 3.5f, -0.0f };
    STK_TRY(st_writer_new(path, metadata, &w, err));
    stk_status status = st_writer_declare(w, "bytes", ST_U8, 1, (uint64_t[]){ 5 }, &a, err);
    if (!status)
        status =
            st_writer_declare(w, "model.\"halves\"", ST_BF16, 2, (uint64_t[]){ 2, 3 }, &b, err);
    if (!status) status = st_writer_declare(w, "floats", ST_F32, 1, (uint64_t[]){ 4 }, &c, err);
    if (!status) status = st_writer_declare(w, "scalar", ST_F32, 0, NULL, &d, err);
    uint64_t before = st_writer_bytes(w);
    if (!status) status = st_writer_begin(w, err);
    CHECK(status || st_writer_bytes(w) == before);
    /* In pieces, in no order. */
    if (!status) status = st_writer_write(w, d, 0, floats, 4, err);
    if (!status) status = st_writer_write(w, c, 8, floats + 2, 8, err);
    if (!status) status = st_writer_write(w, b, 0, halves, 12, err);
    if (!status) status = st_writer_write(w, c, 0, floats, 8, err);
    if (!status) status = st_writer_write(w, a, 3, bytes + 3, 2, err);
    if (!status) status = st_writer_write(w, a, 0, bytes, 1, err);
    if (!status) status = st_writer_write(w, a, 1, bytes + 1, 2, err);
    if (status) {
        st_writer_abandon(w);
        return status;
    }
    return st_writer_finish(w, err);
}

TEST(safetensors_round_trip)
{
    struct stk_error err = { 0 };
    const char *path = temp_path("sample.safetensors");
    CHECK_OK(write_sample(path, &err), &err);
    struct st_file *f;
    CHECK_OK(st_open(path, &f, &err), &err);
    CHECK(st_count(f) == 4);
    CHECK(strcmp(st_metadata(f, "quote\"d"), "a\\b\nc") == 0 && st_metadata(f, "absent") == NULL);
    const struct st_tensor *t = st_find(f, "model.\"halves\"");
    REQUIRE(t != NULL);
    CHECK(t->dtype == ST_BF16 && t->rank == 2 && t->shape[0] == 2 && t->shape[1] == 3 &&
          t->size_bytes == 12);
    uint16_t half[2];
    CHECK_OK(st_read(f, t, 4, 4, half, &err), &err);
    CHECK(half[0] == 12 && half[1] == 13);
    float floats[4];
    CHECK_OK(st_read(f, st_find(f, "floats"), 0, 16, floats, &err), &err);
    CHECK(floats[1] == -2.5f && floats[2] == 3.5f);
    CHECK(st_find(f, "scalar")->rank == 0 && st_find(f, "scalar")->n_elements == 1);
    CHECK(st_find(f, "flo") == NULL);
    for (uint32_t i = 0; i < st_count(f); i++)
        CHECK(st_at(f, i)->offset_bytes % st_dtype_bytes(st_at(f, i)->dtype) == 0);
    CHECK(st_read(f, t, 8, 5, half, &err) == STK_ERR_STATE);
    CHECK(st_read(f, t, UINT64_MAX, 2, half, NULL) == STK_ERR_STATE);
    st_close(f);
    CHECK(!temp_exists(temp_path("sample.safetensors.partial")));
}

TEST(safetensors_every_dtype)
{
    for (unsigned i = 0; i < ST_DTYPE_N; i++) {
        enum st_dtype t;
        CHECK(st_dtype_parse(st_dtype_name((enum st_dtype)i), &t) && t == (enum st_dtype)i);
        char header[200];
        snprintf(header, sizeof header,
                 "{\"x\":{\"dtype\":\"%s\",\"shape\":[3,1],\"data_offsets\":[0,%u]}}",
                 st_dtype_name(t), 3 * st_dtype_bytes(t));
        const char *path =
            temp_safetensors(temp_path("dtype.safetensors"), header, 3 * st_dtype_bytes(t));
        struct st_file *f;
        struct stk_error err = { 0 };
        CHECK_OK(st_open(path, &f, &err), &err);
        CHECK(st_at(f, 0)->n_elements == 3);
        st_close(f);
    }
}

TEST(safetensors_ckp_22_half_downloaded_or_pointer)
{
    struct stk_error err = { 0 };
    const char *whole = temp_path("whole.safetensors"), *cut = temp_path("cut.safetensors");
    CHECK_OK(write_sample(whole, &err), &err);
    size_t size;
    char *bytes = temp_read(whole, &size);
    char expected[60];
    CHECK(refused(temp_write(cut, bytes, 0), STK_ERR_FORMAT, "holds 0 bytes"));
    CHECK(refused(temp_write(cut, bytes, 4), STK_ERR_FORMAT, "holds 4 bytes"));
    CHECK(refused(temp_write(cut, bytes, 100), STK_ERR_FORMAT, "truncated within its header"));
    CHECK(refused(cut, STK_ERR_FORMAT, "found 100"));
    CHECK(refused(temp_write(cut, bytes, size - 3), STK_ERR_FORMAT,
                  "is truncated: tensor bytes ends at"));
    snprintf(expected, sizeof expected, "which has %zu; download", size - 3);
    CHECK(refused(cut, STK_ERR_FORMAT, expected));
    for (size_t n = 0; n < size; n++)
        CHECK(refused(temp_write(cut, bytes, n), STK_ERR_FORMAT, "download it again"));
    free(bytes);
    CHECK(refused(
        temp_text(cut,
                  "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5368709120\n"),
        STK_ERR_FORMAT, "Git LFS pointer"));
    CHECK(refused(cut, STK_ERR_FORMAT, "where 5368709120 were expected"));
    CHECK(refused(temp_text(cut, "\n <!DOCTYPE html><html><body>Not found</body></html>"),
                  STK_ERR_FORMAT, "HTML page"));
    CHECK(refused(temp_text(cut, "<HTML>"), STK_ERR_FORMAT, "HTML page"));
    CHECK(refused(temp_path("absent.safetensors"), STK_ERR_IO, "cannot open"));
    CHECK(refused(temp_dir, STK_ERR_FORMAT, "not a regular file"));
    CHECK(refused(temp_text(cut, "PK\003\004 a pickle in a zip archive"), STK_ERR_FORMAT,
                  "not a safetensors file"));
    CHECK(refused(temp_write(cut, "\020\0\0\0\0\0\0\0[1,2,3,4,5,6,78]", 24), STK_ERR_FORMAT,
                  "does not begin with"));
}

TEST(safetensors_ckp_23_lying_offsets)
{
#define F32_AT(name, shape, a, b) \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":[" shape "],\"data_offsets\":[" a "," b "]}"
    CHECK(header_refused("{" F32_AT("x", "2", "-8", "0") "}", 8, "negative or reversed"));
    CHECK(header_refused("{" F32_AT("x", "2", "8", "0") "}", 8, "negative or reversed"));
    CHECK(header_refused("{" F32_AT("x", "2", "0", "8") "," F32_AT("y", "2", "4", "12") "}", 12,
                         "an overlap"));
    CHECK(header_refused("{" F32_AT("x", "2", "0", "8") "," F32_AT("y", "2", "0", "8") "}", 8,
                         "an overlap"));
    CHECK(header_refused("{" F32_AT("x", "2", "0", "8") "," F32_AT("y", "2", "12", "20") "}", 20,
                         "a hole"));
    CHECK(header_refused("{" F32_AT("x", "2", "4", "12") "}", 12, "a hole"));
    CHECK(header_refused("{" F32_AT("x", "2", "0", "8") "}", 7, "is truncated"));
    CHECK(header_refused("{" F32_AT("x", "2", "9223372036854775799", "9223372036854775807") "}", 8,
                         "a hole"));
    CHECK(header_refused("{" F32_AT("x", "2305843009213693951", "0", "9223372036854775804") "}", 8,
                         "is truncated"));
    CHECK(
        header_refused("{" F32_AT("x", "2", "0", "99999999999999999999") "}", 8, "not valid JSON"));
    CHECK(header_refused("{" F32_AT("x", "4294967296,4294967296", "0", "0") "}", 0,
                         "does not fit 64 bits"));
    CHECK(header_refused("{" F32_AT("x", "4611686018427387904", "0", "0") "}", 0,
                         "does not fit 64 bits"));
    CHECK(header_refused("{" F32_AT("x", "3", "0", "8") "}", 8, "its shape and dtype F32 need 12"));
    CHECK(header_refused("{" F32_AT("x", "-2", "0", "8") "}", 8, "dimension 0 of its shape"));
    CHECK(header_refused("{" F32_AT("x", "2.0", "0", "8") "}", 8, "dimension 0 of its shape"));
    CHECK(header_refused("{" F32_AT("x", "1,1,1,1,1,1,1,1,2", "0", "8") "}", 8, "9 dimensions"));
    CHECK(header_refused("{" F32_AT("x", "2", "0", "8.0") "}", 8, "two integers"));
    CHECK(header_refused("{" F32_AT("x", "2", "0", "8,9") "}", 8, "two integers"));
    CHECK(header_refused("{" F32_AT("x", "2", "0", "8") "," F32_AT("x", "2", "8", "16") "}", 16,
                         "duplicate"));
    CHECK(header_refused("{\"x\":[]}", 0, "not an object"));
    CHECK(header_refused("{\"x\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "has no shape"));
    CHECK(header_refused(
        "{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"strides\":[1]}}", 8,
        "unknown property"));
    CHECK(header_refused("{\"__metadata__\":{\"a\":1}}", 0, "is not a string"));
    CHECK(header_refused("{\"__metadata__\":[]}", 0, "not an object"));
    CHECK(header_refused("{\"a\":{\"b\":{\"c\":{\"d\":{}}}}}", 0, "nested deeper"));
    CHECK(header_refused("{\"a\":NaN}", 0, "not valid JSON"));
    CHECK(header_refused("{} x", 0, "not valid JSON"));
    /* Empty tensors are no holes, wherever they are named. */
    struct st_file *f;
    struct stk_error err = { 0 };
    const char *good =
        temp_safetensors(temp_path("empty.safetensors"),
                         "{" F32_AT("y", "2", "0", "8") "," F32_AT("a", "0", "8", "8") "," F32_AT(
                             "z", "0", "0", "0") "}  ",
                         8);
    CHECK_OK(st_open(good, &f, &err), &err);
    st_close(f);
}

TEST(safetensors_ckp_25_unknown_dtype)
{
    CHECK(header_refused("{\"layer.x\":{\"dtype\":\"F99\",\"shape\":[2],\"data_offsets\":[0,8]}}",
                         8, "layer.x has the unknown dtype \"F99\""));
    CHECK(header_refused("{\"layer.x\":{\"dtype\":\"\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
                         "layer.x has the unknown dtype \"\""));
    CHECK(header_refused("{\"layer.x\":{\"dtype\":\"f32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
                         8, "unknown dtype"));
    CHECK(header_refused("{\"layer.x\":{\"dtype\":3,\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
                         "layer.x has no dtype"));
    CHECK(header_refused("{\"layer.x\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
                         "layer.x has no dtype"));
}

TEST(safetensors_ckp_26_trailing_bytes)
{
    CHECK(header_refused("{" F32_AT("x", "2", "0", "8") "}", 9, "has 1 trailing bytes"));
    CHECK(header_refused("{" F32_AT("x", "2", "0", "8") "}", 1008, "has 1000 trailing bytes"));
    CHECK(header_refused("{}", 3, "has 3 trailing bytes"));
}

TEST(safetensors_file_that_shrinks_after_open)
{
    struct st_file *f;
    struct stk_error err = { 0 };
    const char *path = temp_safetensors(temp_path("shrinks.safetensors"),
                                        "{" F32_AT("x", "200", "0", "800") "}", 800);
    CHECK_OK(st_open(path, &f, &err), &err);
    CHECK(truncate(path, 500) == 0);
    char buf[800];
    CHECK(st_read(f, st_at(f, 0), 0, 800, buf, &err) == STK_ERR_CORRUPT);
    st_close(f);
}

/* --- sets ------------------------------------------------------------------------------------- */

static bool set_refused(const char *folder, const char *part)
{
    struct st_set *s;
    struct stk_error err = { 0 };
    stk_status status = st_set_open(folder, &s, &err);
    if (status == STK_OK) st_set_close(s);
    bool good = status == STK_ERR_FORMAT && strstr(err.text, part);
    if (!good) printf("# expected \"%s\", got %s: %s\n", part, stk_status_name(status), err.text);
    return good;
}

static const char *make_shards(const char *folder, const char *index)
{
    (void)sys_remove_tree(folder);
    STK_ASSERT(sys_mkdirs(folder) == 0);
    for (int i = 1; i <= 3; i++) {
        char header[200];
        snprintf(header, sizeof header,
                 "{\"t%d.a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                 "\"t%d.b\":{\"dtype\":\"BF16\",\"shape\":[%d],\"data_offsets\":[8,%d]}}",
                 i, i, i, 8 + 2 * i);
        char path[500];
        snprintf(path, sizeof path, "%s/model-0000%d-of-00003.safetensors", folder, i);
        temp_safetensors(path, header, (size_t)(8 + 2 * i));
    }
    char path[500];
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    temp_text(path, index);
    return folder;
}

#define IN(t, n)                                                                            \
    "\"t" #t ".a\":\"model-0000" #n "-of-00003.safetensors\",\"t" #t ".b\":\"model-0000" #n \
    "-of-00003.safetensors\""
static const char good_index[] =
    "{\"metadata\":{\"total_size\":36},\"weight_map\":{" IN(3, 3) "," IN(1, 1) "," IN(2, 2) "}}";

TEST(safetensors_set_reads_shards)
{
    struct st_set *s;
    struct stk_error err = { 0 };
    const char *folder = make_shards(temp_path("shards"), good_index);
    CHECK_OK(st_set_open(folder, &s, &err), &err);
    CHECK(st_set_files(s) == 3 && st_set_count(s) == 6);
    CHECK(strcmp(st_set_at(s, 0)->name, "t1.a") == 0 && strcmp(st_set_at(s, 5)->name, "t3.b") == 0);
    const struct st_tensor *t = st_set_find(s, "t2.b");
    REQUIRE(t != NULL);
    CHECK(t->file == 1 && strstr(st_set_path(s, t->file), "model-00002-of-00003"));
    unsigned char buf[4];
    CHECK_OK(st_set_read(s, t, 0, 4, buf, &err), &err);
    CHECK(buf[0] == 0x5a && buf[3] == 0x5a);
    st_set_close(s);
}

TEST(safetensors_set_ckp_28_missing_shard)
{
    for (int i = 1; i <= 3; i++) {
        const char *folder = make_shards(temp_path("shards"), good_index);
        char path[500], name[60];
        snprintf(name, sizeof name, "model-0000%d-of-00003.safetensors", i);
        snprintf(path, sizeof path, "%s/%s", folder, name);
        CHECK(unlink(path) == 0);
        CHECK(set_refused(folder, name));
        CHECK(set_refused(folder, "1 of the 3 files"));
    }
}

TEST(safetensors_set_ckp_29_stale_index)
{
    const char *folder = temp_path("shards");
    /* Another prefix, a stray quantised file: the index decides. */
    make_shards(folder, good_index);
    char path[500];
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    temp_text(path, "not read");
    snprintf(path, sizeof path, "%s/gptq_model-4bit.safetensors", folder);
    temp_text(path, "not read");
    struct st_set *s;
    struct stk_error err = { 0 };
    CHECK_OK(st_set_open(folder, &s, &err), &err);
    st_set_close(s);
    /* Index says another shard, names a tensor that is nowhere, leaves one out, has more files
     * than there are. */
    CHECK(set_refused(
        make_shards(folder, "{\"weight_map\":{" IN(1, 1) "," IN(2, 3) "," IN(3, 2) "}}"),
        "the index is of other files"));
    CHECK(set_refused(make_shards(folder, "{\"weight_map\":{" IN(1, 1) "," IN(2, 2) "," IN(
                                              3, 3) "," IN(4, 3) "}}"),
                      "t4.a is in"));
    CHECK(set_refused(
        make_shards(folder, "{\"weight_map\":{" IN(1, 1) "," IN(
                                2, 2) ",\"t3.a\":\"model-00003-of-00003.safetensors\"}}"),
        "holds t3.b, which"));
    CHECK(set_refused(make_shards(folder, "{\"weight_map\":{" IN(1, 1) "," IN(2, 2) "," IN(
                                              3, 3) "," IN(4, 4) "," IN(5, 5) "}}"),
                      "2 of the 5 files"));
    CHECK(set_refused(make_shards(folder, "{\"weight_map\":{\"t1.a\":\"../outside.safetensors\"}}"),
                      "in the same folder"));
    CHECK(set_refused(make_shards(folder, "{\"weight_map\":{\"t1.a\":7}}"), "in the same folder"));
    CHECK(set_refused(make_shards(folder, "{\"weight_map\":[]}"), "has no weight_map"));
    CHECK(set_refused(make_shards(folder, "{}"), "has no weight_map"));
    CHECK(set_refused(make_shards(folder, "{\"weight_map\":{" IN(1, 1) "," IN(1, 2) "}}"),
                      "duplicate"));
    CHECK(set_refused(make_shards(folder, ""), "is empty"));
    CHECK(set_refused(make_shards(folder, "version https://git-lfs.github.com/spec/v1"),
                      "Git LFS pointer"));
}

TEST(safetensors_set_same_name_twice)
{
    const char *folder = make_shards(temp_path("shards"), good_index);
    char path[500];
    snprintf(path, sizeof path, "%s/model-00002-of-00003.safetensors", folder);
    temp_safetensors(path, "{" F32_AT("t1.a", "2", "0", "8") "," F32_AT("t2.b", "1", "8", "12") "}",
                     12);
    CHECK(set_refused(folder, "t1.a is in two files"));
}

TEST(safetensors_set_without_model)
{
    const char *folder = temp_path("nothing");
    CHECK(set_refused(folder, "no such folder"));
    STK_ASSERT(sys_mkdirs(folder) == 0);
    CHECK(set_refused(folder, "there is nothing"));
    char path[500];
    snprintf(path, sizeof path, "%s/pytorch_model.bin", folder);
    temp_text(path, "x");
    CHECK(set_refused(folder, "there is pytorch_model.bin"));
}

/* --- writer ----------------------------------------------------------------------------------- */

TEST(safetensors_writer_refuses_holes)
{
    struct stk_error err = { 0 };
    const char *path = temp_path("holes.safetensors");
    struct st_writer *w;
    uint32_t i;
    char data[16] = { 0 };
    CHECK_OK(st_writer_new(path, NULL, &w, &err), &err);
    CHECK_OK(st_writer_declare(w, "x", ST_F32, 1, (uint64_t[]){ 4 }, &i, &err), &err);
    CHECK(st_writer_write(w, i, 0, data, 4, NULL) == STK_ERR_STATE);
    CHECK_OK(st_writer_begin(w, &err), &err);
    CHECK(st_writer_declare(w, "y", ST_F32, 1, (uint64_t[]){ 4 }, &i, NULL) == STK_ERR_STATE);
    CHECK(st_writer_write(w, i, 8, data, 12, NULL) == STK_ERR_STATE);
    CHECK_OK(st_writer_write(w, i, 0, data, 8, &err), &err);
    CHECK_OK(st_writer_write(w, i, 12, data, 4, &err), &err);
    CHECK(st_writer_finish(w, &err) == STK_ERR_STATE);
    CHECK(strstr(err.text, "not written from byte 8") != NULL);
    CHECK(!temp_exists(path) && !temp_exists(temp_path("holes.safetensors.partial")));
}

TEST(safetensors_writer_refuses_an_unwritten_end)
{
    struct st_writer *w;
    uint32_t i;
    char data[16] = { 0 };
    for (uint64_t size = 0; size <= 16; size += 8) {
        struct stk_error err = { 0 };
        const char *path = temp_path("end.safetensors");
        CHECK_OK(st_writer_new(path, NULL, &w, &err), &err);
        CHECK_OK(st_writer_declare(w, "x", ST_F32, 1, (uint64_t[]){ 4 }, &i, &err), &err);
        CHECK_OK(st_writer_begin(w, &err), &err);
        CHECK_OK(st_writer_write(w, i, 0, data, size, &err), &err);
        CHECK(st_writer_finish(w, &err) == (size == 16 ? STK_OK : STK_ERR_STATE));
        CHECK(temp_exists(path) == (size == 16));
    }
}

/* Pieces in any order, at any place in their page, from any address, past the page cache and
 * through it: the same file, and the sum that was gathered is its own. */
TEST(safetensors_writer_sums_and_direct)
{
    enum { N = 40000 };
    struct stk_error err = { 0 };
    uint8_t *data = aligned_alloc(4096, 4 * N + 12032), *bounce = aligned_alloc(4096, 8192);
    struct crc32_tables *t = malloc(sizeof *t);
    struct rng r;
    rng_seed(&r, test_seed());
    crc32_prepare(t);
    for (int i = 0; i < 4 * N; i++) data[i] = (uint8_t)rng_below(&r, 256);
    for (int round = 0; round < 12; round++) {
        const char *path = temp_path("direct.safetensors");
        struct st_writer *w;
        uint64_t shape[2] = { N, (uint64_t)rng_below(&r, 3000) }, size, length;
        uint32_t k[2], crc, shift = (uint32_t)rng_below(&r, 3) * 4;
        unlink(path);
        CHECK_OK(st_writer_new(path, NULL, &w, &err), &err);
        CHECK_OK(st_writer_sums(w, &err), &err);
        if (round % 3) st_writer_direct(w, bounce, 8192);
        CHECK_OK(st_writer_declare(w, "a", ST_BF16, 1, &shape[1], &k[1], &err), &err);
        CHECK_OK(st_writer_declare(w, "b", ST_F32, 1, &shape[0], &k[0], &err), &err);
        CHECK_OK(st_writer_begin(w, &err), &err);
        CHECK(round % 3 == 0 || st_writer_offset(w, k[0]) % 4096 == 0);
        memmove(data + shift, data, 4 * N); /* another place in memory */
        CHECK(!st_writer_sum(w, &size, &crc));
        CHECK_OK(st_writer_write(w, k[1], 0, data + shift, 2 * shape[1], &err), &err);
        uint32_t cut[4] = { 0, (uint32_t)rng_below(&r, N), 0, N };
        cut[2] = cut[1] + (uint32_t)rng_below(&r, N - cut[1] + 1);
        static const int order[3][3] = { { 0, 1, 2 }, { 2, 0, 1 }, { 1, 2, 0 } };
        for (int i = 0; i < 3; i++) {
            uint32_t p = (uint32_t)order[round % 3][i];
            CHECK_OK(st_writer_write(w, k[0], 4ull * cut[p], data + shift + 4ull * cut[p],
                                     4ull * (cut[p + 1] - cut[p]), &err), &err);
        }
        CHECK(st_writer_sum(w, &size, &crc));
        CHECK_OK(st_writer_finish(w, &err), &err);
        char *file = NULL;
        CHECK_OK(files_read(path, 1 << 20, &file, &length, &err), &err);
        CHECK(size == length && crc == crc32_extend(t, 0, file, length));
        struct st_file *f;
        uint8_t *back = malloc(4 * N);
        CHECK_OK(st_open(path, &f, &err), &err);
        CHECK_OK(st_read(f, st_find(f, "b"), 0, 4 * N, back, &err), &err);
        CHECK(!memcmp(back, data + shift, 4 * N));
        st_close(f);
        free(back);
        sys_free(file);
    }
    free(data);
    free(bounce);
    free(t);
}

/* Pages of one tensor lie in memory in another order than in the file. */
static void add_pages(struct st_writer *w, uint32_t k, const uint8_t *data, uint32_t n,
                      const uint32_t *order, uint32_t flush_at, struct stk_error *err)
{
    for (uint32_t i = 0; i < n; i++) {
        CHECK_OK(st_writer_add(w, k, 4096ull * order[i], data + 4096ull * i, 4096, err), err);
        if (i == flush_at) CHECK_OK(st_writer_flush(w, err), err);
    }
}

/* Whether files of this folder can be written past the page cache: tmpfs can since Linux 6.6. */
static bool direct_possible(void)
{
    const char *path = temp_path("direct.probe");
    int fd = open(path, O_WRONLY | O_CREAT | O_DIRECT, 0600);
    if (fd >= 0) close(fd);
    unlink(path);
    return fd >= 0;
}

/* Added in any order: one request where the borders allow it, and the file is the same however the
 * requests go: refused as direct ones, interrupted, failed. */
TEST(safetensors_writer_added_parts_go_together)
{
    enum { N = 32 };
    if (!direct_possible()) SKIP("no direct writes in this folder: TMPDIR names another");
    static const int errnos[] = { 0, EINVAL, EINTR, EAGAIN, ENOSPC, EIO };
    struct stk_error err = { 0 };
    uint8_t *data = aligned_alloc(4096, 4096 * (N + 1)), *bounce = aligned_alloc(4096, 8192);
    struct rng r;
    rng_seed(&r, test_seed());
    for (int i = 0; i < 4096 * (N + 1); i++) data[i] = (uint8_t)rng_below(&r, 256);
    for (uint32_t round = 0; round < 48; round++) {
        const char *path = temp_path("parts.safetensors");
        const uint8_t *from = data + (round % 4 == 3 ? 4 : 0); /* no memory for direct writes */
        int os_errno = errnos[round % 6];
        uint32_t order[N], k, flush_at = round < 6 ? N : (uint32_t)rng_below(&r, N);
        struct st_writer *w;
        for (uint32_t i = 0; i < N; i++) order[i] = i;
        for (uint32_t i = N - 1; i > 0; i--) {
            uint32_t j = (uint32_t)rng_below(&r, i + 1), x = order[i];
            order[i] = order[j], order[j] = x;
        }
        unlink(path);
        stk_error_clear(&err);
        CHECK_OK(st_writer_new(path, NULL, &w, &err), &err);
        st_writer_direct(w, bounce, 8192);
        CHECK_OK(st_writer_declare(w, "x", ST_F32, 1, (uint64_t[]){ 1024 * N }, &k, &err), &err);
        CHECK_OK(st_writer_begin(w, &err), &err);
        sys_fault_arm(SYS_WRITE, os_errno && round >= 6 ? 1 : UINT64_MAX, 1, os_errno);
        bool fails = round >= 6 && (os_errno == ENOSPC || os_errno == EIO);
        if (fails) flush_at = N;
        add_pages(w, k, from, N, order, flush_at, &err);
        stk_status st = st_writer_flush(w, &err);
        uint64_t calls = sys_fault_seen(SYS_WRITE);
        sys_fault_arm(SYS_WRITE, 0, 0, 0);
        CHECK(fails == (st != STK_OK));
        if (round < 3) CHECK(calls == 1);
        if (st != STK_OK) {
            st_writer_abandon(w);
            CHECK(!temp_exists(path));
            continue;
        }
        CHECK_OK(st_writer_finish(w, &err), &err);
        struct st_file *f;
        uint8_t *back = malloc(4096 * N);
        CHECK_OK(st_open(path, &f, &err), &err);
        CHECK_OK(st_read(f, st_find(f, "x"), 0, 4096 * N, back, &err), &err);
        for (uint32_t i = 0; i < N; i++)
            CHECK(!memcmp(back + 4096ull * order[i], from + 4096ull * i, 4096));
        st_close(f);
        free(back);
    }
    free(data);
    free(bounce);
}

TEST(safetensors_writer_sum_of_what_was_written_twice_is_not_known)
{
    struct stk_error err = { 0 };
    struct st_writer *w;
    uint32_t i, crc;
    uint64_t size;
    char data[16] = { 0 };
    CHECK_OK(st_writer_new(temp_path("twice.safetensors"), NULL, &w, &err), &err);
    CHECK_OK(st_writer_sums(w, &err), &err);
    CHECK_OK(st_writer_declare(w, "x", ST_F32, 1, (uint64_t[]){ 4 }, &i, &err), &err);
    CHECK_OK(st_writer_begin(w, &err), &err);
    CHECK_OK(st_writer_write(w, i, 0, data, 12, &err), &err);
    CHECK_OK(st_writer_write(w, i, 8, data, 8, &err), &err);
    CHECK(!st_writer_sum(w, &size, &crc));
    CHECK_OK(st_writer_finish(w, &err), &err);
}

TEST(safetensors_writer_refuses_names)
{
    struct stk_error err = { 0 };
    struct st_writer *w;
    uint32_t i;
    CHECK_OK(st_writer_new(temp_path("names.safetensors"), NULL, &w, &err), &err);
    CHECK(st_writer_declare(w, "", ST_F32, 0, NULL, &i, NULL) == STK_ERR_CONFIG);
    CHECK(st_writer_declare(w, "__metadata__", ST_F32, 0, NULL, &i, NULL) == STK_ERR_CONFIG);
    CHECK(st_writer_declare(w, "\xff", ST_F32, 0, NULL, &i, NULL) == STK_ERR_CONFIG);
    CHECK(st_writer_declare(w, "x", ST_F32, 2, (uint64_t[]){ 1ull << 40, 1ull << 40 }, &i, NULL) ==
          STK_ERR_CONFIG);
    CHECK_OK(st_writer_declare(w, "x", ST_F32, 0, NULL, &i, &err), &err);
    CHECK_OK(st_writer_declare(w, "x", ST_F32, 0, NULL, &i, &err), &err);
    CHECK(st_writer_begin(w, &err) == STK_ERR_CONFIG && strstr(err.text, "declared twice"));
    st_writer_abandon(w);
    st_writer_abandon(NULL);
}

TEST(safetensors_writer_ckp_37_disk_full_at_begin)
{
    struct stk_error err = { 0 };
    struct st_writer *w;
    uint32_t i;
    const char *path = temp_path("full.safetensors");
    CHECK_OK(st_writer_new(path, NULL, &w, &err), &err);
    CHECK_OK(st_writer_declare(w, "x", ST_F32, 1, (uint64_t[]){ 1000 }, &i, &err), &err);
    sys_fault_arm(SYS_ALLOCATE, 1, 1, ENOSPC);
    CHECK(st_writer_begin(w, &err) == STK_ERR_NOSPACE);
    sys_fault_arm(SYS_ALLOCATE, 0, 0, 0);
    CHECK(strstr(err.text, "needs 4") && strstr(err.text, "free"));
    st_writer_abandon(w);
    CHECK(!temp_exists(path) && !temp_exists(temp_path("full.safetensors.partial")));
    /* A real one: more than any disk has. */
    stk_error_clear(&err);
    CHECK_OK(st_writer_new(path, NULL, &w, &err), &err);
    CHECK_OK(st_writer_declare(w, "x", ST_U8, 1, (uint64_t[]){ 1ull << 43 }, &i, &err), &err);
    CHECK(st_writer_begin(w, &err) != STK_OK);
    st_writer_abandon(w);
    CHECK(!temp_exists(path) && !temp_exists(temp_path("full.safetensors.partial")));
}

TEST(safetensors_writer_ckp_16_every_failing_call)
{
    static const enum sys_call kinds[] = { SYS_ALLOC, SYS_OPEN,   SYS_WRITE,
                                           SYS_FSYNC, SYS_RENAME, SYS_ALLOCATE };
    const char *path = temp_path("faults.safetensors"),
               *partial = temp_path("faults.safetensors.partial");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        bool done = false;
        for (uint64_t k = 1; !done && k < 1000; k++) {
            struct stk_error err = { 0 };
            (void)unlink(path);
            uint64_t before = sys_alloc_bytes();
            sys_fault_arm(kinds[i], k, 1, kinds[i] == SYS_ALLOC ? ENOMEM : ENOSPC);
            stk_status status = write_sample(path, &err);
            done = sys_fault_seen(kinds[i]) < k;
            sys_fault_arm(kinds[i], 0, 0, 0);
            CHECK(done == (status == STK_OK) && !temp_exists(partial));
            CHECK(sys_alloc_bytes() == before);
            struct st_file *f;
            if (!temp_exists(path)) continue;
            /* only a failed flush of the folder leaves one, and it is whole */
            CHECK_OK(st_open(path, &f, &err), &err);
            st_close(f);
        }
        CHECK(done);
    }
}

TEST(safetensors_reader_every_failing_call)
{
    struct stk_error err = { 0 };
    static const enum sys_call kinds[] = { SYS_ALLOC, SYS_OPEN, SYS_READ };
    const char *folder = make_shards(temp_path("shards"), good_index);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        bool done = false;
        for (uint64_t k = 1; !done && k < 1000; k++) {
            uint64_t before = sys_alloc_bytes();
            struct st_set *s;
            stk_error_clear(&err);
            sys_fault_arm(kinds[i], k, 1, kinds[i] == SYS_ALLOC ? ENOMEM : EIO);
            stk_status status = st_set_open(folder, &s, &err);
            done = sys_fault_seen(kinds[i]) < k;
            sys_fault_arm(kinds[i], 0, 0, 0);
            CHECK(done == (status == STK_OK));
            CHECK(done || status == (kinds[i] == SYS_ALLOC ? STK_ERR_NOMEM : STK_ERR_IO));
            st_set_close(s);
            CHECK(sys_alloc_bytes() == before);
        }
        CHECK(done);
    }
}

/* The reference library reads what we write. */
TEST(safetensors_python_reads_ours)
{
    struct stk_error err = { 0 };
    const char *path = temp_path("python.safetensors");
    CHECK_OK(write_sample(path, &err), &err);
    char command[900];
    if (system("python3 -c 'import safetensors, numpy' 2>/dev/null") != 0)
        SKIP("python3 has no safetensors with numpy");
    snprintf(command, sizeof command,
             "python3 -c 'import sys; from safetensors import safe_open; f = "
             "safe_open(sys.argv[1], \"numpy\"); "
             "a = f.get_tensor(\"floats\"); b = f.get_tensor(\"bytes\"); assert a.tolist() == "
             "[1.5, -2.5, 3.5, 0.0]; "
             "assert b.tolist() == [1, 2, 3, 4, 5]; assert f.metadata()[\"format\"] == \"pt\"; "
             "assert len(f.keys()) == 4' '%s'",
             path);
    CHECK(system(command) == 0);
}

TEST_MAIN()
