/* trainer/main.c - the program: finds the verb and hands over. Knows nothing about what verbs do.
 */
#include "trainer/cmd.h"
#include "engine/stoker.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct verb {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} verbs[] = {
    { "init", cmd_init, "make a randomly initialised model folder from a config.json" },
    { "prepare", cmd_prepare, "turn text, prompts or chats into a token file (Python)" },
    { "train", cmd_train, "train all parameters of a model" },
    { "plan", cmd_plan, "show what a training run would need, and its plan; runs nothing" },
    { "eval", cmd_eval, "mean loss and perplexity of a model over a token file" },
    { "export", cmd_export, "a Hugging Face folder from a checkpoint" },
    { "inspect", cmd_inspect, "what a model, checkpoint, token file or store holds" },
    { "bench", cmd_bench, "measure this machine: nvme, adam, copy, step" },
    { "doctor", cmd_doctor, "what this machine allows, and what to change" },
};
enum { VERB_N = sizeof verbs / sizeof verbs[0] };

static void print_usage(FILE *to)
{
    fputs("usage: stoker VERB [options]; stoker VERB --help lists them\n\n", to);
    for (int i = 0; i < VERB_N; i++) fprintf(to, "  %-8s  %s\n", verbs[i].name, verbs[i].help);
}

/* Threads of the math library spin after each operation and would take the cores from I/O, casts
 * and the update; its runtime reads the policy before main, so the program starts itself once more.
 * A policy that the user has set stays. */
static void set_wait_policy(char **argv)
{
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    if (setenv("OMP_WAIT_POLICY", "passive", 1) != 0) return;
    execv("/proc/self/exe", argv); /* on failure: go on as we are, only slower */
}

/* A closed stdin, stdout or stderr would give its number to the next file that is opened, and what
 * is printed would land in it. */
static void fill_standard_files(void)
{
    for (int fd = open("/dev/null", O_RDWR); fd >= 0; fd = dup(fd))
        if (fd > STDERR_FILENO) {
            close(fd);
            return;
        }
}

/* What was printed is the result of all verbs but those that write theirs to files. A reader that
 * went away early (a pipe into head) has what it wanted. */
static int check_output(const char *verb, int code)
{
    struct stat st;
    bool lost = fflush(stdout) != 0 || ferror(stdout);
    if (!lost || code != EXIT_DONE) return code;
    if (fstat(STDOUT_FILENO, &st) == 0 && (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode)))
        return code;
    fprintf(stderr,
            "stoker: standard output could not be written (a full disk?): what %s printed is "
            "incomplete\n",
            verb);
    return strcmp(verb, "train") == 0 ? code : EXIT_OPERATING;
}

int main(int argc, char **argv)
{
    fill_standard_files();
    set_wait_policy(argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc < 2) {
        print_usage(stderr);
        return EXIT_USE;
    }
    for (int i = 0; i < VERB_N; i++)
        if (strcmp(argv[1], verbs[i].name) == 0)
            return check_output(argv[1], verbs[i].run(argc - 2, argv + 2));
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_usage(stdout);
        return EXIT_DONE;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("stoker %s\n", stk_version());
        return EXIT_DONE;
    }
    const char *near = opts_nearest(argv[1], &verbs[0].name, sizeof verbs[0], VERB_N);
    fprintf(stderr, "stoker: %s: there is no such verb; %s%s\n", argv[1],
            near ? "did you mean " : "see stoker --help", near ? near : "");
    return EXIT_USE;
}
