/* engine/trial.c - visits tried before the first step, to know what they take.
 *
 * Application's thread; the client queues the visit's work, the compute stream's own clock says how
 * long it ran; the engine lane reads it at the end of each. Owns, after a dry seal, memory for one visit at
 * a time and for the client's reservations; after a real one the plan's own slots are used, which hold
 * nothing yet. Must not know what a visit computes, nor what its figures are for.
 *
 * KINDS. Visits of micro-batch 0 that are alike in place's sizes and FLOPs, direction and
 * recomputation are one kind; where other micro-batches of a place follow at once, such a visit is
 * another kind.
 *
 * PASSES. A pass is the plan's visits in its order, of micro-batch 0 and what follows it at once: so many
 * of each kind (the last ones forward, the first ones backward, which belong together) that it takes about
 * PASS_NS by its FLOPs. In the first pass what they read is filled, and one of each kind is tried alone;
 * it makes threads, pages and the client's tables, and counts only where there is no other. In the others
 * ENG_VISITS_IN_FLIGHT are queued as in a step and nothing waits for an end, so each finds in caches,
 * and its threads awake, what a step's would. (Tried alone, after caches were flushed by another thread,
 * a layer's forward took 15 to 17 ms that takes 9.6 in a step, and 23 that takes 14.) A kind's time
 * is the median of the passes' means: a step takes the sum of its visits, and that of many is their mean;
 * a pass that something else disturbed must not count.
 *
 * DATA. What a visit reads is filled with numbers of no meaning first (products of zeros take less
 * power, and with it less time). What lies at host homes is zero again when trials are over. */
#include "engine/state.h"
#include "base/sys.h"

#include <stdlib.h>
#include <string.h>

#define KINDS_MAX 32
#define PASSES_MAX 16
#define COPIES_MAX 8 /* of parameters and accumulator, dry */
#define PATTERN_BYTES (1u << 20)
#define GIVE_UP 2.0 /* times STK_TRIAL_NS: a pass that takes longer by its FLOPs is not begun */
#define PASS_NS 1e9 /* by the rate of products alone: half as much again or twice of it in truth */

/* alike: visits of this kind; again: of the micro-batches after the first, which follow it. */
struct kind {
    uint32_t visit, alike, used; /* used: of them in a pass */
    bool again;
    double sum_ns;              /* of the pass at hand */
    uint32_t n;
    double pass_ns[PASSES_MAX]; /* means */
    uint32_t n_passes;
};

struct entry { uint32_t visit, kind; };

/* The end of a visit on the compute stream; at most ENG_VISITS_IN_FLIGHT are under way. */
struct ended { struct exec_task task; struct eng_trial *trial; uint32_t at; };

struct eng_trial {
    const struct dev_stream *stream;
    struct kind kind[KINDS_MAX];
    struct entry *pass;         /* visits of a pass in order */
    uint64_t *busy_ns;          /* [i]: the stream's clock at the end of pass[i - 1]; [0]: before the pass */
    uint32_t n_kinds, n_pass, at, round;
    bool busy, over;
    uint64_t begin_ns, round_ns;
    struct ended ended[ENG_VISITS_IN_FLIGHT];
    uint32_t n_queued;
    _Atomic uint32_t n_ended;
    struct exec_event one_ended;
    struct mem *mem;            /* dry: the client's reservations in host memory */
    uint8_t *device;            /* dry: of the device, laid out by struct places */
    uint32_t copies;
    uint8_t *pattern;
    uint32_t n_filled;          /* entries of the pass whose parameters were filled */
};

/* Offsets of what one visit needs, in the dry device's one reservation. */
struct places { uint64_t param, acc, copy, in, out, full, flow, workspace, reserves, size; };

/* The boundary that it writes: sizes its time, and its room after a dry seal. */
static uint64_t out_bytes(const stk_engine *e, const struct plan_visit *v)
{
    return v->dir == PLAN_FORWARD && v->place + 1 < e->n_places ? e->pplaces[v->place + 1].in_bytes : 0;
}

static bool alike(const stk_engine *e, const struct plan_visit *a, const struct plan_visit *b)
{
    const struct plan_place_in *x = &e->pplaces[a->place], *y = &e->pplaces[b->place];
    const struct plan_block_in *p = &e->pblocks[a->block], *q = &e->pblocks[b->block];
    return a->dir == b->dir && a->recompute == b->recompute && x->flops == y->flops &&
           x->fused == y->fused && x->in_bytes == y->in_bytes && x->full_bytes == y->full_bytes &&
           p->param_bytes == q->param_bytes && p->acc_bytes == q->acc_bytes &&
           out_bytes(e, a) == out_bytes(e, b);
}

bool trial_again(const struct plan *p, uint32_t i)
{
    return i > 0 && p->visits[i - 1].place == p->visits[i].place &&
           p->visits[i - 1].dir == p->visits[i].dir;
}

static void find_kinds(stk_engine *e, struct eng_trial *t)
{
    const struct plan *p = e->plan_train;
    for (uint32_t i = 0; i < p->n_visits; i++) {
        const struct plan_visit *v = &p->visits[i];
        uint32_t k = 0;
        if (v->micro != 0) continue;
        bool both = i + 1 < p->n_visits && trial_again(p, i + 1);
        while (k < t->n_kinds && !alike(e, &p->visits[t->kind[k].visit], v)) k++;
        for (uint32_t twin = k; twin < t->n_kinds && twin <= k + 1; twin++)
            if (t->kind[twin].visit == t->kind[k].visit) t->kind[twin].alike++;
        if (k < t->n_kinds) continue;
        if (t->n_kinds + 1 + both > KINDS_MAX) { /* too many to try: none is known */
            t->over = true;
            return;
        }
        t->kind[t->n_kinds++] = (struct kind){ .visit = i, .alike = 1 };
        if (both) t->kind[t->n_kinds++] = (struct kind){ .visit = i, .alike = 1, .again = true };
    }
}

/* --- what a pass consists of ------------------------------------------------------------------ */

static double flops_of(const stk_engine *e, const struct eng_trial *t, uint32_t most)
{
    double flops = 0;
    for (uint32_t k = 0; k < t->n_kinds; k++) {
        const struct kind *x = &t->kind[k];
        flops += e->plan_train->visits[x->visit].flops * (x->alike < most ? x->alike : most);
    }
    return flops;
}

static bool too_long(const stk_engine *e, const struct eng_trial *t)
{
    double rate = e->caps.matmul_flops_per_s;
    return rate > 0 && flops_of(e, t, 1) / rate * 1e9 > GIVE_UP * STK_TRIAL_NS;
}

static uint32_t kind_of(const stk_engine *e, const struct eng_trial *t, const struct plan_visit *v, bool again)
{
    uint32_t k = 0;
    while (k < t->n_kinds && (t->kind[k].again != again ||
                              !alike(e, &e->plan_train->visits[t->kind[k].visit], v)))
        k++;
    return k;
}

/* The `used` of a kind that belong together: the last ones forward, the first ones backward. */
static bool in_pass(const struct plan_visit *v, const struct kind *k, uint32_t number)
{
    return v->dir == PLAN_FORWARD ? number + k->used >= k->alike : number < k->used;
}

/* False: no memory. */
static bool make_pass(stk_engine *e, struct eng_trial *t)
{
    const struct plan *p = e->plan_train;
    uint32_t most = 1, seen[KINDS_MAX] = { 0 };
    double rate = e->caps.matmul_flops_per_s;
    while (most < p->n_visits && rate > 0 && flops_of(e, t, most + 1) / rate * 1e9 <= PASS_NS) most++;
    for (uint32_t k = 0; k < t->n_kinds; k++)
        t->kind[k].used = t->kind[k].alike < most ? t->kind[k].alike : most;
    t->pass = sys_calloc((size_t)p->n_visits + 1, sizeof *t->pass);
    t->busy_ns = sys_calloc((size_t)p->n_visits + 2, sizeof *t->busy_ns);
    if (!t->pass || !t->busy_ns) return false;
    for (uint32_t i = 0; i < p->n_visits; i++) {
        const struct plan_visit *v = &p->visits[i];
        bool again = i > 0 && v->micro == 1 && p->visits[i - 1].micro == 0 && trial_again(p, i);
        if (v->micro != 0 && !again) continue;
        uint32_t k = kind_of(e, t, again ? &p->visits[i - 1] : v, again);
        if (k == t->n_kinds || !in_pass(v, &t->kind[k], seen[k]++)) continue;
        t->pass[t->n_pass++] = (struct entry){ i, k };
    }
    return true;
}

/* --- memory after a dry seal ------------------------------------------------------------------ */

static uint64_t slot_bytes(const struct plan *p, uint32_t slot)
{
    return slot == PLAN_NO ? 0 : round_page(p->slots[slot].size_bytes);
}

static void grow(uint64_t *at, uint64_t bytes)
{
    if (bytes > *at) *at = bytes;
}

static struct places lay_out(const stk_engine *e, const struct eng_trial *t)
{
    const struct plan *p = e->plan_train;
    struct places most = { 0 }, at = { 0 };
    for (uint32_t k = 0; k < t->n_kinds; k++) {
        const struct plan_visit *v = &p->visits[t->kind[k].visit];
        grow(&most.param, round_page(e->pblocks[v->block].param_bytes));
        grow(&most.acc, slot_bytes(p, v->acc_slot));
        grow(&most.in, slot_bytes(p, v->in_slot));
        grow(&most.out, slot_bytes(p, v->out_slot));
        grow(&most.full, slot_bytes(p, v->full_slot));
        grow(&most.flow, slot_bytes(p, v->flow_slot));
    }
    at.acc = at.param + most.param;
    at.copy = at.acc + most.acc; /* bytes of one copy of both */
    at.in = at.copy * (t->copies ? t->copies : 1);
    at.out = at.in + most.in;
    at.full = at.out + most.out;
    at.flow = at.full + most.full;
    at.workspace = at.flow + most.flow;
    at.reserves = at.workspace + round_page(e->workspace_bytes);
    at.size = at.reserves;
    for (uint32_t i = 0; i < e->n_reserves; i++)
        if (e->reserves[i].where == STK_ON_DEVICE) at.size += round_page(e->reserves[i].size_bytes);
    return at;
}

/* False: it does not fit, and nothing is tried. */
static bool reserve(stk_engine *e, struct eng_trial *t)
{
    struct places at = lay_out(e, t);
    struct mem_limits lim;
    struct stk_error ignored = { 0 };
    uint64_t host = 0, device, most;
    void *base;
    mem_limits_read("", &lim);
    for (uint32_t i = 0; i < e->n_reserves; i++)
        if (e->reserves[i].where == STK_ON_HOST) host += round_page(e->reserves[i].size_bytes);
    most = lim.available_bytes / 2;
    if (e->cfg.host_memory && e->cfg.host_memory < most) most = e->cfg.host_memory;
    if (at.size > e->device_limit || at.size + host > most) return false;
    most = most - host < e->device_limit ? most - host : e->device_limit;
    for (t->copies = COPIES_MAX; t->copies > 1 && lay_out(e, t).size > most; t->copies--) {}
    at = lay_out(e, t);
    device = at.reserves;
    if (mem_open(&t->mem, &ignored) != STK_OK) return false;
    if (dev_reserve(e->dev, at.size, &base, &ignored) != STK_OK) return false;
    t->device = base;
    for (uint32_t i = 0; i < e->n_reserves; i++) {
        struct eng_reserve *r = &e->reserves[i];
        if (r->where == STK_ON_DEVICE) {
            r->base = t->device + device;
            device += round_page(r->size_bytes);
        } else if (mem_reserve(t->mem, r->owner, "", round_page(r->size_bytes), &r->base,
                               &ignored) != STK_OK) {
            return false;
        }
    }
    e->workspace = t->device + at.workspace;
    return true;
}

static void fill_dry(stk_engine *e, const struct eng_trial *t, uint32_t index, stk_visit *v)
{
    const struct plan_visit *pv = &e->plan_train->visits[index];
    struct places at = lay_out(e, t);
    bool backward = pv->dir == PLAN_BACKWARD;
    uint64_t copy = at.copy * (t->at % t->copies);
    *v = (stk_visit){ .index = index,
                      .place = pv->place,
                      .block = pv->block,
                      .micro = pv->micro,
                      .dir = backward ? STK_BACKWARD : STK_FORWARD,
                      .recompute = pv->recompute,
                      .first_of_block = pv->first_of_block,
                      .last_of_block = pv->last_of_block,
                      .param = t->device + copy + at.param,
                      .workspace = e->workspace,
                      .workspace_bytes = e->workspace_bytes,
                      .stream = e->compute,
                      .loss_scale = 1 };
    if (backward && pv->acc_slot != PLAN_NO) v->grad = (float *)(void *)(t->device + copy + at.acc);
    v->overwrite = v->grad && v->first_of_block && e->cfg.overwrite_grads;
    if (pv->in_slot != PLAN_NO) v->in = t->device + at.in;
    if (pv->out_slot != PLAN_NO) v->out = t->device + at.out;
    if (pv->full_slot != PLAN_NO) v->full = t->device + at.full;
    if (pv->flow_slot != PLAN_NO) v->flow = t->device + at.flow;
}

/* --- trying ----------------------------------------------------------------------------------- */

/* Every 16-bit half is a bf16 between 2^-7 and 2^-3 of either sign, which makes its f32 one, too. */
static bool make_pattern(struct eng_trial *t)
{
    uint64_t x = 88172645463325252u;
    uint64_t *p = sys_calloc(1, PATTERN_BYTES);
    t->pattern = (uint8_t *)p;
    for (uint32_t i = 0; p && i < PATTERN_BYTES / 8; i++) {
        x ^= x << 13; /* Marsaglia, "Xorshift RNGs", 2003 */
        x ^= x >> 7;
        x ^= x << 17;
        p[i] = (x & 0x81ff81ff81ff81ffu) | 0x3c003c003c003c00u;
    }
    return p != NULL;
}

static stk_status fill(stk_engine *e, const void *to, uint64_t bytes)
{
    uint8_t *at = (uint8_t *)(uintptr_t)to;
    for (uint64_t n; at && bytes > 0; at += n, bytes -= n) {
        n = bytes < PATTERN_BYTES ? bytes : PATTERN_BYTES;
        STK_TRY(dev_copy(e->compute, at, e->trial->pattern, n, DEV_TO_DEVICE, &e->err));
    }
    return STK_OK;
}

/* In the first pass. */
static stk_status fill_visit(stk_engine *e, struct eng_trial *t, const stk_visit *v)
{
    const struct plan *p = e->plan_train;
    const struct plan_visit *pv = &p->visits[t->pass[t->at].visit];
    STK_TRY(fill(e, v->param, e->pblocks[pv->block].param_bytes));
    t->n_filled = t->at + 1;
    if (v->in) STK_TRY(fill(e, v->in, p->slots[pv->in_slot].size_bytes));
    if (v->full) STK_TRY(fill(e, v->full, p->slots[pv->full_slot].size_bytes));
    if (v->flow) STK_TRY(fill(e, v->flow, p->slots[pv->flow_slot].size_bytes));
    return STK_OK;
}

static void clear(stk_engine *e, struct eng_trial *t)
{
    struct stk_error ignored = { 0 };
    for (uint32_t i = 0; i < t->n_filled && !t->device; i++) {
        const struct plan_visit *v = &e->plan_train->visits[t->pass[i].visit];
        const struct stk_block *b = &e->layout->blocks[v->block];
        if (v->param_slot != PLAN_NO || b->n_chunks == 0) continue;
        const struct stk_chunk *c = &e->layout->chunks[b->first_chunk];
        if (c->home[CHUNK_PARAM] == CHUNK_DEVICE) {
            dev_zero(e->compute, c->device[CHUNK_PARAM], b->elems * 2, &ignored);
            dev_sync(e->compute, &ignored);
        } else
            memset(c->host[CHUNK_PARAM], 0, b->elems * 2);
    }
    t->n_filled = 0;
    sys_free(t->pattern);
    t->pattern = NULL;
}

/* Engine lane. */
static void visit_ended(void *arg)
{
    struct ended *x = arg;
    struct eng_trial *t = x->trial;
    t->busy_ns[x->at + 1] = dev_stream_busy_ns(t->stream);
    atomic_fetch_add(&t->n_ended, 1);
    exec_event_set(&t->one_ended);
}

/* Until at most `most` visits are under way. */
static void wait_for_ends(struct eng_trial *t, uint32_t most)
{
    for (;;) {
        exec_event_reset(&t->one_ended);
        if (t->n_queued - atomic_load(&t->n_ended) <= most) return;
        (void)exec_event_wait(&t->one_ended, UINT64_MAX, NULL);
    }
}

void trial_end(stk_engine *e)
{
    struct eng_trial *t = e->trial;
    struct stk_error ignored = { 0 };
    if (!t || (t->over && !t->pattern)) return;
    (void)dev_sync(e->compute, &ignored);
    wait_for_ends(t, 0);
    t->busy = false;
    t->over = true;
    clear(e, t);
}

static stk_status begin(stk_engine *e)
{
    struct eng_trial *t = e->trial = sys_calloc(1, sizeof *t);
    if (!t) return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory to try visits");
    t->stream = e->compute;
    exec_event_init(e->ex, &t->one_ended);
    t->over = !e->plan_train || e->cfg.own_order || exec_kind_of(e->ex) == EXEC_SIM;
    if (!t->over) find_kinds(e, t);
    t->over = t->over || t->n_kinds == 0 || dev_matmul_rate(e->dev, &e->err) != STK_OK;
    dev_caps_read(e->dev, &e->caps);
    t->over = t->over || too_long(e, t) || !make_pass(e, t);
    if (!t->over && e->state == ENG_DRY) t->over = !reserve(e, t);
    t->over = t->over || !make_pattern(t);
    t->begin_ns = t->round_ns = exec_now_ns(e->ex);
    return STK_OK;
}

/* Each visit took what the stream's clock moved since the one before; one by one it stood still. */
static void count_pass(struct eng_trial *t)
{
    for (uint32_t k = 0; k < t->n_kinds; k++) t->kind[k].n = 0, t->kind[k].sum_ns = 0;
    for (uint32_t i = 0; i < t->at; i++) {
        struct kind *k = &t->kind[t->pass[i].kind];
        if (t->busy_ns[i + 1] == t->busy_ns[i]) continue; /* filled only */
        k->sum_ns += (double)(t->busy_ns[i + 1] - t->busy_ns[i]);
        k->n++;
    }
    for (uint32_t i = 0; i < t->n_kinds; i++) {
        struct kind *k = &t->kind[i];
        if (t->round == 1) k->n_passes = 0; /* the first counts where there is no other */
        if (k->n > 0) k->pass_ns[k->n_passes++] = k->sum_ns / k->n;
    }
}

/* A pass is over: another one while it will end in time, but never fewer than two where the first
 * was short enough. */
static stk_status next_pass(stk_engine *e, struct eng_trial *t)
{
    stk_status st = dev_sync(e->compute, &e->err);
    wait_for_ends(t, 0);
    count_pass(t);
    uint64_t now = exec_now_ns(e->ex), took = now - t->round_ns;
    t->at = 0;
    t->round++;
    t->round_ns = now;
    t->busy_ns[0] = dev_stream_busy_ns(e->compute);
    if (t->round > 1 || took >= STK_TRIAL_NS)
        t->over = t->round >= PASSES_MAX || now - t->begin_ns + took > STK_TRIAL_NS;
    if (st != STK_OK) e->state = ENG_FAILED;
    return st;
}

static void visit_at(stk_engine *e, const struct eng_trial *t, stk_visit *v)
{
    uint32_t index = t->pass[t->at].visit;
    if (e->state == ENG_DRY) fill_dry(e, t, index, v);
    else step_fill_visit(e, e->plan_train, index, v);
    v->micro = 0; /* inputs of others are not there */
}

/* tried: one of its kind was. */
static stk_status fill_first(stk_engine *e, struct eng_trial *t, const stk_visit *v, bool *tried)
{
    *tried = false;
    for (uint32_t i = 0; i < t->at; i++) *tried |= t->pass[i].kind == t->pass[t->at].kind;
    STK_TRY(fill_visit(e, t, v));
    STK_TRY(dev_sync(e->compute, &e->err));
    wait_for_ends(t, 0);
    t->busy_ns[t->at] = dev_stream_busy_ns(e->compute);
    return STK_OK;
}

stk_status stk_trial_next(stk_engine *e, stk_visit *v)
{
    stk_error_clear(&e->err);
    enum eng_state s = eng_state(e);
    if ((s != ENG_READY && s != ENG_DRY) || e->begun > 0 || (e->trial && e->trial->busy) ||
        (e->sio && e->sio->written)) /* its parameters would be lost */
        return eng_refuse_state(e, "stk_trial_next",
                                "after stk_seal, before the first step and before anything is filled");
    if (!e->trial) STK_TRY(begin(e));
    struct eng_trial *t = e->trial;
    for (bool tried = false; !t->over; t->busy_ns[++t->at] = dev_stream_busy_ns(e->compute)) {
        if (t->at == t->n_pass) STK_TRY(next_pass(e, t));
        if (t->over) break;
        visit_at(e, t, v);
        if (t->round > 0) break;
        STK_TRY(fill_first(e, t, v, &tried));
        if (!tried) break;
    }
    if (t->over) {
        clear(e, t);
        return STK_END;
    }
    wait_for_ends(t, ENG_VISITS_IN_FLIGHT - 1);
    t->busy = true;
    return STK_OK;
}

stk_status stk_trial_done(stk_engine *e, const stk_visit *v)
{
    stk_error_clear(&e->err);
    struct eng_trial *t = e->trial;
    if (!t || !t->busy || v->index != t->pass[t->at].visit)
        return eng_refuse_state(e, "stk_trial_done", "after stk_trial_next");
    struct ended *x = &t->ended[t->n_queued % ENG_VISITS_IN_FLIGHT];
    x->trial = t;
    x->at = t->at;
    exec_task_init(&x->task, visit_ended, x);
    stk_status st = dev_notify(e->compute, e->lane, &x->task, NULL, &e->err);
    t->busy = false;
    if (st != STK_OK) {
        e->state = ENG_FAILED;
        return st;
    }
    t->n_queued++;
    t->at++;
    return t->round == 0 ? dev_sync(e->compute, &e->err) : STK_OK;
}

/* --- what was found --------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double time_of(const struct kind *k)
{
    double ns[PASSES_MAX];
    memcpy(ns, k->pass_ns, sizeof ns);
    qsort(ns, k->n_passes, sizeof ns[0], by_value);
    return (ns[k->n_passes / 2] + ns[(k->n_passes - 1) / 2]) / 2;
}

bool trial_cost(const stk_engine *e, uint32_t place, bool again, stk_visit_cost *out)
{
    const struct eng_trial *t = e->trial;
    bool found = false;
    *out = (stk_visit_cost){ 0 };
    for (uint32_t i = 0; t && i < e->plan_train->n_visits; i++) {
        const struct plan_visit *v = &e->plan_train->visits[i];
        bool tried = false;
        if (v->place != place || v->micro != 0) continue;
        for (uint32_t k = 0; k < t->n_kinds; k++) {
            const struct kind *x = &t->kind[k];
            if (!x->n_passes || (x->again && !again) || !alike(e, &e->plan_train->visits[x->visit], v))
                continue; /* of twins the later counts, if it is asked for */
            *(v->dir == PLAN_FORWARD ? &out->forward_ns : &out->backward_ns) = time_of(x);
            tried = true;
        }
        if (!tried) return false; /* the client broke trials off */
        found = true;
    }
    return found;
}

void trial_free(stk_engine *e)
{
    if (!e->trial) return;
    mem_close(e->trial->mem);
    sys_free(e->trial->pattern);
    sys_free(e->trial->pass);
    sys_free(e->trial->busy_ns);
    sys_free(e->trial);
    e->trial = NULL;
}
