/* tests/test.h - the small test runner: TAP on stdout, exit 0 all passed or were skipped, 1
 * something failed (meson takes skipping from the TAP lines, and any other exit status as an
 * error).
 *
 *     TEST(store_nvm_01_partial_block) { CHECK(x == 1); CHECK_OK(call(&err), &err); if (!have)
 *             SKIP("no io_uring"); }
 *     TEST_MAIN()
 *
 * A failed test prints a line that runs it alone. A test that uses random numbers takes test_seed(): from the environment variable STK_SEED or a
 * fixed default, printed with every failure. CHECK goes on after a failure; REQUIRE leaves the
 * test. Arguments name tests to run (substring). One .c file is one executable; a test may include
 * the .c file it tests to reach statics. */
#ifndef TESTS_TEST_H
#define TESTS_TEST_H

#include "base/status.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Built for a sanitizer of addresses or threads: it has its own use of memory, and takes its own time. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TEST_SANITIZED 1
#endif
#endif
#ifndef TEST_SANITIZED
#define TEST_SANITIZED 0
#endif

struct test_case { const char *name; void (*fn)(void); struct test_case *next; };
static struct test_case *test_first, **test_last = &test_first;
static int test_failures, test_skipped;
static char test_skip_why[256];

static inline uint64_t test_seed(void)
{
    const char *s = getenv("STK_SEED");
    return s ? strtoull(s, NULL, 0) : 20261130u;
}

/* STK_BRIEF=1: another part of `./dev test` compares the numbers of all seeds; this one, built by
 * another compiler or for a sanitizer, needs every branch once more, not every seed. */
static inline int test_brief(void)
{
    const char *s = getenv("STK_BRIEF");
    return s && s[0] == '1';
}

/* Of n seeds: all, or a quarter in a brief part. */
static inline uint64_t test_share(uint64_t n) { return test_brief() ? (n + 3) / 4 : n; }

/* The running program, absolute: a line that replays something can be copied from any folder. */
static inline const char *test_program(void)
{
    static char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n > 0) path[n] = '\0';
    return n > 0 ? path : "THIS_TEST";
}

static inline void test_replay(uint64_t seed, const char *what)
{
    printf("# replay: STK_SEED=%" PRIu64 " %s %s\n", seed, test_program(), what);
}

/* Only the first failures of a test are printed, so that a loop does not flood. */
static inline void test_fail(const char *file, int line, const char *what)
{
    if (++test_failures <= 10)
        printf("# %s:%d: failed: %s (seed %" PRIu64 ")\n", file, line, what, test_seed());
    fflush(stdout);
}

#define TEST(name_)                                                                                \
    static void test_##name_(void);                                                                \
    static struct test_case test_case_##name_ = { #name_, test_##name_, NULL };                    \
    __attribute__((constructor)) static void test_register_##name_(void)                           \
    {                                                                                              \
        *test_last = &test_case_##name_;                                                           \
        test_last = &test_case_##name_.next;                                                       \
    }                                                                                              \
    static void test_##name_(void)

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) test_fail(__FILE__, __LINE__, #cond);                                         \
    } while (0)
#define REQUIRE(cond)                                                                              \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            test_fail(__FILE__, __LINE__, #cond);                                                  \
            return;                                                                                \
        }                                                                                          \
    } while (0)
/* The status must be STK_OK; prints the sentence if not, and leaves the test. */
#define CHECK_OK(expr, err)                                                                        \
    do {                                                                                           \
        stk_status check_status_ = (expr);                                                         \
        if (check_status_ != STK_OK) {                                                             \
            printf("# %s: %s\n", stk_status_name(check_status_), (err)->text);                     \
            test_fail(__FILE__, __LINE__, #expr);                                                  \
            return;                                                                                \
        }                                                                                          \
    } while (0)
#define SKIP(why)                                                                                  \
    do {                                                                                           \
        snprintf(test_skip_why, sizeof test_skip_why, "%s", why);                                  \
        test_skipped = 1;                                                                          \
        return;                                                                                    \
    } while (0)

static inline int test_run_all(int argc, char **argv)
{
    int n = 0, failed = 0, skipped = 0;
    for (struct test_case *c = test_first; c; c = c->next) {
        int wanted = argc < 2;
        for (int i = 1; i < argc; i++) wanted |= strstr(c->name, argv[i]) != NULL;
        if (!wanted) continue;
        test_failures = test_skipped = 0;
        c->fn();
        if (test_failures) test_replay(test_seed(), c->name);
        n++;
        failed += test_failures > 0;
        skipped += test_failures == 0 && test_skipped;
        printf("%s %d - %s%s%s\n", test_failures ? "not ok" : "ok", n, c->name,
               test_skipped && !test_failures ? " # SKIP " : "",
               test_skipped && !test_failures ? test_skip_why : "");
        fflush(stdout);
    }
    printf("1..%d\n# %d failed, %d skipped\n", n, failed, skipped);
    return failed ? 1 : 0;
}

#define TEST_MAIN()                                                                                \
    int main(int argc, char **argv) { return test_run_all(argc, argv); }

#endif
