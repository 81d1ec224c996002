/* engine/place_table.c - what a placement is in bytes: the planner's view of it, and the table of who owns
 * which byte.
 *
 * Owns no memory; runs on the application's thread inside stk_seal. Must not know how a placement is
 * chosen (place.c). */
#include "engine/durable.h"
#include "engine/save.h"
#include "engine/spec.h"
#include "engine/twin.h"
#include "base/sys.h"
#include <string.h>

/* As measured, and some: stacks, rings, what libraries keep for themselves; nodes, edges, extents of
 * a chunk. */
#define THREADS_BYTES (2048ull << 10)
#define TABLES_BYTES (8ull << 10)

/* What a person calls each arena, and the option that makes it smaller. */
static const struct { const char *owner, *option; } arena_text[PLAN_ARENA_N] = {
    [PLAN_ARENA_PARAM] = { "parameter cache", "--prefetch 0" },
    [PLAN_ARENA_ACC] = { "gradient accumulators (fp32)", "--accumulate layer" },
    [PLAN_ARENA_ACT] = { "activations", "--activations recompute or a smaller --micro-batch" },
    [PLAN_ARENA_CAST] = { "16-bit gradients in flight", "" },
    [PLAN_ARENA_BOUNCE] = { "parameters in flight", "" },
    [PLAN_ARENA_UPDATE] = { "update staging", "" },
    [PLAN_ARENA_GRAD] = { "gradients in flight", "" },
    [PLAN_ARENA_SAVE] = { "offloaded activations", "--activations recompute" },
};

/* An option that is in force already is no advice. */
static const char *arena_option(const stk_engine *e, const struct eng_placement *pl, int arena)
{
    bool layer = e->cfg.accumulate == STK_ACCUMULATE_LAYER || e->cfg.micro_batches == 1,
         pure = !acts_mixed(pl), recompute = pure && pl->act == PLAN_ACT_RECOMPUTE;
    if (arena == PLAN_ARENA_ACC && layer) return "";
    if (arena == PLAN_ARENA_PARAM && e->cfg.prefetch == 0) return "";
    if (arena == PLAN_ARENA_ACT && recompute)
        return e->caps.host_in_place ? "a smaller --micro-batch"
                                     : "--activations host or a smaller --micro-batch";
    if (arena == PLAN_ARENA_ACT && pure && pl->act >= PLAN_ACT_HOST) return "a smaller --micro-batch";
    return arena_text[arena].option;
}

static void fill_chunks(stk_engine *e, const struct eng_placement *pl)
{
    const struct stk_layout *l = e->layout;
    for (uint32_t i = 0; i < l->n_chunks; i++) {
        const struct stk_chunk *c = &l->chunks[i];
        struct plan_chunk_in *p = &e->pchunks[i];
        *p = (struct plan_chunk_in){ .block = c->block,
                                     .offset_bytes = c->first_elem * 2,
                                     .acc_offset_bytes = c->first_elem * 4,
                                     .frozen = c->frozen };
        p->home[CHUNK_PARAM] = pl->param;
        p->home[CHUNK_OPT] = c->frozen ? CHUNK_HOST : pl->opt;
        p->home[CHUNK_GRAD] = c->frozen ? CHUNK_HOST : pl->grad;
        for (int s = 0; s < CHUNK_STATE_N; s++) p->bytes[s] = chunk_bytes(l, c, s);
    }
    cache_homes(e, pl);
    twin_homes(e, pl);
    spec_homes(e, pl);
    for (uint32_t i = 0; i < l->n_blocks; i++) {
        const struct stk_block *b = &l->blocks[i];
        e->pblocks[i] = (struct plan_block_in){ .first_chunk = b->first_chunk,
                                                .n_chunks = b->n_chunks,
                                                .n_chunks_trainable = b->n_chunks_trainable,
                                                .param_bytes = b->elems * 2,
                                                .acc_bytes = b->elems_trainable * 4 };
    }
    mode_blocks(e, pl);
}

static void fill_places(stk_engine *e, const struct eng_placement *pl)
{
    for (uint32_t i = 0; i < e->n_places; i++) {
        const stk_place *p = &e->places[i];
        e->pplaces[i] = (struct plan_place_in){ .block = p->block,
                                                .fused = p->fused,
                                                .no_input = p->in_bytes == 0,
                                                .in_bytes = p->in_bytes,
                                                .full_bytes = p->full_bytes,
                                                .flow_bytes = p->flow_bytes,
                                                .flops = p->flops };
    }
    acts_fill(e, pl);
}

void place_fill(stk_engine *e, const struct eng_placement *pl)
{
    fill_chunks(e, pl);
    fill_places(e, pl);
}

stk_status place_input(stk_engine *e, const struct eng_placement *pl, enum plan_mode mode,
                       struct plan_input *in)
{
    place_fill(e, pl);
    uint32_t prefetch = e->cfg.prefetch == UINT32_MAX ? 2 : e->cfg.prefetch;
    *in = (struct plan_input){
        .mode = mode,
        .update = pl->update,
        .accumulate =
            e->cfg.accumulate == STK_ACCUMULATE_MICRO ? PLAN_MICRO_MAJOR : PLAN_LAYER_MAJOR,
        .in_place = e->caps.host_in_place,
        .n_micro = e->cfg.micro_batches,
        .prefetch = prefetch,
        .n_blocks = e->layout->n_blocks,
        .n_chunks = e->layout->n_chunks,
        .n_places = e->n_places,
        .blocks = e->pblocks,
        .chunks = e->pchunks,
        .places = e->pplaces,
    };
    memcpy(in->arena_bytes, pl->arena_bytes, sizeof in->arena_bytes);
    return STK_OK;
}

/* Bytes of one state over all chunks whose home is `home`, as homes hold them (host: packed,
 * parameters of a block from a page on; NVMe: rounded to the store's alignment). e->pchunks says
 * where each is. */
static uint64_t state_bytes(const stk_engine *e, enum chunk_state s, enum chunk_home home)
{
    uint64_t sum = 0;
    for (uint32_t b = 0; b < e->layout->n_blocks; b++) {
        const struct stk_block *x = &e->layout->blocks[b];
        if (home == CHUNK_HOST && s == CHUNK_PARAM && x->n_chunks > 0) {
            if (e->pchunks[x->first_chunk].home[s] == home) sum += round_page(x->elems * 2);
            continue;
        }
        for (uint32_t i = x->first_chunk; i < x->first_chunk + x->n_chunks; i++) {
            uint64_t bytes = e->pchunks[i].home[s] == home ? e->pchunks[i].bytes[s] : 0;
            sum += home == CHUNK_NVME ? round_page(bytes) : bytes;
        }
    }
    return sum;
}

uint32_t place_store_room(const stk_engine *e, const struct eng_placement *pl)
{
    if (e->cfg.adopt) return e->durable.found_room;
    return 1 + e->cfg.durable + spec_on_nvme(e, pl);
}

/* Versions beside the newest ones. */
static uint64_t version_bytes(const stk_engine *e)
{
    return state_bytes(e, CHUNK_PARAM, CHUNK_NVME) + state_bytes(e, CHUNK_OPT, CHUNK_NVME);
}

/* The versions that durable steps keep beside the newest ones, and both halves of every table. */
static uint64_t durable_bytes(const stk_engine *e)
{
    const char *paths[STK_NVME_MAX];
    if (!e->cfg.durable) return 0;
    uint64_t n_paths = durable_paths(e, paths), extents = CHUNK_STATE_N * (uint64_t)e->layout->n_chunks;
    if (acts_nvme_bytes(e)) extents += 2ull * e->n_places * e->cfg.micro_batches;
    uint64_t table = durable_payload_max(e) + DURABLE_HEAD_BYTES + n_paths * DURABLE_PATH_BYTES +
                     extents * DURABLE_ROW_BYTES;
    return version_bytes(e) + 2 * n_paths * round_page(table);
}

/* What the update modes need beside it. */
static stk_status mode_rows(stk_engine *e, const struct eng_placement *pl, struct mem *m,
                            struct stk_error *err)
{
    uint32_t beside = place_store_room(e, pl) - 1 - e->cfg.durable;
    if (beside > 0)
        STK_TRY(mem_note(m, MEM_NVME, "versions that speculation may take back", "--update chase",
                         beside * version_bytes(e), err));
    if (spec_bytes(e))
        STK_TRY(mem_note(m, MEM_HOST, "undo records", "--update chase", spec_bytes(e), err));
    uint64_t second = place_second_bytes(e, pl);
    if (second)
        STK_TRY(mem_note(m, MEM_HOST, "second parameters (split)", "--update chase", second, err));
    return STK_OK;
}

/* Blocks that lie on the device. */
static stk_status twin_rows(stk_engine *e, struct mem *m, struct stk_error *err)
{
    static const char *const owner[CHUNK_STATE_N] = { "parameters on the device (16-bit)",
                                                      "optimizer state on the device",
                                                      "gradients on the device (16-bit)" };
    for (int s = 0; s < CHUNK_STATE_N; s++) {
        uint64_t bytes = twin_bytes(e, (enum chunk_state)s);
        if (bytes) STK_TRY(mem_note(m, MEM_DEVICE, owner[s], "a smaller --optimizer-on-device", bytes, err));
    }
    return STK_OK;
}

stk_status place_table(stk_engine *e, const struct eng_placement *pl, struct mem *m,
                       struct stk_error *err)
{
    static const struct { const char *owner, *option, *kept, *without; } home_text[CHUNK_STATE_N] = {
        { "parameters (16-bit)", "--params nvme", "parameters kept in memory", "--nvme DIR with --params nvme" },
        { "optimizer state", "--optimizer-state nvme", "optimizer state kept in memory",
          "--nvme DIR with --optimizer-state nvme" },
        { "gradients (16-bit)", "--grads nvme", "gradients kept in memory", "--nvme DIR with --grads nvme" },
    };
    const bool store = e->n_paths > 0 || e->cfg.storage == STK_STORAGE_SIM;
    const uint8_t home[CHUNK_STATE_N] = { pl->param, pl->opt, pl->grad };
    place_fill(e, pl);
    for (int s = 0; s < CHUNK_STATE_N; s++) {
        bool nvme = home[s] == CHUNK_NVME;
        STK_TRY(mem_note(m, nvme ? MEM_NVME : MEM_HOST, home_text[s].owner,
                         nvme ? "" : store ? home_text[s].option : home_text[s].without,
                         state_bytes(e, s, nvme ? CHUNK_NVME : CHUNK_HOST), err));
        if (nvme && pl->cached[s])
            STK_TRY(mem_note(m, MEM_HOST, home_text[s].kept, "",
                             state_bytes(e, s, CHUNK_HOST), err));
    }
    if (e->cfg.durable) {
        STK_TRY(mem_note(m, MEM_NVME, "second versions for durable steps", "--durable",
                         durable_bytes(e), err));
        STK_TRY(mem_note(m, MEM_HOST, "description of durable steps", "",
                         2 * durable_payload_max(e), err));
    }
    STK_TRY(mode_rows(e, pl, m, err));
    STK_TRY(twin_rows(e, m, err));
    if (acts_nvme_bytes(e))
        STK_TRY(mem_note(m, MEM_NVME, "activations", "--activations recompute", acts_nvme_bytes(e),
                         err));
    enum mem_tier dev = e->caps.host_in_place ? MEM_HOST : MEM_DEVICE;
    for (int a = 0; a < PLAN_ARENA_N; a++) {
        if (pl->arena_bytes[a] == 0) continue;
        STK_TRY(mem_note(m, plan_arena_on_device(a) ? dev : MEM_HOST, arena_text[a].owner,
                         arena_option(e, pl, a), pl->arena_bytes[a], err));
    }
    STK_TRY(mem_note(m, dev, "workspace of operations", "--micro-batch", e->workspace_bytes, err));
    for (uint32_t i = 0; i < e->n_reserves; i++)
        STK_TRY(mem_note(m, e->reserves[i].where == STK_ON_DEVICE ? dev : MEM_HOST,
                         e->reserves[i].owner, "--batch", round_page(e->reserves[i].size_bytes),
                         err));
    STK_TRY(
        mem_note(m, MEM_HOST, "staging of loads and checkpoints", "", state_staging_bytes(e), err));
    if (e->cfg.trace_bytes)
        STK_TRY(mem_note(m, MEM_HOST, "trace of what happened", "", e->cfg.trace_bytes, err));
    STK_TRY(mem_note(m, MEM_HOST, "checkpoints under way", "", save_bytes(e), err));
    if (e->cfg.own_order) {
        STK_TRY(mem_note(m, dev, "gradient accumulators (fp32)", "", own_bytes(e, true), err));
        STK_TRY(mem_note(m, dev, "blocks held on demand", "", own_bytes(e, false), err));
    }
    STK_TRY(
        mem_note(m, MEM_HOST, "the product library's own buffers", "", e->caps.library_bytes, err));
    STK_TRY(mem_note(m, MEM_HOST, "plans, tables and threads", "",
                     THREADS_BYTES + e->layout->n_chunks * TABLES_BYTES, err));
    return mem_note(m, MEM_HOST, "program and libraries", "", e->baseline_bytes, err);
}
