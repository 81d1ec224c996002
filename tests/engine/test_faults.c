/* tests/engine/test_faults.c - the n-th call to the system fails, for every n: over opening,
 * filling, five steps, saving, closing. A status, no leak, no crash. */
#include "tests/engine/mlp.h"

static const struct { enum sys_call call; int os_errno; const char *name;
} kinds[] = {
    { SYS_ALLOC, ENOMEM, "allocations" },
    { SYS_MMAP, ENOMEM, "mappings" },
    { SYS_OPEN, EMFILE, "opens" },
    { SYS_THREAD, EAGAIN, "threads" },
    { SYS_ALLOCATE, ENOSPC, "preallocations" },
    { SYS_READ, EIO, "reads" },
    { SYS_WRITE, EIO, "writes" },
    { SYS_FSYNC, EIO, "flushes" },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static stk_status toy_run(const char **text)
{
    static char kept[640];
    struct toy t;
    toy_init(&t, 1, 1);
    t.rows = 2;
    t.cfg.poison = false;
    t.cfg.activations = STK_ACT_NVME;
    stk_status st = world_start(&t, WORLD_NVME);
    if (st == STK_OK) st = world_steps(&t, 5, 1e-3);
    if (st == STK_OK) st = stk_save(t.e, world_dir("faults-save"), NULL, 1);
    snprintf(kept, sizeof kept, "%s",
             t.e ? stk_error_text(t.e) : "no memory for the engine itself");
    *text = kept;
    stk_close(t.e);
    return st;
}

static stk_status own_run(const char **text)
{
    static char kept[640];
    struct mlp m;
    mlp_init(&m, WORLD_NVME);
    m.cfg.poison = false;
    stk_status st = mlp_open(&m);
    for (int i = 0; st == STK_OK && i < 3; i++) st = mlp_step(&m, NULL);
    snprintf(kept, sizeof kept, "%s",
             m.e ? stk_error_text(m.e) : "no memory for the engine itself");
    *text = kept;
    stk_close(m.e);
    return st;
}

static stk_status sim_run(const char **text)
{
    static char kept[640];
    struct toy t;
    toy_init(&t, 1, 1);
    t.rows = 2;
    t.cfg.poison = false;
    world_place(&t, WORLD_NVME);
    t.cfg.simulate = true;
    t.cfg.device = STK_DEVICE_SIM;
    stk_status st = toy_open(&t);
    if (st == STK_OK) st = toy_fill(&t);
    if (st == STK_OK) st = world_steps(&t, 3, 1e-3);
    snprintf(kept, sizeof kept, "%s",
             t.e ? stk_error_text(t.e) : "no memory for the engine itself");
    *text = kept;
    stk_close(t.e);
    return st;
}

/* `times`: 1 only the n-th, UINT64_MAX: from the n-th on. A sample that thins out, other points
 * with each STK_SEED, so that the suite stays short (STK_SOAK=1: every one to 1,000). */
static void every_n(stk_status (*run)(const char **), int kind, uint64_t times)
{
    const char *text;
    uint64_t points = 0, survived = 0;
    CHECK(run(&text) == STK_OK); /* warm: libraries keep what they took once */
    uint64_t before = sys_alloc_bytes();
    bool soak = getenv("STK_SOAK") != NULL;
    struct rng r;
    rng_seed_stream(&r, test_seed(), (uint64_t)kind);
    for (uint64_t n = 1;; n += soak ? 1 + n / 1000 : 1 + rng_below(&r, 1 + n)) {
        sys_fault_arm(kinds[kind].call, n, times, kinds[kind].os_errno);
        stk_status st = run(&text);
        bool hit = sys_fault_seen(kinds[kind].call) >= n;
        sys_fault_arm(kinds[kind].call, 0, 0, 0);
        bool ok = st == STK_OK || (st < 0 && text[0]);
        if (!ok || sys_alloc_bytes() != before)
            printf("# %s, n = %" PRIu64 ", times %s: %s: %s; %" PRId64 " bytes more than before\n",
                   kinds[kind].name, n, times == 1 ? "1" : "all", stk_status_name(st), text,
                   (int64_t)(sys_alloc_bytes() - before));
        CHECK(ok);
        CHECK(sys_alloc_bytes() == before);
        before = sys_alloc_bytes();
        if (!hit) {
            CHECK(st == STK_OK);
            break;
        }
        points++;
        survived += st == STK_OK;
    }
    printf("# %s: %" PRIu64 " points, %" PRIu64 " of them did not matter\n", kinds[kind].name,
           points, survived);
}

TEST(fault_the_nth_allocation) { every_n(toy_run, 0, 1); }
TEST(fault_all_allocations_from_the_nth) { every_n(toy_run, 0, UINT64_MAX); }
TEST(fault_the_nth_mapping_open_thread_preallocation)
{
    for (int k = 1; k < 5; k++) every_n(toy_run, k, 1);
}
TEST(fault_reads_writes_flushes)
{
    for (int k = 5; k < KINDS; k++) every_n(toy_run, k, 1);
    for (int k = 1; k < KINDS; k += getenv("STK_SOAK") ? 1 : 3) every_n(toy_run, k, UINT64_MAX);
}
TEST(fault_own_order)
{
    every_n(own_run, 0, 1);
    every_n(own_run, 1, 1);
}
TEST(fault_under_simulation)
{
    every_n(sim_run, 0, 1);
    every_n(sim_run, 4, 1);
}
/* nothing is left in the folders of the store, whatever failed */
TEST(fault_leaves_no_files)
{
    CHECK(rmdir(world_dir("nvme")) == 0);
    CHECK(rmdir(world_dir("own")) == 0);
}

TEST_MAIN()
