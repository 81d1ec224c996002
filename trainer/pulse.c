/* trainer/pulse.c - the heartbeat's thread. Owns: what is printed while nothing else can be. Must
 * not know: the engine. */
#include "trainer/pulse.h"
#include "base/mem.h"
#include "base/sys.h"

#include <stdio.h>
#include <time.h>

enum { BEAT_S = 10 };

struct pulse {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stop;
    const char *what, *unit; /* unit: NULL for bytes */
    uint64_t total_bytes, done_bytes, generation;
    struct timespec begin;
};

static const char *amount(const struct pulse *p, uint64_t n, char *buf, size_t size_bytes)
{
    if (!p->unit) return mem_size_format(n, buf);
    snprintf(buf, size_bytes, "%llu %s", (unsigned long long)n, p->unit);
    return buf;
}

/* With the lock held. */
static void print_beat(const struct pulse *p)
{
    struct timespec now;
    char done[64], total[64];
    clock_gettime(CLOCK_MONOTONIC, &now);
    double s = (double)(now.tv_sec - p->begin.tv_sec);
    if (p->total_bytes && p->done_bytes && s > 0) {
        double share = (double)p->done_bytes / (double)p->total_bytes;
        printf("... %s: %s of %s (%.0f %%), %.0f s, about %.0f s more\n", p->what,
               amount(p, p->done_bytes, done, sizeof done),
               amount(p, p->total_bytes, total, sizeof total), 100 * share, s, s / share - s);
    } else if (p->total_bytes) {
        printf("... %s: %s, %.0f s\n", p->what, amount(p, p->total_bytes, total, sizeof total), s);
    } else {
        printf("... %s: %.0f s\n", p->what, s);
    }
    fflush(stdout);
}

static void *pulse_run(void *arg)
{
    struct pulse *p = arg;
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        struct timespec until;
        uint64_t generation = p->generation;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += BEAT_S;
        int rc = 0;
        while (!p->stop && p->generation == generation && rc == 0)
            rc = pthread_cond_timedwait(&p->changed, &p->lock, &until);
        if (!p->stop && p->generation == generation && p->what) print_beat(p);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

struct pulse *pulse_open(void)
{
    struct pulse *p = sys_calloc(1, sizeof *p);
    if (!p) return NULL;
    pthread_condattr_t attr;
    pthread_mutex_init(&p->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&p->changed, &attr);
    pthread_condattr_destroy(&attr);
    if (sys_thread_start(&p->thread, pulse_run, p) == 0) return p;
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    sys_free(p);
    return NULL;
}

void pulse_close(struct pulse *p)
{
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_signal(&p->changed);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    sys_free(p);
}

void pulse_phase(struct pulse *p, const char *what, uint64_t total_bytes)
{
    pulse_count(p, what, total_bytes, NULL);
}

void pulse_count(struct pulse *p, const char *what, uint64_t total, const char *unit)
{
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->what = what;
    p->unit = unit;
    p->total_bytes = total;
    p->done_bytes = 0;
    p->generation++;
    clock_gettime(CLOCK_MONOTONIC, &p->begin);
    pthread_cond_signal(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

void pulse_done(struct pulse *p, uint64_t done_bytes)
{
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->done_bytes = done_bytes;
    pthread_mutex_unlock(&p->lock);
}
