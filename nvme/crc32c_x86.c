/* nvme/crc32c_x86.c - CRC32C with the crc32 instruction: three chains at once, joined by carry-less
 * multiplication.
 *
 * One crc32q takes three cycles and a new one can begin in each, so three independent blocks of
 * equal length N are run side by side. The register of a block is then moved past the following N
 * (or 2N) bytes: that is a multiplication by x^(8N) modulo the polynomial. In the reflected order a
 * product of two 32-bit registers, fed to crc32q as 64 bits, is multiplied by x^33 more; the
 * constants below are therefore x^(8N-33) and x^(16N-33), computed bit by bit (tests/nvme compares
 * with the table). Compiled with -msse4.2 -mpclmul; called only where crc32c_x86_usable() says so.
 * No state, any thread. */
#include "nvme/crc32c_impl.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

int crc32c_x86_usable(void)
{
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

struct block { uint64_t size_bytes; uint32_t past_one, past_two; };
static const struct block large = { 8192, 0x54a86326u, 0x1dc403ccu },
                          small = { 256, 0xb9e02b86u, 0xdd7e3b0cu };

static inline uint64_t load64(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

static inline uint64_t move_past(uint64_t crc, uint32_t constant)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((int64_t)crc),
                                           _mm_cvtsi64_si128((int64_t)constant), 0);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

/* As many groups of three blocks as fit; returns the bytes taken. */
static inline uint64_t run_blocks(uint64_t *crc, const uint8_t *p, uint64_t size_bytes,
                                  const struct block *b)
{
    uint64_t n = b->size_bytes, taken = 0;
    for (; size_bytes - taken >= 3 * n; taken += 3 * n, p += 3 * n) {
        uint64_t c0 = *crc, c1 = 0, c2 = 0;
        for (uint64_t i = 0; i < n; i += 8) {
            c0 = _mm_crc32_u64(c0, load64(p + i));
            c1 = _mm_crc32_u64(c1, load64(p + n + i));
            c2 = _mm_crc32_u64(c2, load64(p + 2 * n + i));
        }
        *crc = move_past(c0, b->past_two) ^ move_past(c1, b->past_one) ^ c2;
    }
    return taken;
}

uint32_t crc32c_x86(uint32_t start, const void *buf, uint64_t size_bytes)
{
    const uint8_t *p = buf, *end = p + size_bytes;
    uint64_t crc = (uint32_t)~start;
    p += run_blocks(&crc, p, (uint64_t)(end - p), &large);
    p += run_blocks(&crc, p, (uint64_t)(end - p), &small);
    for (; end - p >= 8; p += 8) crc = _mm_crc32_u64(crc, load64(p));
    for (; p < end; p++) crc = _mm_crc32_u8((uint32_t)crc, *p);
    return ~(uint32_t)crc;
}
#endif
