/* engine/mode.c - which update mode a placement gets, and the second parameters of `split`.
 *
 * Pure, application's thread, inside stk_seal; place.c and seal.c ask. Must not know how nodes run. */
#include "engine/spec.h"
#include "base/sys.h"


/* Speculation on NVMe keeps one more version; a store that is taken over has the room it was made
 * with. */
static bool can_speculate(const stk_engine *e, const struct eng_placement *pl)
{
    uint32_t room = e->cfg.durable ? 3 : 2;
    if (pl->opt == CHUNK_HOST) return e->cfg.moments == STK_MOMENTS_F32;
    return !e->cfg.adopt || e->durable.found_room >= room;
}

/* Every folder alone has room for all state twice, and some. */
static bool room_for_versions(const stk_engine *e)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++)
        for (int s = CHUNK_PARAM; s <= CHUNK_OPT; s++)
            sum += round_page(chunk_bytes(e->layout, &e->layout->chunks[i], (enum chunk_state)s));
    for (uint32_t i = 0; e->cfg.storage != STK_STORAGE_SIM && i < e->n_paths; i++) {
        int64_t room = sys_disk_free(e->paths[i]);
        if (room < 0 || (uint64_t)room / 3 < sum) return false;
    }
    return true;
}

/* `auto`: chase, which takes nothing that serial does not and is never slower. Speculate, which takes
 * as much room on the drives again, where nothing can bind: with clipping off, and the transfers of the
 * state, which it moves under backward, are most of what a step waits for. */
static bool auto_speculates(const stk_engine *e, const struct eng_placement *pl)
{
    return e->cfg.update == STK_UPDATE_AUTO && pl->opt == CHUNK_NVME && !(e->cfg.clip > 0) &&
           !e->cfg.durable && room_for_versions(e);
}

/* What a prediction tries or has chosen, where it can be done; `auto` wants more room on the drives only
 * where that is no question. */
static enum plan_update tried_mode(const stk_engine *e, const struct eng_placement *pl)
{
    if (e->mode_try.update != PLAN_SPECULATE) return e->mode_try.update;
    bool drives = e->cfg.update == STK_UPDATE_AUTO && pl->opt == CHUNK_NVME;
    bool room = !drives || (!e->cfg.durable && room_for_versions(e));
    return can_speculate(e, pl) && room ? PLAN_SPECULATE : PLAN_CHASE;
}

enum plan_update update_mode_choose(const stk_engine *e, const struct eng_placement *pl)
{
    if (e->cfg.update == STK_UPDATE_SERIAL) return PLAN_SERIAL;
    if (e->cfg.own_order) return PLAN_CHASE;
    if (e->mode_try.set) return tried_mode(e, pl);
    if (e->cfg.update == STK_UPDATE_SPLIT) return PLAN_SPLIT;
    if (e->cfg.update == STK_UPDATE_SPECULATE && can_speculate(e, pl)) return PLAN_SPECULATE;
    if (auto_speculates(e, pl)) return PLAN_SPECULATE;
    return PLAN_CHASE;
}

static uint32_t split_blocks_choose(const stk_engine *e, enum plan_update update)
{
    if (update != PLAN_SPLIT && update != PLAN_SPECULATE) return 0;
    if (e->mode_try.set) return e->mode_try.split_blocks;
    return e->cfg.split_blocks != UINT32_MAX || update == PLAN_SPLIT ? e->cfg.split_blocks : 0;
}

void mode_split_set(const stk_engine *e, struct eng_placement *pl)
{
    const struct eng_mode_try *t = &e->mode_try;
    bool spec = pl->update == PLAN_SPECULATE;
    pl->split_blocks = split_blocks_choose(e, pl->update);
    pl->tried_blocks = !spec ? 0 : t->set ? t->tried_blocks : 1;
    pl->tried_late = spec && t->set ? t->tried_late : 0;
}

void mode_note(stk_engine *e, const struct eng_placement *pl)
{
    bool split = e->cfg.update == STK_UPDATE_SPLIT, spec = e->cfg.update == STK_UPDATE_SPECULATE;
    uint32_t n = 0;
    if ((split || spec) && e->cfg.own_order)
        eng_note(e, "update: chase, because the client keeps its own order");
    else if (split && place_second_bytes(e, pl) == 0)
        eng_note(e, "update: no block has all its state in host memory and no frozen part: split is "
                    "chase");
    else if (spec && pl->update != PLAN_SPECULATE)
        eng_note(e, "update: chase, because the store that was taken over has no room for versions "
                    "that may be taken back");
    if (e->cfg.update == STK_UPDATE_AUTO && pl->update == PLAN_SPECULATE && !e->mode_try.set)
        eng_note(e, "update: speculate, because clipping is off: state moves under backward, too");
    if (pl->update != PLAN_SPECULATE) return;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++)
        n += e->pchunks[i].spec || e->pchunks[i].home[CHUNK_OPT] == CHUNK_DEVICE;
    if (n < e->n_use_chunks)
        eng_note(e, "update: %u of %u chunks may be updated before the norm is known; the others have "
                    "no room for an undo record", n, e->n_use_chunks);
}

stk_status mode_check(stk_engine *e, const struct eng_placement *pl)
{
    if (e->cfg.update != STK_UPDATE_SPECULATE || e->cfg.own_order || pl->opt == CHUNK_NVME ||
        e->cfg.moments == STK_MOMENTS_F32 || !place_trains(e))
        return STK_OK;
    return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                         "--update speculate keeps an undo record of fp32 moments where the optimizer "
                         "state lies in host memory, and --moments %s has none: give "
                         "--optimizer-state nvme, another --update, or --moments fp32",
                         e->cfg.moments == STK_MOMENTS_BF16 ? "bf16" : "8bit");
}

static bool on_device(const stk_engine *e, uint32_t block)
{
    const struct stk_block *b = &e->layout->blocks[block];
    return b->n_chunks > 0 && e->pchunks[b->first_chunk].home[CHUNK_PARAM] == CHUNK_DEVICE;
}

void mode_blocks(const stk_engine *e, const struct eng_placement *pl)
{
    uint32_t n = 0, i = 0;
    for (uint32_t k = 0; k < e->layout->n_blocks; k++) {
        e->pblocks[k].split = e->pblocks[k].split_tried = e->pblocks[k].split_tried_only = false;
        n += !on_device(e, k);
    }
    for (uint32_t k = 0; k < e->n_use_blocks; k++) { /* those that the team updates */
        struct plan_block_in *b = &e->pblocks[e->use_blocks[k]];
        if (on_device(e, e->use_blocks[k])) continue;
        bool late = pl->split_blocks > 0 && i + 1 < n && i + 1 + pl->tried_late >= n;
        b->split_tried = i < pl->tried_blocks || late;
        b->split_tried_only = late && i >= pl->split_blocks;
        b->split = i < pl->split_blocks || late;
        i++;
    }
}

uint64_t place_second_of(const stk_engine *e, const struct eng_placement *pl, uint32_t block)
{
    const struct stk_block *b = &e->layout->blocks[block];
    const struct plan_input in = { .update = pl->update,
                                   .in_place = e->caps.host_in_place,
                                   .chunks = e->pchunks,
                                   .blocks = e->pblocks };
    if (e->cfg.own_order || b->n_chunks == 0 || !plan_splits(&in, b->first_chunk)) return 0;
    return round_page(b->elems * 2);
}

uint64_t place_second_bytes(const stk_engine *e, const struct eng_placement *pl)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < e->layout->n_blocks; i++) sum += place_second_of(e, pl, i);
    return sum;
}
