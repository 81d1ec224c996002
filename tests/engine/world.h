/* tests/engine/world.h - what the engine's tests share: a scratch folder that goes away at exit,
 * placements by name, comparing toys. */
#ifndef TESTS_ENGINE_WORLD_H
#define TESTS_ENGINE_WORLD_H

#include "base/sys.h"
#include "tests/engine/toy.h"
#include "tests/test.h"
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

static char world_path[512];
static char *world_names[256]; /* every folder handed out, so that its name stays valid */

static inline void world_remove(void)
{
    if (world_path[0]) sys_remove_tree(world_path);
    for (uint32_t i = 0; i < 256; i++) free(world_names[i]);
}

/* The scratch folder of this process; `sub` (may be NULL) is made inside it. The string is valid to
 * the end. */
static inline const char *world_dir(const char *sub)
{
    char name[768];
    uint32_t i = 0;
    if (!world_path[0]) {
        const char *tmp = getenv("TMPDIR");
        snprintf(world_path, sizeof world_path, "%s/stoker-engine-XXXXXX", tmp ? tmp : "/tmp");
        if (!mkdtemp(world_path)) abort();
        atexit(world_remove);
    }
    snprintf(name, sizeof name, "%s%s%s", world_path, sub ? "/" : "", sub ? sub : "");
    while (i < 255 && world_names[i] && strcmp(world_names[i], name)) i++;
    if (!world_names[i] && !(world_names[i] = strdup(name))) abort();
    sys_mkdirs(name);
    return world_names[i];
}

/* Runs an expression that must succeed; prints the sentence, closes the toy and leaves the test if
 * not. */
#define RUN(t, expr)                                                                               \
    do {                                                                                           \
        stk_status st_ = (expr);                                                                   \
        if (st_ != STK_OK) {                                                                       \
            printf("# %s: %s\n", stk_status_name(st_), (t)->e ? stk_error_text((t)->e) : "?");     \
            test_fail(__FILE__, __LINE__, #expr);                                                  \
            stk_close((t)->e);                                                                     \
            (t)->e = NULL;                                                                         \
            return;                                                                                \
        }                                                                                          \
    } while (0)

/* A refusal: this status and a sentence that holds every word given (up to NULL). */
static inline bool world_refused(const char *file, int line, stk_status got, stk_status want,
                                 const stk_engine *e, const char *const *words)
{
    const char *text = e ? stk_error_text(e) : "";
    bool ok = got == want && text[0];
    for (; ok && *words; words++) ok = strstr(text, *words) != NULL;
    if (ok) return true;
    printf("# got %s: %s\n# wanted %s%s%s\n", stk_status_name(got), text, stk_status_name(want),
           *words ? " and the word: " : "", *words ? *words : "");
    test_fail(file, line, "a refusal of this kind");
    return false;
}
#define REFUSED(got, want, e, ...)                                                                 \
    world_refused(__FILE__, __LINE__, got, want, e,                                                \
                  (const char *const[]){ __VA_ARGS__ __VA_OPT__(, ) NULL })

enum world_place { WORLD_HOST, WORLD_NVME, WORLD_MIXED, WORLD_PLACE_N };

static inline void world_place(struct toy *t, enum world_place p)
{
    t->cfg.nvme[0] = world_dir("nvme");
    t->cfg.params = t->cfg.optimizer_state = t->cfg.grads =
        p == WORLD_NVME ? STK_TIER_NVME : STK_TIER_HOST;
    t->cfg.device = p == WORLD_NVME ? STK_DEVICE_HOST_DISCRETE : STK_DEVICE_HOST;
    if (p == WORLD_MIXED) t->cfg.optimizer_state = t->cfg.grads = STK_TIER_NVME;
}

/* Opens with `p` and fills. */
static inline stk_status world_start(struct toy *t, enum world_place p)
{
    world_place(t, p);
    STK_TRY(toy_open(t));
    return toy_fill(t);
}

static inline stk_status world_steps(struct toy *t, int n, double lr)
{
    for (int i = 0; i < n; i++) STK_TRY(toy_step(t, lr, NULL));
    return STK_OK;
}

/* Everything of a tensor as f32; caller frees. */
static inline float *world_read(struct toy *t, uint32_t tensor, stk_what what)
{
    uint64_t n = toy_tensor_elems(t, tensor);
    float *v = calloc(n ? n : 1, sizeof *v);
    if (v && stk_tensor_read(t->e, tensor, what, 0, n, v, STK_F32) != STK_OK) {
        printf("# reading tensor %u: %s\n", tensor, stk_error_text(t->e));
        free(v);
        return NULL;
    }
    return v;
}

/* Bytes of the rows of one tier of the table, optionally of one owner. */
static inline uint64_t world_table(const stk_engine *e, const char *tier, const char *owner)
{
    const char *t, *o;
    uint64_t b, sum = 0;
    for (uint32_t i = 0; stk_table(e, i, &t, &o, &b); i++)
        if (!strcmp(t, tier) && (!owner || !strcmp(o, owner))) sum += b;
    return sum;
}

#endif
