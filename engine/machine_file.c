/* engine/machine_file.c - a machine read from a file. Blocking; any thread.
 *
 * FORMAT, version 1 (share/machines/README.md): one JSON object with `format`, `name`, `text`,
 * `on_host`, `figures` and `drives`. A figure is {"value": NUMBER, "source": TEXT}: one without a
 * source is refused, because a prediction is worth what its figures are. Keys that are not known are
 * refused, too. */
#include "engine/machine.h"
#include "formats/files.h"

#include <math.h>
#include <string.h>

#define MACHINE_BYTES_MAX (1u << 20)
#define AT(field) offsetof(stk_machine, field), sizeof(((stk_machine *)NULL)->field)
#define OF(field) offsetof(stk_machine_drive, field), sizeof(((stk_machine_drive *)NULL)->field)

enum figure_type { FIGURE_DOUBLE, FIGURE_U64, FIGURE_U32 };
struct figure_row { const char *name; enum figure_type type; size_t offset, size; };

static const struct figure_row figures[] = {
    { "device_memory_bytes", FIGURE_U64, AT(device_memory) },
    { "host_memory_bytes", FIGURE_U64, AT(host_memory) },
    { "cores", FIGURE_U32, AT(cores) },
    { "flops_per_s", FIGURE_DOUBLE, AT(flops_per_s) },
    { "device_bytes_per_s", FIGURE_DOUBLE, AT(device_bytes_per_s) },
    { "launch_ns", FIGURE_U64, AT(launch_ns) },
    { "copy_in_bytes_per_s", FIGURE_DOUBLE, AT(copy_in_bytes_per_s) },
    { "copy_out_bytes_per_s", FIGURE_DOUBLE, AT(copy_out_bytes_per_s) },
    { "copy_both_bytes_per_s", FIGURE_DOUBLE, AT(copy_both_bytes_per_s) },
    { "cast_bytes_per_s", FIGURE_DOUBLE, AT(cast_bytes_per_s) },
    { "dram_bytes_per_s", FIGURE_DOUBLE, AT(dram_bytes_per_s) },
    { "update_bytes_per_s", FIGURE_DOUBLE, AT(update_bytes_per_s) },
    { "checksum_bytes_per_s", FIGURE_DOUBLE, AT(checksum_bytes_per_s) },
    { "gather_bytes_per_s", FIGURE_DOUBLE, AT(gather_bytes_per_s) },
    { "hop_ns", FIGURE_U64, AT(hop_ns) },
};
static const struct figure_row drive_figures[] = {
    { "read_bytes_per_s", FIGURE_DOUBLE, OF(read_bytes_per_s) },
    { "write_bytes_per_s", FIGURE_DOUBLE, OF(write_bytes_per_s) },
    { "both_bytes_per_s", FIGURE_DOUBLE, OF(both_bytes_per_s) },
    { "cores_busy", FIGURE_DOUBLE, OF(cores_busy) },
    { "latency_ns", FIGURE_U64, OF(latency_ns) },
};
#define ROWS(t) (sizeof(t) / sizeof(t)[0])

struct reader { const char *path; struct stk_error *err; };

static stk_status refuse(const struct reader *r, const char *key, const char *what)
{
    return stk_error_set(r->err, STK_ERR_FORMAT, 0, "%s: %s: %s (share/machines/README.md)",
                         r->path, key, what);
}

static stk_status put_figure(const struct reader *r, const struct figure_row *row, const json_t *j,
                             void *to)
{
    const json_t *value = json_object_get(j, "value");
    const char *source = json_string_value(json_object_get(j, "source"));
    double v = json_number_value(value);
    if (!json_is_number(value) || !isfinite(v) || v < 0)
        return refuse(r, row->name, "its value must be a number, 0 or above");
    if (!source || !source[0]) return refuse(r, row->name, "it has no source");
    if (row->type != FIGURE_DOUBLE && v > (row->type == FIGURE_U32 ? 1e6 : 1e18))
        return refuse(r, row->name, "its value is too large");
    uint8_t *at = (uint8_t *)to + row->offset;
    uint64_t whole = row->type == FIGURE_DOUBLE ? 0 : (uint64_t)v;
    uint32_t small = (uint32_t)whole;
    memcpy(at, row->type == FIGURE_DOUBLE ? (const void *)&v
               : row->type == FIGURE_U64  ? (const void *)&whole
                                          : (const void *)&small,
           row->size);
    return STK_OK;
}

static stk_status put_figures(const struct reader *r, const struct figure_row *rows, size_t n,
                              json_t *object, void *to)
{
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        size_t k = 0;
        while (k < n && strcmp(rows[k].name, key) != 0) k++;
        if (k == n) return refuse(r, key, "not a figure that is known");
        STK_TRY(put_figure(r, &rows[k], value, to));
    }
    return STK_OK;
}

static stk_status put_drives(const struct reader *r, json_t *drives, stk_machine *m)
{
    size_t i;
    json_t *one;
    if (!json_is_array(drives) || json_array_size(drives) > STK_NVME_MAX)
        return refuse(r, "drives", "must be a list of at most 16");
    json_array_foreach(drives, i, one)
    {
        stk_machine_drive *d = &m->drives[m->n_drives++];
        if (!json_is_object(one)) return refuse(r, "drives", "each must be an object of figures");
        STK_TRY(put_figures(r, drive_figures, ROWS(drive_figures), one, d));
        if (!(d->read_bytes_per_s > 0) || !(d->write_bytes_per_s > 0))
            return refuse(r, "drives", "each needs read_bytes_per_s and write_bytes_per_s above 0");
    }
    return STK_OK;
}

static stk_status put_text(const struct reader *r, const char *key, json_t *value, char *to,
                           size_t size)
{
    const char *text = json_string_value(value);
    if (!text || strlen(text) >= size) return refuse(r, key, "must be a text, and a short one");
    memcpy(to, text, strlen(text) + 1);
    return STK_OK;
}

static stk_status put_document(const struct reader *r, json_t *doc, stk_machine *m)
{
    const char *key;
    json_t *value;
    if (json_integer_value(json_object_get(doc, "format")) != 1)
        return refuse(r, "format", "must be 1");
    json_object_foreach(doc, key, value)
    {
        if (strcmp(key, "format") == 0) continue;
        else if (strcmp(key, "name") == 0)
            STK_TRY(put_text(r, key, value, m->name, sizeof m->name));
        else if (strcmp(key, "text") == 0)
            STK_TRY(put_text(r, key, value, m->text, sizeof m->text));
        else if (strcmp(key, "on_host") == 0) m->on_host = json_is_true(value);
        else if (strcmp(key, "figures") == 0 && json_is_object(value))
            STK_TRY(put_figures(r, figures, ROWS(figures), value, m));
        else if (strcmp(key, "drives") == 0) STK_TRY(put_drives(r, value, m));
        else return refuse(r, key, "not known, or not of its type");
    }
    return m->name[0] ? STK_OK : refuse(r, "name", "it has none");
}

void stk_machine_init(stk_machine *m, size_t size)
{
    memset(m, 0, size);
    m->size = size;
}

stk_status stk_machine_read(const char *path, stk_machine *out, char *why, size_t why_bytes)
{
    struct stk_error err = { 0 };
    struct reader r = { path, &err };
    json_t *doc = NULL;
    stk_machine_init(out, sizeof *out);
    stk_status st = files_read_json(path, MACHINE_BYTES_MAX, 8, &doc, &err);
    if (st == STK_OK) st = put_document(&r, doc, out);
    json_decref(doc);
    if (why && why_bytes) snprintf(why, why_bytes, "%s", st == STK_OK ? "" : err.text);
    return st;
}
