/* engine/spec.c - `speculate` between runs: who may, memory for records, whether a step is tried, and
 * what its end decides (engine/spec.h).
 *
 * Application's thread. Owns struct eng_spec. Must not know how nodes run (spec_run.c). */
#include "engine/spec.h"
#include "base/sys.h"
#include <math.h>
#include <string.h>

#define NEED_MOST 64u
#define REST_MOST 64u


/* --- records ---------------------------------------------------------------------------------- */

/* 1/64 of the elements, about what warm moments need three halves of, and some for small chunks. */
static uint32_t side_entries(uint32_t n_elems) { return n_elems / 64 + 1024; }

bool spec_possible(const stk_engine *e, uint32_t chunk)
{
    const struct plan_chunk_in *c = &e->pchunks[chunk];
    bool betas = e->cfg.beta1 > 0 && e->cfg.beta1 < 1 && e->cfg.beta2 > 0 && e->cfg.beta2 < 1;
    if (c->frozen || e->cfg.own_order || c->home[CHUNK_OPT] == CHUNK_DEVICE) return false;
    if (c->home[CHUNK_OPT] == CHUNK_NVME) return true;
    return c->home[CHUNK_PARAM] == CHUNK_HOST && betas && e->cfg.moments == STK_MOMENTS_F32;
}

uint64_t spec_record_bytes(const stk_engine *e, uint32_t chunk)
{
    const struct plan_chunk_in *c = &e->pchunks[chunk];
    uint32_t n = e->layout->chunks[chunk].n_elems;
    if (c->home[CHUNK_PARAM] == CHUNK_NVME) return 0;
    if (c->home[CHUNK_OPT] == CHUNK_NVME) return round_page(2ull * n);
    return round_page(n + (uint64_t)side_entries(n) * sizeof(struct adam_side) +
                      e->cores.update * sizeof(struct spec_slice));
}

/* The i-th chunk whose gradient is final in backward: the update's order, turned round. */
static uint32_t backward(const stk_engine *e, uint32_t i)
{
    return e->use_chunks[e->n_use_chunks - 1 - i];
}

void spec_homes(const stk_engine *e, const struct eng_placement *pl)
{
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) e->pchunks[i].spec = false;
    if (pl->update != PLAN_SPECULATE) return;
    for (uint32_t i = 0; i < e->n_use_chunks; i++) {
        uint32_t chunk = backward(e, i);
        bool room = i < pl->spec_chunks || spec_record_bytes(e, chunk) == 0;
        e->pchunks[chunk].spec = room && spec_possible(e, chunk);
    }
}

uint64_t spec_bytes(const stk_engine *e)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++)
        if (e->pchunks[i].spec) sum += spec_record_bytes(e, i);
    return sum;
}

void spec_take(const stk_engine *e, struct eng_placement *pl, uint64_t room_bytes)
{
    if (pl->update != PLAN_SPECULATE) return;
    for (pl->spec_chunks = 0; pl->spec_chunks < e->n_use_chunks; pl->spec_chunks++) {
        uint32_t chunk = backward(e, pl->spec_chunks);
        uint64_t bytes = spec_possible(e, chunk) ? spec_record_bytes(e, chunk) : 0;
        if (bytes > room_bytes) return;
        room_bytes -= bytes;
    }
}

bool spec_on_nvme(const stk_engine *e, const struct eng_placement *pl)
{
    return pl->update == PLAN_SPECULATE && pl->opt == CHUNK_NVME && place_trains(e);
}

static void place_record(stk_engine *e, uint32_t chunk, uint8_t *at)
{
    struct spec_chunk *c = &e->spec->chunk[chunk];
    uint32_t n = e->layout->chunks[chunk].n_elems;
    c->codes = at;
    if (e->pchunks[chunk].home[CHUNK_OPT] == CHUNK_NVME) return;
    c->side_cap = side_entries(n);
    c->side = (struct adam_side *)(void *)(at + n); /* n: a multiple of 64 */
    c->slices = (struct spec_slice *)(void *)(c->side + c->side_cap);
}

stk_status spec_alloc(stk_engine *e)
{
    if (e->place.update != PLAN_SPECULATE || !e->plan_train) return STK_OK;
    struct eng_spec *s = e->spec = sys_calloc(1, sizeof *s);
    uint32_t n = e->layout->n_chunks, t = e->layout->n_tensors;
    bool coefs = false;
    if (s) {
        s->chunk = sys_calloc(n ? n : 1, sizeof *s->chunk);
        s->order = sys_calloc(n ? n : 1, sizeof *s->order);
        coefs = adam_coefs_alloc(&s->coef, t);
        coefs = adam_coefs_alloc(&s->coef_made, t) && coefs;
    }
    if (!s || !s->chunk || !s->order || !coefs)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the tables of speculation");
    s->need = e->cfg.clip > 0; /* without a limit there is nothing to wait for */
    uint64_t bytes = spec_bytes(e);
    if (bytes == 0) return STK_OK;
    void *p;
    STK_TRY(mem_reserve(e->held, "undo records", "", bytes, &p, &e->err));
    for (uint32_t i = 0, k = 0; k < n; k++) {
        i = e->pchunks[k].spec ? (uint32_t)spec_record_bytes(e, k) : 0;
        if (i) place_record(e, k, p);
        p = (uint8_t *)p + i;
    }
    return STK_OK;
}

void spec_free(stk_engine *e)
{
    if (!e->spec) return;
    sys_free(e->spec->chunk);
    sys_free(e->spec->order);
    adam_coefs_free(&e->spec->coef);
    adam_coefs_free(&e->spec->coef_made);
    sys_free(e->spec);
    e->spec = NULL;
}

/* --- a step ----------------------------------------------------------------------------------- */

void spec_step_begin(stk_engine *e)
{
    struct eng_spec *s = e->spec;
    if (!s) return;
    s->tried = s->quiet >= s->need;
    s->n_done = s->n_undone = 0;
    if (s->tried) norm_coefficients(e, 1.0 / e->loss_scale, 1, &s->coef);
}

/* What the next steps should expect. */
static void learn(stk_engine *e, bool accept)
{
    struct eng_spec *s = e->spec;
    if (!accept) {
        s->quiet = 0;
        if (s->n_done) s->need = s->need == 0 ? 1 : s->need * 2 < NEED_MOST ? s->need * 2 : NEED_MOST;
        return;
    }
    s->quiet++;
    if (s->need > 1 && s->quiet > 2 * s->need) {
        s->need /= 2;
        s->quiet = s->need;
    }
}

bool spec_decided(stk_engine *e, bool applied)
{
    struct eng_spec *s = e->spec;
    if (!s) return false;
    s->apply = applied;
    s->accept = applied && e->clip_factor == 1.0;
    bool undo = s->n_done > 0 && !s->accept;
    if (undo) {
        struct adam_coefs made = s->coef; /* the next step that tries makes its own */
        s->coef = s->coef_made;
        s->coef_made = made;
        s->n_undone += s->n_done;
    }
    for (uint32_t i = 0; s->n_done && s->accept && i < e->layout->n_tensors; i++)
        STK_ASSERT(e->layout->tensors[i].frozen ||
                   memcmp(adam_coef_of(&s->coef, i), adam_coef_of(&e->coef, i),
                          sizeof(struct adam_coef)) == 0);
    learn(e, s->accept);
    for (uint32_t i = 0; i < e->layout->n_chunks; i++)
        if (s->tried && s->chunk[i].rest > 0) s->chunk[i].rest--;
    return undo;
}
