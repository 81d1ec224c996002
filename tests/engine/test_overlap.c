/* tests/engine/test_overlap.c - what can overlap does: the real engine on the simulated machine of
 * share/machines/rtx4090.json, in virtual time, against the time that no schedule beats
 * (bench/overlap_model.h), as bench/overlap_sim tabulates it; a function of the seed. STK_MACHINES: folder of machine files. */
#include "bench/overlap_model.h"
#include "tests/test.h"

#include <stdlib.h>

static bool read_machine(stk_machine *m)
{
    const char *folder = getenv("STK_MACHINES");
    char path[1024], why[512] = "";
    if (!folder) return false;
    snprintf(path, sizeof path, "%s/rtx4090.json", folder);
    bool ok = stk_machine_read(path, m, why, sizeof why) == STK_OK;
    if (!ok) printf("# %s\n", why);
    return ok;
}

static struct overlap_result run(struct overlap_case c, const char *name)
{
    struct overlap_result r;
    char why[512] = "";
    c.seed = test_seed();
    bool ok = overlap_run(&c, &r, why, sizeof why);
    printf("# %-34s step %.4f s, %s %.4f, floor %.4f (%s, ratio %.3f), predicted %.4f; waits nvme %.3f copy %.3f "
           "update %.3f; ahead of the norm %.0f %%%s\n",
           name, r.step_s, overlap_resource_name(r.busiest), r.own_s[r.busiest], r.floor_s,
           r.floor_text ? r.floor_text : "", r.floor_s > 0 ? r.step_s / r.floor_s : 0, r.predicted_s,
           r.wait_s.nvme, r.wait_s.copy, r.wait_s.update, 100 * r.spec_share, why);
    if (r.note[0]) printf("# %s\n", r.note);
    CHECK(ok);
    return r;
}

static struct overlap_case in_memory(const stk_machine *m, uint32_t tokens)
{
    return (struct overlap_case){ .machine = m, .tokens = tokens, .micro_tokens = 2048,
                                  .activations = STK_ACT_RECOMPUTE, .split_blocks = UINT32_MAX };
}

/* Where the norm never binds, nothing is waited for but the first block's parameters. */
TEST(overlap_speculate_hides_the_update)
{
    static const uint32_t tokens[] = { 4096, 8192, 16384 };
    stk_machine m;
    REQUIRE(read_machine(&m));
    for (int i = 0; i < 3; i++) {
        struct overlap_case c = in_memory(&m, tokens[i]);
        c.update = STK_UPDATE_CHASE;
        struct overlap_result chase = run(c, "quiet, chase");
        c.update = STK_UPDATE_SPECULATE;
        struct overlap_result spec = run(c, "quiet, speculate");
        CHECK(spec.step_s <= 1.12 * spec.floor_s && spec.step_s < 0.9 * chase.step_s);
        CHECK(spec.predicted_s < 1.03 * spec.step_s && spec.predicted_s > 0.97 * spec.step_s);
        CHECK(spec.spec_share > 0.3 && spec.undone_share == 0);
        CHECK(chase.step_s <= 1.09 * chase.floor_s);
        CHECK(chase.predicted_s < 1.01 * chase.step_s && chase.predicted_s > 0.99 * chase.step_s);
    }
}

/* Where it binds, speculate is what split is, or chase if that is faster; sometimes binding costs no more. */
TEST(overlap_speculate_is_never_slower_when_the_norm_binds)
{
    static const uint32_t tokens[] = { 4096, 16384 };
    stk_machine m;
    REQUIRE(read_machine(&m));
    for (int i = 0; i < 2; i++)
        for (int nvme = 0; nvme < 2; nvme++) {
            struct overlap_case c = in_memory(&m, tokens[i]);
            c.clip = OVERLAP_BINDS;
            c.nvme = nvme != 0;
            c.update = STK_UPDATE_CHASE;
            double chase = run(c, "binds, chase").step_s;
            c.update = STK_UPDATE_SPLIT;
            double split = run(c, "binds, split").step_s, best = split < chase ? split : chase;
            c.update = STK_UPDATE_SPECULATE;
            struct overlap_result spec = run(c, "binds, speculate");
            CHECK(spec.step_s <= 1.001 * best && spec.spec_share == 0);
            CHECK(spec.predicted_s < 1.02 * spec.step_s && spec.predicted_s > 0.98 * spec.step_s);
            c.clip = OVERLAP_SOMETIMES;
            /* what is taken back is made twice; 1.041 at 16k */
            CHECK(run(c, "binds sometimes, speculate").step_s <= 1.05 * best);
        }
}

/* With much memory to read ahead, too: in a step that is not tried nothing waits for what passes. Before, at
 * 32k tokens, speculate took 1.148 of chase here. */
TEST(overlap_speculate_reads_ahead_as_chase_when_the_norm_binds)
{
    static const uint32_t tokens[] = { 8192, 32768 };
    stk_machine m;
    REQUIRE(read_machine(&m));
    for (int i = 0; i < 2; i++) {
        struct overlap_case c = in_memory(&m, tokens[i]);
        c.activations = STK_ACT_HOST;
        c.clip = OVERLAP_BINDS;
        c.nvme = true;
        c.update = STK_UPDATE_CHASE;
        double chase = run(c, "binds, host, chase").step_s;
        c.update = STK_UPDATE_SPECULATE;
        struct overlap_result spec = run(c, "binds, host, speculate");
        CHECK(spec.step_s <= 1.001 * chase && spec.spec_share == 0);
        CHECK(spec.predicted_s < 1.01 * spec.step_s && spec.predicted_s > 0.99 * spec.step_s);
    }
}

/* The engine's own choice is among the best, and says so. */
TEST(overlap_auto_takes_what_is_predicted_fastest)
{
    static const stk_update modes[] = { STK_UPDATE_SERIAL, STK_UPDATE_CHASE, STK_UPDATE_SPLIT,
                                        STK_UPDATE_SPECULATE };
    stk_machine m;
    REQUIRE(read_machine(&m));
    for (int k = 0; k < 6; k++) {
        struct overlap_case c = in_memory(&m, k < 2 ? 8192 : 32768);
        c.clip = (enum overlap_clip)(k % 2);
        c.nvme = k >= 4;
        if (k >= 2) c.activations = STK_ACT_HOST;
        double best = 1e9;
        for (int mode = k < 2 ? 0 : 1; mode < 4; mode++) {
            if (mode == 2 && c.nvme) continue; /* split is chase there */
            c.update = modes[mode];
            double s = run(c, "each mode").step_s;
            if (s < best) best = s;
        }
        c.update = STK_UPDATE_AUTO;
        struct overlap_result chosen = run(c, "auto");
        CHECK(chosen.step_s <= 1.02 * best);
        CHECK(strstr(chosen.note, "auto is ") != NULL && strstr(chosen.note, "by prediction") != NULL);
    }
}

/* What the engine chooses by itself, activations included, takes at most a twentieth more than its busiest
 * resource; without pacing (engine/pace.h) these rows took 1.076, 1.058, 1.051 and 1.084. */
TEST(overlap_auto_is_within_a_twentieth_of_the_busiest_resource)
{
    static const struct { uint32_t tokens, micro; enum overlap_clip clip; } rows[] = {
        { 4096, 4096, OVERLAP_BINDS }, { 8192, 8192, OVERLAP_QUIET }, { 16384, 4096, OVERLAP_QUIET },
        { 32768, 2048, OVERLAP_BINDS },
    };
    stk_machine m;
    REQUIRE(read_machine(&m));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct overlap_case c = in_memory(&m, rows[i].tokens);
        c.micro_tokens = rows[i].micro;
        c.clip = rows[i].clip;
        c.update = STK_UPDATE_AUTO;
        c.activations = STK_ACT_AUTO;
        struct overlap_result r = run(c, "auto, activations, too");
        CHECK(r.step_s <= 1.05 * r.own_s[r.busiest]);
        CHECK(r.predicted_s < 1.01 * r.step_s && r.predicted_s > 0.99 * r.step_s);
    }
}

/* Where there is too little time for all, a speculating step leaves work to the next: predicted is the
 * mean of those that come round again, not one of them. */
TEST(overlap_predicts_steps_that_leave_work_to_the_next)
{
    stk_machine m;
    REQUIRE(read_machine(&m));
    struct overlap_case c = in_memory(&m, 32768);
    c.update = STK_UPDATE_SPECULATE;
    c.activations = STK_ACT_HOST;
    c.nvme = true;
    struct overlap_result r = run(c, "quiet, speculate, nvme");
    CHECK(r.predicted_s >= r.own_s[OVERLAP_DRIVE]);
    CHECK(r.predicted_s < 1.03 * r.step_s && r.predicted_s > 0.97 * r.step_s);
}

/* State on NVMe: with memory to read ahead and write behind, the drive never rests. */
TEST(overlap_keeps_the_drive_busy)
{
    stk_machine m;
    REQUIRE(read_machine(&m));
    struct overlap_case c = in_memory(&m, 16384);
    c.nvme = true;
    c.update = STK_UPDATE_CHASE;
    c.buffer_bytes = UINT64_C(6) << 30;
    struct overlap_result r = run(c, "nvme, chase, 6 GiB");
    CHECK(r.step_s <= 1.10 * r.floor_s);
    CHECK(r.predicted_s < 1.02 * r.step_s && r.predicted_s > 0.98 * r.step_s);
}

/* A visit that follows an update through a copy waited for the update. */
TEST(overlap_waits_are_booked_to_what_took_the_time)
{
    stk_machine m;
    REQUIRE(read_machine(&m));
    struct overlap_case c = in_memory(&m, 8192);
    c.update = STK_UPDATE_SERIAL;
    struct overlap_result r = run(c, "serial");
    CHECK(r.wait_s.update > 0.8 * (r.wait_s.update + r.wait_s.copy) && r.wait_s.nvme == 0);
    c.update = STK_UPDATE_CHASE;
    r = run(c, "chase");
    CHECK(r.wait_s.update > 0.8 * (r.wait_s.update + r.wait_s.copy));
    c.nvme = true;
    r = run(c, "chase, nvme");
    CHECK(r.wait_s.nvme > 0.8 * (r.wait_s.nvme + r.wait_s.update + r.wait_s.copy));
}

int main(int argc, char **argv) { return test_run_all(argc, argv); }
