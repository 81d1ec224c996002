/* trainer/busiest.c - see busiest.h. Pure arithmetic: knows no engine and prints nothing. */
#include "trainer/busiest.h"

#define ENOUGH 0.05 /* of the steps' time with the queue full: then its rate is known */

double busiest_drive_s(double read_rate, double write_rate, double both_rate, double read, double write)
{
    if (!(both_rate > 0)) return 0;
    double each = read < write ? read : write, s = 2 * each / both_rate;
    if (read > each) s += (read - each) / (read_rate > 0 ? read_rate : both_rate);
    if (write > each) s += (write - each) / (write_rate > 0 ? write_rate : both_rate);
    if (!(read_rate > 0) || !(write_rate > 0)) return s;
    double apart = read / read_rate + write / write_rate;
    return apart < s ? apart : s;
}

struct busiest busiest_find(const struct busiest_in *in)
{
    struct busiest b = { .by = BUSIEST_BY_TIME };
    double most_s = in->at_drive_s < in->step_s ? in->at_drive_s : in->step_s;
    if (in->drives == 1 && in->full_s > ENOUGH * in->step_s && in->full_bytes > 0)
        b.queue_rate = in->full_bytes / in->full_s;
    b.nvme_s = most_s;
    if (b.queue_rate > 0) {
        b.by = BUSIEST_BY_QUEUE;
        /* all the bytes moved within most_s: what says more errs */
        if (in->bytes / b.queue_rate < most_s) b.nvme_s = in->bytes / b.queue_rate;
    } else if (in->rates_s > 0) {
        b.by = BUSIEST_BY_RATES;
        b.nvme_s = in->rates_s;
    }
    b.nvme = b.nvme_s > in->compute_s;
    double own_s = b.nvme ? b.nvme_s : in->compute_s;
    b.ratio = own_s > 0 ? in->step_s / own_s : 0;
    return b;
}
