/* tests/base/test_mem.c - the memory table, sizes as text, and the machine's limits read from
 * captured trees. */
#include "base/cpu.h"
#include "base/mem.h"
#include "base/sys.h"
#include "tests/test.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TEST_THREAD_SANITIZER 1
#endif
#endif

#define MIB (1ull << 20)
#define GIB (1ull << 30)

/* --- the table -------------------------------------------------------------------------------- */

TEST(mem_rows_add_up_and_seal)
{
    struct mem *m = NULL;
    struct stk_error err = { 0 };
    uint64_t before = sys_alloc_bytes();
    CHECK_OK(mem_open(&m, &err), &err);
    CHECK_OK(mem_note(m, MEM_NVME, "optimizer state", "--optimizer-state host", 5 * GIB, &err),
             &err);
    CHECK_OK(mem_note(m, MEM_NVME, "optimizer state", NULL, GIB, &err), &err);
    CHECK_OK(mem_note(m, MEM_DEVICE, "optimizer state", "", 7, &err), &err);
    for (int i = 0; i < 100; i++) {
        char owner[32];
        snprintf(owner, sizeof owner, "owner %d", i);
        CHECK_OK(mem_note(m, MEM_HOST, owner, "", 1, &err), &err);
    }
    CHECK(mem_rows(m) == 102);
    CHECK(mem_row_at(m, 0)->size_bytes == 6 * GIB
          && strcmp(mem_row_at(m, 0)->option, "--optimizer-state host") == 0);
    CHECK(mem_total(m, MEM_NVME) == 6 * GIB && mem_total(m, MEM_DEVICE) == 7
          && mem_total(m, MEM_HOST) == 100);
    CHECK(strcmp(mem_tier_name(MEM_HOST), "host") == 0
          && strcmp(mem_tier_name(MEM_TIER_N), "?") == 0);
    CHECK(!mem_sealed(m));
    mem_seal(m);
    CHECK(mem_sealed(m));
    void *p = &p;
    CHECK(mem_note(m, MEM_HOST, "late", "", 1, &err) == STK_ERR_STATE);
    stk_error_clear(&err);
    CHECK(mem_reserve(m, "late", "", 1, &p, &err) == STK_ERR_STATE && p == NULL
          && strstr(err.text, "late"));
    mem_close(m);
    mem_close(NULL);
    CHECK(sys_alloc_bytes() == before);
}

TEST(mem_budget_refusal_names_owner_and_option)
{
    struct mem *m = NULL;
    struct stk_error err = { 0 };
    CHECK_OK(mem_open(&m, &err), &err);
    CHECK(mem_budget(m, MEM_HOST) == UINT64_MAX);
    mem_set_budget(m, MEM_HOST, 2 * GIB, "--host-memory");
    CHECK_OK(mem_note(m, MEM_HOST, "parameter cache", "--cache", 1935 * MIB, &err), &err);
    CHECK_OK(mem_check_budgets(m, &err), &err);
    CHECK_OK(mem_note(m, MEM_HOST, "optimizer state", "--optimizer-state nvme", 2365 * MIB, &err),
             &err);
    CHECK(mem_check_budgets(m, &err) == STK_ERR_NOMEM);
    CHECK(strcmp(err.text, "host memory: 4.20 GiB are needed, --host-memory allows 2.00 GiB; the "
                           "largest owner is optimizer "
                           "state with 2.31 GiB: try --optimizer-state nvme")
          == 0);
    stk_error_clear(&err);
    /* nothing shrinks the largest: the advice is about the next one that has an option */
    CHECK_OK(mem_note(m, MEM_HOST, "program and libraries", "", 3000 * MIB, &err), &err);
    CHECK(mem_check_budgets(m, &err) == STK_ERR_NOMEM
          && strstr(err.text, "the largest owner is program and libraries with 2.93 GiB; optimizer "
                              "state takes 2.31 GiB: try --optimizer-state nvme"));
    stk_error_clear(&err);
    mem_set_budget(m, MEM_HOST, UINT64_MAX, NULL);
    CHECK_OK(mem_note(m, MEM_NVME, "x", "", UINT64_MAX - 5, &err), &err);
    CHECK_OK(mem_note(m, MEM_NVME, "y", "", 10, &err), &err); /* the sum does not wrap */
    mem_set_budget(m, MEM_NVME, GIB, NULL);
    CHECK(mem_check_budgets(m, &err) == STK_ERR_NOMEM && strstr(err.text, "nvme memory")
          && strstr(err.text, "the budget"));
    mem_close(m);
}

/* MEM-05: what is asked for is what is used, to the page. */
TEST(mem_05_reserve_is_exact)
{
    struct mem *m = NULL;
    struct stk_error err = { 0 };
    CHECK_OK(mem_open(&m, &err), &err);
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE),
             sizes[] = { 1, page, page + 1, 129 * MIB + MIB / 2 }, asked = 0, rows = 0;
    uint64_t before = mem_resident_bytes();
    REQUIRE(before > 0 && mem_peak_bytes() >= before);
    for (int i = 0; i < 4; i++) {
        unsigned char *p = NULL;
        CHECK_OK(mem_reserve(m, "pieces", "", sizes[i], (void **)&p, &err), &err);
        CHECK((uintptr_t)p % page == 0 && p[0] == 0 && p[sizes[i] - 1] == 0);
        asked += sizes[i];
        rows += (sizes[i] + page - 1) / page * page;
        unsigned char there = 0;
        CHECK(mincore(p + (sizes[i] - 1) / page * page, page, &there) == 0
              && (there & 1)); /* touched */
    }
    CHECK(mem_total(m, MEM_HOST) == rows && rows <= asked + 4 * page);
    uint64_t grown = mem_resident_bytes() - before;
    mem_close(m);
#if !defined(__SANITIZE_THREAD__) \
    && !defined(TEST_THREAD_SANITIZER) /* its shadow of what is touched counts too */
    CHECK(grown + MIB >= asked
          && grown <= rows + MIB); /* the counters of /proc are up to some pages late per thread */
    CHECK(mem_resident_bytes() < before + MIB);
#else
    CHECK(grown + MIB >= asked);
#endif
}

static void see_place(void *arg, void *at, uint64_t size_bytes)
{
    uint64_t *seen = arg;
    unsigned char resident[4] = { 0 };
    seen[0] = (uint64_t)(uintptr_t)at;
    seen[1] = size_bytes;
    seen[2] += mincore(at, size_bytes, resident) == 0 && (resident[0] & 1);
}

/* Memory is told where to lie before its first page exists. */
TEST(mem_placed_before_it_is_touched)
{
    struct mem *m = NULL;
    struct stk_error err = { 0 };
    uint64_t seen[3] = { 0 }, page = (uint64_t)sysconf(_SC_PAGESIZE);
    unsigned char resident[4] = { 0 };
    void *p = NULL;
    CHECK_OK(mem_open(&m, &err), &err);
    CHECK_OK(mem_reserve_placed(m, "state", "", 4 * page, see_place, seen, &p, &err), &err);
    CHECK((uint64_t)(uintptr_t)p == seen[0] && seen[1] == 4 * page && seen[2] == 0);
    CHECK(mincore(p, 4 * page, resident) == 0 && (resident[0] & resident[3] & 1));
    CHECK(mem_total(m, MEM_HOST) == 4 * page);
    mem_close(m);
}

TEST(mem_reserve_failures_leave_nothing)
{
    static const enum sys_call calls[] = { SYS_ALLOC, SYS_MMAP };
    uint64_t before = sys_alloc_bytes();
    for (int c = 0; c < 2; c++)
        for (uint64_t k = 1; k < 6; k++) {
            struct mem *m = NULL;
            struct stk_error err = { 0 };
            void *p = NULL;
            sys_fault_arm(calls[c], k, 1, ENOMEM);
            stk_status s = mem_open(&m, &err);
            if (s == STK_OK) s = mem_reserve(m, "a", "--cache", 4096, &p, &err);
            bool hit = sys_fault_seen(calls[c]) >= k;
            sys_fault_arm(calls[c], 0, 0, 0);
            CHECK(s == (hit ? STK_ERR_NOMEM : STK_OK) && (p != NULL) == !hit);
            if (hit && m) CHECK(mem_rows(m) == 0 && mem_total(m, MEM_HOST) == 0);
            mem_close(m);
            CHECK(sys_alloc_bytes() == before);
        }
    struct mem *m = NULL;
    struct stk_error err = { 0 };
    void *p = NULL;
    CHECK_OK(mem_open(&m, &err), &err);
    CHECK(mem_reserve(m, "all", "--cache", UINT64_MAX - 3, &p, &err) == STK_ERR_NOMEM
          && strstr(err.text, "--cache"));
    mem_close(m);
}

/* --- sizes as text ---------------------------------------------------------------------------- */

TEST(mem_size_text)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        { "0", 0 },
        { "4096", 4096 },
        { "4096B", 4096 },
        { "24GiB", 24 * GIB },
        { "1.5GB", 1500000000 },
        { "512MiB", 512 * MIB },
        { "1.5 GiB", 3 * GIB / 2 },
        { "2G", 2 * GIB },
        { "7k", 7168 },
        { "0.1KB", 100 },
        { "3TiB", 3072 * GIB },
        { "18446744073709551615", UINT64_MAX },
        { "17179869183.99GiB", UINT64_MAX - GIB / 100 },
    };
    static const char *const bad[] = { "",
                                       "-1",
                                       "+1",
                                       "abc",
                                       "1.5",
                                       "1.GiB",
                                       ".5GiB",
                                       "1XiB",
                                       "1GiBs",
                                       "1GiB ",
                                       " 1",
                                       "1 G B",
                                       "18446744073709551616",
                                       "17179869184GiB",
                                       "99999999999PB",
                                       "0x10",
                                       "1e3",
                                       "nan" };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        uint64_t bytes = 1;
        CHECK(mem_size_parse(good[i].text, &bytes));
        if (bytes != good[i].bytes) printf("# %s: %" PRIu64 "\n", good[i].text, bytes);
        CHECK(bytes == good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t bytes = 77;
        if (mem_size_parse(bad[i], &bytes)) printf("# accepted: '%s'\n", bad[i]);
        CHECK(!mem_size_parse(bad[i], &bytes) && bytes == 77);
    }
    char buf[24];
    CHECK(strcmp(mem_size_format(0, buf), "0 B") == 0);
    CHECK(strcmp(mem_size_format(1023, buf), "1023 B") == 0);
    CHECK(strcmp(mem_size_format(1536, buf), "1.50 KiB") == 0);
    CHECK(strcmp(mem_size_format(3 * MIB, buf), "3.00 MiB") == 0);
    CHECK(strcmp(mem_size_format(342 * GIB / 100, buf), "3.42 GiB") == 0);
    CHECK(strcmp(mem_size_format(UINT64_MAX, buf), "17179869184.00 GiB") == 0);
}

/* --- captured machines ------------------------------------------------------------------------ */

static char tree[64];

static void tree_begin(void)
{
    snprintf(tree, sizeof tree, "/tmp/stoker-test-mem-XXXXXX");
    STK_ASSERT(mkdtemp(tree) != NULL);
}

static void put(const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s/%s", tree, path);
    char *slash = strrchr(full, '/');
    *slash = '\0';
    STK_ASSERT(sys_mkdirs(full) == 0);
    *slash = '/';
    int fd = sys_open(full, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    STK_ASSERT(fd >= 0 && sys_write_full(fd, text, strlen(text), 0) == (int64_t)strlen(text));
    sys_close(fd);
}

static void tree_end(void) { STK_ASSERT(sys_remove_tree(tree) == 0); }

static void put_meminfo(void)
{
    put("proc/meminfo",
        "MemTotal:       16777216 kB\nMemFree:          100000 kB\nMemAvailable:    8388608 kB\n");
}

TEST(mem_22_cgroup_v2_page_cache_is_not_use)
{
    struct mem_limits l;
    tree_begin();
    put_meminfo();
    put("proc/self/cgroup", "0::/user.slice/job.scope\n");
    put("sys/fs/cgroup/user.slice/job.scope/memory.max", "4294967296\n");
    put("sys/fs/cgroup/user.slice/job.scope/memory.high", "max\n");
    put("sys/fs/cgroup/user.slice/job.scope/memory.current", "4290772992\n"); /* 4092 MiB of 4096 */
    put("sys/fs/cgroup/user.slice/job.scope/memory.stat",
        "anon 104857600\nfile 4185915392\ninactive_anon 1\nactive_anon 2\ninactive_file "
        "3145728000\nactive_file 1040187392\n");
    put("sys/fs/cgroup/user.slice/memory.max", "max\n");
    put("sys/fs/cgroup/user.slice/memory.current", "1\n");
    mem_limits_read(tree, &l);
    CHECK(l.total_bytes == 16 * GIB && l.cgroup_limit_bytes == 4 * GIB);
    CHECK(l.available_bytes == 4294967296u - (4290772992u - 3145728000u - 1040187392u));
    CHECK(strstr(l.why, "memory.max of cgroup /sys/fs/cgroup/user.slice/job.scope") != NULL);

    /* the parent is tighter */
    put("sys/fs/cgroup/user.slice/memory.max", "2147483648\n");
    put("sys/fs/cgroup/user.slice/memory.current", "1073741824\n");
    mem_limits_read(tree, &l);
    CHECK(l.available_bytes == GIB && l.cgroup_limit_bytes == 2 * GIB
          && strstr(l.why, "/user.slice") != NULL);

    /* throttled long before the limit */
    put("sys/fs/cgroup/user.slice/job.scope/memory.high", "1073741824\n");
    mem_limits_read(tree, &l);
    CHECK(l.cgroup_limit_bytes == GIB && strstr(l.why, "memory.high") != NULL);
    CHECK(l.available_bytes == GIB - (4290772992u - 3145728000u - 1040187392u));
    tree_end();
}

TEST(mem_22_cgroup_v1_page_cache_is_not_use)
{
    struct mem_limits l;
    tree_begin();
    put_meminfo();
    put("proc/self/cgroup", "9:name=systemd:/\n4:memory:/a/b\n3:cpu,cpuacct:/\n0::/\n");
    put("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "3221225472\n");
    put("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "3221221376\n");
    put("sys/fs/cgroup/memory/a/b/memory.stat",
        "cache 5\ninactive_file 1\nactive_file 1\ntotal_inactive_file "
        "2147483648\ntotal_active_file 536870912\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n");
    mem_limits_read(tree, &l);
    CHECK(l.cgroup_limit_bytes == 3 * GIB);
    CHECK(l.available_bytes == 3 * GIB - (3221221376u - 2147483648u - 536870912u));
    CHECK(strstr(l.why, "memory.limit_in_bytes of cgroup /sys/fs/cgroup/memory/a/b") != NULL);
    tree_end();
}

/* In a container the path is the host's: its folders are not there, only the top of the mount,
 * which is the container's. */
TEST(mem_22_container_sees_only_the_top)
{
    struct mem_limits l;
    tree_begin();
    put_meminfo();
    put("proc/self/cgroup", "5:memory:/docker/0123\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "73741824\n");
    mem_limits_read(tree, &l);
    CHECK(l.available_bytes == 1000000000 && l.cgroup_limit_bytes == GIB);
    put("proc/self/cgroup", "0::/../../other\n");
    put("sys/fs/cgroup/memory.max", "536870912\n");
    put("sys/fs/cgroup/memory.current",
        "536870913\n"); /* over the limit: nothing is left, not 2^64 - 1 */
    mem_limits_read(tree, &l);
    CHECK(l.available_bytes == 0 && l.cgroup_limit_bytes == GIB / 2);
    tree_end();
}

TEST(mem_limits_without_cgroup_or_proc)
{
    struct mem_limits l;
    tree_begin();
    mem_limits_read(tree, &l);
    CHECK(l.available_bytes == UINT64_MAX && l.total_bytes == 0
          && l.cgroup_limit_bytes == UINT64_MAX && l.why[0]);
    put_meminfo();
    mem_limits_read(tree, &l);
    CHECK(l.available_bytes == 8 * GIB && strstr(l.why, "MemAvailable") != NULL);
    tree_end();
    mem_limits_read("", &l); /* this machine */
    CHECK(l.total_bytes > 0 && l.available_bytes <= l.total_bytes && l.why[0]);
}

/* --- cores ------------------------------------------------------------------------------------ */

TEST(mem_26_cores_follow_quota_and_cpuset)
{
    tree_begin();
    put("proc/self/status", "Name:\tx\nCpus_allowed:\tff,ffffffff\nCpus_allowed_list:\t0-39\n");
    CHECK(cpu_count(tree) == 40);
    put("proc/self/cgroup", "0::/run.scope\n");
    put("sys/fs/cgroup/run.scope/cpu.max", "200000 100000\n");
    CHECK(cpu_count(tree) == 2); /* CPUQuota=200% */
    put("sys/fs/cgroup/run.scope/cpu.max", "max 100000\n");
    CHECK(cpu_count(tree) == 40);
    put("sys/fs/cgroup/cpu.max", "350000 100000\n"); /* the parent's; half a core is no thread */
    CHECK(cpu_count(tree) == 3);
    put("sys/fs/cgroup/cpu.max", "50000 100000\n");
    CHECK(cpu_count(tree) == 1);
    put("proc/self/status", "Name:\tx\nCpus_allowed:\t0f\n"); /* --cpuset-cpus 0-3 */
    put("sys/fs/cgroup/cpu.max", "max 100000\n");
    CHECK(cpu_count(tree) == 4);
    put("proc/self/cgroup", "3:cpu,cpuacct:/docker/x\n");
    put("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "300000\n");
    put("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n");
    CHECK(cpu_count(tree) == 3);
    put("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "-1\n");
    CHECK(cpu_count(tree) == 4);
    tree_end();
}

TEST(mem_26_cores_of_this_machine)
{
    cpu_set_t all, one;
    REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
    uint32_t count = cpu_count("");
    CHECK(count >= 1 && count <= (uint32_t)CPU_COUNT(&all));
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &all)) CPU_SET(i, &one);
    REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(cpu_count("") == 1 && cpu_count(NULL) == 1);
    CHECK(sched_setaffinity(0, sizeof all, &all) == 0);
}

TEST(cpu_levels_can_be_lowered)
{
    char name[64], cut[5];
    unsetenv("STOKER_MAX_ISA");
    enum cpu_isa best = cpu_isa_best();
    setenv("STOKER_MAX_ISA", "scalar", 1);
    CHECK(cpu_isa_best() == CPU_SCALAR && !cpu_has_bf16());
    setenv("STOKER_MAX_ISA", "avx2", 1);
    CHECK(cpu_isa_best() == (best > CPU_AVX2 ? CPU_AVX2 : best));
    setenv("STOKER_MAX_ISA", "avx512", 1);
    CHECK(cpu_isa_best() == best);
    unsetenv("STOKER_MAX_ISA");
    CHECK(strcmp(cpu_isa_name(CPU_SCALAR), "scalar") == 0
          && strcmp(cpu_isa_name(CPU_AVX512), "avx512") == 0);
    cpu_name(name, sizeof name);
    CHECK(name[0] != '\0' && name[0] != ' ');
    cpu_name(cut, sizeof cut);
    CHECK(strlen(cut) <= 4);
    printf("# %s, %s%s, %u cores\n", name, cpu_isa_name(best), cpu_has_bf16() ? " with bf16" : "",
           cpu_count(""));
}

TEST(cpu_subnormals_are_flushed_between_enter_and_leave)
{
    volatile float tiny = 1e-40f, half = 0.5f;
    CHECK(tiny * half > 0);
    uint32_t saved = cpu_ftz_enter();
    volatile float product = tiny * half;
    cpu_ftz_leave(saved);
#if defined(__x86_64__)
    CHECK(product == 0);
#endif
    CHECK(tiny * half > 0);
}

TEST_MAIN()
