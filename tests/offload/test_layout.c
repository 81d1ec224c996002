/* tests/offload/test_layout.c - blocks, tensors, chunks and shards: every element of every tensor
 * in exactly one chunk of one rank. */
#include "base/rng.h"
#include "offload/chunk.h"
#include "tests/test.h"

#define RANKS_MAX 8

TEST(shard_even_by_hand)
{
    uint64_t b[9];
    shard_boundaries(640, 3, NULL, b); /* 10 groups: 4, 3, 3 */
    CHECK(b[0] == 0 && b[1] == 256 && b[2] == 448 && b[3] == 640);
    shard_boundaries(0, 4, NULL, b);
    CHECK(b[0] == 0 && b[4] == 0);
}

TEST(shard_zr3_17_fewer_groups_than_ranks)
{
    uint64_t b[9];
    shard_boundaries(128, 8, NULL, b);
    CHECK(b[1] == 64 && b[2] == 128 && b[8] == 128); /* six empty shards */
}

TEST(shard_weights)
{
    uint64_t b[9];
    const double w[3] = { 1, 2, 1 }, tiny[3] = { 1e-9, 1, 1e-9 };
    shard_boundaries(64 * 8, 3, w, b);
    CHECK(b[1] == 128 && b[2] == 384 && b[3] == 512);
    shard_boundaries(64 * 8, 3, tiny, b);
    CHECK(b[1] == 0 && b[2] == 512 && b[3] == 512);
}

TEST(shard_any_is_even_and_covers)
{
    struct rng r;
    rng_seed(&r, test_seed());
    for (int i = 0; i < 2000; i++) {
        uint64_t b[RANKS_MAX + 1], groups = rng_below(&r, 100);
        uint32_t n = 1 + (uint32_t)rng_below(&r, RANKS_MAX);
        double w[RANKS_MAX];
        for (uint32_t k = 0; k < n; k++) w[k] = 0.01 + rng_uniform(&r);
        bool weighted = i & 1;
        shard_boundaries(groups * 64, n, weighted ? w : NULL, b);
        CHECK(b[0] == 0 && b[n] == groups * 64);
        for (uint32_t k = 0; k < n; k++) {
            CHECK(b[k] <= b[k + 1] && b[k] % 64 == 0);
            if (!weighted) CHECK((b[k + 1] - b[k]) / 64 - groups / n <= 1);
        }
    }
}

/* A count per element of each tensor, over all ranks, and a byte model of gather: each rank writes
 * the global element number. */
struct cover {
    const struct stk_layout *l;
    const struct stk_chunk *c;
    uint8_t **seen;
    uint64_t *flat;
    uint32_t last_end;
};

static void cover_piece(void *arg, uint32_t tensor, uint64_t tensor_elem, uint32_t chunk_elem,
                        uint32_t n)
{
    struct cover *v = arg;
    CHECK(chunk_elem >= v->last_end && chunk_elem + n <= v->c->n_elems && n > 0);
    CHECK(v->l->tensors[tensor].frozen == v->c->frozen &&
          v->l->tensors[tensor].block == v->c->block);
    CHECK(v->l->tensors[tensor].first_elem + tensor_elem == v->c->first_elem + chunk_elem);
    REQUIRE(tensor_elem + n <= v->l->tensors[tensor].n_elems);
    for (uint32_t k = 0; k < n; k++) v->seen[tensor][tensor_elem + k]++;
    v->last_end = chunk_elem + n;
}

struct model {
    struct layout_block_in blocks[5];
    struct layout_tensor_in tensors[5][6];
    char names[5][6][32];
    uint32_t n_blocks;
};

static void random_model(struct model *m, struct rng *r)
{
    static const uint64_t sizes[] = { 0, 1, 2, 3, 5, 63, 64, 65, 127, 210, 500, 1000, 1337, 4096 };
    m->n_blocks = 1 + (uint32_t)rng_below(r, 5);
    for (uint32_t b = 0; b < m->n_blocks; b++) {
        m->blocks[b] =
            (struct layout_block_in){ "block", (uint32_t)rng_below(r, 7), m->tensors[b] };
        for (uint32_t t = 0; t < m->blocks[b].n_tensors; t++) {
            snprintf(m->names[b][t], sizeof m->names[b][t], "b%u.t%u", b, t);
            m->tensors[b][t] =
                (struct layout_tensor_in){ m->names[b][t],
                                            sizes[rng_below(r, sizeof sizes / sizeof sizes[0])],
                                            rng_below(r, 3) == 0, rng_below(r, 2) == 0 };
        }
    }
}

static void check_tensor_of(const struct model *m, const struct stk_layout *l,
                            const uint32_t *tensor_of)
{
    for (uint32_t b = 0, k = 0; b < m->n_blocks; b++)
        for (uint32_t t = 0; t < m->blocks[b].n_tensors; t++, k++) {
            const struct stk_tensor *x = &l->tensors[tensor_of[k]];
            CHECK(strcmp(x->name, m->tensors[b][t].name) == 0 &&
                  x->n_elems == m->tensors[b][t].n_elems);
            CHECK(x->frozen == m->tensors[b][t].frozen && x->decay == m->tensors[b][t].decay &&
                  x->block == b);
        }
}

static void cover_model(struct rng *r, uint32_t ranks)
{
    struct model m;
    struct stk_error err = { 0 };
    uint8_t *seen[30] = { 0 };
    uint32_t n_tensors = 0, tensor_of[30], chunk_elems = 64u * (1 + (uint32_t)rng_below(r, 12));
    random_model(&m, r);
    for (uint32_t b = 0; b < m.n_blocks; b++) n_tensors += m.blocks[b].n_tensors;
    for (uint32_t t = 0; t < n_tensors; t++) seen[t] = calloc(5000, 1);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct stk_layout *l;
        CHECK_OK(layout_build(m.blocks, m.n_blocks, CHUNK_BF16, chunk_elems, rank, ranks, &l,
                              tensor_of, &err),
                 &err);
        CHECK_OK(layout_check(l, &err), &err);
        REQUIRE(l->n_tensors == n_tensors);
        check_tensor_of(&m, l, tensor_of);
        for (uint32_t c = 0; c < l->n_chunks; c++) {
            struct cover v = { l, &l->chunks[c], seen, NULL, 0 };
            chunk_pieces(l, &l->chunks[c], cover_piece, &v);
        }
        if (rank + 1 == ranks)
            for (uint32_t t = 0; t < n_tensors; t++)
                for (uint64_t k = 0; k < 5000; k++)
                    CHECK(seen[t][k] == (k < l->tensors[t].n_elems));
        layout_free(l);
    }
    for (uint32_t t = 0; t < n_tensors; t++) free(seen[t]);
}

TEST(layout_zr3_07_every_element_once_on_any_ranks)
{
    struct rng r;
    rng_seed(&r, test_seed());
    for (uint32_t ranks = 1; ranks <= RANKS_MAX; ranks++)
        for (int i = 0; i < 30; i++) cover_model(&r, ranks);
}

TEST(layout_by_hand)
{
    const struct layout_tensor_in t[] = { { "w", 100, false, true },
                                          { "f", 70, true, false },
                                          { "b", 10, false, false } };
    const struct layout_block_in b = { "one", 3, t };
    struct stk_layout *l;
    struct stk_error err = { 0 };
    uint32_t of[3];
    CHECK_OK(layout_build(&b, 1, CHUNK_FP16, 128, 0, 1, &l, of, &err), &err);
    CHECK(of[0] == 0 && of[1] == 2 && of[2] == 1);
    /* 128 + 64 trainable, padded to where a frozen part may begin */
    CHECK(l->blocks[0].elems == 2048 + 128 && l->blocks[0].elems_trainable == 2048);
    REQUIRE(l->n_chunks == 17 && l->blocks[0].n_chunks_trainable == 16);
    CHECK(l->chunks[0].n_elems == 128 && l->chunks[15].n_elems == 128 &&
          l->chunks[16].n_elems == 128 && l->chunks[16].frozen);
    CHECK(chunk_bytes(l, &l->chunks[0], CHUNK_OPT) == 128 * 12 &&
          chunk_bytes(l, &l->chunks[16], CHUNK_OPT) == 0);
    CHECK(chunk_bytes(l, &l->chunks[2], CHUNK_PARAM) == 256 && l->params == 180 &&
          l->params_trainable == 110);
    layout_free(l);
}

TEST(layout_zr3_17_nothing_but_empty_tensors)
{
    const struct layout_tensor_in t[] = { { "a", 0, false, true }, { "b", 0, true, false } };
    const struct layout_block_in b = { "empty", 2, t };
    struct stk_layout *l;
    struct stk_error err = { 0 };
    CHECK_OK(layout_build(&b, 1, CHUNK_BF16, 64, 0, 2, &l, NULL, &err), &err);
    CHECK_OK(layout_check(l, &err), &err);
    CHECK(l->n_chunks == 0 && l->n_tensors == 2 && l->params == 0);
    layout_free(l);
}

static stk_status build_one(const struct layout_tensor_in *t, uint32_t n, uint32_t chunk_elems,
                            uint32_t rank, struct stk_error *err)
{
    const struct layout_block_in b = { "block", n, t };
    struct stk_layout *l;
    stk_error_clear(err);
    stk_status s = layout_build(&b, 1, CHUNK_BF16, chunk_elems, rank, 2, &l, NULL, err);
    layout_free(l);
    return s;
}

TEST(layout_refusals)
{
    const struct layout_tensor_in twice[] = { { "a", 5, false, true },
                                              { "x", 5, false, true },
                                              { "a", 7, true, true } };
    const struct layout_tensor_in huge[] = { { "a", UINT64_MAX, false, true } };
    struct stk_error err = { 0 };
    CHECK(build_one(twice, 3, 64, 0, &err) == STK_ERR_CONFIG && strstr(err.text, "\"a\""));
    CHECK(build_one(twice, 2, 65, 0, &err) == STK_ERR_CONFIG && strstr(err.text, "chunk_elems"));
    CHECK(build_one(twice, 2, 0, 0, &err) == STK_ERR_CONFIG);
    CHECK(build_one(twice, 2, 64, 2, &err) == STK_ERR_CONFIG);
    CHECK(build_one(huge, 1, 64, 0, &err) == STK_ERR_CONFIG);
    struct stk_layout *l;
    CHECK(layout_build(NULL, 0, CHUNK_BF16, 64, 0, 1, &l, NULL, NULL) == STK_ERR_CONFIG);
}

TEST(layout_check_finds_faults)
{
    const struct layout_tensor_in t[] = { { "w", 1000, false, true }, { "f", 700, true, false } };
    const struct layout_block_in b[] = { { "one", 2, t }, { "two", 0, NULL } };
    for (int fault = 0; fault < 9; fault++) {
        struct stk_layout *l;
        struct stk_error err = { 0 };
        CHECK_OK(layout_build(b, 2, CHUNK_BF16, 128, 0, 1, &l, NULL, &err), &err);
        switch (fault) {
        case 0: l->chunks[1].first_elem += 64; break;
        case 1: l->chunks[1].n_elems -= 64; break;
        case 2: l->chunks[16].frozen = false; break;
        case 3: l->tensors[1].first_elem += 64; break;
        case 4: l->blocks[0].elems_trainable += 64; break;
        case 5: l->params++; break;
        case 6: l->chunks[0].home[CHUNK_OPT] = CHUNK_NVME; break; /* without an extent */
        case 7: l->chunks[0].extent[CHUNK_OPT] = 3; break;
        case 8: l->blocks[0].n_chunks--; break;
        }
        CHECK(layout_check(l, &err) == STK_ERR_STATE);
        layout_free(l);
    }
}

TEST_MAIN()
