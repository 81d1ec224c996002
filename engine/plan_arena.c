/* engine/plan_arena.c - where slots lie: a timeline allocator in program order.
 *
 * Owns: segments and slots of a builder. Must not know: why a slot is wanted. Thread: the one that
 * builds. Two kinds of arenas: rings, whose slots are all used up when the next is taken (streams
 * of chunks), and general ones. General: best window of free bytes, where "best" is: drops no
 * cached block, or those needed latest; then, where activations else do not fit (plan_tuning.cells),
 * one that cuts no piece off what a larger slot had, so that boundaries and full sets keep to bytes of
 * their own; then bytes whose last use is longest ago, so that a new slot rarely waits; then lowest. */
#include "base/sys.h"
#include "engine/plan_impl.h"

#include <inttypes.h>
#include <string.h>

/* How many visits must lie between a copy out of a slot and its reuse, before an arena without
 * limit grows instead. */
#define SLOW_VISITS 2u

bool plan_grow(struct plan_builder *b, void **base, uint32_t *n, uint32_t *cap, size_t elem_bytes)
{
    if (*n < *cap) return true;
    uint64_t want = *cap ? (uint64_t)*cap * 2 : 64;
    void *p = want < UINT32_MAX ? sys_realloc(*base, want * elem_bytes) : NULL;
    if (p) {
        memset((char *)p + *cap * elem_bytes, 0, (want - *cap) * elem_bytes);
        *base = p;
        *cap = (uint32_t)want;
        return true;
    }
    if (b->status == STK_OK)
        b->status = stk_error_set(b->err, STK_ERR_NOMEM, 0, "no memory for a plan of %u nodes",
                                  b->p->n_nodes);
    *n = 0;
    return *cap > 0;
}

void plan_list_add(struct plan_builder *b, uint32_t *head, uint32_t node)
{
    if (!plan_grow(b, (void **)&b->links, &b->n_links, &b->cap_links, sizeof *b->links)) return;
    if (b->status != STK_OK) return; /* the pool started over: lists would become circles */
    b->links[b->n_links] = (struct plan_link){ node, *head };
    *head = b->n_links++;
}

bool plan_arena_is_ring(enum plan_arena a)
{
    return a == PLAN_ARENA_CAST || a == PLAN_ARENA_BOUNCE || a == PLAN_ARENA_UPDATE ||
           a == PLAN_ARENA_GRAD;
}

void plan_slot_retire(struct plan_builder *b, uint32_t slot)
{
    if (slot == PLAN_NO || b->status != STK_OK) return;
    struct plan_slot_state *s = &b->slot_state[slot];
    STK_ASSERT(s->live);
    s->live = false;
    s->retired_visit = b->visits_emitted;
    s->slow = s->users != PLAN_NO && b->p->nodes[b->links[s->users].node].kind != PLAN_VISIT;
}

static void evict(struct plan_builder *b, uint32_t slot)
{
    uint32_t block = b->slot_state[slot].block;
    STK_ASSERT(block != PLAN_NO && b->block_slot[block] == slot);
    b->block_slot[block] = PLAN_NO;
    plan_slot_retire(b, slot);
}

/* First segment that ends behind `at`. */
static uint32_t find_segment(const struct plan_timeline *t, uint64_t at)
{
    uint32_t low = 0, high = t->n;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (t->segs[mid].end <= at)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* Replaces segments [at, at + n_old) by n_new <= 3 others. */
static void splice(struct plan_builder *b, struct plan_timeline *t, uint32_t at, uint32_t n_old,
                   const struct plan_seg *new_segs, uint32_t n_new)
{
    for (uint32_t k = 0; k < 3; k++) { /* room for two more than there are */
        uint32_t n = t->n + k;
        if (!plan_grow(b, (void **)&t->segs, &n, &t->cap, sizeof *t->segs) || b->status != STK_OK)
            return;
    }
    if (n_new != n_old)
        memmove(t->segs + at + n_new, t->segs + at + n_old, (t->n - at - n_old) * sizeof *t->segs);
    memcpy(t->segs + at, new_segs, n_new * sizeof *t->segs);
    t->n = t->n + n_new - n_old;
}

/* Gives [begin, begin + size) to `slot`, whose first writers will depend on the last users of what
 * was there. */
static void take(struct plan_builder *b, struct plan_timeline *t, uint64_t begin, uint64_t size,
                 uint32_t slot)
{
    uint64_t end = begin + size;
    struct plan_seg pieces[3];
    uint32_t n_pieces = 0, first, n_old = 0;
    STK_ASSERT(begin <= t->high); /* a ring's cursor never leaves a hole */
    first = find_segment(t, begin);
    if (first < t->n && t->segs[first].begin < begin)
        pieces[n_pieces++] = (struct plan_seg){ t->segs[first].begin, begin, t->segs[first].slot };
    pieces[n_pieces++] = (struct plan_seg){ begin, end, slot };
    for (uint32_t i = first; i < t->n && t->segs[i].begin < end; i++, n_old++) {
        uint32_t old = t->segs[i].slot;
        if (t->segs[i].end > end)
            pieces[n_pieces++] = (struct plan_seg){ end, t->segs[i].end, old };
        if (old == PLAN_NO) continue;
        if (b->slot_state[old].live) evict(b, old);
        for (uint32_t u = b->slot_state[old].users; u != PLAN_NO; u = b->links[u].next)
            plan_list_add(b, &b->slot_state[slot].before, b->links[u].node);
    }
    splice(b, t, first, n_old, pieces, n_pieces);
    if (end > t->high) t->high = end;
}

void plan_arena_keep(struct plan_builder *b, enum plan_arena a, struct plan_timeline *to)
{
    const struct plan_timeline *t = &b->arena[a];
    if (b->status != STK_OK) return;
    to->segs = sys_calloc((size_t)t->n + 1, sizeof *to->segs);
    if (!to->segs) {
        b->status = stk_error_set(b->err, STK_ERR_NOMEM, 0, "no memory for building a plan");
        return;
    }
    memcpy(to->segs, t->segs, t->n * sizeof *to->segs);
    to->n = t->n;
}

void plan_slot_follow(struct plan_builder *b, uint32_t slot, const struct plan_timeline *t)
{
    if (slot == PLAN_NO || b->status != STK_OK) return;
    uint64_t begin = b->p->slots[slot].offset_bytes, end = begin + b->p->slots[slot].size_bytes;
    for (uint32_t i = find_segment(t, begin); i < t->n && t->segs[i].begin < end; i++) {
        if (t->segs[i].slot == PLAN_NO) continue;
        for (uint32_t u = b->slot_state[t->segs[i].slot].users; u != PLAN_NO; u = b->links[u].next)
            plan_list_add(b, &b->slot_state[slot].before, b->links[u].node);
    }
}

bool plan_slot_intact(const struct plan_builder *b, uint32_t slot)
{
    const struct plan_slot *s = &b->p->slots[slot];
    const struct plan_timeline *t = &b->arena[s->arena];
    uint32_t i = find_segment(t, s->offset_bytes);
    return i < t->n && t->segs[i].slot == slot && t->segs[i].begin == s->offset_bytes &&
           t->segs[i].end == s->offset_bytes + s->size_bytes;
}

struct window {
    uint64_t begin;
    uint32_t next_use, age;
    bool grows;
    bool splits;                /* ends inside what another slot had: what is left of that may be of no use */
};

/* Looks at [begin, begin + size) where segment i begins. False: something in it must stay. */
static bool look(const struct plan_builder *b, const struct plan_timeline *t, uint32_t i,
                 uint64_t size, uint32_t upto, struct window *w)
{
    w->begin = i < t->n ? t->segs[i].begin : t->high;
    uint64_t end = w->begin + size;
    w->next_use = PLAN_NO;
    w->age = 0;
    w->grows = end > t->high;
    w->splits = false;
    for (; i < t->n && t->segs[i].begin < end; i++) {
        uint32_t slot = t->segs[i].slot;
        if (slot == PLAN_NO) continue;
        const struct plan_slot_state *s = &b->slot_state[slot];
        if (s->live) {
            if (upto == PLAN_NO || s->block == PLAN_NO || s->block == b->uses[b->use].block)
                return false;
            uint32_t next = b->block_next_use[s->block];
            if (next <= upto || t->capacity == UINT64_MAX) return false;
            if (next < w->next_use) w->next_use = next;
            continue;
        }
        if (t->capacity == UINT64_MAX && !b->tuning.tight && s->slow &&
            b->visits_emitted < s->retired_visit + SLOW_VISITS)
            return false;
        if (t->segs[i].end > end) w->splits = true;
        if (b->p->slots[slot].last + 1 > w->age) w->age = b->p->slots[slot].last + 1;
    }
    return true;
}

static bool better(const struct plan_builder *b, const struct plan_timeline *t,
                   const struct window *x, const struct window *y)
{
    if (b->tuning.tight && x->next_use == y->next_use) return false; /* the lowest */
    if (t->capacity == UINT64_MAX && x->grows != y->grows) return y->grows;
    if (x->next_use != y->next_use) return x->next_use > y->next_use;
    if (b->tuning.cells && t == &b->arena[PLAN_ARENA_ACT] && x->splits != y->splits) return y->splits;
    return x->age < y->age;
}

static bool find_window(const struct plan_builder *b, const struct plan_timeline *t, uint64_t size,
                        uint32_t upto, uint64_t *begin)
{
    struct window best = { 0 }, w;
    bool found = false;
    for (uint32_t i = 0; i <= t->n; i++) {
        uint64_t at = i < t->n ? t->segs[i].begin : t->high;
        if (at > t->capacity || t->capacity - at < size) break;
        if (!look(b, t, i, size, upto, &w) || (found && !better(b, t, &w, &best))) continue;
        best = w;
        found = true;
    }
    if (found) *begin = best.begin;
    return found;
}

uint32_t plan_slot_new(struct plan_builder *b, enum plan_arena a, uint64_t bytes, uint32_t block,
                       uint32_t upto)
{
    struct plan_timeline *t = &b->arena[a];
    uint64_t size = plan_page_up(bytes), begin = 0;
    if (b->status != STK_OK) return PLAN_NO;
    if (plan_arena_is_ring(a)) {
        if (size > t->capacity || t->begin > t->capacity - size) return PLAN_NO;
        if (t->cursor > t->capacity - size) t->cursor = t->begin;
        begin = t->cursor;
        t->cursor += size;
    } else if (!find_window(b, t, size, upto, &begin)) {
        return PLAN_NO;
    }
    uint32_t cap = b->cap_slots;
    if (!plan_grow(b, (void **)&b->p->slots, &b->p->n_slots, &b->cap_slots, sizeof *b->p->slots) ||
        b->status != STK_OK)
        return PLAN_NO;
    if (!b->slot_state || cap != b->cap_slots) {
        uint32_t n = cap;
        if (!plan_grow(b, (void **)&b->slot_state, &n, &cap, sizeof *b->slot_state) ||
            b->status != STK_OK)
            return PLAN_NO;
    }
    uint32_t slot = b->p->n_slots++;
    b->p->slots[slot] = (struct plan_slot){ (uint8_t)a, begin, size, PLAN_NO, 0 };
    b->slot_state[slot] = (struct plan_slot_state){
        .users = PLAN_NO, .before = PLAN_NO, .block = block, .live = true
    };
    take(b, t, begin, size, slot);
    return slot;
}

uint32_t plan_slot_must(struct plan_builder *b, enum plan_arena a, uint64_t bytes, uint32_t block,
                        uint32_t upto)
{
    uint32_t slot = plan_slot_new(b, a, bytes, a == PLAN_ARENA_PARAM ? block : PLAN_NO, upto);
    if (slot != PLAN_NO || b->status != STK_OK) return slot;
    uint64_t live = 0, capacity = b->arena[a].capacity, need = plan_page_up(bytes);
    for (uint32_t i = 0; i < b->arena[a].n; i++) {
        const struct plan_seg *s = &b->arena[a].segs[i];
        if (s->slot != PLAN_NO && b->slot_state[s->slot].live && upto == PLAN_NO)
            live += s->end - s->begin;
    }
    uint64_t lacks = live + need > capacity ? live + need - capacity : need;
    b->short_arena = a;
    b->status = stk_error_set(b->err, STK_ERR_NOMEM, 0,
                              "arena %s: block %u needs %" PRIu64 " bytes, of %" PRIu64
                              " bytes %" PRIu64 " are in use: it lacks at least %" PRIu64 " bytes",
                              plan_arena_name(a), block, need, capacity, live, lacks);
    return PLAN_NO;
}
