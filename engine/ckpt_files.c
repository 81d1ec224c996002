/* engine/ckpt_files.c - the safetensors files of one checkpoint while they are written.
 *
 * Owns the open files. Reads of the engine only what does not change after seal. Moments are written
 * from where they lie; the master of bf16 chunks is joined in the scratch memory, in tiles.
 * Must not know: who brings the chunks, and when. One thread at a time; blocking. */
#include "engine/ckpt_files.h"
#include "base/sys.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include <string.h>

#define FILE_BYTES_MAX (4ull << 30) /* a new file begins with the block that passes this */
#define JOINED_BYTES_MAX (8ull << 20) /* masters that wait for their flush */
#define BOUNCE_BYTES_MAX (1ull << 20)
#define TILE_BYTES (64ull << 10)      /* joined, then summed while it is in the cache */
#define PAGE 4096ull

const char *const ckpt_suffix[CKPT_ENTRIES] = { "", ".exp_avg", ".exp_avg_sq", ".exp_avg.absmax",
                                                ".exp_avg_sq.absmax" };

struct ckpt_file {
    char *name;
    struct st_writer *w;
    uint32_t end_block;        /* it holds the blocks up to here, from the file before on */
};

struct ckpt_files {
    const stk_engine *e;
    uint8_t *work, *bounce;    /* joined masters, up to `used`; for direct_write */
    uint64_t used;
    struct ckpt_file *file;
    uint32_t n;
    uint32_t *index;           /* [n_tensors][CKPT_ENTRIES]: declaration in its file */
    /* of the put under way */
    const struct state_view *view;
    struct st_writer *w;
    stk_status st;
    struct stk_error *err;
};

static uint64_t room_of(const stk_engine *e, uint64_t chunks, uint64_t most)
{
    uint64_t all = chunks * ((4ull * e->cfg.chunk_elems + PAGE - 1) / PAGE * PAGE);
    return all < most ? all : most;
}

/* A page more: pieces have the place in their page that they will have in the file. */
static uint64_t work_bytes(const stk_engine *e)
{
    return room_of(e, SAVE_BATCH, JOINED_BYTES_MAX) + PAGE;
}
static uint64_t bounce_bytes(const stk_engine *e) { return room_of(e, 1, BOUNCE_BYTES_MAX); }

uint64_t ckpt_scratch_bytes(const stk_engine *e) { return work_bytes(e) + bounce_bytes(e); }

static uint64_t scales_of(uint64_t n) { return (n + ADAM_QUANT_ELEMS - 1) / ADAM_QUANT_ELEMS; }

static enum chunk_moments moments_of(const struct stk_layout *l, const struct stk_tensor *t)
{
    return l->blocks[t->block].moments;
}

static uint64_t tensor_bytes(const struct stk_layout *l, const struct stk_tensor *t)
{
    if (t->frozen) return t->n_elems * 2;
    enum chunk_moments m = moments_of(l, t);
    if (m == CHUNK_MOMENTS_8BIT) return t->n_elems * 6 + 8 * scales_of(t->n_elems);
    return t->n_elems * (m == CHUNK_MOMENTS_F32 ? 12 : 8);
}

uint64_t stk_save_bytes(const stk_engine *e)
{
    uint64_t sum = 65536;
    for (uint32_t i = 0; e->layout && i < e->layout->n_tensors; i++)
        sum += tensor_bytes(e->layout, &e->layout->tensors[i]) + 1024;
    return sum;
}

/* --- opening ---------------------------------------------------------------------------------- */

static stk_status declare_tensor(struct ckpt_files *f, struct st_writer *w, uint32_t i,
                                 struct stk_error *err)
{
    const struct stk_layout *l = f->e->layout;
    const struct stk_tensor *t = &l->tensors[i];
    enum st_dtype half = l->dtype == CHUNK_BF16 ? ST_BF16 : ST_F16;
    static const enum st_dtype dtype_of[] = { ST_F32, ST_BF16, ST_U8 };
    enum chunk_moments m = moments_of(l, t);
    for (int k = 0; k < (t->frozen ? 1 : m == CHUNK_MOMENTS_8BIT ? CKPT_ENTRIES : 3); k++) {
        char name[512];
        uint64_t n = k < 3 ? t->n_elems : scales_of(t->n_elems);
        enum st_dtype d = t->frozen ? half : k == 1 || k == 2 ? dtype_of[m] : ST_F32;
        snprintf(name, sizeof name, "%s%s", t->name, ckpt_suffix[k]);
        STK_TRY(st_writer_declare(w, name, d, 1, &n, &f->index[CKPT_ENTRIES * i + k], err));
    }
    return STK_OK;
}

/* The file that begins with block b, with as many blocks as fit. */
static stk_status open_file(struct ckpt_files *f, const char *folder, uint32_t b,
                            struct stk_error *err)
{
    const struct stk_layout *l = f->e->layout;
    struct ckpt_file *file = &f->file[f->n++];
    uint64_t bytes = 0, most = f->e->save.file_bytes_max ? f->e->save.file_bytes_max
                                                         : FILE_BYTES_MAX;
    char path[4096];
    file->name = sys_format("state-%05u.safetensors", f->n);
    if (!file->name) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a file's name");
    snprintf(path, sizeof path, "%s/%s", folder, file->name);
    STK_TRY(st_writer_new(path, NULL, &file->w, err));
    STK_TRY(st_writer_sums(file->w, err));
    st_writer_direct(file->w, f->bounce, bounce_bytes(f->e));
    for (file->end_block = b; file->end_block < l->n_blocks; file->end_block++) {
        const struct stk_block *blk = &l->blocks[file->end_block];
        uint64_t more = 0;
        for (uint32_t i = 0; i < blk->n_tensors; i++)
            more += tensor_bytes(l, &l->tensors[blk->first_tensor + i]);
        if (file->end_block > b && bytes + more > most) break;
        bytes += more;
        for (uint32_t i = 0; i < blk->n_tensors; i++)
            STK_TRY(declare_tensor(f, file->w, blk->first_tensor + i, err));
    }
    return st_writer_begin(file->w, err);
}

stk_status ckpt_files_open(const stk_engine *e, const char *folder, void *scratch,
                           struct ckpt_files **out, struct stk_error *err)
{
    const struct stk_layout *l = e->layout;
    struct ckpt_files *f = sys_calloc(1, sizeof *f);
    *out = NULL;
    if (f) f->file = sys_calloc(l->n_blocks + 1, sizeof *f->file);
    if (f) f->index = sys_calloc((uint64_t)CKPT_ENTRIES * l->n_tensors + 1, sizeof *f->index);
    if (!f || !f->file || !f->index) {
        ckpt_files_abandon(f);
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to write a checkpoint");
    }
    f->e = e;
    f->work = scratch;
    f->bounce = f->work + work_bytes(e);
    stk_status st = STK_OK;
    for (uint32_t b = 0; st == STK_OK && b < l->n_blocks; b = f->file[f->n - 1].end_block)
        st = open_file(f, folder, b, err);
    if (st == STK_OK) *out = f;
    else ckpt_files_abandon(f);
    return st;
}

/* --- writing ---------------------------------------------------------------------------------- */

stk_status ckpt_files_flush(struct ckpt_files *f, struct stk_error *err)
{
    for (uint32_t i = 0; i < f->n; i++) STK_TRY(st_writer_flush(f->file[i].w, err));
    f->used = 0;
    return STK_OK;
}

static void put(struct ckpt_files *f, uint32_t index, uint64_t at, const void *buf, uint64_t bytes)
{
    if (f->st == STK_OK) f->st = st_writer_add(f->w, index, at, buf, bytes, f->err);
}

/* Room for n elements of a tensor that begin at `place` in the file. */
static float *joined_room(struct ckpt_files *f, uint64_t place, uint32_t n)
{
    uint64_t at = f->used;
    if (at % PAGE != place % PAGE) at = (at + PAGE - 1) / PAGE * PAGE + place % PAGE;
    if (at + 4ull * n > work_bytes(f->e)) {
        f->st = ckpt_files_flush(f, f->err);
        at = place % PAGE;
    }
    f->used = at + 4ull * n;
    return (float *)(void *)(f->work + at);
}

static void put_joined(struct ckpt_files *f, uint32_t index, uint64_t first, uint32_t chunk_elem,
                       uint32_t n)
{
    uint64_t base = st_writer_offset(f->w, index);
    for (uint32_t done = 0; done < n && f->st == STK_OK;) {
        uint64_t at = 4 * (first + done);
        uint32_t k = n - done < TILE_BYTES / 4 ? n - done : (uint32_t)(TILE_BYTES / 4);
        float *to = joined_room(f, base + at, k);
        if (f->st != STK_OK) return;
        state_master_get(f->e, f->view, chunk_elem + done, k, to);
        put(f, index, at, to, 4ull * k);
        done += k;
    }
}

/* As they lie. A piece begins at a multiple of 64 elements of its tensor. */
static void put_moments(struct ckpt_files *f, const uint32_t *index, uint64_t first,
                        uint32_t chunk_elem, uint32_t n)
{
    const struct adam_moments *m = &f->view->moments;
    uint64_t width = m->kind == CHUNK_MOMENTS_F32 ? 4 : m->kind == CHUNK_MOMENTS_BF16 ? 2 : 1;
    for (int k = 0; k < 2; k++) {
        put(f, index[1 + k], first * width, m->at[k] + width * chunk_elem, width * n);
        if (m->kind == CHUNK_MOMENTS_8BIT)
            put(f, index[3 + k], 4 * scales_of(first), m->absmax[k] + scales_of(chunk_elem),
                4 * scales_of(n));
    }
}

static void put_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                      uint32_t n)
{
    struct ckpt_files *f = arg;
    const struct state_view *v = f->view;
    const uint32_t *index = &f->index[CKPT_ENTRIES * tensor];
    if (v->frozen) {
        put(f, index[0], tensor_elem * 2, v->param + chunk_elem, 2ull * n);
        return;
    }
    if (f->e->layout->dtype == CHUNK_FP16)
        put(f, index[0], tensor_elem * 4, v->master + chunk_elem, 4ull * n);
    else
        put_joined(f, index[0], tensor_elem, chunk_elem, n);
    put_moments(f, index, tensor_elem, chunk_elem, n);
}

stk_status ckpt_files_put(struct ckpt_files *f, const struct stk_chunk *c,
                          const struct state_view *v, struct stk_error *err)
{
    uint32_t k = 0;
    while (c->block >= f->file[k].end_block) k++;
    f->w = f->file[k].w;
    f->view = v;
    f->st = STK_OK;
    f->err = err;
    chunk_pieces(f->e->layout, c, put_piece, f);
    return f->st;
}

/* --- the end ---------------------------------------------------------------------------------- */

void ckpt_files_abandon(struct ckpt_files *f)
{
    if (!f) return;
    for (uint32_t i = 0; i < f->n; i++) {
        st_writer_abandon(f->file[i].w);
        sys_free(f->file[i].name);
    }
    sys_free(f->file);
    sys_free(f->index);
    sys_free(f);
}

static stk_status finish_file(struct ckpt_file *file, json_t *files, struct stk_error *err)
{
    uint64_t size = 0;
    uint32_t crc = 0;
    struct st_writer *w = file->w;
    bool known = st_writer_sum(w, &size, &crc);
    file->w = NULL;
    STK_TRY(st_writer_finish(w, err));
    json_t *entry = known ? json_pack("{s:I, s:I}", "size_bytes", (json_int_t)size, "crc32",
                                      (json_int_t)crc)
                          : NULL; /* then the manifest reads the file */
    if (known && json_object_set_new(files, file->name, entry) != 0)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the manifest");
    return STK_OK;
}

stk_status ckpt_files_finish(struct ckpt_files *f, json_t *doc, struct stk_error *err)
{
    json_t *files = json_object();
    stk_status st = STK_OK;
    if (!files || json_object_set(doc, "files", files) != 0)
        st = stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the manifest");
    for (uint32_t i = 0; i < f->n && st == STK_OK; i++) st = finish_file(&f->file[i], files, err);
    json_decref(files);
    ckpt_files_abandon(f);
    return st;
}
