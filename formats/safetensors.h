/* formats/safetensors.h - streaming reader and writer of safetensors files
 * (huggingface/safetensors, README "Format"): 8 bytes little-endian header length, JSON header
 * {name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}, data without holes.
 *
 * READER. Everything is checked when the file is opened, before any byte of data is used: header
 * length against the file (and 100 MB), JSON, known dtype, shape x dtype == length, offsets in
 * order, inside the file, without holes or overlaps, no trailing bytes, no duplicate names
 * (CKP-22..26). Git-LFS pointers and HTML pages are named as such. Data is read with pread into the
 * caller's buffer; nothing is mapped.
 * A SET is a folder's model: `model.safetensors.index.json` with its shards (the index decides;
 * missing shard, tensor not in its shard, shard tensors not in the index: refused) or a single
 * `model.safetensors`; neither: refused, naming what lies there.
 *
 * WRITER. Tensors are declared first (names, dtypes, shapes: so the header and all offsets are
 * known), then data is written in any order by pieces, then finished (every byte must have been
 * written; fsync). The file is made under the final name + ".partial" and renamed at finish, or
 * removed by abandon. ENOSPC at once: the space is preallocated at begin.
 *
 * Threads: one object, one thread at a time. Blocking. */
#ifndef FORMATS_SAFETENSORS_H
#define FORMATS_SAFETENSORS_H

#include "base/status.h"

enum st_dtype {
    ST_BOOL,
    ST_U8,
    ST_I8,
    ST_U16,
    ST_I16,
    ST_F16,
    ST_BF16,
    ST_U32,
    ST_I32,
    ST_F32,
    ST_U64,
    ST_I64,
    ST_F64,
    ST_DTYPE_N
};
const char *st_dtype_name(enum st_dtype t); /* "BF16" */
bool st_dtype_parse(const char *name, enum st_dtype *out);
uint32_t st_dtype_bytes(enum st_dtype t);

#define ST_RANK_MAX 8

struct st_tensor {
    char *name;                  /* owned by the file or set */
    enum st_dtype dtype;
    uint32_t rank;
    uint64_t shape[ST_RANK_MAX];
    uint64_t n_elements, size_bytes;
    uint64_t offset_bytes;       /* in the file, absolute */
    uint32_t file;               /* set: which shard */
};

struct st_file;
stk_status st_open(const char *path, struct st_file **out, struct stk_error *err);
void st_close(struct st_file *f);
uint32_t st_count(const struct st_file *f);
/* in order of offset */
const struct st_tensor *st_at(const struct st_file *f, uint32_t i);
const struct st_tensor *st_find(const struct st_file *f, const char *name);  /* NULL: none */
const char *st_metadata(const struct st_file *f, const char *key);           /* NULL: none */
/* Reads size_bytes from byte offset_bytes of the tensor's data. Out of range: STK_ERR_STATE. Short:
 * STK_ERR_CORRUPT (file changed since open). */
stk_status st_read(struct st_file *f, const struct st_tensor *t, uint64_t offset_bytes,
                   uint64_t size_bytes, void *buf, struct stk_error *err);

struct st_set;
stk_status st_set_open(const char *folder, struct st_set **out, struct stk_error *err);
void st_set_close(struct st_set *s);
uint32_t st_set_count(const struct st_set *s);
/* order of the files, then of offsets */
const struct st_tensor *st_set_at(const struct st_set *s, uint32_t i);
const struct st_tensor *st_set_find(const struct st_set *s, const char *name);
const char *st_set_path(const struct st_set *s, uint32_t file);
uint32_t st_set_files(const struct st_set *s);
stk_status st_set_read(struct st_set *s, const struct st_tensor *t, uint64_t offset_bytes,
                       uint64_t size_bytes, void *buf, struct stk_error *err);

struct st_writer;
/* `metadata`: NULL-terminated array of alternating key, value; or NULL. */
stk_status st_writer_new(const char *path, const char *const *metadata, struct st_writer **out,
                         struct stk_error *err);
stk_status st_writer_declare(struct st_writer *w, const char *name, enum st_dtype dtype,
                             uint32_t rank, const uint64_t *shape, uint32_t *out_index,
                             struct stk_error *err);
/* Total file size, known after the declarations. */
uint64_t st_writer_bytes(const struct st_writer *w);
/* Before begin. sums: the file's checksum is gathered from what is written (st_writer_sum). direct:
 * the data are written past the page cache where the file system allows it, and begin at a multiple
 * of 4096 (the header is padded); `bounce`: aligned to 4096, a multiple of it, borrowed until the
 * end. */
stk_status st_writer_sums(struct st_writer *w, struct stk_error *err);
void st_writer_direct(struct st_writer *w, void *bounce, uint64_t bounce_bytes);
/* creates, preallocates, writes the header */
stk_status st_writer_begin(struct st_writer *w, struct stk_error *err);
stk_status st_writer_write(struct st_writer *w, uint32_t index, uint64_t offset_bytes,
                           const void *buf, uint64_t size_bytes, struct stk_error *err);
/* As st_writer_write, but `buf` may be written later: borrowed until the next flush. Summed at once.
 * Ranges that follow one another in the file, in whatever order they come, go with one request. Two
 * between one flush and the next do not overlap. */
stk_status st_writer_add(struct st_writer *w, uint32_t index, uint64_t offset_bytes,
                         const void *buf, uint64_t size_bytes, struct stk_error *err);
stk_status st_writer_flush(struct st_writer *w, struct stk_error *err);
/* After begin: where the tensor's first byte is in the file. */
uint64_t st_writer_offset(const struct st_writer *w, uint32_t index);
/* Everything is written: size and CRC-32 (formats/crc32.h) that the file will have. False: no sums
 * were asked for, something is missing, or a byte was written twice. */
bool st_writer_sum(const struct st_writer *w, uint64_t *size_bytes, uint32_t *crc);
/* flushes, checks coverage, fsync, rename, fsync of the folder; frees w on success and failure */
stk_status st_writer_finish(struct st_writer *w, struct stk_error *err);
/* removes the partial file, frees; NULL allowed */
void st_writer_abandon(struct st_writer *w);

#endif
