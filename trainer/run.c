/* trainer/run.c - model folder, token file and engine brought together.
 *
 * Owns: the order in which they are opened and what memory they share. Must not know: optimizer
 * steps (train.c), what a verb prints. Application's thread. */
#include "trainer/run.h"
#include "base/sys.h"
#include "trainer/signals.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

stk_status run_engine(const struct run *r, stk_status st, struct stk_error *err)
{
    if (st == STK_OK || st > 0) return st;
    const char *text = r->e ? stk_error_text(r->e) : "";
    return stk_error_set(err, st, 0, "%s", text[0] ? text : stk_status_text(st));
}

static uint64_t micro_tokens(const struct run *r) { return r->opts->seq * r->opts->micro_batch; }

static stk_status open_files(struct run *r, struct stk_error *err)
{
    STK_TRY(source_open(&r->src, r->opts->model, !r->machine, err));
    STK_TRY(tokens_open(r->opts->data, r->src.cfg.vocab, &r->data, err));
    return tokens_check_seq(r->data, r->opts->seq, err);
}

/* A disk in memory, in virtual time: about a middling NVMe drive. */
static stk_status open_sim_disk(struct run *r, stk_config *c, struct stk_error *err)
{
    uint32_t ppm = (uint32_t)r->opts->sim_faults;
    STK_TRY(io_sim_disk_new(1ull << 46, &r->sim_disk, err));
    r->sim = (struct io_sim_cfg){ .disk = r->sim_disk,
                                  .seed = r->opts->sim_seed,
                                  .latency_ns = 80000,
                                  .read_bytes_per_s = 3e9,
                                  .write_bytes_per_s = 2e9,
                                  .faults = { .read_error_ppm = ppm,
                                              .write_error_ppm = ppm,
                                              .short_ppm = ppm,
                                              .no_space_ppm = ppm,
                                              .flip_bit_ppm = ppm,
                                              .rot_bit_ppm = ppm,
                                              .misdirect_ppm = ppm,
                                              .lost_write_ppm = ppm,
                                              .lost_completion_ppm = ppm,
                                              .late_ppm = ppm,
                                              .reorder_ppm = ppm,
                                              .late_ns = 10000000 } };
    c->sim_disk = &r->sim;
    return STK_OK;
}

static stk_status open_engine(struct run *r, bool eval, bool logits, struct stk_error *err)
{
    struct model_opts m;
    stk_config c;
    run_opts_model(r->opts, &m);
    m.eval_only = eval;
    m.logits = logits;
    STK_TRY(model_open(&r->src.cfg, &m, &r->model, err));
    run_opts_engine(r->opts, &c);
    c.overwrite_grads = true;
    c.client_numerics = model_numerics(r->model);
    c.machine = r->machine;
    if (eval) c.activations = STK_ACT_RECOMPUTE; /* nothing is kept for a backward pass (MEM-11) */
    if (c.storage == STK_STORAGE_SIM) STK_TRY(open_sim_disk(r, &c, err));
    STK_TRY(run_engine(r, stk_open(&c, &r->e), err));
    STK_TRY(model_describe(r->model, r->e, err));
    return run_engine(r,
                      stk_reserve(r->e, STK_ON_HOST, "file buffers",
                                  RUN_BUF_BYTES + 4 * micro_tokens(r) * sizeof(int32_t), &r->h_buf),
                      err);
}

stk_status run_open(struct run *r, const struct run_opts *o, bool eval, bool logits,
                    struct stk_error *err)
{
    r->opts = o;
    STK_TRY(run_check_nvme(o, err));
    STK_TRY(open_files(r, err));
    return open_engine(r, eval, logits, err);
}

stk_status run_seal(struct run *r, bool dry, struct stk_error *err)
{
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    STK_TRY(run_engine(r, stk_seal(r->e, dry), err));
    if (dry) return STK_OK;
    clock_gettime(CLOCK_MONOTONIC, &end);
    r->seal_s = (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) / 1e9;
    r->buf = stk_reserved(r->e, r->h_buf);
    r->ids = (int32_t *)(void *)((uint8_t *)r->buf + RUN_BUF_BYTES);
    r->targets = r->ids + micro_tokens(r);
    r->position = r->targets + micro_tokens(r);
    r->first_key = r->position + micro_tokens(r);
    return model_bind(r->model, r->e, err);
}

void run_close(struct run *r)
{
    char *left;
    if (stk_close_left(r->e, &left) != STK_OK) {
        fflush(stdout);
        fprintf(stderr, "stoker: ALARM: %s\n", left ? left : "swap files could not be removed");
    }
    stk_free(left);
    io_sim_disk_free(r->sim_disk);
    model_close(r->model);
    if (r->data) tokens_close(r->data);
    source_close(&r->src);
    r->e = NULL;
    r->sim_disk = NULL;
    r->model = NULL;
    r->data = NULL;
}

/* --- loading ---------------------------------------------------------------------------------- */

static stk_status load_tensor(struct run *r, uint32_t id, uint64_t *done_bytes,
                              struct stk_error *err)
{
    const struct model_tensor_info *info = model_tensor(r->model, id);
    const struct st_tensor *t = source_find(&r->src, info->name);
    if (!t)
        return stk_error_set(err, STK_ERR_FORMAT, 0, "%s: tensor %s is missing", r->opts->model,
                             info->name);
    stk_dtype dtype = t->dtype == ST_BF16 ? STK_BF16 : t->dtype == ST_F16 ? STK_FP16 : STK_F32;
    uint64_t width = st_dtype_bytes(t->dtype), piece = RUN_BUF_BYTES / width;
    for (uint64_t at = 0; at < info->n_elems; at += piece) {
        uint64_t n = info->n_elems - at < piece ? info->n_elems - at : piece;
        STK_TRY(st_set_read(r->src.set, t, at * width, n * width, r->buf, err));
        STK_TRY(run_engine(r, stk_tensor_write(r->e, id, at, n, r->buf, dtype), err));
        pulse_done(r->pulse, *done_bytes += n * width);
        if (signals_stop())
            return stk_error_set(err, STK_ERR_INTERRUPTED, 0, "interrupted while loading %s",
                                 r->opts->model);
    }
    return STK_OK;
}

stk_status run_load(struct run *r, struct stk_error *err)
{
    uint64_t total = 0, done = 0;
    for (uint32_t i = 0; i < st_set_count(r->src.set); i++)
        total += st_set_at(r->src.set, i)->size_bytes;
    pulse_phase(r->pulse, "loading the model", total);
    stk_status st = STK_OK;
    for (uint32_t i = 0; i < model_tensor_count(r->model) && st == STK_OK; i++)
        st = load_tensor(r, i, &done, err);
    pulse_phase(r->pulse, NULL, 0);
    return st;
}

/* --- batches ---------------------------------------------------------------------------------- */

static void empty_row(struct run *r, uint64_t at)
{
    for (uint64_t t = 0; t < r->opts->seq; t++) {
        r->ids[at + t] = 0;
        r->targets[at + t] = -1;
        r->position[at + t] = (int32_t)t;
        r->first_key[at + t] = 0;
    }
}

stk_status run_inputs(struct run *r, struct tokens *data, uint32_t micro, const uint64_t *windows,
                      uint64_t *n_targets, struct stk_error *err)
{
    const uint64_t seq = r->opts->seq;
    for (uint64_t k = 0; k < r->opts->micro_batch; k++) {
        uint64_t n = 0, at = k * seq;
        if (windows[k] == UINT64_MAX) {
            empty_row(r, at);
            continue;
        }
        STK_TRY(tokens_window(data, seq, windows[k], r->ids + at, r->targets + at, r->position + at,
                              r->first_key + at, &n, err));
        *n_targets += n;
    }
    return model_inputs(r->model, micro, r->ids, r->targets, r->position, r->first_key, err);
}

stk_status run_visits(struct run *r, struct stk_error *err)
{
    for (;;) {
        stk_visit v;
        stk_status st = stk_next(r->e, &v);
        if (st == STK_END) return STK_OK;
        STK_TRY(run_engine(r, st, err));
        STK_TRY(model_visit(r->model, &v, err));
        STK_TRY(run_engine(r, stk_done(r->e, &v), err));
    }
}

/* --- evaluation ------------------------------------------------------------------------------- */

/* One pass over up to `batch` windows from `first`. */
static stk_status eval_pass(struct run *r, struct tokens *data, uint64_t first, uint64_t n_windows,
                            uint64_t *row, double *loss, uint64_t *targets, struct stk_error *err)
{
    const struct run_opts *o = r->opts;
    uint64_t n = 0;
    for (uint32_t m = 0; m < o->batch / o->micro_batch; m++) {
        for (uint64_t k = 0; k < o->micro_batch; k++) {
            uint64_t w = first + m * o->micro_batch + k;
            row[k] = w < n_windows ? w : UINT64_MAX;
        }
        STK_TRY(run_inputs(r, data, m, row, &n, err));
    }
    model_step_targets(r->model, n ? n : 1);
    STK_TRY(run_engine(r, stk_eval_begin(r->e), err));
    STK_TRY(run_visits(r, err));
    STK_TRY(run_engine(r, stk_eval_end(r->e), err));
    *loss += model_loss_sum(r->model);
    *targets += n;
    return STK_OK;
}

static stk_status send_logits(struct run *r, uint64_t first, uint64_t n_windows,
                              run_logits_fn *sink, void *arg, struct stk_error *err)
{
    const struct run_opts *o = r->opts;
    for (uint64_t i = 0; i < o->batch && first + i < n_windows; i++) {
        const float *logits = model_logits(r->model, (uint32_t)(i / o->micro_batch));
        STK_TRY(sink(arg, first + i, logits + i % o->micro_batch * o->seq * r->src.cfg.vocab, err));
    }
    return STK_OK;
}

stk_status run_evaluate(struct run *r, struct tokens *data, run_logits_fn *sink, void *arg,
                        struct run_eval *out, struct stk_error *err)
{
    const struct run_opts *o = r->opts;
    uint64_t n_windows = tokens_windows(data, o->seq), targets = 0;
    double loss = 0;
    uint64_t *row = sys_calloc(o->micro_batch, sizeof *row);
    if (!row) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a batch");
    pulse_count(r->pulse, "evaluating", n_windows, "windows");
    stk_status st = STK_OK;
    for (uint64_t w = 0; w < n_windows && st == STK_OK; w += o->batch) {
        pulse_done(r->pulse, w);
        st = eval_pass(r, data, w, n_windows, row, &loss, &targets, err);
        if (st == STK_OK && sink) st = send_logits(r, w, n_windows, sink, arg, err);
    }
    pulse_phase(r->pulse, NULL, 0);
    sys_free(row);
    if (st != STK_OK) return st;
    if (targets == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "no window of the data holds a target: nothing can be evaluated");
    *out = (struct run_eval){ .loss = loss / (double)targets,
                              .targets = targets,
                              .windows = n_windows };
    out->perplexity = exp(out->loss);
    return STK_OK;
}
