/* tests/engine/test_plan_faults.c - the checker finds faults: every kind of damage below, planted
 * in random plans, is found in every plan where it changes anything. A removed edge changes nothing
 * if another path implies it; the test finds that out by its own full search. */
#include "tests/engine/plan_victim.h"

#define SEEDS 400

/* Every edge of the plan, one at a time: pairs of kinds seen are counted. */
TEST(plan_check_finds_every_missing_edge)
{
    static uint32_t needed[PLAN_KIND_N][PLAN_KIND_N];
    uint32_t missed = 0, kinds = 0, removed = 0;
    for (uint64_t seed = 0; seed < 120; seed++) {
        struct victim v;
        REQUIRE(victim_make(&v, seed));
        struct plan *good = v.p;
        for (uint32_t i = 0; i < good->n_nodes; i++)
            for (uint32_t e = 0; e < good->nodes[i].n_deps; e++) {
                if (good->n_deps > 300 && pick(&v.r, good->n_deps / 300 + 1)) continue;
                uint32_t d = good->deps[good->nodes[i].first_dep + e];
                v.p = copy_plan(good);
                remove_edge(v.p, i, e);
                if (!reaches(v.p, d, i)) {
                    needed[good->nodes[d].kind][good->nodes[i].kind]++;
                    removed++;
                    if (!found(&v) && missed++ < 5)
                        printf("# model %" PRIu64 ": edge %u %s -> %u %s is missed\n", seed, d,
                               plan_kind_name((enum plan_kind)good->nodes[d].kind), i,
                               plan_kind_name((enum plan_kind)good->nodes[i].kind));
                }
                drop_copy(v.p);
            }
        plan_free(good);
        model_free(&v.m);
    }
    for (int a = 0; a < PLAN_KIND_N; a++)
        for (int b = 0; b < PLAN_KIND_N; b++) kinds += needed[a][b] > 0;
    printf("# %u edges removed, of %u pairs of kinds\n", removed, kinds);
    CHECK(missed == 0);
    CHECK(kinds >= 25);
}

/* --- other damage: returns false where the plan has nothing to damage so --- */

static uint32_t any_node(struct victim *v, enum plan_kind kind)
{
    uint32_t n = v->p->n_nodes, from = pick(&v->r, n);
    for (uint32_t i = 0; i < n; i++)
        if (v->p->nodes[(from + i) % n].kind == kind) return (from + i) % n;
    return PLAN_NO;
}

static struct plan_node *node_at(struct victim *v, enum plan_kind kind)
{
    uint32_t i = any_node(v, kind);
    return i == PLAN_NO ? NULL : &v->p->nodes[i];
}

static bool swap_offsets(struct victim *v)
{
    uint32_t n = v->p->n_slots;
    for (int tries = 0; tries < 50 && n > 1; tries++) {
        struct plan_slot *a = &v->p->slots[pick(&v->r, n)], *b = &v->p->slots[pick(&v->r, n)];
        uint64_t at = a->offset_bytes;
        bool overlap_in_time = a->first <= b->last && b->first <= a->last,
             larger = a->size_bytes > b->size_bytes;
        if (a->arena != b->arena || at == b->offset_bytes || !overlap_in_time || !larger) continue;
        a->offset_bytes = b->offset_bytes; /* two that live at once, one upon the other */
        if (a->offset_bytes + a->size_bytes > v->m.in.arena_bytes[a->arena]) return true;
        for (uint32_t i = 0; i < PLAN_ARENA_N; i++) v->p->peak_bytes[i] = 0;
        for (uint32_t i = 0; i < n; i++) {
            uint64_t end = v->p->slots[i].offset_bytes + v->p->slots[i].size_bytes;
            if (end > v->p->peak_bytes[v->p->slots[i].arena])
                v->p->peak_bytes[v->p->slots[i].arena] = end;
        }
        return true;
    }
    return false;
}

/* Turns a node into a norm-less nothing: a second copy of another kind of the same shape would be
 * found by its kind. */
static bool become(struct victim *v, enum plan_kind kind, uint32_t like)
{
    struct plan_node *x = node_at(v, kind);
    if (!x || like == PLAN_NO || x == &v->p->nodes[like]) return false;
    struct plan_node keep = *x;
    v->p->bytes[x->resource] -= x->bytes;
    *x = v->p->nodes[like];
    x->first_dep = keep.first_dep;
    x->n_deps = keep.n_deps;
    x->first_succ = keep.first_succ;
    x->n_succ = keep.n_succ;
    v->p->bytes[x->resource] += x->bytes;
    return true;
}
static bool duplicate_update(struct victim *v)
{
    return become(v, PLAN_UPDATE, any_node(v, PLAN_UPDATE));
}
static bool duplicate_write_back(struct victim *v)
{
    return become(v, PLAN_WRITE_BACK, any_node(v, PLAN_WRITE_BACK));
}
static bool duplicate_cast(struct victim *v)
{
    return become(v, PLAN_GRAD_CAST, any_node(v, PLAN_GRAD_CAST));
}
static bool second_norm(struct victim *v) { return become(v, PLAN_UPDATE, any_node(v, PLAN_NORM)); }

/* Removes a node with all its edges. */
static bool drop_node(struct victim *v, uint32_t i)
{
    if (i == PLAN_NO) return false;
    struct plan *p = v->p;
    p->bytes[p->nodes[i].resource] -= p->nodes[i].bytes;
    while (p->nodes[i].n_deps) remove_edge(p, i, 0);
    for (uint32_t j = i + 1; j < p->n_nodes; j++)
        for (uint32_t e = 0; e < p->nodes[j].n_deps;) {
            if (p->deps[p->nodes[j].first_dep + e] == i)
                remove_edge(p, j, e);
            else
                e++;
        }
    memmove(p->nodes + i, p->nodes + i + 1, (p->n_nodes - i - 1) * sizeof *p->nodes);
    p->n_nodes--;
    for (uint32_t e = 0; e < p->n_deps; e++) p->deps[e] -= p->deps[e] > i;
    for (uint32_t s = 0; s < p->n_slots; s++) {
        p->slots[s].first -= p->slots[s].first > i;
        p->slots[s].last -= p->slots[s].last > i;
    }
    for (uint32_t k = 0; k < p->n_visits; k++) p->visits[k].node -= p->visits[k].node > i;
    mirror(p);
    return true;
}
static bool drop(struct victim *v, enum plan_kind kind) { return drop_node(v, any_node(v, kind)); }
/* Nothing else in the period waits for it: only the next one would read old moments. */
static bool drop_opt_write_back(struct victim *v)
{
    for (uint32_t i = v->p->n_nodes; i-- > 0;)
        if (v->p->nodes[i].kind == PLAN_WRITE_BACK && v->p->nodes[i].state == CHUNK_OPT)
            return drop_node(v, i);
    return false;
}
static bool drop_write_back(struct victim *v) { return drop(v, PLAN_WRITE_BACK); }
static bool drop_fetch(struct victim *v) { return drop(v, PLAN_FETCH); }
static bool drop_copy_in(struct victim *v) { return drop(v, PLAN_COPY_IN); }
static bool drop_update(struct victim *v) { return drop(v, PLAN_UPDATE); }
static bool drop_cast(struct victim *v) { return drop(v, PLAN_GRAD_CAST); }
static bool drop_undo(struct victim *v) { return drop(v, PLAN_UNDO); }
static bool drop_commit(struct victim *v) { return drop(v, PLAN_COMMIT); }
static bool drop_save(struct victim *v) { return drop(v, PLAN_SAVE); }
static bool drop_load(struct victim *v) { return drop(v, PLAN_LOAD); }
static bool drop_act_out(struct victim *v) { return drop(v, PLAN_ACT_OUT); }
static bool drop_act_in(struct victim *v) { return drop(v, PLAN_ACT_IN); }
static bool drop_norm(struct victim *v) { return drop(v, PLAN_NORM); }

static bool shrink_arena(struct victim *v)
{
    for (uint32_t i = 0, from = pick(&v->r, PLAN_ARENA_N); i < PLAN_ARENA_N; i++) {
        uint32_t a = (from + i) % PLAN_ARENA_N;
        if (v->p->peak_bytes[a] == 0) continue;
        v->m.in.arena_bytes[a] = v->p->peak_bytes[a] - 1;
        return true;
    }
    return false;
}

static bool wrong_chunk(struct victim *v)
{
    struct plan_node *x = node_at(v, pick(&v->r, 2) ? PLAN_FETCH : PLAN_COPY_IN);
    if (!x || v->m.in.n_chunks < 2) return false;
    x->chunk = (x->chunk + 1) % v->m.in.n_chunks;
    x->block = v->m.chunks[x->chunk].block;
    return true;
}

static bool wrong_offset(struct victim *v)
{
    struct plan_node *x = node_at(v, pick(&v->r, 2) ? PLAN_FETCH : PLAN_COPY_IN);
    if (!x || x->slot == PLAN_NO) return false;
    x->slot_offset_bytes += 64;
    return true;
}

static bool wrong_source(struct victim *v)
{
    struct plan_node *x = node_at(v, PLAN_GRAD_CAST);
    if (!x) return false;
    x->src_offset_bytes += 64;
    return true;
}

/* The activation of another position or micro-batch, of as many bytes of the same block if there is
 * one. */
static bool wrong_activation(struct victim *v)
{
    struct plan_node *x = node_at(v, pick(&v->r, 2) ? PLAN_ACT_OUT : PLAN_ACT_IN);
    uint32_t n = plan_act_count(&v->m.in);
    if (!x) return false;
    uint32_t was = x->act;
    x->act = (was + 2) % n;
    for (uint32_t a = (was + 1) % n; a != was; a = (a + 1) % n)
        if (plan_act_bytes(&v->m.in, a) == x->bytes &&
            v->m.places[plan_act_place(&v->m.in, a)].block == x->block)
            x->act = a;
    return x->act != was;
}

/* Two reads from NVMe come to each other's places. */
static bool swapped_activations(struct victim *v)
{
    struct plan_node *x = node_at(v, PLAN_ACT_IN);
    for (uint32_t i = 0; x && i < v->p->n_nodes; i++) {
        struct plan_node *y = &v->p->nodes[i];
        if (y->kind != PLAN_ACT_IN || x == y || x->block != y->block || x->bytes != y->bytes) continue;
        uint32_t act = x->act;
        x->act = y->act;
        y->act = act;
        return true;
    }
    return false;
}

static bool activation_too_short(struct victim *v)
{
    struct plan_node *x = node_at(v, pick(&v->r, 2) ? PLAN_ACT_OUT : PLAN_ACT_IN);
    if (!x || x->bytes < 2) return false;
    x->bytes--;
    v->p->bytes[x->resource]--;
    return true;
}

static bool activation_stays(struct victim *v) /* the input says that it does not go to NVMe */
{
    struct plan_node *x = node_at(v, PLAN_ACT_OUT);
    if (!x) return false;
    v->m.places[plan_act_place(&v->m.in, x->act)].act = PLAN_ACT_KEEP;
    for (uint32_t i = 0; i < v->p->n_visits; i++)
        v->p->visits[i].act = v->m.places[v->p->visits[i].place].act;
    return true;
}

static struct plan_visit *any_visit(struct victim *v)
{
    return v->p->n_visits ? &v->p->visits[pick(&v->r, v->p->n_visits)] : NULL;
}

static bool no_accumulator(struct victim *v)
{
    struct plan_visit *x = any_visit(v);
    if (!x || x->acc_slot == PLAN_NO) return false;
    x->acc_slot = PLAN_NO;
    return true;
}

static bool no_boundary(struct victim *v)
{
    struct plan_visit *x = any_visit(v);
    if (!x || x->in_slot == PLAN_NO || v->m.in.own) return false;
    x->in_slot = PLAN_NO;
    return true;
}

static bool other_boundary(struct victim *v)
{
    struct plan_visit *x = any_visit(v), *y = any_visit(v);
    if (!x || x->in_slot == PLAN_NO || y->in_slot == PLAN_NO || x->in_slot == y->in_slot ||
        v->m.in.own)
        return false;
    x->in_slot = y->in_slot;
    return true;
}

static bool other_params(struct victim *v)
{
    struct plan_visit *x = any_visit(v), *y = any_visit(v);
    if (!x || x->param_slot == PLAN_NO || y->param_slot == x->param_slot) return false;
    x->param_slot = y->param_slot;
    return true;
}

static bool wrong_micro(struct victim *v)
{
    struct plan_visit *x = any_visit(v);
    if (!x || v->m.in.n_micro < 2) return false;
    x->micro = (x->micro + 1) % v->m.in.n_micro;
    return true;
}

static bool wrong_first(struct victim *v)
{
    struct plan_visit *x = any_visit(v);
    if (!x || x->dir != PLAN_BACKWARD) return false;
    x->first_of_block = !x->first_of_block;
    return true;
}

static bool wrong_last(struct victim *v)
{
    struct plan_visit *x = any_visit(v);
    if (!x || x->dir != PLAN_BACKWARD || v->m.in.blocks[x->block].n_chunks_trainable == 0)
        return false;
    x->last_of_block = !x->last_of_block;
    return true;
}

static bool wrong_bytes(struct victim *v)
{
    v->p->bytes[pick(&v->r, PLAN_RESOURCE_N)]++;
    return true;
}

static bool wrong_part(struct victim *v)
{
    struct plan_node *x = &v->p->nodes[pick(&v->r, v->p->n_nodes)];
    x->part ^= PLAN_RUN_UPDATE | PLAN_RUN_VISITS;
    return true;
}

static bool not_prefetched(struct victim *v)
{
    struct plan_node *x = node_at(v, PLAN_UPDATE);
    if (!x || (!x->prefetched && (v->m.chunks[x->chunk].home[CHUNK_PARAM] == CHUNK_HOST &&
                                  v->m.chunks[x->chunk].home[CHUNK_OPT] == CHUNK_HOST)))
        return false;
    x->prefetched = !x->prefetched;
    return true;
}

/* Of a gradient that is left in the slot of the next update: another place in it, or another slot. */
static struct plan_node *staying(struct victim *v)
{
    struct plan_node *x = node_at(v, v->m.in.in_place ? PLAN_GRAD_CAST : PLAN_GRAD_OUT);
    return x && x->slot != PLAN_NO && v->p->slots[x->slot].arena == PLAN_ARENA_UPDATE ? x : NULL;
}

static bool stays_elsewhere(struct victim *v)
{
    struct plan_node *x = staying(v);
    if (!x || x->slot_offset_bytes < 4096) return false;
    x->slot_offset_bytes -= 4096;
    return true;
}

static bool stays_unfetched(struct victim *v)
{
    struct plan_node *x = staying(v);
    for (uint32_t i = 0; x && i < v->p->n_nodes; i++) {
        const struct plan_node *u = &v->p->nodes[i];
        if (u->kind == PLAN_UPDATE && u->chunk == x->chunk && !u->spec) {
            v->p->nodes[i].prefetched = false;
            return true;
        }
    }
    return false;
}

static bool moved_home(struct victim *v)
{
    if (v->m.in.n_chunks == 0 || v->m.in.mode != PLAN_TRAIN) return false;
    struct plan_chunk_in *c = &v->m.chunks[pick(&v->r, v->m.in.n_chunks)];
    int s = pick(&v->r, 3);
    if (c->frozen) return false;
    c->home[s] = c->home[s] == CHUNK_DEVICE ? (uint8_t)pick(&v->r, 2) : c->home[s] == CHUNK_HOST ? CHUNK_NVME
                                          : CHUNK_HOST; /* the input says otherwise than the plan */
    return true;
}

/* --- blocks on the device --- */

static bool drop_device_update(struct victim *v) { return drop(v, PLAN_DEVICE_UPDATE); }
static bool duplicate_device_update(struct victim *v)
{
    bool done = false;
    for (int tries = 0; !done && tries < 16; tries++)
        done = become(v, PLAN_DEVICE_UPDATE, any_node(v, PLAN_DEVICE_UPDATE));
    return done;
}

/* By those who cannot reach it: the host's team, or the device for what lies in host memory. */
static bool updated_by_the_others(struct victim *v)
{
    bool there = pick(&v->r, 2);
    struct plan_node *x = node_at(v, there ? PLAN_DEVICE_UPDATE : PLAN_UPDATE);
    if (!x || x->spec) return false;
    v->p->bytes[x->resource] -= x->bytes;
    x->kind = there ? PLAN_UPDATE : PLAN_DEVICE_UPDATE;
    x->resource = there ? PLAN_UPDATE_TEAM : PLAN_UPDATE_STREAM;
    v->p->bytes[x->resource] += x->bytes;
    return true;
}

static bool device_update_on_the_compute_stream(struct victim *v)
{
    struct plan_node *x = node_at(v, PLAN_DEVICE_UPDATE);
    if (!x) return false;
    v->p->bytes[x->resource] -= x->bytes;
    x->resource = PLAN_COMPUTE;
    v->p->bytes[x->resource] += x->bytes;
    return true;
}

/* Nothing but an order between them is between an update and the block's first visit. */
static bool visited_before_the_device_update(struct victim *v)
{
    for (uint32_t i = 0; i < v->p->n_nodes; i++)
        for (uint32_t e = 0; v->p->nodes[i].kind == PLAN_VISIT && e < v->p->nodes[i].n_deps; e++) {
            uint32_t d = v->p->deps[v->p->nodes[i].first_dep + e];
            if (v->p->nodes[d].kind != PLAN_DEVICE_UPDATE) continue;
            remove_edge(v->p, i, e);
            return !reaches(v->p, d, i);
        }
    return false;
}

static bool cast_before_the_device_update(struct victim *v)
{
    for (uint32_t i = 0; i < v->p->n_nodes; i++)
        for (uint32_t e = 0; v->p->nodes[i].kind == PLAN_GRAD_CAST && e < v->p->nodes[i].n_deps;) {
            uint32_t d = v->p->deps[v->p->nodes[i].first_dep + e];
            if (v->m.chunks[v->p->nodes[i].chunk].home[CHUNK_GRAD] != CHUNK_DEVICE) break;
            if (v->p->nodes[d].kind == PLAN_GRAD_CAST) { e++; continue; }
            remove_edge(v->p, i, e); /* of its last visit, which the update precedes, too */
            if (e == v->p->nodes[i].n_deps) return true;
        }
    return false;
}

/* The gradient of a block that stays goes to another place, or another block's. */
static bool device_gradient_goes_away(struct victim *v)
{
    for (uint32_t i = 0; i < v->p->n_nodes; i++) {
        struct plan_node *x = &v->p->nodes[i];
        if (x->kind != PLAN_GRAD_CAST || v->m.chunks[x->chunk].home[CHUNK_GRAD] != CHUNK_DEVICE) continue;
        for (uint32_t s = 0; s < v->p->n_slots; s++)
            if (v->p->slots[s].arena == PLAN_ARENA_CAST) {
                x->slot = s;
                return true;
            }
    }
    return false;
}

static bool on_the_device_in_part(struct victim *v)
{
    struct plan_node *x = node_at(v, PLAN_DEVICE_UPDATE);
    if (!x) return false;
    v->m.chunks[x->chunk].home[pick(&v->r, CHUNK_STATE_N)] = CHUNK_HOST;
    return true;
}

/* --- hand-over --- */

static bool drop_hand_over(struct victim *v) { return drop(v, PLAN_HAND_OVER); }

/* What comes in its place where no update runs. */
static uint32_t in_its_place(struct victim *v)
{
    uint32_t n = v->p->n_nodes, from = pick(&v->r, n);
    for (uint32_t i = 0; i < n; i++) {
        const struct plan_node *x = &v->p->nodes[(from + i) % n];
        if (x->optional && !x->for_next) return (from + i) % n;
    }
    return PLAN_NO;
}
static bool hand_over_alone(struct victim *v) { return drop_node(v, in_its_place(v)); }

static bool hand_over_and_fetch(struct victim *v)
{
    uint32_t i = in_its_place(v);
    if (i != PLAN_NO) v->p->nodes[i].optional = false;
    return i != PLAN_NO;
}

static bool fetch_passes_for_nothing(struct victim *v)
{
    for (uint32_t i = v->p->n_nodes; i-- > 0;) {
        struct plan_node *x = &v->p->nodes[i];
        if (x->kind != PLAN_FETCH || x->part != PLAN_RUN_VISITS || x->for_next || x->spec || x->optional)
            continue;
        x->optional = true;
        return true;
    }
    return false;
}

static bool hands_over_other_bytes(struct victim *v)
{
    struct plan_node *x = node_at(v, PLAN_HAND_OVER);
    if (!x || v->p->slots[x->src_slot].size_bytes < x->bytes + 4096) return false;
    x->src_offset_bytes += 4096;
    return true;
}

/* One field of a hand-over is another's. */
static bool as_another(struct victim *v, size_t at, size_t size_bytes)
{
    struct plan_node *x = node_at(v, PLAN_HAND_OVER), *y = node_at(v, PLAN_HAND_OVER);
    if (!x || !memcmp((char *)x + at, (char *)y + at, size_bytes)) return false;
    memcpy((char *)x + at, (char *)y + at, size_bytes);
    return true;
}
#define AS_ANOTHER(v, field) \
    as_another(v, offsetof(struct plan_node, field), sizeof((struct plan_node *)0)->field)
static bool hands_over_another_update(struct victim *v) { return AS_ANOTHER(v, src_slot); }
static bool hands_over_to_another_slot(struct victim *v) { return AS_ANOTHER(v, slot); }
static bool hands_over_to_another_place(struct victim *v) { return AS_ANOTHER(v, slot_offset_bytes); }

static bool hands_over_twice(struct victim *v)
{
    return become(v, PLAN_HAND_OVER, any_node(v, PLAN_HAND_OVER));
}

static bool hands_over_in_the_update(struct victim *v)
{
    struct plan_node *x = node_at(v, PLAN_HAND_OVER);
    if (x) x->part = PLAN_RUN_UPDATE;
    return x != NULL;
}

static bool handed_over_before_the_update(struct victim *v)
{
    struct plan_node *x = node_at(v, PLAN_HAND_OVER);
    for (uint32_t e = 0; x && e < x->n_deps; e++)
        if (v->p->nodes[v->p->deps[x->first_dep + e]].kind == PLAN_UPDATE) {
            uint32_t i = (uint32_t)(x - v->p->nodes), d = v->p->deps[x->first_dep + e];
            remove_edge(v->p, i, e);
            return !reaches(v->p, d, i);
        }
    return false;
}

/* A later update's state comes to the slot while the parameter is still read there. */
static bool overwritten_while_handed_over(struct victim *v)
{
    struct plan *p = v->p;
    for (uint32_t i = p->n_nodes; i-- > 0;)
        for (uint32_t e = 0; p->nodes[i].kind == PLAN_FETCH && e < p->nodes[i].n_deps; e++) {
            uint32_t d = p->deps[p->nodes[i].first_dep + e];
            if (p->nodes[d].kind != PLAN_HAND_OVER || p->nodes[i].optional) continue;
            remove_edge(p, i, e);
            return !reaches(p, d, i);
        }
    return false;
}

/* --- speculation --- */

static struct plan_node *spec_at(struct victim *v, enum plan_kind kind)
{
    uint32_t n = v->p->n_nodes, from = pick(&v->r, n);
    for (uint32_t i = 0; i < n; i++) {
        struct plan_node *x = &v->p->nodes[(from + i) % n];
        if (x->kind == kind && x->spec) return x;
    }
    return NULL;
}

static bool spec_becomes_the_update(struct victim *v)
{
    struct plan_node *x = spec_at(v, PLAN_UPDATE);
    if (x) x->spec = false;
    return x != NULL;
}

static bool spec_reads_elsewhere(struct victim *v)
{
    struct plan_node *x = spec_at(v, PLAN_UPDATE), *y = node_at(v, PLAN_GRAD_CAST);
    if (!x || !y || (x->src_slot == PLAN_NO && y->slot == PLAN_NO)) return false;
    x->src_slot = x->src_slot == PLAN_NO ? y->slot : PLAN_NO;
    return true;
}

static bool spec_not_allowed(struct victim *v)
{
    struct plan_node *x = spec_at(v, PLAN_UPDATE);
    if (x) v->m.chunks[x->chunk].spec = false;
    return x != NULL;
}

static bool spec_state_elsewhere(struct victim *v)
{
    struct plan_node *x = spec_at(v, pick(&v->r, 2) ? PLAN_FETCH : PLAN_WRITE_BACK);
    if (!x) return false;
    *(x->kind == PLAN_FETCH ? &x->slot_offset_bytes : &x->src_offset_bytes) += 64;
    return true;
}

/* What is fetched for the next period follows, of those that had its bytes, only what is speculative. */
static bool follows_only_what_passes(struct victim *v)
{
    struct plan *p = v->p;
    for (uint32_t i = p->n_nodes; i-- > 0;)
        for (uint32_t e = 0; p->nodes[i].for_next && e < p->nodes[i].n_deps; e++) {
            uint32_t d = p->deps[p->nodes[i].first_dep + e];
            if (p->nodes[d].spec || p->nodes[d].chunk == p->nodes[i].chunk) continue;
            struct plan *less = copy_plan(p);
            remove_edge(less, i, e);
            bool only = leads(less, d, i, false) && !leads(less, d, i, true);
            drop_copy(less);
            if (only) remove_edge(p, i, e);
            if (only) return true;
        }
    return false;
}

static bool not_optional(struct victim *v)
{
    uint32_t n = v->p->n_nodes, from = pick(&v->r, n);
    for (uint32_t i = 0; i < n; i++) {
        struct plan_node *x = &v->p->nodes[(from + i) % n];
        if (!x->for_next) continue;
        x->optional = !x->optional;
        return true;
    }
    return false;
}

/* The version that is taken back is read for the update that replaces it. */
static bool undo_after_fetch(struct victim *v)
{
    struct plan *p = v->p;
    for (uint32_t i = 0; i < p->n_nodes; i++)
        for (uint32_t e = 0; p->nodes[i].kind == PLAN_FETCH && e < p->nodes[i].n_deps; e++)
            if (p->nodes[p->deps[p->nodes[i].first_dep + e]].kind == PLAN_UNDO) {
                uint32_t undo = p->deps[p->nodes[i].first_dep + e];
                remove_edge(p, i, e);
                return !reaches(p, undo, i);
            }
    return false;
}

static const struct {
    const char *name;
    bool (*plant)(struct victim *);
} faults[] = {
    { "swap_offsets", swap_offsets },
    { "duplicate_update", duplicate_update },
    { "duplicate_write_back", duplicate_write_back },
    { "duplicate_cast", duplicate_cast },
    { "second_norm", second_norm },
    { "drop_write_back", drop_write_back },
    { "drop_opt_write_back", drop_opt_write_back },
    { "drop_fetch", drop_fetch },
    { "drop_copy_in", drop_copy_in },
    { "drop_update", drop_update },
    { "drop_cast", drop_cast },
    { "drop_undo", drop_undo },
    { "drop_commit", drop_commit },
    { "spec_becomes_the_update", spec_becomes_the_update },
    { "spec_reads_elsewhere", spec_reads_elsewhere },
    { "spec_not_allowed", spec_not_allowed },
    { "spec_state_elsewhere", spec_state_elsewhere },
    { "follows_only_what_passes", follows_only_what_passes },
    { "not_optional", not_optional },
    { "undo_after_fetch", undo_after_fetch },
    { "drop_device_update", drop_device_update },
    { "duplicate_device_update", duplicate_device_update },
    { "updated_by_the_others", updated_by_the_others },
    { "device_update_on_the_compute_stream", device_update_on_the_compute_stream },
    { "visited_before_the_device_update", visited_before_the_device_update },
    { "cast_before_the_device_update", cast_before_the_device_update },
    { "device_gradient_goes_away", device_gradient_goes_away },
    { "on_the_device_in_part", on_the_device_in_part },
    { "drop_hand_over", drop_hand_over },
    { "hand_over_alone", hand_over_alone },
    { "hand_over_and_fetch", hand_over_and_fetch },
    { "fetch_passes_for_nothing", fetch_passes_for_nothing },
    { "hands_over_other_bytes", hands_over_other_bytes },
    { "hands_over_another_update", hands_over_another_update },
    { "hands_over_to_another_slot", hands_over_to_another_slot },
    { "hands_over_to_another_place", hands_over_to_another_place },
    { "hands_over_twice", hands_over_twice },
    { "hands_over_in_the_update", hands_over_in_the_update },
    { "handed_over_before_the_update", handed_over_before_the_update },
    { "overwritten_while_handed_over", overwritten_while_handed_over },
    { "drop_save", drop_save },
    { "drop_load", drop_load },
    { "drop_act_out", drop_act_out },
    { "drop_act_in", drop_act_in },
    { "wrong_activation", wrong_activation },
    { "swapped_activations", swapped_activations },
    { "activation_too_short", activation_too_short },
    { "activation_stays", activation_stays },
    { "drop_norm", drop_norm },
    { "shrink_arena", shrink_arena },
    { "wrong_chunk", wrong_chunk },
    { "wrong_offset", wrong_offset },
    { "wrong_source", wrong_source },
    { "no_accumulator", no_accumulator },
    { "no_boundary", no_boundary },
    { "other_boundary", other_boundary },
    { "other_params", other_params },
    { "wrong_micro", wrong_micro },
    { "wrong_first", wrong_first },
    { "wrong_last", wrong_last },
    { "wrong_bytes", wrong_bytes },
    { "wrong_part", wrong_part },
    { "not_prefetched", not_prefetched },
    { "stays_elsewhere", stays_elsewhere },
    { "stays_unfetched", stays_unfetched },
    { "moved_home", moved_home },
};

TEST(plan_check_finds_planted_faults)
{
    for (size_t f = 0; f < sizeof faults / sizeof faults[0]; f++) {
        uint32_t planted = 0, missed = 0;
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            struct victim v;
            REQUIRE(victim_make(&v, seed));
            struct plan *good = v.p;
            v.p = copy_plan(good);
            if (faults[f].plant(&v)) {
                planted++;
                if (!found(&v) && missed++ < 3)
                    printf("# model %" PRIu64 ": %s is missed\n", seed, faults[f].name);
            }
            drop_copy(v.p);
            plan_free(good);
            model_free(&v.m);
        }
        if (missed || planted < 20)
            printf("# %s: planted %u, missed %u\n", faults[f].name, planted, missed);
        CHECK(missed == 0 && planted >= 20);
    }
}

TEST_MAIN()
