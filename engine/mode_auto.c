/* engine/mode_auto.c - `--update auto`, and how many blocks `split` and `speculate` split, by prediction.
 *
 * Application's thread, inside stk_seal: places and builds a plan for each candidate, predicts it
 * (engine/predict.h), lets the winner be placed. Owns nothing. Must not know how nodes run.
 *
 * CANDIDATES. chase; split of a quarter, half, three quarters and all of the blocks, then of fewer and more
 * than the best of these, by an eighth, a sixteenth and so on; speculate, with as many blocks split as was
 * best there, and in a tried step the first, the first two, or the last but one. serial never. With
 * clipping a mode is worth the mean of a step whose norm binds and one whose norm does not.
 * RULE. Another mode than chase takes memory (records of 1.3 bytes a parameter, second parameters of 2):
 * it must be predicted three hundredths faster where the norm binds or where it does not, nowhere slower (but
 * for a hundredth, which is what predictions are good for), and fit beside everything else.
 * COST. With all state in host memory the placement of `chase` serves all candidates, and chunks are
 * merged until there are about CHUNKS_MOST. Where activations are `auto`, too, once more with those that
 * the mode found first wants, and with those that it wants when all blocks are split. State on NVMe: two
 * candidates, in full.
 * NOT PREDICTED, and so chase as before (mode.c has the rest of the rule): own order; a machine of which
 * nothing is known yet when memory is placed, which is every real run whose drives matter; a device that
 * computes on the host's cores, where the update hides under nothing. Bits never depend on it. */
#include "engine/machine.h"
#include "engine/predict.h"
#include "engine/spec.h"
#include "base/sys.h"

#include <string.h>

#define GAIN_LEAST 0.03
#define LOSS_MOST 0.01
#define CHUNKS_MOST 1024u

struct search {
    stk_engine *e;
    uint64_t host, device;
    struct eng_placement base;  /* of chase */
    bool nvme;                  /* it has state there */
    double chase_s;             /* 0: not predicted */
    double best_s, best_binds_s; /* of the best so far */
    struct eng_mode_try best;
};

static const struct eng_mode_try chase_try = { true, PLAN_CHASE, 0, 0, 0 };

static bool predictable(const stk_engine *e)
{
    const stk_machine *m = e->cfg.machine;
    if (e->cfg.own_order || !place_trains(e)) return false;
    return m ? !m->on_host && m->update_bytes_per_s > 0 : e->caps.modelled_time;
}

static stk_status predict_both(stk_engine *e, const struct plan *p, const struct plan_input *in,
                               double *quiet_s, double *binds_s)
{
    stk_prediction out = { .size = sizeof out };
    STK_TRY(predict_plan(e, NULL, p, in, false, &out));
    *quiet_s = *binds_s = out.step_s;
    if (in->update != PLAN_SPECULATE || !(e->cfg.clip > 0)) return STK_OK;
    STK_TRY(predict_plan(e, NULL, p, in, true, &out));
    *binds_s = out.step_s;
    return STK_OK;
}

/* --- fewer chunks ----------------------------------------------------------------------------- */

struct coarse { struct plan_block_in *blocks; struct plan_chunk_in *chunks; };

static void coarse_free(struct coarse *c)
{
    sys_free(c->blocks);
    sys_free(c->chunks);
}

static bool like(const struct plan_chunk_in *a, const struct plan_chunk_in *b)
{
    return a->block == b->block && a->frozen == b->frozen && a->spec == b->spec &&
           !memcmp(a->home, b->home, sizeof a->home);
}

/* Merges neighbours of a block. All homes are in host memory, so no arena of the update is in use. */
static stk_status coarsen(struct plan_input *in, struct coarse *c, struct stk_error *err)
{
    uint32_t group = in->n_chunks / CHUNKS_MOST + 1, n = 0, members = 0;
    c->blocks = sys_calloc((size_t)in->n_blocks + 1, sizeof *c->blocks);
    c->chunks = sys_calloc((size_t)in->n_chunks + 1, sizeof *c->chunks);
    if (!c->blocks || !c->chunks)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to compare update modes");
    memcpy(c->blocks, in->blocks, in->n_blocks * sizeof *c->blocks);
    for (uint32_t i = 0; i < in->n_blocks; i++) c->blocks[i].n_chunks = c->blocks[i].n_chunks_trainable = 0;
    for (uint32_t i = 0; i < in->n_chunks; i++) {
        const struct plan_chunk_in *x = &in->chunks[i];
        if (n > 0 && members < group && like(&c->chunks[n - 1], x)) {
            for (int s = 0; s < CHUNK_STATE_N; s++) c->chunks[n - 1].bytes[s] += x->bytes[s];
            members++;
            continue;
        }
        struct plan_block_in *b = &c->blocks[x->block];
        if (b->n_chunks++ == 0) b->first_chunk = n;
        b->n_chunks_trainable += !x->frozen;
        c->chunks[n++] = *x;
        members = 1;
    }
    for (uint32_t i = 0, at = 0; i < in->n_blocks; i++) { /* blocks without chunks */
        if (c->blocks[i].n_chunks == 0) c->blocks[i].first_chunk = at;
        at += c->blocks[i].n_chunks;
    }
    if (in->arena_bytes[PLAN_ARENA_CAST] < UINT64_MAX / group) in->arena_bytes[PLAN_ARENA_CAST] *= group;
    in->blocks = c->blocks;
    in->chunks = c->chunks;
    in->n_chunks = n;
    return STK_OK;
}

/* --- candidates ------------------------------------------------------------------------------- */

/* Where everything would lie. STK_END: there is no room. */
static stk_status candidate(struct search *s, struct plan_input *in, struct coarse *c)
{
    stk_engine *e = s->e;
    struct eng_placement pl = s->base;
    if (s->nvme) {
        STK_TRY(place_choose(e, s->host, s->device, &pl));
        if (pl.update != e->mode_try.update) return STK_END;
        return place_input(e, &pl, PLAN_TRAIN, in);
    }
    pl.update = e->mode_try.update;
    mode_split_set(e, &pl);
    STK_TRY(place_input(e, &pl, PLAN_TRAIN, in));
    uint64_t second = place_second_bytes(e, &pl), room = s->host - pl.host_bytes;
    if (pl.host_bytes > s->host || second > room) return STK_END;
    spec_take(e, &pl, room - second);
    STK_TRY(place_input(e, &pl, PLAN_TRAIN, in));
    return coarsen(in, c, &e->err);
}

/* A mode's step times against chase's, which is the same either way: is it worth its memory? */
static bool worth(const struct search *s, double quiet, double binds)
{
    double fast = quiet < binds ? quiet : binds, slow = quiet < binds ? binds : quiet;
    return s->chase_s <= 0 ||
           (fast < (1 - GAIN_LEAST) * s->chase_s && slow <= (1 + LOSS_MOST) * s->chase_s);
}

/* One candidate. False: it does not fit or cannot be predicted; the sentence is forgotten. */
static bool consider(struct search *s, struct eng_mode_try m, double *seconds, double *binds)
{
    stk_engine *e = s->e;
    struct plan_input in;
    struct coarse c = { 0 };
    struct plan *p = NULL;
    uint32_t notes = e->n_notes;
    double quiet = 0;
    *binds = 0;
    e->mode_try = m;
    stk_status st = candidate(s, &in, &c);
    if (st == STK_OK) st = plan_build(&in, &p, NULL, &e->err);
    if (st == STK_OK) st = predict_both(e, p, &in, &quiet, binds);
    plan_free(p);
    coarse_free(&c);
    eng_notes_cut(e, notes);
    stk_error_clear(&e->err);
    *seconds = (quiet + *binds) / 2;
    if (st != STK_OK) return false;
    if (m.update == PLAN_CHASE) s->chase_s = *seconds;
    bool other = e->cfg.update == STK_UPDATE_AUTO && m.update != PLAN_CHASE;
    if ((s->best_s > 0 && *seconds >= s->best_s) || (other && !worth(s, quiet, *binds))) return true;
    s->best_s = *seconds;
    s->best_binds_s = *binds;
    s->best = e->mode_try;
    return true;
}

static bool split(struct search *s, uint32_t n, double *seconds)
{
    double binds;
    return consider(s, (struct eng_mode_try){ true, PLAN_SPLIT, n, 0, 0 }, seconds, &binds);
}

/* How many blocks to split, where the norm is known before the update: quarters, then around the best of
 * these in smaller and smaller steps. 0: none. */
static uint32_t search_split(struct search *s)
{
    uint32_t n = s->e->n_use_blocks, best = 0;
    double least = s->chase_s, at;
    for (uint32_t k = 1; k <= 4; k++)
        if (split(s, n * k / 4, &at) && (least <= 0 || at < least)) {
            least = at;
            best = n * k / 4;
        }
    for (uint32_t step = n / 8; step > 0; step /= 2) {
        uint32_t middle = best;
        for (int side = -1; side <= 1 && middle > 0; side += 2) {
            uint32_t k = side < 0 ? middle - step : middle + step;
            if ((side < 0 && middle <= step) || k > n || !split(s, k, &at) || at >= least) continue;
            least = at;
            best = k;
        }
    }
    return best;
}

/* Which blocks are split in a step that is tried. The first, which the forward waits for at once, and
 * those behind it whose gradients come as late; or none of these, where the forward waits for all of the
 * update anyway: then one before the last block, whose commit keeps the team busy while the last block is
 * computed and there is no gradient yet. */
static void search_tried(struct search *s, uint32_t split_blocks)
{
    static const struct { uint32_t first, late; } tried[] = { { 1, 0 }, { 2, 0 }, { 0, 1 } };
    double at, binds;
    for (size_t k = 0; k < sizeof tried / sizeof tried[0]; k++) {
        uint32_t least = tried[k].first ? tried[k].first : 1;
        struct eng_mode_try m = { true, PLAN_SPECULATE, split_blocks > least ? split_blocks : least,
                                  tried[k].first, tried[k].late };
        consider(s, m, &at, &binds);
    }
}

static bool place_base(struct search *s)
{
    stk_engine *e = s->e;
    uint32_t notes = e->n_notes;
    e->mode_try = chase_try;
    stk_status st = place_choose(e, s->host, s->device, &s->base);
    eng_notes_cut(e, notes);
    stk_error_clear(&e->err);
    s->nvme = s->base.param == CHUNK_NVME || s->base.opt == CHUNK_NVME || s->base.grad == CHUNK_NVME;
    return st == STK_OK;
}

static void search_all(struct search *s)
{
    double at, binds;
    stk_update asked = s->e->cfg.update;
    if (!place_base(s)) return; /* the caller says why */
    consider(s, chase_try, &at, &binds);
    uint32_t blocks = s->nvme ? 0 : search_split(s);
    if (asked == STK_UPDATE_SPLIT) return;
    if (asked == STK_UPDATE_SPECULATE) s->best_s = 0;
    if (!s->nvme) search_tried(s, blocks);
    else consider(s, (struct eng_mode_try){ true, PLAN_SPECULATE, 0, 0, 0 }, &at, &binds);
}

static const char *mode_name(enum plan_update u)
{
    return u == PLAN_SPLIT ? "split" : u == PLAN_SPECULATE ? "speculate" : "chase";
}

static void say(const struct search *s)
{
    stk_engine *e = s->e;
    char blocks[64] = "", binds[64] = "";
    if (s->best.split_blocks)
        snprintf(blocks, sizeof blocks, " with %u of %u blocks split", s->best.split_blocks,
                 e->n_use_blocks);
    if (s->best.update == PLAN_SPECULATE && e->cfg.clip > 0)
        snprintf(binds, sizeof binds, ", %.3f s when the norm binds", s->best_binds_s);
    eng_note(e, "update: %s%s%s, by prediction: %.3f s a step%s, chase %.3f s",
             e->cfg.update == STK_UPDATE_AUTO ? "auto is " : "", mode_name(s->best.update), blocks,
             2 * s->best_s - s->best_binds_s, binds, s->chase_s);
}

static bool open_mode(const stk_engine *e)
{
    stk_update u = e->cfg.update;
    bool parts = (u == STK_UPDATE_SPLIT || u == STK_UPDATE_SPECULATE) && e->cfg.split_blocks == UINT32_MAX;
    return (u == STK_UPDATE_AUTO || parts) && predictable(e);
}

/* Places what was found, and says so. */
static stk_status place_found(const struct search *s, struct eng_placement *out)
{
    stk_engine *e = s->e;
    memset(&e->mode_try, 0, sizeof e->mode_try);
    if (s->best_s > 0 && !(e->cfg.update == STK_UPDATE_SPLIT && s->best.update != PLAN_SPLIT)) {
        e->mode_try = s->best;
        say(s);
    }
    uint32_t notes = e->n_notes;
    stk_status st = place_choose(e, s->host, s->device, out);
    if (st == STK_OK || !e->mode_try.set || e->mode_try.update == PLAN_CHASE) return st;
    e->mode_try = chase_try; /* merged chunks hid what is too much */
    eng_notes_cut(e, notes > 0 ? notes - 1 : 0);
    stk_error_clear(&e->err);
    return place_choose(e, s->host, s->device, out);
}

static void search_modes(struct search *s, stk_engine *e, uint64_t host, uint64_t device)
{
    *s = (struct search){ .e = e, .host = host, .device = device };
    if (open_mode(e)) search_all(s);
}

struct asked_acts { stk_act activations; uint32_t last[STK_ACT_N]; };

static void acts_set(stk_engine *e, const struct asked_acts *a)
{
    e->cfg.activations = a->activations;
    memcpy(e->cfg.activations_last, a->last, sizeof a->last);
}

static struct asked_acts acts_as_placed(const struct eng_placement *pl)
{
    struct asked_acts a = { .activations = (stk_act)(pl->act + 1) };
    for (uint32_t p = 0; p < PLAN_ACT_N; p++) a.last[p + 1] = pl->act_last[p];
    return a;
}

/* Few blocks split want other activations than many do, and each finds the other worse: from the end of all
 * split, too. */
static void search_from_all_split(const struct search *found, const struct eng_placement *pl,
                                  const struct asked_acts *asked, struct search *s, struct asked_acts *acts)
{
    stk_engine *e = found->e;
    uint32_t notes = e->n_notes;
    struct eng_placement all;
    struct search other;
    if (pl->act == PLAN_ACT_KEEP || found->best.split_blocks + 1 >= e->n_use_blocks) return;
    e->mode_try = found->best;
    e->mode_try.split_blocks = e->n_use_blocks;
    acts_set(e, asked);
    bool ok = place_choose(e, found->host, found->device, &all) == STK_OK;
    eng_notes_cut(e, notes);
    stk_error_clear(&e->err);
    if (!ok) return;
    const struct asked_acts wanted = acts_as_placed(&all);
    acts_set(e, &wanted);
    search_modes(&other, e, found->host, found->device);
    if (!(other.best_s > 0) || other.best_s >= s->best_s) return;
    *s = other;
    *acts = wanted;
}

stk_status mode_place(stk_engine *e, uint64_t host_limit, uint64_t device_limit,
                      struct eng_placement *out)
{
    struct asked_acts asked = { .activations = e->cfg.activations }, acts;
    struct search first, s;
    uint32_t notes = e->n_notes;
    memcpy(asked.last, e->cfg.activations_last, sizeof asked.last);
    search_modes(&first, e, host_limit, device_limit);
    STK_TRY(place_found(&first, out));
    if (asked.activations != STK_ACT_AUTO || first.nvme || !e->mode_try.set || e->mode_try.update == PLAN_CHASE)
        return STK_OK;
    /* Activations were compared for the mode, but the mode with those that chase wants: once more, with the
     * activations that this mode wants. */
    acts = acts_as_placed(out);
    acts_set(e, &acts);
    eng_notes_cut(e, notes);
    search_modes(&s, e, host_limit, device_limit);
    search_from_all_split(&first, out, &asked, &s, &acts);
    acts_set(e, &acts);
    stk_status st = place_found(&s, out);
    acts_set(e, &asked);
    return st;
}
