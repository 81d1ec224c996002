/* nvme/store_table.c - the durable table: its format on disk, and the commit that writes it.
 *
 * Owns `table.bin` of every path from open to close. Knows no folders and locks. The io's lane,
 * except opening and closing.
 *
 * FORMAT 1, little-endian. `table.bin` is two halves of equal size (a multiple of 4096). A half is
 * blank (its first 8 bytes are zero) or holds one table, the same bytes on every path:
 *
 *     0  char[8]  "STKTABLE"
 *     8  u32      format, 1
 *    12  u32      CRC32C of bytes [0, size) with these four taken as zero
 *    16  u64      size of the table in bytes
 *    24  u64      sequence number: grows with every attempt; the highest whole table counts
 *    32  u64      step
 *    40  u64      bytes of payload
 *    48  char[24] run id, zero-padded
 *    72  u32 x 5  paths, extents, mask of volatile classes, room, flags (1: extents have checksums)
 *    92           zeros up to 256
 *   256           per path 512 bytes: its name when the table was written, zero-terminated; only
 *                 for sentences, the number in `extents-<k>.bin` says which path a folder is
 *     .           per extent 32 bytes: u64 payload bytes, u64 offset of slot 0, u64 version
 *                 (all ones: none stored), u32 CRC32C of payload and (u64 extent, u64 version),
 *                 u8 path, u8 class, u8 slot, u8 zero. Slot s begins at the offset + s times the
 *                 payload rounded up to 4096
 *     .           payload
 *
 * COMMIT. Phases, each on all paths at once, each begun when the one before has ended everywhere:
 *
 *   the names lead to the open files (store_reach.c; again before it counts)
 *                |
 *   flush the extents -> write the table to the older half -> flush it -> it counts
 *                |                   \___________ error ____________/
 *              error                                  |
 *                |             blank that half -> flush it: the failed table cannot come back
 *                v                                    |
 *       the table before counts  <--------------------+-- error: its slots stay protected ("doubt")
 *                                                         until a later commit overwrites the half
 *
 * A commit after a failed one goes to the same half: the other holds the table that counts. */
#include "nvme/store_impl.h"
#include "nvme/crc32c.h"
#include "base/sys.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const char magic[8] = "STKTABLE";

uint64_t store_table_fixed_bytes(uint32_t n_paths, uint32_t n_extents)
{
    return sizeof(struct store_table_head) + (uint64_t)n_paths * STORE_TABLE_PATH_BYTES +
           (uint64_t)n_extents * sizeof(struct store_table_extent);
}

static uint32_t table_crc(const uint8_t *table, uint64_t size_bytes)
{
    struct store_table_head head;
    memcpy(&head, table, sizeof head);
    head.crc = 0;
    return crc32c(crc32c(0, &head, sizeof head), table + sizeof head, size_bytes - sizeof head);
}

/* --- reading ---------------------------------------------------------------------------------- */

/* What a CRC that fits leaves to check: sizes that this program relies on. */
static bool content_makes_sense(const uint8_t *half, const struct store_table_head *h)
{
    const struct store_table_extent *e = store_table_extents(half);
    if (h->room < 2 || h->room > STORE_ROOM_MAX) return false;
    for (uint32_t k = 0; k < h->n_paths; k++)
        if (!memchr(store_table_path(half, k), 0, STORE_TABLE_PATH_BYTES)) return false;
    for (uint32_t i = 0; i < h->n_extents; i++) {
        bool fleeting = e[i].cls < STORE_CLASSES_MAX && (h->volatile_classes >> e[i].cls & 1);
        if (e[i].path >= h->n_paths || e[i].cls >= STORE_CLASSES_MAX ||
            e[i].payload_bytes == 0 || e[i].payload_bytes > INT64_MAX / 8 ||
            e[i].offset_bytes > INT64_MAX / 2 || e[i].offset_bytes % STORE_ALIGN ||
            (e[i].version != STORE_NONE && (e[i].slot >= h->room || fleeting)))
            return false;
    }
    return true;
}

enum store_half_state store_table_check(const uint8_t *half, uint64_t have_bytes,
                                        const char *run_id, char *why, size_t why_bytes)
{
    const struct store_table_head *h = (const void *)half;
    static const char zero[sizeof magic];
    if (have_bytes < sizeof *h) {
        snprintf(why, why_bytes, "cut short");
        return HALF_BROKEN;
    }
    if (memcmp(h->magic, zero, sizeof zero) == 0) {
        snprintf(why, why_bytes, "blank");
        return HALF_BLANK;
    }
    if (memcmp(h->magic, magic, sizeof magic) != 0) {
        snprintf(why, why_bytes, "no table");
        return HALF_BROKEN;
    }
    if (h->format != STORE_TABLE_FORMAT) {
        snprintf(why, why_bytes, "format %u, this program reads %u", h->format, STORE_TABLE_FORMAT);
        return h->format > STORE_TABLE_FORMAT && h->format <= STORE_TABLE_FORMAT_MAX ? HALF_UNKNOWN
                                                                                     : HALF_BROKEN;
    }
    if (h->size_bytes > have_bytes && h->n_paths >= 1 &&
        h->n_paths <= STORE_PATHS_MAX && h->payload_bytes <= h->size_bytes) {
        snprintf(why, why_bytes, "cut short: %llu of its %llu bytes",
                 (unsigned long long)have_bytes, (unsigned long long)h->size_bytes);
        return HALF_BROKEN;
    }
    if (h->n_paths < 1 || h->n_paths > STORE_PATHS_MAX || h->size_bytes > have_bytes ||
        h->payload_bytes > h->size_bytes ||
        h->size_bytes - h->payload_bytes != store_table_fixed_bytes(h->n_paths, h->n_extents)) {
        snprintf(why, why_bytes, "sizes do not fit");
        return HALF_BROKEN;
    }
    uint32_t crc = table_crc(half, h->size_bytes);
    if (crc != h->crc) {
        snprintf(why, why_bytes, "checksum 0x%08x, 0x%08x expected", crc, h->crc);
        return HALF_BROKEN;
    }
    if (strncmp(h->run_id, run_id, sizeof h->run_id) != 0) {
        snprintf(why, why_bytes, "of run %.23s", h->run_id);
        return HALF_BROKEN;
    }
    if (!content_makes_sense(half, h)) {
        snprintf(why, why_bytes, "content does not fit");
        return HALF_BROKEN;
    }
    snprintf(why, why_bytes, "step %llu", (unsigned long long)h->step);
    return HALF_WHOLE;
}

/* --- opening, closing ------------------------------------------------------------------------- */

stk_status store_table_open(struct store *s, struct stk_error *err)
{
    if (s->buffer_bytes == 0) return STK_OK;
    s->buffer = sys_mmap(s->buffer_bytes, true);
    if (!s->buffer)
        return stk_error_set(err, STK_ERR_NOMEM, errno,
                             "no memory for the durable table: %llu bytes for %u extents",
                             (unsigned long long)s->buffer_bytes, s->n_extents);
    return STK_OK;
}

void store_table_close(struct store *s)
{
    if (s->buffer) sys_munmap(s->buffer, s->buffer_bytes);
    s->buffer = NULL;
}

/* --- writing (io's lane) ---------------------------------------------------------------------- */

static void encode(struct store *s, const struct store_commit *c)
{
    struct store_table_head *h = (void *)s->buffer;
    memset(h, 0, sizeof *h);
    memcpy(h->magic, magic, sizeof magic);
    h->format = STORE_TABLE_FORMAT;
    h->size_bytes = store_table_fixed_bytes(s->n_paths, s->n_extents) + c->payload_bytes;
    h->seq = ++s->seq;
    h->step = c->step;
    h->payload_bytes = c->payload_bytes;
    memcpy(h->run_id, s->run_id, sizeof s->run_id);
    h->n_paths = s->n_paths;
    h->n_extents = s->n_extents;
    h->volatile_classes = s->volatile_classes;
    h->room = s->room;
    h->flags = s->checksums ? STORE_TABLE_CHECKSUMS : 0;
    for (uint32_t k = 0; k < s->n_paths; k++) {
        char *name = (char *)(uintptr_t)store_table_path(s->buffer, k);
        memset(name, 0, STORE_TABLE_PATH_BYTES);
        snprintf(name, STORE_TABLE_PATH_BYTES, "%s", s->paths[k].path);
    }
    struct store_table_extent *to = (void *)(uintptr_t)store_table_extents(s->buffer);
    for (uint32_t i = 0; i < s->n_extents; i++) {
        const struct store_extent *e = &s->extents[i];
        bool stored = !e->fleeting && e->newest < STORE_ROOM_MAX;
        to[i] = (struct store_table_extent){
            .payload_bytes = e->payload_bytes,
            .offset_bytes = e->offset_bytes,
            .version = stored ? e->slots[e->newest].version : STORE_NONE,
            .crc = stored ? e->slots[e->newest].crc : 0,
            .path = (uint8_t)e->path,
            .cls = e->cls,
            .slot = stored ? (uint8_t)e->newest : 0,
        };
    }
    if (c->payload_bytes) memcpy(to + s->n_extents, c->payload, c->payload_bytes);
    uint64_t written = store_round(h->size_bytes);
    memset(s->buffer + h->size_bytes, 0, written - h->size_bytes);
    h->crc = table_crc(s->buffer, h->size_bytes);
}

enum { PHASE_DATA, PHASE_TABLE, PHASE_TABLE_FLUSH, PHASE_BLANK, PHASE_BLANK_FLUSH, PHASE_N };

static const char *const phase_doing[PHASE_N] = {
    "flushing the extents", "writing the table", "flushing the table",
    "taking back the failed table", "flushing the table that was taken back"
};

static void phase_failed(struct store_commit *c, uint32_t path, stk_status status, int os_errno,
                         const char *reason)
{
    const struct store_path *p = &c->store->paths[path];
    const struct io_req *req = &c->req[path];
    const char *file = c->phase == PHASE_DATA ? p->file : p->table;
    char at[32] = ""; /* a flush is of the whole file */
    c->failed = true;
    if (c->status != STK_OK) return; /* the first one wins */
    if (req->op == IO_WRITE)
        snprintf(at, sizeof at, " at byte %llu", (unsigned long long)req->offset_bytes);
    c->status = stk_error_set(
        &c->error, os_errno == ENOSPC ? STK_ERR_NOSPACE : status, os_errno,
        "%.400s%s: %s for step %llu failed: %s; the durable step before still counts", file, at,
        phase_doing[c->phase], (unsigned long long)c->step,
        os_errno ? strerror(os_errno) : reason);
}

/* Whether a later process would find what this commit writes. */
static bool reached(struct store_commit *c)
{
    struct stk_error why = { 0 };
    if (store_reach_check(c->store, &why) == STK_OK) return true;
    c->lost = c->failed = true;
    if (c->status != STK_OK) return false;
    c->status = stk_error_set(&c->error, why.code, why.os_errno, "%s", why.text);
    return false;
}

static void phase_part_done(struct io_req *req)
{
    struct store_commit *c = req->owner;
    uint32_t path = (uint32_t)(req - c->req);
    if (req->status != STK_OK)
        phase_failed(c, path, req->status, req->os_errno,
                     req->status == STK_ERR_INTERRUPTED ? "it was cancelled"
                                                        : "it stayed short of its end");
    else if (req->op == IO_WRITE)
        atomic_fetch_add_explicit(&c->store->paths[path].write_bytes, req->size_bytes,
                                  memory_order_relaxed);
    if (--c->left == 0) exec_post(c->store->lane, &c->task);
}

static void phase_begin(struct store_commit *c, uint32_t phase)
{
    struct store *s = c->store;
    const struct store_table_head *h = (const void *)s->buffer;
    uint64_t size = phase == PHASE_TABLE ? store_round(h->size_bytes) : STORE_ALIGN;
    bool flush = phase != PHASE_TABLE && phase != PHASE_BLANK;
    c->phase = phase;
    c->failed = false;
    c->left = 1; /* until all are submitted */
    if (phase == PHASE_BLANK) memset(s->buffer, 0, STORE_ALIGN);
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct io_req *req = &c->req[k];
        struct stk_error refused = { 0 };
        memset(req, 0, sizeof *req);
        req->op = flush ? IO_FLUSH : IO_WRITE;
        req->cls = IO_PREFETCH; /* puts may wait for it */
        req->file = phase == PHASE_DATA ? s->paths[k].io_file : s->paths[k].io_table;
        req->buf = flush ? NULL : s->buffer;
        req->offset_bytes = flush ? 0 : s->half * s->half_bytes;
        req->size_bytes = flush ? 0 : size;
        req->done = phase_part_done;
        req->owner = c;
        c->left++;
        if (io_submit(s->io, req, &refused) == STK_OK) continue;
        c->left--;
        phase_failed(c, k, refused.code, 0, refused.text);
    }
    if (--c->left == 0) exec_post(s->lane, &c->task);
}

/* It counts, on every path. Only now are the slots of the table before free. */
static void commit_counts(struct store *s, const struct store_commit *c)
{
    for (uint32_t i = 0; i < s->n_extents; i++) {
        struct store_extent *e = &s->extents[i];
        if (e->fleeting) continue;
        e->durable = e->committing;
        e->committing = STORE_ROOM_MAX;
        e->doubt = 0;
    }
    stk_error_clear(&s->in_doubt);
    s->durable = true;
    s->durable_step = c->step;
    s->half ^= 1;
    atomic_fetch_add_explicit(&s->commits, 1, memory_order_relaxed);
}

/* `tables_gone`: no failed table can be whole in the half any more. `written`: this one may be. */
static void commit_failed(struct store *s, struct store_commit *c, bool tables_gone, bool written)
{
    if (tables_gone) stk_error_clear(&s->in_doubt);
    else if (written) s->in_doubt = c->error;
    c->doubt = s->in_doubt.code != STK_OK;
    for (uint32_t i = 0; i < s->n_extents; i++) {
        struct store_extent *e = &s->extents[i];
        if (tables_gone) e->doubt = 0;
        else if (written && e->committing < STORE_ROOM_MAX)
            e->doubt = (uint8_t)(e->doubt | 1u << e->committing);
        e->committing = STORE_ROOM_MAX;
    }
}

static void commit_finish(struct store *s, struct store_commit *c)
{
    s->commit = NULL;
    c->done_ns = exec_now_ns(s->ex);
    atomic_fetch_add_explicit(&s->commit_ns, c->done_ns - c->submit_ns, memory_order_relaxed);
    store_puts_release(s);
    c->done(c); /* from here on the commit is the caller's again */
    store_ended(s);
}

/* All of a phase has ended. */
static void commit_advance(void *arg)
{
    struct store_commit *c = arg;
    struct store *s = c->store;
    switch (c->phase) {
    case PHASE_DATA:
        if (!c->failed) {
            phase_begin(c, PHASE_TABLE);
            return;
        }
        commit_failed(s, c, false, false);
        break;
    case PHASE_TABLE:
    case PHASE_BLANK:
        if (c->phase == PHASE_BLANK && c->failed) commit_failed(s, c, false, true);
        else {
            phase_begin(c, c->failed ? PHASE_BLANK : c->phase + 1);
            return;
        }
        break;
    case PHASE_TABLE_FLUSH:
        if (c->failed || !reached(c)) {
            phase_begin(c, PHASE_BLANK);
            return;
        }
        commit_counts(s, c);
        break;
    default: commit_failed(s, c, !c->failed, true); break;
    }
    commit_finish(s, c);
}

static void commit_begin(void *arg)
{
    struct store_commit *c = arg;
    c->task.fn = commit_advance;
    if (reached(c)) {
        phase_begin(c, PHASE_DATA);
        return;
    }
    commit_failed(c->store, c, false, false);
    commit_finish(c->store, c);
}

stk_status store_commit_submit(struct store *s, struct store_commit *c, struct stk_error *err)
{
    STK_ASSERT(exec_on_lane(s->lane) && c->done);
    if (!s->buffer)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a commit of step %llu: the store was opened without durable steps",
                             (unsigned long long)c->step);
    if (c->payload_bytes > s->payload_max_bytes)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a commit of step %llu carries %llu bytes of payload; at most %llu "
                             "were announced when the store was opened",
                             (unsigned long long)c->step, (unsigned long long)c->payload_bytes,
                             (unsigned long long)s->payload_max_bytes);
    STK_ASSERT(!s->commit && s->puts_open == 0);
    for (uint32_t i = 0; i < s->n_extents; i++)
        if (s->extents[i].failed && !s->extents[i].fleeting)
            return stk_error_set(err, STK_ERR_STATE, 0,
                                 "a commit of step %llu: the last put of extent %u failed, so the "
                                 "state is not that of one moment; put it again first",
                                 (unsigned long long)c->step, i);
    for (uint32_t i = 0; i < s->n_extents; i++) {
        struct store_extent *e = &s->extents[i];
        if (!e->fleeting) e->committing = (uint8_t)e->newest;
    }
    s->commit = c;
    c->store = s;
    c->status = STK_OK;
    c->lost = c->doubt = false;
    stk_error_clear(&c->error);
    c->submit_ns = exec_now_ns(s->ex);
    encode(s, c);
    atomic_fetch_add_explicit(&s->in_flight, 1, memory_order_relaxed);
    exec_task_init(&c->task, commit_begin, c);
    exec_post(s->lane, &c->task);
    return STK_OK;
}

bool store_durable(const struct store *s, uint64_t *step)
{
    if (s->durable && step) *step = s->durable_step;
    return s->durable;
}
