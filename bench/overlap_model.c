/* bench/overlap_model.c - one case of overlap_model.h: describes the model to an engine, runs steps whose
 * visits only take time, reads what moved.
 *
 * Owns the engine and the disk for the time of a case. Must not know plans or modes. Application's
 * thread. A visit's time is a memset of as many bytes as the modelled device writes in that time; a
 * gradient that is to bind gets one copy of a few large numbers in every block. */
#include "bench/overlap_model.h"
#include "engine/machine.h"
#include "nvme/io_sim.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS 32u
#define LAYER_ELEMS (26u * 2048u)   /* 218.1M */
#define EDGE_ELEMS 128256u          /* 525.3M */
#define PAD_BYTES (1u << 20)
#define LOUD 64u
#define FLOPS_4090 158.6e12
#define LAYER_NS 3180.0             /* forward, a token and layer, at FLOPS_4090 */
#define HEAD_NS 19900.0             /* forward and backward, a token */

struct bench {
    const struct overlap_case *c;
    stk_engine *e;
    struct dev_model model;
    struct io_sim_cfg disk;
    uint32_t layers, edge_elems, pad, loud, micros, step;
    uint64_t t0_used[EXEC_SHARES];
};

const char *overlap_resource_name(enum overlap_resource r)
{
    static const char *const names[OVERLAP_RESOURCES] = { "compute", "copy in", "copy out", "link",
                                                          "update", "dram", "drive" };
    return (unsigned)r < OVERLAP_RESOURCES ? names[r] : "?";
}

static void scale_machine(struct bench *b)
{
    const stk_machine *m = b->c->machine;
    const double s = OVERLAP_SCALE;
    b->model = (struct dev_model){ .flops_per_s = m->flops_per_s,
                                   .copy_in_bytes_per_s = m->copy_in_bytes_per_s / s,
                                   .copy_out_bytes_per_s = m->copy_out_bytes_per_s / s,
                                   .memory_bytes_per_s = m->device_bytes_per_s / s,
                                   .launch_ns = m->launch_ns,
                                   .update_bytes_per_s = m->update_bytes_per_s / s,
                                   .dram_bytes_per_s = m->dram_bytes_per_s / s,
                                   .copy_both_bytes_per_s = m->copy_both_bytes_per_s / s };
    const stk_machine_drive *d = &m->drives[0];
    b->disk.latency_ns = d->latency_ns;
    b->disk.read_bytes_per_s = d->read_bytes_per_s / s;
    b->disk.write_bytes_per_s = d->write_bytes_per_s / s;
    b->disk.both_bytes_per_s = d->both_bytes_per_s / s;
    b->disk.dram_bytes_per_s = m->dram_bytes_per_s / s;
}

/* --- the engine ------------------------------------------------------------------------------- */

static void configure(struct bench *b, stk_config *k)
{
    const struct overlap_case *c = b->c;
    stk_config_init(k, sizeof *k);
    k->device = STK_DEVICE_SIM;
    k->simulate = true;
    k->seed = c->seed;
    k->sim_model = &b->model;
    k->device_memory = c->machine->device_memory / OVERLAP_SCALE + 2 * PAD_BYTES;
    k->storage = STK_STORAGE_SIM;
    k->sim_disk = &b->disk;
    k->nvme[0] = "disk";
    k->params = k->grads = STK_TIER_HOST;
    k->optimizer_state = c->nvme ? STK_TIER_NVME : STK_TIER_HOST;
    k->activations = c->activations;
    k->activations_last[STK_ACT_KEEP] = c->keep_last;
    k->activations_last[STK_ACT_RECOMPUTE] = c->recompute_last;
    k->update = c->update;
    k->split_blocks = c->split_blocks;
    k->micro_batches = b->micros;
    k->chunk_elems = 2048;
    k->compute_threads = 1;
    k->update_threads = 8;
    k->matmul = STK_MATMUL_F32;
    k->client_numerics = "overlap";
    k->nvme_buffer = c->buffer_bytes / OVERLAP_SCALE;
    k->stall_ns = 3600ull * 1000000000u;
    k->trace_bytes = c->trace ? 64u << 20 : 0;
}

static stk_status describe(struct bench *b)
{
    uint32_t first, block[LAYERS + 2], n = b->layers;
    char name[16];
    for (uint32_t i = 0; i < n + 2; i++) {
        stk_tensor_desc t = { .name = name,
                              .n_elems = i == 0 || i == n + 1 ? b->edge_elems : LAYER_ELEMS };
        snprintf(name, sizeof name, "b%u", i);
        STK_TRY(stk_block(b->e, name, &t, 1, &block[i], &first));
    }
    uint64_t tokens = b->c->micro_tokens;
    double flops = FLOPS_4090 / 1e9 * (double)tokens;
    stk_place p[LAYERS + 2] = { { .block = block[0], .flops = 1 } };
    for (uint32_t i = 1; i < n + 2; i++)
        p[i] = (stk_place){ .block = block[i],
                            .in_bytes = tokens * 8192 / OVERLAP_SCALE,
                            .full_bytes = tokens * 102400 / OVERLAP_SCALE,
                            .flow_bytes = tokens * 16384 / OVERLAP_SCALE,
                            .flops = LAYER_NS * flops };
    p[n + 1].fused = true;
    p[n + 1].full_bytes = 64;
    p[n + 1].flops = HEAD_NS / 3 * flops;
    STK_TRY(stk_order(b->e, p, n + 2));
    STK_TRY(stk_workspace(b->e, 4096));
    STK_TRY(stk_reserve(b->e, STK_ON_HOST, "loud gradient", LOUD * 4, &b->loud));
    return stk_reserve(b->e, STK_ON_DEVICE, "time", PAD_BYTES, &b->pad);
}

static stk_status fill(struct bench *b)
{
    static float ones[EDGE_ELEMS];
    for (uint32_t i = 0; i < EDGE_ELEMS; i++) ones[i] = 1;
    for (uint32_t i = 0; i < b->layers + 2; i++)
        STK_TRY(stk_tensor_write(b->e, i, 0,
                                 i == 0 || i == b->layers + 1 ? b->edge_elems : LAYER_ELEMS, ones,
                                 STK_F32));
    float *loud = stk_reserved(b->e, b->loud);
    for (uint32_t i = 0; i < LOUD; i++) loud[i] = 1;
    return STK_OK;
}

/* What `stoker plan` counts, too: FLOPs over the rate. */
static double visit_ns(const struct bench *b, uint32_t place, stk_dir dir, bool recompute)
{
    double slower = FLOPS_4090 / b->c->machine->flops_per_s, tokens = (double)b->c->micro_tokens;
    if (place == 0) return 1000;
    if (place == b->layers + 1) return HEAD_NS * tokens * slower;
    return LAYER_NS * tokens * slower * (dir == STK_FORWARD ? 1 : 2 + recompute);
}

static stk_status tell_costs(struct bench *b)
{
    for (uint32_t p = 0; p < b->layers + 2; p++) {
        stk_visit_cost c = { .forward_ns = visit_ns(b, p, STK_FORWARD, false),
                             .backward_ns = visit_ns(b, p, STK_BACKWARD, false) };
        c.recompute_ns = visit_ns(b, p, STK_BACKWARD, true) - c.backward_ns;
        STK_TRY(stk_place_cost(b->e, p, &c));
    }
    return STK_OK;
}

/* --- steps ------------------------------------------------------------------------------------ */

static bool loud(const struct bench *b)
{
    return b->c->clip == OVERLAP_BINDS || (b->c->clip == OVERLAP_SOMETIMES && b->step % 3 == 2);
}

static stk_status spend(struct bench *b, stk_visit *v, struct stk_error *err)
{
    double ns = visit_ns(b, v->place, v->dir, v->recompute);
    if (v->grad && v->last_of_block && loud(b))
        STK_TRY(dev_copy(v->stream, v->grad, stk_reserved(b->e, b->loud), LOUD * 4, DEV_TO_DEVICE, err));
    while (ns > 0) {
        double bytes = (ns - (double)b->model.launch_ns) * b->model.memory_bytes_per_s / 1e9;
        uint64_t n = bytes < 64 ? 64 : bytes > PAD_BYTES ? PAD_BYTES : (uint64_t)bytes / 64 * 64;
        STK_TRY(dev_zero(v->stream, stk_reserved(b->e, b->pad), n, err));
        ns -= (double)n / b->model.memory_bytes_per_s * 1e9 + (double)b->model.launch_ns + 300;
    }
    return STK_OK;
}

static stk_status one_step(struct bench *b, stk_step_stats *s)
{
    struct stk_error err = { 0 };
    const stk_step how = { .lr = 1e-4 };
    stk_visit v;
    stk_status st;
    STK_TRY(stk_step_begin(b->e, &how));
    while ((st = stk_next(b->e, &v)) == STK_OK) {
        STK_TRY(spend(b, &v, &err));
        STK_TRY(stk_done(b->e, &v));
    }
    if (st != STK_END) return st;
    b->step++;
    return stk_step_end(b->e, s);
}

static void add_step(struct bench *b, const stk_step_stats *s, struct overlap_result *r)
{
    const struct dev_model *m = &b->model;
    double used[EXEC_SHARES], chunks = b->e->n_use_chunks;
    for (int k = 0; k < EXEC_SHARES; k++) {
        uint64_t now = exec_share_used_ns(b->e->ex, (enum exec_share)k);
        used[k] = (double)(now - b->t0_used[k]) / 1e9;
        b->t0_used[k] = now;
    }
    if (!r) return;
    double in = (double)s->copy_in_bytes, out = (double)s->copy_out_bytes,
           drive = (double)(s->nvme_read_bytes + s->nvme_write_bytes);
    double update = used[EXEC_SHARE_DRAM] * m->dram_bytes_per_s - in - out - drive;
    r->step_s += (double)s->step_ns / 1e9;
    r->own_s[OVERLAP_COMPUTE] += (double)s->compute_ns / 1e9;
    r->own_s[OVERLAP_COPY_IN] += in / m->copy_in_bytes_per_s;
    r->own_s[OVERLAP_COPY_OUT] += out / m->copy_out_bytes_per_s;
    r->own_s[OVERLAP_LINK] += used[EXEC_SHARE_LINK];
    r->own_s[OVERLAP_UPDATE] += update / m->update_bytes_per_s;
    r->own_s[OVERLAP_DRAM] += used[EXEC_SHARE_DRAM];
    r->own_s[OVERLAP_DRIVE] += used[EXEC_SHARE_DRIVE];
    r->wait_s.nvme += (double)s->exposed.nvme_ns / 1e9;
    r->wait_s.copy += (double)s->exposed.copy_ns / 1e9;
    r->wait_s.update += (double)s->exposed.update_ns / 1e9;
    r->wait_s.other += (double)(s->exposed.gather_ns + s->exposed.queue_ns) / 1e9;
    r->spec_share += (double)s->spec_chunks / chunks;
    r->undone_share += (double)s->spec_undone / chunks;
}

static void mean(struct overlap_result *r, double n)
{
    double *const all[] = { &r->step_s, &r->wait_s.nvme, &r->wait_s.copy, &r->wait_s.update,
                            &r->wait_s.other, &r->spec_share, &r->undone_share };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) *all[i] /= n;
    for (int k = 0; k < OVERLAP_RESOURCES; k++) {
        r->own_s[k] /= n;
        if (r->own_s[k] > r->own_s[r->busiest]) r->busiest = (enum overlap_resource)k;
    }
}

static void find_note(struct bench *b, struct overlap_result *r)
{
    const char *line;
    for (uint32_t i = 0; stk_note(b->e, i, &line); i++)
        if (!strncmp(line, "update: auto", 12)) snprintf(r->note, sizeof r->note, "%s", line);
    if (b->c->activations == STK_ACT_AUTO) acts_text(b->e, &b->e->place, r->acts, sizeof r->acts);
}

static stk_status run(struct bench *b, struct overlap_result *r)
{
    stk_step_stats s = { 0 };
    stk_prediction p = { .size = sizeof p };
    uint32_t n = b->c->steps ? b->c->steps : 10, last = n < 6 ? n : 6;
    STK_TRY(describe(b));
    STK_TRY(tell_costs(b));
    STK_TRY(stk_seal(b->e, b->c->predict_only));
    find_note(b, r);
    STK_TRY(stk_predict(b->e, NULL, &p));
    r->host_bytes = (p.host_bytes - b->e->baseline_bytes) * OVERLAP_SCALE;
    if (b->c->clip == OVERLAP_BINDS)
        STK_TRY(predict_plan(b->e, NULL, b->e->plan_train, &b->e->pin, true, &p));
    r->predicted_s = p.step_s;
    if (b->c->predict_only) return STK_OK;
    STK_TRY(fill(b));
    for (uint32_t i = 0; i < n; i++) {
        STK_TRY(one_step(b, &s));
        add_step(b, &s, i + last < n ? NULL : r);
    }
    mean(r, last);
    if (b->c->trace) STK_TRY(stk_trace_write(b->e, b->c->trace));
    return STK_OK;
}

/* --- what a schedule is judged by ------------------------------------------------------------- */

static void raise_floor(struct overlap_result *r, double seconds, const char *text)
{
    if (seconds <= r->floor_s) return;
    r->floor_s = seconds;
    r->floor_text = text;
}

/* Bytes a parameter of the update: 26; of the new parameter alone 16, and 26 for the state afterwards.
 *
 * NORM BARRIER (chase, split, speculate where it binds): no parameter is made before the norm, and the
 * backward pass needs the last one: update + backward. With `split` a part x of the parameters takes
 * 16 bytes before and 26 after: (26 - 10 x) P / rate + backward, while the team has (26 + 16 x) P / rate
 * to do in all. State on NVMe crosses the barrier only as far as host memory holds it: read ahead in
 * backward, written behind after it.
 * WITHOUT (speculate, the norm does not bind): the first visit still waits for the parameters of the
 * first block, whose gradient is the last. */
static bool split_first(const struct bench *b)
{
    const struct eng_placement *pl = &b->e->place;
    bool tried = pl->update == PLAN_SPECULATE && b->c->clip == OVERLAP_QUIET;
    return (tried ? pl->tried_blocks : pl->split_blocks) > 0;
}

static void find_floor(const struct bench *b, struct overlap_result *r)
{
    const stk_update u = b->e->place.update == PLAN_SPECULATE ? STK_UPDATE_SPECULATE : b->c->update;
    double rate = b->model.update_bytes_per_s, edge = b->edge_elems, all = 2 * edge + (double)b->layers * LAYER_ELEMS;
    double backward = r->own_s[OVERLAP_COMPUTE] - b->layers * b->micros * visit_ns(b, 1, STK_FORWARD, false) / 1e9;
    double staged = (double)b->e->place.arena_bytes[PLAN_ARENA_UPDATE];
    bool parts = split_first(b), barrier = u != STK_UPDATE_SPECULATE || b->c->clip == OVERLAP_BINDS;
    raise_floor(r, r->own_s[r->busiest], overlap_resource_name(r->busiest));
    raise_floor(r, r->own_s[OVERLAP_COMPUTE] + (parts ? 16 : 26) * edge / rate, "compute + first block");
    if (!barrier) return;
    double x = parts ? backward * rate / (26 * all) : 0;
    raise_floor(r, (26 - 10 * (x < 1 ? x : 1)) * all / rate + backward, "update + backward");
    if (!b->c->nvme) return;
    double hidden = 2 * staged / (b->disk.both_bytes_per_s > 0 ? b->disk.both_bytes_per_s : INFINITY);
    raise_floor(r, r->own_s[OVERLAP_DRIVE] + (backward > hidden ? backward - hidden : 0),
                "drive + backward that memory does not fill");
}

bool overlap_run(const struct overlap_case *c, struct overlap_result *out, char *why, size_t why_size)
{
    struct bench b = { .c = c, .layers = c->layers ? c->layers : LAYERS };
    struct stk_error err = { 0 };
    stk_config k;
    memset(out, 0, sizeof *out);
    b.edge_elems = EDGE_ELEMS / 64 * b.layers / LAYERS * 64;
    b.micros = c->tokens / c->micro_tokens;
    scale_machine(&b);
    stk_status st = io_sim_disk_new(1u << 30, &b.disk.disk, &err);
    configure(&b, &k);
    if (st == STK_OK) st = stk_open(&k, &b.e);
    if (st == STK_OK) st = run(&b, out);
    if (st == STK_OK && !c->predict_only) find_floor(&b, out);
    if (st != STK_OK) snprintf(why, why_size, "%s: %s", stk_status_name(st), b.e ? stk_error_text(b.e) : err.text);
    stk_close(b.e);
    io_sim_disk_free(b.disk.disk);
    return st == STK_OK;
}
