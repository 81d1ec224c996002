/* trainer/cmd_inspect.c - `stoker inspect PATH`: says what a folder or file is and what it holds.
 * Reads headers, and of a checkpoint every byte (its checksums). Changes nothing. */
#include "base/mem.h"
#include "base/sys.h"
#include "engine/stoker.h"
#include "formats/files.h"
#include "formats/manifest.h"
#include "formats/tokens.h"
#include "trainer/cmd.h"
#include "trainer/source.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char usage[] =
    "usage: stoker inspect PATH\n\nPATH: a model folder, a checkpoint or a folder of them, a "
    "safetensors, a token file, a folder of --out or of --nvme and what its runs left there";

static bool has(const char *folder, const char *name)
{
    char *path = sys_format("%s/%s", folder, name);
    bool there = path && access(path, F_OK) == 0;
    sys_free(path);
    return there;
}

static stk_status show_model(const char *path, struct stk_error *err)
{
    struct source s;
    char size[32];
    uint64_t bytes = 0, of_dtype[ST_DTYPE_N] = { 0 };
    STK_TRY(source_open(&s, path, true, err));
    const struct model_config *c = &s.cfg;
    for (uint32_t i = 0; i < st_set_count(s.set); i++) {
        const struct st_tensor *t = st_set_at(s.set, i);
        bytes += t->size_bytes;
        of_dtype[t->dtype]++;
    }
    printf("model: %s, %.2f million parameters, %u tensors in %u files, %s\n",
           model_family_name(c->family), (double)model_param_count(c) / 1e6, st_set_count(s.set),
           st_set_files(s.set), mem_size_format(bytes, size));
    printf("layers %u, hidden %u, intermediate %u, heads %u, key-value heads %u, head size %u, "
           "vocabulary %u, positions %u\n",
           c->layers, c->hidden, c->intermediate, c->heads, c->kv_heads, c->head_dim, c->vocab,
           c->max_positions);
    printf("rope theta %g%s, %s head%s%s, config in the %s spelling, dtypes:", c->rope_theta,
           c->rope == ROPE_LLAMA3   ? " (llama3 scaling)"
           : c->rope == ROPE_LINEAR ? " (linear scaling)"
                                    : "",
           c->tied ? "tied" : "untied", c->qk_norm ? ", q/k norm" : "",
           c->attention_bias ? ", attention biases" : "", c->new_spelling ? "new" : "old");
    for (int t = 0; t < ST_DTYPE_N; t++)
        if (of_dtype[t]) printf(" %s x %" PRIu64, st_dtype_name((enum st_dtype)t), of_dtype[t]);
    printf("\nevery tensor that the configuration names is there, with its shape\n");
    source_close(&s);
    return STK_OK;
}

static void show_text(const json_t *doc, const char *name)
{
    const json_t *v = json_object_get(doc, name);
    char *text = v ? json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    if (text) printf("  %-18s %s\n", name, text);
    free(text);
}

static stk_status show_checkpoint(const char *path, struct stk_error *err)
{
    static const char *const of_doc[] = { "step",  "updates", "skipped_total", "loss_scale",
                                          "dtype", "moments", "numerics" };
    static const char *const of_client[] = { "writer", "model",    "data", "position",
                                             "tokens", "steps",    "seq",  "batch",
                                             "seed",   "schedule", "lr" };
    json_t *doc = NULL;
    STK_TRY(manifest_read(path, true, &doc, err));
    uint64_t elements = 0, frozen = 0;
    size_t i;
    const json_t *t, *tensors = json_object_get(doc, "tensors"),
                     *client = json_object_get(doc, "client");
    json_array_foreach(tensors, i, t)
    {
        uint64_t n = (uint64_t)json_integer_value(json_object_get(t, "elements"));
        elements += n;
        if (json_is_true(json_object_get(t, "frozen"))) frozen += n;
    }
    printf("checkpoint: %zu tensors, %.2f million parameters, %.2f million frozen; sizes and "
           "checksums agree\n",
           json_array_size(tensors), (double)elements / 1e6, (double)frozen / 1e6);
    for (size_t k = 0; k < sizeof of_doc / sizeof of_doc[0]; k++) show_text(doc, of_doc[k]);
    for (size_t k = 0; k < sizeof of_client / sizeof of_client[0]; k++)
        show_text(client, of_client[k]);
    json_decref(doc);
    return STK_OK;
}

static stk_status show_checkpoints(const char *path, struct stk_error *err)
{
    char *newest = NULL, *note = NULL;
    uint64_t step = 0;
    stk_status st = manifest_newest(path, &newest, &step, &note, err);
    if (note) printf("%s\n", note);
    sys_free(note);
    if (st == STK_END)
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: holds no complete checkpoint", path);
    STK_TRY(st);
    printf("newest: %s\n", newest);
    st = show_checkpoint(newest, err);
    sys_free(newest);
    return st;
}

static stk_status show_tokens(const char *path, struct stk_error *err)
{
    struct tokens *t;
    STK_TRY(tokens_open(path, 0, &t, err));
    printf("tokens: %" PRIu64 " in %" PRIu64 " documents, hash %016" PRIx64 ", %" PRIu64
           " windows of 512\n",
           tokens_count(t), tokens_documents(t), tokens_hash(t), tokens_windows(t, 512));
    tokens_close(t);
    return STK_OK;
}

static stk_status show_safetensors(const char *path, struct stk_error *err)
{
    struct st_file *f;
    STK_TRY(st_open(path, &f, err));
    if (st_find(f, "input_ids")) {
        st_close(f);
        return show_tokens(path, err);
    }
    printf("safetensors: %u tensors\n", st_count(f));
    for (uint32_t i = 0; i < st_count(f); i++) {
        const struct st_tensor *t = st_at(f, i);
        printf("  %-5s", st_dtype_name(t->dtype));
        for (uint32_t d = 0; d < t->rank; d++) printf("%s%" PRIu64, d ? " x " : " ", t->shape[d]);
        printf("  %s\n", t->name);
    }
    st_close(f);
    return STK_OK;
}

#define RUN_PREFIX "stoker-run-"

/* What the durable store of a run says about itself. */
static void show_durable(const char *const *folders, uint32_t n, const char *run_id)
{
    static const char *const of_client[] = { "model", "data", "position", "tokens",
                                             "steps", "seq",  "batch" };
    char *client = NULL, *where = NULL;
    uint64_t step = 0;
    stk_status st = stk_find_durable(folders, n, run_id, &step, &client, &where);
    if (st == STK_END) {
        printf("run %s: no durable step\n", run_id);
    } else if (st != STK_OK) {
        printf("run %s: %s\n", run_id, where ? where : stk_status_text(st));
    } else {
        json_t *doc = client ? json_loads(client, 0, NULL) : NULL;
        printf("%s\n  go on with `stoker train --resume`, or drop it with --discard\n", where);
        for (size_t k = 0; k < sizeof of_client / sizeof of_client[0]; k++)
            show_text(doc, of_client[k]);
        json_decref(doc);
    }
    stk_free(client);
    stk_free(where);
}

/* `path`: a folder stoker-run-<id>. */
static void show_store(const char *path)
{
    struct stat st;
    DIR *d = opendir(path);
    char size[32], *parent = files_parent(path);
    const char *id = strstr(path, RUN_PREFIX);
    if (id && parent && strlen(id) >= sizeof RUN_PREFIX - 1 + 16) {
        char run_id[17];
        snprintf(run_id, sizeof run_id, "%s", id + sizeof RUN_PREFIX - 1);
        show_durable((const char *const *)&parent, 1, run_id);
    }
    sys_free(parent);
    printf("swapped state of a run (raw extents; it is removed when its run ends, or by the next "
           "run once that one is dead, unless a durable step is in it)\n");
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
        char *file = sys_format("%s/%s", path, e->d_name);
        if (file && stat(file, &st) == 0 && S_ISREG(st.st_mode))
            printf("  %-24s %s\n", e->d_name, mem_size_format((uint64_t)st.st_size, size));
        sys_free(file);
    }
    if (d) closedir(d);
}

/* Every run that left something in a folder of --nvme. */
static void show_stores(const char *path)
{
    DIR *d = opendir(path);
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
        if (strncmp(e->d_name, RUN_PREFIX, sizeof RUN_PREFIX - 1) != 0) continue;
        char *run = sys_format("%s/%s", path, e->d_name);
        if (run) {
            printf("%s: ", e->d_name);
            show_store(run);
        }
        sys_free(run);
    }
    if (d) closedir(d);
}

/* A folder of --out whose run.json names a run: what its durable store holds. */
static stk_status show_run(const char *path, struct stk_error *err)
{
    json_t *doc = NULL;
    const char *folders[STK_NVME_MAX];
    uint32_t n = 0;
    size_t i;
    const json_t *item;
    char *file = sys_format("%s/run.json", path);
    if (!file) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    stk_status st = files_read_json(file, 1u << 20, 8, &doc, err);
    sys_free(file);
    STK_TRY(st);
    json_array_foreach(json_object_get(doc, "nvme"), i, item)
    {
        const char *folder = json_string_value(item);
        if (folder && n < STK_NVME_MAX && access(folder, F_OK) == 0) folders[n++] = folder;
        else printf("  %s is not there\n", folder ? folder : "(no name)");
    }
    const char *id = json_string_value(json_object_get(doc, "run_id"));
    if (id && n > 0) show_durable(folders, n, id);
    json_decref(doc);
    return STK_OK;
}

/* The first entry whose name begins so; sys_free. */
static char *find_prefix(const char *folder, const char *prefix)
{
    DIR *d = opendir(folder);
    char *found = NULL;
    for (const struct dirent *e; d && !found && (e = readdir(d)) != NULL;)
        if (strncmp(e->d_name, prefix, strlen(prefix)) == 0)
            found = sys_format("%s/%s", folder, e->d_name);
    if (d) closedir(d);
    return found;
}

static stk_status inspect(const char *path, struct stk_error *err)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: %s", path, strerror(errno));
    if (!S_ISDIR(st.st_mode)) {
        size_t n = strlen(path);
        return n > 4 && strcmp(path + n - 4, ".bin") == 0 ? show_tokens(path, err)
                                                          : show_safetensors(path, err);
    }
    if (has(path, "manifest.json")) return show_checkpoint(path, err);
    if (has(path, "config.json")) return show_model(path, err);
    bool of_run = has(path, "run.json");
    if (of_run) STK_TRY(show_run(path, err));
    char *step = find_prefix(path, "step-"), *run = find_prefix(path, RUN_PREFIX),
         *extents = find_prefix(path, "extents-");
    char *checkpoints = find_prefix(path, "checkpoints");
    stk_status status = STK_OK;
    if (step)
        status = show_checkpoints(path, err);
    else if (checkpoints)
        status = show_checkpoints(checkpoints, err);
    else if (of_run)
        printf("no checkpoint\n");
    else if (extents)
        show_store(path);
    else if (run)
        show_stores(path);
    else
        status = stk_error_set(
            err, STK_ERR_FORMAT, 0,
            "%s: neither a model (config.json) nor a checkpoint (manifest.json) nor swapped state",
            path);
    if (of_run && checkpoints && status == STK_ERR_FORMAT) { /* the first one was under way */
        printf("no complete checkpoint\n");
        status = STK_OK;
    }
    sys_free(step);
    sys_free(run);
    sys_free(extents);
    sys_free(checkpoints);
    return status;
}

int cmd_inspect(int argc, char **argv)
{
    struct stk_error err = { 0 };
    struct opt_list rest;
    if (cmd_help(argc, argv, usage, NULL, 0)) return EXIT_DONE;
    if (opts_parse(NULL, 0, argc, argv, &rest, NULL, &rest, &err) != STK_OK)
        return cmd_fail_use(&err);
    if (rest.n != 1) {
        stk_error_set(&err, STK_ERR_CONFIG, 0, "inspect needs one PATH, %u were given", rest.n);
        return cmd_fail_use(&err);
    }
    return inspect(rest.item[0], &err) == STK_OK ? EXIT_DONE : cmd_fail(&err);
}
