/* tests/gpu/simt/order.cpp - races: two accesses of the same bytes by different threads, one of them a write,
 * that nothing orders.
 *
 * Owns, for every four bytes (fewer where a kernel accesses fewer), the last write and two reads since. When
 * something happened is a stamp: the serial number of the interval between two barriers (one sequence over all
 * blocks and launches, in the order they ran), the thread, and its lane's clock, which grows at each __syncwarp.
 * A stamp is ordered before now when
 *   - it belongs to an earlier launch (for shared memory: an earlier block), or
 *   - to this block and an earlier interval, or
 *   - to this interval and to this thread, or to a lane of this warp up to the clock that __syncwarp has told.
 * This is vector clocks with their common parts left out (Flanagan & Freund 2009, FastTrack). Two reads are enough where
 * only __syncthreads orders: any other thread's write collides with one of them. Among lanes ordered by __syncwarp
 * a third reader may be forgotten; which, differs by seed.
 *
 * Atomics are kept as reads with a mark: they collide with plain reads and with writes, not with each other.
 *
 * One OS thread; on a kernel's fiber. */
#include "memory_impl.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

typedef uint64_t stamp; /* serial 32 | atomic 1 | clock 21 | thread 10; 0: never */
constexpr stamp ATOMIC = UINT64_C(1) << 31;

uint32_t serial_of(stamp s) { return (uint32_t)(s >> 32); }
uint32_t thread_of(stamp s) { return (uint32_t)s & 1023; }
uint32_t clock_of(stamp s) { return (uint32_t)(s >> 10) & 0x1fffff; }

struct cell { stamp write, read[2]; };

} // namespace

struct memory_page {
    unsigned shift;     /* a cell is of 1 << shift bytes */
    cell cells[];
};

void memory_page_delete::operator()(memory_page *p) const { free(p); }

namespace {

memory_page *page_new(unsigned shift)
{
    void *p = calloc(1, sizeof(memory_page) + (sizeof(cell) << (MEMORY_PAGE_BITS - shift)));
    if (!p) {
        fprintf(stderr, "simt: no memory for the order of accesses\n");
        abort();
    }
    memory_page *page = static_cast<memory_page *>(p);
    page->shift = shift;
    return page;
}

memory_page *page_refine(const memory_page *old, unsigned shift)
{
    memory_page *page = page_new(shift);
    for (size_t i = 0; i < (size_t)1 << (MEMORY_PAGE_BITS - shift); i++)
        page->cells[i] = old->cells[i >> (old->shift - shift)];
    return page;
}

/* The access that runs, and the memory it goes to. */
struct access {
    memory_range &range;
    uintptr_t at;
    size_t size;
    enum memory_kind kind;
    const void *pc;
    stamp now;
    uint32_t floor;     /* serials below it are ordered */
};

bool unordered(stamp s, const access &a)
{
    uint32_t serial = serial_of(s);
    if (serial < a.floor) return false;
    if (serial != simt_here.serial) return serial < simt_here.block_first; /* another block of this launch */
    uint32_t other = thread_of(s), me = simt_here.thread;
    if (other == me) return false;
    if ((other ^ me) >> 5) return true;
    return simt_here.knows[other & 31] < clock_of(s);
}

[[gnu::noinline]] void fail_race(const access &a, stamp other, const char *did)
{
    char who[128];
    exec_name_thread(serial_of(other), thread_of(other), who, sizeof who);
    bool same_block = serial_of(other) >= simt_here.block_first;
    const char *does = a.kind == MEMORY_READ ? "reads" : a.kind == MEMORY_WRITE ? "writes" : "atomically changes";
    exec_fail(SIMT_RACE, a.pc, "%s %zu bytes at offset %zu of %s'%s' (%zu bytes) that %s has %s: %s", does, a.size,
              (size_t)(a.at - a.range.base), a.range.shared ? "the shared array " : "", a.range.name.c_str(),
              a.range.size(), who, did,
              same_block ? "no barrier is between the two" : "blocks of one launch have no order");
}

const char *slot_did(stamp s) { return s & ATOMIC ? "atomically changed" : "read"; }

void keep_read(cell &c, const access &a)
{
    for (stamp &s : c.read)
        if (thread_of(s) == simt_here.thread && serial_of(s) >= simt_here.block_first) {
            s = a.now;
            return;
        }
    if (!unordered(c.read[0], a)) {
        c.read[0] = a.now;
        return;
    }
    if (serial_of(c.read[0]) < simt_here.block_first) return; /* every later block's write collides with it */
    uint32_t first_warp = thread_of(c.read[0]) >> 5;
    bool only_warp = first_warp == thread_of(c.read[1]) >> 5 && first_warp != simt_here.thread >> 5;
    if (!unordered(c.read[1], a) || only_warp || (simt_here.countdown & 3) == 0) c.read[1] = a.now;
}

void judge(cell &c, const access &a)
{
    if (unordered(c.write, a)) fail_race(a, c.write, "written");
    for (stamp s : c.read)
        if ((a.kind == MEMORY_WRITE || (s & ATOMIC) != (a.now & ATOMIC)) && unordered(s, a)) fail_race(a, s, slot_did(s));
    if (a.kind == MEMORY_WRITE) {
        c.write = a.now;
        c.read[0] = c.read[1] = 0;
    } else {
        keep_read(c, a);
    }
}

} // namespace

void order_access(memory_range &r, uintptr_t p, size_t n, enum memory_kind k, const void *pc)
{
    access a = { r, p, n, k, pc, 0, r.shared ? simt_here.block_first : simt_here.launch_first };
    a.now = (uint64_t)simt_here.serial << 32 | (uint64_t)simt_here.clock << 10 | simt_here.thread;
    if (k == MEMORY_ATOMIC) a.now |= ATOMIC;
    unsigned fine = (unsigned)__builtin_ctzll((p | n) | 4);
    uintptr_t end = p + n;
    while (p < end) {
        auto &page = r.pages[(p >> MEMORY_PAGE_BITS) - (r.base >> MEMORY_PAGE_BITS)];
        if (!page) page.reset(page_new(fine));
        if (page->shift > fine) page.reset(page_refine(page.get(), fine));
        uintptr_t page_end = (p | ((1u << MEMORY_PAGE_BITS) - 1)) + 1, stop = end < page_end ? end : page_end;
        size_t first = (p & ((1u << MEMORY_PAGE_BITS) - 1)) >> page->shift;
        size_t last = ((stop - 1) & ((1u << MEMORY_PAGE_BITS) - 1)) >> page->shift;
        for (size_t i = first; i <= last; i++) judge(page->cells[i], a);
        p = stop;
    }
}
