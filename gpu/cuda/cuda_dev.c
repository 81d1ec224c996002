/* gpu/cuda/cuda_dev.c - a card of NVIDIA's as a device: what it can, its memory, the sticky error.
 *
 * Owns the arena, the registered host memory, the table of functions. Must not know what operations
 * launch (cuda_run.c) nor how streams tell (cuda_stream.c). Opened, reserved and closed by the
 * application's thread.
 *
 * Each refusal names its cause: no driver, a driver too old, no card, a card too old, less memory
 * than asked for, a library that is missing. */
#include "gpu/cuda/cuda_impl.h"

#include "base/mem.h"
#include "base/sys.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((uint64_t)1 << 20)
#define CONTEXT_MOST_BYTES (1024 * MIB) /* more was taken at opening: not by us alone */
#define CONTEXT_GUESS_BYTES (512 * MIB)
#define SLACK_BYTES (64 * MIB) /* kernels that are loaded after the plan is made */

/* --- errors ----------------------------------------------------------------------------------- */

stk_status cuda_check(cudaError_t e, const char *call, const char *where, struct stk_error *err)
{
    if (e == cudaSuccess) return STK_OK;
    return stk_error_set(
        err, e == cudaErrorMemoryAllocation ? STK_ERR_NOMEM : STK_ERR_DEVICE, 0,
        "device cuda: %s failed (%s): %s (%s); it may be the first to tell of work "
        "queued earlier",
        call, where, cudaGetErrorString(e), cudaGetErrorName(e));
}

void cuda_fail(struct cuda_dev *h, const struct stk_error *e)
{
    pthread_mutex_lock(&h->lock);
    stk_error_forward(&h->error, e);
    pthread_mutex_unlock(&h->lock);
    atomic_store(&h->failed, true);
}

static stk_status cuda_status(const struct dev *d, struct stk_error *err)
{
    struct cuda_dev *h = (struct cuda_dev *)(uintptr_t)d; /* the lock is not part of what is read */
    if (!atomic_load(&h->failed)) return STK_OK;
    pthread_mutex_lock(&h->lock);
    stk_status st = h->error.code;
    if (err) stk_error_forward(err, &h->error);
    pthread_mutex_unlock(&h->lock);
    return st;
}

/* --- is there a card? ------------------------------------------------------------------------- */

struct probe {
    int driver, runtime;
    struct cudaDeviceProp card;
};

static stk_status probe_driver(struct probe *p, struct stk_error *err)
{
    STK_TRY(
        cuda_check(cudaRuntimeGetVersion(&p->runtime), "cudaRuntimeGetVersion", "opening", err));
    cudaError_t e = cudaDriverGetVersion(&p->driver);
    if (e != cudaSuccess && e != cudaErrorInsufficientDriver)
        return cuda_check(e, "cudaDriverGetVersion", "opening", err);
    if (p->driver == 0)
        return stk_error_set(
            err, STK_ERR_UNSUPPORTED, 0,
            "device cuda: no NVIDIA driver on this machine (libcuda.so.1 is not to be "
            "had): install one for CUDA %d.%d or later, or use --device host",
            p->runtime / 1000, p->runtime % 1000 / 10);
    /* Versions of one number before the point go together (CUDA compatibility guide). */
    if (e == cudaErrorInsufficientDriver || p->driver / 1000 < p->runtime / 1000)
        return stk_error_set(
            err, STK_ERR_UNSUPPORTED, 0,
            "device cuda: the driver is too old: it is for CUDA %d.%d, this program "
            "needs %d.0 or later: update the driver, or use --device host",
            p->driver / 1000, p->driver % 1000 / 10, p->runtime / 1000);
    return STK_OK;
}

static stk_status probe_card(struct probe *p, struct stk_error *err)
{
    int n = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaErrorInsufficientDriver)
        return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                             "device cuda: the driver is too old for CUDA %d.%d: update it, or use "
                             "--device host",
                             p->runtime / 1000, p->runtime % 1000 / 10);
    if (e == cudaErrorNoDevice || (e == cudaSuccess && n == 0))
        return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                             "device cuda: there is a driver, but no card%s%s%s: use --device host",
                             visible ? " (CUDA_VISIBLE_DEVICES is \"" : "", visible ? visible : "",
                             visible ? "\")" : "");
    STK_TRY(cuda_check(e, "cudaGetDeviceCount", "opening", err));
    STK_TRY(cuda_check(cudaGetDeviceProperties(&p->card, 0), "cudaGetDeviceProperties", "opening",
                       err));
    if (p->card.major * 10 + p->card.minor < 75)
        return stk_error_set(
            err, STK_ERR_UNSUPPORTED, 0,
            "device cuda: %s has compute capability %d.%d, the kernels are built for "
            "7.5 and later: use another card (CUDA_VISIBLE_DEVICES) or --device host",
            p->card.name, p->card.major, p->card.minor);
    e = cudaSetDevice(0); /* the context, on the card; takes a while */
    if (e == cudaErrorMemoryAllocation)
        return stk_error_set(
            err, STK_ERR_NOMEM, 0,
            "device cuda: %s has no memory left for a context of CUDA: end what else "
            "runs on it",
            p->card.name);
    if (e == cudaErrorDevicesUnavailable)
        return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                             "device cuda: %s is in use by another process that has it alone "
                             "(exclusive mode)",
                             p->card.name);
    return cuda_check(e, "cudaSetDevice", p->card.name, err);
}

static stk_status probe(struct probe *p, struct stk_error *err)
{
    *p = (struct probe){ 0 };
    STK_TRY(probe_driver(p, err));
    return probe_card(p, err);
}

static stk_status memory_read(uint64_t *free_bytes, uint64_t *total_bytes, struct stk_error *err)
{
    size_t free_now = 0, total = 0;
    STK_TRY(cuda_check(cudaMemGetInfo(&free_now, &total), "cudaMemGetInfo", "what is free", err));
    *free_bytes = free_now;
    *total_bytes = total;
    return STK_OK;
}

static stk_status cuda_describe(char *text, size_t text_bytes, struct stk_error *err)
{
    struct probe p;
    struct cuda_lt lt;
    uint64_t free_bytes, total_bytes;
    char a[32], b[32], dnn[CUDA_DNN_TEXT_BYTES];
    STK_TRY(probe(&p, err));
    STK_TRY(memory_read(&free_bytes, &total_bytes, err));
    STK_TRY(cuda_lt_table(&lt, err));
    size_t version = lt.cublasLtGetVersion();
    cuda_lt_free(&lt);
    cuda_dnn_describe(dnn);
    snprintf(text, text_bytes,
             "%s: %s free of %s, compute capability %d.%d, driver for CUDA %d.%d, cuBLASLt %zu, %s",
             p.card.name, mem_size_format(free_bytes, a), mem_size_format(total_bytes, b),
             p.card.major, p.card.minor, p.driver / 1000, p.driver % 1000 / 10, version, dnn);
    return STK_OK;
}

/* --- memory ----------------------------------------------------------------------------------- */

static uint64_t less(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

/* What is free and within the cap, before the arena is there. */
static uint64_t memory_left(const struct cuda_dev *h, uint64_t free_bytes)
{
    if (h->cap_bytes == 0) return less(free_bytes, SLACK_BYTES);
    uint64_t taken = h->first_taken_bytes + less(h->first_free_bytes, free_bytes),
             left = less(h->cap_bytes, taken + SLACK_BYTES);
    return left < free_bytes ? left : free_bytes;
}

stk_status cuda_memory_look(struct cuda_dev *h, struct stk_error *err)
{
    uint64_t free_bytes, total_bytes;
    if (h->arena) return STK_OK;
    STK_TRY(memory_read(&free_bytes, &total_bytes, err));
    h->base.caps.memory_bytes = less(memory_left(h, free_bytes), h->own_bytes * CUDA_STREAMS_MAX) /
                                CUDA_ALIGN_BYTES * CUDA_ALIGN_BYTES;
    return STK_OK;
}

static stk_status memory_open(struct cuda_dev *h, uint64_t cap_bytes, struct stk_error *err)
{
    char asked[32], there[32], total[32];
    h->cap_bytes = cap_bytes;
    STK_TRY(memory_read(&h->first_free_bytes, &h->total_bytes, err));
    h->first_taken_bytes = less(h->total_bytes, h->first_free_bytes);
    if (h->first_taken_bytes > CONTEXT_MOST_BYTES) h->first_taken_bytes = CONTEXT_GUESS_BYTES;
    if (less(cap_bytes, h->first_taken_bytes) > h->first_free_bytes)
        return stk_error_set(
            err, STK_ERR_NOMEM, 0,
            "device cuda: --device-memory %s was given, %s has %s free of %s: give "
            "less, or end what else runs on it",
            mem_size_format(cap_bytes, asked), h->card, mem_size_format(h->first_free_bytes, there),
            mem_size_format(h->total_bytes, total));
    STK_TRY(cuda_memory_look(h, err));
    if (h->base.caps.memory_bytes == 0)
        return stk_error_set(
            err, STK_ERR_NOMEM, 0,
            "device cuda: of --device-memory %s nothing is left beside what CUDA takes "
            "by itself (%s): give more",
            mem_size_format(cap_bytes, asked),
            mem_size_format(h->first_taken_bytes + SLACK_BYTES, there));
    return STK_OK;
}

static stk_status cuda_reserve(struct dev *d, uint64_t size_bytes, void **out,
                               struct stk_error *err)
{
    struct cuda_dev *h = cuda_of(d);
    char asked[32], cap[32], where[96];
    if (h->arena)
        return stk_error_set(err, STK_ERR_STATE, 0, "device %s: its arena is reserved already",
                             d->caps.name);
    STK_TRY(cuda_memory_look(h, err));
    if (size_bytes > d->caps.memory_bytes)
        return stk_error_set(
            err, STK_ERR_NOMEM, 0,
            "device %s: an arena of %s (%llu bytes) was asked for, it has %s (%llu bytes) within "
            "--device-memory and beside what CUDA takes",
            d->caps.name, mem_size_format(size_bytes, asked), (unsigned long long)size_bytes,
            mem_size_format(d->caps.memory_bytes, cap), (unsigned long long)d->caps.memory_bytes);
    uint64_t rounded = (size_bytes + CUDA_ALIGN_BYTES - 1) / CUDA_ALIGN_BYTES * CUDA_ALIGN_BYTES;
    void *p = NULL;
    snprintf(where, sizeof where, "an arena of %s", mem_size_format(size_bytes, asked));
    cudaError_t e = cudaMalloc(&p, rounded + h->own_bytes * CUDA_STREAMS_MAX);
    STK_TRY(cuda_check(e, "cudaMalloc", where, err));
    h->arena = p;
    h->arena_bytes = size_bytes;
    h->own = h->arena + rounded;
    *out = p;
    return STK_OK;
}

static stk_status region_add(struct cuda_dev *h, void *base, uint64_t size_bytes,
                             struct stk_error *err)
{
    pthread_mutex_lock(&h->lock);
    bool room = h->n_regions < CUDA_REGIONS_MAX;
    if (room) h->region[h->n_regions++] = (struct cuda_region){ base, size_bytes };
    pthread_mutex_unlock(&h->lock);
    return room ? STK_OK
                : stk_error_set(err, STK_ERR_STATE, 0,
                                "device cuda: more than %d pieces of host memory were to be pinned",
                                CUDA_REGIONS_MAX);
}

static stk_status cuda_host_register(struct dev *d, void *base, uint64_t size_bytes,
                                     struct stk_error *err)
{
    struct cuda_dev *h = cuda_of(d);
    char asked[32], pinned[32];
    uint64_t sum = 0;
    cudaError_t e = cudaHostRegister(base, size_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (e == cudaSuccess) {
        stk_status st = region_add(h, base, size_bytes, err);
        if (st != STK_OK) (void)cudaHostUnregister(base);
        return st;
    }
    (void)cudaGetLastError(); /* said here, and no error of queued work */
    for (uint32_t i = 0; i < h->n_regions; i++) sum += h->region[i].size_bytes;
    return stk_error_set(
        err, STK_ERR_NOMEM, 0,
        "device cuda: %s of host memory could not be pinned (%s are): cudaHostRegister says %s "
        "(%s); give less --host-memory, or raise the limit of locked memory (ulimit -l, the "
        "container's memlock)",
        mem_size_format(size_bytes, asked), mem_size_format(sum, pinned), cudaGetErrorString(e),
        cudaGetErrorName(e));
}

static void cuda_host_unregister(struct dev *d, void *base)
{
    struct cuda_dev *h = cuda_of(d);
    bool found = false;
    pthread_mutex_lock(&h->lock);
    for (uint32_t i = 0; i < h->n_regions && !found; i++) {
        if (h->region[i].base != base) continue;
        h->region[i] = h->region[--h->n_regions];
        found = true;
    }
    pthread_mutex_unlock(&h->lock);
    if (found) (void)cudaHostUnregister(base);
}

bool cuda_registered(struct cuda_dev *h, const void *p, uint64_t size_bytes)
{
    const uintptr_t at = (uintptr_t)p;
    bool inside = false;
    pthread_mutex_lock(&h->lock);
    for (uint32_t i = 0; i < h->n_regions && !inside; i++) {
        const uintptr_t begin = (uintptr_t)h->region[i].base;
        inside = at >= begin && at - begin < h->region[i].size_bytes &&
                 size_bytes <= h->region[i].size_bytes - (at - begin);
    }
    pthread_mutex_unlock(&h->lock);
    return inside;
}

/* --- opening ---------------------------------------------------------------------------------- */

void cuda_numerics_write(struct cuda_dev *h)
{
    const size_t v = h->lt.cublasLtGetVersion(); /* 130002: 13.0.2 */
    char hash[16] = "none", attention[CUDA_DNN_TEXT_BYTES];
    uint32_t bits = h->matmul ? cuda_matmul_hash(h) : 0;
    if (bits) snprintf(hash, sizeof hash, "%08x", bits);
    cuda_dnn_numerics(h, attention);
    snprintf(h->base.caps.numerics, sizeof h->base.caps.numerics,
             "cuda;cc=%d.%d;cublaslt=%zu;matmul=%s;algo=%s;tiles=%d;attention=%.71s", h->cc_major,
             h->cc_minor, v,
             h->bf16_products   ? "bf16"
             : h->fp16_products ? "f32,fp16"
                                : "f32",
             hash, CUDA_TILES_VERSION, attention);
}

/* bf16 products are the tensor cores' from 8.0 on, fp16 ones from 7.5: auto takes them where the
 * parameters are of that type. They are many times faster, so nothing is measured. */
static stk_status choose_matmul(struct cuda_dev *h, enum dev_matmul asked, struct stk_error *err)
{
    if (asked == DEV_MATMUL_BF16 && h->cc_major < 8)
        return stk_error_set(
            err, STK_ERR_UNSUPPORTED, 0,
            "device cuda: --matmul bf16 was given, but %s (compute capability %d.%d) has "
            "no bf16 products, which came with 8.0: use f32, or --dtype fp16",
            h->card, h->cc_major, h->cc_minor);
    h->bf16_products = asked != DEV_MATMUL_F32 && h->cc_major >= 8;
    h->fp16_products = asked != DEV_MATMUL_F32;
    h->base.caps.matmul = h->bf16_products ? DEV_MATMUL_BF16 : DEV_MATMUL_F32;
    return STK_OK;
}

static void cuda_close(struct dev *d)
{
    struct cuda_dev *h = cuda_of(d);
    STK_ASSERT(h->streams_used == 0);
    cuda_dnn_close(h);
    if (h->matmul) cuda_matmul_close(h);
    while (h->n_regions) cuda_host_unregister(d, h->region[0].base);
    if (h->arena) (void)cudaFree(h->arena);
    cuda_lt_free(&h->lt);
    pthread_mutex_destroy(&h->lock);
    sys_free(h);
}

static stk_status open_card(struct cuda_dev *h, const struct dev_cfg *cfg, struct stk_error *err)
{
    struct probe p;
    STK_TRY(probe(&p, err));
    snprintf(h->card, sizeof h->card, "%.63s", p.card.name);
    h->cc_major = p.card.major;
    h->cc_minor = p.card.minor;
    h->runtime_version = p.runtime;
    STK_TRY(choose_matmul(h, cfg->matmul, err));
    STK_TRY(cuda_lt_table(&h->lt, err));
    STK_TRY(cuda_matmul_open(h, &h->matmul, err));
    cuda_dnn_open(h);
    STK_TRY(memory_open(h, cfg->memory_bytes, err));
    cuda_numerics_write(h);
    return STK_OK;
}

static stk_status cuda_open(const struct dev_cfg *cfg, struct dev **out, struct stk_error *err)
{
    struct cuda_dev *h = sys_calloc(1, sizeof *h);
    if (!h) return stk_error_set(err, STK_ERR_NOMEM, 0, "device cuda: no memory for its record");
    pthread_mutex_init(&h->lock, NULL);
    h->base.ex = cfg->ex;
    h->own_bytes = CUDA_OWN_BYTES;
    h->base.caps = (struct dev_caps){
        .kind = DEV_CUDA,
        .name = "cuda",
        .align_bytes = CUDA_ALIGN_BYTES,
        .copy_paced = true,
        .compute_threads = cfg->compute_threads,
    };
    stk_status st = open_card(h, cfg, err);
    if (st != STK_OK) {
        cuda_close(&h->base);
        return st;
    }
    *out = &h->base;
    return STK_OK;
}

static void cuda_work_measure(struct dev *d, bool on) { cuda_of(d)->measure = on; }

const struct dev_ops cuda_dev_ops = {
    .version = 1, /* of DEV_OPS_VERSION, as this file was written for */
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .reserve = cuda_reserve,
    .host_register = cuda_host_register,
    .host_unregister = cuda_host_unregister,
    .status_read = cuda_status,
    .stream_open = cuda_stream_open,
    .stream_close = cuda_stream_close,
    .stream_busy_ns = cuda_stream_busy_ns,
    .enqueue = cuda_stream_enqueue,
    .prepare = cuda_prepare,
    .work_read = cuda_work_read,
    .mark_init = cuda_mark_init,
    .mark_free = cuda_mark_free,
    .matmul_rate = cuda_matmul_rate,
    .describe = cuda_describe,
    .work_measure = cuda_work_measure,
};
