/* engine/checkpoint.c - complete copies that never refer to the store: a folder with a manifest and
 * safetensors (fp32 master, exp_avg, exp_avg_sq).
 *
 * Application's thread, between steps; streams chunk by chunk through state.c's staging, so memory
 * does not grow with the model (CKP-19). Written beside and renamed (formats/manifest.h), so a kill
 * or a full disk never harms the checkpoint before. Must not know model families. */
#include "engine/counters.h"
#include "engine/state.h"
#include "base/sys.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FILE_BYTES_MAX (4ull << 30) /* a new file begins with the block that passes this */

static const char *const suffix[3] = { "", ".exp_avg", ".exp_avg_sq" };

static uint64_t tensor_bytes(const struct stk_tensor *t)
{
    return t->n_elems * (t->frozen ? 2 : 12);
}

uint64_t stk_save_bytes(const stk_engine *e)
{
    uint64_t sum = 65536;
    for (uint32_t i = 0; e->layout && i < e->layout->n_tensors; i++)
        sum += tensor_bytes(&e->layout->tensors[i]) + 1024;
    return sum;
}

/* --- writing ---------------------------------------------------------------------------------- */

struct saver {
    stk_engine *e;
    const char *folder;
    struct st_writer *w;
    uint32_t file;             /* 1, 2, ... */
    uint32_t first_block, end_block;
    uint32_t *index;           /* [n_tensors][3]: declaration in the open file */
    struct state_view *view;
    stk_status st;
};

static stk_status declare_tensor(struct saver *s, uint32_t i)
{
    stk_engine *e = s->e;
    const struct stk_tensor *t = &e->layout->tensors[i];
    enum st_dtype half = e->layout->dtype == CHUNK_BF16 ? ST_BF16 : ST_F16;
    for (int k = 0; k < (t->frozen ? 1 : 3); k++) {
        char name[512];
        snprintf(name, sizeof name, "%s%s", t->name, suffix[k]);
        STK_TRY(st_writer_declare(s->w, name, t->frozen ? half : ST_F32, 1, &t->n_elems,
                                  &s->index[3 * i + k], &e->err));
    }
    return STK_OK;
}

/* Opens the file that begins with block b and takes as many blocks as fit. */
static stk_status open_file(struct saver *s, uint32_t b)
{
    stk_engine *e = s->e;
    char path[4096];
    snprintf(path, sizeof path, "%s/state-%05u.safetensors", s->folder, ++s->file);
    STK_TRY(st_writer_new(path, NULL, &s->w, &e->err));
    uint64_t bytes = 0;
    s->first_block = b;
    for (s->end_block = b; s->end_block < e->layout->n_blocks; s->end_block++) {
        const struct stk_block *blk = &e->layout->blocks[s->end_block];
        uint64_t more = 0;
        for (uint32_t i = 0; i < blk->n_tensors; i++)
            more += tensor_bytes(&e->layout->tensors[blk->first_tensor + i]);
        if (s->end_block > b && bytes + more > FILE_BYTES_MAX) break;
        bytes += more;
        for (uint32_t i = 0; i < blk->n_tensors; i++)
            STK_TRY(declare_tensor(s, blk->first_tensor + i));
    }
    return st_writer_begin(s->w, &e->err);
}

static void save_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                       uint32_t n)
{
    struct saver *s = arg;
    stk_engine *e = s->e;
    const struct state_view *v = s->view;
    const uint32_t *index = &s->index[3 * tensor];
    if (s->st != STK_OK) return;
    if (v->frozen) {
        s->st = st_writer_write(s->w, index[0], tensor_elem * 2, v->param + chunk_elem, 2ull * n,
                                &e->err);
        return;
    }
    state_master_get(e, v, chunk_elem, n, e->sio->work[0]);
    s->st = st_writer_write(s->w, index[0], tensor_elem * 4, e->sio->work[0], 4ull * n, &e->err);
    if (s->st == STK_OK)
        s->st = st_writer_write(s->w, index[1], tensor_elem * 4, v->exp_avg + chunk_elem, 4ull * n,
                                &e->err);
    if (s->st == STK_OK)
        s->st = st_writer_write(s->w, index[2], tensor_elem * 4, v->exp_avg_sq + chunk_elem,
                                4ull * n, &e->err);
}

static stk_status save_block(struct saver *s, uint32_t b)
{
    stk_engine *e = s->e;
    if (!s->w) STK_TRY(open_file(s, b));
    const struct stk_block *blk = &e->layout->blocks[b];
    for (uint32_t i = 0; i < blk->n_chunks; i++) {
        struct state_view v;
        STK_TRY(state_stage(e, blk->first_chunk + i, STATE_PARAM | STATE_OPT, &v));
        s->view = &v;
        chunk_pieces(e->layout, &e->layout->chunks[blk->first_chunk + i], save_piece, s);
        STK_TRY(s->st);
    }
    if (b + 1 < s->end_block) return STK_OK;
    struct st_writer *w = s->w;
    s->w = NULL;
    return st_writer_finish(w, &e->err);
}

static stk_status save_tensors(stk_engine *e, const char *folder)
{
    struct saver s = { .e = e, .folder = folder };
    s.index = sys_calloc(3ull * e->layout->n_tensors + 1, sizeof *s.index);
    if (!s.index)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory to write a checkpoint");
    stk_status st = STK_OK;
    for (uint32_t b = 0; st == STK_OK && b < e->layout->n_blocks; b++) st = save_block(&s, b);
    if (s.w) st_writer_abandon(s.w);
    sys_free(s.index);
    return st;
}

stk_status stk_save(stk_engine *e, const char *dir, const char *client_json, uint32_t keep)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_READY) return eng_refuse_state(e, "stk_save", "between steps");
    STK_TRY(stk_flush(e));
    STK_TRY(counters_check_client(e, "stk_save", client_json));
    char *partial = NULL;
    if (sys_mkdirs(dir) != 0)
        return stk_error_set(&e->err, STK_ERR_IO, errno,
                             "%s: the checkpoint folder cannot be made: %s", dir, strerror(errno));
    int64_t room = sys_disk_free(dir);
    uint64_t need = stk_save_bytes(e);
    char a[32], b[32];
    if (room >= 0 && (uint64_t)room < need)
        return stk_error_set(&e->err, STK_ERR_NOSPACE, ENOSPC,
                             "%s: a checkpoint needs %s, %s are free; the last one is untouched: "
                             "free space or lower --keep-checkpoints",
                             dir, mem_size_format(need, a), mem_size_format((uint64_t)room, b));
    STK_TRY(manifest_begin(dir, e->begun, &partial, &e->err));
    stk_status st = save_tensors(e, partial);
    json_t *doc = st == STK_OK ? counters_document(e, client_json) : NULL;
    if (st == STK_OK && !doc)
        st = stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the manifest");
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
    stk_status st;
};

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

static stk_status read_part(struct loader *l, const struct stk_tensor *t, int k, uint64_t first,
                            uint32_t n, void *out)
{
    char name[512];
    struct st_file *f = NULL;
    snprintf(name, sizeof name, "%s%s", t->name, suffix[k]);
    const struct st_tensor *s = find_tensor(l, name, &f);
    uint32_t bytes = t->frozen ? 2 : 4;
    if (!s || s->n_elements != t->n_elems || st_dtype_bytes(s->dtype) != bytes)
        return stk_error_set(
            &l->e->err, STK_ERR_FORMAT, 0,
            "%s: tensor %s is missing or has another size than the model's (%llu elements)",
            l->path, name, (unsigned long long)t->n_elems);
    return st_read(f, s, first * bytes, (uint64_t)n * bytes, out, &l->e->err);
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
        l->st = read_part(l, t, 0, tensor_elem, n, v->param + chunk_elem);
        return;
    }
    l->st = read_part(l, t, 0, tensor_elem, n, e->sio->work[0]);
    if (l->st == STK_OK) state_master_set(e, v, chunk_elem, n, e->sio->work[0]);
    if (l->st == STK_OK) l->st = read_part(l, t, 1, tensor_elem, n, v->exp_avg + chunk_elem);
    if (l->st == STK_OK) l->st = read_part(l, t, 2, tensor_elem, n, v->exp_avg_sq + chunk_elem);
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
    json_t *doc = NULL;
    STK_TRY(manifest_read(path, true, &doc, &e->err));
    struct loader l = { .e = e, .path = path };
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
