/* trainer/model.c - from a configuration to blocks, places and engine tensors.
 *
 * Owns: the order of tensors inside blocks (trainable first, then frozen, each in the order of
 * formats/), freezing, names, the numerics string, FLOPs. Must not know: where the engine keeps
 * anything, how a visit computes (model_visit.c, layer.c). Runs on the application's thread, before
 * and at seal; nothing here runs in a step. */
#include "trainer/model_impl.h"

#include "base/sys.h"
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

uint64_t model_q_cols(const struct model *m) { return (uint64_t)m->cfg.heads * m->cfg.head_dim; }
uint64_t model_kv_cols(const struct model *m)
{
    return (uint64_t)m->cfg.kv_heads * m->cfg.head_dim;
}
uint64_t model_act_bytes(const struct model *m, uint64_t cols)
{
    return m->tokens * cols * ops_dtype_bytes(m->opts.act);
}
uint64_t model_f32_bytes(const struct model *m, uint64_t cols)
{
    return m->tokens * cols * sizeof(float);
}
uint64_t model_work_bytes(const struct model *m, uint64_t cols)
{
    return m->tokens * cols * ops_dtype_bytes(ops_wide(m->opts.act, m->wide));
}

/* --- open ------------------------------------------------------------------------------------ */

static stk_status check_options(const struct model_config *c, const struct model_opts *o,
                                struct stk_error *err)
{
    if (!o->seq || !o->sequences || !o->n_micro)
        return stk_error_set(
            err, STK_ERR_CONFIG, 0,
            "a micro-batch of %u sequences of %u tokens, %u times a step: each must be at least 1",
            o->sequences, o->seq, o->n_micro);
    if (o->seq > c->max_positions)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "sequences of %u tokens are longer than the model's "
                             "max_position_embeddings %u: use --seq %u or less",
                             o->seq, c->max_positions, c->max_positions);
    if ((uint64_t)o->seq * o->sequences > INT32_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%u sequences of %u tokens are more than 2^31 tokens in a micro-batch",
                             o->sequences, o->seq);
    if (o->act != OPS_F32 && o->act != OPS_BF16)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "activations must be f32 or bf16");
    if (o->param != OPS_BF16 && o->param != OPS_FP16)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "parameters must be bf16 or fp16");
    if (o->param == OPS_FP16 && o->act == OPS_BF16)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "fp16 parameters go with f32 activations, not with bf16");
    return STK_OK;
}

static stk_status no_memory(struct stk_error *err)
{
    return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the description of the model");
}

static uint32_t place_of(const struct model *m, const struct model_tensor *t)
{
    if (t->layer >= 0) return (uint32_t)t->layer + 1;
    return t->role == ROLE_EMBED ? 0 : m->n_places - 1;
}

static bool is_frozen(const struct model_opts *o, const char *name)
{
    for (uint32_t i = 0; i < o->n_freeze; i++)
        if (fnmatch(o->freeze[i], name, 0) == 0) return true;
    return o->eval_only;
}

static stk_status check_freeze(const struct model *m, const struct model_opts *o,
                               struct stk_error *err)
{
    for (uint32_t i = 0; i < o->n_freeze; i++) {
        uint32_t t = 0;
        while (t < m->n_tensors && fnmatch(o->freeze[i], m->table[t].name, 0) != 0) t++;
        if (t == m->n_tensors)
            return stk_error_set(
                err, STK_ERR_CONFIG, 0,
                "--freeze %s matches no tensor of the model; names look like %s and %s%s",
                o->freeze[i], m->table[0].name, m->table[m->n_tensors - 1].name,
                m->cfg.tied ? " (tied: the head is the embedding)" : "");
    }
    if (o->eval_only) return STK_OK;
    for (uint32_t t = 0; t < m->n_tensors; t++)
        if (!is_frozen(o, m->table[t].name)) return STK_OK;
    return stk_error_set(err, STK_ERR_CONFIG, 0,
                         "--freeze leaves nothing to train: every tensor of the model is matched");
}

/* Appends one block's tensors of the given kind, in the table's order. */
static void list_tensors(struct model *m, const struct model_opts *o, uint32_t block, bool frozen,
                         uint32_t *next)
{
    for (uint32_t t = 0; t < m->n_tensors; t++) {
        const struct model_tensor *row = &m->table[t];
        uint32_t place = place_of(m, row);
        if (m->place_block[place] != block || is_frozen(o, row->name) != frozen) continue;
        struct model_tensor_info *info = &m->info[*next];
        *info = (struct model_tensor_info){
            .name = row->name, .rank = row->rank, .role = row->role, .frozen = frozen
        };
        info->n_elems = 1;
        for (uint32_t d = 0; d < row->rank; d++) {
            info->shape[d] = row->shape[d];
            info->n_elems *= row->shape[d];
        }
        m->tensor[place][row->role] = *next;
        if (row->role == ROLE_EMBED && m->cfg.tied) m->tensor[m->n_places - 1][ROLE_HEAD] = *next;
        m->blocks[block].n++;
        ++*next;
    }
}

static void list_blocks(struct model *m, const struct model_opts *o)
{
    memset(m->tensor, 0xff, m->n_places * sizeof m->tensor[0]);
    for (uint32_t p = 0; p < m->n_places; p++) {
        bool last = p == m->n_places - 1;
        m->place_block[p] = last && m->cfg.tied ? 0 : p;
        if (p == 0) snprintf(m->blocks[p].name, sizeof m->blocks[p].name, "embed");
        else if (!last) snprintf(m->blocks[p].name, sizeof m->blocks[p].name, "layer.%u", p - 1);
        else if (!m->cfg.tied) snprintf(m->blocks[p].name, sizeof m->blocks[p].name, "head");
    }
    uint32_t next = 0;
    for (uint32_t b = 0; b < m->n_blocks; b++) {
        m->blocks[b].first = next;
        list_tensors(m, o, b, false, &next);
        list_tensors(m, o, b, true, &next);
    }
    STK_ASSERT(next == m->n_tensors);
}

/* A window that holds the whole sequence is none. */
static void list_windows(struct model *m)
{
    for (uint32_t l = 0; l < m->cfg.layers; l++) {
        uint32_t w = m->cfg.window && m->cfg.window[l] < m->opts.seq ? m->cfg.window[l] : 0, i = 0;
        while (i < m->n_windows && m->window[i] != w) i++;
        if (i == m->n_windows) m->window[m->n_windows++] = w;
        m->layer_window[l] = i;
    }
}

static void write_numerics(struct model *m)
{
    /* Which dtype the temporaries have follows from `act` and the device's part of the key. */
    snprintf(m->numerics, sizeof m->numerics, "act=%s;param=%s;seq=%u;rows=%u;family=%s",
             m->opts.act == OPS_BF16 ? "bf16;residual=f32" : "f32",
             m->opts.param == OPS_BF16 ? "bf16" : "fp16", m->opts.seq, m->opts.sequences,
             model_family_name(m->cfg.family));
}

static bool allocate(struct model *m)
{
    uint64_t layers = m->cfg.layers;
    m->blocks = sys_calloc(m->n_places, sizeof *m->blocks);
    m->place_block = sys_calloc(m->n_places, sizeof *m->place_block);
    m->tensor = sys_calloc(m->n_places, sizeof *m->tensor);
    m->table = sys_calloc(m->n_tensors, sizeof *m->table);
    m->info = sys_calloc(m->n_tensors, sizeof *m->info);
    m->offset = sys_calloc(m->n_tensors, sizeof *m->offset);
    m->window = sys_calloc(layers, sizeof *m->window);
    m->layer_window = sys_calloc(layers, sizeof *m->layer_window);
    m->input = sys_calloc(m->opts.n_micro, sizeof *m->input);
    return m->blocks && m->place_block && m->tensor && m->table && m->info && m->offset &&
           m->window && m->layer_window && m->input;
}

static stk_status fill(struct model *m, const struct model_config *c, const struct model_opts *o,
                       struct stk_error *err)
{
    m->cfg = *c;
    m->cfg.document = NULL;
    m->cfg.window = NULL;
    m->opts = *o;
    m->opts.freeze = NULL;
    m->tokens = (uint64_t)o->seq * o->sequences;
    m->n_places = c->layers + 2;
    m->n_blocks = c->layers + (c->tied ? 1 : 2);
    m->n_tensors = model_tensors(c, NULL);
    if (c->window) {
        m->cfg.window = sys_calloc(c->layers, sizeof *c->window);
        if (!m->cfg.window) return no_memory(err);
        memcpy(m->cfg.window, c->window, c->layers * sizeof *c->window);
    }
    if (!allocate(m)) return no_memory(err);
    model_tensors(c, m->table);
    STK_TRY(check_freeze(m, o, err));
    list_blocks(m, o);
    list_windows(m);
    write_numerics(m);
    m->boundary_bytes = model_act_bytes(m, c->hidden);
    m->full_bytes = layer_full_bytes(m);
    return STK_OK;
}

stk_status model_open(const struct model_config *c, const struct model_opts *o, struct model **out,
                      struct stk_error *err)
{
    *out = NULL;
    STK_TRY(check_options(c, o, err));
    struct model *m = sys_calloc(1, sizeof *m);
    if (!m) return no_memory(err);
    stk_status st = fill(m, c, o, err);
    if (st != STK_OK) {
        model_close(m);
        return st;
    }
    *out = m;
    return STK_OK;
}

void model_close(struct model *m)
{
    if (!m) return;
    sys_free(m->cfg.window);
    sys_free(m->blocks);
    sys_free(m->place_block);
    sys_free(m->tensor);
    sys_free(m->table);
    sys_free(m->info);
    sys_free(m->offset);
    sys_free(m->window);
    sys_free(m->layer_window);
    sys_free(m->input);
    sys_free(m);
}

const char *model_numerics(const struct model *m) { return m->numerics; }
uint32_t model_tensor_count(const struct model *m) { return m->n_tensors; }

const struct model_tensor_info *model_tensor(const struct model *m, uint32_t engine_tensor)
{
    STK_ASSERT(engine_tensor < m->n_tensors);
    return &m->info[engine_tensor];
}

/* Offsets are known after seal only; that they follow from order and sizes is checked then. */
bool model_joined(const struct model *m, uint32_t place, enum model_role first,
                  enum model_role last)
{
    for (uint32_t r = first; r <= last; r++) {
        uint32_t t = m->tensor[place][r], was = r > first ? m->tensor[place][r - 1] : t;
        if (t == MODEL_NO) return false;
        if (r == (uint32_t)first) continue;
        if (t != was + 1 || m->info[t].frozen != m->info[was].frozen ||
            m->info[was].n_elems % MODEL_TENSOR_ALIGN != 0)
            return false;
    }
    return true;
}

static void check_joined(const struct model *m, uint32_t place, enum model_role first,
                         enum model_role last)
{
    if (!model_joined(m, place, first, last)) return;
    for (uint32_t t = m->tensor[place][first]; t < m->tensor[place][last]; t++)
        STK_ASSERT(m->offset[t + 1] == m->offset[t] + m->info[t].n_elems);
}

/* --- FLOPs ----------------------------------------------------------------------------------- */

/* Multiplications and additions of a place's matrix products over the micro-batch; trainable: of
 * its trainable tensors only. */
static double product_flops(const struct model *m, uint32_t place, bool trainable)
{
    double n = 0;
    for (uint32_t r = 0; r < ROLE_N; r++) {
        uint32_t t = m->tensor[place][r];
        if (t == MODEL_NO || r == ROLE_EMBED || m->info[t].rank != 2) continue;
        if (!trainable || !m->info[t].frozen) n += (double)m->info[t].n_elems;
    }
    return 2 * n * (double)m->tokens;
}

/* q k^T and p v over the keys that the causal mask and the window leave; document boundaries are
 * not known here. */
static double attention_flops(const struct model *m, uint32_t layer)
{
    double seq = m->opts.seq, w = m->window[m->layer_window[layer]];
    double pairs = w > 0 ? w * (w + 1) / 2 + (seq - w) * w : seq * (seq + 1) / 2;
    return 4 * pairs * m->opts.sequences * (double)model_q_cols(m);
}

static double forward_flops(const struct model *m, uint32_t place)
{
    bool layer = place > 0 && place < m->n_places - 1;
    return product_flops(m, place, false) + (layer ? attention_flops(m, place - 1) : 0);
}

double model_step_flops(const struct model *m)
{
    double sum = 0;
    for (uint32_t p = 0; p < m->n_places; p++)
        sum += 2 * forward_flops(m, p) + product_flops(m, p, true);
    for (uint32_t l = 0; l < m->cfg.layers; l++)
        sum += attention_flops(m, l); /* its backward costs twice its forward */
    return sum * m->opts.n_micro;
}

/* --- description ----------------------------------------------------------------------------- */

/* The engine keeps its own sentence; it becomes ours, because the caller looks here. */
static stk_status engine_error(stk_engine *e, stk_status st, struct stk_error *err)
{
    return stk_error_set(err, st, 0, "%s", stk_error_text(e));
}

static stk_status describe_blocks(struct model *m, stk_engine *e, struct stk_error *err)
{
    struct stk_tensor_desc *desc = sys_calloc(m->n_tensors, sizeof *desc);
    if (!desc) return no_memory(err);
    stk_status st = STK_OK;
    for (uint32_t b = 0; b < m->n_blocks && st == STK_OK; b++) {
        struct model_block *block = &m->blocks[b];
        uint32_t first = 0;
        for (uint32_t i = 0; i < block->n; i++) {
            const struct model_tensor_info *t = &m->info[block->first + i];
            /* Decay on every tensor: what torch's AdamW does with all parameters in one group. */
            desc[i] = (stk_tensor_desc){ .name = t->name,
                                         .n_elems = t->n_elems,
                                         .frozen = t->frozen,
                                         .embedding = t->role == ROLE_EMBED };
        }
        st = stk_block(e, block->name, desc, block->n, &block->id, &first);
        if (st != STK_OK) st = engine_error(e, st, err);
        else STK_ASSERT(first == block->first); /* ours are the engine's only blocks */
    }
    sys_free(desc);
    return st;
}

static stk_status describe_order(struct model *m, stk_engine *e, struct stk_error *err)
{
    stk_place *places = sys_calloc(m->n_places, sizeof *places);
    if (!places) return no_memory(err);
    for (uint32_t p = 0; p < m->n_places; p++) {
        bool last = p == m->n_places - 1;
        places[p] = (stk_place){
            .block = m->blocks[m->place_block[p]].id,
            .fused = last,
            .in_bytes = p ? m->boundary_bytes : 0,
            .full_bytes = p && !last ? m->full_bytes : 0,
            .flow_bytes = p ? model_f32_bytes(m, m->cfg.hidden) : 0,
            .flops = forward_flops(m, p),
        };
    }
    stk_status st = stk_order(e, places, m->n_places);
    sys_free(places);
    return st == STK_OK ? st : engine_error(e, st, err);
}

stk_status model_describe(struct model *m, stk_engine *e, struct stk_error *err)
{
    struct dev_caps caps;
    dev_caps_read(stk_device(e), &caps);
    m->wide = caps.matmul == DEV_MATMUL_F32;
    STK_TRY(describe_blocks(m, e, err));
    STK_TRY(describe_order(m, e, err));
    STK_TRY(model_inputs_reserve(m, e, err));
    STK_TRY(model_measure(m, e, err));
    stk_status st = stk_workspace(e, m->workspace_bytes);
    return st == STK_OK ? st : engine_error(e, st, err);
}

stk_status model_bind(struct model *m, stk_engine *e, struct stk_error *err)
{
    for (uint32_t t = 0; t < m->n_tensors; t++) m->offset[t] = stk_tensor_offset(e, t);
    for (uint32_t p = 1; p + 1 < m->n_places; p++) {
        check_joined(m, p, ROLE_Q, ROLE_V);
        check_joined(m, p, ROLE_Q_BIAS, ROLE_V_BIAS);
        check_joined(m, p, ROLE_GATE, ROLE_UP);
        check_joined(m, p, ROLE_GATE_BIAS, ROLE_UP_BIAS);
    }
    return model_inputs_bind(m, e, err);
}
