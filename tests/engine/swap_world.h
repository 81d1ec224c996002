/* tests/engine/swap_world.h - a stk_store over each backend, and items whose bytes say whose they
 * are. */
#ifndef TESTS_ENGINE_SWAP_WORLD_H
#define TESTS_ENGINE_SWAP_WORLD_H

#include "tests/test.h"
#include "base/rng.h"
#include "base/sys.h"
#include "engine/stoker.h"
#include "nvme/io_sim.h"

#include <dirent.h>
#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

struct swap_kind { const char *name; stk_storage storage; bool simulate; };
static const struct swap_kind swap_kinds[] = {
    { "sim, simulation", STK_STORAGE_SIM, true },
    { "sim, threads", STK_STORAGE_SIM, false },
    { "posix, simulation", STK_STORAGE_POSIX, true },
    { "posix, threads", STK_STORAGE_POSIX, false },
    { "auto, simulation", STK_STORAGE_AUTO, true },
    { "auto, threads", STK_STORAGE_AUTO, false },
};
#define N_KINDS (sizeof swap_kinds / sizeof *swap_kinds)
#define FOR_KINDS(k) \
    for (const struct swap_kind *k = swap_kinds; k < swap_kinds + N_KINDS; k++)

struct swap_world {
    stk_store_config c;
    stk_store *s;
    struct io_sim_disk *disk;
    struct io_sim_cfg sim;
    uint8_t *work;          /* a page, room for the largest item, a page */
    uint64_t *gen;          /* of each item, for random_use */
    char dir[256];
};

static inline void swap_world_init(struct swap_world *w, const struct swap_kind *k,
                                   const uint64_t *item_bytes, uint32_t n_items)
{
    memset(w, 0, sizeof *w);
    stk_store_config_init(&w->c, sizeof w->c);
    uint64_t largest = 0;
    for (uint32_t i = 0; i < n_items; i++)
        if (item_bytes[i] > largest) largest = item_bytes[i];
    w->work = aligned_alloc(4096, (largest + 3 * 4096) / 4096 * 4096 + 4096);
    w->gen = calloc(n_items, sizeof *w->gen);
    w->c.item_bytes = item_bytes;
    w->c.n_items = n_items;
    w->c.storage = k->storage;
    w->c.simulate = k->simulate;
    w->c.seed = test_seed();
    if (k->storage == STK_STORAGE_SIM) {
        struct stk_error err = { 0 };
        if (io_sim_disk_new(1ull << 40, &w->disk, &err) != STK_OK) printf("# %s\n", err.text);
        w->sim = (struct io_sim_cfg){ .disk = w->disk, .seed = test_seed() };
        w->c.sim_disk = &w->sim;
        strcpy(w->dir, "/sim");
    } else {
        const char *base = getenv("TMPDIR");
        snprintf(w->dir, sizeof w->dir, "%s/stoker-swap-XXXXXX", base ? base : "/tmp");
        if (!mkdtemp(w->dir)) printf("# no folder %s\n", w->dir);
    }
    w->c.nvme[0] = w->dir;
}

static inline void swap_world_close(struct swap_world *w)
{
    stk_store_close(w->s, true);
    io_sim_disk_free(w->disk);
    if (!w->c.sim_disk) sys_remove_tree(w->dir);
    free(w->work);
    free(w->gen);
}

#define OPEN(w)                                                                \
    do {                                                                       \
        stk_status open_ = stk_store_open(&(w)->c, &(w)->s);                   \
        if (open_ != STK_OK)                                                   \
            printf("# open: %s: %s\n", stk_status_name(open_), stk_store_error((w)->s)); \
        REQUIRE(open_ == STK_OK);                                              \
    } while (0)
#define OK(w, call)                                                            \
    do {                                                                       \
        stk_status ok_ = (call);                                               \
        if (ok_ != STK_OK)                                                     \
            printf("# %s: %s\n", stk_status_name(ok_), stk_store_error((w)->s)); \
        REQUIRE(ok_ == STK_OK);                                                \
    } while (0)
#define PUT(w, item, gen)                                                      \
    do {                                                                       \
        content((w)->work, (w)->c.item_bytes[item], item, gen);                \
        OK(w, stk_store_put((w)->s, item, (w)->work));                         \
        memset((w)->work, 0xee, (w)->c.item_bytes[item]); /* ours again at once */ \
    } while (0)

static inline uint64_t content_next(uint64_t x)
{
    return x * 6364136223846793005u + 1442695040888963407u;
}

static inline void content(uint8_t *buf, uint64_t n, uint32_t item, uint64_t gen)
{
    uint64_t x = rng_hash64((uint64_t)item << 32 ^ gen);
    for (uint64_t i = 0; i < n; i += 8) {
        x = content_next(x);
        memcpy(buf + i, &x, n - i < 8 ? n - i : 8);
    }
}

static inline bool content_is(const uint8_t *buf, uint64_t n, uint32_t item, uint64_t gen)
{
    uint64_t x = rng_hash64((uint64_t)item << 32 ^ gen);
    for (uint64_t i = 0; i < n; i += 8) {
        x = content_next(x);
        if (memcmp(buf + i, &x, n - i < 8 ? n - i : 8) != 0) return false;
    }
    return true;
}

static inline bool folder_is_empty(const char *path)
{
    DIR *d = opendir(path);
    struct dirent *e;
    uint32_t n = 0;
    while (d && (e = readdir(d))) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return d && n == 0;
}

/* An error must name what it is about; errors of the store's last call. */
static inline void check_sentence(struct swap_world *w, stk_status st, const char *call)
{
    const char *text = stk_store_error(w->s);
    bool names = strstr(text, "item ") || strstr(text, call) || strstr(text, "extents-");
    if (st > STK_OK || !names) {
        printf("# %s: %s\n", stk_status_name(st), text);
        test_fail(__FILE__, __LINE__, "an error without a sentence");
    }
}

/* Puts, gets, prefetches and flushes in any order; every get is compared. Returns the errors seen;
 * ends when the store has FAILED. An item whose get fails is put anew. */
static inline uint32_t random_use(struct swap_world *w, uint32_t n_calls, uint64_t seed)
{
    struct rng r;
    rng_seed(&r, seed);
    uint32_t errors = 0, n = w->c.n_items;
    for (uint32_t k = 0; k < n_calls; k++) {
        uint32_t item = (uint32_t)rng_below(&r, n);
        uint64_t bytes = w->c.item_bytes[item], what = rng_below(&r, 100);
        uint8_t *at = w->work + (rng_below(&r, 2) ? 4096 : 4099);
        stk_status st = STK_OK;
        const char *call = "put";
        if (w->gen[item] == 0 || what < 35) {
            content(at, bytes, item, ++w->gen[item]);
            st = stk_store_put(w->s, item, at);
        } else if (what < 65) {
            call = "get";
            st = stk_store_get(w->s, item, at);
            if (st == STK_OK && !content_is(at, bytes, item, w->gen[item]))
                test_fail(__FILE__, __LINE__, "wrong bytes");
        } else if (what < 97) {
            call = "prefetch";
            st = stk_store_prefetch(w->s, item);
            if (st == STK_BUSY) st = STK_OK;
        } else {
            call = "flush";
            st = stk_store_flush(w->s);
        }
        if (st == STK_OK) continue;
        errors++;
        check_sentence(w, st, call);
        if (call[0] != 'g' || st == STK_ERR_STALLED) break;
        w->gen[item] = 0;
        if (strstr(stk_store_error(w->s), "close the store")) break;
    }
    return errors;
}

#endif
