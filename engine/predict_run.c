/* engine/predict_run.c - the executor's rules in a prediction: what is ready, what may begin, what
 * the application waits for. engine/run.c, issue.c and step.c line by line, with predict.c's servers
 * in the place of drives, streams and the team.
 *
 * Owns the state of one predicted period. Must not know where a machine's figures come from. Any
 * thread; pure but for its memory. */
#include "engine/engine.h"
#include "engine/pace.h"
#include "engine/predict.h"
#include "base/sys.h"

#include <math.h>
#include <string.h>

enum { AT_SERVER, AT_READ, AT_WRITE, AT_LATENCY, AT_CHECK_GET, AT_CHECK_PUT, AT_HOP };
#define UPDATES_IN_FLIGHT 2u /* run_alloc */
/* A thread that takes a core from operations holds up the whole team: who has ended waits for who was
 * held. Core time that operations lose for each that a copy, cast, checksum or transfer takes, measured
 * on two cores: 1.0, 1.35, 1.35 beside a thread that spins for 200 or 40 us in five times that, 1.27 in
 * forward visits beside transfers (docs/prediction.md). */
#define HELD 1.3
#define ONE_SERVER 1.1 /* a drive that moves less than so much more with both directions at once */

struct pool { uint32_t in_flight, limit; };

/* Speculation (engine/spec_run.c). Per chunk: what the period before left (PREDICT_MADE), and this one. */
struct predict_spec {
    uint32_t *node, *order, n_order, final_left, casts_done, patience; /* node: PLAN_NO: none */
    uint8_t *before, *now;
    bool closed;
};

struct predicted {
    const struct predict_in *in;
    const struct plan *p;
    const stk_machine *m;
    struct predict_world *w;
    predict_node_fn *each;
    void *arg;
    uint32_t *deps_left;
    uint8_t *state;             /* enum run_node_state */
    double *begin_ns, *end_ns;
    uint64_t *heap[PLAN_RESOURCE_N];
    uint32_t heap_n[PLAN_RESOURCE_N];
    uint64_t ready_bytes[PLAN_RESOURCE_N]; /* of the nodes in the heap */
    struct pace pace;
    double paced, team_part;    /* of what begins now: bytes a second, 0: all; part of the team */
    struct pool pool[PLAN_RESOURCE_N];
    uint32_t nodes_left, next_visit, visits_in_flight;
    uint32_t last_node;
    uint8_t cause;
    double last_visit_done_ns, asked_ns, busy_at_ask_ns;
    struct predict_spec spec;
    double exposed_ns[5];       /* nvme, copy, update, gather, queue */
    bool failed;                /* no memory */
};

/* --- heaps: rank above, node below ------------------------------------------------------------ */

static void push(struct predicted *r, uint32_t res, uint32_t node)
{
    uint64_t *h = r->heap[res], key = (uint64_t)r->p->nodes[node].rank << 32 | node;
    uint32_t i = r->heap_n[res]++;
    r->ready_bytes[res] += r->p->nodes[node].bytes;
    for (; i > 0 && h[(i - 1) / 2] > key; i = (i - 1) / 2) h[i] = h[(i - 1) / 2];
    h[i] = key;
}

static void pop(struct predicted *r, uint32_t res)
{
    uint64_t *h = r->heap[res], last = h[--r->heap_n[res]];
    uint32_t n = r->heap_n[res], i = 0;
    r->ready_bytes[res] -= r->p->nodes[(uint32_t)h[0]].bytes;
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c >= n) break;
        if (c + 1 < n && h[c + 1] < h[c]) c++;
        if (h[c] >= last) break;
        h[i] = h[c];
        i = c;
    }
    h[i] = last;
}

/* --- readiness: run.c ------------------------------------------------------------------------- */

static bool passes(const struct predicted *r, uint32_t node);

static void node_ready(struct predicted *r, uint32_t node)
{
    const struct plan_node *n = &r->p->nodes[node];
    r->state[node] = RUN_READY;
    if (n->kind != PLAN_VISIT) push(r, passes(r, node) ? PLAN_NONE : n->resource, node);
}

static void meet_successors(struct predicted *r, uint32_t node, bool at_hand_out)
{
    const struct plan_node *n = &r->p->nodes[node];
    for (uint32_t i = 0; i < n->n_succ; i++) {
        uint32_t s = r->p->succs[n->first_succ + i];
        bool stream_edge = n->kind == PLAN_VISIT && r->p->nodes[s].kind == PLAN_VISIT;
        if (stream_edge != at_hand_out || r->state[s] == RUN_DONE) continue;
        if (--r->deps_left[s] == 0) node_ready(r, s);
    }
}

/* --- speculation: spec_run.c ------------------------------------------------------------------ */

static void complete(struct predicted *r, uint32_t node);

static void pass_early(struct predicted *r, uint32_t node)
{
    if (r->state[node] != RUN_WAITING) return;
    r->begin_ns[node] = r->w->now_ns;
    complete(r, node);
}

static void spec_close(struct predicted *r)
{
    if (r->spec.closed) return;
    r->spec.closed = true;
    for (uint32_t i = 0; i < r->spec.n_order; i++) pass_early(r, r->spec.node[r->spec.order[i]]);
}

static bool far_off(const struct predicted *r, uint32_t node)
{
    const struct plan_node *n = &r->p->nodes[node];
    for (uint32_t d = 0; d < n->n_deps; d++) {
        uint32_t f = r->p->deps[n->first_dep + d];
        if (r->p->nodes[f].kind == PLAN_FETCH && r->p->nodes[f].spec &&
            (r->state[f] == RUN_WAITING || r->state[f] == RUN_READY))
            return true;
    }
    return false;
}

static void spec_completed(struct predicted *r, uint32_t node)
{
    struct predict_spec *s = &r->spec;
    const struct plan_node *n = &r->p->nodes[node];
    if (s->n_order == 0) return;
    uint8_t landed = r->in->input->in_place ? PLAN_GRAD_CAST : PLAN_GRAD_OUT;
    if (n->kind == landed && s->node[n->chunk] != PLAN_NO && s->casts_done++ >= s->patience) {
        uint32_t chunk = s->order[s->casts_done - 1 - s->patience];
        if (r->in->input->chunks[chunk].home[CHUNK_GRAD] == CHUNK_NVME &&
            far_off(r, s->node[chunk]))
            pass_early(r, s->node[chunk]);
    }
    if ((n->kind == PLAN_VISIT || n->kind == PLAN_GRAD_CAST) && --s->final_left == 0) spec_close(r);
}

/* update_splits: the UPDATE makes all of it, though the plan has a COMMIT. */
static bool whole(const struct predicted *r, const struct plan_node *n)
{
    const struct plan_input *in = r->in->input;
    return in->update == PLAN_SPECULATE && n->part == PLAN_RUN_UPDATE && plan_splits(in, n->chunk) &&
           !plan_splits_now(in, n->chunk, !r->in->norm_fails);
}

/* A quiet run: what was made in the period before is right. */
static bool passes(const struct predicted *r, uint32_t node)
{
    const struct predict_spec *s = &r->spec;
    const struct plan_node *n = &r->p->nodes[node];
    bool updates = (r->in->parts & PLAN_RUN_UPDATE) != 0;
    if (n->kind == PLAN_HAND_OVER) return !updates;
    if (n->optional && !n->for_next) return updates;
    if (r->in->input->update != PLAN_SPECULATE || n->chunk == PLAN_NO) return false;
    if (n->kind == PLAN_UNDO) return true;
    if (n->spec && n->kind == PLAN_FETCH) return s->closed || r->state[s->node[n->chunk]] == RUN_DONE;
    if (n->spec) return n->kind == PLAN_WRITE_BACK ? !(s->now[n->chunk] & PREDICT_MADE) : s->closed;
    if (n->for_next && n->optional)
        return (s->now[n->chunk] & PREDICT_MADE) || (!r->in->norm_fails && s->final_left == 0);
    if (n->part != PLAN_RUN_UPDATE) return false;
    if (n->kind == PLAN_COMMIT && whole(r, n)) return true;
    uint8_t bits = s->before[n->chunk];
    return (bits & PREDICT_MADE) || (n->kind == PLAN_FETCH && (bits & 1u << n->state));
}

/* A node was not only passed. */
static void spec_ran(struct predicted *r, const struct plan_node *n)
{
    if (n->chunk == PLAN_NO) return;
    if (n->kind == PLAN_UPDATE && n->spec) r->spec.now[n->chunk] |= PREDICT_MADE;
    if (n->for_next && n->optional)
        r->spec.now[n->chunk] = (uint8_t)(r->spec.now[n->chunk] | 1u << n->state);
}

static void spec_begin(struct predicted *r)
{
    struct predict_spec *s = &r->spec;
    const struct plan_input *in = r->in->input;
    uint64_t most = 1;
    for (uint32_t i = 0; i < in->n_chunks; i++) {
        s->node[i] = PLAN_NO;
        s->now[i] = 0;
        if (in->chunks[i].bytes[CHUNK_GRAD] > most) most = in->chunks[i].bytes[CHUNK_GRAD];
    }
    for (uint32_t i = 0; (r->in->parts & PLAN_RUN_VISITS) && i < r->p->n_nodes; i++) {
        const struct plan_node *n = &r->p->nodes[i];
        s->final_left += n->kind == PLAN_VISIT || n->kind == PLAN_GRAD_CAST;
        if (n->kind != PLAN_UPDATE || !n->spec) continue;
        s->node[n->chunk] = i;
        s->order[s->n_order++] = n->chunk;
    }
    s->patience = (uint32_t)(in->arena_bytes[PLAN_ARENA_GRAD] / ((most + 4095) / 4096 * 4096)) / 2;
    if (!r->in->norm_fails) return;
    spec_close(r);
    for (uint32_t i = 0; s->n_order > 0 && i < r->p->n_nodes; i++)
        if (r->p->nodes[i].spec && r->p->nodes[i].kind == PLAN_FETCH) pass_early(r, i);
}

static void complete(struct predicted *r, uint32_t node)
{
    const struct plan_node *n = &r->p->nodes[node];
    r->state[node] = RUN_DONE;
    spec_completed(r, node);
    r->last_node = node;
    r->end_ns[node] = r->w->now_ns;
    if (r->each) r->each(r->arg, node, r->begin_ns[node], r->w->now_ns);
    meet_successors(r, node, false);
    r->nodes_left--;
    if (n->kind == PLAN_VISIT) r->last_visit_done_ns = r->w->now_ns;
}

/* --- what a node takes ------------------------------------------------------------------------ */

static void use(struct predict_work *w, uint32_t share, double part)
{
    if (!(part > 0)) return;
    w->use[w->n_uses].share = (uint8_t)share;
    w->use[w->n_uses++].part = (float)(part < 1 ? part : 1);
}

static double of_dram(const stk_machine *m, double bytes_per_s)
{
    return m->dram_bytes_per_s > 0 ? bytes_per_s / m->dram_bytes_per_s : 0;
}
static double one_core(const stk_machine *m) { return 1.0 / (m->cores ? m->cores : 1); }
static double lost_core(const stk_machine *m) { return HELD * one_core(m); }
static double threads(const stk_machine *m, uint32_t n) { return n ? n * one_core(m) : 1; }
static double ns_of(double bytes, double bytes_per_s) { return bytes / bytes_per_s * 1e9; }

/* How often both directions at once hold the bytes of one: 1 shared, 2 independent. */
static double both(double in, double out, double sum)
{
    double k = sum > 0 ? sum / (2 * in) + sum / (2 * out) : 2;
    return k < 1 ? 1 : k > 2 ? 2 : k;
}

static void visit_work(const struct predicted *r, const struct plan_node *n, struct predict_work *w)
{
    const stk_machine *m = r->m;
    const struct plan_visit *v = &r->p->visits[n->visit];
    const struct predict_cost *c = r->in->cost ? &r->in->cost[v->place] : NULL;
    const struct plan_block_in *b = &r->in->input->blocks[v->block];
    if (c && c->known && v->dir == PLAN_FORWARD)
        w->ns = trial_again(r->p, n->visit) ? c->forward_again_ns : c->forward_ns;
    else if (c && c->known)
        w->ns = (trial_again(r->p, n->visit) ? c->backward_again_ns : c->backward_ns) +
                (v->recompute ? c->recompute_ns : 0);
    else
        w->ns = (double)m->launch_ns + (v->flops > 0 ? v->flops / m->flops_per_s * 1e9 : 0);
    if (v->dir == PLAN_BACKWARD && v->first_of_block && v->acc_slot != PLAN_NO &&
        !r->in->overwrite_grads && m->device_bytes_per_s > 0)
        w->ns += (double)m->launch_ns + ns_of((double)b->acc_bytes, m->device_bytes_per_s);
    if (m->on_host) use(w, PREDICT_CORES, threads(m, r->in->compute_threads));
}

static struct pace_now pace_state(const struct predicted *r)
{
    return (struct pace_now){ .plan = r->p,
                              .node_state = r->state,
                              .next_visit = r->next_visit,
                              .visits_in_flight = r->visits_in_flight,
                              .updates_in_flight = r->pool[PLAN_UPDATE_TEAM].in_flight,
                              .ready_bytes = { r->ready_bytes[PLAN_COPY_IN_LINK],
                                               r->ready_bytes[PLAN_COPY_OUT_LINK] } };
}

static void copy_work(const struct predicted *r, const struct plan_node *n, bool in,
                      struct predict_work *w)
{
    const stk_machine *m = r->m;
    double full = in ? m->copy_in_bytes_per_s : m->copy_out_bytes_per_s;
    double rate = r->paced > 0 && r->paced < full ? r->paced : full;
    w->ns = (double)m->launch_ns + ns_of((double)n->bytes, rate);
    use(w, PREDICT_DRAM, of_dram(m, m->on_host ? 2 * rate : rate));
    if (m->on_host) use(w, PREDICT_CORES, lost_core(m));
    else use(w, PREDICT_LINK, rate / full / both(m->copy_in_bytes_per_s, m->copy_out_bytes_per_s,
                                       m->copy_both_bytes_per_s));
}

/* The bytes of a cast are those it makes, 2 an element; it reads 4. */
static void cast_work(const struct predicted *r, const struct plan_node *n, struct predict_work *w)
{
    const stk_machine *m = r->m;
    w->ns = (double)m->launch_ns + ns_of((double)n->bytes, m->cast_bytes_per_s);
    if (!m->on_host) return;
    use(w, PREDICT_CORES, lost_core(m));
    use(w, PREDICT_DRAM, of_dram(m, 3 * m->cast_bytes_per_s));
}

static void team_work(const struct predicted *r, const struct plan_node *n, struct predict_work *w)
{
    const stk_machine *m = r->m;
    if (m->update_bytes_per_s <= 0) return;
    uint64_t rest = n->kind == PLAN_UPDATE && whole(r, n) ? r->in->input->chunks[n->chunk].bytes[CHUNK_OPT] : 0;
    if (n->kind == PLAN_HAND_OVER) rest = n->bytes; /* read and written */
    w->ns = ns_of((double)(n->bytes + rest), m->update_bytes_per_s * r->team_part);
    use(w, PREDICT_CORES, threads(m, r->in->update_threads));
    use(w, PREDICT_DRAM, of_dram(m, m->update_bytes_per_s * r->team_part));
}

/* Bound by the device's memory, which it shares with visits: these are bound by arithmetic, and slow down
 * less than the update is short. A "device" that is this machine has the update team's rate. */
static void device_update_work(const struct predicted *r, const struct plan_node *n,
                               struct predict_work *w)
{
    const stk_machine *m = r->m;
    double rate = m->on_host ? m->update_bytes_per_s : m->device_bytes_per_s;
    w->ns = (double)m->launch_ns + (rate > 0 ? ns_of((double)n->bytes, rate) : 0);
    if (!m->on_host) return;
    use(w, PREDICT_CORES, threads(m, r->in->compute_threads));
    use(w, PREDICT_DRAM, of_dram(m, rate));
}

static void checksum_work(const struct predicted *r, const struct plan_node *n,
                          struct predict_work *w)
{
    const stk_machine *m = r->m;
    if (m->checksum_bytes_per_s <= 0) return;
    w->ns = ns_of((double)n->bytes, m->checksum_bytes_per_s);
    use(w, PREDICT_CORES, m->on_host ? lost_core(m) : one_core(m));
    use(w, PREDICT_DRAM, of_dram(m, m->checksum_bytes_per_s));
}

static uint32_t drive_of(const struct predicted *r, const struct plan_node *n)
{
    uint32_t at = n->act != PLAN_NO ? r->in->input->n_chunks * CHUNK_STATE_N + n->act
                                    : n->chunk * CHUNK_STATE_N + n->state;
    uint32_t k = r->in->drive_of ? r->in->drive_of[at] : 0;
    return k < r->m->n_drives ? k : 0;
}

static uint64_t transfer_bytes(const struct plan_node *n)
{
    return (n->bytes + STORE_ALIGN - 1) / STORE_ALIGN * STORE_ALIGN;
}

static void drive_work(const struct predicted *r, const struct plan_node *n, bool read,
                       struct predict_work *w)
{
    uint32_t k = drive_of(r, n);
    const stk_machine_drive *d = &r->m->drives[k];
    double rate = read ? d->read_bytes_per_s : d->write_bytes_per_s;
    w->bytes = transfer_bytes(n);
    w->ns = ns_of((double)w->bytes, rate);
    use(w, PREDICT_DRIVE0 + k,
        1 / both(d->read_bytes_per_s, d->write_bytes_per_s, d->both_bytes_per_s));
    w->weight = d->both_bytes_per_s / (2 * rate);
    use(w, PREDICT_DRAM, of_dram(r->m, rate));
    use(w, PREDICT_CORES, d->cores_busy * (r->m->on_host ? lost_core(r->m) : one_core(r->m)));
}

/* --- starting: issue.c ------------------------------------------------------------------------ */

static uint32_t server_of(const struct plan_node *n)
{
    switch ((enum plan_resource)n->resource) {
    case PLAN_COMPUTE: return PREDICT_COMPUTE;
    case PLAN_COPY_IN_LINK: return PREDICT_COPY_IN;
    case PLAN_COPY_OUT_LINK: return PREDICT_COPY_OUT;
    case PLAN_GATHER_LINK: return PREDICT_GATHER;
    case PLAN_UPDATE_STREAM: return PREDICT_UPDATE_STREAM;
    case PLAN_CAST: return PREDICT_CAST0 + n->chunk % ENG_CASTS;
    default: return PREDICT_TEAM;
    }
}

static void put_store(struct predicted *r, uint32_t node, uint32_t stage)
{
    const struct plan_node *n = &r->p->nodes[node];
    struct predict_work w = { .node = node, .stage = stage };
    if (stage == AT_CHECK_GET || stage == AT_CHECK_PUT) {
        checksum_work(r, n, &w);
        predict_put(r->w, PREDICT_CHECKSUM, 0, &w);
        return;
    }
    bool write = stage == AT_WRITE;
    enum io_class cls = write ? (n->state == CHUNK_OPT || n->spec ? IO_WRITE_BACK : IO_DEMAND)
                              : (n->demand ? IO_DEMAND : IO_PREFETCH);
    drive_work(r, n, !write, &w);
    predict_io_put(r->w, drive_of(r, n), cls, write, &w);
}

/* Its checksum came from the update, which had it in a cache: no time of its own. */
static bool summed(const struct predicted *r, const struct plan_node *n)
{
    return n->act == PLAN_NO && n->state != CHUNK_GRAD && plan_sums(r->in->input);
}

static void begin(struct predicted *r, uint32_t node)
{
    const struct plan_node *n = &r->p->nodes[node];
    struct predict_work w = { .node = node, .stage = AT_SERVER };
    r->begin_ns[node] = r->w->now_ns;
    switch ((enum plan_resource)n->resource) {
    case PLAN_NVME_READ: put_store(r, node, AT_READ); return;
    case PLAN_NVME_WRITE: put_store(r, node, summed(r, n) ? AT_WRITE : AT_CHECK_PUT); return;
    case PLAN_COMPUTE: visit_work(r, n, &w); break;
    case PLAN_COPY_IN_LINK: copy_work(r, n, true, &w); break;
    case PLAN_COPY_OUT_LINK: copy_work(r, n, false, &w); break;
    case PLAN_CAST: cast_work(r, n, &w); break;
    case PLAN_UPDATE_STREAM: device_update_work(r, n, &w); break;
    case PLAN_GATHER_LINK: w.ns = ns_of((double)n->bytes, r->m->gather_bytes_per_s); break;
    default: team_work(r, n, &w); break;
    }
    predict_put(r->w, server_of(n), 0, &w);
}

static bool is_copy(const struct plan_node *n)
{
    return n->resource == PLAN_COPY_IN_LINK || n->resource == PLAN_COPY_OUT_LINK;
}

/* issue_copy and issue_update. */
static bool held(struct predicted *r, const struct plan_node *n)
{
    struct pace_now now = pace_state(r);
    uint32_t all = r->in->update_threads ? r->in->update_threads : r->m->cores ? r->m->cores : 1;
    r->paced = 0;
    r->team_part = 1;
    if (n->kind == PLAN_COMMIT || (n->kind == PLAN_UPDATE && !n->spec)) {
        uint32_t most = pace_team(&r->pace, &now, n, all);
        r->team_part = (double)most / all;
        return most < all && r->pool[PLAN_UPDATE_TEAM].in_flight > 0;
    }
    if (!is_copy(n)) return false;
    now.ready_bytes[n->resource == PLAN_COPY_OUT_LINK] -= n->bytes;
    r->paced = pace_copy(&r->pace, &now, n);
    return r->paced > 0 && r->pool[n->resource].in_flight >= PACE_IN_FLIGHT;
}

static bool room(const struct predicted *r, const struct plan_node *n)
{
    const struct pool *p = &r->pool[n->resource];
    if (n->kind == PLAN_WRITE_BACK && n->rank >= PLAN_RANK_LATER &&
        p->in_flight + RUN_OPS_KEPT > p->limit)
        return false;
    return p->in_flight < p->limit;
}

/* True if something began. */
static bool issue_ready(struct predicted *r)
{
    bool any = false;
    for (uint32_t res = 0; res < PLAN_RESOURCE_N; res++)
        while (r->heap_n[res] > 0) {
            uint32_t node = (uint32_t)r->heap[res][0];
            const struct plan_node *n = &r->p->nodes[node];
            if (res != PLAN_NONE && !passes(r, node) && (!room(r, n) || held(r, n))) break;
            pop(r, res);
            r->state[node] = RUN_ISSUED;
            any = true;
            if (res == PLAN_NONE || passes(r, node)) {
                r->begin_ns[node] = r->w->now_ns;
                complete(r, node);
                continue;
            }
            r->pool[res].in_flight++;
            begin(r, node);
        }
    return any;
}

/* --- the application: step.c ------------------------------------------------------------------ */

static uint32_t cause_of(uint8_t kind)
{
    switch ((enum plan_kind)kind) {
    case PLAN_FETCH:
    case PLAN_ACT_IN:
    case PLAN_ACT_OUT:
    case PLAN_WRITE_BACK: return 0;
    case PLAN_COPY_IN:
    case PLAN_HAND_OVER:
    case PLAN_GRAD_CAST:
    case PLAN_GRAD_OUT:
    case PLAN_SAVE:
    case PLAN_LOAD: return 1;
    case PLAN_UPDATE:
    case PLAN_JOIN:
    case PLAN_COMMIT:
    case PLAN_DEVICE_UPDATE:
    case PLAN_UNDO: return 2;
    case PLAN_GATHER:
    case PLAN_REDUCE: return 3;
    default: return 4;
    }
}

/* The application asks for the next visit as soon as it has queued the one before. */
static bool hand_out(struct predicted *r)
{
    if (r->next_visit >= r->p->n_visits || !(r->in->parts & PLAN_RUN_VISITS)) return false;
    uint32_t node = r->p->visits[r->next_visit].node;
    if (r->state[node] != RUN_READY) return false;
    if (r->visits_in_flight >= ENG_VISITS_IN_FLIGHT) {
        r->cause = PLAN_VISIT;
        return false;
    }
    double waited = r->w->now_ns - r->asked_ns,
           busy = r->w->busy_ns[PREDICT_COMPUTE] - r->busy_at_ask_ns;
    uint8_t cause = plan_visit_waits(r->p, node, r->end_ns, r->asked_ns, r->cause);
    r->exposed_ns[cause_of(cause)] += waited > busy ? waited - busy : 0;
    r->cause = PLAN_VISIT;
    r->asked_ns = r->w->now_ns;
    r->busy_at_ask_ns = r->w->busy_ns[PREDICT_COMPUTE];
    r->state[node] = RUN_ISSUED;
    r->visits_in_flight++;
    r->next_visit++;
    meet_successors(r, node, true);
    begin(r, node);
    return true;
}

static void pump(struct predicted *r)
{
    for (bool moved = true; moved;) {
        moved = issue_ready(r);
        if (hand_out(r)) moved = true;
    }
}

/* --- time passes ------------------------------------------------------------------------------ */

static void finish(struct predicted *r, uint32_t node)
{
    const struct plan_node *n = &r->p->nodes[node];
    if (n->kind == PLAN_VISIT) r->visits_in_flight--;
    else r->pool[n->resource].in_flight--;
    spec_ran(r, n);
    complete(r, node);
}

static void wait(struct predicted *r, double ns, uint32_t node, uint32_t stage)
{
    if (!predict_wait(r->w, ns, node, stage)) r->failed = true;
}

/* One stage of a node is over: the next one, or its end. True: the node is complete. */
static bool passed(struct predicted *r, uint32_t node, uint32_t stage)
{
    const struct plan_node *n = &r->p->nodes[node];
    switch (stage) {
    case AT_READ:
    case AT_WRITE:
        wait(r, (double)r->m->drives[drive_of(r, n)].latency_ns, node, AT_LATENCY);
        return false;
    case AT_CHECK_PUT: put_store(r, node, AT_WRITE); return false;
    case AT_LATENCY:
        predict_io_done(r->w, drive_of(r, n), n->resource == PLAN_NVME_WRITE, transfer_bytes(n));
        if (n->resource == PLAN_NVME_READ) {
            put_store(r, node, AT_CHECK_GET);
            return false;
        }
        break;
    case AT_HOP: finish(r, node); return true;
    default: break;
    }
    if (r->m->hop_ns == 0) {
        finish(r, node);
        return true;
    }
    if (!r->m->on_host) {
        wait(r, (double)r->m->hop_ns, node, AT_HOP);
        return false;
    }
    /* The engine's thread takes a core from operations; of a hop, which is there and back between two
     * threads, the half that is its own. */
    struct predict_work w = { .node = node, .stage = AT_HOP, .ns = (double)r->m->hop_ns / 2 };
    use(&w, PREDICT_CORES, lost_core(r->m));
    predict_put(r->w, PREDICT_ENGINE, 0, &w);
    return false;
}

static void count_deps(struct predicted *r)
{
    const struct plan *p = r->p;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        const struct plan_node *n = &p->nodes[i];
        bool runs = (n->part & r->in->parts) != 0;
        r->state[i] = runs ? RUN_WAITING : RUN_DONE;
        r->nodes_left += runs;
        for (uint32_t d = 0; runs && d < n->n_deps; d++)
            r->deps_left[i] += (p->nodes[p->deps[n->first_dep + d]].part & r->in->parts) != 0;
    }
}

static stk_status run(struct predicted *r, struct stk_error *err)
{
    r->last_node = PLAN_NO;
    r->cause = PLAN_VISIT;
    count_deps(r);
    spec_begin(r); /* first: node_ready asks who passes */
    for (uint32_t i = 0; i < r->p->n_nodes; i++)
        if (r->state[i] == RUN_WAITING && r->deps_left[i] == 0) node_ready(r, i);
    pump(r);
    while (r->nodes_left > 0 && !r->failed) {
        uint32_t node, stage;
        if (!predict_next(r->w, &node, &stage))
            return stk_error_set(err, STK_ERR_STATE, 0,
                                 "the plan stops: %u of its nodes wait for each other",
                                 r->nodes_left);
        if (passed(r, node, stage)) pump(r);
    }
    return r->failed ? stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to predict a step") : STK_OK;
}

/* --- figures ---------------------------------------------------------------------------------- */

static void resource(stk_prediction *o, const char *name, double busy_ns, double alone_ns)
{
    if (!(alone_ns > 0) || o->n_resources == STK_PREDICT_RESOURCES) return;
    uint32_t k = o->n_resources++;
    snprintf(o->resource[k].name, sizeof o->resource[k].name, "%s", name);
    o->resource[k].busy_s = busy_ns / 1e9;
    o->resource[k].alone_s = alone_ns / 1e9;
    if (o->resource[k].alone_s > o->resource[o->busiest].alone_s) o->busiest = k;
}

static double largest(const double *v, uint32_t n)
{
    double most = 0;
    for (uint32_t i = 0; i < n; i++)
        if (v[i] > most) most = v[i];
    return most;
}

static void fill_resources(const struct predicted *r, stk_prediction *o)
{
    const struct predict_world *w = r->w;
    const double *b = w->busy_ns, *a = w->alone_ns;
    resource(o, "compute", b[PREDICT_COMPUTE], a[PREDICT_COMPUTE]);
    resource(o, "copy in", b[PREDICT_COPY_IN], a[PREDICT_COPY_IN]);
    resource(o, "copy out", b[PREDICT_COPY_OUT], a[PREDICT_COPY_OUT]);
    resource(o, "link", w->used_ns[PREDICT_LINK], w->used_ns[PREDICT_LINK]);
    resource(o, "casts", (b[PREDICT_CAST0] + b[PREDICT_CAST1]) / ENG_CASTS,
             (a[PREDICT_CAST0] + a[PREDICT_CAST1]) / ENG_CASTS);
    resource(o, "gather", b[PREDICT_GATHER], a[PREDICT_GATHER]);
    resource(o, "update", b[PREDICT_TEAM], a[PREDICT_TEAM]);
    resource(o, "device update", b[PREDICT_UPDATE_STREAM], a[PREDICT_UPDATE_STREAM]);
    resource(o, "checksums", b[PREDICT_CHECKSUM], a[PREDICT_CHECKSUM]);
    resource(o, "nvme read", largest(&b[PREDICT_READ0], PREDICT_DRIVES),
             largest(&a[PREDICT_READ0], PREDICT_DRIVES));
    resource(o, "nvme write", largest(&b[PREDICT_WRITE0], PREDICT_DRIVES),
             largest(&a[PREDICT_WRITE0], PREDICT_DRIVES));
    double drive = largest(&w->used_ns[PREDICT_DRIVE0], PREDICT_DRIVES);
    resource(o, "nvme", drive, drive);
    resource(o, "cores", w->used_ns[PREDICT_CORES], w->used_ns[PREDICT_CORES]);
    resource(o, "dram", w->used_ns[PREDICT_DRAM], w->used_ns[PREDICT_DRAM]);
}

/* As account() of step.c has it: idle time of the compute stream by what was waited for. */
static void fill(struct predicted *r, stk_prediction *o)
{
    double step = r->w->now_ns, compute = r->w->busy_ns[PREDICT_COMPUTE];
    double last = r->last_visit_done_ns;
    uint8_t tail = plan_wait_kind(r->p, r->last_node, r->end_ns, last, PLAN_GRAD_CAST);
    if (last > 0 && step > last) r->exposed_ns[cause_of(tail)] += step - last;
    double idle = step - compute, waited = 0, sum = 0;
    for (int k = 0; k < 4; k++) waited += r->exposed_ns[k];
    double f = waited > idle && waited > 0 ? idle / waited : 1;
    double out[4];
    for (int k = 0; k < 4; k++) sum += out[k] = r->exposed_ns[k] * f;
    o->step_s = step / 1e9;
    o->compute_s = compute / 1e9;
    o->exposed_s.nvme = out[0] / 1e9;
    o->exposed_s.copy = out[1] / 1e9;
    o->exposed_s.update = out[2] / 1e9;
    o->exposed_s.gather = out[3] / 1e9;
    o->exposed_s.other = (idle > sum ? idle - sum : 0) / 1e9;
    fill_resources(r, o);
}

stk_status predict_check(const struct predict_in *in, struct stk_error *err)
{
    const stk_machine *m = in->machine;
    uint64_t moved[PLAN_RESOURCE_N] = { 0 };
    bool flops = false;
    for (uint32_t i = 0; i < in->plan->n_nodes; i++)
        moved[in->plan->nodes[i].resource] += in->plan->nodes[i].bytes;
    for (uint32_t i = 0; i < in->plan->n_visits; i++)
        flops |= in->plan->visits[i].flops > 0 &&
                 !(in->cost && in->cost[in->plan->visits[i].place].known);
    if (m->n_drives > STK_NVME_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "machine %s: %u drives, and there can be %d at most",
                             m->name, m->n_drives, STK_NVME_MAX);
    for (uint32_t k = 0; k < m->n_drives; k++)
        if (!(m->drives[k].read_bytes_per_s > 0) || !(m->drives[k].write_bytes_per_s > 0))
            return stk_error_set(err, STK_ERR_CONFIG, 0, "machine %s: drive %u has no rates",
                                 m->name, k);
    const struct { bool needed; double value; const char *name;
    } need[] = {
        { flops, m->flops_per_s, "flops_per_s" },
        { moved[PLAN_COPY_IN_LINK] > 0, m->copy_in_bytes_per_s, "copy_in_bytes_per_s" },
        { moved[PLAN_COPY_OUT_LINK] > 0, m->copy_out_bytes_per_s, "copy_out_bytes_per_s" },
        { moved[PLAN_CAST] > 0, m->cast_bytes_per_s, "cast_bytes_per_s" },
        { moved[PLAN_UPDATE_STREAM] > 0 && !m->on_host, m->device_bytes_per_s, "device_bytes_per_s" },
        { moved[PLAN_GATHER_LINK] > 0, m->gather_bytes_per_s, "gather_bytes_per_s" },
        { moved[PLAN_NVME_READ] + moved[PLAN_NVME_WRITE] > 0, m->n_drives, "drives" },
    };
    for (size_t i = 0; i < sizeof need / sizeof need[0]; i++)
        if (need[i].needed && !(need[i].value > 0))
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "machine %s: %s is not given, and the plan needs it", m->name,
                                 need[i].name);
    return STK_OK;
}

static stk_status set_up(struct predicted *r, struct stk_error *err)
{
    uint32_t n = r->p->n_nodes;
    r->deps_left = sys_calloc(n + 1, sizeof *r->deps_left);
    r->state = sys_calloc(n + 1, 1);
    r->begin_ns = sys_calloc(n + 1, sizeof *r->begin_ns);
    r->end_ns = sys_calloc(n + 1, sizeof *r->end_ns);
    pace_of_machine(r->m, &r->pace);
    uint32_t chunks = r->in->input->n_chunks;
    r->spec.node = sys_calloc(chunks + 1, sizeof *r->spec.node);
    r->spec.order = sys_calloc(chunks + 1, sizeof *r->spec.order);
    bool ok = r->deps_left && r->state && r->begin_ns && r->end_ns && r->spec.node && r->spec.order;
    for (uint32_t k = 0; k < PLAN_RESOURCE_N; k++) {
        r->heap[k] = sys_calloc(n + 1, sizeof *r->heap[k]);
        bool copies = k == PLAN_COPY_IN_LINK || k == PLAN_COPY_OUT_LINK;
        r->pool[k].limit = k == PLAN_UPDATE_TEAM     ? UPDATES_IN_FLIGHT
                           : k == PLAN_UPDATE_STREAM ? TWIN_IN_FLIGHT
                           : copies                  ? PACE_COPIES_IN_FLIGHT
                                                     : RUN_OPS_PER_RESOURCE;
        ok = ok && r->heap[k];
    }
    if (!ok) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to predict a step");
    STK_TRY(predict_world_new(&r->w, err));
    for (uint32_t k = 0; k < r->m->n_drives; k++) {
        const stk_machine_drive *d = &r->m->drives[k];
        r->w->drive[k].limit_bytes = r->in->drive_bytes;
        r->w->drive[k].one_server = both(d->read_bytes_per_s, d->write_bytes_per_s,
                                         d->both_bytes_per_s) < ONE_SERVER;
    }
    return STK_OK;
}

stk_status predict_period(const struct predict_in *in, predict_node_fn *each, void *arg, uint8_t *before,
                          uint8_t *now, stk_prediction *out, struct stk_error *err)
{
    struct predicted r = { .in = in,
                           .p = in->plan,
                           .m = in->machine,
                           .each = each,
                           .arg = arg,
                           .spec = { .before = before, .now = now } };
    size_t size = out->size;
    *out = (stk_prediction){ .size = size };
    stk_status st = set_up(&r, err);
    if (st == STK_OK) st = run(&r, err);
    if (st == STK_OK) fill(&r, out);
    predict_world_free(r.w);
    sys_free(r.deps_left);
    sys_free(r.state);
    sys_free(r.begin_ns);
    sys_free(r.end_ns);
    sys_free(r.spec.node);
    sys_free(r.spec.order);
    for (uint32_t k = 0; k < PLAN_RESOURCE_N; k++) sys_free(r.heap[k]);
    return st;
}
