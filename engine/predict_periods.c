/* engine/predict_periods.c - predict_run: which periods are predicted, and what of them is the step.
 *
 * Pure but for its memory; any thread. Must not know how a period runs (predict_run.c). Periods of all
 * modes but one are alike. A speculating one does what the one before left to it, and leaves something
 * to the next: with too little time for all, a period that found much done may leave much undone, and the
 * next the other way round. One alone can then be shorter than its share of the drive's work takes. */
#include "engine/predict.h"
#include "base/sys.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What one period leaves to the next: a row of bytes, one a chunk (PREDICT_MADE). */
#define PERIODS_MOST 8u
struct predict_chain {
    uint8_t *row[PERIODS_MOST + 1];
    stk_prediction out[PERIODS_MOST];
    uint32_t n; /* periods that were run: row[n] is what the last of them left */
};

/* Of a step's work, what a row says is done already: bytes of parameters whose chunks were updated, or bytes
 * that the drives moved for it. A NULL row: all of the step's. */
static double done_bytes(const struct predict_in *in, const uint8_t *row, bool drives)
{
    double sum = 0;
    for (uint32_t i = 0; i < in->input->n_chunks; i++) {
        const struct plan_chunk_in *c = &in->input->chunks[i];
        bool made = !row || (row[i] & PREDICT_MADE);
        if (!drives && made && !c->frozen) sum += (double)c->bytes[CHUNK_PARAM];
        for (uint32_t s = CHUNK_PARAM; drives && !c->frozen && s <= CHUNK_OPT; s++)
            if (c->home[s] == CHUNK_NVME)
                sum += (double)((c->bytes[s] + 4095) / 4096) * (made ? 2 : (row[i] & 1u << s) != 0);
    }
    return sum;
}

/* The periods to take the mean of, [*first, n): once a period begins as an earlier one did, what follows
 * is a circle. True: it is one; or no more are run, and those are taken that begin and end most alike. */
static bool find_circle(const struct predict_in *in, const struct predict_chain *c, uint32_t *first)
{
    double least = INFINITY, end = done_bytes(in, c->row[c->n], false);
    for (*first = c->n; (*first)-- > 0;)
        if (!memcmp(c->row[*first], c->row[c->n], in->input->n_chunks)) return true;
    *first = c->n - 1;
    if (c->n < PERIODS_MOST) return false;
    for (uint32_t i = c->n; i-- > 1;) {
        double apart = fabs(done_bytes(in, c->row[i], false) - end);
        if (apart >= least) continue;
        least = apart;
        *first = i;
    }
    return true;
}

static void add_resource(stk_prediction *sum, const char *name, double busy_s, double alone_s)
{
    uint32_t k = 0;
    while (k < sum->n_resources && strcmp(sum->resource[k].name, name) != 0) k++;
    if (k == STK_PREDICT_RESOURCES) return;
    if (k == sum->n_resources) {
        snprintf(sum->resource[k].name, sizeof sum->resource[k].name, "%s", name);
        sum->n_resources++;
    }
    sum->resource[k].busy_s += busy_s;
    sum->resource[k].alone_s += alone_s;
    if (sum->resource[k].alone_s > sum->resource[sum->busiest].alone_s) sum->busiest = k;
}

static void add_part(stk_prediction *sum, const stk_prediction *x, double part)
{
    sum->step_s += part * x->step_s;
    sum->compute_s += part * x->compute_s;
    sum->exposed_s.nvme += part * x->exposed_s.nvme;
    sum->exposed_s.copy += part * x->exposed_s.copy;
    sum->exposed_s.update += part * x->exposed_s.update;
    sum->exposed_s.gather += part * x->exposed_s.gather;
    sum->exposed_s.other += part * x->exposed_s.other;
    for (uint32_t k = 0; k < x->n_resources; k++)
        add_resource(sum, x->resource[k].name, part * x->resource[k].busy_s,
                     part * x->resource[k].alone_s);
}

/* The mean of a circle. Periods that are none and leave more for later than they found have done less
 * than a step's work each: the mean is of as much work as steps have. */
static void mean_of(const struct predict_in *in, const struct predict_chain *c, uint32_t first,
                    stk_prediction *out)
{
    double n = c->n - first, more = 1;
    for (int drives = 0; drives < 2; drives++) {
        double all = n * done_bytes(in, NULL, drives),
               lacks = done_bytes(in, c->row[first], drives) - done_bytes(in, c->row[c->n], drives);
        if (lacks > 0 && all > lacks && all / (all - lacks) > more) more = all / (all - lacks);
    }
    *out = (stk_prediction){ .size = out->size };
    for (uint32_t k = first; k < c->n; k++) add_part(out, &c->out[k], more / n);
}

/* A speculating step does what the one before left, and leaves something: what it takes is the mean of
 * those that come round again. */
static stk_status run_chain(const struct predict_in *in, struct predict_chain *c, predict_node_fn *each,
                            void *arg, stk_prediction *out, struct stk_error *err)
{
    uint32_t first = 0;
    stk_status st = STK_OK;
    do {
        c->out[c->n].size = sizeof c->out[c->n];
        st = predict_period(in, NULL, NULL, c->row[c->n], c->row[c->n + 1], &c->out[c->n], err);
        c->n++;
    } while (st == STK_OK && !find_circle(in, c, &first));
    if (st == STK_OK) mean_of(in, c, first, out);
    if (st != STK_OK || !each) return st;
    stk_prediction last = { .size = sizeof last };
    return predict_period(in, each, arg, c->row[c->n - 1], c->row[c->n], &last, err);
}

stk_status predict_run(const struct predict_in *in, predict_node_fn *each, void *arg,
                       stk_prediction *out, struct stk_error *err)
{
    size_t n = (size_t)in->input->n_chunks + 1;
    bool spec = in->input->update == PLAN_SPECULATE && in->parts == (PLAN_RUN_UPDATE | PLAN_RUN_VISITS);
    struct predict_chain *c = sys_calloc(1, sizeof *c);
    uint8_t *rows = sys_calloc((PERIODS_MOST + 1) * n, 1);
    stk_status st = predict_check(in, err);
    if (st == STK_OK && (!c || !rows))
        st = stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to predict a step");
    for (uint32_t k = 0; st == STK_OK && k <= PERIODS_MOST; k++) c->row[k] = rows + k * n;
    for (uint32_t i = 0; st == STK_OK && spec && i + 1 < n; i++)
        rows[i] = in->norm_fails || !in->input->chunks[i].spec ? 0 : PREDICT_MADE;
    if (st == STK_OK && spec) st = run_chain(in, c, each, arg, out, err);
    else if (st == STK_OK) st = predict_period(in, each, arg, c->row[0], c->row[1], out, err);
    sys_free(c);
    sys_free(rows);
    return st;
}
