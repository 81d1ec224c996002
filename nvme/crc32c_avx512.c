/* nvme/crc32c_avx512.c - CRC32C by folding with carry-less multiplication on 512-bit registers.
 *
 * Source of the method: Gopal and others, "Fast CRC Computation for Generic Polynomials Using
 * PCLMULQDQ Instruction", Intel, 2009. The message is a polynomial over GF(2) of which only the
 * remainder modulo P counts. Sixteen bytes A = F x^64 + S (F: the first eight bytes) that lie d
 * bits before another sixteen are added to those as F (x^(d+64) mod P) + S (x^d mod P): two
 * products of 64 by 32 bits, which fit into 128. In the reflected order bit i of F or S is
 * x^(63-i), bit i of a constant x^(31-i), bit i of the sum x^(127-i): what lies at bit i+j is
 * x^(94-i-j) and is read as x^(127-i-j), so x^33 more is in every product; the constants are
 * x^(d+64-33) and x^(d-33). tests/nvme computes each of them from P. The last 64 bytes go through
 * the crc32 instruction, which is the reduction: after A it holds A x^32 mod P.
 *
 * Compiled with flags of its own; called only where crc32c_avx512_usable() says so. No state, any
 * thread. */
#include "nvme/crc32c_impl.h"

#if defined(__x86_64__)
#include "base/cpu.h"

#include <immintrin.h>

enum {
    LINE_BYTES = 64, /* a register */
    LINES = 8,       /* side by side: a fold takes nine cycles, and one can begin every two */
    /* Lines of a buffer that lies in memory are asked for this far ahead: 20 % more than the
     * processor's own prefetcher gives (a Xeon with AMX; 1 KiB does as well, 4 KiB does not), and
     * nothing lost in cache. */
    AHEAD_BYTES = 2048
};

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

const struct crc32c_fold crc32c_folds[2] = {
    { LINES * LINE_BYTES * 8, 0xbd6f81f8u, 0xdd7e3b0cu },
    { LINE_BYTES * 8, 0x740eef02u, 0x9e4addf8u },
};

int crc32c_avx512_usable(void) { return cpu_has_vpclmulqdq() && crc32c_x86_usable(); }

static inline __m512i load_line(const uint8_t *p) { return _mm512_loadu_si512(p); }

static inline __m512i load_constants(const struct crc32c_fold *f)
{
    return _mm512_broadcast_i32x4(_mm_set_epi64x(f->second, f->first));
}

/* `line` moved past f's bits and added to `next`. */
static inline __m512i fold(__m512i line, __m512i constants, __m512i next)
{
    enum { XOR_OF_THREE = 0x96 };
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(line, constants, 0x00),
                                     _mm512_clmulepi64_epi128(line, constants, 0x11), next,
                                     XOR_OF_THREE);
}

/* As many lines as there are, at least LINES; `p` moves past them. */
static inline __m512i fold_lines(uint32_t crc, const uint8_t **p, const uint8_t *end)
{
    const uint8_t *at = *p;
    __m512i line[LINES], constants = load_constants(&crc32c_folds[0]);
    UNROLL for (int i = 0; i < LINES; i++) line[i] = load_line(at + LINE_BYTES * i);
    /* a start is the same as its bits in the message's first ones */
    line[0] = _mm512_xor_si512(line[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (at += LINES * LINE_BYTES; end - at >= LINES * LINE_BYTES; at += LINES * LINE_BYTES) {
        uintptr_t ahead = (uintptr_t)at + AHEAD_BYTES; /* may lie behind the end: a hint only */
        UNROLL for (int i = 0; i < LINES; i++) {
            _mm_prefetch((const char *)(ahead + LINE_BYTES * (uintptr_t)i), _MM_HINT_T0);
            line[i] = fold(line[i], constants, load_line(at + LINE_BYTES * i));
        }
    }
    constants = load_constants(&crc32c_folds[1]);
    UNROLL for (int i = 1; i < LINES; i++) line[0] = fold(line[0], constants, line[i]);
    for (; end - at >= LINE_BYTES; at += LINE_BYTES)
        line[0] = fold(line[0], constants, load_line(at));
    *p = at;
    return line[0];
}

uint32_t crc32c_avx512(uint32_t start, const void *buf, uint64_t size_bytes)
{
    const uint8_t *p = buf, *end = p + size_bytes;
    if (size_bytes < LINES * LINE_BYTES) return crc32c_x86(start, buf, size_bytes);
    uint64_t crc = 0, words[LINE_BYTES / 8];
    _mm512_storeu_si512(words, fold_lines(~start, &p, end));
    for (int i = 0; i < LINE_BYTES / 8; i++) crc = _mm_crc32_u64(crc, words[i]);
    return crc32c_x86(~(uint32_t)crc, p, (uint64_t)(end - p));
}
#endif
