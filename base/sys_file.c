/* base/sys_file.c - files: open, whole transfers, durability, room on the disk, folders.
 *
 * Owns: nothing; every call stands alone. Must not know: formats, io_uring (nvme/ has its own
 * table).
 * Thread: any; all calls may block on the disk. */
#include "base/sys.h"
#include "base/sys_fault.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Below the kernel's cap of 0x7ffff000 bytes a call and a power of two, so that direct I/O stays
 * aligned. */
static const uint64_t part_bytes = 1ull << 30;

int sys_open(const char *path, int flags, mode_t mode)
{
    if (sys_fault_hit(SYS_OPEN)) return -1;
    int fd;
    do fd = open(path, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

void sys_close(int fd)
{
    /* EINTR is not retried: Linux has released the number by then. */
    if (fd >= 0) (void)close(fd);
}

int64_t sys_read_some(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes)
{
    if (sys_fault_hit(SYS_READ)) return -1;
    return pread(fd, buf, size_bytes, (off_t)offset_bytes);
}

void sys_read_ahead(int fd, uint64_t offset_bytes, uint64_t size_bytes)
{
    (void)posix_fadvise(fd, (off_t)offset_bytes, (off_t)size_bytes, POSIX_FADV_WILLNEED);
}

/* Beyond RLIMIT_FSIZE the kernel sends SIGXFSZ to the thread that writes, and by default that kills
 * the process before EFBIG can become a sentence. A library must not choose what signals do, so the
 * calling thread blocks it for the call and takes away what the call raised. */
static void hold_size_signal(sigset_t *before)
{
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &one, before);
}

static void release_size_signal(const sigset_t *before, bool raised)
{
    if (sigismember(before, SIGXFSZ)) return;
    int saved = errno;
    sigset_t one;
    static const struct timespec at_once;
    sigemptyset(&one);
    sigaddset(&one, SIGXFSZ);
    if (raised) (void)sigtimedwait(&one, NULL, &at_once);
    pthread_sigmask(SIG_SETMASK, before, NULL);
    errno = saved;
}

int64_t sys_write_some(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes)
{
    if (sys_fault_hit(SYS_WRITE)) return -1;
    sigset_t before;
    hold_size_signal(&before);
    int64_t n = pwrite(fd, buf, size_bytes, (off_t)offset_bytes);
    release_size_signal(&before, n < 0 && errno == EFBIG);
    return n;
}

int64_t sys_write_parts(int fd, const struct iovec *parts, uint32_t n, uint64_t offset_bytes)
{
    if (sys_fault_hit(SYS_WRITE)) return -1;
    sigset_t before;
    hold_size_signal(&before);
    int64_t put = pwritev(fd, parts, (int)n, (off_t)offset_bytes);
    release_size_signal(&before, put < 0 && errno == EFBIG);
    return put;
}

int64_t sys_read_full(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes)
{
    uint64_t done = 0;
    while (done < size_bytes) {
        uint64_t want = size_bytes - done < part_bytes ? size_bytes - done : part_bytes;
        int64_t got = sys_read_some(fd, (char *)buf + done, want, offset_bytes + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        done += (uint64_t)got;
    }
    return (int64_t)done;
}

int64_t sys_write_full(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes)
{
    uint64_t done = 0;
    while (done < size_bytes) {
        uint64_t want = size_bytes - done < part_bytes ? size_bytes - done : part_bytes;
        int64_t put = sys_write_some(fd, (const char *)buf + done, want, offset_bytes + done);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return -1;
        if (put == 0) { /* never for files; without this a broken driver would spin here for ever */
            errno = EIO;
            return -1;
        }
        done += (uint64_t)put;
    }
    return (int64_t)done;
}

int sys_fsync(int fd)
{
    if (sys_fault_hit(SYS_FSYNC)) return -1;
    /* not repeated: after a failure the kernel may have dropped the pages it could not write */
    return fsync(fd);
}

int sys_fsync_dir(const char *path)
{
    int fd = sys_open(path, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) return -1;
    int rc = sys_fsync(fd), saved = errno;
    sys_close(fd);
    errno = saved;
    return rc;
}

int sys_rename(const char *from, const char *to)
{
    if (sys_fault_hit(SYS_RENAME)) return -1;
    return rename(from, to);
}

int sys_fallocate(int fd, uint64_t size_bytes)
{
    if (sys_fault_hit(SYS_ALLOCATE)) return errno;
    if (size_bytes > INT64_MAX) return EFBIG;
    if (size_bytes == 0) return 0;
    int rc;
    sigset_t before;
    hold_size_signal(&before);
    do rc = posix_fallocate(fd, 0, (off_t)size_bytes);
    while (rc == EINTR);
    release_size_signal(&before, rc == EFBIG);
    return rc;
}

int64_t sys_disk_free(const char *path)
{
    struct statvfs fs;
    int rc;
    do rc = statvfs(path, &fs);
    while (rc != 0 && errno == EINTR);
    if (rc != 0) return -1;
    uint64_t unit = fs.f_frsize ? fs.f_frsize : fs.f_bsize, bytes;
    if (__builtin_mul_overflow((uint64_t)fs.f_bavail, unit, &bytes) || bytes > INT64_MAX)
        return INT64_MAX;
    return (int64_t)bytes;
}

static int make_dir(const char *path)
{
    if (mkdir(path, 0777) == 0) return 0;
    if (errno != EEXIST) return -1;
    struct stat st;
    if (stat(path, &st) != 0) return -1;
    if (S_ISDIR(st.st_mode)) return 0;
    errno = ENOTDIR;
    return -1;
}

int sys_mkdirs(const char *path)
{
    char part[PATH_MAX];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof part) {
        errno = n ? ENAMETOOLONG : ENOENT;
        return -1;
    }
    memcpy(part, path, n + 1);
    for (size_t i = 1; i < n; i++) {
        if (part[i] != '/') continue;
        part[i] = '\0';
        if (make_dir(part) != 0) return -1;
        part[i] = '/';
    }
    return make_dir(part);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *walk)
{
    (void)st;
    (void)type;
    (void)walk;
    return remove(path);
}

int sys_remove_tree(const char *path)
{
    return nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) == 0 ? 0 : -1;
}

/* --- the limit of open files ------------------------------------------------------------------ */

/* Numbers in use below `limit`: the kernel gives the lowest free one. */
static uint64_t files_open_below(uint64_t limit)
{
    uint64_t n = 0;
    DIR *dir = opendir("/proc/self/fd");
    const struct dirent *e;
    while (dir && (e = readdir(dir))) {
        char *end;
        unsigned long fd = strtoul(e->d_name, &end, 10);
        if (end != e->d_name && fd < limit && (int)fd != dirfd(dir)) n++;
    }
    if (dir) {
        closedir(dir);
        return n;
    }
    for (uint64_t fd = 0; fd < limit && fd < 65536; fd++) n += fcntl((int)fd, F_GETFD) >= 0;
    return n;
}

bool sys_files_room(uint64_t more, uint64_t *open_now, uint64_t *limit)
{
    struct rlimit r;
    *open_now = *limit = 0;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur == RLIM_INFINITY) return true;
    *limit = r.rlim_max;
    *open_now = files_open_below(r.rlim_cur);
    if (r.rlim_cur >= *open_now && r.rlim_cur - *open_now >= more) return true;
    if (r.rlim_max != RLIM_INFINITY && r.rlim_max < *open_now + more) return false;
    r.rlim_cur = *open_now + more;
    return setrlimit(RLIMIT_NOFILE, &r) == 0;
}
