/* trainer/report.c - start table, progress lines, JSON log. Owns: their form. Must not know: how a
 * step works. */
#include "trainer/report.h"
#include "base/mem.h"
#include "base/sys.h"
#include "formats/files.h"
#include "trainer/train.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

stk_status report_open(struct report *r, const struct run_opts *o, struct stk_error *err)
{
    r->terminal = isatty(STDOUT_FILENO) == 1;
    r->begin_ns = now_ns();
    if (!o->log) return STK_OK;
    char *parent = files_parent(o->log);
    if (parent) sys_mkdirs(parent); /* what is wrong with it, fopen says */
    sys_free(parent);
    r->log = fopen(o->log, o->resume ? "ae" : "we");
    return r->log ? STK_OK
                  : stk_error_set(err, STK_ERR_IO, errno, "--log %s: cannot be written: %s", o->log,
                                  strerror(errno));
}

void report_close(struct report *r)
{
    if (r->log) fclose(r->log);
    r->log = NULL;
}

/* --- the start -------------------------------------------------------------------------------- */

static uint64_t tier_bytes(const stk_engine *e, const char *tier)
{
    const char *name, *owner;
    uint64_t bytes, sum = 0;
    for (uint32_t i = 0; stk_table(e, i, &name, &owner, &bytes); i++)
        if (strcmp(name, tier) == 0) sum += bytes;
    return sum;
}

static const char *tier_of(const stk_engine *e, const char *owner)
{
    const char *tier, *name;
    uint64_t bytes;
    for (uint32_t i = 0; stk_table(e, i, &tier, &name, &bytes); i++)
        if (strcmp(name, owner) == 0) return tier;
    return "host";
}

void report_engine(const stk_engine *e)
{
    const char *line;
    printf("numerics   %s\n", stk_numerics(e));
    for (uint32_t i = 0; stk_note(e, i, &line); i++) printf("           %s\n", line);
    static const char *const tiers[] = { "host", "device", "nvme" };
    const char *tier, *owner;
    uint64_t bytes;
    char size[32];
    printf("memory\n");
    for (int k = 0; k < 3; k++) {
        uint64_t sum = tier_bytes(e, tiers[k]);
        if (sum == 0) continue;
        for (uint32_t i = 0; stk_table(e, i, &tier, &owner, &bytes); i++)
            if (strcmp(tier, tiers[k]) == 0 && bytes > 0)
                printf("  %-7s %-38s %12s\n", tier, owner, mem_size_format(bytes, size));
        printf("  %-7s %-38s %12s\n", tiers[k], "total", mem_size_format(sum, size));
    }
}

static uint64_t count_elements(const struct model *m, bool frozen)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < model_tensor_count(m); i++)
        if (model_tensor(m, i)->frozen == frozen) n += model_tensor(m, i)->n_elems;
    return n;
}

static void print_optimizer(const struct train *t)
{
    const struct run_opts *o = &t->o;
    const char *opt = tier_of(t->r.e, "optimizer state"),
               *half = o->dtype == STK_BF16 ? "bf16" : "fp16";
    printf("optimizer  %s, beta %g %g, eps %g, weight decay %g, clip %g\n",
           o->optimizer == STK_ADAM ? "adam (L2)" : "adamw", o->beta1, o->beta2, o->eps,
           o->weight_decay, o->clip);
    printf("state      parameters %s (%s), master fp32 (%s), moments %s (%s), gradients %s (%s), "
           "activations %s\n",
           half, tier_of(t->r.e, "parameters (16-bit)"), opt, moments_name(o->moments), opt, half,
           tier_of(t->r.e, "gradients (16-bit)"), o->act ? "bf16" : "f32");
    if (o->moments == STK_MOMENTS_BF16)
        printf("inexact    moments bf16, inexact: rounded stochastically by --seed, 4 bytes a parameter "
               "instead of 8; --moments fp32 is exact\n");
    if (o->moments == STK_MOMENTS_8BIT)
        printf("inexact    moments 8bit, inexact: dynamic codes with a scale for each 64 elements, 2.1 "
               "bytes a parameter instead of 8, the embedding's fp32; --moments fp32 is exact\n");
    if (o->dtype == STK_FP16)
        printf("loss scale %g at first\n", o->loss_scale > 0 ? o->loss_scale : 65536.0);
}

static void print_run(const struct train *t)
{
    const struct run_opts *o = &t->o;
    uint64_t step_tokens = o->batch * o->seq;
    printf("run        steps %" PRIu64 " to %" PRIu64 ", %" PRIu64 " x %" PRIu64
           " tokens each (micro-batches of %" PRIu64 "), %.3g tokens in all\n",
           t->step + 1, t->steps, o->batch, o->seq, o->micro_batch,
           (double)(t->steps * step_tokens));
    printf("rate       %g, %s, %" PRIu64 " steps of warm-up\n", o->lr, schedule_name(o->schedule),
           o->warmup);
}

void report_start(const struct train *t)
{
    const struct run_opts *o = &t->o;
    char size[32], idle[512];
    uint64_t trained = count_elements(t->r.model, false), frozen = count_elements(t->r.model, true);
    double read, written;
    printf("model      %s: %s, %.2f million parameters", o->model,
           model_family_name(t->r.src.cfg.family), (double)(trained + frozen) / 1e6);
    if (frozen) printf(", %.2f million of them frozen", (double)frozen / 1e6);
    printf("\ndata       %s: %" PRIu64 " tokens, %" PRIu64 " documents, %" PRIu64
           " windows of %" PRIu64 "\n",
           o->data, tokens_count(t->r.data), tokens_documents(t->r.data), t->n_windows, o->seq);
    print_run(t);
    print_optimizer(t);
    run_opts_idle(o, idle, sizeof idle);
    if (idle[0]) printf("no effect  %s", idle);
    if (o->durable)
        printf("durable    every %" PRIu64 " steps, run %s\n", o->durable, o->run_id);
    else if (o->adopt)
        printf("durable    none in this run (--durable N); that of step %" PRIu64
               " stays until its end\n",
               t->left.step);
    report_engine(t->r.e);
    if (t->r.seal_s > 0 && !run_opts_given(o, "simulate")) /* of a simulation all lines repeat */
        printf("start      %s of host memory, files and pools made ready in %.2f s\n",
               mem_size_format(tier_bytes(t->r.e, "host"), size), t->r.seal_s);
    wear_start(t->r.e);
    wear_step_bytes(t->r.e, &read, &written);
    if (written > 0) {
        printf("writes     %s to NVMe per step", mem_size_format((uint64_t)written, size));
        printf(", %s in this run\n",
               mem_size_format((uint64_t)(written * (double)(t->steps - t->step)), size));
    }
}

/* --- a step ----------------------------------------------------------------------------------- */

static json_t *number(double x) { return isfinite(x) ? json_real(x) : json_null(); }
static json_t *whole(uint64_t x) { return json_integer((json_int_t)x); }
static double seconds(uint64_t ns) { return (double)ns / 1e9; }

static json_t *json_exposed(const stk_exposed *x)
{
    json_t *j = json_object();
    json_object_set_new(j, "nvme", number(seconds(x->nvme_ns)));
    json_object_set_new(j, "copy", number(seconds(x->copy_ns)));
    json_object_set_new(j, "update", number(seconds(x->update_ns)));
    json_object_set_new(j, "gather", number(seconds(x->gather_ns)));
    json_object_set_new(j, "other", number(seconds(x->queue_ns)));
    return j;
}

static json_t *json_bytes(const stk_step_stats *s)
{
    json_t *j = json_object();
    json_object_set_new(j, "nvme_read", whole(s->nvme_read_bytes));
    json_object_set_new(j, "nvme_write", whole(s->nvme_write_bytes));
    json_object_set_new(j, "copy_in", whole(s->copy_in_bytes));
    json_object_set_new(j, "copy_out", whole(s->copy_out_bytes));
    json_object_set_new(j, "param_fetch", whole(s->param_fetch_bytes));
    return j;
}

static json_t *json_step(const struct train *t, const struct report_step *s, json_t *drives)
{
    const stk_step_stats *x = &s->stats;
    json_t *j = json_object();
    json_object_set_new(j, "step", whole(s->step));
    json_object_set_new(j, "loss", number(s->loss));
    json_object_set_new(j, "grad_norm", number(x->grad_norm));
    json_object_set_new(j, "lr", number(s->lr));
    json_object_set_new(j, "tokens", whole(s->tokens));
    json_object_set_new(j, "tokens_total", whole(t->tokens_done));
    json_object_set_new(j, "targets", whole(s->targets));
    json_object_set_new(j, "tokens_per_s",
                        number(s->step_s > 0 ? (double)s->tokens / s->step_s : 0));
    json_object_set_new(j, "step_s", number(s->step_s));
    json_object_set_new(j, "compute_s", number(seconds(x->compute_ns)));
    json_object_set_new(j, "exposed_s", json_exposed(&x->exposed));
    json_object_set_new(j, "skipped", json_boolean(x->skipped));
    json_object_set_new(j, "skipped_total", whole(x->skipped_total));
    json_object_set_new(j, "updates", whole(x->updates));
    json_object_set_new(j, "clip_factor", number(x->clip_factor));
    json_object_set_new(j, "loss_scale", number(x->loss_scale));
    json_object_set_new(j, "spec_chunks", whole(x->spec_chunks));
    json_object_set_new(j, "spec_undone", whole(x->spec_undone));
    json_object_set_new(j, "durable_step", whole(x->durable_step));
    json_object_set_new(j, "saved_step", whole(x->saved_step));
    json_object_set_new(j, "saving", json_boolean(x->saving));
    json_object_set_new(j, "save_wait_s", number(seconds(x->save_wait_ns)));
    json_object_set_new(j, "bytes", json_bytes(x));
    json_object_set_new(j, "nvme_busy_s", number(seconds(x->nvme_busy_ns)));
    json_object_set_new(j, "nvme_drive_s", number(seconds(x->nvme_drive_ns)));
    json_object_set_new(j, "nvme_full_s", number(seconds(x->nvme_full_ns)));
    json_object_set_new(j, "nvme_full_bytes", whole(x->nvme_full_bytes));
    json_object_set_new(j, "nvme_read_p99_s", number(seconds(x->nvme_read_p99_ns)));
    json_object_set_new(j, "nvme_read_alone_p99_s", number(seconds(x->nvme_read_alone_p99_ns)));
    json_object_set_new(j, "nvme_read_beside_p99_s", number(seconds(x->nvme_read_beside_p99_ns)));
    static const char *const beside[2] = { "alone", "beside" };
    for (int i = 0; i < 2; i++) {
        char name[64];
        snprintf(name, sizeof name, "nvme_demand_%s_p99_s", beside[i]);
        json_object_set_new(j, name, number(seconds(x->nvme_demand_p99_ns[i])));
        snprintf(name, sizeof name, "nvme_at_drive_%s_p99_s", beside[i]);
        json_object_set_new(j, name, number(seconds(x->nvme_drive_p99_ns[i])));
    }
    json_object_set_new(j, "nvme_short", whole(x->nvme_short));
    json_object_set_new(j, "nvme_retries", whole(x->nvme_retries));
    json_object_set(j, "drives", drives);
    json_object_set_new(j, "rss_bytes", whole(mem_resident_bytes()));
    json_object_set_new(j, "peak_rss_bytes", whole(mem_peak_bytes()));
    if (s->evaluated) json_object_set_new(j, "eval_loss", number(s->eval_loss));
    return j;
}

static stk_status write_log(struct report *r, const struct train *t, const struct report_step *s,
                            json_t *drives, struct stk_error *err)
{
    json_t *j = json_step(t, s, drives);
    json_object_set_new(j, "elapsed_s", number(seconds(now_ns() - r->begin_ns)));
    if (s->step == r->first_step) json_object_set_new(j, "start_s", number(t->r.seal_s));
    char *text = j ? json_dumps(j, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(j);
    if (!text) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a line of the log");
    bool bad = fputs(text, r->log) < 0 || fputc('\n', r->log) == EOF || fflush(r->log) != 0;
    free(text);
    return bad ? stk_error_set(err, STK_ERR_IO, errno, "--log %s: cannot be written: %s", t->o.log,
                               strerror(errno))
               : STK_OK;
}

static void print_eta(const struct report *r, const struct train *t, uint64_t step)
{
    uint64_t done = step - r->first_step + 1;
    double s = (double)(now_ns() - r->begin_ns) / 1e9 / (double)done * (double)(t->steps - step);
    if (s >= 3600)
        printf("  eta %.0fh%02.0fm", floor(s / 3600), floor(fmod(s, 3600) / 60));
    else
        printf("  eta %.0fm%02.0fs", floor(s / 60), floor(fmod(s, 60)));
}

static void print_step(const struct report *r, const struct train *t, const struct report_step *s)
{
    static const char *const causes[] = { "nvme", "copy", "update", "gather" };
    const stk_step_stats *x = &s->stats;
    const uint64_t waits[] = { x->exposed.nvme_ns, x->exposed.copy_ns, x->exposed.update_ns,
                               x->exposed.gather_ns };
    printf("step %" PRIu64 "/%" PRIu64 "  loss %.4f  norm %.3g  lr %.3g  %.0f tok/s  %.3f s",
           s->step, t->steps, s->loss, x->grad_norm, s->lr,
           s->step_s > 0 ? (double)s->tokens / s->step_s : 0, s->step_s);
    bool any = false;
    for (int i = 0; i < 4; i++) {
        if (waits[i] < 1000000u) continue;
        printf("%s%s %.3f", any ? " " : " (waited: ", causes[i], seconds(waits[i]));
        any = true;
    }
    printf("%s  skipped %" PRIu64, any ? ")" : "", x->skipped_total);
    if (x->durable_step) printf("  durable %" PRIu64, x->durable_step);
    if (s->evaluated) printf("  eval loss %.4f", s->eval_loss);
    print_eta(r, t, s->step);
    printf("\n");
    fflush(stdout);
}

/* The first ten of this process, then every hundredth (MPX-01). */
static void print_skip(struct train *t, const struct report_step *s)
{
    uint64_t n = ++t->skips_printed;
    if (n > 10 && n % 100 != 0) return;
    printf("step %" PRIu64
           " was skipped: its gradient norm is %g, no parameter was changed (%" PRIu64
           " skipped so far, %" PRIu64 " in a row%s)\n",
           s->step, s->stats.grad_norm, s->stats.skipped_total, s->stats.skipped_in_a_row,
           n == 10 ? "; from here on every hundredth is named" : "");
}

stk_status report_step(struct report *r, struct train *t, const struct report_step *s,
                       struct stk_error *err)
{
    const stk_exposed *x = &s->stats.exposed;
    r->exposed_s += seconds(x->nvme_ns + x->copy_ns + x->update_ns + x->gather_ns);
    r->step_s += s->step_s;
    forecast_step(&t->forecast, &s->stats);
    json_t *drives = wear_step(&r->wear, t->r.e, &s->stats, s->step_s);
    if (s->stats.skipped) print_skip(t, s);
    uint64_t now = now_ns();
    bool every = t->o.progress == PROGRESS_LINES || (t->o.progress == PROGRESS_AUTO && r->terminal);
    bool due = s->evaluated || s->step == t->steps || s->step == r->first_step ||
               now - r->last_line_ns >= 1000000000u;
    if (t->o.progress != PROGRESS_NONE && (every || due)) {
        print_step(r, t, s);
        r->last_line_ns = now;
    }
    stk_status st = r->log ? write_log(r, t, s, drives, err) : STK_OK;
    json_decref(drives);
    if (st == STK_OK) return STK_OK;
    fflush(stdout);
    fprintf(stderr, "stoker: ALARM: step %" PRIu64 ": %s; training goes on without the log\n",
            s->step, err->text);
    report_close(r);
    stk_error_clear(err);
    return STK_OK;
}

void report_end(struct report *r, const struct train *t)
{
    char rss[32];
    double wall = (double)(now_ns() - r->begin_ns) / 1e9;
    uint64_t n = t->step + 1 - r->first_step;
    if (t->step < r->first_step) return;
    printf("%" PRIu64 " steps in %.1f s, %.0f tok/s, %.1f %% of the steps' time waited for data, "
                      "peak memory %s\n",
           n, wall, r->step_s > 0 ? (double)(n * t->o.batch * t->o.seq) / r->step_s : 0,
           r->step_s > 0 ? 100 * r->exposed_s / r->step_s : 0,
           mem_size_format(mem_peak_bytes(), rss));
    forecast_end(&t->forecast, &t->o);
    wear_end(&r->wear, t->r.e, forecast_visits_alone_s(&t->forecast));
    if (run_opts_given(&t->o, "simulate"))
        printf("trace      %016" PRIx64 "\n", stk_trace_hash(t->r.e));
}
