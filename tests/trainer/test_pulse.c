/* tests/trainer/test_pulse.c - the heartbeat says phase, amount, rate and what is left (USE-07).
 *
 * Ten seconds are not waited for: the linker gives pthread_cond_timedwait to this file (meson.build:
 * --wrap), and time passes when the test says so. */
#include "tests/test.h"

#include "trainer/pulse.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

static _Atomic int beats;      /* so many waits end as if their time had passed */
static _Atomic long offset_s;  /* of the clock */
static _Atomic long asked_s;   /* how long the heartbeat wanted to wait */

int __real_clock_gettime(clockid_t id, struct timespec *t);
int __wrap_clock_gettime(clockid_t id, struct timespec *t);
int __wrap_clock_gettime(clockid_t id, struct timespec *t)
{
    int rc = __real_clock_gettime(id, t);
    t->tv_sec += atomic_load(&offset_s);
    return rc;
}

/* Without a beat that is due: a short wait, then a wake-up without a reason, as the system may have
 * them. */
int __real_pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *t);
int __wrap_pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *t);
int __wrap_pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *t)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    atomic_store(&asked_s, t->tv_sec - now.tv_sec);
    if (atomic_load(&beats) > 0) {
        atomic_fetch_add(&offset_s, 10);
        atomic_fetch_sub(&beats, 1);
        return ETIMEDOUT;
    }
    __real_clock_gettime(CLOCK_MONOTONIC, &now);
    now.tv_nsec += 1000000;
    now.tv_sec += now.tv_nsec / 1000000000;
    now.tv_nsec %= 1000000000;
    (void)__real_pthread_cond_timedwait(c, m, &now);
    return 0;
}

/* What is printed by a phase that lasts two beats. */
static void two_beats(const char *what, uint64_t total, uint64_t done, const char *unit, char *text,
                      size_t size)
{
    char path[] = "/tmp/stoker-pulse-XXXXXX";
    int file = mkstemp(path), out = dup(STDOUT_FILENO);
    STK_ASSERT(file >= 0 && out >= 0);
    fflush(stdout);
    dup2(file, STDOUT_FILENO);
    struct pulse *p = pulse_open();
    if (unit) pulse_count(p, what, total, unit);
    else pulse_phase(p, what, total);
    pulse_done(p, done);
    atomic_store(&beats, 2);
    while (atomic_load(&beats) > 0) sched_yield();
    pulse_phase(p, NULL, 0);
    pulse_close(p);
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    close(out);
    ssize_t n = pread(file, text, size - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    close(file);
    unlink(path);
}

TEST(pulse_use_07_heartbeat_with_phase_amount_and_time)
{
    char text[4096];
    two_beats("loading the model", 4ull << 30, 1ull << 30, NULL, text, sizeof text);
    CHECK(strstr(text, "... loading the model: 1.00 GiB of 4.00 GiB (25 %)") != NULL);
    CHECK(strstr(text, ", 10 s, about 30 s more") != NULL);
    CHECK(atomic_load(&asked_s) >= 8 && atomic_load(&asked_s) <= 10);
    two_beats("evaluating", 64, 16, "windows", text, sizeof text);
    CHECK(strstr(text, "... evaluating: 16 windows of 64 windows (25 %)") != NULL);
    two_beats("planning", 0, 0, NULL, text, sizeof text);
    CHECK(strstr(text, "... planning: 10 s") != NULL);
}

TEST(pulse_says_nothing_between_phases)
{
    char text[4096];
    two_beats(NULL, 0, 0, NULL, text, sizeof text);
    CHECK(text[0] == '\0');
}

TEST_MAIN()
