/* formats/tokens.c - token files and the windows cut from them.
 *
 * Owns: the open file, one buffer of fixed size for the pass at open, buffers of one window. Must
 * not know: models, shuffling (token_order.c).
 * Memory does not grow with the file: of the document offsets only every k-th is kept, at most
 * SAMPLES_MAX; a window reads the ones between with one pread. A window's ids are one pread, its
 * mask another.
 * Thread: one at a time per object; blocking. */
#include "formats/tokens.h"

#include "base/rng.h"
#include "base/sys.h"
#include "formats/files.h"
#include "formats/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

enum { PASS_BYTES = 1 << 20, SAMPLES_MAX = 1 << 15 };

struct tokens {
    char *path;
    struct st_file *file; /* NULL: a plain .bin */
    int fd; /* the .bin, else -1 */
    const struct st_tensor *ids, *mask, *offsets; /* of file; mask and offsets may be NULL */
    enum st_dtype dtype;
    uint64_t count, documents, hash;
    uint32_t vocab;
    uint64_t stride, n_samples; /* samples[i] = offset number i * stride */
    uint64_t *samples;
    unsigned char *buffer; /* of the last window's seq */
    uint64_t buffer_bytes;
};

/* --- raw access ------------------------------------------------------------------------------- */

static stk_status read_ids(struct tokens *t, uint64_t first, uint64_t n, void *buf,
                           struct stk_error *err)
{
    uint64_t width = st_dtype_bytes(t->dtype);
    if (t->file) return st_read(t->file, t->ids, first * width, n * width, buf, err);
    int64_t got = sys_read_full(t->fd, buf, n * width, first * width);
    if (got < 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot read: %s", t->path,
                             strerror(errno));
    if ((uint64_t)got < n * width)
        return stk_error_set(err, STK_ERR_CORRUPT, 0, "%s: became shorter after it was opened",
                             t->path);
    return STK_OK;
}

static uint64_t load_le(const unsigned char *p, uint32_t width)
{
    uint64_t v = 0;
    for (uint32_t i = 0; i < width; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

/* Id number i of a raw buffer. What does not fit 63 bits comes out negative, as an id below 0
 * does: both are refused. */
static int64_t id_at(const unsigned char *buf, uint64_t i, enum st_dtype dtype)
{
    switch (dtype) {
    case ST_U8: return buf[i];
    case ST_I8: return (int8_t)buf[i];
    case ST_U16: return (uint16_t)load_le(buf + 2 * i, 2);
    case ST_I16: return (int16_t)load_le(buf + 2 * i, 2);
    case ST_U32: return (uint32_t)load_le(buf + 4 * i, 4);
    case ST_I32: return (int32_t)load_le(buf + 4 * i, 4);
    default: return (int64_t)load_le(buf + 8 * i, 8);
    }
}

static bool is_integer(enum st_dtype t)
{
    return t == ST_U8 || t == ST_I8 || t == ST_U16 || t == ST_I16 || t == ST_U32 || t == ST_I32 ||
           t == ST_U64 || t == ST_I64;
}

/* Folds one value into the running hash: order matters, width does not. */
static uint64_t fold(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
    return hash ^ hash >> 29;
}

/* --- the pass at open ------------------------------------------------------------------------- */

static stk_status pass_ids(struct tokens *t, unsigned char *buf, struct stk_error *err)
{
    uint64_t step = PASS_BYTES / st_dtype_bytes(t->dtype);
    int64_t limit = t->vocab ? (int64_t)t->vocab : (int64_t)INT32_MAX + 1;
    if (limit > (int64_t)INT32_MAX + 1) limit = (int64_t)INT32_MAX + 1;
    for (uint64_t at = 0; at < t->count; at += step) {
        uint64_t n = t->count - at < step ? t->count - at : step;
        STK_TRY(read_ids(t, at, n, buf, err));
        for (uint64_t i = 0; i < n; i++) {
            int64_t id = id_at(buf, i, t->dtype);
            if (id < 0 || id >= limit)
                return stk_error_set(
                    err, STK_ERR_FORMAT, 0,
                    "%s: token %" PRIu64 " has the id %" PRId64 "; ids from 0 to %" PRId64
                    " were expected%s: the file was made with another tokenizer",
                    t->path, at + i, id, limit - 1, t->vocab ? " (the model's vocabulary)" : "");
            t->hash = fold(t->hash, (uint64_t)id);
        }
    }
    return STK_OK;
}

static stk_status pass_mask(struct tokens *t, unsigned char *buf, struct stk_error *err)
{
    for (uint64_t at = 0; t->mask && at < t->count; at += PASS_BYTES) {
        uint64_t n = t->count - at < PASS_BYTES ? t->count - at : PASS_BYTES;
        STK_TRY(st_read(t->file, t->mask, at, n, buf, err));
        for (uint64_t i = 0; i < n; i++) {
            if (buf[i] > 1)
                return stk_error_set(err, STK_ERR_FORMAT, 0,
                                     "%s: loss_mask of token %" PRIu64
                                     " is %u; 0 or 1 was expected",
                                     t->path, at + i, buf[i]);
            t->hash = fold(t->hash, buf[i]);
        }
    }
    return STK_OK;
}

static stk_status pass_offsets(struct tokens *t, unsigned char *buf, struct stk_error *err)
{
    if (!t->offsets) return STK_OK;
    t->stride = t->documents / SAMPLES_MAX + 1;
    t->samples = sys_calloc((size_t)(t->documents / t->stride) + 1, sizeof *t->samples);
    if (!t->samples) return files_no_memory(err, t->path);
    int64_t before = -1;
    for (uint64_t at = 0; at < t->documents; at += PASS_BYTES / 8) {
        uint64_t n = t->documents - at < PASS_BYTES / 8 ? t->documents - at : PASS_BYTES / 8;
        STK_TRY(st_read(t->file, t->offsets, at * 8, n * 8, buf, err));
        for (uint64_t i = 0; i < n; i++) {
            int64_t offset = id_at(buf, i, ST_I64);
            if (at + i == 0 && offset != 0)
                return stk_error_set(err, STK_ERR_FORMAT, 0,
                                     "%s: document_offsets begin with %" PRId64
                                     "; the first document must begin at 0",
                                     t->path, offset);
            if (offset <= before || (uint64_t)offset >= t->count)
                return stk_error_set(err, STK_ERR_FORMAT, 0,
                                     "%s: document_offsets[%" PRIu64 "] is %" PRId64
                                     " after %" PRId64
                                     "; offsets must ascend and stay below the %" PRIu64 " tokens",
                                     t->path, at + i, offset, before, t->count);
            if ((at + i) % t->stride == 0) t->samples[t->n_samples++] = (uint64_t)offset;
            t->hash = fold(t->hash, (uint64_t)offset);
            before = offset;
        }
    }
    return STK_OK;
}

static stk_status pass_all(struct tokens *t, struct stk_error *err)
{
    unsigned char *buf = sys_calloc(1, PASS_BYTES);
    if (!buf) return files_no_memory(err, t->path);
    t->hash = fold(fold(fold(1, t->count), t->mask != NULL), t->documents);
    stk_status status = pass_ids(t, buf, err);
    if (status == STK_OK) status = pass_mask(t, buf, err);
    if (status == STK_OK) status = pass_offsets(t, buf, err);
    sys_free(buf);
    t->hash = rng_hash64(t->hash);
    return status;
}

/* --- open ------------------------------------------------------------------------------------- */

static stk_status open_bin(struct tokens *t, struct stk_error *err)
{
    struct stat st;
    t->dtype = ST_U16;
    t->fd = sys_open(t->path, O_RDONLY | O_NONBLOCK, 0); /* a pipe must not block */
    if (t->fd < 0 || fstat(t->fd, &st) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot open for reading: %s", t->path,
                             strerror(errno));
    if (!S_ISREG(st.st_mode))
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: is not a regular file", t->path);
    if (st.st_size % 2 != 0)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: holds %" PRIu64
                             " bytes, an odd number; a .bin token file holds 16-bit ids",
                             t->path, (uint64_t)st.st_size);
    t->count = (uint64_t)st.st_size / 2;
    return STK_OK;
}

static stk_status check_vector(struct tokens *t, const struct st_tensor *v, bool fits,
                               const char *expected, struct stk_error *err)
{
    if (fits && v->rank == 1) return STK_OK;
    return stk_error_set(err, STK_ERR_FORMAT, 0,
                         "%s: %s has dtype %s and %u dimensions; %s in one dimension was expected",
                         t->path, v->name, st_dtype_name(v->dtype), v->rank, expected);
}

static stk_status open_safetensors(struct tokens *t, struct stk_error *err)
{
    STK_TRY(st_open(t->path, &t->file, err));
    for (uint32_t i = 0; i < st_count(t->file); i++) {
        const struct st_tensor *v = st_at(t->file, i);
        if (strcmp(v->name, "input_ids") == 0) t->ids = v;
        else if (strcmp(v->name, "loss_mask") == 0) t->mask = v;
        else if (strcmp(v->name, "document_offsets") == 0) t->offsets = v;
        else
            return stk_error_set(err, STK_ERR_FORMAT, 0,
                                 "%s: holds the tensor %.80s; only input_ids, loss_mask and "
                                 "document_offsets are known",
                                 t->path, v->name);
    }
    if (!t->ids)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: has no tensor input_ids; make token files with `stoker prepare`",
                             t->path);
    STK_TRY(check_vector(t, t->ids, is_integer(t->ids->dtype), "an integer type", err));
    if (t->mask) STK_TRY(check_vector(t, t->mask, t->mask->dtype == ST_U8, "U8", err));
    if (t->offsets) STK_TRY(check_vector(t, t->offsets, t->offsets->dtype == ST_I64, "I64", err));
    t->dtype = t->ids->dtype;
    t->count = t->ids->n_elements;
    t->documents = t->offsets ? t->offsets->n_elements : 0;
    if (t->mask && t->mask->n_elements != t->count)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: loss_mask has %" PRIu64 " entries, input_ids %" PRIu64, t->path,
                             t->mask->n_elements, t->count);
    if (t->offsets && t->documents == 0)
        return stk_error_set(
            err, STK_ERR_FORMAT, 0,
            "%s: document_offsets is empty; leave it out if there are no documents", t->path);
    return STK_OK;
}

static stk_status open_checked(struct tokens *t, struct stk_error *err)
{
    size_t n = strlen(t->path);
    if (n > 4 && strcmp(t->path + n - 4, ".bin") == 0) STK_TRY(open_bin(t, err));
    else STK_TRY(open_safetensors(t, err));
    if (t->count == 0) return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: holds no tokens", t->path);
    return pass_all(t, err);
}

stk_status tokens_open(const char *path, uint32_t vocab, struct tokens **out, struct stk_error *err)
{
    *out = NULL;
    struct tokens *t = sys_calloc(1, sizeof *t);
    if (!t) return files_no_memory(err, path);
    t->fd = -1;
    t->vocab = vocab;
    t->path = sys_strdup(path);
    stk_status status = t->path ? open_checked(t, err) : files_no_memory(err, path);
    if (status != STK_OK) {
        tokens_close(t);
        return status;
    }
    *out = t;
    return STK_OK;
}

void tokens_close(struct tokens *t)
{
    if (!t) return;
    st_close(t->file);
    sys_close(t->fd);
    sys_free(t->samples);
    sys_free(t->buffer);
    sys_free(t->path);
    sys_free(t);
}

uint64_t tokens_count(const struct tokens *t) { return t->count; }
uint64_t tokens_documents(const struct tokens *t) { return t->documents; }
uint64_t tokens_hash(const struct tokens *t) { return t->hash; }

uint64_t tokens_windows(const struct tokens *t, uint64_t seq)
{
    STK_ASSERT(seq > 0);
    return t->count / seq;
}

stk_status tokens_check_seq(const struct tokens *t, uint64_t seq, struct stk_error *err)
{
    if (seq < 2 || seq > INT32_MAX)
        return stk_error_set(
            err, STK_ERR_CONFIG, 0,
            "a sequence of %" PRIu64 " tokens has no targets; give --seq from 2 to 2^31 - 1", seq);
    if (seq <= t->count) return STK_OK;
    return stk_error_set(err, STK_ERR_CONFIG, 0,
                         "%s: holds %" PRIu64 " tokens, fewer than one sequence of %" PRIu64
                         "; give a smaller --seq or more data",
                         t->path, t->count, seq);
}

/* --- windows ---------------------------------------------------------------------------------- */

static stk_status reserve(struct tokens *t, uint64_t size_bytes, struct stk_error *err)
{
    if (size_bytes <= t->buffer_bytes) return STK_OK;
    sys_free(t->buffer);
    t->buffer_bytes = 0;
    t->buffer = sys_calloc(1, (size_t)size_bytes);
    if (!t->buffer) return files_no_memory(err, t->path);
    t->buffer_bytes = size_bytes;
    return STK_OK;
}

/* Marks first_key[k] = 1 where a document begins inside the window, k > 0. The raw offsets go
 * through the window's buffer. */
static stk_status mark_documents(struct tokens *t, uint64_t start, uint64_t seq, int32_t *first_key,
                                 struct stk_error *err)
{
    memset(first_key, 0, seq * sizeof *first_key);
    if (!t->offsets) return STK_OK;
    /* the last sample at or before start: the first offset is 0, so there is one */
    uint64_t low = 0, high = t->n_samples;
    while (high - low > 1) {
        uint64_t mid = low + (high - low) / 2;
        if (t->samples[mid] <= start) low = mid;
        else high = mid;
    }
    uint64_t room = t->buffer_bytes / 8;
    for (uint64_t at = low * t->stride; at < t->documents;) {
        uint64_t n = t->documents - at < room ? t->documents - at : room;
        STK_TRY(st_read(t->file, t->offsets, at * 8, n * 8, t->buffer, err));
        for (uint64_t i = 0; i < n; i++) {
            uint64_t offset = load_le(t->buffer + 8 * i, 8);
            if (offset >= start + seq) return STK_OK;
            if (offset > start) first_key[offset - start] = 1;
        }
        at += n;
    }
    return STK_OK;
}

stk_status tokens_window(struct tokens *t, uint64_t seq, uint64_t w, int32_t *ids, int32_t *targets,
                         int32_t *position, int32_t *first_key, uint64_t *n_targets,
                         struct stk_error *err)
{
    STK_ASSERT(seq > 0 && seq <= INT32_MAX);
    STK_ASSERT(w < t->count / seq);
    uint64_t start = w * seq, least = 4096; /* offsets are read in pieces of this room */
    STK_TRY(reserve(t, seq * 8 > least ? seq * 8 : least, err));
    STK_TRY(read_ids(t, start, seq, t->buffer, err));
    for (uint64_t k = 0; k < seq; k++) {
        int64_t id = id_at(t->buffer, k, t->dtype);
        if (id < 0 || id > INT32_MAX || (t->vocab && id >= t->vocab))
            return stk_error_set(err, STK_ERR_CORRUPT, 0,
                                 "%s: token %" PRIu64 " is %" PRId64
                                 " now: the file changed since it was opened",
                                 t->path, start + k, id);
        ids[k] = (int32_t)id;
    }
    STK_TRY(mark_documents(t, start, seq, first_key, err));
    if (t->mask) STK_TRY(st_read(t->file, t->mask, start, seq, t->buffer, err));
    uint64_t n = 0;
    for (uint64_t k = 0; k < seq; k++) {
        bool target = k + 1 < seq && !first_key[k + 1] && (!t->mask || t->buffer[k + 1]);
        targets[k] = target ? ids[k + 1] : -1;
        n += target;
    }
    int32_t begin = 0;
    for (uint64_t k = 0; k < seq; k++) {
        if (first_key[k]) begin = (int32_t)k;
        first_key[k] = begin;
        position[k] = (int32_t)k - begin;
    }
    if (n_targets) *n_targets = n;
    return STK_OK;
}
