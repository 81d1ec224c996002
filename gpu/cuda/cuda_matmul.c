/* gpu/cuda/cuda_matmul.c - matrix products by cuBLASLt: one algorithm for each shape, chosen once.
 *
 * Owns descriptors, algorithms and the stream on which they are measured. Must not know operations.
 * Chosen on the application's thread in prepare mode; launched by streams' producers, under a lock
 * as a bias's address is a part of the descriptor.
 *
 * CHOICE. The library names up to CANDIDATES algorithms, best first by its own model, none with a
 * sum whose order changes (split-k only with a second pass in fp32, which is deterministic). Its
 * first is taken unless another one was faster by a tenth: noise must not decide, since the choice
 * is a part of the numerics key (a hash over all of them). A shape that was not prepared gets the
 * library's first, without measuring: the same bits wherever it is late.
 *
 * cuBLAS documentation 13.0, "Using the cuBLASLt API": cublasLtMatmul, its table of types,
 * cublasLtMatmulPreferenceAttributes_t, "Results reproducibility". */
#include "gpu/cuda/cuda_impl.h"

#include "base/sys.h"
#include <stdio.h>
#include <string.h>

#define TABLE_N 1024 /* shapes; a model has some dozens */
#define CANDIDATES 8
#define MEASURE_FLOPS 1e9 /* smaller products are over before it matters */
#define CLEARLY 0.9       /* of the first one's time */
#define OPERAND_ALIGN 64  /* gpu/ops.h; tiles begin at multiples of 128 rows */
#define AFTER_ARENA_BYTES ((uint64_t)48 << 20)
#define RATE_N_MAX 4096
#define RATE_N_MIN 512
#define RATE_RUNS 5

struct product {
    struct cuda_product key;
    bool made;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    uint64_t workspace_bytes;
    uint32_t hash; /* of shape and algorithm */
};

struct cuda_matmul {
    cublasLtHandle_t handle;
    cudaStream_t queue; /* for measuring */
    cudaEvent_t begin, end;
    pthread_mutex_t lock;
    uint64_t made, late;
    struct product table[TABLE_N];
};

static stk_status lt_check(cublasStatus_t st, const char *call, const struct cuda_product *p,
                           struct stk_error *err)
{
    if (st == CUBLAS_STATUS_SUCCESS) return STK_OK;
    return stk_error_set(
        err, st == CUBLAS_STATUS_ALLOC_FAILED ? STK_ERR_NOMEM : STK_ERR_DEVICE, 0,
        "device cuda: %s failed with status %d for a product of %llu x %llu x %llu (%s, "
        "%s, %u -> %u%s)",
        call, (int)st, (unsigned long long)p->m, (unsigned long long)p->n, (unsigned long long)p->k,
        p->ta ? "T" : "N", p->tb ? "T" : "N", p->src, p->dst, p->bias ? ", bias" : "");
}

/* --- descriptors ------------------------------------------------------------------------------ */

static cudaDataType_t lt_type(uint32_t t)
{
    return t == OPS_BF16 ? CUDA_R_16BF : t == OPS_FP16 ? CUDA_R_16F : CUDA_R_32F;
}

static stk_status make_desc(const struct cuda_lt *lt, const struct cuda_product *p,
                            struct product *e, struct stk_error *err)
{
    const cublasOperation_t ta = p->ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                            tb = p->tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasLtEpilogue_t bias = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType_t bias_type = lt_type(p->dst);
    STK_TRY(lt_check(lt->cublasLtMatmulDescCreate(&e->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                     "cublasLtMatmulDescCreate", p, err));
#define SET(name, value)                                                                          \
    STK_TRY(lt_check(lt->cublasLtMatmulDescSetAttribute(e->desc, CUBLASLT_MATMUL_DESC_##name,     \
                                                        &value, sizeof value),                    \
                     "cublasLtMatmulDescSetAttribute", p, err));
    SET(TRANSA, ta)
    SET(TRANSB, tb)
    if (p->bias) {
        SET(EPILOGUE, bias)
        SET(BIAS_DATA_TYPE, bias_type)
    }
#undef SET
    return STK_OK;
}

static stk_status make_layouts(const struct cuda_lt *lt, const struct cuda_product *p,
                               struct product *e, struct stk_error *err)
{
    cublasStatus_t st = lt->cublasLtMatrixLayoutCreate(&e->a, lt_type(p->src), p->ta ? p->k : p->m,
                                                       p->ta ? p->m : p->k, (int64_t)p->lda);
    if (st == CUBLAS_STATUS_SUCCESS)
        st = lt->cublasLtMatrixLayoutCreate(&e->b, lt_type(p->src), p->tb ? p->n : p->k,
                                            p->tb ? p->k : p->n, (int64_t)p->ldb);
    if (st == CUBLAS_STATUS_SUCCESS)
        st = lt->cublasLtMatrixLayoutCreate(&e->d, lt_type(p->dst), p->m, p->n, (int64_t)p->ldd);
    return lt_check(st, "cublasLtMatrixLayoutCreate", p, err);
}

static void product_free(const struct cuda_lt *lt, struct product *e)
{
    if (e->desc) lt->cublasLtMatmulDescDestroy(e->desc);
    if (e->a) lt->cublasLtMatrixLayoutDestroy(e->a);
    if (e->b) lt->cublasLtMatrixLayoutDestroy(e->b);
    if (e->d) lt->cublasLtMatrixLayoutDestroy(e->d);
    *e = (struct product){ 0 };
}

/* --- candidates ------------------------------------------------------------------------------- */

static stk_status set_preference(const struct cuda_lt *lt, cublasLtMatmulPreference_t pref,
                                 const struct cuda_product *p, struct stk_error *err)
{
    const uint64_t workspace = CUDA_WORKSPACE_BYTES;
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, align = OPERAND_ALIGN;
#define SET(name, value)                                                                         \
    STK_TRY(lt_check(lt->cublasLtMatmulPreferenceSetAttribute(                                   \
                         pref, CUBLASLT_MATMUL_PREF_##name, &value, sizeof value),               \
                     "cublasLtMatmulPreferenceSetAttribute", p, err));
    SET(MAX_WORKSPACE_BYTES, workspace)
    SET(REDUCTION_SCHEME_MASK, reduction)
    SET(MIN_ALIGNMENT_A_BYTES, align)
    SET(MIN_ALIGNMENT_B_BYTES, align)
    SET(MIN_ALIGNMENT_C_BYTES, align)
    SET(MIN_ALIGNMENT_D_BYTES, align)
#undef SET
    return STK_OK;
}

/* Usable ones to the front; returns how many. */
static int keep_usable(cublasLtMatmulHeuristicResult_t *r, int n)
{
    int kept = 0;
    for (int i = 0; i < n; i++)
        if (r[i].state == CUBLAS_STATUS_SUCCESS && r[i].workspaceSize <= CUDA_WORKSPACE_BYTES)
            r[kept++] = r[i];
    return kept;
}

static stk_status ask(struct cuda_dev *h, struct product *e, cublasLtMatmulHeuristicResult_t *out,
                      int *n, struct stk_error *err)
{
    const struct cuda_lt *lt = &h->lt;
    cublasLtMatmulPreference_t pref = NULL;
    *n = 0;
    STK_TRY(lt_check(lt->cublasLtMatmulPreferenceCreate(&pref), "cublasLtMatmulPreferenceCreate",
                     &e->key, err));
    stk_status st = set_preference(lt, pref, &e->key, err);
    if (st == STK_OK)
        st = lt_check(lt->cublasLtMatmulAlgoGetHeuristic(h->matmul->handle, e->desc, e->a, e->b,
                                                         e->d, e->d, pref, CANDIDATES, out, n),
                      "cublasLtMatmulAlgoGetHeuristic", &e->key, err);
    cublasStatus_t freed = lt->cublasLtMatmulPreferenceDestroy(pref);
    STK_TRY(st);
    STK_TRY(lt_check(freed, "cublasLtMatmulPreferenceDestroy", &e->key, err));
    *n = keep_usable(out, *n);
    return *n > 0 ? STK_OK
                  : lt_check(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic", &e->key,
                             err);
}

/* --- measuring -------------------------------------------------------------------------------- */

static const float one = 1.0f, zero = 0.0f;

struct trial {
    uint8_t *memory;
    struct cuda_operands o;
    void *workspace;
};

static uint64_t rounded(uint64_t bytes)
{
    return (bytes + CUDA_ALIGN_BYTES - 1) / CUDA_ALIGN_BYTES * CUDA_ALIGN_BYTES;
}

/* Operands of zeros: their values do not change the order of algorithms enough to matter. */
static bool trial_open(struct cuda_dev *h, const struct cuda_product *p, struct trial *t)
{
    const uint64_t in = ops_dtype_bytes(p->src), out = ops_dtype_bytes(p->dst),
                   a = rounded(p->lda * (p->ta ? p->m : p->k) * in),
                   b = rounded(p->ldb * (p->tb ? p->k : p->n) * in),
                   d = rounded(p->ldd * p->n * out), bias = rounded(p->m * out),
                   sum = a + b + d + bias + CUDA_WORKSPACE_BYTES;
    void *memory = NULL;
    /* The cap holds for this too: once the arena is there, what cuda_dev.c keeps back is all. */
    if (sum > (h->arena ? AFTER_ARENA_BYTES : h->base.caps.memory_bytes)) return false;
    if (cudaMalloc(&memory, sum) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    *t = (struct trial){ .memory = memory };
    t->o = (struct cuda_operands){ .a = t->memory, .b = t->memory + a, .d = t->memory + a + b };
    t->o.bias = t->memory + a + b + d;
    t->workspace = t->memory + a + b + d + bias;
    return cudaMemsetAsync(memory, 0, sum, h->matmul->queue) == cudaSuccess;
}

static void trial_close(struct trial *t)
{
    if (t->memory) (void)cudaFree(t->memory);
}

static cublasStatus_t launch(struct cuda_dev *h, struct product *e,
                             const cublasLtMatmulAlgo_t *algo, const struct cuda_operands *o,
                             void *workspace, uint64_t bytes, cudaStream_t queue)
{
    const struct cuda_lt *lt = &h->lt;
    if (e->key.bias) {
        cublasStatus_t st = lt->cublasLtMatmulDescSetAttribute(
            e->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &o->bias, sizeof o->bias);
        if (st != CUBLAS_STATUS_SUCCESS) return st;
    }
    return lt->cublasLtMatmul(h->matmul->handle, e->desc, &one, o->a, e->a, o->b, e->b,
                              o->c ? &one : &zero, o->c ? o->c : o->d, e->d, o->d, e->d, algo,
                              workspace, bytes, queue);
}

/* Milliseconds of one run after a first one; < 0: it failed. */
static float trial_run(struct cuda_dev *h, struct product *e, const struct trial *t,
                       const cublasLtMatmulHeuristicResult_t *r)
{
    struct cuda_matmul *mm = h->matmul;
    float best = -1;
    for (int run = 0; run < 4; run++) {
        float ms = 0;
        if (cudaEventRecord(mm->begin, mm->queue) != cudaSuccess ||
            launch(h, e, &r->algo, &t->o, t->workspace, r->workspaceSize, mm->queue) !=
                CUBLAS_STATUS_SUCCESS ||
            cudaEventRecord(mm->end, mm->queue) != cudaSuccess ||
            cudaEventSynchronize(mm->end) != cudaSuccess ||
            cudaEventElapsedTime(&ms, mm->begin, mm->end) != cudaSuccess) {
            (void)cudaGetLastError();
            return -1;
        }
        if (run > 0 && (best < 0 || ms < best)) best = ms;
    }
    return best;
}

static int trial_best(struct cuda_dev *h, struct product *e,
                      const cublasLtMatmulHeuristicResult_t *r, int n)
{
    struct trial t = { 0 };
    int best = 0;
    float first = -1, least = -1;
    if (trial_open(h, &e->key, &t))
        for (int i = 0; i < n; i++) {
            float ms = trial_run(h, e, &t, &r[i]);
            if (i == 0) first = least = ms;
            else if (first > 0 && ms > 0 && ms < least && ms < (float)CLEARLY * first) {
                least = ms;
                best = i;
            }
        }
    trial_close(&t);
    return best;
}

/* --- the table -------------------------------------------------------------------------------- */

static uint32_t mix(uint32_t hash, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 16777619u; /* FNV-1a */
    return hash;
}

/* What makes the sums' order, of the algorithm; the rest of its record may be the library's own. */
static uint32_t algo_hash(const struct cuda_lt *lt, const struct product *e)
{
    static const cublasLtMatmulAlgoConfigAttributes_t part[] = {
        CUBLASLT_ALGO_CONFIG_ID,         CUBLASLT_ALGO_CONFIG_TILE_ID,
        CUBLASLT_ALGO_CONFIG_SPLITK_NUM, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
        CUBLASLT_ALGO_CONFIG_STAGES_ID,  CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION
    };
    uint32_t hash = mix(2166136261u, &e->key, sizeof e->key);
    for (size_t i = 0; i < sizeof part / sizeof part[0]; i++) {
        uint32_t value = 0; /* each of these has four bytes */
        size_t written = 0;
        (void)lt->cublasLtMatmulAlgoConfigGetAttribute(&e->algo, part[i], &value, sizeof value,
                                                       &written);
        hash = mix(hash, &value, sizeof value);
    }
    return hash;
}

static stk_status product_make(struct cuda_dev *h, struct product *e, bool measure,
                               struct stk_error *err)
{
    const struct cuda_product *p = &e->key;
    cublasLtMatmulHeuristicResult_t r[CANDIDATES];
    int n = 0, best = 0;
    memset(r, 0, sizeof r);
    STK_TRY(make_desc(&h->lt, p, e, err));
    STK_TRY(make_layouts(&h->lt, p, e, err));
    STK_TRY(ask(h, e, r, &n, err));
    if (measure && n > 1 && 2.0 * (double)p->m * (double)p->n * (double)p->k >= MEASURE_FLOPS)
        best = trial_best(h, e, r, n);
    e->algo = r[best].algo;
    e->workspace_bytes = r[best].workspaceSize;
    e->hash = algo_hash(&h->lt, e);
    e->made = true;
    return STK_OK;
}

/* Under the lock. */
static stk_status product_find(struct cuda_dev *h, const struct cuda_product *p, bool dry,
                               bool measure, struct product **out, struct stk_error *err)
{
    struct cuda_matmul *mm = h->matmul;
    uint32_t at = mix(2166136261u, p, sizeof *p) % TABLE_N;
    for (uint32_t i = 0; i < TABLE_N; i++, at = (at + 1) % TABLE_N) {
        struct product *e = &mm->table[at];
        if (e->made && memcmp(&e->key, p, sizeof *p) != 0) continue;
        *out = e;
        if (e->made) return STK_OK;
        e->key = *p;
        stk_status st = product_make(h, e, measure, err);
        if (st != STK_OK) product_free(&h->lt, e);
        else if (dry) mm->made++;
        else mm->late++;
        return st;
    }
    return stk_error_set(err, STK_ERR_DEVICE, 0,
                         "device cuda: more than %d shapes of products are in use", TABLE_N);
}

uint32_t cuda_matmul_hash(struct cuda_dev *h)
{
    struct cuda_matmul *mm = h->matmul;
    uint32_t sum = 0;
    pthread_mutex_lock(&mm->lock);
    for (uint32_t i = 0; i < TABLE_N; i++)
        if (mm->table[i].made) sum += mm->table[i].hash;
    pthread_mutex_unlock(&mm->lock);
    return sum;
}

void cuda_matmul_counts(const struct dev *d, uint64_t *made, uint64_t *late)
{
    const struct cuda_matmul *mm = ((const struct cuda_dev *)d)->matmul;
    *made = mm->made;
    *late = mm->late;
}

/* --- running ---------------------------------------------------------------------------------- */

enum ops_dtype cuda_product_type(const struct cuda_dev *h, enum ops_dtype pt)
{
    if (pt == OPS_BF16 && h->bf16_products) return OPS_BF16;
    if (pt == OPS_FP16 && h->fp16_products) return OPS_FP16;
    return OPS_F32;
}

static void job_launch(struct cuda_job *j, struct product *e, const struct cuda_operands *o)
{
    const uint64_t left = j->scratch.size_bytes > j->used_bytes && j->scratch.base
                              ? j->scratch.size_bytes - j->used_bytes
                              : 0;
    const uint64_t skew = (uintptr_t)j->scratch.base % CUDA_ALIGN_BYTES;
    void *workspace = e->workspace_bytes ? (uint8_t *)j->scratch.base + j->used_bytes - skew : NULL;
    if (e->workspace_bytes > left) {
        j->st =
            stk_error_set(j->err, STK_ERR_DEVICE, 0,
                          "%s: a product needs %llu bytes of scratch more, %llu are left; declare "
                          "what prepare mode reports",
                          dev_cmd_name(j->cmd->kind), (unsigned long long)e->workspace_bytes,
                          (unsigned long long)left);
        return;
    }
    j->st = lt_check(launch(j->h, e, &e->algo, o, workspace, e->workspace_bytes, j->s->queue),
                     "cublasLtMatmul", &e->key, j->err);
}

static void job_run(struct cuda_job *j, const struct cuda_product *p, const struct cuda_operands *o)
{
    struct cuda_matmul *mm = j->h->matmul;
    struct product *e = NULL;
    cuda_clock_product_begin(j->s, (uint32_t)j->cmd->kind);
    pthread_mutex_lock(&mm->lock);
    j->st = product_find(j->h, p, false, false, &e, j->err);
    if (j->st == STK_OK) job_launch(j, e, o);
    pthread_mutex_unlock(&mm->lock);
    cuda_clock_product_end(j->s);
    cuda_count(j->h, CUDA_WORK_PRODUCT, 2.0 * (double)p->m * (double)p->n * (double)p->k,
               (double)((p->m + p->n) * p->k * ops_dtype_bytes((enum ops_dtype)p->src) +
                        p->m * p->n * ops_dtype_bytes((enum ops_dtype)p->dst)));
}

void cuda_job_product(struct cuda_job *j, const struct cuda_product *p,
                      const struct cuda_operands *o)
{
    struct cuda_matmul *mm = j->h->matmul;
    struct product *e = NULL;
    if (j->st != STK_OK) return;
    if (!j->dry) {
        job_run(j, p, o);
        return;
    }
    pthread_mutex_lock(&mm->lock);
    j->st = product_find(j->h, p, true, !j->untuned, &e, j->err);
    if (j->st == STK_OK && e->workspace_bytes > j->pad_bytes)
        j->pad_bytes = rounded(e->workspace_bytes);
    pthread_mutex_unlock(&mm->lock);
}

/* --- how fast the card multiplies --------------------------------------------------------------
 */

static stk_status rate_of(struct cuda_dev *h, uint64_t size, double *flops_per_s,
                          struct stk_error *err)
{
    const uint32_t type = h->bf16_products ? OPS_BF16 : h->fp16_products ? OPS_FP16 : OPS_F32;
    struct product e = { .key = { .m = size,
                                  .n = size,
                                  .k = size,
                                  .lda = size,
                                  .ldb = size,
                                  .ldd = size,
                                  .ta = 1,
                                  .src = type,
                                  .dst = type } };
    cublasLtMatmulHeuristicResult_t r[CANDIDATES];
    struct trial t = { 0 };
    float best = -1;
    int n = 0;
    memset(r, 0, sizeof r);
    *flops_per_s = 0;
    stk_status st = make_desc(&h->lt, &e.key, &e, err);
    if (st == STK_OK) st = make_layouts(&h->lt, &e.key, &e, err);
    if (st == STK_OK) st = ask(h, &e, r, &n, err);
    if (st == STK_OK && trial_open(h, &e.key, &t))
        for (int i = 0; i < RATE_RUNS; i++) {
            float ms = trial_run(h, &e, &t, &r[0]);
            if (ms > 0 && (best < 0 || ms < best)) best = ms;
        }
    trial_close(&t);
    product_free(&h->lt, &e);
    if (best > 0)
        *flops_per_s = 2.0 * (double)size * (double)size * (double)size / ((double)best * 1e-3);
    return st;
}

/* Smaller products where the memory for large ones is gone. */
stk_status cuda_matmul_rate(struct dev *d, struct stk_error *err)
{
    struct cuda_dev *h = cuda_of(d);
    for (uint64_t size = RATE_N_MAX; size >= RATE_N_MIN && d->caps.matmul_flops_per_s <= 0;
         size /= 2) {
        pthread_mutex_lock(&h->matmul->lock);
        stk_status st = rate_of(h, size, &d->caps.matmul_flops_per_s, err);
        pthread_mutex_unlock(&h->matmul->lock);
        STK_TRY(st);
    }
    return d->caps.matmul_flops_per_s > 0
               ? STK_OK
               : stk_error_set(err, STK_ERR_NOMEM, 0,
                               "device cuda: no memory is left on the card to measure products");
}

/* --- opening ---------------------------------------------------------------------------------- */

stk_status cuda_matmul_open(struct cuda_dev *h, struct cuda_matmul **out, struct stk_error *err)
{
    struct cuda_matmul *mm = *out = sys_calloc(1, sizeof *mm);
    if (!mm) return stk_error_set(err, STK_ERR_NOMEM, 0, "device cuda: no memory for its products");
    pthread_mutex_init(&mm->lock, NULL);
    cublasStatus_t st = h->lt.cublasLtCreate(&mm->handle);
    if (st != CUBLAS_STATUS_SUCCESS)
        return stk_error_set(err, STK_ERR_DEVICE, 0,
                             "device cuda: cublasLtCreate failed with status %d on %s", (int)st,
                             h->card);
    STK_TRY(cuda_check(cudaStreamCreateWithFlags(&mm->queue, cudaStreamNonBlocking),
                       "cudaStreamCreateWithFlags", "products", err));
    STK_TRY(cuda_check(cudaEventCreateWithFlags(&mm->begin, cudaEventDefault),
                       "cudaEventCreateWithFlags", "products", err));
    return cuda_check(cudaEventCreateWithFlags(&mm->end, cudaEventDefault),
                      "cudaEventCreateWithFlags", "products", err);
}

void cuda_matmul_close(struct cuda_dev *h)
{
    struct cuda_matmul *mm = h->matmul;
    for (uint32_t i = 0; i < TABLE_N; i++) product_free(&h->lt, &mm->table[i]);
    if (mm->begin) (void)cudaEventDestroy(mm->begin);
    if (mm->end) (void)cudaEventDestroy(mm->end);
    if (mm->queue) (void)cudaStreamDestroy(mm->queue);
    if (mm->handle) h->lt.cublasLtDestroy(mm->handle);
    pthread_mutex_destroy(&mm->lock);
    sys_free(mm);
    h->matmul = NULL;
}
