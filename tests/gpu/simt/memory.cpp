/* tests/gpu/simt/memory.cpp - what a kernel may touch: registered device memory and the shared arrays; which of
 * their bytes have been written; and the judgement of one access (order.cpp judges races).
 *
 * Owns the list of ranges, sorted, without overlap, and for a while the names of those that are gone. Shared
 * arrays are ranges like any other, known from the program's symbols, and become unwritten with every block.
 *
 * One OS thread; memory_access on a kernel's fiber. */
#include "memory_impl.h"
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

namespace {

constexpr unsigned char POISON = 0xff;  /* NaN in every floating-point type, -1 in integers */
constexpr unsigned char GUARD = 0xa5;
constexpr size_t GUARD_BYTES = 256;
constexpr size_t SHARED_BYTES_MAX = 49152; /* static shared memory of a block (CUDA C++ Programming Guide) */
constexpr size_t GONE_MAX = 256;
constexpr size_t FAR_BYTES = 4096;      /* further from a buffer than this is not its end overrun */

struct gone { uintptr_t base, end; std::string name; };
struct kept { char *block; size_t size; };

/* Never destroyed: tests may use them until the very end. */
std::vector<memory_range *> &ranges = *new std::vector<memory_range *>();  /* by base */
std::vector<memory_range *> &touched = *new std::vector<memory_range *>(); /* shared arrays used by the running block */
std::deque<gone> &gone_ranges = *new std::deque<gone>();
std::deque<kept> &kept_blocks = *new std::deque<kept>(); /* freed by simt_free, not yet given back */
memory_range *recent[64];
unsigned checks = SIMT_CHECK_ALL;
bool shared_known;

uintptr_t address(const void *p) { return reinterpret_cast<uintptr_t>(p); }

/* ------------------------------------------------------------------------------------------- ranges */

/* Index of the first range that begins after p. */
size_t index_after(uintptr_t p)
{
    return (size_t)(std::upper_bound(ranges.begin(), ranges.end(), p,
                                     [](uintptr_t v, const memory_range *r) { return v < r->base; }) -
                    ranges.begin());
}

memory_range *find(uintptr_t p)
{
    memory_range *&slot = recent[(p >> 10) & 63];
    if (slot && p >= slot->base && p < slot->end) return slot;
    size_t i = index_after(p);
    if (i == 0 || p >= ranges[i - 1]->end) return nullptr;
    return slot = ranges[i - 1];
}

memory_range *range_add(uintptr_t base, size_t size, const char *name, unsigned flags, bool shared)
{
    size_t i = index_after(base);
    if ((i > 0 && ranges[i - 1]->end > base) || (i < ranges.size() && ranges[i]->base < base + size)) return nullptr;
    memory_range *r = new memory_range();
    r->base = base;
    r->end = base + size;
    r->name = name;
    r->flags = flags;
    r->shared = shared;
    r->written.assign((size + 63) / 64, flags & SIMT_WRITTEN ? ~UINT64_C(0) : 0);
    r->pages.resize(((r->end - 1) >> MEMORY_PAGE_BITS) - (base >> MEMORY_PAGE_BITS) + 1);
    ranges.insert(ranges.begin() + (ptrdiff_t)i, r);
    gone_ranges.erase(std::remove_if(gone_ranges.begin(), gone_ranges.end(),
                                     [&](const gone &g) { return g.base < r->end && r->base < g.end; }),
                      gone_ranges.end());
    return r;
}

void know_shared(void)
{
    shared_known = true;
    const symbols_shared *s;
    for (size_t n = symbols_shared_arrays(&s); n-- > 0; s++) {
        /* The linker keeps one of equal arrays of several files: the second one is the first. */
        if (range_add(s->base, s->size_bytes, s->name, 0, true))
            memset(reinterpret_cast<void *>(s->base), POISON, s->size_bytes);
    }
}

/* ------------------------------------------------------------------------------------------- written bytes */

/* Calls f(word, mask) for the bits of bytes [offset, offset + n). */
template <typename F> void each_word(memory_range &r, size_t offset, size_t n, F f)
{
    while (n > 0) {
        size_t bit = offset & 63, take = 64 - bit < n ? 64 - bit : n;
        uint64_t mask = (take == 64 ? ~UINT64_C(0) : (UINT64_C(1) << take) - 1) << bit;
        f(r.written[offset >> 6], mask);
        offset += take;
        n -= take;
    }
}

uint64_t count_unwritten(memory_range &r, size_t offset, size_t n)
{
    uint64_t missing = 0;
    each_word(r, offset, n, [&](uint64_t &w, uint64_t m) { missing += (uint64_t)__builtin_popcountll(~w & m); });
    return missing;
}

bool all_written(memory_range &r, size_t offset, size_t n)
{
    uint64_t missing = 0;
    each_word(r, offset, n, [&](uint64_t &w, uint64_t m) { missing |= ~w & m; });
    return missing == 0;
}

void mark_written(memory_range &r, size_t offset, size_t n, bool written)
{
    each_word(r, offset, n, [&](uint64_t &w, uint64_t m) { w = written ? w | m : w & ~m; });
}

/* ------------------------------------------------------------------------------------------- sentences */

const char *verb(enum memory_kind k)
{
    return k == MEMORY_READ ? "reads" : k == MEMORY_WRITE ? "writes" : "atomically changes";
}

/* Where p is, for a person, when it is in no range. No objects that own memory: a fault leaves this stack. */
enum simt_fault name_outside(uintptr_t p, char *text, size_t size)
{
    for (const gone &g : gone_ranges) {
        if (p < g.base || p >= g.end) continue;
        snprintf(text, size, "at offset %zu of '%s' (%zu bytes), which was freed", (size_t)(p - g.base), g.name.c_str(),
                 (size_t)(g.end - g.base));
        return SIMT_FREED;
    }
    size_t i = index_after(p);
    const memory_range *before = i > 0 ? ranges[i - 1] : nullptr, *after = i < ranges.size() ? ranges[i] : nullptr;
    size_t behind = before ? p - before->end : SIZE_MAX, ahead = after ? after->base - p : SIZE_MAX;
    const memory_range *near = behind <= ahead ? before : after;
    const char *what = exec_on_stack(p) ? "another thread's local memory" : "no device or shared memory";
    if (!near)
        snprintf(text, size, "at 0x%" PRIxPTR ", which is %s", p, what);
    else if (behind > FAR_BYTES && ahead > FAR_BYTES)
        snprintf(text, size, "at 0x%" PRIxPTR ", which is %s (a host pointer?); the nearest buffer, '%s', is %zu bytes away",
                 p, what, near->name.c_str(), behind < ahead ? behind : ahead);
    else
        snprintf(text, size, "at 0x%" PRIxPTR ", %zu bytes %s of '%s' (%zu bytes): %s", p, behind <= ahead ? behind : ahead,
                 behind <= ahead ? "after the end" : "before the start", near->name.c_str(), near->size(), what);
    return SIMT_BOUNDS;
}

void fail_outside(const char *who, uintptr_t p, size_t n, enum memory_kind k, const void *pc)
{
    char where[512];
    enum simt_fault kind = name_outside(p, where, sizeof where);
    exec_fail(kind, pc, "%s%s %zu bytes %s", who, verb(k), n, where);
}

void fail_unwritten(const char *who, memory_range &r, size_t offset, size_t n, const void *pc)
{
    size_t first = offset;
    while (all_written(r, first, 1)) first++;
    exec_fail(SIMT_UNWRITTEN, pc, "%sreads %zu bytes at offset %zu of %s'%s' (%zu bytes), and nobody has written byte %zu",
              who, n, offset, r.shared ? "the shared array " : "", r.name.c_str(), r.size(), first);
}

/* Bounds and written bytes, which do not depend on who accesses. False: a fault (outside of kernels only; in one
 * it does not return). */
bool judge(const char *who, memory_range *r, uintptr_t p, size_t n, enum memory_kind k, const void *pc)
{
    if (!r) {
        fail_outside(who, p, n, k, pc);
        return false;
    }
    size_t offset = p - r->base;
    if (n > r->end - p) {
        exec_fail(SIMT_BOUNDS, pc, "%s%s %zu bytes at offset %zu of '%s' (%zu bytes): %zu beyond its end", who, verb(k), n,
                  offset, r->name.c_str(), r->size(), (size_t)(p + n - r->end));
        return false;
    }
    if (k != MEMORY_READ && (r->flags & SIMT_READ_ONLY)) {
        exec_fail(SIMT_READ_ONLY_WRITTEN, pc, "%s%s %zu bytes at offset %zu of '%s', which is only to be read", who, verb(k),
                  n, offset, r->name.c_str());
        return false;
    }
    if (k != MEMORY_WRITE && (checks & SIMT_CHECK_UNWRITTEN) && !all_written(*r, offset, n)) {
        fail_unwritten(who, *r, offset, n, pc);
        return false;
    }
    return true;
}

bool part_of_launch(uintptr_t p, size_t n)
{
    const simt_launch *l = simt_here.launch;
    return p - address(l->arguments) < l->argument_bytes || exec_is_builtin(p);
}

} // namespace

void memory_access(uintptr_t p, size_t n, enum memory_kind k, const void *pc)
{
    if (!(checks & SIMT_CHECK_BOUNDS) || n == 0) return;
    memory_range *r = find(p);
    if (!r && k == MEMORY_READ && (part_of_launch(p, n) || symbols_constant(p, n))) return;
    if (!judge("", r, p, n, k, pc)) return;
    if (r->shared && r->block != simt_here.block_first) {
        r->block = simt_here.block_first;
        touched.push_back(r);
    }
    if (checks & SIMT_CHECK_RACES) order_access(*r, p, n, k, pc);
    if (k != MEMORY_READ) mark_written(*r, p - r->base, n, true);
    if (simt_watch && !r->shared) simt_watch(reinterpret_cast<void *>(p), n, k != MEMORY_READ);
}

bool memory_checked(void) { return checks != 0; }

void memory_block_begin(void)
{
    if (!shared_known) know_shared();
}

void memory_block_end(void)
{
    size_t total = 0;
    for (memory_range *r : touched) {
        total += r->size();
        memset(reinterpret_cast<void *>(r->base), POISON, r->size());
        mark_written(*r, 0, r->size(), false);
    }
    touched.clear();
    if (total > exec_stats.shared_bytes_max) exec_stats.shared_bytes_max = total;
    if (total > SHARED_BYTES_MAX)
        exec_fail(SIMT_LAUNCH, nullptr, "a block uses %zu bytes of static shared memory, and a card gives %zu", total,
                  SHARED_BYTES_MAX);
}

void memory_forget_order(void)
{
    for (memory_range *r : ranges) {
        for (auto &page : r->pages) page.reset();
        r->block = 0;
    }
}

/* ------------------------------------------------------------------------------------------- simt.h */

extern "C" void (*simt_watch)(const void *, size_t, bool);
void (*simt_watch)(const void *, size_t, bool) = nullptr;

extern "C" void simt_checks(unsigned c) { checks = c ? c | SIMT_CHECK_BOUNDS : 0; }

extern "C" bool simt_register(void *base, size_t size, const char *name, unsigned flags)
{
    if (!shared_known) know_shared();
    return size == 0 || range_add(address(base), size, name, flags, false) != nullptr;
}

extern "C" void simt_unregister(void *base)
{
    size_t i = index_after(address(base));
    if (i == 0 || ranges[i - 1]->base != address(base)) return;
    memory_range *r = ranges[i - 1];
    memset(recent, 0, sizeof recent);
    gone_ranges.push_front({ r->base, r->end, r->name });
    if (gone_ranges.size() > GONE_MAX) gone_ranges.pop_back();
    ranges.erase(ranges.begin() + (ptrdiff_t)i - 1);
    delete r;
}

extern "C" void *simt_alloc(size_t size, const char *name)
{
    size_t whole = (size + 2 * GUARD_BYTES + 255) & ~(size_t)255;
    char *block = static_cast<char *>(aligned_alloc(256, whole)), *p = block + GUARD_BYTES;
    if (!block) {
        fprintf(stderr, "simt: no memory for %zu bytes of '%s'\n", size, name);
        abort();
    }
    memset(block, GUARD, whole);
    memset(p, POISON, size);
    if (!shared_known) know_shared();
    if (!range_add(address(p), size, name, 0, false)) abort(); /* of no bytes: a name for who follows it */
    return p;
}

extern "C" void simt_free(void *base)
{
    if (!base) return;
    char *p = static_cast<char *>(base), *block = p - GUARD_BYTES;
    size_t after = index_after(address(p));
    memory_range *r = after > 0 ? ranges[after - 1] : nullptr;
    if (!r || r->base != address(p)) {
        fprintf(stderr, "simt_free: %p is no memory of simt_alloc, or was freed\n", base);
        abort();
    }
    size_t size = r->size(), whole = (size + 2 * GUARD_BYTES + 255) & ~(size_t)255;
    for (size_t i = 0; i < whole; i++)
        if ((i < GUARD_BYTES || i >= GUARD_BYTES + size) && (unsigned char)block[i] != GUARD) {
            exec_fail(SIMT_BOUNDS, nullptr, "something that is no kernel has written %s '%s' (%zu bytes)",
                      i < GUARD_BYTES ? "before the start of" : "after the end of", r->name.c_str(), size);
            break;
        }
    simt_unregister(base);
    kept_blocks.push_back({ block, whole });
    size_t held = 0;
    for (const kept &k : kept_blocks) held += k.size;
    while (kept_blocks.size() > GONE_MAX || (held > (64u << 20) && kept_blocks.size() > 1)) {
        held -= kept_blocks.front().size;
        free(kept_blocks.front().block);
        kept_blocks.pop_front();
    }
}

extern "C" void simt_read_only(void *base)
{
    memory_range *r = find(address(base));
    if (r) r->flags |= SIMT_READ_ONLY;
}

extern "C" void simt_written(const void *p, size_t size)
{
    memory_range *r = size ? find(address(p)) : nullptr;
    if (r && size <= r->end - address(p)) mark_written(*r, address(p) - r->base, size, true);
}

extern "C" void simt_poison(void *p, size_t size)
{
    memory_range *r = size ? find(address(p)) : nullptr;
    if (!r || size > r->end - address(p)) return;
    memset(p, POISON, size);
    mark_written(*r, address(p) - r->base, size, false);
}

extern "C" uint64_t simt_unwritten_bytes(const void *p, size_t size)
{
    memory_range *r = size ? find(address(p)) : nullptr;
    if (!r || size > r->end - address(p)) return size;
    return count_unwritten(*r, address(p) - r->base, size);
}

extern "C" bool simt_access(const char *what, const void *p, size_t size, bool write)
{
    if (size == 0) return true;
    memory_range *r = find(address(p));
    std::string who = std::string(what) + " ";
    if (!judge(who.c_str(), r, address(p), size, write ? MEMORY_WRITE : MEMORY_READ, nullptr)) return false;
    if (write) mark_written(*r, address(p) - r->base, size, true);
    return true;
}
