/* engine/nvme_stats.c - what the transfers of a step took: latency of reads, time with something in
 * flight.
 *
 * Fixed size, nothing is allocated. nvme_stats_begin and _end run on the engine lane, which alone
 * starts and ends transfers of a run; reset and fill on the application's thread, while no run is
 * active. A read's latency is the store's: from its acceptance, waiting for its turn at the drive
 * included, to verified bytes; what of it was the drive's own is kept apart. Must not know plans. */
#include "engine/engine.h"
#include <string.h>

static struct io_stats io_counts(const stk_engine *e)
{
    struct io_stats io = { 0 };
    if (e->io) io_stats_read(e->io, &io);
    return io;
}

void nvme_stats_reset(stk_engine *e)
{
    memset(&e->nvme_stats, 0, sizeof e->nvme_stats);
    const struct io_stats io = io_counts(e);
    e->nvme_stats.drive_ns = io.busy_ns;
    e->nvme_stats.full_ns = io.full_ns;
    e->nvme_stats.full_bytes = io.full_bytes;
}

void nvme_stats_begin(stk_engine *e, bool read)
{
    struct eng_nvme_stats *s = &e->nvme_stats;
    if (s->in_flight++ == 0) s->busy_since_ns = exec_now_ns(e->ex);
    if (!read) s->writes++;
}

void nvme_stats_end(stk_engine *e, const struct store_op *op, bool read, bool demand)
{
    struct eng_nvme_stats *s = &e->nvme_stats;
    uint64_t now = exec_now_ns(e->ex);
    STK_ASSERT(s->in_flight > 0);
    if (--s->in_flight == 0) s->busy_ns += now - s->busy_since_ns;
    if (!read) {
        s->writes--;
        s->last_write_ns = now;
    } else if (op->done_ns >= op->submit_ns) {
        bool beside = s->writes > 0 || s->last_write_ns > op->submit_ns;
        measure_histogram_add(&s->reads, op->done_ns - op->submit_ns);
        measure_histogram_add(&s->whole[beside], op->done_ns - op->submit_ns);
        if (demand) measure_histogram_add(&s->demand[beside], op->done_ns - op->submit_ns);
        if (op->drive_ns) measure_histogram_add(&s->drive[beside], op->drive_ns);
    }
}

void nvme_stats_fill(const stk_engine *e, stk_step_stats *out)
{
    const struct eng_nvme_stats *s = &e->nvme_stats;
    const struct io_stats io = io_counts(e);
    out->nvme_busy_ns = s->busy_ns;
    out->nvme_drive_ns = io.busy_ns - s->drive_ns;
    out->nvme_full_ns = io.full_ns - s->full_ns;
    out->nvme_full_bytes = io.full_bytes - s->full_bytes;
    out->nvme_short = io.short_transfers;
    out->nvme_retries = io.retries;
    out->nvme_read_p99_ns = measure_percentile(&s->reads, 0.99);
    out->nvme_read_alone_p99_ns = measure_percentile(&s->whole[0], 0.99);
    out->nvme_read_beside_p99_ns = measure_percentile(&s->whole[1], 0.99);
    for (int i = 0; i < 2; i++) {
        out->nvme_demand_p99_ns[i] = measure_percentile(&s->demand[i], 0.99);
        out->nvme_drive_p99_ns[i] = measure_percentile(&s->drive[i], 0.99);
    }
}
