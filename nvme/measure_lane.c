/* nvme/measure_lane.c - a run from its first request to its last: which place is next, what counts.
 *
 * All of it runs on the run's lane. It knows no files, no folders and not which backend moves the
 * bytes; the application's thread waits for `ended`. No two requests on their way touch the same
 * block, so what a read must find is known when it is issued (BEN-05). */
#include "nvme/measure_impl.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static void slot_next(struct measure_slot *slot);

/* --- errors and the end ----------------------------------------------------------------------- */

void measure_lane_error(struct measure_run *r, const struct stk_error *why)
{
    if (r->status == STK_OK) {
        r->status = why->code;
        stk_error_forward(&r->error, why);
    }
    r->ending = true;
}

static void transfer_failed(struct measure_slot *slot, const struct io_req *req)
{
    static const char *const verb[] = { "reading", "writing", "flushing" };
    struct measure_run *r = slot->run;
    struct stk_error why = { 0 };
    const char *path = r->m->files[slot->file].path;
    if (req->op == IO_FLUSH)
        stk_error_set(&why, req->status, req->os_errno,
                      "%.400s: the flush behind the writes failed: %s; see the kernel log for the "
                      "drive's state",
                      path, strerror(req->os_errno));
    else if (req->os_errno)
        stk_error_set(&why, req->os_errno == ENOSPC ? STK_ERR_NOSPACE : req->status, req->os_errno,
                      "%.400s: %s %llu bytes at byte %llu failed: %s; see the kernel log for the "
                      "drive's state",
                      path, verb[req->op], (unsigned long long)req->size_bytes,
                      (unsigned long long)req->offset_bytes, strerror(req->os_errno));
    else
        stk_error_set(&why, req->status, 0,
                      "%.400s: %s %llu bytes at byte %llu ended after %llu and went no further; "
                      "the file may have been cut short",
                      path, verb[req->op], (unsigned long long)req->size_bytes,
                      (unsigned long long)req->offset_bytes, (unsigned long long)req->moved_bytes);
    measure_lane_error(r, &why);
}

static void flush_done(struct io_req *req)
{
    struct measure_run *r = req->owner;
    if (req->status != STK_OK) {
        struct measure_slot slot = { .run = r, .file = (uint32_t)(req - r->flushes) };
        transfer_failed(&slot, req);
    }
    atomic_fetch_add_explicit(&r->progress, 1, memory_order_relaxed);
    if (req->done_ns > r->last_ns) r->last_ns = req->done_ns;
    if (req->done_ns > r->last_write_ns) r->last_write_ns = req->done_ns;
    r->path[req - r->flushes].last_ns[1] = req->done_ns;
    if (--r->flushes_left == 0 && r->live == 0) exec_event_set(&r->ended);
}

static void flush_one(struct measure_run *r, uint32_t i)
{
    struct io_req *req = &r->flushes[i];
    struct stk_error why = { 0 };
    memset(req, 0, sizeof *req);
    req->op = IO_FLUSH;
    req->cls = IO_WRITE_BACK;
    req->file = r->m->through ? i : r->io_file[i];
    req->done = flush_done;
    req->owner = r;
    r->flushes_left++;
    if (io_submit(r->io, req, &why) == STK_OK) return;
    measure_lane_error(r, &why);
    r->flushes_left--;
}

/* The flush belongs to the writes: their time ends with it (BEN-04). A file is flushed when its own
 * requests have ended, whatever other drives still do. Through the store any slot may write to any
 * file, so all are flushed at the end; they are those of the store's io, which numbers them
 * from 0. */
static void slot_rest(struct measure_slot *slot)
{
    struct measure_run *r = slot->run;
    struct measure_path *p = &r->path[slot->file];
    bool through = r->m->through != NULL;
    r->live--;
    p->live--;
    if (r->wrote && r->status == STK_OK) {
        if (!through && p->live == 0) flush_one(r, slot->file);
        for (uint32_t i = 0; through && r->live == 0 && i < r->m->cfg.n_paths; i++)
            flush_one(r, i);
    }
    if (r->live == 0 && r->flushes_left == 0) exec_event_set(&r->ended);
}

static bool asked_to_stop(const struct measure_run *r)
{
    return r->cfg->stop && atomic_load_explicit(r->cfg->stop, memory_order_relaxed);
}

static bool time_is_up(const struct measure_run *r, uint64_t now_ns)
{
    /* from where the counting began, not from where it should have: a drive that stood still
     * meanwhile ends ramp and run in one burst, whose rate would be that of the burst */
    if (r->fill && r->issued_bytes < r->least_bytes) return false;
    return r->cfg->run_ns && r->counting && now_ns - r->since_ns >= r->cfg->run_ns;
}

static bool bytes_used_up(const struct measure_run *r)
{
    return r->cfg->bytes_max && r->issued_bytes + r->block_bytes > r->cfg->bytes_max;
}

/* --- places ----------------------------------------------------------------------------------- */

static bool next_block(struct measure_run *r, struct measure_target *t, struct measure_stream *s,
                       uint64_t *out)
{
    if (r->fill && s->next == t->n_blocks) return false;
    for (uint64_t tries = 0; tries < t->n_blocks; tries++) {
        uint64_t k = (s->first + s->next++) % t->n_blocks;
        uint64_t block = r->order ? r->order[k] : k;
        if (t->busy[block]) continue;
        t->busy[block] = 1;
        *out = block;
        return true;
    }
    return false;
}

/* --- what blocks carry ------------------------------------------------------------------------ */

/* Through the store it is the store that checks. */
static bool marks(const struct measure_run *r)
{
    return (r->fill || r->cfg->verify) && !r->m->through;
}

/* The next pass of every unit of the block, into the buffer. */
static void stamp(struct measure_slot *slot)
{
    struct measure_run *r = slot->run;
    struct measure_file *f = &r->m->files[slot->file];
    uint64_t at = slot->block * r->block_bytes, n = measure_block_len(r, slot->block);
    for (uint64_t u = 0; u < n; u += MEASURE_UNIT_BYTES)
        measure_pattern_fill(&r->m->pattern, slot->buf + u, slot->file, at + u,
                             ++f->pass[(at + u) / MEASURE_UNIT_BYTES]);
}

static void first_failure(struct measure_slot *slot, uint64_t at, const uint8_t *unit)
{
    struct measure_run *r = slot->run;
    const struct measure_file *f = &r->m->files[slot->file];
    uint32_t pass = f->pass[at / MEASURE_UNIT_BYTES];
    char found[256];
    measure_pattern_explain(&r->m->pattern, unit, slot->file, at, pass, found, sizeof found);
    snprintf(r->out->first_failure, sizeof r->out->first_failure,
             "%.160s (file %u) at byte %llu: found %s; expected pass %u of this block, written by "
             "this measurement",
             f->path, slot->file, (unsigned long long)at, found, pass);
}

static void verify(struct measure_slot *slot)
{
    struct measure_run *r = slot->run;
    const struct measure_file *f = &r->m->files[slot->file];
    uint64_t at = slot->block * r->block_bytes;
    for (uint64_t u = 0; u < r->block_bytes; u += MEASURE_UNIT_BYTES) {
        if (measure_pattern_check(&r->m->pattern, slot->buf + u, slot->file, at + u,
                                  f->pass[(at + u) / MEASURE_UNIT_BYTES]))
            continue;
        if (r->out->verify_failures++ == 0) first_failure(slot, at + u, slot->buf + u);
    }
}

/* --- requests --------------------------------------------------------------------------------- */

static void plain_done(struct io_req *req)
{
    struct measure_slot *slot = req->owner;
    if (req->status != STK_OK) transfer_failed(slot, req);
    measure_lane_done(slot, req->op == IO_READ, req->status, req->submit_ns, req->done_ns);
}

static stk_status plain_submit(struct measure_slot *slot, struct stk_error *err)
{
    struct measure_run *r = slot->run;
    struct io_req *req = &slot->req;
    req->op = slot->writes ? IO_WRITE : IO_READ;
    req->cls = slot->writes ? IO_WRITE_BACK : IO_DEMAND;
    req->file = r->io_file[slot->file];
    req->buf = slot->buf;
    req->offset_bytes = slot->block * r->block_bytes;
    req->size_bytes = measure_block_len(r, slot->block);
    req->done = plain_done;
    req->owner = slot;
    return io_submit(r->io, req, err);
}

/* The slot's block is chosen: read it, or write it. */
static void slot_submit(struct measure_slot *slot)
{
    struct measure_run *r = slot->run;
    struct stk_error why = { 0 };
    if (slot->writes) {
        r->wrote = true;
        if (marks(r)) stamp(slot);
    }
    r->issued_bytes += measure_block_len(r, slot->block);
    stk_status status = slot->op ? measure_store_submit(slot, &why) : plain_submit(slot, &why);
    if (status == STK_OK) return;
    measure_lane_error(r, &why);
    slot_rest(slot);
}

static void slot_next(struct measure_slot *slot)
{
    struct measure_run *r = slot->run;
    struct measure_target *t = &r->target[slot->file];
    if (bytes_used_up(r)) r->ending = true;
    if (r->ending ||
        !next_block(r, t, slot->writes ? &t->writes : &t->reads, &slot->block)) {
        slot_rest(slot);
        return;
    }
    uint64_t place = slot->turn++ % r->rounds * r->n_slots + (uint64_t)(slot - r->slots);
    slot->buf = r->buffer + place * r->block_bytes;
    slot_submit(slot);
}

/* --- accounting ------------------------------------------------------------------------------- */

/* The clock starts with the completion that ends the ramp, which is not counted itself: then the
 * bytes counted are those moved between two completions, whatever the depth. */
static bool ramp_over(struct measure_run *r, uint64_t now_ns)
{
    const struct measure_cfg *c = r->cfg;
    if (r->counting) return true;
    if (now_ns - r->start_ns >= c->ramp_ns ||
        (c->bytes_max && r->moved_bytes >= c->bytes_max / 2)) {
        r->counting = true;
        r->since_ns = now_ns;
    }
    return false;
}

static void account(struct measure_slot *slot, bool read, uint64_t submit_ns, uint64_t done_ns)
{
    struct measure_run *r = slot->run;
    uint64_t n = measure_block_len(r, slot->block);
    r->moved_bytes += n;
    if (!ramp_over(r, done_ns)) return;
    r->last_ns = done_ns;
    struct measure_path *path =
        &r->path[r->m->through ? r->m->through->path_of[slot->block] : slot->file];
    path->bytes[!read] += n;
    path->last_ns[!read] = done_ns;
    r->out->requests++;
    if (read) {
        r->read_bytes += n;
        r->last_read_ns = done_ns;
    } else {
        r->write_bytes += n;
        r->last_write_ns = done_ns;
    }
    measure_histogram_add(read ? &r->out->read : &r->out->write, done_ns - submit_ns);
}

void measure_lane_done(struct measure_slot *slot, bool read, stk_status status,
                       uint64_t submit_ns, uint64_t done_ns)
{
    struct measure_run *r = slot->run;
    struct measure_target *t = &r->target[slot->file];
    atomic_fetch_add_explicit(&r->progress, 1, memory_order_relaxed);
    if (status == STK_OK) {
        account(slot, read, submit_ns, done_ns);
        if (r->fill) r->filled_blocks++;
        if (read && marks(r)) verify(slot);
    }
    if (asked_to_stop(r) || time_is_up(r, done_ns) || bytes_used_up(r)) r->ending = true;
    if (read && r->cfg->mode == MEASURE_OPTIMIZER && !r->ending) {
        slot->writes = true;
        slot_submit(slot);
        return;
    }
    t->busy[slot->block] = 0;
    if (r->cfg->mode == MEASURE_OPTIMIZER && !r->fill) slot->writes = false;
    else if (slot->alternates) slot->writes = !slot->writes;
    slot_next(slot);
}

void measure_lane_begin(void *arg)
{
    struct measure_run *r = arg;
    r->start_ns = r->since_ns = r->last_ns = exec_now_ns(r->ex);
    r->last_read_ns = r->last_write_ns = r->start_ns;
    r->counting = r->cfg->ramp_ns == 0;
    r->live = r->n_slots;
    for (uint32_t i = 0; i < r->n_slots; i++) r->path[r->slots[i].file].live++;
    if (asked_to_stop(r)) r->ending = true;
    uint32_t n = r->n_slots;
    for (uint32_t i = 0; i < n; i++) slot_next(&r->slots[i]);
}
