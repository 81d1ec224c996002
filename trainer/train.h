/* trainer/train.h - a training run: what `stoker train` owns, and the parts it is made of.
 *
 * DATA. The windows of --seq tokens are visited in a seeded shuffle per epoch (formats/tokens.h,
 * token_order); `position` counts windows over all epochs and is the only data state: step k takes
 * the next --batch windows. A batch without any target (all masked) is passed over without a step.
 * The loss is the mean over the targets of the whole step.
 * --epochs N: steps = floor(windows * N / batch); a last incomplete batch is dropped.
 *
 * A CHECKPOINT's client object (engine/stoker.h, stk_save) holds position, the data's hash, seq,
 * batch, seed, the schedule, the counters and the model's config.json, so that a resumed run gives
 * the bits of an uninterrupted one and an export needs nothing else. Application's thread. */
#ifndef TRAINER_TRAIN_H
#define TRAINER_TRAIN_H

#include "trainer/forecast.h"
#include "trainer/report.h"
#include "trainer/run.h"
#include <jansson.h>

/* Durable steps of the run that OUT/run.json names (train_durable.c). */
struct train_left {
    char run_id[17];         /* "": run.json is not there */
    bool found, damaged;     /* a dead run left some */
    uint64_t step;           /* of the one found */
    json_t *client;          /* its client object */
    char *where;             /* a sentence's part: which, on which folders, how large; stk_free */
    char *folders[STK_NVME_MAX]; /* where they may lie; sys_free */
    uint32_t n_folders;
    char *away[STK_NVME_MAX]; /* named by run.json, cannot be looked into; sys_free */
    uint32_t n_away;
    uint64_t checkpoint_step; /* the newest, when both were there; 0: none */
    bool own;                /* this process writes under run_id */
    bool over;               /* they are not needed any more */
};

struct train {
    struct run_opts o;
    struct run r;
    struct token_order *order;
    struct tokens *eval_data;
    uint64_t n_windows, steps; /* steps: of the whole run */
    uint64_t step, position;   /* done so far */
    uint64_t updates, tokens_done, empty_batches, skips_printed;
    uint64_t *windows; /* [batch] of the step at hand */
    uint64_t step_targets;
    char *ckpt_dir;    /* --out/checkpoints; NULL without --out */
    bool had_out, had_ckpt_dir; /* were there before this run */
    bool trained;      /* steps may have been run */
    char alarm[STK_ERROR_TEXT_MAX]; /* what was said last */
    char what_is_left[400]; /* to go on from after an error, or what would have helped; "": nothing
                             * was begun */
    bool failed;       /* the run ended with an error: folders that stayed empty go */
    bool damaged;      /* with bytes that are not what was written */
    int out_lock;      /* --out, locked against another run; 0: not yet */
    char *resume_path; /* checkpoint to go on from; for sentences: or the durable step */
    bool resume_durable; /* it is one */
    struct train_left left;
    json_t *resume_client;
    uint64_t saved_step; /* newest complete checkpoint of this run; 0: none */
    uint64_t told_step;  /* newest written beside the steps that was told of */
    struct report report;
    struct forecast forecast;
};

/* train_open.c: everything that can be refused before anything is written, in the order cheap to
 * dear. */
stk_status train_open(struct train *t, struct stk_error *err);
/* Refuses a second run on --out; a folder that is not there yet is locked by a second call. */
stk_status train_lock_out(struct train *t, struct stk_error *err);
void train_close(struct train *t);
/* After run_seal: room on --out's disk, seen with what the swap files took. Prints warnings. */
stk_status train_check_room(const struct train *t, struct stk_error *err);

/* train_state.c */
stk_status
train_resume_find(struct train *t,
                  struct stk_error *err); /* before run_open: the newest checkpoint's manifest;
                                             `--matmul auto` becomes its choice */
stk_status train_resume_check(const struct train *t,
                              struct stk_error *err); /* after run_open: does it fit this run */
stk_status train_resume_load(struct train *t, struct stk_error *err); /* after run_seal */
/* The client object of a checkpoint or a durable step, free(); NULL: no memory. */
char *train_client_json(const struct train *t);
/* train_save.c */
/* Writes a checkpoint. A full or failing disk is an alarm and no error (CKP-37); *written says
 * which. */
stk_status train_save(struct train *t, bool *written, struct stk_error *err);
/* The same, or begins one beside the steps: as --checkpoint says. */
stk_status train_save_begin(struct train *t, struct stk_error *err);
/* Says it once when one is complete. */
void train_save_told(struct train *t);
/* [waits] For the one under way, if there is one. False: it failed (an alarm), or the engine has. */
bool train_save_wait(struct train *t);
/* After an error beside the training: a checkpoint of where the run is, without a word. False: not
 * possible. */
bool train_rescue(struct train *t);
/* After an error in training, or while a durable step was read, the engine is closed: fills
 * t->what_is_left. */
void train_tell_left(struct train *t);
/* How to go on without the durable steps: from which checkpoint, or anew. */
void train_say_without(const struct train *t, char *buf, size_t size);
stk_status train_export(struct train *t, struct stk_error *err);
stk_status train_dump_gradients(struct train *t, struct stk_error *err);
/* How `out` stands: refuses foreign files and finished models. */
stk_status train_check_out(const struct train *t, struct stk_error *err);
/* Removes checkpoints that a kill cut short, and names them. After train_lock_out. */
stk_status train_clean_out(const struct train *t, struct stk_error *err);

/* train_durable.c, in the order of a run. What a dead run of --out left: looked for; refused
 * without --resume or --discard. */
stk_status train_left_find(struct train *t, struct stk_error *err);
/* --resume: true if the durable step is the newer one; settles whether the store is taken over. */
stk_status train_left_choose(struct train *t, uint64_t checkpoint_step, bool have_checkpoint,
                             bool *taken, struct stk_error *err);
/* Whether train_left_discard will remove something. */
bool train_left_discards(const struct train *t);
/* --discard, when everything that could be refused was. */
stk_status train_left_discard(struct train *t, struct stk_error *err);
stk_status train_durable_name(struct train *t, struct stk_error *err);  /* before run_open */
/* run.json; after run_seal */
stk_status train_durable_begin(struct train *t, struct stk_error *err);
stk_status train_durable(struct train *t, struct stk_error *err); /* after a step: if due */
void train_durable_end(struct train *t);   /* the result lies elsewhere, whole and flushed */
void train_durable_close(struct train *t); /* after the engine is closed */
uint64_t train_durable_left(const struct train *t); /* the same; a step to go on from, 0: none */
/* To stderr; what was said last is not said at length again. */
void train_alarm(struct train *t, const char *what);

/* train.c */
stk_status train_run(struct train *t, struct stk_error *err);

#endif
