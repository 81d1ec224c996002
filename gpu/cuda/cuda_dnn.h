/* gpu/cuda/cuda_dnn.h - private to gpu/cuda/cuda_dnn*.c: cuDNN's functions, graphs of attention and
 * the plans made of them.
 *
 * Only cuDNN's C backend is used: descriptors that are created, given attributes, finalized. Its
 * documentation (cuDNN 9, "Graph API", "Backend descriptor types") has the rules; which graphs the
 * fused attention engines take is in "Operations, Attention". */
#ifndef GPU_CUDA_DNN_H
#define GPU_CUDA_DNN_H

#include "gpu/cuda/cuda_impl.h"
#include <cudnn.h>
#include <string.h>

/* 9.16: before it, backward graphs whose length is no multiple of 128 give wrong sums without a
 * mask of their own (release notes of 9.15.1). */
#define DNN_VERSION_LEAST 91600

/* --- its functions (cuda_dnn_table.c) --------------------------------------------------------- */

#define DNN_MAP(X)                                                              \
    X(cudnnGetVersion) X(cudnnGetErrorString) X(cudnnGetLastErrorString)        \
    X(cudnnCreate) X(cudnnDestroy) X(cudnnSetStream)                            \
    X(cudnnBackendCreateDescriptor) X(cudnnBackendDestroyDescriptor)            \
    X(cudnnBackendSetAttribute) X(cudnnBackendGetAttribute)                     \
    X(cudnnBackendFinalize) X(cudnnBackendExecute)
struct dnn_table {
#define DNN_MEMBER(name) __typeof__(&name) name;
    DNN_MAP(DNN_MEMBER)
#undef DNN_MEMBER
    void *library; /* private to cuda_dnn_table.c */
};
/* Opens the library. STK_ERR_UNSUPPORTED: it is not there or too old, in a few words. Application's
 * thread. */
stk_status dnn_table_open(struct dnn_table *out, struct stk_error *err);
void dnn_table_close(struct dnn_table *t);

/* --- graphs (cuda_dnn_graph.c) ---------------------------------------------------------------- */

/* What a plan is for. All 64 bits wide, as it is compared and hashed by its bytes. Strides in
 * elements from token to token; tensors are bf16. */
struct dnn_shape {
    int64_t n_seq, seq, heads, kv_heads, head_dim;
    int64_t q_stride, k_stride, v_stride, o_stride;
    int64_t backward; /* 0 or 1 */
};
static inline bool dnn_same_shape(const struct dnn_shape *a, const struct dnn_shape *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* Tensors that have memory, by their numbers in graph and variant pack. */
enum dnn_uid {
    DNN_Q = 1, DNN_K, DNN_V, DNN_O, /* [n_seq][seq][heads][head_dim] by strides */
    DNN_STATS,     /* f32 [n_seq][heads][seq]: log-sum-exp */
    DNN_END,       /* int32 [n_seq][seq]: the first query that does not see this key any more */
    DNN_DO, DNN_DQ, DNN_DK, DNN_DV,
    DNN_SUM,       /* f32 [n_seq][heads][seq], scratch of the graph: sum of d_o * o */
    DNN_SCALE, DNN_MASKED, DNN_ONE, /* one float each, in host memory */
    DNN_UIDS
};

#define DNN_DESCRIPTORS_MAX 144
#define DNN_OPS_MAX 40
struct dnn_graph {
    const struct dnn_table *t;
    cudnnBackendDescriptor_t made[DNN_DESCRIPTORS_MAX]; /* all, in the order of making */
    uint32_t n_made;
    cudnnBackendDescriptor_t op[DNN_OPS_MAX], graph;
    uint32_t n_ops;
    int64_t next_uid;       /* of virtual tensors */
    cudnnStatus_t st;       /* first failure; later calls do nothing */
    const char *call, *what; /* that failed, and of what */
    char text[160];         /* cuDNN's own words */
};

/* Descriptors of the whole graph; g->st says how it went. handle: NULL where plans are made for a
 * described card instead (a graph needs none then). */
void dnn_graph_make(struct dnn_graph *g, const struct dnn_table *t, cudnnHandle_t handle,
                    const struct dnn_shape *s);
void dnn_graph_free(struct dnn_graph *g);

/* The calls that graphs and plans are made of; nothing after a failure. */
cudnnBackendDescriptor_t dnn_new(struct dnn_graph *g, cudnnBackendDescriptorType_t type,
                                 const char *what);
void dnn_set(struct dnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
             cudnnBackendAttributeType_t type, int64_t n, const void *values);
void dnn_finalize(struct dnn_graph *g, cudnnBackendDescriptor_t d, const char *what);
/* Keeps a failure. */
bool dnn_good(struct dnn_graph *g, cudnnStatus_t st, const char *call, const char *what);

/* --- plans (cuda_dnn_plan.c) ------------------------------------------------------------------ */

/* The card that a plan is for: an open one, or (tests: no card is needed) a description. */
struct dnn_card {
    cudnnHandle_t handle;
    cudnnBackendDescriptor_t described; /* NULL: by handle */
};
struct dnn_plan {
    struct dnn_graph g;             /* owns all descriptors, the plan's included */
    cudnnBackendDescriptor_t plan;  /* NULL: cuDNN has none for this shape here */
    uint64_t workspace_bytes;
    int64_t engine;
    uint32_t hash;                  /* of shape, engine and its knobs */
};
/* Takes the first configuration of cuDNN's heuristics (mode A: best first) that is deterministic
 * and can be had. p->plan NULL: there is none, or, with p->g.st, p->g.call failed. dnn_plan_free in
 * any case. Takes up to some seconds: kernels are compiled. */
void dnn_plan_make(struct dnn_plan *p, const struct dnn_table *t, const struct dnn_card *card,
                   const struct dnn_shape *s);
void dnn_plan_free(struct dnn_plan *p);
/* Memory of each tensor by its number; those that a plan has no tensor for are left out. */
cudnnStatus_t dnn_plan_run(const struct dnn_plan *p, cudnnHandle_t handle,
                           void *const memory[DNN_UIDS], void *workspace, const char **call);

/* --- one attention (cuda_dnn_run.c) ----------------------------------------------------------- */

#define DNN_BF16_BYTES 2
#define DNN_VECTOR_ELEMENTS 8 /* heads and strides are multiples of it: 16 bytes */

struct dnn_entry {
    struct dnn_shape key, piece; /* whole; what the plan is of */
    struct dnn_plan plan;
    bool checked, good;          /* was a check made for this entry, and how it went */
};
/* Takes the scratch of a job and, unless it is dry, launches. j->st says how it went. */
void dnn_run(struct cuda_job *j, const struct dnn_entry *e, cudnnHandle_t handle,
             const struct ops_attention *a);

/* --- is it right here? (cuda_dnn_check.c) ----------------------------------------------------- */

struct dnn_verdict {
    const char *call; /* that failed; as given: none did, the numbers are wrong */
    int status;
};
/* A small attention of heads like these in this direction: cuDNN's, twice, against own tiles on the
 * card. true: near, and the same bits twice. Takes some MiB of the card's memory for its time, some
 * seconds of compiling, and waits for the card. */
bool dnn_check(struct cuda_dev *h, const struct dnn_table *t, cudnnHandle_t handle,
               const struct dnn_shape *like, struct dnn_verdict *v);

#endif
