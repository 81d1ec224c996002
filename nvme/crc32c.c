/* nvme/crc32c.c - CRC32C: the table-driven reference and the choice of a variant.
 *
 * The reference takes eight bytes at a time with eight tables ("slicing"; Kounavis and Berry, "A
 * systematic approach to building high performance software-based CRC generators", 2005). A CRC is
 * linear, so an entry of a table is the xor of the entries of its index's bits: only 8 x 8 numbers
 * are written here, the compiler expands them to constant tables. No state, any thread. The
 * hardware variants are in crc32c_x86.c and crc32c_avx512.c (files of their own, because of their
 * compiler flags). */
#include "nvme/crc32c.h"
#include "nvme/crc32c_impl.h"

#include <string.h>

/* Entry of index i, from the eight entries of the single bits. */
#define ENTRY(i, b0, b1, b2, b3, b4, b5, b6, b7)                                                   \
    (((i) & 1 ? b0 : 0u) ^ ((i) & 2 ? b1 : 0u) ^ ((i) & 4 ? b2 : 0u) ^ ((i) & 8 ? b3 : 0u) ^       \
     ((i) & 16 ? b4 : 0u) ^ ((i) & 32 ? b5 : 0u) ^ ((i) & 64 ? b6 : 0u) ^ ((i) & 128 ? b7 : 0u))
#define ENTRIES_4(i, ...)                                                                          \
    ENTRY(i, __VA_ARGS__), ENTRY((i) + 1, __VA_ARGS__), ENTRY((i) + 2, __VA_ARGS__),               \
        ENTRY((i) + 3, __VA_ARGS__)
#define ENTRIES_16(i, ...)                                                                         \
    ENTRIES_4(i, __VA_ARGS__), ENTRIES_4((i) + 4, __VA_ARGS__), ENTRIES_4((i) + 8, __VA_ARGS__),   \
        ENTRIES_4((i) + 12, __VA_ARGS__)
#define ENTRIES_64(i, ...) \
    ENTRIES_16(i, __VA_ARGS__), ENTRIES_16((i) + 16, __VA_ARGS__), \
        ENTRIES_16((i) + 32, __VA_ARGS__), ENTRIES_16((i) + 48, __VA_ARGS__)
#define TABLE(...)                                                                                 \
    { ENTRIES_64(0, __VA_ARGS__), ENTRIES_64(64, __VA_ARGS__), ENTRIES_64(128, __VA_ARGS__),       \
      ENTRIES_64(192, __VA_ARGS__) }

/* Row k: the CRC register after the bytes (1 << bit), then k zero bytes. */
static const uint32_t table[8][256] = {
    TABLE(0xf26b8303u, 0xe13b70f7u, 0xc79a971fu, 0x8ad958cfu, 0x105ec76fu, 0x20bd8edeu, 0x417b1dbcu,
          0x82f63b78u),
    TABLE(0x13a29877u, 0x274530eeu, 0x4e8a61dcu, 0x9d14c3b8u, 0x3fc5f181u, 0x7f8be302u, 0xff17c604u,
          0xfbc3faf9u),
    TABLE(0xa541927eu, 0x4f6f520du, 0x9edea41au, 0x38513ec5u, 0x70a27d8au, 0xe144fb14u, 0xc76580d9u,
          0x8b277743u),
    TABLE(0xdd45aab8u, 0xbf672381u, 0x7b2231f3u, 0xf64463e6u, 0xe964b13du, 0xd725148bu, 0xaba65fe7u,
          0x52a0c93fu),
    TABLE(0x38116facu, 0x7022df58u, 0xe045beb0u, 0xc5670b91u, 0x8f2261d3u, 0x1ba8b557u, 0x37516aaeu,
          0x6ea2d55cu),
    TABLE(0xef306b19u, 0xdb8ca0c3u, 0xb2f53777u, 0x6006181fu, 0xc00c303eu, 0x85f4168du, 0x0e045bebu,
          0x1c08b7d6u),
    TABLE(0x68032cc8u, 0xd0065990u, 0xa5e0c5d1u, 0x4e2dfd53u, 0x9c5bfaa6u, 0x3d5b83bdu, 0x7ab7077au,
          0xf56e0ef4u),
    TABLE(0x493c7d27u, 0x9278fa4eu, 0x211d826du, 0x423b04dau, 0x847609b4u, 0x0d006599u, 0x1a00cb32u,
          0x34019664u),
};

static uint32_t crc32c_table(uint32_t crc, const void *buf, uint64_t size_bytes)
{
    const uint8_t *p = buf;
    crc = ~crc;
    for (; size_bytes >= 8; size_bytes -= 8, p += 8) {
        uint32_t lo = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                             (uint32_t)p[3] << 24);
        crc = table[7][lo & 255] ^ table[6][lo >> 8 & 255] ^ table[5][lo >> 16 & 255] ^
              table[4][lo >> 24] ^ table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^
              table[0][p[7]];
    }
    for (; size_bytes > 0; size_bytes--, p++) crc = crc >> 8 ^ table[0][(crc ^ *p) & 255];
    return ~crc;
}

static int always(void) { return 1; }

/* Best first; the first usable one is taken. "avx512" needs two multiplications for 64 bytes where
 * "sse4.2" needs eight instructions: 3.5 times its rate in cache and what memory gives outside of
 * it (a Xeon with AMX). Those that clock down much for 512 bits (Skylake-X) lack VPCLMULQDQ. */
const struct crc32c_kernel crc32c_kernels[] = {
#if defined(__x86_64__)
    { "avx512", crc32c_avx512, crc32c_avx512_usable },
    { "sse4.2", crc32c_x86, crc32c_x86_usable },
#endif
    { "table", crc32c_table, always },
    { NULL, NULL, NULL },
};

static const struct crc32c_kernel *choose(void)
{
    const struct crc32c_kernel *k = crc32c_kernels;
    /* the table ends the search; asking the compiler's cpu word costs a load */
    while (!k->usable()) k++;
    return k;
}

uint32_t crc32c(uint32_t crc, const void *buf, uint64_t size_bytes)
{
    return choose()->fn(crc, buf, size_bytes);
}

const char *crc32c_variant(void) { return choose()->name; }

/* --- parts of a message ----------------------------------------------------------------------- */

/* A register is a polynomial modulo P, reflected: bit 31 is x^0. Without start and final inversion the
 * register of a message is the sum of its parts', each times x^8 for every byte behind it; the start is
 * a part that all bytes are behind of. */

enum { POWERS = 31 }; /* x^(2^31) is x again */

/* x^(8 * 2^k) mod P */
static const uint32_t power[POWERS] = {
    0x00800000u, 0x00008000u, 0x82f63b78u, 0x6ea2d55cu, 0x18b8ea18u, 0x510ac59au, 0xb82be955u,
    0xb8fdb1e7u, 0x88e56f72u, 0x74c360a4u, 0xe4172b16u, 0x0d65762au, 0x35d73a62u, 0x28461564u,
    0xbf455269u, 0xe2ea32dcu, 0xfe7740e6u, 0xf946610bu, 0x3c204f8fu, 0x538586e3u, 0x59726915u,
    0x734d5309u, 0xbc1ac763u, 0x7d0722ccu, 0xd289cabeu, 0xe94ca9bcu, 0x05b74f3fu, 0xa51e1f42u,
    0x40000000u, 0x20000000u, 0x08000000u,
};

static uint32_t product(uint32_t a, uint32_t b)
{
    uint32_t sum = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        sum ^= a & bit ? b : 0;
        b = b >> 1 ^ (b & 1 ? 0x82f63b78u : 0);
    }
    return sum;
}

static uint32_t move_past(uint32_t crc, uint64_t bytes)
{
    for (uint32_t k = 0; bytes; k++, bytes >>= 1)
        if (bytes & 1) crc = product(power[k % POWERS], crc);
    return crc;
}

uint32_t crc32c_part(const void *buf, uint64_t size_bytes, uint64_t behind_bytes)
{
    /* from a register of zero */
    return move_past(~crc32c(UINT32_MAX, buf, size_bytes), behind_bytes);
}

uint32_t crc32c_whole(uint32_t parts, uint64_t size_bytes)
{
    return ~(parts ^ move_past(UINT32_MAX, size_bytes));
}
