/* offload/layout.c - builds and checks blocks, tensors and chunks (offload/chunk.h).
 *
 * Owns: the memory of a struct stk_layout. Must not know: where state lives (engine/config.c places
 * it), what a block computes. Thread: the caller's, before the engine runs; nothing here is called
 * in a step but layout_check in tests. The order of tensors in a block (trainable first, then
 * frozen, each in the caller's order) is part of the numerics, since it decides which elements
 * share a chunk and so the order in which the norm is summed. */
#include "base/sys.h"
#include "offload/chunk.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define TENSOR_ELEMS_MAX                                                                           \
    (UINT64_C(1)                                                                                   \
     << 50) /* sums of 2^32 tensors stay far from overflow of byte counts in practice; checked */

static uint64_t align_elems(uint64_t n)
{
    return (n + CHUNK_ALIGN_ELEMS - 1) / CHUNK_ALIGN_ELEMS * CHUNK_ALIGN_ELEMS;
}

/* The frozen part begins at a multiple of 4 KiB of 16-bit parameters: its chunks are transferred
 * straight to their place in the block's vector. */
static uint64_t pad_trainable(uint64_t elems, bool frozen_follow)
{
    if (!frozen_follow) return elems;
    return (elems + CHUNK_FROZEN_ALIGN - 1) / CHUNK_FROZEN_ALIGN * CHUNK_FROZEN_ALIGN;
}

void layout_free(struct stk_layout *l)
{
    if (!l) return;
    for (uint32_t i = 0; l->tensors && i < l->n_tensors; i++) sys_free(l->tensors[i].name);
    for (uint32_t i = 0; l->blocks && i < l->n_blocks; i++) sys_free(l->blocks[i].name);
    sys_free(l->tensors);
    sys_free(l->tensor_first);
    sys_free(l->blocks);
    sys_free(l->chunks);
    sys_free(l);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static stk_status check_names_unique(const struct stk_layout *l, struct stk_error *err)
{
    const char **names = sys_calloc(l->n_tensors + 1, sizeof *names);
    if (!names)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the names of %u tensors",
                             l->n_tensors);
    for (uint32_t i = 0; i < l->n_tensors; i++) names[i] = l->tensors[i].name;
    qsort(names, l->n_tensors, sizeof *names, compare_names);
    stk_status status = STK_OK;
    for (uint32_t i = 1; i < l->n_tensors && status == STK_OK; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            status =
                stk_error_set(err, STK_ERR_CONFIG, 0,
                              "tensor name \"%s\" is used twice: names must be unique", names[i]);
    sys_free(names);
    return status;
}

static stk_status no_memory(struct stk_error *err)
{
    return stk_error_set(err, STK_ERR_NOMEM, 0,
                         "no memory for the table of blocks, tensors and chunks");
}

/* Appends the tensors of one block that are frozen (or not) to the flat vector. `given` is the
 * caller's number of the first. */
static stk_status add_tensors(struct stk_layout *l, struct stk_block *b,
                              const struct layout_block_in *in, bool frozen, uint32_t given,
                              uint32_t *tensor_of, struct stk_error *err)
{
    for (uint32_t k = 0; k < in->n_tensors; k++) {
        const struct layout_tensor_in *t = &in->tensors[k];
        if (t->frozen != frozen) continue;
        if (!t->name)
            return stk_error_set(err, STK_ERR_CONFIG, 0, "block \"%s\": tensor %u has no name",
                                 in->name, k);
        if (t->n_elems > TENSOR_ELEMS_MAX || b->elems > TENSOR_ELEMS_MAX)
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "tensor \"%s\": %" PRIu64 " elements is beyond the limit of 2^50",
                                 t->name, t->n_elems);
        uint32_t id = b->first_tensor + b->n_tensors;
        struct stk_tensor *x = &l->tensors[id];
        *x = (struct stk_tensor){ .name = sys_strdup(t->name),
                                   .block = (uint32_t)(b - l->blocks),
                                   .n_elems = t->n_elems,
                                   .first_elem = b->elems,
                                   .frozen = frozen,
                                   .decay = t->decay };
        if (!x->name) return no_memory(err);
        l->tensor_first[id] = b->elems;
        b->n_tensors++;
        l->n_tensors++;
        b->elems += align_elems(t->n_elems);
        l->params += t->n_elems;
        if (!frozen) l->params_trainable += t->n_elems;
        if (tensor_of) tensor_of[given + k] = id;
    }
    if (!frozen)
        b->elems_trainable = b->elems = pad_trainable(b->elems, b->n_tensors < in->n_tensors);
    return STK_OK;
}

/* One rank's part of a block, as [begin, end) of its trainable and of its frozen half. */
struct shard_parts {
    uint64_t begin[2], end[2];
};

static struct shard_parts parts_of(const struct stk_block *b, const uint64_t *boundary,
                                   uint32_t rank)
{
    uint64_t lo = boundary[rank], hi = boundary[rank + 1], mid = b->elems_trainable;
    struct shard_parts p = { { lo < mid ? lo : mid, lo > mid ? lo : mid },
                             { hi < mid ? hi : mid, hi > mid ? hi : mid } };
    return p;
}

static void add_chunks(struct stk_layout *l, struct stk_block *b, const struct shard_parts *p)
{
    b->first_chunk = l->n_chunks;
    for (int frozen = 0; frozen < 2; frozen++) {
        for (uint64_t at = p->begin[frozen]; at < p->end[frozen];) {
            uint64_t left = p->end[frozen] - at;
            uint32_t n = left < l->chunk_elems ? (uint32_t)left : l->chunk_elems;
            struct stk_chunk *c = &l->chunks[l->n_chunks];
            *c = (struct stk_chunk){ .id = l->n_chunks,
                                      .block = (uint32_t)(b - l->blocks),
                                      .first_elem = at,
                                      .n_elems = n,
                                      .frozen = frozen };
            for (int s = 0; s < CHUNK_STATE_N; s++) c->extent[s] = CHUNK_NO_EXTENT;
            at += n;
            l->n_chunks++;
        }
        if (!frozen) b->n_chunks_trainable = l->n_chunks - b->first_chunk;
    }
    b->n_chunks = l->n_chunks - b->first_chunk;
}

static stk_status cut_chunks(struct stk_layout *l, uint32_t rank, uint32_t ranks,
                             struct stk_error *err)
{
    uint64_t *boundary = sys_calloc((size_t)ranks + 1, sizeof *boundary), total = 0;
    struct shard_parts *parts = sys_calloc(l->n_blocks, sizeof *parts);
    stk_status status = boundary && parts ? STK_OK : no_memory(err);
    for (uint32_t i = 0; status == STK_OK && i < l->n_blocks; i++) {
        shard_boundaries(l->blocks[i].elems, ranks, NULL, boundary);
        parts[i] = parts_of(&l->blocks[i], boundary, rank);
        for (int k = 0; k < 2; k++)
            total += (parts[i].end[k] - parts[i].begin[k] + l->chunk_elems - 1) / l->chunk_elems;
    }
    if (status == STK_OK && total >= UINT32_MAX)
        status = stk_error_set(err, STK_ERR_CONFIG, 0,
                               "%" PRIu64 " chunks are too many: raise chunk_elems above %u", total,
                               l->chunk_elems);
    if (status == STK_OK && !(l->chunks = sys_calloc(total + 1, sizeof *l->chunks)))
        status = no_memory(err);
    for (uint32_t i = 0; status == STK_OK && i < l->n_blocks; i++)
        add_chunks(l, &l->blocks[i], &parts[i]);
    sys_free(parts);
    sys_free(boundary);
    return status;
}

static stk_status fill(struct stk_layout *l, const struct layout_block_in *in, uint32_t n_blocks,
                       uint32_t *tensor_of, struct stk_error *err)
{
    uint64_t n_tensors = 0;
    for (uint32_t i = 0; i < n_blocks; i++) n_tensors += in[i].n_tensors;
    if (n_tensors >= UINT32_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "%" PRIu64 " tensors are too many", n_tensors);
    l->blocks = sys_calloc(n_blocks, sizeof *l->blocks);
    l->tensors = sys_calloc(n_tensors + 1, sizeof *l->tensors);
    l->tensor_first = sys_calloc(n_tensors + 1, sizeof *l->tensor_first);
    if (!l->blocks || !l->tensors || !l->tensor_first) return no_memory(err);
    for (uint32_t i = 0, given = 0; i < n_blocks; given += in[i].n_tensors, i++) {
        struct stk_block *b = &l->blocks[i];
        if (!in[i].name) return stk_error_set(err, STK_ERR_CONFIG, 0, "block %u has no name", i);
        b->name = sys_strdup(in[i].name);
        l->n_blocks++;
        if (!b->name) return no_memory(err);
        b->first_tensor = l->n_tensors;
        STK_TRY(add_tensors(l, b, &in[i], false, given, tensor_of, err));
        STK_TRY(add_tensors(l, b, &in[i], true, given, tensor_of, err));
    }
    return check_names_unique(l, err);
}

stk_status layout_build(const struct layout_block_in *blocks, uint32_t n_blocks,
                        enum chunk_dtype dtype, uint32_t chunk_elems, uint32_t rank, uint32_t ranks,
                        struct stk_layout **out, uint32_t *tensor_of, struct stk_error *err)
{
    *out = NULL;
    if (n_blocks == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "the model has no blocks: describe at least one");
    if (chunk_elems == 0 || chunk_elems % CHUNK_ALIGN_ELEMS)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "chunk_elems is %u: it must be a multiple of %u", chunk_elems,
                             CHUNK_ALIGN_ELEMS);
    if (ranks == 0 || rank >= ranks)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "rank %u of %u: ranks count from 0 and there is at least one", rank,
                             ranks);
    struct stk_layout *l = sys_calloc(1, sizeof *l);
    if (!l) return no_memory(err);
    l->dtype = dtype;
    l->chunk_elems = chunk_elems;
    stk_status status = fill(l, blocks, n_blocks, tensor_of, err);
    if (status == STK_OK) status = cut_chunks(l, rank, ranks, err);
    if (status != STK_OK) {
        layout_free(l);
        return status;
    }
    *out = l;
    return STK_OK;
}

/* --- checking --- */

static stk_status check_tensors(const struct stk_layout *l, const struct stk_block *b,
                                struct stk_error *err)
{
    uint64_t at = 0;
    bool frozen = false;
    for (uint32_t t = b->first_tensor; t < b->first_tensor + b->n_tensors; t++) {
        const struct stk_tensor *x = &l->tensors[t];
        if (x->frozen && !frozen) at = pad_trainable(at, true);
        if (x->block != b - l->blocks || x->first_elem != at || l->tensor_first[t] != at || (frozen && !x->frozen))
            return stk_error_set(err, STK_ERR_STATE, 0,
                                 "block \"%s\": tensor \"%s\" is at element %" PRIu64
                                 ", expected %" PRIu64 ", trainable ones first",
                                 b->name, x->name, x->first_elem, at);
        if (!frozen && x->frozen && at != b->elems_trainable)
            return stk_error_set(err, STK_ERR_STATE, 0,
                                 "block \"%s\": trainable part ends at %" PRIu64
                                 ", expected %" PRIu64,
                                 b->name, b->elems_trainable, at);
        frozen = x->frozen;
        at += align_elems(x->n_elems);
    }
    if (at != b->elems || (!frozen && at != b->elems_trainable))
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "block \"%s\" has %" PRIu64 " elements (%" PRIu64
                             " trainable), its tensors %" PRIu64,
                             b->name, b->elems, b->elems_trainable, at);
    return STK_OK;
}

static bool chunk_placed_well(const struct stk_layout *l, const struct stk_chunk *c)
{
    for (int s = 0; s < CHUNK_STATE_N; s++) {
        bool nvme = c->home[s] == CHUNK_NVME, exists = chunk_bytes(l, c, (enum chunk_state)s) > 0;
        bool device = c->home[s] == CHUNK_DEVICE;
        if (c->home[s] != CHUNK_HOST && !nvme && !device) return false;
        if (device ? c->host[s] != NULL : c->device[s] != NULL) return false;
        if (nvme && (c->host[s] || (exists && c->extent[s] == CHUNK_NO_EXTENT))) return false;
        if (!nvme && c->extent[s] != CHUNK_NO_EXTENT) return false;
    }
    return true;
}

/* The chunks of a block form one contiguous range, trainable up to the border, frozen from there.
 */
static stk_status check_chunks(const struct stk_layout *l, const struct stk_block *b,
                               struct stk_error *err)
{
    uint64_t at = 0;
    for (uint32_t k = 0; k < b->n_chunks; k++) {
        const struct stk_chunk *c = &l->chunks[b->first_chunk + k];
        if (k == 0) at = c->first_elem;
        bool frozen = k >= b->n_chunks_trainable,
             size_ok = c->n_elems > 0 && c->n_elems <= l->chunk_elems;
        uint64_t lo = frozen ? b->elems_trainable : 0, hi = frozen ? b->elems : b->elems_trainable;
        bool last = k + 1 == b->n_chunks || k + 1 == b->n_chunks_trainable;
        if (!size_ok || c->id != b->first_chunk + k || c->block != b - l->blocks ||
            c->frozen != frozen || c->first_elem != at || at < lo || at + c->n_elems > hi ||
            at % CHUNK_ALIGN_ELEMS || c->n_elems % CHUNK_ALIGN_ELEMS ||
            (!last && c->n_elems != l->chunk_elems))
            return stk_error_set(err, STK_ERR_STATE, 0,
                                 "block \"%s\": chunk %u covers [%" PRIu64
                                 ", +%u), expected to begin at %" PRIu64 " inside [%" PRIu64
                                 ", %" PRIu64 ")",
                                 b->name, c->id, c->first_elem, c->n_elems, at, lo, hi);
        if (!chunk_placed_well(l, c))
            return stk_error_set(
                err, STK_ERR_STATE, 0,
                "block \"%s\": chunk %u: a state's home and its place disagree (INV-1)", b->name,
                c->id);
        at += c->n_elems;
    }
    return STK_OK;
}

stk_status layout_check(const struct stk_layout *l, struct stk_error *err)
{
    uint32_t tensors = 0, chunks = 0;
    uint64_t params = 0, trainable = 0;
    for (uint32_t i = 0; i < l->n_blocks; i++) {
        const struct stk_block *b = &l->blocks[i];
        if (b->first_tensor != tensors || b->first_chunk != chunks ||
            b->n_chunks_trainable > b->n_chunks)
            return stk_error_set(
                err, STK_ERR_STATE, 0,
                "block \"%s\": begins at tensor %u and chunk %u, expected %u and %u", b->name,
                b->first_tensor, b->first_chunk, tensors, chunks);
        tensors += b->n_tensors;
        chunks += b->n_chunks;
        if (tensors > l->n_tensors || chunks > l->n_chunks) break;
        STK_TRY(check_tensors(l, b, err));
        STK_TRY(check_chunks(l, b, err));
    }
    if (tensors != l->n_tensors || chunks != l->n_chunks)
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "the blocks hold %u tensors and %u chunks, the tables %u and %u",
                             tensors, chunks, l->n_tensors, l->n_chunks);
    for (uint32_t t = 0; t < l->n_tensors; t++) {
        params += l->tensors[t].n_elems;
        if (!l->tensors[t].frozen) trainable += l->tensors[t].n_elems;
    }
    if (params != l->params || trainable != l->params_trainable)
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "%" PRIu64 " parameters counted, %" PRIu64 " recorded", params,
                             l->params);
    return STK_OK;
}
