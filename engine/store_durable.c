/* engine/store_durable.c - durable steps of the public extent store: commit, and what a process
 * finds that adopts them.
 *
 * Owns the payload's copy and the hand-over of a commit to the lane. Application's thread, but
 * commit_begin and commit_done, which run on the lane. */
#include "engine/store_api.h"

#include <string.h>

stk_status swap_adopt(stk_store *s, struct io_sim_disk *disk, struct stk_error *err)
{
    const char *paths[STK_NVME_MAX];
    for (uint32_t i = 0; i < s->n_paths; i++) paths[i] = s->paths[i];
    struct store_found *found = NULL;
    stk_status st = store_find(paths, s->n_paths, s->cfg.run_id, disk, &found, err);
    if (st == STK_END)
        return stk_error_set(err, STK_END, 0,
                             "no durable step of run %s lies on %s%s: open without adopt to begin "
                             "anew",
                             s->cfg.run_id, s->paths[0],
                             s->n_paths > 1 ? " or the other folders" : "");
    if (st != STK_OK) return st;
    if (found->payload_bytes > s->payload_max) {
        st = stk_error_set(err, STK_ERR_CONFIG, 0,
                           "the durable step of run %s has a payload of %llu bytes: "
                           "payload_max_bytes is %llu",
                           s->cfg.run_id, (unsigned long long)found->payload_bytes,
                           (unsigned long long)s->payload_max);
    } else {
        if (found->payload_bytes) memcpy(s->payload, found->payload, found->payload_bytes);
        s->payload_bytes = found->payload_bytes;
        s->step = found->step;
        s->durable = true;
    }
    store_found_free(found);
    return st;
}

/* The lane. */
static void commit_done(struct store_commit *c)
{
    stk_store *s = c->owner;
    atomic_store_explicit(&s->committing, false, memory_order_release);
    exec_event_set(&s->progress);
}

static void commit_begin(void *arg)
{
    stk_store *s = arg;
    stk_status st = store_commit_submit(s->store, &s->commit, &s->commit.error);
    if (st == STK_OK) return;
    s->commit.status = st;
    commit_done(&s->commit);
}

static stk_status check_commit(stk_store *s, const void *payload, uint64_t payload_bytes)
{
    if (!s->cfg.durable)
        return stk_error_set(&s->err, STK_ERR_STATE, 0,
                             "stk_store_commit: the store was opened without `durable`");
    if (payload_bytes > s->payload_max || (payload_bytes && !payload))
        return stk_error_set(&s->err, STK_ERR_CONFIG, 0,
                             "stk_store_commit: a payload of %llu bytes at %p; payload_max_bytes "
                             "is %llu",
                             (unsigned long long)payload_bytes, payload,
                             (unsigned long long)s->payload_max);
    return STK_OK;
}

stk_status stk_store_commit(stk_store *s, uint64_t step, const void *payload,
                            uint64_t payload_bytes)
{
    static const char call[] = "stk_store_commit";
    STK_TRY(swap_enter(s, call));
    STK_TRY(check_commit(s, payload, payload_bytes));
    if (s->n_writing) s->stats.waits++;
    while (s->n_writing) {
        swap_wait(s, call, SWAP_NONE);
        STK_TRY(swap_failed(s));
    }
    s->commit = (struct store_commit){ .step = step,
                                       .payload = payload,
                                       .payload_bytes = payload_bytes,
                                       .done = commit_done,
                                       .owner = s };
    atomic_store_explicit(&s->committing, true, memory_order_relaxed);
    exec_task_init(&s->commit_task, commit_begin, s);
    exec_post(s->lane, &s->commit_task);
    while (atomic_load_explicit(&s->committing, memory_order_acquire)) {
        swap_wait(s, call, SWAP_NONE);
        STK_TRY(swap_failed(s));
    }
    if (s->commit.status != STK_OK) {
        stk_error_forward(&s->err, &s->commit.error);
        return s->commit.status;
    }
    if (payload_bytes) memmove(s->payload, payload, payload_bytes);
    s->payload_bytes = payload_bytes;
    s->step = step;
    s->durable = true;
    return STK_OK;
}

stk_status stk_store_durable(const stk_store *s, uint64_t *step, const void **payload,
                             uint64_t *payload_bytes)
{
    if (!s || !s->opened || !s->durable) return STK_END;
    if (step) *step = s->step;
    if (payload) *payload = s->payload;
    if (payload_bytes) *payload_bytes = s->payload_bytes;
    return STK_OK;
}
