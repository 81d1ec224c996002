/* tests/gpu/standin/lt.cpp - cuBLASLt: descriptors, the heuristic's three algorithms, products.
 *
 * An algorithm is how many parts the sum over k is cut into (1, 2 or 4); parts are summed in fp32 in the workspace, then
 * added up. So another algorithm gives other bits, as on a card. Which one is named first depends on the shape. Types
 * and refusals: cuBLAS documentation 13.0, cublasLtMatmul. Under card_lock. */
#include "../simt/simt.h"
#include "card.h"
#include <cmath>
#include <cstring>

struct standin_lt_desc {
    cublasComputeType_t compute;
    cudaDataType_t scale, bias_type;
    int32_t ta, tb;
    int epilogue;
    const void *bias;
    bool bias_type_set;
};
struct standin_lt_layout { cudaDataType_t type; uint64_t rows, cols; int64_t ld; };
struct standin_lt_preference { uint64_t workspace_bytes; uint32_t align[4], reduction; };
struct cublasLtContext { int unused; };

namespace {

uint64_t live;
constexpr uint64_t ALGO_MARK = 0x5741544e44494e21; /* data[0] of an algorithm of ours */

struct lt_call : card_call {
    explicit lt_call(const char *name) : card_call(name) {}
    bool bad() const { return failed != cudaSuccess; }
    /* The plan's error is a cublasStatus_t already. */
    cublasStatus_t status() const
    {
        return planned ? static_cast<cublasStatus_t>(failed) : CUBLAS_STATUS_EXECUTION_FAILED;
    }
};

size_t width(cudaDataType_t t) { return t == CUDA_R_32F ? 4 : t == CUDA_R_16F || t == CUDA_R_16BF ? 2 : 0; }

float from_16(cudaDataType_t t, uint16_t h)
{
    uint32_t bits;
    float f;
    if (t == CUDA_R_16BF) {
        bits = (uint32_t)h << 16;
    } else {
        uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
        if (e == 0) {
            f = std::ldexp((float)m, -24);
            return sign ? -f : f;
        }
        bits = sign | (e == 31 ? 0x7f800000u | m << 13 : (e + 112) << 23 | m << 13);
    }
    memcpy(&f, &bits, 4);
    return f;
}

float value_at(cudaDataType_t t, const char *p, uint64_t i)
{
    float f;
    uint16_t h;
    if (t == CUDA_R_32F) {
        memcpy(&f, p + 4 * i, 4);
        return f;
    }
    memcpy(&h, p + 2 * i, 2);
    return from_16(t, h);
}

uint16_t to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (std::isnan(f)) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t to_fp16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    double a = std::fabs((double)f);
    if (std::isnan(f)) return sign | 0x7e00;
    if (a >= 65520) return sign | 0x7c00;
    int e = 0;
    if (a > 0) std::frexp(a, &e);
    if (e < -13) e = -13;
    double units = std::nearbyint(std::ldexp(a, 11 - e)); /* of 2^(e - 11); ties to even */
    uint32_t h = (uint32_t)units + (uint32_t)((e + 13) << 10); /* a carry goes into the exponent */
    return sign | (uint16_t)h;
}

void put(cudaDataType_t t, char *p, uint64_t i, float f)
{
    uint16_t h = t == CUDA_R_16BF ? to_bf16(f) : to_fp16(f);
    if (t == CUDA_R_32F) memcpy(p + 4 * i, &f, 4);
    else memcpy(p + 2 * i, &h, 2);
}

struct product {
    standin_lt_desc d;
    standin_lt_layout la, lb, lc, ld;
    const char *a, *b, *c;
    char *out, *workspace;
    float alpha, beta;
    uint64_t m, n, k, parts, workspace_bytes;
};

/* Columns of a matrix, as operands. */
bool use_matrix(card_op &op, const char *what, const char *p, const standin_lt_layout &l, bool write)
{
    uint64_t column = l.rows * width(l.type), stride = (uint64_t)l.ld * width(l.type);
    if (column == stride) return memory_use(op, what, p, column * l.cols, write);
    for (uint64_t c = 0; c < l.cols; c++)
        if (!memory_use(op, what, p + c * stride, column, write)) return false;
    return true;
}

/* f32 [k][m] of A, [n][k] of B. */
std::vector<float> gather(const standin_lt_layout &l, const char *p, uint64_t outer, uint64_t inner, bool inner_is_row)
{
    std::vector<float> v(outer * inner);
    for (uint64_t o = 0; o < outer; o++)
        for (uint64_t i = 0; i < inner; i++)
            v[o * inner + i] = value_at(l.type, p, inner_is_row ? i + o * (uint64_t)l.ld : o + i * (uint64_t)l.ld);
    return v;
}

void product_column(const product &p, const std::vector<float> &a, const float *b, uint64_t j, std::vector<float> &part,
                    std::vector<float> &sum)
{
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (uint64_t q = 0; q < p.parts; q++) {
        std::fill(part.begin(), part.end(), 0.0f);
        for (uint64_t k = p.k * q / p.parts; k < p.k * (q + 1) / p.parts; k++) {
            const float *row = &a[k * p.m], x = b[k];
            for (uint64_t i = 0; i < p.m; i++) part[i] += row[i] * x;
        }
        for (uint64_t i = 0; i < p.m; i++) sum[i] += part[i];
    }
    cudaDataType_t bias_type = p.d.bias_type_set ? p.d.bias_type : p.ld.type;
    for (uint64_t i = 0; i < p.m; i++) {
        float y = p.alpha * sum[i];
        if (p.beta != 0) y += p.beta * value_at(p.lc.type, p.c, i + j * (uint64_t)p.lc.ld);
        if (p.d.epilogue & CUBLASLT_EPILOGUE_BIAS) y += value_at(bias_type, static_cast<const char *>(p.d.bias), i);
        put(p.ld.type, p.out, i + j * (uint64_t)p.ld.ld, y);
    }
}

void product_effect(card_op &op, const product &p)
{
    cudaDataType_t bias_type = p.d.bias_type_set ? p.d.bias_type : p.ld.type;
    if (!use_matrix(op, "operand a", p.a, p.la, false) || !use_matrix(op, "operand b", p.b, p.lb, false)) return;
    if (p.beta != 0 && !use_matrix(op, "operand c", p.c, p.lc, false)) return;
    if (p.d.epilogue & CUBLASLT_EPILOGUE_BIAS && !memory_use(op, "bias", p.d.bias, p.m * width(bias_type), false)) return;
    if (p.workspace_bytes) {
        if (!memory_use(op, "workspace", p.workspace, p.workspace_bytes, true)) return;
        memset(p.workspace, 0xff, p.workspace_bytes);
    }
    std::vector<float> a = gather(p.la, p.a, p.k, p.m, !p.d.ta), b = gather(p.lb, p.b, p.n, p.k, !p.d.tb), part(p.m), sum(p.m);
    if (!use_matrix(op, "result", p.out, p.ld, true)) return;
    for (uint64_t j = 0; j < p.n; j++) product_column(p, a, &b[j * p.k], j, part, sum);
}

bool aligned(const void *p, uint64_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

/* m, n, k of a product, or why it is none. */
cublasStatus_t shape_of(const standin_lt_desc *d, const standin_lt_layout *a, const standin_lt_layout *b,
                        const standin_lt_layout *c, const standin_lt_layout *o, uint64_t *m, uint64_t *n, uint64_t *k)
{
    *m = d->ta ? a->cols : a->rows;
    *k = d->ta ? a->rows : a->cols;
    *n = d->tb ? b->rows : b->cols;
    if ((d->tb ? b->cols : b->rows) != *k || o->rows != *m || o->cols != *n || c->rows != *m || c->cols != *n)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (const standin_lt_layout *l : { a, b, c, o })
        if (l->ld < (int64_t)l->rows || l->rows == 0 || l->cols == 0) return CUBLAS_STATUS_INVALID_VALUE;
    bool types = a->type == b->type && c->type == o->type && width(a->type) && width(o->type) &&
                 (o->type == CUDA_R_32F || o->type == a->type) && d->scale == CUDA_R_32F &&
                 (d->compute == CUBLAS_COMPUTE_32F || d->compute == CUBLAS_COMPUTE_32F_PEDANTIC);
    if (d->epilogue & CUBLASLT_EPILOGUE_BIAS && d->bias_type_set && d->bias_type != o->type) types = false;
    if (a->type == CUDA_R_16BF && card.cfg.cc_major < 8) types = false;
    return types ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

template <typename T> cublasStatus_t set(T &out, const void *value, size_t n)
{
    if (n != sizeof out) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&out, value, n);
    return CUBLAS_STATUS_SUCCESS;
}

template <typename T> cublasStatus_t destroy(const char *name, T *p)
{
    lt_call call(name);
    if (!p) return CUBLAS_STATUS_INVALID_VALUE;
    delete p;
    live--;
    return call.bad() ? call.status() : CUBLAS_STATUS_SUCCESS;
}

template <typename T> cublasStatus_t create(T **out, const T &value)
{
    *out = new T(value);
    live++;
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace

uint64_t lt_live(void) { return live; }

extern "C" {

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t *lt)
{
    lt_call call("cublasLtCreate");
    return call.bad() ? call.status() : create(lt, cublasLtContext());
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t lt) { return destroy("cublasLtDestroy", lt); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute, cudaDataType_t scale)
{
    lt_call call("cublasLtMatmulDescCreate");
    if (call.bad()) return call.status();
    return create(d, standin_lt_desc{ compute, scale, CUDA_R_32F, 0, 0, CUBLASLT_EPILOGUE_DEFAULT, nullptr, false });
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return destroy("cublasLtMatmulDescDestroy", d); }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attr,
                                              const void *value, size_t n)
{
    lt_call call("cublasLtMatmulDescSetAttribute");
    if (call.bad()) return call.status();
    switch (attr) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: return set(d->compute, value, n);
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE: return set(d->scale, value, n);
    case CUBLASLT_MATMUL_DESC_TRANSA: return set(d->ta, value, n);
    case CUBLASLT_MATMUL_DESC_TRANSB: return set(d->tb, value, n);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return set(d->epilogue, value, n);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(d->bias, value, n);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: d->bias_type_set = true; return set(d->bias_type, value, n);
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType_t type, uint64_t rows, uint64_t cols,
                                          int64_t ld)
{
    lt_call call("cublasLtMatrixLayoutCreate");
    return call.bad() ? call.status() : create(l, standin_lt_layout{ type, rows, cols, ld });
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return destroy("cublasLtMatrixLayoutDestroy", l); }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    lt_call call("cublasLtMatmulPreferenceCreate");
    return call.bad() ? call.status() : create(p, standin_lt_preference{ 0, { 256, 256, 256, 256 }, 7 });
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p)
{
    return destroy("cublasLtMatmulPreferenceDestroy", p);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *value, size_t n)
{
    lt_call call("cublasLtMatmulPreferenceSetAttribute");
    if (call.bad()) return call.status();
    switch (attr) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return set(p->workspace_bytes, value, n);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return set(p->reduction, value, n);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return set(p->align[attr - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, n);
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t o,
                                              cublasLtMatmulPreference_t p, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int *n_found)
{
    lt_call call("cublasLtMatmulAlgoGetHeuristic");
    *n_found = 0;
    if (call.bad()) return call.status();
    uint64_t m, n, k;
    cublasStatus_t st = shape_of(d, a, b, c, o, &m, &n, &k);
    if (st != CUBLAS_STATUS_SUCCESS) return st;
    /* Long sums of small results are cut into parts first, as they are on a card. */
    static const uint64_t orders[2][3] = { { 1, 2, 4 }, { 2, 4, 1 } };
    for (uint64_t parts : orders[k >= 4 * m && k >= 4 * n]) {
        uint64_t workspace = parts > 1 ? m * n * 4 * parts : 0;
        if (*n_found == wanted || parts > k || workspace > p->workspace_bytes || (parts > 1 && !(p->reduction & 2))) continue;
        cublasLtMatmulHeuristicResult_t &r = results[(*n_found)++];
        memset(&r, 0, sizeof r);
        uint64_t data[8] = { ALGO_MARK, parts, workspace, p->align[0], p->align[1], p->align[2], p->align[3],
                             m << 42 ^ n << 21 ^ k };
        memcpy(r.algo.data, data, sizeof data);
        r.workspaceSize = workspace;
        r.state = CUBLAS_STATUS_SUCCESS;
        r.wavesCount = 1;
    }
    return *n_found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t attr,
                                                    void *value, size_t n, size_t *written)
{
    lt_call call("cublasLtMatmulAlgoConfigGetAttribute");
    if (call.bad()) return call.status();
    if (n < 4 || algo->data[0] != ALGO_MARK) return CUBLAS_STATUS_INVALID_VALUE;
    uint32_t v = attr == CUBLASLT_ALGO_CONFIG_ID || attr == CUBLASLT_ALGO_CONFIG_SPLITK_NUM ? (uint32_t)algo->data[1] : 0;
    memcpy(value, &v, 4);
    if (written) *written = 4;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,
                              const void *c, cublasLtMatrixLayout_t lc, void *out, cublasLtMatrixLayout_t lo,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    lt_call call("cublasLtMatmul");
    if (call.bad()) return call.status();
    product p = { *d, *la, *lb, *lc, *lo, static_cast<const char *>(a), static_cast<const char *>(b),
                  static_cast<const char *>(c), static_cast<char *>(out), static_cast<char *>(workspace), 0, 0, 0, 0, 0, 0, 0 };
    cublasStatus_t st = shape_of(d, la, lb, lc, lo, &p.m, &p.n, &p.k);
    if (st != CUBLAS_STATUS_SUCCESS) return st;
    if (!algo || algo->data[0] != ALGO_MARK || algo->data[7] != (p.m << 42 ^ p.n << 21 ^ p.k) || !alpha || !beta)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&p.alpha, alpha, 4);
    memcpy(&p.beta, beta, 4);
    p.parts = algo->data[1];
    p.workspace_bytes = algo->data[2];
    if (workspace_bytes < p.workspace_bytes || (p.workspace_bytes && !workspace)) return CUBLAS_STATUS_INVALID_VALUE;
    bool good = aligned(a, algo->data[3]) && aligned(b, algo->data[4]) && (p.beta == 0 || aligned(c, algo->data[5])) &&
                aligned(out, algo->data[6]) && (!p.workspace_bytes || aligned(workspace, 16));
    if (!good) {
        trace_found(STANDIN_ALIGNMENT, "a product's operands (%p, %p, %p, %p) are aligned less than was promised", a, b, c, out);
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    CUstream_st *s = card_stream_of(stream);
    if (!s) return CUBLAS_STATUS_INVALID_VALUE;
    card_op *op = card_add(s, STANDIN_PRODUCT, STANDIN_COMPUTE, 0);
    char name[96];
    snprintf(name, sizeof name, "%llu x %llu x %llu", (unsigned long long)p.m, (unsigned long long)p.n, (unsigned long long)p.k);
    op->name = name;
    double flops = 2.0 * (double)p.m * (double)p.n * (double)p.k;
    op->duration_ns = card.cfg.launch_ns + (uint64_t)(flops / card.cfg.flops_per_s * 1e9);
    op->effect = [p](card_op &o) { product_effect(o, p); };
    card_submitted();
    return CUBLAS_STATUS_SUCCESS;
}
}
