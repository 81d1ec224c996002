/* nvme/store_find.c - durable stores of runs that have ended: reading their tables, adopting one,
 * discarding one.
 *
 * Application's thread. Changes nothing but what adopting needs: the lock of each folder, and the
 * newest table written to the paths that lack it. Which path of its set a folder is, its
 * `extents-<k>.bin` says; the names in the table only serve sentences, so a drive may be mounted
 * elsewhere meanwhile. */
#include "nvme/store_impl.h"
#include "nvme/io_sim.h"
#include "base/sys.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const struct store_table_head *head_of(const struct store_run *r)
{
    return (const void *)r->table;
}

static void say(char *text, size_t text_bytes, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void say(char *text, size_t text_bytes, const char *fmt, ...)
{
    size_t at = strlen(text);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text + at, text_bytes - at, fmt, ap);
    va_end(ap);
}

/* --- reading the tables of one run ------------------------------------------------------------ */

/* One half; `*out` (sys_free) only when it is whole. */
static enum store_half_state read_half(struct io_sim_disk *disk, const char *name, const char *id,
                                       uint64_t half_bytes, uint32_t half, uint8_t **out,
                                       char *why, size_t why_bytes)
{
    struct store_table_head head;
    uint64_t at = half * half_bytes;
    *out = NULL;
    int64_t n = store_file_read(disk, name, &head, sizeof head, at);
    if (n < 0) {
        snprintf(why, why_bytes, "cannot be read: %s", strerror(errno));
        return HALF_UNKNOWN;
    }
    /* with the head alone it cannot be whole, and its size not be trusted beyond the half */
    enum store_half_state state =
        store_table_check((const uint8_t *)&head, n < 0 ? 0 : (uint64_t)n, id, why, why_bytes);
    if (state != HALF_BROKEN || n < (int64_t)sizeof head || head.size_bytes > half_bytes ||
        head.size_bytes < sizeof head) {
        if (n == (int64_t)sizeof head && strncmp(why, "cut short", 9) == 0)
            snprintf(why, why_bytes, "cut short: %llu of its %llu bytes",
                     (unsigned long long)half_bytes, (unsigned long long)head.size_bytes);
        return state;
    }
    uint8_t *table = sys_calloc(1, head.size_bytes);
    if (!table) {
        snprintf(why, why_bytes, "no memory for its %llu bytes",
                 (unsigned long long)head.size_bytes);
        return HALF_UNKNOWN;
    }
    n = store_file_read(disk, name, table, head.size_bytes, at);
    if (n < 0) {
        snprintf(why, why_bytes, "cannot be read: %s", strerror(errno));
        state = HALF_UNKNOWN;
    } else {
        state = store_table_check(table, (uint64_t)n, id, why, why_bytes);
    }
    if (state == HALF_WHOLE) *out = table;
    else sys_free(table);
    return state;
}

static bool table_size(const struct store_run *r, uint32_t path, struct io_sim_disk *disk,
                       char name[STORE_PATH_TEXT_MAX], uint64_t *bytes)
{
    snprintf(name, STORE_PATH_TEXT_MAX, "%s/" STORE_TABLE_NAME, r->folder[path]);
    if (!store_file_size(disk, name, bytes)) return false;
    if (*bytes > STORE_TABLE_BYTES_MAX) *bytes = STORE_TABLE_BYTES_MAX; /* no table is larger */
    return true;
}

/* Both halves of one path's table. All paths' are of one size: one that is smaller was cut short,
 * and its second half begins where that of the others does. */
static void read_table(struct store_run *r, uint32_t path, struct io_sim_disk *disk,
                       uint64_t seqs[2], bool *unknown)
{
    char name[STORE_PATH_TEXT_MAX], why[96];
    uint64_t bytes;
    seqs[0] = seqs[1] = 0;
    *unknown = false;
    if (!table_size(r, path, disk, name, &bytes)) return;
    say(r->why, sizeof r->why, "%s%.200s", r->why[0] ? "; " : "", name);
    if (bytes / 2 < r->half_bytes)
        say(r->why, sizeof r->why, " (%llu bytes, %llu are expected)", (unsigned long long)bytes,
            (unsigned long long)(2 * r->half_bytes));
    for (uint32_t h = 0; h < 2; h++) {
        uint8_t *table;
        enum store_half_state state =
            read_half(disk, name, r->run_id, r->half_bytes, h, &table, why, sizeof why);
        r->unknown |= state == HALF_UNKNOWN;
        *unknown |= state == HALF_UNKNOWN;
        r->broken |= state == HALF_BROKEN;
        say(r->why, sizeof r->why, "%s half %u %s", h ? "," : ":", h, why);
        if (!table) continue;
        seqs[h] = ((const struct store_table_head *)(const void *)table)->seq;
        if (r->table && head_of(r)->seq >= seqs[h]) {
            sys_free(table);
            continue;
        }
        sys_free(r->table);
        r->table = table;
        r->half = h;
    }
}

/* False: the run has nothing on this path. */
static bool find_folder(struct store_run *r, uint32_t path, struct io_sim_disk *disk)
{
    char name[STORE_PATH_TEXT_MAX];
    struct stat st;
    uint64_t bytes;
    bool there = !disk && lstat(r->folder[path], &st) == 0 && S_ISDIR(st.st_mode);
    r->number[path] = STORE_PATHS_MAX;
    for (uint32_t j = 0; j < STORE_PATHS_MAX; j++) {
        snprintf(name, sizeof name, "%s/extents-%u.bin", r->folder[path], j);
        if (!store_file_size(disk, name, &bytes)) continue;
        if (r->number[path] == STORE_PATHS_MAX) r->number[path] = j;
        there |= disk != NULL;
    }
    return there;
}

stk_status store_run_read(const char *const *paths, uint32_t n_paths, const char *run_id,
                          struct io_sim_disk *disk, struct store_run *out, struct stk_error *err)
{
    uint64_t seqs[STORE_PATHS_MAX][2], bytes;
    bool unknown[STORE_PATHS_MAX];
    char name[STORE_PATH_TEXT_MAX];
    memset(out, 0, sizeof *out);
    STK_ASSERT(n_paths <= STORE_PATHS_MAX);
    snprintf(out->run_id, sizeof out->run_id, "%s", run_id);
    for (uint32_t k = 0; k < n_paths; k++) {
        out->folder[k] = sys_format("%s/" STORE_FOLDER_PREFIX "%s", paths[k], run_id);
        if (!out->folder[k]) {
            store_run_free(out);
            return stk_error_set(err, STK_ERR_NOMEM, 0, "%s: no memory for file names", paths[k]);
        }
        if (!find_folder(out, k, disk)) {
            sys_free(out->folder[k]);
            out->folder[k] = NULL;
            continue;
        }
        out->n_folders++;
        if (table_size(out, k, disk, name, &bytes) && bytes / 2 > out->half_bytes)
            out->half_bytes = bytes / 2;
    }
    for (uint32_t k = 0; k < n_paths; k++)
        if (out->folder[k]) read_table(out, k, disk, seqs[k], &unknown[k]);
    for (uint32_t k = 0; k < n_paths && out->table; k++) {
        out->has_newest[k] = out->folder[k] && seqs[k][out->half] == head_of(out)->seq;
        out->sure |= out->has_newest[k] && !unknown[k];
    }
    return STK_OK;
}

void store_run_free(struct store_run *r)
{
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++) sys_free(r->folder[k]);
    sys_free(r->table);
    memset(r, 0, sizeof *r);
}

/* Which of the given paths is number j of the run's set. STORE_PATHS_MAX: none. */
static uint32_t given_path(const struct store_run *r, uint32_t j)
{
    uint32_t k = 0;
    while (k < STORE_PATHS_MAX && !(r->folder[k] && r->number[k] == j)) k++;
    return k;
}

/* Every path of the set is there, once. */
static stk_status check_set(const struct store_run *r, struct stk_error *err)
{
    char missing[500] = "";
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++) {
        if (!r->folder[k] || given_path(r, r->number[k]) == k) continue;
        if (r->number[k] < STORE_PATHS_MAX)
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "%s: is the same part of the run as %s; remove the copy",
                                 r->folder[k], r->folder[given_path(r, r->number[k])]);
    }
    for (uint32_t j = 0; j < head_of(r)->n_paths; j++)
        if (given_path(r, j) == STORE_PATHS_MAX)
            say(missing, sizeof missing, "%s%.200s", missing[0] ? ", " : "",
                store_table_path(r->table, j));
    if (!missing[0]) return STK_OK;
    return stk_error_set(err, STK_ERR_CONFIG, 0,
                         "the durable store of run %s (step %llu) lies on %u paths, and its part "
                         "of %s is not there: name that path as well",
                         r->run_id, (unsigned long long)head_of(r)->step, head_of(r)->n_paths,
                         missing);
}

/* Why no table of the run counts. STK_OK: there never was one. */
static stk_status none_counts(const struct store_run *r, struct stk_error *err)
{
    if (!r->broken && !r->unknown) return STK_OK;
    return stk_error_set(err, STK_ERR_CORRUPT, 0, "run %s left tables and %s: %s", r->run_id,
                         r->table ? "a newer one than what can be read may be there"
                                  : "none is whole",
                         r->why);
}

/* --- find ------------------------------------------------------------------------------------- */

struct id_list { char (*ids)[STORE_RUN_ID_MAX]; uint32_t n; };

static stk_status id_add(struct id_list *list, const char *folder_name, struct stk_error *err)
{
    const char *id = folder_name + strlen(STORE_FOLDER_PREFIX);
    for (uint32_t i = 0; i < list->n; i++)
        if (strncmp(list->ids[i], id, STORE_RUN_ID_CHARS) == 0) return STK_OK;
    void *more = sys_realloc(list->ids, (list->n + 1) * sizeof *list->ids);
    if (!more) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a list of runs");
    list->ids = more;
    snprintf(list->ids[list->n++], STORE_RUN_ID_MAX, "%.16s", id);
    return STK_OK;
}

static stk_status list_on_sim(struct id_list *list, const char *path,
                              const struct io_sim_disk *disk, struct stk_error *err)
{
    size_t n = strlen(path);
    const char *file;
    for (uint32_t i = 0; (file = io_sim_file_name(disk, i)); i++) {
        char name[sizeof STORE_FOLDER_PREFIX + STORE_RUN_ID_CHARS];
        if (strncmp(file, path, n) != 0 || file[n] != '/') continue;
        snprintf(name, sizeof name, "%s", file + n + 1);
        if (store_is_run_folder(name)) STK_TRY(id_add(list, name, err));
    }
    return STK_OK;
}

static stk_status list_runs(struct id_list *list, const char *path, struct stk_error *err)
{
    int fd;
    STK_TRY(store_path_lock(path, &fd, err));
    DIR *dir = opendir(path);
    struct dirent *e;
    stk_status status = STK_OK;
    while (status == STK_OK && dir && (e = readdir(dir)))
        if (store_is_run_folder(e->d_name)) status = id_add(list, e->d_name, err);
    if (dir) closedir(dir);
    sys_close(fd);
    return status;
}

/* Whether a live run holds any of its folders; `text` names it. */
static stk_status run_is_live(const char *const *paths, uint32_t n_paths, const struct store_run *r,
                              bool *live, char text[STORE_LOCK_TEXT_MAX], struct stk_error *err)
{
    *live = false;
    for (uint32_t k = 0; k < n_paths && !*live; k++) {
        int path_fd, fd;
        if (!r->folder[k]) continue;
        STK_TRY(store_path_lock(paths[k], &path_fd, err));
        *live = !store_run_lock(r->folder[k], &fd, text);
        if (fd >= 0) sys_close(fd);
        sys_close(path_fd);
    }
    return STK_OK;
}

static stk_status found_make(const struct store_run *r, const char *const *paths,
                             struct io_sim_disk *disk, struct store_found **out,
                             struct stk_error *err)
{
    const struct store_table_head *h = head_of(r);
    const struct store_table_extent *e = store_table_extents(r->table);
    struct store_found *f = sys_calloc(1, sizeof *f);
    bool ok = f != NULL;
    if (ok) {
        memcpy(f->run_id, r->run_id, sizeof f->run_id);
        f->step = h->step;
        f->n_paths = h->n_paths;
        f->n_extents = h->n_extents;
        f->volatile_classes = h->volatile_classes;
        f->room = h->room;
        f->payload_bytes = h->payload_bytes;
        f->extent_bytes = sys_calloc(h->n_extents + 1, sizeof *f->extent_bytes);
        f->extent_class = sys_calloc(h->n_extents + 1, 1);
        f->payload = sys_calloc(1, h->payload_bytes + 1);
        ok = f->extent_bytes && f->extent_class && f->payload;
    }
    for (uint32_t j = 0; ok && j < h->n_paths; j++) {
        char name[STORE_PATH_TEXT_MAX];
        uint64_t bytes = 0;
        uint32_t k = given_path(r, j);
        f->paths[j] = sys_strdup(paths[k]);
        ok = f->paths[j] != NULL;
        snprintf(name, sizeof name, "%s/extents-%u.bin", r->folder[k], j);
        if (store_file_size(disk, name, &bytes)) f->size_bytes += bytes;
        f->size_bytes += 2 * r->half_bytes;
    }
    if (!ok) {
        store_found_free(f);
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for what was found of run %s",
                             r->run_id);
    }
    for (uint32_t i = 0; i < h->n_extents; i++) {
        f->extent_bytes[i] = e[i].payload_bytes;
        f->extent_class[i] = e[i].cls;
    }
    memcpy(f->payload, e + h->n_extents, h->payload_bytes);
    *out = f;
    return STK_OK;
}

/* What a search has seen so far: the best whole run, and why others were not taken. */
struct search {
    const char *const *paths;
    uint32_t n_paths;
    struct io_sim_disk *disk;
    bool named;
    struct store_run best;
    struct stk_error live, incomplete, corrupt;
};

/* `name` is locked, by whom `text` says, or nobody can tell. */
static stk_status say_held(struct stk_error *err, const char *name, const char *text)
{
    if (strncmp(text, STORE_LOCK_DENIED, sizeof STORE_LOCK_DENIED - 1) == 0)
        return stk_error_set(err, STK_ERR_STATE, 0,
                             "the store of run %s may be in use by a live run: %s; see to the "
                             "permissions of its folder",
                             name, text);
    return stk_error_set(err, STK_ERR_STATE, 0,
                         "the store of run %s is in use by a live run (%s); wait for its end", name,
                         text[0] ? text : "its lock is held");
}

/* Looks at one run; takes it over if it is the best. */
static stk_status consider(struct search *s, const char *id, struct stk_error *err)
{
    struct store_run run;
    char text[STORE_LOCK_TEXT_MAX] = "";
    bool live = false, take = false;
    STK_TRY(store_run_read(s->paths, s->n_paths, id, s->disk, &run, err));
    stk_status status =
        s->disk ? STK_OK : run_is_live(s->paths, s->n_paths, &run, &live, text, err);
    if (status == STK_OK && !s->disk && !live) {
        /* its last transfers may have ended only now: what was read before told the folders alone */
        store_run_free(&run);
        status = store_run_read(s->paths, s->n_paths, id, s->disk, &run, err);
    }
    if (status != STK_OK) {
        /* err says why */
    } else if (live && (run.table || s->named)) {
        say_held(&s->live, id, text);
    } else if (!run.sure) {
        none_counts(&run, &s->corrupt);
    } else if (check_set(&run, &s->incomplete) == STK_OK) {
        take = !s->best.table || head_of(&run)->step > head_of(&s->best)->step;
    }
    if (take) {
        store_run_free(&s->best);
        s->best = run;
    } else {
        store_run_free(&run);
    }
    return status;
}

stk_status store_find(const char *const *paths, uint32_t n_paths, const char *run_id,
                      struct io_sim_disk *disk, struct store_found **out, struct stk_error *err)
{
    struct id_list list = { 0 };
    struct search s = { .paths = paths, .n_paths = n_paths, .disk = disk };
    stk_status status = STK_OK;
    *out = NULL;
    if (n_paths > STORE_PATHS_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "at most %d paths; %u were given",
                             STORE_PATHS_MAX, n_paths);
    s.named = run_id && run_id[0];
    for (uint32_t k = 0; k < n_paths && !s.named && status == STK_OK; k++)
        status = disk ? list_on_sim(&list, paths[k], disk, err) : list_runs(&list, paths[k], err);
    if (s.named) status = consider(&s, run_id, err);
    for (uint32_t i = 0; i < list.n && status == STK_OK; i++)
        status = consider(&s, list.ids[i], err);
    if (status == STK_OK) {
        if (s.best.table) status = found_make(&s.best, paths, disk, out, err);
        else if (s.live.code != STK_OK) status = stk_error_forward(err, &s.live);
        else if (s.incomplete.code != STK_OK) status = stk_error_forward(err, &s.incomplete);
        else if (s.corrupt.code != STK_OK) status = stk_error_forward(err, &s.corrupt);
        else status = STK_END;
    }
    store_run_free(&s.best);
    sys_free(list.ids);
    return status;
}

void store_found_free(struct store_found *f)
{
    if (!f) return;
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++) sys_free(f->paths[k]);
    sys_free(f->extent_bytes);
    sys_free(f->extent_class);
    sys_free(f->payload);
    sys_free(f);
}

/* --- locks of a whole set --------------------------------------------------------------------- */

/* Takes the lock of every folder that is there; a folder without a lock file leaves -1. */
static stk_status lock_all(const char *const *paths, uint32_t n_paths, char *const *folders,
                           int fds[STORE_PATHS_MAX], struct stk_error *err)
{
    char text[STORE_LOCK_TEXT_MAX];
    for (uint32_t k = 0; k < n_paths; k++) {
        int path_fd;
        if (!folders[k]) continue;
        STK_TRY(store_path_lock(paths[k], &path_fd, err));
        bool free_now = store_run_lock(folders[k], &fds[k], text);
        sys_close(path_fd);
        if (!free_now)
            return say_held(err, strrchr(folders[k], '-') + 1, text);
    }
    return STK_OK;
}

static void unlock_all(int fds[STORE_PATHS_MAX])
{
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++)
        if (fds[k] >= 0) sys_close(fds[k]);
}

/* --- discard ---------------------------------------------------------------------------------- */

stk_status store_found_discard(struct store_found *f, struct io_sim_disk *disk,
                               struct stk_error *err)
{
    const char *const *paths = (const char *const *)f->paths;
    int fds[STORE_PATHS_MAX];
    struct store_run run;
    stk_status stays = STK_OK;
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++) fds[k] = -1;
    STK_TRY(store_run_read(paths, f->n_paths, f->run_id, disk, &run, err));
    stk_status status = disk ? STK_OK : lock_all(paths, f->n_paths, run.folder, fds, err);
    /* tables first: a set that lost a path would not be known for one that was complete */
    for (uint32_t k = 0; status == STK_OK && k < f->n_paths && !disk; k++) {
        char name[STORE_PATH_TEXT_MAX];
        if (!run.folder[k]) continue;
        snprintf(name, sizeof name, "%s/" STORE_TABLE_NAME, run.folder[k]);
        (void)remove(name);
    }
    for (uint32_t k = 0; status == STK_OK && k < f->n_paths; k++)
        if (run.folder[k] && store_folder_remove(run.folder[k], disk, &fds[k]) != 0)
            stays = stk_error_set(err, STK_ERR_IO, errno,
                                  "%s: its store is removed, the folder stays: %s", run.folder[k],
                                  strerror(errno));
    unlock_all(fds);
    store_run_free(&run);
    return status != STK_OK ? status : stays;
}

/* --- adopt ------------------------------------------------------------------------------------ */

static stk_status differs(struct stk_error *err, const struct store_run *r, const char *what,
                          uint64_t was, uint64_t is)
{
    return stk_error_set(err, STK_ERR_CONFIG, 0,
                         "the durable store of run %s cannot be adopted: it was made with %s %llu, "
                         "now it is %llu; go on with the configuration it was made with, or "
                         "discard it",
                         r->run_id, what, (unsigned long long)was, (unsigned long long)is);
}

static stk_status check_geometry(const struct store *s, const struct store_cfg *cfg,
                                 const struct store_run *r, struct stk_error *err)
{
    const struct store_table_head *h = head_of(r);
    const struct store_table_extent *e = store_table_extents(r->table);
    for (uint32_t k = 0; k < cfg->n_paths; k++)
        if (!r->folder[k])
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "%s: holds no part of run %s, which lies on %u other paths",
                                 cfg->paths[k], r->run_id, h->n_paths);
    STK_TRY(check_set(r, err));
    if (h->n_paths != cfg->n_paths)
        return differs(err, r, "a number of paths of", h->n_paths, cfg->n_paths);
    if (h->n_extents != cfg->n_extents)
        return differs(err, r, "a number of extents of", h->n_extents, cfg->n_extents);
    if (h->room != cfg->room) return differs(err, r, "room for versions of", h->room, cfg->room);
    if (h->volatile_classes != cfg->volatile_classes)
        return differs(err, r, "a mask of volatile classes of", h->volatile_classes,
                       cfg->volatile_classes);
    if ((h->flags & STORE_TABLE_CHECKSUMS) != (s->checksums ? STORE_TABLE_CHECKSUMS : 0))
        return differs(err, r, "checksums (1: on)", h->flags & STORE_TABLE_CHECKSUMS,
                       s->checksums);
    for (uint32_t i = 0; i < h->n_extents; i++) {
        char what[64];
        snprintf(what, sizeof what, "extent %u of bytes", i);
        if (e[i].payload_bytes != cfg->extent_bytes[i])
            return differs(err, r, what, e[i].payload_bytes, cfg->extent_bytes[i]);
        snprintf(what, sizeof what, "extent %u of class", i);
        if (e[i].cls != store_extent_class(cfg, i))
            return differs(err, r, what, e[i].cls, store_extent_class(cfg, i));
    }
    if (s->buffer_bytes > r->half_bytes) /* the payload's size stands nowhere else */
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s/" STORE_TABLE_NAME ": has %llu bytes, %llu are expected: the file "
                             "was cut short, or made for fewer bytes for table and payload; put it "
                             "back, or discard the durable step",
                             r->folder[given_path(r, 0)], (unsigned long long)(2 * r->half_bytes),
                             (unsigned long long)(2 * s->buffer_bytes));
    return STK_OK;
}

/* The files hold all that the table refers to. */
static stk_status check_files(struct store *s, const struct store_run *r, struct stk_error *err)
{
    const struct store_table_extent *e = store_table_extents(r->table);
    for (uint32_t i = 0; i < s->n_extents; i++) {
        struct store_path *p = &s->paths[e[i].path];
        uint64_t end = e[i].offset_bytes + store_round(e[i].payload_bytes) * s->extents[i].room;
        if (end > p->size_bytes) p->size_bytes = end;
    }
    uint64_t table = 2 * r->half_bytes;
    for (uint32_t j = 0; j < s->n_paths; j++) {
        struct store_path *p = &s->paths[j];
        uint64_t bytes = 0;
        if (!store_file_size(s->sim_disk, p->file, &bytes) || bytes < p->size_bytes)
            return stk_error_set(err, STK_ERR_CORRUPT, 0,
                                 "%s: has %llu bytes, the durable step needs %llu: the file was "
                                 "cut short or removed; put it back, or discard the durable step",
                                 p->file,
                                 (unsigned long long)bytes, (unsigned long long)p->size_bytes);
        bytes = 0;
        if (!store_file_size(s->sim_disk, p->table, &bytes) || bytes != table)
            return stk_error_set(err, STK_ERR_CORRUPT, 0,
                                 "%s: has %llu bytes, %llu are expected: the file was %s; put it "
                                 "back, or discard the durable step",
                                 p->table, (unsigned long long)bytes, (unsigned long long)table,
                                 bytes == 0      ? "removed"
                                 : bytes < table ? "cut short"
                                                 : "changed");
    }
    return STK_OK;
}

static stk_status take_paths(struct store *s, const struct store_cfg *cfg,
                             const struct store_run *r, int fds[STORE_PATHS_MAX],
                             struct stk_error *err)
{
    for (uint32_t j = 0; j < s->n_paths; j++) {
        uint32_t k = given_path(r, j);
        struct store_path *p = &s->paths[j];
        s->path_of_cfg[k] = j;
        p->lock_fd = fds[k];
        fds[k] = -1;
        p->path = store_path_text(s, cfg->paths[k]);
        if (!p->path)
            return stk_error_set(err, STK_ERR_NOMEM, 0, "%s: no memory for file names",
                                 cfg->paths[k]);
        STK_TRY(store_path_name(s, p, j, err));
        if (p->lock_fd < 0 && !s->sim_disk) STK_TRY(store_lock_make(p, 0, err));
    }
    return STK_OK;
}

/* The newest table may lie on some paths only, and there still in a cache: before anything of the
 * table before is overwritten, it must be on every path, flushed. Where it is, it is not written
 * again. */
static stk_status settle_tables(struct store *s, const struct store_run *r, struct stk_error *err)
{
    for (uint32_t j = 0; j < s->n_paths; j++) {
        const struct store_path *p = &s->paths[j];
        uint64_t bytes = r->has_newest[given_path(r, j)] ? 0 : head_of(r)->size_bytes;
        if (store_file_write(s->sim_disk, p->table, r->table, bytes, r->half * r->half_bytes) != 0)
            return stk_error_set(err, errno == ENOSPC ? STK_ERR_NOSPACE : STK_ERR_IO, errno,
                                 "%s: the table of step %llu cannot be written and flushed: %s",
                                 p->table, (unsigned long long)head_of(r)->step, strerror(errno));
    }
    return STK_OK;
}

static void take_table(struct store *s, const struct store_run *r)
{
    const struct store_table_head *h = head_of(r);
    const struct store_table_extent *from = store_table_extents(r->table);
    for (uint32_t i = 0; i < s->n_extents; i++) {
        struct store_extent *e = &s->extents[i];
        e->path = from[i].path;
        e->offset_bytes = from[i].offset_bytes;
        if (from[i].version == STORE_NONE) continue;
        e->newest = e->durable = from[i].slot;
        e->slots[from[i].slot] = (struct store_slot){ from[i].version, from[i].crc };
    }
    s->half_bytes = r->half_bytes;
    s->half = r->half ^ 1;
    s->seq = h->seq;
    s->durable = true;
    s->durable_step = h->step;
}

static stk_status adopt_run(struct store *s, const struct store_cfg *cfg, const struct store_run *r,
                            int fds[STORE_PATHS_MAX], struct stk_error *err)
{
    struct store_free room;
    STK_TRY(check_geometry(s, cfg, r, err));
    STK_TRY(take_paths(s, cfg, r, fds, err));
    STK_TRY(check_files(s, r, err));
    STK_TRY(store_drives(s, &room, err));
    STK_TRY(settle_tables(s, r, err));
    for (uint32_t j = 0; j < s->n_paths && !s->sim_disk; j++)
        if (store_lock_write(s->paths[j].lock_fd) != 0)
            return stk_error_set(err, STK_ERR_IO, errno, "%s/" STORE_LOCK_NAME ": %s",
                                 s->paths[j].folder, strerror(errno));
    take_table(s, r);
    for (uint32_t j = 0; j < s->n_paths; j++) s->paths[j].made = true;
    return STK_OK;
}

stk_status store_adopt(struct store *s, const struct store_cfg *cfg, struct stk_error *err)
{
    int fds[STORE_PATHS_MAX];
    struct store_run run;
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++) fds[k] = -1;
    /* twice: the folders are known from the first, the content is certain once they are locked */
    STK_TRY(store_run_read(cfg->paths, cfg->n_paths, s->run_id, s->sim_disk, &run, err));
    stk_status status = STK_OK;
    if (!s->sim_disk) {
        status = lock_all(cfg->paths, cfg->n_paths, run.folder, fds, err);
        store_run_free(&run);
        if (status == STK_OK)
            status =
                store_run_read(cfg->paths, cfg->n_paths, s->run_id, s->sim_disk, &run, err);
    }
    if (status == STK_OK && !run.sure) {
        status = none_counts(&run, err);
        if (status == STK_OK)
            status = stk_error_set(err, STK_ERR_STATE, 0,
                                   "there is no durable store of run %s on these paths", s->run_id);
    }
    if (status == STK_OK) status = adopt_run(s, cfg, &run, fds, err);
    unlock_all(fds);
    store_run_free(&run);
    return status;
}
