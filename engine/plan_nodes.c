/* engine/plan_nodes.c - appending nodes, their edges and their use of slots; names of kinds and
 * arenas.
 *
 * Owns: the node and edge tables of a plan under construction. Must not know: in which order a step
 * runs. Thread: the one that builds. */
#include "engine/plan_impl.h"

#include <string.h>

const char *plan_kind_name(enum plan_kind k)
{
    static const char *const names[PLAN_KIND_N] = { "fetch",  "copy_in",    "gather",   "visit",
                                                    "reduce", "grad_cast",  "grad_out", "norm",
                                                    "update", "write_back", "save",     "load",
                                                    "join",   "commit",     "undo",     "act_out",
                                                    "act_in", "hand_over", "device_update" };
    return (unsigned)k < PLAN_KIND_N ? names[k] : "?";
}

const char *plan_resource_name(enum plan_resource r)
{
    static const char *const names[PLAN_RESOURCE_N] = { "compute",   "copy-in",    "copy-out",
                                                        "gather",    "nvme-read",  "nvme-write",
                                                        "update",    "cast",       "device-update", "none" };
    return (unsigned)r < PLAN_RESOURCE_N ? names[r] : "?";
}

const char *plan_arena_name(enum plan_arena a)
{
    static const char *const names[PLAN_ARENA_N] = { "param",  "acc",    "act",  "cast",
                                                     "bounce", "update", "grad", "save" };
    return (unsigned)a < PLAN_ARENA_N ? names[a] : "?";
}

bool plan_arena_on_device(enum plan_arena a)
{
    return a == PLAN_ARENA_PARAM || a == PLAN_ARENA_ACC || a == PLAN_ARENA_ACT ||
           a == PLAN_ARENA_CAST;
}

enum plan_resource plan_kind_resource(enum plan_kind k)
{
    switch (k) {
    case PLAN_FETCH:
    case PLAN_ACT_IN: return PLAN_NVME_READ;
    case PLAN_COPY_IN:
    case PLAN_LOAD: return PLAN_COPY_IN_LINK;
    case PLAN_GATHER:
    case PLAN_REDUCE: return PLAN_GATHER_LINK;
    case PLAN_VISIT: return PLAN_COMPUTE;
    case PLAN_GRAD_CAST: return PLAN_CAST;
    case PLAN_GRAD_OUT:
    case PLAN_SAVE: return PLAN_COPY_OUT_LINK;
    case PLAN_UPDATE:
    case PLAN_COMMIT:
    case PLAN_UNDO:
    case PLAN_HAND_OVER: return PLAN_UPDATE_TEAM;
    case PLAN_WRITE_BACK:
    case PLAN_ACT_OUT: return PLAN_NVME_WRITE;
    case PLAN_DEVICE_UPDATE: return PLAN_UPDATE_STREAM;
    default: return PLAN_NONE;
    }
}

uint64_t plan_update_offset(const struct plan_chunk_in *c, enum chunk_state s)
{
    static const enum chunk_state order[CHUNK_STATE_N] = { CHUNK_PARAM, CHUNK_OPT, CHUNK_GRAD };
    uint64_t at = 0;
    for (int i = 0; order[i] != s; i++)
        if (c->home[order[i]] == CHUNK_NVME) at += plan_page_up(c->bytes[order[i]]);
    return at;
}

uint64_t plan_update_bytes(const struct plan_chunk_in *c)
{
    return plan_update_offset(c, CHUNK_GRAD) +
           (c->home[CHUNK_GRAD] == CHUNK_NVME ? plan_page_up(c->bytes[CHUNK_GRAD]) : 0);
}

struct plan_node *plan_node_begin(struct plan_builder *b, enum plan_kind kind, uint8_t part)
{
    uint32_t cap = b->cap_nodes;
    bool ok =
        plan_grow(b, (void **)&b->p->nodes, &b->p->n_nodes, &b->cap_nodes, sizeof *b->p->nodes);
    STK_ASSERT(ok); /* the first piece was made before */
    if (cap != b->cap_nodes) {
        uint32_t n = cap;
        if (!plan_grow(b, (void **)&b->mark, &n, &cap, sizeof *b->mark) || cap != b->cap_nodes)
            b->p->n_nodes = 0;
    }
    struct plan_node *x = &b->p->nodes[b->p->n_nodes];
    *x = (struct plan_node){ .kind = (uint8_t)kind,
                              .resource = (uint8_t)plan_kind_resource(kind),
                              .part = part,
                              .rank = b->p->n_nodes };
    x->block = x->chunk = x->visit = x->slot = x->src_slot = x->act = PLAN_NO;
    x->first_dep = b->p->n_deps;
    return x;
}

struct plan_node *plan_node_begin_state(struct plan_builder *b, enum plan_kind kind, uint8_t part,
                                        uint32_t chunk, enum chunk_state s)
{
    const struct plan_chunk_in *c = &b->in->chunks[chunk];
    struct plan_node *x = plan_node_begin(b, kind, part);
    x->state = (uint8_t)s;
    x->block = c->block;
    x->chunk = chunk;
    x->bytes = c->bytes[s];
    return x;
}

void plan_node_dep(struct plan_builder *b, uint32_t node)
{
    uint32_t self = b->p->n_nodes;
    if (node == PLAN_NO || b->status != STK_OK || b->mark[node] == self + 1) return;
    STK_ASSERT(node < self);
    if (!plan_grow(b, (void **)&b->p->deps, &b->p->n_deps, &b->cap_deps, sizeof *b->p->deps) ||
        b->status != STK_OK)
        return;
    b->mark[node] = self + 1;
    b->p->deps[b->p->n_deps++] = node;
}

void plan_node_deps(struct plan_builder *b, uint32_t list)
{
    for (; list != PLAN_NO && b->status == STK_OK; list = b->links[list].next)
        plan_node_dep(b, b->links[list].node);
}

uint32_t plan_node_end(struct plan_builder *b)
{
    struct plan_node *x = &b->p->nodes[b->p->n_nodes];
    x->n_deps = b->p->n_deps - x->first_dep;
    return b->p->n_nodes++;
}

void plan_slot_use(struct plan_builder *b, uint32_t slot, uint32_t node, bool only)
{
    if (slot == PLAN_NO || b->status != STK_OK) return;
    struct plan_slot *s = &b->p->slots[slot];
    if (s->first == PLAN_NO) s->first = node;
    s->last = node;
    if (only) b->slot_state[slot].users = PLAN_NO;
    plan_list_add(b, &b->slot_state[slot].users, node);
}
