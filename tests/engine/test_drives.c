/* tests/engine/test_drives.c - what the engine knows of the drives: given and measured weights,
 * refusals, room, figures of a step.
 *
 * Rates and facts come from here (the linker wraps measure_rates and drive_facts_read), so that two
 * folders of one disk are two drives of any speed; `real` lets the true ones through. */
#include "nvme/drive.h"
#include "nvme/io_sim.h"
#include "nvme/measure.h"
#include "tests/engine/world.h"
#include <sys/mount.h>

static struct fake { double rate[2]; stk_status status[2]; bool one_drive, real; uint32_t calls;
    uint64_t budget_ns; struct measure_load load;
} fake;

stk_status __real_measure_rates(const char *path, const struct measure_load *load, uint64_t budget_ns,
                                uint64_t write_bytes_max, struct measure_rates *out,
                                struct stk_error *err);
stk_status __wrap_measure_rates(const char *path, const struct measure_load *load, uint64_t budget_ns,
                                uint64_t write_bytes_max, struct measure_rates *out,
                                struct stk_error *err);
stk_status __real_drive_facts_read(const char *path, const char *sysfs, struct drive_facts *out,
                                   struct stk_error *err);
stk_status __wrap_drive_facts_read(const char *path, const char *sysfs, struct drive_facts *out,
                                   struct stk_error *err);

static int which(const char *path) { return path[strlen(path) - 1] == 'b'; }

stk_status __wrap_measure_rates(const char *path, const struct measure_load *load, uint64_t budget_ns,
                                uint64_t write_bytes_max, struct measure_rates *out,
                                struct stk_error *err)
{
    fake.calls++;
    fake.budget_ns = budget_ns;
    fake.load = *load;
    if (fake.real) return __real_measure_rates(path, load, budget_ns, write_bytes_max, out, err);
    int k = which(path);
    if (fake.status[k] != STK_OK)
        return stk_error_set(err, fake.status[k], 5, "%s: a planted failure", path);
    *out = (struct measure_rates){ .read_bytes_per_s = 2 * fake.rate[k],
                                   .write_bytes_per_s = fake.rate[k],
                                   .both_bytes_per_s = fake.rate[k],
                                   .read_p99_ns = 1000000,
                                   .mixed_read_p99_ns = 2000000,
                                   .direct = true };
    return STK_OK;
}

stk_status __wrap_drive_facts_read(const char *path, const char *sysfs, struct drive_facts *out,
                                   struct stk_error *err)
{
    if (fake.real) return __real_drive_facts_read(path, sysfs, out, err);
    int k = fake.one_drive ? 0 : which(path);
    *out = (struct drive_facts){ .device_id = 77 + (uint64_t)k, .numa_node = -1 };
    snprintf(out->device, sizeof out->device, "fake%d", k);
    snprintf(out->under, sizeof out->under, "fake%d", k);
    if (k == 0) {
        out->smart = true;
        out->percentage_used = 10;
        out->written_bytes = 1e14;
        out->endurance_bytes = 1e15;
        out->temperature_c = 41;
    }
    return STK_OK;
}

static void two(struct toy *t)
{
    fake = (struct fake){ .rate = { 3e9, 1e9 } };
    toy_init(t, 6, 1);
    t->cfg.nvme[0] = world_dir("a");
    t->cfg.nvme[1] = world_dir("b");
    t->cfg.params = t->cfg.optimizer_state = t->cfg.grads = STK_TIER_NVME;
}

static bool noted(const stk_engine *e, const char *words)
{
    const char *line;
    for (uint32_t i = 0; stk_note(e, i, &line); i++)
        if (strstr(line, words)) return true;
    return false;
}

/* Bytes of both directions on each folder over some steps, and the shares, are `a` to `b`. */
static void shares(struct toy *t, double a, double b)
{
    stk_drive d[2], after[2], none;
    RUN(t, toy_fill(t));
    for (uint32_t i = 0; i < 2; i++) CHECK(stk_drive_info(t->e, i, &d[i]));
    CHECK(!stk_drive_info(t->e, 2, &none));
    RUN(t, world_steps(t, 4, 1e-3));
    double moved[2];
    for (uint32_t i = 0; i < 2; i++) {
        CHECK(stk_drive_info(t->e, i, &after[i]));
        moved[i] = (double)(after[i].read_bytes + after[i].write_bytes - d[i].read_bytes -
                            d[i].write_bytes);
    }
    double want = a / (a + b), got = moved[0] / (moved[0] + moved[1]);
    printf("# share wanted %.3f, of the state %.3f, of the bytes moved %.3f\n", want,
           after[0].weight, got);
    CHECK(fabs(after[0].weight - want) < 0.04 && fabs(got - want) < 0.04);
    CHECK(fabs(after[0].weight + after[1].weight - 1) < 1e-9);
    CHECK(after[0].step_write_bytes > 0 || a == 0);
}

TEST(drives_given_weights_win)
{
    struct toy t;
    two(&t);
    t.cfg.nvme_weights[0] = 1;
    t.cfg.nvme_weights[1] = 3;
    RUN(&t, toy_open(&t));
    CHECK(fake.calls == 0); /* nothing is left to find out */
    shares(&t, 1, 3);
    stk_close(t.e);
    two(&t); /* measured when asked for, and still not weighed by it */
    t.cfg.nvme_weights[0] = 1;
    t.cfg.nvme_weights[1] = 3;
    t.cfg.measure_ns = 5000000;
    RUN(&t, toy_open(&t));
    CHECK(fake.calls == 2 && fake.budget_ns == 5000000);
    shares(&t, 1, 3);
    stk_close(t.e);
}

TEST(drives_measured_weights)
{
    struct toy t;
    stk_drive d;
    two(&t);
    RUN(&t, toy_open(&t));
    CHECK(fake.calls == 2 && fake.budget_ns == 1000000000u);
    CHECK(fake.load.block_bytes > 0 && fake.load.block_bytes % 4096 == 0);
    CHECK(fake.load.depth >= 2 && fake.load.depth <= 32 && fake.load.buffer_bytes > 0);
    shares(&t, 3, 1);
    CHECK(stk_drive_info(t.e, 0, &d) && d.both_bytes_per_s == 3e9 && d.read_bytes_per_s == 6e9 &&
          d.read_p99_ns == 1000000 && d.mixed_read_p99_ns == 2000000);
    CHECK(!strcmp(d.device, "fake0") && d.percentage_used == 10 && d.endurance_bytes == 1e15 &&
          d.written_bytes == 1e14 && d.temperature_c == 41 && d.first_of_drive == 0);
    CHECK(stk_drive_info(t.e, 1, &d) && d.percentage_used == UINT32_MAX &&
          d.temperature_c == INT32_MIN && d.endurance_bytes == 0 && d.first_of_drive == 1);
    CHECK(noted(t.e, "both at once 3.00 GB/s") && noted(t.e, "% of the state on NVMe") &&
          noted(t.e, "--optimizer-state host"));
    stk_close(t.e);
}

/* What the note on wear says of the optimizer state, for an update mode. */
static void wear_of(stk_update update, char out[64])
{
    struct toy t;
    const char *line, *at = NULL;
    two(&t);
    t.cfg.update = update;
    t.cfg.measure_ns = UINT64_MAX;
    RUN(&t, toy_open(&t));
    for (uint32_t i = 0; stk_note(t.e, i, &line); i++)
        if (strstr(line, "what ends it")) at = strstr(line, "optimizer state ");
    CHECK(at);
    snprintf(out, 64, "%.*s", at ? (int)strcspn(at, "(") : 0, at ? at : "");
    stk_close(t.e);
}

/* A speculating plan has each write of the state twice, of which one passes. */
TEST(drives_wear_is_not_counted_twice)
{
    char chase[64], speculate[64];
    wear_of(STK_UPDATE_CHASE, chase);
    wear_of(STK_UPDATE_SPECULATE, speculate);
    CHECK(chase[0] && !strcmp(speculate, chase));
}

TEST(drives_one_drive_is_measured_once)
{
    struct toy t;
    two(&t);
    fake.one_drive = true;
    RUN(&t, toy_open(&t));
    CHECK(fake.calls == 1);
    shares(&t, 1, 1);
    stk_close(t.e);
}

TEST(drives_measured_only_when_it_pays)
{
    struct toy t;
    stk_drive d;
    two(&t);
    t.cfg.nvme[1] = NULL; /* one folder, little to move */
    RUN(&t, toy_open(&t));
    CHECK(fake.calls == 0 && stk_drive_info(t.e, 0, &d) && d.both_bytes_per_s == 0 &&
          d.weight == 1);
    stk_close(t.e);
    two(&t);
    t.cfg.measure_ns = UINT64_MAX;
    RUN(&t, toy_open(&t));
    CHECK(fake.calls == 0);
    shares(&t, 1, 1);
    stk_close(t.e);
    two(&t); /* a dry seal writes nothing */
    RUN(&t, stk_open(&t.cfg, &t.e));
    RUN(&t, toy_describe(&t));
    RUN(&t, stk_seal(t.e, true));
    CHECK(fake.calls == 0 && stk_drive_info(t.e, 1, &d) && d.weight == 0.5 &&
          d.step_write_bytes > 0 && noted(t.e, "not measured"));
    stk_close(t.e);
    two(&t); /* nothing on NVMe */
    t.cfg.params = t.cfg.optimizer_state = t.cfg.grads = STK_TIER_HOST;
    RUN(&t, toy_open(&t));
    CHECK(fake.calls == 0);
    stk_close(t.e);
    two(&t); /* simulated execution is a function of its seed */
    t.cfg.simulate = true;
    t.cfg.storage = STK_STORAGE_POSIX;
    t.cfg.measure_ns = 1000;
    RUN(&t, toy_open(&t));
    CHECK(fake.calls == 0);
    stk_close(t.e);
}

static void refused(struct toy *t, stk_status want, const char *a, const char *b)
{
    stk_status st = toy_open(t);
    REFUSED(st, want, t->e, a, b);
    stk_close(t->e);
}

TEST(drives_refusals_name_the_folder)
{
    struct toy t;
    two(&t);
    fake.rate[1] = 0;
    refused(&t, STK_ERR_IO, world_dir("b"), "moved nothing");
    two(&t);
    fake.status[0] = STK_ERR_IO;
    refused(&t, STK_ERR_IO, world_dir("a"), "planted failure");
    two(&t);
    t.cfg.nvme_weights[1] = -1;
    refused(&t, STK_ERR_CONFIG, "--nvme-weights", "number 2");
    two(&t);
    t.cfg.nvme_weights[0] = NAN;
    refused(&t, STK_ERR_CONFIG, "--nvme-weights", "number 1");
    two(&t);
    t.cfg.nvme_weights[2] = 1;
    refused(&t, STK_ERR_CONFIG, "folder 3", "2 are given");
}

/* Too little room to measure is no verdict on the drive. */
TEST(drives_no_room_to_measure)
{
    struct toy t;
    two(&t);
    fake.status[1] = STK_ERR_NOSPACE;
    RUN(&t, toy_open(&t));
    CHECK(noted(t.e, "too little room to measure"));
    shares(&t, 1, 1);
    stk_close(t.e);
}

TEST(drives_zero_weight_gets_nothing)
{
    struct toy t;
    two(&t);
    t.cfg.nvme_weights[1] = 2;
    RUN(&t, toy_open(&t));
    shares(&t, 0, 2);
    stk_close(t.e);
}

/* A small file system takes what fits; the other takes the rest. */
TEST(drives_limits_are_the_free_space)
{
    const char *small = world_dir("small-b");
    if (mount("stoker-test", small, "tmpfs", 0, "size=256k") != 0)
        SKIP("no right to mount a small file system");
    struct toy t;
    stk_drive d[2];
    two(&t);
    fake.real = true;
    t.cfg.nvme[1] = small;
    t.cfg.measure_ns = UINT64_MAX;
    stk_status st = toy_open(&t);
    if (st != STK_OK) printf("# %s\n", stk_error_text(t.e));
    CHECK(st == STK_OK);
    if (st == STK_OK) st = toy_fill(&t);
    for (int i = 0; st == STK_OK && i < 3; i++) st = toy_step(&t, 1e-3, NULL);
    CHECK(st == STK_OK && stk_drive_info(t.e, 0, &d[0]) && stk_drive_info(t.e, 1, &d[1]));
    printf("# shares %.3f and %.3f\n", d[0].weight, d[1].weight);
    CHECK(d[1].weight > 0.02 && d[1].weight < 0.45);
    stk_close(t.e);
    umount(small);
}

TEST(drives_real_measurement_leaves_nothing)
{
    struct toy t;
    stk_drive d;
    two(&t);
    fake.real = true;
    t.cfg.measure_ns = 100000000;
    RUN(&t, toy_open(&t));
    CHECK(fake.calls == 1); /* both folders are on one file system */
    CHECK(stk_drive_info(t.e, 1, &d) && d.both_bytes_per_s > 0 && d.read_bytes_per_s > 0 &&
          d.write_bytes_per_s > 0 && d.read_p99_ns > 0);
    printf("# read %.2f, write %.2f, both %.2f GB/s\n", d.read_bytes_per_s / 1e9,
           d.write_bytes_per_s / 1e9, d.both_bytes_per_s / 1e9);
    shares(&t, 1, 1);
    stk_close(t.e);
    CHECK(rmdir(world_dir("a")) == 0 && rmdir(world_dir("b")) == 0);
}

/* --- the simulated disk ----------------------------------------------------------------------- */

TEST(drives_weights_on_the_simulated_disk)
{
    struct io_sim_disk *disk;
    struct stk_error err = { 0 };
    struct toy t;
    two(&t);
    REQUIRE(io_sim_disk_new(1u << 30, &disk, &err) == STK_OK);
    struct io_sim_cfg sim = { .disk = disk,
                              .seed = test_seed(),
                              .latency_ns = 20000,
                              .read_bytes_per_s = 1e9,
                              .write_bytes_per_s = 1e9 };
    t.cfg.storage = STK_STORAGE_SIM;
    t.cfg.simulate = true;
    t.cfg.sim_disk = &sim;
    t.cfg.nvme[0] = "a";
    t.cfg.nvme[1] = "b";
    t.cfg.nvme_weights[0] = 3;
    t.cfg.nvme_weights[1] = 1;
    t.cfg.measure_ns = 1000;
    RUN(&t, toy_open(&t));
    CHECK(fake.calls == 0);
    shares(&t, 3, 1);
    stk_close(t.e);
    io_sim_disk_free(disk);
}

/* --- figures of a step ------------------------------------------------------------------------ */

TEST(drives_latency_and_busy_time_of_a_step)
{
    struct toy t;
    stk_step_stats s = { 0 };
    uint32_t both = 0;
    two(&t);
    t.cfg.measure_ns = UINT64_MAX;
    t.cfg.nvme_buffer = 128 << 10; /* the update reads some chunks' state while it writes others' */
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    for (int i = 0; i < 3 || (i < 200 && !both); i++) { /* which meet is the disk's and the threads' affair */
        RUN(&t, toy_step(&t, 1e-3, &s));
        CHECK(s.nvme_busy_ns > 0 && s.nvme_busy_ns <= s.step_ns);
        CHECK(s.nvme_read_p99_ns > 0 && s.nvme_read_p99_ns <= s.step_ns * 2);
        uint64_t alone = s.nvme_read_alone_p99_ns, beside = s.nvme_read_beside_p99_ns,
                 larger = alone > beside ? alone : beside;
        /* a largest value is known exactly, others to their bucket, 1/32 wide */
        CHECK(s.nvme_read_p99_ns <= larger + larger / 32 + 1);
        CHECK(i > 0 || alone > 0); /* it begins with reads */
        both += i > 0 && beside > 0;
    }
    CHECK(both > 0);
    stk_close(t.e);
    two(&t);
    t.cfg.params = t.cfg.optimizer_state = t.cfg.grads = STK_TIER_HOST;
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    RUN(&t, toy_step(&t, 1e-3, &s));
    CHECK(s.nvme_busy_ns == 0 && s.nvme_read_p99_ns == 0);
    stk_close(t.e);
}

TEST_MAIN()
