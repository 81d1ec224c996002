/* base/sys.h - the one place where the process asks the system for memory, files and threads, so
 * that tests can fail the n-th such call. Everything that can fail at run time for reasons outside
 * the program goes through here (plain malloc, open, pread ... are not called elsewhere; io_uring
 * has its own table in nvme/).
 *
 * Fault injection is the only process-wide state of the library and is off unless a test arms
 * it. */
#ifndef BASE_SYS_H
#define BASE_SYS_H

#include "base/status.h"
#include <pthread.h>
#include <sys/types.h>

enum sys_call {
    SYS_ALLOC,
    SYS_MMAP,
    SYS_OPEN,
    SYS_READ,
    SYS_WRITE,
    SYS_FSYNC,
    SYS_RENAME,
    SYS_ALLOCATE,
    SYS_THREAD,
    SYS_N
};

/* Small bookkeeping memory, zeroed. NULL when exhausted. Counted: sys_alloc_bytes() is the sum
 * alive. */
void *sys_calloc(size_t n, size_t size_bytes);
void *sys_realloc(void *p, size_t size_bytes);
char *sys_strdup(const char *s);
/* allocated string or NULL */
char *sys_format(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void sys_free(void *p);
uint64_t sys_alloc_bytes(void);

/* Page-aligned zeroed anonymous memory; `touch` faults every page now (in parallel if large; in
 * large pages where the system gives them). NULL + errno on failure. */
void *sys_mmap(uint64_t size_bytes, bool touch);
/* What `touch` does, later: for memory that is to be told first where to lie (base/topology.h). */
void sys_touch(void *p, uint64_t size_bytes);
void sys_munmap(void *p, uint64_t size_bytes);

/* Files. fd or -1 + errno; O_CLOEXEC is added. Writing or growing beyond RLIMIT_FSIZE is EFBIG; the
 * SIGXFSZ that comes with it is kept from the process. sys_read_full/sys_write_full loop over short
 * transfers and EINTR, are split below the kernel's 0x7ffff000 cap, and return the bytes moved
 * (less only at end of file) or -1 + errno. */
int sys_open(const char *path, int flags, mode_t mode);
void sys_close(int fd);
int64_t sys_read_full(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int64_t sys_write_full(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes);
/* one pread, result as is */
int64_t sys_read_some(int fd, void *buf, uint64_t size_bytes, uint64_t offset_bytes);
/* Asks the kernel to have these bytes in its page cache soon; only a hint. */
void sys_read_ahead(int fd, uint64_t offset_bytes, uint64_t size_bytes);
/* one pwrite */
int64_t sys_write_some(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes);
struct iovec;
/* one pwritev, of at most 0x7ffff000 bytes and 1024 parts */
int64_t sys_write_parts(int fd, const struct iovec *parts, uint32_t n, uint64_t offset_bytes);
int sys_fsync(int fd);
int sys_fsync_dir(const char *path);
int sys_rename(const char *from, const char *to);
int sys_fallocate(int fd, uint64_t size_bytes);  /* posix_fallocate semantics: 0 or an errno
                                                  * value */
int64_t sys_disk_free(const char *path);         /* bytes available to us on the file system of
                                                  * path, or -1 + errno */
int sys_mkdirs(const char *path);                /* mkdir -p; 0 or -1 + errno */
int sys_remove_tree(const char *path);           /* rm -r, never follows links; 0 or -1 + errno */

/* Numbers for `more` files beyond those that are open. Where the limit is too low it is raised, by no
 * more than that and not beyond the hard limit. False: not even then; *open_now and *limit (the hard
 * one) say how far it goes. */
bool sys_files_room(uint64_t more, uint64_t *open_now, uint64_t *limit);

/* Starts a thread with every signal blocked. 0 or an errno value; join it with pthread_join. */
int sys_thread_start(pthread_t *out, void *(*fn)(void *), void *arg);
/* The calling thread, from now on: works in short pieces between waits, and is not to stand behind
 * those who compute each time. Its share of the processors stays what it was. Only a hint (Linux
 * 6.12 and later). */
void sys_thread_prompt(void);

/* Test only: the k-th next call of `kind` fails with `os_errno` (k = 1: the next); times: how many
 * from there on fail (UINT64_MAX: all). Disarm with k = 0. sys_fault_seen: calls of that kind from
 * arming until disarming (k = UINT64_MAX counts without failing any). */
void sys_fault_arm(enum sys_call kind, uint64_t k, uint64_t times, int os_errno);
uint64_t sys_fault_seen(enum sys_call kind);

#endif
