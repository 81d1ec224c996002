/* tests/offload/test_adam_device.c - ops_adam on every host kind of device: the bits of adam_run, span by
 * span, for any number of threads; what is in no span stays; what is refused. And a chunk's spans. */
#include "tests/test.h"
#include "base/rng.h"
#include "gpu/device.h"
#include "offload/adam_device.h"

enum { N_MAX = 70000, SPANS_MAX = 6, STATE_BYTES = 4 + 4 + 4 + 4 + 4 };

struct arrays { uint8_t *base, *param, *low, *m, *v, *g; };

static struct arrays arrays_at(uint8_t *p, uint64_t n)
{
    n = (n + 63) / 64 * 64;
    return (struct arrays){ p, p, p + 4 * n, p + 8 * n, p + 12 * n, p + 16 * n };
}

/* Finite values of every size, subnormals among them; moments as they may be. */
static void fill(struct rng *r, const struct arrays *a, uint64_t n, enum ops_adam_layout layout)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t x = (uint32_t)rng_next(r), bits = (x & 0x807fffffu) | (110 + x % 24) << 23;
        if (x % 97 == 0) bits = x & 0x807fffffu;
        float f, v = 1e-4f * (float)(x % 1000), g;
        memcpy(&f, &bits, 4);
        memcpy(a->m + 4 * i, &f, 4);
        memcpy(a->v + 4 * i, &v, 4);
        g = f / 2;
        if (layout == OPS_ADAM_F32) {
            memcpy(a->param + 4 * i, &f, 4);
            memcpy(a->g + 4 * i, &g, 4);
            continue;
        }
        uint16_t half = layout == OPS_ADAM_BF16_SPLIT ? (uint16_t)(bits >> 16) : (uint16_t)(x & 0x3bffu);
        memcpy(a->param + 2 * i, &half, 2);
        memcpy(a->g + 2 * i, &half, 2);
        uint16_t low = (uint16_t)rng_next(r);
        if (layout == OPS_ADAM_BF16_SPLIT) memcpy(a->low + 2 * i, &low, 2);
        else memcpy(a->low + 4 * i, &f, 4);
    }
}

static struct ops_adam ops_of(const struct arrays *a, uint64_t n, enum ops_adam_layout layout)
{
    return (struct ops_adam){ .n = n, .layout = layout, .param = a->param,
                              .low_or_master = layout == OPS_ADAM_F32 ? NULL : a->low,
                              .exp_avg = (float *)(void *)a->m,
                              .exp_avg_sq = (float *)(void *)a->v, .grad = a->g };
}

/* Each with a step count, a clip factor and a decay of its own; gaps between some. */
static uint32_t make_spans(struct rng *r, uint64_t n, struct ops_adam_span *out)
{
    uint32_t k = 0;
    for (uint64_t at = 0; at < n && k < SPANS_MAX; k++) {
        struct adam_hyper h = { .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8,
                                .weight_decay = k % 2 ? 0.01 : 0, .kind = k % 3 ? ADAM_ADAMW : ADAM_L2 };
        struct adam_coef c;
        adam_coef_make(&h, 1 + rng_below(r, 1000), 1.0 / (double)(1 + rng_below(r, 5)), &c);
        uint64_t len = k + 1 == SPANS_MAX ? n - at : 1 + rng_below(r, n - at);
        out[k] = (struct ops_adam_span){ .first = at, .n = len };
        memcpy(&out[k].coef, &c, sizeof c);
        at += len + (k % 2) * 3;
    }
    return k;
}

static void reference(const struct ops_adam *a, const struct ops_adam_span *spans, uint32_t n_spans)
{
    static const enum adam_layout layout[] = { ADAM_BF16_SPLIT, ADAM_FP16, ADAM_F32 };
    const struct adam_kernel *k = adam_pick("scalar");
    uint64_t word = a->layout == OPS_ADAM_F32 ? 4 : 2, first = a->layout == OPS_ADAM_FP16 ? 4 : 2;
    for (uint32_t i = 0; i < n_spans; i++) {
        struct adam_coef c;
        uint64_t f = spans[i].first;
        memcpy(&c, &spans[i].coef, sizeof c);
        adam_run(k, layout[a->layout],
                 &(struct adam_span){ .n = spans[i].n, .param = (uint8_t *)a->param + word * f,
                                      .low_or_master = a->low_or_master ? (uint8_t *)a->low_or_master + first * f : NULL,
                                      .exp_avg = a->exp_avg + f, .exp_avg_sq = a->exp_avg_sq + f,
                                      .grad = (const uint8_t *)a->grad + word * f },
                 &c);
    }
}

struct rig { struct exec *ex; struct dev *d; struct dev_stream *s; struct stk_error err; uint8_t *arena; };

static bool rig_open(struct rig *r, enum dev_kind kind, uint32_t threads, dev_adam_fn *fn)
{
    *r = (struct rig){ 0 };
    bool sim = kind == DEV_SIM;
    struct dev_cfg cfg = { .kind = kind, .memory_bytes = 4u << 20, .compute_threads = threads,
                           .matmul = DEV_MATMUL_F32, .adam = fn };
    void *p;
    stk_status st = sim ? exec_open_sim(test_seed(), &r->ex, &r->err) : exec_open_threads(&r->ex, &r->err);
    cfg.ex = r->ex;
    if (st == STK_OK) st = dev_open(&cfg, &r->d, &r->err);
    if (st == STK_OK) st = dev_stream_open(r->d, "update", 0, &r->s, &r->err);
    if (st == STK_OK) st = dev_reserve(r->d, 4u << 20, &p, &r->err);
    r->arena = st == STK_OK ? p : NULL;
    return st == STK_OK;
}

static void rig_close(struct rig *r)
{
    dev_stream_close(r->s);
    dev_close(r->d);
    exec_close(r->ex);
}

static void compare(struct rig *r, enum ops_adam_layout layout, uint64_t n, struct rng *rng)
{
    uint64_t bytes = (n + 63) / 64 * 64 * STATE_BYTES;
    uint8_t *want = calloc(1, bytes + 64), *got = calloc(1, bytes + 64);
    struct arrays w = arrays_at(want, n), d = arrays_at(r->arena, n);
    struct ops_adam_span spans[SPANS_MAX];
    fill(rng, &w, n, layout);
    uint32_t n_spans = make_spans(rng, n, spans);
    struct ops_adam host = ops_of(&w, n, layout), dev = ops_of(&d, n, layout);
    dev.spans = spans;
    dev.n_spans = n_spans;
    CHECK_OK(dev_copy(r->s, r->arena, want, bytes, DEV_TO_DEVICE, &r->err), &r->err);
    CHECK_OK(dev_sync(r->s, &r->err), &r->err); /* want changes now */
    for (int step = 0; step < 2; step++) {
        reference(&host, spans, n_spans);
        CHECK_OK(ops_adam(r->s, &dev, &r->err), &r->err);
    }
    CHECK_OK(dev_copy(r->s, got, r->arena, bytes, DEV_TO_HOST, &r->err), &r->err);
    CHECK_OK(dev_sync(r->s, &r->err), &r->err);
    if (memcmp(want, got, bytes)) {
        printf("# layout %d, %llu elements, %u spans\n", layout, (unsigned long long)n, n_spans);
        test_fail(__FILE__, __LINE__, "not the bits of adam_run");
    }
    free(want);
    free(got);
}

TEST(ops_adam_has_the_bits_of_adam_on_every_host_kind)
{
    static const uint64_t sizes[] = { 1, 63, 64, 1009, 16384, 16385, N_MAX };
    static const struct { enum dev_kind kind; uint32_t threads; } kinds[] = {
        { DEV_HOST, 1 }, { DEV_HOST_DISCRETE, 3 }, { DEV_SIM, 2 }
    };
    struct rng rng;
    rng_seed(&rng, test_seed());
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        struct rig r;
        REQUIRE(rig_open(&r, kinds[k].kind, kinds[k].threads, adam_device_run));
        for (int layout = 0; layout < OPS_ADAM_LAYOUT_N; layout++)
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
                compare(&r, (enum ops_adam_layout)layout, sizes[i], &rng);
        struct dev_work work[DEV_WORK_MAX];
        bool row = false;
        for (uint32_t i = 0, n = dev_work_read(r.d, work); i < n; i++) row |= !strcmp(work[i].what, "adam");
        CHECK(row);
        rig_close(&r);
    }
}

TEST(ops_adam_refuses_what_cannot_be)
{
    struct rig r;
    REQUIRE(rig_open(&r, DEV_HOST_DISCRETE, 1, adam_device_run));
    struct arrays a = arrays_at(r.arena, 1000);
    struct ops_adam_span s[2] = { { .first = 0, .n = 500 }, { .first = 400, .n = 10 } };
    struct ops_adam x = ops_of(&a, 1000, OPS_ADAM_BF16_SPLIT);
    x.spans = s;
    x.n_spans = 2;
    CHECK(ops_adam(r.s, &x, &r.err) == STK_ERR_CONFIG); /* they overlap */
    s[1] = (struct ops_adam_span){ .first = 990, .n = 11 };
    CHECK(ops_adam(r.s, &x, &r.err) == STK_ERR_CONFIG); /* beyond the arrays */
    x.n_spans = 0;
    CHECK_OK(ops_adam(r.s, &x, &r.err), &r.err); /* nothing to do */
    x.n_spans = 1;
    x.low_or_master = NULL;
    CHECK(ops_adam(r.s, &x, &r.err) == STK_ERR_CONFIG);
    float host[1000] = { 0 };
    x = ops_of(&a, 1000, OPS_ADAM_BF16_SPLIT);
    x.spans = s;
    x.n_spans = 1;
    x.exp_avg = host; /* not on the device */
    CHECK_OK(ops_adam(r.s, &x, &r.err), &r.err);
    CHECK(dev_sync(r.s, &r.err) == STK_ERR_DEVICE);
    rig_close(&r);
    REQUIRE(rig_open(&r, DEV_HOST_DISCRETE, 1, NULL));
    a = arrays_at(r.arena, 1000);
    x = ops_of(&a, 1000, OPS_ADAM_FP16);
    x.spans = s;
    x.n_spans = 1;
    CHECK_OK(ops_adam(r.s, &x, &r.err), &r.err);
    CHECK(dev_sync(r.s, &r.err) == STK_ERR_UNSUPPORTED);
    rig_close(&r);
}

/* A chunk's arguments give what the chunk's own walk gives, with tensors of other step counts and ones that
 * take no step. */
TEST(adam_device_chunk_is_adam_chunk)
{
    static const struct layout_tensor_in t[] = { { "a", 100, false, true }, { "b", 3000, false, false },
                                                 { "c", 64, false, true }, { "d", 1, false, true } };
    const struct layout_block_in block = { "block", 4, t };
    struct stk_error err = { 0 };
    for (int dtype = 0; dtype < 2; dtype++) {
        struct stk_layout *l;
        struct adam_coefs coefs;
        REQUIRE(layout_build(&block, 1, (enum chunk_dtype)dtype, 2048, 0, 1, &l, NULL, &err) == STK_OK);
        REQUIRE(adam_coefs_alloc(&coefs, l->n_tensors));
        for (uint32_t i = 0; i < l->n_tensors; i++) {
            struct adam_hyper h = { 1e-2, 0.9, 0.95, 1e-8, i % 2 ? 0 : 0.1, ADAM_ADAMW };
            adam_coef_make(&h, 1 + i / 2, 0.5, &coefs.set[i]);
            coefs.of[i] = i == 2 ? ADAM_COEF_NONE : i;
        }
        struct rng rng;
        rng_seed(&rng, test_seed());
        for (uint32_t i = 0; i < l->n_chunks; i++) {
            const struct stk_chunk *c = &l->chunks[i];
            uint64_t bytes = 16ull * c->n_elems;
            uint8_t *x = calloc(1, bytes), *y = calloc(1, bytes);
            for (uint64_t k = 0; k < bytes; k++) x[k] = (uint8_t)(rng_next(&rng) & 0x3d);
            memcpy(y, x, bytes);
            uint64_t opt = 2ull * c->n_elems, grad = 14ull * c->n_elems;
            struct adam_chunk at = { x, x + opt, x + grad, NULL };
            adam_chunk_run(adam_pick(NULL), (struct adam_way){ 0 }, l, c, &at, &coefs, 0, c->n_elems);
            struct ops_adam_span spans[16];
            struct ops_adam a;
            CHECK(adam_device_spans_max(l, c) <= 4);
            adam_device_chunk(l, c, &coefs, y, y + opt, y + grad, spans, &a);
            CHECK(a.n_spans > 0 && a.n_spans <= adam_device_spans_max(l, c));
            adam_device_run(&a, 0, a.n);
            CHECK(!memcmp(x, y, bytes));
            free(x);
            free(y);
        }
        adam_coefs_free(&coefs);
        layout_free(l);
    }
}

TEST_MAIN()
