/* tests/engine/toy.h - a small real client of the engine for its tests: embedding, residual linear
 * layers with bias, a fused head with loss. It uses the device's operations, so it runs on every
 * device kind. Weights after N steps are the result that must not depend on placement. */
#ifndef TESTS_ENGINE_TOY_H
#define TESTS_ENGINE_TOY_H

#include "base/convert.h"
#include "base/numeric.h"
#include "base/rng.h"
#include "engine/stoker.h"
#include "gpu/ops.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef TOY_TINY /* by who includes this and runs thousands */
enum { TOY_VOCAB = 67, TOY_HIDDEN = 64, TOY_ROWS = 8 };
#else
enum { TOY_VOCAB = 211, TOY_HIDDEN = 64, TOY_ROWS = 24 };
#endif

struct toy {
    stk_config cfg;
    stk_engine *e;
    uint32_t layers, micros;
    bool tied, freeze_first;
    uint32_t tensor_embed, tensor_w[16], tensor_b[16], tensor_head, n_tensors;
    uint32_t h_ids, h_host;
    double loss[8];
    double last_loss;
    uint64_t data_seed, fill_seed;
    double poison_loss_at; /* step at which the loss gradient is infinite; 0: never */
    uint64_t poison_embed_at; /* step at which one element of the embedding's gradient, the last of
                               * backward, is infinite; 0: never */
    uint64_t boost_at;     /* step at which the loss gradient is 4096 times as large; 0: never */
    uint64_t step;
    /* variants: rows of a micro-batch (0: TOY_ROWS); by_row: data depend on the row in the step,
     * not on how it is cut into micro-batches */
    uint32_t rows;
    bool by_row;
    void (*hook)(struct toy *t, const stk_visit *v); /* after a visit's work is queued, before
                                                      * stk_done */
    void *hook_arg;
};

static inline uint32_t toy_rows(const struct toy *t) { return t->rows ? t->rows : TOY_ROWS; }

static inline void toy_init(struct toy *t, uint32_t layers, uint32_t micros)
{
    *t = (struct toy){ .layers = layers, .micros = micros, .data_seed = 7, .fill_seed = 3 };
    stk_config_init(&t->cfg, sizeof t->cfg);
    t->cfg.micro_batches = micros;
    t->cfg.chunk_elems = 2048;
    t->cfg.compute_threads = 1;
    t->cfg.update_threads = 1;
    t->cfg.matmul = STK_MATMUL_F32;
    t->cfg.client_numerics = "toy";
    t->cfg.poison = true;
}

static inline stk_status toy_describe(struct toy *t)
{
    stk_engine *e = t->e;
    uint32_t block, first, blocks[20];
    stk_tensor_desc emb[1] = {
        { .name = "embed", .n_elems = TOY_VOCAB * TOY_HIDDEN, .frozen = t->freeze_first,
          .embedding = true }
    };
    STK_TRY(stk_block(e, "embed", emb, 1, &block, &first));
    blocks[0] = block;
    t->tensor_embed = first;
    for (uint32_t i = 0; i < t->layers; i++) {
        char w[32], b[32], name[32];
        snprintf(w, sizeof w, "layer.%u.w", i);
        snprintf(b, sizeof b, "layer.%u.b", i);
        snprintf(name, sizeof name, "layer.%u", i);
        /* one layer has a frozen matrix before its trainable bias: order and coverage must cope */
        stk_tensor_desc d[2] = {
            { .name = w, .n_elems = TOY_HIDDEN * TOY_HIDDEN, .frozen = t->freeze_first && i == 1 },
            { .name = b, .n_elems = TOY_HIDDEN }
        };
        STK_TRY(stk_block(e, name, d, 2, &blocks[1 + i], &first));
        t->tensor_w[i] = first;
        t->tensor_b[i] = first + 1;
    }
    t->n_tensors = 1 + 2 * t->layers;
    uint32_t head = blocks[0];
    t->tensor_head = t->tensor_embed;
    if (!t->tied) {
        stk_tensor_desc d[1] = { { .name = "head", .n_elems = TOY_VOCAB * TOY_HIDDEN } };
        STK_TRY(stk_block(e, "head", d, 1, &head, &t->tensor_head));
        t->n_tensors++;
    }
    uint64_t act = toy_rows(t) * TOY_HIDDEN * 4;
    stk_place p[20] = { { .block = blocks[0], .flops = 1 } };
    for (uint32_t i = 0; i < t->layers; i++)
        p[1 + i] = (stk_place){ .block = blocks[1 + i],
                                .in_bytes = act,
                                .full_bytes = act,
                                .flops = 2.0 * toy_rows(t) * TOY_HIDDEN * TOY_HIDDEN };
    p[1 + t->layers] = (stk_place){ .block = head,
                                    .fused = true,
                                    .in_bytes = act,
                                    .full_bytes = 64,
                                    .flops = 2.0 * toy_rows(t) * TOY_HIDDEN * TOY_VOCAB };
    STK_TRY(stk_order(e, p, 2 + t->layers));
    STK_TRY(stk_workspace(e, 8u << 20));
    STK_TRY(stk_reserve(e, STK_ON_DEVICE, "inputs", t->micros * toy_rows(t) * 8, &t->h_ids));
    return stk_reserve(e, STK_ON_HOST, "inputs, host side", t->micros * toy_rows(t) * 8 + 8,
                       &t->h_host);
}

static inline uint64_t toy_tensor_elems(const struct toy *t, uint32_t k)
{
    if (k == t->tensor_embed || k == t->tensor_head) return TOY_VOCAB * TOY_HIDDEN;
    for (uint32_t i = 0; i < t->layers; i++)
        if (k == t->tensor_b[i]) return TOY_HIDDEN;
    return TOY_HIDDEN * TOY_HIDDEN;
}

static inline stk_status toy_fill(struct toy *t)
{
    struct rng r;
    for (uint32_t k = 0; k < t->n_tensors; k++) {
        uint64_t n = k == t->tensor_embed || k == t->tensor_head ? TOY_VOCAB * TOY_HIDDEN
                                                                 : TOY_HIDDEN * TOY_HIDDEN;
        for (uint32_t i = 0; i < t->layers; i++)
            if (k == t->tensor_b[i]) n = TOY_HIDDEN;
        float *v = malloc(n * sizeof *v);
        rng_seed_stream(&r, t->fill_seed, k);
        for (uint64_t i = 0; i < n; i++) v[i] = (float)(0.12 * rng_normal(&r));
        stk_status st = stk_tensor_write(t->e, k, 0, n, v, STK_F32);
        free(v);
        STK_TRY(st);
    }
    return STK_OK;
}

static inline stk_status toy_open(struct toy *t)
{
    STK_TRY(stk_open(&t->cfg, &t->e));
    STK_TRY(toy_describe(t));
    STK_TRY(stk_seal(t->e, false));
    return STK_OK;
}

/* Everything of one visit, queued. full holds x of the layer (what its backward needs) so that
 * `recompute` has something to do. */
static inline stk_status toy_visit(struct toy *t, const stk_visit *v, struct stk_error *err)
{
    const int32_t *ids = (const int32_t *)stk_reserved(t->e, t->h_ids) + v->micro * 2 * toy_rows(t);
    const uint16_t *param = v->param;
    struct ops_scratch scratch = { v->workspace, v->workspace_bytes };
    enum ops_dtype pt = t->cfg.dtype == STK_FP16 ? OPS_FP16 : OPS_BF16;
    uint64_t act = toy_rows(t) * TOY_HIDDEN;
    if (v->place == 0) {
        struct ops_embed a = { .tokens = toy_rows(t),
                               .vocab = TOY_VOCAB,
                               .hidden = TOY_HIDDEN,
                               .at = OPS_F32,
                               .pt = pt,
                               .ids = ids,
                               .table = param + stk_tensor_offset(t->e, t->tensor_embed),
                               .y = v->out,
                               .dy = v->flow };
        if (v->dir == STK_FORWARD) return ops_embed_forward(v->stream, &a, err);
        if (!v->grad || t->freeze_first) return STK_OK;
        a.dtable = v->grad + stk_tensor_offset(t->e, t->tensor_embed);
        STK_TRY(ops_embed_backward(v->stream, &a, err));
        if (t->poison_embed_at == 0 || t->step != t->poison_embed_at) return STK_OK;
        return dev_copy(v->stream, v->grad + 5, (uint8_t *)stk_reserved(t->e, t->h_host) +
                        t->micros * toy_rows(t) * 8, 4, DEV_TO_DEVICE, err);
    }
    if (v->place == t->layers + 1) {
        double *loss = &t->loss[v->micro];
        struct ops_head a = { .tokens = toy_rows(t),
                              .hidden = TOY_HIDDEN,
                              .vocab = TOY_VOCAB,
                              .at = OPS_F32,
                              .pt = pt,
                              .x = v->in,
                              .w = param + stk_tensor_offset(t->e, t->tensor_head),
                              .targets = ids + toy_rows(t),
                              .loss_sum = loss,
                              .dx = v->flow,
                              .scratch = scratch };
        a.d_scale = v->loss_scale / (double)(t->micros * toy_rows(t));
        if (t->boost_at > 0 && t->step == t->boost_at) a.d_scale *= 4096;
        if (t->poison_loss_at > 0 && t->step == (uint64_t)t->poison_loss_at) a.d_scale = INFINITY;
        if (v->dir == STK_FORWARD) return ops_head_forward(v->stream, &a, err);
        bool frozen = t->tied && t->freeze_first;
        a.dw = v->grad && !frozen ? v->grad + stk_tensor_offset(t->e, t->tensor_head) : NULL;
        return ops_head_train(v->stream, &a, err);
    }
    uint32_t i = v->place - 1;
    bool w_frozen = t->freeze_first && i == 1;
    struct ops_linear a = { .rows = toy_rows(t),
                            .in = TOY_HIDDEN,
                            .out = TOY_HIDDEN,
                            .at = OPS_F32,
                            .pt = pt,
                            .x = v->in,
                            .w = param + stk_tensor_offset(t->e, t->tensor_w[i]),
                            .bias = param + stk_tensor_offset(t->e, t->tensor_b[i]),
                            .scratch = scratch };
    if (v->dir == STK_FORWARD || v->recompute)
        STK_TRY(dev_copy(v->stream, v->full, v->in, act * 4, DEV_ON_DEVICE, err));
    if (v->dir == STK_FORWARD) {
        STK_TRY(dev_copy(v->stream, v->out, v->in, act * 4, DEV_ON_DEVICE, err));
        a.y = v->out;
        a.add = true;
        return ops_linear_forward(v->stream, &a, err);
    }
    a.x = v->full;
    a.dy = v->flow;
    if (!w_frozen) a.dw = v->grad + stk_tensor_offset(t->e, t->tensor_w[i]);
    a.dbias = v->grad + stk_tensor_offset(t->e, t->tensor_b[i]);
    STK_TRY(ops_linear_backward_weight(v->stream, &a, err));
    a.dx = (uint8_t *)v->workspace + (4u << 20);
    a.scratch.size_bytes = 4u << 20;
    STK_TRY(ops_linear_backward_data(v->stream, &a, err));
    return ops_add(v->stream, OPS_F32, act, v->flow, a.dx, v->flow, err);
}

static inline stk_status toy_inputs(struct toy *t, uint64_t step, struct stk_error *err)
{
    int32_t *h = stk_reserved(t->e, t->h_host);
    h[t->micros * 2 * toy_rows(t)] = 0x7f800000; /* an infinity for poison_embed_at */
    for (uint32_t m = 0; m < t->micros; m++) {
        struct rng r;
        rng_seed_stream(&r, t->data_seed, step * 64 + m);
        for (uint32_t i = 0; i < toy_rows(t); i++) {
            if (t->by_row) rng_seed_stream(&r, t->data_seed, (step << 20) + m * toy_rows(t) + i);
            int32_t id = (int32_t)rng_below(&r, TOY_VOCAB);
            h[m * 2 * toy_rows(t) + i] = id;
            h[m * 2 * toy_rows(t) + toy_rows(t) + i] = (id * 7 + 3) % TOY_VOCAB;
        }
        t->loss[m] = 0;
    }
    return dev_copy(stk_compute_stream(t->e), stk_reserved(t->e, t->h_ids), h,
                    t->micros * toy_rows(t) * 8, DEV_TO_DEVICE, err);
}

static inline stk_status toy_step(struct toy *t, double lr, stk_step_stats *stats)
{
    struct stk_error err = { 0 };
    stk_step s = { lr };
    stk_visit v;
    stk_status st;
    t->step++;
    STK_TRY(stk_step_begin(t->e, &s));
    STK_TRY(toy_inputs(t, t->step, &err));
    while ((st = stk_next(t->e, &v)) == STK_OK) {
        STK_TRY(toy_visit(t, &v, &err));
        if (t->hook) t->hook(t, &v);
        STK_TRY(stk_done(t->e, &v));
    }
    if (st != STK_END) return st;
    st = stk_step_end(t->e, stats);
    double sum = 0;
    for (uint32_t m = 0; m < t->micros; m++) sum += t->loss[m];
    t->last_loss = sum / (t->micros * toy_rows(t));
    return st;
}

/* 64-bit hash over masters and moments of every tensor. */
static inline stk_status toy_hash(struct toy *t, uint64_t *out)
{
    uint64_t h = 1469598103934665603ull;
    float *v = malloc(TOY_VOCAB * TOY_HIDDEN * sizeof *v);
    stk_status st = STK_OK;
    for (uint32_t k = 0; st == STK_OK && k < t->n_tensors; k++) {
        uint64_t n = k == t->tensor_embed || k == t->tensor_head ? TOY_VOCAB * TOY_HIDDEN
                                                                 : TOY_HIDDEN * TOY_HIDDEN;
        for (uint32_t i = 0; i < t->layers; i++)
            if (k == t->tensor_b[i]) n = TOY_HIDDEN;
        for (int what = STK_READ_MASTER; st == STK_OK && what <= STK_READ_EXP_AVG_SQ; what++) {
            st = stk_tensor_read(t->e, k, what, 0, n, v, STK_F32);
            for (uint64_t i = 0; st == STK_OK && i < n; i++)
                h = (h ^ stk_f32_bits(v[i])) * 1099511628211ull;
        }
    }
    free(v);
    if (st == STK_OK) *out = h; /* half of it would be of memory that no read filled */
    return st;
}

#endif
