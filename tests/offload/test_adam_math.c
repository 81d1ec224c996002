/* tests/offload/test_adam_math.c - the update against its formulas in float64, and the
 * coefficients.
 *
 * The reference works in double with the betas and the decay factor as the kernels hold them,
 * rounded to fp32: a memory that is longer than asked by 1e-8 is part of the specified arithmetic,
 * wrong elements are not. */
#include "base/convert.h"
#include "base/numeric.h"
#include "base/rng.h"
#include "offload/adam.h"
#include "tests/test.h"

#include <math.h>

enum { N = 1003 };

/* path: how far the optimizer has moved the element in all; largest: the largest |p| it passed */
struct reference {
    double p[N], m[N], v[N], path[N], largest[N];
};
static struct reference ref;

static void reference_step(struct reference *r, const struct adam_hyper *h, uint64_t t,
                           const float *grad)
{
    double beta1 = (float)h->beta1, beta2 = (float)h->beta2;
    double bc1 = 1.0 - pow(beta1, (double)t), bc2 = 1.0 - pow(beta2, (double)t);
    for (int i = 0; i < N; i++) {
        double g = grad[i], p = r->p[i];
        if (h->kind == ADAM_L2)
            g += h->weight_decay * p;
        else
            p += (double)(float)-(h->lr * h->weight_decay) * p;
        r->m[i] = beta1 * r->m[i] + (1.0 - beta1) * g;
        r->v[i] = beta2 * r->v[i] + (1.0 - beta2) * g * g;
        p -= h->lr * (r->m[i] / bc1) / (sqrt(r->v[i] / bc2) + h->eps);
        r->path[i] += fabs(p - r->p[i]);
        r->p[i] = p;
        r->largest[i] = fmax(r->largest[i], fabs(p));
    }
}

/* One tensor in any layout, seen as an fp32 master. Gradients are given as floats that the layout
 * holds exactly. */
struct tensor {
    enum adam_layout layout;
    float master[N], m[N], v[N], grad_f32[N];
    uint16_t param[N], grad[N];
    int16_t low[N];
};

static void tensor_open(struct tensor *x, enum adam_layout layout, const float *p)
{
    memset(x, 0, sizeof *x);
    x->layout = layout;
    memcpy(x->master, p, sizeof x->master);
    convert_split(x->master, x->param, x->low, N);
}

static void tensor_step_as(const struct adam_kernel *k, struct tensor *x, const struct adam_coef *c,
                           const float *grad)
{
    memcpy(x->grad_f32, grad, sizeof x->grad_f32);
    if (x->layout == ADAM_BF16_SPLIT) convert_f32_to_bf16(grad, x->grad, N);
    if (x->layout == ADAM_FP16) convert_f32_to_fp16(grad, x->grad, N);
    struct adam_span s = { .n = N,
                           .param = x->layout == ADAM_F32 ? (void *)x->master : (void *)x->param,
                           .low_or_master = x->layout == ADAM_BF16_SPLIT ? (void *)x->low
                                                                         : (void *)x->master,
                           .exp_avg = x->m,
                           .exp_avg_sq = x->v,
                           .grad = x->layout == ADAM_F32 ? (void *)x->grad_f32 : (void *)x->grad };
    adam_run(k, x->layout, &s, c);
    if (x->layout == ADAM_BF16_SPLIT) convert_join(x->param, x->low, x->master, N);
}

static void tensor_step(struct tensor *x, const struct adam_hyper *h, uint64_t t, const float *grad)
{
    struct adam_coef c;
    adam_coef_make(h, t, 1.0, &c);
    tensor_step_as(adam_pick(NULL), x, &c, grad);
}

/* A gradient that changes sign at every step in half of the elements and at random in the rest,
 * over six decades; of bf16's (and fp16's) precision, so that every layout sees the same one. */
static void make_grad(struct rng *r, uint64_t t, float *grad)
{
    for (int i = 0; i < N; i++) {
        double x = rng_normal(r) * pow(10.0, -(i % 7)) * 10.0;
        if (i % 2) x = t % 2 ? fabs(x) : -fabs(x);
        uint16_t b = stk_f32_to_bf16((float)x);
        grad[i] = stk_fp16_to_f32(stk_f32_to_fp16(stk_bf16_to_f32(b)));
        grad[i] = stk_bf16_to_f32((uint16_t)(stk_f32_bits(grad[i]) >> 16));
    }
}

static void make_params(struct rng *r, double typical, float *p)
{
    for (int i = 0; i < N; i++) p[i] = (float)(rng_normal(r) * typical);
}

static bool same_bits(const struct tensor *a, const struct tensor *b)
{
    return memcmp(a->master, b->master, sizeof a->master) == 0 &&
           memcmp(a->m, b->m, sizeof a->m) == 0 && memcmp(a->v, b->v, sizeof a->v) == 0;
}

static struct adam_hyper hyper(enum adam_kind kind, double weight_decay)
{
    return (struct adam_hyper){ .lr = 1e-3,
                                .beta1 = 0.9,
                                .beta2 = 0.999,
                                .eps = 1e-8,
                                .weight_decay = weight_decay,
                                .kind = kind };
}

/* How the error after 1,000 steps is bounded. A parameter that crosses zero has no relative error
 * of its own there, so the error is measured against the larger of |p| and the distance that the
 * optimizer moved the element in all, sum |p_t - p_(t-1)|: at most 1e-6 of it where the optimizer
 * made the value (`small`: it starts at a tenth of the distance; no decay). Where a large value is
 * moved little, storing it in fp32 rounds it 1,000 times, a random walk that no arithmetic avoids:
 * five standard deviations of it, 5 * sqrt(1000 / 12) ulp, are allowed for then. */
static void check_error(const struct tensor *x, bool small)
{
    double worst = 0.0, worst_plain = 0.0, worst_walk = 0.0;
    for (int i = 0; i < N; i++) {
        double error = fabs((double)x->master[i] - ref.p[i]),
               size = fmax(fabs(ref.p[i]), ref.path[i]);
        double ulp = ldexp(1.0, ilogb(ref.largest[i]) - 23);
        worst = fmax(worst, error / size);
        worst_plain = fmax(worst_plain, error / fabs(ref.p[i]));
        worst_walk = fmax(worst_walk, error / (1e-6 * size + 5.0 * sqrt(1000.0 / 12.0) * ulp));
    }
    printf("# layout %d: max error %.3g of max(|p|, path), %.3g of |p| alone, %.3g of the walk's "
           "bound\n",
           (int)x->layout, worst, worst_plain, worst_walk);
    CHECK(worst_walk <= 1.0);
    if (small) CHECK(worst <= 1e-6);
}

static void thousand_steps_from(const struct adam_kernel *k, enum adam_layout layout,
                                const struct adam_hyper *h, double size)
{
    static struct tensor x;
    static float p[N], grad[N];
    struct rng r;
    rng_seed_stream(&r, test_seed(), 1);
    make_params(&r, size, p);
    tensor_open(&x, layout, p);
    memset(&ref, 0, sizeof ref);
    for (int i = 0; i < N; i++) ref.p[i] = p[i];
    for (uint64_t t = 1; t <= 1000; t++) {
        struct adam_coef c;
        make_grad(&r, t, grad);
        adam_coef_make(h, t, 1.0, &c);
        tensor_step_as(k, &x, &c, grad);
        reference_step(&ref, h, t, grad);
    }
    check_error(&x, size < 0.01 && h->weight_decay == 0.0);
    double worst_m = 0.0, worst_v = 0.0;
    for (int i = 0; i < N; i++) {
        worst_m = fmax(worst_m, fabs(x.m[i] - ref.m[i]) / sqrt(ref.v[i]));
        worst_v = fmax(worst_v, fabs(x.v[i] - ref.v[i]) / ref.v[i]);
    }
    printf("# exp_avg %.3g of sqrt(exp_avg_sq), exp_avg_sq %.3g\n", worst_m, worst_v);
    CHECK(worst_m <= 1e-6);
    CHECK(worst_v <= 4e-6); /* its memory is 1,000 roundings long */
}

static void thousand_steps(const struct adam_kernel *k, enum adam_layout layout,
                           const struct adam_hyper *h)
{
    thousand_steps_from(k, layout, h, 0.002);
    thousand_steps_from(k, layout, h, 0.02);
    /* Not with decay: a slowly moving p times the same factor is rounded to the same side again and
     * again. */
    if (h->weight_decay == 0.0) thousand_steps_from(k, layout, h, 1.0);
}

TEST(adam_adm_05_float64_f32)
{
    struct adam_hyper h = hyper(ADAM_ADAMW, 0.01);
    thousand_steps(adam_pick(NULL), ADAM_F32, &h);
    h.weight_decay = 0.0;
    thousand_steps(adam_pick("scalar"), ADAM_F32, &h);
}
TEST(adam_adm_05_float64_bf16_split)
{
    struct adam_hyper h = hyper(ADAM_ADAMW, 0.01);
    thousand_steps(adam_pick(NULL), ADAM_BF16_SPLIT, &h);
    h.weight_decay = 0.0;
    thousand_steps(adam_pick(NULL), ADAM_BF16_SPLIT, &h);
}
TEST(adam_adm_05_float64_fp16)
{
    struct adam_hyper h = hyper(ADAM_ADAMW, 0.0);
    thousand_steps(adam_pick(NULL), ADAM_FP16, &h);
}
TEST(adam_adm_05_float64_l2)
{
    struct adam_hyper h = hyper(ADAM_L2, 0.01);
    thousand_steps(adam_pick(NULL), ADAM_F32, &h);
}

/* fp32 and split mode see the same gradients: the split loses nothing, so they are one trajectory.
 */
TEST(adam_split_is_the_fp32_master)
{
    static struct tensor a, b;
    static float p[N], grad[N];
    struct rng r;
    rng_seed_stream(&r, test_seed(), 2);
    make_params(&r, 0.02, p);
    tensor_open(&a, ADAM_F32, p);
    tensor_open(&b, ADAM_BF16_SPLIT, p);
    struct adam_hyper h = hyper(ADAM_ADAMW, 0.1);
    for (uint64_t t = 1; t <= 50; t++) {
        make_grad(&r, t, grad);
        tensor_step(&a, &h, t, grad);
        tensor_step(&b, &h, t, grad);
        REQUIRE(same_bits(&a, &b));
    }
    static struct tensor c; /* fp16: the master is the same, the parameter its nearest half */
    tensor_open(&c, ADAM_FP16, p);
    make_grad(&r, 1, grad);
    tensor_step(&c, &h, 1, grad);
    for (int i = 0; i < N; i++) CHECK(c.param[i] == stk_f32_to_fp16(c.master[i]));
}

/* The same tensor in groups 1 and 7 of eight, whose other groups have other hyperparameters, at
 * other step counts. */
TEST(adam_adm_01_groups_do_not_influence_each_other)
{
    static struct tensor g[8];
    static float p[N], grad[N];
    struct rng r;
    rng_seed_stream(&r, test_seed(), 3);
    make_params(&r, 0.02, p);
    for (int j = 0; j < 8; j++) tensor_open(&g[j], ADAM_BF16_SPLIT, p);
    for (uint64_t t = 1; t <= 1000; t++) {
        make_grad(&r, t, grad);
        for (int j = 0; j < 8; j++) {
            struct adam_hyper h = hyper(ADAM_ADAMW, 0.01);
            bool other = j != 1 && j != 7;
            if (other) h.lr *= j + 2, h.weight_decay = 0.02 * j, h.beta2 = 0.95;
            tensor_step(&g[j], &h, other ? t + (uint64_t)j : t, grad);
        }
        if (t == 1 || t == 2 || t == 10 || t == 1000) {
            CHECK(same_bits(&g[1], &g[7]));
            CHECK(!same_bits(&g[1], &g[2]));
        }
    }
}

/* 50 steps round p 100 times, to the same side at worst: 100 half ulps of 2^-23 are 6e-6; a wrong
 * step count or formula is off by 1e-3 and more. */
#define SHORT_RUN 6e-6

static double worst_against_reference(const struct tensor *x)
{
    double worst = 0.0;
    for (int i = 0; i < N; i++)
        worst = fmax(worst, fabs(x->master[i] - ref.p[i]) / fmax(fabs(ref.p[i]), ref.path[i]));
    return worst;
}

TEST(adam_adm_01_step_count_may_jump)
{
    static struct tensor x;
    static float p[N], grad[N];
    struct rng r;
    rng_seed_stream(&r, test_seed(), 4);
    make_params(&r, 0.02, p);
    tensor_open(&x, ADAM_F32, p);
    memset(&ref, 0, sizeof ref);
    for (int i = 0; i < N; i++) ref.p[i] = p[i];
    struct adam_hyper h = hyper(ADAM_ADAMW, 0.01);
    static const uint64_t counts[] = { 1, 2, 5, 6, 100 };
    for (int j = 0; j < 5; j++) {
        make_grad(&r, (uint64_t)j, grad);
        tensor_step(&x, &h, counts[j], grad);
        reference_step(&ref, &h, counts[j], grad);
        CHECK(worst_against_reference(&x) <= SHORT_RUN);
    }
}

/* B has a gradient on odd steps only: its count is its own, as in torch, where the state's step
 * advances with the tensor. */
TEST(adam_adm_02_a_tensors_own_step_count)
{
    static struct tensor a, b;
    static float p[N], grad[N];
    struct rng r;
    rng_seed_stream(&r, test_seed(), 5);
    make_params(&r, 0.02, p);
    tensor_open(&a, ADAM_F32, p);
    tensor_open(&b, ADAM_F32, p);
    memset(&ref, 0, sizeof ref);
    for (int i = 0; i < N; i++) ref.p[i] = p[i];
    struct adam_hyper h = hyper(ADAM_ADAMW, 0.1);
    uint64_t count_b = 0;
    for (uint64_t step = 1; step <= 100; step++) {
        make_grad(&r, step, grad);
        tensor_step(&a, &h, step, grad);
        if (step % 2 == 0) continue; /* left alone: no decay, no moment decay */
        tensor_step(&b, &h, ++count_b, grad);
        reference_step(&ref, &h, count_b, grad);
    }
    CHECK(count_b == 50);
    CHECK(worst_against_reference(&b) <= SHORT_RUN);
    CHECK(worst_against_reference(&a) > 1e-3);
}

/* Weight decay 0.1 in both modes, 20 steps, each against its own formula; they must differ by far
 * more than rounding. */
TEST(adam_adm_08_adam_is_not_adamw)
{
    static struct tensor x[2];
    static float p[N], grad[N];
    for (int kind = 0; kind < 2; kind++) {
        struct rng r;
        rng_seed_stream(&r, test_seed(), 6);
        make_params(&r, 1.0, p);
        tensor_open(&x[kind], ADAM_F32, p);
        memset(&ref, 0, sizeof ref);
        for (int i = 0; i < N; i++) ref.p[i] = p[i];
        struct adam_hyper h = hyper(kind ? ADAM_L2 : ADAM_ADAMW, 0.1);
        for (uint64_t t = 1; t <= 20; t++) {
            make_grad(&r, t, grad);
            tensor_step(&x[kind], &h, t, grad);
            reference_step(&ref, &h, t, grad);
        }
        CHECK(worst_against_reference(&x[kind]) <= SHORT_RUN);
    }
    int differ = 0;
    for (int i = 0; i < N; i++) differ += fabsf(x[0].master[i] - x[1].master[i]) > 1e-4f;
    CHECK(differ > N / 2);
}

/* The clip factor and the loss scale come in through grad_scale: a power of two is the same as a
 * scaled gradient bit for bit, any factor in (0, 1] within rounding, and no factor turns an update
 * around. */
TEST(adam_mpx_08_grad_scale)
{
    static const double factors[] = { 1.0, 0.5, 0.3, 1e-3, 1.0 / 65536, 1e-30 };
    static struct tensor a, b;
    static float p[N], grad[N], scaled[N];
    struct rng r;
    rng_seed_stream(&r, test_seed(), 7);
    make_params(&r, 0.02, p);
    make_grad(&r, 1, grad);
    struct adam_hyper h = hyper(ADAM_ADAMW, 0.0);
    for (int j = 0; j < 6; j++) {
        struct adam_coef c;
        adam_coef_make(&h, 1, factors[j], &c);
        CHECK(c.grad_scale == (float)factors[j]);
        tensor_open(&a, ADAM_F32, p);
        tensor_open(&b, ADAM_F32, p);
        tensor_step_as(adam_pick(NULL), &a, &c, grad);
        for (int i = 0; i < N; i++) scaled[i] = grad[i] * (float)factors[j];
        tensor_step(&b, &h, 1, scaled);
        CHECK(same_bits(&a, &b));
        for (int i = 0; i < N; i++) CHECK(!((a.master[i] - p[i]) * grad[i] > 0.0f));
    }
}

TEST(adam_coefficients)
{
    static const uint64_t counts[] = { 1, 2, 3, 10, 1000, 100000, 1000000 };
    struct adam_hyper h = { .lr = 3e-4,
                            .beta1 = 0.9,
                            .beta2 = 0.999,
                            .eps = 1e-8,
                            .weight_decay = 0.1,
                            .kind = ADAM_ADAMW };
    struct adam_coef c;
    for (int j = 0; j < 7; j++) {
        adam_coef_make(&h, counts[j], 1.0, &c);
        double bc1 = 1.0 - pow((double)0.9f, (double)counts[j]),
               bc2 = 1.0 - pow((double)0.999f, (double)counts[j]);
        CHECK(fabs(c.step_size - 3e-4 / bc1) <= 6e-8 * c.step_size);
        CHECK(fabs(c.inv_sqrt_bc2 - 1.0 / sqrt(bc2)) <= 6e-8 * c.inv_sqrt_bc2);
    }
    CHECK(c.decay == (float)-(3e-4 * 0.1) && c.l2 == 0.0f && c.eps == 1e-8f);
    adam_coef_make(&h, UINT64_MAX, 0.25, &c);
    CHECK(c.step_size == (float)3e-4 && c.inv_sqrt_bc2 == 1.0f && c.grad_scale == 0.25f);
    h.kind = ADAM_L2;
    adam_coef_make(&h, 1, 1.0, &c);
    CHECK(c.decay == 0.0f && c.l2 == 0.1f);
    h.beta1 = h.beta2 = 0.0; /* sign-like: no memory */
    adam_coef_make(&h, 1, 1.0, &c);
    CHECK(c.one_minus_beta1 == 1.0f && c.step_size == (float)3e-4 && c.inv_sqrt_bc2 == 1.0f);
}

TEST_MAIN()
