/* formats/safetensors_set.c - the model of a folder: one model.safetensors, or shards under
 * model.safetensors.index.json.
 *
 * Owns: the open shards. Must not know: which tensors a model needs (model_tensors.c checks that).
 * The index decides: it names every tensor's shard, and shards hold exactly what it says. Files
 * that it does not name are left alone; a shard that it names and that is absent is an error that
 * lists all absent ones. Its metadata.total_size is not compared: writers count tied weights there
 * in different ways.
 * Thread: one at a time per object; blocking. */
#include "formats/safetensors_impl.h"

#include "base/sys.h"
#include "formats/files.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FILES_MAX = 10000 };
static const uint64_t index_bytes_max = 256ull << 20;

struct st_set {
    char *folder;
    uint32_t n_files, n;
    struct st_file **files;
    const struct st_tensor **all; /* order of the files, then of offsets */
    const struct st_tensor **by_name;
};

/* --- the index -------------------------------------------------------------------------------- */

static int by_text(const void *a, const void *b)
{
    const char *const *x = a, *const *y = b;
    return strcmp(*x, *y);
}

/* Borrowed from the index: the different file names, sorted. */
static stk_status shard_names(const char *path, json_t *map, const char ***out, uint32_t *out_n,
                              struct stk_error *err)
{
    size_t n = json_object_size(map);
    if (!json_is_object(map) || n == 0)
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "%s: has no weight_map object (tensor name: file name)", path);
    const char **names = sys_calloc(n, sizeof *names);
    if (!names) return files_no_memory(err, path);
    const char *key;
    json_t *value;
    size_t k = 0;
    json_object_foreach(map, key, value)
    {
        const char *name = json_string_value(value);
        if (!name || !*name || strchr(name, '/') || name[0] == '.') {
            sys_free(names);
            return stk_error_set(
                err, STK_ERR_FORMAT, 0,
                "%s: weight_map of %.100s is not the name of a file in the same folder", path, key);
        }
        names[k++] = name;
    }
    qsort(names, n, sizeof *names, by_text);
    uint32_t distinct = 0;
    for (size_t i = 0; i < n; i++)
        if (distinct == 0 || strcmp(names[distinct - 1], names[i]) != 0)
            names[distinct++] = names[i];
    if (distinct > FILES_MAX) {
        sys_free(names);
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: names %u files, at most %d are supported",
                             path, distinct, FILES_MAX);
    }
    *out = names;
    *out_n = distinct;
    return STK_OK;
}

/* All shards must be there before any is opened; the sentence names the absent ones. */
static stk_status check_present(const struct st_set *s, const char *const *names, uint32_t n,
                                struct stk_error *err)
{
    char list[400] = "";
    size_t used = 0;
    uint32_t absent = 0;
    for (uint32_t i = 0; i < n; i++) {
        char *path = sys_format("%s/%s", s->folder, names[i]);
        if (!path) return files_no_memory(err, s->folder);
        bool there = access(path, F_OK) == 0;
        sys_free(path);
        if (there) continue;
        size_t len = strlen(names[i]);
        if (used + len + 3 < sizeof list) {
            if (used) list[used++] = ',', list[used++] = ' ';
            memcpy(list + used, names[i], len + 1);
            used += len;
        }
        absent++;
    }
    if (absent == 0) return STK_OK;
    return stk_error_set(err, STK_ERR_FORMAT, 0,
                         "%s: %u of the %u files that model.safetensors.index.json names are "
                         "missing: %s; download again",
                         s->folder, absent, n, list);
}

static stk_status check_against_index(const struct st_set *s, json_t *map, struct stk_error *err)
{
    const char *key;
    json_t *value;
    json_object_foreach(map, key, value)
    {
        const struct st_tensor *t = st_find_by_name(s->by_name, s->n, key);
        const char *file = json_string_value(value);
        const char *found = t ? strrchr(st_set_path(s, t->file), '/') + 1 : "no file";
        if (!t || strcmp(found, file) != 0)
            return stk_error_set(err, STK_ERR_FORMAT, 0,
                                 "%s: model.safetensors.index.json says that %.100s is in %.80s, "
                                 "but it is in %.80s: "
                                 "the index is of other files",
                                 s->folder, key, file, found);
    }
    for (uint32_t i = 0; i < s->n; i++)
        if (!json_object_get(map, s->all[i]->name))
            return stk_error_set(err, STK_ERR_FORMAT, 0,
                                 "%s: holds %.100s, which model.safetensors.index.json does not "
                                 "name: the index is of other files",
                                 st_set_path(s, s->all[i]->file), s->all[i]->name);
    return STK_OK;
}

/* --- open ------------------------------------------------------------------------------------- */

static stk_status open_files(struct st_set *s, const char *const *names, uint32_t n,
                             struct stk_error *err)
{
    s->files = sys_calloc(n, sizeof *s->files);
    if (!s->files) return files_no_memory(err, s->folder);
    for (uint32_t i = 0; i < n; i++) {
        char *path = sys_format("%s/%s", s->folder, names[i]);
        if (!path) return files_no_memory(err, s->folder);
        stk_status status = st_open(path, &s->files[i], err);
        sys_free(path);
        STK_TRY(status);
        s->n_files++;
        s->n += st_count(s->files[i]);
        st_file_number(s->files[i], i);
    }
    s->all = sys_calloc((size_t)s->n + 1, sizeof *s->all);
    s->by_name = sys_calloc((size_t)s->n + 1, sizeof *s->by_name);
    if (!s->all || !s->by_name) return files_no_memory(err, s->folder);
    uint32_t k = 0;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < st_count(s->files[i]); j++) s->all[k++] = st_at(s->files[i], j);
    memcpy(s->by_name, s->all, s->n * sizeof *s->all);
    st_sort_by_name(s->by_name, s->n);
    for (uint32_t i = 1; i < s->n; i++)
        if (strcmp(s->by_name[i - 1]->name, s->by_name[i]->name) == 0)
            return stk_error_set(
                err, STK_ERR_FORMAT, 0, "%s: %.100s is in two files, %.100s and %.100s", s->folder,
                s->by_name[i]->name, strrchr(st_set_path(s, s->by_name[i - 1]->file), '/') + 1,
                strrchr(st_set_path(s, s->by_name[i]->file), '/') + 1);
    return STK_OK;
}

static stk_status open_index(struct st_set *s, const char *index_path, struct stk_error *err)
{
    json_t *doc;
    STK_TRY(files_read_json(index_path, index_bytes_max, 8, &doc, err));
    json_t *map = json_object_get(doc, "weight_map");
    const char **names = NULL;
    uint32_t n = 0;
    stk_status status = shard_names(index_path, map, &names, &n, err);
    if (status == STK_OK) status = check_present(s, names, n, err);
    if (status == STK_OK) status = open_files(s, names, n, err);
    if (status == STK_OK) status = check_against_index(s, map, err);
    sys_free(names);
    json_decref(doc);
    return status;
}

static stk_status open_folder(struct st_set *s, struct stk_error *err)
{
    char *index = sys_format("%s/model.safetensors.index.json", s->folder),
         *single = sys_format("%s/model.safetensors", s->folder);
    static const char *const single_name[] = { "model.safetensors" };
    stk_status status;
    if (!index || !single) {
        status = files_no_memory(err, s->folder);
    } else if (access(index, F_OK) == 0) {
        status = open_index(s, index, err);
    } else if (access(single, F_OK) == 0) {
        status = open_files(s, single_name, 1, err);
    } else {
        int os_errno = errno;
        char *list = files_list(s->folder, 8);
        status = stk_error_set(
            err, STK_ERR_FORMAT, os_errno,
            "%s: has neither model.safetensors nor model.safetensors.index.json; there is %s",
            s->folder, list ? list : "no such folder");
        sys_free(list);
    }
    sys_free(index);
    sys_free(single);
    return status;
}

stk_status st_set_open(const char *folder, struct st_set **out, struct stk_error *err)
{
    *out = NULL;
    struct st_set *s = sys_calloc(1, sizeof *s);
    if (!s) return files_no_memory(err, folder);
    s->folder = sys_strdup(folder);
    stk_status status = s->folder ? open_folder(s, err) : files_no_memory(err, folder);
    if (status != STK_OK) {
        st_set_close(s);
        return status;
    }
    *out = s;
    return STK_OK;
}

void st_set_close(struct st_set *s)
{
    if (!s) return;
    for (uint32_t i = 0; i < s->n_files; i++) st_close(s->files[i]);
    sys_free(s->files);
    sys_free(s->all);
    sys_free(s->by_name);
    sys_free(s->folder);
    sys_free(s);
}

/* --- use -------------------------------------------------------------------------------------- */

uint32_t st_set_count(const struct st_set *s) { return s->n; }
uint32_t st_set_files(const struct st_set *s) { return s->n_files; }

const struct st_tensor *st_set_at(const struct st_set *s, uint32_t i)
{
    STK_ASSERT(i < s->n);
    return s->all[i];
}

const struct st_tensor *st_set_find(const struct st_set *s, const char *name)
{
    return st_find_by_name(s->by_name, s->n, name);
}

const char *st_set_path(const struct st_set *s, uint32_t file)
{
    STK_ASSERT(file < s->n_files);
    return st_file_path(s->files[file]);
}

stk_status st_set_read(struct st_set *s, const struct st_tensor *t, uint64_t offset_bytes,
                       uint64_t size_bytes, void *buf, struct stk_error *err)
{
    STK_ASSERT(t->file < s->n_files);
    return st_read(s->files[t->file], t, offset_bytes, size_bytes, buf, err);
}
