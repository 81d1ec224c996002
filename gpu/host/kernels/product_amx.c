/* gpu/host/kernels/product_amx.c - matrix products of bf16 on the tile unit of AMX (Intel SDM volume
 * 1, chapter 18; TDPBF16PS): fp32 sums over the inner dimension, in order.
 *
 * Owns: C = A B and C = C + A B, A in rows as it lies, B packed by pack_isa.c in blocks of 32 x 32.
 * Each element of C is one chain of sums over k (where C is f32: chains of PASS_K, one after the
 * other), which is then added to C: no bit depends on blocks, threads or the other extents. Must not
 * know: what is multiplied. Runs on a stream's lane with a team of c->threads; the tile registers are
 * configured at the start of a team and given back at its end.
 *
 * BLOCKING. A thread begins with a range of rows or of columns of C, in items, and takes of the others'
 * when it has done its own (deal.h): who loses its core for a while keeps nobody waiting longer than
 * an item takes. For a block of rows of A it walks
 * panels of 32 columns of B, in pieces of K_PIECE rows (both together stay in the second cache; larger
 * and smaller pieces were tried), and over each piece all rows of the block, 32 at a time: four tiles
 * of C, two of A, two of B. Sums between two pieces wait in `part`. What comes next (of B, A and C) is
 * fetched ahead, and a finished square goes to C while the next one is computed.
 *
 * TURNED. C may be stored as its transpose: then weights are A as they lie and what is multiplied by
 * them is packed, which is less by far in a forward. Half a square is transposed on its way out. The
 * chain of sums of an element is the same, so its bits are. */
#include "gpu/host/kernels/amx.h"
#include "gpu/host/kernels/deal.h"
#include "gpu/host/kernels/kern.h"
#include "gpu/host/kernels/vec.h"

#include <omp.h>

enum {
    SQUARE = 32,
    K_STEP = 32,
    K_PIECE = 1024,
    PASS_K = 1024,
    ROWS_MAX = 512,
    BLOCK_BYTES = 512 << 10,
    ITEM_PRODUCTS = 1 << 25, /* of an item: some 70 us */
    PIECE_BYTES = K_STEP * SQUARE * 2 /* of B, a step */
};

enum { HALF = 16 };

/* A finished square on its way to C. */
struct square {
    float sum[SQUARE * SQUARE] __attribute__((aligned(64)));
    float half[HALF * SQUARE] __attribute__((aligned(64))); /* turned: rows of C, a half at a time */
    void *c;
    const void *base;              /* of its first element; NULL: none */
    uint64_t rows, cols;           /* as they lie in C */
    bool add;
};

struct walk {
    const struct host_gemm *g;
    struct square square[2];
    uint64_t now;                  /* of the two: being computed; the other waits for its way out */
    uint64_t k0, k;                /* of this pass */
    float part[ROWS_MAX * SQUARE] __attribute__((aligned(64)));
};

VEC_INLINE __m512 base_get(const struct host_gemm *g, const void *base, uint64_t i, __mmask16 mask)
{
    if (g->base_t == OPS_F32) return _mm512_maskz_loadu_ps(mask, (const float *)base + i);
    const __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)base + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

VEC_INLINE void base_add(const struct host_gemm *g, const struct square *s, uint64_t r, __mmask16 lo,
                         __mmask16 hi, __m512 *x, __m512 *y)
{
    *x = _mm512_add_ps(*x, base_get(g, s->base, r * g->ldc, lo));
    *y = _mm512_add_ps(*y, base_get(g, s->base, r * g->ldc + 16, hi));
}

VEC_INLINE void row_out(const struct host_gemm *g, struct square *s, uint64_t r)
{
    if (g->turned && r % HALF == 0) {
        vec_transpose_16(s->sum + r, SQUARE, s->half, SQUARE);
        vec_transpose_16(s->sum + HALF * SQUARE + r, SQUARE, s->half + HALF, SQUARE);
    }
    const float *sum = g->turned ? s->half + r % HALF * SQUARE : s->sum + r * SQUARE;
    const __mmask16 lo = s->cols >= 16 ? 0xffff : (__mmask16)((1u << s->cols) - 1),
                    hi = s->cols >= 32   ? 0xffff
                         : s->cols <= 16 ? 0
                                         : (__mmask16)((1u << (s->cols - 16)) - 1);
    __m512 x = _mm512_load_ps(sum), y = _mm512_load_ps(sum + 16);
    if (g->ct == OPS_BF16) {
        if (s->base) base_add(g, s, r, lo, hi, &x, &y);
        uint16_t *c = (uint16_t *)s->c + r * g->ldc;
        _mm512_mask_storeu_epi16(c, ((__mmask32)hi << 16) | lo, (__m512i)_mm512_cvtne2ps_pbh(y, x));
        return;
    }
    float *c = (float *)s->c + r * g->ldc;
    if (s->add) {
        x = _mm512_add_ps(_mm512_maskz_loadu_ps(lo, c), x);
        y = _mm512_add_ps(_mm512_maskz_loadu_ps(hi, c + 16), y);
    }
    if (s->base) base_add(g, s, r, lo, hi, &x, &y);
    _mm512_mask_storeu_ps(c, lo, x);
    _mm512_mask_storeu_ps(c + 16, hi, y);
}

static void square_out(const struct host_gemm *g, struct square *s)
{
    AMX_MEMORY_BARRIER();
    for (uint64_t r = 0; r < s->rows; r++) row_out(g, s, r);
    s->rows = 0;
}

/* One square over one piece of k. */
struct step {
    const char *a, *b;
    uint64_t a_bytes, k_steps, rows;
    const float *from;             /* sums so far; NULL: none */
    float *to;
    const char *next_a, *next_b;   /* fetched: one and b_lines lines a step */
    uint64_t b_lines;
    char *c;                       /* fetched to be written; NULL: not yet */
    uint64_t c_rows, c_bytes, c_row_bytes; /* of the square; of a row of it; from row to row */
    const char *base;              /* fetched likewise, to be read; NULL: none */
    uint64_t base_bytes, base_row_bytes;
};

VEC_INLINE void fetch(const struct step *s, uint64_t k)
{
    for (uint64_t i = 0; i < s->b_lines; i++)
        _mm_prefetch(s->next_b + (k * s->b_lines + i) * 64, _MM_HINT_T1);
    _mm_prefetch(s->next_a + k * 64, _MM_HINT_T1);
}

static __attribute__((noinline)) void step_run(struct walk *w, const struct step *s)
{
    const struct host_gemm *g = w->g;
    struct square *out = &w->square[w->now ^ 1];
    const uint64_t as = s->a_bytes, per = (SQUARE + s->k_steps - 1) / s->k_steps;
    const char *a = s->a, *a2 = s->rows > 16 ? a + 16 * as : a, *b = s->b;
    char *c = s->c;
    const char *base = s->base;
    uint64_t done = 0, c_rows = c ? s->c_rows : 0;
    AMX_MEMORY_BARRIER();
    if (s->from) {
        _tile_loadd(0, s->from, SQUARE * 4);
        _tile_loadd(1, s->from + 16, SQUARE * 4);
        _tile_loadd(2, s->from + 16 * SQUARE, SQUARE * 4);
        _tile_loadd(3, s->from + 16 * SQUARE + 16, SQUARE * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (uint64_t k = 0; k < s->k_steps; k++, a += 64, a2 += 64, b += PIECE_BYTES) {
        _tile_loadd(4, a, as);
        _tile_loadd(6, b, SQUARE * 4);
        _tile_loadd(7, b + 64, SQUARE * 4);
        _tile_loadd(5, a2, as);
        fetch(s, k);
        for (uint64_t i = 0; i < per && c_rows; i++, c_rows--, c += s->c_row_bytes) {
            __builtin_prefetch(c, 1);
            if (s->c_bytes > 64) __builtin_prefetch(c + 64, 1);
            if (!base) continue;
            __builtin_prefetch(base);
            if (s->base_bytes > 64) __builtin_prefetch(base + 64);
            base += s->base_row_bytes;
        }
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        for (uint64_t i = 0; i < per && done < out->rows; i++, done++) row_out(g, out, done);
    }
    out->rows = 0;
    _tile_stored(0, s->to, SQUARE * 4);
    _tile_stored(1, s->to + 16, SQUARE * 4);
    _tile_stored(2, s->to + 16 * SQUARE, SQUARE * 4);
    _tile_stored(3, s->to + 16 * SQUARE + 16, SQUARE * 4);
    AMX_MEMORY_BARRIER();
}

/* Rows m0..m1 by the panel of columns at n0, over one piece of k. */
static void piece_run(struct walk *w, uint64_t m0, uint64_t m1, uint64_t n0, uint64_t at,
                      uint64_t len, const char *next_a, uint64_t m_end)
{
    const struct host_gemm *g = w->g;
    const uint64_t panel = g->k / K_STEP * PIECE_BYTES, k = w->k0 + at;
    const uint64_t squares = (m1 - m0 + SQUARE - 1) / SQUARE;
    const bool first = at == 0, last = at + len == w->k, whole = last && w->k0 + w->k == g->k;
    const char *b = (const char *)g->b + n0 / SQUARE * panel + k / K_STEP * PIECE_BYTES;
    const char *next = last ? b + panel - (w->k - len) / K_STEP * PIECE_BYTES
                            : b + len / K_STEP * PIECE_BYTES;
    const uint64_t lines = PIECE_BYTES / 64, each = (lines + squares - 1) / squares;
    for (uint64_t i = m0, n = 0; i < m1; i += SQUARE, n++) {
        struct square *sq = &w->square[w->now];
        float *part = w->part + (i - m0) * SQUARE;
        const uint64_t rows = m1 - i < SQUARE ? m1 - i : SQUARE;
        const uint64_t cols = g->n - n0 < SQUARE ? g->n - n0 : SQUARE;
        const uint64_t c_elem = g->turned ? n0 * g->ldc + i : i * g->ldc + n0,
                       elem = ops_dtype_bytes(g->ct);
        const uint64_t base_elem = ops_dtype_bytes(g->base_t);
        const char *base = whole && g->base ? (const char *)g->base + c_elem * base_elem : NULL;
        struct step s = {
            .a = (const char *)(g->a + i * g->lda + k),
            .a_bytes = g->lda * 2,
            .b = b,
            .k_steps = len / K_STEP,
            .rows = rows,
            .from = first ? NULL : part,
            .to = last ? sq->sum : part,
            .next_a = next_a + (m_end > i ? (i - m0) * g->lda * 2 + at * 2 : 0),
            .next_b = next + n * each * (len / K_STEP) * 64,
            .b_lines = each,
            .c = last ? (char *)g->c + c_elem * elem : NULL,
            .c_rows = g->turned ? cols : rows,
            .c_bytes = SQUARE * elem,
            .c_row_bytes = g->ldc * elem,
            .base = base,
            .base_bytes = SQUARE * base_elem,
            .base_row_bytes = g->ldc * base_elem,
        };
        if (rows < SQUARE) amx_tiles_open(rows);
        step_run(w, &s);
        if (rows < SQUARE) amx_tiles_open(SQUARE);
        if (!last) continue;
        sq->c = (char *)g->c + c_elem * elem;
        sq->base = base;
        sq->rows = g->turned ? cols : rows;
        sq->cols = g->turned ? rows : cols;
        sq->add = g->add || w->k0 > 0;
        w->now ^= 1;
    }
}

/* What a thread begins with: a range of rows or of columns of C, in items of a block of rows by a
 * group of panels. All items of a block stand together, so that the block stays in the cache. */
struct share {
    uint64_t m0, m1, n0, n1;
    uint64_t each, blocks;    /* rows of a block */
    uint64_t columns, groups; /* of a group */
};

static uint64_t share_of(uint64_t total, uint64_t squares, uint64_t i, uint64_t n)
{
    uint64_t at = squares * i / n * SQUARE;
    return at < total ? at : total;
}

/* Share i of n, for a pass over k. */
static struct share share_get(const struct host_gemm *g, uint64_t k, uint64_t i, uint64_t n)
{
    const uint64_t rows = (g->m + SQUARE - 1) / SQUARE, cols = (g->n + SQUARE - 1) / SQUARE;
    const bool by_rows = rows >= cols || rows >= 8 * n;
    struct share s = { .m1 = g->m, .n1 = g->n };
    if (by_rows) {
        s.m0 = share_of(g->m, rows, i, n);
        s.m1 = share_of(g->m, rows, i + 1, n);
    } else {
        s.n0 = share_of(g->n, cols, i, n);
        s.n1 = share_of(g->n, cols, i + 1, n);
    }
    if (s.m0 == s.m1 || s.n0 == s.n1) return s;
    uint64_t most = (uint64_t)BLOCK_BYTES / 2 / k / SQUARE * SQUARE;
    if (most < 4 * SQUARE) most = 4 * SQUARE;
    if (most > ROWS_MAX) most = ROWS_MAX;
    const uint64_t blocks = (s.m1 - s.m0 + most - 1) / most;
    s.each = ((s.m1 - s.m0 + blocks - 1) / blocks + SQUARE - 1) / SQUARE * SQUARE;
    s.blocks = (s.m1 - s.m0 + s.each - 1) / s.each;
    s.columns = ITEM_PRODUCTS / (s.each * k) / SQUARE * SQUARE;
    if (s.columns < SQUARE) s.columns = SQUARE;
    s.groups = (s.n1 - s.n0 + s.columns - 1) / s.columns;
    return s;
}

/* Item `item` of a share, over one pass of k. */
static void item_run(struct walk *w, const struct share *s, uint64_t item)
{
    const struct host_gemm *g = w->g;
    const uint64_t m = s->m0 + item / s->groups * s->each,
                   end = m + s->each < s->m1 ? m + s->each : s->m1;
    const uint64_t first = s->n0 + item % s->groups * s->columns,
                   last = first + s->columns < s->n1 ? first + s->columns : s->n1;
    for (uint64_t n = first; n < last; n += SQUARE)
        for (uint64_t at = 0; at < w->k; at += K_PIECE) {
            const uint64_t len = w->k - at < K_PIECE ? w->k - at : K_PIECE;
            const char *next = (const char *)(g->a + end * g->lda + w->k0) +
                               (n - s->n0) / SQUARE % SQUARE * g->lda * 2;
            piece_run(w, m, end, n, at, len, end < s->m1 ? next : (const char *)g->a, s->m1);
        }
}

/* One pass over all of C. */
static void pass_run(const struct host_gemm *g, uint32_t threads, uint64_t k0, uint64_t k)
{
    struct deal deal;
    deal_open(&deal, threads);
    for (uint32_t i = 0; i < deal.n; i++) {
        const struct share s = share_get(g, k, i, deal.n);
        deal_set(&deal, i, s.blocks * s.groups);
    }
#pragma omp parallel num_threads((int)threads)
    {
        struct walk w; /* large: what is read before it is written is set here */
        uint64_t of, item;
        w.g = g;
        w.now = 0;
        w.square[0].rows = w.square[1].rows = 0;
        w.k0 = k0;
        w.k = k;
        amx_tiles_open(SQUARE);
        while (deal_take(&deal, (uint64_t)omp_get_thread_num(), &of, &item)) {
            const struct share s = share_get(g, k, of, deal.n);
            item_run(&w, &s, item);
        }
        square_out(g, &w.square[w.now ^ 1]);
        _tile_release();
    }
}

void kern_gemm_amx(const struct host_ctx *c, const struct host_gemm *g)
{
    const uint64_t pass = g->ct == OPS_F32 ? PASS_K : g->k;
    for (uint64_t k0 = 0; k0 < g->k; k0 += pass)
        pass_run(g, c->threads, k0, g->k - k0 < pass ? g->k - k0 : pass);
}
