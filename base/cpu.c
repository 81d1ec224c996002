/* base/cpu.c - instruction sets, the number of cores, the floating point state.
 *
 * Owns: nothing; reads the processor, the affinity mask and the cgroup's quota anew at each call.
 * Must not know: kernels, teams. Without x86-64 everything is CPU_SCALAR and the floating point
 * state is left alone.
 * Source of the CPUID bits: Intel SDM volume 2A, CPUID, and AMD APM volume 3, appendix E.
 * Thread: any. */
#include "base/cpu.h"
#include "base/cgroup.h"
#include "base/sys.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

const char *cpu_isa_name(enum cpu_isa isa)
{
    static const char *const names[] = { "scalar", "avx2", "avx512" };
    return (unsigned)isa < 3 ? names[isa] : "?";
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>

struct leaf {
    uint32_t a, b, c, d;
};

static struct leaf cpuid_leaf(uint32_t leaf, uint32_t sub)
{
    struct leaf r = { 0, 0, 0, 0 };
    if (!__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d)) r = (struct leaf){ 0, 0, 0, 0 };
    return r;
}

/* Which register state the system saves (XCR0); 0 without XSAVE. */
static uint64_t saved_state(void)
{
    if (!(cpuid_leaf(1, 0).c & (1u << 27))) return 0;
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return ((uint64_t)hi << 32) | lo;
}

static bool has_bits(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

enum { XCR0_AVX = 0x6, XCR0_AVX512 = 0xe6, XCR0_AMX = 0x60000 };

static enum cpu_isa isa_of_processor(void)
{
    struct leaf one = cpuid_leaf(1, 0), seven = cpuid_leaf(7, 0);
    uint64_t saved = saved_state();
    uint32_t fma_avx_f16c = (1u << 12) | (1u << 28) | (1u << 29);
    if (!has_bits(saved, XCR0_AVX) || !has_bits(one.c, fma_avx_f16c) || !has_bits(seven.b, 1u << 5))
        return CPU_SCALAR;
    uint32_t f_dq_bw_vl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
    return has_bits(saved, XCR0_AVX512) && has_bits(seven.b, f_dq_bw_vl) ? CPU_AVX512 : CPU_AVX2;
}

static bool vpclmulqdq_of_processor(void) { return has_bits(cpuid_leaf(7, 0).c, 1u << 10); }

bool cpu_has_bf16(void)
{
    if (cpu_isa_best() != CPU_AVX512) return false;
    bool avx512_bf16 = has_bits(cpuid_leaf(7, 1).a, 1u << 5);
    bool amx_bf16 =
        has_bits(saved_state(), XCR0_AMX) && has_bits(cpuid_leaf(7, 0).d, (1u << 22) | (1u << 24));
    return avx512_bf16 || amx_bf16;
}

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* asm/prctl.h, Linux 5.16 */

bool cpu_amx_enable(void)
{
    if (cpu_isa_best() != CPU_AVX512 || !has_bits(saved_state(), XCR0_AMX) ||
        !has_bits(cpuid_leaf(7, 1).a, 1u << 5) || /* AVX512_BF16: its conversions */
        !has_bits(cpuid_leaf(7, 0).d, (1u << 22) | (1u << 24)))
        return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

void cpu_name(char *buf, size_t size_bytes)
{
    char brand[49] = { 0 };
    if (cpuid_leaf(0x80000000u, 0).a >= 0x80000004u) {
        for (uint32_t i = 0; i < 3; i++) {
            struct leaf r = cpuid_leaf(0x80000002u + i, 0);
            memcpy(brand + 16 * i, &r, 16);
        }
    }
    const char *from = brand + strspn(brand, " ");
    snprintf(buf, size_bytes, "%s", *from ? from : "unknown x86-64");
}

enum { MXCSR_FTZ_DAZ = 0x8040 };

bool cpu_ftz_was_on(uint32_t saved) { return (saved & MXCSR_FTZ_DAZ) == MXCSR_FTZ_DAZ; }

uint32_t cpu_ftz_enter(void)
{
    uint32_t saved = _mm_getcsr();
    if (!cpu_ftz_was_on(saved)) _mm_setcsr(saved | MXCSR_FTZ_DAZ);
    return saved;
}

void cpu_ftz_leave(uint32_t saved)
{
    if (!cpu_ftz_was_on(saved)) _mm_setcsr(saved);
}

void cpu_stream_fence(void) { _mm_sfence(); }

void cpu_cache_flush(const void *p, uint64_t size_bytes)
{
    for (uint64_t at = 0; at < size_bytes; at += 64) _mm_clflush((const char *)p + at);
    _mm_mfence();
}

#else

static enum cpu_isa isa_of_processor(void) { return CPU_SCALAR; }
static bool vpclmulqdq_of_processor(void) { return false; }
bool cpu_has_bf16(void) { return false; }
bool cpu_amx_enable(void) { return false; }
void cpu_name(char *buf, size_t size_bytes) { snprintf(buf, size_bytes, "unknown processor"); }
uint32_t cpu_ftz_enter(void) { return 0; }
void cpu_ftz_leave(uint32_t saved) { (void)saved; }
bool cpu_ftz_was_on(uint32_t saved) { (void)saved; return false; }
void cpu_stream_fence(void) { }
void cpu_cache_flush(const void *p, uint64_t size_bytes) { (void)p, (void)size_bytes; }

#endif

/* Found once, before main: CPUID leaves a virtual machine (43 us for the question, measured), too
 * much for each conversion of a chunk. Asked by another constructor before this one ran, the answer
 * is CPU_SCALAR: slower, the same bits. */
static enum cpu_isa isa_found = CPU_SCALAR;
static bool vpclmulqdq_found = false;
__attribute__((constructor)) static void find_isa(void)
{
    isa_found = isa_of_processor();
    vpclmulqdq_found = vpclmulqdq_of_processor();
}

enum cpu_isa cpu_isa_best(void)
{
    enum cpu_isa best = isa_found;
    const char *limit = getenv("STOKER_MAX_ISA");
    if (!limit) return best;
    for (int isa = CPU_SCALAR; isa < (int)best; isa++)
        if (strcmp(limit, cpu_isa_name((enum cpu_isa)isa)) == 0) return (enum cpu_isa)isa;
    return best;
}

bool cpu_has_vpclmulqdq(void) { return vpclmulqdq_found && cpu_isa_best() == CPU_AVX512; }

/* --- cores ------------------------------------------------------------------------------------ */

struct cpu_mask {
    cpu_set_t *set;
    int n; /* processors it has room for */
};

static bool mask_alloc(struct cpu_mask *m, int n)
{
    m->n = n;
    m->set = sys_calloc(1, CPU_ALLOC_SIZE(n));
    return m->set != NULL;
}

static bool mask_has(const struct cpu_mask *m, int cpu)
{
    return CPU_ISSET_S((size_t)cpu, CPU_ALLOC_SIZE(m->n), m->set);
}

/* The mask grows until the kernel's fits: machines with more than 1024 processors refuse a
 * cpu_set_t. */
static bool mask_affinity(struct cpu_mask *m)
{
    for (int n = 1024; n <= 1 << 20; n *= 2) {
        if (!mask_alloc(m, n)) return false;
        int rc = sched_getaffinity(0, CPU_ALLOC_SIZE(n), m->set), why = errno;
        if (rc == 0) return true;
        sys_free(m->set);
        m->set = NULL;
        if (why != EINVAL) return false;
    }
    return false;
}

/* In a captured tree the mask is that of its proc/self/status: "Cpus_allowed:   ff,ffffffff". */
static bool mask_captured(const char *root, struct cpu_mask *m)
{
    char text[CGROUP_FILE_MAX];
    if (!cgroup_read_text(root, "/proc/self/status", text)) return false;
    const char *at = strstr(text, "Cpus_allowed:");
    if (!at) return false;
    at += strlen("Cpus_allowed:");
    const char *end = at + strcspn(at, "\n");
    if (!mask_alloc(m, (int)(end - at) * 4)) return false;
    int cpu = 0;
    while (end-- > at) { /* the last digit holds processors 0 to 3 */
        char digit[2] = { *end, '\0' };
        if (!strchr("0123456789abcdefABCDEF", *end)) continue;
        unsigned long bits = strtoul(digit, NULL, 16);
        for (int b = 0; b < 4; b++, cpu++)
            if (bits >> b & 1) CPU_SET_S((size_t)cpu, CPU_ALLOC_SIZE(m->n), m->set);
    }
    return true;
}

static bool mask_read(const char *root, struct cpu_mask *m)
{
    m->set = NULL;
    return (root && *root && mask_captured(root, m)) || mask_affinity(m);
}

/* Lowers *arg to the whole cores that this folder's quota allows. Rounded down: a thread more
 * than the quota has would be stopped in every period, and a team waits for its slowest member. */
static void visit_quota(const char *root, const char *dir, bool v2, void *arg)
{
    uint32_t *count = arg;
    uint64_t quota = UINT64_MAX, period = 0;
    if (v2) {
        char path[4096], text[CGROUP_FILE_MAX];
        snprintf(path, sizeof path, "%s/cpu.max", dir);
        unsigned long long q, p;
        if (!cgroup_read_text(root, path, text) || sscanf(text, "%llu %llu", &q, &p) != 2)
            return; /* "max 100000" */
        quota = q;
        period = p;
    } else if (!cgroup_read_number(root, dir, "cpu.cfs_quota_us", &quota)
               || !cgroup_read_number(root, dir, "cpu.cfs_period_us", &period)) {
        return;
    }
    if (quota == UINT64_MAX || period == 0) return;
    uint64_t cores = quota / period ? quota / period : 1;
    if (cores < *count) *count = (uint32_t)cores;
}

uint32_t cpu_quota(const char *root)
{
    uint32_t quota = UINT32_MAX;
    cgroup_walk(root, "cpu", visit_quota, &quota);
    return quota;
}

uint32_t cpu_list(const char *root, uint32_t **out)
{
    struct cpu_mask m;
    uint32_t n = 0;
    *out = NULL;
    if (mask_read(root, &m))
        *out = sys_calloc((size_t)CPU_COUNT_S(CPU_ALLOC_SIZE(m.n), m.set) + 1, sizeof **out);
    for (int cpu = 0; *out && cpu < m.n; cpu++)
        if (mask_has(&m, cpu)) (*out)[n++] = (uint32_t)cpu;
    sys_free(m.set);
    return n;
}

uint32_t cpu_count(const char *root)
{
    uint32_t *list, count = cpu_list(root, &list), quota = cpu_quota(root);
    sys_free(list);
    if (count == 0) count = 1;
    return count < quota ? count : quota;
}
