/* offload/adam_narrow_ref.c - narrow moments, one element at a time: the definition the SIMD variants
 * must equal bit for bit (formulas: adam_narrow.h).
 *
 * Base instruction set. Any thread, under cpu_ftz_enter. */
#include "offload/adam_narrow_impl.h"
#include "offload/adam_ref.h"

static uint32_t dither(uint32_t x, uint32_t key)
{
    x ^= x >> 16;
    x *= NARROW_MIX1;
    x ^= x >> 15 ^ key;
    x *= NARROW_MIX2;
    return x ^ x >> 15;
}

static uint16_t round_up_by(uint32_t bits, uint32_t r)
{
    uint32_t up = (bits + r) >> 16, cut = bits >> 16;
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(cut | 0x40u); /* stays a NaN */
    return (uint16_t)((up & 0x7f80u) == 0x7f80u ? cut : up);
}

static void widen_bf16(const uint16_t *in, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i++) out[i] = stk_bf16_to_f32(in[i]);
}

static void round_bf16(const float *m, const float *v, uint64_t n, uint32_t first,
                       const uint32_t key[2], uint16_t *m_out, uint16_t *v_out)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t r = dither(first + (uint32_t)i + key[0], key[1]);
        m_out[i] = round_up_by(stk_f32_bits(m[i]), r & 0xffffu);
        v_out[i] = round_up_by(stk_f32_bits(v[i]), r >> 16);
    }
}

static float value_of(const struct narrow_tree *t, uint32_t code, bool sign)
{
    uint32_t at = sign && code != NARROW_ONE_SIGNED ? code & 0x7fu : code;
    float f = (float)(at << 8);
    uint32_t i = stk_f32_bits(f) >> 23 & 15;
    float x = at ? adam_fma(f, t->width[i], t->offset[i]) : 0.0f;
    return sign && (code & 0x80u) ? -x : x;
}

static void decode(const uint8_t *code, const float *absmax, uint64_t n, bool sign, float *out)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    for (uint64_t i = 0; i < n; i++) out[i] = value_of(t, code[i], sign) * absmax[i / 64];
}

static uint8_t code_of(const struct narrow_tree *tree, float x, float inv, bool sign)
{
    float z = (sign ? stk_bits_f32(stk_f32_bits(x) & 0x7fffffffu) : x) * inv;
    z = z > NARROW_LEAST ? z : NARROW_LEAST;
    uint32_t i = stk_f32_bits(z) >> 24 & 15;
    float t = adam_fma(z, tree->slope[i], tree->start[i]), above = adam_fma(t, NARROW_FIFTH, tree->rest[i]);
    int32_t number = (int32_t)(t < above ? t : above);
    if (!sign) {
        if (!(x > 0.0f)) return 0;
        return number == 255 ? NARROW_ONE_UNSIGNED : (uint8_t)(number + 1);
    }
    if (!(stk_f32_bits(x) >> 31) || number == 0) return (uint8_t)number;
    return (uint8_t)(0x80 | (number > 127 ? 127 : number));
}

static void encode(const float *in, uint64_t n, bool sign, uint8_t *code, float *absmax)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    for (uint64_t i = 0; i < n; i += 64) {
        uint32_t most = 0; /* by bit patterns: NaNs, too, are the same in any order */
        for (uint64_t j = i; j < i + 64; j++) {
            uint32_t bits = stk_f32_bits(in[j]) & 0x7fffffffu;
            if (bits > most) most = bits;
        }
        float max = absmax[i / 64] = stk_bits_f32(most), inv = 4.0f / max;
        inv = FLT_MAX < inv ? FLT_MAX : inv; /* a NaN stays */
        for (uint64_t j = i; j < i + 64; j++) code[j] = code_of(t, in[j], inv, sign);
    }
}

const struct adam_narrow_fns adam_narrow__scalar = {
    .widen_bf16 = widen_bf16, .round_bf16 = round_bf16, .decode = decode, .encode = encode,
};
