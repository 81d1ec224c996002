/* tests/gpu/simt/test_simt.c - the executor itself: its planted faults (faults.cu) are found, each with a sentence
 * that names the right things, under every seed; their right versions raise nothing; order, shuffles and
 * conversions are what CUDA's documentation says. */
#include "base/convert.h"
#include "tests/gpu/simt/basics.h"
#include "tests/gpu/simt/faults.h"
#include "tests/gpu/simt/simt.h"
#include "tests/test.h"

enum { N = 200 };

static const struct expected {
    const char *name, *what;
    enum simt_fault kind, or_kind;  /* or_kind: what the same fault is under another order of threads */
    const char *says[3];            /* parts of the sentence, whichever kind */
} expected[FAULTS_N] = {
#define NAMES(name_, what_) [FAULTS_##name_].name = #name_, [FAULTS_##name_].what = what_,
    FAULTS_MAP(NAMES)
#undef NAMES
#define EXPECT(name_, kind_, ...)                                                                  \
    [FAULTS_##name_].kind = SIMT_##kind_, [FAULTS_##name_].says = { "kernel " __VA_ARGS__ }
    EXPECT(tree_sum, RACE, "tree_sum<true>", "the shared array 'part'", "no barrier is between"),
    EXPECT(neighbour, RACE, "neighbour<true>", "the shared array 'tile' (256 bytes)"),
    [FAULTS_neighbour].or_kind = SIMT_UNWRITTEN,
    EXPECT(reuse, RACE, "reuse<true>", "the shared array 'tile' (256 bytes)", "no barrier is between"),
    EXPECT(counter, RACE, "counter<true>", "the shared array 'total' (4 bytes)"),
    EXPECT(counter_start, RACE, "counter_start<true>", "of 'y' (800 bytes)", "no barrier is between"),
    [FAULTS_counter_start].or_kind = SIMT_UNWRITTEN,
    EXPECT(after_end, BOUNDS, "after_end<true>", "writes 4 bytes at 0x", ", 0 bytes after the end of 'y' (800 bytes)"),
    EXPECT(before_start, BOUNDS, "before_start<true>", "block (0,0,0), thread (0,0,0) reads 4 bytes",
           ", 4 bytes before the start of 'x' (804 bytes)"),
    /* gcc: an object that begins inside; clang: its third number. */
    EXPECT(struct_end, BOUNDS, "struct_end<true>", "block (1,0,0), thread (2,0,0) writes", "'y' (800 bytes)"),
    EXPECT(tile_index, UNDEFINED, "tile_index<true>", "(faults.cu:", "has index 64 in an array of type 'float"),
    EXPECT(unwritten_tile, UNWRITTEN, "unwritten_tile<true>", "thread (56,0,0) reads 4 bytes at offset 28 of the shared array "
           "'tile'", "nobody has written byte 28"),
    EXPECT(unwritten_input, UNWRITTEN, "unwritten_input<true>", "block (3,0,0), thread (7,0,0) reads 4 bytes at offset 800 of 'x'"),
    EXPECT(two_blocks, RACE, "two_blocks<true>", "of 'y'", "blocks of one launch have no order"),
    EXPECT(divergent, BARRIER, "divergent<true>", "faults.cu:"),
    EXPECT(early_end, BARRIER, "early_end<true>", "block (3,0,0), thread (", "end"),
    EXPECT(absent_lane, WARP, "absent_lane<true>", "mask 0xffffffff", "has ended"),
    EXPECT(other_mask, WARP, "other_mask<true>", "__shfl_xor_sync with mask 0xff"),
    EXPECT(foreign_lane, WARP, "foreign_lane<true>", "reads from lane ", "which the mask does not name"),
    EXPECT(warp_pass, RACE, "warp_pass<true>", "the shared array 'tile'"),
    [FAULTS_warp_pass].or_kind = SIMT_UNWRITTEN,
    EXPECT(host_pointer, BOUNDS, "copy<true>", "reads 4 bytes at 0x", "(a host pointer?)"),
    EXPECT(freed, FREED, "copy<true>", "reads 4 bytes at offset ", "of 'gone' (804 bytes), which was freed"),
    EXPECT(misaligned, MISALIGNED, "misaligned<true>", "float4", "which is not a multiple of 16"),
    EXPECT(copy_end, BOUNDS, "copy_end<true>", "thread (0,0,0) writes 804 bytes at offset 0 of 'y' (800 bytes): 4 beyond its end"),
    EXPECT(constant, READ_ONLY_WRITTEN, "constant<true>", "of 'x', which is only to be read"),
    EXPECT(local_memory, BOUNDS, "local_memory<true>", "another thread's local memory"),
    EXPECT(overflow, UNDEFINED, "overflow<true>", "has a sum that overflows the range of type 'int'"),
    EXPECT(large_block, LAUNCH, "copy<true>", "a grid of (4,1,1) blocks of (1056,1,1) threads"),
    EXPECT(large_shared, LAUNCH, "large_shared<true>: a block uses 49156 bytes of static shared memory"),
    EXPECT(halves, RACE, "halves<true>", "2 bytes at offset 16 of 'y'"),
};

/* Runs one kernel on fresh buffers. */
static int run(enum faults_kernel which, bool wrong, uint64_t seed, float *out)
{
    uint64_t size = (N + 1) * sizeof(float);
    float *x = simt_alloc(size, "x"), *y = simt_alloc(N * sizeof *y, "y"), *gone = simt_alloc(size, "gone");
    float *host = malloc(size);
    for (int i = 0; i < N; i++) x[i] = host[i] = (float)(i * 7 % 31);
    simt_written(x, which == FAULTS_unwritten_input ? N * sizeof *x : size);
    memcpy(gone, x, size);
    simt_written(gone, size);
    struct faults_args a = { x, y, N };
    if (which == FAULTS_host_pointer && wrong) a.x = host;
    if (which == FAULTS_freed) {
        a.x = gone;
        if (wrong) simt_free(gone);
    }
    if (which == FAULTS_constant) simt_read_only(x);
    simt_seed(seed);
    int rc = faults_launch(which, wrong, &a);
    if (out) memcpy(out, y, N * sizeof *y);
    simt_free(x);
    simt_free(y);
    if (which != FAULTS_freed || !wrong) simt_free(gone);
    free(host);
    return rc;
}

static void check_found(enum faults_kernel k, uint64_t seed)
{
    const struct expected *e = &expected[k];
    int rc = run(k, true, seed, NULL);
    const char *text = simt_error();
    bool good = text && (simt_error_kind() == e->kind || (e->or_kind && simt_error_kind() == e->or_kind)) && rc != 0;
    for (int i = 0; good && i < 3; i++) {
        if (!e->says[i]) continue;
        /* The same fault as an unwritten read says other things after the names. */
        if (i == 2 && simt_error_kind() != e->kind) continue;
        good = strstr(text, e->says[i]) != NULL;
    }
    if (!good && test_failures < 10) printf("# %s (%s), seed %" PRIu64 ": %s\n", e->name, e->what, seed, text ? text : "not found");
    else if (seed == 0) printf("# %s: %s\n", e->name, text);
    CHECK(good);
    simt_reset_error();
}

TEST(simt_planted_faults_are_found)
{
    uint64_t seeds = test_share(40);
    for (int k = 0; k < FAULTS_N; k++) {
        REQUIRE(expected[k].kind != SIMT_NONE);
#ifdef __clang__
        if (k == FAULTS_misaligned) continue; /* simt.h: WHAT IS NOT FOUND */
#endif
        for (uint64_t s = 0; s < seeds; s++) check_found((enum faults_kernel)k, s ? test_seed() + s : 0);
    }
}

TEST(simt_right_kernels_raise_nothing)
{
    uint64_t seeds = test_share(200);
    for (int k = 0; k < FAULTS_N; k++)
        for (uint64_t s = 0; s < seeds; s++) {
            int rc = run((enum faults_kernel)k, false, s ? test_seed() + s : 0, NULL);
            if (simt_error() && test_failures < 10) printf("# %s, seed %" PRIu64 ": %s\n", expected[k].name, s, simt_error());
            CHECK(rc == 0 && !simt_error());
            simt_reset_error();
        }
}

static void free_all(void **p, int n)
{
    for (int i = 0; i < n; i++) simt_free(p[i]);
}

static int shuffled(int k, int t)
{
    int lane = t % 32, warp = t - lane;
    switch (k) {
    case 0: return warp + 5;
    case 1: return t / 8 * 8 + 3;
    case 2: return lane < 2 ? t : t - 2;
    case 3: return lane % 16 < 12 ? t + 4 : t;
    case 4: return t ^ 9;
    case 5: return t ^ 1;
    case 6: {
        unsigned bits = 0;
        for (int i = 0; i < 32; i++) bits |= (unsigned)((warp + i) % 3 == 0) << i;
        return (int)bits;
    }
    default: return lane % 2 ? t : warp == 0;
    }
}

TEST(simt_shuffles)
{
    int *out = simt_alloc(BASICS_SHUFFLES * BASICS_LANES * sizeof *out, "out");
    for (uint64_t seed = 0; seed < 20; seed++) {
        simt_poison(out, BASICS_SHUFFLES * BASICS_LANES * sizeof *out);
        simt_seed(seed);
        CHECK(basics_shuffles(out) == cudaSuccess);
        for (int k = 0; k < BASICS_SHUFFLES; k++)
            for (int t = 0; t < BASICS_LANES; t++) CHECK(out[k * BASICS_LANES + t] == shuffled(k, t));
    }
    CHECK(!simt_error());
    simt_free(out);
}

/* All of bf16's and fp16's values, their neighbours in fp32 and the ties between them; NaNs are the card's one. */
TEST(simt_conversions_are_ours)
{
    uint64_t n = 0, most = 65536 * 8;
    float *x = simt_alloc(most * 4, "x"), *from[2] = { simt_alloc(most * 4, "b"), simt_alloc(most * 4, "h") };
    uint16_t *to[2] = { simt_alloc(most * 2, "bf16"), simt_alloc(most * 2, "fp16") }, *ours = malloc(most * 2);
    float *back = malloc(most * 4);
    for (uint32_t i = 0; i < 65536; i += test_brief() ? 17 : 5) {
        uint16_t h = (uint16_t)i;
        float f;
        convert_fp16_to_f32(&h, &f, 1);
        uint32_t bits[2] = { i << 16 }, steps[4] = { 0, 1, 0x1000, 0x8000 };
        memcpy(&bits[1], &f, 4);
        for (int j = 0; j < 8; j++) {
            uint32_t v = bits[j & 1] + steps[j >> 1];
            memcpy(&x[n++], &v, 4);
        }
    }
    simt_written(x, n * 4);
    simt_checks(0); /* other tests look at checks */
    CHECK(basics_convert(x, to[0], to[1], from[0], from[1], n) == cudaSuccess);
    simt_checks(SIMT_CHECK_ALL);
    for (int k = 0; k < 2; k++) {
        (k ? convert_f32_to_fp16 : convert_f32_to_bf16)(x, ours, n);
        (k ? convert_fp16_to_f32 : convert_bf16_to_f32)(to[k], back, n);
        for (uint64_t i = 0; i < n; i++) {
            CHECK(x[i] != x[i] ? to[k][i] == 0x7fff : to[k][i] == ours[i]);
            CHECK(x[i] != x[i] ? from[k][i] != from[k][i] : memcmp(&from[k][i], &back[i], 4) == 0);
        }
    }
    free(ours);
    free(back);
    free_all((void *[]){ x, from[0], from[1], to[0], to[1] }, 5);
}

/* Every thread once; seed 0 in ascending order; a seed gives its order again, another seed another one. */
TEST(simt_order_is_the_seeds)
{
    enum { THREADS = 12 * 24 };
    unsigned *next = simt_alloc(sizeof *next, "next");
    int *order = simt_alloc(THREADS * sizeof *order, "order"), before[THREADS] = { 0 };
    for (uint64_t round = 0; round < 40; round++) {
        *next = 0;
        simt_written(next, sizeof *next);
        simt_seed(round / 2);
        CHECK(basics_order(next, order) == cudaSuccess);
        CHECK(*next == THREADS && simt_unwritten_bytes(order, THREADS * sizeof *order) == 0);
        bool seen[THREADS] = { false };
        for (int i = 0; i < THREADS; i++) {
            REQUIRE(order[i] >= 0 && order[i] < THREADS);
            seen[order[i]] = true;
            if (round < 2) CHECK(order[i] == i);
        }
        for (int i = 0; i < THREADS; i++) CHECK(seen[i]);
        CHECK((memcmp(before, order, sizeof before) == 0) == (round % 2 == 1));
        memcpy(before, order, sizeof before);
    }
    free_all((void *[]){ next, order }, 2);
}

/* A block in which nobody waits changes stacks twice, whatever it has of threads; waiting ones keep their stacks. */
TEST(simt_threads_that_wait_and_that_do_not)
{
    struct simt_stats a, b;
    float *x = simt_alloc(640 * 4, "x"), *y = simt_alloc(640 * 4, "y");
    int *sum = simt_alloc(sizeof *sum, "sum");
    memset(x, 0, 640 * 4);
    simt_written(x, 640 * 4);
    simt_seed(0);
    simt_stats_read(&a);
    CHECK(basics_double(NULL, x, y, 640) == cudaSuccess);
    simt_stats_read(&b);
    CHECK(b.launches - a.launches == 1 && b.blocks - a.blocks == 10 && b.threads - a.threads == 640);
    CHECK(b.switches - a.switches == 20);
    CHECK(b.accesses - a.accesses >= 2 * 640);
    for (uint64_t seed = 0; seed < 3; seed++) {
        simt_seed(seed);
        CHECK(basics_deep(5, sum) == cudaSuccess);
        CHECK(*sum == 5 + 1 && !simt_error());
        if (simt_error()) printf("# %s\n", simt_error());
    }
    simt_stats_read(&a);
    CHECK(a.barriers - b.barriers == 3 * 6 && a.shared_bytes_max >= 4);
    free_all((void *[]){ x, y, sum }, 3);
}

static struct simt_launch *kept;
static int keep(struct simt_launch *l)
{
    kept = l;
    return cudaSuccess;
}

/* What a stand-in of the runtime does: keeps a launch, runs it later. */
TEST(simt_launches_can_wait)
{
    float *x = simt_alloc(400, "x"), *y = simt_alloc(400, "y");
    int (*at_once)(struct simt_launch *) = simt_submit;
    int stream = 0;
    simt_submit = keep;
    CHECK(basics_double((cudaStream_t)(void *)&stream, x, y, 100) == cudaSuccess);
    simt_submit = at_once;
    CHECK(simt_unwritten_bytes(y, 400) == 400);
    CHECK(strcmp(simt_launch_name(kept), "twice") == 0 && simt_launch_stream(kept) == &stream);
    for (int i = 0; i < 100; i++) x[i] = (float)i;
    simt_written(x, 400);
    simt_launch_run(kept);
    simt_launch_free(kept);
    CHECK(!simt_error() && simt_unwritten_bytes(y, 400) == 0 && y[99] == 198.0f);
    free_all((void *[]){ x, y }, 2);
}

static void check_kept(enum simt_fault kind, const char *says)
{
    bool good = simt_error() && simt_error_kind() == kind && strstr(simt_error(), says);
    if (!good) printf("# %s\n", simt_error() ? simt_error() : "not found");
    CHECK(good);
    simt_reset_error();
    CHECK(!simt_error() && simt_error_kind() == SIMT_NONE);
}

/* Accesses by what is no kernel, the bytes around a buffer, and ranges. */
TEST(simt_memory_of_copies)
{
    char own[64];
    char *x = simt_alloc(100, "x"), *none = simt_alloc(0, "none");
    CHECK((uintptr_t)x % 256 == 0 && (unsigned char)x[99] == 0xff);
    CHECK(!simt_access("copy of a block", x, 10, false));
    check_kept(SIMT_UNWRITTEN, "copy of a block reads 10 bytes at offset 0 of 'x' (100 bytes), and nobody has written byte 0");
    CHECK(simt_access("copy", x + 10, 80, true) && simt_access("copy", x + 89, 1, false));
    CHECK(simt_unwritten_bytes(x, 100) == 20);
    CHECK(!simt_access("copy", x + 80, 11, false));
    check_kept(SIMT_UNWRITTEN, "byte 90");
    CHECK(!simt_access("copy", x + 99, 2, true));
    check_kept(SIMT_BOUNDS, "copy writes 2 bytes at offset 99 of 'x' (100 bytes): 1 beyond its end");
    CHECK(!simt_access("copy", none, 1, true));
    check_kept(SIMT_BOUNDS, ", 0 bytes after the end of 'none' (0 bytes)");
    CHECK(simt_access("copy", x + 100, 0, true));
    simt_poison(x + 10, 40);
    CHECK(simt_unwritten_bytes(x, 100) == 60);
    CHECK(simt_register(own, 32, "own", SIMT_WRITTEN) && !simt_register(own + 31, 8, "overlap", 0));
    CHECK(simt_register(own + 32, 32, "next", 0));
    CHECK(simt_access("copy", own, 32, false) && !simt_access("copy", own, 33, false));
    check_kept(SIMT_BOUNDS, "of 'own' (32 bytes): 1 beyond its end");
    simt_unregister(own);
    CHECK(!simt_access("copy", own, 1, false));
    check_kept(SIMT_FREED, "of 'own' (32 bytes), which was freed");
    simt_unregister(own + 32);
    x[100] = 1;
    simt_free(x);
    check_kept(SIMT_BOUNDS, "something that is no kernel has written after the end of 'x' (100 bytes)");
    simt_free(none);
}

/* After a fault nothing runs until it is reset, and then all is as before. */
TEST(simt_first_fault_is_kept)
{
    float *x = simt_alloc(400, "x"), *y = simt_alloc(400, "y");
    CHECK(basics_double(NULL, x, y, 101) == cudaErrorIllegalAddress);
    CHECK(cudaPeekAtLastError() == cudaErrorIllegalAddress && cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaSuccess);
    memset(x, 0, 400);
    simt_written(x, 400);
    simt_poison(y, 400);
    CHECK(basics_double(NULL, x, y, 100) != cudaSuccess && simt_unwritten_bytes(y, 400) == 400);
    check_kept(SIMT_UNWRITTEN, "kernel twice (basics.cu:");
    cudaGetLastError();
    CHECK(basics_double(NULL, x, y, 100) == cudaSuccess && simt_unwritten_bytes(y, 400) == 0);
    free_all((void *[]){ x, y }, 2);
}

TEST_MAIN()
