/* tests/gpu/simt/test_simt.c - the executor itself: its planted faults (faults.cu) are found, each with a sentence
 * that names the right things, under every seed; their right versions raise nothing; order, shuffles and
 * conversions are what CUDA's documentation says. */
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
    EXPECT(struct_end, BOUNDS, "struct_end<true>", "thread (2,0,0) writes 12 bytes at offset 792 of 'y' (800 bytes): 4 beyond"),
    EXPECT(tile_index, UNDEFINED, "tile_index<true>", "(faults.cu:", "has index 64 in an array of type 'float [64]'"),
    EXPECT(unwritten_tile, UNWRITTEN, "unwritten_tile<true>", "thread (56,0,0) reads 4 bytes at offset 28 of the shared array "
           "'tile'", "nobody has written byte 28"),
    EXPECT(unwritten_input, UNWRITTEN, "unwritten_input<true>", "block (3,0,0), thread (7,0,0) reads 4 bytes at offset 800 of 'x'"),
    EXPECT(two_blocks, RACE, "two_blocks<true>", "of 'y'", "blocks of one launch have no order"),
    EXPECT(divergent, BARRIER, "divergent<true>", "faults.cu:"),
    EXPECT(early_end, BARRIER, "early_end<true>", "block (3,0,0), thread (", "end"),
    EXPECT(absent_lane, WARP, "absent_lane<true>", "mask 0xffffffff"),
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
    EXPECT(overflow, UNDEFINED, "overflow<true>", "a sum overflows the range of type 'int'"),
    EXPECT(large_block, LAUNCH, "copy<true>", "a grid of (4,1,1) blocks of (1056,1,1) threads"),
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

TEST_MAIN()
