/* gpu/host/kernels/elementwise_isa.c - rotary, SwiGLU, embedding, additions; compiled once per
 * instruction set (KERN_ISA), the same bits from each: no fma, fixed order, our own exp (vec.h).
 *
 * Must not know: streams, other operations. Runs on a stream's lane with a team of c->threads (one
 * thread for small work). Each output element is written by one thread from inputs in one order, so
 * results do not depend on the threads. */
#include "gpu/host/kernels/kern.h"
#include "gpu/host/kernels/vec.h"

#include <math.h>

enum { CHUNK = 4096, ROPE_PAIRS = 128, ROPE_FAR = 1 << 19 };

/* --- rotary --- */

/* n pairs from element `first` on; y may be x; the next token lies `stride` further on. */
static void rope_head(enum ops_dtype xt, const void *x, enum ops_dtype at, void *y, uint64_t first,
                      uint64_t stride, uint64_t half, uint64_t n, const float *cs, const float *sn)
{
    for (uint64_t i = 0; i < n; i += VL) {
        vec_fetch(xt, x, first + stride + i);
        vec_fetch(xt, x, first + stride + half + i);
        vec_fetch(at, y, first + stride + i);
        vec_fetch(at, y, first + stride + half + i);
        vec_f lo = vec_get(xt, x, first + i, n - i), hi = vec_get(xt, x, first + half + i, n - i);
        vec_f cv = vec_load(cs + i), sv = vec_load(sn + i);
        vec_put(at, y, first + i, n - i, lo * cv - hi * sv);
        vec_put(at, y, first + half + i, n - i, hi * cv + lo * sv);
    }
}

/* cos and sin of n angles pos * inv_freq, times `factor` (sin: times `sign` too). In fp64:
 * x = q pi/2 + r with |r| <= pi/4 (pi/2 in two parts, the first of 33 bits, so that q times it is exact
 * below ROPE_FAR), the series of sin r to r^11 and of cos r to r^12 (their rests are below 1e-11),
 * rounded to fp32 once. Additions and multiplications only: the same bits on every machine. */
static void rope_angles(float pos, const float *inv_freq, uint64_t n, float factor, float sign,
                        float *cs, float *sn)
{
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer */
#pragma omp simd
    for (uint64_t i = 0; i < n; i++) {
        const double x = (double)(pos * inv_freq[i]), t = x * 0x1.45f306dc9c883p-1 + magic;
        const double q = t - magic, r = (x - q * 0x1.921fb544p+0) - q * 0x1.0b4611a626331p-34;
        const double z = r * r;
        double s = z * (-1.0 / 39916800) + 1.0 / 362880, c = z * (1.0 / 479001600) - 1.0 / 3628800;
        s = z * s - 1.0 / 5040;
        s = z * s + 1.0 / 120;
        s = z * s - 1.0 / 6;
        s = r + r * (z * s);
        c = z * c + 1.0 / 40320;
        c = z * c - 1.0 / 720;
        c = z * c + 1.0 / 24;
        c = z * c - 0.5;
        c = z * c + 1.0;
        /* Quarter q mod 4: 0, 1, 2, 3 or -1. */
        const double half = q * 0.5, near = (half + magic) - magic, odd = half - near;
        const double turns = (near * 0.5 + magic) - magic, flip = near - 2 * turns;
        const bool swap = odd != 0;
        /* q = 2 near + 2 odd: sin(x) = +-sin r or +-cos r. */
        const double sin_x = swap ? c * (2 * odd) : s, cos_x = swap ? -s * (2 * odd) : c;
        const double turn = 1.0 - 2.0 * flip * flip;
        sn[i] = (float)(sin_x * turn) * factor * sign;
        cs[i] = (float)(cos_x * turn) * factor;
    }
}

/* The angle is a product of two fp32, and cos and sin are fp32 functions of it: so does
 * transformers, and its positions beyond 10^4 would not be met by a more exact angle. It then
 * rounds cos and sin to `at`; here nothing is rounded but the results. */
void KERN_NAME(kern_rope)(const struct host_ctx *c, const struct ops_rope *a)
{
    const uint64_t half = a->head_dim / 2;
    const enum ops_dtype at = a->at, qt = a->q_in ? ops_wide(at, a->in_wide) : at,
                         kt = a->k_in ? ops_wide(at, a->in_wide) : at;
    const void *q = a->q_in ? a->q_in : a->q, *k = a->k_in ? a->k_in : a->k;
    const enum ops_dtype vt = ops_wide(at, a->in_wide);
#pragma omp parallel for num_threads(                                                              \
    kern_team(c, a->tokens *(a->heads + a->kv_heads) * a->head_dim))                               \
    schedule(dynamic, kern_few(c, a->tokens))
    for (uint64_t t = 0; t < a->tokens; t++) {
        for (uint64_t i = 0; a->v && i < a->v_cols; i += VL) {
            vec_fetch(vt, a->v_in, (t + 1) * a->v_stride + i);
            vec_put(at, a->v, t * a->v_stride + i, a->v_cols - i,
                    vec_get(vt, a->v_in, t * a->v_stride + i, a->v_cols - i));
        }
        for (uint64_t i0 = 0; i0 < half; i0 += ROPE_PAIRS) {
            float cs[ROPE_PAIRS] = { 0 }, sn[ROPE_PAIRS] = { 0 };
            uint64_t n = half - i0 < ROPE_PAIRS ? half - i0 : ROPE_PAIRS;
            if (a->pos[t] < ROPE_FAR)
                rope_angles((float)a->pos[t], a->inv_freq + i0, n, a->attention_factor,
                            a->inverse ? -1.0f : 1.0f, cs, sn);
            for (uint64_t i = 0; i < n && a->pos[t] >= ROPE_FAR; i++) {
                float s, co;
                sincosf((float)a->pos[t] * a->inv_freq[i0 + i], &s, &co);
                cs[i] = co * a->attention_factor;
                sn[i] = (a->inverse ? -s : s) * a->attention_factor;
            }
            for (uint64_t h = 0; h < a->heads; h++)
                rope_head(qt, q, at, a->q, t * a->q_stride + h * a->head_dim + i0, a->q_stride,
                          half, n, cs, sn);
            for (uint64_t h = 0; h < a->kv_heads; h++)
                rope_head(kt, k, at, a->k, t * a->k_stride + h * a->head_dim + i0, a->k_stride,
                          half, n, cs, sn);
        }
    }
}

/* --- SwiGLU --- */

void KERN_NAME(kern_swiglu_forward)(const struct host_ctx *c, const struct ops_swiglu *a)
{
    const enum ops_dtype at = a->at, yt = ops_wide(at, a->y_wide);
#pragma omp parallel for num_threads(kern_team(c, a->rows * a->cols))                             \
    schedule(dynamic, kern_few(c, a->rows))
    for (uint64_t r = 0; r < a->rows; r++)
        for (uint64_t i = 0; i < a->cols; i += VL) {
            uint64_t n = a->cols - i;
            vec_fetch(at, a->gate, (r + 1) * a->g_stride + i);
            vec_fetch(at, a->up, (r + 1) * a->u_stride + i);
            vec_fetch(yt, a->y, (r + 1) * a->y_stride + i);
            vec_f g = vec_get(at, a->gate, r * a->g_stride + i, n),
                  u = vec_get(at, a->up, r * a->u_stride + i, n);
            vec_f act = g / (vec_exp(-g) + 1.0f);
            vec_put(yt, a->y, r * a->y_stride + i, n, act * u);
        }
}

/* s = sigmoid(g):  d_up = dy * g * s;  d_gate = dy * up * s * (1 + g (1 - s)). All are read before
 * any is written. y is computed as the forward does it, not from s. */
void KERN_NAME(kern_swiglu_backward)(const struct host_ctx *c, const struct ops_swiglu *a)
{
    const enum ops_dtype at = a->at, yt = ops_wide(at, a->y_wide);
#pragma omp parallel for num_threads(kern_team(c, a->rows * a->cols))                             \
    schedule(dynamic, kern_few(c, a->rows))
    for (uint64_t r = 0; r < a->rows; r++)
        for (uint64_t i = 0; i < a->cols; i += VL) {
            uint64_t n = a->cols - i, gi = r * a->g_stride + i, ui = r * a->u_stride + i;
            vec_fetch(at, a->gate, gi + a->g_stride);
            vec_fetch(at, a->up, ui + a->u_stride);
            vec_fetch(yt, a->dy, (r + 1) * a->y_stride + i);
            vec_f g = vec_get(at, a->gate, gi, n), u = vec_get(at, a->up, ui, n);
            vec_f dy = vec_get(yt, a->dy, r * a->y_stride + i, n), e = vec_exp(-g);
            const vec_f y = g / (e + 1.0f) * u;
            /* e stays finite, so that 1 - s = e s is 1 at its end. */
            e = vec_select(e > 3.0e38f, vec_set(3.0e38f), e);
            vec_f s = 1.0f / (e + 1.0f), rest = e * s; /* 1 - s without cancellation */
            vec_f act = g * s;
            vec_put(at, a->dup, ui, n, dy * act);
            vec_put(at, a->dgate, gi, n, dy * u * (s * (g * rest + 1.0f)));
            if (a->y) vec_put(yt, a->y, r * a->y_stride + i, n, y);
        }
}

/* --- embedding --- */

void KERN_NAME(kern_embed_forward)(const struct host_ctx *c, const struct ops_embed *a)
{
#pragma omp parallel for num_threads(kern_team(c, a->tokens * a->hidden))                         \
    schedule(dynamic, kern_few(c, a->tokens))
    for (uint64_t t = 0; t < a->tokens; t++) {
        uint64_t row = (uint64_t)a->ids[t] * a->hidden;
        for (uint64_t i = 0; i < a->hidden; i += VL)
            vec_put(a->at, a->y, t * a->hidden + i, a->hidden - i,
                    vec_get(a->pt, a->table, row + i, a->hidden - i));
    }
}

/* A thread owns columns and takes all tokens in order: equal ids add up in token order. */
void KERN_NAME(kern_embed_backward)(const struct host_ctx *c, const struct ops_embed *a)
{
    const int team = kern_team(c, a->tokens * a->hidden);
    const uint64_t width = kern_round16((a->hidden + (uint64_t)team - 1) / (uint64_t)team);
#pragma omp parallel for num_threads(team) schedule(static)
    for (int part = 0; part < team; part++) {
        uint64_t begin = width * (uint64_t)part,
                 end = begin + width < a->hidden ? begin + width : a->hidden;
        for (uint64_t t = 0; t < a->tokens && begin < end; t++) {
            float *row = a->dtable + (uint64_t)a->ids[t] * a->hidden;
            for (uint64_t i = begin; i < end; i += VL) {
                vec_f dy = vec_get(a->at, a->dy, t * a->hidden + i, end - i);
                vec_put(OPS_F32, row, i, end - i, vec_get(OPS_F32, row, i, end - i) + dy);
            }
        }
    }
}

/* --- additions --- */

void KERN_NAME(kern_add)(const struct host_ctx *c, enum ops_dtype at, uint64_t n, const void *x,
                         const void *y, void *out)
{
#pragma omp parallel for num_threads(kern_team(c, n)) schedule(dynamic, kern_few(c, n / CHUNK))
    for (uint64_t begin = 0; begin < n; begin += CHUNK) {
        uint64_t end = n - begin < CHUNK ? n : begin + CHUNK;
        for (uint64_t i = begin; i < end; i += VL)
            vec_put(at, out, i, end - i, vec_get(at, x, i, end - i) + vec_get(at, y, i, end - i));
    }
}

void KERN_NAME(kern_acc_add)(const struct host_ctx *c, uint64_t n, float *acc, const void *src,
                             enum ops_dtype st)
{
#pragma omp parallel for num_threads(kern_team(c, n)) schedule(dynamic, kern_few(c, n / CHUNK))
    for (uint64_t begin = 0; begin < n; begin += CHUNK) {
        uint64_t end = n - begin < CHUNK ? n : begin + CHUNK;
        for (uint64_t i = begin; i < end; i += VL)
            vec_put(OPS_F32, acc, i, end - i,
                    vec_get(OPS_F32, acc, i, end - i) + vec_get(st, src, i, end - i));
    }
}
