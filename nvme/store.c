/* nvme/store.c - extents: versions, checksums, and the way of a put and a get.
 *
 *   put   store_put -> checksum lane: CRC, zero the padding -> io's lane: write -> record -> done
 *         (not by the checksum lane where the caller brings the payload's CRC)
 *   get   store_get -> read -> checksum lane: CRC against the record -> io's lane: done
 *
 * Owns the table of extents (io's lane only) and the puts that wait for a commit. Knows no folders
 * and locks (store_files.c), no table on disk (store_table.c) and not what the bytes mean. The
 * recorded checksum also covers the extent's number and the version: a write that never reached the
 * medium, or reached another place, leaves bytes that do not fit the record. */
#include "nvme/store_impl.h"
#include "nvme/crc32c.h"
#include "base/sys.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { OP_IDLE, OP_PUT, OP_GET };

static void count_add(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static uint64_t offset_of(const struct store_extent *e, uint32_t slot)
{
    return e->offset_bytes + slot * store_round(e->payload_bytes);
}

static const char *file_of(const struct store *s, const struct store_extent *e)
{
    return s->paths[e->path].file;
}

/* --- opening and closing ---------------------------------------------------------------------- */

static stk_status check_durable(const struct store_cfg *cfg, struct stk_error *err)
{
    size_t id = strnlen(cfg->run_id, sizeof cfg->run_id);
    if (id != 0 && (id != STORE_RUN_ID_CHARS ||
                    strspn(cfg->run_id, "0123456789abcdef") != STORE_RUN_ID_CHARS))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "run id \"%.17s\": 16 of the characters 0-9 and a-f are expected",
                             cfg->run_id);
    if (cfg->payload_max_bytes > 0 && cfg->room < 2)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "durable steps need room for 2 or 3 versions of an extent; %u was "
                             "asked for",
                             cfg->room);
    if (cfg->payload_max_bytes > 0 &&
        (cfg->payload_max_bytes > STORE_TABLE_BYTES_MAX ||
         2 * store_half_bytes(cfg) > STORE_TABLE_BYTES_MAX))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a durable table with %llu bytes of payload is too large",
                             (unsigned long long)cfg->payload_max_bytes);
    if (cfg->adopt && (id == 0 || cfg->payload_max_bytes == 0))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "to adopt a durable store its run id and a size of payload are "
                             "needed");
    for (uint32_t k = 0; k < cfg->n_paths; k++)
        for (uint32_t j = 0; j < k; j++)
            if (strcmp(cfg->paths[k], cfg->paths[j]) == 0)
                return stk_error_set(err, STK_ERR_CONFIG, 0, "%s: is named twice as a swap folder",
                                     cfg->paths[k]);
    return STK_OK;
}

static stk_status check_config(const struct store_cfg *cfg, struct stk_error *err)
{
    STK_ASSERT(cfg->io && cfg->ex && cfg->lane);
    if (cfg->n_paths == 0 || cfg->n_paths > STORE_PATHS_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "a store needs 1 to %d paths; %u were given",
                             STORE_PATHS_MAX, cfg->n_paths);
    if (cfg->room < 1 || cfg->room > STORE_ROOM_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a store keeps 1 to %d versions of an extent; %u were asked for",
                             STORE_ROOM_MAX, cfg->room);
    if (cfg->checksum_lanes > STORE_LANES_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "at most %d checksum threads are supported; %u were asked for",
                             STORE_LANES_MAX, cfg->checksum_lanes);
    if ((io_kind_of(cfg->io) == IO_SIM) != (cfg->sim_disk != NULL))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a store's files lie on the simulated disk if and only if its io "
                             "does");
    STK_TRY(check_durable(cfg, err));
    uint64_t sum = 0;
    for (uint32_t i = 0; i < cfg->n_extents; i++) {
        uint64_t bytes = cfg->extent_bytes[i];
        if (store_extent_class(cfg, i) >= STORE_CLASSES_MAX)
            return stk_error_set(err, STK_ERR_CONFIG, 0, "extent %u is of class %u; 0 to %d exist",
                                 i, store_extent_class(cfg, i), STORE_CLASSES_MAX - 1);
        if (bytes == 0 || bytes > INT64_MAX / 8 ||
            (sum += store_round(bytes) * cfg->room) > INT64_MAX / 2)
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "extent %u has %llu bytes: 1 up to what a disk holds are possible",
                                 i, (unsigned long long)bytes);
    }
    return STK_OK;
}

void store_note(struct store *s, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (s->n_notes < STORE_NOTES_MAX && (s->notes[s->n_notes] = sys_strdup(text))) s->n_notes++;
}

static stk_status make_tables(struct store *s, const struct store_cfg *cfg, struct stk_error *err)
{
    s->extents = sys_calloc(cfg->n_extents ? cfg->n_extents : 1, sizeof *s->extents);
    if (!s->extents)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a table of %u extents",
                             cfg->n_extents);
    for (uint32_t i = 0; i < cfg->n_extents; i++) {
        struct store_extent *e = &s->extents[i];
        e->payload_bytes = cfg->extent_bytes[i];
        e->newest = e->before = e->durable = e->committing = STORE_ROOM_MAX;
        e->cls = (uint8_t)store_extent_class(cfg, i);
        e->room = (uint8_t)store_extent_room(cfg, i);
        e->fleeting = cfg->volatile_classes >> e->cls & 1;
        for (int k = 0; k < STORE_ROOM_MAX; k++) e->slots[k].version = STORE_NONE;
    }
    return STK_OK;
}

static void choose_run_id(struct store *s, const struct store_cfg *cfg)
{
    uint64_t random = 0;
    if (cfg->run_id[0]) {
        memcpy(s->run_id, cfg->run_id, sizeof s->run_id);
        return;
    }
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        random = exec_now_ns(s->ex) ^ (uint64_t)(uintptr_t)s;
    snprintf(s->run_id, sizeof s->run_id, "%016llx", (unsigned long long)random);
}

static stk_status open_lanes(struct store *s, uint32_t n, struct stk_error *err)
{
    for (; s->n_lanes < n; s->n_lanes++) {
        char name[16];
        snprintf(name, sizeof name, "crc-%u", s->n_lanes);
        STK_TRY(exec_lane_open(s->ex, name, &s->lanes[s->n_lanes], err));
    }
    return STK_OK;
}

static void describe(struct store *s)
{
    uint64_t sum = 0;
    for (uint32_t k = 0; k < s->n_paths; k++) sum += s->paths[k].size_bytes;
    snprintf(s->description, sizeof s->description,
             "%u path%s, %.2f GiB, %u extents, room %u, %s%s", s->n_paths,
             s->n_paths == 1 ? "" : "s", (double)sum / (1u << 30), s->n_extents, s->room,
             s->checksums ? "crc32c " : "no checksums", s->checksums ? crc32c_variant() : "");
}

stk_status store_open(const struct store_cfg *cfg, struct store **out, struct stk_error *err)
{
    *out = NULL;
    STK_TRY(check_config(cfg, err));
    struct store *s = sys_calloc(1, sizeof *s);
    if (!s) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a store");
    s->io = cfg->io;
    s->ex = cfg->ex;
    s->lane = cfg->lane;
    s->sim_disk = cfg->sim_disk;
    s->room = cfg->room;
    s->n_paths = cfg->n_paths;
    s->n_extents = cfg->n_extents;
    s->checksums = !cfg->no_checksums;
    s->volatile_classes = cfg->volatile_classes;
    s->payload_max_bytes = cfg->payload_max_bytes;
    s->half_bytes = s->buffer_bytes = store_half_bytes(cfg);
    choose_run_id(s, cfg);
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++) s->paths[k].lock_fd = -1;
    exec_event_init(s->ex, &s->drained);
    exec_event_init(s->ex, &s->answered);
    stk_status status = make_tables(s, cfg, err);
    if (status == STK_OK && s->checksums)
        status = open_lanes(s, cfg->checksum_lanes ? cfg->checksum_lanes : 1, err);
    if (status == STK_OK) status = store_table_open(s, err);
    if (status == STK_OK)
        status = cfg->adopt ? store_adopt(s, cfg, err) : store_files_make(s, cfg, err);
    if (status == STK_OK) status = store_files_add(s, err);
    if (status == STK_OK) status = store_reach_take(s, err);
    if (status != STK_OK) {
        store_close(s);
        return status;
    }
    describe(s);
    *out = s;
    return STK_OK;
}

static void left_lane(void *arg) { exec_event_set(&((struct store *)arg)->answered); }

/* What is queued on the lane now has run when it returns. */
static void pass_lane(struct store *s, struct exec_lane *lane)
{
    exec_event_reset(&s->answered);
    exec_task_init(&s->ask, left_lane, s);
    exec_post(lane, &s->ask);
    exec_event_wait(&s->answered, UINT64_MAX, NULL);
}

stk_status store_close_left(struct store *s, struct stk_error *err)
{
    if (!s) return STK_OK;
    /* The last operation's task may still be leaving op_finish: a task behind it on the lane has
     * seen it go. After io_stop more may be on their way: from the lane to a checksum lane, back,
     * refused by io, and to op_finish. */
    for (int round = 0; round < 2; round++) {
        pass_lane(s, s->lane);
        for (uint32_t i = 0; i < s->n_lanes; i++) pass_lane(s, s->lanes[i]);
        pass_lane(s, s->lane);
    }
    for (uint32_t i = 0; i < s->n_lanes; i++) exec_lane_close(s->lanes[i]);
    stk_status status = store_files_close(s, err);
    store_table_close(s);
    sys_free(s->extents);
    sys_free(s);
    return status;
}

void store_close(struct store *s) { (void)store_close_left(s, NULL); }

void store_discard(struct store *s) { s->discard = true; }

void store_checksums(struct store *s, bool on)
{
    STK_ASSERT(atomic_load(&s->in_flight) == 0 && (!on || s->n_lanes > 0));
    s->checksums = on;
}

const char *store_describe(const struct store *s) { return s->description; }

uint32_t store_notes(const struct store *s, const char *const **out)
{
    *out = (const char *const *)s->notes;
    return s->n_notes;
}

/* --- the end of an operation (io's lane) ------------------------------------------------------ */

void store_ended(struct store *s)
{
    if (atomic_fetch_sub_explicit(&s->in_flight, 1, memory_order_acq_rel) == 1)
        exec_event_set(&s->drained);
}

static void op_finish(void *arg)
{
    struct store_op *op = arg;
    struct store *s = op->store;
    struct store_extent *e = &s->extents[op->extent];
    struct store_path *p = &s->paths[e->path];
    const struct io_req *req = &op->req[0];
    bool put = op->state == OP_PUT;
    op->drive_ns = op->status == STK_OK && req->start_ns ? req->done_ns - req->start_ns : 0;
    if (put) {
        e->writing = false;
        e->failed = op->status != STK_OK;
        if (!e->fleeting) s->puts_open--;
        if (op->status == STK_OK) {
            e->slots[op->slot] = (struct store_slot){ op->version, op->crc };
            e->before = (uint8_t)e->newest; /* none if this put went over it */
            e->newest = op->slot;
        }
    } else {
        e->readers--;
    }
    if (op->status == STK_OK) {
        count_add(put ? &s->puts : &s->gets, 1);
        count_add(put ? &s->put_bytes : &s->get_bytes, e->payload_bytes);
        count_add(put ? &p->write_bytes : &p->read_bytes, store_round(e->payload_bytes));
    }
    op->state = OP_IDLE;
    op->done_ns = exec_now_ns(s->ex);
    op->done(op); /* from here on the operation is the caller's again */
    store_ended(s);
}

/* Hands the operation to a lane; its node is free whenever this is called. */
static void op_post(struct store_op *op, struct exec_lane *lane, void (*fn)(void *))
{
    op->task.fn = fn;
    op->task.arg = op;
    exec_post(lane, &op->task);
}

static struct exec_lane *next_checksum_lane(struct store *s)
{
    return s->lanes[s->next_lane++ % s->n_lanes];
}

static void op_begin(struct store *s, struct store_op *op, uint32_t state)
{
    struct store_extent *e = &s->extents[op->extent];
    op->store = s;
    op->state = state;
    op->status = STK_OK;
    stk_error_clear(&op->error);
    exec_task_init(&op->task, op_finish, op);
    memset(op->req, 0, sizeof op->req);
    op->submit_ns = exec_now_ns(s->ex);
    if (!e->writing && e->readers == 0) e->busy_since_ns = op->submit_ns;
    atomic_fetch_add_explicit(&s->in_flight, 1, memory_order_relaxed);
}

static stk_status check_op(const struct store *s, const struct store_op *op, struct stk_error *err)
{
    STK_ASSERT(exec_on_lane(s->lane) && op->done);
    if (op->extent >= s->n_extents)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "extent %u was asked for; the store has %u",
                             op->extent, s->n_extents);
    if (!op->buf || ((uintptr_t)op->buf & (STORE_ALIGN - 1)))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "extent %u: its buffer at %p must be aligned to %u bytes", op->extent,
                             op->buf, STORE_ALIGN);
    STK_ASSERT(op->state == OP_IDLE);
    return STK_OK;
}

/* The checksum on record covers payload, extent and version. */
static uint32_t checksum(const struct store_op *op, uint32_t payload, uint64_t version)
{
    uint64_t who[2] = { op->extent, version };
    return crc32c(payload, who, sizeof who);
}

uint32_t store_sum_part(const void *part, uint64_t size_bytes, uint64_t offset_bytes,
                        uint64_t payload_bytes)
{
    STK_ASSERT(offset_bytes <= payload_bytes && size_bytes <= payload_bytes - offset_bytes);
    return crc32c_part(part, size_bytes, payload_bytes - offset_bytes - size_bytes);
}

uint32_t store_sum(uint32_t parts, uint64_t payload_bytes)
{
    return crc32c_whole(parts, payload_bytes);
}

/* "extent 17 (PATH at byte N)" */
static const char *where(const struct store_op *op, char *buf, size_t size_bytes)
{
    const struct store_extent *e = &op->store->extents[op->extent];
    snprintf(buf, size_bytes, "extent %u (%.400s at byte %llu)", op->extent, file_of(op->store, e),
             (unsigned long long)offset_of(e, op->slot));
    return buf;
}

static void transfer_failed(struct store_op *op, const char *verb)
{
    const struct io_req *req = &op->req[0];
    char place[512];
    where(op, place, sizeof place);
    if (req->status == STK_ERR_INTERRUPTED)
        op->status =
            stk_error_set(&op->error, STK_ERR_INTERRUPTED, 0, "%s: %s was cancelled", place, verb);
    else if (req->os_errno)
        op->status = stk_error_set(
            &op->error, req->os_errno == ENOSPC ? STK_ERR_NOSPACE : req->status, req->os_errno,
            "%s: %s %llu bytes failed: %s; %s", place, verb, (unsigned long long)req->size_bytes,
            strerror(req->os_errno),
            store_hint(req->os_errno) ? store_hint(req->os_errno)
                                      : "see the kernel log for the drive's state");
    else
        op->status = stk_error_set(&op->error, req->status, 0,
                                   "%s: %s %llu bytes ended after %llu and went no further; the "
                                   "file may have been cut short",
                                   place, verb, (unsigned long long)req->size_bytes,
                                   (unsigned long long)req->moved_bytes);
}

static void op_transfer(struct store_op *op, enum io_op kind, void (*done)(struct io_req *))
{
    struct store *s = op->store;
    const struct store_extent *e = &s->extents[op->extent];
    struct io_req *req = &op->req[0];
    req->op = kind;
    req->cls = op->cls;
    req->file = s->paths[e->path].io_file;
    req->buf = op->buf;
    req->offset_bytes = offset_of(e, op->slot);
    req->size_bytes = store_round(e->payload_bytes);
    req->done = done;
    req->owner = op;
    op->status = io_submit(s->io, req, &op->error);
    /* refused: the caller hears of it like of any failure */
    if (op->status != STK_OK) op_post(op, s->lane, op_finish);
}

/* --- put -------------------------------------------------------------------------------------- */

static void put_written(struct io_req *req)
{
    struct store_op *op = req->owner;
    if (req->status != STK_OK) transfer_failed(op, "writing");
    op_finish(op);
}

static void put_submit(void *arg) { op_transfer(arg, IO_WRITE, put_written); }

/* The padding is zeroed, so that what lies on disk is a function of the payload. */
static void put_sum(struct store_op *op, uint64_t payload_bytes, uint32_t payload)
{
    memset((uint8_t *)op->buf + payload_bytes, 0, store_round(payload_bytes) - payload_bytes);
    op->crc = checksum(op, payload, op->version);
}

/* On a checksum lane. */
static void put_checksum(void *arg)
{
    struct store_op *op = arg;
    uint64_t n = op->store->extents[op->extent].payload_bytes;
    put_sum(op, n, crc32c(0, op->buf, n));
    op_post(op, op->store->lane, put_submit);
}

/* The oldest slot that is neither protected nor the newest; else, unless that is to be kept, the
 * newest; STORE_ROOM_MAX: all are protected. */
static uint32_t free_slot(const struct store_extent *e, bool keep)
{
    uint32_t best = STORE_ROOM_MAX;
    for (uint32_t k = 0; k < e->room; k++) {
        if (k == e->newest || store_slot_protected(e, k)) continue;
        /* empty counts as 0 */
        if (best == STORE_ROOM_MAX || e->slots[best].version + 1 > e->slots[k].version + 1)
            best = k;
    }
    if (best == STORE_ROOM_MAX && e->newest < STORE_ROOM_MAX && !keep &&
        !store_slot_protected(e, e->newest))
        return e->newest;
    return best;
}

static void put_go(struct store *s, struct store_op *op, uint32_t slot)
{
    struct store_extent *e = &s->extents[op->extent];
    op->slot = slot;
    e->slots[slot].version = STORE_NONE; /* until it is complete, what lies there is nothing */
    if (e->newest == slot) e->newest = STORE_ROOM_MAX;
    if (e->before == slot) e->before = STORE_ROOM_MAX;
    if (s->checksums && !op->summed) {
        op_post(op, next_checksum_lane(s), put_checksum);
        return;
    }
    if (s->checksums) put_sum(op, e->payload_bytes, op->sum);
    op_transfer(op, IO_WRITE, put_written);
}

/* Where a table in doubt holds the slots, the drive failed then: that is what the caller hears. */
static void put_stuck(struct store *s, struct store_op *op)
{
    const struct store_extent *e = &s->extents[op->extent];
    const struct stk_error *why = &s->in_doubt;
    char place[512];
    where(op, place, sizeof place);
    if (e->doubt)
        op->status = stk_error_set(&op->error, why->code, why->os_errno,
                                   "%s: no version may be overwritten, because a commit failed and "
                                   "its table could not be taken back: %s; check the drive and "
                                   "resume",
                                   place, why->text);
    else
        op->status = stk_error_set(&op->error, STK_ERR_STATE, 0,
                                   "%s: no slot is free beside the version that must be kept and "
                                   "those of durable tables; reserve room for one more version",
                                   place);
    op_post(op, s->lane, op_finish);
}

static void put_wait(struct store *s, struct store_op *op)
{
    op->next = NULL;
    if (s->wait_tail) s->wait_tail->next = op;
    else s->wait_head = op;
    s->wait_tail = op;
    count_add(&s->puts_waited, 1);
}

void store_puts_release(struct store *s)
{
    struct store_op *op = s->wait_head;
    s->wait_head = s->wait_tail = NULL;
    while (op) {
        struct store_op *next = op->next;
        uint32_t slot = free_slot(&s->extents[op->extent], op->keep);
        if (slot < STORE_ROOM_MAX) put_go(s, op, slot);
        else put_stuck(s, op);
        op = next;
    }
}

stk_status store_put(struct store *s, struct store_op *op, struct stk_error *err)
{
    STK_TRY(check_op(s, op, err));
    STK_ASSERT(op->version != STORE_NONE);
    struct store_extent *e = &s->extents[op->extent];
    STK_ASSERT(!e->writing && e->readers == 0);
    op_begin(s, op, OP_PUT);
    op->crc = 0;
    op->slot = e->newest < STORE_ROOM_MAX ? e->newest : 0; /* for sentences, until it has one */
    e->writing = true;
    if (!e->fleeting) s->puts_open++;
    uint32_t slot = free_slot(e, op->keep);
    if (slot < STORE_ROOM_MAX) put_go(s, op, slot);
    else if (s->commit) put_wait(s, op);
    else put_stuck(s, op);
    return STK_OK;
}

/* --- get -------------------------------------------------------------------------------------- */

/* On a checksum lane. */
static void get_verify(void *arg)
{
    struct store_op *op = arg;
    const struct store_extent *e = &op->store->extents[op->extent];
    uint32_t found = checksum(op, crc32c(0, op->buf, e->payload_bytes), e->slots[op->slot].version);
    if (found != op->crc) {
        char place[512];
        count_add(&op->store->verify_failures, 1);
        op->status =
            stk_error_set(&op->error, STK_ERR_CORRUPT, 0,
                          "%s: read %llu bytes, their checksum is 0x%08x and 0x%08x was stored "
                          "with version %llu: the "
                          "bytes on disk changed, or a write was lost; check the drive",
                          where(op, place, sizeof place), (unsigned long long)e->payload_bytes,
                          found, op->crc, (unsigned long long)e->slots[op->slot].version);
    }
    op_post(op, op->store->lane, op_finish);
}

static void get_read(struct io_req *req)
{
    struct store_op *op = req->owner;
    if (req->status != STK_OK) transfer_failed(op, "reading");
    if (op->status == STK_OK && op->store->checksums)
        op_post(op, next_checksum_lane(op->store), get_verify);
    else op_finish(op);
}

static uint32_t slot_with(const struct store_extent *e, uint64_t version)
{
    if (version == STORE_NONE) return e->newest;
    for (uint32_t k = 0; k < e->room; k++)
        if (e->slots[k].version == version) return k;
    return STORE_ROOM_MAX;
}

static void version_missing(struct store_op *op)
{
    const struct store_extent *e = &op->store->extents[op->extent];
    char place[512], wanted[48] = "a version", have[48] = "none that is complete";
    op->slot = e->newest < STORE_ROOM_MAX ? e->newest : 0;
    where(op, place, sizeof place);
    if (op->version != STORE_NONE)
        snprintf(wanted, sizeof wanted, "version %llu", (unsigned long long)op->version);
    if (e->newest < STORE_ROOM_MAX)
        snprintf(have, sizeof have, "version %llu",
                 (unsigned long long)e->slots[e->newest].version);
    op->status = stk_error_set(&op->error, STK_ERR_CORRUPT, 0,
                               "%s: %s was expected and the store holds %s: it was never written, "
                               "or its last write failed",
                               place, wanted, have);
}

stk_status store_get(struct store *s, struct store_op *op, struct stk_error *err)
{
    STK_TRY(check_op(s, op, err));
    struct store_extent *e = &s->extents[op->extent];
    STK_ASSERT(!e->writing);
    op_begin(s, op, OP_GET);
    e->readers++;
    op->slot = slot_with(e, op->version);
    if (op->slot == STORE_ROOM_MAX) {
        version_missing(op);
        op_post(op, s->lane, op_finish);
        return STK_OK;
    }
    op->crc = e->slots[op->slot].crc;
    op_transfer(op, IO_READ, get_read);
    return STK_OK;
}

/* --- taking back ------------------------------------------------------------------------------ */

stk_status store_forget(struct store *s, uint32_t extent, uint64_t version, struct stk_error *err)
{
    STK_ASSERT(exec_on_lane(s->lane) && extent < s->n_extents);
    struct store_extent *e = &s->extents[extent];
    STK_ASSERT(!e->writing && e->readers == 0);
    const char *why = NULL;
    if (e->newest == STORE_ROOM_MAX || e->slots[e->newest].version != version)
        why = "it is not the newest";
    else if (e->before == STORE_ROOM_MAX || e->slots[e->before].version == STORE_NONE)
        why = "the version before it is not there any more";
    else if (store_slot_protected(e, e->newest))
        why = "a durable table refers to it";
    if (why)
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "extent %u (%.400s): version %llu cannot be taken back: %s", extent,
                             file_of(s, e), (unsigned long long)version, why);
    e->slots[e->newest].version = STORE_NONE;
    e->newest = e->before;
    e->before = STORE_ROOM_MAX;
    return STK_OK;
}

/* --- the rest --------------------------------------------------------------------------------- */

uint64_t store_version(const struct store *s, uint32_t extent)
{
    STK_ASSERT(extent < s->n_extents);
    const struct store_extent *e = &s->extents[extent];
    return e->newest < STORE_ROOM_MAX ? e->slots[e->newest].version : STORE_NONE;
}

stk_status store_locate(const struct store *s, uint32_t extent, const char **out_path,
                        uint64_t *out_offset_bytes)
{
    if (extent >= s->n_extents) return STK_ERR_CONFIG;
    const struct store_extent *e = &s->extents[extent];
    *out_path = file_of(s, e);
    *out_offset_bytes = offset_of(e, e->newest < STORE_ROOM_MAX ? e->newest : 0);
    return STK_OK;
}

bool store_file(const struct store *s, uint32_t path, uint32_t *out_file)
{
    if (path >= s->n_paths || !s->paths[path].added) return false;
    *out_file = s->paths[path].io_file;
    return true;
}

/* On the lane. */
static void describe_oldest(void *arg)
{
    struct store *s = arg;
    const struct store_extent *oldest = NULL;
    for (uint32_t i = 0; i < s->n_extents; i++) {
        const struct store_extent *e = &s->extents[i];
        if ((e->writing || e->readers) && (!oldest || e->busy_since_ns < oldest->busy_since_ns))
            oldest = e;
    }
    if (oldest)
        snprintf(s->oldest, sizeof s->oldest,
                 "the oldest is a %s of extent %u (%.400s at byte %llu)",
                 oldest->writing ? "put" : "get", (uint32_t)(oldest - s->extents),
                 file_of(s, oldest), (unsigned long long)oldest->offset_bytes);
    else if (s->commit)
        snprintf(s->oldest, sizeof s->oldest, "it is the commit of step %llu",
                 (unsigned long long)s->commit->step);
    else
        snprintf(s->oldest, sizeof s->oldest, "none is left now");
    exec_event_set(&s->answered);
}

stk_status store_drain(struct store *s, uint64_t deadline_ns, struct stk_error *err)
{
    stk_status status = STK_OK;
    while (status == STK_OK) {
        exec_event_reset(&s->drained);
        if (atomic_load_explicit(&s->in_flight, memory_order_acquire) == 0) return STK_OK;
        status = exec_event_wait(&s->drained, deadline_ns, NULL);
    }
    uint64_t left = atomic_load_explicit(&s->in_flight, memory_order_acquire);
    if (left == 0) return STK_OK;
    exec_event_reset(&s->answered);
    exec_task_init(&s->ask, describe_oldest, s);
    exec_post(s->lane, &s->ask);
    exec_event_wait(&s->answered, UINT64_MAX, NULL);
    return stk_error_set(err, STK_ERR_STALLED, 0,
                         "%llu puts, gets and commits have not completed in time; %s; the drive or "
                         "its driver may be stuck (see the kernel log)",
                         (unsigned long long)left, s->oldest);
}

void store_stats_read(const struct store *s, struct store_stats *out)
{
    /* atomic loads want a non-const pointer in C11 */
    struct store *m = (struct store *)(uintptr_t)s;
    out->get_bytes = atomic_load_explicit(&m->get_bytes, memory_order_relaxed);
    out->put_bytes = atomic_load_explicit(&m->put_bytes, memory_order_relaxed);
    out->gets = atomic_load_explicit(&m->gets, memory_order_relaxed);
    out->puts = atomic_load_explicit(&m->puts, memory_order_relaxed);
    out->verify_failures = atomic_load_explicit(&m->verify_failures, memory_order_relaxed);
    out->commits = atomic_load_explicit(&m->commits, memory_order_relaxed);
    out->commit_ns = atomic_load_explicit(&m->commit_ns, memory_order_relaxed);
    out->puts_waited = atomic_load_explicit(&m->puts_waited, memory_order_relaxed);
}

void store_path_stats_read(const struct store *s, uint32_t path, struct store_path_stats *out)
{
    STK_ASSERT(path < s->n_paths);
    struct store_path *p = (struct store_path *)(uintptr_t)&s->paths[s->path_of_cfg[path]];
    out->read_bytes = atomic_load_explicit(&p->read_bytes, memory_order_relaxed);
    out->write_bytes = atomic_load_explicit(&p->write_bytes, memory_order_relaxed);
    out->extents_bytes = p->size_bytes;
}
