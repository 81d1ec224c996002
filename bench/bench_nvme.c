/* bench/bench_nvme.c - `stoker bench nvme PATH...`: options, the order of things, exit codes.
 *
 * Owns: the table of options and the flow: look, announce, measure each path alone and all
 * together, judge, write files. Must not know: how a point is measured or shown. Application's
 * thread. */
#include "base/sys.h"
#include "bench/bench_impl.h"
#include "bench/nvme_impl.h"

#include <errno.h>
#include <string.h>

static const char *const kind_names[] = { "auto", "uring", "posix", NULL };

#define AT(field) offsetof(struct nvme_opts, field)

static const struct opt_row rows[] = {
    { "time", OPT_DOUBLE, AT(time_s), .min = 1, .max = 86400, .arg = "SECONDS",
      .help = "of everything; default: 80, with --sustained 300 more for each measurement, one "
              "point: a few seconds" },
    { "size", OPT_SIZE, AT(size_bytes), .min = 8 << 20, .max = 1e15, .arg = "SIZE",
      .help = "of the file on each path; default: by the drive's speed, at most 4 GiB" },
    { "block", OPT_SIZE, AT(block_bytes), .min = 4096, .max = 1 << 30, .arg = "SIZE",
      .help = "one point instead of the sweep: bytes of a request" },
    { "depth", OPT_U64, AT(depth), .min = 1, .max = 1024, .arg = "N",
      .help = "one point instead of the sweep: requests in flight on each path" },
    { "mode", OPT_LIST, AT(modes), .arg = "NAME",
      .help = "of read, write, mixed, optimizer; default: all" },
    { "pairs", OPT_U64, AT(pairs), "1", 1, NVME_PAIRS_MAX, .arg = "N",
      .help = "of ours and fio's runs at each point, in random order within a pair" },
    { "kind", OPT_CHOICE, AT(kind), "auto", .choices = kind_names, .arg = "NAME",
      .help = "of transfers, as `train --storage`" },
    { "sustained", OPT_FLAG, AT(sustained),
      .help = "write on past the drive's cache until the rate is steady; --mode read: read on" },
    { "write-max", OPT_SIZE, AT(write_max_bytes), .min = 1 << 20, .max = 1e18, .arg = "SIZE",
      .help = "bytes that may be written to each path; default: 64 GiB, with --sustained 400 GiB" },
    { "verify", OPT_FLAG, AT(verify),
      .help = "every block carries file, offset and pass, and each read checks them" },
    { "no-fio", OPT_FLAG, AT(no_fio), .help = "no fio beside it" },
    { "json", OPT_STRING, AT(json), .arg = "FILE", .help = "a list of results" },
    { "html", OPT_STRING, AT(html), .arg = "FILE", .help = "one page with plots, self-contained" },
    { "seed", OPT_U64, AT(seed), "1", 0, 1e15, .arg = "N", .help = "of random places and orders" },
};
enum { ROW_N = sizeof rows / sizeof rows[0] };

static const char usage[] = "usage: stoker bench nvme PATH... [options]\n\n"
    "What the drives under these folders can do for training, measured with the code that training "
    "uses:\nreads, writes, both at once and the optimizer's pattern; what limits them; what to "
    "change; how long\na step of some models would take. Several paths: each alone, then all "
    "together.";
static const char more[] =
    "\nSteady: over the last 10 samples every rate is within 10 % of their mean and the line "
    "through them\nchanges by at most 10 % of it from end to end. Burst is the mean of the first 3 "
    "samples.\n"
    "\nfio runs on the same files with the same block size and depth (io_uring, O_DIRECT, "
    "registered buffers\nand files), its memory in large pages as ours "
    "(glibc 2.35 or newer). It has no pattern like the\noptimizer's; beside that it runs a "
    "sequential mix of reads and writes.\n"
    "\nA result is marked invalid when memory and not a drive answered: O_DIRECT refused, tmpfs, "
    "reads from\nthe page cache, a loop device that keeps its file there, more than the drive's "
    "link carries; or when\na transfer or the flush behind the writes failed, which ends the run "
    "with exit code 1.\n"
    "\nseconds per step = P * (4 / read rate + 2 / write rate + 26 / rate of the optimizer's "
    "pattern), and at\nleast P * 14 / sustained write rate: a step with all state on NVMe reads 18 "
    "and writes 14 bytes per\nparameter (parameters 2 forward, 2 backward, 2 for the update; "
    "optimizer state 10 each way;\ngradients 2 each way; new parameters 2).\n"
    "The rates are medians; beside the seconds stands what the best and the worst sample of each "
    "would make\nof them.\n"
    "\nA rate that decays in time: `--sustained --time 700 --write-max 2TiB` goes on for more than "
    "ten minutes\n(with --mode read without writing) and compares the last tenth with the "
    "second.\n"
    "\nExit codes: 0 done, 1 operating error, 2 bad use, 130 stopped by a signal.\n";

static stk_status read_modes(struct nvme_bench *b, struct stk_error *err)
{
    for (uint32_t i = 0; i < b->o.modes.n; i++) {
        bool known = false;
        for (int k = 0; k < NVME_MODES; k++) {
            if (strcmp(b->o.modes.item[i], nvme_mode_name((enum measure_mode)k)) != 0) continue;
            b->mode[k] = known = true;
        }
        if (!known)
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "--mode %s: there are read, write, mixed and optimizer",
                                 b->o.modes.item[i]);
    }
    for (int k = 0; k < NVME_MODES && b->o.modes.n == 0; k++) b->mode[k] = true;
    return STK_OK;
}

static stk_status read_paths(struct nvme_bench *b, const struct opt_list *paths,
                             struct stk_error *err)
{
    if (paths->n == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "bench nvme: no path is given; name a folder on each drive to "
                             "measure");
    if (paths->n > NVME_PATHS_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "bench nvme: %u paths are given, at most %d "
                             "can be measured", paths->n, NVME_PATHS_MAX);
    for (uint32_t i = 0; i < paths->n; i++) b->path[i] = paths->item[i];
    b->n_paths = paths->n;
    return STK_OK;
}

static stk_status check_sizes(const struct nvme_bench *b, struct stk_error *err)
{
    const struct nvme_opts *o = &b->o;
    unsigned long long block = o->block_bytes, depth = o->depth ? o->depth : 1;
    if (block % 4096 != 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--block %llu: must be a multiple of 4096 bytes", block);
    if (o->size_bytes && block && o->size_bytes < 2 * block * depth)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--size %llu: too small for --block %llu and --depth %llu; at least "
                             "twice their product is needed",
                             (unsigned long long)o->size_bytes, block, depth);
    if ((block ? block : 4 << 20) * depth > (1ull << 30))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--depth %llu: with this block more than 1 GiB would be in flight",
                             depth);
    return STK_OK;
}

static stk_status parse(struct nvme_bench *b, int argc, char **argv, struct stk_error *err)
{
    bool given[ROW_N];
    struct opt_list paths = { 0 };
    STK_TRY(opts_parse(rows, ROW_N, argc, argv, &b->o, given, &paths, err));
    b->time_given = given[0];
    STK_TRY(read_paths(b, &paths, err));
    STK_TRY(read_modes(b, err));
    return check_sizes(b, err);
}

/* Each path alone, then all together (for twice as long: the verdict is theirs), in shares of the
 * time that is left. */
static stk_status measure_units(struct nvme_bench *b, struct stk_error *err)
{
    double until = b->begin_s + b->time_s;
    for (uint32_t i = 0; i < b->n_units && !nvme_stopped(b); i++) {
        bool last = i + 1 == b->n_units;
        double shares = last ? 1 : b->n_units - i + 1, budget = (until - bench_now_s()) / shares;
        if (budget < 0.5) budget = 0.5;
        nvme_table_head(b, i);
        STK_TRY(nvme_unit_run(b, i, budget, err));
        nvme_table_unit(b, i);
    }
    b->stopped = nvme_stopped(b);
    return STK_OK;
}

static stk_status write_files(const struct nvme_bench *b, struct stk_error *err)
{
    if (b->o.json) STK_TRY(nvme_json_write(b, b->o.json, err));
    if (b->o.html) STK_TRY(nvme_html_write(b, b->o.html, err));
    return STK_OK;
}

static int run(struct nvme_bench *b)
{
    struct stk_error err = { 0 };
    b->stop = bench_signals();
    b->begin_s = bench_now_s();
    rng_seed(&b->rng, b->o.seed);
    stk_status st = nvme_prepare(b, &err);
    if (st != STK_OK) return bench_fail(&err, st == STK_ERR_CONFIG ? BENCH_USE : BENCH_FAILED);
    nvme_announce(b);
    if (measure_units(b, &err) != STK_OK) {
        struct stk_error second = { 0 }; /* the first is the one to tell */
        if (b->o.json && b->n_results > 0) (void)nvme_json_write(b, b->o.json, &second);
        return bench_fail(&err, BENCH_FAILED);
    }
    if (b->n_results > 0) {
        nvme_conclude(b);
        nvme_table_end(b);
    } else {
        printf("nothing was measured\n");
    }
    if (write_files(b, &err) != STK_OK) return bench_fail(&err, BENCH_FAILED);
    if (b->stopped) return BENCH_STOPPED;
    for (uint32_t i = 0; i < b->n_results; i++)
        if (b->result[i].verify_failures) {
            stk_error_set(&err, STK_ERR_CORRUPT, 0, "verify: %s", b->result[i].failure);
            return bench_fail(&err, BENCH_FAILED);
        }
    return BENCH_DONE;
}

int bench_nvme(int argc, char **argv)
{
    struct stk_error err = { 0 };
    if (bench_help(argc, argv, usage, rows, ROW_N, more)) return BENCH_DONE;
    struct nvme_bench *b = sys_calloc(1, sizeof *b);
    if (b) b->unit = sys_calloc(NVME_UNITS_MAX, sizeof *b->unit);
    if (!b || !b->unit) {
        sys_free(b);
        stk_error_set(&err, STK_ERR_NOMEM, errno, "no memory to begin");
        return bench_fail(&err, BENCH_FAILED);
    }
    int code = parse(b, argc, argv, &err) == STK_OK ? run(b) : bench_fail(&err, BENCH_USE);
    opts_free(rows, ROW_N, &b->o);
    sys_free(b->result);
    sys_free(b->unit);
    sys_free(b);
    return code;
}
