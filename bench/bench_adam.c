/* bench/bench_adam.c - `stoker bench adam`: Adam's rate beside the read-modify-write rate of this
 * machine's memory.
 *
 * Owns: options, the list of what is measured, table, verdict, JSON. Must not know how a pass runs
 * (adam_world.c) or what a limit is (limit.c). Application's thread. */
#include "base/sys.h"
#include "base/topology.h"
#include "bench/adam_world.h"
#include "bench/bench_impl.h"
#include "bench/pairs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct adam_args {
    uint64_t params, pairs, threads;
    double width, seconds;
    const char *kernel, *json;
    struct opt_list paths;
    int layout, moments;
    bool ways, no_limit;
};

static const char *const layout_names[] = { "bf16_split", "fp16", "f32", "all", NULL };
static const double layout_bytes[ADAM_LAYOUT_N] = { 26, 28, 28 };
static const char *const moment_names[] = { "f32", "bf16", "8bit", "all", NULL };
enum { MOMENTS_ALL = CHUNK_MOMENTS_8BIT + 1 };
/* with ADAM_BF16_SPLIT; an absmax, read and written, is for 64 elements */
static const double moment_bytes[] = { 26, 18, 14 + 2 * 2 * 4.0 / 64 };
enum { LAYOUT_ALL = ADAM_LAYOUT_N, RESULTS_MAX = 64, SCALAR_PAIRS = 5 };

#define AT(field) offsetof(struct adam_args, field)
static const struct opt_row rows[] = {
    { "params", OPT_U64, AT(params), "64000000", 65536, 4e9, .arg = "N",
      .help = "parameters; 16 bytes of memory each" },
    { "threads", OPT_U64, AT(threads), "0", 0, 1024, .arg = "N",
      .help = "0: all cores this process may use" },
    { "layout", OPT_CHOICE, AT(layout), "all", .choices = layout_names, .arg = "NAME",
      .help = "of the state" },
    { "moments", OPT_CHOICE, AT(moments), "all", .choices = moment_names, .arg = "KIND",
      .help = "of the chunks of bf16_split, as `train --moments`" },
    { "kernel", OPT_STRING, AT(kernel), .arg = "NAME",
      .help = "only this one: avx512, avx2, scalar" },
    { "path", OPT_LIST, AT(paths), .arg = "NAME",
      .help = "of arrays, chunks, small, cache (see below); default: all" },
    { "ways", OPT_FLAG, AT(ways),
      .help = "also each distance of fetching ahead and each kind of stores" },
    { "no-limit", OPT_FLAG, AT(no_limit),
      .help = "the step alone, in the default way, as often as --pairs says" },
    { "pairs", OPT_U64, AT(pairs), "60", 1, NVME_PAIRS_MAX, .arg = "N",
      .help = "at most, of ours and the limit's passes" },
    { "width", OPT_DOUBLE, AT(width), "0.02", 0, 1, .arg = "SHARE",
      .help = "enough pairs when the 95 % interval of the median is so near to it" },
    { "time", OPT_DOUBLE, AT(seconds), "8", 0.1, 86400, .arg = "SECONDS",
      .help = "at most, of each result" },
    { "json", OPT_STRING, AT(json), .arg = "FILE", .help = "a list of results" },
};
enum { ROW_N = sizeof rows / sizeof rows[0] };

static const char usage[] = "usage: stoker bench adam [options]\n\n"
    "Steps of Adam on the processor, beside loops over the same memory that compute nothing. The "
    "fastest of\nthose is the limit: read-modify-write of as many arrays as the step has, of four, "
    "and of one, with and\nwithout fetching ahead, with ordinary and non-temporal stores.";
static const char more[] =
    "\nBytes are those that must move: 26 per parameter with bf16 parameters (read 2+2+4+4+2, "
    "write 2+2+4+4),\n28 with fp16 or fp32 ones, 18 and 14.25 with bf16 and 8-bit moments. Paths: `arrays` is a step over five large arrays, "
    "`chunks` the same state as\ntraining keeps it, chunk by chunk on the update team, `small` "
    "that state as tensors of 64 elements,\n`cache` the arithmetic alone.\n"
    "\nExit codes: 0 done, 1 operating error, 2 bad use, 130 stopped by a signal.\n";

struct adam_result {
    enum adam_layout layout;
    enum chunk_moments moments;
    enum adam_path path;
    const struct adam_kernel *kernel;
    struct adam_way way;
    struct limit_loop limit;
    struct pairs pairs;
};

struct adam_bench {
    struct adam_args args;
    struct adam_world *world;
    const _Atomic bool *stop;
    bool path[ADAM_PATH_N];         /* measured */
    struct limit_set limits;        /* of the layout that is filled in; n = 0: none */
    struct adam_way way[ADAM_LAYOUT_N]; /* the fastest */
    enum chunk_moments moments;     /* filled in */
    struct adam_result *now;        /* being measured */
    uint32_t n;
    struct adam_result result[RESULTS_MAX];
};

/* --- measuring -------------------------------------------------------------------------------- */

static double run_ours(void *arg)
{
    struct adam_bench *b = arg;
    return adam_world_run(b->world, b->now->path, b->now->layout, b->now->kernel, b->now->way);
}

static double run_limit(void *arg)
{
    struct adam_bench *b = arg;
    return limit_run(b->now->limit.shape, &b->now->limit.job, (uint32_t)b->args.threads);
}

static void print_head(void)
{
    printf("  %-22s %-8s %9s  %9s  %7s  %-7s %-15s  %5s\n", "variant", "path", "ms",
           "ms 25-75%", "GB/s", "limit", "share of limit", "pairs");
}

static double result_bytes(const struct adam_result *r)
{
    return r->moments == CHUNK_MOMENTS_F32 ? layout_bytes[r->layout] : moment_bytes[r->moments];
}

static void result_name(const struct adam_result *r, char *buf, size_t size_bytes)
{
    bool narrow = r->moments != CHUNK_MOMENTS_F32;
    snprintf(buf, size_bytes, "%s%s%s/%s", layout_names[r->layout], narrow ? "+" : "",
             narrow ? moment_names[r->moments] : "", r->kernel->name);
}

static void print_result(const struct adam_result *r)
{
    char name[40], way[48] = "", quarters[32];
    const struct pairs *p = &r->pairs;
    result_name(r, name, sizeof name);
    snprintf(quarters, sizeof quarters, "%.1f-%.1f", p->p25_s * 1e3, p->p75_s * 1e3);
    if (r->way.ahead_elems || r->way.stream) adam_way_text(r->way, way, sizeof way);
    printf("  %-22s %-8s %9.2f %11s %7.2f  %6.2f  %.3f %.3f-%.3f  %5u  %s\n", name,
           adam_path_name(r->path), p->median_s * 1e3, quarters, p->bytes_per_s / 1e9,
           p->limit_bytes_per_s / 1e9, p->share, p->share_low, p->share_high, p->n, way);
    fflush(stdout);
}

static void measure(struct adam_bench *b, enum adam_layout layout, enum adam_path path,
                    const struct adam_kernel *k, struct adam_way way)
{
    if (*b->stop || b->n == RESULTS_MAX || !b->path[path]) return;
    struct adam_result *r = &b->result[b->n];
    bool scalar = k->isa == CPU_SCALAR;
    struct pairs_rule rule = { .min = scalar || b->args.pairs < 5 ? 1 : 5,
                               .max = (uint32_t)b->args.pairs, .width = b->args.width,
                               .seconds = b->args.seconds, .stop = b->stop };
    if (scalar && rule.max > SCALAR_PAIRS) rule.max = SCALAR_PAIRS;
    *r = (struct adam_result){ .layout = layout, .moments = b->moments, .path = path,
                               .kernel = k, .way = way,
                               .limit = b->limits.loop[b->limits.best] };
    r->pairs.ours_bytes = (double)adam_world_params(b->world) * result_bytes(r);
    r->pairs.limit_bytes = r->limit.bytes;
    b->now = r;
    pairs_run(&r->pairs, &rule, run_ours, b->args.no_limit ? NULL : run_limit, b);
    if (r->pairs.n == 0) return;
    print_result(r);
    b->n++;
}

static const struct adam_result *find(const struct adam_bench *b, enum adam_layout layout,
                                      enum adam_path path)
{
    for (uint32_t i = 0; i < b->n; i++)
        if (b->result[i].layout == layout && b->result[i].path == path &&
            b->result[i].moments == CHUNK_MOMENTS_F32)
            return &b->result[i];
    return NULL;
}

/* As adam_way_measure does it at the start of a run, on the whole arrays. */
static struct adam_way find_way(struct adam_bench *b, enum adam_layout layout,
                                const struct adam_kernel *k)
{
    enum { ROUNDS = 5, WAYS_MAX = 16 };
    double took[WAYS_MAX][ROUNDS], best_s = 0;
    struct adam_way best = adam_ways[0];
    if (k->isa == CPU_SCALAR || b->args.no_limit) return best;
    for (uint32_t r = 0; r < ROUNDS; r++)
        for (uint32_t i = 0; i < adam_ways_n && i < WAYS_MAX; i++)
            took[i][r] = adam_world_run(b->world, ADAM_ARRAYS, layout, k, adam_ways[i]);
    for (uint32_t i = 0; i < adam_ways_n && i < WAYS_MAX; i++) {
        double s = nvme_median(took[i], ROUNDS);
        if (i == 0) best_s = s * 0.97; /* the default unless another is clearly faster */
        else if (s < best_s) best_s = s, best = adam_ways[i];
    }
    return best;
}

static void find_limit(struct adam_bench *b, enum adam_layout layout)
{
    b->limits.n = b->limits.best = 0;
    if (b->args.no_limit) return;
    adam_world_limits(b->world, layout, &b->limits);
    limit_try(&b->limits, 5, (uint32_t)b->args.threads);
    char text[160];
    const struct limit_loop *best = &b->limits.loop[b->limits.best];
    for (uint32_t i = 0; i < b->limits.n && b->args.ways; i++)
        printf("  limit? %6.2f GB/s: %s\n",
               b->limits.loop[i].bytes / b->limits.loop[i].best_s / 1e9,
               limit_loop_text(&b->limits.loop[i], text, sizeof text));
    printf("  limit: %s\n", limit_loop_text(best, text, sizeof text));
}

static void fill(struct adam_bench *b, enum adam_layout layout, enum chunk_moments moments)
{
    b->moments = moments;
    adam_world_fill(b->world, layout, moments);
}

static void measure_layout(struct adam_bench *b, enum adam_layout layout)
{
    const struct adam_kernel *best = adam_pick(b->args.kernel);
    bool others = layout == ADAM_BF16_SPLIT && !b->args.kernel && !b->args.no_limit;
    fill(b, layout, CHUNK_MOMENTS_F32);
    find_limit(b, layout);
    b->way[layout] = find_way(b, layout, best);
    measure(b, layout, ADAM_ARRAYS, best, b->way[layout]);
    for (const struct adam_kernel *k = adam_kernels; k->name && others; k++)
        if (k->isa < best->isa) measure(b, layout, ADAM_ARRAYS, k, adam_ways[0]);
    for (uint32_t i = 0; i < adam_ways_n && b->args.ways && best->isa != CPU_SCALAR; i++)
        measure(b, layout, ADAM_ARRAYS, best, adam_ways[i]);
    measure(b, layout, ADAM_CACHED, best, adam_ways[0]);
    if (layout == ADAM_F32 || !(b->path[ADAM_CHUNKS] || b->path[ADAM_SMALL]) || *b->stop) return;
    fill(b, layout, CHUNK_MOMENTS_F32); /* the same bytes in another order */
    measure(b, layout, ADAM_CHUNKS, best, b->way[layout]);
    measure(b, layout, ADAM_SMALL, best, b->way[layout]);
}

static void measure_narrow(struct adam_bench *b, enum chunk_moments moments)
{
    const struct adam_kernel *best = adam_pick(b->args.kernel);
    if (*b->stop || !b->path[ADAM_CHUNKS]) return;
    fill(b, ADAM_BF16_SPLIT, moments);
    find_limit(b, ADAM_BF16_SPLIT);
    measure(b, ADAM_BF16_SPLIT, ADAM_CHUNKS, best, adam_ways[0]);
}

static void measure_all(struct adam_bench *b)
{
    int moments = b->args.moments;
    for (int l = 0; l < ADAM_LAYOUT_N && !*b->stop; l++) {
        if (b->args.layout != LAYOUT_ALL && b->args.layout != l) continue;
        bool has_paths = l != ADAM_F32 || b->path[ADAM_ARRAYS] || b->path[ADAM_CACHED];
        if (has_paths && (moments == MOMENTS_ALL || moments == CHUNK_MOMENTS_F32))
            measure_layout(b, (enum adam_layout)l);
        for (int m = CHUNK_MOMENTS_BF16; m < MOMENTS_ALL && l == ADAM_BF16_SPLIT; m++)
            if (moments == MOMENTS_ALL || moments == m) measure_narrow(b, (enum chunk_moments)m);
    }
}

/* --- what is told ----------------------------------------------------------------------------- */

static void print_verdict(const struct adam_bench *b)
{
    const struct adam_result *r = b->n ? &b->result[0] : NULL;
    if (!r || r->path != ADAM_ARRAYS || r->moments != CHUNK_MOMENTS_F32 || b->args.no_limit) return;
    const struct adam_result *cache = find(b, r->layout, ADAM_CACHED),
                             *chunks = find(b, r->layout, ADAM_CHUNKS),
                             *small = find(b, r->layout, ADAM_SMALL);
    double spare = cache ? cache->pairs.bytes_per_s / r->pairs.limit_bytes_per_s : 0;
    printf("\n%s/%s: %.0f %% of what this memory does", layout_names[r->layout], r->kernel->name,
           100 * r->pairs.share);
    if (r->pairs.share_high >= 0.90) printf(" (90 %% asked for)");
    else if (spare > 0 && spare < 1.3)
        printf(", less than the 90 %% asked for: the arithmetic alone allows %.2f of the limit",
               spare);
    else printf(", less than the 90 %% asked for though the arithmetic alone allows %.1f times the "
                "limit: the order of accesses", spare);
    if (chunks)
        printf("; in chunks on the update team %.0f %%", 100 * chunks->pairs.share);
    if (chunks && small)
        printf("; as %llu tensors %.2f times as long", (unsigned long long)adam_world_small_tensors(
               b->world), small->pairs.median_s / chunks->pairs.median_s);
    printf("\n");
}

static void put(json_t *j, const char *key, json_t *value) { json_object_set_new(j, key, value); }

static json_t *result_json(const struct adam_bench *b, const struct adam_result *r)
{
    char text[160], name[40], cpu[128];
    json_t *j = json_object();
    uint64_t params = adam_world_params(b->world);
    result_name(r, name, sizeof name);
    cpu_name(cpu, sizeof cpu);
    put(j, "bench", json_string("adam"));
    put(j, "variant", json_string(name));
    put(j, "path", json_string(adam_path_name(r->path)));
    put(j, "layout", json_string(layout_names[r->layout]));
    put(j, "moments", json_string(moment_names[r->moments]));
    put(j, "params", json_integer((json_int_t)params));
    put(j, "tensors", json_integer(r->path == ADAM_SMALL
                                       ? (json_int_t)adam_world_small_tensors(b->world) : 1));
    put(j, "threads", json_integer((json_int_t)b->args.threads));
    put(j, "bytes_per_param", json_real(result_bytes(r)));
    pairs_json(&r->pairs, j);
    put(j, "way", json_string(adam_way_text(r->way, text, sizeof text)));
    if (!b->args.no_limit)
        put(j, "limit", json_string(limit_loop_text(&r->limit, text, sizeof text)));
    put(j, "large_page_bytes", json_integer((json_int_t)adam_world_large_page_bytes(b->world)));
    put(j, "cpu", json_string(cpu));
    return j;
}

static stk_status write_json(const struct adam_bench *b, struct stk_error *err)
{
    if (!b->args.json) return STK_OK;
    json_t *list = json_array();
    for (uint32_t i = 0; i < b->n; i++)
        json_array_append_new(list, result_json(b, &b->result[i]));
    return pairs_write(list, b->args.json, err);
}

/* --- the flow --------------------------------------------------------------------------------- */

static stk_status read_args(struct adam_bench *b, struct stk_error *err)
{
    const struct opt_list *paths = &b->args.paths;
    const char *kernel = b->args.kernel;
    if (!b->args.threads) b->args.threads = topology_threads_here();
    for (int p = 0; p < ADAM_PATH_N; p++) b->path[p] = paths->n == 0;
    for (uint32_t i = 0; i < paths->n; i++) {
        int p = 0;
        while (p < ADAM_PATH_N && strcmp(paths->item[i], adam_path_name((enum adam_path)p)) != 0)
            p++;
        if (p == ADAM_PATH_N)
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "--path %s: there are arrays, chunks, small and cache",
                                 paths->item[i]);
        b->path[p] = true;
    }
    bool chunks = b->path[ADAM_CHUNKS] || b->path[ADAM_SMALL],
         arrays = b->path[ADAM_ARRAYS] || b->path[ADAM_CACHED];
    if (b->args.layout == ADAM_F32 && !arrays)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--layout f32 has no such path: chunks have 16-bit parameters; take "
                             "--path arrays or cache, or another layout");
    if (b->args.moments != MOMENTS_ALL && b->args.moments != CHUNK_MOMENTS_F32 &&
        (!b->path[ADAM_CHUNKS] ||
         (b->args.layout != ADAM_BF16_SPLIT && b->args.layout != LAYOUT_ALL)))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--moments %s: measured with --layout bf16_split and --path chunks "
                             "only", moment_names[b->args.moments]);
    if (!chunks) b->args.moments = CHUNK_MOMENTS_F32;
    if (kernel && !adam_pick(kernel))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--kernel %s: no such variant, or this processor lacks it; there are "
                             "avx512, avx2 and scalar", kernel);
    return STK_OK;
}

static int run(struct adam_bench *b)
{
    struct stk_error err = { 0 };
    char cpu[128];
    if (read_args(b, &err) != STK_OK) return bench_fail(&err, BENCH_USE);
    b->stop = bench_signals();
    stk_status st = adam_world_open(b->args.params, (uint32_t)b->args.threads,
                                    b->path[ADAM_CHUNKS] || b->path[ADAM_SMALL], &b->world, &err);
    if (st != STK_OK) return bench_fail(&err, BENCH_FAILED);
    cpu_name(cpu, sizeof cpu);
    printf("%s, %llu threads, %llu parameters, %.0f %% in large pages\n", cpu,
           (unsigned long long)b->args.threads, (unsigned long long)adam_world_params(b->world),
           100.0 * (double)adam_world_large_page_bytes(b->world) /
               (16.0 * (double)adam_world_params(b->world)));
    print_head();
    measure_all(b);
    print_verdict(b);
    st = write_json(b, &err);
    adam_world_close(b->world);
    if (st != STK_OK) return bench_fail(&err, BENCH_FAILED);
    return *b->stop ? BENCH_STOPPED : BENCH_DONE;
}

int bench_adam(int argc, char **argv)
{
    struct stk_error err = { 0 };
    if (bench_help(argc, argv, usage, rows, ROW_N, more)) return BENCH_DONE;
    struct adam_bench *b = sys_calloc(1, sizeof *b);
    if (!b) {
        stk_error_set(&err, STK_ERR_NOMEM, 0, "no memory to begin");
        return bench_fail(&err, BENCH_FAILED);
    }
    stk_status st = opts_parse(rows, ROW_N, argc, argv, &b->args, NULL, NULL, &err);
    int code = st == STK_OK ? run(b) : bench_fail(&err, BENCH_USE);
    opts_free(rows, ROW_N, &b->args);
    sys_free(b);
    return code;
}
