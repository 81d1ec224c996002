/* tests/trainer/test_busiest.c - a resource's own time, and the steps beside it. */
#include "tests/test.h"
#include "trainer/busiest.h"

#include <math.h>

static bool near(double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); }

TEST(busiest_a_drive_needs_the_better_of_apart_and_at_once)
{
    /* both directions at once give more than either */
    CHECK(near(busiest_drive_s(2e9, 1e9, 3e9, 3e9, 3e9), 2.0));
    /* more is read than written: the rest is read alone */
    CHECK(near(busiest_drive_s(2e9, 1e9, 3e9, 7e9, 3e9), 4.0));
    CHECK(near(busiest_drive_s(2e9, 1e9, 3e9, 3e9, 5e9), 4.0));
    /* a drive that suffers when both meet: one after the other is its own time */
    CHECK(near(busiest_drive_s(3e9, 1.5e9, 1.0e9, 3e9, 3e9), 3.0));
    CHECK(near(busiest_drive_s(3e9, 1.5e9, 1.0e9, 6e9, 0), 2.0));
    /* not measured, wholly or in part */
    CHECK(busiest_drive_s(2e9, 1e9, 0, 3e9, 3e9) == 0);
    CHECK(near(busiest_drive_s(0, 0, 1e9, 3e9, 1e9), 4.0));
}

static const struct busiest_in run = {
    .step_s = 10, .compute_s = 4, .at_drive_s = 8.264, .bytes = 15e9, .rates_s = 7.5, .drives = 1
};

/* A transfer at the drive for 83 % of the time, and the bytes are 75 % at what it can do: it was
 * occupied, and waited for more, in the rest. The step is 1.33 of its own time, not 1.21. */
TEST(busiest_occupied_is_not_busy)
{
    struct busiest b = busiest_find(&run);
    CHECK(b.nvme && b.by == BUSIEST_BY_RATES && near(b.nvme_s, 7.5) && near(b.ratio, 10 / 7.5));
    CHECK(b.queue_rate == 0);
}

/* What the drive gave with its queue full is its rate in this run. */
TEST(busiest_a_full_queue_tells_the_rate)
{
    struct busiest_in in = run;
    in.full_s = 2;
    in.full_bytes = 2 * 1.9e9;
    struct busiest b = busiest_find(&in);
    CHECK(b.by == BUSIEST_BY_QUEUE && near(b.queue_rate, 1.9e9) && near(b.nvme_s, 15 / 1.9));
    CHECK(near(b.ratio, 10 / (15 / 1.9)));
    /* a drive that fell behind its measurement and never stopped: at its limit, not 1.33 from it */
    in.full_s = in.at_drive_s = 9.9;
    in.full_bytes = in.bytes * 0.99;
    b = busiest_find(&in);
    CHECK(b.by == BUSIEST_BY_QUEUE && b.ratio < 1.02 && b.ratio >= 1);
    /* no more than the time with a transfer there, in which it moved everything */
    in.full_bytes = 1e9;
    b = busiest_find(&in);
    CHECK(near(b.nvme_s, 9.9));
    /* a moment of it proves nothing */
    in = run;
    in.full_s = 0.1;
    in.full_bytes = 1e7;
    CHECK(busiest_find(&in).by == BUSIEST_BY_RATES);
    /* several drives: whose queue was full is not known */
    in.full_s = 5;
    in.drives = 2;
    CHECK(busiest_find(&in).by == BUSIEST_BY_RATES);
}

TEST(busiest_without_a_measurement_the_bound_is_named_as_one)
{
    struct busiest_in in = run;
    in.rates_s = 0;
    struct busiest b = busiest_find(&in);
    CHECK(b.by == BUSIEST_BY_TIME && near(b.nvme_s, 8.264));
    in.at_drive_s = 12; /* counted a step later */
    CHECK(near(busiest_find(&in).nvme_s, 10));
}

TEST(busiest_compute)
{
    struct busiest_in in = run;
    in.compute_s = 9.6;
    struct busiest b = busiest_find(&in);
    CHECK(!b.nvme && near(b.ratio, 10 / 9.6));
    in = (struct busiest_in){ .step_s = 1 };
    CHECK(busiest_find(&in).ratio == 0);
}

TEST_MAIN()
