/* engine/place.c - chooses tiers, activation policy and arena sizes within the budgets.
 *
 * Owns no memory; runs on the application's thread inside stk_seal. Must not know how anything
 * moves: it asks plan_needs what a plan must have and may use; nor what else takes memory
 * (place_table.c).
 *
 * ORDER OF CHOICE where the user says `auto`: everything in host memory; then the optimizer state
 * on NVMe; then gradients too; then parameters too. Within each, activations are kept if that fits with
 * the least arenas. Else those of as many of the last blocks as the budgets hold beside arenas as large
 * as is useful are kept, and the others recomputed, or offloaded where that is predicted to be faster
 * (where the machine's figures are known) or nothing else fits; to NVMe only in the last case, because
 * it wears the drives. Then arenas grow while the budgets allow. What a card's memory has left at last
 * holds whole blocks' state (twin.h); a part of it that was asked for by name comes before all else. */
#include "engine/durable.h"
#include "engine/machine.h"
#include "engine/save.h"
#include "engine/spec.h"
#include "engine/twin.h"
#include "base/sys.h"
#include <string.h>

/* Sums of a placement into pl->*_bytes. */
static stk_status place_sum(stk_engine *e, struct eng_placement *pl, struct stk_error *err)
{
    struct mem *m;
    STK_TRY(mem_open(&m, err));
    stk_status st = place_table(e, pl, m, err);
    pl->host_bytes = mem_total(m, MEM_HOST);
    pl->device_bytes = mem_total(m, MEM_DEVICE);
    pl->nvme_bytes = mem_total(m, MEM_NVME);
    mem_close(m);
    return st;
}

static uint64_t largest_update_slot(const stk_engine *e)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        uint64_t b = e->pchunks[i].frozen ? 0 : plan_update_bytes(&e->pchunks[i]);
        if (b > most) most = b;
    }
    return most;
}

/* The norm separates backward, in which a drive has little to do, from the update, which is all
 * transfers. What this arena holds is read before the norm and written after the update: so much of
 * a step's transfers moves from where the step waits for them to where it does not. */
static uint64_t update_room(const stk_engine *e, const struct plan_input *in)
{
    /* reads, updates and writes; speculate has those of two updates */
    uint64_t ring = (in->update == PLAN_SPECULATE ? 12 : 8) * largest_update_slot(e), first = 0;
    if (e->cfg.nvme_buffer) return e->cfg.nvme_buffer;
    if (e->cfg.durable && e->cfg.host_memory) return UINT64_MAX;
    /* Nothing hides the update of the block that the first visit reads (an embedding may be a sixth of
     * a model): three quarters of its state wait in memory for the norm, and the drives bring the rest
     * while these are updated. A budget that is given keeps it there for good (cache.c). */
    if (in->n_places && !e->cfg.host_memory) {
        const struct plan_block_in *b = &in->blocks[in->places[0].block];
        for (uint32_t i = 0; i < b->n_chunks_trainable; i++)
            first += plan_update_bytes(&e->pchunks[b->first_chunk + i]);
    }
    return ring + first / 4 * 3;
}

/* What each arena would like beyond the least: room to work ahead, bounded. */
static void desire(stk_engine *e, const struct plan_input *in, const uint64_t *least,
                   const uint64_t *useful, uint64_t *want)
{
    uint64_t block = 0, acc = 0, chunk = (uint64_t)e->layout->chunk_elems * 2;
    for (uint32_t i = 0; i < in->n_blocks; i++) {
        if (in->blocks[i].param_bytes > block) block = in->blocks[i].param_bytes;
        /* the second accumulator: of the middle block, typically a layer */
        if (i == in->n_blocks / 2) acc = round_page(in->blocks[i].acc_bytes);
    }
    for (int a = 0; a < PLAN_ARENA_N; a++) want[a] = least[a];
    want[PLAN_ARENA_ACT] = useful[PLAN_ARENA_ACT]; /* below it plans are packed tightly and visits
                                                    * wait for each other's room */
    if (least[PLAN_ARENA_PARAM])
        want[PLAN_ARENA_PARAM] = least[PLAN_ARENA_PARAM] + in->prefetch * round_page(block);
    if (least[PLAN_ARENA_ACC] && !e->cfg.own_order)
        want[PLAN_ARENA_ACC] = least[PLAN_ARENA_ACC] + acc;
    if (least[PLAN_ARENA_UPDATE]) want[PLAN_ARENA_UPDATE] = update_room(e, in);
    if (least[PLAN_ARENA_BOUNCE]) want[PLAN_ARENA_BOUNCE] = 8 * round_page(chunk);
    if (least[PLAN_ARENA_GRAD]) { /* the last casts of backward must not wait for the drives, and what
                                   * is updated ahead of the norm reads its gradient there */
        want[PLAN_ARENA_GRAD] = (in->update == PLAN_SPECULATE ? 16 : 8) * round_page(chunk);
        if (e->cfg.nvme_buffer / 8 > want[PLAN_ARENA_GRAD])
            want[PLAN_ARENA_GRAD] = e->cfg.nvme_buffer / 8;
    }
    if (least[PLAN_ARENA_CAST]) want[PLAN_ARENA_CAST] = 4 * round_page(chunk);
    for (uint32_t i = 0; i < in->n_places; i++) /* so that visits do not wait for what is on its way */
        if (in->places[i].act == PLAN_ACT_NVME) want[PLAN_ARENA_SAVE] = useful[PLAN_ARENA_SAVE];
    for (int a = 0; a < PLAN_ARENA_N; a++) {
        if (a == PLAN_ARENA_ACC) continue; /* `useful` does not count the overlap of two blocks */
        if (want[a] > useful[a]) want[a] = useful[a];
        if (want[a] < least[a]) want[a] = least[a];
    }
}

/* Nothing to train: evaluation only. No training plan, no accumulators, no boundaries kept
 * (MEM-11). */
bool place_trains(const stk_engine *e)
{
    return e->layout->params_trainable > 0 || e->cfg.own_order;
}

struct limits { uint64_t host, device; bool host_given, device_given; };

static bool fits(const struct eng_placement *pl, const struct limits *lim)
{
    return pl->host_bytes <= lim->host && pl->device_bytes <= lim->device;
}

/* Bytes above the budgets: a refusal names those of what lacks least. */
static uint64_t over(const struct eng_placement *pl, const struct limits *lim)
{
    return (pl->host_bytes > lim->host ? pl->host_bytes - lim->host : 0) +
           (pl->device_bytes > lim->device ? pl->device_bytes - lim->device : 0);
}

/* What the arenas must have, may use and would like with the homes of `pl`. */
struct needs {
    uint64_t least[PLAN_ARENA_N], useful[PLAN_ARENA_N], want[PLAN_ARENA_N];
    uint64_t param_ahead;       /* PARAM: for prefetching; want may be for a cache */
};

/* The UPDATE arena where nobody gave a size or a budget. The forward pass is short and all transfers of
 * the update stand before it; activations grow with the tokens of a step, as does the time of backward, in
 * which the drives have room. So twice as much as activations take may be read ahead and written behind,
 * while the run as a whole takes at most a sixth of the memory. */
static uint64_t unasked_room(const struct eng_placement *pl, const struct needs *n,
                             const struct limits *lim)
{
    uint64_t had = pl->arena_bytes[PLAN_ARENA_UPDATE], most = n->want[PLAN_ARENA_UPDATE],
             others = pl->host_bytes - had, all = lim->host / 6,
             ahead = 2 * (pl->arena_bytes[PLAN_ARENA_ACT] + pl->arena_bytes[PLAN_ARENA_SAVE]);
    if (ahead > n->useful[PLAN_ARENA_UPDATE]) ahead = n->useful[PLAN_ARENA_UPDATE];
    if (ahead > most) most = ahead;
    if (most > all || others > all - most) most = others < all ? all - others : 0;
    return most > had ? most : had;
}

/* Grows arenas from least to wanted while the budgets hold: half of the missing, until nothing
 * changes. */
static stk_status grow(stk_engine *e, struct eng_placement *pl, const struct needs *n,
                       const struct limits *lim, struct stk_error *err)
{
    const uint64_t *want = n->want;
    static const uint8_t order[] = { PLAN_ARENA_UPDATE, PLAN_ARENA_BOUNCE, PLAN_ARENA_GRAD,
                                     PLAN_ARENA_CAST,   PLAN_ARENA_PARAM,  PLAN_ARENA_ACC,
                                     PLAN_ARENA_ACT,    PLAN_ARENA_SAVE,   PLAN_ARENA_PARAM,
                                     PLAN_ARENA_UPDATE };
    bool again[PLAN_ARENA_N] = { false };
    for (size_t k = 0; k < sizeof order; k++) {
        uint8_t a = order[k];
        uint64_t had = pl->arena_bytes[a], most = want[a];
        /* what keeps the update going comes first, what reads further ahead for it last */
        if (k == 0 && most > 8 * largest_update_slot(e)) most = 8 * largest_update_slot(e);
        /* a cache of parameters only spares the link: it takes what is left */
        if (a == PLAN_ARENA_PARAM && !again[a] && most > n->param_ahead) most = n->param_ahead;
        again[a] = true;
        if (k && a == PLAN_ARENA_UPDATE && most > 0 && !e->cfg.host_memory && !e->cfg.nvme_buffer)
            most = unasked_room(pl, n, lim);
        for (uint64_t more = most > had ? most - had : 0; more >= ENG_PAGE_BYTES; more /= 2) {
            uint64_t before = pl->arena_bytes[a];
            if (before + more > most) continue;
            pl->arena_bytes[a] = (before + more) / ENG_PAGE_BYTES * ENG_PAGE_BYTES;
            STK_TRY(place_sum(e, pl, err));
            if (!fits(pl, lim)) pl->arena_bytes[a] = before;
        }
    }
    return place_sum(e, pl, err);
}

static stk_status find_needs(stk_engine *e, const struct eng_placement *pl, struct needs *n,
                             struct stk_error *err)
{
    struct plan_input in;
    struct eng_placement free_pl = *pl;
    uint64_t eval_least[PLAN_ARENA_N], eval_useful[PLAN_ARENA_N];
    bool train = place_trains(e);
    for (int a = 0; a < PLAN_ARENA_N; a++) free_pl.arena_bytes[a] = UINT64_MAX;
    STK_TRY(place_input(e, &free_pl, PLAN_EVAL, &in));
    STK_TRY(plan_needs(&in, eval_least, eval_useful, err));
    memcpy(n->least, eval_least, sizeof n->least);
    memcpy(n->useful, eval_useful, sizeof n->useful);
    in.mode = train ? PLAN_TRAIN : PLAN_EVAL;
    if (train) STK_TRY(plan_needs(&in, n->least, n->useful, err));
    for (int a = 0; a < PLAN_ARENA_N; a++) {
        if (eval_least[a] > n->least[a]) n->least[a] = eval_least[a];
        if (n->useful[a] < n->least[a]) n->useful[a] = n->least[a];
    }
    desire(e, &in, n->least, n->useful, n->want);
    n->param_ahead = n->want[PLAN_ARENA_PARAM];
    if (e->cfg.own_order) { /* accumulators and held blocks are engine/own.c's; the cache must hold
                             * what is held and what comes next */
        n->least[PLAN_ARENA_ACC] = n->want[PLAN_ARENA_ACC] = 0;
        if (pl->param == CHUNK_NVME)
            n->least[PLAN_ARENA_PARAM] = n->useful[PLAN_ARENA_PARAM] = n->want[PLAN_ARENA_PARAM] =
                own_cache_bytes(e, in.prefetch);
    }
    return STK_OK;
}

/* A state was moved to host homes: arenas keep what they still have a use for. */
static stk_status trim(stk_engine *e, struct eng_placement *pl, struct needs *n,
                       struct stk_error *err)
{
    STK_TRY(find_needs(e, pl, n, err));
    for (int a = 0; a < PLAN_ARENA_N; a++) {
        uint64_t most = e->cfg.params == STK_TIER_DEVICE && a == PLAN_ARENA_PARAM ? n->useful[a]
                                                                                  : n->want[a];
        if (pl->arena_bytes[a] > most) pl->arena_bytes[a] = most;
        if (pl->arena_bytes[a] < n->least[a]) pl->arena_bytes[a] = n->least[a];
    }
    return place_sum(e, pl, err);
}

/* Memory that a given budget leaves beside useful arenas keeps state that else goes over NVMe. What
 * arenas no longer need because of it is given out again. */
static stk_status keep_in_memory(stk_engine *e, struct eng_placement *pl, struct needs *n,
                                 const struct limits *lim, struct stk_error *err)
{
    static const uint8_t order[] = { CHUNK_PARAM, CHUNK_OPT, CHUNK_GRAD };
    bool more = true;
    for (int round = 0; more && round < 16; round++) {
        more = false;
        for (size_t k = 0; k < sizeof order; k++) {
            struct eng_placement before = *pl;
            if (!cache_take(e, pl, order[k], lim->host - pl->host_bytes)) continue;
            STK_TRY(trim(e, pl, n, err));
            more = fits(pl, lim);
            if (more) continue;
            *pl = before;
            return trim(e, pl, n, err);
        }
    }
    return STK_OK;
}

/* All parameters in memory, where that leaves room for activations as they would like to lie and for the
 * update's ring: they move three times a step (read and written by the update, read by backward), and
 * without them on the drives no memory is a cache of parameters, which so often pays for the rest. Not
 * where they would need undo records instead. */
static stk_status keep_all_params(stk_engine *e, struct eng_placement *pl, struct needs *n,
                                  const struct limits *lim, struct stk_error *err)
{
    struct eng_placement all = *pl;
    struct needs had = *n;
    if (pl->param != CHUNK_NVME || pl->update == PLAN_SPECULATE ||
        !cache_take(e, &all, CHUNK_PARAM, UINT64_MAX))
        return STK_OK;
    STK_TRY(find_needs(e, &all, n, err));
    memcpy(all.arena_bytes, n->least, sizeof n->least);
    uint64_t ring = 8 * largest_update_slot(e), least = n->least[PLAN_ARENA_UPDATE];
    if (ring > n->want[PLAN_ARENA_UPDATE]) ring = n->want[PLAN_ARENA_UPDATE];
    all.arena_bytes[PLAN_ARENA_ACT] = n->want[PLAN_ARENA_ACT];
    all.arena_bytes[PLAN_ARENA_UPDATE] = ring > least ? ring : least;
    STK_TRY(place_sum(e, &all, err));
    if (fits(&all, lim)) {
        *pl = all;
        return STK_OK;
    }
    *n = had;
    return place_sum(e, pl, err);
}

/* What a card's memory leaves beside arenas as large as is useful holds whole blocks' state (twin.h). These need
 * no parameter slots any more, which may make room for more of them. */
static stk_status keep_on_device(stk_engine *e, struct eng_placement *pl, bool all_params,
                                 const struct limits *lim, struct stk_error *err)
{
    uint32_t had = 0;
    if (!twin_auto(e, pl)) return STK_OK;
    for (int round = 0; round < 3; round++) {
        struct eng_placement next = *pl;
        struct needs n;
        STK_TRY(place_sum(e, pl, err));
        if (!fits(pl, lim)) return STK_OK;
        next.twin_elems = UINT64_MAX;
        next.twin_room = twin_total(e) + (lim->device - pl->device_bytes);
        place_fill(e, &next);
        if (twin_blocks(e) <= had) break;
        had = twin_blocks(e);
        STK_TRY(find_needs(e, &next, &n, err));
        for (int a = 0; a < PLAN_ARENA_N; a++) {
            uint64_t most = a == PLAN_ARENA_PARAM && all_params ? n.useful[a] : n.want[a];
            if (next.arena_bytes[a] > most) next.arena_bytes[a] = most;
            if (next.arena_bytes[a] < n.least[a]) next.arena_bytes[a] = n.least[a];
        }
        STK_TRY(place_sum(e, &next, err));
        if (!fits(&next, lim)) break;
        *pl = next;
    }
    return place_sum(e, pl, err);
}

/* What the budget leaves at last holds undo records: of the first chunks of backward, if not of all. */
static stk_status keep_records(stk_engine *e, struct eng_placement *pl, const struct limits *lim,
                               struct stk_error *err)
{
    STK_TRY(place_sum(e, pl, err));
    if (!fits(pl, lim)) return STK_OK;
    spec_take(e, pl, lim->host - pl->host_bytes);
    return place_sum(e, pl, err);
}

/* `base` with the last k blocks' activations kept, and what the slots of activations would like: below it
 * plans are packed tightly, and the visits of a kept block would wait for more than recomputing takes. */
static stk_status try_keep(stk_engine *e, const struct eng_placement *base, uint32_t k,
                           const struct limits *lim, bool *ok, struct stk_error *err)
{
    struct eng_placement pl = *base;
    struct needs n;
    pl.act_last[PLAN_ACT_KEEP] = k;
    STK_TRY(find_needs(e, &pl, &n, err));
    for (int a = 0; a < PLAN_ARENA_N; a++)
        if (n.least[a] > pl.arena_bytes[a]) pl.arena_bytes[a] = n.least[a];
    pl.arena_bytes[PLAN_ARENA_ACT] = n.want[PLAN_ARENA_ACT];
    if (pl.arena_bytes[PLAN_ARENA_SAVE] > n.want[PLAN_ARENA_SAVE])
        pl.arena_bytes[PLAN_ARENA_SAVE] = n.want[PLAN_ARENA_SAVE];
    STK_TRY(place_sum(e, &pl, err));
    *ok = fits(&pl, lim);
    return STK_OK;
}

/* Not all activations can be kept: those of as many of the last blocks as the budgets hold beside what
 * the arenas would like. `n`: of `pl`, and becomes that of the mix. */
static stk_status keep_blocks(stk_engine *e, struct eng_placement *pl, uint32_t halves,
                              struct needs *n, const struct limits *lim, struct stk_error *err)
{
    struct eng_placement base = *pl;
    STK_TRY(grow(e, &base, n, lim, err));
    uint64_t room = e->caps.host_in_place ? lim->host - base.host_bytes
                                          : lim->device - base.device_bytes;
    /* one more than what the room has: the set of the block that is visited is there anyway */
    uint32_t low = 0, high = acts_estimate(e, room) + 1, most = acts_positions(e);
    if (high >= most) high = most ? most - 1 : 0;
    for (uint32_t tries = 0; low < high; tries++) { /* mostly the estimate is off by one */
        uint32_t k = tries < 3 ? high : low + (high - low + 1) / 2;
        bool ok = false;
        STK_TRY(try_keep(e, &base, k, lim, &ok, err));
        if (ok) low = k;
        else high = k - 1;
    }
    low = low * halves / 2;
    pl->act_last[PLAN_ACT_KEEP] = low;
    return low ? find_needs(e, pl, n, err) : STK_OK;
}

static stk_status try_placement(stk_engine *e, struct eng_placement *pl, const struct limits *lim,
                                uint32_t keep_half, bool *ok, bool *tight, struct stk_error *err)
{
    struct needs n;
    STK_TRY(find_needs(e, pl, &n, err));
    memcpy(pl->arena_bytes, n.least, sizeof n.least);
    if (e->cfg.params == STK_TIER_DEVICE)
        pl->arena_bytes[PLAN_ARENA_PARAM] = n.useful[PLAN_ARENA_PARAM];
    STK_TRY(place_sum(e, pl, err));
    *ok = fits(pl, lim);
    if (!*ok) return STK_OK;
    if (keep_half) {
        STK_TRY(keep_blocks(e, pl, keep_half, &n, lim, err));
        for (int a = 0; a < PLAN_ARENA_N; a++)
            if (a != PLAN_ARENA_PARAM || e->cfg.params != STK_TIER_DEVICE)
                pl->arena_bytes[a] = n.least[a];
        STK_TRY(place_sum(e, pl, err));
    }
    if (cache_allowed(e, pl)) {
        STK_TRY(keep_all_params(e, pl, &n, lim, err));
        STK_TRY(grow(e, pl, &n, lim, err));
        STK_TRY(keep_in_memory(e, pl, &n, lim, err));
    }
    /* A budget that was given is there to be used: the cache may hold every parameter. */
    bool given = e->caps.host_in_place ? lim->host_given : lim->device_given;
    if (given && n.want[PLAN_ARENA_PARAM] < n.useful[PLAN_ARENA_PARAM])
        n.want[PLAN_ARENA_PARAM] = n.useful[PLAN_ARENA_PARAM];
    STK_TRY(grow(e, pl, &n, lim, err));
    *tight = pl->arena_bytes[PLAN_ARENA_ACT] < n.want[PLAN_ARENA_ACT];
    STK_TRY(keep_on_device(e, pl, given || e->cfg.params == STK_TIER_DEVICE, lim, err));
    return keep_records(e, pl, lim, err);
}

static stk_status refuse(stk_engine *e, const struct eng_placement *pl, const struct limits *lim)
{
    struct mem *m;
    STK_TRY(mem_open(&m, &e->err));
    stk_status st = place_table(e, pl, m, &e->err);
    mem_set_budget(m, MEM_HOST, lim->host, lim->host_given ? "--host-memory" : "free memory");
    mem_set_budget(m, MEM_DEVICE, lim->device,
                   lim->device_given ? "--device-memory" : "free device memory");
    if (st == STK_OK) st = mem_check_budgets(m, &e->err);
    mem_close(m);
    return st == STK_OK ? stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no placement fits the budgets")
                        : st;
}

static bool allowed(stk_tier asked, enum chunk_home h)
{
    return asked == STK_TIER_AUTO || (asked == STK_TIER_NVME) == (h == CHUNK_NVME);
}

/* --- the choice ------------------------------------------------------------------------------- */

#define ACT_TRIES 20
/* keep_half: of the last blocks that could be kept so many halves are */
struct act_try { uint8_t rest; uint32_t keep_half, last[PLAN_ACT_N]; };

/* The rates of the machine that the run is for, as far as they are known already. False: not at all. With
 * clipping a speculating step is worth the mean of one whose norm binds and one whose norm does not, as in
 * mode_auto.c. */
static bool predicted(stk_engine *e, const struct eng_placement *pl, double *step_s)
{
    struct plan_input in;
    struct plan *p = NULL;
    struct stk_error err = { 0 }, mine = e->err;
    const stk_machine *m = e->predicting ? &e->measured : NULL;
    uint32_t n = pl->update == PLAN_SPECULATE && e->cfg.clip > 0 ? 2 : 1;
    bool figures = e->cfg.machine || e->predicting || e->caps.modelled_time, ok = false;
    *step_s = 0;
    if (!figures || e->cfg.own_order || !place_trains(e)) return false;
    if (place_input(e, pl, PLAN_TRAIN, &in) == STK_OK && plan_build(&in, &p, NULL, &err) == STK_OK) ok = true;
    for (uint32_t k = 0; ok && k < n; k++) {
        stk_prediction out = { .size = sizeof out };
        ok = predict_plan(e, m, p, &in, k > 0, &out) == STK_OK && out.step_s > 0;
        *step_s += out.step_s / n;
    }
    plan_free(p);
    e->err = mine; /* what is not known is no error */
    return ok;
}

static bool has_store(const stk_engine *e)
{
    return e->n_paths > 0 || e->cfg.storage == STK_STORAGE_SIM;
}

/* What is tried for activations, in this order; from `first` on only where nothing fits with any homes. */
static uint32_t act_tries(const stk_engine *e, struct act_try *t, uint32_t *first)
{
    const stk_config *c = &e->cfg;
    uint32_t n = 0, last[PLAN_ACT_N], lowest = PLAN_ACT_KEEP;
    for (uint32_t p = 0; p < PLAN_ACT_N; p++) {
        last[p] = c->activations_last[p + 1];
        if (last[p]) lowest = p;
    }
    bool mix = lowest > 0 || last[0] > 0, discrete = !e->caps.host_in_place;
    if (c->activations != STK_ACT_AUTO) {
        t[n] = (struct act_try){ .rest = (uint8_t)(c->activations - 1) };
        memcpy(t[n++].last, last, sizeof last);
        *first = n;
        return n;
    }
    for (uint32_t p = PLAN_ACT_KEEP; p < PLAN_ACT_N; p++) {
        if (p == PLAN_ACT_NVME) *first = n;
        bool same = p == PLAN_ACT_HOST && !discrete && !(mix && lowest == p); /* as keeping */
        if ((mix && (p < lowest || p == PLAN_ACT_KEEP)) || same ||
            (p == PLAN_ACT_NVME && (!has_store(e) || c->own_order || c->adopt)))
            continue;
        if (mix || p == PLAN_ACT_KEEP || p == PLAN_ACT_NVME) {
            t[n] = (struct act_try){ .rest = (uint8_t)p, .keep_half = mix || p == PLAN_ACT_KEEP ? 0 : 2 };
            memcpy(t[n++].last, last, sizeof last);
            continue;
        }
        /* kept blocks take the room of others' parameters; the link is busy with what is offloaded, and
         * compute with what is recomputed: mixes of both */
        for (uint32_t k = 0; k < (p == PLAN_ACT_HOST ? 4u : 1u); k++)
            for (uint32_t half = 3; half-- > 0;) {
                t[n] = (struct act_try){ .rest = (uint8_t)p, .keep_half = half };
                t[n++].last[PLAN_ACT_RECOMPUTE] = acts_positions(e) * k / 4;
            }
    }
    STK_ASSERT(n <= ACT_TRIES);
    return n;
}

struct acts_best { struct eng_placement *out; struct act_try how; double seconds; bool ok, any, ends; };

/* One try against the best so far. `only`: nothing else is tried, so there is nothing to compare with. */
static stk_status try_acts(stk_engine *e, const struct eng_placement *homes, const struct act_try *t,
                           bool only, const struct limits *lim, struct acts_best *b)
{
    struct eng_placement pl = *homes;
    bool fit = false, tight = false, first = !b->any;
    double s = 0;
    pl.act = (enum plan_act)t->rest;
    memcpy(pl.act_last, t->last, sizeof pl.act_last);
    if (acts_on_nvme(&pl) && !has_store(e)) return STK_OK;
    pl.update = update_mode_choose(e, &pl);
    mode_split_set(e, &pl);
    STK_TRY(try_placement(e, &pl, lim, t->keep_half, &fit, &tight, &e->err));
    b->any = true;
    if (!b->ok && !fit && (first || over(&pl, lim) < over(b->out, lim))) *b->out = pl;
    if (!fit) return STK_OK;
    bool keeps = t->rest == PLAN_ACT_KEEP && !tight; /* nothing is faster */
    bool known = !keeps && !only && predicted(e, &pl, &s);
    if (b->ok && !(known && s < 0.998 * b->seconds)) return STK_OK;
    *b->out = pl;
    b->how = *t;
    b->seconds = known ? s : 0;
    b->ok = true;
    b->ends = keeps || b->seconds <= 0; /* or nothing to compare by */
    return STK_OK;
}

/* What is recomputed beside what goes to host memory, in smaller and smaller steps from the best so far, with
 * all kept that fit and with half of these. */
static stk_status refine_acts(stk_engine *e, const struct eng_placement *homes, const struct limits *lim,
                              struct acts_best *b)
{
    uint32_t n = acts_positions(e);
    for (uint32_t step = n / 8; step > 0; step /= 2) {
        const struct act_try from = b->how;
        uint32_t again = from.last[PLAN_ACT_RECOMPUTE];
        for (uint32_t k = 0; k < 4; k++) {
            struct act_try t = from;
            if (k & 1 ? again < step : again + step >= n) continue;
            t.last[PLAN_ACT_RECOMPUTE] = k & 1 ? again - step : again + step;
            t.keep_half = 2 - k / 2;
            STK_TRY(try_acts(e, homes, &t, false, lim, b));
        }
    }
    return STK_OK;
}

/* The best of one set of homes; `late`: of what is tried at last. *ok: something fits; else *out is what
 * lacks least. */
static stk_status choose_acts(stk_engine *e, const struct eng_placement *homes, bool late,
                              const struct limits *lim, struct eng_placement *out, bool *ok, bool *any)
{
    struct act_try t[ACT_TRIES];
    struct acts_best b = { .out = out, .any = *any };
    uint32_t first = 0, n = act_tries(e, t, &first);
    if (!late) n = first;
    for (uint32_t k = late ? first : 0; k < n && !b.ends; k++)
        STK_TRY(try_acts(e, homes, &t[k], !b.ok && k + 1 == n, lim, &b));
    if (b.ok && !b.ends && b.how.rest == PLAN_ACT_HOST && n > 1)
        STK_TRY(refine_acts(e, homes, lim, &b));
    *ok = b.ok;
    *any = b.any;
    return STK_OK;
}

/* Bytes over the drives per step, as the plan has them. False: there is no such plan. */
static bool moves(stk_engine *e, const struct eng_placement *pl, uint64_t *bytes)
{
    struct plan_input in;
    struct plan *p = NULL;
    struct stk_error err = { 0 }, mine = e->err;
    bool ok = place_input(e, pl, PLAN_TRAIN, &in) == STK_OK && plan_build(&in, &p, NULL, &err) == STK_OK;
    if (ok) *bytes = plan_moved(p, PLAN_NVME_READ) + plan_moved(p, PLAN_NVME_WRITE);
    plan_free(p);
    e->err = mine;
    return ok;
}

/* Is `b` better than `a`? By prediction where figures are known, else by what the drives move; by a
 * fiftieth at least. */
static bool better(stk_engine *e, const struct eng_placement *a, const struct eng_placement *b)
{
    double a_s = 0, b_s = 0;
    uint64_t a_bytes = 0, b_bytes = 0;
    if (predicted(e, a, &a_s) && predicted(e, b, &b_s)) return b_s < 0.98 * a_s;
    return moves(e, a, &a_bytes) && moves(e, b, &b_bytes) && b_bytes < a_bytes / 50 * 49;
}

/* Gradients fit host memory, beside other state on NVMe. Where a budget was given their room may spare
 * more: it holds as many bytes of parameters, which move more often. */
static stk_status try_grads_away(stk_engine *e, bool late, const struct limits *lim,
                                 struct eng_placement *pl)
{
    struct eng_placement homes = { .param = pl->param, .opt = pl->opt, .grad = CHUNK_NVME }, away = { 0 };
    bool ok = false, any = false;
    if (e->cfg.grads != STK_TIER_AUTO || pl->grad != CHUNK_HOST || !cache_allowed(e, pl) ||
        e->cfg.own_order || !place_trains(e))
        return STK_OK;
    STK_TRY(choose_acts(e, &homes, late, lim, &away, &ok, &any));
    if (ok && better(e, pl, &away)) *pl = away;
    return STK_OK;
}

/* Sets of homes in their order, each with its best activations. *any: something was tried; *ok: and fits;
 * else *out is what lacks least. */
static stk_status choose_homes(stk_engine *e, bool late, const struct limits *lim,
                               struct eng_placement *out, bool *ok, bool *any)
{
    static const uint8_t tiers[][3] = {
        /* param, opt, grad */
        { CHUNK_HOST, CHUNK_HOST, CHUNK_HOST }, { CHUNK_HOST, CHUNK_HOST, CHUNK_NVME },
        { CHUNK_HOST, CHUNK_NVME, CHUNK_HOST }, { CHUNK_HOST, CHUNK_NVME, CHUNK_NVME },
        { CHUNK_NVME, CHUNK_HOST, CHUNK_HOST }, { CHUNK_NVME, CHUNK_HOST, CHUNK_NVME },
        { CHUNK_NVME, CHUNK_NVME, CHUNK_HOST }, { CHUNK_NVME, CHUNK_NVME, CHUNK_NVME },
    };
    for (size_t t = 0; t < sizeof tiers / sizeof *tiers && !*ok; t++) {
        if (!allowed(e->cfg.params, tiers[t][0]) || !allowed(e->cfg.optimizer_state, tiers[t][1]) ||
            !allowed(e->cfg.grads, tiers[t][2]))
            continue;
        if (e->cfg.durable && (tiers[t][0] != CHUNK_NVME || tiers[t][1] != CHUNK_NVME)) continue;
        bool nvme =
            tiers[t][0] == CHUNK_NVME || tiers[t][1] == CHUNK_NVME || tiers[t][2] == CHUNK_NVME;
        if (nvme && !has_store(e)) continue;
        struct eng_placement homes = { .param = tiers[t][0], .opt = tiers[t][1], .grad = tiers[t][2],
                                       .twin_elems = twin_asked(e), .twin_room = UINT64_MAX };
        STK_TRY(choose_acts(e, &homes, late, lim, out, ok, any));
        /* what was asked for by name is refused, not left out: but where all else does not fit either */
        place_fill(e, out);
        uint64_t mine = *ok || !*any ? 0 : twin_total(e);
        if (mine && out->device_bytes > lim->device && out->device_bytes - mine <= lim->device)
            return twin_refuse(e, out, lim->device);
    }
    return *ok ? try_grads_away(e, late, lim, out) : STK_OK;
}

stk_status place_choose(stk_engine *e, uint64_t host_limit, uint64_t device_limit,
                        struct eng_placement *out)
{
    const struct limits lim = { host_limit, device_limit, e->cfg.host_memory != 0,
                                e->cfg.device_memory != 0 };
    struct eng_placement pl = { 0 };
    bool any = false, ok = false;
    char a[32], b[32], acts[160];
    STK_TRY(acts_check(e));
    STK_TRY(choose_homes(e, false, &lim, &pl, &ok, &any));
    if (!ok) STK_TRY(choose_homes(e, true, &lim, &pl, &ok, &any));
    if (!any)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "a state is asked to be on NVMe, but no folder is given: add --nvme "
                             "DIR, or choose host");
    if (!ok) return refuse(e, &pl, &lim);
    *out = pl;
    place_fill(e, &pl); /* the last that was tried may be another: notes read these tables */
    eng_note(e,
             "placement: parameters %s, optimizer state %s, gradients %s, activations %s "
             "(host %s, device %s)",
             pl.param ? "nvme" : "host", pl.opt ? "nvme" : "host", pl.grad ? "nvme" : "host",
             acts_text(e, &pl, acts, sizeof acts), mem_size_format(pl.host_bytes, a),
             mem_size_format(pl.device_bytes, b));
    twin_note(e, &pl);
    cache_note(e, &pl);
    mode_note(e, &pl);
    return STK_OK;
}
