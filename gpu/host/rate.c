/* gpu/host/rate.c - calls of oneDNN, and of our own product, alone, timed (gpu/rate.h).
 *
 * Owns its engine, primitives and operands: nothing is shared with a device, so that what is measured
 * does not depend on how the device calls the library. Must not know models. Application's thread;
 * the library's threads inside. Documentation: oneDNN 2.6 developer guide, "Matrix Multiplication",
 * "Reorder", memory format `any`. */
#include "gpu/rate.h"

#include "base/sys.h"
#include "gpu/host/kernels.h"
#include <oneapi/dnnl/dnnl.h>
#include <omp.h>
#include <string.h>

/* One f32 near 1, or two bf16 of 1: operands of either type without another filling. */
#define RATE_PATTERN 0x3f803f80u

enum { RATE_A, RATE_B, RATE_C, RATE_PAD, RATE_ARGS };

struct rate_call {
    dnnl_primitive_t primitive; /* NULL: the library cannot */
    dnnl_memory_t memory[RATE_ARGS];
};

struct rate {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    uint32_t threads, n;
    struct host_ctx own; /* of RATE_BF16_TILES */
    struct rate_shape *shape;
    struct rate_call (*call)[RATE_WAYS];
    uint8_t *buf[RATE_ARGS]; /* shared by all calls */
    uint64_t buf_bytes[RATE_ARGS];
};

const char *rate_way_name(enum rate_way way)
{
    static const char *const names[] = { "f32", "f32 packed", "bf16", "bf16 packed",
                                         "bf16 tiles" };
    return (unsigned)way < RATE_WAYS ? names[way] : "?";
}

static bool way_bf16(enum rate_way w) { return w == RATE_BF16 || w == RATE_BF16_PACKED; }
static bool way_packed(enum rate_way w) { return w == RATE_F32_PACKED || w == RATE_BF16_PACKED; }

static dnnl_status_t rate_desc(dnnl_memory_desc_t *md, uint64_t rows, uint64_t cols,
                                dnnl_data_type_t type, bool any)
{
    dnnl_dims_t dims = { (dnnl_dim_t)rows, (dnnl_dim_t)cols };
    return dnnl_memory_desc_init_by_tag(md, 2, dims, type, any ? dnnl_format_tag_any : dnnl_ab);
}

/* md: wanted layouts in, real ones out. */
static dnnl_status_t rate_primitive(struct rate *l, dnnl_memory_desc_t *md, dnnl_primitive_t *out)
{
    dnnl_matmul_desc_t op;
    dnnl_primitive_attr_t attr = NULL;
    dnnl_primitive_desc_t pd = NULL;
    dnnl_status_t st = dnnl_matmul_desc_init(&op, &md[RATE_A], &md[RATE_B], NULL, &md[RATE_C]);
    if (st == dnnl_success) st = dnnl_primitive_attr_create(&attr);
    if (st == dnnl_success)
        st = dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user);
    if (st == dnnl_success) st = dnnl_primitive_desc_create(&pd, &op, attr, l->engine, NULL);
    if (st == dnnl_success) {
        md[RATE_B] = *dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0);
        md[RATE_PAD] = *dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
        st = dnnl_primitive_create(out, pd);
    }
    if (attr) dnnl_primitive_attr_destroy(attr);
    if (pd) dnnl_primitive_desc_destroy(pd);
    return st;
}

static void rate_room(struct rate *l, int arg, uint64_t bytes)
{
    if (bytes > l->buf_bytes[arg]) l->buf_bytes[arg] = bytes;
}

/* Of our own product, if it takes the shape. */
static void rate_tiles_room(struct rate *l, const struct rate_shape *s)
{
    if (!host_gemm_fits(&l->own, s->k)) return;
    rate_room(l, RATE_A, s->m * s->k * 2);
    rate_room(l, RATE_B, host_layout_elems(HOST_GEMM_LAYOUT, s->k, s->n) * 2);
    rate_room(l, RATE_C, s->m * s->n * (s->wide ? 4 : 2));
}

/* A shape that the library refuses in this way stays without a primitive. */
static dnnl_status_t rate_call_make(struct rate *l, const struct rate_shape *s, enum rate_way w,
                                     struct rate_call *c)
{
    dnnl_memory_desc_t md[RATE_ARGS];
    dnnl_data_type_t type = way_bf16(w) ? dnnl_bf16 : dnnl_f32;
    dnnl_status_t st = rate_desc(&md[RATE_A], s->m, s->k, type, false);
    if (st == dnnl_success) st = rate_desc(&md[RATE_B], s->k, s->n, type, way_packed(w));
    if (st == dnnl_success)
        st = rate_desc(&md[RATE_C], s->m, s->n, s->wide ? dnnl_f32 : type, false);
    if (st == dnnl_success) st = rate_primitive(l, md, &c->primitive);
    if (st == dnnl_unimplemented) return dnnl_success;
    for (int i = 0; i < RATE_ARGS && st == dnnl_success; i++) {
        rate_room(l, i, dnnl_memory_desc_get_size(&md[i]));
        st = dnnl_memory_create(&c->memory[i], &md[i], l->engine, DNNL_MEMORY_NONE);
    }
    return st;
}

static stk_status rate_error(const char *what, dnnl_status_t st, struct stk_error *err)
{
    return stk_error_set(err, st == dnnl_out_of_memory ? STK_ERR_NOMEM : STK_ERR_DEVICE, 0,
                         "oneDNN: %s failed with status %d", what, (int)st);
}

static stk_status rate_buffers(struct rate *l, struct stk_error *err)
{
    for (int i = 0; i < RATE_ARGS; i++) {
        l->buf_bytes[i] = (l->buf_bytes[i] + 4095) / 4096 * 4096 + 4096;
        l->buf[i] = sys_mmap(l->buf_bytes[i], true);
        if (!l->buf[i])
            return stk_error_set(err, STK_ERR_NOMEM, 0,
                                 "no %llu bytes of memory for operands to measure products with",
                                 (unsigned long long)l->buf_bytes[i]);
        uint32_t *word = (uint32_t *)(void *)l->buf[i];
        for (uint64_t k = 0; k < l->buf_bytes[i] / 4; k++) word[k] = RATE_PATTERN;
    }
    return STK_OK;
}

static stk_status rate_make(struct rate *l, const struct rate_shape *shapes,
                             struct stk_error *err)
{
    memcpy(l->shape, shapes, l->n * sizeof *shapes);
    dnnl_status_t st = dnnl_engine_create(&l->engine, dnnl_cpu, 0);
    if (st == dnnl_success)
        st = dnnl_stream_create(&l->stream, l->engine, dnnl_stream_default_flags);
    l->own = (struct host_ctx){ .threads = l->threads, .isa = cpu_isa_best(), .bf16_products = true,
                                .amx = host_attention_amx_possible() };
    for (uint32_t i = 0; i < l->n; i++) {
        rate_tiles_room(l, &shapes[i]);
        for (int w = 0; w < RATE_BF16_TILES && st == dnnl_success; w++)
            st = rate_call_make(l, &shapes[i], (enum rate_way)w, &l->call[i][w]);
    }
    return st == dnnl_success ? rate_buffers(l, err) : rate_error("making a product", st, err);
}

stk_status rate_open(uint32_t threads, const struct rate_shape *shapes, uint32_t n,
                      struct rate **out, struct stk_error *err)
{
    *out = NULL;
    struct rate *l = sys_calloc(1, sizeof *l);
    if (!l) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to measure products");
    l->threads = threads;
    l->n = n;
    l->shape = sys_calloc(n, sizeof *l->shape);
    l->call = sys_calloc(n, sizeof *l->call);
    int saved = omp_get_max_threads();
    omp_set_num_threads((int)threads); /* fixed when a primitive is made */
    stk_status st = l->shape && l->call ? rate_make(l, shapes, err)
                                        : stk_error_set(err, STK_ERR_NOMEM, 0,
                                                        "no memory to measure %u products", n);
    omp_set_num_threads(saved);
    if (st != STK_OK) {
        rate_close(l);
        return st;
    }
    *out = l;
    return STK_OK;
}

void rate_close(struct rate *l)
{
    if (!l) return;
    for (uint32_t i = 0; l->call && i < l->n; i++)
        for (int w = 0; w < RATE_WAYS; w++) {
            for (int a = 0; a < RATE_ARGS; a++)
                if (l->call[i][w].memory[a]) dnnl_memory_destroy(l->call[i][w].memory[a]);
            if (l->call[i][w].primitive) dnnl_primitive_destroy(l->call[i][w].primitive);
        }
    if (l->stream) dnnl_stream_destroy(l->stream);
    if (l->engine) dnnl_engine_destroy(l->engine);
    for (int a = 0; a < RATE_ARGS; a++)
        if (l->buf[a]) sys_munmap(l->buf[a], l->buf_bytes[a]);
    sys_free(l->shape);
    sys_free(l->call);
    sys_free(l);
}

static double rate_tiles_run(struct rate *l, const struct rate_shape *s)
{
    const struct host_gemm g = { .m = s->m, .n = s->n, .k = s->k, .lda = s->k, .ldc = s->n,
                                 .a = (const uint16_t *)(const void *)l->buf[RATE_A],
                                 .b = l->buf[RATE_B], .c = l->buf[RATE_C],
                                 .ct = s->wide ? OPS_F32 : OPS_BF16 };
    if (!host_gemm_fits(&l->own, s->k)) return 0;
    double begin = omp_get_wtime();
    host_gemm(&l->own, &g);
    return omp_get_wtime() - begin;
}

stk_status rate_run(struct rate *l, uint32_t i, enum rate_way way, double *seconds,
                     struct stk_error *err)
{
    static const int names[RATE_ARGS] = { DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST,
                                           DNNL_ARG_SCRATCHPAD };
    struct rate_call *c = &l->call[i][way];
    dnnl_exec_arg_t args[RATE_ARGS];
    dnnl_status_t st = dnnl_success;
    *seconds = way == RATE_BF16_TILES ? rate_tiles_run(l, &l->shape[i]) : 0;
    if (!c->primitive) return STK_OK;
    for (int a = 0; a < RATE_ARGS; a++) {
        args[a] = (dnnl_exec_arg_t){ names[a], c->memory[a] };
        if (st == dnnl_success) st = dnnl_memory_set_data_handle(c->memory[a], l->buf[a]);
    }
    int saved = omp_get_max_threads();
    omp_set_num_threads((int)l->threads);
    double begin = omp_get_wtime();
    if (st == dnnl_success) st = dnnl_primitive_execute(c->primitive, l->stream, RATE_ARGS, args);
    if (st == dnnl_success) st = dnnl_stream_wait(l->stream);
    *seconds = omp_get_wtime() - begin;
    omp_set_num_threads(saved);
    return st == dnnl_success ? STK_OK : rate_error("running a product", st, err);
}
