/* bench/nvme_impl.h - what the parts of `stoker bench nvme` share: options, results, and the pure
 * rules (sweep, steady state, verdict) that tests call alone.
 *
 * UNITS. With one path there is one unit of measurement, the path. With several, each path alone is
 * a unit and all together are the last one; balance and share of the sum compare them.
 *
 * Rates are bytes per second as double; 0 means "not measured". Thread: application's, for all of
 * it. */
#ifndef BENCH_NVME_IMPL_H
#define BENCH_NVME_IMPL_H

#include "base/opts.h"
#include "base/rng.h"
#include "nvme/drive.h"
#include "nvme/measure.h"
#include <stdio.h>

#define NVME_PATHS_MAX 16
#define NVME_UNITS_MAX (NVME_PATHS_MAX + 1)
#define NVME_PAIRS_MAX 64
#define NVME_CHUNK_ELEMS 524288u /* parameters that move together: the default of `train --chunk` */
#define NVME_OPT_BYTES (10ull * NVME_CHUNK_ELEMS) /* a chunk's optimizer state: low, two moments */
#define NVME_MODES 4

struct nvme_opts {
    uint64_t size_bytes, block_bytes, depth, pairs, write_max_bytes, seed;
    double time_s;
    const char *json, *html;
    bool verify, no_fio, sustained;
    int kind;
    struct opt_list modes;
};

/* --- statistics (nvme_stats.c) ---------------------------------------------------------------- */

double nvme_median(const double *v, uint32_t n); /* 0 when n is 0; n at most NVME_PAIRS_MAX */
/* 95 % interval of the median by the percentile bootstrap (Efron): 2,000 resamples with
 * replacement. */
void nvme_median_interval(const double *v, uint32_t n, uint64_t seed, double *low, double *high);

/* --- the sweep's rule (nvme_sweep.c) ---------------------------------------------------------- */

#define SWEEP_MAX 8
/* Block sizes upwards, for each the depths upwards. A block ends when more depth gained less than
 * `gain` twice in a row (once is noise on a shared disk); the sweep ends when two blocks in a row
 * gained less than `gain` over the best of the smaller ones. Points above `in_flight_max` bytes are left out. */
struct sweep {
    uint64_t block[SWEEP_MAX];
    uint32_t depth[SWEEP_MAX];
    uint32_t n_blocks, n_depths;
    double gain;
    uint64_t in_flight_max;
    double rate[SWEEP_MAX][SWEEP_MAX]; /* 0: not measured */
    uint32_t at_block, at_depth, poor_depths, poor_blocks;
    bool over;
};
void sweep_init(struct sweep *s, uint64_t in_flight_max, uint64_t block_max);
/* The point to measure now; false: enough is known. */
bool sweep_next(const struct sweep *s, uint64_t *block_bytes, uint32_t *depth);
/* Its rate; moves on. */
void sweep_put(struct sweep *s, double bytes_per_s);
/* The point with the fewest bytes in flight that reaches 97 % of the best; false: none measured. */
bool sweep_choose(const struct sweep *s, uint64_t *block_bytes, uint32_t *depth, double *rate);

/* --- steady state (nvme_steady.c) ------------------------------------------------------------- */

#define STEADY_MAX 4096
/* Steady: over the last `window` samples the largest distance from their mean is at most
 * `deviation` of it, and the least-squares line through them rises or falls by at most `drift` of
 * the mean from end to end. These are the two criteria of fio's steady-state jobs (`bw` and
 * `bw_slope`), asked together as the SNIA solid state performance test specification does
 * (excursion 20 % in all, drift 10 %). */
struct steady_rule { uint32_t window; double deviation, drift; };
extern const struct steady_rule steady_default;
bool steady_reached(const double *rate, uint32_t n, const struct steady_rule *rule);
struct steady_series {
    uint32_t n;
    double rate[STEADY_MAX], at_s[STEADY_MAX]; /* of each sample; when it ended */
    double bytes[STEADY_MAX];                  /* it moved */
};
struct steady_summary {
    bool reached;          /* the last window is steady */
    bool dropped;          /* it is more than 10 % under the burst: a cache was passed */
    double burst, sustained; /* mean of the first 3 samples; of the last window */
    double cache_bytes;      /* written until the rate stayed under halfway between; 0: never */
    double late_over_early;  /* last tenth of the time over the second (BEN-08); 0: too short */
};
void steady_summarise(const struct steady_series *s, const struct steady_rule *rule,
                      struct steady_summary *out);

/* --- results ---------------------------------------------------------------------------------- */

/* NVME_AGAIN: the unit's first point once more at the end of its time. */
enum nvme_step { NVME_POINT, NVME_RANDOM, NVME_STEADY, NVME_AGAIN, NVME_SWEEP };

struct nvme_latency { uint64_t p50_ns, p95_ns, p99_ns, p999_ns, max_ns; };
struct nvme_workers { uint32_t threads, kernel; }; /* at the end of a run (BEN-08) */

struct nvme_result {
    enum nvme_step step;
    uint32_t unit;
    enum measure_mode mode;
    bool random;
    uint64_t block_bytes;
    uint32_t depth;
    double bytes_per_s, read_bytes_per_s, write_bytes_per_s;
    double path_bytes_per_s[NVME_PATHS_MAX]; /* by path of the unit */
    uint64_t bytes, ns, requests;
    struct nvme_latency all, read, write;
    double fio_bytes_per_s, share_of_fio, share_low, share_high; /* 0: no fio */
    uint64_t fio_p50_ns, fio_p99_ns;
    uint32_t n_runs, n_pairs; /* runs of ours; the first n_pairs of them had fio's beside them */
    double ours[NVME_PAIRS_MAX], fio[NVME_PAIRS_MAX];
    double cpu_share;    /* of all cores this process may use */
    struct nvme_workers workers;
    bool direct, valid;
    char why[320];       /* why not valid */
    uint64_t verify_failures;
    char failure[512];
};

struct nvme_unit {
    uint32_t path[NVME_PATHS_MAX], n_paths;
    uint64_t file_bytes;
    char backend[512];
    struct sweep sweep[2]; /* of reads, writes */
    bool swept;
    uint64_t best_block[2];
    uint32_t best_depth[2];
    double best_rate[2];
    enum measure_mode steady_mode; /* of the series: writes; reads where nothing may be written */
    struct steady_series series;
    struct steady_summary steady;
    struct nvme_workers workers; /* at the end of the series */
};

/* --- verdict (nvme_verdict.c) ----------------------------------------------------------------- */

enum nvme_limit {
    LIMIT_UNKNOWN, LIMIT_LINK, LIMIT_DRIVE, LIMIT_CPU, LIMIT_SETTINGS, LIMIT_PAGE_CACHE
};
const char *nvme_limit_name(enum nvme_limit l);

/* Of all samples of one point. */
struct nvme_span { double median, low, high; uint32_t n; };

/* What the judgement is made of; all rates of the last unit. */
struct nvme_evidence {
    struct nvme_span read, write, mixed, optimizer; /* at the settings of `train` */
    double best_read, best_write;         /* of all points measured, and where each was */
    uint64_t best_block, best_write_block;
    uint32_t best_depth, best_write_depth;
    double enough_read;                   /* no less, with the fewest bytes in flight; 0: not known */
    uint64_t enough_block;
    uint32_t enough_depth;
    double deeper_read;                   /* the slowest of the deeper points of that block, where it
                                           * is clearly slower; 0: none is */
    uint32_t deeper_depth;
    double train_read;                    /* of those with the block size of `train`, 1 MiB */
    double spread;                        /* of samples of one point: largest difference, as a part
                                           * of the larger */
    double drift;                         /* the first point at the end over at the start; 0: ? */
    enum measure_mode drift_mode;
    double burst, sustained;              /* writes; 0: not known */
    bool fell;                            /* the series of writes itself fell: a cache was passed */
    bool sustained_known;                 /* steady, or as long as was allowed */
    double late_over_early;               /* of a long series; 0: too short */
    struct nvme_workers workers;
    uint32_t pairs;
    double link;                          /* sum over the drives; 0: unknown */
    double cpu_share;                     /* largest over the results */
    double share_of_fio;                  /* median over reads, writes, mixed; 0: no fio */
    bool memory;                          /* page cache or tmpfs: nothing of a drive was measured */
    char memory_why[320];
    bool uring;
    char backend[512];
    uint32_t n_paths;
    double sum_share;                     /* together over the sum of each alone; 0: one path */
    bool shared_drive, rotational;
    double path_rate[NVME_PATHS_MAX];     /* of each path alone: what `train` weighs by */
    double endurance_bytes;               /* left to be written, sum; 0: unknown */
};

/* Bytes that one step moves per parameter with parameters, optimizer state and gradients on NVMe,
 * layer-major order, bf16 (engine/plan_update.c: update_chunk, cast_chunk; engine/plan_params.c):
 *     visits   read 2 forward + 2 backward (parameters), write 2 (gradients)
 *     update   read 2 + 10 + 2 (parameters, optimizer state, gradients), write 2 + 10
 * so 18 read and 14 written. A drive is one resource: its times add up, whatever overlaps with
 * computing:
 *     seconds = P * (4 / read rate + 2 / write rate + 26 / rate of the optimizer's pattern)
 * and not less than P * 14 / sustained write rate. */
enum {
    NVME_VISIT_READ = 4, NVME_VISIT_WRITE = 2, NVME_UPDATE_BOTH = 26,
    NVME_STEP_READ = 18, NVME_STEP_WRITE = 14
};
double nvme_step_seconds(double params, const struct nvme_evidence *e);

#define NVME_MODELS 4
struct nvme_verdict {
    enum nvme_limit limit;
    char what[640];
    uint32_t n_changes;
    char change[10][400];
    char settings[3][640];
    uint32_t n_settings;
    uint32_t samples; /* of the rate that has the fewest, of those that the seconds are made of */
    struct {
        const char *name;
        double params, seconds, written_bytes, written_per_day, endurance_days; /* 0: unknown */
        double seconds_low, seconds_high; /* from the best and from the worst sample of each rate */
    } model[NVME_MODELS];
};
void nvme_judge(const struct nvme_evidence *e, struct nvme_verdict *out);

/* --- fio (nvme_fio.c) ------------------------------------------------------------------------- */

struct nvme_fio {
    bool usable;
    char version[64];    /* "fio-3.33" */
    char why[256];       /* else why it is not used */
};
struct nvme_fio_job {
    const char *files[NVME_PATHS_MAX];
    uint32_t n_files;
    enum measure_mode mode;
    bool random, uring;
    uint64_t block_bytes, file_bytes;
    uint32_t depth;
    double ramp_s, run_s;
};
struct nvme_fio_rates { double bytes_per_s, write_bytes; uint64_t p50_ns, p99_ns; };
void nvme_fio_find(struct nvme_fio *f);
/* Runs fio as a child and reads its JSON; a signal ends it. False: *why says what happened. */
bool nvme_fio_run(const struct nvme_fio_job *job, const _Atomic bool *stop,
                  struct nvme_fio_rates *out, char *why, size_t why_bytes);
/* Of fio's JSON text (any lines before it are passed over); pure. */
bool nvme_fio_parse(const char *text, struct nvme_fio_rates *out);

/* --- the run ---------------------------------------------------------------------------------- */

struct nvme_bench {
    struct nvme_opts o;
    bool time_given;
    bool mode[NVME_MODES];
    const char *path[NVME_PATHS_MAX];
    uint32_t n_paths;
    struct drive_facts drive[NVME_PATHS_MAX];
    bool loop_cached[NVME_PATHS_MAX]; /* a loop device that keeps its file in the page cache */
    uint64_t free_bytes[NVME_PATHS_MAX];
    struct nvme_fio fio;
    const _Atomic bool *stop;
    double begin_s, time_s;
    uint64_t written[NVME_PATHS_MAX]; /* so far, fio's included */
    struct rng rng;
    struct nvme_unit *unit; /* NVME_UNITS_MAX of them */
    uint32_t n_units;
    struct nvme_result *result;
    uint32_t n_results, cap_results;
    struct nvme_evidence evidence;
    struct nvme_verdict verdict;
    char note[16][400];
    uint32_t n_notes;
    bool stopped;
};

const char *nvme_mode_name(enum measure_mode m);
bool nvme_stopped(const struct nvme_bench *b);
/* A line that is printed once and kept for the page. */
void nvme_note(struct nvme_bench *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* "1 MiB", "256 KiB" */
char *nvme_size_text(uint64_t bytes, char *buf, size_t buf_bytes);

/* Virtual disks and loop devices call themselves rotating without being asked. */
bool nvme_rotates(const struct drive_facts *d);

/* Is a drive on this NUMA node (-1: unknown) away from all cores that this process may use? */
struct topology;
bool nvme_far(const struct topology *t, int numa_node);

/* nvme_prepare.c: looks at the paths and says what will be done. Nothing is written. */
stk_status nvme_prepare(struct nvme_bench *b, struct stk_error *err);
void nvme_announce(const struct nvme_bench *b);

/* nvme_point.c: a unit's files, one point of measurement. */
stk_status nvme_unit_open(struct nvme_bench *b, uint32_t unit, double budget_s,
                          struct measure **out, struct stk_error *err);
struct nvme_point {
    enum nvme_step step;
    enum measure_mode mode;
    bool random;
    uint64_t block_bytes;
    uint32_t depth;
    double ramp_s, run_s;
    uint64_t bytes_max; /* to each path; 0: what may still be written */
    uint32_t pairs;     /* > 0: fio beside it, that often */
    uint32_t runs;      /* of ours, if more: the further ones are alone */
};
/* Measures and appends a result (NULL in *out: stopped, or nothing may be written any more). */
stk_status nvme_point_run(struct nvme_bench *b, uint32_t unit, struct measure *m,
                          const struct nvme_point *p, struct nvme_result **out,
                          struct stk_error *err);
/* Sets r->valid and r->why from its figures, its unit's drives and the part of its reads that came
 * from storage (1: all). */
void nvme_point_judge(const struct nvme_bench *b, struct nvme_result *r, double from_storage);
/* Bytes that may still be written to each path of the unit. */
uint64_t nvme_write_left(const struct nvme_bench *b, uint32_t unit);

/* nvme_unit.c: all of one unit. */
stk_status nvme_unit_run(struct nvme_bench *b, uint32_t unit, double budget_s,
                         struct stk_error *err);
/* nvme_evidence.c: pure. */
/* The result of that kind at the block nearest to `block_bytes` (0: the fastest); NULL: none. */
const struct nvme_result *nvme_find(const struct nvme_bench *b, uint32_t unit,
                                    enum nvme_step step, enum measure_mode mode,
                                    uint64_t block_bytes);
/* Fills b->evidence and b->verdict. */
void nvme_conclude(struct nvme_bench *b);

/* Faces. */
void nvme_table_head(const struct nvme_bench *b, uint32_t unit);
void nvme_table_row(const struct nvme_bench *b, const struct nvme_result *r);
void nvme_table_unit(const struct nvme_bench *b, uint32_t unit);
void nvme_table_end(const struct nvme_bench *b);
stk_status nvme_text_write(const char *file, const char *text, struct stk_error *err);
stk_status nvme_json_write(const struct nvme_bench *b, const char *file, struct stk_error *err);
stk_status nvme_html_write(const struct nvme_bench *b, const char *file, struct stk_error *err);


/* Plots (nvme_svg.c): inline SVG, on white, told apart by dash and label too. */
#define SVG_SERIES_MAX 20
struct svg_series { const char *name; const double *x, *y; uint32_t n; };
struct svg_plot {
    const char *title, *x_label, *y_label;
    bool log_x, log_y;
    const char *const *x_tick; /* named places 0, 1, 2 ...; NULL: numbers */
    uint32_t n_ticks;
    struct svg_series series[SVG_SERIES_MAX];
    uint32_t n_series;
    double mark_y;             /* a dashed line across with mark_name; 0: none */
    const char *mark_name;
};
void svg_text(FILE *f, const char *text); /* escaped for XML */
void svg_lines(FILE *f, const struct svg_plot *p);
/* Bars side by side at the named places: series[k].y[i] is bar k of place i. */
void svg_bars(FILE *f, const struct svg_plot *p);

#endif
