/* trainer/hf_folder.c - folders of models: what may be written where, copied companions, and the
 * moves that make a folder appear.
 *
 * Must not know: tensors. Application's thread; blocking. */
#include "trainer/hf_impl.h"
#include "base/sys.h"
#include "formats/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const companions[] = {
    "tokenizer*",        "special_tokens_map.json",
    "added_tokens.json", "generation_config.json",
    "chat_template*",    "vocab*",
    "merges*",           "*.tiktoken",
    "spiece.model",
};

static bool is_companion(const char *name)
{
    for (size_t i = 0; i < sizeof companions / sizeof companions[0]; i++)
        if (fnmatch(companions[i], name, 0) == 0) return true;
    return false;
}

static bool is_weights(const char *name)
{
    return fnmatch("model*.safetensors", name, 0) == 0 ||
           strcmp(name, "model.safetensors.index.json") == 0;
}

stk_status hf_make_folder(const char *path, struct stk_error *err)
{
    if (sys_remove_tree(path) != 0 && errno != ENOENT)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be removed: %s", path,
                             strerror(errno));
    if (sys_mkdirs(path) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be made: %s", path,
                             strerror(errno));
    return STK_OK;
}

static stk_status copy_file(const char *from, const char *to, void *buf, uint64_t buf_bytes,
                            struct stk_error *err)
{
    int in = sys_open(from, O_RDONLY, 0);
    if (in < 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot open for reading: %s", from,
                             strerror(errno));
    int out = sys_open(to, O_WRONLY | O_CREAT | O_EXCL, 0666);
    int64_t n = out < 0 ? -1 : 1;
    for (uint64_t at = 0; n > 0; at += (uint64_t)n) {
        n = sys_read_full(in, buf, buf_bytes, at);
        if (n > 0 && sys_write_full(out, buf, (uint64_t)n, at) != n) n = -1;
    }
    if (n == 0 && sys_fsync(out) != 0) n = -1;
    int cause = errno;
    sys_close(in);
    if (out >= 0) sys_close(out);
    return n == 0 ? STK_OK
                  : stk_error_set(err, STK_ERR_IO, cause, "%s: cannot copy to %s: %s", from, to,
                                  strerror(cause));
}

static stk_status copy_one(const char *from, const char *to, const char *name, void *buf,
                           uint64_t buf_bytes, struct stk_error *err)
{
    struct stat st;
    char *a = sys_format("%s/%s", from, name), *b = sys_format("%s/%s", to, name);
    stk_status status = STK_OK;
    if (!a || !b)
        status = stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    else if (stat(a, &st) == 0 && S_ISREG(st.st_mode))
        status = copy_file(a, b, buf, buf_bytes, err);
    sys_free(a);
    sys_free(b);
    return status;
}

stk_status hf_copy_files(const char *from, const char *to, void *buf, uint64_t buf_bytes,
                         struct stk_error *err)
{
    DIR *d = opendir(from);
    if (!d)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be read: %s", from,
                             strerror(errno));
    stk_status st = STK_OK;
    for (const struct dirent *e; st == STK_OK && (e = readdir(d)) != NULL;)
        if (is_companion(e->d_name)) st = copy_one(from, to, e->d_name, buf, buf_bytes, err);
    closedir(d);
    return st;
}

static stk_status move(const char *from, const char *to, const char *name, struct stk_error *err)
{
    char *a = sys_format("%s/%s", from, name), *b = sys_format("%s/%s", to, name);
    stk_status st = STK_OK;
    if (!a || !b)
        st = stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    else if (sys_rename(a, b) != 0)
        st = stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be moved to %s: %s", a, b,
                           strerror(errno));
    sys_free(a);
    sys_free(b);
    return st;
}

/* Calls `one` for each entry of `folder` (not "." and ".."). */
static stk_status each(const char *folder,
                       stk_status (*one)(const char *folder, const char *name, const char *arg,
                                         struct stk_error *err),
                       const char *arg, struct stk_error *err)
{
    DIR *d = opendir(folder);
    if (!d)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be read: %s", folder,
                             strerror(errno));
    stk_status st = STK_OK;
    for (const struct dirent *e; st == STK_OK && (e = readdir(d)) != NULL;)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            st = one(folder, e->d_name, arg, err);
    closedir(d);
    return st;
}

static stk_status remove_weights(const char *folder, const char *name, const char *arg,
                                 struct stk_error *err)
{
    (void)arg;
    char *path = is_weights(name) ? sys_format("%s/%s", folder, name) : NULL;
    int rc = path ? unlink(path) : 0;
    sys_free(path);
    return rc == 0 ? STK_OK
                   : stk_error_set(err, STK_ERR_IO, errno, "%s/%s: cannot be removed: %s", folder,
                                   name, strerror(errno));
}

static stk_status move_all_but_config(const char *folder, const char *name, const char *to,
                                      struct stk_error *err)
{
    return strcmp(name, "config.json") == 0 ? STK_OK : move(folder, to, name, err);
}

stk_status hf_publish_into(const char *partial, const char *out, struct stk_error *err)
{
    char *config = sys_format("%s/config.json", out);
    if (!config) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    int rc = unlink(config);
    sys_free(config);
    if (rc != 0 && errno != ENOENT)
        return stk_error_set(err, STK_ERR_IO, errno, "%s/config.json: cannot be replaced: %s", out,
                             strerror(errno));
    STK_TRY(each(out, remove_weights, NULL, err));
    STK_TRY(each(partial, move_all_but_config, out, err));
    if (sys_fsync_dir(out) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: %s", out, strerror(errno));
    STK_TRY(move(partial, out, "config.json", err));
    if (sys_fsync_dir(out) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: %s", out, strerror(errno));
    rmdir(partial);
    return STK_OK;
}

stk_status hf_publish(const char *partial, const char *out, struct stk_error *err)
{
    if (rmdir(out) != 0 && errno != ENOENT)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: is no longer an empty folder: %s", out,
                             strerror(errno));
    if (sys_rename(partial, out) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be renamed to %s: %s", partial,
                             out, strerror(errno));
    char *parent = files_parent(out);
    if (parent) sys_fsync_dir(parent);
    sys_free(parent);
    return STK_OK;
}

/* --- refusals before anything is written ------------------------------------------------------ */

/* The path itself or the nearest one above it that exists, into buf. */
static void nearest_existing(const char *path, char *buf, size_t size_bytes)
{
    struct stat st;
    snprintf(buf, size_bytes, "%s", path);
    while (stat(buf, &st) != 0 && errno != EACCES) {
        char *slash = strrchr(buf, '/');
        if (!slash) {
            snprintf(buf, size_bytes, ".");
            return;
        }
        if (slash == buf) slash++;
        if (*slash == '\0') return; /* "/" itself */
        *slash = '\0';
    }
}

stk_status hf_check_writable(const char *option, const char *path, struct stk_error *err)
{
    char at[PATH_MAX];
    struct stat st;
    if (!path[0])
        return stk_error_set(err, STK_ERR_CONFIG, 0, "%s: the path is empty: name a folder",
                             option);
    nearest_existing(path, at, sizeof at);
    if (stat(at, &st) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s %s: %s: %s", option, path, at,
                             strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return stk_error_set(err, STK_ERR_IO, ENOTDIR, "%s %s: %s is not a folder", option, path,
                             at);
    if (access(at, W_OK | X_OK) != 0)
        return stk_error_set(
            err, STK_ERR_IO, errno,
            "%s %s: %s cannot be written to (%s): choose another folder or change its permissions",
            option, path, at, strerror(errno));
    return STK_OK;
}

stk_status hf_check_new(const char *option, const char *out, struct stk_error *err)
{
    struct stat st;
    STK_TRY(hf_check_writable(option, out, err));
    if (stat(out, &st) != 0) return STK_OK;
    DIR *d = opendir(out);
    bool empty = true;
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) empty = false;
    if (d) closedir(d);
    if (empty) return STK_OK;
    return stk_error_set(
        err, STK_ERR_STATE, 0,
        "%s %s: the folder is not empty: choose another one, nothing is overwritten", option, out);
}

uint64_t hf_room(const char *path, uint64_t *device)
{
    char at[PATH_MAX];
    struct stat st;
    nearest_existing(path, at, sizeof at);
    *device = stat(at, &st) == 0 ? (uint64_t)st.st_dev : UINT64_MAX;
    int64_t room = sys_disk_free(at);
    return room < 0 ? UINT64_MAX : (uint64_t)room;
}
