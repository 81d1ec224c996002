/* trainer/cmd_init.c - `stoker init`: a randomly initialised model folder, streamed.
 *
 * As transformers initialises: matrices and embeddings from a normal distribution of mean 0 and
 * standard deviation initializer_range, norms one, biases zero, rounded to bf16. One stream of
 * random numbers per tensor (its position in the order of formats/model_config.h), so that a tensor
 * does not depend on the others. Must not know: the engine. */
#include "base/numeric.h"
#include "base/rng.h"
#include "base/mem.h"
#include "base/sys.h"
#include "trainer/cmd.h"
#include "trainer/hf_out.h"
#include "trainer/signals.h"

#include <stdio.h>
#include <string.h>

struct init_opts {
    const char *config, *out;
    uint64_t seed;
};

static const struct opt_row rows[] = {
    /* "--config" here is the model's configuration, so it is not a file of options (base/opts.h):
       the row is a list of one. */
    { "seed", OPT_U64, offsetof(struct init_opts, seed), "0", 0, 1e15, .arg = "N",
      .help = "of the random numbers" },
    { "out", OPT_STRING, offsetof(struct init_opts, out), .arg = "DIR",
      .help = "the folder to make; must not hold anything", .required = true },
};
enum { ROW_N = sizeof rows / sizeof rows[0] };

static const char usage[] = "usage: stoker init --config config.json --out DIR [--seed N]\n"
                            "  --config FILE  configuration of the model, in either spelling";

struct init {
    const struct model_config *cfg;
    uint64_t seed, stream;
    struct rng rng;
};

static bool is_norm(enum model_role r)
{
    return r == ROLE_IN_NORM || r == ROLE_POST_NORM || r == ROLE_FINAL_NORM || r == ROLE_Q_NORM ||
           r == ROLE_K_NORM;
}

static bool is_bias(enum model_role r)
{
    return r == ROLE_Q_BIAS || r == ROLE_K_BIAS || r == ROLE_V_BIAS || r == ROLE_O_BIAS ||
           r == ROLE_GATE_BIAS || r == ROLE_UP_BIAS || r == ROLE_DOWN_BIAS;
}

/* Pieces of a tensor come in ascending order. */
static stk_status random_values(void *arg, const struct model_tensor *t, uint64_t first, uint64_t n,
                                uint16_t *out, struct stk_error *err)
{
    struct init *in = arg;
    if (signals_stop())
        return stk_error_set(err, STK_ERR_INTERRUPTED, 0, "interrupted; nothing was written");
    if (first == 0) rng_seed_stream(&in->rng, in->seed, in->stream++);
    for (uint64_t i = 0; i < n; i++) {
        double x = is_norm(t->role)   ? 1.0
                   : is_bias(t->role) ? 0.0
                                      : rng_normal(&in->rng) * in->cfg->initializer_range;
        out[i] = stk_f32_to_bf16((float)x);
    }
    return STK_OK;
}

static stk_status make(const struct init_opts *o, const struct model_config *cfg,
                       struct stk_error *err)
{
    struct init in = { .cfg = cfg, .seed = o->seed };
    const uint64_t buf_bytes = 4u << 20;
    char *partial = sys_format("%s.stoker-partial", o->out);
    void *buf = sys_calloc(1, buf_bytes);
    struct pulse *pulse = pulse_open();
    struct hf_job job = { .cfg = cfg,
                          .dtype = ST_BF16,
                          .read = random_values,
                          .arg = &in,
                          .buf = buf,
                          .buf_bytes = buf_bytes,
                          .pulse = pulse };
    stk_status st = partial && buf ? hf_write(&job, partial, err)
                                   : stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a buffer");
    if (st == STK_OK) st = hf_publish(partial, o->out, err);
    pulse_close(pulse);
    sys_free(buf);
    sys_free(partial);
    return st;
}

/* Takes "--config FILE" out of argv. */
static const char *take_config(int *argc, char **argv)
{
    const char *found = NULL;
    int n = 0;
    for (int i = 0; i < *argc; i++) {
        if (!found && strncmp(argv[i], "--config=", 9) == 0)
            found = argv[i] + 9;
        else if (!found && strcmp(argv[i], "--config") == 0 && i + 1 < *argc)
            found = argv[++i];
        else
            argv[n++] = argv[i];
    }
    *argc = n;
    return found;
}

int cmd_init(int argc, char **argv)
{
    struct init_opts o = { 0 };
    struct stk_error err = { 0 };
    struct model_config cfg;
    if (cmd_help(argc, argv, usage, rows, ROW_N)) return EXIT_DONE;
    const char *config = take_config(&argc, argv);
    for (int i = 0; i < argc; i++)
        if (strcmp(argv[i], "--config") == 0 || strncmp(argv[i], "--config=", 9) == 0) {
            stk_error_set(&err, STK_ERR_CONFIG, 0,
                          config ? "--config is given twice: give it once"
                                 : "--config needs a value: --config FILE");
            return cmd_fail_use(&err);
        }
    if (opts_parse(rows, ROW_N, argc, argv, &o, NULL, NULL, &err) != STK_OK)
        return cmd_fail_use(&err);
    if (!config) {
        stk_error_set(&err, STK_ERR_CONFIG, 0,
                      "--config FILE is required: the model's config.json");
        opts_free(rows, ROW_N, &o);
        return cmd_fail_use(&err);
    }
    signals_install();
    size_t n = strlen(o.out);
    while (n > 1 && o.out[n - 1] == '/') ((char *)(uintptr_t)o.out)[--n] = '\0';
    stk_status st = model_config_read(config, &cfg, &err);
    if (st == STK_OK) {
        uint64_t device;
        st = hf_check_new("--out", o.out, &err);
        uint64_t need = hf_bytes(&cfg, false), room = hf_room(o.out, &device);
        char a[32], b[32];
        if (st == STK_OK && need > room)
            st = stk_error_set(&err, STK_ERR_NOSPACE, 0,
                               "--out %s: the model takes %s, %s are free there", o.out,
                               mem_size_format(need, a), mem_size_format(room, b));
        if (st == STK_OK) st = make(&o, &cfg, &err);
        if (st == STK_OK)
            printf("%s: a %s of %.1f million parameters, bf16, seed %llu\n", o.out,
                   model_family_name(cfg.family), (double)model_param_count(&cfg) / 1e6,
                   (unsigned long long)o.seed);
        model_config_free(&cfg);
    }
    opts_free(rows, ROW_N, &o);
    return st == STK_OK ? EXIT_DONE : cmd_fail(&err);
}
