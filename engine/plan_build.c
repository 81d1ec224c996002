/* engine/plan_build.c - builds a plan: first the update of the step before, then the visits in
 * their order, each with what must be there.
 *
 * Owns: the plan until it is handed out. Must not know: time, pointers, devices, rings. Any thread;
 * a pure function of its input. A build that runs out of room for activations is repeated with slots of a
 * size kept together, then with fewer loads ahead, at last with lowest offsets and nothing ahead: exactly the build that
 * plan_needs measures, so the least capacities always suffice. */
#include "base/sys.h"
#include "engine/plan_impl.h"

#include <string.h>

static void visit_slot(struct plan_builder *b, uint32_t slot)
{
    if (slot == PLAN_NO || b->status != STK_OK) return;
    uint32_t users = b->slot_state[slot].users;
    plan_node_deps(b, users != PLAN_NO ? users : b->slot_state[slot].before);
}

/* The node of a visit. It waits for the visit before (one stream), its slots' writers, and where it reads
 * parameters at their home for the update of its block. */
static void emit_visit(struct plan_builder *b, uint32_t visit)
{
    struct plan_visit *v = &b->p->visits[visit];
    const struct plan_block_in *x = &b->in->blocks[v->block];
    const uint32_t slots[] = { v->param_slot, v->acc_slot,  v->in_slot,
                               v->out_slot,   v->full_slot, v->flow_slot };
    struct plan_node *node = plan_node_begin(b, PLAN_VISIT, PLAN_RUN_VISITS);
    node->block = v->block;
    node->visit = visit;
    plan_node_dep(b, b->last_visit_node);
    if (visit == 0) plan_node_dep(b, b->join);
    if (!b->block_staged[v->block] && !b->block_waited[v->block] && b->join == PLAN_NO)
        for (uint32_t k = 0; k < x->n_chunks_trainable; k++)
            plan_node_dep(b, b->update_node[x->first_chunk + k]);
    b->block_waited[v->block] = true;
    for (uint32_t k = 0; k < 6; k++) visit_slot(b, slots[k]);
    v->node = b->last_visit_node = plan_node_end(b);
    for (uint32_t k = 0; k < 6; k++) plan_slot_use(b, slots[k], v->node, true);
    b->p->flops += v->flops;
    b->visits_emitted++;
}

static void run_visit(struct plan_builder *b, uint32_t visit)
{
    struct plan_visit *v = &b->p->visits[visit];
    uint32_t use = b->use_of[visit];
    const struct plan_use *u = &b->uses[use];
    if (u->first == visit) {
        b->use = use;
        b->block_next_use[v->block] = u->next;
        plan_ensure_params(b, use, true);
    }
    v->param_slot = b->block_slot[v->block];
    plan_acts_before(b, visit);
    for (uint32_t k = use + 1; k < b->n_uses && k - use <= b->in->prefetch; k++)
        if (!plan_ensure_params(b, k, false)) break;
    plan_acts_ahead(b, visit);
    if (b->status != STK_OK) return;
    emit_visit(b, visit);
    plan_acts_after(b, visit);
    if (u->first + u->n == visit + 1 && u->next == PLAN_NO && b->block_slot[v->block] != PLAN_NO) {
        plan_slot_retire(b, b->block_slot[v->block]);
        b->block_slot[v->block] = PLAN_NO;
    }
}

static void own_accumulators(struct plan_builder *b)
{
    for (uint32_t i = 0; i < b->in->n_blocks && b->status == STK_OK; i++)
        if (b->in->blocks[i].acc_bytes)
            b->acc_slot[i] =
                plan_slot_must(b, PLAN_ARENA_ACC, b->in->blocks[i].acc_bytes, i, PLAN_NO);
}

static void run(struct plan_builder *b)
{
    bool train = b->in->mode == PLAN_TRAIN;
    if (train) plan_emit_update_phase(b);
    if (train && b->in->own) own_accumulators(b);
    for (uint32_t i = 0; i < b->p->n_visits && b->status == STK_OK; i++) run_visit(b, i);
    if (!train || b->status != STK_OK) return;
    for (uint32_t i = 0; b->in->own && i < b->in->n_blocks && b->status == STK_OK; i++)
        if (b->in->blocks[i].acc_bytes) plan_emit_casts(b, i, b->last_visit_node);
    if (b->status == STK_OK) plan_emit_for_next(b);
    if (b->status == STK_OK) plan_emit_norm(b);
}

/* --- set-up and finish --- */

static void *table(struct plan_builder *b, size_t n, size_t elem_bytes, int fill)
{
    void *p = sys_calloc(n + 1, elem_bytes);
    if (p && fill) memset(p, fill, (n + 1) * elem_bytes);
    if (!p && b->status == STK_OK)
        b->status = stk_error_set(b->err, STK_ERR_NOMEM, 0, "no memory for building a plan");
    return p;
}

static void set_up_tables(struct plan_builder *b)
{
    const struct plan_input *in = b->in;
    size_t cells = ((size_t)in->n_places + 1) * in->n_micro, nb = in->n_blocks, nc = in->n_chunks,
           nv = b->p->n_visits;
    b->uses = table(b, nv, sizeof *b->uses, 0);
    b->use_of = table(b, nv, 4, 0);
    uint32_t **per_block[] = { &b->block_slot, &b->block_next_use, &b->acc_slot, &b->acc_saved };
    uint32_t **per_chunk[] = { &b->update_node, &b->write_param, &b->write_opt,
                               &b->fetch_grad,  &b->order,       &b->casts,
                               &b->commit,      &b->spec_node,   &b->spec_write_param,
                               &b->spec_write_opt, &b->undo_node, &b->param_readers,
                               &b->next_slot,   &b->hand_node };
    uint32_t **per_cell[] = { &b->bound,      &b->full,      &b->bound_saved,
                              &b->full_saved, &b->bound_out, &b->full_out };
    for (int i = 0; i < 4; i++) *per_block[i] = table(b, nb, 4, 0xff);
    for (size_t i = 0; i < sizeof per_chunk / sizeof *per_chunk; i++)
        *per_chunk[i] = table(b, nc, 4, 0xff);
    b->spec_way = table(b, nc, 1, 0);
    b->grad_stays = table(b, nc, 1, 0);
    b->hand_way = table(b, nc, 1, 0);
    for (int i = 0; i < 6; i++) *per_cell[i] = table(b, cells, 4, 0xff);
    b->flow = table(b, in->n_micro, 4, 0xff);
    b->flow_left = table(b, in->n_micro, 4, 0);
    b->block_staged = table(b, nb, 1, 0);
    b->block_waited = table(b, nb, 1, 0);
    b->forward_done = table(b, cells, 1, 0);
    plan_grow(b, (void **)&b->p->nodes, &b->p->n_nodes, &b->cap_nodes, sizeof *b->p->nodes);
    uint32_t n = 0, cap = 0;
    plan_grow(b, (void **)&b->mark, &n, &cap, sizeof *b->mark);
}

static void set_up(struct plan_builder *b)
{
    const struct plan_input *in = b->in;
    set_up_tables(b);
    if (b->status != STK_OK) return;
    b->join = b->last_visit_node = PLAN_NO;
    for (int a = 0; a < PLAN_ARENA_N; a++) b->arena[a].capacity = in->arena_bytes[a];
    plan_order_uses(b);
    uint64_t acc = 0;
    for (uint32_t i = 0; i < in->n_blocks; i++) {
        const struct plan_block_in *x = &in->blocks[i];
        acc += plan_page_up(x->acc_bytes);
        b->block_staged[i] = !in->in_place && x->param_bytes > 0 && !plan_on_device(in, i);
        for (uint32_t k = 0; k < x->n_chunks; k++)
            if (in->chunks[x->first_chunk + k].home[CHUNK_PARAM] == CHUNK_NVME)
                b->block_staged[i] = true;
    }
    b->swap_acc = in->mode == PLAN_TRAIN && !in->own && !in->in_place &&
                  in->accumulate == PLAN_MICRO_MAJOR && in->n_micro > 1 &&
                  (b->tuning.tight || acc > in->arena_bytes[PLAN_ARENA_ACC]);
    for (uint32_t i = 0; i < in->n_places; i++) {
        const struct plan_place_in *x = &in->places[i];
        uint64_t flow = x->flow_bytes ? x->flow_bytes : x->in_bytes;
        if (plan_has_input(in, i) && flow > b->flow_bytes) b->flow_bytes = flow;
    }
    for (uint32_t i = 0; i < b->p->n_visits; i++)
        if (b->p->visits[i].dir == PLAN_BACKWARD) b->flow_left[b->p->visits[i].micro]++;
}

static stk_status finish(struct plan_builder *b)
{
    struct plan *p = b->p;
    p->succs = sys_calloc((size_t)p->n_deps + 1, sizeof *p->succs);
    if (!p->succs) return stk_error_set(b->err, STK_ERR_NOMEM, 0, "no memory for a plan's edges");
    for (uint32_t i = 0; i < p->n_deps; i++) p->nodes[p->deps[i]].n_succ++;
    for (uint32_t i = 0, at = 0; i < p->n_nodes; i++) {
        p->nodes[i].first_succ = at;
        at += p->nodes[i].n_succ;
        p->nodes[i].n_succ = 0;
    }
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        struct plan_node *x = &p->nodes[i];
        p->bytes[x->resource] += x->bytes;
        for (uint32_t k = 0; k < x->n_deps; k++) {
            struct plan_node *d = &p->nodes[p->deps[x->first_dep + k]];
            p->succs[d->first_succ + d->n_succ++] = i;
        }
    }
    for (uint32_t i = 0; i < p->n_slots; i++) {
        const struct plan_slot *s = &p->slots[i];
        uint64_t end = s->offset_bytes + s->size_bytes;
        if (end > p->peak_bytes[s->arena]) p->peak_bytes[s->arena] = end;
    }
    return STK_OK;
}

static void tear_down(struct plan_builder *b)
{
    void *const all[] = { b->mark,        b->slot_state,   b->links,          b->uses,
                          b->use_of,      b->block_slot,   b->block_next_use, b->acc_slot,
                          b->acc_saved,   b->block_staged, b->block_waited,   b->update_node,
                          b->write_param, b->write_opt,    b->fetch_grad,     b->order,
                          b->casts,       b->bound,        b->full,           b->bound_saved,
                          b->full_saved,  b->flow,         b->flow_left,      b->forward_done,
                          b->commit,      b->spec_way,     b->spec_node,      b->spec_write_param,
                          b->spec_write_opt, b->undo_node, b->param_readers,   b->grad_stays,
                          b->next_slot,   b->bound_out,    b->full_out,       b->hand_way,
                          b->hand_node };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) sys_free(all[i]);
    for (int a = 0; a < PLAN_ARENA_N; a++) sys_free(b->arena[a].segs);
    sys_free(b->untried.segs);
}

void plan_free(struct plan *p)
{
    if (!p) return;
    sys_free(p->nodes);
    sys_free(p->slots);
    sys_free(p->visits);
    sys_free(p->deps);
    sys_free(p->succs);
    sys_free(p);
}

stk_status plan_build_once(const struct plan_input *in, struct plan_tuning t, struct plan **out,
                           enum plan_arena *short_arena, struct stk_error *err)
{
    struct plan_builder b = { .in = in, .tuning = t, .err = err, .short_arena = PLAN_ARENA_N };
    *out = NULL;
    b.p = sys_calloc(1, sizeof *b.p);
    if (!b.p) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a plan");
    b.p->n_micro = in->n_micro;
    b.status = plan_order_visits(in, &b.p->visits, &b.p->n_visits, err);
    if (b.status == STK_OK) set_up(&b);
    if (b.status == STK_OK) run(&b);
    if (b.status == STK_OK) b.status = finish(&b);
    tear_down(&b);
    *short_arena = b.short_arena;
    if (b.status == STK_OK)
        *out = b.p;
    else
        plan_free(b.p);
    return b.status;
}

stk_status plan_build(const struct plan_input *in, struct plan **out, enum plan_arena *short_arena,
                      struct stk_error *err)
{
    enum plan_arena where = PLAN_ARENA_N;
    struct plan_tuning t = { false, in->prefetch, false };
    *out = NULL;
    STK_TRY(plan_order_check(in, err));
    for (;;) {
        struct stk_error local = { 0 };
        stk_status status = plan_build_once(in, t, out, &where, &local);
        if (short_arena) *short_arena = where;
        bool again =
            status == STK_ERR_NOMEM && !t.tight &&
            (where == PLAN_ARENA_ACT || where == PLAN_ARENA_ACC || where == PLAN_ARENA_SAVE);
        if (!again) return status == STK_OK ? STK_OK : stk_error_forward(err, &local);
        bool cells = where == PLAN_ARENA_ACT && !t.cells;
        t.cells = cells;
        if (cells) continue;
        t.tight = where != PLAN_ARENA_ACT || t.load_ahead == 0;
        t.load_ahead = t.tight ? 0 : t.load_ahead / 2;
    }
}
