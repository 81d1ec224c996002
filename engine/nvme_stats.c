/* engine/nvme_stats.c - what the transfers of a step took: latency of reads, time with something in
 * flight.
 *
 * Fixed size, nothing is allocated. nvme_stats_begin and _end run on the engine lane, which alone
 * starts and ends transfers of a run; reset and fill on the application's thread, while no run is
 * active. A read's latency is the store's: from its acceptance, waiting for the drive included, to
 * verified bytes. Must not know plans. */
#include "engine/engine.h"
#include <string.h>

void nvme_stats_reset(stk_engine *e) { memset(&e->nvme_stats, 0, sizeof e->nvme_stats); }

void nvme_stats_begin(stk_engine *e)
{
    struct eng_nvme_stats *s = &e->nvme_stats;
    if (s->in_flight++ == 0) s->busy_since_ns = exec_now_ns(e->ex);
}

void nvme_stats_end(stk_engine *e, const struct store_op *op, bool read)
{
    struct eng_nvme_stats *s = &e->nvme_stats;
    STK_ASSERT(s->in_flight > 0);
    if (--s->in_flight == 0) s->busy_ns += exec_now_ns(e->ex) - s->busy_since_ns;
    if (read && op->done_ns >= op->submit_ns)
        measure_histogram_add(&s->reads, op->done_ns - op->submit_ns);
}

void nvme_stats_fill(const stk_engine *e, stk_step_stats *out)
{
    out->nvme_busy_ns = e->nvme_stats.busy_ns;
    out->nvme_read_p99_ns = measure_percentile(&e->nvme_stats.reads, 0.99);
}
