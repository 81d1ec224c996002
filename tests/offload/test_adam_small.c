/* tests/offload/test_adam_small.c - many tensors in a chunk, as the engine runs them: the same bits
 * as one at a time, about the same time per byte as one large tensor; and steps of zero gradients,
 * which must not become slow.
 *
 * Times are compared with each other only, in turn. */
#include "base/convert.h"
#include "base/numeric.h"
#include "base/rng.h"
#include "base/sys.h"
#include "offload/adam_chunk.h"
#include "tests/test.h"

#include <time.h>

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* not what others of this machine take */
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Tensors of sizes[i] elements, all touched. */
static struct stk_layout *layout_of(const uint64_t *sizes, uint32_t n, enum chunk_dtype dtype,
                                    uint32_t chunk_elems)
{
    struct stk_layout *l = NULL;
    struct stk_error err = { 0 };
    struct layout_tensor_in *t = calloc(n, sizeof *t);
    char(*names)[12] = calloc(n, sizeof *names);
    for (uint32_t i = 0; i < n; i++) {
        snprintf(names[i], sizeof names[i], "%u", i);
        t[i] = (struct layout_tensor_in){ .name = names[i], .n_elems = sizes[i] };
    }
    struct layout_block_in b = { .name = "b", .n_tensors = n, .tensors = t };
    if (layout_build(&b, 1, dtype, chunk_elems, 0, 1, &l, NULL, &err) != STK_OK)
        printf("# %s\n", err.text);
    for (uint32_t i = 0; l && i < n; i++) l->tensors[i].touched = true;
    free(names);
    free(t);
    return l;
}

/* --- bits ------------------------------------------------------------------------------------- */

enum { ELEMS = 4096, TENSORS = 40, TENSORS_MOST = 3000 }; /* more than are looked at at once */
struct state {
    uint16_t param[ELEMS], grad[ELEMS], out[ELEMS];
    uint8_t opt[ELEMS * 12];
};
static struct state before, expected, got;

static struct adam_chunk chunk_at(struct state *s, bool out)
{
    return (struct adam_chunk){ .param = (uint8_t *)s->param, .opt = s->opt,
                                .grad = (uint8_t *)s->grad,
                                .param_out = out ? (uint8_t *)s->out : NULL };
}

/* Zeros in the padding, as the engine has it. */
static void fill(struct state *s, const struct stk_layout *l, struct rng *r)
{
    memset(s, 0, sizeof *s);
    const struct stk_chunk *c = &l->chunks[0];
    struct adam_chunk at = chunk_at(s, false);
    struct adam_span all = adam_chunk_span(l->dtype, c, &at, 0, c->n_elems);
    for (uint32_t t = 0; t < l->n_tensors; t++)
        for (uint64_t k = 0; k < l->tensors[t].n_elems; k++) {
            uint64_t i = l->tensors[t].first_elem + k;
            s->param[i] = (uint16_t)(0x3f80 + (rng_next(r) & 0x803f));
            s->grad[i] = (uint16_t)(l->dtype == CHUNK_BF16 ? 0x3d80 + (rng_next(r) & 0x80ff)
                                                           : 0x2c00 + (rng_next(r) & 0x83ff));
            all.exp_avg[i] = (float)(0.1 * rng_normal(r));
            all.exp_avg_sq[i] = (float)(0.01 * rng_uniform(r));
            if (l->dtype == CHUNK_BF16) ((int16_t *)all.low_or_master)[i] = (int16_t)rng_next(r);
            else ((float *)all.low_or_master)[i] = (float)rng_normal(r);
        }
}

/* Each tensor alone, its padding left out. */
static void one_by_one(const struct adam_kernel *k, const struct stk_layout *l, struct state *s,
                       const struct adam_coefs *coef, bool out)
{
    struct adam_chunk at = chunk_at(s, out);
    for (uint32_t t = 0; t < l->n_tensors; t++) {
        const struct stk_tensor *x = &l->tensors[t];
        if (coef->of[t] == ADAM_COEF_NONE) continue;
        struct adam_span span = adam_chunk_span(l->dtype, &l->chunks[0], &at,
                                                (uint32_t)x->first_elem,
                                                (uint32_t)(x->first_elem + x->n_elems));
        adam_run(k, l->dtype == CHUNK_BF16 ? ADAM_BF16_SPLIT : ADAM_FP16, &span, adam_coef_of(coef, t));
    }
}

static void random_tensors(struct rng *r, enum chunk_dtype dtype, struct stk_layout **l,
                           struct adam_coefs *coef)
{
    uint64_t sizes[TENSORS_MOST];
    bool many = rng_below(r, 8) == 0; /* all but TENSORS of them empty */
    uint32_t n = many ? TENSORS_MOST : 1 + (uint32_t)rng_below(r, TENSORS);
    memset(sizes, 0, sizeof sizes);
    for (uint32_t i = 0; i < n && i < TENSORS; i++)
        sizes[many ? rng_below(r, n) : i] = rng_below(r, 4) ? rng_below(r, 100) : 64;
    sizes[0] = 1;
    *l = layout_of(sizes, n, dtype, ELEMS);
    bool eps_zero = rng_below(r, 4) == 0;
    for (uint32_t i = 0; *l && i < (*l)->n_tensors; i++) {
        struct adam_hyper h = { 1e-3, 0.9, 0.999, eps_zero ? 0 : 1e-8,
                                rng_below(r, 3) ? 0.1 : 0, ADAM_ADAMW };
        adam_coef_make(&h, 1 + rng_below(r, 2), 1.0, &coef->set[i]);
        uint32_t same = 0;
        while (memcmp(&coef->set[same], &coef->set[i], sizeof *coef->set) != 0) same++;
        coef->of[i] = rng_below(r, 5) > 0 ? same : ADAM_COEF_NONE;
    }
}

TEST(adam_small_tensors_of_a_chunk_as_one_by_one)
{
    struct rng r;
    struct adam_coefs coef;
    rng_seed(&r, test_seed());
    REQUIRE(adam_coefs_alloc(&coef, TENSORS_MOST));
    for (int round = 0; round < 300; round++) {
        struct stk_layout *l = NULL;
        enum chunk_dtype dtype = round & 1 ? CHUNK_FP16 : CHUNK_BF16;
        random_tensors(&r, dtype, &l, &coef);
        REQUIRE(l != NULL && l->n_chunks == 1);
        bool out = rng_below(&r, 2);
        fill(&before, l, &r);
        expected = before;
        one_by_one(adam_pick("scalar"), l, &expected, &coef, out);
        for (const struct adam_kernel *k = adam_kernels; k->name; k++) {
            if (k->isa > cpu_isa_best()) continue;
            got = before;
            struct adam_chunk at = chunk_at(&got, out);
            uint32_t groups = l->chunks[0].n_elems / 64,
                     cut = (uint32_t)rng_below(&r, groups + 1) * 64;
            struct adam_way way = { (uint16_t)rng_below(&r, 999), rng_below(&r, 2) };
            adam_chunk_run(k, way, l, &l->chunks[0], &at, &coef, 0, cut);
            adam_chunk_run(k, way, l, &l->chunks[0], &at, &coef, cut, l->chunks[0].n_elems);
            CHECK(memcmp(&got, &expected, sizeof got) == 0);
        }
        layout_free(l);
    }
    adam_coefs_free(&coef);
}

/* --- time ------------------------------------------------------------------------------------- */

enum { MANY = 1000000, CHUNK_ELEMS = 524288, DISTINCT = 24 };

/* One step of all chunks; they share the memory of DISTINCT, which no cache holds: the state of a real
 * model lies in DRAM, as the tables of its tensors do. */
static uint64_t pass_ns(const struct adam_kernel *k, const struct stk_layout *l,
                        const struct adam_coefs *coef, uint8_t *memory)
{
    uint64_t begin = now_ns();
    for (uint32_t i = 0; i < l->n_chunks; i++) {
        const struct stk_chunk *c = &l->chunks[i];
        uint8_t *base = memory + (uint64_t)(i % DISTINCT) * CHUNK_ELEMS * 14;
        struct adam_chunk at = { .param = base, .opt = base + 2ull * CHUNK_ELEMS,
                                 .grad = base + 12ull * CHUNK_ELEMS };
        adam_chunk_run(k, (struct adam_way){ 0 }, l, c, &at, coef, 0, c->n_elems);
    }
    return now_ns() - begin;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of pairs: each pass over small tensors between two over the large one, processor time of this
 * thread. Nine; more while others of this machine make it look worse than `enough`. */
static double ratio_of(const struct stk_layout *small, const struct stk_layout *large,
                       const struct adam_coefs *coef, uint8_t *memory, double enough)
{
    enum { PAIRS = 9, PAIRS_MAX = 45 };
    const struct adam_kernel *k = adam_pick(NULL);
    double ratio[PAIRS_MAX], sorted[PAIRS_MAX], median = 0;
    uint64_t before_ns = pass_ns(k, large, coef, memory);
    for (int n = 0; n < PAIRS_MAX && (n < PAIRS || median > enough); n++) {
        uint64_t small_ns = pass_ns(k, small, coef, memory),
                 after_ns = pass_ns(k, large, coef, memory);
        ratio[n] = 2 * (double)small_ns / (double)(before_ns + after_ns);
        before_ns = after_ns;
        memcpy(sorted, ratio, sizeof ratio);
        qsort(sorted, (size_t)n + 1, sizeof *sorted, by_value);
        median = sorted[n / 2];
    }
    return median;
}

/* A million tensors, of 64 elements each, against one of 64 million. */
TEST(adam_adm_10_a_million_small_tensors_cost_no_more_per_byte)
{
    static uint64_t sizes[MANY];
    for (uint32_t i = 0; i < MANY; i++) sizes[i] = 64;
    uint64_t all = 64ull * MANY;
    struct stk_layout *small = layout_of(sizes, MANY, CHUNK_BF16, CHUNK_ELEMS),
                      *large = layout_of(&all, 1, CHUNK_BF16, CHUNK_ELEMS);
    struct adam_coefs coef;
    uint8_t *memory = sys_mmap(14ull * CHUNK_ELEMS * DISTINCT, true);
    REQUIRE(small && large && adam_coefs_alloc(&coef, MANY) && memory);
    struct adam_hyper h = { 1e-4, 0.9, 0.999, 1e-8, 0.01, ADAM_ADAMW };
    adam_coef_make(&h, 7, 1.0, &coef.set[0]);
    for (uint32_t i = 0; i < MANY; i++) coef.of[i] = 0;
    /* sanitizers count every load: what is measured there is their work */
    const double bound = TEST_SANITIZED ? 4.0 : 2.0;
    double same = ratio_of(small, large, &coef, memory, bound);
    h.weight_decay = 0; /* weights and biases in turn: no two neighbours alike */
    adam_coef_make(&h, 7, 1.0, &coef.set[1]);
    for (uint32_t i = 1; i < MANY; i += 2) coef.of[i] = 1;
    double differ = ratio_of(small, large, &coef, memory, bound);
    printf("# time per byte over one large tensor's: %.2f, with other coefficients for each "
           "neighbour %.2f\n", same, differ);
    CHECK(same <= bound);
    CHECK(differ <= bound);
    sys_munmap(memory, 14ull * CHUNK_ELEMS * DISTINCT);
    adam_coefs_free(&coef);
    layout_free(small);
    layout_free(large);
}

/* --- the finite check ------------------------------------------------------------------------- */

/* MPX-07: what the sum of squares and the finite check add to the cast of a gradient, against what
 * the cast and the update take. A step also computes, 6 FLOPs a parameter and token: at 512 tokens
 * and 100 GFLOP/s a core, 30 ns an element, so that a half of cast and update is a fiftieth of
 * it. A pass of its own over the gradients would take as long as the cast at least. */
TEST(adam_mpx_07_finite_check_is_a_small_share_of_the_update)
{
    uint64_t n = 8ull * CHUNK_ELEMS, least[3] = { UINT64_MAX, UINT64_MAX, UINT64_MAX };
    struct stk_layout *l = layout_of(&n, 1, CHUNK_BF16, CHUNK_ELEMS);
    float *acc = sys_mmap(4 * n, true);
    uint16_t *out = sys_mmap(2 * n, true);
    uint8_t *memory = sys_mmap(14ull * CHUNK_ELEMS * DISTINCT, true);
    struct adam_hyper h = { 1e-4, 0.9, 0.999, 1e-8, 0.01, ADAM_ADAMW };
    struct adam_coefs coef;
    REQUIRE(l && acc && out && memory && adam_coefs_alloc(&coef, 1));
    adam_coef_make(&h, 7, 1.0, &coef.set[0]);
    coef.of[0] = 0;
    for (int i = 0; i < 9; i++) {
        struct convert_sum sum;
        uint64_t at[4] = { now_ns() };
        convert_f32_to_bf16(acc, out, n);
        at[1] = now_ns();
        convert_grad_bf16(acc, out, n, 1.0f, &sum);
        at[2] = now_ns();
        pass_ns(adam_pick(NULL), l, &coef, memory);
        at[3] = now_ns();
        for (int k = 0; k < 3; k++)
            if (at[k + 1] - at[k] < least[k]) least[k] = at[k + 1] - at[k];
    }
    double more = (double)least[1] - (double)least[0];
    printf("# cast %.3f ns/element, with norm and finite check %.3f, update %.3f: %.1f %%\n",
           (double)least[0] / (double)n, (double)least[1] / (double)n, (double)least[2] / (double)n,
           100 * more / (double)(least[1] + least[2]));
    CHECK(2 * more <= (double)(least[1] + least[2]));
    sys_munmap(acc, 4 * n);
    sys_munmap(out, 2 * n);
    sys_munmap(memory, 14ull * CHUNK_ELEMS * DISTINCT);
    adam_coefs_free(&coef);
    layout_free(l);
}

/* --- zero gradients --------------------------------------------------------------------------- */

enum { QUIET_ELEMS = 1024, QUIET_STEPS = 5000, QUIET_BLOCK = 250 };

static uint64_t subnormals(const float *v, uint64_t n)
{
    uint64_t found = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t u = stk_f32_bits(v[i]) & 0x7fffffffu;
        found += u != 0 && u < 0x00800000u;
    }
    return found;
}

/* Moments from 1 down to the edge of what fp32 holds, so that some cross it all the time. */
static void zero_gradients(const struct adam_kernel *k, double beta2)
{
    static float p[QUIET_ELEMS], m[QUIET_ELEMS], v[QUIET_ELEMS], g[QUIET_ELEMS];
    uint64_t first = UINT64_MAX, last = UINT64_MAX, found = 0;
    for (uint32_t i = 0; i < QUIET_ELEMS; i++) {
        p[i] = i & 1 ? 1.0f : -1e-30f;
        m[i] = stk_bits_f32((1 + i % 127) << 23);
        v[i] = stk_bits_f32((1 + (i * 7) % 127) << 23);
        g[i] = 0;
    }
    struct adam_hyper h = { 1e-3, 0.9, beta2, 1e-8, 0.01, ADAM_ADAMW };
    struct adam_span s = { .n = QUIET_ELEMS, .param = p, .exp_avg = m, .exp_avg_sq = v, .grad = g };
    for (uint32_t t = 0; t < QUIET_STEPS; t += QUIET_BLOCK) {
        uint64_t begin = now_ns();
        for (uint32_t i = 0; i < QUIET_BLOCK; i++) {
            struct adam_coef c;
            adam_coef_make(&h, t + i + 1, 1.0, &c);
            adam_run(k, ADAM_F32, &s, &c);
        }
        uint64_t took = now_ns() - begin;
        uint64_t *least = t < QUIET_STEPS / 2 ? &first : &last;
        if (took < *least) *least = took;
        found += subnormals(p, QUIET_ELEMS) + subnormals(m, QUIET_ELEMS) +
                 subnormals(v, QUIET_ELEMS);
    }
    printf("# %s: %.2f times as long at the end\n", k->name, (double)last / (double)first);
    CHECK(found == 0);
    CHECK(last <= 4 * first); /* subnormals cost 30 times */
}

TEST(adam_five_thousand_zero_gradients_do_not_slow_it)
{
    for (const struct adam_kernel *k = adam_kernels; k->name; k++)
        if (k->isa <= cpu_isa_best()) {
            zero_gradients(k, 0.95);
            zero_gradients(k, 0.999);
        }
}

TEST_MAIN()
