/* engine/predict.c - time in a prediction: servers with queues, what they share, timers.
 *
 * Owns the clock. Must not know what a node is for, nor why one waits for another (predict_run.c).
 * Any thread; pure but for its memory.
 *
 * SPEEDS. What runs is at most one thing a server, a dozen things in all. Speeds are max-min fair
 * (Bertsekas & Gallager, "Data Networks", 1992, section 6.5.2, progressive filling): the share that
 * is asked for most, relative to what is left of it, sets the speed of everything that uses it; then
 * the others. Found again whenever something begins or ends. */
#include "engine/predict.h"
#include "base/sys.h"

#include <math.h>
#include <string.h>

stk_status predict_world_new(struct predict_world **out, struct stk_error *err)
{
    struct predict_world *w = *out = sys_calloc(1, sizeof *w);
    if (!w) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to predict a step");
    for (uint32_t k = 0; k < PREDICT_SHARES; k++) w->capacity[k] = 1;
    return STK_OK;
}

void predict_world_free(struct predict_world *w)
{
    if (!w) return;
    sys_free(w->timers);
    sys_free(w);
}

/* --- speeds ----------------------------------------------------------------------------------- */

static double weight_of(const struct predict_world *w, uint32_t server)
{
    uint32_t other = server < PREDICT_WRITE0 ? server + PREDICT_DRIVES : server - PREDICT_DRIVES;
    double weight = w->one[server].now.weight;
    return server >= PREDICT_READ0 && weight > 0 && w->one[other].active ? weight : 1;
}

/* The share that allows the lowest speed, of one of weight 1, to those whose speed is open. */
static double tightest(const struct predict_world *w, const bool *open, uint32_t *which)
{
    double asked[PREDICT_SHARES] = { 0 }, left[PREDICT_SHARES], lowest = INFINITY;
    memcpy(left, w->capacity, sizeof left);
    for (uint32_t i = 0; i < PREDICT_SERVERS; i++) {
        const struct predict_one *s = &w->one[i];
        for (uint32_t k = 0; s->active && k < s->now.n_uses; k++) {
            if (open[i]) asked[s->now.use[k].share] += (double)s->now.use[k].part * weight_of(w, i);
            else left[s->now.use[k].share] -= (double)s->now.use[k].part * s->speed;
        }
    }
    for (uint32_t k = 0; k < PREDICT_SHARES; k++) {
        if (asked[k] <= 0) continue;
        double speed = left[k] > 0 ? left[k] / asked[k] : 0;
        if (speed >= lowest) continue;
        lowest = speed;
        *which = k;
    }
    return lowest;
}

static bool uses(const struct predict_one *s, uint32_t share)
{
    for (uint32_t k = 0; k < s->now.n_uses; k++)
        if (s->now.use[k].share == share && s->now.use[k].part > 0) return true;
    return false;
}

static void find_speeds(struct predict_world *w)
{
    bool open[PREDICT_SERVERS];
    for (uint32_t i = 0; i < PREDICT_SERVERS; i++) {
        open[i] = w->one[i].active;
        w->one[i].speed = 1;
    }
    for (;;) {
        uint32_t which = PREDICT_SHARES;
        double speed = tightest(w, open, &which), full = INFINITY;
        for (uint32_t i = 0; i < PREDICT_SERVERS; i++)
            if (open[i] && 1 / weight_of(w, i) < full) full = 1 / weight_of(w, i);
        if (full == INFINITY) break;
        for (uint32_t i = 0; i < PREDICT_SERVERS; i++) { /* who reaches full speed first, or is held back */
            double weight = weight_of(w, i), at = full <= speed ? 1 : speed * weight;
            if (!open[i] || (full <= speed ? 1 / weight > full : !uses(&w->one[i], which))) continue;
            w->one[i].speed = at > 1e-6 ? at : 1e-6; /* rounding must not stop the clock */
            open[i] = false;
        }
    }
    w->dirty = false;
}

/* --- queues and timers ------------------------------------------------------------------------ */

static void begin(struct predict_world *w, struct predict_one *s, const struct predict_work *work)
{
    s->active = true;
    s->now = *work;
    s->left_ns = work->ns;
    s->begin_ns = w->now_ns;
    w->dirty = true;
}

void predict_put(struct predict_world *w, uint32_t server, uint32_t cls,
                 const struct predict_work *work)
{
    struct predict_one *s = &w->one[server];
    if (!s->active) {
        begin(w, s, work);
        return;
    }
    STK_ASSERT(s->n < PREDICT_QUEUE);
    s->queue[s->n++] = (struct predict_queued){ (uint64_t)cls << 48 | w->order++, *work };
}

static void begin_waiting(struct predict_world *w, struct predict_one *s)
{
    uint32_t best = 0;
    s->active = false;
    w->dirty = true;
    if (s->n == 0) return;
    for (uint32_t i = 1; i < s->n; i++)
        if (s->queue[i].key < s->queue[best].key) best = i;
    struct predict_work work = s->queue[best].work;
    s->queue[best] = s->queue[--s->n];
    begin(w, s, &work);
}

static bool earlier(const struct predict_timer *a, const struct predict_timer *b)
{
    return a->at_ns < b->at_ns || (a->at_ns == b->at_ns && a->order < b->order);
}

bool predict_wait(struct predict_world *w, double ns, uint32_t node, uint32_t stage)
{
    if (w->n_timers == w->cap_timers) {
        uint32_t cap = w->cap_timers ? 2 * w->cap_timers : 256;
        void *p = sys_realloc(w->timers, cap * sizeof *w->timers);
        if (!p) return false;
        w->timers = p;
        w->cap_timers = cap;
    }
    struct predict_timer t = { w->now_ns + ns, w->order++, node, stage };
    uint32_t i = w->n_timers++;
    for (; i > 0 && earlier(&t, &w->timers[(i - 1) / 2]); i = (i - 1) / 2)
        w->timers[i] = w->timers[(i - 1) / 2];
    w->timers[i] = t;
    return true;
}

static struct predict_timer take_timer(struct predict_world *w)
{
    struct predict_timer first = w->timers[0], last = w->timers[--w->n_timers];
    uint32_t i = 0;
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c >= w->n_timers) break;
        if (c + 1 < w->n_timers && earlier(&w->timers[c + 1], &w->timers[c])) c++;
        if (!earlier(&w->timers[c], &last)) break;
        w->timers[i] = w->timers[c];
        i = c;
    }
    w->timers[i] = last;
    return first;
}

/* --- time ------------------------------------------------------------------------------------- */

static void advance(struct predict_world *w, double to_ns)
{
    double ns = to_ns - w->now_ns;
    w->now_ns = to_ns;
    if (ns <= 0) return;
    for (uint32_t i = 0; i < PREDICT_SERVERS; i++) {
        struct predict_one *s = &w->one[i];
        if (!s->active) continue;
        s->left_ns -= ns * s->speed;
        w->busy_ns[i] += ns;
        w->alone_ns[i] += ns * s->speed;
        for (uint32_t k = 0; k < s->now.n_uses; k++)
            w->used_ns[s->now.use[k].share] += ns * s->speed * (double)s->now.use[k].part;
    }
}

bool predict_next(struct predict_world *w, uint32_t *node, uint32_t *stage)
{
    if (w->dirty) find_speeds(w);
    uint32_t first = PREDICT_SERVERS;
    double at = INFINITY;
    for (uint32_t i = 0; i < PREDICT_SERVERS; i++) {
        const struct predict_one *s = &w->one[i];
        if (!s->active) continue;
        double left = s->left_ns > 0 ? s->left_ns : 0, end = w->now_ns + left / s->speed;
        if (end >= at) continue;
        at = end;
        first = i;
    }
    if (w->n_timers > 0 && w->timers[0].at_ns <= at) {
        struct predict_timer t = take_timer(w);
        advance(w, t.at_ns > w->now_ns ? t.at_ns : w->now_ns);
        *node = t.node;
        *stage = t.stage;
        return true;
    }
    if (first == PREDICT_SERVERS) return false;
    advance(w, at);
    struct predict_one *s = &w->one[first];
    *node = s->now.node;
    *stage = s->now.stage;
    begin_waiting(w, s);
    return true;
}
