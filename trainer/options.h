/* trainer/options.h - the options of the verbs that run a model (train, plan, eval) as one table:
 * it drives the command line, the config file, --help, the run header and the README's table.
 *
 * A verb takes the rows whose `verbs` mask names it. All strings are owned by the struct
 * (run_opts_free). */
#ifndef TRAINER_OPTIONS_H
#define TRAINER_OPTIONS_H

#include "base/opts.h"
#include "engine/stoker.h"
#include "trainer/model.h"

enum { FOR_TRAIN = 1, FOR_EVAL = 2, FOR_PLAN = 4 };

enum schedule_kind { SCHEDULE_CONSTANT, SCHEDULE_LINEAR, SCHEDULE_COSINE };
const char *schedule_name(int kind);
const char *moments_name(int kind); /* of --moments */
enum progress_kind { PROGRESS_AUTO, PROGRESS_LINES, PROGRESS_NONE };

#define RUN_ROWS_MAX 96

struct run_opts {
    const char *config_file;
    const char *machine;
    const char *model, *data, *out, *eval_data, *log, *dump_gradients, *plan, *trace, *json,
        *logits;
    uint64_t steps, eval_every, seq, batch, micro_batch, warmup, checkpoint_every, keep_checkpoints,
        seed, sim_seed, sim_faults, durable;
    double epochs;
    uint64_t device_memory, host_memory, nvme_buffer, threads, update_threads, prefetch, chunk;
    double lr, weight_decay, beta1, beta2, eps, clip, loss_scale;
    int schedule, dtype, optimizer, moments, device, params, optimizer_state, grads, accumulate,
        update, act, matmul, storage, progress, checkpoint_sync, predict;
    struct opt_list freeze, nvme, nvme_weights;
    const char *measure_drives, *activations, *optimizer_on_device;
    bool resume, discard, save_final_state, dry_run, any_numerics, print_config;

    /* after parsing */
    struct opt_row rows[RUN_ROWS_MAX]; /* the verb's */
    uint32_t n_rows, verb;
    bool given[RUN_ROWS_MAX];

    /* set by train_durable.c before the engine is opened */
    char run_id[17]; /* of durable steps; "": none, or random */
    bool adopt;      /* what a dead process left under run_id is taken over */
};

/* Fills rows for the verb (for --help), without parsing. */
void run_opts_rows(struct run_opts *o, uint32_t verb);
/* Parses and refuses contradictions, each by the option's name (STK_ERR_CONFIG). */
stk_status run_opts_parse(struct run_opts *o, uint32_t verb, int argc, char **argv,
                          struct stk_error *err);
void run_opts_free(struct run_opts *o);
bool run_opts_given(const struct run_opts *o, const char *name);
/* The engine's and the model's configuration. Pointers into `o`. */
void run_opts_engine(const struct run_opts *o, stk_config *c);
void run_opts_model(const struct run_opts *o, struct model_opts *m);
/* Every option with its value, a line each. */
void run_opts_print(const struct run_opts *o);
/* Options that will change nothing here, one line each, into buf: "" if none. */
void run_opts_idle(const struct run_opts *o, char *buf, size_t size_bytes);

#endif
