/* tests/engine/test_pace.c - who yields to whom where the host's memory is short (engine/pace.h): the rules alone,
 * on a small plan in states made by hand. */
#include "engine/engine.h"
#include "tests/engine/plan_models.h"

#include <math.h>

enum { BLOCKS = 5, CHUNKS = 3 };

struct scene {
    struct model m;
    struct plan *p;
    uint8_t *state;
    struct pace pace;
    struct pace_now now;
    uint32_t copy_in, copy_out, update, commit; /* a node of each kind */
};

static stk_machine desktop(void)
{
    stk_machine m;
    stk_machine_init(&m, sizeof m);
    m.dram_bytes_per_s = 70e9;
    m.update_bytes_per_s = 63e9;
    m.copy_in_bytes_per_s = 26.2e9;
    m.copy_out_bytes_per_s = 26.8e9;
    return m;
}

static uint32_t find(const struct plan *p, enum plan_kind kind)
{
    for (uint32_t i = 0; i < p->n_nodes; i++)
        if (p->nodes[i].kind == kind) return i;
    return PLAN_NO;
}

/* Nothing has run, forward is next, the team works, two visits are queued. */
static bool scene_make(struct scene *s)
{
    struct stk_error err = { 0 };
    memset(s, 0, sizeof *s);
    model_make(&s->m, BLOCKS, CHUNKS, 1024);
    s->m.in.update = PLAN_SPLIT;
    s->m.in.prefetch = BLOCKS;
    for (uint32_t b = 0; b < BLOCKS; b++) s->m.blocks[b].split = true;
    if (plan_build(&s->m.in, &s->p, NULL, &err) != STK_OK) printf("# %s\n", err.text);
    if (!s->p) return false;
    s->state = calloc(s->p->n_nodes + 1, 1);
    stk_machine m = desktop();
    pace_of_machine(&m, &s->pace);
    s->now = (struct pace_now){ .plan = s->p, .node_state = s->state, .visits_in_flight = 2,
                                .updates_in_flight = 1 };
    s->copy_in = find(s->p, PLAN_COPY_IN);
    s->copy_out = find(s->p, PLAN_GRAD_OUT);
    s->update = find(s->p, PLAN_UPDATE);
    s->commit = find(s->p, PLAN_COMMIT);
    return s->copy_in != PLAN_NO && s->copy_out != PLAN_NO && s->update != PLAN_NO && s->commit != PLAN_NO;
}

static void scene_free(struct scene *s)
{
    plan_free(s->p);
    model_free(&s->m);
    free(s->state);
}

static double copies(const struct scene *s, uint32_t node) { return pace_copy(&s->pace, &s->now, &s->p->nodes[node]); }
static uint32_t team(const struct scene *s, uint32_t node) { return pace_team(&s->pace, &s->now, &s->p->nodes[node], 16); }

/* Updates of the first n blocks are made, and with them their copies ready. */
static void updated(struct scene *s, uint32_t n)
{
    for (uint32_t i = 0; i < s->p->n_nodes; i++) {
        const struct plan_node *x = &s->p->nodes[i];
        bool made = x->block != PLAN_NO && x->block < n;
        if (x->kind == PLAN_UPDATE) s->state[i] = made ? RUN_DONE : RUN_READY;
        if (x->kind == PLAN_COPY_IN) s->state[i] = made ? RUN_READY : RUN_WAITING;
    }
}

static uint32_t first_backward(const struct plan *p)
{
    uint32_t v = 0;
    while (p->visits[v].dir == PLAN_FORWARD) v++;
    return v;
}

TEST(pace_figures_of_a_machine)
{
    struct pace p;
    stk_machine m = desktop();
    pace_of_machine(&m, &p);
    CHECK(fabs(p.least_bytes_per_s - 7e9) < 1 && p.in_bytes_per_s == 26.2e9);
    m.update_bytes_per_s = 70e9; /* the update fills all of it: still some */
    pace_of_machine(&m, &p);
    CHECK(fabs(p.least_bytes_per_s - 70e9 / 16) < 1);
    m.on_host = true;
    pace_of_machine(&m, &p);
    CHECK(p.least_bytes_per_s == 0);
    m = desktop();
    m.dram_bytes_per_s = 0;
    pace_of_machine(&m, &p);
    CHECK(p.least_bytes_per_s == 0);
}

TEST(pace_copies_yield_to_the_update)
{
    struct scene s;
    REQUIRE(scene_make(&s));
    CHECK(copies(&s, s.copy_in) == s.pace.least_bytes_per_s);
    CHECK(copies(&s, s.copy_out) == s.pace.least_bytes_per_s);
    s.now.updates_in_flight = 0; /* nobody to yield to */
    CHECK(copies(&s, s.copy_in) == 0 && copies(&s, s.copy_out) == 0);
    s.now.updates_in_flight = 1;
    s.pace.shared_bytes_per_s = 30e9; /* there is enough for both */
    CHECK(copies(&s, s.copy_in) == 0);
    s.pace = (struct pace){ 0 };
    CHECK(copies(&s, s.copy_in) == 0);
    scene_free(&s);
}

TEST(pace_copies_that_a_visit_waits_for_are_fast)
{
    struct scene s;
    REQUIRE(scene_make(&s));
    s.now.visits_in_flight = 1;
    updated(&s, 1);
    CHECK(copies(&s, s.copy_in) == 0 && copies(&s, s.copy_out) == 0);
    updated(&s, 0); /* it waits for the update: a faster copy would only make that longer */
    CHECK(copies(&s, s.copy_in) == s.pace.least_bytes_per_s);
    s.now.next_visit = s.p->n_visits; /* all visits are queued: what is left holds up the step's end */
    CHECK(copies(&s, s.copy_out) == 0);
    scene_free(&s);
}

TEST(pace_copies_go_faster_the_more_wait)
{
    struct scene s;
    REQUIRE(scene_make(&s));
    s.now.ready_bytes[0] = (uint64_t)(10e9 * PACE_DRAIN_S);
    CHECK(fabs(copies(&s, s.copy_in) - 10e9) < 1e3);
    CHECK(copies(&s, s.copy_out) == s.pace.least_bytes_per_s); /* each direction has its own queue */
    s.now.ready_bytes[0] = (uint64_t)(27e9 * PACE_DRAIN_S);
    CHECK(copies(&s, s.copy_in) == 0);
    scene_free(&s);
}

/* (70 - 26.8 - 7) / 63 of 16 */
TEST(pace_commits_leave_room_for_what_leaves_in_forward)
{
    struct scene s;
    REQUIRE(scene_make(&s));
    CHECK(team(&s, s.commit) == 16);
    s.now.ready_bytes[1] = 1;
    CHECK(team(&s, s.commit) == 9);
    s.now.next_visit = first_backward(s.p);
    CHECK(team(&s, s.commit) == 16);
    s.now.next_visit = s.p->n_visits;
    CHECK(team(&s, s.commit) == 16);
    s.now.next_visit = 0;
    CHECK(pace_team(&s.pace, &s.now, &s.p->nodes[s.commit], 1) == 1);
    s.pace.team_part = 0.01; /* somebody always works */
    CHECK(team(&s, s.commit) == 1);
    s.pace = (struct pace){ 0 };
    CHECK(team(&s, s.commit) == 16);
    scene_free(&s);
}

TEST(pace_updates_that_are_ahead_leave_room_for_what_leaves_in_forward)
{
    struct scene s;
    REQUIRE(scene_make(&s));
    s.now.ready_bytes[1] = 1;
    updated(&s, PACE_BLOCKS_AHEAD);
    CHECK(team(&s, s.update) == 16); /* of the next block and so many behind it one is missing */
    updated(&s, PACE_BLOCKS_AHEAD + 1);
    CHECK(team(&s, s.update) == 9);
    s.now.ready_bytes[1] = 0;
    CHECK(team(&s, s.update) == 16);
    s.now.ready_bytes[1] = 1;
    s.now.next_visit = first_backward(s.p);
    CHECK(team(&s, s.update) == 16);
    scene_free(&s);
}

int main(int argc, char **argv) { return test_run_all(argc, argv); }
