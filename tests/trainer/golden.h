/* tests/trainer/golden.h - a golden case (tests/golden/README.md) through a model and whatever
 * implements engine/stoker.h.
 *
 * golden_open reads a case: configuration, windows, expected numbers. golden_run_open makes model
 * and engine, fills the weights; golden_step runs one training step without looking at the update,
 * golden_eval one evaluation pass. Comparisons return errors, the caller judges. Uses only public
 * calls, so the same file drives the stand-in of fake_engine.c and the real engine. */
#ifndef TESTS_TRAINER_GOLDEN_H
#define TESTS_TRAINER_GOLDEN_H

#include "base/convert.h"
#include "formats/safetensors.h"
#include "formats/tokens.h"
#include "trainer/model.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const golden_names[] = {
    "llama_gqa_old",           "llama_rope3_tied_new",         "llama_head_dim_new",
    "llama_docs_mask_old",     "llama_docs_midwindow_new",     "mistral_window_new",
    "mistral_window_old",      "mistral_window_docs_mask_new", "qwen2_tied_old",
    "qwen2_window_layers_new", "qwen3_untied_sharded_new",     "qwen3_tied_old",
};
#define GOLDEN_N (sizeof golden_names / sizeof golden_names[0])

struct golden {
    const char *name;
    struct model_config cfg;
    uint32_t seq, windows;
    uint64_t tokens, targets;
    int32_t *ids, *target, *position, *first_key; /* [windows * seq] */
    struct st_set *weights;
    struct st_file *numbers;
    float *logits; /* [tokens, vocab] */
    double loss, bf16_logits_err;
};

/* The folder of the cases comes from the test's environment (meson sets it). */
static inline const char *golden_path(const char *name, const char *file, char *buf,
                                      size_t size_bytes)
{
    const char *root = getenv("STK_GOLDEN");
    snprintf(buf, size_bytes, "%s/%s%s%s", root ? root : "tests/golden", name, file[0] ? "/" : "",
             file);
    return buf;
}

static inline stk_status golden_scalar(const struct golden *g, const char *name, double *out,
                                       struct stk_error *err)
{
    const struct st_tensor *t = st_find(g->numbers, name);
    if (!t || t->size_bytes != sizeof *out)
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: no scalar %s", g->name, name);
    return st_read(g->numbers, t, 0, sizeof *out, out, err);
}

static inline float *golden_f32(const struct golden *g, const char *name, uint64_t n,
                                struct stk_error *err)
{
    const struct st_tensor *t = st_find(g->numbers, name);
    float *out = t && t->dtype == ST_F32 && t->n_elements == n ? malloc(t->size_bytes) : NULL;
    if (out && st_read(g->numbers, t, 0, t->size_bytes, out, err) == STK_OK) return out;
    free(out);
    stk_error_set(err, STK_ERR_FORMAT, 0,
                  "%s: golden.safetensors has no f32 tensor %s of %llu elements", g->name, name,
                  (unsigned long long)n);
    return NULL;
}

static inline stk_status golden_read_shape(struct golden *g, struct stk_error *err)
{
    char path[1024];
    json_t *root = json_load_file(golden_path(g->name, "golden.json", path, sizeof path), 0, NULL);
    g->seq = (uint32_t)json_integer_value(json_object_get(root, "seq"));
    g->windows = (uint32_t)json_integer_value(json_object_get(root, "windows"));
    json_decref(root);
    g->tokens = (uint64_t)g->seq * g->windows;
    return g->tokens ? STK_OK
                     : stk_error_set(err, STK_ERR_FORMAT, 0, "%s: no seq or windows", path);
}

static inline stk_status golden_read_windows(struct golden *g, struct stk_error *err)
{
    char path[1024];
    struct tokens *t;
    STK_TRY(tokens_open(golden_path(g->name, "data.safetensors", path, sizeof path), g->cfg.vocab,
                        &t, err));
    int32_t *all = calloc(4 * g->tokens, sizeof *all);
    if (!all) abort();
    g->ids = all;
    g->target = all + g->tokens;
    g->position = all + 2 * g->tokens;
    g->first_key = all + 3 * g->tokens;
    stk_status st = STK_OK;
    for (uint32_t w = 0; w < g->windows && st == STK_OK; w++) {
        uint64_t at = (uint64_t)w * g->seq, n = 0;
        st = tokens_window(t, g->seq, w, g->ids + at, g->target + at, g->position + at,
                           g->first_key + at, &n, err);
        g->targets += n;
    }
    tokens_close(t);
    return st;
}

/* `config`: "config.json", or "config.other.json" with the same model in the other spelling. */
static inline stk_status golden_open_config(const char *name, const char *config, struct golden *g,
                                            struct stk_error *err)
{
    char path[1024];
    *g = (struct golden){ .name = name };
    STK_TRY(model_config_read(golden_path(name, config, path, sizeof path), &g->cfg, err));
    STK_TRY(golden_read_shape(g, err));
    STK_TRY(golden_read_windows(g, err));
    STK_TRY(st_set_open(golden_path(name, "", path, sizeof path), &g->weights, err));
    STK_TRY(st_open(golden_path(name, "golden.safetensors", path, sizeof path), &g->numbers, err));
    STK_TRY(golden_scalar(g, "loss", &g->loss, err));
    STK_TRY(golden_scalar(g, "bf16_logits_err", &g->bf16_logits_err, err));
    g->logits = golden_f32(g, "logits", g->tokens * g->cfg.vocab, err);
    return g->logits ? STK_OK : STK_ERR_FORMAT;
}

static inline stk_status golden_open(const char *name, struct golden *g, struct stk_error *err)
{
    return golden_open_config(name, "config.json", g, err);
}

static inline void golden_close(struct golden *g)
{
    model_config_free(&g->cfg);
    free(g->ids);
    free(g->logits);
    st_set_close(g->weights);
    st_close(g->numbers);
    *g = (struct golden){ 0 };
}

/* --- running --------------------------------------------------------------------------------- */

struct golden_run {
    struct golden *g;
    struct model *m;
    stk_engine *e;
    uint32_t n_micro;
    uint64_t micro_tokens;
    double loss; /* of the last step: mean over targets */
};

/* For errors of the engine, whose sentence is on its handle. */
static inline stk_status golden_engine(const struct golden_run *r, stk_status st,
                                       struct stk_error *err)
{
    return st == STK_OK || st == STK_END ? st
                                         : stk_error_set(err, st, 0, "%s", stk_error_text(r->e));
}

static inline stk_status golden_fill(const struct golden_run *r, struct stk_error *err)
{
    for (uint32_t t = 0; t < model_tensor_count(r->m); t++) {
        const struct model_tensor_info *info = model_tensor(r->m, t);
        const struct st_tensor *w = st_set_find(r->g->weights, info->name);
        if (!w || w->dtype != ST_BF16 || w->n_elements != info->n_elems)
            return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: no bf16 tensor %s of the right size",
                                 r->g->name, info->name);
        uint16_t *bits = malloc(w->size_bytes);
        if (!bits) abort();
        stk_status st = st_set_read(r->g->weights, w, 0, w->size_bytes, bits, err);
        if (st == STK_OK)
            st = golden_engine(r, stk_tensor_write(r->e, t, 0, info->n_elems, bits, STK_BF16), err);
        free(bits);
        STK_TRY(st);
    }
    return STK_OK;
}

/* `o`: seq, sequences and n_micro are set here; `c`: micro_batches, dtype and client_numerics are.
 * All windows are one step. golden_run_start leaves the parameters to the caller. */
static inline stk_status golden_run_start(struct golden *g, struct model_opts o, stk_config c,
                                          uint32_t n_micro, struct golden_run *r,
                                          struct stk_error *err)
{
    *r = (struct golden_run){ .g = g, .n_micro = n_micro, .micro_tokens = g->tokens / n_micro };
    if (g->windows % n_micro)
        return stk_error_set(err, STK_ERR_STATE, 0, "%u windows in %u parts", g->windows, n_micro);
    o.seq = g->seq;
    o.sequences = g->windows / n_micro;
    o.n_micro = n_micro;
    STK_TRY(model_open(&g->cfg, &o, &r->m, err));
    c.micro_batches = n_micro;
    c.dtype = o.param == OPS_FP16 ? STK_FP16 : STK_BF16;
    c.client_numerics = model_numerics(r->m);
    STK_TRY(golden_engine(r, stk_open(&c, &r->e), err));
    STK_TRY(model_describe(r->m, r->e, err));
    STK_TRY(golden_engine(r, stk_seal(r->e, false), err));
    return model_bind(r->m, r->e, err);
}

static inline stk_status golden_run_open(struct golden *g, struct model_opts o, stk_config c,
                                         uint32_t n_micro, struct golden_run *r,
                                         struct stk_error *err)
{
    STK_TRY(golden_run_start(g, o, c, n_micro, r, err));
    return golden_fill(r, err);
}

static inline void golden_run_close(struct golden_run *r)
{
    stk_close(r->e);
    model_close(r->m);
    *r = (struct golden_run){ 0 };
}

static inline stk_status golden_visits(struct golden_run *r, struct stk_error *err)
{
    for (uint32_t i = 0; i < r->n_micro; i++) {
        uint64_t at = i * r->micro_tokens;
        STK_TRY(model_inputs(r->m, i, r->g->ids + at, r->g->target + at, r->g->position + at,
                             r->g->first_key + at, err));
    }
    stk_visit v;
    stk_status st;
    while ((st = golden_engine(r, stk_next(r->e, &v), err)) == STK_OK) {
        STK_TRY(model_visit(r->m, &v, err));
        STK_TRY(golden_engine(r, stk_done(r->e, &v), err));
    }
    return st == STK_END ? STK_OK : st;
}

static inline stk_status golden_step(struct golden_run *r, struct stk_error *err)
{
    stk_step s = { .lr = 1e-3 };
    STK_TRY(golden_engine(r, stk_step_begin(r->e, &s), err));
    model_step_targets(r->m, r->g->targets);
    STK_TRY(golden_visits(r, err));
    STK_TRY(golden_engine(r, stk_step_end(r->e, NULL), err));
    r->loss = model_loss_sum(r->m) / (double)r->g->targets;
    return STK_OK;
}

static inline stk_status golden_eval(struct golden_run *r, struct stk_error *err)
{
    STK_TRY(golden_engine(r, stk_eval_begin(r->e), err));
    STK_TRY(golden_visits(r, err));
    STK_TRY(golden_engine(r, stk_eval_end(r->e), err));
    r->loss = model_loss_sum(r->m) / (double)r->g->targets;
    return STK_OK;
}

/* --- comparing ------------------------------------------------------------------------------- */

/* Largest difference; infinite if anything is not a number. */
static inline double golden_distance(const float *a, const float *b, uint64_t n)
{
    double worst = 0;
    for (uint64_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= worst)) worst = isnan(d) ? INFINITY : d;
    }
    return worst;
}

/* Needs opts.logits and a golden_eval before. */
static inline double golden_logits_error(const struct golden_run *r)
{
    double worst = 0;
    uint64_t n = r->micro_tokens * r->g->cfg.vocab;
    for (uint32_t i = 0; i < r->n_micro; i++) {
        double d = golden_distance(model_logits(r->m, i), r->g->logits + i * n, n);
        if (d > worst) worst = d;
    }
    return worst;
}

/* Gradient of engine tensor t after golden_step; free() it. NULL with the sentence in err. */
static inline float *golden_grad(const struct golden_run *r, uint32_t t, struct stk_error *err)
{
    uint64_t n = model_tensor(r->m, t)->n_elems;
    float *g = malloc(n * sizeof *g);
    if (g &&
        golden_engine(r, stk_tensor_read(r->e, t, STK_READ_GRAD, 0, n, g, STK_F32), err) == STK_OK)
        return g;
    free(g);
    return NULL;
}

/* Largest error relative to the largest element of the expected gradient. *bf16_err: what torch's
 * own bf16 run has (may be NULL). */
static inline stk_status golden_grad_error(const struct golden_run *r, uint32_t t, double *out,
                                           double *bf16_err, struct stk_error *err)
{
    const struct model_tensor_info *info = model_tensor(r->m, t);
    char name[160];
    if (bf16_err) {
        snprintf(name, sizeof name, "bf16_grad_err.%s", info->name);
        STK_TRY(golden_scalar(r->g, name, bf16_err, err));
    }
    snprintf(name, sizeof name, "grad.%s", info->name);
    float *want = golden_f32(r->g, name, info->n_elems, err),
          *got = want ? golden_grad(r, t, err) : NULL;
    double largest = 0;
    for (uint64_t i = 0; want && i < info->n_elems; i++)
        largest = fmax(largest, fabs((double)want[i]));
    if (got) *out = golden_distance(want, got, info->n_elems) / largest;
    free(want);
    free(got);
    return got ? STK_OK
               : stk_error_set(err, STK_ERR_STATE, 0, "%s: no gradient of %s", r->g->name,
                               info->name);
}

#endif
