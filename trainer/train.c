/* trainer/train.c - the loop: the next windows, a step, its line, evaluation and checkpoints when
 * they are due.
 *
 * Must not know: how files look (train_state.c), where the engine keeps anything. Application's
 * thread. */
#include "trainer/train.h"
#include "formats/manifest.h"
#include "trainer/schedule.h"
#include "trainer/signals.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Fills windows with the next batch and queues its inputs. */
static stk_status next_batch(struct train *t, struct stk_error *err)
{
    const struct run_opts *o = &t->o;
    t->step_targets = 0;
    for (uint64_t i = 0; i < o->batch; i++)
        t->windows[i] = token_order_at(t->order, t->position + i);
    for (uint32_t m = 0; m < o->batch / o->micro_batch; m++)
        STK_TRY(run_inputs(&t->r, t->r.data, m, t->windows + m * o->micro_batch, &t->step_targets,
                           err));
    t->position += o->batch;
    return STK_OK;
}

/* A batch whose tokens are all masked teaches nothing; a whole epoch of them is a mistake. */
static stk_status next_batch_with_targets(struct train *t, struct stk_error *err)
{
    for (uint64_t tried = 0;; tried += t->o.batch) {
        STK_TRY(next_batch(t, err));
        if (t->step_targets) return STK_OK;
        if (t->empty_batches++ < 10)
            printf("a batch of %" PRIu64 " windows without any target was passed over\n",
                   t->o.batch);
        if (tried >= t->n_windows)
            return stk_error_set(
                err, STK_ERR_CONFIG, 0,
                "--data %s: no window holds a target: the loss mask leaves nothing to learn",
                t->o.data);
    }
}

static stk_status one_step(struct train *t, struct report_step *s, struct stk_error *err)
{
    stk_engine *e = t->r.e;
    uint64_t begin = stk_now_ns(e);
    STK_TRY(next_batch_with_targets(t, err));
    model_step_targets(t->r.model, t->step_targets);
    double lr = schedule_lr((enum schedule_kind)t->o.schedule, t->o.lr, t->o.warmup, t->steps,
                            t->updates);
    STK_TRY(run_engine(&t->r, stk_step_begin(e, &(stk_step){ .lr = lr }), err));
    STK_TRY(run_visits(&t->r, err));
    memset(s, 0, sizeof *s);
    stk_status st = stk_step_end(e, &s->stats);
    /* the step is fine, a durable one or a checkpoint failed */
    if ((st == STK_ERR_IO || st == STK_ERR_NOSPACE) && s->stats.step > 0) {
        t->step = s->stats.step;
        train_alarm(t, stk_error_text(e));
        st = STK_OK;
    }
    STK_TRY(run_engine(&t->r, st, err));
    t->step = s->stats.step;
    t->updates = s->stats.updates;
    s->step = t->step;
    s->tokens = t->o.batch * t->o.seq;
    t->tokens_done += s->tokens;
    s->targets = t->step_targets;
    s->loss = model_loss_sum(t->r.model) / (double)t->step_targets;
    s->lr = lr;
    s->step_s = (double)(stk_now_ns(e) - begin) / 1e9;
    return STK_OK;
}

static stk_status maybe_evaluate(struct train *t, struct report_step *s, struct stk_error *err)
{
    bool due = t->o.eval_every && t->step % t->o.eval_every == 0;
    if (!t->eval_data || (!due && t->step != t->steps)) return STK_OK;
    struct run_eval e;
    STK_TRY(run_evaluate(&t->r, t->eval_data, NULL, NULL, &e, err));
    s->evaluated = true;
    s->eval_loss = e.loss;
    return STK_OK;
}

static stk_status maybe_save(struct train *t, struct stk_error *err)
{
    bool written, last = t->step == t->steps;
    train_save_told(t);
    bool due = t->o.checkpoint_every && t->step % t->o.checkpoint_every == 0 && !last;
    if (due) return train_save_begin(t, err);
    return last && t->o.save_final_state ? train_save(t, &written, err) : STK_OK;
}

static stk_status stop_early(struct train *t, struct stk_error *err)
{
    train_save_wait(t);
    bool written = t->saved_step == t->step;
    if (!written) STK_TRY(train_save(t, &written, err));
    if (!written)
        return stk_error_set(err, STK_ERR_NOSPACE, 0,
                             "stopped after step %" PRIu64
                             ", but its checkpoint could not be written (see above)",
                             t->step);
    train_durable_end(t);
    printf("stopped after step %" PRIu64 " of %" PRIu64 ": go on with --resume\n", t->step,
           t->steps);
    return STK_OK;
}

/* Something beside the training failed (a disk for gradients, the export ...) while the engine is
 * whole: the work since the last checkpoint is kept if that is possible. Says so; the first error
 * stays the run's. */
static void rescue(struct train *t, uint64_t first)
{
    train_save_wait(t); /* its step may be whole, whatever came after it */
    if (t->step == first || t->saved_step == t->step) return;
    if (train_rescue(t))
        printf("checkpoint %s/step-%08" PRIu64 ": the run ends with an error, but nothing is lost\n",
               t->ckpt_dir, t->step);
    else
        printf("no checkpoint of step %" PRIu64 " could be written either\n", t->step);
}

static stk_status run_steps(struct train *t, uint64_t first, struct stk_error *err)
{
    t->report.first_step = t->step + 1;
    signals_doing("stopping after this step");
    wear_begin(&t->report.wear, t->r.e);
    while (t->step < t->steps && !signals_stop()) {
        struct report_step s;
        pulse_phase(t->r.pulse, "a step", 0);
        STK_TRY(one_step(t, &s, err));
        pulse_phase(t->r.pulse, NULL, 0);
        STK_TRY(train_dump_gradients(t, err));
        STK_TRY(maybe_evaluate(t, &s, err));
        STK_TRY(report_step(&t->report, t, &s, err));
        STK_TRY(train_durable(t, err));
        STK_TRY(maybe_save(t, err));
    }
    if (t->step < t->steps) {
        if (t->step > first) return stop_early(t, err);
        printf("stopped before the first step: nothing was written\n");
        return STK_OK;
    }
    signals_doing("the last step is done, the run ends by itself");
    train_save_wait(t);
    STK_TRY(train_export(t, err));
    train_durable_end(t);
    if (t->had_ckpt_dir) { /* a run before may have died while it wrote one */
        (void)manifest_prune(t->ckpt_dir, 0, NULL);
        (void)rmdir(t->ckpt_dir);
    }
    report_end(&t->report, t);
    return STK_OK;
}

stk_status train_run(struct train *t, struct stk_error *err)
{
    uint64_t first = t->step;
    t->trained = true;
    stk_status st = run_steps(t, first, err);
    if (st != STK_OK) rescue(t, first);
    else if (t->o.trace && t->step > first)
        st = run_engine(&t->r, stk_trace_write(t->r.e, t->o.trace), err);
    return st;
}
