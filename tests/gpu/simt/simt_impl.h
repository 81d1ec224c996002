/* tests/gpu/simt/simt_impl.h - what the executor's own files know of each other:
 *   fiber.cpp    stacks and the switch between them
 *   exec.cpp     launches, blocks, threads, barriers and warp operations
 *   memory.cpp   registered memory, shared arrays, which bytes have been written
 *   order.cpp    races: who used each byte last
 *   hooks.cpp    the calls that compilers put before each access (-fsanitize=thread,...)
 *   symbols.cpp  names of kernels, shared arrays and source lines, from the program's own file
 *   runtime.cpp  what of CUDA's runtime a launch needs; replaced by a larger stand-in
 * None of these is compiled with instrumentation. One OS thread. */
#ifndef TESTS_SIMT_IMPL_H
#define TESTS_SIMT_IMPL_H

#include "include/simt_device.h"
#include "simt.h"
#undef memcpy
#undef memmove
#undef memset

#define SIMT_BLOCK_MAX 1024 /* threads of a block */

/* --- fiber.cpp */
struct fiber;
struct fiber *fiber_new(void (*entry)(struct fiber *)); /* ends the program where memory is short */
void fiber_restart(struct fiber *f);                    /* next switch to it begins at entry */
void fiber_switch(struct fiber *from, struct fiber *to);  /* NULL: the OS thread's own stack */
uintptr_t fiber_stack_low(const struct fiber *f);
uintptr_t fiber_stack_high(const struct fiber *f);

/* --- exec.cpp */
struct simt_where {             /* the running block; memory.cpp orders accesses by it */
    bool running;               /* a kernel's thread is running (hooks return at once otherwise) */
    uintptr_t stack_low, stack_size;
    uint32_t thread;            /* linear index in the block */
    uint32_t clock;             /* of this thread's lane: grows at each __syncwarp */
    const uint32_t *knows;      /* accesses of lane j of this warp with a clock up to [j] come before now */
    /* Serial numbers of intervals between barriers, one sequence for the program: */
    uint32_t serial, block_first, launch_first;
    uint64_t countdown;         /* accesses until another thread may run */
    const struct simt_launch *launch;
    const void *os_thread;      /* which runs the launch: another one may be in the host's part of a .cu file */
};
extern struct simt_where simt_here;
inline const void *exec_os_thread(void)
{
    static thread_local char here;
    return &here;
}
void exec_preempt(void);
bool exec_on_stack(uintptr_t p);    /* of any thread */
bool exec_is_builtin(uintptr_t p);  /* threadIdx and its like */
/* Text of a thread (linear) of the block that owns this serial: "block (1,0,0), thread (3,0,0)". */
void exec_name_thread(uint32_t serial, uint32_t thread, char *out, size_t size);
/* Keeps the fault, with its sentence; does not return when a kernel is running. pc: where; NULL: unknown. */
__attribute__((format(printf, 3, 4))) void exec_fail(enum simt_fault kind, const void *pc, const char *fmt, ...);
extern struct simt_stats exec_stats;
uint64_t exec_random(void);

/* --- memory.cpp */
enum memory_kind { MEMORY_READ, MEMORY_WRITE, MEMORY_ATOMIC };
void memory_access(uintptr_t p, size_t bytes, enum memory_kind kind, const void *pc);
bool memory_checked(void);     /* some check is made */
void memory_block_begin(void); /* shared arrays become unwritten */
void memory_block_end(void);
void memory_forget_order(void); /* serial numbers begin anew */

/* --- symbols.cpp */
struct symbols_shared { uintptr_t base; size_t size_bytes; const char *name; };
/* Static arrays inside functions, which are what __shared__ compiles to. */
size_t symbols_shared_arrays(const struct symbols_shared **out);
const char *symbols_function(const void *address); /* without its parameters; never NULL */
/* "file.cu:12", or "" where it cannot be told. */
const char *symbols_line(const void *pc);
bool symbols_constant(uintptr_t p, size_t bytes); /* the program's own read-only data */

#endif
