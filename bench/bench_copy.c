/* bench/bench_copy.c - `stoker bench copy`: what moves data on the host device - copies, the cast
 * of gradients, checksums - beside loops over the same memory that compute nothing.
 *
 * Owns: options, the list of what is measured, table, JSON. Must not know what a limit is
 * (limit.c). Application's thread; OpenMP inside. */
#include "base/convert.h"
#include "base/sys.h"
#include "base/topology.h"
#include "bench/bench_impl.h"
#include "bench/limit.h"
#include "bench/pairs.h"
#include "nvme/crc32c.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

struct copy_args {
    uint64_t size_bytes, pairs, threads;
    double width, seconds;
    const char *json;
};

#define AT(field) offsetof(struct copy_args, field)
static const struct opt_row rows[] = {
    { "size", OPT_SIZE, AT(size_bytes), "512MiB", 8 << 20, 1e13, .arg = "SIZE",
      .help = "of what is read; as much again is written" },
    { "threads", OPT_U64, AT(threads), "0", 0, 1024, .arg = "N",
      .help = "beside one thread; 0: all cores this process may use" },
    { "pairs", OPT_U64, AT(pairs), "60", 1, NVME_PAIRS_MAX, .arg = "N",
      .help = "at most, of ours and the limit's passes" },
    { "width", OPT_DOUBLE, AT(width), "0.02", 0, 1, .arg = "SHARE",
      .help = "enough pairs when the 95 % interval of the median is so near to it" },
    { "time", OPT_DOUBLE, AT(seconds), "6", 0.1, 86400, .arg = "SECONDS",
      .help = "at most, of each result" },
    { "json", OPT_STRING, AT(json), .arg = "FILE", .help = "a list of results" },
};
enum { ROW_N = sizeof rows / sizeof rows[0] };

static const char usage[] = "usage: stoker bench copy [options]\n\n"
    "What the host device moves data with, piece by piece as training does it: copies, the cast of "
    "fp32\ngradients to bf16 with their sum of squares, CRC32C; on one thread (a stream of the "
    "device has one) and\non all. Beside each, the fastest loop that reads and writes the same and "
    "computes nothing.";
static const char more[] =
    "\nExit codes: 0 done, 1 operating error, 2 bad use, 130 stopped by a signal.\n";

enum { PIECE_BYTES = 2 << 20 }; /* of what is read: a chunk's gradients */

static void piece_copy(const uint8_t *from, uint8_t *to, uint64_t *sum)
{
    (void)sum;
    memcpy(to, from, PIECE_BYTES);
}

static void piece_cast(const uint8_t *from, uint8_t *to, uint64_t *sum)
{
    struct convert_sum s;
    convert_grad_bf16((const float *)(const void *)from, (uint16_t *)(void *)to, PIECE_BYTES / 4,
                      1.0f, &s);
    *sum += s.nonfinite;
}

static void piece_crc(const uint8_t *from, uint8_t *to, uint64_t *sum)
{
    (void)to;
    *sum += crc32c(0, from, PIECE_BYTES);
}

/* `to_part`: bytes written for each byte read. */
static const struct subject {
    const char *name, *what;
    void (*piece)(const uint8_t *from, uint8_t *to, uint64_t *sum);
    enum limit_shape shape;
    double to_part;
} subjects[] = {
    { "copy", "copy between host buffers", piece_copy, LIMIT_COPY, 1 },
    { "grad_cast", "fp32 gradient to bf16, sum of squares", piece_cast, LIMIT_CAST, 0.5 },
    { "crc32c", "checksum of an extent", piece_crc, LIMIT_READ, 0 },
};
enum { SUBJECTS = sizeof subjects / sizeof subjects[0] };

struct copy_result {
    const struct subject *subject;
    uint32_t threads;
    struct limit_loop limit;
    struct pairs pairs;
};

struct copy_bench {
    struct copy_args args;
    const _Atomic bool *stop;
    uint8_t *from, *to;
    uint64_t pieces, seen;
    struct copy_result *now;
    uint32_t n;
    struct copy_result result[2 * SUBJECTS];
};

static double run_ours(void *arg)
{
    struct copy_bench *b = arg;
    const struct subject *s = b->now->subject;
    uint32_t threads = b->now->threads;
    uint64_t sum = 0, to_bytes = (uint64_t)(PIECE_BYTES * s->to_part);
    double begin = bench_now_s();
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum)
    for (uint64_t i = 0; i < b->pieces; i++)
        s->piece(b->from + i * PIECE_BYTES, b->to + i * to_bytes, &sum);
    double took = bench_now_s() - begin;
    b->seen += sum;
    return took;
}

static double run_limit(void *arg)
{
    struct copy_bench *b = arg;
    return limit_run(b->now->limit.shape, &b->now->limit.job, b->now->threads);
}

static void measure(struct copy_bench *b, const struct subject *s, uint32_t threads)
{
    struct copy_result *r = &b->result[b->n];
    struct limit_set set = { 0 };
    struct limit_job job = { .base = { b->from, b->to },
                             .groups = b->pieces * PIECE_BYTES / 4 / LIMIT_GROUP };
    struct pairs_rule rule = { .min = b->args.pairs < 5 ? 1 : 5, .max = (uint32_t)b->args.pairs,
                               .width = b->args.width, .seconds = b->args.seconds,
                               .stop = b->stop };
    limit_add(&set, s->shape, &job);
    limit_try(&set, 3, threads);
    *r = (struct copy_result){ .subject = s, .threads = threads, .limit = set.loop[set.best] };
    r->pairs.ours_bytes = (double)(b->pieces * PIECE_BYTES) * (1 + s->to_part);
    r->pairs.limit_bytes = r->limit.bytes;
    b->now = r;
    pairs_run(&r->pairs, &rule, run_ours, run_limit, b);
    if (r->pairs.n == 0) return;
    b->n++;
    const struct pairs *p = &r->pairs;
    printf("  %-38s %7u  %9.2f  %7.2f %7.2f   %.3f %.3f-%.3f  %5u\n", s->what, threads,
           p->median_s * 1e3, p->bytes_per_s / 1e9, p->limit_bytes_per_s / 1e9, p->share,
           p->share_low, p->share_high, p->n);
    fflush(stdout);
}

static json_t *result_json(const struct copy_bench *b, const struct copy_result *r)
{
    char text[160];
    json_t *j = json_object();
    json_object_set_new(j, "bench", json_string("copy"));
    json_object_set_new(j, "variant", json_string(r->subject->name));
    json_object_set_new(j, "threads", json_integer(r->threads));
    json_object_set_new(j, "bytes", json_real(r->pairs.ours_bytes));
    json_object_set_new(j, "piece_bytes", json_integer(PIECE_BYTES));
    pairs_json(&r->pairs, j);
    json_object_set_new(j, "limit", json_string(limit_loop_text(&r->limit, text, sizeof text)));
    if (r->subject->piece == piece_crc)
        json_object_set_new(j, "kernel", json_string(crc32c_variant()));
    (void)b;
    return j;
}

static void print_verdict(const struct copy_bench *b)
{
    const struct copy_result *least = NULL;
    for (uint32_t i = 0; i < b->n; i++)
        if (!least || b->result[i].pairs.share < least->pairs.share) least = &b->result[i];
    if (least)
        printf("\nfarthest from what memory allows: %s, %u thread%s, %.0f %%\n",
               least->subject->what, least->threads, least->threads > 1 ? "s" : "",
               100 * least->pairs.share);
}

static stk_status measure_all(struct copy_bench *b, struct stk_error *err)
{
    uint64_t bytes = b->pieces * PIECE_BYTES;
    uint32_t threads = (uint32_t)b->args.threads;
    b->from = sys_mmap(bytes, true);
    b->to = sys_mmap(bytes, true);
    if (!b->from || !b->to)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "bench copy: no memory for twice %llu "
                             "bytes; lower --size", (unsigned long long)bytes);
    for (uint64_t i = 0; i < bytes / 4; i++)
        ((uint32_t *)(void *)b->from)[i] = 0x3f000000u + (uint32_t)(i * 2654435761u & 0x7fffff);
    printf("  %-38s %7s  %9s  %7s %7s   %-17s  %5s\n", "", "threads", "ms", "GB/s", "limit",
           "share of limit", "pairs");
    for (int i = 0; i < SUBJECTS; i++) {
        if (!*b->stop) measure(b, &subjects[i], 1);
        if (!*b->stop && threads > 1) measure(b, &subjects[i], threads);
    }
    print_verdict(b);
    if (!b->args.json) return STK_OK;
    json_t *list = json_array();
    for (uint32_t i = 0; i < b->n; i++)
        json_array_append_new(list, result_json(b, &b->result[i]));
    return pairs_write(list, b->args.json, err);
}

static int run(struct copy_bench *b)
{
    struct stk_error err = { 0 };
    if (!b->args.threads) b->args.threads = topology_threads_here();
    b->pieces = (b->args.size_bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    b->stop = bench_signals();
    stk_status st = measure_all(b, &err);
    sys_munmap(b->from, b->pieces * PIECE_BYTES);
    sys_munmap(b->to, b->pieces * PIECE_BYTES);
    if (st != STK_OK) return bench_fail(&err, BENCH_FAILED);
    return *b->stop ? BENCH_STOPPED : BENCH_DONE;
}

int bench_copy(int argc, char **argv)
{
    struct stk_error err = { 0 };
    if (bench_help(argc, argv, usage, rows, ROW_N, more)) return BENCH_DONE;
    struct copy_bench *b = sys_calloc(1, sizeof *b);
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
