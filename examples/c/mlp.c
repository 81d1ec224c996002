/* mlp.c - a training program that uses only stoker.h and its own math.
 *
 * A classifier of two interleaved spirals: an MLP 2 -> 64 -> 64 -> 64 -> 2 with tanh. Its
 * parameters, gradients and Adam state live on a disk; stoker brings each layer when it is
 * acquired. The program keeps its own order of visits (config.own_order): the order is recorded in
 * the first step and planned from the second on.
 *
 *     mlp [FOLDER]      FOLDER: where the state is kept (default: a new folder in $TMPDIR, removed
 *             at the end)
 *
 * Exit code 0: it learned (accuracy on unseen points above 95 %); 1: an error, or it did not learn.
 * See README.md. */
#define _POSIX_C_SOURCE 200809L /* mkdtemp */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <stoker.h>
#include <string.h>
#include <unistd.h>

enum { LAYERS = 4, HIDDEN = 64, BATCH = 128, STEPS = 600, CLASSES = 2, WIDTH = 64 };
static const int width[LAYERS + 1] = { 2, HIDDEN, HIDDEN, HIDDEN, CLASSES };

struct layer { uint32_t block, w, b; }; /* stoker's ids of the block and its two tensors */

struct mlp {
    stk_engine *e;
    struct layer layer[LAYERS];
    float x[LAYERS + 1][BATCH][WIDTH]; /* activations: x[0] is the input, x[LAYERS] the logits */
    float d[BATCH][WIDTH];             /* gradient of the current layer's output */
    int label[BATCH];
    uint64_t rng;
};

static float bf16(uint16_t v) /* parameters are 16-bit: the upper half of a float */
{
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static double uniform(struct mlp *m) /* xorshift64* (Vigna, 2016), in [0, 1) */
{
    m->rng ^= m->rng >> 12;
    m->rng ^= m->rng << 25;
    m->rng ^= m->rng >> 27;
    return (double)((m->rng * 2685821657736338717ull) >> 11) / 9007199254740992.0;
}

static void sample(struct mlp *m)
{
    for (int i = 0; i < BATCH; i++) {
        int c = i % CLASSES;
        double r = 0.1 + 0.9 * uniform(m), a = r * 7 + 3.14159265 * c;
        m->label[i] = c;
        m->x[0][i][0] = (float)(r * cos(a) + 0.01 * (uniform(m) - 0.5));
        m->x[0][i][1] = (float)(r * sin(a) + 0.01 * (uniform(m) - 0.5));
    }
}

/* --- the math of one layer, between acquire and release --------------------------------------- */

static stk_status forward(struct mlp *m, int i)
{
    const struct layer *l = &m->layer[i];
    stk_visit v;
    stk_status st = stk_acquire(m->e, l->block, STK_FORWARD, 0, &v);
    if (st != STK_OK) return st;
    const uint16_t *w = (const uint16_t *)v.param + stk_tensor_offset(m->e, l->w);
    const uint16_t *b = (const uint16_t *)v.param + stk_tensor_offset(m->e, l->b);
    for (int r = 0; r < BATCH; r++)
        for (int o = 0; o < width[i + 1]; o++) {
            float s = bf16(b[o]);
            for (int k = 0; k < width[i]; k++) s += bf16(w[o * width[i] + k]) * m->x[i][r][k];
            m->x[i + 1][r][o] = i + 1 < LAYERS ? tanhf(s) : s;
        }
    return stk_release(m->e, &v);
}

static stk_status backward(struct mlp *m, int i)
{
    const struct layer *l = &m->layer[i];
    stk_visit v;
    stk_status st = stk_acquire(m->e, l->block, STK_BACKWARD, 0, &v);
    if (st != STK_OK) return st;
    const uint16_t *w = (const uint16_t *)v.param + stk_tensor_offset(m->e, l->w);
    float *gw = v.grad + stk_tensor_offset(m->e, l->w); /* fp32: add to it */
    float *gb = v.grad + stk_tensor_offset(m->e, l->b);
    for (int r = 0; r < BATCH; r++) {
        float dx[WIDTH] = { 0 };
        for (int o = 0; o < width[i + 1]; o++) {
            float y = m->x[i + 1][r][o], d = m->d[r][o] * (i + 1 < LAYERS ? 1 - y * y : 1);
            gb[o] += d;
            for (int k = 0; k < width[i]; k++) {
                gw[o * width[i] + k] += d * m->x[i][r][k];
                dx[k] += d * bf16(w[o * width[i] + k]);
            }
        }
        memcpy(m->d[r], dx, sizeof dx);
    }
    return stk_release(m->e, &v);
}

/* Mean cross-entropy; leaves its gradient in m->d and counts the right ones. */
static double loss(struct mlp *m, int *right)
{
    double sum = 0;
    *right = 0;
    for (int r = 0; r < BATCH; r++) {
        const float *y = m->x[LAYERS][r];
        int c = m->label[r];
        double p0 = 1 / (1 + exp((double)y[1] - y[0])), p[CLASSES] = { p0, 1 - p0 };
        sum -= log(p[c] > 1e-30 ? p[c] : 1e-30);
        *right += p[c] > 0.5;
        for (int o = 0; o < CLASSES; o++) m->d[r][o] = (float)((p[o] - (o == c)) / BATCH);
    }
    return sum / BATCH;
}

/* --- the run: describe, seal, fill, steps ----------------------------------------------------- */

static stk_status set_up(struct mlp *m, const char *folder)
{
    stk_config c;
    stk_config_init(&c, sizeof c);
    c.nvme[0] = folder;
    c.params = c.optimizer_state = c.grads = STK_TIER_NVME;
    c.own_order = true;
    c.own_visits_max = 2 * LAYERS;
    c.own_held_max = 1;
    c.weight_decay = 0;
    c.client_numerics = "mlp";
    c.chunk_elems = 4096;
    stk_status st = stk_open(&c, &m->e);
    for (int i = 0; i < LAYERS && st == STK_OK; i++) {
        char w[16], b[16], name[16];
        snprintf(name, sizeof name, "layer.%d", i);
        snprintf(w, sizeof w, "%d.weight", i);
        snprintf(b, sizeof b, "%d.bias", i);
        stk_tensor_desc d[2] = { { .name = w, .n_elems = (uint64_t)width[i] * width[i + 1] },
                                 { .name = b, .n_elems = (uint64_t)width[i + 1] } };
        st = stk_block(m->e, name, d, 2, &m->layer[i].block, &m->layer[i].w);
        m->layer[i].b = m->layer[i].w + 1;
    }
    if (st == STK_OK) st = stk_seal(m->e, false); /* everything is reserved, or refused, here */
    for (int i = 0; i < LAYERS && st == STK_OK; i++) {
        float v[WIDTH * WIDTH];
        int n = width[i] * width[i + 1];
        for (int k = 0; k < n; k++) v[k] = (float)((uniform(m) - 0.5) * 2 * sqrt(3.0 / width[i]));
        /* what is not written is zero */
        st = stk_tensor_write(m->e, m->layer[i].w, 0, (uint64_t)n, v, STK_F32);
    }
    return st;
}

static stk_status train(struct mlp *m)
{
    stk_status st = STK_OK;
    for (int step = 1; step <= STEPS && st == STK_OK; step++) {
        stk_step s = { .lr = 3e-3 * (step < 50 ? step / 50.0
                                               : 0.5 * (1 + cos(3.14159265 * step / STEPS))) };
        stk_step_stats stats;
        int right;
        sample(m);
        st = stk_step_begin(m->e, &s);
        for (int i = 0; i < LAYERS && st == STK_OK; i++) st = forward(m, i);
        double l = loss(m, &right);
        for (int i = LAYERS; i-- > 0 && st == STK_OK;) st = backward(m, i);
        if (st == STK_OK) st = stk_step_end(m->e, &stats);
        if (st == STK_OK && (step == 1 || step % 100 == 0))
            printf("# step %4d  loss %.4f  accuracy %5.1f %%  gradient norm %.3f  read %llu, "
                   "written %llu bytes, departures %llu\n",
                   step, l, 100.0 * right / BATCH, stats.grad_norm,
                   (unsigned long long)stats.nvme_read_bytes,
                   (unsigned long long)stats.nvme_write_bytes,
                   (unsigned long long)stats.departures);
    }
    return st;
}

/* A step with forward visits only: nothing gets a gradient, so nothing is updated. */
static stk_status evaluate(struct mlp *m, double *accuracy)
{
    stk_step s = { 0 };
    int all = 0, right;
    stk_status st = STK_OK;
    for (int k = 0; k < 8 && st == STK_OK; k++) {
        sample(m);
        st = stk_step_begin(m->e, &s);
        for (int i = 0; i < LAYERS && st == STK_OK; i++) st = forward(m, i);
        if (st == STK_OK) st = stk_step_end(m->e, NULL);
        loss(m, &right);
        all += right;
    }
    *accuracy = all / (8.0 * BATCH);
    return st;
}

int main(int argc, char **argv)
{
    static struct mlp m = { .rng = 20261130 };
    const char *tmp = getenv("TMPDIR");
    char made[512] = "";
    double accuracy = 0;
    snprintf(made, sizeof made, "%s/stoker-mlp-XXXXXX", tmp ? tmp : "/tmp");
    if (argc < 2 && !mkdtemp(made)) return 1;
    stk_status st = set_up(&m, argc < 2 ? made : argv[1]);
    if (st == STK_OK) st = train(&m);
    if (st == STK_OK) st = evaluate(&m, &accuracy);
    if (st != STK_OK) fprintf(stderr, "mlp: %s\n", m.e ? stk_error_text(m.e) : stk_status_name(st));
    else printf("# accuracy on unseen points: %.1f %%\n", 100 * accuracy);
    stk_close(m.e);
    if (argc < 2) rmdir(made); /* stoker left nothing in it */
    return st == STK_OK && accuracy > 0.95 ? 0 : 1;
}
