/* nvme/store_reach.c - whether the store's names still lead to the files that it has open.
 *
 * A folder that is removed or moved away during a run takes nothing from the run: open files live
 * on without a name. A durable step in such files is found by nobody, so each commit asks here,
 * before it begins and before it counts. The files' identity (device and inode, which are not
 * given to another file while this one is open) is taken when they are opened.
 *
 * Taken by the application's thread at open, checked on the io's lane: at most three stat calls a
 * path. Knows nothing of tables and extents. */
#include "nvme/store_impl.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const char *lock_name(const struct store_path *p, char buf[STORE_PATH_TEXT_MAX])
{
    snprintf(buf, STORE_PATH_TEXT_MAX, "%s/" STORE_LOCK_NAME, p->folder);
    return buf;
}

static struct store_identity identity_of(const struct stat *st)
{
    return (struct store_identity){ (uint64_t)st->st_dev, (uint64_t)st->st_ino, true };
}

static stk_status take(const char *name, struct store_identity *out, struct stk_error *err)
{
    struct stat st;
    if (stat(name, &st) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be looked at: %s", name,
                             strerror(errno));
    *out = identity_of(&st);
    return STK_OK;
}

stk_status store_reach_take(struct store *s, struct stk_error *err)
{
    char name[STORE_PATH_TEXT_MAX];
    for (uint32_t k = 0; k < s->n_paths && !s->sim_disk; k++) {
        struct store_path *p = &s->paths[k];
        if (!p->table) continue;
        STK_TRY(take(p->file, &p->is_file, err));
        STK_TRY(take(p->table, &p->is_table, err));
        if (p->lock_fd >= 0) STK_TRY(take(lock_name(p, name), &p->is_lock, err));
    }
    return STK_OK;
}

static stk_status lost(const char *name, const char *what, int os_errno, struct stk_error *err)
{
    return stk_error_set(err, STK_ERR_IO, os_errno,
                         "%.1000s: %s: what this run writes cannot be found again by a later one; "
                         "bring the folder back as it was, or keep the state with a checkpoint (end "
                         "the run with Ctrl-C: --resume goes on from it)",
                         name, what);
}

static stk_status check(const char *name, const struct store_identity *is, uint64_t least_bytes,
                        struct stk_error *err)
{
    struct stat st;
    char what[160];
    if (!is->known) return STK_OK;
    if (stat(name, &st) != 0) {
        int why = errno;
        snprintf(what, sizeof what, why == ENOENT || why == ENOTDIR
                                        ? "was removed or moved away during the run"
                                        : "cannot be reached any more (%s)",
                 strerror(why));
        return lost(name, what, why, err);
    }
    if ((uint64_t)st.st_dev != is->device || (uint64_t)st.st_ino != is->inode || st.st_nlink == 0)
        return lost(name, "is another file now than the one that this run has open", 0, err);
    if ((uint64_t)st.st_size >= least_bytes) return STK_OK;
    snprintf(what, sizeof what, "was cut short during the run (%llu of %llu bytes)",
             (unsigned long long)st.st_size, (unsigned long long)least_bytes);
    return lost(name, what, 0, err);
}

stk_status store_reach_check(const struct store *s, struct stk_error *err)
{
    char name[STORE_PATH_TEXT_MAX];
    for (uint32_t k = 0; k < s->n_paths; k++) {
        const struct store_path *p = &s->paths[k];
        if (!p->table) continue;
        STK_TRY(check(p->file, &p->is_file, p->size_bytes, err));
        STK_TRY(check(p->table, &p->is_table, 2 * s->half_bytes, err));
        STK_TRY(check(lock_name(p, name), &p->is_lock, 0, err));
    }
    return STK_OK;
}
