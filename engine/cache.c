/* engine/cache.c - a part of the state that lives on NVMe, kept in memory instead: which chunks, in
 * which order, how many a given room holds.
 *
 * Pure, application's thread, inside stk_seal; place.c asks. Owns the order of use. Must not know
 * drives, nor how anything moves: a chunk that is kept simply has a host home.
 *
 * WHY A FIXED SUBSET. The update uses every chunk's state once a step, always in one order: the
 * references are a cycle. Kept from a use to the next use of the same chunk, a state is in memory
 * when the cycle starts over; so at most what fits memory at that one moment can be spared its
 * transfers, for any policy, Belady's with knowledge of the future included. A subset that never
 * leaves memory reaches this bound exactly (and LRU, on a cycle longer than memory, spares
 * nothing): what Belady's rule would keep is known before the run, so it is a home, not a cache that
 * is looked after.
 *
 * WHICH. Bytes moved a step for each byte held: a 16-bit parameter 3 to 4 (read and written by the
 * update, read by the forward and the backward visit unless the device's cache bridges them);
 * optimizer state 2 and gradients 2 (one read, one write). So parameters go first, by whole blocks,
 * because a block whose chunks are all in host memory needs no copy where the device reads it in
 * place; then optimizer state, then gradients, chunk by chunk. Within each, the first of the
 * update's order: the norm ends the step before, and the forward of the next one waits for these
 * first, when no transfer lies behind anything yet; the later ones are read while the earlier are
 * computed with. */
#include "engine/engine.h"
#include "base/sys.h"


static void order_block(stk_engine *e, uint32_t block, bool *seen)
{
    const struct stk_block *b = &e->layout->blocks[block];
    if (seen[block]) return;
    seen[block] = true;
    e->use_blocks[e->n_use_blocks++] = block;
    for (uint32_t k = 0; k < b->n_chunks_trainable; k++)
        e->use_chunks[e->n_use_chunks++] = b->first_chunk + k;
}

stk_status cache_order(stk_engine *e)
{
    const struct stk_layout *l = e->layout;
    bool *seen = sys_calloc(l->n_blocks, sizeof *seen);
    e->use_blocks = sys_calloc(l->n_blocks, sizeof *e->use_blocks);
    e->use_chunks = sys_calloc(l->n_chunks ? l->n_chunks : 1, sizeof *e->use_chunks);
    if (!seen || !e->use_blocks || !e->use_chunks) {
        sys_free(seen);
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the order of the chunks");
    }
    /* as engine/plan_update.c has it */
    for (uint32_t i = 0; i < e->n_places; i++) order_block(e, e->places[i].block, seen);
    for (uint32_t i = 0; i < l->n_blocks; i++) order_block(e, i, seen);
    sys_free(seen);
    return STK_OK;
}

void cache_free(stk_engine *e)
{
    sys_free(e->use_blocks);
    sys_free(e->use_chunks);
}

bool cache_allowed(const stk_engine *e, const struct eng_placement *pl)
{
    bool nvme = pl->param == CHUNK_NVME || pl->opt == CHUNK_NVME || pl->grad == CHUNK_NVME;
    return nvme && e->cfg.host_memory && !e->cfg.durable;
}

void cache_homes(const stk_engine *e, const struct eng_placement *pl)
{
    for (uint32_t i = 0; i < pl->cached[CHUNK_PARAM]; i++) {
        const struct stk_block *b = &e->layout->blocks[e->use_blocks[i]];
        for (uint32_t k = 0; k < b->n_chunks; k++)
            e->pchunks[b->first_chunk + k].home[CHUNK_PARAM] = CHUNK_HOST;
    }
    for (int s = CHUNK_OPT; s <= CHUNK_GRAD; s++)
        for (uint32_t i = 0; i < pl->cached[s]; i++)
            e->pchunks[e->use_chunks[i]].home[s] = CHUNK_HOST;
}

/* How many units (blocks or chunks) a state has, and what one of them takes of memory. */
static uint32_t units(const stk_engine *e, enum chunk_state s)
{
    return s == CHUNK_PARAM ? e->n_use_blocks : e->n_use_chunks;
}
static uint64_t unit_bytes(const stk_engine *e, enum chunk_state s, uint32_t i)
{
    if (s == CHUNK_PARAM) return round_page(e->layout->blocks[e->use_blocks[i]].elems * 2);
    return chunk_bytes(e->layout, &e->layout->chunks[e->use_chunks[i]], s);
}

bool cache_take(const stk_engine *e, struct eng_placement *pl, enum chunk_state s,
                uint64_t room_bytes)
{
    const uint8_t home[CHUNK_STATE_N] = { pl->param, pl->opt, pl->grad };
    uint32_t had = pl->cached[s];
    if (home[s] != CHUNK_NVME) return false;
    /* own order: a departure may ask for any block, and has slots only for all or none */
    if (s == CHUNK_PARAM && e->cfg.own_order) return false;
    while (pl->cached[s] < units(e, s)) {
        uint64_t bytes = unit_bytes(e, s, pl->cached[s]);
        if (bytes > room_bytes) break;
        room_bytes -= bytes;
        pl->cached[s]++;
    }
    return pl->cached[s] != had;
}

void cache_note(stk_engine *e, const struct eng_placement *pl)
{
    static const char *const name[CHUNK_STATE_N] = { "parameters", "optimizer state",
                                                     "gradients" };
    const uint8_t home[CHUNK_STATE_N] = { pl->param, pl->opt, pl->grad };
    bool nvme = pl->param == CHUNK_NVME || pl->opt == CHUNK_NVME || pl->grad == CHUNK_NVME;
    if (nvme && e->cfg.host_memory && e->cfg.durable)
        eng_note(e, "durable steps need all parameters and optimizer state on NVMe: memory that "
                    "--host-memory leaves is not used to keep a part of them");
    if (!cache_allowed(e, pl)) return;
    for (int s = 0; s < CHUNK_STATE_N; s++) {
        uint64_t held = 0, all = 0;
        char a[32];
        if (home[s] != CHUNK_NVME) continue;
        for (uint32_t i = 0; i < units(e, s); i++) {
            uint64_t bytes = unit_bytes(e, s, i);
            all += bytes;
            if (i < pl->cached[s]) held += bytes;
        }
        if (held == 0) continue;
        eng_note(e, "%s: %u of %u %s (%.1f %%, %s) are kept in memory%s",
                 name[s], pl->cached[s], units(e, s), s == CHUNK_PARAM ? "blocks" : "chunks",
                 100.0 * (double)held / (double)all, mem_size_format(held, a),
                 pl->cached[s] == units(e, s) ? ""
                                              : ", the first that a step needs; the others on NVMe");
    }
}
