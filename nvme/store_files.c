/* nvme/store_files.c - the store's folders, locks and files.
 *
 * Application's thread, at open and close. Knows nothing of versions, checksums and
 * tables.
 *
 * A run's folder carries an open file lock (flock: it goes with the process, however that ends). Its
 * transfers may outlive the process; they keep the locks of its files, so a folder counts as dead only when
 * these are free, too.
 * Looking for dead folders and making one's own both happen under a lock of the path itself, so
 * nobody sees a folder that has no lock yet and takes it for dead. */
#include "nvme/store_impl.h"
#include "nvme/io_sim.h"
#include "base/sys.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* --- files of a real or simulated disk ------------------------------------------------------ */

bool store_file_size(struct io_sim_disk *disk, const char *name, uint64_t *out_bytes)
{
    struct stat st;
    if (disk) return io_sim_file_size(disk, name, out_bytes);
    if (stat(name, &st) != 0) return false;
    *out_bytes = (uint64_t)st.st_size;
    return true;
}

int64_t store_file_read(struct io_sim_disk *disk, const char *name, void *buf, uint64_t size_bytes,
                        uint64_t offset_bytes)
{
    if (disk)
        return io_sim_peek(disk, name, offset_bytes, buf, size_bytes) ? (int64_t)size_bytes : 0;
    int fd = sys_open(name, O_RDONLY | O_NONBLOCK, 0); /* a pipe must not block */
    if (fd < 0) return -1;
    int64_t n = sys_read_full(fd, buf, size_bytes, offset_bytes);
    int saved = errno;
    sys_close(fd);
    errno = saved;
    return n;
}

int store_file_write(struct io_sim_disk *disk, const char *name, const void *buf,
                     uint64_t size_bytes, uint64_t offset_bytes)
{
    errno = EIO;
    if (disk) return io_sim_poke(disk, name, offset_bytes, buf, size_bytes) ? 0 : -1;
    int fd = sys_open(name, O_RDWR, 0);
    if (fd < 0) return -1;
    bool ok = size_bytes == 0 ||
              sys_write_full(fd, buf, size_bytes, offset_bytes) == (int64_t)size_bytes;
    ok = ok && sys_fsync(fd) == 0;
    int saved = errno;
    sys_close(fd);
    errno = saved;
    return ok ? 0 : -1;
}

static bool is_own_file(const char *name)
{
    unsigned k;
    int end = 0;
    if (strcmp(name, STORE_LOCK_NAME) == 0 || strcmp(name, STORE_TABLE_NAME) == 0) return true;
    return sscanf(name, "extents-%2u.bin%n", &k, &end) == 1 && end > 0 && !name[end];
}

/* What else lies there is not the store's: then the folder stays, too. */
int store_folder_remove(const char *folder, struct io_sim_disk *disk, int *lock_fd)
{
    char name[STORE_PATH_TEXT_MAX];
    for (uint32_t k = 0; disk && k < STORE_PATHS_MAX; k++) {
        snprintf(name, sizeof name, "%s/extents-%u.bin", folder, k);
        io_sim_file_remove(disk, name);
    }
    snprintf(name, sizeof name, "%s/" STORE_TABLE_NAME, folder);
    if (disk) io_sim_file_remove(disk, name);
    if (disk) return 0;
    DIR *dir = opendir(folder);
    struct dirent *e;
    int first = dir ? 0 : errno; /* rmdir would only say that the folder is not empty */
    while (dir && (e = readdir(dir))) {
        snprintf(name, sizeof name, "%s/%s", folder, e->d_name);
        if (is_own_file(e->d_name) && strcmp(e->d_name, STORE_LOCK_NAME) != 0 &&
            remove(name) != 0 && !first)
            first = errno;
    }
    if (dir) closedir(dir);
    snprintf(name, sizeof name, "%s/" STORE_LOCK_NAME, folder);
    (void)remove(name);
    if (rmdir(folder) == 0) return 0;
    /* A network file system keeps what is removed while it is open beside the rest (NFS: `.nfs...`), and
     * open is the lock. Without it another run may remove the folder first: gone is gone. */
    if (!first && (errno == ENOTEMPTY || errno == EEXIST || errno == EBUSY) && *lock_fd >= 0) {
        sys_close(*lock_fd);
        *lock_fd = -1;
        if (rmdir(folder) == 0 || errno == ENOENT) return 0;
    }
    if (first) errno = first;
    return -1;
}

/* --- folders of dead runs --------------------------------------------------------------------- */

bool store_is_run_folder(const char *name)
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

#define SETTLE_NS 30000000000u
#define SETTLE_LOOK_NS 2000000

/* Waits until no transfer to the file is under way. False: there still is one after SETTLE_NS. */
static bool file_settles(const char *name)
{
    struct timespec pause = { .tv_nsec = SETTLE_LOOK_NS };
    int fd = sys_open(name, O_RDONLY | O_NONBLOCK, 0), got = 0;
    if (fd < 0) return true; /* whoever reads it will say so */
    for (uint64_t waited_ns = 0; waited_ns < SETTLE_NS; waited_ns += SETTLE_LOOK_NS) {
        got = flock(fd, LOCK_EX | LOCK_NB);
        if (got == 0 || (errno != EWOULDBLOCK && errno != EINTR)) break;
        nanosleep(&pause, NULL);
    }
    bool settled = got == 0 || errno != EWOULDBLOCK;
    sys_close(fd);
    return settled;
}

/* A process that was killed is gone before the drive has done all that it asked for. These transfers keep
 * its files open, and locked (io_file_open_real): until they have ended, neither a table that is read
 * nor an extent that is written is what it seems. */
static bool folder_settles(const char *folder, char text[STORE_LOCK_TEXT_MAX])
{
    DIR *dir = opendir(folder);
    struct dirent *e;
    bool settled = true;
    while (settled && dir && (e = readdir(dir))) {
        char name[STORE_PATH_TEXT_MAX + sizeof e->d_name];
        size_t n = strlen(e->d_name);
        if (n < 4 || strcmp(e->d_name + n - 4, ".bin") != 0) continue;
        snprintf(name, sizeof name, "%s/%s", folder, e->d_name);
        settled = file_settles(name);
    }
    if (dir) closedir(dir);
    if (!settled)
        snprintf(text, STORE_LOCK_TEXT_MAX, "its process is gone, but not its transfers to the drive");
    return settled;
}

bool store_run_lock(const char *folder, int *out_fd, char text[STORE_LOCK_TEXT_MAX])
{
    char name[STORE_PATH_TEXT_MAX];
    text[0] = '\0';
    *out_fd = -1;
    snprintf(name, sizeof name, "%s/" STORE_LOCK_NAME, folder);
    int fd = sys_open(name, O_RDWR, 0);
    if (fd < 0) {
        /* it died between making the folder and the lock; and no run holds a folder */
        if (errno == ENOENT || errno == EISDIR) return true;
        snprintf(text, STORE_LOCK_TEXT_MAX, STORE_LOCK_DENIED ": %s", strerror(errno));
        return false;
    }
    int64_t n = sys_read_full(fd, text, STORE_LOCK_TEXT_MAX - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
    bool dead = locked || (errno != EWOULDBLOCK && !owner_alive(text));
    for (char *c = text; *c; c++)
        if (*c == '\n') *c = c[1] ? ',' : '\0';
    dead = dead && folder_settles(folder, text);
    if (dead && locked) *out_fd = fd;
    else sys_close(fd);
    errno = 0;
    return dead;
}

/* Whether any of the store's paths holds a table of this run that counts, or may. */
static bool run_is_durable(struct store *s, const char *run_id, uint64_t *step)
{
    const char *paths[STORE_PATHS_MAX];
    struct store_run run;
    for (uint32_t k = 0; k < s->n_paths; k++) paths[k] = s->paths[k].path;
    if (store_run_read(paths, s->n_paths, run_id, NULL, &run, NULL) != STK_OK) return true;
    bool durable = run.table || run.unknown;
    *step = run.table ? ((const struct store_table_head *)(const void *)run.table)->step : 0;
    store_run_free(&run);
    return durable;
}

static void remove_if_dead(struct store *s, const char *path, const char *name)
{
    char text[STORE_LOCK_TEXT_MAX], folder[STORE_PATH_TEXT_MAX];
    struct stat st;
    uint64_t step = 0;
    int fd = -1;
    snprintf(folder, sizeof folder, "%s/%s", path, name);
    if (lstat(folder, &st) != 0 || !S_ISDIR(st.st_mode) || !store_run_lock(folder, &fd, text))
        return;
    const char *who = text[0] ? text : "no lock file";
    if (run_is_durable(s, name + strlen(STORE_FOLDER_PREFIX), &step))
        store_note(s,
                   "%s: a durable store of a run that has ended (step %llu) is kept (%s); resume "
                   "from it or discard it",
                   folder, (unsigned long long)step, who);
    else if (store_folder_remove(folder, NULL, &fd) == 0)
        store_note(s, "%s: removed, its run has ended (%s) and no durable step is there", folder,
                   who);
    else
        store_note(s, "%s: its run has ended (%s) but it cannot be removed: %s", folder, who,
                   strerror(errno));
    if (fd >= 0) sys_close(fd);
}

const char *store_hint(int os_errno)
{
    switch (os_errno) {
    case EMFILE: return "raise the limit of open files with ulimit -n";
    case ENFILE: return "the machine has too many open files (sysctl fs.file-max)";
    case EFBIG: return "raise the limit of a file's size with ulimit -f, or name another path";
    case ENOSPC: case EDQUOT: return "free space there or name another path";
    default: return NULL;
    }
}

stk_status store_path_lock(const char *path, int *out_fd, struct stk_error *err)
{
    *out_fd = sys_open(path, O_RDONLY | O_DIRECTORY, 0);
    if (*out_fd < 0)
        return stk_error_set(err, STK_ERR_IO, errno,
                             "%s: cannot be used as a swap folder: %s; %s", path, strerror(errno),
                             store_hint(errno) ? store_hint(errno)
                                               : "it must exist and be writable");
    /* without locks (old NFS) two starts at once stay a small risk */
    while (flock(*out_fd, LOCK_EX) != 0 && errno == EINTR) {}
    return STK_OK;
}

static stk_status remove_dead_runs(struct store *s, const char *path, struct stk_error *err)
{
    int fd;
    STK_TRY(store_path_lock(path, &fd, err));
    DIR *dir = opendir(path);
    struct dirent *e;
    while (dir && (e = readdir(dir)))
        if (store_is_run_folder(e->d_name)) remove_if_dead(s, path, e->d_name);
    if (dir) closedir(dir);
    sys_close(fd);
    return STK_OK;
}

/* --- room ------------------------------------------------------------------------------------- */

stk_status store_drives(struct store *s, struct store_free *room, struct stk_error *err)
{
    dev_t devices[STORE_PATHS_MAX];
    uint32_t n_devices = 0;
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct stat st;
        if (s->sim_disk) { /* one medium, a drive for each path */
            s->paths[k].drive = k;
            room->group[k] = 0;
            room->bytes[0] = io_sim_free_bytes(s->sim_disk);
            continue;
        }
        if (stat(s->paths[k].path, &st) != 0)
            return stk_error_set(err, STK_ERR_IO, errno, "%s: %s", s->paths[k].path,
                                 strerror(errno));
        uint32_t d = 0;
        while (d < n_devices && devices[d] != st.st_dev) d++;
        if (d == n_devices) devices[n_devices++] = st.st_dev;
        s->paths[k].drive = room->group[k] = d;
        int64_t have = sys_disk_free(s->paths[k].path);
        if (have < 0)
            return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot ask for free space: %s",
                                 s->paths[k].path, strerror(errno));
        room->bytes[d] = (uint64_t)have;
    }
    return STK_OK;
}

/* Paths may share a file system: what they need there adds up. Places by the configured limits, and
 * where that is more than what is free, by what is free. */
static stk_status place(struct store *s, const struct store_cfg *cfg, const struct store_free *room,
                        struct stk_error *err)
{
    uint64_t bytes[STORE_PATHS_MAX], again[STORE_PATHS_MAX], short_by = 0, need = 0;
    uint32_t where = 0;
    STK_TRY(store_place(cfg, NULL, s->extents, bytes, err));
    for (uint32_t k = 0; k < s->n_paths && short_by == 0; k++) {
        need = 0;
        for (uint32_t j = 0; j < s->n_paths; j++)
            if (room->group[j] == room->group[k]) need += bytes[j] + 2 * s->half_bytes;
        if (need <= room->bytes[room->group[k]]) continue;
        short_by = need - room->bytes[room->group[k]];
        where = k;
    }
    if (short_by > 0) {
        if (s->n_paths == 1 || store_place(cfg, room, s->extents, again, NULL) != STK_OK)
            return stk_error_set(
                err, STK_ERR_NOSPACE, 0,
                "%s: the store needs %llu bytes there (all versions of its extents) and %llu are "
                "free; free %llu bytes, name another path, or keep fewer states on NVMe",
                s->paths[where].path, (unsigned long long)need,
                (unsigned long long)room->bytes[room->group[where]], (unsigned long long)short_by);
        store_note(s,
                   "%s: %llu bytes short of its share of the store by speed; the other paths hold "
                   "more instead",
                   s->paths[where].path, (unsigned long long)short_by);
        memcpy(bytes, again, sizeof bytes);
    }
    for (uint32_t k = 0; k < s->n_paths; k++) s->paths[k].size_bytes = bytes[k];
    return STK_OK;
}

/* --- our own folder --------------------------------------------------------------------------- */

static stk_status no_memory(const char *path, struct stk_error *err)
{
    return stk_error_set(err, STK_ERR_NOMEM, 0, "%s: no memory for file names", path);
}

stk_status store_path_name(struct store *s, struct store_path *p, uint32_t k, struct stk_error *err)
{
    p->folder = sys_format("%s/" STORE_FOLDER_PREFIX "%s", p->path, s->run_id);
    if (!p->folder) return no_memory(p->path, err);
    if (strlen(p->folder) + 32 > STORE_PATH_TEXT_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0, "%s: is too long a name for a swap folder",
                             p->path);
    p->file = sys_format("%s/extents-%u.bin", p->folder, k);
    p->table = s->half_bytes ? sys_format("%s/" STORE_TABLE_NAME, p->folder) : NULL;
    return p->file && (p->table || !s->half_bytes) ? STK_OK : no_memory(p->path, err);
}

int store_lock_write(int fd)
{
    char text[STORE_LOCK_TEXT_MAX], host[128] = "unknown";
    gethostname(host, sizeof host - 1);
    memset(text, 0, sizeof text);
    int n = snprintf(text, sizeof text, "host %s\npid %d\nstarted %lld\n", host, (int)getpid(),
                     (long long)time(NULL));
    if (ftruncate(fd, 0) != 0) return -1;
    return sys_write_full(fd, text, (uint64_t)n, 0) == n ? 0 : -1;
}

stk_status store_lock_make(struct store_path *p, int flags, struct stk_error *err)
{
    char name[STORE_PATH_TEXT_MAX];
    snprintf(name, sizeof name, "%s/" STORE_LOCK_NAME, p->folder);
    p->lock_fd = sys_open(name, O_RDWR | O_CREAT | flags, 0644);
    if (p->lock_fd < 0 || store_lock_write(p->lock_fd) != 0)
        return stk_error_set(err, errno == ENOSPC ? STK_ERR_NOSPACE : STK_ERR_IO, errno,
                             "%s: cannot be written: %s%s%s", name, strerror(errno),
                             store_hint(errno) ? "; " : "",
                             store_hint(errno) ? store_hint(errno) : "");
    if (flock(p->lock_fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return stk_error_set(err, STK_ERR_STATE, errno,
                             "%s: is locked by another run, which cannot be", name);
    return STK_OK;
}

static stk_status make_folder(struct store_path *p, struct stk_error *err)
{
    int path_fd;
    struct stat st;
    stk_status status = STK_OK;
    STK_TRY(store_path_lock(p->path, &path_fd, err));
    if (lstat(p->folder, &st) == 0) {
        status = stk_error_set(err, STK_ERR_STATE, 0,
                               "%s: is there already; resume from it, discard it, or choose "
                               "another run id (a folder given twice meets itself)",
                               p->folder);
    } else if (sys_mkdirs(p->folder) != 0) {
        status = stk_error_set(err, errno == ENOSPC ? STK_ERR_NOSPACE : STK_ERR_IO, errno,
                               "%s: cannot be made: %s", p->folder, strerror(errno));
    } else {
        p->made = true;
        status = store_lock_make(p, O_EXCL, err);
    }
    sys_close(path_fd);
    return status;
}

/* `durable`: what is made must outlive a power cut. */
static stk_status make_file(const char *name, uint64_t size_bytes, bool durable,
                            struct stk_error *err)
{
    int fd = sys_open(name, O_RDWR | O_CREAT | O_EXCL, 0644);
    if (fd < 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be made: %s%s%s", name,
                             strerror(errno), store_hint(errno) ? "; " : "",
                             store_hint(errno) ? store_hint(errno) : "");
    int rc = sys_fallocate(fd, size_bytes);
    if (rc == 0 && durable && sys_fsync(fd) != 0) rc = errno;
    sys_close(fd);
    if (rc == 0) return STK_OK;
    return stk_error_set(err, rc == ENOSPC || rc == EDQUOT ? STK_ERR_NOSPACE : STK_ERR_IO, rc,
                         "%s: cannot be given its %llu bytes: %s; %s", name,
                         (unsigned long long)size_bytes, strerror(rc),
                         store_hint(rc) ? store_hint(rc) : "name another path");
}

static stk_status make_files(struct store *s, struct store_path *p, struct stk_error *err)
{
    STK_TRY(make_file(p->file, p->size_bytes, p->table, err));
    if (!p->table) return STK_OK;
    STK_TRY(make_file(p->table, 2 * s->half_bytes, true, err));
    if (sys_fsync_dir(p->folder) != 0 || sys_fsync_dir(p->path) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be flushed: %s", p->folder,
                             strerror(errno));
    return STK_OK;
}

static stk_status make_on_sim(struct store *s, struct store_path *p, struct stk_error *err)
{
    uint64_t bytes;
    if (io_sim_file_size(s->sim_disk, p->file, &bytes))
        return stk_error_set(err, STK_ERR_STATE, 0, "%s: is there already", p->file);
    p->made = true;
    STK_TRY(io_sim_file_create(s->sim_disk, p->file, p->size_bytes, err));
    if (!p->table) return STK_OK;
    return io_sim_file_create(s->sim_disk, p->table, 2 * s->half_bytes, err);
}

/* The working folder may change during the run, the path of a store may not. */
char *store_path_text(const struct store *s, const char *path)
{
    char here[STORE_PATH_TEXT_MAX];
    if (s->sim_disk || path[0] == '/' || !getcwd(here, sizeof here)) return sys_strdup(path);
    return sys_format("%s/%s", here, path);
}

stk_status store_files_make(struct store *s, const struct store_cfg *cfg, struct stk_error *err)
{
    struct store_free room;
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct store_path *p = &s->paths[k];
        s->path_of_cfg[k] = k;
        p->path = store_path_text(s, cfg->paths[k]);
        if (!p->path) return no_memory(cfg->paths[k], err);
        STK_TRY(store_path_name(s, p, k, err));
    }
    for (uint32_t k = 0; k < s->n_paths && !s->sim_disk; k++)
        STK_TRY(remove_dead_runs(s, s->paths[k].path, err));
    STK_TRY(store_drives(s, &room, err));
    STK_TRY(place(s, cfg, &room, err));
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct store_path *p = &s->paths[k];
        if (!s->sim_disk) {
            STK_TRY(make_folder(p, err));
            STK_TRY(make_files(s, p, err));
        } else {
            STK_TRY(make_on_sim(s, p, err));
        }
    }
    return STK_OK;
}

stk_status store_files_add(struct store *s, struct stk_error *err)
{
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct store_path *p = &s->paths[k];
        STK_TRY(io_file_add(s->io, p->file, p->drive, &p->io_file, err));
        p->added = true;
        if (!p->table) continue;
        STK_TRY(io_file_add(s->io, p->table, p->drive, &p->io_table, err));
        p->table_added = true;
    }
    return STK_OK;
}

/* Tables go first, everywhere: a set that lost a path would not be known for one that is complete.
 * The lock stays held until the folder is gone, or empty but for it: nobody may find it dead meanwhile. */
static stk_status remove_folders(struct store *s, struct stk_error *err)
{
    char left[STK_ERROR_TEXT_MAX / 2] = "";
    size_t n = 0;
    bool away = true;
    for (uint32_t k = 0; k < s->n_paths; k++)
        if (s->paths[k].made && s->paths[k].table && !s->sim_disk)
            (void)remove(s->paths[k].table);
    for (uint32_t k = 0; k < s->n_paths; k++)
        if (s->paths[k].made && store_folder_remove(s->paths[k].folder, s->sim_disk, &s->paths[k].lock_fd) != 0) {
            away = away && (errno == ENOENT || errno == ENOTDIR);
            if (n < sizeof left)
                n += (size_t)snprintf(left + n, sizeof left - n, "%s%s (%s)", n ? ", " : "",
                                      s->paths[k].folder, strerror(errno));
        }
    if (n == 0) return STK_OK;
    if (away)
        return stk_error_set(err, STK_ERR_STATE, ENOENT,
                             "the store's folder could not be removed, for it is not where it was "
                             "made: %s; if it was moved away, remove it by hand where it is now",
                             left);
    return stk_error_set(err, STK_ERR_IO, 0,
                         "the store's folder could not be removed and goes on taking its room: %s; "
                         "when that is mended, a later run on the same path removes it (of durable "
                         "steps: one with the same --out), or remove it by hand",
                         left);
}

stk_status store_files_close(struct store *s, struct stk_error *err)
{
    stk_status status = STK_OK;
    for (uint32_t k = 0; k < s->n_paths; k++) {
        if (s->paths[k].added) io_file_remove(s->io, s->paths[k].io_file);
        if (s->paths[k].table_added) io_file_remove(s->io, s->paths[k].io_table);
    }
    if (s->discard || !s->durable) status = remove_folders(s, err);
    for (uint32_t k = 0; k < s->n_paths; k++) {
        struct store_path *p = &s->paths[k];
        if (p->lock_fd >= 0) sys_close(p->lock_fd);
        sys_free(p->table);
        sys_free(p->file);
        sys_free(p->folder);
        sys_free(p->path);
        p->path = p->folder = p->file = p->table = NULL;
        p->made = p->added = p->table_added = false;
        p->lock_fd = -1;
    }
    for (uint32_t i = 0; i < s->n_notes; i++) sys_free(s->notes[i]);
    s->n_notes = 0;
    return status;
}
