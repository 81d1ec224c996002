/* tests/engine/mlp.h - a client that keeps its own order and does its own math on the host: a small
 * tanh network with a squared loss. */
#ifndef TESTS_ENGINE_MLP_H
#define TESTS_ENGINE_MLP_H

#include "tests/engine/world.h"

enum { MLP_LAYERS = 4, MLP_WIDTH = 48, MLP_ROWS = 8, MLP_W = MLP_WIDTH * MLP_WIDTH };

struct mlp {
    stk_config cfg;
    stk_engine *e;
    uint32_t block[MLP_LAYERS], w[MLP_LAYERS], b[MLP_LAYERS];
    bool skip_layer;               /* a branch: layer 2 only on odd steps (ZR3-14) */
    bool split;                    /* gradients through stk_grad_add instead of the visit's
                                    * accumulator */
    bool keep_gradients;
    uint32_t calls;                /* backward calls a step (ZR3-02) */
    uint64_t step;
    double loss;
    float x[MLP_LAYERS + 1][MLP_ROWS][MLP_WIDTH], d[MLP_ROWS][MLP_WIDTH], gw[MLP_LAYERS][MLP_W];
};

static inline void mlp_init(struct mlp *m, enum world_place p)
{
    *m = (struct mlp){ .calls = 1 };
    stk_config_init(&m->cfg, sizeof m->cfg);
    m->cfg.chunk_elems = 2048;
    m->cfg.compute_threads = m->cfg.update_threads = 1;
    m->cfg.matmul = STK_MATMUL_F32;
    m->cfg.own_order = true;
    m->cfg.own_visits_max = 64;
    m->cfg.own_held_max = 2;
    m->cfg.poison = true;
    m->cfg.nvme[0] = world_dir("own");
    m->cfg.params = m->cfg.optimizer_state = m->cfg.grads =
        p == WORLD_HOST ? STK_TIER_HOST : STK_TIER_NVME;
    if (p == WORLD_MIXED) m->cfg.params = STK_TIER_HOST;
}

static inline stk_status mlp_seal(struct mlp *m)
{
    STK_TRY(stk_open(&m->cfg, &m->e));
    for (uint32_t i = 0; i < MLP_LAYERS; i++) {
        char w[16], b[16], name[16];
        snprintf(w, sizeof w, "%u.w", i);
        snprintf(b, sizeof b, "%u.b", i);
        snprintf(name, sizeof name, "%u", i);
        stk_tensor_desc d[2] = { { .name = w, .n_elems = MLP_W },
                                 { .name = b, .n_elems = MLP_WIDTH, .no_decay = true } };
        STK_TRY(stk_block(m->e, name, d, 2, &m->block[i], &m->w[i]));
        m->b[i] = m->w[i] + 1;
    }
    return stk_seal(m->e, false);
}

static inline stk_status mlp_open(struct mlp *m)
{
    struct rng r;
    float v[MLP_W];
    STK_TRY(mlp_seal(m));
    rng_seed(&r, 5);
    for (uint32_t i = 0; i < MLP_LAYERS; i++) {
        for (uint32_t k = 0; k < MLP_W; k++) v[k] = (float)(0.2 * rng_normal(&r));
        STK_TRY(stk_tensor_write(m->e, m->w[i], 0, MLP_W, v, STK_F32));
    }
    return STK_OK;
}

static inline void mlp_data(struct mlp *m, uint32_t call)
{
    struct rng r;
    rng_seed_stream(&r, 11, m->step * 16 + call);
    for (uint32_t i = 0; i < MLP_ROWS; i++)
        for (uint32_t k = 0; k < MLP_WIDTH; k++) m->x[0][i][k] = (float)rng_normal(&r);
}

static inline stk_status mlp_forward(struct mlp *m, uint32_t i, uint32_t micro)
{
    stk_visit v;
    STK_TRY(stk_acquire(m->e, m->block[i], STK_FORWARD, micro, &v));
    const uint16_t *w = (const uint16_t *)v.param + stk_tensor_offset(m->e, m->w[i]),
                   *b = (const uint16_t *)v.param + stk_tensor_offset(m->e, m->b[i]);
    for (uint32_t r = 0; r < MLP_ROWS; r++)
        for (uint32_t o = 0; o < MLP_WIDTH; o++) {
            float s = stk_bf16_to_f32(b[o]);
            for (uint32_t k = 0; k < MLP_WIDTH; k++)
                s += stk_bf16_to_f32(w[o * MLP_WIDTH + k]) * m->x[i][r][k];
            m->x[i + 1][r][o] = tanhf(s);
        }
    return stk_release(m->e, &v);
}

static inline stk_status mlp_backward(struct mlp *m, uint32_t i, uint32_t micro)
{
    stk_visit v;
    float dx[MLP_ROWS][MLP_WIDTH] = { { 0 } }, gw[MLP_W] = { 0 }, gb[MLP_WIDTH] = { 0 };
    STK_TRY(stk_acquire(m->e, m->block[i], STK_BACKWARD, micro, &v));
    const uint16_t *w = (const uint16_t *)v.param + stk_tensor_offset(m->e, m->w[i]);
    for (uint32_t r = 0; r < MLP_ROWS; r++)
        for (uint32_t o = 0; o < MLP_WIDTH; o++) {
            float d = m->d[r][o] * (1 - m->x[i + 1][r][o] * m->x[i + 1][r][o]);
            gb[o] += d;
            for (uint32_t k = 0; k < MLP_WIDTH; k++) {
                gw[o * MLP_WIDTH + k] += d * m->x[i][r][k];
                dx[r][k] += d * stk_bf16_to_f32(w[o * MLP_WIDTH + k]);
            }
        }
    memcpy(m->d, dx, sizeof dx);
    for (uint32_t k = 0; m->keep_gradients && k < MLP_W; k++) m->gw[i][k] += gw[k];
    if (m->split) {
        STK_TRY(stk_grad_add(m->e, m->w[i], 0, MLP_W / 2, gw, STK_F32));
        STK_TRY(stk_grad_add(m->e, m->w[i], MLP_W / 2, MLP_W - MLP_W / 2, gw + MLP_W / 2, STK_F32));
        STK_TRY(stk_grad_add(m->e, m->b[i], 0, MLP_WIDTH, gb, STK_F32));
    } else {
        float *a = v.grad + stk_tensor_offset(m->e, m->w[i]),
              *b = v.grad + stk_tensor_offset(m->e, m->b[i]);
        for (uint32_t k = 0; k < MLP_W; k++) a[k] += gw[k];
        for (uint32_t k = 0; k < MLP_WIDTH; k++) b[k] += gb[k];
    }
    return stk_release(m->e, &v);
}

static inline bool mlp_in_step(const struct mlp *m, uint32_t i)
{
    return !m->skip_layer || i != 2 || m->step % 2 == 1;
}

/* Forward and backward of one call; the target is the first input, shifted. */
static inline stk_status mlp_pass(struct mlp *m, uint32_t call, uint32_t micro)
{
    mlp_data(m, call);
    for (uint32_t i = 0; i < MLP_LAYERS; i++) {
        if (mlp_in_step(m, i)) STK_TRY(mlp_forward(m, i, micro));
        else memcpy(m->x[i + 1], m->x[i], sizeof m->x[i]);
    }
    for (uint32_t r = 0; r < MLP_ROWS; r++)
        for (uint32_t o = 0; o < MLP_WIDTH; o++) {
            float d = m->x[MLP_LAYERS][r][o] - 0.5f * tanhf(m->x[0][r][(o + 1) % MLP_WIDTH]);
            m->loss += 0.5 * d * d / (MLP_ROWS * m->calls);
            m->d[r][o] = d / (float)(MLP_ROWS * m->calls);
        }
    for (uint32_t i = MLP_LAYERS; i-- > 0;)
        if (mlp_in_step(m, i)) STK_TRY(mlp_backward(m, i, micro));
    return STK_OK;
}

static inline stk_status mlp_step(struct mlp *m, stk_step_stats *s)
{
    stk_step step = { 2e-3 };
    m->step++;
    m->loss = 0;
    memset(m->gw, 0, sizeof m->gw);
    STK_TRY(stk_step_begin(m->e, &step));
    for (uint32_t c = 0; c < m->calls; c++)
        STK_TRY(mlp_pass(m, c, m->cfg.micro_batches > 1 ? c : 0));
    return stk_step_end(m->e, s);
}

static inline stk_status mlp_hash(struct mlp *m, uint64_t *h)
{
    float v[MLP_W];
    *h = 1469598103934665603ull;
    for (uint32_t i = 0; i < MLP_LAYERS; i++)
        for (int b = 0; b < 2; b++)
            for (int what = STK_READ_MASTER; what <= STK_READ_EXP_AVG_SQ; what++) {
                uint64_t n = b ? MLP_WIDTH : MLP_W;
                STK_TRY(
                    stk_tensor_read(m->e, b ? m->b[i] : m->w[i], (stk_what)what, 0, n, v, STK_F32));
                for (uint64_t k = 0; k < n; k++) *h = (*h ^ stk_f32_bits(v[k])) * 1099511628211ull;
            }
    return STK_OK;
}

#endif
