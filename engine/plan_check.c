/* engine/plan_check.c - proves a plan before it runs (engine/plan.h says what is proved).
 *
 * Owns: the tables of one check. Must not know: how the plan was built: it takes the input, the
 * nodes and their edges, and nothing of the builder. Any thread. */
#include "base/sys.h"
#include "engine/plan_check_impl.h"

#include <string.h>

static bool allocate(struct checker *k)
{
    size_t nodes = (size_t)k->p->n_nodes + 1, chunks = (size_t)k->in->n_chunks + 1;
    size_t visits = (size_t)k->in->n_places * k->in->n_micro * 2 + 1;
    size_t acts = (size_t)plan_act_count(k->in) + 1;
    struct {
        void *where;
        size_t n;
        bool none;
    } tables[] = {
        { &k->chain_before, nodes, false },
        { &k->next_chain, nodes, false },
        { &k->stamp, nodes, false },
        { &k->stack, nodes, false },
        { &k->list, 2 * nodes, false },
        { &k->update, chunks, true },
        { &k->cast, chunks, true },
        { &k->out, chunks, true },
        { &k->seen_in, chunks, false },
        { &k->fetch, chunks * CHUNK_STATE_N, true },
        { &k->fetch_next, chunks * CHUNK_STATE_N, true },
        { &k->write_back, chunks * CHUNK_STATE_N, true },
        { &k->visit_at, visits, true },
        { &k->act_out, acts, true },
        { &k->act_in, acts, true },
        { &k->spec, chunks, true },
        { &k->undo, chunks, true },
        { &k->commit, chunks, true },
        { &k->hand, chunks, true },
        { &k->spec_fetch, chunks * CHUNK_STATE_N, true },
        { &k->spec_write, chunks * CHUNK_STATE_N, true },
    };
    bool ok = true;
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
        uint32_t *t = sys_calloc(tables[i].n, sizeof *t);
        if (t && tables[i].none) memset(t, 0xff, tables[i].n * sizeof *t);
        *(uint32_t **)tables[i].where = t;
        ok &= t != NULL;
    }
    k->slots = sys_calloc((size_t)k->p->n_slots + 1, sizeof *k->slots);
    return ok && k->slots;
}

static void release(struct checker *k)
{
    uint32_t *const all[] = { k->chain_before, k->next_chain, k->stamp,    k->stack,   k->list,
                              k->update,       k->cast,       k->out,      k->seen_in, k->fetch,
                              k->fetch_next,   k->write_back, k->visit_at, k->users,   k->spec,
                              k->undo,         k->commit,     k->spec_fetch, k->spec_write, k->act_out,
                              k->act_in,       k->hand };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) sys_free(all[i]);
    sys_free(k->slots);
}

static stk_status check_once(const struct plan_input *in, const struct plan *p, bool untried,
                             struct stk_error *err)
{
    struct checker k = { .in = in, .p = p, .err = err, .untried = untried, .join = PLAN_NO, .norm = PLAN_NO };
    stk_status status = allocate(&k)
                            ? STK_OK
                            : stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for checking a plan");
    if (status == STK_OK) status = check_graph(&k);
    if (status == STK_OK) status = check_chunks(&k);
    if (status == STK_OK) status = check_visits(&k);
    if (status == STK_OK) status = check_modes(&k);
    if (status == STK_OK) status = check_params(&k);
    if (status == STK_OK) status = check_overlaps(&k);
    release(&k);
    return status;
}

stk_status plan_check(const struct plan_input *in, const struct plan *p, struct stk_error *err)
{
    bool spec = false;
    stk_status st = check_once(in, p, false, err);
    for (uint32_t i = 0; st == STK_OK && !spec && i < p->n_nodes; i++) spec = p->nodes[i].spec;
    return spec ? check_once(in, p, true, err) : st;
}
