/* trainer/options_check.c - options that contradict each other, or would change nothing (USE-01):
 * refused by name, before any file is opened; what cannot be known from options alone is a printed
 * line.
 *
 * Must not know: files, the machine. Application's thread, at start. */
#include "trainer/options_impl.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REFUSE(...) return stk_error_set(err, STK_ERR_CONFIG, 0, __VA_ARGS__)

bool options_number(const char *text, double *out)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !isfinite(v) || v < 0) return false;
    *out = v;
    return true;
}

bool options_measure(const struct run_opts *o, uint64_t *out_ns)
{
    double s = 0;
    if (strcmp(o->measure_drives, "auto") == 0) *out_ns = 0;
    else if (strcmp(o->measure_drives, "off") == 0) *out_ns = UINT64_MAX;
    else if (options_number(o->measure_drives, &s) && s >= 0.01 && s <= 600)
        *out_ns = (uint64_t)(s * 1e9);
    else return false;
    return true;
}

bool options_on_device(const struct run_opts *o, double *out)
{
    const char *text = o->optimizer_on_device;
    *out = text && strcmp(text, "auto") == 0 ? STK_ON_DEVICE_AUTO : 0;
    return !text || *out < 0 || (options_number(text, out) && *out <= 1);
}

static const char *const act_names[STK_ACT_N] = { "auto", "keep", "recompute", "host", "nvme" };

/* "NAME:COUNT" or "NAME" at *text, and what follows. */
static bool next_act(const char **text, uint32_t *act, uint32_t *count, bool *counted)
{
    size_t n = strcspn(*text, ":,");
    for (*act = 0; *act < STK_ACT_N; ++*act)
        if (strlen(act_names[*act]) == n && strncmp(*text, act_names[*act], n) == 0) break;
    *text += n;
    *counted = **text == ':';
    *count = 0;
    if (*counted) {
        char *end;
        if (!isdigit((unsigned char)*++*text)) return false;
        unsigned long v = strtoul(*text, &end, 10);
        *text = end;
        *count = (uint32_t)v;
        if (v == 0 || v > 1000000) return false;
    }
    if (**text == ',' && !(*text)[1]) return false;
    if (**text && *(*text)++ != ',') return false;
    return *act < STK_ACT_N && !(*counted && *act == STK_ACT_AUTO);
}

bool options_activations(const char *text, stk_config *c)
{
    uint32_t act = 0, count, before = 0;
    bool counted = true;
    memset(c->activations_last, 0, sizeof c->activations_last);
    c->activations = STK_ACT_AUTO;
    if (!text[0]) return false;
    while (*text) {
        if (!counted) return false; /* only the last one is for all others */
        if (!next_act(&text, &act, &count, &counted)) return false;
        if (act != STK_ACT_AUTO && act <= before) return false;
        if (counted) c->activations_last[act] = count;
        else c->activations = (stk_act)act;
        before = act;
    }
    return true;
}

static stk_status check_activations(const struct run_opts *o, bool *nvme, struct stk_error *err)
{
    stk_config c = { 0 };
    *nvme = false;
    if (!o->activations) return STK_OK;
    if (!options_activations(o->activations, &c))
        REFUSE("--activations: \"%s\" is none of auto, keep, recompute, host, nvme, nor a mix of them in "
               "this order, from the end of the model: keep:8,recompute keeps those of the last 8 "
               "blocks and recomputes the others; keep:8,recompute:4,nvme; keep:8 leaves the others "
               "to auto",
               o->activations);
    *nvme = c.activations == STK_ACT_NVME || c.activations_last[STK_ACT_NVME] > 0;
    if (*nvme && o->nvme.n == 0 && o->storage != STK_STORAGE_SIM && !o->machine)
        REFUSE("--activations %s needs a folder: add --nvme DIR", o->activations);
    return STK_OK;
}

static stk_status check_drives(const struct run_opts *o, struct stk_error *err)
{
    uint64_t ns;
    double sum = 0;
    if (!options_measure(o, &ns))
        REFUSE("--measure-drives: \"%s\" is none of auto, off, or seconds from 0.01 to 600",
               o->measure_drives);
    if (o->nvme.n == 0 && ns != 0 && run_opts_given(o, "measure-drives"))
        REFUSE("--measure-drives has no effect without --nvme DIR");
    if (o->nvme.n == 0 && !o->machine && o->nvme_buffer && o->storage != STK_STORAGE_SIM)
        REFUSE("--nvme-buffer has no effect without --nvme DIR");
    if (!run_opts_given(o, "nvme-weights")) return STK_OK;
    if (o->nvme_weights.n != o->nvme.n)
        REFUSE("--nvme-weights gives %u shares for %u folders of --nvme: one for each is needed",
               o->nvme_weights.n, o->nvme.n);
    for (uint32_t i = 0; i < o->nvme_weights.n; i++) {
        double w;
        if (!options_number(o->nvme_weights.item[i], &w))
            REFUSE("--nvme-weights: \"%s\" is no share, a number 0 or above",
                   o->nvme_weights.item[i]);
        sum += w;
    }
    if (!(sum > 0)) REFUSE("--nvme-weights: every share is 0: nothing could be stored");
    return STK_OK;
}

/* Another machine decides these. */
static stk_status check_machine(const struct run_opts *o, struct stk_error *err)
{
    static const char *const decided[] = { "device", "simulate", "storage", "sim-faults", "threads",
                                           "update-threads", "measure-drives" };
    for (size_t i = 0; o->machine && i < sizeof decided / sizeof decided[0]; i++)
        if (run_opts_given(o, decided[i]))
            REFUSE("--%s does not go with --machine, which decides it", decided[i]);
    return STK_OK;
}

static stk_status check_tiers(const struct run_opts *o, uint32_t verb, struct stk_error *err)
{
    bool params = o->params == STK_TIER_NVME, opt = o->optimizer_state == 2, grads = o->grads == 2,
         sim = o->storage == STK_STORAGE_SIM;
    bool simulate = run_opts_given(o, "simulate"), acts;
    STK_TRY(check_activations(o, &acts, err));
    if (o->nvme.n > STK_NVME_MAX)
        REFUSE("--nvme: %u folders; at most %d are used", o->nvme.n, STK_NVME_MAX);
    if (o->nvme.n == 0 && !sim && !o->machine && (params || opt || grads))
        REFUSE("--%s nvme needs a folder: add --nvme DIR", params ? "params"
                                                           : opt  ? "optimizer-state"
                                                                  : "grads");
    if (o->nvme.n == 0 && !sim && run_opts_given(o, "storage"))
        REFUSE("--storage has no effect without --nvme DIR");
    bool off = o->params == STK_TIER_HOST || o->params == STK_TIER_DEVICE;
    if (verb != FOR_EVAL) off = off && o->optimizer_state == 1 && o->grads == 1;
    if (o->nvme.n && off && !acts)
        REFUSE(
            "--nvme has no effect: no state is allowed to be there by the options that place it");
    if (o->durable && o->nvme.n == 0 && !sim)
        REFUSE("--durable keeps its steps on NVMe: add --nvme DIR");
    if (o->durable && (o->params == STK_TIER_HOST || o->params == STK_TIER_DEVICE))
        REFUSE("--durable needs the parameters on NVMe: leave --params at auto or give nvme");
    if (o->durable && o->optimizer_state == 1)
        REFUSE("--durable needs the optimizer state on NVMe: leave --optimizer-state at auto or "
               "give nvme");
    if (sim && !simulate)
        REFUSE("--storage sim keeps the disk in memory and needs --simulate SEED");
    if (o->sim_faults && !sim) REFUSE("--sim-faults has no effect without --storage sim");
    if (o->device == STK_DEVICE_SIM && !simulate)
        REFUSE("--device sim has modelled time and needs --simulate SEED");
    if (o->device == STK_DEVICE_CUDA && simulate)
        REFUSE("--device cuda keeps its own time and does not go with --simulate: use --device sim");
    double part;
    if (!options_on_device(o, &part))
        REFUSE("--optimizer-on-device: \"%s\" is neither auto nor a part of the parameters from 0 to 1",
               o->optimizer_on_device);
    if (o->device == STK_DEVICE_HOST && !o->machine && part > 0)
        REFUSE("--optimizer-on-device has no effect with --device host, which has no memory of its own");
    if (o->device == STK_DEVICE_HOST && !o->machine && run_opts_given(o, "device-memory"))
        REFUSE("--device-memory has no effect with --device host, which has no memory of its own: "
               "use --host-memory, or --device host:discrete");
    return STK_OK;
}

static stk_status check_sizes(const struct run_opts *o, struct stk_error *err)
{
    if (o->batch % o->micro_batch)
        REFUSE("--batch %" PRIu64 " is not a multiple of --micro-batch %" PRIu64, o->batch,
               o->micro_batch);
    if (o->chunk % 2048) REFUSE("--chunk %" PRIu64 " must be a multiple of 2048", o->chunk);
    if (o->dtype == STK_FP16 && o->act)
        REFUSE("--activation-dtype bf16 does not go with --dtype fp16: use f32, or --dtype bf16");
    return STK_OK;
}

static stk_status check_run(const struct run_opts *o, struct stk_error *err)
{
    bool steps = run_opts_given(o, "steps"), epochs = run_opts_given(o, "epochs");
    if (steps && epochs) REFUSE("--steps and --epochs contradict each other: give one");
    if (!steps && !epochs) REFUSE("--steps N or --epochs N is required: how long to train");
    if (steps && o->warmup > o->steps)
        REFUSE("--warmup %" PRIu64 " is longer than --steps %" PRIu64, o->warmup, o->steps);
    if (o->eval_every && !o->eval_data)
        REFUSE("--eval-every has no effect without --eval-data FILE");
    if (o->any_numerics && !o->resume) REFUSE("--any-numerics has no effect without --resume");
    if (o->discard && !o->out) REFUSE("--discard needs --out DIR, whose run left durable steps");
    if (run_opts_given(o, "loss-scale") && o->dtype != STK_FP16)
        REFUSE("--loss-scale has no effect with --dtype bf16");
    if (o->resume && !o->out) REFUSE("--resume needs --out DIR, where the checkpoints are");
    return STK_OK;
}

stk_status options_check(const struct run_opts *o, uint32_t verb, struct stk_error *err)
{
    STK_TRY(check_sizes(o, err));
    STK_TRY(check_machine(o, err));
    STK_TRY(check_tiers(o, verb, err));
    STK_TRY(check_drives(o, err));
    return verb == FOR_EVAL ? STK_OK : check_run(o, err);
}

void run_opts_idle(const struct run_opts *o, char *buf, size_t size_bytes)
{
    char *end = buf + size_bytes;
    buf[0] = '\0';
    if (o->device == STK_DEVICE_HOST && !o->machine && o->params == STK_TIER_DEVICE)
        buf += snprintf(
            buf, (size_t)(end - buf),
            "--params device: the device computes in host memory, this is the same as host\n");
    if (o->device == STK_DEVICE_HOST && !o->machine && o->activations &&
        strcmp(o->activations, "host") == 0)
        buf += snprintf(
            buf, (size_t)(end - buf),
            "--activations host: the device computes in host memory, this is the same as keep\n");
    if (o->batch == o->micro_batch && run_opts_given(o, "accumulate"))
        snprintf(buf, (size_t)(end - buf),
                 "--accumulate: one micro-batch a step, the order changes nothing\n");
}
