/* gpu/host/kernels/pack_isa.c - operands of products in the layout that the library multiplies
 * fastest, compiled once per instruction set (KERN_ISA), the same bits from each.
 *
 * Owns: the right operand in blocks (struct host_pack) and the transpose of a left one, each with the
 * change of type on the way. Moves and roundings only. Must not know: which shapes are packed.
 * Runs on a stream's lane with a team of c->threads.
 *
 * LAYOUT of B[k][n]: blocks of k_block rows and n_block columns, all of a column of blocks one behind
 * the other (oneDNN's BA16a64b, and BA16a64b2a for bf16, where two rows of k are one word: the pairs
 * that dot products of bf16 take). Blocks that reach beyond k or n are filled with zeros. */
#include "gpu/host/kernels/kern.h"
#include "gpu/host/kernels/vec.h"

enum { K_ROWS = 16, N_MAX = 64, PAIRS = 2, AHEAD = 4 /* blocks fetched ahead */ };

/* bf16 of n (at most VL) elements from i on, in the low halves. */
VEC_INLINE vec_u get16(enum ops_dtype t, const void *p, uint64_t i, uint64_t n)
{
    if (t == OPS_BF16 && n >= VL)
        return __builtin_convertvector(*(const vec_h_any *)((const uint16_t *)p + i), vec_u);
    vec_f v = vec_get(t, p, i, n);
    return t == OPS_BF16 ? (vec_u)v >> 16 : vec_to_bf16(v);
}

/* One block in bf16 from rows of k. */
static void block_pairs(const struct host_pack *a, uint64_t k0, uint64_t n0, uint32_t *dst)
{
    const uint64_t width = a->n - n0;
    for (uint64_t p = 0; p < K_ROWS; p++) {
        uint64_t k = k0 + PAIRS * p, next = k * a->ld + n0 + AHEAD * a->layout.n_block;
        for (uint64_t c = 0; c < a->layout.n_block; c += VL) {
            vec_fetch(a->from, a->src, next + c);
            vec_fetch(a->from, a->src, next + a->ld + c);
        }
        for (uint64_t c = 0; c < a->layout.n_block; c += VL) {
            vec_u lo = { 0 }, hi = { 0 };
            if (c < width && k < a->k) lo = get16(a->from, a->src, k * a->ld + n0 + c, width - c);
            if (c < width && k + 1 < a->k)
                hi = get16(a->from, a->src, (k + 1) * a->ld + n0 + c, width - c);
            vec_store((float *)(void *)(dst + p * a->layout.n_block + c), (vec_f)(lo | (hi << 16)));
        }
    }
}

/* One block in bf16 from rows of n: words (pairs of k) are transposed. */
static void block_words(const struct host_pack *a, uint64_t k0, uint64_t n0, uint32_t *dst)
{
    uint16_t stage[N_MAX][PAIRS * K_ROWS] __attribute__((aligned(64)));
    const uint64_t nb = a->layout.n_block, depth = a->k - k0;
    const uint16_t *src = (const uint16_t *)a->src + n0 * a->ld + k0;
    for (uint64_t r = 0; r < nb; r++)
        vec_fetch(a->from, a->src, (n0 + r) * a->ld + k0 + AHEAD * PAIRS * K_ROWS);
    if (a->from == OPS_BF16 && n0 + nb <= a->n && depth >= PAIRS * K_ROWS && a->ld % 2 == 0) {
        vec_transpose((const float *)(const void *)src, a->ld / 2, nb, K_ROWS,
                      (float *)(void *)dst, nb);
        return;
    }
    memset(stage, 0, sizeof stage);
    for (uint64_t r = 0; r < nb && n0 + r < a->n; r++)
        for (uint64_t c = 0; c < PAIRS * K_ROWS && c < depth; c += VL)
            vec_put(OPS_BF16, stage[r], c, depth - c,
                    vec_get(a->from, a->src, (n0 + r) * a->ld + k0 + c, depth - c));
    vec_transpose((const float *)(const void *)stage, K_ROWS, nb, K_ROWS, (float *)(void *)dst, nb);
}

static void block_f32(const struct host_pack *a, uint64_t k0, uint64_t n0, float *dst)
{
    const uint64_t width = a->n - n0;
    for (uint64_t r = 0; r < K_ROWS; r++)
        for (uint64_t c = 0; c < a->layout.n_block; c += VL) {
            vec_f v = { 0 };
            vec_fetch(a->from, a->src, (k0 + r) * a->ld + n0 + AHEAD * a->layout.n_block + c);
            if (c < width && k0 + r < a->k)
                v = vec_get(a->from, a->src, (k0 + r) * a->ld + n0 + c, width - c);
            vec_store(dst + r * a->layout.n_block + c, v);
        }
}

static void block_f32_transposed(const struct host_pack *a, uint64_t k0, uint64_t n0, float *dst)
{
    float stage[N_MAX][K_ROWS] __attribute__((aligned(64)));
    const uint64_t nb = a->layout.n_block, depth = a->k - k0;
    for (uint64_t r = 0; r < nb; r++)
        vec_fetch(a->from, a->src, (n0 + r) * a->ld + k0 + PAIRS * K_ROWS);
    if (n0 + nb > a->n || depth < K_ROWS) memset(stage, 0, sizeof stage);
    for (uint64_t r = 0; r < nb && n0 + r < a->n; r++)
        for (uint64_t c = 0; c < K_ROWS && c < depth; c += VL)
            vec_put(OPS_F32, stage[r], c, depth - c,
                    vec_get(a->from, a->src, (n0 + r) * a->ld + k0 + c, depth - c));
    vec_transpose(stage[0], K_ROWS, nb, K_ROWS, dst, nb);
}

void KERN_NAME(kern_pack)(const struct host_ctx *c, const struct host_pack *a)
{
    const uint64_t kb = a->layout.k_block, nb = a->layout.n_block;
    const uint64_t rows = (a->k + kb - 1) / kb, cols = (a->n + nb - 1) / nb, blocks = rows * cols;
    const uint64_t block_bytes = kb * nb * ops_dtype_bytes(a->to);
#pragma omp parallel for num_threads(kern_team(c, a->k * a->n)) schedule(dynamic, kern_few(c, blocks))
    for (uint64_t b = 0; b < blocks; b++) {
        /* Along the rows of the source. */
        const uint64_t k = a->transposed ? b % rows : b / cols,
                       n = a->transposed ? b / rows : b % cols, n0 = n * nb, k0 = k * kb;
        void *dst = (char *)a->dst + (n * rows + k) * block_bytes;
        if (a->to == OPS_F32 && a->transposed) block_f32_transposed(a, k0, n0, dst);
        else if (a->to == OPS_F32) block_f32(a, k0, n0, dst);
        else if (a->transposed) block_words(a, k0, n0, dst);
        else block_pairs(a, k0, n0, dst);
    }
}

/* --- the transpose of a left operand ---------------------------------------------------------- */

enum { T_ROWS = 32, T_COLS = 64 };

/* 32 rows and 64 columns in bf16: pairs of rows become words, which are transposed. */
static void transpose_bf16(const struct host_transpose *a, uint64_t r0, uint64_t c0)
{
    uint32_t words[T_ROWS / 2][T_COLS] __attribute__((aligned(64)));
    uint16_t out[T_COLS][T_ROWS] __attribute__((aligned(64)));
    const uint64_t rows = a->rows - r0 < T_ROWS ? a->rows - r0 : T_ROWS,
                   cols = a->cols - c0 < T_COLS ? a->cols - c0 : T_COLS;
    uint16_t *dst = (uint16_t *)a->dst + c0 * a->dst_ld + r0;
    for (uint64_t p = 0; p < T_ROWS / 2; p++)
        for (uint64_t c = 0; c < T_COLS; c += VL) {
            vec_u lo = { 0 }, hi = { 0 };
            uint64_t at = (r0 + 2 * p) * a->ld + c0 + c;
            vec_fetch(a->from, a->src, at + T_ROWS * a->ld);
            vec_fetch(a->from, a->src, at + (T_ROWS + 1) * a->ld);
            if (c < cols && 2 * p < rows) lo = get16(a->from, a->src, at, cols - c);
            if (c < cols && 2 * p + 1 < rows) hi = get16(a->from, a->src, at + a->ld, cols - c);
            vec_store((float *)(void *)&words[p][c], (vec_f)(lo | (hi << 16)));
        }
    if (rows == T_ROWS && cols == T_COLS && a->dst_ld % 2 == 0) {
        vec_transpose_far((const float *)(const void *)words, T_COLS, T_ROWS / 2, T_COLS,
                          (float *)(void *)dst, a->dst_ld / 2);
        return;
    }
    vec_transpose((const float *)(const void *)words, T_COLS, T_ROWS / 2, T_COLS,
                  (float *)(void *)out, T_ROWS / 2);
    for (uint64_t c = 0; c < cols; c++) memcpy(dst + c * a->dst_ld, out[c], rows * 2);
}

static void transpose_f32(const struct host_transpose *a, uint64_t r0, uint64_t c0)
{
    float in[T_ROWS][T_COLS] __attribute__((aligned(64)));
    float out[T_COLS][T_ROWS] __attribute__((aligned(64)));
    const uint64_t rows = a->rows - r0 < T_ROWS ? a->rows - r0 : T_ROWS,
                   cols = a->cols - c0 < T_COLS ? a->cols - c0 : T_COLS;
    float *dst = (float *)a->dst + c0 * a->dst_ld + r0;
    if (rows < T_ROWS || cols < T_COLS) memset(in, 0, sizeof in);
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < cols; c += VL) {
            vec_fetch(a->from, a->src, (r0 + r + T_ROWS) * a->ld + c0 + c);
            vec_put(OPS_F32, in[r], c, cols - c,
                    vec_get(a->from, a->src, (r0 + r) * a->ld + c0 + c, cols - c));
        }
    if (rows == T_ROWS && cols == T_COLS) {
        vec_transpose_far(in[0], T_COLS, T_ROWS, T_COLS, dst, a->dst_ld);
        return;
    }
    vec_transpose(in[0], T_COLS, T_ROWS, T_COLS, out[0], T_ROWS);
    for (uint64_t c = 0; c < cols; c++) memcpy(dst + c * a->dst_ld, out[c], rows * 4);
}

void KERN_NAME(kern_transpose)(const struct host_ctx *c, const struct host_transpose *a)
{
    const uint64_t across = (a->rows + T_ROWS - 1) / T_ROWS,
                   blocks = across * ((a->cols + T_COLS - 1) / T_COLS);
#pragma omp parallel for num_threads(kern_team(c, a->rows * a->cols))                             \
    schedule(dynamic, kern_few(c, blocks))
    for (uint64_t b = 0; b < blocks; b++) {
        uint64_t c0 = b / across * T_COLS, r0 = b % across * T_ROWS;
        if (a->to == OPS_F32) transpose_f32(a, r0, c0);
        else transpose_bf16(a, r0, c0);
    }
}
