/* base/numeric.c - IEEE binary16 in integer arithmetic.
 *
 * Owns: nothing. Must not know: rounding modes of the processor, flush-to-zero (both would change
 * results; integers do not see them). This is the reference that vector kernels are compared with.
 * Format: IEEE 754-2019, binary16 and binary32.
 * Thread: any. */
#include "base/numeric.h"

float stk_fp16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu,
             fraction = h & 0x3ffu;
    if (exponent == 0x1fu) {
        uint32_t quiet =
            fraction ? 0x400000u : 0; /* as the hardware conversion: a NaN comes out quiet */
        return stk_bits_f32(sign | 0x7f800000u | (fraction << 13) | quiet);
    }
    if (exponent == 0) {
        if (fraction == 0) return stk_bits_f32(sign);
        /* fraction x 2^-24: move its top bit to the place of the hidden one */
        uint32_t shift = (uint32_t)__builtin_clz(fraction) - 21u;
        fraction = (fraction << shift) & 0x3ffu;
        return stk_bits_f32(sign | ((113u - shift) << 23) | (fraction << 13));
    }
    return stk_bits_f32(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

/* value >> shift, rounded to nearest, ties to even; shift in [1, 31] */
static uint32_t shift_nearest_even(uint32_t value, uint32_t shift)
{
    uint32_t kept = value >> shift, rest = value & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    return kept + (rest > half || (rest == half && (kept & 1u)));
}

uint16_t stk_f32_to_fp16(float x)
{
    uint32_t u = stk_f32_bits(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x47800000u) return (uint16_t)(sign | 0x7c00u); /* 65536 and more, infinity */
    if (magnitude
        >= 0x38800000u) /* normal: a carry may reach the exponent, and from 65520 on infinity */
        return (uint16_t)(sign | shift_nearest_even(magnitude - (112u << 23), 13));
    uint32_t exponent = magnitude >> 23;
    if (exponent < 102)
        return (
            uint16_t)sign; /* below 2^-25: half of the smallest subnormal rounds to even, zero */
    uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
    return (uint16_t)(sign | shift_nearest_even(fraction, 126u - exponent));
}
