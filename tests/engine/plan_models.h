/* tests/engine/plan_models.h - inputs for plans: small ones by hand, random ones by seed. Memory of
 * an input is one malloc; model_free gives it back. */
#ifndef TESTS_PLAN_MODELS_H
#define TESTS_PLAN_MODELS_H

#include "base/rng.h"
#include "engine/plan.h"
#include "tests/test.h"

struct model {
    struct plan_input in;
    struct plan_block_in *blocks;
    struct plan_chunk_in *chunks;
    struct plan_place_in *places;
    struct plan_own_visit *own;
};

static inline void model_free(struct model *m)
{
    free(m->blocks);
    free(m->chunks);
    free(m->places);
    free(m->own);
}

/* n_blocks blocks at as many places, each of n_chunks chunks of `elems`, the last place fused. */
static inline void model_make(struct model *m, uint32_t n_blocks, uint32_t n_chunks, uint32_t elems)
{
    memset(m, 0, sizeof *m);
    m->blocks = calloc(n_blocks + 1, sizeof *m->blocks);
    m->chunks = calloc((size_t)n_blocks * n_chunks + 1, sizeof *m->chunks);
    m->places = calloc(n_blocks + 2, sizeof *m->places);
    for (uint32_t b = 0; b < n_blocks; b++) {
        m->blocks[b] = (struct plan_block_in){ b * n_chunks, n_chunks, n_chunks,
                                                2ull * n_chunks * elems, 4ull * n_chunks * elems };
        for (uint32_t c = 0; c < n_chunks; c++)
            m->chunks[b * n_chunks + c] =
                (struct plan_chunk_in){ b,
                                         2ull * c * elems,
                                         4ull * c * elems,
                                         { 2ull * elems, 10ull * elems, 2ull * elems },
                                         { CHUNK_HOST, CHUNK_HOST, CHUNK_HOST },
                                         false };
        m->places[b] = (struct plan_place_in){ b,   b + 1 == n_blocks, b == 0, b ? 8192 : 0, 20000,
                                                1.0, PLAN_ACT_KEEP };
    }
    m->in = (struct plan_input){ .mode = PLAN_TRAIN,
                                  .update = PLAN_CHASE,
                                  .n_micro = 1,
                                  .n_blocks = n_blocks,
                                  .n_chunks = n_blocks * n_chunks,
                                  .n_places = n_blocks,
                                  .blocks = m->blocks,
                                  .chunks = m->chunks,
                                  .places = m->places };
    for (int a = 0; a < PLAN_ARENA_N; a++) m->in.arena_bytes[a] = UINT64_MAX;
}

static inline void model_home(struct model *m, enum chunk_state s, enum chunk_home h)
{
    for (uint32_t c = 0; c < m->in.n_chunks; c++) m->chunks[c].home[s] = (uint8_t)h;
}

static inline uint32_t pick(struct rng *r, uint32_t n) { return (uint32_t)rng_below(r, n); }

static inline void random_chunks(struct model *m, struct rng *r)
{
    static const uint32_t sizes[] = { 64, 128, 192, 1024, 4096, 8192, 2048 + 64 };
    uint32_t n = 0, style = pick(r, 4), whole = pick(r, 8);
    for (uint32_t b = 0; b < m->in.n_blocks; b++) {
        struct plan_block_in *x = &m->blocks[b];
        *x = (struct plan_block_in){ .first_chunk = n, .n_chunks = pick(r, 10) };
        uint32_t kind = pick(r, 4); /* a quarter of the blocks are frozen, a quarter partly */
        x->n_chunks_trainable = kind == 0 ? 0 : kind == 1 ? pick(r, x->n_chunks + 1) : x->n_chunks;
        for (uint32_t k = 0; k < x->n_chunks; k++, n++) {
            uint64_t elems = sizes[pick(r, 7)];
            bool frozen = k >= x->n_chunks_trainable;
            m->chunks[n] = (struct plan_chunk_in){ .block = b,
                                                    .offset_bytes = x->param_bytes,
                                                    .acc_offset_bytes = frozen ? 0 : x->acc_bytes,
                                                    .frozen = frozen };
            m->chunks[n].bytes[CHUNK_PARAM] = 2 * elems;
            if (!frozen) m->chunks[n].bytes[CHUNK_OPT] = 10 * elems;
            if (!frozen) m->chunks[n].bytes[CHUNK_GRAD] = 2 * elems;
            x->param_bytes += 2 * elems;
            if (!frozen) x->acc_bytes += 4 * elems;
            for (int s = 0; s < CHUNK_STATE_N; s++) /* all host, all NVMe, by state, by chunk */
                m->chunks[n].home[s] = style == 0   ? CHUNK_HOST
                                       : style == 1 ? CHUNK_NVME
                                       : style == 2 ? (whole >> s) & 1
                                                    : (uint8_t)pick(r, 2);
        }
    }
    m->in.n_chunks = n;
}

/* Of half of the models some blocks lie on the device, where there is one for that. */
static inline void random_on_device(struct model *m, struct rng *r)
{
    if (m->in.in_place || m->in.own || pick(r, 2)) return;
    for (uint32_t b = 0; b < m->in.n_blocks; b++) {
        const struct plan_block_in *x = &m->blocks[b];
        bool there = pick(r, 2);
        for (uint32_t k = 0; there && k < x->n_chunks; k++) {
            struct plan_chunk_in *c = &m->chunks[x->first_chunk + k];
            c->spec = false;
            for (int s = 0; s < CHUNK_STATE_N; s++)
                c->home[s] = c->bytes[s] ? CHUNK_DEVICE : CHUNK_HOST;
        }
    }
}

/* Everything the planner may meet: homes, orders, devices, policies, tied and frozen blocks. Arenas
 * without limit. */
static inline void random_model(struct model *m, struct rng *r)
{
    uint32_t n_blocks = 1 + pick(r, 6);
    static const uint32_t bytes[] = { 100, 4096, 9000, 20480 };
    memset(m, 0, sizeof *m);
    m->blocks = calloc(n_blocks + 1, sizeof *m->blocks);
    m->chunks = calloc(n_blocks * 10 + 1, sizeof *m->chunks);
    m->places = calloc(n_blocks + 3, sizeof *m->places);
    m->in = (struct plan_input){ .mode = pick(r, 6) == 0 ? PLAN_EVAL : PLAN_TRAIN,
                                  .update = (enum plan_update)pick(r, 4),
                                  .accumulate = (enum plan_accumulate)pick(r, 2),
                                  .in_place = pick(r, 2),
                                  .n_micro = 1 + pick(r, 4),
                                  .prefetch = pick(r, 5),
                                  .n_blocks = n_blocks,
                                  .blocks = m->blocks,
                                  .chunks = m->chunks,
                                  .places = m->places };
    random_chunks(m, r);
    uint32_t act = pick(r, PLAN_ACT_N + 2), n = 0; /* the same everywhere, or mixed */
    for (uint32_t b = 0; b < n_blocks; b++) m->places[n++].block = b;
    for (uint32_t b = 0; b < n_blocks; b++) m->blocks[b].split = b % 4 != 3;
    if (pick(r, 3) == 0) m->places[n++].block = 0; /* tied embedding */
    if (pick(r, 8) == 0 && n_blocks > 1) m->places[n++].block = 1; /* and a stranger knot */
    for (uint32_t i = 0; i < n; i++) {
        struct plan_place_in *x = &m->places[i];
        x->act = (uint8_t)(act < PLAN_ACT_N ? act : pick(r, PLAN_ACT_N));
        x->no_input = i == 0 || pick(r, 10) == 0;
        x->in_bytes = x->no_input ? 0 : bytes[pick(r, 4)];
        x->full_bytes = pick(r, 8) ? bytes[pick(r, 4)] * (1 + pick(r, 3)) : 0;
        x->flow_bytes = i % 3 == 1 ? 2 * x->in_bytes : 0;
        x->flops = 1 + i;
    }
    m->places[n - 1].fused = pick(r, 4) > 0;
    m->in.n_places = n;
    for (int a = 0; a < PLAN_ARENA_N; a++) m->in.arena_bytes[a] = UINT64_MAX;
    uint32_t records = pick(r, 3); /* of speculation: all have room, some, or none */
    for (uint32_t i = 0; i < m->in.n_chunks && m->in.update == PLAN_SPECULATE; i++) {
        struct plan_chunk_in *c = &m->chunks[i];
        bool apart = c->home[CHUNK_PARAM] == CHUNK_NVME && c->home[CHUNK_OPT] == CHUNK_HOST;
        c->spec = !c->frozen && !apart && (records == 0 || (records == 1 && pick(r, 2)));
    }
    if (m->in.mode == PLAN_TRAIN && pick(r, 8) == 0) { /* an order of the client's own */
        for (uint32_t i = 0; i < m->in.n_chunks; i++) m->chunks[i].spec = false;
        m->in.n_own = pick(r, 12);
        m->in.own = m->own = calloc(m->in.n_own + 1, sizeof *m->own);
        for (uint32_t i = 0; i < m->in.n_own; i++)
            m->own[i] =
                (struct plan_own_visit){ pick(r, n), (uint8_t)pick(r, 2), pick(r, m->in.n_micro) };
    }
    random_on_device(m, r);
}

/* A plan as text; free it. */
static inline char *plan_text(const struct plan *p)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    plan_print(p, f);
    fclose(f);
    return text;
}

/* Arenas anywhere between what the plan must have and what is of use to it. */
static inline void random_arenas(struct model *m, struct rng *r, const uint64_t least[PLAN_ARENA_N],
                                 const uint64_t useful[PLAN_ARENA_N])
{
    for (int a = 0; a < PLAN_ARENA_N; a++)
        m->in.arena_bytes[a] = least[a] + rng_below(r, useful[a] - least[a] + 1);
}

#endif
