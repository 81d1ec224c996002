/* trainer/cmd_eval.c - `stoker eval`: mean loss, perplexity and, if asked, logits over all windows
 * of a token file.
 *
 * Defaults differ from train's: activations and products in f32, so that the numbers compare with
 * an fp32 run elsewhere on the same weights. No gradient and no optimizer state exist here
 * (MEM-11). */
#include "trainer/cmd.h"
#include "trainer/report.h"
#include "trainer/run.h"
#include "base/mem.h"
#include "base/sys.h"
#include "formats/files.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] = "usage: stoker eval --model DIR --data FILE [options]";

struct logits_out {
    struct st_writer *w;
    uint64_t window_bytes;
};

static stk_status write_logits(void *arg, uint64_t window, const float *logits,
                               struct stk_error *err)
{
    struct logits_out *l = arg;
    return st_writer_write(l->w, 0, window * l->window_bytes, logits, l->window_bytes, err);
}

static stk_status logits_begin(const struct run *r, struct logits_out *l, struct stk_error *err)
{
    const struct run_opts *o = r->opts;
    uint64_t shape[3] = { tokens_windows(r->data, o->seq), o->seq, r->src.cfg.vocab };
    uint32_t index;
    l->window_bytes = shape[1] * shape[2] * sizeof(float);
    STK_TRY(st_writer_new(o->logits, NULL, &l->w, err));
    STK_TRY(st_writer_declare(l->w, "logits", ST_F32, 3, shape, &index, err));
    return st_writer_begin(l->w, err);
}

/* JSON knows no NaN and no infinity. */
static json_t *number(double x) { return isfinite(x) ? json_real(x) : json_null(); }

static stk_status write_json(const struct run *r, const struct run_eval *e, struct stk_error *err)
{
    json_t *doc = json_pack(
        "{s:o, s:o, s:I, s:I, s:I, s:I, s:s, s:s, s:s}", "loss", number(e->loss), "perplexity",
        number(e->perplexity), "targets", (json_int_t)e->targets, "windows", (json_int_t)e->windows,
        "seq", (json_int_t)r->opts->seq, "peak_rss_bytes", (json_int_t)mem_peak_bytes(), "model",
        r->opts->model, "data", r->opts->data, "numerics", stk_numerics(r->e));
    char *text = doc ? json_dumps(doc, JSON_INDENT(1)) : NULL;
    stk_status st = text ? files_replace(r->opts->json, text, strlen(text), err)
                         : stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the result");
    free(text);
    json_decref(doc);
    return st;
}

static stk_status evaluate(struct run *r, const struct run_opts *o, struct run_eval *out,
                           struct stk_error *err)
{
    struct logits_out l = { 0 };
    STK_TRY(run_open(r, o, true, o->logits != NULL, err));
    STK_TRY(run_seal(r, o->dry_run, err));
    if (o->dry_run) {
        report_engine(r->e);
        return STK_OK;
    }
    STK_TRY(run_load(r, err));
    if (o->logits) {
        stk_status st = logits_begin(r, &l, err);
        if (st == STK_OK) st = run_evaluate(r, r->data, write_logits, &l, out, err);
        if (st != STK_OK) {
            st_writer_abandon(l.w);
            return st;
        }
        STK_TRY(st_writer_finish(l.w, err));
    } else {
        STK_TRY(run_evaluate(r, r->data, NULL, NULL, out, err));
    }
    return o->json ? write_json(r, out, err) : STK_OK;
}

static stk_status check_outputs(const struct run_opts *o, struct stk_error *err)
{
    STK_TRY(run_check_output(o, "--json", o->json, false, err));
    return run_check_output(o, "--logits", o->logits, false, err);
}

int cmd_eval(int argc, char **argv)
{
    struct run_opts o;
    struct run r = { 0 };
    struct run_eval e;
    struct stk_error err = { 0 };
    run_opts_rows(&o, FOR_EVAL);
    if (cmd_help(argc, argv, usage, o.rows, o.n_rows)) return EXIT_DONE;
    if (run_opts_parse(&o, FOR_EVAL, argc, argv, &err) != STK_OK) return cmd_fail_use(&err);
    if (o.print_config) {
        run_opts_print(&o);
        run_opts_free(&o);
        return EXIT_DONE;
    }
    if (o.logits) o.batch = o.micro_batch; /* a host copy of a pass's logits is kept */
    r.pulse = pulse_open();
    stk_status st = check_outputs(&o, &err);
    if (st == STK_OK) st = evaluate(&r, &o, &e, &err);
    if (st == STK_OK && !o.dry_run)
        printf("loss %.6f  perplexity %.4f  over %llu targets in %llu windows of %llu tokens\n",
               e.loss, e.perplexity, (unsigned long long)e.targets, (unsigned long long)e.windows,
               (unsigned long long)o.seq);
    run_close(&r);
    pulse_close(r.pulse);
    run_opts_free(&o);
    return st == STK_OK ? EXIT_DONE : cmd_fail(&err);
}
