/* tests/gpu/cuda/test_kernels_adam.c - Adam on the device has the bits of offload/adam_ref.c:
 * ordinary numbers, zeros, subnormals, huge ones, results at the edge of flushing; in every layout,
 * from any start. */
#include "tests/test.h"
#include "tests/gpu/cuda/cuda_test.h"
#include "offload/adam.h"

TEST_MAIN()

_Static_assert(sizeof(struct cuda_adam_coef) == sizeof(struct adam_coef), "the same members");

/* What a state is made of. */
enum mix { ORDINARY, ZEROS, SMALL, HUGE_ONES, ANY_BITS, MIXES };

/* A finite number. Small: on both sides of the smallest normal one. */
static float number(enum mix mix)
{
    const double u = kt_uniform();
    switch (mix) {
    case ORDINARY: return (float)u;
    case ZEROS: return kt_below(2) ? 0.0f : kt_below(2) ? -0.0f : (float)u;
    case SMALL: return (float)(u * exp2(-126 + 6 * kt_uniform()));
    case HUGE_ONES: return (float)(u * exp2(60 + 3 * kt_uniform()));
    default: {
        const uint32_t bits = (uint32_t)kt_below(1u << 16) << 16 | (uint32_t)kt_below(1u << 16);
        return (bits & 0x7f800000u) == 0x7f800000u ? 1.0f : stk_bits_f32(bits);
    }
    }
}

struct state {
    uint64_t n;
    enum adam_layout layout;
    void *param, *low, *grad, *out;
    float *m, *v;
};

static uint64_t param_bytes(const struct state *s)
{
    return s->n * (s->layout == ADAM_F32 ? 4 : 2);
}
static uint64_t low_bytes(const struct state *s)
{
    return s->layout == ADAM_BF16_SPLIT ? s->n * 2 : s->layout == ADAM_FP16 ? s->n * 4 : 0;
}

static void grad_put(struct state *s, uint64_t i, float g)
{
    const enum ops_dtype t = s->layout == ADAM_F32    ? OPS_F32
                             : s->layout == ADAM_FP16 ? OPS_FP16
                                                      : OPS_BF16;
    uint16_t *h = s->grad;
    kt_put(t, s->grad, i, (double)g);
    if (t == OPS_FP16 && (h[i] & 0x7c00) == 0x7c00) h[i] = 0x7bff;
    if (t == OPS_BF16 && (h[i] & 0x7f80) == 0x7f80) h[i] = 0x7f7f;
}

static void state_open(struct state *s, uint64_t n, enum adam_layout layout, enum mix mix)
{
    *s = (struct state){ .n = n, .layout = layout };
    s->param = kt_alloc(param_bytes(s)), s->low = kt_alloc(low_bytes(s)),
    s->out = kt_alloc(param_bytes(s));
    s->grad = kt_alloc(n * 4), s->m = kt_alloc(n * 4), s->v = kt_alloc(n * 4);
    for (uint64_t i = 0; i < n; i++) {
        const float p = number(mix);
        if (layout == ADAM_BF16_SPLIT)
            stk_split(p, (uint16_t *)s->param + i, (int16_t *)s->low + i);
        else if (layout == ADAM_FP16) ((float *)s->low)[i] = p, ((uint16_t *)s->param)[i] = 0;
        else ((float *)s->param)[i] = p;
        grad_put(s, i, number(mix));
        s->m[i] = number(mix);
        s->v[i] = fabsf(number(mix));
    }
}
static void state_close(struct state *s)
{
    free(s->param), free(s->low), free(s->out), free(s->grad), free(s->m), free(s->v);
}

/* One step on the device from the state, `want` being the reference's result. `out`: to another
 * array. */
static void device_step(const struct state *s, const struct state *want, const struct adam_coef *c,
                        bool out, uint64_t off)
{
    struct cuda_adam a = { .n = s->n, .layout = (enum cuda_adam_layout)s->layout };
    memcpy(&a.coef, c, sizeof *c);
    const uint64_t pb = param_bytes(s), lb = low_bytes(s),
                   gb = s->n * (s->layout == ADAM_F32 ? 4 : 2);
    const enum ops_dtype pt = s->layout == ADAM_F32    ? OPS_F32
                              : s->layout == ADAM_FP16 ? OPS_FP16
                                                       : OPS_BF16;
    a.param = ct_in(s->param, pb, off, "param");
    a.low_or_master = lb ? ct_in(s->low, lb, s->layout == ADAM_FP16 ? 2 * off : off, "low") : NULL;
    a.exp_avg = ct_in(s->m, s->n * 4, 2 * off, "exp_avg"),
    a.exp_avg_sq = ct_in(s->v, s->n * 4, 2 * off, "exp_avg_sq");
    a.grad = ct_const(s->grad, gb, 0, "grad");
    a.param_out = out ? ct_out(pb, off, "param_out") : NULL;
    CHECK(ct_ran(cuda_adam(NULL, &a)));
    CHECK(ct_same(OPS_F32, a.exp_avg, want->m, ct_row(s->n), "exp_avg"));
    CHECK(ct_same(OPS_F32, a.exp_avg_sq, want->v, ct_row(s->n), "exp_avg_sq"));
    CHECK(ct_same(pt, out ? a.param_out : a.param, want->param, ct_row(s->n), "param"));
    if (lb) CHECK(memcmp(a.low_or_master, want->low, lb) == 0);
    ct_free();
}

static void compare(uint64_t n, enum adam_layout layout, enum mix mix, enum adam_kind kind, int k)
{
    const struct adam_hyper hyper = { .lr = 1e-3,
                                      .beta1 = 0.9,
                                      .beta2 = 0.999,
                                      .eps = mix == SMALL ? 1e-37 : 1e-8,
                                      .weight_decay = 0.1,
                                      .kind = kind };
    struct adam_coef c;
    struct state s, want;
    adam_coef_make(&hyper, 1 + (uint64_t)k % 5, k % 2 ? 0.37 : 1.0, &c);
    kt_reseed(n * 100 + (uint64_t)k);
    state_open(&s, n, layout, mix);
    kt_reseed(n * 100 + (uint64_t)k);
    state_open(&want, n, layout, mix);
    const struct adam_span span = { .n = n,
                                    .param = want.param,
                                    .low_or_master = low_bytes(&want) ? want.low : NULL,
                                    .exp_avg = want.m,
                                    .exp_avg_sq = want.v,
                                    .grad = want.grad };
    adam_run(adam_pick("scalar"), layout, &span, &c);
    ct_order(k % CT_ORDERS);
    device_step(&s, &want, &c, k % 4 == 3, k % 2 && layout != ADAM_F32 ? 2 : 0);
    state_close(&s), state_close(&want);
}

TEST(adam_has_the_references_bits)
{
    static const uint64_t counts[] = { 1, 13, 2048, 5003 };
    int k = 0;
    for (int layout = 0; layout < ADAM_LAYOUT_N; layout++)
        for (int mix = 0; mix < MIXES; mix++)
            for (int kind = 0; kind < 2; kind++, k++)
                compare(counts[k % 4] + (mix >= SMALL ? 5003 : 0), (enum adam_layout)layout,
                        (enum mix)mix, (enum adam_kind)kind, k);
}

/* Products and sums whose exact value lies where rounding with and without gradual underflow
 * differ: m = fma(beta1, m,
 * ...) with a single operand left, around 2^-126. */
TEST(adam_flushes_at_the_processors_edge)
{
    const uint64_t n = 4096;
    struct state s, want;
    for (int k = 0; k < 2; k++) {
        struct adam_coef c = { .grad_scale = k ? 1.0f : 0.5f,
                               .beta1 = 0.99999994f,
                               .one_minus_beta1 = 0.5f,
                               .beta2 = 0.99999994f,
                               .one_minus_beta2 = 1.0f,
                               .eps = 1.0f,
                               .step_size = 1.0f,
                               .inv_sqrt_bc2 = 1.0f };
        for (int copy = 0; copy < 2; copy++) {
            struct state *t = copy ? &want : &s;
            kt_reseed((uint64_t)k);
            state_open(t, n, ADAM_F32, ZEROS);
            for (uint64_t i = 0; i < n; i++) {
                const uint32_t sign = i % 2 ? 0x80000000u : 0;
                t->m[i] = stk_bits_f32((0x00800000u + (uint32_t)kt_below(4)) | sign);
                t->v[i] = stk_bits_f32(0x00800000u + (uint32_t)kt_below(4));
                ((float *)t->param)[i] = stk_bits_f32(0x00800000u + (uint32_t)kt_below(4));
                ((float *)t->grad)[i] =
                    i % 5 ? stk_bits_f32(0x01000000u - (uint32_t)kt_below(4)) : 0.0f;
            }
        }
        const struct adam_span span = {
            .n = n, .param = want.param, .exp_avg = want.m, .exp_avg_sq = want.v, .grad = want.grad
        };
        adam_run(adam_pick("scalar"), ADAM_F32, &span, &c);
        device_step(&s, &want, &c, false, 0);
        state_close(&s), state_close(&want);
    }
}
