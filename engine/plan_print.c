/* engine/plan_print.c - a plan as text, one line a node, and as a trace for chrome://tracing or
 * ui.perfetto.dev.
 *
 * Owns: nothing. Must not know: how plans are built. Any thread. The text is stable: tests and
 * people compare it. The trace format is that of the "Trace Event Format" document of the Chromium
 * project: complete events ("ph":"X") in microseconds. */
#include "engine/plan.h"

#include <inttypes.h>

static const char *const state_names[] = { "param", "opt", "grad" };
static bool has_state(const struct plan_node *x)
{
    return x->kind == PLAN_FETCH || x->kind == PLAN_COPY_IN || x->kind == PLAN_WRITE_BACK ||
           x->kind == PLAN_HAND_OVER;
}

static void print_slot(const struct plan *p, const char *label, uint32_t slot, uint64_t offset,
                       FILE *to)
{
    if (slot == PLAN_NO) return;
    const struct plan_slot *s = &p->slots[slot];
    fprintf(to, " %s=%s#%u@%" PRIu64, label, plan_arena_name((enum plan_arena)s->arena), slot,
            s->offset_bytes);
    if (offset) fprintf(to, "+%" PRIu64, offset);
}

static void print_visit(const struct plan *p, const struct plan_visit *v, FILE *to)
{
    static const char *const acts[] = { "keep", "recompute", "host", "nvme" };
    fprintf(to, " place=%u micro=%u %s %s%s%s%s", v->place, v->micro,
            v->dir == PLAN_FORWARD ? "forward" : "backward", acts[v->act],
            v->first_of_block ? " first" : "", v->last_of_block ? " last" : "",
            v->recompute ? " again" : "");
    print_slot(p, "param", v->param_slot, 0, to);
    print_slot(p, "acc", v->acc_slot, 0, to);
    print_slot(p, "in", v->in_slot, 0, to);
    print_slot(p, "out", v->out_slot, 0, to);
    print_slot(p, "full", v->full_slot, 0, to);
    print_slot(p, "flow", v->flow_slot, 0, to);
}

void plan_print(const struct plan *p, FILE *to)
{
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        const struct plan_node *x = &p->nodes[i];
        fprintf(to, "%u %c %s", i, x->part == PLAN_RUN_UPDATE ? 'U' : 'V',
                plan_kind_name((enum plan_kind)x->kind));
        if (has_state(x)) fprintf(to, " %s", state_names[x->state]);
        if (x->block != PLAN_NO) fprintf(to, " block=%u", x->block);
        if (x->chunk != PLAN_NO) fprintf(to, " chunk=%u", x->chunk);
        if (x->act != PLAN_NO) fprintf(to, " act=%u", x->act);
        if (x->kind == PLAN_VISIT)
            print_visit(p, &p->visits[x->visit], to);
        else if (x->visit != PLAN_NO)
            fprintf(to, " for=%u", x->visit);
        print_slot(p, "from", x->src_slot, x->src_offset_bytes, to);
        print_slot(p, "to", x->slot, x->slot_offset_bytes, to);
        if (x->bytes) fprintf(to, " bytes=%" PRIu64, x->bytes);
        fprintf(to, "%s%s%s%s%s", x->prefetched ? " prefetched" : "", x->for_next ? " next" : "",
                x->demand ? " demand" : "", x->spec ? " spec" : "", x->optional ? " optional" : "");
        for (uint32_t k = 0; k < x->n_deps; k++)
            fprintf(to, "%s%u", k ? "," : " after=", p->deps[x->first_dep + k]);
        fputc('\n', to);
    }
}

void plan_node_name(const struct plan *p, uint32_t node, char *buf, size_t size)
{
    const struct plan_node *x = &p->nodes[node];
    const char *kind = plan_kind_name((enum plan_kind)x->kind);
    if (x->kind == PLAN_VISIT) {
        const struct plan_visit *v = &p->visits[x->visit];
        snprintf(buf, size, "%s %s %u.%u", kind, v->dir == PLAN_FORWARD ? "forward" : "backward",
                 v->place, v->micro);
    } else {
        int n = snprintf(buf, size, "%s%s%s", kind, has_state(x) ? " " : "",
                         has_state(x) ? state_names[x->state] : "");
        if (x->chunk != PLAN_NO && n > 0 && (size_t)n < size)
            snprintf(buf + n, size - (size_t)n, " %u", x->chunk);
        if (x->act != PLAN_NO && n > 0 && (size_t)n < size)
            snprintf(buf + n, size - (size_t)n, " %s %u.%u", x->act & 1 ? "full" : "boundary",
                     x->act / 2 / p->n_micro, x->act / 2 % p->n_micro);
    }
}

void plan_trace(const struct plan *p, FILE *to)
{
    fputs("{\"traceEvents\":[\n", to);
    for (int r = 0; r < PLAN_RESOURCE_N; r++)
        fprintf(to,
                "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":%d,\"args\":{\"name\":\"%"
                "s\"}}%s\n",
                r, plan_resource_name((enum plan_resource)r), r + 1 == PLAN_RESOURCE_N && p->n_nodes == 0 ? "" : ",");
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        const struct plan_node *x = &p->nodes[i];
        char name[96];
        plan_node_name(p, i, name, sizeof name);
        fprintf(to,
                "{\"name\":\"%s\",\"ph\":\"X\",\"pid\":1,\"tid\":%u,\"ts\":%u,\"dur\":1,\"args\":{\"node\":%u,"
                "\"bytes\":%" PRIu64 "}}%s\n",
                name, x->resource, i, i, x->bytes, i + 1 == p->n_nodes ? "" : ",");
    }
    fputs("]}\n", to);
}
