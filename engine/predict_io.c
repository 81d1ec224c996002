/* engine/predict_io.c - the order of transfers in a prediction: nvme/io.c's choice of what goes to a
 * drive next, with its places, bytes in flight, classes and limit of writes beside reads.
 *
 * Owns what waits for each drive. Must not know what a transfer carries, nor how long it takes
 * (predict.c). Any thread; pure. What is on the drive is served in the order in which it got there:
 * reads and writes by one server where the drive moves no more with both at once, else by one each. A
 * transfer above IO_TRANSFER_MAX counts as one part here. */
#include "engine/predict.h"

#define PLACES 32u             /* io_cfg.depth */
#define WRITE_PLACES 16u       /* io_cfg.write_depth */
#define READS_PER_WRITE 8u     /* nvme/io_impl.h */

static int first_class(const struct predict_drive *d, int write)
{
    int c = 0;
    while (c < PREDICT_IO_CLASSES && d->waiting[c][write].n == 0) c++;
    return c;
}

static void start(struct predict_world *w, struct predict_drive *d, int cls, int write)
{
    struct predict_fifo *f = &d->waiting[cls][write];
    struct predict_work work = f->work[f->first];
    f->first = (f->first + 1) % PREDICT_FIFO;
    f->n--;
    d->in_flight[write]++;
    d->bytes[write] += work.bytes;
    if (write) {
        d->reads_ahead = 0;
        if (d->reads_recent > 0 && d->in_flight[0] == 0) d->reads_recent--;
    } else {
        d->reads_ahead = first_class(d, 1) < PREDICT_IO_CLASSES ? d->reads_ahead + 1 : 0;
        d->reads_recent = PLACES;
    }
    uint32_t index = (uint32_t)(d - w->drive);
    predict_put(w, (write && !d->one_server ? PREDICT_WRITE0 : PREDICT_READ0) + index, 0, &work);
}

static bool fits(const struct predict_drive *d, uint64_t in_flight, int cls, int write, uint64_t limit)
{
    const struct predict_fifo *f = &d->waiting[cls][write];
    return limit == 0 || in_flight == 0 || in_flight + f->work[f->first].bytes <= limit;
}

static void start_all(struct predict_world *w, struct predict_drive *d)
{
    while (d->in_flight[0] + d->in_flight[1] < PLACES) {
        int r = first_class(d, 0), x = first_class(d, 1);
        bool reads = r < PREDICT_IO_CLASSES || d->in_flight[0] > 0 || d->reads_recent > 0;
        bool write = x < PREDICT_IO_CLASSES &&
                     (!reads || (d->in_flight[1] < WRITE_PLACES &&
                                 fits(d, d->bytes[1], x, 1, d->limit_bytes / 2)));
        write = write && (x < r || d->reads_ahead >= READS_PER_WRITE);
        int cls = write ? x : r;
        if (cls == PREDICT_IO_CLASSES || !fits(d, d->bytes[0] + d->bytes[1], cls, write, d->limit_bytes))
            break;
        start(w, d, cls, write);
    }
}

void predict_io_put(struct predict_world *w, uint32_t drive, uint32_t cls, bool write,
                    const struct predict_work *work)
{
    struct predict_fifo *f = &w->drive[drive].waiting[cls][write];
    STK_ASSERT(cls < PREDICT_IO_CLASSES && f->n < PREDICT_FIFO);
    f->work[(f->first + f->n++) % PREDICT_FIFO] = *work;
    start_all(w, &w->drive[drive]);
}

void predict_io_done(struct predict_world *w, uint32_t drive, bool write, uint64_t bytes)
{
    STK_ASSERT(w->drive[drive].in_flight[write] > 0);
    w->drive[drive].in_flight[write]--;
    w->drive[drive].bytes[write] -= bytes;
    start_all(w, &w->drive[drive]);
}
