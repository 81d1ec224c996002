/* formats/manifest.c - checkpoint folders: begun beside, committed by renaming, verified when
 * found.
 *
 * Owns: the names in a checkpoint folder and manifest.json. Must not know: tensors, steps of
 * training, tiers.
 * Names:   step-N           complete, unless it was damaged later (then it is passed over)
 *          .partial-step-N  being written, or being removed: never loaded
 *          .old-step-N      the former step-N while its replacement is renamed into place; loaded
 *          if step-N is absent (a kill in between)
 * Invariant: at every instant each checkpoint that was complete before is still found under one of
 * the first or third kind of name, until its replacement is complete and durable (CKP-16).
 * manifest.json carries the CRC-32 of every file and of itself (its other members, keys sorted,
 * without white space).
 * Thread: one process at a time per folder; blocking. */
#include "formats/manifest.h"

#include "base/sys.h"
#include "formats/crc32.h"
#include "formats/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char format_name[] = "stoker-checkpoint", manifest_name[] = "manifest.json";
static const char partial_prefix[] = ".partial-step-", old_prefix[] = ".old-step-",
                  step_prefix[] = "step-";
static const uint64_t manifest_bytes_max = 256ull << 20;
enum { DEPTH_MAX = 64, PIECE_BYTES = 1 << 20 };

/* --- names ------------------------------------------------------------------------------------ */

static char *step_path(const char *dir, const char *prefix, uint64_t step)
{
    return sys_format("%s/%s%08" PRIu64, dir, prefix, step);
}

/* Does `name` read prefix, then a step as step_path writes it? */
static bool parse_step(const char *name, const char *prefix, uint64_t *step)
{
    size_t n = strlen(prefix),
           digits = strspn(name + (strncmp(name, prefix, n) == 0 ? n : 0), "0123456789");
    if (strncmp(name, prefix, n) != 0 || digits < 8 || digits > 19 || name[n + digits] != 0 ||
        (digits > 8 && name[n] == '0'))
        return false;
    *step = strtoull(name + n, NULL, 10);
    return true;
}

/* The steps of one kind of name in dir, descending; *out is sys_free'd by the caller. A missing
 * dir has none. */
static stk_status list_steps(const char *dir, const char *prefix, uint64_t **out, size_t *out_n,
                             struct stk_error *err)
{
    *out = NULL;
    *out_n = 0;
    DIR *d = opendir(dir);
    if (!d && errno == ENOENT) return STK_OK;
    if (!d)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot read the folder: %s", dir,
                             strerror(errno));
    stk_status status = STK_OK;
    uint64_t *v = NULL, step;
    size_t n = 0, room = 0;
    for (struct dirent *e; status == STK_OK && (e = readdir(d));) {
        if (!parse_step(e->d_name, prefix, &step)) continue;
        if (n == room) {
            room = room ? 2 * room : 16;
            uint64_t *longer = sys_realloc(v, room * sizeof *v);
            if (!longer) {
                status = files_no_memory(err, dir);
                break;
            }
            v = longer;
        }
        size_t i = n++;
        for (; i > 0 && v[i - 1] < step; i--) v[i] = v[i - 1]; /* few: insertion is enough */
        v[i] = step;
    }
    closedir(d);
    if (status != STK_OK) {
        sys_free(v);
        return status;
    }
    *out = v;
    *out_n = n;
    return STK_OK;
}

static bool exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static stk_status remove_path(const char *path, struct stk_error *err)
{
    if (sys_remove_tree(path) == 0 || errno == ENOENT) return STK_OK;
    return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot remove: %s", path, strerror(errno));
}

/* Finishes what a killed run left: an old folder without its replacement becomes step-N again,
 * everything else that is left over goes. */
static stk_status clean_leftovers(const char *dir, struct stk_error *err)
{
    uint64_t *steps;
    size_t n;
    STK_TRY(list_steps(dir, old_prefix, &steps, &n, err));
    stk_status status = STK_OK;
    for (size_t i = 0; i < n && status == STK_OK; i++) {
        char *old = step_path(dir, old_prefix, steps[i]),
             *now = step_path(dir, step_prefix, steps[i]);
        if (!old || !now) status = files_no_memory(err, dir);
        else if (exists(now)) status = remove_path(old, err);
        else if (sys_rename(old, now) != 0)
            status = stk_error_set(err, STK_ERR_IO, errno, "%s: cannot rename: %s", old,
                                   strerror(errno));
        sys_free(old);
        sys_free(now);
    }
    sys_free(steps);
    STK_TRY(status);
    char *names;
    status = manifest_clean(dir, &names, err);
    sys_free(names);
    return status;
}

static bool add_name(char **names, uint64_t step)
{
    char *longer = sys_format("%s%s%s%08" PRIu64, *names ? *names : "", *names ? ", " : "",
                              partial_prefix, step);
    if (!longer) return false;
    sys_free(*names);
    *names = longer;
    return true;
}

stk_status manifest_clean(const char *dir, char **names, struct stk_error *err)
{
    uint64_t *steps;
    size_t n;
    *names = NULL;
    STK_TRY(list_steps(dir, partial_prefix, &steps, &n, err));
    stk_status status = STK_OK;
    for (size_t i = 0; i < n && status == STK_OK; i++) {
        char *path = step_path(dir, partial_prefix, steps[i]);
        status = path ? remove_path(path, err) : files_no_memory(err, dir);
        if (status == STK_OK && !add_name(names, steps[i])) status = files_no_memory(err, dir);
        sys_free(path);
    }
    sys_free(steps);
    if (status == STK_OK) return STK_OK;
    sys_free(*names);
    *names = NULL;
    return status;
}

/* --- checksums -------------------------------------------------------------------------------- */

/* Size and CRC of a file; flush: also fsync it. */
static stk_status sum_file(const struct crc32_tables *tables, const char *path, bool flush,
                           uint64_t *size, uint32_t *crc, struct stk_error *err)
{
    int fd = sys_open(path, O_RDONLY | O_NONBLOCK, 0); /* a pipe must not block */
    if (fd < 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot open for reading: %s", path,
                             strerror(errno));
    unsigned char *buf = sys_calloc(1, PIECE_BYTES);
    stk_status status = buf ? STK_OK : files_no_memory(err, path);
    *size = 0;
    *crc = 0;
    while (status == STK_OK) {
        sys_read_ahead(fd, *size, 4 * PIECE_BYTES);
        int64_t got = sys_read_full(fd, buf, PIECE_BYTES, *size);
        if (got < 0)
            status =
                stk_error_set(err, STK_ERR_IO, errno, "%s: cannot read: %s", path, strerror(errno));
        if (got <= 0) break;
        *crc = crc32_extend(tables, *crc, buf, (size_t)got);
        *size += (uint64_t)got;
    }
    if (status == STK_OK && flush && sys_fsync(fd) != 0)
        status = stk_error_set(err, errno == ENOSPC ? STK_ERR_NOSPACE : STK_ERR_IO, errno,
                               "%s: cannot flush: %s", path, strerror(errno));
    sys_close(fd);
    sys_free(buf);
    return status;
}

/* Over the members other than manifest_crc32, in one spelling. */
static stk_status sum_document(const struct crc32_tables *tables, json_t *doc, uint32_t *crc,
                               struct stk_error *err)
{
    json_t *copy = json_copy(doc);
    if (copy) (void)json_object_del(copy, "manifest_crc32");
    char *text = copy ? json_dumps(copy, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    if (text) *crc = crc32_extend(tables, 0, text, strlen(text));
    free(text);
    json_decref(copy);
    return text ? STK_OK : files_no_memory(err, manifest_name);
}

/* --- begin, commit, abandon ------------------------------------------------------------------- */

stk_status manifest_begin(const char *dir, uint64_t step, char **out_path, struct stk_error *err)
{
    *out_path = NULL;
    if (sys_mkdirs(dir) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot make the folder: %s", dir,
                             strerror(errno));
    STK_TRY(clean_leftovers(dir, err));
    char *path = step_path(dir, partial_prefix, step);
    if (!path) return files_no_memory(err, dir);
    if (sys_mkdirs(path) != 0) {
        stk_status status =
            stk_error_set(err, errno == ENOSPC ? STK_ERR_NOSPACE : STK_ERR_IO, errno,
                          "%s: cannot make the folder: %s", path, strerror(errno));
        sys_free(path);
        return status;
    }
    *out_path = path;
    return STK_OK;
}

void manifest_abandon(const char *partial_path)
{
    /* what stays is removed by the next begin, and never loaded */
    if (partial_path) (void)sys_remove_tree(partial_path);
}

/* Whoever wrote the file has summed it up and flushed it. */
static bool is_known(json_t *files, const char *name, const struct stat *st)
{
    json_t *size = json_object_get(json_object_get(files, name), "size_bytes");
    return json_is_integer(size) && json_integer_value(size) == (json_int_t)st->st_size;
}

static stk_status sum_folder(const struct crc32_tables *tables, const char *path, json_t *files,
                             struct stk_error *err)
{
    struct dirent **names = NULL;
    int n = scandir(path, &names, NULL, alphasort);
    if (n < 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot read the folder: %s", path,
                             strerror(errno));
    stk_status status = STK_OK;
    for (int i = 0; i < n; i++) {
        const char *name = names[i]->d_name;
        if (status == STK_OK && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 &&
            strcmp(name, manifest_name) != 0) {
            char *file = sys_format("%s/%s", path, name);
            struct stat st;
            uint64_t size = 0;
            uint32_t crc = 0;
            bool known = false;
            if (!file) status = files_no_memory(err, path);
            else if (lstat(file, &st) != 0 || !S_ISREG(st.st_mode))
                status = stk_error_set(err, STK_ERR_STATE, 0,
                                       "%s: a checkpoint holds regular files only", file);
            else if (is_known(files, name, &st)) known = true;
            else status = sum_file(tables, file, true, &size, &crc, err);
            if (status == STK_OK && !known &&
                json_object_set_new(files, name,
                                    json_pack("{s:I, s:I}", "size_bytes", (json_int_t)size, "crc32",
                                              (json_int_t)crc)) != 0)
                status = files_no_memory(err, path);
            sys_free(file);
        }
        free(names[i]);
    }
    free(names);
    return status;
}

/* doc plus format, version, step, files and its own checksum, as manifest.json in the partial
 * folder. */
static stk_status write_manifest(const struct crc32_tables *tables, const char *partial,
                                 uint64_t step, json_t *doc, struct stk_error *err)
{
    json_t *whole = json_is_object(doc) ? json_copy(doc) : json_object(),
           *given = json_object_get(doc, "files"),
           *files = json_is_object(given) ? json_copy(given) : json_object();
    if (!whole || !files) {
        json_decref(whole);
        json_decref(files);
        return files_no_memory(err, partial);
    }
    uint32_t crc = 0;
    stk_status status = sum_folder(tables, partial, files, err);
    int bad = json_object_set_new(whole, "format", json_string(format_name)) |
              json_object_set_new(whole, "version", json_integer(MANIFEST_VERSION)) |
              json_object_set_new(whole, "step", json_integer((json_int_t)step)) |
              json_object_set_new(whole, "files", files);
    if (status == STK_OK && bad) status = files_no_memory(err, partial);
    if (status == STK_OK) status = sum_document(tables, whole, &crc, err);
    if (status == STK_OK &&
        json_object_set_new(whole, "manifest_crc32", json_integer((json_int_t)crc)) != 0)
        status = files_no_memory(err, partial);
    char *text = status == STK_OK ? json_dumps(whole, JSON_INDENT(1)) : NULL,
         *path = sys_format("%s/%s", partial, manifest_name);
    if (status == STK_OK && (!text || !path)) status = files_no_memory(err, partial);
    if (status == STK_OK) status = files_write(path, text, strlen(text), err);
    if (status == STK_OK && sys_fsync_dir(partial) != 0)
        status = stk_error_set(err, STK_ERR_IO, errno, "%s: cannot flush the folder: %s", partial,
                               strerror(errno));
    free(text);
    sys_free(path);
    json_decref(whole);
    return status;
}

/* Renames partial to final; a former final waits as `old` until the new one is durable. */
static stk_status swap_in(const char *dir, const char *partial, const char *final, const char *old,
                          struct stk_error *err)
{
    bool replaces = exists(final);
    if (replaces) {
        STK_TRY(remove_path(old, err));
        if (sys_rename(final, old) != 0)
            return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot rename: %s", final,
                                 strerror(errno));
    }
    if (sys_rename(partial, final) != 0) {
        stk_status status =
            stk_error_set(err, STK_ERR_IO, errno, "%s: cannot rename the finished checkpoint: %s",
                          partial, strerror(errno));
        /* else found as `old`, and renamed by the next begin */
        if (replaces) (void)sys_rename(old, final);
        return status;
    }
    if (sys_fsync_dir(dir) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot flush the folder: %s", dir,
                             strerror(errno));
    return replaces ? remove_path(old, err) : STK_OK;
}

stk_status manifest_commit(const char *dir, uint64_t step, const char *partial_path, json_t *doc,
                           struct stk_error *err)
{
    struct crc32_tables *tables = sys_calloc(1, sizeof *tables);
    char *final = step_path(dir, step_prefix, step), *old = step_path(dir, old_prefix, step);
    stk_status status = tables && final && old ? STK_OK : files_no_memory(err, partial_path);
    if (status == STK_OK) {
        crc32_prepare(tables);
        status = write_manifest(tables, partial_path, step, doc, err);
    }
    if (status == STK_OK) status = swap_in(dir, partial_path, final, old, err);
    if (status != STK_OK) manifest_abandon(partial_path);
    sys_free(tables);
    sys_free(final);
    sys_free(old);
    return status;
}

/* --- reading ---------------------------------------------------------------------------------- */

static stk_status check_file(const struct crc32_tables *tables, const char *folder,
                             const char *name, json_t *entry, bool verify, struct stk_error *err)
{
    json_t *size = json_object_get(entry, "size_bytes"), *crc = json_object_get(entry, "crc32");
    if (!*name || strchr(name, '/') || strcmp(name, "..") == 0 || strcmp(name, ".") == 0 ||
        !json_is_integer(size) || !json_is_integer(crc))
        return stk_error_set(err, STK_ERR_CORRUPT, 0,
                             "%s: manifest.json describes the file %.80s wrongly", folder, name);
    char *path = sys_format("%s/%s", folder, name);
    if (!path) return files_no_memory(err, folder);
    struct stat st;
    stk_status status = STK_OK;
    if (stat(path, &st) != 0)
        status = stk_error_set(err, STK_ERR_CORRUPT, errno,
                               "%s: is missing; the manifest lists it with %" JSON_INTEGER_FORMAT
                               " bytes",
                               path, json_integer_value(size));
    else if ((json_int_t)st.st_size != json_integer_value(size))
        status =
            stk_error_set(err, STK_ERR_CORRUPT, 0,
                          "%s: has %" PRIu64 " bytes, the manifest lists %" JSON_INTEGER_FORMAT,
                          path, (uint64_t)st.st_size, json_integer_value(size));
    uint64_t bytes = 0;
    uint32_t sum = 0;
    if (status == STK_OK && verify) status = sum_file(tables, path, false, &bytes, &sum, err);
    if (status == STK_OK && verify &&
        ((json_int_t)bytes != json_integer_value(size) ||
         (json_int_t)sum != json_integer_value(crc)))
        status = stk_error_set(err, STK_ERR_CORRUPT, 0,
                               "%s: its checksum is %08x, the manifest lists %08x: the file was "
                               "damaged; use an older checkpoint",
                               path, sum, (uint32_t)json_integer_value(crc));
    sys_free(path);
    return status;
}

static stk_status check_document(const struct crc32_tables *tables, const char *path, json_t *doc,
                                 bool verify, struct stk_error *err)
{
    const char *format = json_string_value(json_object_get(doc, "format"));
    json_t *version = json_object_get(doc, "version"), *files = json_object_get(doc, "files"),
           *step = json_object_get(doc, "step");
    if (!format || strcmp(format, format_name) != 0)
        return stk_error_set(
            err, STK_ERR_FORMAT, 0,
            "%s: its manifest.json is not that of a checkpoint (format \"%s\" was expected)", path,
            format_name);
    if (!json_is_integer(version) || json_integer_value(version) != MANIFEST_VERSION)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: checkpoint of version %" JSON_INTEGER_FORMAT
                             ", this program reads version %d",
                             path, json_integer_value(version), MANIFEST_VERSION);
    uint32_t crc = 0;
    STK_TRY(sum_document(tables, doc, &crc, err));
    json_t *own = json_object_get(doc, "manifest_crc32");
    if (!json_is_integer(own) || json_integer_value(own) != (json_int_t)crc ||
        !json_is_object(files) || !json_is_integer(step) || json_integer_value(step) < 0)
        return stk_error_set(
            err, STK_ERR_CORRUPT, 0,
            "%s: manifest.json does not match its own checksum: it was damaged or edited", path);
    const char *name;
    json_t *entry;
    json_object_foreach(files, name, entry)
        STK_TRY(check_file(tables, path, name, entry, verify, err));
    return STK_OK;
}

stk_status manifest_read(const char *path, bool verify, json_t **out_doc, struct stk_error *err)
{
    *out_doc = NULL;
    json_t *doc = NULL;
    struct crc32_tables *tables = sys_calloc(1, sizeof *tables);
    char *file = sys_format("%s/%s", path, manifest_name);
    stk_status status = tables && file ? STK_OK : files_no_memory(err, path);
    if (status == STK_OK) status = files_read_json(file, manifest_bytes_max, DEPTH_MAX, &doc, err);
    if (status == STK_OK) {
        crc32_prepare(tables);
        status = check_document(tables, path, doc, verify, err);
    }
    sys_free(tables);
    sys_free(file);
    if (status == STK_OK) *out_doc = doc;
    else json_decref(doc);
    return status;
}

/* --- search and pruning ----------------------------------------------------------------------- */

/* Is the folder complete, and of this step? */
static bool is_complete(const char *path, uint64_t step, bool verify, struct stk_error *why)
{
    json_t *doc;
    if (manifest_read(path, verify, &doc, why) != STK_OK) return false;
    bool same = (uint64_t)json_integer_value(json_object_get(doc, "step")) == step;
    if (!same)
        (void)stk_error_set(why, STK_ERR_CORRUPT, 0, "%s: its manifest is of another step", path);
    json_decref(doc);
    return same;
}

static void add_note(char **note, const char *text)
{
    if (!note) return;
    char *longer = *note ? sys_format("%s\n%s", *note, text) : sys_strdup(text);
    if (!longer) return;
    sys_free(*note);
    *note = longer;
}

/* The newest complete one under one kind of name, at least `above`. */
static stk_status newest_of(const char *dir, const char *prefix, bool have, uint64_t above,
                            char **out_path, uint64_t *out_step, char **note, struct stk_error *err)
{
    uint64_t *steps;
    size_t n;
    STK_TRY(list_steps(dir, prefix, &steps, &n, err));
    stk_status status = STK_END;
    for (size_t i = 0; i < n && status == STK_END && !(have && steps[i] <= above); i++) {
        struct stk_error why;
        stk_error_clear(&why);
        char *path = step_path(dir, prefix, steps[i]);
        if (!path) {
            status = files_no_memory(err, dir);
        } else if (is_complete(path, steps[i], true, &why)) {
            *out_path = path;
            *out_step = steps[i];
            status = STK_OK;
        } else {
            /* Too little memory says nothing about the folder: falling back to an older one would
             * lose work silently. */
            if (why.code == STK_ERR_NOMEM) status = stk_error_forward(err, &why);
            else add_note(note, why.text);
            sys_free(path);
        }
    }
    sys_free(steps);
    return status;
}

stk_status manifest_newest(const char *dir, char **out_path, uint64_t *out_step, char **note,
                           struct stk_error *err)
{
    *out_path = NULL;
    *out_step = 0;
    if (note) *note = NULL;
    stk_status status = newest_of(dir, step_prefix, false, 0, out_path, out_step, note, err);
    if (status != STK_OK && status != STK_END) return status;
    char *old = NULL;
    uint64_t old_step = 0;
    stk_status other =
        newest_of(dir, old_prefix, status == STK_OK, *out_step, &old, &old_step, note, err);
    if (other == STK_END) return status;
    if (other == STK_OK) {
        sys_free(*out_path);
        *out_path = old;
        *out_step = old_step;
        return STK_OK;
    }
    sys_free(*out_path);
    *out_path = NULL;
    return other;
}

/* Renamed first, so that a kill in the middle leaves no folder that looks like a checkpoint. */
static stk_status remove_step(const char *dir, uint64_t step, struct stk_error *err)
{
    char *path = step_path(dir, step_prefix, step), *away = step_path(dir, partial_prefix, step);
    stk_status status = path && away ? remove_path(away, err) : files_no_memory(err, dir);
    if (status == STK_OK && sys_rename(path, away) != 0)
        status =
            stk_error_set(err, STK_ERR_IO, errno, "%s: cannot rename: %s", path, strerror(errno));
    if (status == STK_OK) status = remove_path(away, err);
    sys_free(path);
    sys_free(away);
    return status;
}

stk_status manifest_prune(const char *dir, uint32_t keep, struct stk_error *err)
{
    STK_TRY(clean_leftovers(dir, err));
    uint64_t *steps;
    size_t n;
    STK_TRY(list_steps(dir, step_prefix, &steps, &n, err));
    stk_status status = STK_OK;
    uint32_t complete = 0;
    for (size_t i = 0; i < n && status == STK_OK && keep > 0; i++) {
        char *path = step_path(dir, step_prefix, steps[i]);
        if (!path) status = files_no_memory(err, dir);
        else if (complete >= keep) status = remove_step(dir, steps[i], err);
        else complete += is_complete(path, steps[i], false, NULL);
        sys_free(path);
    }
    sys_free(steps);
    return status;
}
