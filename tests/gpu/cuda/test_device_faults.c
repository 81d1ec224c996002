/* tests/gpu/cuda/test_device_faults.c - every call of CUDA and cuBLASLt that a scripted run makes fails once, and every kernel:
 * nobody waits for ever (the simulation says so), the error names the call, every notification fires, nothing leaks,
 * nothing uses memory that is no more. */
#include "tests/test.h"
#include "tests/gpu/cuda/device_rig.h"

TEST_MAIN()

enum { ROWS = 8, WIDTH = 32, ARENA = 1 << 18 };

struct run {
    struct rig r;
    struct dev_stream *in;
    struct dev_mark loaded;
    struct exec_lane *lane;
    struct exec_task task;
    struct exec_event told;
    float host[ROWS * WIDTH];
    double loss;
    int32_t told_n;
    stk_status st; /* the first that was not STK_OK */
    char text[768];
};

static void told(void *arg)
{
    struct run *t = arg;
    t->told_n++;
    exec_event_set(&t->told);
}

/* Keeps the first failure. */
static bool good(struct run *t, stk_status st)
{
    if (st != STK_OK && t->st == STK_OK) {
        t->st = st;
        snprintf(t->text, sizeof t->text, "%s", t->r.err.text);
    }
    return st == STK_OK;
}

static void queue_work(struct run *t)
{
    struct rig *r = &t->r;
    struct stk_error *e = &r->err;
    uint8_t *a = r->arena;
    struct ops_linear l = { .rows = ROWS, .in = WIDTH, .out = WIDTH, .at = OPS_F32, .pt = OPS_BF16 };
    l.x = a, l.w = a + 4096, l.y = a + 8192, l.dw = (float *)(void *)(a + 16384), l.dy = l.y;
    l.scratch = (struct ops_scratch){ a + 65536, ARENA - 65536 };
    good(t, dev_zero(t->in, a, ARENA, e));
    good(t, dev_copy(t->in, a, t->host, sizeof t->host, DEV_TO_DEVICE, e));
    good(t, dev_mark_record(t->in, &t->loaded, e));
    good(t, dev_mark_wait(r->s, &t->loaded, e));
    good(t, ops_linear_forward(r->s, &l, e));
    good(t, ops_linear_backward_weight(r->s, &l, e));
    struct ops_head h = { .tokens = ROWS, .hidden = WIDTH, .vocab = WIDTH, .at = OPS_F32, .pt = OPS_BF16, .d_scale = 1 };
    h.x = a, h.w = a + 4096, h.targets = (int32_t *)(void *)(a + 32768), h.loss_sum = &t->loss, h.dx = a + 40960;
    h.scratch = l.scratch;
    good(t, ops_head_train(r->s, &h, e));
    good(t, dev_copy(r->s, t->host, l.y, sizeof t->host, DEV_TO_HOST, e));
}

/* True: the device is there, and everybody was told. */
static void work(struct run *t)
{
    struct rig *r = &t->r;
    if (!good(t, dev_stream_open(r->d, "copy-in", 8, &t->in, &r->err))) return;
    if (!good(t, dev_mark_init(r->d, &t->loaded, &r->err))) return;
    for (int i = 0; i < 3; i++) {
        queue_work(t);
        exec_event_reset(&t->told);
        good(t, dev_notify(r->s, t->lane, &t->task, NULL, &r->err));
        CHECK_OK(exec_event_wait(&t->told, UINT64_MAX, &r->err), &r->err); /* STALLED: it never came */
        good(t, dev_sync(t->in, &r->err));
    }
    good(t, dev_status(r->d, &r->err));
    CHECK(t->told_n == 3);
}

static void script(struct run *t, uint64_t seed, uint64_t nth_call, uint64_t nth_kernel)
{
    struct rig *r = &t->r;
    memset(t, 0, sizeof *t);
    rig_world(r, EXEC_SIM, seed, (struct standin_cfg){ .plain = true });
    CHECK_OK(exec_lane_open(r->ex, "told", &t->lane, &r->err), &r->err);
    exec_task_init(&t->task, told, t);
    exec_event_init(r->ex, &t->told);
    if (nth_call) standin_fail(NULL, nth_call, cudaErrorUnknown);
    if (nth_kernel) standin_fail_kernel(nth_kernel, cudaErrorLaunchFailure);
    if (good(t, rig_device(r, DEV_MATMUL_F32, ARENA)) && good(t, dev_host_register(r->d, t->host, sizeof t->host, &r->err))) work(t);
    dev_mark_free(&t->loaded);
    dev_stream_close(t->in);
    if (r->d) good(t, dev_status(r->d, &r->err));
    exec_lane_close(t->lane);
}

TEST(cuda_device_a_good_run)
{
    static struct run t;
    for (uint64_t i = 0; i < test_share(40); i++) {
        script(&t, test_seed() + i, 0, 0);
        CHECK_OK(t.st, &t.r.err);
        CHECK(t.loss > 0);
        struct standin_counts c;
        standin_counts_read(&c);
        CHECK(c.copies_pageable == 0 && c.device_synchronisations == 0);
        RIG_CLOSE(&t.r);
    }
}

/* The error says which call it was; a launch is named by its operation and shape. */
static bool named(const struct run *t, const char *call)
{
    return call && strstr(t->text, strcmp(call, "cudaLaunchKernelEx") ? call : "kernel launch");
}

TEST(cuda_device_each_call_fails_once)
{
    static struct run t;
    uint64_t n = 0, unsaid = 0;
    bool more = true;
    while (more) {
        n++;
        script(&t, test_seed() + n, n, 0);
        const char *call = standin_failed_call();
        more = call != NULL;
        /* Busy times are measured as far as they can be: their calls may fail. */
        bool may_pass = !more || !strncmp(call, "cudaEvent", 9) || strstr(call, "GetAttribute") ||
                        !strcmp(call, "cudnnCreate"); /* the numerics key names it (test_device_dnn.c) */
        if (more && t.st == STK_OK && !may_pass) {
            printf("# call %d, %s, fails and nobody says so\n", (int)n, call);
            unsaid++;
        }
        if (t.st != STK_OK && !named(&t, call)) printf("# %s: %s\n", call, t.text);
        CHECK(t.st == STK_OK || named(&t, call));
        RIG_CLOSE(&t.r);
    }
    printf("# %d calls, %d failures that nobody reports\n", (int)n - 1, (int)unsaid);
    CHECK(n > 50 && unsaid == 0);
}

TEST(cuda_device_each_kernel_fails_once)
{
    static struct run t;
    uint64_t n = 0;
    for (bool more = true; more;) {
        n++;
        script(&t, test_seed() + n, 0, n);
        more = standin_sticky() != 0;
        CHECK(more == (t.st == STK_ERR_DEVICE));
        CHECK(!more || strstr(t.text, "cudaErrorLaunchFailure"));
        RIG_CLOSE(&t.r);
    }
    printf("# %d kernels and products\n", (int)n - 1);
    CHECK(n > 10);
}
