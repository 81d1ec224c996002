/* trainer/forecast.c - the prediction of a step as a person reads it, and the comparison with what
 * was measured.
 *
 * Owns its form and where machine files are looked for. Must not know how a step is predicted
 * (engine/predict.h). Application's thread. */
#include "trainer/forecast.h"
#include "base/mem.h"
#include "base/sys.h"
#include "trainer/signals.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const figure_names[FORECAST_FIGURES] = {
    "step", "compute", "waits: nvme", "waits: copy", "waits: update", "waits: gather", "other"
};

/* --- the machine ------------------------------------------------------------------------------ */

/* A name is a file of share/machines: of the installation (bin/../share/stoker), or of the source
 * folder that the build folder lies in. */
static char *find_file(const char *name)
{
    static const char *const folders[] = { "../share/stoker/machines", "../share/machines" };
    char self[4096];
    if (strchr(name, '/') || access(name, R_OK) == 0) return sys_strdup(name);
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(self, '/');
    if (slash) *slash = '\0';
    for (size_t i = 0; slash && i < sizeof folders / sizeof folders[0]; i++) {
        char *path = sys_format("%s/%s/%s.json", self, folders[i], name);
        if (path && access(path, R_OK) == 0) return path;
        sys_free(path);
    }
    return sys_strdup(name);
}

stk_status forecast_machine(struct forecast *f, const struct run_opts *o, struct stk_error *err)
{
    char why[512];
    f->wanted = o->verb == FOR_PLAN || o->predict == 0;
    if (!o->machine) return STK_OK;
    char *path = find_file(o->machine);
    if (!path) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    stk_status st = stk_machine_read(path, &f->machine, why, sizeof why);
    if (st != STK_OK) stk_error_set(err, st, 0, "--machine %s: %s", o->machine, why);
    sys_free(path);
    return st;
}

/* --- predicting ------------------------------------------------------------------------------- */

static void fail(struct forecast *f, const char *text)
{
    f->known = false;
    snprintf(f->why, sizeof f->why, "%s", text);
}

void forecast_measure(struct forecast *f, struct run *r)
{
    const struct run_opts *o = r->opts;
    if (!f->wanted || o->machine || run_opts_given(o, "simulate")) return;
    if (o->device == STK_DEVICE_CUDA) { /* its copies and its memory are not measured yet */
        fail(f, "a card is not measured yet: describe the machine (--machine FILE)");
        return;
    }
    pulse_phase(r->pulse, "measuring this machine", 0);
    f->measured = stk_machine_measure(r->e, &f->machine) == STK_OK;
    if (!f->measured) fail(f, stk_error_text(r->e));
    pulse_phase(r->pulse, NULL, 0);
}

/* Inputs of micro-batch 0 without meaning: tokens all over the vocabulary. */
static stk_status bind_inputs(struct run *r, struct stk_error *err)
{
    uint64_t n = r->opts->seq * r->opts->micro_batch;
    int32_t *v = sys_calloc(4 * n, sizeof *v);
    if (!v) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a batch to try");
    for (uint64_t i = 0; i < n; i++) {
        v[i] = v[n + i] = (int32_t)(i * 2654435761u % r->src.cfg.vocab);
        v[2 * n + i] = (int32_t)(i % r->opts->seq);
    }
    stk_status st = model_bind(r->model, r->e, err);
    model_step_targets(r->model, n);
    if (st == STK_OK)
        st = model_inputs(r->model, 0, v, v + n, v + 2 * n, v + 3 * n, err);
    sys_free(v);
    return st;
}

static stk_status try_visits(struct run *r, struct stk_error *err)
{
    bool bound = false;
    while (!signals_stop()) { /* who stops a run does not want it predicted */
        stk_visit v;
        stk_status st = stk_trial_next(r->e, &v);
        if (st == STK_END) return STK_OK;
        STK_TRY(run_engine(r, st, err));
        if (!bound) STK_TRY(bind_inputs(r, err));
        bound = true;
        STK_TRY(model_visit(r->model, &v, err));
        STK_TRY(run_engine(r, stk_trial_done(r->e, &v), err));
    }
    return STK_OK;
}

void forecast_make(struct forecast *f, struct run *r)
{
    struct stk_error err = { 0 };
    bool simulated = run_opts_given(r->opts, "simulate");
    if (!f->wanted || (!f->measured && !r->opts->machine && r->opts->device != STK_DEVICE_SIM))
        return;
    pulse_phase(r->pulse, "trying a visit of each kind", 0);
    stk_status st = f->measured ? try_visits(r, &err) : STK_OK;
    pulse_phase(r->pulse, NULL, 0);
    if (st != STK_OK) {
        fail(f, err.text);
        return;
    }
    f->prediction.size = sizeof f->prediction;
    st = stk_predict(r->e, simulated ? NULL : &f->machine, &f->prediction);
    f->known = st == STK_OK;
    if (st != STK_OK) fail(f, stk_error_text(r->e));
}

/* --- form ------------------------------------------------------------------------------------- */

static void figures(const stk_prediction *p, bool bound, double v[FORECAST_FIGURES])
{
    const double other[FORECAST_FIGURES] = { p->bound.step_s,           p->bound.compute_s,
                                             p->bound.exposed_s.nvme,   p->bound.exposed_s.copy,
                                             p->bound.exposed_s.update, p->bound.exposed_s.gather,
                                             p->bound.exposed_s.other };
    const double all[FORECAST_FIGURES] = { p->step_s,           p->compute_s,
                                           p->exposed_s.nvme,   p->exposed_s.copy,
                                           p->exposed_s.update, p->exposed_s.gather,
                                           p->exposed_s.other };
    memcpy(v, bound ? other : all, sizeof all);
}

static double tokens_per_s(const struct run_opts *o, double step_s)
{
    return step_s > 0 ? (double)(o->batch * o->seq) / step_s : 0;
}

static void print_machine(const struct forecast *f, const struct run_opts *o)
{
    if (o->machine) printf("machine    %s: %s\n", f->machine.name, f->machine.text);
    if (!f->measured) return;
    const stk_machine *m = &f->machine;
    printf("machine    %s, %u cores: products %.0f GFLOP/s, Adam %.1f GB/s, copies %.1f GB/s, "
           "casts %.1f GB/s, checksums %.1f GB/s\n",
           m->text, m->cores, m->flops_per_s / 1e9, m->update_bytes_per_s / 1e9,
           m->copy_in_bytes_per_s / 1e9, m->cast_bytes_per_s / 1e9, m->checksum_bytes_per_s / 1e9);
}

void forecast_print(const struct forecast *f, const struct run_opts *o, bool all)
{
    const stk_prediction *p = &f->prediction;
    double v[FORECAST_FIGURES];
    if (!f->known) {
        if (f->why[0]) printf("predicted  nothing: %s\n", f->why);
        return;
    }
    print_machine(f, o);
    figures(p, false, v);
    printf("predicted  %.4g s a step, %.4g tok/s; busiest is %s with %.4g s alone (%.1f %% of the "
           "step)%s\n",
           p->step_s, tokens_per_s(o, p->step_s), p->resource[p->busiest].name,
           p->resource[p->busiest].alone_s,
           p->step_s > 0 ? 100 * p->resource[p->busiest].alone_s / p->step_s : 0,
           p->costs_known ? "" : "; visits by their FLOPs alone");
    printf("           compute %.4g s", p->compute_s);
    for (int i = 2; i < FORECAST_FIGURES; i++)
        if (v[i] >= 5e-4) printf(", %s %.4g s", figure_names[i], v[i]);
    if (p->bound.step_s != p->step_s)
        printf("; where the norm binds and nothing can be speculated %.4g s a step", p->bound.step_s);
    printf("\n");
    if (!all) return;
    printf("  %-12s %10s %10s\n", "resource", "busy s", "alone s");
    for (uint32_t i = 0; i < p->n_resources; i++)
        printf("  %-12s %10.4f %10.4f\n", p->resource[i].name, p->resource[i].busy_s,
               p->resource[i].alone_s);
}

json_t *forecast_json(const struct forecast *f, const struct run_opts *o)
{
    const stk_prediction *p = &f->prediction;
    json_t *j = json_object(), *list = json_array();
    if (!f->known) {
        json_decref(list);
        json_object_set_new(j, "why", json_string(f->why));
        return j;
    }
    for (uint32_t i = 0; i < p->n_resources; i++)
        json_array_append_new(list, json_pack("{s:s, s:f, s:f}", "name", p->resource[i].name,
                                              "busy_s", p->resource[i].busy_s, "alone_s",
                                              p->resource[i].alone_s));
    json_object_set_new(j, "machine", json_string(f->machine.name));
    json_object_set_new(j, "step_s", json_real(p->step_s));
    json_object_set_new(j, "bound_step_s", json_real(p->bound.step_s));
    json_object_set_new(j, "tokens", json_integer((json_int_t)(o->batch * o->seq)));
    json_object_set_new(j, "tokens_per_s", json_real(tokens_per_s(o, p->step_s)));
    json_object_set_new(j, "compute_s", json_real(p->compute_s));
    json_object_set_new(j, "exposed_s",
                        json_pack("{s:f, s:f, s:f, s:f, s:f}", "nvme", p->exposed_s.nvme, "copy",
                                  p->exposed_s.copy, "update", p->exposed_s.update, "gather",
                                  p->exposed_s.gather, "other", p->exposed_s.other));
    json_object_set_new(j, "busiest", json_string(p->resource[p->busiest].name));
    json_object_set_new(j, "busiest_s", json_real(p->resource[p->busiest].alone_s));
    json_object_set_new(j, "resources", list);
    json_object_set_new(j, "bytes",
                        json_pack("{s:I, s:I, s:I, s:I}", "nvme_read",
                                  (json_int_t)p->nvme_read_bytes, "nvme_write",
                                  (json_int_t)p->nvme_write_bytes, "copy_in",
                                  (json_int_t)p->copy_in_bytes, "copy_out",
                                  (json_int_t)p->copy_out_bytes));
    json_object_set_new(j, "peak_bytes",
                        json_pack("{s:I, s:I, s:I}", "host", (json_int_t)p->host_bytes, "device",
                                  (json_int_t)p->device_bytes, "nvme",
                                  (json_int_t)p->nvme_bytes));
    json_object_set_new(j, "costs_known", json_boolean(p->costs_known));
    return j;
}

/* --- beside what was measured ----------------------------------------------------------------- */

void forecast_step(struct forecast *f, const stk_step_stats *s)
{
    if (!f->known) return;
    if (!f->first_passed) { /* it has no update, and cold caches */
        f->first_passed = true;
        return;
    }
    f->n_bound += s->clip_factor < 1;
    double *v = f->step[f->n_steps++ % FORECAST_STEPS];
    const uint64_t ns[FORECAST_FIGURES] = { s->step_ns,           s->compute_ns,
                                            s->exposed.nvme_ns,   s->exposed.copy_ns,
                                            s->exposed.update_ns, s->exposed.gather_ns,
                                            s->exposed.queue_ns };
    for (int i = 0; i < FORECAST_FIGURES; i++) v[i] = (double)ns[i] / 1e9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(const struct forecast *f, int figure)
{
    double v[FORECAST_STEPS];
    uint64_t n = f->n_steps < FORECAST_STEPS ? f->n_steps : FORECAST_STEPS;
    for (uint64_t i = 0; i < n; i++) v[i] = f->step[i][figure];
    qsort(v, n, sizeof v[0], by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

double forecast_visits_alone_s(const struct forecast *f)
{
    const stk_prediction *p = &f->prediction;
    if (!f->known || !p->costs_known || !f->machine.on_host) return 0;
    for (uint32_t i = 0; i < p->n_resources; i++)
        if (strcmp(p->resource[i].name, "compute") == 0) return p->resource[i].alone_s;
    return 0;
}

void forecast_end(const struct forecast *f, const struct run_opts *o)
{
    double v[FORECAST_FIGURES];
    char a[32], b[32];
    if (!f->known || f->n_steps == 0) return;
    bool bound = 2 * f->n_bound > f->n_steps;
    figures(&f->prediction, bound, v);
    printf("predicted and measured (median of %" PRIu64 " steps after the first%s)\n",
           f->n_steps < FORECAST_STEPS ? f->n_steps : FORECAST_STEPS,
           f->prediction.bound.step_s == f->prediction.step_s ? ""
           : bound ? ", whose norms bound"
                   : ", whose norms did not bind");
    for (int i = 0; i < FORECAST_FIGURES; i++) {
        double m = median(f, i);
        if (i >= 2 && v[i] < 5e-4 && m < 5e-4) continue;
        printf("  %-14s %10.4f s %10.4f s", figure_names[i], v[i], m);
        if (i == 0 && m > 0) printf("   %+.1f %%", 100 * (v[i] - m) / m);
        printf("\n");
    }
    if (o->device == STK_DEVICE_SIM) return; /* its memory is this machine's */
    uint64_t planned = f->prediction.host_bytes + f->prediction.device_bytes,
             peak = mem_peak_bytes();
    printf("  %-14s %12s %12s   %+.1f %%\n", "peak memory", mem_size_format(planned, a),
           mem_size_format(peak, b),
           peak ? 100 * ((double)planned - (double)peak) / (double)peak : 0);
}
