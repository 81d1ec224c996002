/* engine/seal.c - from description to a machine that is ready: layout, placement, plan, proof, then
 * memory, store and streams.
 *
 * Application's thread, once. Order matters: whatever can refuse does so before anything large is
 * reserved and before anything is written (design, promise 1). Must not know how nodes run. */
#include "engine/durable.h"
#include "engine/machine.h"
#include "engine/save.h"
#include "engine/spec.h"
#include "engine/twin.h"
#include "base/sys.h"
#include "nvme/io_sim.h"
#include <errno.h>
#include <string.h>
#include <unistd.h>


/* Quantization to 8 bits suits weights, not rows that few steps touch (offload/adam_narrow.h). */
static enum chunk_moments moments_of(const stk_engine *e, const struct eng_block_desc *b)
{
    if (e->cfg.moments == STK_MOMENTS_BF16) return CHUNK_MOMENTS_BF16;
    bool embedding = e->cfg.moments == STK_MOMENTS_F32;
    for (uint32_t j = 0; j < b->n_tensors; j++)
        embedding |= b->tensors[j].embedding && !b->tensors[j].frozen;
    return embedding ? CHUNK_MOMENTS_F32 : CHUNK_MOMENTS_8BIT;
}

static stk_status build_layout(stk_engine *e)
{
    struct layout_block_in *in = sys_calloc(e->n_blocks ? e->n_blocks : 1, sizeof *in);
    struct layout_tensor_in *t = sys_calloc(e->n_tensors ? e->n_tensors : 1, sizeof *t);
    e->tensor_of = sys_calloc(e->n_tensors ? e->n_tensors : 1, sizeof *e->tensor_of);
    stk_status st = STK_OK;
    if (!in || !t || !e->tensor_of)
        st = stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the layout");
    uint32_t k = 0;
    for (uint32_t i = 0; st == STK_OK && i < e->n_blocks; i++) {
        const struct eng_block_desc *b = &e->blocks[i];
        in[i] = (struct layout_block_in){ .name = b->name,
                                          .n_tensors = b->n_tensors,
                                          .tensors = &t[k] };
        for (uint32_t j = 0; j < b->n_tensors; j++, k++)
            t[k] = (struct layout_tensor_in){ .name = b->tensors[j].name,
                                              .n_elems = b->tensors[j].n_elems,
                                              .frozen = b->tensors[j].frozen,
                                              .decay = !b->tensors[j].no_decay };
    }
    enum chunk_dtype dt = e->cfg.dtype == STK_FP16 ? CHUNK_FP16 : CHUNK_BF16;
    if (st == STK_OK)
        st = layout_build(in, e->n_blocks, dt, e->cfg.chunk_elems, 0, 1, &e->layout, e->tensor_of,
                          &e->err);
    for (uint32_t i = 0; st == STK_OK && i < e->n_blocks; i++)
        e->layout->blocks[i].moments = moments_of(e, &e->blocks[i]);
    sys_free(in);
    sys_free(t);
    return st;
}

static stk_status alloc_tables(stk_engine *e)
{
    e->pblocks = sys_calloc(e->layout->n_blocks, sizeof *e->pblocks);
    e->pchunks = sys_calloc(e->layout->n_chunks ? e->layout->n_chunks : 1, sizeof *e->pchunks);
    e->pplaces = sys_calloc(e->n_places ? e->n_places : 1, sizeof *e->pplaces);
    e->act_extent = sys_calloc((size_t)e->n_places * e->cfg.micro_batches * 2 + 1, sizeof *e->act_extent);
    bool coef = adam_coefs_alloc(&e->coef, e->layout->n_tensors);
    if (!e->pblocks || !e->pchunks || !e->pplaces || !coef || !e->act_extent)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the tables of chunks");
    return STK_OK;
}

/* Own order: a place a block, so that a recorded visit can name it. */
static stk_status default_places(stk_engine *e)
{
    if (e->n_places > 0) return STK_OK;
    if (!e->cfg.own_order)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "no order: call stk_order, or set own_order");
    e->places = sys_calloc(e->n_blocks ? e->n_blocks : 1, sizeof *e->places);
    if (!e->places) return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the order");
    for (uint32_t i = 0; i < e->n_blocks; i++) e->places[i].block = i;
    e->n_places = e->n_blocks;
    return STK_OK;
}

static void limits(stk_engine *e, uint64_t *host, uint64_t *device)
{
    struct mem_limits lim;
    mem_limits_read("", &lim);
    uint64_t now = e->baseline_bytes;
    uint64_t can = lim.available_bytes + now; /* what we hold already is not available any more, but
                                               * ours */
    *device = e->device_limit;
    if (e->cfg.machine) {
        can = e->cfg.machine->host_memory ? e->cfg.machine->host_memory : UINT64_MAX;
        snprintf(lim.why, sizeof lim.why, "machine %s", e->cfg.machine->name);
    }
    *host = e->cfg.host_memory ? e->cfg.host_memory : can;
    if (*host > can) {
        eng_note(e, "--host-memory is above what this machine has free (%s): the smaller counts",
                 lim.why);
        *host = can;
    }
}

static stk_status build_plans(stk_engine *e)
{
    struct plan_input in;
    STK_TRY(place_input(e, &e->place, PLAN_TRAIN, &e->pin));
    if (e->cfg.own_order) {
        e->pin.own = (const struct plan_own_visit *)"";
        e->pin.n_own = 0;
        e->pin.arena_bytes[PLAN_ARENA_ACC] = UINT64_MAX; /* no memory behind it: engine/own.c's
                                                          * accumulators are used */
    }
    if (place_trains(e)) {
        STK_TRY(plan_build(&e->pin, &e->plan_train, NULL, &e->err));
        STK_TRY(plan_check(&e->pin, e->plan_train, &e->err));
    }
    if (e->cfg.own_order) return STK_OK;
    in = e->pin;
    in.mode = PLAN_EVAL;
    STK_TRY(plan_build(&in, &e->plan_eval, NULL, &e->err));
    return plan_check(&in, e->plan_eval, &e->err);
}

/* --- storage ---------------------------------------------------------------------------------- */

#define ACT_CLASS CHUNK_STATE_N /* of extents: activations, after the states of chunks */

static void assign_homes(stk_engine *e, uint32_t *n_extents)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        struct stk_chunk *c = &e->layout->chunks[i];
        for (int s = 0; s < CHUNK_STATE_N; s++) {
            c->home[s] = e->pchunks[i].home[s];
            c->extent[s] =
                c->home[s] == CHUNK_NVME && e->pchunks[i].bytes[s] ? n++ : CHUNK_NO_EXTENT;
        }
    }
    *n_extents = n + acts_extents(e, n);
}

static void on_io(void *engine)
{
    stk_engine *e = engine;
    io_reap(e->io, UINT32_MAX);
    run_pump(e);
}

static stk_status check_disk(stk_engine *e)
{
    STK_TRY(drives_check_folders(e));
    STK_TRY(drives_find(e));
    return drives_check_room(e);
}

static stk_status open_storage(stk_engine *e, uint32_t n_extents)
{
    if (n_extents == 0) return STK_OK;
    static const enum io_kind kinds[] = { IO_AUTO, IO_URING, IO_POSIX, IO_SIM };
    const struct io_sim_cfg *sim = e->cfg.sim_disk;
    /* only where there are any: a store of a build that knew no such class can then be taken over */
    uint32_t acts = acts_nvme_bytes(e) ? 1u << ACT_CLASS : 0;
    exec_task_init(&e->io_task, on_io, e);
    struct io_cfg ic = { .kind = kinds[e->cfg.storage],
                         .ex = e->ex,
                         .lane = e->lane,
                         .notify = &e->io_task,
                         .depth_bytes = drives_depth_bytes(e),
                         .sim = sim };
    STK_TRY(io_open(&ic, &e->io, &e->err));
    struct store_cfg sc = { .io = e->io,
                            .ex = e->ex,
                            .lane = e->lane,
                            .n_extents = n_extents,
                            .room = place_store_room(e, &e->place),
                            .volatile_classes = 1u << CHUNK_GRAD | acts,
                            .payload_max_bytes = e->durable.payload_max,
                            .adopt = e->cfg.adopt,
                            .sim_disk =
                                e->cfg.storage == STK_STORAGE_SIM && sim ? sim->disk : NULL };
    sc.n_paths = durable_paths(e, sc.paths);
    snprintf(sc.run_id, sizeof sc.run_id, "%s", e->cfg.run_id);
    drives_configure(e, &sc);
    uint64_t *bytes = sys_calloc(n_extents, sizeof *bytes + 1);
    if (!bytes)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the table of %u extents",
                             n_extents);
    uint8_t *class = (uint8_t *)(bytes + n_extents);
    for (uint32_t i = 0; i < e->layout->n_chunks; i++)
        for (int s = 0; s < CHUNK_STATE_N; s++)
            if (e->layout->chunks[i].extent[s] != CHUNK_NO_EXTENT) {
                bytes[e->layout->chunks[i].extent[s]] = e->pchunks[i].bytes[s];
                class[e->layout->chunks[i].extent[s]] = (uint8_t)s;
            }
    for (uint32_t a = 0; a < plan_act_count(&e->pin); a++)
        if (e->act_extent[a] != CHUNK_NO_EXTENT) {
            bytes[e->act_extent[a]] = plan_act_bytes(&e->pin, a);
            class[e->act_extent[a]] = ACT_CLASS;
        }
    sc.extent_bytes = bytes;
    sc.extent_class = class;
    stk_status st = store_open(&sc, &e->store, &e->err);
    sys_free(bytes);
    if (st != STK_OK) return st;
    const char *const *notes;
    uint32_t n = store_notes(e->store, &notes);
    for (uint32_t i = 0; i < n; i++) eng_note(e, "%s", notes[i]);
    return durable_adopted(e);
}

/* --- memory ----------------------------------------------------------------------------------- */

/* What lives on the device: arenas, workspace, the client's reservations, in one reservation. */
static stk_status reserve_device(stk_engine *e)
{
    uint64_t total = e->workspace_bytes + twin_total(e);
    for (int a = 0; a < PLAN_ARENA_N; a++)
        total += plan_arena_on_device(a) ? round_page(e->place.arena_bytes[a]) : 0;
    for (uint32_t i = 0; i < e->n_reserves; i++)
        total += e->reserves[i].where == STK_ON_DEVICE ? round_page(e->reserves[i].size_bytes) : 0;
    total += round_page(own_bytes(e, true)) + round_page(own_bytes(e, false));
    if (total == 0) return STK_OK;
    void *base;
    STK_TRY(dev_reserve(e->dev, total, &base, &e->err));
    uint8_t *at = base;
    for (int a = 0; a < PLAN_ARENA_N; a++)
        if (plan_arena_on_device(a) && e->place.arena_bytes[a]) {
            e->arena[a] = at;
            at += round_page(e->place.arena_bytes[a]);
        }
    e->workspace = at;
    at += e->workspace_bytes;
    for (uint32_t i = 0; i < e->n_reserves; i++)
        if (e->reserves[i].where == STK_ON_DEVICE) {
            e->reserves[i].base = at;
            at += round_page(e->reserves[i].size_bytes);
        }
    e->own_base = at;
    return twin_lay(e, at + round_page(own_bytes(e, true)) + round_page(own_bytes(e, false)));
}

stk_status seal_pin(stk_engine *e, void *p, uint64_t size_bytes)
{
    struct stk_error err = { 0 };
    stk_status st = dev_host_register(e->dev, p, size_bytes, &err);
    if (st != STK_ERR_NOMEM) return st == STK_OK ? st : stk_error_forward(&e->err, &err);
    if (e->unpinned_bytes == 0) eng_note(e, "%s", err.text);
    e->unpinned_bytes += size_bytes;
    return STK_OK;
}

static void note_unpinned(stk_engine *e)
{
    char a[32];
    if (e->unpinned_bytes)
        eng_note(e, "pinned memory: %s are not pinned: their copies are slower and wait for each other",
                 mem_size_format(e->unpinned_bytes, a));
}

static stk_status reserve_host(stk_engine *e)
{
    for (int a = 0; a < PLAN_ARENA_N; a++) {
        if (plan_arena_on_device(a) || e->place.arena_bytes[a] == 0) continue;
        void *p;
        STK_TRY(near_reserve(e, plan_arena_name(a), round_page(e->place.arena_bytes[a]), NULL, &p));
        e->arena[a] = p;
        STK_TRY(seal_pin(e, p, round_page(e->place.arena_bytes[a])));
    }
    for (uint32_t i = 0; i < e->n_reserves; i++) {
        struct eng_reserve *r = &e->reserves[i];
        if (r->where != STK_ON_HOST) continue;
        STK_TRY(near_reserve(e, r->owner, round_page(r->size_bytes), NULL, &r->base));
        STK_TRY(seal_pin(e, r->base, round_page(r->size_bytes)));
    }
    return STK_OK;
}

/* Gives chunks of one team their homes from `at` on; returns their bytes. at NULL: only counts. */
static uint64_t lay_team(stk_engine *e, enum chunk_state s, uint32_t team, uint8_t *at)
{
    const struct stk_layout *l = e->layout;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < l->n_chunks; i++) {
        struct stk_chunk *c = &l->chunks[i];
        uint64_t n = c->home[s] == CHUNK_HOST ? chunk_bytes(l, c, s) : 0;
        if (n == 0 || (e->team_of && e->team_of[i] != team)) continue;
        if (at) c->host[s] = at + sum;
        sum += n;
    }
    return sum;
}

/* Parameters of a block are contiguous: a visit may read them in place, and all of a block's are at one
 * home. */
static uint64_t lay_params(stk_engine *e, uint8_t *at)
{
    const struct stk_layout *l = e->layout;
    uint64_t sum = 0;
    for (uint32_t k = 0; k < l->n_blocks; k++) {
        const struct stk_block *b = &l->blocks[k];
        uint64_t bytes = 0;
        for (uint32_t i = b->first_chunk; i < b->first_chunk + b->n_chunks; i++) {
            struct stk_chunk *c = &l->chunks[i];
            uint64_t n = c->home[CHUNK_PARAM] == CHUNK_HOST ? chunk_bytes(l, c, CHUNK_PARAM) : 0;
            if (n == 0) continue;
            bytes = round_page(b->elems * 2);
            if (at) c->host[CHUNK_PARAM] = at + sum + c->first_elem * 2;
        }
        sum += bytes;
    }
    return sum;
}

/* Host homes: optimizer state and gradients packed chunk by chunk, those of one team of the update together. */
static stk_status reserve_homes(stk_engine *e)
{
    static const char *const owner[CHUNK_STATE_N] = { "parameters (16-bit)", "optimizer state",
                                                      "gradients (16-bit)" };
    for (int s = 0; s < CHUNK_STATE_N; s++) {
        struct near_parts parts = { .e = e };
        uint64_t total = 0;
        for (uint32_t k = 0; s != CHUNK_PARAM && k < e->cores.n_teams; k++)
            total += parts.bytes[k] = lay_team(e, (enum chunk_state)s, k, NULL);
        if (s == CHUNK_PARAM) total = lay_params(e, NULL);
        if (total == 0) continue;
        void *p;
        STK_TRY(near_reserve(e, owner[s], round_page(total), s == CHUNK_PARAM ? NULL : &parts, &p));
        STK_TRY(seal_pin(e, p, round_page(total)));
        uint8_t *at = p;
        if (s == CHUNK_PARAM) lay_params(e, at);
        else
            for (uint32_t k = 0; k < e->cores.n_teams; k++) at += lay_team(e, (enum chunk_state)s, k, at);
    }
    return STK_OK;
}

/* `split`: a second place for the parameters of each block that is split. */
static stk_status reserve_second(stk_engine *e)
{
    uint64_t total = place_second_bytes(e, &e->place);
    if (total == 0) return STK_OK;
    void *p;
    STK_TRY(near_reserve(e, "second parameters (split)", total, NULL, &p));
    STK_TRY(seal_pin(e, p, total));
    e->second = sys_calloc(e->layout->n_chunks, sizeof *e->second);
    if (!e->second) return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for tables of chunks");
    uint8_t *at = p;
    for (uint32_t b = 0; b < e->layout->n_blocks; b++) {
        const struct stk_block *x = &e->layout->blocks[b];
        uint64_t bytes = place_second_of(e, &e->place, b);
        for (uint32_t i = x->first_chunk; bytes && i < x->first_chunk + x->n_chunks; i++)
            e->second[i] = at + e->layout->chunks[i].first_elem * 2;
        at += bytes;
    }
    return STK_OK;
}

/* Transfers go through these; registered with the ring where it helps. */
static void register_buffers(stk_engine *e)
{
    if (!e->io) return;
    static const uint8_t io_arenas[] = { PLAN_ARENA_UPDATE, PLAN_ARENA_BOUNCE, PLAN_ARENA_GRAD };
    for (size_t i = 0; i < sizeof io_arenas; i++)
        if (e->arena[io_arenas[i]])
            io_buffer_register(e->io, e->arena[io_arenas[i]],
                               round_page(e->place.arena_bytes[io_arenas[i]]));
    enum plan_arena acts = e->caps.host_in_place ? PLAN_ARENA_ACT : PLAN_ARENA_SAVE;
    if (acts_on_nvme(&e->place) && e->arena[acts])
        io_buffer_register(e->io, e->arena[acts], round_page(e->place.arena_bytes[acts]));
    if (e->caps.host_in_place && e->place.param == CHUNK_NVME && e->arena[PLAN_ARENA_PARAM])
        io_buffer_register(e->io, e->arena[PLAN_ARENA_PARAM],
                           round_page(e->place.arena_bytes[PLAN_ARENA_PARAM]));
}

static void make_numerics(stk_engine *e)
{
    char moments[64] = ""; /* exact ones are not named: keys of older checkpoints stay */
    if (e->cfg.moments == STK_MOMENTS_BF16)
        snprintf(moments, sizeof moments, "moments=bf16;rounding=%llu;",
                 (unsigned long long)e->cfg.moments_seed);
    else if (e->cfg.moments == STK_MOMENTS_8BIT)
        snprintf(moments, sizeof moments, "moments=8bit;");
    snprintf(e->numerics, sizeof e->numerics, "%s;dtype=%s;chunk=%u;%s%s", e->caps.numerics,
             e->cfg.dtype == STK_FP16 ? "fp16" : "bf16", e->cfg.chunk_elems, moments,
             e->client_numerics);
}

static stk_status seal_plan(stk_engine *e)
{
    if (e->baseline_bytes == 0) e->baseline_bytes = mem_resident_bytes();
    dev_caps_read(e->dev, &e->caps); /* with what prepare mode has found */
    e->device_limit = e->caps.memory_bytes;
    STK_TRY(default_places(e));
    STK_TRY(build_layout(e));
    STK_TRY(alloc_tables(e));
    STK_TRY(cache_order(e));
    STK_TRY(durable_look(e));
    uint64_t host, device;
    limits(e, &host, &device);
    STK_TRY(mode_place(e, host, device, &e->place));
    STK_TRY(mode_check(e, &e->place));
    STK_TRY(build_plans(e));
    STK_TRY(check_disk(e));
    make_numerics(e);
    return place_table(e, &e->place, e->mem, &e->err);
}

static stk_status seal_machine(stk_engine *e)
{
    uint32_t n_extents;
    assign_homes(e, &n_extents);
    if (n_extents) STK_TRY(drives_measure(e)); /* before memory is reserved: it has buffers */
    STK_TRY(near_teams(e));
    STK_TRY(mem_open(&e->held, &e->err));
    STK_TRY(reserve_device(e));
    STK_TRY(reserve_host(e));
    STK_TRY(reserve_homes(e));
    STK_TRY(reserve_second(e));
    note_unpinned(e);
    STK_TRY(spec_alloc(e));
    STK_TRY(twin_alloc(e));
    STK_TRY(durable_alloc(e));
    STK_TRY(open_storage(e, n_extents));
    register_buffers(e);
    if (e->store) eng_note(e, "storage: %s; %s", io_describe(e->io), store_describe(e->store));
    drives_note(e);
    near_note(e);
    uint32_t n = e->plan_train ? e->plan_train->n_nodes : 0;
    if (e->plan_eval && e->plan_eval->n_nodes > n) n = e->plan_eval->n_nodes;
    machine_pace(e, &e->pace);
    STK_TRY(run_alloc(e, n));
    STK_TRY(trace_alloc(e, n));
    STK_TRY(state_alloc(e));
    STK_TRY(save_alloc(e));
    STK_TRY(own_alloc(e));
    for (uint32_t i = 0; i < e->layout->n_tensors; i++)
        e->layout->tensors[i].touched = !e->cfg.own_order;
    way_choose(e);
    mem_seal(e->held);
    return STK_OK;
}

stk_status stk_seal(stk_engine *e, bool dry)
{
    stk_error_clear(&e->err);
    if (eng_state(e) != ENG_DESCRIBE) return eng_refuse_state(e, "stk_seal", "once, after stk_open");
    if (e->cfg.machine && !dry)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "stk_seal: a plan for machine %s cannot run here: a dry seal only",
                             e->cfg.machine->name);
    stk_status st = seal_plan(e);
    if (st == STK_OK && dry && e->predicting && e->place.nvme_bytes) st = drives_measure(e);
    if (st == STK_OK && !dry) st = seal_machine(e);
    else if (st == STK_OK) drives_note(e);
    e->state = st != STK_OK ? ENG_FAILED : dry ? ENG_DRY : ENG_READY;
    return st;
}
