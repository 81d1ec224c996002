/* base/numeric.h - 16-bit formats and the exact split of an fp32 master, scalar, inline.
 *
 * bf16: upper half of an fp32. fp16: IEEE binary16. Rounding to nearest even, except stk_split:
 * there the parameter is the master rounded with ties away from zero and `low` the signed 16-bit
 * rest of the bit patterns,
 *     bits(fp32) = (bf16 << 16) + low        (low in [-32768, 32767])
 * which is exact for every bit pattern (design section 4). A master whose rounding would carry a
 * finite number to infinity keeps that carry: the join still returns the same bits. */
#ifndef BASE_NUMERIC_H
#define BASE_NUMERIC_H

#include <stdint.h>
#include <string.h>

static inline uint32_t stk_f32_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float stk_bits_f32(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

static inline float stk_bf16_to_f32(uint16_t b) { return stk_bits_f32((uint32_t)b << 16); }

/* Nearest even; NaN stays a (quiet) NaN. */
static inline uint16_t stk_f32_to_bf16(float x)
{
    uint32_t u = stk_f32_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* The split of section 4: ties away from zero in magnitude, on the bit pattern. */
static inline void stk_split(float master, uint16_t *param, int16_t *low)
{
    uint32_t u = stk_f32_bits(master);
    uint16_t p = (uint16_t)((u + 0x8000u) >> 16);
    *param = p;
    *low = (int16_t)(uint16_t)(u - ((uint32_t)p << 16));
}
static inline float stk_join(uint16_t param, int16_t low)
{
    return stk_bits_f32(((uint32_t)param << 16) + (uint32_t)(int32_t)low);
}

float stk_fp16_to_f32(uint16_t h);
uint16_t stk_f32_to_fp16(float x); /* nearest even; overflow to infinity */

#endif
