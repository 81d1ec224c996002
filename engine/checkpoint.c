/* engine/checkpoint.c - complete copies that never refer to the store: a folder with a manifest and
 * safetensors (fp32 master, exp_avg, exp_avg_sq; moments as they are kept).
 *
 * Application's thread, between steps; streams chunk by chunk through state.c's staging, so memory
 * does not grow with the model (CKP-19). The files are ckpt_files.c's, which save.c shares. Written beside and renamed (formats/manifest.h), so a kill
 * or a full disk never harms the checkpoint before. Must not know model families. */
#include "engine/ckpt_files.h"
#include "engine/counters.h"
#include "engine/save.h"
#include "base/sys.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* --- writing ---------------------------------------------------------------------------------- */

static stk_status save_tensors(stk_engine *e, const char *folder, json_t *doc)
{
    struct ckpt_files *f;
    STK_TRY(ckpt_files_open(e, folder, e->sio->scratch, &f, &e->err));
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        struct state_view v;
        stk_status st = state_stage(e, i, STATE_PARAM | STATE_OPT, &v);
        if (st == STK_OK) st = ckpt_files_put(f, &e->layout->chunks[i], &v, &e->err);
        if (st == STK_OK) st = ckpt_files_flush(f, &e->err); /* the staging is used again */
        if (st == STK_OK) continue;
        ckpt_files_abandon(f);
        return st;
    }
    return ckpt_files_finish(f, doc, &e->err);
}

stk_status checkpoint_begin(stk_engine *e, const char *dir, const char *client_json,
                            char **partial, json_t **doc)
{
    *partial = NULL;
    *doc = NULL;
    if (sys_mkdirs(dir) != 0)
        return stk_error_set(&e->err, STK_ERR_IO, errno,
                             "%s: the checkpoint folder cannot be made: %s", dir, strerror(errno));
    int64_t room = sys_disk_free(dir);
    uint64_t need = stk_save_bytes(e);
    char a[32], b[32];
    if (room >= 0 && (uint64_t)room < need)
        return stk_error_set(&e->err, STK_ERR_NOSPACE, ENOSPC,
                             "%s: a checkpoint needs %s, %s are free; what is there was left as it "
                             "is: free space or, where older ones are kept, lower --keep-checkpoints",
                             dir, mem_size_format(need, a), mem_size_format((uint64_t)room, b));
    STK_TRY(manifest_begin(dir, e->begun, partial, &e->err));
    *doc = counters_document(e, client_json);
    if (*doc) return STK_OK;
    manifest_abandon(*partial);
    sys_free(*partial);
    *partial = NULL;
    return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the manifest");
}

stk_status stk_save(stk_engine *e, const char *dir, const char *client_json, uint32_t keep)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_READY) return eng_refuse_state(e, "stk_save", "between steps");
    STK_TRY(save_settle(e));
    STK_TRY(stk_flush(e));
    STK_TRY(counters_check_client(e, "stk_save", client_json));
    char *partial;
    json_t *doc;
    STK_TRY(checkpoint_begin(e, dir, client_json, &partial, &doc));
    stk_status st = save_tensors(e, partial, doc);
    if (st == STK_OK)
        st = manifest_commit(dir, e->begun, partial, doc, &e->err);
    else
        manifest_abandon(partial);
    json_decref(doc);
    sys_free(partial);
    if (st == STK_OK) st = manifest_prune(dir, keep, &e->err);
    return st;
}

/* --- reading ---------------------------------------------------------------------------------- */

struct loader {
    stk_engine *e;
    const char *path;
    struct st_file **files;
    uint32_t n_files;
    struct state_view *view;
    bool convert;              /* moments may be of another kind than ours */
    stk_status st;
};

/* At a time, from one kind of moments to another; no more than the smallest chunk has. */
#define CONVERT_ELEMS 2048u
static const enum st_dtype moment_dtype[] = { ST_F32, ST_BF16, ST_U8 }; /* by enum chunk_moments */

static uint64_t scales_of(uint64_t n) { return (n + ADAM_QUANT_ELEMS - 1) / ADAM_QUANT_ELEMS; }

static const struct st_tensor *find_tensor(struct loader *l, const char *name,
                                           struct st_file **file)
{
    for (uint32_t i = 0; i < l->n_files; i++) {
        const struct st_tensor *t = st_find(l->files[i], name);
        if (t) {
            *file = l->files[i];
            return t;
        }
    }
    return NULL;
}

/* Elements [first, first + n) of a tensor's entry k, which must be of dtype `want`. */
static stk_status read_entry(struct loader *l, const struct stk_tensor *t, int k,
                             enum st_dtype want, uint64_t first, uint64_t n, void *out)
{
    char name[512];
    struct st_file *f = NULL;
    snprintf(name, sizeof name, "%s%s", t->name, ckpt_suffix[k]);
    const struct st_tensor *s = find_tensor(l, name, &f);
    uint32_t bytes = st_dtype_bytes(want);
    if (!s || s->n_elements != (k < 3 ? t->n_elems : scales_of(t->n_elems)))
        return stk_error_set(
            &l->e->err, STK_ERR_FORMAT, 0,
            "%s: tensor %s is missing or has another size than the model's (%llu elements)",
            l->path, name, (unsigned long long)t->n_elems);
    if (s->dtype != want) /* as wide or not: other bits are never taken for ours (ADM-13) */
        return stk_error_set(&l->e->err, STK_ERR_FORMAT, 0,
                             "%s: tensor %s is %s there and must be %s: resume from another "
                             "checkpoint",
                             l->path, name, st_dtype_name(s->dtype), st_dtype_name(want));
    return st_read(f, s, first * bytes, n * bytes, out, &l->e->err);
}

static stk_status read_part(struct loader *l, const struct stk_tensor *t, uint64_t first,
                            uint32_t n, void *out)
{
    enum st_dtype half = l->e->layout->dtype == CHUNK_BF16 ? ST_BF16 : ST_F16;
    return read_entry(l, t, 0, t->frozen ? half : ST_F32, first, n, out);
}

/* Moment k as it is stored there, into the memory that *m names, from element `at` on. */
static stk_status read_stored(struct loader *l, const struct stk_tensor *t, int k, uint64_t first,
                              uint64_t n, const struct adam_moments *m, uint64_t at)
{
    uint64_t width = st_dtype_bytes(moment_dtype[m->kind]);
    STK_TRY(read_entry(l, t, 1 + k, moment_dtype[m->kind], first, n, m->at[k] + width * at));
    if (m->kind != CHUNK_MOMENTS_8BIT) return STK_OK;
    return read_entry(l, t, 3 + k, ST_F32, scales_of(first), scales_of(n),
                      m->absmax[k] + scales_of(at));
}

/* The kind in which the checkpoint has a moment; what must be there if it is none of them. */
static enum chunk_moments kind_there(struct loader *l, const struct stk_tensor *t, int k,
                                     enum chunk_moments here)
{
    char name[512];
    struct st_file *f = NULL;
    snprintf(name, sizeof name, "%s%s", t->name, ckpt_suffix[1 + k]);
    const struct st_tensor *s = find_tensor(l, name, &f);
    for (int i = CHUNK_MOMENTS_F32; s && l->convert && i <= CHUNK_MOMENTS_8BIT; i++)
        if (s->dtype == moment_dtype[i]) return (enum chunk_moments)i;
    return here;
}

/* Pieces begin at multiples of 64 elements of the tensor and of the chunk. */
static stk_status read_moment(struct loader *l, const struct stk_tensor *t, int k, uint64_t first,
                              uint64_t n, uint64_t at)
{
    const struct adam_moments *m = &l->view->moments;
    struct adam_moments there = { .kind = kind_there(l, t, k, m->kind) };
    if (there.kind == m->kind) return read_stored(l, t, k, first, n, m, at);
    /* in the scratch memory, which has at least 8 bytes for each of these elements */
    there.at[k] = l->e->sio->scratch;
    there.absmax[k] = (float *)(void *)(l->e->sio->scratch + CONVERT_ELEMS);
    for (uint64_t done = 0, piece; done < n; done += piece) {
        piece = n - done < CONVERT_ELEMS ? n - done : CONVERT_ELEMS;
        STK_TRY(read_stored(l, t, k, first + done, piece, &there, 0));
        adam_moments_read(&there, k, 0, piece, l->e->sio->work);
        adam_moments_write(m, k, at + done, piece, l->e->sio->work);
    }
    return STK_OK;
}

static void load_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                       uint32_t n)
{
    struct loader *l = arg;
    stk_engine *e = l->e;
    const struct stk_tensor *t = &e->layout->tensors[tensor];
    struct state_view *v = l->view;
    if (l->st != STK_OK) return;
    if (t->frozen) {
        l->st = read_part(l, t, tensor_elem, n, v->param + chunk_elem);
        return;
    }
    l->st = read_part(l, t, tensor_elem, n, e->sio->work);
    if (l->st == STK_OK) state_master_set(e, v, chunk_elem, n, e->sio->work);
    for (int k = 0; k < 2 && l->st == STK_OK; k++)
        l->st = read_moment(l, t, k, tensor_elem, n, chunk_elem);
}

static stk_status load_chunks(struct loader *l)
{
    stk_engine *e = l->e;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        struct stk_chunk *c = &e->layout->chunks[i];
        struct state_view v;
        c->version = e->updates;
        /* Nothing of what the store holds is wanted: staging starts from zero, as for an extent
         * never written. */
        STK_TRY(state_stage_fresh(e, i, &v));
        l->view = &v;
        chunk_pieces(e->layout, c, load_piece, l);
        STK_TRY(l->st);
        state_touch(e);
    }
    return state_unstage(e);
}

static stk_status open_files(struct loader *l, const json_t *doc)
{
    stk_engine *e = l->e;
    const json_t *files = json_object_get(doc, "files");
    l->files = sys_calloc(json_array_size(files) + json_object_size(files) + 1, sizeof *l->files);
    if (!l->files)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory to open a checkpoint");
    for (uint32_t k = 1;; k++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/state-%05u.safetensors", l->path, k);
        int fd = sys_open(path, 0, 0);
        if (fd < 0) break;
        sys_close(fd);
        if (k > json_array_size(files) + json_object_size(files)) break;
        STK_TRY(st_open(path, &l->files[l->n_files], &e->err));
        l->n_files++;
    }
    return STK_OK;
}

stk_status stk_restore(stk_engine *e, const char *path, bool any_numerics, char **client_json)
{
    stk_error_clear(&e->err);
    if (client_json) *client_json = NULL;
    if (eng_state(e) != ENG_READY || e->begun > 0)
        return eng_refuse_state(e, "stk_restore", "after stk_seal, before the first step");
    STK_TRY(save_settle(e));
    json_t *doc = NULL;
    STK_TRY(manifest_read(path, true, &doc, &e->err));
    struct loader l = { .e = e, .path = path, .convert = any_numerics };
    stk_status st = counters_agree(e, path, doc, any_numerics);
    if (st == STK_OK) st = open_files(&l, doc);
    if (st == STK_OK) counters_take(e, doc);
    if (st == STK_OK) st = load_chunks(&l);
    if (st == STK_OK && client_json) *client_json = counters_client(doc);
    for (uint32_t i = 0; i < l.n_files; i++) st_close(l.files[i]);
    sys_free(l.files);
    json_decref(doc);
    if (st != STK_OK) e->state = ENG_FAILED;
    return st;
}

stk_status stk_newest_checkpoint(const char *dir, char **path, uint64_t *step)
{
    struct stk_error err = { 0 };
    char *note = NULL;
    uint64_t at = 0;
    stk_status st = manifest_newest(dir, path, &at, &note, &err);
    if (step) *step = at;
    sys_free(note);
    return st;
}
