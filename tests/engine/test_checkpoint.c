/* tests/engine/test_checkpoint.c - saving and resuming: other placements, kills, full disks,
 * damage.
 *
 * `test_checkpoint --die DIR US` is this file's own child: it trains, saves at step 2, then dies by
 * a timer US microseconds into the save of step 3. */
#include "tests/engine/world.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/time.h>
#include <sys/wait.h>

static const char *self;

static stk_status restore_newest(struct toy *t, const char *dir)
{
    char *path = NULL;
    uint64_t step = 0;
    stk_status st = stk_newest_checkpoint(dir, &path, &step);
    if (st == STK_OK) st = stk_restore(t->e, path, false, NULL);
    stk_free(path);
    t->step = step;
    return st;
}

static uint64_t newest_step(const char *dir)
{
    char *path = NULL;
    uint64_t step = 0;
    if (stk_newest_checkpoint(dir, &path, &step) != STK_OK) step = UINT64_MAX;
    stk_free(path);
    return step;
}

static void toy_new(struct toy *t, bool freeze)
{
    toy_init(t, 3, 2);
    t->freeze_first = freeze;
}

/* --- resuming --------------------------------------------------------------------------------- */

static void resume_elsewhere(enum world_place from, enum world_place to, bool freeze,
                             stk_dtype dtype)
{
    char sub[64];
    snprintf(sub, sizeof sub, "ckp-%d-%d-%d-%d", from, to, freeze, dtype);
    const char *dir = world_dir(sub);
    uint64_t want = 0, got = 1;
    struct toy t;
    toy_new(&t, freeze);
    t.cfg.dtype = dtype;
    RUN(&t, world_start(&t, from));
    RUN(&t, world_steps(&t, 3, 1e-3));
    RUN(&t, stk_save(t.e, dir, "{\"at\":3}", 0));
    RUN(&t, world_steps(&t, 5, 1e-3));
    RUN(&t, toy_hash(&t, &want));
    stk_close(t.e);
    struct toy u;
    toy_new(&u, freeze);
    u.cfg.dtype = dtype;
    world_place(&u, to);
    u.cfg.nvme[0] = world_dir("nvme-fresh");
    RUN(&u, toy_open(&u));
    RUN(&u, restore_newest(&u, dir));
    CHECK(u.step == 3);
    stk_step_stats s;
    RUN(&u, toy_step(&u, 1e-3, &s));
    CHECK(s.step == 4 && s.updates == 4);
    RUN(&u, world_steps(&u, 4, 1e-3));
    RUN(&u, toy_hash(&u, &got));
    stk_close(u.e);
    CHECK(want == got);
}

TEST(ckp_01_resume_on_every_other_placement)
{
    for (int from = 0; from < WORLD_PLACE_N; from++)
        for (int to = 0; to < WORLD_PLACE_N; to++)
            if (from != to || to == WORLD_NVME) resume_elsewhere(from, to, false, STK_BF16);
}
TEST(ckp_05_frozen_tensors_are_in_the_checkpoint)
{
    resume_elsewhere(WORLD_HOST, WORLD_NVME, true, STK_BF16);
    resume_elsewhere(WORLD_NVME, WORLD_HOST, true, STK_BF16);
}
TEST(ckp_01_fp16_with_its_loss_scale)
{
    resume_elsewhere(WORLD_HOST, WORLD_NVME, false, STK_FP16);
    resume_elsewhere(WORLD_NVME, WORLD_HOST, true, STK_FP16);
}

static bool same_file(const char *a, const char *b)
{
    FILE *f = fopen(a, "re"), *g = fopen(b, "re");
    int x = 0, y = 0;
    while (f && g && x == y && x != EOF) {
        x = fgetc(f);
        y = fgetc(g);
    }
    if (f) fclose(f);
    if (g) fclose(g);
    return f && g && x == y;
}

TEST(ckp_04_load_then_save_gives_the_same_bytes)
{
    for (int to = 0; to < WORLD_PLACE_N; to++) {
        const char *a = world_dir("same-a");
        char sub[32], f[900], g[900];
        snprintf(sub, sizeof sub, "same-b%d", to);
        const char *b = world_dir(sub);
        struct toy t;
        toy_new(&t, true);
        RUN(&t, world_start(&t, WORLD_NVME));
        RUN(&t, world_steps(&t, 3, 1e-3));
        RUN(&t, stk_save(t.e, a, NULL, 0));
        stk_close(t.e);
        struct toy u;
        toy_new(&u, true);
        world_place(&u, to);
        RUN(&u, toy_open(&u));
        RUN(&u, restore_newest(&u, a));
        RUN(&u, stk_save(u.e, b, NULL, 0));
        RUN(&u, world_steps(&u, 1, 1e-3)); /* CKP-02: load, save, step */
        stk_close(u.e);
        snprintf(f, sizeof f, "%s/step-00000003/state-00001.safetensors", a);
        snprintf(g, sizeof g, "%s/step-00000003/state-00001.safetensors", b);
        CHECK(same_file(f, g));
        snprintf(f, sizeof f, "%s/step-00000003/manifest.json", a);
        snprintf(g, sizeof g, "%s/step-00000003/manifest.json", b);
        CHECK(same_file(f, g));
    }
}

TEST(ckp_02_save_before_any_step_and_load_it)
{
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        char sub[32];
        snprintf(sub, sizeof sub, "zero-%d", p);
        const char *dir = world_dir(sub);
        uint64_t want, got;
        struct toy t, u;
        toy_new(&t, false);
        RUN(&t, world_start(&t, p));
        RUN(&t, stk_save(t.e, dir, NULL, 0));
        RUN(&t, world_steps(&t, 2, 1e-3));
        RUN(&t, toy_hash(&t, &want));
        stk_close(t.e);
        toy_new(&u, false);
        world_place(&u, WORLD_PLACE_N - 1 - p);
        RUN(&u, toy_open(&u));
        RUN(&u, restore_newest(&u, dir));
        RUN(&u, world_steps(&u, 2, 1e-3));
        RUN(&u, toy_hash(&u, &got));
        stk_close(u.e);
        CHECK(want == got);
    }
}

TEST(ckp_10_a_step_at_lr_zero_keeps_the_loaded_weights)
{
    const char *dir = world_dir("lr0");
    struct toy t, u;
    toy_new(&t, false);
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 2, 1e-3));
    RUN(&t, stk_save(t.e, dir, NULL, 0));
    for (int p = 0; p < WORLD_PLACE_N; p++) {
        toy_new(&u, false);
        world_place(&u, p);
        u.cfg.weight_decay = 0;
        RUN(&u, toy_open(&u));
        RUN(&u, restore_newest(&u, dir));
        RUN(&u, toy_step(&u, 0.0, NULL));
        for (uint32_t k = 0; k < t.n_tensors; k++) {
            float *a = world_read(&t, k, STK_READ_MASTER), *b = world_read(&u, k, STK_READ_MASTER);
            CHECK(a && b && !memcmp(a, b, toy_tensor_elems(&t, k) * sizeof *a));
            free(a);
            free(b);
        }
        stk_close(u.e);
    }
    stk_close(t.e);
}

/* Adam with constant lr: the first step after resuming uses t = 4. A counter that began again at 1
 * would correct by 1 / (1 - beta1) and move much further. */
TEST(ckp_11_adams_step_count_goes_on)
{
    const char *dir = world_dir("t4");
    struct toy t, u;
    toy_new(&t, false);
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 3, 1e-3));
    RUN(&t, stk_save(t.e, dir, NULL, 0));
    stk_close(t.e);
    toy_new(&u, false);
    u.cfg.clip = 0;
    u.cfg.weight_decay = 0;
    world_place(&u, WORLD_NVME);
    RUN(&u, toy_open(&u));
    RUN(&u, restore_newest(&u, dir));
    uint32_t k = u.tensor_w[1];
    float *p = world_read(&u, k, STK_READ_MASTER), *m = world_read(&u, k, STK_READ_EXP_AVG),
          *v = world_read(&u, k, STK_READ_EXP_AVG_SQ);
    RUN(&u, toy_step(&u, 1e-3, NULL));
    float *g = world_read(&u, k, STK_READ_GRAD), *q = world_read(&u, k, STK_READ_MASTER);
    double worst = 0;
    for (uint64_t i = 0; i < toy_tensor_elems(&u, k); i++) {
        double mm = 0.9 * m[i] + 0.1 * g[i], vv = 0.999 * v[i] + 0.001 * (double)g[i] * g[i];
        double want =
            p[i] - 1e-3 * (mm / (1 - pow(0.9, 4))) / (sqrt(vv / (1 - pow(0.999, 4))) + 1e-8);
        worst = fmax(worst, fabs(q[i] - want));
    }
    printf("# largest difference from the formula at t = 4: %.3g\n", worst);
    CHECK(worst < 2e-7);
    free(p); free(m); free(v); free(g); free(q);
    stk_close(u.e);
}

TEST(ckp_skips_and_the_loss_scale_are_kept)
{
    const char *dir = world_dir("scale");
    struct toy t, u;
    stk_step_stats s;
    toy_new(&t, false);
    t.cfg.dtype = STK_FP16;
    t.poison_loss_at = 2;
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 3, 1e-3));
    RUN(&t, stk_save(t.e, dir, NULL, 0));
    stk_close(t.e);
    toy_new(&u, false);
    u.cfg.dtype = STK_FP16;
    world_place(&u, WORLD_NVME);
    RUN(&u, toy_open(&u));
    RUN(&u, restore_newest(&u, dir));
    RUN(&u, toy_step(&u, 1e-3, &s));
    CHECK(s.step == 4 && s.updates == 3 && s.skipped_total == 1 && s.loss_scale == 32768.0);
    stk_close(u.e);
}

TEST(ckp_the_clients_json_comes_back)
{
    const char *dir = world_dir("json");
    struct toy t;
    char *json = NULL, *path = NULL;
    toy_new(&t, false);
    RUN(&t, world_start(&t, WORLD_HOST));
    CHECK(REFUSED(stk_save(t.e, dir, "{not json", 0), STK_ERR_CONFIG, t.e, "client_json"));
    CHECK(REFUSED(stk_save(t.e, dir, "[1]", 0), STK_ERR_CONFIG, t.e, "client_json"));
    RUN(&t, stk_save(t.e, dir, "{\"window\":17,\"text\":\"a\\u00e9\"}", 0));
    stk_close(t.e);
    toy_new(&t, false);
    world_place(&t, WORLD_HOST);
    RUN(&t, toy_open(&t));
    CHECK(stk_newest_checkpoint(dir, &path, NULL) == STK_OK);
    RUN(&t, stk_restore(t.e, path, false, &json));
    CHECK(json && strstr(json, "\"window\":17"));
    stk_free(json);
    stk_free(path);
    stk_close(t.e);
}

TEST(ckp_keep_leaves_the_newest)
{
    const char *dir = world_dir("keep");
    struct toy t;
    toy_new(&t, false);
    RUN(&t, world_start(&t, WORLD_HOST));
    for (int i = 0; i < 4; i++) {
        RUN(&t, world_steps(&t, 1, 1e-3));
        RUN(&t, stk_save(t.e, dir, NULL, 2));
    }
    stk_close(t.e);
    int n = 0;
    DIR *d = opendir(dir);
    REQUIRE(d != NULL);
    for (struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.';
    closedir(d);
    CHECK(n == 2 && newest_step(dir) == 4);
}

/* --- refusals --------------------------------------------------------------------------------- */

TEST(ckp_another_model_or_key_is_refused)
{
    const char *dir = world_dir("other");
    struct toy t;
    toy_new(&t, true);
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 1, 1e-3));
    RUN(&t, stk_save(t.e, dir, NULL, 0));
    stk_close(t.e);
    char *path = NULL;
    REQUIRE(stk_newest_checkpoint(dir, &path, NULL) == STK_OK);
    for (int k = 0; k < 6; k++) {
        bool any = k == 4 || k == 5;
        toy_init(&t, k == 0 ? 4 : 3, 2); /* 0: a layer more */
        t.freeze_first = k != 1;        /* 1: nothing frozen */
        t.tied = k == 2;                /* 2: no head of its own */
        /* 3: refused; 4: allowed */
        if (k == 3 || k == 4) t.cfg.client_numerics = "other arithmetic";
        if (k == 5) t.cfg.dtype = STK_FP16; /* 5: never */
        world_place(&t, WORLD_HOST);
        RUN(&t, toy_open(&t));
        stk_status st = stk_restore(t.e, path, any, NULL);
        if (k == 4) CHECK(st == STK_OK);
        else
            REFUSED(st, STK_ERR_CONFIG, t.e,
                    k == 3   ? "numerics key"
                    : k == 5 ? "bf16"
                             : "another model");
        stk_close(t.e);
    }
    stk_free(path);
}

/* --- kills and full disks --------------------------------------------------------------------- */

/* Whatever call fails during the save of step 3: the engine goes on, step 2 stays (or step 3 is
 * complete), and the next save works. */
TEST(ckp_16_every_write_that_fails_leaves_the_previous)
{
    const char *dir = world_dir("enospc");
    static const struct { enum sys_call call; int os_errno;
    } kinds[] = {
        { SYS_WRITE, ENOSPC }, { SYS_FSYNC, EIO },       { SYS_RENAME, EIO },
        { SYS_OPEN, ENOSPC },  { SYS_ALLOCATE, ENOSPC }, { SYS_ALLOC, ENOMEM },
    };
    struct toy t;
    toy_new(&t, false);
    t.layers = 1;
    RUN(&t, world_start(&t, WORLD_NVME));
    RUN(&t, world_steps(&t, 2, 1e-3));
    RUN(&t, stk_save(t.e, dir, NULL, 0));
    uint64_t points = 0;
    for (size_t c = 0; c < sizeof kinds / sizeof *kinds; c++)
        for (uint64_t k = 1;; k++) {
            RUN(&t, world_steps(&t, 1, 1e-3));
            sys_fault_arm(kinds[c].call, k, UINT64_MAX, kinds[c].os_errno);
            stk_status st = stk_save(t.e, dir, NULL, 0);
            bool hit = sys_fault_seen(kinds[c].call) >= k;
            sys_fault_arm(kinds[c].call, 0, 0, 0);
            if (!hit) {
                CHECK(st == STK_OK);
                break;
            }
            points++;
            CHECK(stk_error_text(t.e)[0] != 0);
            CHECK(st == STK_ERR_IO || st == STK_ERR_NOSPACE || st == STK_ERR_NOMEM);
            if (kinds[c].os_errno == ENOSPC && kinds[c].call == SYS_WRITE)
                CHECK(st == STK_ERR_NOSPACE);
            uint64_t at = newest_step(dir);
            if (at == UINT64_MAX)
                printf("# call %d, k %" PRIu64 ": %s\n", kinds[c].call, k, stk_error_text(t.e));
            CHECK(at != UINT64_MAX && at >= 2);
            if (k > 8) k += k / 4; /* thin out */
        }
    printf("# %" PRIu64 " points of failure\n", points);
    CHECK(points > 20);
    RUN(&t, stk_save(t.e, dir, NULL, 1));
    CHECK(newest_step(dir) == t.step);
    stk_close(t.e);
}

static int die_in_save(const char *dir, long us)
{
    struct toy t;
    toy_new(&t, false);
    if (world_start(&t, WORLD_NVME) != STK_OK || world_steps(&t, 2, 1e-3) != STK_OK) return 3;
    if (newest_step(dir) == UINT64_MAX && stk_save(t.e, dir, NULL, 0) != STK_OK) return 3;
    if (world_steps(&t, 1, 1e-3) != STK_OK) return 3;
    struct itimerval tv = { .it_value = { us / 1000000, us % 1000000 } };
    if (us > 0) setitimer(ITIMER_REAL, &tv, NULL); /* SIGALRM's default: the process ends there,
                                                    * nothing is cleaned up */
    stk_status st = stk_save(t.e, dir, NULL, 0);
    tv.it_value = (struct timeval){ 0 };
    setitimer(ITIMER_REAL, &tv, NULL);
    stk_close(t.e);
    return st == STK_OK ? 0 : 3;
}

static int run_child(const char *dir, long us)
{
    char arg[32];
    snprintf(arg, sizeof arg, "%ld", us);
    pid_t pid = fork();
    if (pid == 0) {
        setenv("TMPDIR", world_path, 1); /* what the killed one leaves lies in our folder */
        execl(self, self, "--die", dir, arg, (char *)NULL);
        _exit(127);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return status;
}

TEST(ckp_16_killed_in_the_save_the_previous_loads)
{
    const char *dir = world_dir("kill");
    int killed = 0;
    for (int i = 0; i < 6; i++) {
        int status = run_child(dir, 150 + 900 * i);
        killed += WIFSIGNALED(status);
        CHECK(WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
        uint64_t at = newest_step(dir);
        CHECK(at == 2 || at == 3);
        struct toy t;
        toy_new(&t, false);
        world_place(&t, WORLD_HOST);
        RUN(&t, toy_open(&t));
        RUN(&t, restore_newest(&t, dir));
        RUN(&t, world_steps(&t, 1, 1e-3));
        stk_close(t.e);
    }
    printf("# %d of 6 killed inside the save\n", killed);
    CHECK(killed > 0);
}

TEST(ckp_17_leftover_partial_folder_does_not_stop_the_next_save)
{
    const char *dir = world_dir("partial");
    world_dir("partial/.partial-step-00000001");
    world_dir("partial/.partial-step-00000001/junk");
    struct toy t;
    toy_new(&t, false);
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 1, 1e-3));
    RUN(&t, stk_save(t.e, dir, NULL, 0));
    CHECK(newest_step(dir) == 1);
    char left[900];
    snprintf(left, sizeof left, "%s/.partial-step-00000001", dir);
    CHECK(access(left, F_OK) != 0);
    stk_close(t.e);
}

TEST(ckp_37_a_full_disk_is_noticed_before_the_save)
{
    struct toy t;
    toy_new(&t, false);
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 1, 1e-3));
    stk_status st = stk_save(t.e, "/proc/stoker", NULL, 0); /* a folder that nobody can make */
    CHECK(st == STK_ERR_IO && strstr(stk_error_text(t.e), "/proc/stoker"));
    RUN(&t, world_steps(&t, 1, 1e-3));
    CHECK(stk_save_bytes(t.e) >
          12u * (2 * TOY_VOCAB * TOY_HIDDEN + 3 * (TOY_HIDDEN + 1) * TOY_HIDDEN));
    stk_close(t.e);
}

/* --- damage ----------------------------------------------------------------------------------- */

static int64_t file_size(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 ? s.st_size : -1;
}

/* With step 4 damaged: naming it is refused with a sentence, and the newest complete one is step
 * 2. */
static void damaged(const char *dir, bool by_name)
{
    char path[900];
    struct toy t;
    CHECK(newest_step(dir) == 2);
    if (!by_name) return;
    toy_new(&t, false);
    world_place(&t, WORLD_HOST);
    RUN(&t, toy_open(&t));
    snprintf(path, sizeof path, "%s/step-00000004", dir);
    stk_status st = stk_restore(t.e, path, false, NULL);
    CHECK(st == STK_ERR_CORRUPT || st == STK_ERR_FORMAT || st == STK_ERR_IO);
    CHECK(strstr(stk_error_text(t.e), "step-00000004") != NULL);
    stk_close(t.e);
}

TEST(ckp_cut_or_changed_at_every_twentieth_is_refused)
{
    const char *dir = world_dir("cut");
    static const char *const names[] = { "state-00001.safetensors", "manifest.json" };
    struct toy t;
    toy_new(&t, false);
    RUN(&t, world_start(&t, WORLD_HOST));
    RUN(&t, world_steps(&t, 2, 1e-3));
    RUN(&t, stk_save(t.e, dir, NULL, 0));
    RUN(&t, world_steps(&t, 2, 1e-3));
    RUN(&t, stk_save(t.e, dir, NULL, 0));
    for (int f = 0; f < 2; f++)
        for (int k = 0; k < 20; k++) {
            char path[900];
            snprintf(path, sizeof path, "%s/step-00000004/%s", dir, names[f]);
            int64_t size = file_size(path), at = size * k / 20;
            int fd = open(path, O_RDWR | O_CLOEXEC);
            REQUIRE(size > 0 && fd >= 0);
            unsigned char was, flipped;
            CHECK(pread(fd, &was, 1, at) == 1);
            flipped = was ^ 0x10;
            CHECK(pwrite(fd, &flipped, 1, at) == 1);
            damaged(dir, k % 4 == f);
            CHECK(pwrite(fd, &was, 1, at) == 1);
            char *rest = malloc((size_t)(size - at));
            CHECK(rest && pread(fd, rest, (size_t)(size - at), at) == size - at);
            CHECK(ftruncate(fd, at) == 0);
            damaged(dir, k % 4 == f);
            CHECK(pwrite(fd, rest, (size_t)(size - at), at) == size - at);
            free(rest);
            close(fd);
        }
    CHECK(newest_step(dir) == 4); /* mended again: the test itself is right */
    stk_close(t.e);
}

int main(int argc, char **argv)
{
    self = argv[0][0] == '/' ? argv[0] : "/proc/self/exe";
    if (argc == 4 && !strcmp(argv[1], "--die")) return die_in_save(argv[2], atol(argv[3]));
    return test_run_all(argc, argv);
}
