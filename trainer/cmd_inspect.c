/* trainer/cmd_inspect.c - `stoker inspect PATH`: says what a folder or file is and what it holds.
 * Reads headers, and of a checkpoint every byte (its checksums). Changes nothing. */
#include "base/mem.h"
#include "base/sys.h"
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
    "safetensors, a token file, a folder of swapped state";

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

static void show_store(const char *path)
{
    struct stat st;
    DIR *d = opendir(path);
    char size[32];
    printf("swapped state of a run (raw extents; it is removed when its run ends, or by the next "
           "run once that one is dead)\n");
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
        char *file = sys_format("%s/%s", path, e->d_name);
        if (file && stat(file, &st) == 0 && S_ISREG(st.st_mode))
            printf("  %-24s %s\n", e->d_name, mem_size_format((uint64_t)st.st_size, size));
        sys_free(file);
    }
    if (d) closedir(d);
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
    char *step = find_prefix(path, "step-"), *run = find_prefix(path, "stoker-run-"),
         *extents = find_prefix(path, "extents-");
    char *checkpoints = find_prefix(path, "checkpoints");
    stk_status status = STK_OK;
    if (step)
        status = show_checkpoints(path, err);
    else if (checkpoints)
        status = show_checkpoints(checkpoints, err);
    else if (extents)
        show_store(path);
    else if (run)
        show_store(run);
    else
        status = stk_error_set(
            err, STK_ERR_FORMAT, 0,
            "%s: neither a model (config.json) nor a checkpoint (manifest.json) nor swapped state",
            path);
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
