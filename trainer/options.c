/* trainer/options.c - the table of options of train, plan and eval, and what they mean to engine
 * and model.
 *
 * Owns: names, defaults, ranges, help. Contradictions are in options_check.c. Must not know: how a
 * run goes. Application's thread, at start. */
#include "trainer/options_impl.h"

#include <stdio.h>
#include <string.h>

static const char *const schedule_names[] = { "constant", "linear", "cosine", NULL };
const char *schedule_name(int kind) { return schedule_names[kind]; }
static const char *const dtype_names[] = { "bf16", "fp16", NULL };
static const char *const optimizer_names[] = { "adamw", "adam", NULL };
static const char *const moments_names[] = { "fp32", "bf16", "8bit", NULL };
const char *moments_name(int kind) { return moments_names[kind]; }
static const char *const device_names[] = { "host", "host:discrete", "sim", "cuda", NULL };
static const char *const params_names[] = { "auto", "device", "host", "nvme", NULL };
static const char *const state_names[] = { "auto", "host", "nvme", NULL };
static const char *const accumulate_names[] = { "layer", "micro", NULL };
static const char *const update_names[] = { "auto", "serial", "chase", "split", "speculate", NULL };
static const char *const act_dtype_names[] = { "f32", "bf16", NULL };
static const char *const matmul_names[] = { "auto", "f32", "bf16", NULL };
static const char *const checkpoint_names[] = { "async", "sync", NULL };
static const char *const storage_names[] = { "auto", "uring", "posix", "sim", NULL };
static const char *const predict_names[] = { "auto", "off", NULL };
static const char *const progress_names[] = { "auto", "lines", "none", NULL };

#define AT(field) offsetof(struct run_opts, field)
#define BIG 1e15
#define TRACE_BYTES (8u << 20) /* about 200,000 nodes: the last steps of a large model */

/* T: train and plan; E: eval too; otherwise by name. */
#define T (FOR_TRAIN | FOR_PLAN)
#define A (FOR_TRAIN | FOR_PLAN | FOR_EVAL)

static const struct run_row {
    uint32_t verbs;
    struct opt_row row;
} table[] = {
    { A,
      { "config", OPT_STRING, AT(config_file), .arg = "FILE",
        .help = "JSON object of these options; the command line wins" } },
    { A,
      { "model", OPT_STRING, AT(model), .arg = "DIR",
        .help = "Hugging Face folder: config.json and safetensors", .required = true } },
    { A,
      { "data", OPT_STRING, AT(data), .arg = "FILE",
        .help = "token file of `stoker prepare`, or .bin of uint16", .required = true } },
    { FOR_TRAIN,
      { "out", OPT_STRING, AT(out), .arg = "DIR",
        .help = "ends as a Hugging Face folder; checkpoints in DIR/checkpoints",
        .required = true } },
    { FOR_PLAN,
      { "out", OPT_STRING, AT(out), .arg = "DIR",
        .help = "where the run would write: its disk is checked" } },
    { T,
      { "steps", OPT_U64, AT(steps), .min = 1, .max = BIG, .arg = "N",
        .help = "optimizer steps of the whole run, resumed ones included" } },
    { T,
      { "epochs", OPT_DOUBLE, AT(epochs), .min = 1e-6, .max = 1e9, .arg = "N",
        .help = "instead of --steps: passes over the data, rounded down to whole batches" } },
    { T,
      { "eval-data", OPT_STRING, AT(eval_data), .arg = "FILE",
        .help = "held-out token file, evaluated at the end of the run" } },
    { T,
      { "eval-every", OPT_U64, AT(eval_every), .min = 1, .max = BIG, .arg = "N",
        .help = "and every N steps" } },
    { A,
      { "seq", OPT_U64, AT(seq), "512", 2, 1 << 30, .arg = "N", .help = "tokens of a sequence" } },
    { A,
      { "batch", OPT_U64, AT(batch), "8", 1, 1 << 24, .arg = "N",
        .help = "sequences of an optimizer step (eval: of a pass)" } },
    { A,
      { "micro-batch", OPT_U64, AT(micro_batch), "2", 1, 1 << 20, .arg = "N",
        .help = "sequences computed together" } },
    { T, { "lr", OPT_DOUBLE, AT(lr), "1e-5", 0, 1e3, .arg = "X", .help = "peak learning rate" } },
    { T,
      { "schedule", OPT_CHOICE, AT(schedule), "constant", .choices = schedule_names, .arg = "NAME",
        .help = "of the learning rate after the warm-up" } },
    { T,
      { "warmup", OPT_U64, AT(warmup), "0", 0, BIG, .arg = "N",
        .help = "steps: step k of them uses lr * k / N" } },
    { T,
      { "weight-decay", OPT_DOUBLE, AT(weight_decay), "0.01", 0, 1e3, .arg = "X",
        .help = "on every tensor" } },
    { T,
      { "beta1", OPT_DOUBLE, AT(beta1), "0.9", 0, 0.9999999999, .arg = "X", .help = "of Adam" } },
    { T,
      { "beta2", OPT_DOUBLE, AT(beta2), "0.999", 0, 0.9999999999, .arg = "X", .help = "of Adam" } },
    { T, { "eps", OPT_DOUBLE, AT(eps), "1e-8", 1e-30, 1, .arg = "X", .help = "of Adam" } },
    { T,
      { "clip", OPT_DOUBLE, AT(clip), "1.0", 0, 1e30, .arg = "X",
        .help = "limit of the global gradient norm; 0: off" } },
    { T,
      { "seed", OPT_U64, AT(seed), "0", 0, BIG, .arg = "N", .help = "of the order of the data" } },
    { A,
      { "dtype", OPT_CHOICE, AT(dtype), "bf16", .choices = dtype_names, .arg = "NAME",
        .help = "of parameters and gradients; the master is fp32" } },
    { T,
      { "optimizer", OPT_CHOICE, AT(optimizer), "adamw", .choices = optimizer_names, .arg = "NAME",
        .help = "adam: weight decay as L2" } },
    { T,
      { "moments", OPT_CHOICE, AT(moments), "fp32", .choices = moments_names, .arg = "NAME",
        .help = "of Adam; bf16, 8bit: inexact, 4 and 2.1 bytes a parameter instead of 8" } },
    { T,
      { "freeze", OPT_LIST, AT(freeze), .arg = "PATTERN",
        .help = "tensors that are not trained, e.g. 'model.embed*'; may be repeated" } },
    { A,
      { "device", OPT_CHOICE, AT(device), "host", .choices = device_names, .arg = "NAME",
        .help = "where the model computes" } },
    { A,
      { "device-memory", OPT_SIZE, AT(device_memory), .min = 1, .max = 1e18, .arg = "SIZE",
        .help = "cap; default: what is free" } },
    { A,
      { "host-memory", OPT_SIZE, AT(host_memory), .min = 1, .max = 1e18, .arg = "SIZE",
        .help = "cap of the whole process; default: what is free" } },
    { A, { "nvme", OPT_LIST, AT(nvme), .arg = "DIR", .help = "folders for swapped state" } },
    { A,
      { "nvme-weights", OPT_LIST, AT(nvme_weights), .arg = "A,B",
        .help = "share of each folder; default: as fast as its drive is measured" } },
    { A,
      { "measure-drives", OPT_STRING, AT(measure_drives), "auto", .arg = "WHEN",
        .help = "at start: off, SECONDS for each drive, or auto: one when it pays" } },
    { T,
      { "nvme-buffer", OPT_SIZE, AT(nvme_buffer), .min = 1, .max = 1e18, .arg = "SIZE",
        .help = "memory for state read ahead of the update and written behind it" } },
    { A,
      { "params", OPT_CHOICE, AT(params), "auto", .choices = params_names, .arg = "TIER",
        .help = "home of the parameters; device: all cached there" } },
    { T,
      { "optimizer-state", OPT_CHOICE, AT(optimizer_state), "auto", .choices = state_names,
        .arg = "TIER", .help = "home of master and moments" } },
    { T,
      { "optimizer-on-device", OPT_STRING, AT(optimizer_on_device), "auto", .arg = "X",
        .help = "part of the parameters, 0 to 1, whose state stays in device memory; auto: what a card has left" } },
    { T,
      { "grads", OPT_CHOICE, AT(grads), "auto", .choices = state_names, .arg = "TIER",
        .help = "home of the gradients" } },
    { T,
      { "activations", OPT_STRING, AT(activations), "auto", .arg = "HOW",
        .help = "keep, recompute, host, nvme; keep:8,recompute: the last 8 blocks keep, the others recompute" } },
    { T,
      { "accumulate", OPT_CHOICE, AT(accumulate), "layer", .choices = accumulate_names,
        .arg = "NAME", .help = "order of micro-batches: layer by layer, or each whole" } },
    { T,
      { "update", OPT_CHOICE, AT(update), "auto", .choices = update_names, .arg = "NAME",
        .help = "serial: after the step; chase: under the next; split: its parameters first; speculate: in backward" } },
    { T,
      { "activation-dtype", OPT_CHOICE, AT(act), NULL, .choices = act_dtype_names, .arg = "NAME",
        .help = "default: bf16, with --dtype fp16 f32" } },
    { FOR_EVAL,
      { "activation-dtype", OPT_CHOICE, AT(act), "f32", .choices = act_dtype_names, .arg = "NAME",
        .help = "of the activations" } },
    { T,
      { "matmul", OPT_CHOICE, AT(matmul), "auto", .choices = matmul_names, .arg = "NAME",
        .help = "dtype that matrix products read" } },
    { FOR_EVAL,
      { "matmul", OPT_CHOICE, AT(matmul), "f32", .choices = matmul_names, .arg = "NAME",
        .help = "dtype that matrix products read" } },
    { T,
      { "checkpoint-every", OPT_U64, AT(checkpoint_every), .min = 1, .max = BIG, .arg = "N",
        .help = "steps" } },
    { T,
      { "checkpoint", OPT_CHOICE, AT(checkpoint_sync), "async", .choices = checkpoint_names,
        .arg = "NAME", .help = "async: beside the next steps; sync: the run waits" } },
    { T,
      { "keep-checkpoints", OPT_U64, AT(keep_checkpoints), "2", 1, 1e6, .arg = "K",
        .help = "newest ones that stay" } },
    { T,
      { "durable", OPT_U64, AT(durable), .min = 1, .max = BIG, .arg = "N",
        .help = "every N steps: a state on --nvme that a kill cannot take; default: never" } },
    { T,
      { "resume", OPT_FLAG, AT(resume),
        .help = "go on from the newest checkpoint of --out or durable step" } },
    { T,
      { "discard", OPT_FLAG, AT(discard),
        .help = "drop the durable steps that a dead run of --out left" } },
    { T,
      { "any-numerics", OPT_FLAG, AT(any_numerics),
        .help = "resume a run whose arithmetic was another" } },
    { T,
      { "save-final-state", OPT_FLAG, AT(save_final_state),
        .help = "write a checkpoint at the end too" } },
    { FOR_TRAIN,
      { "log", OPT_STRING, AT(log), .arg = "FILE",
        .help = "a JSON line per step; --resume appends" } },
    { A,
      { "threads", OPT_U64, AT(threads), .min = 1, .max = 4096, .arg = "N",
        .help = "of the host device; default: the machine's" } },
    { T,
      { "update-threads", OPT_U64, AT(update_threads), .min = 1, .max = 4096, .arg = "N",
        .help = "of Adam; default: the machine's" } },
    { A,
      { "prefetch", OPT_U64, AT(prefetch), .min = 0, .max = 64, .arg = "N",
        .help = "blocks fetched ahead; default: 2" } },
    { FOR_TRAIN,
      { "dump-gradients", OPT_STRING, AT(dump_gradients), .arg = "DIR",
        .help = "a safetensors of fp32 gradients per step" } },
    { A,
      { "print-config", OPT_FLAG, AT(print_config),
        .help = "print every option's value and stop" } },
    { FOR_TRAIN | FOR_EVAL,
      { "dry-run", OPT_FLAG, AT(dry_run), .help = "print memory table and plan, run nothing" } },
    { T,
      { "plan", OPT_STRING, AT(plan), .arg = "FILE", .help = "write the plan of a step as text" } },
    { T,
      { "trace", OPT_STRING, AT(trace), .arg = "FILE",
        .help = "Chrome/Perfetto trace: train: of what the last steps did; plan: of the plan" } },
    { FOR_PLAN,
      { "machine", OPT_STRING, AT(machine), .arg = "NAME",
        .help = "plan for another machine: a name of share/machines, or a file" } },
    { FOR_PLAN,
      { "json", OPT_STRING, AT(json), .arg = "FILE",
        .help = "write the prediction as a JSON object" } },
    { FOR_TRAIN,
      { "predict", OPT_CHOICE, AT(predict), "auto", .choices = predict_names, .arg = "NAME",
        .help = "measure this machine for some seconds and say what a step will take" } },
    { T,
      { "loss-scale", OPT_DOUBLE, AT(loss_scale), .min = 1e-3, .max = 1e30, .arg = "X",
        .help = "first value, with --dtype fp16; default 65536" } },
    { A,
      { "storage", OPT_CHOICE, AT(storage), "auto", .choices = storage_names, .arg = "NAME",
        .help = "how --nvme is accessed; sim: in memory, with --simulate" } },
    { A,
      { "simulate", OPT_U64, AT(sim_seed), .min = 0, .max = BIG, .arg = "SEED",
        .help = "one thread, virtual time, order by seed: for tests" } },
    { A,
      { "sim-faults", OPT_U64, AT(sim_faults), .min = 0, .max = 1e6, .arg = "PPM",
        .help = "with --storage sim: faults of each kind per million requests" } },
    { A,
      { "chunk", OPT_U64, AT(chunk), .min = 2048, .max = 1 << 28, .arg = "N",
        .help = "parameters that move together; default 524288; for tests" } },
    { FOR_TRAIN,
      { "progress", OPT_CHOICE, AT(progress), "auto", .choices = progress_names, .arg = "NAME",
        .help = "lines: every step; auto: at most one a second off a terminal" } },
    { FOR_EVAL,
      { "json", OPT_STRING, AT(json), .arg = "FILE",
        .help = "write the result as a JSON object" } },
    { FOR_EVAL,
      { "logits", OPT_STRING, AT(logits), .arg = "FILE",
        .help = "write logits [windows, seq, vocab] as safetensors, F32" } },
};

void run_opts_rows(struct run_opts *o, uint32_t verb)
{
    memset(o, 0, sizeof *o);
    o->verb = verb;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (!(table[i].verbs & verb)) continue;
        STK_ASSERT(o->n_rows < RUN_ROWS_MAX);
        o->rows[o->n_rows++] = table[i].row;
    }
}

stk_status run_opts_parse(struct run_opts *o, uint32_t verb, int argc, char **argv,
                          struct stk_error *err)
{
    run_opts_rows(o, verb);
    STK_TRY(opts_parse(o->rows, o->n_rows, argc, argv, o, o->given, NULL, err));
    if (!run_opts_given(o, "activation-dtype") && verb != FOR_EVAL)
        o->act = o->dtype == STK_BF16 ? 1 : 0;
    stk_status st = options_check(o, verb, err);
    if (st != STK_OK) run_opts_free(o);
    return st;
}

void run_opts_free(struct run_opts *o) { opts_free(o->rows, o->n_rows, o); }

void run_opts_print(const struct run_opts *o)
{
    char text[4096];
    for (uint32_t i = 0; i < o->n_rows; i++) {
        opts_value_text(&o->rows[i], o, text, sizeof text);
        printf("%-18s %s%s\n", o->rows[i].name, text[0] ? text : "-",
               o->given[i] ? "" : "  (default)");
    }
}

bool run_opts_given(const struct run_opts *o, const char *name)
{
    for (uint32_t i = 0; i < o->n_rows; i++)
        if (strcmp(o->rows[i].name, name) == 0) return o->given[i];
    return false;
}

void run_opts_engine(const struct run_opts *o, stk_config *c)
{
    static const stk_tier state[] = { STK_TIER_AUTO, STK_TIER_HOST, STK_TIER_NVME };
    stk_config_init(c, sizeof *c);
    c->device = (stk_device_kind)o->device;
    c->device_memory = o->device_memory;
    c->host_memory = o->host_memory;
    for (uint32_t i = 0; i < o->nvme.n && i < STK_NVME_MAX; i++) c->nvme[i] = o->nvme.item[i];
    for (uint32_t i = 0; i < o->nvme_weights.n && i < STK_NVME_MAX; i++)
        options_number(o->nvme_weights.item[i], &c->nvme_weights[i]);
    options_measure(o, &c->measure_ns);
    c->nvme_buffer = o->nvme_buffer;
    c->trace_bytes = o->trace ? TRACE_BYTES : 0;
    c->params = (stk_tier)o->params;
    c->optimizer_state = state[o->optimizer_state];
    c->grads = state[o->grads];
    options_on_device(o, &c->optimizer_on_device);
    if (o->activations) options_activations(o->activations, c); /* checked when it was parsed */
    c->accumulate = (stk_accumulate)o->accumulate;
    c->update = (stk_update)o->update;
    c->dtype = (stk_dtype)o->dtype;
    c->optimizer = (stk_optimizer)o->optimizer;
    c->moments = (stk_moments)o->moments;
    c->moments_seed = o->seed; /* --resume insists on the same */
    if (o->verb != FOR_EVAL) {
        c->beta1 = o->beta1;
        c->beta2 = o->beta2;
        c->eps = o->eps;
        c->weight_decay = o->weight_decay;
        c->clip = o->clip;
    }
    c->micro_batches = (uint32_t)(o->batch / o->micro_batch);
    c->prefetch = run_opts_given(o, "prefetch") ? (uint32_t)o->prefetch : UINT32_MAX;
    c->compute_threads = (uint32_t)o->threads;
    c->update_threads = (uint32_t)o->update_threads;
    c->matmul = (stk_matmul)o->matmul;
    c->storage = (stk_storage)o->storage;
    c->simulate = run_opts_given(o, "simulate");
    c->seed = o->sim_seed;
    c->chunk_elems = (uint32_t)o->chunk;
    c->loss_scale = o->loss_scale;
    c->durable = o->durable > 0 || o->adopt;
    c->adopt = o->adopt;
    memcpy(c->run_id, o->run_id, sizeof c->run_id);
}

void run_opts_model(const struct run_opts *o, struct model_opts *m)
{
    *m = (struct model_opts){ .seq = (uint32_t)o->seq,
                              .sequences = (uint32_t)o->micro_batch,
                              .n_micro = (uint32_t)(o->batch / o->micro_batch),
                              .act = o->act ? OPS_BF16 : OPS_F32,
                              .param = o->dtype == STK_BF16 ? OPS_BF16 : OPS_FP16,
                              .freeze = o->freeze.item,
                              .n_freeze = o->freeze.n };
}
