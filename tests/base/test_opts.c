/* tests/base/test_opts.c - the options table: every type, every error's sentence, file and
 * command line together. */
#include "base/opts.h"
#include "base/sys.h"
#include "tests/test.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

struct target {
    uint64_t steps, host_memory;
    double lr;
    bool resume;
    const char *model, *config;
    int dtype;
    struct opt_list nvme;
};

static bool same(const char *a, const char *b) { return a && b && strcmp(a, b) == 0; }

static const char *const dtypes[] = { "bf16", "fp16", "fp32", NULL };
static const struct opt_row rows[] = {
    { .name = "steps",
      .type = OPT_U64,
      .offset = offsetof(struct target, steps),
      .def = "100",
      .min = 1,
      .max = 1000000,
      .arg = "N",
      .help = "steps to run" },
    { .name = "lr",
      .type = OPT_DOUBLE,
      .offset = offsetof(struct target, lr),
      .def = "3e-4",
      .min = 0,
      .max = 1,
      .help = "learning rate" },
    { .name = "host-memory",
      .type = OPT_SIZE,
      .offset = offsetof(struct target, host_memory),
      .min = 1 << 20,
      .max = 0x1p63,
      .help = "budget of host memory" },
    { .name = "resume",
      .type = OPT_FLAG,
      .offset = offsetof(struct target, resume),
      .help = "go on" },
    { .name = "model",
      .type = OPT_STRING,
      .offset = offsetof(struct target, model),
      .arg = "DIR",
      .help = "the model's folder",
      .required = true },
    { .name = "dtype",
      .type = OPT_CHOICE,
      .offset = offsetof(struct target, dtype),
      .def = "fp16",
      .choices = dtypes,
      .help = "16-bit format" },
    { .name = "nvme",
      .type = OPT_LIST,
      .offset = offsetof(struct target, nvme),
      .def = "x,y",
      .help = "folders" },
    { .name = "config",
      .type = OPT_STRING,
      .offset = offsetof(struct target, config),
      .arg = "FILE",
      .help = "options in JSON" },
};
enum { N_ROWS = sizeof rows / sizeof rows[0], STEPS = 0, HOST = 2, MODEL = 4, NVME = 6 };

static stk_status parse(struct target *t, bool *given, struct opt_list *rest, struct stk_error *err,
                        const char *line)
{
    static char words[2048];
    char *argv[64], *save = NULL;
    int argc = 0;
    snprintf(words, sizeof words, "%s", line);
    for (char *w = strtok_r(words, " ", &save); w; w = strtok_r(NULL, " ", &save)) argv[argc++] = w;
    memset(t, 0xa5, sizeof *t); /* the fields may hold anything before */
    return opts_parse(rows, N_ROWS, argc, argv, t, given, rest, err);
}

static void expect_error(const char *line, const char *sentence)
{
    struct target t;
    struct stk_error err = { 0 };
    uint64_t before = sys_alloc_bytes();
    CHECK(parse(&t, NULL, NULL, &err, line) == STK_ERR_CONFIG);
    if (strcmp(err.text, sentence) != 0) printf("# got:  %s\n# want: %s\n", err.text, sentence);
    CHECK(strcmp(err.text, sentence) == 0);
    CHECK(sys_alloc_bytes() == before && t.model == NULL && t.nvme.n == 0);
}

TEST(opts_defaults_and_types)
{
    struct target t;
    bool given[N_ROWS];
    struct stk_error err = { 0 };
    uint64_t before = sys_alloc_bytes();
    CHECK_OK(parse(&t, given, NULL, &err, "--model m"), &err);
    CHECK(t.steps == 100 && t.lr == 3e-4 && t.host_memory == 0 && !t.resume && t.dtype == 1
          && !t.config);
    CHECK(same(t.model, "m") && t.nvme.n == 2 && same(t.nvme.item[1], "y"));
    CHECK(given[MODEL] && !given[STEPS] && !given[NVME]);
    opts_free(rows, N_ROWS, &t);
    CHECK(t.model == NULL && sys_alloc_bytes() == before);

    struct opt_list rest;
    CHECK_OK(
        parse(&t, given, &rest, &err,
              "--steps=7 one --lr 0.5 --host-memory 1.5GiB --resume two --dtype=fp32 --nvme a,b "
              "--nvme c --model=k=v - -- --steps"),
        &err);
    CHECK(t.steps == 7 && t.lr == 0.5 && t.host_memory == 3ull << 29 && t.resume && t.dtype == 2);
    CHECK(same(t.model, "k=v"));
    REQUIRE(t.nvme.n == 3 && rest.n == 4);
    CHECK(same(t.nvme.item[0], "a") && same(t.nvme.item[2], "c"));
    CHECK(same(rest.item[0], "one") && same(rest.item[2], "-") && same(rest.item[3], "--steps"));
    opts_free(rows, N_ROWS, &t);
    CHECK_OK(parse(&t, given, NULL, &err, "--model m --resume=false --lr 1e-5"), &err);
    CHECK(!t.resume && t.lr == 1e-5);
    opts_free(rows, N_ROWS, &t);
}

TEST(opts_errors_are_exact)
{
    expect_error("--modle m", "--modle: there is no such option; did you mean --model?");
    expect_error("--host_memory 1GiB",
                 "--host_memory: there is no such option; did you mean --host-memory?");
    expect_error("--zebra", "--zebra: there is no such option; see --help");
    expect_error("-m x", "-m: there is no such option; options begin with \"--\"");
    expect_error("--model a --model=b", "--model is given twice: give it once");
    expect_error("--model a --steps", "--steps needs a value: --steps N");
    expect_error("--model --steps 4", "--model needs a value: --model DIR");
    expect_error("--model a --steps ten", "--steps: \"ten\" is not a whole number");
    expect_error("--model a --steps -1", "--steps: \"-1\" is not a whole number");
    expect_error("--model a --steps 0", "--steps: 0 is out of range, expected 1 to 1000000");
    expect_error("--model a --steps 99999999999999999999",
                 "--steps: \"99999999999999999999\" is not below 2^64");
    expect_error("--model a --lr nan", "--lr: \"nan\" is not a number");
    expect_error("--model a --lr 1.5", "--lr: 1.5 is out of range, expected 0 to 1");
    expect_error("--model a --host-memory 4096",
                 "--host-memory: 4096 is out of range, expected at least 1.00 MiB");
    expect_error("--model a --host-memory 3XB",
                 "--host-memory: \"3XB\" is not a size such as 24GiB, 512MiB or 4096");
    expect_error("--model a --dtype fp8", "--dtype: \"fp8\" is not one of bf16, fp16, fp32");
    expect_error("--model a --resume=maybe", "--resume: \"maybe\" is not true or false");
    expect_error("--model a --nvme a,,b", "--nvme: \"a,,b\" is not a list: an item is empty");
    expect_error("--model a extra", "extra: only options are expected here; see --help");
    expect_error("--steps 4", "--model DIR is required: the model's folder");
}

/* --- the file --------------------------------------------------------------------------------- */

static char config_path[64];

static const char *write_config(const char *text)
{
    snprintf(config_path, sizeof config_path, "/tmp/stoker-test-opts-%d.json", (int)getpid());
    int fd = sys_open(config_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    STK_ASSERT(fd >= 0 && sys_write_full(fd, text, strlen(text), 0) == (int64_t)strlen(text));
    sys_close(fd);
    return config_path;
}

static stk_status parse_with(const char *config, const char *more, struct target *t, bool *given,
                             struct stk_error *err)
{
    char line[512];
    snprintf(line, sizeof line, "%s --config %s", more, write_config(config));
    stk_status status = parse(t, given, NULL, err, line);
    unlink(config_path);
    return status;
}

TEST(opts_file_first_command_line_wins)
{
    struct target t;
    bool given[N_ROWS];
    struct stk_error err = { 0 };
    uint64_t before = sys_alloc_bytes();
    const char *config = "{\"model\": \"from file\", \"steps\": 5, \"lr\": 0.25, \"resume\": true, "
                         "\"host-memory\": \"2GiB\",\n"
                         " \"nvme\": [\"p\", \"q,r\"], \"dtype\": \"bf16\"}";
    CHECK_OK(parse_with(config, "--steps 6", &t, given, &err), &err);
    CHECK(t.steps == 6 && t.lr == 0.25 && t.resume && t.host_memory == 2ull << 30 && t.dtype == 0);
    CHECK(same(t.model, "from file") && t.nvme.n == 3 && given[MODEL] && given[HOST]);
    opts_free(rows, N_ROWS, &t);
    CHECK_OK(parse_with(config, "--nvme only --model m", &t, given, &err), &err);
    CHECK(t.nvme.n == 1 && same(t.nvme.item[0], "only") && same(t.model, "m"));
    opts_free(rows, N_ROWS, &t);
    CHECK(sys_alloc_bytes() == before);
}

static void expect_file_error(const char *config, const char *part)
{
    struct target t;
    struct stk_error err = { 0 };
    CHECK(parse_with(config, "--model m", &t, NULL, &err) == STK_ERR_CONFIG);
    if (!strstr(err.text, part)) printf("# got: %s\n", err.text);
    CHECK(strstr(err.text, part) != NULL && strstr(err.text, config_path) != NULL);
}

TEST(opts_file_errors)
{
    expect_file_error("{\"stesp\": 1}", ": stesp: there is no such option; did you mean steps?");
    expect_file_error("{\"steps\": 0}", ": steps: 0 is out of range, expected 1 to 1000000");
    expect_file_error("{\"steps\": 1.5}", ": steps: \"1.5\" is not a whole number");
    expect_file_error("{\"steps\": null}", ": steps: expected a string, a number, true or false");
    expect_file_error("{\"nvme\": {}}",
                      ": nvme: expected a string, a number, true or false, or an array of strings");
    expect_file_error("{\"steps\": 1,\n \"steps\": 2}", "line 2");
    expect_file_error("{\"steps\": 1,", "not JSON");
    expect_file_error("[1]", "expected one JSON object");
    expect_file_error("{\"config\": \"other\"}", "cannot name another");
    expect_error("--model m --config /nonexistent/x",
                 "/nonexistent/x: cannot open the config file: No such file or directory");
}

TEST(opts_memory_faults_are_reported)
{
    uint64_t before = sys_alloc_bytes();
    uint32_t failures = 0;
    for (uint64_t k = 1; k < 40; k++) {
        struct target t;
        struct stk_error err = { 0 };
        const char *config = "{\"nvme\": [\"p\", \"q\"]}";
        write_config(config);
        sys_fault_arm(SYS_ALLOC, k, 1, ENOMEM);
        stk_status s = parse_with(config, "--model m", &t, NULL, &err);
        bool hit = sys_fault_seen(SYS_ALLOC) >= k;
        sys_fault_arm(SYS_ALLOC, 0, 0, 0);
        CHECK(s == (hit ? STK_ERR_NOMEM : STK_OK));
        if (s == STK_OK) opts_free(rows, N_ROWS, &t);
        CHECK(sys_alloc_bytes() == before);
        failures += hit;
    }
    CHECK(failures > 5 && failures < 39);
}

/* --- texts ------------------------------------------------------------------------------------ */

TEST(opts_values_as_text_read_back)
{
    struct target t, u;
    struct stk_error err = { 0 };
    CHECK_OK(parse(&t, NULL, NULL, &err,
                   "--model m --steps 12345 --lr 0.1 --host-memory 1.5GiB --resume --nvme a,b"),
             &err);
    char line[1024] = "";
    static const char *const want[] = { "12345", "0.1", "1536MiB", "true", "m", "fp16", "a,b", "" };
    for (int i = 0; i < N_ROWS; i++) {
        char value[128];
        opts_value_text(&rows[i], &t, value, sizeof value);
        CHECK(strcmp(value, want[i]) == 0);
        if (*value)
            snprintf(line + strlen(line), sizeof line - strlen(line), "--%s=%s ", rows[i].name,
                     value);
    }
    CHECK_OK(parse(&u, NULL, NULL, &err, line), &err);
    CHECK(u.steps == t.steps && u.lr == t.lr && u.host_memory == t.host_memory && u.resume
          && u.nvme.n == 2);
    char small[4];
    opts_value_text(&rows[NVME], &t, small, sizeof small);
    CHECK(same(small, "a,b"));
    opts_value_text(&rows[STEPS], &t, small, sizeof small);
    CHECK(same(small, "123"));
    opts_free(rows, N_ROWS, &t);
    opts_free(rows, N_ROWS, &u);
}

TEST(opts_help_is_aligned)
{
    static const char want[] =
        "  --steps N           steps to run (1 to 1000000; default 100)\n"
        "  --lr X              learning rate (0 to 1; default 3e-4)\n"
        "  --host-memory SIZE  budget of host memory (at least 1.00 MiB)\n"
        "  --resume            go on\n"
        "  --model DIR         the model's folder (required)\n"
        "  --dtype CHOICE      16-bit format (bf16, fp16, fp32; default fp16)\n"
        "  --nvme A,B          folders (default x,y)\n"
        "  --config FILE       options in JSON\n";
    char *help = opts_help(rows, N_ROWS);
    REQUIRE(help != NULL);
    if (strcmp(help, want) != 0) printf("# got:\n%s", help);
    CHECK(strcmp(help, want) == 0);
    sys_free(help);
    sys_fault_arm(SYS_ALLOC, 1, 1, ENOMEM);
    CHECK(opts_help(rows, N_ROWS) == NULL);
    sys_fault_arm(SYS_ALLOC, 0, 0, 0);
}

TEST(opts_nearest_name)
{
    static const char *const names[] = { "train", "check", "bench", "plan" };
    CHECK(same(opts_nearest("trian", names, sizeof names[0], 4), "train")); /* a swap counts one */
    CHECK(same(opts_nearest("chek", names, sizeof names[0], 4), "check"));
    CHECK(same(opts_nearest("plan", names, sizeof names[0], 4), "plan"));
    CHECK(opts_nearest("zzzzz", names, sizeof names[0], 4) == NULL);
    CHECK(opts_nearest("", names, sizeof names[0], 4) == NULL);
    CHECK(opts_nearest("train", names, sizeof names[0], 0) == NULL);
}

TEST_MAIN()
