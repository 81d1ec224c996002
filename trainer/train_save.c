/* trainer/train_save.c - a training run's checkpoints: written beside the steps or between them, told
 * when they are complete, waited for at the end.
 *
 * A disk that is full or fails is an alarm and no end of the run (CKP-37). Must not know: how a
 * checkpoint looks. Application's thread; blocking where it says so. */
#include "trainer/train.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The engine's status; its sentence is stk_error_text. */
static stk_status save_now(struct train *t)
{
    char *client = train_client_json(t);
    if (!client) return STK_ERR_NOMEM;
    pulse_phase(t->r.pulse, "writing a checkpoint", stk_save_bytes(t->r.e));
    stk_status st = stk_save(t->r.e, t->ckpt_dir, client, (uint32_t)t->o.keep_checkpoints);
    pulse_phase(t->r.pulse, NULL, 0);
    free(client);
    if (st == STK_OK) t->saved_step = t->step;
    return st;
}

bool train_rescue(struct train *t) { return save_now(t) == STK_OK; }

/* A disk's error is said and forgotten: *alarm. */
static stk_status judge(struct train *t, stk_status st, bool *alarm, struct stk_error *err)
{
    const char *text = stk_error_text(t->r.e);
    *alarm = st == STK_ERR_NOSPACE || (st == STK_ERR_IO && strstr(text, t->ckpt_dir));
    if (*alarm) {
        fflush(stdout);
        fprintf(stderr, "stoker: ALARM: no checkpoint of step %" PRIu64 ": %s; training goes on\n",
                t->step, text);
        return STK_OK;
    }
    if (st == STK_ERR_NOMEM && !text[0])
        return stk_error_set(err, st, 0, "no memory for a checkpoint's description");
    return run_engine(&t->r, st, err);
}

stk_status train_save(struct train *t, bool *written, struct stk_error *err)
{
    bool alarm;
    *written = false;
    uint64_t begin = stk_now_ns(t->r.e);
    STK_TRY(judge(t, save_now(t), &alarm, err));
    if (alarm) return STK_OK;
    *written = true;
    printf("checkpoint %s/step-%08" PRIu64 "  %.3f s, the run waited\n", t->ckpt_dir, t->step,
           (double)(stk_now_ns(t->r.e) - begin) / 1e9);
    return STK_OK;
}

/* --- beside the steps ------------------------------------------------------------------------- */

void train_save_told(struct train *t)
{
    uint64_t step, took_ns, held_ns;
    if (!stk_saved(t->r.e, &step, &took_ns, &held_ns) || step == t->told_step) return;
    t->told_step = t->saved_step = step;
    printf("checkpoint %s/step-%08" PRIu64 "  %.3f s beside the steps, held up updates for %.3f s\n",
           t->ckpt_dir, step, (double)took_ns / 1e9, (double)held_ns / 1e9);
}

stk_status train_save_begin(struct train *t, struct stk_error *err)
{
    bool alarm, written;
    if (t->o.checkpoint_sync) return train_save(t, &written, err);
    char *client = train_client_json(t);
    if (!client)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a checkpoint's description");
    uint32_t keep = (uint32_t)t->o.keep_checkpoints;
    stk_status st = stk_save_begin(t->r.e, t->ckpt_dir, client, keep);
    train_save_told(t); /* it has waited for the one before */
    if (st == STK_ERR_IO || st == STK_ERR_NOSPACE) { /* of that one, perhaps: then this one is not begun yet */
        char first[STK_ERROR_TEXT_MAX];
        snprintf(first, sizeof first, "%s", stk_error_text(t->r.e));
        st = stk_save_begin(t->r.e, t->ckpt_dir, client, keep);
        if (st == STK_OK || strcmp(first, stk_error_text(t->r.e)) != 0) train_alarm(t, first);
    }
    free(client);
    return judge(t, st, &alarm, err);
}

bool train_save_wait(struct train *t)
{
    pulse_phase(t->r.pulse, "writing a checkpoint", stk_save_bytes(t->r.e));
    stk_status st = stk_save_wait(t->r.e);
    pulse_phase(t->r.pulse, NULL, 0);
    train_save_told(t);
    if (st == STK_ERR_IO || st == STK_ERR_NOSPACE) train_alarm(t, stk_error_text(t->r.e));
    return st == STK_OK;
}
