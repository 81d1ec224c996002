/* tests/gpu/test_cuda_device.c - device cuda where there is no card: a build without it, and one
 * with it on a machine without driver or card, say what is missing. Where there is a card these are
 * skipped: tests/gpu/accept.sh is for that. */
#include "tests/test.h"

#include "base/exec.h"
#include "gpu/device_impl.h"
#ifdef STK_CUDA
#include "gpu/cuda/cuda_impl.h"
#endif

TEST_MAIN()

#define DESCRIBE_BYTES 256

/* NULL: there is a card. Else why not. */
static const char *absent(struct stk_error *err)
{
    char text[DESCRIBE_BYTES];
    return dev_describe(DEV_CUDA, text, sizeof text, err) == STK_OK ? NULL : err->text;
}

/* Every refusal ends with what to do, and is one sentence of the causes that are possible without a
 * card. */
static bool names_cause(const char *text)
{
    static const char *const causes[] = { "not in this build", "no NVIDIA driver",
                                          "the driver is too old", "but no card" };
    for (size_t i = 0; i < sizeof causes / sizeof causes[0]; i++)
        if (strstr(text, causes[i])) return strstr(text, "host") != NULL && !strchr(text, '\n');
    return false;
}

TEST(cuda_absent_is_described)
{
    struct stk_error err = { 0 };
    const char *why = absent(&err);
    if (!why) SKIP("there is a card");
    printf("# %s\n", why);
    CHECK(err.code == STK_ERR_UNSUPPORTED && names_cause(why));
}

TEST(cuda_absent_is_refused_at_open)
{
    struct stk_error err = { 0 }, described = { 0 };
    struct exec *ex = NULL;
    struct dev *d = NULL;
    const char *why = absent(&described);
    if (!why) SKIP("there is a card");
    REQUIRE(exec_open_threads(&ex, &err) == STK_OK);
    for (int again = 0; again < 2;
         again++) { /* a refused open leaves nothing that changes the next */
        struct dev_cfg cfg = { .kind = DEV_CUDA, .ex = ex, .memory_bytes = (uint64_t)again << 30 };
        stk_error_clear(&err);
        CHECK(dev_open(&cfg, &d, &err) == STK_ERR_UNSUPPORTED);
        CHECK(d == NULL && strcmp(err.text, why) == 0);
    }
    exec_close(ex);
}

#ifdef STK_CUDA

/* The library opens without a driver, and has all that is used. */
TEST(cuda_lt_table_is_complete)
{
    struct stk_error err = { 0 };
    struct cuda_lt lt;
    if (cuda_lt_table(&lt, &err) != STK_OK) {
        CHECK(err.code == STK_ERR_UNSUPPORTED && strstr(err.text, "libcublasLt.so."));
        SKIP("libcublasLt is not installed here");
    }
    CHECK(lt.cublasLtGetVersion() / 10000 == CUBLAS_VER_MAJOR);
    cuda_lt_free(&lt);
    CHECK(lt.library == NULL && lt.cublasLtMatmul == NULL);
}

TEST(cuda_tiles_cover_all_rows)
{
    static const uint64_t totals[] = { 1, 2, 127, 128, 129, 1000, 4096, 16384, 100003 };
    for (size_t i = 0; i < sizeof totals / sizeof totals[0]; i++)
        for (uint64_t row = 4; row < (uint64_t)1 << 24; row *= 7) {
            const uint64_t limit = (uint64_t)128 << 20, tile = cuda_tile(totals[i], row, limit);
            CHECK(tile >= 1 && tile <= totals[i]);
            CHECK(tile == totals[i] || tile % 128 == 0);
            CHECK(tile * row <= limit || tile == totals[i] || tile == 128);
        }
    CHECK(cuda_tile(1000, 0, 1) == 1000);
}

TEST(cuda_commands_have_a_shape_in_words)
{
    char text[CUDA_WHERE_BYTES];
    for (int k = 0; k < DEV_CMD_N; k++) {
        struct dev_cmd c = { .kind = (enum dev_cmd_kind)k };
        CHECK(strncmp(cuda_cmd_text(&c, text), dev_cmd_name(c.kind),
                      strlen(dev_cmd_name(c.kind))) == 0);
    }
    struct dev_cmd c = { .kind = DEV_CMD_LINEAR_FORWARD,
                         .u.linear = { .rows = 4096, .in = 512, .out = 1536 } };
    CHECK(strcmp(cuda_cmd_text(&c, text), "linear_forward of 4096 rows, 512 in, 1536 out") == 0);
}

#endif
