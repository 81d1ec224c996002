/* trainer/cmd_export.c - `stoker export`: a Hugging Face folder from a checkpoint, as a stream
 * (CKP-20); needs no engine.
 *
 * The checkpoint's client object (train_state.c) holds config.json and the model folder it came
 * from; parameters are the masters rounded as the engine rounds them, so the result equals what
 * `stoker train` would have left. */
#include "base/convert.h"
#include "base/mem.h"
#include "base/sys.h"
#include "formats/manifest.h"
#include "trainer/cmd.h"
#include "trainer/hf_out.h"
#include "trainer/signals.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct export_opts {
    const char *checkpoint, *out, *model;
};

static const struct opt_row rows[] = {
    { "checkpoint", OPT_STRING, offsetof(struct export_opts, checkpoint), .arg = "DIR",
      .help = "one checkpoint; or a folder of them, or the --out of a run: the newest",
      .required = true },
    { "out", OPT_STRING, offsetof(struct export_opts, out), .arg = "DIR",
      .help = "the folder to make; must not hold anything", .required = true },
    { "model", OPT_STRING, offsetof(struct export_opts, model), .arg = "DIR",
      .help = "where config and tokenizer are; default: as the checkpoint says" },
};
enum { ROW_N = sizeof rows / sizeof rows[0], PIECE = 1 << 20, FILES_MAX = 4096 };

static const char usage[] = "usage: stoker export --checkpoint DIR --out DIR [--model DIR]";

struct export
{
    char *path;  /* of the checkpoint */
    json_t *doc; /* manifest */
    struct model_config cfg;
    bool have_cfg, fp16;
    char model[4096]; /* folder of the companions; "": none */
    struct st_file *files[FILES_MAX];
    uint32_t n_files;
    float *master; /* [PIECE] */
    int16_t *low;  /* [PIECE] */
    uint16_t *out; /* [PIECE] */
};

static const struct st_tensor *find(struct export *x, const char *name, struct st_file **file)
{
    for (uint32_t i = 0; i < x->n_files; i++) {
        const struct st_tensor *t = st_find(x->files[i], name);
        *file = x->files[i];
        if (t) return t;
    }
    return NULL;
}

static stk_status read_values(void *arg, const struct model_tensor *mt, uint64_t first, uint64_t n,
                              uint16_t *out, struct stk_error *err)
{
    struct export *x = arg;
    struct st_file *f;
    const struct st_tensor *t = find(x, mt->name, &f);
    uint64_t elements = mt->shape[0] * (mt->rank > 1 ? mt->shape[1] : 1);
    if (signals_stop())
        return stk_error_set(err, STK_ERR_INTERRUPTED, 0, "interrupted; nothing was written");
    if (!t || t->n_elements != elements)
        return stk_error_set(
            err, STK_ERR_FORMAT, 0,
            "%s: tensor %s is missing or has another size than config.json says (%llu elements)",
            x->path, mt->name, (unsigned long long)elements);
    if (st_dtype_bytes(t->dtype) == 2) return st_read(f, t, first * 2, n * 2, out, err);
    STK_TRY(st_read(f, t, first * 4, n * 4, x->master, err));
    if (x->fp16)
        convert_f32_to_fp16(x->master, out, n);
    else
        convert_split(x->master, out, x->low, n);
    return STK_OK;
}

static stk_status config_of(struct export *x, const json_t *config, struct stk_error *err)
{
    if (!config)
        return stk_error_set(
            err, STK_ERR_FORMAT, 0,
            "%s: holds no config.json: give --model DIR, the folder the run started from", x->path);
    json_t *copy = json_deep_copy(config);
    if (!json_is_object(copy)) {
        json_decref(copy);
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: its configuration is no JSON object",
                             x->path);
    }
    STK_TRY(model_config_take(x->path, copy, &x->cfg, err));
    x->have_cfg = true;
    return STK_OK;
}

static stk_status open_config(struct export *x, const struct export_opts *o, const json_t *client,
                              struct stk_error *err)
{
    const char *folder = json_string_value(json_object_get(client, "model"));
    struct stat st;
    snprintf(x->model, sizeof x->model, "%s", o->model ? o->model : folder ? folder : "");
    if (!o->model) {
        if (x->model[0] && stat(x->model, &st) != 0) {
            printf("%s is gone: tokenizer and generation files are left out; --model DIR names "
                   "another\n",
                   x->model);
            x->model[0] = '\0';
        }
        return config_of(x, json_object_get(client, "config"), err);
    }
    char *path = sys_format("%s/config.json", o->model);
    if (!path) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    stk_status status = model_config_read(path, &x->cfg, err);
    x->have_cfg = status == STK_OK;
    sys_free(path);
    return status;
}

static stk_status find_checkpoint(struct export *x, const char *given, struct stk_error *err)
{
    char *manifest = sys_format("%s/manifest.json", given), *note = NULL, *newest = NULL;
    uint64_t step;
    bool itself = manifest && access(manifest, F_OK) == 0;
    sys_free(manifest);
    char *below = itself ? NULL : sys_format("%s/checkpoints", given); /* the --out of a run */
    if (below && access(below, F_OK) != 0) {
        sys_free(below);
        below = sys_strdup(given);
    }
    if (below && manifest_newest(below, &newest, &step, &note, NULL) == STK_OK) x->path = newest;
    sys_free(below);
    if (note) printf("%s\n", note);
    sys_free(note);
    if (!x->path) x->path = sys_strdup(given);
    return x->path ? manifest_read(x->path, true, &x->doc, err)
                   : stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
}

static stk_status open_files(struct export *x, struct stk_error *err)
{
    for (uint32_t k = 1; k <= FILES_MAX; k++) {
        char *path = sys_format("%s/state-%05u.safetensors", x->path, k);
        if (!path) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
        bool there = access(path, F_OK) == 0;
        stk_status st = there ? st_open(path, &x->files[x->n_files], err) : STK_OK;
        sys_free(path);
        STK_TRY(st);
        if (!there) break;
        x->n_files++;
    }
    x->master = sys_calloc(PIECE, sizeof *x->master);
    x->low = sys_calloc(PIECE, sizeof *x->low);
    x->out = sys_calloc(PIECE, sizeof *x->out);
    return x->master && x->low && x->out
               ? STK_OK
               : stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for buffers");
}

static stk_status export_all(struct export *x, const struct export_opts *o, struct stk_error *err)
{
    uint64_t device;
    STK_TRY(hf_check_new("--out", o->out, err));
    STK_TRY(find_checkpoint(x, o->checkpoint, err));
    const json_t *client = json_object_get(x->doc, "client");
    const char *dtype = json_string_value(json_object_get(x->doc, "dtype"));
    x->fp16 = dtype && strcmp(dtype, "fp16") == 0;
    STK_TRY(open_config(x, o, client, err));
    STK_TRY(open_files(x, err));
    struct hf_job job = { .cfg = &x->cfg,
                          .dtype = x->fp16 ? ST_F16 : ST_BF16,
                          .head_only = json_is_true(json_object_get(client, "head_only")),
                          .both = json_is_true(json_object_get(client, "both")),
                          .copy_from = x->model[0] ? x->model : NULL,
                          .read = read_values,
                          .arg = x,
                          .buf = x->out,
                          .buf_bytes = PIECE * sizeof *x->out };
    uint64_t need = hf_bytes(&x->cfg, job.both), room = hf_room(o->out, &device);
    char a[32], b[32];
    if (need > room)
        return stk_error_set(err, STK_ERR_NOSPACE, 0,
                             "--out %s: the model takes %s, %s are free there", o->out,
                             mem_size_format(need, a), mem_size_format(room, b));
    char *partial = sys_format("%s.stoker-partial", o->out);
    if (!partial) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    job.pulse = pulse_open();
    stk_status st = hf_write(&job, partial, err);
    if (st == STK_OK) st = hf_publish(partial, o->out, err);
    pulse_close(job.pulse);
    sys_free(partial);
    return st;
}

static void export_free(struct export *x)
{
    for (uint32_t i = 0; i < x->n_files; i++) st_close(x->files[i]);
    if (x->have_cfg) model_config_free(&x->cfg);
    sys_free(x->master);
    sys_free(x->low);
    sys_free(x->out);
    sys_free(x->path);
    json_decref(x->doc);
}

int cmd_export(int argc, char **argv)
{
    struct export_opts o = { 0 };
    struct stk_error err = { 0 };
    if (cmd_help(argc, argv, usage, rows, ROW_N)) return EXIT_DONE;
    if (opts_parse(rows, ROW_N, argc, argv, &o, NULL, NULL, &err) != STK_OK)
        return cmd_fail_use(&err);
    struct export *x = sys_calloc(1, sizeof *x);
    signals_install("stopping");
    size_t n = strlen(o.out);
    while (n > 1 && o.out[n - 1] == '/') ((char *)(uintptr_t)o.out)[--n] = '\0';
    stk_status st = x ? export_all(x, &o, &err)
                      : stk_error_set(&err, STK_ERR_NOMEM, 0, "no memory to begin");
    if (st == STK_OK) printf("%s: the model of %s\n", o.out, x->path);
    if (x) export_free(x);
    sys_free(x);
    opts_free(rows, ROW_N, &o);
    return st == STK_OK ? EXIT_DONE : cmd_fail(&err);
}
