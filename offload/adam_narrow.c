/* offload/adam_narrow.c - a step of Adam over narrow moments, tile by tile, and their way to fp32 and
 * back.
 *
 * Owns: tiles (a stack buffer of fp32 moments that stays in the first cache), keys of the stochastic
 * rounding. Must not know how an element is coded (the variants, adam_narrow_impl.h) nor why a step is
 * made. Pure; run by the members of the update team, and by whoever loads or saves. */
#include "offload/adam_narrow.h"
#include "base/numeric.h"
#include "offload/adam_undo.h"

#include <string.h>

enum { TILE = 1024, GROUP = ADAM_QUANT_ELEMS };

_Static_assert(TILE % GROUP == 0 && CHUNK_ALIGN_ELEMS == GROUP,
               "no group of elements is cut by a tile or a tensor");

static uint64_t round_group(uint64_t n) { return (n + GROUP - 1) / GROUP * GROUP; }

void adam_moments_at(const struct stk_layout *l, const struct stk_chunk *c, uint8_t *opt,
                     struct adam_moments *out)
{
    uint64_t n = c->n_elems, first = l->dtype == CHUNK_BF16 ? 2 : 4; /* bytes of low or master */
    enum chunk_moments kind = l->blocks[c->block].moments;
    uint64_t width = kind == CHUNK_MOMENTS_F32 ? 4 : kind == CHUNK_MOMENTS_BF16 ? 2 : 1;
    uint8_t *at = opt + first * n;
    *out = (struct adam_moments){ .kind = kind, .at = { at, at + width * n } };
    if (kind != CHUNK_MOMENTS_8BIT) return;
    out->absmax[0] = (float *)(void *)(at + 2 * n);
    out->absmax[1] = out->absmax[0] + n / GROUP;
}

static uint64_t splitmix(uint64_t *x)
{
    uint64_t z = *x += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

void adam_dither_key(const struct adam_dither *d, uint64_t elem, uint32_t key[2])
{
    uint64_t in[4] = { d->seed, d->update, d->block, elem >> 32 }, x = 0;
    for (int i = 0; i < 4; i++) {
        x ^= in[i];
        x = splitmix(&x);
    }
    key[0] = (uint32_t)x;
    key[1] = (uint32_t)(x >> 32);
}

/* n a multiple of 64, from too. */
static void widen(const struct adam_narrow_fns *f, const struct adam_moments *m, int which,
                  uint64_t from, uint64_t n, float *out)
{
    if (m->kind == CHUNK_MOMENTS_F32)
        memcpy(out, m->at[which] + 4 * from, 4 * n);
    else if (m->kind == CHUNK_MOMENTS_BF16)
        f->widen_bf16((const uint16_t *)(const void *)m->at[which] + from, n, out);
    else
        f->decode(m->at[which] + from, m->absmax[which] + from / GROUP, n, which == 0, out);
}

static void narrow(const struct adam_narrow_fns *f, const struct adam_moments *m, uint64_t from,
                   uint64_t n, const struct adam_dither *d, const float *exp_avg,
                   const float *exp_avg_sq)
{
    if (m->kind == CHUNK_MOMENTS_BF16) {
        uint32_t key[2];
        uint64_t elem = d->first_elem + from;
        adam_dither_key(d, elem, key);
        f->round_bf16(exp_avg, exp_avg_sq, n, (uint32_t)elem, key,
                      (uint16_t *)(void *)m->at[0] + from, (uint16_t *)(void *)m->at[1] + from);
        return;
    }
    f->encode(exp_avg, n, true, m->at[0] + from, m->absmax[0] + from / GROUP);
    f->encode(exp_avg_sq, n, false, m->at[1] + from, m->absmax[1] + from / GROUP);
}

/* Elements [at, at + n) of the span, with moments elsewhere. */
static struct adam_span tile_of(const struct adam_span *s, enum adam_layout layout, uint64_t at,
                                uint64_t n, float *exp_avg, float *exp_avg_sq)
{
    uint64_t other = layout == ADAM_FP16 ? 4 : 2;
    return (struct adam_span){ .n = n,
                               .param = (char *)s->param + at * 2,
                               .low_or_master = (char *)s->low_or_master + at * other,
                               .exp_avg = exp_avg,
                               .exp_avg_sq = exp_avg_sq,
                               .grad = (const char *)s->grad + at * 2,
                               .param_out = s->param_out ? (char *)s->param_out + at * 2 : NULL,
                               .way = { .ahead_elems = s->way.ahead_elems } };
}

/* The whole groups of a tile in one pass, by variants that can. Number of elements that were done. */
static uint64_t step_groups(const struct adam_kernel *k, enum adam_layout layout,
                            const struct adam_span *tile, const struct adam_moments *m,
                            uint64_t from, const struct adam_dither *d, const struct adam_coef *c)
{
    bool bf16 = m->kind == CHUNK_MOMENTS_BF16;
    void (*step)(const struct adam_span *, const struct adam_coef *, const struct adam_part *) =
        bf16 ? k->narrow->step_bf16[layout] : k->narrow->step_8bit[layout];
    struct adam_span s = *tile;
    s.n = s.n / GROUP * GROUP;
    if (!step || !s.n) return 0;
    struct adam_part p = { .at = { m->at[0] + from * (bf16 ? 2 : 1), m->at[1] + from * (bf16 ? 2 : 1) },
                           .first = (uint32_t)(d->first_elem + from) };
    if (bf16) adam_dither_key(d, d->first_elem + from, p.key);
    else for (int i = 0; i < 2; i++) p.absmax[i] = m->absmax[i] + from / GROUP;
    step(&s, c, &p);
    return s.n;
}

static void run_wide(const struct adam_kernel *k, enum adam_layout layout, const struct adam_span *s,
                     const struct adam_moments *m, uint64_t from, const struct adam_coef *c,
                     bool param_only)
{
    struct adam_span wide = *s;
    wide.exp_avg = (float *)(void *)m->at[0] + from;
    wide.exp_avg_sq = (float *)(void *)m->at[1] + from;
    if (param_only) adam_param_only(k, layout, &wide, c);
    else adam_run(k, layout, &wide, c);
}

void adam_narrow_run(const struct adam_kernel *k, enum adam_layout layout, const struct adam_span *s,
                     const struct adam_moments *m, uint64_t from, const struct adam_dither *d,
                     const struct adam_coef *c, bool param_only)
{
    STK_ASSERT(k && (layout == ADAM_BF16_SPLIT || layout == ADAM_FP16));
    if (m->kind == CHUNK_MOMENTS_F32) {
        run_wide(k, layout, s, m, from, c, param_only);
        return;
    }
    STK_ASSERT(from % GROUP == 0 && d->first_elem % GROUP == 0);
    STK_ASSERT(!param_only || (s->param_out && s->param_out != s->param));
    _Alignas(64) float exp_avg[TILE], exp_avg_sq[TILE];
    uint32_t saved = adam_begin();
    for (uint64_t at = 0, n; at < s->n; at += n) {
        /* tiles end at multiples of their size in the block's vector, and so at 2^32 */
        n = TILE - (d->first_elem + from + at) % TILE;
        if (n > s->n - at) n = s->n - at;
        struct adam_span t = tile_of(s, layout, at, n, exp_avg, exp_avg_sq);
        uint64_t done = param_only ? 0 : step_groups(k, layout, &t, m, from + at, d, c);
        if (done) {
            n = done;
            continue;
        }
        uint64_t all = round_group(n);
        widen(k->narrow, m, 0, from + at, all, exp_avg);
        widen(k->narrow, m, 1, from + at, all, exp_avg_sq);
        if (param_only) {
            k->param_only[layout](&t, c);
            continue;
        }
        k->fn[layout](&t, c);
        narrow(k->narrow, m, from + at, all, d, exp_avg, exp_avg_sq);
    }
    adam_end(saved);
}

void adam_moments_read(const struct adam_moments *m, int which, uint64_t from, uint64_t n, float *out)
{
    const struct adam_narrow_fns *f = adam_pick(NULL)->narrow;
    float tile[GROUP];
    uint32_t saved = adam_begin();
    for (uint64_t done = 0, k; done < n; done += k) {
        uint64_t skip = (from + done) % GROUP;
        k = n - done < GROUP - skip ? n - done : GROUP - skip;
        widen(f, m, which, from + done - skip, GROUP, tile);
        memcpy(out + done, tile + skip, 4 * k);
    }
    adam_end(saved);
}

void adam_moments_write(const struct adam_moments *m, int which, uint64_t from, uint64_t n,
                        const float *in)
{
    const struct adam_narrow_fns *f = adam_pick(NULL)->narrow;
    STK_ASSERT(from % GROUP == 0);
    uint32_t saved = adam_begin();
    for (uint64_t done = 0, k; done < n; done += k) {
        float tile[GROUP] = { 0 };
        k = n - done < GROUP ? n - done : GROUP;
        memcpy(tile, in + done, 4 * k);
        if (m->kind == CHUNK_MOMENTS_F32)
            memcpy(m->at[which] + 4 * (from + done), tile, 4 * k);
        else if (m->kind == CHUNK_MOMENTS_BF16)
            for (uint64_t i = 0; i < k; i++)
                ((uint16_t *)(void *)m->at[which])[from + done + i] = stk_f32_to_bf16(tile[i]);
        else
            f->encode(tile, GROUP, which == 0, m->at[which] + from + done,
                      m->absmax[which] + (from + done) / GROUP);
    }
    adam_end(saved);
}

/* A group of zeros keeps no absmax: times one that is not finite, zero would not be zero. */
static void forget_absmax(const struct adam_moments *m, uint64_t from, uint64_t n)
{
    static const uint8_t zeros[GROUP];
    for (int i = 0; i < 2; i++)
        for (uint64_t g = from / GROUP; g < round_group(from + n) / GROUP; g++)
            if (memcmp(m->at[i] + g * GROUP, zeros, GROUP) == 0) m->absmax[i][g] = 0;
}

void adam_moments_zero(const struct adam_moments *m, uint64_t from, uint64_t n)
{
    uint64_t width = m->kind == CHUNK_MOMENTS_F32 ? 4 : m->kind == CHUNK_MOMENTS_BF16 ? 2 : 1;
    for (int i = 0; i < 2; i++) memset(m->at[i] + width * from, 0, width * n);
    if (m->kind == CHUNK_MOMENTS_8BIT) forget_absmax(m, from, n);
}
