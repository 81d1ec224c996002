/* nvme/measure_rates.c - what a plan must know of one drive, in a second or two.
 *
 * One file, written as far as a fifth of the time allows; then reads, writes and both at once over
 * it, sequential, with as much in flight as the caller says. Application's thread. */
#include "nvme/measure_impl.h"
#include "base/sys.h"
#include "nvme/crc32c.h"

#include <string.h>

static const struct measure_load usual = { .block_bytes = 1u << 20, .depth = 16 };

#define FILE_MOST_BYTES (512ull << 20)
#define FILE_LEAST_BYTES (32ull << 20)

/* Twice what is in flight, so that reads and writes at once find places. */
static uint64_t least_file(const struct measure_load *load)
{
    uint64_t twice = 2 * load->depth * load->block_bytes;
    return twice > FILE_LEAST_BYTES ? twice : FILE_LEAST_BYTES;
}

static uint64_t file_size(const struct measure_cfg *base, const struct measure_load *load,
                          uint64_t write_bytes_max)
{
    uint64_t size = FILE_MOST_BYTES;
    int64_t room = base->kind == IO_SIM ? -1 : sys_disk_free(base->paths[0]);
    if (write_bytes_max && size > write_bytes_max / 3) size = write_bytes_max / 3;
    if (room >= 0 && size > (uint64_t)room / 4) size = (uint64_t)room / 4;
    if (size < least_file(load)) size = least_file(load);
    return size - size % load->block_bytes;
}

static void take(struct measure_rates *out, enum measure_mode mode, const struct measure_result *r)
{
    out->cores_busy += r->cores_busy / 3;
    switch (mode) {
    case MEASURE_READ:
        out->read_bytes_per_s = r->read_bytes_per_s;
        out->read_p50_ns = measure_percentile(&r->read, 0.5);
        out->read_p99_ns = measure_percentile(&r->read, 0.99);
        out->direct = r->direct;
        break;
    case MEASURE_WRITE: out->write_bytes_per_s = r->write_bytes_per_s; break;
    default:
        out->both_bytes_per_s = r->bytes_per_s;
        out->mixed_read_p50_ns = measure_percentile(&r->read, 0.5);
        out->mixed_read_p99_ns = measure_percentile(&r->read, 0.99);
        break;
    }
}

static stk_status measure_three(struct measure *m, struct measure_cfg *cfg, uint64_t each_ns,
                                uint64_t write_left, struct measure_result *result,
                                struct measure_rates *out, struct stk_error *err)
{
    static const enum measure_mode modes[] = { MEASURE_READ, MEASURE_WRITE, MEASURE_MIXED };
    for (int i = 0; i < 3; i++) {
        cfg->mode = modes[i];
        cfg->ramp_ns = each_ns / 8;
        cfg->run_ns = each_ns - cfg->ramp_ns;
        cfg->bytes_max = 0;
        /* half for each of the two that write: strict, as one limits reads and writes together */
        if (write_left && i > 0) cfg->bytes_max = write_left / 2;
        STK_TRY(measure_run(m, cfg, result, err));
        take(out, modes[i], result);
    }
    return STK_OK;
}

stk_status measure_rates_with(const struct measure_cfg *base, const struct measure_load *load,
                              uint64_t budget_ns, uint64_t write_bytes_max,
                              struct measure_rates *out, struct stk_error *err)
{
    memset(out, 0, sizeof *out);
    if (budget_ns == 0 || (write_bytes_max && write_bytes_max < 3 * FILE_LEAST_BYTES))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s: measuring a drive takes time and at least %llu bytes of writes; "
                             "%llu ns and %llu bytes were allowed",
                             base->paths[0], (unsigned long long)(3 * FILE_LEAST_BYTES),
                             (unsigned long long)budget_ns, (unsigned long long)write_bytes_max);
    if (!load || (write_bytes_max && write_bytes_max < 3 * least_file(load))) load = &usual;
    struct measure_cfg cfg = *base;
    struct measure *m;
    struct measure_result *result = sys_calloc(1, sizeof *result);
    if (!result) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a measurement");
    cfg.n_paths = 1;
    cfg.block_bytes = load->block_bytes;
    cfg.depth = load->depth;
    cfg.buffer_bytes = load->buffer_bytes;
    cfg.file_bytes = file_size(base, load, write_bytes_max);
    cfg.run_ns = budget_ns;
    stk_status status = measure_open_within(&cfg, budget_ns / 5, least_file(load), &m, err);
    if (status == STK_OK) {
        /* at least two thirds are left, as the file is at most one */
        uint64_t left = write_bytes_max ? write_bytes_max - m->file_bytes : 0;
        status = measure_three(m, &cfg, (budget_ns - budget_ns / 5) / 3, left, result, out, err);
        measure_close(m);
    }
    sys_free(result);
    return status;
}

stk_status measure_rates(const char *path, const struct measure_load *load, uint64_t budget_ns,
                         uint64_t write_bytes_max, struct measure_rates *out,
                         struct stk_error *err)
{
    struct measure_cfg base = { .paths = { path }, .n_paths = 1, .kind = IO_AUTO };
    return measure_rates_with(&base, load, budget_ns, write_bytes_max, out, err);
}

uint32_t measure_checksum(const void *buf, uint64_t size_bytes) { return crc32c(0, buf, size_bytes); }
