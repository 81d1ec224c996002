/* bench/nvme_svg.c - line and bar plots as inline SVG.
 *
 * Owns: axes, ticks, strokes. Must not know: what is plotted. Application's thread. Well-formed
 * XML; no scripts, fonts or files from elsewhere; series differ by dash as well as by shade, so
 * that a print without colour can be read. */
#include "bench/nvme_impl.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 640, HEIGHT = 300, LEFT = 64, RIGHT = 150, TOP = 34, BOTTOM = 46 };
static const char *const strokes[] = { "#1f4e9c", "#b3261e", "#1b7a3d", "#8a5a00",
                                       "#6a3d9a", "#00707a", "#555555", "#c2185b",
                                       "#000000", "#7a7a00", "#3b3b98", "#b06000" };
static const char *const dashes[] = { "none", "7 3", "2 3", "9 3 2 3", "12 4", "4 4", "1 4", "6 2",
                                      "3 1", "10 2", "1 2", "5 5" };
enum { STROKE_N = sizeof strokes / sizeof strokes[0] };

struct axes { double x0, x1, y0, y1; bool log_x, log_y; };

void svg_text(FILE *f, const char *text)
{
    for (const char *c = text; *c; c++)
        switch (*c) {
        case '&': fputs("&amp;", f); break;
        case '<': fputs("&lt;", f); break;
        case '>': fputs("&gt;", f); break;
        case '"': fputs("&quot;", f); break;
        default: fputc((unsigned char)*c < 32 ? ' ' : *c, f);
        }
}

static double scale(double v, double low, double high, bool logarithmic)
{
    if (logarithmic) {
        v = log10(v);
        low = log10(low);
        high = log10(high);
    }
    return high > low ? (v - low) / (high - low) : 0.5;
}

static double at_x(const struct axes *a, double x)
{
    return LEFT + scale(x, a->x0, a->x1, a->log_x) * (WIDTH - LEFT - RIGHT);
}

static double at_y(const struct axes *a, double y)
{
    return HEIGHT - BOTTOM - scale(y, a->y0, a->y1, a->log_y) * (HEIGHT - TOP - BOTTOM);
}

static void text_at(FILE *f, double x, double y, const char *anchor, const char *text)
{
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor);
    svg_text(f, text);
    fputs("</text>\n", f);
}

static void open_svg(FILE *f, const struct svg_plot *p)
{
    fprintf(f, "<figure><svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" "
               "role=\"img\"><title>", WIDTH, HEIGHT);
    svg_text(f, p->title);
    fputs("</title>\n", f);
    fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"none\" "
               "stroke=\"#888\"/>\n",
            LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    text_at(f, LEFT, 18, "start", p->title);
    text_at(f, LEFT + (WIDTH - LEFT - RIGHT) / 2.0, HEIGHT - 8, "middle", p->x_label);
    text_at(f, LEFT - 4, TOP - 6, "end", p->y_label);
}

static void legend(FILE *f, const struct svg_plot *p)
{
    for (uint32_t k = 0; k < p->n_series; k++) {
        double y = TOP + 10 + 16.0 * k;
        fprintf(f, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"%s\" "
                   "stroke-width=\"2\" stroke-dasharray=\"%s\"/>\n",
                WIDTH - RIGHT + 8, y, WIDTH - RIGHT + 32, y, strokes[k % STROKE_N],
                dashes[k % STROKE_N]);
        text_at(f, WIDTH - RIGHT + 36, y + 4, "start", p->series[k].name);
    }
}

/* Bars come in pairs of one colour, strong and pale. */
static void bar(FILE *f, double x, double y, double width, double height, uint32_t k)
{
    fprintf(f, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\" "
               "fill-opacity=\"%.2f\" stroke=\"#000\" stroke-width=\"0.5\"/>\n",
            x, y, width, height, strokes[k / 2 % STROKE_N], k % 2 ? 0.35 : 0.9);
}

static void legend_bars(FILE *f, const struct svg_plot *p)
{
    for (uint32_t k = 0; k < p->n_series; k++) {
        double y = TOP + 10 + 16.0 * k;
        bar(f, WIDTH - RIGHT + 14, y - 5, 14, 10, k);
        text_at(f, WIDTH - RIGHT + 36, y + 4, "start", p->series[k].name);
    }
}

static struct axes fit(const struct svg_plot *p)
{
    struct axes a = { INFINITY, -INFINITY, INFINITY, -INFINITY, p->log_x, p->log_y };
    for (uint32_t k = 0; k < p->n_series; k++)
        for (uint32_t i = 0; i < p->series[k].n; i++) {
            a.x0 = fmin(a.x0, p->series[k].x[i]);
            a.x1 = fmax(a.x1, p->series[k].x[i]);
            a.y0 = fmin(a.y0, p->series[k].y[i]);
            a.y1 = fmax(a.y1, p->series[k].y[i]);
        }
    a.y1 = fmax(a.y1, p->mark_y) * 1.08;
    if (!a.log_x) a.x0 = fmin(a.x0, 0);
    if (a.log_y) a.y0 = pow(10, floor(log10(fmax(a.y0, 1e-3))));
    else a.y0 = 0;
    if (!(a.y1 > a.y0)) a.y1 = a.y0 + 1;
    if (p->x_tick) {
        a.x0 = -0.5;
        a.x1 = p->n_ticks - 0.5;
    }
    return a;
}

static void tick_y(FILE *f, const struct axes *a, double v)
{
    char label[32];
    double y = at_y(a, v);
    snprintf(label, sizeof label, "%.4g", v);
    fprintf(f, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", LEFT, y,
            WIDTH - RIGHT, y);
    text_at(f, LEFT - 6, y + 4, "end", label);
}

static void ticks_y(FILE *f, const struct axes *a)
{
    if (a->log_y) {
        static const double parts[] = { 1, 2, 5 };
        for (double v = a->y0; v <= a->y1; v *= 10)
            for (int i = 0; i < 3; i++)
                if (v * parts[i] <= a->y1) tick_y(f, a, v * parts[i]);
        return;
    }
    double raw = a->y1 / 5, unit = pow(10, floor(log10(raw)));
    double step = raw / unit > 5 ? 10 * unit : raw / unit > 2 ? 5 * unit : raw / unit > 1
                      ? 2 * unit : unit;
    for (double v = 0; v <= a->y1; v += step) tick_y(f, a, v);
}

static void ticks_x(FILE *f, const struct svg_plot *p, const struct axes *a)
{
    char label[32];
    for (uint32_t i = 0; p->x_tick && i < p->n_ticks; i++)
        text_at(f, at_x(a, i), HEIGHT - BOTTOM + 16, "middle", p->x_tick[i]);
    if (p->x_tick) return;
    for (double v = a->x0; a->log_x && v <= a->x1 * 1.001; v *= 2) {
        snprintf(label, sizeof label, "%.4g", v);
        text_at(f, at_x(a, v), HEIGHT - BOTTOM + 16, "middle", label);
    }
    for (int i = 0; i <= 4 && !a->log_x; i++) {
        double v = a->x0 + (a->x1 - a->x0) * i / 4;
        snprintf(label, sizeof label, "%.3g", v);
        text_at(f, at_x(a, v), HEIGHT - BOTTOM + 16, "middle", label);
    }
}

static void mark(FILE *f, const struct svg_plot *p, const struct axes *a)
{
    if (!(p->mark_y > 0)) return;
    double y = at_y(a, p->mark_y);
    fprintf(f, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#000\" "
               "stroke-dasharray=\"3 3\"/>\n", LEFT, y, WIDTH - RIGHT, y);
    text_at(f, WIDTH - RIGHT - 4, y - 4, "end", p->mark_name);
}

void svg_lines(FILE *f, const struct svg_plot *p)
{
    struct axes a = fit(p);
    if (p->n_series == 0) return;
    open_svg(f, p);
    ticks_y(f, &a);
    ticks_x(f, p, &a);
    for (uint32_t k = 0; k < p->n_series; k++) {
        const struct svg_series *s = &p->series[k];
        fprintf(f, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" "
                   "stroke-dasharray=\"%s\" points=\"", strokes[k % STROKE_N], dashes[k % STROKE_N]);
        for (uint32_t i = 0; i < s->n; i++)
            fprintf(f, "%.1f,%.1f ", at_x(&a, s->x[i]), at_y(&a, s->y[i]));
        fputs("\"/>\n", f);
        for (uint32_t i = 0; i < s->n && s->n <= 16; i++)
            fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n",
                    at_x(&a, s->x[i]), at_y(&a, s->y[i]), strokes[k % STROKE_N]);
    }
    mark(f, p, &a);
    legend(f, p);
    fputs("</svg></figure>\n", f);
}

void svg_bars(FILE *f, const struct svg_plot *p)
{
    struct axes a = fit(p);
    if (p->n_series == 0 || p->n_ticks == 0) return;
    double wide = 0.8 / p->n_series;
    open_svg(f, p);
    ticks_y(f, &a);
    ticks_x(f, p, &a);
    for (uint32_t k = 0; k < p->n_series; k++)
        for (uint32_t i = 0; i < p->series[k].n; i++) {
            double x = at_x(&a, i - 0.4 + wide * k), end = at_x(&a, i - 0.4 + wide * (k + 1));
            double y = at_y(&a, p->series[k].y[i]);
            bar(f, x, y, end - x, HEIGHT - BOTTOM - y, k);
        }
    mark(f, p, &a);
    legend_bars(f, p);
    fputs("</svg></figure>\n", f);
}
