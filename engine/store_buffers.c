/* engine/store_buffers.c - buffers of the public extent store and the transfers that fill and empty
 * them.
 *
 * Owns lists, states and the hand-over between the application's thread and the lane. Knows nothing
 * of public calls (store_api.c) and commits (store_durable.c). Everything runs on the application's
 * thread but transfer_begin and transfer_done, which run on the lane. */
#include "engine/store_api.h"

#include <stdio.h>
#include <string.h>

/* --- lists ------------------------------------------------------------------------------------ */

static void list_append(struct swap_list *l, struct swap_buffer *b)
{
    b->prev = l->last;
    b->next = NULL;
    if (l->last) l->last->next = b;
    else l->first = b;
    l->last = b;
}

static void list_remove(struct swap_list *l, struct swap_buffer *b)
{
    if (b->prev) b->prev->next = b->next;
    else l->first = b->next;
    if (b->next) b->next->prev = b->prev;
    else l->last = b->prev;
    b->prev = b->next = NULL;
}

static struct swap_list *list_of(stk_store *s, const struct swap_buffer *b)
{
    STK_ASSERT(b->state != SWAP_READING && b->state != SWAP_WRITING); /* INV-2 */
    if (b->state == SWAP_FREE) return &s->empty;
    return b->wanted ? &s->ahead : &s->used;
}

static void unmark(stk_store *s, struct swap_buffer *b)
{
    if (!b->wanted) return;
    b->wanted = false;
    s->n_wanted--;
}

struct swap_buffer *swap_find(stk_store *s, uint32_t item)
{
    return s->buffer_of[item] == SWAP_NONE ? NULL : &s->buffers[s->buffer_of[item]];
}

void swap_drop(stk_store *s, struct swap_buffer *b)
{
    list_remove(list_of(s, b), b);
    unmark(s, b);
    s->buffer_of[b->item] = SWAP_NONE;
    b->item = SWAP_NONE;
    b->state = SWAP_FREE;
    list_append(&s->empty, b);
}

struct swap_buffer *swap_take(stk_store *s, uint32_t item, bool spare)
{
    STK_ASSERT(s->buffer_of[item] == SWAP_NONE); /* INV-1 */
    struct swap_buffer *b = s->used.first;
    /* what was got last may be worked on, and then put */
    if (spare && b && b->item == s->latest) b = b->next;
    /* What was prefetched last is needed last; a buffer that is being written is waited for. */
    if (!b && !spare && s->n_writing == 0) b = s->ahead.last;
    if (!s->empty.first && b) swap_drop(s, b);
    b = s->empty.first;
    if (!b) return NULL;
    list_remove(&s->empty, b);
    b->item = item;
    s->buffer_of[item] = (uint32_t)(b - s->buffers);
    return b;
}

void swap_claim(stk_store *s, struct swap_buffer *b)
{
    list_remove(list_of(s, b), b);
    unmark(s, b);
}

void swap_touch(stk_store *s, struct swap_buffer *b)
{
    swap_claim(s, b);
    list_append(&s->used, b);
}

void swap_forget_stale(stk_store *s)
{
    /* In order of prefetching and arrival: whoever reads ahead uses what it asked for within as
     * many turns as there are buffers. */
    while (s->ahead.first && s->turns - s->ahead.first->turn > 4ull * s->n_buffers)
        swap_touch(s, s->ahead.first);
}

/* --- transfers -------------------------------------------------------------------------------- */

/* The lane, or whoever runs the store's completions. From the push on the transfer is the
 * application's. */
static void transfer_done(struct store_op *op)
{
    struct swap_transfer *t = op->owner;
    stk_store *s = t->s;
    struct swap_transfer *top = atomic_load_explicit(&s->landed, memory_order_relaxed);
    do {
        t->next = top;
    } while (!atomic_compare_exchange_weak_explicit(&s->landed, &top, t, memory_order_release,
                                                    memory_order_relaxed));
    exec_event_set(&s->progress);
}

static void transfer_begin(void *arg)
{
    struct swap_transfer *t = arg;
    stk_error_clear(&t->op.error);
    stk_status st = t->put ? store_put(t->s->store, &t->op, &t->op.error)
                           : store_get(t->s->store, &t->op, &t->op.error);
    if (st == STK_OK) return;
    t->op.status = st; /* refused: it ends like one that failed */
    transfer_done(&t->op);
}

void swap_buffers_init(stk_store *s)
{
    for (uint32_t i = 0; i < s->n_buffers; i++) {
        s->buffers[i] = (struct swap_buffer){ .mem = s->memory + i * s->buffer_bytes,
                                              .item = SWAP_NONE };
        list_append(&s->empty, &s->buffers[i]);
    }
    for (uint32_t i = s->n_transfers; i-- > 0;) {
        s->transfers[i].s = s;
        exec_task_init(&s->transfers[i].task, transfer_begin, &s->transfers[i]);
        s->transfers[i].next = s->idle;
        s->idle = &s->transfers[i];
    }
    /* A quarter is kept for puts, so that reading ahead never makes them wait for a read. */
    s->wanted_max = s->n_buffers - (s->n_buffers >= 4 ? s->n_buffers / 4 : 1);
    if (s->wanted_max == 0) s->wanted_max = 1;
}

void swap_begin(stk_store *s, uint32_t item, bool put, enum io_class cls, struct swap_buffer *b,
                void *direct)
{
    struct swap_transfer *t = s->idle;
    STK_ASSERT(t && !t->under_way && (b != NULL) != (direct != NULL));
    s->idle = t->next;
    t->buffer = b;
    t->put = put;
    t->under_way = true;
    t->begun_ns = exec_now_ns(s->ex);
    if (put) {
        s->versions[item] = s->versions[item] == SWAP_NEVER ? 1 : s->versions[item] + 1;
        s->n_writing++;
    }
    t->op.extent = item;
    t->op.cls = cls;
    t->op.buf = b ? b->mem : direct;
    t->op.version = s->versions[item];
    t->op.done = transfer_done;
    t->op.owner = t;
    if (b) b->state = put ? SWAP_WRITING : SWAP_READING;
    else s->direct_landed = false;
    s->n_under_way++;
    exec_post(s->lane, &t->task);
}

static void land_put(stk_store *s, struct swap_transfer *t)
{
    struct swap_buffer *b = t->buffer;
    s->n_writing--;
    b->state = SWAP_CLEAN;
    list_append(&s->used, b);
    if (t->op.status == STK_OK) {
        s->stats.write_bytes += swap_round(s->item_bytes[t->op.extent]);
        return;
    }
    stk_error_set(&s->fail, t->op.status, t->op.error.os_errno,
                  "item %u was put and could not be written: %s; what the store holds of it is "
                  "lost: close the store",
                  t->op.extent, t->op.error.text);
}

static void land_get(stk_store *s, struct swap_transfer *t)
{
    struct swap_buffer *b = t->buffer;
    bool ok = t->op.status == STK_OK;
    if (ok) s->stats.read_bytes += swap_round(s->item_bytes[t->op.extent]);
    if (!b) {
        if (!ok)
            stk_error_set(&s->err, t->op.status, t->op.error.os_errno, "item %u: %s",
                          t->op.extent, t->op.error.text);
        s->direct_landed = true;
        return;
    }
    _Static_assert(sizeof(struct stk_error) <= STORE_ALIGN, "the sentence fits a buffer");
    b->state = ok ? SWAP_CLEAN : SWAP_BAD;
    if (!ok) memcpy(b->mem, &t->op.error, sizeof t->op.error);
    list_append(list_of(s, b), b);
}

uint32_t swap_harvest(stk_store *s)
{
    struct swap_transfer *t = atomic_exchange_explicit(&s->landed, NULL, memory_order_acquire);
    struct swap_transfer *in_order = NULL;
    while (t) { /* the stack has the last on top */
        struct swap_transfer *next = t->next;
        t->next = in_order;
        in_order = t;
        t = next;
    }
    uint32_t n = 0;
    while ((t = in_order)) {
        in_order = t->next;
        if (t->put) land_put(s, t);
        else land_get(s, t);
        t->under_way = false;
        t->next = s->idle;
        s->idle = t;
        s->n_under_way--;
        n++;
    }
    return n;
}

/* --- waiting ---------------------------------------------------------------------------------- */

static stk_status stalled(stk_store *s, const char *call, uint32_t item, uint64_t waited_ns)
{
    const struct swap_transfer *oldest = NULL;
    for (uint32_t i = 0; i < s->n_transfers; i++) {
        const struct swap_transfer *t = &s->transfers[i];
        if (t->under_way && (!oldest || t->begun_ns < oldest->begun_ns)) oldest = t;
    }
    char of[32] = "", what[96] = "a flush or a commit";
    if (item != SWAP_NONE) snprintf(of, sizeof of, " of item %u", item);
    if (oldest)
        snprintf(what, sizeof what, "the %s of item %u", oldest->put ? "write" : "read",
                 oldest->op.extent);
    return stk_error_set(&s->fail, STK_ERR_STALLED, 0,
                         "%s%s: nothing has been finished for %.1f s; %u transfers are under way, "
                         "the oldest is %s; the drive or its driver may be stuck (see the kernel "
                         "log); close the store",
                         call, of, (double)waited_ns / 1e9, s->n_under_way, what);
}

stk_status swap_wait(stk_store *s, const char *call, uint32_t item)
{
    /* Wait, then reset, then look: what is finished after the look sets the event again, so the
     * next wait ends at once. */
    uint64_t begun = exec_now_ns(s->ex);
    stk_status st = exec_event_wait_running(&s->progress, SWAP_STALL_NS, NULL);
    exec_event_reset(&s->progress);
    uint32_t n = swap_harvest(s);
    uint64_t waited = exec_now_ns(s->ex) - begun;
    s->stats.wait_ns += waited;
    if (st == STK_OK || n > 0) return STK_OK;
    return stalled(s, call, item, waited);
}
