/* trainer/hf_out.c - the weights of a Hugging Face folder: shards, index, check. Folders and moving
 * are in hf_folder.c.
 *
 * Owns: names and sizes of shards. Must not know: where values come from (hf_read_fn).
 * Application's thread. */
#include "trainer/hf_impl.h"
#include "base/sys.h"
#include "formats/files.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ELEM_BYTES = 2 };

static uint64_t elements(const struct model_tensor *t)
{
    uint64_t n = 1;
    for (uint32_t d = 0; d < t->rank; d++) n *= t->shape[d];
    return n;
}

static stk_status no_memory(struct stk_error *err)
{
    return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the list of tensors");
}

/* Tensors as the files will have them; *from[i]: which tensor of the model it holds. */
struct list {
    uint32_t n;
    struct model_tensor *file, *from;
    uint32_t *shard;
    uint32_t n_shards;
    uint64_t total_bytes;
};

static void list_free(struct list *l)
{
    sys_free(l->file);
    sys_free(l->from);
    sys_free(l->shard);
}

static void list_shards(struct list *l, uint64_t limit)
{
    uint64_t bytes = 0;
    l->n_shards = 1;
    for (uint32_t i = 0; i < l->n; i++) {
        uint64_t more = elements(&l->file[i]) * ELEM_BYTES;
        if (bytes && bytes + more > limit) {
            l->n_shards++;
            bytes = 0;
        }
        bytes += more;
        l->total_bytes += more;
        l->shard[i] = l->n_shards;
    }
}

static stk_status list_make(const struct hf_job *job, struct list *l, struct stk_error *err)
{
    uint32_t n = model_tensors(job->cfg, NULL);
    l->file = sys_calloc(n + 1, sizeof *l->file);
    l->from = sys_calloc(n + 1, sizeof *l->from);
    l->shard = sys_calloc(n + 1, sizeof *l->shard);
    if (!l->file || !l->from || !l->shard) return no_memory(err);
    model_tensors(job->cfg, l->from);
    memcpy(l->file, l->from, n * sizeof *l->file);
    l->n = n;
    for (uint32_t i = 0; i < n; i++) {
        if (!job->cfg->tied || l->from[i].role != ROLE_EMBED) continue;
        if (job->head_only) snprintf(l->file[i].name, sizeof l->file[i].name, "lm_head.weight");
        if (!job->both) continue;
        l->file[n] = l->from[n] = l->from[i];
        snprintf(l->file[n].name, sizeof l->file[n].name, "lm_head.weight");
        l->n = n + 1;
    }
    list_shards(l, job->shard_bytes ? job->shard_bytes : 5000000000u);
    return STK_OK;
}

static void shard_name(const struct list *l, uint32_t shard, char *buf, size_t size_bytes)
{
    if (l->n_shards == 1)
        snprintf(buf, size_bytes, "model.safetensors");
    else
        snprintf(buf, size_bytes, "model-%05u-of-%05u.safetensors", shard, l->n_shards);
}

static stk_status write_values(const struct hf_job *job, const struct list *l, uint32_t shard,
                               struct st_writer *w, uint64_t *done, struct stk_error *err)
{
    uint64_t piece = job->buf_bytes / ELEM_BYTES;
    uint32_t index = 0;
    for (uint32_t i = 0; i < l->n; i++) {
        if (l->shard[i] != shard) continue;
        uint64_t total = elements(&l->file[i]);
        for (uint64_t at = 0; at < total; at += piece) {
            uint64_t n = total - at < piece ? total - at : piece;
            STK_TRY(job->read(job->arg, &l->from[i], at, n, job->buf, err));
            STK_TRY(st_writer_write(w, index, at * ELEM_BYTES, job->buf, n * ELEM_BYTES, err));
            pulse_done(job->pulse, *done += n * ELEM_BYTES);
        }
        index++;
    }
    return STK_OK;
}

static stk_status write_shard(const struct hf_job *job, const struct list *l, uint32_t shard,
                              const char *folder, uint64_t *done, struct stk_error *err)
{
    static const char *const metadata[] = { "format", "pt", NULL };
    char name[64];
    shard_name(l, shard, name, sizeof name);
    char *path = sys_format("%s/%s", folder, name);
    struct st_writer *w = NULL;
    if (!path) return no_memory(err);
    stk_status st = st_writer_new(path, metadata, &w, err);
    for (uint32_t i = 0; i < l->n && st == STK_OK; i++) {
        uint32_t index;
        if (l->shard[i] == shard)
            st = st_writer_declare(w, l->file[i].name, job->dtype, l->file[i].rank,
                                   l->file[i].shape, &index, err);
    }
    if (st == STK_OK) st = st_writer_begin(w, err);
    if (st == STK_OK) st = write_values(job, l, shard, w, done, err);
    if (st == STK_OK)
        st = st_writer_finish(w, err);
    else
        st_writer_abandon(w);
    sys_free(path);
    return st;
}

static stk_status write_index(const struct list *l, const char *folder, struct stk_error *err)
{
    json_t *map = json_object(), *doc = json_pack("{s:{s:I}, s:o}", "metadata", "total_size",
                                                  (json_int_t)l->total_bytes, "weight_map", map);
    for (uint32_t i = 0; i < l->n && doc; i++) {
        char name[64];
        shard_name(l, l->shard[i], name, sizeof name);
        json_object_set_new(map, l->file[i].name, json_string(name));
    }
    char *text = doc ? json_dumps(doc, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    char *path = sys_format("%s/model.safetensors.index.json", folder);
    stk_status st = text && path ? files_write(path, text, strlen(text), err) : no_memory(err);
    sys_free(path);
    free(text);
    json_decref(doc);
    return st;
}

static stk_status write_config(const struct hf_job *job, const char *folder, struct stk_error *err)
{
    char *path = sys_format("%s/config.json", folder);
    if (!path) return no_memory(err);
    stk_status st = model_config_write(job->cfg, path,
                                       job->dtype == ST_BF16 ? "bfloat16" : "float16", err);
    sys_free(path);
    return st;
}

/* Reads the folder back as any reader would (CKP-07). */
static stk_status verify(const char *folder, struct stk_error *err)
{
    struct model_config cfg;
    struct st_set *set = NULL;
    bool head_only;
    char *path = sys_format("%s/config.json", folder);
    if (!path) return no_memory(err);
    stk_status st = model_config_read(path, &cfg, err);
    sys_free(path);
    if (st != STK_OK) return st;
    st = st_set_open(folder, &set, err);
    if (st == STK_OK) st = model_check_tensors(&cfg, set, &head_only, err);
    if (set) st_set_close(set);
    model_config_free(&cfg);
    return st;
}

static stk_status write_all(const struct hf_job *job, const struct list *l, const char *folder,
                            struct stk_error *err)
{
    uint64_t done = 0;
    for (uint32_t s = 1; s <= l->n_shards; s++) STK_TRY(write_shard(job, l, s, folder, &done, err));
    if (l->n_shards > 1) STK_TRY(write_index(l, folder, err));
    if (job->copy_from)
        STK_TRY(hf_copy_files(job->copy_from, folder, job->buf, job->buf_bytes, err));
    STK_TRY(write_config(job, folder, err));
    return verify(folder, err);
}

uint64_t hf_bytes(const struct model_config *cfg, bool both)
{
    return ELEM_BYTES * (model_param_count(cfg) + (both ? (uint64_t)cfg->vocab * cfg->hidden : 0)) +
           (1u << 20);
}

stk_status hf_write(const struct hf_job *job, const char *partial, struct stk_error *err)
{
    struct list l = { 0 };
    stk_status st = hf_make_folder(partial, err);
    if (st != STK_OK) return st;
    st = list_make(job, &l, err);
    pulse_phase(job->pulse, "writing the model", l.total_bytes);
    if (st == STK_OK) st = write_all(job, &l, partial, err);
    pulse_phase(job->pulse, NULL, 0);
    if (st != STK_OK) sys_remove_tree(partial);
    list_free(&l);
    return st;
}
