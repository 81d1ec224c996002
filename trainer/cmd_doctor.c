/* trainer/cmd_doctor.c - `stoker doctor`: what this machine allows a run to do, and for each lack
 * what to change. Measures, never guesses; writes one unnamed file of a few KiB into each --nvme
 * folder. */
#include "base/cpu.h"
#include "base/mem.h"
#include "base/sys.h"
#include "base/topology.h"
#include "gpu/device.h"
#include "nvme/io.h"
#include "trainer/cmd.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

struct doctor_opts {
    struct opt_list nvme;
};

static const struct opt_row rows[] = {
    { "nvme", OPT_LIST, offsetof(struct doctor_opts, nvme), .arg = "DIR",
      .help = "folders that a run would use for swapped state" },
};
enum { ROW_N = 1 };
static const char usage[] = "usage: stoker doctor [--nvme DIR[,DIR...]]";

static void show_cpu(void)
{
    char name[128];
    cpu_name(name, sizeof name);
    struct topology *t;
    uint32_t cores = 1, processors = 1, nodes = 1;
    if (topology_open("", &t, NULL) == STK_OK) {
        cores = topology_threads(t);
        processors = t->n_cpus;
        nodes = t->n_nodes;
        topology_close(t);
    }
    printf("processor   %s: %u cores may be used (%u processors, %u NUMA node%s), %s%s\n", name, cores,
           processors, nodes, nodes == 1 ? "" : "s", cpu_isa_name(cpu_isa_best()),
           cpu_has_bf16() ? ", bf16 products" : "");
    if (cpu_isa_best() == CPU_SCALAR)
        printf("            -> without AVX2 everything runs, slowly\n");
}

static void show_memory(void)
{
    struct mem_limits m;
    struct rlimit lock;
    char a[32], b[32];
    mem_limits_read("", &m);
    printf("memory      %s free of %s (%s)\n", mem_size_format(m.available_bytes, a),
           mem_size_format(m.total_bytes, b), m.why);
    if (m.cgroup_limit_bytes != UINT64_MAX)
        printf("cgroup      limit %s -> raise the container's memory limit if a run is refused\n",
               mem_size_format(m.cgroup_limit_bytes, a));
    else
        printf("cgroup      no memory limit\n");
    if (getrlimit(RLIMIT_MEMLOCK, &lock) != 0) return;
    if (lock.rlim_cur == RLIM_INFINITY)
        printf("memlock     unlimited\n");
    else
        printf("memlock     %s -> `ulimit -l unlimited` lets io_uring register its buffers on "
               "older kernels\n",
               mem_size_format((uint64_t)lock.rlim_cur, a));
}

/* The rate of the arithmetic asked for, measured by the device when it is opened. */
static void show_matmul(void)
{
    static const struct {
        enum dev_matmul kind;
        const char *name;
    } all[] = { { DEV_MATMUL_AUTO, "auto" },
                { DEV_MATMUL_F32, "f32" },
                { DEV_MATMUL_BF16, "bf16" } };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        struct stk_error err = { 0 };
        struct exec *ex = NULL;
        struct dev *d = NULL;
        struct dev_caps caps;
        stk_status st = exec_open_threads(&ex, &err);
        struct dev_cfg cfg = { .kind = DEV_HOST, .ex = ex, .matmul = all[i].kind };
        if (st == STK_OK) st = dev_open(&cfg, &d, &err);
        if (st == STK_OK) st = dev_matmul_rate(d, &err);
        if (st == STK_OK) {
            dev_caps_read(d, &caps);
            printf("products    --matmul %s: %s, %.1f GFLOP/s measured; numerics %s\n", all[i].name,
                   caps.matmul == DEV_MATMUL_BF16 ? "bf16" : "f32", caps.matmul_flops_per_s / 1e9,
                   caps.numerics);
        } else {
            printf("products    --matmul %s: not usable: %s\n", all[i].name, err.text);
        }
        dev_close(d);
        exec_close(ex);
    }
}

static void show_cuda(void)
{
    struct stk_error err = { 0 };
    char text[256];
    if (dev_describe(DEV_CUDA, text, sizeof text, &err) == STK_OK)
        printf("cuda        %s\n", text);
    else
        printf("cuda        not usable: %s\n", err.text);
}

static void nothing(void *arg) { (void)arg; }

static void show_uring(void)
{
    struct stk_error err = { 0 };
    struct exec *ex = NULL;
    struct exec_lane *lane = NULL;
    struct exec_task task;
    struct io *io = NULL;
    exec_task_init(&task, nothing, NULL);
    stk_status st = exec_open_threads(&ex, &err);
    if (st == STK_OK) st = exec_lane_open(ex, "doctor", &lane, &err);
    struct io_cfg cfg = { .kind = IO_URING, .ex = ex, .lane = lane, .notify = &task };
    if (st == STK_OK) st = io_open(&cfg, &io, &err);
    if (st == STK_OK)
        printf("io_uring    allowed: %s\n", io_describe(io));
    else
        printf("io_uring    refused: %s\n            -> runs fall back to posix threads; allow the "
               "system call in the container's seccomp profile\n",
               err.text);
    io_close(io);
    if (lane) exec_lane_close(lane);
    exec_close(ex);
}

static bool show_folder(const char *path)
{
    char a[32];
    int64_t room = sys_disk_free(path);
    int fd = sys_open(path, O_TMPFILE | O_RDWR, 0600);
    if (fd < 0 || room < 0) {
        printf("nvme        %s: cannot be used: %s -> make the folder, or change its permissions\n",
               path, strerror(errno));
        if (fd >= 0) sys_close(fd);
        return false;
    }
    sys_close(fd);
    fd = sys_open(path, O_TMPFILE | O_RDWR | O_DIRECT, 0600);
    printf("nvme        %s: %s free, %s\n", path, mem_size_format((uint64_t)room, a),
           fd >= 0 ? "O_DIRECT works"
                   : "no O_DIRECT -> swapped state goes through the page cache; choose ext4, xfs "
                     "or another disk file system");
    if (fd >= 0) sys_close(fd);
    return true;
}

int cmd_doctor(int argc, char **argv)
{
    struct doctor_opts o;
    struct stk_error err = { 0 };
    bool good = true;
    if (cmd_help(argc, argv, usage, rows, ROW_N)) return EXIT_DONE;
    if (opts_parse(rows, ROW_N, argc, argv, &o, NULL, NULL, &err) != STK_OK)
        return cmd_fail_use(&err);
    show_cpu();
    show_memory();
    show_matmul();
    show_cuda();
    show_uring();
    if (o.nvme.n == 0) printf("nvme        no folder given: --nvme DIR checks one\n");
    for (uint32_t i = 0; i < o.nvme.n; i++) good = show_folder(o.nvme.item[i]) && good;
    opts_free(rows, ROW_N, &o);
    return good ? EXIT_DONE : EXIT_OPERATING;
}
