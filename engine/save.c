/* engine/save.c - a checkpoint under way: which chunk may be written when, and what waits for it.
 *
 * Owns the progress of the one checkpoint that stk_save_begin began (struct eng_save). Its decisions
 * are the engine lane's; conversion and files are jobs for a lane of its own, one at a time, so that
 * at most one write stands before the drive's other work; state on NVMe is read back through the
 * store at the lowest class: to hold it in the update's slots until the checkpoint's drive takes it
 * would cost the update its room, this costs 12 bytes a parameter of reads once in a checkpoint.
 * A chunk that an update waits for goes first. Must not know plans beyond the kinds of nodes. */
#include "engine/save.h"
#include "engine/ckpt_files.h"
#include "engine/counters.h"
#include "base/sys.h"
#include "engine/twin.h"
#include "nvme/io_sim.h"
#include <string.h>

enum { LATER, READY, BUSY, DONE };
enum { JOB_OPEN, JOB_CHUNK, JOB_FINISH, JOB_CLEAN };

#define SIM_BYTES_PER_S 2e9 /* simulation: of the checkpoint's drive, unless the disk says */


/* --- memory ----------------------------------------------------------------------------------- */

static bool needs_param(const stk_engine *e, const struct stk_chunk *c)
{
    return c->frozen || e->layout->dtype == CHUNK_BF16; /* fp16: the master lies in OPT */
}

uint64_t save_bytes(const stk_engine *e)
{
    uint64_t most = 0;
    /* without steps there is nothing to write beside */
    for (uint32_t i = 0; place_trains(e) && i < e->layout->n_chunks; i++) {
        const struct plan_chunk_in *p = &e->pchunks[i];
        uint64_t sum = 0;
        for (int s = CHUNK_PARAM; s <= CHUNK_OPT; s++)
            if (p->home[s] != CHUNK_HOST) sum += round_page(p->bytes[s]);
        if (sum > most) most = sum;
    }
    return most;
}

stk_status save_alloc(stk_engine *e)
{
    struct eng_save *s = &e->save;
    uint32_t n = e->layout->n_chunks;
    exec_event_init(e->ex, &s->event);
    exec_event_set(&s->event);
    s->gated = PLAN_NO;
    s->state = sys_calloc(n + 1, sizeof *s->state);
    s->left = sys_calloc(n + 1, sizeof *s->left);
    s->queue = sys_calloc(n + 1, sizeof *s->queue);
    if (!s->state || !s->left || !s->queue)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the state of a checkpoint");
    if (save_bytes(e) > 0) {
        void *p;
        STK_TRY(mem_reserve(e->held, "checkpoints under way", "", save_bytes(e), &p, &e->err));
        s->raw = p;
        if (twin_total(e)) STK_TRY(seal_pin(e, p, round_page(save_bytes(e))));
    }
    return exec_lane_open(e->ex, "save", &s->lane, &e->err);
}

void save_free(stk_engine *e)
{
    struct eng_save *s = &e->save;
    ckpt_files_abandon(s->files); /* of a drive that did not answer in time */
    if (s->partial) manifest_abandon(s->partial);
    json_decref(s->doc);
    sys_free(s->dir);
    sys_free(s->partial);
    sys_free(s->state);
    sys_free(s->left);
    sys_free(s->queue);
    *s = (struct eng_save){ 0 };
}

/* --- jobs: on the lane `save` ----------------------------------------------------------------- */

static void job_files(stk_engine *e)
{
    struct eng_save *s = &e->save;
    struct save_job *j = &s->job;
    if (j->kind == JOB_OPEN) {
        j->status = ckpt_files_open(e, s->partial, e->sio->scratch, &s->files, &j->error);
        return;
    }
    if (j->kind == JOB_CHUNK) {
        for (uint32_t i = 0; i < j->n && j->status == STK_OK; i++)
            j->status = ckpt_files_put(s->files, &e->layout->chunks[j->chunk[i]], &j->view[i],
                                       &j->error);
        if (j->status == STK_OK) j->status = ckpt_files_flush(s->files, &j->error);
        return;
    }
    if (j->kind == JOB_FINISH) {
        j->status = ckpt_files_finish(s->files, s->doc, &j->error);
        if (j->status == STK_OK)
            j->status = manifest_commit(s->dir, s->step, s->partial, s->doc, &j->error);
        else
            manifest_abandon(s->partial);
        s->complete = j->status == STK_OK;
        if (j->status == STK_OK) j->status = manifest_prune(s->dir, s->keep, &j->error);
    } else {
        ckpt_files_abandon(s->files);
        manifest_abandon(s->partial);
    }
    s->files = NULL;
    json_decref(s->doc);
    sys_free(s->dir);
    sys_free(s->partial);
    s->doc = NULL;
    s->dir = s->partial = NULL;
}

static void job_done(void *engine);

static void job_after(void *engine)
{
    stk_engine *e = engine;
    atomic_store(&e->save.working, false);
    exec_task_init(&e->save.job.done, job_done, e);
    exec_post(e->lane, &e->save.job.done);
}

static void job_run(void *engine)
{
    stk_engine *e = engine;
    struct save_job *j = &e->save.job;
    const struct io_sim_cfg *disk = e->cfg.storage == STK_STORAGE_SIM ? e->cfg.sim_disk : NULL;
    double rate = disk && disk->write_bytes_per_s > 0 ? disk->write_bytes_per_s : SIM_BYTES_PER_S;
    j->status = STK_OK;
    stk_error_clear(&j->error);
    /* the lane's only thread, for good. A low priority instead was tried: where the step keeps every
     * processor busy the checkpoint then takes twice as long as a step, and the next one waits */
    if (j->kind == JOB_OPEN && exec_kind_of(e->ex) == EXEC_THREADS) sys_thread_prompt();
    job_files(e);
    uint64_t elems = 0;
    for (uint32_t i = 0; j->kind == JOB_CHUNK && i < j->n; i++) elems += j->view[i].n;
    exec_lane_busy(e->save.lane, (uint64_t)(12e9 * (double)elems / rate));
    exec_task_init(&j->after, job_after, e);
    exec_post(e->save.lane, &j->after);
}

/* --- the engine lane -------------------------------------------------------------------------- */

static void pump(stk_engine *e);

static void submit(stk_engine *e, uint8_t kind)
{
    struct eng_save *s = &e->save;
    s->busy = true;
    s->job.kind = kind;
    atomic_store(&s->working, true);
    exec_task_init(&s->job.run, job_run, e);
    exec_post(s->lane, &s->job.run);
}

static void open_gate(stk_engine *e)
{
    struct eng_save *s = &e->save;
    if (s->gated == PLAN_NO) return;
    uint64_t waited = exec_now_ns(e->ex) - s->gated_ns;
    s->wait_ns += waited;
    s->step_wait_ns += waited;
    s->gated = PLAN_NO;
    exec_post(e->lane, &e->pump_task);
}

/* It will not be complete: nothing waits for it any more. */
static void give_up(stk_engine *e, const struct stk_error *why)
{
    struct eng_save *s = &e->save;
    if (s->broken) return;
    s->broken = true;
    s->error = *why;
    open_gate(e);
}

static void end(stk_engine *e)
{
    struct eng_save *s = &e->save;
    if (s->complete) {
        atomic_store(&s->saved_ns, exec_now_ns(e->ex) - s->begin_ns);
        atomic_store(&s->saved_wait_ns, s->wait_ns);
        atomic_store(&s->saved_step, s->step);
    }
    s->active = false;
    if (s->broken && !s->quiet) atomic_store(&s->failed, true);
    atomic_store(&s->under_way, false);
    exec_event_set(&s->event);
}

static void job_done(void *engine)
{
    stk_engine *e = engine;
    struct eng_save *s = &e->save;
    const struct save_job *j = &s->job;
    atomic_fetch_add_explicit(&e->progress, 1, memory_order_relaxed);
    s->busy = false;
    if (j->status != STK_OK) give_up(e, &j->error);
    for (uint32_t i = 0; j->kind == JOB_CHUNK && i < j->n; i++) {
        s->state[j->chunk[i]] = DONE;
        s->n_done++;
        if (s->gated == j->chunk[i]) open_gate(e);
    }
    if (j->kind == JOB_FINISH || j->kind == JOB_CLEAN) end(e);
    else pump(e);
}

/* What was wanted is in `raw`, or will not be. */
static void all_read(stk_engine *e)
{
    struct eng_save *s = &e->save;
    s->busy = false;
    atomic_fetch_add_explicit(&e->progress, 1, memory_order_relaxed);
    if (!s->broken) {
        submit(e, JOB_CHUNK);
        return;
    }
    open_gate(e);
    pump(e);
}

static void get_done(struct store_op *op)
{
    stk_engine *e = op->owner;
    struct eng_save *s = &e->save;
    if (op->status != STK_OK && !s->broken) {
        struct stk_error err = { 0 };
        const struct stk_chunk *c = &e->layout->chunks[s->job.chunk[0]];
        stk_error_set(&err, op->status, op->error.os_errno, "reading back block %s, chunk %u: %s",
                      e->layout->blocks[c->block].name, c->id, op->error.text);
        give_up(e, &err);
    }
    if (--s->reads_left == 0) all_read(e);
}

static void copied_back(void *engine)
{
    stk_engine *e = engine;
    struct stk_error err = { 0 };
    if (dev_status(e->dev, &err) != STK_OK) give_up(e, &err);
    e->save.reads_left = 0;
    all_read(e);
}

/* Of a chunk that lies on the device, on the lane's own stream out of it. */
static void copy_back(stk_engine *e, const struct stk_chunk *c)
{
    struct eng_save *s = &e->save;
    struct stk_error err = { 0 };
    const struct state_view *v = &s->job.view[0];
    void *to[CHUNK_GRAD] = { needs_param(e, c) ? v->param : NULL, c->frozen ? NULL : v->low };
    stk_status st = STK_OK;
    for (int k = CHUNK_PARAM; k <= CHUNK_OPT && st == STK_OK; k++)
        if (to[k])
            st = dev_copy(e->copy_out, to[k], c->device[k], chunk_bytes(e->layout, c, (enum chunk_state)k),
                          DEV_TO_HOST, &err);
    exec_task_init(&s->copied, copied_back, e);
    if (st == STK_OK) st = dev_notify(e->copy_out, e->lane, &s->copied, NULL, &err);
    if (st == STK_OK) return;
    give_up(e, &err);
    s->reads_left = 0;
    all_read(e);
}

/* Points the job's next view at the chunk's state, or at where it is read to. */
static void add_view(stk_engine *e, const struct stk_chunk *c)
{
    struct eng_save *s = &e->save;
    struct state_view *v = &s->job.view[s->job.n];
    uint8_t *param = c->host[CHUNK_PARAM], *opt = c->host[CHUNK_OPT], *at = s->raw;
    if (c->home[CHUNK_PARAM] != CHUNK_HOST && needs_param(e, c)) {
        param = at;
        at += round_page(chunk_bytes(e->layout, c, CHUNK_PARAM));
    }
    if (!c->frozen && c->home[CHUNK_OPT] != CHUNK_HOST) opt = at;
    *v = (struct state_view){ .n = c->n_elems, .frozen = c->frozen };
    v->param = (uint16_t *)(void *)param;
    s->state[c->id] = BUSY;
    s->job.chunk[s->job.n++] = c->id;
    if (c->frozen) return;
    v->low = (int16_t *)(void *)opt;
    v->master = (float *)(void *)opt;
    adam_moments_at(e->layout, c, opt, &v->moments);
}

static void read_back(stk_engine *e, const struct stk_chunk *c, enum chunk_state k, void *buf)
{
    struct eng_save *s = &e->save;
    struct store_op *op = &s->get[k];
    op->extent = c->extent[k];
    op->cls = s->gated == c->id ? IO_DEMAND : IO_WRITE_BACK;
    op->buf = buf;
    op->version = c->version;
    op->done = get_done;
    op->owner = e;
    stk_error_clear(&op->error);
    op->status = store_get(e->store, op, &op->error);
    if (op->status != STK_OK) get_done(op);
}

static bool is_read(const stk_engine *e, const struct stk_chunk *c, enum chunk_state k)
{
    bool away = c->extent[k] != CHUNK_NO_EXTENT || c->device[k];
    return away && (k == CHUNK_OPT || needs_param(e, c));
}

/* The oldest one that is ready; PLAN_NO. */
static uint32_t oldest(struct eng_save *s)
{
    while (s->head < s->tail && s->state[s->queue[s->head]] != READY) s->head++;
    return s->head < s->tail ? s->queue[s->head] : PLAN_NO;
}

/* One chunk, and what is ready after it if nothing has to be read and nobody waits. */
static void take(stk_engine *e, uint32_t chunk)
{
    struct eng_save *s = &e->save;
    const struct stk_chunk *c = &e->layout->chunks[chunk];
    bool param = is_read(e, c, CHUNK_PARAM), opt = is_read(e, c, CHUNK_OPT);
    s->job.n = 0;
    add_view(e, c);
    if (param || opt) {
        s->busy = true;
        s->reads_left = (uint32_t)param + (uint32_t)opt;
        if (c->home[CHUNK_PARAM] == CHUNK_DEVICE) {
            copy_back(e, c);
            return;
        }
        if (param) read_back(e, c, CHUNK_PARAM, s->job.view[0].param);
        if (opt) read_back(e, c, CHUNK_OPT, s->job.view[0].low);
        return;
    }
    while (s->gated == PLAN_NO && s->job.n < SAVE_BATCH && (chunk = oldest(s)) != PLAN_NO) {
        c = &e->layout->chunks[chunk];
        if (is_read(e, c, CHUNK_PARAM) || is_read(e, c, CHUNK_OPT)) break;
        add_view(e, c);
    }
    submit(e, JOB_CHUNK);
}

/* Whatever can go on goes on. */
static void pump(stk_engine *e)
{
    struct eng_save *s = &e->save;
    if (!s->active || s->busy) return;
    if (s->broken) {
        submit(e, JOB_CLEAN);
    } else if (s->n_done == e->layout->n_chunks) {
        submit(e, JOB_FINISH);
    } else if (s->gated != PLAN_NO && s->state[s->gated] == READY) {
        take(e, s->gated);
    } else {
        uint32_t chunk = oldest(s);
        if (chunk != PLAN_NO) take(e, chunk);
    }
}

static void ready(stk_engine *e, uint32_t chunk)
{
    struct eng_save *s = &e->save;
    s->state[chunk] = READY;
    s->queue[s->tail++] = chunk;
}

static void start(void *engine)
{
    stk_engine *e = engine;
    struct eng_save *s = &e->save;
    s->active = true;
    s->begin_ns = exec_now_ns(e->ex);
    submit(e, JOB_OPEN);
}

/* --- hooks of a run --------------------------------------------------------------------------- */

static bool changes_state(const struct plan_node *n)
{
    return n->kind == PLAN_UPDATE || n->kind == PLAN_COMMIT || n->kind == PLAN_UNDO ||
           n->kind == PLAN_DEVICE_UPDATE;
}

/* Nodes of a due update after all of which the chunk is what the checkpoint wants, at its home. */
static bool completes(const struct plan_node *n)
{
    return n->part == PLAN_RUN_UPDATE &&
           (changes_state(n) || (n->kind == PLAN_WRITE_BACK && n->state != CHUNK_GRAD));
}

void save_run_begin(stk_engine *e)
{
    struct eng_save *s = &e->save;
    const struct eng_run *r = &e->run;
    if (!s->active || s->broken || !(r->parts & PLAN_RUN_UPDATE)) return;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) s->left[i] = 0;
    for (uint32_t i = 0; i < r->plan->n_nodes; i++)
        if (completes(&r->plan->nodes[i])) s->left[r->plan->nodes[i].chunk]++;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++)
        if (s->state[i] == LATER && s->left[i] == 0) ready(e, i);
    pump(e);
}

bool save_holds(const stk_engine *e, const struct plan_node *n)
{
    const struct eng_save *s = &e->save;
    if (!s->active || !changes_state(n) || s->no_gate) return false;
    /* given up or not: no put beside a get (nvme/store.h) */
    if (s->broken && !(s->reads_left > 0 && n->chunk == s->job.chunk[0])) return false;
    return s->state[n->chunk] == READY || s->state[n->chunk] == BUSY;
}

bool save_gates(stk_engine *e, const struct plan_node *n)
{
    struct eng_save *s = &e->save;
    if (!save_holds(e, n)) return false;
    if (s->gated == PLAN_NO) {
        s->gated_ns = exec_now_ns(e->ex);
        s->n_gated++;
    }
    s->gated = n->chunk;
    return true;
}

void save_node_done(stk_engine *e, const struct plan_node *n)
{
    struct eng_save *s = &e->save;
    if (!s->active || s->broken || !completes(n) || s->state[n->chunk] != LATER) return;
    STK_ASSERT(s->left[n->chunk] > 0);
    if (--s->left[n->chunk] > 0) return;
    ready(e, n->chunk);
    pump(e);
}

/* --- application's thread --------------------------------------------------------------------- */

stk_status stk_save_begin(stk_engine *e, const char *dir, const char *client_json, uint32_t keep)
{
    struct eng_save *s = &e->save;
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_READY) return eng_refuse_state(e, "stk_save_begin", "between steps");
    STK_TRY(counters_check_client(e, "stk_save_begin", client_json));
    STK_TRY(save_settle(e));
    STK_TRY(save_report(e));
    if (!place_trains(e)) return stk_save(e, dir, client_json, keep);
    STK_TRY(state_flush_staged(e));
    STK_TRY(checkpoint_begin(e, dir, client_json, &s->partial, &s->doc));
    if (!(s->dir = sys_strdup(dir))) {
        manifest_abandon(s->partial);
        sys_free(s->partial);
        json_decref(s->doc);
        s->partial = NULL;
        s->doc = NULL;
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for a folder's name");
    }
    s->keep = keep;
    s->step = e->begun;
    s->head = s->tail = s->n_done = s->n_gated = 0;
    s->wait_ns = 0;
    s->busy = s->broken = s->quiet = s->complete = false;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++)
        if (e->pending && !e->layout->chunks[i].frozen) s->state[i] = LATER;
        else ready(e, i);
    exec_event_reset(&s->event);
    atomic_store(&s->under_way, true);
    exec_task_init(&s->task, start, e);
    exec_post(e->lane, &s->task); /* before any later run: the lane is a queue */
    return STK_OK;
}

stk_status save_report(stk_engine *e)
{
    struct eng_save *s = &e->save;
    if (!atomic_exchange(&s->failed, false)) return STK_OK;
    stk_status code = s->error.code == STK_ERR_NOSPACE ? STK_ERR_NOSPACE : STK_ERR_IO;
    return stk_error_set(&e->err, code, s->error.os_errno,
                         s->complete ? "after the checkpoint of step %llu was written: %s"
                                     : "the checkpoint of step %llu failed, the one before it "
                                       "stays: %s; training may go on",
                         (unsigned long long)s->step, s->error.text);
}

static void ask(stk_engine *e, void (*fn)(void *))
{
    exec_task_init(&e->save.ask, fn, e);
    exec_post(e->lane, &e->save.ask);
}

/* Engine lane: what an update would have had to bring will not come. */
static void no_more_updates(void *engine)
{
    stk_engine *e = engine;
    struct eng_save *s = &e->save;
    struct stk_error why = { 0 };
    bool waits = false;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) waits |= s->state[i] == LATER;
    if (!s->active || !waits) return;
    stk_error_set(&why, STK_ERR_IO, 0, "the engine failed before that step's update was complete");
    give_up(e, &why);
    pump(e);
}

/* Until it is over. Blocking calls of the file system may take as long as they like, as in
 * stk_save; what the engine itself waits for may not. */
static stk_status wait_event(stk_engine *e)
{
    uint64_t stall_ns = e->cfg.stall_ns ? e->cfg.stall_ns : 120ull * 1000000000u;
    for (;;) {
        uint64_t seen = atomic_load(&e->progress);
        struct stk_error err = { 0 };
        stk_status st = exec_event_wait_running(&e->save.event, stall_ns, &err);
        if (st == STK_OK) return STK_OK;
        if (atomic_load(&e->progress) != seen || atomic_load(&e->save.working)) continue;
        e->state = ENG_FAILED;
        struct stk_error oldest = { 0 }; /* which transfer it is that does not end */
        bool stuck = e->io && io_drain(e->io, exec_now_ns(e->ex), &oldest) == STK_ERR_STALLED;
        return stk_error_set(&e->err, st, 0, "the checkpoint of step %llu does not end: %s",
                             (unsigned long long)e->save.step, stuck ? oldest.text : err.text);
    }
}

stk_status save_settle(stk_engine *e)
{
    struct eng_save *s = &e->save;
    if (atomic_load(&s->under_way)) {
        if (e->state == ENG_FAILED) ask(e, no_more_updates);
        else if (e->pending && s->step == e->begun) STK_TRY(stk_flush(e));
    }
    return wait_event(e); /* in any case: the lane sets it last */
}

stk_status stk_save_wait(stk_engine *e)
{
    stk_error_clear(&e->err);
    bool failed = eng_state(e) == ENG_FAILED && e->save.lane != NULL; /* after a seal */
    if (eng_state(e) != ENG_READY && !failed)
        return eng_refuse_state(e, "stk_save_wait", "between steps, or after a failed one");
    STK_TRY(save_settle(e));
    return save_report(e);
}

/* Engine lane. */
static void abandon(void *engine)
{
    stk_engine *e = engine;
    struct eng_save *s = &e->save;
    struct stk_error why = { 0 };
    if (!s->active) return;
    s->quiet = true;
    stk_error_set(&why, STK_ERR_INTERRUPTED, 0, "the engine was closed");
    give_up(e, &why);
    pump(e);
}

void save_quiesce(stk_engine *e, uint64_t deadline_ns)
{
    struct stk_error ignored = { 0 };
    if (!atomic_load(&e->save.under_way)) return;
    ask(e, abandon);
    exec_event_wait(&e->save.event, deadline_ns, &ignored);
}

bool stk_saved(const stk_engine *e, uint64_t *step, uint64_t *took_ns, uint64_t *waited_ns)
{
    const struct eng_save *s = &e->save;
    *step = atomic_load(&s->saved_step); /* written last, and not again before the next begin */
    *took_ns = atomic_load(&s->saved_ns);
    *waited_ns = atomic_load(&s->saved_wait_ns);
    return *step > 0;
}

void save_stats_reset(stk_engine *e) { e->save.step_wait_ns = 0; }

void save_stats_fill(const stk_engine *e, stk_step_stats *out)
{
    const struct eng_save *s = &e->save;
    out->saved_step = atomic_load(&s->saved_step);
    out->save_wait_ns = s->step_wait_ns;
    out->saving = atomic_load(&s->under_way);
}
