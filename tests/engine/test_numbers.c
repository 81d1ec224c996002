/* tests/engine/test_numbers.c - the numbers of a step: non-finite gradients, clipping, the loss
 * scale, accumulation, odd tensors. */
#include "engine/engine.h" /* norm_clip_factor */
#include "tests/engine/world.h"

/* --- MPX: what is not finite, and what is scaled ---------------------------------------------- */

static void poisoned(enum world_place p, stk_dtype dtype)
{
    struct toy t;
    stk_step_stats s;
    uint64_t before, after;
    toy_init(&t, 3, 2);
    t.cfg.dtype = dtype;
    RUN(&t, world_start(&t, p));
    RUN(&t, world_steps(&t, 3, 1e-3));
    RUN(&t, toy_hash(&t, &before));
    t.poison_loss_at = (double)t.step + 1;
    RUN(&t, toy_step(&t, 1e-3, &s));
    CHECK(s.skipped && s.skipped_total == 1 && s.skipped_in_a_row == 1 && s.step == 4 &&
          s.updates == 3 && !isfinite(s.grad_norm));
    RUN(&t, toy_hash(&t, &after));
    CHECK(before == after);
    RUN(&t, toy_step(&t, 1e-3, &s));
    CHECK(!s.skipped && s.skipped_total == 1 && s.skipped_in_a_row == 0 && s.updates == 4 &&
          isfinite(s.grad_norm) && isfinite(t.last_loss));
    RUN(&t, toy_hash(&t, &after));
    CHECK(before != after);
    stk_close(t.e);
}

TEST(mpx_02_a_non_finite_gradient_leaves_the_state)
{
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        poisoned(p, STK_BF16);
        poisoned(p, STK_FP16);
    }
}

/* One element of one gradient, through the accumulator itself. */
static void set_one(struct toy *t, const stk_visit *v)
{
    if (v->dir != STK_BACKWARD || !v->last_of_block || v->place != 2 || t->step != 2) return;
    struct stk_error err = { 0 };
    if (dev_copy(v->stream, v->grad + 17, t->hook_arg, 4, DEV_TO_DEVICE, &err) != STK_OK) abort();
    dev_sync(v->stream, &err);
}

TEST(mpx_02_one_element_is_enough)
{
    static float bad[] = { NAN, INFINITY, -INFINITY, 3.4e38f };
    for (int i = 0; i < 4; i++)
        for (int p = 0; p < 2; p++) {
            struct toy t;
            stk_step_stats s;
            uint64_t before, after;
            toy_init(&t, 3, 2);
            t.hook = set_one;
            t.hook_arg = &bad[i];
            RUN(&t, world_start(&t, p));
            RUN(&t, world_steps(&t, 1, 1e-3));
            RUN(&t, toy_hash(&t, &before));
            RUN(&t, toy_step(&t, 1e-3, &s));
            RUN(&t, toy_hash(&t, &after));
            if (i < 3) CHECK(s.skipped && before == after);
            /* finite in bf16: clipped hard */
            else CHECK(s.skipped ? before == after : s.clip_factor > 0 && s.clip_factor < 1e-30);
            RUN(&t, toy_step(&t, 1e-3, &s));
            CHECK(!s.skipped);
            stk_close(t.e);
        }
}

static void poison_all(struct toy *t, const stk_visit *v)
{
    (void)v;
    t->poison_loss_at = (double)t->step;
}

TEST(mpx_01_the_run_stops_after_skip_limit_and_can_go_on)
{
    struct toy t;
    stk_step_stats s;
    uint64_t before, after;
    toy_init(&t, 2, 1);
    t.cfg.skip_limit = 3;
    RUN(&t, world_start(&t, WORLD_NVME));
    RUN(&t, world_steps(&t, 2, 1e-3));
    RUN(&t, toy_hash(&t, &before));
    t.hook = poison_all; /* each forward visit poisons the loss of its step */
    for (uint32_t i = 1; i <= 2; i++) {
        RUN(&t, toy_step(&t, 1e-3, &s));
        CHECK(s.skipped && s.skipped_in_a_row == i);
    }
    stk_status st = toy_step(&t, 1e-3, &s);
    CHECK(REFUSED(st, STK_ERR_NONFINITE, t.e, "3 steps in a row"));
    CHECK(s.skipped_total == 3 && s.updates == 2 && s.step == 5);
    RUN(&t, toy_hash(&t, &after));
    CHECK(before == after);
    RUN(&t, stk_save(t.e, world_dir("mpx01"), NULL, 0));
    t.hook = NULL;
    t.poison_loss_at = 0;
    RUN(&t, toy_step(&t, 1e-3, &s));
    CHECK(!s.skipped && s.skipped_in_a_row == 0 && s.updates == 3);
    stk_close(t.e);
}

/* MPX-04: the default; MPX-05: the norm of a step is divided by the scale that was in its
 * gradients, also when the scale changes at its end. */
TEST(mpx_05_norms_where_the_loss_scale_changes)
{
    struct toy t, r;
    stk_step_stats s, want;
    toy_init(&t, 2, 1);
    t.cfg.dtype = STK_FP16;
    t.cfg.loss_scale_window = 3;
    toy_init(&r, 2, 1); /* the reference: no scale that changes */
    r.cfg.dtype = STK_FP16;
    r.cfg.loss_scale = 65536;
    RUN(&r, world_start(&r, WORLD_HOST));
    RUN(&t, world_start(&t, WORLD_NVME));
    static const double scales[] = { 65536, 65536, 65536, 131072, 131072,
                                     65536, 65536, 65536, 131072 };
    for (int i = 0; i < 9; i++) {
        if (i == 4) t.poison_loss_at = r.poison_loss_at = 5;
        RUN(&t, toy_step(&t, 1e-3, &s));
        if (i == 5) stk_close(r.e);
        if (i < 4) {
            RUN(&r, toy_step(&r, 1e-3, &want));
            CHECK(fabs(s.grad_norm - want.grad_norm) < 1e-5 * want.grad_norm);
        }
        if (s.loss_scale != scales[i])
            printf("# step %d: scale %g, wanted %g\n", i + 1, s.loss_scale, scales[i]);
        CHECK(s.loss_scale == scales[i]);
        CHECK(s.skipped == (i == 4));
    }
    stk_close(t.e);
}

TEST(mpx_08_the_clip_factor_is_in_0_1)
{
    CHECK(norm_clip_factor(0, 1) == 1);
    CHECK(norm_clip_factor(1e-30, 1) == 1);
    CHECK(norm_clip_factor(0.5, 1) == 1);
    CHECK(fabs(norm_clip_factor(4, 1) - 1 / (4 + 1e-6)) < 1e-15);
    CHECK(norm_clip_factor(1e30, 1) > 0 && norm_clip_factor(1e30, 1) < 1.1e-30);
    CHECK(norm_clip_factor(1e30, 0) == 1);
    static const double norms[] = { NAN,  INFINITY, -INFINITY, -1,    0,      1e-30,
                                    1e-6, 1,        1e30,      1e300, 1.7e308 },
                        clips[] = { 0, 1e-30, 1, 1e30 };
    for (int i = 0; i < 11; i++)
        for (int k = 0; k < 4; k++) {
            double f = norm_clip_factor(norms[i], clips[k]);
            if (!(f > 0 && f <= 1)) printf("# norm %g clip %g: factor %g\n", norms[i], clips[k], f);
            CHECK(f > 0 && f <= 1);
        }
}

/* The norm and the clipped update against double precision, from the 16-bit gradients themselves
 * (MPX-13: never summed in 16 bits). */
static void clip_reference(enum world_place p, double clip)
{
    struct toy t;
    stk_step_stats s;
    toy_init(&t, 3, 2);
    t.cfg.clip = clip;
    t.cfg.weight_decay = 0.1;
    RUN(&t, world_start(&t, p));
    uint32_t k = t.tensor_w[2];
    uint64_t n = toy_tensor_elems(&t, k);
    float *before = world_read(&t, k, STK_READ_MASTER);
    RUN(&t, toy_step(&t, 1e-2, &s));
    double sum = 0, worst = 0;
    for (uint32_t i = 0; i < t.n_tensors; i++) {
        float *g = world_read(&t, i, STK_READ_GRAD);
        for (uint64_t j = 0; g && j < toy_tensor_elems(&t, i); j++) sum += (double)g[j] * g[j];
        free(g);
    }
    CHECK(fabs(s.grad_norm - sqrt(sum)) < 1e-12 * sqrt(sum));
    double f = clip > 0 ? fmin(1, clip / (sqrt(sum) + 1e-6)) : 1;
    CHECK(fabs(s.clip_factor - f) < 1e-12);
    float *g = world_read(&t, k, STK_READ_GRAD), *after = world_read(&t, k, STK_READ_MASTER),
          *m = world_read(&t, k, STK_READ_EXP_AVG);
    for (uint64_t i = 0; before && g && after && m && i < n; i++) {
        double c = g[i] * f, want = before[i] * (1 - 1e-2 * 0.1) - 1e-2 * c / (fabs(c) + 1e-8);
        worst = fmax(worst, fabs(after[i] - want));
        CHECK(fabs(m[i] - 0.1 * c) <= 1e-6 * fabs(c) + 1e-12);
    }
    if (worst > 5e-7) printf("# clip %g: largest difference %.3g\n", clip, worst);
    CHECK(worst < 5e-7);
    free(before); free(g); free(after); free(m);
    stk_close(t.e);
}

TEST(mpx_13_norm_and_clipping_against_double_precision)
{
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        clip_reference(p, 0);
        clip_reference(p, 0.25);
        clip_reference(p, 100);
    }
}

/* MPX-14, ADM-17: every optimizer x tier x dtype x accumulation runs three steps and its loss stays
 * finite; equal bits over tiers. */
TEST(adm_17_every_mix_that_is_offered_runs)
{
    for (int opt = 0; opt < 2; opt++)
        for (int dt = 0; dt < 2; dt++)
            for (int acc = 0; acc < 2; acc++) {
                /* 1 or 3: each value of each option meets both */
                uint32_t micros = 1 + 2 * ((uint32_t)(opt + dt + acc) % 2);
                uint64_t hash[WORLD_PLACE_N];
                for (int p = 0; p < WORLD_PLACE_N; p++) {
                    struct toy t;
                    toy_init(&t, 2, micros);
                    t.cfg.optimizer = opt ? STK_ADAM : STK_ADAMW;
                    t.cfg.dtype = dt ? STK_FP16 : STK_BF16;
                    t.cfg.accumulate = acc ? STK_ACCUMULATE_MICRO : STK_ACCUMULATE_LAYER;
                    t.cfg.weight_decay = 0.1;
                    RUN(&t, world_start(&t, p));
                    RUN(&t, world_steps(&t, 3, 1e-3));
                    RUN(&t, toy_hash(&t, &hash[p]));
                    CHECK(isfinite(t.last_loss));
                    stk_close(t.e);
                }
                CHECK(hash[0] == hash[1] && hash[0] == hash[2]);
            }
}

/* ADM-16: an optimizer that is not there is never run as another. */
TEST(mpx_14_mixes_that_do_not_exist_are_refused)
{
    struct toy t;
    toy_init(&t, 2, 1);
    t.cfg.dtype = STK_F32;
    stk_status st = stk_open(&t.cfg, &t.e);
    CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, "bf16 or fp16"));
    stk_close(t.e);
    toy_init(&t, 2, 1);
    t.cfg.optimizer = (stk_optimizer)7;
    st = stk_open(&t.cfg, &t.e);
    CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, "optimizer"));
    stk_close(t.e);
}

/* --- ZR3: accumulation ------------------------------------------------------------------------ */

static void keep_accumulator(struct toy *t, const stk_visit *v)
{
    float **keep = t->hook_arg;
    struct stk_error err = { 0 };
    if (v->dir != STK_BACKWARD || !v->last_of_block) return;
    for (uint32_t k = 0; k < t->n_tensors; k++) {
        bool here = (v->place == 0 && k == t->tensor_embed) ||
                    (v->place == t->layers + 1 && k == t->tensor_head);
        for (uint32_t i = 0; i < t->layers; i++)
            here |= v->place == i + 1 && (k == t->tensor_w[i] || k == t->tensor_b[i]);
        if (!here) continue;
        if (dev_copy(v->stream, keep[k], v->grad + stk_tensor_offset(t->e, k),
                     4 * toy_tensor_elems(t, k), DEV_TO_HOST, &err) != STK_OK)
            abort();
    }
    if (dev_sync(v->stream, &err) != STK_OK) abort();
}

/* The same 28 rows as 1, 2, 4 or 7 micro-batches: the fp32 gradient agrees within 1e-6 of its
 * largest element. */
TEST(zr3_01_equal_total_batch_equal_gradient)
{
    static const uint32_t counts[] = { 1, 2, 4, 7 };
    for (int p = 0; p < WORLD_PLACE_N; p++)
        for (int order = 0; order < 2; order++) {
            float *first[20] = { 0 }, *now[20] = { 0 };
            for (int c = 0; c < 4; c++) {
                struct toy t;
                stk_step_stats s;
                toy_init(&t, 2, counts[c]);
                t.rows = 28 / counts[c];
                t.by_row = true;
                t.cfg.accumulate = order ? STK_ACCUMULATE_MICRO : STK_ACCUMULATE_LAYER;
                t.hook = keep_accumulator;
                t.hook_arg = c ? now : first;
                RUN(&t, world_start(&t, p));
                for (uint32_t k = 0; k < t.n_tensors; k++)
                    if (!(((float **)t.hook_arg)[k] =
                              calloc(toy_tensor_elems(&t, k), sizeof(float))))
                        abort();
                RUN(&t, toy_step(&t, 1e-3, &s));
                double worst = 0;
                for (uint32_t k = 0; c && k < t.n_tensors; k++) {
                    double most = 0, diff = 0;
                    for (uint64_t i = 0; i < toy_tensor_elems(&t, k); i++) {
                        most = fmax(most, fabs(first[k][i]));
                        diff = fmax(diff, fabs(now[k][i] - first[k][i]));
                    }
                    worst = fmax(worst, diff / most);
                    free(now[k]);
                }
                if (worst > 1e-6)
                    printf("# placement %d order %d, %u micro-batches: %.3g\n", p, order, counts[c],
                           worst);
                CHECK(worst <= 1e-6);
                stk_close(t.e);
            }
            for (int k = 0; k < 20; k++) free(first[k]);
        }
}

/* Every gradient byte goes to NVMe in every step: 2 bytes a parameter, padded to what the store
 * writes. */
TEST(zr3_05_gradient_bytes_written_each_step)
{
    struct toy t;
    stk_step_stats s;
    toy_init(&t, 3, 2);
    t.freeze_first = true;
    world_place(&t, WORLD_HOST);
    t.cfg.grads = STK_TIER_NVME;
    RUN(&t, toy_open(&t));
    RUN(&t, toy_fill(&t));
    uint64_t want = 0;
    for (uint32_t i = 0; i < t.e->layout->n_chunks; i++)
        want += chunk_bytes(t.e->layout, &t.e->layout->chunks[i], CHUNK_GRAD);
    uint64_t params = t.e->layout->params_trainable;
    CHECK(want >= 2 * params &&
          want < 2 * (params + (uint64_t)CHUNK_FROZEN_ALIGN * t.e->layout->n_blocks));
    for (int i = 0; i < 5; i++) {
        RUN(&t, toy_step(&t, 1e-3, &s));
        CHECK(s.nvme_write_bytes == want);
        CHECK(s.nvme_read_bytes == (i ? want : 0)); /* each is read by the next step's update */
    }
    stk_close(t.e);
}

/* And what the update makes of them is what it makes of those in memory: after 20 steps. */
TEST(zr3_05_twenty_steps_on_nvme_equal_those_in_memory)
{
    uint64_t hash[WORLD_PLACE_N] = { 0 };
    double loss[WORLD_PLACE_N] = { 0 };
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        struct toy t;
        toy_init(&t, 3, 2);
        RUN(&t, world_start(&t, p));
        RUN(&t, world_steps(&t, 20, 3e-3));
        RUN(&t, toy_hash(&t, &hash[p]));
        loss[p] = t.last_loss;
        stk_close(t.e);
    }
    CHECK(hash[0] && hash[0] == hash[1] && hash[0] == hash[2]);
    CHECK(loss[0] == loss[1] && loss[0] == loss[2]);
}

/* --- ZR3-17: odd shapes ----------------------------------------------------------------------- */

static stk_status odd_run(enum world_place p, uint64_t *hash)
{
    struct toy t;
    struct stk_error err = { 0 };
    uint32_t b[4], first[4];
    toy_init(&t, 0, 1);
    world_place(&t, p);
    STK_TRY(stk_open(&t.cfg, &t.e));
    stk_tensor_desc none[] = { { .name = "empty", .n_elems = 0 },
                               { .name = "empty.frozen", .n_elems = 0, .frozen = true } },
                    mixed[] = { { .name = "a", .n_elems = 5000 },
                                { .name = "nothing", .n_elems = 0 },
                                { .name = "one", .n_elems = 1 },
                                { .name = "f", .n_elems = 77, .frozen = true } },
                    frozen[] = { { .name = "g", .n_elems = 3, .frozen = true } };
    STK_TRY(stk_block(t.e, "no tensors", NULL, 0, &b[0], &first[0]));
    STK_TRY(stk_block(t.e, "empty tensors", none, 2, &b[1], &first[1]));
    STK_TRY(stk_block(t.e, "mixed", mixed, 4, &b[2], &first[2]));
    STK_TRY(stk_block(t.e, "frozen", frozen, 1, &b[3], &first[3]));
    stk_place places[4];
    for (int i = 0; i < 4; i++)
        places[i] =
            (stk_place){ .block = b[i], .in_bytes = i ? 64 : 0, .full_bytes = 64, .flops = 1 };
    STK_TRY(stk_order(t.e, places, 4));
    STK_TRY(stk_seal(t.e, false));
    float w[5000], g[5000];
    for (int i = 0; i < 5000; i++) {
        w[i] = (float)i * 1e-3f;
        g[i] = (float)(i % 13 - 6) * 1e-2f;
    }
    STK_TRY(stk_tensor_write(t.e, first[2], 0, 5000, w, STK_F32));
    STK_TRY(stk_tensor_write(t.e, first[2] + 1, 0, 0, w, STK_F32));
    STK_TRY(stk_tensor_write(t.e, first[2] + 2, 0, 1, w + 9, STK_F32));
    STK_TRY(stk_tensor_write(t.e, first[2] + 3, 0, 77, w, STK_F32));
    STK_TRY(stk_tensor_write(t.e, first[3], 0, 3, w + 7, STK_F32));
    for (int k = 0; k < 3; k++) {
        stk_step s = { 1e-2 };
        stk_visit v;
        stk_status st;
        STK_TRY(stk_step_begin(t.e, &s));
        while ((st = stk_next(t.e, &v)) == STK_OK) {
            if (v.dir == STK_BACKWARD && v.block != b[2]) CHECK(v.grad == NULL);
            if (v.dir == STK_BACKWARD && v.block == b[2]) {
                STK_TRY(dev_copy(v.stream, v.grad, g, sizeof g, DEV_TO_DEVICE, &err));
                STK_TRY(dev_copy(v.stream, v.grad + stk_tensor_offset(t.e, first[2] + 2), g, 4,
                                 DEV_TO_DEVICE, &err));
            }
            STK_TRY(stk_done(t.e, &v));
        }
        if (st != STK_END) return st;
        STK_TRY(stk_step_end(t.e, NULL));
    }
    STK_TRY(stk_save(t.e, world_dir("odd"), NULL, 0));
    *hash = 1469598103934665603ull;
    for (uint32_t k = first[2]; k <= first[3]; k++) {
        uint64_t n = k == first[2]       ? 5000
                     : k == first[2] + 1 ? 0
                     : k == first[2] + 2 ? 1
                     : k == first[2] + 3 ? 77
                                         : 3;
        STK_TRY(stk_tensor_read(t.e, k, STK_READ_MASTER, 0, n, w, STK_F32));
        for (uint64_t i = 0; i < n; i++) *hash = (*hash ^ stk_f32_bits(w[i])) * 1099511628211ull;
        if (k == first[2] + 3) CHECK(w[76] == stk_bf16_to_f32(stk_f32_to_bf16(0.076f)));
    }
    stk_close(t.e);
    return STK_OK;
}

TEST(zr3_17_empty_tensors_and_blocks)
{
    uint64_t hash[WORLD_PLACE_N] = { 0 };
    for (int p = 0; p < WORLD_PLACE_N; p++) CHECK(odd_run(p, &hash[p]) == STK_OK);
    CHECK(hash[0] && hash[0] == hash[1] && hash[0] == hash[2]);
}

TEST_MAIN()
