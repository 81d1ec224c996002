/* tests/engine/test_plan.c - plans checked by hand, and what must hold for their bytes, orders and
 * refusals. */
#include "base/sys.h"
#include "tests/engine/plan_models.h"

#include <errno.h>

static struct plan *built(const struct model *m)
{
    struct stk_error err = { 0 };
    struct plan *p;
    if (plan_build(&m->in, &p, NULL, &err) != STK_OK || plan_check(&m->in, p, &err) != STK_OK) {
        printf("# %s\n", err.text);
        test_fail(__FILE__, __LINE__, "a plan is built and checked");
        return NULL;
    }
    return p;
}

static void expect_text(const struct model *m, const char *want)
{
    struct plan *p = built(m);
    REQUIRE(p);
    char *text = plan_text(p);
    if (strcmp(text, want)) printf("# got:\n%s", text);
    CHECK(strcmp(text, want) == 0);
    free(text);
    plan_free(p);
}

TEST(plan_by_hand_everything_in_host_memory)
{
    struct model m;
    model_make(&m, 2, 1, 64);
    m.in.in_place = true;
    expect_text(&m, "0 U update block=0 chunk=0 bytes=1664\n"
                    "1 U update block=1 chunk=1 bytes=1664\n"
                    "2 V visit block=0 place=0 micro=0 forward keep first last out=act#0@0 "
                    "full=act#1@8192 after=0\n"
                    "3 V visit block=1 place=1 micro=0 backward keep first last acc=acc#2@0 "
                    "in=act#0@0 full=act#4@36864 flow=act#3@28672 after=2,1\n"
                    "4 V grad_cast block=1 chunk=1 from=acc#2@0 bytes=128 after=3,1\n"
                    "5 V visit block=0 place=0 micro=0 backward keep first last acc=acc#5@4096 "
                    "full=act#1@8192 flow=act#3@28672 after=3,2\n"
                    "6 V grad_cast block=0 chunk=0 from=acc#5@4096 bytes=128 after=5,0\n"
                    "7 V norm after=5,4,6\n");
    model_free(&m);
}

TEST(plan_by_hand_everything_on_nvme_one_slot_each)
{
    struct model m;
    model_make(&m, 2, 1, 64);
    m.in.in_place = true;
    m.places[0].full_bytes = m.places[1].full_bytes = 0;
    for (int s = 0; s < CHUNK_STATE_N; s++) model_home(&m, (enum chunk_state)s, CHUNK_NVME);
    m.in.arena_bytes[PLAN_ARENA_PARAM] = m.in.arena_bytes[PLAN_ARENA_ACC] =
        m.in.arena_bytes[PLAN_ARENA_GRAD] = 4096;
    m.in.arena_bytes[PLAN_ARENA_UPDATE] = 3 * 4096;
    expect_text(&m,
                "0 U update block=0 chunk=0 to=update#1@0 bytes=1664 prefetched\n"
                "1 U write_back param block=0 chunk=0 from=update#1@0 bytes=128 after=0\n"
                "2 U write_back opt block=0 chunk=0 from=update#1@0+4096 bytes=640 after=0\n"
                "3 V hand_over param block=0 chunk=0 for=0 from=update#1@0 to=param#0@0 "
                "bytes=128 after=0\n"
                "4 U fetch param block=1 chunk=1 to=update#2@0 bytes=128 after=1,2,3\n"
                "5 U fetch opt block=1 chunk=1 to=update#2@0+4096 bytes=640 after=1,2,3\n"
                "6 U fetch grad block=1 chunk=1 to=update#2@0+8192 bytes=128 after=1,2,3\n"
                "7 U update block=1 chunk=1 to=update#2@0 bytes=1664 after=4,5,6\n"
                "8 U write_back param block=1 chunk=1 from=update#2@0 bytes=128 after=7\n"
                "9 U write_back opt block=1 chunk=1 from=update#2@0+4096 bytes=640 after=7\n"
                "10 V fetch param block=0 chunk=0 for=0 to=param#0@0 bytes=128 demand optional "
                "after=3\n"
                "11 V visit block=0 place=0 micro=0 forward keep first last param=param#0@0 "
                "out=act#3@0 after=10,3\n"
                "12 V hand_over param block=1 chunk=1 for=1 from=update#2@0 to=param#4@0 "
                "bytes=128 after=7,11\n"
                "13 V fetch param block=1 chunk=1 for=1 to=param#4@0 bytes=128 demand optional "
                "after=12\n"
                "14 V visit block=1 place=1 micro=0 backward keep first last param=param#4@0 "
                "acc=acc#5@0 in=act#3@0 flow=act#6@8192 after=11,13,12\n"
                "15 V grad_cast block=1 chunk=1 from=acc#5@0 to=grad#8@0 bytes=128 after=14\n"
                "16 V write_back grad block=1 chunk=1 from=grad#8@0 bytes=128 after=15,6\n"
                "17 V fetch param block=0 chunk=0 for=2 to=param#9@0 bytes=128 demand after=1,14\n"
                "18 V visit block=0 place=0 micro=0 backward keep first last param=param#9@0 "
                "acc=acc#10@0 flow=act#6@8192 after=14,17,15\n"
                "19 V grad_cast block=0 chunk=0 from=acc#10@0 to=update#7@0+8192 bytes=128 "
                "after=18,8,9,12\n"
                "20 V fetch param block=0 chunk=0 to=update#7@0 bytes=128 next after=8,9,12,1\n"
                "21 V fetch opt block=0 chunk=0 to=update#7@0+4096 bytes=640 next after=8,9,12,2\n"
                "22 V norm after=18,15,19\n");
    model_free(&m);
}

TEST(plan_by_hand_discrete_serial_offloaded)
{
    struct model m;
    model_make(&m, 1, 1, 64);
    m.in.update = PLAN_SERIAL;
    m.places[0].fused = false;
    m.places[0].act = PLAN_ACT_HOST;
    model_home(&m, CHUNK_PARAM, CHUNK_NVME);
    expect_text(
        &m,
        "0 U update block=0 chunk=0 to=update#0@0 bytes=1664 prefetched\n"
        "1 U write_back param block=0 chunk=0 from=update#0@0 bytes=128 after=0\n"
        "2 U join after=0,1\n"
        "3 V fetch param block=0 chunk=0 for=0 to=bounce#2@0 bytes=128 demand after=2\n"
        "4 V copy_in param block=0 chunk=0 for=0 from=bounce#2@0 to=param#1@0 bytes=128 after=3\n"
        "5 V visit block=0 place=0 micro=0 forward host first last param=param#1@0 full=act#3@0 "
        "after=2,4\n"
        "6 V save block=0 from=act#3@0 to=save#4@0 bytes=20000 after=5\n"
        "7 V load block=0 from=save#4@0 to=act#5@20480 bytes=20000 after=6\n"
        "8 V visit block=0 place=0 micro=0 backward host first last param=param#1@0 acc=acc#6@0 "
        "full=act#5@20480 after=5,7\n"
        "9 V grad_cast block=0 chunk=0 from=acc#6@0 to=cast#7@0 bytes=128 after=8\n"
        "10 V grad_out block=0 chunk=0 from=cast#7@0 bytes=128 after=9,0\n"
        "11 V fetch param block=0 chunk=0 to=update#8@0 bytes=128 next after=1\n"
        "12 V norm after=8,9\n");
    model_free(&m);
}

TEST(plan_by_hand_activations_on_nvme)
{
    struct model m;
    model_make(&m, 2, 1, 64);
    m.places[0].act = m.places[1].act = PLAN_ACT_NVME;
    m.in.in_place = true;
    expect_text(&m, "0 U update block=0 chunk=0 bytes=1664\n"
                "1 U update block=1 chunk=1 bytes=1664\n"
                "2 V visit block=0 place=0 micro=0 forward nvme first last out=act#0@0 "
                "full=act#1@8192 after=0\n"
                "3 V act_out block=0 act=1 from=act#1@8192 bytes=20000 after=2\n"
                "4 V act_out block=1 act=2 from=act#0@0 bytes=8192 after=2\n"
                "5 V act_in block=1 act=2 to=act#2@28672 bytes=8192 demand after=4\n"
                "6 V visit block=1 place=1 micro=0 backward nvme first last acc=acc#3@0 "
                "in=act#2@28672 full=act#5@45056 flow=act#4@36864 after=2,1,5\n"
                "7 V grad_cast block=1 chunk=1 from=acc#3@0 bytes=128 after=6,1\n"
                "8 V act_in block=0 act=1 to=act#6@45056 bytes=20000 demand after=3,6\n"
                "9 V visit block=0 place=0 micro=0 backward nvme first last acc=acc#7@4096 "
                "full=act#6@45056 flow=act#4@36864 after=6,8\n"
                "10 V grad_cast block=0 chunk=0 from=acc#7@4096 bytes=128 after=9,0\n"
                "11 V norm after=9,7,10\n");
    m.in.in_place = false;
    expect_text(&m, "0 U update block=0 chunk=0 bytes=1664\n"
                "1 U update block=1 chunk=1 bytes=1664\n"
                "2 V copy_in param block=0 chunk=0 for=0 to=param#0@0 bytes=128 after=0\n"
                "3 V visit block=0 place=0 micro=0 forward nvme first last param=param#0@0 "
                "out=act#1@0 full=act#2@8192 after=2\n"
                "4 V save block=0 from=act#2@8192 to=save#3@0 bytes=20000 after=3\n"
                "5 V act_out block=0 act=1 from=save#3@0 bytes=20000 after=4\n"
                "6 V save block=1 from=act#1@0 to=save#4@20480 bytes=8192 after=3\n"
                "7 V act_out block=1 act=2 from=save#4@20480 bytes=8192 after=6\n"
                "8 V copy_in param block=1 chunk=1 for=1 to=param#5@4096 bytes=128 after=1\n"
                "9 V act_in block=1 act=2 to=save#6@28672 bytes=8192 demand after=7\n"
                "10 V load block=1 from=save#6@28672 to=act#7@28672 bytes=8192 after=9\n"
                "11 V visit block=1 place=1 micro=0 backward nvme first last "
                "param=param#5@4096 acc=acc#8@0 in=act#7@28672 full=act#10@45056 "
                "flow=act#9@36864 after=3,8,10\n"
                "12 V grad_cast block=1 chunk=1 from=acc#8@0 to=cast#11@0 bytes=128 after=11\n"
                "13 V grad_out block=1 chunk=1 from=cast#11@0 bytes=128 after=12,1\n"
                "14 V act_in block=0 act=1 to=save#12@36864 bytes=20000 demand after=5\n"
                "15 V load block=0 from=save#12@36864 to=act#13@45056 bytes=20000 after=14,11\n"
                "16 V visit block=0 place=0 micro=0 backward nvme first last param=param#0@0 "
                "acc=acc#14@4096 full=act#13@45056 flow=act#9@36864 after=11,3,15\n"
                "17 V grad_cast block=0 chunk=0 from=acc#14@4096 to=cast#15@4096 bytes=128 "
                "after=16\n"
                "18 V grad_out block=0 chunk=0 from=cast#15@4096 bytes=128 after=17,0\n"
                "19 V norm after=16,12,17\n");
    model_free(&m);
}

/* The last position keeps, the one before is recomputed, the others go away: each as its policy says. */
TEST(plan_activations_mixed)
{
    for (int in_place = 0; in_place < 2; in_place++) {
        struct model m;
        uint32_t n[PLAN_KIND_N] = { 0 }, again = 0;
        model_make(&m, 6, 1, 64);
        m.in.in_place = in_place;
        m.in.n_micro = 3;
        m.places[4].act = m.places[5].act = PLAN_ACT_KEEP;
        m.places[3].act = PLAN_ACT_RECOMPUTE;
        m.places[2].act = PLAN_ACT_HOST;
        m.places[0].act = m.places[1].act = PLAN_ACT_NVME;
        struct plan *p = built(&m);
        REQUIRE(p);
        for (uint32_t i = 0; i < p->n_nodes; i++) n[p->nodes[i].kind]++;
        for (uint32_t i = 0; i < p->n_visits; i++) {
            again += p->visits[i].recompute;
            CHECK(!p->visits[i].recompute || p->visits[i].place == 3);
        }
        CHECK(again == 3);
        /* a full set each of 0 and 1, the boundary of 1; host: both of 2; all of it twice on its way */
        CHECK(n[PLAN_ACT_OUT] == 9 && n[PLAN_ACT_IN] == 9);
        CHECK(n[PLAN_SAVE] == (in_place ? 0u : 15u) && n[PLAN_LOAD] == n[PLAN_SAVE]);
        CHECK(plan_moved(p, PLAN_NVME_WRITE) == 3 * (2 * 20000 + 8192) &&
              plan_moved(p, PLAN_NVME_READ) == 3 * (2 * 20000 + 8192));
        plan_free(p);
        m.in.mode = PLAN_EVAL; /* nothing is for later there */
        p = built(&m);
        REQUIRE(p);
        for (uint32_t i = 0; i < p->n_nodes; i++) CHECK(p->nodes[i].kind < PLAN_ACT_OUT);
        plan_free(p);
        model_free(&m);
    }
}

/* The slots of a full set on the device are one for the visit, and those on their way: not one for each
 * position. */
TEST(plan_activations_on_nvme_leave_memory)
{
    for (int in_place = 0; in_place < 2; in_place++) {
        uint64_t least[PLAN_ARENA_N], useful[PLAN_ARENA_N], keep;
        struct stk_error err = { 0 };
        struct model m;
        model_make(&m, 40, 1, 64);
        m.in.in_place = in_place;
        m.in.prefetch = 2;
        for (uint32_t i = 0; i < 40; i++) m.places[i].full_bytes = 1u << 20;
        CHECK_OK(plan_needs(&m.in, least, useful, &err), &err);
        keep = least[PLAN_ARENA_ACT];
        for (uint32_t i = 0; i < 40; i++) m.places[i].act = PLAN_ACT_NVME;
        CHECK_OK(plan_needs(&m.in, least, useful, &err), &err);
        CHECK(least[PLAN_ARENA_ACT] < keep / 20 && useful[PLAN_ARENA_ACT] < keep / 4);
        CHECK(useful[PLAN_ARENA_SAVE] < keep / 4 && (least[PLAN_ARENA_SAVE] == 0) == in_place);
        model_free(&m);
    }
}

/* --- bytes --- */

static uint64_t fetched(struct model *m)
{
    struct plan *p = built(m);
    uint64_t bytes = p ? p->param_fetch_bytes : 0;
    plan_free(p);
    return bytes;
}

TEST(plan_layer_major_fetches_each_block_twice)
{
    for (uint32_t n_micro = 1; n_micro <= 4; n_micro++)
        for (int nvme = 0; nvme < 2; nvme++) {
            struct model m;
            model_make(&m, 6, 3, 4096);
            m.in.n_micro = n_micro;
            if (nvme) model_home(&m, CHUNK_PARAM, CHUNK_NVME);
            uint64_t block = m.blocks[0].param_bytes;
            m.in.arena_bytes[PLAN_ARENA_PARAM] = block;
            CHECK(fetched(&m) == 11 * block); /* twice each, the head once */
            m.in.accumulate = PLAN_MICRO_MAJOR; /* 0 1 2 3 4 5' 4' 3' 2' 1' 0' 0 1 ..: position 0
                                                   stays over the turn of micro-batches */
            CHECK(fetched(&m) == (11 + 10 * (n_micro - 1)) * block);
            m.in.arena_bytes[PLAN_ARENA_PARAM] = UINT64_MAX;
            CHECK(fetched(&m) == 6 * block);
            model_free(&m);
        }
}

TEST(plan_larger_cache_fewer_bytes)
{
    for (uint32_t prefetch = 0; prefetch <= 4; prefetch++)
        for (int order = 0; order < 2; order++) {
            struct model m;
            model_make(&m, 8, 2, 2048);
            m.in.accumulate = (enum plan_accumulate)order;
            m.in.n_micro = 3;
            m.in.prefetch = prefetch;
            uint64_t block = m.blocks[0].param_bytes, before = UINT64_MAX;
            for (uint64_t size = block; size <= 8 * block; size += block / 2) {
                m.in.arena_bytes[PLAN_ARENA_PARAM] = size;
                uint64_t now = fetched(&m);
                if (now > before)
                    printf("# prefetch %u order %d: %" PRIu64 " blocks: %" PRIu64 " > %" PRIu64
                           "\n",
                           prefetch, order, size / block, now / block, before / block);
                CHECK(now <= before && now >= 8 * block);
                before = now;
            }
            CHECK(before == 8 * block);
            model_free(&m);
        }
}

/* --- orders --- */

TEST(plan_tied_block_adds_micro_batches_in_one_order)
{
    char seen[2][200];
    for (int order = 0; order < 2; order++) {
        struct model m;
        model_make(&m, 3, 2, 64);
        m.places[3] = m.places[2];
        m.places[2].fused = false;
        m.places[3].block = 0; /* the head is the embedding */
        m.in.n_places = 4;
        m.in.n_micro = 3;
        m.in.accumulate = (enum plan_accumulate)order;
        struct plan *p = built(&m);
        REQUIRE(p);
        size_t n = 0;
        for (uint32_t i = 0; i < p->n_visits; i++) {
            const struct plan_visit *v = &p->visits[i];
            if (v->block == 0 && v->dir == PLAN_BACKWARD)
                n += (size_t)snprintf(seen[order] + n, sizeof seen[order] - n, "%u.%u%s%s ",
                                      v->place, v->micro, v->first_of_block ? "f" : "",
                                      v->last_of_block ? "l" : "");
        }
        plan_free(p);
        model_free(&m);
    }
    CHECK(strcmp(seen[0], "3.0f 3.1 3.2 0.0 0.1 0.2l ") == 0);
    CHECK(strcmp(seen[0], seen[1]) == 0);
}

TEST(plan_own_order_gradients_final_at_the_end)
{
    const struct plan_own_visit own[] = { { 1, PLAN_FORWARD, 0 },
                                          { 0, PLAN_BACKWARD, 0 },
                                          { 1, PLAN_BACKWARD, 0 },
                                          { 0, PLAN_FORWARD, 1 } };
    struct model m;
    model_make(&m, 3, 2, 64);
    m.in.own = own;
    m.in.n_micro = 2;
    for (m.in.n_own = 0; m.in.n_own <= 4; m.in.n_own++) {
        struct plan *p = built(&m);
        REQUIRE(p);
        uint32_t last_visit = 0, first_cast = UINT32_MAX, casts = 0;
        for (uint32_t i = 0; i < p->n_nodes; i++) {
            if (p->nodes[i].kind == PLAN_VISIT) last_visit = i;
            if (p->nodes[i].kind == PLAN_GRAD_CAST && casts++ == 0) first_cast = i;
        }
        CHECK(casts == 6 && first_cast > last_visit &&
              p->n_visits == m.in.n_own); /* blocks without a visit too: stk_grad_add */
        plan_free(p);
    }
    model_free(&m);
}

TEST(plan_eval_has_forward_visits_only)
{
    struct model m;
    model_make(&m, 4, 2, 64);
    m.in.mode = PLAN_EVAL;
    m.in.n_micro = 2;
    for (int s = 0; s < CHUNK_STATE_N; s++) model_home(&m, (enum chunk_state)s, CHUNK_NVME);
    struct plan *p = built(&m);
    REQUIRE(p);
    CHECK(p->n_visits == 8 && p->visits[7].place == 3);
    for (uint32_t i = 0; i < p->n_nodes; i++)
        CHECK(p->nodes[i].kind == PLAN_VISIT || p->nodes[i].kind == PLAN_FETCH ||
              p->nodes[i].kind == PLAN_COPY_IN);
    plan_free(p);
    model_free(&m);
}

TEST(plan_prefetch_comes_before_the_visit_and_is_no_demand)
{
    struct model m;
    model_make(&m, 5, 1, 64);
    model_home(&m, CHUNK_PARAM, CHUNK_NVME);
    m.in.in_place = true;
    m.in.prefetch = 2;
    struct plan *p = built(&m);
    REQUIRE(p);
    uint32_t demand = 0, ahead = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        const struct plan_node *x = &p->nodes[i];
        if (x->kind != PLAN_FETCH || x->part != PLAN_RUN_VISITS || x->for_next) continue;
        demand += x->demand;
        ahead += !x->demand;
        if (!x->demand) CHECK(x->visit >= 1 && i < p->visits[x->visit - 1].node);
    }
    CHECK(demand == 1 && ahead == 4);
    plan_free(p);
    model_free(&m);
}

/* --- refusals --- */

static stk_status refuse(struct model *m, const char *word)
{
    struct stk_error err = { 0 };
    struct plan *p;
    uint64_t least[PLAN_ARENA_N], useful[PLAN_ARENA_N];
    stk_status s = plan_build(&m->in, &p, NULL, &err);
    CHECK(p == NULL && strstr(err.text, word));
    CHECK(plan_needs(&m->in, least, useful, NULL) == s);
    return s;
}

/* A forward visit's parameters stand right behind their own update, not behind all updates; nothing
 * but a slot waits for optimizer state on its way home. */
TEST(plan_rank_lets_the_forward_follow_the_update)
{
    struct model m;
    model_make(&m, 4, 2, 64);
    m.in.in_place = true;
    for (int s = 0; s < CHUNK_STATE_N; s++) model_home(&m, (enum chunk_state)s, CHUNK_NVME);
    m.in.arena_bytes[PLAN_ARENA_PARAM] = 4096; /* the first block is handed over, the next two are read */
    m.in.arena_bytes[PLAN_ARENA_UPDATE] = 3 * 4096;
    struct plan *p = built(&m);
    REQUIRE(p);
    uint32_t forward = 0, last_update = 0, passed = 0, hands = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++)
        if (p->nodes[i].kind == PLAN_UPDATE) last_update = i;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        const struct plan_node *x = &p->nodes[i];
        bool early = x->kind == PLAN_FETCH && x->visit != PLAN_NO &&
                     p->visits[x->visit].dir == PLAN_FORWARD;
        bool handed = x->kind == PLAN_HAND_OVER || x->optional;
        if (handed || early) {
            const struct plan_node *source = &p->nodes[x->rank];
            forward += early;
            hands += x->kind == PLAN_HAND_OVER;
            passed += early && x->rank <= last_update;
            CHECK(source->chunk == x->chunk &&
                  (handed ? source->kind == PLAN_UPDATE
                          : source->kind == PLAN_WRITE_BACK && source->state == CHUNK_PARAM));
        } else if (x->kind == PLAN_WRITE_BACK && x->state == CHUNK_OPT) {
            CHECK(x->rank == PLAN_RANK_LATER + i);
        } else {
            CHECK(x->rank == i);
        }
    }
    printf("# %u fetches for forward visits, %u pass updates\n", forward, passed);
    CHECK(hands == 3); /* and the last chunk, whose UPDATE slot nobody wants any more */
    CHECK(forward == 6 && passed == 6); /* two chunks a block; the head has no forward visit */
    plan_free(p);
    model_free(&m);
}

TEST(plan_refusals)
{
    struct model m;
    model_make(&m, 3, 2, 64);
    m.in.update = (enum plan_update)(PLAN_SPECULATE + 1);
    CHECK(refuse(&m, "update mode") == STK_ERR_CONFIG);
    m.in.update = PLAN_SPECULATE;
    m.chunks[2].spec = true;
    m.chunks[2].home[CHUNK_PARAM] = CHUNK_NVME; /* the record would be of half a state */
    CHECK(refuse(&m, "ahead of the norm") == STK_ERR_CONFIG);
    m.chunks[2].home[CHUNK_PARAM] = CHUNK_HOST;
    m.chunks[2].spec = false;
    m.in.update = PLAN_CHASE;
    m.in.n_micro = 0;
    CHECK(refuse(&m, "micro") == STK_ERR_CONFIG);
    m.in.n_micro = 1;
    m.places[0].fused = true;
    CHECK(refuse(&m, "fused") == STK_ERR_CONFIG);
    m.places[0].fused = false;
    m.places[1].block = 7;
    CHECK(refuse(&m, "block") == STK_ERR_CONFIG);
    m.places[1].block = 1;
    m.chunks[3].frozen = true;
    CHECK(refuse(&m, "frozen") == STK_ERR_CONFIG);
    model_free(&m);
}

TEST(plan_every_failed_allocation_is_reported)
{
    struct model m;
    struct plan *p = NULL;
    struct stk_error err = { 0 };
    uint32_t failed = 0;
    model_make(&m, 6, 5, 64);
    m.in.n_micro = 2;
    for (int s = 0; s < CHUNK_STATE_N; s++) model_home(&m, (enum chunk_state)s, CHUNK_NVME);
    uint64_t alive = sys_alloc_bytes();
    for (uint64_t k = 1; k < 500; k++) {
        sys_fault_arm(SYS_ALLOC, k, k % 3 ? 1 : UINT64_MAX, ENOMEM);
        stk_error_clear(&err);
        stk_status s = plan_build(&m.in, &p, NULL, &err);
        if (s == STK_OK) s = plan_check(&m.in, p, &err);
        sys_fault_arm(SYS_ALLOC, 0, 0, 0);
        plan_free(p);
        CHECK(s == STK_OK || (s == STK_ERR_NOMEM && err.text[0]));
        CHECK(sys_alloc_bytes() == alive);
        if (s == STK_OK) break;
        failed++;
    }
    CHECK(failed > 40 && failed < 400);
    model_free(&m);
}

TEST(plan_trace_is_balanced)
{
    struct model m;
    char *text = NULL;
    size_t size = 0;
    int depth = 0;
    model_make(&m, 3, 2, 64);
    struct plan *p = built(&m);
    REQUIRE(p);
    FILE *f = open_memstream(&text, &size);
    plan_trace(p, f);
    fclose(f);
    for (size_t i = 0; i < size; i++)
        depth += (text[i] == '{') - (text[i] == '}') + (text[i] == '[') - (text[i] == ']');
    CHECK(depth == 0 && strstr(text, "\"traceEvents\"") && strstr(text, "backward 2.0"));
    free(text);
    plan_free(p);
    model_free(&m);
}

/* A wait is for the kind that most of its chain is made of, also where that is the kind that is booked when
 * the chain says nothing. */
TEST(plan_a_wait_is_for_the_longest_part)
{
    static const uint8_t kind[] = { PLAN_FETCH, PLAN_GRAD_CAST, PLAN_COPY_IN, PLAN_NORM };
    struct plan_node nodes[4];
    uint32_t deps[] = { 0, 1, 2 };
    memset(nodes, 0, sizeof nodes);
    for (uint32_t i = 0; i < 4; i++) {
        nodes[i].kind = kind[i];
        nodes[i].n_deps = i > 0;
        nodes[i].first_dep = i ? i - 1 : 0;
    }
    const struct plan p = { .nodes = nodes, .n_nodes = 4, .deps = deps, .n_deps = 3 };
    const double end_ns[] = { 110, 180, 190, 300 }; /* since 100: 10, 70, 10, and the norm */
    for (uint8_t otherwise = 0; otherwise < PLAN_KIND_N; otherwise++) {
        CHECK(plan_wait_kind(&p, 3, end_ns, 100, otherwise) == PLAN_GRAD_CAST);
        CHECK(plan_visit_waits(&p, 2, end_ns, 175, otherwise) == PLAN_GRAD_CAST);
        CHECK(plan_wait_kind(&p, 3, end_ns, 300, otherwise) == otherwise);
        CHECK(plan_wait_kind(&p, 3, end_ns, 250, otherwise) == otherwise);
    }
}

TEST_MAIN()
