/* trainer/bench_step.c - `stoker bench step`: a training step by kind of work, beside what this
 * machine allows.
 *
 * Random weights and tokens of a model's shape, everything in host memory, through the same engine,
 * visits and operations as `stoker train`. Rounds of limits (bench/bench.h) and steps take turns.
 * Owns: the run; must not know: how an operation is computed. Application's thread. */
#include "base/numeric.h"
#include "base/rng.h"
#include "base/sys.h"
#include "bench/bench.h"
#include "engine/stoker.h"
#include "trainer/cmd.h"
#include "trainer/model.h"
#include "trainer/signals.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct step_opts {
    const char *model, *json;
    uint64_t seq, batch, steps, threads, update_threads;
    int matmul, activations, update;
};

static const char *const matmul_names[] = { "auto", "f32", "bf16", NULL };
static const char *const act_names[] = { "keep", "recompute", NULL };
static const char *const update_names[] = { "serial", "chase", NULL };

#define ROW(field) offsetof(struct step_opts, field)
static const struct opt_row rows[] = {
    { "model", OPT_STRING, ROW(model), .arg = "DIR",
      .help = "take the shape of this model's config.json; default: a Llama of 207 million "
              "parameters" },
    { "seq", OPT_U64, ROW(seq), "512", 1, 1e6, .arg = "N", .help = "tokens of a sequence" },
    { "batch", OPT_U64, ROW(batch), "2", 1, 1e6, .arg = "N", .help = "sequences of a step" },
    { "steps", OPT_U64, ROW(steps), "4", 1, 64, .arg = "N",
      .help = "steps that count; one more before them does not" },
    { "threads", OPT_U64, ROW(threads), "0", 0, 4096, .arg = "N",
      .help = "of compute; 0: from the machine" },
    { "update-threads", OPT_U64, ROW(update_threads), "0", 0, 4096, .arg = "N",
      .help = "of the update; 0: from the machine" },
    { "matmul", OPT_CHOICE, ROW(matmul), "auto", .choices = matmul_names, .arg = "KIND",
      .help = "arithmetic of matrix products" },
    { "activations", OPT_CHOICE, ROW(activations), "keep", .choices = act_names, .arg = "KIND",
      .help = "what a forward leaves for its backward" },
    { "update", OPT_CHOICE, ROW(update), "serial", .choices = update_names, .arg = "KIND",
      .help = "when the update runs" },
    { "json", OPT_STRING, ROW(json), .arg = "FILE", .help = "write the table to a file" },
};
enum { ROW_N = sizeof rows / sizeof rows[0] };
static const char usage[] = "usage: stoker bench step [options]";

struct bench {
    struct step_opts o;
    struct model_config cfg;
    struct model *model;
    stk_engine *e;
    struct bench_limits *limits;
    double *step_s;
    uint64_t n_steps; /* that counted */
    stk_exposed exposed;
    struct dev_work before[DEV_WORK_MAX];
    uint32_t n_before;
};

static stk_status engine_status(const struct bench *b, stk_status st, struct stk_error *err)
{
    if (st == STK_OK || st > 0) return st;
    return stk_error_set(err, st, 0, "%s", b->e ? stk_error_text(b->e) : stk_status_text(st));
}

static stk_status read_config(struct bench *b, struct stk_error *err)
{
    if (b->o.model) {
        char *path = sys_format("%s/config.json", b->o.model);
        if (!path) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
        stk_status st = model_config_read(path, &b->cfg, err);
        sys_free(path);
        return st;
    }
    json_t *doc = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:s}", "model_type",
                            "llama", "vocab_size", 32000, "hidden_size", 1024, "intermediate_size",
                            2816, "num_hidden_layers", 12, "num_attention_heads", 16,
                            "num_key_value_heads", 8, "max_position_embeddings", 2048,
                            "tie_word_embeddings", 0, "torch_dtype", "bfloat16");
    if (!doc) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a configuration");
    return model_config_take("the built-in shape", doc, &b->cfg, err);
}

static stk_status open_engine(struct bench *b, struct stk_error *err)
{
    struct model_opts m = { .seq = (uint32_t)b->o.seq,
                            .sequences = (uint32_t)b->o.batch,
                            .n_micro = 1,
                            .act = OPS_BF16,
                            .param = OPS_BF16 };
    stk_config c;
    STK_TRY(model_open(&b->cfg, &m, &b->model, err));
    stk_config_init(&c, sizeof c);
    c.params = STK_TIER_HOST;
    c.optimizer_state = STK_TIER_HOST;
    c.grads = STK_TIER_HOST;
    c.activations = b->o.activations ? STK_ACT_RECOMPUTE : STK_ACT_KEEP;
    c.update = b->o.update ? STK_UPDATE_CHASE : STK_UPDATE_SERIAL;
    c.matmul = (stk_matmul)b->o.matmul;
    c.compute_threads = (uint32_t)b->o.threads;
    c.update_threads = (uint32_t)b->o.update_threads;
    c.overwrite_grads = true;
    c.client_numerics = model_numerics(b->model);
    STK_TRY(engine_status(b, stk_open(&c, &b->e), err));
    STK_TRY(model_describe(b->model, b->e, err));
    STK_TRY(engine_status(b, stk_seal(b->e, false), err));
    return model_bind(b->model, b->e, err);
}

/* Uniform in a range about as wide as a fresh model's weights, the same piece again and again: the
 * values matter little, their size must be ordinary. Norms are 1. */
static stk_status fill_weights(struct bench *b, struct stk_error *err)
{
    enum { PIECE = 1 << 20 };
    uint16_t *random = sys_calloc(PIECE, sizeof *random), *one = sys_calloc(PIECE, sizeof *one);
    struct rng r;
    stk_status st = random && one ? STK_OK
                                  : stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for weights");
    rng_seed(&r, 1);
    for (uint64_t i = 0; i < PIECE && st == STK_OK; i++) {
        random[i] = stk_f32_to_bf16((float)((rng_uniform(&r) - 0.5) * 0.07));
        one[i] = stk_f32_to_bf16(1.0f);
    }
    for (uint32_t t = 0; t < model_tensor_count(b->model) && st == STK_OK; t++) {
        const struct model_tensor_info *info = model_tensor(b->model, t);
        const uint16_t *from = info->rank == 1 ? one : random;
        for (uint64_t at = 0; at < info->n_elems && st == STK_OK; at += PIECE) {
            uint64_t n = info->n_elems - at < PIECE ? info->n_elems - at : PIECE;
            st = engine_status(b, stk_tensor_write(b->e, t, at, n, from, STK_BF16), err);
        }
    }
    sys_free(random);
    sys_free(one);
    return st;
}

/* The three products of every matrix: y = x W^T, dx = dy W, dW = dy^T x. The embedding has none but
 * as a tied head. */
static stk_status open_limits(struct bench *b, struct stk_error *err)
{
    uint32_t n = 0, count = model_tensor_count(b->model);
    const uint64_t tokens = b->o.seq * b->o.batch;
    struct bench_product *p = sys_calloc(3 * (uint64_t)count, sizeof *p);
    struct dev_caps caps;
    if (!p) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a list of products");
    for (uint32_t t = 0; t < count; t++) {
        const struct model_tensor_info *i = model_tensor(b->model, t);
        if (i->rank != 2 || (i->role == ROLE_EMBED && !b->cfg.tied)) continue;
        p[n++] = (struct bench_product){ tokens, i->shape[0], i->shape[1], false, 1 };
        p[n++] = (struct bench_product){ tokens, i->shape[1], i->shape[0], false, 1 };
        p[n++] = (struct bench_product){ i->shape[0], i->shape[1], tokens, true, 1 };
    }
    dev_caps_read(stk_device(b->e), &caps);
    stk_status st = bench_limits_open(caps.compute_threads, p, n, (uint32_t)b->o.steps + 1,
                                      &b->limits, err);
    sys_free(p);
    return st;
}

/* --- steps ------------------------------------------------------------------------------------ */

static stk_status queue_inputs(struct bench *b, struct rng *r, struct stk_error *err)
{
    const uint64_t tokens = b->o.seq * b->o.batch;
    int32_t *buf = sys_calloc(4 * tokens, sizeof *buf);
    if (!buf) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a batch");
    for (uint64_t t = 0; t < tokens; t++) {
        buf[t] = (int32_t)rng_below(r, b->cfg.vocab);
        buf[tokens + t] = (int32_t)rng_below(r, b->cfg.vocab);
        buf[2 * tokens + t] = (int32_t)(t % b->o.seq);
    }
    model_step_targets(b->model, tokens);
    stk_status st =
        model_inputs(b->model, 0, buf, buf + tokens, buf + 2 * tokens, buf + 3 * tokens, err);
    sys_free(buf);
    return st;
}

static stk_status run_visits(struct bench *b, struct stk_error *err)
{
    for (;;) {
        stk_visit v;
        stk_status st = stk_next(b->e, &v);
        if (st == STK_END) return STK_OK;
        STK_TRY(engine_status(b, st, err));
        STK_TRY(model_visit(b->model, &v, err));
        STK_TRY(engine_status(b, stk_done(b->e, &v), err));
    }
}

static stk_status one_step(struct bench *b, struct rng *r, double *seconds, struct stk_error *err)
{
    stk_step_stats stats;
    uint64_t begin = stk_now_ns(b->e);
    STK_TRY(queue_inputs(b, r, err));
    STK_TRY(engine_status(b, stk_step_begin(b->e, &(stk_step){ .lr = 1e-4 }), err));
    STK_TRY(run_visits(b, err));
    STK_TRY(engine_status(b, stk_step_end(b->e, &stats), err));
    *seconds = (double)(stk_now_ns(b->e) - begin) / 1e9;
    b->exposed.nvme_ns += stats.exposed.nvme_ns;
    b->exposed.copy_ns += stats.exposed.copy_ns;
    b->exposed.update_ns += stats.exposed.update_ns;
    return STK_OK;
}

static stk_status measure(struct bench *b, struct stk_error *err)
{
    struct rng r;
    double warm;
    rng_seed(&r, 7);
    STK_TRY(bench_limits_round(b->limits, err));
    dev_work_measure(stk_device(b->e), true);
    STK_TRY(one_step(b, &r, &warm, err));
    b->n_before = dev_work_read(stk_device(b->e), b->before);
    memset(&b->exposed, 0, sizeof b->exposed);
    for (uint64_t i = 0; i < b->o.steps && !signals_stop(); i++) {
        STK_TRY(one_step(b, &r, &b->step_s[i], err));
        b->n_steps = i + 1;
        STK_TRY(bench_limits_round(b->limits, err));
    }
    return STK_OK;
}

/* --- the table -------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static struct bench_part part_of(const struct bench *b, const struct dev_work *now)
{
    struct dev_work was = { 0 };
    for (uint32_t i = 0; i < b->n_before; i++)
        if (strcmp(b->before[i].what, now->what) == 0) was = b->before[i];
    double steps = (double)b->n_steps;
    return (struct bench_part){
        .what = now->what,
        .seconds = (double)(now->ns - was.ns) / steps / 1e9,
        .flops = (now->flops - was.flops) / steps,
        .bytes = (now->bytes - was.bytes) / steps,
        .calls = (now->calls - was.calls) / b->n_steps,
        /* casts have streams of their own; copies too where there are any */
        .overlapped = strcmp(now->what, "grad_cast") == 0,
    };
}

static struct bench_part wait_of(const struct bench *b, const char *what, uint64_t ns)
{
    return (struct bench_part){ .what = what, .seconds = (double)ns / (double)b->n_steps / 1e9 };
}

static stk_status report(struct bench *b, struct stk_error *err)
{
    struct dev_work now[DEV_WORK_MAX];
    struct bench_part part[DEV_WORK_MAX + 5];
    struct bench_rates rates;
    uint32_t n_now = dev_work_read(stk_device(b->e), now), n = 0;
    if (b->n_steps == 0) return STK_OK;
    double whole = 0, listed = 0;
    for (uint64_t i = 0; i < b->n_steps; i++) whole += b->step_s[i] / (double)b->n_steps;
    for (uint32_t i = 0; i < n_now; i++) {
        struct bench_part p = part_of(b, &now[i]);
        if (p.calls > 0) part[n++] = p;
    }
    part[n++] = wait_of(b, "waits for the update", b->exposed.update_ns);
    part[n - 1].bytes = b->o.update == 0 ? 26.0 * (double)model_param_count(&b->cfg) : 0;
    part[n++] = wait_of(b, "waits for copies", b->exposed.copy_ns + b->exposed.nvme_ns);
    for (uint32_t i = 0; i < n; i++)
        if (!part[i].overlapped) listed += part[i].seconds;
    part[n++] = (struct bench_part){ .what = "between operations",
                                     .seconds = whole > listed ? whole - listed : 0 };
    qsort(b->step_s, b->n_steps, sizeof *b->step_s, compare);
    part[n++] = (struct bench_part){ .what = "step",
                                     .seconds = b->step_s[b->n_steps / 2],
                                     .flops = model_step_flops(b->model),
                                     .calls = b->n_steps };
    bench_limits_rates(b->limits, &rates);
    bench_step_print(part, n, &rates);
    printf("%.0f tokens/s, %.2f of the machine's matrix rate; median of %llu steps; numerics %s\n",
           (double)(b->o.seq * b->o.batch) / part[n - 1].seconds,
           part[n - 1].flops / part[n - 1].seconds / rates.flops_per_s,
           (unsigned long long)b->n_steps, stk_numerics(b->e));
    return b->o.json ? bench_step_json(b->o.json, part, n, &rates, err) : STK_OK;
}

static stk_status run(struct bench *b, struct stk_error *err)
{
    b->step_s = sys_calloc(b->o.steps, sizeof *b->step_s);
    if (!b->step_s) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to begin");
    STK_TRY(read_config(b, err));
    STK_TRY(open_engine(b, err));
    STK_TRY(fill_weights(b, err));
    STK_TRY(open_limits(b, err));
    STK_TRY(measure(b, err));
    return report(b, err);
}

int bench_step(int argc, char **argv)
{
    struct bench b = { 0 };
    struct stk_error err = { 0 };
    if (cmd_help(argc, argv, usage, rows, ROW_N)) return EXIT_DONE;
    if (opts_parse(rows, ROW_N, argc, argv, &b.o, NULL, NULL, &err) != STK_OK)
        return cmd_fail_use(&err);
    int code = run(&b, &err) == STK_OK ? EXIT_DONE : cmd_fail(&err);
    bench_limits_close(b.limits);
    stk_close(b.e);
    model_close(b.model);
    model_config_free(&b.cfg);
    sys_free(b.step_s);
    opts_free(rows, ROW_N, &b.o);
    return code;
}
