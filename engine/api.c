/* engine/api.c - opening, describing and closing an engine; small questions. Application's thread.
 *
 * Owns the engine object and the order in which its parts are opened and closed. Must not know
 * plans or chunks. */
#include "engine/durable.h"
#include "engine/machine.h"
#include "engine/save.h"
#include "engine/spec.h"
#include "engine/twin.h"
#include "base/sys.h"
#include "offload/adam_device.h"
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *stk_version(void) { return "0.1.0"; }
void stk_free(void *p) { sys_free(p); }

void stk_config_init(stk_config *c, size_t size)
{
    stk_config d = { 0 };
    d.size = size < sizeof d ? size : sizeof d;
    d.beta1 = 0.9;
    d.beta2 = 0.999;
    d.eps = 1e-8;
    d.weight_decay = 0.01;
    d.clip = 1.0;
    d.micro_batches = 1;
    d.prefetch = d.split_blocks = UINT32_MAX;
    d.optimizer_on_device = STK_ON_DEVICE_AUTO;
    memcpy(c, &d, d.size);
}

void eng_note(stk_engine *e, const char *fmt, ...)
{
    char line[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    if (e->n_notes < sizeof e->notes / sizeof *e->notes &&
        (e->notes[e->n_notes] = sys_strdup(line)))
        e->n_notes++;
}

void eng_notes_cut(stk_engine *e, uint32_t n)
{
    while (e->n_notes > n) sys_free(e->notes[--e->n_notes]);
}

enum eng_state eng_state(const stk_engine *e) { return getpid() == e->pid ? e->state : ENG_FORKED; }

stk_status eng_refuse_state(stk_engine *e, const char *call, const char *expected)
{
    if (eng_state(e) == ENG_FORKED)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "%s: the engine was opened by process %d; a child of fork cannot use "
                             "it: open another one here",
                             call, (int)e->pid);
    static const char *const names[] = { "being described",      "planned without memory (dry)",
                                         "between steps",        "inside a step",
                                         "inside an evaluation", "failed" };
    if (e->state == ENG_FAILED && e->fail.code != STK_OK)
        return stk_error_set(
            &e->err, STK_ERR_STATE, 0,
            "%s: the engine has failed (%s); close it and go on from what was saved", call,
            e->fail.text);
    return stk_error_set(&e->err, STK_ERR_STATE, 0, "%s is allowed %s; the engine is %s", call,
                         expected, names[e->state]);
}

/* Choices are indices into tables: one that this version does not know is refused, never taken for
 * another. */
static stk_status check_choices(stk_engine *e)
{
    const stk_config *c = &e->cfg;
    const struct { const char *name; int value, last;
    } choices[] = {
        { "device", (int)c->device, STK_DEVICE_CUDA },
        { "params", (int)c->params, STK_TIER_NVME },
        { "optimizer_state", (int)c->optimizer_state, STK_TIER_NVME },
        { "grads", (int)c->grads, STK_TIER_NVME },
        { "activations", (int)c->activations, STK_ACT_NVME },
        { "accumulate", (int)c->accumulate, STK_ACCUMULATE_MICRO },
        { "update", (int)c->update, STK_UPDATE_SPECULATE },
        { "optimizer", (int)c->optimizer, STK_ADAM },
        { "moments", (int)c->moments, STK_MOMENTS_8BIT },
        { "matmul", (int)c->matmul, STK_MATMUL_BF16 },
        { "storage", (int)c->storage, STK_STORAGE_SIM },
    };
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        if (choices[i].value < 0 || choices[i].value > choices[i].last)
            return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                                 "%s is %d: this version knows 0 to %d (engine/stoker.h)",
                                 choices[i].name, choices[i].value, choices[i].last);
    return STK_OK;
}

static stk_status check_durable(stk_engine *e)
{
    const stk_config *c = &e->cfg;
    size_t id = strnlen(c->run_id, sizeof c->run_id);
    if (id > 0 && (id != 16 || strspn(c->run_id, "0123456789abcdef") != 16))
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "run_id must be 16 of 0-9a-f, or empty; it is \"%.17s\"", c->run_id);
    if (c->adopt && (!c->durable || id == 0))
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "adopt takes over the durable steps of a run: it needs durable, and "
                             "the run_id they were written under");
    if (!c->durable) return STK_OK;
    if (e->n_paths == 0 && c->storage != STK_STORAGE_SIM)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "durable steps lie on NVMe: give a folder for them (--nvme DIR)");
    const struct { const char *what; stk_tier tier;
    } must[] = { { "params", c->params }, { "optimizer-state", c->optimizer_state } };
    for (int i = 0; i < 2; i++)
        if (must[i].tier != STK_TIER_AUTO && must[i].tier != STK_TIER_NVME)
            return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                                 "durable steps need the parameters and the optimizer state on "
                                 "NVMe: --%s must be auto or nvme, or leave durable steps out "
                                 "(--durable)",
                                 must[i].what);
    return STK_OK;
}

static stk_status check_range(stk_engine *e)
{
    const stk_config *c = &e->cfg;
    struct stk_error *err = &e->err;
    if (c->micro_batches == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "micro_batches is 0: at least one is needed");
    if (!(c->beta1 >= 0 && c->beta1 < 1) || !(c->beta2 >= 0 && c->beta2 < 1))
        return stk_error_set(err, STK_ERR_CONFIG, 0, "beta1 %g and beta2 %g must be in [0, 1)",
                             c->beta1, c->beta2);
    if (!(c->eps > 0))
        return stk_error_set(err, STK_ERR_CONFIG, 0, "eps %g must be above 0", c->eps);
    if (!(c->clip >= 0))
        return stk_error_set(err, STK_ERR_CONFIG, 0, "clip %g must be 0 (off) or above", c->clip);
    if (c->dtype != STK_BF16 && c->dtype != STK_FP16)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "dtype must be bf16 or fp16: the master is always fp32");
    if (!(c->optimizer_on_device <= 1) || (c->optimizer_on_device < 0 && c->optimizer_on_device != STK_ON_DEVICE_AUTO))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "optimizer_on_device %g must be a fraction of the parameters, 0 (none) to 1, or "
                             "-1 (auto)",
                             c->optimizer_on_device);
    if (c->chunk_elems % 2048)
        return stk_error_set(
            err, STK_ERR_CONFIG, 0,
            "chunk_elems %u must be a multiple of 2048 (4 KiB of 16-bit parameters)",
            c->chunk_elems);
    if (c->device == STK_DEVICE_SIM && !c->simulate)
        return stk_error_set(
            err, STK_ERR_CONFIG, 0,
            "the sim device has modelled time: it needs simulated execution (simulate)");
    if (c->device == STK_DEVICE_CUDA && c->simulate)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "the cuda device keeps its own time: it does not go with simulated execution "
                             "(simulate)");
    STK_TRY(check_durable(e));
    if (!c->own_order) return STK_OK;
    if (c->own_visits_max == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "own_order needs own_visits_max, the most visits of a step; it is 0");
    if (c->own_held_max == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "own_order needs own_held_max, the most blocks held at once; it is 0");
    if (c->device != STK_DEVICE_HOST)
        return stk_error_set(
            err, STK_ERR_UNSUPPORTED, 0,
            "own_order needs a device that reads host memory in place: device host");
    return STK_OK;
}

/* Another machine: its device is modelled, its drives are names. */
static stk_status use_machine(stk_engine *e)
{
    stk_config *c = &e->cfg;
    const stk_machine *m = c->machine;
    if (!m) return STK_OK;
    if (m->device_memory == 0 && c->device_memory == 0)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "machine %s: device_memory_bytes is not given: say how much its device "
                             "has (--device-memory)",
                             m->name);
    if (!(m->flops_per_s > 0) || !(m->device_bytes_per_s > 0) || !(m->copy_in_bytes_per_s > 0) ||
        !(m->copy_out_bytes_per_s > 0))
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "machine %s: a machine to plan for needs flops_per_s, "
                             "device_bytes_per_s, copy_in_bytes_per_s and copy_out_bytes_per_s",
                             m->name);
    if (m->n_drives > STK_NVME_MAX)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "machine %s: n_drives is %u, and there can be %d at most", m->name,
                             m->n_drives, STK_NVME_MAX);
    if (c->device_memory == 0) c->device_memory = m->device_memory; /* there to be used */
    c->device = STK_DEVICE_SIM;
    c->simulate = true;
    c->matmul = c->matmul == STK_MATMUL_AUTO ? STK_MATMUL_BF16 : c->matmul;
    c->storage = m->n_drives ? STK_STORAGE_SIM : STK_STORAGE_AUTO;
    c->sim_disk = NULL;
    return STK_OK;
}

static stk_status copy_config(stk_engine *e, const stk_config *c)
{
    stk_config_init(&e->cfg, sizeof e->cfg);
    memcpy(&e->cfg, c, c->size < sizeof e->cfg ? c->size : sizeof e->cfg);
    if (!e->cfg.chunk_elems) e->cfg.chunk_elems = CHUNK_ELEMS_DEFAULT;
    e->loss_scale = 1.0;
    if (e->cfg.dtype == STK_FP16)
        e->loss_scale = e->cfg.loss_scale > 0 ? e->cfg.loss_scale : 65536.0;
    if (!e->cfg.skip_limit) e->cfg.skip_limit = 50;
    STK_TRY(use_machine(e));
    for (uint32_t i = 0; i < STK_NVME_MAX && c->nvme[i]; i++) {
        if (!(e->paths[i] = sys_strdup(c->nvme[i])))
            return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory");
        e->n_paths++;
    }
    const stk_machine *m = e->cfg.machine;
    for (uint32_t i = 0; m && (i == 0 ? e->n_paths == 0 : e->n_paths == i) && i < m->n_drives; i++) {
        if (!(e->paths[i] = sys_format("drive%u", i)))
            return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory");
        e->n_paths++;
    }
    e->client_numerics = sys_strdup(c->client_numerics ? c->client_numerics : "");
    return e->client_numerics ? STK_OK : stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory");
}

static struct cores_ask cores_ask_of(const stk_engine *e)
{
    const stk_config *c = &e->cfg;
    return (struct cores_ask){ .compute = c->compute_threads,
                               .update = c->update_threads,
                               .on_host = c->device != STK_DEVICE_SIM,
                               .nvme = e->n_paths > 0 };
}

/* In simulation the machine at hand has one node, and is asked only for what is not given. */
static stk_status divide_cores(stk_engine *e)
{
    struct cores_ask ask = cores_ask_of(e);
    if (!e->cfg.simulate || !ask.compute || !ask.update) {
        STK_TRY(topology_open("", &e->topology, &e->err));
        cores_divide(e->topology, &ask, &e->cores);
    } else {
        e->cores = (struct cores){ .compute = ask.compute, .update = ask.update, .n_nodes = 1 };
    }
    if (!e->cfg.simulate) return STK_OK;
    e->cores.n_nodes = e->cores.n_teams = 1;
    e->cores.members[0] = e->cores.update;
    return STK_OK;
}

static void note_cores(stk_engine *e)
{
    struct cores_ask ask = cores_ask_of(e);
    char text[320];
    if (!e->topology) return;
    cores_text(&e->cores, &ask, e->topology, text, sizeof text);
    eng_note(e, "cores: %s", text);
}

static stk_status open_machine(stk_engine *e)
{
    const stk_config *c = &e->cfg;
    struct stk_error *err = &e->err;
    STK_TRY(c->simulate ? exec_open_sim(c->seed, &e->ex, err) : exec_open_threads(&e->ex, err));
    STK_TRY(exec_lane_open(e->ex, "engine", &e->lane, err));
    exec_event_init(e->ex, &e->visit_event);
    exec_event_init(e->ex, &e->run_event);
    exec_event_init(e->ex, &e->update_event);
    exec_event_init(e->ex, &e->wait_event);
    exec_task_init(&e->pump_task, run_pump, e);
    STK_TRY(divide_cores(e));
    static const enum dev_kind kinds[] = { DEV_HOST, DEV_HOST_DISCRETE, DEV_SIM, DEV_CUDA };
    struct dev_model model;
    if (c->machine) model = machine_model(c->machine);
    static const enum dev_matmul products[] = { DEV_MATMUL_AUTO, DEV_MATMUL_F32, DEV_MATMUL_BF16 };
    struct mem_limits lim;
    mem_limits_read("", &lim);
    /* A device without a given cap has what is free, which the card knows; the host kinds share the
     * host's memory: half of it. */
    bool shares = c->device == STK_DEVICE_HOST_DISCRETE || c->device == STK_DEVICE_SIM;
    uint64_t cap = c->device_memory || !shares ? c->device_memory : lim.available_bytes / 2;
    struct dev_cfg dc = { .kind = kinds[c->device],
                          .ex = e->ex,
                          .memory_bytes = cap,
                          .compute_threads = e->cores.compute,
                          .matmul = products[c->matmul],
                          .seed = c->seed,
                          .poison = c->poison,
                          .model = c->machine ? &model : c->sim_model,
                          .adam = adam_device_run,
                          .plan_only = c->machine != NULL };
    STK_TRY(dev_open(&dc, &e->dev, err));
    dev_caps_read(e->dev, &e->caps);
    e->device_limit = e->caps.memory_bytes;
    STK_TRY(dev_stream_open(e->dev, "compute", 0, &e->compute, err));
    STK_TRY(dev_stream_open(e->dev, "copy-in", 0, &e->copy_in, err));
    STK_TRY(dev_stream_open(e->dev, "copy-out", 0, &e->copy_out, err));
    for (int i = 0; i < ENG_CASTS; i++)
        STK_TRY(dev_stream_open(e->dev, i ? "cast 1" : "cast 0", 0, &e->cast[i], err));
    if (!e->caps.host_in_place) STK_TRY(dev_stream_open(e->dev, "update", 0, &e->update, err));
    e->adam = adam_pick(NULL);
    eng_note(e, "device: %s", e->caps.numerics);
    eng_note(e, "update: %s", e->adam->name);
    note_cores(e);
    return mem_open(&e->mem, err);
}

stk_status stk_open(const stk_config *c, stk_engine **out)
{
    stk_engine *e = *out = sys_calloc(1, sizeof *e);
    if (!e) return STK_ERR_NOMEM;
    e->pid = getpid();
    stk_status st = copy_config(e, c);
    if (st == STK_OK) st = check_choices(e);
    if (st == STK_OK) st = check_range(e);
    if (st == STK_OK) st = open_machine(e);
    if (st != STK_OK) e->state = ENG_FAILED;
    return st;
}

/* Engine lane: nothing new begins. What is in flight completes into a run that is over. */
static void stop_run(void *engine)
{
    stk_engine *e = engine;
    e->run.active = false;
    exec_event_set(&e->run_event);
}

#define CLOSE_WAIT_NS (30ull * 1000000000u) /* for a drive that does not answer */

/* Everything in flight ends before anything is freed: buffers belong to operations until then
 * (INV-3). A run may be half done: the application left in the middle of a step. */
static void quiesce(stk_engine *e)
{
    struct stk_error ignored = { 0 };
    if (e->lane && e->run.plan) {
        exec_event_reset(&e->run_event);
        exec_task_init(&e->stop_task, stop_run, e);
        exec_post(e->lane, &e->stop_task);
        exec_event_wait(&e->run_event, UINT64_MAX, &ignored);
    }
    if (e->compute) dev_sync(e->compute, &ignored);
    if (e->copy_in) dev_sync(e->copy_in, &ignored);
    if (e->copy_out) dev_sync(e->copy_out, &ignored);
    if (e->update) dev_sync(e->update, &ignored);
    for (int i = 0; i < ENG_CASTS; i++)
        if (e->cast[i]) dev_sync(e->cast[i], &ignored);
    /* what has stalled already is not waited for as long again */
    uint64_t patience =
        e->cfg.stall_ns && e->cfg.stall_ns < CLOSE_WAIT_NS ? e->cfg.stall_ns : CLOSE_WAIT_NS;
    uint64_t deadline = e->ex ? exec_now_ns(e->ex) + patience : 0;
    durable_quiesce(e, deadline);
    save_quiesce(e, deadline);
    if (e->store) store_drain(e->store, deadline, &ignored);
    if (e->io) io_drain(e->io, deadline, &ignored);
}

static void free_description(stk_engine *e)
{
    for (uint32_t i = 0; i < e->n_blocks; i++) {
        for (uint32_t k = 0; k < e->blocks[i].n_tensors; k++)
            sys_free((char *)(uintptr_t)e->blocks[i].tensors[k].name);
        sys_free(e->blocks[i].tensors);
        sys_free(e->blocks[i].name);
    }
    sys_free(e->blocks);
    sys_free(e->places);
    sys_free(e->reserves);
    for (uint32_t i = 0; i < e->n_notes; i++) sys_free(e->notes[i]);
    for (uint32_t i = 0; i < e->n_paths; i++) sys_free(e->paths[i]);
    sys_free(e->client_numerics);
}

void stk_close(stk_engine *e) { (void)stk_close_left(e, NULL); }

stk_status stk_close_left(stk_engine *e, char **left)
{
    struct stk_error why = { 0 };
    if (left) *left = NULL;
    /* A child of fork has neither the threads nor the memory; the files are its parent's. */
    if (!e || eng_state(e) == ENG_FORKED) return STK_OK;
    quiesce(e);
    for (uint32_t k = 0; k < CORES_TEAMS_MAX; k++) exec_team_close(e->team[k]);
    dev_stream_close(e->compute);
    dev_stream_close(e->copy_in);
    dev_stream_close(e->copy_out);
    dev_stream_close(e->update);
    for (int i = 0; i < ENG_CASTS; i++) dev_stream_close(e->cast[i]);
    io_stop(e->io); /* a transfer that did not end in time must not find the store gone */
    stk_status st = store_close_left(e->store, &why);
    io_close(e->io);
    if (e->save.lane) exec_lane_close(e->save.lane);
    if (e->lane) exec_lane_close(e->lane);
    save_free(e);
    state_free(e);
    durable_free(e);
    own_free(e);
    trial_free(e);
    sys_free(e->costs);
    run_free(e);
    trace_free(e);
    cache_free(e);
    spec_free(e);
    twin_free(e);
    sys_free(e->second);
    sys_free(e->team_of);
    topology_close(e->topology);
    drives_free(e);
    plan_free(e->plan_train);
    plan_free(e->plan_eval);
    plan_free(e->plan_own);
    layout_free(e->layout);
    sys_free(e->pblocks);
    sys_free(e->pchunks);
    sys_free(e->pplaces);
    sys_free(e->act_extent);
    sys_free(e->tensor_of);
    adam_coefs_free(&e->coef);
    dev_close(e->dev);
    mem_close(e->mem);
    mem_close(e->held);
    exec_close(e->ex);
    free_description(e);
    sys_free(e);
    if (st != STK_OK && left) *left = sys_strdup(why.text);
    return st;
}

/* --- description ------------------------------------------------------------------------------ */

static bool copy_tensors(struct eng_block_desc *b, const stk_tensor_desc *t, uint32_t n)
{
    b->tensors = sys_calloc(n ? n : 1, sizeof *b->tensors);
    if (!b->tensors) return false;
    for (uint32_t i = 0; i < n; i++) {
        b->tensors[i] = t[i];
        b->tensors[i].name = sys_strdup(t[i].name ? t[i].name : "");
        if (!b->tensors[i].name) return false;
        b->n_tensors = i + 1;
    }
    return true;
}

/* Grows an array by one; NULL when memory is exhausted (the old one stays). */
static void *grow_one(void *p, uint32_t n, size_t item)
{
    return sys_realloc(p, ((size_t)n + 1) * item);
}

stk_status stk_block(stk_engine *e, const char *name, const stk_tensor_desc *tensors, uint32_t n,
                     uint32_t *block, uint32_t *first_tensor)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_DESCRIBE) return eng_refuse_state(e, "stk_block", "before stk_seal");
    struct eng_block_desc *all = grow_one(e->blocks, e->n_blocks, sizeof *all);
    if (!all)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory to describe block %s", name);
    e->blocks = all;
    struct eng_block_desc *b = &all[e->n_blocks];
    *b = (struct eng_block_desc){ .first_tensor = e->n_tensors };
    b->name = sys_strdup(name);
    if (!b->name || !copy_tensors(b, tensors, n)) {
        for (uint32_t i = 0; i < b->n_tensors; i++) sys_free((char *)(uintptr_t)b->tensors[i].name);
        sys_free(b->tensors);
        sys_free(b->name);
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory to describe block %s", name);
    }
    if (block) *block = e->n_blocks;
    if (first_tensor) *first_tensor = e->n_tensors;
    e->n_blocks++;
    e->n_tensors += n;
    return STK_OK;
}

stk_status stk_order(stk_engine *e, const stk_place *places, uint32_t n)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_DESCRIBE) return eng_refuse_state(e, "stk_order", "before stk_seal");
    for (uint32_t i = 0; i < n; i++)
        if (places[i].block >= e->n_blocks)
            return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                                 "place %u names block %u; there are %u", i, places[i].block,
                                 e->n_blocks);
    stk_place *copy = sys_calloc(n ? n : 1, sizeof *copy);
    if (!copy)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for an order of %u places", n);
    memcpy(copy, places, n * sizeof *copy);
    sys_free(e->places);
    e->places = copy;
    e->n_places = n;
    return STK_OK;
}

stk_status stk_workspace(stk_engine *e, uint64_t size_bytes)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_DESCRIBE) return eng_refuse_state(e, "stk_workspace", "before stk_seal");
    e->workspace_bytes = (size_bytes + 4095) / 4096 * 4096;
    return STK_OK;
}

stk_status stk_reserve(stk_engine *e, stk_where where, const char *owner, uint64_t size_bytes,
                       uint32_t *handle)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_DESCRIBE) return eng_refuse_state(e, "stk_reserve", "before stk_seal");
    struct eng_reserve *all = grow_one(e->reserves, e->n_reserves, sizeof *all);
    if (!all) return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory to note a reservation");
    e->reserves = all;
    struct eng_reserve *r = &all[e->n_reserves];
    *r = (struct eng_reserve){ .where = where, .size_bytes = size_bytes };
    snprintf(r->owner, sizeof r->owner, "%s", owner);
    *handle = e->n_reserves++;
    return STK_OK;
}

void *stk_reserved(stk_engine *e, uint32_t handle)
{
    STK_ASSERT(handle < e->n_reserves);
    return e->reserves[handle].base;
}

/* --- questions -------------------------------------------------------------------------------- */

const char *stk_error_text(const stk_engine *e) { return e->err.text; }
const char *stk_numerics(const stk_engine *e) { return e->numerics; }
struct dev *stk_device(stk_engine *e) { return e->dev; }
struct dev_stream *stk_compute_stream(stk_engine *e) { return e->compute; }
uint64_t stk_trace_hash(const stk_engine *e) { return exec_trace_hash(e->ex); }
uint64_t stk_now_ns(const stk_engine *e) { return exec_now_ns(e->ex); }

bool stk_table(const stk_engine *e, uint32_t i, const char **tier, const char **owner,
               uint64_t *size_bytes)
{
    if (!e->mem || i >= mem_rows(e->mem)) return false;
    const struct mem_row *r = mem_row_at(e->mem, i);
    *tier = mem_tier_name(r->tier);
    *owner = r->owner;
    *size_bytes = r->size_bytes;
    return true;
}

bool stk_note(const stk_engine *e, uint32_t i, const char **line)
{
    if (i >= e->n_notes) return false;
    *line = e->notes[i];
    return true;
}

uint64_t stk_tensor_offset(const stk_engine *e, uint32_t tensor)
{
    STK_ASSERT(e->layout && tensor < e->n_tensors);
    return e->layout->tensors[e->tensor_of[tensor]].first_elem;
}

stk_status stk_plan_write(stk_engine *e, const char *path, bool trace)
{
    stk_error_clear(&e->err);
    const struct plan *p = e->plan_train ? e->plan_train : e->plan_eval;
    if (!p) return eng_refuse_state(e, "stk_plan_write", "after stk_seal");
    FILE *f = fopen(path, "we");
    if (!f) return stk_error_set(&e->err, STK_ERR_IO, 0, "%s: cannot be written", path);
    if (trace)
        plan_trace(p, f);
    else
        plan_print(p, f);
    bool bad = ferror(f) != 0;
    bad |= fclose(f) != 0;
    return bad ? stk_error_set(&e->err, STK_ERR_IO, 0, "%s: writing the plan failed", path)
               : STK_OK;
}
