/* tests/engine/test_trace.c - the trace of what happened (stk_trace_write): complete, ordered, valid,
 * whatever was kept; and nothing of it changes a bit. */
#include "engine/engine.h"
#include "tests/engine/world.h"

#include <jansson.h>

enum { STEPS = 3 };

static void setting(struct toy *t, uint64_t trace_bytes)
{
    toy_init(t, 3, 2);
    t->cfg.device = STK_DEVICE_HOST_DISCRETE;
    t->cfg.nvme[0] = world_dir("nvme");
    t->cfg.params = t->cfg.optimizer_state = STK_TIER_NVME;
    t->cfg.trace_bytes = trace_bytes;
}

static bool run(struct toy *t, uint64_t *hash)
{
    bool ok = toy_open(t) == STK_OK && toy_fill(t) == STK_OK;
    for (int i = 0; ok && i < STEPS; i++) ok = toy_step(t, 0.01, NULL) == STK_OK;
    if (ok && hash) ok = toy_hash(t, hash) == STK_OK;
    if (!ok) printf("# %s\n", stk_error_text(t->e));
    return ok;
}

/* The file's events; NULL: not valid. The caller decrefs. */
static json_t *load(const char *path)
{
    json_error_t err;
    json_t *doc = json_load_file(path, 0, &err);
    if (!doc) printf("# %s:%d: %s\n", path, err.line, err.text);
    json_t *events = json_incref(json_object_get(doc, "traceEvents"));
    json_decref(doc);
    return events;
}

static const char *str(const json_t *x, const char *key)
{
    const char *s = json_string_value(json_object_get(x, key));
    return s ? s : "";
}

static double num(const json_t *x, const char *key)
{
    return json_number_value(json_object_get(x, key));
}

/* Events of one row must neither overlap nor run backwards. */
static bool rows_ok(json_t *events)
{
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *x = json_array_get(events, i);
        if (strcmp(str(x, "ph"), "X") != 0) continue;
        if (num(x, "dur") < 0 || num(x, "ts") < 0) return false;
        for (size_t k = 0; k < i; k++) {
            const json_t *y = json_array_get(events, k);
            if (strcmp(str(y, "ph"), "X") != 0 || num(x, "tid") != num(y, "tid")) continue;
            double from = num(x, "ts") > num(y, "ts") ? num(x, "ts") : num(y, "ts");
            double xe = num(x, "ts") + num(x, "dur"), ye = num(y, "ts") + num(y, "dur");
            if ((xe < ye ? xe : ye) - from > 0.002) { /* three decimals are written */
                printf("# %s and %s overlap\n", str(x, "name"), str(y, "name"));
                return false;
            }
        }
    }
    return true;
}

static uint32_t count(json_t *events, const char *name_begins, double node)
{
    uint32_t n = 0;
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *x = json_array_get(events, i), *a = json_object_get(x, "args");
        if (strncmp(str(x, "name"), name_begins, strlen(name_begins)) != 0) continue;
        n += node < 0 || (json_object_get(a, "node") && num(a, "node") == node);
    }
    return n;
}

TEST(every_node_of_every_step_is_there_once)
{
    struct toy t;
    setting(&t, 1 << 20);
    CHECK(run(&t, NULL));
    const char *path = world_dir("trace.json");
    rmdir(path); /* a name is wanted, not a folder */
    CHECK(stk_trace_write(t.e, path) == STK_OK);
    json_t *events = load(path);
    CHECK(events != NULL);
    const struct plan *p = t.e->plan_train;
    bool all = true;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        if (p->nodes[i].resource == PLAN_NONE) continue;
        /* the first step has no update before it */
        uint32_t want = p->nodes[i].part == PLAN_RUN_UPDATE ? STEPS - 1 : STEPS;
        if (count(events, "", i) != want) {
            printf("# node %u is there %u times, not %u\n", i, count(events, "", i), want);
            all = false;
        }
    }
    CHECK(all);
    CHECK(count(events, "step ", -1) == STEPS);
    CHECK(rows_ok(events));
    json_decref(events);
    stk_close(t.e);
}

TEST(a_small_memory_keeps_the_end)
{
    struct toy t;
    setting(&t, 64 * sizeof(struct trace_event));
    CHECK(run(&t, NULL));
    const char *path = world_dir("short.json");
    rmdir(path);
    CHECK(stk_trace_write(t.e, path) == STK_OK);
    json_t *events = load(path);
    CHECK(events != NULL && rows_ok(events));
    CHECK(count(events, "step 3", -1) == 1);
    json_decref(events);
    /* and the run goes on, and can be written again */
    CHECK(toy_step(&t, 0.01, NULL) == STK_OK);
    CHECK(stk_trace_write(t.e, path) == STK_OK);
    events = load(path);
    CHECK(events != NULL && rows_ok(events) && count(events, "step 4", -1) == 1);
    json_decref(events);
    stk_close(t.e);
}

TEST(tracing_changes_no_bit_and_is_in_the_table)
{
    struct toy t;
    uint64_t with = 1, without = 2;
    setting(&t, 1 << 20);
    CHECK(run(&t, &with));
    CHECK(world_table(t.e, "host", "trace of what happened") == 1 << 20);
    stk_close(t.e);
    setting(&t, 0);
    CHECK(run(&t, &without));
    CHECK(world_table(t.e, "host", "trace of what happened") == 0);
    CHECK(with == without);
    stk_close(t.e);
}

TEST(refusals)
{
    struct toy t;
    setting(&t, 0);
    CHECK(run(&t, NULL));
    CHECK(stk_trace_write(t.e, "x.json") == STK_ERR_STATE);
    CHECK(strstr(stk_error_text(t.e), "trace_bytes") != NULL);
    stk_close(t.e);
    setting(&t, 1 << 20);
    CHECK(run(&t, NULL));
    CHECK(stk_trace_write(t.e, "/nowhere/x.json") == STK_ERR_IO);
    CHECK(strstr(stk_error_text(t.e), "/nowhere/x.json") != NULL);
    CHECK(toy_step(&t, 0.01, NULL) == STK_OK);
    stk_close(t.e);
}

TEST_MAIN()
