/* gpu/ops.h - operations on a device stream. All of a transformer's math that the built-in trainer
 * needs, and what the engine itself needs (cast of gradients).
 *
 * CONTRACT OF EVERY OPERATION
 *  - Queued on a stream, done later; arguments are copied at the call; buffers are borrowed until a
 *    later notification.
 *  - Row-major; `ld` in elements. Buffers: device pointers, 64-byte aligned start, rows contiguous.
 *  - DTYPES: parameters `pt` (OPS_BF16, OPS_FP16), activations and activation gradients `at`
 *    (OPS_F32, OPS_BF16), weight gradients always fp32 accumulators to which the product of this
 *            call is ADDED (acc = acc + dW): complete, or by the matrix library inside its product, in
 *            an order that is the same at every call. Whatever is computed inside in fp32 is rounded
 *            to `at`
 *    (nearest even) on store. A flag `..._wide` says that the buffers it names are f32 whatever
 *            `at` is: a residual stream and its gradient, or what lives between two operations
 *            only, need not be rounded.
 *  - DETERMINISTIC: the same inputs and shapes give the same bits at every call, for any buffer
 *    address; sums have a fixed order that does not depend on the number of threads where that is
 *            affordable (norms, reductions); matrix products may depend on the thread count, which
 *            is part of the
 *    numerics key. Tile sizes depend on shapes only, never on scratch or budgets.
 *  - SCRATCH: `scratch` of at least the bytes that prepare mode reported (dev_prepare_end); shared
 *    by all operations of one stream, contents undefined between calls. Two streams must not share
 *            it.
 *  - In prepare mode (gpu/device.h) pointers may be NULL and nothing runs.
 *  - Errors: STK_ERR_CONFIG for impossible shapes (at the call), STK_ERR_DEVICE from the library
 *    (sticky on the device).
 *
 * tokens = n_seq * seq rows, sequence after sequence. */
#ifndef GPU_OPS_H
#define GPU_OPS_H

#include "gpu/device.h"

enum ops_dtype { OPS_F32, OPS_BF16, OPS_FP16, OPS_I32, OPS_DTYPE_N };
static inline uint32_t ops_dtype_bytes(enum ops_dtype t)
{
    return t == OPS_F32 || t == OPS_I32 ? 4 : 2;
}

static inline enum ops_dtype ops_wide(enum ops_dtype at, bool wide) { return wide ? OPS_F32 : at; }

struct ops_scratch { void *base; uint64_t size_bytes; };

/* --- linear layers: y = x W^T (+ bias)
 * ------------------------------------------------------------------------------- x [rows, in] at;
 * w [out, in] pt; bias [out] pt or NULL; y [rows, out] at. */
struct ops_linear {
    uint64_t rows, in, out;
    enum ops_dtype at, pt;
    bool x_wide, y_wide; /* x, dx; y, dy */
    const void *x, *w, *bias;
    void *y;
    bool add;          /* forward: y = base + x W^T (residual) ; rounded once after the sum.
                        * backward data: dx = base + dy W */
    const void *base;  /* of the shape of y (dx); NULL: y (dx) itself */
    bool base_wide;    /* of a base that is not y (dx) */
    const void *dy;    /* backward [rows, out] at */
    void *dx;          /* backward data [rows, in] at; */
    float *dw, *dbias; /* accumulators [out, in], [out]; NULL: not wanted (frozen) */
    bool overwrite;    /* dw and dbias hold anything: written, not added to (the sums that adding to
                        * zeros gives, but for the sign of a zero) */
    struct ops_scratch scratch;
};
/* x, w, bias -> y */
stk_status ops_linear_forward(struct dev_stream *s, const struct ops_linear *a,
                              struct stk_error *err);
/* dy, w -> dx */
stk_status ops_linear_backward_data(struct dev_stream *s, const struct ops_linear *a,
                                    struct stk_error *err);
/* dy, x -> dw += , dbias += (sum over rows) */
stk_status ops_linear_backward_weight(struct dev_stream *s, const struct ops_linear *a,
                                      struct stk_error *err);

/* --- embedding: y[t] = table[ids[t]] ---------------------------------------------------------- */
struct ops_embed {
    uint64_t tokens, vocab, hidden;
    enum ops_dtype at, pt;
    const int32_t *ids;    /* device, [tokens], each in [0, vocab) (checked by who made them) */
    const void *table;     /* [vocab, hidden] pt */
    void *y;               /* [tokens, hidden] at */
    const void *dy;
    float *dtable;         /* += rows, in token order */
};
stk_status ops_embed_forward(struct dev_stream *s, const struct ops_embed *a,
                             struct stk_error *err);
stk_status ops_embed_backward(struct dev_stream *s, const struct ops_embed *a,
                              struct stk_error *err);

/* --- RMS norm over the last dimension (Zhang & Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * w
 * ------------------------- All in fp32, rounded to `at` once, on store (transformers' LlamaRMSNorm
 * also rounds x * rstd before it multiplies with w, its rotary embedding cos and sin, its MLP
 * silu(gate): none of that here, and bf16 gradients are 1/8 nearer to fp32 for it). `rows` may be
 * tokens * heads (q/k norm). x may have a row stride inside a token: element (r, c) is at x[(r /
 * group) * x_stride + (r % group) * cols + c] with group = heads per token (group = 1, x_stride =
 * cols: plain). y has the same layout as x (y_stride). */
struct ops_rmsnorm {
    uint64_t rows, cols, group, x_stride, y_stride;
    enum ops_dtype at, pt;
    bool x_wide, y_wide, dx_wide; /* x; y, dy; dx */
    double eps;
    const void *x, *w;
    void *y;
    float *rstd;        /* [rows]: written by forward, read by backward */
    const void *dy;     /* layout of y */
    void *dx;           /* layout of x */
    bool add;           /* dx = dx + ... (the residual's gradient is there already) */
    float *dw;          /* [cols] +=, sum over rows in a fixed order; NULL: frozen */
    bool overwrite;     /* of dw, as in ops_linear */
    struct ops_scratch scratch;
};
stk_status ops_rmsnorm_forward(struct dev_stream *s, const struct ops_rmsnorm *a,
                               struct stk_error *err);
stk_status ops_rmsnorm_backward(struct dev_stream *s, const struct ops_rmsnorm *a,
                                struct stk_error *err);

/* --- rotary position embedding (Su et al. 2021), half-split pairing as in transformers' Llama:
 * (x[i], x[i + d/2]) ---------- On q [tokens, heads, head_dim] and k [tokens, kv_heads, head_dim]
 * (row strides given), in place or from q_in and k_in of the same strides. angle(t, i) = pos[t] *
 * inv_freq[i], cos and sin multiplied by `attention_factor`. `inverse`: the backward (angle
 * negated). v [tokens, v_cols] is only rounded, from v_in to v: of a joined product of q, k and v
 * that is read here in f32. */
struct ops_rope {
    uint64_t tokens, heads, kv_heads, head_dim, q_stride, k_stride;
    enum ops_dtype at;
    void *q, *k;
    const void *q_in, *k_in;   /* NULL: q, k */
    bool in_wide;              /* of q_in, k_in and v_in, where they are given */
    void *v;                   /* NULL: none */
    const void *v_in;
    uint64_t v_cols, v_stride;
    const int32_t *pos;        /* device [tokens] */
    const float *inv_freq;     /* device [head_dim / 2] */
    float attention_factor;
    bool inverse;
};
stk_status ops_rope(struct dev_stream *s, const struct ops_rope *a, struct stk_error *err);

/* --- causal attention, grouped-query, blocked: no T x T matrix (Dao 2022, FlashAttention)
 * ----------------------------------- Row t of a sequence attends to keys j with first_key[t] <= j
 * <= t, both counted inside the sequence; first_key carries sliding window and document boundaries,
 * and so never falls from a token of a sequence to the next. o[t] = softmax(scale * q k^T) v.
 * lse[tokens, heads]: log-sum-exp rows, kept for the backward. */
struct ops_attention {
    uint64_t n_seq, seq, heads, kv_heads, head_dim;
    uint64_t q_stride, k_stride, v_stride, o_stride; /* elements from token to token */
    enum ops_dtype at;
    bool grad_wide;            /* d_o, dq, dk, dv */
    float scale;
    const int32_t *first_key;  /* device [n_seq * seq] */
    const void *q, *k, *v;
    void *o;
    float *lse;
    const void *d_o;           /* backward in: layout of o */
    void *dq, *dk, *dv;        /* backward out (overwritten), layouts of q, k, v */
    struct ops_scratch scratch;
};
stk_status ops_attention_forward(struct dev_stream *s, const struct ops_attention *a,
                                 struct stk_error *err);
stk_status ops_attention_backward(struct dev_stream *s, const struct ops_attention *a,
                                  struct stk_error *err);

/* --- SwiGLU (Shazeer 2020): y = silu(gate) * up
 * ------------------------------------------------------------------------------- gate, up, y and
 * gradients [rows, cols], row strides given (gate and up may be halves of one buffer). Backward
 * writes y, too, where it is given: the forward's bits, so that a backward that wants it needs no
 * forward of its own. */
struct ops_swiglu {
    uint64_t rows, cols, g_stride, u_stride, y_stride;
    enum ops_dtype at;
    bool y_wide;       /* y, dy */
    const void *gate, *up;
    void *y;           /* backward: or NULL; may be dy itself */
    const void *dy;
    void *dgate, *dup; /* may be gate and up themselves */
};
stk_status ops_swiglu_forward(struct dev_stream *s, const struct ops_swiglu *a,
                              struct stk_error *err);
stk_status ops_swiglu_backward(struct dev_stream *s, const struct ops_swiglu *a,
                               struct stk_error *err);

/* y = a + b, elementwise, n elements of `at`; y may be a or b. */
stk_status ops_add(struct dev_stream *s, enum ops_dtype at, uint64_t n, const void *a,
                   const void *b, void *y, struct stk_error *err);

/* --- head and loss by token tiles: never the whole logits
 * ---------------------------------------------------------------------- logits = x W^T; loss of
 * token t with target y: logsumexp(logits[t]) - logits[t][y]; target < 0: none. Forward: adds to
 * *loss_sum (fp64, token order) and, if asked, writes logits (f32 [tokens, vocab]). Train: loss, dx
 * = d_scale * dlogits W, dw += d_scale * dlogits^T x in the same pass over tiles. d_scale is
 * loss_scale / targets of the whole step. Gradient of logits is rounded to `at` before the
 * products, as torch does in bf16. */
struct ops_head {
    uint64_t tokens, hidden, vocab;
    enum ops_dtype at, pt;
    bool dx_wide;
    const void *x, *w;
    const int32_t *targets;    /* device [tokens] */
    double *loss_sum;          /* HOST memory, one fp64: += sum over this call's targets; readable
                                * after a notification */
    float *logits;             /* forward only, device, or NULL */
    void *dx;                  /* train: [tokens, hidden] at, overwritten */
    float *dw;                 /* train: accumulator or NULL */
    bool overwrite;            /* of dw, as in ops_linear */
    double d_scale;
    struct ops_scratch scratch;
};
stk_status ops_head_forward(struct dev_stream *s, const struct ops_head *a, struct stk_error *err);
stk_status ops_head_train(struct dev_stream *s, const struct ops_head *a, struct stk_error *err);

/* --- what the engine needs
 * ------------------------------------------------------------------------------------------------------
 * fp32 accumulator -> 16-bit gradient of dtype gt, with base/convert.h's fixed-order fp64 sum of
 * squares of the rounded values and count of non-finite ones, written to *sum (HOST memory). */
struct convert_sum;
struct ops_grad_cast {
    uint64_t n;
    enum ops_dtype gt;
    const float *acc;
    void *out;
    float scale;
    struct convert_sum *sum;
};
stk_status ops_grad_cast(struct dev_stream *s, const struct ops_grad_cast *a,
                         struct stk_error *err);
/* Adam on optimizer state that lies in the device's memory: offload/adam.h has the formulas, their order
 * and every rounding, and the bits are the processor's, whatever the device. Arrays of n elements, one
 * behind the other or not; each span is a part of them with its own coefficients (those of
 * offload/adam.h's struct adam_coef, member by member: the tensor's step count, its decay, the clip factor
 * are in them). Elements in no span stay as they are. In place. Spans must not overlap. */
enum ops_adam_layout {
    OPS_ADAM_BF16_SPLIT, /* param bf16, low int16, grad bf16 */
    OPS_ADAM_FP16,       /* param fp16 (written only), master f32, grad fp16 */
    OPS_ADAM_F32,        /* param and grad f32; low_or_master NULL */
    OPS_ADAM_LAYOUT_N
};
struct ops_adam_coef {
    float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_bc2,
        decay, l2;
};
struct ops_adam_span {
    uint64_t first, n;         /* elements */
    struct ops_adam_coef coef;
};
struct ops_adam {
    uint64_t n;
    enum ops_adam_layout layout;
    void *param, *low_or_master;
    float *exp_avg, *exp_avg_sq;
    const void *grad;
    const struct ops_adam_span *spans; /* HOST memory, in ascending order; borrowed until a later
                                        * notification, as buffers are */
    uint32_t n_spans;
};
/* Besides: STK_ERR_UNSUPPORTED where the device was opened without dev_cfg.adam and needs it. */
stk_status ops_adam(struct dev_stream *s, const struct ops_adam *a, struct stk_error *err);
static inline uint32_t ops_adam_word_bytes(enum ops_adam_layout l) /* of param and grad */
{
    return l == OPS_ADAM_F32 ? 4 : 2;
}
/* acc[i] += src[i], src of dtype st (stk_grad_add). */
stk_status ops_acc_add(struct dev_stream *s, uint64_t n, float *acc, const void *src,
                       enum ops_dtype st, struct stk_error *err);

#endif
