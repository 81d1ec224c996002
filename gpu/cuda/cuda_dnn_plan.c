/* gpu/cuda/cuda_dnn_plan.c - a graph made into a plan that can be run: which engine, with which
 * workspace.
 *
 * Owns the choice among what cuDNN's heuristics name. Must not know shapes' tables nor scratch.
 * Made on the application's thread in prepare mode, run by streams' producers, one at a time.
 *
 * Mode A's order is kept and nothing is measured: a choice that noise could change would change the
 * bits. Engines that say they are not deterministic are passed over. A run makes one descriptor
 * (the variant pack: which memory), some bytes of the host's; cuDNN has no other way. */
#include "gpu/cuda/cuda_dnn.h"

#define CONFIGS_MOST 8
#define KNOBS_MOST 64
#define NOTES_MOST 16

/* 3000 to 3999: not an error, it has none. */
static bool not_supported(cudnnStatus_t st) { return st / 1000 == 3; }

static uint32_t mix(uint32_t hash, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 16777619u; /* FNV-1a */
    return hash;
}

/* --- configurations --------------------------------------------------------------------------- */

/* Returns how many there are. */
static int64_t ask(struct dnn_graph *g, const struct dnn_card *card,
                   cudnnBackendDescriptor_t out[CONFIGS_MOST])
{
    const char *const what = "heuristics";
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    int64_t n = 0;
    cudnnBackendDescriptor_t h = dnn_new(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, what);
    dnn_set(g, h, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
            &g->graph);
    dnn_set(g, h, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    if (card->described)
        dnn_set(g, h, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                &card->described);
    dnn_finalize(g, h, what);
    for (int i = 0; i < CONFIGS_MOST; i++)
        out[i] = dnn_new(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, what);
    if (g->st != CUDNN_STATUS_SUCCESS) return 0;
    if (!dnn_good(g,
                  g->t->cudnnBackendGetAttribute(h, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, CONFIGS_MOST, &n,
                                                 out),
                  "cudnnBackendGetAttribute", what))
        return 0;
    return n < CONFIGS_MOST ? n : CONFIGS_MOST;
}

/* Reads up to `most` values; 0: there are none, or the library does not tell. */
static int64_t read_values(struct dnn_graph *g, cudnnBackendDescriptor_t d,
                           cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                           int64_t most, void *out)
{
    int64_t n = 0;
    if (g->t->cudnnBackendGetAttribute(d, name, type, most, &n, out) != CUDNN_STATUS_SUCCESS)
        return 0;
    return n < most ? n : most;
}

/* Keeps a failure: an engine whose notes cannot be read is none. */
static bool deterministic(struct dnn_graph *g, cudnnBackendDescriptor_t engine)
{
    cudnnBackendNumericalNote_t note[NOTES_MOST] = { 0 };
    int64_t n = 0;
    if (!dnn_good(g,
                  g->t->cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                                 CUDNN_TYPE_NUMERICAL_NOTE, NOTES_MOST, &n, note),
                  "cudnnBackendGetAttribute", "an engine"))
        return false;
    for (int64_t i = 0; i < n && i < NOTES_MOST; i++)
        if (note[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return false;
    return true;
}

/* Of all that makes the order of sums. */
static uint32_t knobs_hash(struct dnn_graph *g, cudnnBackendDescriptor_t config, uint32_t hash)
{
    cudnnBackendDescriptor_t knob[KNOBS_MOST] = { NULL };
    int64_t made = 0, n;
    while (made < KNOBS_MOST && g->t->cudnnBackendCreateDescriptor(
                                    CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, &knob[made]) ==
                                    CUDNN_STATUS_SUCCESS)
        made++;
    n = read_values(g, config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                    made, knob);
    for (int64_t i = 0; i < n; i++) {
        cudnnBackendKnobType_t type = (cudnnBackendKnobType_t)0;
        int64_t value = 0;
        read_values(g, knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &type);
        read_values(g, knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &value);
        hash = mix(mix(hash, &type, sizeof type), &value, sizeof value);
    }
    while (made) g->t->cudnnBackendDestroyDescriptor(knob[--made]);
    return hash;
}

/* false: the next one (g->st is as before), or a failure. */
static bool try_config(struct dnn_plan *p, const struct dnn_card *card,
                       cudnnBackendDescriptor_t config, const struct dnn_shape *s)
{
    struct dnn_graph *g = &p->g;
    const char *const what = "a plan";
    int64_t bytes = 0;
    cudnnBackendDescriptor_t engine = dnn_new(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR, "an engine");
    if (g->st != CUDNN_STATUS_SUCCESS) return false;
    p->engine = -1;
    if (read_values(g, config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                    &engine) == 1)
        read_values(g, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &p->engine);
    if (!deterministic(g, engine)) return false;
    cudnnBackendDescriptor_t plan = dnn_new(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, what);
    dnn_set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
            &config);
    if (card->described)
        dnn_set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                &card->described);
    else
        dnn_set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &card->handle);
    dnn_finalize(g, plan, what);
    if (not_supported(g->st)) {
        g->st = CUDNN_STATUS_SUCCESS;
        return false;
    }
    if (g->st != CUDNN_STATUS_SUCCESS) return false;
    if (!dnn_good(g,
                  g->t->cudnnBackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                                 CUDNN_TYPE_INT64, 1, &(int64_t){ 0 }, &bytes),
                  "cudnnBackendGetAttribute", what))
        return false;
    p->plan = plan;
    p->workspace_bytes = bytes > 0 ? (uint64_t)bytes : 0;
    p->hash = knobs_hash(
        g, config, mix(mix(2166136261u, s, sizeof *s), &p->engine, sizeof p->engine));
    return true;
}

void dnn_plan_make(struct dnn_plan *p, const struct dnn_table *t, const struct dnn_card *card,
                   const struct dnn_shape *s)
{
    cudnnBackendDescriptor_t config[CONFIGS_MOST] = { NULL };
    struct dnn_graph *g = &p->g;
    *p = (struct dnn_plan){ .engine = -1 };
    dnn_graph_make(g, t, card->described ? NULL : card->handle, s);
    const int64_t n = ask(g, card, config);
    for (int64_t i = 0; i < n && !p->plan && g->st == CUDNN_STATUS_SUCCESS; i++)
        try_config(p, card, config[i], s);
    if (not_supported(g->st)) g->st = CUDNN_STATUS_SUCCESS;
}

void dnn_plan_free(struct dnn_plan *p)
{
    dnn_graph_free(&p->g);
    p->plan = NULL;
}

/* --- running ---------------------------------------------------------------------------------- */

cudnnStatus_t dnn_plan_run(const struct dnn_plan *p, cudnnHandle_t handle,
                           void *const memory[DNN_UIDS], void *workspace, const char **call)
{
    const struct dnn_table *t = p->g.t;
    cudnnBackendDescriptor_t pack = NULL;
    int64_t uid[DNN_UIDS], n = 0;
    void *pointer[DNN_UIDS];
    for (int64_t i = 1; i < DNN_UIDS; i++) {
        if (!memory[i]) continue;
        uid[n] = i;
        pointer[n++] = memory[i];
    }
    *call = "cudnnBackendCreateDescriptor";
    cudnnStatus_t st =
        t->cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    if (st != CUDNN_STATUS_SUCCESS) return st;
#define SET(name, type, n, values)                                                           \
    if (st == CUDNN_STATUS_SUCCESS)                                                          \
        *call = "cudnnBackendSetAttribute",                                                  \
        st = t->cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_##name,               \
                                         CUDNN_TYPE_##type, n, values);
    SET(UNIQUE_IDS, INT64, n, uid)
    SET(DATA_POINTERS, VOID_PTR, n, pointer)
    SET(WORKSPACE, VOID_PTR, 1, &workspace)
#undef SET
    if (st == CUDNN_STATUS_SUCCESS) {
        *call = "cudnnBackendFinalize";
        st = t->cudnnBackendFinalize(pack);
    }
    if (st == CUDNN_STATUS_SUCCESS) {
        *call = "cudnnBackendExecute";
        st = t->cudnnBackendExecute(handle, p->plan, pack);
    }
    t->cudnnBackendDestroyDescriptor(pack);
    return st;
}
