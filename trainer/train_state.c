/* trainer/train_state.c - what a training run leaves on disk and takes back: what a checkpoint says of
 * the run, gradients, the finished model.
 *
 * Owns: the client object of a checkpoint and what may lie in --out. Must not know: steps.
 * Application's thread; blocking. */
#include "base/mem.h"
#include "base/sys.h"
#include "formats/manifest.h"
#include "trainer/hf_out.h"
#include "trainer/train.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT_FOLDER ".partial-export"

/* --- what may be in --out --------------------------------------------------------------------- */

/* Whether `path` (of another option) is `out`/name or below it. */
static bool is_ours(const char *out, const char *name, const char *path)
{
    char real_out[PATH_MAX], want[PATH_MAX], at[PATH_MAX];
    if (!path || !realpath(out, real_out) || !realpath(path, at)) return false;
    int n = snprintf(want, sizeof want, "%s/%s", real_out, name);
    if (n < 0 || (size_t)n >= sizeof want) return false;
    return strncmp(at, want, (size_t)n) == 0 && (at[n] == '\0' || at[n] == '/');
}

static bool is_known(const struct train *t, const char *name)
{
    const struct run_opts *o = &t->o;
    if (strcmp(name, EXPORT_FOLDER) == 0) return true;
    if (strcmp(name, "run.json") == 0 || strcmp(name, "run.json.partial") == 0)
        return true; /* train_durable.c looks into it */
    for (uint32_t i = 0; i < o->nvme.n; i++)
        if (is_ours(o->out, name, o->nvme.item[i])) return true;
    return is_ours(o->out, name, o->log) || is_ours(o->out, name, o->dump_gradients) ||
           is_ours(o->out, name, o->data) || is_ours(o->out, name, o->eval_data) ||
           is_ours(o->out, name, o->plan);
}

/* What a kill left of a checkpoint that was being written is none to go on from. */
static bool is_empty(const char *folder)
{
    DIR *d = opendir(folder);
    bool empty = true;
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 &&
            strncmp(e->d_name, ".partial-step-", sizeof ".partial-step-" - 1) != 0)
            empty = false;
    if (d) closedir(d);
    return empty;
}

stk_status train_check_out(const struct train *t, struct stk_error *err)
{
    const struct run_opts *o = &t->o;
    struct stat st;
    STK_TRY(hf_check_writable("--out", o->out, err));
    if (stat(o->out, &st) != 0 || o->resume) return STK_OK;
    if (!is_empty(t->ckpt_dir))
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "--out %s: holds checkpoints of an earlier run: go on with --resume, "
                             "or choose another folder",
                             o->out);
    DIR *d = opendir(o->out);
    if (!d) return stk_error_set(err, STK_ERR_IO, errno, "--out %s: %s", o->out, strerror(errno));
    stk_status status = STK_OK;
    for (const struct dirent *e; status == STK_OK && (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 || is_known(t, e->d_name))
            continue;
        if (strcmp(e->d_name, "checkpoints") == 0) continue;
        status = stk_error_set(
            err, STK_ERR_STATE, 0,
            "--out %s: holds %s already: choose another folder, nothing is overwritten", o->out,
            e->d_name);
    }
    closedir(d);
    return status;
}

stk_status train_clean_out(const struct train *t, struct stk_error *err)
{
    char *names;
    STK_TRY(manifest_clean(t->ckpt_dir, &names, err));
    if (names)
        printf("removed    %s in %s: not complete when an earlier run was killed\n", names,
               t->ckpt_dir);
    sys_free(names);
    return STK_OK;
}

/* --- resume ----------------------------------------------------------------------------------- */

static uint64_t get_u64(const json_t *j, const char *name)
{
    return (uint64_t)json_integer_value(json_object_get(j, name));
}

static stk_status differs(const struct train *t, const char *option, uint64_t there, uint64_t here,
                          struct stk_error *err)
{
    if (there == here) return STK_OK;
    return stk_error_set(err, STK_ERR_CONFIG, 0,
                         "--resume: %s was written with %s %" PRIu64 ", this run has %" PRIu64
                         ": give the first run's value",
                         t->resume_path, option, there, here);
}

/* Weights come from the checkpoint, the arithmetic from --model: both must be of one model. */
static stk_status check_model(const struct train *t, struct stk_error *err)
{
    struct model_config there;
    json_t *copy = json_deep_copy(json_object_get(t->resume_client, "config"));
    if (!copy) return STK_OK;
    STK_TRY(model_config_take(t->resume_path, copy, &there, err));
    const char *key = model_config_differs(&there, &t->r.src.cfg);
    model_config_free(&there);
    if (!key) return STK_OK;
    return stk_error_set(err, STK_ERR_CONFIG, 0,
                         "--resume: %s is of another model than --model %s: \"%s\" of config.json "
                         "differs; give the first run's model",
                         t->resume_path, t->o.model, key);
}

static stk_status check_client(const struct train *t, struct stk_error *err)
{
    const json_t *c = t->resume_client;
    const char *hash = json_string_value(json_object_get(c, "data_hash"));
    char mine[32];
    if (!hash)
        return stk_error_set(
            err, STK_ERR_FORMAT, 0,
            "--resume: %s was not written by `stoker train`: it holds no position in the data",
            t->resume_path);
    STK_TRY(differs(t, "--seq", get_u64(c, "seq"), t->o.seq, err));
    STK_TRY(differs(t, "--batch", get_u64(c, "batch"), t->o.batch, err));
    STK_TRY(differs(t, "--seed", get_u64(c, "seed"), t->o.seed, err));
    if (get_u64(c, "optimizer") != (uint64_t)t->o.optimizer && json_object_get(c, "optimizer"))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--resume: %s was written with the other --optimizer (adamw, adam): "
                             "its moments mean something else",
                             t->resume_path);
    if (t->step > t->steps)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--resume: %s is of step %" PRIu64
                             ", the run is to end at step %" PRIu64
                             ": give more --steps, or export the checkpoint",
                             t->resume_path, t->step, t->steps);
    STK_TRY(check_model(t, err));
    snprintf(mine, sizeof mine, "%016" PRIx64, tokens_hash(t->r.data));
    if (strcmp(hash, mine) != 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--resume: --data %s is not the data that %s was trained on",
                             t->o.data, t->resume_path);
    return STK_OK;
}

static void warn_changes(const struct train *t)
{
    const json_t *c = t->resume_client;
    const char *schedule = json_string_value(json_object_get(c, "schedule")),
               *now = schedule_name(t->o.schedule);
    if (get_u64(c, "steps") != t->steps && t->o.schedule != SCHEDULE_CONSTANT)
        printf("warning: the run was planned for %" PRIu64 " steps and is now for %" PRIu64
               ": the learning rate takes another course from here\n",
               get_u64(c, "steps"), t->steps);
    if (schedule && strcmp(schedule, now) != 0)
        printf("warning: the schedule was %s and is now %s\n", schedule, now);
    const struct {
        const char *name;
        double now;
    } values[] = { { "lr", t->o.lr },
                   { "warmup", (double)t->o.warmup },
                   { "weight-decay", t->o.weight_decay },
                   { "beta1", t->o.beta1 },
                   { "beta2", t->o.beta2 },
                   { "eps", t->o.eps },
                   { "clip", t->o.clip } };
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        const json_t *there = json_object_get(c, values[i].name);
        if (there && json_number_value(there) != values[i].now)
            printf("warning: --%s was %g and is now %g\n", values[i].name,
                   json_number_value(there), values[i].now);
    }
}

/* `auto` is a measurement and may come out otherwise today: the first run's choice holds. */
static void take_matmul(struct train *t, const char *numerics)
{
    if (t->o.matmul != STK_MATMUL_AUTO || !numerics) return;
    if (strstr(numerics, ";matmul=bf16;"))
        t->o.matmul = STK_MATMUL_BF16;
    else if (strstr(numerics, ";matmul=f32;"))
        t->o.matmul = STK_MATMUL_F32;
}

static void take_client(struct train *t, const json_t *client)
{
    t->resume_client = json_incref((json_t *)(uintptr_t)client);
    t->position = get_u64(client, "position");
    t->tokens_done = get_u64(client, "tokens");
}

static stk_status take_durable(struct train *t, struct stk_error *err)
{
    const struct train_left *l = &t->left;
    sys_free(t->resume_path);
    t->resume_path = sys_format("the durable step %" PRIu64 " of run %s", l->step, l->run_id);
    if (!t->resume_path) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a name");
    t->resume_durable = true;
    t->step = l->step;
    t->updates = get_u64(l->client, "updates");
    take_client(t, l->client);
    take_matmul(t, json_string_value(json_object_get(l->client, "numerics")));
    return STK_OK;
}

static bool has_model(const struct train *t)
{
    char *path = sys_format("%s/config.json", t->o.out);
    bool there = path && access(path, F_OK) == 0;
    sys_free(path);
    return there;
}

stk_status train_resume_find(struct train *t, struct stk_error *err)
{
    char *note = NULL;
    uint64_t step;
    struct stk_error why = { 0 };
    json_t *doc = NULL;
    bool durable = false;
    stk_status st = manifest_newest(t->ckpt_dir, &t->resume_path, &step, &note, &why);
    if (note) printf("%s\n", note);
    if (st == STK_OK || st == STK_END) {
        stk_status chosen = train_left_choose(t, step, st == STK_OK, &durable, err);
        if (chosen != STK_OK || durable) {
            sys_free(note);
            return chosen != STK_OK ? chosen : take_durable(t, err);
        }
    }
    if (st == STK_END)
        stk_error_set(err, STK_ERR_STATE, 0,
                      "--resume: %s holds no complete checkpoint, and there is no durable step%s%s",
                      t->ckpt_dir,
                      note           ? ": "
                      : has_model(t) ? "; the model in --out is complete"
                                     : "; leave --resume out to begin",
                      note ? note : "");
    else if (st != STK_OK)
        stk_error_set(err, st, 0, "--resume: %s", why.text[0] ? why.text : stk_status_text(st));
    sys_free(note);
    if (st != STK_OK) return st == STK_END ? STK_ERR_STATE : st;
    STK_TRY(manifest_read(t->resume_path, false, &doc, err));
    take_client(t, json_object_get(doc, "client"));
    take_matmul(t, json_string_value(json_object_get(doc, "numerics")));
    t->step = get_u64(doc, "step");
    t->updates = get_u64(doc, "updates");
    json_decref(doc);
    t->saved_step = t->step;
    return STK_OK;
}

stk_status train_resume_check(const struct train *t, struct stk_error *err)
{
    STK_TRY(check_client(t, err));
    warn_changes(t);
    return STK_OK;
}

/* The other of the two, in words; "" if there was none. */
static const char *other_source(const struct train *t, char buf[96])
{
    const struct train_left *l = &t->left;
    buf[0] = '\0';
    if (t->resume_durable && l->checkpoint_step)
        snprintf(buf, 96, "; the newest checkpoint is of step %" PRIu64, l->checkpoint_step);
    else if (t->resume_durable)
        snprintf(buf, 96, "; there is no checkpoint");
    else if (l->found)
        snprintf(buf, 96, "; the durable step is older (%" PRIu64 ")", l->step);
    return buf;
}

stk_status train_resume_load(struct train *t, struct stk_error *err)
{
    char other[96];
    if (t->resume_durable) {
        STK_TRY(run_engine(&t->r, stk_resume_durable(t->r.e, t->o.any_numerics, NULL), err));
        printf("resumed from %s: step %" PRIu64 " is next%s\n", t->resume_path, t->step + 1,
               other_source(t, other));
        return STK_OK;
    }
    pulse_phase(t->r.pulse, "reading the checkpoint", 0);
    stk_status st = run_engine(&t->r, stk_restore(t->r.e, t->resume_path, t->o.any_numerics, NULL),
                               err);
    pulse_phase(t->r.pulse, NULL, 0);
    if (st == STK_OK)
        printf("resumed from %s: step %" PRIu64 " is next%s\n", t->resume_path, t->step + 1,
               other_source(t, other));
    return st;
}

/* --- checkpoints ------------------------------------------------------------------------------ */

char *train_client_json(const struct train *t)
{
    const struct run_opts *o = &t->o;
    char hash[32], folder[PATH_MAX];
    snprintf(hash, sizeof hash, "%016" PRIx64, tokens_hash(t->r.data));
    if (!realpath(o->model, folder)) snprintf(folder, sizeof folder, "%s", o->model);
    json_t *j = json_object();
    json_object_set_new(j, "writer", json_string("stoker train"));
    json_object_set_new(j, "position", json_integer((json_int_t)t->position));
    json_object_set_new(j, "tokens", json_integer((json_int_t)t->tokens_done));
    json_object_set_new(j, "steps", json_integer((json_int_t)t->steps));
    json_object_set_new(j, "updates", json_integer((json_int_t)t->updates));
    json_object_set_new(j, "numerics", json_string(stk_numerics(t->r.e)));
    json_object_set_new(j, "data_hash", json_string(hash));
    json_object_set_new(j, "data", json_string(o->data));
    json_object_set_new(j, "seq", json_integer((json_int_t)o->seq));
    json_object_set_new(j, "batch", json_integer((json_int_t)o->batch));
    json_object_set_new(j, "seed", json_integer((json_int_t)o->seed));
    json_object_set_new(j, "schedule", json_string(schedule_name(o->schedule)));
    json_object_set_new(j, "warmup", json_integer((json_int_t)o->warmup));
    json_object_set_new(j, "lr", json_real(o->lr));
    json_object_set_new(j, "optimizer", json_integer(o->optimizer));
    json_object_set_new(j, "weight-decay", json_real(o->weight_decay));
    json_object_set_new(j, "beta1", json_real(o->beta1));
    json_object_set_new(j, "beta2", json_real(o->beta2));
    json_object_set_new(j, "eps", json_real(o->eps));
    json_object_set_new(j, "clip", json_real(o->clip));
    json_object_set_new(j, "model", json_string(folder));
    json_object_set_new(j, "head_only", json_boolean(t->r.src.head_only));
    json_object_set_new(j, "both", json_boolean(t->r.src.both));
    json_object_set(j, "config", t->r.src.cfg.document);
    char *text = j ? json_dumps(j, JSON_COMPACT) : NULL;
    json_decref(j);
    return text;
}

/* Step of the newest complete checkpoint; 0: there is none. */
static uint64_t newest_saved(const struct train *t)
{
    char *path = NULL, *note = NULL;
    struct stk_error ignored = { 0 };
    uint64_t saved = 0;
    if (!t->ckpt_dir || manifest_newest(t->ckpt_dir, &path, &saved, &note, &ignored) != STK_OK)
        saved = 0;
    sys_free(path);
    sys_free(note);
    return saved;
}

void train_say_without(const struct train *t, char *buf, size_t size)
{
    uint64_t saved = newest_saved(t);
    if (saved)
        snprintf(buf, size,
                 "to do without it, --resume --discard goes on from the checkpoint of step %" PRIu64,
                 saved);
    else
        snprintf(buf, size, "to do without it, --discard begins anew: there is no checkpoint");
}

void train_tell_left(struct train *t)
{
    char *to = t->what_is_left;
    uint64_t saved = newest_saved(t), durable = train_durable_left(t);
    if (t->damaged && t->resume_durable && durable <= t->left.step) {
        /* the bytes that are wrong may be those of the durable step, and be met again */
        size_t n = t->trained ? (size_t)snprintf(to, sizeof t->what_is_left,
                                                 "--resume tries the durable step %" PRIu64 " again; ",
                                                 t->left.step)
                              : 0;
        train_say_without(t, to + n, sizeof t->what_is_left - n);
        return;
    }
    if (durable && saved)
        snprintf(to, sizeof t->what_is_left,
                 "to go on from there is the durable step %" PRIu64 " and the checkpoint of step "
                 "%" PRIu64 ": --resume takes the newer, --resume --discard the checkpoint",
                 durable, saved);
    else if (durable)
        snprintf(to, sizeof t->what_is_left,
                 "go on with --resume from the durable step %" PRIu64 "; there is no checkpoint",
                 durable);
    else if (saved)
        snprintf(to, sizeof t->what_is_left,
                 "go on with --resume from the checkpoint of step %" PRIu64, saved);
    else
        snprintf(to, sizeof t->what_is_left,
                 "nothing is left to go on from (no checkpoint%s): next time --checkpoint-every N, "
                 "or --durable N with state on NVMe, keeps the work",
                 t->o.durable ? ", no durable step" : "");
}

/* --- gradients -------------------------------------------------------------------------------- */

static stk_status write_gradients(struct train *t, struct st_writer *w, struct stk_error *err)
{
    const struct model *m = t->r.model;
    uint64_t piece = RUN_BUF_BYTES / sizeof(float);
    uint32_t index = 0;
    for (uint32_t i = 0; i < model_tensor_count(m); i++) {
        const struct model_tensor_info *info = model_tensor(m, i);
        if (info->frozen) continue;
        for (uint64_t at = 0; at < info->n_elems; at += piece) {
            uint64_t n = info->n_elems - at < piece ? info->n_elems - at : piece;
            STK_TRY(run_engine(
                &t->r, stk_tensor_read(t->r.e, i, STK_READ_GRAD, at, n, t->r.buf, STK_F32), err));
            STK_TRY(
                st_writer_write(w, index, at * sizeof(float), t->r.buf, n * sizeof(float), err));
        }
        index++;
    }
    return STK_OK;
}

stk_status train_dump_gradients(struct train *t, struct stk_error *err)
{
    if (!t->o.dump_gradients) return STK_OK;
    struct st_writer *w = NULL;
    if (sys_mkdirs(t->o.dump_gradients) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "--dump-gradients %s: cannot be made: %s",
                             t->o.dump_gradients, strerror(errno));
    char *path = sys_format("%s/step-%08" PRIu64 ".safetensors", t->o.dump_gradients, t->step);
    if (!path) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    stk_status st = st_writer_new(path, NULL, &w, err);
    for (uint32_t i = 0; i < model_tensor_count(t->r.model) && st == STK_OK; i++) {
        const struct model_tensor_info *info = model_tensor(t->r.model, i);
        uint32_t index;
        if (!info->frozen)
            st = st_writer_declare(w, info->name, ST_F32, info->rank, info->shape, &index, err);
    }
    if (st == STK_OK) st = st_writer_begin(w, err);
    if (st == STK_OK) st = write_gradients(t, w, err);
    if (st == STK_OK)
        st = st_writer_finish(w, err);
    else
        st_writer_abandon(w);
    sys_free(path);
    return st;
}

/* --- the finished model ----------------------------------------------------------------------- */

static stk_status read_param(void *arg, const struct model_tensor *mt, uint64_t first, uint64_t n,
                             uint16_t *out, struct stk_error *err)
{
    struct train *t = arg;
    for (uint32_t i = 0; i < model_tensor_count(t->r.model); i++)
        if (strcmp(model_tensor(t->r.model, i)->name, mt->name) == 0)
            return run_engine(
                &t->r,
                stk_tensor_read(t->r.e, i, STK_READ_PARAM, first, n, out, (stk_dtype)t->o.dtype),
                err);
    return stk_error_set(err, STK_ERR_STATE, 0, "tensor %s is not in the engine", mt->name);
}

stk_status train_export(struct train *t, struct stk_error *err)
{
    char *partial = sys_format("%s/%s", t->o.out, EXPORT_FOLDER);
    if (!partial) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    bool gone = access(t->o.model, F_OK) != 0;
    if (gone) /* what was trained is not lost for a tokenizer */
        printf("warning: --model %s is gone: tokenizer and generation files are left out\n",
               t->o.model);
    struct hf_job job = { .cfg = &t->r.src.cfg,
                          .dtype = t->o.dtype == STK_BF16 ? ST_BF16 : ST_F16,
                          .head_only = t->r.src.head_only,
                          .both = t->r.src.both,
                          .copy_from = gone ? NULL : t->o.model,
                          .read = read_param,
                          .arg = t,
                          .buf = t->r.buf,
                          .buf_bytes = RUN_BUF_BYTES,
                          .pulse = t->r.pulse };
    stk_status st = hf_write(&job, partial, err);
    if (st == STK_OK) st = hf_publish_into(partial, t->o.out, err);
    if (st == STK_OK) printf("model      %s\n", t->o.out);
    sys_free(partial);
    return st;
}
