/* formats/files.h - small whole files and JSON documents, for the readers of this room only.
 *
 * JSON is read strictly: duplicate keys, NaN, infinities, integers beyond 64 bits, text after the
 * document and nesting deeper than `depth_max` are refused (jansson's parser recurses, so depth is
 * bounded before it runs).
 * Blocking; any thread. */
#ifndef FORMATS_FILES_H
#define FORMATS_FILES_H

#include "base/status.h"
#include <jansson.h>

/* Reads a regular file of at most max_bytes; `out` (sys_free) is followed by one zero byte that
 * is not counted. */
stk_status files_read(const char *path, uint64_t max_bytes, char **out, uint64_t *out_bytes,
                      struct stk_error *err);
/* Parses `text`. `what` names the text in the sentence ("PATH" or "PATH: header"). The code of a
 * failure is STK_ERR_FORMAT. */
stk_status files_parse_json(const char *what, const char *text, uint64_t size_bytes,
                            uint32_t depth_max, json_t **out, struct stk_error *err);
/* Both; the document must be an object. */
stk_status files_read_json(const char *path, uint64_t max_bytes, uint32_t depth_max, json_t **out,
                           struct stk_error *err);
/* Writes a text and flushes it to the disk. Not atomic: for folders that are renamed as a whole.
 * A failure removes the file. */
stk_status files_write(const char *path, const char *text, uint64_t size_bytes,
                       struct stk_error *err);
/* Writes PATH.partial, flushes it, renames it to PATH and flushes the folder. */
stk_status files_replace(const char *path, const char *text, uint64_t size_bytes,
                         struct stk_error *err);
/* The folder that holds path ("." if none), sys_free; NULL: no memory. */
char *files_parent(const char *path);
/* Says what a file that was no model file seems to be: "a Git LFS pointer ...", "an HTML page
 * ..."; NULL: nothing known. */
const char *files_sniff(const char *head, uint64_t size_bytes);
/* Up to `max` names of the folder, sorted, joined by ", "; sys_free; NULL: no memory or
 * unreadable. */
char *files_list(const char *folder, uint32_t max);
stk_status files_no_memory(struct stk_error *err, const char *what);

#endif
