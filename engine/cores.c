/* engine/cores.c - the division of cores, as engine/cores.h tells it.
 *
 * Owns: the rules. Must not know: threads and memory themselves (seal.c binds them), plans.
 * Pure. */
#include "engine/cores.h"

#include <stdio.h>
#include <string.h>

/* From here on a core left to the lanes is less than an eighth of what Adam has, and memory is the
 * limit with that many threads. */
enum { SPARE_FROM = 8 };

static bool spares(const struct cores_ask *ask, uint32_t threads)
{
    return !ask->update && !ask->on_host && ask->nvme && threads >= SPARE_FROM;
}

/* `threads` over the nodes by their cores, at least one each: largest remainders first. */
static void members_of_nodes(const struct topology *t, struct cores *c)
{
    uint32_t given = 0;
    for (uint32_t k = 0; k < c->n_teams; k++) {
        uint64_t part = (uint64_t)c->update * t->node[k].n_cores / t->n_cores;
        c->members[k] = part ? (uint32_t)part : 1;
        given += c->members[k];
    }
    while (given != c->update) { /* to or from the node that is farthest from its part */
        uint32_t at = 0;
        double most = -1e9;
        for (uint32_t k = 0; k < c->n_teams; k++) {
            double part = (double)c->update * t->node[k].n_cores / t->n_cores;
            double off = given < c->update ? part - c->members[k] : c->members[k] - part;
            if (given > c->update && c->members[k] == 1) continue;
            if (off <= most) continue;
            most = off;
            at = k;
        }
        c->members[at] += given < c->update ? 1u : -1u;
        given += given < c->update ? 1u : -1u;
    }
}

void cores_divide(const struct topology *t, const struct cores_ask *ask, struct cores *out)
{
    uint32_t threads = topology_threads(t);
    *out = (struct cores){ .compute = ask->compute ? ask->compute : threads,
                           .update = ask->update ? ask->update : threads - spares(ask, threads),
                           .all = t->n_cores,
                           .cpus = t->n_cpus,
                           .quota = t->quota,
                           .n_nodes = t->n_nodes,
                           .n_teams = 1 };
    out->members[0] = out->update;
    if (t->n_nodes == 1 || t->n_nodes > CORES_TEAMS_MAX || out->update < t->n_nodes) return;
    out->n_teams = t->n_nodes;
    members_of_nodes(t, out);
}

static void add(char *buf, size_t size_bytes, const char *text)
{
    size_t n = strlen(buf);
    if (n < size_bytes) snprintf(buf + n, size_bytes - n, "%s", text);
}

void cores_text(const struct cores *c, const struct cores_ask *ask, const struct topology *t, char *buf,
                size_t size_bytes)
{
    char text[96];
    snprintf(buf, size_bytes, "%u for compute, %u for the update, of %u (%u processors)", c->compute,
             c->update, c->all, c->cpus);
    if (ask->compute && ask->update) add(buf, size_bytes, ": as asked");
    else if (ask->compute || ask->update)
        add(buf, size_bytes, ask->update ? ": the update as asked" : ": compute as asked");
    else if (c->quota < c->all) {
        snprintf(text, sizeof text, ": the cgroup's quota is %u", c->quota);
        add(buf, size_bytes, text);
    } else add(buf, size_bytes, ": one thread a core");
    if (spares(ask, topology_threads(t))) add(buf, size_bytes, ", one core left to checksums and I/O");
    else if (ask->on_host && !ask->compute && !ask->update)
        add(buf, size_bytes, ", shared by compute and update");
    if (c->n_nodes > 1 && c->n_teams == 1) {
        snprintf(text, sizeof text, "; %u NUMA nodes, memory interleaved", c->n_nodes);
        add(buf, size_bytes, text);
    }
    for (uint32_t k = 0; c->n_teams > 1 && k < c->n_teams; k++) {
        snprintf(text, sizeof text, "%s%u on node %u", k ? ", " : "; the update: ", c->members[k],
                 t->node[k].os);
        add(buf, size_bytes, text);
    }
    snprintf(text, sizeof text, " (%s)", t->source);
    add(buf, size_bytes, text);
}

void cores_deal(const struct cores *c, const uint64_t *size_bytes, uint32_t n, uint8_t *team_of)
{
    double given[CORES_TEAMS_MAX] = { 0 }; /* bytes a member */
    for (uint32_t i = 0; i < n; i++) {
        uint32_t to = 0;
        double least = 0;
        for (uint32_t k = 0; k < c->n_teams; k++) {
            double then = given[k] + (double)size_bytes[i] / c->members[k];
            if (k && then >= least) continue;
            least = then;
            to = k;
        }
        given[to] = least;
        team_of[i] = (uint8_t)to;
    }
}
