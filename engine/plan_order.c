/* engine/plan_order.c - the order of visits of a period, and the runs (uses) in which a block is
 * needed.
 *
 * Owns: nothing. Must not know: memory, tiers. Pure functions; any thread. The order decides in
 * which order micro-batches are added to an accumulator, so it belongs to the numerics: per block
 * it is the same for layer-major and micro-major. */
#include "base/sys.h"
#include "engine/plan_impl.h"

bool plan_has_input(const struct plan_input *in, uint32_t place)
{
    return place > 0 && place < in->n_places && !in->places[place].no_input &&
           in->places[place].in_bytes > 0;
}

static stk_status bad(struct stk_error *err, const char *what, uint32_t at)
{
    return stk_error_set(err, STK_ERR_CONFIG, 0, "plan input: %s (number %u)", what, at);
}

static stk_status check_chunks(const struct plan_input *in, struct stk_error *err)
{
    uint32_t chunk = 0;
    for (uint32_t i = 0; i < in->n_blocks; i++) {
        const struct plan_block_in *x = &in->blocks[i];
        if (x->first_chunk != chunk || x->n_chunks > in->n_chunks - chunk ||
            x->n_chunks_trainable > x->n_chunks)
            return bad(err, "a block's chunks are not dense", i);
        chunk += x->n_chunks;
    }
    if (chunk != in->n_chunks) return bad(err, "chunks outside of all blocks", chunk);
    for (uint32_t i = 0; i < in->n_chunks; i++) {
        const struct plan_chunk_in *c = &in->chunks[i];
        if (c->block >= in->n_blocks) return bad(err, "a chunk of an unknown block", i);
        const struct plan_block_in *x = &in->blocks[c->block];
        if (i < x->first_chunk || i - x->first_chunk >= x->n_chunks || c->bytes[CHUNK_PARAM] == 0)
            return bad(err, "a chunk outside of its block or empty", i);
        if (c->offset_bytes + c->bytes[CHUNK_PARAM] > x->param_bytes)
            return bad(err, "a chunk behind its block's end", i);
        bool trainable = i - x->first_chunk < x->n_chunks_trainable;
        if (trainable == c->frozen || (trainable && x->acc_bytes == 0))
            return bad(err, "frozen and trainable chunks or the accumulator disagree", i);
    }
    return STK_OK;
}

/* Of a block all that there is lies on the device, or nothing; what is not there has any home. */
static stk_status check_on_device(const struct plan_input *in, uint32_t chunk, struct stk_error *err)
{
    const struct plan_chunk_in *c = &in->chunks[chunk];
    bool all = plan_on_device(in, c->block);
    if (all && (in->in_place || in->own))
        return bad(err, "a home on a device that has none, or with the client's own order", chunk);
    for (int s = 0; s < CHUNK_STATE_N; s++)
        if (c->bytes[s] > 0 && (c->home[s] == CHUNK_DEVICE) != all)
            return bad(err, "a block that lies on the device in part", chunk);
    return STK_OK;
}

stk_status plan_order_check(const struct plan_input *in, struct stk_error *err)
{
    if (in->n_micro == 0) return bad(err, "no micro-batches", 0);
    if (in->update > PLAN_SPECULATE) return bad(err, "an unknown update mode", in->update);
    STK_TRY(check_chunks(in, err));
    for (uint32_t i = 0; i < in->n_chunks; i++) {
        const struct plan_chunk_in *c = &in->chunks[i];
        bool apart = c->home[CHUNK_PARAM] == CHUNK_NVME && c->home[CHUNK_OPT] == CHUNK_HOST;
        STK_TRY(check_on_device(in, i, err));
        if (c->spec && (c->frozen || in->own || apart || c->home[CHUNK_OPT] == CHUNK_DEVICE))
            return bad(err, "a chunk that cannot be updated ahead of the norm", i);
    }
    for (uint32_t i = 0; i < in->n_places; i++) {
        if (in->places[i].block >= in->n_blocks)
            return bad(err, "a position of an unknown block", i);
        if (in->places[i].act >= PLAN_ACT_N) return bad(err, "an unknown activation policy", i);
        if (in->places[i].fused && i + 1 < in->n_places)
            return bad(err, "only the last position can be fused", i);
    }
    for (uint32_t i = 0; in->own && i < in->n_own; i++)
        if (in->own[i].place >= in->n_places || in->own[i].micro >= in->n_micro ||
            in->own[i].dir > PLAN_BACKWARD)
            return bad(err, "a recorded visit of an unknown position or micro-batch", i);
    return STK_OK;
}

struct list {
    const struct plan_input *in;
    struct plan_visit *v;
    uint32_t n;
};

static void add(struct list *l, uint32_t place, uint32_t micro, enum plan_dir dir)
{
    const struct plan_place_in *x = &l->in->places[place];
    bool backward = dir == PLAN_BACKWARD, fused = x->fused && backward;
    struct plan_visit v = {
        .place = place, .block = x->block, .micro = micro, .dir = (uint8_t)dir, .act = x->act
    };
    v.recompute = backward && !fused && x->act == PLAN_ACT_RECOMPUTE && x->full_bytes > 0;
    v.node = v.param_slot = v.acc_slot = v.in_slot = v.out_slot = v.full_slot = v.flow_slot =
        PLAN_NO;
    v.flops = x->flops * (backward ? 2 + fused + v.recompute : 1);
    l->v[l->n++] = v;
}

static void add_places(struct list *l, uint32_t place, enum plan_dir dir)
{
    for (uint32_t m = 0; m < l->in->n_micro; m++) add(l, place, m, dir);
}

static bool stands_later(const struct plan_input *in, uint32_t place)
{
    for (uint32_t i = place + 1; i < in->n_places; i++)
        if (in->places[i].block == in->places[place].block) return true;
    return false;
}

/* Backward visits of a tied block's earlier position run at the end of the step, after all of its
 * later position's, so that its accumulator sees micro-batches in layer-major's order; what stands
 * before that position in the forward order needs its result and waits with it. */
static void add_micro_major(struct list *l)
{
    const struct plan_input *in = l->in;
    uint32_t postponed = 0; /* positions [0, postponed) */
    for (uint32_t i = 0; in->n_micro > 1 && i < in->n_places; i++)
        if (stands_later(in, i)) postponed = i + 1;
    for (uint32_t m = 0; m < in->n_micro; m++) {
        for (uint32_t i = 0; i < in->n_places; i++)
            if (!in->places[i].fused) add(l, i, m, PLAN_FORWARD);
        for (uint32_t i = in->n_places; i-- > postponed;) add(l, i, m, PLAN_BACKWARD);
    }
    for (uint32_t i = postponed; i-- > 0;) add_places(l, i, PLAN_BACKWARD);
}

static void mark_first_last(struct plan_visit *v, uint32_t n, bool *seen, uint32_t n_blocks)
{
    for (uint32_t i = 0; i < n; i++) {
        bool *s = &seen[v[i].dir * n_blocks + v[i].block];
        v[i].first_of_block = !*s;
        *s = true;
    }
    for (uint32_t i = n; i-- > 0;) {
        bool *s = &seen[v[i].dir * n_blocks + v[i].block];
        v[i].last_of_block = *s;
        *s = false;
    }
}

stk_status plan_order_visits(const struct plan_input *in, struct plan_visit **out, uint32_t *n,
                             struct stk_error *err)
{
    uint64_t most = in->own ? in->n_own : (uint64_t)in->n_places * in->n_micro * 2;
    if (most >= UINT32_MAX / 2) return bad(err, "too many visits", in->n_micro);
    struct list l = { in, sys_calloc(most + 1, sizeof *l.v), 0 };
    bool *seen = sys_calloc((size_t)in->n_blocks * 2 + 1, sizeof *seen);
    *out = l.v;
    *n = 0;
    if (!l.v || !seen) {
        sys_free(seen);
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for %u visits", (uint32_t)most);
    }
    if (in->own) {
        for (uint32_t i = 0; i < in->n_own; i++)
            add(&l, in->own[i].place, in->own[i].micro, (enum plan_dir)in->own[i].dir);
    } else if (in->mode == PLAN_EVAL) {
        for (uint32_t i = 0; i < in->n_places; i++) add_places(&l, i, PLAN_FORWARD);
    } else if (in->accumulate == PLAN_MICRO_MAJOR) {
        add_micro_major(&l);
    } else {
        for (uint32_t i = 0; i < in->n_places; i++)
            if (!in->places[i].fused) add_places(&l, i, PLAN_FORWARD);
        for (uint32_t i = in->n_places; i-- > 0;) add_places(&l, i, PLAN_BACKWARD);
    }
    mark_first_last(l.v, l.n, seen, in->n_blocks);
    sys_free(seen);
    *n = l.n;
    return STK_OK;
}

/* Runs of visits of one block, and for each the next run of the same block. */
void plan_order_uses(struct plan_builder *b)
{
    for (uint32_t i = 0; i < b->p->n_visits; i++) {
        uint32_t block = b->p->visits[i].block;
        if (b->n_uses == 0 || b->uses[b->n_uses - 1].block != block)
            b->uses[b->n_uses++] = (struct plan_use){ block, i, 0, PLAN_NO };
        b->uses[b->n_uses - 1].n++;
        b->use_of[i] = b->n_uses - 1;
    }
    for (uint32_t u = b->n_uses; u-- > 0;) {
        b->uses[u].next = b->block_next_use[b->uses[u].block];
        b->block_next_use[b->uses[u].block] = u;
    }
}
