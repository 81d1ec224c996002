/* tests/gpu/cuda/cuda_test.h - what the tests of the CUDA kernels share: device buffers of the SIMT
 * executor, launches under several of its orders, comparison with the host.
 *
 * A buffer of the device has exact bounds, may start off a 16-byte line, and what nobody has
 * written is known. Needs tests/test.h before it. */
#ifndef TESTS_GPU_CUDA_TEST_H
#define TESTS_GPU_CUDA_TEST_H

#include "gpu/cuda/kernels.h"
#include "tests/gpu/kern_test.h"
#include "tests/gpu/simt/simt.h"

/* --- buffers: all of a test's are freed by ct_free */
enum { CT_BUFFERS_MAX = 64 };
struct ct_buffer {
    void *base;
    uint8_t *data;
    uint64_t size_bytes;
};
static struct ct_buffer ct_buffers[CT_BUFFERS_MAX];
static int ct_buffers_n;

/* Unwritten memory of the device; it begins `off_bytes` behind a line. */
static inline void *ct_out(uint64_t size_bytes, uint64_t off_bytes, const char *name)
{
    if (ct_buffers_n == CT_BUFFERS_MAX) abort();
    struct ct_buffer *b = &ct_buffers[ct_buffers_n++];
    b->base = simt_alloc(size_bytes + off_bytes, name);
    b->data = (uint8_t *)b->base + off_bytes;
    b->size_bytes = size_bytes;
    return b->data;
}
static inline void *ct_in(const void *host, uint64_t size_bytes, uint64_t off_bytes,
                          const char *name)
{
    uint8_t *p = ct_out(size_bytes, off_bytes, name);
    memcpy(p, host, size_bytes);
    simt_written(p, size_bytes);
    return p;
}
/* Read-only: a write is a fault. */
static inline const void *ct_const(const void *host, uint64_t size_bytes, uint64_t off_bytes,
                                   const char *name)
{
    return ct_in(host, size_bytes, off_bytes, name);
}
static inline void ct_free(void)
{
    while (ct_buffers_n > 0) simt_free(ct_buffers[--ct_buffers_n].base);
}
static inline struct ops_scratch ct_scratch(uint64_t size_bytes)
{
    return (struct ops_scratch){ ct_out(size_bytes, 0, "scratch"), size_bytes };
}

/* --- launches */
/* No fault of the executor, and the launcher had none to report. */
static inline bool ct_ran(cudaError_t e)
{
    const char *why = simt_error();
    if (why) printf("# %s\n", why);
    const bool good = !why && e == cudaSuccess;
    simt_reset_error();
    return good;
}
/* Orders of blocks and threads: ascending, and two of the seed's. */
enum { CT_ORDERS = 3 };
static inline void ct_order(int i) { simt_seed(i == 0 ? 0 : test_seed() * 31 + (uint64_t)i); }

/* --- comparison */
static inline double ct_ulp(enum ops_dtype t, double x)
{
    int e = 0;
    if (x != 0) frexp(fabs(x), &e);
    const int digits = t == OPS_F32 ? 24 : t == OPS_BF16 ? 8 : 11, low = t == OPS_FP16 ? -13 : -125;
    return ldexp(1, (e < low ? low : e) - digits);
}
/* Rows of a buffer: element (r, c) at r * ld + c. */
struct ct_rows {
    uint64_t rows, cols, ld;
};
static inline struct ct_rows ct_row(uint64_t n) { return (struct ct_rows){ 1, n, n }; }

/* Every element: got within `ulps` units of its type and `slack` (absolute). The worst share of
 * that bound is kept in kt_worst. */
static inline bool ct_close(enum ops_dtype t, const void *got, const void *want, struct ct_rows s,
                            double ulps, double slack, const char *what)
{
    for (uint64_t r = 0; r < s.rows; r++)
        for (uint64_t c = 0; c < s.cols; c++) {
            const uint64_t i = r * s.ld + c;
            const double g = kt_get(t, got, i), w = kt_get(t, want, i);
            if (isnan(g) && isnan(w)) continue;
            if (kt_near(g, w, ulps * ct_ulp(t, w) + slack)) continue;
            printf("# %s[%" PRIu64 "][%" PRIu64 "] is %.9g, not %.9g\n", what, r, c, g, w);
            return false;
        }
    return true;
}
static inline bool ct_same(enum ops_dtype t, const void *got, const void *want, struct ct_rows s,
                           const char *what)
{
    const uint64_t width = ops_dtype_bytes(t);
    for (uint64_t r = 0; r < s.rows; r++)
        for (uint64_t c = 0; c < s.cols; c++) {
            const uint64_t i = r * s.ld + c;
            const char *g = (const char *)got + i * width, *w = (const char *)want + i * width;
            if (memcmp(g, w, width) == 0) continue;
            printf("# %s[%" PRIu64 "][%" PRIu64 "] is %.9g, not the same bits as %.9g\n", what, r,
                   c, kt_get(t, got, i), kt_get(t, want, i));
            return false;
        }
    return true;
}
/* Largest magnitude. */
static inline double ct_size(enum ops_dtype t, const void *p, struct ct_rows s)
{
    double most = 0;
    for (uint64_t r = 0; r < s.rows; r++)
        for (uint64_t c = 0; c < s.cols; c++) {
            const double x = fabs(kt_get(t, p, r * s.ld + c));
            if (x > most) most = x;
        }
    return most;
}
/* All elements of rows were written, nothing else of the buffer (the last row has no gap after it
 * unless `whole` rows were allocated). */
static inline bool ct_filled(enum ops_dtype t, const void *p, struct ct_rows s, uint64_t elems)
{
    const uint64_t gaps = elems - s.rows * s.cols;
    return simt_unwritten_bytes(p, elems * ops_dtype_bytes(t)) == gaps * ops_dtype_bytes(t);
}

/* The first order's result is kept, later ones must have its bits. */
struct ct_keep {
    uint8_t *bits;
    uint64_t size_bytes;
};
static inline bool ct_again(struct ct_keep *k, int order, const void *p, uint64_t size_bytes)
{
    if (order == 0) {
        free(k->bits);
        k->bits = malloc(size_bytes ? size_bytes : 1);
        if (!k->bits) abort();
        memcpy(k->bits, p, size_bytes);
        k->size_bytes = size_bytes;
        return true;
    }
    return k->size_bytes == size_bytes && memcmp(k->bits, p, size_bytes) == 0;
}
static inline void ct_keep_free(struct ct_keep *k, int n)
{
    for (int i = 0; i < n; i++) free(k[i].bits), k[i] = (struct ct_keep){ 0 };
}

static inline struct host_ctx ct_host(void)
{
    return (struct host_ctx){ .threads = 1, .isa = cpu_isa_best() };
}

#endif
