/* engine/ckpt_files.h - the safetensors files of one checkpoint while they are written: by stk_save
 * (checkpoint.c, application's thread) or by a checkpoint under way (save.c, its lane). Both give the
 * same bytes: which tensor lies in which file, and where, depends on the layout alone; chunks may
 * come in any order. */
#ifndef ENGINE_CKPT_FILES_H
#define ENGINE_CKPT_FILES_H

#include "engine/state.h"

struct ckpt_files;

/* Entries of a trained tensor: fp32 master, both moments as they are kept (F32, BF16 or U8), and with
 * 8-bit codes their scales, F32, one for each 64 elements (offload/adam_narrow.h). */
enum { CKPT_ENTRIES = 5 };
extern const char *const ckpt_suffix[CKPT_ENTRIES];

/* Scratch memory that writing needs, aligned to 4096; borrowed from open to the end. */
uint64_t ckpt_scratch_bytes(const stk_engine *e);
/* Creates every file in `folder` with all of its room, so that a full disk shows here. One thread at
 * a time; blocking. On an error *out is NULL and files may be left in the folder. */
stk_status ckpt_files_open(const stk_engine *e, const char *folder, void *scratch,
                           struct ckpt_files **out, struct stk_error *err);
/* Takes one chunk: each once. Its view is borrowed until the next flush, so that what follows in the
 * file from several chunks goes with one request. */
stk_status ckpt_files_put(struct ckpt_files *f, const struct stk_chunk *c,
                          const struct state_view *v, struct stk_error *err);
stk_status ckpt_files_flush(struct ckpt_files *f, struct stk_error *err);
/* All chunks were put and flushed: flushes, closes, frees, also on an error; adds "files" to doc (sizes and
 * checksums: formats/manifest.h). */
stk_status ckpt_files_finish(struct ckpt_files *f, struct json_t *doc, struct stk_error *err);
void ckpt_files_abandon(struct ckpt_files *f); /* NULL allowed */

#endif
