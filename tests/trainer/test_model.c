/* tests/trainer/test_model.c - visits of the built-in models against what transformers computed
 * (tests/golden), and against each other.
 *
 * Linked with fake_engine.c: forward and backward alone, on the host device in place and discrete.
 */
#include "base/sys.h"
#include "tests/trainer/golden.h"

#include "tests/test.h"
#include <errno.h>

static stk_config config_of(stk_act activations)
{
    stk_config c;
    stk_config_init(&c, sizeof c);
    c.activations = activations;
    return c;
}

static const struct model_opts opts_f32 = { .act = OPS_F32, .param = OPS_BF16, .logits = true };
static const struct model_opts opts_bf16 = { .act = OPS_BF16, .param = OPS_BF16, .logits = true };

/* --- against transformers -------------------------------------------------------------------- */

static void compare_f32(const char *name, const char *config, stk_config c, struct model_opts o,
                        uint32_t n_micro)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct golden_run r;
    CHECK_OK(golden_open_config(name, config, &g, &err), &err);
    CHECK_OK(golden_run_open(&g, o, c, n_micro, &r, &err), &err);
    CHECK_OK(golden_eval(&r, &err), &err);
    double logits = golden_logits_error(&r), eval_loss = fabs(r.loss - g.loss), worst = 0;
    CHECK_OK(golden_step(&r, &err), &err);
    double loss = fabs(r.loss - g.loss);
    for (uint32_t t = 0; t < model_tensor_count(r.m); t++) {
        double error = 0;
        CHECK_OK(golden_grad_error(&r, t, &error, NULL, &err), &err);
        if (error > 0.01)
            printf("# %s: gradient of %s off by %.3g\n", name, model_tensor(r.m, t)->name, error);
        CHECK(error <= 0.01);
        worst = fmax(worst, error);
    }
    printf("# %s: logits %.2e, loss %.2e (eval %.2e), gradients %.2e of the largest\n", name,
           logits, loss, eval_loss, worst);
    CHECK(logits <= 1e-3);
    CHECK(loss <= 1e-4);
    CHECK(eval_loss <= 1e-4);
    golden_run_close(&r);
    golden_close(&g);
}

TEST(model_golden_f32)
{
    for (size_t i = 0; i < GOLDEN_N; i++)
        compare_f32(golden_names[i], "config.json", config_of(STK_ACT_KEEP), opts_f32, 1);
}

/* With the configuration in its other spelling. */
TEST(model_golden_f32_discrete_recompute)
{
    stk_config c = config_of(STK_ACT_RECOMPUTE);
    c.device = STK_DEVICE_HOST_DISCRETE;
    c.compute_threads = 2;
    for (size_t i = 0; i < GOLDEN_N; i++)
        compare_f32(golden_names[i], "config.other.json", c, opts_f32, 1);
}

/* fp16 holds these weights exactly enough; the scale of the loss must leave the gradients as they
 * were. */
TEST(model_golden_fp16_parameters)
{
    struct model_opts o = opts_f32;
    o.param = OPS_FP16;
    stk_config c = config_of(STK_ACT_KEEP);
    c.loss_scale = 1024;
    compare_f32("llama_gqa_old", "config.json", c, o, 1);
    compare_f32("qwen3_tied_old", "config.json", c, o, 1);
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
    printf(
        "# %s: logits %.2f of torch's bf16 error, gradients at most %.2f (%s), loss off by %.1e\n",
        name, logits / g.bf16_logits_err, worst, where, r.loss - g.loss);
    CHECK(logits <= 1.25 * g.bf16_logits_err);
    CHECK(worst <= (matmul == STK_MATMUL_BF16 ? 2.5 : 1.25)); /* why: test_golden.py */
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

/* --- against each other ---------------------------------------------------------------------- */

/* Gradients of all tensors, one after the other; frozen ones are NaN. free() it. */
static float *all_grads(const char *name, struct model_opts o, stk_config c, uint32_t n_micro,
                        uint64_t *n, double *loss)
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

static void check_same_bits(const char *name, struct model_opts o, stk_config a, stk_config b,
                            uint32_t n_micro)
{
    uint64_t n, n2;
    double loss, loss2;
    float *x = all_grads(name, o, a, n_micro, &n, &loss),
          *y = all_grads(name, o, b, n_micro, &n2, &loss2);
    CHECK(x && y && n == n2);
    CHECK(loss == loss2);
    CHECK(x && y && memcmp(x, y, n * sizeof *x) == 0);
    free(x);
    free(y);
}

static bool bf16_products_possible(void)
{
    stk_engine *e = NULL;
    stk_config c = config_of(STK_ACT_KEEP);
    c.matmul = STK_MATMUL_BF16;
    bool possible = stk_open(&c, &e) == STK_OK;
    stk_close(e);
    return possible;
}

/* What lives within a visit has another dtype here (model.h). */
TEST(model_recompute_gives_the_bits_of_keep_with_bf16_products)
{
    if (!bf16_products_possible()) SKIP("oneDNN has no bf16 products on this processor");
    stk_config keep = config_of(STK_ACT_KEEP), other = config_of(STK_ACT_RECOMPUTE);
    keep.matmul = other.matmul = STK_MATMUL_BF16;
    check_same_bits("qwen2_tied_old", opts_bf16, keep, other, 1);
    other.device = STK_DEVICE_HOST_DISCRETE;
    check_same_bits("qwen3_untied_sharded_new", opts_bf16, keep, other, 1);
}

TEST(model_recompute_and_host_give_the_bits_of_keep)
{
    static const char *const names[] = { "llama_gqa_old", "qwen2_tied_old",
                                         "qwen3_untied_sharded_new",
                                         "mistral_window_docs_mask_new" };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        check_same_bits(names[i], opts_f32, config_of(STK_ACT_KEEP), config_of(STK_ACT_RECOMPUTE),
                        1);
        check_same_bits(names[i], opts_bf16, config_of(STK_ACT_KEEP), config_of(STK_ACT_RECOMPUTE),
                        1);
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
    compare_f32("llama_gqa_old", "config.json", config_of(STK_ACT_KEEP), opts_f32, 2);
    compare_f32("llama_gqa_old", "config.json", config_of(STK_ACT_RECOMPUTE), opts_f32, 4);
    compare_f32("qwen3_tied_old", "config.json", config_of(STK_ACT_KEEP), opts_f32, 3);
}

/* What is not frozen has the gradient it has without freezing, to the bit; what is frozen has none.
 */
static void check_freeze(const char *name, const char *pattern, const char *expect_frozen,
                         uint32_t n_expected)
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
    check_freeze("llama_gqa_old", "model.layers.1.*", "layers.1.",
                 9); /* a block with nothing trainable passes the gradient on */
    check_freeze("qwen2_tied_old", "*.q_proj.*", "q_proj", 4);
    check_freeze("qwen2_tied_old", "*.bias", ".bias", 6);
    check_freeze("qwen3_tied_old", "*_norm.weight", "_norm.weight", 4);
    check_freeze("qwen3_tied_old", "model.embed_tokens.weight", "embed_tokens",
                 1); /* shares its block with the final norm */
    check_freeze("qwen3_untied_sharded_new", "lm_head.weight", "lm_head", 1);
}

/* --- what the golden cases do not have ------------------------------------------------------- */

static stk_status write_one(const struct golden_run *r, uint32_t t, uint64_t i, float x,
                            struct stk_error *err)
{
    uint16_t bits;
    convert_f32_to_bf16(&x, &bits, 1);
    return golden_engine(r, stk_tensor_write(r->e, t, i, 1, &bits, STK_BF16), err);
}

static stk_status fill_with_biases(const struct golden_run *r, struct stk_error *err)
{
    for (uint32_t t = 0; t < model_tensor_count(r->m); t++) {
        const struct model_tensor_info *info = model_tensor(r->m, t);
        const struct st_tensor *w = st_set_find(r->g->weights, info->name);
        uint16_t *bits = calloc(info->n_elems, sizeof *bits);
        stk_status st = w ? st_set_read(r->g->weights, w, 0, w->size_bytes, bits, err) : STK_OK;
        for (uint64_t i = 0; !w && i < info->n_elems; i++)
            bits[i] = (uint16_t)((i & 1 ? 0xbe00 : 0x3e00) + i % 7 * 16);
        if (st == STK_OK)
            st = golden_engine(r, stk_tensor_write(r->e, t, 0, info->n_elems, bits, STK_BF16), err);
        free(bits);
        STK_TRY(st);
    }
    return STK_OK;
}

/* Central difference of the loss in one element of a bias, which fill_with_biases set to `value`.
 */
static void check_difference(struct golden_run *r, uint32_t t, uint64_t i, float got, float scale)
{
    struct stk_error err = { 0 };
    const float step = 1.0f / 64, at = 0.125f * (1 + (float)(i % 7) / 8), value = i & 1 ? -at : at;
    CHECK_OK(write_one(r, t, i, value + step, &err), &err);
    CHECK_OK(golden_eval(r, &err), &err);
    double up = r->loss;
    CHECK_OK(write_one(r, t, i, value - step, &err), &err);
    CHECK_OK(golden_eval(r, &err), &err);
    double difference = (up - r->loss) / (2 * (double)step);
    CHECK_OK(write_one(r, t, i, value, &err), &err);
    if (fabs(difference - (double)got) > 0.02 * (double)scale)
        printf("# %s[%llu]: gradient %g, difference %g\n", model_tensor(r->m, t)->name,
               (unsigned long long)i, (double)got, difference);
    CHECK(fabs(difference - (double)got) <= 0.02 * (double)scale);
}

/* Llama may have biases everywhere; no golden case has o, gate, up and down biases. */
TEST(model_biases_against_differences)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct golden_run r;
    uint32_t seen = 0;
    CHECK_OK(golden_open("llama_gqa_old", &g, &err), &err);
    g.cfg.attention_bias = g.cfg.o_bias = g.cfg.mlp_bias = true;
    CHECK_OK(golden_run_start(&g, opts_f32, config_of(STK_ACT_RECOMPUTE), 1, &r, &err), &err);
    CHECK_OK(fill_with_biases(&r, &err), &err);
    CHECK_OK(golden_step(&r, &err), &err);
    for (uint32_t t = 0; t < model_tensor_count(r.m); t++) {
        const struct model_tensor_info *info = model_tensor(r.m, t);
        if (!strstr(info->name, ".bias")) continue;
        float *grad = golden_grad(&r, t, &err), largest = 0;
        REQUIRE(grad);
        for (uint64_t i = 0; i < info->n_elems; i++) largest = fmaxf(largest, fabsf(grad[i]));
        for (uint64_t i = 0; i < info->n_elems; i += 5)
            check_difference(&r, t, i, grad[i], largest);
        free(grad);
        seen++;
    }
    CHECK(seen == 14);
    golden_run_close(&r);
    golden_close(&g);
}

/* A step in which no token is a target: no gradient, and no NaN from a division by zero. */
TEST(model_step_without_targets)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct golden_run r;
    CHECK_OK(golden_open("qwen3_tied_old", &g, &err), &err);
    for (uint64_t i = 0; i < g.tokens; i++) g.target[i] = -1;
    g.targets = 0;
    CHECK_OK(golden_run_open(&g, opts_bf16, config_of(STK_ACT_KEEP), 1, &r, &err), &err);
    CHECK_OK(golden_step(&r, &err), &err);
    CHECK(model_loss_sum(r.m) == 0);
    for (uint32_t t = 0; t < model_tensor_count(r.m); t++) {
        float *grad = golden_grad(&r, t, &err);
        REQUIRE(grad);
        for (uint64_t i = 0; i < model_tensor(r.m, t)->n_elems; i++) CHECK(grad[i] == 0);
        free(grad);
    }
    golden_run_close(&r);
    golden_close(&g);
}

/* --- description and refusals ---------------------------------------------------------------- */

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

/* Every allocation of model_open fails once: a clean refusal, nothing left behind. */
TEST(model_open_without_memory)
{
    struct stk_error err = { 0 };
    struct golden g;
    struct model *m = NULL;
    struct model_opts o = opts_f32;
    CHECK_OK(golden_open("mistral_window_new", &g, &err), &err);
    o.seq = o.sequences = o.n_micro = 1;
    const uint64_t before = sys_alloc_bytes();
    stk_status st = STK_ERR_NOMEM;
    uint64_t k = 0;
    while (st != STK_OK && k < 100) {
        stk_error_clear(&err);
        sys_fault_arm(SYS_ALLOC, ++k, 1, ENOMEM);
        st = model_open(&g.cfg, &o, &m, &err);
        sys_fault_arm(SYS_ALLOC, 0, 0, 0);
        CHECK(st == STK_OK || (st == STK_ERR_NOMEM && !m && sys_alloc_bytes() == before));
    }
    CHECK(st == STK_OK && k > 10);
    model_close(m);
    CHECK(sys_alloc_bytes() == before);
    golden_close(&g);
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

/* By hand for llama_gqa_old: per token 2 flops a weight element but the embedding's, and 4
 * seq_pairs/seq q_cols for attention. */
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
