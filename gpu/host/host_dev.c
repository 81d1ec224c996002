/* gpu/host/host_dev.c - the host device: this machine's cores as a device, in place, with a memory
 * of its own, or with modelled time.
 *
 * Owns the arena, the sticky error, the choice of the products' arithmetic. Must not know what
 * operations compute (host_run.c) nor how streams run (host_stream.c). Opened, reserved and closed
 * by the application's thread. */
#include "gpu/host/host_impl.h"

#include "base/mem.h"
#include "base/rng.h"
#include "base/sys.h"
#include "base/topology.h"
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <string.h>

/* A machine for DEV_SIM when none is described: round numbers of a mid-range card on PCIe 4.0 x16.
 */
static const struct dev_model host_default_model = { .flops_per_s = 100e12,
                                                     .copy_in_bytes_per_s = 22e9,
                                                     .copy_out_bytes_per_s = 22e9,
                                                     .memory_bytes_per_s = 900e9,
                                                     .launch_ns = 4000 };

/* --- the faster arithmetic -------------------------------------------------------------------- */

struct probe { uint64_t rows, k, n; int runs_min, runs_max; uint64_t limit_ns; };
/* The choice is part of the numerics key, so it must come out the same in every run on one machine,
 * busy or not: the best of several products each, and bf16 only where it is clearly faster. On AMX tiles
 * bf16 is five times as fast, so nothing is measured there: a machine full of others' work once made f32
 * win, and the next run's bits were others. */
#define PROBE_CLEARLY 1.2
#define PROBE_SCRATCH_BYTES (32u << 20)
static const struct probe probe_choose = { 512, 1024, 1024, 6, 12, 100000000 },
                          probe_rate = { 512, 1024, 1024, 6, 12, 10000000 },
                          probe_works = { 32, 256, 256, 1, 2, 0 }; /* the choice was made */

/* FLOP/s of a bf16 linear layer computed with products of `prod`, conversions included; 0: this
 * library cannot. */
static stk_status host_probe(struct host_dev *h, bool bf16_products, uint8_t *memory,
                             const struct probe *p, double *flops_per_s)
{
    stk_status st = STK_OK;
    struct host_ctx saved = h->ctx;
    h->ctx.bf16_products = bf16_products;
    struct ops_linear a = {
        .rows = p->rows, .in = p->k, .out = p->n, .at = OPS_BF16, .pt = OPS_BF16
    };
    a.x = memory;
    a.w = memory + p->rows * p->k * 2;
    a.y = memory + p->rows * p->k * 2 + p->n * p->k * 2;
    a.scratch.base = (uint8_t *)a.y + p->rows * p->n * 2;
    a.scratch.size_bytes = PROBE_SCRATCH_BYTES;
    uint64_t begin_ns = exec_now_ns(h->base.ex), best_ns = UINT64_MAX;
    for (int run = 0; run < p->runs_max; run++) {
        struct host_job j = { .h = h, .scratch = a.scratch, .op = "probe" };
        uint64_t start_ns = exec_now_ns(h->base.ex);
        host_linear_forward(&j, &a);
        uint64_t now_ns = exec_now_ns(h->base.ex);
        st = j.st;
        if (st != STK_OK) break;
        if (run > 0 && now_ns - start_ns < best_ns)
            best_ns = now_ns - start_ns; /* the first makes the primitive */
        if (run >= p->runs_min && now_ns - begin_ns > p->limit_ns) break;
    }
    h->ctx = saved;
    if (best_ns == 0) best_ns = 1; /* the simulation's clock stands still */
    *flops_per_s = 0;
    if (best_ns != UINT64_MAX)
        *flops_per_s = 2.0 * (double)(p->rows * p->k * p->n) / ((double)best_ns * 1e-9);
    return st;
}

static stk_status host_measure(struct host_dev *h, enum dev_matmul asked, const struct probe *p,
                               struct stk_error *err)
{
    uint64_t size_bytes =
        (p->rows * p->k + p->n * p->k + p->rows * p->n) * 2 + PROBE_SCRATCH_BYTES;
    uint8_t *memory = sys_mmap(size_bytes, p != &probe_works);
    if (!memory)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "host device: no memory to measure products");
    double f32 = 0, bf16 = 0;
    stk_status st = STK_OK;
    if (asked != DEV_MATMUL_BF16) st = host_probe(h, false, memory, p, &f32);
    if (asked != DEV_MATMUL_F32 && st != STK_ERR_NOMEM)
        st = host_probe(h, true, memory, p, &bf16);
    sys_munmap(memory, size_bytes);
    if (st == STK_ERR_NOMEM)
        return stk_error_set(err, st, 0, "host device: no memory to measure products");
    if (asked == DEV_MATMUL_BF16 && bf16 == 0)
        return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                             "the option matmul=bf16 was given, but oneDNN has no bf16 products on "
                             "this processor; use f32 or auto");
    h->ctx.bf16_products =
        asked == DEV_MATMUL_BF16 || (asked == DEV_MATMUL_AUTO && bf16 > PROBE_CLEARLY * f32);
    h->base.caps.matmul_flops_per_s = h->ctx.bf16_products ? bf16 : f32;
    if (h->base.caps.matmul_flops_per_s == 0)
        return stk_error_set(
            err, STK_ERR_DEVICE, 0,
            "host device: oneDNN ran no product of %d x %d x %d on %u threads: give "
            "fewer --threads",
            (int)p->rows, (int)p->n, (int)p->k, h->ctx.threads);
    if (p == &probe_works) h->base.caps.matmul_flops_per_s = 0; /* host_matmul_rate */
    return STK_OK;
}

static stk_status host_matmul_rate(struct dev *d, struct stk_error *err)
{
    struct host_dev *h = host_of(d);
    if (exec_kind_of(d->ex) == EXEC_SIM) return STK_OK;
    enum dev_matmul chosen = h->ctx.bf16_products ? DEV_MATMUL_BF16 : DEV_MATMUL_F32;
    return host_measure(h, chosen, &probe_rate, err);
}

/* In the simulation the clock stands still inside a task and a run must be a function of its seed:
 * auto means f32 there. */
static stk_status host_choose_matmul(struct host_dev *h, enum dev_matmul asked,
                                     struct stk_error *err)
{
    bool simulated = exec_kind_of(h->base.ex) == EXEC_SIM;
    if (asked == DEV_MATMUL_AUTO && !simulated && !h->plan_only && host_attention_amx_possible())
        asked = DEV_MATMUL_BF16;
    if (h->plan_only) h->ctx.bf16_products = asked == DEV_MATMUL_BF16;
    else if (!simulated || asked == DEV_MATMUL_BF16)
        STK_TRY(host_measure(h, asked, asked == DEV_MATMUL_AUTO ? &probe_choose : &probe_works,
                             err));
    if (simulated) h->base.caps.matmul_flops_per_s = 0;
    h->base.caps.matmul = h->ctx.bf16_products ? DEV_MATMUL_BF16 : DEV_MATMUL_F32;
    return STK_OK;
}

/* --- opening ---------------------------------------------------------------------------------- */

static const char *host_name(enum dev_kind kind)
{
    return kind == DEV_HOST ? "host" : kind == DEV_SIM ? "sim" : "host:discrete";
}

static void host_fill_caps(struct host_dev *h, const struct dev_cfg *cfg)
{
    struct dev_caps *c = &h->base.caps;
    c->kind = cfg->kind;
    c->name = host_name(cfg->kind);
    c->host_in_place = cfg->kind == DEV_HOST;
    c->modelled_time = c->copy_paced = cfg->kind == DEV_SIM;
    c->memory_bytes = h->memory_bytes;
    c->align_bytes = cfg->kind == DEV_HOST ? 64 : 256;
    c->compute_threads = h->ctx.threads;
}

/* The kind is not in it: in place or not, the bits are the same. */
static void host_fill_numerics(struct host_dev *h)
{
    const dnnl_version_t *v = dnnl_version();
    snprintf(h->base.caps.numerics, sizeof h->base.caps.numerics,
             "host;isa=%s;matmul=%s;threads=%u;onednn=%d.%d.%d/%s;tiles=%d%s",
             cpu_isa_name(h->ctx.isa), h->ctx.bf16_products ? "bf16" : "f32", h->ctx.threads,
             v->major, v->minor, v->patch, host_matmul_isa(), HOST_TILES_VERSION,
             h->ctx.amx ? ";attention=amx;products=amx" : "");
}

static void host_close(struct dev *d)
{
    struct host_dev *h = host_of(d);
    STK_ASSERT(h->streams_open == 0);
    if (h->arena) sys_munmap(h->arena, h->arena_bytes);
    host_matmul_close(h->matmul);
    pthread_mutex_destroy(&h->lock);
    sys_free(h);
}

static stk_status host_open(const struct dev_cfg *cfg, struct dev **out, struct stk_error *err)
{
    if (cfg->kind == DEV_SIM && exec_kind_of(cfg->ex) != EXEC_SIM)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "device sim needs the simulated execution (its time is modelled)");
    if (cfg->kind != DEV_HOST && cfg->memory_bytes == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "device %s has a memory of its own: give its size",
                             host_name(cfg->kind));
    struct host_dev *h = sys_calloc(1, sizeof *h);
    if (!h) return stk_error_set(err, STK_ERR_NOMEM, 0, "host device: no memory for its record");
    pthread_mutex_init(&h->lock, NULL);
    h->base.ex = cfg->ex;
    h->ctx.threads = cfg->compute_threads ? cfg->compute_threads : topology_threads_here();
    h->ctx.isa = cpu_isa_best();
    h->discrete = cfg->kind != DEV_HOST;
    h->memory_bytes = cfg->memory_bytes ? cfg->memory_bytes : UINT64_MAX;
    h->poison = cfg->poison;
    h->adam = cfg->adam;
    h->plan_only = cfg->kind == DEV_SIM && cfg->plan_only;
    h->seed = cfg->seed;
    h->model = cfg->model ? *cfg->model : host_default_model;
    host_fill_caps(h, cfg);
    stk_status st = host_matmul_open(h->ctx.threads, &h->matmul, err);
    if (st == STK_OK) st = host_choose_matmul(h, cfg->matmul, err);
    h->ctx.amx = h->ctx.bf16_products && host_attention_amx_possible();
    if (st != STK_OK) {
        host_close(&h->base);
        return st;
    }
    host_fill_numerics(h);
    *out = &h->base;
    return STK_OK;
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Every 16-bit half is a quiet NaN of bf16, a NaN of fp16, and makes its fp32 one: unwritten memory
 * shows in whatever reads it. */
static void host_poison(uint8_t *p, uint64_t size_bytes, uint64_t seed)
{
    struct rng r;
    rng_seed(&r, seed);
    for (uint64_t i = 0; i + 8 <= size_bytes; i += 8) {
        uint64_t v = (rng_next(&r) & 0x803f803f803f803fu) | 0x7fc07fc07fc07fc0u;
        memcpy(p + i, &v, 8);
    }
}

static stk_status host_reserve(struct dev *d, uint64_t size_bytes, void **out,
                               struct stk_error *err)
{
    struct host_dev *h = host_of(d);
    char asked[32], cap[32];
    if (h->arena)
        return stk_error_set(err, STK_ERR_STATE, 0, "device %s: its arena is reserved already",
                             d->caps.name);
    if (size_bytes > h->memory_bytes)
        return stk_error_set(
            err, STK_ERR_NOMEM, 0,
            "device %s: an arena of %s (%llu bytes) was asked for, it has %s (%llu bytes)",
            d->caps.name, mem_size_format(size_bytes, asked), (unsigned long long)size_bytes,
            mem_size_format(h->memory_bytes, cap), (unsigned long long)h->memory_bytes);
    h->arena = sys_mmap(size_bytes, true);
    if (!h->arena)
        return stk_error_set(err, STK_ERR_NOMEM, 0,
                             "device %s: this machine has no %s for its arena", d->caps.name,
                             mem_size_format(size_bytes, asked));
    h->arena_bytes = size_bytes;
    if (h->poison) host_poison(h->arena, size_bytes, h->seed);
    *out = h->arena;
    return STK_OK;
}

static stk_status host_register(struct dev *d, void *base, uint64_t size_bytes,
                                struct stk_error *err)
{
    (void)d;
    (void)base;
    (void)size_bytes;
    (void)err;
    return STK_OK;
}

static void host_unregister(struct dev *d, void *base)
{
    (void)d;
    (void)base;
}

/* --- the sticky error ------------------------------------------------------------------------- */

void host_fail(struct host_dev *h, const struct stk_error *e)
{
    pthread_mutex_lock(&h->lock);
    stk_error_forward(&h->error, e);
    pthread_mutex_unlock(&h->lock);
    atomic_store(&h->failed, true);
}

static stk_status host_status(const struct dev *d, struct stk_error *err)
{
    struct host_dev *h = (struct host_dev *)(uintptr_t)d; /* the lock is not part of what is read */
    if (!atomic_load(&h->failed)) return STK_OK;
    pthread_mutex_lock(&h->lock);
    stk_status st = h->error.code;
    if (err) stk_error_forward(err, &h->error);
    pthread_mutex_unlock(&h->lock);
    return st;
}

static uint64_t host_model_time(const struct dev *d, const struct dev_cmd *cmd)
{
    return host_model_ns((const struct host_dev *)d, cmd);
}

static void host_model_read(const struct dev *d, struct dev_model *out)
{
    *out = ((const struct host_dev *)d)->model;
}

const struct dev_ops host_dev_ops = {
    .version = 1, /* of DEV_OPS_VERSION, as this file was written for */
    .name = "host",
    .open = host_open,
    .close = host_close,
    .reserve = host_reserve,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .status_read = host_status,
    .stream_open = host_stream_open,
    .stream_close = host_stream_close,
    .stream_busy_ns = host_stream_busy_ns,
    .enqueue = host_stream_enqueue,
    .prepare = host_prepare,
    .work_read = host_work_read,
    .mark_init = host_mark_init,
    .mark_free = host_mark_free,
    .model_ns = host_model_time,
    .model_read = host_model_read,
    .matmul_rate = host_matmul_rate,
};
