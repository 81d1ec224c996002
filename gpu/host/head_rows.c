/* gpu/host/head_rows.c - the softmax of one row of logits: maximum, exponentials with their sum,
 * scaling.
 *
 * Owns its own exponential: a polynomial of additions and multiplications only, so that every
 * instruction set gives the same bits. Sums run in 16 fp32 lanes over pieces of 512 elements
 * (element i in lane i % 16), folded pairwise, pieces added in fp64 in order. Must not know tiles
 * or targets. Pure; any thread. */
#include "gpu/host/host_impl.h"

#include "base/numeric.h"
#include <string.h>

#define ROW_LANES 16
#define ROW_PIECE 512

/* exp(x) for x <= 0: x = n ln 2 + r with |r| <= ln 2 / 2, the series of exp(r) to the seventh power
 * (its rest is below 6e-9), times 2^n. Below -87 the result stays at exp(-87), the smallest that is
 * not subnormal. NaN stays NaN. */
static inline __attribute__((always_inline)) float row_exp(float x)
{
    const float magic =
        12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits */
    uint32_t low =
        -(uint32_t)(x < -87.0f); /* a mask, since a branch here keeps gcc from making vectors */
    float y = stk_bits_f32((stk_f32_bits(x) & ~low) | (stk_f32_bits(-87.0f) & low));
    float t = y * 1.44269504f + magic;
    float n = t - magic;
    float r = (y - n * 0.693359375f) -
              n * -2.12194440e-4f; /* ln 2 in two parts; the first is exact times n */
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * stk_bits_f32((stk_f32_bits(t) - 0x4b400000u + 127u) << 23);
}

static inline __attribute__((always_inline)) float row_max_body(const float *x, uint64_t n)
{
    float lane[ROW_LANES];
    for (int l = 0; l < ROW_LANES; l++) lane[l] = x[0];
    uint64_t i = 0;
    for (; i + ROW_LANES <= n; i += ROW_LANES) {
        /* This is the first pass over the row. */
        __builtin_prefetch((const void *)((uintptr_t)(x + i) + 2048));
#pragma omp simd
        for (int l = 0; l < ROW_LANES; l++)
            lane[l] = x[i + (uint64_t)l] > lane[l] ? x[i + (uint64_t)l] : lane[l];
    }
    for (; i < n; i++)
        lane[i % ROW_LANES] = x[i] > lane[i % ROW_LANES] ? x[i] : lane[i % ROW_LANES];
    for (int half = ROW_LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] = lane[l + half] > lane[l] ? lane[l + half] : lane[l];
    return lane[0];
}

/* `store`: keep the exponentials in x. Two loops, so that compilers make vectors of both. */
static inline __attribute__((always_inline)) double row_exp_body(float *x, uint64_t n, float max,
                                                                 bool store)
{
    double sum = 0;
    float piece[ROW_PIECE];
    for (uint64_t from = 0; from < n; from += ROW_PIECE) {
        uint64_t len = from + ROW_PIECE < n ? ROW_PIECE : n - from, i = 0;
        const float *in = x + from;
        float lane[ROW_LANES] = { 0 };
#pragma omp simd
        for (uint64_t k = 0; k < len; k++) piece[k] = row_exp(in[k] - max);
        for (; i + ROW_LANES <= len; i += ROW_LANES) {
#pragma omp simd
            for (int l = 0; l < ROW_LANES; l++) lane[l] += piece[i + (uint64_t)l];
        }
        for (; i < len; i++) lane[i % ROW_LANES] += piece[i];
        for (int half = ROW_LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) lane[l] += lane[l + half];
        sum += lane[0];
        if (store) memcpy(x + from, piece, len * sizeof *piece);
    }
    return sum;
}

static inline __attribute__((always_inline)) void row_scale_body(float *x, uint64_t n, float factor)
{
#pragma omp simd
    for (uint64_t i = 0; i < n; i++) x[i] *= factor;
}

/* out = x * factor, rounded to bf16. */
static inline __attribute__((always_inline)) void row_scale_bf16_body(const float *x, uint64_t n,
                                                                      float factor, uint16_t *out)
{
#pragma omp simd
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t u = stk_f32_bits(x[i] * factor);
        const uint32_t nan = -(uint32_t)((u & 0x7fffffffu) > 0x7f800000u);
        const uint32_t near = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, quiet = (u >> 16) | 0x40u;
        out[i] = (uint16_t)((near & ~nan) | (quiet & nan));
    }
}

/* The same bodies for each instruction set; contraction to fma is off, so the bits agree. */
#define ROW_VARIANT(suffix, attribute)                                                    \
    attribute static float row_max_##suffix(const float *x, uint64_t n)                   \
    {                                                                                     \
        return row_max_body(x, n);                                                        \
    }                                                                                     \
    attribute static double row_exp_##suffix(float *x, uint64_t n, float max, bool store) \
    {                                                                                     \
        return store ? row_exp_body(x, n, max, true) : row_exp_body(x, n, max, false);    \
    }                                                                                     \
    attribute static void row_scale_##suffix(float *x, uint64_t n, float factor)          \
    {                                                                                     \
        row_scale_body(x, n, factor);                                                     \
    }                                                                                     \
    attribute static void row_scale_bf16_##suffix(const float *x, uint64_t n,             \
                                                  float factor, uint16_t *out)            \
    {                                                                                     \
        row_scale_bf16_body(x, n, factor, out);                                           \
    }

ROW_VARIANT(scalar, )
#if defined(__x86_64__)
ROW_VARIANT(avx2, __attribute__((target("avx2"))))
ROW_VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#define ROW_PICK(isa, name) \
    ((isa) == CPU_AVX512 ? name##_avx512 : (isa) == CPU_AVX2 ? name##_avx2 : name##_scalar)
#else
#define ROW_PICK(isa, name) name##_scalar
#endif

float host_row_max(enum cpu_isa isa, const float *x, uint64_t n)
{
    return ROW_PICK(isa, row_max)(x, n);
}
double host_row_exp(enum cpu_isa isa, float *x, uint64_t n, float max)
{
    return ROW_PICK(isa, row_exp)(x, n, max, true);
}
double host_row_exp_sum(enum cpu_isa isa, const float *x, uint64_t n, float max)
{
    return ROW_PICK(isa, row_exp)((float *)(uintptr_t)x, n, max,
                                  false); /* not stored: x stays as it is */
}
void host_row_scale(enum cpu_isa isa, float *x, uint64_t n, float factor)
{
    ROW_PICK(isa, row_scale)(x, n, factor);
}
void host_row_scale_bf16(enum cpu_isa isa, const float *x, uint64_t n, float factor, uint16_t *out)
{
    ROW_PICK(isa, row_scale_bf16)(x, n, factor, out);
}
