/* engine/durable.c - durable steps: what the store's committed table holds beside the extents, when
 * a commit may begin, and the way back.
 *
 * A request is ARMED between steps with the counters of that moment; when the update of that step
 * is complete and written back (run.c), the engine lane submits it, because from then until the
 * next update begins the store's newest versions are the state of one step. The store keeps later
 * puts away from what the commit needs. Application's thread, but for what is marked as the
 * lane's. Must not know files or tables of the store. */
#include "engine/durable.h"
#include "engine/counters.h"
#include "base/sys.h"
#include "nvme/io_sim.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { IDLE, ARMED, FLYING };

#define CLIENT_BYTES_MAX (256u << 10) /* of a client's own object: the table is reserved in full */
#define TENSOR_TEXT_BYTES 128         /* of a tensor's row of the document, beside its name */

uint64_t durable_payload_max(const stk_engine *e)
{
    uint64_t n = 8192 + 6 * sizeof e->numerics + CLIENT_BYTES_MAX;
    for (uint32_t i = 0; i < e->layout->n_tensors; i++)
        n += TENSOR_TEXT_BYTES + 6 * strlen(e->layout->tensors[i].name); /* 6: escaped in full */
    return n;
}

stk_status durable_alloc(stk_engine *e)
{
    struct eng_durable *d = &e->durable;
    exec_event_init(e->ex, &d->event);
    exec_event_set(&d->event);
    if (!e->cfg.durable) return STK_OK;
    d->payload_max = durable_payload_max(e);
    d->payload = sys_calloc(1, d->payload_max);
    return d->payload ? STK_OK
                      : stk_error_set(&e->err, STK_ERR_NOMEM, 0,
                                      "no memory for the description of a durable step");
}

void durable_free(stk_engine *e)
{
    sys_free(e->durable.payload);
    json_decref(e->durable.doc);
    e->durable.payload = NULL;
    e->durable.doc = NULL;
}

uint32_t durable_paths(const stk_engine *e, const char *paths[STK_NVME_MAX])
{
    uint32_t n = 0;
    for (; n < e->n_paths; n++) paths[n] = e->paths[n];
    if (n == 0) paths[n++] = "sim"; /* as the store is opened without a folder */
    return n;
}

/* --- a request -------------------------------------------------------------------------------- */

/* Engine lane. */
static void commit_done(struct store_commit *c)
{
    stk_engine *e = c->owner;
    struct eng_durable *d = &e->durable;
    if (c->status == STK_OK) {
        atomic_store(&d->newest_step, c->step);
    } else {
        d->before_step = atomic_load(&d->newest_step);
        if (c->lost) atomic_store(&d->newest_step, 0); /* nobody finds that one either */
        d->error = c->error;
        atomic_store(&d->failed, true);
    }
    atomic_fetch_add_explicit(&e->progress, 1, memory_order_relaxed);
    atomic_store(&d->phase, IDLE);
    exec_event_set(&d->event);
}

bool durable_armed(const stk_engine *e) { return atomic_load(&e->durable.phase) == ARMED; }

void durable_begin(void *engine)
{
    stk_engine *e = engine;
    struct eng_durable *d = &e->durable;
    if (atomic_load(&d->phase) != ARMED) return;
    d->commit = (struct store_commit){ .step = d->step,
                                       .payload = d->payload,
                                       .payload_bytes = d->payload_bytes,
                                       .done = commit_done,
                                       .owner = e };
    atomic_store(&d->phase, FLYING);
    struct stk_error err = { 0 };
    stk_status st = store_commit_submit(e->store, &d->commit, &err);
    if (st == STK_OK) return;
    d->commit.status = st;
    d->commit.error = err;
    commit_done(&d->commit);
}

/* The failure of the last request, once. The run may go on: the older durable step counts. */
stk_status durable_report(stk_engine *e)
{
    struct eng_durable *d = &e->durable;
    if (!atomic_exchange(&d->failed, false)) return STK_OK;
    uint64_t old = d->before_step;
    char had[64] = "there is none before it";
    if (old)
        snprintf(had, sizeof had,
                 d->commit.lost ? "that of step %llu cannot be found either"
                                : "that of step %llu stays",
                 (unsigned long long)old);
    return stk_error_set(&e->err, STK_ERR_IO, d->error.os_errno,
                         "the durable step %llu failed (%s): %s; %s",
                         (unsigned long long)d->commit.step, had, d->error.text,
                         d->commit.doubt ? "its table could not be taken back either, so the next "
                                           "write to NVMe may be refused: check the drive"
                                         : "training may go on");
}

/* [waits] Until no request is under way. */
static stk_status settle(stk_engine *e)
{
    struct eng_durable *d = &e->durable;
    if (atomic_load(&d->phase) == ARMED) STK_TRY(stk_flush(e));
    uint64_t stall = e->cfg.stall_ns ? e->cfg.stall_ns : 120ull * 1000000000u;
    struct stk_error err = { 0 };
    stk_status st = exec_event_wait_running(&d->event, stall, &err);
    if (st == STK_OK) return STK_OK;
    e->state = ENG_FAILED;
    struct stk_error oldest = { 0 }; /* which transfer it is that does not end: file and place */
    bool stuck = io_drain(e->io, exec_now_ns(e->ex), &oldest) == STK_ERR_STALLED;
    return stk_error_set(&e->err, st, 0, "the durable step %llu does not end: %s",
                         (unsigned long long)d->step, stuck ? oldest.text : err.text);
}

void durable_quiesce(stk_engine *e, uint64_t deadline_ns)
{
    struct stk_error ignored = { 0 };
    uint32_t phase = atomic_load(&e->durable.phase);
    /* armed without an update to wait for: its task is on its way to the lane */
    if (phase == FLYING || (phase == ARMED && !e->pending))
        exec_event_wait(&e->durable.event, deadline_ns, &ignored);
}

static stk_status refuse_size(stk_engine *e, size_t bytes)
{
    return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                         "stk_durable: client_json has %zu bytes; the tables on the drives hold "
                         "%u: keep the rest in a file of your own",
                         bytes, CLIENT_BYTES_MAX);
}

/* What decides which extents activations have: how many of the last positions have each policy, the
 * policy of the others, micro-batches. */
static json_t *acts_json(const stk_engine *e)
{
    json_t *a = json_array();
    for (int p = 0; p < PLAN_ACT_N; p++)
        json_array_append_new(a, json_integer(e->place.act_last[p]));
    json_array_append_new(a, json_integer((json_int_t)e->place.act));
    json_array_append_new(a, json_integer(e->cfg.micro_batches));
    return a;
}

static stk_status capture(stk_engine *e, const char *client_json)
{
    static const char *const tiers[] = { "host", "nvme" };
    struct eng_durable *d = &e->durable;
    json_t *doc = counters_document(e, client_json);
    size_t n = 0;
    if (doc) {
        json_object_set_new(doc, "chunk", json_integer(e->cfg.chunk_elems));
        json_object_set_new(doc, "grads", json_string(tiers[e->place.grad == CHUNK_NVME]));
        if (acts_on_nvme(&e->place)) json_object_set_new(doc, "activations", acts_json(e));
        n = json_dumpb(doc, d->payload, d->payload_max, JSON_COMPACT);
    }
    json_decref(doc);
    if (n == 0)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0,
                             "no memory to describe the durable step");
    if (n > d->payload_max) /* numbers may be longer as jansson writes them */
        return refuse_size(e, n);
    d->payload_bytes = n;
    d->step = e->begun;
    return STK_OK;
}

stk_status stk_durable(stk_engine *e, const char *client_json)
{
    struct eng_durable *d = &e->durable;
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_READY) return eng_refuse_state(e, "stk_durable", "between steps");
    if (!e->cfg.durable)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "stk_durable: no room is reserved for durable steps: set "
                             "config.durable before stk_open");
    if (e->begun == 0)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "stk_durable: no step has ended yet: there is nothing to keep");
    STK_TRY(counters_check_client(e, "stk_durable", client_json));
    if (client_json && strlen(client_json) > CLIENT_BYTES_MAX)
        return refuse_size(e, strlen(client_json));
    STK_TRY(settle(e));
    STK_TRY(durable_report(e));
    STK_TRY(state_flush_staged(e));
    STK_TRY(capture(e, client_json));
    exec_event_reset(&d->event);
    atomic_store(&d->phase, ARMED);
    if (e->pending) return STK_OK; /* run.c: when its update is written back */
    exec_task_init(&d->task, durable_begin, e);
    exec_post(e->lane, &d->task); /* before any later put: the lane is a queue */
    return STK_OK;
}

stk_status stk_durable_wait(stk_engine *e)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_READY) return eng_refuse_state(e, "stk_durable_wait", "between steps");
    STK_TRY(settle(e));
    return durable_report(e);
}

void stk_discard_durable(stk_engine *e)
{
    if (e && e->store) store_discard(e->store);
}

/* --- the way back ----------------------------------------------------------------------------- */

static const char *label(uint64_t step, const char *run_id, char buf[96])
{
    snprintf(buf, 96, "the durable step %llu of run %s", (unsigned long long)step, run_id);
    return buf;
}

static stk_status parse(const struct store_found *f, json_t **doc, struct stk_error *err)
{
    json_error_t why;
    char name[96];
    *doc = json_loadb(f->payload, f->payload_bytes, 0, &why);
    if (json_is_object(*doc)) return STK_OK;
    json_decref(*doc);
    *doc = NULL;
    return stk_error_set(err, STK_ERR_FORMAT, 0,
                         "%s was not written by a training run: its description is no JSON object",
                         label(f->step, f->run_id, name));
}

static void list_paths(const struct store_found *f, const char *before, char *buf, size_t size)
{
    size_t n = 0;
    buf[0] = '\0';
    for (uint32_t i = 0; i < f->n_paths && n < size; i++)
        n += (size_t)snprintf(buf + n, size - n, "%s%s%s", i ? ", " : "", before, f->paths[i]);
}

static bool same_acts(const stk_engine *e, const json_t *was)
{
    for (uint32_t p = 0; p < PLAN_ACT_N; p++)
        if (json_integer_value(json_array_get(was, p)) != (json_int_t)e->cfg.activations_last[p + 1])
            return false;
    return json_integer_value(json_array_get(was, PLAN_ACT_N)) + 1 == (json_int_t)e->cfg.activations;
}

/* Activations on NVMe are extents of the store that is taken over: `auto` takes what was. */
static stk_status agree_acts(stk_engine *e, const char *name)
{
    stk_config *c = &e->cfg;
    const json_t *was = json_object_get(e->durable.doc, "activations");
    bool nvme = c->activations == STK_ACT_NVME || c->activations_last[STK_ACT_NVME] > 0, mix = false;
    for (int p = 0; p < STK_ACT_N; p++) mix |= c->activations_last[p] > 0;
    if (!was && !nvme) return STK_OK;
    if (was && c->activations == STK_ACT_AUTO && !mix) {
        for (uint32_t p = 0; p < PLAN_ACT_N; p++)
            c->activations_last[p + 1] = (uint32_t)json_integer_value(json_array_get(was, p));
        c->activations = (stk_act)(json_integer_value(json_array_get(was, PLAN_ACT_N)) + 1);
    }
    json_int_t micros = json_integer_value(json_array_get(was, PLAN_ACT_N + 1)); /* 0: not written then */
    bool same = was && same_acts(e, was);
    if (same && micros > 0 && micros != (json_int_t)c->micro_batches)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "%s was written with the activations of %lld micro-batches on NVMe, this run "
                             "has %u: leave --batch and --micro-batch as they were, or drop it with "
                             "--discard",
                             name, (long long)micros, c->micro_batches);
    if (same) return STK_OK;
    return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                         "%s was written with %s on NVMe, this run has %s: leave --activations as it "
                         "was, or drop it with --discard",
                         name, was ? "activations" : "no activations",
                         was ? "others or none there" : "some there");
}

/* What decides how the state is cut into extents must be as it was; `auto` takes what was. */
static stk_status agree_geometry(stk_engine *e, const char *name, const struct store_found *f)
{
    const json_t *doc = e->durable.doc;
    json_int_t chunk = json_integer_value(json_object_get(doc, "chunk"));
    const char *grads = json_string_value(json_object_get(doc, "grads"));
    STK_TRY(counters_agree_model(e, name, doc));
    STK_TRY(counters_agree_moments(e, name, doc, false));
    if (chunk != (json_int_t)e->cfg.chunk_elems)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "%s was written with chunks of %lld parameters, this run has %u: give "
                             "--chunk %lld, or drop it with --discard",
                             name, (long long)chunk, e->cfg.chunk_elems, (long long)chunk);
    stk_tier was = grads && !strcmp(grads, "nvme") ? STK_TIER_NVME : STK_TIER_HOST;
    if (e->cfg.grads == STK_TIER_AUTO) e->cfg.grads = was;
    bool nvme = e->cfg.grads == STK_TIER_NVME;
    if (nvme != (was == STK_TIER_NVME))
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "%s was written with gradients in %s, this run has them in %s: give "
                             "--grads %s, or drop it with --discard",
                             name, nvme ? "host memory" : "NVMe", nvme ? "NVMe" : "host memory",
                             nvme ? "host" : "nvme");
    STK_TRY(agree_acts(e, name));
    const char *here[STK_NVME_MAX];
    char there[1024];
    if (f->n_paths == durable_paths(e, here)) return STK_OK;
    list_paths(f, "--nvme ", there, sizeof there);
    return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                         "%s lies on %u folders, this run has %u: give %s, or drop it with "
                         "--discard",
                         name, f->n_paths, e->n_paths, there);
}

stk_status durable_look(stk_engine *e)
{
    if (!e->cfg.adopt) return STK_OK;
    const char *paths[STK_NVME_MAX];
    const struct io_sim_cfg *sim = e->cfg.storage == STK_STORAGE_SIM ? e->cfg.sim_disk : NULL;
    struct store_found *f = NULL;
    char name[96];
    stk_status st = store_find(paths, durable_paths(e, paths), e->cfg.run_id,
                               sim ? sim->disk : NULL, &f, &e->err);
    if (st == STK_END)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "no durable step of run %s is on %s%s", e->cfg.run_id, paths[0],
                             e->n_paths > 1 ? " or the other folders" : "");
    if (st == STK_OK) st = parse(f, &e->durable.doc, &e->err);
    if (st == STK_OK) {
        e->durable.found_step = f->step;
        e->durable.found_room = f->room;
        st = agree_geometry(e, label(f->step, f->run_id, name), f);
    }
    store_found_free(f);
    return st;
}

/* Every chunk is as old as the store says: a skipped step left older versions. */
stk_status durable_adopted(stk_engine *e)
{
    char name[96];
    if (!e->cfg.adopt) return STK_OK;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        struct stk_chunk *c = &e->layout->chunks[i];
        uint64_t param = store_version(e->store, c->extent[CHUNK_PARAM]);
        uint64_t opt = c->frozen ? param : store_version(e->store, c->extent[CHUNK_OPT]);
        if (param != opt || param == UINT64_MAX)
            return stk_error_set(&e->err, STK_ERR_CORRUPT, 0,
                                 "%s: chunk %u has parameters of version %llu and optimizer state "
                                 "of version %llu: they do not belong together",
                                 label(e->durable.found_step, e->cfg.run_id, name), c->id,
                                 (unsigned long long)param, (unsigned long long)opt);
        c->version = param;
    }
    atomic_store(&e->durable.newest_step, e->durable.found_step);
    eng_note(e, "taken over: %s", label(e->durable.found_step, e->cfg.run_id, name));
    return STK_OK;
}

stk_status stk_resume_durable(stk_engine *e, bool any_numerics, char **client_json)
{
    char name[96];
    stk_error_clear(&e->err);
    if (client_json) *client_json = NULL;
    if (eng_state(e) != ENG_READY || e->begun > 0)
        return eng_refuse_state(e, "stk_resume_durable", "after stk_seal, before the first step");
    if (!e->cfg.adopt)
        return stk_error_set(&e->err, STK_ERR_STATE, 0,
                             "stk_resume_durable: nothing was taken over: set config.adopt before "
                             "stk_open");
    label(e->durable.found_step, e->cfg.run_id, name);
    stk_status st = counters_agree(e, name, e->durable.doc, any_numerics);
    if (st == STK_OK) {
        counters_take(e, e->durable.doc);
        if (client_json) *client_json = counters_client(e->durable.doc);
    } else {
        e->state = ENG_FAILED;
    }
    return st;
}

/* --- without an engine ------------------------------------------------------------------------ */

static void say(char **where, const char *text)
{
    if (where) *where = sys_strdup(text);
}

stk_status stk_find_durable(const char *const *nvme, uint32_t n, const char *run_id, uint64_t *step,
                            char **client_json, char **where)
{
    struct stk_error err = { 0 };
    struct store_found *f = NULL;
    json_t *doc = NULL;
    if (step) *step = 0;
    if (client_json) *client_json = NULL;
    if (where) *where = NULL;
    stk_status st = store_find(nvme, n, run_id, NULL, &f, &err);
    if (st == STK_OK) st = parse(f, &doc, &err);
    if (st == STK_OK) {
        char size[32], name[96], paths[1024], text[1400];
        list_paths(f, "", paths, sizeof paths);
        snprintf(text, sizeof text, "%s on %s (%s)", label(f->step, f->run_id, name), paths,
                 mem_size_format(f->size_bytes, size));
        say(where, text);
        if (step) *step = f->step;
        if (client_json) *client_json = counters_client(doc);
    } else if (st != STK_END) {
        say(where, err.text);
    }
    json_decref(doc);
    store_found_free(f);
    return st;
}

/* What is left of a store that is damaged, or whose other parts are out of reach. */
static stk_status discard_rest(const char *const *nvme, uint32_t n, const char *run_id,
                               struct stk_error *err)
{
    struct store_found rest = { .n_paths = n };
    snprintf(rest.run_id, sizeof rest.run_id, "%s", run_id);
    for (uint32_t i = 0; i < n; i++) rest.paths[i] = (char *)(uintptr_t)nvme[i];
    stk_error_clear(err);
    return store_found_discard(&rest, NULL, err);
}

stk_status stk_discard_found(const char *const *nvme, uint32_t n, const char *run_id, char **where)
{
    struct stk_error err = { 0 };
    struct store_found *f = NULL;
    if (where) *where = NULL;
    stk_status st = store_find(nvme, n, run_id, NULL, &f, &err);
    bool partial = st == STK_ERR_CORRUPT || st == STK_ERR_CONFIG;
    if (st == STK_OK) st = store_found_discard(f, NULL, &err);
    else if (partial && run_id && run_id[0]) st = discard_rest(nvme, n, run_id, &err);
    else if (st == STK_END && run_id && run_id[0]) { /* a folder without a table, perhaps */
        stk_status rest = discard_rest(nvme, n, run_id, &err);
        if (rest != STK_OK) st = rest;
    }
    if (st != STK_OK && st != STK_END) say(where, err.text);
    store_found_free(f);
    return st;
}
