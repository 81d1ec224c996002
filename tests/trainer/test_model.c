/* tests/trainer/test_model.c - visits of the built-in models against what transformers computed (tests/golden), and against each other.
 *
 * Linked with fake_engine.c: forward and backward alone, on the host device in place and discrete. */
#include "tests/trainer/golden.h"

#include "tests/test.h"

static stk_config config_of(stk_act activations)
{
    stk_config c;
    stk_config_init(&c, sizeof c);
    c.activations = activations;
    return c;
}

static const struct model_opts opts_f32 = { .act = OPS_F32, .param = OPS_BF16, .logits = true };
static const struct model_opts opts_bf16 = { .act = OPS_BF16, .param = OPS_BF16, .logits = true };

/* --- against transformers -------------------------------------------------------------------------------------------------------- */

static void compare_f32(const char *name, stk_config c, struct model_opts o, uint32_t n_micro)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct golden_run r;
    CHECK_OK(golden_open(name, &g, &err), &err);
    CHECK_OK(golden_run_open(&g, o, c, n_micro, &r, &err), &err);
    CHECK_OK(golden_eval(&r, &err), &err);
    double logits = golden_logits_error(&r), eval_loss = fabs(r.loss - g.loss), worst = 0;
    CHECK_OK(golden_step(&r, &err), &err);
    double loss = fabs(r.loss - g.loss);
    for (uint32_t t = 0; t < model_tensor_count(r.m); t++) {
        double error = 0;
        CHECK_OK(golden_grad_error(&r, t, &error, NULL, &err), &err);
        if (error > 0.01) printf("# %s: gradient of %s off by %.3g\n", name, model_tensor(r.m, t)->name, error);
        CHECK(error <= 0.01);
        worst = fmax(worst, error);
    }
    printf("# %s: logits %.2e, loss %.2e (eval %.2e), gradients %.2e of the largest\n", name, logits, loss, eval_loss, worst);
    CHECK(logits <= 1e-3);
    CHECK(loss <= 1e-4);
    CHECK(eval_loss <= 1e-4);
    golden_run_close(&r);
    golden_close(&g);
}

TEST(model_golden_f32)
{
    for (size_t i = 0; i < GOLDEN_N; i++) compare_f32(golden_names[i], config_of(STK_ACT_KEEP), opts_f32, 1);
}

TEST(model_golden_f32_discrete_recompute)
{
    stk_config c = config_of(STK_ACT_RECOMPUTE);
    c.device = STK_DEVICE_HOST_DISCRETE;
    for (size_t i = 0; i < GOLDEN_N; i++) compare_f32(golden_names[i], c, opts_f32, 1);
}

/* fp16 holds these weights exactly enough; the scale of the loss must leave the gradients as they were. */
TEST(model_golden_fp16_parameters)
{
    struct model_opts o = opts_f32;
    o.param = OPS_FP16;
    stk_config c = config_of(STK_ACT_KEEP);
    c.loss_scale = 1024;
    compare_f32("llama_gqa_old", c, o, 1);
    compare_f32("qwen3_tied_old", c, o, 1);
}

static void compare_bf16(const char *name, stk_matmul matmul)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct golden_run r;
    stk_config c = config_of(STK_ACT_KEEP);
    c.matmul = matmul;
    CHECK_OK(golden_open(name, &g, &err), &err);
    stk_status st = golden_run_open(&g, opts_bf16, c, 1, &r, &err);
    if (st == STK_ERR_UNSUPPORTED && matmul == STK_MATMUL_BF16) {
        printf("# no bf16 products on this processor\n");
        golden_run_close(&r);
        golden_close(&g);
        return;
    }
    CHECK_OK(st, &err);
    CHECK_OK(golden_eval(&r, &err), &err);
    double logits = golden_logits_error(&r), worst = 0;
    const char *where = "";
    CHECK_OK(golden_step(&r, &err), &err);
    for (uint32_t t = 0; t < model_tensor_count(r.m); t++) {
        double error = 0, torch = 0;
        CHECK_OK(golden_grad_error(&r, t, &error, &torch, &err), &err);
        if (error / torch > worst) where = model_tensor(r.m, t)->name;
        worst = fmax(worst, error / torch);
    }
    printf("# %s: logits %.2f of torch's bf16 error, gradients at most %.2f (%s), loss off by %.1e\n", name,
           logits / g.bf16_logits_err, worst, where, r.loss - g.loss);
    CHECK(logits <= 1.25 * g.bf16_logits_err);
    CHECK(worst <= 3); /* measured 0.95 to 2.3; single elements, so only a guard against blunders */
    golden_run_close(&r);
    golden_close(&g);
}

TEST(model_golden_bf16_activations)
{
    for (size_t i = 0; i < GOLDEN_N; i++) compare_bf16(golden_names[i], STK_MATMUL_F32);
}

TEST(model_golden_bf16_products)
{
    for (size_t i = 0; i < GOLDEN_N; i++) compare_bf16(golden_names[i], STK_MATMUL_BF16);
}

/* --- against each other ---------------------------------------------------------------------------------------------------------- */

/* Gradients of all tensors, one after the other; frozen ones are NaN. free() it. */
static float *all_grads(const char *name, struct model_opts o, stk_config c, uint32_t n_micro, uint64_t *n, double *loss)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct golden_run r = { 0 };
    float *all = NULL;
    stk_status st = golden_open(name, &g, &err);
    if (st == STK_OK) st = golden_run_open(&g, o, c, n_micro, &r, &err);
    if (st == STK_OK) st = golden_step(&r, &err);
    *n = 0;
    for (uint32_t t = 0; st == STK_OK && t < model_tensor_count(r.m); t++) {
        const struct model_tensor_info *info = model_tensor(r.m, t);
        all = realloc(all, (*n + info->n_elems) * sizeof *all);
        float *grad = info->frozen ? NULL : golden_grad(&r, t, &err);
        if (grad) memcpy(all + *n, grad, info->n_elems * sizeof *all);
        else memset(all + *n, 0xff, info->n_elems * sizeof *all);
        free(grad);
        *n += info->n_elems;
    }
    if (st != STK_OK) printf("# %s: %s\n", name, err.text);
    *loss = r.loss;
    golden_run_close(&r);
    golden_close(&g);
    return all;
}

static void check_same_bits(const char *name, struct model_opts o, stk_config a, stk_config b, uint32_t n_micro)
{
    uint64_t n, n2;
    double loss, loss2;
    float *x = all_grads(name, o, a, n_micro, &n, &loss), *y = all_grads(name, o, b, n_micro, &n2, &loss2);
    CHECK(x && y && n == n2);
    CHECK(loss == loss2);
    CHECK(x && y && memcmp(x, y, n * sizeof *x) == 0);
    free(x);
    free(y);
}

TEST(model_recompute_and_host_give_the_bits_of_keep)
{
    static const char *const names[] = { "llama_gqa_old", "qwen2_tied_old", "qwen3_untied_sharded_new", "mistral_window_docs_mask_new" };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        check_same_bits(names[i], opts_f32, config_of(STK_ACT_KEEP), config_of(STK_ACT_RECOMPUTE), 1);
        check_same_bits(names[i], opts_bf16, config_of(STK_ACT_KEEP), config_of(STK_ACT_RECOMPUTE), 1);
        check_same_bits(names[i], opts_bf16, config_of(STK_ACT_KEEP), config_of(STK_ACT_HOST), 1);
    }
}

TEST(model_discrete_and_accumulation_orders_give_the_same_bits)
{
    stk_config keep = config_of(STK_ACT_KEEP), other = config_of(STK_ACT_RECOMPUTE);
    other.device = STK_DEVICE_HOST_DISCRETE;
    other.accumulate = STK_ACCUMULATE_MICRO;
    check_same_bits("llama_gqa_old", opts_f32, keep, other, 2);
    check_same_bits("qwen3_tied_old", opts_bf16, keep, other, 3);
}

TEST(model_micro_batches_add_up)
{
    compare_f32("llama_gqa_old", config_of(STK_ACT_KEEP), opts_f32, 2);
    compare_f32("llama_gqa_old", config_of(STK_ACT_RECOMPUTE), opts_f32, 4);
    compare_f32("qwen3_tied_old", config_of(STK_ACT_KEEP), opts_f32, 3);
}

/* What is not frozen has the gradient it has without freezing, to the bit; what is frozen has none. */
static void check_freeze(const char *name, const char *pattern, const char *expect_frozen, uint32_t n_expected)
{
    uint64_t n, n2;
    double loss, loss2;
    struct stk_error err = { 0 };
    struct model_opts o = opts_f32;
    struct golden g;
    struct model *m;
    float *x = all_grads(name, o, config_of(STK_ACT_KEEP), 1, &n, &loss);
    o.freeze = &pattern;
    o.n_freeze = 1;
    float *y = all_grads(name, o, config_of(STK_ACT_RECOMPUTE), 1, &n2, &loss2);
    REQUIRE(x && y && n == n2);
    CHECK(loss == loss2);
    CHECK_OK(golden_open(name, &g, &err), &err);
    struct model_opts plain = opts_f32;
    plain.seq = o.seq = g.seq;
    plain.sequences = o.sequences = plain.n_micro = o.n_micro = 1;
    struct model *free_model;
    CHECK_OK(model_open(&g.cfg, &o, &m, &err), &err);
    CHECK_OK(model_open(&g.cfg, &plain, &free_model, &err), &err);
    uint32_t frozen = 0;
    uint64_t at = 0;
    for (uint32_t t = 0; t < model_tensor_count(m); t++) {
        const struct model_tensor_info *info = model_tensor(m, t);
        uint64_t from = 0;
        for (uint32_t k = 0; strcmp(model_tensor(free_model, k)->name, info->name) != 0; k++)
            from += model_tensor(free_model, k)->n_elems;
        frozen += info->frozen;
        CHECK(info->frozen == (strstr(info->name, expect_frozen) != NULL));
        if (!info->frozen) CHECK(memcmp(x + from, y + at, info->n_elems * sizeof *x) == 0);
        at += info->n_elems;
    }
    CHECK(frozen == n_expected);
    model_close(m);
    model_close(free_model);
    golden_close(&g);
    free(x);
    free(y);
}

TEST(model_frozen_tensors)
{
    check_freeze("llama_gqa_old", "*embed_tokens*", "embed_tokens", 1);
    check_freeze("llama_gqa_old", "model.layers.1.*", "layers.1.", 9); /* a block with nothing trainable passes the gradient on */
    check_freeze("qwen2_tied_old", "*.q_proj.*", "q_proj", 4);
    check_freeze("qwen2_tied_old", "*.bias", ".bias", 6);
    check_freeze("qwen3_tied_old", "*_norm.weight", "_norm.weight", 4);
    check_freeze("qwen3_tied_old", "model.embed_tokens.weight", "embed_tokens", 1); /* shares its block with the final norm */
    check_freeze("qwen3_untied_sharded_new", "lm_head.weight", "lm_head", 1);
}

/* --- description and refusals --------------------------------------------------------------------------------------------------- */

static void check_refused(struct model_opts o, const char *needle)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct model *m;
    CHECK_OK(golden_open("llama_rope3_tied_new", &g, &err), &err);
    if (!o.seq) o.seq = g.seq;
    o.sequences = o.n_micro = 1;
    CHECK(model_open(&g.cfg, &o, &m, &err) == STK_ERR_CONFIG);
    CHECK(m == NULL);
    if (!strstr(err.text, needle)) printf("# %s\n", err.text);
    CHECK(strstr(err.text, needle) != NULL);
    golden_close(&g);
}

TEST(model_refusals_name_the_cause)
{
    static const char *const nothing = "lm_head.weight", *const everything = "*";
    struct model_opts o = opts_f32;
    o.seq = 1000000;
    check_refused(o, "max_position_embeddings");
    o = opts_f32;
    o.freeze = &nothing;
    o.n_freeze = 1;
    check_refused(o, "lm_head.weight");
    o.freeze = &everything;
    check_refused(o, "nothing to train");
    o = opts_bf16;
    o.param = OPS_FP16;
    check_refused(o, "fp16");
    o.act = OPS_FP16;
    check_refused(o, "f32 or bf16");
}

TEST(model_evaluation_only)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct golden_run r;
    struct model_opts o = opts_f32;
    o.eval_only = true;
    CHECK_OK(golden_open("qwen3_tied_old", &g, &err), &err);
    CHECK_OK(golden_run_open(&g, o, config_of(STK_ACT_KEEP), 3, &r, &err), &err);
    for (uint32_t t = 0; t < model_tensor_count(r.m); t++) CHECK(model_tensor(r.m, t)->frozen);
    CHECK_OK(golden_eval(&r, &err), &err);
    CHECK(golden_logits_error(&r) <= 1e-3);
    CHECK(fabs(r.loss - g.loss) <= 1e-4);
    golden_run_close(&r);
    golden_close(&g);
}

/* By hand for llama_gqa_old: per token 2 flops a weight element but the embedding's, and 4 seq_pairs/seq q_cols for attention. */
TEST(model_flops_and_numerics)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct model *m;
    struct model_opts o = opts_f32;
    CHECK_OK(golden_open("llama_gqa_old", &g, &err), &err);
    o.seq = 17;
    o.sequences = 4;
    o.n_micro = 3;
    CHECK_OK(model_open(&g.cfg, &o, &m, &err), &err);
    double layer = 36 * 36 * 2 + 36 * 12 * 2 + 3 * 36 * 43, weights = 2 * layer + 36 * 61;
    double want = 3.0 * (2 * weights * 68 + 2 * 4 * (17 * 18 / 2) * 4 * 36) * 3;
    CHECK(fabs(model_step_flops(m) - want) < 1e-6 * want);
    CHECK(strcmp(model_numerics(m), "act=f32;param=bf16;seq=17;rows=4;family=llama") == 0);
    model_close(m);
    golden_close(&g);
}

TEST_MAIN()
