/* trainer/model_impl.h - what model.c, model_inputs.c, model_visit.c and layer.c share. Nobody else
 * includes it.
 *
 * A place of the forward order has one row of `tensor[place][role]`: engine tensor ids, MODEL_NO
 * where the family has no such tensor. With a tied head the last place's ROLE_HEAD is the
 * embedding's id.
 *
 * Addresses are computed on uintptr_t: in prepare mode they are offsets from a base that is not
 * memory (MODEL_PREPARE_BASE). */
#ifndef TRAINER_MODEL_IMPL_H
#define TRAINER_MODEL_IMPL_H

#include "trainer/model.h"

#define MODEL_NO UINT32_MAX
#define MODEL_ALIGN_BYTES 256u
#define MODEL_TENSOR_ALIGN 64u /* elements: a tensor of such a multiple ends where the next begins */
/* Not NULL, because a NULL optional buffer means "not wanted" also in prepare mode. Never followed.
 */
#define MODEL_PREPARE_BASE ((uintptr_t)4096)

struct model_block {
    char name[32];
    uint32_t first, n; /* engine tensors */
    uint32_t id;       /* the engine's, after model_describe */
};

/* One micro-batch's inputs. host: staging, device: what operations read. Arrays of `tokens`: ids,
 * targets, position, then one first_key for each distinct window. */
struct model_input {
    int32_t *host, *device;
};

struct model {
    struct model_config cfg;     /* own copy; document is NULL */
    struct model_opts opts;      /* freeze is NULL */
    uint64_t tokens;             /* of one micro-batch */
    bool wide;                   /* what lives within a visit is f32, not opts.act: the device's
                                  * products are f32. Known from model_describe on */
    uint32_t n_places, n_blocks; /* places: layers + 2 */
    struct model_block *blocks;
    uint32_t *place_block;      /* [n_places] index in blocks */
    uint32_t (*tensor)[ROLE_N]; /* [n_places] */

    uint32_t n_tensors;
    struct model_tensor *table;     /* names and shapes as formats/ lists them */
    struct model_tensor_info *info; /* [n_tensors] in engine order; names point into table */
    uint64_t *offset; /* [n_tensors] elements in the block's vector; zero until model_bind */

    uint32_t n_windows;     /* distinct ones, at least 1 */
    uint32_t *window;       /* [n_windows]; 0: none */
    uint32_t *layer_window; /* [layers] index in window */

    uint64_t full_bytes; /* of a layer */
    uint64_t boundary_bytes;
    uint64_t workspace_bytes;
    uint32_t h_host, h_device;          /* handles of reservations */
    struct model_input *input;          /* [n_micro] */
    struct dev_stream *stream;          /* the compute stream, after model_bind */
    float *inv_freq;                    /* device */
    double *loss;                       /* host [n_micro] */
    float *logits_device, *logits_host; /* [tokens, vocab]; host: n_micro of them */
    uint64_t targets;                   /* of the step */
    char numerics[160];
};

/* Carves aligned pieces; `used_bytes` is the size so far. */
struct model_arena {
    uintptr_t base;
    uint64_t used_bytes;
};
void *model_take(struct model_arena *a, uint64_t size_bytes);
/* What is left of the visit's workspace, for the operations. */
struct ops_scratch model_scratch(const struct model_arena *a, const stk_visit *v);

/* The tensors of these roles lie one behind the other in the block's vector, all trained or all
 * frozen: matrices of equal width are then one matrix of all their rows, for parameters and
 * gradients. The same for every placement. */
bool model_joined(const struct model *m, uint32_t place, enum model_role first,
                  enum model_role last);
const void *model_param(const struct model *m, const stk_visit *v,
                        enum model_role role); /* NULL: no such tensor */
float *model_grad(const struct model *m, const stk_visit *v,
                  enum model_role role); /* NULL: frozen or none */
const int32_t *model_positions(const struct model *m, uint32_t micro);
const int32_t *model_first_key(const struct model *m, uint32_t micro, uint32_t window);
const int32_t *model_ids(const struct model *m, uint32_t micro);
const int32_t *model_targets(const struct model *m, uint32_t micro);

uint64_t model_q_cols(const struct model *m);
uint64_t model_kv_cols(const struct model *m);
uint64_t model_act_bytes(const struct model *m, uint64_t cols); /* tokens x cols of `act` */
uint64_t model_f32_bytes(const struct model *m, uint64_t cols);
uint64_t model_work_bytes(const struct model *m, uint64_t cols); /* of what lives within a visit */

/* layer.c */
uint64_t layer_full_bytes(const struct model *m);
uint64_t layer_temps_bytes(const struct model *m); /* of the workspace, beside scratch */
stk_status layer_visit(const struct model *m, const stk_visit *v, struct stk_error *err);

/* model_visit.c: runs every kind of visit once in the device's prepare mode; sets workspace_bytes.
 */
stk_status model_measure(struct model *m, stk_engine *e, struct stk_error *err);

/* model_inputs.c */
stk_status model_inputs_reserve(struct model *m, stk_engine *e, struct stk_error *err);
stk_status model_inputs_bind(struct model *m, stk_engine *e, struct stk_error *err);

#endif
