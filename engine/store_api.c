/* engine/store_api.c - the extent store for anybody's own buffers: open, close, and the calls
 * (engine/stoker.h, stk_store_*).
 *
 * Owns the store object, its execution, lane, io and memory, and the order in which they are opened
 * and closed. Buffers and transfers: store_buffers.c; commits: store_durable.c. Must not know
 * blocks, chunks and plans. Application's thread; only on_io and the flush run on the lane. */
#include "engine/store_api.h"
#include "base/mem.h"
#include "base/sys.h"
#include "nvme/io_sim.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* --- configuration ---------------------------------------------------------------------------- */

void stk_store_config_init(stk_store_config *c, size_t size)
{
    stk_store_config d = { 0 };
    d.size = size < sizeof d ? size : sizeof d;
    memcpy(c, &d, d.size);
}

static stk_status no_memory(stk_store *s, const char *what)
{
    return stk_error_set(&s->err, STK_ERR_NOMEM, 0, "no memory for %s of a store of %u items", what,
                         s->cfg.n_items);
}

static stk_status copy_config(stk_store *s, const stk_store_config *c)
{
    if (!c || c->size < offsetof(stk_store_config, storage))
        return stk_error_set(&s->err, STK_ERR_CONFIG, 0,
                             "the configuration of a store must come from stk_store_config_init "
                             "(its size is %zu)",
                             c ? c->size : 0);
    stk_store_config_init(&s->cfg, sizeof s->cfg);
    memcpy(&s->cfg, c, c->size < sizeof s->cfg ? c->size : sizeof s->cfg);
    for (uint32_t i = 0; i < STK_NVME_MAX && c->nvme[i]; i++) {
        if (!c->nvme[i][0])
            return stk_error_set(&s->err, STK_ERR_CONFIG, 0, "nvme[%u] is empty: name a folder", i);
        if (!(s->paths[i] = sys_strdup(c->nvme[i]))) return no_memory(s, "the names of folders");
        s->n_paths++;
    }
    memset(s->cfg.nvme, 0, sizeof s->cfg.nvme); /* they were borrowed */
    return STK_OK;
}

static stk_status check_durable(stk_store *s)
{
    const stk_store_config *c = &s->cfg;
    size_t n = strnlen(c->run_id, sizeof c->run_id);
    if (n != 0 && (n != 16 || strspn(c->run_id, "0123456789abcdef") != 16))
        return stk_error_set(&s->err, STK_ERR_CONFIG, 0,
                             "run_id must be 16 of 0-9a-f, or empty; it has %zu characters", n);
    if (c->adopt && !c->durable)
        return stk_error_set(&s->err, STK_ERR_CONFIG, 0,
                             "adopt goes on from a durable step: set durable too");
    if (c->adopt && n == 0)
        return stk_error_set(&s->err, STK_ERR_CONFIG, 0,
                             "adopt needs the run_id of the run whose durable step is meant");
    s->payload_max = c->payload_max_bytes ? c->payload_max_bytes : SWAP_PAYLOAD_DEFAULT;
    return STK_OK;
}

static stk_status check_config(stk_store *s)
{
    const stk_store_config *c = &s->cfg;
    struct stk_error *err = &s->err;
    if ((int)c->storage < 0 || c->storage > STK_STORAGE_SIM)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "storage is %d: this version knows 0 to %d",
                             (int)c->storage, STK_STORAGE_SIM);
    if ((c->storage == STK_STORAGE_SIM) != (c->sim_disk != NULL))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "sim_disk is set if and only if storage is STK_STORAGE_SIM");
    if (s->n_paths == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "nvme[0] must name a folder for the items");
    if (c->n_items == 0 || !c->item_bytes)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a store needs items: n_items is %u, item_bytes is %s", c->n_items,
                             c->item_bytes ? "set" : "NULL");
    for (uint32_t i = 0; i < s->n_paths; i++)
        if (!(c->nvme_weights[i] >= 0 && c->nvme_weights[i] <= 1e18))
            return stk_error_set(err, STK_ERR_CONFIG, 0, "nvme_weights[%u] is %g: 0 or above", i,
                                 c->nvme_weights[i]);
    for (uint32_t i = 0; i < c->n_items; i++)
        if (c->item_bytes[i] == 0 || c->item_bytes[i] > INT64_MAX / 16)
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "item %u has %llu bytes: 1 up to what a disk holds are possible",
                                 i, (unsigned long long)c->item_bytes[i]);
    return check_durable(s);
}

/* --- memory ----------------------------------------------------------------------------------- */

static void store_config(const stk_store *s, struct store_cfg *out)
{
    const stk_store_config *c = &s->cfg;
    const struct io_sim_cfg *sim = c->sim_disk;
    *out = (struct store_cfg){ .io = s->io,
                               .ex = s->ex,
                               .lane = s->lane,
                               .n_paths = s->n_paths,
                               .n_extents = c->n_items,
                               .extent_bytes = c->item_bytes,
                               .room = c->durable ? 2 : 1,
                               .no_checksums = c->no_checksums,
                               .sim_disk = sim ? sim->disk : NULL,
                               .payload_max_bytes = c->durable ? s->payload_max : 0,
                               .adopt = c->adopt };
    memcpy(out->run_id, c->run_id, sizeof out->run_id);
    for (uint32_t i = 0; i < s->n_paths; i++) {
        out->paths[i] = s->paths[i];
        out->weights[i] = c->nvme_weights[i];
    }
}

/* How many buffers, and what all of it takes. Refused with the numbers when the buffers cannot
 * guarantee progress or the machine does not have the memory. */
static stk_status plan_memory(stk_store *s)
{
    const stk_store_config *c = &s->cfg;
    uint32_t largest = 0;
    for (uint32_t i = 1; i < c->n_items; i++)
        if (c->item_bytes[i] > c->item_bytes[largest]) largest = i;
    s->buffer_bytes = swap_round(c->item_bytes[largest]);
    uint64_t asked = c->buffer_bytes ? c->buffer_bytes : SWAP_BUFFERS_DEFAULT * s->buffer_bytes;
    if (asked < 2 * s->buffer_bytes)
        return stk_error_set(&s->err, STK_ERR_CONFIG, 0,
                             "buffer_bytes is %llu; item %u has %llu bytes, and two buffers of its "
                             "size are the least: %llu",
                             (unsigned long long)asked, largest,
                             (unsigned long long)c->item_bytes[largest],
                             (unsigned long long)(2 * s->buffer_bytes));
    uint64_t n = asked / s->buffer_bytes;
    if (n > c->n_items) n = c->n_items; /* an item is in one buffer at most */
    s->n_buffers = (uint32_t)n;
    s->n_transfers = (s->n_buffers < SWAP_TRANSFERS_MAX ? s->n_buffers : SWAP_TRANSFERS_MAX) + 1;
    s->memory_bytes = s->n_buffers * s->buffer_bytes;
    struct store_cfg sc;
    store_config(s, &sc);
    s->table_bytes = store_memory_bytes(&sc) +
                     c->n_items * (2 * sizeof(uint64_t) + sizeof(uint32_t)) +
                     s->n_buffers * sizeof *s->buffers + s->n_transfers * sizeof *s->transfers +
                     (c->durable ? s->payload_max : 0);
    struct mem_limits lim;
    mem_limits_read("", &lim);
    if (s->memory_bytes + s->table_bytes > lim.available_bytes) {
        char need[32], have[32];
        return stk_error_set(&s->err, STK_ERR_NOMEM, 0,
                             "the store needs %s of memory (%u buffers of %llu bytes, and tables) "
                             "and %s are available (%s): lower buffer_bytes, or split item %u",
                             mem_size_format(s->memory_bytes + s->table_bytes, need), s->n_buffers,
                             (unsigned long long)s->buffer_bytes,
                             mem_size_format(lim.available_bytes, have), lim.why, largest);
    }
    return STK_OK;
}

static stk_status reserve(stk_store *s)
{
    const stk_store_config *c = &s->cfg;
    s->item_bytes = sys_calloc(c->n_items, sizeof *s->item_bytes);
    s->versions = sys_calloc(c->n_items, sizeof *s->versions);
    s->buffer_of = sys_calloc(c->n_items, sizeof *s->buffer_of);
    s->buffers = sys_calloc(s->n_buffers, sizeof *s->buffers);
    s->transfers = sys_calloc(s->n_transfers, sizeof *s->transfers);
    s->payload = sys_calloc(c->durable ? s->payload_max : 1, 1);
    if (!s->item_bytes || !s->versions || !s->buffer_of || !s->buffers || !s->transfers ||
        !s->payload)
        return no_memory(s, "the tables");
    s->memory = sys_mmap(s->memory_bytes, true);
    if (!s->memory) return no_memory(s, "the buffers");
    /* A child of fork that wrote to these pages would part them from those the drive writes to. */
    (void)madvise(s->memory, s->memory_bytes, MADV_DONTFORK);
    memcpy(s->item_bytes, c->item_bytes, c->n_items * sizeof *s->item_bytes);
    s->cfg.item_bytes = s->item_bytes;
    for (uint32_t i = 0; i < c->n_items; i++) {
        s->versions[i] = SWAP_NEVER;
        s->buffer_of[i] = SWAP_NONE;
    }
    s->latest = SWAP_NONE;
    swap_buffers_init(s);
    return STK_OK;
}

/* --- open ------------------------------------------------------------------------------------- */

static void on_io(void *arg)
{
    stk_store *s = arg;
    io_reap(s->io, UINT32_MAX);
}

static stk_status open_machine(stk_store *s)
{
    static const enum io_kind kinds[] = { IO_AUTO, IO_URING, IO_POSIX, IO_SIM };
    const stk_store_config *c = &s->cfg;
    struct stk_error *err = &s->err;
    STK_TRY(c->simulate ? exec_open_sim(c->seed, &s->ex, err) : exec_open_threads(&s->ex, err));
    STK_TRY(exec_lane_open(s->ex, "store", &s->lane, err));
    exec_event_init(s->ex, &s->progress);
    exec_task_init(&s->notify, on_io, s);
    struct io_cfg ic = { .kind = kinds[c->storage],
                         .ex = s->ex,
                         .lane = s->lane,
                         .notify = &s->notify,
                         .sim = c->sim_disk };
    return io_open(&ic, &s->io, err);
}

static stk_status open_store(stk_store *s)
{
    const stk_store_config *c = &s->cfg;
    struct store_cfg sc;
    store_config(s, &sc);
    if (c->adopt) STK_TRY(swap_adopt(s, sc.sim_disk, &s->err));
    STK_TRY(store_open(&sc, &s->store, &s->err));
    for (uint32_t i = 0; i < c->n_items; i++) s->versions[i] = store_version(s->store, i);
    io_buffer_register(s->io, s->memory, s->memory_bytes);
    return STK_OK;
}

/* "io_uring ...; 1 path ...; 8 buffers of 1.00 MiB; REMOVED OR KEPT" */
static stk_status describe(stk_store *s)
{
    char size[32];
    const char *const *notes;
    uint32_t n = store_notes(s->store, &notes);
    s->description =
        sys_format("%s; %s; %u buffers of %s", io_describe(s->io), store_describe(s->store),
                   s->n_buffers, mem_size_format(s->buffer_bytes, size));
    for (uint32_t i = 0; i < n && s->description; i++) {
        char *longer = sys_format("%s; %s", s->description, notes[i]);
        sys_free(s->description);
        s->description = longer;
    }
    return s->description ? STK_OK : no_memory(s, "the description");
}

stk_status stk_store_open(const stk_store_config *c, stk_store **out)
{
    if (!out) return STK_ERR_CONFIG;
    stk_store *s = *out = sys_calloc(1, sizeof *s);
    if (!s) return STK_ERR_NOMEM;
    s->pid = getpid();
    stk_status st = copy_config(s, c);
    if (st == STK_OK) st = check_config(s);
    if (st == STK_OK) st = plan_memory(s);
    if (st == STK_OK) st = reserve(s);
    if (st == STK_OK) st = open_machine(s);
    if (st == STK_OK) st = open_store(s);
    if (st == STK_OK) st = describe(s);
    if (st == STK_OK) s->opened = true;
    else stk_error_forward(&s->fail, &s->err);
    return st;
}

/* --- before and after each call --------------------------------------------------------------- */

stk_status swap_failed(stk_store *s)
{
    if (s->fail.code == STK_OK) return STK_OK;
    if (!s->reported) {
        s->reported = true;
        stk_error_clear(&s->err);
        return stk_error_forward(&s->err, &s->fail);
    }
    return stk_error_set(&s->err, STK_ERR_STATE, 0,
                         "the store has failed and can only be closed: %s", s->fail.text);
}

stk_status swap_enter(stk_store *s, const char *call)
{
    if (!s) return STK_ERR_STATE;
    stk_error_clear(&s->err);
    if (getpid() != s->pid)
        return stk_error_set(&s->err, STK_ERR_STATE, 0,
                             "%s: the store was opened by process %d; a child of fork cannot use "
                             "it: open another one there",
                             call, (int)s->pid);
    if (!s->opened)
        return stk_error_set(&s->err, STK_ERR_STATE, 0, "%s: the store was not opened: %s", call,
                             s->fail.text);
    swap_harvest(s);
    return swap_failed(s);
}

static stk_status check_item(stk_store *s, const char *call, uint32_t item, bool reading)
{
    if (item >= s->cfg.n_items)
        return stk_error_set(&s->err, STK_ERR_CONFIG, 0, "%s: item %u was asked for; there are %u",
                             call, item, s->cfg.n_items);
    if (reading && s->versions[item] == SWAP_NEVER)
        return stk_error_set(&s->err, STK_ERR_STATE, 0, "%s: item %u was never put", call, item);
    return STK_OK;
}

static stk_status check_data(stk_store *s, const char *call, uint32_t item, const void *data)
{
    if (data) return STK_OK;
    return stk_error_set(&s->err, STK_ERR_CONFIG, 0, "%s: item %u: data is NULL", call, item);
}

static stk_status wait_more(stk_store *s, const char *call, uint32_t item)
{
    swap_wait(s, call, item);
    return swap_failed(s);
}

/* Room for one more transfer, and a buffer for `item`. */
static stk_status wait_room(stk_store *s, const char *call, uint32_t item, struct swap_buffer **out)
{
    if (!s->idle || !(*out = swap_take(s, item, false))) {
        s->stats.waits++;
        do {
            STK_ASSERT(s->n_under_way > 0); /* INV-4 */
            STK_TRY(wait_more(s, call, item));
        } while (!s->idle || !(*out = swap_take(s, item, false)));
    }
    return STK_OK;
}

/* --- put, get, prefetch ----------------------------------------------------------------------- */

static bool moving(const struct swap_buffer *b)
{
    return b && (b->state == SWAP_READING || b->state == SWAP_WRITING);
}

stk_status stk_store_put(stk_store *s, uint32_t item, const void *data)
{
    static const char call[] = "stk_store_put";
    STK_TRY(swap_enter(s, call));
    STK_TRY(check_item(s, call, item, false));
    STK_TRY(check_data(s, call, item, data));
    struct swap_buffer *b = swap_find(s, item);
    if (moving(b)) s->stats.waits++;
    while (moving(b)) STK_TRY(wait_more(s, call, item));
    if (b) {
        if (!s->idle) s->stats.waits++;
        while (!s->idle) STK_TRY(wait_more(s, call, item));
        swap_claim(s, b);
    } else {
        STK_TRY(wait_room(s, call, item, &b));
    }
    memcpy(b->mem, data, s->item_bytes[item]);
    s->turns++;
    s->stats.put_bytes += s->item_bytes[item];
    if (s->latest == item) s->latest = SWAP_NONE;
    swap_begin(s, item, true, IO_WRITE_BACK, b, NULL);
    return STK_OK;
}

/* From the item's buffer, once no read is under way into it. */
static stk_status get_from_buffer(stk_store *s, const char *call, uint32_t item,
                                  struct swap_buffer *b, void *data)
{
    if (b->state == SWAP_READING) s->stats.waits++;
    while (b->state == SWAP_READING) STK_TRY(wait_more(s, call, item));
    if (b->state == SWAP_BAD) {
        struct stk_error why;
        memcpy(&why, b->mem, sizeof why);
        swap_drop(s, b); /* the next get reads again */
        return stk_error_set(&s->err, why.code, why.os_errno, "item %u: %s", item, why.text);
    }
    memcpy(data, b->mem, s->item_bytes[item]);
    if (b->state == SWAP_CLEAN) swap_touch(s, b);
    return STK_OK;
}

/* Into the caller's memory, without a copy. Whatever else happens the transfer is waited for: the
 * memory is the caller's again. */
static stk_status get_direct(stk_store *s, const char *call, uint32_t item, void *data)
{
    while (!s->idle) STK_TRY(wait_more(s, call, item));
    swap_begin(s, item, false, IO_DEMAND, NULL, data);
    s->stats.waits++;
    while (!s->direct_landed)
        if (swap_wait(s, call, item) != STK_OK) return swap_failed(s);
    if (s->err.code != STK_OK) return s->err.code;
    return swap_failed(s);
}

stk_status stk_store_get(stk_store *s, uint32_t item, void *data)
{
    static const char call[] = "stk_store_get";
    STK_TRY(swap_enter(s, call));
    STK_TRY(check_item(s, call, item, true));
    STK_TRY(check_data(s, call, item, data));
    struct swap_buffer *b = swap_find(s, item);
    uint64_t bytes = s->item_bytes[item];
    stk_status st;
    s->turns++;
    if (b) {
        s->stats.hits++;
        st = get_from_buffer(s, call, item, b, data);
    } else {
        s->stats.misses++;
        if ((((uintptr_t)data | bytes) & (STORE_ALIGN - 1)) == 0) {
            st = get_direct(s, call, item, data);
        } else {
            STK_TRY(wait_room(s, call, item, &b));
            swap_begin(s, item, false, IO_DEMAND, b, NULL);
            st = get_from_buffer(s, call, item, b, data);
        }
    }
    if (st != STK_OK) return st;
    s->latest = item;
    s->stats.get_bytes += bytes;
    return STK_OK;
}

stk_status stk_store_prefetch(stk_store *s, uint32_t item)
{
    static const char call[] = "stk_store_prefetch";
    STK_TRY(swap_enter(s, call));
    STK_TRY(check_item(s, call, item, true));
    struct swap_buffer *b = swap_find(s, item);
    if (b) { /* there, or on its way; what was used longest ago now counts as used just now */
        if (b->state == SWAP_CLEAN && !b->wanted) swap_touch(s, b);
        return STK_OK;
    }
    swap_forget_stale(s);
    if (!s->idle || s->n_wanted >= s->wanted_max || !(b = swap_take(s, item, true)))
        return STK_BUSY;
    b->wanted = true;
    b->turn = s->turns;
    s->n_wanted++;
    swap_begin(s, item, false, IO_PREFETCH, b, NULL);
    return STK_OK;
}

/* --- flush ------------------------------------------------------------------------------------ */

static void flush_ended(stk_store *s)
{
    atomic_fetch_sub_explicit(&s->flushes_left, 1, memory_order_release);
    exec_event_set(&s->progress);
}

static void flush_done(struct io_req *req)
{
    stk_store *s = req->owner;
    uint32_t k = (uint32_t)(req - s->flushes);
    if (req->status != STK_OK)
        stk_error_set(&s->flush_error, req->status, req->os_errno,
                      "%s: flushing the store's file failed: %s; what was put may be lost: close "
                      "the store, see the kernel log for the drive's state",
                      s->paths[k], req->os_errno ? strerror(req->os_errno) : "it was cancelled");
    flush_ended(s);
}

/* On the lane. */
static void flush_begin(void *arg)
{
    stk_store *s = arg;
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct io_req *req = &s->flushes[k];
        *req = (struct io_req){ .op = IO_FLUSH, .cls = IO_DEMAND, .done = flush_done, .owner = s };
        if (!store_file(s->store, k, &req->file) ||
            io_submit(s->io, req, &s->flush_error) != STK_OK)
            flush_ended(s);
    }
}

/* Every put has ended, well. */
static stk_status wait_writes(stk_store *s, const char *call)
{
    if (s->n_writing) s->stats.waits++;
    while (s->n_writing) STK_TRY(wait_more(s, call, SWAP_NONE));
    return STK_OK;
}

stk_status stk_store_flush(stk_store *s)
{
    static const char call[] = "stk_store_flush";
    STK_TRY(swap_enter(s, call));
    STK_TRY(wait_writes(s, call));
    stk_error_clear(&s->flush_error);
    atomic_store_explicit(&s->flushes_left, s->n_paths, memory_order_relaxed);
    exec_task_init(&s->flush_task, flush_begin, s);
    exec_post(s->lane, &s->flush_task);
    while (atomic_load_explicit(&s->flushes_left, memory_order_acquire))
        STK_TRY(wait_more(s, call, SWAP_NONE));
    if (s->flush_error.code != STK_OK) stk_error_forward(&s->fail, &s->flush_error);
    return swap_failed(s);
}

/* --- questions -------------------------------------------------------------------------------- */

const char *stk_store_error(const stk_store *s) { return s ? s->err.text : ""; }

const char *stk_store_describe(const stk_store *s)
{
    return s && s->description ? s->description : "";
}

void stk_store_stats_read(const stk_store *s, stk_store_stats *out)
{
    *out = s ? s->stats : (stk_store_stats){ 0 };
}

/* --- close ------------------------------------------------------------------------------------ */

static bool busy(const stk_store *s)
{
    stk_store *m = (stk_store *)(uintptr_t)s; /* atomic loads want a non-const pointer in C11 */
    return s->n_under_way > 0 || atomic_load_explicit(&m->committing, memory_order_acquire) ||
           atomic_load_explicit(&m->flushes_left, memory_order_acquire);
}

/* What is under way ends before its memory goes, as far as the drive lets it. */
static void quiesce(stk_store *s)
{
    struct stk_error ignored = { 0 };
    uint64_t patience = s->fail.code == STK_ERR_STALLED ? SWAP_CLOSE_STALL_NS / 30
                                                        : SWAP_CLOSE_STALL_NS;
    uint64_t deadline = exec_now_ns(s->ex) + patience;
    stk_status st = STK_OK;
    swap_harvest(s);
    while (busy(s) && st == STK_OK) {
        st = exec_event_wait(&s->progress, deadline, NULL);
        exec_event_reset(&s->progress);
        swap_harvest(s);
    }
    if (s->store) store_drain(s->store, deadline, &ignored);
    if (s->io) io_drain(s->io, deadline, &ignored);
}

void stk_store_close(stk_store *s, bool discard)
{
    /* A child of fork has neither the threads nor the memory; the files are its parent's. */
    if (!s || s->pid != getpid()) return;
    if (s->ex && s->lane) quiesce(s);
    io_stop(s->io); /* a transfer that did not end in time must not find the store gone */
    if (s->store && discard) store_discard(s->store);
    store_close(s->store);
    io_close(s->io);
    if (s->lane) exec_lane_close(s->lane);
    exec_close(s->ex);
    if (s->memory) sys_munmap(s->memory, s->memory_bytes);
    for (uint32_t i = 0; i < s->n_paths; i++) sys_free(s->paths[i]);
    sys_free(s->item_bytes);
    sys_free(s->versions);
    sys_free(s->buffer_of);
    sys_free(s->buffers);
    sys_free(s->transfers);
    sys_free(s->payload);
    sys_free(s->description);
    sys_free(s);
}
