/* bench/nvme_json.c - results as a JSON list: `--json FILE`.
 *
 * Owns: the names of keys. mode, block_bytes, depth, bytes_per_s, fio_bytes_per_s, share_of_fio,
 * p50_ns, p99_ns, valid are fixed; others may be added. Points with fio beside them come first,
 * points of the sweep last. What is not known is null. Must not know: how anything was measured.
 * Application's thread. The file is written beside and renamed. */
#include "base/sys.h"
#include "bench/nvme_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static json_t *real(double x) { return x > 0 && isfinite(x) ? json_real(x) : json_null(); }
static json_t *whole(uint64_t x) { return json_integer((json_int_t)x); }
static json_t *ns(uint64_t x, bool known) { return known ? whole(x) : json_null(); }

static void put(json_t *j, const char *key, json_t *value) { json_object_set_new(j, key, value); }

static void put_latency(json_t *j, const char *prefix, const struct nvme_latency *l)
{
    static const char *const names[] = { "p50_ns", "p95_ns", "p99_ns", "p999_ns", "max_ns" };
    const uint64_t v[] = { l->p50_ns, l->p95_ns, l->p99_ns, l->p999_ns, l->max_ns };
    char key[64];
    for (int i = 0; i < 5; i++) {
        snprintf(key, sizeof key, "%s%s", prefix, names[i]);
        put(j, key, ns(v[i], l->max_ns > 0));
    }
}

static json_t *paths_json(const struct nvme_bench *b, const struct nvme_result *r)
{
    const struct nvme_unit *u = &b->unit[r->unit];
    json_t *list = json_array();
    for (uint32_t i = 0; i < u->n_paths; i++) {
        const struct drive_facts *d = &b->drive[u->path[i]];
        json_t *p = json_object();
        put(p, "path", json_string(b->path[u->path[i]]));
        put(p, "bytes_per_s", real(r->path_bytes_per_s[i]));
        put(p, "device", d->device[0] ? json_string(d->device) : json_null());
        put(p, "model", d->model[0] ? json_string(d->model) : json_null());
        put(p, "file_system", d->file_system[0] ? json_string(d->file_system) : json_null());
        put(p, "numa_node", d->numa_node >= 0 ? json_integer(d->numa_node) : json_null());
        put(p, "link_bytes_per_s", real(d->link_bytes_per_s));
        put(p, "temperature_c", d->smart ? json_integer(d->temperature_c) : json_null());
        put(p, "endurance_used_percent", d->smart ? whole(d->percentage_used) : json_null());
        put(p, "written_in_life_bytes", d->smart ? real(d->written_bytes) : json_null());
        put(p, "written_bytes", whole(b->written[u->path[i]]));
        json_array_append_new(list, p);
    }
    return list;
}

static json_t *pairs_json(const struct nvme_result *r)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < r->n_pairs; i++)
        json_array_append_new(list, json_pack("[f,f]", r->ours[i], r->fio[i]));
    return list;
}

static json_t *samples_json(const struct nvme_result *r)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < r->n_runs; i++)
        json_array_append_new(list, json_real(r->ours[i]));
    return list;
}

static void put_steady(json_t *j, const struct nvme_unit *u)
{
    const struct steady_summary *s = &u->steady;
    json_t *series = json_array();
    for (uint32_t i = 0; i < u->series.n; i++)
        json_array_append_new(series, json_pack("[f,f]", u->series.at_s[i], u->series.rate[i]));
    put(j, "steady", json_boolean(s->reached));
    put(j, "burst_bytes_per_s", real(s->burst));
    put(j, "sustained_bytes_per_s", real(s->sustained));
    put(j, "cache_bytes", real(s->cache_bytes));
    put(j, "late_over_early", real(s->late_over_early));
    put(j, "threads", whole(u->workers.threads));
    put(j, "kernel_workers", whole(u->workers.kernel));
    put(j, "series_s_bytes_per_s", series);
}

static json_t *result_json(const struct nvme_bench *b, const struct nvme_result *r)
{
    static const char *const steps[] = { "point", "random", "sustained", "again", "sweep" };
    json_t *j = json_object();
    bool fio = r->n_pairs > 0;
    put(j, "bench", json_string("nvme"));
    put(j, "step", json_string(steps[r->step]));
    put(j, "mode", json_string(nvme_mode_name(r->mode)));
    put(j, "random", json_boolean(r->random));
    put(j, "block_bytes", whole(r->block_bytes));
    put(j, "depth", whole(r->depth));
    put(j, "bytes_per_s", json_real(r->bytes_per_s));
    put(j, "fio_bytes_per_s", fio ? real(r->fio_bytes_per_s) : json_null());
    put(j, "share_of_fio", fio ? real(r->share_of_fio) : json_null());
    put_latency(j, "", &r->all);
    put(j, "valid", json_boolean(r->valid));
    put(j, "why_invalid", r->valid ? json_null() : json_string(r->why));
    put(j, "read_bytes_per_s", real(r->read_bytes_per_s));
    put(j, "write_bytes_per_s", real(r->write_bytes_per_s));
    put_latency(j, "read_", &r->read);
    put_latency(j, "write_", &r->write);
    put(j, "fio_p50_ns", ns(r->fio_p50_ns, fio));
    put(j, "fio_p99_ns", ns(r->fio_p99_ns, fio));
    put(j, "fio_pattern_differs", json_boolean(fio && r->mode == MEASURE_OPTIMIZER));
    put(j, "fio_version", fio ? json_string(b->fio.version) : json_null());
    put(j, "pairs_ours_fio", pairs_json(r));
    put(j, "samples_bytes_per_s", samples_json(r));
    put(j, "share_of_fio_low", fio ? real(r->share_low) : json_null());
    put(j, "share_of_fio_high", fio ? real(r->share_high) : json_null());
    put(j, "bytes", whole(r->bytes));
    put(j, "ns", whole(r->ns));
    put(j, "requests", whole(r->requests));
    put(j, "cpu_share", json_real(r->cpu_share));
    put(j, "direct", json_boolean(r->direct));
    put(j, "verified", json_boolean(b->o.verify));
    put(j, "verify_failures", whole(r->verify_failures));
    put(j, "file_bytes", whole(b->unit[r->unit].file_bytes));
    put(j, "backend", json_string(b->unit[r->unit].backend));
    put(j, "together", json_boolean(b->unit[r->unit].n_paths > 1));
    put(j, "paths", paths_json(b, r));
    put(j, "limit", json_string(nvme_limit_name(b->verdict.limit)));
    if (r->step == NVME_STEADY) put_steady(j, &b->unit[r->unit]);
    return j;
}

/* What is there and no ordinary file (a pipe, a link such as /dev/stdout) is written as it is. */
stk_status nvme_text_write(const char *file, const char *text, struct stk_error *err)
{
    struct stat st;
    bool direct = lstat(file, &st) == 0 && !S_ISREG(st.st_mode);
    char *to = direct ? sys_strdup(file) : sys_format("%s.partial", file);
    FILE *f = to ? fopen(to, "we") : NULL;
    bool good = f && fputs(text, f) >= 0 && fputc('\n', f) != EOF;
    int why = errno;
    if (f && fclose(f) != 0) {
        why = good ? errno : why;
        good = false;
    }
    if (good && !direct && sys_rename(to, file) != 0) {
        why = errno;
        good = false;
    }
    if (!good && !direct && f) unlink(to);
    sys_free(to);
    return good ? STK_OK
                : stk_error_set(err, STK_ERR_IO, why, "%s: cannot be written: %s", file,
                                strerror(why));
}

stk_status nvme_json_write(const struct nvme_bench *b, const char *file, struct stk_error *err)
{
    json_t *list = json_array();
    for (int step = NVME_POINT; step <= NVME_SWEEP; step++)
        for (uint32_t k = 0; k < b->n_units; k++) { /* together first */
            uint32_t unit = b->n_units - 1 - k;
            for (uint32_t i = 0; i < b->n_results; i++)
                if ((int)b->result[i].step == step && b->result[i].unit == unit)
                    json_array_append_new(list, result_json(b, &b->result[i]));
        }
    char *text = json_dumps(list, JSON_INDENT(1) | JSON_REAL_PRECISION(12));
    json_decref(list);
    if (!text) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for the text of %s", file);
    stk_status st = nvme_text_write(file, text, err);
    free(text);
    return st;
}
