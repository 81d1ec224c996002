/* nvme/measure_store.h - the same measurement through the extent store: what checksums, the table
 * of versions and the hand-offs between threads cost.
 *
 * Each file's blocks become extents of `block_bytes`, striped over the paths by equal weights, one
 * slot each, and all written once at open. Reads are store_get, writes store_put of a new version,
 * the flush at the end is that of the store's files. Latencies are those of whole operations,
 * checksums and the wait for a place in the io's queue included. measure_run and measure_close take
 * the object as any other. `depth` is what each drive has at once, as without the store; a quarter
 * more operations (at least two) are under way, as in training, so that those under checksum do not
 * leave a drive idle.
 *
 * To compare with measure_open: the same cfg for both, runs of the two in turn. To see the price of
 * checksums: two objects, one with no_checksums, runs of the two in turn. */
#ifndef NVME_MEASURE_STORE_H
#define NVME_MEASURE_STORE_H

#include "nvme/measure.h"

struct measure_store_cfg {
    struct measure_cfg plain;   /* verify must be false: the store's checksums do that */
    bool no_checksums;
    uint32_t checksum_lanes;    /* threads; 0: 1 */
};

/* Runs afterwards may change mode, random, seed, times, bytes_max and stop; the rest stays as it
 * was here (STK_ERR_CONFIG). A get whose checksum does not fit counts
 * in verify_failures, and the run goes on. After STK_ERR_STALLED only measure_close is possible
 * (STK_ERR_STATE). */
stk_status measure_store_open(const struct measure_store_cfg *cfg, struct measure **out,
                              struct stk_error *err);

/* For comparisons in which nothing else differs. The same store without its checksums and with them
 * again (between runs; after writes without, only writes make sense); and plain transfers to and
 * from the file of extents of a store of one path, through the same memory. The latter is closed
 * before the store's, and writes make the store's own reads fail. */
void measure_store_checksums(struct measure *m, bool on);
stk_status measure_store_plain(struct measure *m, struct measure **out, struct stk_error *err);

#endif
