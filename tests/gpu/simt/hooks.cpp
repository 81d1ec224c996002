/* tests/gpu/simt/hooks.cpp - the calls that gcc and clang put into a .cu file: before each access to memory
 * (-fsanitize=thread), and where an address is misaligned for its type, an index beyond its array, a shift too far, a
 * signed sum too large, a divisor zero (-fsanitize=alignment,bounds,...). The compilers' own libraries for
 * these are not linked. Names and arguments: LLVM's documentation and headers of both sanitizers' interfaces.
 *
 * On a kernel's fiber; in the host's part of a .cu file accesses are none of our business, and undefined behaviour ends
 * the program. */
#include "simt_impl.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

inline void check(const volatile void *address, size_t bytes, enum memory_kind kind, const void *pc)
{
    if (!simt_here.running || simt_here.os_thread != exec_os_thread()) return;
    uintptr_t p = reinterpret_cast<uintptr_t>(address);
    if (p - simt_here.stack_low < simt_here.stack_size) return; /* the thread's own */
    exec_stats.accesses++;
    if (--simt_here.countdown == 0) exec_preempt();
    memory_access(p, bytes, kind, pc);
}

} // namespace

#define PC __builtin_return_address(0)
#define HOOKS(bytes)                                                                               \
    void __tsan_read##bytes(void *p) { check(p, bytes, MEMORY_READ, PC); }                         \
    void __tsan_write##bytes(void *p) { check(p, bytes, MEMORY_WRITE, PC); }                       \
    void __tsan_unaligned_read##bytes(void *p) { check(p, bytes, MEMORY_READ, PC); }               \
    void __tsan_unaligned_write##bytes(void *p) { check(p, bytes, MEMORY_WRITE, PC); }

extern "C" {
void __tsan_init(void) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void *p, unsigned long n) { check(p, n, MEMORY_READ, PC); }
void __tsan_write_range(void *p, unsigned long n) { check(p, n, MEMORY_WRITE, PC); }
void __tsan_vptr_update(void **p, void *) { check(p, sizeof *p, MEMORY_WRITE, PC); }
void __tsan_vptr_read(void **p) { check(p, sizeof *p, MEMORY_READ, PC); }

void simt_atomic_check(const void *p, size_t n) { check(p, n, MEMORY_ATOMIC, PC); }

void *simt_memcpy(void *d, const void *s, size_t n)
{
    check(s, n, MEMORY_READ, PC);
    check(d, n, MEMORY_WRITE, PC);
    return memcpy(d, s, n);
}

void *simt_memmove(void *d, const void *s, size_t n)
{
    check(s, n, MEMORY_READ, PC);
    check(d, n, MEMORY_WRITE, PC);
    return memmove(d, s, n);
}

void *simt_memset(void *d, int v, size_t n)
{
    check(d, n, MEMORY_WRITE, PC);
    return memset(d, v, n);
}
}

/* ------------------------------------------------------------------------------------------- undefined behaviour */

namespace {

struct place { const char *file; uint32_t line, column; };
struct type { uint16_t kind, info; char name[1]; };
struct data_mismatch { place at; const type *t; unsigned char log_align, access; };
struct data_two { place at; const type *a, *b; };

[[gnu::format(printf, 4, 5)]] void undefined(enum simt_fault kind, const place &at, const void *pc, const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (!simt_here.running) {
        fprintf(stderr, "%s:%u: outside of kernels: %s\n", at.file ? at.file : "?", at.line, text);
        abort();
    }
    exec_fail(kind, pc, "%s", text);
}

} // namespace

#define ARITHMETIC(handler, what)                                                                    \
    void __ubsan_handle_##handler(data_two *d, uintptr_t, uintptr_t)                                  \
    {                                                                                              \
        undefined(SIMT_UNDEFINED, d->at, PC, what " of type %s", d->a->name);                      \
    }

extern "C" {
void __ubsan_handle_type_mismatch_v1(data_mismatch *d, uintptr_t p)
{
    size_t align = (size_t)1 << d->log_align;
    if (p % align == 0) return;
    undefined(SIMT_MISALIGNED, d->at, PC, "accesses a %s at 0x%zx, which is not a multiple of %zu", d->t->name, (size_t)p, align);
}
void __ubsan_handle_out_of_bounds(data_two *d, uintptr_t index)
{
    undefined(SIMT_UNDEFINED, d->at, PC, "has index %lld in an array of type %s", (long long)index, d->a->name);
}
ARITHMETIC(add_overflow, "has a sum that overflows the range")
ARITHMETIC(sub_overflow, "has a difference that overflows the range")
ARITHMETIC(mul_overflow, "has a product that overflows the range")
ARITHMETIC(divrem_overflow, "has a division by zero or an overflow by division")
ARITHMETIC(shift_out_of_bounds, "has a shift by too much, or of a negative value")
void __ubsan_handle_negate_overflow(data_two *d, uintptr_t)
{
    undefined(SIMT_UNDEFINED, d->at, PC, "has a negation that overflows the range of type %s", d->a->name);
}
}
