/* tests/offload/far_world.h - arrays of more than 2^32 elements that need little memory: the pages
 * of a small file lie in a row, again and again.
 *
 * An array holds a pattern of FAR_PERIOD elements. Neither the pattern nor the file's size divides
 * 2^32 (or 2^31, 2^30): an index or an offset that lost its upper bits meets another element. A
 * step over n elements is a number of steps over each element of the file: far_expected. */
#ifndef TESTS_FAR_WORLD_H
#define TESTS_FAR_WORLD_H

#include "base/rng.h"
#include "tests/test.h"

#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

enum { FAR_PERIOD = 3072, FAR_OWN = 3 << 20, FAR_ARRAYS = 5 };
#define FAR_N ((1ull << 32) + 1000003)
#define FAR_TIMES ((FAR_N + FAR_OWN - 1) / FAR_OWN)

enum far_array { FAR_PARAM, FAR_LOW, FAR_EXP_AVG, FAR_EXP_AVG_SQ, FAR_GRAD };
static const uint64_t far_width[FAR_ARRAYS] = { 2, 2, 4, 4, 2 };

struct far_world {
    uint8_t *at[FAR_ARRAYS];
    uint8_t pattern[FAR_ARRAYS][FAR_PERIOD * 4];
};

static inline uint8_t *far_map(uint64_t own_bytes)
{
    const uint64_t large = 2 << 20;
    uint8_t *room = mmap(NULL, own_bytes * FAR_TIMES + large, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int fd = memfd_create("far", MFD_CLOEXEC);
    if (room == MAP_FAILED || fd < 0 || ftruncate(fd, (off_t)own_bytes) != 0) return NULL;
    room = (uint8_t *)(((uintptr_t)room + large - 1) & ~(uintptr_t)(large - 1));
    for (uint64_t k = 0; k < FAR_TIMES; k++) {
        void *p = mmap(room + k * own_bytes, own_bytes, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_FIXED, fd, 0);
        if (p == MAP_FAILED) return NULL;
        (void)madvise(p, own_bytes, MADV_HUGEPAGE); /* refused: slower */
    }
    close(fd);
    return room;
}

static inline void far_unmap(struct far_world *w)
{
    for (int a = 0; a < FAR_ARRAYS; a++)
        if (w->at[a]) munmap(w->at[a], far_width[a] * FAR_OWN * FAR_TIMES);
}

/* Parameters about 1, moments and gradients about 0.1. */
static inline bool far_open(struct far_world *w, uint64_t seed)
{
    struct rng r;
    rng_seed(&r, seed);
    memset(w, 0, sizeof *w);
    for (uint32_t i = 0; i < FAR_PERIOD; i++) {
        float m = (float)(0.1 * rng_normal(&r)), v = (float)(0.01 * rng_uniform(&r));
        uint16_t param = (uint16_t)(0x3f80 + (rng_next(&r) & 0x803f)),
                 low = (uint16_t)rng_next(&r),
                 grad = (uint16_t)(0x3d80 + (rng_next(&r) & 0x80ff));
        memcpy(w->pattern[FAR_PARAM] + 2 * i, &param, 2);
        memcpy(w->pattern[FAR_LOW] + 2 * i, &low, 2);
        memcpy(w->pattern[FAR_EXP_AVG] + 4 * i, &m, 4);
        memcpy(w->pattern[FAR_EXP_AVG_SQ] + 4 * i, &v, 4);
        memcpy(w->pattern[FAR_GRAD] + 2 * i, &grad, 2);
    }
    for (int a = 0; a < FAR_ARRAYS; a++) {
        uint64_t bytes = far_width[a] * FAR_PERIOD;
        w->at[a] = far_map(far_width[a] * FAR_OWN);
        if (!w->at[a]) return false;
        for (uint64_t k = 0; k < FAR_OWN / FAR_PERIOD; k++)
            memcpy(w->at[a] + k * bytes, w->pattern[a], bytes);
        /* one large page instead of 512 faults for each of its places; refused: slower */
        (void)madvise(w->at[a], far_width[a] * FAR_OWN, MADV_COLLAPSE);
    }
    return true;
}

/* As at the beginning, for another run. */
static inline void far_refill(struct far_world *w)
{
    for (int a = 0; a < FAR_ARRAYS; a++)
        for (uint64_t k = 0, bytes = far_width[a] * FAR_PERIOD; k < FAR_OWN / FAR_PERIOD; k++)
            memcpy(w->at[a] + k * bytes, w->pattern[a], bytes);
}

/* Compares every element of the files with what `step(arg, arrays, n, times)` makes of the pattern:
 * the first FAR_N % FAR_OWN elements of a file have been met once more than the others. */
static inline uint64_t far_differences(const struct far_world *w,
                                       void (*step)(void *arg, uint8_t *const *arrays, uint64_t n,
                                                    uint64_t times),
                                       void *arg)
{
    static uint8_t more[FAR_ARRAYS][FAR_PERIOD * 4], fewer[FAR_ARRAYS][FAR_PERIOD * 4];
    uint8_t *a_more[FAR_ARRAYS], *a_fewer[FAR_ARRAYS];
    uint64_t rest = FAR_N % FAR_OWN, differ = 0;
    memcpy(more, w->pattern, sizeof more);
    memcpy(fewer, w->pattern, sizeof fewer);
    for (int a = 0; a < FAR_ARRAYS; a++) a_more[a] = more[a], a_fewer[a] = fewer[a];
    step(arg, a_more, FAR_PERIOD, FAR_TIMES);
    step(arg, a_fewer, FAR_PERIOD, FAR_TIMES - 1);
    for (int a = 0; a < FAR_ARRAYS; a++)
        for (uint64_t i = 0; i < FAR_OWN; i++) {
            uint64_t b = far_width[a], at = i % FAR_PERIOD * b;
            differ += memcmp(w->at[a] + i * b, (i < rest ? more[a] : fewer[a]) + at, b) != 0;
        }
    return differ;
}

#endif
