/* bench/overlap_sim.c - the table behind "a step is at most 1.05 of its busiest resource": every update
 * mode on a simulated machine, by tokens per step, where the optimizer state is, and whether the
 * clip binds (bench/overlap_model.h).
 *
 *     build/bench/overlap_sim share/machines/rtx4090.json [--tokens 8192] [--states ram|nvme]
 *         [--clip quiet|binds|sometimes] [--update MODE] [--activations keep|recompute|host]
 *         [--micro N] [--split BLOCKS] [--buffer GiB] [--pure yes] [--json F] [--trace F]
 *
 * Micro-batch and activations are those predicted fastest of some; of the first two of them the faster is
 * the row. --pure yes: no mixes, one policy for all layers.
 * --trace: of the case in the last row. A program of its own: prints, exits. Virtual time, so it does
 * not matter what else the machine does. */
#include "bench/overlap_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const clips[] = { "quiet", "binds", "sometimes" };
static const char *const acts[] = { "auto", "keep", "recompute", "host" };
static const struct { const char *name; stk_update update; } modes[] = {
    { "serial", STK_UPDATE_SERIAL }, { "chase", STK_UPDATE_CHASE }, { "split", STK_UPDATE_SPLIT },
    { "speculate", STK_UPDATE_SPECULATE }, { "auto", STK_UPDATE_AUTO },
};

struct asked {
    uint32_t tokens, micro, split, keep, again;
    const char *states, *clip, *update, *activations, *json, *trace;
    double buffer_gib;
    bool pure;
};

static bool wanted(const char *asked, const char *is) { return !asked || !strcmp(asked, is); }

static void print_row(const struct overlap_case *c, const char *mode, const struct overlap_result *r)
{
    char mix[64] = "";
    if (c->keep_last || c->recompute_last)
        snprintf(mix, sizeof mix, " (%u kept, %u recomputed)", c->keep_last, c->recompute_last);
    printf("| %u | %s | %s | %s | %.3f | %s %.3f | %.3f | %s %.3f | %.3f | %.2f, %.2f, %.2f, %.2f | %.0f %%, %.0f %% "
           "| %.3f | %s%s, %u |\n",
           c->tokens, c->nvme ? "NVMe" : "RAM", clips[c->clip], mode, r->step_s,
           overlap_resource_name(r->busiest), r->own_s[r->busiest], r->step_s / r->own_s[r->busiest],
           r->floor_text, r->floor_s, r->step_s / r->floor_s, r->wait_s.nvme, r->wait_s.copy,
           r->wait_s.update, r->wait_s.other, 100 * r->spec_share, 100 * r->undone_share,
           r->predicted_s, r->acts[0] ? r->acts : acts[c->activations], mix, c->micro_tokens);
    if (r->note[0]) printf("<!-- %s -->\n", r->note);
    fflush(stdout);
}

static bool write_json(const char *path, const struct overlap_case *c, const char *mode,
                       const struct overlap_result *r)
{
    FILE *f = path ? fopen(path, "a") : NULL;
    if (!f && path) fprintf(stderr, "overlap_sim: %s cannot be written\n", path);
    if (!f) return !path;
    fprintf(f, "{\"bench\": \"overlap\", \"machine\": \"%s\", \"tokens\": %u, \"states\": \"%s\", \"clip\": \"%s\", "
               "\"update\": \"%s\", \"step_s\": %.6f, \"busiest\": \"%s\", \"busiest_s\": %.6f, \"floor_s\": %.6f, "
               "\"floor\": \"%s\", \"predicted_s\": %.6f}\n",
            c->machine->name, c->tokens, c->nvme ? "nvme" : "ram", clips[c->clip], mode, r->step_s,
            overlap_resource_name(r->busiest), r->own_s[r->busiest], r->floor_s, r->floor_text,
            r->predicted_s);
    return fclose(f) == 0;
}

/* The row's case once more, now with a trace: the last row's stays. */
static bool write_trace(const char *path, struct overlap_case c)
{
    char why[512] = "";
    struct overlap_result r;
    c.trace = path;
    if (!path || overlap_run(&c, &r, why, sizeof why)) return true;
    fprintf(stderr, "overlap_sim: %s: %s\n", path, why);
    return false;
}

/* --- which activations and micro-batch: those predicted fastest ---------------------------------- */

struct choice { struct overlap_case best[2]; double seconds[2]; char why[512]; };

static void consider(struct choice *x, struct overlap_case c)
{
    struct overlap_result r;
    c.predict_only = true;
    if (!overlap_run(&c, &r, x->why, sizeof x->why)) return;
    int at = x->seconds[0] <= 0 || r.predicted_s < x->seconds[0] ? 0
             : x->seconds[1] <= 0 || r.predicted_s < x->seconds[1] ? 1 : 2;
    if (at == 2) return;
    if (at == 0) {
        x->best[1] = x->best[0];
        x->seconds[1] = x->seconds[0];
    }
    c.predict_only = false;
    x->best[at] = c;
    x->seconds[at] = r.predicted_s;
}

/* First one policy for all layers, by micro-batch; then mixes around the best of these. */
static void choose(const struct asked *a, struct overlap_case c, struct choice *x)
{
    static const uint32_t keep[] = { 0, 4, 8, 12, 16 }, again[] = { 0, 2, 4, 6, 8, 12 };
    bool open = c.update == STK_UPDATE_AUTO && !a->pure; /* the planner's choice, too */
    for (int act = open ? STK_ACT_AUTO : STK_ACT_KEEP; act <= (open ? STK_ACT_AUTO : STK_ACT_HOST); act++)
        for (uint32_t micro = 2048; micro <= 8192; micro *= 2) {
            if (micro > c.tokens || (a->micro && micro != a->micro) || !wanted(a->activations, acts[act])) continue;
            c.activations = (stk_act)act;
            c.micro_tokens = micro;
            c.keep_last = act == STK_ACT_KEEP ? 0 : a->keep;
            c.recompute_last = act == STK_ACT_HOST ? a->again : 0;
            consider(x, c);
        }
    if (!(x->seconds[0] > 0) || a->pure || open || a->keep || a->again) return;
    c.micro_tokens = x->best[0].micro_tokens;
    for (int act = STK_ACT_RECOMPUTE; act <= STK_ACT_HOST; act++)
        for (int k = 0; k < 5; k++)
            for (int g = 0; g < (act == STK_ACT_HOST ? 6 : 1); g++) {
                if (k + g == 0 || !wanted(a->activations, acts[act])) continue;
                c.activations = (stk_act)act;
                c.keep_last = keep[k];
                c.recompute_last = again[g];
                consider(x, c);
            }
}

static bool one(const stk_machine *m, const struct asked *a, uint32_t tokens, bool nvme, int clip, size_t mode)
{
    struct overlap_result r, best = { 0 };
    struct overlap_case chosen = { 0 };
    struct choice x = { 0 };
    choose(a, (struct overlap_case){ .machine = m, .tokens = tokens, .nvme = nvme, .clip = (enum overlap_clip)clip,
                                     .update = modes[mode].update, .seed = 1, .split_blocks = a->split,
                                     .buffer_bytes = (uint64_t)(a->buffer_gib * 1073741824.0) }, &x);
    for (int k = 0; k < 2 && x.seconds[k] > 0; k++) {
        if (!overlap_run(&x.best[k], &r, x.why, sizeof x.why)) continue;
        if (best.step_s > 0 && best.step_s <= r.step_s) continue;
        best = r;
        chosen = x.best[k];
    }
    if (!(best.step_s > 0)) {
        printf("| %u | %s | %s | %s | does not run: %s |\n", tokens, nvme ? "NVMe" : "RAM", clips[clip],
               modes[mode].name, x.why);
        return false;
    }
    print_row(&chosen, modes[mode].name, &best);
    bool traced = write_trace(a->trace, chosen);
    return write_json(a->json, &chosen, modes[mode].name, &best) && traced;
}

int main(int argc, char **argv)
{
    struct asked a = { .split = UINT32_MAX };
    stk_machine m;
    char why[512];
    for (int i = 2; i < argc; i += 2) {
        const char *k = argv[i], *v = i + 1 < argc ? argv[i + 1] : "";
        if (!v[0]) argc = 1;
        else if (!strcmp(k, "--tokens")) a.tokens = (uint32_t)atoi(v);
        else if (!strcmp(k, "--micro")) a.micro = (uint32_t)atoi(v);
        else if (!strcmp(k, "--pure")) a.pure = !strcmp(v, "yes");
        else if (!strcmp(k, "--keep")) a.keep = (uint32_t)atoi(v);
        else if (!strcmp(k, "--again")) a.again = (uint32_t)atoi(v);
        else if (!strcmp(k, "--split")) a.split = (uint32_t)atoi(v);
        else if (!strcmp(k, "--states")) a.states = v;
        else if (!strcmp(k, "--clip")) a.clip = v;
        else if (!strcmp(k, "--update")) a.update = v;
        else if (!strcmp(k, "--activations")) a.activations = v;
        else if (!strcmp(k, "--buffer")) a.buffer_gib = atof(v);
        else if (!strcmp(k, "--json")) a.json = v;
        else if (!strcmp(k, "--trace")) a.trace = v;
        else argc = 1;
    }
    if (argc < 2 || stk_machine_read(argv[1], &m, why, sizeof why) != STK_OK) {
        fprintf(stderr, "usage: overlap_sim MACHINE.json [--tokens N] [--states ram|nvme] ...%s%s\n",
                argc < 2 ? "" : ": ", argc < 2 ? "" : why);
        return 2;
    }
    printf("| tokens | states | clip | update | step s | busiest, its own time s | ratio | floor s | ratio to it | waits s: "
           "nvme, copy, update, other | ahead of the norm, taken back | predicted s | activations, micro-batch |\n"
           "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
    bool ok = true, any = false;
    for (uint32_t tokens = 4096; tokens <= 32768; tokens *= 2)
        for (int nvme = 0; nvme < 2; nvme++)
            for (int clip = 0; clip < 3; clip++)
                for (size_t k = 0; k < sizeof modes / sizeof modes[0]; k++) {
                    if ((a.tokens && a.tokens != tokens) || !wanted(a.states, nvme ? "nvme" : "ram") ||
                        (a.clip ? strcmp(a.clip, clips[clip]) != 0 : clip == OVERLAP_SOMETIMES) ||
                        !wanted(a.update, modes[k].name))
                        continue;
                    ok = one(&m, &a, tokens, nvme != 0, clip, k) && ok;
                    any = true;
                }
    if (!any) fprintf(stderr, "overlap_sim: no case is named so\n");
    return ok && any ? 0 : 1;
}
