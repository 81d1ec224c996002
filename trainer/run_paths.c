/* trainer/run_paths.c - refusals that only need the paths of the options: outputs that would
 * overwrite an input, --nvme folders that are none or the same one twice.
 *
 * Must not know: what is in any of the files. Application's thread, before anything is opened. */
#include "base/sys.h"
#include "formats/files.h"
#include "trainer/hf_out.h"
#include "trainer/run.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_same(const struct stat *a, const char *path)
{
    struct stat b;
    return path && stat(path, &b) == 0 && a->st_dev == b.st_dev && a->st_ino == b.st_ino;
}

static bool is_below(const char *folder, const char *path)
{
    char a[PATH_MAX], b[PATH_MAX];
    if (!folder || !realpath(folder, a) || !realpath(path, b)) return false;
    size_t n = strlen(a);
    return strncmp(a, b, n) == 0 && b[n] == '/';
}

/* What is there already: a folder is never written to; what is written in place must be writable,
 * what is replaced by renaming must be a file (a device of that name would be lost). */
static stk_status check_existing(const char *option, const char *path, const struct stat *st,
                                 bool in_place, struct stk_error *err)
{
    if (S_ISDIR(st->st_mode))
        return stk_error_set(err, STK_ERR_IO, EISDIR, "%s %s: is a folder; a file was expected",
                             option, path);
    if (!in_place && !S_ISREG(st->st_mode))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s %s: is there and is no regular file: choose another path", option,
                             path);
    if (in_place && access(path, W_OK) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s %s: cannot be written to: %s", option,
                             path, strerror(errno));
    return STK_OK;
}

/* must_exist: the folder of a result is not made, and that must not be found out after the work. */
static stk_status check_parent(const char *option, const char *path, bool must_exist,
                               struct stk_error *err)
{
    char *parent = files_parent(path);
    if (!parent) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    stk_status status = hf_check_writable(option, parent, err);
    if (status == STK_OK && must_exist && access(parent, F_OK) != 0)
        status = stk_error_set(err, STK_ERR_IO, errno, "%s %s: the folder %s is not there: make it "
                               "first", option, path, parent);
    sys_free(parent);
    return status;
}

stk_status run_check_output(const struct run_opts *o, const char *option, const char *path,
                            bool in_place, struct stk_error *err)
{
    struct stat st;
    if (!path) return STK_OK;
    bool there = stat(path, &st) == 0;
    if (there) STK_TRY(check_existing(option, path, &st, in_place, err));
    if (!there || !in_place) STK_TRY(check_parent(option, path, !in_place, err));
    if (!there) return STK_OK;
    const char *const inputs[] = { o->data, o->eval_data, o->config_file };
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
        if (is_same(&st, inputs[i]))
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "%s %s: would overwrite an input of this run: choose another file",
                                 option, path);
    if (S_ISREG(st.st_mode) && is_below(o->model, path))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s %s: would overwrite a file of --model %s: choose another file",
                             option, path, o->model);
    const char *const outputs[] = { o->log, o->plan, o->trace, o->json, o->logits };
    for (size_t i = 0, same = 0; i < sizeof outputs / sizeof outputs[0]; i++)
        if (S_ISREG(st.st_mode) && is_same(&st, outputs[i]) && ++same == 2)
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "%s %s: two options name this file: choose another one", option,
                                 path);
    return STK_OK;
}

stk_status run_check_nvme(const struct run_opts *o, struct stk_error *err)
{
    struct stat st;
    for (uint32_t i = 0; i < o->nvme.n; i++) {
        const char *path = o->nvme.item[i];
        if (stat(path, &st) != 0) continue; /* the engine says what is wrong with it */
        if (!S_ISDIR(st.st_mode))
            return stk_error_set(err, STK_ERR_IO, ENOTDIR, "--nvme %s: is not a folder", path);
        for (uint32_t k = 0; k < i; k++)
            if (is_same(&st, o->nvme.item[k]))
                return stk_error_set(err, STK_ERR_CONFIG, 0,
                                     "--nvme %s: is the same folder as %s: give each once", path,
                                     o->nvme.item[k]);
    }
    return STK_OK;
}
