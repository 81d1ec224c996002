/* offload/adam_undo.c - running the Adam step that can be taken back, taking it back, and making
 * only the new parameter, under the right floating point mode.
 *
 * Owns what the variants share: the coefficients of the inverse, the side list's way back into
 * the state, and the retreat when the list is full. Must not know how an element is coded (the
 * variants, adam_undo_impl.h) nor when a step is speculated. Pure functions, run by any thread
 * (in training: the members of the update team). */
#include "offload/adam_undo.h"

#include "offload/adam_undo_impl.h"

/* Before the side list's elements come back into a part of the span, the inverse has gone over it:
 * small enough that it is still in cache. */
enum { UNDO_PART = 2048 };

bool adam_undo_possible(const struct adam_coef *c)
{
    return c->beta1 > 0.0f && c->beta1 < 1.0f && c->beta2 > 0.0f && c->beta2 < 1.0f;
}

/* A divisor of zero gives infinities, a distance that never fits, a state that comes back from the
 * side list. */
static void inverse_make(const struct adam_coef *c, struct adam_inverse *inv)
{
    inv->beta1 = (float)(1.0 / (double)c->beta1 - 1.0);
    inv->beta2 = (float)(1.0 / (double)c->beta2 - 1.0);
    inv->decay = (float)(1.0 / (1.0 + (double)c->decay) - 1.0);
}

static uint64_t other_bytes(enum adam_layout layout) { return layout == ADAM_FP16 ? 4 : 2; }

/* Elements [at, at + n) of the span; in place. */
static struct adam_span part_of(const struct adam_span *s, enum adam_layout layout, uint64_t at,
                                uint64_t n)
{
    return (struct adam_span){ .n = n,
                               .param = (char *)s->param + at * 2,
                               .low_or_master = (char *)s->low_or_master + at * other_bytes(layout),
                               .exp_avg = s->exp_avg + at,
                               .exp_avg_sq = s->exp_avg_sq + at,
                               .grad = (const char *)s->grad + at * 2,
                               .way = s->way };
}

/* The first n elements of the span. */
static void take_back(const struct adam_kernel *k, enum adam_layout layout,
                      const struct adam_span *s, uint64_t n, const struct adam_coef *c,
                      const struct adam_inverse *inv, const struct adam_record *r)
{
    uint32_t next = 0;
    for (uint64_t at = 0; at < n; at += UNDO_PART) {
        uint64_t end = n - at < UNDO_PART ? n : at + UNDO_PART;
        struct adam_span part = part_of(s, layout, at, end - at);
        k->undo[layout](&part, c, inv, r->code + at);
        for (; next < r->side_n && r->side[next].elem < end; next++)
            adam_put_back(s, layout, &r->side[next]);
    }
}

static void check(const struct adam_kernel *k, enum adam_layout layout, const struct adam_span *s)
{
    STK_ASSERT(k && (layout == ADAM_BF16_SPLIT || layout == ADAM_FP16));
    STK_ASSERT(s->n == 0 ||
               (s->param && s->low_or_master && s->exp_avg && s->exp_avg_sq && s->grad));
}

bool adam_step_recorded(const struct adam_kernel *k, enum adam_layout layout,
                        const struct adam_span *s, const struct adam_coef *c, struct adam_record *r)
{
    check(k, layout, s);
    STK_ASSERT(!s->param_out && s->n <= UINT32_MAX && (r->code || s->n == 0) &&
               (r->side || r->side_cap == 0));
    r->side_n = 0;
    if (s->n == 0) return true;
    struct adam_inverse inv;
    inverse_make(c, &inv);
    uint32_t saved = adam_begin();
    uint64_t done = k->record[layout](s, c, &inv, r);
    if (done < s->n) {
        take_back(k, layout, s, done, c, &inv, r);
        r->side_n = 0;
    }
    adam_end(saved);
    return done == s->n;
}

void adam_undo(const struct adam_kernel *k, enum adam_layout layout, const struct adam_span *s,
               const struct adam_coef *c, const struct adam_record *r)
{
    check(k, layout, s);
    STK_ASSERT(!s->param_out && (r->code || s->n == 0));
    struct adam_inverse inv;
    inverse_make(c, &inv);
    uint32_t saved = adam_begin();
    take_back(k, layout, s, s->n, c, &inv, r);
    adam_end(saved);
}

void adam_param_only(const struct adam_kernel *k, enum adam_layout layout,
                     const struct adam_span *s, const struct adam_coef *c)
{
    check(k, layout, s);
    if (s->n == 0) return;
    STK_ASSERT(s->param_out && s->param_out != s->param);
    uint32_t saved = adam_begin();
    k->param_only[layout](s, c);
    adam_end(saved);
}
