/* formats/safetensors_write.c - writer of one safetensors file.
 *
 * Owns: the partial file until it is renamed. Must not know: models, what the tensors mean.
 * Layout: declared order, but wider dtypes first: together with a header padded to 8 bytes every
 * tensor is then aligned to its element, which readers that view a mapped file need. Indices stay
 * those of the declarations.
 * Written ranges are kept per tensor as sorted, merged intervals; writing in order keeps one. A
 * range may be written twice. With sums, each interval has its CRC, joined when two meet.
 * Thread: one at a time per object; blocking. */
#include "formats/safetensors_impl.h"

#include "base/sys.h"
#include "formats/crc32.h"
#include "formats/direct.h"
#include "formats/files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct range {
    uint64_t begin, end;
    uint32_t crc; /* with sums */
};

struct declared {
    struct st_tensor t; /* offset_bytes: relative to the data until begin, then absolute */
    struct range *written; /* sorted, disjoint, not touching */
    uint32_t n_written, room;
    bool rewritten; /* some of it twice: the intervals' sums mean nothing */
};

struct st_writer {
    char *path, *partial;
    char **metadata; /* alternating key, value; n_metadata of them */
    uint32_t n_metadata;
    struct declared *v;
    uint32_t n, room;
    uint64_t total_bytes; /* from begin on */
    int fd; /* -1 before begin */
    struct direct direct;
    struct crc32_tables *tables; /* NULL: no sums */
    uint32_t header_crc;
    uint32_t n_added; /* added and not yet written, by place in the file */
    uint64_t at[DIRECT_PARTS_MAX];
    struct iovec part[DIRECT_PARTS_MAX];
};

/* --- header: emitted once to count and once to fill ------------------------------------------- */

struct sink {
    char *out;
    uint64_t n;
}; /* out NULL: count only */

static void emit(struct sink *s, const char *text, size_t size)
{
    if (s->out) memcpy(s->out + s->n, text, size);
    s->n += size;
}

static void emit_text(struct sink *s, const char *text) { emit(s, text, strlen(text)); }

static void emit_number(struct sink *s, uint64_t v)
{
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%" PRIu64, v);
    emit(s, digits, (size_t)n);
}

/* RFC 8259 section 7: quotation mark, backslash and control characters are escaped; the rest is
 * UTF-8 as it is. */
static void emit_string(struct sink *s, const char *text)
{
    emit_text(s, "\"");
    for (const char *p = text; *p; p++) {
        unsigned char c = (unsigned char)*p;
        char escape[8];
        if (c == '"' || c == '\\') {
            escape[0] = '\\', escape[1] = *p;
            emit(s, escape, 2);
        } else if (c < 0x20) {
            emit(s, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", c));
        } else {
            emit(s, p, 1);
        }
    }
    emit_text(s, "\"");
}

/* Data offsets follow from the declarations alone; returns the bytes of data. */
static uint64_t place(struct st_writer *w)
{
    uint64_t at = 0;
    for (uint32_t width = 8; width >= 1; width /= 2)
        for (uint32_t i = 0; i < w->n; i++) {
            if (st_dtype_bytes(w->v[i].t.dtype) != width) continue;
            w->v[i].t.offset_bytes = at;
            at += w->v[i].t.size_bytes;
        }
    return at;
}

static void emit_tensor(struct sink *s, const struct st_tensor *t)
{
    emit_string(s, t->name);
    emit_text(s, ":{\"dtype\":\"");
    emit_text(s, st_dtype_name(t->dtype));
    emit_text(s, "\",\"shape\":[");
    for (uint32_t d = 0; d < t->rank; d++) {
        if (d) emit_text(s, ",");
        emit_number(s, t->shape[d]);
    }
    emit_text(s, "],\"data_offsets\":[");
    emit_number(s, t->offset_bytes);
    emit_text(s, ",");
    emit_number(s, t->offset_bytes + t->size_bytes);
    emit_text(s, "]}");
}

/* The JSON with its padding; the caller adds the eight bytes of the length. */
static void emit_header(const struct st_writer *w, struct sink *s)
{
    const char *separator = "";
    emit_text(s, "{");
    if (w->n_metadata) {
        emit_text(s, "\"__metadata__\":{");
        for (uint32_t i = 0; i < w->n_metadata; i += 2) {
            if (i) emit_text(s, ",");
            emit_string(s, w->metadata[i]);
            emit_text(s, ":");
            emit_string(s, w->metadata[i + 1]);
        }
        emit_text(s, "}");
        separator = ",";
    }
    for (uint32_t width = 8; width >= 1; width /= 2)
        for (uint32_t i = 0; i < w->n; i++) {
            if (st_dtype_bytes(w->v[i].t.dtype) != width) continue;
            emit_text(s, separator);
            emit_tensor(s, &w->v[i].t);
            separator = ",";
        }
    emit_text(s, "}");
    while ((s->n + 8) % (w->direct.bounce ? DIRECT_ALIGN : 8)) emit_text(s, " ");
}

/* --- declarations ----------------------------------------------------------------------------- */

static void free_writer(struct st_writer *w)
{
    for (uint32_t i = 0; i < w->n; i++) {
        sys_free(w->v[i].t.name);
        sys_free(w->v[i].written);
    }
    for (uint32_t i = 0; i < w->n_metadata; i++) sys_free(w->metadata[i]);
    direct_close(&w->direct);
    sys_free(w->tables);
    sys_free(w->metadata);
    sys_free(w->v);
    sys_free(w->path);
    sys_free(w->partial);
    sys_free(w);
}

static stk_status copy_metadata(struct st_writer *w, const char *const *metadata,
                                struct stk_error *err)
{
    uint32_t n = 0;
    while (metadata && metadata[n]) n++;
    STK_ASSERT(n % 2 == 0);
    w->metadata = sys_calloc(n + 1, sizeof *w->metadata);
    if (!w->metadata) return files_no_memory(err, w->path);
    for (uint32_t i = 0; i < n; i++) {
        w->metadata[i] = sys_strdup(metadata[i]);
        if (!w->metadata[i]) return files_no_memory(err, w->path);
        w->n_metadata++;
    }
    return STK_OK;
}

stk_status st_writer_new(const char *path, const char *const *metadata, struct st_writer **out,
                         struct stk_error *err)
{
    *out = NULL;
    struct st_writer *w = sys_calloc(1, sizeof *w);
    if (!w) return files_no_memory(err, path);
    w->fd = w->direct.fd = -1;
    w->path = sys_strdup(path);
    w->partial = sys_format("%s.partial", path);
    stk_status status =
        w->path && w->partial ? copy_metadata(w, metadata, err) : files_no_memory(err, path);
    if (status != STK_OK) {
        free_writer(w);
        return status;
    }
    *out = w;
    return STK_OK;
}

stk_status st_writer_sums(struct st_writer *w, struct stk_error *err)
{
    if (!w->tables) w->tables = sys_calloc(1, sizeof *w->tables);
    if (!w->tables) return files_no_memory(err, w->path);
    crc32_prepare(w->tables);
    return STK_OK;
}

void st_writer_direct(struct st_writer *w, void *bounce, uint64_t bounce_bytes)
{
    STK_ASSERT(w->fd < 0 && (uintptr_t)bounce % DIRECT_ALIGN == 0);
    STK_ASSERT(bounce_bytes > 0 && bounce_bytes % DIRECT_ALIGN == 0);
    w->direct.bounce = bounce;
    w->direct.bounce_bytes = bounce_bytes;
}

static bool valid_utf8(const char *text)
{
    json_t *s = json_string(text);
    json_decref(s);
    return s != NULL;
}

stk_status st_writer_declare(struct st_writer *w, const char *name, enum st_dtype dtype,
                             uint32_t rank, const uint64_t *shape, uint32_t *out_index,
                             struct stk_error *err)
{
    STK_ASSERT((unsigned)dtype < ST_DTYPE_N && rank <= ST_RANK_MAX);
    if (w->fd >= 0)
        return stk_error_set(err, STK_ERR_STATE, 0, "%s: %.100s is declared after writing began",
                             w->path, name);
    if (!*name || strcmp(name, "__metadata__") == 0 || !valid_utf8(name))
        return stk_error_set(err, STK_ERR_CONFIG, 0, "%s: \"%.100s\" cannot be a tensor's name",
                             w->path, name);
    if (w->n == w->room) {
        uint32_t room = w->room ? 2 * w->room : 16;
        struct declared *v = sys_realloc(w->v, room * sizeof *v);
        if (!v) return files_no_memory(err, w->path);
        w->v = v;
        w->room = room;
    }
    struct declared d = { .t = { .dtype = dtype, .rank = rank, .n_elements = 1 } };
    bool over = false;
    for (uint32_t i = 0; i < rank; i++) {
        d.t.shape[i] = shape[i];
        over |= shape[i] > INT64_MAX ||
                __builtin_mul_overflow(d.t.n_elements, shape[i], &d.t.n_elements);
    }
    over |=
        __builtin_mul_overflow(d.t.n_elements, (uint64_t)st_dtype_bytes(dtype), &d.t.size_bytes) ||
        d.t.size_bytes > INT64_MAX / 2;
    if (over)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "%s: tensor %.100s is too large for a file",
                             w->path, name);
    d.t.name = sys_strdup(name);
    if (!d.t.name) return files_no_memory(err, w->path);
    w->v[w->n] = d;
    *out_index = w->n++;
    return STK_OK;
}

uint64_t st_writer_bytes(const struct st_writer *w)
{
    if (w->fd >= 0) return w->total_bytes;
    struct sink s = { NULL, 0 };
    /* Offsets mean nothing before begin, so that placing them here changes nothing a caller sees.
     * */
    uint64_t data = place((struct st_writer *)(uintptr_t)w);
    emit_header(w, &s);
    return 8 + s.n + data;
}

/* --- writing ---------------------------------------------------------------------------------- */

static stk_status check_names(const struct st_writer *w, struct stk_error *err)
{
    const struct st_tensor **v = sys_calloc((size_t)w->n + 1, sizeof *v);
    if (!v) return files_no_memory(err, w->path);
    for (uint32_t i = 0; i < w->n; i++) v[i] = &w->v[i].t;
    st_sort_by_name(v, w->n);
    stk_status status = STK_OK;
    for (uint32_t i = 1; i < w->n && status == STK_OK; i++)
        if (strcmp(v[i - 1]->name, v[i]->name) == 0)
            status = stk_error_set(err, STK_ERR_CONFIG, 0, "%s: tensor %.100s is declared twice",
                                   w->path, v[i]->name);
    sys_free(v);
    return status;
}

static stk_status write_failed(const struct st_writer *w, int os_errno, const char *doing,
                               struct stk_error *err)
{
    if (os_errno == ENOSPC || os_errno == EDQUOT)
        return stk_error_set(
            err, STK_ERR_NOSPACE, os_errno,
            "%s: cannot %s: the disk is full; free room on it or choose another folder", w->path,
            doing);
    return stk_error_set(err, STK_ERR_IO, os_errno, "%s: cannot %s: %s", w->path, doing,
                         strerror(os_errno));
}

/* Room for the whole file at once, so that a full disk shows here and not after hours. */
static stk_status reserve(struct st_writer *w, uint64_t total, struct stk_error *err)
{
    int os_errno = sys_fallocate(w->fd, total);
    if (os_errno == 0) return STK_OK;
    if (os_errno != ENOSPC && os_errno != EDQUOT && os_errno != EOPNOTSUPP && os_errno != EINVAL)
        return write_failed(w, os_errno, "reserve room", err);
    int64_t room = sys_disk_free(w->partial);
    /* this file system reserves nothing */
    if (os_errno != ENOSPC && os_errno != EDQUOT && (room < 0 || (uint64_t)room >= total))
        return STK_OK;
    return stk_error_set(err, STK_ERR_NOSPACE, os_errno,
                         "%s: needs %" PRIu64 " bytes, the disk has %" PRId64
                         " free; free room on it or choose another folder",
                         w->path, total, room < 0 ? 0 : room);
}

stk_status st_writer_begin(struct st_writer *w, struct stk_error *err)
{
    if (w->fd >= 0)
        return stk_error_set(err, STK_ERR_STATE, 0, "%s: writing began already", w->path);
    STK_TRY(check_names(w, err));
    uint64_t data = place(w);
    struct sink s = { NULL, 0 };
    emit_header(w, &s);
    if (s.n > ST_HEADER_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s: the header of %u tensors needs %" PRIu64
                             " bytes, at most %llu are allowed; write shards",
                             w->path, w->n, s.n, ST_HEADER_MAX);
    uint64_t length = s.n;
    w->total_bytes = 8 + length + data;
    char *header = sys_calloc(1, (size_t)length + 8);
    if (!header) return files_no_memory(err, w->path);
    for (int i = 0; i < 8; i++) header[i] = (char)(length >> (8 * i));
    s = (struct sink){ header + 8, 0 };
    emit_header(w, &s);
    for (uint32_t i = 0; i < w->n; i++) w->v[i].t.offset_bytes += 8 + length;
    stk_status status = STK_OK;
    w->fd = sys_open(w->partial, O_RDWR | O_CREAT | O_TRUNC, 0666);
    if (w->fd < 0) status = write_failed(w, errno, "create", err);
    if (status == STK_OK) status = reserve(w, w->total_bytes, err);
    if (status == STK_OK) {
        int64_t done = sys_write_full(w->fd, header, 8 + length, 0);
        if (done < 0 || (uint64_t)done < 8 + length)
            status = write_failed(w, done < 0 ? errno : EIO, "write the header", err);
    }
    if (status == STK_OK && w->direct.bounce)
        direct_open(&w->direct, w->partial, w->direct.bounce, w->direct.bounce_bytes);
    if (w->tables) w->header_crc = crc32_extend(w->tables, 0, header, 8 + length);
    sys_free(header);
    return status;
}

/* Adds [begin, end) to the sorted intervals of d, merging what touches. */
static bool mark_written(struct declared *d, uint64_t begin, uint64_t end, uint32_t crc)
{
    struct range all = { begin, end, crc };
    uint32_t i = 0;
    while (i < d->n_written && d->written[i].end < begin) i++;
    uint32_t j = i;
    for (; j < d->n_written && d->written[j].begin <= end; j++) {
        const struct range *o = &d->written[j];
        if (o->end == begin) all.crc = crc32_join(o->crc, all.crc, end - begin);
        else if (o->begin == end) all.crc = crc32_join(all.crc, o->crc, o->end - o->begin);
        else d->rewritten = true;
        if (o->begin < all.begin) all.begin = o->begin;
        if (o->end > all.end) all.end = o->end;
    }
    if (i == j && d->n_written == d->room) {
        uint32_t room = d->room ? 2 * d->room : 4;
        struct range *r = sys_realloc(d->written, room * sizeof *r);
        if (!r) return false;
        d->written = r;
        d->room = room;
    }
    memmove(d->written + i + 1, d->written + j, (d->n_written - j) * sizeof *d->written);
    d->n_written = d->n_written + 1 - (j - i);
    d->written[i] = all;
    return true;
}

uint64_t st_writer_offset(const struct st_writer *w, uint32_t index)
{
    STK_ASSERT(index < w->n && w->fd >= 0);
    return w->v[index].t.offset_bytes;
}

/* Sorted by place in the file; what goes on where the one before ends, in the file and in memory, is
 * one part with it. */
static void keep(struct st_writer *w, uint64_t at, const void *buf, uint64_t size_bytes)
{
    uint32_t i = w->n_added;
    while (i > 0 && w->at[i - 1] > at) i--;
    struct iovec *before = i > 0 ? &w->part[i - 1] : NULL;
    if (before && w->at[i - 1] + before->iov_len == at &&
        (const char *)before->iov_base + before->iov_len == buf) {
        before->iov_len += size_bytes;
        return;
    }
    memmove(w->at + i + 1, w->at + i, (w->n_added - i) * sizeof *w->at);
    memmove(w->part + i + 1, w->part + i, (w->n_added - i) * sizeof *w->part);
    w->at[i] = at;
    w->part[i] = (struct iovec){ (void *)(uintptr_t)buf, size_bytes };
    w->n_added++;
}

stk_status st_writer_add(struct st_writer *w, uint32_t index, uint64_t offset_bytes,
                         const void *buf, uint64_t size_bytes, struct stk_error *err)
{
    STK_ASSERT(index < w->n);
    struct declared *d = &w->v[index];
    if (w->fd < 0) return stk_error_set(err, STK_ERR_STATE, 0, "%s: a write before begin", w->path);
    if (offset_bytes > d->t.size_bytes || size_bytes > d->t.size_bytes - offset_bytes)
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "%s: tensor %.100s: a write of %" PRIu64 " bytes at %" PRIu64
                             " leaves its %" PRIu64 " bytes",
                             w->path, d->t.name, size_bytes, offset_bytes, d->t.size_bytes);
    if (size_bytes == 0) return STK_OK;
    uint32_t crc = w->tables ? crc32_extend(w->tables, 0, buf, size_bytes) : 0;
    if (w->n_added == DIRECT_PARTS_MAX) STK_TRY(st_writer_flush(w, err));
    if (!mark_written(d, offset_bytes, offset_bytes + size_bytes, crc))
        return files_no_memory(err, w->path);
    keep(w, d->t.offset_bytes + offset_bytes, buf, size_bytes);
    return STK_OK;
}

stk_status st_writer_flush(struct st_writer *w, struct stk_error *err)
{
    stk_status st = STK_OK;
    for (uint32_t i = 0; i < w->n_added && st == STK_OK;) {
        uint64_t size = w->part[i].iov_len;
        uint32_t k = 1;
        for (; i + k < w->n_added && w->at[i + k] == w->at[i] + size; k++)
            size += w->part[i + k].iov_len;
        int64_t done = direct_write_parts(&w->direct, w->fd, w->part + i, k, w->at[i]);
        if (done < 0 || (uint64_t)done < size)
            st = write_failed(w, done < 0 ? errno : EIO, "write", err);
        i += k;
    }
    w->n_added = 0;
    return st;
}

stk_status st_writer_write(struct st_writer *w, uint32_t index, uint64_t offset_bytes,
                           const void *buf, uint64_t size_bytes, struct stk_error *err)
{
    STK_TRY(st_writer_add(w, index, offset_bytes, buf, size_bytes, err));
    return st_writer_flush(w, err);
}

/* --- the end ---------------------------------------------------------------------------------- */

static stk_status check_covered(const struct st_writer *w, struct stk_error *err)
{
    for (uint32_t i = 0; i < w->n; i++) {
        const struct declared *d = &w->v[i];
        if (d->t.size_bytes == 0) continue;
        if (d->n_written == 1 && d->written[0].begin == 0 && d->written[0].end == d->t.size_bytes)
            continue;
        uint64_t hole = d->n_written && d->written[0].begin == 0 ? d->written[0].end : 0;
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "%s: tensor %.100s was not written from byte %" PRIu64
                             " of its %" PRIu64,
                             w->path, d->t.name, hole, d->t.size_bytes);
    }
    return STK_OK;
}

bool st_writer_sum(const struct st_writer *w, uint64_t *size_bytes, uint32_t *crc)
{
    bool known = w->tables != NULL && w->fd >= 0;
    *crc = w->header_crc;
    *size_bytes = w->total_bytes;
    for (uint32_t width = 8; width >= 1; width /= 2)
        for (uint32_t i = 0; i < w->n && known; i++) {
            const struct declared *d = &w->v[i];
            if (st_dtype_bytes(d->t.dtype) != width || d->t.size_bytes == 0) continue;
            known = !d->rewritten && d->n_written == 1 && d->written[0].begin == 0 &&
                    d->written[0].end == d->t.size_bytes;
            if (known) *crc = crc32_join(*crc, d->written[0].crc, d->t.size_bytes);
        }
    return known;
}

stk_status st_writer_finish(struct st_writer *w, struct stk_error *err)
{
    stk_status status =
        w->fd >= 0 ? st_writer_flush(w, err)
                   : stk_error_set(err, STK_ERR_STATE, 0, "%s: finished before begin", w->path);
    if (status == STK_OK) status = check_covered(w, err);
    char *parent = files_parent(w->path);
    if (status == STK_OK && !parent) status = files_no_memory(err, w->path);
    if (status == STK_OK && sys_fsync(w->fd) != 0) status = write_failed(w, errno, "flush", err);
    if (status == STK_OK && sys_rename(w->partial, w->path) != 0)
        status = write_failed(w, errno, "rename the finished file", err);
    if (status == STK_OK) {
        if (sys_fsync_dir(parent) != 0) status = write_failed(w, errno, "flush its folder", err);
        sys_close(w->fd);
        free_writer(w);
    } else {
        st_writer_abandon(w);
    }
    sys_free(parent);
    return status;
}

void st_writer_abandon(struct st_writer *w)
{
    if (!w) return;
    if (w->fd >= 0) {
        sys_close(w->fd);
        (void)unlink(w->partial);
    }
    free_writer(w);
}
