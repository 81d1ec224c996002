/* tests/engine/test_abuse.c - what no manual recommends: engines side by side, files cut under a
 * run, drives that do not answer, budgets to the byte, thousands of blocks.
 *
 * The linker gives sys_write_some and sys_read_some to this file (meson.build: --wrap), so that a
 * transfer of the posix backend can be held up. */
#include "engine/engine.h"
#include "nvme/io_sim.h"
#include "tests/engine/mlp.h"
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <time.h>

static bool soak(void) { return getenv("STK_SOAK") != NULL; }

/* --- transfers that are held up --------------------------------------------------------------- */

static _Atomic int hold_after = -1, held; /* -1: nothing is held up; else: transfers that still
                                           * pass */

int64_t __real_sys_write_some(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int64_t __real_sys_read_some(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int64_t __wrap_sys_write_some(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int64_t __wrap_sys_read_some(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes);

static void hold(void)
{
    if (atomic_load(&hold_after) < 0) return;
    if (atomic_fetch_sub(&hold_after, 1) > 0) return;
    atomic_store(&hold_after, 0);
    atomic_fetch_add(&held, 1);
    /* longer than the engine's patience (stall_ns), and again while it closes */
    nanosleep(&(struct timespec){ 0, 700000000 }, NULL);
}

int64_t __wrap_sys_write_some(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes)
{
    hold();
    return __real_sys_write_some(fd, buf, size_bytes, offset_bytes);
}

int64_t __wrap_sys_read_some(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes)
{
    hold();
    return __real_sys_read_some(fd, buf, size_bytes, offset_bytes);
}

/* A drive that answers too late: the step ends STALLED and names what it waited for; the engine can
 * be closed although transfers are still on their way, and what comes late finds nothing that is
 * gone (under the address sanitizer). */
TEST(abuse_close_while_a_drive_does_not_answer)
{
    uint64_t before = sys_alloc_bytes();
    for (int after = 0; after < (soak() ? 60 : 6); after++) {
        struct toy t;
        toy_init(&t, 2, 1);
        t.rows = 2;
        t.cfg.poison = false;
        t.cfg.storage = STK_STORAGE_POSIX;
        t.cfg.stall_ns = 100000000;
        RUN(&t, world_start(&t, WORLD_NVME));
        RUN(&t, world_steps(&t, 1, 1e-3));
        atomic_store(&held, 0);
        atomic_store(&hold_after, after * 9);
        stk_status st = world_steps(&t, 2, 1e-3);
        CHECK(REFUSED(st, STK_ERR_STALLED, t.e, "chunk", "checkpoint"));
        CHECK(atomic_load(&held) > 0);
        stk_close(t.e);
        atomic_store(&hold_after, -1);
        CHECK(sys_alloc_bytes() == before);
    }
}

/* The same where completions never come: a simulated disk, real threads. */
TEST(abuse_close_after_completions_were_lost)
{
    uint64_t before = sys_alloc_bytes();
    uint32_t stalled = 0;
    for (uint64_t k = 0; k < 6; k++) {
        struct toy t;
        struct stk_error err = { 0 };
        struct io_sim_cfg sim = { .seed = test_seed() + k,
                                  .faults = { .lost_completion_ppm = 3000 } };
        REQUIRE(io_sim_disk_new(64u << 20, &sim.disk, &err) == STK_OK);
        toy_init(&t, 2, 1);
        t.rows = 2;
        world_place(&t, WORLD_NVME);
        t.cfg.storage = STK_STORAGE_SIM;
        t.cfg.sim_disk = &sim;
        t.cfg.stall_ns = 100000000;
        stk_status st = toy_open(&t);
        if (st == STK_OK) st = toy_fill(&t);
        if (st == STK_OK) st = world_steps(&t, 4, 1e-3);
        CHECK(st == STK_OK || st == STK_ERR_STALLED);
        stalled += st == STK_ERR_STALLED;
        stk_close(t.e);
        io_sim_disk_free(sim.disk);
        CHECK(sys_alloc_bytes() == before);
    }
    CHECK(stalled > 0);
}

/* --- the store's files under a running engine ------------------------------------------------- */

/* Path of the extents file in the store's only run folder. */
static bool extents_file(const char *dir, char *path, size_t size)
{
    DIR *d = opendir(dir);
    bool found = false;
    for (struct dirent *x = d ? readdir(d) : NULL; x && !found; x = readdir(d)) {
        if (x->d_name[0] == '.') continue;
        char sub[700];
        snprintf(sub, sizeof sub, "%s/%s", dir, x->d_name);
        DIR *s = opendir(sub);
        for (struct dirent *y = s ? readdir(s) : NULL; y && !found; y = readdir(s)) {
            struct stat info;
            snprintf(path, size, "%s/%s", sub, y->d_name);
            found = y->d_name[0] != '.' && stat(path, &info) == 0 && info.st_size > 65536;
        }
        if (s) closedir(s);
    }
    if (d) closedir(d);
    return found;
}

TEST(abuse_the_extents_file_is_cut_or_removed_under_a_run)
{
    static const stk_storage kinds[] = { STK_STORAGE_AUTO, STK_STORAGE_POSIX };
    uint64_t want = 0, got = 0;
    for (int k = 0; k < 2; k++)
        for (int cut = 0; cut < 3; cut++) { /* whole, unlinked, cut */
            struct toy t;
            char path[1500];
            toy_init(&t, 2, 1);
            t.rows = 2;
            t.cfg.storage = kinds[k];
            t.cfg.params = t.cfg.optimizer_state = t.cfg.grads = STK_TIER_NVME;
            t.cfg.nvme[0] = world_dir("cut");
            RUN(&t, toy_open(&t));
            RUN(&t, toy_fill(&t));
            RUN(&t, world_steps(&t, 2, 1e-3));
            REQUIRE(extents_file(t.cfg.nvme[0], path, sizeof path));
            if (cut == 1) CHECK(unlink(path) == 0);
            if (cut == 2) CHECK(truncate(path, 8192) == 0);
            stk_status st = world_steps(&t, 2, 1e-3);
            if (cut < 2) {
                RUN(&t, st);
                RUN(&t, toy_hash(&t, &got));
                if (!want) want = got;
                CHECK(got == want);
            } else {
                CHECK(st == STK_ERR_IO || st == STK_ERR_CORRUPT);
                CHECK(strstr(stk_error_text(t.e), "extent") != NULL);
                CHECK(stk_save(t.e, world_dir("cut-save"), NULL, 0) == STK_ERR_STATE);
            }
            stk_close(t.e);
        }
    CHECK(rmdir(world_dir("cut")) == 0);
}

/* NVM-22: a folder in memory has no direct I/O. */
TEST(abuse_nvm_22_a_folder_on_tmpfs)
{
    char shm[] = "/dev/shm/stoker-abuse-XXXXXX";
    uint64_t want = 0, got = 0;
    if (!mkdtemp(shm)) SKIP("no writable tmpfs");
    for (int k = 0; k < 2; k++) {
        struct toy t;
        toy_init(&t, 2, 1);
        t.rows = 2;
        t.cfg.params = t.cfg.optimizer_state = t.cfg.grads = STK_TIER_NVME;
        t.cfg.nvme[0] = k ? shm : world_dir("disk");
        RUN(&t, toy_open(&t));
        RUN(&t, toy_fill(&t));
        RUN(&t, world_steps(&t, 3, 1e-3));
        RUN(&t, toy_hash(&t, k ? &got : &want));
        stk_close(t.e);
    }
    CHECK(got == want);
    CHECK(rmdir(shm) == 0);
}

/* --- several engines, many steps -------------------------------------------------------------- */

/* liburing unmaps one engine's ring and maps the next one's at the same address; the thread sanitizer
 * does not see it happen in a library it ignores, and would call the two engines a race. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREAD_STORAGE STK_STORAGE_POSIX
#endif
#endif
#if !defined(THREAD_STORAGE)
#define THREAD_STORAGE STK_STORAGE_AUTO
#endif

struct thread_run {
    enum world_place place;
    bool own, simulate;
    uint64_t hash;
    stk_status status;
    char text[640];
};

static void *thread_main(void *arg)
{
    struct thread_run *r = arg;
    if (r->own) {
        struct mlp *m = calloc(1, sizeof *m);
        mlp_init(m, r->place);
        m->cfg.storage = THREAD_STORAGE;
        r->status = mlp_open(m);
        for (int i = 0; r->status == STK_OK && i < 6; i++) r->status = mlp_step(m, NULL);
        if (r->status == STK_OK) r->status = mlp_hash(m, &r->hash);
        snprintf(r->text, sizeof r->text, "%s", stk_error_text(m->e));
        stk_close(m->e);
        free(m);
        return NULL;
    }
    struct toy t;
    toy_init(&t, 3, 2);
    t.cfg.simulate = r->simulate;
    t.cfg.storage = THREAD_STORAGE;
    r->status = world_start(&t, r->place);
    if (r->status == STK_OK) r->status = world_steps(&t, 6, 1e-3);
    if (r->status == STK_OK) r->status = toy_hash(&t, &r->hash);
    snprintf(r->text, sizeof r->text, "%s", stk_error_text(t.e));
    stk_close(t.e);
    return NULL;
}

/* NVM-04: engines of one process share folders and nothing else. */
TEST(abuse_nvm_04_four_engines_in_four_threads)
{
    for (int round = 0; round < (soak() ? 100 : 2); round++) {
        struct thread_run r[5] = { { .place = WORLD_NVME },
                                   { .place = WORLD_NVME, .simulate = round % 2 },
                                   { .place = WORLD_MIXED },
                                   { .place = WORLD_NVME, .own = true },
                                   { .place = WORLD_HOST, .own = true } };
        pthread_t id[5];
        world_dir("nvme"); /* made once, before the threads ask for them */
        world_dir("own");
        for (int i = 0; i < 5; i++) REQUIRE(pthread_create(&id[i], NULL, thread_main, &r[i]) == 0);
        for (int i = 0; i < 5; i++) pthread_join(id[i], NULL);
        for (int i = 0; i < 5; i++) {
            if (r[i].status != STK_OK)
                printf("# engine %d: %s: %s\n", i, stk_status_name(r[i].status), r[i].text);
            CHECK(r[i].status == STK_OK);
        }
        CHECK(r[0].hash == r[1].hash && r[0].hash == r[2].hash && r[3].hash == r[4].hash);
    }
}

static uint32_t descriptors(void)
{
    DIR *d = opendir("/proc/self/fd");
    uint32_t n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* MEM-17: nothing grows: memory, descriptors, time of a step. */
TEST(abuse_mem_17_many_steps_hold_nothing)
{
    int steps = soak() ? 10000 : 400;
    struct toy t;
    toy_init(&t, 1, 1);
    t.rows = 1;
    t.cfg.poison = false;
    RUN(&t, world_start(&t, WORLD_NVME));
    RUN(&t, world_steps(&t, 20, 1e-4));
    uint64_t alive = sys_alloc_bytes(), resident = mem_resident_bytes(), first = 0, last = 0;
    uint32_t open = descriptors();
    for (int i = 0; i < steps; i++) {
        stk_step_stats s;
        RUN(&t, toy_step(&t, 1e-4, &s));
        if (i < steps / 4) first += s.step_ns;
        if (i >= steps - steps / 4) last += s.step_ns;
    }
    uint64_t now = mem_resident_bytes();
    printf("# %d steps: %" PRId64 " KiB more resident; first quarter %.3f s, last quarter %.3f s\n",
           steps, (int64_t)(now - resident) / 1024, (double)first * 1e-9, (double)last * 1e-9);
    CHECK(sys_alloc_bytes() == alive && descriptors() == open);
    /* a sanitizer keeps a history of its own */
    if (!getenv("TSAN_OPTIONS") && !getenv("ASAN_OPTIONS")) CHECK(now < resident + (1u << 20));
    stk_close(t.e);
}

/* --- sizes ------------------------------------------------------------------------------------ */

struct many { stk_config cfg; stk_engine *e; uint32_t n_blocks, tensor0; uint64_t elems; };

/* A chain of equal blocks whose gradient is a constant; no operations at all. */
static stk_status many_open(struct many *m)
{
    stk_place *p = calloc(m->n_blocks, sizeof *p);
    stk_status st = stk_open(&m->cfg, &m->e);
    for (uint32_t i = 0; st == STK_OK && i < m->n_blocks; i++) {
        char name[32];
        snprintf(name, sizeof name, "b%u", i);
        stk_tensor_desc d = { .name = name, .n_elems = m->elems };
        st = stk_block(m->e, name, &d, 1, &p[i].block, i ? NULL : &m->tensor0);
        p[i].in_bytes = p[i].full_bytes = 256;
    }
    if (st == STK_OK) st = stk_order(m->e, p, m->n_blocks);
    if (st == STK_OK) st = stk_seal(m->e, false);
    free(p);
    return st;
}

static stk_status many_step(struct many *m)
{
    stk_step s = { 1e-2 };
    stk_visit v;
    stk_status st;
    STK_TRY(stk_step_begin(m->e, &s));
    while ((st = stk_next(m->e, &v)) == STK_OK) {
        if (v.dir == STK_BACKWARD) {
            STK_TRY(dev_sync(v.stream, NULL));
            for (uint64_t i = 0; i < m->elems; i++)
                v.grad[i] += (float)(1 + v.block % 7 + i % 5) * (1.0f / 64);
        }
        STK_TRY(stk_done(m->e, &v));
    }
    return st == STK_END ? stk_step_end(m->e, NULL) : st;
}

static stk_status many_hash(struct many *m, uint64_t *h)
{
    float *v = calloc(m->elems, sizeof *v);
    stk_status st = STK_OK;
    *h = 1469598103934665603ull;
    for (uint32_t b = 0; st == STK_OK && b < m->n_blocks; b++) {
        st = stk_tensor_read(m->e, m->tensor0 + b, STK_READ_MASTER, 0, m->elems, v, STK_F32);
        for (uint64_t i = 0; i < m->elems; i++) *h = (*h ^ stk_f32_bits(v[i])) * 1099511628211ull;
    }
    free(v);
    return st;
}

static bool many_run(uint32_t blocks, uint64_t elems, bool nvme, void (*tune)(stk_config *),
                     uint64_t *hash)
{
    struct many m = { .n_blocks = blocks, .elems = elems };
    stk_config_init(&m.cfg, sizeof m.cfg);
    m.cfg.compute_threads = m.cfg.update_threads = 1;
    m.cfg.chunk_elems = 2048;
    m.cfg.nvme[0] = world_dir("many");
    m.cfg.params = m.cfg.optimizer_state = m.cfg.grads = nvme ? STK_TIER_NVME : STK_TIER_HOST;
    if (tune) tune(&m.cfg);
    stk_status st = many_open(&m);
    for (int i = 0; st == STK_OK && i < 2; i++) st = many_step(&m);
    if (st == STK_OK) st = many_hash(&m, hash);
    if (st != STK_OK)
        printf("# %u blocks of %" PRIu64 ": %s: %s\n", blocks, elems, stk_status_name(st),
               m.e ? stk_error_text(m.e) : "");
    stk_close(m.e);
    return st == STK_OK;
}

static void tune_wide(stk_config *c)
{
    c->prefetch = 64;
    c->update_threads = 7;
    c->update = STK_UPDATE_CHASE;
}

static void tune_micro(stk_config *c)
{
    tune_wide(c);
    c->micro_batches = 64;
    c->accumulate = STK_ACCUMULATE_MICRO;
}

static void tune_micro_layer(stk_config *c) { c->micro_batches = 64; }
static void tune_big_chunks(stk_config *c) { c->chunk_elems = 1u << 20; }

TEST(abuse_two_thousand_blocks_and_one_huge)
{
    uint64_t a = 0, b = 1, c = 2;
    CHECK(many_run(2000, 64, false, NULL, &a) && many_run(2000, 64, true, tune_wide, &b) && a == b);
    CHECK(many_run(1, 1500007, false, NULL, &a) && many_run(1, 1500007, true, tune_wide, &b) &&
          many_run(1, 1500007, true, tune_big_chunks, &c));
    CHECK(a == b && a == c);
    CHECK(many_run(1, 1, true, tune_wide, &a) && many_run(1, 1, false, NULL, &b) && a == b);
}

TEST(abuse_sixty_four_micro_batches_seven_update_threads)
{
    uint64_t a = 0, b = 1;
    CHECK(many_run(9, 5000, false, tune_micro_layer, &a) &&
          many_run(9, 5000, true, tune_micro, &b) && a == b);
}

/* --- budgets to the byte ---------------------------------------------------------------------- */

static stk_status sealed_with(uint64_t device_bytes, bool run, uint64_t *hash)
{
    struct toy t;
    toy_init(&t, 3, 2);
    world_place(&t, WORLD_NVME);
    t.cfg.device_memory = device_bytes;
    stk_status st = stk_open(&t.cfg, &t.e);
    if (st == STK_OK) st = toy_describe(&t);
    if (st == STK_OK) st = stk_seal(t.e, !run);
    if (run && st == STK_OK) st = toy_fill(&t);
    if (run && st == STK_OK) st = world_steps(&t, 3, 1e-3);
    if (run && st == STK_OK) st = toy_hash(&t, hash);
    if (run && st != STK_OK)
        printf("# %" PRIu64 " bytes: %s: %s\n", device_bytes, stk_status_name(st),
               stk_error_text(t.e));
    if (st == STK_ERR_NOMEM) CHECK(strstr(stk_error_text(t.e), "--device-memory") != NULL);
    stk_close(t.e);
    return st;
}

TEST(abuse_mem_02_the_least_device_budget_and_one_byte_below)
{
    uint64_t low = 1u << 20, high = 64u << 20, want = 0, got = 1;
    CHECK(sealed_with(high, true, &want) == STK_OK);
    while (high - low > 1) { /* low is refused, high is not */
        uint64_t mid = (low + high) / 2;
        if (sealed_with(mid, false, NULL) == STK_OK) high = mid;
        else low = mid;
    }
    printf("# the least is %" PRIu64 " bytes\n", high);
    CHECK(sealed_with(high, true, &got) == STK_OK && got == want);
    CHECK(sealed_with(high - 1, true, &got) == STK_ERR_NOMEM); /* in bytes: the difference shows */
}

TEST_MAIN()
