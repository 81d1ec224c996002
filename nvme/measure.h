/* nvme/measure.h - measured rates of drives, by the same code path that training uses.
 *
 * A MEASUREMENT is one pattern on one or several files through an `io` of its own, for a given
 * time: throughput and a histogram of latencies. `stoker bench nvme` sweeps with it; the engine
 * probes each drive with it before it weighs them. It knows nothing of fio, tables of results or
 * verdicts (bench/), and nothing of what training will do with the figures.
 *
 * HOW TIME IS TAKEN. From the first submit to the last completion, writes with the flush that
 * follows them (BEN-04); the ramp (`ramp_ns`) is moved but not counted. Files are preallocated and
 * written once in full before anything is read from them, and opened with O_DIRECT: where that is
 * refused the result is marked invalid as the page cache's (BEN-01, NVM-22).
 *
 * Thread: application's; blocks for the whole measurement (`stop` may be set from a signal).
 * Nothing is left behind: the file has no name once it is open where the file system allows it,
 * else it is removed at the end. */
#ifndef NVME_MEASURE_H
#define NVME_MEASURE_H

#include "nvme/io.h"
#include <stdatomic.h>

enum measure_mode {
    MEASURE_READ,
    MEASURE_WRITE,
    MEASURE_MIXED,      /* reads and writes of different places at once, half of the depth each */
    MEASURE_OPTIMIZER   /* the update's: read a chunk's state, write it back, `depth` chunks deep */
};

struct measure_cfg {
    const char *paths[16];      /* folders; one file in each */
    uint32_t n_paths;
    uint64_t file_bytes;        /* of each file; a multiple of block_bytes */
    enum io_kind kind;
    enum measure_mode mode;
    uint64_t block_bytes;       /* of one request (optimizer: of one chunk's state); a multiple of
                                 * 4096 */
    uint32_t depth;             /* requests in flight per drive */
    uint64_t buffer_bytes;      /* memory that requests go round in, so that a drive (or who emulates it)
                                 * does not find it in a cache; 0: a place for each in flight */
    bool random;                /* else sequential, each lane of the depth in turn */
    uint64_t seed;
    uint64_t ramp_ns, run_ns;   /* moved without counting, then counted */
    uint64_t bytes_max;         /* end earlier, reads and writes and the ramp together (which then
                                 * ends with half of them at the latest); 0: no limit */
    bool verify;                /* every block carries file, offset, pass and a checksum; every read
                                 * checks them */
    bool buffered, no_registration;
    const _Atomic bool *stop;   /* may be NULL */
    const void *sim;            /* struct io_sim_cfg with IO_SIM (and a simulated exec: `ex`);
                                 * borrowed until measure_close */
    struct exec *ex;            /* NULL: threads of its own; borrowed until measure_close */
};

/* Latencies in buckets of a 1/32 of a power of two: percentiles within 3 %. */
#define MEASURE_BUCKETS 1024
struct measure_histogram { uint64_t n, max_ns, bucket[MEASURE_BUCKETS]; };
void measure_histogram_add(struct measure_histogram *h, uint64_t ns);
/* q in (0, 1]; 0 when empty. */
uint64_t measure_percentile(const struct measure_histogram *h, double q);

struct measure_result {
    double bytes_per_s;             /* reads and writes together (mixed: the sum of the two) */
    double read_bytes_per_s, write_bytes_per_s;
    double path_bytes_per_s[16];    /* of each path, in the time until its own last completion: the
                                     * balance. Of several paths the rates above are the sums */
    uint64_t bytes, ns, requests;
    double cores_busy;              /* of this process, from the first request to the last completion */
    uint64_t read_bytes;            /* of these bytes; the rest was written */
    struct measure_histogram read, write;
    bool direct;                    /* false: the page cache was between */
    uint32_t threads, kernel_workers; /* of this process at the end of the run, and those that the
                                       * kernel made for its io_uring; 0: not known */
    uint64_t verify_failures;
    char first_failure[512];        /* file, offset, what was found, what was expected */
    char backend[512];              /* io_describe */
};

/* A measurement object keeps its files between runs of other modes, blocks and depths (same paths
 * and file_bytes), so that a sweep writes them once. */
struct measure;
stk_status measure_open(const struct measure_cfg *cfg, struct measure **out, struct stk_error *err);
/* cfg: another mode, block, depth, time, seed...; paths and file_bytes as at open. Verify after
 * writes that did not: the files are written in full again first. STK_OK with verify_failures > 0:
 * the drive moved the bytes, but not those that belong there. STK_ERR_INTERRUPTED (`stop`): *out
 * holds what was measured until then. STK_ERR_IO, STK_ERR_NOSPACE, STK_ERR_STALLED (a minute
 * without any completion): the sentence names file, offset and what failed; another run is
 * possible. */
stk_status measure_run(struct measure *m, const struct measure_cfg *cfg, struct measure_result *out,
                       struct stk_error *err);
void measure_close(struct measure *m);
/* A name under which another process (fio) can open the file of path `i` while m is open:
 * "/proc/<pid>/fd/<n>" for a file that has no name of its own. False: it does not fit, or the disk
 * is simulated. */
bool measure_file_name(const struct measure *m, uint32_t i, char *buf, size_t buf_bytes);

/* What is in flight while rates are taken. Who wants to know what a run will get gives that run's: on one
 * virtual disk 16 requests of 1 MiB in 16 MiB of memory moved 3.7 GB/s, 3 of 5 MiB in 640 MiB 2.3. */
struct measure_load { uint64_t block_bytes; uint32_t depth; uint64_t buffer_bytes; };

/* What a plan must know of one drive: sequential reads, writes and both at once at `load` (NULL: 1 MiB x
 * 16), in about `budget_ns` (a fifth for the first write, the rest a third each; writes at most
 * `write_bytes_max`, 0: no limit, else at least 96 MiB, and six times what is in flight, or load is
 * as NULL). Uses measure_open/run on one path. */
struct measure_rates {
    double read_bytes_per_s, write_bytes_per_s, both_bytes_per_s; /* both: the sum of the two */
    uint64_t read_p50_ns, read_p99_ns;      /* alone */
    uint64_t mixed_read_p50_ns, mixed_read_p99_ns; /* with writes beside them */
    double cores_busy;                      /* of this process, meanwhile */
    bool direct;
};
stk_status measure_rates(const char *path, const struct measure_load *load, uint64_t budget_ns,
                         uint64_t write_bytes_max, struct measure_rates *out, struct stk_error *err);

/* The checksum that the store makes of every extent, for a measurement of how fast it is. Pure. */
uint32_t measure_checksum(const void *buf, uint64_t size_bytes);

#endif
