/* base/cpu.h - what the processor offers and how many cores we may use. */
#ifndef BASE_CPU_H
#define BASE_CPU_H

#include "base/status.h"

enum cpu_isa { CPU_SCALAR, CPU_AVX2, CPU_AVX512 }; /* AVX2 means AVX2+FMA+F16C; AVX512 means
                                                    * F+BW+DQ+VL */

/* Best level of this processor, lowered by the environment variable STOKER_MAX_ISA (scalar, avx2,
 * avx512), which exists for tests and for comparing machines. Read anew at each call; callers keep
 * it. */
enum cpu_isa cpu_isa_best(void);
const char *cpu_isa_name(enum cpu_isa isa);
bool cpu_has_bf16(void); /* AVX512_BF16 or AMX: bf16 products may be faster than f32 */
/* Beside CPU_AVX512, carry-less multiplication on its registers. Costs no CPUID: may be asked at
 * each call. */
bool cpu_has_vpclmulqdq(void);
/* AMX tiles with bf16: asks the system for their state, for this whole process. False: not there,
 * or lowered by STOKER_MAX_ISA. */
bool cpu_amx_enable(void);
void cpu_name(char *buf, size_t size_bytes);

/* Processors this process may use (hardware threads count each): affinity mask, lowered by the
 * cgroup's CPU quota (MEM-26). At least 1. `root` as in mem_limits_read. What computes asks
 * base/topology.h for cores. */
uint32_t cpu_count(const char *root);
/* Their numbers, ascending, by the affinity mask alone; *out is the caller's (sys_free), NULL with 0:
 * unreadable. */
uint32_t cpu_list(const char *root, uint32_t **out);
/* Whole cores that the cgroups' quota allows; UINT32_MAX: no quota. Rounded down, at least 1. */
uint32_t cpu_quota(const char *root);

/* Writes back and drops what caches of all cores hold of these bytes, so that the next use finds them
 * in memory: for measurements. 4 to 10 GB/s. Does nothing without x86-64. */
void cpu_cache_flush(const void *p, uint64_t size_bytes);

/* Floating point state of the calling thread: flush subnormals to zero on (returns the old state)
 * and back. They nest; an inner pair changes nothing and costs little. */
uint32_t cpu_ftz_enter(void);
void cpu_ftz_leave(uint32_t saved);
bool cpu_ftz_was_on(uint32_t saved); /* what _enter returned: is this pair an inner one? */
/* Whoever sees what this thread stores from now on sees its non-temporal stores so far, too. */
void cpu_stream_fence(void);

#endif
