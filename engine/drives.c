/* engine/drives.c - what the engine knows of the drives under its folders: facts, measured rates,
 * shares, and what a step moves to and from each.
 *
 * Application's thread, inside stk_seal and between steps. Owns the decision whether to measure, and
 * the weights that the store stripes by. Must not know how transfers run, nor what bytes mean.
 *
 * WEIGHTS. Given ones win. Measured ones are the rate of reads and writes at once, because that is
 * what the update does to a drive; folders on one drive are measured once and share its rate. In a
 * dry seal and in simulation nothing is measured: the first writes nothing, the second must be a
 * function of its seed. */
#include "engine/engine.h"
#include "base/sys.h"
#include "nvme/drive.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#define SECOND_NS 1000000000ull
#define MUCH_BYTES (4ull << 30)          /* moved by a step: then rates are worth a second */
#define SOME_BYTES (256ull << 20) /* moved by a step: then the prediction needs its drives' rates */
#define MEASURE_WRITE_BYTES (1ull << 30) /* at most, on each drive */
#define MEASURE_LEAST_BYTES (128ull << 20) /* less room for it: no figures, as it would be a small
                                            * file in the drive's cache */

#define MEASURE_MOST_DEPTH 32u             /* as transfers go out (io_cfg.depth) */
#define MEASURE_BUFFER_BYTES (256ull << 20) /* more than caches hold of what one transfer after another
                                            * left there: a run's arenas are larger */

struct eng_drive {
    struct drive_facts facts;
    struct measure_rates rates;
    struct measure_load load;   /* that they were measured with */
    bool measured;
    uint32_t first;             /* lowest index of a folder on the same drive */
    uint32_t folders;           /* that share the drive */
    double weight;              /* as the store gets it; 0: nothing goes there */
};

static bool weights_given(const stk_engine *e)
{
    for (uint32_t i = 0; i < STK_NVME_MAX; i++)
        if (e->cfg.nvme_weights[i] != 0) return true;
    return false;
}

static stk_status check_weights(stk_engine *e)
{
    for (uint32_t i = 0; i < STK_NVME_MAX; i++) {
        double w = e->cfg.nvme_weights[i];
        if (!isfinite(w) || w < 0)
            return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                                 "--nvme-weights: number %u is %g; a share is a number, 0 or above",
                                 i + 1, w);
        if (w > 0 && i >= e->n_paths && !(i == 0 && e->cfg.storage == STK_STORAGE_SIM))
            return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                                 "--nvme-weights: a share for folder %u, but %u are given by --nvme",
                                 i + 1, e->n_paths);
    }
    return STK_OK;
}

static bool same_drive(const struct drive_facts *a, const struct drive_facts *b)
{
    if (a->under[0] && b->under[0]) return strcmp(a->under, b->under) == 0;
    return a->device_id == b->device_id;
}

stk_status drives_check_folders(stk_engine *e)
{
    if (e->cfg.storage == STK_STORAGE_SIM) return STK_OK;
    for (uint32_t i = 0; i < e->n_paths; i++) {
        if (access(e->paths[i], F_OK) != 0)
            return stk_error_set(&e->err, STK_ERR_IO, errno, "--nvme %s: %s; make the folder first",
                                 e->paths[i], strerror(errno));
        if (access(e->paths[i], W_OK | X_OK) != 0)
            return stk_error_set(&e->err, STK_ERR_IO, errno,
                                 "--nvme %s: not writable by this user (%s); choose a folder that "
                                 "is, or change its permissions",
                                 e->paths[i], strerror(errno));
    }
    return STK_OK;
}

stk_status drives_find(stk_engine *e)
{
    STK_TRY(check_weights(e));
    if (e->n_paths == 0) return STK_OK;
    e->drives = sys_calloc(e->n_paths, sizeof *e->drives);
    if (!e->drives) return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the drives");
    bool given = weights_given(e);
    for (uint32_t i = 0; i < e->n_paths; i++) {
        struct eng_drive *d = &e->drives[i];
        d->weight = given ? e->cfg.nvme_weights[i] : 1;
        d->first = i;
        if (e->cfg.storage == STK_STORAGE_SIM) {
            d->folders = 1;
            continue;
        }
        struct stk_error err = { 0 };
        stk_status st = drive_facts_read(e->paths[i], "/sys", &d->facts, &err);
        if (st != STK_OK)
            return stk_error_set(&e->err, st, err.os_errno, "--nvme %s: %s", e->paths[i], err.text);
        for (uint32_t k = 0; k < i && d->first == i; k++)
            if (same_drive(&d->facts, &e->drives[k].facts)) d->first = e->drives[k].first;
        e->drives[d->first].folders++;
    }
    return STK_OK;
}

void drives_free(stk_engine *e) { sys_free(e->drives); }

/* Folders of one file system share what is free; which folder gets how much is the store's, within
 * what each has. */
stk_status drives_check_room(stk_engine *e)
{
    uint64_t need = e->place.nvme_bytes, room = 0;
    char a[32], b[32], names[512] = "";
    if (e->cfg.storage == STK_STORAGE_SIM || e->cfg.adopt || need == 0) return STK_OK;
    for (uint32_t i = 0; i < e->n_paths; i++) {
        bool seen = e->drives[i].weight == 0;
        for (uint32_t k = 0; k < i; k++)
            seen |= e->drives[k].weight > 0 &&
                    e->drives[k].facts.device_id == e->drives[i].facts.device_id;
        size_t at = strlen(names);
        snprintf(names + at, sizeof names - at, "%s%s", i ? ", " : "", e->paths[i]);
        if (seen) continue;
        int64_t free_bytes = sys_disk_free(e->paths[i]);
        if (free_bytes < 0)
            return stk_error_set(&e->err, STK_ERR_IO, errno, "--nvme %s: %s", e->paths[i],
                                 strerror(errno));
        room += (uint64_t)free_bytes;
    }
    if (room >= need) return STK_OK;
    return stk_error_set(&e->err, STK_ERR_NOSPACE, 0,
                         "--nvme %s: %s are needed, %s are free; free some space, add another "
                         "folder, or keep a part in memory (--optimizer-state host)",
                         names, mem_size_format(need, a), mem_size_format(room, b));
}

/* --- measuring -------------------------------------------------------------------------------- */

static const struct plan *step_plan(const stk_engine *e)
{
    return e->plan_train ? e->plan_train : e->plan_eval;
}

/* Does a visit ever wait for a read? Parameters or activations that it uses come from a drive. */
static bool visits_read(const struct plan *p)
{
    for (uint32_t i = 0; p && i < p->n_nodes; i++) {
        const struct plan_node *x = &p->nodes[i];
        if (x->kind == PLAN_ACT_IN || (x->kind == PLAN_FETCH && x->visit != PLAN_NO)) return true;
    }
    return false;
}

uint64_t drives_depth_bytes(const stk_engine *e)
{
    bool reads = e->cfg.own_order || visits_read(e->plan_train) || visits_read(e->plan_eval);
    return reads ? ENG_DRIVE_BYTES : ENG_DRIVE_BYTES_FREE;
}

/* Bytes that a step moves; a period of the plan. */
static void step_bytes(const stk_engine *e, uint64_t *read, uint64_t *write)
{
    const struct plan *p = step_plan(e);
    *read = p ? plan_moved(p, PLAN_NVME_READ) : 0;
    *write = p ? plan_moved(p, PLAN_NVME_WRITE) : 0;
}

/* Time for each drive; 0: none. */
static uint64_t measure_time(const stk_engine *e)
{
    uint64_t read, write, set = e->cfg.measure_ns;
    if (e->cfg.storage == STK_STORAGE_SIM || e->cfg.simulate || set == UINT64_MAX) return 0;
    if (set) return set;
    step_bytes(e, &read, &write);
    /* an adopted store lies where it lies */
    bool weigh = e->n_paths > 1 && !weights_given(e) && !e->cfg.adopt;
    bool needed = weigh || read + write > MUCH_BYTES;
    return needed || (e->predicting && read + write > SOME_BYTES) ? SECOND_NS : 0;
}

/* What a step will have in flight: as many requests of its size as the limit allows (the size of that in
 * which the mean byte travels), going round in as much memory as there will be, as far as that matters. */
static struct measure_load load_of(const stk_engine *e)
{
    const struct plan *p = step_plan(e);
    double bytes = 0, squares = 0;
    uint64_t limit = drives_depth_bytes(e), block;
    for (uint32_t i = 0; p && i < p->n_nodes; i++) {
        const struct plan_node *n = &p->nodes[i];
        if (n->resource != PLAN_NVME_READ && n->resource != PLAN_NVME_WRITE) continue;
        double size = n->bytes < IO_TRANSFER_MAX ? (double)n->bytes : IO_TRANSFER_MAX;
        bytes += (double)n->bytes;
        squares += (double)n->bytes * size;
    }
    block = bytes > 0 ? (uint64_t)(squares / bytes) : 1u << 20;
    block = round_page(block ? block : 1);
    uint64_t depth = (limit + block / 2) / block;
    struct measure_load load = { .block_bytes = block,
                                 .depth = depth < 2 ? 2 : depth > MEASURE_MOST_DEPTH ? MEASURE_MOST_DEPTH
                                                                                     : (uint32_t)depth,
                                 .buffer_bytes = e->place.host_bytes / 4 };
    if (load.buffer_bytes > MEASURE_BUFFER_BYTES) load.buffer_bytes = MEASURE_BUFFER_BYTES;
    return load;
}

static stk_status measure_one(stk_engine *e, uint32_t i, uint64_t budget_ns)
{
    struct eng_drive *d = &e->drives[i];
    struct stk_error err = { 0 };
    d->load = load_of(e);
    int64_t room = sys_disk_free(e->paths[i]);
    uint64_t most = room > 0 && (uint64_t)room / 2 < MEASURE_WRITE_BYTES ? (uint64_t)room / 2
                                                                          : MEASURE_WRITE_BYTES;
    stk_status st = most < MEASURE_LEAST_BYTES
                        ? stk_error_set(&err, STK_ERR_NOSPACE, 0, "half of what is free is less "
                                        "than %llu MiB",
                                        MEASURE_LEAST_BYTES >> 20)
                        : measure_rates(e->paths[i], &d->load, budget_ns, most, &d->rates, &err);
    if (st == STK_ERR_NOSPACE || err.os_errno == EFBIG) { /* the run itself may fit: its store says so */
        eng_note(e, "drive %s: too little room to measure it: %s", e->paths[i], err.text);
        return STK_OK;
    }
    if (st != STK_OK)
        return stk_error_set(&e->err, st, err.os_errno,
                             "--nvme %s: its drive cannot be measured: %s; leave this folder out, "
                             "or give --nvme-weights and --measure-drives off",
                             e->paths[i], err.text);
    if (!(d->rates.both_bytes_per_s > 0))
        return stk_error_set(&e->err, STK_ERR_IO, 0,
                             "--nvme %s: its drive moved nothing while it was measured; leave this "
                             "folder out, or give --nvme-weights and --measure-drives off",
                             e->paths[i]);
    d->measured = true;
    return STK_OK;
}

stk_status drives_measure(stk_engine *e)
{
    uint64_t budget_ns = measure_time(e);
    bool all = budget_ns > 0;
    for (uint32_t i = 0; budget_ns && i < e->n_paths; i++) {
        struct eng_drive *d = &e->drives[i], *first = &e->drives[d->first];
        if (d->first == i) STK_TRY(measure_one(e, i, budget_ns));
        d->rates = first->rates;
        d->load = first->load;
        d->measured = first->measured;
        all &= d->measured;
    }
    /* rates of some and not of others are no weights */
    for (uint32_t i = 0; all && !weights_given(e) && i < e->n_paths; i++)
        e->drives[i].weight =
            e->drives[i].rates.both_bytes_per_s / e->drives[e->drives[i].first].folders;
    return STK_OK;
}

void drives_configure(const stk_engine *e, struct store_cfg *sc)
{
    for (uint32_t i = 0; i < e->n_paths; i++) sc->weights[i] = e->drives[i].weight;
    /* limits stay 0: what is free on each path, shared where paths share a file system */
}

/* --- what is told ----------------------------------------------------------------------------- */

/* Share of the bytes that folder i has (or, before there is a store, will have). */
static double share_of(const stk_engine *e, uint32_t i)
{
    double sum = 0, mine = 0;
    for (uint32_t k = 0; k < e->n_paths; k++) {
        double x = e->drives[k].weight;
        if (e->store) {
            struct store_path_stats ps;
            store_path_stats_read(e->store, k, &ps);
            x = (double)ps.extents_bytes;
        }
        sum += x;
        if (k == i) mine = x;
    }
    return sum > 0 ? mine / sum : 0;
}

static void note_drive(stk_engine *e, uint32_t i)
{
    const struct eng_drive *d = &e->drives[i];
    const struct measure_rates *r = &d->rates;
    char rates[288], what[176];
    if (d->measured)
        snprintf(rates, sizeof rates,
                 "reads %.2f GB/s, writes %.2f GB/s, both at once %.2f GB/s%s; reads' p99 %.2f ms "
                 "alone, %.2f ms beside writes (%u x %.1f MiB in flight)",
                 r->read_bytes_per_s / 1e9, r->write_bytes_per_s / 1e9, r->both_bytes_per_s / 1e9,
                 r->direct ? "" : " (through the page cache)", (double)r->read_p99_ns / 1e6,
                 (double)r->mixed_read_p99_ns / 1e6, d->load.depth,
                 (double)d->load.block_bytes / (1u << 20));
    else
        snprintf(rates, sizeof rates, "not measured");
    snprintf(what, sizeof what, "%s%s%s", d->facts.device[0] ? d->facts.device : "no block device",
             d->facts.model[0] ? ", " : "", d->facts.model);
    eng_note(e, "drive %s (%s): %s; %.1f %% of the state on NVMe%s", e->paths[i], what, rates,
             100 * share_of(e, i),
             d->folders != 1 && d->first == i ? "; several folders share it"
             : d->first != i                  ? "; shared with a folder above"
                                              : "");
}

/* What a step writes, by state, and what would end it. */
static void note_wear(stk_engine *e)
{
    static const char *const name[] = { "parameters", "optimizer state", "gradients", "activations" };
    static const char *const option[] = { "--params host", "--optimizer-state host", "--grads host",
                                          "--activations recompute" };
    const struct plan *p = e->plan_train;
    uint64_t bytes[CHUNK_STATE_N + 1] = { 0 }, sum = 0;
    char line[400] = "", a[32];
    for (uint32_t i = 0; p && i < p->n_nodes; i++) {
        const struct plan_node *n = &p->nodes[i];
        if (n->spec || n->optional) continue; /* the same bytes a second time, as in plan_moved */
        if (n->kind == PLAN_WRITE_BACK) bytes[n->state] += n->bytes;
        if (n->kind == PLAN_ACT_OUT) bytes[CHUNK_STATE_N] += n->bytes;
    }
    for (int s = 0; s <= CHUNK_STATE_N; s++) {
        size_t at = strlen(line);
        sum += bytes[s];
        if (!bytes[s]) continue;
        bool bound = e->cfg.durable && s < CHUNK_GRAD;
        snprintf(line + at, sizeof line - at, "%s%s %s (%s)", at ? ", " : "", name[s],
                 mem_size_format(bytes[s], a), bound ? "durable steps need it there" : option[s]);
    }
    if (sum == 0) return;
    eng_note(e, "a step writes to NVMe, and what ends it: %s; %sa --batch twice as large halves "
                "what is written for a token",
             line,
             e->cfg.durable ? ""
                            : "each GiB that --host-memory gives beyond what is useful else saves a "
                              "GiB of it; ");
}

void drives_note(stk_engine *e)
{
    uint64_t read, write;
    step_bytes(e, &read, &write);
    if (read + write == 0 && e->place.nvme_bytes == 0) return;
    for (uint32_t i = 0; i < e->n_paths; i++) note_drive(e, i);
    note_wear(e);
}

bool stk_drive_info(const stk_engine *e, uint32_t i, stk_drive *out)
{
    uint64_t read, write;
    if (i >= e->n_paths || !e->drives) return false;
    const struct eng_drive *d = &e->drives[i];
    const struct drive_facts *f = &d->facts;
    step_bytes(e, &read, &write);
    *out = (stk_drive){ .path = e->paths[i],
                        .device = f->device,
                        .model = f->model,
                        .weight = share_of(e, i),
                        .percentage_used = UINT32_MAX,
                        .temperature_c = INT32_MIN };
    out->step_read_bytes = (uint64_t)((double)read * out->weight);
    out->step_write_bytes = (uint64_t)((double)write * out->weight);
    out->first_of_drive = d->first;
    if (d->measured) {
        out->read_bytes_per_s = d->rates.read_bytes_per_s;
        out->write_bytes_per_s = d->rates.write_bytes_per_s;
        out->both_bytes_per_s = d->rates.both_bytes_per_s;
        out->cores_busy = d->rates.cores_busy;
        out->read_p99_ns = d->rates.read_p99_ns;
        out->mixed_read_p99_ns = d->rates.mixed_read_p99_ns;
    }
    if (f->smart) {
        out->written_bytes = f->written_bytes;
        out->endurance_bytes = f->endurance_bytes;
        out->percentage_used = f->percentage_used;
        out->temperature_c = f->temperature_c;
    }
    if (e->store) {
        struct store_path_stats ps;
        store_path_stats_read(e->store, i, &ps);
        out->read_bytes = ps.read_bytes;
        out->write_bytes = ps.write_bytes;
    }
    return true;
}
