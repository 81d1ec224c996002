/* trainer/wear.c - what a run says of its drives: bytes of a step on each, what that is a day, and
 * how long the drive lasts; at the end, which resource bound the steps.
 *
 * Owns: the form of these lines. Must not know: how transfers run. Application's thread. */
#include "trainer/wear.h"
#include "base/mem.h"
#include "trainer/busiest.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define DAY_S 86400.0

/* The folders of one drive together: bytes of `read` and `write` arrays, in drive `first`. */
static void add_up(const stk_engine *e, uint32_t first, const double *read, const double *write,
                   double *r, double *w)
{
    stk_drive d;
    *r = *w = 0;
    for (uint32_t i = 0; stk_drive_info(e, i, &d); i++) {
        if (d.first_of_drive != first) continue;
        *r += read[i];
        *w += write[i];
    }
}

/* Seconds of the slowest drive for these bytes of each folder; 0: not measured. */
static double nvme_seconds(const stk_engine *e, const double *read, const double *write)
{
    double most = 0, r, w;
    stk_drive d;
    for (uint32_t i = 0; stk_drive_info(e, i, &d); i++) {
        if (d.first_of_drive != i) continue;
        add_up(e, i, read, write, &r, &w);
        double s = busiest_drive_s(d.read_bytes_per_s, d.write_bytes_per_s, d.both_bytes_per_s, r,
                                   w);
        if (s > most) most = s;
    }
    return most;
}

/* "; its endurance ..., lasts N days so" */
static void print_life(const stk_drive *d, double bytes_per_day)
{
    if (d->percentage_used == UINT32_MAX) {
        printf(", endurance unknown (SMART cannot be read)\n");
        return;
    }
    printf(", %u %% of its endurance used", d->percentage_used);
    if (d->endurance_bytes > 0 && bytes_per_day > 0) {
        double left = d->endurance_bytes - d->written_bytes;
        printf(" (%.0f of an estimated %.0f TB): ", d->written_bytes / 1e12,
               d->endurance_bytes / 1e12);
        if (left > 0) printf("at this rate it lasts %.0f days more", left / bytes_per_day);
        else printf("no more is promised");
    }
    printf("\n");
}

static void planned(const stk_engine *e, double *read, double *write)
{
    stk_drive d;
    for (uint32_t i = 0; i < STK_NVME_MAX && stk_drive_info(e, i, &d); i++) {
        read[i] = (double)d.step_read_bytes;
        write[i] = (double)d.step_write_bytes;
    }
}

void wear_step_bytes(const stk_engine *e, double *read, double *write)
{
    stk_drive d;
    *read = *write = 0;
    for (uint32_t i = 0; stk_drive_info(e, i, &d); i++) {
        *read += (double)d.step_read_bytes;
        *write += (double)d.step_write_bytes;
    }
}

void wear_start(const stk_engine *e)
{
    double read[STK_NVME_MAX] = { 0 }, write[STK_NVME_MAX] = { 0 }, r, w;
    char a[32], b[32];
    stk_drive d;
    if (wear_step_bytes(e, &r, &w), r + w <= 0) return;
    planned(e, read, write);
    double step_s = nvme_seconds(e, read, write);
    for (uint32_t i = 0; stk_drive_info(e, i, &d); i++) {
        printf("drive      %s: a step reads %s and writes %s (%.1f %% of the state there)\n",
               d.path, mem_size_format(d.step_read_bytes, a),
               mem_size_format(d.step_write_bytes, b), 100 * d.weight);
        if (d.first_of_drive != i) continue;
        add_up(e, i, read, write, &r, &w);
        if (w <= 0) continue;
        if (step_s > 0) {
            printf("           at most %.2f TB written a day, with steps as short as the drives "
                   "allow (%.3g s)",
                   w / step_s * DAY_S / 1e12, step_s);
            print_life(&d, w / step_s * DAY_S);
        } else {
            printf("           written a day: known after the run's first steps (the drive was not "
                   "measured)");
            print_life(&d, 0);
        }
    }
}

void wear_begin(struct wear *v, const stk_engine *e)
{
    stk_drive d;
    *v = (struct wear){ 0 };
    for (uint32_t i = 0; i < STK_NVME_MAX && stk_drive_info(e, i, &d); i++) {
        v->seen_read[i] = d.read_bytes;
        v->seen_write[i] = d.write_bytes;
    }
}

/* What moved on each folder since the last call; also appended to `list` where there is one. */
static void add_moved(struct wear *v, const stk_engine *e, json_t *list)
{
    stk_drive d;
    for (uint32_t i = 0; i < STK_NVME_MAX && stk_drive_info(e, i, &d); i++) {
        uint64_t r = d.read_bytes - v->seen_read[i], w = d.write_bytes - v->seen_write[i];
        v->seen_read[i] = d.read_bytes;
        v->seen_write[i] = d.write_bytes;
        v->read[i] += (double)r;
        v->write[i] += (double)w;
        if (!list) continue;
        json_t *j = json_object();
        json_object_set_new(j, "path", json_string(d.path));
        json_object_set_new(j, "read", json_integer((json_int_t)r));
        json_object_set_new(j, "write", json_integer((json_int_t)w));
        json_array_append_new(list, j);
    }
}

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

json_t *wear_step(struct wear *v, const stk_engine *e, const stk_step_stats *s, double step_s)
{
    json_t *all = json_array();
    v->steps++;
    v->step_s += step_s;
    v->compute_s += (double)s->compute_ns / 1e9;
    v->busy_s += (double)s->nvme_busy_ns / 1e9;
    v->full_s += (double)s->nvme_full_ns / 1e9;
    v->full_bytes += (double)s->nvme_full_bytes;
    v->step_read += (double)s->nvme_read_bytes;
    v->step_write += (double)s->nvme_write_bytes;
    v->drive_s += (double)s->nvme_drive_ns / 1e9;
    uint64_t whole[2] = { s->nvme_read_alone_p99_ns, s->nvme_read_beside_p99_ns };
    for (int i = 0; i < 2; i++) {
        v->whole_ns[i] = later(v->whole_ns[i], whole[i]);
        v->demand_ns[i] = later(v->demand_ns[i], s->nvme_demand_p99_ns[i]);
        v->at_drive_ns[i] = later(v->at_drive_ns[i], s->nvme_drive_p99_ns[i]);
    }
    v->short_transfers = s->nvme_short;
    v->retries = s->nvme_retries;
    add_moved(v, e, all);
    return all;
}

/* Seconds of the slowest drive for what the steps themselves moved: what checkpoints and fills moved
 * in between is in v->read and v->write, so these say the drives' shares only. */
static double steps_nvme_seconds(const struct wear *v, const stk_engine *e)
{
    double read[STK_NVME_MAX], write[STK_NVME_MAX], r = 0, w = 0;
    for (int i = 0; i < STK_NVME_MAX; i++) r += v->read[i], w += v->write[i];
    for (int i = 0; i < STK_NVME_MAX; i++) {
        read[i] = r > 0 ? v->step_read * v->read[i] / r : 0;
        write[i] = w > 0 ? v->step_write * v->write[i] / w : 0;
    }
    return nvme_seconds(e, read, write);
}

static const char *ms(uint64_t ns, char buf[32])
{
    if (ns == 0) return "none"; /* no such read */
    snprintf(buf, 32, "%.2f ms", (double)ns / 1e6);
    return buf;
}

/* The drive's own time is what the measurement at the start can be compared with; reads ahead of
 * their use wait for their turn behind others, and nobody waits for them. */
static void print_latency(const struct wear *v)
{
    char b[6][32];
    printf("           reads' p99 in the worst step, alone / with writes beside: at the drive %s / %s; "
           "what is waited for, from request to checked bytes, %s / %s; all, read ahead and waiting "
           "for their turn too, %s / %s\n",
           ms(v->at_drive_ns[0], b[0]), ms(v->at_drive_ns[1], b[1]), ms(v->demand_ns[0], b[2]),
           ms(v->demand_ns[1], b[3]), ms(v->whole_ns[0], b[4]), ms(v->whole_ns[1], b[5]));
}

/* Drives on which something of the steps lies. */
static unsigned drives_used(const struct wear *v, const stk_engine *e)
{
    unsigned n = 0;
    double r, w;
    stk_drive d;
    for (uint32_t i = 0; stk_drive_info(e, i, &d); i++) {
        if (d.first_of_drive != i) continue;
        add_up(e, i, v->read, v->write, &r, &w);
        n += r + w > 0;
    }
    return n;
}

/* What NVMe's own time was taken from, and what the other figures would say (busiest.h). */
static void print_basis(const struct wear *v, const struct busiest_in *in, const struct busiest *b)
{
    const double percent = 100 / v->step_s;
    if (b->by == BUSIEST_BY_QUEUE)
        printf(" (bytes over %.2f GB/s, which the drive gave with its queue full, %.1f %% of the time",
               b->queue_rate / 1e9, in->full_s * percent);
    else if (b->by == BUSIEST_BY_RATES)
        printf(" (bytes over the rates measured at the start");
    else
        printf(" (with a transfer at the drives, the most it can be: they were not measured");
    if (b->by == BUSIEST_BY_QUEUE && in->rates_s > 0)
        printf("; over the rates measured at the start %.1f %%", in->rates_s * percent);
    if (b->by != BUSIEST_BY_TIME)
        printf("; a transfer was at the drives %.1f %%",
               (v->drive_s < v->step_s ? v->drive_s : v->step_s) * percent);
    printf(")");
}

static void print_busiest(const struct wear *v, const stk_engine *e, double visits_alone_s)
{
    const struct busiest_in in = { .step_s = v->step_s,       .compute_s = v->compute_s,
                                   .at_drive_s = v->drive_s,  .bytes = v->step_read + v->step_write,
                                   .rates_s = steps_nvme_seconds(v, e),
                                   .full_s = v->full_s,       .full_bytes = v->full_bytes,
                                   .drives = drives_used(v, e) };
    const struct busiest b = busiest_find(&in);
    double compute = 100 * v->compute_s / v->step_s;
    if (v->busy_s <= 0) {
        printf("busiest    compute, %.1f %% of the steps' time; nothing moved over NVMe\n",
               compute);
        return;
    }
    printf("busiest    %s, a step takes %.2fx of its time: compute %.1f %% of the steps' time, "
           "NVMe %.1f %%",
           b.nvme ? "NVMe" : "compute", b.ratio, compute, 100 * b.nvme_s / v->step_s);
    print_basis(v, &in, &b);
    if (visits_alone_s > 0)
        printf("\n           compute is %.3f s a step as it ran, with the update, checksums and "
               "transfers on its cores; visits alone, tried at the start, are %.3f s",
               v->compute_s / (double)v->steps, visits_alone_s);
    printf("\nNVMe       at the drives %.1f %% of the time with NVMe work under way\n",
           v->busy_s > 0 && v->drive_s < v->busy_s ? 100 * v->drive_s / v->busy_s : 100);
    print_latency(v);
    if (v->retries)
        printf("           %" PRIu64 " transfers were cut short by the kernel, %" PRIu64
               " parts were given again: every byte arrived\n",
               v->short_transfers, v->retries);
}

void wear_end(struct wear *v, const stk_engine *e, double visits_alone_s)
{
    double r, w;
    char a[32];
    stk_drive d;
    if (v->steps == 0 || !(v->step_s > 0)) return;
    add_moved(v, e, NULL); /* the last step's update is written after its line */
    for (uint32_t i = 0; stk_drive_info(e, i, &d); i++) {
        if (d.first_of_drive != i) continue;
        add_up(e, i, v->read, v->write, &r, &w);
        if (w <= 0) continue;
        printf("writes     %s to %s per step, at this speed %.2f TB a day",
               mem_size_format((uint64_t)(w / (double)v->steps), a),
               d.device[0] ? d.device : d.path,
               w / v->step_s * DAY_S / 1e12);
        print_life(&d, w / v->step_s * DAY_S);
    }
    print_busiest(v, e, visits_alone_s);
}
