/* tests/trainer/fake_engine.c - a stand-in for the engine in tests of the model: the calls of
 * engine/stoker.h that a client makes, over memory that all fits, without update, tiers or plan.
 *
 * What it does so that mistakes of a client show: every visit's workspace is filled with NaNs
 * before it; a full set that is recomputed is NaNs before it; with STK_ACT_HOST a full set comes
 * back at another address than it was written to; the arena may be of a discrete device, where only
 * the device may follow pointers. Two accumulation orders. Application's thread. */
#include "base/convert.h"
#include "base/numeric.h"
#include "engine/stoker.h"
#include "gpu/device.h"
#include "gpu/ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAKE_BLOCKS 64
#define FAKE_TENSORS 512
#define FAKE_RESERVES 8

struct fake_tensor {
    uint32_t block;
    uint64_t offset, n;
    bool frozen;
};
struct fake_block {
    uint64_t elems, trainable;
    uint8_t *param;
    float *grad;
    uint32_t visits_left;
};
struct fake_visit {
    uint32_t place, micro;
    stk_dir dir;
};

struct stk_engine {
    stk_config cfg;
    struct stk_error err;
    struct exec *ex;
    struct dev *dev;
    struct dev_stream *stream;
    struct fake_block blocks[FAKE_BLOCKS];
    uint32_t n_blocks;
    struct fake_tensor tensors[FAKE_TENSORS];
    uint32_t n_tensors;
    stk_place places[FAKE_BLOCKS];
    uint32_t n_places;
    uint64_t workspace_bytes, full_max_bytes, flow_bytes;
    struct {
        stk_where where;
        uint64_t size_bytes;
        void *base;
    } reserves[FAKE_RESERVES];
    uint32_t n_reserves;
    /* after seal: addresses in the device's arena */
    uint64_t used_bytes;
    uint8_t *arena, *boundary[FAKE_BLOCKS], *full[FAKE_BLOCKS], *full_in, *full_out, *flow,
        *workspace;
    uint8_t *host_full[FAKE_BLOCKS]; /* STK_ACT_HOST: [n_micro] each */
    uint8_t *nan;
    struct fake_visit *visits;
    uint32_t n_visits, next;
    bool eval;
};

static stk_status fake_set(stk_engine *e, const char *what)
{
    stk_error_clear(&e->err);
    return stk_error_set(&e->err, STK_ERR_STATE, 0, "stand-in of the engine: %s", what);
}

void stk_config_init(stk_config *c, size_t size)
{
    memset(c, 0, size);
    c->size = size;
    c->micro_batches = 1;
    c->activations = STK_ACT_KEEP;
    c->compute_threads = 1;
}

stk_status stk_open(const stk_config *c, stk_engine **out)
{
    stk_engine *e = *out = calloc(1, sizeof *e);
    if (!e) return STK_ERR_NOMEM;
    e->cfg = *c;
    struct dev_cfg d = {
        .kind = c->device == STK_DEVICE_HOST_DISCRETE ? DEV_HOST_DISCRETE : DEV_HOST,
        .memory_bytes = (uint64_t)1 << 30,
        .compute_threads = c->compute_threads,
        .poison = true,
        .matmul = c->matmul == STK_MATMUL_BF16 ? DEV_MATMUL_BF16 : DEV_MATMUL_F32,
    };
    STK_TRY(exec_open_threads(&e->ex, &e->err));
    d.ex = e->ex;
    STK_TRY(dev_open(&d, &e->dev, &e->err));
    return dev_stream_open(e->dev, "compute", 0, &e->stream, &e->err);
}

void stk_close(stk_engine *e)
{
    if (!e) return;
    if (e->stream) dev_stream_close(e->stream);
    dev_close(e->dev);
    exec_close(e->ex);
    for (uint32_t i = 0; i < e->n_reserves; i++)
        if (e->reserves[i].where == STK_ON_HOST) free(e->reserves[i].base);
    for (uint32_t p = 0; p < e->n_places; p++) free(e->host_full[p]);
    free(e->nan);
    free(e->visits);
    free(e);
}

const char *stk_error_text(const stk_engine *e) { return e ? e->err.text : "no memory"; }
struct dev *stk_device(stk_engine *e) { return e->dev; }
struct dev_stream *stk_compute_stream(stk_engine *e) { return e->stream; }
uint64_t stk_tensor_offset(const stk_engine *e, uint32_t tensor)
{
    return e->tensors[tensor].offset;
}

/* --- description ----------------------------------------------------------------------------- */

stk_status stk_block(stk_engine *e, const char *name, const stk_tensor_desc *tensors, uint32_t n,
                     uint32_t *block, uint32_t *first_tensor)
{
    (void)name;
    struct fake_block *b = &e->blocks[e->n_blocks];
    *first_tensor = e->n_tensors;
    for (uint32_t i = 0; i < n; i++) {
        if (i && tensors[i - 1].frozen && !tensors[i].frozen)
            return fake_set(e, "a trainable tensor after a frozen one");
        e->tensors[e->n_tensors++] =
            (struct fake_tensor){ e->n_blocks, b->elems, tensors[i].n_elems, tensors[i].frozen };
        b->elems += (tensors[i].n_elems + 63) / 64 * 64;
        if (!tensors[i].frozen) b->trainable = b->elems;
    }
    *block = e->n_blocks++;
    return STK_OK;
}

stk_status stk_place_cost(stk_engine *e, uint32_t place, const stk_visit_cost *cost)
{
    return STK_OK;
}

stk_status stk_order(stk_engine *e, const stk_place *places, uint32_t n)
{
    memcpy(e->places, places, n * sizeof *places);
    e->n_places = n;
    return STK_OK;
}

stk_status stk_workspace(stk_engine *e, uint64_t size_bytes)
{
    e->workspace_bytes = size_bytes;
    return STK_OK;
}

stk_status stk_reserve(stk_engine *e, stk_where where, const char *owner, uint64_t size_bytes,
                       uint32_t *handle)
{
    (void)owner;
    e->reserves[e->n_reserves].where = where;
    e->reserves[e->n_reserves].size_bytes = size_bytes;
    *handle = e->n_reserves++;
    return STK_OK;
}
void *stk_reserved(stk_engine *e, uint32_t handle) { return e->reserves[handle].base; }

/* --- seal ------------------------------------------------------------------------------------ */

static uint8_t *fake_take(stk_engine *e, uint64_t size_bytes)
{
    uint8_t *p = (uint8_t *)((uintptr_t)e->arena + e->used_bytes);
    e->used_bytes += (size_bytes + 4095) / 4096 * 4096;
    return p;
}

/* Twice: with arena NULL to count, then for real. */
static void fake_carve(stk_engine *e)
{
    e->used_bytes = 0;
    for (uint32_t b = 0; b < e->n_blocks; b++) {
        e->blocks[b].param = fake_take(e, e->blocks[b].elems * 2);
        uint8_t *grad = fake_take(e, e->blocks[b].trainable * 4);
        e->blocks[b].grad = e->blocks[b].trainable ? (float *)(void *)grad : NULL;
    }
    e->full_max_bytes = e->flow_bytes = 0;
    for (uint32_t p = 0; p < e->n_places; p++) {
        const stk_place *place = &e->places[p];
        e->boundary[p] = fake_take(e, place->in_bytes * e->cfg.micro_batches);
        bool keep = e->cfg.activations == STK_ACT_KEEP;
        e->full[p] = keep ? fake_take(e, place->full_bytes * e->cfg.micro_batches) : NULL;
        if (place->full_bytes > e->full_max_bytes) e->full_max_bytes = place->full_bytes;
        uint64_t flow_bytes = place->flow_bytes ? place->flow_bytes : place->in_bytes;
        if (flow_bytes > e->flow_bytes) e->flow_bytes = flow_bytes;
    }
    e->full_out = fake_take(e, e->full_max_bytes);
    e->full_in = fake_take(e, e->full_max_bytes);
    e->flow = fake_take(e, e->flow_bytes * e->cfg.micro_batches);
    e->workspace = fake_take(e, e->workspace_bytes);
    for (uint32_t i = 0; i < e->n_reserves; i++)
        if (e->reserves[i].where == STK_ON_DEVICE)
            e->reserves[i].base = fake_take(e, e->reserves[i].size_bytes);
}

stk_status stk_seal(stk_engine *e, bool dry)
{
    (void)dry;
    void *arena;
    fake_carve(e);
    STK_TRY(dev_reserve(e->dev, e->used_bytes, &arena, &e->err));
    e->arena = arena;
    fake_carve(e);
    for (uint32_t i = 0; i < e->n_reserves; i++)
        if (e->reserves[i].where == STK_ON_HOST)
            e->reserves[i].base =
                aligned_alloc(4096, (e->reserves[i].size_bytes + 4095) / 4096 * 4096);
    for (uint32_t p = 0; p < e->n_places && e->cfg.activations == STK_ACT_HOST; p++)
        e->host_full[p] = malloc(e->places[p].full_bytes * e->cfg.micro_batches + 1);
    uint64_t nan = e->workspace_bytes > e->full_max_bytes ? e->workspace_bytes : e->full_max_bytes;
    e->nan = malloc(nan);
    e->visits = calloc((uint64_t)2 * e->n_places * e->cfg.micro_batches, sizeof *e->visits);
    if (!e->nan || !e->visits) return fake_set(e, "no memory");
    memset(e->nan, 0xff, nan);
    return STK_OK;
}

/* --- parameters and gradients ---------------------------------------------------------------- */

stk_status stk_tensor_write(stk_engine *e, uint32_t tensor, uint64_t first, uint64_t n,
                            const void *data, stk_dtype dtype)
{
    const struct fake_tensor *t = &e->tensors[tensor];
    uint16_t *bits = malloc(n * 2);
    float *wide = malloc(n * 4);
    if (!bits || !wide || dtype != STK_BF16) return fake_set(e, "only bf16 can be written");
    memcpy(bits, data, n * 2);
    if (e->cfg.dtype == STK_FP16) {
        convert_bf16_to_f32(data, wide, n);
        convert_f32_to_fp16(wide, bits, n);
    }
    stk_status st = dev_copy(e->stream, e->blocks[t->block].param + (t->offset + first) * 2, bits,
                             n * 2, DEV_TO_DEVICE, &e->err);
    if (st == STK_OK) st = dev_sync(e->stream, &e->err);
    free(bits);
    free(wide);
    return st;
}

stk_status stk_tensor_read(stk_engine *e, uint32_t tensor, stk_what what, uint64_t first,
                           uint64_t n, void *data, stk_dtype dtype)
{
    const struct fake_tensor *t = &e->tensors[tensor];
    if (what != STK_READ_GRAD || dtype != STK_F32 || t->frozen)
        return fake_set(e, "only f32 gradients of trainable tensors");
    STK_TRY(dev_copy(e->stream, data, e->blocks[t->block].grad + t->offset + first, n * 4,
                     DEV_TO_HOST, &e->err));
    STK_TRY(dev_sync(e->stream, &e->err));
    float scale = e->cfg.loss_scale > 0 ? (float)e->cfg.loss_scale : 1.0f;
    for (uint64_t i = 0; i < n; i++) ((float *)data)[i] /= scale;
    return STK_OK;
}

/* --- steps ----------------------------------------------------------------------------------- */

static void fake_add(stk_engine *e, uint32_t place, uint32_t micro, stk_dir dir)
{
    if (dir == STK_FORWARD && e->places[place].fused && !e->eval) return;
    e->visits[e->n_visits++] = (struct fake_visit){ place, micro, dir };
    if (dir == STK_BACKWARD) e->blocks[e->places[place].block].visits_left++;
}

/* The first position of a block that stands at two. Its backward visits come after all others of
 * the step, so that both orders add to its gradient in the same sequence. */
static bool fake_is_last(const stk_engine *e, uint32_t place)
{
    return place == 0 && e->places[0].block == e->places[e->n_places - 1].block;
}

static void fake_pass(stk_engine *e, stk_dir dir, uint32_t first_micro, uint32_t n_micro)
{
    for (uint32_t i = 0; i < e->n_places; i++) {
        uint32_t place = dir == STK_FORWARD ? i : e->n_places - 1 - i;
        if (dir == STK_BACKWARD && fake_is_last(e, place)) continue;
        for (uint32_t k = 0; k < n_micro; k++) fake_add(e, place, first_micro + k, dir);
    }
}

static stk_status fake_begin(stk_engine *e, bool eval)
{
    const uint32_t n = e->cfg.micro_batches,
                   group = e->cfg.accumulate == STK_ACCUMULATE_MICRO ? 1 : n;
    e->n_visits = e->next = 0;
    e->eval = eval;
    for (uint32_t b = 0; b < e->n_blocks; b++) {
        e->blocks[b].visits_left = 0;
        if (e->blocks[b].grad && !eval)
            STK_TRY(dev_zero(e->stream, e->blocks[b].grad, e->blocks[b].trainable * 4, &e->err));
    }
    for (uint32_t k = 0; k < n; k += group) {
        fake_pass(e, STK_FORWARD, k, group);
        if (!eval) fake_pass(e, STK_BACKWARD, k, group);
    }
    for (uint32_t k = 0; k < n && !eval && fake_is_last(e, 0); k++) fake_add(e, 0, k, STK_BACKWARD);
    return STK_OK;
}

stk_status stk_step_begin(stk_engine *e, const stk_step *s)
{
    (void)s;
    return fake_begin(e, false);
}
stk_status stk_eval_begin(stk_engine *e) { return fake_begin(e, true); }
stk_status stk_step_end(stk_engine *e, stk_step_stats *stats)
{
    (void)stats;
    return dev_sync(e->stream, &e->err);
}
stk_status stk_eval_end(stk_engine *e) { return dev_sync(e->stream, &e->err); }

/* Where this visit's full set is, with its content as the activation policy has it. */
static stk_status fake_full(stk_engine *e, stk_visit *v)
{
    const uint64_t bytes = e->places[v->place].full_bytes, at = v->micro * bytes;
    if (!bytes) return STK_OK;
    if (e->cfg.activations == STK_ACT_KEEP && !v->eval) {
        v->full = e->full[v->place] + at;
        return STK_OK;
    }
    v->full = v->dir == STK_FORWARD ? e->full_out : e->full_in;
    const uint8_t *from = e->nan;
    if (v->dir == STK_BACKWARD && e->cfg.activations == STK_ACT_HOST)
        from = e->host_full[v->place] + at;
    v->recompute = v->dir == STK_BACKWARD && e->cfg.activations == STK_ACT_RECOMPUTE;
    return dev_copy(e->stream, v->full, from, bytes, DEV_TO_DEVICE, &e->err);
}

stk_status stk_next(stk_engine *e, stk_visit *v)
{
    if (e->next == e->n_visits) return STK_END;
    const struct fake_visit *f = &e->visits[e->next];
    const uint32_t place = f->place, block = e->places[place].block;
    *v = (stk_visit){
        .index = e->next++,
        .place = place,
        .block = block,
        .micro = f->micro,
        .dir = f->dir,
        .eval = e->eval,
        .param = e->blocks[block].param,
        .workspace = e->workspace,
        .workspace_bytes = e->workspace_bytes,
        .stream = e->stream,
        .loss_scale = e->cfg.loss_scale > 0 ? e->cfg.loss_scale : 1,
    };
    if (e->places[place].in_bytes)
        v->in = e->boundary[place] + f->micro * e->places[place].in_bytes;
    if (f->dir == STK_FORWARD && place + 1 < e->n_places)
        v->out = e->boundary[place + 1] + f->micro * e->places[place + 1].in_bytes;
    if (f->dir == STK_BACKWARD) {
        v->grad = e->blocks[block].grad;
        v->flow = e->flow + f->micro * e->flow_bytes;
        v->last_of_block = --e->blocks[block].visits_left == 0;
    }
    STK_TRY(dev_copy(e->stream, e->workspace, e->nan, e->workspace_bytes, DEV_TO_DEVICE, &e->err));
    return fake_full(e, v);
}

stk_status stk_done(stk_engine *e, const stk_visit *v)
{
    const uint64_t bytes = e->places[v->place].full_bytes;
    if (!bytes || v->dir != STK_FORWARD || v->eval || e->cfg.activations != STK_ACT_HOST)
        return STK_OK;
    return dev_copy(e->stream, e->host_full[v->place] + v->micro * bytes, v->full, bytes,
                    DEV_TO_HOST, &e->err);
}
