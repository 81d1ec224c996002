/* gpu/host/kernels/attention_isa.c - blocked attention, compiled once per instruction set
 * (KERN_ISA).
 *
 * Owns: forward and backward over blocks of 64 queries and 64 keys (Dao 2022, Algorithms 1 and 4;
 * online softmax: Milakov & Gimelshein 2018). All of it in fp32. LANES ARE QUERIES: a block of
 * scores is kept as S^T [key][query], so keys and values are only ever broadcast, and maxima and
 * sums run down the vectors; only queries (once per block of them) are transposed. Must not know:
 * streams, other operations. Runs on a stream's lane with a team of c->threads.
 *
 * ORDER. Forward: a unit of work is (sequence, head, block of queries). Backward: (sequence, kv
 * head); its dk and dv are summed by one thread over heads, then blocks of queries, ascending; dq
 * over blocks of keys, ascending. So no result depends on the threads. A row with no key at all
 * (first_key beyond the row) gives o = 0, lse = -infinity and no gradient. */
#include "gpu/host/kernels/kern.h"
#include "gpu/host/kernels/vec.h"

#include <float.h>
#include <math.h>
#include <omp.h>

/* Vectors of a register tile: 6 x 4 of 32 registers with AVX-512, 6 x 2 of 16 else. */
#if defined(__AVX512F__)
#define NV_MAX 4
#else
#define NV_MAX 2
#endif

enum { BQ = KERN_ATT_BQ, BK = KERN_ATT_BK, MR_MAX = 6 };

/* --- product of a tile ---
 * C[m][lane] (+)= sum over k of A[m * am + k * ak] * B[k * ldb + lane], k ascending. mr and nv are
 * constants at every call, so the accumulators live in registers: 6 x 4 of 32 with AVX-512, 6 x 2
 * of 16 else. */
struct prod {
    const float *a;
    uint64_t am, ak;
    const float *b;
    uint64_t ldb;
    float *c;
    uint64_t ldc;
    uint64_t kn;
    bool add;
};

VEC_INLINE void prod_tile(const struct prod *p, uint64_t m0, uint64_t lane0, const int mr,
                          const int nv)
{
    vec_f acc[MR_MAX][NV_MAX];
    const float *a = p->a + m0 * p->am, *b = p->b + lane0;
    float *c = p->c + m0 * p->ldc + lane0;
    const uint64_t am = p->am, ak = p->ak, ldb = p->ldb, ldc = p->ldc;
    UNROLL
    for (int m = 0; m < mr; m++) {
        UNROLL
        for (int n = 0; n < nv; n++)
            acc[m][n] = p->add ? vec_load(c + (uint64_t)m * ldc + n * VL) : (vec_f){ 0 };
    }
    for (uint64_t k = p->kn; k > 0; k--) {
        vec_f bv[NV_MAX];
        UNROLL
        for (int n = 0; n < nv; n++) bv[n] = vec_load(b + n * VL);
        UNROLL
        for (int m = 0; m < mr; m++) {
            vec_f av = vec_set(a[(uint64_t)m * am]);
            UNROLL
            for (int n = 0; n < nv; n++) acc[m][n] = vec_fma(av, bv[n], acc[m][n]);
        }
        a += ak;
        b += ldb;
    }
    UNROLL
    for (int m = 0; m < mr; m++) {
        UNROLL
        for (int n = 0; n < nv; n++) vec_store(c + (uint64_t)m * ldc + n * VL, acc[m][n]);
    }
}

#define PROD_ROWS(nv_)                                                                             \
    static __attribute__((noinline)) void prod_rows_##nv_(const struct prod *p, uint64_t mn,       \
                                                          uint64_t lane0)                          \
    {                                                                                              \
        uint64_t m = 0;                                                                            \
        for (; m + 6 <= mn; m += 6) prod_tile(p, m, lane0, 6, nv_);                                \
        switch (mn - m) {                                                                          \
        case 5: prod_tile(p, m, lane0, 5, nv_); break;                                             \
        case 4: prod_tile(p, m, lane0, 4, nv_); break;                                             \
        case 3: prod_tile(p, m, lane0, 3, nv_); break;                                             \
        case 2: prod_tile(p, m, lane0, 2, nv_); break;                                             \
        case 1: prod_tile(p, m, lane0, 1, nv_); break;                                             \
        default: break;                                                                            \
        }                                                                                          \
    }
PROD_ROWS(1)
PROD_ROWS(2)
#if NV_MAX == 4
PROD_ROWS(3)
PROD_ROWS(4)
#endif

/* All of C: mn rows, `vecs` vectors of lanes. */
static void prod_run(const struct prod *p, uint64_t mn, uint64_t vecs)
{
    uint64_t v = 0;
    for (; v + NV_MAX <= vecs; v += NV_MAX) {
#if NV_MAX == 4
        prod_rows_4(p, mn, v * VL);
#else
        prod_rows_2(p, mn, v * VL);
#endif
    }
    switch (vecs - v) {
#if NV_MAX == 4
    case 3: prod_rows_3(p, mn, v * VL); break;
    case 2: prod_rows_2(p, mn, v * VL); break;
#endif
    case 1: prod_rows_1(p, mn, v * VL); break;
    default: break;
    }
}

/* --- moving rows --- */

/* rows x dim values of `at` (row stride `stride` elements, from element `first`) times scale, into
 * dst [rows][ld]; columns up to `width` (a multiple of 16) become zero. */
static void rows_load(enum ops_dtype at, const void *src, uint64_t first, uint64_t stride,
                      uint64_t rows, uint64_t dim, float scale, float *dst, uint64_t ld,
                      uint64_t width)
{
    for (uint64_t r = 0; r < rows; r++) {
        uint64_t row = first + r * stride;
        for (uint64_t d = 0; d < width; d += VL) {
            vec_f v = d < dim ? vec_get(at, src, row + d, dim - d) : (vec_f){ 0 };
            vec_store(dst + r * ld + d, v * scale);
        }
    }
}

static void rows_store(enum ops_dtype at, void *dst, uint64_t first, uint64_t stride, uint64_t rows,
                       uint64_t dim, const float *src, uint64_t ld)
{
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t d = 0; d < dim; d += VL)
            vec_put(at, dst, first + r * stride + d, dim - d, vec_load(src + r * ld + d));
}

/* --- one block of queries --- */

/* A thread's tiles, and the block they hold. Row-major; lanes of queries are the fast index of the
 * transposed ones. */
struct work {
    const struct ops_attention *a;
    uint64_t dim, kld;         /* padded head_dim; row length of k and v */
    float *q, *qt;             /* queries * scale: [BQ][dim], [dim][BQ] */
    float *k, *v;              /* [BK][kld] */
    float *s;                  /* scores, then probabilities: [BK][BQ] */
    float *ot;                 /* forward: o; backward: dq: [dim][BQ] */
    float *g, *gt, *ds;        /* backward: d_o [BQ][dim], [dim][BQ]; dP, then dS [BK][BQ] */
    float *m, *l;              /* per lane: running maximum and sum; backward: lse and delta */
    int32_t *first, *pos;      /* per lane: keys first..pos are seen */
    float *dk, *dv;            /* backward: [seq][dim] of one kv head */
    uint64_t seq_row;          /* token row of the sequence's start */
    uint64_t t0, nq, vecs;     /* first row, rows, vectors of lanes in use */
    uint64_t key_min, key_end; /* keys any row sees lie in [key_min, key_end) */
    uint64_t all_min, all_end; /* every row sees at least [all_min, all_end) */
};

static void work_open(struct work *w, const struct ops_attention *a, float *base, bool backward)
{
    uint64_t dim = kern_att_dim(a), kld = kern_att_kld(a), q = BQ * dim;
    memset(w, 0, sizeof *w);
    w->a = a;
    w->dim = dim;
    w->kld = kld;
    w->q = base, base += q;
    w->qt = base, base += q;
    w->ot = base, base += q;
    w->k = base, base += BK * kld;
    w->v = base, base += BK * kld;
    w->s = base, base += BQ * BK;
    w->m = base, base += BQ;
    w->l = base, base += BQ;
    w->first = (int32_t *)(void *)base, base += BQ;
    w->pos = (int32_t *)(void *)base, base += BQ;
    if (!backward) return;
    w->g = base, base += q;
    w->gt = base, base += q;
    w->ds = base, base += BQ * BK;
    w->dk = base, base += a->seq * dim;
    w->dv = base;
}

/* Takes a block of queries of one head: its rows, their transpose, and which keys they see. */
static void block_open(struct work *w, uint64_t seq, uint64_t head, uint64_t block)
{
    const struct ops_attention *a = w->a;
    w->seq_row = seq * a->seq;
    w->t0 = block * BQ;
    w->nq = a->seq - w->t0 < BQ ? a->seq - w->t0 : BQ;
    w->vecs = (w->nq + VL - 1) / VL;
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
    rows_load(a->at, a->q, row * a->q_stride + head * a->head_dim, a->q_stride, w->nq, a->head_dim,
              a->scale, w->q, w->dim, w->dim);
    memset(w->q + w->nq * w->dim, 0, (BQ - w->nq) * w->dim * sizeof(float));
    vec_transpose(w->q, w->dim, BQ, w->dim, w->qt, BQ);
}

/* Keys and values [key, key + n) of a kv head. */
static void keys_load(struct work *w, uint64_t kv_head, uint64_t key, uint64_t n)
{
    const struct ops_attention *a = w->a;
    uint64_t row = w->seq_row + key, col = kv_head * a->head_dim;
    rows_load(a->at, a->k, row * a->k_stride + col, a->k_stride, n, a->head_dim, 1.0f, w->k, w->kld,
              w->dim);
    rows_load(a->at, a->v, row * a->v_stride + col, a->v_stride, n, a->head_dim, 1.0f, w->v, w->kld,
              w->dim);
}

static bool block_whole(const struct work *w, uint64_t key, uint64_t n)
{
    return key >= w->all_min && key + n <= w->all_end;
}

/* S^T of n keys from `key` on. */
static void scores(const struct work *w, uint64_t n)
{
    const struct prod p = { w->k, w->kld, 1, w->qt, BQ, w->s, BQ, w->a->head_dim, false };
    prod_run(&p, n, w->vecs);
}

VEC_INLINE vec_i lanes_seeing(const struct work *w, uint64_t lane, uint64_t key)
{
    vec_i j = (int32_t)key - (vec_i){ 0 };
    return (vec_load_i(w->first + lane) <= j) & (vec_load_i(w->pos + lane) >= j);
}

/* --- forward --- */

/* Scores become exp(s - m) with the new maximum m; sums and output so far are scaled to it. */
static void softmax_step(struct work *w, uint64_t key, uint64_t n)
{
    const bool whole = block_whole(w, key, n);
    for (uint64_t lane = 0; lane < w->vecs * VL; lane += VL) {
        vec_f old = vec_load(w->m + lane), m = old, sum = { 0 };
        for (uint64_t j = 0; j < n; j++) {
            float *s = w->s + j * BQ + lane;
            if (!whole)
                vec_store(
                    s, vec_select(lanes_seeing(w, lane, key + j), vec_load(s), vec_set(-INFINITY)));
            m = vec_max(m, vec_load(s));
        }
        for (uint64_t j = 0; j < n; j++) {
            float *s = w->s + j * BQ + lane;
            vec_f p = vec_exp_softmax(vec_load(s) - m);
            sum = sum + p;
            vec_store(s, p);
        }
        vec_f fade = vec_exp_softmax(old - m);
        vec_store(w->m + lane, m);
        vec_store(w->l + lane, vec_load(w->l + lane) * fade + sum);
        for (uint64_t d = 0; d < w->a->head_dim; d++) {
            float *o = w->ot + d * BQ + lane;
            vec_store(o, vec_load(o) * fade);
        }
    }
}

/* o = ot / l and lse = m + log l, to their rows. */
static void forward_close(struct work *w, uint64_t head)
{
    const struct ops_attention *a = w->a;
    uint64_t row = w->seq_row + w->t0;
    for (uint64_t i = 0; i < w->nq; i++) {
        float l = w->l[i];
        a->lse[(row + i) * a->heads + head] = l == 0 ? -INFINITY : w->m[i] + logf(l);
        w->l[i] = l == 0 ? 0 : 1.0f / l;
    }
    for (uint64_t d = 0; d < a->head_dim; d++)
        for (uint64_t lane = 0; lane < w->vecs * VL; lane += VL)
            vec_store(w->ot + d * BQ + lane,
                      vec_load(w->ot + d * BQ + lane) * vec_load(w->l + lane));
    vec_transpose(w->ot, BQ, w->dim, BQ, w->q, w->dim);
    rows_store(a->at, a->o, row * a->o_stride + head * a->head_dim, a->o_stride, w->nq, a->head_dim,
               w->q, w->dim);
}

static void forward_block(struct work *w, uint64_t seq, uint64_t head, uint64_t block)
{
    const struct ops_attention *a = w->a;
    block_open(w, seq, head, block);
    memset(w->ot, 0, w->dim * BQ * sizeof(float));
    for (uint64_t i = 0; i < BQ; i++) w->m[i] = -FLT_MAX, w->l[i] = 0;
    for (uint64_t key = w->key_min / BK * BK; key < w->key_end; key += BK) {
        uint64_t n = w->key_end - key < BK ? w->key_end - key : BK;
        keys_load(w, head / (a->heads / a->kv_heads), key, n);
        scores(w, n);
        softmax_step(w, key, n);
        const struct prod p = { w->v, 1, w->kld, w->s, BQ, w->ot, BQ, n, true };
        prod_run(&p, a->head_dim, w->vecs);
    }
    forward_close(w, head);
}

void KERN_NAME(kern_attention_forward)(const struct host_ctx *c, const struct ops_attention *a)
{
    uint64_t blocks = (a->seq + BQ - 1) / BQ, per_block = a->n_seq * a->heads;
    float *scratch = kern_scratch(&a->scratch);
    uint64_t floats = kern_att_floats(a, false);
#pragma omp parallel num_threads((int)c->threads)
    {
        struct work w;
        work_open(&w, a, scratch + floats * (uint64_t)omp_get_thread_num(), false);
        /* The long blocks (late rows see more keys) first, so that threads end together. */
#pragma omp for schedule(dynamic, 1)
        for (uint64_t u = 0; u < blocks * per_block; u++)
            forward_block(&w, u % per_block / a->heads, u % a->heads, blocks - 1 - u / per_block);
    }
}

/* --- backward --- */

/* d_o of the block, its transpose, lse (into m) and delta = sum over d of d_o * o (into l). */
static void backward_open(struct work *w, uint64_t head)
{
    const struct ops_attention *a = w->a;
    uint64_t row = w->seq_row + w->t0, first = row * a->o_stride + head * a->head_dim;
    rows_load(a->at, a->o, first, a->o_stride, w->nq, a->head_dim, 1.0f, w->g, w->dim, w->dim);
    vec_transpose(w->g, w->dim, BQ, w->dim, w->ot, BQ);
    rows_load(ops_wide(a->at, a->grad_wide), a->d_o, first, a->o_stride, w->nq, a->head_dim, 1.0f,
              w->g, w->dim, w->dim);
    memset(w->g + w->nq * w->dim, 0, (BQ - w->nq) * w->dim * sizeof(float));
    vec_transpose(w->g, w->dim, BQ, w->dim, w->gt, BQ);
    for (uint64_t lane = 0; lane < BQ; lane += VL) {
        vec_f sum = { 0 };
        for (uint64_t d = 0; d < a->head_dim; d++)
            sum = vec_fma(vec_load(w->gt + d * BQ + lane), vec_load(w->ot + d * BQ + lane), sum);
        vec_store(w->l + lane, sum);
    }
    for (uint64_t i = 0; i < BQ; i++) w->m[i] = i < w->nq ? a->lse[(row + i) * a->heads + head] : 0;
    memset(w->ot, 0, w->dim * BQ * sizeof(float));
}

/* Scores become probabilities exp(s - lse). */
static void probabilities(struct work *w, uint64_t key, uint64_t n)
{
    const bool whole = block_whole(w, key, n);
    for (uint64_t lane = 0; lane < w->vecs * VL; lane += VL) {
        vec_f lse = vec_load(w->m + lane);
        for (uint64_t j = 0; j < n; j++) {
            float *s = w->s + j * BQ + lane;
            vec_f p = vec_exp_softmax(vec_load(s) - lse);
            if (!whole) p = (vec_f)(lanes_seeing(w, lane, key + j) & (vec_i)p);
            vec_store(s, p);
        }
    }
}

/* ds holds dP^T and becomes dS^T = P^T (dP^T - delta). */
static void score_gradients(struct work *w, uint64_t n)
{
    for (uint64_t j = 0; j < n; j++)
        for (uint64_t lane = 0; lane < w->vecs * VL; lane += VL) {
            uint64_t i = j * BQ + lane;
            vec_store(w->ds + i,
                      vec_load(w->s + i) * (vec_load(w->ds + i) - vec_load(w->l + lane)));
        }
}

static void backward_keys(struct work *w, uint64_t kv_head, uint64_t key, uint64_t n)
{
    const uint64_t head_dim = w->a->head_dim, dim_vecs = (head_dim + VL - 1) / VL, dim = w->dim;
    keys_load(w, kv_head, key, n);
    scores(w, n);
    probabilities(w, key, n);
    const struct prod dv = { w->s, BQ, 1, w->g, dim, w->dv + key * dim, dim, w->nq, true };
    prod_run(&dv, n, dim_vecs);
    const struct prod dp = { w->v, w->kld, 1, w->gt, BQ, w->ds, BQ, head_dim, false };
    prod_run(&dp, n, w->vecs);
    score_gradients(w, n);
    const struct prod dk = { w->ds, BQ, 1, w->q, dim, w->dk + key * dim, dim, w->nq, true };
    prod_run(&dk, n, dim_vecs);
    const struct prod dq = { w->k, 1, w->kld, w->ds, BQ, w->ot, BQ, n, true };
    prod_run(&dq, head_dim, w->vecs);
}

static void backward_block(struct work *w, uint64_t seq, uint64_t head, uint64_t kv_head,
                           uint64_t block)
{
    const struct ops_attention *a = w->a;
    block_open(w, seq, head, block);
    backward_open(w, head);
    for (uint64_t key = w->key_min / BK * BK; key < w->key_end; key += BK)
        backward_keys(w, kv_head, key, w->key_end - key < BK ? w->key_end - key : BK);
    uint64_t row = w->seq_row + w->t0;
    for (uint64_t i = 0; i < a->head_dim * BQ; i += VL)
        vec_store(w->ot + i, vec_load(w->ot + i) * a->scale);
    vec_transpose(w->ot, BQ, w->dim, BQ, w->g, w->dim);
    rows_store(ops_wide(a->at, a->grad_wide), a->dq, row * a->q_stride + head * a->head_dim,
               a->q_stride, w->nq, a->head_dim, w->g, w->dim);
}

void KERN_NAME(kern_attention_backward)(const struct host_ctx *c, const struct ops_attention *a)
{
    uint64_t blocks = (a->seq + BQ - 1) / BQ, group = a->heads / a->kv_heads;
    float *scratch = kern_scratch(&a->scratch);
    uint64_t floats = kern_att_floats(a, true);
    const enum ops_dtype gt = ops_wide(a->at, a->grad_wide);
#pragma omp parallel num_threads((int)c->threads)
    {
        struct work w;
        work_open(&w, a, scratch + floats * (uint64_t)omp_get_thread_num(), true);
#pragma omp for schedule(dynamic, 1)
        for (uint64_t u = 0; u < a->n_seq * a->kv_heads; u++) {
            uint64_t seq = u / a->kv_heads, kv = u % a->kv_heads, row = seq * a->seq,
                     col = kv * a->head_dim;
            memset(w.dk, 0, a->seq * w.dim * sizeof(float));
            memset(w.dv, 0, a->seq * w.dim * sizeof(float));
            for (uint64_t h = kv * group; h < (kv + 1) * group; h++)
                for (uint64_t b = 0; b < blocks; b++) backward_block(&w, seq, h, kv, b);
            rows_store(gt, a->dk, row * a->k_stride + col, a->k_stride, a->seq, a->head_dim, w.dk,
                       w.dim);
            rows_store(gt, a->dv, row * a->v_stride + col, a->v_stride, a->seq, a->head_dim, w.dv,
                       w.dim);
        }
    }
}
