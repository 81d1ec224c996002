/* engine/plan_needs.c - how much each arena needs at least, and how much is of any use.
 *
 * Owns: nothing. Must not know: budgets. Any thread. `least` is the peak of the tight build in
 * arenas without limit; plan_build falls back to that very build, whose placement does not depend
 * on the capacity, so it fits. Arenas that chunks stream through need room for one chunk; more of
 * them overlap reading, copying and writing. */
#include "engine/plan_impl.h"

#define STREAM_CHUNKS 64u /* beyond so many chunks in flight a stream of chunks gains nothing */

struct stream {
    uint64_t one, all;
};

static void stream_add(struct stream *s, uint64_t bytes)
{
    bytes = plan_page_up(bytes);
    if (bytes > s->one) s->one = bytes;
    s->all += bytes;
}

static void stream_needs(const struct plan_input *in, uint64_t *least, uint64_t *useful)
{
    struct stream s[PLAN_ARENA_N] = { 0 };
    for (uint32_t i = 0; i < in->n_chunks; i++) {
        const struct plan_chunk_in *c = &in->chunks[i];
        bool train = in->mode == PLAN_TRAIN && !c->frozen;
        if (!in->in_place && c->home[CHUNK_PARAM] == CHUNK_NVME)
            stream_add(&s[PLAN_ARENA_BOUNCE], c->bytes[CHUNK_PARAM]);
        if (train) stream_add(&s[PLAN_ARENA_UPDATE], plan_update_bytes(c));
        if (train && !in->in_place && c->home[CHUNK_GRAD] != CHUNK_DEVICE)
            stream_add(&s[PLAN_ARENA_CAST], c->bytes[CHUNK_GRAD]);
        if (train && c->home[CHUNK_GRAD] == CHUNK_NVME)
            stream_add(&s[PLAN_ARENA_GRAD], c->bytes[CHUNK_GRAD]);
    }
    for (int a = 0; a < PLAN_ARENA_N; a++) {
        if (!plan_arena_is_ring((enum plan_arena)a)) continue;
        uint64_t some = s[a].one * STREAM_CHUNKS;
        least[a] = s[a].one;
        useful[a] = s[a].all < some || a == PLAN_ARENA_UPDATE ? s[a].all : some;
    }
}

/* Own order: a departure may ask for any block. */
static void own_param_need(const struct plan_input *in, uint64_t *least)
{
    for (uint32_t i = 0; i < in->n_chunks; i++) {
        uint64_t bytes = plan_page_up(in->blocks[in->chunks[i].block].param_bytes);
        bool staged = !in->in_place || in->chunks[i].home[CHUNK_PARAM] == CHUNK_NVME;
        if (staged && bytes > *least) *least = bytes;
    }
}

stk_status plan_needs(const struct plan_input *in, uint64_t least[PLAN_ARENA_N],
                      uint64_t useful[PLAN_ARENA_N], struct stk_error *err)
{
    struct plan_input free_in = *in;
    struct plan *p;
    enum plan_arena where;
    STK_TRY(plan_order_check(in, err));
    for (int a = 0; a < PLAN_ARENA_N; a++) free_in.arena_bytes[a] = UINT64_MAX;
    STK_TRY(plan_build_once(&free_in, (struct plan_tuning){ true, 0, false }, &p, &where, err));
    for (int a = 0; a < PLAN_ARENA_N; a++) least[a] = p->peak_bytes[a];
    least[PLAN_ARENA_PARAM] = 0; /* that build caches; a block at a time is enough */
    for (uint32_t i = 0; i < p->n_slots; i++)
        if (p->slots[i].arena == PLAN_ARENA_PARAM &&
            p->slots[i].size_bytes > least[PLAN_ARENA_PARAM])
            least[PLAN_ARENA_PARAM] = p->slots[i].size_bytes;
    if (in->own) own_param_need(in, &least[PLAN_ARENA_PARAM]);
    plan_free(p);
    STK_TRY(
        plan_build_once(&free_in, (struct plan_tuning){ false, in->prefetch, false }, &p, &where, err));
    for (int a = 0; a < PLAN_ARENA_N; a++)
        useful[a] = p->peak_bytes[a] > least[a] ? p->peak_bytes[a] : least[a];
    plan_free(p);
    stream_needs(in, least, useful);
    return STK_OK;
}
