/* tests/gpu/simt/fiber.cpp - stacks, and the switch from one to another.
 *
 * Owns the stacks: of one size, each with a page below it that may not be touched, kept and used again for the life
 * of the program. Knows nothing of CUDA. The switch saves what a called function must preserve; on processors
 * other than x86-64 swapcontext does it, slower.
 *
 * One OS thread. */
#include "simt_impl.h"
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace {
constexpr size_t STACK_BYTES = 128u << 10, GUARD_BYTES = 4096;
}

struct fiber {
    char *stack;                  /* lowest usable byte */
    void (*entry)(fiber *);
#if defined(__x86_64__)
    void *sp;
#else
    ucontext_t context;
#endif
};

static fiber fiber_main;          /* the OS thread's own */

#if defined(__x86_64__)
extern "C" void simt_switch_stack(void **save, void *load);
asm(".text\n"
    ".globl simt_switch_stack\n"
    ".hidden simt_switch_stack\n"
    ".type simt_switch_stack, @function\n"
    "simt_switch_stack:\n"
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
    "    ret\n"
    ".size simt_switch_stack, .-simt_switch_stack\n");

static fiber *starting;

static void begin(void)
{
    fiber *f = starting;
    f->entry(f);
    abort(); /* an entry does not return */
}

void fiber_restart(fiber *f)
{
    /* Six registers, where `ret` goes, and above it what a caller would have left: a return address of
     * zero, so that the stack is aligned as after a call and debuggers stop there. */
    void **top = reinterpret_cast<void **>(f->stack + STACK_BYTES);
    for (int i = 1; i <= 8; i++) top[-i] = nullptr;
    top[-2] = reinterpret_cast<void *>(begin);
    f->sp = top - 8;
}

void fiber_switch(fiber *from, fiber *to)
{
    if (!from) from = &fiber_main;
    if (!to) to = &fiber_main;
    starting = to;
    simt_switch_stack(&from->sp, to->sp);
}
#else
static fiber *starting;

static void begin(void)
{
    fiber *f = starting;
    f->entry(f);
    abort();
}

void fiber_restart(fiber *f)
{
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = STACK_BYTES;
    f->context.uc_link = nullptr;
    makecontext(&f->context, begin, 0);
}

void fiber_switch(fiber *from, fiber *to)
{
    if (!from) from = &fiber_main;
    if (!to) to = &fiber_main;
    starting = to;
    swapcontext(&from->context, &to->context);
}
#endif

fiber *fiber_new(void (*entry)(fiber *))
{
    void *m = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED || mprotect(m, GUARD_BYTES, PROT_NONE) != 0) {
        perror("simt: no memory for the stack of a thread");
        abort();
    }
    fiber *f = new fiber();
    f->stack = static_cast<char *>(m) + GUARD_BYTES;
    f->entry = entry;
    fiber_restart(f);
    return f;
}

uintptr_t fiber_stack_low(const fiber *f) { return reinterpret_cast<uintptr_t>(f->stack); }
uintptr_t fiber_stack_high(const fiber *f) { return fiber_stack_low(f) + STACK_BYTES; }
