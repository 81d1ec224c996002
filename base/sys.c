/* base/sys.c - the process's requests to the system: memory and threads, and the fault injection in
 * front of all of them.
 *
 * Owns: the count of living bookkeeping bytes and the armed faults (the library's only process-wide
 * state, atomic).
 * Must not know: who asks and why. Files are in sys_file.c.
 * Thread: any, at the same time. */
#include "base/sys.h"
#include "base/sys_fault.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

struct fault {
    _Atomic uint64_t k; /* 0: off */
    _Atomic uint64_t times;
    _Atomic int os_errno;
    _Atomic uint64_t seen;
};
static struct fault faults[SYS_N];

/* Each block carries its size in front, so that the living bytes can be summed; 16 keeps
 * malloc's alignment. */
enum { HEAD_BYTES = 16 };
static _Atomic uint64_t alloc_bytes;

/* --- faults ----------------------------------------------------------------------------------- */

void sys_fault_arm(enum sys_call kind, uint64_t k, uint64_t times, int os_errno)
{
    STK_ASSERT((unsigned)kind < SYS_N);
    struct fault *f = &faults[kind];
    atomic_store(&f->k, 0);
    if (k == 0) return;
    atomic_store(&f->seen, 0);
    atomic_store(&f->times, times);
    atomic_store(&f->os_errno, os_errno);
    atomic_store(&f->k, k);
}

uint64_t sys_fault_seen(enum sys_call kind)
{
    STK_ASSERT((unsigned)kind < SYS_N);
    return atomic_load(&faults[kind].seen);
}

bool sys_fault_hit(enum sys_call kind)
{
    struct fault *f = &faults[kind];
    uint64_t k = atomic_load_explicit(&f->k, memory_order_acquire);
    if (k == 0) return false;
    uint64_t n = atomic_fetch_add(&f->seen, 1) + 1;
    if (n < k || n - k >= atomic_load(&f->times)) return false;
    errno = atomic_load(&f->os_errno);
    return true;
}

/* --- bookkeeping memory ----------------------------------------------------------------------- */

static uint64_t block_size(const unsigned char *block)
{
    uint64_t size;
    memcpy(&size, block, sizeof size);
    return size;
}

void *sys_calloc(size_t n, size_t size_bytes)
{
    size_t total;
    if (__builtin_mul_overflow(n, size_bytes, &total) || total > SIZE_MAX - HEAD_BYTES) {
        errno = ENOMEM;
        return NULL;
    }
    if (sys_fault_hit(SYS_ALLOC)) return NULL;
    unsigned char *block = calloc(1, total + HEAD_BYTES);
    if (!block) return NULL;
    uint64_t size = total;
    memcpy(block, &size, sizeof size);
    atomic_fetch_add_explicit(&alloc_bytes, size, memory_order_relaxed);
    return block + HEAD_BYTES;
}

void *sys_realloc(void *p, size_t size_bytes)
{
    if (!p) return sys_calloc(1, size_bytes);
    if (size_bytes > SIZE_MAX - HEAD_BYTES) {
        errno = ENOMEM;
        return NULL;
    }
    if (sys_fault_hit(SYS_ALLOC)) return NULL;
    unsigned char *block = (unsigned char *)p - HEAD_BYTES;
    uint64_t before = block_size(block), after = size_bytes;
    block = realloc(block, size_bytes + HEAD_BYTES);
    if (!block) return NULL;
    if (after > before) memset(block + HEAD_BYTES + before, 0, after - before);
    memcpy(block, &after, sizeof after);
    atomic_fetch_add_explicit(&alloc_bytes, after - before,
                              memory_order_relaxed); /* modulo 2^64: may shrink */
    return block + HEAD_BYTES;
}

char *sys_strdup(const char *s)
{
    size_t size = strlen(s) + 1;
    char *copy = sys_calloc(1, size);
    if (copy) memcpy(copy, s, size);
    return copy;
}

char *sys_format(const char *fmt, ...)
{
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    char *text = n < 0 ? NULL : sys_calloc(1, (size_t)n + 1);
    if (text) vsnprintf(text, (size_t)n + 1, fmt, again);
    va_end(again);
    return text;
}

void sys_free(void *p)
{
    if (!p) return;
    unsigned char *block = (unsigned char *)p - HEAD_BYTES;
    atomic_fetch_sub_explicit(&alloc_bytes, block_size(block), memory_order_relaxed);
    free(block);
}

uint64_t sys_alloc_bytes(void) { return atomic_load_explicit(&alloc_bytes, memory_order_relaxed); }

/* --- pages ------------------------------------------------------------------------------------ */

enum { TOUCH_THREADS = 4 };
static const uint64_t touch_parallel_bytes = 256ull << 20;

/* Large pieces ask for large pages: Adam walks five arrays at once, and both the processor's own
 * prefetching and its address caches end at a page. */
static const uint64_t large_page_bytes = 2ull << 20;

struct touch {
    volatile unsigned char *at;
    uint64_t size_bytes;
};

static void *touch_pages(void *arg)
{
    const struct touch *t = arg;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    for (uint64_t i = 0; i < t->size_bytes; i += page) t->at[i] = 0;
    return NULL;
}

/* The kernel zeroes a page at its first touch; one thread does a few GB/s, so large pieces are
 * shared. A thread that cannot be started only costs time: its part is touched here. */
static void touch_all(void *p, uint64_t size_bytes)
{
    struct touch part[TOUCH_THREADS];
    if (size_bytes <= touch_parallel_bytes) {
        part[0] = (struct touch){ p, size_bytes };
        touch_pages(&part[0]);
        return;
    }
    pthread_t thread[TOUCH_THREADS];
    bool started[TOUCH_THREADS];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE),
             each = size_bytes / TOUCH_THREADS / page * page;
    for (int i = 0; i < TOUCH_THREADS; i++) {
        uint64_t from = each * (uint64_t)i;
        part[i] = (struct touch){ (unsigned char *)p + from,
                                  i + 1 < TOUCH_THREADS ? each : size_bytes - from };
        started[i] = pthread_create(&thread[i], NULL, touch_pages, &part[i]) == 0;
    }
    for (int i = 0; i < TOUCH_THREADS; i++) {
        if (started[i]) pthread_join(thread[i], NULL);
        else touch_pages(&part[i]);
    }
}

void sys_touch(void *p, uint64_t size_bytes)
{
    /* Before the first touch, so that no page is made twice. Refused: small pages, nothing else. */
    if (size_bytes >= large_page_bytes) (void)madvise(p, size_bytes, MADV_HUGEPAGE);
    touch_all(p, size_bytes);
}

void *sys_mmap(uint64_t size_bytes, bool touch)
{
    if (sys_fault_hit(SYS_MMAP)) return NULL;
    void *p = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (touch) sys_touch(p, size_bytes);
    return p;
}

void sys_munmap(void *p, uint64_t size_bytes)
{
    if (!p) return;
    STK_ASSERT(munmap(p, size_bytes) == 0);
}

/* --- threads ---------------------------------------------------------------------------------- */

int sys_thread_start(pthread_t *out, void *(*fn)(void *), void *arg)
{
    if (sys_fault_hit(SYS_THREAD)) return errno;
    /* The child inherits the mask: signals are for the application's threads. */
    sigset_t all, before;
    sigfillset(&all);
    int rc = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (rc != 0) return rc;
    rc = pthread_create(out, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

void sys_thread_prompt(void)
{
    /* include/uapi/linux/sched/types.h, first version; for SCHED_OTHER the runtime is the slice */
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime_ns, deadline_ns, period_ns;
    } attr = { .size = 48, .nice = getpriority(PRIO_PROCESS, 0), .runtime_ns = 100000 };
    (void)syscall(SYS_sched_setattr, 0, &attr, 0);
}
