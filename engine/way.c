/* engine/way.c - how the update walks its arrays, measured once on the memory it will walk.
 *
 * Owns: whether that is worth its time. Must not know what ways there are (offload/adam_tune.c).
 * Application's thread, at the end of stk_seal: host homes are reserved and hold zeros still. */
#include "engine/engine.h"

/* Below this the update is short and lies in caches that a measurement would flatter. */
#define WAY_ELEMS_MIN (16ull << 20)
enum { WAY_SPANS_MAX = 64 };

void way_choose(stk_engine *e)
{
    struct adam_span spans[WAY_SPANS_MAX];
    const struct stk_layout *l = e->layout;
    uint32_t n = 0;
    uint64_t elems = 0;
    char text[64];
    for (uint32_t i = 0; i < l->n_chunks && n < WAY_SPANS_MAX && elems < WAY_ELEMS_MIN; i++) {
        const struct stk_chunk *c = &l->chunks[i];
        if (c->frozen || !c->host[CHUNK_PARAM] || !c->host[CHUNK_OPT] || !c->host[CHUNK_GRAD] ||
            l->blocks[c->block].moments != CHUNK_MOMENTS_F32) /* others walk by tiles */
            continue;
        struct adam_chunk at = { c->host[CHUNK_PARAM], c->host[CHUNK_OPT], c->host[CHUNK_GRAD],
                                 NULL };
        spans[n++] = adam_chunk_span(l->dtype, c, &at, 0, c->n_elems);
        elems += c->n_elems;
    }
    if (elems < WAY_ELEMS_MIN || exec_kind_of(e->ex) != EXEC_THREADS) return;
    e->way = adam_way_measure(e->ex, e->adam,
                              l->dtype == CHUNK_BF16 ? ADAM_BF16_SPLIT : ADAM_FP16, spans, n,
                              e->cores.update);
    eng_note(e, "update, measured: %s", adam_way_text(e->way, text, sizeof text));
}
