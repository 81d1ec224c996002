/* formats/files.c - small whole files and JSON documents.
 *
 * Owns: nothing that outlives a call. Must not know: what the documents mean.
 * Thread: any; blocking. */
#include "formats/files.h"

#include "base/sys.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

stk_status files_no_memory(struct stk_error *err, const char *what)
{
    return stk_error_set(err, STK_ERR_NOMEM, ENOMEM,
                         "%s: out of memory; free some or give less to the other budgets", what);
}

stk_status files_read(const char *path, uint64_t max_bytes, char **out, uint64_t *out_bytes,
                      struct stk_error *err)
{
    int fd = sys_open(path, O_RDONLY | O_NONBLOCK, 0); /* a pipe must not block */
    if (fd < 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot open for reading: %s", path,
                             strerror(errno));
    struct stat st;
    stk_status status = STK_OK;
    char *text = NULL;
    if (fstat(fd, &st) != 0)
        status = stk_error_set(err, STK_ERR_IO, errno, "%s: cannot ask for the size: %s", path,
                               strerror(errno));
    else if (!S_ISREG(st.st_mode))
        status = stk_error_set(err, STK_ERR_FORMAT, 0, "%s: is not a regular file", path);
    else if ((uint64_t)st.st_size > max_bytes)
        status = stk_error_set(err, STK_ERR_FORMAT, 0,
                               "%s: holds %" PRIu64 " bytes, at most %" PRIu64
                               " are expected in such a file",
                               path, (uint64_t)st.st_size, max_bytes);
    uint64_t size = status == STK_OK ? (uint64_t)st.st_size : 0;
    if (status == STK_OK && !(text = sys_calloc(1, (size_t)size + 1)))
        status = files_no_memory(err, path);
    if (status == STK_OK) {
        int64_t got = sys_read_full(fd, text, size, 0);
        if (got < 0)
            status =
                stk_error_set(err, STK_ERR_IO, errno, "%s: cannot read: %s", path, strerror(errno));
        else if ((uint64_t)got < size)
            status = stk_error_set(err, STK_ERR_CORRUPT, 0, "%s: became shorter while it was read",
                                   path);
    }
    sys_close(fd);
    if (status != STK_OK) {
        sys_free(text);
        return status;
    }
    *out = text;
    *out_bytes = size;
    return STK_OK;
}

/* Nesting as brackets outside strings show it; text that is no JSON is left to the parser. */
static bool too_deep(const char *text, uint64_t size_bytes, uint32_t depth_max)
{
    uint32_t depth = 0;
    bool quoted = false;
    for (uint64_t i = 0; i < size_bytes; i++) {
        char c = text[i];
        if (quoted) {
            if (c == '\\') i++;
            else if (c == '"') quoted = false;
        } else if (c == '"') {
            quoted = true;
        } else if (c == '{' || c == '[') {
            if (++depth > depth_max) return true;
        } else if ((c == '}' || c == ']') && depth > 0) {
            depth--;
        }
    }
    return false;
}

stk_status files_parse_json(const char *what, const char *text, uint64_t size_bytes,
                            uint32_t depth_max, json_t **out, struct stk_error *err)
{
    if (too_deep(text, size_bytes, depth_max))
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: JSON is nested deeper than %u levels",
                             what, depth_max);
    json_error_t why;
    json_t *doc = json_loadb(text, (size_t)size_bytes, JSON_REJECT_DUPLICATES, &why);
    if (!doc && json_error_code(&why) == json_error_out_of_memory)
        return files_no_memory(err, what);
    if (!doc)
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: is not valid JSON: %s (line %d, byte %d)",
                             what, why.text, why.line, why.position);
    *out = doc;
    return STK_OK;
}

stk_status files_read_json(const char *path, uint64_t max_bytes, uint32_t depth_max, json_t **out,
                           struct stk_error *err)
{
    char *text;
    uint64_t size;
    STK_TRY(files_read(path, max_bytes, &text, &size, err));
    json_t *doc = NULL;
    stk_status status;
    const char *kind = files_sniff(text, size);
    if (size == 0)
        status =
            stk_error_set(err, STK_ERR_FORMAT, 0, "%s: is empty; a JSON object was expected", path);
    else if (kind)
        status = stk_error_set(err, STK_ERR_FORMAT, 0, "%s: is %s; a JSON object was expected",
                               path, kind);
    else status = files_parse_json(path, text, size, depth_max, &doc, err);
    sys_free(text);
    if (status == STK_OK && !json_is_object(doc)) {
        json_decref(doc);
        status = stk_error_set(err, STK_ERR_FORMAT, 0, "%s: holds JSON, but no object", path);
    }
    if (status == STK_OK) *out = doc;
    return status;
}

stk_status files_write(const char *path, const char *text, uint64_t size_bytes,
                       struct stk_error *err)
{
    int fd = sys_open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot create: %s", path,
                             strerror(errno));
    stk_status status = STK_OK;
    int64_t done = sys_write_full(fd, text, size_bytes, 0);
    if (done < 0 || (uint64_t)done < size_bytes || sys_fsync(fd) != 0)
        status = stk_error_set(err, errno == ENOSPC ? STK_ERR_NOSPACE : STK_ERR_IO, errno,
                               "%s: cannot write %" PRIu64 " bytes: %s", path, size_bytes,
                               strerror(errno));
    sys_close(fd);
    if (status != STK_OK) (void)unlink(path);
    return status;
}

stk_status files_replace(const char *path, const char *text, uint64_t size_bytes,
                         struct stk_error *err)
{
    char *partial = sys_format("%s.partial", path), *parent = files_parent(path);
    stk_status status = partial && parent ? STK_OK : files_no_memory(err, path);
    if (status == STK_OK) status = files_write(partial, text, size_bytes, err);
    if (status == STK_OK && sys_rename(partial, path) != 0) {
        status = stk_error_set(err, STK_ERR_IO, errno, "%s: cannot rename the finished file: %s",
                               path, strerror(errno));
        (void)unlink(partial);
    }
    if (status == STK_OK && sys_fsync_dir(parent) != 0)
        status = stk_error_set(err, STK_ERR_IO, errno, "%s: cannot flush the folder: %s", parent,
                               strerror(errno));
    sys_free(partial);
    sys_free(parent);
    return status;
}

char *files_parent(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash) return sys_strdup(".");
    if (slash == path) return sys_strdup("/");
    return sys_format("%.*s", (int)(slash - path), path);
}

const char *files_sniff(const char *head, uint64_t size_bytes)
{
    static const char lfs[] = "version https://git-lfs";
    if (size_bytes >= sizeof lfs - 1 && memcmp(head, lfs, sizeof lfs - 1) == 0)
        return "a Git LFS pointer, not the file itself: run `git lfs pull` or download the file "
               "again";
    uint64_t i = 0;
    while (i < size_bytes && strchr(" \t\r\n", head[i]) && head[i]) i++;
    static const char *const tags[] = { "<!doctype", "<html", "<head", "<?xml" };
    for (size_t k = 0; k < sizeof tags / sizeof *tags; k++) {
        size_t n = strlen(tags[k]);
        if (size_bytes - i >= n && strncasecmp(head + i, tags[k], n) == 0)
            return "an HTML page (perhaps a login or error page), not the file itself: download it "
                   "again";
    }
    return NULL;
}

char *files_list(const char *folder, uint32_t max)
{
    struct dirent **names = NULL;
    int n = scandir(folder, &names, NULL, alphasort);
    if (n < 0) return NULL;
    char *text = sys_strdup("");
    uint32_t shown = 0, more = 0;
    for (int i = 0; i < n; i++) {
        const char *name = names[i]->d_name;
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && text) {
            if (shown == max) {
                more++;
            } else {
                char *longer = sys_format("%s%s%.60s", text, shown++ ? ", " : "", name);
                sys_free(text);
                text = longer;
            }
        }
        free(names[i]);
    }
    free(names);
    if (text && (shown == 0 || more > 0)) {
        char *longer =
            shown == 0 ? sys_strdup("nothing") : sys_format("%s and %u more", text, more);
        sys_free(text);
        text = longer;
    }
    return text;
}
