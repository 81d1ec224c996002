/* formats/crc32.c - CRC-32 (IEEE), eight bytes a turn, or folded where the processor can.
 *
 * Owns: nothing; the tables are the caller's. Must not know: files.
 * The eight tables (M. Kounavis, F. Berry: "A systematic approach to building high performance
 * software-based CRC generators", 2005): t[k][b] is the remainder of byte b followed by k zero
 * bytes, so that eight bytes are looked up independently and summed.
 * Polynomials are reflected: the highest bit is the coefficient of x^0, so 1 is 0x80000000 and a
 * multiplication by x shifts right.
 * Thread: any. */
#include "formats/crc32.h"
#include "formats/crc32_impl.h"

#define POLYNOMIAL 0xedb88320u
#define FOLD_BYTES_MIN 256 /* below, the tables are as fast */

static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (; a; a <<= 1) {
        if (a & 0x80000000u) product ^= b;
        b = (b >> 1) ^ (POLYNOMIAL & (0u - (b & 1)));
    }
    return product;
}

/* x to the power of `bits`. */
static uint32_t power(uint64_t bits)
{
    uint32_t result = 0x80000000u, square = 0x40000000u;
    for (; bits; bits >>= 1) {
        if (bits & 1) result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

uint32_t crc32_join(uint32_t a, uint32_t b, uint64_t b_bytes)
{
    /* the initial values and final exclusive-ors cancel out */
    return multiply(a, power(8 * b_bytes)) ^ b;
}

void crc32_prepare(struct crc32_tables *tables)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t r = b;
        for (int bit = 0; bit < 8; bit++) r = (r >> 1) ^ (POLYNOMIAL & (0u - (r & 1)));
        tables->t[0][b] = r;
    }
    for (uint32_t b = 0; b < 256; b++)
        for (int k = 1; k < 8; k++) {
            uint32_t before = tables->t[k - 1][b];
            tables->t[k][b] = (before >> 8) ^ tables->t[0][before & 0xff];
        }
    bool folds = crc32_x86_usable();
    for (int i = 0; i < 4; i++) {
        /* past 64 and past 16 bytes; of a register's first and second half */
        uint64_t bits = (i < 2 ? 512 : 128) + (i % 2 ? -32 : 32);
        tables->fold[i] = folds ? (uint64_t)power(bits) << 1 : 0;
    }
}

static uint32_t load_le32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint32_t run_tables(const uint32_t (*t)[256], uint32_t c, const unsigned char *p,
                           size_t size_bytes)
{
    for (; size_bytes >= 8; size_bytes -= 8, p += 8) {
        uint32_t low = load_le32(p) ^ c, high = load_le32(p + 4);
        c = t[7][low & 0xff] ^ t[6][(low >> 8) & 0xff] ^ t[5][(low >> 16) & 0xff] ^
            t[4][low >> 24] ^ t[3][high & 0xff] ^ t[2][(high >> 8) & 0xff] ^
            t[1][(high >> 16) & 0xff] ^ t[0][high >> 24];
    }
    for (; size_bytes > 0; size_bytes--, p++) c = (c >> 8) ^ t[0][(c ^ *p) & 0xff];
    return c;
}

uint32_t crc32_extend(const struct crc32_tables *tables, uint32_t crc, const void *buf,
                      size_t size_bytes)
{
    const unsigned char *p = buf;
    uint32_t c = ~crc;
    if (tables->fold[0] && size_bytes >= FOLD_BYTES_MIN) {
        unsigned char rest[16]; /* has the remainder of all that was folded into it */
        size_t n = size_bytes / 16 * 16;
        crc32_x86_fold(tables->fold, c, p, n, rest);
        c = run_tables(tables->t, 0, rest, sizeof rest);
        p += n;
        size_bytes -= n;
    }
    return ~run_tables(tables->t, c, p, size_bytes);
}
