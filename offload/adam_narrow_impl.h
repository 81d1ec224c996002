/* offload/adam_narrow_impl.h - constants that the variants of the narrow moments share. Internal to
 * offload/adam_narrow*.c.
 *
 * Tables of the dynamic tree (adam_narrow.h), made for a look-up in one register: sixteen floats.
 *
 * From codes. `at` is the code without its sign (but 0x80 itself for 0x80), f = 256 at. f's exponent tells
 * the decade: x = fma(f, width, offset), entries by the exponent's lowest four bits, 7 to 14; 15 is 7
 * again, for variants of eight lanes: entries from 8 on by three bits. Entry 0 is for f = 0: exp_avg_sq's
 * zero, and exp_avg's 0x80 where `at` is made by a mask (-1, whose sign turns; zero is apart there).
 *
 * To codes. z = 4 |x| / absmax, so that the values to tell apart are in [2^-29, 8), and the upper bits of
 * the exponent of z, four of them, tell in which range of a factor four it lies. A decade is more than
 * that: at most one border lies in a range. t = fma(z, slope, start) is the code in the decade below that
 * border, with its fraction; above, parts are five times as wide (ten times, by twice as many), so
 *     number = min(t, fma(t, 1/5, rest))         rest: 4/5 of the border's number
 * and its whole part is the code without its sign. Ranges with no border have the next one's above.
 * Numbers of exp_avg_sq are codes less one: 255 is 1, and 0 is left to zero. */
#ifndef OFFLOAD_ADAM_NARROW_IMPL_H
#define OFFLOAD_ADAM_NARROW_IMPL_H

#include "offload/adam_variants.h"

#include <float.h>

enum { NARROW_ONE_SIGNED = 0x80, NARROW_ONE_UNSIGNED = 1 };

#define NARROW_LEAST 0x1p-28f /* a smaller z counts as this one, a NaN too */
#define NARROW_FIFTH 0.2f

struct narrow_tree {
    float width[16], offset[16];
    float slope[16], start[16], rest[16];
};

/* u: 0 signed, 1 unsigned. A decade d ends at E(d) and has 2^(d+u) parts. */
#define NARROW_E(d)                                                                             \
    ((d) == 0   ? 1e-6                                                                          \
     : (d) == 1 ? 1e-5                                                                          \
     : (d) == 2 ? 1e-4                                                                          \
     : (d) == 3 ? 1e-3                                                                          \
     : (d) == 4 ? 1e-2                                                                          \
     : (d) == 5 ? 1e-1                                                                          \
                : 1.0)
#define NARROW_WIDTH(d, u) (0.9 * NARROW_E(d) / (double)(1 << ((d) + (u))))
#define NARROW_OFFSET(d, u) (NARROW_WIDTH(d, u) / 2 - 0.8 * NARROW_E(d))
#define NARROW_SLOPE(d, u) (0.25 / NARROW_WIDTH(d, u))

/* at = 1, at = 2 .. 127 or 255 by decades, at = 128. */
#define NARROW_FROM(f, u, zero, one, last)                                                              \
    { zero, 0, 0, 0, 0, 0, 0, one, f(1 - (u), u), f(2 - (u), u), f(3 - (u), u), f(4 - (u), u),         \
      f(5 - (u), u), f(6 - (u), u), last, one }
#define NARROW_F_WIDTH(d, u) (float)(NARROW_WIDTH(d, u) / 256)
#define NARROW_F_OFFSET(d, u) (float)NARROW_OFFSET(d, u)

/* Ranges [2^(2i-31), 2^(2i-29)) for i = 1..15; 0: [2, 8). */
#define NARROW_TO(f, u, below, least)                                                            \
    { f(6, u), below, below, below, below, least, f(0, u), f(1, u), f(1, u), f(2, u), f(3, u),   \
      f(3, u), f(4, u), f(4, u), f(5, u), f(6, u) }
#define NARROW_F_SLOPE(d, u) (float)NARROW_SLOPE(d, u)
#define NARROW_BORDER(d, u) ((1 << ((d) + 1 + (u))) - (u))
/* the last border, and its line with it, a little early: absmax / absmax is 1 but for rounding */
#define NARROW_F_START(d, u) \
    (float)(NARROW_BORDER(d, u) - NARROW_SLOPE(d, u) * 4 * ((d) == 6 ? 1 - 2e-6 : NARROW_E(d)))
#define NARROW_F_REST(d, u) (float)(0.8 * NARROW_BORDER(d, u))

/* [0] unsigned: below its first part is its first part. [1] signed: zero up to 0.275e-6, halfway to the
 * first value. */
static const struct narrow_tree narrow_tree[2] = {
    { .width = NARROW_FROM(NARROW_F_WIDTH, 1, 0, 0, NARROW_F_WIDTH(6, 1)),
      .offset = NARROW_FROM(NARROW_F_OFFSET, 1, 0, 1, NARROW_F_OFFSET(6, 1)),
      .slope = NARROW_TO(NARROW_F_SLOPE, 1, 0, 0),
      .start = NARROW_TO(NARROW_F_START, 1, 1.5f, 1.5f),
      .rest = NARROW_TO(NARROW_F_REST, 1, 2, 2) },
    { .width = NARROW_FROM(NARROW_F_WIDTH, 0, 0, NARROW_F_WIDTH(0, 0), 0),
      .offset = NARROW_FROM(NARROW_F_OFFSET, 0, -1, NARROW_F_OFFSET(0, 0), -1),
      .slope = NARROW_TO(NARROW_F_SLOPE, 0, 0, 1e6f),
      .start = NARROW_TO(NARROW_F_START, 0, 0.5f, -0.1f),
      .rest = NARROW_TO(NARROW_F_REST, 0, 1, 0.8f) },
};

/* A step of narrow moments in one pass; `fn(s, c, part, layout, l2)` must be ADAM_INLINE. */
#define ADAM_DEFINE_STEP(name, fn, layout)                                                \
    static void name(const struct adam_span *s, const struct adam_coef *c,                \
                     const struct adam_part *part)                                        \
    {                                                                                     \
        if (c->l2 != 0.0f)                                                                \
            fn(s, c, part, layout, true);                                                 \
        else                                                                              \
            fn(s, c, part, layout, false);                                                \
    }

/* The dither (adam_narrow.h). */
#define NARROW_MIX1 0x21f0aaadu
#define NARROW_MIX2 0xd35a2d97u

#endif
