/* nvme/io_sim.h - the simulated disk.
 *
 * FAULT MODEL (what a user of the disk must survive: the right bytes or a clean error, never
 * silence)
 *   read_error, write_error   the request completes with EIO; a failed write may have changed any
 *                             part of its range
 *   short                     fewer bytes are moved than asked (a multiple of 512), as a legal
 *                             partial transfer
 *   no_space                  a write completes with ENOSPC
 *   flip_bit                  one bit of a read's result differs from what was written (the medium
 *                             is intact)
 *   rot_bit                   one bit of a write is stored wrong (found at the next read)
 *   misdirect                 a write lands at another aligned place of the same file; its own
 *                             range keeps the old bytes
 *   lost_write                a write is acknowledged and never stored
 *   lost_completion           a request never completes (must be found by a deadline or by the
 *                             simulation's stall)
 *   late                      completes after up to `late_ns` more
 *   reorder                   requests complete in any order (always allowed; this adds extra delay
 *                             to some)
 * Pristine bytes are kept apart from the damaged ones, so a test can ask whether damage was really
 * done. With exec simulation time is virtual; with exec threads completions come at once (latency
 * 0), faults the same kind. Single writer: io_sim is used from one lane. The disk outlives an io:
 * closing and opening again is a restart. */
#ifndef NVME_IO_SIM_H
#define NVME_IO_SIM_H

#include "base/status.h"

struct io_sim_faults { /* chances per million requests; all 0: a perfect disk */
    uint32_t read_error_ppm, write_error_ppm, short_ppm, no_space_ppm;
    uint32_t flip_bit_ppm, rot_bit_ppm, misdirect_ppm, lost_write_ppm;
    uint32_t lost_completion_ppm, late_ppm, reorder_ppm;
    uint64_t late_ns;
    uint64_t first_request; /* no faults before this many requests (lets a run start) */
};

struct io_sim_disk; /* files by path, sparse */

#define IO_SIM_DRIVES_MAX 16

/* A drive of its own speed beside the others; rates 0: as the rest. */
struct io_sim_drive { double read_bytes_per_s, write_bytes_per_s; };

struct io_sim_cfg {
    struct io_sim_disk *disk;           /* borrowed */
    uint64_t seed;
    uint64_t latency_ns;                /* per request, plus size / rate; 0, 0: immediate */
    double read_bytes_per_s, write_bytes_per_s;
    bool shared_rate;                   /* reads and writes share one limit */
    /* Above 0 (exec simulation, both rates above 0): both directions at once move so much together, and
     * transfers take their part of the host's memory, as the simulated device's copies do. All drives
     * are one device then. */
    double both_bytes_per_s, dram_bytes_per_s;
    struct io_sim_faults faults;
    /* by io_file_add's number. One whose rates are above 0 moves its bytes beside the others; all
     * the others together are one device with the rates above */
    struct io_sim_drive drives[IO_SIM_DRIVES_MAX];
};

/* The disk holds what was written until io_sim_disk_free, across io_open/io_close.
 * `capacity_bytes`: ENOSPC beyond. */
stk_status io_sim_disk_new(uint64_t capacity_bytes, struct io_sim_disk **out,
                           struct stk_error *err);
void io_sim_disk_free(struct io_sim_disk *d);
/* Creates or resizes a file on the disk (what the store's preallocation does on a real one). */
stk_status io_sim_file_create(struct io_sim_disk *d, const char *path, uint64_t size_bytes,
                              struct stk_error *err);
/* Forgets a file and gives its room back; no transfer of it may be under way. Unknown names are
 * ignored. */
void io_sim_file_remove(struct io_sim_disk *d, const char *path);
/* Whether the medium now differs, anywhere in this range, from what acknowledged writes asked for
 * (the pristine bytes). */
bool io_sim_damaged(const struct io_sim_disk *d, const char *path, uint64_t offset_bytes,
                    uint64_t size_bytes);
/* Flips one bit of the medium (a test's own rot); false: outside every file. */
bool io_sim_flip(struct io_sim_disk *d, const char *path, uint64_t offset_bytes, uint32_t bit);
/* Room left: capacity minus the sizes of all files. */
uint64_t io_sim_free_bytes(const struct io_sim_disk *d);
/* Faults injected so far, by kind (same order as the fields of io_sim_faults up to reorder). */
uint64_t io_sim_faults_done(const struct io_sim_disk *d, uint64_t out_by_kind[11]);
/* A second disk with the same files and bytes, those not flushed included: what a crash at this
 * moment would leave, while the run on `d` goes on. */
stk_status io_sim_disk_copy(const struct io_sim_disk *d, struct io_sim_disk **out,
                            struct stk_error *err);
/* Outside of any io, without faults or time: what a real disk's files are asked at open. False: no
 * such file, or the range is outside of it. `poke` is flushed, with all of its file. */
bool io_sim_file_size(const struct io_sim_disk *d, const char *path, uint64_t *out_bytes);
bool io_sim_peek(const struct io_sim_disk *d, const char *path, uint64_t offset_bytes, void *buf,
                 uint64_t size_bytes);
bool io_sim_poke(struct io_sim_disk *d, const char *path, uint64_t offset_bytes, const void *buf,
                 uint64_t size_bytes);
/* Path of the i-th file in no particular order; NULL: there are no more. */
const char *io_sim_file_name(const struct io_sim_disk *d, uint32_t i);
/* Power cut: of what was not flushed since, each 512-byte sector is lost or kept by chance (seed 0:
 * all is lost). No io may be open on the disk. For tests of durable steps. */
void io_sim_power_cut(struct io_sim_disk *d, uint64_t seed);

#endif
