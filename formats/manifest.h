/* formats/manifest.h - checkpoint folders: a manifest.json beside safetensors files, written beside
 * the final name and renamed (CKP-16, CKP-17).
 *
 * LAYOUT  <dir>/step-00000100/manifest.json, state-00001.safetensors ... Each tensor of the model
 *         is there under its own name three times: "<name>" (F32 master), "<name>.exp_avg",
 *                 "<name>.exp_avg_sq" (F32, BF16, or U8 with "<name>.exp_avg.absmax" and
 *                 "..._sq.absmax", F32); frozen ones once (BF16 or F16). manifest.json: format
 *                 version, step, counters, files with size and CRC-32 (IEEE) of every file,
 *         numerics key, data position, loss scale, per-tensor step counts, and the client's own
 *                 JSON object.
 * A folder is complete when its manifest is there and agrees with the files (names, sizes,
 * checksums are verified at open; CKP-07, "cut at every 1/20 of its length"). Partial folders are
 * named `.partial-step-...`; they are removed by the next save and by manifest_clean. */
#ifndef FORMATS_MANIFEST_H
#define FORMATS_MANIFEST_H

#include "base/status.h"
#include <jansson.h>

#define MANIFEST_VERSION 1

/* Begins a checkpoint folder: removes left-overs of the same step, makes `<dir>/.partial-step-N`.
 * `out_path` (sys_free) is where to write files. */
stk_status manifest_begin(const char *dir, uint64_t step, char **out_path, struct stk_error *err);
/* Writes manifest.json (doc plus "files": each file of the folder with size and crc32), fsyncs all,
 * but for what doc's own "files" describe with the size they have: whoever wrote them has summed and
 * flushed them. Renames to `<dir>/step-N`, fsyncs dir. An older folder of the same step is replaced. On error the
 * partial folder is removed. */
stk_status manifest_commit(const char *dir, uint64_t step, const char *partial_path, json_t *doc,
                           struct stk_error *err);
void manifest_abandon(const char *partial_path);
/* Removes partial folders, which a killed run left; *names (sys_free): which, with commas between; NULL:
 * there were none. */
stk_status manifest_clean(const char *dir, char **names, struct stk_error *err);
/* Newest complete checkpoint in dir: path (sys_free) and step. STK_END: there is none. Incomplete
 * ones are passed over and reported in `note` (sys_free, may be NULL). */
stk_status manifest_newest(const char *dir, char **out_path, uint64_t *out_step, char **note,
                           struct stk_error *err);
/* Reads and verifies a checkpoint folder: manifest parse, version, every listed file present with
 * size and checksum (verify = false: sizes only). */
stk_status manifest_read(const char *path, bool verify, json_t **out_doc, struct stk_error *err);
/* Keeps the newest `keep` complete ones (0: all), removes older ones and partial folders. */
stk_status manifest_prune(const char *dir, uint32_t keep, struct stk_error *err);

#endif
