/* formats/safetensors.c - reader of one safetensors file.
 *
 * Owns: the open file and its table of tensors. Must not know: models, shards, what the tensors
 * mean.
 * Invariant after st_open: tensors lie in the file back to back, from the end of the header to the
 * last byte, each as long as its shape and dtype say; so no read can leave the file unless the
 * file changes afterwards (that is STK_ERR_CORRUPT).
 * Format: huggingface/safetensors, README, "Format". Stricter than it: rank at most 8, unknown
 * keys refused.
 * Thread: one at a time per object; blocking. */
#include "formats/safetensors_impl.h"

#include "base/sys.h"
#include "formats/files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { READ_AHEAD_MIN = 1 << 20 };

struct st_file {
    char *path;
    int fd;
    uint64_t file_bytes, data_at; /* size; first byte after the header */
    uint32_t n;
    struct st_tensor *tensors; /* by offset */
    const struct st_tensor **by_name;
    json_t *header; /* kept for the metadata */
};

static const struct {
    const char *name;
    uint32_t bytes;
} dtypes[ST_DTYPE_N] = {
    [ST_BOOL] = { "BOOL", 1 }, [ST_U8] = { "U8", 1 },   [ST_I8] = { "I8", 1 },
    [ST_U16] = { "U16", 2 },   [ST_I16] = { "I16", 2 }, [ST_F16] = { "F16", 2 },
    [ST_BF16] = { "BF16", 2 }, [ST_U32] = { "U32", 4 }, [ST_I32] = { "I32", 4 },
    [ST_F32] = { "F32", 4 },   [ST_U64] = { "U64", 8 }, [ST_I64] = { "I64", 8 },
    [ST_F64] = { "F64", 8 },
};

const char *st_dtype_name(enum st_dtype t)
{
    STK_ASSERT((unsigned)t < ST_DTYPE_N);
    return dtypes[t].name;
}

bool st_dtype_parse(const char *name, enum st_dtype *out)
{
    for (unsigned i = 0; i < ST_DTYPE_N; i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            *out = (enum st_dtype)i;
            return true;
        }
    return false;
}

uint32_t st_dtype_bytes(enum st_dtype t)
{
    STK_ASSERT((unsigned)t < ST_DTYPE_N);
    return dtypes[t].bytes;
}

/* --- order and search ------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b)
{
    const struct st_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

void st_sort_by_name(const struct st_tensor **v, uint32_t n)
{
    if (n > 1) qsort(v, n, sizeof *v, by_name);
}

const struct st_tensor *st_find_by_name(const struct st_tensor *const *v, uint32_t n,
                                        const char *name)
{
    uint32_t low = 0, high = n;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        int c = strcmp(v[mid]->name, name);
        if (c == 0) return v[mid];
        if (c < 0) low = mid + 1;
        else high = mid;
    }
    return NULL;
}

/* Empty tensors come before the one that begins where they lie. */
static int by_offset(const void *a, const void *b)
{
    const struct st_tensor *x = a, *y = b;
    if (x->offset_bytes != y->offset_bytes) return x->offset_bytes < y->offset_bytes ? -1 : 1;
    if (x->size_bytes != y->size_bytes) return x->size_bytes < y->size_bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* --- header ----------------------------------------------------------------------------------- */

static stk_status parse_dtype(const char *path, const char *name, json_t *entry, enum st_dtype *out,
                              struct stk_error *err)
{
    json_t *dtype = json_object_get(entry, "dtype");
    if (!json_is_string(dtype))
        return stk_error_set(
            err, STK_ERR_FORMAT, 0,
            "%s: tensor %.100s has no dtype (a string such as \"BF16\" was expected)", path, name);
    if (!st_dtype_parse(json_string_value(dtype), out))
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: tensor %.100s has the unknown dtype \"%.40s\"; known are BOOL, "
                             "U8 to U64, I8 to I64, F16, BF16, F32, F64",
                             path, name, json_string_value(dtype));
    return STK_OK;
}

static stk_status parse_shape(const char *path, struct st_tensor *t, json_t *entry,
                              struct stk_error *err)
{
    json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape))
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: tensor %.100s has no shape (an array of sizes was expected)",
                             path, t->name);
    if (json_array_size(shape) > ST_RANK_MAX)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: tensor %.100s has %zu dimensions, at most %d are supported", path,
                             t->name, json_array_size(shape), ST_RANK_MAX);
    t->rank = (uint32_t)json_array_size(shape);
    t->n_elements = 1;
    bool over = false;
    for (uint32_t i = 0; i < t->rank; i++) {
        json_t *d = json_array_get(shape, i);
        if (!json_is_integer(d) || json_integer_value(d) < 0)
            return stk_error_set(
                err, STK_ERR_FORMAT, 0,
                "%s: tensor %.100s: dimension %u of its shape is not an integer of 0 or more", path,
                t->name, i);
        t->shape[i] = (uint64_t)json_integer_value(d);
        over |= __builtin_mul_overflow(t->n_elements, t->shape[i], &t->n_elements);
    }
    over |=
        __builtin_mul_overflow(t->n_elements, (uint64_t)st_dtype_bytes(t->dtype), &t->size_bytes);
    if (over)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: tensor %.100s: the product of its shape does not fit 64 bits",
                             path, t->name);
    return STK_OK;
}

/* Leaves offset_bytes relative to the data; order, holes and the end are checked when all are
 * known. */
static stk_status parse_offsets(const char *path, struct st_tensor *t, json_t *entry,
                                struct stk_error *err)
{
    json_t *pair = json_object_get(entry, "data_offsets");
    json_t *a = json_array_get(pair, 0), *b = json_array_get(pair, 1);
    if (json_array_size(pair) != 2 || !json_is_integer(a) || !json_is_integer(b))
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: tensor %.100s: data_offsets must be two integers [begin, end]",
                             path, t->name);
    json_int_t begin = json_integer_value(a), end = json_integer_value(b);
    if (begin < 0 || end < 0 || begin > end)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: tensor %.100s: data_offsets [%" JSON_INTEGER_FORMAT
                             ", %" JSON_INTEGER_FORMAT "] are negative or reversed",
                             path, t->name, begin, end);
    if ((uint64_t)(end - begin) != t->size_bytes)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: tensor %.100s: data_offsets span %" JSON_INTEGER_FORMAT
                             " bytes, its shape and dtype %s need %" PRIu64,
                             path, t->name, end - begin, st_dtype_name(t->dtype), t->size_bytes);
    t->offset_bytes = (uint64_t)begin;
    return STK_OK;
}

static stk_status parse_tensor(const char *path, const char *name, json_t *entry,
                               struct st_tensor *t, struct stk_error *err)
{
    if (!json_is_object(entry))
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: the header's entry %.100s is not an object", path, name);
    const char *key;
    json_t *value;
    json_object_foreach(entry, key, value) if (
        strcmp(key, "dtype") != 0 && strcmp(key, "shape") != 0 &&
        strcmp(key, "data_offsets") !=
            0) return stk_error_set(err, STK_ERR_FORMAT, 0,
                                    "%s: tensor %.100s has the unknown property \"%.40s\"", path,
                                    name, key);
    t->name = sys_strdup(name);
    if (!t->name) return files_no_memory(err, path);
    STK_TRY(parse_dtype(path, name, entry, &t->dtype, err));
    STK_TRY(parse_shape(path, t, entry, err));
    return parse_offsets(path, t, entry, err);
}

static stk_status check_metadata(const char *path, json_t *metadata, struct stk_error *err)
{
    if (!json_is_object(metadata))
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: __metadata__ is not an object", path);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value) if (!json_is_string(value)) return stk_error_set(
        err, STK_ERR_FORMAT, 0, "%s: __metadata__ \"%.60s\" is not a string", path, key);
    return STK_OK;
}

static stk_status parse_header(struct st_file *f, struct stk_error *err)
{
    size_t n = json_object_size(f->header);
    f->tensors = sys_calloc(n + 1, sizeof *f->tensors);
    f->by_name = sys_calloc(n + 1, sizeof *f->by_name);
    if (!f->tensors || !f->by_name) return files_no_memory(err, f->path);
    const char *key;
    json_t *value;
    json_object_foreach(f->header, key, value)
    {
        if (strcmp(key, "__metadata__") == 0) {
            STK_TRY(check_metadata(f->path, value, err));
            continue;
        }
        f->n++; /* counted first, so that st_close frees a half-made one */
        STK_TRY(parse_tensor(f->path, key, value, &f->tensors[f->n - 1], err));
    }
    if (f->n > 1) qsort(f->tensors, f->n, sizeof *f->tensors, by_offset);
    for (uint32_t i = 0; i < f->n; i++) f->by_name[i] = &f->tensors[i];
    st_sort_by_name(f->by_name, f->n);
    return STK_OK;
}

/* Back to back from the first byte to the last; offsets become absolute. */
static stk_status check_layout(struct st_file *f, struct stk_error *err)
{
    uint64_t at = 0, data_bytes = f->file_bytes - f->data_at;
    for (uint32_t i = 0; i < f->n; i++) {
        struct st_tensor *t = &f->tensors[i];
        if (t->offset_bytes != at)
            return stk_error_set(err, STK_ERR_FORMAT, 0,
                                 "%s: tensor %.100s begins at byte %" PRIu64
                                 " of the data, %s before ends at %" PRIu64 ": there is %s",
                                 f->path, t->name, t->offset_bytes, i ? "the one" : "what comes",
                                 at, t->offset_bytes > at ? "a hole" : "an overlap");
        at += t->size_bytes; /* no overflow: equal to its end offset, which fitted 63 bits */
        if (at > data_bytes)
            return stk_error_set(err, STK_ERR_FORMAT, 0,
                                 "%s: is truncated: tensor %.100s ends at byte %" PRIu64
                                 " of the file, which has %" PRIu64 "; download it again",
                                 f->path, t->name, f->data_at + at, f->file_bytes);
        t->offset_bytes += f->data_at;
    }
    if (at != data_bytes)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: has %" PRIu64
                             " trailing bytes after its last tensor: the header describes %" PRIu64
                             " bytes, the file has %" PRIu64 "; download it again",
                             f->path, data_bytes - at, f->data_at + at, f->file_bytes);
    return STK_OK;
}

/* --- open and read ---------------------------------------------------------------------------- */

static stk_status read_exact(struct st_file *f, void *buf, uint64_t size_bytes,
                             uint64_t offset_bytes, struct stk_error *err)
{
    int64_t got = sys_read_full(f->fd, buf, size_bytes, offset_bytes);
    if (got < 0)
        return stk_error_set(err, STK_ERR_IO, errno,
                             "%s: cannot read %" PRIu64 " bytes at %" PRIu64 ": %s", f->path,
                             size_bytes, offset_bytes, strerror(errno));
    if ((uint64_t)got < size_bytes)
        return stk_error_set(err, STK_ERR_CORRUPT, 0,
                             "%s: ended at byte %" PRIu64 " where it had %" PRIu64
                             " when it was opened",
                             f->path, offset_bytes + (uint64_t)got, f->file_bytes);
    return STK_OK;
}

static stk_status read_header_length(struct st_file *f, uint64_t *out, struct stk_error *err)
{
    char head[512] = ""; /* a pointer file fits */
    uint64_t n = f->file_bytes < sizeof head - 1 ? f->file_bytes : sizeof head - 1;
    STK_TRY(read_exact(f, head, n, 0, err));
    const char *kind = files_sniff(head, n), *size = kind ? strstr(head, "\nsize ") : NULL;
    if (size)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: holds %" PRIu64 " bytes where %llu were expected: it is %s",
                             f->path, f->file_bytes, strtoull(size + 6, NULL, 10), kind);
    if (kind)
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: holds %" PRIu64 " bytes and is %s",
                             f->path, f->file_bytes, kind);
    if (f->file_bytes < 10)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: holds %" PRIu64
                             " bytes, a safetensors file has 10 or more; download it again",
                             f->path, f->file_bytes);
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) length = length << 8 | (unsigned char)head[i];
    if (length > ST_HEADER_MAX)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: is not a safetensors file: its header would have %" PRIu64
                             " bytes (at most %llu)",
                             f->path, length, ST_HEADER_MAX);
    if (length > f->file_bytes - 8)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: is truncated within its header: expected at least %" PRIu64
                             " bytes, found %" PRIu64 "; download it again",
                             f->path, length + 8, f->file_bytes);
    if (length < 2 || head[8] != '{')
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: is not a safetensors file: its header does not begin with \"{\"",
                             f->path);
    *out = length;
    return STK_OK;
}

static stk_status open_checked(struct st_file *f, struct stk_error *err)
{
    f->fd = sys_open(f->path, O_RDONLY | O_NONBLOCK, 0); /* a pipe must not block */
    if (f->fd < 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot open for reading: %s", f->path,
                             strerror(errno));
    struct stat st;
    if (fstat(f->fd, &st) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot ask for the size: %s", f->path,
                             strerror(errno));
    if (!S_ISREG(st.st_mode))
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: is not a regular file", f->path);
    f->file_bytes = (uint64_t)st.st_size;
    uint64_t length = 0;
    STK_TRY(read_header_length(f, &length, err));
    char *text = sys_calloc(1, (size_t)length + 1), *what = sys_format("%s: header", f->path);
    stk_status status =
        text && what ? read_exact(f, text, length, 8, err) : files_no_memory(err, f->path);
    if (status == STK_OK) status = files_parse_json(what, text, length, 4, &f->header, err);
    sys_free(text);
    sys_free(what);
    STK_TRY(status);
    f->data_at = 8 + length;
    STK_TRY(parse_header(f, err));
    return check_layout(f, err);
}

stk_status st_open(const char *path, struct st_file **out, struct stk_error *err)
{
    *out = NULL;
    struct st_file *f = sys_calloc(1, sizeof *f);
    if (!f) return files_no_memory(err, path);
    f->fd = -1;
    f->path = sys_strdup(path);
    stk_status status = f->path ? open_checked(f, err) : files_no_memory(err, path);
    if (status != STK_OK) {
        st_close(f);
        return status;
    }
    *out = f;
    return STK_OK;
}

void st_close(struct st_file *f)
{
    if (!f) return;
    sys_close(f->fd);
    for (uint32_t i = 0; i < f->n; i++) sys_free(f->tensors[i].name);
    sys_free(f->tensors);
    sys_free(f->by_name);
    json_decref(f->header);
    sys_free(f->path);
    sys_free(f);
}

uint32_t st_count(const struct st_file *f) { return f->n; }

const struct st_tensor *st_at(const struct st_file *f, uint32_t i)
{
    STK_ASSERT(i < f->n);
    return &f->tensors[i];
}

const struct st_tensor *st_find(const struct st_file *f, const char *name)
{
    return st_find_by_name(f->by_name, f->n, name);
}

const char *st_metadata(const struct st_file *f, const char *key)
{
    return json_string_value(json_object_get(json_object_get(f->header, "__metadata__"), key));
}

stk_status st_read(struct st_file *f, const struct st_tensor *t, uint64_t offset_bytes,
                   uint64_t size_bytes, void *buf, struct stk_error *err)
{
    if (offset_bytes > t->size_bytes || size_bytes > t->size_bytes - offset_bytes)
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "%s: tensor %.100s: a read of %" PRIu64 " bytes at %" PRIu64
                             " leaves its %" PRIu64 " bytes",
                             f->path, t->name, size_bytes, offset_bytes, t->size_bytes);
    /* large pieces are read in order: the next one comes while this one is worked on */
    if (size_bytes >= READ_AHEAD_MIN)
        sys_read_ahead(f->fd, t->offset_bytes + offset_bytes, 2 * size_bytes);
    return read_exact(f, buf, size_bytes, t->offset_bytes + offset_bytes, err);
}

void st_file_number(struct st_file *f, uint32_t file)
{
    for (uint32_t i = 0; i < f->n; i++) f->tensors[i].file = file;
}

const char *st_file_path(const struct st_file *f) { return f->path; }
