/* trainer/model.h - model families as the first client of the engine: a Hugging Face configuration
 * becomes blocks, places and visits.
 *
 * A decoder model is: embedding | layer 0 | ... | layer L-1 | head (final norm, output projection,
 * loss; fused). Blocks: "embed", "layer.<i>", "head". With a tied head, embedding and head are ONE
 * block ("embed") that stands at the first and at the last place and holds embed_tokens and the
 * final norm. Engine tensors are named as in the Hugging Face files. How a family differs (biases,
 * q/k norm, windows, rotary scaling) is data in model_config; the code of a visit is one function
 * for all (trainer/layer.c). A new family: formats/model_config.c and, if its math differs,
 * trainer/layer.c.
 *
 * Activations that are kept and boundaries have dtype `act`. Three things that bf16 would hurt and
 * that cost next to no memory do not: the residual stream inside a layer and its gradient are f32;
 * what lives within one visit has the dtype of the products' operands, so f32 where the device
 * multiplies in f32; a value is rounded once between two operations, not after each (the rotary
 * embedding rounds its result only). bf16 gradients are so 0.7 of torch's own distance from fp32
 * with bf16 products, 0.5 with f32 ones (tests/golden/README.md). Under every activation policy the
 * same operations run on the same stored values, so recomputing gives the same bits.
 *
 * Thread: the application's. Nothing is allocated after model_describe. */
#ifndef TRAINER_MODEL_H
#define TRAINER_MODEL_H

#include "engine/stoker.h"
#include "base/status.h"
#include "formats/model_config.h"
#include "gpu/ops.h"

struct model;

struct model_opts {
    uint32_t seq, sequences;         /* of one micro-batch: tokens = seq * sequences */
    uint32_t n_micro;
    enum ops_dtype act;              /* OPS_F32 or OPS_BF16 */
    enum ops_dtype param;            /* OPS_BF16 or OPS_FP16 */
    bool logits;                     /* evaluation that wants logits: a host copy of each
                                      * micro-batch's (model_logits) */
    bool eval_only;                  /* no gradients anywhere: every tensor is described as frozen
                                      * (MEM-11) */
    const char *const *freeze;       /* patterns (fnmatch) over tensor names */
    uint32_t n_freeze;
};

/* Copies the configuration. Errors: sequence longer than max_positions (STK_ERR_CONFIG), a freeze
 * pattern that matches nothing (named), dtype mix not supported. */
stk_status model_open(const struct model_config *c, const struct model_opts *o, struct model **out,
                      struct stk_error *err);
void model_close(struct model *m);

/* The client's part of the numerics key: "act=bf16;param=bf16;seq=512;rows=2;family=llama". For
 * stk_config.client_numerics, before stk_open. Valid until model_close. */
const char *model_numerics(const struct model *m);

/* Between stk_open and stk_seal: blocks, order, workspace (measured in the device's prepare mode by
 * running every visit once), inputs. */
stk_status model_describe(struct model *m, stk_engine *e, struct stk_error *err);
/* After stk_seal: pointers, rotary table to the device. */
stk_status model_bind(struct model *m, stk_engine *e, struct stk_error *err);

/* Engine tensors by id (0 .. count-1), with the shape of the Hugging Face file. */
struct model_tensor_info {
    const char *name;
    uint32_t rank;
    uint64_t shape[2];
    uint64_t n_elems;
    enum model_role role;
    bool frozen;
};
uint32_t model_tensor_count(const struct model *m);
const struct model_tensor_info *model_tensor(const struct model *m, uint32_t engine_tensor);

/* Queues one micro-batch's inputs (arrays of seq * sequences; borrowed until the step ends: copies
 * to the device are queued). targets -1: none. */
stk_status model_inputs(struct model *m, uint32_t micro, const int32_t *ids, const int32_t *targets,
                        const int32_t *position, const int32_t *first_key, struct stk_error *err);
/* Number of targets of the whole step: the loss is their mean. Before the first backward visit. */
void model_step_targets(struct model *m, uint64_t targets);
/* Queues the visit's operations on v->stream. */
stk_status model_visit(struct model *m, const stk_visit *v, struct stk_error *err);
/* After stk_step_end / stk_eval_end: sum of losses over targets, micro-batches added in order. */
double model_loss_sum(struct model *m);
/* eval with logits: host copy of micro-batch `micro`'s logits, f32 [tokens, vocab], after
 * stk_eval_end. */
const float *model_logits(struct model *m, uint32_t micro);
/* FLOPs of one training step (forward + backward, no recomputation), for MFU. */
double model_step_flops(const struct model *m);

#endif
