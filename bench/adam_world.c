/* bench/adam_world.c - memory and passes of `stoker bench adam`.
 *
 * Owns: the mapping, a team and layouts as the engine has them. Must not know how results are
 * judged or shown. Application's thread; OpenMP threads or the team's members inside. */
#include "bench/adam_world.h"
#include "base/exec.h"
#include "base/rng.h"
#include "base/sys.h"
#include "bench/bench_impl.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { CHUNK_ELEMS = 524288 }; /* the default of `train --chunk` */

struct adam_world {
    uint64_t n, memory_bytes;
    uint32_t threads;
    uint8_t *memory;
    struct adam_coef coef;
    struct adam_coefs coefs; /* of every tensor of the layout with most */
    struct exec *ex;
    struct exec_lane *lane;
    struct exec_team *team;
    struct exec_event done;
    struct exec_task done_task;
    struct chunk_job *jobs;
    struct stk_layout *layout[2]; /* one tensor; many small ones */
    enum chunk_moments moments;
    /* of the pass that runs */
    const struct stk_layout *now;
    enum adam_layout now_layout;
    const struct adam_kernel *kernel;
    struct adam_way way;
};

struct chunk_job {
    struct adam_world *w;
    uint32_t chunk;
    struct exec_team_job job;
};

const char *adam_path_name(enum adam_path p)
{
    static const char *const names[ADAM_PATH_N] = { "arrays", "chunks", "small", "cache" };
    return names[p];
}

uint64_t adam_world_params(const struct adam_world *w) { return w->n; }
uint64_t adam_world_small_tensors(const struct adam_world *w) { return w->layout[1]->n_tensors; }

/* --- opening ---------------------------------------------------------------------------------- */

static stk_status make_layout(struct adam_world *w, uint32_t tensors, uint64_t each,
                              struct stk_layout **out, struct stk_error *err)
{
    struct layout_tensor_in *t = sys_calloc(tensors, sizeof *t);
    char(*names)[12] = sys_calloc(tensors, sizeof *names);
    stk_status st = STK_OK;
    if (!t || !names)
        st = stk_error_set(err, STK_ERR_NOMEM, errno, "bench adam: no memory for %u tensors",
                           tensors);
    for (uint32_t i = 0; i < tensors && st == STK_OK; i++) {
        snprintf(names[i], sizeof names[i], "t%u", i);
        t[i] = (struct layout_tensor_in){ .name = names[i], .n_elems = each, .decay = true };
    }
    struct layout_block_in block = { .name = "block", .n_tensors = tensors, .tensors = t };
    if (st == STK_OK) st = layout_build(&block, 1, CHUNK_BF16, CHUNK_ELEMS, 0, 1, out, NULL, err);
    for (uint32_t i = 0; i < tensors && st == STK_OK; i++) (*out)->tensors[i].touched = true;
    sys_free(names);
    sys_free(t);
    return st;
}

static stk_status open_team(struct adam_world *w, struct stk_error *err)
{
    STK_TRY(exec_open_threads(&w->ex, err));
    STK_TRY(exec_lane_open(w->ex, "bench", &w->lane, err));
    STK_TRY(exec_team_open(w->ex, "update", w->threads, &w->team, err));
    exec_event_init(w->ex, &w->done);
    return STK_OK;
}

static stk_status open_chunks(struct adam_world *w, struct stk_error *err)
{
    uint64_t small = w->n / ADAM_SMALL_ELEMS;
    STK_TRY(make_layout(w, 1, w->n, &w->layout[0], err));
    STK_TRY(make_layout(w, (uint32_t)small, ADAM_SMALL_ELEMS, &w->layout[1], err));
    w->jobs = sys_calloc(w->layout[0]->n_chunks, sizeof *w->jobs);
    if (!w->jobs || !adam_coefs_alloc(&w->coefs, (uint32_t)small))
        return stk_error_set(err, STK_ERR_NOMEM, errno, "bench adam: no memory for %llu tensors",
                             (unsigned long long)small);
    w->coefs.set[0] = w->coef;
    for (uint64_t i = 0; i < small; i++) w->coefs.of[i] = 0;
    return open_team(w, err);
}

static stk_status open_all(struct adam_world *w, bool chunks, struct stk_error *err)
{
    struct adam_hyper h = { 1e-4, 0.9, 0.999, 1e-8, 0.01, ADAM_ADAMW };
    adam_coef_make(&h, 10, 1.0, &w->coef);
    w->memory_bytes = w->n * 16;
    w->memory = sys_mmap(w->memory_bytes, true);
    if (!w->memory)
        return stk_error_set(err, STK_ERR_NOMEM, errno,
                             "bench adam: no memory for %llu parameters (16 bytes each); lower "
                             "--params", (unsigned long long)w->n);
    return chunks ? open_chunks(w, err) : STK_OK;
}

stk_status adam_world_open(uint64_t params, uint32_t threads, bool chunks, struct adam_world **out,
                           struct stk_error *err)
{
    struct adam_world *w = sys_calloc(1, sizeof *w);
    *out = NULL;
    if (!w) return stk_error_set(err, STK_ERR_NOMEM, errno, "bench adam: no memory to begin");
    w->n = (params + LIMIT_GROUP - 1) / LIMIT_GROUP * LIMIT_GROUP;
    w->threads = threads;
    stk_status st = open_all(w, chunks, err);
    if (st == STK_OK) *out = w;
    else adam_world_close(w);
    return st;
}

void adam_world_close(struct adam_world *w)
{
    if (!w) return;
    exec_team_close(w->team);
    exec_close(w->ex); /* its lanes, too */
    for (int i = 0; i < 2; i++) layout_free(w->layout[i]);
    sys_munmap(w->memory, w->memory_bytes);
    adam_coefs_free(&w->coefs);
    sys_free(w->jobs);
    sys_free(w);
}

/* --- where things lie ------------------------------------------------------------------------- */

static struct adam_span arrays_of(const struct adam_world *w, enum adam_layout layout)
{
    uint64_t n = w->n, wide = layout == ADAM_F32 ? 4 : 2,
             other = layout == ADAM_F32 ? 0 : layout == ADAM_FP16 ? 4 : 2;
    uint8_t *at = w->memory;
    struct adam_span s = { .n = n, .param = at };
    at += n * wide;
    if (other) s.low_or_master = at;
    at += n * other;
    s.exp_avg = (float *)(void *)at;
    s.exp_avg_sq = (float *)(void *)(at + n * 4);
    s.grad = at + n * 8;
    return s;
}

static struct adam_span part_of(struct adam_span s, enum adam_layout layout, uint64_t from,
                                uint64_t to)
{
    uint64_t wide = layout == ADAM_F32 ? 4 : 2, other = layout == ADAM_FP16 ? 4 : 2;
    s.n = to - from;
    s.param = (uint8_t *)s.param + from * wide;
    if (s.low_or_master) s.low_or_master = (uint8_t *)s.low_or_master + from * other;
    s.exp_avg += from;
    s.exp_avg_sq += from;
    s.grad = (const uint8_t *)s.grad + from * wide;
    return s;
}

/* Of the CHUNK_OPT of all chunks before element `elem`. */
static uint64_t opt_bytes(const struct adam_world *w, enum adam_layout layout, uint64_t elem)
{
    return elem * (layout == ADAM_FP16 ? 4 : 2) + chunk_moment_bytes(w->moments, elem);
}

/* Gradients lie at the same place in chunks and in arrays. */
static uint8_t *grad_at(const struct adam_world *w, enum adam_layout layout)
{
    if (layout == ADAM_F32) return w->memory + 12 * w->n;
    return w->memory + 2 * w->n + opt_bytes(w, layout, w->n);
}

void adam_world_fill(struct adam_world *w, enum adam_layout layout, enum chunk_moments moments)
{
    struct rng r;
    w->moments = moments;
    uint8_t *grad = grad_at(w, layout);
    memset(w->memory, 0, (size_t)(grad - w->memory));
    rng_seed(&r, 1);
    for (uint64_t i = 0; i < w->n; i++) {
        uint16_t top = (uint16_t)(0x3d80 + (rng_next(&r) & 0x80ff)); /* [2^-4, 2^-2), either sign */
        if (layout == ADAM_F32) ((uint32_t *)(void *)grad)[i] = (uint32_t)top << 16;
        else if (layout == ADAM_FP16)
            ((uint16_t *)(void *)grad)[i] = (uint16_t)(0x2c00 + (top & 0x83ff));
        else ((uint16_t *)(void *)grad)[i] = top;
    }
}

void adam_world_limits(struct adam_world *w, enum adam_layout layout, struct limit_set *set)
{
    static const enum limit_shape shape_of[ADAM_LAYOUT_N] = {
        [ADAM_BF16_SPLIT] = LIMIT_BF16_SPLIT, [ADAM_FP16] = LIMIT_FP16, [ADAM_F32] = LIMIT_F32
    };
    struct adam_span s = arrays_of(w, layout);
    uint64_t groups = w->n / LIMIT_GROUP, all = w->n * (layout == ADAM_BF16_SPLIT ? 14 : 16);
    struct limit_job job = { .base = { s.param, s.low_or_master, (uint8_t *)s.exp_avg,
                                       (uint8_t *)s.exp_avg_sq, (uint8_t *)(uintptr_t)s.grad },
                             .groups = groups };
    if (w->moments != CHUNK_MOMENTS_F32) { /* absmax left out: a 57th */
        uint64_t width = w->moments == CHUNK_MOMENTS_BF16 ? 2 : 1;
        job.base[3] = job.base[2] + width * w->n;
        job.base[4] = job.base[3] + width * w->n;
        all = w->n * (6 + 2 * width);
    }
    limit_add(set, w->moments == CHUNK_MOMENTS_F32    ? shape_of[layout]
                   : w->moments == CHUNK_MOMENTS_BF16 ? LIMIT_MOMENTS_BF16
                                                      : LIMIT_MOMENTS_8BIT, &job);
    if (layout != ADAM_F32) { /* the same bytes as four equal arrays of 4 */
        uint64_t each = all / 16 / LIMIT_GROUP;
        uint8_t *at = w->memory;
        uint64_t step = each * LIMIT_GROUP * 4;
        struct limit_job four = { .base = { at, NULL, at + step, at + 2 * step, at + 3 * step },
                                  .groups = each };
        limit_add(set, LIMIT_F32, &four);
    }
    struct limit_job one = { .base = { w->memory }, .groups = all / 4 / LIMIT_GROUP };
    limit_add(set, LIMIT_ONE, &one);
}

uint64_t adam_world_large_page_bytes(const struct adam_world *w)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    char line[256];
    bool here = false;
    unsigned long long from, to, kib = 0, sum = 0;
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%llx-%llx ", &from, &to) == 2)
            here = from <= (uintptr_t)w->memory && (uintptr_t)w->memory < to;
        else if (here && sscanf(line, "AnonHugePages: %llu kB", &kib) == 1) sum += kib;
    }
    fclose(f);
    return sum * 1024;
}

/* --- passes ----------------------------------------------------------------------------------- */

static void run_arrays(struct adam_world *w)
{
    struct adam_span all = arrays_of(w, w->now_layout);
    uint64_t groups = w->n / LIMIT_GROUP;
#pragma omp parallel for num_threads(w->threads) schedule(static)
    for (uint32_t part = 0; part < w->threads; part++) {
        struct adam_span s = part_of(all, w->now_layout, groups * part / w->threads * LIMIT_GROUP,
                                     groups * (part + 1) / w->threads * LIMIT_GROUP);
        s.way = w->way;
        adam_run(w->kernel, w->now_layout, &s, &w->coef);
    }
}

/* As many elements as a pass over all has, from a part that each thread's cache holds. */
static void run_cached(struct adam_world *w)
{
    struct adam_span all = arrays_of(w, w->now_layout);
    uint64_t each = w->n / w->threads, elems = ADAM_CACHED_ELEMS;
    if (elems > each) elems = each;
#pragma omp parallel for num_threads(w->threads) schedule(static)
    for (uint32_t part = 0; part < w->threads; part++) {
        uint64_t from = each / LIMIT_GROUP * LIMIT_GROUP * part;
        struct adam_span s = part_of(all, w->now_layout, from, from + elems);
        s.way.ahead_elems = 1; /* not beyond the part */
        for (uint64_t done = 0; done < each; done += elems)
            adam_run(w->kernel, w->now_layout, &s, &w->coef);
    }
}

struct narrow_walk {
    const struct adam_world *w;
    const struct stk_chunk *c;
    const struct adam_chunk *at;
    struct adam_moments moments;
};

static void narrow_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                         uint32_t n)
{
    const struct narrow_walk *x = arg;
    const struct adam_world *w = x->w;
    struct adam_dither d = { .seed = 1, .update = 10, .first_elem = x->c->first_elem };
    struct adam_span s = adam_chunk_span(w->now->dtype, x->c, x->at, chunk_elem, chunk_elem + n);
    (void)tensor_elem;
    s.exp_avg = s.exp_avg_sq = NULL;
    s.way = w->way;
    adam_narrow_run(w->kernel, w->now_layout, &s, &x->moments, chunk_elem, &d, adam_coef_of(&w->coefs, tensor),
                    false);
}

static void chunk_slice(void *arg, uint32_t slice, uint32_t n_slices)
{
    const struct chunk_job *j = arg;
    const struct adam_world *w = j->w;
    const struct stk_chunk *c = &w->now->chunks[j->chunk];
    uint64_t groups = c->n_elems / CHUNK_ALIGN_ELEMS;
    uint32_t from = (uint32_t)(groups * slice / n_slices) * CHUNK_ALIGN_ELEMS,
             to = (uint32_t)(groups * (slice + 1) / n_slices) * CHUNK_ALIGN_ELEMS;
    struct adam_chunk at = { .param = w->memory + 2 * c->first_elem,
                             .opt = w->memory + 2 * w->n + opt_bytes(w, w->now_layout,
                                                                     c->first_elem),
                             .grad = grad_at(w, w->now_layout) + 2 * c->first_elem };
    if (w->moments == CHUNK_MOMENTS_F32) {
        adam_chunk_run(w->kernel, w->way, w->now, c, &at, &w->coefs, from, to);
        return;
    }
    struct narrow_walk x = { .w = w, .c = c, .at = &at };
    adam_moments_at(w->now, c, at.opt, &x.moments);
    adam_pieces(w->now, c, from, to, &w->coefs, narrow_piece, &x);
}

static void all_done(void *arg) { exec_event_set(arg); }

static void run_chunks(struct adam_world *w, struct stk_layout *layout)
{
    layout->dtype = w->now_layout == ADAM_FP16 ? CHUNK_FP16 : CHUNK_BF16;
    layout->blocks[0].moments = w->moments;
    w->now = layout;
    exec_event_reset(&w->done);
    exec_task_init(&w->done_task, all_done, &w->done);
    for (uint32_t i = 0; i < layout->n_chunks; i++) {
        struct chunk_job *j = &w->jobs[i];
        *j = (struct chunk_job){ .w = w, .chunk = i };
        j->job = (struct exec_team_job){ .fn = chunk_slice, .arg = j, .n_slices = ADAM_MEMBER_SLICES * w->threads,
                                          .beside = true };
        if (i + 1 == layout->n_chunks) j->job.done_lane = w->lane, j->job.done = &w->done_task;
        exec_team_run(w->team, &j->job);
    }
    (void)exec_event_wait(&w->done, UINT64_MAX, NULL);
}

double adam_world_run(struct adam_world *w, enum adam_path path, enum adam_layout layout,
                      const struct adam_kernel *k, struct adam_way way)
{
    /* OpenMP's threads spin a while after a loop; the team's members need the cores */
    const struct timespec rest = { 0, 3000000 };
    w->now_layout = layout;
    w->kernel = k;
    w->way = way;
    if (path == ADAM_CHUNKS || path == ADAM_SMALL) nanosleep(&rest, NULL);
    double begin = bench_now_s();
    switch (path) {
    case ADAM_ARRAYS: run_arrays(w); break;
    case ADAM_CACHED: run_cached(w); break;
    case ADAM_CHUNKS: run_chunks(w, w->layout[0]); break;
    default: run_chunks(w, w->layout[1]); break;
    }
    return bench_now_s() - begin;
}
