/* gpu/host/kernels/norm_isa.c - RMS norm, compiled once per instruction set (KERN_ISA), the same
 * bits from each.
 *
 * Owns: forward and backward of ops_rmsnorm. All sums take 16 interleaved lanes (element i in lane
 * i % 16), folded 8+8, 4+4, 2+2, 1+1; the weight's gradient is summed over rows in parts whose size
 * depends on the shape only (kern.h), then part after part. Must not know: streams, other
 * operations. Runs on a stream's lane with a team of c->threads.
 *
 * With n = x * rstd:  y = n * w;  dn = dy * w;  dx = rstd * (dn - n * mean(dn * n));  dw = sum over
 * rows of dy * n. transformers' LlamaRMSNorm rounds n to the activations' dtype before it
 * multiplies; here nothing is rounded but y and dx on store, and not they where they are wide. */
#include "gpu/host/kernels/kern.h"
#include "gpu/host/kernels/vec.h"

#include <math.h>

/* 16 lanes as vectors of this machine. */
enum { LANES = 16, PARTS = LANES / VL };

static float lanes_sum(const vec_f *v)
{
    float t[LANES];
    for (int u = 0; u < PARTS; u++) vec_store(t + u * VL, v[u]);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
}

static void weight_load(const struct ops_rmsnorm *a, float *w)
{
    for (uint64_t i = 0; i < a->cols; i += VL)
        vec_store(w + i, vec_get(a->pt, a->w, i, a->cols - i));
}

static uint64_t row_at(const struct ops_rmsnorm *a, uint64_t row, uint64_t stride)
{
    return a->group == 1 ? row * stride : row / a->group * stride + row % a->group * a->cols;
}

void KERN_NAME(kern_rmsnorm_forward)(const struct host_ctx *c, const struct ops_rmsnorm *a)
{
    float *w = kern_scratch(&a->scratch);
    weight_load(a, w);
    const enum ops_dtype xt = ops_wide(a->at, a->x_wide), yt = ops_wide(a->at, a->y_wide);
    const uint64_t cols = a->cols;
    const float eps = (float)a->eps;
#pragma omp parallel for num_threads(kern_team(c, a->rows * a->cols))                             \
    schedule(dynamic, kern_few(c, a->rows))
    for (uint64_t r = 0; r < a->rows; r++) {
        uint64_t x = row_at(a, r, a->x_stride), y = row_at(a, r, a->y_stride);
        vec_f sum[PARTS] = { 0 };
        for (uint64_t i = 0, u = 0; i < cols; i += VL, u = (u + 1) % PARTS) {
            vec_fetch(xt, a->x, x + a->x_stride + i);
            vec_fetch(yt, a->y, y + a->y_stride + i);
            vec_f v = vec_get(xt, a->x, x + i, cols - i);
            sum[u] = sum[u] + v * v;
        }
        float rstd = 1.0f / sqrtf(lanes_sum(sum) / (float)cols + eps);
        a->rstd[r] = rstd;
        for (uint64_t i = 0; i < cols; i += VL) {
            vec_f n = vec_get(xt, a->x, x + i, cols - i) * rstd;
            vec_put(yt, a->y, y + i, cols - i, n * vec_load(w + i));
        }
    }
}

/* dx of one row; adds the row's share to dw_part unless that is NULL. */
static void backward_row(const struct ops_rmsnorm *a, const float *w, uint64_t r, float *dw_part)
{
    const enum ops_dtype xt = ops_wide(a->at, a->x_wide), yt = ops_wide(a->at, a->y_wide),
                         dt = ops_wide(a->at, a->dx_wide);
    const uint64_t cols = a->cols, x = row_at(a, r, a->x_stride), y = row_at(a, r, a->y_stride);
    const float rstd = a->rstd[r];
    vec_f sum[PARTS] = { 0 };
    for (uint64_t i = 0, u = 0; i < cols; i += VL, u = (u + 1) % PARTS) {
        vec_fetch(xt, a->x, x + a->x_stride + i);
        vec_fetch(yt, a->dy, y + a->y_stride + i);
        vec_fetch(dt, a->dx, x + a->x_stride + i);
        vec_f n = vec_get(xt, a->x, x + i, cols - i) * rstd,
              dy = vec_get(yt, a->dy, y + i, cols - i);
        sum[u] = sum[u] + dy * vec_load(w + i) * n;
        if (dw_part) vec_store(dw_part + i, vec_load(dw_part + i) + dy * n);
    }
    const float mean = lanes_sum(sum) / (float)cols;
    for (uint64_t i = 0; i < cols; i += VL) {
        vec_f n = vec_get(xt, a->x, x + i, cols - i) * rstd,
              dy = vec_get(yt, a->dy, y + i, cols - i);
        vec_f dx = (dy * vec_load(w + i) - n * mean) * rstd;
        if (a->add) dx = vec_get(dt, a->dx, x + i, cols - i) + dx;
        vec_put(dt, a->dx, x + i, cols - i, dx);
    }
}

void KERN_NAME(kern_rmsnorm_backward)(const struct host_ctx *c, const struct ops_rmsnorm *a)
{
    const uint64_t ld = kern_round16(a->cols), rows = kern_norm_part_rows(a->rows),
                   parts = (a->rows + rows - 1) / rows;
    float *w = kern_scratch(&a->scratch), *dw = w + ld;
    weight_load(a, w);
#pragma omp parallel num_threads(kern_team(c, a->rows * a->cols))
    {
#pragma omp for schedule(dynamic, kern_few(c, parts))
        for (uint64_t p = 0; p < parts; p++) {
            float *part = a->dw ? dw + p * ld : NULL;
            if (part) memset(part, 0, ld * sizeof(float));
            uint64_t end = (p + 1) * rows < a->rows ? (p + 1) * rows : a->rows;
            for (uint64_t r = p * rows; r < end; r++) backward_row(a, w, r, part);
        }
        if (a->dw) {
#pragma omp for schedule(static)
            for (uint64_t i = 0; i < a->cols; i += VL) {
                vec_f sum = vec_load(dw + i);
                for (uint64_t p = 1; p < parts; p++) sum = sum + vec_load(dw + p * ld + i);
                if (!a->overwrite) sum = vec_get(OPS_F32, a->dw, i, a->cols - i) + sum;
                vec_put(OPS_F32, a->dw, i, a->cols - i, sum);
            }
        }
    }
}
