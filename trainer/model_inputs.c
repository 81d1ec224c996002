/* trainer/model_inputs.c - what a step reads and leaves beside activations: token ids, targets,
 * positions, attention limits, losses, logits.
 *
 * Owns: one reservation in host memory (staging, losses, logits) and one on the device (what
 * operations read), for all micro-batches. Must not know: where batches come from, how visits
 * compute. Runs on the application's thread; copies are queued on the compute stream. */
#include "trainer/model_impl.h"

#include <string.h>

enum { INPUT_IDS, INPUT_TARGETS, INPUT_POSITIONS, INPUT_FIRST_KEY };

static uint64_t input_arrays(const struct model *m) { return INPUT_FIRST_KEY + m->n_windows; }
static uint64_t input_bytes(const struct model *m)
{
    return input_arrays(m) * m->tokens * sizeof(int32_t);
}
static uint64_t rope_bytes(const struct model *m) { return m->cfg.head_dim / 2 * sizeof(float); }
static uint64_t logits_bytes(const struct model *m)
{
    return m->tokens * m->cfg.vocab * sizeof(float);
}

static const int32_t *input_array(const struct model *m, uint32_t micro, uint64_t array)
{
    STK_ASSERT(micro < m->opts.n_micro);
    return (const int32_t *)((uintptr_t)m->input[micro].device +
                             array * m->tokens * sizeof(int32_t));
}
const int32_t *model_ids(const struct model *m, uint32_t micro)
{
    return input_array(m, micro, INPUT_IDS);
}
const int32_t *model_targets(const struct model *m, uint32_t micro)
{
    return input_array(m, micro, INPUT_TARGETS);
}
const int32_t *model_positions(const struct model *m, uint32_t micro)
{
    return input_array(m, micro, INPUT_POSITIONS);
}
const int32_t *model_first_key(const struct model *m, uint32_t micro, uint32_t window)
{
    return input_array(m, micro, INPUT_FIRST_KEY + window);
}

/* Both sides are carved in one order. Before there is memory: from MODEL_PREPARE_BASE, to count,
 * and so that prepare mode sees no NULL. */
static uint64_t carve_device(struct model *m, uintptr_t base)
{
    struct model_arena a = { base, 0 };
    m->inv_freq = model_take(&a, rope_bytes(m));
    for (uint32_t i = 0; i < m->opts.n_micro; i++)
        m->input[i].device = model_take(&a, input_bytes(m));
    if (m->opts.logits) m->logits_device = model_take(&a, logits_bytes(m));
    return a.used_bytes;
}

static uint64_t carve_host(struct model *m, uintptr_t base, float **inv_freq)
{
    struct model_arena a = { base, 0 };
    *inv_freq = model_take(&a, rope_bytes(m));
    m->loss = model_take(&a, m->opts.n_micro * sizeof(double));
    for (uint32_t i = 0; i < m->opts.n_micro; i++)
        m->input[i].host = model_take(&a, input_bytes(m));
    if (m->opts.logits) m->logits_host = model_take(&a, m->opts.n_micro * logits_bytes(m));
    return a.used_bytes;
}

stk_status model_inputs_reserve(struct model *m, stk_engine *e, struct stk_error *err)
{
    float *inv_freq;
    const char *owner = m->opts.logits ? "inputs and logits" : "inputs";
    stk_status st =
        stk_reserve(e, STK_ON_DEVICE, owner, carve_device(m, MODEL_PREPARE_BASE), &m->h_device);
    if (st == STK_OK)
        st = stk_reserve(e, STK_ON_HOST, owner, carve_host(m, MODEL_PREPARE_BASE, &inv_freq),
                         &m->h_host);
    return st == STK_OK ? st : stk_error_set(err, st, 0, "%s", stk_error_text(e));
}

stk_status model_inputs_bind(struct model *m, stk_engine *e, struct stk_error *err)
{
    float *inv_freq;
    carve_device(m, (uintptr_t)stk_reserved(e, m->h_device));
    carve_host(m, (uintptr_t)stk_reserved(e, m->h_host), &inv_freq);
    model_inv_freq(&m->cfg, inv_freq);
    m->stream = stk_compute_stream(e);
    return dev_copy(m->stream, m->inv_freq, inv_freq, rope_bytes(m), DEV_TO_DEVICE, err);
}

stk_status model_inputs(struct model *m, uint32_t micro, const int32_t *ids, const int32_t *targets,
                        const int32_t *position, const int32_t *first_key, struct stk_error *err)
{
    STK_ASSERT(micro < m->opts.n_micro);
    int32_t *to = m->input[micro].host;
    const uint64_t n = m->tokens;
    memcpy(to + INPUT_IDS * n, ids, n * sizeof *to);
    memcpy(to + INPUT_TARGETS * n, targets, n * sizeof *to);
    memcpy(to + INPUT_POSITIONS * n, position, n * sizeof *to);
    for (uint32_t w = 0; w < m->n_windows; w++) {
        int32_t *first = to + (INPUT_FIRST_KEY + w) * n;
        /* A token sees itself and the window - 1 tokens before it, inside its sequence. */
        for (uint64_t i = 0; i < n; i++) {
            int64_t t = (int64_t)(i % m->opts.seq),
                    limit = m->window[w] ? t - (int64_t)m->window[w] + 1 : 0;
            first[i] = first_key[i] > limit ? first_key[i] : (int32_t)limit;
        }
    }
    m->loss[micro] = 0;
    return dev_copy(m->stream, m->input[micro].device, to, input_bytes(m), DEV_TO_DEVICE, err);
}

void model_step_targets(struct model *m, uint64_t targets) { m->targets = targets; }

double model_loss_sum(struct model *m)
{
    double sum = 0;
    for (uint32_t i = 0; i < m->opts.n_micro; i++) sum += m->loss[i];
    return sum;
}

const float *model_logits(struct model *m, uint32_t micro)
{
    STK_ASSERT(m->opts.logits && micro < m->opts.n_micro);
    return m->logits_host + micro * m->tokens * m->cfg.vocab;
}
