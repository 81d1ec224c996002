/* offload/adam_narrow_impl.h - constants that the variants of the narrow moments share. Internal to
 * offload/adam_narrow*.c.
 *
 * The dynamic tree by decades d = 0..6 (adam_narrow.h). An eighth entry is there for eight lanes and
 * never wins. Code 2^(d+u) + part (u = 0 signed, 1 unsigned) stands for first[d] + part * width[d]; the
 * decade of y is the last one with y >= least[d], halfway between the smallest value of d and the
 * largest of d - 1 (of 0 and the smallest for d = 0); its part is floor(y * scale[d] + shift[d]), kept
 * in the decade; from least[7] on y is nearest to 1, which has a code of its own. */
#ifndef OFFLOAD_ADAM_NARROW_IMPL_H
#define OFFLOAD_ADAM_NARROW_IMPL_H

#include "offload/adam_variants.h"

enum { NARROW_ONE_SIGNED = 0x80, NARROW_ONE_UNSIGNED = 1 };

struct narrow_tree {
    float first[8], width[8], least[8], scale[8], shift[8];
    int32_t base[8], last[8]; /* code of the decade's first part; number of its last part */
};

#define NARROW_E(d)                                                                             \
    ((d) == 0   ? 1e-6                                                                          \
     : (d) == 1 ? 1e-5                                                                          \
     : (d) == 2 ? 1e-4                                                                          \
     : (d) == 3 ? 1e-3                                                                          \
     : (d) == 4 ? 1e-2                                                                          \
     : (d) == 5 ? 1e-1                                                                          \
                : 1.0)
#define NARROW_WIDTH(d, u) (0.9 * NARROW_E(d) / (double)(1 << ((d) + (u))))
#define NARROW_FIRST(d, u) (0.1 * NARROW_E(d) + NARROW_WIDTH(d, u) / 2)
#define NARROW_LAST(d, u) (NARROW_E(d) - NARROW_WIDTH(d, u) / 2)
#define NARROW_ALL(f, u, end) { f(0, u), f(1, u), f(2, u), f(3, u), f(4, u), f(5, u), f(6, u), end }
#define NARROW_F_FIRST(d, u) (float)NARROW_FIRST(d, u)
#define NARROW_F_WIDTH(d, u) (float)NARROW_WIDTH(d, u)
#define NARROW_F_LEAST(d, u) \
    (float)(((d) == 0 ? 0.0 : NARROW_LAST((d) == 0 ? 0 : (d)-1, u)) / 2 + NARROW_FIRST(d, u) / 2)
#define NARROW_F_SCALE(d, u) (float)(1.0 / NARROW_WIDTH(d, u))
#define NARROW_F_SHIFT(d, u) (float)(-0.1 * NARROW_E(d) / NARROW_WIDTH(d, u))
#define NARROW_I_BASE(d, u) 1 << ((d) + (u))
#define NARROW_I_LAST(d, u) (1 << ((d) + (u))) - 1
#define NARROW_TREE(u)                                                         \
    {                                                                          \
        .first = NARROW_ALL(NARROW_F_FIRST, u, 0),                             \
        .width = NARROW_ALL(NARROW_F_WIDTH, u, 0),                             \
        .least = NARROW_ALL(NARROW_F_LEAST, u, (float)((NARROW_LAST(6, u) + 1) / 2)), \
        .scale = NARROW_ALL(NARROW_F_SCALE, u, 0),                             \
        .shift = NARROW_ALL(NARROW_F_SHIFT, u, 0),                             \
        .base = NARROW_ALL(NARROW_I_BASE, u, 0),                               \
        .last = NARROW_ALL(NARROW_I_LAST, u, 0),                               \
    }
/* [0] unsigned, [1] signed */
static const struct narrow_tree narrow_tree[2] = { NARROW_TREE(1), NARROW_TREE(0) };

#endif
