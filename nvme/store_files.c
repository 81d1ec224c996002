/* nvme/store_files.c - the store's folders, locks and files, and where each extent lies.
 *
 * Application's thread, at open and close. Knows nothing of versions and checksums.
 *
 * A run's folder carries an open file lock (flock: it goes with the process, however that ends).
 * Looking for dead folders and making one's own both happen under a lock of the path itself, so
 * nobody sees a folder that has no lock yet and takes it for dead. */
#include "nvme/store_impl.h"
#include "nvme/io_sim.h"
#include "base/sys.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOCK_TEXT_MAX 256

static void note(struct store *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void note(struct store *s, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (s->n_notes < STORE_NOTES_MAX && (s->notes[s->n_notes] = sys_strdup(text))) s->n_notes++;
}

/* --- placement -------------------------------------------------------------------------------- */

void store_place(const struct store_cfg *cfg, struct store_extent *extents,
                 uint64_t path_bytes[STORE_PATHS_MAX])
{
    bool weighted = false;
    for (uint32_t k = 0; k < cfg->n_paths; k++) weighted |= cfg->weights[k] > 0;
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++) path_bytes[k] = 0;
    for (uint32_t i = 0; i < cfg->n_extents; i++) {
        uint64_t size = store_round(cfg->extent_bytes[i]) * cfg->room;
        uint32_t best = 0;
        double best_load = -1;
        for (uint32_t k = 0; k < cfg->n_paths; k++) {
            if (weighted && !(cfg->weights[k] > 0)) continue; /* a drive of no speed gets nothing */
            double load = (double)(path_bytes[k] + size) / (weighted ? cfg->weights[k] : 1.0);
            if (best_load >= 0 && load >= best_load) continue;
            best_load = load;
            best = k;
        }
        if (extents) {
            extents[i].path = best;
            extents[i].offset_bytes = path_bytes[best];
            extents[i].payload_bytes = cfg->extent_bytes[i];
        }
        path_bytes[best] += size;
    }
}

uint64_t store_need_bytes(const struct store_cfg *cfg, uint32_t path)
{
    uint64_t bytes[STORE_PATHS_MAX];
    store_place(cfg, NULL, bytes);
    return path < STORE_PATHS_MAX ? bytes[path] : 0;
}

/* --- folders of dead runs --------------------------------------------------------------------- */

static bool is_run_folder(const char *name)
{
    size_t n = strlen(STORE_FOLDER_PREFIX);
    if (strncmp(name, STORE_FOLDER_PREFIX, n) != 0 || strlen(name) != n + 16) return false;
    return strspn(name + n, "0123456789abcdef") == 16;
}

/* The owner's process is looked up by number only where the file system has no locks. */
static bool owner_alive(const char *text)
{
    char host[128] = "", here[128] = "";
    int pid = 0;
    gethostname(here, sizeof here - 1);
    if (sscanf(text, "host %127s\npid %d", host, &pid) != 2 || pid <= 0) return false;
    /* another machine's run on a shared file system: cannot be asked */
    if (strcmp(host, here) != 0) return true;
    return kill(pid, 0) == 0 || errno == EPERM;
}

/* Whether the run that made `folder` has ended; its lock's text goes to `text`. */
static bool run_is_dead(const char *folder, char text[LOCK_TEXT_MAX])
{
    text[0] = '\0';
    char *name = sys_format("%s/lock", folder);
    if (!name) return false;
    int fd = sys_open(name, O_RDWR, 0);
    sys_free(name);
    if (fd < 0) return errno == ENOENT; /* it died between making the folder and the lock */
    int64_t n = sys_read_full(fd, text, LOCK_TEXT_MAX - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    bool dead;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) dead = true;
    else dead = errno != EWOULDBLOCK && !owner_alive(text);
    sys_close(fd);
    return dead;
}

static void remove_if_dead(struct store *s, const char *path, const char *name)
{
    char text[LOCK_TEXT_MAX];
    struct stat st;
    char *folder = sys_format("%s/%s", path, name),
         *table = sys_format("%s/%s/" STORE_TABLE_NAME, path, name);
    if (folder && table && lstat(folder, &st) == 0 && S_ISDIR(st.st_mode) &&
        run_is_dead(folder, text)) {
        for (char *c = text; *c; c++)
            if (*c == '\n') *c = c[1] ? ',' : '\0';
        const char *who = text[0] ? text : "no lock file";
        if (lstat(table, &st) == 0)
            note(s,
                 "%s: a durable store of a run that has ended is kept (%s); resume from it or "
                 "delete it",
                 folder, who);
        else if (sys_remove_tree(folder) == 0)
            note(s, "%s: removed, its run has ended (%s)", folder, who);
        else
            note(s, "%s: its run has ended (%s) but it cannot be removed: %s", folder, who,
                 strerror(errno));
    }
    sys_free(folder);
    sys_free(table);
}

static stk_status lock_path(const char *path, int *out_fd, struct stk_error *err)
{
    *out_fd = sys_open(path, O_RDONLY | O_DIRECTORY, 0);
    if (*out_fd < 0)
        return stk_error_set(err, STK_ERR_IO, errno,
                             "%s: cannot be used as a swap folder: %s; it must exist and be "
                             "writable",
                             path, strerror(errno));
    /* without locks (old NFS) two starts at once stay a small risk */
    while (flock(*out_fd, LOCK_EX) != 0 && errno == EINTR) {}
    return STK_OK;
}

static stk_status remove_dead_runs(struct store *s, const char *path, struct stk_error *err)
{
    int fd;
    STK_TRY(lock_path(path, &fd, err));
    DIR *dir = opendir(path);
    struct dirent *e;
    while (dir && (e = readdir(dir)))
        if (is_run_folder(e->d_name)) remove_if_dead(s, path, e->d_name);
    if (dir) closedir(dir);
    sys_close(fd);
    return STK_OK;
}

/* --- room ------------------------------------------------------------------------------------- */

/* Paths may share a file system: what they need there adds up. Also gives each device a drive
 * number. */
static stk_status check_room(struct store *s, struct stk_error *err)
{
    dev_t devices[STORE_PATHS_MAX];
    uint32_t n_devices = 0;
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct stat st;
        if (stat(s->paths[k].path, &st) != 0)
            return stk_error_set(err, STK_ERR_IO, errno, "%s: %s", s->paths[k].path,
                                 strerror(errno));
        uint32_t d = 0;
        while (d < n_devices && devices[d] != st.st_dev) d++;
        if (d == n_devices) devices[n_devices++] = st.st_dev;
        s->paths[k].drive = d;
    }
    for (uint32_t k = 0; k < s->n_paths; k++) {
        uint64_t need = 0;
        for (uint32_t j = 0; j < s->n_paths; j++)
            if (s->paths[j].drive == s->paths[k].drive) need += s->paths[j].size_bytes;
        int64_t have = sys_disk_free(s->paths[k].path);
        if (have < 0)
            return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot ask for free space: %s",
                                 s->paths[k].path, strerror(errno));
        if (need > (uint64_t)have)
            return stk_error_set(err, STK_ERR_NOSPACE, 0,
                                 "%s: the store needs %llu bytes there (all versions of its "
                                 "extents) and %lld are free; free "
                                 "%llu bytes, name another path, or keep fewer states on NVMe",
                                 s->paths[k].path, (unsigned long long)need, (long long)have,
                                 (unsigned long long)(need - (uint64_t)have));
    }
    return STK_OK;
}

/* --- our own folder --------------------------------------------------------------------------- */

static stk_status no_memory(const char *path, struct stk_error *err)
{
    return stk_error_set(err, STK_ERR_NOMEM, 0, "%s: no memory for file names", path);
}

static stk_status name_folder(struct store_path *p, uint32_t k, struct stk_error *err)
{
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        random = (uint64_t)getpid() << 32 ^ (uint64_t)time(NULL);
    char *folder =
        sys_format("%s/" STORE_FOLDER_PREFIX "%016llx", p->path, (unsigned long long)random);
    p->file = folder ? sys_format("%s/extents-%u.bin", folder, k) : NULL;
    if (!p->file) {
        sys_free(folder);
        return no_memory(p->path, err);
    }
    p->folder = folder;
    return STK_OK;
}

static stk_status make_lock(struct store_path *p, struct stk_error *err)
{
    char *name = sys_format("%s/lock", p->folder), text[LOCK_TEXT_MAX], host[128] = "unknown";
    if (!name) return no_memory(p->path, err);
    gethostname(host, sizeof host - 1);
    int n = snprintf(text, sizeof text, "host %s\npid %d\nstarted %lld\n", host, (int)getpid(),
                     (long long)time(NULL));
    p->lock_fd = sys_open(name, O_RDWR | O_CREAT | O_EXCL, 0644);
    stk_status status = STK_OK;
    if (p->lock_fd < 0 || sys_write_full(p->lock_fd, text, (uint64_t)n, 0) != n)
        status = stk_error_set(err, errno == ENOSPC ? STK_ERR_NOSPACE : STK_ERR_IO, errno,
                               "%s: cannot be written: %s", name, strerror(errno));
    else if (flock(p->lock_fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        status = stk_error_set(err, STK_ERR_STATE, errno,
                               "%s: is locked by another run, which cannot be", name);
    sys_free(name);
    return status;
}

static stk_status make_folder(struct store *s, uint32_t k, struct stk_error *err)
{
    struct store_path *p = &s->paths[k];
    int path_fd;
    STK_TRY(lock_path(p->path, &path_fd, err));
    stk_status status = name_folder(p, k, err);
    if (status == STK_OK && sys_mkdirs(p->folder) != 0)
        status = stk_error_set(err, errno == ENOSPC ? STK_ERR_NOSPACE : STK_ERR_IO, errno,
                               "%s: cannot be made: %s", p->folder, strerror(errno));
    if (status == STK_OK) status = make_lock(p, err);
    sys_close(path_fd);
    return status;
}

static stk_status make_file(const struct store_path *p, struct stk_error *err)
{
    int fd = sys_open(p->file, O_RDWR | O_CREAT | O_EXCL, 0644);
    if (fd < 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be made: %s", p->file,
                             strerror(errno));
    int rc = sys_fallocate(fd, p->size_bytes);
    sys_close(fd);
    if (rc == 0) return STK_OK;
    return stk_error_set(err, rc == ENOSPC || rc == EDQUOT ? STK_ERR_NOSPACE : STK_ERR_IO, rc,
                         "%s: cannot be given its %llu bytes: %s; free space there or name another "
                         "path",
                         p->file, (unsigned long long)p->size_bytes, strerror(rc));
}

static stk_status open_on_sim(struct store *s, struct stk_error *err)
{
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct store_path *p = &s->paths[k];
        p->drive = k;
        STK_TRY(name_folder(p, k, err));
        STK_TRY(io_sim_file_create(s->sim_disk, p->file, p->size_bytes, err));
        STK_TRY(io_file_add(s->io, p->file, p->drive, &p->io_file, err));
        p->added = true;
    }
    return STK_OK;
}

stk_status store_files_open(struct store *s, struct stk_error *err)
{
    if (s->sim_disk) return open_on_sim(s, err);
    for (uint32_t k = 0; k < s->n_paths; k++) STK_TRY(remove_dead_runs(s, s->paths[k].path, err));
    STK_TRY(check_room(s, err));
    for (uint32_t k = 0; k < s->n_paths; k++) {
        STK_TRY(make_folder(s, k, err));
        STK_TRY(make_file(&s->paths[k], err));
    }
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct store_path *p = &s->paths[k];
        STK_TRY(io_file_add(s->io, p->file, p->drive, &p->io_file, err));
        p->added = true;
    }
    return STK_OK;
}

void store_files_close(struct store *s)
{
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct store_path *p = &s->paths[k];
        if (p->added) io_file_remove(s->io, p->io_file);
        if (p->folder && s->sim_disk) io_sim_file_remove(s->sim_disk, p->file);
        /* before the lock goes: nobody may find it dead meanwhile */
        else if (p->folder) sys_remove_tree(p->folder);
        if (p->lock_fd >= 0) sys_close(p->lock_fd);
        sys_free(p->file);
        sys_free(p->folder);
        sys_free(p->path);
        *p = (struct store_path){ .lock_fd = -1 };
    }
    for (uint32_t i = 0; i < s->n_notes; i++) sys_free(s->notes[i]);
    s->n_notes = 0;
}
