/* gpu/host/kernels/attention_amx.c - blocked attention on the tile unit of AMX: bf16 operands, fp32
 * sums (Intel SDM volume 1, chapter 18; TDPBF16PS).
 *
 * Owns: forward and backward for bf16 activations and head dimensions that are multiples of 32; all
 * else goes to attention_isa.c. The same blocks of 64 queries and 64 keys, the same order, and again
 * LANES ARE QUERIES: scores are kept as S^T [key][query]. Probabilities and dS are rounded to bf16
 * before they are multiplied (as attention on GPUs does), everything else inside is fp32. Must not
 * know: streams, other operations. Runs on a stream's lane with a team of c->threads; the tile
 * registers are configured at the start of a team and given back at its end.
 *
 * OPERANDS of C[m][n] += A[m][k] B[k][n]: A has rows of bf16 as they lie in memory. B has pairs of
 * rows in one word: B2[k / 2][n] = (B[k][n], B[k + 1][n]). So of a matrix X in rows, X^T as B is the
 * transpose of X's words, and X as B is rows of X in pairs.
 *     S^T  = K Q^T        A: K                 B: words of Q transposed
 *     O^T += V^T P^T      A: V^T, packed       B: rows of P^T in pairs
 *     dP^T = V dO^T       A: V                 B: words of dO transposed
 *     dV  += P^T dO       A: P^T               B: rows of dO in pairs
 *     dK  += dS^T Q       A: dS^T              B: rows of Q in pairs
 *     dQ^T += K^T dS^T    A: K^T, packed       B: rows of dS^T in pairs
 *
 * ORDER as in attention_isa.c: no result depends on the threads. */
#include "gpu/host/kernels/amx.h"
#include "gpu/host/kernels/kern.h"
#include "gpu/host/kernels/vec.h"

#include <float.h>
#include <math.h>
#include <omp.h>

const bool kern_amx_built = true;

enum { BQ = KERN_ATT_BQ, BK = KERN_ATT_BK };
_Static_assert(BQ == 64 && BK == 64, "tiles and packings below");
_Static_assert(VL == 16, "this file needs AVX-512");

/* --- products on tiles ------------------------------------------------------------------------ */

struct prod {
    const void *a;
    uint64_t a_bytes; /* from row to row */
    const uint32_t *b;
    uint64_t b_words;
    float *c;
    uint64_t c_floats;
    uint64_t m, n, k; /* multiples of 32 */
    bool add;
};

static __attribute__((noinline)) void prod_run(const struct prod *p)
{
    AMX_MEMORY_BARRIER();
    const uint64_t as = p->a_bytes, bs = p->b_words * 4, cs = p->c_floats * 4;
    for (uint64_t m = 0; m < p->m; m += 32)
        for (uint64_t n = 0; n < p->n; n += 32) {
            float *c0 = p->c + m * p->c_floats + n, *c1 = c0 + 16 * p->c_floats;
            const char *a = (const char *)p->a + m * as;
            const uint32_t *b = p->b + n;
            if (p->add) {
                _tile_loadd(0, c0, cs);
                _tile_loadd(1, c0 + 16, cs);
                _tile_loadd(2, c1, cs);
                _tile_loadd(3, c1 + 16, cs);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (uint64_t k = 0; k < p->k; k += 32, a += 64, b += 16 * p->b_words) {
                _tile_loadd(4, a, as);
                _tile_loadd(6, b, bs);
                _tile_loadd(7, b + 16, bs);
                _tile_loadd(5, a + 16 * as, as);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, c0, cs);
            _tile_stored(1, c0 + 16, cs);
            _tile_stored(2, c1, cs);
            _tile_stored(3, c1 + 16, cs);
        }
    AMX_MEMORY_BARRIER();
}

/* --- moving rows ------------------------------------------------------------------------------ */

struct rows {
    const uint16_t *p;
    uint64_t ld; /* elements */
};

/* n <= 64 rows of `dim` elements, copied close together, with zeros below: in place they are often a
 * power of two apart and share few sets of the cache. */
static struct rows rows_of(const void *src, uint64_t first, uint64_t stride, uint64_t n,
                           uint64_t dim, uint16_t *pad)
{
    const uint16_t *p = (const uint16_t *)src + first;
    for (uint64_t r = 0; r < n; r++) {
        for (uint64_t d = 0; d < dim; d += 32) /* the next block */
            vec_fetch(OPS_BF16, p, (BQ + r) * stride + d);
        memcpy(pad + r * dim, p + r * stride, dim * 2);
    }
    memset(pad + n * dim, 0, (BQ - n) * dim * 2);
    return (struct rows){ pad, dim };
}

/* dst[j][d] = (row 2j, row 2j + 1) of 64 rows. */
static void rows_pair(struct rows x, uint64_t dim, uint32_t *dst, uint64_t ldd)
{
    for (uint64_t j = 0; j < BQ / 2; j++)
        for (uint64_t d = 0; d < dim; d += VL) {
            const uint16_t *even = x.p + 2 * j * x.ld + d, *odd = even + x.ld;
            vec_u lo = __builtin_convertvector(*(const vec_h_any *)even, vec_u);
            vec_u hi = __builtin_convertvector(*(const vec_h_any *)odd, vec_u);
            vec_store((float *)(void *)(dst + j * ldd + d), (vec_f)(lo | (hi << 16)));
        }
}

/* dst[w][r] = word w of row r, of 64 rows of `words` words. */
static void words_transpose(const void *src, uint64_t ld_words, uint64_t rows, uint64_t words,
                            uint32_t *dst, uint64_t ldd)
{
    vec_transpose(src, ld_words, rows, words, (float *)(void *)dst, ldd);
}

/* dst[d][row] = element d of 64 rows: pairs of rows first, whose words are then transposed. */
static void rows_transpose(struct rows x, uint64_t dim, uint32_t *pairs, uint32_t *dst)
{
    rows_pair(x, dim, pairs, dim);
    words_transpose(pairs, dim, BQ / 2, dim, dst, BQ / 2);
}

/* Of two rows of fp32: (row 0, row 1) as bf16 in one word a lane. */
VEC_INLINE __m512i pair_bf16(vec_f row0, vec_f row1)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    return _mm512_permutexvar_epi16(
        order, (__m512i)_mm512_cvtne2ps_pbh((__m512)row1, (__m512)row0));
}
/* 32 lanes of one row as bf16. */
VEC_INLINE __m512i row_bf16(vec_f lanes0, vec_f lanes16)
{
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)lanes16, (__m512)lanes0);
}

/* --- exponentials ----------------------------------------------------------------------------- */

#define LOG2_E 1.44269504088896341f
#define LN_2 0.693147180559945309f

/* 2^x: x = n + r with |r| <= 1/2, the series of 2^r = e^(r ln 2) to the sixth power (its rest is below
 * 2e-7; what is made of it is rounded to bf16), times 2^n. Below -115 it is 0, which keeps later
 * products out of the subnormals. NaN stays NaN. */
VEC_INLINE vec_f exp2_softmax(vec_f x)
{
    const __m512 v = (__m512)x;
    const __mmask16 seen = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-115.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vec_f r = (vec_f)_mm512_sub_ps(v, n);
    vec_f p = vec_fma(r, vec_set(0.00015403530f), vec_set(0.0013333558f));
    p = vec_fma(p, r, vec_set(0.0096181291f));
    p = vec_fma(p, r, vec_set(0.055504109f));
    p = vec_fma(p, r, vec_set(0.24022651f));
    p = vec_fma(p, r, vec_set(LN_2));
    p = vec_fma(p, r, vec_set(1.0f));
    return (vec_f)_mm512_maskz_scalef_ps(seen, (__m512)p, n);
}

/* --- one block of queries --------------------------------------------------------------------- */

struct work {
    const struct ops_attention *a;
    uint64_t dim;
    uint32_t *qt;              /* words of Q transposed [dim / 2][BQ] */
    uint16_t *qpad, *kpad, *vpad; /* [64][dim]; backward: K and V of every block */
    uint32_t *pairs;           /* [32][dim] */
    float *s;                  /* S^T [BK][BQ] */
    uint32_t *pp;              /* rows of P^T (backward: of dS^T) in pairs [BK / 2][BQ] */
    float *ot, *rows;          /* O^T or dQ^T [dim][BQ]; [BQ][dim] */
    float *m, *l;              /* per lane: maximum (a power of 2) and sum; backward: -lse / ln 2 and
                                * delta */
    int32_t *first, *pos;      /* per lane: keys first..pos are seen */
    uint32_t *gt, *qp, *gp;    /* backward: words of dO transposed; rows of Q and of dO in pairs */
    float *dp;                 /* dP^T [BK][BQ] */
    uint16_t *p, *ds;          /* P^T, dS^T [BK][BQ] */
    float *dk, *dv;            /* [whole blocks of seq][dim] of one kv head */
    uint32_t *kt;              /* K^T of every block: [dim][BK] bf16 */
    uint16_t *shared;          /* forward, of all threads: K and V^T of a block, one after the other */
    uint64_t seq_row, t0, nq;
    uint64_t key_min, key_end; /* keys any row sees lie in [key_min, key_end) */
    uint64_t all_min, all_end; /* every row sees at least [all_min, all_end) */
};

static uint64_t padded_seq(const struct ops_attention *a) { return (a->seq + BK - 1) / BK * BK; }

uint64_t kern_amx_floats(const struct ops_attention *a, bool backward)
{
    uint64_t dim = a->head_dim, forward = 32 * dim * 4 + 64 * dim * 2 + BQ * BK + BQ * BK / 2 +
                                          4 * BQ;
    if (!backward) return forward;
    return forward + 32 * dim * 3 + BQ * BK + 2 * (BQ * BK / 2) +
           padded_seq(a) * dim * 2 + 3 * (padded_seq(a) * dim / 2);
}

/* Forward: K and V^T of every block of every kv head, for all threads. */
uint64_t kern_amx_shared_floats(const struct ops_attention *a)
{
    return a->n_seq * a->kv_heads * padded_seq(a) * a->head_dim;
}

static void work_open(struct work *w, const struct ops_attention *a, float *base, bool backward)
{
    const uint64_t dim = a->head_dim;
    memset(w, 0, sizeof *w);
    w->a = a;
    w->dim = dim;
    w->qt = (uint32_t *)(void *)base, base += 32 * dim;
    w->qpad = (uint16_t *)(void *)base, base += 32 * dim;
    w->vpad = (uint16_t *)(void *)base, base += 32 * dim;
    w->pairs = (uint32_t *)(void *)base, base += 32 * dim;
    w->ot = base, base += 64 * dim;
    w->rows = base, base += 64 * dim;
    w->s = base, base += BQ * BK;
    w->pp = (uint32_t *)(void *)base, base += BQ * BK / 2;
    w->m = base, base += BQ;
    w->l = base, base += BQ;
    w->first = (int32_t *)(void *)base, base += BQ;
    w->pos = (int32_t *)(void *)base, base += BQ;
    if (!backward) return;
    w->gt = (uint32_t *)(void *)base, base += 32 * dim;
    w->qp = (uint32_t *)(void *)base, base += 32 * dim;
    w->gp = (uint32_t *)(void *)base, base += 32 * dim;
    w->dp = base, base += BQ * BK;
    w->p = (uint16_t *)(void *)base, base += BQ * BK / 2;
    w->ds = (uint16_t *)(void *)base, base += BQ * BK / 2;
    w->dk = base, base += padded_seq(a) * dim;
    w->dv = base, base += padded_seq(a) * dim;
    w->kt = (uint32_t *)(void *)base, base += padded_seq(a) * dim / 2;
    w->kpad = (uint16_t *)(void *)base, base += padded_seq(a) * dim / 2;
    w->vpad = (uint16_t *)(void *)base;
}

/* Takes a block of queries of one head: which keys its rows see, and its rows as an operand. */
static struct rows block_open(struct work *w, uint64_t seq, uint64_t head, uint64_t block)
{
    const struct ops_attention *a = w->a;
    w->seq_row = seq * a->seq;
    w->t0 = block * BQ;
    w->nq = a->seq - w->t0 < BQ ? a->seq - w->t0 : BQ;
    uint64_t row = w->seq_row + w->t0;
    int64_t low = INT32_MAX, high = 0;
    for (uint64_t i = 0; i < BQ; i++) {
        bool real = i < w->nq;
        w->pos[i] = real ? (int32_t)(w->t0 + i) : -1;
        w->first[i] = real ? a->first_key[row + i] : INT32_MAX;
        if (!real) continue;
        if (w->first[i] < low) low = w->first[i];
        if (w->first[i] > high) high = w->first[i];
    }
    w->key_min = low < 0 ? 0 : (uint64_t)low;
    w->key_end = w->t0 + w->nq;
    w->all_min = (uint64_t)high;
    w->all_end = w->t0 + 1;
    struct rows q = rows_of(a->q, row * a->q_stride + head * a->head_dim, a->q_stride, w->nq,
                            w->dim, w->qpad);
    words_transpose(q.p, q.ld / 2, BQ, w->dim / 2, w->qt, BQ);
    return q;
}

static uint64_t keys_from(const struct work *w, uint64_t key)
{
    return w->a->seq - key < BK ? w->a->seq - key : BK;
}
static struct rows keys_of(const struct work *w, uint64_t kv_head, uint64_t key, uint16_t *pad)
{
    const struct ops_attention *a = w->a;
    return rows_of(a->k, (w->seq_row + key) * a->k_stride + kv_head * a->head_dim, a->k_stride,
                   keys_from(w, key), w->dim, pad);
}
static struct rows values_of(const struct work *w, uint64_t kv_head, uint64_t key, uint16_t *pad)
{
    const struct ops_attention *a = w->a;
    return rows_of(a->v, (w->seq_row + key) * a->v_stride + kv_head * a->head_dim, a->v_stride,
                   keys_from(w, key), w->dim, pad);
}

static bool block_whole(const struct work *w, uint64_t key)
{
    return key >= w->all_min && key + BK <= w->all_end;
}

VEC_INLINE vec_i lanes_seeing(const struct work *w, uint64_t lane, uint64_t key)
{
    vec_i j = (int32_t)key - (vec_i){ 0 };
    return (vec_load_i(w->first + lane) <= j) & (vec_load_i(w->pos + lane) >= j);
}

/* X Y^T of 64 rows X and the block of queries (or of gradients) whose words are in yt. */
static void against_queries(const struct work *w, struct rows x, const uint32_t *yt, float *out)
{
    const struct prod p = { x.p, x.ld * 2, yt, BQ, out, BQ, BK, BQ, w->dim, false };
    prod_run(&p);
}

/* --- forward ---------------------------------------------------------------------------------- */

/* Scores become 2^(scale / ln 2 * s - m) with the new maximum m, in pairs of rows; sums and output so far
 * are scaled to it. */
static void softmax_step(struct work *w, uint64_t key)
{
    const bool whole = block_whole(w, key);
    const vec_f to_log2 = vec_set(w->a->scale * LOG2_E);
    for (uint64_t lane = 0; lane < BQ; lane += VL) {
        vec_f old = vec_load(w->m + lane), m = vec_set(-INFINITY), sum = { 0 };
        for (uint64_t j = 0; j < BK; j++) {
            float *s = w->s + j * BQ + lane;
            if (!whole)
                vec_store(
                    s, vec_select(lanes_seeing(w, lane, key + j), vec_load(s), vec_set(-INFINITY)));
            m = vec_max(m, vec_load(s));
        }
        /* A row that has seen nothing yet keeps -FLT_MAX: below, -inf + FLT_MAX is -inf. */
        m = vec_max(old, m * to_log2);
        for (uint64_t j = 0; j < BK; j += 2) {
            const float *s = w->s + j * BQ + lane;
            vec_f p0 = exp2_softmax(vec_fma(vec_load(s), to_log2, -m));
            vec_f p1 = exp2_softmax(vec_fma(vec_load(s + BQ), to_log2, -m));
            sum = (sum + p0) + p1;
            _mm512_store_si512(w->pp + j / 2 * BQ + lane, pair_bf16(p0, p1));
        }
        vec_f fade = exp2_softmax(old - m);
        vec_store(w->m + lane, m);
        vec_store(w->l + lane, vec_load(w->l + lane) * fade + sum);
        if (_mm512_cmpneq_ps_mask((__m512)fade, _mm512_set1_ps(1.0f)) == 0) continue;
        for (uint64_t d = 0; d < w->dim; d++) {
            float *o = w->ot + d * BQ + lane;
            vec_store(o, vec_load(o) * fade);
        }
    }
}

/* o = ot / l and lse = m ln 2 + log l, to their rows. */
static void forward_close(struct work *w, uint64_t head)
{
    const struct ops_attention *a = w->a;
    uint64_t row = w->seq_row + w->t0;
    for (uint64_t i = 0; i < w->nq; i++) {
        float l = w->l[i];
        a->lse[(row + i) * a->heads + head] = l == 0 ? -INFINITY : w->m[i] * LN_2 + logf(l);
        w->l[i] = l == 0 ? 0 : 1.0f / l;
    }
    vec_transpose(w->ot, BQ, w->dim, BQ, w->rows, w->dim);
    for (uint64_t r = 0; r < w->nq; r++)
        for (uint64_t d = 0; d < w->dim; d += VL)
            vec_store_bf16((uint16_t *)a->o + (row + r) * a->o_stride + head * w->dim + d,
                           vec_load(w->rows + r * w->dim + d) * w->l[r]);
}

/* One block of keys of one kv head, as both operands: all its queries and heads read them. */
static uint16_t *shared_at(const struct work *w, uint64_t seq, uint64_t kv_head, uint64_t key)
{
    const struct ops_attention *a = w->a;
    return w->shared + ((seq * a->kv_heads + kv_head) * padded_seq(a) + key) * w->dim * 2;
}
static void forward_keys(struct work *w, uint64_t seq, uint64_t kv_head, uint64_t key)
{
    uint16_t *k = shared_at(w, seq, kv_head, key);
    w->seq_row = seq * w->a->seq;
    keys_of(w, kv_head, key, k);
    rows_transpose(values_of(w, kv_head, key, w->vpad), w->dim, w->pairs,
                   (uint32_t *)(void *)(k + BK * w->dim));
}

static void forward_block(struct work *w, uint64_t seq, uint64_t head, uint64_t block)
{
    const struct ops_attention *a = w->a;
    const uint64_t kv_head = head / (a->heads / a->kv_heads), dim = w->dim;
    block_open(w, seq, head, block);
    memset(w->ot, 0, dim * BQ * sizeof(float));
    for (uint64_t i = 0; i < BQ; i++) w->m[i] = -FLT_MAX, w->l[i] = 0;
    for (uint64_t key = w->key_min / BK * BK; key < w->key_end; key += BK) {
        const uint16_t *k = shared_at(w, seq, kv_head, key);
        against_queries(w, (struct rows){ k, dim }, w->qt, w->s);
        softmax_step(w, key);
        const struct prod o = { k + BK * dim, BK * 2, w->pp, BQ, w->ot, BQ, dim, BQ, BK, true };
        prod_run(&o);
    }
    forward_close(w, head);
}

void kern_attention_forward_amx(const struct host_ctx *c, const struct ops_attention *a)
{
    uint64_t blocks = (a->seq + BQ - 1) / BQ, per_block = a->n_seq * a->heads;
    float *scratch = kern_scratch(&a->scratch);
    const uint64_t floats = kern_amx_floats(a, false), keys = a->n_seq * a->kv_heads * blocks;
    uint16_t *shared = (uint16_t *)(void *)(scratch + floats * c->threads);
#pragma omp parallel num_threads((int)c->threads)
    {
        struct work w;
        work_open(&w, a, scratch + floats * (uint64_t)omp_get_thread_num(), false);
        w.shared = shared;
        amx_tiles_open(32);
#pragma omp for schedule(dynamic, kern_few(c, keys))
        for (uint64_t u = 0; u < keys; u++)
            forward_keys(&w, u / blocks / a->kv_heads, u / blocks % a->kv_heads, u % blocks * BK);
        /* The long blocks (late rows see more keys) first, so that threads end together. */
#pragma omp for schedule(dynamic, 1)
        for (uint64_t u = 0; u < blocks * per_block; u++)
            forward_block(&w, u % per_block / a->heads, u % a->heads, blocks - 1 - u / per_block);
        _tile_release();
    }
}

/* --- backward --------------------------------------------------------------------------------- */

/* d_o of the block as operands, -lse / ln 2 (into m) and delta = sum over d of d_o * o (into l). */
static void backward_open(struct work *w, uint64_t head)
{
    const struct ops_attention *a = w->a;
    const uint64_t row = w->seq_row + w->t0, first = row * a->o_stride + head * w->dim;
    for (uint64_t i = 0; i < BQ; i++) {
        vec_f sum = { 0 };
        const uint16_t *g = (const uint16_t *)a->d_o + first + i * a->o_stride,
                       *o = (const uint16_t *)a->o + first + i * a->o_stride;
        for (uint64_t d = 0; i < w->nq && d < w->dim; d += VL)
            sum = vec_fma(vec_load_bf16(g + d), vec_load_bf16(o + d), sum);
        w->l[i] = _mm512_reduce_add_ps((__m512)sum);
        w->m[i] = i < w->nq ? a->lse[(row + i) * a->heads + head] * -LOG2_E : 0;
    }
    /* The rows of q in `qpad` are not needed any more. */
    struct rows g = rows_of(a->d_o, first, a->o_stride, w->nq, w->dim, w->qpad);
    rows_pair(g, w->dim, w->gp, w->dim);
    words_transpose(g.p, g.ld / 2, BQ, w->dim / 2, w->gt, BQ);
    memset(w->ot, 0, w->dim * BQ * sizeof(float));
}

/* P^T and dS^T = P^T (dP^T - delta) from S^T and dP^T, for 2 keys and 32 lanes. */
VEC_INLINE void gradients_step(struct work *w, uint64_t key, uint64_t j, uint64_t lane, bool whole)
{
    vec_f p[2][2], ds[2][2];
    UNROLL
    for (int k = 0; k < 2; k++) {
        UNROLL
        for (int v = 0; v < 2; v++) {
            uint64_t at = lane + (uint64_t)v * VL, i = (j + (uint64_t)k) * BQ + at;
            vec_f x = exp2_softmax(vec_fma(vec_load(w->s + i), vec_set(w->a->scale * LOG2_E),
                                           vec_load(w->m + at)));
            if (!whole) x = (vec_f)(lanes_seeing(w, at, key + j + (uint64_t)k) & (vec_i)x);
            p[k][v] = x;
            x = x * (vec_load(w->dp + i) - vec_load(w->l + at));
            /* A NaN in delta must not reach keys that the row does not see. */
            if (!whole) x = (vec_f)(lanes_seeing(w, at, key + j + (uint64_t)k) & (vec_i)x);
            ds[k][v] = x;
        }
        _mm512_store_si512(w->p + (j + (uint64_t)k) * BQ + lane, row_bf16(p[k][0], p[k][1]));
        _mm512_store_si512(w->ds + (j + (uint64_t)k) * BQ + lane, row_bf16(ds[k][0], ds[k][1]));
    }
    _mm512_store_si512(w->pp + j / 2 * BQ + lane, pair_bf16(ds[0][0], ds[1][0]));
    _mm512_store_si512(w->pp + j / 2 * BQ + lane + VL, pair_bf16(ds[0][1], ds[1][1]));
}

static void gradients(struct work *w, uint64_t key)
{
    const bool whole = block_whole(w, key);
    for (uint64_t j = 0; j < BK; j += 2)
        for (uint64_t lane = 0; lane < BQ; lane += 2 * VL) gradients_step(w, key, j, lane, whole);
}

static void backward_keys(struct work *w, uint64_t key)
{
    const uint64_t dim = w->dim;
    against_queries(w, (struct rows){ w->kpad + key * dim, dim }, w->qt, w->s);
    against_queries(w, (struct rows){ w->vpad + key * dim, dim }, w->gt, w->dp);
    gradients(w, key);
    const struct prod dv = { w->p, BQ * 2, w->gp, dim, w->dv + key * dim, dim, BK, dim, BQ, true };
    prod_run(&dv);
    const struct prod dk = { w->ds, BQ * 2, w->qp, dim, w->dk + key * dim, dim, BK, dim, BQ, true };
    prod_run(&dk);
    const struct prod dq = { w->kt + key * dim / 2, BK * 2, w->pp, BQ, w->ot, BQ, dim, BQ, BK,
                             true };
    prod_run(&dq);
}

static void rows_store(void *dst, uint64_t first, uint64_t stride, uint64_t n, uint64_t dim,
                       const float *src, float scale)
{
    for (uint64_t r = 0; r < n; r++)
        for (uint64_t d = 0; d < dim; d += VL)
            vec_store_bf16((uint16_t *)dst + first + r * stride + d,
                           vec_load(src + r * dim + d) * scale);
}

static void backward_block(struct work *w, uint64_t seq, uint64_t head, uint64_t block)
{
    const struct ops_attention *a = w->a;
    struct rows q = block_open(w, seq, head, block);
    rows_pair(q, w->dim, w->qp, w->dim);
    backward_open(w, head);
    for (uint64_t key = w->key_min / BK * BK; key < w->key_end; key += BK)
        backward_keys(w, key);
    vec_transpose(w->ot, BQ, w->dim, BQ, w->rows, w->dim);
    rows_store(a->dq, (w->seq_row + w->t0) * a->q_stride + head * w->dim, a->q_stride, w->nq,
               w->dim, w->rows, a->scale);
}

static void backward_head(struct work *w, uint64_t seq, uint64_t kv)
{
    const struct ops_attention *a = w->a;
    const uint64_t blocks = (a->seq + BQ - 1) / BQ, group = a->heads / a->kv_heads,
                   row = seq * a->seq, col = kv * w->dim;
    memset(w->dk, 0, padded_seq(a) * w->dim * sizeof(float));
    memset(w->dv, 0, padded_seq(a) * w->dim * sizeof(float));
    w->seq_row = row;
    for (uint64_t b = 0; b < blocks; b++) {
        const uint64_t at = b * BK * w->dim;
        values_of(w, kv, b * BK, w->vpad + at);
        rows_transpose(keys_of(w, kv, b * BK, w->kpad + at), w->dim, w->pairs, w->kt + at / 2);
    }
    for (uint64_t h = kv * group; h < (kv + 1) * group; h++)
        for (uint64_t b = 0; b < blocks; b++) backward_block(w, seq, h, b);
    rows_store(a->dk, row * a->k_stride + col, a->k_stride, a->seq, w->dim, w->dk, a->scale);
    rows_store(a->dv, row * a->v_stride + col, a->v_stride, a->seq, w->dim, w->dv, 1.0f);
}

void kern_attention_backward_amx(const struct host_ctx *c, const struct ops_attention *a)
{
    float *scratch = kern_scratch(&a->scratch);
    uint64_t floats = kern_amx_floats(a, true);
#pragma omp parallel num_threads((int)c->threads)
    {
        struct work w;
        work_open(&w, a, scratch + floats * (uint64_t)omp_get_thread_num(), true);
        amx_tiles_open(32);
#pragma omp for schedule(dynamic, 1)
        for (uint64_t u = 0; u < a->n_seq * a->kv_heads; u++)
            backward_head(&w, u / a->kv_heads, u % a->kv_heads);
        _tile_release();
    }
}
