/* offload/adam_undo.h - the Adam step that can be taken back to the bit, and the step that only
 * makes the new parameter (design section 6: `speculate` and `split`).
 *
 * TAKING BACK. A step of adam.h is inverted in fp32 with the same gradient and coefficients, the
 * parameter first (it needs the new moments), then exp_avg, then exp_avg_sq. (Divisions by
 * constants are fma(1 / beta - 1, x, x): as near as a division, and faster.) Rounding makes the
 * result miss the old value by a few units in the last place, so the step that records stores,
 * for each element, the distance between the old value and what the inverse gives: the
 * difference of the bit patterns as 32-bit integers, which wraps, so that adding it is exact
 * whatever the two are. 4 bits for exp_avg, 2 for exp_avg_sq, 2 for the parameter (its fp32
 * master). An element whose distances do not fit goes with its old values to a side list of
 * bounded size, and one whose inverse is a NaN. Both directions run the same operations, so the
 * inverse at recording time and at undo time agree to the bit, in every variant. Infinities and
 * zero divisors in the inverse are no special case: the distance does not fit.
 *
 * Works for any finite or non-finite input: after adam_undo the state is what it was before
 * adam_step_recorded, bit for bit, subnormal moments and masters, too, although every variant
 * reads them as zero (FTZ, DAZ): the distance is taken to their true bits. Of ADAM_FP16 the
 * 16-bit parameter is not recorded: it is the old master's rounding, as always.
 *
 * RECORD. One byte an element (`code`) and the side list. When the list would overflow, the span
 * is put back as it was and the call says so; the chunk then waits for the norm. A span has one
 * record: slices of a chunk that several threads take need one each (parts of one code array and
 * of one list). Variants make the same records and read each other's. `code` and `param_out`
 * that begin on a cache line are written past the caches (1 and 2 bytes an element of traffic
 * less): cut spans at multiples of 64 elements. span->way.stream does not count here.
 *
 * How long a list: 1.0-1.1 % of the elements is the mean once moments are warm, 1.3 % the most
 * seen, 2.5 % in rows touched in one step of a hundred, 1.3 % at step 10, 9 % at step 3, 23 % at
 * step 2 (tests/offload/test_adam_undo_share.c prints the table): n / 64 entries, 0.25 bytes an
 * element, serve all but the first steps.
 *
 * Pure functions; any thread; nothing is allocated. Layouts ADAM_BF16_SPLIT and ADAM_FP16. beta1
 * or beta2 of 0: not invertible, see adam_undo_possible. */
#ifndef OFFLOAD_ADAM_UNDO_H
#define OFFLOAD_ADAM_UNDO_H

#include "offload/adam.h"

struct adam_side {          /* old values of one element: 16 bytes */
    uint32_t elem;          /* inside the span; ascending in the list */
    union {
        struct { uint16_t param; int16_t low; } split; /* ADAM_BF16_SPLIT */
        uint32_t master;                               /* ADAM_FP16: bits of the fp32 master */
    };
    uint32_t exp_avg, exp_avg_sq; /* bits */
};

struct adam_record {        /* of one span of at most UINT32_MAX elements */
    uint8_t *code;          /* n bytes */
    struct adam_side *side; /* room for side_cap entries */
    uint32_t side_cap, side_n;
};

/* True: steps with these coefficients can be taken back (betas in (0, 1)). */
bool adam_undo_possible(const struct adam_coef *c);

/* The step of adam_run, the same bits, with a record of how to undo it. span->param_out must be
 * NULL. False: more than side_cap elements did not fit: the state is bit-unchanged. */
bool adam_step_recorded(const struct adam_kernel *k, enum adam_layout layout,
                        const struct adam_span *s, const struct adam_coef *c,
                        struct adam_record *r);
/* Takes it back. `s` (with the gradient) and `c` as they were. */
void adam_undo(const struct adam_kernel *k, enum adam_layout layout, const struct adam_span *s,
               const struct adam_coef *c, const struct adam_record *r);

/* Only the new 16-bit parameter, into s->param_out (not NULL, not s->param): state, gradient and
 * s->param are only read. 14 bytes read, 2 written an element (ADAM_BF16_SPLIT). A later
 * adam_run with the same span and coefficients (param_out the same buffer) makes the state that
 * belongs to it. */
void adam_param_only(const struct adam_kernel *k, enum adam_layout layout,
                     const struct adam_span *s, const struct adam_coef *c);

#endif
