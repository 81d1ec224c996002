/* tests/engine/test_own.c - own order: recorded, then planned; departures; branches; several
 * backward calls; tensors without a gradient. */
#include "tests/engine/mlp.h"

TEST(own_order_is_recorded_then_planned_and_never_changes_the_numbers)
{
    uint64_t hash[WORLD_PLACE_N][2];
    for (int p = 0; p < WORLD_PLACE_N; p++)
        for (int split = 0; split < 2; split++) {
            struct mlp m;
            stk_step_stats s;
            mlp_init(&m, p);
            m.split = split;
            RUN(&m, mlp_open(&m));
            double first = 0;
            for (int i = 0; i < 30; i++) {
                RUN(&m, mlp_step(&m, &s));
                CHECK(s.departures == 0);
                if (i == 0) first = m.loss;
            }
            CHECK(m.loss < 0.8 * first);
            RUN(&m, mlp_hash(&m, &hash[p][split]));
            stk_close(m.e);
        }
    for (int p = 0; p < WORLD_PLACE_N; p++)
        CHECK(hash[p][0] == hash[0][0] && hash[p][1] == hash[0][0]);
}

TEST(own_order_bits_do_not_depend_on_update_prefetch_or_simulation)
{
    uint64_t want = 0, got = 0;
    for (uint32_t i = 0; i < 8; i++) {
        struct mlp m;
        mlp_init(&m, i % 3);
        m.cfg.update = i % 2 ? STK_UPDATE_SERIAL : STK_UPDATE_CHASE;
        m.cfg.prefetch = i;
        m.cfg.update_threads = 1 + i % 3;
        m.cfg.simulate = i >= 5;
        m.cfg.seed = i;
        m.cfg.own_held_max = 1 + i % 4;
        RUN(&m, mlp_open(&m));
        for (int k = 0; k < 5; k++) RUN(&m, mlp_step(&m, NULL));
        RUN(&m, mlp_hash(&m, i ? &got : &want));
        if (i && got != want) printf("# variant %u\n", i);
        CHECK(i == 0 || got == want);
        stk_close(m.e);
    }
}

/* The planned steps fetch no more than the order needs, and the first (on demand) as much. */
TEST(own_order_departures_are_counted)
{
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        struct mlp m;
        stk_step_stats s;
        mlp_init(&m, p);
        RUN(&m, mlp_open(&m));
        RUN(&m, mlp_step(&m, &s)); /* recorded with all 4 layers: 8 visits */
        CHECK(s.departures == 0);
        m.skip_layer = true;
        RUN(&m, mlp_step(&m, &s)); /* layer 2 is missing: from there on 1 forward and 3 backward
                                    * visits come on demand */
        CHECK(s.departures == 4);
        RUN(&m, mlp_step(&m, &s));
        CHECK(s.departures == 0);
        m.calls = 2; /* more visits than recorded */
        RUN(&m, mlp_step(&m, &s));
        CHECK(s.departures == 10);
        m.calls = 1;
        RUN(&m, mlp_step(&m, &s));
        CHECK(s.departures == 0);
        stk_close(m.e);
    }
}

TEST(zr3_14_branch_on_odd_steps_only)
{
    uint64_t hash[WORLD_PLACE_N];
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        struct mlp m;
        stk_step_stats s;
        mlp_init(&m, p);
        m.skip_layer = true;
        RUN(&m, mlp_open(&m));
        for (int i = 0; i < 9; i++) {
            RUN(&m, mlp_step(&m, &s));
            CHECK(i % 2 ? s.departures > 0 : s.departures == 0);
        }
        RUN(&m, mlp_hash(&m, &hash[p]));
        stk_close(m.e);
    }
    CHECK(hash[0] == hash[1] && hash[0] == hash[2]);
}

/* ADM-02: a tensor without a gradient in a step is left alone, weights, moments and step count, as
 * torch does with grad = None. */
TEST(adm_02_a_tensor_without_a_gradient_is_left_alone)
{
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        struct mlp m;
        mlp_init(&m, p);
        m.cfg.clip = 0;
        m.cfg.weight_decay = 0.1;
        m.skip_layer = m.keep_gradients = true;
        RUN(&m, mlp_open(&m));
        static double w[MLP_W], a[MLP_W], q[MLP_W];
        static float got[MLP_W], before[MLP_W];
        RUN(&m, stk_tensor_read(m.e, m.w[2], STK_READ_MASTER, 0, MLP_W, before, STK_F32));
        for (int k = 0; k < MLP_W; k++) { w[k] = before[k]; a[k] = q[k] = 0; }
        for (int i = 1, t = 0; i <= 7; i++) {
            RUN(&m, mlp_step(&m, NULL));
            RUN(&m, stk_tensor_read(m.e, m.w[2], STK_READ_MASTER, 0, MLP_W, got, STK_F32));
            if (i % 2 == 0) CHECK(!memcmp(got, before, sizeof got));
            else t++;
            double worst = 0;
            for (int k = 0; k < MLP_W; k++) {
                double g = stk_bf16_to_f32(stk_f32_to_bf16(m.gw[2][k]));
                if (i % 2) {
                    a[k] = 0.9 * a[k] + 0.1 * g;
                    q[k] = 0.999 * q[k] + 0.001 * g * g;
                    w[k] = w[k] * (1 - 2e-3 * 0.1) - 2e-3 * (a[k] / (1 - pow(0.9, t))) /
                                                         (sqrt(q[k] / (1 - pow(0.999, t))) + 1e-8);
                }
                worst = fmax(worst, fabs(got[k] - w[k]));
            }
            if (worst > 1e-6) printf("# placement %d step %d: %.3g\n", p, i, worst);
            CHECK(worst < 1e-6);
            memcpy(before, got, sizeof got);
        }
        stk_close(m.e);
    }
}

/* ZR3-02: n calls under one micro-batch, or n micro-batches: the sum of all. */
TEST(zr3_02_several_backward_calls_a_step)
{
    for (int p = 0; p < WORLD_PLACE_N; p++)
        for (uint32_t n = 1; n <= 5; n++)
            for (int micros = 0; micros < 2; micros++) {
                struct mlp m;
                mlp_init(&m, p);
                m.keep_gradients = true;
                m.calls = n;
                m.cfg.micro_batches = micros ? n : 1;
                RUN(&m, mlp_open(&m));
                for (int i = 0; i < 3; i++) {
                    RUN(&m, mlp_step(&m, NULL));
                    static float g[MLP_W];
                    for (int l = 0; l < MLP_LAYERS; l++) {
                        RUN(&m, stk_tensor_read(m.e, m.w[l], STK_READ_GRAD, 0, MLP_W, g, STK_F32));
                        double most = 0, diff = 0;
                        for (int k = 0; k < MLP_W; k++) {
                            most = fmax(most, fabs(m.gw[l][k]));
                            diff = fmax(diff, fabs(g[k] - m.gw[l][k]));
                        }
                        CHECK(most > 0 && diff <= most * 0.004); /* half a unit of bf16 */
                    }
                }
                stk_close(m.e);
            }
}

TEST(own_order_too_many_held_is_refused_and_nothing_is_lost)
{
    uint64_t want, got;
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        struct mlp a, m;
        stk_visit v[3];
        stk_step s = { 2e-3 };
        mlp_init(&a, p);
        RUN(&a, mlp_open(&a));
        for (int i = 0; i < 4; i++) RUN(&a, mlp_step(&a, NULL));
        RUN(&a, mlp_hash(&a, &want));
        stk_close(a.e);
        mlp_init(&m, p);
        RUN(&m, mlp_open(&m));
        for (int i = 0; i < 4; i++) {
            m.step++;
            RUN(&m, stk_step_begin(m.e, &s));
            RUN(&m, stk_acquire(m.e, m.block[0], STK_FORWARD, 0, &v[0]));
            RUN(&m, stk_acquire(m.e, m.block[3], STK_FORWARD, 0, &v[1]));
            stk_status st = stk_acquire(m.e, m.block[1], STK_FORWARD, 0, &v[2]);
            CHECK(REFUSED(st, STK_ERR_STATE, m.e, "own_held_max", "release"));
            st = stk_step_end(m.e, NULL);
            CHECK(REFUSED(st, STK_ERR_STATE, m.e, "still held"));
            RUN(&m, stk_release(m.e, &v[0]));
            st = stk_release(m.e, &v[0]);
            CHECK(REFUSED(st, STK_ERR_STATE, m.e, "not held"));
            stk_visit stale = v[0];
            RUN(&m, stk_acquire(m.e, m.block[1], STK_FORWARD, 0, &v[2]));
            st = stk_release(m.e, &stale); /* its room belongs to another visit now */
            CHECK(REFUSED(st, STK_ERR_STATE, m.e, "not held"));
            RUN(&m, stk_release(m.e, &v[2]));
            RUN(&m, stk_release(m.e, &v[1]));
            RUN(&m, mlp_pass(&m, 0, 0));
            RUN(&m, stk_step_end(m.e, NULL));
        }
        RUN(&m, mlp_hash(&m, &got));
        CHECK(want == got);
        stk_close(m.e);
    }
}

TEST(own_order_too_many_visits_and_bad_arguments)
{
    struct mlp m;
    stk_visit v;
    float g[4] = { 0 };
    mlp_init(&m, WORLD_NVME);
    m.cfg.own_visits_max = 3;
    RUN(&m, mlp_open(&m));
    stk_step s = { 1e-3 };
    stk_status st = stk_acquire(m.e, 0, STK_FORWARD, 0, &v);
    CHECK(REFUSED(st, STK_ERR_STATE, m.e, "stk_acquire"));
    st = stk_grad_add(m.e, 0, 0, 4, g, STK_F32);
    CHECK(REFUSED(st, STK_ERR_STATE, m.e, "stk_grad_add"));
    RUN(&m, stk_step_begin(m.e, &s));
    for (int i = 0; i < 3; i++) {
        RUN(&m, stk_acquire(m.e, m.block[0], STK_FORWARD, 0, &v));
        RUN(&m, stk_release(m.e, &v));
    }
    st = stk_acquire(m.e, m.block[0], STK_FORWARD, 0, &v);
    CHECK(REFUSED(st, STK_ERR_STATE, m.e, "own_visits_max"));
    st = stk_acquire(m.e, 99, STK_FORWARD, 0, &v);
    CHECK(REFUSED(st, STK_ERR_CONFIG, m.e, "block 99"));
    st = stk_acquire(m.e, 0, STK_FORWARD, 1, &v);
    CHECK(REFUSED(st, STK_ERR_CONFIG, m.e, "micro"));
    st = stk_grad_add(m.e, 99, 0, 4, g, STK_F32);
    CHECK(REFUSED(st, STK_ERR_CONFIG, m.e, "tensor 99"));
    st = stk_grad_add(m.e, m.w[0], MLP_W - 3, 4, g, STK_F32);
    CHECK(REFUSED(st, STK_ERR_CONFIG, m.e, "0.w"));
    RUN(&m, stk_step_end(m.e, NULL));
    for (int i = 0; i < 2; i++) { /* a planned step, then one with more visits than the plan has */
        RUN(&m, stk_step_begin(m.e, &s));
        for (int k = 0; k < 3 + i; k++) {
            RUN(&m, stk_acquire(m.e, m.block[0], STK_FORWARD, 0, &v));
            RUN(&m, stk_release(m.e, &v));
        }
        RUN(&m, stk_step_end(m.e, NULL));
    }
    st = stk_eval_begin(m.e);
    CHECK(REFUSED(st, STK_ERR_STATE, m.e, "engine's order"));
    st = stk_next(m.e, &v);
    CHECK(REFUSED(st, STK_ERR_STATE, m.e, "stk_next"));
    stk_close(m.e);
    for (int k = 0; k < 3; k++) {
        mlp_init(&m, WORLD_NVME);
        if (k == 0) m.cfg.own_visits_max = 0;
        if (k == 1) m.cfg.own_held_max = 0;
        if (k == 2) m.cfg.device = STK_DEVICE_HOST_DISCRETE;
        st = mlp_open(&m);
        CHECK(REFUSED(st, k < 2 ? STK_ERR_CONFIG : STK_ERR_UNSUPPORTED, m.e,
                      k == 0   ? "own_visits_max"
                      : k == 1 ? "own_held_max"
                               : "own_order"));
        stk_close(m.e);
    }
}

/* Forward visits alone (an evaluation in between), an empty step, and a step with gradients
 * only. */
TEST(own_order_steps_of_other_kinds)
{
    uint64_t hash[WORLD_PLACE_N];
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        struct mlp m;
        stk_step s = { 2e-3 };
        stk_step_stats got;
        uint64_t before;
        static float g[MLP_W];
        mlp_init(&m, p);
        RUN(&m, mlp_open(&m));
        RUN(&m, stk_step_begin(m.e, &s)); /* an empty first step records nothing */
        RUN(&m, stk_step_end(m.e, &got));
        RUN(&m, mlp_step(&m, NULL));
        RUN(&m, mlp_step(&m, &got));
        CHECK(got.departures == 0);
        RUN(&m, mlp_hash(&m, &before));
        RUN(&m, stk_step_begin(m.e, &s)); /* forward only: nobody got a gradient, nothing changes */
        mlp_data(&m, 0);
        for (uint32_t i = 0; i < MLP_LAYERS; i++) RUN(&m, mlp_forward(&m, i, 0));
        RUN(&m, stk_step_end(m.e, &got));
        CHECK(got.grad_norm == 0);
        RUN(&m, mlp_hash(&m, &hash[p]));
        CHECK(before == hash[p]);
        RUN(&m, stk_step_begin(m.e, &s)); /* gradients that came from elsewhere, no visit at all */
        for (int k = 0; k < MLP_W; k++) g[k] = (float)(k % 7 - 3);
        RUN(&m, stk_grad_add(m.e, m.w[1], 0, MLP_W, g, STK_F32));
        RUN(&m, stk_step_end(m.e, &got));
        CHECK(got.grad_norm > 0);
        RUN(&m, mlp_step(&m, &got));
        CHECK(got.departures == 0);
        RUN(&m, mlp_hash(&m, &hash[p]));
        CHECK(before != hash[p]);
        stk_close(m.e);
    }
    CHECK(hash[0] == hash[1] && hash[0] == hash[2]);
}

/* ZR3-16: resume, then go on: the order is recorded anew and the numbers go on. */
TEST(zr3_16_resume_in_own_order)
{
    uint64_t want, got;
    struct mlp m;
    char *path = NULL;
    mlp_init(&m, WORLD_NVME);
    RUN(&m, mlp_open(&m));
    for (int i = 0; i < 3; i++) RUN(&m, mlp_step(&m, NULL));
    RUN(&m, stk_save(m.e, world_dir("own-save"), NULL, 0));
    for (int i = 0; i < 5; i++) RUN(&m, mlp_step(&m, NULL));
    RUN(&m, mlp_hash(&m, &want));
    stk_close(m.e);
    REQUIRE(stk_newest_checkpoint(world_dir("own-save"), &path, NULL) == STK_OK);
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        mlp_init(&m, p);
        RUN(&m, mlp_open(&m));
        RUN(&m, stk_restore(m.e, path, false, NULL));
        m.step = 3;
        for (int i = 0; i < 5; i++) RUN(&m, mlp_step(&m, NULL));
        RUN(&m, mlp_hash(&m, &got));
        CHECK(want == got);
        stk_close(m.e);
    }
    stk_free(path);
}

TEST_MAIN()
