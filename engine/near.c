/* engine/near.c - the update's teams and what they work on, near each other.
 *
 * Owns: which team a chunk has, and the policy of the memory that is reserved. Must not know: how cores
 * and chunks are divided (cores.c), what a node runs. On a machine with one node: one team and nothing
 * else. Application's thread, inside stk_seal. */
#include "engine/engine.h"
#include "base/sys.h"

#include <string.h>

static bool several_nodes(const stk_engine *e)
{
    return e->topology && e->topology->here && e->cores.n_nodes > 1;
}

static stk_status deal(stk_engine *e)
{
    const struct stk_layout *l = e->layout;
    uint32_t n = e->n_use_chunks;
    if (e->cores.n_teams == 1) return STK_OK;
    e->team_of = sys_calloc((size_t)l->n_chunks + 1, 1);
    uint8_t *team = sys_calloc((size_t)n + 1, 1);
    uint64_t *bytes = sys_calloc((size_t)n + 1, sizeof *bytes);
    bool ok = e->team_of && team && bytes;
    for (uint32_t i = 0; ok && i < n; i++)
        bytes[i] = chunk_bytes(l, &l->chunks[e->use_chunks[i]], CHUNK_OPT);
    if (ok) cores_deal(&e->cores, bytes, n, team);
    for (uint32_t i = 0; ok && i < n; i++) e->team_of[e->use_chunks[i]] = team[i];
    sys_free(team);
    sys_free(bytes);
    return ok ? STK_OK : stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the teams of chunks");
}

static void bind_member(void *arg)
{
    const struct near_team *t = arg;
    (void)topology_bind_thread(t->topology, t->node);
}

stk_status near_teams(stk_engine *e)
{
    STK_TRY(deal(e));
    for (uint32_t k = 0; k < e->cores.n_teams; k++) {
        STK_TRY(exec_team_open(e->ex, "update", e->cores.members[k], &e->team[k], &e->err));
        if (e->cores.n_teams == 1 || !several_nodes(e)) continue;
        e->near[k] = (struct near_team){ e->topology, k };
        exec_team_begin(e->team[k], bind_member, &e->near[k]);
    }
    return STK_OK;
}

static void interleave(void *engine, void *at, uint64_t size_bytes)
{
    stk_engine *e = engine;
    e->near_refused |= !topology_interleave_memory(e->topology, at, size_bytes);
}

static void bind_parts(void *arg, void *at, uint64_t size_bytes)
{
    const struct near_parts *p = arg;
    uint8_t *from = at;
    for (uint32_t k = 0; k < p->e->cores.n_teams; from += p->bytes[k++])
        p->e->near_refused |= !topology_bind_memory(p->e->topology, from, p->bytes[k], k);
}

stk_status near_reserve(stk_engine *e, const char *owner, uint64_t size_bytes, const struct near_parts *parts,
                        void **out)
{
    bool near = several_nodes(e);
    mem_place_fn place = !near ? NULL : parts && e->cores.n_teams > 1 ? bind_parts : interleave;
    void *arg = place == bind_parts ? (void *)(uintptr_t)parts : e;
    return mem_reserve_placed(e->held, owner, "", size_bytes, place, arg, out, &e->err);
}

void near_note(stk_engine *e)
{
    if (e->near_refused)
        eng_note(e, "NUMA: the system refuses to place memory (a container without SYS_NICE?): pages lie "
                    "where they were touched first");
}
