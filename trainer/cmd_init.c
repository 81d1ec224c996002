/* trainer/cmd_init.c - `stoker init`: a randomly initialised model folder, streamed.
 *
 * As transformers initialises: matrices and embeddings from a normal distribution of mean 0 and
 * standard deviation initializer_range, norms one, biases zero, rounded to bf16. One stream of
 * random numbers per tensor (its position in the order of formats/model_config.h), so that a tensor
 * does not depend on the others. Must not know: the engine. */
#include "base/cpu.h"
#include "base/exec.h"
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

/* Values are drawn in slices by all cores. The numbers that a slice begins with are found by one of
 * them, which only steps over the draws of the slices before: so the bits are those of one stream,
 * whatever the cores. */
enum { SLICE = 16384, DRAWS_OF_A_NORMAL = 2 };

struct init {
    const struct model_config *cfg;
    uint64_t seed, stream;
    struct rng rng;
    struct exec *ex;
    struct exec_team *team;
    struct exec_lane *lane;
    struct exec_event event;
    struct exec_task done;
    struct exec_team_job job;
    struct rng *begin; /* of each slice */
    uint64_t n;        /* values of the piece */
    uint16_t *out;
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

static void fill_slice(void *arg, uint32_t slice, uint32_t n_slices)
{
    const struct init *in = arg;
    (void)n_slices;
    struct rng rng = in->begin[slice];
    uint64_t first = (uint64_t)slice * SLICE, end = first + SLICE < in->n ? first + SLICE : in->n;
    for (uint64_t i = first; i < end; i++)
        in->out[i] = stk_f32_to_bf16((float)(rng_normal(&rng) * in->cfg->initializer_range));
}

static void filled(void *arg) { exec_event_set(&((struct init *)arg)->event); }

static stk_status fill_normal(struct init *in, uint64_t n, uint16_t *out, struct stk_error *err)
{
    uint32_t n_slices = (uint32_t)((n + SLICE - 1) / SLICE);
    in->n = n;
    in->out = out;
    for (uint32_t k = 0; k < n_slices; k++) {
        uint64_t values = n - (uint64_t)k * SLICE < SLICE ? n - (uint64_t)k * SLICE : SLICE;
        in->begin[k] = in->rng;
        for (uint64_t i = 0; i < values * DRAWS_OF_A_NORMAL; i++) (void)rng_next(&in->rng);
    }
    in->job = (struct exec_team_job){ .fn = fill_slice, .arg = in, .n_slices = n_slices,
                                      .done_lane = in->lane, .done = &in->done };
    exec_event_reset(&in->event);
    exec_task_init(&in->done, filled, in);
    exec_team_run(in->team, &in->job);
    return exec_event_wait(&in->event, UINT64_MAX, err);
}

/* Pieces of a tensor come in ascending order. */
static stk_status random_values(void *arg, const struct model_tensor *t, uint64_t first, uint64_t n,
                                uint16_t *out, struct stk_error *err)
{
    struct init *in = arg;
    if (signals_stop())
        return stk_error_set(err, STK_ERR_INTERRUPTED, 0, "interrupted; nothing was written");
    if (first == 0) rng_seed_stream(&in->rng, in->seed, in->stream++);
    if (!is_norm(t->role) && !is_bias(t->role)) return fill_normal(in, n, out, err);
    for (uint64_t i = 0; i < n; i++) out[i] = stk_f32_to_bf16(is_norm(t->role) ? 1.0f : 0.0f);
    return STK_OK;
}

static stk_status open_team(struct init *in, uint64_t values, struct stk_error *err)
{
    in->begin = sys_calloc(values / SLICE + 1, sizeof *in->begin);
    if (!in->begin) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a buffer");
    STK_TRY(exec_open_threads(&in->ex, err));
    exec_event_init(in->ex, &in->event);
    STK_TRY(exec_lane_open(in->ex, "init", &in->lane, err));
    return exec_team_open(in->ex, "random", cpu_count(""), &in->team, err);
}

static void close_team(struct init *in)
{
    if (in->team) exec_team_close(in->team);
    exec_close(in->ex);
    sys_free(in->begin);
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
    stk_status st = partial && buf ? open_team(&in, buf_bytes / sizeof(uint16_t), err)
                                   : stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a buffer");
    if (st == STK_OK) st = hf_write(&job, partial, err);
    if (st == STK_OK) st = hf_publish(partial, o->out, err);
    pulse_close(pulse);
    close_team(&in);
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
    signals_install("stopping");
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
