/* gpu/host/matmul.c - the host device's matrix products, by oneDNN.
 *
 * Owns the primitives, one per shape, made in prepare mode and kept until the device is closed.
 * Must not know what is multiplied. Runs on stream lanes; a product uses all compute threads, so
 * products of two streams take turns (the lock). Documentation of the library: oneDNN 2.6 developer
 * guide, "Matrix Multiplication" and "Primitive Attributes: scratchpad". */
#include "gpu/host/host_impl.h"

#include "base/sys.h"
#include <oneapi/dnnl/dnnl.h>
#include <omp.h>
#include <string.h>

enum { MATMUL_A, MATMUL_B, MATMUL_C, MATMUL_PAD, MATMUL_ARGS };

struct matmul_entry {
    struct host_product shape;
    dnnl_primitive_t primitive;
    dnnl_memory_t memory[MATMUL_ARGS]; /* handles are set at each run, under the lock */
    uint64_t pad_bytes;
    struct host_layout layout; /* of b, if packed; k_block 0: unknown, and no primitive */
};

#define MATMUL_COPIED_K 16384

struct host_matmul {
    pthread_mutex_t lock; /* entries, their memory objects, the library's stream */
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    uint32_t threads;
    struct matmul_entry *entries;
    uint32_t n, capacity;
    uint64_t late;
    uint64_t copy_bytes; /* largest operand that the library copies by itself */
};

static stk_status matmul_error(const struct host_product *p, const char *what, dnnl_status_t st,
                               struct stk_error *err)
{
    stk_status code = st == dnnl_out_of_memory ? STK_ERR_NOMEM : STK_ERR_DEVICE;
    return stk_error_set(err, code, 0,
                         "oneDNN: %s of a product %llu x %llu x %llu (%s) failed with status %d",
                         what, (unsigned long long)p->m, (unsigned long long)p->n,
                         (unsigned long long)p->k, p->src == OPS_BF16 ? "bf16" : "f32", (int)st);
}

stk_status host_matmul_open(uint32_t threads, struct host_matmul **out, struct stk_error *err)
{
    struct host_matmul *mm = sys_calloc(1, sizeof *mm);
    *out = NULL;
    if (!mm)
        return stk_error_set(err, STK_ERR_NOMEM, 0,
                             "host device: no memory for the table of products");
    mm->threads = threads;
    pthread_mutex_init(&mm->lock, NULL);
    dnnl_status_t st = dnnl_engine_create(&mm->engine, dnnl_cpu, 0);
    if (st == dnnl_success)
        st = dnnl_stream_create(&mm->stream, mm->engine, dnnl_stream_default_flags);
    if (st != dnnl_success) {
        host_matmul_close(mm);
        return stk_error_set(err, STK_ERR_DEVICE, 0, "oneDNN: no CPU engine or stream (status %d)",
                             (int)st);
    }
    *out = mm;
    return STK_OK;
}

static void matmul_entry_free(struct matmul_entry *e)
{
    for (int i = 0; i < MATMUL_ARGS; i++)
        if (e->memory[i]) dnnl_memory_destroy(e->memory[i]);
    if (e->primitive) dnnl_primitive_destroy(e->primitive);
}

void host_matmul_close(struct host_matmul *mm)
{
    if (!mm) return;
    for (uint32_t i = 0; i < mm->n; i++) matmul_entry_free(&mm->entries[i]);
    if (mm->stream) dnnl_stream_destroy(mm->stream);
    if (mm->engine) dnnl_engine_destroy(mm->engine);
    pthread_mutex_destroy(&mm->lock);
    sys_free(mm->entries);
    sys_free(mm);
}

/* Field by field: the bytes behind the last field are nobody's. */
static bool matmul_same(const struct host_product *a, const struct host_product *b)
{
    return a->m == b->m && a->n == b->n && a->k == b->k && a->lda == b->lda && a->ldb == b->ldb &&
           a->ldc == b->ldc && a->ta == b->ta && a->tb == b->tb && a->src == b->src &&
           a->dst == b->dst && a->packed == b->packed && a->add == b->add && a->own == b->own;
}

static struct matmul_entry *matmul_find(struct host_matmul *mm, const struct host_product *p)
{
    for (uint32_t i = 0; i < mm->n; i++)
        if (matmul_same(&mm->entries[i].shape, p)) return &mm->entries[i];
    return NULL;
}

static dnnl_status_t matmul_desc(dnnl_memory_desc_t *md, uint64_t rows, uint64_t cols, uint64_t ld,
                                 bool transposed, uint32_t type)
{
    dnnl_dims_t dims = { (dnnl_dim_t)rows, (dnnl_dim_t)cols };
    dnnl_dims_t strides = { transposed ? 1 : (dnnl_dim_t)ld, transposed ? (dnnl_dim_t)ld : 1 };
    return dnnl_memory_desc_init_by_strides(md, 2, dims, type == OPS_BF16 ? dnnl_bf16 : dnnl_f32,
                                            strides);
}

/* Names the library's choice, if it is one of those that kernels/pack_isa.c makes. */
static struct host_layout matmul_layout(const dnnl_memory_desc_t *md, uint64_t k, uint64_t n,
                                        uint32_t type)
{
    static const struct {
        dnnl_format_tag_t f32, bf16;
        uint32_t n_block;
    } tags[] = { { dnnl_BA16a64b, dnnl_BA16a64b2a, 64 },
                 { dnnl_BA16a48b, dnnl_BA16a48b2a, 48 },
                 { dnnl_BA16a32b, dnnl_BA16a32b2a, 32 },
                 { dnnl_BA16a16b, dnnl_BA16a16b2a, 16 } };
    dnnl_dims_t dims = { (dnnl_dim_t)k, (dnnl_dim_t)n };
    for (size_t i = 0; i < sizeof tags / sizeof tags[0]; i++) {
        dnnl_memory_desc_t known;
        if (dnnl_memory_desc_init_by_tag(&known, 2, dims,
                                         type == OPS_BF16 ? dnnl_bf16 : dnnl_f32,
                                         type == OPS_BF16 ? tags[i].bf16 : tags[i].f32) ==
                dnnl_success &&
            dnnl_memory_desc_equal(&known, md))
            return (struct host_layout){ type == OPS_BF16 ? 32 : 16, tags[i].n_block };
    }
    return (struct host_layout){ 0, 0 };
}

static dnnl_status_t matmul_add(dnnl_primitive_attr_t attr)
{
    dnnl_post_ops_t ops = NULL;
    dnnl_status_t st = dnnl_post_ops_create(&ops);
    if (st == dnnl_success) st = dnnl_post_ops_append_sum(ops, 1.0f);
    if (st == dnnl_success) st = dnnl_primitive_attr_set_post_ops(attr, ops);
    if (ops) dnnl_post_ops_destroy(ops);
    return st;
}

/* The descriptor with a scratchpad of ours: the library then allocates none in a run. */
static dnnl_status_t matmul_primitive_desc(struct host_matmul *mm, const dnnl_memory_desc_t *md,
                                           bool add, dnnl_primitive_desc_t *out)
{
    dnnl_matmul_desc_t op;
    dnnl_primitive_attr_t attr = NULL;
    dnnl_status_t st =
        dnnl_matmul_desc_init(&op, &md[MATMUL_A], &md[MATMUL_B], NULL, &md[MATMUL_C]);
    if (st == dnnl_success) st = dnnl_primitive_attr_create(&attr);
    if (st == dnnl_success)
        st = dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user);
    if (st == dnnl_success && add) st = matmul_add(attr);
    if (st == dnnl_success) st = dnnl_primitive_desc_create(out, &op, attr, mm->engine, NULL);
    if (attr) dnnl_primitive_attr_destroy(attr);
    return st;
}

static dnnl_status_t matmul_make(struct host_matmul *mm, struct matmul_entry *e)
{
    const struct host_product *p = &e->shape;
    dnnl_memory_desc_t md[MATMUL_ARGS];
    dnnl_primitive_desc_t pd = NULL;
    dnnl_status_t st = matmul_desc(&md[MATMUL_A], p->m, p->k, p->lda, p->ta, p->src);
    if (st == dnnl_success && p->packed) {
        dnnl_dims_t dims = { (dnnl_dim_t)p->k, (dnnl_dim_t)p->n };
        st = dnnl_memory_desc_init_by_tag(&md[MATMUL_B], 2, dims,
                                          p->src == OPS_BF16 ? dnnl_bf16 : dnnl_f32,
                                          dnnl_format_tag_any);
    } else if (st == dnnl_success) {
        st = matmul_desc(&md[MATMUL_B], p->k, p->n, p->ldb, p->tb, p->src);
    }
    if (st == dnnl_success) st = matmul_desc(&md[MATMUL_C], p->m, p->n, p->ldc, false, p->dst);
    if (st == dnnl_success) st = matmul_primitive_desc(mm, md, p->add, &pd);
    if (st == dnnl_success && p->packed) {
        md[MATMUL_B] = *dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0);
        e->layout = matmul_layout(&md[MATMUL_B], p->k, p->n, p->src);
        if (e->layout.k_block == 0) {
            dnnl_primitive_desc_destroy(pd);
            return dnnl_success;
        }
    }
    if (st == dnnl_success) {
        md[MATMUL_PAD] = *dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
        e->pad_bytes = dnnl_memory_desc_get_size(&md[MATMUL_PAD]);
        st = dnnl_primitive_create(&e->primitive, pd);
    }
    for (int i = 0; i < MATMUL_ARGS && st == dnnl_success; i++)
        st = dnnl_memory_create(&e->memory[i], &md[i], mm->engine, DNNL_MEMORY_NONE);
    if (pd) dnnl_primitive_desc_destroy(pd);
    return st;
}

/* Under the lock, with the thread count set: the library fixes it when a primitive is made. */
static stk_status matmul_get(struct host_matmul *mm, const struct host_product *p, bool late,
                             struct matmul_entry **out, struct stk_error *err)
{
    *out = matmul_find(mm, p);
    if (*out) return STK_OK;
    if (mm->n == mm->capacity) {
        uint32_t capacity = mm->capacity ? mm->capacity * 2 : 32;
        struct matmul_entry *grown = sys_realloc(mm->entries, capacity * sizeof *grown);
        if (!grown)
            return stk_error_set(err, STK_ERR_NOMEM, 0,
                                 "host device: no memory for %u shapes of products", capacity);
        mm->entries = grown;
        mm->capacity = capacity;
    }
    struct matmul_entry *e = &mm->entries[mm->n];
    *e = (struct matmul_entry){ .shape = *p };
    dnnl_status_t st = matmul_make(mm, e);
    if (st != dnnl_success) {
        matmul_entry_free(e);
        return matmul_error(p, "making the primitive", st, err);
    }
    mm->n++;
    mm->late += late && e->primitive; /* not a question for a layout */
    *out = e;
    return STK_OK;
}

/* OpenMP's count is the calling thread's own; it is put back, because the thread may be the
 * application's. */
static int matmul_threads_enter(const struct host_matmul *mm)
{
    int saved = omp_get_max_threads();
    omp_set_num_threads((int)mm->threads);
    return saved;
}

stk_status host_matmul_prepare(struct host_matmul *mm, const struct host_product *p,
                               uint64_t *pad_bytes, struct stk_error *err)
{
    struct matmul_entry *e = NULL;
    int saved = matmul_threads_enter(mm);
    pthread_mutex_lock(&mm->lock);
    stk_status st = matmul_get(mm, p, false, &e, err);
    if (st == STK_OK) *pad_bytes = e->pad_bytes;
    /* Seen with 2.6.3 and AMX: the left operand of a bf16 product is copied into the library's own
     * memory, each thread its rows; not for the very long inner dimension of a head. */
    uint64_t copy = p->src == OPS_BF16 && p->k <= MATMUL_COPIED_K ? p->m * p->k * 2 : 0;
    if (copy > mm->copy_bytes) mm->copy_bytes = copy;
    pthread_mutex_unlock(&mm->lock);
    omp_set_num_threads(saved);
    return st;
}

stk_status host_matmul_layout(struct host_matmul *mm, const struct host_product *p,
                              struct host_layout *out, struct stk_error *err)
{
    struct matmul_entry *e = NULL;
    STK_ASSERT(p->packed && !p->tb && !p->ldb);
    int saved = matmul_threads_enter(mm);
    pthread_mutex_lock(&mm->lock);
    stk_status st = matmul_get(mm, p, true, &e, err);
    *out = st == STK_OK ? e->layout : (struct host_layout){ 0, 0 };
    pthread_mutex_unlock(&mm->lock);
    omp_set_num_threads(saved);
    return st;
}

static stk_status matmul_execute(struct host_matmul *mm, struct matmul_entry *e,
                                 void *const handles[MATMUL_ARGS], struct stk_error *err)
{
    static const int names[MATMUL_ARGS] = { DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST,
                                            DNNL_ARG_SCRATCHPAD };
    dnnl_exec_arg_t args[MATMUL_ARGS];
    dnnl_status_t st = dnnl_success;
    for (int i = 0; i < MATMUL_ARGS; i++) {
        args[i] = (dnnl_exec_arg_t){ names[i], e->memory[i] };
        if (st == dnnl_success) st = dnnl_memory_set_data_handle(e->memory[i], handles[i]);
    }
    if (st == dnnl_success)
        st = dnnl_primitive_execute(e->primitive, mm->stream, MATMUL_ARGS, args);
    if (st == dnnl_success) st = dnnl_stream_wait(mm->stream);
    return st == dnnl_success ? STK_OK : matmul_error(&e->shape, "running", st, err);
}

stk_status host_matmul_run(struct host_matmul *mm, const struct host_product *p, const void *a,
                           const void *b, void *c, void *pad, uint64_t pad_size_bytes,
                           struct stk_error *err)
{
    struct matmul_entry *e = NULL;
    int saved = matmul_threads_enter(mm);
    pthread_mutex_lock(&mm->lock);
    stk_status st = matmul_get(mm, p, true, &e, err);
    STK_ASSERT(st != STK_OK || e->primitive);
    if (st == STK_OK && e->pad_bytes > pad_size_bytes)
        st = stk_error_set(err, STK_ERR_DEVICE, 0,
                           "a product %llu x %llu x %llu needs %llu bytes of scratch beside its "
                           "operation's, %llu are left; "
                           "declare what prepare mode reports",
                           (unsigned long long)p->m, (unsigned long long)p->n,
                           (unsigned long long)p->k, (unsigned long long)e->pad_bytes,
                           (unsigned long long)pad_size_bytes);
    if (st == STK_OK) {
        void *const handles[MATMUL_ARGS] = { (void *)(uintptr_t)a, (void *)(uintptr_t)b, c, pad };
        st = matmul_execute(mm, e, handles, err);
    }
    pthread_mutex_unlock(&mm->lock);
    omp_set_num_threads(saved);
    return st;
}

/* The library frees after each product, but the C library keeps and fragments: three times the
 * largest was seen. */
uint64_t host_matmul_library_bytes(struct host_matmul *mm) { return 3 * mm->copy_bytes; }

void host_matmul_counts(const struct dev *d, uint64_t *made, uint64_t *late)
{
    struct host_matmul *mm = ((const struct host_dev *)d)->matmul;
    pthread_mutex_lock(&mm->lock);
    *made = mm->n;
    *late = mm->late;
    pthread_mutex_unlock(&mm->lock);
}

const char *host_matmul_isa(void)
{
    switch (dnnl_get_effective_cpu_isa()) {
    case dnnl_cpu_isa_sse41: return "sse41";
    case dnnl_cpu_isa_avx: return "avx";
    case dnnl_cpu_isa_avx2: return "avx2";
    case dnnl_cpu_isa_avx2_vnni: return "avx2_vnni";
    case dnnl_cpu_isa_avx512_core: return "avx512";
    case dnnl_cpu_isa_avx512_core_vnni: return "avx512_vnni";
    case dnnl_cpu_isa_avx512_core_bf16: return "avx512_bf16";
    case dnnl_cpu_isa_avx512_core_amx: return "avx512_amx";
    default: return "other";
    }
}
