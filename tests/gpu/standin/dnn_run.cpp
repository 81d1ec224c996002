/* tests/gpu/standin/dnn_run.cpp - a graph of cuDNN's operations computed one operation after the other.
 *
 * Every tensor is an array of f32 that its strides lead through; a virtual one, too, and is rounded to its type. So
 * nothing here knows that a graph is attention: what comes out is what the graph says. Sums in f64. */
#include "dnn.h"
#include <cmath>
#include <cstring>
#include <limits>

namespace {

uint64_t width(cudnnDataType_t t) { return t == CUDNN_DATA_BFLOAT16 || t == CUDNN_DATA_HALF ? 2 : t == CUDNN_DATA_BOOLEAN ? 1 : 4; }

uint16_t to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (std::isnan(f)) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float of_bf16(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

struct array {
    const dnn_tensor *t;
    std::vector<float> v; /* by strides */
};
typedef std::map<int64_t, array> arrays;

uint64_t extent(const dnn_tensor &t)
{
    int64_t last = 0;
    for (int i = 0; i < 4; i++) last += (t.n[i] - 1) * t.stride[i];
    return (uint64_t)last + 1;
}

template <typename F> void each(const int64_t n[4], F f)
{
    int64_t i[4];
    for (i[0] = 0; i[0] < n[0]; i[0]++)
        for (i[1] = 0; i[1] < n[1]; i[1]++)
            for (i[2] = 0; i[2] < n[2]; i[2]++)
                for (i[3] = 0; i[3] < n[3]; i[3]++) f(i);
}

/* Where index i of a tensor of extents n is in t: extents of 1 are repeated, and heads are shared by groups. */
uint64_t place(const dnn_tensor &t, const int64_t i[4], const int64_t n[4])
{
    int64_t at = 0;
    for (int k = 0; k < 4; k++) at += (t.n[k] == n[k] ? i[k] : i[k] * t.n[k] / n[k]) * t.stride[k];
    return (uint64_t)at;
}

float rounded(const dnn_tensor &t, double x)
{
    return t.type == CUDNN_DATA_BFLOAT16 ? of_bf16(to_bf16((float)x)) : (float)x;
}

double pointwise_of(int mode, double x, double b, bool t)
{
    switch (mode) {
    case CUDNN_POINTWISE_ADD: return x + b;
    case CUDNN_POINTWISE_MUL: return x * b;
    case CUDNN_POINTWISE_DIV: return x / b;
    case CUDNN_POINTWISE_SUB: return x - b;
    case CUDNN_POINTWISE_EXP: return std::exp(x);
    case CUDNN_POINTWISE_LOG: return std::log(x);
    case CUDNN_POINTWISE_CMP_GE: return x >= b;
    case CUDNN_POINTWISE_CMP_LT: return x < b;
    case CUDNN_POINTWISE_BINARY_SELECT: return t ? x : b;
    default: return x;
    }
}

void run_pointwise(const dnn_op &o, arrays &a)
{
    array &y = a.at(o.y);
    const array &x = a.at(o.x), *b = o.b ? &a.at(o.b) : nullptr, *t = o.t ? &a.at(o.t) : nullptr;
    const int64_t *n = y.t->n;
    each(n, [&](const int64_t i[4]) {
        double r = o.mode == CUDNN_POINTWISE_GEN_INDEX
                       ? (double)i[o.axis]
                       : pointwise_of(o.mode, x.v[place(*x.t, i, n)], b ? b->v[place(*b->t, i, n)] : 0,
                                      t && t->v[place(*t->t, i, n)] != 0);
        y.v[place(*y.t, i, n)] = rounded(*y.t, r);
    });
}

void run_product(const dnn_op &o, arrays &arr)
{
    array &y = arr.at(o.y);
    const array &a = arr.at(o.x), &b = arr.at(o.b);
    const int64_t *n = y.t->n, depth = a.t->n[3];
    each(n, [&](const int64_t i[4]) {
        double sum = 0;
        const int64_t ha = i[1] * a.t->n[1] / n[1], hb = i[1] * b.t->n[1] / n[1];
        for (int64_t k = 0; k < depth; k++)
            sum += (double)a.v[(uint64_t)(i[0] * a.t->stride[0] + ha * a.t->stride[1] + i[2] * a.t->stride[2] + k * a.t->stride[3])] *
                   b.v[(uint64_t)(i[0] * b.t->stride[0] + hb * b.t->stride[1] + k * b.t->stride[2] + i[3] * b.t->stride[3])];
        y.v[place(*y.t, i, n)] = rounded(*y.t, sum);
    });
}

void run_reduce(const dnn_op &o, arrays &a)
{
    array &y = a.at(o.y);
    const array &x = a.at(o.x);
    const bool most = o.mode == CUDNN_REDUCE_TENSOR_MAX;
    std::vector<double> sum(y.v.size(), most ? -std::numeric_limits<double>::infinity() : 0);
    each(x.t->n, [&](const int64_t i[4]) {
        double v = x.v[place(*x.t, i, x.t->n)], &s = sum[place(*y.t, i, x.t->n)];
        s = most ? std::max(s, v) : s + v;
    });
    for (size_t i = 0; i < sum.size(); i++) y.v[i] = rounded(*y.t, sum[i]);
}

/* The same elements in the same order of memory, with other names. */
void run_reshape(const dnn_op &o, arrays &a)
{
    array &y = a.at(o.y);
    const array &x = a.at(o.x);
    for (size_t i = 0; i < y.v.size(); i++) y.v[i] = rounded(*y.t, x.v[i]);
}

/* Runs of elements that lie beside one another. */
template <typename F> void each_run(const dnn_tensor &t, F f)
{
    int inner = 3;
    for (int k = 0; k < 4; k++)
        if (t.stride[k] == 1 && t.n[k] > t.n[inner]) inner = k;
    if (t.stride[inner] != 1) inner = 3;
    int64_t n[4] = { t.n[0], t.n[1], t.n[2], t.n[3] };
    const int64_t length = t.stride[inner] == 1 ? n[inner] : 1;
    if (length > 1) n[inner] = 1;
    each(n, [&](const int64_t i[4]) {
        int64_t at = 0;
        for (int k = 0; k < 4; k++) at += i[k] * t.stride[k];
        f((uint64_t)at, (uint64_t)length);
    });
}

bool load(card_op &op, const dnn_tensor &t, const char *p, array &out)
{
    bool good = true;
    each_run(t, [&](uint64_t at, uint64_t n) {
        if (!good || !(good = memory_use(op, "an input of a graph", p + at * width(t.type), n * width(t.type), false))) return;
        for (uint64_t i = at; i < at + n; i++) {
            uint16_t h;
            int32_t w;
            if (t.type == CUDNN_DATA_BFLOAT16) memcpy(&h, p + 2 * i, 2), out.v[i] = of_bf16(h);
            else if (t.type == CUDNN_DATA_INT32) memcpy(&w, p + 4 * i, 4), out.v[i] = (float)w;
            else memcpy(&out.v[i], p + 4 * i, 4);
        }
    });
    return good;
}

bool store(card_op &op, const dnn_tensor &t, char *p, const array &in)
{
    bool good = true;
    each_run(t, [&](uint64_t at, uint64_t n) {
        if (!good || !(good = memory_use(op, "a result of a graph", p + at * width(t.type), n * width(t.type), true))) return;
        for (uint64_t i = at; i < at + n; i++) {
            uint16_t h = to_bf16(in.v[i]);
            if (t.type == CUDNN_DATA_BFLOAT16) memcpy(p + 2 * i, &h, 2);
            else memcpy(p + 4 * i, &in.v[i], 4);
        }
    });
    return good;
}

bool is_written(const dnn_program &p, int64_t uid)
{
    for (const dnn_op &o : p.op)
        if (o.y == uid) return true;
    return false;
}

void run_op(const dnn_op &o, arrays &a)
{
    switch (o.kind) {
    case DNN_POINTWISE: run_pointwise(o, a); break;
    case DNN_PRODUCT: run_product(o, a); break;
    case DNN_REDUCE: run_reduce(o, a); break;
    case DNN_RESHAPE: run_reshape(o, a); break;
    }
}

/* x's extent is t's, or t's is 1. */
bool broadcasts(const dnn_tensor &t, const dnn_tensor &y)
{
    for (int k = 0; k < 4; k++)
        if (t.n[k] != y.n[k] && t.n[k] != 1) return false;
    return true;
}

bool product_shape(const dnn_tensor &a, const dnn_tensor &b, const dnn_tensor &c)
{
    return a.n[0] == c.n[0] && b.n[0] == c.n[0] && a.n[2] == c.n[2] && b.n[3] == c.n[3] && a.n[3] == b.n[2] &&
           c.n[1] % a.n[1] == 0 && c.n[1] % b.n[1] == 0;
}

} // namespace

const char *dnn_program_check(const dnn_program &p)
{
    std::map<int64_t, bool> there;
    for (const auto &t : p.tensor) there[t.first] = !t.second.is_virtual && !is_written(p, t.first);
    for (const dnn_op &o : p.op) {
        for (int64_t uid : { o.x, o.b, o.t })
            if (uid && !there[uid]) return "an operation reads a tensor that none before it has made";
        if (there[o.y]) return "two operations write one tensor";
        const dnn_tensor &x = p.tensor.at(o.x), &y = p.tensor.at(o.y);
        if (o.kind == DNN_PRODUCT && !product_shape(x, p.tensor.at(o.b), y)) return "a product's extents do not match";
        if (o.kind == DNN_POINTWISE)
            for (int64_t uid : { o.x, o.b, o.t })
                if (uid && !broadcasts(p.tensor.at(uid), y)) return "a pointwise operation's extents do not match";
        if (o.kind == DNN_REDUCE)
            for (int k = 0; k < 4; k++)
                if (x.n[k] % y.n[k]) return "a reduction's extents do not match";
        if (o.kind == DNN_RESHAPE && extent(x) != extent(y)) return "a reshape's extents do not match";
        there[o.y] = true;
    }
    return nullptr;
}

uint64_t dnn_program_flops(const dnn_program &p)
{
    uint64_t sum = 0;
    for (const dnn_op &o : p.op) {
        const dnn_tensor &y = p.tensor.at(o.y);
        if (o.kind == DNN_PRODUCT) sum += (uint64_t)(2 * y.n[0] * y.n[1] * y.n[2] * y.n[3] * p.tensor.at(o.x).n[3]);
    }
    return sum;
}

void dnn_job_effect(card_op &op, const dnn_job &j)
{
    arrays a;
    for (const auto &t : j.p.tensor) {
        array &x = a[t.first] = array{ &t.second, std::vector<float>(extent(t.second), std::nanf("")) };
        if (t.second.by_value) x.v[0] = j.value.at(t.first);
        else if (!t.second.is_virtual && !is_written(j.p, t.first) &&
                 !load(op, t.second, static_cast<const char *>(j.memory.at(t.first)), x))
            return;
    }
    if (j.workspace_bytes) {
        if (!memory_use(op, "workspace", j.workspace, j.workspace_bytes, true)) return;
        memset(j.workspace, 0xff, j.workspace_bytes);
    }
    for (const dnn_op &o : j.p.op) run_op(o, a);
    for (auto &x : a) {
        const dnn_tensor &t = *x.second.t;
        if (t.is_virtual || !is_written(j.p, x.first)) continue;
        for (float &v : x.second.v) v *= j.factor;
        if (!store(op, t, static_cast<char *>(j.memory.at(x.first)), x.second)) return;
    }
}
