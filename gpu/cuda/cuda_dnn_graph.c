/* gpu/cuda/cuda_dnn_graph.c - attention as a graph of cuDNN's operations.
 *
 * Owns the descriptors of graphs. Must not know plans, streams nor memory. Application's thread, in
 * prepare mode.
 *
 * The graphs are the ones that cuDNN's fused attention engines recognise as a whole (cuDNN 9,
 * "Graph API", "Attention": a product, operations on the scores, softmax as reductions and
 * exponentials, a product; backward the five products), so operations and their order are not free.
 * Formulas: Dao 2022, FlashAttention, algorithms 1 and 4. Query t sees key j where
 * first_key[t] <= j <= t. As first_key never falls, that is j <= t < end[j]: two comparisons of
 * indices, each of which replaces the score by minus infinity. */
#include "gpu/cuda/cuda_dnn.h"

#define ALIGN_BYTES 16 /* of tensors' memory: eight bf16 elements */

/* --- calls ------------------------------------------------------------------------------------ */

bool dnn_good(struct dnn_graph *g, cudnnStatus_t st, const char *call, const char *what)
{
    if (st == CUDNN_STATUS_SUCCESS) return true;
    if (g->st != CUDNN_STATUS_SUCCESS) return false;
    g->st = st;
    g->call = call;
    g->what = what;
    g->text[0] = 0;
    g->t->cudnnGetLastErrorString(g->text, sizeof g->text);
    return false;
}

cudnnBackendDescriptor_t dnn_new(struct dnn_graph *g, cudnnBackendDescriptorType_t type,
                                 const char *what)
{
    cudnnBackendDescriptor_t d = NULL;
    if (g->st != CUDNN_STATUS_SUCCESS) return NULL;
    STK_ASSERT(g->n_made < DNN_DESCRIPTORS_MAX);
    g->what = what;
    if (!dnn_good(g, g->t->cudnnBackendCreateDescriptor(type, &d), "cudnnBackendCreateDescriptor",
                  what))
        return NULL;
    g->made[g->n_made++] = d;
    return d;
}

void dnn_set(struct dnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
             cudnnBackendAttributeType_t type, int64_t n, const void *values)
{
    if (g->st != CUDNN_STATUS_SUCCESS) return;
    dnn_good(g, g->t->cudnnBackendSetAttribute(d, name, type, n, values),
             "cudnnBackendSetAttribute", g->what);
}

void dnn_finalize(struct dnn_graph *g, cudnnBackendDescriptor_t d, const char *what)
{
    if (g->st != CUDNN_STATUS_SUCCESS) return;
    dnn_good(g, g->t->cudnnBackendFinalize(d), "cudnnBackendFinalize", what);
}

static void set_one(struct dnn_graph *g, cudnnBackendDescriptor_t d,
                    cudnnBackendAttributeName_t name, cudnnBackendDescriptor_t value)
{
    dnn_set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

/* --- tensors ---------------------------------------------------------------------------------- */

/* [sequence][head][row][column] */
struct dims {
    int64_t n[4], stride[4];
};
static struct dims packed(int64_t b, int64_t h, int64_t r, int64_t c)
{
    return (struct dims){ { b, h, r, c }, { h * r * c, r * c, c, 1 } };
}
static struct dims turned(struct dims d) /* rows and columns change places */
{
    return (struct dims){ { d.n[0], d.n[1], d.n[3], d.n[2] },
                          { d.stride[0], d.stride[1], d.stride[3], d.stride[2] } };
}
/* Of tokens in rows of `stride` elements. */
static struct dims of_tokens(const struct dnn_shape *s, int64_t heads, int64_t stride)
{
    return (struct dims){ { s->n_seq, heads, s->seq, s->head_dim },
                          { s->seq * stride, s->head_dim, stride, 1 } };
}

struct tensor {
    cudnnBackendDescriptor_t d;
    struct dims dims;
};

static struct tensor tensor_of(struct dnn_graph *g, int64_t uid, cudnnDataType_t type,
                               struct dims dims, bool is_virtual, bool by_value)
{
    const int64_t align = ALIGN_BYTES;
    struct tensor t = { dnn_new(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR, "a tensor"), dims };
    dnn_set(g, t.d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    dnn_set(g, t.d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims.n);
    dnn_set(g, t.d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, dims.stride);
    dnn_set(g, t.d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    dnn_set(g, t.d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
    dnn_set(g, t.d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    dnn_set(g, t.d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    dnn_finalize(g, t.d, "a tensor");
    return t;
}
static struct tensor real(struct dnn_graph *g, enum dnn_uid uid, cudnnDataType_t type,
                          struct dims dims)
{
    return tensor_of(g, uid, type, dims, false, false);
}
static struct tensor scalar(struct dnn_graph *g, enum dnn_uid uid)
{
    return tensor_of(g, uid, CUDNN_DATA_FLOAT, packed(1, 1, 1, 1), false, true);
}
static struct tensor between(struct dnn_graph *g, cudnnDataType_t type, struct dims dims)
{
    return tensor_of(g, g->next_uid++, type, dims, true, false);
}

/* --- operations ------------------------------------------------------------------------------- */

static void op_done(struct dnn_graph *g, cudnnBackendDescriptor_t op, const char *what)
{
    dnn_finalize(g, op, what);
    STK_ASSERT(g->n_ops < DNN_OPS_MAX);
    if (g->st == CUDNN_STATUS_SUCCESS) g->op[g->n_ops++] = op;
}

/* b, t: NULL where the mode has fewer operands. */
static void pointwise_to(struct dnn_graph *g, const char *what, cudnnPointwiseMode_t mode,
                         cudnnDataType_t math, const struct tensor *x, const struct tensor *b,
                         const struct tensor *t, const struct tensor *y, int64_t axis)
{
    cudnnBackendDescriptor_t pw = dnn_new(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, what);
    dnn_set(g, pw, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    dnn_set(g, pw, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &math);
    if (mode == CUDNN_POINTWISE_GEN_INDEX)
        dnn_set(g, pw, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    dnn_finalize(g, pw, what);
    cudnnBackendDescriptor_t op = dnn_new(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, what);
    set_one(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, pw);
    set_one(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x->d);
    if (b) set_one(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b->d);
    if (t) set_one(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t->d);
    set_one(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y->d);
    op_done(g, op, what);
}

/* f32, of x's shape. */
static struct tensor pointwise(struct dnn_graph *g, const char *what, cudnnPointwiseMode_t mode,
                               const struct tensor *x, const struct tensor *b)
{
    struct tensor y = between(g, CUDNN_DATA_FLOAT, x->dims);
    pointwise_to(g, what, mode, CUDNN_DATA_FLOAT, x, b, NULL, &y, -1);
    return y;
}

static void product_to(struct dnn_graph *g, const char *what, const struct tensor *a,
                       const struct tensor *b, const struct tensor *c)
{
    const cudnnDataType_t math = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t mm = dnn_new(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR, what);
    dnn_set(g, mm, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &math);
    dnn_finalize(g, mm, what);
    cudnnBackendDescriptor_t op = dnn_new(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, what);
    set_one(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, mm);
    set_one(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a->d);
    set_one(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b->d);
    set_one(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c->d);
    op_done(g, op, what);
}

static void reduce_to(struct dnn_graph *g, const char *what, cudnnReduceTensorOp_t mode,
                      const struct tensor *x, const struct tensor *y)
{
    const cudnnDataType_t math = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t rd = dnn_new(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, what);
    dnn_set(g, rd, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode);
    dnn_set(g, rd, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &math);
    dnn_finalize(g, rd, what);
    cudnnBackendDescriptor_t op = dnn_new(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, what);
    set_one(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, rd);
    set_one(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x->d);
    set_one(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y->d);
    op_done(g, op, what);
}

/* Of bf16, since the next product wants that. */
static struct tensor reshape(struct dnn_graph *g, const char *what, const struct tensor *x,
                             struct dims dims)
{
    struct tensor y = between(g, CUDNN_DATA_BFLOAT16, dims);
    cudnnBackendDescriptor_t op = dnn_new(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, what);
    set_one(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x->d);
    set_one(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y.d);
    op_done(g, op, what);
    return y;
}

/* --- pieces of attention ---------------------------------------------------------------------- */

static struct dims scores_dims(const struct dnn_shape *s)
{
    return packed(s->n_seq, s->heads, s->seq, s->seq);
}
static struct dims stats_dims(const struct dnn_shape *s)
{
    return packed(s->n_seq, s->heads, s->seq, 1);
}

static struct tensor index_of(struct dnn_graph *g, const char *what, const struct tensor *x,
                              int64_t axis)
{
    struct tensor y = between(g, CUDNN_DATA_INT32, x->dims);
    pointwise_to(g, what, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, x, NULL, NULL, &y, axis);
    return y;
}

/* x where `a` compares with `b`, minus infinity elsewhere. */
static struct tensor where(struct dnn_graph *g, const char *what, const struct tensor *x,
                           cudnnPointwiseMode_t compare, const struct tensor *a,
                           const struct tensor *b, const struct tensor *masked)
{
    struct tensor seen = between(g, CUDNN_DATA_BOOLEAN, x->dims),
                  y = between(g, CUDNN_DATA_FLOAT, x->dims);
    pointwise_to(g, what, compare, CUDNN_DATA_BOOLEAN, a, b, NULL, &seen, -1);
    pointwise_to(g, what, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, x, masked, &seen, &y,
                 -1);
    return y;
}

/* The first comparison as cuDNN's own causal masks have it: engines know then which blocks are
 * empty. The second by key and not by first_key of the query, because backward's engines below 9.0
 * take two vectors by query at most, and log-sum-exp and the sum of d_o o are two. */
static struct tensor mask(struct dnn_graph *g, const struct dnn_shape *s, struct tensor x)
{
    struct tensor masked = scalar(g, DNN_MASKED), row = index_of(g, "index of the query", &x, 2),
                  column = index_of(g, "index of the key", &x, 3),
                  end = real(g, DNN_END, CUDNN_DATA_INT32, packed(s->n_seq, 1, 1, s->seq));
    x = where(g, "keys up to the query", &x, CUDNN_POINTWISE_CMP_GE, &row, &column, &masked);
    row = index_of(g, "index of the query", &x, 2);
    return where(g, "queries that see the key", &x, CUDNN_POINTWISE_CMP_LT, &row, &end, &masked);
}

static void forward(struct dnn_graph *g, const struct dnn_shape *s)
{
    const struct dims row = stats_dims(s);
    struct tensor q = real(g, DNN_Q, CUDNN_DATA_BFLOAT16, of_tokens(s, s->heads, s->q_stride)),
                  k = real(g, DNN_K, CUDNN_DATA_BFLOAT16,
                           turned(of_tokens(s, s->kv_heads, s->k_stride))),
                  v = real(g, DNN_V, CUDNN_DATA_BFLOAT16, of_tokens(s, s->kv_heads, s->v_stride)),
                  o = real(g, DNN_O, CUDNN_DATA_BFLOAT16, of_tokens(s, s->heads, s->o_stride)),
                  stats = real(g, DNN_STATS, CUDNN_DATA_FLOAT, row), scale = scalar(g, DNN_SCALE),
                  scores = between(g, CUDNN_DATA_FLOAT, scores_dims(s)),
                  most = between(g, CUDNN_DATA_FLOAT, row), sum = between(g, CUDNN_DATA_FLOAT, row),
                  p = between(g, CUDNN_DATA_BFLOAT16, scores_dims(s));
    product_to(g, "q k^T", &q, &k, &scores);
    struct tensor x = pointwise(g, "scale", CUDNN_POINTWISE_MUL, &scores, &scale);
    x = mask(g, s, x);
    reduce_to(g, "largest score", CUDNN_REDUCE_TENSOR_MAX, &x, &most);
    x = pointwise(g, "score - largest", CUDNN_POINTWISE_SUB, &x, &most);
    x = pointwise(g, "exponential", CUDNN_POINTWISE_EXP, &x, NULL);
    reduce_to(g, "sum of exponentials", CUDNN_REDUCE_TENSOR_ADD, &x, &sum);
    struct tensor log = pointwise(g, "logarithm", CUDNN_POINTWISE_LOG, &sum, NULL);
    pointwise_to(g, "log-sum-exp", CUDNN_POINTWISE_ADD, CUDNN_DATA_FLOAT, &most, &log, NULL, &stats,
                 -1);
    pointwise_to(g, "softmax", CUDNN_POINTWISE_DIV, CUDNN_DATA_FLOAT, &x, &sum, NULL, &p, -1);
    product_to(g, "p v", &p, &v, &o);
}

/* Gradient of k or v: of all heads of q, then added up over those that share one. */
static void shared_gradient(struct dnn_graph *g, const char *what, const struct dnn_shape *s,
                            const struct tensor *a, const struct tensor *b, const struct tensor *y)
{
    if (s->heads == s->kv_heads) {
        product_to(g, what, a, b, y);
        return;
    }
    struct tensor all =
        between(g, CUDNN_DATA_BFLOAT16, packed(s->n_seq, s->heads, s->seq, s->head_dim));
    product_to(g, what, a, b, &all);
    reduce_to(g, what, CUDNN_REDUCE_TENSOR_ADD, &all, y);
}

/* dq is written by its product, not added up in an fp32 buffer by blocks in any order: that is what
 * makes the engine deterministic, and its workspace grow with the square of the length. */
static void backward(struct dnn_graph *g, const struct dnn_shape *s)
{
    const struct dims of_q = of_tokens(s, s->heads, s->q_stride),
                      of_k = of_tokens(s, s->kv_heads, s->k_stride),
                      of_v = of_tokens(s, s->kv_heads, s->v_stride),
                      of_o = of_tokens(s, s->heads, s->o_stride), row = stats_dims(s);
    struct tensor q = real(g, DNN_Q, CUDNN_DATA_BFLOAT16, of_q),
                  k = real(g, DNN_K, CUDNN_DATA_BFLOAT16, turned(of_k)),
                  v = real(g, DNN_V, CUDNN_DATA_BFLOAT16, turned(of_v)),
                  o = real(g, DNN_O, CUDNN_DATA_BFLOAT16, of_o),
                  d_o = real(g, DNN_DO, CUDNN_DATA_BFLOAT16, of_o),
                  stats = real(g, DNN_STATS, CUDNN_DATA_FLOAT, row),
                  dq = real(g, DNN_DQ, CUDNN_DATA_BFLOAT16, of_q),
                  dk = real(g, DNN_DK, CUDNN_DATA_BFLOAT16, of_k),
                  dv = real(g, DNN_DV, CUDNN_DATA_BFLOAT16, of_v),
                  sum = real(g, DNN_SUM, CUDNN_DATA_FLOAT, row), scale = scalar(g, DNN_SCALE),
                  one = scalar(g, DNN_ONE), scores = between(g, CUDNN_DATA_FLOAT, scores_dims(s)),
                  dp = between(g, CUDNN_DATA_FLOAT, scores_dims(s)),
                  reduced = between(g, CUDNN_DATA_FLOAT, row);
    struct tensor prod = between(g, CUDNN_DATA_FLOAT, of_o);
    pointwise_to(g, "d_o o", CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, &d_o, &o, NULL, &prod, -1);
    reduce_to(g, "sum of d_o o", CUDNN_REDUCE_TENSOR_ADD, &prod, &reduced);
    pointwise_to(g, "sum of d_o o", CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, &reduced, &one, NULL,
                 &sum, -1);
    product_to(g, "q k^T", &q, &k, &scores);
    struct tensor x = pointwise(g, "scale", CUDNN_POINTWISE_MUL, &scores, &scale);
    x = pointwise(g, "score - log-sum-exp", CUDNN_POINTWISE_SUB, &x, &stats);
    x = mask(g, s, x);
    struct tensor p = pointwise(g, "p", CUDNN_POINTWISE_EXP, &x, NULL);
    struct tensor pt = reshape(g, "p^T", &p, turned(scores_dims(s)));
    shared_gradient(g, "p^T d_o", s, &pt, &d_o, &dv);
    product_to(g, "d_o v^T", &d_o, &v, &dp);
    struct tensor ds = pointwise(g, "dp - sum", CUDNN_POINTWISE_SUB, &dp, &sum);
    ds = pointwise(g, "ds", CUDNN_POINTWISE_MUL, &ds, &p);
    ds = pointwise(g, "scale of ds", CUDNN_POINTWISE_MUL, &ds, &scale);
    struct tensor dst = reshape(g, "ds^T", &ds, turned(scores_dims(s)));
    shared_gradient(g, "ds^T q", s, &dst, &q, &dk);
    struct tensor kk = reshape(g, "k", &k, of_k);
    product_to(g, "ds k", &ds, &kk, &dq);
}

void dnn_graph_make(struct dnn_graph *g, const struct dnn_table *t, cudnnHandle_t handle,
                    const struct dnn_shape *s)
{
    *g = (struct dnn_graph){ .t = t, .st = CUDNN_STATUS_SUCCESS, .next_uid = DNN_UIDS };
    if (s->backward) backward(g, s);
    else forward(g, s);
    g->graph = dnn_new(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "the graph");
    if (handle)
        dnn_set(g, g->graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    dnn_set(g, g->graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->n_ops,
            g->op);
    dnn_finalize(g, g->graph, "the graph");
}

void dnn_graph_free(struct dnn_graph *g)
{
    while (g->n_made) g->t->cudnnBackendDestroyDescriptor(g->made[--g->n_made]);
    *g = (struct dnn_graph){ .t = g->t };
}
