/* tests/gpu/standin/test_standin.c - the stand-in itself: order over seeds, events, what it must find (a removed wait, a
 * freed buffer, pageable memory, foreign pointers), sticky errors and callbacks, products, time, threads and
 * simulation. Work is copies, zeros, the product's kernels (cuda_add) and cuBLASLt's products. */
#include "base/exec.h"
#include "gpu/cuda/kernels.h"
#include "tests/gpu/standin/standin.h"
#include "tests/test.h"

#include <cublasLt.h>
#include <math.h>

TEST_MAIN()

#define OK(call) CHECK((call) == cudaSuccess)
#define LT(call) CHECK((call) == CUBLAS_STATUS_SUCCESS)

enum { STREAMS_MAX = 4 };
struct rig {
    cudaStream_t s[STREAMS_MAX];
    cudaEvent_t e[STREAMS_MAX];
    float *dev[4], *host[4]; /* N elements each; host is pinned */
};
enum { N = 512, BYTES = N * 4 };

static void rig_fill(struct rig *r)
{
    for (int i = 0; i < STREAMS_MAX; i++) {
        OK(cudaStreamCreateWithFlags(&r->s[i], cudaStreamNonBlocking));
        OK(cudaEventCreateWithFlags(&r->e[i], cudaEventDefault));
    }
    for (int i = 0; i < 4; i++) {
        void *p = NULL;
        OK(cudaMalloc(&p, BYTES));
        r->dev[i] = p;
        OK(cudaHostAlloc(&p, BYTES, cudaHostAllocPortable));
        r->host[i] = p;
        for (int k = 0; k < N; k++) r->host[i][k] = (float)(k + i);
    }
}

static void rig_open(struct rig *r, uint64_t seed)
{
    memset(r, 0, sizeof *r);
    standin_open(&(struct standin_cfg){ .mode = STANDIN_MANUAL, .seed = seed });
    rig_fill(r);
}

static void rig_empty(struct rig *r)
{
    for (int i = 0; i < STREAMS_MAX; i++) {
        (void)cudaStreamDestroy(r->s[i]);
        (void)cudaEventDestroy(r->e[i]);
    }
    for (int i = 0; i < 4; i++) {
        if (r->dev[i]) (void)cudaFree(r->dev[i]);
        (void)cudaFreeHost(r->host[i]);
    }
    struct standin_counts c;
    standin_counts_read(&c);
    CHECK(c.live_allocations == 0 && c.live_streams == 0 && c.live_events == 0 && c.live_descriptors == 0);
}

static void show(void)
{
    for (uint64_t i = 0; standin_finding(i); i++) printf("# %s\n", standin_finding(i));
}

/* Nothing was found. */
static bool clean(void)
{
    if (standin_found_any() == 0) return true;
    show();
    return false;
}

static void rig_close(struct rig *r)
{
    rig_empty(r);
    standin_close();
}

static cudaError_t copy_in(struct rig *r, int i, int stream)
{
    return cudaMemcpyAsync(r->dev[i], r->host[i], BYTES, cudaMemcpyHostToDevice, r->s[stream]);
}
static cudaError_t copy_out(struct rig *r, int i, int stream)
{
    return cudaMemcpyAsync(r->host[i], r->dev[i], BYTES, cudaMemcpyDeviceToHost, r->s[stream]);
}

/* In on stream 0, the sum of both on 1, out on 2: the events say so, unless one of them is left out. */
enum { WAITS = 2 };
static void pipeline(struct rig *r, int without)
{
    OK(copy_in(r, 0, 0));
    OK(copy_in(r, 1, 0));
    OK(cudaEventRecord(r->e[0], r->s[0]));
    if (without != 0) OK(cudaStreamWaitEvent(r->s[1], r->e[0], cudaEventWaitDefault));
    OK(cuda_add(r->s[1], OPS_F32, N, r->dev[0], r->dev[1], r->dev[2]));
    OK(cudaEventRecord(r->e[1], r->s[1]));
    if (without != 1) OK(cudaStreamWaitEvent(r->s[2], r->e[1], cudaEventWaitDefault));
    OK(copy_out(r, 2, 2));
}

/* The same by the stand-in's own hand: a wait that does nothing, memory freed early, pinning that pins nothing. */
TEST(standin_planted_mistakes_are_found)
{
    struct rig r;
    for (uint64_t n = 1; n <= WAITS; n++) {
        rig_open(&r, 0);
        standin_plant(STANDIN_PLANT_NO_WAIT, n);
        pipeline(&r, -1);
        standin_run(STANDIN_ALL);
        CHECK(standin_found(STANDIN_RACE) > 0 && standin_plant_places(STANDIN_PLANT_NO_WAIT) == WAITS);
        rig_close(&r);
    }
    rig_open(&r, 0);
    pipeline(&r, -1);
    standin_plant(STANDIN_PLANT_FREE, 1);
    OK(cudaEventRecord(r.e[0], r.s[0]));
    standin_run(STANDIN_ALL);
    CHECK(standin_found(STANDIN_FREED) + standin_found(STANDIN_FOREIGN) > 0 && standin_sticky());
    rig_close(&r);
}

TEST(standin_keeps_work_until_it_is_run)
{
    struct rig r;
    rig_open(&r, 0);
    memset(r.host[2], 0, BYTES);
    pipeline(&r, -1);
    CHECK(r.host[2][5] == 0 && cudaStreamQuery(r.s[2]) == cudaErrorNotReady);
    CHECK(standin_run(1) == 1 && cudaEventQuery(r.e[0]) == cudaErrorNotReady);
    CHECK(standin_run(STANDIN_ALL) > 4 && standin_run(1) == 0);
    for (int k = 0; k < N; k++) CHECK(r.host[2][k] == (float)(2 * k + 1));
    OK(cudaStreamQuery(r.s[2]));
    struct standin_counts c;
    standin_counts_read(&c);
    CHECK(c.kernels == 1 && c.synchronisations == 0 && c.copied_bytes[cudaMemcpyHostToDevice] == 2 * BYTES &&
          c.copied_bytes[cudaMemcpyDeviceToHost] == BYTES && clean());
    rig_close(&r);
}

/* Streams without events between them run in several orders; with events the result is one. */
TEST(standin_order_is_the_seeds_and_events_hold)
{
    enum { SEEDS = 60 };
    uint64_t orders[SEEDS];
    int different = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        struct rig r;
        const struct standin_op *op;
        rig_open(&r, seed ? test_seed() + seed : 0);
        pipeline(&r, -1);
        OK(copy_in(&r, 3, 3));
        OK(copy_out(&r, 3, 3));
        OK(cudaStreamSynchronize(r.s[2]));
        for (int k = 0; k < N; k++) CHECK(r.host[2][k] == (float)(2 * k + 1));
        standin_run(STANDIN_ALL);
        CHECK(clean());
        orders[seed] = 0;
        for (uint64_t i = 0, n = standin_trace(&op); i < n; i++) orders[seed] = orders[seed] * 31 + op[i].number;
        bool seen = false;
        for (uint64_t i = 0; i < seed; i++) seen |= orders[i] == orders[seed];
        different += !seen;
        rig_close(&r);
    }
    printf("# %d orders in %d seeds\n", different, SEEDS);
    CHECK(different > 10);
}

/* Whatever order was taken, the missing event is found, and both operations are named. */
TEST(standin_finds_a_removed_event_wait)
{
    for (int without = 0; without < WAITS; without++)
        for (uint64_t seed = 0; seed < 20; seed++) {
            struct rig r;
            rig_open(&r, seed ? test_seed() + seed : 0);
            pipeline(&r, without);
            standin_run(STANDIN_ALL);
            if (!without && standin_found(STANDIN_UNWRITTEN)) { /* the kernel came first: NaNs, at once */
                CHECK(standin_sticky() == cudaErrorIllegalAddress);
            } else {
                CHECK(standin_found(STANDIN_RACE) > 0);
                CHECK(standin_finding(0) && strstr(standin_finding(standin_found(STANDIN_UNWRITTEN)), "of stream "));
            }
            if (seed == 0) show();
            rig_close(&r);
        }
}

/* What the host has been told counts as order: a callback, a wait, a query. */
static void CUDART_CB note(cudaStream_t s, cudaError_t status, void *arg)
{
    (void)s;
    *(int *)arg = status == cudaSuccess ? 1 : (int)status;
}
static void CUDART_CB note_host(void *arg) { *(int *)arg = 1; }

TEST(standin_host_knowledge_orders)
{
    for (int how = 0; how < 5; how++) {
        struct rig r;
        int told = 0;
        rig_open(&r, test_seed() + (uint64_t)how);
        OK(copy_in(&r, 0, 0));
        OK(cudaEventRecord(r.e[0], r.s[0]));
        if (how == 0) OK(cudaStreamSynchronize(r.s[0]));
        if (how == 1) OK(cudaEventSynchronize(r.e[0]));
        if (how == 2) OK(cudaStreamAddCallback(r.s[0], note, &told, 0));
        if (how == 3) OK(cudaLaunchHostFunc(r.s[0], note_host, &told));
        standin_run(STANDIN_ALL);
        CHECK(how == 2 || how == 3 ? told == 1 : told == 0);
        OK(copy_out(&r, 0, 1)); /* another stream: how == 4 knows nothing, although it ran */
        standin_run(STANDIN_ALL);
        CHECK((standin_found(STANDIN_RACE) > 0) == (how == 4));
        rig_close(&r);
    }
}

TEST(standin_finds_freed_and_foreign_memory)
{
    struct rig r;
    rig_open(&r, 0);
    float *gone = r.dev[0];
    OK(copy_in(&r, 0, 0));
    OK(cudaFree(gone)); /* work is queued */
    r.dev[0] = NULL;
    standin_run(STANDIN_ALL);
    CHECK(standin_found(STANDIN_FREED) == 1 && standin_sticky() == cudaErrorIllegalAddress);
    CHECK(cudaStreamSynchronize(r.s[0]) == cudaErrorIllegalAddress);
    show();
    rig_close(&r);

    rig_open(&r, 0);
    OK(copy_in(&r, 0, 0));
    OK(copy_in(&r, 1, 0));
    OK(cuda_add(r.s[0], OPS_F32, N, r.dev[0], r.dev[1], r.dev[2]));
    OK(cudaFree(r.dev[2]));
    r.dev[2] = NULL;
    standin_run(STANDIN_ALL);
    CHECK(standin_found(STANDIN_FREED) == 1);
    rig_close(&r);

    rig_open(&r, 0);
    float mine[N] = { 0 };
    CHECK(cudaMemcpyAsync(mine, r.host[0], BYTES, cudaMemcpyHostToDevice, r.s[0]) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(r.dev[0], r.dev[1], BYTES, cudaMemcpyHostToDevice, r.s[0]) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(r.dev[0] + 1, r.host[0], BYTES, cudaMemcpyHostToDevice, r.s[0]) == cudaErrorInvalidValue);
    CHECK(cudaMemsetAsync(mine, 0, BYTES, r.s[0]) == cudaErrorInvalidValue);
    CHECK(standin_found(STANDIN_FOREIGN) == 4 && standin_sticky() == 0);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue); /* or the launch below would tell it */
    OK(copy_in(&r, 0, 0));
    OK(cuda_add(r.s[0], OPS_F32, N, r.dev[0], mine, r.dev[2])); /* found when it runs */
    standin_run(STANDIN_ALL);
    CHECK(standin_found(STANDIN_FOREIGN) == 5 && standin_sticky() == cudaErrorIllegalAddress);
    rig_close(&r);
}

TEST(standin_finds_unwritten_memory)
{
    struct rig r;
    rig_open(&r, 0);
    for (int k = 0; k < N; k++) CHECK(isnan(r.dev[0][k])); /* the test looks; a product never may */
    OK(copy_out(&r, 0, 0));
    standin_run(STANDIN_ALL);
    CHECK(standin_found(STANDIN_UNWRITTEN) == 1 && isnan(r.host[0][3]));
    rig_close(&r);
}

TEST(standin_counts_pageable_copies)
{
    struct rig r;
    rig_open(&r, 0);
    float *mine = malloc(BYTES);
    for (int k = 0; k < N; k++) mine[k] = 7;
    OK(cudaMemcpyAsync(r.dev[0], mine, BYTES, cudaMemcpyHostToDevice, r.s[0]));
    for (int k = 0; k < N; k++) mine[k] = 8; /* it was staged */
    OK(cudaMemcpyAsync(mine, r.dev[0], BYTES, cudaMemcpyDeviceToHost, r.s[0])); /* waits */
    CHECK(mine[9] == 7 && standin_found(STANDIN_PAGEABLE) == 2 && standin_found_any() == 0);
    OK(cudaHostRegister(mine, BYTES, cudaHostRegisterPortable));
    CHECK(cudaHostRegister(mine + 4, 64, 0) == cudaErrorHostMemoryAlreadyRegistered);
    OK(cudaMemcpyAsync(mine, r.dev[0], BYTES, cudaMemcpyDeviceToHost, r.s[0]));
    CHECK(standin_found(STANDIN_PAGEABLE) == 2);
    struct standin_counts c;
    standin_counts_read(&c);
    CHECK(c.copies_pageable == 2 && c.synchronisations == 2);
    OK(cudaHostUnregister(mine)); /* before the copy ran */
    standin_run(STANDIN_ALL);
    CHECK(standin_found(STANDIN_UNPINNED) == 1);
    rig_close(&r);
    free(mine);
}

/* After a kernel's failure: callbacks come with its code, host functions never, work is skipped, calls tell. */
TEST(standin_sticky_error_callbacks_and_host_functions)
{
    for (uint64_t seed = 0; seed < 10; seed++) {
        struct rig r;
        int early = 0, late = 0, other = 0, host_fn = 0;
        rig_open(&r, seed ? test_seed() + seed : 0);
        standin_fail_kernel(2, cudaErrorIllegalAddress);
        for (int i = 0; i < 4; i++) memset(r.host[i], 0, BYTES);
        OK(copy_in(&r, 0, 0));
        OK(cuda_add(r.s[0], OPS_F32, N, r.dev[0], r.dev[0], r.dev[1]));
        OK(cudaStreamAddCallback(r.s[0], note, &early, 0));
        OK(cuda_add(r.s[0], OPS_F32, N, r.dev[0], r.dev[0], r.dev[2]));
        OK(cudaStreamAddCallback(r.s[0], note, &late, 0));
        OK(cudaLaunchHostFunc(r.s[0], note_host, &host_fn));
        OK(cudaEventRecord(r.e[0], r.s[0]));
        OK(cudaStreamWaitEvent(r.s[1], r.e[0], 0));
        OK(copy_in(&r, 3, 1));
        OK(cudaStreamAddCallback(r.s[1], note, &other, 0));
        standin_run(STANDIN_ALL);
        CHECK(early == 1 && late == cudaErrorIllegalAddress && other == cudaErrorIllegalAddress && host_fn == 0);
        CHECK(isnan(r.dev[3][0])); /* skipped */
        CHECK(cudaGetLastError() == cudaErrorIllegalAddress && cudaGetLastError() == cudaErrorIllegalAddress);
        CHECK(cudaStreamAddCallback(r.s[1], note, &other, 0) == cudaErrorIllegalAddress);
        CHECK(copy_in(&r, 3, 1) == cudaErrorIllegalAddress);
        CHECK(cuda_add(r.s[0], OPS_F32, N, r.dev[0], r.dev[0], r.dev[1]) == cudaErrorIllegalAddress);
        CHECK(standin_found_any() == 0);
        rig_close(&r);
    }
}

TEST(standin_fails_the_nth_call)
{
    struct rig r;
    rig_open(&r, 0);
    standin_fail("cudaMemcpyAsync", 2, cudaErrorUnknown);
    OK(copy_in(&r, 0, 0));
    CHECK(copy_in(&r, 1, 0) == cudaErrorUnknown && cudaGetLastError() == cudaErrorUnknown && cudaGetLastError() == 0);
    OK(copy_in(&r, 1, 0));
    CHECK(strcmp(standin_failed_call(), "cudaMemcpyAsync") == 0);
    standin_fail(NULL, 1, cudaErrorMemoryAllocation);
    CHECK(cudaEventRecord(r.e[0], r.s[0]) == cudaErrorMemoryAllocation);
    CHECK(standin_calls_of("cudaEventRecord") == 1);
    CHECK(cudaStreamDestroy((cudaStream_t)(void *)&r) == cudaErrorInvalidResourceHandle);
    CHECK(standin_found(STANDIN_HANDLE) == 1);
    standin_run(STANDIN_ALL);
    rig_close(&r);
}

static void CUDART_CB call_cuda(cudaStream_t s, cudaError_t status, void *arg)
{
    (void)status;
    *(int *)arg = cudaStreamQuery(s);
}

TEST(standin_finds_cuda_called_in_a_callback)
{
    struct rig r;
    int got = 0;
    rig_open(&r, 0);
    OK(cudaStreamAddCallback(r.s[0], call_cuda, &got, 0));
    standin_run(STANDIN_ALL);
    CHECK(got == cudaErrorNotPermitted && standin_found(STANDIN_CALLBACK) == 1);
    rig_close(&r);
}

/* Copies in, compute and copies out overlap in time where streams and events allow it, and not where not. */
TEST(standin_trace_shows_overlap_in_virtual_time)
{
    struct rig r;
    rig_open(&r, test_seed());
    for (int l = 0; l < 4; l++) OK(copy_in(&r, l, 0));
    for (int l = 0; l < 4; l++) {
        OK(copy_in(&r, l, 0));
        OK(cudaMemsetAsync(r.dev[l == 3 ? 0 : l], 0, 4, r.s[0]));
    }
    OK(cudaStreamSynchronize(r.s[0]));
    CHECK(standin_overlap_ns(STANDIN_LINK_IN, STANDIN_COMPUTE) == 0 && standin_busy_ns(STANDIN_LINK_IN) > 0);
    rig_close(&r);

    rig_open(&r, test_seed());
    for (int l = 0; l < 4; l++) {
        OK(copy_in(&r, l, 0));
        OK(cudaEventRecord(r.e[l], r.s[0]));
        OK(cudaStreamWaitEvent(r.s[1], r.e[l], 0));
        OK(cuda_add(r.s[1], OPS_F32, N, r.dev[l], r.dev[l], r.dev[l]));
    }
    standin_run(STANDIN_ALL);
    CHECK(standin_overlap_ns(STANDIN_LINK_IN, STANDIN_COMPUTE) > 0 && clean());
    float ms = 0;
    OK(cudaEventElapsedTime(&ms, r.e[0], r.e[3]));
    CHECK(ms > 0);
    CHECK(standin_trace_write("standin_trace.json") && unlink("standin_trace.json") == 0);
    rig_close(&r);
}

/* y = x w^T + bias in column-major terms: d[m, n] = A^T[m, k] B[k, n]. */
struct matmul {
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t d;
    cublasLtMatrixLayout_t a, b, o;
    cublasLtMatmulPreference_t p;
    cublasLtMatmulHeuristicResult_t r[4];
    int n;
};

static void matmul_open(struct matmul *t, uint64_t m, uint64_t n, uint64_t k, const float *bias)
{
    const int32_t yes = CUBLAS_OP_T;
    const int epilogue = CUBLASLT_EPILOGUE_BIAS;
    const uint64_t workspace = 1 << 20;
    *t = (struct matmul){ 0 };
    LT(cublasLtCreate(&t->lt));
    LT(cublasLtMatmulDescCreate(&t->d, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT(cublasLtMatmulDescSetAttribute(t->d, CUBLASLT_MATMUL_DESC_TRANSA, &yes, sizeof yes));
    LT(cublasLtMatmulDescSetAttribute(t->d, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    LT(cublasLtMatmulDescSetAttribute(t->d, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    LT(cublasLtMatrixLayoutCreate(&t->a, CUDA_R_32F, k, m, (int64_t)k));
    LT(cublasLtMatrixLayoutCreate(&t->b, CUDA_R_32F, k, n, (int64_t)k));
    LT(cublasLtMatrixLayoutCreate(&t->o, CUDA_R_32F, m, n, (int64_t)m));
    LT(cublasLtMatmulPreferenceCreate(&t->p));
    LT(cublasLtMatmulPreferenceSetAttribute(t->p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    LT(cublasLtMatmulAlgoGetHeuristic(t->lt, t->d, t->a, t->b, t->o, t->o, t->p, 4, t->r, &t->n));
}

static void matmul_close(struct matmul *t)
{
    LT(cublasLtMatmulPreferenceDestroy(t->p));
    LT(cublasLtMatrixLayoutDestroy(t->a));
    LT(cublasLtMatrixLayoutDestroy(t->b));
    LT(cublasLtMatrixLayoutDestroy(t->o));
    LT(cublasLtMatmulDescDestroy(t->d));
    LT(cublasLtDestroy(t->lt));
}

TEST(standin_products_by_each_algorithm)
{
    enum { M = 6, NN = 4, K = 64 };
    struct rig r;
    struct matmul t;
    void *workspace = NULL;
    const float alpha = 1, beta = 0;
    float first[M * NN];
    rig_open(&r, test_seed());
    OK(cudaMalloc(&workspace, 4096));
    for (int k = 0; k < N; k++) r.host[0][k] = (float)sin(k), r.host[1][k] = (float)cos(3 * k);
    for (int i = 0; i < 3; i++) OK(copy_in(&r, i, 0));
    matmul_open(&t, M, NN, K, r.dev[2]);
    CHECK(t.n == 3 && t.r[0].workspaceSize > 0); /* a long sum: cut into parts first */
    for (int i = 0; i < t.n; i++) {
        LT(cublasLtMatmul(t.lt, t.d, &alpha, r.dev[0], t.a, r.dev[1], t.b, &beta, r.dev[3], t.o, r.dev[3], t.o, &t.r[i].algo,
                          workspace, 4096, r.s[0]));
        OK(cudaMemcpyAsync(r.host[3], r.dev[3], sizeof first, cudaMemcpyDeviceToHost, r.s[0]));
        OK(cudaStreamSynchronize(r.s[0]));
        for (int o = 0; o < M; o++)
            for (int row = 0; row < NN; row++) {
                double sum = r.host[2][o];
                for (int k = 0; k < K; k++) sum += (double)r.host[0][o * K + k] * (double)r.host[1][row * K + k];
                CHECK(fabs(sum - (double)r.host[3][row * M + o]) < 1e-4);
            }
        if (i == 0) memcpy(first, r.host[3], sizeof first);
        else CHECK(memcmp(first, r.host[3], sizeof first) != 0); /* an algorithm is a part of the bits */
    }
    CHECK(clean());
    CHECK(cublasLtMatmul(t.lt, t.d, &alpha, r.dev[0], t.a, r.dev[1], t.b, &beta, r.dev[3], t.o, r.dev[3], t.o, &t.r[0].algo,
                         NULL, 0, r.s[0]) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(cublasLtMatmul(t.lt, t.d, &alpha, r.dev[0] + 1, t.a, r.dev[1], t.b, &beta, r.dev[3], t.o, r.dev[3], t.o, &t.r[0].algo,
                         workspace, 4096, r.s[0]) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(standin_found(STANDIN_ALIGNMENT) == 1);
    matmul_close(&t);
    OK(cudaFree(workspace));
    rig_close(&r);
}

TEST(standin_by_a_thread)
{
    for (int round = 0; round < 20; round++) {
        struct rig r;
        memset(&r, 0, sizeof r);
        standin_open(&(struct standin_cfg){ .mode = STANDIN_THREAD, .seed = test_seed() + (uint64_t)round });
        rig_fill(&r);
        for (int k = 0; k < 10; k++) {
            pipeline(&r, -1);
            OK(cudaStreamSynchronize(r.s[2]));
            for (int i = 0; i < N; i++) CHECK(r.host[2][i] == (float)(2 * i + 1));
        }
        CHECK(clean());
        OK(cudaDeviceSynchronize());
        rig_close(&r);
    }
}

/* Simulation: a callback wakes the waiting thread, time passes by the rates, a run is a function of its seeds. */
struct told { struct exec_event ev; };
static void CUDART_CB wake(cudaStream_t s, cudaError_t status, void *arg)
{
    (void)s;
    (void)status;
    exec_event_set(&((struct told *)arg)->ev);
}

static void simulate(uint64_t exec_seed, uint64_t seed, uint64_t *hash, uint64_t *ns)
{
    struct exec *ex;
    struct stk_error err = { 0 };
    struct rig r;
    struct told told;
    memset(&r, 0, sizeof r);
    CHECK_OK(exec_open_sim(exec_seed, &ex, &err), &err);
    CHECK(standin_open_sim(&(struct standin_cfg){ .mode = STANDIN_SIM, .seed = seed, .copy_in_bytes_per_s = 1e6 }, ex));
    rig_fill(&r);
    exec_event_init(ex, &told.ev);
    for (int k = 0; k < 3; k++) {
        pipeline(&r, -1);
        exec_event_reset(&told.ev);
        OK(cudaStreamAddCallback(r.s[2], wake, &told, 0));
        CHECK_OK(exec_event_wait(&told.ev, UINT64_MAX, &err), &err);
        for (int i = 0; i < N; i++) CHECK(r.host[2][i] == (float)(2 * i + 1));
    }
    *ns = exec_now_ns(ex);
    CHECK(clean());
    *hash = standin_trace_hash();
    rig_empty(&r);
    standin_close_sim();
    exec_close(ex);
}

TEST(standin_in_simulation)
{
    for (uint64_t i = 0; i < 20; i++) {
        uint64_t ns[2] = { 0 }, hash[2] = { 0 };
        for (int again = 0; again < 2; again++) simulate(i, test_seed() + i, &hash[again], &ns[again]);
        CHECK(hash[0] == hash[1] && ns[0] == ns[1]);
        CHECK(ns[0] >= 6 * BYTES * UINT64_C(1000) && ns[0] < 7 * BYTES * UINT64_C(1000)); /* six copies in at 1 MB/s */
    }
}
