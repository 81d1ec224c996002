/* tests/gpu/cuda/test_dnn_library.c - our graphs of attention judged by cuDNN itself, where it is installed, for cards
 * that are described to it (since 9.8 a plan needs no card): it finds engines, compiles their kernels and says how much
 * workspace they want. Nothing is computed: what the graphs mean is test_device_dnn.c's, on the stand-in. Skipped where
 * cuDNN 9 or CUDA's run-time compiler are missing. */
#include "tests/test.h"

#include "gpu/cuda/cuda_dnn.h"
#include <dlfcn.h>

TEST_MAIN()

static const struct card { /* NVIDIA's data sheets and occupancy tables */
    const char *name;
    int version, multiprocessors, shared_most, threads, blocks;
    int64_t l2_bytes;
} cards[] = {
    { "A100", 800, 108, 166912, 2048, 32, 41943040 },
    { "RTX 4090", 890, 128, 101376, 1536, 24, 75497472 },
    { "H200", 900, 132, 232448, 2048, 32, 62914560 },
    { "B200", 1000, 148, 232448, 2048, 32, 132644864 },
    { "RTX 5090", 1200, 170, 101376, 1536, 24, 100663296 },
};
enum { CARDS = sizeof cards / sizeof cards[0] };

static bool described(const struct dnn_table *t, const struct card *c, cudnnBackendDescriptor_t *out)
{
    char json[1024];
    int n = snprintf(json, sizeof json,
                     "{\"maxGridSize\": [2147483647, 65535, 65535], \"maxBlockSize\": [1024, 1024, 64], "
                     "\"regsPerBlock\": 65536, \"multiProcessorCount\": %d, \"warpSize\": 32, "
                     "\"maxSharedMemoryPerBlock\": 49152, \"maxSharedMemoryPerBlockOptin\": %d, "
                     "\"reservedSharedMemoryPerBlock\": 1024, \"maxRegistersPerSM\": 65536, \"maxCtasPerSM\": %d, "
                     "\"maxThreadsPerBlock\": 1024, \"maxThreadsPerSM\": %d, \"pciDeviceId\": 0, \"isTccDriver\": 0, "
                     "\"supportCoopLaunch\": 1, \"smClockRateKHz\": 1980000, \"memClockRateKHz\": 2619000, "
                     "\"l2CacheSize\": %lld, \"deviceName\": \"%s\", \"deviceVer\": %d, \"driverVer\": 13000, "
                     "\"cudaDeviceId\": 0, \"totalGlobalMem\": 25000000000}",
                     c->multiprocessors, c->shared_most, c->blocks, c->threads, (long long)c->l2_bytes, c->name, c->version);
    return t->cudnnBackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, out) == CUDNN_STATUS_SUCCESS &&
           t->cudnnBackendSetAttribute(*out, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, n, json) ==
               CUDNN_STATUS_SUCCESS &&
           t->cudnnBackendFinalize(*out) == CUDNN_STATUS_SUCCESS;
}

static struct dnn_shape shape_of(int64_t n_seq, int64_t seq, int64_t heads, int64_t kv_heads, int64_t dim, bool backward)
{
    const int64_t row = (heads + 2 * kv_heads) * dim;
    return (struct dnn_shape){ n_seq, seq, heads, kv_heads, dim, row, row, row, heads * dim, backward };
}

/* A plan for this card, or why not. */
static bool planned(const struct dnn_table *t, const struct card *c, const struct dnn_shape *s, uint64_t *workspace_bytes)
{
    struct dnn_card card = { 0 };
    struct dnn_plan p;
    if (!described(t, c, &card.described)) return false;
    dnn_plan_make(&p, t, &card, s);
    const bool there = p.plan != NULL;
    printf("# %s, %d x %d tokens, %d/%d heads of %d, %s: ", c->name, (int)s->n_seq, (int)s->seq, (int)s->heads,
           (int)s->kv_heads, (int)s->head_dim, s->backward ? "backward" : "forward");
    if (there) printf("engine %d, %.1f MiB of workspace\n", (int)p.engine, (double)p.workspace_bytes / 1048576);
    else printf("none (%s, status %d, %s: %s)\n", p.g.call ? p.g.call : "-", (int)p.g.st, p.g.what, p.g.text);
    *workspace_bytes = p.workspace_bytes;
    dnn_plan_free(&p);
    t->cudnnBackendDestroyDescriptor(card.described);
    return there;
}

/* The driver's stub, and the compiler, before cuDNN looks for them. NULL: everything is there. */
static const char *missing(struct dnn_table *t)
{
    static const char *const compilers[] = { "libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so.13",
                                             "/usr/local/cuda/lib/libnvrtc.so.13" };
    const char *stub = getenv("STK_DRIVER_STUB");
    struct stk_error err = { 0 };
    static char why[256];
    void *compiler = NULL;
    for (size_t i = 0; i < sizeof compilers / sizeof compilers[0] && !compiler; i++)
        compiler = dlopen(compilers[i], RTLD_NOW | RTLD_GLOBAL);
    if (!compiler) return "no libnvrtc.so.13";
    if (!stub || !dlopen(stub, RTLD_NOW | RTLD_GLOBAL)) return "no stub of the driver (STK_DRIVER_STUB)";
    if (dnn_table_open(t, &err) == STK_OK) return NULL;
    snprintf(why, sizeof why, "%.255s", err.text);
    return why;
}

/* Forward and backward, grouped and not, a length that is no multiple of anything: a plan on every card, whose
 * workspace is about two bytes a score in backward and nothing that counts in forward. */
TEST(cuda_dnn_library_has_plans_for_our_graphs)
{
    struct dnn_table t;
    const char *why = missing(&t);
    if (why) SKIP(why);
    printf("# cuDNN %d\n", (int)t.cudnnGetVersion());
    for (int c = 0; c < CARDS; c++)
        for (int backward = 0; backward < 2; backward++)
            for (int odd = 0; odd < (c == 1 || c == 2 ? 2 : 1); odd++) { /* each plan takes half a second */
                const struct dnn_shape s = odd ? shape_of(1, 333, 4, 4, 64, backward) : shape_of(2, 1024, 8, 2, 128, backward);
                const uint64_t side = ((uint64_t)s.seq + 127) / 128 * 128, scores = 2 * side * side * (uint64_t)(s.n_seq * s.heads);
                uint64_t workspace = 0;
                CHECK(planned(&t, &cards[c], &s, &workspace));
                CHECK(backward ? workspace <= 2 * scores : workspace <= 1 << 20);
            }
    dnn_table_close(&t);
}

/* 256 dimensions: forward everywhere, backward where the documentation has it (9.0). Below 8.0: nothing, and no failure. */
TEST(cuda_dnn_library_has_none_where_it_says_so)
{
    static const struct card old = { "T4", 750, 40, 65536, 1024, 16, 4194304 };
    struct dnn_table t;
    const char *why = missing(&t);
    uint64_t workspace;
    if (why) SKIP(why);
    const struct dnn_shape small = shape_of(1, 256, 2, 2, 64, false), wide = shape_of(1, 256, 2, 1, 256, false),
                           wide_back = shape_of(1, 256, 2, 1, 256, true);
    CHECK(!planned(&t, &old, &small, &workspace));
    CHECK(planned(&t, &cards[1], &wide, &workspace) && !planned(&t, &cards[1], &wide_back, &workspace));
    CHECK(planned(&t, &cards[2], &wide_back, &workspace));
    dnn_table_close(&t);
}
