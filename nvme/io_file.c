/* nvme/io_file.c - opening a real file for transfers: O_DIRECT where it works, and which alignment
 * it wants.
 *
 * Application's thread. Used by the posix and the io_uring backend. Knows nothing of requests. */
#include "nvme/io_impl.h"
#include "base/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/stat.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define ALIGN_MIN 512u
#define ALIGN_USUAL 4096u
#define TMPFS_TYPE 0x01021994 /* linux/magic.h */
#define BTRFS_TYPE 0x9123683e

static uint32_t power_of_two_at_least(uint32_t n, uint32_t least)
{
    uint32_t p = least;
    while (p < n && p < 1u << 30) p <<= 1;
    return p;
}

/* What direct transfers of this file need; 0: the file system says that there are none. Asked by
 * the bare system call, because the C library's struct may lack the two fields. */
static uint32_t direct_align(int fd)
{
    struct statx sx;
    memset(&sx, 0, sizeof sx);
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000u
#endif
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN | STATX_BASIC_STATS, &sx) != 0)
        return ALIGN_USUAL;
    if (sx.stx_mask & STATX_DIOALIGN) {
        uint32_t mem = sx.stx_dio_mem_align, off = sx.stx_dio_offset_align;
        if (off == 0) return 0;
        return power_of_two_at_least(mem > off ? mem : off, ALIGN_MIN);
    }
    /* the question is older than Linux 6.1 */
    uint32_t block = power_of_two_at_least(sx.stx_blksize, ALIGN_MIN);
    return block < ALIGN_USUAL ? block : ALIGN_USUAL;
}

/* Some file systems take the flag and refuse the transfer: one read tells (an empty file answers 0,
 * which is fine). */
static bool direct_read_works(int fd)
{
    void *page = sys_mmap(ALIGN_USUAL, false);
    if (!page) return false;
    int64_t n = sys_read_some(fd, page, ALIGN_USUAL, 0);
    /* another error is a matter of the first transfer, not of the flag */
    bool works = n >= 0 || errno != EINVAL;
    sys_munmap(page, ALIGN_USUAL);
    return works;
}

stk_status io_file_open_real(struct io *io, struct io_file *f, struct stk_error *err)
{
    f->direct = false;
    f->align = ALIGN_MIN;
    f->retry_align = 1;
    if (!io->cfg.buffered) {
        f->fd = sys_open(f->path, O_RDWR | O_DIRECT, 0);
        uint32_t align = f->fd >= 0 ? direct_align(f->fd) : 0;
        f->direct = f->fd >= 0 && align > 0 && direct_read_works(f->fd);
        if (f->direct) {
            f->align = f->retry_align = align;
        } else if (f->fd >= 0) {
            sys_close(f->fd);
            f->fd = -1;
        }
    }
    if (f->fd < 0) f->fd = sys_open(f->path, O_RDWR, 0);
    if (f->fd < 0)
        return stk_error_set(err, STK_ERR_IO, errno,
                             "%s: cannot open for reading and writing: %s%s", f->path,
                             strerror(errno),
                             errno == EMFILE ? "; raise the limit with ulimit -n" : "");
    /* Held by every transfer that is under way, whatever becomes of the process: who gets the file's lock
     * for itself knows that nothing moves any more (store_run_lock). Where there are no locks: nothing. */
    (void)flock(f->fd, LOCK_SH | LOCK_NB);
    struct statfs fs;
    if (fstatfs(f->fd, &fs) != 0) fs.f_type = 0;
    f->in_memory = fs.f_type == TMPFS_TYPE;
    if (f->in_memory)
        io_note(io, "swap files on tmpfs are in memory, not on a drive");
    else if (fs.f_type == BTRFS_TYPE)
        io_note(io, "Btrfs may buffer direct writes (it does for files with checksums, on newer "
                    "kernels), so measured rates may be the page cache's");
    else if (!f->direct && !io->cfg.buffered)
        io_note(io, "no O_DIRECT on a swap path, so transfers are buffered and measured rates are "
                    "the page cache's");
    return STK_OK;
}

void io_file_close_real(struct io *io, struct io_file *f)
{
    if (f->fd >= 0) sys_close(f->fd);
    f->fd = -1;
}

static void whole_pages(const struct io_region *r, uint8_t **from, uint8_t **to)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    *from = (uint8_t *)(((uintptr_t)r->base + page - 1) & ~(uintptr_t)(page - 1));
    *to = (uint8_t *)(((uintptr_t)r->base + r->size_bytes) & ~(uintptr_t)(page - 1));
}

/* A drive's request holds a bounded number of memory pieces (254 on a virtio disk): with 4 KiB
 * pages a transfer of 4 MiB becomes several, with 2 MiB pages one. Measured once on such a disk:
 * reads 1.45 GB/s with small pages, 2.1 with large ones.
 *
 * A child of fork does not get the region (NVM-35). The kernel copies pinned pages while it forks
 * (from 5.12 on; before, a transfer under way could land in the child's page): a host program that
 * starts data loaders by fork would pay for a second copy of every arena. The price: a child that
 * reads the region faults, as it would after munmap. */
void io_region_prepare(const struct io_region *r)
{
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1: gathers pages that were touched already */
#endif
    uint8_t *from, *to;
    whole_pages(r, &from, &to);
    if (to <= from) return;
    (void)madvise(from, (size_t)(to - from), MADV_DONTFORK);
    /* refused: smaller pages, nothing else */
    (void)madvise(from, (size_t)(to - from), MADV_HUGEPAGE);
    (void)madvise(from, (size_t)(to - from), MADV_COLLAPSE);
}

void io_region_release(const struct io_region *r)
{
    uint8_t *from, *to;
    whole_pages(r, &from, &to);
    /* the caller may have unmapped it by now: refused */
    if (to > from) (void)madvise(from, (size_t)(to - from), MADV_DOFORK);
}
