/* engine/acts.c - what becomes of each position's activations: one policy for all, or a mix.
 *
 * Pure, application's thread, inside stk_seal; place.c and seal.c ask. Must not know how anything moves,
 * nor budgets.
 *
 * WHICH BLOCKS. A full set lives from its forward to its backward visit. The last positions' live
 * shortest and overlap with the fewest others in time, so that keeping them delays nothing; the first
 * positions' live longest, so that what goes away and comes back has the most time to do so. So a mix is
 * read from the end of the order: kept, then moved to host memory, then to NVMe, and the rest. What is
 * recomputed lies evenly among those that are not kept: each is time in which nothing leaves, and the
 * link makes up for what it could not carry meanwhile (32k tokens on an RTX 4090: a layer's set takes the
 * link 132 ms and its forward visits 104). Positions without a full set of their own (an embedding, the
 * fused head) have the policy of the neighbour before them and are not counted. */
#include "engine/engine.h"
#include <string.h>

static bool counts(const stk_engine *e, uint32_t place)
{
    return !e->places[place].fused && e->places[place].full_bytes > 0;
}

uint32_t acts_positions(const stk_engine *e)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < e->n_places; i++) n += counts(e, i);
    return n;
}

bool acts_mixed(const struct eng_placement *pl)
{
    for (int p = 0; p < PLAN_ACT_N; p++)
        if (pl->act_last[p]) return true;
    return false;
}

bool acts_on_nvme(const struct eng_placement *pl)
{
    return pl->act == PLAN_ACT_NVME || pl->act_last[PLAN_ACT_NVME] > 0;
}

stk_status acts_check(stk_engine *e)
{
    const stk_config *c = &e->cfg;
    static const char *const name[STK_ACT_N] = { "auto", "keep", "recompute", "host", "nvme" };
    bool nvme = c->activations == STK_ACT_NVME || c->activations_last[STK_ACT_NVME] > 0;
    int deepest = STK_ACT_AUTO;
    for (int p = STK_ACT_KEEP; p < STK_ACT_N; p++)
        if (c->activations_last[p]) deepest = p;
    if (c->activations_last[STK_ACT_AUTO])
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "a mix of activations says how many blocks keep, are recomputed or go "
                             "elsewhere; a number of `auto` means nothing");
    if (c->activations != STK_ACT_AUTO && deepest > (int)c->activations)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "activations: the last %u blocks %s and all before them %s: a mix goes from "
                             "the end of the model through keep, recompute, host, nvme",
                             c->activations_last[deepest], name[deepest], name[c->activations]);
    if (nvme && c->own_order)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "activations go to NVMe in the engine's order only: with own_order use "
                             "keep or recompute");
    if (nvme && e->n_paths == 0 && c->storage != STK_STORAGE_SIM)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "activations are asked to be on NVMe, but no folder is given: add --nvme "
                             "DIR, or choose keep, recompute or host");
    return STK_OK;
}

/* Of `all` positions `some` are to be had, evenly: is the i-th one of them? */
static bool evenly(uint64_t i, uint64_t some, uint64_t all)
{
    return ((i + 1) * some + all / 2) / all > (i * some + all / 2) / all;
}

void acts_fill(const stk_engine *e, const struct eng_placement *pl)
{
    uint32_t left[PLAN_ACT_N], at = 0, all = acts_positions(e), again = pl->act_last[PLAN_ACT_RECOMPUTE];
    memcpy(left, pl->act_last, sizeof left);
    all -= left[PLAN_ACT_KEEP] < all ? left[PLAN_ACT_KEEP] : all;
    left[PLAN_ACT_RECOMPUTE] = 0;
    for (uint32_t i = e->n_places; i-- > 0;) {
        int p = 0;
        while (p < PLAN_ACT_N && left[p] == 0) p++;
        if (p != PLAN_ACT_KEEP && at < all && (again >= all || evenly(at, again, all))) p = PLAN_ACT_RECOMPUTE;
        e->pplaces[i].act = (uint8_t)(p < PLAN_ACT_N ? p : (int)pl->act);
        if (!counts(e, i)) continue;
        at += p != PLAN_ACT_KEEP;
        if (p < PLAN_ACT_N && p != PLAN_ACT_RECOMPUTE) left[p]--;
    }
}

/* As the training plan of e->pplaces moves them. */
static struct plan_input input_of(const stk_engine *e)
{
    return (struct plan_input){ .mode = place_trains(e) ? PLAN_TRAIN : PLAN_EVAL,
                                .n_micro = e->cfg.micro_batches,
                                .n_places = e->n_places,
                                .places = e->pplaces };
}

uint64_t acts_nvme_bytes(const stk_engine *e)
{
    struct plan_input in = input_of(e);
    uint64_t sum = 0;
    for (uint32_t a = 0; a < plan_act_count(&in); a++)
        sum += (plan_act_bytes(&in, a) + STORE_ALIGN - 1) / STORE_ALIGN * STORE_ALIGN;
    return sum;
}

uint32_t acts_extents(const stk_engine *e, uint32_t first)
{
    struct plan_input in = input_of(e);
    uint32_t n = 0;
    for (uint32_t a = 0; a < plan_act_count(&in); a++)
        e->act_extent[a] = plan_act_bytes(&in, a) ? first + n++ : CHUNK_NO_EXTENT;
    return n;
}

uint32_t acts_estimate(const stk_engine *e, uint64_t room)
{
    uint32_t n = 0;
    for (uint32_t i = e->n_places; i-- > 0;) {
        uint64_t bytes = e->places[i].full_bytes * e->cfg.micro_batches;
        if (!counts(e, i)) continue;
        if (bytes > room) break;
        room -= bytes;
        n++;
    }
    return n;
}

const char *acts_text(const stk_engine *e, const struct eng_placement *pl, char *buf, size_t size)
{
    static const char *const name[PLAN_ACT_N] = { "kept", "recomputed", "offloaded to host",
                                                  "offloaded to nvme" };
    size_t at = 0;
    uint32_t left = acts_positions(e); /* keep:9 of a model of one block is all there is */
    buf[0] = '\0';
    for (int p = 0; p < PLAN_ACT_N; p++) {
        uint32_t n = pl->act_last[p] < left ? pl->act_last[p] : left;
        if (n == 0 || at >= size) continue;
        left -= n;
        const char *form = at ? "%u before them %s, "
                           : n > 1 ? "%u last blocks %s, " : "%u last block %s, ";
        at += (size_t)snprintf(buf + at, size - at, form, n, name[p]);
    }
    if (left == 0 && at > 2 && at < size) buf[at - 2] = '\0';
    else if (at < size) snprintf(buf + at, size - at, "%s%s", at ? "the others " : "", name[pl->act]);
    return buf;
}
