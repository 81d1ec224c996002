/* offload/adam_narrow_ref.c - narrow moments, one element at a time: the definition the SIMD variants
 * must equal bit for bit (formulas: adam_narrow.h).
 *
 * Base instruction set. Any thread, under cpu_ftz_enter. */
#include "offload/adam_narrow_impl.h"
#include "offload/adam_ref.h"

static uint32_t mix(uint32_t h)
{
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    return h ^ h >> 16;
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
        uint32_t r = mix(mix((first + (uint32_t)i) ^ key[0]) + key[1]);
        m_out[i] = round_up_by(stk_f32_bits(m[i]), r & 0xffffu);
        v_out[i] = round_up_by(stk_f32_bits(v[i]), r >> 16);
    }
}

static float value_of(const struct narrow_tree *t, uint32_t code, bool sign)
{
    uint32_t at = sign ? code & 0x7fu : code, d = 0;
    if (code == (sign ? (uint32_t)NARROW_ONE_SIGNED : (uint32_t)NARROW_ONE_UNSIGNED)) return 1.0f;
    if (at == 0) return 0.0f;
    while (d < 6 && at >= (uint32_t)t->base[d + 1]) d++;
    float x = adam_fma((float)(at - (uint32_t)t->base[d]), t->width[d], t->first[d]);
    return sign && (code & 0x80u) ? -x : x;
}

static void decode(const uint8_t *code, const float *absmax, uint64_t n, bool sign, float *out)
{
    const struct narrow_tree *t = &narrow_tree[sign];
    for (uint64_t i = 0; i < n; i++) out[i] = value_of(t, code[i], sign) * absmax[i / 64];
}

static uint8_t code_of(const struct narrow_tree *t, float x, float absmax, bool sign)
{
    float y = stk_bits_f32(stk_f32_bits(x) & 0x7fffffffu) / absmax; /* 0 / 0: below everything */
    int d = -1;
    bool negative = sign && stk_f32_bits(x) >> 31;
    for (int k = 0; k < 7; k++) d += y >= t->least[k];
    if (d < 0) return !sign && x > 0.0f ? (uint8_t)t->base[0] : 0;
    if (y >= t->least[7] && !negative) return sign ? NARROW_ONE_SIGNED : NARROW_ONE_UNSIGNED;
    int part = (int)adam_fma(y, t->scale[d], t->shift[d]);
    part = part < 0 ? 0 : part > t->last[d] ? t->last[d] : part;
    return (uint8_t)(t->base[d] + part + (negative ? 0x80 : 0));
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
        float max = absmax[i / 64] = stk_bits_f32(most);
        for (uint64_t j = i; j < i + 64; j++) code[j] = code_of(t, in[j], max, sign);
    }
}

const struct adam_narrow_fns adam_narrow__scalar = { widen_bf16, round_bf16, decode, encode };
