/* trainer/cmd_train.c - `stoker train` and `stoker plan`: options, start, loop, exit code. What a
 * run does is in train*.c. */
#include "base/sys.h"
#include "formats/files.h"
#include "trainer/cmd.h"
#include "trainer/signals.h"
#include "trainer/train.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage_train[] =
    "usage: stoker train --model DIR --data FILE --out DIR --steps N [options]";
static const char usage_plan[] = "usage: stoker plan --model DIR --data FILE --steps N [options of "
                                 "train] [--plan FILE] [--trace FILE]";

/* The table of who owns which byte, as the start prints it. */
static void add_memory(json_t *j, const stk_engine *e)
{
    const char *tier, *owner;
    uint64_t bytes;
    json_t *rows = json_array();
    for (uint32_t i = 0; stk_table(e, i, &tier, &owner, &bytes); i++)
        if (bytes > 0)
            json_array_append_new(rows, json_pack("{s:s, s:s, s:I}", "tier", tier, "owner", owner, "bytes",
                                                  (json_int_t)bytes));
    json_object_set_new(j, "memory", rows);
}

static stk_status write_json(const struct train *t, struct stk_error *err)
{
    json_t *j = forecast_json(&t->forecast, &t->o);
    if (j) add_memory(j, t->r.e);
    char *text = j ? json_dumps(j, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(j);
    if (!text) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the prediction");
    stk_status st = files_write(t->o.json, text, strlen(text), err);
    free(text);
    return st;
}

static stk_status write_plan(struct train *t, bool dry, struct stk_error *err)
{
    if (t->o.plan) STK_TRY(run_engine(&t->r, stk_plan_write(t->r.e, t->o.plan, false), err));
    if (t->o.trace && dry)
        STK_TRY(run_engine(&t->r, stk_plan_write(t->r.e, t->o.trace, true), err));
    return t->o.json && t->o.verb == FOR_PLAN ? write_json(t, err) : STK_OK;
}

static stk_status run(struct train *t, bool dry, struct stk_error *err)
{
    STK_TRY(forecast_machine(&t->forecast, &t->o, err));
    if (t->o.machine) t->r.machine = &t->forecast.machine;
    STK_TRY(train_open(t, err));
    forecast_measure(&t->forecast, &t->r);
    pulse_phase(t->r.pulse, "planning and reserving memory", 0);
    stk_status st = run_seal(&t->r, dry, err);
    pulse_phase(t->r.pulse, NULL, 0);
    STK_TRY(st);
    forecast_make(&t->forecast, &t->r);
    report_start(t);
    forecast_print(&t->forecast, &t->o, t->o.verb == FOR_PLAN);
    STK_TRY(write_plan(t, dry, err));
    if (dry) return STK_OK;
    STK_TRY(train_check_room(t, err));
    if (sys_mkdirs(t->o.out) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "--out %s: cannot be made: %s", t->o.out,
                             strerror(errno));
    STK_TRY(train_lock_out(t, err));
    STK_TRY(train_clean_out(t, err));
    STK_TRY(report_open(&t->report, &t->o, err));
    STK_TRY(train_durable_begin(t, err));
    st = t->o.resume ? train_resume_load(t, err) : run_load(&t->r, err);
    if (st == STK_ERR_INTERRUPTED) return st;
    STK_TRY(st);
    return train_run(t, err);
}

static int train_or_plan(int argc, char **argv, uint32_t verb, const char *usage)
{
    struct train *t = sys_calloc(1, sizeof *t);
    struct stk_error err = { 0 };
    if (!t) {
        stk_error_set(&err, STK_ERR_NOMEM, 0, "no memory to begin");
        return cmd_fail(&err);
    }
    run_opts_rows(&t->o, verb);
    int code = EXIT_DONE;
    if (cmd_help(argc, argv, usage, t->o.rows, t->o.n_rows)) {
        code = EXIT_DONE;
    } else if (run_opts_parse(&t->o, verb, argc, argv, &err) != STK_OK) {
        code = cmd_fail_use(&err);
    } else if (t->o.print_config) {
        run_opts_print(&t->o);
        run_opts_free(&t->o);
    } else {
        signals_install("stopping");
        t->r.pulse = pulse_open();
        stk_status st = run(t, verb == FOR_PLAN || t->o.dry_run, &err);
        t->failed = st != STK_OK;
        t->damaged = st == STK_ERR_CORRUPT;
        struct pulse *pulse = t->r.pulse;
        train_close(t);
        size_t said = strlen(err.text);
        if (t->what_is_left[0])
            snprintf(err.text + said, sizeof err.text - said, "; %s", t->what_is_left);
        pulse_close(pulse);
        run_opts_free(&t->o);
        if (st == STK_ERR_INTERRUPTED)
            printf("%s: nothing was trained\n", err.text);
        else if (st != STK_OK)
            code = cmd_fail(&err);
    }
    sys_free(t);
    return code;
}

int cmd_train(int argc, char **argv) { return train_or_plan(argc, argv, FOR_TRAIN, usage_train); }
int cmd_plan(int argc, char **argv) { return train_or_plan(argc, argv, FOR_PLAN, usage_plan); }
