/* trainer/train_durable.c - durable steps as a training run has them: OUT/run.json, which says
 * under which name and where a run's durable store lies; what a dead run left; asking for one every
 * --durable steps; dropping the store when its run needs it no more.
 *
 * run.json is there as long as a durable store may be. "discard": true in it: the result lies
 * elsewhere, what is still on the drives is rubbish (a kill between that and the removal changes
 * nothing). Must not know tables or files of the store. Application's thread; blocking. */
#include "base/mem.h"
#include "base/sys.h"
#include "formats/files.h"
#include "trainer/train.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define RUN_JSON "run.json"
#define RUN_PREFIX "stoker-run-"
#define PREFIX_CHARS (sizeof RUN_PREFIX - 1)

/* Folders to look in: those given, then those that run.json names; each once, existing ones
 * only. */
struct folders { char *path[STK_NVME_MAX]; uint32_t n; };

static void folders_add(struct folders *f, const char *path)
{
    char real[PATH_MAX];
    if (!path || f->n == STK_NVME_MAX || !realpath(path, real)) return;
    for (uint32_t i = 0; i < f->n; i++)
        if (strcmp(f->path[i], real) == 0) return;
    if ((f->path[f->n] = sys_strdup(real))) f->n++;
}

static void folders_free(struct folders *f)
{
    for (uint32_t i = 0; i < f->n; i++) sys_free(f->path[i]);
    f->n = 0;
}

static void folders_given(struct folders *f, const struct train *t)
{
    for (uint32_t i = 0; i < t->o.nvme.n; i++) folders_add(f, t->o.nvme.item[i]);
}

static stk_status find_in(const struct folders *f, const char *run_id, uint64_t *step,
                          char **client, char **where)
{
    *where = NULL;
    if (client) *client = NULL;
    if (f->n == 0) return STK_END;
    return stk_find_durable((const char *const *)f->path, f->n, run_id, step, client, where);
}

/* --- run.json --------------------------------------------------------------------------------- */

static stk_status read_run(const struct train *t, json_t **doc, struct stk_error *err)
{
    char *path = sys_format("%s/" RUN_JSON, t->o.out);
    *doc = NULL;
    if (!path) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    struct stk_error why = { 0 };
    stk_status st =
        access(path, F_OK) == 0 ? files_read_json(path, 1u << 20, 8, doc, &why) : STK_OK;
    sys_free(path);
    if (st == STK_OK) return STK_OK;
    return stk_error_set(err, st, why.os_errno,
                         "%s; it names the store of durable steps: put it back, or remove it and, "
                         "by hand, what its run left in the --nvme folders",
                         why.text);
}

static stk_status write_run(const struct train *t, bool discard, struct stk_error *err)
{
    struct folders f = { 0 };
    folders_given(&f, t);
    for (uint32_t i = 0; i < t->left.n_folders; i++) folders_add(&f, t->left.folders[i]);
    json_t *list = json_array();
    for (uint32_t i = 0; i < f.n; i++) json_array_append_new(list, json_string(f.path[i]));
    json_t *doc = json_pack("{s:s, s:o, s:b}", "run_id", t->left.run_id, "nvme", list, "discard",
                            (int)discard);
    char *text = doc ? json_dumps(doc, JSON_INDENT(2)) : NULL,
         *path = sys_format("%s/" RUN_JSON, t->o.out), *parent = files_parent(t->o.out);
    stk_status st = text && path && parent
                        ? files_replace(path, text, strlen(text), err)
                        : stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for " RUN_JSON);
    if (st == STK_OK) sys_fsync_dir(parent); /* --out itself may be new */
    free(text);
    sys_free(path);
    sys_free(parent);
    json_decref(doc);
    folders_free(&f);
    return st;
}

static void remove_run(const struct train *t)
{
    char *path = sys_format("%s/" RUN_JSON, t->o.out);
    if (path && unlink(path) == 0) sys_fsync_dir(t->o.out);
    sys_free(path);
}

/* --- what a dead run left --------------------------------------------------------------------- */

/* What cannot be removed (a file that is not ours, a folder that may not be written) does not stop
 * the run once no durable step is there any more. */
static bool nothing_durable(const struct train_left *l)
{
    uint64_t step;
    char *where = NULL;
    stk_status st =
        stk_find_durable((const char *const *)l->folders, l->n_folders, l->run_id, &step, NULL,
                         &where);
    stk_free(where);
    return st == STK_END;
}

static stk_status discard_left(struct train *t, struct stk_error *err)
{
    struct train_left *l = &t->left;
    char *where = NULL;
    stk_status st = l->n_folders ? stk_discard_found((const char *const *)l->folders, l->n_folders,
                                                     l->run_id, &where)
                                 : STK_END;
    if (st == STK_ERR_IO && nothing_durable(l)) {
        printf("--discard: %s; remove what is left by hand\n", where ? where : stk_status_text(st));
        st = STK_OK;
    }
    if (st != STK_OK && st != STK_END)
        stk_error_set(err, st, 0, "--discard: %s", where ? where : stk_status_text(st));
    sys_free(where);
    return st == STK_END ? STK_OK : st;
}

static void forget_left(struct train_left *l)
{
    l->found = false;
    json_decref(l->client);
    l->client = NULL;
}

/* run.json names a store and nothing of it is there: what it lay on may only be away. */
static stk_status nothing_found(const struct train *t, const json_t *doc, struct stk_error *err)
{
    size_t i;
    const json_t *item;
    if (t->o.discard) return STK_OK;
    json_array_foreach(json_object_get(doc, "nvme"), i, item)
    {
        const char *path = json_string_value(item);
        if (!path || access(path, R_OK | X_OK) == 0) continue;
        return stk_error_set(err, STK_ERR_STATE, errno,
                             "--out %s: its " RUN_JSON " says that durable steps may be in %s, "
                             "which cannot be looked into (%s): bring that folder back, or go on "
                             "without it with --discard",
                             t->o.out, path, strerror(errno));
    }
    if (json_array_size(json_object_get(doc, "nvme")) > 0)
        printf("durable    nothing is left where " RUN_JSON " says durable steps may be (%s%s)\n",
               json_string_value(json_array_get(json_object_get(doc, "nvme"), 0)),
               json_array_size(json_object_get(doc, "nvme")) > 1 ? ", ..." : "");
    return STK_OK;
}

/* What the drives hold of the run that run.json names. */
static stk_status look(struct train *t, const json_t *doc, struct stk_error *err)
{
    struct train_left *l = &t->left;
    struct folders f = { 0 };
    size_t i;
    const json_t *item;
    folders_given(&f, t);
    json_array_foreach(json_object_get(doc, "nvme"), i, item)
        folders_add(&f, json_string_value(item));
    char *client = NULL, *where = NULL;
    stk_status st = find_in(&f, l->run_id, &l->step, &client, &where);
    memcpy(l->folders, f.path, sizeof l->folders);
    l->n_folders = f.n;
    json_array_foreach(json_object_get(doc, "nvme"), i, item)
    {
        const char *path = json_string_value(item);
        if (path && access(path, R_OK | X_OK) != 0 && l->n_away < STK_NVME_MAX &&
            (l->away[l->n_away] = sys_strdup(path)))
            l->n_away++;
    }
    l->found = st == STK_OK;
    l->client = client ? json_loads(client, 0, NULL) : NULL;
    l->where = where;
    stk_free(client);
    if (st == STK_END && !json_is_true(json_object_get(doc, "discard")))
        return nothing_found(t, doc, err);
    if (st == STK_OK || st == STK_END) return STK_OK;
    bool partial = st == STK_ERR_CORRUPT || st == STK_ERR_CONFIG;
    if (partial && t->o.discard) {
        l->damaged = true;
        return STK_OK;
    }
    char without[160] = "";
    if (partial) train_say_without(t, without, sizeof without);
    return stk_error_set(err, st, 0, "--out %s: durable steps of its run: %s%s%s", t->o.out,
                         where ? where : stk_status_text(st), partial ? "; " : "", without);
}

/* A path under which the run's folder still is, or may be; NULL: on none of them. */
static const char *still_on(const struct train_left *l, const char *const *paths, uint32_t n,
                            int *why)
{
    for (uint32_t i = 0; i < n; i++) {
        char *folder = sys_format("%s/" RUN_PREFIX "%s", paths[i], l->run_id);
        bool there = !folder || access(folder, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR);
        *why = errno;
        if (there && folder && access(paths[i], R_OK | X_OK) == 0) *why = 0;
        sys_free(folder);
        if (there) return paths[i];
    }
    return NULL;
}

static const char *still_there(const struct train *t, int *why)
{
    const struct train_left *l = &t->left;
    const char *path = still_on(l, (const char *const *)l->folders, l->n_folders, why);
    if (!path) path = still_on(l, (const char *const *)l->away, l->n_away, why);
    if (!path && l->own) path = still_on(l, t->o.nvme.item, t->o.nvme.n, why);
    return path;
}

/* A kill came between the removal of the store and that of run.json, or the store could not be
 * removed: it goes now. As long as it cannot, run.json is what names it. */
static stk_status clear_rubbish(struct train *t, struct stk_error *err)
{
    struct train_left *l = &t->left;
    const char *path = NULL;
    int why = 0;
    if (!t->o.dry_run && t->o.verb == FOR_TRAIN) {
        struct stk_error kept = { 0 };
        stk_status st = discard_left(t, &kept);
        path = still_there(t, &why);
        if (!path && st != STK_OK) return stk_error_forward(err, &kept);
        if (!path) remove_run(t);
    }
    forget_left(l);
    if (!path || t->o.discard) return STK_OK; /* --discard names them once more, and forgets */
    return stk_error_set(err, STK_ERR_STATE, why,
                         "--out %s: its run has ended, and %s/" RUN_PREFIX "%s, which it needs no "
                         "more, cannot be removed%s%s: mend that and it goes by itself, or go on "
                         "without it with --discard",
                         t->o.out, path, l->run_id, why ? ": " : "", why ? strerror(why) : "");
}

stk_status train_left_find(struct train *t, struct stk_error *err)
{
    struct train_left *l = &t->left;
    json_t *doc;
    if (!t->o.out || t->o.storage == STK_STORAGE_SIM) return STK_OK;
    STK_TRY(read_run(t, &doc, err));
    const char *id = json_string_value(json_object_get(doc, "run_id"));
    if (!id || strlen(id) + 1 != sizeof l->run_id) {
        json_decref(doc);
        return STK_OK;
    }
    memcpy(l->run_id, id, sizeof l->run_id);
    stk_status st = look(t, doc, err);
    bool rubbish = json_is_true(json_object_get(doc, "discard"));
    json_decref(doc);
    STK_TRY(st);
    if (rubbish) STK_TRY(clear_rubbish(t, err));
    if (!l->found || t->o.resume || t->o.discard) return STK_OK;
    return stk_error_set(err, STK_ERR_STATE, 0,
                         "--out %s: its run ended early and left %s: go on with --resume, or drop "
                         "it with --discard",
                         t->o.out, l->where);
}

/* Folders that run.json names and that cannot be looked into. */
static void say_away(const struct train_left *l)
{
    for (uint32_t i = 0; i < l->n_away; i++)
        printf("--discard: %s %s: should it come back, remove %s/" RUN_PREFIX "%s by hand\n",
               l->away[i],
               access(l->away[i], F_OK) == 0 ? "cannot be looked into" : "is not there", l->away[i],
               l->run_id);
}

static bool is_run_name(const char *name)
{
    return strncmp(name, RUN_PREFIX, PREFIX_CHARS) == 0 && strlen(name) == PREFIX_CHARS + 16;
}

/* Without run.json nobody knows whose the stores in --nvme are: they are named, and stay. */
static void say_strangers(const struct train *t)
{
    struct folders f = { 0 };
    folders_given(&f, t);
    for (uint32_t i = 0; i < f.n; i++) {
        DIR *d = opendir(f.path[i]);
        for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
            uint64_t step;
            char *where = NULL;
            if (!is_run_name(e->d_name)) continue;
            stk_status st = find_in(&f, e->d_name + PREFIX_CHARS, &step, NULL, &where);
            bool dead = st == STK_OK || st == STK_ERR_CORRUPT || st == STK_ERR_CONFIG;
            if (dead)
                printf("--discard: %s/%s is left by a run that ended; there is no " RUN_JSON
                       " in --out that says whose it is: if no run needs it, remove that folder by "
                       "hand\n",
                       f.path[i], e->d_name);
            stk_free(where);
        }
        if (d) closedir(d);
    }
    folders_free(&f);
}

bool train_left_discards(const struct train *t)
{
    const struct train_left *l = &t->left;
    return t->o.discard && !t->o.dry_run && t->o.verb == FOR_TRAIN && (l->found || l->damaged);
}

stk_status train_left_discard(struct train *t, struct stk_error *err)
{
    struct train_left *l = &t->left;
    if (!t->o.discard || t->o.dry_run || t->o.verb != FOR_TRAIN) return STK_OK;
    if (!train_left_discards(t)) {
        printf("--discard: nothing was left by a run of --out %s%s\n", t->o.out,
               l->n_away ? " where it can be looked for" : "");
        if (!l->run_id[0]) say_strangers(t);
    } else {
        STK_TRY(discard_left(t, err));
        printf("discarded  %s\n", l->where ? l->where : "durable steps");
    }
    say_away(l);
    if (l->run_id[0]) remove_run(t);
    forget_left(l);
    return STK_OK;
}

/* --- which of the two a resumed run takes ----------------------------------------------------- */

/* Where the run is taken over, its folders must be given. */
static stk_status check_given(struct train *t, struct stk_error *err)
{
    struct folders f = { 0 };
    char *where = NULL;
    uint64_t step;
    folders_given(&f, t);
    stk_status st = find_in(&f, t->left.run_id, &step, NULL, &where);
    stk_free(where);
    folders_free(&f);
    if (st == STK_OK) return STK_OK;
    return stk_error_set(err, STK_ERR_CONFIG, 0,
                         "--resume: there is %s: give its folders with --nvme, or drop it with "
                         "--discard",
                         t->left.where);
}

stk_status train_left_choose(struct train *t, uint64_t checkpoint_step, bool have_checkpoint,
                             bool *taken, struct stk_error *err)
{
    struct train_left *l = &t->left;
    *taken = false;
    if (!l->found || t->o.discard) return STK_OK;
    *taken = !have_checkpoint || l->step >= checkpoint_step;
    l->checkpoint_step = have_checkpoint ? checkpoint_step : 0;
    if (!*taken && !t->o.durable) return STK_OK; /* stays where it is until the run is complete */
    STK_TRY(check_given(t, err));
    t->o.adopt = true;
    memcpy(t->o.run_id, l->run_id, sizeof t->o.run_id);
    return STK_OK;
}

/* --- this run's ------------------------------------------------------------------------------- */

static stk_status make_id(char id[17], struct stk_error *err)
{
    uint64_t x;
    if (getrandom(&x, sizeof x, 0) != (ssize_t)sizeof x)
        return stk_error_set(err, STK_ERR_IO, errno, "no random numbers for a run id: %s",
                             strerror(errno));
    snprintf(id, 17, "%016" PRIx64, x);
    return STK_OK;
}

stk_status train_durable_name(struct train *t, struct stk_error *err)
{
    if (!t->o.durable || t->o.adopt) return STK_OK;
    return make_id(t->o.run_id, err);
}

stk_status train_durable_begin(struct train *t, struct stk_error *err)
{
    struct train_left *l = &t->left;
    if (!t->o.run_id[0] || t->o.storage == STK_STORAGE_SIM) return STK_OK;
    memcpy(l->run_id, t->o.run_id, sizeof l->run_id);
    l->own = true;
    return write_run(t, false, err);
}

/* Steps, offsets and counts apart. */
static bool same_but_numbers(const char *a, const char *b)
{
    while (*a && *b) {
        a += strspn(a, "0123456789");
        b += strspn(b, "0123456789");
        if (*a != *b) return false;
        if (*a) a++, b++;
    }
    return *a == *b;
}

void train_alarm(struct train *t, const char *what)
{
    bool again = same_but_numbers(what, t->alarm);
    fflush(stdout);
    fprintf(stderr, "stoker: ALARM: step %" PRIu64 ": %s\n", t->step,
            again ? "as at the alarm before" : what);
    snprintf(t->alarm, sizeof t->alarm, "%s", what);
}

stk_status train_durable(struct train *t, struct stk_error *err)
{
    if (!t->o.durable || t->step % t->o.durable != 0) return STK_OK;
    char *client = train_client_json(t);
    if (!client)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a durable step's description");
    stk_status st = stk_durable(t->r.e, client);
    if (st == STK_ERR_IO) { /* of the one before; this one was not taken yet */
        train_alarm(t, stk_error_text(t->r.e));
        st = stk_durable(t->r.e, client);
    }
    free(client);
    return run_engine(&t->r, st, err);
}

void train_durable_end(struct train *t)
{
    struct train_left *l = &t->left;
    struct stk_error err = { 0 };
    if (!l->run_id[0]) return;
    if (write_run(t, true, &err) != STK_OK) { /* it stays: nothing is lost */
        train_alarm(t, err.text);
        return;
    }
    if (l->own) stk_discard_durable(t->r.e);
    l->over = true;
}

/* The step of a durable store that is there to go on from; 0: none. */
uint64_t train_durable_left(const struct train *t)
{
    const struct train_left *l = &t->left;
    struct folders f = { 0 };
    uint64_t step = 0;
    char *where = NULL;
    if (l->over || !(l->own || l->found)) return 0;
    folders_given(&f, t);
    for (uint32_t i = 0; i < l->n_folders; i++) folders_add(&f, l->folders[i]);
    if (find_in(&f, l->run_id, &step, NULL, &where) != STK_OK) step = 0;
    stk_free(where);
    folders_free(&f);
    return step;
}

/* The engine is closed: what is not needed any more goes, and run.json with it. */
void train_durable_close(struct train *t)
{
    struct train_left *l = &t->left;
    struct stk_error err = { 0 };
    if (l->own || l->over) {
        struct folders f = { 0 };
        uint64_t step;
        char *where = NULL;
        folders_given(&f, t);
        for (uint32_t i = 0; i < l->n_folders; i++) folders_add(&f, l->folders[i]);
        if (l->over && !l->own && discard_left(t, &err) != STK_OK) train_alarm(t, err.text);
        stk_status st = find_in(&f, l->run_id, &step, NULL, &where);
        int why = 0;
        const char *path = still_there(t, &why);
        if (st == STK_END && !path) remove_run(t);
        if (path && l->over)
            printf("left       %s/" RUN_PREFIX "%s: could not be removed%s%s; %s/" RUN_JSON
                   " is kept and names it: mend that, and the next run of this --out (or --discard)"
                   " removes it\n",
                   path, l->run_id, why ? ": " : "", why ? strerror(why) : "", t->o.out);
        if (st == STK_OK && l->own) printf("left       %s: go on with --resume\n", where);
        stk_free(where);
        folders_free(&f);
    }
    for (uint32_t i = 0; i < l->n_folders; i++) sys_free(l->folders[i]);
    for (uint32_t i = 0; i < l->n_away; i++) sys_free(l->away[i]);
    stk_free(l->where);
    json_decref(l->client);
    memset(l, 0, sizeof *l);
}
