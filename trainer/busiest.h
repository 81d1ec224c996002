/* trainer/busiest.h - which resource bound the steps, and how far above its own time they were.
 *
 * A resource's OWN TIME is what it needs for what the steps asked of it, at full use and with nothing to
 * wait for: no step is shorter than the busiest one's. Of compute that is the time it computed. Of NVMe it
 * is bytes over a rate, and there are two: the rates measured before the run (one second: a cache that
 * fills, a limit that allows bursts or a neighbour make them untrue), and what the drive gave in the run
 * while its queue was full, that is while more was asked of it than is given to it at once. The second is
 * the drive's as it was, so it counts where there is enough of it. Time with a transfer at the drive is no
 * own time: with one request in flight a drive is not busy, only occupied; it is but a bound.
 *
 * Pure; any thread. */
#ifndef TRAINER_BUSIEST_H
#define TRAINER_BUSIEST_H

#include <stdbool.h>

/* Seconds that a drive needs for these bytes at its measured rates (bytes a second; `both`: the sum of
 * reads and writes while both go on): the better of one after the other, and of as much as possible at
 * once, the rest alone. 0: not measured. */
double busiest_drive_s(double read_rate, double write_rate, double both_rate, double read, double write);

enum busiest_by {
    BUSIEST_BY_QUEUE, /* the drive's rate with its queue full */
    BUSIEST_BY_RATES, /* the rates measured before the run */
    BUSIEST_BY_TIME,  /* the bound: time with a transfer at the drives */
};

struct busiest_in {          /* sums over steps */
    double step_s, compute_s;
    double at_drive_s;       /* with a transfer at the drives */
    double bytes;            /* read and written by the steps */
    double rates_s;          /* these bytes at the measured rates; 0: not measured */
    double full_s, full_bytes; /* with the queue full, and what moved then */
    unsigned drives;         /* that hold something */
};

struct busiest {
    enum busiest_by by;
    bool nvme;               /* it is NVMe */
    double nvme_s;           /* NVMe's own time */
    double ratio;            /* the steps' time over the busiest one's own */
    double queue_rate;       /* bytes a second with the queue full; 0: too little of that, or several
                              * drives, whose rates differ */
};

struct busiest busiest_find(const struct busiest_in *in);

#endif
