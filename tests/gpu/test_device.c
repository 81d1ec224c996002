/* tests/gpu/test_device.c - opening, memory, the discrete checks, poison, prepare mode, modelled
 * time, casts, local collectives. */
#include "tests/test.h"
#include "tests/gpu/kern_test.h"
#include "tests/gpu/dev_test.h"

#include "base/sys.h"
#include "gpu/coll.h"
#include <errno.h>

TEST_MAIN()

static struct dev_cfg discrete(uint64_t memory_bytes)
{
    return (struct dev_cfg){ .kind = DEV_HOST_DISCRETE,
                             .memory_bytes = memory_bytes,
                             .matmul = DEV_MATMUL_F32,
                             .poison = true,
                             .seed = test_seed() };
}

TEST(device_caps_and_numerics_key)
{
    struct rig r;
    struct dev_caps c;
    CHECK_OK(rig_open(&r, EXEC_THREADS,
                      (struct dev_cfg){
                          .kind = DEV_HOST, .matmul = DEV_MATMUL_AUTO, .compute_threads = 1 }),
             &r.err);
    CHECK_OK(dev_matmul_rate(r.d, &r.err), &r.err);
    dev_caps_read(r.d, &c);
    printf("# %s, %.1f GFLOP/s\n", c.numerics, c.matmul_flops_per_s / 1e9);
    CHECK(c.kind == DEV_HOST && c.host_in_place && !c.modelled_time &&
          c.memory_bytes == UINT64_MAX && c.compute_threads == 1);
    CHECK(c.matmul == DEV_MATMUL_F32 || c.matmul == DEV_MATMUL_BF16);
    CHECK(c.matmul_flops_per_s > 0);
    CHECK(strstr(c.numerics, c.matmul == DEV_MATMUL_BF16 ? ";matmul=bf16;threads=1;"
                                                         : ";matmul=f32;threads=1;"));
    rig_close(&r);
    CHECK_OK(rig_open(&r, EXEC_THREADS, discrete(4096)), &r.err);
    /* an arithmetic that was named is measured when somebody asks */
    dev_caps_read(r.d, &c);
    CHECK(c.matmul == DEV_MATMUL_F32 && c.matmul_flops_per_s == 0);
    CHECK_OK(dev_matmul_rate(r.d, &r.err), &r.err);
    dev_caps_read(r.d, &c);
    CHECK(c.matmul == DEV_MATMUL_F32 && c.matmul_flops_per_s > 0);
    rig_close(&r);
    CHECK_OK(rig_open(&r, EXEC_SIM, (struct dev_cfg){ .kind = DEV_SIM, .memory_bytes = 4096 }),
             &r.err);
    CHECK(dev_matmul_rate(r.d, &r.err) == STK_OK);
    dev_caps_read(r.d, &c);
    CHECK(c.matmul == DEV_MATMUL_F32 && c.modelled_time && !c.host_in_place &&
          strcmp(c.name, "sim") == 0);
    rig_close(&r);
}

TEST(device_refusals)
{
    struct exec *ex;
    struct dev *d;
    struct stk_error err = { 0 };
    CHECK_OK(exec_open_threads(&ex, &err), &err);
    struct dev_cfg cfg = { .kind = DEV_SIM, .ex = ex }; /* cuda: test_cuda_device.c */
    CHECK(dev_open(&cfg, &d, &err) == STK_ERR_CONFIG && strstr(err.text, "simulated execution"));
    stk_error_clear(&err);
    cfg.kind = DEV_HOST_DISCRETE;
    CHECK(dev_open(&cfg, &d, &err) == STK_ERR_CONFIG && strstr(err.text, "size"));
    exec_close(ex);
}

TEST(device_arena_is_capped_and_poisoned)
{
    struct rig r;
    void *arena, *again;
    CHECK_OK(rig_open(&r, EXEC_THREADS, discrete(1 << 16)), &r.err);
    CHECK(dev_reserve(r.d, (1 << 16) + 1, &arena, &r.err) == STK_ERR_NOMEM &&
          strstr(r.err.text, "65537"));
    stk_error_clear(&r.err);
    CHECK(dev_reserve(r.d, 0, &arena, &r.err) == STK_ERR_CONFIG);
    stk_error_clear(&r.err);
    CHECK_OK(dev_reserve(r.d, 1 << 16, &arena, &r.err), &r.err);
    CHECK(dev_reserve(r.d, 1, &again, &r.err) == STK_ERR_STATE);
    for (uint64_t i = 0; i < (1 << 16) / 4; i++) CHECK(isnan(((float *)arena)[i]));
    for (uint64_t i = 0; i < (1 << 16) / 2; i++)
        CHECK(isnan(kt_get(OPS_BF16, arena, i)) && isnan(kt_get(OPS_FP16, arena, i)));
    rig_close(&r);
}

/* A discrete device with an arena, and an operation of each kind of operand on it. */
struct discrete_rig {
    struct rig r;
    uint8_t *arena;
    float host[256], back[256];
    double loss;
    struct ops_linear l;
    struct ops_head h;
};

static void discrete_open(struct discrete_rig *g)
{
    void *p;
    for (int i = 0; i < 256; i++) g->host[i] = (float)i;
    CHECK_OK(rig_open(&g->r, EXEC_THREADS, discrete(1 << 16)), &g->r.err);
    CHECK_OK(dev_reserve(g->r.d, 1 << 16, &p, &g->r.err), &g->r.err);
    uint8_t *arena = g->arena = p;
    g->loss = 0;
    g->l = (struct ops_linear){ .rows = 4, .in = 4, .out = 4, .at = OPS_F32, .pt = OPS_BF16 };
    g->l.x = arena;
    g->l.w = arena + 1024;
    g->l.y = arena + 2048;
    g->l.scratch = (struct ops_scratch){ arena + 8192, 32768 };
    g->h = (struct ops_head){ .tokens = 2, .hidden = 4, .vocab = 4, .at = OPS_F32, .pt = OPS_BF16 };
    g->h.x = arena;
    g->h.w = arena + 1024;
    g->h.targets = (int32_t *)(void *)(arena + 3072);
    g->h.loss_sum = &g->loss;
    g->h.scratch = g->l.scratch;
}

/* Everything on its right side: a round trip of bytes, zero weights, the loss of equal logits. */
static stk_status discrete_use(struct discrete_rig *g)
{
    struct dev_stream *s = g->r.s;
    struct stk_error *err = &g->r.err;
    STK_TRY(dev_copy(s, g->arena, g->host, sizeof g->host, DEV_TO_DEVICE, err));
    STK_TRY(dev_zero(s, g->arena + 1024, 7168, err));
    STK_TRY(dev_copy(s, g->arena + 4096, g->arena, sizeof g->host, DEV_ON_DEVICE, err));
    STK_TRY(dev_copy(s, g->back, g->arena + 4096, sizeof g->back, DEV_TO_HOST, err));
    STK_TRY(ops_linear_forward(s, &g->l, err));
    STK_TRY(ops_head_forward(s, &g->h, err));
    return dev_sync(s, err);
}

/* The n-th misuse; returns how its error must begin, NULL when there are no more. */
static const char *discrete_misuse(struct discrete_rig *g, int n)
{
    struct dev_stream *s = g->r.s;
    switch (n) {
    case 0:
        dev_copy(s, g->host, g->back, 16, DEV_TO_DEVICE, NULL);
        return "copy: operand destination";
    case 1:
        dev_copy(s, g->arena, g->arena + 512, 16, DEV_TO_DEVICE, NULL);
        return "copy: operand source";
    case 2:
        dev_copy(s, g->arena + 64, g->arena, 16, DEV_TO_HOST, NULL);
        return "copy: operand dest";
    case 3:
        dev_copy(s, g->arena + (1 << 16) - 8, g->host, 16, DEV_TO_DEVICE, NULL);
        return "copy: operand destination";
    case 4: dev_zero(s, g->back, 16, NULL); return "zero: operand destination";
    case 5:
        g->l.w = g->host;
        ops_linear_forward(s, &g->l, NULL);
        return "linear_forward: operand w";
    case 6:
        g->l.scratch.base = g->host;
        ops_linear_forward(s, &g->l, NULL);
        return "linear_forward: operand scratch";
    case 7:
        g->h.loss_sum = (double *)(void *)g->arena;
        ops_head_forward(s, &g->h, NULL);
        return "head_forward: operand loss_sum";
    default: return NULL;
    }
}

TEST(device_discrete_copies_and_checks)
{
    static struct discrete_rig g;
    const char *named = "";
    for (int n = 0; named; n++) {
        discrete_open(&g);
        CHECK_OK(discrete_use(&g), &g.r.err);
        CHECK(memcmp(g.host, g.back, sizeof g.host) == 0 && g.loss == 2 * log(4.0));
        named = discrete_misuse(&g, n);
        if (named) {
            CHECK(dev_sync(g.r.s, &g.r.err) == STK_ERR_DEVICE);
            CHECK(strncmp(g.r.err.text, named, strlen(named)) == 0);
            /* sticky: a good copy is skipped, its notification fires, the first error stays */
            struct stk_error later = { 0 };
            memset(g.back, 0, sizeof g.back);
            CHECK(dev_copy(g.r.s, g.back, g.arena + 4096, 1024, DEV_TO_HOST, &later) == STK_OK);
            CHECK(dev_sync(g.r.s, &later) == STK_ERR_DEVICE);
            CHECK(strcmp(later.text, g.r.err.text) == 0 && g.back[5] == 0);
        }
        rig_close(&g.r);
    }
}

TEST(device_discrete_and_in_place_same_bits)
{
    float y[2][64 * 48];
    for (int kind = 0; kind < 2; kind++) {
        struct rig r;
        struct dev_cfg cfg = discrete(1 << 20);
        void *p;
        if (kind) cfg = (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_F32 };
        CHECK_OK(rig_open(&r, EXEC_THREADS, cfg), &r.err);
        CHECK_OK(dev_reserve(r.d, 1 << 20, &p, &r.err), &r.err);
        uint8_t *arena = p;
        kt_reseed(1);
        float *x = kt_random(OPS_F32, 64 * 32, 1);
        uint16_t *w = kt_random(OPS_BF16, 48 * 32, 1);
        CHECK_OK(dev_copy(r.s, arena, x, 64 * 32 * 4, DEV_TO_DEVICE, &r.err), &r.err);
        CHECK_OK(dev_copy(r.s, arena + 16384, w, 48 * 32 * 2, DEV_TO_DEVICE, &r.err), &r.err);
        struct ops_linear l = { .rows = 64,
                                .in = 32,
                                .out = 48,
                                .at = OPS_F32,
                                .pt = OPS_BF16,
                                .x = arena,
                                .w = arena + 16384,
                                .y = arena + 32768,
                                .scratch = { arena + 65536, 65536 } };
        CHECK_OK(ops_linear_forward(r.s, &l, &r.err), &r.err);
        CHECK_OK(dev_copy(r.s, y[kind], l.y, sizeof y[kind], DEV_TO_HOST, &r.err), &r.err);
        CHECK_OK(dev_sync(r.s, &r.err), &r.err);
        free(x);
        free(w);
        rig_close(&r);
    }
    CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0);
}

TEST(device_prepare_mode_runs_nothing)
{
    struct rig r;
    uint64_t need = 7, small;
    CHECK_OK(rig_open(&r, EXEC_THREADS, discrete(1 << 16)), &r.err);
    CHECK(dev_prepare_end(r.d, &need, &r.err) == STK_ERR_STATE);
    stk_error_clear(&r.err);
    struct ops_linear l = { .rows = 64, .in = 64, .out = 64, .at = OPS_BF16, .pt = OPS_BF16 };
    dev_prepare_begin(r.d);
    CHECK(dev_preparing(r.d));
    CHECK_OK(ops_linear_forward(r.s, &l, &r.err), &r.err);
    CHECK_OK(dev_copy(r.s, NULL, NULL, 64, DEV_TO_DEVICE, &r.err), &r.err);
    CHECK_OK(dev_zero(r.s, NULL, 64, &r.err), &r.err);
    CHECK_OK(dev_prepare_end(r.d, &need, &r.err), &r.err);
    CHECK(need >= 64 * 64 * 4 && !dev_preparing(r.d));
    dev_prepare_begin(r.d); /* begins anew: the largest since begin */
    l.rows = l.in = l.out = 2;
    CHECK_OK(ops_linear_forward(r.s, &l, &r.err), &r.err);
    CHECK_OK(dev_prepare_end(r.d, &small, &r.err), &r.err);
    CHECK(small < need);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    CHECK(ops_linear_forward(r.s, &l, &r.err) == STK_ERR_CONFIG); /* NULL only while preparing */
    rig_close(&r);
}

/* launch + bytes / rate for a copy, launch + flops / rate for a product; the notification comes
 * after. */
TEST(device_sim_models_time)
{
    struct dev_model m = { .flops_per_s = 1e9,
                           .copy_in_bytes_per_s = 1e9,
                           .copy_out_bytes_per_s = 5e8,
                           .memory_bytes_per_s = 1e12,
                           .launch_ns = 1000 };
    struct rig r;
    void *p;
    static uint8_t host[4096];
    CHECK_OK(rig_open(&r, EXEC_SIM,
                      (struct dev_cfg){ .kind = DEV_SIM, .memory_bytes = 1 << 16, .model = &m }),
             &r.err);
    CHECK_OK(dev_reserve(r.d, 1 << 16, &p, &r.err), &r.err);
    uint8_t *arena = p;
    CHECK_OK(dev_copy(r.s, arena, host, 4096, DEV_TO_DEVICE, &r.err), &r.err);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    CHECK(exec_now_ns(r.ex) == 5096 && dev_stream_busy_ns(r.s) == 5096);
    CHECK_OK(dev_copy(r.s, host, arena, 4096, DEV_TO_HOST, &r.err), &r.err);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    CHECK(exec_now_ns(r.ex) == 5096 + 1000 + 8192);
    uint64_t before = exec_now_ns(r.ex); /* paced: its own rate, or the link's if that is less */
    CHECK_OK(dev_copy_paced(r.s, host, arena, 4096, DEV_TO_HOST, 1e8, &r.err), &r.err);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    CHECK(exec_now_ns(r.ex) - before == 1000 + 40960);
    before = exec_now_ns(r.ex);
    CHECK_OK(dev_copy_paced(r.s, host, arena, 4096, DEV_TO_HOST, 1e10, &r.err), &r.err);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    CHECK(exec_now_ns(r.ex) - before == 1000 + 8192);
    struct ops_linear l = { .rows = 8,
                            .in = 16,
                            .out = 32,
                            .at = OPS_F32,
                            .pt = OPS_BF16,
                            .x = arena,
                            .w = arena + 1024,
                            .y = arena + 4096,
                            .scratch = { arena + 8192, 32768 } };
    before = exec_now_ns(r.ex);
    CHECK_OK(ops_linear_forward(r.s, &l, &r.err), &r.err);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    CHECK(exec_now_ns(r.ex) - before == 1000 + 2 * 8 * 16 * 32);
    rig_close(&r);
}

TEST(device_grad_cast_and_acc_add)
{
    struct rig r;
    struct convert_sum got, want;
    enum { N = 100003 };
    float *acc = kt_random(OPS_F32, N, 3), *sum = kt_copy(acc, N * 4);
    uint16_t *out = kt_alloc(N * 2), *ref = kt_alloc(N * 2);
    CHECK_OK(
        rig_open(&r, EXEC_THREADS, (struct dev_cfg){ .kind = DEV_HOST, .matmul = DEV_MATMUL_F32 }),
        &r.err);
    for (int fp16 = 0; fp16 < 2; fp16++) {
        struct ops_grad_cast g = { N, fp16 ? OPS_FP16 : OPS_BF16, acc, out, 0.5f, &got };
        CHECK_OK(ops_grad_cast(r.s, &g, &r.err), &r.err);
        CHECK_OK(dev_sync(r.s, &r.err), &r.err);
        if (fp16)
            convert_grad_fp16(acc, ref, N, 0.5f, &want);
        else
            convert_grad_bf16(acc, ref, N, 0.5f, &want);
        CHECK(memcmp(out, ref, N * 2) == 0 && got.sum_sq == want.sum_sq && got.nonfinite == 0);
    }
    CHECK_OK(ops_acc_add(r.s, N, sum, out, OPS_FP16, &r.err), &r.err);
    CHECK_OK(dev_sync(r.s, &r.err), &r.err);
    for (int i = 0; i < N; i++) CHECK(sum[i] == acc[i] + (float)kt_get(OPS_FP16, out, (uint64_t)i));
    free(acc);
    free(sum);
    free(out);
    free(ref);
    rig_close(&r);
}

TEST(coll_local_is_one_rank_and_refuses_more)
{
    struct coll *c;
    struct stk_error err = { 0 };
    uint64_t counts[1] = { 3 };
    float a[3] = { 1, 2, 3 }, b[3] = { 0 };
    setenv("WORLD_SIZE", "4", 1);
    CHECK(coll_open(&c, &err) == STK_ERR_UNSUPPORTED && !c && strstr(err.text, "WORLD_SIZE is 4"));
    stk_error_clear(&err);
    setenv("WORLD_SIZE", "many", 1);
    CHECK(coll_open(&c, &err) == STK_ERR_CONFIG);
    stk_error_clear(&err);
    setenv("WORLD_SIZE", "1", 1);
    setenv("RANK", "0", 1);
    CHECK_OK(coll_open(&c, &err), &err);
    CHECK(coll_rank(c) == 0 && coll_size(c) == 1);
    CHECK_OK(coll_all_gather(c, a, b, counts, COLL_F32, 0, &err), &err);
    CHECK(memcmp(a, b, sizeof a) == 0);
    b[1] = 9;
    CHECK_OK(coll_reduce_scatter(c, a, b, counts, COLL_F32, 0, &err), &err);
    CHECK(memcmp(a, b, sizeof a) == 0);
    CHECK_OK(coll_all_reduce(c, b, 3, COLL_F32, 0, &err), &err);
    CHECK(memcmp(a, b, sizeof a) == 0);
    CHECK_OK(coll_barrier(c, 0, &err), &err);
    CHECK_OK(coll_broadcast(c, b, 12, 0, 0, &err), &err);
    CHECK(coll_broadcast(c, b, 12, 1, 0, &err) == STK_ERR_CONFIG);
    coll_close(c);
}

/* Each allocation on the way fails once: an error with a sentence, nothing left behind
 * (AddressSanitizer sees leaks). */
TEST(device_open_survives_each_failed_allocation)
{
    uint64_t k = 1;
    for (int kind = SYS_ALLOC; kind <= SYS_MMAP; kind++) {
        for (k = 1; k < 50; k++) {
            struct exec *ex;
            struct dev *d = NULL;
            struct dev_stream *s = NULL;
            struct stk_error err = { 0 };
            void *arena;
            CHECK_OK(exec_open_threads(&ex, &err), &err);
            struct dev_cfg cfg = discrete(1 << 16);
            cfg.ex = ex;
            cfg.compute_threads = 1;
            sys_fault_arm((enum sys_call)kind, k, 1, ENOMEM);
            stk_status st = dev_open(&cfg, &d, &err);
            if (st == STK_OK) st = dev_reserve(d, 1 << 16, &arena, &err);
            if (st == STK_OK) st = dev_stream_open(d, "s", 0, &s, &err);
            sys_fault_arm((enum sys_call)kind, 0, 0, 0);
            CHECK(st == STK_OK || (st == STK_ERR_NOMEM && err.text[0]));
            dev_stream_close(s);
            dev_close(d);
            exec_close(ex);
            if (st == STK_OK) break;
        }
        CHECK(k > 1 && k < 50);
    }
}
