/* tests/engine/test_refusals.c - what is refused: budgets, disks and folders before anything is
 * written, and every call in the wrong state.
 *
 * `test_refusals --nobody DIR` is this file's own child: it gives up root and seals with DIR as the
 * folder. */
#include "nvme/io_sim.h"
#include "tests/engine/mlp.h"
#include <dirent.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <time.h>

static const char *self;

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static uint32_t entries(const char *dir)
{
    uint32_t n = 0;
    DIR *d = opendir(dir);
    if (!d) return UINT32_MAX;
    for (struct dirent *e; (e = readdir(d));)
        n += strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
    closedir(d);
    return n;
}

/* Seals; the refusal must hold the words, come within two seconds, and leave the folder as it was.
 * Closes. */
static void refused(struct toy *t, stk_status want, const char *a, const char *b, const char *c)
{
    const char *folder = t->cfg.nvme[0];
    uint32_t had = folder ? entries(folder) : 0;
    double t0 = now_s();
    stk_status st = toy_open(t);
    double took = now_s() - t0;
    CHECK(REFUSED(st, want, t->e, a, b, c));
    printf("# %.2f s: %s\n", took, t->e ? stk_error_text(t->e) : "?");
    CHECK(took < 2);
    CHECK(!folder || entries(folder) == had);
    stk_close(t->e);
}

TEST(mem_02_device_budget_below_one_blocks_working_set)
{
    struct toy t;
    toy_init(&t, 3, 2);
    world_place(&t, WORLD_NVME);
    t.cfg.device_memory = 1u << 20;
    refused(&t, STK_ERR_NOMEM, "--device-memory", "MiB", "--");
}

/* One block whose accumulator is the largest thing on the device. */
static void refuse_accumulator(stk_accumulate order, const char *advice, const char *no_advice)
{
    stk_config c;
    stk_engine *e;
    stk_tensor_desc d = { .name = "w", .n_elems = 1u << 20 };
    uint32_t block, tensor;
    stk_config_init(&c, sizeof c);
    c.device = STK_DEVICE_HOST_DISCRETE;
    c.device_memory = 1u << 20;
    c.accumulate = order;
    c.micro_batches = 2;
    c.prefetch = 0;
    stk_status st = stk_open(&c, &e);
    if (st == STK_OK) st = stk_block(e, "b", &d, 1, &block, &tensor);
    stk_place place = { .block = 0, .fused = true };
    if (st == STK_OK) st = stk_order(e, &place, 1);
    if (st == STK_OK) st = stk_seal(e, false);
    CHECK(REFUSED(st, STK_ERR_NOMEM, e, "gradient accumulators", "--device-memory", advice));
    CHECK(!strstr(stk_error_text(e), no_advice));
    stk_close(e);
}

/* An option that is in force already is no advice. */
TEST(mem_02_refusal_names_only_what_would_help)
{
    refuse_accumulator(STK_ACCUMULATE_LAYER, "MiB", "--accumulate layer");
    refuse_accumulator(STK_ACCUMULATE_MICRO, "--accumulate layer", "--prefetch 0");
}

TEST(mem_02_host_budget_below_what_is_needed)
{
    struct toy t;
    toy_init(&t, 3, 2);
    world_place(&t, WORLD_HOST);
    t.cfg.host_memory = 4u << 20;
    refused(&t, STK_ERR_NOMEM, "--host-memory", "MiB", "try --");
}

/* MEM-04: a staging pool that is too large is refused with its owner and the option that shrinks
 * it. */
TEST(mem_04_a_reservation_beyond_the_budget_names_its_owner)
{
    struct toy t;
    toy_init(&t, 1, 1);
    world_place(&t, WORLD_HOST);
    t.cfg.host_memory = 256u << 20;
    stk_status st = stk_open(&t.cfg, &t.e);
    if (st == STK_OK) st = toy_describe(&t);
    uint32_t h;
    if (st == STK_OK) st = stk_reserve(t.e, STK_ON_HOST, "a staging pool", 8ull << 30, &h);
    RUN(&t, st);
    double t0 = now_s();
    st = stk_seal(t.e, false);
    CHECK(REFUSED(st, STK_ERR_NOMEM, t.e, "a staging pool", "8.00 GiB", "--host-memory"));
    CHECK(now_s() - t0 < 2);
    stk_close(t.e);
}

TEST(refused_folder_missing)
{
    struct toy t;
    toy_init(&t, 1, 1);
    world_place(&t, WORLD_NVME);
    t.cfg.nvme[0] = "/nowhere/at/all";
    stk_status st = toy_open(&t);
    CHECK(REFUSED(st, STK_ERR_IO, t.e, "/nowhere/at/all", "--nvme", "make the folder"));
    stk_close(t.e);
    toy_init(&t, 1, 1);
    t.cfg.params = STK_TIER_NVME;
    st = toy_open(&t);
    CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, "--nvme DIR"));
    stk_close(t.e);
}

static int as_nobody(const char *dir)
{
    struct toy t;
    if (getuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) return 77;
    if (access(dir, F_OK) != 0) return 77; /* TMPDIR is closed to others */
    toy_init(&t, 1, 1);
    t.cfg.params = STK_TIER_NVME;
    t.cfg.nvme[0] = dir;
    stk_status st = toy_open(&t);
    bool ok = st == STK_ERR_IO && strstr(stk_error_text(t.e), dir) &&
              strstr(stk_error_text(t.e), "writable");
    if (!ok) printf("# %s: %s\n", stk_status_name(st), t.e ? stk_error_text(t.e) : "?");
    stk_close(t.e);
    return ok ? 0 : 1;
}

TEST(refused_folder_not_writable)
{
    const char *dir = world_dir("locked");
    CHECK(chmod(world_path, 0755) == 0 && chmod(dir, 0555) == 0);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        execl(self, self, "--nobody", dir, (char *)NULL);
        _exit(126);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    CHECK(chmod(dir, 0755) == 0 && entries(dir) == 0);
    if (WIFEXITED(status) && (WEXITSTATUS(status) == 77 || WEXITSTATUS(status) == 126))
        SKIP("this user can neither become nobody nor run the test as it");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* A file system of its own where root may mount one. Returns false where not. */
static bool small_disk(const char *dir, const char *size)
{
    char option[32];
    snprintf(option, sizeof option, "size=%s", size);
    return mount("stoker-test", dir, "tmpfs", 0, option) == 0;
}

TEST(refused_disk_too_small)
{
    const char *dir = world_dir("small");
    if (!small_disk(dir, "256k")) SKIP("no right to mount a small file system");
    struct toy t;
    toy_init(&t, 3, 2);
    world_place(&t, WORLD_NVME);
    t.cfg.nvme[0] = dir;
    refused(&t, STK_ERR_NOSPACE, dir, "are needed", "--optimizer-state host");
    umount(dir);
}

/* CKP-37: room for the checkpoint is looked at before it is written; training goes on, what was
 * there stays. */
TEST(ckp_37_checkpoint_disk_too_small)
{
    const char *dir = world_dir("small-ckp");
    if (!small_disk(dir, "640k")) SKIP("no right to mount a small file system");
    struct toy t;
    toy_init(&t, 1, 1);
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 1, 1e-3));
    RUN(&t, stk_save(t.e, dir, NULL, 0));
    RUN(&t, world_steps(&t, 1, 1e-3));
    stk_status st = stk_save(t.e, dir, NULL, 0);
    CHECK(REFUSED(st, STK_ERR_NOSPACE, t.e, dir, "free", "--keep-checkpoints"));
    uint64_t step = 0;
    char *path = NULL;
    CHECK(stk_newest_checkpoint(dir, &path, &step) == STK_OK && step == 1);
    stk_free(path);
    RUN(&t, world_steps(&t, 1, 1e-3));
    stk_close(t.e);
    umount(dir);
}

TEST(refused_simulated_disk_too_small)
{
    struct toy t;
    struct io_sim_disk *disk = NULL;
    struct stk_error err = { 0 };
    CHECK_OK(io_sim_disk_new(100000, &disk, &err), &err);
    struct io_sim_cfg sim = { .disk = disk };
    toy_init(&t, 3, 2);
    world_place(&t, WORLD_NVME);
    t.cfg.storage = STK_STORAGE_SIM;
    t.cfg.sim_disk = &sim;
    t.cfg.simulate = true;
    t.cfg.nvme[0] = "disk";
    stk_status st = toy_open(&t);
    CHECK(REFUSED(st, STK_ERR_NOSPACE, t.e, "disk"));
    stk_close(t.e);
    io_sim_disk_free(disk);
}

TEST(use_01_values_out_of_range)
{
    struct toy t;
    for (int k = 0; k < 9; k++) {
        static const char *const words[] = { "micro_batches", "beta1",    "beta2",  "eps",   "clip",
                                             "chunk_elems",   "simulate", "params", "device" };
        toy_init(&t, 1, 1);
        if (k == 0) t.cfg.micro_batches = 0;
        if (k == 1) t.cfg.beta1 = 1;
        if (k == 2) t.cfg.beta2 = NAN;
        if (k == 3) t.cfg.eps = 0;
        if (k == 4) t.cfg.clip = NAN;
        if (k == 5) t.cfg.chunk_elems = 100;
        if (k == 6) t.cfg.device = STK_DEVICE_SIM;
        if (k == 7) t.cfg.params = (stk_tier)9;
        if (k == 8) t.cfg.device = (stk_device_kind)-1;
        stk_status st = stk_open(&t.cfg, &t.e);
        CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, words[k]));
        stk_step s = { 0 };
        CHECK(stk_step_begin(t.e, &s) == STK_ERR_STATE && stk_seal(t.e, false) == STK_ERR_STATE &&
              stk_flush(t.e) == STK_ERR_STATE);
        stk_close(t.e);
    }
    stk_close(NULL);
}

/* --- every call in every wrong state ---------------------------------------------------------- */

/* One bit a call that is allowed; the others must give STATE and a sentence that names the call. */
enum {
    M_BLOCK = 1,
    M_ORDER = 2,
    M_WORKSPACE = 4,
    M_RESERVE = 8,
    M_SEAL = 16,
    M_WRITE = 32,
    M_READ = 64,
    M_BEGIN = 128,
    M_NEXT = 256,
    M_DONE = 512,
    M_END = 1024,
    M_FLUSH = 2048,
    M_EVAL = 4096,
    M_EVAL_END = 8192,
    M_SAVE = 16384,
    M_RESTORE = 32768,
    M_ACQUIRE = 65536,
    M_RELEASE = 131072,
    M_GRAD = 262144,
    M_PLAN = 524288
};

static stk_status misuse(stk_engine *e, uint32_t bit)
{
    static float v[4];
    stk_step s = { 0 };
    stk_visit visit = { 0 };
    uint32_t h;
    switch (bit) {
    case M_BLOCK: return stk_block(e, "late", NULL, 0, NULL, NULL);
    case M_ORDER: return stk_order(e, NULL, 0);
    case M_WORKSPACE: return stk_workspace(e, 1);
    case M_RESERVE: return stk_reserve(e, STK_ON_HOST, "late", 1, &h);
    case M_SEAL: return stk_seal(e, false);
    case M_WRITE: return stk_tensor_write(e, 0, 0, 4, v, STK_F32);
    case M_READ: return stk_tensor_read(e, 0, STK_READ_MASTER, 0, 4, v, STK_F32);
    case M_BEGIN: return stk_step_begin(e, &s);
    case M_NEXT: return stk_next(e, &visit);
    case M_DONE: return stk_done(e, &visit);
    case M_END: return stk_step_end(e, NULL);
    case M_FLUSH: return stk_flush(e);
    case M_EVAL: return stk_eval_begin(e);
    case M_EVAL_END: return stk_eval_end(e);
    case M_SAVE: return stk_save(e, world_dir("never"), NULL, 0);
    case M_RESTORE: return stk_restore(e, world_dir("never"), false, NULL);
    case M_ACQUIRE: return stk_acquire(e, 0, STK_FORWARD, 0, &visit);
    case M_RELEASE: return stk_release(e, &visit);
    case M_GRAD: return stk_grad_add(e, 0, 0, 4, v, STK_F32);
    default: return stk_plan_write(e, "/dev/null", false);
    }
}

static void all_but(const char *when, stk_engine *e, uint32_t allowed)
{
    static const char *const names[] = {
        "stk_block",        "stk_order",       "stk_workspace",  "stk_reserve",  "stk_seal",
        "stk_tensor_write", "stk_tensor_read", "stk_step_begin", "stk_next",     "stk_done",
        "stk_step_end",     "stk_flush",       "stk_eval_begin", "stk_eval_end", "stk_save",
        "stk_restore",      "stk_acquire",     "stk_release",    "stk_grad_add", "stk_plan_write"
    };
    for (uint32_t i = 0; i < 20; i++) {
        if (allowed & (1u << i)) continue;
        stk_status st = misuse(e, 1u << i);
        if (st == STK_ERR_STATE && strstr(stk_error_text(e), names[i])) continue;
        printf("# %s, %s: %s: %s\n", when, names[i], stk_status_name(st), stk_error_text(e));
        test_fail(__FILE__, __LINE__, "a call in the wrong state is refused by name");
    }
}

TEST(misuse_every_call_in_every_wrong_state)
{
    struct toy t;
    stk_visit v, stale;
    stk_step s = { 1e-3 };
    uint64_t want, got;
    toy_init(&t, 2, 1);
    RUN(&t, world_start(&t, WORLD_NVME));
    RUN(&t, world_steps(&t, 3, 1e-3));
    RUN(&t, toy_hash(&t, &want));
    stk_close(t.e);
    toy_init(&t, 2, 1);
    world_place(&t, WORLD_NVME);
    RUN(&t, stk_open(&t.cfg, &t.e));
    all_but("described", t.e, M_BLOCK | M_ORDER | M_WORKSPACE | M_RESERVE | M_SEAL);
    RUN(&t, toy_describe(&t));
    RUN(&t, stk_seal(t.e, false));
    uint32_t ready = M_WRITE | M_READ | M_BEGIN | M_FLUSH | M_EVAL | M_SAVE | M_RESTORE | M_PLAN;
    all_but("sealed", t.e, ready);
    RUN(&t, toy_fill(&t));
    for (int i = 0; i < 3; i++) {
        struct stk_error err = { 0 };
        t.step++;
        RUN(&t, stk_step_begin(t.e, &s));
        all_but("in a step", t.e, M_NEXT | M_PLAN);
        RUN(&t, toy_inputs(&t, t.step, &err));
        RUN(&t, stk_next(t.e, &v));
        stale = v;
        all_but("a visit is out", t.e, M_PLAN | M_DONE);
        RUN(&t, toy_visit(&t, &v, &err));
        RUN(&t, stk_done(t.e, &v));
        CHECK(stk_done(t.e, &stale) == STK_ERR_STATE); /* given back twice */
        while (stk_next(t.e, &v) == STK_OK) {
            RUN(&t, toy_visit(&t, &v, &err));
            RUN(&t, stk_done(t.e, &v));
        }
        CHECK(stk_next(t.e, &v) == STK_END);
        RUN(&t, stk_step_end(t.e, NULL));
        all_but("between steps", t.e, ready & ~(uint32_t)M_RESTORE);
        RUN(&t, stk_eval_begin(t.e));
        all_but("in an evaluation", t.e, M_NEXT | M_PLAN);
        while (stk_next(t.e, &v) == STK_OK) {
            RUN(&t, toy_visit(&t, &v, &err));
            RUN(&t, stk_done(t.e, &v));
        }
        RUN(&t, stk_eval_end(t.e));
    }
    RUN(&t, toy_hash(&t, &got));
    CHECK(want == got); /* nothing of all this broke anything */
    stk_close(t.e);
}

TEST(misuse_after_a_refused_seal_and_a_dry_one)
{
    for (int dry = 0; dry < 2; dry++) {
        struct toy t;
        const char *a, *b;
        uint64_t n;
        toy_init(&t, 2, 1);
        world_place(&t, WORLD_NVME);
        if (!dry) t.cfg.device_memory = 1u << 20;
        RUN(&t, stk_open(&t.cfg, &t.e));
        RUN(&t, toy_describe(&t));
        CHECK((stk_seal(t.e, dry) == STK_OK) == dry);
        all_but(dry ? "dry" : "refused", t.e, M_PLAN);
        CHECK(!dry ||
              (stk_table(t.e, 0, &a, &b, &n) && stk_plan_write(t.e, "/dev/null", true) == STK_OK));
        stk_close(t.e);
    }
}

TEST(misuse_bad_arguments_between_steps)
{
    struct toy t;
    float v[8] = { 0 };
    toy_init(&t, 2, 1);
    RUN(&t, world_start(&t, WORLD_MIXED));
    stk_status st = stk_tensor_write(t.e, 99, 0, 1, v, STK_F32);
    CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, "tensor 99"));
    st = stk_tensor_read(t.e, t.tensor_b[0], STK_READ_MASTER, TOY_HIDDEN, 1, v, STK_F32);
    CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, "layer.0.b"));
    st = stk_tensor_read(t.e, t.tensor_b[0], STK_READ_MASTER, UINT64_MAX, 2, v, STK_F32);
    CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, "layer.0.b"));
    st = stk_tensor_read(t.e, 0, STK_READ_MASTER, 0, 1, v, STK_BF16);
    CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, "f32"));
    st = stk_tensor_read(t.e, 0, STK_READ_GRAD, 0, 1, v, STK_F32);
    CHECK(REFUSED(st, STK_ERR_STATE, t.e, "after a step"));
    stk_step s = { NAN };
    st = stk_step_begin(t.e, &s);
    CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, "lr"));
    s.lr = -1;
    st = stk_step_begin(t.e, &s);
    CHECK(REFUSED(st, STK_ERR_CONFIG, t.e, "lr"));
    st = stk_restore(t.e, world_dir("never"), false, NULL);
    CHECK(st < 0 && stk_error_text(t.e)[0]);
    stk_close(t.e);
    char *path = NULL;
    CHECK(stk_newest_checkpoint(world_dir("never"), &path, NULL) == STK_END &&
          stk_newest_checkpoint("/nowhere/at/all", &path, NULL) == STK_END);
}

/* Gradients of a step of an earlier process are not there after a restore: said, not made up. */
TEST(misuse_gradient_right_after_a_restore)
{
    struct toy t;
    char *path = NULL;
    float v[4];
    toy_init(&t, 1, 1);
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 2, 1e-3));
    RUN(&t, stk_save(t.e, world_dir("grad"), NULL, 0));
    stk_close(t.e);
    CHECK(stk_newest_checkpoint(world_dir("grad"), &path, NULL) == STK_OK);
    for (int p = 0; p < 2; p++) {
        toy_init(&t, 1, 1);
        world_place(&t, p);
        RUN(&t, toy_open(&t));
        RUN(&t, stk_restore(t.e, path, false, NULL));
        stk_status st = stk_tensor_read(t.e, 0, STK_READ_GRAD, 0, 4, v, STK_F32);
        CHECK(REFUSED(st, STK_ERR_STATE, t.e, "after a step"));
        st = stk_restore(t.e, path, false, NULL);
        CHECK(st == STK_ERR_STATE); /* twice */
        stk_close(t.e);
    }
    stk_free(path);
}

/* The application may leave at any point: everything in flight ends before memory goes. */
TEST(misuse_close_in_the_middle_of_a_step)
{
    uint64_t before = sys_alloc_bytes();
    for (int p = 0; p < WORLD_PLACE_N; p++)
        for (uint32_t at = 0; at < 14; at++)
            for (int sim = 0; sim < 2; sim++) {
                struct toy t;
                struct stk_error err = { 0 };
                stk_visit v;
                stk_step s = { 1e-3 };
                toy_init(&t, 3, 1);
                t.cfg.simulate = sim;
                t.cfg.prefetch = 3;
                t.cfg.poison = false;
                RUN(&t, world_start(&t, p));
                RUN(&t, world_steps(&t, 1, 1e-3));
                t.step++;
                RUN(&t, stk_step_begin(t.e, &s));
                RUN(&t, toy_inputs(&t, t.step, &err));
                for (uint32_t k = 0; k < at / 2; k++) {
                    RUN(&t, stk_next(t.e, &v));
                    RUN(&t, toy_visit(&t, &v, &err));
                    if (k + 1 < at / 2 || at % 2) RUN(&t, stk_done(t.e, &v));
                }
                stk_close(t.e);
                CHECK(sys_alloc_bytes() == before);
            }
    CHECK(entries(world_dir("nvme")) == 0);
}

TEST(misuse_close_in_the_middle_of_an_own_step)
{
    for (int p = 0; p < WORLD_PLACE_N; p++)
        for (uint32_t at = 0; at < 6; at++) {
            struct mlp m;
            stk_visit v;
            stk_step s = { 1e-3 };
            mlp_init(&m, p);
            m.cfg.own_held_max = 6;
            RUN(&m, mlp_open(&m));
            RUN(&m, mlp_step(&m, NULL));
            RUN(&m, mlp_step(&m, NULL));
            RUN(&m, stk_step_begin(m.e, &s));
            for (uint32_t k = 0; k < at && k < MLP_LAYERS; k++) {
                RUN(&m, stk_acquire(m.e, m.block[k], STK_FORWARD, 0, &v));
                if (k % 2) RUN(&m, stk_release(m.e, &v));
            }
            stk_close(m.e);
        }
    CHECK(entries(world_dir("own")) == 0);
}

int main(int argc, char **argv)
{
    self = argv[0][0] == '/' ? argv[0] : "/proc/self/exe";
    if (argc == 3 && !strcmp(argv[1], "--nobody")) return as_nobody(argv[2]);
    return test_run_all(argc, argv);
}
