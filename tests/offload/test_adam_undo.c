/* tests/offload/test_adam_undo.c - the recorded Adam step makes the same new state as the plain
 * one, and its undo the old bits: for every kind of input and coefficient, in every variant,
 * recorded by one and taken back by another.
 *
 * Whole buffers with sentinels around the span are compared. Where two NaNs meet, which one's
 * payload the plain step leaves is the compiler's choice: new states are then compared as "both
 * NaN"; the old state and the record never are. */
#include "tests/offload/undo_world.h"

static struct world before, after, plain, got;
static struct recorded first, other;

static bool is_nan_bits(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

static bool same_float(const void *a, const void *b)
{
    uint32_t x, y;
    memcpy(&x, a, 4);
    memcpy(&y, b, 4);
    return x == y || (is_nan_bits(x) && is_nan_bits(y));
}

/* The new states of two worlds, NaN equal to NaN. */
static bool same_state(const struct world *a, const struct world *b, enum adam_layout layout)
{
    if (memcmp(a, b, sizeof *a) == 0) return true;
    for (uint64_t i = 0; i < N_MAX + 2 * GUARD; i++) {
        if (!same_float(a->buf[EXP_AVG] + 4 * i, b->buf[EXP_AVG] + 4 * i) ||
            !same_float(a->buf[EXP_AVG_SQ] + 4 * i, b->buf[EXP_AVG_SQ] + 4 * i))
            return false;
        float x[2];
        const struct world *w[2] = { a, b };
        for (int j = 0; j < 2; j++) {
            uint16_t p;
            int16_t low;
            memcpy(&p, w[j]->buf[PARAM] + 2 * i, 2);
            memcpy(&low, w[j]->buf[LOW] + 2 * i, 2);
            if (layout == ADAM_FP16)
                memcpy(&x[j], w[j]->buf[LOW] + 4 * i, 4);
            else
                x[j] = stk_join(p, low);
        }
        if (!same_float(&x[0], &x[1])) return false;
    }
    return memcmp(a->buf[GRAD], b->buf[GRAD], sizeof a->buf[GRAD]) == 0 &&
           memcmp(a->buf[OUT], b->buf[OUT], sizeof a->buf[OUT]) == 0;
}

static void say(const char *what, const struct adam_kernel *k, const struct adam_kernel *u,
                enum adam_layout layout, uint64_t begin, uint64_t n)
{
    printf("# %s: recorded by %s, undone by %s, layout %d, begin %" PRIu64 ", n %" PRIu64 "\n",
           what, k->name, u ? u->name : "-", (int)layout, begin, n);
}

/* `rec` holds the step from `before` to `state`: every variant takes it back. */
static void undo_by_each(const struct adam_kernel *k, enum adam_layout layout, uint64_t begin,
                         uint64_t n, const struct adam_coef *c, const struct world *state,
                         const struct recorded *rec)
{
    for (const struct adam_kernel *u = adam_kernels; u->name; u++) {
        if (!usable(u)) continue;
        got = *state;
        struct adam_span s = span_of(&got, layout, begin, n, false);
        adam_undo(u, layout, &s, c, &rec->r);
        if (memcmp(&got, &before, sizeof got) == 0) continue;
        say("not the old bits", k, u, layout, begin, n);
        CHECK(!"undo gives the old bits");
    }
}

/* Room for one entry less than needed: nothing happened. */
static void overflow(const struct adam_kernel *k, enum adam_layout layout, uint64_t begin,
                     uint64_t n, const struct adam_coef *c, uint32_t cap)
{
    got = before;
    recorded_reset(&other, cap);
    struct adam_span s = span_of(&got, layout, begin, n, false);
    bool done = adam_step_recorded(k, layout, &s, c, &other.r);
    if (!done && recorded_within(&other, n) && memcmp(&got, &before, sizeof got) == 0) return;
    say("overflow", k, NULL, layout, begin, n);
    CHECK(!"a step whose side list is full leaves everything as it was");
}

/* One span of `before` through every variant: recorded, compared, undone, with too small a list. */
static void round_trip(enum adam_layout layout, uint64_t begin, uint64_t n,
                       const struct adam_coef *c)
{
    const struct adam_kernel *scalar = adam_pick("scalar");
    plain = before;
    struct adam_span s = span_of(&plain, layout, begin, n, false);
    adam_run(scalar, layout, &s, c);
    for (const struct adam_kernel *k = adam_kernels; k->name; k++) {
        if (!usable(k)) continue;
        struct recorded *rec = k->isa == CPU_SCALAR ? &first : &other;
        recorded_reset(rec, (uint32_t)n);
        after = before;
        s = span_of(&after, layout, begin, n, false);
        CHECK(adam_step_recorded(k, layout, &s, c, &rec->r));
        if (!same_state(&after, &plain, layout)) {
            say("new state", k, NULL, layout, begin, n);
            CHECK(!"the recorded step's state is the plain step's");
        }
        CHECK(recorded_within(rec, n));
        for (uint32_t j = 1; j < rec->r.side_n; j++)
            CHECK(rec->side[j - 1].elem < rec->side[j].elem);
        undo_by_each(k, layout, begin, n, c, &after, rec);
        if (rec->r.side_n > 0) {
            uint32_t needed = rec->r.side_n;
            overflow(k, layout, begin, n, c, needed - 1);
            overflow(k, layout, begin, n, c, needed / 2);
        }
    }
    /* Records are one another's, byte for byte. */
    recorded_reset(&first, (uint32_t)n);
    after = before;
    s = span_of(&after, layout, begin, n, false);
    adam_step_recorded(scalar, layout, &s, c, &first.r);
    for (const struct adam_kernel *k = adam_kernels; k->name; k++) {
        if (!usable(k) || k->isa == CPU_SCALAR) continue;
        recorded_reset(&other, first.r.side_n);
        after = before;
        s = span_of(&after, layout, begin, n, false);
        CHECK(adam_step_recorded(k, layout, &s, c, &other.r));
        if (recorded_equal(&first, &other, n)) continue;
        say("record", k, NULL, layout, begin, n);
        CHECK(!"the record is the scalar reference's");
    }
}

typedef void (*coef_fn)(struct rng *r, enum adam_kind kind, struct adam_coef *c);

static void all_sizes(enum input kind, coef_fn coefs, uint64_t stream)
{
    static const uint64_t large[] = { 127, 128, 129, 255, 513, 1000, 2047, 2049, 4095, 4096, 4097 };
    struct rng r;
    rng_seed_stream(&r, test_seed(), stream);
    for (int layout = 0; layout < ADAM_F32; layout++)
        for (int l2 = 0; l2 < 2; l2++)
            for (uint64_t j = 0; j < 70 + sizeof large / sizeof large[0]; j++) {
                struct adam_coef c;
                coefs(&r, l2 ? ADAM_L2 : ADAM_ADAMW, &c);
                if (j % 8 == 0) fill(&before, (enum adam_layout)layout, kind, &r);
                code_offset = j % 2 ? (uint32_t)rng_below(&r, 64) : 0;
                round_trip((enum adam_layout)layout, GUARD / 2 + rng_below(&r, 16),
                           j < 70 ? j : large[j - 70], &c);
            }
}

TEST(adam_undo_ordinary) { all_sizes(ORDINARY, ordinary_coef, 1); }
TEST(adam_undo_first_step) { all_sizes(COLD, ordinary_coef, 2); }
TEST(adam_undo_heavy_tails) { all_sizes(HEAVY, ordinary_coef, 3); }
TEST(adam_undo_subnormal) { all_sizes(SUBNORMAL, ordinary_coef, 4); }
TEST(adam_undo_edge_of_subnormal) { all_sizes(EDGE, ordinary_coef, 5); }
TEST(adam_undo_zero_of_both_signs) { all_sizes(ZERO, ordinary_coef, 6); }
TEST(adam_undo_huge_and_overflowing) { all_sizes(HUGE_VALUES, ordinary_coef, 7); }
TEST(adam_undo_any_finite) { all_sizes(FINITE, ordinary_coef, 8); }
TEST(adam_undo_any_bits_of_everything) { all_sizes(ANY_BITS, ordinary_coef, 9); }
TEST(adam_undo_absurd_coefficients) { all_sizes(ORDINARY, absurd_coef, 10); }
TEST(adam_undo_absurd_coefficients_any_bits) { all_sizes(ANY_BITS, absurd_coef, 11); }

/* A fault in the record is seen: any bit of any code of an element that
 * is not on the list, a list entry that is missing or altered, another gradient. */
TEST(adam_undo_a_planted_fault_is_found)
{
    enum { N = 300 };
    struct rng r;
    rng_seed_stream(&r, test_seed(), 12);
    for (int layout = 0; layout < ADAM_F32; layout++)
        for (const struct adam_kernel *k = adam_kernels; k->name; k++) {
            if (!usable(k)) continue;
            enum adam_layout l = (enum adam_layout)layout;
            struct adam_coef c;
            ordinary_coef(&r, ADAM_ADAMW, &c);
            fill(&before, l, ORDINARY, &r);
            after = before;
            recorded_reset(&first, N);
            struct adam_span s = span_of(&after, l, GUARD, N, false);
            REQUIRE(adam_step_recorded(k, l, &s, &c, &first.r) && first.r.side_n > 0);
            uint64_t missed = 0;
            for (uint32_t i = 0, next = 0; i < N; i++) {
                bool listed = next < first.r.side_n && first.side[next].elem == i;
                next += listed;
                for (int bit = 0; bit < 8; bit++) {
                    got = after;
                    s = span_of(&got, l, GUARD, N, false);
                    first.code[i] ^= (uint8_t)(1u << bit);
                    adam_undo(k, l, &s, &c, &first.r);
                    first.code[i] ^= (uint8_t)(1u << bit);
                    missed += (memcmp(&got, &before, sizeof got) == 0) != listed;
                }
            }
            CHECK(missed == 0);
            for (uint32_t j = 0; j < first.r.side_n * 16; j++) {
                if (j % 16 < 4) continue; /* the element's number: may point outside */
                got = after;
                s = span_of(&got, l, GUARD, N, false);
                ((uint8_t *)first.side)[j] ^= 1;
                adam_undo(k, l, &s, &c, &first.r);
                ((uint8_t *)first.side)[j] ^= 1;
                missed += memcmp(&got, &before, sizeof got) == 0;
            }
            CHECK(missed == 0);
            got = after;
            s = span_of(&got, l, GUARD, N, false);
            first.r.side_n--;
            adam_undo(k, l, &s, &c, &first.r);
            CHECK(memcmp(&got, &before, sizeof got) != 0);
        }
}

/* Every triple of them as the state of one element. */
TEST(adam_undo_special_values_one_by_one)
{
    static const uint32_t values[] = { 0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff,
                                       0x807fffff, 0x00800000, 0x80800000, 0x7f7fffff, 0xff7fffff,
                                       0x7f800000, 0xff800000, 0x7f800001, 0x7fc00000, 0xffc12345,
                                       0xffffffff, 0x3f800000, 0xbf800000 };
    static const uint16_t grads[] = { 0x0000, 0x8000, 0x3f80, 0xbf80, 0x0001,
                                      0x7f7f, 0x7f80, 0xff80, 0x7fc0 };
    enum { VALUES = sizeof values / sizeof values[0], GRADS = sizeof grads / sizeof grads[0] };
    struct rng r;
    rng_seed_stream(&r, test_seed(), 13);
    for (int g = 0; g < GRADS; g++)
        for (int p = 0; p < VALUES; p++) {
            memset(&before, SENTINEL, sizeof before);
            for (uint64_t i = 0; i < VALUES * VALUES; i++) {
                uint16_t high;
                int16_t low;
                stk_split(stk_bits_f32(values[p]), &high, &low);
                put_u16(before.buf[PARAM], GUARD + i, high);
                put_u16(before.buf[LOW], GUARD + i, (uint16_t)low);
                put_u32(before.buf[EXP_AVG], GUARD + i, values[i / VALUES]);
                put_u32(before.buf[EXP_AVG_SQ], GUARD + i, values[i % VALUES]);
                put_u16(before.buf[GRAD], GUARD + i, grads[g]);
            }
            struct adam_coef c;
            if (p % 2)
                absurd_coef(&r, p % 4 == 1 ? ADAM_L2 : ADAM_ADAMW, &c);
            else
                ordinary_coef(&r, p % 4 ? ADAM_L2 : ADAM_ADAMW, &c);
            round_trip(ADAM_BF16_SPLIT, GUARD, VALUES * VALUES, &c);
        }
}

/* Steps on top of each other, taken back in reverse order, as a run that never decides would. */
TEST(adam_undo_many_steps_back_to_the_first)
{
    enum { N = 500, STEPS = 40 };
    static struct recorded records[STEPS];
    static uint16_t grads[STEPS][N_MAX];
    struct rng r;
    rng_seed_stream(&r, test_seed(), 14);
    for (int layout = 0; layout < ADAM_F32; layout++)
        for (int l2 = 0; l2 < 2; l2++) {
            enum adam_layout l = (enum adam_layout)layout;
            struct adam_coef c[STEPS];
            fill(&before, l, COLD, &r);
            after = before;
            struct adam_span s = span_of(&after, l, GUARD, N, false);
            for (int t = 0; t < STEPS; t++) {
                struct adam_hyper h = { 1e-3, 0.9, 0.999, 1e-8, 0.01, l2 ? ADAM_L2 : ADAM_ADAMW };
                adam_coef_make(&h, (uint64_t)t + 1, 1.0, &c[t]);
                for (int i = 0; i < N; i++) grads[t][i] = random_grad(&r, l, ORDINARY);
                s.grad = grads[t];
                recorded_reset(&records[t], N);
                CHECK(adam_step_recorded(adam_pick(NULL), l, &s, &c[t], &records[t].r));
            }
            for (int t = STEPS - 1; t >= 0; t--) {
                s.grad = grads[t];
                adam_undo(adam_pick(t % 2 ? "scalar" : NULL), l, &s, &c[t], &records[t].r);
            }
            CHECK(memcmp(&after, &before, sizeof after) == 0);
        }
}

TEST(adam_undo_possible_for_betas_between_0_and_1)
{
    struct adam_hyper h = { .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8 };
    struct adam_coef c;
    adam_coef_make(&h, 1, 1.0, &c);
    CHECK(adam_undo_possible(&c));
    c.beta1 = 0.0f;
    CHECK(!adam_undo_possible(&c));
    c.beta1 = 0.9f;
    c.beta2 = 0.0f;
    CHECK(!adam_undo_possible(&c));
    c.beta2 = (float)NAN;
    CHECK(!adam_undo_possible(&c));
}

/* Only the parameter: nothing else changes, and it is the one that the whole step makes; the
 * state that follows is that of the step alone. */
static void param_then_state(enum adam_layout layout, uint64_t begin, uint64_t n,
                             const struct adam_coef *c)
{
    plain = before;
    struct adam_span s = span_of(&plain, layout, begin, n, true);
    adam_run(adam_pick("scalar"), layout, &s, c);
    for (const struct adam_kernel *k = adam_kernels; k->name; k++) {
        if (!usable(k)) continue;
        got = before;
        s = span_of(&got, layout, begin, n, true);
        adam_param_only(k, layout, &s, c);
        bool same = memcmp(got.buf[OUT], plain.buf[OUT], sizeof got.buf[OUT]) == 0;
        memcpy(got.buf[OUT], before.buf[OUT], sizeof got.buf[OUT]);
        same &= memcmp(&got, &before, sizeof got) == 0;
        adam_param_only(k, layout, &s, c);
        adam_run(k, layout, &s, c);
        same &= memcmp(&got, &plain, sizeof got) == 0;
        if (same) continue;
        say("parameter only", k, NULL, layout, begin, n);
        CHECK(!"parameter first, state later, is the step");
    }
}

TEST(adam_param_only_then_the_state)
{
    struct rng r;
    rng_seed_stream(&r, test_seed(), 15);
    for (int kind = 0; kind < ANY_BITS; kind++)
        for (int layout = 0; layout < ADAM_F32; layout++)
            for (uint64_t n = 0; n < 140; n++) {
                struct adam_coef c;
                ordinary_coef(&r, n % 2 ? ADAM_L2 : ADAM_ADAMW, &c);
                if (n % 16 == 0) fill(&before, (enum adam_layout)layout, (enum input)kind, &r);
                uint64_t begin = n % 3 ? GUARD / 2 + rng_below(&r, 16) : 32;
                param_then_state((enum adam_layout)layout, begin, n < 100 ? n : n * 30, &c);
            }
}

TEST_MAIN()
