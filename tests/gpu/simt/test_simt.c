#include "tests/gpu/simt/faults.h"
#include "tests/gpu/simt/simt.h"
#include "tests/test.h"

TEST(simt_block_sum)
{
    float *x = simt_alloc(1280 * sizeof *x, "x"), *y = simt_alloc(10 * sizeof *y, "y");
    for (int i = 0; i < 1280; i++) x[i] = (float)(i % 7);
    simt_written(x, 1280 * sizeof *x);
    for (uint64_t seed = 0; seed < 50; seed++) {
        simt_seed(seed);
        faults_block_sum(x, y, 10);
        if (simt_error()) printf("# %s\n", simt_error());
        CHECK(!simt_error());
        for (int b = 0; b < 10; b++) {
            float s = 0;
            for (int i = 0; i < 128; i++) s += x[b * 128 + i];
            CHECK(s == y[b]);
        }
    }
    simt_free(x);
    simt_free(y);
}

TEST_MAIN()
