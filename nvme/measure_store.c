/* nvme/measure_store.c - a measurement whose blocks are extents of a store.
 *
 * Owns lane, io and store from open to close (extents keep their files, so the io cannot change
 * between runs). Places and accounting are measure_lane.c's: one target with all extents of all
 * paths. Opening, running and closing on the application's thread; the two functions of a slot on
 * the lane. */
#include "nvme/measure_store.h"
#include "base/sys.h"
#include "nvme/io_sim.h"
#include "nvme/measure_impl.h"

#include <stdio.h>
#include <string.h>

/* --- a slot's operation (lane) ---------------------------------------------------------------- */

static void op_done(struct store_op *op)
{
    struct measure_slot *slot = op->owner;
    struct measure_run *r = slot->run;
    bool read = !slot->writes;
    stk_status status = op->status;
    if (status == STK_ERR_CORRUPT) {
        if (r->out->verify_failures++ == 0)
            snprintf(r->out->first_failure, sizeof r->out->first_failure, "%.500s",
                     op->error.text);
        status = STK_OK; /* the bytes were moved */
    }
    if (status != STK_OK) measure_lane_error(r, &op->error);
    measure_lane_done(slot, read, status, op->submit_ns, op->done_ns);
}

stk_status measure_store_submit(struct measure_slot *slot, struct stk_error *err)
{
    struct measure_through_store *t = slot->run->m->through;
    struct store_op *op = slot->op;
    op->extent = (uint32_t)slot->block;
    op->cls = slot->writes ? IO_WRITE_BACK : IO_DEMAND;
    op->buf = slot->buf;
    op->version = slot->writes ? ++t->version : UINT64_MAX;
    op->done = op_done;
    op->owner = slot;
    return slot->writes ? store_put(t->store, op, err) : store_get(t->store, op, err);
}

/* --- a run ------------------------------------------------------------------------------------ */

/* A quarter more than the drives take at once: those under checksum do not leave them idle. */
static uint32_t operations(const struct measure_cfg *cfg)
{
    uint32_t more = cfg->depth / 4;
    return cfg->n_paths * (cfg->depth + (more > 2 ? more : 2));
}

static stk_status run_places(struct measure_run *r, struct store_op **ops, struct stk_error *err)
{
    struct measure_through_store *t = r->m->through;
    uint32_t n = operations(r->cfg);
    STK_TRY(measure_run_places(r, 1, n < t->n_extents ? n : (uint32_t)t->n_extents, err));
    *ops = sys_calloc(r->n_slots, sizeof **ops);
    if (!*ops)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for %u operations", r->n_slots);
    for (uint32_t i = 0; i < r->n_slots; i++) r->slots[i].op = &(*ops)[i];
    if (t->registered != r->m->buffer) io_buffer_register(t->io, r->m->buffer, r->m->buffer_bytes);
    t->registered = r->m->buffer;
    return STK_OK;
}

static stk_status run_once(struct measure *m, const struct measure_cfg *cfg, bool fill,
                           struct measure_result *out, struct stk_error *err)
{
    struct measure_through_store *t = m->through;
    struct store_op *ops = NULL;
    struct measure_run *r = sys_calloc(1, sizeof *r);
    if (!r) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a measurement");
    memset(out, 0, sizeof *out);
    r->m = m;
    r->cfg = cfg;
    r->out = out;
    r->fill = fill;
    r->block_bytes = t->extent_bytes;
    r->file_bytes = t->n_extents * t->extent_bytes;
    r->ex = t->ex;
    r->lane = t->lane;
    r->io = t->io;
    stk_status status = run_places(r, &ops, err);
    if (status == STK_OK) {
        status = measure_run_wait(r, err);
        t->broken |= status == STK_ERR_STALLED;
        if (!t->broken && store_drain(t->store, UINT64_MAX, NULL) != STK_OK) t->broken = true;
        measure_run_result(r);
        size_t used = strlen(out->backend);
        snprintf(out->backend + used, sizeof out->backend - used, "; store of %s",
                 store_describe(t->store));
    }
    /* what stalled may still be reaped until the io and the store are closed */
    if (t->broken) {
        store_close(t->store);
        io_close(t->io);
        t->store = NULL;
        t->io = NULL;
    }
    measure_run_free(r);
    sys_free(ops);
    return status;
}

stk_status measure_store_run(struct measure *m, const struct measure_cfg *cfg,
                             struct measure_result *out, struct stk_error *err)
{
    struct measure_through_store *t = m->through;
    if (t->broken)
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "a measurement through the store has stalled before; open a new one");
    if (cfg->verify || cfg->block_bytes != t->extent_bytes || cfg->depth != t->depth ||
        cfg->kind != m->cfg.kind)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a store of extents of %llu bytes, %u deep, cannot be measured with "
                             "blocks of %llu bytes, depth %u, verify %d or another backend",
                             (unsigned long long)t->extent_bytes, t->depth,
                             (unsigned long long)cfg->block_bytes, cfg->depth, cfg->verify);
    return run_once(m, cfg, false, out, err);
}

/* --- opening and closing ---------------------------------------------------------------------- */

static void notify(void *arg)
{
    struct measure_through_store *t = arg;
    if (t->io) io_reap(t->io, 64);
}

static stk_status open_store(struct measure *m, const struct measure_store_cfg *cfg,
                             struct stk_error *err)
{
    struct measure_through_store *t = m->through;
    const struct measure_cfg *c = &m->cfg;
    const struct io_sim_cfg *sim = c->kind == IO_SIM ? c->sim : NULL;
    for (uint64_t i = 0; i < t->n_extents; i++) t->extent_sizes[i] = t->extent_bytes;
    struct io_cfg ic = { .kind = c->kind,
                         .ex = t->ex,
                         .lane = t->lane,
                         .notify = &t->notify,
                         .depth = c->depth,
                         .workers = c->depth < 64 ? c->depth : 64,
                         .buffered = c->buffered,
                         .no_registration = c->no_registration,
                         .sim = sim };
    STK_TRY(io_open(&ic, &t->io, err));
    struct store_cfg sc = { .io = t->io,
                            .ex = t->ex,
                            .lane = t->lane,
                            .n_paths = c->n_paths,
                            .n_extents = (uint32_t)t->n_extents,
                            .extent_bytes = t->extent_sizes,
                            .room = 1,
                            .checksum_lanes = cfg->checksum_lanes,
                            .no_checksums = cfg->no_checksums,
                            .sim_disk = sim ? sim->disk : NULL };
    memcpy(sc.paths, c->paths, sizeof sc.paths);
    return store_open(&sc, &t->store, err);
}

static uint8_t path_of(const struct measure *m, uint32_t extent)
{
    const char *file;
    uint64_t offset_bytes;
    if (store_locate(m->through->store, extent, &file, &offset_bytes) != STK_OK) return 0;
    for (uint32_t k = 0; k < m->cfg.n_paths; k++) {
        size_t n = strlen(m->cfg.paths[k]);
        /* the store's folder follows: of two paths of which one lies in the other, one fits */
        if (strncmp(file, m->cfg.paths[k], n) == 0 &&
            strncmp(file + n, "/stoker-run-", 12) == 0)
            return (uint8_t)k;
    }
    return 0;
}

/* All extents once; then it is known on which path each lies. */
static stk_status fill(struct measure *m, struct stk_error *err)
{
    struct measure_through_store *t = m->through;
    struct measure_cfg c = m->cfg;
    struct measure_result *result = sys_calloc(1, sizeof *result);
    if (!result) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a measurement");
    c.mode = MEASURE_WRITE;
    c.ramp_ns = c.run_ns = c.bytes_max = 0;
    stk_status status = run_once(m, &c, true, result, err);
    sys_free(result);
    for (uint32_t i = 0; status == STK_OK && i < t->n_extents; i++) t->path_of[i] = path_of(m, i);
    return status;
}

static stk_status open_through(struct measure *m, const struct measure_store_cfg *cfg,
                               struct stk_error *err)
{
    struct measure_through_store *t = sys_calloc(1, sizeof *t);
    if (!t) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a measurement");
    m->through = t;
    t->ex = measure_exec(m, &m->cfg);
    t->extent_bytes = m->cfg.block_bytes;
    t->n_extents = m->file_bytes / t->extent_bytes * m->cfg.n_paths;
    t->depth = m->cfg.depth;
    if (t->n_extents > UINT32_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "a store holds fewer than 2^32 extents; "
                             "measure smaller files");
    t->extent_sizes = sys_calloc(t->n_extents, sizeof *t->extent_sizes);
    t->path_of = sys_calloc(t->n_extents, 1);
    if (!t->extent_sizes || !t->path_of)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a table of %llu extents",
                             (unsigned long long)t->n_extents);
    exec_task_init(&t->notify, notify, t);
    STK_TRY(exec_lane_open(t->ex, "measure", &t->lane, err));
    STK_TRY(open_store(m, cfg, err));
    return fill(m, err);
}

stk_status measure_store_open(const struct measure_store_cfg *cfg, struct measure **out,
                              struct stk_error *err)
{
    struct measure *m;
    *out = NULL;
    if (cfg->plain.verify)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a measurement through the store cannot verify marks: the store has "
                             "checksums of its own");
    STK_TRY(measure_new(&cfg->plain, &m, err));
    stk_status status = open_through(m, cfg, err);
    if (status != STK_OK) {
        measure_close(m);
        return status;
    }
    *out = m;
    return STK_OK;
}

void measure_store_checksums(struct measure *m, bool on)
{
    store_checksums(m->through->store, on);
}

stk_status measure_store_plain(struct measure *m, struct measure **out, struct stk_error *err)
{
    struct measure_cfg cfg = m->cfg;
    const char *file;
    uint64_t offset_bytes;
    *out = NULL;
    if (cfg.n_paths != 1 || store_locate(m->through->store, 0, &file, &offset_bytes) != STK_OK)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "plain transfers beside a store: it must have one path, not %u",
                             cfg.n_paths);
    cfg.paths[0] = file;
    STK_TRY(measure_new(&cfg, out, err));
    (*out)->lender = m;
    return STK_OK;
}

void measure_store_free(struct measure *m)
{
    struct measure_through_store *t = m->through;
    store_close(t->store);
    io_close(t->io);
    exec_lane_close(t->lane);
    sys_free(t->extent_sizes);
    sys_free(t->path_of);
    sys_free(t);
    m->through = NULL;
}
