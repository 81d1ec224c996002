/* bench/nvme_table.c - results and verdict on the terminal.
 *
 * Owns: their form in text. Must not know: how anything was measured. Application's thread. */
#include "base/mem.h"
#include "bench/nvme_impl.h"

#include <stdio.h>
#include <string.h>

static bool together(const struct nvme_bench *b, uint32_t unit)
{
    return unit > 0 && unit + 1 == b->n_units;
}

void nvme_table_head(const struct nvme_bench *b, uint32_t unit)
{
    if (together(b, unit)) printf("all %u paths together\n", b->n_paths);
    else printf("%s\n", b->path[b->unit[unit].path[0]]);
    printf("  %-10s %-7s %5s  %8s  %8s  %14s  %8s %8s %8s %8s  %s\n", "pattern", "block", "depth",
           "GB/s", "fio GB/s", "share of fio", "p50 us", "p95 us", "p99 us", "p99.9 us",
           "cpu");
    fflush(stdout);
}

static void print_latency(const struct nvme_latency *l)
{
    const uint64_t ns[] = { l->p50_ns, l->p95_ns, l->p99_ns, l->p999_ns };
    for (int i = 0; i < 4; i++)
        if (l->max_ns) printf(" %8.0f", (double)ns[i] / 1e3);
        else printf(" %8s", "-");
}

static const char *label_of(const struct nvme_result *r)
{
    if (r->step == NVME_STEADY) return "sustained";
    if (r->step == NVME_AGAIN) return "again";
    if (r->random) return r->mode == MEASURE_READ ? "rand read" : "rand write";
    return nvme_mode_name(r->mode);
}

void nvme_table_row(const struct nvme_bench *b, const struct nvme_result *r)
{
    char size[32], share[64] = "-", fio[32] = "-";
    if (r->n_pairs == 1) snprintf(share, sizeof share, "%.2f", r->share_of_fio);
    if (r->n_pairs > 1)
        snprintf(share, sizeof share, "%.3f %.2f-%.2f", r->share_of_fio, r->share_low,
                 r->share_high);
    if (r->n_pairs) snprintf(fio, sizeof fio, "%.3f", r->fio_bytes_per_s / 1e9);
    printf("  %-10s %-7s %5u  %8.3f  %8s  %14s ", label_of(r),
           nvme_size_text(r->block_bytes, size, sizeof size), r->depth, r->bytes_per_s / 1e9, fio,
           share);
    print_latency(&r->all);
    printf("  %2.0f %%\n", 100 * r->cpu_share);
    if (r->mode != MEASURE_READ && r->read.max_ns && r->write.max_ns) {
        printf("    %-62s", "its reads");
        print_latency(&r->read);
        printf("\n    %-62s", "its writes");
        print_latency(&r->write);
        printf("\n");
    }
    if (!r->valid) printf("    INVALID: %s\n", r->why);
    (void)b;
}

static void print_sweep(const struct sweep *s, const char *name)
{
    char size[32];
    printf("  sweep of %-6s GB/s", name);
    for (uint32_t d = 0; d < s->n_depths; d++) printf("  x %-5u", s->depth[d]);
    printf("\n");
    for (uint32_t k = 0; k < s->n_blocks; k++) {
        if (s->rate[k][0] <= 0) continue;
        printf("    %-18s", nvme_size_text(s->block[k], size, sizeof size));
        for (uint32_t d = 0; d < s->n_depths; d++)
            if (s->rate[k][d] > 0) printf(" %7.3f", s->rate[k][d] / 1e9);
            else printf(" %7s", ".");
        printf("\n");
    }
}

static void print_steady(const struct nvme_unit *u)
{
    const struct steady_summary *s = &u->steady;
    char size[32];
    double bytes = 0;
    for (uint32_t i = 0; i < u->series.n; i++) bytes += u->series.bytes[i];
    if (u->series.n == 0) return;
    mem_size_format((uint64_t)bytes, size);
    printf("  %-10s %s %.3f GB/s, %s %.3f: %s after %s in %.0f s",
           u->steady_mode == MEASURE_READ ? "reads" : "writes",
           s->dropped ? "burst" : "at first", s->burst / 1e9, s->dropped ? "sustained" : "at last",
           s->sustained / 1e9, s->reached ? "steady" : "NOT steady", size,
           u->series.at_s[u->series.n - 1]);
    if (u->steady_mode == MEASURE_READ)
        printf("\n");
    else if (s->dropped)
        printf("; a cache of about %s was passed\n",
               mem_size_format((uint64_t)s->cache_bytes, size));
    else
        printf("; no drop seen: a larger cache may not have been passed\n");
    if (s->late_over_early > 0)
        printf("             the last tenth ran at %.2f of the second tenth; %u threads and %u "
               "workers of the kernel at its end\n",
               s->late_over_early, u->workers.threads, u->workers.kernel);
}

/* In the table are the patterns that a plan needs, and what the poorest one says. */
static void print_balance(const struct nvme_bench *b, uint32_t last)
{
    for (int k = 0; k < NVME_MODES; k++) {
        enum measure_mode mode = (enum measure_mode)k;
        const struct nvme_result *all = nvme_find(b, last, NVME_POINT, mode, 1 << 20);
        double sum = 0;
        if (!all) continue;
        printf("  balance    %-9s", nvme_mode_name(mode));
        for (uint32_t i = 0; i < b->n_paths; i++) {
            const struct nvme_result *one = nvme_find(b, i, NVME_POINT, mode, 1 << 20);
            double alone = one ? one->bytes_per_s : 0;
            sum += alone;
            printf(" %s%.3f of %.3f", i ? "+ " : "", all->path_bytes_per_s[i] / 1e9, alone / 1e9);
        }
        if (sum > 0) printf(" = %.2f of the sum", all->bytes_per_s / sum);
        printf("\n");
    }
}

void nvme_table_unit(const struct nvme_bench *b, uint32_t unit)
{
    const struct nvme_unit *u = &b->unit[unit];
    for (int which = 0; which < 2 && u->swept; which++)
        if (u->best_depth[which]) print_sweep(&u->sweep[which], which ? "writes" : "reads");
    print_steady(u);
    if (together(b, unit)) print_balance(b, unit);
    if (u->backend[0]) printf("  by         %s\n", u->backend);
    printf("\n");
    fflush(stdout);
}

/* What the samples leave open. */
static void print_range(const struct nvme_verdict *v, int i)
{
    if (v->samples < 2) printf(" (from one sample)");
    else
        printf(" (%.1f to %.1f by the samples)", v->model[i].seconds_low,
               v->model[i].seconds_high);
}

static void print_days(double days)
{
    if (days >= 730) printf("  endurance for %.0f years", days / 365);
    else if (days > 0) printf("  endurance for %.0f days", days);
}

void nvme_table_end(const struct nvme_bench *b)
{
    const struct nvme_verdict *v = &b->verdict;
    char size[32];
    if (b->stopped) printf("stopped early: what follows is from what was measured until then\n");
    printf("limit      %s\n", v->what);
    for (uint32_t i = 0; i < v->n_changes; i++)
        printf("%-10s %s\n", i ? "" : "change", v->change[i]);
    for (uint32_t i = 0; i < v->n_settings; i++)
        printf("%-10s %s\n", i ? "" : "train will", v->settings[i]);
    for (int i = 0; i < NVME_MODELS; i++) {
        if (!(v->model[i].seconds > 0)) continue;
        printf("%-10s %3s: %7.1f s", i ? "" : "all state", v->model[i].name, v->model[i].seconds);
        print_range(v, i);
        printf(" a step by storage alone, %s written (%.1f TB a day)",
               mem_size_format((uint64_t)v->model[i].written_bytes, size),
               v->model[i].written_per_day / 1e12);
        print_days(v->model[i].endurance_days);
        printf("\n");
    }
    for (uint32_t i = 0; i < b->n_paths; i++)
        printf("%-10s %s to %s\n", i ? "" : "written", mem_size_format(b->written[i], size),
               b->path[i]);
}
