/* engine/state.c - the state of tensors between steps: filling, reading, and the one staged chunk
 * through which homes on NVMe and on the device are reached.
 *
 * Application's thread, while no run is active (INV-4 allows it then: the engine lane is idle).
 * Owns the staging memory. Checkpoints (checkpoint.c) stream through it too. At most one chunk is
 * staged; it is written home when another is wanted or a step begins. */
#include "engine/ckpt_files.h"
#include "engine/save.h"
#include "base/sys.h"
#include "engine/twin.h"
#include <string.h>

static uint64_t param_room(const stk_engine *e) { return round_page(2ull * e->cfg.chunk_elems); }
static uint64_t opt_room(const stk_engine *e) { return round_page(12ull * e->cfg.chunk_elems); }
static uint64_t work_room(const stk_engine *e) { return round_page(4ull * e->cfg.chunk_elems); }

uint64_t state_staging_bytes(const stk_engine *e)
{
    return 2 * param_room(e) + opt_room(e) + work_room(e) + ckpt_scratch_bytes(e);
}

stk_status state_alloc(stk_engine *e)
{
    struct state_io *s = e->sio = sys_calloc(1, sizeof *s);
    void *p;
    if (!s) return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for staging");
    STK_TRY(mem_reserve(e->held, "staging of loads and checkpoints", "", state_staging_bytes(e), &p,
                        &e->err));
    if (twin_total(e)) STK_TRY(seal_pin(e, p, round_page(state_staging_bytes(e))));
    uint8_t *at = p;
    s->param = at;
    s->grad = at + param_room(e);
    s->opt = at + 2 * param_room(e);
    s->work = (float *)(void *)(s->opt + opt_room(e));
    s->scratch = s->opt + opt_room(e) + work_room(e);
    s->chunk = PLAN_NO;
    exec_event_init(e->ex, &s->event);
    return STK_OK;
}

void state_free(stk_engine *e)
{
    sys_free(e->sio);
    e->sio = NULL;
}

/* --- transfers, waited for -------------------------------------------------------------------- */

static void transfer_done(struct store_op *op)
{
    struct state_io *s = op->owner;
    if (--s->left == 0) exec_event_set(&s->event);
}

/* Engine lane: everything asked for at once, so that the drive has more than one request. */
static void transfer_begin(void *arg)
{
    stk_engine *e = arg;
    struct state_io *s = e->sio;
    for (int k = 0; k < CHUNK_STATE_N; k++) {
        if (!(s->moving & 1u << k)) continue;
        struct stk_error err = { 0 };
        stk_status st =
            s->put ? store_put(e->store, &s->op[k], &err) : store_get(e->store, &s->op[k], &err);
        if (st == STK_OK) continue;
        s->op[k].status = st;
        s->op[k].error = err;
        transfer_done(&s->op[k]);
    }
}

static bool on_nvme(const struct stk_chunk *c, enum chunk_state s)
{
    return c->extent[s] != CHUNK_NO_EXTENT;
}

/* At home it lies where only store and device reach it. */
static bool away(const struct stk_chunk *c, enum chunk_state s)
{
    return on_nvme(c, s) || c->device[s];
}

/* Moves the states of `moving` (bits by chunk_state, of those that are away) between their homes and
 * buf[state]. */
static stk_status transfer(stk_engine *e, const struct stk_chunk *c, uint32_t moving, bool put,
                           void *const buf[CHUNK_STATE_N])
{
    static const char *const names[] = { "parameters", "optimizer state", "gradient" };
    struct state_io *s = e->sio;
    if (c->home[CHUNK_PARAM] == CHUNK_DEVICE) return twin_move(e, c, moving, put, buf);
    s->moving = moving;
    s->put = put;
    s->left = 0;
    for (int k = 0; k < CHUNK_STATE_N; k++) {
        if (!(moving & 1u << k)) continue;
        s->left++;
        struct store_op *op = &s->op[k];
        op->extent = c->extent[k];
        op->cls = IO_DEMAND;
        op->buf = buf[k];
        op->version = k == CHUNK_GRAD ? c->grad_version : c->version;
        op->done = transfer_done;
        op->owner = s;
    }
    if (s->left == 0) return STK_OK;
    exec_event_reset(&s->event);
    exec_task_init(&s->task, transfer_begin, e);
    exec_post(e->lane, &s->task);
    uint64_t stall = e->cfg.stall_ns ? e->cfg.stall_ns : 120ull * 1000000000u;
    struct stk_error err = { 0 };
    stk_status st = exec_event_wait_running(&s->event, stall, &err);
    if (st != STK_OK)
        stk_error_set(&e->err, st, 0, "%s of block %s, chunk %u: the transfer does not end: %s",
                      put ? "writing" : "reading", e->layout->blocks[c->block].name, c->id,
                      err.text);
    for (int k = 0; st == STK_OK && k < CHUNK_STATE_N; k++)
        if ((moving & 1u << k) && s->op[k].status != STK_OK)
            st = stk_error_set(&e->err, s->op[k].status, s->op[k].error.os_errno,
                               "%s of block %s, chunk %u: %s", names[k],
                               e->layout->blocks[c->block].name, c->id, s->op[k].error.text);
    if (st != STK_OK) e->state = ENG_FAILED;
    return st;
}

stk_status state_fetch_param(stk_engine *e, uint32_t chunk, void *buf)
{
    void *const bufs[CHUNK_STATE_N] = { buf, NULL, NULL };
    return transfer(e, &e->layout->chunks[chunk], STATE_PARAM, false, bufs);
}

static void staged_buffers(struct state_io *s, void *buf[CHUNK_STATE_N])
{
    buf[CHUNK_PARAM] = s->param;
    buf[CHUNK_OPT] = s->opt;
    buf[CHUNK_GRAD] = s->grad;
}

/* The states of `want` that are away. */
static uint32_t away_states(const struct stk_chunk *c, uint32_t want)
{
    uint32_t m = 0;
    for (int k = 0; k < CHUNK_STATE_N; k++)
        if (away(c, k) && !(k == CHUNK_GRAD && c->grad_at)) m |= want & 1u << k;
    return m;
}

static void clear_states(stk_engine *e, const struct stk_chunk *c, uint32_t states)
{
    void *buf[CHUNK_STATE_N];
    staged_buffers(e->sio, buf);
    for (int k = 0; k < CHUNK_STATE_N; k++)
        if (states & 1u << k) memset(buf[k], 0, round_page(chunk_bytes(e->layout, c, k)));
}

stk_status state_unstage(stk_engine *e)
{
    struct state_io *s = e->sio;
    trial_end(e);
    if (s->chunk == PLAN_NO) return STK_OK;
    const struct stk_chunk *c = &e->layout->chunks[s->chunk];
    void *buf[CHUNK_STATE_N];
    staged_buffers(s, buf);
    if (s->dirty) STK_TRY(transfer(e, c, away_states(c, STATE_PARAM | STATE_OPT), true, buf));
    s->dirty = false;
    s->loaded = 0;
    s->chunk = PLAN_NO;
    return STK_OK;
}

static void fill_view(stk_engine *e, const struct stk_chunk *c, struct state_view *v);

/* As state_stage of parameters and state, but what is away is zero instead of being read:
 * everything will be overwritten. */
stk_status state_stage_fresh(stk_engine *e, uint32_t chunk, struct state_view *v)
{
    struct state_io *s = e->sio;
    const struct stk_chunk *c = &e->layout->chunks[chunk];
    STK_TRY(state_unstage(e));
    s->loaded = STATE_PARAM | STATE_OPT;
    clear_states(e, c, away_states(c, s->loaded));
    s->chunk = chunk;
    fill_view(e, c, v);
    return STK_OK;
}

stk_status state_stage(stk_engine *e, uint32_t chunk, uint32_t want, struct state_view *v)
{
    struct state_io *s = e->sio;
    const struct stk_chunk *c = &e->layout->chunks[chunk];
    trial_end(e);
    if (s->chunk != chunk) STK_TRY(state_unstage(e));
    uint32_t missing = away_states(c, want & ~s->loaded), never = 0;
    for (int k = 0; k < CHUNK_STATE_N; k++)
        if ((missing & 1u << k) && on_nvme(c, k) && store_version(e->store, c->extent[k]) == UINT64_MAX)
            never |= 1u << k;
    clear_states(e, c, never);
    void *buf[CHUNK_STATE_N];
    staged_buffers(s, buf);
    STK_TRY(transfer(e, c, missing & ~never, false, buf));
    s->chunk = chunk;
    s->loaded |= want;
    fill_view(e, c, v);
    return STK_OK;
}

static void fill_view(stk_engine *e, const struct stk_chunk *c, struct state_view *v)
{
    struct state_io *s = e->sio;
    *v = (struct state_view){ .n = c->n_elems, .frozen = c->frozen };
    v->param = away(c, CHUNK_PARAM) ? (uint16_t *)(void *)s->param : c->host[CHUNK_PARAM];
    uint8_t *opt = away(c, CHUNK_OPT) ? s->opt : c->host[CHUNK_OPT];
    if (!c->frozen) {
        v->low = (int16_t *)(void *)opt;
        v->master = (float *)(void *)opt;
        adam_moments_at(e->layout, c, opt, &v->moments);
        v->grad = c->grad_at               ? c->grad_at
                  : away(c, CHUNK_GRAD) ? (uint16_t *)(void *)s->grad
                                           : c->host[CHUNK_GRAD];
    }
}

void state_touch(stk_engine *e) { e->sio->dirty = e->sio->written = true; }

/* Before the first step every extent must exist: what nobody filled is zero. */
static stk_status write_unfilled(stk_engine *e)
{
    void *buf[CHUNK_STATE_N];
    staged_buffers(e->sio, buf);
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        const struct stk_chunk *c = &e->layout->chunks[i];
        uint32_t never = 0;
        for (int k = CHUNK_PARAM; k <= CHUNK_OPT; k++)
            if (on_nvme(c, k) && store_version(e->store, c->extent[k]) == UINT64_MAX)
                never |= 1u << k;
        clear_states(e, c, never);
        STK_TRY(transfer(e, c, never, true, buf));
    }
    return STK_OK;
}

stk_status state_flush_staged(stk_engine *e)
{
    STK_TRY(state_unstage(e));
    if (!e->store || e->sio->filled) return STK_OK;
    STK_TRY(write_unfilled(e));
    e->sio->filled = true;
    return STK_OK;
}

stk_status state_keep_gradients(stk_engine *e)
{
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        struct stk_chunk *c = &e->layout->chunks[i];
        if (!c->grad_at) continue;
        c->grad_version = e->begun;
        STK_TRY(transfer(e, c, STATE_GRAD, true, (void *[CHUNK_STATE_N]){ [CHUNK_GRAD] = c->grad_at }));
        c->grad_at = NULL;
    }
    return STK_OK;
}

/* --- elements --------------------------------------------------------------------------------- */

void state_master_get(const stk_engine *e, const struct state_view *v, uint32_t at, uint32_t n,
                      float *out)
{
    if (v->frozen) {
        if (e->layout->dtype == CHUNK_BF16) convert_bf16_to_f32(v->param + at, out, n);
        else convert_fp16_to_f32(v->param + at, out, n);
    } else if (e->layout->dtype == CHUNK_BF16) {
        convert_join(v->param + at, v->low + at, out, n);
    } else {
        memcpy(out, v->master + at, 4ull * n);
    }
}

void state_master_set(const stk_engine *e, const struct state_view *v, uint32_t at, uint32_t n,
                      const float *in)
{
    if (e->layout->dtype == CHUNK_FP16) {
        convert_f32_to_fp16(in, v->param + at, n);
        if (!v->frozen) memcpy(v->master + at, in, 4ull * n);
    } else if (v->frozen) {
        convert_f32_to_bf16(in, v->param + at, n);
    } else {
        convert_split(in, v->param + at, v->low + at, n);
    }
}

static const struct stk_tensor *tensor_of(const stk_engine *e, uint32_t tensor)
{
    return &e->layout->tensors[e->tensor_of[tensor]];
}

/* The chunk that holds element `elem` of a block's vector. */
static uint32_t chunk_of(const stk_engine *e, uint32_t block, uint64_t elem)
{
    const struct stk_block *b = &e->layout->blocks[block];
    uint32_t lo = b->first_chunk, hi = b->first_chunk + b->n_chunks - 1;
    while (lo < hi) {
        uint32_t mid = (lo + hi + 1) / 2;
        if (e->layout->chunks[mid].first_elem <= elem) lo = mid;
        else hi = mid - 1;
    }
    return lo;
}

static stk_status check_range(stk_engine *e, const char *call, uint32_t tensor, uint64_t first,
                              uint64_t n)
{
    if (eng_state(e) != ENG_READY) return eng_refuse_state(e, call, "between steps");
    if (tensor >= e->n_tensors)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0, "%s: tensor %u; there are %u", call,
                             tensor, e->n_tensors);
    const struct stk_tensor *t = tensor_of(e, tensor);
    if (first > t->n_elems || n > t->n_elems - first)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "%s: elements %llu..%llu of %s, which has %llu", call,
                             (unsigned long long)first, (unsigned long long)(first + n), t->name,
                             (unsigned long long)t->n_elems);
    return STK_OK;
}

static uint32_t dtype_bytes(stk_dtype t) { return t == STK_F32 ? 4 : 2; }

static const float *to_f32(const void *data, stk_dtype dtype, uint64_t at, uint32_t n, float *work)
{
    const uint8_t *p = (const uint8_t *)data + at * dtype_bytes(dtype);
    if (dtype == STK_F32) memcpy(work, p, 4ull * n);
    else if (dtype == STK_BF16) convert_bf16_to_f32((const uint16_t *)(const void *)p, work, n);
    else convert_fp16_to_f32((const uint16_t *)(const void *)p, work, n);
    return work;
}

stk_status stk_tensor_write(stk_engine *e, uint32_t tensor, uint64_t first, uint64_t n,
                            const void *data, stk_dtype dtype)
{
    stk_error_clear(&e->err);
    STK_TRY(check_range(e, "stk_tensor_write", tensor, first, n));
    STK_TRY(save_settle(e)); /* its state is about to change */
    if (e->pending) STK_TRY(stk_flush(e));
    const struct stk_tensor *t = tensor_of(e, tensor);
    for (uint64_t done = 0; done < n;) {
        uint64_t elem = t->first_elem + first + done;
        uint32_t chunk = chunk_of(e, t->block, elem);
        const struct stk_chunk *c = &e->layout->chunks[chunk];
        struct state_view v;
        STK_TRY(state_stage(e, chunk, STATE_PARAM | STATE_OPT, &v));
        uint32_t at = (uint32_t)(elem - c->first_elem);
        uint64_t left = n - done, room = c->n_elems - at;
        uint32_t k = (uint32_t)(left < room ? left : room);
        state_master_set(e, &v, at, k, to_f32(data, dtype, done, k, e->sio->work));
        if (!c->frozen) adam_moments_zero(&v.moments, at, k);
        state_touch(e);
        done += k;
    }
    return STK_OK;
}

static void read_piece(stk_engine *e, const struct state_view *v, stk_what what, stk_dtype dtype,
                       uint32_t at, uint32_t n, void *out)
{
    float *f = out;
    if (what == STK_READ_PARAM && dtype != STK_F32) memcpy(out, v->param + at, 2ull * n);
    else if (what == STK_READ_PARAM && e->layout->dtype == CHUNK_BF16)
        convert_bf16_to_f32(v->param + at, f, n);
    else if (what == STK_READ_PARAM) convert_fp16_to_f32(v->param + at, f, n);
    else if (what == STK_READ_MASTER) state_master_get(e, v, at, n, f);
    else if (v->frozen) memset(f, 0, 4ull * n);
    else if (what == STK_READ_EXP_AVG) adam_moments_read(&v->moments, 0, at, n, f);
    else if (what == STK_READ_EXP_AVG_SQ) adam_moments_read(&v->moments, 1, at, n, f);
    else {
        if (e->layout->dtype == CHUNK_BF16) convert_bf16_to_f32(v->grad + at, f, n);
        else convert_fp16_to_f32(v->grad + at, f, n);
        /* a power of two: dividing is exact */
        for (uint32_t i = 0; i < n; i++) f[i] = (float)(f[i] / e->grad_loss_scale);
    }
}

stk_status stk_tensor_read(stk_engine *e, uint32_t tensor, stk_what what, uint64_t first,
                           uint64_t n, void *data, stk_dtype dtype)
{
    stk_error_clear(&e->err);
    STK_TRY(check_range(e, "stk_tensor_read", tensor, first, n));
    stk_dtype own = e->layout->dtype == CHUNK_BF16 ? STK_BF16 : STK_FP16;
    if (dtype != STK_F32 && (what != STK_READ_PARAM || dtype != own))
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "stk_tensor_read: this value is read as f32%s",
                             what == STK_READ_PARAM ? " or its own 16-bit dtype" : "");
    /* grad_loss_scale: set by the first step of this engine; steps before a restore left no
     * gradient */
    if (what == STK_READ_GRAD && e->grad_loss_scale == 0)
        return eng_refuse_state(e, "stk_tensor_read of a gradient", "after a step");
    if (what != STK_READ_GRAD) STK_TRY(stk_flush(e));
    static const uint32_t states_of[] = { [STK_READ_PARAM] = STATE_PARAM,
                                          [STK_READ_MASTER] = STATE_PARAM | STATE_OPT,
                                          [STK_READ_EXP_AVG] = STATE_OPT,
                                          [STK_READ_EXP_AVG_SQ] = STATE_OPT,
                                          [STK_READ_GRAD] = STATE_GRAD };
    const struct stk_tensor *t = tensor_of(e, tensor);
    for (uint64_t done = 0; done < n;) {
        uint64_t elem = t->first_elem + first + done;
        uint32_t chunk = chunk_of(e, t->block, elem);
        const struct stk_chunk *c = &e->layout->chunks[chunk];
        struct state_view v;
        STK_TRY(state_stage(e, chunk, states_of[what], &v));
        uint32_t at = (uint32_t)(elem - c->first_elem);
        uint64_t left = n - done, room = c->n_elems - at;
        uint32_t k = (uint32_t)(left < room ? left : room);
        read_piece(e, &v, what, dtype, at, k, (uint8_t *)data + done * dtype_bytes(dtype));
        done += k;
    }
    return STK_OK;
}
