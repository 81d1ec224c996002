/* offload/adam_narrow.h - Adam with moments kept in fewer bits: bf16, rounded stochastically, or 8-bit
 * codes. Not the exact arithmetic of adam.h ("inexact"), but one arithmetic all the same: bit-equal in
 * every instruction set, for any chunk, slice, thread count and placement.
 *
 * A step widens moments to fp32, does the step of adam.h on them, and narrows what it made; the parameter
 * comes from the fp32 moments before they are narrowed. Variants do so in one pass where they can.
 *
 * BF16. exp_avg and exp_avg_sq are bf16. New bits are (bits(x) + r) >> 16 with r uniform in [0, 65536):
 * up with a probability of the part that is cut off, so the mean over r is x (stochastic rounding; with
 * nearest rounding exp_avg_sq would never decay: 0.999 is less than half a bf16 step). A finite number
 * that would carry to infinity is cut instead. r of an element, 16 bits each for the two moments
 * (exp_avg: the lower ones), on 32 bits:
 *     x = low32(i) + key[0];  x ^= x >> 16;  x *= 0x21f0aaad;  x ^= (x >> 15) ^ key[1];
 *     x *= 0xd35a2d97;  r = x ^ x >> 15
 * where i is the element's place in its block's flat vector, and the key two words of splitmix64
 * (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014) over the run's seed, the
 * update's number, the block, and the upper half of i. Nothing else goes in. Shifts and multipliers are
 * those of Wellons' "hash prospector" (public domain), the least biased he found with two
 * multiplications; every step is one to one, so that over the keys r is exactly uniform.
 *
 * 8BIT. Block-wise dynamic quantization after Dettmers, Lewis, Shleifer & Zettlemoyer, "8-bit optimizers
 * via block-wise quantization" (arXiv 2110.02861), sections 2 and 3: x / absmax of its quantization block
 * is stored as a value of a dynamic tree: as many leading zeros as it is decades below 1, a one,
 * and the remaining bits divide that decade linearly. Decade d = 0..6 of [0.1, 1] x 10^(d-6) has 2^d (exp_avg,
 * whose eighth bit is the sign) or 2^(d+1) (exp_avg_sq, unsigned) equal parts, and a code stands for the
 * middle of its part:
 *     exp_avg      0: zero; 0x80: 1; else bit 7 the sign, below it 2^d + part
 *     exp_avg_sq   0: zero; 1: 1;    else 2^(d+1) + part
 * A block is 64 elements, not the paper's 2,048: 64 is what tensors and every cut of a chunk are
 * aligned to, so no block mixes tensors or depends on how a vector is cut; smaller blocks only make the
 * error smaller, for 1/8 byte a parameter. Two more departures. An exp_avg_sq above zero never becomes
 * zero but the smallest code, since what is divided by its root would explode. And a number gets the code
 * of the part that it lies in, where the paper takes the nearest value: the same but for the first fifth
 * of a decade's first part, which the last value of the decade below is nearer to, and for the last part's
 * end, nearer to 1. The bound of the error, half a part, is the same; nothing needs to be searched
 * (formulas: adam_narrow_impl.h; all borders of the uppermost decade lie 2e-6 lower, so that the largest
 * itself gets the code for 1 whatever rounding does; if negative, the last part). exp_avg is zero under
 * 0.275e-6. There is no randomness. Blocks of tensors that the client calls embeddings keep fp32 moments,
 * as the paper's stable embedding has it (stk_tensor_desc.embedding).
 *
 * Earlier versions took the nearest value and another dither: what they stored means the same here.
 *
 * What all zeros mean: moments of zero, in each of the formats.
 *
 * Elements are counted in the chunk. `from` is a multiple of 64; arrays are touched up to the next multiple
 * of 64 behind the last element, where chunks have padding that holds zeros. Any thread; nothing is
 * allocated; subnormals are flushed as in adam.h, here too when only reading. */
#ifndef OFFLOAD_ADAM_NARROW_H
#define OFFLOAD_ADAM_NARROW_H

#include "offload/adam.h"
#include "offload/chunk.h"

#define ADAM_QUANT_ELEMS 64u /* elements that share an absmax */

struct adam_moments {        /* where the moments of one chunk lie: [0] exp_avg, [1] exp_avg_sq */
    enum chunk_moments kind;
    uint8_t *at[2];          /* n floats, bf16 values or codes */
    float *absmax[2];        /* CHUNK_MOMENTS_8BIT: n / 64 each */
};
/* Of the chunk whose state CHUNK_OPT lies at `opt`. */
void adam_moments_at(const struct stk_layout *l, const struct stk_chunk *c, uint8_t *opt,
                     struct adam_moments *out);

struct adam_dither {         /* what stochastic rounding depends on beside the element's place */
    uint64_t seed, update;   /* of the run; number of the update that is made */
    uint32_t block;
    uint64_t first_elem;     /* of the chunk, in the block's vector */
};

/* The step of adam_run (and of adam_param_only, if param_only) over s, whose moments (s->exp_avg and
 * exp_avg_sq are not read) are elements [from, from + s->n) of `m`. Kind CHUNK_MOMENTS_F32: exactly
 * those functions. */
void adam_narrow_run(const struct adam_kernel *k, enum adam_layout layout, const struct adam_span *s,
                     const struct adam_moments *m, uint64_t from, const struct adam_dither *d,
                     const struct adam_coef *c, bool param_only);

/* Elements [from, from + n) of moment `which` as fp32, exact; from may be any here. */
void adam_moments_read(const struct adam_moments *m, int which, uint64_t from, uint64_t n, float *out);
/* And back: to nearest, ties to even (bf16). For loads from another format; 8-bit: whole blocks, what is
 * missing of the last one counts as zero. */
void adam_moments_write(const struct adam_moments *m, int which, uint64_t from, uint64_t n,
                        const float *in);
/* Sets elements to zero; from may be any here. */
void adam_moments_zero(const struct adam_moments *m, uint64_t from, uint64_t n);

struct adam_part { /* moments of the elements of a span */
    uint8_t *at[2];    /* bf16 values or codes */
    float *absmax[2];
    uint32_t first, key[2]; /* bf16: of the dither, as below */
};

/* What the variants have (adam_kernels[]). n: a multiple of 64. */
struct adam_narrow_fns {
    void (*widen_bf16)(const uint16_t *in, uint64_t n, float *out);
    /* both moments; `first`: low half of the first element's place */
    void (*round_bf16)(const float *m, const float *v, uint64_t n, uint32_t first,
                       const uint32_t key[2], uint16_t *m_out, uint16_t *v_out);
    void (*decode)(const uint8_t *code, const float *absmax, uint64_t n, bool sign, float *out);
    void (*encode)(const float *in, uint64_t n, bool sign, uint8_t *code, float *absmax);
    /* The whole step in one pass, by adam_layout: the same as widening, the kernel's step and narrowing.
     * s->n a multiple of 64; s->exp_avg and exp_avg_sq are not read. NULL: only those three. */
    void (*step_bf16[ADAM_F32])(const struct adam_span *s, const struct adam_coef *c,
                                const struct adam_part *p);
    void (*step_8bit[ADAM_F32])(const struct adam_span *s, const struct adam_coef *c,
                                const struct adam_part *p);
};
void adam_dither_key(const struct adam_dither *d, uint64_t elem, uint32_t key[2]);

#endif
