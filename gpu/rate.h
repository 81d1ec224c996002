/* gpu/rate.h - how fast this machine's matrix library and our own kernel multiply given shapes, each
 * call alone: what a step's products are judged by (bench/). No device and no stream is needed.
 *
 * WAYS. Operands in f32 or bf16, row-major, or with the right operand in the layout that the library
 * likes best for the shape (made beforehand, not in the time); or by our kernel on AMX tiles, packed too.
 * All operands are filled once and used again and again, so they come from the caches as far as these
 * reach.
 *
 * Application's thread; calls block. Errors: STK_ERR_NOMEM, STK_ERR_DEVICE (the library). */
#ifndef GPU_RATE_H
#define GPU_RATE_H

#include "base/status.h"

enum rate_way {
    RATE_F32, RATE_F32_PACKED, RATE_BF16, RATE_BF16_PACKED, RATE_BF16_TILES, RATE_WAYS
};
const char *rate_way_name(enum rate_way way);

/* c[m, n] = a[m, k] b[k, n]; `wide`: c of a bf16 product is f32 (a gradient of weights), else bf16. */
struct rate_shape {
    uint64_t m, n, k;
    bool wide;
};

struct rate;
/* Makes all primitives and operands (as large as the largest shape). `shapes` is copied. */
stk_status rate_open(uint32_t threads, const struct rate_shape *shapes, uint32_t n,
                      struct rate **out, struct stk_error *err);
void rate_close(struct rate *l); /* NULL allowed */
/* Runs shape i that way once; *seconds: 0 where that cannot be. The first run of each is slower. */
stk_status rate_run(struct rate *l, uint32_t i, enum rate_way way, double *seconds,
                     struct stk_error *err);

#endif
