/* tests/gpu/standin/dnn.cpp - cuDNN's C backend: descriptors, heuristics, plans, variant packs.
 *
 * What an attribute may be, how many values it has, whether it is due and when a descriptor takes no more is in one
 * table (cuDNN 9, "Backend API"; statuses as version 9.19 gives them). What a plan computes is in dnn_run.cpp.
 *
 * THREE ENGINES, in mode A's order: one whose finalizing says that it has nothing for the shape, one that says it is
 * not deterministic (and is not: each run has other bits), one that is good. Who does not go on in the list, or does
 * not read notes, is found by its bits. cards below 8.0, tensors that are not bf16 in memory, and rows of no multiple
 * of eight elements have none, and a graph below 9.0 no more than two vectors by query beside its scores. */
#include "dnn.h"
#include <cstring>
#include <set>

struct cudnnContext { cudaStream_t stream; };

namespace {

typedef std::vector<char> bytes;
struct descriptor {
    cudnnBackendDescriptorType_t type;
    bool finalized = false;
    std::map<int, bytes> value; /* by attribute */
    dnn_program program;        /* of a graph and what is made of it */
    int engine = 0;
    uint64_t workspace_bytes = 0;
};

enum { ENGINE_NONE = 11, ENGINE_LOOSE = 12, ENGINE_GOOD = 13 };
constexpr uint64_t WORKSPACE_ALIGN = 16;

struct rule {
    cudnnBackendDescriptorType_t of;
    int name;
    cudnnBackendAttributeType_t type;
    int64_t least, most; /* values */
    bool due;
};
#define OP(kind, part) CUDNN_ATTR_OPERATION_##kind##_##part, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1
const rule rules[] = {
    { CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, 1, true },
    { CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, 4, true },
    { CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, 4, true },
    { CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, 1, true },
    { CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, 1, true },
    { CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, 1, false },
    { CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, 1, false },
    { CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, 1, true },
    { CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, 1, true },
    { CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, 1, false },
    { CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, OP(POINTWISE, PW_DESCRIPTOR), true },
    { CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, OP(POINTWISE, XDESC), true },
    { CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, OP(POINTWISE, BDESC), false },
    { CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, OP(POINTWISE, TDESC), false },
    { CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, OP(POINTWISE, YDESC), true },
    { CUDNN_BACKEND_MATMUL_DESCRIPTOR, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, 1, true },
    { CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, OP(MATMUL, ADESC), true },
    { CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, OP(MATMUL, BDESC), true },
    { CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, OP(MATMUL, CDESC), true },
    { CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, OP(MATMUL, DESC), true },
    { CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, 1, true },
    { CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, 1, true },
    { CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, OP(REDUCTION, DESC), true },
    { CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, OP(REDUCTION, XDESC), true },
    { CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, OP(REDUCTION, YDESC), true },
    { CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, OP(RESHAPE, XDESC), true },
    { CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, OP(RESHAPE, YDESC), true },
    { CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, 1, true },
    { CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 50, true },
    { CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, true },
    { CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, 1, true },
    { CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, 1, true },
    { CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, true },
    { CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 1, 64, true },
    { CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 1, 64, true },
    { CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, 1, false },
};
#undef OP

std::set<descriptor *> live;
std::set<cudnnHandle_t> handles;
std::string last_error;
enum standin_dnn manner;
uint64_t runs;

struct dnn_call : card_call {
    explicit dnn_call(const char *name) : card_call(name) {}
    bool bad() const { return failed != cudaSuccess; }
    /* The plan's error is a cudnnStatus_t already. */
    cudnnStatus_t status() const { return planned ? static_cast<cudnnStatus_t>(failed) : CUDNN_STATUS_EXECUTION_FAILED; }
};

cudnnStatus_t no(cudnnStatus_t st, const char *why)
{
    last_error = why;
    return st;
}

descriptor *known(cudnnBackendDescriptor_t d)
{
    auto i = live.find(static_cast<descriptor *>(d));
    if (i != live.end()) return *i;
    trace_found(STANDIN_HANDLE, "a descriptor of cuDNN's is used that is not there, or was destroyed");
    return nullptr;
}

size_t width(cudnnBackendAttributeType_t t)
{
    switch (t) {
    case CUDNN_TYPE_BOOLEAN: return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    default: return 4;
    }
}

template <typename T> T value_of(const descriptor &d, int name, T otherwise = T())
{
    auto i = d.value.find(name);
    T v = otherwise;
    if (i != d.value.end()) memcpy(&v, i->second.data(), sizeof v);
    return v;
}
descriptor *part_of(const descriptor &d, int name) { return value_of<descriptor *>(d, name, nullptr); }

/* --- finalizing: what each kind must be */

cudnnStatus_t finalize_tensor(const descriptor &d)
{
    int64_t n[4], stride[4], align = value_of<int64_t>(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
    memcpy(n, d.value.at(CUDNN_ATTR_TENSOR_DIMENSIONS).data(), sizeof n);
    memcpy(stride, d.value.at(CUDNN_ATTR_TENSOR_STRIDES).data(), sizeof stride);
    for (int i = 0; i < 4; i++)
        if (n[i] < 1 || stride[i] < 0) return no(CUDNN_STATUS_BAD_PARAM, "a tensor's extent or stride");
    if (align < 1 || (align & (align - 1))) return no(CUDNN_STATUS_BAD_PARAM, "a tensor's alignment is no power of two");
    if (value_of<bool>(d, CUDNN_ATTR_TENSOR_IS_VIRTUAL) && value_of<bool>(d, CUDNN_ATTR_TENSOR_IS_BY_VALUE))
        return no(CUDNN_STATUS_BAD_PARAM, "a tensor by value cannot be virtual");
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize_pointwise(const descriptor &d)
{
    const int mode = value_of<int>(*part_of(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR), CUDNN_ATTR_POINTWISE_MODE);
    const bool b = part_of(d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC), t = part_of(d, CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
    const bool one = mode == CUDNN_POINTWISE_EXP || mode == CUDNN_POINTWISE_LOG || mode == CUDNN_POINTWISE_IDENTITY ||
                     mode == CUDNN_POINTWISE_GEN_INDEX;
    return b == !one && t == (mode == CUDNN_POINTWISE_BINARY_SELECT)
               ? CUDNN_STATUS_SUCCESS
               : no(CUDNN_STATUS_BAD_PARAM, "a pointwise operation has operands that its mode does not take");
}

int64_t add_tensor(dnn_program &p, const descriptor *d)
{
    if (!d) return 0;
    dnn_tensor t;
    t.uid = value_of<int64_t>(*d, CUDNN_ATTR_TENSOR_UNIQUE_ID);
    t.align = value_of<int64_t>(*d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
    t.type = value_of<cudnnDataType_t>(*d, CUDNN_ATTR_TENSOR_DATA_TYPE);
    t.is_virtual = value_of<bool>(*d, CUDNN_ATTR_TENSOR_IS_VIRTUAL);
    t.by_value = value_of<bool>(*d, CUDNN_ATTR_TENSOR_IS_BY_VALUE);
    memcpy(t.n, d->value.at(CUDNN_ATTR_TENSOR_DIMENSIONS).data(), sizeof t.n);
    memcpy(t.stride, d->value.at(CUDNN_ATTR_TENSOR_STRIDES).data(), sizeof t.stride);
    p.tensor[t.uid] = t;
    return t.uid;
}

bool add_op(dnn_program &p, const descriptor &d)
{
    dnn_op o = {};
    auto tensor = [&](int name) { return add_tensor(p, part_of(d, name)); };
    switch (d.type) {
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: {
        const descriptor &pw = *part_of(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
        o.kind = DNN_POINTWISE;
        o.mode = value_of<int>(pw, CUDNN_ATTR_POINTWISE_MODE);
        o.axis = value_of<int64_t>(pw, CUDNN_ATTR_POINTWISE_AXIS, -1);
        o.x = tensor(CUDNN_ATTR_OPERATION_POINTWISE_XDESC), o.b = tensor(CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
        o.t = tensor(CUDNN_ATTR_OPERATION_POINTWISE_TDESC), o.y = tensor(CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
        break;
    }
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
        o.kind = DNN_PRODUCT;
        o.x = tensor(CUDNN_ATTR_OPERATION_MATMUL_ADESC), o.b = tensor(CUDNN_ATTR_OPERATION_MATMUL_BDESC);
        o.y = tensor(CUDNN_ATTR_OPERATION_MATMUL_CDESC);
        break;
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
        o.kind = DNN_REDUCE;
        o.mode = value_of<int>(*part_of(d, CUDNN_ATTR_OPERATION_REDUCTION_DESC), CUDNN_ATTR_REDUCTION_OPERATOR);
        o.x = tensor(CUDNN_ATTR_OPERATION_REDUCTION_XDESC), o.y = tensor(CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
        break;
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
        o.kind = DNN_RESHAPE;
        o.x = tensor(CUDNN_ATTR_OPERATION_RESHAPE_XDESC), o.y = tensor(CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
        break;
    default: return false;
    }
    p.op.push_back(o);
    return true;
}

cudnnStatus_t finalize_graph(descriptor &d)
{
    const bytes &ops = d.value.at(CUDNN_ATTR_OPERATIONGRAPH_OPS);
    if (!handles.count(value_of<cudnnHandle_t>(d, CUDNN_ATTR_OPERATIONGRAPH_HANDLE)))
        return no(CUDNN_STATUS_BAD_PARAM, "a graph's handle");
    for (size_t i = 0; i < ops.size(); i += sizeof(descriptor *)) {
        descriptor *op;
        memcpy(&op, &ops[i], sizeof op);
        if (!add_op(d.program, *op)) return no(CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE, "a graph is made of operations");
    }
    const char *why = dnn_program_check(d.program);
    return why ? no(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, why) : CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize_plan(descriptor &d)
{
    const descriptor &config = *part_of(d, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    if (!handles.count(value_of<cudnnHandle_t>(d, CUDNN_ATTR_EXECUTION_PLAN_HANDLE)))
        return no(CUDNN_STATUS_BAD_PARAM, "a plan's handle");
    d.program = config.program;
    d.engine = config.engine;
    d.workspace_bytes = config.workspace_bytes;
    return d.engine == ENGINE_NONE ? no(CUDNN_STATUS_NOT_SUPPORTED_SHAPE, "nothing for this shape") : CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize_pack(const descriptor &d)
{
    const bytes &ids = d.value.at(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    std::set<int64_t> seen;
    if (ids.size() != d.value.at(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS).size())
        return no(CUDNN_STATUS_BAD_PARAM, "as many tensors as pointers");
    for (size_t i = 0; i < ids.size(); i += 8) {
        int64_t uid;
        memcpy(&uid, &ids[i], 8);
        if (!seen.insert(uid).second) return no(CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES, "one tensor twice");
    }
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize_kind(descriptor &d)
{
    switch (d.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR: return finalize_tensor(d);
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: return finalize_pointwise(d);
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: return finalize_graph(d);
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: return finalize_plan(d);
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR: return finalize_pack(d);
    default: return CUDNN_STATUS_SUCCESS;
    }
}

/* --- heuristics */

/* Vectors [.., .., rows, 1] in memory that operations on scores read. */
uint64_t vectors_by_query(const dnn_program &p)
{
    std::set<int64_t> seen;
    for (const dnn_op &o : p.op) {
        const dnn_tensor &y = p.tensor.at(o.y);
        if (o.kind != DNN_POINTWISE || !o.b || y.n[2] == 1 || y.n[3] == 1) continue;
        const dnn_tensor &b = p.tensor.at(o.b);
        if (!b.is_virtual && b.n[2] == y.n[2] && b.n[3] == 1) seen.insert(o.b);
    }
    return seen.size();
}

bool has_engines(const dnn_program &p)
{
    if (card.cfg.cc_major < 8 || (card.cfg.cc_major < 9 && vectors_by_query(p) > 2)) return false;
    for (const dnn_op &o : p.op) {
        if (o.kind != DNN_PRODUCT) continue;
        for (int64_t uid : { o.x, o.b, o.y }) {
            const dnn_tensor &t = p.tensor.at(uid);
            if (t.is_virtual) continue;
            if (t.type != CUDNN_DATA_BFLOAT16 || t.align < 16) return false;
            for (int k = 0; k < 4; k++)
                if (t.n[k] > 1 && t.stride[k] != 1 && t.stride[k] % 8) return false;
        }
    }
    return true;
}

/* As the real one: two bytes a score in backward, which writes three or more tensors. */
uint64_t workspace_of(const dnn_program &p)
{
    uint64_t products = 0, most = 0;
    for (const dnn_op &o : p.op) {
        const dnn_tensor &y = p.tensor.at(o.y);
        products += o.kind == DNN_PRODUCT;
        if (o.kind == DNN_PRODUCT && y.is_virtual) most = std::max(most, (uint64_t)(y.n[0] * y.n[1] * y.n[2] * y.n[3]) * 2);
    }
    return products > 2 ? most : 0;
}

cudnnStatus_t read_results(const descriptor &d, int64_t wanted, int64_t *n, void *values)
{
    static const int order[] = { ENGINE_NONE, ENGINE_LOOSE, ENGINE_GOOD };
    const dnn_program &p = part_of(d, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)->program;
    const int64_t there = has_engines(p) ? 3 : 0;
    *n = wanted ? std::min(wanted, there) : there;
    for (int64_t i = 0; wanted && i < *n; i++) {
        descriptor *c = known(static_cast<void **>(values)[i]);
        if (!c || c->type != CUDNN_BACKEND_ENGINECFG_DESCRIPTOR) return no(CUDNN_STATUS_BAD_PARAM, "results are configurations");
        c->program = p;
        c->engine = order[i];
        c->workspace_bytes = workspace_of(p);
        c->finalized = true;
    }
    return CUDNN_STATUS_SUCCESS;
}

template <typename T> cudnnStatus_t give(const T &v, int64_t wanted, int64_t *n, void *values)
{
    *n = 1;
    if (wanted > 0) memcpy(values, &v, sizeof v);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t read_engine(const descriptor &config, int64_t wanted, int64_t *n, void *values)
{
    descriptor *e = wanted > 0 ? known(static_cast<void **>(values)[0]) : nullptr;
    *n = 1;
    if (!e || e->type != CUDNN_BACKEND_ENGINE_DESCRIPTOR) return no(CUDNN_STATUS_BAD_PARAM, "an engine is wanted");
    e->engine = config.engine;
    e->finalized = true;
    return CUDNN_STATUS_SUCCESS;
}

/* One knob, which tells the engines apart. */
cudnnStatus_t read_knobs(const descriptor &config, int64_t wanted, int64_t *n, void *values)
{
    *n = 1;
    if (wanted < 1) return CUDNN_STATUS_SUCCESS;
    descriptor *k = known(static_cast<void **>(values)[0]);
    if (!k || k->type != CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR) return no(CUDNN_STATUS_BAD_PARAM, "knobs are wanted");
    k->engine = config.engine;
    k->finalized = true;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t read_attribute(const descriptor &d, int name, int64_t wanted, int64_t *n, void *values)
{
    switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: return read_results(d, wanted, n, values);
    case CUDNN_ATTR_ENGINECFG_ENGINE: return read_engine(d, wanted, n, values);
    case CUDNN_ATTR_ENGINECFG_KNOB_CHOICES: return read_knobs(d, wanted, n, values);
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX: return give((int64_t)d.engine, wanted, n, values);
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
        return give(d.engine == ENGINE_LOOSE ? CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC : CUDNN_NUMERICAL_NOTE_TENSOR_CORE,
                    wanted, n, values);
    case CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE: return give(CUDNN_KNOB_TYPE_KERNEL_CFG, wanted, n, values);
    case CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE: return give((int64_t)d.engine * 2, wanted, n, values);
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: return give((int64_t)d.workspace_bytes, wanted, n, values);
    default: return no(CUDNN_STATUS_BAD_PARAM, "an attribute that this descriptor has not");
    }
}

/* --- running */

bool aligned(const void *p, int64_t to) { return reinterpret_cast<uintptr_t>(p) % (uint64_t)to == 0; }

cudnnStatus_t gather(const descriptor &plan, const descriptor &pack, dnn_job &j)
{
    const bytes &ids = pack.value.at(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS),
                &pointers = pack.value.at(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    for (size_t i = 0; i < ids.size(); i += 8) {
        int64_t uid;
        void *p;
        memcpy(&uid, &ids[i], 8);
        memcpy(&p, &pointers[i], 8);
        auto t = j.p.tensor.find(uid);
        if (t == j.p.tensor.end() || t->second.is_virtual) return no(CUDNN_STATUS_BAD_PARAM, "a tensor that the plan has not");
        if (!p) return no(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "a tensor's memory");
        if (t->second.by_value) memcpy(&j.value[uid], p, 4);
        else if (!aligned(p, t->second.align)) return no(CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER, "a tensor's memory");
        else j.memory[uid] = p;
    }
    for (const auto &t : j.p.tensor)
        if (!t.second.is_virtual && !j.memory.count(t.first) && !j.value.count(t.first))
            return no(CUDNN_STATUS_BAD_PARAM, "a tensor has no memory");
    j.workspace = value_of<char *>(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, nullptr);
    j.workspace_bytes = plan.workspace_bytes;
    if (j.workspace_bytes && !j.workspace) return no(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "the workspace");
    return aligned(j.workspace, WORKSPACE_ALIGN) ? CUDNN_STATUS_SUCCESS
                                                 : no(CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER, "the workspace");
}

} // namespace

uint64_t dnn_live(void) { return live.size() + handles.size(); }
void dnn_reset(void) { manner = STANDIN_DNN_RIGHT; }
void standin_dnn(enum standin_dnn how) { manner = how; }

extern "C" {

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t st) { return st == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_..."; }

void cudnnGetLastErrorString(char *text, size_t n)
{
    std::unique_lock<std::recursive_mutex> lock(card_lock);
    snprintf(text, n, "%s", last_error.c_str());
}

cudnnStatus_t cudnnCreate(cudnnHandle_t *h)
{
    dnn_call call("cudnnCreate");
    if (call.bad()) return call.status();
    *h = new cudnnContext{ nullptr };
    handles.insert(*h);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t h)
{
    dnn_call call("cudnnDestroy");
    if (!handles.erase(h)) return CUDNN_STATUS_BAD_PARAM;
    delete h;
    return call.bad() ? call.status() : CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s)
{
    dnn_call call("cudnnSetStream");
    if (call.bad()) return call.status();
    if (!handles.count(h) || !card_stream_of(s)) return CUDNN_STATUS_BAD_PARAM;
    h->stream = s;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *d)
{
    dnn_call call("cudnnBackendCreateDescriptor");
    if (call.bad()) return call.status();
    descriptor *made = new descriptor();
    made->type = type;
    live.insert(made);
    *d = made;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d)
{
    dnn_call call("cudnnBackendDestroyDescriptor");
    descriptor *p = known(d);
    if (!p) return CUDNN_STATUS_BAD_PARAM;
    live.erase(p);
    delete p;
    return call.bad() ? call.status() : CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t n, const void *values)
{
    dnn_call call("cudnnBackendSetAttribute");
    if (call.bad()) return call.status();
    descriptor *p = known(d);
    if (!p || !values) return no(CUDNN_STATUS_BAD_PARAM, "no descriptor, or no values");
    if (p->finalized) return no(CUDNN_STATUS_BAD_PARAM, "the descriptor is finalized");
    for (const rule &r : rules) {
        if (r.of != p->type || r.name != name) continue;
        if (r.type != type) return no(CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE, "an attribute of another type");
        if (n < r.least || n > r.most) return no(CUDNN_STATUS_BAD_PARAM, "as many values as the attribute has");
        const char *v = static_cast<const char *>(values);
        p->value[name] = bytes(v, v + (size_t)n * width(type));
        return CUDNN_STATUS_SUCCESS;
    }
    return no(CUDNN_STATUS_BAD_PARAM, "an attribute that this descriptor has not");
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d)
{
    dnn_call call("cudnnBackendFinalize");
    if (call.bad()) return call.status();
    descriptor *p = known(d);
    if (!p || p->finalized) return no(CUDNN_STATUS_BAD_PARAM, "no descriptor, or finalized already");
    for (const rule &r : rules) {
        if (r.of != p->type) continue;
        auto v = p->value.find(r.name);
        if (v == p->value.end() && r.due) return no(CUDNN_STATUS_BAD_PARAM, "an attribute is missing");
        if (v == p->value.end() || r.type != CUDNN_TYPE_BACKEND_DESCRIPTOR) continue;
        for (size_t i = 0; i < v->second.size(); i += 8) {
            void *part;
            memcpy(&part, &v->second[i], 8);
            descriptor *q = known(part);
            if (!q) return no(CUDNN_STATUS_BAD_PARAM, "a descriptor that is not there");
            if (!q->finalized) return no(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a descriptor that is not finalized");
        }
    }
    cudnnStatus_t st = finalize_kind(*p);
    p->finalized = st == CUDNN_STATUS_SUCCESS;
    return st;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t, int64_t wanted, int64_t *n, void *values)
{
    dnn_call call("cudnnBackendGetAttribute");
    if (call.bad()) return call.status();
    const descriptor *p = known(d);
    if (!p) return CUDNN_STATUS_BAD_PARAM;
    if (!p->finalized) return no(CUDNN_STATUS_NOT_INITIALIZED, "the descriptor is not finalized");
    return read_attribute(*p, name, wanted, n, values);
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack)
{
    dnn_call call("cudnnBackendExecute");
    if (call.bad()) return call.status();
    const descriptor *p = known(plan), *v = known(pack);
    if (!p || !v || !handles.count(h)) return no(CUDNN_STATUS_BAD_PARAM, "handle, plan or variant pack");
    if (!p->finalized || !v->finalized) return no(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "plan or variant pack");
    dnn_job j;
    j.p = p->program;
    cudnnStatus_t st = gather(*p, *v, j);
    if (st != CUDNN_STATUS_SUCCESS) return st;
    CUstream_st *s = card_stream_of(h->stream);
    if (!s) return no(CUDNN_STATUS_BAD_PARAM, "the handle's stream");
    if (p->engine == ENGINE_LOOSE || manner == STANDIN_DNN_LOOSE) j.factor = 1 + (float)(runs++ % 7) * 0x1p-6f;
    else if (manner == STANDIN_DNN_WRONG) j.factor = 1.25f;
    card_op *op = card_add(s, STANDIN_PRODUCT, STANDIN_COMPUTE, 0);
    op->name = "graph of cuDNN";
    op->duration_ns = card.cfg.launch_ns + (uint64_t)((double)dnn_program_flops(j.p) / card.cfg.flops_per_s * 1e9);
    op->effect = [j](card_op &o) { dnn_job_effect(o, j); };
    card_submitted();
    return CUDNN_STATUS_SUCCESS;
}
}
