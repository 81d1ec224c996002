/* bench/nvme_html.c - one page: verdict, plots, tables. `--html FILE`.
 *
 * Owns: the page. Must not know: how anything was measured. Application's thread. Self-contained
 * (nothing is loaded from elsewhere) and well-formed XML as well as HTML. */
#include "base/mem.h"
#include "bench/nvme_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char head[] =
    "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\"><head>"
    "<meta charset=\"utf-8\"/>\n<title>stoker bench nvme</title>\n<style>\n"
    "body{font:15px/1.45 sans-serif;color:#111;background:#fff;max-width:1000px;margin:2em auto;"
    "padding:0 1em}\n"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #999}\n"
    "table{border-collapse:collapse;font-size:13px}"
    "td,th{padding:3px 9px;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}\n"
    "figure{margin:1em 0;max-width:720px}svg{width:100%;height:auto;font:12px sans-serif}\n"
    ".limit{border-left:5px solid #1f4e9c;padding:.4em 1em;background:#f2f5fb}"
    ".bad{color:#b3261e;font-weight:bold}\n"
    "@media print{body{max-width:none;margin:0}figure,tr{break-inside:avoid}}\n"
    "</style></head><body>\n";

static void cell(FILE *f, const char *text)
{
    fputs("<td>", f);
    svg_text(f, text);
    fputs("</td>", f);
}

static void cell_number(FILE *f, double v, const char *format)
{
    char text[64] = "-";
    if (v > 0) {
        if (strcmp(format, "us") == 0) snprintf(text, sizeof text, "%.0f", v / 1e3);
        else if (strcmp(format, "GB/s") == 0) snprintf(text, sizeof text, "%.3f", v / 1e9);
        else snprintf(text, sizeof text, "%.3g", v);
    }
    cell(f, text);
}

static void unit_name(const struct nvme_bench *b, uint32_t unit, char *buf, size_t bytes)
{
    if (unit > 0 && unit + 1 == b->n_units) snprintf(buf, bytes, "all %u together", b->n_paths);
    else snprintf(buf, bytes, "%s", b->path[b->unit[unit].path[0]]);
}

/* --- verdict and drives ----------------------------------------------------------------------- */

static void list(FILE *f, uint32_t n, const char *items, size_t stride)
{
    fputs("<ul>", f);
    for (uint32_t i = 0; i < n; i++) {
        fputs("<li>", f);
        svg_text(f, items + i * stride);
        fputs("</li>", f);
    }
    fputs("</ul>\n", f);
}

static void models(FILE *f, const struct nvme_verdict *v)
{
    char size[32], range[64];
    fputs("<table><tr><th>all state on NVMe</th><th>s a step, storage alone</th><th>by the samples"
          "</th><th>written a step</th><th>TB a day</th><th>days of endurance</th></tr>\n", f);
    for (int i = 0; i < NVME_MODELS; i++) {
        if (!(v->model[i].seconds > 0)) continue;
        fputs("<tr>", f);
        cell(f, v->model[i].name);
        cell_number(f, v->model[i].seconds, "");
        snprintf(range, sizeof range, "%.1f to %.1f", v->model[i].seconds_low,
                 v->model[i].seconds_high);
        cell(f, v->samples > 1 ? range : "one sample");
        cell(f, mem_size_format((uint64_t)v->model[i].written_bytes, size));
        cell_number(f, v->model[i].written_per_day / 1e12, "");
        cell_number(f, v->model[i].endurance_days, "");
        fputs("</tr>\n", f);
    }
    fputs("</table>\n", f);
}

static void verdict(FILE *f, const struct nvme_bench *b)
{
    const struct nvme_verdict *v = &b->verdict;
    fputs("<h2>What limits</h2>\n<p class=\"limit\"><b>", f);
    svg_text(f, nvme_limit_name(v->limit));
    fputs("</b>: ", f);
    svg_text(f, v->what);
    fputs("</p>\n", f);
    if (b->stopped) fputs("<p class=\"bad\">stopped early: not everything was measured</p>\n", f);
    list(f, v->n_changes, v->change[0], sizeof v->change[0]);
    fputs("<p>What <code>train</code> will do:</p>\n", f);
    list(f, v->n_settings, v->settings[0], sizeof v->settings[0]);
    models(f, v);
    if (b->n_notes) list(f, b->n_notes, b->note[0], sizeof b->note[0]);
}

static void drives(FILE *f, const struct nvme_bench *b)
{
    char size[32], text[256];
    fputs("<h2>Drives</h2>\n<table><tr><th>path</th><th>device</th><th>file system</th><th>NUMA"
          "</th><th>link GB/s</th><th>temperature</th><th>endurance used</th><th>written here</th>"
          "</tr>\n", f);
    for (uint32_t i = 0; i < b->n_paths; i++) {
        const struct drive_facts *d = &b->drive[i];
        fputs("<tr>", f);
        cell(f, b->path[i]);
        snprintf(text, sizeof text, "%s %s", d->device, d->model);
        cell(f, text);
        cell(f, d->file_system);
        snprintf(text, sizeof text, "%d", d->numa_node);
        cell(f, d->numa_node >= 0 ? text : "-");
        cell_number(f, d->link_bytes_per_s, "GB/s");
        snprintf(text, sizeof text, "%d C", d->temperature_c);
        cell(f, d->smart ? text : "-");
        snprintf(text, sizeof text, "%u %%", d->percentage_used);
        cell(f, d->smart ? text : "-");
        cell(f, mem_size_format(b->written[i], size));
        fputs("</tr>\n", f);
    }
    fputs("</table>\n", f);
}

/* --- plots ------------------------------------------------------------------------------------ */

static void plot_sweep(FILE *f, const struct nvme_bench *b, const struct nvme_unit *u, int which)
{
    const struct sweep *s = &u->sweep[which];
    double x[SWEEP_MAX][SWEEP_MAX], y[SWEEP_MAX][SWEEP_MAX];
    char name[SWEEP_MAX][32];
    struct svg_plot p = { .title = which ? "Writes: throughput over depth, by block size"
                                         : "Reads: throughput over depth, by block size",
                          .x_label = "requests in flight", .y_label = "GB/s", .log_x = true };
    for (uint32_t k = 0; k < s->n_blocks; k++) {
        uint32_t n = 0;
        for (uint32_t d = 0; d < s->n_depths; d++) {
            if (s->rate[k][d] <= 0) continue;
            x[k][n] = s->depth[d];
            y[k][n++] = s->rate[k][d] / 1e9;
        }
        if (n == 0) continue;
        nvme_size_text(s->block[k], name[k], sizeof name[k]);
        p.series[p.n_series++] = (struct svg_series){ name[k], x[k], y[k], n };
    }
    if (!which && b->n_paths == 1 && b->drive[0].link_bytes_per_s > 0 &&
        u->best_rate[0] > b->drive[0].link_bytes_per_s / 4) {
        p.mark_y = b->drive[0].link_bytes_per_s / 1e9;
        p.mark_name = "link";
    }
    svg_lines(f, &p);
}

static void plot_latency(FILE *f, const struct nvme_bench *b, uint32_t unit)
{
    static const char *const ticks[] = { "p50", "p95", "p99", "p99.9" };
    static const double x[] = { 0, 1, 2, 3 };
    double y[SVG_SERIES_MAX][4];
    char name[SVG_SERIES_MAX][64], size[32];
    struct svg_plot p = { .title = "Latency", .x_label = "percentile of requests",
                          .y_label = "ms (log)", .log_y = true, .x_tick = ticks, .n_ticks = 4 };
    for (uint32_t i = 0; i < b->n_results && p.n_series < 12; i++) {
        const struct nvme_result *r = &b->result[i];
        uint32_t k = p.n_series;
        if (r->unit != unit || r->step > NVME_RANDOM || r->all.max_ns == 0) continue;
        const uint64_t v[] = { r->all.p50_ns, r->all.p95_ns, r->all.p99_ns, r->all.p999_ns };
        for (int q = 0; q < 4; q++) y[k][q] = v[q] > 1000 ? (double)v[q] / 1e6 : 1e-3;
        snprintf(name[k], sizeof name[k], "%s%s %s", r->random ? "rand. " : "",
                 nvme_mode_name(r->mode), nvme_size_text(r->block_bytes, size, sizeof size));
        p.series[p.n_series++] = (struct svg_series){ name[k], x, y[k], 4 };
    }
    svg_lines(f, &p);
}

static void plot_series(FILE *f, const struct nvme_unit *u)
{
    double *y = calloc(u->series.n + 1, sizeof *y);
    bool reads = u->steady_mode == MEASURE_READ;
    struct svg_plot p = { .title = reads ? "Reads over time: burst and sustained"
                                         : "Writes over time: burst and sustained",
                          .x_label = "s", .y_label = "GB/s",
                          .mark_y = u->steady.sustained / 1e9,
                          .mark_name = u->steady.reached ? "sustained (steady)"
                                                         : "last samples (not steady)" };
    for (uint32_t i = 0; y && i < u->series.n; i++) y[i] = u->series.rate[i] / 1e9;
    p.series[0] = (struct svg_series){ reads ? "read" : "write", u->series.at_s, y,
                                        u->series.n };
    p.n_series = y && u->series.n > 1;
    svg_lines(f, &p);
    free(y);
}

static void plot_balance(FILE *f, const struct nvme_bench *b)
{
    uint32_t last = b->n_units - 1;
    double alone[NVME_MODES][NVME_PATHS_MAX], both[NVME_MODES][NVME_PATHS_MAX];
    char name[2 * NVME_MODES][64];
    const char *ticks[NVME_PATHS_MAX];
    char tail[NVME_PATHS_MAX][32];
    struct svg_plot p = { .title = "Balance: each path alone and among all", .x_label = "path",
                          .y_label = "GB/s", .x_tick = ticks, .n_ticks = b->n_paths };
    for (uint32_t i = 0; i < b->n_paths; i++) { /* as much of its end as has room */
        size_t length = strlen(b->path[i]), most = 60 / b->n_paths > 6 ? 60 / b->n_paths : 6;
        if (most > 24) most = 24;
        if (length > most)
            snprintf(tail[i], sizeof tail[i], "..%s", b->path[i] + length - (most - 2));
        else
            snprintf(tail[i], sizeof tail[i], "%s", b->path[i]);
        ticks[i] = tail[i];
    }
    for (int k = 0; k < 3; k++) {
        const struct nvme_result *all =
            nvme_find(b, last, NVME_POINT, (enum measure_mode)k, 1 << 20);
        if (!all) continue;
        for (uint32_t i = 0; i < b->n_paths; i++) {
            const struct nvme_result *one =
                nvme_find(b, i, NVME_POINT, (enum measure_mode)k, 1 << 20);
            alone[k][i] = one ? one->bytes_per_s / 1e9 : 0;
            both[k][i] = all->path_bytes_per_s[i] / 1e9;
        }
        for (int w = 0; w < 2; w++) {
            char *label = name[2 * k + w];
            snprintf(label, sizeof name[0], "%s %s", nvme_mode_name(all->mode),
                     w ? "together" : "alone");
            p.series[p.n_series++] =
                (struct svg_series){ label, alone[k], w ? both[k] : alone[k], b->n_paths };
        }
    }
    svg_bars(f, &p);
}

/* --- results ---------------------------------------------------------------------------------- */

static void result_row(FILE *f, const struct nvme_result *r)
{
    char size[32], text[64];
    static const char *const steps[] = { "", "random ", "sustained ", "again ", "sweep " };
    snprintf(text, sizeof text, "%s%s", steps[r->step], nvme_mode_name(r->mode));
    fputs("<tr>", f);
    cell(f, text);
    cell(f, nvme_size_text(r->block_bytes, size, sizeof size));
    cell_number(f, r->depth, "");
    cell_number(f, r->bytes_per_s, "GB/s");
    cell_number(f, r->fio_bytes_per_s, "GB/s");
    cell_number(f, r->share_of_fio, "");
    cell_number(f, (double)r->all.p50_ns, "us");
    cell_number(f, (double)r->all.p95_ns, "us");
    cell_number(f, (double)r->all.p99_ns, "us");
    cell_number(f, (double)r->all.p999_ns, "us");
    if (r->valid) {
        cell(f, "yes");
    } else {
        fputs("<td class=\"bad\">no: ", f);
        svg_text(f, r->why);
        fputs("</td>", f);
    }
    fputs("</tr>\n", f);
}

static void unit_section(FILE *f, const struct nvme_bench *b, uint32_t unit)
{
    const struct nvme_unit *u = &b->unit[unit];
    char name[512];
    unit_name(b, unit, name, sizeof name);
    fputs("<h2>", f);
    svg_text(f, name);
    fputs("</h2>\n<p>", f);
    svg_text(f, u->backend);
    fputs("</p>\n", f);
    for (int which = 0; which < 2 && u->swept; which++) plot_sweep(f, b, u, which);
    plot_latency(f, b, unit);
    plot_series(f, u);
    if (unit > 0 && unit + 1 == b->n_units) plot_balance(f, b);
    fputs("<table><tr><th>pattern</th><th>block</th><th>depth</th><th>GB/s</th><th>fio GB/s</th>"
          "<th>share</th><th>p50 us</th><th>p95 us</th><th>p99 us</th><th>p99.9 us</th>"
          "<th>valid</th></tr>\n", f);
    for (uint32_t i = 0; i < b->n_results; i++)
        if (b->result[i].unit == unit) result_row(f, &b->result[i]);
    fputs("</table>\n", f);
}

static void page(FILE *f, const struct nvme_bench *b)
{
    char when[64] = "";
    time_t now = time(NULL);
    struct tm t;
    if (localtime_r(&now, &t)) strftime(when, sizeof when, "%Y-%m-%d %H:%M", &t);
    fputs(head, f);
    fprintf(f, "<h1>stoker bench nvme</h1>\n<p>%s; beside it ", when);
    svg_text(f, b->fio.version[0] ? b->fio.version : "no fio");
    fputs("</p>\n", f);
    if (b->n_results > 0) verdict(f, b);
    drives(f, b);
    for (uint32_t i = 0; i < b->n_units; i++) unit_section(f, b, i);
    fputs("</body></html>\n", f);
}

stk_status nvme_html_write(const struct nvme_bench *b, const char *file, struct stk_error *err)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (f) page(f, b);
    bool good = f && !ferror(f);
    if (f && fclose(f) != 0) good = false;
    stk_status st = good ? nvme_text_write(file, text, err)
                         : stk_error_set(err, STK_ERR_NOMEM, errno, "no memory for the text of %s",
                                         file);
    free(text);
    return st;
}
